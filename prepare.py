"""
prepare.py: text -> uint16 token bins and a tokenizer.

    python prepare.py toy                                    # toy corpora, minimal pairs and a task, no network
    python prepare.py text --name mine --input book.txt      # your own .txt and .jsonl, also .gz and .xz
    python prepare.py babylm [--input FOLDER]                # also tinystories, openmath, simplewiki, blimp

A data set is a folder, data/NAME: train.bin and val.bin (uint16 token ids; one end-of-text in front, one after each
document), meta.json and the tokenizer's own file. It is written into a hidden folder and renamed when whole.
Documents are spooled to a file first and then handled as (offset, length) pairs, 150 bytes of memory each; a worker
holds about 1 MB of text (or one document). CRLF becomes \\n and blank lines around a document go, nothing else.
"""

import base64
import bz2
import contextlib
import difflib
import functools
import gzip
import hashlib
import heapq
import html
import json
import lzma
import multiprocessing
import os
import re
import shutil
import signal
import unicodedata
import uuid
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import regex                                    # GPT-2's pattern needs \p{L}, which re lacks; comes with tiktoken
import tiktoken
from tqdm import tqdm

from download import NAMED, fetch_named
from errors import Parser, UserError, run_main
from toy import SCENES, Dice, lingo, minimal_pairs, problem, story, subject_rows

EOT = '<|endoftext|>'
PATTERN = regex.compile(r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")    # GPT-2's
TOYS = ('toy_stories', 'toy_math', 'toy_lingo', 'toy_bytes', 'toy_blimp', 'toy_glue')
GPT2_HASH = 'adb7b0cf2e9969045b0547bf35d2c94b13f547e89b02720cba9ab739e076bb13'


# ---------------------------------------------------------------------------------------------------------------
# Tokenizers. Each kind is a function from `blob`, the content of the file that travels with the data


class Tokenizer:
    def __init__(self, kind, encode, token_bytes, eot, file=None, blob=b'', order=(), end=None, **extra):
        self.kind, self.encode, self.token_bytes, self.eot = kind, encode, token_bytes, eot
        self.n_vocab, self.end = len(token_bytes), end or [eot]     # end: what follows a document
        self.file, self.blob, self.extra = file, blob, extra
        if self.n_vocab > 65536:
            raise UserError(f'a vocabulary of {self.n_vocab:,} does not fit uint16 bins; choose one of at most 65,536')
        parts = [kind, eot, extra, [t.hex() for t in token_bytes], [t.hex() for t in order]]
        self.hash = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def decode_bytes(self, ids):
        return b''.join(self.token_bytes[i] for i in ids if i < self.n_vocab)    # a model's vocabulary may be padded

    def decode(self, ids):
        return self.decode_bytes(ids).decode('utf-8', errors='replace')

    def show(self, ids):                                 # to look at: an empty line where a document ends
        return b''.join(b'\n\n' if i == self.eot else self.decode_bytes([i]) for i in ids).decode('utf-8', errors='replace').strip('\n')


def ranks_blob(vocab):
    return b''.join(base64.b64encode(token) + b' %d\n' % rank for rank, token in enumerate(vocab))


def rank_tokenizer(blob):
    """bpe and gpt2: ranks in tiktoken's format (base64 token, space, rank), GPT-2's pattern, end-of-text last."""
    try:
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, blob.splitlines())}
        vocab = sorted(ranks, key=ranks.get)
        assert sorted(ranks.values()) == list(range(len(vocab))) and all(bytes([b]) in ranks for b in range(256))
    except (ValueError, AssertionError):
        raise UserError('broken ranks file: "base64 rank" lines for all ranks from 0, with all 256 bytes, are needed')
    bpe = tiktoken.Encoding('bpe', pat_str=PATTERN.pattern, mergeable_ranks=ranks, special_tokens={EOT: len(vocab)})
    made = Tokenizer('bpe', bpe.encode_ordinary, vocab + [b''], len(vocab), 'tokenizer.tiktoken', ranks_blob(vocab))
    made.kind = 'gpt2' if made.hash == GPT2_HASH else 'bpe'         # whether it came by name or by path
    return made


