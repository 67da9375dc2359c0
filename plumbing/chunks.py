"""Tokenizers made from another one: chunks of bytes, sentences of tokens, pauses."""

import re

from plumbing.cli import UserError
from plumbing.tokenizer import Tokenizer

# A sentence ends after a line, or after . ! ? and closing quotes; spaces in between begin the next.
SENTENCES = re.compile(r'''(?s).+?(?:\n|[.!?]["'”’)\]]*(?=[^\S\n]+\S)|\Z)''')


def in_slots(symbols, limit, end_of_chunk):
    """Symbols as a chunk of limit + 1 slots: they, end-of-chunk, padding; more than `limit` as
    several chunks. The ids of end-of-chunk, end-of-text and padding follow each other."""
    slots = []
    for i in range(0, len(symbols), limit):
        part = symbols[i:i + limit]
        slots += [*part, end_of_chunk] + [end_of_chunk + 2] * (limit - len(part))
    return slots


def chunk_tokenizer(base, byte_limit):
    """The byte-level model's symbols: 0-255 bytes, 256 end-of-chunk, 257 end-of-text, 258 padding.
    Every token of `base` becomes a chunk of byte_limit + 1 slots, a longer token several chunks."""
    table = [in_slots(token, byte_limit, 256) for token in base.token_bytes]
    encode = lambda text: [symbol for token in base.encode(text) for symbol in table[token]]
    symbol_bytes = [bytes([b]) for b in range(256)] + [b''] * 3
    return Tokenizer('chunks', encode, symbol_bytes, 257, base.file, base.blob,
                     end=[257] + [258] * byte_limit, pad=258,
                     base=base.kind, base_hash=base.hash, byte_limit=byte_limit)


def sentence_tokenizer(base, token_limit):
    """The same one level up, for next thoughts: a chunk is a sentence of up to token_limit tokens.
    The ids of `base` stay as they are; end-of-chunk, end-of-text and padding follow."""
    end_of_chunk, eot, pad = range(base.n_vocab, base.n_vocab + 3)

    def encode(text):
        sentences = map(base.encode, SENTENCES.findall(text))
        return [symbol for ids in sentences for symbol in in_slots(ids, token_limit, end_of_chunk)]
    return Tokenizer('sentences', encode, base.token_bytes + [b''] * 3, eot, base.file, base.blob,
                     end=[eot] + [pad] * token_limit, pad=pad,
                     base=base.kind, base_hash=base.hash, token_limit=token_limit)


def pause_tokenizer(base, pauses):
    """`base` and a token to think at, the pause: `pauses` of them follow a text's first line."""
    return Tokenizer('pauses', base.encode_part, base.token_bytes + [b''], base.eot,
                     base.file, base.blob, pad=base.n_vocab,
                     base=base.kind, base_hash=base.hash, pauses=pauses)


# Tokenizers made from another one and a number: how, and that number's name in meta.json
WRAPPERS = dict(
    chunks=(chunk_tokenizer, 'byte_limit'),
    sentences=(sentence_tokenizer, 'token_limit'),
    pauses=(pause_tokenizer, 'pauses'))


def wrap_tokenizer(base, kind, number):
    if base.kind in WRAPPERS or base.kind == 'hf':
        raise UserError(f'--{kind} needs a tokenizer of plain tokens, not one of {base.kind}')
    return WRAPPERS[kind][0](base, number)
