"""
Text -> token bins and a tokenizer.

    python prepare.py toy                                # toy corpora of our own, no network
    python prepare.py text --name mine --input book.txt  # your own .txt, .jsonl, .gz, .xz, .bz2
    python prepare.py mix --name both --input data/toy_stories:0:0.6 data/toy_math --passes 1 2.5
    python prepare.py python                    # the Python files of your installation
    python prepare.py babylm [--input FOLDER]   # also tinystories, openmath, simplewiki, blimp

A data set is a folder, data/NAME: train.bin and val.bin (token ids as uint16, above 65,536 tokens
uint32; one end-of-text in front, one after each document), meta.json and the tokenizer's own file.
Documents are shuffled; a text with blank lines has one per paragraph (see --split). CRLF becomes
\\n, Wikipedia's XML plain text; a byte-order mark, empty lines around a document (not in a Python
file) and blank documents are dropped. Otherwise the text is unchanged. It need not fit into memory.
"""

import functools
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from plumbing.bpe import train_bpe
from plumbing.chunks import wrap_tokenizer
from plumbing.cli import Parser, UserError, between, run_main
from plumbing.download import NAMED, check_free, fetch_named, new_folder
from plumbing.text import read_lines, read_rows, read_wiki
from plumbing.tokenizer import (EOT, PARTS, PATTERN, choose_tokenizer, load_meta, load_tokenizer,
                                rank_tokenizer, ranks_blob, shared_tokenizer)
from plumbing.toy import SCENES, TOYS, Dice, lingo, minimal_pairs, problem, story

POOL_SIZE = 2 ** 24                                      # bytes; a smaller text needs no pool


# ---- Files -> documents -------------------------------------------------------------------------

def find_files(inputs):
    """[(split, path)] of files and folders. If any name says train, names decide: val, valid and
    dev are validation text, test is left out. Otherwise everything is training text."""
    texts = r'\.(txt|jsonl|train|dev|test)(\.gz|\.xz|\.bz2)?$|\.xml\.(gz|xz|bz2)$'
    base = os.path.commonpath([os.path.abspath(path) for path in inputs])
    splits = {}                                          # {path: split}: no file twice
    for path in map(Path, inputs):
        if re.search(r'\.(tar|tgz|zip)\b', path.name.lower()) and path.is_file():
            raise UserError(f'{path} is an archive: unpack it, and give the folder')
        files = [path]
        if path.is_dir():                                # links to folders are not followed
            inside = [file for file in path.rglob('*') if not file.is_dir()
                      and '/.' not in f'/{file.relative_to(path).as_posix()}']
            files = sorted(file for file in inside if re.search(texts, file.name.lower()))
            if n := len(inside) - len(files):
                print(f'{path}: skipped {n:,} files that are not .txt or .jsonl')
        splits |= {file: split_of(os.path.relpath(file, base)) for file in files}
    if 'train' not in splits.values():
        return [('train', path) for path in splits]
    return [(split or 'train', path) for path, split in splits.items() if split != 'test']


def split_of(path):
    """train, val, test or None, by the last word of the path that is one of these names."""
    names = dict(train='train', val='val', valid='val', validation='val', dev='val', test='test')
    words = re.split(r'[/\\._-]', path.lower())
    return next((names[word] for word in reversed(words) if word in names), None)


def read_documents(path, split='auto', field='text'):
    stem = re.sub(r'\.(gz|xz|bz2)$', '', path.name.lower())
    if stem.endswith('.xml'):
        documents = read_wiki(path)
    elif stem.endswith('.jsonl'):
        names = [name.strip() for name in field.split(',')]
        rows = read_rows(path, names, hint='; see --field')
        documents = ('\n'.join(row[name] for name in names) for _, row in rows)
    else:
        documents = read_text(path, split)
    return (text.strip('\n') for text in documents if text and not text.isspace())


def read_python(val_fraction):
    """(split, text) of the Python files of this installation: standard library and packages, none
    twice, none above 200 KB. A package is whole in one split."""
    texts, seen = {}, set()
    for folder in (Path(sysconfig.get_path(name)) for name in ('stdlib', 'purelib')):
        for path in sorted(folder.rglob('*.py')):
            package, *inner = path.relative_to(folder).parts
            if package in ('site-packages', 'dist-packages') or path.stat().st_size > 200_000:
                continue
            text = path.read_text(encoding='utf-8', errors='ignore')
            if text.strip() and text not in seen:
                seen.add(text)
                texts.setdefault(package, []).append(text)
    size = {package: sum(map(len, files)) for package, files in texts.items()}
    room = val_fraction * sum(size.values())
    for package in sorted(texts, key=lambda name: zlib.crc32(name.encode())):   # any fixed order
        split = 'val' if size[package] <= room else 'train'
        if split == 'val':
            room -= size[package]
        yield from ((split, text) for text in texts[package])


