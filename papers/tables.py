"""
Rebuild the tables in README.md and docs/*.md from papers/results/*.jsonl.

    python papers/tables.py              # rewrite the tables
    python papers/tables.py --check      # only say which pages would change

The function TABLES[NAME] makes the table between <!-- NAME --> and <!-- end -->: it yields the
header, then the rows. papers/README.md describes the files.
"""

import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / 'papers' / 'results'
sys.path.insert(0, str(ROOT))

from arena import leaderboard  # noqa: E402

GLUE = dict(sst2='SST-2', cola='CoLA', mrpc='MRPC', rte='RTE', wsc='WSC')
PAPAFORMER = dict(
    path1='Path_1',
    path2='Path_2',
    llama256='LLaMA_256',
    llama192='LLaMA_192',
    share='Share_Linear',
    gumbel1='Gumb_MoE_1',
    gumbel2='Gumb_MoE_2')
AUX = {'': '', '-printed': ', aux losses as printed', '-released': ', aux losses as released'}

# {experiment: {run: its name in the tables}}, in the order of the tables
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
        for suffix, text in AUX.items()} | {
        'short-share': 'composed share',
        'short-llama256-40': 'dense on 40%',
        'short-llama256-100': 'dense on 100%'},
    moduleformer={
        'base': 'ModuleFormer',
        'base-dense': 'dense',
        'ibm': "ModuleFormer, modules start as in IBM's release",
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
        'shared-ffn': '`--share=ffn`',
        'ffn-5': '`--share=ffn --share_group=5`',
        'ffn-2': '`--share=ffn --share_group=2`',
        'shared-ffn-lora': '`--share=ffn --lora_rank=16`',
        'shared-all': '`--share=all`',
        'all-5': '`--share=all --share_group=5`',
        'all-2': '`--share=all --share_group=2`',
        'all-lora': '`--share=all --lora_rank=16`',
        'bytes-causal': '`bytes_causal.py`',
        'one-causal': 'the same, one vector for all slots',
        'bytes-parallel': '`bytes_causal.py --decoder=parallel`',
        'one-parallel': 'the same, one vector for all slots'},
    stlm_depth={
        'exit-none': 'plain, 10 layers',
        'depth-dense6': 'plain, 6 layers',
        'depth': '`depth.py`: mixture of depths, 10 layers',
        'depth-18': '`depth.py --n_layer=18`',
        'exit': '`exit.py`: early exit, 10 layers'},
    stlm_dropout={
        name: name for name in
        ('none', 'constant', 'early', 'late', 'linear', 'rising', 'triangle', 'triangles')},
    stlm_math={
        'math': '`math.py`',
        'math-pauses': '`--data=openmath_pauses --block_size=544`: ten pauses',
        'math-thoughts': '`math_thoughts.py`: sentences'})


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


def runs(experiment, prefix=''):
    """{kind: [run of each seed]} of the kinds that start with prefix, in the order of KINDS."""
    seeds = group(read(experiment), 'run')
    return {kind: seeds[kind] for kind in KINDS[experiment]
            if kind in seeds and kind.startswith(prefix)}


def finished(experiment):
    """The same of the runs that reached their end: only those were evaluated on BLiMP."""
    done = {kind: [run for run in seeds if run['blimp']]
            for kind, seeds in runs(experiment).items()}
    return {kind: seeds for kind, seeds in done.items() if seeds}


# ---- Cells --------------------------------------------------------------------------------------


def spread(values, digits):
    """The mean, and the standard deviation if there are several values. None is left out."""
    values = [value for value in values if value is not None]
    if not values:
        return '-'
    mean = f'{statistics.mean(values):.{digits}f}'
    if len(values) == 1:
        return mean
    return f'{mean} ± {statistics.stdev(values):.{digits}f}'


def join(*cells):
    return ' | '.join(map(str, cells))


def millions(count, digits=1):
    return f'{count / 1e6:.{digits}f}M'


def size(seeds):
    return f"{millions(seeds[0]['parameters'])}, {millions(seeds[0]['active'])}"


def val(data, key='loss', at=-1):
    """A column: a validation score of one evaluation, by default the last."""
    def cell(seeds):
        scores = [run['evaluations'][at]['val'] for run in seeds]
        return spread([score.get(data, {}).get(key) for score in scores], 3)
    return cell


