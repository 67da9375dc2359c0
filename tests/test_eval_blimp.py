"""eval_blimp.py: scores by hand, batches against single sentences, rules for pairs, and what it says to
mistakes."""

import gzip
import importlib.util
import json
import math
import random
import shutil
import sys
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import eval_blimp
import prepare
from conftest import ROOT
from eval_blimp import Sentences, evaluate, leave_out_long, read_pairs, score_sentences
from moep import MoEP, MoEPConfig
from plumbing.checkpoint import load_checkpoint
from plumbing.cli import UserError
from plumbing.tokenizer import copy_tokenizer, load_tokenizer

EOT = 256
BYTES = SimpleNamespace(encode=lambda text: list(text.encode()), eot=EOT, n_vocab=257, end=[EOT], pad=-1)
CHUNKS = SimpleNamespace(encode=lambda text: [i for b in text.encode() for i in (b, 256, 258, 258)],
                         eot=257, n_vocab=259, end=[257, 258, 258, 258], pad=258)
TINY = dict(vocab_size=257, block_size=64, n_layer=2, n_head=2, n_embd=16, n_head_parallel=1,
            n_embd_parallel=16, n_block=2, n_expert=2, top_k=1, dropout=0.1)
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


def tiny_moep(form, seed=0):
    torch.manual_seed(seed)
    model = MoEP(MoEPConfig(**TINY, n_parallel=2 if form == 'moep' else 0))
    with torch.no_grad():                                # far from uniform, so that an error would show
        for p in model.parameters():
            p.mul_(5 if p.dim() > 1 else 1)
    return model.eval()


class ChunkModel(nn.Module):
    """A byte-level model in miniature: mean of a chunk's bytes, causal mean over chunks, causal inside a
    chunk."""

    def __init__(self, slots, d=16):
        super().__init__()
        torch.manual_seed(1)
        self.slots = slots
        self.config = SimpleNamespace(block_size=64 * slots)
        self.embed = nn.Embedding(259, d)
        self.core = nn.Linear(d, d)
        self.head = nn.Linear(d, 259)
        nn.init.normal_(self.head.weight, std=1.0)

    def forward(self, idx, targets=None, reduction='mean'):
        B, T = idx.shape
        assert T % self.slots == 0                                           # whole chunks
        assert (idx.view(B, -1, self.slots)[:, :, 0] != 258).all()           # none of them empty
        e = self.embed(idx).view(B, -1, self.slots, 16)
        real = (idx != 258).view(B, -1, self.slots, 1)
        chunk = (e * real).sum(2) / real.sum(2)                              # 0 / 0 for an empty chunk
        steps = torch.arange(1, chunk.size(1) + 1)[:, None]
        h = torch.tanh(self.core(chunk.cumsum(1) / steps))                   # (B, chunks, d)
        before = torch.cat((torch.zeros(B, 1, 16), h[:, :-1]), 1)[:, :, None]
        inside = before + e.cumsum(2)                            # slot t has read its chunk up to t
        inside = torch.cat((inside[:, :, :-1], h[:, :, None]), 2)            # the last opens the next chunk
        logits = self.head(inside.view(B, T, 16))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                               reduction='none')
        return None, loss.view(B, T), {}


# ---- Scores by hand -----------------------------------------------------------------------------


def test_harness_scores_by_hand():
    """[end-of-text] + ' ab': p(' ') p(a | ' ') p(b | a), the first token of the sentence included."""
    scores = score_texts(HALVES, ['ab', 'ba', 'aab', 'b'])
    assert scores['ab'] == pytest.approx(math.log(1 / 2 * 1 / 2 * 1 / 4), abs=1e-6)
    assert scores['ba'] == pytest.approx(math.log(1 / 2 * 1 / 4 * 1 / 2), abs=1e-6)
    assert scores['aab'] == pytest.approx(math.log(1 / 2 * 1 / 2 * 1 / 2 * 1 / 4), abs=1e-6)
    assert scores['b'] == pytest.approx(math.log(1 / 2 * 1 / 4), abs=1e-6)


