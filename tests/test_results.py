"""README.md and docs/: lines, links, commands and tables; docs/results/: what is kept of a run."""

import inspect
import json
import re
import sys
from collections import Counter
from dataclasses import fields

import pytest

from conftest import ROOT
from plumbing.models import import_model
from plumbing.settings import Settings
from test_style import MODELS

sys.path.insert(0, str(ROOT / 'docs' / 'results'))
import keep
import tables

PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
each_page = pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)


# ---- Pages --------------------------------------------------------------------------------------


def split_page(page):
    """-> [(number, line)] of the prose, and [(language, code)] of what stands between ``` and ```."""
    prose, blocks = [], []
    inside = False
    for number, line in enumerate(page.read_text(encoding='utf-8').splitlines(), 1):
        if line.strip().startswith('```'):
            inside = not inside
            if inside:
                blocks.append((line.strip()[3:], []))
        elif inside:
            blocks[-1][1].append(line)
        else:
            prose.append((number, line))
    assert not inside, f'{page.name}: a ``` has no end'
    blocks = [(language, '\n'.join(lines)) for language, lines in blocks]
    return prose, blocks


def anchors(page):
    """What #... of a link can name: the headings as GitHub spells them."""
    found = []
    seen = Counter()
    for _, line in split_page(page)[0]:
        if line.startswith('#'):
            title = re.sub(r'\]\(.*?\)', '', line.lstrip('# ').lower())      # a link's text, not its target
            name = re.sub(r'[^\w -]', '', title).strip().replace(' ', '-')
            found.append(f'{name}-{seen[name]}' if seen[name] else name)
            seen[name] += 1
    return found


def commands(page):
    """[command] of all Python commands of a page, in blocks and in the text, without their comments."""
    prose, blocks = split_page(page)
    codes = re.findall('`([^`]+)`', '\n'.join(line for _, line in prose))
    codes = [code.replace('\n', ' ') for code in codes]
    codes += [line for _, line in prose if re.match(r' {4}(python|torchrun) ', line)]    # a block, too
    codes += [code for language, code in blocks if language != 'python']
    found = []
    for code in codes:
        for line in code.replace('\\\n', ' ').splitlines():
            for command in re.split(r'&&|[;|]', line.split(' # ')[0]):
                start = re.search(r'(?:^|[ /])(?:python3?|torchrun)\s+(.+)', command)
                if start:
                    found.append(start[1])
    return found


def script_of(command):
    """The file that a command runs, and its arguments; None for what is not this project's."""
    words = command.split()
    while words and words[0].startswith('--'):           # of torchrun
        words.pop(0)
    if words[:1] == ['-m']:
        name = words[1].replace('.', '/')
        file = f'{name}/__main__.py' if (ROOT / name).is_dir() else f'{name}.py'
        if name.split('/')[0] in ('pytest', 'venv', 'pip', 'lm_eval', 'evaluation_pipeline'):
            file = None
        return file, words[2:]
    return (None if words[0] == '-' else words[0]), words[1:]


def exists(path):
    """Whether there is such a file; * and words in capitals stand for anything, {a,b} for all of these."""
    several = re.fullmatch(r'(.*)\{(.*)\}(.*)', path)
    if several:
        before, names, after = several.groups()
        return all(exists(before + name + after) for name in names.split(','))
    return any(ROOT.glob(re.sub(r'\b[A-Z]+\b|\$\w+', '*', path)))


def options(script):
    """The names of the options that a script knows."""
    source = (ROOT / script).read_text(encoding='utf-8')
    names = set(re.findall(r"'--([\w-]+)'", source)) | {'help'}
    if script in ('train.py', 'tools/bench.py', 'tools/scale.py'):
        owners = [Settings, *(import_model(name).Config for name in MODELS)]
        names |= {field.name for owner in owners for field in fields(owner)}
    return names


def test_readme_is_short():
    count = len((ROOT / 'README.md').read_text(encoding='utf-8').splitlines())
    assert count <= 200, f'README.md has {count} lines'


@each_page
def test_no_line_of_prose_is_too_wide(page):
    wide = [f'{page.name}:{number}: {len(line)} columns' for number, line in split_page(page)[0]
            if len(line) > 115 and not line.lstrip().startswith('|')]
    assert not wide, '\n'.join(wide)


@each_page
def test_links_lead_somewhere(page):
    broken = []
    for number, line in split_page(page)[0]:
        for link in re.findall(r'\]\(([^)\s]+)\)', line):
            if '://' in link:
                continue
            path, _, anchor = link.partition('#')
            target = page.parent / path if path else page
            if not target.exists() or anchor and anchor not in anchors(target):
                broken.append(f'{page.name}:{number}: {link}')
    assert not broken, '\n'.join(broken)


