"""
How far does a model see, and what happens beyond the length it was trained at? Loss by position.

    python -m papers.eval_length out/moduleformer         # windows of four times the trained length
    python -m papers.eval_length out/moduleformer out/run --length 512      # side by side
    python -m papers.eval_length out/moduleformer --data data/toy_math --json length.json
    python -m papers.eval_length out/mf_memory --memory 128        # segment by segment, with memory

Windows start every --stride tokens of val.bin. The loss at position t, averaged over all windows,
is that of the token which follows the first t + 1 of a window. If a model uses its context well,
its loss falls with position; if it extrapolates, the loss goes on falling beyond the trained
length. A model with a table of positions (moep.py) cannot read longer windows.

With --memory N a window is read as `train.py --stream --memory` does: in segments of the trained
length, each of which sees the keys and values of the N tokens before it. With --memory 0 it sees
none of them.
"""

import torch
from tqdm import tqdm

from moduleformer import ModuleFormer
from papers.common import run_parser, val_tokens
from plumbing.bins import read_windows
from plumbing.checkpoint import build_model, data_folders, read_checkpoint, run_tokenizer
from plumbing.cli import UserError, between, run_main, write_json
from plumbing.machine import Machine

BATCH = 16                                               # windows at a time
SPAN = 64                                                # positions per line of the table


@torch.no_grad()
def loss_by_position(model, tokens, length, stride, machine, segment=None, memory=0):
    """(length,) mean nats at each position of the windows that start every `stride` tokens. A
    window is read in one pass, or segment by segment with a memory."""
    starts = torch.arange(0, len(tokens) - length, stride)
    total = torch.zeros(length, dtype=torch.float64)
    for batch in tqdm(starts.split(BATCH), unit='batch', disable=None, leave=False):
        window = machine.send(read_windows([tokens], batch.numpy(), length + 1))
        x, y = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        nats, cache = [], []                             # the model appends keys and values to it
        for x_part, y_part in zip(x.split(segment or length, 1), y.split(segment or length, 1)):
            with machine.autocast():
                nats.append(model(x_part, y_part, cache if memory else None, 'none')[1])
            cache = [(k[:, :, -memory:], v[:, :, -memory:]) for k, v in cache]
        total += torch.cat(nats, 1).float().cpu().double().sum(0)
    return total / len(starts)


def load(ckpt, args, length):
    """The model for windows of `length`, or, with a memory, as it was trained"""
    if args.memory is None and length > ckpt['config']['block_size']:
        return build_model(ckpt, block_size=length)      # an error if it has a table of positions
    model = build_model(ckpt)
    if args.memory is not None and not isinstance(model, ModuleFormer):
        raise UserError('--memory needs a ModuleFormer: others have positions')
    return model


def main():
    parser = run_parser(
        __doc__,
        run=dict(nargs='+', help='run folders, all with the same tokenizer'),
        data=dict(help="a data set's folder; the first run's own data if not given"))
    parser.add_argument('--length', type=between(1, 10 ** 6),
                        help="of a window; four times the first run's own if not given")
    parser.add_argument('--memory', type=between(0, 10 ** 6), metavar='N',
                        help='read segments of the trained length, each with N tokens before it')
    parser.add_argument('--stride', type=between(1, 10 ** 9), default=64,
                        help='tokens between starts of windows')
    args = parser.parse_args()
    machine = Machine(args.device)
    ckpts = [read_checkpoint(run) for run in args.run]
    trained = [ckpt['settings']['seq_len'] or ckpt['config']['block_size'] for ckpt in ckpts]
    length = args.length or 4 * trained[0]
    folder = args.data or data_folders(ckpts[0])[0]
    for ckpt in ckpts:
        tokenizer = run_tokenizer(ckpt)
        tokens = val_tokens(folder, tokenizer)
    if tokenizer.pad >= 0:
        raise UserError('eval_length reads models of plain tokens, not of chunks or pauses')
    if len(tokens) <= length:
        raise UserError(f'{folder}/val.bin has {len(tokens):,} tokens: '
                        f'too few for windows of {length:,}')
    windows = len(range(0, len(tokens) - length, args.stride))
    print(f'{folder}: {windows:,} windows of {length:,} tokens; mean loss by position', flush=True)
    losses = []
    for ckpt, T in zip(ckpts, trained):
        model = load(ckpt, args, length).to(machine.device).eval()
        segments = {} if args.memory is None else dict(segment=T, memory=args.memory)
        losses.append(loss_by_position(model, tokens, length, args.stride, machine, **segments))

    width = max(8, *map(len, args.run)) + 2
    print('positions'.rjust(14) + ''.join(run.rjust(width) for run in args.run))
    for start in range(0, length, SPAN):
        end = min(start + SPAN, length)
        means = [f'{loss[start:end].mean():{width}.4f}' for loss in losses]
        print(f'{start:6,} to {end - 1:4,}' + ''.join(means))
    for run, loss, T in zip(args.run, losses, trained):
        print(f'{run}: trained at {T:,}; {loss.mean():.4f} over all positions')
    if args.json:
        rows = [dict(run=run, trained=T, loss=[round(nats, 5) for nats in loss.tolist()])
                for run, loss, T in zip(args.run, losses, trained)]
        write_json(args.json, dict(data=str(folder), stride=args.stride, runs=rows))


if __name__ == '__main__':
    run_main(main)
