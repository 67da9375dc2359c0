"""
The arena's rules, and its tables from the rows that `python -m arena` adds.

Two entries differ if the bits per byte of their seeds do, by a t-test whose standard deviation is
pooled over the track. In the class of minutes, which has few entries, by Welch's t-test.
"""

import json
import math
import statistics
from functools import partial
from pathlib import Path

from plumbing.cli import reading
from plumbing.settings import ROOT
from tools.welch import reach, spread, student, verdict, word

PUBLISHED = ROOT / 'papers' / 'results'
TRACKS = dict(                           # FLOPs: of training; within: how far from either number
    toy=dict(data='toy_stories', pairs='toy_blimp', vocab_size=1984, window=64, tokens=0.5e6,
             parameters=0.66e6, flops_per_token=3.75e6, within=0.1),
    baby=dict(data='babylm', pairs='blimp', vocab_size=16384, window=512, tokens=150e6,
              parameters=28e6, flops_per_token=180e6, within=0.05))
CLASSES = dict(parameters='Equal parameters', flops_per_token='Equal FLOPs per token')
DENSE = ('dense', 'dense_muon', 'gpt2')  # the best of these is the dense entry of a class
DENSE_OF_MINUTES = 'dense_muon'
BUDGETS = (0.5, 1, 1.5, 2)               # of the dense entry, in its usual steps
MODES = ('harness', 'babylm2025')        # of eval_blimp.py


def classes(costs, track):
    """The classes of a model or a run: one, both or none. A run must also have read the track's
    tokens, give or take a tenth, since babylm may be prepared with another tokenizer."""
    rules = TRACKS[track]
    if abs(costs.get('tokens', rules['tokens']) / rules['tokens'] - 1) > 0.1:
        return []
    return [key for key in CLASSES if abs(costs[key] / rules[key] - 1) <= rules['within']]


# ---- Rows ---------------------------------------------------------------------------------------

def read_rows(file, folders, swept=None):
    """The rows of .jsonl files, where there are any; of a sweep, those of one setting."""
    rows = []
    for path in [Path(folder, file) for folder in folders]:
        with reading(path):
            lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
            rows += [row for row in map(json.loads, lines) if 'entry' in row]
    return [row for row in rows if not swept or row['setting'].startswith(f'{swept}=')]


def read_results(track, folders):
    """{entry: {seed: row}}"""
    entries = {}
    for row in read_rows(f'arena_{track}.jsonl', folders):
        entries.setdefault(row['entry'], {})[row['seed']] = row
    return entries


def read_bits(track, folders):
    """{entry: the bits per byte of its seeds}, where there are several; None if one diverged (a
    deviation of ten times the median)."""
    bits = {name: [row['bits_per_byte'] for row in seeds.values()]
            for name, seeds in read_results(track, folders).items() if len(seeds) > 1}
    limit = 10 * statistics.median(map(statistics.stdev, bits.values())) if bits else 0
    return {name: seeds if statistics.stdev(seeds) <= limit else None
            for name, seeds in bits.items()}


# ---- Tables -------------------------------------------------------------------------------------

def table(track, key, folders):
    """The cells of a class: the header, then its entries, the best first. folders: with rows in
    arena_TRACK.jsonl."""
    yield ['entry', 'seeds', 'parameters, M', 'MFLOPs per token', 'bits per byte',
           'pairs `babylm2025`', 'against the dense entry']
    entries = {name: list(seeds.values()) for name, seeds in read_results(track, folders).items()}
    bits = {name: [row['bits_per_byte'] for row in rows] for name, rows in entries.items()
            if key in classes(rows[0], track)}
    test = partial(compare, read_bits(track, folders))
    for name, against in against_dense(bits, DENSE, test).items():
        first, *_ = rows = entries[name]
        yield [name, str(len(rows)), f"{first['parameters'] / 1e6:.2f}",
               f"{first['flops_per_token'] / 1e6:.2f}", spread(bits[name], digits=4),
               spread([row['babylm2025'] for row in rows]), against]