def blimp(mode='harness'):
    """A column: full BLiMP of the last checkpoint."""
    def cell(seeds):
        curves = [run['blimp'].get(f'{mode} full') for run in seeds]
        return spread([curve[-1][1] for curve in curves if curve], 1)
    return cell


def unused(seeds):
    """How many choices of all got less than 1% of their layer's picks at the end, by seed."""
    last = [run['evaluations'][-1] for run in seeds]
    return ', '.join(unused_cell(e) for e in last if 'unused' in e)


def unused_cell(evaluation):
    return '{} of {}'.format(*evaluation['unused'])


def by_kind(experiment, title, columns, prefix='', kinds=None):
    """One row per kind of run; columns: {header: cell made from the runs of all seeds}."""
    yield join(title, *columns)
    for kind, seeds in (kinds or runs(experiment, prefix)).items():
        yield join(KINDS[experiment][kind], *(cell(seeds) for cell in columns.values()))


# ---- Data and MoEP ------------------------------------------------------------------------------


def data():
    yield 'set | made by | training: tokens or symbols, words, documents | validation'
    for entry in read('data'):
        cells = []
        for split in (entry['train'], entry['val']):
            tokens, words = millions(split['tokens'], 2), millions(split['words'], 2)
            cells.append(f"{tokens}, {words}, {split['documents']:,}")
        yield join(entry['name'], f"`{entry['command']}`", *cells)


def headline():
    """The fine-tuned models are those of seed 42."""
    commands = dict(gpt2='gpt2.py', moep='moep.py', swiglu='moep.py --swiglu --expert_hidden=512')
    tuned = {row['run']: row for row in read('glue') if row['task'] == 'sst2'}
    yield ' | seeds | val loss | BLiMP, `harness` | SST-2 (LoRA)'
    for kind, command in commands.items():
        seeds = finished('moep')[kind]
        scores = tuned.get(f'{kind}_42', dict(seeds={}))['seeds'].values()
        yield join(f'`python train.py config/paper/{command}`', len(seeds), val('babylm')(seeds),
                   blimp()(seeds), spread([score['accuracy'] for score in scores], 1))


def moep_controls():
    """Two of the runs of `single` were stopped early: every cell has the seeds that got so far."""
    steps = (6000, 16000, 18303)
    yield join('parallel layers', 'parameters, active',
               *(f'val loss at step {step:,}' for step in steps),
               'BLiMP, `harness`', 'BLiMP, `babylm2025`')
    kinds = runs('moep_controls') | {kind: runs('moep')[kind] for kind in ('gpt2', 'moep')}
    sizes = dict(gpt2='27.8M, 27.6M', moep='28.4M, 21.3M')       # older rows do not have them
    for kind, name in KINDS['moep_controls'].items():
        seeds = kinds[kind]
        cells = []
        evaluations = [e for run in seeds for e in run['evaluations']]
        for step in steps:
            losses = [e['val']['babylm']['loss'] for e in evaluations if e['iter'] == step]
            cells.append(f'{spread(losses, 3)} ({len(losses)})')
        yield join(name, sizes.get(kind) or size(seeds), *cells,
                   blimp()(seeds), blimp('babylm2025')(seeds))


PAPER_TABLE_1 = {                # BLiMP with its supplement, entities, WUG, reading
    'gpt2': ('GPT-2', 59.70, 13.15, 36.00, 6.40),
    'moep': ('MoEP', 59.15, 35.65, 33.00, 6.70),
    'moep_swiglu': ('MoEP-SwiGLU', 60.35, 17.10, 36.50, 6.60)}


