"""Articles of a Wikimedia dump as plain text."""

import html
import re
from types import SimpleNamespace
from xml.etree import ElementTree

from plumbing.cli import UserError, read_blocks

# Each takes away what lies innermost, then what lies around it. None looks past the next opening of its
# own kind: else, for each of a million that never close, the text would be searched to its end.
INSIDE = r'(?:(?!\[\[|\]\]).)*+'
WIKITEXT = [(re.compile(pattern), new) for pattern, new in [
    (r'(?s)\n==\s*(?:References|Other websites|Related pages|Notes|Sources)\s*==.*|<!--.*?(?:-->|\Z)', ''),
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
    """Title and text of each article of a .xml.bz2, without templates, tables, notes and markup."""
    blocks = read_blocks(path, lambda file: file.read(2 ** 16))
    source = SimpleNamespace(read=lambda size: next(blocks, b''))
    try:
        for _, page in ElementTree.iterparse(source):
            if not page.tag.endswith('}page'):
                continue
            if page.findtext('{*}ns') == '0' and page.find('{*}redirect') is None:
                title = page.findtext('{*}title') or ''
                yield title + '\n' + clean(page.findtext('.//{*}text') or '')
            page.clear()
    except (ElementTree.ParseError, LookupError, ValueError) as error:   # encodings, &#1;
        raise UserError(f'{path}: broken or unreadable ({error}); get the file again') from None
