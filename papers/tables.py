"""
Rebuild the tables in README.md and docs/*.md from the files in this folder.

    python docs/results/tables.py              # rewrite the tables
    python docs/results/tables.py --check      # only say which pages would change

The function NAME makes the table between <!-- NAME --> and <!-- end -->: it yields the header,
then the rows.
"""

import json
import re
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from tools import leaderboard  # noqa: E402

GLUE = dict(sst2='SST-2', cola='CoLA', mrpc='MRPC', rte='RTE', wsc='WSC')
SEEDS = (42, 1, 2)                                   # the order of seeds in every table

PAPAFORMER = dict(
    path1='Path_1',
    path2='Path_2',
    llama256='LLaMA_256',
    llama192='LLaMA_192',
    share='Share_Linear',
    gumbel1='Gumb_MoE_1',
    gumbel2='Gumb_MoE_2')
AUX = {'': '', '-printed': ', aux losses as printed', '-released': ', aux losses as released'}
DROPOUT = ('none', 'constant', 'early', 'late', 'linear', 'rising', 'triangle', 'triangles')

# {folder: {file name without its seed: name in the tables}}, in the order of the tables
KINDS = dict(
    moep=dict(
        gpt2='GPT-2',
        moep='MoEP, `switch`',
        entropy='MoEP, `entropy`',
        printed='MoEP, `printed`',
        none='MoEP, no balance loss',
        swiglu='MoEP-SwiGLU, `switch`'),
    moep_controls=dict(
        gpt2='none: GPT-2',
        single='one block of full width, no router',
        top4='4 of 4 narrow blocks',
        moep='2 of 4 narrow blocks: MoEP',
        stride384='the same, a window every 384 tokens'),
    papaformer={
        f'{phase}-{kind}{suffix}': name + text
        for phase in ('stories', 'both')
        for kind, name in PAPAFORMER.items()
        for suffix, text in AUX.items()},
    moduleformer={
        'base': 'ModuleFormer',
        'ibm': "ModuleFormer, modules start as in IBM's release",
        'memory': 'ModuleFormer, trained with a memory of 512 tokens',
        'base-dense': 'dense',
        'joint-full': 'ModuleFormer, fully tuned',
        'joint-insert': 'ModuleFormer, inserted',
        'joint-dense': 'dense, fully tuned',
        'joint-lora': 'dense, LoRA 32, embedding and head',
        'life-full': 'ModuleFormer, fully tuned',
        **{f'life-insert{w}': f'ModuleFormer, inserted, `rout_reg` {w:g}'
           for w in (0.0, 0.25, 0.5, 1.0)},
        'life-dense': 'dense, fully tuned',
        'life-lora8': 'dense, LoRA 8',
        'life-lora32': 'dense, LoRA 32',
        **{f'math{w}': f'concentration {w:g}' for w in (0.0, 0.001, 0.01)},
        **{f'first{t}': f'{t:g}' for t in (0.2, 0.5, 1.0)}},
    stlm={
        'baseline': '`baseline.py`',
        'shared-ffn': '`shared_ffn.py`',
        'ffn-5': '`shared_ffn.py --share_group=5`',
        'ffn-2': '`shared_ffn.py --share_group=2`',
        'shared-ffn-lora': '`shared_ffn_lora.py`',
        'shared-all': '`shared_all.py`',
        'all-5': '`shared_all.py --share_group=5`',
        'all-2': '`shared_all.py --share_group=2`',
        'all-lora': '`shared_all.py --lora_rank=16`',
        'bytes-causal': '`bytes_causal.py`',
        'one-causal': 'the same, one vector for all slots',
        'bytes-parallel': '`bytes_parallel.py`',
        'one-parallel': 'the same, one vector for all slots'},
    stlm_depth={
        'exit-none': 'plain, 10 layers',
        'depth-dense6': 'plain, 6 layers',
        'depth': '`depth.py`: mixture of depths, 10 layers',
        'depth-18': '`depth.py --n_layer=18`',
        'exit': '`exit.py`: early exit, 10 layers'},
    stlm_dropout=dict.fromkeys(DROPOUT),
    stlm_math={
        'math': '`math.py`',
        'math-pauses': '`math_pauses.py`: ten pauses',
        'math-thoughts': '`math_thoughts.py`: sentences'})

