"""tools/bench.py: what it counts, by hand. No times."""

import json

import pytest

from tools import bench

TINY = ['--n_layer=2', '--n_embd=32', '--n_head=2', '--block_size=16', '--vocab_size=64',
        '--batch_size=2']
SMALL = ['--vocab_size=64', '--block_size=16', '--batch_size=1']


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One call is a measurement."""
    monkeypatch.setattr(bench, 'seconds', lambda work, machine, **_: (work(), 0.5)[1])


@pytest.fixture
def measured(run, tmp_path):
    """The tool in this process -> what it writes, with what it prints."""
    def measured(*args):
        done = run('tools.bench', *args, f'--json={tmp_path}/b.json', '--device=cpu', here=True)
        return dict(json.loads((tmp_path / 'b.json').read_text()), printed=done.stdout)
    return measured


def test_training_rows_by_hand(measured):
    result = measured('config/gpt2.py', *TINY)
    row, = result['rows']
    V, T, D, L = 64, 16, 32, 2
    # the tied head multiplies, the table of positions adds
    assert row['total'] == V * D + T * D + L * (12 * D * D + 13 * D) + 2 * D
    assert row['rows'] == 2 and row['T'] == 16
    assert row['tokens_per_s'] == 2 * 16 / 0.5 and row['ms'] == 500 and row['gib'] is None
    assert row['flops_per_token'] == 6 * row['active'] + 6 * L * D * T
    share = row['flops_per_token'] * row['tokens_per_s'] / result['matrix_rate']
    assert row['share'] == pytest.approx(share)
    lines = result['printed'].splitlines()
    assert len(lines) == 3 and 'TFLOP/s in a large matrix product' in lines[0]
    assert lines[2].startswith('gpt2 ') and lines[2].endswith('%')


def test_sweeps_and_batch_sizes(measured):
    args = [*SMALL[:2], '--batch_size', '1', '2', '--sweep=sparse=True,False']
    rows = measured('config/moep.py', *args)['rows']
    assert [row['name'] for row in rows] == ['moep sparse=True'] * 2 + ['moep sparse=False'] * 2
    assert [row['rows'] for row in rows] == [1, 2] * 2
    sweep = '--sweep=path_embd=[8,16],[24,24]'           # commas in brackets do not part values
    rows = measured('config/papaformer.py', *SMALL, sweep)['rows']
    names = ['papaformer path_embd=[8,16]', 'papaformer path_embd=[24,24]']
    assert [row['name'] for row in rows] == names


def test_generation(measured):
    result = measured('config/moduleformer.py', '--generate=6', '--vocab_size=64')
    row, = result['rows']
    assert row['T'] == 7 and row['tokens_per_s'] == 12
