"""Pauses and sentences (STLM, section 5.4): what the tokenizers write, what is a target."""

import numpy as np
import pytest

import stlm
from plumbing.bins import load_bin
from plumbing.chunks import SENTENCES, pause_tokenizer
from plumbing.tokenizer import load_tokenizer
from prepare import write_data_set
from test_stlm import bases, texts

QUESTION = 'Ann has 3 red hats. She gets 4 more. How many hats does Ann have?\n'
PROBLEM = QUESTION + '3 + 4 = 7. The answer is 7.'


# ---- Pauses --------------------------------------------------------------------------------------

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


# ---- Sentences -----------------------------------------------------------------------------------

@pytest.mark.parametrize('text, sentences', [
    ('He said "No." (Why?) So', ['He said "No."', ' (Why?)', ' So']),
    ('It is 3.5 now.\nA.b', ['It is 3.5 now.\n', 'A.b']),
    ('a. \n\nb.  c. ', ['a. \n', '\nb.', '  c. ']),
    ('Wait... what', ['Wait...', ' what'])])
def test_where_sentences_end(text, sentences):
    assert SENTENCES.findall(text) == sentences


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
