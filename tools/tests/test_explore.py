"""tools/explore.py: the page's numbers against the model, hostile text, the page in a browser."""

import json
import re

import numpy as np
import pytest
import torch

from browser import browse, in_a_browser
from plumbing.bins import load_bin
from plumbing.checkpoint import load_checkpoint
from plumbing.tokenizer import load_tokenizer
from tools import explore

HOSTILE = ('<script>alert(1)</script> "quotes" \'n\' </script><!-- <b>\x00\x1b'
           '\u200b\u202e\ufeff é &amp; @DATA@ \\ end')


@pytest.fixture(scope='module')
def moep_run(smoke):
    return smoke('config/moep.py')


def page_data(path):
    """The JSON of a page, which nothing in it may end early."""
    script = r'<script id="data" type="application/json">(.*?)</script>'
    blob, = re.findall(script, path.read_text(), re.DOTALL)
    assert '<' not in blob
    return json.loads(blob)


def unpack(layer, i):
    """{choice: percent} of token i."""
    length = 2 * layer['width']
    values = [ord(letter) - 35 for letter in layer['gates'][i * length:(i + 1) * length]]
    return {c: percent for c, percent in zip(values[::2], values[1::2]) if c < layer['choices']}


def check_numbers(folder, data, ids, places, start=0):
    """Gates and losses of some tokens, each read in a window that ends with it."""
    model, _ = load_checkpoint(folder)
    T = model.config.block_size
    for i in places:
        first = i // T * T
        with torch.no_grad():
            routes = explore.look(model, torch.tensor([ids[first:i + 1]]))
        assert len(routes) == len(data['layers']) > 0
        for layer in data['layers']:
            gate = 100 * routes[layer['name']][-1]
            percents = unpack(layer, start + i)
            assert list(percents.values()) == sorted(percents.values(), reverse=True)
            for choice, percent in enumerate(gate.tolist()):
                assert abs(percents.get(choice, 0) - percent) < 0.51
        if i:
            first = (i - 1) // T * T
            with torch.no_grad():
                logits = model(torch.tensor([ids[first:i]]))[0][0, -1]
            nats = -logits.log_softmax(-1)[ids[i]].item()
            assert data['loss'][start + i] == pytest.approx(nats, abs=6e-4)
    assert data['loss'][start] is None


# ---- What a choice means ------------------------------------------------------------------------

def test_mutual_information():
    assert explore.mutual_information([0, 0, 1, 1], [5, 5, 7, 7]) == pytest.approx(1)
    assert explore.mutual_information(list('aabb'), [0, 1, 0, 1]) == 0
    assert explore.mutual_information([1, 1, 1], [0, 1, 2]) == 0
    # p(a, 0) = 1/2, p(b, 0) = p(b, 1) = 1/4: 1/2 log(4/3) + 1/4 log(2/3) + 1/4 log 2
    bits = explore.mutual_information(list('aabb'), [0, 0, 0, 1])
    assert bits == pytest.approx(0.3112781, abs=1e-7)
    rng = np.random.default_rng(0)
    classes, choices = rng.integers(6, size=5000), rng.integers(8, size=5000)
    bits, chance = explore.beside_chance(classes, choices)
    assert 0 < bits < 0.02 and abs(bits - chance) < 0.005
    bits, chance = explore.beside_chance(classes, classes)
    assert bits > 2.5 and 0 < chance < 0.02


