"""path_usage.py as a user runs it; the analysis itself is tested in test_papaformer.py."""

import json
import sys

import pytest

import path_usage
from errors import UserError


def test_table(run, smoke, data_dir, tmp_path):
    folder = smoke('config/papaformer_composed.py')
    done = run('path_usage.py', folder, '--data', data_dir / 'toy_stories', data_dir / 'toy_math', '--num=50', f'--json={tmp_path}/u.json')
    result = json.loads((tmp_path / 'u.json').read_text())
    rows = [result[str(data_dir / name)] for name in ('toy_stories', 'toy_math')]
    for path, row in enumerate(rows):
        assert row['prompts'] == 50 and abs(sum(row['share']) - 1) < 1e-6 and len(row['layers']) == 2
        assert row['right'] == row['share'][path]
    assert abs(result['accuracy'] - (rows[0]['right'] + rows[1]['right']) / 2) < 1e-6
    assert f"all: {100 * result['accuracy']:.1f}% right" in done.stdout
    lines = run('path_usage.py', folder).stdout.splitlines()
    assert len(lines) == 20 + 4 and lines[0].startswith("'Once upon a time, there was a little'") and ' -> ' in lines[0]


def test_mistakes(smoke, data_dir, monkeypatch):
    stories = data_dir / 'toy_stories'
    for folder, args, message in (
            (smoke('config/moep.py'), [], 'only a PaPaformer'), (smoke('config/llama.py'), [], 'parallel layers'),
            (smoke('config/papaformer.py'), ['--data', stories, stories, stories], '3 data sets for 2 paths'),
            (smoke('config/papaformer.py'), ['--length=64'], 'less than 64'),
            (smoke('config/papaformer.py'), ['--data', data_dir / 'nothing'], 'nothing')):
        monkeypatch.setattr(sys, 'argv', ['path_usage.py', str(folder), *map(str, args)])
        with pytest.raises(UserError, match=message):
            path_usage.main()
