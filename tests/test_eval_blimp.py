"""eval_blimp.py: scores by hand, batches against single sentences, and rules for pairs."""

import json
import random

import numpy as np
import pytest
import torch

import eval_blimp
import test_contract
from eval_blimp import Sentences, evaluate, read_pairs, score_sentences
from plumbing.checkpoint import load_checkpoint, run_tokenizer
from plumbing.chunks import chunk_tokenizer
from plumbing.tokenizer import choose_tokenizer

BYTES = choose_tokenizer('bytes')
EOT = BYTES.eot
WORDS = 'the a cat dog man woman sees see likes like himself herself that who never ever'.split()


def write_pairs(folder, files):
    """{paradigm: [(good, bad) or a whole row]} as a folder in BLiMP's format."""
    folder.mkdir(exist_ok=True)
    for name, pairs in files.items():
        rows = [p if isinstance(p, dict) else dict(sentence_good=p[0], sentence_bad=p[1], UID=name)
                for p in pairs]
        text = ''.join(json.dumps(row) + '\n' for row in rows)
        (folder / f'{name}.jsonl').write_text(text, encoding='utf-8')
    return folder


def random_pairs(n, seed=0):
    dice = random.Random(seed)
    sentence = lambda: ' '.join(dice.choices(WORDS, k=dice.randint(1, 9)))
    return [(sentence(), sentence()) for _ in range(n)]


def score_texts(model, texts, tokenizer=BYTES, mode='harness', budget=512):
    """{text: score}, as the tool finds it, in batches that keep to their budget."""
    paradigms = {'p': eval_blimp.Paradigm(None, [(text, text) for text in texts])}
    sentences = Sentences(paradigms, tokenizer, mode)
    for rows in sentences.batches(budget):
        assert len(rows) == 1 or len(rows) * sentences.width[rows].max() <= budget
    scores = score_sentences(model, sentences, budget)
    return {text: float(scores[sentences.number[text]]) for text in texts}


def make(name, **changes):
    """A model of bytes, with random weights far from uniform, so that an error would show."""
    settings = dict(dtype=torch.float32, vocab_size=257, block_size=64) | changes
    return test_contract.make(name, 0.3, **settings)


# ---- Scores by hand -----------------------------------------------------------------------------

def test_sums_are_float64():
    """In float32 there is no number between 2^24 + 2 and 2^24 + 4."""
    def model(idx, targets, reduction):
        return None, torch.where(idx == EOT, 2.0 ** 24, 1.0) * (targets >= 0), {}
    assert score_texts(model, ['abc'])['abc'] == -(2 ** 24 + 3)


def test_ties_and_identical_pairs_go_to_the_good_sentence(tmp_path):
    files = dict(tie=[('ab', 'ba'), ('ba', 'ab')], same=[('ab', 'ab'), ('aa', 'ab')],
                 wrong=[('ab', 'aa')])
    paradigms = read_pairs(write_pairs(tmp_path / 'd', files))
    sentences = Sentences(paradigms, BYTES)
    scores = np.array([-3.0 if text in ('ab', 'ba') else -2.0 for text in sentences.number])
    result = evaluate(paradigms, sentences, scores)
    assert [result[name]['accuracy'] for name in files] == [100, 100, 0]


# ---- Batches ------------------------------------------------------------------------------------

def one_by_one(model, text, mode, tokenizer=BYTES):
    """The plain way: one sentence, no padding, logits' own log-probabilities."""
    end = tokenizer.end
    ids = dict(harness=end + tokenizer.encode(' ' + text), babylm2025=tokenizer.encode(text),
               babylm2025_bos=end + tokenizer.encode(text))[mode]
    x = torch.tensor([ids])
    y = torch.tensor([ids[1:] + [-1]])
    y[:, :len(end) - 1] = -1
    y[y == tokenizer.pad] = -1
    with torch.no_grad():
        return -model(x, y, reduction='none')[1].double().sum().item()


@pytest.mark.parametrize('mode', ['harness', 'babylm2025', 'babylm2025_bos'])
@pytest.mark.parametrize('name', ['moep', 'moduleformer', 'stlm_depth', 'stlm_bytes'])
def test_batched_equals_one_by_one(name, mode):
    texts = sorted({'a', *(s for pair in random_pairs(30) for s in pair)})
    model, tokenizer = make(name), BYTES
    if name == 'stlm_bytes':
        model, tokenizer = make(name, vocab_size=259, block_size=256), chunk_tokenizer(BYTES, 3)
    expected = {text: one_by_one(model, text, mode, tokenizer) for text in texts}
    assert len({round(v, 3) for v in expected.values()}) > 30
    for budget in (1, 300, 100_000):
        scores = score_texts(model, texts, tokenizer, mode, budget)
        assert scores == pytest.approx(expected, abs=1e-4)


# ---- The command --------------------------------------------------------------------------------

def test_one_checkpoint(run, smoke, tmp_path):
    """Accuracy by paradigm, by phenomenon and overall, of scores that are found one by one."""
    folder = smoke('config/moep.py')
    model, ckpt = load_checkpoint(folder)
    terms = dict(p='s-selection', q='argument_structure', r='binding')   # two names of one
    pairs = {name: random_pairs(10, seed) for seed, name in enumerate(terms)}
    rows = {name: [dict(sentence_good=good, sentence_bad=bad, linguistics_term=terms[name])
                   for good, bad in pairs[name]] for name in terms}
    data = write_pairs(tmp_path / 'd', rows)
    run('eval_blimp.py', folder, '--data', data, '--device', 'cpu', '--json', tmp_path / 'x.json',
        here=True)
    result, = json.loads((tmp_path / 'x.json').read_text())['runs']
    accuracy = {}
    for name in terms:
        good, bad = ([one_by_one(model, text, 'harness', run_tokenizer(ckpt)) for text in texts]
                     for texts in zip(*pairs[name]))
        assert result['paradigms'][name]['good'] == pytest.approx(good, abs=1e-4)
        accuracy[name] = 100 * np.mean([g >= b for g, b in zip(good, bad)])
    assert result['overall'] == pytest.approx(np.mean([*accuracy.values()]))
    both = (accuracy['p'] + accuracy['q']) / 2
    means = dict(argument_structure=both, binding=accuracy['r'])
    assert result['phenomena'] == pytest.approx(means)
