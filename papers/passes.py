"""
Where does routing pay? The same 50M tokens, read from more and more text: 20 to 1.65 passes.

    python -m papers.passes                  # 48 runs, about a minute each on one H200

Our rows are in papers/results/passes.jsonl, from which papers.plots draws docs/passes.png; `longer`
we have run on all of the text only.

It trains the arena's best dense model and its routed sibling, which has as many FLOPs per token,
without and with dropped choices, on the first part of four data sets together: the same share of
each, so that the mix stays the same. In the time of the routed model the dense one reads 1.3 times
as many tokens; `longer` is the dense one with a third more. prepare.py mix makes the parts, as data
sets passes_FROM_SHARE. Seed 2 reads the next one, so that the spread shows what the choice of text
does. All models of a seed read the same. Every run is scored on all four validation sets, as bits
per byte of all bytes. The data sets need one tokenizer; docs/arena.md has the commands. What has
its row is not run again.
"""

import json
from pathlib import Path

from arena.__main__ import call, options
from arena.entries import ENTRIES
from plumbing.cli import Parser, run_main
from plumbing.log import read_log
from plumbing.tokenizer import load_meta

SETS = 'babylm', 'simplewiki', 'stories', 'math'
MODELS = dict(dense='dense_muon', longer='dense_muon', routed='dense_moe_shared_muon_flops',
              dropped='dense_moe_shared_muon_flops_drop_expert')
SIZES = 2.5e6, 5e6, 10e6, None                           # tokens of text; None: all
STEPS, LONGER = 1526, 2035                               # of 64 windows of 512 tokens: 50M, 67M


def train(model, size, seed):
    splits = {name: load_meta(Path('data', name))['splits'] for name in SETS}
    total = sum(split['train']['tokens'] for split in splits.values())
    share = size / total if size else 1.0
    start = min((seed - 1) * share, 1 - share)
    settings = dict(ENTRIES['baby'][MODELS[model]])
    for key in ('stride', 'epoch_words', 'epochs'):      # here a pass reads every token once
        del settings[key]
    out = Path('out/passes', f'{model}_{size or total:.0f}_{seed}')
    part = f'passes_{start:.4f}_{share:.4f}'
    if not Path('data', part).exists():
        call('prepare.py', 'mix', '--name', part, '--input',
             *(f'data/{name}:{start}:{min(start + share, 1.0)}' for name in SETS))
    settings |= dict(data=part,
                     max_iters=LONGER if model == 'longer' else STEPS,
                     eval_data=','.join(SETS), seed=seed, out_dir=out,
                     eval_interval=10 ** 6, save_interval=10 ** 6, sample_tokens=0)
    call('train.py', *options(settings), '--resume')
    log = read_log(out)
    run = next(line['run'] for line in log if 'run' in line)
    val = [line for line in log if 'val' in line][-1]['val']
    val_bytes = {name: split['val']['bytes'] for name, split in splits.items()}
    bits = sum(val[name]['bits_per_byte'] * val_bytes[name] for name in SETS)
    tokens = run['steps'] * run['tokens_per_step']
    return dict(
        entry=model, size=size, seed=seed, rate=settings['learning_rate'],
        passes=tokens / total / share, tokens=tokens, parameters=run['parameters'],
        bits_per_byte=bits / sum(val_bytes.values()),
        val={name: scores['bits_per_byte'] for name, scores in val.items()},
        train_loss=[line['loss'] for line in log if 'loss' in line][-1])


def main():
    parser = Parser(__doc__)
    parser.add_argument('--to', type=Path, default='out/passes.jsonl', help='file of rows')
    args = parser.parse_args()
    args.to.parent.mkdir(exist_ok=True)
    lines = args.to.read_text().splitlines() if args.to.exists() else []
    rows = {(row['entry'], row['size'], row['seed']): row for row in map(json.loads, lines)}
    for seed in (1, 2, 3):
        for size in SIZES:
            for model in MODELS:
                if (model, size, seed) not in rows:
                    rows[model, size, seed] = row = train(model, size, seed)
                    with open(args.to, 'a', encoding='utf-8') as file:
                        file.write(json.dumps(row) + '\n')
            bits = {model: rows[model, size, seed]['bits_per_byte'] for model in MODELS}
            print(f"{rows['dense', size, seed]['passes']:.3g} passes, seed {seed}, bits per byte:",
                  ', '.join(f'{model} {value:.4f}' for model, value in bits.items()), flush=True)


if __name__ == '__main__':
    run_main(main)
