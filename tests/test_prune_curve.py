"""prune_curve.py: a row is what pruning and scoring by hand give; and as a user runs it."""

import json
import sys

import pytest
import torch

import prepare
import prune_curve
from errors import UserError
from loader import as_tensor, val_batches
from machine import Machine
from moduleformer import count_usage, prune_experts
from train import load_checkpoint


def test_rows_by_hand(smoke, data_dir):
    model, _ = load_checkpoint(smoke('config/moduleformer_math.py'))
    tokens = as_tensor(prepare.load_bin(data_dir / 'toy_math', 'val')[:2000], 'cpu')
    lengths = torch.ones(model.config.vocab_size, dtype=torch.long)
    rows = prune_curve.curve(model, tokens, lengths, [0.0, 0.9], 'max', 4, Machine('cpu'))
    usage = count_usage(model, val_batches(tokens[:1000], 128, 4, -1))        # counted on one half, scored on the other
    for row, small in zip(rows, (model, prune_experts(model, usage, 0.9)[0])):
        x, y = (torch.cat(parts) for parts in zip(*val_batches(tokens[1000:], 128, 4, -1)))
        with torch.no_grad():
            assert abs(row['loss'] - small(x, y)[1].item()) < 1e-5
        total = sum(p.numel() for p in small.parameters())
        assert row['parameters'] == total and row['left'] == total / sum(p.numel() for p in model.parameters())
        pools = [len(m.weight) for name, m in small.named_modules() if name.endswith('.A')]
        assert row['modules'] == sum(pools) / (3 * (4 + 8))
    assert rows[0]['left'] == 1 and rows[1]['left'] < 1


def test_adapters_are_told(run, smoke, data_dir, tmp_path, monkeypatch):
    run('train.py', '--model=moduleformer', '--data=toy_math', f'--data_dir={data_dir}', f"--init_from={smoke('config/moduleformer_math.py')}",
        '--surgery=lora.add_lora', '--max_iters=0', f'--out_dir={tmp_path}/adapted')
    monkeypatch.setattr(sys, 'argv', ['prune_curve.py', f'{tmp_path}/adapted'])
    with pytest.raises(UserError, match='merge them first'):
        prune_curve.main()


def test_as_a_user(run, smoke, data_dir, tmp_path, monkeypatch):
    folder = smoke('config/moduleformer_math.py')
    done = run('prune_curve.py', folder, '--thresholds', '0', '0.2', '1', '--normalise=sum', f'--json={tmp_path}/c.json')
    rows = json.loads((tmp_path / 'c.json').read_text())['rows']
    assert rows[2]['modules'] == 4 / 12                  # two of four, two of eight
    model, _ = load_checkpoint(folder)
    tokens = as_tensor(prepare.load_bin(data_dir / 'toy_math', 'val'), 'cpu')
    usage = count_usage(model, val_batches(tokens[:len(tokens) // 2], 128, 16, -1))
    by_sum, by_max = (prune_experts(model, usage, 0.2, how)[1].left for how in ('sum', 'max'))
    assert rows[1]['left'] == by_sum != by_max
    assert len(done.stdout.splitlines()) == 5 and '100.0%' in done.stdout and '33.3%' in done.stdout
    for args, message in (([smoke('config/moep.py')], 'only a ModuleFormer'), ([folder, '--data=nothing'], 'nothing'),
                          ([folder, '--batch_size=0'], 'at least 1'), ([folder, '--json=/none/c.json'], 'be written'),
                          ([folder, f'--data={data_dir}/toy_bytes'], 'another tokenizer')):
        monkeypatch.setattr(sys, 'argv', ['prune_curve.py', *map(str, args)])
        with pytest.raises(UserError, match=message):
            prune_curve.main()
