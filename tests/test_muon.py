"""Muon against singular values, and against the same step written out."""

import math

import pytest
import torch
import torch.nn as nn

import moep
import papaformer
import selfmoe
import stlm
import train
from plumbing.machine import Machine
from plumbing.muon import MOMENTUM, QUINTIC, Muon, orthogonal
from plumbing.settings import Settings


@pytest.mark.parametrize('shape', [(1, 8, 8), (3, 12, 5), (2, 5, 12)])
def test_orthogonal_against_svd(shape):
    """U S V^T becomes U S' V^T, with S' near 1: the quintic is not exact."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    x = x / x.norm(dim=(1, 2), keepdim=True)
    for matrix, got in zip(x, orthogonal(x)):
        u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
        inner = u.T @ got @ vt.T
        values = inner.diagonal()
        assert torch.allclose(inner, values.diag(), atol=1e-9)           # the same directions
        assert torch.allclose(u @ inner @ vt, got, atol=1e-9)            # and no others
        assert 0.6 < values.min() and values.max() < 1.3
    assert orthogonal(torch.zeros(shape)).abs().max() == 0


def slow_step(p, grad, momentum, rate, decay, is_linear):
    """One matrix, in plain words -> new weights, new momentum."""
    momentum = MOMENTUM * momentum + (1 - MOMENTUM) * grad
    x = (1 - MOMENTUM) * grad + MOMENTUM * momentum
    if x.norm() > 0:
        x = x / x.norm()
    a, b, c = QUINTIC
    for _ in range(5):
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    d_out, d_in = p.shape if is_linear else p.shape[::-1]
    return p - rate * decay * p - rate * math.sqrt(max(1, d_out / d_in)) * x, momentum


@pytest.mark.parametrize('as_tensor, compiled', [
    (False, False), (True, False), pytest.param(True, True, marks=pytest.mark.slow)])
def test_step(as_tensor, compiled):
    """Three steps of linear maps and stacks; the rate changes, as a number or as a tensor."""
    torch.manual_seed(0)
    shapes = [(8, 6), (8, 6), (6, 8), (3, 6, 8), (3, 8, 6), (5, 5), (2, 5, 5)]
    params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    vector = nn.Parameter(torch.ones(4))
    lr = torch.tensor(0.0, dtype=torch.float64) if as_tensor else 0.0
    groups = [dict(params=[vector], weight_decay=0.0),
              dict(params=params, weight_decay=0.3, muon=4.0)]
    optimizer = Muon(groups, lr=lr, foreach=False)
    if compiled:
        optimizer.compile()
    want = [(p.detach().clone(), torch.zeros_like(p)) for p in params]
    for rate in (0.1, 0.2, 0.05):
        vector.grad = torch.ones(4)
        for p in params:
            p.grad = torch.randn_like(p)
        params[3].grad[1] = 0                            # an expert without tokens
        train.set_rate(optimizer, rate)
        optimizer.step()
        for i, p in enumerate(params):
            stacks = [x if x.dim() == 3 else x[None] for x in (want[i][0], p.grad, want[i][1])]
            new = [slow_step(*parts, 4 * rate, 0.3, p.dim() == 2) for parts in zip(*stacks)]
            want[i] = [torch.stack(parts).view_as(p) for parts in zip(*new)]
            assert torch.allclose(p, want[i][0], atol=1e-6), shapes[i]
    assert vector.detach().allclose(torch.full((4,), 1 - 0.35), atol=1e-4)       # AdamW's own steps


@pytest.mark.parametrize('model, by_adamw', [
    (selfmoe.Model(selfmoe.Config(vocab_size=50, n_embd=16, n_head=2, n_kv_head=2, n_expert=4,
                                  tied=True)), {'wte', 'router'}),
    (moep.Model(moep.Config(block_size=16, n_embd=12, n_embd_parallel=6)),
     {'wte', 'wpe', 'router'}),
    (papaformer.Model(papaformer.Config(vocab_size=50, connection='gumbel1')),
     {'wte', 'head', 'router'}),
    (stlm.Model(stlm.Config(block_size=18, n_embd=32, byte_limit=8)), {'wte', 'position'}),
    (nn.ModuleDict(dict(words=nn.Embedding(5, 4), map=nn.Linear(4, 4))), {'words'})])
def test_embeddings_heads_and_routers_stay_with_adamw(model, by_adamw):
    names = {p: name for name, p in model.named_parameters()}
    s = Settings(optimizer='muon', muon_rate=7.0)
    groups = train.make_optimizer(model, s, Machine('cpu')).param_groups
    members = [{names[p] for p in group['params']} for group in groups]
    assert sum(map(len, members)) == len(names)
    assert all(by_adamw & {*name.split('.')} for name in members[0])
    assert members[2] and not any(by_adamw & {*name.split('.')} for name in members[2])
    assert all(p.dim() > 1 for p in groups[2]['params']) and groups[2]['muon'] == 7.0
    assert [group['weight_decay'] for group in groups] == [0.1, 0.0, 0.1]


@pytest.mark.parametrize('kind', ['adamw', 'muon'])
def test_float16_leaves_out_a_step_that_overflows(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = train.make_optimizer(model, Settings(optimizer=kind), Machine('cpu', 'float16'))
    scaler, states = optimizer.scaler, []
    for gradient in (1.0, math.inf, 1.0):
        scaler.scale(model(torch.ones(1, 4)).sum() * gradient).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        momenta = [state['exp_avg'] for state in optimizer.state.values()]
        states.append([p.detach().clone() for p in (*model.parameters(), *momenta)])
    assert scaler.get_scale() == 2 ** 15                 # 2 ** 16, halved once
    for first, skipped, last in zip(*states, strict=True):
        assert torch.equal(first, skipped) and last.isfinite().all()
        assert not torch.equal(skipped, last)
