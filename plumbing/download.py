"""Downloads, where the named data sets come from, and folders that are whole or not there."""

import contextlib
import hashlib
import http.client
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
import uuid
import zipfile
import zlib
from pathlib import Path

from tqdm import tqdm

from plumbing.cli import UserError, lock, unpack_limit

STORIES = 'https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStories-'
MATH = 'https://huggingface.co/datasets/nvidia/OpenMathInstruct-1/resolve/main/correct_solutions/'
WIKI = 'https://dumps.wikimedia.org/simplewiki/latest/simplewiki-latest-pages-articles.xml.bz2'
BLIMP = 'https://github.com/alexwarstadt/blimp/archive/refs/heads/master.zip'
OSF = 'https://osf.io/download/'
NAMED = {    # how each is prepared unless the command says otherwise, and its files
    'tinystories': (dict(split='eot', tokenizer='gpt2'), {
        'train.txt': STORIES + 'train.txt', 'valid.txt': STORIES + 'valid.txt'}),
    'openmath': (dict(field='question,generated_solution', tokenizer='gpt2'), {
        'train.jsonl': MATH + 'train.jsonl', 'validation.jsonl': MATH + 'validation.jsonl'}),
    'babylm': (dict(split='passage'), {'train.zip': OSF + 'y7djq/', 'val.zip': OSF + 'uyd7v/'}),
    'simplewiki': (dict(split='blank', tokenizer='gpt2'), {'articles.xml.bz2': WIKI}),
    'blimp': ({}, {'blimp.zip': BLIMP})}


def fetch_named(name, raw):
    """Download a named data set into raw/name and unpack its zip files."""
    folder = Path(raw) / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, url in NAMED[name][1].items():
        path = folder / file
        if not path.exists():
            size, checksum = published(url)
            download(url, path, size, checksum)
        if path.suffix == '.zip' and not path.with_suffix('').exists():
            try:
                unpack(path)
            except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
                raise UserError(f'{path} cannot be unpacked ({error}); delete it and try again')
    return [folder]


def open_url(url, start=0):
    headers = {'User-Agent': 'nanopaths prepare.py'}
    if start:
        headers['Range'] = f'bytes={start}-'
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)


def published(url):
    """(size, checksum) of a file, from Hugging Face's pointer file or Wikimedia's list; or None."""
    place = url.replace('/resolve/', '/raw/').replace('pages-articles.xml.bz2', 'sha1sums.txt')
    if place == url:
        return None, None
    try:
        text = open_url(place).read(2 ** 20).decode()
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f'{place}: {error}; get the data elsewhere and give it with --input')
    pointer = re.search(r'oid (sha256:\w+)\nsize (\d+)', text)
    listed = re.search(r'(\w{40})  \S+-pages-articles\.xml\.bz2', text)
    if pointer:
        return int(pointer[2]), pointer[1]
    return None, f'sha1:{listed[1]}' if listed else None


def download(url, path, size=None, checksum=None, tries=6, pause=1.0):
    """Receive a file as path.part, check it, and give it its name. checksum: 'sha256:...'"""
    part = Path(f'{path}.part')
    for attempt in range(tries):
        try:
            if not part.exists() or part.stat().st_size != size:
                receive(url, part)
            break
        except urllib.error.HTTPError as error:
            reason = f'HTTP {error.code} {error.reason}'
            if error.code == 416:                        # the part is longer than the file
                part.unlink()
            elif error.code < 500 and error.code != 429:
                raise UserError(f'{url}: {reason}; get the data elsewhere and give it with --input')
        except (OSError, http.client.HTTPException) as error:
            reason = error
        if attempt < tries - 1:
            wait = pause * 2 ** attempt
            print(f'{path.name}: {reason}; trying again in {wait:g} s', file=sys.stderr)
            time.sleep(wait)
    else:
        raise UserError(f'{url}: {reason}, after {tries} tries; run the command again, or give --input')
    found = part.stat().st_size
    right = size in (None, found)
    if right and checksum:
        kind, digest = checksum.split(':')
        with open(part, 'rb') as file:
            right = hashlib.file_digest(file, kind).hexdigest() == digest
    if not right:
        part.unlink()
        raise UserError(f'{url}: {found:,} bytes of a wrong size or checksum were deleted; try again')
    part.replace(path)


def receive(url, part):
    """Receive a file, or what is missing of it; ConnectionError if the connection ends early."""
    have = part.stat().st_size if part.exists() else 0
    with open_url(url, have) as reply:
        if reply.status != 206:                          # the server sends everything again
            have = 0
        length = reply.headers['Content-Length']
        total = have + int(length) if length else None
        style = dict(unit='B', unit_scale=True, desc=part.stem, leave=False, disable=None)
        with open(part, 'ab' if have else 'wb') as file, tqdm(total=total, initial=have, **style) as bar:
            while block := reply.read(2 ** 16):
                have += file.write(block)
                bar.update(len(block))
    if total not in (None, have):
        raise ConnectionError(f'{have:,} of {total:,} bytes came')


def unpack(path):
    """The text files of name.zip into the folder name."""
    room = unpack_limit(path)
    with new_folder(path.with_suffix('')) as work, zipfile.ZipFile(path) as pack:
        for member in pack.infolist():
            name = re.split(r'[/\\]', member.filename)[-1]
            if not re.fullmatch(r'\w[\w .-]*\.(txt|train|dev|jsonl)', name):
                continue
            room -= member.file_size
            if room < 0 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise zipfile.BadZipFile('a bomb, or packed in a way that bombs are')
            with pack.open(member) as source, open(work / name, 'wb') as target:
                shutil.copyfileobj(source, target)       # no more bytes than it declares


def check_free(target, overwrite):
    """Whether a data set may be written there."""
    if target.exists() and not overwrite:
        raise UserError(f'{target} exists already; choose another --name, or replace it with --overwrite')
    ours = r'meta\.json|(train|val)\.bin|tokenizer\.\w+|[\w.]+\.jsonl'
    others = [p.name for p in target.iterdir() if not re.fullmatch(ours, p.name)] if target.is_dir() else []
    if target.is_file() or others:
        raise UserError(f"--overwrite does not touch {target}: it holds {others[:3] or 'no data set'}")


@contextlib.contextmanager
def new_folder(target, overwrite=False):
    """A hidden folder that takes the name `target` if the block ends well, and vanishes if not."""
    clear_away(target)
    check_free(target, overwrite)
    work = target.parent / f'.{target.name}.{uuid.uuid4().hex[:12]}'
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(f'{work}.lock', 'w') as file:
            lock(file)
            work.mkdir()
            yield work
            if overwrite and target.exists():            # else the next line fails, if it exists by now
                target.rename(f'{work}.old')
            work.rename(target)
    except OSError as error:
        raise UserError(f'{target} could not be written ({error})')
    finally:
        clear_away(target)


def clear_away(target):
    """Delete what prepare.py left here: this process, or one that was killed. Its lock is free. An old
    data set without a new one in its place comes back."""
    for path in target.parent.glob(f'.{target.name}.{"?" * 12}.lock'):
        with open(path, 'a') as file:
            if not lock(file):
                continue
        old = path.with_suffix('.old')
        if old.exists() and not target.exists():
            old.rename(target)
        if old.is_symlink():
            old.unlink()                                 # what it leads to is not ours
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(path.with_suffix(''), ignore_errors=True)
        path.unlink(missing_ok=True)
