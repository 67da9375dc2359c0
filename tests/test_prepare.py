"""prepare.py: readers, data sets whole or not at all, the command line and every error it may end in."""

import bz2
import gzip
import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT, documents
from plumbing import cli
from plumbing.cli import UserError
from plumbing.data import load_bin
from plumbing.download import new_folder
from plumbing.tokenizer import (EOT, PATTERN, choose_tokenizer, load_meta, load_tokenizer, ranks_blob,
                                train_bpe)
from plumbing.wiki import clean
from prepare import find_files, parallel, read_documents, write_data_set


@pytest.fixture
def prepare(run, tmp_path):
    """python prepare.py, in a folder of its own."""
    def prepare(*args, here=True, **more):
        return run('prepare.py', *args, cwd=tmp_path, here=here, **more)
    return prepare


# ---- Data sets ----------------------------------------------------------------------------------


def words_corpus(n=400, seed=0):
    rng = random.Random(seed)
    words = ['red', 'blue', 'green', 'cat', 'über', '🙂', '7']
    return [' '.join(rng.choice(words) for _ in range(rng.randrange(1, 30))) for _ in range(n)]


def as_train(texts):
    return (('train', text) for text in texts)


def test_write_and_load(tmp_path, capsys):
    docs = [text.replace(' ', '\n  ', 1) for text in words_corpus()]     # words end at any white space
    write_data_set(tmp_path / 'd', as_train(docs), 300, val_fraction=.1)
    assert 'note: a loss on' in capsys.readouterr().out  # some 600 tokens
    meta = load_meta(tmp_path / 'd')
    assert meta['splits']['val']['tokens'] < 1000
    assert sorted(documents(tmp_path / 'd', 'train') + documents(tmp_path / 'd', 'val')) == sorted(docs)
    assert documents(tmp_path / 'd', 'train') != docs[:360]
    names = sorted(p.name for p in (tmp_path / 'd').iterdir())
    assert names == ['meta.json', 'tokenizer.tiktoken', 'train.bin', 'val.bin']
    assert os.listdir(tmp_path) == ['d'] and str(tmp_path) not in (tmp_path / 'd/meta.json').read_text()
    for split in ('train', 'val'):
        texts = documents(tmp_path / 'd', split)
        tokens = len(load_bin(tmp_path / 'd', split))
        words = sum(len(t.split()) for t in texts)
        n_bytes = sum(len(t.encode()) for t in texts)
        assert meta['splits'][split] == dict(tokens=tokens, documents=len(texts), words=words, bytes=n_bytes)
    assert meta['splits']['val']['documents'] == 40 and load_bin(tmp_path / 'd', 'train').dtype == np.uint16
    size = load_tokenizer(tmp_path / 'd').n_vocab
    assert meta['tokenizer']['vocab_size'] == size == meta['tokenizer']['eot'] + 1


def test_what_is_printed_counts_what_is_there(tmp_path, capsys):
    tokenizer = choose_tokenizer('bytes')
    write_data_set(tmp_path / 'd', [('train', 'a b'), ('train', 'c'), ('val', 'd')], tokenizer)
    assert capsys.readouterr().out.splitlines()[:2] == [
        f'{tmp_path}/d/train.bin: 7 tokens, 2 documents, 3 words',
        f'{tmp_path}/d/val.bin: 3 tokens, 1 document, 1 word']
    write_data_set(tmp_path / 'c', [('train', 'a b'), ('val', 'd')], tokenizer, chunks=3)
    assert 'c/val.bin: 12 slots, 1 document' in capsys.readouterr().out  # three chunks


def test_the_tokenizer_has_not_seen_the_validation_text(tmp_path):
    write_data_set(tmp_path / 'd', [('train', 'the red cat ' * 9), ('val', 'zq ' * 99)], 300)
    tokens = load_tokenizer(tmp_path / 'd').token_bytes
    assert b' cat' in tokens and b' zq' not in tokens and b'zq' not in tokens


def test_the_seed_decides_the_order(tmp_path):
    given = [*as_train(words_corpus()), ('val', 'a cat')]
    for name, seed in (('a', 1), ('b', 2), ('c', 1)):
        write_data_set(tmp_path / name, given, choose_tokenizer('bytes'), seed=seed)
    a, b, c = (documents(tmp_path / name, 'train') for name in 'abc')
    assert a == c != b and sorted(a) == sorted(b)


