"""Downloads, from a server of our own: whole, broken, wrong; and where the named data sets come from."""

import bz2
import hashlib
import http.server
import io
import json
import os
import random
import re
import threading
import zipfile

import pytest

import prepare
from plumbing import cli, download as downloads
from plumbing.cli import UserError
from plumbing.download import download, fetch_named, unpack
from plumbing.tokenizer import EOT

BODY = random.Random(3).randbytes(10000)


class Server:
    """Serves `files`; `breaks` connections are cut after 3,000 bytes; ranges are honoured or ignored."""

    def __init__(self, files, breaks=0, ranges=True):
        self.files = files
        self.breaks = breaks
        self.ranges = ranges
        self.asked = []
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
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def test_download_resumes(tmp_path):
    checksum = 'sha256:' + hashlib.sha256(BODY).hexdigest()
    with Server({'/f': BODY}, breaks=2) as server:
        download(server.base + '/f', tmp_path / 'f', len(BODY), checksum, pause=0)
        assert server.asked == [('/f', None), ('/f', 'bytes=3000-'), ('/f', 'bytes=6000-')]
    assert (tmp_path / 'f').read_bytes() == BODY and os.listdir(tmp_path) == ['f']


def test_download_goes_on_with_an_old_part_and_whole_part(tmp_path):
    (tmp_path / 'f.part').write_bytes(BODY[:4000])
    (tmp_path / 'g.part').write_bytes(BODY)
    (tmp_path / 'h.part').write_bytes(BODY + b'more')
    with Server({'/f': BODY, '/g': BODY, '/h': BODY}) as server:
        download(server.base + '/f', tmp_path / 'f', pause=0)
        download(server.base + '/g', tmp_path / 'g', len(BODY), pause=0)
        download(server.base + '/h', tmp_path / 'h', len(BODY), pause=0)
        assert server.asked == [('/f', 'bytes=4000-'), ('/h', 'bytes=10004-'), ('/h', None)]
    assert all((tmp_path / n).read_bytes() == BODY for n in 'fgh')


def test_download_without_ranges(tmp_path):
    with Server({'/f': BODY}, breaks=2, ranges=False) as server:
        download(server.base + '/f', tmp_path / 'f', pause=0)
    assert (tmp_path / 'f').read_bytes() == BODY


def test_download_fails_clearly(tmp_path):
    with Server({'/f': BODY}) as server:
        wrong = [dict(checksum='sha256:' + '0' * 64), dict(checksum='sha1:' + '0' * 40), dict(size=9999)]
        for options in wrong:
            with pytest.raises(UserError, match='wrong size or checksum'):
                download(server.base + '/f', tmp_path / 'f', pause=0, **options)
            assert os.listdir(tmp_path) == []
        with pytest.raises(UserError, match='404'):
            download(server.base + '/nothing', tmp_path / 'f', pause=0)
    with Server({'/f': BODY}, breaks=99, ranges=False) as server:
        with pytest.raises(UserError, match='3,000 of 10,000 bytes.*again'):
            download(server.base + '/f', tmp_path / 'f', pause=0)
    assert os.listdir(tmp_path) == ['f.part']
    with pytest.raises(UserError, match='--input'):
        download('http://127.0.0.1:9/f', tmp_path / 'f', pause=0)


