"""
Rebuild the tables in README.md and docs/*.md from papers/results/*.jsonl.

    python -m papers.tables              # rewrite the tables
    python -m papers.tables --check      # only say which pages would change

The table between <!-- NAME --> and <!-- end --> is a row of RUNS below, a function in MADE, or
results/NAME.jsonl as it is: each key a column. papers/README.md describes the files.
"""

import json
import re
import statistics
import sys
from functools import partial

from arena import leaderboard
from plumbing.cli import Parser, run_main
from plumbing.settings import ROOT
from tools import welch

RESULTS = ROOT / 'papers' / 'results'


# ---- Reading ------------------------------------------------------------------------------------

def read(name):
    """The rows of a file. A line `about` says how they were measured."""
    lines = (RESULTS / f'{name}.jsonl').read_text(encoding='utf-8').splitlines()
    return [row for row in map(json.loads, lines) if 'about' not in row]


def group(rows, key):
    """{value of key: its rows}"""
    groups = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def runs(name, prefix=''):
    """{run: [its seeds]} of the runs that start with prefix, in the order of the file"""
    return group([row for row in read(name) if row['run'].startswith(prefix)], 'run')


# runs that have rows, but none in a table
UNSHOWN = {'both-gumbel1-released', 'both-gumbel2-released', 'both-gumbel2-printed', 'ffn-5',
           'all-5', 'one-causal', 'one-parallel', 'linear', 'rising', 'triangle', 'triangles',
           'life-insert0.5', 'math0.001'}


def shown(name, prefix=''):
    return {run: seeds for run, seeds in runs(name, prefix).items() if run not in UNSHOWN}


def finished():
    """The runs of MoEP that reached their end: only those were evaluated on BLiMP."""
    return group([row for row in read('moep') if row['blimp']], 'run')


def scores(seeds, key='loss', data=None, at=-1):
    """Return each seed's at one evaluation, by default the last, on one data set or the only."""
    sets = [run['evaluations'][at]['val'] for run in seeds]
    data = data or next(iter(sets[0]))
    return [val.get(data, {}).get(key) for val in sets]


# ---- Cells --------------------------------------------------------------------------------------

def join(*cells):
    return ' | '.join(map(str, cells))


def spread(values, digits):
    """The mean, and the standard deviation if there are several values. None is left out."""
    values = [value for value in values if value is not None]
    return welch.spread(values, digits) if values else '-'


def mean_of_three(values):
    """Return the mean of three seeds, and half of its 95% interval."""
    return statistics.mean(values), 4.303 * statistics.stdev(values) / 3 ** 0.5


def millions(count):
    return f'{count / 1e6:.{1 if count >= 1e7 else 2}f}M'


def val(seeds, *args, **keys):
    return spread(scores(seeds, *args, **keys), 3)


def blimp(seeds):
    """Full BLiMP of the last checkpoint"""
    curves = [run['blimp'].get('harness full') for run in seeds]
    return spread([curve[-1][1] for curve in curves if curve], 1)


def loss_at(step, seeds):
    """The validation loss, and the number of seeds that got so far"""
    losses = [evaluation['val']['babylm']['loss'] for run in seeds
              for evaluation in run['evaluations'] if evaluation['iter'] == step]
    return f'{spread(losses, 3)} ({len(losses)})'


def flops(seeds):
    """Training FLOPs per token, in millions: 6 per active parameter, and attention over 512 tokens
    of width 512, at their mean position, in each layer"""
    # a routed layer's attention sees 1/8 of all tokens: (1/8)^2 of the products
    layers = {'depth-dense6': 6, 'depth': 5 + 5 / 64, 'depth-18': 9 + 9 / 64}
    kind = seeds[0]['run']
    count = 6 * seeds[0]['active'] + 6 * layers.get(kind, 10) * 512 * 512
    return f'{count / 1e6:.0f}M' + ' and 154M for one more head' * (kind == 'exit')


def lowest_bits(seeds):
    return spread([min(evaluation['val']['simplewiki']['bits_per_byte']
                       for evaluation in run['evaluations']) for run in seeds], 3)