def test_babylm2025_scores_by_hand():
    """'ab' as it stands: p(b | a) alone; a sentence of one token scores 0."""
    scores = score_texts(HALVES, ['ab', 'ba', 'aab', 'b'], mode='babylm2025')
    assert scores['ab'] == pytest.approx(math.log(1 / 4), abs=1e-6)
    assert scores['ba'] == pytest.approx(math.log(1 / 2), abs=1e-6)
    assert scores['aab'] == pytest.approx(math.log(1 / 2 * 1 / 4), abs=1e-6)
    assert scores['b'] == 0.0


def test_chunk_scores_by_hand():
    """Uniform over 259 symbols: bytes and ends of chunks are scored, padding and the first chunk are not."""
    model = ChunkModel(4)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    for mode, scored in (('harness', 3 * 2), ('babylm2025', 2)):     # ' ab' is three chunks, 'ab' two
        scores = score_texts(model, ['ab'], CHUNKS, mode)
        assert scores['ab'] == pytest.approx(-scored * math.log(259), abs=1e-4)


def test_sums_are_float64():
    """In float32 there is no number between 2^24 + 2 and 2^24 + 4."""
    def model(idx, targets, reduction):
        return None, torch.where(idx == EOT, 2.0 ** 24, 1.0) * (targets >= 0), {}
    assert score_texts(model, ['abc'])['abc'] == -(2 ** 24 + 3)


def test_ties_and_identical_pairs_go_to_the_good_sentence(tmp_path):
    # ab and ba are a tie in harness mode: 1/16 each; aa is better than both
    files = dict(tie=[('ab', 'ba'), ('ba', 'ab')], same=[('ab', 'ab'), ('aa', 'ab')], wrong=[('ab', 'aa')])
    folder = write_pairs(tmp_path / 'd', files)
    (folder / '._tie.jsonl').write_bytes(b'\x00\x05\x16\x07')         # a Mac leaves these on other disks
    paradigms = read_pairs(folder)
    sentences = Sentences(paradigms, BYTES)
    result = evaluate(paradigms, sentences, score_sentences(HALVES, sentences))
    assert {name: r['accuracy'] for name, r in result.items()} == dict(tie=100.0, same=100.0, wrong=0.0)
    assert {name: r['identical'] for name, r in result.items()} == dict(tie=0, same=1, wrong=0)
    assert {name: r['ties'] for name, r in result.items()} == dict(tie=2, same=0, wrong=0)
    assert not any(r['close'] for r in result.values())  # a tie is no close call: it stays a tie
    near = np.where(np.arange(len(sentences.ids)) == sentences.number['ab'], -1e-5, 0.0)
    assert evaluate(paradigms, sentences, near)['wrong']['close'] == 1


def test_shorter_sentence_baseline(tmp_path):
    files = {'p': [('aa', 'aaa'), ('aaa', 'aa'), ('aa', 'ab'), ('a', 'aaa')]}            # 1 + 0 + 1/2 + 1
    paradigms = read_pairs(write_pairs(tmp_path / 'd', files))
    for mode in ('harness', 'babylm2025'):
        sentences = Sentences(paradigms, BYTES, mode=mode)
        result = evaluate(paradigms, sentences, np.zeros(len(sentences.ids)))
        assert result['p']['shorter'] == 62.5


@pytest.mark.parametrize('mode, longest', [('harness', 6), ('babylm2025', 8)])
def test_a_pair_fits_or_is_told_or_left_out(tmp_path, capsys, mode, longest):
    """At block_size 7: all but the last letter are read, with end-of-text and a space before them or
    without."""
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
    assert list(paradigms) == ['p'] and [good for _, good, _ in paradigms['p'].pairs] == ['a', 'a' * longest]
    assert max(sentences.width[rows].max() for rows in sentences.batches(100)) == 7
    assert leave_out_long(paradigms, dict(bytes=sentences), skip_long=False) == 0
    sentences.context = 0
    with pytest.raises(UserError, match=r'2 of 2 pairs are too long.*\); a larger block_size reads them'):
        leave_out_long(paradigms, dict(bytes=sentences), skip_long=True)


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
@pytest.mark.parametrize('form', ['moep', 'gpt2', 'chunks'])
def test_batched_equals_one_by_one(form, mode):
    texts = sorted({s for pair in random_pairs(30) for s in pair})
    tokenizer = CHUNKS if form == 'chunks' else BYTES
    model = ChunkModel(4) if form == 'chunks' else tiny_moep(form)
    expected = {text: one_by_one(model, text, mode, tokenizer) for text in texts}
    assert len({round(v, 3) for v in expected.values()}) > 30
    for budget in (1, 300, 100_000):
        assert score_texts(model, texts, tokenizer, mode, budget) == pytest.approx(expected, abs=1e-4)


