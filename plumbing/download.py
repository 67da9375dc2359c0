"""
Downloads, and where the named data sets come from.

A file arrives as name.part and takes its name when it is whole and its checksum right. After a
broken connection a download goes on where it stopped.
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

from plumbing.cli import UserError

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


def fetch_named(name, raw, base=None, pause=1.0):
    """Download a named data set into raw/name and unpack its zip files. Tests set `base`, their host."""
    folder = Path(raw) / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, url in NAMED[name][1].items():
        path = folder / file
        if base:
            url = re.sub('https://[^/]+', base, url)
        if not path.exists():
            size, checksum = published(url)
            download(url, path, size, checksum, pause=pause)
        if path.suffix == '.zip' and not path.with_suffix('').exists():
            try:
                unpack(path)
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                path.unlink()
                raise UserError(f'{url}: not a whole zip file ({error}); it was deleted, try again')
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
    """The text files of name.zip into the folder name, which takes its name when it is whole."""
    work = path.with_suffix('.unpacking')
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    with zipfile.ZipFile(path) as pack:
        for member in pack.namelist():
            if re.search(r'\.(txt|train|dev|jsonl)$', member) and '__MACOSX' not in member:
                (work / Path(member).name).write_bytes(pack.read(member))
    work.rename(path.with_suffix(''))
