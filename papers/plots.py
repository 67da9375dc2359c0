"""
Draw the plots of docs/*.md from papers/results/*.jsonl (needs matplotlib).

    python -m papers.plots               # all of them
    python -m papers.plots moep arena    # some
"""

import re
import statistics
import sys

import matplotlib
matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np

from papers import tables
from papers.tables import NAMES, group, read, runs


def band(axis, steps, runs, label, **style):
    """The mean over seeds, and a band from the lowest to the highest."""
    runs = np.array(runs)
    line, = axis.plot(steps, runs.mean(0), label=label, **style)
    axis.fill_between(steps, runs.min(0), runs.max(0), alpha=0.2, color=line.get_color(), lw=0)
    return line.get_color()


def dots(axis, values_of, title):
    """One row of dots per {name: values of its seeds}, the first on top."""
    for height, values in enumerate(reversed(values_of.values())):
        axis.plot(values, [height] * len(values), 'o', color='C0')
    axis.set(title=title, yticks=range(len(values_of)), yticklabels=reversed(values_of))
    axis.grid(alpha=0.4)


# ---- PaPaformer ---------------------------------------------------------------------------------


def papaformer_real():
    """Real text: validation losses of both phases."""
    panels = (('stories', 'tinystories', 'first phase, stories'),
              ('both', 'tinystories_neox', 'second phase, stories'),
              ('both', 'openmath_neox', 'second phase, math'))
    figure, axes = plt.subplots(1, 3, figsize=(14, 3.6))
    for axis, (phase, data, title) in zip(axes, panels):
        losses = {}
        for kind, seeds in runs('papaformer', phase).items():
            last = [run['evaluations'][-1]['val'] for run in seeds]
            if data in last[0]:
                name = NAMES['papaformer'][kind].replace('aux losses ', '')
                losses[name] = [scores[data]['loss'] for scores in last]
        dots(axis, losses, title)
        axis.set_xlabel('validation loss')
    return figure


# ---- MoEP ---------------------------------------------------------------------------------------


def moep():
    """BLiMP and validation loss by words read, and how many blocks and experts are hardly used."""
    figure, (scores, losses, unused) = plt.subplots(1, 3, figsize=(14, 4))
    for kind, seeds in runs('moep').items():
        if kind == 'weight02':                           # one seed, few evaluations
            continue
        name = NAMES['moep'][kind].replace('`', '')
        shared = min(len(run['evaluations']) for run in seeds)       # some runs were stopped
        points = [run['evaluations'][:shared] for run in seeds]
        words = [e['words'] / 1e6 for e in points[0]]

        loss = [[e['val']['babylm']['loss'] for e in run[1:]] for run in points]
        color = band(losses, words[1:], loss, name, marker='.')
        if kind != 'gpt2':
            idle = [[e['unused'][0] for e in run] for run in points]
            band(unused, words, idle, name, color=color, marker='.')
        curves = [np.array(run['blimp']['babylm2025 fast']) for run in seeds
                  if 'babylm2025 fast' in run['blimp']]
        if curves:
            accuracy = [curve[:, 1] for curve in curves]
            band(scores, curves[0][:, 0] / 1e6, accuracy, name, color=color, marker='.')

    scores.set(title="BLiMP, babylm2025, 'fast' pairs", xlabel='million words', ylabel='%',
               xscale='log')
    losses.set(title='validation loss', xlabel='million words', ylabel='nats per token')
    unused.set(title='blocks and experts that are hardly used', xlabel='million words',
               ylabel='with less than 1% of the picks')
    for axis in (scores, losses, unused):
        axis.legend(fontsize=8)
    return figure


