"""arena/dense.py against a slow oracle, one token, one head and one expert at a time."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from arena import dense
from arena.dense import Dense, DenseConfig
from tools.check import CHECKS, run_check

SMALL = dict(vocab_size=37, block_size=16, n_layer=2, n_head=2, n_embd=16, dropout=0.0)
ROUTED = dict(SMALL, n_expert=5, top_k=3, n_shared=1)
FORMS = [SMALL, ROUTED, dict(ROUTED, n_shared=0, top_k=2, sparse=False)]


def make(config, dtype=torch.float64):
    """Also what starts at zero is random here."""
    torch.manual_seed(0)
    model = Dense(DenseConfig(**config)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def tokens(B=2, T=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SMALL['vocab_size'], (B, T), generator=generator)


# ---- The slow oracle -----------------------------------------------------------------------------


def rms(x):
    return x / torch.sqrt((x * x).sum() / len(x) + 1e-6)


def turn(x, t):
    """One head's vector at position t: one 2 x 2 rotation for each pair (i, i + d/2)."""
    half, out = len(x) // 2, [None] * len(x)
    for i in range(half):
        angle = t * 10000.0 ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = cos * x[i] - sin * x[i + half]
        out[i + half] = sin * x[i] + cos * x[i + half]
    return torch.stack(out)


def attention(b, x, c):
    """x (T, D), normed: token t reads 0..t."""
    d = c.n_embd // c.n_head
    out = []
    for t in range(len(x)):
        heads = []
        for h in range(c.n_head):
            head = slice(h * d, (h + 1) * d)
            q = turn(rms((b.q.weight @ x[t])[head]), t)
            keys = [turn(rms((b.k.weight @ x[s])[head]), s) for s in range(t + 1)]
            weight = torch.exp(torch.stack([q @ k for k in keys]) / math.sqrt(d))
            weight = weight / weight.sum()
            heads.append(sum(w * (b.v.weight @ x[s])[head] for s, w in enumerate(weight)))
        out.append(b.proj.weight @ torch.cat(heads))
    return out


def expert(x, fc, down):
    return down @ (torch.clamp(fc @ x, min=0) ** 2)


def feed_forward(ffn, x, c, log):
    if c.n_expert == 1:
        return expert(x, ffn.fc.weight, ffn.down.weight)
    score = torch.exp(ffn.router.linear.weight @ x)
    best = sorted(range(c.n_expert), key=lambda e: -score[e].item())[:c.top_k]
    gates = {e: score[e] / sum(score[i] for i in best) for e in best}
    log.append((score / score.sum(), gates))
    y = sum(c.top_k * g * expert(x, ffn.fc[e].T, ffn.down[e].T) for e, g in gates.items())
    return y + expert(x, ffn.shared.fc.weight, ffn.shared.down.weight) if c.n_shared else y


def oracle(model, idx):
    """-> logits (B, T, V), balance loss, {layer: [gates of a token]}"""
    c = model.config
    rows = []
    routed = [[] for _ in model.blocks]
    for row in idx:
        x = [rms(model.wte.weight[i]) for i in row]
        for b, log in zip(model.blocks, routed):
            x = [v + a for v, a in zip(x, attention(b, [rms(v) for v in x], c))]
            x = [v + feed_forward(b.ffn, rms(v), c, log) for v in x]
        rows.append(torch.stack([model.wte.weight @ rms(v) for v in x]))
    balance = torch.zeros(())
    for log in routed if c.n_expert > 1 else []:
        p = sum(prob for prob, _ in log) / len(log)
        picks = [sum(e in gates for _, gates in log) for e in range(c.n_expert)]
        share = [n / (c.top_k * len(log)) for n in picks]
        balance = balance + c.n_expert * sum(f * q for f, q in zip(share, p))
    gates = {f'blocks.{i}': [gates for _, gates in log] for i, log in enumerate(routed) if log}
    return torch.stack(rows), balance, gates