def test_chunk_stream(tmp_path):
    docs = words_corpus()
    write_data_set(tmp_path / 'c', as_train(docs), 290, chunks=4, val_fraction=.1)
    ids = np.array(load_bin(tmp_path / 'c', 'train')).reshape(-1, 5)
    assert sorted(documents(tmp_path / 'c', 'train') + documents(tmp_path / 'c', 'val')) == sorted(docs)
    assert ids[0].tolist() == [257, 258, 258, 258, 258] and not {256, 258} & set(ids[:, 0].tolist())


@pytest.mark.slow
def test_workers_and_start_methods_give_the_same_bytes(tmp_path):
    rng = random.Random(5)
    docs = [' '.join(str(rng.randrange(500)) for _ in range(50)) for _ in range(8000)]
    code = '''if True:
        import multiprocessing, pathlib, random, sys
        multiprocessing.set_start_method(sys.argv[1])
        sys.path.insert(0, sys.argv[2])
        import prepare
        rng = random.Random(5)
        docs = [' '.join(str(rng.randrange(500)) for _ in range(50)) for _ in range(8000)]
        prepare.write_data_set(pathlib.Path(sys.argv[3]), (('train', d) for d in docs), 400, jobs=2)'''
    write_data_set(tmp_path / 'one', as_train(docs), 400, jobs=1)
    for method in ('fork', 'spawn'):
        subprocess.run([sys.executable, '-c', code, method, str(ROOT), str(tmp_path / method)], check=True)
    for method in ('fork', 'spawn'):
        for file in ('train.bin', 'val.bin', 'tokenizer.tiktoken'):
            assert (tmp_path / method / file).read_bytes() == (tmp_path / 'one' / file).read_bytes()


def kill_one(folder, task):
    if task == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_was_killed(tmp_path):
    """As the kernel does where the memory is full. A pool would wait for its result for ever."""
    with pytest.raises(UserError, match='a worker was killed'):
        list(parallel(kill_one, tmp_path, range(9), jobs=2))


def test_a_worker_that_is_stopped_while_it_starts(tmp_path):
    """The pool starts another in place of the killed one, and ends it at once. Python forgets a SIGTERM
    that comes while it forks; here this lasts two seconds. Then the pool would wait for ever."""
    code = '''if True:
        import os, pathlib, signal, sys, time
        sys.path.insert(0, sys.argv[1])
        import prepare
        from test_prepare import kill_one
        forget = lambda *_: None
        os.register_at_fork(after_in_child=lambda: (signal.signal(signal.SIGTERM, forget), time.sleep(2)))
        try:
            list(prepare.parallel(kill_one, pathlib.Path(), range(9), jobs=2))
        except prepare.UserError as error:
            print(error)'''
    done = subprocess.run([sys.executable, '-c', code, str(ROOT)], cwd=ROOT / 'tests', capture_output=True,
                          text=True, timeout=60)
    assert 'a worker was killed' in done.stdout, done.stderr


def test_a_data_set_that_appeared_meanwhile(tmp_path):
    target = tmp_path / 'd'
    with pytest.raises(UserError, match='could not be written'):
        with new_folder(target) as slow:
            (slow / 'meta.json').write_text('slow')
            with new_folder(target) as quick:
                (quick / 'meta.json').write_text('quick')
    assert (target / 'meta.json').read_text() == 'quick' and os.listdir(tmp_path) == ['d']


def test_broken_data_sets(tmp_path):
    target = tmp_path / 'd'
    write_data_set(target, as_train(words_corpus()), 300)
    size = (target / 'train.bin').stat().st_size
    (target / 'train.bin').write_bytes((target / 'train.bin').read_bytes()[:-2])
    with pytest.raises(UserError, match=f'train.bin.*{size:,}.*{size - 2:,}.*prepare.py'):
        load_bin(target, 'train')
    (target / 'val.bin').unlink()
    with pytest.raises(UserError, match='val.bin'):
        load_bin(target, 'val')
    blob = (target / 'tokenizer.tiktoken').read_bytes()
    (target / 'tokenizer.tiktoken').write_bytes(ranks_blob([bytes([b]) for b in range(256)]))
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


