"""
Compare runs: a table, and the curves in one page.

    python -m tools.compare out/moep out/gpt2                        # the table
    python -m tools.compare out/moep out/gpt2 --html compare.html    # and a page for any browser
    python -m tools.compare out/moep --html moep.html --watch        # again every 10 seconds

It reads only log.jsonl, also while a run trains. Runs that differ in nothing but the seed share a
column: mean ± standard deviation. Name the folder that `train.py --seeds=1,2,3` made, or each run.
Each column is tested against the first (Welch, two-sided) if all last evaluations are at the same
step; "better" and "worse" need p < 0.01. Bits per byte are tested where tokenizers differ. If the
runs of both have the same seeds, each with the same init_from, the test is the paired one.

A choice (block, expert, module) is unused if it got less than 1% of its layer's picks at the last
evaluation. Effective choices: exp(entropy of the shares), 1 if one gets all. FLOPs, on the page:
6 x active parameters x tokens (bytes: slots), without attention.
"""

import json
import math
import re
import statistics
import time
from collections import Counter
from pathlib import Path

from plumbing.cli import Parser, UserError, human, new_file, reading, run_main
from plumbing.log import read_log
from tools.welch import interval, spread, verdict

POINTS, ROUTE_POINTS = 1000, 200        # at most, of a curve and of a stacked area
UNUSED = 0.01                           # a choice with a smaller share of its layer's picks
AXES = ('step', 'tokens', 'minutes', 'FLOPs')
DIFFER = 'settings that differ'
# What a step's line holds besides auxiliary losses, and a run's first line besides settings.
USUAL = {'kind', 'iter', 'seconds', 'loss', 'lr', 'dropout', 'grad_norm', 'tokens_per_s', 'mfu',
         'epoch', 'windows', 'words', *AXES}
SIZES = {'parameters', 'active', 'trained', 'steps', 'tokens_per_step'}
NOT_SET = SIZES | {'settings', 'config', 'command', 'date', 'out_dir', 'resume', 'overwrite'}


# ---- Reading a log ------------------------------------------------------------------------------

def find_runs(path):
    """path: a run's folder, or its name in out/, or a folder of runs with several seeds."""
    for folder in (Path(path), Path('out', path)):
        logs = [*folder.glob('log.jsonl')] or sorted(folder.glob('seed_*/log.jsonl'))
        if logs:
            return [log.parent for log in logs]
    runs = sorted(log.parent.as_posix() for log in Path('out').glob('**/log.jsonl'))
    raise UserError(f"{path} is not a run; there are {', '.join(runs) or 'none'}")


def flatten(line):
    """A line of a log as one flat record, so that records can be merged with |. Keys: 'loss' and
    other numbers as logged; ('val', set, score), ('route', layer, choice), ('set', name) for
    settings."""
    record = {key: value for key, value in line.items() if isinstance(value, (int, float))}
    record['kind'] = next(kind for kind in ('run', 'val', 'loss', 'iter') if kind in line)
    run = line.get('run', {})
    settings = {**run.get('settings', {}), **run.get('config', {}), **run}
    record |= {key: run[key] for key in SIZES if key in run}
    record |= {('set', key): str(value) for key, value in settings.items() if key not in NOT_SET}
    for name, scores in line.get('val', {}).items():
        record |= {('val', name, key): score for key, score in scores.items()}
    for layer, shares in line.get('routes', {}).items():
        record |= {('route', layer, i): share for i, share in enumerate(shares)}
    return record


def place_on_axes(lines):
    """-> the log's records, each with its place on every axis."""
    records = []
    tokens, per_step, active, before = 0, 0, 0, 0
    for record in map(flatten, lines):
        tokens += per_step * (record['iter'] - before)
        before = record['iter']
        if record['kind'] == 'run':                      # once more where the run was resumed
            per_step, active = record['tokens_per_step'], record['active']
        minutes = record['seconds'] / 60
        record |= dict(step=before, tokens=tokens, minutes=minutes, FLOPs=6 * active * tokens)
        records.append(record)
    return records


