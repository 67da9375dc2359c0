"""prepare.py: readers, bins that hold every document, folders that are complete or not there."""

import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
import signal
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

import prepare
from common import ROOT, documents
from plumbing.bins import load_bin, read_windows
from plumbing.cli import UserError
from plumbing.download import new_folder
from plumbing.tokenizer import (EOT, choose_tokenizer, load_meta, load_tokenizer, rank_tokenizer,
                                ranks_blob)
from plumbing.text import clean
from plumbing.toy import TOYS
from prepare import find_files, read_documents, write_data_set


def words_corpus(n=400, seed=0):
    rng = random.Random(seed)
    words = ['red', 'blue', 'green', 'cat', 'über', '🙂', '7']
    return [' '.join(rng.choice(words) for _ in range(rng.randrange(1, 30))) for _ in range(n)]


def as_train(texts):
    return (('train', text) for text in texts)


# ---- Data sets ----------------------------------------------------------------------------------

def test_write_and_load(tmp_path):
    """Every document is in one of the bins, in a new order, and meta.json counts what is there."""
    target = tmp_path / 'd'
    docs = [text.replace(' ', '\n  ', 1) for text in words_corpus()]
    write_data_set(target, as_train(docs), 300, val_fraction=.1)
    train, val = (documents(target, split) for split in ('train', 'val'))
    assert sorted(train + val) == sorted(docs) and train != docs[:360] and len(val) == 40
    meta = load_meta(target)
    for split, texts in (('train', train), ('val', val)):
        assert meta['splits'][split] == dict(
            tokens=len(load_bin(target, split)), documents=len(texts),
            words=sum(len(text.split()) for text in texts),
            bytes=sum(len(text.encode()) for text in texts))


def test_a_data_set_for_validation_only(tmp_path):
    write_data_set(tmp_path / 'd', as_train(words_corpus()), 300, val_fraction=1)
    assert documents(tmp_path / 'd', 'train') == []
    assert sorted(documents(tmp_path / 'd', 'val')) == sorted(words_corpus())


def test_the_tokenizer_has_not_seen_the_validation_text(tmp_path):
    write_data_set(tmp_path / 'd', [('train', 'the red cat ' * 9), ('val', 'zq ' * 99)], 300)
    tokens = load_tokenizer(tmp_path / 'd').token_bytes
    assert b' cat' in tokens and b' zq' not in tokens and b'zq' not in tokens


def test_no_copies(tmp_path):
    """A training document that shares a long line with validation text, here or elsewhere, goes."""
    line, other, short = 'a red cat ' * 6, 'a blue cat ' * 6, 'a cat sat. ' * 5
    texts = [f'one\n{line}\nend', f'{other}', f'two\n{short}', f'{line}more']
    docs = [*as_train(texts), ('val', f'{line}\n{short}')]
    write_data_set(tmp_path / 'far', [('train', 'green'), ('val', f'x\n{other}')], 300)
    write_data_set(tmp_path / 'own', docs, 300, no_copies=[])
    assert sorted(documents(tmp_path / 'own', 'train')) == sorted(texts[1:])
    write_data_set(tmp_path / 'both', docs, 300, no_copies=[str(tmp_path / 'far')])
    assert sorted(documents(tmp_path / 'both', 'train')) == sorted(texts[2:])


def test_many_processes_give_the_same_bytes(tmp_path, monkeypatch):
    rng = random.Random(5)
    docs = [' '.join(str(rng.randrange(500)) for _ in range(50)) for _ in range(8000)]
    write_data_set(tmp_path / 'one', as_train(docs), 400)
    monkeypatch.setattr(prepare, 'POOL_SIZE', 0)
    monkeypatch.setattr(os, 'cpu_count', lambda: 2)
    write_data_set(tmp_path / 'two', as_train(docs), 400)
    for file in ('train.bin', 'val.bin', 'tokenizer.tiktoken'):
        assert (tmp_path / 'one' / file).read_bytes() == (tmp_path / 'two' / file).read_bytes()


# ---- Readers ------------------------------------------------------------------------------------

def read(path, *args):
    return list(read_documents(Path(path), *args))