def moep_tasks():
    yield ('| seeds | BLiMP | supplement | mean of both | Entity Tracking | WUG: adjectives | '
           'past tense | mean, times 100 | reading: eyes | self-paced')
    for kind, (name, *paper) in PAPER_TABLE_1.items():
        seeds = [row for row in read('babylm2025') if row['run'].rpartition('_')[0] == kind]

        def cell(*tasks, digits=1, scale=1):
            means = [scale * statistics.mean(run[task] for task in tasks) for run in seeds]
            return spread(means, digits)
        wugs = 'wug_adj_nominalization', 'wug_past_tense'
        yield join(name, len(seeds), cell('blimp_filtered'), cell('supplement_filtered'),
                   cell('blimp_filtered', 'supplement_filtered'), cell('entity_tracking'),
                   *(cell(task, digits=2) for task in wugs), cell(*wugs, scale=100),
                   cell('eye tracking', digits=2), cell('self-paced reading', digits=2))
        both, entity, wug, reading = paper
        yield join(f'{name}, the paper', 1, '', '', both, entity, '', '', wug,
                   f'{reading} (mean)', '')


def moep_entities():
    yield ('run | Entity Tracking | right where the answer is "nothing." | '
           'right where it is something')
    for row in read('babylm2025'):
        cells = [f'{row[key]:.1f}' if key in row else '-'
                 for key in ('entity_tracking', 'nothing', 'something')]
        name = row['run']
        yield join(f'`{name}`' if '_' in name else f'always the {name}', *cells)


def moep_words():
    curves = {}
    for kind, seeds in finished('moep').items():
        some = [run['blimp'].get('babylm2025 fast') for run in seeds]
        if any(some):
            curves[kind] = [curve for curve in some if curve]

    def nearest(curve, words):
        return min(curve, key=lambda point: abs(point[0] - words))[1]

    yield join('words', *(f"{KINDS['moep'][kind]}, seeds: {len(seeds)}"
                          for kind, seeds in curves.items()))
    for million in (1, 2, 3, 5, 7, 10, 20, 30, 40, 60, 80, 100):
        yield join(f'{million}M', *(spread([nearest(curve, 1e6 * million) for curve in seeds], 1)
                                    for seeds in curves.values()))


def moep_routes():
    steps = (2000, 6000, 10000, 18303)

    def cell(evaluation):
        if evaluation is None:
            return '-'
        loss = f"{evaluation['val']['babylm']['loss']:.3f}"
        return f'{loss}, {unused_cell(evaluation)}' if 'unused' in evaluation else loss

    yield join('model and balance loss', 'seed',
               *(f'step {step:,}: val loss, unused' for step in steps))
    for kind, seeds in runs('moep').items():
        for run in seeds:
            at = {e['iter']: e for e in run['evaluations']}
            yield join(KINDS['moep'][kind], run['seed'], *(cell(at.get(step)) for step in steps))


def glue():
    tuned = {(row['run'], row['task']): row for row in read('glue')}
    metrics = dict(cola='Matthews', mrpc='F1')
    yield ('task, metric | train, valid | majority | GPT-2 | MoEP | '
           'minutes per seed, GPT-2 | MoEP')
    for task, name in GLUE.items():
        metric = metrics.get(task, 'accuracy')
        gpt2, moep = [tuned[run, task] for run in ('gpt2_42', 'moep_42')]
        scores, times = [], []
        for row in (gpt2, moep):
            minutes = [seed['minutes'] for seed in row['seeds'].values()]
            scores.append(spread([seed[metric] for seed in row['seeds'].values()], 2))
            times.append(f'{min(minutes):.1f} to {max(minutes):.1f}')
        yield join(f'{name}, {metric}', f"{gpt2['train']:,}, {gpt2['valid']:,}",
                   f"{gpt2['majority'][metric]:.2f}", *scores, *times)


# ---- PaPaformer ---------------------------------------------------------------------------------


def last_step(seeds):
    return f"{seeds[0]['evaluations'][-1]['iter']:,}"


def path_fits(seeds):
    """The share of prompts that use the path of their domain, where papers.path_usage was run."""
    if 'usage' not in seeds[0]:
        return ''
    return spread([100 * run['usage']['accuracy'] for run in seeds], 0) + '%'


