"""
Text -> uint16 token bins and a tokenizer.

    python prepare.py toy                                # toy corpora of our own, no network
    python prepare.py text --name mine --input book.txt  # your own .txt, .jsonl, .gz, .xz, .bz2
    python prepare.py babylm [--input FOLDER]   # also tinystories, openmath, simplewiki, blimp

A data set is a folder, data/NAME: train.bin and val.bin (uint16 token ids; one end-of-text in
front, one after each document), meta.json and the tokenizer's own file. Documents are shuffled; a
text with blank lines has one per paragraph (see --split). CRLF becomes \\n, Wikipedia's XML plain
text; a byte-order mark, empty lines around a document and blank documents are dropped. Otherwise
the text is unchanged. It need not fit into memory.
"""

import functools
import glob
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import tqdm

from plumbing.cli import Parser, UserError, between, parse_json, read_lines, run_main
from plumbing.download import NAMED, check_free, fetch_named, new_folder
from plumbing.tokenizer import (EOT, PARTS, PATTERN, choose_tokenizer, load_tokenizer,
                                rank_tokenizer, ranks_blob, train_bpe, wrap_tokenizer)
from plumbing.toy import SCENES, TOYS, Dice, lingo, minimal_pairs, problem, story, subject_rows
from plumbing.wiki import read_wiki


# ---- Readers: files -> documents ----------------------------------------------------------------

def read_rows(path, names, hint=''):
    """(line number, row) of each row of a .jsonl file. These fields of it must hold text."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            for name in names:
                row[name].encode('utf-8')                # a lone surrogate is not text
        except ValueError as error:
            raise UserError(f'{path}:{number}: not a row of JSON in Unicode ({error})')
        except (KeyError, TypeError, AttributeError):
            has = ', '.join(row) if isinstance(row, dict) else 'no fields'
            raise UserError(f"{path}:{number}: no text in '{name}' (the row has: {has}){hint}")
        yield number, row


def read_text(path, split):
    """A text file's documents; `split` is what ends one: eot, blank (lines), row, passage (16 KB), file."""
    lines = (line for _, line in read_lines(path))
    if split == 'auto':
        seen, room = [], 2 ** 24                         # at most 10,000 lines, 16M characters
        while len(seen) < 10000 and room > 0 and (line := next(lines, '')):
            seen.append(line)
            room -= len(line)
        lines = itertools.chain(seen, lines)             # a pipe can be read only once
        head = ''.join(seen).rstrip()
        split = 'eot' if EOT in head else 'blank' if re.search(r'\n\s*\n', head) else 'passage'
    parts, size = [], 0
    for line in lines:
        *tails, line = line.split(EOT) if split == 'eot' else [line]
        for tail in tails:                               # of documents that end in this line
            yield ''.join(parts) + tail
            parts = []
        blank = split == 'blank' and line.isspace()
        if not blank:
            parts.append(line)
        size += len(line)
        if blank or split == 'row' or split == 'passage' and size >= 16384:
            yield ''.join(parts)
            parts, size = [], 0
    yield ''.join(parts)


def read_documents(path, split='auto', field='text'):
    stem = re.sub(r'\.(gz|xz|bz2)$', '', path.name.lower())
    documents = read_text(path, split)                   # a generator: nothing is read yet
    if stem.endswith('.xml'):
        documents = read_wiki(path)
    elif stem.endswith('.jsonl'):
        names = [name.strip() for name in field.split(',')]
        rows = read_rows(path, names, hint='; see --field')
        documents = ('\n'.join(row[name] for name in names) for _, row in rows)
    return (text.strip('\n') for text in documents if text and not text.isspace())


def find_files(inputs):
    """[(role, path)] of files and folders; a role is train or val. If any name says train, names
    decide: val, valid and dev are validation text, test is left out. Otherwise all is training text."""
    found, skipped = {}, 0                               # {path: its role}: no file twice
    base = os.path.commonpath([os.path.abspath(given) for given in inputs])      # names above do not count
    known = r'\.(txt|jsonl|train|dev|test)(\.gz|\.xz|\.bz2)?$|\.xml\.(gz|xz|bz2)$'
    for given in map(Path, inputs):
        if not given.exists():
            raise UserError(f'{given}: no such file or folder')
        if given.is_file() and re.search(r'\.(tar|tgz|zip)\b', given.name.lower()):
            raise UserError(f'{given} is an archive: unpack it, and give the folder')
        inside = [given]
        if given.is_dir():
            names = glob.glob('**', root_dir=given, recursive=True)      # none that is hidden
            inside = sorted(path for path in map(given.joinpath, names) if path.is_file())
        paths = [path for path in inside if path == given or re.search(known, path.name.lower())]
        skipped += len(inside) - len(paths)
        if not paths:
            raise UserError(f'no .txt or .jsonl file in {given}; others are read if you name them')
        found |= {path: role_of(os.path.relpath(path, base)) for path in paths}
    if skipped:
        print(f'files skipped: {skipped:,}; to read others as plain text, name them: FOLDER/*.md')
    if 'train' not in found.values():
        if any(found.values()):
            print('files named val, dev or test are training text, too: no name says train')
        return [('train', path) for path in found]
    kept = [(role or 'train', path) for path, role in found.items() if role != 'test']
    if len(kept) < len(found):
        print(f'files named test are left out: {len(found) - len(kept):,}')
    return kept