def test_text_splits(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_bytes('  one\r\ntwo\r\n\r\nthree\u2028still\r\n \r\n\r\nfour'.encode())
    assert read(path, 'blank') == read(path) == ['  one\ntwo', 'three\u2028still', 'four']
    assert read(path, 'row') == ['  one', 'two', 'three\u2028still', 'four']
    assert read(path, 'file') == ['  one\ntwo\n\nthree\u2028still\n \n\nfour']
    path.write_text(f'\ufeffa\n\nb\n{EOT}\nc{EOT}d\n{EOT}\n{EOT}\n', encoding='utf-8')
    assert read(path, 'eot') == read(path) == ['a\n\nb', 'c', 'd']
    lines = [f'line {i} of a text without any blank line' for i in range(2000)]
    path.write_text('\n'.join(lines))
    docs = read(path)
    assert len(docs) > 3 and '\n'.join(docs) == '\n'.join(lines)
    assert max(map(len, docs)) < 17000 and min(map(len, docs[:-1])) > 16000


def test_jsonl(tmp_path):
    rows = [dict(text='a\u2028b\x85c', more='x'), dict(text='é🙂', more='y')]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path = tmp_path / 'a.jsonl'
    path.write_text('\n\n'.join(lines) + '\r\n', encoding='utf-8')
    assert read(path) == ['a\u2028b\x85c', 'é🙂']
    assert read(path, 'auto', 'more, text') == ['x\na\u2028b\x85c', 'y\né🙂']


def write_files(folder, files):
    """A list of names, or {name: text}"""
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(files[name] if isinstance(files, dict) else 'x')


def test_packed_files_and_folders(tmp_path, capsys):
    """The ends of names say what is text in a folder. Hidden files are not read, nor any twice."""
    write_files(tmp_path, ['image.png', '._a.txt', 'sub/.venv/c.txt'])
    write_files(tmp_path, {'a.txt': 'plain'})
    (tmp_path / 'b.txt.gz').write_bytes(gzip.compress(b'zipped'))
    (tmp_path / 'c.jsonl.xz').write_bytes(lzma.compress(b'{"text": "squeezed"}\n'))
    (tmp_path / 'e.txt.bz2').write_bytes(bz2.compress(b'packed'))
    (tmp_path / 'sub/d.jsonl.gz').write_bytes(gzip.compress(b'{"text": "deep"}\n'))
    files = find_files([tmp_path])
    assert 'skipped 1 files' in capsys.readouterr().out  # the image
    texts = [text for _, path in files for text in read(path)]
    assert texts == ['plain', 'zipped', 'squeezed', 'packed', 'deep']
    assert find_files([tmp_path, tmp_path / 'a.txt']) == files


@pytest.mark.parametrize('names, expected', [
    (['train.txt', 'val.txt', 'test.txt'], ['train', 'val']),
    (['dev/a.txt', 'test/a.txt', 'train/a.txt'], ['val', 'train']),
    (['train.txt', 'test.txt'], ['train']),              # val is cut from train
    (['X-train.txt', 'X-valid.txt', 'more.txt'], ['train', 'val', 'train']),
    (['dev/a.dev', 'train_10M/a.train'], ['val', 'train']),
    (['valentine.txt', 'train.txt'], ['train', 'train'])])
def test_names_of_splits(tmp_path, monkeypatch, names, expected):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, names)
    assert [split for split, _ in find_files(names)] == expected
    assert sorted(split for split, _ in find_files(['.'])) == sorted(expected)


def test_wiki(tmp_path):
    page = '<page><title>{}</title><ns>{}</ns>{}<revision><text>{}</text></revision></page>'
    text = "'''Cats''' are [[animal|animals]].\n== Life ==\n* They [[sleep]] &amp;amp; eat."
    pages = page.format('Cat', 0, '', text) + page.format('Talk', 1, '', 'no') \
        + page.format('Old', 0, '<redirect/>', 'no')
    xml = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{pages}</mediawiki>'
    path = tmp_path / 'a.xml.bz2'
    path.write_bytes(bz2.compress(xml.encode()))
    assert read(path) == ['Cat\nCats are animals.\nLife\nThey sleep & eat.']


@pytest.mark.parametrize('text, cleaned', [
    ('a<ref name="x"/>b<ref>c <ref group=n>d</ref> e</ref>f', 'abf'),
    ('a<!-- b <!-- c -->d<!-- never ends', 'ad'),
    ('a<!--\n==Notes==\n-->b', 'ab'),
    ('a {{b|{{c|{{d}}}}|{|\n|e\n|}}} f{| class=x\n{|\n|g\n|}\n|}', 'a  f'),
    ('[[File:a.jpg|thumb|[[b|c]] [d] [http://e f] h]]i', 'i'),
    ('[[a]] [[b|c]] [[d|e [[f|g]] h]] [[Category:i]][[:Category:j]]', 'a c e g h :Category:j'),
    ('[http://a.org], [https://b.org b [c] d] [http://e', ', b [c] d [http://e'),
    ('less <10 ppm<br/> more <b>bold</b>', 'less <10 ppm more bold'),
    ("== '''A''' ==\n\n \t\n* b  \n:: c ==\n__NOTOC__", 'A\nb\nc'),
    ('a\n== Notes ==\n* b', 'a')])
