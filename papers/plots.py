"""
Draw the plots of docs/*.md from the files in this folder (needs matplotlib).

    python docs/results/plots.py
"""

import statistics
import sys

import matplotlib
matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np

import tables

DOCS = tables.HERE.parent


def name_of(folder, kind):
    return tables.KINDS[folder][kind].replace('`', '')


def band(axis, steps, runs, label, **style):
    """The mean over seeds, and a band from the lowest to the highest."""
    runs = np.array(runs)
    line, = axis.plot(steps, runs.mean(0), label=label, **style)
    axis.fill_between(steps, runs.min(0), runs.max(0), alpha=0.2, color=line.get_color(), lw=0)
    return line.get_color()


def dots(axis, found, title):
    """One row of dots per {name: values of its seeds}, the first on top."""
    for height, values in enumerate(reversed(found.values())):
        axis.plot(values, [height] * len(values), 'o', color='C0')
    names = [name.replace('`', '') for name in reversed(found)]
    axis.set(title=title, yticks=range(len(found)), yticklabels=names)
    axis.grid(alpha=0.4)


# --------------------------------------------------------------------------------------------------
# PaPaformer


def papaformer():
    """Toy corpora: validation loss of composed paths, of random ones, and of dense models."""
    runs = tables.read('papaformer.json')['toy']
    styles = {'random share': '--', 'composed share': '-',
              'dense on 40%': '--', 'dense on 100%': '-'}
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    for axis, name, limits in zip(axes, ('toy_stories', 'toy_math'), ((1.1, 1.7), (0.6, 1.7))):
        for kind, style in styles.items():
            seeds = list(runs[kind].values())
            band(axis, seeds[0]['steps'], [seed['loss'][name] for seed in seeds], kind, ls=style)
        axis.set(title=name, xlabel='step of 512 tokens', ylabel='validation loss', ylim=limits)
    axes[0].legend()
    return figure


def papaformer_real():
    """Real text: validation losses of both phases."""
    panels = (('stories', 'tinystories', 'first phase, stories'),
              ('both', 'tinystories_neox', 'second phase, stories'),
              ('both', 'openmath_neox', 'second phase, math'))
    figure, axes = plt.subplots(1, 3, figsize=(14, 3.6))
    for axis, (phase, data, title) in zip(axes, panels):
        losses = {}
        for kind, some in tables.runs_like('papaformer', phase).items():
            last = [run['evaluations'][-1]['val'] for run in some]
            if data in last[0]:
                name = tables.KINDS['papaformer'][kind].replace('aux losses ', '')
                losses[name] = [scores[data]['loss'] for scores in last]
        dots(axis, losses, title)
        axis.set_xlabel('validation loss')
    return figure


# --------------------------------------------------------------------------------------------------
# MoEP


def moep():
    """BLiMP and validation loss by words read, and how many blocks and experts are hardly used."""
    figure, (scores, losses, unused) = plt.subplots(1, 3, figsize=(14, 4))
    for kind, by_seed in tables.runs('moep').items():
        name = name_of('moep', kind)
        some = list(by_seed.values())
        shared = min(len(run['evaluations']) for run in some)        # some runs were stopped
        points = [run['evaluations'][:shared] for run in some]
        words = [e['words'] / 1e6 for e in points[0]]

        loss = [[e['val']['babylm']['loss'] for e in run[1:]] for run in points]
        color = band(losses, words[1:], loss, name, marker='.')
        if kind != 'gpt2':
            idle = [[tables.idle(e)[0] for e in run] for run in points]
            band(unused, words, idle, name, color=color, marker='.')
        curves = [tables.blimp(run, 'babylm2025', 'fast') for run in some]
        curves = [curve for curve in curves if curve]
        if curves:
            read = [w / 1e6 for w in curves[0]]
            accuracy = [list(curve.values()) for curve in curves]
            band(scores, read, accuracy, name, color=color, marker='.')

    scores.set(title="BLiMP, babylm2025, 'fast' pairs", xlabel='million words', ylabel='%',
               xscale='log')
    losses.set(title='validation loss', xlabel='million words', ylabel='nats per token')
    unused.set(title='blocks and experts that are hardly used', xlabel='million words',
               ylabel='with less than 1% of the picks')
    for axis in (scores, losses, unused):
        axis.legend(fontsize=8)
    return figure


