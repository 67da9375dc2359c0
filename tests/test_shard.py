"""Several processes that share one model (FSDP2), activations computed again, checkpoints in parts. What takes
minutes runs with NANOPATHS_LONG=1: `NANOPATHS_LONG=1 python -m pytest -s tests/test_shard.py`."""

import copy
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT
from plumbing.checkpoint import read_checkpoint
from plumbing.cli import UserError
from plumbing.folder import RunFolder
from plumbing.machine import Machine
from plumbing.models import import_model
from plumbing.settings import Settings
from plumbing.shard import blocks, merge, pick, recompute, slice_loss

long = pytest.mark.skipif(not os.environ.get('NANOPATHS_LONG'), reason='takes minutes: NANOPATHS_LONG=1')
ONE_THREAD = {**os.environ, 'OMP_NUM_THREADS': '1'}
TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
COMMON = ['--batch_size=2', '--warmup_iters=5', '--eval_tokens=256', '--log_interval=1', '--sample_tokens=2']
KEYS = dict(
    moep=dict(block_size=32, n_layer=4, n_head=2, n_embd=16, n_parallel=2, n_head_parallel=1, n_embd_parallel=16,
              n_block=3, n_expert=3, top_k=2, dropout=0.0),
    moduleformer=dict(block_size=32, n_layer=2, n_embd=16, n_att=3, d_att=8, n_head=1, n_ffd=3, d_ffd=16,
                      top_k=2, d_router=8),
    stlm=dict(block_size=32, n_layer=3, n_head=2, n_kv_head=1, n_embd=16, ffn_hidden=24, share='all', dropout=0.0),
    papaformer=dict(block_size=32, n_layer=4, n_head=2, n_embd=16, n_parallel=2, path_embd=[8, 8],
                    path_head=[1, 1]),
    selfmoe=dict(block_size=32, n_layer=3, n_head=2, n_kv_head=1, n_embd=16, gate='vector'))
AUX = dict(moep='dict(block_balance=0.01, expert_balance=0.01)', moduleformer='dict(mi=0.01)', stlm='{}')


def command(name, out, *args):
    keys = [f'--{key}={value}' for key, value in KEYS[name].items()]
    return [f'--model={name}', *keys, f'--aux_weights={AUX[name]}', *COMMON, f'--out_dir={out}', *args]


def frozen(base, out, *args):
    """A base that a surgery froze, with new experts."""
    surgery = ['--surgery=insert_experts', "--surgery_args=dict(n_att=1, n_ffd=1, router='partial')"]
    return ['--model=moduleformer', f'--init_from={base}', *surgery, '--aux_weights=dict(rout_reg=0.1)', *COMMON,
            f'--out_dir={out}', *args]


def losses(folder):
    steps = [json.loads(line) for line in open(folder / 'log.jsonl')]
    return {r['iter']: r['loss'] for r in steps if 'loss' in r}


def gap(a, b):
    """The largest difference of two runs: of their losses, of their weights."""
    first, second = losses(a), losses(b)
    assert first.keys() == second.keys()
    w, v = read_checkpoint(a)['weights'], read_checkpoint(b)['weights']
    assert w.keys() == v.keys()
    return max(abs(first[i] - second[i]) for i in first), max((w[n] - v[n]).abs().max().item() for n in w)


