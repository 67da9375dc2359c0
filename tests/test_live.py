"""tools/live.py: the page's model against torch, in a browser; its figures; hostile text."""

import base64
import html
import json
import random
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch

from conftest import ROOT
from plumbing.checkpoint import load_checkpoint, run_tokenizer
from tools import live
from tools.flops import training_flops

BROWSER = shutil.which('chromium') or shutil.which('google-chrome')
in_a_browser = pytest.mark.skipif(not BROWSER, reason='there is no browser')
HOSTILE = ('<script>alert(1)</script> "quotes" \'n\' </script><!-- <b>\x00\x1b'
           '\u200b\u202e\ufeff é &amp; @DATA@ @live_page.js@ \\ end')
ODD = ['', ' ', '   x  y ', "don't WE'LL 'tis I'VE", 'undefined xundefined', 'a\x85b\x1cc\x00d\x1f',
       '\ufeffbom\u2028\u2029\u3000\xa0 z', 'é e\u0301 ½ ٣ Ⅷ ²', '😀👩‍👩‍👧 ok', '\t\n\r\n \n', 'ſ K Å İ ı',
       'x' * 300, 'ab12cd  34', '漢字かな交じり文', '\u200b\u202e\u0301\U000e0001', HOSTILE,
       'The dogs near the tree are happy. ' * 30]


def fifty_texts():
    rng = random.Random(0)
    words = 'The dogs near the tree are happy . , \n " \' é ß 7 12 \x07 — 😀 \ufeff \x85 </b> ~'.split(' ')
    return ODD + [rng.choice(['', ' ']).join(rng.choices(words, k=rng.randint(1, 8)))
                  for _ in range(50 - len(ODD))]


@pytest.fixture(scope='module', params=['moep', 'moduleformer'])
def wild_run(request, smoke, tmp_path_factory):
    """A run with random weights, so that neither gates nor logits are near each other."""
    folder = tmp_path_factory.mktemp('live') / request.param
    shutil.copytree(smoke(f'config/{request.param}.py'), folder)
    ckpt = torch.load(folder / 'ckpt.pt', weights_only=True)
    torch.manual_seed(0)
    for p in ckpt['weights'].values():
        p.copy_((p + 0.1 * torch.randn(p.shape)).half())         # what the page holds: float16
    torch.save(ckpt, folder / 'ckpt.pt')
    return folder


def browse(page, script, folder):
    """Open the page with a script at its end -> what this returns, as JSON; the console."""
    path = folder / 'page.html'
    path.write_text(f"""{page}<script>
        Promise.resolve((async () => {{ {script} }})()).then(seen => {{
            document.body.textContent = JSON.stringify(seen); }});
        </script>""", encoding='utf-8')
    done = subprocess.run(
        [BROWSER, '--headless=new', '--no-sandbox', '--disable-gpu', '--enable-logging=stderr',
         f'--user-data-dir={folder}/profile', '--virtual-time-budget=60000', '--dump-dom',
         f'file://{path}'], capture_output=True, text=True, timeout=300)
    body = re.search(r'<body>(.*)</body>', done.stdout, re.DOTALL).group(1)
    console = [line for line in done.stderr.splitlines() if 'CONSOLE' in line]
    return json.loads(html.unescape(body)), console


def in_js(value):
    return json.dumps(value).replace('<', '\\u003c')