SAME = {'moduleformer_joint', 'moduleformer_math'}       # as moduleformer_lifelong and moduleformer


@pytest.mark.slow
@pytest.mark.parametrize('config', sorted({p.stem for p in ROOT.glob('config/*.py')} - SAME))
def test_batched_equals_one_by_one_for_every_config(smoke, data_dir, config):
    """Whatever models there are: two steps of training on their own toy data, then real pairs in both
    modes."""
    folder = smoke(f'config/{config}.py')
    model, _ = load_checkpoint(folder)
    tokenizer = load_tokenizer(folder)
    toy = read_pairs(data_dir / 'toy_blimp').values()
    pairs = [text for paradigm in toy for text in paradigm.pairs[0][1:]]
    for mode in ('harness', 'babylm2025'):
        expected = {text: one_by_one(model, text, mode, tokenizer) for text in pairs}
        assert score_texts(model, pairs, tokenizer, mode, 4096) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_order_of_files_and_batch_size_change_nothing(tmp_path):
    model = tiny_moep('moep')
    files = [random_pairs(25, seed=i) for i in range(3)]
    found = []
    for i, (names, budget) in enumerate([('abc', 700), ('cab', 700), ('abc', 64), ('bca', 100_000)]):
        renamed = dict(zip(names, files))                # read in another order
        paradigms = read_pairs(write_pairs(tmp_path / str(i), renamed))
        sentences = Sentences(paradigms, BYTES)
        result = evaluate(paradigms, sentences, score_sentences(model, sentences, budget))
        found.append([result[letter] for letter in names])
    assert found[0][0]['good'] == found[1][0]['good']    # to the last bit
    assert found[0][2]['bad'] == found[1][2]['bad']
    for other in found[1:]:
        for a, b in zip(found[0], other):
            assert a['accuracy'] == b['accuracy']
            assert a['good'] == pytest.approx(b['good'], abs=1e-4)


def test_batches_keep_to_their_budget_and_hold_everything():
    paradigms = {'p': eval_blimp.Paradigm(None, None, [(('f', 1), *pair) for pair in random_pairs(100)])}
    sentences = Sentences(paradigms, BYTES)
    batches = list(sentences.batches(200))
    assert sorted(np.concatenate(batches)) == list(range(len(sentences.ids)))
    assert all(len(rows) * sentences.width[rows].max() <= 200 for rows in batches)


# ---- Groups -------------------------------------------------------------------------------------


def test_groups_join_what_is_spelt_twice(tmp_path):
    row = lambda term, area: dict(sentence_good='a', sentence_bad='b', linguistics_term=term, field=area)
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