@each_page
def test_commands_name_what_exists(page):
    """Scripts, modules, configs, and options. A config may also be made by a command of the page."""
    made = re.findall(r'> ?(config/\S+)', page.read_text(encoding='utf-8'))
    wrong = []
    for command in commands(page):
        script, args = script_of(command)
        if script is None:
            continue
        configs = [arg for arg in args if arg.startswith('config/') and arg not in made]
        missing = [path for path in [script, *configs] if not exists(path)]
        if not missing:
            given = re.findall(r'(?:^|[ "])--([\w-]+)', ' '.join(args))
            missing = [f'--{name}' for name in given if name not in options(script)]
        if missing:
            wrong.append(f"{page.name}: {', '.join(missing)} in: python {command}")
    assert not wrong, '\n'.join(wrong)


MISTAKES = f"""# A page: `x` & [y](z)
## Same
## Same

[right](page.md#same-1) [wrong](#no) [wrong](none.md)
{'x' * 116}
| {'x' * 200} |
```sh
python train.py config/no.py && python -m tools.no x    # python no.py
python train.py config/moep.py --n_block=2 \\
    --n_blok=3
{'y' * 200}
```
Run `python
sample.py out/moep --rotes`, `python -m pytest -q`, `python train.py config/NAME.py`.

    python none.py x
"""


@pytest.mark.parametrize('check, expected', [
    (test_no_line_of_prose_is_too_wide, ['page.md:6: 116 columns']),
    (test_links_lead_somewhere, ['page.md:1: z', 'page.md:5: #no', 'page.md:5: none.md']),
    (test_commands_name_what_exists, ['--rotes in', 'none.py in', 'config/no.py in', 'tools/no.py in',
                                      '--n_blok in'])])
def test_the_checks_find_mistakes(tmp_path, check, expected):
    """Every kind of mistake on one page, beside what is right."""
    page = tmp_path / 'page.md'
    page.write_text(MISTAKES)
    assert anchors(page) == ['a-page-x--y', 'same', 'same-1']
    with pytest.raises(AssertionError) as error:
        check(page)
    told = str(error.value).split('\nassert')[0].splitlines()
    assert len(told) == len(expected)
    assert all(text in line for text, line in zip(expected, told))


# ---- Tables -------------------------------------------------------------------------------------


@each_page
def test_tables_in_the_docs_are_those_of_the_kept_files(page):
    text = page.read_text(encoding='utf-8')
    assert tables.fill(text) == text, f'{page.name}: python docs/results/tables.py'


def test_results_has_its_tables():
    assert '<!-- moep -->' in (ROOT / 'docs' / 'results.md').read_text(encoding='utf-8')


def test_a_table_is_made_anew():
    filled = tables.fill('before\n<!-- glue -->\n| old |\n<!-- end -->\nafter')
    assert filled.startswith('before\n<!-- glue -->\n| task, metric |')
    assert filled.endswith('|\n<!-- end -->\nafter')
    assert '| old |' not in filled and '|---|---|---|---|---|---|---|' in filled


def test_spread():
    assert tables.spread([1.0, 2.0, 3.0], 1) == '2.0 ± 1.0'
    assert tables.spread([1.25], 1) == '1.2'
    assert tables.spread([None], 1) == '-'


def test_unused_choices():
    routes = dict(a=[0.5, 0.5, 0.0, 0.0], b=[0.009, 0.011, 0.5, 0.48])
    assert tables.idle(dict(routes=routes)) == (3, 8)