def moep_routes():
    """Each block's and expert's share of its layer's picks at the last evaluation, largest first."""
    found = {}
    for kind, by_seed in tables.runs('moep').items():
        if kind != 'gpt2':
            first_seed = next(iter(by_seed.values()))
            found[kind] = first_seed['evaluations'][-1]
    figure, axes = plt.subplots(1, len(found), figsize=(13, 3.6), sharey=True)
    for axis, (kind, last) in zip(axes, found.items()):
        shares = 100 * np.array([sorted(layer, reverse=True) for layer in last['routes'].values()])
        axis.imshow(shares, vmin=0, vmax=50, aspect='auto', cmap='Blues')
        for (y, x), share in np.ndenumerate(shares):
            color = 'white' if share > 30 else 'black'
            axis.text(x, y, f'{share:.0f}', ha='center', va='center', fontsize=7, color=color)
        axis.set(title=f"{name_of('moep', kind)}\nstep {last['iter']:,}", xticks=[],
                 yticks=range(len(shares)), yticklabels=last['routes'])
        axis.title.set_fontsize(9)
    return figure


# --------------------------------------------------------------------------------------------------
# ModuleFormer


def moduleformer():
    """Toy corpora: loss beyond the trained length; forgotten against learned; what pruning costs."""
    runs = tables.read('moduleformer.json')
    figure, (length, life, prune) = plt.subplots(1, 3, figsize=(14, 4))

    for name, by_seed in runs['length'].items():
        seeds = list(by_seed.values())
        band(length, seeds[0]['position'], [seed['loss'] for seed in seeds], name)
    length.axvline(128, color='gray', ls=':', label='trained length')
    length.set(title='length', xlabel='position in the window', ylabel='loss, toy_stories')

    for name, by_seed in runs['lifelong, language seen'].items():
        old = [seed['after']['toy_stories'] for seed in by_seed.values()]
        new = [seed['after']['toy_lingo'] for seed in by_seed.values()]
        marker = 'o' if 'Module' in name else 's'
        life.plot(old, new, marker, ms=6, label=name.replace('ModuleFormer, ', ''))
    life.set(title='lifelong: the second language alone',
             xlabel='loss, toy_stories (old)', ylabel='loss, toy_lingo (new)')

    for name in ('no concentration', 'concentration 0.001', 'concentration 0.01'):
        curves = np.array(list(runs['pruning'][f'{name}, max'].values())).mean(0)
        prune.plot(100 * curves[:, 1], curves[:, 2], '.-', label=f'{name}, then pruned')
    points = np.array([row for seed in runs['pruned first'].values() for row in seed])
    prune.plot(100 * points[:, 1], points[:, 3], 'k+', label='pruned, then fine-tuned')
    prune.set(title='pruning for toy_math', xlabel='% of the modules left', ylabel='loss, toy_math')

    for axis in (length, life, prune):
        axis.legend(fontsize=8)
    return figure


