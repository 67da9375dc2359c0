"""
Where does routing pay? The same 50M tokens, read from more and more text: 20 to 1.65 passes.

    python -m papers.passes                  # 36 runs, about a minute each on one H200
    python -m papers.passes --minutes        # 30 runs: per minute, not per FLOP

Our rows are in papers/results/passes.jsonl and minutes.jsonl. papers.plots draws docs/passes.png.

It trains the arena's best dense model and its routed sibling, which has as many FLOPs per token,
without and with dropped choices, on the first part of four data sets together: the same share of
each, so that the mix stays the same. prepare.py mix makes the parts, as data sets
passes_FROM_SHARE. Seed 2 reads the next one, so that the spread shows what the choice of text does.
All models of a seed read the same.

With --minutes the routed model has experts in every third block only, and the dense one takes more
steps, as many as fit into its time. Each is regularised as suits it and the number of passes. They
also read the Python files of this installation (prepare.py python).

Every run is scored on all validation texts, as bits per byte of all bytes. The four data sets need
one tokenizer; docs/arena.md has the commands. What has its row is not run again.
"""

import json
from pathlib import Path

from arena.__main__ import call, options
from arena.entries import ENTRIES
from plumbing.cli import Parser, run_main
from plumbing.log import read_log
from plumbing.tokenizer import load_meta

PROSE = 'babylm', 'simplewiki', 'stories', 'math'
STEPS = 1526                                             # of 64 windows of 512 tokens: 50M
PASSES = dict(
    dense=('dense_muon', {}),
    routed=('dense_moe_shared_muon_flops', {}),
    dropped=('dense_moe_shared_muon_flops_drop_expert', {}))
MINUTES = dict(                  # a step of `third` takes 1.179 times as long (results/step.jsonl)
    dense=('dense_muon', dict(max_iters=1799, learning_rate=1e-2)),
    third=('dense_moe_shared_muon_flops', dict(n_expert=48, route_every=3, learning_rate=7e-3)))
REGULAR = {                      # dropout of either, and the share of choices that `third` drops
    None: (0.0, 0.0, 0.0), 'python': (0.0, 0.0, 0.0),
    10e6: (0.1, 0.1, 0.2), 5e6: (0.2, 0.2, 0.4), 2.5e6: (0.3, 0.3, 0.4)}


def train(models, model, size, seed):
    """size: the tokens of text; None: all; python: another text"""
    entry, changes = models[model]
    sets = ['python'] if size == 'python' else PROSE
    splits = {name: load_meta(Path('data', name))['splits'] for name in sets}
    total = sum(split['train']['tokens'] for split in splits.values())
    share = size / total if isinstance(size, float) else 1.0
    start = min((seed - 1) * share, 1 - share)
    settings = dict(ENTRIES['baby'][entry]) | dict(max_iters=STEPS) | changes
    for key in ('stride', 'epoch_words', 'epochs'):      # here a pass reads every token once
        del settings[key]
    if models is MINUTES:
        dense, third, dropped = REGULAR[size]
        settings |= dict(dropout=dense) if model == 'dense' else dict(dropout=third,
                                                                      drop_expert=dropped)
    out = Path('out', 'minutes' if models is MINUTES else 'passes', f'{model}_{size}_{seed}')
    data = ','.join(sets)
    if share < 1:
        data = f'passes_{start:.4f}_{share:.4f}'
    if not all(Path('data', name).exists() for name in data.split(',')):
        call('prepare.py', 'mix', '--name', data, '--input',
             *(f'data/{name}:{start}:{min(start + share, 1.0)}' for name in sets))
    settings |= dict(data=data, eval_data=','.join(sets), seed=seed, out_dir=out,
                     eval_interval=10 ** 6, save_interval=10 ** 6, sample_tokens=0)
    call('train.py', *options(settings), '--resume')
    log = read_log(out)
    run = next(line['run'] for line in log if 'run' in line)
    val = [line for line in log if 'val' in line][-1]['val']
    val_bytes = {name: split['val']['bytes'] for name, split in splits.items()}
    bits = sum(val[name]['bits_per_byte'] * val_bytes[name] for name in sets)
    tokens = run['steps'] * run['tokens_per_step']
    return dict(
        entry=model, size=size, seed=seed, rate=settings['learning_rate'],
        dropout=settings['dropout'], passes=tokens / total / share, tokens=tokens,
        parameters=run['parameters'], bits_per_byte=bits / sum(val_bytes.values()),
        val={name: scores['bits_per_byte'] for name, scores in val.items()},
        train_loss=[line['loss'] for line in log if 'loss' in line][-1])


def main():
    parser = Parser(__doc__)
    parser.add_argument('--minutes', action='store_true', help='at equal time')
    args = parser.parse_args()
    models = MINUTES if args.minutes else PASSES
    sizes = REGULAR if args.minutes else (2.5e6, 5e6, 10e6, None)
    to = Path('out/minutes.jsonl' if args.minutes else 'out/passes.jsonl')
    to.parent.mkdir(exist_ok=True)
    lines = to.read_text().splitlines() if to.exists() else []
    rows = {(row['entry'], row['size'], row['seed']): row for row in map(json.loads, lines)}
    for seed in (1, 2, 3):
        for size in sizes:
            for model in models:
                if (model, size, seed) not in rows:
                    rows[model, size, seed] = row = train(models, model, size, seed)
                    with open(to, 'a', encoding='utf-8') as file:
                        file.write(json.dumps(row) + '\n')
            bits = {model: rows[model, size, seed]['bits_per_byte'] for model in models}
            print(f"{rows['dense', size, seed]['passes']:.3g} passes, seed {seed}, bits per byte:",
                  ', '.join(f'{model} {value:.4f}' for model, value in bits.items()), flush=True)


if __name__ == '__main__':
    run_main(main)
