"""
How far does a model see, and what happens beyond the length it was trained at? Loss by position.

    python -m tools.eval_length out/moduleformer          # windows of four times the trained length
    python -m tools.eval_length out/moduleformer out/run --length 512 --bin 64    # side by side
    python -m tools.eval_length out/moduleformer --data data/toy_math --json length.json
    python -m tools.eval_length out/mf_memory --memory 128     # segment by segment, with memory

Windows start every --stride tokens of val.bin. The loss at position t, averaged over all windows, is
that of the token which follows the first t + 1 of a window. If a model uses its context well, its loss falls
with position; if it extrapolates, the loss goes on falling beyond the trained length. A model with a
table of positions (moep.py) cannot read longer windows.

With --memory N a window is read as `train.py --memory` reads text: in segments of the trained length, each
of which sees the keys and values of the N tokens before it. With --memory 0 it sees none of them.
"""

from pathlib import Path

import torch
from tqdm import tqdm

from plumbing.checkpoint import build_model, data_folder, read_checkpoint
from plumbing.cli import Parser, UserError, between, check_writable, run_main, write_json
from plumbing.data import as_tensor, load_bin, tokens_at
from plumbing.machine import Machine
from plumbing.models import reads_past_block_size
from plumbing.tokenizer import load_tokenizer


@torch.no_grad()
def loss_by_position(model, tokens, length, stride, batch_size, machine, segment=None, memory=0):
    """(length,) mean nats at each position of the windows that start every `stride` tokens. Windows are
    read whole, or segment by segment with a memory."""
    starts = torch.arange(0, len(tokens) - length, stride, device=machine.device)
    total = torch.zeros(length, dtype=torch.float64)
    for some in tqdm(starts.split(batch_size), unit='batch', disable=None, leave=False):
        window = tokens_at(tokens, some[:, None] + torch.arange(length + 1, device=machine.device))
        x, y = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        nats = []
        cache = []                                       # the model appends keys and values to it
        for x_part, y_part in zip(x.split(segment or length, 1), y.split(segment or length, 1)):
            with machine.autocast():
                nats.append(model(x_part, y_part, cache=cache if memory else None, reduction='none')[1])
            cache = [(k[:, :, -memory:], v[:, :, -memory:]) for k, v in cache]
        total += torch.cat(nats, 1).float().cpu().double().sum(0)
    return total / len(starts)


def load_longer(run, ckpt, length, device):
    """The model, rebuilt for windows of `length`."""
    known = ckpt['config']['block_size']
    try:
        model = build_model(ckpt, block_size=max(length, known))
    except UserError:
        build_model(ckpt)                                # a broken checkpoint says so here
        raise UserError(f'{run} has a table of {known} positions and cannot read longer windows: '
                        f'--length {known}') from None
    return model.to(device).eval()


def load_endless(run, ckpt, device):
    """The model as it was trained, if it has no positions: cached keys would keep theirs."""
    model = build_model(ckpt).to(device).eval()
    if not reads_past_block_size(model):
        raise UserError(f'{run} has positions; --memory needs one without, such as moduleformer')
    return model


def read_arguments():
    parser = Parser(__doc__)
    parser.add_argument('runs', nargs='+', help='run folders, all with the same tokenizer')
    parser.add_argument('--data', help="a data set's folder; the first run's own data if not given")
    parser.add_argument('--length', type=between(1, 10 ** 6),
                        help="of a window; four times the first run's own if not given")
    parser.add_argument('--memory', type=between(0, 10 ** 6), metavar='N',
                        help='read segments of the trained length, each with N tokens before it')
    parser.add_argument('--stride', type=between(1, 10 ** 9), default=64,
                        help='tokens between starts of windows')
    parser.add_argument('--bin', type=between(1, 10 ** 6), default=64,
                        help='positions per line of the table')
    parser.add_argument('--batch_size', type=between(1, 10 ** 5), default=16,
                        help='windows at a time')
    parser.add_argument('--json', help='write the loss at every position there')
    parser.add_argument('--device', default='auto', help='cuda, mps, cpu; auto: the first there is')
    args = parser.parse_args()
    check_writable(args.json)
    return args


def main():
    args = read_arguments()
    machine = Machine(args.device)
    ckpts = [read_checkpoint(run) for run in args.runs]
    trained = [ckpt['settings']['seq_len'] or ckpt['config']['block_size'] for ckpt in ckpts]
    length = 4 * trained[0] if args.length is None else args.length
    folder = Path(args.data or data_folder(ckpts[0]))
    tokenizer = load_tokenizer(folder)
    tokens = as_tensor(load_bin(folder, 'val'), machine.device)
    if tokenizer.pad >= 0:
        raise UserError('eval_length reads models of plain tokens, not of chunks, sentences or pauses')
    if len(tokens) <= length:
        raise UserError(f'{folder}/val.bin has {len(tokens):,} tokens: '
                        f'too few for windows of {length:,}')
    windows = len(range(0, len(tokens) - length, args.stride))
    print(f'{folder}: {windows:,} windows of {length:,} tokens; mean loss by position', flush=True)
    losses = []
    for run, ckpt, T in zip(args.runs, ckpts, trained):
        if ckpt['tokenizer'] != tokenizer.hash:
            raise UserError(f'{run} was trained with another tokenizer than {folder} has')
        if args.memory is None:
            model = load_longer(run, ckpt, length, machine.device)
            segments = {}
        else:
            model = load_endless(run, ckpt, machine.device)
            segments = dict(segment=T, memory=args.memory)
        losses.append(loss_by_position(model, tokens, length, args.stride, args.batch_size, machine,
                                       **segments))

    names = [Path(run.removesuffix('.pt')).name for run in args.runs]
    if len({*names}) < len(names):
        names = args.runs
    width = max(8, *map(len, names)) + 2
    print('positions'.rjust(14) + ''.join(name.rjust(width) for name in names))
    for start in range(0, length, args.bin):
        end = min(start + args.bin, length)
        means = [f'{loss[start:end].mean():{width}.4f}' for loss in losses]
        print(f'{start:6,} to {end - 1:4,}' + ''.join(means))
    for name, loss, T in zip(names, losses, trained):
        print(f'{name}: {loss.mean():.4f} over all positions')
        if T < length:
            change = loss[T:].mean() - loss[T // 2:T].mean()
            print(f'{name}: trained at {T:,}; from the second half of that to what lies beyond, '
                  f'the loss changes by {change:+.4f}')
    if args.json:
        rows = []
        for run, T, loss in zip(args.runs, trained, losses):
            rows.append(dict(run=run, trained=T, loss=[round(nats, 5) for nats in loss.tolist()]))
        write_json(args.json, dict(data=str(folder), stride=args.stride, runs=rows))


if __name__ == '__main__':
    run_main(main)
