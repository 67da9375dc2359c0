"""prepare.py: the trainer against a slow oracle, every tokenizer, reader, download and error, and the toy corpora."""
import gzip, hashlib, http.server, json, lzma, os, random, re, signal, subprocess, sys, threading, time, zipfile
import bz2
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken.load

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import download
import prepare
from prepare import EOT, PATTERN, UserError, build, find_files, load_bin, load_meta, load_tokenizer, read_documents

TEXT = 'The cat sat on the mat. The dog sat on the cat; the cat was sad, and the dog wasn\'t. It\'s 1234 o\'clock.\n\n  Ünïcode 日本語 🙂🙂\t\n'
ODD = ['', ' ', '\n', '\r\n', 'a\u2028b\x85c', '🙂👩\u200d👩\u200d👧', EOT, f'x{EOT}y', '\x00\x01', "don't  I'll", '   three   ', 'e\u0301 é']


@pytest.fixture(scope='session')
def toy(tmp_path_factory):
    root = tmp_path_factory.mktemp('toy')
    prepare.make_toy(root)
    return root


def cli(*args, cwd, **env):
    return subprocess.run([sys.executable, str(ROOT / 'prepare.py'), *map(str, args)], cwd=cwd, capture_output=True, text=True,
                          timeout=120, env=dict(os.environ, **env))


def documents(folder, split):
    """The texts of a bin, cut at end-of-text."""
    tokenizer, ids = load_tokenizer(folder), load_bin(folder, split).tolist()
    meta = load_meta(folder)
    ids = [i for i in ids if i != meta.get('pad')]
    assert ids[0] == ids[-1] == tokenizer.eot
    out, doc = [], []
    for i in ids[1:]:
        if i == tokenizer.eot:
            out.append(tokenizer.decode(doc))
            doc = []
        else:
            doc.append(i)
    return out


def random_text(rng, n):
    points = [chr(p) for p in (rng.randrange(0x20, 0x250) if rng.random() < .7 else rng.randrange(0x110000) for _ in range(n))
              if not 0xD800 <= p < 0xE000]
    return ''.join(points)


def naive_bpe(counts, vocab_size):
    """Recounts everything before each merge."""
    vocab, words = [bytes([b]) for b in range(256)], {tuple(w.encode()): n for w, n in counts.items()}
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
        new, merged = vocab.index(token), Counter()
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


# ---- the BPE trainer

@pytest.mark.parametrize('seed', range(8))
def test_bpe_equals_naive(seed):
    rng = random.Random(seed)
    letters = 'ab' if seed < 3 else 'abcde é🙂'
    text = TEXT * 3 + ' '.join(''.join(rng.choice(letters) for _ in range(rng.randrange(1, 12))) for _ in range(400))
    counts = Counter(PATTERN.findall(text))
    assert prepare.train_bpe(counts, 400) == naive_bpe(counts, 400)


def test_bpe_does_not_depend_on_order_and_stops():
    counts = Counter(PATTERN.findall(TEXT * 2))
    backwards = dict(reversed(counts.items()))
    vocab = prepare.train_bpe(counts, 10000)
    assert vocab == prepare.train_bpe(backwards, 10000)
    assert 256 < len(vocab) < 9999 and len(set(vocab)) == len(vocab)
    assert prepare.train_bpe({}, 500) == [bytes([b]) for b in range(256)]
    assert prepare.train_bpe({'ab': 1, 'abc': 1, 'xy': 1}, 500)[256:] == [b'ab']     # what is seen once is not merged


def test_ranks_load_in_tiktoken_and_round_trip(tmp_path):
    vocab = prepare.train_bpe(Counter(PATTERN.findall(TEXT * 5)), 350)
    tokenizer = prepare.rank_tokenizer(prepare.ranks_blob(vocab))
    path = tmp_path / 'r.tiktoken'
    path.write_bytes(tokenizer.blob)
    ranks = tiktoken.load.load_tiktoken_bpe(str(path))
    theirs = tiktoken.Encoding('t', pat_str=PATTERN.pattern, mergeable_ranks=ranks, special_tokens={EOT: len(ranks)})
    rng = random.Random(0)
    for text in [*ODD, TEXT, *(random_text(rng, 200) for _ in range(50))]:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode_ordinary(text) and tokenizer.decode(ids) == text
        assert tokenizer.eot not in ids and b''.join(tokenizer.token_bytes[i] for i in ids) == text.encode()
    assert tokenizer.decode([200]) == '\ufffd' and tokenizer.decode([tokenizer.eot]) == ''


def test_pattern_is_gpt2s():
    gpt2 = prepare.regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    rng = random.Random(1)
    for text in [TEXT, "I'm he's we've they'd you'll don't '' 'sd", *(random_text(rng, 300) for _ in range(100))]:
        assert PATTERN.findall(text) == gpt2.findall(text)


# ---- tokenizers

def fake_gpt2(path):
    """A ranks file whose bytes are not in order, as GPT-2's are not."""
    vocab = prepare.train_bpe(Counter(PATTERN.findall(TEXT * 5)), 300)
    order = vocab[33:127] + vocab[:33] + vocab[127:]
    path.write_bytes(prepare.ranks_blob(order))
    return order


def test_ranks_file(tmp_path):
    order = fake_gpt2(tmp_path / 'gpt2.tiktoken')
    tokenizer = prepare.choose_tokenizer(str(tmp_path / 'gpt2.tiktoken'))
    assert tokenizer.n_vocab == len(order) + 1 and tokenizer.eot == len(order) and tokenizer.kind == 'bpe'
    assert tokenizer.token_bytes == order + [b''] and tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    other = prepare.rank_tokenizer(prepare.ranks_blob([*order[:-2], order[-1], order[-2]]))
    assert other.hash != tokenizer.hash and prepare.rank_tokenizer(tokenizer.blob).hash == tokenizer.hash


