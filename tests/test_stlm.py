"""stlm.py against a slow version from LLaMA's definitions and section 5.2, one position at a time;
its streams of chunks, pauses and sentences, from text and back; its dropout schedule."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

import plumbing.tokenizer as tokenizers
import stlm
import test_contract
from oracles import attention, compare, rms, swiglu
from plumbing.bins import load_bin, val_batches
from plumbing.bpe import train_bpe
from plumbing.chunks import SENTENCES, chunk_tokenizer, pause_tokenizer, sentence_tokenizer
from plumbing.tokenizer import load_tokenizer
from prepare import write_data_set
from test_contract import assert_one_graph, compile_and_record, pair

SMALL = dict(block_size=16, n_layer=3, n_head=4, n_kv_head=2, ffn_hidden=8)
BYTES = dict(SMALL, n_layer=2, byte_layer=2)
SHARES = [dict(n_kv_head=1), dict(share='ffn'), dict(share='all'), dict(share='ffn', lora_rank=2),
          dict(share='all', lora_rank=3, n_kv_head=4), dict(share='ffn', share_group=2),
          dict(share='all', share_group=2, lora_rank=2)]  # of three layers: groups of two and one


def make(**changes):
    """A small model in training mode. With byte_limit or decoder: byte-level."""
    is_bytes = {'byte_limit', 'decoder'} & {*changes}
    name, sizes = ('stlm_bytes', BYTES) if is_bytes else ('stlm', SMALL)
    return test_contract.make(name, **{**sizes, **changes}).train()


# ---- The slow version ----------------------------------------------------------------------------

def transformer(x, layers, norm_f, H, G, **places):
    """Pre-norm blocks and the final norm. Layer: (norm, qkv, proj, norm, fc, down)."""
    for norm_1, qkv, proj, norm_2, fc, down in layers:
        heads = attention([rms(v, norm_1) for v in x], qkv, H, G, **places)
        x = [v + proj @ u for v, u in zip(x, heads)]
        x = [v + swiglu(rms(v, norm_2), fc, down) for v in x]
    return [rms(v, norm_f) for v in x]


def core(model, x):
    """All layers, written out: layer i has its group's matrix plus its own low-rank product, if
    any."""
    c = model.config
    layers = []
    group = -1
    for i in range(c.n_layer):
        begins = i % c.share_group == 0 if c.share_group else i == 0
        group += begins
        one = group if c.share == 'all' else i
        a, f = model.attention[one], model.ffn[i if c.share == 'none' else group]
        maps = dict(qkv=a.qkv.weight, proj=a.proj.weight, fc=f.fc.weight, down=f.down.weight)
        if c.lora_rank:
            for name, own in model.adapters[i].items():
                maps[name] = maps[name] + own.up.weight @ own.down.weight
        qkv, proj, fc, down = maps.values()
        layers.append((a.norm.weight, qkv, proj, model.norm[one].weight, fc, down))
    return transformer(x, layers, model.norm_f.weight, c.n_head, c.n_kv_head)


def small(part, x, reads):
    """The byte encoder or decoder over the slots of one chunk: no rotary positions."""
    layers = [(a.norm.weight, a.qkv.weight, a.proj.weight, n.weight, f.fc.weight, f.down.weight)
              for a, n, f in zip(part.attention, part.norm, part.ffn)]
    H = part.config.n_head
    x = [v + p for v, p in zip(x, part.position)]
    return transformer(x, layers, part.norm_f.weight, H, H, positions=[0] * len(x), reads=reads)


def oracle(model, idx):
    """-> logits (B, T, V)."""
    c, ends = model.config, model.ends
    wte = ends.wte.weight
    if not c.byte_limit:
        states = [core(model, [wte[i] for i in row]) for row in idx]
        return torch.stack([torch.stack([wte @ h for h in row]) for row in states])
    L, V, d = c.byte_limit + 1, c.vocab_size, c.byte_embd
    rows = []
    for row in idx.tolist():
        T, vectors = len(row), [ends.start]
        for i in range(0, T - L + 1, L):                 # whole chunks
            read = [s for s in row[i:i + L] if s != V - 1]
            h = small(ends.encoder, [wte[s] for s in read], lambda t: range(len(read)))
            vectors.append(ends.pool.weight @ (sum(h) / len(h)))
        logits = []
        for n, state in enumerate(core(model, vectors)):
            known = row[n * L:(n + 1) * L]
            spelled = min(L, len(known) + 1)
            x = [ends.spread.weight[j * d:(j + 1) * d] @ state for j in range(L)]
            if c.decoder == 'parallel':
                out = small(ends.decoder, x, lambda t: range(L))
            else:
                x = [v if j == 0 else v + wte[known[j - 1]] for j, v in enumerate(x[:spelled])]
                out = small(ends.decoder, x, lambda t: range(t + 1))
            for j in range(spelled):
                may = [*range(V - 3)] if j < L - 1 else []
                may += [V - 3] if j > 0 else [V - 2]
                logit = torch.full((V,), -math.inf, dtype=wte.dtype)
                logits.append(logit.index_put((torch.tensor(may),), (wte @ out[j])[may]))
        rows.append(torch.stack(logits[1:T + 1]))
    return torch.stack(rows)


@pytest.mark.parametrize('changes, T', [
    (SHARES[0], 5), (SHARES[3], 5), (SHARES[4], 5), (SHARES[5], 5), (SHARES[6], 5),
    (dict(decoder='causal'), 10), (dict(decoder='parallel'), 10), (dict(decoder='causal'), 2),
    (dict(decoder='parallel'), 12), (dict(decoder='causal', vocab_size=303), 10),
    (dict(SHARES[6], decoder='causal', n_layer=3, byte_limit=1, byte_layer=1), 6)], ids=str)
def test_oracle(changes, T):
    """Logits, loss and every gradient. Bytes end inside the first chunk, inside the third, at its
    end."""
    model = make(**changes)
    x, y = pair(model, 2, T)
    logits = oracle(model, x)
    assert torch.equal(model(x)[0].isinf(), logits.isinf())
    grads = compare(model, x, y, logits, {}, {}, atol=1e-9)
    if T > model.config.byte_limit:                      # else there is no whole chunk to encode
        assert all(grad.abs().max() > 1e-7 for grad in grads.values())


# ---- Streams of chunks ---------------------------------------------------------------------------

def texts():
    """Random UTF-8 of all planes, random ends of sentences, the cases that break tokenizers."""
    dice = random.Random(3)
    planes = [(0, 127), (0, 127), (128, 0x7ff), (0x800, 0xd7ff), (0xe000, 0xffff),
              (0x1f600, 0x1f64f), (0, 0x20)]

    def letter():
        return chr(dice.randint(*dice.choice(planes)))
    rows = [''.join(letter() for _ in range(dice.randint(1, 40))) for _ in range(20)]
    marks = [''.join(dice.choices('.!? \n"\')”a3é\t', k=dice.randint(1, 60))) for _ in range(60)]
    return [*rows, *marks, '', '\0', '\0\0a\0', 'x' * 300, 'ab' * 99 + '👩‍👩‍👧‍👦' * 20,
            '\r\n \t\x0b\x1b\x7f\x85', ' ' * 77, '<|endoftext|>', 'é', '.' * 300, '.)' * 99,
            '. ' * 99, '\n' * 5]


def bases():
    """Tokenizers whose tokens become chunks: single bytes, and words far longer than a chunk."""
    words = Counter(w for text in texts() for w in tokenizers.PATTERN.findall(text))
    vocabulary = train_bpe({word: 2 * n for word, n in words.items()}, 400)
    bpe = tokenizers.rank_tokenizer(tokenizers.ranks_blob(vocabulary))
    assert max(map(len, bpe.token_bytes)) > 12
    return [tokenizers.choose_tokenizer('bytes'), bpe]


@pytest.mark.parametrize('limit', [1, 5, 32])
@pytest.mark.parametrize('kind', ['chunks', 'sentences'])
def test_nothing_is_lost(kind, limit):
    """Text -> chunks -> text. A chunk holds bytes of one token, or tokens of one sentence, and as
    many as it may; then its end and padding. The model gives each symbol a probability."""
    for base in bases():
        if kind == 'chunks':
            tokenizer, V = chunk_tokenizer(base, limit), 259
        else:
            tokenizer, V = sentence_tokenizer(base, limit), base.n_vocab + 3
        assert tokenizer.n_vocab == V and tokenizer.end == [V - 2] + [V - 1] * limit
        symbols = list(tokenizer.end)
        for doc in texts():
            ids = tokenizer.encode(doc)
            units = [base.token_bytes[i] for i in base.encode(doc)]
            if kind == 'sentences':
                units = [base.encode(sentence) for sentence in SENTENCES.findall(doc)]
            parts = [[*unit[i:i + limit]] for unit in units for i in range(0, len(unit), limit)]
            chunks = [part + [V - 3] + [V - 1] * (limit - len(part)) for part in parts]
            assert ids == sum(chunks, []) and tokenizer.decode(ids) == doc
            symbols += ids + tokenizer.end
        assert tokenizer.decode(symbols) == ''.join(texts())
        shape = dict(byte_limit=limit, vocab_size=V, block_size=4 * (limit + 1))
        x, y = next(val_batches(np.array(symbols), shape['block_size'], 64, V - 1))
        assert make(dtype=torch.float32, **shape)(x, y, reduction='none')[1].isfinite().all()


# ---- Pauses and sentences (section 5.4) ----------------------------------------------------------

QUESTION = 'Ann has 3 red hats. She gets 4 more. How many hats does Ann have?\n'
PROBLEM = QUESTION + '3 + 4 = 7. The answer is 7.'


def test_pauses_follow_the_first_line():
    for base in bases():
        tokenizer = pause_tokenizer(base, 3)
        pause = base.n_vocab
        assert (tokenizer.n_vocab, tokenizer.pad, tokenizer.eot) == (pause + 1, pause, base.eot)
        for text in [*texts(), PROBLEM]:
            ids = tokenizer.encode(text)
            line, newline, rest = text.partition('\n')
            pauses = [pause] * 3 if newline else []
            assert ids == base.encode(line + newline) + pauses + base.encode(rest)
            assert tokenizer.decode(ids) == text


def test_a_document_in_parts_pauses_once(tmp_path):
    """Of 64 KB each: the first line ends in the first part, or in the third."""
    long = 'many words ' * 15000
    docs = [f'a\n{long}\nb', f'{long}\n{long}', long, 'a\nb']
    pairs = [('train', text) for text in docs] + [('val', 'x\ny')]
    write_data_set(tmp_path / 'd', pairs, bases()[1], ('pauses', 2))
    tokenizer, ids = load_tokenizer(tmp_path / 'd'), load_bin(tmp_path / 'd', 'train')
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.eot) + 1)[1:-1]
    assert sorted(part[:-1].tolist() for part in parts) == sorted(map(tokenizer.encode, docs))
    assert (ids == tokenizer.pad).sum() == 6


@pytest.mark.parametrize('text, sentences', [
    ('He said "No." (Why?) So', ['He said "No."', ' (Why?)', ' So']),
    ('It is 3.5 now.\nA.b', ['It is 3.5 now.\n', 'A.b']),
    ('a. \n\nb.  c. ', ['a. \n', '\nb.', '  c. ']),
    ('Wait... what', ['Wait...', ' what'])])
def test_where_sentences_end(text, sentences):
    assert SENTENCES.findall(text) == sentences


@pytest.mark.slow
def test_the_scripts_on_pauses_and_sentences(run, smoke, monkeypatch):
    """sample.py keeps the pauses of a prompt, and leaves its last sentence open."""
    prompts = []

    def generate(self, idx, *_):
        prompts.append(idx[0].tolist())
        return idx
    pauses, thoughts = smoke('config/stlm_pause.py'), smoke('config/stlm_thoughts.py')
    monkeypatch.setattr(stlm.STLM, 'generate', generate)
    for folder in (pauses, thoughts):
        done = run('sample.py', folder, f'--prompt={QUESTION}', here=True)
        assert done.stdout.strip() == QUESTION.strip()
    tokenizer = load_tokenizer(pauses)
    assert prompts[0] == [tokenizer.eot, *tokenizer.encode(QUESTION)]
    assert prompts[0][-10:] == tokenizer.pauses
    tokenizer = load_tokenizer(thoughts)
    ids = tokenizer.end + tokenizer.encode(QUESTION)
    assert prompts[1] == ids[:len(prompts[1])] and tokenizer.token_bytes[prompts[1][-1]] == b'\n'


# ---- Dropout -------------------------------------------------------------------------------------

RISING = dict(dropout=1.0, dropout_schedule='rising')    # the rate is what is done of the run


@pytest.mark.parametrize('schedule, rates', [
    ('constant', [0.2] * 8),
    ('early', [0.2] * 2 + [0.0] * 6),
    ('late', [0.0] * 2 + [0.2] * 6),
    ('linear', [0.2, 0.175, 0.15, 0.125, 0.1, 0.075, 0.05, 0.025]),
    ('rising', [0.0, 0.025, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175]),
    ('triangle', [0.0, 0.05, 0.1, 0.15, 0.2, 0.15, 0.1, 0.05]),
    ('triangles', [0.0, 0.2] * 4)])
def test_schedules(schedule, rates):
    model = make(dropout=0.2, dropout_schedule=schedule, dropout_phase=0.25)
    for n, rate in enumerate(rates):
        model.set_progress(n / 8)
        assert stlm.dropout_rates(model.config, n / 8)[schedule] == pytest.approx(rate)
        assert float(model.dropout.p) == pytest.approx(rate)


def test_dropout_rate():
    """A share p is zero, the rest grow by 1 / (1 - p), the gradient too; p = 0 changes nothing."""
    torch.manual_seed(0)
    x = torch.ones(300, 400, requires_grad=True)
    model = make(dtype=torch.float32, **RISING)
    for p in (0.3, 0.0, 0.75):
        model.set_progress(p)
        y = model.dropout(x)
        assert abs((y == 0).float().mean() - p) < 0.01
        assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)))
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)
    assert model.dropout.eval()(x) is x
    assert not any('dropout' in name for name in model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize('changes', [
    dict(share='ffn', lora_rank=2), dict(decoder='causal')], ids=str)
def test_a_schedule_compiles_once_and_in_one_graph(compile_model, changes):
    """As train.py does it: another rate at every step."""
    model = make(dtype=torch.float32, **RISING, **changes)
    x, y = pair(model, 2, 16)
    place = model.dropout.p.data_ptr()                   # where a captured graph would look
    compiled, graphs = compile_and_record(compile_model, model)
    exact = model(x, y)[1]
    for p in (0.0, 0.5, 0.9, 0.1, 0.0):
        model.set_progress(p)
        losses = torch.stack([compiled(x, y)[1] for _ in range(3)])
        if p == 0:
            assert torch.allclose(losses, exact, atol=1e-5)
        else:
            assert losses.std() > 1e-4
        assert model.dropout.p.data_ptr() == place
    assert_one_graph(graphs)
