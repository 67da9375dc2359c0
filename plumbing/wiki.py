"""Articles of a Wikimedia dump as plain text."""

import html
import re
from xml.etree import ElementTree

from plumbing.cli import open_packed, reading

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