def test_layer_by_hand():
    """Two choices, nine tokens: one is there five times and goes to choice 0 for three quarters."""
    gate = np.array([[1, 0], [1, 0], [1, 0], [0.5, 0.5], [0.25, 0.75], [0, 1], [0, 1], [0, 1],
                     [0, 0]])
    ids = np.array([7, 7, 7, 7, 7, 8, 8, 8, 9])
    classes = np.array(['digits'] * 5 + ['punctuation'] * 4)
    layer = explore.describe_layer(gate, ids, classes, np.array(['a'] * 6 + ['b'] * 3))
    assert layer['served'] == [[[7, 5, 0.75, [0, 1, 2]]], [[7, 5, 0.25, [4, 3, 0]]]]
    assert layer['load'] == pytest.approx([3.75 / 9, 4.25 / 9])
    assert layer['chosen'] == pytest.approx([5 / 9, 5 / 9])
    assert layer['heaviest'] == pytest.approx([4 / 9, 4 / 9])            # the last token takes none
    assert layer['gate_bits'] == pytest.approx((1 + 0.8112781) / 9)
    heat = {(i // 7, name): row for i, (name, *row) in enumerate(layer['heat'])}
    assert heat[0, 'a'] == [6, [4, 2]] and heat[1, 'b'] == [3, [0, 2]]
    assert heat[0, 'digits'] == [5, [4, 1]] and heat[0, 'punctuation'] == [1, [0, 1]]


# ---- The page -----------------------------------------------------------------------------------

@pytest.mark.parametrize('config, args, layers', [
    ('moep', [], ['shrink', 'parallel.0', 'parallel.1', 'grow']),
    ('moduleformer', [], ['blocks.0.att', 'blocks.0.ffd']),
    ('papaformer', ['--connection=gumbel1', '--hard=False'], ['parallel.0']),
    ('selfmoe', ['--gate=matrix'], ['gate.1', 'gate.2'])])
def test_numbers_are_the_models(run, smoke, data_dir, config, args, layers):
    folder = smoke(f'config/{config}.py', *args)
    run('tools.explore', folder, '--tokens=300', here=True)
    data, = page_data(folder / 'explore.html')
    assert [layer['name'] for layer in data['layers']][:len(layers)] == layers
    sets = data['sets']
    assert len(data['loss']) == 300
    each = 300 // len(sets)
    for n, name in enumerate(sets):
        ids = load_bin(data_dir / name, 'val')[:each].tolist()
        assert data['ids'][n * each:(n + 1) * each] == ids
        check_numbers(folder, data, ids, (0, 1, 63, 64, 65, each - 1), n * each)


def test_a_text_beside_the_validation_set(run, moep_run, data_dir, tmp_path):
    """A long one is read in windows, the last of one token; the statistics are those of the set."""
    text = tmp_path / 'text.txt'
    text.write_text('The dogs near the tree are happy. ' * 40)
    args = [moep_run, '--tokens=321', f'--text={text}', f'--out={tmp_path}/a.html']
    run('tools.explore', *args, here=True)
    run('tools.explore', moep_run, '--tokens=321', f'--out={tmp_path}/b.html', here=True)
    (data,), (plain,) = page_data(tmp_path / 'a.html'), page_data(tmp_path / 'b.html')
    tokenizer = load_tokenizer(data_dir / 'toy_stories')
    ids = [tokenizer.eot, *tokenizer.encode(text.read_text())][:321]
    assert data['ids'] == ids + plain['ids']
    assert len(data['loss']) == 321 and data['studied'] == 321
    check_numbers(moep_run, data, ids, (0, 1, 64, 320))
    for a, b in zip(data['layers'], plain['layers']):
        assert a['gates'] != b['gates']
        assert dict(a, gates=0, width=0) == dict(b, gates=0, width=0)


def test_two_runs_and_hostile_text(run, moep_run, smoke, tmp_path):
    other, out = smoke('config/moep.py', '--top_k=1', '--n_block=2'), tmp_path / 'a.html'
    run('tools.explore', moep_run, other, f'--prompt={HOSTILE}', f'--out={out}', here=True)
    one, two = page_data(out)
    assert one['ids'] == two['ids'] and {layer['choices'] for layer in two['layers']} == {2, 4}
    assert load_tokenizer(moep_run).decode(one['ids'][1:len(one['loss'])]) == HOSTILE
    assert out.read_text().count('</script>') == 2


@pytest.mark.slow
@in_a_browser
def test_page_in_a_browser(run, moep_run, tmp_path):
    """Point at a token; keys, tabs and the legend, without an error. 64 choices look different."""
    page = tmp_path / 'a.html'
    run('tools.explore', moep_run, f'--out={page}', here=True)
    (hover, looks), console = browse(page.read_text(), """
        const [run] = shown;
        run.spans[3].dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
        const hover = run.detail.innerText;
        run.tabs.lastChild.click();                          // the loss
        run.tabs.firstChild.click();
        run.legend.querySelector('button').click();
        for (const key of ['ArrowDown', 'ArrowRight', 'n', 'Escape'])
            document.dispatchEvent(new KeyboardEvent('keydown', { key }));
        addRules(64);
        const looks = [...Array(64).keys()].map(c => {
            const style = getComputedStyle(make(document.body, 'i', choiceClass(c)));
            return style.backgroundColor + style.backgroundImage;
        });
        return [hover, new Set(looks).size];""", tmp_path)
    data, = page_data(page)
    assert console == [] and looks == 64 and f"loss {data['loss'][3]:.3f} nats" in hover
    for layer in data['layers']:
        assert layer['name'] in hover
        assert all(f'{c}:{percent}' in hover for c, percent in unpack(layer, 3).items())