def test_a_pipe_is_read_once_and_whole(tmp_path):
    text = '\n\n'.join(f'document {i}' for i in range(20000))
    os.mkfifo(tmp_path / 'pipe')
    writer = threading.Thread(target=(tmp_path / 'pipe').write_text, args=(text,))
    writer.start()
    assert read(tmp_path / 'pipe') == text.split('\n\n')
    writer.join()


def test_many_blank_lines(tmp_path):
    (tmp_path / 'a.txt').write_text('one' + '\n' * 30000)    # with a cubic pattern this takes days
    assert read(tmp_path / 'a.txt') == ['one']
    (tmp_path / 'a.txt').write_text('one\n' + ' \n' * 9000 + 'two')
    assert read(tmp_path / 'a.txt') == ['one', 'two']


def test_jsonl(tmp_path):
    smile = 'é\ud83d\ude42'.encode('utf-16', 'surrogatepass').decode('utf-16')
    rows = [dict(text='a\u2028b\x85c', more='x'), dict(text=smile, more='y')]
    path = tmp_path / 'a.jsonl'
    lines = [json.dumps(r, ensure_ascii=False) for r in rows]
    path.write_text('\n\n'.join(lines) + '\r\n', encoding='utf-8')
    assert read(path) == ['a\u2028b\x85c', 'é🙂']
    assert read(path, 'auto', 'more, text') == ['x\na\u2028b\x85c', 'y\né🙂']


def test_compressed_and_folders(tmp_path, capsys):
    folder = tmp_path / 'in'
    (folder / 'sub').mkdir(parents=True)
    (folder / 'a.txt').write_text('plain')
    (folder / 'b.txt.gz').write_bytes(gzip.compress(b'zipped'))
    (folder / 'c.jsonl.xz').write_bytes(lzma.compress(b'{"text": "squeezed"}\n'))
    (folder / 'sub' / 'd.jsonl.gz').write_bytes(gzip.compress(b'{"text": "deep"}\n'))
    (folder / 'image.png').write_bytes(b'\xff')
    (folder / 'e.txt.bz2').write_bytes(bz2.compress(b'packed'))
    (folder / 'pom.xml').write_text('<a/>')              # no dump of a wiki
    (folder / 'sub' / 'more.md').write_text('x')
    found = find_files([folder])
    assert capsys.readouterr().out.startswith('files skipped: 3; ')
    assert {role for role, _ in found} == {'train'}
    texts = [text for _, path in found for text in read(path)]
    assert texts == ['plain', 'zipped', 'squeezed', 'packed', 'deep']
    assert find_files([folder / 'sub' / 'more.md']) == [('train', folder / 'sub' / 'more.md')]
    assert capsys.readouterr().out == ''
    for name in ('a.tar.xz', 'a.tgz', 'a.ZIP'):          # not read as if it were one long text
        (folder / name).write_bytes(b'x')
        with pytest.raises(UserError, match='is an archive: unpack it'):
            find_files([folder / name])


def test_no_file_is_read_twice(tmp_path, capsys):
    """Otherwise validation text would be training text, too: neither a hidden copy, as editors keep one, nor
    a file that is named and lies in a folder."""
    books = tmp_path / 'books'
    for name in ('a.txt', 'b.txt', '._a.txt', '.ipynb_checkpoints/a-checkpoint.txt', 'sub/.venv/c.txt'):
        (books / name).parent.mkdir(exist_ok=True, parents=True)
        (books / name).write_text('x')
    expected = [('train', books / 'a.txt'), ('train', books / 'b.txt')]
    assert find_files([books]) == find_files([books, books / 'b.txt']) == expected
    assert capsys.readouterr().out == ''
    assert find_files([books / '._a.txt']) == [('train', books / '._a.txt')]     # it was asked for