def moep_routes():
    """Each block's and expert's share of its layer's picks at the end, largest first."""
    routed = {kind: seeds[0] for kind, seeds in runs('moep').items()
              if kind not in ('gpt2', 'weight02', 'swiglu_no_norm')}
    figure, axes = plt.subplots(1, len(routed), figsize=(13, 3.6), sharey=True)
    for axis, (kind, run) in zip(axes, routed.items()):
        routes = run['routes']
        shares = 100 * np.array([sorted(layer, reverse=True) for layer in routes.values()])
        axis.imshow(shares, vmin=0, vmax=50, aspect='auto', cmap='Blues')
        for (y, x), share in np.ndenumerate(shares):
            color = 'white' if share > 30 else 'black'
            axis.text(x, y, f'{share:.0f}', ha='center', va='center', fontsize=7, color=color)
        name = NAMES['moep'][kind].replace('`', '')
        axis.set(title=f"{name}\nstep {run['evaluations'][-1]['iter']:,}", xticks=[],
                 yticks=range(len(shares)), yticklabels=routes)
        axis.title.set_fontsize(9)
    return figure


# ---- ModuleFormer -------------------------------------------------------------------------------


def moduleformer_real():
    """Math as the new domain, with old text and without: forgotten against learned; pruning."""
    names = NAMES['moduleformer']
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2))

    def losses(seeds, data, at=-1):
        return [run['evaluations'][at]['val'][data]['loss'] for run in seeds]

    panels = (('joint', 'math, one part in five of old text'), ('life', 'math alone'))
    for axis, (how, title) in zip(axes, panels):
        kinds = runs('moduleformer', how)
        for base, tuned, style in (('base', 'full', '--'), ('base-dense', 'dense', ':')):
            start = losses(kinds[f'{how}-{tuned}'], 'babylm', at=0)
            axis.axvline(np.mean(start), color='grey', ls=style, label=f'{names[base]}, before')
        for kind, seeds in kinds.items():
            old, new = losses(seeds, 'babylm'), losses(seeds, 'openmath_babylm')
            marker = 'o' if 'Module' in names[kind] else 's'
            axis.plot(old, new, marker, ms=7, label=names[kind].replace('`', ''))
        low, high = axis.get_ylim()
        room = 0.7 * (high - low)                    # for the legend
        axis.set(title=title, xlabel='validation loss, old text', ylabel='validation loss, math',
                 ylim=(low - room, high))

    for kind, seeds in runs('moduleformer', 'math').items():
        curves = [[(row['modules'], row['loss']) for row in run['prune']['rows']] for run in seeds]
        left, loss = np.mean(curves, 0).T
        axes[2].plot(100 * left, loss, '.-', label=f'{names[kind]}, then pruned')
    first = sum(runs('moduleformer', 'first').values(), [])
    modules = [tables.modules(run) for run in first]
    loss = losses(first, 'openmath_babylm')
    axes[2].plot(100 * np.array(modules) / 192, loss, 'k^', ms=5, label='pruned, then fine-tuned')
    axes[2].set(title='pruned, and fine-tuned on math', xlabel='% of the modules left',
                ylabel='loss, math')

    for axis, place in zip(axes, ('lower left', 'lower left', 'upper right')):
        axis.legend(fontsize=7, loc=place)
    return figure


# ---- Self-MoE and Super Tiny models -------------------------------------------------------------


def selfmoe():
    """Real math: perplexity of each layer's state through the head, without and with its gate."""
    kinds = tables.gates('real')
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    for axis, kind in zip(axes, ('matrix', 'vector', 'scalar')):
        seeds = [seed['gates'] for seed in kinds[f'{kind}, improves']]
        layers = [row['layer'] for row in seeds[0]]
        for key, style in (('without', '--'), ('with', '-')):
            perplexity = [[row[key] for row in gates] for gates in seeds]
            band(axis, layers, perplexity, f'{key} the gate', ls=style, marker='o', ms=4)
        axis.set(title=f'{kind} gates', xlabel='layer', yscale='log')
    axes[0].set_ylabel('perplexity through the head')
    axes[0].legend()
    return figure


