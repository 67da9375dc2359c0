"""
Downloads over HTTPS, and where the named data sets come from.

A file arrives as name.part and takes its name when it is whole and right; a broken connection goes on where it stopped.
"""

import hashlib
import http.client
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path

from tqdm import tqdm

from errors import UserError

HF, OSF = 'https://huggingface.co/datasets/', 'https://osf.io/download/'
WIKI = 'https://dumps.wikimedia.org/simplewiki/latest/simplewiki-latest-pages-articles.xml.bz2'
NAMED = {   # where each comes from, and how it is prepared unless the command says otherwise
    'tinystories': (dict(split='eot', tokenizer='gpt2'), {f'{s}.txt':
        f'{HF}roneneldan/TinyStories/resolve/main/TinyStories-{s}.txt' for s in ('train', 'valid')}),
    'openmath': (dict(field='question,generated_solution', tokenizer='gpt2'), {f'{s}.jsonl':
        f'{HF}nvidia/OpenMathInstruct-1/resolve/main/correct_solutions/{s}.jsonl' for s in ('train', 'validation')}),
    'babylm': (dict(split='passage'), {'train.zip': OSF + 'y7djq/', 'val.zip': OSF + 'uyd7v/'}),
    'simplewiki': (dict(split='blank', tokenizer='gpt2'), {'articles.xml.bz2': WIKI}),
    'blimp': ({}, {'blimp.zip': 'https://github.com/alexwarstadt/blimp/archive/refs/heads/master.zip'})}


def fetch(url, start=0):
    headers = {'User-Agent': 'nanopaths prepare.py', **({'Range': f'bytes={start}-'} if start else {})}
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)


def receive(url, part):
    """Fetch a file, or what is missing of it; ConnectionError if the connection ends early."""
    have = part.stat().st_size if part.exists() else 0
    with fetch(url, have) as reply:
        have = have if reply.status == 206 else 0           # 200: the server ignores Range and sends everything again
        total = have + int(reply.headers['Content-Length']) if reply.headers['Content-Length'] else None
        with open(part, 'ab' if have else 'wb') as file, tqdm(
                total=total, initial=have, unit='B', unit_scale=True, desc=part.stem, leave=False, disable=None) as bar:
            while block := reply.read(2 ** 16):
                have += file.write(block)
                bar.update(len(block))
    if total not in (None, have):
        raise ConnectionError(f'{have:,} of {total:,} bytes came')


def download(url, path, size=None, checksum=None, tries=6, pause=1.0):
    """Fetch url into path by way of path.part, going on where a broken connection stopped. checksum: 'sha256:...'"""
    part, reason = Path(f'{path}.part'), None
    for attempt in range(tries):
        try:
            if not part.exists() or part.stat().st_size != size:
                receive(url, part)
            break
        except urllib.error.HTTPError as error:
            reason = f'HTTP {error.code} {error.reason}'
            if error.code == 416:                           # the part is longer than the file: not ours
                part.unlink()
            elif error.code < 500 and error.code != 429:
                raise UserError(f'{url}: {reason}; get the data elsewhere and give it with --input')
        except (OSError, http.client.HTTPException) as error:
            reason = error
        if attempt < tries - 1:
            print(f'{path.name}: {reason}; trying again in {pause * 2 ** attempt:g} s', file=sys.stderr)
            time.sleep(pause * 2 ** attempt)
    else:
        raise UserError(f'{url}: {reason}, after {tries} tries; run the command again to go on, or give --input')
    found, (kind, _, digest) = part.stat().st_size, (checksum or '').partition(':')
    with open(part, 'rb') as file:
        right = size in (None, found) and (not kind or hashlib.file_digest(file, kind).hexdigest() == digest)
    if not right:
        part.unlink()
        raise UserError(f'{url}: {found:,} bytes of a wrong size or checksum came and were deleted; try again')
    part.replace(path)


def published(url):
    """(size, checksum) of a file, from Hugging Face's pointer file or Wikimedia's list of sums."""
    place = re.sub('/resolve/', '/raw/', re.sub(r'pages-articles.*', 'sha1sums.txt', url))
    try:
        text = fetch(place).read(2 ** 20).decode() if place != url else ''
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f'{place}: {error}; get the data elsewhere and give it with --input')
    pointer = re.search(r'oid (sha256:\w+)\nsize (\d+)', text)
    listed = re.search(r'(\w{40})  \S+-pages-articles\.xml\.bz2', text)
    return (int(pointer[2]), pointer[1]) if pointer else (None, 'sha1:' + listed[1] if listed else None)


def fetch_named(name, raw, base=None, pause=1.0):
    """Download a named data set into raw/name, and unpack a zip's text files there; base: another host, for tests."""
    folder = Path(raw) / name
    for file, url in NAMED[name][1].items():
        url, path = re.sub('https://[^/]+', base, url) if base else url, folder / file
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            download(url, path, *published(url), pause=pause)
        if path.suffix == '.zip' and not path.with_suffix('').exists():
            try:
                unpack(path)
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                path.unlink()
                raise UserError(f'{url}: not a whole zip file ({error}), so it was deleted; try again') from None
    return [folder]


def unpack(path):
    """The text files of name.zip into the folder name, which takes its name when it is whole."""
    work = path.with_suffix('.unpacking')
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    with zipfile.ZipFile(path) as pack:
        for member in pack.namelist():
            if re.search(r'\.(txt|train|dev|jsonl)$', member) and '__MACOSX' not in member:
                (work / Path(member).name).write_bytes(pack.read(member))
    work.rename(path.with_suffix(''))
