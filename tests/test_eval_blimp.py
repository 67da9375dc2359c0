"""eval_blimp.py: scores by hand, batches against single sentences, and rules for pairs."""

import json
import math
import random
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn

import eval_blimp
import prepare
from eval_blimp import Sentences, evaluate, leave_out_long, read_pairs, score_sentences
from moep import MoEP, MoEPConfig
from plumbing.cli import UserError
from plumbing.settings import import_model
from plumbing.tokenizer import (
    choose_tokenizer, chunk_tokenizer, copy_tokenizer, load_tokenizer)

BYTES = choose_tokenizer('bytes')
CHUNKS = chunk_tokenizer(BYTES, 3)
EOT = BYTES.eot
SMALL = dict(vocab_size=257, block_size=64, n_layer=2, n_head=2, n_embd=16)
FORMS = dict(
    moep=('moep', dict(n_parallel=2, n_head_parallel=1, n_embd_parallel=16, n_block=2, n_expert=2,
                       top_k=1, dropout=0.1)),
    gpt2=('moep', dict(n_parallel=0)),
    papaformer=('papaformer', dict(path_embd=[8, 8], path_head=[1, 1], connection='gumbel1')),
    moduleformer=('moduleformer', dict(n_att=3, d_att=8, n_ffd=3, d_ffd=8, query_block=8)),
    selfmoe=('selfmoe', dict(n_kv_head=1, n_expert=3, top_k=2)),
    stlm_depth=('stlm_depth', dict(n_kv_head=1, ffn_hidden=16)),
    chunks=('stlm', dict(vocab_size=259, block_size=256, n_kv_head=1, ffn_hidden=16, byte_limit=3,
                         byte_embd=8, byte_layer=1, byte_head=2)))
WORDS = 'the a cat dog man woman sees see likes like himself herself that who never ever'.split()
TEXT = 'The cat sees the dog.\n\nThe dogs see the cat.\n\nThe end.\n'


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
    """{text: score}, as the tool finds it."""
    paradigms = {'p': eval_blimp.Paradigm(None, None, [(('f', 1), text, text) for text in texts])}
    sentences = Sentences(paradigms, tokenizer, mode)
    scores = score_sentences(model, sentences, budget)
    return {text: float(scores[sentences.number[text]]) for text in texts}


class Bigrams(nn.Module):
    """p(next | this) from a table; what is not in it has probability 2^-20."""

    def __init__(self, table, block_size=64):
        super().__init__()
        self.config = SimpleNamespace(block_size=block_size)
        self.p = torch.full((257, 257), 2.0 ** -20)
        for (a, b), p in table.items():
            self.p[a if isinstance(a, int) else ord(a), ord(b)] = p

    def forward(self, idx, targets=None, reduction='mean'):
        nats = -self.p[idx, targets.clamp(min=0)].log()
        return None, nats.masked_fill(targets < 0, 0.0), {}


HALVES = Bigrams({(EOT, ' '): 1 / 2, (EOT, 'a'): 1 / 16, (' ', 'a'): 1 / 2, (' ', 'b'): 1 / 4,
                  ('a', 'b'): 1 / 4, ('b', 'a'): 1 / 2, ('a', 'a'): 1 / 2})


def tiny(form, seed=0):
    """A model of random weights, far from uniform, so that an error would show."""
    torch.manual_seed(seed)
    name, keys = FORMS[form]
    module = import_model(name)
    model = module.Model(module.Config(**SMALL | keys))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5 if p.dim() > 1 else 1)
    return model.eval()


# ---- Scores by hand -----------------------------------------------------------------------------

@pytest.mark.parametrize('mode, probabilities', [
    # [end-of-text] + ' ab': p(' ') p(a | ' ') p(b | a), the sentence's first token included
    ('harness', dict(ab=1 / 16, ba=1 / 16, aab=1 / 32, b=1 / 8)),
    # 'ab' as it stands: p(b | a) alone
    ('babylm2025', dict(ab=1 / 4, ba=1 / 2, aab=1 / 8, b=1))])