def read_run(folder):
    """What the table and the curves show of a run."""
    with reading(folder / 'log.jsonl'):
        records = place_on_axes(read_log(folder))
    merge = lambda records: {key: value for record in records for key, value in record.items()}
    about = merge(record for record in records if record['kind'] == 'run')
    last = merge(records)
    steps = [record for record in records if record['kind'] == 'loss']
    evals = [record for record in records if record['kind'] == 'val']
    aux = sorted({key for record in steps for key in record} - USUAL)
    choices = [key for key in last if key[:1] == ('route',)]
    cells = make_cells(about, last, steps, evals, aux)
    run = dict(name=str(folder), axes={}, routes={}, cells=cells)
    run['axes']['steps'], by_key = curves(steps, ['loss', 'grad_norm', 'lr', *aux], POINTS)
    run['curves'] = [dict(y, kind='steps', panel=key, label='train') for key, y in by_key.items()]
    losses = [key for key in last if key[:1] == ('val',) and key[2] == 'loss']
    run['scores'] = {key[1]: (last[key], last.get((*key[:2], 'bits_per_byte'), math.nan),
                              evals[-1]['iter']) for key in losses}
    run['axes']['val'], by_key = curves(evals, losses, POINTS)
    for key, y in by_key.items():
        run['curves'].append(dict(y, kind='val', panel='loss', label=f'val {key[1]}'))
    run['axes']['routes'], by_key = curves(evals, choices, ROUTE_POINTS)
    for key, y in by_key.items():
        run['routes'].setdefault(key[1], []).append(dict(y, unused=last[key] < UNUSED))
    return run


def curves(records, keys, most):
    """-> places on each axis, and values by key: mean, least and greatest of neighbours, so that
    spikes stay."""
    size = math.ceil(len(records) / most) or 1
    groups = [records[i:i + size] for i in range(0, len(records), size)]
    by_key = {}
    for key in keys:
        values = [[record.get(key, math.nan) for record in group] for group in groups]
        values = [[v for v in group if math.isfinite(v)] or [math.nan] for group in values]
        by_key[key] = dict(mean=[sum(group) / len(group) for group in values],
                           low=[min(group) for group in values],
                           high=[max(group) for group in values])
    return {axis: [group[-1][axis] for group in groups] for axis in AXES}, by_key


# ---- The table ----------------------------------------------------------------------------------

def make_cells(about, last, steps, evals, aux):
    """{section: {label: text}}"""
    size = lambda key: f'{about.get(key, math.nan):,.0f}'
    number = lambda key: last.get(key, math.nan)
    unit = 'tokens' if about.get(('set', 'byte_limit'), '0') == '0' else 'slots'
    run = {'parameters': size('parameters'), 'active per token': size('active'),
           'steps': f"{number('iter'):,.0f} of {size('steps')}", unit: human(number('tokens')),
           'words': human(number('words')), 'minutes': f"{number('seconds') / 60:.1f}"}
    speeds = [step['tokens_per_s'] for step in steps]
    run[f'{unit}/s, median'] = f'{statistics.median(speeds or [math.nan]):,.0f}'
    val, routes, balance = {}, {}, []
    for name in dict.fromkeys(key[1] for key in last if key[:1] == ('val',)):
        losses = [(record.get(('val', name, 'loss'), math.nan), record['iter']) for record in evals]
        best, at = min(losses, key=lambda pair: (math.isnan(pair[0]), pair))
        val |= {f'{name}: best loss': f'{best:.4f}', f'{name}: best at step': f'{at:,.0f}'}
        val |= {f"{name}: last {key[2].replace('_', ' ')}": f'{score:.4f}'
                for key, score in last.items() if key[:2] == ('val', name)}
    for layer in dict.fromkeys(key[1] for key in last if key[:1] == ('route',)):
        shares = [share for key, share in last.items() if key[:2] == ('route', layer)]
        parts = [share / sum(shares) for share in shares if share > 0]
        effective = math.exp(-sum(p * math.log(p) for p in parts)) if parts else 0.0
        balance.append((effective / len(shares), f'{effective:.2f} of {len(shares)}', layer))
    if balance:
        unused = [share < UNUSED for key, share in last.items() if key[:1] == ('route',)]
        routes['unused choices'] = f'{sum(unused)} of {len(unused)}'
        _, routes['fewest effective choices'], routes['in layer'] = min(balance)
    return {'run': {label: text.replace('nan', '-') for label, text in run.items()},
            'validation': val, 'routes': routes,
            'auxiliary losses': {key: f'{last[key]:.4g}' for key in aux},
            DIFFER: {key[1]: value for key, value in about.items() if key[:1] == ('set',)}}


