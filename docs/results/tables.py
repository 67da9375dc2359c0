"""
Rebuilds tables of README.md and docs/*.md from the files beside this one: python docs/results/tables.py (--check: only says what would change).
The table NAME stands between <!-- NAME --> and <!-- end -->, and is made by the function NAME.
"""

import json
import re
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
AUX = {'': '', '-printed': ', aux losses as printed', '-released': ', aux losses as released'}
KINDS = dict(                                                # what the files of a folder are called, in the order of the tables
    moep=dict(gpt2='GPT-2', moep='MoEP, `switch`', entropy='MoEP, `entropy`', printed='MoEP, `printed`', none='MoEP, no balance loss',
              swiglu='MoEP-SwiGLU, `switch`'),
    papaformer={f'{phase}-{kind}{aux}': name + text for phase in ('stories', 'both')
                for kind, name in dict(path1='Path_1', path2='Path_2', llama256='LLaMA_256', llama192='LLaMA_192', share='Share_Linear',
                                       gumbel1='Gumb_MoE_1', gumbel2='Gumb_MoE_2').items() for aux, text in AUX.items()},
    moduleformer={'base': 'ModuleFormer', 'base-dense': 'dense',
                  'joint-full': 'ModuleFormer, fully tuned', 'joint-insert': 'ModuleFormer, inserted',
                  'joint-dense': 'dense, fully tuned', 'joint-lora': 'dense, LoRA 32, embedding and head',
                  'life-full': 'ModuleFormer, fully tuned',
                  **{f'life-insert{w}': f'ModuleFormer, inserted, `rout_reg` {w:g}' for w in (0.0, 0.25, 0.5, 1.0)},
                  'life-dense': 'dense, fully tuned', 'life-lora8': 'dense, LoRA 8', 'life-lora32': 'dense, LoRA 32',
                  **{f'math{w}': f'concentration {w:g}' for w in (0.0, 0.001, 0.01)}},
    stlm={name.replace('_', '-'): f'`{name}.py`' for name in (
        'baseline', 'shared_ffn', 'shared_ffn_lora', 'shared_all', 'bytes_causal', 'bytes_parallel')})
GLUE = dict(sst2='SST-2', cola='CoLA', mrpc='MRPC', rte='RTE', wsc='WSC')
SEEDS = (42, 1, 2)                                           # in this order everywhere


def runs(folder):
    """{kind: {seed: run}} of files named kind_seed.json."""
    found = {path.stem: json.loads(path.read_text()) for path in (HERE / folder).glob('*.json')}
    by_kind = {kind: {seed: found.pop(f'{kind}_{seed}') for seed in SEEDS if f'{kind}_{seed}' in found} for kind in KINDS[folder]}
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


def full_blimp(some, mode='harness'):
    """Of all seeds, at the end."""
    return spread([list(scores.values())[-1] for run in some if (scores := blimp(run, mode, 'full'))], 1)


def val(some, data, key='loss', at=-1):
    """Of all seeds, at an evaluation, the last if not said otherwise."""
    return spread([run['evaluations'][at]['val'][data][key] if data in run['evaluations'][at]['val'] else None for run in some], 3)


def idle(evaluation):
    """How many of all choices (blocks and experts, of all layers) got less than 1% of their layer's slots; and of how many."""
    shares = [share for layer in evaluation['routes'].values() for share in layer]
    return sum(share < 0.01 for share in shares), len(shares)


def data():
    found = json.loads((HERE / 'data.json').read_text())
    yield 'set | made by | training: tokens or symbols, words, documents | validation'
    for row in found:
        cells = [f"{row[split]['tokens'] / 1e6:.2f}M, {row[split]['words'] / 1e6:.2f}M, {row[split]['documents']:,}" for split in ('train', 'val')]
        yield f"{row['name']} | `{row['command']}` | " + ' | '.join(cells)


def moep():
    yield 'model and balance loss | seeds | val loss | bits per byte | BLiMP, `harness` | BLiMP, `babylm2025` | choices that go unused'
    for kind, some in finished(runs('moep')).items():
        last = [run['evaluations'][-1] for run in some]
        unused = ', '.join('{} of {}'.format(*idle(e)) for e in last) if last[0]['routes'] else ''
        yield (f"{KINDS['moep'][kind]} | {len(some)} | {val(some, 'babylm')} | {val(some, 'babylm', 'bits_per_byte')} | "
               f"{full_blimp(some)} | {full_blimp(some, 'babylm2025')} | {unused}")


