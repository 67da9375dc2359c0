"""Readers of text: lines, rows of JSON, articles of a Wikimedia dump."""

import html
import importlib
import json
import re
from pathlib import Path
from xml.etree import ElementTree

from plumbing.cli import UserError, reading


def open_packed(path):
    """A plain, .gz, .xz or .bz2 file, to be read as bytes."""
    kind = {'.gz': 'gzip', '.xz': 'lzma', '.bz2': 'bz2'}.get(Path(path).suffix.lower(), 'builtins')
    return importlib.import_module(kind).open(path, 'rb')        # a Python may lack lzma and bz2


def read_lines(path):
    """(number, text) of each line of a plain, .gz, .xz or .bz2 file. A line ends at \\n only."""
    with reading(path), open_packed(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode('utf-8-sig' if number == 1 else 'utf-8')
            except UnicodeDecodeError:
                raise UserError(f'{path}: line {number} is not UTF-8; convert the file first')
            yield number, text.replace('\r\n', '\n')


def read_rows(path, names, hint=''):
    """(line number, row) of each row of a .jsonl file. These fields of it must hold text."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f'{path}:{number}: not a row of JSON ({error})')
        fields = row if isinstance(row, dict) else {}
        for name in names:
            if not isinstance(fields.get(name), str):
                has = ', '.join(fields) or 'no fields'
                raise UserError(f"{path}:{number}: no text in '{name}' (the row has: {has}){hint}")
        yield number, row


# ---- Articles of a Wikimedia dump as plain text -------------------------------------------------

# Each pattern removes what lies innermost; applied again, what lies around it. None looks past the
# next opening of its own kind: a text with many that never close would take quadratic time.
INSIDE = r'(?:(?!\[\[|\]\]).)*+'
WIKITEXT = [(re.compile(pattern), new) for pattern, new in [
    (r'(?s)<!--.*?(?:-->|\Z)', ''),
    (r'(?s)\n==\s*(?:References|Other websites|Related pages|Notes|Sources)\s*==.*', ''),
    (r'(?s)<ref[^<>]*/>|<(ref|gallery|math|timeline)\b(?:(?!<\1\b|</\1>).)*+</\1>', ''),
    (r'(?s)\{\{[^{}]*\}\}|\{\|(?:(?!\{\||\|\}).)*+\|\}', ''),
    (rf'(?s)\[\[(?:\w+:{INSIDE}|(?:[^|\[\]]*\|)?({INSIDE}))\]\]', r'\1'),
    (r'\[\w+://[^\s\[\]]++ ?+((?:[^\[\]]|\[[^\[\]]*\])*+)\]', r'\1'),
    (r"(?m)'{2,}|<[^<>]*>|__[A-Z]+__|^[*#:;= ]+|(?<![ =])[ =]+$", '')]]


def clean(text):
    for pattern, new in WIKITEXT:
        for _ in range(20):                              # real articles nest 8 deep
            text, count = pattern.subn(new, text)
            if not count:
                break
    lines = map(str.strip, text.split('\n'))
    return html.unescape('\n'.join(filter(None, lines))).strip()


def read_wiki(path):
    """Title and text of each article of a dump, without templates, tables, notes and markup."""
    with reading(path), open_packed(path) as file:
        for _, page in ElementTree.iterparse(file):
            if not page.tag.endswith('}page'):
                continue
            if page.findtext('{*}ns') == '0' and page.find('{*}redirect') is None:
                title = page.findtext('{*}title') or ''
                yield title + '\n' + clean(page.findtext('.//{*}text') or '')
            page.clear()