@pytest.mark.parametrize('names, expected', [
    (['train.txt', 'val.txt', 'test.txt'], ['train', 'val']),
    (['train/a.txt', 'dev/a.txt', 'test/a.txt'], ['val', 'train']),
    (['train.txt', 'test.txt'], ['train']),              # val is cut from train
    (['a.txt', 'test.txt'], ['train', 'train']),
    (['X-train.txt', 'X-valid.txt', 'more.txt'], ['train', 'val', 'train']),
    (['val/a.txt', 'b.txt'], ['train', 'train']),
    (['train/a.txt', 'train/a_val.txt'], ['train', 'val']),      # the last word says so
    (['train_10M/a.train', 'dev/a.dev'], ['val', 'train']),
    (['valentine.txt', 'train.txt'], ['train', 'train'])])
def test_val_files(tmp_path, capsys, names, expected):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('x')
    assert sorted(role for role, _ in find_files([tmp_path])) == sorted(expected)
    said = 'files named test are left out: 1\n' if len(expected) < len(names) else ''
    if not any('train' in name for name in names):
        said = 'files named val, dev or test are training text, too: no name says train\n'
    assert capsys.readouterr().out == said


@pytest.mark.parametrize('names, expected', [
    (['train/a.txt', 'test/b.txt'], ['train']),
    (['train/a.txt', 'dev/b.txt', 'c.txt'], ['train', 'val', 'train']),
    (['test_1/a_train.txt', 'test_1/b.txt'], ['train', 'train']),   # a folder of all says nothing
    (['test/b.txt'], ['train'])])
def test_val_files_one_by_one(tmp_path, monkeypatch, names, expected):
    monkeypatch.chdir(tmp_path)
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text('x')
    assert [role for role, _ in find_files(names)] == expected


def test_wiki(tmp_path):
    page = '<page><title>{}</title><ns>{}</ns>{}<revision><text>{}</text></revision></page>'
    text = "'''Cats''' are [[animal|animals]].&lt;ref name=x&gt;No {{a|b}}&lt;/ref&gt; {{Box|{{in}}|x}}" \
        '[[File:a.jpg|thumb|a [[b]] c]]\n== Life ==\n* They [[sleep]] &amp;amp; eat. [http://x.org Site]\n' \
        '{| class=x\n|a\n|}\n==References==\nno'
    pages = page.format('Cat', 0, '', text) + page.format('Talk', 1, '', 'no') \
        + page.format('Old', 0, '<redirect/>', 'no')
    xml = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{pages}</mediawiki>'
    (tmp_path / 'a.xml.bz2').write_bytes(bz2.compress(xml.encode()))
    assert read(tmp_path / 'a.xml.bz2') == ['Cat\nCats are animals.\nLife\nThey sleep & eat. Site']
    no_title = '<a xmlns="x"><page><ns>0</ns><text>hi</text></page></a>'
    (tmp_path / 'a.xml.bz2').write_bytes(bz2.compress(no_title.encode()))
    assert read(tmp_path / 'a.xml.bz2') == ['hi']


@pytest.mark.parametrize('xml, reason', [
    ('<a><b>', 'no element found'),
    ('<?xml version="1.0" encoding="x"?><a/>', 'unknown encoding'),
    (f'<a>{" " * 10 ** 6}</a>', 'unpacks to over')])
def test_broken_wiki(tmp_path, monkeypatch, xml, reason):
    monkeypatch.setattr(cli, 'LARGE', 2 ** 16)
    (tmp_path / 'a.xml.bz2').write_bytes(bz2.compress(xml.encode()))
    with pytest.raises(UserError, match=f'a.xml.bz2.*{reason}'):
        read(tmp_path / 'a.xml.bz2')


@pytest.mark.parametrize('text, cleaned', [
    ('a<ref name="x"/>b<ref>c <ref group=n>d</ref> e</ref>f', 'abf'),
    ('a<!-- b <!-- c -->d<!-- never ends', 'ad'),
    ('a {{b|{{c|{{d}}}}|{|\n|e\n|}}} f{| class=x\n{|\n|g\n|}\n|}', 'a  f'),
    ('[[File:a.jpg|thumb|[[b|c]] [d] [http://e f] h]]i', 'i'),
    ('[[a]] [[b|c]] [[d|e [[f|g]] h]] [[Category:i]][[:Category:j]]', 'a c e g h :Category:j'),
    ('[http://a.org], [https://b.org b [c] d] [http://e', ', b [c] d [http://e'),
    ('less <10 ppm<br/> more <b>bold</b>', 'less <10 ppm more bold'),
    ("== '''A''' ==\n\n \t\n* b  \n:: c ==\n__NOTOC__", 'A\nb\nc'),
    ('a\n== Notes ==\n* b', 'a')])