KINDS['moduleformer_cosine'] = KINDS['moduleformer']     # earlier runs, fine-tuned with a cosine


# --------------------------------------------------------------------------------------------------
# Reading the files


def read(name):
    return json.loads((HERE / name).read_text())


def runs(folder):
    """{kind: {seed: run}} from the files kind_seed.json of a folder."""
    found = {path.stem: json.loads(path.read_text()) for path in (HERE / folder).glob('*.json')}
    by_kind = {}
    for kind in KINDS[folder]:
        seeds = [seed for seed in SEEDS if f'{kind}_{seed}' in found]
        if seeds:
            by_kind[kind] = {seed: found.pop(f'{kind}_{seed}') for seed in seeds}
    if found:
        raise ValueError(f'{folder}: unknown kind or seed in {list(found)}')
    return by_kind


def runs_like(folder, prefix):
    """{kind: [run of each seed]} of the kinds that start with prefix."""
    found = runs(folder)
    return {kind: list(found[kind].values()) for kind in found if kind.startswith(prefix)}


def finished(found):
    """{kind: [run]} of the runs that reached their end: only those were evaluated on BLiMP."""
    done = {kind: [run for run in some.values() if run['blimp']] for kind, some in found.items()}
    return {kind: some for kind, some in done.items() if some}


# --------------------------------------------------------------------------------------------------
# Cells


def spread(values, digits):
    """The mean of the values (None is left out), and their standard deviation if there are several."""
    values = [v for v in values if v is not None]
    if not values:
        return '-'
    mean = f'{statistics.mean(values):.{digits}f}'
    if len(values) == 1:
        return mean
    return f'{mean} ± {statistics.stdev(values):.{digits}f}'


def row(*cells):
    return ' | '.join(map(str, cells))


def blimp(run, mode, subset):
    """{words read: accuracy}"""
    found = [b for b in run['blimp'] if (b['mode'], b['subset']) == (mode, subset)]
    return {r['words']: r['overall'] for b in found for r in b['runs']}


def full_blimp(some, mode='harness'):
    """Full BLiMP of the last checkpoint, over seeds."""
    curves = [blimp(run, mode, 'full') for run in some]
    return spread([list(curve.values())[-1] for curve in curves if curve], 1)


def val(some, data, key='loss', at=-1):
    """A validation score at one evaluation, by default the last, over seeds."""
    evaluations = [run['evaluations'][at]['val'] for run in some]
    return spread([e[data][key] if data in e else None for e in evaluations], 3)


def idle(evaluation):
    """(choices that got less than 1% of their layer's picks, all choices), over all layers."""
    shares = [share for layer in evaluation['routes'].values() for share in layer]
    return sum(share < 0.01 for share in shares), len(shares)


def idle_cell(evaluation):
    return '{} of {}'.format(*idle(evaluation))


def millions(count, digits=1):
    return f'{count / 1e6:.{digits}f}M'


def size(run):
    return f"{millions(run['parameters'])}, {millions(run['active'])}"


# --------------------------------------------------------------------------------------------------
# Data


def data():
    yield 'set | made by | training: tokens or symbols, words, documents | validation'
    for entry in read('data.json'):
        cells = []
        for split in (entry['train'], entry['val']):
            tokens, words = millions(split['tokens'], 2), millions(split['words'], 2)
            cells.append(f"{tokens}, {words}, {split['documents']:,}")
        yield row(entry['name'], f"`{entry['command']}`", *cells)


def again():
    """Runs repeated from their printed command, compared at the last step that both evaluated."""
    repeated = (('papaformer', 'stories-llama192', 42, 'tinystories'),
                ('moep', 'printed', 42, 'babylm'),
                ('stlm', 'baseline', 42, 'simplewiki'),
                ('moduleformer_cosine', 'base-dense', 1, 'babylm'))
    yield 'command | step | val loss | again | difference | BLiMP | again'
    for folder, kind, seed, data in repeated:
        both = [runs(folder)[kind][seed], read(f'again/{kind}_{seed}.json')]
        losses = [{e['iter']: e['val'][data]['loss'] for e in run['evaluations']} for run in both]
        step = max(losses[0].keys() & losses[1].keys())
        first, second = losses[0][step], losses[1][step]
        scores = []
        for run in both:
            ended_there = run['evaluations'][-1]['iter'] == step
            scores.append(full_blimp([run]) if ended_there else '-')
        yield row(f"`{both[0]['command']}`", f'{step:,}', f'{first:.4f}', f'{second:.4f}',
                  f'{second - first:+.4f}', *scores)