def papaformer_glue():
    """Fine-tuned models of the second phase, over all seeds of all models of a kind."""
    columns = (('wsc', 'accuracy'), ('rte', 'accuracy'), ('mrpc', 'F1'), ('mrpc', 'accuracy'),
               ('cola', 'Matthews'))
    rows = read('glue')

    def tuned(kind, task):
        return [row for row in rows if row['run'].startswith(f'p2-{kind}_') and row['task'] == task]

    header = []
    for task, metric in columns:
        majority = tuned('llama256', task)[0]['majority'][metric]
        header.append(f'{GLUE[task]}, {metric}; majority {majority:.1f}')
    yield join('model', *header)
    for kind in ('llama256', 'llama192', 'share-intended', 'gumbel1-intended', 'gumbel2-intended'):
        scores = []
        for task, metric in columns:
            seeds = [seed for row in tuned(kind, task) for seed in row['seeds'].values()]
            scores.append(spread([seed[metric] for seed in seeds], 1))
        yield join(PAPAFORMER[kind.removesuffix('-intended')], *scores)


def papaformer_time():
    """Time of the second phase at measured speeds: hours on two cores, seconds on a GPU.
    In brackets: relative to LLaMA_256."""
    tokens = {}                                          # read in the second phase
    for kind, seeds in runs('papaformer', 'both-').items():
        tokens[kind.removeprefix('both-')] = 8192 * seeds[0]['evaluations'][-1]['iter']
    rows = read('papaformer_time')
    speed = {(row['machine'], row['name'].replace('_', '')): row['tokens_per_s'] for row in rows}
    both_paths = sum(row['tokens_per_s'] for row in rows if 'beside' in row['name'])

    def time(kind, machine):
        # both paths have the same shape, so path 1's speed serves for both
        rate = speed[machine, 'path1' if kind == 'path2' else kind]
        return tokens[kind] / rate / (3600 if machine == 'cpu' else 1)

    def cell(kind, machine, join_paths=None):
        """join_paths: from the times of path 1 and path 2, each alone, the time of both"""
        total = time(kind, machine)
        text = f'{total:.1f}'
        if join_paths:
            first = join_paths(time('path1', machine), time('path2', machine))
            text = f'{first:.1f} + {total:.1f} = {first + total:.1f}'
            total += first
        return f"{text} ({100 * total / time('llama256', machine):.0f}%)"

    def same_gpu(one, two):
        """At the speed of both together until the shorter one ends, then the other alone."""
        return 2 * min(tokens['path1'], tokens['path2']) / both_paths + abs(one - two)

    yield ('model | two cores: paths + composed, hours | '
           'one H200: paths + composed, seconds | the paper, hours')
    for kind, paper in (('llama256', '12.5 (100%)'), ('llama192', '11.0 (88%)')):
        yield join(PAPAFORMER[kind], cell(kind, 'cpu'), cell(kind, 'gpu'), paper)
    ways = (('paths one after the other', lambda one, two: one + two, '9.35 (75%)'),
            ('paths at once, each on its own', max, '7.85 (63%)'))
    for kind in ('share', 'gumbel1', 'gumbel2'):
        for how, join_paths, paper in ways:
            times = [cell(kind, machine, join_paths) for machine in ('cpu', 'gpu')]
            yield join(f'{PAPAFORMER[kind]}, {how}', *times, paper)
        yield (f'{PAPAFORMER[kind]}, paths at once on the same GPU | | '
               f"{cell(kind, 'gpu', same_gpu)} | ")


# ---- Self-MoE and Super Tiny models -------------------------------------------------------------


def gates(corpus):
    """{run: its seeds}"""
    return group([row for row in read('selfmoe') if row['corpus'] == corpus], 'run')


def changes(seeds, others, digits):
    pairs = zip(seeds, others, strict=True)
    return ', '.join(f"{run['loss'] - other['loss']:+.{digits}f}" for run, other in pairs)


def selfmoe():
    kinds = gates('real')
    yield ('fine-tuned with | val loss | difference to no gates, seed by seed | '
           'answers right of 584, by seed')
    for name, seeds in kinds.items():
        if name != 'base':
            losses = spread([run['loss'] for run in seeds], 3)
            difference = '' if name == 'none' else changes(seeds, kinds['none'], 3)
            right = ', '.join(str(run['right']) for run in seeds)
            yield join(name.replace('none', 'no gates'), losses, difference, right)