COLUMNS = {                      # {header: cell made from the seeds of a run}
    'parameters': lambda seeds: millions(seeds[0]['parameters']),
    'parameters, active': lambda seeds: ', '.join(
        millions(seeds[0][key]) for key in ('parameters', 'active')),
    'val loss': val,
    'stories, val loss': lambda seeds: val(seeds, data='tinystories_neox'),
    'math, val loss': lambda seeds: val(seeds, data='openmath_neox'),
    **{f'val loss at step {step:,}': partial(loss_at, step) for step in (16000, 18303)},
    **dict.fromkeys(['bits per byte', 'at the end'], lambda seeds: val(seeds, 'bits_per_byte')),
    'bits per byte, lowest': lowest_bits,
    **dict.fromkeys(['BLiMP', 'BLiMP, `harness`'], blimp),
    'unused choices, of 48': lambda seeds: ', '.join(
        str(run['evaluations'][-1]['unused'][0]) for run in seeds
        if 'unused' in run['evaluations'][-1]),
    'FLOPs per token, training': flops,
    'tokens/s': lambda seeds: f"{seeds[0]['tokens_per_s_alone'] / 1e3:.0f}K",
    'exact answers, of 589, each seed': lambda seeds: ', '.join(
        str(run['answers']['right']) for run in seeds),
    'training loss': lambda seeds: spread([run['last_losses'] for run in seeds], 2)}

RUNS = dict(                     # {table: (file, start of the runs' names, header)}
    papaformer_stories=('papaformer', 'stories-', 'model | parameters | val loss | BLiMP'),
    papaformer_both=('papaformer', ('both-llama', 'both-share', 'both-gumbel'),
                     'model | stories, val loss | math, val loss | BLiMP'),
    stlm=('stlm', '', 'config | parameters | bits per byte'),
    stlm_depth=('stlm_depth', '',
                'model | parameters, active | FLOPs per token, training | tokens/s | '
                'bits per byte'),
    stlm_dropout=('stlm_dropout', '', 'schedule | bits per byte, lowest | at the end'),
    stlm_math=('stlm_math', '',
               'config | parameters | bits per byte | exact answers, of 589, each seed'),
    moduleformer_base=('moduleformer', 'base',
                       'model | parameters, active | val loss | BLiMP | training loss'))


def named(kinds):
    """The `name` in its rows, and the seeds of each run"""
    return [(seeds[0].get('name', kind), seeds) for kind, seeds in kinds.items()]


def table(header, groups):
    """groups: (first cell, the seeds of a run)"""
    yield header
    for name, seeds in groups:
        yield join(name, *(COLUMNS[column](seeds) for column in header.split(' | ')[1:]))


# ---- MoEP ---------------------------------------------------------------------------------------

def headline():
    """Compare at the paper's learning rate, and at the arena's, the best of three for both."""
    yield ' | learning rate | val loss | BLiMP, `harness`'
    kinds = 'gpt2', 'moep'
    for kind in kinds:
        seeds = finished()[kind]
        yield join(f'`python train.py config/paper/{kind}.py`', '3e-4', val(seeds), blimp(seeds))
    entries = group(read('arena_baby'), 'entry')
    for kind in kinds:
        loss, pairs = ([row[key] for row in entries[kind]] for key in ('loss', 'harness'))
        yield join(f'`python -m arena {kind} --track baby`', '2e-3', spread(loss, 3),
                   spread(pairs, 1))


def moep():
    return table('model and balance loss | val loss | BLiMP | unused choices, of 48',
                 named(finished()))


def moep_controls():
    kinds = runs('moep_controls') | runs('moep')
    groups = [('none: GPT-2', kinds['gpt2']),
              ('one block of full width, no router', kinds['single']),
              ('4 of 4 narrow blocks', kinds['top4']),
              ('2 of 4 narrow blocks: MoEP', kinds['moep'])]
    return table('parallel layers | parameters, active | val loss at step 16,000 | '
                 'val loss at step 18,303 | BLiMP, `harness`', groups)


PAPER_TABLE_1 = {                # BLiMP with its supplement, entities, WUG
    'gpt2': ('GPT-2', 59.70, 13.15, 36.00),
    'moep': ('MoEP', 59.15, 35.65, 33.00),
    'moep_swiglu': ('MoEP-SwiGLU', 60.35, 17.10, 36.50)}


def moep_tasks():
    yield '| BLiMP | supplement | mean of both | Entity Tracking | WUG, mean times 100'
    blimp, supplement = 'blimp_filtered', 'supplement_filtered'
    kinds = runs('babylm2025')
    for kind, (name, both, entity, wug) in PAPER_TABLE_1.items():
        if seeds := kinds.get(kind):
            def cell(*tasks, factor=1):
                means = [factor * statistics.mean(run[task] for task in tasks) for run in seeds]
                return spread(means, 1)
            yield join(name, cell(blimp), cell(supplement), cell(blimp, supplement),
                       cell('entity_tracking'),
                       cell('wug_adj_nominalization', 'wug_past_tense', factor=100))
        yield join(f'{name}, the paper', '', '', both, entity, wug)


# ---- GLUE and Self-MoE --------------------------------------------------------------------------

