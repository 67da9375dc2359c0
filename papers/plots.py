"""
Draw the plots of docs/*.md from papers/results/*.jsonl (needs matplotlib).

    python -m papers.plots               # all of them
    python -m papers.plots moep arena    # some
"""

import re
import statistics

import matplotlib.pyplot as plt
import numpy as np

from papers import tables
from papers.tables import group, read, runs, scores
from plumbing.cli import Parser, run_main

DENSE, ROUTED, SHARED, LIGHT = 'black', '#d9480f', '#0072b2', '#74b4dc'  # colours
large = plt.rc_context({
    'font.size': 20, 'figure.figsize': (11.6, 7), 'figure.titlesize': 26,
    'figure.titleweight': 'bold', 'lines.markersize': 11, 'legend.frameon': False,
    'axes.spines.top': False, 'axes.spines.right': False})


def band(axis, steps, runs, label, **style):
    """The mean over seeds, and a band from the lowest to the highest."""
    runs = np.array(runs)
    line, = axis.plot(steps, runs.mean(0), label=label, **style)
    axis.fill_between(steps, runs.min(0), runs.max(0), alpha=0.2, color=line.get_color(), lw=0)
    return line.get_color()


# ---- PaPaformer ---------------------------------------------------------------------------------

@large
def papaformer():
    """The loss on stories after both phases, against training time, paths in turn, one H200."""
    times = {row['model']: row for row in read('papaformer_time')}
    labels = dict(llama256='LLaMA, 32M parameters', llama192='LLaMA, 23M', share='Linear, 29M',
                  gumbel1='Gumbel, 29M', gumbel2='')     # its dots lie beside gumbel1's
    figure, axis = plt.subplots()
    for kind, label in labels.items():
        seeds = runs('papaformer')[f'both-{kind}']
        name, loss = seeds[0]['name'], scores(seeds, data='tinystories_neox')
        is_dense = 'llama' in kind
        row = times[name if is_dense else f'{name}, paths one after the other']
        time = float(re.search(r'(\d+)%', row['one H200: paths + composed, seconds'])[1])
        color = DENSE if is_dense else ROUTED
        axis.plot([time] * len(loss), loss, 'o', color=color)
        axis.annotate(label, (time, min(loss)), (0, 24 if kind == 'gumbel1' else -34), color=color,
                      textcoords='offset points', ha='right' if time > 99 else 'center')
    axis.set(xlabel="training time, % of the larger LLaMA's", ylabel='validation loss, stories',
             xlim=(55, 105), ylim=(2.0, 2.85))
    axis.text(0.97, 0.75, 'dense', ha='right', transform=axis.transAxes, color=DENSE)
    axis.text(0.97, 0.65, 'two trained paths, composed', ha='right', transform=axis.transAxes,
              color=ROUTED)
    figure.suptitle('Composing paths saves a third of the time,\nand costs 0.4 nats or more')
    return figure


# ---- MoEP ---------------------------------------------------------------------------------------

def moep():
    """BLiMP and validation loss by words read, and how many blocks and experts are hardly used."""
    figure, (blimp, val, unused) = plt.subplots(1, 3, figsize=(14, 4))
    for kind, seeds in runs('moep').items():
        if kind == 'weight02':                           # one seed, few evaluations
            continue
        name = seeds[0]['name'].replace('`', '')
        shared = min(len(run['evaluations']) for run in seeds)       # some runs were stopped
        points = [run['evaluations'][:shared] for run in seeds]
        words = [e['words'] / 1e6 for e in points[0]]
        loss = [[e['val']['babylm']['loss'] for e in run[1:]] for run in points]
        color = band(val, words[1:], loss, name, marker='.')
        if kind != 'gpt2':
            idle = [[e['unused'][0] for e in run] for run in points]
            band(unused, words, idle, name, color=color, marker='.')
        curves = [run['blimp']['babylm2025 fast'] for run in seeds
                  if 'babylm2025 fast' in run['blimp']]
        if curves:
            words, accuracy = np.moveaxis(curves, 2, 0)
            band(blimp, words[0] / 1e6, accuracy, name, color=color, marker='.')
    blimp.set(title="BLiMP, babylm2025, 'fast' pairs", xlabel='million words', ylabel='%',
              xscale='log')
    val.set(title='validation loss', xlabel='million words', ylabel='nats per token')
    unused.set(title='blocks and experts that are hardly used', xlabel='million words',
               ylabel='with less than 1% of the picks')
    for axis in figure.axes:
        axis.legend(fontsize=8)
    return figure


