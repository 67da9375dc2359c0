"""Articles of a Wikimedia dump as plain text."""

import bz2
import html
import re
from xml.etree import ElementTree

# Each is applied until nothing is left, since markup nests.
WIKITEXT = [(re.compile(pattern), new) for pattern, new in [
    (r'(?s)\n==\s*(?:References|Other websites|Related pages|Notes|Sources)\s*==.*|<!--.*?-->', ''),
    (r'(?s)<ref[^>]*/>|<(ref|gallery|math|timeline)\b.*?</\1>', ''),
    (r'\{\{[^{}]*\}\}|(?s:\{\|(?:(?!\{\|).)*?\|\})', ''),
    (r'\[\[\w+:(?:[^\[\]]|\[\[[^\]]*\]\])*\]\]', ''),
    (r'\[\[(?:[^|\]]*\|)?([^\]]*)\]\]|\[\w+://\S+ ?([^\]]*)\]', r'\1\2'),
    (r"(?m)'{2,}|<[^>]*>|__[A-Z]+__|^[*#:;= ]+|[ =]+$", ''),
    (r'\n\s+|\s+\n', '\n')]]


def read_wiki(path):
    """Title and text of each article of a .xml.bz2, without templates, tables, notes and markup."""
    for _, page in ElementTree.iterparse(bz2.open(path)):
        if not page.tag.endswith('}page'):
            continue
        if page.findtext('{*}ns') == '0' and page.find('{*}redirect') is None:
            text = page.findtext('.//{*}text') or ''
            for pattern, new in WIKITEXT:
                count = 1
                while count:
                    text, count = pattern.subn(new, text)
            yield page.findtext('{*}title') + '\n' + html.unescape(text).strip()
        page.clear()