def test_scores_by_hand(mode, probabilities):
    scores = score_texts(HALVES, [*probabilities], mode=mode)
    expected = {text: math.log(p) for text, p in probabilities.items()}
    assert scores == pytest.approx(expected, abs=1e-6)


def test_sums_are_float64():
    """In float32 there is no number between 2^24 + 2 and 2^24 + 4."""
    def model(idx, targets, reduction):
        return None, torch.where(idx == EOT, 2.0 ** 24, 1.0) * (targets >= 0), {}
    assert score_texts(model, ['abc'])['abc'] == -(2 ** 24 + 3)


def test_ties_and_identical_pairs_go_to_the_good_sentence(tmp_path):
    # ab and ba are a tie in harness mode: 1/16 each; aa is better than both
    files = dict(tie=[('ab', 'ba'), ('ba', 'ab')], same=[('ab', 'ab'), ('aa', 'ab')],
                 wrong=[('ab', 'aa')])
    paradigms = read_pairs(write_pairs(tmp_path / 'd', files))
    sentences = Sentences(paradigms, BYTES)
    result = evaluate(paradigms, sentences, score_sentences(HALVES, sentences))
    column = lambda key: {name: r[key] for name, r in result.items()}
    assert column('accuracy') == dict(tie=100.0, same=100.0, wrong=0.0)
    assert column('identical') == dict(tie=0, same=1, wrong=0)
    assert column('ties') == dict(tie=2, same=0, wrong=0)
    assert not any(r['close'] for r in result.values())  # a tie is no close call: it stays a tie
    near = np.where(np.arange(len(sentences.ids)) == sentences.number['ab'], -1e-5, 0.0)
    assert evaluate(paradigms, sentences, near)['wrong']['close'] == 1


def test_shorter_sentence_baseline(tmp_path):
    files = {'p': [('aa', 'aaa'), ('aaa', 'aa'), ('aa', 'ab'), ('a', 'aaa')]}    # 1 + 0 + 1/2 + 1
    paradigms = read_pairs(write_pairs(tmp_path / 'd', files))
    for mode in ('harness', 'babylm2025'):
        sentences = Sentences(paradigms, BYTES, mode=mode)
        result = evaluate(paradigms, sentences, np.zeros(len(sentences.ids)))
        assert result['p']['shorter'] == 62.5


@pytest.mark.parametrize('mode, longest', [('harness', 6), ('babylm2025', 8)])
def test_a_pair_that_is_too_long(tmp_path, capsys, mode, longest):
    """At block_size 7: all but the last letter are read, with end-of-text and a space before them
    or without."""
    pairs = [('a', 'b'), ('a' * longest, 'a'), ('a', 'a' * (longest + 1))]
    paradigms = read_pairs(write_pairs(tmp_path / 'd', {'p': pairs, 'q': pairs[2:]}))
    sentences = Sentences(paradigms, BYTES, mode=mode)
    sentences.context = 7
    message = (r'2 of 4 pairs are too long, the first is \S+p\.jsonl:3 '
               r'\(needs 8 tokens of context, block_size is 7\).*--skip_long')
    with pytest.raises(UserError, match=message):
        leave_out_long(paradigms, dict(bytes=sentences), skip_long=False)
    assert leave_out_long(paradigms, dict(bytes=sentences), skip_long=True) == 2
    assert 'q is left out' in capsys.readouterr().out
    assert list(paradigms) == ['p']
    assert [good for _, good, _ in paradigms['p'].pairs] == ['a', 'a' * longest]
    assert max(sentences.width[rows].max() for rows in sentences.batches(100)) == 7


# ---- Batches ------------------------------------------------------------------------------------