@large
def moep_entities():
    """Entity Tracking: the paper's scores, ours, and a rule's that reads no text."""
    here = group(read('babylm2025'), 'run')
    score = lambda kind: statistics.mean(run['entity_tracking'] for run in here[kind])
    printed = {kind: row[2] for kind, row in tables.PAPER_TABLE_1.items()}
    blind = read('moep_entities')[-1]['Entity Tracking']     # always the shortest option
    bars = {'always the shortest option,\nwithout reading': (blind, SHARED),
            'MoEP, in its paper': (printed['moep'], ROUTED), 'MoEP, here': (score('moep'), ROUTED),
            'GPT-2, here': (score('gpt2'), DENSE), 'GPT-2, in that paper': (printed['gpt2'], DENSE)}
    figure, axis = plt.subplots(figsize=(11.6, 6.5))
    values, colors = zip(*reversed(bars.values()))
    axis.bar_label(axis.barh([*reversed(bars)], values, color=colors),
                   [f' {value:.4g}' if value in printed.values() else f' {value:.1f}'
                    for value in values])
    axis.axvline(20, color='grey', ls='--', zorder=0)
    axis.text(20.5, -0.75, 'chance', color='grey')
    axis.set(xlabel='Entity Tracking, % right', xlim=(0, 50), ylim=(-0.9, None))
    figure.suptitle("The task behind MoEP's lead\nis won by a rule that reads nothing")
    return figure


@large
def moep_routes():
    """Each block's and expert's share of its layer's picks at the end, largest first."""
    names = dict(moep='balanced:\nthe Switch loss', printed='the sign\nas printed',
                 none='no\nbalance loss')
    figure, axes = plt.subplots(1, len(names), figsize=(11.6, 8.5), sharey=True)
    for axis, (kind, name) in zip(axes, names.items()):
        routes = runs('moep')[kind][0]['routes']
        shares = 100 * np.array([sorted(layer, reverse=True) for layer in routes.values()])
        axis.imshow(shares, vmin=0, vmax=50, aspect='auto', cmap='Blues')
        for (y, x), share in np.ndenumerate(shares):
            color = 'white' if share > 30 else 'black'
            axis.text(x, y, f'{share:.0f}', ha='center', va='center', fontsize=16, color=color)
        axis.set(title=name, xticks=[], yticks=range(len(shares)), yticklabels=routes)
    axes[1].set_xlabel("% of a layer's picks that go to each of its four choices (at most 50)")
    figure.suptitle('The printed sign leaves a third of the choices unused')
    return figure


# ---- Routes -------------------------------------------------------------------------------------

@large
def lookup():
    """How much of a choice is known from the token, its class, and its data set: over all
    layers, less what shuffled choices give."""
    pools = {'MoEP': ('moep_mix', ''), "ModuleFormer's attention": ('moduleformer', 'att'),
             "ModuleFormer's FFNs": ('moduleformer', 'ffd')}
    known = {'the token': 'by_token', 'its word class': 'by_class', 'text or math': 'by_set'}
    figure, axis = plt.subplots()
    for i, (pool, (run, part)) in enumerate(pools.items()):
        rows = [row for row in read('routes') if row['run'] == run and part in row['layer']]
        entropy = sum(row['entropy'] for row in rows)
        shares = [100 * sum(row[key][0] - row[key][1] for row in rows) / entropy
                  for key in known.values()]
        bars = axis.bar(np.arange(3) + 0.27 * (i - 1), shares, 0.25, label=pool,
                        color=(ROUTED, SHARED, LIGHT)[i])
        axis.bar_label(bars, fmt='%.0f')
    axis.set(xticks=range(3), xticklabels=known, ylim=(0, 100),
             ylabel="% of a choice's entropy explained by")
    axis.legend()
    figure.suptitle('MoEP and ModuleFormer mostly look up the token')
    return figure


