"""
Condense a run into a row of papers/results/*.jsonl, all that tables.py and plots.py read of it.

    python papers/keep.py out/moep --to papers/results/moep.jsonl --run moep --note "one H200" \\
        --blimp fast.json full.json --curve
    python papers/keep.py out/share --to papers/results/papaformer.jsonl --run both-share \\
        --with usage=usage.json          # JSON from papers.path_usage, prune_curve or exact_answer
    python papers/keep.py glue_moep_3.json glue_moep_12.json ... --to papers/results/glue.jsonl

Of log.jsonl it keeps the command, sizes, minutes, and the first and the last evaluation (with
--curve, all of them); of eval_blimp.py --json the means; of tools.finetune --json the scores and
minutes of every seed, a row for each task.
"""

import argparse
import json
import statistics
from pathlib import Path


def rounded(value):
    """The same value, with its floats rounded to five significant digits"""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f'{value:.5g}') if isinstance(value, float) else value


def read_evaluation(line):
    scores = {data: {key: val[key] for key in ('loss', 'bits_per_byte')}
              for data, val in line['val'].items()}
    evaluation = dict(iter=line['iter'], words=line['words'], val=scores)
    shares = [share for layer in line.get('routes', {}).values() for share in layer]
    if shares:
        evaluation['unused'] = [sum(share < 0.01 for share in shares), len(shares)]
    return evaluation


def read_log(path, curve):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    about = next(line['run'] for line in lines if 'run' in line)     # a resumed run says it again
    steps = [line for line in lines if 'loss' in line]
    evaluations = [line for line in lines if 'val' in line]
    row = dict(
        {key: about[key] for key in ('parameters', 'active', 'trained')},
        seed=about['settings']['seed'],
        command=f"python {about['command']}",
        minutes=lines[-1]['seconds'] / 60,
        tokens_per_s=statistics.median(line['tokens_per_s'] for line in steps),
        last_losses=statistics.mean(line['loss'] for line in steps[-30::3]))
    kept = evaluations if curve else [evaluations[0], evaluations[-1]]
    row['evaluations'] = [read_evaluation(line) for line in kept]
    if evaluations[-1].get('routes'):
        row['routes'] = evaluations[-1]['routes']
    return row


def read_blimp(paths):
    """{mode and pairs: [[words read, accuracy], ...]}; all pairs are those of data/blimp"""
    curves = {}
    for path in paths:
        scores = json.loads(path.read_text())
        pairs = Path(scores['data']).name.removeprefix('blimp').removeprefix('_') or 'full'
        points = {run['words']: run['overall'] for run in scores['runs']}    # ckpt.pt has a twin
        curves[f"{scores['mode']} {pairs}"] = [*points.items()]
    return curves


def read_glue(paths):
    """[a row for each run and task]"""
    rows = {}
    for path in paths:
        result = json.loads(path.read_text())
        run = Path(result['settings']['run']).name
        for task in result['tasks']:
            about = {key: task[key] for key in ('task', 'train', 'valid', 'majority')}
            row = rows.setdefault((run, task['task']), dict(run=run, **about, seeds={}))
            for tuned in task['runs']:
                row['seeds'][tuned['seed']] = dict(
                    tuned['scores'],
                    best_epoch=tuned['best_epoch'],
                    epochs=tuned['epochs'],
                    minutes=tuned['seconds'] / 60)
    return [*rows.values()]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('inputs', type=Path, nargs='+',
                        help='a run folder, or files from tools.finetune --json')
    parser.add_argument('--to', type=Path, required=True, help='the file to append to')
    parser.add_argument('--run', help='its name there')
    parser.add_argument('--note', default='', help='the machine, and what else ran on it')
    parser.add_argument('--with', dest='others', nargs='*', default=[], metavar='KEY=FILE',
                        help='JSON files to include')
    parser.add_argument('--blimp', type=Path, nargs='*', default=[])
    parser.add_argument('--curve', action='store_true', help='all evaluations')
    args = parser.parse_args()
    if args.inputs[0].is_dir():
        row = dict(run=args.run, note=args.note)
        row |= read_log(args.inputs[0] / 'log.jsonl', args.curve)
        row['blimp'] = read_blimp(args.blimp)
        for other in args.others:
            key, path = other.split('=', 1)
            row[key] = json.loads(Path(path).read_text())
            row[key].pop('examples', None)               # every continuation of exact_answer
        rows = [row]
    else:
        rows = read_glue(args.inputs)
    with args.to.open('a') as file:
        for row in rows:
            file.write(json.dumps(rounded(row)) + '\n')


if __name__ == '__main__':
    main()