def stlm_real():
    """Bits per byte on Simple English Wikipedia against parameters, as more layers share."""
    styles = {
        'one FFN for so many layers': {'baseline': 1, 'ffn-2': 2, 'ffn-5': 5, 'shared-ffn': 10},
        'one block for so many layers': {'baseline': 1, 'all-2': 2, 'all-5': 5, 'shared-all': 10}}
    kinds = runs('stlm')
    figure, axis = plt.subplots(figsize=(6, 3.4))
    for label, groups in styles.items():
        points = []
        for kind, layers in groups.items():
            scores = [run['evaluations'][-1]['val']['simplewiki']['bits_per_byte']
                      for run in kinds[kind]]
            points.append((kinds[kind][0]['parameters'] / 1e6, statistics.mean(scores)))
            axis.annotate(layers, points[-1], textcoords='offset points', xytext=(4, 5))
        axis.plot(*zip(*points), 'o-', label=label)
    axis.set(xlabel='parameters, millions', ylabel='bits per byte')
    axis.legend()
    return figure


# ---- Speed --------------------------------------------------------------------------------------


def speed():
    """Time and memory of a step, and FLOPs of a token, as the number of parameters grows."""
    rows = {row['run']: row for row in read('speed') if row['group'] == 'step'}
    sweeps = (('MoEP: P blocks, K = 2 (32 x 512)',
               dict(moep_p2='P = 2', moep_p4='4', moep_p8='8', moep_p16='16')),
              ('ModuleFormer: E FFN modules, K = 2 (32 x 512)',
               dict(mf_e8='E = 8', mf_32='16', mf_e32='32', mf_e64='64')))
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    for axis, (title, names) in zip(axes, sweeps):
        points = [rows[name] for name in names]
        size = [row['total'] / 1e6 for row in points]

        def relative(key, points=points):
            return [row[key] / points[0][key] for row in points]

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


# ---- The arena ----------------------------------------------------------------------------------


large = plt.rc_context({'font.size': 20, 'axes.spines.top': False, 'axes.spines.right': False})
KINDS = {                                # its colour, and how the names of its entries begin
    'dense': ('black', r'dense(_small|_muon.*)?$|gpt2|llama'),
    'paths or gates': ('grey', 'papaformer_(share|composed)|selfmoe_gates'),
    'shared weights': ('#0072b2', 'stlm_shared'),
    'routed': ('#d9480f', '')}                           # the others
LABELS = dict(                           # entry: text, points to the right, and up
    dense_muon=('dense_muon', 12, -24),
    dense_moe_shared_muon_flops=('routed, level with it', 12, 0),
    dense_muon_short=('dense_muon_short', -12, -16),
    dense_small=('dense_small', -12, -6),
    dense_moe=('dense_moe', -12, -10),
    stlm_depth=('Super Tiny, depth', -12, -26),
    stlm_shared=('Super Tiny, shared', -12, -8),
    moep=('MoEP', -12, -8),
    papaformer_composed=('PaPaformer', 12, -8),
    moduleformer=('ModuleFormer', 12, -8),
    selfmoe_gates=('Self-MoE', 12, 5))


