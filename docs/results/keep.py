"""
Condense a run into one small file for this folder, all that tables.py and plots.py read.

    python docs/results/keep.py out/moep --out docs/results/moep/moep_42.json \\
        --blimp fast.json full.json --note "one H200"
    python docs/results/keep.py out/share --out docs/results/papaformer/both-share_42.json \\
        --with usage=usage.json                    # JSON from tools.path_usage or tools.prune_curve
    python docs/results/keep.py glue_moep_3.json glue_moep_12.json ... --out docs/results/glue.json

From log.jsonl it keeps command, sizes and minutes, every evaluation and every 100th training line;
from eval_blimp.py --json the means, not the pairs; from finetune.py --json the scores and minutes
of every seed, not those of every epoch.
"""

import argparse
import json
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
    """What the run says of itself, every evaluation, every `every`-th training line, and the median
    speed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    about = next(line['run'] for line in lines if 'run' in line)     # a resumed run says it again
    steps = [line for line in lines if 'loss' in line]
    speeds = [line.pop('tokens_per_s') for line in steps]
    return dict(
        {key: about[key] for key in ('parameters', 'active', 'trained')},
        command=f"python {about['command']}",
        minutes=lines[-1]['seconds'] / 60,
        tokens_per_s=statistics.median(speeds) if speeds else None,
        evaluations=[line for line in lines if 'val' in line],
        steps=steps[every - 1::every])


def read_blimp(path):
    """The means of every checkpoint; those by phenomenon only for all pairs, in data/blimp."""
    found = json.loads(path.read_text())
    folder = Path(found['data']).name
    subset = 'full' if folder == 'blimp' else folder.removeprefix('blimp_')
    keys = ['iter', 'words', 'overall', 'fields']
    if subset == 'full':
        keys.append('phenomena')
    runs = []
    for run in found['runs']:
        name = Path(run['checkpoint']).name
        runs.append(dict(checkpoint=name, **{key: run[key] for key in keys}))
    return dict(mode=found['mode'], subset=subset, runs=runs)


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
    kept = dict(note=args.note)
    kept |= read_log(args.inputs[0] / 'log.jsonl', args.every)
    kept['blimp'] = [read_blimp(path) for path in args.blimp]
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
    parser.add_argument('--note', default='', help='the machine, and what else ran on it')
    parser.add_argument('--with', dest='others', nargs='*', default=[], metavar='KEY=FILE',
                        help='JSON files to include whole')
    parser.add_argument('--every', type=int, default=100)
    parser.add_argument('--blimp', type=Path, nargs='*', default=[])
    args = parser.parse_args()
    kept = read_run(args) if args.inputs[0].is_dir() else read_glue(args.inputs)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rounded(kept)).replace('}, ', '},\n ') + '\n')