def test_gpt2_by_name(tmp_path, monkeypatch):
    order = fake_gpt2(tmp_path / 'gpt2.tiktoken')
    by_path = prepare.choose_tokenizer(str(tmp_path / 'gpt2.tiktoken'))
    encoding = tiktoken.Encoding('gpt2', pat_str=PATTERN.pattern, special_tokens={},
                                 mergeable_ranks={t: i for i, t in enumerate(order)})
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: encoding)
    monkeypatch.setattr(prepare, 'GPT2_HASH', by_path.hash)
    by_name = prepare.choose_tokenizer('gpt2')
    assert by_name.hash == by_path.hash and by_name.kind == 'gpt2'
    assert prepare.choose_tokenizer(str(tmp_path / 'gpt2.tiktoken')).kind == 'gpt2'


def byte_letters():
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in prints]
    return {**{b: chr(b) for b in prints}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def fake_neox(merges=(('h', 'e'), ('t', 'he'), ('Ġ', 'the'), ('Ġ', 'Ġ')), shuffle=False, **changes):
    letters = byte_letters()
    tokens = [letters[b] for b in range(256)] + [a + b for a, b in merges]
    ids = list(range(2, 2 + len(tokens)))
    if shuffle:
        random.Random(0).shuffle(ids)
    vocab = {'<|endoftext|>': 0, '<|padding|>': 1, **dict(zip(tokens, ids))}
    top = len(vocab)
    added = [dict(id=0, content=EOT, special=True), dict(id=1, content='<|padding|>', special=True)]
    added += [dict(id=top + i, content=' ' * n, special=False, normalized=True) for i, n in enumerate([4, 3, 2])]
    spec = dict(added_tokens=added, normalizer={'type': 'NFC'}, pre_tokenizer={'type': 'ByteLevel', 'add_prefix_space': False},
                model=dict(type='BPE', vocab=vocab, merges=[' '.join(m) for m in merges]))
    spec.update(changes)
    return json.dumps(spec).encode(), top


@pytest.mark.parametrize('shuffle', [False, True])
def test_neox(shuffle):
    blob, top = fake_neox(shuffle=shuffle)
    spec = json.loads(blob)['model']['vocab']
    tokenizer = prepare.neox_tokenizer(blob)
    assert tokenizer.n_vocab == top + 3 and tokenizer.eot == 0
    ids = lambda *tokens: [spec[t] for t in tokens]
    assert tokenizer.encode('the the') == ids('the', 'Ġthe')
    assert tokenizer.encode('h     the') == ids('h') + [top] + ids('Ġthe')          # four spaces, then one with the word
    assert tokenizer.encode('    he') == [top] + ids('he') and tokenizer.encode('      ') == [top, top + 2]
    assert tokenizer.encode('\n  h') == ids('Ċ') + [top + 2] + ids('h')
    assert tokenizer.encode('e\u0301') == tokenizer.encode('é') == ids('Ã', '©')
    for text in [*ODD[:-1], TEXT]:
        assert tokenizer.decode(tokenizer.encode(text)) == text and not {0, 1} & set(tokenizer.encode(text))
    assert tokenizer.token_bytes[0] == tokenizer.token_bytes[1] == b'' and tokenizer.token_bytes[top] == b'    '


def test_neox_merges_decide_not_ids():
    """(a, b) and (b, c) both fit 'abc': the earlier merge wins, whatever the ids say."""
    for first, second, expected in [(('a', 'b'), ('b', 'c'), ['ab', 'c']), (('b', 'c'), ('a', 'b'), ['a', 'bc'])]:
        for shuffle in (False, True):
            tokenizer = prepare.neox_tokenizer(fake_neox([first, second], shuffle)[0])
            assert [tokenizer.decode([i]) for i in tokenizer.encode('abc')] == expected


def test_neox_that_is_not():
    for changes in [dict(pre_tokenizer={'type': 'Metaspace', 'add_prefix_space': False}), dict(normalizer={'type': 'Lowercase'}),
                    dict(added_tokens=[]), dict(model={'type': 'Unigram'})]:
        with pytest.raises(UserError):
            prepare.neox_tokenizer(fake_neox(**changes)[0])


def test_bytes_and_hashes():
    tokenizer = prepare.choose_tokenizer('bytes')
    assert tokenizer.n_vocab == 257 and tokenizer.eot == 256 and tokenizer.encode('é!') == [0xC3, 0xA9, 33]
    for text in ODD:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    blob = prepare.ranks_blob([bytes([b]) for b in range(256)])
    hashes = [tokenizer.hash, prepare.rank_tokenizer(blob).hash, prepare.neox_tokenizer(fake_neox()[0]).hash,
              prepare.chunk_tokenizer(tokenizer, 4).hash, prepare.chunk_tokenizer(tokenizer, 5).hash]
    assert len(set(hashes)) == 5
    spec = json.loads(fake_neox([('a', 'b'), ('b', 'c')])[0])
    spec['model']['merges'].reverse()                    # the same tokens, but other ones for 'abc'
    assert prepare.neox_tokenizer(json.dumps(spec).encode()).hash != prepare.neox_tokenizer(fake_neox([('a', 'b'), ('b', 'c')])[0]).hash


@pytest.mark.parametrize('limit', [1, 3, 12])
def test_chunks(limit):
    base = prepare.rank_tokenizer(prepare.ranks_blob(prepare.train_bpe(Counter(PATTERN.findall(TEXT * 9)), 400)))
    tokenizer = prepare.chunk_tokenizer(base, limit)
    rng = random.Random(2)
    assert tokenizer.n_vocab == 259 and tokenizer.eot == 257 and tokenizer.end == [257] + [258] * limit
    assert tokenizer.token_bytes[65] == b'A' and tokenizer.token_bytes[256:] == [b''] * 3
    for text in [*ODD, TEXT, random_text(rng, 300)]:
        symbols = tokenizer.encode(text)
        assert len(symbols) % (limit + 1) == 0 and tokenizer.decode(symbols) == text and 257 not in symbols
        pieces = []
        for i in range(0, len(symbols), limit + 1):
            chunk = symbols[i:i + limit + 1]
            n = chunk.index(256)
            assert 0 < n <= limit and max(chunk[:n]) < 256 and set(chunk[n + 1:]) <= {258}
            pieces.append(bytes(chunk[:n]))
        tokens = [base.token_bytes[t] for t in base.encode(text)]
        assert pieces == [t[i:i + limit] for t in tokens for i in range(0, len(t), limit)]


def test_vocabulary_too_large():
    ranks = [bytes([b]) for b in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    with pytest.raises(UserError, match='65,536'):
        prepare.rank_tokenizer(prepare.ranks_blob(ranks))


# ---- data sets

def words_corpus(n=400, seed=0):
    rng = random.Random(seed)
    return [' '.join(rng.choice(['red', 'blue', 'green', 'cat', 'über', '🙂', '7']) for _ in range(rng.randrange(1, 30))) for _ in range(n)]


def test_build_and_load(tmp_path, capsys):
    docs = words_corpus()
    build(tmp_path / 'd', (('train', d) for d in docs), 300, val_fraction=.1)
    assert 'note: a loss on' in capsys.readouterr().out  # some 600 tokens
    meta = load_meta(tmp_path / 'd')
    assert meta['splits']['val']['tokens'] < 1000
    assert sorted(documents(tmp_path / 'd', 'train') + documents(tmp_path / 'd', 'val')) == sorted(docs)
    assert documents(tmp_path / 'd', 'train') != docs[:360]
    assert sorted(p.name for p in (tmp_path / 'd').iterdir()) == ['meta.json', 'tokenizer.tiktoken', 'train.bin', 'val.bin']
    assert os.listdir(tmp_path) == ['d'] and str(tmp_path) not in (tmp_path / 'd/meta.json').read_text()
    for split in ('train', 'val'):
        texts, counts = documents(tmp_path / 'd', split), meta['splits'][split]
        assert counts == dict(tokens=len(load_bin(tmp_path / 'd', split)), documents=len(texts),
                              words=sum(len(t.split()) for t in texts), bytes=sum(len(t.encode()) for t in texts))
    assert meta['splits']['val']['documents'] == 40 and load_bin(tmp_path / 'd', 'train').dtype == np.uint16
    assert meta['tokenizer']['vocab_size'] == load_tokenizer(tmp_path / 'd').n_vocab == meta['tokenizer']['eot'] + 1


def test_the_tokenizer_has_not_seen_the_validation_text(tmp_path):
    build(tmp_path / 'd', [('train', 'the red cat ' * 9), ('val', 'zq ' * 99)], 300)
    tokens = load_tokenizer(tmp_path / 'd').token_bytes
    assert b' cat' in tokens and b' zq' not in tokens and b'zq' not in tokens


def test_the_seed_decides_the_order(tmp_path):
    given = [*(('train', d) for d in words_corpus()), ('val', 'a cat')]
    for name, seed in (('a', 1), ('b', 2), ('c', 1)):
        build(tmp_path / name, given, prepare.choose_tokenizer('bytes'), seed=seed)
    a, b, c = (documents(tmp_path / name, 'train') for name in 'abc')
    assert a == c != b and sorted(a) == sorted(b)


def test_run_folder_stands_alone(tmp_path):
    build(tmp_path / 'd', (('train', d) for d in words_corpus()), 300)
    build(tmp_path / 'c', (('train', d) for d in words_corpus()), load_tokenizer(tmp_path / 'd'), byte_limit=3)
    build(tmp_path / 'b', (('train', d) for d in words_corpus()), prepare.build_tokenizer('bytes'))
    build(tmp_path / 'n', (('train', d) for d in words_corpus()), prepare.neox_tokenizer(fake_neox()[0]))
    for name in 'dcbn':
        run = tmp_path / f'run_{name}'
        run.mkdir()
        prepare.copy_tokenizer(tmp_path / name, run)
        tokenizer = load_tokenizer(tmp_path / name)
        (tmp_path / name).rename(tmp_path / f'gone_{name}')
        alone = load_tokenizer(run)
        assert alone.hash == tokenizer.hash and alone.kind == tokenizer.kind and alone.encode('the red') == tokenizer.encode('the red')
    meta = load_meta(tmp_path / 'run_c')
    assert meta['slots'] == 4 and meta['pad'] == 258 and meta['tokenizer']['kind'] == 'chunks'


def test_chunk_stream(tmp_path):
    docs = words_corpus()
    build(tmp_path / 'c', (('train', d) for d in docs), 290, byte_limit=4, val_fraction=.1)
    ids = np.array(load_bin(tmp_path / 'c', 'train')).reshape(-1, 5)
    assert sorted(documents(tmp_path / 'c', 'train') + documents(tmp_path / 'c', 'val')) == sorted(docs)
    assert (ids[0] == [257, 258, 258, 258, 258]).all() and (ids[:, 0] != 256).all() and (ids[:, 0] != 258).all()


def test_workers_and_start_methods_give_the_same_bytes(tmp_path):
    rng, code = random.Random(5), (
        'import multiprocessing as mp, sys, random, pathlib; mp.set_start_method(sys.argv[1]); sys.path.insert(0, sys.argv[2])\n'
        'import prepare\nrng = random.Random(5)\n'
        'docs = [" ".join(str(rng.randrange(500)) for _ in range(50)) for _ in range(8000)]\n'
        'prepare.build(pathlib.Path(sys.argv[3]), (("train", d) for d in docs), 400, jobs=2)')
    docs = [' '.join(str(rng.randrange(500)) for _ in range(50)) for _ in range(8000)]
    build(tmp_path / 'one', (('train', d) for d in docs), 400, jobs=1)
    for method in ('fork', 'spawn'):
        subprocess.run([sys.executable, '-c', code, method, str(ROOT), str(tmp_path / method)], check=True)
    for method in ('fork', 'spawn'):
        for file in ('train.bin', 'val.bin', 'tokenizer.tiktoken'):
            assert (tmp_path / method / file).read_bytes() == (tmp_path / 'one' / file).read_bytes()


def test_broken_data_sets(tmp_path):
    target = tmp_path / 'd'
    build(target, (('train', d) for d in words_corpus()), 300)
    size = (target / 'train.bin').stat().st_size
    (target / 'train.bin').write_bytes((target / 'train.bin').read_bytes()[:-2])
    with pytest.raises(UserError, match=f'train.bin.*{size:,}.*{size - 2:,}.*prepare.py'):
        load_bin(target, 'train')
    (target / 'val.bin').unlink()
    with pytest.raises(UserError, match='val.bin'):
        load_bin(target, 'val')
    blob = (target / 'tokenizer.tiktoken').read_bytes()
    (target / 'tokenizer.tiktoken').write_bytes(prepare.ranks_blob([bytes([b]) for b in range(256)]))
    with pytest.raises(UserError, match='tokenizer'):
        load_tokenizer(target)
    (target / 'tokenizer.tiktoken').write_bytes(blob[:-9])
    with pytest.raises(UserError):
        load_tokenizer(target)
    (target / 'tokenizer.tiktoken').unlink()
    with pytest.raises(UserError, match='missing'):
        load_tokenizer(target)
    (target / 'meta.json').write_text('{"tokenizer": 3')
    with pytest.raises(UserError, match='broken'):
        load_meta(target)
    with pytest.raises(UserError, match='missing'):
        load_meta(tmp_path / 'nowhere')


# ---- readers

def read(path, *args):
    return list(read_documents(Path(path), *args))


def test_text_splits(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_bytes('one\r\ntwo\r\n\r\nthree\u2028still\r\n \r\n\r\nfour'.encode())
    assert read(path, 'blank') == read(path) == ['one\ntwo', 'three\u2028still', 'four']
    assert read(path, 'row') == ['one', 'two', 'three\u2028still', 'four']
    assert read(path, 'file') == ['one\ntwo\n\nthree\u2028still\n \n\nfour']
    path.write_text(f'\ufeffa\n\nb\n{EOT}\nc{EOT}d\n{EOT}\n{EOT}\n', encoding='utf-8')
    assert read(path, 'eot') == read(path) == ['a\n\nb', 'c', 'd']
    lines = [f'line {i} of a text without any blank line' for i in range(2000)]
    path.write_text('\n'.join(lines))
    docs = read(path)
    assert len(docs) > 3 and '\n'.join(docs) == '\n'.join(lines) and max(map(len, docs)) < 17000


def test_jsonl(tmp_path):
    rows = [dict(text='a\u2028b\x85c', more='x'), dict(text='é\ud83d\ude42'.encode('utf-16', 'surrogatepass').decode('utf-16'), more='y')]
    path = tmp_path / 'a.jsonl'
    path.write_text('\n\n'.join(json.dumps(r, ensure_ascii=False) for r in rows) + '\r\n', encoding='utf-8')
    assert read(path) == ['a\u2028b\x85c', 'é🙂']
    assert read(path, 'auto', ['more', 'text']) == ['x\na\u2028b\x85c', 'y\né🙂']


def test_compressed_and_folders(tmp_path):
    folder = tmp_path / 'in'
    (folder / 'sub').mkdir(parents=True)
    (folder / 'a.txt').write_text('plain')
    (folder / 'b.txt.gz').write_bytes(gzip.compress(b'zipped'))
    (folder / 'c.jsonl.xz').write_bytes(lzma.compress(b'{"text": "squeezed"}\n'))
    (folder / 'sub' / 'd.jsonl.gz').write_bytes(gzip.compress(b'{"text": "deep"}\n'))
    (folder / 'image.png').write_bytes(b'\xff')
    found = find_files([folder])
    assert {role for role, _ in found} == {'train'}
    assert [text for _, path in found for text in read(path)] == ['plain', 'zipped', 'squeezed', 'deep']


@pytest.mark.parametrize('names, expected', [
    (['train.txt', 'val.txt', 'test.txt'], ['train', 'val']), (['train/a.txt', 'dev/a.txt', 'test/a.txt'], ['val', 'train']),
    (['X-train.txt', 'X-valid.txt', 'more.txt'], ['train', 'val', 'train']), (['val/a.txt', 'b.txt'], ['train', 'train']),
    (['train_10M/a.train', 'dev/a.dev'], ['val', 'train']), (['valentine.txt', 'train.txt'], ['train', 'train'])])
def test_val_files(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('x')
    assert sorted(role for role, _ in find_files([tmp_path])) == sorted(expected)


def test_wiki(tmp_path):
    page = '<page><title>{}</title><ns>{}</ns>{}<revision><text>{}</text></revision></page>'
    text = ("'''Cats''' are [[animal|animals]].&lt;ref name=x&gt;No {{a|b}}&lt;/ref&gt; {{Box|{{in}}|x}}[[File:a.jpg|thumb|a [[b]] c]]"
            "\n== Life ==\n* They [[sleep]] &amp;amp; eat. [http://x.org Site]\n{| class=x\n|a\n|}\n==References==\nno")
    xml = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{page.format("Cat", 0, "", text)}' \
          f'{page.format("Talk", 1, "", "no")}{page.format("Old", 0, "<redirect/>", "no")}</mediawiki>'
    (tmp_path / 'a.xml.bz2').write_bytes(bz2.compress(xml.encode()))
    assert read(tmp_path / 'a.xml.bz2') == ['Cat\nCats are animals.\nLife\nThey sleep & eat. Site']


# ---- the command line

def test_text_command(tmp_path):
    docs = words_corpus(300)
    (tmp_path / 'train.txt').write_text('\n\n'.join(docs[:200]))
    (tmp_path / 'val.txt').write_text('\n\n'.join(docs[200:]))
    done = cli('text', '--name', 'mine', '--input', 'train.txt', 'val.txt', '--vocab_size', 5000, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr and 'no more than' in done.stdout
    assert sorted(documents(tmp_path / 'data/mine', 'val')) == sorted(docs[200:])
    assert load_meta(tmp_path / 'data/mine')['tokenizer']['vocab_size'] < 5000
    for name, options in [('again', ['--tokenizer', 'data/mine']), ('bytes', ['--tokenizer', 'bytes']),
                          ('chunks', ['--tokenizer', 'data/mine', '--chunks', '--byte_limit', 5])]:
        assert cli('text', '--name', name, '--input', 'train.txt', 'val.txt', *options, cwd=tmp_path).returncode == 0
        assert documents(tmp_path / 'data' / name, 'train') == documents(tmp_path / 'data/mine', 'train')
    assert load_tokenizer(tmp_path / 'data/again').hash == load_tokenizer(tmp_path / 'data/mine').hash
    done = cli('text', '--name', 'mine', '--input', 'val.txt', '--tokenizer', 'bytes', '--overwrite', cwd=tmp_path)
    assert done.returncode == 0 and load_meta(tmp_path / 'data/mine')['tokenizer']['kind'] == 'bytes'
    assert sorted(os.listdir(tmp_path / 'data')) == ['again', 'bytes', 'chunks', 'mine']


def test_named_from_input(tmp_path):
    fake_gpt2(tmp_path / 'r.tiktoken')
    for name, ending, row in [('tinystories', 'txt', f'\nA story.\n{EOT}\n'), ('simplewiki', 'txt', 'Title\nText.\n\n'),
                              ('openmath', 'jsonl', '{"question": "1+1?", "generated_solution": "2"}\n'), ('babylm', 'txt', 'A line.\n')]:
        for split in ('train', 'val'):
            (tmp_path / name / split).mkdir(parents=True)
            (tmp_path / name / split / f'a.{ending}').write_text(row * 5)
        options = [] if name == 'babylm' else ['--tokenizer', 'r.tiktoken']
        done = cli(name, '--input', name, *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert documents(tmp_path / 'data/tinystories', 'val') == ['A story.'] * 5
    assert documents(tmp_path / 'data/openmath', 'val') == ['1+1?\n2'] * 5
    assert documents(tmp_path / 'data/simplewiki', 'val') == ['Title\nText.'] * 5
    assert documents(tmp_path / 'data/babylm', 'val') == ['\n'.join(['A line.'] * 5)]
    pair = json.dumps(dict(sentence_good='a', sentence_bad='b')) + '\n'
    (tmp_path / 'pairs').mkdir()
    (tmp_path / 'pairs/x.jsonl').write_text(pair * 3)
    assert cli('blimp', '--input', 'pairs', cwd=tmp_path).returncode == 0
    assert (tmp_path / 'data/blimp/x.jsonl').read_text() == pair * 3


ERRORS = [  # files, arguments, what the line must say
    ({'a.txt': b''}, ['--input', 'a.txt'], 'empty'),
    ({'a.txt': b' \n\n \n'}, ['--input', 'a.txt'], 'empty'),
    ({'a.txt': b'fine\nbad \xff\xfe'}, ['--input', 'a.txt'], 'a.txt.*line 2, byte 9.*UTF-8'),
    ({'a.jsonl': b'{"text": "x"}\n{"other": 1}\n'}, ['--input', 'a.jsonl'], 'a.jsonl:2: .*text.*other.*--field'),
    ({'a.jsonl': b'{"text": "x"}\n{"text": \n'}, ['--input', 'a.jsonl'], 'a.jsonl:2: .*JSON'),
    ({'a.jsonl': b'{"text": 5}\n'}, ['--input', 'a.jsonl'], 'a.jsonl:1: '),
    ({'a.jsonl': b'["x"]\n'}, ['--input', 'a.jsonl'], 'a.jsonl:1: '),
    ({'a.jsonl': b'{"text": "\\ud800"}\n'}, ['--input', 'a.jsonl'], 'a.jsonl:1: '),
    ({}, ['--input', 'nowhere.txt'], 'nowhere.txt'),
    ({'sub/a.png': b'x'}, ['--input', 'sub'], 'no .txt or .jsonl'),
    ({'a.txt.gz': gzip.compress(b'hello ' * 1000)[:-30]}, ['--input', 'a.txt.gz'], 'a.txt.gz.*broken'),
    ({'a.txt.gz': b'hello'}, ['--input', 'a.txt.gz'], 'a.txt.gz.*broken'),
    ({'a.txt.xz': lzma.compress(str(list(range(9000))).encode())[:-400]}, ['--input', 'a.txt.xz'], 'a.txt.xz.*broken'),
    ({'a.txt': b'one document'}, ['--input', 'a.txt'], 'one document.*cannot be cut.*--split'),
    ({'a.txt': b'a\n\nb'}, ['--input', 'a.txt', '--vocab_size', '70000'], '65,536'),
    ({'a.txt': b'a\n\nb'}, ['--input', 'a.txt', '--vocab_size', '100'], '257'),
    ({'a.txt': b'a\n\nb'}, ['--input', 'a.txt', '--vocab_size', '300', '--tokenizer', 'bytes'], 'give one'),
    ({'a.txt': b'a\n\nb'}, ['--input', 'a.txt', '--tokenizer', 'nothing'], '--tokenizer nothing'),
    ({'a.txt': b'a\n\nb', 'r.tiktoken': b'IQ== 0\n'}, ['--input', 'a.txt', '--tokenizer', 'r.tiktoken'], 'broken ranks'),
    ({'a.txt': b'a\n\nb', 't.json': b'{}'}, ['--input', 'a.txt', '--tokenizer', 't.json'], 'tokenizer.json'),
    ({'a.txt': b'a\n\nb', 'data/mine/notes.md': b'x'}, ['--input', 'a.txt', '--overwrite'], 'more than a data set'),
    ({'a.txt': b'a\n\nb', 'data/mine/meta.json': b'{}'}, ['--input', 'a.txt'], 'exists already.*--overwrite'),
    ({'data/mine/a.jsonl': b'{"text": "x"}'}, ['--input', 'data/mine', '--overwrite'], 'input lies in'),
    ({'a.txt': b'a\n\nb'}, ['--input', 'a.txt', '--chunks', '--byte_limit', '0'], '--byte_limit'),
    ({'a.txt': b'a\n\nb'}, ['--input', 'a.txt', '--val_fraction', '1'], '--val_fraction'),
    ({}, [], '--input'), ({}, ['--speed', '3'], '--speed'), ({}, ['--input', 'x', '--name', 'a/b'], 'a/b'),
    ({'a.txt': b'a\n\nb', 'file': b''}, ['--input', 'a.txt', '--out', 'file'], 'could not be written')]


@pytest.mark.parametrize('case', range(len(ERRORS)))
def test_errors_are_one_line(tmp_path, case):
    files, args, expected = ERRORS[case]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    done = cli('text', '--name', 'mine', *args, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and done.stderr.startswith('prepare.py: '), done.stderr
    assert re.search(expected, done.stderr), done.stderr
    left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob('*') if p.is_file())
    assert left == sorted(files) and all((tmp_path / n).read_bytes() == c for n, c in files.items())
    assert not (tmp_path / 'data').exists() or set(os.listdir(tmp_path / 'data')) <= {'mine'}


def test_gpt2_without_network(tmp_path):
    (tmp_path / 'a.txt').write_text('a\n\nb')
    done = cli('text', '--name', 'mine', '--input', 'a.txt', '--tokenizer', 'gpt2', cwd=tmp_path, TIKTOKEN_CACHE_DIR=str(tmp_path / 'none'),
               https_proxy='http://127.0.0.1:9', HTTPS_PROXY='http://127.0.0.1:9')
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and '.tiktoken' in done.stderr


def test_kill_leaves_no_half_data_set(tmp_path):
    docs = '\n\n'.join(' '.join(str(random.Random(i).randrange(10 ** 9)) for _ in range(40)) for i in range(40000))
    (tmp_path / 'a.txt').write_text(docs)
    command = [sys.executable, str(ROOT / 'prepare.py'), 'text', '--name', 'mine', '--input', 'a.txt', '--vocab_size', '2000']
    for delay in (.3, 1, 1.7):
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        target = tmp_path / 'data/mine'
        assert not target.exists() or len(load_bin(target, 'train'))        # absent, or (on a fast machine) whole
        if target.exists():
            return


# ---- downloads, from a server of our own

class Server:
    """Serves `files`; `breaks` connections are cut after 3,000 bytes; ranges are honoured or ignored."""
    def __init__(self, files, breaks=0, ranges=True):
        self.files, self.breaks, self.ranges, self.asked = files, breaks, ranges, []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                server.asked.append((self.path, self.headers['Range']))
                if self.path not in server.files:
                    return self.send_error(404)
                body, start = server.files[self.path], 0
                if server.ranges and self.headers['Range']:
                    start = int(self.headers['Range'][6:-1])
                    if start >= len(body):
                        return self.send_error(416)
                self.send_response(206 if start else 200)
                self.send_header('Content-Length', str(len(body) - start))
                self.end_headers()
                cut = server.breaks > 0 and len(body) - start > 3000
                server.breaks -= cut
                self.wfile.write(body[start:start + 3000] if cut else body[start:])

            def log_message(self, *args):
                pass
        self.http = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.base = f'http://127.0.0.1:{self.http.server_address[1]}'

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


BODY = random.Random(3).randbytes(10000)


def test_download_resumes(tmp_path):
    with Server({'/f': BODY}, breaks=2) as server:
        download.download(server.base + '/f', tmp_path / 'f', len(BODY), 'sha256:' + hashlib.sha256(BODY).hexdigest(), pause=0)
        assert server.asked == [('/f', None), ('/f', 'bytes=3000-'), ('/f', 'bytes=6000-')]
    assert (tmp_path / 'f').read_bytes() == BODY and os.listdir(tmp_path) == ['f']


def test_download_goes_on_with_an_old_part_and_whole_part(tmp_path):
    (tmp_path / 'f.part').write_bytes(BODY[:4000])
    (tmp_path / 'g.part').write_bytes(BODY)
    (tmp_path / 'h.part').write_bytes(BODY + b'more')
    with Server({'/f': BODY, '/g': BODY, '/h': BODY}) as server:
        download.download(server.base + '/f', tmp_path / 'f', pause=0)
        download.download(server.base + '/g', tmp_path / 'g', len(BODY), pause=0)
        download.download(server.base + '/h', tmp_path / 'h', len(BODY), pause=0)
        assert server.asked == [('/f', 'bytes=4000-'), ('/h', 'bytes=10004-'), ('/h', None)]
    assert all((tmp_path / n).read_bytes() == BODY for n in 'fgh')


def test_download_without_ranges(tmp_path):
    with Server({'/f': BODY}, breaks=2, ranges=False) as server:
        download.download(server.base + '/f', tmp_path / 'f', pause=0)
    assert (tmp_path / 'f').read_bytes() == BODY


def test_download_fails_clearly(tmp_path):
    with Server({'/f': BODY}) as server:
        for options in (dict(checksum='sha256:' + '0' * 64), dict(checksum='sha1:' + '0' * 40), dict(size=9999)):
            with pytest.raises(UserError, match='wrong size or checksum'):
                download.download(server.base + '/f', tmp_path / 'f', pause=0, **options)
            assert os.listdir(tmp_path) == []
        with pytest.raises(UserError, match='404'):
            download.download(server.base + '/nothing', tmp_path / 'f', pause=0)
    with Server({'/f': BODY}, breaks=99, ranges=False) as server:
        with pytest.raises(UserError, match='3,000 of 10,000 bytes.*again'):
            download.download(server.base + '/f', tmp_path / 'f', pause=0)
    assert os.listdir(tmp_path) == ['f.part']
    with pytest.raises(UserError, match='--input'):
        download.download('http://127.0.0.1:9/f', tmp_path / 'f', pause=0)


def zipped(files):
    import io
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w') as pack:
        for name, text in files.items():
            pack.writestr(name, text)
    return out.getvalue()


def test_named_downloads(tmp_path, monkeypatch):
    story = f'A story of a cat.\n{EOT}\n'.encode() * 500
    sha = hashlib.sha256(story).hexdigest()
    pointer = f'version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {len(story)}\n'.encode()
    wiki = bz2.compress(b'<m xmlns="x"><page><title>T</title><ns>0</ns><revision><text>Word.</text></revision></page></m>')
    folder = '/simplewiki/latest/simplewiki-latest-'
    pair = json.dumps(dict(sentence_good='a', sentence_bad='b')) + '\n'
    files = {folder + 'pages-articles.xml.bz2': wiki,
             folder + 'sha1sums.txt': f'{"0" * 40}  simplewiki-20250101-stub.xml.gz\n'
                                      f'{hashlib.sha1(wiki).hexdigest()}  simplewiki-20250101-pages-articles.xml.bz2\n'.encode(),
             '/download/y7djq/': zipped({'train_10M/a.train': 'A line.\n' * 9, '__MACOSX/train_10M/._a.train': 'no'}),
             '/download/uyd7v/': zipped({'dev/a.dev': 'Another.\n'}),
             '/alexwarstadt/blimp/archive/refs/heads/master.zip': zipped({f'blimp-master/data/p{i}.jsonl': pair for i in range(67)})}
    for split in ('train', 'valid'):
        files[f'/datasets/roneneldan/TinyStories/resolve/main/TinyStories-{split}.txt'] = story
        files[f'/datasets/roneneldan/TinyStories/raw/main/TinyStories-{split}.txt'] = pointer
    with Server(files, breaks=1) as server:
        found = {name: find_files(download.fetch_named(name, tmp_path, server.base, pause=0))
                 for name in ('tinystories', 'simplewiki', 'babylm', 'blimp')}
        asked = len(server.asked)
        download.fetch_named('tinystories', tmp_path, server.base)
        assert len(server.asked) == asked                                   # everything is there already
        files['/datasets/roneneldan/TinyStories/resolve/main/TinyStories-train.txt'] = story + b'!'
        (tmp_path / 'tinystories/train.txt').unlink()
        with pytest.raises(UserError, match='wrong size'):
            download.fetch_named('tinystories', tmp_path, server.base)
    assert [(role, path.name) for role, path in found['tinystories']] == [('train', 'train.txt'), ('val', 'valid.txt')]
    assert [(role, path.name) for role, path in found['babylm']] == [('train', 'a.train'), ('val', 'a.dev')]
    assert read(found['simplewiki'][0][1]) == ['T\nWord.'] and len(found['blimp']) == 67
    with pytest.raises(UserError, match='67 of 1,000'):
        prepare.land_pairs(tmp_path / 'pairs', [tmp_path / 'blimp'], 'BLiMP has 67 of 1,000', False)
    assert not (tmp_path / 'pairs').exists()


# ---- the toy corpora

PINNED = {'toy_stories': 'b3d26387a782821f', 'toy_math': 'afee4c8257df1176', 'toy_lingo': 'f139e314a00cf786', 'toy_blimp': 'fb8e16909503a603'}


def test_toy_is_the_same_everywhere(toy):
    for name, expected in PINNED.items():
        digest = hashlib.sha256()
        for path in sorted((toy / name).glob('*.bin')) + sorted((toy / name).glob('*.jsonl')):
            digest.update(path.read_bytes())
        assert digest.hexdigest()[:16] == expected, name


def test_toy_folders(toy, capsys):
    before = {p: p.stat().st_mtime_ns for p in toy.rglob('*')}
    prepare.main(['toy', '--out', str(toy)])
    assert 'holds all toy corpora already' in capsys.readouterr().out
    with pytest.raises(UserError, match='of their own'):
        prepare.main(['toy', '--name', 'mine'])
    assert before == {p: p.stat().st_mtime_ns for p in toy.rglob('*')}
    assert sorted(os.listdir(toy)) == ['toy_blimp', 'toy_bytes', 'toy_glue', 'toy_lingo', 'toy_math', 'toy_stories']
    whole, chunks = (load_meta(toy / name)['splits']['val'] for name in ('toy_stories', 'toy_bytes'))
    assert chunks['bytes'] == whole['bytes'] and chunks['documents'] == whole['documents']
    names = ['toy_stories', 'toy_math', 'toy_lingo']
    assert len({load_tokenizer(toy / name).hash for name in names}) == 1
    sizes = [sum(split['bytes'] for split in load_meta(toy / name)['splits'].values()) for name in names]
    assert sizes[0] > 2.9e6 and min(sizes[1:]) > .9e6


def test_toy_at_once_and_after_a_kill(tmp_path, toy):
    code = f'import sys; sys.path.insert(0, {str(ROOT)!r}); import prepare; prepare.make_toy("data")'
    killed = subprocess.Popen([sys.executable, '-c', code], cwd=tmp_path, stdout=subprocess.DEVNULL)
    time.sleep(2.5)
    killed.kill()
    killed.wait()
    both = [subprocess.Popen([sys.executable, '-c', code], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    assert [p.wait() for p in both] == [0, 0], [p.stderr.read() for p in both]
    for file in ('toy_stories/train.bin', 'toy_lingo/val.bin', 'toy_blimp/anaphor_number_agreement.jsonl'):
        assert (tmp_path / 'data' / file).read_bytes() == (toy / file).read_bytes()


def test_toy_words_are_tokens(toy):
    tokenizer, counts = load_tokenizer(toy / 'toy_stories'), Counter()
    for text in documents(toy / 'toy_stories', 'train'):
        counts.update(PATTERN.findall(text))
    common = [word for word, n in counts.items() if n >= 100]
    assert len(common) > 250 and [word for word in common if len(tokenizer.encode(word)) > 1] == []


def test_toy_math_is_right(toy):
    kinds = Counter()
    for text in documents(toy / 'toy_math', 'train')[:3000]:
        question, solution = text.split('\n')
        assert question.endswith('?')
        steps = re.findall(r'(\d+) ([-+*]) (\d+) = (\d+)\.', solution)
        for a, sign, b, c in steps:
            assert {'+': int(a) + int(b), '-': int(a) - int(b), '*': int(a) * int(b)}[sign] == int(c) >= 0
        assert solution.endswith(f'{steps[-1][3]}. The answer is {steps[-1][3]}.')
        kinds[re.sub(r'\d+|[A-Z][a-z]+', '', question)] += 1
    assert len(kinds) > 30


def test_toy_lingo_shares_no_word_with_english(toy):
    words = {name: {w for t in documents(toy / name, 'train') for w in re.findall(r'[a-z]+', t.lower())} for name in
             ('toy_stories', 'toy_math', 'toy_lingo')}
    assert not words['toy_lingo'] & (words['toy_stories'] | words['toy_math']) and len(words['toy_lingo']) > 150


def test_minimal_pairs(toy):
    tokenizer = load_tokenizer(toy / 'toy_stories')
    text = '\n'.join(documents(toy / 'toy_stories', 'train') + documents(toy / 'toy_stories', 'val'))
    unigram, files = Counter(text.split()), sorted((toy / 'toy_blimp').glob('*.jsonl'))
    assert len(files) >= 8
    fields = {'sentence_good', 'sentence_bad', 'field', 'linguistics_term', 'UID', 'simple_LM_method', 'one_prefix_method',
              'two_prefix_method', 'lexically_identical', 'pairID'}
    for path in files:
        rows = [json.loads(line) for line in path.open()]
        goods = [row['sentence_good'] for row in rows]
        assert len(rows) == len(set(goods)) == 200 and not any(g in text for g in goods[::10])
        seen = set(re.split(r'(?<=[.!?"])\s', text))
        assert not seen & set(goods)
        right = 0
        for i, row in enumerate(rows):
            good, bad = row['sentence_good'].split(), row['sentence_bad'].split()
            assert row.keys() == fields and row['UID'] == path.stem and row['pairID'] == str(i)
            different = [(g, b) for g, b in zip(good, bad) if g != b]
            assert len(good) == len(bad) and len(different) == 1
            for start in ('', ' '):
                assert len(tokenizer.encode(start + row['sentence_good'])) == len(tokenizer.encode(start + row['sentence_bad']))
            (g, b), = different
            right += unigram[g.strip('.')] + unigram[g.strip('.') + '.'] > unigram[b.strip('.')] + unigram[b.strip('.') + '.']
        assert 60 <= right <= 140, (path.stem, right)               # word frequency alone does not decide