def selfmoe_improves():
    """The selection on training text, and the one on the validation set."""
    on_train, on_val = gates('real, selected on training text'), gates('real')
    yield ('gates | val loss | after `improves` | change, seed by seed | kept of 7, by seed | '
           'earlier, selected on the validation set: change, seed by seed')
    for kind in ('matrix', 'vector', 'scalar'):
        before, after = on_train[kind], on_train[f'{kind}, improves']
        losses = [spread([run['loss'] for run in seeds], 3) for seeds in (before, after)]
        kept = ', '.join(str(sum(gate['kept'] for gate in run['gates'])) for run in after)
        yield join(kind, *losses, changes(after, before, 4), kept,
                   changes(on_val[f'{kind}, improves'], on_val[kind], 4))


# layers with attention over all tokens; a routed one sees 1/8 of them: (1/8)^2 of the products
ATTENTION_LAYERS = {'depth-dense6': 6, 'depth': 5 + 5 / 64, 'depth-18': 9 + 9 / 64}


def flops(seeds):
    """Training FLOPs per token, in millions: 6 per active parameter, and attention over 512 tokens
    of width 512, at their mean position, in each layer."""
    kind = seeds[0]['run']
    if kind.startswith(('bytes', 'one')):                # docs/stlm.md says how they are counted
        return '272M' if kind.startswith('bytes') else '267M'
    layers = ATTENTION_LAYERS.get(kind, 10)
    count = f"{(6 * seeds[0]['active'] + 6 * layers * 512 * 512) / 1e6:.0f}M"
    return f'{count} and 154M for one more head' if kind == 'exit' else count


def rate(seeds):
    """Tokens or chunks per second in training, alone on the GPU."""
    tokens = seeds[0].get('tokens_per_s_alone')
    return f'{tokens / 1e3:.0f}K' if tokens else '-'


def last_val(key):
    """A column for runs on one data set each."""
    def cell(seeds):
        return val(*seeds[0]['evaluations'][-1]['val'], key)(seeds)
    return cell


def stlm_exits():
    early, plain, *_ = read('stlm_exits')
    yield 'layers | bits per byte if the model ends here: `exit.py` | plain'
    for one, two in zip(early['exits'], plain['exits']):
        yield join(one['layers'], f"{one['bits_per_byte']:.3f}", f"{two['bits_per_byte']:.3f}")


def stlm_drafts():
    early, plain, *_ = read('stlm_exits')
    yield ('layers that draft 4 tokens | drafts kept: `exit.py` | plain | tokens/s: `exit.py` | '
           'plain | same text')
    for pair in zip(early['drafts'], plain['drafts']):
        kept = ['-' if run['kept'] is None else f"{100 * run['kept']:.0f}%" for run in pair]
        speeds = [f"{run['tokens_per_s']:.0f}" for run in pair]
        yield join(pair[0]['layers'], *kept, *speeds, f"{sum(run['same'] for run in pair)} of 10")


def bits(choose):
    """A column: one of the bits per byte of a whole run."""
    def cell(seeds):
        return spread([choose([e['val']['simplewiki']['bits_per_byte'] for e in run['evaluations']])
                       for run in seeds], 3)
    return cell


def right_answers(seeds):
    return ', '.join(str(run['answers']['right']) for run in seeds)


# ---- ModuleFormer -------------------------------------------------------------------------------


def moduleformer_base():
    columns = {
        'parameters, active': size,
        'seeds': len,
        'val loss': val('babylm'),
        'bits per byte': val('babylm', 'bits_per_byte'),
        'BLiMP': blimp(),
        'training loss, mean of ten of the last 300 steps':
            lambda seeds: spread([run['last_losses'] for run in seeds], 2)}
    kinds = runs('moduleformer', 'base') | runs('moduleformer', 'ibm')
    return by_kind('moduleformer', 'model', columns, kinds=kinds)


