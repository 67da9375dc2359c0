"""tools/compare.py as a user runs it, and its page in a browser where there is one."""

import json
import math
import re
import subprocess
import sys

import pytest

from browser import browse, in_a_browser
from common import ROOT
from tools import compare

NASTY = '</script><b id="x">"\'&$\x1b[2J'


def start(it=0, **settings):
    settings = dict(model='moep', out_dir='a', **settings)
    return dict(iter=it, seconds=0.0, run=dict(
        settings=settings, config=dict(n_layer=2), parameters=2000, active=1500, steps=100,
        tokens_per_step=64, device='cpu'))


def step(it, **values):
    usual = dict(loss=5.0 - it, lr=0.1, grad_norm=1.0, tokens_per_s=10 * it, epoch=0, windows=it)
    return dict(iter=it, seconds=6.0 * it, words=7 * it) | usual | values


def evaluation(it, loss, routes=None, name='toy'):
    scores = dict(loss=loss, perplexity=math.exp(loss), bits_per_byte=loss / 4)
    return dict(iter=it, seconds=6.0 * it, words=7 * it, val={name: scores}, routes=routes or {})


def write_log(folder, *records):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'log.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))


def cells(text):
    """{label: its cells} of a printed table of runs whose names have no spaces."""
    rows = [re.split(r'\s{2,}', line.strip()) for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) > 1}


@pytest.fixture
def call(run, tmp_path):
    return lambda *args: run('tools.compare', *args, cwd=tmp_path, here=True).stdout


def page_data(path):
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())
    return json.loads(data[1])


def test_numbers_are_those_of_the_log(call, tmp_path):
    routes = dict(first=[0.5, 0.4905, 0.0095, 0.0], second=[0.25, 0.25, 0.25, 0.25])
    write_log(tmp_path / 'out/a', start(n=1), evaluation(0, 4.0), step(1, balance=2.0),
              step(2, balance=2.5), evaluation(2, 1.5), step(3, balance=2.25, tokens_per_s=90),
              evaluation(3, 2.0, routes))
    write_log(tmp_path / 'b', start(n=2), step(1))
    text = call('a', 'b', '--html=page.html')
    table = cells(text)
    expected = dict(tokens=['192', '64'], words=['21', '7'], minutes=['0.3', '0.1'],
                    balance=['2.25', '-'], n=['1', '2'])
    assert {label: table[label] for label in expected} == expected
    assert table['tokens/s, median'] == ['20', '10']
    assert table['toy: best loss'] == ['1.5000', '-'] and table['toy: best at step'] == ['2', '-']
    assert table['toy: last loss'] == ['2.0000', '-']
    assert table['toy: last bits per byte'] == ['0.5000', '-']
    assert table['unused choices'] == ['2 of 8', '-'] and table['in layer'] == ['first', '-']
    assert table['fewest effective choices'] == ['2.10 of 4', '-']

    first, second = page_data(tmp_path / 'page.html')['runs']
    assert first['axes']['steps'] == dict(
        step=[1, 2, 3], tokens=[64, 128, 192], minutes=[0.1, 0.2, 0.3],
        FLOPs=[6 * 1500 * n for n in (64, 128, 192)])
    curves = {(c['panel'], c['label']): c['mean'] for c in first['curves']}
    assert curves['loss', 'train'] == [4, 3, 2] and curves['loss', 'val toy'] == [4.0, 1.5, 2.0]
    assert curves['balance', 'train'] == [2.0, 2.5, 2.25] and curves['lr', 'train'] == [0.1] * 3
    assert [choice['mean'][-1] for choice in first['routes']['first']] == routes['first']
    unused = [choice['unused'] for choice in first['routes']['first']]
    assert unused == [False, False, True, True] and second['routes'] == {}


def test_a_real_run(call, smoke, tmp_path):
    """What train.py writes today is understood."""
    folder = smoke('config/moep.py')
    table = cells(call(folder, '--html=page.html'))
    *_, last = map(json.loads, open(folder / 'log.jsonl'))
    assert table['toy_stories: last loss'] == [f"{last['val']['toy_stories']['loss']:.4f}"]
    routes = page_data(tmp_path / 'page.html')['runs'][0]['routes']
    for layer, shares in last['routes'].items():
        assert [choice['mean'][-1] for choice in routes[layer]] == shares


def test_resumed_with_another_batch(tmp_path):
    again = start(2)
    again['run']['tokens_per_step'] = 100
    write_log(tmp_path, start(), step(1), step(2), again, step(3))
    result = compare.read_run(tmp_path)
    assert result['axes']['steps']['tokens'] == [64, 128, 228]


def test_nan_is_a_gap(call, tmp_path):
    write_log(tmp_path, start(), step(1), step(2, loss=math.nan), step(3))
    call('.', '--html=page.html')
    train, *_ = page_data(tmp_path / 'page.html')['runs'][0]['curves']
    assert train['mean'] == [4, None, 2]


