"""tools/bench.py: what it counts, by hand; that it takes train.py's steps; and as a user runs it. No times
are asserted."""

import json
import pickle

import pytest
import torch

import moduleformer
import train
from conftest import ROOT
from moep import MoEP, MoEPConfig
from plumbing.machine import Machine
from plumbing.settings import read_settings
from tools import bench, measure

TINY = ['--n_layer=2', '--n_embd=32', '--n_head=2', '--block_size=16', '--vocab_size=64', '--batch_size=2']
SECONDS = measure.seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One call is a measurement."""
    monkeypatch.setattr(measure, 'seconds', lambda work, machine, **_: (work(), 0.5)[1])


@pytest.fixture
def measured(run, tmp_path):
    """The tool in this process -> what it writes, with what it prints."""
    def measured(*args):
        done = run('tools.bench', *args, f'--json={tmp_path}/b.json', '--device=cpu', here=True)
        return dict(json.loads((tmp_path / 'b.json').read_text()), printed=done.stdout)
    return measured


def test_the_median_counts(monkeypatch):
    """Of calls that take 1, 9, 2, 8 and 3 seconds, after one that compiles and one that says how many calls
    a measurement needs. One that takes long is enough."""
    clock, lasts = [0.0], iter([50, 1, 1, 9, 2, 8, 3, 50, 6])
    monkeypatch.setattr(measure.time, 'perf_counter', lambda: clock[0])

    def work():
        clock[0] += next(lasts)
    assert [SECONDS(work, Machine('cpu'), at_least=0.5) for _ in range(2)] == [3, 6]


def test_training_rows_by_hand(measured):
    found = measured('config/gpt2.py', *TINY)
    row, = found['rows']
    V, T, D, L = 64, 16, 32, 2
    # the tied head multiplies, the table of positions adds
    matrices = V * D + T * D + L * (12 * D * D + 13 * D) + 2 * D
    assert row['total'] == matrices and row['rows'] == 2 and row['T'] == 16
    assert row['tokens_per_s'] == 2 * 16 / 0.5 and row['ms'] == 500 and row['gib'] is None
    assert row['flops_per_token'] == 6 * row['active'] + 6 * L * D * T
    n = 1024
    assert found['matrix_rate'] == 2 * n ** 3 / 0.5
    share = row['flops_per_token'] * row['tokens_per_s'] / found['matrix_rate']
    assert row['share'] == pytest.approx(share)
    assert 'gpt2' in found['printed']


def test_steps_are_training_steps():
    """The weights after a measurement are those of as many steps of train.py on the same tokens."""
    config = str(ROOT / 'config/gpt2.py')
    s, _, keys = read_settings([config, *TINY, '--gradient_accumulation_steps=2', '--dropout=0.0'])
    machine, models = Machine('cpu'), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(MoEP(MoEPConfig(**keys)))
    measured, mine = models
    torch.manual_seed(1)
    measure.training(measured, s, 16, machine)             # the fixture makes it two steps
    torch.manual_seed(1)
    data = measure.RandomTokens(64, 4, 16, 'cpu')
    optimizer = train.make_optimizer(mine, s, machine)
    for starts in (data.take(4), data.take(4)):
        for some in (starts[:2], starts[2:]):
            chunk = torch.stack([data.tokens[i:i + 17].long() for i in some])
            (mine.train()(chunk[:, :-1], chunk[:, 1:])[1] / 2).backward()
        torch.nn.utils.clip_grad_norm_(mine.parameters(), s.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(measured.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('total', [0.7e6, 28e6, 104e6])
def test_dense_of_equal_size(total):
    size = round((total / 90) ** 0.5) // 8 * 8
    with torch.device('meta'):
        model = moduleformer.ModuleFormer(moduleformer.ModuleFormerConfig(
            vocab_size=2048, n_layer=4, n_embd=size, d_att=size, d_ffd=size, n_ffd=8, n_att=4))
        dense = MoEP(bench.dense_like(model, 128))
    assert abs(dense.count_params()[0] / model.count_params()[0] - 1) < 0.05
    assert dense.config.n_parallel == 0


def test_sweeps_and_batch_sizes(measured):
    args = ['--vocab_size=64', '--block_size=16', '--batch_size', '1', '2']
    rows = measured('config/moep.py', *args, '--sweep=sparse=True,False', '--dense')['rows']
    dense = 'GPT-2 of that size'
    names = ['moep sparse=True', dense] * 2 + ['moep sparse=False', dense] * 2
    assert [row['name'].strip() for row in rows] == names
    assert [row['rows'] for row in rows] == [1, 1, 2, 2] * 2
    sweep = '--sweep=path_embd=[8,16],[24,24]'           # commas in brackets do not part values
    rows = measured('config/papaformer.py', *args[:-1], sweep)['rows']
    assert [row['name'] for row in rows] == ['papaformer path_embd=[8,16]', 'papaformer path_embd=[24,24]']


def test_auxiliary_losses_are_trained_at_every_batch_size(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr('sys.argv', ['bench', 'config/moep.py', '--batch_size', '1', '2', '--dense'])
    rows = bench.plan_rows(*bench.read_arguments())
    assert [bool(row.s.aux_weights) for row in rows] == [True, False] * 2


NANOGPT = """
import torch.nn as nn, torch.nn.functional as F, torch, dataclasses
@dataclasses.dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool
class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(config.vocab_size, config.n_embd),
                                              wpe=nn.Embedding(config.block_size, config.n_embd)))
        print('number of parameters')
    def configure_optimizers(self, decay, rate, betas, device):
        self.optimizer = torch.optim.AdamW(self.parameters(), rate, betas, weight_decay=decay)
        return self.optimizer
    def forward(self, x, y):
        logits = self.transformer.wte(x) @ self.transformer.wte.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())
