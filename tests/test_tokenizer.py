"""Every kind of tokenizer, the files they travel in, and the BPE trainer against a slow oracle."""

import json
import random
from collections import Counter

import pytest
import regex
import tiktoken
import tiktoken.load

from plumbing import tokenizer as tokenizers
from plumbing.bpe import train_bpe
from plumbing.chunks import chunk_tokenizer
from plumbing.hf import byte_letters, hf_tokenizer
from plumbing.tokenizer import (EOT, PATTERN, choose_tokenizer, rank_tokenizer, ranks_blob)

TEXT = 'The cat sat on the mat. The dog sat on the cat; the cat was sad, ' \
    "and the dog wasn't. It's 1234 o'clock.\n\n  Ünïcode 日本語 🙂🙂\t\n"
ODD = ['', ' ', '\n', '\r\n', 'a\u2028b\x85c', '🙂👩\u200d👩\u200d👧', EOT, f'x{EOT}y',
       '\x00\x01', "don't  I'll", '   three   ', 'e\u0301 é']
BYTES = ranks_blob([bytes([b]) for b in range(256)])


def random_text(rng, n):
    points = [rng.randrange(0x20, 0x250 if rng.random() < .7 else 0x110000) for _ in range(n)]
    return ''.join(chr(p) for p in points if not 0xD800 <= p < 0xE000)


# ---- The BPE trainer ----------------------------------------------------------------------------

def naive_bpe(counts, vocab_size):
    """Recounts everything before each merge."""
    vocab = [bytes([b]) for b in range(256)]
    words = {tuple(w.encode()): n for w, n in counts.items()}
    while len(vocab) < vocab_size - 1:
        pairs = Counter()
        for word, n in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += n
        if not pairs:
            break
        (a, b), n = min(pairs.items(), key=lambda item: (-item[1], item[0]))
        if n < 2:
            break
        token = vocab[a] + vocab[b]
        if token not in vocab:
            vocab.append(token)
        new = vocab.index(token)
        merged = Counter()
        for word, n in words.items():
            out = []
            for i in word:
                if out and out[-1] == a and i == b:
                    out[-1] = new
                else:
                    out.append(i)
            merged[tuple(out)] += n
        words = merged
    return vocab


@pytest.mark.parametrize('seed', range(8))
def test_bpe_equals_naive(seed):
    rng = random.Random(seed)
    letters = 'ab' if seed < 3 else 'abcde é🙂'
    words = [''.join(rng.choice(letters) for _ in range(rng.randrange(1, 12))) for _ in range(400)]
    counts = Counter(PATTERN.findall(TEXT * 3 + ' '.join(words)))
    backwards = dict(reversed(counts.items()))           # the order of the words does not matter
    assert train_bpe(counts, 400) == train_bpe(backwards, 400) == naive_bpe(counts, 400)


def test_ranks_load_in_tiktoken_and_round_trip(tmp_path):
    vocab = train_bpe(Counter(PATTERN.findall(TEXT * 5)), 350)
    tokenizer = rank_tokenizer(ranks_blob(vocab))
    path = tmp_path / 'r.tiktoken'
    path.write_bytes(tokenizer.blob)
    ranks = tiktoken.load.load_tiktoken_bpe(str(path))
    theirs = tiktoken.Encoding('t', pat_str=PATTERN.pattern, mergeable_ranks=ranks,
                               special_tokens={EOT: len(ranks)})
    rng = random.Random(0)
    for text in [*ODD, TEXT, *(random_text(rng, 200) for _ in range(50))]:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode_ordinary(text) and tokenizer.decode(ids) == text
        assert tokenizer.eot not in ids
        assert b''.join(tokenizer.token_bytes[i] for i in ids) == text.encode()
    assert tokenizer.decode([200]) == '\ufffd' and tokenizer.decode([tokenizer.eot]) == ''


def test_a_long_text_is_encoded_in_parts():
    """The ids are those of the whole, since parts end where a pre-token does."""
    ranks = ranks_blob(train_bpe(Counter(PATTERN.findall(TEXT * 5)), 350))
    rng = random.Random(4)
    pieces = [TEXT, '  ', '\n', '\x1c', "'s"]
    text = ''.join(rng.choice([*pieces, random_text(rng, 20)]) for _ in range(9000))
    text += ' ' * 60000 + 'x' * 60000 + '\n' * 60000
    tokenizer = rank_tokenizer(ranks)
    assert tokenizer.encode(text) == tokenizer.encode_part(text)
    assert len(tokenizers.PARTS.findall(text)) > 5