# --------------------------------------------------------------------------------------------------
# MoEP


def headline():
    tuned = read('glue.json')
    done = finished(runs('moep'))
    yield ' | seeds | val loss | BLiMP, `harness` | SST-2 (LoRA)'
    for kind, config in dict(gpt2='gpt2', moep='moep', swiglu='moep_swiglu').items():
        some = done[kind]
        seeds = tuned.get(f'{kind}_42', {}).get('sst2', {}).get('seeds', {})
        accuracy = spread([seed['accuracy'] for seed in seeds.values()], 1)
        command = f'`python train.py config/paper/{config}.py`'
        yield row(command, len(some), val(some, 'babylm'), full_blimp(some), accuracy)


def moep():
    yield ('model and balance loss | seeds | val loss | bits per byte | BLiMP, `harness` | '
           'BLiMP, `babylm2025` | choices that go unused')
    for kind, some in finished(runs('moep')).items():
        last = [run['evaluations'][-1] for run in some]
        unused = ', '.join(idle_cell(e) for e in last) if last[0]['routes'] else ''
        yield row(KINDS['moep'][kind], len(some), val(some, 'babylm'),
                  val(some, 'babylm', 'bits_per_byte'), full_blimp(some),
                  full_blimp(some, 'babylm2025'), unused)


def moep_controls():
    """Two of the runs of `single` were stopped early: every cell has the seeds that got so far."""
    steps = (6000, 16000, 18303)
    yield row('parallel layers', 'parameters, active', *(f'val loss at step {step:,}' for step in steps),
              'BLiMP, `harness`', 'BLiMP, `babylm2025`')
    found = runs('moep_controls') | {kind: runs('moep')[kind] for kind in ('gpt2', 'moep')}
    sizes = dict(gpt2='27.8M, 27.6M', moep='28.4M, 21.3M')       # older files do not have them
    for kind, name in KINDS['moep_controls'].items():
        some = list(found[kind].values())
        cells = [sizes.get(kind) or size(some[0])]
        evaluations = [e for run in some for e in run['evaluations']]
        for step in steps:
            losses = [e['val']['babylm']['loss'] for e in evaluations if e['iter'] == step]
            cells.append(f'{spread(losses, 3)} ({len(losses)})')
        yield row(name, *cells, full_blimp(some), full_blimp(some, 'babylm2025'))


PAPER_TABLE_1 = {                                    # BLiMP with its supplement, entities, WUG, reading
    'gpt2': ('GPT-2', 59.70, 13.15, 36.00, 6.40),
    'moep': ('MoEP', 59.15, 35.65, 33.00, 6.70),
    'moep_swiglu': ('MoEP-SwiGLU', 60.35, 17.10, 36.50, 6.60)}


def moep_tasks():
    found = read('babylm2025.json')
    yield ('| seeds | BLiMP | supplement | mean of both | Entity Tracking | WUG: adjectives | past tense | '
           'mean, times 100 | reading: eyes | self-paced')
    for kind, (name, blimp, entity, wug, reading) in PAPER_TABLE_1.items():
        some = [found[f'{kind}_{seed}'] for seed in SEEDS if f'{kind}_{seed}' in found]

        def cell(*tasks, digits=1, scale=1):
            return spread([scale * statistics.mean(run[task] for task in tasks) for run in some], digits)
        wugs = 'wug_adj_nominalization', 'wug_past_tense'
        yield row(name, len(some), cell('blimp_filtered'), cell('supplement_filtered'),
                  cell('blimp_filtered', 'supplement_filtered'), cell('entity_tracking'),
                  *(cell(task, digits=2) for task in wugs), cell(*wugs, scale=100),
                  cell('eye tracking', digits=2), cell('self-paced reading', digits=2))
        yield row(f'{name}, the paper', 1, '', '', blimp, entity, '', '', wug, f'{reading} (mean)', '')


