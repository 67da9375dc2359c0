"""
The arena's rules, and its tables from the small files that tools.arena keeps.

Two entries differ if the bits per byte of their seeds do, by Welch's t-test.
"""

import math
import statistics

from plumbing.cli import UserError, parse_json

TRACKS = dict(                           # FLOPs: of training; within: how far from either number
    toy=dict(data='toy_stories', pairs='toy_blimp', vocab_size=1926, window=64, tokens=0.5e6,
             parameters=0.65e6, flops_per_token=3.75e6, within=0.1),
    baby=dict(data='babylm', pairs='blimp', vocab_size=16384, window=512, tokens=150e6,
              parameters=28e6, flops_per_token=180e6, within=0.05))
CLASSES = dict(parameters='Equal parameters', flops_per_token='Equal FLOPs per token')
DENSE = ('strong', 'strong_muon', 'gpt2')     # the best of these is the dense entry of a class
MODES = ('harness', 'babylm2025')        # of eval_blimp.py
SEEDS = 100                              # of an entry, at most
SCORES = ('parameters', 'active', 'flops_per_token', 'tokens', 'tokens_per_s', 'minutes', 'loss',
          'bits_per_byte', *MODES)
SHOWN = ('seeds', 'parameters, M', 'MFLOPs per token', 'bits per byte', 'pairs `harness`',
         'against the dense entry')      # the columns in a terminal
SURE = 0.01                              # a difference counts if p is less


def classes(count, track):
    """The classes that an entry is in: one, both, or none. Its tokens, once they are known, have to be
    those of the track within a tenth, since babylm may be prepared with another tokenizer."""
    rules = TRACKS[track]
    if abs(count.get('tokens', rules['tokens']) / rules['tokens'] - 1) > 0.1:
        return []
    return [key for key in CLASSES if abs(count[key] / rules[key] - 1) <= rules['within']]


def read_results(track, results):
    """{name: {seed: scores}}; a score on BLiMP may be None."""
    found = {}
    for path in sorted((results / track).glob('*.json')):
        name, _, seed = path.stem.rpartition('_')
        if not seed.isdigit():
            continue                                     # not the arena's
        try:
            result = parse_json(path.read_text())
            found.setdefault(name, {})[int(seed)] = {key: result[key] for key in SCORES}
        except (ValueError, KeyError, TypeError):
            raise UserError(f'{path} is not a result: delete it, and run its entry again') from None
    return found


def welch(a, b):
    """Welch's t-test -> p, two-sided: how often two equal entries would differ as much as these."""
    gap = abs(statistics.mean(a) - statistics.mean(b))
    x, y = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    if x + y == 0:
        return float(gap == 0)
    t = gap / math.sqrt(x + y)
    freedom = (x + y) ** 2 / (x ** 2 / (len(a) - 1) + y ** 2 / (len(b) - 1))
    return student(t, freedom)


def student(t, freedom, n=20_000):
    """P(|T| > t). With T = sqrt(freedom) tan(angle) the density is cos(angle)^(freedom - 1), up to a
    factor; its integral from t's angle to pi/2, by the midpoint rule."""
    start = math.atan(t / math.sqrt(freedom))
    step = (math.pi / 2 - start) / n
    area = step * sum(math.cos(start + (i + 0.5) * step) ** (freedom - 1) for i in range(n))
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return 2 * factor * area


def spread(values, digits=1):
    """Mean ± standard deviation over seeds; None, where nothing was measured, is left out."""
    values = [value for value in values if value is not None]
    if not values:
        return '-'
    text = f'{statistics.mean(values):,.{digits}f}'
    return f'{text} ± {statistics.stdev(values):,.{digits}f}' if len(values) > 1 else text


def verdict(mine, dense):
    """Bits per byte against another entry's, mostly the dense one's."""
    if not dense:                                        # there may be none yet
        return '-'
    if min(len(mine), len(dense)) < 2:
        return 'one seed: no test'
    p = welch(mine, dense)
    word = 'better' if statistics.mean(mine) < statistics.mean(dense) else 'worse'
    return f"{word if p < SURE else 'open'}, p = {p:.3g}"        # with two digits, 0.00998 reads 0.01