def methods(how):
    """The ways to learn math, jointly or alone: before, and after with the change."""
    kinds = runs('moduleformer', how)
    names = KINDS['moduleformer']
    sets = ('babylm', 'openmath_babylm')

    def loss(kind, data, at):
        return statistics.mean(run['evaluations'][at]['val'][data]['loss'] for run in kinds[kind])

    yield 'method | trained | old text, val loss | math, val loss | BLiMP'
    for kind, base in ((f'{how}-full', 'base'), (f'{how}-dense', 'base-dense')):
        trained_on = [run['seed'] for run in kinds[kind]]
        started = [run for run in runs('moduleformer')[base] if run['seed'] in trained_on]
        before = [val(data, at=0)(kinds[kind]) for data in sets]
        yield f'before, {names[base]} | | {join(*before, blimp()(started))}'
    for kind, seeds in kinds.items():
        start = f'{how}-full' if 'ModuleFormer' in names[kind] else f'{how}-dense'
        cells = []
        for data in sets:
            change = loss(kind, data, -1) - loss(start, data, 0)
            cells.append(f'{val(data)(seeds)} ({change:+.2f})')
        yield join(names[kind], millions(seeds[0]['trained'], 2), *cells, blimp()(seeds))


def moduleformer_prune():
    kinds = runs('moduleformer', 'math')
    yield join('threshold',
               *(f"{KINDS['moduleformer'][kind]}: modules left, loss" for kind in kinds))
    first = next(iter(kinds.values()))[0]['prune']['rows']
    for i, threshold in enumerate(row['threshold'] for row in first):
        if threshold in (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1):
            cells = []
            for seeds in kinds.values():
                pruned = [run['prune']['rows'][i] for run in seeds]
                left = spread([100 * row['modules'] for row in pruned], 0)
                cells.append(f"{left}%, {spread([row['loss'] for row in pruned], 3)}")
            yield join(f'{threshold:g}', *cells)


def modules(run):
    return run['evaluations'][0]['unused'][1]            # used or not


def moduleformer_first():
    yield ('threshold | modules left, by seed | parameters, by seed | '
           'val loss, the whole validation set')
    loss = val('openmath_babylm')
    seeds = runs('moduleformer')['math0.0']
    yield join('not pruned', '100%', millions(seeds[0]['parameters']), loss(seeds))
    all_modules = modules(seeds[0])
    for kind, seeds in runs('moduleformer', 'first').items():
        left = ', '.join(f'{modules(run) / all_modules:.0%}' for run in seeds)
        sizes = ', '.join(millions(run['parameters']) for run in seeds)
        yield join(KINDS['moduleformer'][kind], left, sizes, loss(seeds))


def moduleformer_memory():
    yield ('trained with a memory of | each segment sees | its first 64 tokens | its second 64 | '
           'the other 384 | all')
    names = {'0': 'nothing before it', 'whole': 'all before it, read in one pass'}
    for row in read('moduleformer_memory'):
        memory, losses = row['memory'], row['by_64_tokens']
        name = names[memory] if memory in names else f'{int(memory):,} tokens of memory'
        parts = [losses[:1], losses[1:2], losses[2:], losses]
        yield join(row['trained'] or 'nothing', name,
                   *(f'{statistics.mean(part):.3f}' for part in parts))


MOLM = {                         # name, and the paper's ms, GB and tokens/s on an A100
    '410M': ('dense 410M', 554, 25, 59594),
    'molm_4b_k2': ('MoLM-4B-K2', 497, 27, 71017),
    '1.4B': ('dense 1.4B', 918, 42, 35559),
    'molm_4b_k4': ('MoLM-4B-K4', 863, 27, 39931),
    'molm_8b_k2': ('MoLM-8B-K2', 939, 38, 37419),
    '2.8B': ('dense 2.8B', 2111, 70, 15522)}


def molm():
    yield ('model | parameters, active | ms, not compiled | ms, compiled | tokens/s, compiled | '
           'GiB | the paper, A100: ms | tokens/s | GB')
    rows = {row['name']: row for row in read('molm')}
    for name, (label, ms, gb, speed) in MOLM.items():
        row = rows[name]
        yield join(label, f"{millions(row['total'], 0)}, {millions(row['active'], 0)}",
                   f"{row['ms']:.0f}", f"{row['compiled_ms']:.0f}", f"{row['tokens_per_s']:,.0f}",
                   f"{row['gib']:.1f}", ms, f'{speed:,}', gb)


# ---- Tables and pages ---------------------------------------------------------------------------


def arena(track, key):
    return map(' | '.join, leaderboard.table(track, key, RESULTS))


