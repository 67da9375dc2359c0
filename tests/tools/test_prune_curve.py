"""tools/prune_curve.py: a row is what pruning and scoring by hand give; and as a user runs it."""

import json

import pytest
import torch

import moduleformer
from moduleformer import count_usage, prune_experts
from plumbing.checkpoint import load_checkpoint
from plumbing.data import as_tensor, load_bin, val_batches
from plumbing.machine import Machine
from plumbing.tokenizer import load_tokenizer
from tools import prune_curve


@pytest.fixture(scope='module')
def folder(run, data_dir, tmp_path_factory):
    """A ModuleFormer after one step on the toy math."""
    return train(run, 'toy_math', data_dir, tmp_path_factory.mktemp('prune') / 'run')


def train(run, data, data_dir, out):
    run('train.py', 'config/moduleformer.py', f'--data={data}', f'--data_dir={data_dir}', '--max_iters=1',
        '--batch_size=1', '--eval_tokens=64', '--sample_tokens=2', f'--out_dir={out}', here=True)
    return out


def test_rows_by_hand(folder, data_dir):
    model, _ = load_checkpoint(folder)
    tokens = as_tensor(load_bin(data_dir / 'toy_math', 'val')[:2000], 'cpu')
    lengths = torch.ones(model.config.vocab_size, dtype=torch.long)
    rows = prune_curve.curve(moduleformer, model, tokens, lengths, [0.0, 0.9], 'max', 4, Machine('cpu'))
    # counted on one half, scored on the other
    usage = count_usage(model, val_batches(tokens[:1000], 128, 4, -1))
    whole = sum(p.numel() for p in model.parameters())
    for row, small in zip(rows, (model, prune_experts(model, usage, 0.9)[0]), strict=True):
        x, y = (torch.cat(parts) for parts in zip(*val_batches(tokens[1000:], 128, 4, -1)))
        with torch.no_grad():
            assert abs(row['loss'] - small(x, y)[1].item()) < 1e-5
        total = sum(p.numel() for p in small.parameters())
        assert row['parameters'] == total and row['left'] == total / whole
        pools = [len(m.weight) for name, m in small.named_modules() if name.endswith('.A')]
        assert row['modules'] == sum(pools) / (3 * (4 + 8))
    assert rows[0]['left'] == 1 and rows[1]['left'] < 1


def test_pauses_are_not_scored(run, data_dir, tmp_path):
    out = train(run, 'toy_pauses', data_dir, tmp_path / 'run')
    run('tools.prune_curve', out, '--thresholds', 0, f'--json={tmp_path}/c.json', here=True)
    row, = json.loads((tmp_path / 'c.json').read_text())['rows']
    model, _ = load_checkpoint(out)
    tokens = as_tensor(load_bin(data_dir / 'toy_pauses', 'val'), 'cpu')
    pad = load_tokenizer(out).pad
    x, y = (torch.cat(parts) for parts in zip(*val_batches(tokens[len(tokens) // 2:], 128, 16, pad)))
    with torch.no_grad():
        assert abs(row['loss'] - model(x, y)[1].item()) < 1e-4


def test_adapters_are_told(run, folder, data_dir, tmp_path):
    run('train.py', '--model=moduleformer', '--data=toy_math', f'--data_dir={data_dir}',
        f'--init_from={folder}', '--surgery=lora.add_lora', '--max_iters=0', f'--out_dir={tmp_path}/adapted',
        here=True)
    text = run('tools.prune_curve', tmp_path / 'adapted', code=2).stderr
    assert 'merge them first' in text and text.count('\n') == 1


@pytest.mark.slow
def test_as_a_user(run, smoke, data_dir, tmp_path):
    folder = smoke('config/moduleformer_math.py')
    args = ['--thresholds', '0', '0.2', '1', '--normalise=sum', f'--json={tmp_path}/c.json']
    done = run('tools.prune_curve', folder, *args)
    rows = json.loads((tmp_path / 'c.json').read_text())['rows']
    assert rows[2]['modules'] == 4 / 12                  # two of four, two of eight
    model, _ = load_checkpoint(folder)
    tokens = as_tensor(load_bin(data_dir / 'toy_math', 'val'), 'cpu')
    usage = count_usage(model, val_batches(tokens[:len(tokens) // 2], 128, 16, -1))
    by_sum, by_max = (prune_experts(model, usage, 0.2, how)[1].left for how in ('sum', 'max'))
    assert rows[1]['left'] == by_sum != by_max
    assert len(done.stdout.splitlines()) == 5 and '100.0%' in done.stdout and '33.3%' in done.stdout


@pytest.mark.parametrize('args, message', [
    (['--data=nothing'], 'nothing'),
    (['--batch_size=0'], 'not between 1'),
    (['--json=/none/c.json'], 'be written'),
    (['--data={data_dir}/toy_bytes'], 'another tokenizer')])
def test_mistakes(run, folder, data_dir, args, message):
    args = [arg.format(data_dir=data_dir) for arg in args]
    text = run('tools.prune_curve', folder, *args, code=2).stderr
    assert message in text and text.count('\n') == 1


@pytest.mark.slow
def test_another_model(run, smoke):
    text = run('tools.prune_curve', smoke('config/moep.py'), code=2).stderr
    assert 'only a ModuleFormer' in text and text.count('\n') == 1
