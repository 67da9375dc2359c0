"""Downloads from a server of our own, and where the named data sets come from."""

import bz2
import contextlib
import http.server
import io
import json
import os
import random
import re
import threading
import urllib.request
import zipfile

import pytest

import prepare
from plumbing.cli import UserError
from plumbing.download import download, fetch_named
from plumbing.tokenizer import EOT

BODY = random.Random(3).randbytes(10000)


@contextlib.contextmanager
def serve(files, breaks=0, ranges=True):
    """The first `breaks` connections are cut after 3,000 bytes -> the address, and where the ranges
    start that were asked for."""
    starts = []
    cuts = iter(range(breaks))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            starts.append(int(re.search(r'bytes=(\d+)-', self.headers['Range'])[1]))
            if self.path not in files:
                return self.send_error(404)
            body = files[self.path][starts[-1] if ranges else 0:]
            self.send_response(206 if ranges else 200)
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            is_cut = next(cuts, None) is not None
            self.wfile.write(body[:3000] if is_cut else body)

        def log_message(self, *args):
            pass
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f'http://127.0.0.1:{server.server_address[1]}', starts
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize('ranges, starts', [(True, [0, 3000, 6000]), (False, [0, 3000, 3000])])
def test_a_download_goes_on_where_it_broke(tmp_path, ranges, starts):
    """If the server can send a part of a file; if not, it begins again."""
    with serve({'/f': BODY}, breaks=2, ranges=ranges) as (address, asked_for):
        for _ in range(2):
            with pytest.raises(UserError, match='connection broke; run the command again'):
                download(f'{address}/f', tmp_path / 'f')
            assert os.listdir(tmp_path) == ['f.part']
        download(f'{address}/f', tmp_path / 'f')
    assert asked_for == starts
    assert (tmp_path / 'f').read_bytes() == BODY and os.listdir(tmp_path) == ['f']


def test_a_download_that_fails(tmp_path):
    with serve({}) as (address, _), pytest.raises(UserError, match='404.*--input'):
        download(f'{address}/nothing', tmp_path / 'f')
    with pytest.raises(UserError, match='refused.*--input'):
        download('http://127.0.0.1:9/f', tmp_path / 'f')
    (tmp_path / 'blimp').mkdir()
    (tmp_path / 'blimp/blimp.zip').write_bytes(b'<html>')
    with pytest.raises(UserError, match='blimp.zip cannot be read: BadZipFile'):
        fetch_named('blimp', tmp_path)
    assert os.listdir(tmp_path / 'blimp') == ['blimp.zip']


def zipped(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w') as pack:
        for name, text in files.items():
            pack.writestr(name, text)
    return out.getvalue()


def named_files():
    """{path on the server: content} of the named data sets, in little."""
    page = '<page><title>T</title><ns>0</ns><revision><text>Word.</text></revision></page>'
    pair = json.dumps(dict(sentence_good='a', sentence_bad='b')) + '\n'
    pairs = {f'blimp-master/data/p{i}.jsonl': pair for i in range(67)}
    lines = {'../train_10M/a.train': 'A line.\n' * 9, '__MACOSX/train_10M/._a.train': 'no'}
    wiki = '/simplewiki/latest/simplewiki-latest-pages-articles.xml.bz2'
    files = {wiki: bz2.compress(f'<m xmlns="x">{page}</m>'.encode()),
             '/download/y7djq/': zipped(lines),
             '/download/uyd7v/': zipped({'dev/a.dev': 'Another.\n'}),
             '/alexwarstadt/blimp/archive/refs/heads/master.zip': zipped(pairs)}
    for split in ('train', 'valid'):
        path = f'/datasets/roneneldan/TinyStories/resolve/main/TinyStories-{split}.txt'
        files[path] = f'A story of a cat.\n{EOT}\n'.encode() * 500
    return files


def test_named_downloads(tmp_path, monkeypatch):
    request = urllib.request.Request
    with serve(named_files()) as (address, requests):
        def request_here(url, headers):
            return request(re.sub('https://[^/]+', address, url), headers=headers)
        monkeypatch.setattr(urllib.request, 'Request', request_here)
        files = {name: prepare.find_files(fetch_named(name, tmp_path))
                 for name in ('tinystories', 'simplewiki', 'babylm', 'blimp')}
        fetch_named('babylm', tmp_path)
        assert len(requests) == 6                        # nothing is asked for twice
    names = {name: [(split, path.name) for split, path in pairs] for name, pairs in files.items()}
    assert names['tinystories'] == [('train', 'train.txt'), ('val', 'valid.txt')]
    assert names['babylm'] == [('train', 'a.train'), ('val', 'a.dev')]
    assert list(prepare.read_documents(files['simplewiki'][0][1])) == ['T\nWord.']
    assert len(names['blimp']) == 67
