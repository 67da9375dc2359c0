"""
Condense a run into one small file for this folder, all that tables.py and plots.py read.

    python docs/results/keep.py out/moep --out docs/results/moep/moep_42.json \\
        --blimp fast.json full.json --note "one H200"
    python docs/results/keep.py out/share --out docs/results/papaformer/both-share_42.json \\
        --with usage=usage.json                    # JSON from tools.path_usage or tools.prune_curve
    python docs/results/keep.py glue_moep_3.json glue_moep_12.json ... --out docs/results/glue.json
    python docs/results/keep.py results/moep_42 results/gpt2_42 ... --out docs/results/babylm2025.json \\
        --entity evaluation_data/full_eval/entity_tracking     # what BabyLM's pipeline has written

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


def read_babylm(folders, entity):
    """{run: {task: score}} from the reports of the BabyLM 2025 pipeline."""
    kept = {}
    for folder in folders:
        scores = {}
        for path in sorted(folder.glob('main/zero_shot/causal/*/*/best_temperature_report.txt')):
            lines = path.read_text().splitlines()
            average = [i for i, line in enumerate(lines) if line.startswith('### AVERAGE')][0]
            scores[path.parent.name] = float(lines[average + 1])
        for line in (folder / 'main/zero_shot/causal/reading/report.txt').read_text().splitlines():
            name, score = line.split(' SCORE: ')
            scores[name.lower()] = float(score)
        predictions = folder / 'main/zero_shot/causal/entity_tracking/entity_tracking/predictions.json'
        if predictions.exists():
            scores |= split_entities(entity, json.loads(predictions.read_text()))
        kept[folder.name] = scores
    kept['shortest option'] = shortest_option(read_entities(entity))
    return kept


def shortest_option(subsets):
    """The scores of a rule that never reads the text: take the option of fewest words (ties: any)."""
    right, nothing, something = {}, [], []
    for subset, rows in subsets.items():
        for options in rows:
            words = [len(option.split()) for option in options]
            share = (words[0] == min(words)) / words.count(min(words))
            right.setdefault(subset.rsplit('_', 2)[0], {}).setdefault(subset, []).append(share)
            (nothing if 'nothing' in options[0] else something).append(share)
    files = [statistics.mean(map(statistics.mean, found.values())) for found in right.values()]
    scores = dict(entity_tracking=files, nothing=nothing, something=something)
    return {name: 100 * statistics.mean(values) for name, values in scores.items()}


def read_entities(folder):
    """{subset: rows}, as the pipeline names and orders them. The first option is the right one."""
    subsets = {}
    for path in sorted(folder.glob('*.jsonl')):
        for row in map(json.loads, path.read_text().splitlines()):
            subsets.setdefault(f"{path.stem}_{row['numops']}_ops", []).append(row['options'])
    return subsets


def split_entities(folder, predictions):
    """Percent right where the right option is 'nothing.', and where it is something."""
    right = {True: [], False: []}
    for subset, rows in read_entities(folder).items():
        for options, found in zip(rows, predictions[subset]['predictions'], strict=True):
            right['nothing' in options[0]].append(found['pred'] == options[0])
    return dict(nothing=100 * statistics.mean(right[True]), something=100 * statistics.mean(right[False]))


def read_run(args):
    """Everything to keep of a training run."""
    kept = dict(note=args.note)
    kept |= read_log(args.inputs[0] / 'log.jsonl', args.every)
    kept['blimp'] = [read_blimp(path) for path in args.blimp]
    for other in args.others:
        key, path = other.split('=', 1)
        kept[key] = json.loads(Path(path).read_text())
        kept[key].pop('examples', None)                  # every continuation of tools.exact_answer
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
    parser.add_argument('--entity', type=Path, help="the folder of BabyLM's entity tracking")
    args = parser.parse_args()
    if args.entity:
        kept = read_babylm(args.inputs, args.entity)
    else:
        kept = read_run(args) if args.inputs[0].is_dir() else read_glue(args.inputs)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rounded(kept)).replace('}, ', '},\n ') + '\n')