def table(track, key, results):
    """The cells of a class: the header, then its entries, the best first."""
    yield ['entry', 'seeds', 'parameters, M', 'active, M', 'MFLOPs per token', 'tokens/s', 'minutes',
           'val loss', 'bits per byte', 'pairs `harness`', 'pairs `babylm2025`', 'against the dense entry']
    found = read_results(track, results)
    bits = {}
    for name, seeds in found.items():
        if key in classes(next(iter(seeds.values())), track):
            bits[name] = [result['bits_per_byte'] for result in seeds.values()]
    best_first = sorted(bits, key=lambda name: statistics.mean(bits[name]))
    dense = next((name for name in best_first if name in DENSE), None)
    for name in best_first:
        column = {score: [result[score] for result in found[name].values()] for score in SCORES}
        against = 'the dense entry'
        if name != dense:
            against = verdict(bits[name], bits.get(dense, []))
        yield [
            name,
            str(len(bits[name])),
            f"{column['parameters'][0] / 1e6:.2f}",
            f"{column['active'][0] / 1e6:.2f}",
            f"{column['flops_per_token'][0] / 1e6:.2f}",
            spread(column['tokens_per_s'], digits=0),
            spread(column['minutes']),
            spread(column['loss'], digits=3),
            spread(column['bits_per_byte'], digits=4),
            spread(column['harness']),
            spread(column['babylm2025']),
            against]


def show(track, results, named):
    """Both tables, with a mark at the entries that were named; then, in short, where these stand,
    and the dense one. If two were named, they are also compared with each other."""
    lines = []
    for key, title in CLASSES.items():
        head, *ranked = table(track, key, results)
        columns = [head.index(name) for name in SHOWN]
        rows = []
        for row in (head, *ranked):
            mark = '> ' if row[0] in named else '  '
            rows.append([mark + row[0], *(row[column].replace('`', '') for column in columns)])
        widths = [max(map(len, column)) for column in zip(*rows)]
        print(f'\n{title}')
        for row in rows:
            print('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
        is_in = [name for name in named if name in [row[0] for row in ranked]]
        for place, row in enumerate(ranked, 1):
            name, bits, against = row[0], row[head.index('bits per byte')], row[-1]
            if name in named or is_in and against == 'the dense entry':
                where = f'{title}, {place} of {len(ranked)}'
                lines.append(f'{where}: {name}, {bits} bits per byte, {against}')
        if len(is_in) == 2:
            found = read_results(track, results)
            mine, other = [[seed['bits_per_byte'] for seed in found[name].values()] for name in is_in]
            lines.append(f'{title}: {is_in[0]} against {is_in[1]}: {verdict(mine, other)}')
    if lines:
        print('', *lines, sep='\n')


def show_sweep(name, key, found, stages):
    """The values that were tried, the best first, and what to do next. If the best is the lowest or
    the highest, a better one may lie beyond."""
    losses = {}
    for setting, result in found.items():
        if setting.startswith(f'{key}='):
            losses[setting] = result['loss']
    best_first = sorted(losses, key=losses.get)
    for setting in best_first:
        print(f'{name:24} {setting:24} val loss {losses[setting]:.4f}')
    try:
        best, *others = [float(setting.partition('=')[2]) for setting in best_first]
    except ValueError:                                   # nothing was trained, or these are words
        return
    if others and best > max(others):
        print(f'{name:24} the highest is the best: try also {key}={2 * best:g}')
    elif others and 0 < best < min(others):
        print(f'{name:24} the lowest is the best: try also {key}={best / 2:g}')
    elif others:
        configs = ' and '.join(map(str, stages))
        print(f'{name:24} write {key} = {best:g} into {configs}; then race: '
              'this command without --sweep')
