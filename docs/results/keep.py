"""
Condense a run into one small file for this folder, all that tables.py and plots.py read.

    python docs/results/keep.py out/moep --out docs/results/moep/moep_42.json \\
        --command "train.py config/paper/moep.py" --printed moep.log --blimp fast.json full.json
    python docs/results/keep.py out/share --out docs/results/papaformer/both-share_42.json \\
        --with usage=usage.json                    # JSON from tools.path_usage or tools.prune_curve
    python docs/results/keep.py glue_moep_3.json glue_moep_12.json ... --out docs/results/glue.json

From log.jsonl it keeps every evaluation and every 100th training line; from eval_blimp.py --json
the means, not the pairs; from finetune.py --json the scores and minutes of every seed, not those of
every epoch.
"""

import argparse
import json
import re
import statistics
from pathlib import Path


def rounded(value):
    """The same value, with its floats rounded to five significant digits."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f'{value:.5g}') if isinstance(value, float) else value


def read_log(path, every):
    """Every evaluation, every `every`-th training line, and the median speed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if 'loss' in line]
    speeds = [line['tokens_per_s'] for line in steps]
    some = steps[every - 1::every]
    return dict(
        tokens_per_s=statistics.median(speeds) if speeds else None,
        evaluations=[line for line in lines if 'val' in line],
        steps=[{key: line[key] for key in line if key != 'tokens_per_s'} for line in some])


def read_size(path):
    """The parameter counts that train.py printed: total, active per token, trained."""
    number = r'([\d.]+)M'
    pattern = f'^model .*?: {number} parameters, {number} active per token(?:, {number} trained)?'
    total, active, trained = re.search(pattern, path.read_text(), re.MULTILINE).groups()
    return dict(
        parameters=1e6 * float(total),
        active=1e6 * float(active),
        trained=1e6 * float(trained or total))


def read_blimp(path):
    """The means of every checkpoint; those by phenomenon only for the full set."""
    found = json.loads(path.read_text())
    keys = ['iter', 'words', 'overall', 'fields']
    if found['subset'] == 'full':
        keys.append('phenomena')
    runs = []
    for run in found['runs']:
        name = Path(run['checkpoint']).name
        runs.append(dict(checkpoint=name, **{key: run[key] for key in keys}))
    return dict(mode=found['mode'], subset=found['subset'], runs=runs)


def read_glue(paths):
    """{run: {task: {train, valid, majority, seeds: {seed: scores, epochs and minutes}}}}"""
    kept = {}
    for path in paths:
        found = json.loads(path.read_text())
        tasks = kept.setdefault(Path(found['settings']['run']).name, {})
        for task in found['tasks']:
            about = {key: task[key] for key in ('train', 'valid', 'majority')}
            entry = tasks.setdefault(task['task'], dict(about, seeds={}))
            for run in task['runs']:
                entry['seeds'][run['seed']] = dict(
                    run['scores'],
                    best_epoch=run['best_epoch'],
                    epochs=run['epochs'],
                    minutes=run['seconds'] / 60)
    return kept


def read_run(args):
    """Everything to keep of a training run."""
    kept = dict(command=args.command, note=args.note, minutes=args.minutes)
    kept |= read_log(args.inputs[0] / 'log.jsonl', args.every)
    kept['blimp'] = [read_blimp(path) for path in args.blimp]
    if args.printed:
        kept |= read_size(args.printed)
    for other in args.others:
        key, path = other.split('=', 1)
        kept[key] = json.loads(Path(path).read_text())
    return kept


if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('inputs', type=Path, nargs='+',
                        help='a run folder, or files from finetune.py --json')
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--command', help='the command that was run')
    parser.add_argument('--note', default='', help='the machine, and what else ran on it')
    parser.add_argument('--minutes', type=float)
    parser.add_argument('--printed', type=Path,
                        help='the output of train.py, for the number of parameters')
    parser.add_argument('--with', dest='others', nargs='*', default=[], metavar='KEY=FILE',
                        help='JSON files to include whole')
    parser.add_argument('--every', type=int, default=100)
    parser.add_argument('--blimp', type=Path, nargs='*', default=[])
    args = parser.parse_args()
    kept = read_run(args) if args.inputs[0].is_dir() else read_glue(args.inputs)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rounded(kept)).replace('}, ', '},\n ') + '\n')
