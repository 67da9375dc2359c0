"""Pauses and sentences (STLM, section 5.4): what the tokenizers write, what is a target."""

import math
import random

import numpy as np
import pytest
import torch

import stlm
from plumbing.machine import Machine
from plumbing.settings import Settings
from plumbing.tokenizer import SENTENCES, load_tokenizer, pause_tokenizer, sentence_tokenizer
from prepare import write_data_set
from test_stlm import bases, make, texts, whole
from train import Data, load_bin, score_batches, val_batches

QUESTION = 'Ann has 3 red hats. She gets 4 more. How many hats does Ann have?\n'
PROBLEM = QUESTION + '3 + 4 = 7. The answer is 7.'


def odd_texts():
    """Those of the byte-level model, and random ones of what ends a sentence."""
    dice = random.Random(4)
    letters = '.!? \n"\')”a3é\t'
    marks = [''.join(dice.choices(letters, k=dice.randint(1, 60))) for _ in range(60)]
    return [*texts(), *marks, PROBLEM, '.' * 300, '.)' * 99, '. ' * 99, '\n' * 5]


# ---- Pauses --------------------------------------------------------------------------------------


def test_pauses_follow_the_first_line():
    for base in bases():
        tokenizer = pause_tokenizer(base, 3)
        pause = base.n_vocab
        assert (tokenizer.n_vocab, tokenizer.pad, tokenizer.eot) == (pause + 1, pause, base.eot)
        for text in odd_texts():
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


def test_pauses_are_read_and_never_predicted(tmp_path):
    """In training and in scoring. The loss is that of a loop over all other tokens, and the
    solution's first token is predicted from the last pause."""
    pairs = [('train', PROBLEM)] * 9 + [('val', PROBLEM)] * 2
    write_data_set(tmp_path / 'd', pairs, bases()[1], ('pauses', 4))
    machine = Machine('cpu', 'float32')
    data = Data(Settings(model='stlm', data='d', data_dir=str(tmp_path), batch_size=2), machine)
    data.start(99)
    pause = data.pad
    x, y = data.batch(data.next_starts())
    assert (x == pause).any()
    assert torch.equal(y[:, :-1], x[:, 1:].masked_fill(x[:, 1:] == pause, -1))
    model = make(dtype=torch.float32, vocab_size=pause + 1, block_size=999).eval()
    ids = load_bin(tmp_path / 'd', 'val').tolist()
    logits, _, _ = model(torch.tensor([ids]))
    costs = []
    for t, i in enumerate(ids[1:]):
        if i != pause:
            costs.append(-logits[0, t].log_softmax(-1)[i].item())
    assert len(costs) == len(ids) - 1 - 2 * 4
    (x, y), = batches = list(val_batches(data.val['d'], len(ids), 2, pause))
    score = score_batches(model, batches, data.token_lengths, machine)
    assert score['loss'] == pytest.approx(sum(costs) / len(costs), rel=1e-5)
    n_bytes = 2 * len(PROBLEM)
    assert score['bits_per_byte'] == pytest.approx(sum(costs) / math.log(2) / n_bytes, rel=1e-5)
    last = (x[0] == pause).nonzero()[3]                  # the last pause of the first problem
    assert y[0, last] == data.tokenizer.encode('3')[0] and (y[0, last - 4:last] == -1).all()


# ---- Sentences -----------------------------------------------------------------------------------


@pytest.mark.parametrize('text, sentences', [
    ('He said "No." (Why?) So', ['He said "No."', ' (Why?)', ' So']),
    ('It is 3.5 now.\nA.b', ['It is 3.5 now.\n', 'A.b']),
    ('a. \n\nb.  c. ', ['a. \n', '\nb.', '  c. ']),
    ('Wait... what', ['Wait...', ' what'])])
def test_where_sentences_end(text, sentences):
    assert SENTENCES.findall(text) == sentences


@pytest.mark.parametrize('limit', [1, 5, 32])
def test_no_sentence_is_lost(limit):
    """Text -> chunks -> text. A chunk holds tokens of one sentence, and as many as it may."""
    for base in bases():
        tokenizer = sentence_tokenizer(base, limit)
        V = base.n_vocab + 3
        assert tokenizer.n_vocab == V and tokenizer.end == [V - 2] + [V - 1] * limit
        symbols = list(tokenizer.end)
        for text in odd_texts():
            ids = tokenizer.encode(text)
            assert whole(ids, V, limit) and tokenizer.decode(ids) == text
            symbols += ids + tokenizer.end
            want = []
            for sentence in SENTENCES.findall(text):
                tokens = base.encode(sentence)
                want += [tokens[i:i + limit] for i in range(0, len(tokens), limit)]
            rows = np.array(ids).reshape(-1, limit + 1).tolist()
            assert [row[:row.index(V - 3)] for row in rows] == want
        assert tokenizer.decode(symbols) == ''.join(odd_texts())


# ---- The scripts ---------------------------------------------------------------------------------


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