def glue():
    tuned = {(row['run'], row['task']): row for row in read('glue')}
    yield 'task, metric | majority | GPT-2 | MoEP'
    for name, metric in (('SST-2', 'accuracy'), ('CoLA', 'Matthews'), ('MRPC', 'F1'),
                         ('RTE', 'accuracy'), ('WSC', 'accuracy')):
        task = name.lower().replace('-', '')
        models = [tuned[f'{run}_42', task] for run in ('gpt2', 'moep')]
        yield join(f'{name}, {metric}', f"{models[0]['majority'][metric]:.2f}",
                   *(spread([seed[metric] for seed in row['seeds'].values()], 2) for row in models))


def gates(corpus):
    """{run: its seeds}"""
    return group([row for row in read('selfmoe') if row['corpus'] == corpus], 'run')


def selfmoe():
    """The runs of a seed share their start, so differences are taken in pairs."""
    kinds = gates('real')
    yield 'fine-tuned with | val loss | difference to no gates, in pairs, 95% interval'
    for name, seeds in kinds.items():
        if name not in ('base', 'matrix, changes', 'vector, improves', 'scalar, improves'):
            losses = spread([run['loss'] for run in seeds], 3)
            pairs = zip(seeds, kinds['none'], strict=True)
            mean, reach = mean_of_three([run['loss'] - plain['loss'] for run, plain in pairs])
            yield join(name.replace('none', 'no gates'), losses,
                       '' if name == 'none' else f'{mean:+.3f} ± {reach:.3f}')


# ---- ModuleFormer -------------------------------------------------------------------------------

def methods(how):
    """The ways to learn math, jointly or alone, with the change from the start"""
    kinds = shown('moduleformer', how)
    yield 'method | trained | old text, val loss | math, val loss | BLiMP'
    for seeds in kinds.values():
        name = seeds[0]['name']
        started = kinds[f'{how}-full' if 'ModuleFormer' in name else f'{how}-dense']
        cells = []
        for data in ('babylm', 'openmath_babylm'):
            change = (statistics.mean(scores(seeds, data=data))
                      - statistics.mean(scores(started, data=data, at=0)))
            cells.append(f'{val(seeds, data=data)} ({change:+.2f})')
        yield join(name, f"{seeds[0]['trained'] / 1e6:.2f}M", *cells, blimp(seeds))


def moduleformer_prune():
    kinds = [*shown('moduleformer', 'math').values()]
    yield join('threshold', *(f"{seeds[0]['name']}: modules left, loss" for seeds in kinds))
    for i, row in enumerate(kinds[0][0]['prune']['rows']):
        if row['threshold'] in (0, 0.01, 0.05, 0.1, 0.2, 1):
            cells = []
            for seeds in kinds:
                pruned = [run['prune']['rows'][i] for run in seeds]
                left = spread([100 * row['modules'] for row in pruned], 0)
                cells.append(f"{left}%, {spread([row['loss'] for row in pruned], 3)}")
            yield join(f"{row['threshold']:g}", *cells)


# ---- The arena ----------------------------------------------------------------------------------

ON_THE_PAGE = dict(              # of each kind; `python -m arena --table` prints all
    toy=('dense_muon', 'loop', 'selfmoe_mixture', 'dense_moe_shared_muon_flops', 'dense',
         'gpt2', 'router_hash', 'moep'),
    baby=('dense_moe_shared_muon_flops_drop_expert', 'dense_muon', 'dense_moe_shared_muon_flops',
          'dense', 'stlm_depth_flops', 'selfmoe_gates', 'gpt2', 'moduleformer',
          'moep', 'papaformer_share'))


def arena(track):
    """Both classes in one table, the best first, without p. The dense entries are in both classes,
    so an entry of both has one verdict."""
    entries = {}
    for key in leaderboard.CLASSES:
        header, *rows = leaderboard.table(track, key, [RESULTS])
        entries |= {row[0]: dict(zip(header, row)) for row in rows}
    columns = ['entry', 'parameters, M', 'MFLOPs per token', 'bits per byte', 'pairs `babylm2025`']
    yield join(*columns, 'against the dense entry')
    rows = [entries[name] for name in ON_THE_PAGE[track]]
    for row in sorted(rows, key=lambda row: float(row['bits per byte'].split()[0])):
        row['pairs `babylm2025`'] = row['pairs `babylm2025`'].split()[0]
        yield join(*map(row.get, columns), row['against the dense entry'].partition(', p')[0])


def bits_of(rows):
    """Bits per byte over validation texts, without babylm's: it chose settings, and a part of it
    stood in the training text of some runs."""
    return [statistics.mean(bits for name, bits in row['val'].items() if name != 'babylm')
            for row in rows]


