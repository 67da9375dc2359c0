"""arena/dense.py and arena/loop.py against a slow oracle, one token, head and expert at a time."""

import pytest
import torch
import torch.nn.functional as F

from arena import dense
from arena.dense import Dense, DenseConfig
from arena.loop import Loop, LoopConfig
from oracles import attend, compare, rms, route, same_routes, switch_balance, tokens, turn

SMALL = dict(vocab_size=37, block_size=16, n_layer=2, n_head=2, n_embd=16, dropout=0.0)
ROUTED = dict(SMALL, n_expert=5, top_k=3, n_shared=1)
LOOP = dict(SMALL, hidden=24, d_token=8)
FORMS = [SMALL, ROUTED, dict(ROUTED, n_shared=0, top_k=2, sparse=False, drop_expert=0.4),
         dict(ROUTED, drop_expert=0.4), LOOP, dict(LOOP, n_expert=5, top_k=2)]


def make(config, dtype=torch.float64):
    """Also what starts at zero is random here."""
    torch.manual_seed(0)
    is_loop = 'd_token' in config
    model = Loop(LoopConfig(**config)) if is_loop else Dense(DenseConfig(**config))
    model.to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


# ---- The slow oracle -----------------------------------------------------------------------------


def attention(b, x, n_head):
    """Of normed vectors: queries and keys are normed, then turned."""
    def heads(linear):
        return [(linear.weight @ u).split(len(u) // n_head) for u in x]

    def place(vectors):
        return [[turn(rms(head), t) for head in parts] for t, parts in enumerate(vectors)]
    joined = attend(place(heads(b.q)), place(heads(b.k)), heads(b.v))
    return [b.proj.weight @ u for u in joined]


def expert(x, fc, down):
    return down @ (torch.clamp(fc @ x, min=0) ** 2)


def feed_forward(ffn, x, c, log, kept_NK):
    if c.n_expert == 1:
        return expert(x, ffn.fc.weight, ffn.down.weight)
    _, gates = routed = route(ffn.router.linear.weight, x, c.top_k)
    kept_K = kept_NK[len(log)]                           # 0 if dropped, else 1 / (1 - drop_expert)
    log.append(routed)
    y = sum(c.top_k * g * kept * expert(x, ffn.fc[e].T, ffn.down[e].T)
            for (e, g), kept in zip(gates.items(), kept_K))
    return y + expert(x, ffn.shared.fc.weight, ffn.shared.down.weight) if c.n_shared else y


def oracle(model, idx):
    """-> logits (B, T, V), auxiliary losses, {layer: [(probabilities, gates) of a token]}"""
    c = model.config
    is_loop = isinstance(model, Loop)
    head = model.head.weight @ model.narrow.weight if is_loop else model.wte.weight
    rows = []
    routed = [[] for _ in model.blocks]
    torch.manual_seed(5)                                 # as in compare
    ones_NK = torch.ones(idx.numel(), c.top_k, dtype=torch.float64)
    kept = [F.dropout(ones_NK, c.drop_expert) for _ in model.blocks]
    for row in idx:
        x = [rms(model.wte(i)) for i in row]
        for b, log, kept_NK in zip(model.blocks, routed, kept):
            x = [v + a for v, a in zip(x, attention(b, [rms(v) for v in x], c.n_head))]
            x = [v + feed_forward(b.ffn, rms(v), c, log, kept_NK) for v in x]
        rows.append(torch.stack([head @ rms(v) for v in x]))
    logs = {f'blocks.{i}': log for i, log in enumerate(routed) if log}
    aux = dict(balance=sum(map(switch_balance, routed))) if logs else {}
    return torch.stack(rows), aux, logs


@pytest.mark.parametrize('config', FORMS, ids=str)
def test_oracle(config):
    """Logits, loss, balance loss, every gradient and every gate."""
    model, x, y = make(config), tokens(T=7), tokens(T=7, seed=2)
    y[0, 3] = -1
    logits, aux, logs = oracle(model, x)
    compare(model, x, y, logits, aux, dict.fromkeys(aux, 0.3))
    torch.manual_seed(5)                                 # the same choices are dropped again
    same_routes(model.routes(x), logs)


def test_starts_as_an_embedding():
    """Output maps are zero: whatever came before, a token's logits are those of its embedding."""
    for config in (SMALL, ROUTED):
        model, x = Dense(DenseConfig(**config)), tokens()
        states = dense.norm(dense.norm(model.wte(x)))
        assert torch.allclose(model.features(x)[0], states, atol=1e-5)


def test_positions_in_bfloat16():
    """bfloat16 cannot tell position 257 from 256: angles are float32."""
    x = torch.randn(1, 1, 8, 4).bfloat16()
    turned = dense.rotate(x, dense.rotary(torch.arange(300.0, 308), 4))
    assert turned.dtype == torch.bfloat16
    for t in range(8):
        want = turn(x[0, 0, t].double(), 300 + t)
        assert torch.allclose(turned[0, 0, t].double(), want, atol=0.01)