def test_a_baseline_for_each_tokenizer(tmp_path, capsys):
    """Of the first run that has it."""
    paradigms = read_pairs(write_pairs(tmp_path / 'd', {'p': [('a', 'b')]}))
    runs = []
    for tokenizer, shorter in (('one', 11.0), ('one', 11.0), ('other', 22.0)):
        found = dict(pairs=1, identical=0, ties=0, close=0, accuracy=50.0, shorter=shorter)
        runs.append(dict(checkpoint='x', folder='x', parameters=1, iter=1, words=1.0, overall=50.0,
                         tokenizer=tokenizer, paradigms={'p': found}))
    args = SimpleNamespace(data='d', mode='harness', paradigms=False)
    eval_blimp.show(paradigms, runs, 0, args)
    text = capsys.readouterr().out
    assert text.count('shorter(1)  shorter(3)') == 1 and '11.0        22.0' in text
    eval_blimp.show(paradigms, runs[:2], 0, args)
    assert '(1)     (2)  shorter' in capsys.readouterr().out


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
    prepare.main(['text', '--name', 'set', '--input', str(root / 'text.txt'), '--tokenizer', 'bytes',
                  '--out', str(root)])
    tokenizer = load_tokenizer(root / 'set').hash
    for form in ('moep', 'gpt2'):
        (root / form).mkdir()
        copy_tokenizer(root / 'set', root / form)
        for name, step in (('ckpt', 20), ('ckpt_2K', 2), ('ckpt_10K', 10)):
            model = tiny_moep(form, seed=step)
            state = dict(model='moep', config=asdict(model.config), settings={}, iter=step,
                         tokenizer=tokenizer, weights=model.state_dict(), words=1000.0 * step,
                         adapted=[], frozen=[], shards=0, token='')
            torch.save(state, root / form / f'{name}.pt')
    return root


@pytest.fixture
def call(monkeypatch, capsys):
    def call(*args):
        monkeypatch.setattr(sys, 'argv', ['eval_blimp.py', *map(str, args)])
        eval_blimp.main()
        return capsys.readouterr().out
    return call


def test_one_checkpoint(call, runs, tmp_path):
    names = ('wh_island', 'transitive', 'causative')
    files = {name: random_pairs(10, seed) for seed, name in enumerate(names)}
    data = write_pairs(tmp_path / 'd', files)
    out = call(runs / 'moep', '--data', data, '--paradigms', '--json', tmp_path / 'x.json', '--device', 'cpu')
    for word in '30 pairs|3 paradigms|overall|shorter|5-gram|LSTM|GPT-2|human|wh_island|78.9'.split('|'):
        assert word in out
    found = json.loads((tmp_path / 'x.json').read_text())
    run, = found['runs']
    accuracies = []
    model = tiny_moep('moep', 20)
    score = lambda text: one_by_one(model, text, 'harness')
    for name, pairs in files.items():
        r = run['paradigms'][name]
        right = [score(good) >= score(bad) for good, bad in pairs]
        assert [good >= bad for good, bad in zip(r['good'], r['bad'])] == right
        assert r['lines'] == list(range(1, 11))
        accuracies.append(100 * np.mean(right))
    assert run['overall'] == pytest.approx(np.mean(accuracies)) and not list(tmp_path.glob('*.tmp'))
    others = write_pairs(tmp_path / 'e', {**files, 'mine': random_pairs(5)})
    plain = call(runs / 'moep', '--data', others)
    assert 'human' not in plain and 'wh_island' not in plain     # not BLiMP; no --paradigms


@pytest.mark.parametrize('name', ['GPT-2', 'shorter'])
def test_a_run_that_is_named_like_a_column(call, runs, tmp_path, name):
    shutil.copytree(runs / 'moep', tmp_path / name)
    data = write_pairs(tmp_path / 'd', {'wh_island': random_pairs(10)})
    out = call(tmp_path / name, '--data', data, '--json', tmp_path / 'x.json')
    run, = json.loads((tmp_path / 'x.json').read_text())['runs']
    row = next(line.split() for line in out.splitlines() if line.startswith('overall'))
    assert float(row[2]) == run['overall'] and len(row) == 8     # its own, the baseline, four published


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
    model = tiny_moep('moep', 20)
    for name in areas:
        for side in ('good', 'bad'):
            texts = [row[f'sentence_{side}'] for row in rows[name]]
            expected = [one_by_one(model, text, 'babylm2025') for text in texts]
            assert run['paradigms'][name][side] == pytest.approx(expected, abs=1e-4)
    assert len(set(right.values())) > 1
    assert run['fields'] == pytest.approx(dict(semantics=right['r'], syntax=(right['p'] + right['q']) / 2))
    assert run['phenomena'] == pytest.approx({f'of {name}': right[name] for name in areas})