def headline():
    tuned = json.loads((HERE / 'glue.json').read_text())
    yield ' | seeds | val loss | BLiMP, `harness` | SST-2, LoRA, five seeds of it'
    for kind, name in dict(gpt2='gpt2', moep='moep', swiglu='moep_swiglu').items():
        some = finished(runs('moep'))[kind]
        accuracy = [seed['accuracy'] for seed in tuned.get(f'{kind}_42', {}).get('sst2', {}).get('seeds', {}).values()]
        yield f"`python train.py config/paper/{name}.py` | {len(some)} | {val(some, 'babylm')} | {full_blimp(some)} | {spread(accuracy, 1)}"


def moep_words():
    curves = {kind: [c for run in some if (c := blimp(run, 'babylm2025', 'fast'))] for kind, some in finished(runs('moep')).items()}
    curves = {kind: some for kind, some in curves.items() if some}
    yield 'words | ' + ' | '.join(f"{KINDS['moep'][kind]}, seeds: {len(some)}" for kind, some in curves.items())
    for million in (1, 2, 3, 5, 7, 10, 20, 30, 40, 60, 80, 100):
        near = lambda curve: min(curve.items(), key=lambda point: abs(point[0] - 1e6 * million))[1]
        yield f'{million}M | ' + ' | '.join(spread([near(curve) for curve in some], 1) for some in curves.values())


def moep_routes():
    steps = (2000, 6000, 10000, 18303)
    yield 'model and balance loss | seed | ' + ' | '.join(f'step {step:,}: val loss, unused' for step in steps)
    for kind, some in runs('moep').items():
        for seed, run in some.items():
            at = {e['iter']: e for e in run['evaluations']}
            cells = [f"{at[step]['val']['babylm']['loss']:.3f}" + (', {} of {}'.format(*idle(at[step])) if at[step]['routes'] else '')
                     if step in at else '-' for step in steps]
            yield f"{KINDS['moep'][kind]} | {seed} | " + ' | '.join(cells)


def papaformer_stories():
    yield 'model | parameters | val loss | bits per byte | BLiMP'
    for kind, some in runs('papaformer').items():
        if kind.startswith('stories-'):
            some = list(some.values())
            yield (f"{KINDS['papaformer'][kind]} | {some[0]['parameters'] / 1e6:.1f}M | {val(some, 'tinystories')} | "
                   f"{val(some, 'tinystories', 'bits_per_byte')} | {full_blimp(some)}")


def papaformer_both():
    yield 'model | steps | stories, val loss | math, val loss | BLiMP | prompts whose path fits their domain'
    for kind, some in runs('papaformer').items():
        if kind.startswith('both-'):
            some = list(some.values())
            fits = spread([100 * run['usage']['accuracy'] for run in some], 0) + '%' if 'usage' in some[0] else ''
            yield (f"{KINDS['papaformer'][kind]} | {some[0]['evaluations'][-1]['iter']:,} | {val(some, 'tinystories_neox')} | "
                   f"{val(some, 'openmath_neox')} | {full_blimp(some)} | {fits}")


def papaformer_glue():
    """Every fine-tuning of the second phase's models: all seeds of all models of a kind."""
    found = json.loads((HERE / 'glue_papaformer.json').read_text())
    columns = [('wsc', 'accuracy'), ('rte', 'accuracy'), ('mrpc', 'F1'), ('mrpc', 'accuracy'), ('cola', 'Matthews')]
    of = lambda kind, task: [tasks[task] for run, tasks in found.items() if run.startswith(f'p2-{kind}_') and task in tasks]
    yield 'model | ' + ' | '.join(f"{GLUE[task]}, {metric}; majority {of('llama256', task)[0]['majority'][metric]:.1f}" for task, metric in columns)
    for kind in ('llama256', 'llama192', 'share-intended', 'gumbel1-intended', 'gumbel2-intended'):
        scores = [spread([seed[metric] for run in of(kind, task) for seed in run['seeds'].values()], 1) for task, metric in columns]
        yield f"{KINDS['papaformer']['both-' + kind.removesuffix('-intended')]} | " + ' | '.join(scores)


