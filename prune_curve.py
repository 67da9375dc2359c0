"""
How much of a ModuleFormer does a domain need? What is left, and the loss, for a row of thresholds (the paper's Fig. 2 to 4).

    python prune_curve.py out/moduleformer_math                          # on the run's own data
    python prune_curve.py out/moduleformer --data data/toy_math --normalise sum
    python prune_curve.py out/moduleformer_math --json curve.json        # and every threshold's loss

Each module's frequency is counted on the first half of val.bin, the loss is measured on the second. Nothing is written but
the table: prune with train.py, --surgery=prune_experts --surgery_args="dict(threshold=0.05)".
"""

from pathlib import Path

import torch

import prepare
from errors import Parser, UserError, check_writable, run_main, write_json
from loader import as_tensor, val_batches
from machine import Machine
from moduleformer import count_usage, prune_experts
from train import load_checkpoint, score

THRESHOLDS = [0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]     # of the largest


def curve(model, tokens, token_lengths, thresholds, normalise, batch_size, machine):
    """One dict per threshold: the share of parameters and of modules that is left, and the loss."""
    half, T = len(tokens) // 2, model.config.block_size
    usage, rows = count_usage(model, val_batches(tokens[:half], T, batch_size, -1)), []
    for threshold in thresholds:
        pruned, table = prune_experts(model, usage, threshold, normalise)
        loss = score(pruned, val_batches(tokens[half:], T, batch_size, -1), token_lengths, machine)['loss']
        modules = sum(row['after'] for row in table) / sum(row['before'] for row in table)
        rows.append(dict(threshold=threshold, parameters=pruned.count_params()[0], left=table.left, modules=modules, loss=loss))
    return rows


def main():
    parser = Parser(__doc__)
    parser.add_argument('run', help='a run folder of a ModuleFormer')
    parser.add_argument('--data', help="a data set's folder; the run's own if not given")
    parser.add_argument('--thresholds', type=float, nargs='+', help='least frequency of a module that stays')
    parser.add_argument('--normalise', choices=('max', 'sum'), default='max',
                        help="divide frequencies by their pool's largest, or by their sum")
    parser.add_argument('--batch_size', type=int, default=16)
    parser.add_argument('--json', help='write the table there')
    parser.add_argument('--device', default='auto', help='cuda, mps or cpu, whichever is there')
    args = parser.parse_args()
    if args.batch_size < 1 or min(args.thresholds or [0]) < 0:
        raise UserError('batch_size must be at least 1, and thresholds at least 0')
    check_writable(args.json)
    machine = Machine(args.device)
    model, ckpt = load_checkpoint(args.run, machine.device)
    if ckpt['model'] != 'moduleformer':
        raise UserError(f"{args.run} holds a model of {ckpt['model']}.py; only a ModuleFormer has modules to prune")
    used = ckpt['settings']['data']
    folder = Path(args.data or Path(ckpt['settings']['data_dir'], used if isinstance(used, str) else next(iter(used))))
    if prepare.load_meta(folder)['tokenizer']['hash'] != ckpt['tokenizer']:
        raise UserError(f'{folder} has another tokenizer than {args.run}')
    tokens, tokenizer = as_tensor(prepare.load_bin(folder, 'val'), machine.device), prepare.load_tokenizer(folder)
    lengths = torch.tensor([len(b) for b in tokenizer.token_bytes])
    largest = 1 if args.normalise == 'max' else 1 / model.config.top_k      # no module has more of its pool's choices
    thresholds = [0.0, *(t for t in args.thresholds or [t * largest for t in THRESHOLDS] if t)]       # 0: nothing is pruned
    try:
        rows = curve(model, tokens, lengths, thresholds, args.normalise, args.batch_size, machine)
    except ValueError as e:                              # as of a model with adapters
        raise UserError(f'{args.run}: {e}') from None
    print(f'{args.run} on {folder}: frequencies divided by the {args.normalise} of their pool')
    print('threshold   parameters left   modules left      loss    change')
    for row in rows:
        print(f"{row['threshold']:9.4f}{row['parameters'] / 1e6:9.2f}M {100 * row['left']:5.1f}%{100 * row['modules']:14.1f}%"
              f"{row['loss']:10.4f}{row['loss'] - rows[0]['loss']:+10.4f}")
    if args.json:
        result = dict(run=args.run, data=str(folder), normalise=args.normalise, rows=rows)
        write_json(args.json, result)


if __name__ == '__main__':
    run_main(main)