def moep_entities():
    yield 'run | Entity Tracking | right where the answer is "nothing." | right where it is something'
    for name, scores in read('babylm2025.json').items():
        cells = [f'{scores[key]:.1f}' if key in scores else '-'
                 for key in ('entity_tracking', 'nothing', 'something')]
        yield row(f'`{name}`' if '_' in name else f'always the {name}', *cells)


def moep_words():
    curves = {}
    for kind, some in finished(runs('moep')).items():
        found = [blimp(run, 'babylm2025', 'fast') for run in some]
        curves[kind] = [curve for curve in found if curve]
    curves = {kind: some for kind, some in curves.items() if some}

    def nearest(curve, words):
        return curve[min(curve, key=lambda point: abs(point - words))]

    names = [f"{KINDS['moep'][kind]}, seeds: {len(some)}" for kind, some in curves.items()]
    yield row('words', *names)
    for million in (1, 2, 3, 5, 7, 10, 20, 30, 40, 60, 80, 100):
        scores = [[nearest(curve, 1e6 * million) for curve in some] for some in curves.values()]
        yield row(f'{million}M', *(spread(values, 1) for values in scores))


def moep_routes():
    steps = (2000, 6000, 10000, 18303)

    def cell(evaluation):
        if evaluation is None:
            return '-'
        loss = f"{evaluation['val']['babylm']['loss']:.3f}"
        return f'{loss}, {idle_cell(evaluation)}' if evaluation['routes'] else loss

    columns = [f'step {step:,}: val loss, unused' for step in steps]
    yield row('model and balance loss', 'seed', *columns)
    for kind, some in runs('moep').items():
        for seed, run in some.items():
            at = {e['iter']: e for e in run['evaluations']}
            yield row(KINDS['moep'][kind], seed, *(cell(at.get(step)) for step in steps))


def glue():
    found = read('glue.json')
    metrics = dict(cola='Matthews', mrpc='F1')
    yield 'task, metric | train, valid | majority | GPT-2 | MoEP | minutes per seed, GPT-2 | MoEP'
    for task, name in GLUE.items():
        metric = metrics.get(task, 'accuracy')
        entries = [found[run][task] for run in ('gpt2_42', 'moep_42')]
        scores, times = [], []
        for entry in entries:
            seeds = entry['seeds'].values()
            minutes = [seed['minutes'] for seed in seeds]
            scores.append(spread([seed[metric] for seed in seeds], 2))
            times.append(f'{min(minutes):.1f} to {max(minutes):.1f}')
        sizes = f"{entries[0]['train']:,}, {entries[0]['valid']:,}"
        majority = f"{entries[0]['majority'][metric]:.2f}"
        yield row(f'{name}, {metric}', sizes, majority, *scores, *times)


# --------------------------------------------------------------------------------------------------
# PaPaformer


def papaformer_stories():
    yield 'model | parameters | val loss | bits per byte | BLiMP'
    for kind, some in runs_like('papaformer', 'stories-').items():
        yield row(KINDS['papaformer'][kind], millions(some[0]['parameters']),
                  val(some, 'tinystories'), val(some, 'tinystories', 'bits_per_byte'),
                  full_blimp(some))


def path_fits(some):
    """The share of prompts that use the path of their domain, where tools.path_usage was run."""
    if 'usage' not in some[0]:
        return ''
    return spread([100 * run['usage']['accuracy'] for run in some], 0) + '%'


def papaformer_both():
    yield ('model | steps | stories, val loss | math, val loss | BLiMP | '
           'prompts whose path fits their domain')
    for kind, some in runs_like('papaformer', 'both-').items():
        steps = some[0]['evaluations'][-1]['iter']
        yield row(KINDS['papaformer'][kind], f'{steps:,}', val(some, 'tinystories_neox'),
                  val(some, 'openmath_neox'), full_blimp(some), path_fits(some))


def papaformer():
    """The shorter second phase: what no other table has. (papaformer.json also has its Gumbel models.)"""
    yield 'run | steps | stories, val loss | math, val loss'
    found = read('papaformer.json')['real']
    for name in ('composed share', 'dense on 40%', 'dense on 100%'):
        some = list(found[name].values())
        losses = []
        for data in ('tinystories_neox', 'openmath_neox'):
            losses.append(spread([run['loss'][data][-1] for run in some], 3))
        yield row(name, f"{some[0]['steps'][-1]:,}", *losses)