def papaformer_time():
    """The second phase's steps at measured rates: hours on two cores, seconds on a GPU; in brackets against LLaMA_256."""
    found = json.loads((HERE / 'papaformer_time.json').read_text())
    steps = {kind.removeprefix('both-'): next(iter(some.values()))['evaluations'][-1]['iter'] for kind, some in runs('papaformer').items()}
    rates = {key: {row['name'].replace('_', ''): row['tokens_per_s'] for row in bench['rows']} for key, bench in found.items()}
    beside = sum(row['tokens_per_s'] for row in found['gpu']['rows'] if 'beside' in row['name'])     # of two paths together

    def cell(kind, key, stage_1):
        """stage_1: how long the paths take, from how long each takes alone."""
        unit = 3600 if key == 'cpu' else 1
        time = lambda model, like: 8192 * steps[model] / rates[key][like] / unit
        second, whole = time(kind, kind), time('llama256', 'llama256')
        first = stage_1(time('path1', 'path1'), time('path2', 'path1')) if stage_1 else 0            # paths have one shape
        return (f'{first:.1f} + {second:.1f} = ' if stage_1 else '') + f'{first + second:.1f} ({100 * (first + second) / whole:.0f}%)'

    def together(one, two):
        """Both paths on one GPU: at their common rate until the shorter ends, then the other alone."""
        return 2 * 8192 * min(steps['path1'], steps['path2']) / beside + abs(one - two)

    yield 'model | two cores: paths + composed, hours | one H200: paths + composed, seconds | the paper, hours'
    for kind, paper in (('llama256', '12.5 (100%)'), ('llama192', '11.0 (88%)')):
        yield f"{KINDS['papaformer'][f'both-{kind}']} | {cell(kind, 'cpu', None)} | {cell(kind, 'gpu', None)} | {paper}"
    for kind in ('share', 'gumbel1', 'gumbel2'):
        name = KINDS['papaformer'][f'both-{kind}']
        for how, stage_1, paper in (('paths one after the other', lambda *times: sum(times), '9.35 (75%)'),
                                    ('paths at once, each on its own', max, '7.85 (63%)')):
            yield f"{name}, {how} | {cell(kind, 'cpu', stage_1)} | {cell(kind, 'gpu', stage_1)} | {paper}"
        yield f"{name}, paths at once on the same GPU | | {cell(kind, 'gpu', together)} | "


def papaformer():
    found = json.loads((HERE / 'papaformer.json').read_text())['real']
    yield 'run | steps | stories, val loss | math, val loss | prompts whose path fits their domain'
    for name, seeds in found.items():
        last = [[seed['loss'][data][-1] if data in seed['loss'] else None for seed in seeds.values()]
                for data in ('tinystories_neox', 'openmath_neox')]
        fits = spread([100 * seed['usage']['accuracy'] for seed in seeds.values()], 0) + '%' if 'usage' in next(iter(seeds.values())) else ''
        yield f"{name} | {next(iter(seeds.values()))['steps'][-1]:,} | {spread(last[0], 3)} | {spread(last[1], 3)} | {fits}"


def moduleformer_base():
    yield 'model | parameters, active | seeds | val loss | bits per byte | BLiMP | training loss, mean of ten of the last 300 steps'
    for kind, some in runs('moduleformer').items():
        if kind.startswith('base'):
            some = list(some.values())
            fit = [statistics.mean(step['loss'] for step in run['steps'] if step['iter'] > run['steps'][-1]['iter'] - 300) for run in some]
            size = f"{some[0]['parameters'] / 1e6:.1f}M, {some[0]['active'] / 1e6:.1f}M"
            yield (f"{KINDS['moduleformer'][kind]} | {size} | {len(some)} | {val(some, 'babylm')} | "
                   f"{val(some, 'babylm', 'bits_per_byte')} | {full_blimp(some)} | {spread(fit, 2)}")


def methods(how):
    """The rows of a way to learn math: before, and after with the change."""
    found = {kind: list(some.values()) for kind, some in runs('moduleformer').items()}
    loss = lambda kind, data, at: statistics.mean(run['evaluations'][at]['val'][data]['loss'] for run in found[kind])
    sets = ('babylm', 'openmath_babylm')
    yield 'method | trained | old text, val loss | math, val loss | BLiMP'
    for kind, base in ((f'{how}-full', 'base'), (f'{how}-dense', 'base-dense')):
        first = [runs('moduleformer')[base][seed] for seed in runs('moduleformer')[kind]]      # of the seeds that went on
        yield f"before, {KINDS['moduleformer'][base]} | | " + ' | '.join(val(found[kind], data, at=0) for data in sets) + f' | {full_blimp(first)}'
    for kind, some in found.items():
        if kind.startswith(how):
            name = KINDS['moduleformer'][kind]
            start = f"{how}-{'full' if 'ModuleFormer' in name else 'dense'}"
            cells = [f'{val(some, data)} ({loss(kind, data, -1) - loss(start, data, 0):+.2f})' for data in sets]
            yield f"{name} | {some[0]['trained'] / 1e6:.2f}M | " + ' | '.join(cells) + f' | {full_blimp(some)}'