def zipped(files, method=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w', method) as pack:
        for name, text in files.items():
            pack.writestr(name, text)
    return out.getvalue()


def test_names_in_an_archive(tmp_path):
    """Only the last part of a name is used, and only if it is plain."""
    names = ['../a.txt', '/b.txt', 'c/../../d.jsonl', '..\\e.txt', 'C:\\f.txt', '..', '.txt', 'x/.g.txt']
    (tmp_path / 'in').mkdir()
    path = tmp_path / 'in' / 'pack.zip'
    path.write_bytes(zipped(dict.fromkeys(names, 'text')))
    unpack(path)
    assert sorted(os.listdir(path.with_suffix(''))) == ['a.txt', 'b.txt', 'd.jsonl', 'e.txt', 'f.txt']
    assert os.listdir(tmp_path) == ['in'] and sorted(os.listdir(tmp_path / 'in')) == ['pack', 'pack.zip']


def patched(pack, local, central, value):
    """One byte of the first file's two headers."""
    pack = bytearray(pack)
    pack[local] = pack[pack.index(b'PK\1\2') + central] = value
    return bytes(pack)


PACK = zipped({'a.txt': 'x' * 200000})
BROKEN = dict(
    cut=(PACK[:-30], 'not a zip file'),
    garbage=(b'<html>', 'not a zip file'),
    bomb=(zipped({'a.txt': 'x' * 200000, 'b.txt': 'x' * 10 ** 6}, zipfile.ZIP_DEFLATED), 'bomb'),
    bzip2=(zipped({'a.txt': 'x'}, zipfile.ZIP_BZIP2), 'bomb'),
    unknown=(patched(PACK, 8, 10, 99), 'bomb'),
    encrypted=(patched(PACK, 6, 8, 1), 'encrypted'),
    longer=(patched(PACK, 22, 24, 9), 'CRC'))           # than its header says


@pytest.mark.parametrize('name', BROKEN)
def test_broken_archives(tmp_path, monkeypatch, name):
    monkeypatch.setattr(cli, 'LARGE', 2 ** 18)
    content, reason = BROKEN[name]
    (tmp_path / 'blimp').mkdir()
    (tmp_path / 'blimp' / 'blimp.zip').write_bytes(content)
    with pytest.raises(UserError, match=f'blimp.zip cannot be unpacked .*{reason}'):
        fetch_named('blimp', tmp_path)
    assert os.listdir(tmp_path / 'blimp') == ['blimp.zip']


def served():
    """{path on the server: content} of the named data sets, in little."""
    story = f'A story of a cat.\n{EOT}\n'.encode() * 500
    oid = hashlib.sha256(story).hexdigest()
    pointer = f'version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(story)}\n'.encode()
    page = '<page><title>T</title><ns>0</ns><revision><text>Word.</text></revision></page>'
    wiki = bz2.compress(f'<m xmlns="x">{page}</m>'.encode())
    sums = f'{"0" * 40}  simplewiki-20250101-stub.xml.gz\n' \
        f'{hashlib.sha1(wiki).hexdigest()}  simplewiki-20250101-pages-articles.xml.bz2\n'
    pair = json.dumps(dict(sentence_good='a', sentence_bad='b')) + '\n'
    pairs = {f'blimp-master/data/p{i}.jsonl': pair for i in range(67)}
    lines = {'train_10M/a.train': 'A line.\n' * 9, '__MACOSX/train_10M/._a.train': 'no'}
    files = {'/simplewiki/latest/simplewiki-latest-pages-articles.xml.bz2': wiki,
             '/simplewiki/latest/simplewiki-latest-sha1sums.txt': sums.encode(),
             '/download/y7djq/': zipped(lines),
             '/download/uyd7v/': zipped({'dev/a.dev': 'Another.\n'}),
             '/alexwarstadt/blimp/archive/refs/heads/master.zip': zipped(pairs)}
    for split in ('train', 'valid'):
        files[f'/datasets/roneneldan/TinyStories/resolve/main/TinyStories-{split}.txt'] = story
        files[f'/datasets/roneneldan/TinyStories/raw/main/TinyStories-{split}.txt'] = pointer
    return files


def test_named_downloads(tmp_path, monkeypatch):
    files = served()
    open_url = downloads.open_url
    monkeypatch.setattr(downloads.time, 'sleep', lambda seconds: None)
    with Server(files, breaks=1) as server:
        here = lambda url, start=0: open_url(re.sub('https://[^/]+', server.base, url), start)
        monkeypatch.setattr(downloads, 'open_url', here)
        found = {}
        for name in ('tinystories', 'simplewiki', 'babylm', 'blimp'):
            found[name] = prepare.find_files(fetch_named(name, tmp_path))
        asked = len(server.asked)
        fetch_named('tinystories', tmp_path)
        assert len(server.asked) == asked                # everything is there already
        files['/datasets/roneneldan/TinyStories/resolve/main/TinyStories-train.txt'] += b'!'
        (tmp_path / 'tinystories/train.txt').unlink()
        with pytest.raises(UserError, match='wrong size'):
            fetch_named('tinystories', tmp_path)
    names = {name: [(role, path.name) for role, path in paths] for name, paths in found.items()}
    assert names['tinystories'] == [('train', 'train.txt'), ('val', 'valid.txt')]
    assert names['babylm'] == [('train', 'a.train'), ('val', 'a.dev')]
    assert list(prepare.read_documents(found['simplewiki'][0][1], set())) == ['T\nWord.']
    assert len(found['blimp']) == 67
    with pytest.raises(UserError, match='67 of 1,000'):
        prepare.copy_pairs(tmp_path / 'pairs', [tmp_path / 'blimp'], all_of_blimp=True, overwrite=False)
    assert not (tmp_path / 'pairs').exists()
