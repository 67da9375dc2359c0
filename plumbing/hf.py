"""Hugging Face's tokenizer.json, of any kind."""

import json
import re

from plumbing.cli import UserError
from plumbing.tokenizer import EOT, Tokenizer


def hf_tokenizer(blob, eot=None):
    """Any tokenizer.json, by the package that made it. A special token in a text is read as such,
    as transformers does. End-of-text, which stands between documents, is what the file puts in
    front of a text (Llama's <s>); else the id `eot`, or the token of that name (GPT-NeoX)."""
    try:
        from tokenizers import Tokenizer as Package
    except ImportError:
        raise UserError('a tokenizer.json needs a package: pip install tokenizers') from None
    package = Package.from_str(blob.decode())
    eot = next(iter(package.encode('').ids), package.token_to_id(EOT) if eot is None else eot)
    if eot is None:
        raise UserError('this tokenizer.json needs its model: import that with tools.import_hf, '
                        'then give its folder, --tokenizer out/NAME')
    special = {i for i, token in package.get_added_tokens_decoder().items() if token.special}
    spec = json.loads(blob)
    is_byte_level = '"ByteLevel"' in json.dumps(spec['decoder'])
    byte = byte_letters()

    def raw(i):
        token = package.id_to_token(i) or ''
        if i in special:
            return b''
        if is_byte_level and all(letter in byte for letter in token):
            return bytes(byte[letter] for letter in token)
        if re.fullmatch('<0x[0-9A-F]{2}>', token):       # SentencePiece: a byte that is no letter
            return bytes([int(token[3:5], 16)])
        return token.replace('\u2581', ' ').encode()     # SentencePiece's space
    n_vocab = 1 + max(package.get_vocab().values())
    encode = lambda text: package.encode(text, add_special_tokens=False).ids
    whole = lambda text: [text] if text else []          # a space may be added in front of a part
    tokenizer = Tokenizer('hf', encode, [raw(i) for i in range(n_vocab)], eot, 'tokenizer.json',
                          blob, cut=whole)
    model = spec['model']
    tokenizer.unknown = model.get('unk_id', package.token_to_id(model.get('unk_token') or ''))
    return tokenizer


def byte_letters():
    """tokenizer.json writes bytes as letters: what prints as itself, the rest from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted({*range(256)} - {*prints})
    return {chr(b): b for b in prints} | {chr(256 + i): b for i, b in enumerate(others)}
