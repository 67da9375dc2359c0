"""Draws the plots of docs/*.md from the numbers kept beside this file: python docs/results/plots.py"""

import json
from pathlib import Path

import matplotlib
matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np

import tables

HERE = Path(__file__).resolve().parent


def band(axis, steps, runs, label, **style):
    """The mean over seeds, and a band from the lowest to the highest."""
    runs = np.array(runs)
    line, = axis.plot(steps, runs.mean(0), label=label, **style)
    axis.fill_between(steps, runs.min(0), runs.max(0), alpha=0.2, color=line.get_color(), lw=0)
    return line.get_color()


def papaformer():
    """Validation loss by step on the toy corpora: composed paths, the same model from random weights, dense models."""
    runs = json.loads((HERE / 'papaformer.json').read_text())['toy']
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    for axis, name, limits in zip(axes, ('toy_stories', 'toy_math'), ((1.1, 1.7), (0.6, 1.7))):
        for kind, style in (('random share', '--'), ('composed share', '-'), ('dense on 40%', '--'), ('dense on 100%', '-')):
            seeds = list(runs[kind].values())
            band(axis, seeds[0]['steps'], [seed['loss'][name] for seed in seeds], kind, ls=style)
        axis.set(title=name, xlabel='step of 512 tokens', ylabel='validation loss', ylim=limits)
    axes[0].legend()
    return figure


def moep():
    """BLiMP and validation loss by words, and how many blocks and experts are hardly used."""
    figure, (scores, losses, unused) = plt.subplots(1, 3, figsize=(14, 4))
    for kind, some in tables.runs('moep').items():
        name, some = tables.KINDS['moep'][kind].replace('`', ''), list(some.values())
        shared = min(len(run['evaluations']) for run in some)            # of a run that was stopped
        points = [run['evaluations'][:shared] for run in some]
        words = [e['words'] / 1e6 for e in points[0]]
        color = band(losses, words[1:], [[e['val']['babylm']['loss'] for e in run[1:]] for run in points], name, marker='.')
        if kind != 'gpt2':
            band(unused, words, [[tables.idle(e)[0] for e in run] for run in points], name, color=color, marker='.')
        if curves := [curve for run in some if (curve := tables.blimp(run, 'babylm2025', 'fast'))]:
            band(scores, [w / 1e6 for w in curves[0]], [list(curve.values()) for curve in curves], name, color=color, marker='.')
    scores.set(title="BLiMP, babylm2025, 'fast' pairs", xlabel='million words', ylabel='%', xscale='log')
    losses.set(title='validation loss', xlabel='million words', ylabel='nats per token')
    unused.set(title='blocks and experts that are hardly used', xlabel='million words', ylabel='with less than 1% of the slots')
    for axis in (scores, losses, unused):
        axis.legend(fontsize=8)
    return figure


def moep_routes():
    """Which share of a layer's slots each block and expert gets, at the last evaluation; the largest first."""
    found = {kind: next(iter(some.values()))['evaluations'][-1] for kind, some in tables.runs('moep').items() if kind != 'gpt2'}
    figure, axes = plt.subplots(1, len(found), figsize=(13, 3.6), sharey=True)
    for axis, (kind, last) in zip(axes, found.items()):
        shares = 100 * np.array([sorted(layer, reverse=True) for layer in last['routes'].values()])
        axis.imshow(shares, vmin=0, vmax=50, aspect='auto', cmap='Blues')
        for (y, x), share in np.ndenumerate(shares):
            axis.text(x, y, f'{share:.0f}', ha='center', va='center', fontsize=7, color='white' if share > 30 else 'black')
        axis.set(title=f"{tables.KINDS['moep'][kind].replace('`', '')}\nstep {last['iter']:,}", xticks=[], yticks=range(len(shares)),
                 yticklabels=last['routes'])
        axis.title.set_fontsize(9)
    return figure


def dots(axis, found, title):
    """A line for every {name: values of its seeds}, the first on top."""
    for height, values in enumerate(reversed(found.values())):
        axis.plot(values, [height] * len(values), 'o', color='C0')
    axis.set(title=title, yticks=range(len(found)), yticklabels=[name.replace('`', '') for name in reversed(found)])
    axis.grid(alpha=0.4)