def neox_tokenizer(blob):
    """GPT-NeoX's tokenizer.json: NFC, runs of spaces cut out as tokens of their own (longest first), byte-level BPE."""
    try:
        spec = json.loads(blob)
        model, pre, normal = spec['model'], spec['pre_tokenizer'], (spec.get('normalizer') or {}).get('type')
        kinds = model['type'], pre['type'], pre['add_prefix_space'], normal or 'NFC'
        if kinds != ('BPE', 'ByteLevel', False, 'NFC'):
            raise ValueError(f'it has {kinds}')
        special = {a['content']: a['id'] for a in spec['added_tokens'] if a['special']}
        added = {a['content']: a['id'] for a in spec['added_tokens'] if not a['special']}
        # The file writes bytes as letters: those that print stand for themselves, the rest follow from 256 on.
        prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
        byte = {chr(b): b for b in prints} | {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*prints}))}
        raw = lambda token: bytes(byte[letter] for letter in token)
        ids = {raw(token): i for token, i in model['vocab'].items() if token not in special}
        merges = [m.split(' ') if isinstance(m, str) else m for m in model['merges']]
        # tiktoken's ranks are the order of merging, which ids need not follow: they are looked up after encoding.
        order = list(dict.fromkeys([t for t in ids if len(t) == 1] + [raw(a + b) for a, b in merges]))
        to_id, eot, ranks = [ids[token] for token in order], special[EOT], {token: i for i, token in enumerate(order)}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'tokenizer.json: a byte-level BPE with {EOT}, as GPT-NeoX has it, is needed ({error!r})')
    bpe = tiktoken.Encoding('neox', pat_str=PATTERN.pattern, mergeable_ranks=ranks, special_tokens={})
    runs = re.compile('(' + ('|'.join(map(re.escape, sorted(added, key=len, reverse=True))) or '(?!)') + ')')
    def encode(text):
        out = []
        for piece in runs.split(unicodedata.normalize('NFC', text) if normal else text):
            out += [added[piece]] if piece in added else [to_id[r] for r in bpe.encode_ordinary(piece)]
        return out
    token_of = {i: token for token, i in ids.items()} | {i: content.encode() for content, i in added.items()}
    token_bytes = [token_of.get(i, b'') for i in range(1 + max([*token_of, *special.values()]))]
    return Tokenizer('neox', encode, token_bytes, eot, 'tokenizer.json', blob, order)


def chunk_tokenizer(base, byte_limit):
    """The byte-level model's symbols: 0-255 bytes, 256 end-of-chunk, 257 end-of-text, 258 padding. Every token of
    `base` is a chunk of byte_limit + 1 slots; a token longer than byte_limit becomes several."""
    def chunks(token):
        parts = [token[i:i + byte_limit] for i in range(0, len(token), byte_limit)]
        return [symbol for part in parts for symbol in [*part, 256] + [258] * (byte_limit - len(part))]
    if base.kind == 'chunks' or byte_limit < 1:
        raise UserError('--chunks needs a tokenizer of whole tokens under it and a --byte_limit of at least 1')
    table, symbols = [chunks(token) for token in base.token_bytes], [bytes([b]) for b in range(256)] + [b''] * 3
    encode = lambda text: [symbol for token in base.encode(text) for symbol in table[token]]
    return Tokenizer('chunks', encode, symbols, 257, base.file, base.blob, end=[257] + [258] * byte_limit,
                     base=base.kind, base_hash=base.hash, byte_limit=byte_limit)


def build_tokenizer(kind, blob=b'', base=None, byte_limit=None):
    if kind == 'chunks':
        return chunk_tokenizer(build_tokenizer(base, blob), byte_limit)
    if kind == 'bytes':
        return Tokenizer(kind, lambda text: list(text.encode('utf-8')), [bytes([b]) for b in range(256)] + [b''], 256)
    return neox_tokenizer(blob) if kind == 'neox' else rank_tokenizer(blob)


