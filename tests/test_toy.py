"""The toy corpora: the same bytes everywhere, right sums, pairs that need more than frequency."""

import hashlib
import json
import os
import re
from collections import Counter

import prepare
from conftest import documents
from plumbing.tokenizer import PATTERN, load_meta, load_tokenizer
from plumbing.toy import TOYS

PINNED = {'toy_stories': 'b3d26387a782821f', 'toy_math': 'afee4c8257df1176',
          'toy_lingo': 'f139e314a00cf786', 'toy_blimp': 'fb8e16909503a603'}


def test_toy_is_the_same_everywhere(data_dir):
    for name, expected in PINNED.items():
        digest = hashlib.sha256()
        folder = data_dir / name
        for path in sorted(folder.glob('*.bin')) + sorted(folder.glob('*.jsonl')):
            digest.update(path.read_bytes())
        assert digest.hexdigest()[:16] == expected, name


def test_toy_folders(data_dir, capsys):
    before = {path: path.stat().st_mtime_ns for path in data_dir.rglob('*')}
    prepare.main(['toy', '--out', str(data_dir)])
    assert 'holds all toy corpora already' in capsys.readouterr().out
    prepare.make_missing_toys(['toy_math', 'my_book'], data_dir)
    assert before == {path: path.stat().st_mtime_ns for path in data_dir.rglob('*')}
    assert sorted(os.listdir(data_dir)) == sorted(TOYS)
    splits = {name: load_meta(data_dir / name)['splits'] for name in ('toy_stories', 'toy_bytes')}
    for key in ('bytes', 'documents'):
        assert splits['toy_stories']['val'][key] == splits['toy_bytes']['val'][key]
    names = ['toy_stories', 'toy_math', 'toy_lingo']
    assert len({load_tokenizer(data_dir / name).hash for name in names}) == 1


def test_missing_toys_are_made(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(prepare, 'make_toy', made.append)
    prepare.make_missing_toys(['my_book', 'toy_storys'], tmp_path)       # not ours
    assert made == []
    prepare.make_missing_toys(['my_book', 'toy_stories'], tmp_path)
    assert made == [tmp_path]


def test_toy_words_are_tokens(data_dir):
    tokenizer = load_tokenizer(data_dir / 'toy_stories')
    counts = Counter()
    for text in documents(data_dir / 'toy_stories', 'train'):
        counts.update(PATTERN.findall(text))
    common = [word for word, n in counts.items() if n >= 100]
    assert len(common) > 250 and [word for word in common if len(tokenizer.encode(word)) > 1] == []


def test_toy_math_is_right(data_dir):
    kinds = Counter()
    for text in documents(data_dir / 'toy_math', 'train')[:3000]:
        question, solution = text.split('\n')
        assert question.endswith('?')
        steps = re.findall(r'(\d+) ([-+*]) (\d+) = (\d+)\.', solution)
        for a, sign, b, c in steps:
            results = {'+': int(a) + int(b), '-': int(a) - int(b), '*': int(a) * int(b)}
            assert results[sign] == int(c) >= 0
        assert solution.endswith(f'{steps[-1][3]}. The answer is {steps[-1][3]}.')
        kinds[re.sub(r'\d+|[A-Z][a-z]+', '', question)] += 1
    assert len(kinds) > 30


def test_toy_lingo_shares_no_word_with_english(data_dir):
    words = {}
    for name in ('toy_stories', 'toy_math', 'toy_lingo'):
        texts = documents(data_dir / name, 'train')
        words[name] = {word for text in texts for word in re.findall(r'[a-z]+', text.lower())}
    assert not words['toy_lingo'] & (words['toy_stories'] | words['toy_math'])
    assert len(words['toy_lingo']) > 150


def test_minimal_pairs(data_dir):
    stories = data_dir / 'toy_stories'
    tokenizer = load_tokenizer(stories)
    text = '\n'.join(documents(stories, 'train') + documents(stories, 'val'))
    seen = set(re.split(r'(?<=[.!?"])\s', text))
    unigram = Counter(text.split())
    files = sorted((data_dir / 'toy_blimp').glob('*.jsonl'))
    assert len(files) >= 8
    fields = {'sentence_good', 'sentence_bad', 'field', 'linguistics_term', 'UID', 'pairID',
              'simple_LM_method', 'one_prefix_method', 'two_prefix_method', 'lexically_identical'}

    def frequency(word):
        return unigram[word.strip('.')] + unigram[word.strip('.') + '.']
    for path in files:
        rows = [json.loads(line) for line in path.open()]
        goods = [row['sentence_good'] for row in rows]
        assert len(rows) == len(set(goods)) == 200 and not any(g in text for g in goods[::10])
        assert not seen & set(goods)
        right = 0
        for i, row in enumerate(rows):
            good, bad = row['sentence_good'], row['sentence_bad']
            assert row.keys() == fields and row['UID'] == path.stem and row['pairID'] == str(i)
            different = [(g, b) for g, b in zip(good.split(), bad.split()) if g != b]
            assert len(good.split()) == len(bad.split()) and len(different) == 1
            for start in ('', ' '):
                assert len(tokenizer.encode(start + good)) == len(tokenizer.encode(start + bad))
            (g, b), = different
            right += frequency(g) > frequency(b)
        assert 60 <= right <= 140, (path.stem, right)    # word frequency alone does not decide