def readable(ids, limit):
    """A full context goes on from its newer half."""
    while len(ids) > limit:
        ids = ids[limit // 2:]
    return ids


@torch.no_grad()
def in_torch(model, idx, hands):
    """Logits and routes of the model when its routers see only the scores that `hands` leaves."""
    model.config.top_k = hands['top_k']
    for name, module in model.named_modules():
        if isinstance(module, model.router):
            layer = name.removesuffix('.router')

            def score(x_ND, layer=layer, module=module):
                score_NE = type(module).score(module, x_ND) / hands['temperature']
                for place in hands['out']:
                    name, choice = place.split('/')
                    score_NE[:, int(choice)] -= torch.inf if name == layer else 0
                for place, choice in hands['force'].items():
                    name, token = place.split('/')
                    others = torch.arange(score_NE.size(1)) != choice
                    score_NE[int(token), others] -= torch.inf if name == layer else 0
                return score_NE
            module.score = score
    x = torch.tensor([idx])
    return model(x)[0][0], {layer: gate[0] for layer, gate in model.routes(x).items()}


@pytest.mark.slow
@in_a_browser
def test_the_page_computes_what_torch_does(wild_run, tmp_path):
    """On 50 texts, untouched and touched; also when the text grows by a token."""
    model, ckpt = load_checkpoint(wild_run)
    tokenizer = run_tokenizer(ckpt)
    data = live.describe(wild_run, '')
    none = dict(out=[], force={}, top_k=2, temperature=1)
    first, second, *_ = model.routes(torch.tensor([[0]]))
    touched = [dict(none, out=[f'{second}/2']), dict(none, out=[f'{first}/0', f'{second}/3']),
               dict(none, top_k=1), dict(none, top_k=4), dict(none, temperature=0.3),
               dict(none, force={f'{second}/0': 3}, top_k=3, temperature=2)]
    cases = [(text, none) for text in fifty_texts()]
    cases += [(text, hands) for text in ODD[3:5] for hands in touched]
    seen, console = browse(live.fill(data), f"""
        const base64 = rows => btoa(rows.map(row => Array.from(new Uint8Array(row.slice().buffer),
            byte => String.fromCharCode(byte)).join('')).join(''));
        return {in_js(cases)}.map(([text, hands]) => {{
            const ids = [EOT, ...encode(text, rank)];
            const idx = readable(ids);
            const known = forward(live, idx.slice(0, -1).concat(0), hands);
            const answers = [forward(live, idx, hands), forward(live, idx, hands, known)];
            const [fresh, grown] = answers.map(({{ logits, routes, nats }}) => ({{
                logits: base64(logits), nats, gates: Object.fromEntries(Object.entries(routes).map(
                    ([layer, {{ gate_NE }}]) => [layer, base64(gate_NE)])) }}));
            return [ids, fresh, JSON.stringify(fresh) === JSON.stringify(grown)]; }});""", tmp_path)
    assert console == [] and len(seen) == len(cases)
    soft = []
    for (text, hands), (ids, fresh, is_same) in zip(cases, seen):
        assert ids == [tokenizer.eot, *tokenizer.encode(text)], text
        idx = readable(ids, data['config']['block_size'])
        logits, routes = in_torch(model, idx, hands)
        matrix = lambda text: np.frombuffer(base64.b64decode(text), np.float32).reshape(len(idx), -1)
        assert np.abs(matrix(fresh['logits']) - logits.numpy()).max() < 1e-3, text
        assert list(fresh['gates']) == list(routes) and is_same
        for layer, gate in routes.items():
            assert np.abs(matrix(fresh['gates'][layer]) - gate.numpy()).max() < 1e-3
            assert ((matrix(fresh['gates'][layer]) > 0) == (gate > 0).numpy()).all()
            soft.append(((gate > 0.1) & (gate < 0.9)).float().mean())
        nats = -logits.log_softmax(-1)[torch.arange(len(idx) - 1), idx[1:]]
        assert np.allclose(fresh['nats'][1:], nats, atol=1e-3)
    assert logits.std() > 0.5 and 0.1 < np.mean(soft) < 0.9      # not too easy


@pytest.mark.slow
@in_a_browser
def test_the_page_shows_it(wild_run, tmp_path):
    """Type, knock a choice out, undo, change sizes: the figures are torch's and count_params'."""
    text, pair = 'The dogs near the tree are', ['The dogs are happy.', 'The dogs is happy.']
    data = live.describe(wild_run, text)
    sizes = [dict(top_k=3), dict(n_embd=48), dict(n_block=7, n_expert=3, n_att=7, n_ffd=3)]
    seen, console = browse(live.fill(data), f"""
        const type = (id, text) => {{ $(id).value = text; $(id).dispatchEvent(new Event('input')); }};
        const figures = () => [$('loss').textContent, $('next').firstChild.textContent,
            $('pair0-score').textContent, $('pair1-score').textContent];
        const [a, b] = {in_js(pair)};
        type('pair0', a);
        type('pair1', b);
        const seen = {{ before: figures(), layer: layers()[1] }};
        $(`${{seen.layer}}/2`).click();
        $('knock').click();
        seen.out = figures();
        $('undo').click();
        seen.undone = figures();
        $('token2').click();
        $('force').click();
        seen.forced = structuredClone(hands.force);
        type('text', 'The cat');
        seen.unforced = hands.force;
        seen.cost = {in_js(sizes)}.map(size => {{
            for (const key in size) if ($(`cost-${{key}}`)) type(`cost-${{key}}`, size[key]);
            return $('cost').innerText + $('cost-hint').textContent; }});
        return seen;""", tmp_path)
    assert console == [] and seen['before'] == seen['undone'] != seen['out']
    assert seen['forced'] == {seen['layer'] + '/2': 2} and seen['unforced'] == {}
    model, ckpt = load_checkpoint(wild_run)
    tokenizer = run_tokenizer(ckpt)
    hands = dict(out=[], force={}, top_k=2, temperature=1)
    for figures, out in ((seen['before'], []), (seen['out'], [seen['layer'] + '/2'])):
        losses = []
        for sentence in (text, *pair):
            idx = [tokenizer.eot, *tokenizer.encode(sentence)]
            logits, _ = in_torch(model, idx, dict(hands, out=out))
            losses.append(-logits.log_softmax(-1)[torch.arange(len(idx) - 1), idx[1:]].double())
            if sentence == text:
                best = logits[-1].softmax(-1).max().item()
        loss, top, *scores = figures
        assert loss.startswith(f'{losses[0].mean():.2f} nats')
        assert re.search(r'[\d.]+(?=%)', top).group() in (f'{100 * best:.0f}', f'{100 * best:.1f}')
        assert [float(s.replace('−', '-')) for s in scores] == pytest.approx(
            [-nats.sum().item() for nats in losses[1:]], abs=0.006)
    config = model.config
    for size, shown in zip(sizes, seen['cost']):         # one slider after the other
        scale = size.get('n_embd', config.n_embd) / config.n_embd
        widths = ('n_embd_parallel', 'd_att', 'd_ffd')
        size = {key: value for key, value in size.items() if hasattr(config, key)}
        config = replace(config, **size, **{key: int(getattr(config, key) * scale)
                                            for key in widths if hasattr(config, key)})
        total, active = type(model)(config).count_params()
        flops = training_flops(config, active, config.block_size)
        for figure in (total, active, flops / 3, flops):
            assert f'{round(figure):,}' in shown


class Counter(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.hits += 1
        self.send_error(404)

    def log_message(self, *args):
        pass


@pytest.mark.slow
@in_a_browser
def test_hostile_text_is_shown_and_nothing_is_sent(smoke, tmp_path):
    data = live.describe(smoke('config/moep.py'), HOSTILE) | dict(name=HOSTILE, data=HOSTILE)
    page = live.fill(data)
    server = HTTPServer(('127.0.0.1', 0), Counter)
    server.hits = 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f'http://127.0.0.1:{server.server_port}'
    script = f"""
        const seen = {{ text: $('text').value, tokens: $('tokens').textContent, scripts:
            document.scripts.length, source: $('source').textContent, bold: document.querySelector('i b') }};
        await fetch('{url}/a').catch(() => 0);
        const image = new Image();
        image.src = '{url}/b';
        await new Promise(resolve => {{ image.onload = image.onerror = resolve; }});
        return seen;"""
    seen, console = browse(page, script, tmp_path)
    assert server.hits == 0 and 'Content Security Policy' in console[0]
    assert seen['text'] == HOSTILE and seen['scripts'] == 3 and seen['bold'] is None
    assert '<script>' in seen['source'] and '[U+202E]' in seen['source'] and '[U+0000]' in seen['tokens']
    no_policy = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', '', page, flags=re.DOTALL)
    browse(no_policy, script, tmp_path)
    assert server.hits == 2                              # the policy is what has stopped them
    server.shutdown()


def test_the_page_in_docs_is_up_to_date():
    """It is what today's files make of the run that is in it:
    python -m tools.explore out/moep --live --out docs/play.html"""
    page = (ROOT / 'docs' / 'play.html').read_text(encoding='utf-8')
    script = r'<script id="data" type="application/json">(.*?)</script>'
    blob, = re.findall(script, page, re.DOTALL)
    assert live.fill(json.loads(blob)) == page
    assert len(page.encode()) < 2e6


def test_what_it_cannot_show(run, smoke):
    said = run('tools.explore', smoke('config/papaformer.py'), '--live', code=2).stderr
    assert '--live knows moep and moduleformer, not papaformer' in said
    said = run('tools.explore', smoke('config/gpt2.py'), '--live', code=2).stderr
    assert 'has no routers' in said
    assert 'one run' in run('tools.explore', 'a', 'b', '--live', code=2).stderr