def test_seeds_and_runs_that_were_stopped(tmp_path, monkeypatch):
    """Seeds in one order; a run without BLiMP is in no table of ends, and one that was stopped has a dash."""
    (tmp_path / 'moep').mkdir()

    def point(step, loss):
        val = dict(babylm=dict(loss=loss, bits_per_byte=loss / 2))
        return dict(iter=step, words=5e3 * step, val=val, routes=dict(a=[1.0, 0.0]))
    for name, last, loss in (('moep_1', 10000, 3.0), ('moep_2', 10000, 4.0), ('moep_42', 10000, 5.0),
                             ('none_42', 6000, 6.0)):
        curve = [dict(words=1e6, overall=50.0), dict(words=1e8, overall=10 * loss)]
        scores = [dict(mode=mode, subset=subset, runs=curve)
                  for mode in ('harness', 'babylm2025') for subset in ('fast', 'full')]
        evaluations = [point(step, loss) for step in (0, 2000, 6000, 10000) if step <= last]
        kept = dict(evaluations=evaluations, blimp=scores if last == 10000 else [])
        (tmp_path / 'moep' / f'{name}.json').write_text(json.dumps(kept))
    monkeypatch.setattr(tables, 'HERE', tmp_path)
    assert list(tables.runs('moep')['moep']) == [42, 1, 2]
    ends = 'MoEP, `switch` | 3 | 4.000 ± 1.000 | 2.000 ± 0.500 | 40.0 ± 10.0 | 40.0 ± 10.0'
    assert list(tables.moep())[1:] == [f'{ends} | 1 of 2, 1 of 2, 1 of 2']
    words = list(tables.moep_words())
    assert words[1].startswith('1M | 50.0 ± 0.0') and words[-1] == '100M | 40.0 ± 10.0'
    whole = [f'MoEP, `switch` | {seed} | ' + ' | '.join([f'{loss}, 1 of 2'] * 3 + ['-'])
             for seed, loss in ((42, '5.000'), (1, '3.000'), (2, '4.000'))]
    stopped = 'MoEP, no balance loss | 42 | 6.000, 1 of 2 | 6.000, 1 of 2 | - | -'
    assert list(tables.moep_routes())[1:] == [*whole, stopped]
    (tmp_path / 'moep' / 'other_42.json').write_text('{}')
    with pytest.raises(ValueError, match='other_42'):
        tables.runs('moep')


@pytest.mark.slow
def test_plots_are_drawn(tmp_path):
    """Every picture of the pages that plots.py names, from the kept files."""
    pytest.importorskip('matplotlib')
    import plots
    names = re.findall(r'\w+', re.search(r'for draw in \((.*?)\):', inspect.getsource(plots), re.DOTALL)[1])
    pictures = {path.stem for path in (ROOT / 'docs').glob('*.png')}
    assert set(names) <= pictures                        # others are pictures of pages, or of a tour
    for name in names:
        figure = getattr(plots, name)()
        figure.savefig(tmp_path / f'{name}.png', dpi=20)
        assert all(axis.has_data() for axis in figure.axes)
        plots.plt.close(figure)


# ---- What is kept of a run ----------------------------------------------------------------------


def test_keep_a_run(run, tmp_path):
    about = dict(command='train.py x', parameters=30_240_000, active=23_940_000, trained=14_300_000)
    lines = [dict(iter=0, seconds=0.0, run=dict(about, torch='2.13.0'))]
    lines += [dict(iter=0, seconds=1.0, val=dict(x=dict(loss=7.6543210)), routes={})]
    lines += [dict(iter=i, seconds=20.0 * i, loss=1 / i, tokens_per_s=100 * i) for i in range(1, 7)]
    lines += [dict(iter=3, seconds=70.0, run=dict(about, command='train.py x --resume'))]
    lines += [dict(iter=6, seconds=150.0, val=dict(x=dict(loss=1.5)), routes={})]
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'log.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
    scores = dict(checkpoint='out/run/ckpt_1M.pt', iter=6, words=1e6, overall=61.23456,
                  fields=dict(syntax=60.0), phenomena=dict(npi=1.0), paradigms={})
    for name in ('blimp_fast', 'blimp'):
        found = dict(data=f'data/{name}', mode='harness', runs=[scores])
        (tmp_path / f'{name}.json').write_text(json.dumps(found))
    (tmp_path / 'usage.json').write_text('{"accuracy": 0.46650001}')
    out = tmp_path / 'kept' / 'a_1.json'
    run('docs/results/keep.py', tmp_path / 'run', '--out', out, '--every', '3', '--note', 'one core',
        '--blimp', tmp_path / 'blimp_fast.json', tmp_path / 'blimp.json',
        '--with', f"usage={tmp_path / 'usage.json'}")
    kept = json.loads(out.read_text())
    assert kept['command'] == 'python train.py x' and kept['minutes'] == 2.5 and kept['tokens_per_s'] == 350
    assert kept['note'] == 'one core'
    assert [e['val']['x']['loss'] for e in kept['evaluations']] == [7.6543, 1.5]
    assert [(line['iter'], line['loss']) for line in kept['steps']] == [(3, 0.33333), (6, 0.16667)]
    fast, full = kept['blimp']
    assert (fast['subset'], full['subset']) == ('fast', 'full')
    assert fast['runs'] == [dict(checkpoint='ckpt_1M.pt', iter=6, words=1e6, overall=61.235,
                                 fields=dict(syntax=60.0))]
    assert full['runs'][0]['phenomena'] == dict(npi=1.0)
    assert (kept['parameters'], kept['active'], kept['trained']) == (30.24e6, 23.94e6, 14.3e6)
    assert kept['usage'] == dict(accuracy=0.4665)


