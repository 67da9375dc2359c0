"""tools/live.py: in a browser, the page computes what torch does, and shows it; hostile text."""

import base64
import json
import random
import re
import shutil

import numpy as np
import pytest
import torch

from browser import browse, in_a_browser
from common import ROOT
from plumbing.checkpoint import load_checkpoint, run_tokenizer
from plumbing.settings import import_model
from tools import live
from tools.compare import fill

HOSTILE = ('<script>alert(1)</script> "quotes" \'n\' </script><!-- <b>\x00\x1b'
           '\u200b\u202e\ufeff é &amp; @DATA@ @live_page.js@ \\ end')
TEXTS = ['', ' ', '   x  y ', "don't WE'LL 'tis I'VE", 'undefined xundefined', HOSTILE,
         'a\x85b\x1cc\x00d\x1f', '\ufeffbom\u2028\u2029\u3000\xa0 z', '\t\n\r\n \n', 'x' * 300,
         'é e\u0301 ½ ٣ Ⅷ ² ſ İ ı', 'ab12cd  34', '漢字かな交じり文',
         '\u200b\u202e\u0301\U000e0001', '\U0001f469\u200d\U0001f467 ok',
         'The dogs near the tree are happy. ' * 30]
WORDS = ['The', 'dogs', 'near', 'the', 'tree', 'are', 'happy', '.', ',', '"', "'", 'é', 'ß', '7',
         '12', '\x07', '—', '\ufeff', '\x85', '</b>', '~']
RNG = random.Random(0)
TEXTS += [RNG.choice(['', ' ', '\n']).join(RNG.choices(WORDS, k=6)) for _ in range(34)]
NO_HANDS = dict(out=[], force={}, top_k=2, temperature=1)


VARIANTS = dict(moep={}, moduleformer={}, swiglu=dict(swiglu=True, expert_hidden=40),
                inserted=dict(n_ffd=[3, 8, 5], new_att=1, new_ffd=2),
                identity_kv=dict(identity_kv=True, d_att=96, n_head=1))


@pytest.fixture(scope='module', params=VARIANTS)
def wild_run(request, smoke, tmp_path_factory):
    """A run with random weights, so that neither gates nor logits are near each other."""
    folder = tmp_path_factory.mktemp('live') / request.param
    model = 'moep' if request.param in ('moep', 'swiglu') else 'moduleformer'
    shutil.copytree(smoke(f'config/{model}.py'), folder)
    ckpt = torch.load(folder / 'ckpt.pt', weights_only=True)
    ckpt['config'] |= VARIANTS[request.param]
    module = import_model(model)
    ckpt['weights'] = module.Model(module.Config(**ckpt['config'])).state_dict()
    torch.manual_seed(0)
    for p in ckpt['weights'].values():
        p.copy_((p + 0.1 * torch.randn(p.shape)).half())         # what the page holds: float16
    torch.save(ckpt, folder / 'ckpt.pt')
    return folder


def in_js(value):
    return json.dumps(value).replace('<', '\\u003c')


@torch.no_grad()
def in_torch(model, n_vocab, idx, hands):
    """Logits, loss of each token and routes, if routers see only the scores that `hands` leaves."""
    model.config.top_k = hands['top_k']
    closed = [place.split('/') for place in hands['out']]
    forced = [(*place.split('/'), choice) for place, choice in hands['force'].items()]
    for name, module in model.named_modules():
        if isinstance(module, model.router):
            def score(x_ND, layer=name.removesuffix('.router'), router=module):
                score_NE = type(router).score(router, x_ND) / hands['temperature']
                for e in [int(e) for name, e in closed if name == layer]:
                    score_NE[:, e] = -torch.inf
                for token, choice in [(int(t), e) for name, t, e in forced if name == layer]:
                    score_NE[token, torch.arange(score_NE.size(1)) != choice] = -torch.inf
                return score_NE
            module.score = score
    x = torch.tensor([idx])
    logits = model(x)[0][0, :, :n_vocab]                 # the page lacks what pads a vocabulary
    nats = -logits.log_softmax(-1)[torch.arange(len(idx) - 1), idx[1:]]
    return logits.numpy(), nats.numpy(), {name: g[0].numpy() for name, g in model.routes(x).items()}


