"""
How much of a ModuleFormer does a domain need? What is left, and the loss, for a row of thresholds
(the paper's Figures 2 to 4).

    python -m papers.prune_curve out/moduleformer_math                    # on the run's own data
    python -m papers.prune_curve out/moduleformer --data data/toy_math
    python -m papers.prune_curve out/moduleformer_math --json curve.json

Each module's frequency is counted on the first half of val.bin, the loss is measured on the second.
No model is saved. To prune one:

    python -m tools.surgery prune_experts out/moduleformer_math --threshold 0.05 --out out/pruned
"""

from moduleformer import ModuleFormer, count_usage, prune_experts
from papers.common import open_run, run_parser, val_tokens
from plumbing.bins import score_batches, val_batches
from plumbing.checkpoint import data_folders
from plumbing.cli import UserError, run_main, write_json

# Of the most frequent module of a pool
THRESHOLDS = [0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
BATCH = 16                                               # windows at a time


def curve(model, tokens, tokenizer, machine):
    """One dict per threshold: the share of parameters and of modules that is left, and the loss."""
    half = len(tokens) // 2
    T = model.config.block_size
    first = val_batches(tokens[:half], T, BATCH, tokenizer.pad)
    usage = count_usage(model, ((machine.send(x), machine.send(y)) for x, y in first))
    rows, whole = [], model.count_params()[0]
    for threshold in THRESHOLDS:                         # at 0 nothing is pruned
        pruned, table = prune_experts(model, usage, threshold)
        batches = val_batches(tokens[half:], T, BATCH, tokenizer.pad)
        scores = score_batches(pruned, batches, tokenizer, machine)
        modules = sum(pool['after'] for pool in table) / sum(pool['before'] for pool in table)
        parameters = pruned.count_params()[0]
        rows.append(dict(threshold=threshold, parameters=parameters, left=parameters / whole,
                         modules=modules, loss=scores['loss']))
    return rows


def main():
    args = run_parser(__doc__).parse_args()
    model, ckpt, tokenizer, machine = open_run(args)
    if not isinstance(model, ModuleFormer):
        raise UserError(f"{args.run} is a run of {ckpt['model']}; only a ModuleFormer has modules")
    folder = args.data or data_folders(ckpt)[0]
    tokens = val_tokens(folder, tokenizer)
    rows = curve(model, tokens, tokenizer, machine)
    print(f"{args.run} on {folder}: frequencies as shares of their pool's largest")
    print('threshold   parameters left   modules left      loss    change')
    for row in rows:
        change = row['loss'] - rows[0]['loss']
        print(f"{row['threshold']:9.4f}{row['parameters'] / 1e6:9.2f}M {100 * row['left']:5.1f}%"
              f"{100 * row['modules']:14.1f}%{row['loss']:10.4f}{change:+10.4f}")
    if args.json:
        write_json(args.json, dict(run=args.run, data=str(folder), rows=rows))


if __name__ == '__main__':
    run_main(main)