def one_by_one(model, text, mode, tokenizer=BYTES):
    """The plain way: one sentence, no padding, logits' own log-probabilities."""
    end = tokenizer.end
    ids = end + tokenizer.encode(' ' + text) if mode == 'harness' else tokenizer.encode(text)
    x = torch.tensor([ids])
    y = torch.tensor([ids[1:] + [-1]])
    y[:, :len(end) - 1] = -1
    y[y == tokenizer.pad] = -1
    with torch.no_grad():
        return -model(x, y, reduction='none')[1].double().sum().item()


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['harness', 'babylm2025'])
@pytest.mark.parametrize('form', FORMS)
def test_batched_equals_one_by_one(form, mode):
    texts = sorted({s for pair in random_pairs(30) for s in pair})
    tokenizer = CHUNKS if form == 'chunks' else BYTES
    model = tiny(form)
    expected = {text: one_by_one(model, text, mode, tokenizer) for text in texts}
    assert len({round(v, 3) for v in expected.values()}) > 30
    for budget in (1, 300, 100_000):
        scores = score_texts(model, texts, tokenizer, mode, budget)
        assert scores == pytest.approx(expected, abs=1e-4)


def test_batches_keep_to_their_budget_and_hold_everything():
    pairs = [(('f', 1), *pair) for pair in random_pairs(100)]
    paradigms = {'p': eval_blimp.Paradigm(None, None, pairs)}
    sentences = Sentences(paradigms, BYTES)
    batches = list(sentences.batches(200))
    assert sorted(np.concatenate(batches)) == list(range(len(sentences.ids)))
    assert all(len(rows) * sentences.width[rows].max() <= 200 for rows in batches)


# ---- Groups -------------------------------------------------------------------------------------

def test_groups_join_what_is_spelt_twice(tmp_path):
    row = lambda term, field: dict(sentence_good='a', sentence_bad='b', linguistics_term=term,
                                   field=field)
    paradigms = read_pairs(write_pairs(tmp_path / 'd', dict(
        x=[row('s-selection', 'syntax')],
        y=[row('argument_structure', 'syntax/semantics')] * 3,
        z=[row('binding', 'syntax_semantics')])))
    names = {(heading, name): members for heading, name, members in eval_blimp.groups(paradigms)}
    assert names['', 'overall'] == ['x', 'y', 'z']
    assert names['field', 'syntax_semantics'] == ['y', 'z']
    assert names['phenomenon', 'argument_structure'] == ['x', 'y']
    # each paradigm counts once, not each pair
    assert eval_blimp.mean(dict(x=100, y=0, z=50), ['x', 'y', 'z']) == 50


def test_published_columns():
    columns = eval_blimp.published_columns(['wh_island'])
    overall = {name: round(sum(c.values()) / len(c), 1) for name, c in columns.items()}
    assert all(len(c) == 67 for c in columns.values())
    # as the authors give them
    assert overall == {'5-gram': 61.2, 'LSTM': 69.8, 'GPT-2': 83.0, 'human': 88.6}
    assert eval_blimp.published_columns(['wh_island', 'a_toy_paradigm']) == {}


# ---- The command --------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """Two run folders with checkpoints, as train.py leaves them."""
    root = tmp_path_factory.mktemp('runs')
    (root / 'text.txt').write_text(TEXT)
    prepare.main(['text', '--name', 'set', '--input', str(root / 'text.txt'), '--tokenizer',
                  'bytes', '--out', str(root)])
    tokenizer = load_tokenizer(root / 'set').hash
    for form in ('moep', 'gpt2'):
        (root / form).mkdir()
        copy_tokenizer(root / 'set', root / form)
        for name, step in (('ckpt', 20), ('ckpt_2K', 2), ('ckpt_10K', 10)):
            model = tiny(form, seed=step)
            state = dict(model='moep', config=asdict(model.config), settings={}, iter=step,
                         tokenizer=tokenizer, weights=model.state_dict(), words=1000.0 * step,
                         adapted=[], frozen=[])
            torch.save(state, root / form / f'{name}.pt')
    return root


@pytest.fixture
def call(run):
    def call(*args):
        return run('eval_blimp.py', *args, '--device', 'cpu', here=True).stdout
    return call