def test_wiki_markup(text, cleaned):
    assert clean(text) == cleaned


# ---- The command line ---------------------------------------------------------------------------

def test_text_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    docs = words_corpus(300)
    Path('train.txt').write_text('\n\n'.join(docs[:200]))
    Path('val.txt').write_text('\n\n'.join(docs[200:]))
    mine = Path('data/mine')
    wrapped = ['--tokenizer', mine]
    for name, options in dict(mine=[], again=wrapped, chunks=[*wrapped, '--chunks=5'],
                              pauses=[*wrapped, '--pauses=3'],
                              sentences=[*wrapped, '--sentences']).items():
        args = ['text', '--name', name, '--input', 'train.txt', 'val.txt', *options]
        prepare.main([str(arg) for arg in args])
        assert sorted(documents(Path('data', name), 'val')) == sorted(docs[200:])
        assert documents(Path('data', name), 'train') == documents(mine, 'train')


def test_named_sets_from_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    math = json.dumps(dict(question='1+1?', generated_solution='2')) + '\n'
    for name, ending, row, expected in [
            ('tinystories', 'txt', f'\nA story.\n{EOT}\n', ['A story.'] * 5),
            ('openmath', 'jsonl', math, ['1+1?\n2'] * 5),
            ('simplewiki', 'txt', 'Title\nText.\n\n', ['Title\nText.'] * 5),
            ('babylm', 'txt', 'A line.\n', ['\n'.join(['A line.'] * 5)])]:
        write_files(tmp_path, {f'{name}/{split}/a.{ending}': row * 5 for split in ('train', 'val')})
        prepare.main([name, '--input', name, '--tokenizer', 'bytes'])
        assert documents(Path('data', name), 'val') == expected


def test_more_than_65536_tokens(tmp_path):
    vocab = [bytes([b]) for b in range(256)] + [b'%05d!' % i for i in range(70000)]
    write_data_set(tmp_path / 'd', as_train(['a b 00007! 69999!'] * 9),
                   rank_tokenizer(ranks_blob(vocab)))
    ids = load_bin(tmp_path / 'd', 'train')
    assert ids.dtype == np.uint32 and load_meta(tmp_path / 'd')['dtype'] == 'uint32'
    assert ids[0] == 70256                               # end-of-text
    for text in (ids, np.array([65535, 3], np.uint16)):
        assert read_windows([text], [0], len(text)).tolist() == [text.tolist()]


# ---- Mixes --------------------------------------------------------------------------------------

@pytest.fixture
def mix(tmp_path, monkeypatch):
    """The command, in this process, and its training documents; data/a and b, data/c and d."""
    monkeypatch.chdir(tmp_path)
    for name, form in dict(a=None, b=None, c=('chunks', 5), d=('chunks', 5)).items():
        docs = [f'{name}{n} {"!" * (n % 7)}' for n in range(60)]
        write_data_set(Path('data', name), as_train(docs), choose_tokenizer('bytes'), form, .1)

    def mix(*inputs, passes=()):
        prepare.main(['mix', '--name=mix', '--overwrite', '--input', *inputs,
                      *(['--passes', *map(str, passes)] if passes else [])])
        return documents('data/mix', 'train')
    return mix


def part(name, low, high):
    """The documents that end between two places; one at a place is before it."""
    tokenizer, docs = load_tokenizer(f'data/{name}'), documents(f'data/{name}', 'train')
    slots = len(tokenizer.end)
    ends = [slots, *(len(tokenizer.encode(text)) + slots for text in docs)]
    ends = [*accumulate(ends)]                           # n documents end at the n-th
    first, last = (sum(end < share * ends[-1] for end in ends) for share in (low, high))
    return docs[first:last]


@pytest.mark.parametrize('one, two', ['ab', 'cd'])
def test_mix(mix, one, two):
    """Parts are complementary and end with documents; copies, and a part of a copy; the validation
    text of all; counts; chunks stay whole."""
    low, high = mix(f'data/{one}:0:0.6'), mix(f'data/{one}:0.6:1')
    assert low == part(one, 0, .6) and low + high == part(one, 0, 1)
    assert 30 < len(low) < 36
    docs = mix(f'data/{one}:0.2:0.6', f'data/{two}', passes=[1, 2.5])
    assert docs == part(one, .2, .6) + 2 * part(two, 0, 1) + part(two, 0, .5)
    val = [documents(f'data/{name}', 'val') for name in (one, two, 'mix')]
    assert val[0] + val[1] == val[2]
    meta, slots = load_meta('data/mix'), len(load_tokenizer('data/mix').end)
    for split, texts in (('train', docs), ('val', val[2])):
        ids, counts = load_bin('data/mix', split), meta['splits'][split]
        assert counts['tokens'] == len(ids)
        n_words = sum(len(text.split()) for text in texts)
        assert counts['documents'] == pytest.approx(len(texts), rel=.03)
        assert counts['words'] == pytest.approx(n_words, rel=.03)
        starts = ids.reshape(-1, slots)[:, 0]            # a pad or an end of chunk begins none
        assert slots == 1 or (starts <= 257).all() and (starts != 256).all()


