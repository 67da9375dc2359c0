"""prepare.py: readers, bins that hold every document, folders that are complete or not there."""

import bz2
import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import prepare
from conftest import ROOT, documents
from plumbing.cli import UserError
from plumbing.download import new_folder
from plumbing.tokenizer import (EOT, choose_tokenizer, load_meta, load_tokenizer, rank_tokenizer,
                                ranks_blob)
from plumbing.text import clean
from prepare import find_files, read_documents, write_data_set
from train import as_tensor, load_bin, tokens_at


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


def test_the_tokenizer_has_not_seen_the_validation_text(tmp_path):
    write_data_set(tmp_path / 'd', [('train', 'the red cat ' * 9), ('val', 'zq ' * 99)], 300)
    tokens = load_tokenizer(tmp_path / 'd').token_bytes
    assert b' cat' in tokens and b' zq' not in tokens and b'zq' not in tokens


def test_no_copies(tmp_path, capsys):
    """A training document that shares a long line with validation text, here or elsewhere, is
    counted, or goes."""
    line, other, short = 'a red cat ' * 6, 'a blue cat ' * 6, 'a cat sat. ' * 5
    texts = [f'one\n{line}\nend', f'{other}', f'two\n{short}', f'{line}more']
    docs = [*as_train(texts), ('val', f'{line}\n{short}')]
    write_data_set(tmp_path / 'far', [('train', 'green'), ('val', f'x\n{other}')], 300)
    write_data_set(tmp_path / 'all', docs, 300, no_copies=None)
    assert sorted(documents(tmp_path / 'all', 'train')) == sorted(texts)
    assert '1 training documents share' in capsys.readouterr().out
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


def write_files(folder, names):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text('x')


def test_packed_files_and_folders(tmp_path):
    """The ends of names say what is text in a folder. Hidden files are not read, nor any twice."""
    write_files(tmp_path, ['image.png', '._a.txt', 'sub/.venv/c.txt'])
    (tmp_path / 'a.txt').write_text('plain')
    (tmp_path / 'b.txt.gz').write_bytes(gzip.compress(b'zipped'))
    (tmp_path / 'c.jsonl.xz').write_bytes(lzma.compress(b'{"text": "squeezed"}\n'))
    (tmp_path / 'e.txt.bz2').write_bytes(bz2.compress(b'packed'))
    (tmp_path / 'sub/d.jsonl.gz').write_bytes(gzip.compress(b'{"text": "deep"}\n'))
    files = find_files([tmp_path])
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
        write_files(tmp_path, [f'{name}/{split}/a.{ending}' for split in ('train', 'val')])
        for path in Path(name).rglob('a.*'):
            path.write_text(row * 5)
        prepare.main([name, '--input', name, '--tokenizer', 'bytes'])
        assert documents(Path('data', name), 'val') == expected


def test_more_than_65536_tokens(tmp_path):
    vocab = [bytes([b]) for b in range(256)] + [b'%05d!' % i for i in range(70000)]
    write_data_set(tmp_path / 'd', as_train(['a b 00007! 69999!'] * 9),
                   rank_tokenizer(ranks_blob(vocab)))
    ids = load_bin(tmp_path / 'd', 'train')
    assert ids.dtype == np.uint32 and load_meta(tmp_path / 'd')['dtype'] == 'uint32'
    assert ids[0] == 70256                               # end-of-text
    assert tokens_at(as_tensor(ids, 'cpu'), torch.arange(len(ids))).tolist() == ids.tolist()
    signed = as_tensor(np.array([65535, 3], np.uint16), 'cpu')
    assert tokens_at(signed, torch.arange(2)).tolist() == [65535, 3]


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