def papaformer_glue():
    """Fine-tuned models of the second phase, over all seeds of all models of a kind."""
    found = read('glue_papaformer.json')
    columns = (('wsc', 'accuracy'), ('rte', 'accuracy'), ('mrpc', 'F1'), ('mrpc', 'accuracy'),
               ('cola', 'Matthews'))

    def entries(kind, task):
        tuned = [tasks for run, tasks in found.items() if run.startswith(f'p2-{kind}_')]
        return [tasks[task] for tasks in tuned if task in tasks]

    header = []
    for task, metric in columns:
        majority = entries('llama256', task)[0]['majority'][metric]
        header.append(f'{GLUE[task]}, {metric}; majority {majority:.1f}')
    yield row('model', *header)
    for kind in ('llama256', 'llama192', 'share-intended', 'gumbel1-intended', 'gumbel2-intended'):
        scores = []
        for task, metric in columns:
            seeds = [seed for entry in entries(kind, task) for seed in entry['seeds'].values()]
            scores.append(spread([seed[metric] for seed in seeds], 1))
        yield row(KINDS['papaformer']['both-' + kind.removesuffix('-intended')], *scores)


def papaformer_time():
    """Time of the second phase at measured speeds: hours on two cores, seconds on a GPU.
    In brackets: relative to LLaMA_256."""
    found = read('papaformer_time.json')
    tokens = {}                                      # read in the second phase
    for kind, some in runs_like('papaformer', 'both-').items():
        tokens[kind.removeprefix('both-')] = 8192 * some[0]['evaluations'][-1]['iter']
    speeds = {}                                      # {machine: {model: tokens per second}}
    for machine, bench in found.items():
        speeds[machine] = {r['name'].replace('_', ''): r['tokens_per_s'] for r in bench['rows']}
    beside = [r for r in found['gpu']['rows'] if 'beside' in r['name']]      # two paths at once on one GPU
    both_paths = sum(r['tokens_per_s'] for r in beside)

    def cell(kind, machine, first_stage=None):
        """first_stage: from the times of path 1 and path 2, each alone, the time until both are done"""
        unit = 3600 if machine == 'cpu' else 1
        speed = speeds[machine]
        second = tokens[kind] / speed[kind] / unit
        whole = tokens['llama256'] / speed['llama256'] / unit
        if first_stage is None:
            return f'{second:.1f} ({100 * second / whole:.0f}%)'
        # both paths have the same shape, so path 1's speed serves for both
        paths = [tokens[path] / speed['path1'] / unit for path in ('path1', 'path2')]
        first = first_stage(*paths)
        total = first + second
        return f'{first:.1f} + {second:.1f} = {total:.1f} ({100 * total / whole:.0f}%)'

    def one_after_the_other(one, two):
        return one + two

    def same_gpu(one, two):
        """At the speed of both together until the shorter one ends, then the other alone."""
        return 2 * min(tokens['path1'], tokens['path2']) / both_paths + abs(one - two)

    yield ('model | two cores: paths + composed, hours | one H200: paths + composed, seconds | '
           'the paper, hours')
    for kind, paper in (('llama256', '12.5 (100%)'), ('llama192', '11.0 (88%)')):
        yield row(KINDS['papaformer'][f'both-{kind}'], cell(kind, 'cpu'), cell(kind, 'gpu'), paper)
    ways = (('paths one after the other', one_after_the_other, '9.35 (75%)'),
            ('paths at once, each on its own', max, '7.85 (63%)'))
    for kind in ('share', 'gumbel1', 'gumbel2'):
        name = KINDS['papaformer'][f'both-{kind}']
        for how, first_stage, paper in ways:
            times = [cell(kind, machine, first_stage) for machine in ('cpu', 'gpu')]
            yield row(f'{name}, {how}', *times, paper)
        yield f"{name}, paths at once on the same GPU | | {cell(kind, 'gpu', same_gpu)} | "


# --------------------------------------------------------------------------------------------------
# Self-MoE and Super Tiny models