def choose_tokenizer(name):
    """What --tokenizer may say: gpt2, bytes, a ranks file, a tokenizer.json, or another data set's folder."""
    path = Path(name)
    if name == 'gpt2':
        try:
            ranks = tiktoken.get_encoding('gpt2')._mergeable_ranks
        except Exception as error:          # whatever tiktoken's own download meets
            raise UserError(f'tiktoken could not download GPT-2\'s ranks ({type(error).__name__}); '
                            'give them as a file: --tokenizer path/to/gpt2.tiktoken')
        return rank_tokenizer(ranks_blob(sorted(ranks, key=ranks.get)))
    if name == 'bytes' or path.is_dir():
        return build_tokenizer('bytes') if name == 'bytes' else load_tokenizer(path)
    if not path.is_file():
        raise UserError(f'--tokenizer {name}: it may be gpt2, bytes, a .tiktoken file, a tokenizer.json or a data set, as data/toy_stories')
    return build_tokenizer('neox' if path.suffix == '.json' else 'bpe', path.read_bytes())


def how_to_make(folder):
    """What to do about a data set that is not there."""
    name, (base, _, form) = folder.name, folder.name.partition('_')
    more = dict(neox='--tokenizer 20B_tokenizer.json', chunks='--chunks').get(form)     # as config/paper names them
    meta = Path('data', folder, 'meta.json')             # of a name without its folder
    if meta.exists() or (folder / 'ckpt.pt').exists():
        return f'did you mean {meta.parent.as_posix()}?' if meta.exists() else 'copy it from the data set that the run was trained on'
    if name in TOYS or base in NAMED and (more or not form):
        return 'make the data set with: python prepare.py ' + ('toy' if name in TOYS else f'{base} --name {name} {more}' if more else base)
    near = difflib.get_close_matches(name, [*TOYS, *(path.parent.name for path in folder.parent.glob('*/meta.json'))], 1, 0.8)
    return (f"did you mean '{near[0]}'? If not, " if near else '') + f'make the data set with: python prepare.py text --name {name} --input FILES'


def load_meta(folder):
    path = Path(folder) / 'meta.json'
    try:
        meta = json.loads(path.read_text(encoding='utf-8'))
        for key in ('kind', 'file', 'hash', 'vocab_size', 'eot'):
            meta['tokenizer'][key]
        for split in ('train', 'val'):
            meta['splits'][split]['tokens'], meta['splits'][split]['words']
        return meta
    except OSError:
        raise UserError(f'{path} is missing; {how_to_make(Path(folder))}') from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f'{path} is broken; delete {folder} and make it again with prepare.py')


def load_bin(folder, split):
    """A split's token ids, as a read-only memory map."""
    path, expected = Path(folder) / f'{split}.bin', 2 * load_meta(folder)['splits'][split]['tokens']
    found = path.stat().st_size if path.is_file() else 0
    if found != expected:
        raise UserError(f'{path}: expected {expected:,} bytes, found {found:,}; delete {folder}, run prepare.py again')
    return np.memmap(path, dtype=np.uint16, mode='r')


def load_tokenizer(folder):
    """The tokenizer of a data set, or of a run folder that holds a copy of it."""
    spec = load_meta(folder)['tokenizer']
    path = Path(folder) / (spec['file'] or 'meta.json')
    if not path.is_file():
        raise UserError(f'{path} is missing; copy it from the data set, or make that again with prepare.py')
    tokenizer = build_tokenizer(spec['kind'], path.read_bytes(), spec.get('base'), spec.get('byte_limit'))
    if tokenizer.hash != spec['hash']:
        raise UserError(f'{path} is not the tokenizer that meta.json describes; make the data set again')
    return tokenizer


def copy_tokenizer(src_folder, dst_folder):
    for name in filter(None, ['meta.json', load_meta(src_folder)['tokenizer']['file']]):
        shutil.copyfile(Path(src_folder) / name, Path(dst_folder) / name)


# ---------------------------------------------------------------------------------------------------------------
# The BPE trainer