def moduleformer_joint():
    return methods('joint')


def moduleformer_life():
    return methods('life')


def moduleformer_prune():
    found = {kind: list(some.values()) for kind, some in runs('moduleformer').items() if kind.startswith('math')}
    yield 'threshold | ' + ' | '.join(f"{KINDS['moduleformer'][kind]}: modules left, loss" for kind in found)
    for i, row in enumerate(next(iter(found.values()))[0]['prune']['rows']):
        if row['threshold'] in (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1):
            at = {kind: [run['prune']['rows'][i] for run in some] for kind, some in found.items()}
            yield f"{row['threshold']:g} | " + ' | '.join(
                f"{spread([100 * r['modules'] for r in rows], 0)}%, {spread([r['loss'] for r in rows], 3)}" for rows in at.values())


def selfmoe():
    found = json.loads((HERE / 'selfmoe.json').read_text())['real']
    yield 'fine-tuned with | val loss | difference to no gates, seed by seed | answers right of 584, by seed'
    for name, seeds in found.items():
        if name != 'base':
            less = [seed['loss'] - found['none'][key]['loss'] for key, seed in seeds.items()]
            yield (f"{name.replace('none', 'no gates')} | {spread([seed['loss'] for seed in seeds.values()], 3)} | "
                   f"{'' if name == 'none' else ', '.join(f'{d:+.3f}' for d in less)} | {', '.join(str(seed['right']) for seed in seeds.values())}")


def stlm():
    yield 'config | parameters, active | seeds | bits per byte | val loss per token or symbol'
    for kind, some in runs('stlm').items():
        some = list(some.values())
        data = 'simplewiki_chunks' if 'bytes' in kind else 'simplewiki'
        yield (f"{KINDS['stlm'][kind]} | {some[0]['parameters'] / 1e6:.1f}M, {some[0]['active'] / 1e6:.1f}M | {len(some)} | "
               f"{val(some, data, 'bits_per_byte')} | {val(some, data)}")


def again():
    """Runs repeated from their printed command, at the last step that both have evaluated."""
    yield 'command | step | val loss | again | difference | BLiMP | again'
    for folder, kind, seed, data in (('papaformer', 'stories-llama192', 42, 'tinystories'), ('moep', 'printed', 42, 'babylm'),
                                     ('stlm', 'baseline', 42, 'simplewiki'), ('moduleformer', 'base-dense', 1, 'babylm')):
        both = [runs(folder)[kind][seed], json.loads((HERE / 'again' / f'{kind}_{seed}.json').read_text())]
        losses = [{e['iter']: e['val'][data]['loss'] for e in run['evaluations']} for run in both]
        step = max(losses[0].keys() & losses[1].keys())
        first, second = losses[0][step], losses[1][step]
        scores = ' | '.join(full_blimp([run]) if run['evaluations'][-1]['iter'] == step else '-' for run in both)
        yield f"`{both[0]['command']}` | {step:,} | {first:.4f} | {second:.4f} | {second - first:+.4f} | {scores}"


def glue():
    found, metric = json.loads((HERE / 'glue.json').read_text()), dict(cola='Matthews', mrpc='F1')
    yield 'task, metric | train, valid | majority | GPT-2 | MoEP | minutes per seed, GPT-2 | MoEP'
    for task, name in GLUE.items():
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
    texts = {path: path.read_text(encoding='utf-8') for path in [HERE.parents[1] / 'README.md', *sorted(HERE.parent.glob('*.md'))]}
    stale = [path for path, text in texts.items() if fill(text) != text]
    for path in stale:
        if '--check' not in sys.argv:
            path.write_text(fill(texts[path]), encoding='utf-8')
        print(path.name, 'differs from docs/results' if '--check' in sys.argv else 'rebuilt')
    sys.exit('--check' in sys.argv and bool(stale))