def train_many(processes, commands, data_dir):
    argv = json.dumps([[*map(str, each), f'--data_dir={data_dir}'] for each in commands])
    start = [*TORCHRUN, f'--nproc_per_node={processes}', str(ROOT / 'tests/train_many.py'), argv]
    done = subprocess.run(start, capture_output=True, text=True, env=ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def small(name, **changes):
    module = import_model(name)
    torch.manual_seed(0)
    return module.Model(module.Config(**{**KEYS[name], 'vocab_size': 50, **changes}))


# ---- The same numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize('name', KEYS)
def test_recomputing_changes_nothing(name, monkeypatch):
    """Losses and gradients, with dropout where there is one; the logits of 7 tokens at a time."""
    monkeypatch.setattr('plumbing.shard.SLICE', 7)
    dropout = {} if name == 'moduleformer' else dict(dropout=0.2)
    plain = small(name, **dropout)
    changed = copy.deepcopy(plain)
    for block in blocks(changed):
        block.forward = recompute(block.forward)
    slice_loss(changed, Machine('cpu'))
    assert len(blocks(changed)) >= 2
    x = torch.randint(50, (3, 32))
    y = x.roll(-1, 1).masked_fill(x == 3, -1)
    found = []
    for model in (plain, changed):
        torch.manual_seed(1)
        _, loss, aux = model(x, y)
        (loss + sum(aux.values())).backward()
        found.append([loss, *aux.values(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found):
        assert torch.allclose(a, b, atol=1e-6)
    each = [model.eval()(x, y, reduction='none')[1] for model in (plain, changed)]
    assert torch.allclose(*each, atol=1e-6) and torch.equal(plain(x)[0], changed(x)[0])


def test_recomputing_reads_the_memory_as_it_was():
    """Segment memory: a block extends the cache, and must not find it extended in backward."""
    plain = small('moduleformer')
    changed = copy.deepcopy(plain)
    for block in blocks(changed):
        block.forward = recompute(block.forward)
    x = torch.randint(50, (2, 64))
    caches = [], []
    for model, cache in zip((plain, changed), caches):
        for part in x.split(32, 1):
            model(part, part, cache=cache)[1].backward()
            cache[:] = [(k.detach(), v.detach()) for k, v in cache]
    assert [k.shape for k, _ in caches[1]] == [k.shape for k, _ in caches[0]] == [(2, 1, 64, 8)] * 2
    for a, b in zip(plain.parameters(), changed.parameters()):
        assert torch.equal(a.grad, b.grad)


def test_logits_are_never_whole(monkeypatch):
    """No tensor of (tokens, vocabulary) is made, forward or backward."""
    monkeypatch.setattr('plumbing.shard.SLICE', 8)
    model = small('moduleformer', vocab_size=501)
    slice_loss(model, Machine('cpu'))
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and 501 in result.shape:
                largest.append(result.numel())
            return result
    x = torch.randint(501, (2, 32))
    with Watch():
        model(x, x)[1].backward()
    assert 501 * 8 <= max(largest) <= 501 * 16           # 16: the head's own width


def test_a_loss_of_its_own_is_not_sliced():
    model = small('stlm')
    plain = model.forward
    model.forward = lambda *args, **kwargs: (None, 2 * plain(*args, **kwargs)[1], {})
    with pytest.raises(UserError, match='cannot be computed in slices'):
        slice_loss(model, Machine('cpu'))


@pytest.mark.slow
def test_two_processes_with_one_model(run, data_dir, tmp_path):
    """MoEP, and a base that a surgery froze, equal one process with as many micro-batches; half a run and its
    resumption, bit for bit the whole; every tool reads it; one process goes on with it."""
    ten = ['--max_iters=10', f'--data_dir={data_dir}']
    run('train.py', *command('moep', tmp_path / 'one'), *ten, '--gradient_accumulation_steps=4', here=True)
    run('train.py', *command('moduleformer', tmp_path / 'base'), '--max_iters=1', ten[1], here=True)
    run('train.py', *frozen(tmp_path / 'base', tmp_path / 'one_frozen'), *ten, '--gradient_accumulation_steps=4',
        here=True)
    shard = ['--shard', '--checkpoint_activations', '--gradient_accumulation_steps=2', '--save_interval=4']
    half = command('moep', tmp_path / 'halves', *shard)
    train_many(2, [command('moep', tmp_path / 'two', *shard, ten[0]), [*half, '--max_iters=6'],
                   [*half, '--resume', '--max_iters=10'],
                   frozen(tmp_path / 'base', tmp_path / 'two_frozen', *shard, ten[0])], data_dir)
    assert max(gap(tmp_path / 'one', tmp_path / 'two')) < 1e-4
    assert max(gap(tmp_path / 'one_frozen', tmp_path / 'two_frozen')) < 1e-4
    parts = sorted(path.name for path in (tmp_path / 'two' / 'shards').iterdir())
    assert parts == ['ckpt.10.0-of-2.pt', 'ckpt.10.1-of-2.pt']           # those of step 8 are gone
    assert gap(tmp_path / 'halves', tmp_path / 'two') == (0, 0)
    run('sample.py', tmp_path / 'two', '--max_new_tokens=3', here=True)
    for out in ('one', 'two'):
        run('train.py', *command('moep', tmp_path / out), f'--data_dir={data_dir}', '--resume', '--max_iters=12',
            '--gradient_accumulation_steps=4', here=True)
    assert max(gap(tmp_path / 'one', tmp_path / 'two')) < 1e-4
    assert not list((tmp_path / 'two' / 'shards').iterdir())             # it is one file again