def selfmoe():
    found = read('selfmoe.json')['real']
    yield ('fine-tuned with | val loss | difference to no gates, seed by seed | '
           'answers right of 584, by seed')
    for name, seeds in found.items():
        if name == 'base':
            continue
        losses = spread([run['loss'] for run in seeds.values()], 3)
        changes = [run['loss'] - found['none'][seed]['loss'] for seed, run in seeds.items()]
        changes = '' if name == 'none' else ', '.join(f'{change:+.3f}' for change in changes)
        right = ', '.join(str(run['right']) for run in seeds.values())
        yield row(name.replace('none', 'no gates'), losses, changes, right)


def selfmoe_improves():
    """The selection again, on training text, and the earlier one on the validation set."""
    yield ('gates | val loss | after `improves` | change, seed by seed | kept of 7, by seed | '
           'earlier, selected on the validation set: change, seed by seed')
    again, real = read('selfmoe_again.json')['runs'], read('selfmoe.json')['real']
    for kind in ('matrix', 'vector', 'scalar'):
        chosen = again[f'{kind}, improves']
        changes = []
        for found in (again, real):
            pairs = [(found[f'{kind}, improves'][seed], found[kind][seed]) for seed in chosen]
            changes.append(', '.join(f"{one['loss'] - two['loss']:+.4f}" for one, two in pairs))
        kept = ', '.join(str(sum(gate['kept'] for gate in run['gates'])) for run in chosen.values())
        yield row(kind, spread([run['loss'] for run in again[kind].values()], 3),
                  spread([run['loss'] for run in chosen.values()], 3), changes[0], kept, changes[1])


def flops(run, layers):
    """Training FLOPs per token, in millions: 6 per active parameter, and attention over 512 tokens of
    width 512, at their mean position, in so many layers."""
    return f"{(6 * run['active'] + 6 * layers * 512 * 512) / 1e6:.0f}M"


def rate(kind):
    """Tokens or chunks per second in training, in thousands."""
    found = read('stlm_speed.json')['tokens_per_s'].get(kind)
    return f'{found / 1e3:.0f}K' if found else '-'


def stlm():
    yield ('config | parameters, active | FLOPs per token or chunk | tokens or chunks/s | seeds | '
           'bits per byte | val loss per token or symbol')
    of_bytes = dict(bytes='272M', one='267M')            # docs/stlm.md says how they are counted
    for kind, some in runs_like('stlm', '').items():
        data = 'simplewiki_chunks' if 'bytes' in some[0]['command'] else 'simplewiki'
        cost = of_bytes.get(kind.split('-')[0]) or flops(some[0], layers=10)
        yield row(KINDS['stlm'][kind], size(some[0]), cost, rate(kind), len(some),
                  val(some, data, 'bits_per_byte'), val(some, data))


def stlm_depth():
    yield ('model | parameters, active | FLOPs per token, training | tokens/s | seeds | bits per byte | '
           'val loss')
    layers = {'depth-dense6': 6, 'depth': 5 + 5 / 64, 'depth-18': 9 + 9 / 64}    # (1/8)^2 of attention
    for kind, some in runs_like('stlm_depth', '').items():
        cost = flops(some[0], layers.get(kind, 10))
        if kind == 'exit':
            cost += ' and 154M for one more head'
        yield row(KINDS['stlm_depth'][kind], size(some[0]), cost, rate(kind), len(some),
                  val(some, 'simplewiki', 'bits_per_byte'), val(some, 'simplewiki'))


def stlm_exits():
    found = read('stlm_depth.json')
    yield 'layers | bits per byte if the model ends here: `exit.py` | plain'
    for early, plain in zip(found['exit_42']['exits'], found['exit-none_42']['exits']):
        yield row(early['layers'], f"{early['bits_per_byte']:.3f}", f"{plain['bits_per_byte']:.3f}")


def stlm_drafts():
    found = read('stlm_depth.json')
    yield ('layers that draft 4 tokens | drafts kept: `exit.py` | plain | tokens/s: `exit.py` | plain | '
           'same text')
    for early, plain in zip(found['exit_42']['drafts'], found['exit-none_42']['drafts']):
        kept = ['-' if run['kept'] is None else f"{100 * run['kept']:.0f}%" for run in (early, plain)]
        yield row(early['layers'], *kept, *(f"{run['tokens_per_s']:.0f}" for run in (early, plain)),
                  f"{early['same'] + plain['same']} of 10")


