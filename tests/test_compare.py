"""tools/compare.py as a user runs it, and its page in a browser where there is one."""

import html
import json
import math
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT
from tools import compare

NASTY = '</script><b id="x">"\'&$\x1b[2J'


def start(it=0, **settings):
    return dict(iter=it, seconds=0.0, run=dict(
        settings=dict(model='moep', out_dir='a', **settings), config=dict(n_layer=2), parameters=2000,
        active=1500, steps=100, tokens_per_step=64, device='cpu'))


def step(it, **values):
    usual = dict(loss=5.0 - it, lr=0.1, grad_norm=1.0, tokens_per_s=10 * it, epoch=0, windows=it)
    return dict(iter=it, seconds=6.0 * it, words=7 * it) | usual | values


def evaluation(it, loss, routes=None, name='toy'):
    scores = dict(loss=loss, perplexity=math.exp(loss), bits_per_byte=loss / 4)
    return dict(iter=it, seconds=6.0 * it, words=7 * it, val={name: scores}, routes=routes or {})


def write_log(folder, *records, tail=''):
    folder.mkdir(parents=True, exist_ok=True)
    text = ''.join(json.dumps(record) + '\n' for record in records)
    (folder / 'log.jsonl').write_text(text + tail)
    return folder


def cells(text):
    """{label: its cells} of a printed table of runs whose names have no spaces."""
    rows = [re.split(r'\s{2,}', line.strip()) for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) > 1}


def page_data(path):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())
    return json.loads(found[1])


def test_slots_are_not_called_tokens(run, tmp_path):
    for name, limit in dict(tokens=0, bytes=8).items():
        write_log(tmp_path / name, start(byte_limit=limit), step(1))
    table = cells(run('tools.compare', 'tokens', 'bytes', cwd=tmp_path, here=True).stdout)
    assert table['tokens'] == ['64', '-'] and table['slots'] == ['-', '64']
    assert table['tokens/s, median'] == ['10', '-'] and table['slots/s, median'] == ['-', '10']


def test_numbers_are_those_of_the_log(run, tmp_path):
    routes = dict(first=[0.5, 0.4905, 0.0095, 0.0], second=[0.25, 0.25, 0.25, 0.25])
    write_log(tmp_path / 'out/a', start(seed=1), evaluation(0, 4.0), step(1, balance=2.0),
              step(2, balance=2.5), evaluation(2, 1.5), step(3, balance=2.25, tokens_per_s=90),
              evaluation(3, 2.0, routes))
    nothing = dict(first=[0.25, 0.25, 0.25, 0.25], second=[0.0, 0.0, 0.0, 0.0])
    write_log(tmp_path / 'b', start(seed=2), step(1))
    write_log(tmp_path / 'c', start(seed=2), step(1), evaluation(1, 2.0, nothing))
    text = run('tools.compare', 'a', 'b', '--html=page.html', cwd=tmp_path, here=True).stdout
    assert text.endswith('page.html: open it in a browser\n')
    table = cells(text)
    assert table['parameters'] == ['2,000', '2,000'] and table['active per token'] == ['1,500', '1,500']
    assert table['steps'] == ['3 of 100', '1 of 100'] and table['tokens'] == ['192', '64']
    assert table['words'] == ['21', '7'] and table['minutes'] == ['0.3', '0.1']
    assert table['tokens/s, median'] == ['20', '10'] and table['balance'] == ['2.25', '-']
    assert table['toy: best loss'] == ['1.5000 at 2', '-'] and table['toy: last loss'] == ['2.0000', '-']
    assert table['toy: last bits per byte'] == ['0.5000', '-']
    assert table['toy: last perplexity'] == [f'{math.exp(2):.4f}', '-']
    assert table['unused choices'] == ['2 of 8', '-'] and table['in layer'] == ['first', '-']
    assert table['fewest effective choices'] == ['2.10 of 4', '-']
    idle = cells(run('tools.compare', 'c', cwd=tmp_path, here=True).stdout)
    assert idle['fewest effective choices'] == ['0.00 of 4'] and idle['in layer'] == ['second']
    assert table['seed'] == ['1', '2'] and 'n_layer' not in table and 'out_dir' not in table
    assert max(map(len, text.splitlines())) <= 100

    first, second = page_data(tmp_path / 'page.html')['runs']
    assert first['axes']['steps'] == dict(step=[1, 2, 3], tokens=[64, 128, 192], minutes=[0.1, 0.2, 0.3],
                                          FLOPs=[6 * 1500 * n for n in (64, 128, 192)])
    found = {(c['panel'], c['label']): c['mean'] for c in first['curves']}
    assert found['loss', 'train'] == [4, 3, 2] and found['loss', 'val toy'] == [4.0, 1.5, 2.0]
    assert found['balance', 'train'] == [2.0, 2.5, 2.25] and found['lr', 'train'] == [0.1] * 3
    assert [choice['mean'][-1] for choice in first['routes']['first']] == routes['first']
    assert [choice['unused'] for choice in first['routes']['first']] == [False, False, True, True]
    assert second['routes'] == {}