def train_bpe(counts, vocab_size):
    """Byte-level BPE on {pre-token: count}; returns the tokens in rank order, at most vocab_size - 1 of them.
    The most frequent pair is merged first; ties go to the smaller pair of ranks; a pair seen once is not merged.
    A merge touches only the words that hold the pair, and updates the counts of the pairs in them."""
    vocab = [bytes([b]) for b in range(256)]
    rank = {token: i for i, token in enumerate(vocab)}
    words, weights = [list(word.encode('utf-8')) for word in counts], list(counts.values())
    pairs, where = defaultdict(int), defaultdict(list)      # where: words that hold the pair, or held it once
    for w, ids in enumerate(words):
        for pair in zip(ids, ids[1:]):
            pairs[pair] += weights[w]
            where[pair].append(w)
    heap = [(-n, pair) for pair, n in pairs.items()]        # counts that sank meanwhile are put right when popped
    heapq.heapify(heap)
    while heap and len(vocab) < vocab_size - 1:
        n, pair = heapq.heappop(heap)
        if -n != pairs[pair]:
            heapq.heappush(heap, (-pairs[pair], pair))
            continue
        if -n < 2:
            break
        token = vocab[pair[0]] + vocab[pair[1]]
        new = rank.setdefault(token, len(vocab))            # bytes that are a token already keep their rank
        vocab += [token] if new == len(vocab) else []
        grown = set()
        for w in where.pop(pair):
            ids, merged = words[w], merge(words[w], *pair, new)
            if len(merged) == len(ids):
                continue
            for p in zip(ids, ids[1:]):
                pairs[p] -= weights[w]
            for p in zip(merged, merged[1:]):
                pairs[p] += weights[w]
                if new in p:
                    where[p].append(w)
                    grown.add(p)
            words[w] = merged
        for p in grown:
            heapq.heappush(heap, (-pairs[p], p))
    return vocab


def merge(ids, a, b, new):
    out, i, last = [], 0, len(ids) - 1
    while i <= last:
        found = i < last and ids[i] == a and ids[i + 1] == b
        out.append(new if found else ids[i])
        i += 2 if found else 1
    return out


# ---------------------------------------------------------------------------------------------------------------
# Readers: files -> documents


WIKITEXT = [(re.compile(pattern), new) for pattern, new in [        # applied until nothing is left, since markup nests
    (r'(?s)\n==\s*(?:References|Other websites|Related pages|Notes|Sources)\s*==.*|<!--.*?-->', ''),
    (r'(?s)<ref[^>]*/>|<(ref|gallery|math|timeline)\b.*?</\1>', ''), (r'\{\{[^{}]*\}\}|(?s:\{\|(?:(?!\{\|).)*?\|\})', ''),
    (r'\[\[\w+:(?:[^\[\]]|\[\[[^\]]*\]\])*\]\]', ''), (r'\[\[(?:[^|\]]*\|)?([^\]]*)\]\]|\[\w+://\S+ ?([^\]]*)\]', r'\1\2'),
    (r"(?m)'{2,}|<[^>]*>|__[A-Z]+__|^[*#:;= ]+|[ =]+$", ''), (r'\n\s+|\s+\n', '\n')]]


def read_lines(path):
    """(number, text) of each line of a plain or compressed file. A line ends at \\n only."""
    number, offset = 0, 0
    try:
        with {'.gz': gzip.open, '.xz': lzma.open}.get(path.suffix, open)(path, 'rb') as file:
            for number, line in enumerate(file, 1):
                text = line.decode('utf-8').removeprefix('\ufeff' if number == 1 else '')
                yield number, text[:-2] + '\n' if text.endswith('\r\n') else text
                offset += len(line)
    except UnicodeDecodeError as error:
        raise UserError(f'{path}: line {number}, byte {offset + error.start} is not UTF-8; convert the file first')


def read_rows(path, fields):
    """The documents of a .jsonl file: the named fields of each row, joined by a newline."""
    for number, line in read_lines(path):
        try:
            row = json.loads(line if line.strip() else '{}')
            if row or line.strip():
                yield '\n'.join(row[field] for field in fields).encode('utf-8').decode('utf-8')     # no lone surrogate
        except ValueError as error:
            raise UserError(f'{path}:{number}: not a row of JSON in Unicode ({error})')
        except (KeyError, TypeError):
            has = ', '.join(row) if isinstance(row, dict) else 'no fields'
            raise UserError(f'{path}:{number}: no text in {" and ".join(fields)} (the row has: {has}); see --field')