def test_wiki_markup(text, cleaned):
    assert clean(text) == cleaned


@pytest.mark.parametrize('opened', [
    '<ref', '<ref>', '<math <ref ', '<!--', '<', '[[', '[[a:', '[[a|', '[http://', '[http://a ', '{{', '{|',
    '\n==', ' ', ' =', "'", '__A', '\n ', '&#'])
def test_wiki_markup_that_never_ends(opened):
    """With a quadratic pattern each takes minutes."""
    for end in ('x', '>', ']]'):
        clean(opened * 100000 + end)


def test_wiki_markup_that_nests_too_deeply():
    assert '{{' in clean('{{' * 100000 + '}}' * 100000)


# ---- The command line ---------------------------------------------------------------------------


def test_text_command(prepare, tmp_path):
    docs = words_corpus(300)
    (tmp_path / 'train.txt').write_text('\n\n'.join(docs[:200]))
    (tmp_path / 'val.txt').write_text('\n\n'.join(docs[200:]))
    files = ['--input', 'train.txt', 'val.txt']
    done = prepare('text', '--name', 'mine', *files, '--vocab_size', 5000, here=False)
    assert not done.stderr and 'the text is too small for a vocabulary of 5,000' in done.stdout
    mine = tmp_path / 'data' / 'mine'
    assert sorted(documents(mine, 'val')) == sorted(docs[200:])
    assert load_meta(mine)['tokenizer']['vocab_size'] < 5000
    for name, options in [('again', ['--tokenizer', 'data/mine']), ('bytes', ['--tokenizer', 'bytes']),
                          ('chunks', ['--tokenizer', 'data/mine', '--chunks', 5]),
                          ('pauses', ['--tokenizer', 'data/mine', '--pauses', 3]),
                          ('sentences', ['--tokenizer', 'data/mine', '--sentences'])]:
        prepare('text', '--name', name, *files, *options)
        assert documents(tmp_path / 'data' / name, 'train') == documents(mine, 'train')
    assert load_tokenizer(tmp_path / 'data/again').hash == load_tokenizer(mine).hash
    limits = [load_tokenizer(tmp_path / 'data' / name).extra for name in ('chunks', 'sentences')]
    assert limits[0]['byte_limit'] == 5 and limits[1]['token_limit'] == 32
    one = ['--input', 'val.txt', '--tokenizer', 'bytes', '--overwrite']
    prepare('text', '--name', 'mine', *one)
    assert load_meta(mine)['tokenizer']['kind'] == 'bytes'
    names = ['again', 'bytes', 'chunks', 'mine', 'pauses', 'sentences']
    assert sorted(os.listdir(tmp_path / 'data')) == names


def test_a_test_set_is_not_trained_on(prepare, tmp_path):
    docs = words_corpus(300)
    (tmp_path / 'train.txt').write_text('\n\n'.join(docs[:200]))
    (tmp_path / 'test.txt').write_text('\n\n'.join(docs[200:]))
    done = prepare('text', '--name', 'mine', '--input', 'train.txt', 'test.txt', '--tokenizer', 'bytes')
    assert 'files named test are left out: 1' in done.stdout
    splits = [documents(tmp_path / 'data/mine', split) for split in ('train', 'val')]
    assert [len(split) for split in splits] == [198, 2] and sorted(sum(splits, [])) == sorted(docs[:200])


