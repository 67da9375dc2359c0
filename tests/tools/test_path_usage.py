"""tools/path_usage.py as a user runs it; the analysis itself is tested in test_papaformer.py."""

import json

import pytest
import torch

import papaformer
from plumbing.tokenizer import load_tokenizer
from tools import path_usage


@pytest.mark.slow
def test_table(run, smoke, data_dir, tmp_path):
    folder = smoke('config/papaformer_composed.py')
    sets = [data_dir / 'toy_stories', data_dir / 'toy_math']
    done = run('tools.path_usage', folder, '--data', *sets, '--num=50', f'--json={tmp_path}/u.json')
    result = json.loads((tmp_path / 'u.json').read_text())
    rows = [result[str(data)] for data in sets]
    for path, row in enumerate(rows):
        assert row['prompts'] == 50 and abs(sum(row['share']) - 1) < 1e-6 and len(row['layers']) == 2
        assert row['right'] == row['share'][path]
    assert abs(result['accuracy'] - (rows[0]['right'] + rows[1]['right']) / 2) < 1e-6
    assert f"all: {100 * result['accuracy']:.1f}% right" in done.stdout
    lines = run('tools.path_usage', folder, here=True).stdout.splitlines()
    assert len(lines) == 20 + 4
    assert lines[0].startswith("'Once upon a time, there was a little'") and ' -> ' in lines[0]


def test_prompts_and_layers(run, data_dir, tmp_path, monkeypatch):
    """Every prompt begins with end-of-text, as documents do in training; shares are told layer by layer."""
    folder = tmp_path / 'run'
    run('train.py', 'config/papaformer.py', f'--data_dir={data_dir}', f'--out_dir={folder}', '--max_iters=1',
        '--batch_size=1', '--eval_tokens=64', '--sample_tokens=2', here=True)
    seen = []

    def usage(model, idx):
        seen.append(idx)
        return torch.tensor([[0, 1]] * len(idx))
    monkeypatch.setattr(papaformer, 'path_usage', usage)
    stories = data_dir / 'toy_stories'
    eot = load_tokenizer(stories).eot
    args = ['--data', stories, data_dir / 'toy_math', '--num=5', '--length=7', f'--json={tmp_path}/u.json']
    run('tools.path_usage', folder, *args, here=True)
    assert seen[0].shape == (5, 8) and (seen[0][:, 0] == eot).all() and (seen[0][:, 1:] != eot).all()
    row = json.loads((tmp_path / 'u.json').read_text())[str(stories)]
    assert row['layers'] == [[1.0, 0.0], [0.0, 1.0]]
    run('tools.path_usage', folder, here=True)
    assert len(seen) == 22 and all(idx[0, 0] == eot for idx in seen[2:])
    args[2] = stories                                    # both paths were trained on the same text
    run('tools.path_usage', folder, *args, here=True)
    result = json.loads((tmp_path / 'u.json').read_text())
    assert [*result] == [str(stories), f'{stories}, path 1', 'accuracy']


def test_prompts_have_their_own_length(run, data_dir, tmp_path, monkeypatch):
    run('train.py', 'config/papaformer.py', '--block_size=16', '--max_iters=1', '--batch_size=1',
        '--eval_tokens=64', '--sample_tokens=0', f'--data_dir={data_dir}', f'--out_dir={tmp_path}', here=True)
    monkeypatch.setattr(papaformer, 'path_usage', lambda model, idx: torch.tensor([[0, 1]]))
    run('tools.path_usage', tmp_path, here=True)         # --length, 16 by default, is that of --data


@pytest.mark.slow
@pytest.mark.parametrize('config, args, message', [
    ('moep', [], 'only a PaPaformer'),
    ('llama', [], 'parallel layers'),
    ('papaformer', ['--data', *['{data_dir}/toy_stories'] * 3], 'a data set for each of 2 paths, not 3'),
    ('papaformer', ['--data', '{data_dir}/toy_math'], 'a data set for each of 2 paths, not 1'),
    ('papaformer', ['--length=64', '--data', *['{data_dir}/toy_math'] * 2], 'less than 64'),
    ('papaformer', ['--data', '{data_dir}/toy_math', '{data_dir}/nothing'], 'nothing')])
def test_mistakes(run, smoke, data_dir, config, args, message):
    args = [arg.format(data_dir=data_dir) for arg in args]
    text = run('tools.path_usage', smoke(f'config/{config}.py'), *args, code=2).stderr
    assert message in text and text.count('\n') == 1


# gumbel1 gumbel2 share, prompt after prompt
TABLE_6 = """221 223 21   222 222 11   221 112 11   222 223 11   221 222 21   211 211 12   212 222 21
             212 212 11   111 122 21   211 212 12   112 122 21   111 221 11   111 212 11   112 222 22
             122 221 12   112 223 21   122 222 11   132 311 11   211 221 11   222 222 21""".split()


def test_path_accuracy_of_table_6():
    """The printed routes: ten stories (path 1), then ten of math (path 2). The mix, 3, is never right."""
    assert len(TABLE_6) == 60
    own = torch.tensor([0] * 10 + [1] * 10)
    for column, want, shares in ((0, 24 / 60, (0.48, 0.50, 0.02)), (1, 28 / 60, (0.23, 0.70, 0.07)),
                                 (2, 20 / 40, (0.7, 0.3))):
        choices = torch.tensor([[int(c) - 1 for c in way] for way in TABLE_6[column::3]])
        assert choices.shape == (20, 2 if column == 2 else 3)
        assert abs(path_usage.path_accuracy(choices, own) - want) < 1e-6
        for path, share in enumerate(shares):            # the table's bottom rows, rounded to a percent
            assert abs((choices == path).double().mean() - share) < 0.006
    assert path_usage.path_accuracy(torch.full((2, 3), 2), torch.tensor([0, 1])) == 0