"""                                                      # what bench needs of nanoGPT's model.py


def test_nanogpt(measured, tmp_path):
    """Beside a GPT-2 of ours, and the one of --dense, a nanoGPT of the same sizes; not beside a MoEP."""
    (tmp_path / 'model.py').write_text(NANOGPT)
    args = ['--vocab_size=64', '--block_size=16', '--batch_size=2', f'--nanogpt={tmp_path}']
    found = measured('config/gpt2.py', 'config/moep.py', *args)
    assert [row['name'].strip() for row in found['rows']] == ['gpt2', 'nanoGPT', 'moep']
    ours, theirs, _ = found['rows']
    width = 2 * (ours['total'] - ours['active']) // 32   # of the table of positions, 16 x width
    assert theirs['total'] - theirs['active'] == ours['total'] - ours['active']
    assert theirs['total'] == (64 + 16) * width and theirs['rows'] == 2
    assert 'number of parameters' not in found['printed']


@pytest.mark.parametrize('name', ['papaformer', 'moduleformer', 'selfmoe', 'stlm'])
def test_every_model(measured, name):
    args = ['--vocab_size=64', '--block_size=16', '--batch_size=1']
    row, = measured(f'config/{name}.py', *args)['rows']
    assert row['flops_per_token'] > 6 * row['active']


def test_generation_and_prefill(measured):
    found = measured('config/moduleformer.py', '--generate=6', '--vocab_size=64')
    row, = found['rows']
    assert row['T'] == 7 and row['no_cache'] == row['tokens_per_s'] == 12 and 'no cache' in found['printed']
    args = ['--prefill', '--seq_len=20', '--batch_size=3', '--dense', '--vocab_size=64']
    rows = measured('config/moduleformer.py', *args)['rows']
    assert [row['tokens_per_s'] for row in rows] == [120, 120]
    larger, _ = measured('config/moduleformer.py', *args[:-1], '--vocab_size=128')['rows']
    assert larger['flops_per_token'] == rows[0]['flops_per_token']       # the head reads one token of 20


@pytest.mark.parametrize('args, message', [
    (['config/moep.py', '--n_blok=3'], 'n_block'),
    (['config/stlm_bytes.py'], 'chunks of bytes'),
    (['config/moduleformer_lifelong.py'], 'starts from another run'),
    (['config/moep.py', '--json=/none/b.json'], 'be written'),
    (['config/moep.py', '--sweep=n_block'], 'n_block=2,4,8'),
    (['config/moep.py', '--batch_size=0'], '--batch_size: 0'),
    (['config/moep.py', '--generate=0'], '--generate: 0'),
    (['config/gpt2.py', '--nanogpt=config'], 'the folder of a checkout'),
    (['config/nothing.py'], 'nothing.py'),
    (['config/moep.py', '--sweep=n_block=1', '--vocab_size=64'], 'top_k')])
def test_mistakes(run, args, message):
    text = run('tools.bench', *args, '--device=cpu', code=2).stderr
    assert message in text and text.count('\n') == 1


@pytest.mark.slow
def test_as_a_user(benched):
    lines = benched.result().stdout.splitlines()
    assert len(lines) == 3 and 'TFLOP/s in a large matrix product' in lines[0]
    assert lines[2].startswith('gpt2 ') and lines[2].endswith('%')


def test_rows_compile_in_other_processes(monkeypatch):
    """A row can be sent to another process, and its first step there is that of the measurement."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr('sys.argv', ['bench', 'config/moep.py', 'config/gpt2.py', '--batch_size', '1', '2'])
    args, extra = bench.read_arguments()
    rows = list(bench.plan_rows(args, [*extra, '--block_size=16', '--device=cpu']))
    assert [(row.name, row.s.batch_size) for row in rows] == [
        ('moep', 1), ('moep', 2), ('gpt2', 1), ('gpt2', 2)]
    steps = []
    monkeypatch.setattr(bench, 'make_step', lambda model, s, T, machine: lambda: steps.append((s, T)))
    for row in pickle.loads(pickle.dumps(rows)):
        bench.first_step(row, args)
    assert steps == [(row.s, 16) for row in rows]