# ---- ModuleFormer -------------------------------------------------------------------------------

@large
def prune():
    """What pruning adds to the loss on math, after fine-tuning on it and before. Differences, since
    a curve is scored on half of the validation set, a run on all of it."""
    whole = runs('moduleformer')['math0.0']
    curves = [[(100 * row['modules'], row['loss'] - run['prune']['rows'][0]['loss'])
               for row in run['prune']['rows']] for run in whole]
    figure, axis = plt.subplots()
    axis.plot(*np.mean(curves, 0).T, 'o-', lw=3, ms=10, color=DENSE,
              label='fine-tuned, then pruned')
    modules = whole[0]['evaluations'][0]['unused'][1]                    # used or not
    for kind, seeds in runs('moduleformer', 'first').items():
        left = [100 * run['evaluations'][0]['unused'][1] / modules for run in seeds]
        cost = np.subtract(*(scores(kind, data='openmath_babylm') for kind in (seeds, whole)))
        axis.plot(left, cost, 'o', color=ROUTED,
                  label='pruned, then fine-tuned' if kind == 'first0.2' else None)
    axis.set(xlabel='% of the modules left', ylabel='nats above the unpruned model, math')
    axis.legend(labelcolor='linecolor')
    figure.suptitle('Prune first, then fine-tune')
    return figure


# ---- Super Tiny models --------------------------------------------------------------------------

@large
def stlm():
    """Bits per byte on Simple English Wikipedia: layers that share weights, and fewer layers."""
    ways = {'each layer its own': (DENSE, {'baseline': '10 layers', 'depth-dense6': '6 layers'}),
            'layers share a block': (SHARED, {'all-2': '2', 'all-5': '5', 'shared-all': 'all 10'}),
            'layers share an FFN': (LIGHT, {'ffn-2': '2', 'ffn-5': '5', 'shared-ffn': 'all 10'})}
    kinds = runs('stlm') | runs('stlm_depth')
    figure, axis = plt.subplots()
    for label, (color, names) in ways.items():
        for kind, name in names.items():
            bits = scores(kinds[kind], 'bits_per_byte')
            size = kinds[kind][0]['parameters'] / 1e6
            axis.plot([size] * len(bits), bits, 'o', color=color, label=label)
            above = color == LIGHT
            axis.annotate(name, (size, (max if above else min)(bits)), (0, 14 if above else -34),
                          textcoords='offset points', ha='center', color=color)
            label = None                                 # once in the legend
    axis.set(xlabel='parameters, millions', ylabel='bits per byte', xlim=(27, 58.5),
             ylim=(1.49, 1.6))
    axis.legend(labelcolor='linecolor')
    figure.suptitle('Sharing layers costs little,\nand so does leaving some out')
    return figure


# ---- The arena ----------------------------------------------------------------------------------

KINDS = {                                # its colour, and how the names of its entries begin
    'dense': (DENSE, r'dense(_small|_muon.*)?$|gpt2|llama'),
    'paths or gates': ('grey', 'papaformer_(share|composed)|selfmoe_gates'),
    'shared weights': (SHARED, 'stlm_shared'),
    'routed': (ROUTED, '')}                           # the others