def against_dense(bits, kinds, test):
    """{entry: how it compares with the best of these kinds}, the best first. bits: of its seeds."""
    best_first = sorted(bits, key=lambda name: statistics.mean(bits[name]))
    dense = next((name for name in best_first if name in kinds), None)
    verdicts = {name: test(name, dense) if dense else '-' for name in best_first}
    return verdicts | ({dense: 'the dense entry'} if dense else {})


def compare(bits, name, other):
    """The gap between two entries, its 95% interval, and whether it is clear, by the deviation of
    seeds pooled over all entries."""
    for entry in (name, other):
        if not bits.get(entry):
            return 'no test: a seed diverged' if entry in bits else 'no test: one seed'
    tested = [*filter(None, bits.values())]
    gap = statistics.mean(bits[name]) - statistics.mean(bits[other])
    freedom = sum(len(seeds) - 1 for seeds in tested)
    squares = sum(statistics.variance(seeds) * (len(seeds) - 1) for seeds in tested)
    error = math.sqrt(squares / freedom * (1 / len(bits[name]) + 1 / len(bits[other])))
    p = student(abs(gap) / error, freedom) if error else float(gap == 0)
    return f'{gap:+.4f} ± {error * reach(freedom):.4f}, {word(gap, p)}, p = {p:.2g}'


def show(track, folders, named=()):
    """Both tables, with a mark at the entries that were named. Two are compared with each other."""
    for key, title in CLASSES.items():
        print(f'\n{title}')
        print_columns([['> ' + name if name in named else '  ' + name, *cells]
                       for name, *cells in table(track, key, folders)])
    if len(named) == 2:
        test = compare(read_bits(track, folders), *named)
        print(f"\n{' against '.join(named)}, bits per byte: {test}")


def minutes_table(track, folders):
    """The cells of the class of minutes: the header, then its entries, the best first."""
    yield ['entry', 'time of a step', 'tokens, M', 'bits per byte', 'effective speedup',
           'against the dense entry']
    rows = read_rows(f'arena_{track}_minutes.jsonl', folders)
    dense = {budget: statistics.mean(row['bits_per_byte'] for row in rows
                                     if (row['entry'], row['budget']) == (DENSE_OF_MINUTES, budget))
             for budget in BUDGETS}
    entries = {}
    for row in rows:
        if row['budget'] == 1:
            entries.setdefault(row['entry'], []).append(row)
    bits = {name: [row['bits_per_byte'] for row in seeds] for name, seeds in entries.items()}
    test = lambda name, dense: verdict(bits[name], bits[dense])
    for name, against in against_dense(bits, [DENSE_OF_MINUTES], test).items():
        row = entries[name][0]
        speedup = effective_speedup(statistics.mean(bits[name]), dense)
        yield [name, f"{row['time']:.2f}", f"{row['tokens'] / 1e6:.2f}", spread(bits[name], 4),
               speedup, against]


def effective_speedup(bits, dense):
    """How many times as long the dense entry must train for this loss. Its loss between two budgets
    is a line over the logarithm of time."""
    curve = sorted(dense.items())
    for (short, high), (long, low) in zip(curve, curve[1:]):
        if low <= bits <= high:
            return f'{short * (long / short) ** ((high - bits) / (high - low)):.2f}'
    return f'over {curve[-1][0]}' if bits < curve[-1][1] else f'below {curve[0][0]}'


def print_columns(lines):
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print('  '.join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def show_sweep(name, key, track, folders):
    """The values that were tried, the best first."""
    rows = [row for row in read_rows(f'arena_{track}_sweeps.jsonl', folders, key)
            if row['entry'] == name]
    for row in sorted(rows, key=lambda row: row['loss']):
        print(f"{name:24} {row['setting']:24} val loss {row['loss']:.4f}")
