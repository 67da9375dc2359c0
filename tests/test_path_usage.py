"""path_usage.py as a user runs it; the analysis itself is tested in test_papaformer.py."""

import json
import sys

import pytest
import torch

import path_usage
import prepare
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


def test_prompts_and_layers(smoke, data_dir, tmp_path, monkeypatch):
    """Every prompt begins with end-of-text, as documents do in training; shares are told layer by layer."""
    seen, folder = [], smoke('config/papaformer_composed.py')
    monkeypatch.setattr(path_usage, 'path_usage', lambda model, idx: seen.append(idx) or torch.tensor([[0, 1]] * len(idx)))
    stories, eot = data_dir / 'toy_stories', prepare.load_tokenizer(data_dir / 'toy_stories').eot
    monkeypatch.setattr(sys, 'argv', ['path_usage.py', str(folder), '--data', str(stories), '--num=5', '--length=7', f'--json={tmp_path}/u.json'])
    path_usage.main()
    assert seen[0].shape == (5, 8) and (seen[0][:, 0] == eot).all() and (seen[0][:, 1:] != eot).all()
    assert json.loads((tmp_path / 'u.json').read_text())[str(stories)]['layers'] == [[1.0, 0.0], [0.0, 1.0]]
    monkeypatch.setattr(sys, 'argv', ['path_usage.py', str(folder)])
    path_usage.main()
    assert len(seen) == 21 and all(idx[0, 0] == eot for idx in seen[1:])


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