def test_the_byte_level_tokenizer_gives_whole_chunks(tmp_path):
    (tmp_path / 'text.txt').write_text(TEXT)
    prepare.main(['text', '--name', 'set', '--input', str(tmp_path / 'text.txt'), '--tokenizer', 'bytes',
                  '--chunks', '3', '--out', str(tmp_path)])
    tokenizer = load_tokenizer(tmp_path / 'set')
    assert (tokenizer.end, tokenizer.pad) == (CHUNKS.end, CHUNKS.pad)
    assert tokenizer.encode('ab') == CHUNKS.encode('ab')
    model = ChunkModel(4)
    for text, found in score_texts(model, ['The cat', 'a', 'The dogs see'], tokenizer).items():
        assert found == pytest.approx(one_by_one(model, text, 'harness', tokenizer), abs=1e-4)


def test_a_pair_too_long_for_one_model_is_left_out_for_all(call, runs, tmp_path):
    config = MoEPConfig(**{**TINY, 'block_size': 16}, n_parallel=0)
    state = torch.load(runs / 'gpt2' / 'ckpt.pt')
    short = runs / 'gpt2' / 'ckpt_short.pt'
    torch.save(dict(state, config=asdict(config), weights=MoEP(config).state_dict()), short)
    data = write_pairs(tmp_path / 'd', {'p': [('a', 'b'), ('a', 'b' * 20)]})
    args = [runs / 'gpt2', short, runs / 'moep', '--data', data]
    with pytest.raises(UserError, match='1 of 2 pairs are too long'):
        call(*args)
    told = call(*args, '--skip_long', '--json', tmp_path / 'x.json')
    assert '1 of 2 pairs are left out' in told and ' in 1 paradigm, ' in told
    found = json.loads((tmp_path / 'x.json').read_text())
    assert found['skipped'] == 1
    assert [run['paradigms']['p']['lines'] for run in found['runs']] == [[1]] * 3


@pytest.fixture
def curve(runs, tmp_path):
    """The arguments of a learning curve: three checkpoints of one run, one of another."""
    data = write_pairs(tmp_path / 'd', {'p': random_pairs(10)})
    checkpoints = [*sorted((runs / 'moep').glob('*.pt')), runs / 'gpt2']
    return [*checkpoints, '--data', data, '--json', tmp_path / 'x.json']


def check_curve(printed, runs, tmp_path):
    found = json.loads((tmp_path / 'x.json').read_text())['runs']
    order = [(r['folder'], r['iter']) for r in found]
    assert order == [*((str(runs / 'moep'), i) for i in (2, 10, 20)), (str(runs / 'gpt2'), 20)]
    assert all(f'({i})' in printed for i in (1, 2, 3, 4)) and '10K words' in printed


def test_learning_curve(call, curve, runs, tmp_path):
    check_curve(call(*curve), runs, tmp_path)


@pytest.mark.slow
def test_learning_curve_as_a_user_runs_it(run, curve, runs, tmp_path):
    done = run('eval_blimp.py', *curve, cwd=tmp_path)
    check_curve(done.stdout, runs, tmp_path)
    plot = [*curve, '--plot', tmp_path / 'curve.png']
    if importlib.util.find_spec('matplotlib'):           # only plots need it: it may not be installed
        run('eval_blimp.py', *plot, cwd=tmp_path, here=True)
        assert (tmp_path / 'curve.png').read_bytes().startswith(b'\x89PNG')
    else:
        assert 'pip install matplotlib' in run('eval_blimp.py', *plot, cwd=tmp_path, code=2).stderr


@pytest.mark.parametrize('text, message', [
    ('{"sentence_good": "a", "sentence_bad": "b"}\n{"sentence_good": "a", \n',
     r'p.jsonl:2: not a row of JSON'),
    ('\n{"sentence_good": "a"}\n', r"p.jsonl:2: no text in 'sentence_bad'"),
    (None, 'no .jsonl file in'),
])
def test_mistakes_are_one_line_and_exit_2(run, runs, tmp_path, text, message):
    (tmp_path / 'd').mkdir()
    if text:
        (tmp_path / 'd' / 'p.jsonl').write_text(text)
    done = run('eval_blimp.py', runs / 'moep', '--data', tmp_path / 'd', code=2)
    assert message in done.stderr and done.stderr.count('\n') == 1 and done.stdout == ''