def test_named_from_input(prepare, tmp_path):
    vocab = train_bpe(Counter(PATTERN.findall('The cat sat on the mat. ' * 5)), 280)
    (tmp_path / 'r.tiktoken').write_bytes(ranks_blob(vocab))
    math = json.dumps(dict(question='1+1?', generated_solution='2')) + '\n'
    for name, ending, row in [('tinystories', 'txt', f'\nA story.\n{EOT}\n'), ('openmath', 'jsonl', math),
                              ('simplewiki', 'txt', 'Title\nText.\n\n'), ('babylm', 'txt', 'A line.\n')]:
        for split in ('train', 'val'):
            (tmp_path / name / split).mkdir(parents=True)
            (tmp_path / name / split / f'a.{ending}').write_text(row * 5)
        own = dict(babylm=[], openmath=['--vocab_size', '270'])      # instead of the set's tokenizer
        prepare(name, '--input', name, *own.get(name, ['--tokenizer', 'r.tiktoken']))
    assert documents(tmp_path / 'data/tinystories', 'val') == ['A story.'] * 5
    assert documents(tmp_path / 'data/openmath', 'val') == ['1+1?\n2'] * 5
    assert 256 < load_tokenizer(tmp_path / 'data/openmath').n_vocab <= 270
    assert documents(tmp_path / 'data/simplewiki', 'val') == ['Title\nText.'] * 5
    assert documents(tmp_path / 'data/babylm', 'val') == ['\n'.join(['A line.'] * 5)]
    pair = json.dumps(dict(sentence_good='a', sentence_bad='b')) + '\n'
    (tmp_path / 'pairs').mkdir()
    (tmp_path / 'pairs/x.jsonl').write_text(pair * 3)
    (tmp_path / 'pairs/about.txt').write_text('no pair')
    told = prepare('blimp', '--input', 'pairs').stdout
    assert told == 'data/blimp: 3 pairs in 1 file\n'
    assert (tmp_path / 'data/blimp/x.jsonl').read_text() == pair * 3
    assert os.listdir(tmp_path / 'data/blimp') == ['x.jsonl']
    (tmp_path / 'pairs/more').mkdir()
    (tmp_path / 'pairs/more/x.jsonl').write_text(pair)
    assert 'named x.jsonl' in prepare('blimp', '--name', 'both', '--input', 'pairs', code=2).stderr
    (tmp_path / 'a.txt').write_text('text')
    told = prepare('blimp', '--name', 'none', '--input', 'a.txt', code=2).stderr
    assert told == 'prepare.py: found 0 .jsonl files, 0 pairs; BLiMP has 67 of 1,000\n'