def test_keep_fine_tuning(tmp_path):
    paths = []
    for seed in (3, 12):
        result = dict(seed=seed, scores=dict(accuracy=50.0 + seed), best_epoch=2, epochs=7, history=[],
                      trained=9, seconds=90.0)
        task = dict(task='rte', train=10, valid=5, majority=dict(accuracy=50.0), runs=[result])
        paths.append(tmp_path / f'{seed}.json')
        paths[-1].write_text(json.dumps(dict(settings=dict(run='out/moep_42'), tasks=[task])))
    seeds = keep.read_glue(paths)['moep_42']['rte']['seeds']
    about = dict(best_epoch=2, epochs=7, minutes=1.5)
    assert seeds == {3: dict(accuracy=53.0, **about), 12: dict(accuracy=62.0, **about)}


def test_keep_babylm(tmp_path):
    """Two subsets of entity tracking; the model takes "nothing." once of twice, and guesses right once."""
    rows = [(0, 'nothing.', 'the cat.'), (0, 'nothing.', 'the cup.'), (1, 'the hat.', 'the cup.')]
    (tmp_path / 'data').mkdir()
    for name in ('regular', 'ambiref'):
        lines = [json.dumps(dict(numops=n, options=options)) for n, *options in rows]
        (tmp_path / 'data' / f'{name}.jsonl').write_text('\n'.join(lines) + '\n')
    took = [dict(pred='nothing.'), dict(pred='the cup.')], [dict(pred='the hat.')]
    found = {f'{name}_{n}_ops': dict(predictions=took[n]) for name in ('regular', 'ambiref') for n in (0, 1)}
    home = tmp_path / 'moep_42/main/zero_shot/causal'
    for folder in ('entity_tracking/entity_tracking', 'reading'):
        (home / folder).mkdir(parents=True)
    (home / 'reading/report.txt').write_text('EYE TRACKING SCORE: 1.50\nSELF-PACED READING SCORE: 0.25\n')
    report = home / 'entity_tracking/entity_tracking'
    (report / 'predictions.json').write_text(json.dumps(found))
    (report / 'best_temperature_report.txt').write_text('regular: 1.0\n\n### AVERAGE ACCURACY\n75.00\n')
    kept = keep.read_babylm([tmp_path / 'moep_42'], tmp_path / 'data')
    assert kept['moep_42'] == {'entity_tracking': 75.0, 'eye tracking': 1.5, 'self-paced reading': 0.25,
                               'nothing': 50.0, 'something': 100.0}
    # one word is shorter than two; two options of two words are even
    assert kept['shortest option'] == dict(entity_tracking=75.0, nothing=100.0, something=50.0)


# ---- Scripts that measured something ------------------------------------------------------------


def test_pairs_with_other_starts(smoke, run, tmp_path):
    """Two pairs; what the scores are does not matter after two steps."""
    rows = [dict(sentence_good=f'The {noun} are happy.', sentence_bad=f'The {noun} is happy.')
            for noun in ('dogs', 'cats')]
    (tmp_path / 'number.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
    said = run('blimp_starts', smoke('config/gpt2.py'), '--data', tmp_path, here=True).stdout.splitlines()
    assert len(said) == 7 and all(re.search(r' (0|50|100)\.00%$', line) for line in said)


def test_scale_of_a_large_model(run, data_dir, tmp_path):
    """On a CPU, with a small one. The share counts attention, also to what memory holds."""
    out = tmp_path / 'scale.json'
    sizes = ['--n_layer=1', '--n_embd=32', '--batch_size=2', '--seq_len=32', '--max_iters=2', '--device=cpu',
             '--eval_tokens=64', '--sample_tokens=0', f'--data_dir={data_dir}', f'--out_dir={tmp_path}/run']
    run('scale', out, ROOT / 'config/moduleformer.py', '--stream', '--memory=32', *sizes, here=True)
    found = json.loads(out.read_text())
    work = 6 * found['active'] + 6 * 1 * 2 * 48 * (32 + 2 * 32)      # layers, top_k, d_att, context
    assert found['share'] == pytest.approx(work * found['tokens_per_s'] / found['matrix_rate'])
    assert len(found['losses']) == 2