def role_of(path):
    """train, val, test or None, by the last word of the path that is one of these names."""
    roles = dict(train='train', val='val', valid='val', validation='val', dev='val', test='test')
    words = re.split(r'[/\\._-]', path.lower())
    return next((roles[word] for word in reversed(words) if word in roles), None)


# ---- Documents -> a data set --------------------------------------------------------------------

def write_data_set(target, documents, tokenizer, val_fraction=0.01, seed=1337, chunks=None,
                   sentences=None, pauses=None, jobs=None, overwrite=False, source=(), settings=None):
    """documents: (split, text) pairs; tokenizer: one, or the vocabulary size of a BPE to train;
    chunks, sentences, pauses: the numbers of these options; jobs: processes."""
    with new_folder(target, overwrite) as work:
        spans, size = spool(documents, work / 'spool')
        large = size > 2 ** 24 and os.name == 'posix'    # a pool starts slowly, and needs signals
        jobs = jobs or (os.cpu_count() if large else 1) or 1
        spans = {split: Dice(seed).shuffled(some) for split, some in spans.items()}
        if not spans['val']:
            n = max(1, round(val_fraction * len(spans['train'])))
            spans = {'train': spans['train'][n:], 'val': spans['train'][:n]}
        if not spans['train']:
            raise UserError('there is no text to train on: the input is empty, or one document, and '
                            'validation needs one, too: give more files, or --split passage')
        if isinstance(tokenizer, int):
            tokenizer = train_tokenizer(work, spans['train'], tokenizer, jobs)
        for kind, number in dict(chunks=chunks, sentences=sentences, pauses=pauses).items():
            if number is not None:
                tokenizer = wrap_tokenizer(tokenizer, kind, number)
        about = dict(kind=tokenizer.kind, file=tokenizer.file, hash=tokenizer.hash,
                     vocab_size=tokenizer.n_vocab, eot=tokenizer.eot, **tokenizer.extra)
        not_counted = {split: dict(tokens=0, words=0) for split in spans}
        meta = dict(name=target.name, source=list(source), splits=not_counted, tokenizer=about,
                    settings=dict(settings or {}, seed=seed, val_fraction=val_fraction))
        if tokenizer.file:
            (work / tokenizer.file).write_bytes(tokenizer.blob)
        (work / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')    # for encode_batch
        meta['splits'] = {split: encode_split(work, split, spans[split], tokenizer.end, jobs)
                          for split in spans}
        (work / 'meta.json').write_text(json.dumps(meta, indent=1) + '\n', encoding='utf-8')
        os.remove(work / 'spool')
    for split, n in meta['splits'].items():
        unit = 'tokens' if len(tokenizer.end) == 1 else 'slots'
        named = {unit: n['tokens'], 'documents': n['documents'], 'words': n['words']}
        counts = [f'{size:,} {name}' if size != 1 else f'1 {name[:-1]}' for name, size in named.items()]
        print(f'{target}/{split}.bin: {", ".join(counts)}')
        if split == 'val' and n['tokens'] < 1000:
            print(f'note: a loss on {counts[0]} says little; see --val_fraction and --split')


def spool(documents, path):
    """Write all texts into one file, to be read in any order -> {split: [(offset, length)]}, its size."""
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


def batches(spans, size):
    """Runs of documents of about `size` bytes together."""
    step = max(1, size * len(spans) // (1 + sum(length for _, length in spans)))
    return [spans[i:i + step] for i in range(0, len(spans), step)]


def parallel(function, folder, tasks, jobs):
    """function(folder, task) for each task, in order."""
    function = functools.partial(function, folder)
    if jobs == 1:
        yield from map(function, tasks)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])   # a worker's waits for start_worker
    with multiprocessing.Pool(jobs, start_worker) as pool:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])     # not in the workers
        workers = multiprocessing.active_children()
        results = pool.imap(function, tasks)
        while all(worker.is_alive() for worker in workers):
            try:
                yield results.next(timeout=1)
            except StopIteration:
                return
            except multiprocessing.TimeoutError:         # a long task, or one whose worker is gone
                continue
    raise UserError('a worker was killed: is the memory full?')