def read_text(path, split):
    """The documents of a text file. split: what ends one: eot, blank (lines), row, passage (16 KB)
    or file."""
    lines = (line for _, line in read_lines(path))
    if split == 'auto':
        head = list(itertools.islice(lines, 10000))
        lines = itertools.chain(head, lines)
        start = ''.join(head).rstrip()
        split = 'eot' if EOT in start else 'blank' if re.search(r'\n\s*\n', start) else 'passage'
    parts, size = [], 0
    for line in lines:
        *endings, line = line.split(EOT) if split == 'eot' else [line]
        for ending in endings:                           # of documents that end in this line
            yield ''.join(parts) + ending
            parts = []
        is_blank = split == 'blank' and line.isspace()
        if not is_blank:
            parts.append(line)
        size += len(line)
        if is_blank or split == 'row' or split == 'passage' and size >= 16384:
            yield ''.join(parts)
            parts, size = [], 0
    yield ''.join(parts)


# ---- Documents -> a data set --------------------------------------------------------------------

def write_data_set(target, documents, tokenizer, form=None, val_fraction=0.01, overwrite=False,
                   no_copies=None):
    """documents: (split, text) pairs; tokenizer: one, or the vocabulary size of a BPE to train;
    form: ('chunks', 12), for instance; no_copies: data sets. Training documents that share a long
    line with validation text, or with theirs, are left out (None: they stay) -> their number"""
    with new_folder(target, overwrite) as work:
        spans, size = spool(documents, work / 'spool')
        jobs = os.cpu_count() if size > POOL_SIZE else 1
        spans = {split: Dice(1337).shuffled(spans[split]) for split in spans}
        if not spans['val']:
            n = max(1, round(val_fraction * len(spans['train'])))
            spans = {'train': spans['train'][n:], 'val': spans['train'][:n]}
        kept = without_copies(work, spans, no_copies or [])
        n_copies = len(spans['train']) - len(kept)
        if no_copies is not None:
            spans['train'] = kept
        if not spans['train'] and val_fraction < 1 or not spans['val']:
            raise UserError('there is no text to train on: no .txt or .jsonl file, an empty one, '
                            'copies only, or one document, and validation needs one (see --split)')
        if isinstance(tokenizer, int):
            tokenizer = train_tokenizer(work, spans['train'] or spans['val'], tokenizer, jobs)
        if form:
            tokenizer = wrap_tokenizer(tokenizer, *form)
        write_meta(work, tokenizer, {})                  # encode_batch loads the tokenizer
        splits = {split: encode_split(work, split, spans[split], tokenizer, jobs)
                  for split in spans}
        write_meta(work, tokenizer, splits)
        os.remove(work / 'spool')
    for split, n in splits.items():
        unit = 'tokens' if len(tokenizer.end) == 1 else 'slots'
        share = n.get('unknown', 0) / n['tokens']
        lost = f', {share:.2%} of the tokens are <unk>: their text is lost' if share else ''
        print(f"{target}/{split}.bin: {n['tokens']:,} {unit}, {n['documents']:,} documents, "
              f"{n['words']:,} words{lost}")
    if splits['val']['tokens'] < 1000:
        print('note: the validation text is very short; see --val_fraction and --split')
    return n_copies


def write_meta(work, tokenizer, splits):
    """meta.json and the tokenizer's file."""
    if tokenizer.file:
        (work / tokenizer.file).write_bytes(tokenizer.blob)
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    meta = dict(command=command, splits=splits, dtype=tokenizer.dtype, tokenizer=tokenizer.about())
    (work / 'meta.json').write_text(json.dumps(meta, indent=1) + '\n')


def spool(documents, path):
    """Write all texts into one file -> {split: [(offset, length)]}, its size"""
    spans = {'train': [], 'val': []}
    with open(path, 'wb') as file:
        for split, text in documents:
            spans[split].append((file.tell(), file.write(text.encode('utf-8'))))
        return spans, file.tell()