@pytest.mark.parametrize('config', FORMS, ids=str)
def test_oracle(config):
    """Logits, loss, balance loss, every gradient and every gate."""
    model, x, y = make(config), tokens(), tokens(seed=2)
    y[0, 3] = -1
    logits, balance, gates = oracle(model, x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
    grads = torch.autograd.grad(loss + 0.3 * balance, list(model.parameters()))
    assert torch.allclose(model(x)[0], logits, atol=1e-9)
    _, fast, aux = model(x, y)
    assert abs(fast - loss) < 1e-9 and abs(aux.get('balance', 0) - balance) < 1e-9
    (fast + 0.3 * aux.get('balance', 0)).backward()
    for (name, p), want in zip(model.named_parameters(), grads):
        assert torch.allclose(p.grad, want, atol=1e-9), name
    routes = model.routes(x)
    assert list(routes) == list(gates)
    for name in routes:
        for got, want in zip(routes[name].flatten(0, 1), gates[name]):
            assert got.nonzero().flatten().tolist() == sorted(want)
            assert all(abs(got[e] - want[e]) < 1e-12 for e in want)


# ---- The protocol --------------------------------------------------------------------------------


@pytest.mark.parametrize('config', [SMALL, ROUTED], ids=str)
def test_check_is_green(config):
    """Causal, cached = uncached, sparse = dense, and what else tools.check knows."""
    for check in CHECKS:
        verdict, text = run_check(check, dense, DenseConfig(**config))
        assert verdict != 'WRONG', (check.__name__, text)


def test_sparse_is_dense_through_the_kernel():
    sparse = make(dict(ROUTED, n_embd=32), torch.float32)
    full = Dense(replace(sparse.config, sparse=False))
    full.load_state_dict(sparse.state_dict())
    x = tokens(3, 16)
    for model in (sparse, full):
        _, loss, aux = model(x, x.flip(1))
        (loss + aux['balance']).backward()
    for (name, p), q in zip(sparse.named_parameters(), full.parameters()):
        assert (p.grad - q.grad).norm() <= 1e-4 * q.grad.norm(), name


def test_starts_as_an_embedding():
    """Output maps are zero: whatever came before, a token's logits are those of its embedding."""
    for config in (SMALL, ROUTED):
        model, x = Dense(DenseConfig(**config)), tokens()
        states = dense.norm(dense.norm(model.wte(x)))
        assert torch.allclose(model.features(x)[0], states, atol=1e-5)


def test_initialisation():
    """Zero where something is added, 0.02 for embedding and router, else 1/sqrt(fan-in)."""
    torch.manual_seed(0)
    for keys in (dict(), dict(n_expert=8, top_k=3, n_shared=1)):
        model = Dense(DenseConfig(vocab_size=512, n_layer=4, n_head=2, n_embd=128, **keys))
        for name, p in model.named_parameters():
            std = 0.02 if 'wte' in name or 'router' in name else 1 / math.sqrt(128)
            std = 0.0 if '.proj' in name or '.down' in name else std
            assert abs(p.std() - std) <= (0.15 if 'router' in name else 0.03) * std, name


class LoudRouter(dense.Router):
    """Its gates are twice as large, by a parameter of its own."""
    def __init__(self, *args):
        super().__init__(*args)
        self.scale = torch.nn.Parameter(torch.full((1, 1), 2.0))

    def forward(self, x_ND):
        gate_NK, choice_NK, losses = super().forward(x_ND)
        return self.scale * gate_NK, choice_NK, losses | dict(loud=gate_NK.square().mean())


class LoudDense(Dense):
    router = LoudRouter


def test_a_router_of_ones_own():
    """Layers use it, its parameters keep their values, aux and routes() have what it returns."""
    model = LoudDense(DenseConfig(**ROUTED)).eval()
    routers = [part for part in model.modules() if isinstance(part, dense.Router)]
    assert len(routers) == ROUTED['n_layer'] and all(type(part) is LoudRouter for part in routers)
    assert all(part.scale.item() == 2.0 for part in routers)
    gates = model.routes(tokens())
    assert len(gates) == len(routers)
    assert all(torch.allclose(gate.sum(-1), torch.tensor(2.0)) for gate in gates.values())
    aux = model(tokens())[2]
    loud = sum((gate / 2).square().sum(-1).mean() / ROUTED['top_k'] for gate in gates.values())
    assert list(aux) == ['balance', 'loud'] and torch.allclose(aux['loud'], loud)


def test_dropout_places(monkeypatch):
    """On the embeddings, on attention and on both branches of a block, in training only."""
    for config in (SMALL, ROUTED):
        model, x, seen = make(dict(config, dropout=0.5)), tokens(), []
        kernel = F.scaled_dot_product_attention

        def record(*args, dropout_p, **rest):
            seen.append(dropout_p)
            return kernel(*args, dropout_p=dropout_p, **rest)
        monkeypatch.setattr(F, 'scaled_dot_product_attention', record)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.register_forward_hook(lambda module, args, out: seen.append('drop'))
        assert not torch.equal(model(x)[0], model(x)[0])
        assert seen == ['drop', *[0.5, 'drop', 'drop'] * 2] * 2
        assert torch.equal(model.eval()(x)[0], model(x)[0]) and seen[-3] == 0.0
        monkeypatch.undo()


def test_positions_in_bfloat16():
    """bfloat16 cannot tell position 257 from 256: angles are float32."""
    x = torch.randn(1, 1, 8, 4).bfloat16()
    turned = dense.rope(x, past=300)
    assert turned.dtype == torch.bfloat16
    for t in range(8):
        want = turn(x[0, 0, t].double(), 300 + t)
        assert torch.allclose(turned[0, 0, t].double(), want, atol=0.01)


def test_counts():
    """By hand: 12 layers of 384, a vocabulary of 16,384."""
    plain = 16384 * 384 + 12 * (4 * 384 ** 2 + 2 * 384 * 1536)
    experts = lambda n: 12 * 2 * n * 384 * 384           # of width 384, a quarter of 1,536
    router = 12 * 16 * 384
    for keys, want in ((dict(), (plain, plain)),
                       (dict(n_expert=16, top_k=4), (plain + experts(12) + router, plain + router)),
                       (dict(n_expert=16, top_k=3, n_shared=1),
                        (plain + experts(13) + router, plain + router))):
        with torch.device('meta'):
            assert Dense(DenseConfig(**keys)).count_params() == want
