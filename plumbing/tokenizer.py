"""
Tokenizers: the kinds there are, and the files they travel in.

The tokenizer of a data set lies in its folder: meta.json names its kind, hash and size, another
file holds the vocabulary. A run's folder has a copy of both.
"""

import base64
import difflib
import hashlib
import json
import re
from pathlib import Path

import regex                    # GPT-2's pattern needs \p{L}, which re lacks; tiktoken brings it
import tiktoken

from plumbing.cli import UserError, new_file, reading

EOT = '<|endoftext|>'
# GPT-2's pattern
PATTERN = regex.compile(
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")
# tiktoken's stack overflows in a million spaces. So a text is encoded in parts, cut in front of a
# space, where a pre-token ends: the ids stay the same. A run without spaces is cut anywhere.
PARTS = re.compile(r'(?s).{1,65536}(?=(?<=\S)[ \n]|\Z)|.{65536}')
GPT2_HASH = 'adb7b0cf2e9969045b0547bf35d2c94b13f547e89b02720cba9ab739e076bb13'


# ---- The kinds. Each is made from `blob`, the content of the file that travels with the data ----

class Tokenizer:
    """
    encode(text) -> ids; token_bytes[id] -> a token's bytes; `end` follows every document.
    pad: an id that is read but never predicted: it fills up a chunk, or is the pause.
    cut(text) -> parts that are encoded one by one.
    extra: what else meta.json must say to build the tokenizer again.
    stop: ids with which an imported model ends a text; unknown: the id of <unk>, if there is one.
    """

    def __init__(self, kind, encode_part, token_bytes, eot, file=None, blob=b'', end=None, pad=-1,
                 cut=PARTS.findall, **extra):
        self.kind = kind
        self.encode_part = encode_part
        self.cut = cut
        self.token_bytes = token_bytes
        self.eot = eot
        self.end = end or [eot]
        self.pad = pad
        self.pauses = [pad] * extra.get('pauses', 0)     # they follow the first line of a text
        self.file = file
        self.blob = blob
        self.extra = extra
        self.stop, self.unknown = [], None
        self.n_vocab = len(token_bytes)
        self.dtype = 'uint16' if self.n_vocab <= 65536 else 'uint32'     # of the ids in a bin
        merges = [blob.hex()] if kind == 'hf' else []    # equal tokens can have different merges
        parts = [kind, eot, extra, [t.hex() for t in token_bytes], merges]
        self.hash = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode(self, text):
        return [i for ids in self.encode_parts(text) for i in ids]

    def encode_parts(self, text):
        """The ids of a text, part by part."""
        first = text.find('\n') + 1 if self.pauses else 0    # characters of the first line
        yield from map(self.encode_part, self.cut(text[:first]))
        if first:
            yield self.pauses
        yield from map(self.encode_part, self.cut(text[first:]))

    def decode(self, ids, end=b''):
        """Text, with `end` where a document ends."""
        ids = [i for i in ids if i < self.n_vocab]       # a model's vocabulary may be padded
        parts = [end if i == self.eot else self.token_bytes[i] for i in ids]
        return b''.join(parts).decode('utf-8', errors='replace')

    def about(self):
        """What meta.json says of it."""
        return dict(kind=self.kind, file=self.file, hash=self.hash, vocab_size=self.n_vocab,
                    eot=self.eot, stop=self.stop, **self.extra)

    def show(self, ids):
        """Text to look at: an empty line where a document ends."""
        return self.decode(ids, end=b'\n\n').strip('\n')


def ranks_blob(vocab):
    return b''.join(base64.b64encode(token) + b' %d\n' % rank for rank, token in enumerate(vocab))


def rank_tokenizer(blob):
    """bpe and gpt2: tiktoken's ranks ("base64 rank" lines), GPT-2's pattern, end-of-text last."""
    lines = map(bytes.split, blob.splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    vocab = sorted(ranks, key=ranks.get)
    eot = len(vocab)
    if list(map(ranks.get, vocab)) != list(range(eot)):
        raise UserError(f'the ranks do not run from 0 to {eot - 1:,}')
    bpe = tiktoken.Encoding('bpe', pat_str=PATTERN.pattern, mergeable_ranks=ranks,
                            special_tokens={EOT: eot})
    tokenizer = Tokenizer('bpe', bpe.encode_ordinary, vocab + [b''], eot,
                          'tokenizer.tiktoken', ranks_blob(vocab))
    if tokenizer.hash == GPT2_HASH:
        tokenizer.kind = 'gpt2'
    return tokenizer


def build_tokenizer(kind, blob=b'', eot=None):
    if kind == 'bytes':
        token_bytes = [bytes([b]) for b in range(256)] + [b'']
        return Tokenizer(kind, lambda text: list(text.encode('utf-8')), token_bytes, 256)
    if kind == 'hf':
        from plumbing.hf import hf_tokenizer             # few runs need it
        return hf_tokenizer(blob, eot)
    return rank_tokenizer(blob)


def choose_tokenizer(name):
    """What --tokenizer may say: gpt2, bytes, a ranks file, a tokenizer.json or a data set."""
    path = Path(name)
    if name == 'bytes':
        return build_tokenizer('bytes')
    if name == 'gpt2':
        try:
            ranks = tiktoken.get_encoding('gpt2')._mergeable_ranks
        except Exception as error:                       # whatever its download meets
            raise UserError(f"tiktoken could not download GPT-2's ranks ({type(error).__name__}); "
                            'give them as a file: --tokenizer path/to/gpt2.tiktoken')
        return rank_tokenizer(ranks_blob(sorted(ranks, key=ranks.get)))
    if path.is_dir():
        return load_tokenizer(path)
    if not path.is_file():
        raise UserError(f'--tokenizer {name}: it may be gpt2, bytes, a .tiktoken file, '
                        'a tokenizer.json or a data set, such as data/toy_stories')
    with reading(path):
        return build_tokenizer('hf' if path.suffix == '.json' else 'bpe', path.read_bytes())


# ---- Their files --------------------------------------------------------------------------------

def load_meta(folder):
    """meta.json of a data set, or of a run folder that holds a copy of it."""
    path = Path(folder) / 'meta.json'
    if not path.exists():
        name = path.parent.name
        command = f'{name}, if it knows it, or: python prepare.py text --name {name} --input FILES'
        command = 'toy' if name.startswith('toy_') else command
        near = difflib.get_close_matches(name, [p.name for p in path.parent.parent.glob('*')], 1)
        hint = f'did you mean {near[0]}?' if near else f'make it with: python prepare.py {command}'
        raise UserError(f'there is no data set {path.parent}; {hint}')
    with reading(path):
        return json.loads(path.read_text(encoding='utf-8'))


def load_tokenizer(folder):
    """The tokenizer of a data set, or of a run folder that holds a copy of it."""
    with reading(Path(folder, 'meta.json')):
        spec = load_meta(folder)['tokenizer']
        kind = spec['kind']
        path = Path(folder, spec['file'] or 'meta.json')
    with reading(path):
        blob = path.read_bytes() if spec['file'] else b''
        tokenizer = build_tokenizer(spec.get('base', kind), blob, spec['eot'])
        if 'base' in spec:
            from plumbing.chunks import WRAPPERS, wrap_tokenizer
            tokenizer = wrap_tokenizer(tokenizer, kind, spec[WRAPPERS[kind][1]])
        if tokenizer.hash != spec['hash']:
            raise UserError(f'{path} is not the tokenizer that meta.json describes')
    tokenizer.stop = spec.get('stop', [])
    return tokenizer


def shared_tokenizer(folder, *others):
    """The tokenizer of a data set, which others must have, too."""
    tokenizer = load_tokenizer(folder)
    for other in others:
        if load_meta(other)['tokenizer']['hash'] != tokenizer.hash:
            raise UserError(f'{folder.name} and {other.name} have different tokenizers: prepare '
                            f'{other.name} again with --tokenizer {folder}')
    return tokenizer


def copy_tokenizer(source, target):
    """From a data set's folder into a run's."""
    for name in filter(None, ['meta.json', load_meta(source)['tokenizer']['file']]):
        with new_file(Path(target) / name, 'wb') as file:
            file.write((Path(source) / name).read_bytes())