def group_seeds(runs):
    """The columns of the table: a run, or runs that differ in nothing but the seed, also where it
    ends the name of their start. A seed that comes again is in a column of its own."""
    groups, seen = {}, Counter()
    for run in runs:
        settings = dict(run['cells'][DIFFER], commit=None)
        number = seen[str(settings)] = seen[str(settings)] + 1
        seed, start = run['start'] = settings.get('seed'), settings.get('init_from', 'None')
        settings |= dict(seed=None, init_from=re.sub(rf'_{seed}\b', '_', start))     # out/base_1
        groups.setdefault((number, str(settings)), []).append(run)
    columns = []
    for group in groups.values():
        first = group[0]
        name = first['name']
        if len(group) > 1:
            name = f"{name.partition('/seed_')[0]}, {len(group)} seeds"
        cells = {section: {label: join([run['cells'][section].get(label, '-') for run in group])
                           for label in first['cells'][section]} for section in first['cells']}
        cells[DIFFER]['seed'] = ', '.join(run['cells'][DIFFER].get('seed', '-') for run in group)
        scores = {name: {run['start']: run['scores'].get(name, (math.nan,) * 3) for run in group}
                  for name in first['scores']}
        for run in group:
            run['group'] = len(columns)                  # they share a colour
        columns.append(dict(name=name, cells=cells, scores=scores))
    return columns


def join(texts):
    """One cell for several runs: the text they share; of numbers, mean ± standard deviation."""
    if len(set(texts)) == 1:
        return texts[0]
    try:
        numbers = [float(text.replace(',', '')) for text in texts]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        return ', '.join(texts)
    return spread(numbers, digits=len(texts[0].partition('.')[2]))


def difference(ours, theirs):
    """{(seed, init_from): (loss, bits per byte, step)} -> the gap between the means, and a test of
    it: if both have the same starts, of the differences against 0, which is the paired one."""
    scores = [*ours.values(), *theirs.values()]
    steps = sorted({step for *_, step in scores})
    ratios = [bits / loss for loss, bits, _ in scores]
    if not all(map(math.isfinite, ratios)):
        return '-', 'not tested: a loss is missing or nan'
    if len(steps) > 1:
        return '-', (f"not tested: the last evaluations are at steps {', '.join(map(str, steps))}; "
                     'train them equally long')
    bits = max(ratios) > 1.001 * min(ratios)             # their tokenizers differ
    paired = ours.keys() == theirs.keys() and all(start != 'None' for _, start in ours)
    if paired:
        ours, theirs = [ours[key][bits] - theirs[key][bits] for key in ours], [0.0] * len(ours)
    else:
        ours, theirs = ([score[bits] for score in scores.values()] for scores in (ours, theirs))
    gap, unit = statistics.mean(ours) - statistics.mean(theirs), ' bits/byte' * bits
    word, _, p = verdict(ours, theirs).partition(', ')
    if p:
        half = interval(ours, theirs)
        p = f', 95% interval {gap - half:+.4f} to {gap + half:+.4f}, {p}' + ', paired' * paired
    return f'{gap:+.4f}{unit}', f'{word}, {gap:+.4f}{unit}{p}'