def start_worker():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)        # so the pool ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def count_words(texts):
    parts = (part for text in texts for part in PARTS.findall(text))     # cut as in encode_parts
    return Counter(word for part in parts for word in PATTERN.findall(part))


def count_batch(folder, spans):
    return count_words(read_spans(folder, spans))


def train_tokenizer(work, spans, vocab_size, jobs):
    counts = Counter()
    for part in parallel(count_batch, work, batches(spans, 2 ** 22), jobs):
        counts.update(part)
    vocab = train_bpe(counts, vocab_size)
    if len(vocab) + 1 < vocab_size:
        print(f'the text is too small for a vocabulary of {vocab_size:,}: it has {len(vocab) + 1:,} entries')
    return rank_tokenizer(ranks_blob(vocab))


cached_tokenizer = functools.lru_cache(maxsize=1)(load_tokenizer)  # once per worker, not per batch


def encode_batch(folder, spans):
    """Some documents' ids as bytes, and how many words they have."""
    tokenizer = cached_tokenizer(folder)
    ids, words = [], 0
    for text in read_spans(folder, spans):
        ids += [np.array(part, dtype=np.uint16) for part in tokenizer.encode_parts(text)]
        ids.append(np.array(tokenizer.end, dtype=np.uint16))
        words += len(text.split())
    return np.concatenate(ids).tobytes(), words