TABLES = dict(
    data=data,
    headline=headline,
    moep=lambda: by_kind('moep', 'model and balance loss', {
        'seeds': len,
        'val loss': val('babylm'),
        'bits per byte': val('babylm', 'bits_per_byte'),
        'BLiMP, `harness`': blimp(),
        'BLiMP, `babylm2025`': blimp('babylm2025'),
        'choices that go unused': unused}, kinds=finished('moep')),
    moep_controls=moep_controls,
    moep_tasks=moep_tasks,
    moep_entities=moep_entities,
    moep_words=moep_words,
    moep_routes=moep_routes,
    glue=glue,
    papaformer_stories=lambda: by_kind('papaformer', 'model', {
        'parameters': lambda seeds: millions(seeds[0]['parameters']),
        'val loss': val('tinystories'),
        'bits per byte': val('tinystories', 'bits_per_byte'),
        'BLiMP': blimp()}, 'stories-'),
    papaformer_both=lambda: by_kind('papaformer', 'model', {
        'steps': last_step,
        'stories, val loss': val('tinystories_neox'),
        'math, val loss': val('openmath_neox'),
        'BLiMP': blimp(),
        'prompts whose path fits their domain': path_fits}, 'both-'),
    papaformer=lambda: by_kind('papaformer', 'run', {    # the shorter second phase
        'steps': last_step,
        'stories, val loss': val('tinystories_neox'),
        'math, val loss': val('openmath_neox')}, 'short-'),
    papaformer_glue=papaformer_glue,
    papaformer_time=papaformer_time,
    selfmoe=selfmoe,
    selfmoe_improves=selfmoe_improves,
    stlm=lambda: by_kind('stlm', 'config', {
        'parameters, active': size,
        'FLOPs per token or chunk': flops,
        'tokens or chunks/s': rate,
        'seeds': len,
        'bits per byte': last_val('bits_per_byte'),
        'val loss per token or symbol': last_val('loss')}),
    stlm_depth=lambda: by_kind('stlm_depth', 'model', {
        'parameters, active': size,
        'FLOPs per token, training': flops,
        'tokens/s': rate,
        'seeds': len,
        'bits per byte': last_val('bits_per_byte'),
        'val loss': last_val('loss')}),
    stlm_exits=stlm_exits,
    stlm_drafts=stlm_drafts,
    stlm_dropout=lambda: by_kind('stlm_dropout', 'schedule', {
        'seeds': len,
        'bits per byte, lowest': bits(min),
        'at the end': bits(lambda curve: curve[-1])}),
    stlm_math=lambda: by_kind('stlm_math', 'config', {
        'parameters': lambda seeds: millions(seeds[0]['parameters'], 2),
        'seeds': len,
        'bits per byte': last_val('bits_per_byte'),
        'exact answers, of 589, each seed': right_answers}),
    moduleformer_base=moduleformer_base,
    moduleformer_joint=lambda: methods('joint'),
    moduleformer_life=lambda: methods('life'),
    moduleformer_prune=moduleformer_prune,
    moduleformer_first=moduleformer_first,
    moduleformer_memory=moduleformer_memory,
    molm=molm,
    arena_toy_parameters=lambda: arena('toy', 'parameters'),
    arena_toy_flops=lambda: arena('toy', 'flops_per_token'),
    arena_baby_parameters=lambda: arena('baby', 'parameters'),
    arena_baby_flops=lambda: arena('baby', 'flops_per_token'))


def fill(text):
    """The text with every marked table rebuilt."""
    def table(match):
        rows = [f'| {line} |' for line in TABLES[match[1]]()]
        rows.insert(1, '|' + '---|' * (rows[0].count('|') - 1))
        return f'<!-- {match[1]} -->\n' + '\n'.join(rows) + '\n<!-- end -->'
    return re.sub(r'<!-- (\w+) -->\n.*?<!-- end -->', table, text, flags=re.DOTALL)


def main():
    check = '--check' in sys.argv
    stale = False
    for path in [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]:
        text = path.read_text(encoding='utf-8')
        rebuilt = fill(text)
        if rebuilt != text:
            stale = True
            print(path.name, 'differs from papers/results' if check else 'rebuilt')
            if not check:
                path.write_text(rebuilt, encoding='utf-8')
    sys.exit(check and stale)


if __name__ == '__main__':
    main()
