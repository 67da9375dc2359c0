"""tools/eval_length.py: the loss at each position by hand, and as a user runs it."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

import moduleformer
from conftest import ROOT
from plumbing.cli import UserError
from plumbing.data import as_tensor, load_bin, tokens_at
from plumbing.machine import Machine
from plumbing.models import make_config
from plumbing.settings import read_settings
from plumbing.tokenizer import load_tokenizer
from tools import eval_length


def test_loss_by_position_one_window_at_a_time(data_dir):
    torch.manual_seed(0)
    _, module, keys = read_settings([str(ROOT / 'config/moduleformer.py')])
    vocab_size = load_tokenizer(data_dir / 'toy_stories').n_vocab
    model = module.Model(make_config(module, dict(keys, vocab_size=vocab_size))).eval()
    with torch.no_grad():                                # far from uniform, so that an error would show
        for p in model.parameters():
            p.mul_(3 if p.dim() > 1 else 1)
    tokens = as_tensor(load_bin(data_dir / 'toy_stories', 'val')[:700], 'cpu')
    found = eval_length.loss_by_position(model, tokens, 200, 90, 4, Machine('cpu'))
    windows = [tokens_at(tokens, torch.arange(start, start + 201)) for start in range(0, 500, 90)]
    assert len(windows) == 6 and found.std() > 0.1
    for t in (0, 1, 127, 128, 199):                      # one token, given all before it
        with torch.no_grad():
            logits = torch.cat([model(window[None, :t + 1])[0][:, -1] for window in windows])
        nats = -logits.log_softmax(-1)[range(6), [window[t + 1] for window in windows]].mean()
        assert math.isclose(found[t].item(), nats.item(), rel_tol=1e-5)


def test_with_memory():
    """A segment sees the keys and values of the N tokens before it, which saw N before them; no more."""
    torch.manual_seed(0)
    config = moduleformer.Config(vocab_size=50, block_size=8, n_layer=2, n_embd=16, d_att=16, d_ffd=16,
                                 n_att=2, n_ffd=2, top_k=1, n_head=2)
    model = moduleformer.Model(config).eval()
    tokens = torch.randint(50, (60,)).short()
    found = {}
    for memory in (0, 4, 100):
        found[memory] = eval_length.loss_by_position(
            model, tokens, 24, 35, 4, Machine('cpu'), segment=8, memory=memory)
    whole = eval_length.loss_by_position(model, tokens, 24, 35, 4, Machine('cpu'))
    torch.testing.assert_close(found[100], whole)        # the memory holds all that came before
    torch.testing.assert_close(found[4][:8], whole[:8])  # nothing came before the first segment
    second = torch.stack([tokens[start + 8:start + 17].long() for start in (0, 35)])
    with torch.no_grad():
        alone = model(second[:, :-1], second[:, 1:], reduction='none')[1].mean(0).double()
    torch.testing.assert_close(found[0][8:16], alone)
    assert (found[4][8:] - whole[8:]).abs().max() > 1e-5 and (found[4][8:] - found[0][8:]).abs().max() > 1e-5


@pytest.mark.slow
def test_as_a_user(run, smoke, tmp_path):
    runs = smoke('config/moduleformer.py'), smoke('config/llama.py')
    done = run('tools.eval_length', *runs, '--length=160', '--stride=3000', f'--json={tmp_path}/l.json')
    lines = done.stdout.splitlines()
    bins = [(0, 64), (64, 128), (128, 160)]
    assert [line.split()[:3] for line in lines[2:5]] == [[str(a), 'to', str(b - 1)] for a, b in bins]
    assert lines[5].startswith('moduleformer: ') and lines[5].endswith('over all positions')
    assert lines[6].startswith('moduleformer: trained at 128')
    assert lines[8].startswith('llama: trained at 64')
    rows = json.loads((tmp_path / 'l.json').read_text())['runs']
    assert [len(row['loss']) for row in rows] == [160, 160]
    assert [row['trained'] for row in rows] == [128, 64]
    for row, line in zip(rows, (lines[6], lines[8])):
        T, loss = row['trained'], row['loss']
        change = np.mean(loss[T:]) - np.mean(loss[T // 2:T])
        assert float(line.split()[-1]) == pytest.approx(change, abs=1e-4)
    for row, column in zip(rows, (3, 4)):                # each line the mean of its own positions
        means = [f"{np.mean(row['loss'][a:b]):.4f}" for a, b in bins]
        assert [line.split()[column] for line in lines[2:5]] == means


@pytest.mark.slow
def test_dropout_is_off(run, smoke, monkeypatch):
    seen = []

    def loss_by_position(model, *_, **__):
        seen.append(model.training)
        return torch.zeros(64)
    monkeypatch.setattr(eval_length, 'loss_by_position', loss_by_position)
    run('tools.eval_length', smoke('config/gpt2.py'), '--length=64', here=True)
    run('tools.eval_length', smoke('config/moduleformer.py'), '--length=64', '--memory=8', here=True)
    assert seen == [False, False]


@pytest.mark.slow
def test_every_column_has_a_name_of_its_own(run, smoke, tmp_path, monkeypatch):
    monkeypatch.setattr(eval_length, 'loss_by_position', lambda *_, **__: torch.zeros(64))
    paths = [smoke(f'config/{name}.py') / 'ckpt.pt' for name in ('moduleformer', 'llama')]
    told = run('tools.eval_length', *paths, '--length=64', here=True).stdout
    assert all(f'{path}: 0.0000' in told for path in paths)
    (tmp_path / 'lr_0.5').symlink_to(paths[0].parent)
    told = run('tools.eval_length', tmp_path / 'lr_0.5', '--length=64', here=True).stdout
    assert '\nlr_0.5: 0.0000' in told


@pytest.mark.parametrize('length', [8, 128])
def test_a_broken_checkpoint_is_not_a_table_of_positions(length):
    config = moduleformer.Config(vocab_size=5, block_size=64, n_layer=1, n_embd=8, d_att=8, d_ffd=8, n_head=1)
    weights = moduleformer.Model(config).state_dict()
    weights['wte.weight'][0] = math.nan
    ckpt = dict(model='moduleformer', config=asdict(config), weights=weights, adapted=[], folder='run')
    with pytest.raises(UserError, match='run: some of its weights are not finite'):
        eval_length.load_longer('run', ckpt, length, 'cpu')


@pytest.mark.slow
@pytest.mark.parametrize('config, args, message', [
    ('moep', ['--length=128'], 'table of 64 positions'),
    ('moep', ['--memory=8'], 'has positions'),
    ('moduleformer', ['--length=0'], 'not between 1'),
    ('moduleformer', ['--length=50000'], 'too few'),
    ('moduleformer', ['--data=nothing'], 'nothing'),
    ('stlm_bytes', [], 'not of chunks'),
    ('moduleformer', ['--data={data_dir}/toy_bytes'], 'not of chunks')])
def test_mistakes(run, smoke, data_dir, config, args, message):
    args = [arg.format(data_dir=data_dir) for arg in args]
    text = run('tools.eval_length', smoke(f'config/{config}.py'), *args, code=2).stderr
    assert message in text and text.count('\n') == 1