def encode_split(work, split, spans, end, jobs):
    """Write one bin; returns its counts. Words and bytes are those of the raw text."""
    total = Counter(tokens=len(end), documents=len(spans), words=0, bytes=sum(size for _, size in spans))
    tasks = batches(spans, 2 ** 20 // len(end))
    with open(work / f'{split}.bin', 'wb') as file:
        file.write(np.array(end, dtype=np.uint16).tobytes())
        encoded = parallel(encode_batch, work, tasks, jobs)
        for ids, words in tqdm(encoded, split, len(tasks), unit='batch', leave=False, disable=None):
            total.update(tokens=file.write(ids) // 2, words=words)
    return dict(total)


# ---- The toy corpora, from the grammars in plumbing/toy.py --------------------------------------

def make_missing_toys(names, root='data'):
    """A run that asks for a toy corpus gets it."""
    if any(name in TOYS and not Path(root, name).exists() for name in names):
        make_toy(root)


def make_toy(root='data', overwrite=False):
    """Write the toy corpora that are missing, with one BPE for all, minimal pairs (toy_blimp) and a
    task (toy_glue). Three of them are the texts of another in a new form."""
    missing = [Path(root) / name for name in TOYS if overwrite or not (Path(root) / name).is_dir()]
    if not missing:
        return print(f'{root} holds all toy corpora already; --overwrite makes them again')
    print('toy corpora: made-up text, from the grammars in plumbing/toy.py')
    plan = dict(toy_stories=(story, 3e6), toy_math=(problem, 1e6), toy_lingo=(lingo, 1e6))
    texts = {name: [] for name in plan}
    for name, (write, size) in plan.items():             # size: characters
        dice = Dice(name)
        while size > 0:
            texts[name].append(write(dice))
            size -= len(texts[name][-1])
    counts = count_words(text for name in plan for text in texts[name])
    tokenizer = rank_tokenizer(ranks_blob(train_bpe(counts, 2048)))
    texts['toy_bytes'] = texts['toy_stories']
    texts['toy_pauses'] = texts['toy_thoughts'] = texts['toy_math']
    forms = dict(toy_bytes=dict(chunks=8), toy_pauses=dict(pauses=10), toy_thoughts=dict(sentences=12))
    for target in missing:
        try:
            if target.name in texts:
                documents = (('train', text) for text in texts[target.name])
                write_data_set(target, documents, tokenizer, val_fraction=0.02, overwrite=overwrite,
                               source=['prepare.py toy'], **forms.get(target.name, {}))
            elif target.name == 'toy_blimp':
                seen = set(re.split(r'(?<=[.!?"]) ', ' '.join(texts['toy_stories'])))
                length = lambda text: len(tokenizer.encode(text))
                write_jsonl(target, {kind: minimal_pairs(kind, seen, length) for kind in SCENES}, overwrite)
            else:                                        # toy_glue
                rows = subject_rows(2300)
                write_jsonl(target, {'toy.train': rows[:2000], 'toy.valid': rows[2000:]}, overwrite)
        except UserError:
            if overwrite or not target.is_dir():         # else another process made it meanwhile
                raise


def write_jsonl(target, files, overwrite):
    with new_folder(target, overwrite) as work:
        for name, rows in files.items():
            text = '\n'.join(map(json.dumps, rows)) + '\n'
            (work / f'{name}.jsonl').write_text(text, encoding='utf-8')


# ---- The command line ---------------------------------------------------------------------------

def copy_pairs(target, inputs, all_of_blimp, overwrite):
    """Minimal pairs stay as they are: .jsonl files, whose rows are checked."""
    files = [path for _, path in find_files(inputs) if path.suffix == '.jsonl']
    with new_folder(target, overwrite) as work:
        sizes = [sum(1 for _ in read_rows(path, ['sentence_good', 'sentence_bad'])) for path in files]
        if not files or all_of_blimp and sizes != [1000] * 67:
            raise UserError(f'found {len(files)} .jsonl files, {sum(sizes):,} pairs; BLiMP has 67 of 1,000')
        for path in files:
            if (work / path.name).exists():
                raise UserError(f'two files are named {path.name}; prepare their folders apart')
            shutil.copyfile(path, work / path.name)
    print(f'{target}: {sum(sizes):,} pairs in {len(files)} file{"s" * (len(files) != 1)}')


def read_arguments(argv):
    parser = Parser(__doc__)
    parser.add_argument('what', choices=['toy', 'text', *NAMED], help='what to prepare')
    parser.add_argument('--name', help='data set to write, data/NAME')
    parser.add_argument('--input', nargs='+', help='files and folders: .txt, .jsonl, .gz, .xz, .bz2')
    parser.add_argument('--out', default='data', help='where data sets go')
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument('--vocab_size', type=between(257, 65536), help='of a BPE to train (default 16384)')
    chosen.add_argument('--tokenizer', help='or gpt2, bytes, x.tiktoken, tokenizer.json, data/NAME')
    form = parser.add_mutually_exclusive_group()
    form.add_argument('--chunks', type=between(1, 255), nargs='?', const=12, metavar='N',
                      help='chunks of up to N bytes (default 12), for the byte-level model')
    form.add_argument('--sentences', type=between(1, 255), nargs='?', const=32, metavar='N',
                      help='sentences of up to N tokens (default 32) as chunks: next thoughts')
    form.add_argument('--pauses', type=between(1, 255), metavar='N', help='N pauses after the first line')
    parser.add_argument('--split', choices=['auto', 'eot', 'blank', 'row', 'passage', 'file'],
                        help='what ends a document; auto: end-of-text, blank lines, or some 16 KB')
    parser.add_argument('--field', help='fields of a .jsonl row, joined by newlines (default text)')
    parser.add_argument('--val_fraction', type=between(0, 0.9, float), default=0.01,
                        help='share of documents for validation, if no file is for that')
    parser.add_argument('--seed', type=int, default=1337, help='of the shuffling')
    parser.add_argument('--overwrite', action='store_true', help='replace a data set of this name')
    args = parser.parse_args(argv)
    used = dict(toy=['out', 'overwrite'], blimp=['out', 'overwrite', 'name', 'input'])
    used = ['what', *used.get(args.what, vars(args))]    # the others use all options
    for key, value in vars(args).items():
        if key not in used and value != parser.get_default(key):
            raise UserError(f'leave out --{key}: it has no effect on {args.what}')
    if args.what != 'text':
        args.name = args.name or args.what
    if not re.fullmatch(r'\w[\w.-]{,99}', args.name or ''):
        raise UserError(f'--name {args.name or "is missing"}: up to 100 letters, digits, _ . - are needed')
    if args.what == 'text' and not args.input:
        raise UserError('--input is missing: files or folders with .txt or .jsonl text')
    return args


def main(argv=None):
    args = read_arguments(argv)
    if args.what == 'toy':
        return make_toy(args.out, args.overwrite)
    target = Path(args.out) / args.name
    check_free(target, args.overwrite)                   # before anything is downloaded or read
    inputs = args.input or fetch_named(args.what, Path(args.out) / 'raw')
    if args.what == 'blimp':
        return copy_pairs(target, inputs, all_of_blimp=not args.input, overwrite=args.overwrite)
    files = find_files(inputs)
    if any(target.resolve() in path.resolve().parents for _, path in files):
        raise UserError(f'the input lies in {target}, which would be overwritten; choose another --name')
    preset = dict(split='auto', field='text') | NAMED.get(args.what, [{}])[0]    # or the set's own
    known = args.tokenizer or (None if args.vocab_size else preset.get('tokenizer'))
    tokenizer = choose_tokenizer(known) if known else args.vocab_size or 16384
    how = {key: getattr(args, key) or preset[key] for key in ('split', 'field')}
    source = [args.what, *(path.name for _, path in files)]
    documents = ((role, text) for role, path in files for text in read_documents(path, **how))
    write_data_set(target, documents, tokenizer, args.val_fraction, args.seed, args.chunks,
                   args.sentences, args.pauses, overwrite=args.overwrite, source=source, settings=how)


if __name__ == '__main__':
    run_main(main)
