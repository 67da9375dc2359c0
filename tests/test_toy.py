"""The toy corpora: the same bytes everywhere, made when they are missing."""

import hashlib
import os

import prepare
from plumbing.tokenizer import load_meta, load_tokenizer
from plumbing.toy import TOYS

PINNED = {'toy_stories': 'b3d26387a782821f', 'toy_math': 'afee4c8257df1176',
          'toy_lingo': 'f139e314a00cf786', 'toy_blimp': 'fb8e16909503a603',
          'toy_glue': '1729a115d847c290'}


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
    monkeypatch.setattr(prepare, 'make_toy', lambda root, names: made.append(names))
    prepare.make_missing_toys(['my_book', 'toy_storys'], tmp_path)       # not ours
    assert made == []
    prepare.make_missing_toys(['my_book', 'toy_stories', 'toy_stories'], tmp_path)
    assert made == [['toy_stories']]