def papaformer_real():
    """Both phases on real text: validation losses."""
    found = {kind: [run['evaluations'][-1]['val'] for run in some.values()] for kind, some in tables.runs('papaformer').items()}
    figure, axes = plt.subplots(1, 3, figsize=(14, 3.6))
    for axis, phase, data, title in zip(axes, ('stories', 'both', 'both'), ('tinystories', 'tinystories_neox', 'openmath_neox'),
                                        ('first phase, stories', 'second phase, stories', 'second phase, math')):
        dots(axis, {tables.KINDS['papaformer'][kind].replace('aux losses ', ''): [v[data]['loss'] for v in some]
                    for kind, some in found.items() if kind.startswith(phase) and data in some[0]}, title)
        axis.set_xlabel('validation loss')
    return figure


def moduleformer_real():
    """Math as the new domain: what is forgotten against what is learned, with some of the old text and without; pruning."""
    found = tables.runs('moduleformer')
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2))
    for axis, how, title in zip(axes, ('joint', 'life'), ('math, one part in five of old text', 'math alone')):
        for base, style in (('base', '--'), ('base-dense', ':')):
            start = [run['evaluations'][0]['val']['babylm']['loss'] for run in found[f"{how}-{'dense' if 'dense' in base else 'full'}"].values()]
            axis.axvline(np.mean(start), color='grey', ls=style,
                         label=f"{tables.KINDS['moduleformer'][base]}, before")
        for kind, some in found.items():
            if kind.startswith(how):
                name = tables.KINDS['moduleformer'][kind].replace('`', '')
                points = [[run['evaluations'][-1]['val'][data]['loss'] for data in ('babylm', 'openmath_babylm')] for run in some.values()]
                axis.plot(*zip(*points), 'o' if 'Module' in name else 's', ms=7, label=name)
        low, high = axis.get_ylim()
        axis.set(title=title, xlabel='validation loss, old text', ylabel='validation loss, math', ylim=(low - 0.7 * (high - low), high))
    for kind, some in found.items():
        if kind.startswith('math'):
            rows = [run['prune']['rows'] for run in some.values()]
            left, loss = (np.mean([[row[key] for row in r] for r in rows], 0) for key in ('modules', 'loss'))
            axes[2].plot(100 * left, loss, '.-',
                         label=tables.KINDS['moduleformer'][kind])
    axes[2].set(title='pruned after fine-tuning on math', xlabel='% of the modules left', ylabel='loss, math')
    for axis, place in zip(axes, ('lower left', 'lower left', 'upper right')):
        axis.legend(fontsize=7, loc=place)
    return figure


def stlm_real():
    """Bits per byte."""
    figure, axis = plt.subplots(figsize=(7, 2.8))
    dots(axis, {f"{tables.KINDS['stlm'][kind]}, {next(iter(some.values()))['parameters'] / 1e6:.1f}M": [
        run['evaluations'][-1]['val']['simplewiki_chunks' if 'bytes' in kind else 'simplewiki']['bits_per_byte'] for run in some.values()]
        for kind, some in tables.runs('stlm').items()}, 'Simple English Wikipedia')
    axis.set_xlabel('bits per byte')
    return figure


def selfmoe():
    """Perplexity of each layer's state through the model's own head, without and with its gate (real math)."""
    runs = json.loads((HERE / 'selfmoe.json').read_text())['real']
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    for axis, kind in zip(axes, ('matrix', 'vector', 'scalar')):
        found = [seed['gates'] for seed in runs[f'{kind}, improves'].values()]
        layers = [row['layer'] for row in found[0]]
        for key, style in (('without', '--'), ('with', '-')):
            band(axis, layers, [[row[key] for row in table] for table in found], f'{key} the gate', ls=style, marker='o', ms=4)
        axis.set(title=f'{kind} gates', xlabel='layer', yscale='log')
    axes[0].set_ylabel('perplexity through the head')
    axes[0].legend()
    return figure