def test_thinning_keeps_the_extremes(tmp_path):
    losses = [2.0] * 5000
    losses[1234], losses[4321] = 9.0, -3.0
    write_log(tmp_path, start(), *(step(i, loss=loss) for i, loss in enumerate(losses, 1)))
    result = compare.read_run(tmp_path)
    curve = result['curves'][0]
    assert len(curve['mean']) == 1000 and max(curve['high']) == 9.0 and min(curve['low']) == -3.0
    assert curve['mean'][1234 // 5] == pytest.approx((9 + 4 * 2) / 5)
    assert result['axes']['steps']['step'][-1] == 5000


def test_names_are_text(call, tmp_path):
    """Neither a page nor a terminal obeys them."""
    write_log(tmp_path / 'a', start(note=NASTY), step(1, **{NASTY: 1.0}),
              evaluation(1, 2.0, {NASTY: [1.0]}, NASTY))
    write_log(tmp_path / 'b', start())
    assert '\x1b' not in call('a', 'b', '--html=page.html')
    page = (tmp_path / 'page.html').read_text()
    template = (ROOT / 'tools/compare.html').read_text()
    assert page.count('</script') == template.count('</script')
    data = page_data(tmp_path / 'page.html')
    assert list(data['runs'][0]['routes']) == [NASTY] and ['note', NASTY, '-'] in data['rows']


@in_a_browser
def test_page_in_a_browser(call, tmp_path):
    """Hover, the switches of axis and scale, and no error."""
    write_log(tmp_path / 'a', start(), evaluation(0, 6.0), step(1),
              evaluation(3, 3.5, dict(first=[0.5, 0.5, 0.0])))
    call('a', '--html=page.html')
    seen, console = browse((tmp_path / 'page.html').read_text(), """
        function point(query, share) {
            const svg = document.querySelector(query), box = svg.getBoundingClientRect();
            const clientX = box.left + share * box.width;
            svg.dispatchEvent(new PointerEvent('pointermove', { clientX }));
            return document.getElementById('tip').innerText;
        }
        const seen = [point('.chart svg', 0), point('.routes svg', 1)];
        document.querySelector('input[value=FLOPs]').click();
        document.getElementById('logx').click();
        document.getElementById('logy').click();
        return [...seen, point('.chart svg', 1)];""", tmp_path)
    left, share, right = seen
    assert console == [] and 'val toy: 6' in left and '2: 0.0%, unused at the end' in share
    assert right.startswith('training FLOPs')


def test_seeds_share_a_column(call, tmp_path):
    for seed, (a, b) in enumerate([(1.0, 1.5), (2.0, 3.5), (3.0, 5.5)]):
        write_log(tmp_path / f'out/a/seed_{seed}', start(n=1, seed=seed), evaluation(1, a))
        write_log(tmp_path / f'b{seed}', start(n=2, seed=seed), evaluation(1, b))
    text = call('a', 'b0', 'b1', 'b2', '--html=page.html')
    table = cells(text)
    assert 'out/a, 3 seeds' in text and 'b0, 3 seeds' in text
    assert table['toy: last loss'] == ['2.0000 ± 1.0000', '3.5000 ± 2.0000']
    assert table['toy: difference'] == ['-', '+1.5000']
    # scipy.stats.ttest_ind(..., equal_var=False) and its confidence_interval
    assert ('b0, 3 seeds against out/a, 3 seeds on toy: no clear difference, +1.5000, '
            '95% interval -2.6554 to +5.6554, p = 0.331') in text
    assert [run['group'] for run in page_data(tmp_path / 'page.html')['runs']] == [0, 0, 0, 1, 1, 1]
    hint = 'One run each'
    assert hint in call('out/a/seed_0', 'b0') and hint not in call('b0') and hint not in text
    assert 'out/a, 3 seeds' in call('out/a', 'out/a/seed_1')          # a seed counts once


@pytest.mark.parametrize('other, wanted', [
    (evaluation(9, 1.0), 'on toy: not tested: the last evaluations are at steps 1, 9'),
    (evaluation(1, math.nan), 'on toy: not tested: a loss is missing or nan'),
    (evaluation(1, 2.0) | dict(val=dict(toy=dict(loss=2.0, bits_per_byte=1.0))),
     'on toy: no clear difference, +0.6250 bits/byte')])
def test_what_is_not_compared_as_usual(call, tmp_path, other, wanted):
    """Runs of different length, a loss that is nan, another tokenizer"""
    for seed, loss in enumerate([1.0, 2.0]):
        write_log(tmp_path / f'a{seed}', start(n=1, seed=seed), evaluation(1, loss))
        write_log(tmp_path / f'b{seed}', start(n=2, seed=seed), other)
    assert wanted in call('a0', 'a1', 'b0', 'b1')


def test_runs_that_share_a_start_are_compared_in_pairs(call, tmp_path):
    """Here each seed has a start of its own."""
    for seed, a, b in ((1, 1.0, 1.5), (2, 2.0, 2.4), (3, 3.0, 3.6)):
        for name, n, loss in (('a', 1, a), ('b', 2, b)):
            begin = start(n=n, seed=seed, init_from=f'out/base_{seed}')
            write_log(tmp_path / f'{name}{seed}', begin, evaluation(1, loss))
    text = call('a1', 'a2', 'a3', 'b3', 'b1', 'b2')
    assert ('b3, 3 seeds against a1, 3 seeds on toy: no clear difference, +0.5000, 95% interval '
            '+0.2516 to +0.7484, p = 0.0131 (clear: below 0.01), paired\n') in text     # ttest_rel
    assert 'paired' not in call('a1', 'a2', 'b1', 'b3')


@pytest.mark.parametrize('path', ['tools/compare.py', 'arena'])
def test_run_as_a_file(path):
    if not (ROOT / path).exists():
        pytest.skip('a room that was taken away')
    done = subprocess.run([sys.executable, ROOT / path, 'x'], capture_output=True, text=True)
    name = path.removesuffix('.py').replace('/', '.')
    assert done.returncode == 1 and done.stderr.count('\n') == 1
    assert done.stderr.endswith(f'python -m {name}\n')
