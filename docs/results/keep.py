"""
What a run has to say, small enough to be kept beside this file. tables.py and plots.py read nothing else.

    python docs/results/keep.py out/moep --out docs/results/moep/moep_42.json --command "train.py config/paper/moep.py" --printed moep.log --blimp fast.json full.json
    python docs/results/keep.py out/share --out docs/results/papaformer/both-share_42.json --with usage=usage.json      # what path_usage.py or prune_curve.py wrote
    python docs/results/keep.py glue_moep_3.json glue_moep_12.json ... --out docs/results/glue.json

Of a run's folder: log.jsonl (evaluations whole, every 100th of the lines between), and of what eval_blimp.py --json wrote the means,
not the pairs. Of what finetune.py --json wrote: every seed's scores and minutes, not every epoch's.
"""

import argparse
import json
import re
import statistics
from pathlib import Path


def rounded(value):
    """The same, its floats with five digits."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f'{value:.5g}') if isinstance(value, float) else value


def read_log(path, every):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if 'loss' in line]
    return dict(tokens_per_s=statistics.median(line['tokens_per_s'] for line in steps) if steps else None,
                evaluations=[line for line in lines if 'val' in line],
                steps=[{key: line[key] for key in line if key != 'tokens_per_s'} for line in steps[every - 1::every]])


def read_size(path):
    """How many parameters train.py said the model has, and trains."""
    found = re.search(r'^model .*?: ([\d.]+)M parameters, ([\d.]+)M active per token(?:, ([\d.]+)M trained)?', path.read_text(), re.MULTILINE)
    total, active, trained = found.groups()
    return dict(parameters=1e6 * float(total), active=1e6 * float(active), trained=1e6 * float(trained or total))


def read_blimp(path):
    """Means of all checkpoints; by phenomenon for the full set alone."""
    found = json.loads(path.read_text())
    keys = ('iter', 'words', 'overall', 'fields') + (('phenomena',) if found['subset'] == 'full' else ())
    return dict(mode=found['mode'], subset=found['subset'],
                runs=[dict(checkpoint=Path(run['checkpoint']).name, **{key: run[key] for key in keys}) for run in found['runs']])


def read_glue(paths):
    """{run: {task: {majority, sizes, seeds: {seed: what it reached}}}}"""
    kept = {}
    for path in paths:
        found = json.loads(path.read_text())
        for task in found['tasks']:
            entry = kept.setdefault(Path(found['settings']['run']).name, {}).setdefault(
                task['task'], {key: task[key] for key in ('train', 'valid', 'majority')} | dict(seeds={}))
            for run in task['runs']:
                entry['seeds'][run['seed']] = dict(run['scores'], best_epoch=run['best_epoch'], epochs=run['epochs'],
                                                   minutes=run['seconds'] / 60)
    return kept


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('inputs', type=Path, nargs='+', help="a run's folder, or the files of finetune.py --json")
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--command', help='what was run')
    parser.add_argument('--note', default='', help='machine, and what ran beside it')
    parser.add_argument('--minutes', type=float)
    parser.add_argument('--printed', type=Path, help='what train.py printed: the number of parameters stands there')
    parser.add_argument('--with', dest='others', nargs='*', default=[], metavar='KEY=FILE', help='JSON files to take in whole')
    parser.add_argument('--every', type=int, default=100)
    parser.add_argument('--blimp', type=Path, nargs='*', default=[])
    args = parser.parse_args()
    if args.inputs[0].is_dir():
        kept = dict(command=args.command, note=args.note, minutes=args.minutes, **read_log(args.inputs[0] / 'log.jsonl', args.every),
                    blimp=[read_blimp(path) for path in args.blimp], **(read_size(args.printed) if args.printed else {}),
                    **{key: json.loads(Path(path).read_text()) for key, path in (other.split('=', 1) for other in args.others)})
    else:
        kept = read_glue(args.inputs)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rounded(kept)).replace('}, ', '},\n ') + '\n')
