"""
Rebuilds tables of docs/*.md from the files beside this one: python docs/results/tables.py (--check: only says what would change).
The table NAME stands between <!-- NAME --> and <!-- end -->, and is made by the function NAME.
"""

import json
import re
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
KINDS = dict(gpt2='GPT-2', moep='MoEP, `switch`', entropy='MoEP, `entropy`', printed='MoEP, `printed`', none='MoEP, no balance loss',
             swiglu='MoEP-SwiGLU, `switch`')
SEEDS = (42, 1, 2)                                           # in this order everywhere


def runs(folder):
    """{kind: {seed: run}} of files named kind_seed.json."""
    found = {path.stem: json.loads(path.read_text()) for path in (HERE / folder).glob('*.json')}
    by_kind = {kind: {seed: found.pop(f'{kind}_{seed}') for seed in SEEDS if f'{kind}_{seed}' in found} for kind in KINDS}
    if found:
        raise ValueError(f'{folder}: neither kind nor seed is known of {list(found)}')
    return {kind: some for kind, some in by_kind.items() if some}


def spread(values, digits):
    """The mean of what there is, and its standard deviation over seeds if there are several."""
    values = [v for v in values if v is not None]
    if not values:
        return '-'
    return f'{statistics.mean(values):.{digits}f}' + (f' ± {statistics.stdev(values):.{digits}f}' if len(values) > 1 else '')


def finished(found):
    """The runs that came to their end: only those were evaluated on BLiMP."""
    done = {kind: [run for run in some.values() if run['blimp']] for kind, some in found.items()}
    return {kind: some for kind, some in done.items() if some}


def blimp(run, mode, subset):
    """{words: accuracy}, by words."""
    return {r['words']: r['overall'] for b in run['blimp'] if (b['mode'], b['subset']) == (mode, subset) for r in b['runs']}


def idle(evaluation):
    """How many of all choices (blocks and experts, of all layers) got less than 1% of their layer's slots; and of how many."""
    shares = [share for layer in evaluation['routes'].values() for share in layer]
    return sum(share < 0.01 for share in shares), len(shares)


def moep():
    yield 'model and balance loss | seeds | val loss | bits per byte | BLiMP, `harness` | BLiMP, `babylm2025` | choices that go unused'
    for kind, some in finished(runs('moep')).items():
        last = [run['evaluations'][-1] for run in some]
        full = [[list(blimp(run, mode, 'full').values())[-1] for run in some] for mode in ('harness', 'babylm2025')]
        unused = ', '.join('{} of {}'.format(*idle(e)) for e in last) if last[0]['routes'] else ''
        yield (f"{KINDS[kind]} | {len(some)} | {spread([e['val']['babylm']['loss'] for e in last], 3)} | "
               f"{spread([e['val']['babylm']['bits_per_byte'] for e in last], 3)} | {spread(full[0], 1)} | {spread(full[1], 1)} | {unused}")


def moep_words():
    found = finished(runs('moep'))
    yield 'words | ' + ' | '.join(KINDS[kind] for kind in found)
    for million in (1, 2, 3, 5, 7, 10, 20, 30, 40, 60, 80, 100):
        near = lambda run: min(blimp(run, 'babylm2025', 'fast').items(), key=lambda point: abs(point[0] - 1e6 * million))[1]
        yield f'{million}M | ' + ' | '.join(spread([near(run) for run in some], 1) for some in found.values())


def moep_routes():
    steps = (2000, 6000, 10000)
    yield 'model and balance loss | seed | ' + ' | '.join(f'step {step:,}: val loss, unused' for step in steps)
    for kind, some in runs('moep').items():
        for seed, run in some.items():
            at = {e['iter']: e for e in run['evaluations']}
            cells = [f"{at[step]['val']['babylm']['loss']:.3f}" + (', {} of {}'.format(*idle(at[step])) if at[step]['routes'] else '')
                     if step in at else '-' for step in steps]
            yield f'{KINDS[kind]} | {seed} | ' + ' | '.join(cells)


def papaformer():
    found = json.loads((HERE / 'papaformer.json').read_text())['real']
    yield 'run | steps | stories, val loss | math, val loss | prompts whose path fits their domain'
    for name, seeds in found.items():
        last = [[seed['loss'][data][-1] if data in seed['loss'] else None for seed in seeds.values()] for data in ('tinystories_neox', 'openmath_neox')]
        fits = spread([100 * seed['usage']['accuracy'] for seed in seeds.values()], 0) + '%' if 'usage' in next(iter(seeds.values())) else ''
        yield f"{name} | {next(iter(seeds.values()))['steps'][-1]:,} | {spread(last[0], 3)} | {spread(last[1], 3)} | {fits}"


def selfmoe():
    found = json.loads((HERE / 'selfmoe.json').read_text())['real']
    yield 'fine-tuned with | val loss | difference to no gates, seed by seed | answers right of 584, by seed'
    for name, seeds in found.items():
        if name != 'base':
            less = [seed['loss'] - found['none'][key]['loss'] for key, seed in seeds.items()]
            yield (f"{name.replace('none', 'no gates')} | {spread([seed['loss'] for seed in seeds.values()], 3)} | "
                   f"{'' if name == 'none' else ', '.join(f'{d:+.3f}' for d in less)} | {', '.join(str(seed['right']) for seed in seeds.values())}")


def stlm():
    found = json.loads((HERE / 'stlm.json').read_text())['simplewiki']
    yield 'config | parameters | val loss | bits per byte'
    for name, run in found.items():
        yield f"`paper/stlm/{name}.py` | {run['parameters'] / 1e6:.1f}M | {run['loss']:.3f} | {run['bits_per_byte']:.3f}"


def glue():
    found, metric = json.loads((HERE / 'glue.json').read_text()), dict(cola='Matthews', mrpc='F1')
    names = dict(sst2='SST-2', cola='CoLA', mrpc='MRPC', rte='RTE', wsc='WSC')
    yield 'task, metric | train, valid | majority | GPT-2 | MoEP | minutes per seed, GPT-2 | MoEP'
    for task, name in names.items():
        key, entries = metric.get(task, 'accuracy'), [found[run][task] for run in ('gpt2_42', 'moep_42')]
        scores = [spread([seed[key] for seed in entry['seeds'].values()], 2) for entry in entries]
        times = [[seed['minutes'] for seed in entry['seeds'].values()] for entry in entries]
        yield (f"{name}, {key} | {entries[0]['train']:,}, {entries[0]['valid']:,} | {entries[0]['majority'][key]:.2f} | {' | '.join(scores)} | "
               + ' | '.join(f'{min(t):.1f} to {max(t):.1f}' for t in times))


def fill(text):
    """The text with every marked table made anew."""
    def table(match):
        rows = [f'| {row} |' for row in globals()[match[1]]()]
        rows.insert(1, '|' + '---|' * (rows[0].count('|') - 1))
        return f'<!-- {match[1]} -->\n' + '\n'.join(rows) + '\n<!-- end -->'
    return re.sub(r'<!-- (\w+) -->\n.*?<!-- end -->', table, text, flags=re.DOTALL)


if __name__ == '__main__':
    stale = [path for path in sorted(HERE.parent.glob('*.md')) if fill(path.read_text(encoding='utf-8')) != path.read_text(encoding='utf-8')]
    for path in stale:
        if '--check' not in sys.argv:
            path.write_text(fill(path.read_text(encoding='utf-8')), encoding='utf-8')
        print(path.name, 'differs from docs/results' if '--check' in sys.argv else 'rebuilt')
    sys.exit('--check' in sys.argv and bool(stale))