@pytest.mark.parametrize('line, message', [
    ('[1, 2]', r":1: no text in 'sentence_good' \(the row has: no fields"),
    ('{"sentence_good": 3, "sentence_bad": "b"}', ":1: no text in 'sentence_good'"),
    ('{"sentence_good": "a", "sentence_bad": " "}', ':1: a sentence is empty'),
    ('{"sentence_good": "a", "sentence_bad": "\\ud800"}', ':1: not a row of JSON in Unicode'),
    ('{"a":' * 100_000, ':1: .*nested too deeply'),
    ('', 'there is no pair in it'),
])
def test_broken_rows(tmp_path, line, message):
    (tmp_path / 'p.jsonl').write_text(line + '\n')
    with pytest.raises(UserError, match=message):
        read_pairs(tmp_path)


def test_broken_files(tmp_path):
    (tmp_path / 'x.jsonl').mkdir()
    (tmp_path / 'x.gz').write_bytes(gzip.compress(b'{"sentence_good": "a", "sentence_bad": "b"}')[:-9])
    for data in (tmp_path, tmp_path / 'x.gz'):
        with pytest.raises(UserError, match='x.jsonl: Is a directory|x.gz: broken or unreadable'):
            read_pairs(data)


def test_other_mistakes(call, runs, tmp_path):
    data = write_pairs(tmp_path / 'd', {'p': [('a', 'b' * 70)]})
    for args, message in (
            ((tmp_path / 'none', '--data', data), 'there is no checkpoint'),
            ((runs / 'moep', runs / 'moep' / 'ckpt_9.pt', '--data', data), 'there is no checkpoint'),
            ((runs / 'moep', '--data', tmp_path / 'none'), 'there is no folder'),
            ((runs / 'moep', '--data', data), 'p.jsonl:1 .*block_size is 64'),
            ((runs / 'moep', '--data', data, '--batch_tokens', 2 ** 24 + 1), 'not between 0 and 16,777,216'),
            ((runs / 'moep', '--data', data, '--batch_tokens', -1), 'not between 0 and 16,777,216'),
            ((runs / 'moep', '--data', data, '--mode', 'other'), 'invalid choice'),
            ((runs / 'moep', '--data', data, '--device', 'abacus'), "device 'abacus'"),
            ((runs / 'moep', '--data', data, '--json', tmp_path / 'no' / 'x.json'), 'cannot be written'),
            ((runs / 'moep', '--data', data, '--plot', tmp_path / 'x.docx'), 'png')):
        with pytest.raises(UserError, match=message):
            call(*args)


def test_toys_are_made_in_data_alone(call, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match='there is no folder toy_blimp'):
        call(runs / 'moep', '--data', 'toy_blimp')
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_printed_before_a_file_is_written(call, runs, tmp_path, monkeypatch, capsys):
    def write_json(path, value):
        raise OSError('the disk is full')
    monkeypatch.setattr(eval_blimp, 'write_json', write_json)
    data = write_pairs(tmp_path / 'd', {'p': [('a', 'b')]})
    with pytest.raises(OSError):
        call(runs / 'moep', '--data', data, '--json', tmp_path / 'x.json')
    assert 'overall' in capsys.readouterr().out


def test_the_wrong_tokenizer_and_nan_are_noticed(call, runs, tmp_path):
    data = write_pairs(tmp_path / 'd', {'p': [('a', 'b')]})
    state = torch.load(runs / 'gpt2' / 'ckpt.pt')
    torch.save(dict(state, tokenizer='other'), runs / 'gpt2' / 'ckpt_other.pt')
    with pytest.raises(UserError, match='is not the one the run was trained with'):
        call(runs / 'gpt2' / 'ckpt_other.pt', '--data', data)
    state['weights']['wte.weight'][:] = 1e38             # finite, but its squares are not
    torch.save(state, runs / 'gpt2' / 'ckpt_nan.pt')
    with pytest.raises(UserError, match='nan'):
        call(runs / 'gpt2' / 'ckpt_nan.pt', '--data', data)