def read_text(path, split):
    """The documents of a text file, ended by <|endoftext|>, a blank line, every line, about 16 KB, or its end."""
    if split == 'auto':
        head = ''.join(line for _, (_, line) in zip(range(10000), read_lines(path)))
        split = 'eot' if EOT in head else 'blank' if re.search(r'\n\s*\n\s*\S', head) else 'passage'
    parts, size = [], 0
    for _, line in read_lines(path):
        *ended, line = line.split(EOT) if split == 'eot' else [line]
        for end in ended:
            yield ''.join(parts) + end
            parts = []
        blank = split == 'blank' and line.isspace()
        parts.append('' if blank else line)
        size += len(line)
        if blank or split == 'row' or split == 'passage' and size >= 16384:
            yield ''.join(parts)
            parts, size = [], 0
    yield ''.join(parts)


def read_wiki(path):
    """The articles of a Wikimedia dump (.xml.bz2): title and text, without templates, tables, notes and markup."""
    for _, page in ElementTree.iterparse(bz2.open(path)):
        if page.tag.endswith('}page'):
            if page.findtext('{*}ns') == '0' and page.find('{*}redirect') is None:
                text = page.findtext('.//{*}text') or ''
                for pattern, new in WIKITEXT:
                    count = 1
                    while count:
                        text, count = pattern.subn(new, text)
                yield page.findtext('{*}title') + '\n' + html.unescape(text).strip()
            page.clear()


def read_documents(path, split='auto', fields=('text',)):
    stem = re.sub(r'\.(gz|xz|bz2)$', '', path.name.lower())
    try:
        for text in read_wiki(path) if stem.endswith('.xml') else read_rows(path, fields) if stem.endswith('.jsonl') \
                else read_text(path, split):
            if text and not text.isspace():
                yield text.strip('\n')
    except (EOFError, lzma.LZMAError, zlib.error, ElementTree.ParseError, OSError) as error:
        raise UserError(f'{path}: broken or unreadable ({error}); get the file again')


def find_files(inputs):
    """[(split, path)] of files and folders. If some names say train and others val, valid or dev, they are believed
    (and test files stay out); else everything is train, and val is cut from it later."""
    found, roles = [], dict(train='train', val='val', valid='val', validation='val', dev='val', test='test')
    for given in map(Path, inputs):
        if not given.exists():
            raise UserError(f'{given}: no such file or folder')
        for path in sorted(p for p in given.rglob('*') if p.is_file()) if given.is_dir() else [given]:
            if path == given or re.search(r'\.(txt|jsonl|train|dev|test|xml)(\.gz|\.xz|\.bz2)?$', path.name.lower()):
                named = path.relative_to(given if len(inputs) == 1 and given.is_dir() else given.parent)
                words = reversed(re.split(r'[/\\._-]', str(named).lower()))
                found.append((next((roles[word] for word in words if word in roles), None), path))
        if not any(path == given or given in path.parents for _, path in found):
            raise UserError(f'no .txt or .jsonl file (or .gz, .xz of one) in {given}')
    if {'train', 'val'} <= {role for role, _ in found}:
        return [(role or 'train', path) for role, path in found if role != 'test']
    return [('train', path) for _, path in found]


# ---------------------------------------------------------------------------------------------------------------
# Documents -> a data set