LABELS = dict(                           # entry: text, points to the right, and up
    dense_muon=('dense_muon, routed', 12, -4),
    dense_moe_shared_muon_flops_drop_expert=('routed, choices dropped', -14, -8),
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
    axis.annotate('better', (40, 1.222), (60, 1.242), arrowprops=dict(width=3, color='green'),
                  color='green', fontsize=24)
    axis.set(xlabel='cost: MFLOPs of training per token', xlim=(32, 272), ylim=(1.21, 1.49),
             ylabel='bits per byte after ten passes; 7% of the text seen')
    axis.set_title('After ten passes the best entry is routed,\n'
                   'and drops choices in training', fontsize=26, weight='bold')
    axis.legend(labelcolor='markerfacecolor', handletextpad=0)
    return figure


@large
def passes():
    """What routing gains, by passes over the text: the same tokens read from less and less text.
    Means with their 95% intervals."""
    figure, axis = plt.subplots(figsize=(11.6, 8.5))
    points = sorted(tables.gaps_by_passes())
    numbers = [x for x, *_ in points]
    flops = [(x, *gaps['routed']) for x, *_, gaps in points]
    prose, python = [], []
    for size, dense, routed, _ in tables.after_equal_time():
        gap, reach, _ = tables.gap_after_equal_time(dense, routed)
        (python if size == 'python' else prose).append((routed[0]['passes'], gap, reach or np.nan))
    for curve, colour, above in ((flops, DENSE, (-20, 22)), (prose, ROUTED, (14, -34)),
                                 (python, SHARED, (-100, 10))):
        x, gaps, reaches = zip(*curve)
        axis.plot(x, gaps, 'o--', color=colour, ms=13, lw=1)
        axis.errorbar(x, gaps, reaches, fmt='none', color=colour, capsize=10, elinewidth=3)
        for x, gap, _ in curve:
            place = (-108, -34) if gap < -0.04 else above
            axis.annotate(f'{gap:+.3f}'.replace('-', '−'), (x, gap), place,
                          textcoords='offset points', color=colour)
    axis.axhline(0, color='black')
    axis.axhspan(0, 1, color=ROUTED, alpha=0.12, lw=0)
    axis.text(0.97, 0.92, 'routed is better', fontsize=24, ha='right', transform=axis.transAxes)
    axis.text(0.03, 0.05, 'dense is better', fontsize=24, transform=axis.transAxes)
    axis.text(3.0, -0.07, 'equal FLOPs,\nno choices dropped', ha='right')
    axis.text(1.25, -0.0125, 'equal time, choices\ndropped from 5 passes\non; at 20 one seed',
              color=ROUTED)
    axis.text(0.36, -0.0085, 'equal time,\nPython files', color=SHARED)
    axis.set_yscale('symlog', linthresh=0.02)            # near 0 as it is, further away by powers
    axis.set(xlabel='passes over the text, and its tokens; 50M are read in all\n'
                    '(in equal time the dense model reads 59M)', xscale='log',
             xlim=(0.33, 36), ylim=(-0.8, 0.06),
             ylabel='bits per byte, dense minus routed\n(log scale beyond ±0.02)')
    axis.set_yticks([-0.3, -0.1, -0.02, 0, 0.02], ['−0.3', '−0.1', '−0.02', '0', '+0.02'])
    axis.set_xticks([0.73, *numbers], ['0.73\n69M',
                    *(f'{x:.3g}\n{tokens / 1e6:.2g}M' for x, tokens, *_ in points)])
    axis.minorticks_off()
    axis.set_title('Routing pays while the text is new: per FLOP,\nand per minute to five passes',
                   fontsize=26, weight='bold', pad=14)
    return figure


PLOTS = {draw.__name__: draw for draw in (
    papaformer, moep, moep_entities, moep_routes, lookup, prune, stlm, arena, passes)}


def main():
    parser = Parser(__doc__)
    parser.add_argument('names', nargs='*', choices=[*PLOTS, []], help='no name ([]): all of them')
    for name in parser.parse_args().names or PLOTS:
        figure = PLOTS[name]()
        figure.tight_layout()
        figure.savefig(tables.ROOT / 'docs' / f'{name}.png', dpi=110)


if __name__ == '__main__':
    run_main(main)