def moduleformer_real():
    """Math as the new domain, with some old text and without: forgotten against learned; pruning."""
    names = tables.KINDS['moduleformer']
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2))

    def losses(some, data, at=-1):
        return [run['evaluations'][at]['val'][data]['loss'] for run in some]

    panels = (('joint', 'math, one part in five of old text'), ('life', 'math alone'))
    for axis, (how, title) in zip(axes, panels):
        found = tables.runs_like('moduleformer', how)
        for base, tuned, style in (('base', 'full', '--'), ('base-dense', 'dense', ':')):
            start = losses(found[f'{how}-{tuned}'], 'babylm', at=0)
            axis.axvline(np.mean(start), color='grey', ls=style, label=f'{names[base]}, before')
        for kind, some in found.items():
            name = name_of('moduleformer', kind)
            old, new = losses(some, 'babylm'), losses(some, 'openmath_babylm')
            marker = 'o' if 'Module' in name else 's'
            axis.plot(old, new, marker, ms=7, label=name)
        low, high = axis.get_ylim()
        room = 0.7 * (high - low)                    # for the legend
        axis.set(title=title, xlabel='validation loss, old text', ylabel='validation loss, math',
                 ylim=(low - room, high))

    for kind, some in tables.runs_like('moduleformer', 'math').items():
        curves = [[(row['modules'], row['loss']) for row in run['prune']['rows']] for run in some]
        left, loss = np.mean(curves, 0).T
        axes[2].plot(100 * left, loss, '.-', label=f'{names[kind]}, then pruned')
    first = []
    for run in sum(tables.runs_like('moduleformer', 'first').values(), []):
        evaluations = run['evaluations']
        modules = sum(map(len, evaluations[0]['routes'].values()))
        first.append((modules, evaluations[-1]['val']['openmath_babylm']['loss']))
    modules, loss = zip(*first)
    axes[2].plot(100 * np.array(modules) / 192, loss, 'k^', ms=5, label='pruned, then fine-tuned')
    axes[2].set(title='pruned, and fine-tuned on math', xlabel='% of the modules left',
                ylabel='loss, math')

    for axis, place in zip(axes, ('lower left', 'lower left', 'upper right')):
        axis.legend(fontsize=7, loc=place)
    return figure


# --------------------------------------------------------------------------------------------------
# Self-MoE and Super Tiny models


def selfmoe():
    """Real math: perplexity of each layer's state through the head, without and with its gate."""
    runs = tables.read('selfmoe.json')['real']
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    for axis, kind in zip(axes, ('matrix', 'vector', 'scalar')):
        found = [seed['gates'] for seed in runs[f'{kind}, improves'].values()]
        layers = [row['layer'] for row in found[0]]
        for key, style in (('without', '--'), ('with', '-')):
            perplexity = [[row[key] for row in gates] for gates in found]
            band(axis, layers, perplexity, f'{key} the gate', ls=style, marker='o', ms=4)
        axis.set(title=f'{kind} gates', xlabel='layer', yscale='log')
    axes[0].set_ylabel('perplexity through the head')
    axes[0].legend()
    return figure


def stlm():
    """The dropout rate of each schedule, from the log."""
    figure, axis = plt.subplots(figsize=(6, 3.2))
    for name, points in tables.read('stlm.json')['dropout'].items():
        style = dict(ls=':', lw=4) if name == 'constant' else {}
        axis.plot(*zip(*points), label=name, **style)
    axis.set(xlabel='step of 200', ylabel='dropout')
    axis.legend(loc='center left', bbox_to_anchor=(1, 0.5))
    return figure


def stlm_real():
    """Bits per byte on Simple English Wikipedia against parameters, as more layers share."""
    styles = {
        'one FFN for so many layers': {'baseline': 1, 'ffn-2': 2, 'ffn-5': 5, 'shared-ffn': 10},
        'one block for so many layers': {'baseline': 1, 'all-2': 2, 'all-5': 5, 'shared-all': 10}}
    found = tables.runs_like('stlm', '')
    figure, axis = plt.subplots(figsize=(6, 3.4))
    for label, groups in styles.items():
        points = []
        for kind, layers in groups.items():
            if kind in found:
                scores = [run['evaluations'][-1]['val']['simplewiki']['bits_per_byte'] for run in found[kind]]
                points.append((found[kind][0]['parameters'] / 1e6, statistics.mean(scores)))
                axis.annotate(layers, points[-1], textcoords='offset points', xytext=(4, 5))
        axis.plot(*zip(*points), 'o-', label=label)
    axis.set(xlabel='parameters, millions', ylabel='bits per byte')
    axis.legend()
    return figure


# --------------------------------------------------------------------------------------------------
# Speed


