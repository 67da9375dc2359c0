"""moep.py against a slow version written from the paper: one token, one block, one expert at a
time."""

import pytest
import torch
import torch.nn.functional as F

from oracles import attend, compare, gate_up, gelu, route, same_routes, switch_balance, tokens
from test_contract import make

# ---- The slow version ----------------------------------------------------------------------------

def act(h, swiglu):
    return gate_up(h) if swiglu else gelu(h, tanh=True)


def block(x, n_head, swiglu, ln1, qkv, proj, ln2, fc, down):
    """One pre-LayerNorm block over one sequence, a list of vectors; each map is (weight (in, out),
    bias)."""
    D = len(x[0])
    q, k, v = [], [], []
    for u in x:
        joint = F.layer_norm(u, (D,), *ln1) @ qkv[0] + qkv[1]
        for part, heads in zip(joint.chunk(3), (q, k, v)):
            heads.append(part.split(D // n_head))
    out = []
    for u, joined in zip(x, attend(q, k, v)):
        u = u + joined @ proj[0] + proj[1]
        h = act(F.layer_norm(u, (D,), *ln2) @ fc[0] + fc[1], swiglu)
        out.append(u + h @ down[0] + down[1])
    return out


def balance(log, form):
    if form == 'switch':
        return switch_balance(log)
    p = sum(prob for prob, _ in log) / len(log)
    entropy = -sum(q * torch.log(q) for q in p)
    return -entropy if form == 'entropy' else entropy


def oracle(model, idx):
    """-> logits (B, T, V), auxiliary losses, {layer: [(probabilities, gates) of a token]}"""
    c, m = model.config, model
    logs = {}

    def choose(name, x, router):
        routed = route(router.linear.weight, x, c.top_k)
        logs.setdefault(name, []).append(routed)
        return routed[1].items()

    def full_block(b, x):
        maps = [(linear.weight.T, linear.bias) for linear in (b.qkv, b.proj, b.fc, b.down)]
        norms = [(norm.weight, norm.bias) for norm in (b.norm_1, b.norm_2)]
        return block(x, c.n_head, c.swiglu, norms[0], *maps[:2], norms[1], *maps[2:])

    def small_block(layer, p, x):
        names = ('norm_1', 'qkv', 'proj', 'norm_2', 'fc', 'down')
        parts = [(getattr(layer, f'{name}_gain' if 'norm' in name else name)[p],
                  getattr(layer, f'{name}_bias')[p]) for name in names]
        return block(x, c.n_head_parallel, c.swiglu, *parts)

    def expert(moe, e, x):
        if c.swiglu:
            x = gate_up(F.layer_norm(x, x.shape) @ moe.fc[e] + moe.fc_bias[e])
        return x @ moe.down[e] + moe.down_bias[e]

    def mixture(name, moe, x):
        return [sum(g * expert(moe, e, v) for e, g in choose(name, v, moe.router)) for v in x]

    rows = []
    for row in idx:
        x = [m.wte.weight[i] + m.wpe.weight[t] for t, i in enumerate(row)]
        for b in m.first:
            x = full_block(b, x)
        if c.n_parallel:
            x = mixture('shrink', m.shrink, x)
            for n, layer in enumerate(m.parallel):
                outs = [small_block(layer, p, x) for p in range(c.n_block)]
                x = [sum(g * outs[p][t] for p, g in choose(f'parallel.{n}', v, layer.router))
                     for t, v in enumerate(x)]
            x = mixture('grow', m.grow, x)
        for b in m.last:
            x = full_block(b, x)
        states = [F.layer_norm(v, v.shape, m.norm_f.weight, m.norm_f.bias) for v in x]
        rows.append(torch.stack([m.wte.weight @ v for v in states]))
    aux = {}
    for name, log in logs.items():
        kind = 'block_balance' if name.startswith('parallel') else 'expert_balance'
        aux[kind] = aux.get(kind, 0) + balance(log, c.balance)
    return torch.stack(rows), aux, logs


@pytest.mark.parametrize('changes', [
    dict(), dict(swiglu=True), dict(n_parallel=0, n_layer=3), dict(top_k=1, balance='entropy'),
    dict(top_k=3, n_layer=3, balance='printed'), dict(swiglu=True, sparse=False)], ids=str)
def test_oracle(changes):
    """Logits, loss, balance losses, every gradient and every gate."""
    model, x, y = make('moep', **changes), tokens(), tokens(seed=2)
    y[0, 3] = -1
    logits, aux, logs = oracle(model, x)
    weights = dict(block_balance=0.3, expert_balance=0.7) if aux else {}
    compare(model, x, y, logits, aux, weights)
    same_routes(model.routes(x), logs)
    before = model.config.n_layer // 2 if model.parallel else 3
    assert (len(model.first), len(model.last)) == (before, model.config.n_layer - before)