# ---- Nothing is lost ----------------------------------------------------------------------------

def test_overwrite_touches_only_data_sets(tmp_path):
    write_files(tmp_path, ['raw/babylm/train.zip', 'mine/notes.jsonl'])
    with pytest.raises(UserError, match='raw is not a data set'):
        with new_folder(tmp_path / 'raw', overwrite=True):
            pass
    with pytest.raises(UserError, match='the input lies in'):
        prepare.main(['text', '--name=mine', f'--input={tmp_path}/mine', f'--out={tmp_path}',
                      '--overwrite'])
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / 'mine', overwrite=True):
        1 / 0
    assert sorted(os.listdir(tmp_path)) == ['mine', 'raw']
    assert (tmp_path / 'mine/notes.jsonl').exists()


@pytest.mark.skipif(os.name == 'nt', reason='Windows has neither pipes with names nor SIGKILL')
@pytest.mark.parametrize('name', ['SIGKILL', 'SIGTERM'])
def test_a_killed_process_leaves_no_half_data_set(tmp_path, name):
    """It is killed as it waits for text. What SIGKILL leaves, the next one removes."""
    os.mkfifo(tmp_path / 'pipe')
    command = [sys.executable, str(ROOT / 'prepare.py'), 'text', '--name=mine', '--input=pipe']
    process = subprocess.Popen(command, cwd=tmp_path)
    with open(tmp_path / 'pipe', 'w'):                   # waits until the process has opened it
        process.send_signal(getattr(signal, name))
        process.wait()
    left = [] if name == 'SIGTERM' else ['.mine.tmp']
    assert os.listdir(tmp_path / 'data') == left
    write_data_set(tmp_path / 'data/mine', as_train('ab'), choose_tokenizer('bytes'))
    assert os.listdir(tmp_path / 'data') == ['mine']


def test_python_files(tmp_path, monkeypatch):
    """No file twice, none above 200 KB, none of the base installation's packages; a package is
    whole in one split, and validation text is at most the wanted share."""
    folders = dict(stdlib=tmp_path / 'lib', purelib=tmp_path / 'venv')
    monkeypatch.setattr(prepare.sysconfig, 'get_path', lambda name: str(folders[name]))
    files = {f"{'lib' if n < 4 else 'venv'}/package_{n}/{m}.py": f'package, m = {n}, {m}\n'
             for n in range(8) for m in range(3)}
    files |= {'lib/site-packages/a.py': 'x = 1\n', 'lib/copy.py': 'package, m = 5, 0\n',
              'venv/long.py': '#' * 200_001, 'venv/blank.py': '\n', 'venv/empty.py': ''}
    write_files(tmp_path, files)
    documents = list(prepare.read_python(0.25))
    assert len(documents) == 24 and len({text for _, text in documents}) == 24
    splits = {}
    for split, text in documents:
        splits.setdefault(text.split()[3], set()).add(split)
    assert sorted(map(sorted, splits.values())) == 6 * [['train']] + 2 * [['val']]


# ---- The toy corpora ----------------------------------------------------------------------------

PINNED = {'toy_stories': 'b3d26387a782821f', 'toy_math': 'afee4c8257df1176',
          'toy_lingo': 'f139e314a00cf786', 'toy_blimp': 'fb8e16909503a603'}


def test_toy_is_the_same_everywhere(data_dir):
    for name, expected in PINNED.items():
        digest = hashlib.sha256()
        folder = data_dir / name
        for path in sorted(folder.glob('*.bin')) + sorted(folder.glob('*.jsonl')):
            digest.update(path.read_bytes())
        assert digest.hexdigest()[:16] == expected, name


def test_toy_folders(data_dir, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in data_dir.rglob('*')}
    prepare.main(['toy', '--out', str(data_dir)])
    prepare.make_toys(['toy_math', 'my_book'], data_dir)
    assert before == {path: path.stat().st_mtime_ns for path in data_dir.rglob('*')}
    assert sorted(os.listdir(data_dir)) == sorted(TOYS)
    names = ['toy_stories', 'toy_math', 'toy_lingo']
    assert len({load_tokenizer(data_dir / name).hash for name in names}) == 1
    prepare.make_toys(['my_book', 'toy_storys', 'toy_blimp'], tmp_path)
    assert os.listdir(tmp_path) == ['toy_blimp']