def read_spans(folder, spans):
    with open(folder / 'spool', 'rb') as file:
        for offset, length in spans:
            file.seek(offset)
            yield file.read(length).decode('utf-8')


def without_copies(work, spans, folders):
    """The training documents that share no line of 60 characters or more with validation text,
    their own or that of other data sets."""
    others = [load_tokenizer(folder).decode(np.fromfile(
        Path(folder, 'val.bin'), load_meta(folder)['dtype']), end=b'\n') for folder in folders]
    texts = itertools.chain(others, read_spans(work, spans['val']))
    lines = {line for text in texts for line in text.split('\n') if len(line) >= 60}
    return [span for span, text in zip(spans['train'], read_spans(work, spans['train']))
            if lines.isdisjoint(text.split('\n'))]


def batches(spans, size):
    """Runs of documents of about `size` bytes together."""
    step = max(1, size * len(spans) // (1 + sum(length for _, length in spans)))
    return [spans[i:i + step] for i in range(0, len(spans), step)]


def parallel(function, folder, tasks, jobs):
    """function(folder, task) for each task, in order."""
    function = functools.partial(function, folder)
    if jobs == 1:
        yield from map(function, tasks)
    else:
        leave_ctrl_c_to_us = dict(initializer=signal.signal,
                                  initargs=(signal.SIGINT, signal.SIG_IGN))
        with ProcessPoolExecutor(jobs, **leave_ctrl_c_to_us) as pool:
            yield from pool.map(function, tasks)


def count_words(texts):
    parts = (part for text in texts for part in PARTS.findall(text))     # cut as in encode_parts
    return Counter(word for part in parts for word in PATTERN.findall(part))


def count_batch(folder, spans):
    return count_words(read_spans(folder, spans))


def train_tokenizer(work, spans, vocab_size, jobs):
    counts = Counter()
    for part in parallel(count_batch, work, batches(spans, 2 ** 22), jobs):
        counts.update(part)
    return rank_tokenizer(ranks_blob(train_bpe(counts, vocab_size)))


cached_tokenizer = functools.lru_cache(maxsize=1)(load_tokenizer)        # once per process


def encode_batch(folder, spans):
    """The ids of these documents as bytes, and how many words they have."""
    tokenizer = cached_tokenizer(folder)
    ids, words = [], 0
    for text in read_spans(folder, spans):
        ids += [np.array(part, tokenizer.dtype) for part in tokenizer.encode_parts(text)]
        ids.append(np.array(tokenizer.end, tokenizer.dtype))
        words += len(text.split())
    return np.concatenate(ids).tobytes(), words


def encode_split(work, split, spans, tokenizer, jobs):
    """Write one bin; returns its counts. Words and bytes are those of the raw text."""
    n_bytes = sum(length for _, length in spans)
    end = np.array(tokenizer.end, tokenizer.dtype)
    counts = Counter(tokens=len(end), documents=len(spans), words=0, bytes=n_bytes)
    tasks = batches(spans, 2 ** 20 // len(end))
    with open(work / f'{split}.bin', 'wb') as file:
        file.write(end.tobytes())
        encoded = parallel(encode_batch, work, tasks, jobs)
        for ids, words in tqdm(encoded, split, len(tasks), unit='batch', leave=False, disable=None):
            counts.update(tokens=file.write(ids) // end.itemsize, words=words)
            if tokenizer.unknown is not None:
                unknown = np.frombuffer(ids, tokenizer.dtype) == tokenizer.unknown
                counts.update(unknown=int(unknown.sum()))
    return dict(counts)


# ---- Parts of data sets -> a data set -----------------------------------------------------------

def mix(target, inputs, passes, overwrite):
    """One data set of parts of others. An input is data/NAME, or data/NAME:0.6:1 for its text from
    60% on. passes: how many copies of each; 1.5 is one and a half. A part ends where a document
    does. The validation text is all of theirs."""
    passes = passes or [1.0] * len(inputs)
    try:
        parts = [(Path(folder), *map(float, places or (0, 1)))
                 for folder, *places in (part.split(':') for part in inputs)]
        assert len(passes) == len(parts) and min(passes) > 0
        assert all(0 <= low < high <= 1 for _, low, high in parts)
    except (AssertionError, ValueError):
        raise UserError('mix takes --input data/A:FROM:TO data/B ..., with 0 <= FROM < TO <= 1, '
                        'and as many --passes, or none') from None
    tokenizer = shared_tokenizer(*(folder for folder, _, _ in parts))
    end = np.array(tokenizer.end, tokenizer.dtype)
    splits = {}
    with new_folder(target, overwrite) as work:
        for split in ('train', 'val'):
            counts = Counter(tokens=len(end))
            with open(work / f'{split}.bin', 'wb') as file:
                file.write(end.tobytes())
                for (folder, low, high), times in zip(parts, passes):
                    tokens = np.memmap(folder / f'{split}.bin', tokenizer.dtype, 'r')
                    spans = [(len(end), len(tokens))]
                    if split == 'train':
                        cut = lambda share: document_end(tokens, share * len(tokens), tokenizer)
                        spans = [(cut(low), cut(high))] * int(times)
                        spans += [(cut(low), cut(low + (high - low) * (times % 1)))]
                    whole = load_meta(folder)['splits'][split]
                    for first, last in spans:
                        tokens[first:last].tofile(file)
                        share = (last - first) / whole['tokens']
                        counts.update({key: n * share for key, n in whole.items()})
            splits[split] = {key: round(n) for key, n in counts.items()}
            print(f"{target}/{split}.bin: {splits[split]['tokens']:,} ids")
        write_meta(work, tokenizer, splits)


def document_end(tokens, place, tokenizer):
    """Where the first document ends that does not end before a place."""
    slots = len(tokenizer.end)
    for begin in range(max(0, math.ceil(place) - slots), len(tokens), 2 ** 20):
        ends = np.flatnonzero(tokens[begin:begin + 2 ** 20] == tokenizer.eot)
        if len(ends):
            return begin + int(ends[0]) + slots
    return len(tokens)


# ---- The toy corpora, from the grammars in plumbing/toy.py --------------------------------------

def make_toys(names=TOYS, root='data', overwrite=False):
    """Write those toy corpora among `names` that are missing, with one BPE for all; toy_blimp holds
    minimal pairs. Three are the texts of another in a new form."""
    folders = [Path(root, name) for name in TOYS if name in names]
    missing = [folder for folder in folders if overwrite or not folder.exists()]
    if not missing:
        return
    print(f'toy corpora, into {Path(root).resolve()}: made-up text, from plumbing/toy.py')
    sizes = dict(toy_stories=(story, 3e6), toy_math=(problem, 1e6), toy_lingo=(lingo, 1e6))
    texts = {name: [] for name in sizes}
    for name, (write, size) in sizes.items():            # size: characters
        dice = Dice(name)
        while size > 0:
            texts[name].append(write(dice))
            size -= len(texts[name][-1])
    counts = count_words(itertools.chain(*texts.values()))
    tokenizer = rank_tokenizer(ranks_blob(train_bpe(counts, 2048)))
    texts['toy_bytes'] = texts['toy_stories']
    texts['toy_pauses'] = texts['toy_thoughts'] = texts['toy_math']
    forms = dict(toy_bytes=('chunks', 8), toy_pauses=('pauses', 10), toy_thoughts=('sentences', 12))
    for target in missing:
        if target.name == 'toy_blimp':
            seen = set(re.split(r'(?<=[.!?"]) ', ' '.join(texts['toy_stories'])))
            length = lambda text: len(tokenizer.encode(text))
            pairs = {kind: minimal_pairs(kind, seen, length) for kind in SCENES}
            write_jsonl(target, pairs, overwrite)
        else:
            documents = (('train', text) for text in texts[target.name])
            write_data_set(target, documents, tokenizer, forms.get(target.name), 0.02, overwrite)


def write_jsonl(target, files, overwrite):
    with new_folder(target, overwrite) as work:
        for name, rows in files.items():
            (work / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')


# ---- The command line ---------------------------------------------------------------------------

def copy_pairs(target, inputs, overwrite):
    """Minimal pairs stay as they are: .jsonl files."""
    files = [path for _, path in find_files(inputs) if path.suffix == '.jsonl']
    if not files:
        raise UserError(f'no .jsonl file in {inputs[0]}')
    with new_folder(target, overwrite) as work:
        for path in files:
            shutil.copyfile(path, work / path.name)
    print(f'{target}: {len(files)} files')


def read_arguments(argv):
    parser = Parser(__doc__)
    parser.add_argument('what', choices=['toy', 'text', 'mix', 'python', *NAMED],
                        help='what to prepare')
    parser.add_argument('--name', help='data set to write, data/NAME')
    parser.add_argument('--input', nargs='+',
                        help='files and folders: .txt, .jsonl, .gz, .xz, .bz2')
    parser.add_argument('--passes', type=float, nargs='+', help='mix: copies of each input')
    parser.add_argument('--out', default='data', help='where data sets go')
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument('--vocab_size', type=between(257, 65536),
                        help='of a BPE to train (default 16384)')
    chosen.add_argument('--tokenizer',
                        help='or gpt2, bytes, x.tiktoken, tokenizer.json, data/NAME')
    form = parser.add_mutually_exclusive_group()
    form.add_argument('--chunks', type=between(1, 255), nargs='?', const=12, metavar='N',
                      help='chunks of up to N bytes (default 12), for the byte-level model')
    form.add_argument('--sentences', type=between(1, 255), nargs='?', const=32, metavar='N',
                      help='sentences of up to N tokens (default 32) as chunks: next thoughts')
    form.add_argument('--pauses', type=between(1, 255), metavar='N',
                      help='N pauses after the first line')
    parser.add_argument('--split', choices=['auto', 'eot', 'blank', 'row', 'passage', 'file'],
                        help='what ends a document; auto: end-of-text, blank lines, or some 16 KB')
    parser.add_argument('--field', help='fields of a .jsonl row, joined by newlines (default text)')
    parser.add_argument('--val_fraction', type=between(0, 1, float), default=0.01,
                        help='share of documents for validation, if no file is for that; 1: all')
    parser.add_argument('--no_copies', nargs='*', metavar='data/NAME',
                        help='leave out training documents that share a long line with the '
                             'validation text, or with that of other data sets')
    parser.add_argument('--overwrite', action='store_true', help='replace a data set of this name')
    args = parser.parse_args(argv)
    text = vars(args).keys() - {'what', 'name', 'input', 'passes', 'out', 'overwrite'}
    ignored = dict(toy=['name', 'input', 'passes', *text], mix=text, blimp=['passes', *text],
                   python=['input', 'passes', 'split', 'field'])
    for key in ignored.get(args.what, ['passes']):
        if getattr(args, key) != parser.get_default(key):
            raise UserError(f'{args.what} takes no --{key}')
    if args.what in ('text', 'mix') and not (args.name and args.input):
        raise UserError(f'{args.what} needs --name and --input: for text files or folders with '
                        '.txt or .jsonl text, for mix data sets')
    return args


def main(argv=None):
    args = read_arguments(argv)
    if args.what == 'toy':
        make_toys(TOYS, args.out, args.overwrite)
        return print(f'{args.out} holds all toy corpora; --overwrite makes them again')
    target = Path(args.out, args.name or args.what)
    check_free(target, args.overwrite)                   # before anything is downloaded or read
    if args.what == 'mix':
        return mix(target, args.input, args.passes, args.overwrite)
    inputs = args.input or []
    if not inputs and args.what in NAMED:
        inputs = fetch_named(args.what, Path(args.out, 'raw'))
    if args.what == 'blimp':
        return copy_pairs(target, inputs, args.overwrite)
    files = find_files(inputs) if inputs else []
    if any(target.resolve() in path.resolve().parents for _, path in files):
        raise UserError(f'the input lies in {target}, which would be replaced; '
                        'choose another --name')
    for split, n in Counter(split for split, _ in files).items():
        print(f'files for {split}: {n:,}')
    usual, _ = NAMED.get(args.what, ({}, None))
    how = dict(split=args.split or usual.get('split', 'auto'),
               field=args.field or usual.get('field', 'text'))
    documents = ((split, text) for split, path in files for text in read_documents(path, **how))
    if args.what == 'python':
        documents = read_python(args.val_fraction)
    name = args.tokenizer or (None if args.vocab_size else usual.get('tokenizer'))
    tokenizer = choose_tokenizer(name) if name else args.vocab_size or 16384
    forms = [(kind, getattr(args, kind)) for kind in ('chunks', 'sentences', 'pauses')]
    form = next((form for form in forms if form[1]), None)
    if n := write_data_set(target, documents, tokenizer, form, args.val_fraction, args.overwrite,
                           args.no_copies):
        what = '--no_copies leaves them out' if args.no_copies is None else 'left out'
        print(f'{n:,} training documents share a long line with validation text: {what}')


if __name__ == '__main__':
    run_main(main)