def stlm_dropout():
    yield 'schedule | seeds | bits per byte, lowest | at the end'
    for kind, some in runs_like('stlm_dropout', '').items():
        curves = [[e['val']['simplewiki']['bits_per_byte'] for e in run['evaluations']] for run in some]
        lowest = spread([min(curve) for curve in curves], 3)
        yield row(kind, len(some), lowest, spread([curve[-1] for curve in curves], 3))


def stlm_math():
    yield 'config | parameters | seeds | bits per byte | exact answers, of 589, each seed'
    for kind, some in runs_like('stlm_math', '').items():
        scores = [next(iter(run['evaluations'][-1]['val'].values())) for run in some]
        bits = spread([score['bits_per_byte'] for score in scores], 3)
        right = ', '.join(str(run['answers']['right']) for run in some)
        yield row(KINDS['stlm_math'][kind], millions(some[0]['parameters'], 2), len(some), bits, right)


# --------------------------------------------------------------------------------------------------
# ModuleFormer


def moduleformer_base():
    yield ('model | parameters, active | seeds | val loss | bits per byte | BLiMP | '
           'training loss, mean of ten of the last 300 steps')
    for kind, some in (runs_like('moduleformer', 'base') | runs_like('moduleformer', 'ibm')).items():
        fit = []
        for run in some:
            last = run['steps'][-1]['iter']
            steps = [step for step in run['steps'] if step['iter'] > last - 300]
            fit.append(statistics.mean(step['loss'] for step in steps))
        yield row(KINDS['moduleformer'][kind], size(some[0]), len(some), val(some, 'babylm'),
                  val(some, 'babylm', 'bits_per_byte'), full_blimp(some), spread(fit, 2))


def methods(how):
    """The ways to learn math, jointly or alone: before, and after with the change. The last columns are
    the earlier runs, whose rate fell with a cosine."""
    by_seed = runs('moduleformer')
    found = runs_like('moduleformer', how)
    earlier = runs_like('moduleformer_cosine', how)
    sets = ('babylm', 'openmath_babylm')

    def loss(kind, data, at):
        evaluations = [run['evaluations'][at] for run in found[kind]]
        return statistics.mean(e['val'][data]['loss'] for e in evaluations)

    yield ('method | trained | old text, val loss | math, val loss | BLiMP | '
           'earlier, with a cosine: old text | math | BLiMP')
    for kind, base in ((f'{how}-full', 'base'), (f'{how}-dense', 'base-dense')):
        started = [by_seed[base][seed] for seed in by_seed[kind]]      # seeds that were trained on
        before = ' | '.join(val(found[kind], data, at=0) for data in sets)
        old = ' | '.join(val(earlier[kind], data, at=0) for data in sets)
        was = full_blimp(runs('moduleformer_cosine')[base].values())
        yield f"before, {KINDS['moduleformer'][base]} | | {before} | {full_blimp(started)} | {old} | {was}"
    for kind, some in found.items():
        name = KINDS['moduleformer'][kind]
        start = f'{how}-full' if 'ModuleFormer' in name else f'{how}-dense'
        cells = []
        for data in sets:
            change = loss(kind, data, -1) - loss(start, data, 0)
            cells.append(f'{val(some, data)} ({change:+.2f})')
        old = [val(earlier[kind], data) for data in sets]
        yield row(name, millions(some[0]['trained'], 2), *cells, full_blimp(some), *old,
                  full_blimp(earlier[kind]))


def moduleformer_joint():
    return methods('joint')


def moduleformer_life():
    return methods('life')


def moduleformer_prune(folder='moduleformer'):
    found = runs_like(folder, 'math')
    first = next(iter(found.values()))[0]
    thresholds = [r['threshold'] for r in first['prune']['rows']]
    columns = [f"{KINDS['moduleformer'][kind]}: modules left, loss" for kind in found]
    yield row('threshold', *columns)
    for i, threshold in enumerate(thresholds):
        if threshold not in (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1):
            continue
        cells = []
        for some in found.values():
            pruned = [run['prune']['rows'][i] for run in some]
            left = spread([100 * r['modules'] for r in pruned], 0)
            cells.append(f"{left}%, {spread([r['loss'] for r in pruned], 3)}")
        yield row(f'{threshold:g}', *cells)