def gaps_by_passes():
    """(passes, tokens of text, the dense model's bits per byte, {kind: (what a routed model is
    better by, half of the 95% interval)}), over three seeds, in pairs."""
    for rows in group(read('passes'), 'size').values():
        bits = dict(zip([(row['entry'], row['seed']) for row in rows], bits_of(rows)))
        gaps = {kind: mean_of_three([bits['dense', seed] - bits[kind, seed] for seed in (1, 2, 3)])
                for kind in ('routed', 'dropped')}
        dense = statistics.mean(bits['dense', seed] for seed in (1, 2, 3))
        yield rows[0]['passes'], rows[0]['tokens'] / rows[0]['passes'], dense, gaps


def passes():
    yield 'passes | dense | dense minus routed | dense minus routed with dropping'
    for number, _, dense, gaps in sorted(gaps_by_passes()):
        cells = [f'{gap:+.4f} ± {reach:.4f}' for gap, reach in gaps.values()]
        yield join(f'{number:.3g}', f'{dense:.4f}', *cells)


def after_equal_time():
    """Yield of papers.passes --minutes the text, the rows of the dense and of the routed model, and
    the dense one's {budget: bits per byte}, for the effective speedup."""
    by_size = group([row for row in read('minutes') if row.get('is') != 'trial'], 'size')
    for size in (None, 10e6, 5e6, 2.5e6, 'python'):
        models = group([row for row in by_size[size] if 'is' not in row], 'entry')
        longer = [row for row in by_size[size] if 'is' in row]
        full = models['dense'][0]['tokens']
        curve = {row['tokens'] / full: bits for row, bits in zip(longer, bits_of(longer))}
        curve[1.0] = statistics.mean(bits_of(models['dense']))
        yield size, models['dense'], models['third'], curve


def gap_after_equal_time(dense, routed):
    """What the routed model is better by, half of the 95% interval, p; of one seed only the gap."""
    bits = bits_of(dense), bits_of(routed)
    gap = statistics.mean(bits[0]) - statistics.mean(bits[1])
    return (gap, welch.interval(*bits), welch.welch(*bits)) if len(dense) > 1 else (gap, None, 1.0)


def minutes():
    yield ('text | passes: dense, routed | dense | routed | dense minus routed | p | '
           'effective speedup')
    for size, dense, routed, curve in after_equal_time():
        gap, reach, p = gap_after_equal_time(dense, routed)
        tokens = routed[0]['tokens'] / routed[0]['passes'] / 1e6
        speedup = leaderboard.effective_speedup(statistics.mean(bits_of(routed)), curve)
        yield join(f"{tokens:.2g}M of {'Python files' if size == 'python' else 'prose'}",
                   f"{dense[-1]['passes']:.3g}, {routed[0]['passes']:.3g}",
                   *(spread(bits_of(rows), 4) for rows in (dense, routed)),
                   f'{gap:+.4f} ± {reach:.4f}' if reach else f'{gap:+.4f} (one seed)',
                   f'{p:.2g}' if reach else '-',
                   speedup if len(curve) > 1 and p < welch.SURE else '-')


# ---- Pages --------------------------------------------------------------------------------------

MADE = {made.__name__: made for made in (headline, moep, moep_controls, moep_tasks, glue, selfmoe,
                                         moduleformer_prune, passes, minutes)}
MADE |= {f'moduleformer_{how}': partial(methods, how) for how in ('joint', 'life')}
MADE |= {f'arena_{track}': partial(arena, track) for track in ON_THE_PAGE}


def lines_of(name):
    """The header and the rows of a table"""
    if name in RUNS:
        file, prefix, header = RUNS[name]
        return table(header, named(shown(file, prefix)))
    if name in MADE:
        return MADE[name]()
    rows = read(name)
    return [join(*rows[0]), *(join(*row.values()) for row in rows)]


def fill(text):
    """The text with every marked table rebuilt"""
    def rebuild(match):
        rows = [f'| {line} |' for line in lines_of(match[1])]
        rows.insert(1, '|' + '---|' * (rows[0].count('|') - 1))
        return f'<!-- {match[1]} -->\n' + '\n'.join(rows) + '\n<!-- end -->'
    return re.sub(r'<!-- (\w+) -->\n.*?<!-- end -->', rebuild, text, flags=re.DOTALL)


def main():
    parser = Parser(__doc__)
    parser.add_argument('--check', action='store_true', help='only compare')
    check = parser.parse_args().check
    stale = False
    for path in [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]:
        text = path.read_text(encoding='utf-8')
        if (rebuilt := fill(text)) != text:
            stale = True
            print(path.name, 'differs from papers/results' if check else 'rebuilt')
            if not check:
                path.write_text(rebuilt, encoding='utf-8')
    sys.exit(check and stale)


if __name__ == '__main__':
    run_main(main)