def test_a_row_that_no_run_of_three_has_is_not_printed(run, tmp_path):
    """But a setting that differs between the first three and the others is."""
    for name in 'abc':
        write_log(tmp_path / name, start(seed=1), step(1))
    write_log(tmp_path / 'd', start(seed=2), step(1, balance=2.0), evaluation(1, 2.0))
    first, second = run('tools.compare', *'abcd', cwd=tmp_path, here=True).stdout.rstrip().split('\n\n')
    assert 'balance' not in first and 'validation' not in first and cells(first)['seed'] == ['1'] * 3
    assert cells(second)['balance'] == ['2'] and cells(second)['seed'] == ['2']


def test_a_real_run(run, data_dir, tmp_path):
    """What train.py writes today is understood."""
    run('train.py', 'config/moep.py', f'--data_dir={data_dir}', f'--out_dir={tmp_path}/run', '--max_iters=2',
        '--log_interval=1', '--batch_size=1', '--eval_tokens=64', '--sample_tokens=2', here=True)
    table = cells(run('tools.compare', tmp_path / 'run', f'--html={tmp_path}/page.html', here=True).stdout)
    first, *_, last = map(json.loads, open(tmp_path / 'run/log.jsonl'))
    assert table['parameters'] == [f"{first['run']['parameters']:,}"] and table['steps'] == ['2 of 2']
    assert table['tokens'] == ['128'] and table['log lines'] == ['5'] and 'expert_balance' in table
    assert table['toy_stories: last loss'] == [f"{last['val']['toy_stories']['loss']:.4f}"]
    data, = page_data(tmp_path / 'page.html')['runs']
    shares = {layer: [choice['mean'][-1] for choice in choices] for layer, choices in data['routes'].items()}
    assert shares == last['routes']


def test_resumed_with_another_batch(tmp_path):
    again = start(2)
    again['run'] |= dict(tokens_per_step=100, steps=50)
    write_log(tmp_path, start(), step(1), step(2), again, step(3))
    found = compare.read_run(tmp_path)
    assert found['axes']['steps']['tokens'] == [64, 128, 228] and found['cells']['run']['steps'] == '3 of 50'


def test_broken_logs(run, tmp_path):
    """A torn last line is silent, damage is counted, and what is there is shown."""
    write_log(tmp_path / 'torn', start(), step(1), tail='{"iter": 2, "los')
    write_log(tmp_path / 'empty')
    damage = ['not json', '[1]', '{"loss": 1}', '{"iter": NaN}', '{"iter": 2, "val": {"toy": 3}}',
              '[' * 10 ** 5, '{"iter": 1' + '0' * 400 + '}', '{"iter": 4, "run": 5}',
              '{"iter": 3, "val": {}, "routes": {"a": ["x"]}}']
    write_log(tmp_path / 'damaged', step(1), tail='\n'.join(damage) + '\n' + json.dumps(step(5)) + '\n')
    text = run('tools.compare', 'torn', 'empty', 'damaged', '--html=p.html', cwd=tmp_path, here=True).stdout
    table = cells(text)
    assert table['log lines'] == ['2', '0', '2, 9 damaged']
    assert table['steps'] == ['1 of 100', '- of -', '5 of -']
    assert table['tokens'] == ['64', '-', '-'] and table['parameters'] == ['2,000', '-', '-']
    assert 'settings that differ' not in text
    assert page_data(tmp_path / 'p.html')['runs'][2]['axes']['steps']['tokens'] == [None, None]


def test_nan_is_a_gap(run, tmp_path):
    write_log(tmp_path, start(), step(1), step(2, loss=math.nan), step(3), evaluation(3, 2.0),
              evaluation(4, math.nan))
    table = cells(run('tools.compare', tmp_path, f'--html={tmp_path}/page.html', here=True).stdout)
    assert table['toy: best loss'] == ['2.0000 at 3'] and table['toy: last loss'] == ['nan']
    train, *_, val = page_data(tmp_path / 'page.html')['runs'][0]['curves']
    assert train['mean'] == [4, None, 2] and val['mean'] == [2.0, None]