def add_differences(columns):
    """Add to all columns but the first their last val losses, less the first one's -> a sentence
    for each with a test of the difference."""
    sentences = []
    first, *others = columns
    for column in others:
        for name in [name for name in column['scores'] if name in first['scores']]:
            gap, test = difference(column['scores'][name], first['scores'][name])
            column['cells']['validation'][f'{name}: difference'] = gap
            sentences.append(f"{column['name']} against {first['name']} on {name}: {test}")
    if sentences and all('one seed: no test' in sentence for sentence in sentences):
        sentences = ['One run each shows little, because the seed alone moves the val loss (on the '
                     'toy corpora by about 0.04). Train each with --seeds=1,2,3']
    return sentences


def make_table(columns, shown):
    """Rows of a label and a cell per column that is shown; a heading stands alone. A setting is a
    row if it differs between any of all columns."""
    rows = [['', *(column['name'] for column in shown)]]
    for section in columns[0]['cells']:
        parts = [column['cells'][section] for column in shown]
        labels = list(dict.fromkeys(label for part in parts for label in part))
        if section == DIFFER:
            settings = [column['cells'][DIFFER] for column in columns]
            labels = [label for label in labels if len({s.get(label) for s in settings}) > 1]
        if labels:
            rows.append([section])
        rows += [[label, *(part.get(label, '-') for part in parts)] for label in labels]
    return rows


def cut(text, most):
    """Return the text without control characters, and without its middle if it is too long."""
    text = ''.join(c if c.isprintable() else ' ' for c in text)
    return text if len(text) <= most else f'{text[:most // 2 - 2]}...{text[-most // 2 + 1:]}'


def print_table(columns):
    """Three side by side, the next ones below them, to fit a terminal."""
    for first in range(0, len(columns), 3):
        for label, *cells in make_table(columns, columns[first:first + 3]):
            text = ''.join(f' {cut(cell, 21):>21}' for cell in cells)
            print(f'  {cut(label, 32):32}{text}' if cells else label)
        print()


# ---- The page -----------------------------------------------------------------------------------

def fill(name, data):
    """The page tools/NAME.html with its scripts and the data in it. JSON needs no '<', so nothing
    in it can end its script; nan is null."""
    page = Path(__file__).with_name(f'{name}.html').read_text(encoding='utf-8')
    for script in Path(__file__).parent.glob(f'{name}_*.js'):
        page = page.replace(f'@{script.name}@', script.read_text(encoding='utf-8'))
    data = json.loads(json.dumps(data), parse_constant=lambda name: None)
    data = json.dumps(data, ensure_ascii=False).replace('<', '\\u003c')
    return page.replace('@DATA@', data)


def write_page(path, name, data):
    with new_file(path) as file:                         # a browser never reads half of it
        file.write(fill(name, data))
    print(f'{path}: {human(Path(path).stat().st_size)} bytes; open it in a browser')


def main():
    parser = Parser(__doc__)
    parser.add_argument('runs', nargs='+', help='run folders, or their names in out/')
    parser.add_argument('--html', help='write the table and the curves there, as one page')
    parser.add_argument('--watch', action='store_true', help='again every 10 seconds, until Ctrl-C')
    args = parser.parse_args()
    while True:
        runs = [read_run(folder) for path in args.runs for folder in find_runs(path)]
        columns = group_seeds(runs)
        sentences = add_differences(columns)
        print_table(columns)
        print('\n'.join(sentences))
        if args.html:
            write_page(args.html, 'compare', dict(runs=runs, rows=make_table(columns, columns),
                                                  sentences=sentences, reload=args.watch))
        if not args.watch:
            break
        time.sleep(10)


if __name__ == '__main__':
    run_main(main)
