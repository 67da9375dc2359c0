"""Where the named data sets come from, downloads, and folders that are complete or not there."""

import contextlib
import http.client
import re
import shutil
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from tqdm import tqdm

from plumbing.cli import UserError, reading

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
            download(url, path)
        if path.suffix == '.zip' and not path.with_suffix('').exists():
            unpack(path)
    return [folder]


def download(url, path):
    """Receive a file as path.part, or what is missing of it, and give it its name."""
    part = Path(f'{path}.part')
    have = part.stat().st_size if part.exists() else 0
    headers = {'User-Agent': 'nanopaths prepare.py', 'Range': f'bytes={have}-'}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            if reply.status != 206:                      # the server sends everything again
                have = 0
            total = have + int(reply.headers['Content-Length'] or 0)
            bar = tqdm(total=total, initial=have, unit='B', unit_scale=True, desc=path.name,
                       leave=False, disable=None)
            with bar, open(part, 'ab' if have else 'wb') as file:
                while block := reply.read(2 ** 16):
                    bar.update(file.write(block))
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f'{url}: {error}; run the command again to go on (without {part} it '
                        'begins anew), or get the data elsewhere and give it with --input')
    if part.stat().st_size < total:
        raise UserError(f'{url}: the connection broke; run the command again to go on')
    part.replace(path)


def unpack(path):
    """The text files of name.zip into the folder name."""
    with reading(path), zipfile.ZipFile(path) as pack, new_folder(path.with_suffix('')) as work:
        for member in pack.infolist():
            name = re.split(r'[/\\]', member.filename)[-1]
            if re.fullmatch(r'\w[\w .-]*\.(txt|train|dev|jsonl)', name):
                (work / name).write_bytes(pack.read(member))


def check_free(target, overwrite):
    """Whether a data set may be written there."""
    if target.exists() and not overwrite:
        raise UserError(f'{target} exists already; choose another --name, or add --overwrite')
    if target.exists() and not [*target.glob('meta.json'), *target.glob('*.jsonl')]:
        raise UserError(f'{target} is not a data set: --overwrite does not touch it')


@contextlib.contextmanager
def new_folder(target, overwrite=False):
    """A folder to fill. It gets its name when it is complete; if filling it fails, it vanishes."""
    check_free(target, overwrite)
    work = target.with_name(f'.{target.name}.tmp')
    shutil.rmtree(work, ignore_errors=True)              # what a killed process left
    work.mkdir(parents=True)
    try:
        yield work
        if overwrite:
            shutil.rmtree(target, ignore_errors=True)
        work.replace(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