@contextlib.contextmanager
def new_folder(target, overwrite=False):
    """A hidden folder beside `target` that takes its name when the block ends well, and vanishes when it does not."""
    if target.exists() and not overwrite:
        raise UserError(f'{target} exists already; choose another --name, or replace it with --overwrite')
    ours = r'meta\.json|(train|val)\.bin|tokenizer\.\w+|[\w.]+\.jsonl'
    if target.exists() and not (target.is_dir() and all(re.fullmatch(ours, p.name) for p in target.iterdir())):
        raise UserError(f'{target} holds more than a data set, so --overwrite does not touch it; move it away first')
    work = target.parent / f'.{target.name}.{uuid.uuid4().hex[:12]}'
    try:
        work.mkdir(parents=True)
        yield work
        old = target.rename(f'{work}.old') if overwrite and target.exists() else None
        work.rename(target)
        shutil.rmtree(old) if old else None             # only now that the new one stands
    except OSError as error:
        raise UserError(f'{target} could not be written ({error})')
    finally:
        shutil.rmtree(work, ignore_errors=True)


def batches(spans, size):
    """Runs of documents of about `size` bytes together."""
    step = max(1, size * len(spans) // (1 + sum(length for _, length in spans)))
    return (spans[i:i + step] for i in range(0, len(spans), step))


def read_spans(folder, spans):
    with open(folder / 'spool', 'rb') as file:
        for offset, length in spans:
            file.seek(offset)
            yield file.read(length).decode('utf-8')


def count_batch(folder, spans):
    return Counter(word for text in read_spans(folder, spans) for word in PATTERN.findall(text))


cached_tokenizer = functools.lru_cache(maxsize=1)(load_tokenizer)       # once per worker, not per batch


def encode_batch(folder, spans):
    """Some documents' ids as bytes, their words, their size."""
    tokenizer, texts = cached_tokenizer(folder), list(read_spans(folder, spans))
    ids = [np.array(tokenizer.encode(text) + tokenizer.end, dtype=np.uint16) for text in texts]
    return np.concatenate(ids).tobytes(), sum(len(text.split()) for text in texts), sum(size for _, size in spans)


def parallel(function, folder, tasks, jobs):
    """function(folder, task) for each task, in order. imap draws tasks as they are needed, so nothing piles up."""
    function = functools.partial(function, folder)
    if jobs == 1:
        yield from map(function, tasks)
        return
    with multiprocessing.Pool(jobs, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield from pool.imap(function, tasks)


def build(target, documents, tokenizer, val_fraction=0.01, seed=1337, byte_limit=None, jobs=None, overwrite=False,
          source=(), settings=None):
    """Write a data set. documents: (split, text) pairs; tokenizer: one, or the vocabulary size of a BPE to train."""
    with new_folder(target, overwrite) as work:
        spans, offset = {'train': [], 'val': []}, 0
        with open(work / 'spool', 'wb') as file:
            for split, text in documents:
                spans[split].append((offset, file.write(text.encode('utf-8'))))
                offset = file.tell()
        jobs = jobs or (os.cpu_count() or 1 if offset > 2 ** 24 else 1)     # a small one is done before a pool starts
        spans = {split: Dice(seed).shuffled(spans[split]) for split in spans}
        if not spans['val']:
            n = max(1, round(val_fraction * len(spans['train'])))
            spans = {'train': spans['train'][n:], 'val': spans['train'][:n]}
        if not spans['train']:
            raise UserError('the corpus is empty, or one document that cannot be cut into train and val; see --split')
        if isinstance(tokenizer, int):
            tokenizer = train_tokenizer(work, spans['train'], tokenizer, jobs)
        made = tokenizer if byte_limit is None else chunk_tokenizer(tokenizer, byte_limit)
        nothing = {split: dict(tokens=0, words=0) for split in spans}           # until they are counted
        meta = dict(name=target.name, source=list(source), splits=nothing, tokenizer=dict(
            kind=made.kind, file=made.file, hash=made.hash, vocab_size=made.n_vocab, eot=made.eot, **made.extra),
            settings=dict(settings or {}, seed=seed, val_fraction=val_fraction))
        meta |= dict(slots=len(made.end), pad=258) if made.kind == 'chunks' else {}
        if made.file:
            (work / made.file).write_bytes(made.blob)
        (work / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')     # the workers read the tokenizer
        meta['splits'] = {split: encode_split(work, split, spans[split], made.end, jobs) for split in spans}
        (work / 'meta.json').write_text(json.dumps(meta, indent=1) + '\n', encoding='utf-8')
        os.remove(work / 'spool')
    for split, n in meta['splits'].items():
        print(f'{target}/{split}.bin: {n["tokens"]:,} tokens, {n["documents"]:,} documents, {n["words"]:,} words')
        if split == 'val' and n['tokens'] < 1000:
            print(f'note: a loss on {n["tokens"]:,} tokens says little; set aside more with --val_fraction')


def train_tokenizer(work, spans, vocab_size, jobs):
    counts = Counter()
    for part in parallel(count_batch, work, batches(spans, 2 ** 22), jobs):
        counts.update(part)
    vocab = train_bpe(counts, vocab_size)
    if len(vocab) + 1 < vocab_size:
        print(f'the corpus has no more than {len(vocab) + 1:,} entries for a vocabulary of {vocab_size:,}')
    return rank_tokenizer(ranks_blob(vocab))


def encode_split(work, split, spans, end, jobs):
    """Write one bin; returns its counts. Words and bytes are those of the raw text."""
    total, size = Counter(tokens=len(end), documents=len(spans), words=0, bytes=0), sum(n for _, n in spans)
    with open(work / f'{split}.bin', 'wb') as file, \
            tqdm(total=size, unit='B', unit_scale=True, desc=split, leave=False, disable=None) as bar:
        file.write(np.array(end, dtype=np.uint16).tobytes())
        for ids, words, size in parallel(encode_batch, work, batches(spans, 2 ** 20), jobs):
            total.update(tokens=file.write(ids) // 2, words=words, bytes=size)
            bar.update(size)
    return dict(total)


# ---------------------------------------------------------------------------------------------------------------
# The toy corpora, from the grammars in toy.py


def make_toy(root='data', overwrite=False):
    """Write toy_stories, toy_math, toy_lingo and toy_blimp where they are missing; they share one BPE. toy_bytes is
    toy_stories once more, as chunks of bytes; toy_glue is a task for finetune.py. -> what was missing"""
    plan = dict(toy_stories=(story, 3_000_000), toy_math=(problem, 1_000_000), toy_lingo=(lingo, 1_000_000))
    missing = [Path(root) / name for name in TOYS if overwrite or not (Path(root) / name).is_dir()]
    texts = {name: [] for name in plan if missing}
    for name in texts:
        (write, size), dice = plan[name], Dice(name)
        while size > 0:
            texts[name].append(write(dice))
            size -= len(texts[name][-1])
    counts = Counter(word for documents in texts.values() for text in documents for word in PATTERN.findall(text))
    tokenizer = rank_tokenizer(ranks_blob(train_bpe(counts, 2048)))
    seen = {line for text in texts.get('toy_stories', []) for line in re.split(r'(?<=[.!?"]) ', text)}
    for target in missing:
        try:
            if target.name not in ('toy_blimp', 'toy_glue'):
                chunks = 8 if target.name == 'toy_bytes' else None
                documents = (('train', text) for text in texts['toy_stories' if chunks else target.name])
                build(target, documents, tokenizer, 0.02, byte_limit=chunks, overwrite=overwrite, source=['prepare.py toy'])
                continue
            if target.name == 'toy_blimp':
                files = {kind: minimal_pairs(kind, seen, lambda text: len(tokenizer.encode(text))) for kind in SCENES}
            else:
                rows = subject_rows(2300)
                files = {'toy.train': rows[:2000], 'toy.valid': rows[2000:]}
            with new_folder(target, overwrite) as work:
                for name, rows in files.items():
                    (work / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n', encoding='utf-8')
        except UserError:
            if not target.is_dir():         # else another process made it meanwhile, which is as good
                raise
    return missing


# ---------------------------------------------------------------------------------------------------------------
# The command line


def land_pairs(target, inputs, expected, overwrite):
    """Minimal pairs stay as they are: .jsonl files, whose rows are checked."""
    files = [path for _, path in find_files(inputs) if path.suffix == '.jsonl']
    with new_folder(target, overwrite) as work:
        sizes = [sum(1 for _ in read_rows(path, ['sentence_good', 'sentence_bad'])) for path in files]
        if not files or expected and sizes != [1000] * 67:
            raise UserError(f'{len(files)} files with {sum(sizes):,} pairs; ' + (expected or 'no .jsonl file'))
        for path in files:
            shutil.copyfile(path, work / path.name)
    print(f'{target}: {sum(sizes):,} pairs in {len(files)} files')


def main(argv=None):
    parser = Parser(__doc__)
    parser.add_argument('what', choices=['toy', 'text', *NAMED])
    parser.add_argument('--name', help='data set to write, data/NAME')
    parser.add_argument('--input', nargs='+', help='files and folders: .txt .jsonl, .gz and .xz of them')
    parser.add_argument('--out', default='data', help='where data sets go (default data)')
    parser.add_argument('--vocab_size', type=int, help='train a BPE of this size, end-of-text included (default 16384)')
    parser.add_argument('--tokenizer', help='instead: gpt2, bytes, a .tiktoken file, a tokenizer.json (GPT-NeoX), data/NAME')
    parser.add_argument('--chunks', action='store_true', help='symbol streams for the byte-level model')
    parser.add_argument('--byte_limit', type=int, default=12, help='bytes in a chunk, with --chunks (default 12)')
    parser.add_argument('--split', choices=['auto', 'eot', 'blank', 'row', 'passage', 'file'],
                        help='what ends a document; auto (default): end-of-text, else blank lines, else some 16 KB')
    parser.add_argument('--field', help='fields of a .jsonl row, joined by newlines (default text)')
    parser.add_argument('--val_fraction', type=float, default=0.01, help='where no file is named val, valid or dev (default 0.01)')
    parser.add_argument('--seed', type=int, default=1337)
    parser.add_argument('--overwrite', action='store_true', help='replace a data set of this name')
    args = parser.parse_args(argv)
    if args.what == 'toy':
        if args.name or args.input:
            raise UserError('the toy corpora have names and texts of their own: python prepare.py toy [--out FOLDER] [--overwrite]')
        if not make_toy(args.out, args.overwrite):
            print(f'{args.out} holds all toy corpora already; --overwrite makes them anew')
        return
    name, preset = args.name or (args.what if args.what in NAMED else ''), NAMED.get(args.what, [{}])[0]
    for wrong, message in [
            (not re.fullmatch(r'\w[\w.-]*', name), f'--name {name or "is missing"}: a name of letters, digits, _ . - is needed'),
            (args.what == 'text' and not args.input, '--input is missing: files or folders with .txt or .jsonl text'),
            (args.tokenizer and args.vocab_size, '--vocab_size trains a tokenizer, --tokenizer names one: give one'),
            (not 257 <= (args.vocab_size or 257) <= 65536, f'--vocab_size {args.vocab_size}: 257 to 65,536 are possible'),
            (not 0 < args.val_fraction < 1, f'--val_fraction {args.val_fraction}: between 0 and 1, as 0.01')]:
        if wrong:
            raise UserError(message)
    target, inputs = Path(args.out) / name, args.input or fetch_named(args.what, Path(args.out) / 'raw')
    if args.what == 'blimp':
        return land_pairs(target, inputs, '' if args.input else 'BLiMP has 67 of 1,000', args.overwrite)
    files = find_files(inputs)
    if any(target.resolve() in path.resolve().parents for _, path in files):
        raise UserError(f'the input lies in {target}, which would be overwritten; choose another --name')
    known = args.tokenizer or (None if args.vocab_size else preset.get('tokenizer'))
    tokenizer = choose_tokenizer(known) if known else args.vocab_size or 16384
    split, field = args.split or preset.get('split', 'auto'), args.field or preset.get('field', 'text')
    documents = ((role, text) for role, path in files for text in read_documents(path, split, field.split(',')))
    build(target, documents, tokenizer, args.val_fraction, args.seed, args.byte_limit if args.chunks else None,
          overwrite=args.overwrite, source=[args.what, *(path.name for _, path in files)],
          settings=dict(split=split, field=field))


if __name__ == '__main__':
    run_main(main)