@pytest.mark.parametrize('unit', [' ', '\n', 'a'])
def test_a_million_of_one_kind(unit):
    """tiktoken's own stack overflows."""
    text = unit * (10 ** 6 if unit.isspace() else 10 ** 5)
    tokenizer = rank_tokenizer(BYTES)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pattern_is_gpt2s():
    gpt2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d"
                         r'| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+')
    rng = random.Random(1)
    short_forms = "I'm he's we've they'd you'll don't '' 'sd"
    for text in [TEXT, short_forms, *(random_text(rng, 300) for _ in range(100))]:
        assert PATTERN.findall(text) == gpt2.findall(text)


# ---- The kinds ----------------------------------------------------------------------------------

def test_ranks_file(tmp_path):
    """Whose bytes are not in order, as GPT-2's are not."""
    vocab = train_bpe(Counter(PATTERN.findall(TEXT * 5)), 300)
    order = vocab[33:127] + vocab[:33] + vocab[127:]
    (tmp_path / 'gpt2.tiktoken').write_bytes(ranks_blob(order))
    tokenizer = choose_tokenizer(str(tmp_path / 'gpt2.tiktoken'))
    assert tokenizer.eot == len(order) and tokenizer.token_bytes == order + [b'']
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    other = rank_tokenizer(ranks_blob([*order[:-2], order[-1], order[-2]]))
    assert other.hash != tokenizer.hash


MERGES = (('h', 'e'), ('t', 'he'), ('Ġ', 'the'), ('Ġ', 'Ġ'))


def fake_neox(shuffle=False):
    """GPT-NeoX's tokenizer.json in small: NFC, tokens for runs of spaces, ids in any order."""
    pytest.importorskip('tokenizers')
    tokens = [*byte_letters(), *(a + b for a, b in MERGES)]
    ids = list(range(2, 2 + len(tokens)))
    if shuffle:
        random.Random(0).shuffle(ids)
    vocab = {EOT: 0, '<|padding|>': 1, **dict(zip(tokens, ids))}
    kind = dict(single_word=False, lstrip=False, rstrip=False)
    added = [dict(kind, id=0, content=EOT, special=True, normalized=False)]
    for i, n in enumerate([4, 3, 2]):
        added.append(dict(kind, id=len(vocab) + i, content=' ' * n, special=False, normalized=True))
    byte_level = dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True)
    spec = dict(version='1.0', added_tokens=added, normalizer={'type': 'NFC'}, decoder=byte_level,
                pre_tokenizer=byte_level, post_processor=byte_level,
                model=dict(type='BPE', vocab=vocab, merges=[' '.join(m) for m in MERGES]))
    return json.dumps(spec).encode(), len(vocab)


@pytest.mark.parametrize('shuffle', [False, True])
def test_neox(shuffle):
    blob, top = fake_neox(shuffle)
    spec = json.loads(blob)['model']['vocab']
    tokenizer = hf_tokenizer(blob)
    assert tokenizer.n_vocab == top + 3 and tokenizer.eot == 0

    def ids(*tokens):
        return [spec[t] for t in tokens]
    assert tokenizer.encode('the the') == ids('the', 'Ġthe')
    assert tokenizer.encode('h     the') == ids('h') + [top] + ids('Ġthe')   # four spaces and one
    assert tokenizer.encode('      ') == [top, top + 2]
    assert tokenizer.encode('e\u0301') == tokenizer.encode('é') == ids('Ã', '©')
    for text in [*(text for text in ODD[:-1] if EOT not in text), TEXT]:
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded) == text and not {0, 1} & set(encoded)


def test_bytes_and_hashes():
    tokenizer = choose_tokenizer('bytes')
    assert tokenizer.n_vocab == 257 and tokenizer.eot == 256
    assert tokenizer.encode('é!') == [0xC3, 0xA9, 33]
    hashes = [tokenizer.hash, rank_tokenizer(BYTES).hash,
              chunk_tokenizer(tokenizer, 4).hash, chunk_tokenizer(tokenizer, 5).hash]
    assert len(set(hashes)) == 4
