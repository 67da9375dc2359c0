"""tools/depth.py: losses by hand, and as a user runs it."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from plumbing.checkpoint import load_checkpoint
from plumbing.data import as_tensor, load_bin, val_batches
from plumbing.machine import Machine
from stlm_depth import STLMDepth, STLMDepthConfig
from tools.depth import decode

FEW = ['--eval_tokens=256', '--prompts=3', '--max_new_tokens=6', '--device=cpu']


def first_windows(data_dir):
    tokens = as_tensor(load_bin(data_dir / 'toy_stories', 'val'), 'cpu')
    return list(val_batches(tokens, 64, 4, -1, 256))


def close(a, b):
    return math.isclose(a, b, rel_tol=1e-4)


@torch.no_grad()
def test_exits(run, smoke, data_dir, tmp_path):
    """After every layer the same norm and head; drafts change the speed and nothing else."""
    out = smoke('config/stlm_exit.py')
    done = run('tools.depth', out, *FEW, f'--json={tmp_path}/d.json', here=True)
    found = json.loads((tmp_path / 'd.json').read_text())
    model, _ = load_checkpoint(out, torch.device('cpu'))
    model.eval()
    (x, y), = first_windows(data_dir)
    hidden = model.wte(x)
    for n in range(1, 5):
        states, *_ = model.run(hidden, range(n), 0)
        logits = F.linear(model.norm_f(states[-1]), model.wte.weight)
        want = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        assert close(found['exits'][n - 1]['loss'], want.item())
    assert close(found['exits'][-1]['loss'], model(x, y)[1].item()) and found['routed'] == {}
    assert [row['layers'] for row in found['drafts']] == [0, 1, 2, 3]
    assert all(row['same'] == 3 and row['tokens_per_s'] > 0 for row in found['drafts'])
    assert all(0 <= row['kept'] <= 1 for row in found['drafts'][1:])
    lines = done.stdout.splitlines()
    assert lines[0].startswith('exit after   1 layer   loss') and '3 of 3 texts the same' in lines[-1]


@torch.no_grad()
def test_causal_and_looking_ahead(run, smoke, data_dir, tmp_path):
    out = smoke('config/stlm_depth.py')
    done = run('tools.depth', out, *FEW, '--draft_layers=2', f'--json={tmp_path}/d.json', here=True)
    found = json.loads((tmp_path / 'd.json').read_text())
    model, _ = load_checkpoint(out, torch.device('cpu'))
    (x, y), = first_windows(data_dir)
    for mode, training in (('forecast', False), ('top', True)):      # it has no dropout
        assert close(found['routed'][mode]['loss'], model.train(training)(x, y)[1].item())
    assert set(found['routed']['passed']) == {'layers.1', 'layers.3'}
    assert 'looks ahead' in done.stdout.splitlines()[1]


def test_all_drafts_are_kept():
    """The other layers add nothing to the first, so they confirm what it drafts: 3, 3 and 1 of 10 tokens."""
    sizes = dict(vocab_size=37, block_size=32, n_layer=3, n_head=2, n_kv_head=1, n_embd=8, ffn_hidden=8)
    model = STLMDepth(STLMDepthConfig(**sizes, capacity=1.0)).eval()
    for layer in model.layers[1:]:
        layer.proj.weight.data.zero_()
        layer.down.weight.data.zero_()
    texts, _, kept = decode(model, torch.randint(37, (2, 4)), 10, 1, 3, Machine('cpu'))
    assert texts.shape == (2, 14) and kept == 1


def test_one_layer(run, data_dir, tmp_path):
    run('train.py', 'config/stlm_depth.py', '--n_layer=1', '--capacity=1.0', '--aux_weights={}',
        '--max_iters=1', '--batch_size=1', '--eval_tokens=64', '--sample_tokens=2', f'--data_dir={data_dir}',
        f'--out_dir={tmp_path}', here=True)
    told = run('tools.depth', tmp_path, *FEW, here=True).stdout.splitlines()
    assert len(told) == 2 and told[1].startswith('no drafts')        # there is no layer that could draft


@pytest.mark.parametrize('size', [20, 20_000_003])       # less than a prompt; more than float32 can count
def test_prompts_lie_in_the_text(run, smoke, monkeypatch, size):
    monkeypatch.setattr('tools.depth.load_bin', lambda *_: np.zeros(size, np.uint16))
    run('tools.depth', smoke('config/stlm_exit.py'), *FEW, '--draft_layers=1', here=True)


@pytest.mark.parametrize('config, flags, message', [
    ('config/stlm.py', [], 'is a run of stlm.py, not of stlm_depth.py'),
    ('config/stlm_exit.py', ['--draft_layers=4'], 'the model has 4 layers'),
    ('config/stlm_exit.py', ['--data={data_dir}/toy_bytes'], 'has another tokenizer than')], ids=str)
def test_errors(run, smoke, data_dir, config, flags, message):
    flags = [flag.format(data_dir=data_dir) for flag in flags]
    done = run('tools.depth', smoke(config), *flags, *FEW, here=True, code=2)
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
