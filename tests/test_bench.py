"""bench.py: what it counts, by hand; that it takes train.py's steps; and as a user runs it. No times are asserted."""

import json
import sys

import pytest
import torch

import bench
import moduleformer
import settings
import train
from errors import UserError
from machine import Machine
from moep import MoEP, MoEPConfig

TINY = ['--n_layer=2', '--n_embd=32', '--n_head=2', '--block_size=16', '--vocab_size=64', '--batch_size=2']
SECONDS = bench.seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One call is a measurement."""
    monkeypatch.setattr(bench, 'seconds', lambda work, machine, **_: (work(), 0.5)[1])


def bench_json(monkeypatch, tmp_path, *args):
    monkeypatch.setattr(sys, 'argv', ['bench.py', *map(str, args), f'--json={tmp_path}/b.json', '--device=cpu'])
    bench.main()
    return json.loads((tmp_path / 'b.json').read_text())


def test_the_median_counts(monkeypatch):
    """Of calls that take 1, 9, 2, 8 and 3 seconds, after one that compiles."""
    clock, lasts = [0.0], iter([50, 1, 9, 2, 8, 3])
    monkeypatch.setattr(bench.time, 'perf_counter', lambda: clock[0])

    def work():
        clock[0] += next(lasts)
    assert SECONDS(work, Machine('cpu'), at_least=0.5) == 3


def test_training_rows_by_hand(monkeypatch, tmp_path, capsys):
    found = bench_json(monkeypatch, tmp_path, 'config/gpt2.py', *TINY)
    row, = found['rows']
    V, T, D, L = 64, 16, 32, 2
    matrices = V * D + T * D + L * (12 * D * D + 13 * D) + 2 * D        # the tied head multiplies, the table of positions adds
    assert row['total'] == matrices and row['rows'] == 2 and row['T'] == 16
    assert row['tokens_per_s'] == 2 * 16 / 0.5 and row['ms'] == 500 and row['gib'] is None
    assert row['flops_per_token'] == 6 * row['active'] + 6 * L * D * T
    n = 1024
    assert found['matrix_rate'] == 2 * n ** 3 / 0.5
    assert row['share'] == pytest.approx(row['flops_per_token'] * row['tokens_per_s'] / found['matrix_rate'])
    assert 'gpt2' in capsys.readouterr().out


def test_steps_are_training_steps(monkeypatch):
    """The weights after a measurement are those of as many steps of train.py on the same tokens."""
    s, module, keys = settings.read_settings(['config/gpt2.py', *TINY, '--gradient_accumulation_steps=2', '--dropout=0.0'])
    machine, models, losses = Machine('cpu'), [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(MoEP(MoEPConfig(**keys)))
    torch.manual_seed(1)
    bench.training(models[0], s, 16, machine)            # the fixture makes it two steps
    torch.manual_seed(1)
    data = bench.RandomTokens(64, 4, 16, 'cpu')
    optimizer = train.make_optimizer(models[1], s, machine)
    for starts in (data.take(4), data.take(4)):
        for a in (0, 1):
            chunk = torch.stack([data.tokens[i:i + 17].long() for i in starts[2 * a:2 * a + 2]])
            (models[1].train()(chunk[:, :-1], chunk[:, 1:])[1] / 2).backward()
        torch.nn.utils.clip_grad_norm_(models[1].parameters(), s.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(*(m.parameters() for m in models)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('total', [0.7e6, 28e6, 104e6])
def test_dense_of_equal_size(total):
    with torch.device('meta'):
        size = round((total / 90) ** 0.5) // 8 * 8
        model = moduleformer.ModuleFormer(moduleformer.ModuleFormerConfig(
            vocab_size=2048, n_layer=4, n_embd=size, d_att=size, d_ffd=size, n_ffd=8, n_att=4))
        dense = MoEP(bench.dense_like(model, 128))
    assert abs(dense.count_params()[0] / model.count_params()[0] - 1) < 0.05 and dense.config.n_parallel == 0


def test_every_config_sweeps_and_variants(monkeypatch, tmp_path, capsys):
    small = ['--vocab_size=64', '--block_size=16', '--batch_size', '1', '2']
    rows = bench_json(monkeypatch, tmp_path, 'config/moep.py', *small, '--sweep=sparse=True,False', '--dense')['rows']
    assert [r['name'].strip() for r in rows] == [n for v in ('True', 'False') for n in (f'moep sparse={v}', 'GPT-2 of that size') * 2]
    assert [r['rows'] for r in rows] == [1, 1, 2, 2] * 2
    for name in ('papaformer', 'moduleformer', 'selfmoe', 'stlm'):
        row, = bench_json(monkeypatch, tmp_path, f'config/{name}.py', '--vocab_size=64', '--block_size=16', '--batch_size=1')['rows']
        assert row['flops_per_token'] > 6 * row['active']
    row, = bench_json(monkeypatch, tmp_path, 'config/moduleformer.py', '--generate=6', '--vocab_size=64')['rows']
    assert row['T'] == 7 and row['no_cache'] == row['tokens_per_s'] == 12 and 'no cache' in capsys.readouterr().out
    rows = bench_json(monkeypatch, tmp_path, 'config/moduleformer.py', '--prefill', '--seq_len=20', '--batch_size=3', '--dense',
                      '--vocab_size=64')['rows']
    assert [r['tokens_per_s'] for r in rows] == [120, 120]


def test_mistakes(monkeypatch):
    for args, message in ((['config/moep.py', '--n_blok=3'], 'n_block'), (['config/stlm_bytes.py'], 'chunks of bytes'),
                          (['config/moduleformer_lifelong.py'], 'starts from another run'), (['config/moep.py', '--json=/none/b.json'], 'be written'),
                          (['config/moep.py', '--sweep=n_block'], 'n_block=2,4,8'), (['config/moep.py', '--batch_size=0'], 'at least 1'),
                          (['config/nothing.py'], 'nothing.py'), (['config/moep.py', '--sweep=n_block=1', '--vocab_size=64'], 'top_k')):
        monkeypatch.setattr(sys, 'argv', ['bench.py', *args, '--device=cpu'])
        with pytest.raises(UserError, match=message):
            bench.main()


def test_as_a_user(run):
    lines = run('bench.py', 'config/gpt2.py', *TINY).stdout.splitlines()
    assert len(lines) == 3 and 'TFLOP/s in a large matrix product' in lines[0] and lines[2].startswith('gpt2 ') and lines[2].endswith('%')