@large
def arena():
    """Track baby: bits per byte, the mean of the seeds, against cost; and the front."""
    rows = read('arena_baby')
    cost = {row['entry']: row['flops_per_token'] / 1e6 for row in rows}
    cost['dense_small'] = cost['dense_moe']              # the same with one FFN, of equal FLOPs
    rows += [row | dict(entry='dense_small') for row in runs('arena_controls')['dense_small']]
    bits = {name: statistics.mean(run['bits_per_byte'] for run in seeds)
            for name, seeds in group(rows, 'entry').items()}

    def points(names):
        return [cost[name] for name in names], [bits[name] for name in names]

    figure, axis = plt.subplots(figsize=(11.6, 10))
    others = [*bits]
    for kind, (colour, pattern) in KINDS.items():
        names = [name for name in others if re.match(pattern, name)]
        others = [name for name in others if name not in names]
        axis.scatter(*points(names), s=200 if kind == 'dense' else 90, color=colour, label=kind,
                     edgecolor='white')
        for name in LABELS.keys() & names:
            text, right, up = LABELS[name]
            axis.annotate(text, (cost[name], bits[name]), (right, up), color=colour,
                          textcoords='offset points', ha='left' if right > 0 else 'right')
    front = [name for name in bits if not any(
        cost[other] <= cost[name] and bits[other] < bits[name] for other in bits)]
    axis.plot(*points(sorted(front, key=cost.get)), '--', color='grey', zorder=0)
    axis.text(141, 1.246, 'the front', color='grey', rotation=-25, ha='center')
    axis.annotate('better', (40, 1.225), (60, 1.245), arrowprops=dict(width=3, color='green'),
                  color='green', fontsize=24)
    axis.set(xlabel='cost: MFLOPs of training per token', xlim=(32, 272), ylim=(1.215, 1.49),
             ylabel='bits per byte after ten passes over 10M words')
    axis.set_title('At ten passes, no routed model beats\n'
                   'the best dense one at equal cost', fontsize=26, weight='bold')
    axis.legend(labelcolor='markerfacecolor', frameon=False, handletextpad=0)
    return figure


@large
def passes():
    """What routing gains, by passes over the text: the same tokens read from less and less text.
    Means of three seeds, with their 95% intervals."""
    figure, axis = plt.subplots(figsize=(11.6, 8.5))
    means, ticks = {}, {}
    for rows in group(read('passes'), 'size').values():
        bits = {(row['entry'], row['seed']): row['bits_per_byte'] for row in rows}
        gaps = [bits['dense', seed] - bits['routed', seed] for seed in (1, 2, 3)]
        x = rows[0]['passes']
        ticks[x] = f"{x:.3g}\n{rows[0]['tokens'] / x / 1e6:.2g}M"
        means[x] = statistics.mean(gaps)
        reach = 4.303 * statistics.stdev(gaps) / 3 ** 0.5        # Student's t of three seeds
        axis.errorbar(x, means[x], reach, fmt='ko', ms=13, capsize=10, lw=3)
        axis.annotate(f'{means[x]:+.3f}'.replace('-', '−'), (x, means[x]), (14, 14),
                      textcoords='offset points')

    axis.plot(*zip(*sorted(means.items())), color='black', lw=1, ls='--', zorder=0)
    axis.axhline(0, color='black')
    axis.axhspan(0, 1, color=KINDS['routed'][0], alpha=0.12, lw=0)
    axis.text(0.97, 0.92, 'routed is better', color=KINDS['routed'][0], fontsize=24, ha='right',
              transform=axis.transAxes)
    axis.text(0.03, 0.05, 'dense is better', fontsize=24, transform=axis.transAxes)
    axis.set_yscale('symlog', linthresh=0.02)            # near 0 as it is, further away by powers
    axis.set(xlabel='passes over the text, and its tokens; 50M are read', xscale='log',
             xlim=(1.4, 30), ylim=(-0.6, 0.06), ylabel='bits per byte, dense minus routed')
    axis.set_yticks([-0.3, -0.1, -0.02, 0, 0.02], ['−0.3', '−0.1', '−0.02', '0', '+0.02'])
    axis.set_yticks([], minor=True)
    axis.set_xticks([*ticks], ticks.values())
    axis.set_xticks([], minor=True)
    axis.set_title('Routing pays while the text is new', fontsize=26, weight='bold',
                   pad=14)
    return figure


ALL = (moep, moep_routes, papaformer_real, moduleformer_real, selfmoe, stlm_real, speed, arena,
       passes)

if __name__ == '__main__':
    for draw in ALL:
        if sys.argv[1:] and draw.__name__ not in sys.argv[1:]:
            continue
        figure = draw()
        figure.tight_layout()
        figure.savefig(tables.ROOT / 'docs' / f'{draw.__name__}.png', dpi=110)