AB = {'a.txt': b'a\n\nb'}
CUT_GZ = gzip.compress(b'hello ' * 1000)[:-30]
CUT_XZ = lzma.compress(str(list(range(9000))).encode())[:-400]
ERRORS = [  # files, arguments, what the line must say
    ({'a.txt': b''}, ['--input', 'a.txt'], 'empty'),
    ({'a.txt': b' \n\n \n'}, ['--input', 'a.txt'], 'empty'),
    ({'a.txt': b'fine\nbad \xff\xfe'}, ['--input', 'a.txt'], 'a.txt.*line 2, byte 9.*UTF-8'),
    ({'a.jsonl': b'{"text": "x"}\n{"other": 1}\n'}, ['--input', 'a.jsonl'],
     'a.jsonl:2: .*text.*other.*--field'),
    ({'a.jsonl': b'{"text": "x"}\n{"text": \n'}, ['--input', 'a.jsonl'], 'a.jsonl:2: .*JSON'),
    ({'a.jsonl': b'{"text": 5}\n'}, ['--input', 'a.jsonl'], 'a.jsonl:1: '),
    ({'a.jsonl': b'{"id": 5, "a": "x"}\n'}, ['--input', 'a.jsonl', '--field', 'a, id'],
     "no text in 'id' .the row has: id, a"),
    ({'a.jsonl': b'["x"]\n'}, ['--input', 'a.jsonl'], 'a.jsonl:1: '),
    ({'a.jsonl': b'{"text": "\\ud800"}\n'}, ['--input', 'a.jsonl'], 'a.jsonl:1: '),
    ({'a.jsonl': b'[' * 100000}, ['--input', 'a.jsonl'], 'a.jsonl:1: .*nested'),
    ({}, ['--input', '/dev/zero'], 'line 1 is longer than 64 MB'),
    ({'a.csv': b'x'}, ['--input', 'a.csv'], 'no text to train on'),
    ({}, ['--input', 'nowhere.txt'], 'nowhere.txt'),
    ({'sub/a.png': b'x'}, ['--input', 'sub'], 'no .txt or .jsonl'),
    ({'a.txt.gz': CUT_GZ}, ['--input', 'a.txt.gz'], 'a.txt.gz.*broken'),
    ({'a.txt.gz': b'hello'}, ['--input', 'a.txt.gz'], 'a.txt.gz.*broken'),
    ({'a.txt.xz': CUT_XZ}, ['--input', 'a.txt.xz'], 'a.txt.xz.*broken'),
    ({'a.txt': b'one document'}, ['--input', 'a.txt'], 'one document.*validation.*more files'),
    (AB, ['--input', 'a.txt', '--vocab_size', '70000'], '65,536'),
    (AB, ['--input', 'a.txt', '--vocab_size', '100'], '257'),
    (AB, ['--input', 'a.txt', '--vocab_size', '300', '--tokenizer', 'bytes'], 'not allowed with'),
    (AB, ['--input', 'a.txt', '--tokenizer', 'nothing'], '--tokenizer nothing'),
    ({**AB, 'r.tiktoken': b'IQ== 0\n'}, ['--input', 'a.txt', '--tokenizer', 'r.tiktoken'], 'broken ranks'),
    ({**AB, 't.json': b'{}'}, ['--input', 'a.txt', '--tokenizer', 't.json'], 'tokenizer.json'),
    ({**AB, 'data/mine/notes.md': b'x'}, ['--input', 'a.txt', '--overwrite'], 'it holds .*notes.md'),
    ({**AB, 'data/mine/meta.json': b'{}'}, ['--input', 'a.txt'], 'exists already.*--overwrite'),
    ({'data/mine/a.jsonl': b'{"text": "x"}'}, ['--input', 'data/mine', '--overwrite'], 'input lies in'),
    (AB, ['--input', 'a.txt', '--chunks', '0'], '--chunks: 0 is not between 1 and 255'),
    (AB, ['--input', 'a.txt', '--byte_limit', '5'], 'unrecognized arguments: --byte_limit'),
    (AB, ['--input', 'a.txt', '--sentences', '0'], '--sentences: 0 is not between 1 and 255'),
    (AB, ['--input', 'a.txt', '--pauses', '256'], '--pauses: 256 is not between 1 and 255'),
    (AB, ['--input', 'a.txt', '--pauses'], '--pauses'),
    (AB, ['--input', 'a.txt', '--chunks', '--sentences'], '--sentences: not allowed with argument --chunks'),
    (AB, ['--input', 'a.txt', '--sentences', '--pauses', '5'], 'not allowed with argument --sentences'),
    (AB, ['--input', 'a.txt', '--val_fraction', '1'], '--val_fraction'),
    (AB, ['--input', 'a.txt', '--val_fraction', 'nan'], '--val_fraction'),
    (AB, ['--input', 'a.txt', '--name', 'x' * 300], '--name'),
    ({}, [], '--input'),
    ({}, ['--speed', '3'], '--speed'),
    ({}, ['--input', 'x', '--name', 'a/b'], 'a/b'),
    ({**AB, 'file': b''}, ['--input', 'a.txt', '--out', 'file'], 'could not be written')]


@pytest.mark.parametrize('case', range(len(ERRORS)))
def test_errors_are_one_line(prepare, tmp_path, case):
    files, args, expected = ERRORS[case]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    told = prepare('text', '--name', 'mine', *args, code=2).stderr
    assert told.count('\n') == 1 and told.startswith('prepare.py: '), told
    assert re.search(expected, told), told
    left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob('*') if p.is_file())
    assert left == sorted(files) and all((tmp_path / n).read_bytes() == c for n, c in files.items())
    assert not (tmp_path / 'data').exists() or set(os.listdir(tmp_path / 'data')) <= {'mine'}


def test_gpt2_without_network(prepare, tmp_path):
    (tmp_path / 'a.txt').write_text('a\n\nb')
    nowhere = 'http://127.0.0.1:9'
    told = prepare('text', '--name', 'mine', '--input', 'a.txt', '--tokenizer', 'gpt2', code=2, here=False,
                   TIKTOKEN_CACHE_DIR=str(tmp_path / 'none'), https_proxy=nowhere, HTTPS_PROXY=nowhere).stderr
    assert told.count('\n') == 1 and '.tiktoken' in told


