"""Downloads from a server of our own, and zip files."""

import contextlib
import http.server
import os
import random
import re
import threading
import zipfile

import pytest

from plumbing.cli import UserError
from plumbing.download import download, fetch_named, unpack

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


def test_unpack(tmp_path):
    """Only text files, and none outside its folder."""
    with zipfile.ZipFile(tmp_path / 'train.zip', 'w') as pack:
        for name in ('../train_10M/a.train', '__MACOSX/train_10M/._a.train', 'b.png'):
            pack.writestr(name, 'A line.')
    unpack(tmp_path / 'train.zip')
    assert sorted(os.listdir(tmp_path)) == ['train', 'train.zip']
    assert os.listdir(tmp_path / 'train') == ['a.train']