def stlm():
    """The dropout rate of each schedule, as the log has it."""
    runs = json.loads((HERE / 'stlm.json').read_text())['dropout']
    figure, axis = plt.subplots(figsize=(6, 3.2))
    for name, points in runs.items():
        axis.plot(*zip(*points), label=name, **(dict(ls=':', lw=4) if name == 'constant' else {}))
    axis.set(xlabel='step of 200', ylabel='dropout')
    axis.legend(loc='center left', bbox_to_anchor=(1, 0.5))
    return figure


def moduleformer():
    """Loss by position beyond the trained length; what is forgotten against what is learned; what pruning costs."""
    runs = json.loads((HERE / 'moduleformer.json').read_text())
    figure, (length, life, prune) = plt.subplots(1, 3, figsize=(14, 4))
    for name, seeds in runs['length'].items():
        band(length, next(iter(seeds.values()))['position'], [seed['loss'] for seed in seeds.values()], name)
    length.axvline(128, color='gray', ls=':', label='trained length')
    length.set(title='length', xlabel='position in the window', ylabel='loss, toy_stories')
    for name, seeds in runs['lifelong, language seen'].items():
        points = np.array([[seed['after'][k] for k in ('toy_stories', 'toy_lingo')] for seed in seeds.values()])
        life.plot(*points.T, 'o' if 'Module' in name else 's', ms=6, label=name.replace('ModuleFormer, ', ''))
    life.set(title='lifelong: the second language alone', xlabel='loss, toy_stories (old)', ylabel='loss, toy_lingo (new)')
    for name in ('no concentration', 'concentration 0.001', 'concentration 0.01'):
        curves = [np.array(c) for c in runs['pruning'][f'{name}, max'].values()]
        prune.plot(100 * np.mean([c[:, 1] for c in curves], 0), np.mean([c[:, 2] for c in curves], 0), '.-', label=f'{name}, then pruned')
    points = np.array([row for seed in runs['pruned first'].values() for row in seed])
    prune.plot(100 * points[:, 1], points[:, 3], 'k+', label='pruned, then fine-tuned')
    prune.set(title='pruning for toy_math', xlabel='% of the modules left', ylabel='loss, toy_math')
    for axis in (length, life, prune):
        axis.legend(fontsize=8)
    return figure


def speed():
    """Cost against size: a step's time and memory as total parameters grow."""
    rows = {row['run']: row for row in json.loads((HERE / 'speed.json').read_text())['rows']}
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    sweeps = (('MoEP: P blocks, K = 2 (32 x 512)', dict(moep_p2='P = 2', moep_p4='4', moep_p8='8', moep_p16='16')),
              ('ModuleFormer: E FFN modules, K = 2 (32 x 512)', dict(mf_e8='E = 8', mf_32='16', mf_e32='32', mf_e64='64')))
    for axis, (title, names) in zip(axes, sweeps):
        size = [rows[name]['total'] / 1e6 for name in names]
        time, flops = ([rows[name][key] for name in names] for key in ('ms', 'flops_per_token'))
        axis.plot(size, [t / time[0] for t in time], 'o-', label='time of a step')
        axis.plot(size, [f / flops[0] for f in flops], 's--', label='FLOPs of a token')
        axis.plot(size, [rows[name]['gib'] / rows[next(iter(names))]['gib'] for name in names], '^:', label='memory')
        axis.plot(size, [s / size[0] for s in size], color='grey', lw=1, label='parameters')
        for x, t, name in zip(size, time, names.values()):
            axis.annotate(name, (x, t / time[0]), textcoords='offset points', xytext=(0, 9), ha='center')
        axis.set(title=title, xlabel='parameters, millions', ylabel='against the smallest', ylim=(0, None))
    axes[0].legend()
    return figure


if __name__ == '__main__':
    for draw in (moep, moep_routes, papaformer, papaformer_real, moduleformer, moduleformer_real, selfmoe, stlm, stlm_real, speed):
        figure = draw()
        figure.tight_layout()
        figure.savefig(HERE.parent / f'{draw.__name__}.png', dpi=110)