@pytest.mark.parametrize('args, idle', [
    (['toy', '--name=mine'], '--name'), (['toy', '--input=a.txt'], '--input'),
    (['toy', '--overwrite', '--chunks=5'], '--chunks'), (['toy', '--val_fraction=.5'], '--val_fraction'),
    (['blimp', '--input=pairs', '--name=mine', '--tokenizer=gpt2'], '--tokenizer')])
def test_options_without_effect_are_refused(prepare, tmp_path, args, idle):
    assert f'leave out {idle}: it has no effect on {args[0]}' in prepare(*args, code=2).stderr
    assert not list(tmp_path.iterdir())


def test_any_seed(prepare, tmp_path):
    (tmp_path / 'a.txt').write_text('a\n\nb')
    prepare('text', '--name', 'mine', '--input', 'a.txt', '--tokenizer', 'bytes', '--seed', 10 ** 400)
    assert load_meta(tmp_path / 'data/mine')['settings']['seed'] == 10 ** 400


# ---- What a kill leaves -------------------------------------------------------------------------


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_killed_process(prepare, tmp_path, number):
    """It is killed as it waits for text. SIGTERM leaves nothing; what SIGKILL leaves, the next one clears."""
    os.mkfifo(tmp_path / 'pipe')
    command = [sys.executable, str(ROOT / 'prepare.py'), 'text', '--name', 'mine', '--input', 'pipe']
    process = subprocess.Popen(command, cwd=tmp_path)
    with open(tmp_path / 'pipe', 'w'):                   # waits until the process has opened it
        at_work = os.listdir(tmp_path / 'data')
        with pytest.raises(UserError, match='other'), new_folder(tmp_path / 'data/mine'):
            raise UserError('other processes leave it alone')
        assert sorted(os.listdir(tmp_path / 'data')) == sorted(at_work) and len(at_work) == 2
        process.send_signal(number)
        assert process.wait() == (143 if number == signal.SIGTERM else -number)
    assert len(os.listdir(tmp_path / 'data')) == (0 if number == signal.SIGTERM else 2)
    (tmp_path / 'a.txt').write_text('a\n\nb')
    prepare('text', '--name', 'mine', '--input', 'a.txt', '--tokenizer', 'bytes')
    assert os.listdir(tmp_path / 'data') == ['mine']


def test_a_data_set_survives_its_replacement(tmp_path):
    """Killed between the two renames, a process leaves an old one and no new one."""
    mine, work = tmp_path / 'mine', tmp_path / '.mine.0123456789ab'
    other = tmp_path / '.mine.2.0123456789ab'            # of another name
    for folder in (f'{work}.old', work, f'{other}.old'):
        Path(folder).mkdir()
        (Path(folder) / 'meta.json').write_text(Path(folder).name)
    Path(f'{work}.lock').touch()
    Path(f'{other}.lock').touch()
    with pytest.raises(UserError, match='exists already'), new_folder(mine):
        pass
    assert (mine / 'meta.json').read_text() == f'{work.name}.old'
    rest = [f'{other.name}.lock', f'{other.name}.old', 'mine']
    assert sorted(os.listdir(tmp_path)) == rest
    with pytest.raises(SystemExit), new_folder(mine, overwrite=True) as folder:
        mine.rename(f'{folder}.old')
        sys.exit(143)                                    # as SIGTERM does, between the renames
    assert (mine / 'meta.json').read_text() == f'{work.name}.old' and sorted(os.listdir(tmp_path)) == rest


@pytest.mark.slow
def test_kill_leaves_no_half_data_set(tmp_path):
    texts = [' '.join([str(random.Random(i).randrange(10 ** 9))] * 40) for i in range(40000)]
    (tmp_path / 'a.txt').write_text('\n\n'.join(texts))
    options = ['--name', 'mine', '--input', 'a.txt', '--vocab_size', '2000']
    for delay in (.3, 1, 1.7):
        process = subprocess.Popen([sys.executable, str(ROOT / 'prepare.py'), 'text', *options], cwd=tmp_path,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        target = tmp_path / 'data/mine'
        assert not target.exists() or len(load_bin(target, 'train'))  # absent, or (on a fast machine) whole
        if target.exists():
            return
