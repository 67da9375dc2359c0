"""
How far does a model see, and what happens beyond the length it was trained at? Loss by position in the window.

    python eval_length.py out/moduleformer                                    # windows of four times the trained length
    python eval_length.py out/moduleformer out/run --length 512 --bin 64      # two models, side by side
    python eval_length.py out/moduleformer --data data/toy_math --json length.json

Windows start every --stride tokens of val.bin; the loss of the token at position t of a window, given the t before it, is
averaged over all windows. A model that uses its context well has a loss that falls with position, and one that extrapolates
goes on falling behind the trained length. Models with a table of positions (moep.py) cannot be asked about longer windows.
"""

from pathlib import Path

import torch
from tqdm import tqdm

import prepare
from errors import Parser, UserError, check_writable, run_main, write_json
from loader import as_tensor, fetch
from machine import Machine
from train import build, read_checkpoint


@torch.no_grad()
def loss_by_position(model, tokens, length, stride, batch_size, machine):
    """(length,) mean nats at each position of the windows that start every `stride` tokens."""
    starts = torch.arange(0, len(tokens) - length, stride, device=machine.device)
    total = torch.zeros(length, dtype=torch.float64)
    for some in tqdm(starts.split(batch_size), unit='batch', disable=None, leave=False):
        window = fetch(tokens, some[:, None] + torch.arange(length + 1, device=machine.device))
        with machine.autocast():
            nats = model(window[:, :-1].contiguous(), window[:, 1:].contiguous(), reduction='none')[1]
        total += nats.float().cpu().double().sum(0)
    return total / len(starts)


def main():
    parser = Parser(__doc__)
    parser.add_argument('runs', nargs='+', help='run folders; their data must have the same tokenizer')
    parser.add_argument('--data', help="a data set's folder; the first run's own data if not given")
    parser.add_argument('--length', type=int, help='of a window; four times what the first run was trained at if not given')
    parser.add_argument('--stride', type=int, default=64, help='tokens between the starts of windows')
    parser.add_argument('--bin', type=int, default=64, help='positions per line of the table')
    parser.add_argument('--batch_size', type=int, default=16)
    parser.add_argument('--json', help='write the loss at every position there')
    parser.add_argument('--device', default='auto', help='cuda, mps or cpu, whichever is there')
    args = parser.parse_args()
    machine, ckpts = Machine(args.device), [read_checkpoint(run) for run in args.runs]
    first, used = ckpts[0], ckpts[0]['settings']['data']
    trained = [ckpt['settings']['seq_len'] or ckpt['config']['block_size'] for ckpt in ckpts]
    length = 4 * trained[0] if args.length is None else args.length
    if min(length, args.stride, args.bin, args.batch_size) < 1:
        raise UserError('length, stride, bin and batch_size must be at least 1')
    check_writable(args.json)
    folder = Path(args.data or Path(first['settings']['data_dir'], used if isinstance(used, str) else next(iter(used))))
    meta, tokens = prepare.load_meta(folder), as_tensor(prepare.load_bin(folder, 'val'), machine.device)
    if meta.get('slots', 1) > 1:
        raise UserError('eval_length.py reads models of tokens, not of chunks of bytes')
    if len(tokens) <= length:
        raise UserError(f'{folder}/val.bin has {len(tokens):,} tokens: too few for windows of {length:,}')
    losses = []
    for run, ckpt in zip(args.runs, ckpts):
        if ckpt['tokenizer'] != meta['tokenizer']['hash']:
            raise UserError(f'{run} was trained with another tokenizer than {folder} has')
        try:
            model = build(ckpt, block_size=max(length, ckpt['config']['block_size'])).to(machine.device).eval()
        except UserError:
            known = ckpt['config']['block_size']
            raise UserError(f'{run} has a table of {known} positions and cannot read longer windows: --length {known}') from None
        losses.append(loss_by_position(model, tokens, length, args.stride, args.batch_size, machine))

    names = [Path(run).with_suffix('').name for run in args.runs]
    width = max(8, *map(len, names)) + 2
    print(f'{folder}: {len(range(0, len(tokens) - length, args.stride)):,} windows of {length:,} tokens; mean loss by position')
    print('positions'.rjust(14) + ''.join(name.rjust(width) for name in names))
    for start in range(0, length, args.bin):
        end = min(start + args.bin, length)
        print(f'{start:6,} to {end - 1:4,}' + ''.join(f'{loss[start:end].mean():{width}.4f}' for loss in losses))
    for name, loss, T in zip(names, losses, trained):
        if T < length:
            change = loss[T:].mean() - loss[T // 2:T].mean()
            print(f'{name}: trained at {T:,}; from the second half of that to what lies beyond, the loss changes by {change:+.4f}')
    if args.json:
        rows = [dict(run=run, trained=T, loss=[round(v, 5) for v in loss.tolist()])
                for run, T, loss in zip(args.runs, trained, losses)]
        write_json(args.json, dict(data=str(folder), stride=args.stride, runs=rows))


if __name__ == '__main__':
    run_main(main)