@pytest.mark.slow
@in_a_browser
def test_the_page_computes_what_torch_does(wild_run, tmp_path):
    """On 50 texts, untouched and touched; and the same if all but the last token is known."""
    model, ckpt = load_checkpoint(wild_run)
    tokenizer, T = run_tokenizer(ckpt), model.config.block_size
    first, second, *_ = model.routes(torch.tensor([[0]]))
    hands = [dict(NO_HANDS, **change) for change in (
        dict(out=[f'{second}/2']), dict(out=[f'{first}/0', f'{first}/1', f'{second}/3']),
        dict(top_k=1), dict(top_k=4), dict(temperature=0.3),
        dict(force={f'{second}/0': 3, f'{second}/1': 0}, top_k=3, temperature=2))]
    texts = TEXTS if wild_run.name in ('moep', 'moduleformer') else TEXTS[:5]
    cases = [(text, NO_HANDS) for text in texts] + [(TEXTS[3], touched) for touched in hands]
    assert len(TEXTS) == 50
    seen, console = browse(fill('live', live.describe(wild_run, '')), f"""
        const base64 = rows => btoa(rows.map(row => String.fromCharCode(
            ...new Uint8Array(row.slice().buffer))).join(''));
        return {in_js(cases)}.map(([text, hands]) => {{
            const ids = [EOT, ...encode(text, rank)];
            const idx = readable(ids);
            const known = forward(live, [...idx.slice(0, -1), 0], hands);
            const [fresh, grown] = [undefined, known].map(known => {{
                const {{ logits, routes, nats }} = forward(live, idx, hands, known);
                const gates = Object.entries(routes).map(([name, r]) => [name, base64(r.gate_NE)]);
                return {{ logits: base64(logits), nats, gates: Object.fromEntries(gates) }}; }});
            return [ids, fresh, JSON.stringify(fresh) === JSON.stringify(grown)]; }});""", tmp_path)
    assert console == []
    even = []
    for (text, touched), (ids, answer, is_same) in zip(cases, seen, strict=True):
        assert ids == [tokenizer.eot, *tokenizer.encode(text)] and is_same, text
        while len(ids) > T:                              # it goes on from the newer half
            ids = ids[T // 2:]
        logits, nats, routes = in_torch(model, tokenizer.n_vocab, ids, touched)
        array = lambda text: np.frombuffer(base64.b64decode(text), np.float32).reshape(len(ids), -1)
        assert np.abs(array(answer['logits']) - logits).max() < 1e-3, text
        assert np.allclose(answer['nats'][1:], nats, atol=1e-3)
        assert list(answer['gates']) == list(routes)
        for layer, gate in routes.items():
            assert np.abs(array(answer['gates'][layer]) - gate).max() < 1e-3
            assert ((array(answer['gates'][layer]) > 0) == (gate > 0)).all()
            even.append(((gate > 0.1) & (gate < 0.9)).mean())
    assert logits.std() > 0.5 and 0.1 < np.mean(even) < 0.9      # or the test is too easy


@pytest.mark.slow
@in_a_browser
@pytest.mark.parametrize('wild_run', ['moep', 'moduleformer'], indirect=True)
def test_the_page_shows_it(wild_run, tmp_path):
    """Type, knock out, undo, force: the figures are torch's. A space at the end is not read; the
    box that matters most is found by trying all of them, and joins those that are out."""
    texts = ['The dogs near the tree are', 'The dogs are happy.', 'The dogs is happy.']
    seen, console = browse(fill('live', live.describe(wild_run, '')), f"""
        const type = (id, text) => {{
            $(id).value = text;
            $(id).dispatchEvent(new Event('input')); }};
        const figures = () => [$('loss'), $('next0').lastElementChild, $('pair0-score'),
                               $('pair1-score')].map(element => element.textContent);
        {in_js(texts)}.forEach((text, i) => type(['text', 'pair0', 'pair1'][i], text + '  '));
        const seen = {{ before: figures(), layer: layers()[1] }};
        $(`${{seen.layer}}/2`).click();
        $('knock').click();
        seen.out = figures();
        $('find-text').click();
        seen.kept = hands.out;
        $('undo').click();
        seen.undone = figures();
        $('find-text').click();
        seen.worst = hands.out;
        $('undo').click();
        $('find-pair').click();
        seen.worst_of_pair = hands.out;
        $('undo').click();
        document.dispatchEvent(new KeyboardEvent('keydown', {{ key: 'Escape' }}));
        seen.closed = !$('panel');
        $(`${{seen.layer}}/2`).click();
        $('token2').click();
        $('force').click();
        seen.forced = {{ ...hands.force }};
        type('text', 'The cat');
        seen.unforced = hands.force;
        $('go').click();
        seen.go = [$('go').textContent];
        type('text', '');
        seen.go.push($('go').textContent, $('find-text').disabled);
        return seen;""", tmp_path)
    assert console == [] and seen['before'] == seen['undone'] and seen['closed']
    assert seen['forced'] == {f"{seen['layer']}/2": 2} and seen['unforced'] == {}
    assert seen['kept'][0] == f"{seen['layer']}/2" and len(seen['kept']) == 2
    assert seen['go'] == ['Stop', 'Go on', True]
    model, ckpt = load_checkpoint(wild_run)
    tokenizer = run_tokenizer(ckpt)
    ids = [[tokenizer.eot, *tokenizer.encode(text)] for text in texts]
    read = lambda out: [in_torch(model, tokenizer.n_vocab, idx, dict(NO_HANDS, out=out))
                        for idx in ids]
    for figures, out in ((seen['before'], []), (seen['out'], [f"{seen['layer']}/2"])):
        (logits, nats, routes), *pair = read(out)
        best = 100 * torch.tensor(logits[-1]).softmax(-1).max().item()
        loss, top, *scores = figures
        assert loss.startswith(f'Loss of this text: {nats.mean():.2f} nats')
        assert float(re.search(r'[\d.]+(?=%)', top).group()) == pytest.approx(best, abs=0.51)
        assert [float(score.replace('−', '-')) for score in scores] == pytest.approx(
            [-nats.sum() for _, nats, _ in pair], abs=0.006)
    boxes = [[f'{layer}/{e}'] for layer, gate in routes.items() for e in range(gate.shape[1])]
    loss = {box[0]: [nats.sum() for _, nats, _ in read(box)] for box in boxes}
    assert seen['worst'] == [max(loss, key=lambda box: loss[box][0])]
    assert seen['worst_of_pair'] == [max(loss, key=lambda box: loss[box][1] - loss[box][2])]


@pytest.mark.slow
@in_a_browser
def test_hostile_text_is_shown_and_nothing_is_sent(smoke, tmp_path):
    data = live.describe(smoke('config/moep.py'), HOSTILE) | dict(name=HOSTILE, data=HOSTILE)
    seen, console = browse(fill('live', data), """
        const blocked = [];
        document.addEventListener(
            'securitypolicyviolation', event => blocked.push(event.blockedURI));
        await fetch('http://127.0.0.1:9/a').catch(() => 0);
        const image = new Image();
        image.src = 'http://127.0.0.1:9/b';
        await new Promise(resolve => { image.onload = image.onerror = resolve; });
        return { blocked, text: $('text').value, tokens: $('tokens').textContent,
            scripts: document.scripts.length, source: $('source').textContent };""", tmp_path)
    assert seen['blocked'] == ['http://127.0.0.1:9/a', 'http://127.0.0.1:9/b']
    assert all('Content Security Policy' in line for line in console)
    assert seen['text'] == HOSTILE and seen['scripts'] == 3      # the page's two, and this one
    assert '<script>' in seen['source'] and '[U+202E]' in seen['source']
    assert '[U+0000]' in seen['tokens']


def test_the_page_in_docs_is_up_to_date():
    """If not: python -m tools.explore out/moep --live --out docs/play.html"""
    page = (ROOT / 'docs' / 'play.html').read_text(encoding='utf-8')
    blob = re.search(r'<script id="data" type="application/json">(.*?)</script>', page).group(1)
    assert fill('live', json.loads(blob)) == page
    assert len(page.encode()) < 2e6


def test_what_it_cannot_show(run, smoke):
    said = run('tools.explore', smoke('config/papaformer.py'), '--live', code=2).stderr
    assert '--live knows moep and moduleformer, not papaformer' in said
    assert 'no routers' in run('tools.explore', smoke('config/gpt2.py'), '--live', code=2).stderr
    assert 'one run' in run('tools.explore', 'a', 'b', '--live', code=2).stderr