def moduleformer_prune_cosine():
    return moduleformer_prune('moduleformer_cosine')


def moduleformer_first():
    yield 'threshold | modules left, by seed | parameters, by seed | val loss, the whole validation set'
    some = runs_like('moduleformer', 'math0.0')['math0.0']
    yield row('not pruned', '100%', millions(some[0]['parameters']), val(some, 'openmath_babylm'))
    all_modules = sum(map(len, some[0]['evaluations'][0]['routes'].values()))
    for kind, some in runs_like('moduleformer', 'first').items():
        left = [sum(map(len, run['evaluations'][0]['routes'].values())) for run in some]
        yield row(KINDS['moduleformer'][kind], ', '.join(f'{n / all_modules:.0%}' for n in left),
                  ', '.join(millions(run['parameters']) for run in some), val(some, 'openmath_babylm'))


def moduleformer_memory():
    yield ('trained with a memory of | each segment sees | its first 64 tokens | its second 64 | '
           'the other 384 | all')
    names = {'0': 'nothing before it', 'whole': 'all before it, read in one pass'}
    for found in read('moduleformer_memory.json')['rows']:
        bins = found['by_64_tokens']
        parts = [bins[:1], bins[1:2], bins[2:], bins]
        memory = found['memory']
        name = names[memory] if memory in names else f'{int(memory):,} tokens of memory'
        yield row(found['trained'] or 'nothing', name, *(f'{statistics.mean(part):.3f}' for part in parts))


MOLM = {                                             # name, and the paper's ms, GB and tokens/s on an A100
    '410M': ('dense 410M', 554, 25, 59594),
    'molm_4b_k2': ('MoLM-4B-K2', 497, 27, 71017),
    '1.4B': ('dense 1.4B', 918, 42, 35559),
    'molm_4b_k4': ('MoLM-4B-K4', 863, 27, 39931),
    'molm_8b_k2': ('MoLM-8B-K2', 939, 38, 37419),
    '2.8B': ('dense 2.8B', 2111, 70, 15522)}


def molm():
    yield ('model | parameters, active | ms, not compiled | ms, compiled | tokens/s, compiled | GiB | '
           'the paper, A100: ms | tokens/s | GB')
    found = {r['name']: r for r in read('molm.json')['rows']}
    for name, (label, ms, gb, speed) in MOLM.items():
        r = found[name]
        yield row(label, f"{millions(r['total'], 0)}, {millions(r['active'], 0)}", f"{r['ms']:.0f}",
                  f"{r['compiled_ms']:.0f}", f"{r['tokens_per_s']:,.0f}", f"{r['gib']:.1f}",
                  ms, f'{speed:,}', gb)


# --------------------------------------------------------------------------------------------------
# The arena


def arena(track, key):
    return map(' | '.join, leaderboard.table(track, key, HERE / 'arena'))


def arena_toy_parameters():
    return arena('toy', 'parameters')


def arena_toy_flops():
    return arena('toy', 'flops_per_token')


def arena_baby_parameters():
    return arena('baby', 'parameters')


def arena_baby_flops():
    return arena('baby', 'flops_per_token')


# --------------------------------------------------------------------------------------------------
# Pages


def fill(text):
    """The text with every marked table rebuilt."""
    def table(match):
        name = match[1]
        rows = [f'| {line} |' for line in globals()[name]()]
        rows.insert(1, '|' + '---|' * (rows[0].count('|') - 1))
        return f'<!-- {name} -->\n' + '\n'.join(rows) + '\n<!-- end -->'
    return re.sub(r'<!-- (\w+) -->\n.*?<!-- end -->', table, text, flags=re.DOTALL)


def main():
    check = '--check' in sys.argv
    stale = False
    for path in [HERE.parents[1] / 'README.md', *sorted(HERE.parent.glob('*.md'))]:
        text = path.read_text(encoding='utf-8')
        rebuilt = fill(text)
        if rebuilt == text:
            continue
        stale = True
        if not check:
            path.write_text(rebuilt, encoding='utf-8')
        print(path.name, 'differs from docs/results' if check else 'rebuilt')
    sys.exit(check and stale)


if __name__ == '__main__':
    main()