def test_thinning_keeps_the_extremes(tmp_path):
    losses = [2.0] * 5000
    losses[1234], losses[4321] = 9.0, -3.0
    write_log(tmp_path, start(), *(step(i, loss=loss) for i, loss in enumerate(losses, 1)))
    found = compare.read_run(tmp_path)
    curve = found['curves'][0]
    assert len(curve['mean']) == 1000 and max(curve['high']) == 9.0 and min(curve['low']) == -3.0
    assert curve['mean'][1234 // 5] == pytest.approx((9 + 4 * 2) / 5)
    assert found['axes']['steps']['step'][-1] == 5000


def test_names_are_text(run, tmp_path):
    """Neither a page nor a terminal obeys them."""
    write_log(tmp_path / 'a', start(note=NASTY), step(1, **{NASTY: 1.0}),
              evaluation(1, 2.0, {NASTY: [1.0]}, NASTY))
    write_log(tmp_path / 'b', start())
    done = run('tools.compare', 'a', 'b', '--html=page.html', cwd=tmp_path, here=True)
    page = (tmp_path / 'page.html').read_text()
    template = (ROOT / 'tools/compare.html').read_text()
    assert '\x1b' not in done.stdout and page.count('</script') == template.count('</script')
    data = page_data(tmp_path / 'page.html')
    assert list(data['runs'][0]['routes']) == [NASTY] and ['note', NASTY, '-'] in data['rows']


@pytest.mark.parametrize('args, message', [
    (['nothing'], 'nothing is not a run: there is no log.jsonl in nothing or out/nothing'),
    (['.'], 'no log.jsonl'),
    (['a', '--html=a'], 'it is not a file'),
    (['a', '--html=/dev/null'], '/dev/null cannot be written: it is not a file'),
    ([], 'required')])
def test_mistakes(run, tmp_path, args, message):
    write_log(tmp_path / 'a', start())
    text = run('tools.compare', *args, cwd=tmp_path, code=2).stderr
    assert message in text and text.count('\n') == 1


def test_watch(run, tmp_path, monkeypatch):
    """Each round reads the log anew; Ctrl-C ends it without a traceback."""
    write_log(tmp_path, start(), step(1))
    rounds = []

    def sleep(seconds):
        rounds.append(page_data(tmp_path / 'page.html'))
        if len(rounds) == 2:
            raise KeyboardInterrupt
        write_log(tmp_path, start(), step(1), step(2))
    monkeypatch.setattr(compare.time, 'sleep', sleep)
    done = run('tools.compare', tmp_path, f'--html={tmp_path}/page.html', '--watch', here=True, code=130)
    assert [len(data['runs'][0]['curves'][0]['mean']) for data in rounds] == [1, 2]
    assert all(data['reload'] for data in rounds) and '2 of 100' in done.stdout and not done.stderr


def test_png(run, tmp_path, monkeypatch):
    write_log(tmp_path / 'a$b', start(), step(1), evaluation(1, 2.0, dict(layer=[1.0, 0.0])))
    monkeypatch.setattr(compare.importlib.util, 'find_spec', lambda name: None)
    args = [tmp_path / 'a$b', f'--png={tmp_path}/p.png']
    assert 'pip install matplotlib' in run('tools.compare', *args, code=2).stderr
    monkeypatch.undo()
    pytest.importorskip('matplotlib')
    run('tools.compare', *args, here=True)
    assert (tmp_path / 'p.png').read_bytes().startswith(b'\x89PNG')


def test_it_starts_fast():
    """It needs no torch."""
    code = "import sys, tools.compare; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)


# ---- In a browser -------------------------------------------------------------------------------


BROWSER = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
CATCH = """<script>
  window.problems = [];
  for (const kind of ['error', 'unhandledrejection']) {
    addEventListener(kind, event => problems.push(String(event.message || event.reason)));
  }
  for (const kind of ['error', 'warn']) console[kind] = (...words) => problems.push(words.join(' '));
  window.alert = text => problems.push(`alert: ${text}`);
</script>"""
# A browser window has a least width, a frame has none.
FRAME = """<body><iframe src="driven.html" style="width: WIDTHpx; height: 900px; border: 0"></iframe>
<script>onmessage = event => { document.body.dataset.found = event.data; }</script>"""
DRIVE = """<script>
addEventListener('load', () => setTimeout(() => {
  const found = {};
  const tip = document.getElementById('tip');
  const chart = n => document.querySelectorAll('.chart svg')[n];
  const texts = svg => [...svg.querySelectorAll('text')].map(text => text.textContent);
  const says = () => tip.hidden ? null : tip.innerText;
  function point(svg, share) {
    const box = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + share * box.width }));
    return says();
  }
  const press = key => chart(0).dispatchEvent(new KeyboardEvent('keydown', { key, cancelable: true }));
  const routes = () => document.querySelector('.routes svg');

  found.left = point(chart(0), 0);
  found.right = point(chart(0), 1);
  chart(0).dispatchEvent(new PointerEvent('pointerleave'));
  found.gone = says();
  press('Home');
  press('ArrowRight');
  found.key = says();
  press('Escape');
  found.closed = says();
  found.share = point(routes(), 1);
  found.unused = document.querySelector('.unused').textContent;
  found.hatched = routes().querySelectorAll('.hatched').length;
  found.step = texts(chart(0)).at(-1);
  document.querySelector('input[value=FLOPs]').click();
  found.flops = texts(chart(0)).at(-1);
  found.far = point(chart(0), 1);
  document.getElementById('logx').click();
  document.getElementById('logy').click();
  found.positive = point(chart(0), 0);
  found.address = location.hash;
  found.curves = chart(0).querySelectorAll('.curve').length;
  document.querySelector('#shown input').click();
  found.fewer = chart(0).querySelectorAll('.curve').length;
  found.heading = document.querySelector('#table thead').innerText;
  found.injected = document.querySelectorAll('#x').length;
  found.overflow = document.documentElement.scrollWidth > innerWidth;
  found.problems = problems;
  found.width = innerWidth;
  parent.postMessage(JSON.stringify(found), '*');
}, 300));
</script>"""


@pytest.mark.skipif(not BROWSER, reason='there is no browser')
@pytest.mark.parametrize('width', [1280, 400])
def test_page_in_a_browser(run, tmp_path, width):
    """Hover, keys, the switches of axis and scale, and nothing on the console."""
    nasty = NASTY.replace('/', '|').replace('\x1b', '')
    routes = [dict(first=[0.5, 0.5 - part, part]) for part in (0.25, 0.125, 0.0)]
    write_log(tmp_path / nasty, start(seed=NASTY), evaluation(0, 6.0, routes[0]), step(1, **{NASTY: 1.0}),
              step(2, **{NASTY: 2.0}), evaluation(2, 4.0, routes[1], NASTY), evaluation(3, 3.5, routes[2]))
    write_log(tmp_path / 'other', start(), *(step(i, loss=3 + i % 2) for i in range(1, 3000)))
    run('tools.compare', nasty, 'other', '--html=page.html', cwd=tmp_path, here=True)
    page = (tmp_path / 'page.html').read_text()
    page = page.replace('<head>', '<head>' + CATCH).replace('</body>', DRIVE + '</body>')
    (tmp_path / 'driven.html').write_text(page)
    (tmp_path / 'frame.html').write_text(FRAME.replace('WIDTH', str(width)))
    done = subprocess.run(
        [BROWSER, '--headless=new', '--no-sandbox', '--disable-gpu', '--no-first-run', '--disable-sync',
         '--disable-background-networking', '--disable-component-update', '--dump-dom',
         f'--user-data-dir={tmp_path}/profile',
         '--window-size=1400,1000', '--virtual-time-budget=5000', f'file://{tmp_path}/frame.html'],
        capture_output=True, text=True, timeout=120)
    found = json.loads(html.unescape(re.search(r'data-found="(.*?)"', done.stdout)[1]))
    assert found['problems'] == [] and found['injected'] == 0
    assert found['width'] == width and not found['overflow']
    assert found['left'].startswith('step 0') and f'{nasty}, val toy: 6' in found['left']
    assert found['right'].startswith('step 2,999') and 'other, train: 3.5 (3 to 4)' in found['right']
    assert found['gone'] is None and found['closed'] is None
    assert found['key'].startswith('step 1\n') and f'{nasty}, train: 4' in found['key']
    assert '2: 0.0%, unused at the end' in found['share'] and '1: 50.0%' in found['share']
    assert found['unused'].strip() == 'unused: 2' and found['hatched'] == 1
    assert found['step'] == 'step' and found['flops'] == 'training FLOPs'
    assert found['far'].startswith(f'training FLOPs {6 * 1500 * 64 * 2999 / 1e9:.4g}B\n')
    assert not found['positive'].startswith('training FLOPs 0') and found['address'] == '#FLOPs&logx&logy'
    assert found['curves'] == 4 and found['fewer'] == 1
    assert nasty in found['heading']