def speed():
    """Time and memory of a step, and FLOPs of a token, as the number of parameters grows."""
    rows = {row['run']: row for row in tables.read('speed.json')['rows']}
    sweeps = (('MoEP: P blocks, K = 2 (32 x 512)',
               dict(moep_p2='P = 2', moep_p4='4', moep_p8='8', moep_p16='16')),
              ('ModuleFormer: E FFN modules, K = 2 (32 x 512)',
               dict(mf_e8='E = 8', mf_32='16', mf_e32='32', mf_e64='64')))
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    for axis, (title, names) in zip(axes, sweeps):
        found = [rows[name] for name in names]
        size = [row['total'] / 1e6 for row in found]

        def relative(key):
            return [row[key] / found[0][key] for row in found]

        time = relative('ms')
        axis.plot(size, time, 'o-', label='time of a step')
        axis.plot(size, relative('flops_per_token'), 's--', label='FLOPs of a token')
        axis.plot(size, relative('gib'), '^:', label='memory')
        axis.plot(size, [s / size[0] for s in size], color='grey', lw=1, label='parameters')
        for x, y, label in zip(size, time, names.values()):
            axis.annotate(label, (x, y), textcoords='offset points', xytext=(0, 9), ha='center')
        axis.set(title=title, xlabel='parameters, millions', ylabel='against the smallest',
                 ylim=(0, None))
    axes[0].legend()
    return figure


# --------------------------------------------------------------------------------------------------
# The arena


def arena():
    """Bits per byte, mean and range of the seeds, against training FLOPs per token; a panel per track.
    Entries far above the others stand at the upper edge, with their value."""
    read = tables.leaderboard.read_results
    found = {track: read(track, tables.HERE / 'arena') for track in ('toy', 'baby')}
    found = {track: entries for track, entries in found.items() if len(entries) > 1}
    figure, axes = plt.subplots(len(found), 1, figsize=(9.5, 7.5 * len(found)), squeeze=False)
    for axis, (track, entries) in zip(axes[:, 0], found.items()):
        bits = {name: [scores['bits_per_byte'] for scores in seeds.values()]
                for name, seeds in entries.items()}
        means = {name: statistics.mean(each) for name, each in bits.items()}
        top = 1.16 * min(means.values())
        places = {}
        for name, seeds in entries.items():
            cost = next(iter(seeds.values()))['flops_per_token'] / 1e6
            mean = means[name]
            if mean > top:
                drawn = axis.plot(cost, top, '^', ms=5)
            else:
                reach = [[mean - min(bits[name])], [max(bits[name]) - mean]]
                drawn = axis.errorbar(cost, mean, reach, fmt='o', ms=4)
            places[name] = cost, min(mean, top), drawn[0].get_color()
        axis.margins(x=0.4)
        axis.autoscale_view()                            # places are computed with the final limits
        names = []                                       # where they stand, in points
        from_below = lambda item: (item[1][1], -item[1][0])      # equally high: from the right
        for name, (cost, mean, colour) in sorted(places.items(), key=from_below):
            x, y = axis.transData.transform((cost, mean)) * 72 / figure.dpi
            higher = y
            while any(abs(x - a) < 120 and abs(higher - b) < 10 for a, b in names):
                higher += 1
            names.append((x, higher))
            label = name if means[name] <= top else f'{name}: {means[name]:.2f}'
            axis.annotate(label, (cost, mean), textcoords='offset points', xytext=(14, higher - y - 3),
                          fontsize=7.5, color=colour,
                          arrowprops=dict(arrowstyle='-', color=colour, lw=0.5, shrinkA=0, shrinkB=2))
        axis.set(title=f'track {track}', xlabel='MFLOPs of training per token', ylabel='bits per byte')
        axis.grid(alpha=0.4)
    return figure


if __name__ == '__main__':
    for draw in (moep, moep_routes, papaformer, papaformer_real, moduleformer, moduleformer_real,
                 selfmoe, stlm, stlm_real, speed, arena):
        if sys.argv[1:] and draw.__name__ not in sys.argv[1:]:
            continue
        figure = draw()
        figure.tight_layout()
        figure.savefig(DOCS / f'{draw.__name__}.png', dpi=110)