def test_one_checkpoint(call, runs, tmp_path):
    names = ('wh_island', 'transitive', 'causative')
    files = {name: random_pairs(10, seed) for seed, name in enumerate(names)}
    data = write_pairs(tmp_path / 'd', files)
    out = call(runs / 'moep', '--data', data, '--paradigms', '--json', tmp_path / 'x.json')
    for word in ('30 pairs', '3 paradigms', 'overall', 'shorter', '5-gram', 'LSTM', 'GPT-2',
                 'human', 'wh_island', '78.9'):
        assert word in out
    run, = json.loads((tmp_path / 'x.json').read_text())['runs']
    accuracies = []
    model = tiny('moep', 20)
    score = lambda text: one_by_one(model, text, 'harness')
    for name, pairs in files.items():
        r = run['paradigms'][name]
        right = [score(good) >= score(bad) for good, bad in pairs]
        assert [good >= bad for good, bad in zip(r['good'], r['bad'])] == right
        assert r['lines'] == list(range(1, 11))
        accuracies.append(100 * np.mean(right))
    assert run['overall'] == pytest.approx(np.mean(accuracies))
    others = write_pairs(tmp_path / 'e', {**files, 'mine': random_pairs(5)})
    plain = call(runs / 'moep', '--data', others)
    assert 'human' not in plain and 'wh_island' not in plain     # not BLiMP; no --paradigms


def test_mode_and_groups_reach_the_file(call, runs, tmp_path):
    areas = dict(p='syntax', q='syntax', r='semantics')
    rows = {}
    for i, (name, area) in enumerate(areas.items()):
        about = dict(UID=name, field=area, linguistics_term=f'of {name}')
        rows[name] = [dict(sentence_good=g, sentence_bad=b, **about) for g, b in random_pairs(9, i)]
    data = write_pairs(tmp_path / 'd', rows)
    call(runs / 'moep', '--data', data, '--mode', 'babylm2025', '--json', tmp_path / 'x.json')
    run, = json.loads((tmp_path / 'x.json').read_text())['runs']
    right = {name: run['paradigms'][name]['accuracy'] for name in areas}
    model = tiny('moep', 20)
    expected = [one_by_one(model, row['sentence_good'], 'babylm2025') for row in rows['p']]
    assert run['paradigms']['p']['good'] == pytest.approx(expected, abs=1e-4)
    assert len(set(right.values())) > 1
    fields = dict(semantics=right['r'], syntax=(right['p'] + right['q']) / 2)
    assert run['fields'] == pytest.approx(fields)
    assert run['phenomena'] == pytest.approx({f'of {name}': right[name] for name in areas})


def test_a_pair_too_long_for_one_model_is_left_out_for_all(call, runs, tmp_path):
    config = MoEPConfig(**SMALL | dict(block_size=16), n_parallel=0)
    state = torch.load(runs / 'gpt2/ckpt.pt', weights_only=True)
    short = runs / 'gpt2/ckpt_short.pt'
    torch.save(dict(state, config=asdict(config), weights=MoEP(config).state_dict()), short)
    data = write_pairs(tmp_path / 'd', {'p': [('a', 'b'), ('a', 'b' * 20)]})
    args = [runs / 'gpt2', short, runs / 'moep', '--data', data]
    printed = call(*args, '--skip_long', '--json', tmp_path / 'x.json')
    assert '1 of 2 pairs are left out' in printed and ' in 1 paradigm, ' in printed
    result = json.loads((tmp_path / 'x.json').read_text())
    assert result['skipped'] == 1
    assert [run['paradigms']['p']['lines'] for run in result['runs']] == [[1]] * 3


def test_learning_curve(call, runs, tmp_path):
    """Three checkpoints of one run, in the order of their words, and one of another."""
    data = write_pairs(tmp_path / 'd', {'p': random_pairs(10)})
    checkpoints = [*sorted((runs / 'moep').glob('*.pt')), runs / 'gpt2']
    printed = call(*checkpoints, '--data', data, '--json', tmp_path / 'x.json')
    order = [(run['folder'], run['iter'])
             for run in json.loads((tmp_path / 'x.json').read_text())['runs']]
    assert order == [*((str(runs / 'moep'), i) for i in (2, 10, 20)), (str(runs / 'gpt2'), 20)]
    assert all(f'({i})' in printed for i in (1, 2, 3, 4)) and '10K words' in printed
