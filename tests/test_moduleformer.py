"""moduleformer.py against a slow oracle written from the paper's equations: one token, one module, one key at
a time."""

import copy
import itertools
import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import moduleformer
import train
from moduleformer import (ModuleFormer, ModuleFormerConfig, Router, Rows, StickBreaking, absorb_inserted,
                          count_usage, insert_experts, prune_experts, stick_weights)
from plumbing.settings import Settings

SMALL = dict(vocab_size=37, block_size=8, n_layer=2, n_embd=16, n_att=4, d_att=8, n_head=2, n_ffd=5, d_ffd=12,
             top_k=2, d_router=16, query_block=4)
MOLM = dict(vocab_size=50295, block_size=512, n_embd=1024, n_att=16, d_att=1024, n_head=1, n_ffd=32,
            d_ffd=2048, d_router=256, identity_kv=True)
WIDE = dict(identity_kv=True, d_att=16, n_head=1)        # without maps for keys and values
NO_BF16 = pytest.mark.filterwarnings('ignore:mkldnn_matmul failed')      # CPUs without bfloat16 say so


def make(seed=0, dtype=torch.float64, new=None, **changes):
    """A small model, with new = (attention, FFN) modules inserted. Norms, gates and modules all matter."""
    torch.manual_seed(seed)
    model = ModuleFormer(ModuleFormerConfig(**{**SMALL, **changes})).to(dtype)
    if new:
        model = insert_experts(model, *new).requires_grad_(True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = 0.6 if '.A.' in name or name.startswith('head') else 0.2
            p.add_(scale * torch.randn_like(p))
    return model


def tokens(B=2, T=6, seed=1):
    return torch.randint(0, SMALL['vocab_size'], (B, T), generator=torch.Generator().manual_seed(seed))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def rebuilt(model):
    again = ModuleFormer(ModuleFormerConfig(**asdict(model.config))).to(model.wte.weight)
    again.load_state_dict(model.state_dict())            # strict
    return again.train(model.training)


# ---- The slow oracle -----------------------------------------------------------------------------


def attend(q, keys, values):
    """Eq. 3 to 5 for one query and the keys up to its own: the product form, the latest key first."""
    beta = [1 / (1 + torch.exp(-(k @ q) / math.sqrt(len(q)))) for k in keys]     # Eq. 3, with a scale
    out, weights = 0, []
    for i in range(len(keys)):
        p = beta[i]
        for j in range(i + 1, len(keys)):
            p = p * (1 - beta[j])                                                # Eq. 4
        weights.append(p)
        out = out + p * values[i]
    return out, torch.stack(weights)


def rows_of(stack):
    return [*stack.weight, *([] if stack.inserted is None else stack.inserted)]


def route(router, x, log):
    """Eq. 1, 2 and 9 for one token -> {module: gate}."""
    hidden = [torch.clamp(b @ x, min=0) for b in router.B.weight]
    score = [torch.exp(sum(a[i] * hidden[i] for i in range(len(hidden)))) for a in rows_of(router.A)]
    prob = [s / sum(score) for s in score]
    best = sorted(range(len(prob)), key=lambda e: -prob[e].item())[:router.top_k]
    log.append((torch.stack(prob), {e: prob[e] for e in best}))
    return {e: prob[e] for e in best}


def norm(ln, x):
    mean = x.sum() / len(x)
    return (x - mean) / torch.sqrt(((x - mean) ** 2).sum() / len(x) + 1e-5) * ln.weight + ln.bias


def attention_module(att, e, u, t, c):
    """Module e of token t, which sees the normalised inputs u[0..t]; the width is split into n_head heads."""
    d = c.d_att // c.n_head
    q = rows_of(att.q)[e].T @ u[t]
    heads = []
    for h in range(c.n_head):
        part = slice(h * d, (h + 1) * d)
        if c.identity_kv:
            keys = values = u[:t + 1]
        else:
            w_k, w_v = att.kv.weight[:c.d_att][part], att.kv.weight[c.d_att:][part]
            keys, values = [w_k @ x for x in u[:t + 1]], [w_v @ x for x in u[:t + 1]]
        heads.append(attend(q[part], keys, values)[0])
    return rows_of(att.o)[e].T @ torch.cat(heads)


def ffn_module(ffd, e, x):
    h = rows_of(ffd.fc)[e].T @ x
    return rows_of(ffd.down)[e].T @ (0.5 * h * (1 + torch.erf(h / math.sqrt(2))))


def losses(log, A):
    """Eq. 7, 8 and 10 of one router."""
    E, N = len(log[0][0]), len(log)
    p = [sum(prob[m] for prob, _ in log) / N for m in range(E)]
    marginal = -sum(p[m] * torch.log(p[m]) for m in range(E))
    conditional = sum(-(prob * torch.log(prob)).sum() for prob, _ in log) / N
    out = dict(mi=-marginal + conditional, concentration=marginal)
    if A.inserted is not None:
        out['rout_reg'] = sum(x ** 2 for row in A.inserted for x in row)
    return out


def oracle(model, idx):
    """-> logits (B, T, V), aux, {pool: [{module: gate} of each token]}"""
    c, out = model.config, []
    logs = {f'blocks.{i}.{pool}': [] for i in range(c.n_layer) for pool in ('att', 'ffd')}
    for row in idx:
        x = [model.wte.weight[i] for i in row]
        for i, b in enumerate(model.blocks):
            u = [norm(b.ln_1, v) for v in x]
            for t in range(len(x)):
                gates = route(b.att.router, u[t], logs[f'blocks.{i}.att'])
                x[t] = x[t] + sum(g * attention_module(b.att, e, u, t, c) for e, g in gates.items())
            for t in range(len(x)):
                v = norm(b.ln_2, x[t])
                gates = route(b.ffd.router, v, logs[f'blocks.{i}.ffd'])
                x[t] = x[t] + sum(g * ffn_module(b.ffd, e, v) for e, g in gates.items())
        out.append(torch.stack([model.head.weight @ norm(model.ln_f, v) for v in x]))
    aux = {}
    for name, log in logs.items():
        for kind, loss in losses(log, model.get_submodule(name).router.A).items():
            aux[kind] = aux.get(kind, 0) + loss
    return torch.stack(out), aux, {name: [gates for _, gates in log] for name, log in logs.items()}


# ---- Stick-breaking ------------------------------------------------------------------------------


def qkv(T=7, K=2, past=0, B=2, H=2, d=3, dtype=torch.float64, scale=1.5, seed=0):
    torch.manual_seed(seed)
    q = scale * torch.randn(B, H, T, K, d, dtype=torch.float64)
    k, v = torch.randn(2, B, H, past + T, d, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def slow_stick(q, k, v):
    B, H, T, K, _ = q.shape
    past = k.size(2) - T
    out = []
    for b, h, t, n in itertools.product(range(B), range(H), range(T), range(K)):
        seen = past + t + 1
        out.append(attend(q[b, h, t, n], k[b, h, :seen], v[b, h, :seen])[0])
    return torch.stack(out).view(q.shape)


@pytest.mark.parametrize('T, K, past, sizes', [
    (1, 1, 0, [1, 4]), (7, 2, 0, [1, 3, 7, 100]), (6, 1, 4, [4, 5]), (5, 3, 1, [2]), (1, 2, 6, [1]),
    (2, 2, 9, [1, 8])])
def test_stick_breaking_is_the_product(T, K, past, sizes):
    inputs = qkv(T, K, past)
    want = slow_stick(*inputs)
    weight = torch.randn_like(want)
    grads = torch.autograd.grad((want * weight).sum(), inputs)
    for size in sizes:
        got = StickBreaking.apply(*inputs, size)
        assert torch.allclose(got, want, rtol=0, atol=1e-12)
        for a, b in zip(torch.autograd.grad((got * weight).sum(), inputs), grads):
            assert torch.allclose(a, b, rtol=0, atol=1e-11), size


@pytest.mark.slow
def test_stick_breaking_gradcheck():
    def in_blocks_of_3(q, k, v):
        return StickBreaking.apply(q, k, v, 3)
    assert torch.autograd.gradcheck(in_blocks_of_3, qkv(5, 2, past=2, B=1))
    assert torch.autograd.gradgradcheck(in_blocks_of_3, qkv(3, 1, past=1, B=1, H=1, d=2))


def test_weights_are_a_stick():
    """Non-negative, none for the future, at most 1 in all; what remains is a product (Eq. 16)."""
    q, k, _ = qkv(9, 2, past=3)
    z, p = stick_weights(q, k, 3)
    assert z.shape == p.shape == (2, 2, 18, 12) and (p >= 0).all() and (p.sum(-1) < 1).all()
    for row, (weight, logit) in enumerate(zip(p[0, 1], z[0, 1])):
        seen = 3 + row // 2 + 1
        query, keys = q[0, 1, row // 2, row % 2], k[0, 1, :seen]
        assert (weight[:seen] > 0).all() and (weight[seen:] == 0).all()
        assert torch.allclose(logit[:seen], keys @ query / math.sqrt(3))
        assert abs(1 - weight.sum() - (1 - logit[:seen].sigmoid()).prod()) < 1e-12
        assert torch.allclose(weight[:seen], attend(query, keys, keys)[1])


@pytest.mark.parametrize('case', [slow('all +50'), slow('all -50'), 'mixed', '+1000'])
def test_stable_for_large_logits(case):
    """Finite, and in float32 what the product is in float64."""
    torch.manual_seed(0)
    T, d = 40, 4
    size = 1000 if case == '+1000' else 50
    sign = -torch.ones(T) if case == 'all -50' else torch.ones(T)
    if case == 'mixed':
        sign = torch.randint(0, 2, (T,)) * 2.0 - 1
    q = torch.full((1, 1, T, 1, d), math.sqrt(size / math.sqrt(d)))      # q.k / sqrt(d) = size
    k = sign[None, None, :, None] * math.sqrt(size / math.sqrt(d)) * torch.ones(1, 1, T, d)
    v, grad = torch.randn(1, 1, T, d), torch.randn(1, 1, T, 1, d)
    found = []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        z, p = stick_weights(inputs[0], inputs[1], 0)
        assert z.tril().abs().max() > 0.99 * size and (p >= 0).all() and p.sum(-1).max() < 1 + 1e-4
        out = StickBreaking.apply(*inputs, 16)
        found.append([out, *torch.autograd.grad(out, inputs, grad.to(dtype))])
    want = slow_stick(q.double(), k.double(), v.double())
    assert torch.allclose(found[1][0], want, rtol=0, atol=1e-9)
    for a, b in zip(*found):
        assert a.isfinite().all() and (a - b).abs().max() < 1e-4 * max(b.abs().max(), 1e-3)


def test_a_long_stick_in_float32():
    """A key far back keeps its weight: the 2,000 keys after it left most of the stick, and no sum is lost."""
    T = 2000
    q, k = torch.ones(1, 1, 1, 1, 1), torch.full((1, 1, T, 1), -9.0)
    k[0, 0, 0] = 3.0
    v = torch.eye(T)[None, None, :, :1]
    left = (1 - 1 / (1 + math.exp(9.0))) ** (T - 1)
    assert abs(StickBreaking.apply(q, k, v, 8).item() - left / (1 + math.exp(-3.0))) < 1e-5


@NO_BF16
def test_stick_breaking_in_bfloat16():
    exact = qkv(200, 2, past=20, B=1, H=1, d=16, dtype=torch.bfloat16)
    rough = [x.detach().clone().requires_grad_() for x in exact]
    exact = [x.detach().double().requires_grad_() for x in exact]
    assert stick_weights(*rough[:2], 20)[1].dtype == torch.float32
    grad = torch.randn(1, 1, 200, 2, 16).bfloat16()
    found = []
    for inputs in (exact, rough):
        out = StickBreaking.apply(*inputs, 64)
        assert out.dtype == inputs[0].dtype
        found.append([out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))])
    for a, b in zip(*found):
        assert (a - b).abs().max() < 2e-2 * a.abs().max()


@NO_BF16
def test_blocks_add_up_in_float32():
    """A key that all queries read, gradients of one sign: what the last of 128 blocks add is not lost."""
    q, k, v = (x.detach().bfloat16() for x in qkv(512, 1, B=1, H=1, d=16))
    q[...], k[..., :] = 1.0, -2.0                        # few keys match
    k[:, :, 0] = 2.0                                     # but the first one does
    rough = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    grad = torch.rand(1, 1, 512, 1, 16).bfloat16()
    for size in (512, 4):
        a = torch.autograd.grad(StickBreaking.apply(*rough, size), rough, grad)
        b = torch.autograd.grad(StickBreaking.apply(*exact, size), exact, grad.double())
        for x, y in zip(a[1:], b[1:]):
            assert (x - y).abs().max() < 6e-3 * y.abs().max()


class Watch(TorchDispatchMode):
    """The largest tensor that any operation makes, and the most memory in use, of tensors over 64 KB."""

    def __init__(self):
        super().__init__()
        self.largest = self.peak = 0
        self.alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() > 2**16:
                storage = x.untyped_storage()
                self.largest = max(self.largest, storage.nbytes())
                self.alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: ref for key, ref in self.alive.items() if not ref[0].expired()}
        self.peak = max(self.peak, sum(n for _, n in self.alive.values()))
        return out


@pytest.mark.parametrize('T, size', [(2048, 32), slow(4096, 64)])
def test_memory_is_bounded_by_the_query_block(T, size, monkeypatch):
    """Forward and backward: nothing is larger than a block's weights, and few of those live at one time."""
    saved, seen = {}, []

    def record(q, k, first):
        seen.append(k.size(2))
        return stick_weights(q, k, first)
    monkeypatch.setattr(moduleformer, 'stick_weights', record)
    inputs = [x.detach().float().requires_grad_() for x in qkv(T, 1, B=1, H=1, d=4)]

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    with Watch() as watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = StickBreaking.apply(*inputs, size)
        held = watch.peak
        out.sum().backward()
    block, one = 4 * size * T, 4 * T * 4                 # bytes: a block's weights; one of q, k, v
    assert watch.largest <= block and held < 10 * block
    assert watch.peak < 16 * block < 4 * T * T / 3       # all weights, kept, would be half of T * T floats
    assert sum(saved.values()) <= 3 * one
    assert sorted(seen) == sorted([*range(size, T + 1, size)] * 2)       # later keys cost nothing


# ---- The whole model -----------------------------------------------------------------------------


QUICK = [dict(), dict(n_head=1, top_k=1), WIDE, dict(new=(2, 0), n_att=[3, 2])]
MORE = [dict(n_head=4, top_k=4, n_ffd=4), dict(n_att=[2, 4], n_ffd=[5, 3]), dict(new=(1, 2)),
        dict(new=(0, 1), top_k=3), dict(n_layer=3, query_block=1)]


@pytest.mark.parametrize('changes', [dict(), dict(new=(1, 2)), dict(n_att=[2, 4], n_ffd=[5, 3])], ids=str)
def test_sparse_is_dense(changes):
    """Only the chosen modules computed, against all of them on every token."""
    model, x, y = make(**changes), tokens(T=7), tokens(T=7, seed=2)
    dense = ModuleFormer(ModuleFormerConfig(**{**asdict(model.config), 'sparse': False})).double()
    dense.load_state_dict(model.state_dict())
    for m in (model, dense):
        logits, _, aux = m(x)
        (F.cross_entropy(logits.flatten(0, 1), y.flatten()) + sum(aux.values())).backward()
    torch.testing.assert_close(dense(x)[0], model(x)[0], rtol=1e-11, atol=1e-11)
    for a, b in zip(dense.parameters(), model.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-11)
    routes = dense.routes(x)
    for name, gate in model.routes(x).items():
        assert torch.allclose(routes[name], gate) and ((gate != 0).sum(-1) == 2).all()


@pytest.mark.parametrize('changes', [*QUICK, *map(slow, MORE)], ids=str)
def test_oracle(changes):
    """Logits, loss, every aux loss, every gradient, and the routes."""
    model, x, y = make(**changes), tokens(T=5), tokens(T=5, seed=2)
    y[0, 3] = -1
    logits, aux, gates = oracle(model, x)
    kept = y.flatten() >= 0
    loss = F.cross_entropy(logits.flatten(0, 1)[kept], y.flatten()[kept])
    weights = dict(mi=0.7, concentration=0.3, rout_reg=0.2)
    objective = loss + sum(weights[name] * aux[name] for name in aux)
    grads = torch.autograd.grad(objective, list(model.parameters()), materialize_grads=True)
    assert torch.allclose(model(x)[0], logits, rtol=0, atol=1e-10) and model(x)[1] is None
    none, fast_loss, fast_aux = model(x, y)
    assert none is None and abs(fast_loss - loss) < 1e-10
    assert list(fast_aux) == list(aux) and ('rout_reg' in aux) == ('new' in changes)
    assert all(v.dim() == 0 and abs(v - aux[name]) < 1e-10 for name, v in fast_aux.items())
    (fast_loss + sum(weights[name] * fast_aux[name] for name in aux)).backward()
    for (name, p), g in zip(model.named_parameters(), grads, strict=True):
        assert torch.allclose(p.grad, g, rtol=0, atol=1e-10), name
        assert g.abs().max() > 1e-6 or 'inserted' in name, name          # nothing else here is out of reach
    found = model.routes(x)
    assert list(found) == list(gates) and not any(m._forward_hooks for m in model.modules())
    for name, gate_BTE in found.items():
        for got, want in zip(gate_BTE.flatten(0, 1), gates[name], strict=True):
            assert got.nonzero().flatten().tolist() == sorted(want)      # as multiplied in: not renormalised
            assert all(abs(got[e] - want[e]) < 1e-12 for e in want)
            assert got.sum() < 1 - 1e-9 or len(want) == len(got)


@pytest.mark.parametrize('changes', [slow({}), slow(WIDE), dict(new=(1, 1))], ids=str)
def test_all_tokens_to_the_same_modules(changes):
    """The most unequal groups there can be: no token is dropped; idle modules have gradients of zero."""
    model, x = make(**changes), tokens(3, 8)
    with torch.no_grad():
        for b in model.blocks:
            for router in (b.att.router, b.ffd.router):
                router.A.weight.mul_(0.01)
                router.A.weight[1] += 40
                router.A.weight[2] += 20
    logits, _, gates = oracle(model, x)
    assert all(sorted(g) == [1, 2] for log in gates.values() for g in log)
    assert torch.allclose(model(x)[0], logits, rtol=0, atol=1e-10)
    model(x, x.roll(-1, 1))[1].backward()
    for b in model.blocks:
        for stack in (b.att.q, b.att.o, b.ffd.fc, b.ffd.down):
            for e, grad in enumerate(stack.weight.grad):
                assert (grad.abs().max() > 0) == (e in (1, 2))
            assert stack.inserted is None or (stack.inserted.grad == 0).all()


def test_dispatch_by_hand():
    gates = torch.tensor([[1.0, 2], [0, 3], [1, 0]])
    rows = Rows(gates, torch.tensor([[2, 0], [2, 3], [0, 2]]), 5, sparse=True)
    assert rows.ends_E.tolist() == [2, 2, 5, 6, 6] and rows.ends_E.dtype == torch.int32
    x = torch.arange(3.0)[:, None]
    assert rows.spread(x).flatten().tolist() == [0, 2, 0, 1, 2, 1]
    pairs = torch.arange(6.0).view(3, 2, 1)
    assert rows.sort(pairs).flatten().tolist() == [1, 4, 0, 2, 5, 3]
    assert torch.equal(rows.restore(rows.sort(pairs)), pairs)
    assert rows.combine(rows.sort(pairs)).flatten().tolist() == [2, 9, 4]


@pytest.mark.parametrize('T', [12, 1])                   # one token leaves modules without work
def test_float32_through_grouped_mm_is_the_float64_loop(T, monkeypatch):
    rows = []
    kernel = F.grouped_mm

    def record(x, w, offs):
        if w.dim() == 3:                                 # not the gradient of w
            rows.append(len(x))
        return kernel(x, w, offs=offs)
    monkeypatch.setattr(F, 'grouped_mm', record)
    single, x = make(dtype=torch.float32), tokens(3 if T > 1 else 1, T)
    double = copy.deepcopy(single).double()
    pairs = []
    for model in (single, double):
        _, loss, aux = model(x, x.flip(1))
        (loss + aux['mi']).backward()
        pairs.append([model(x)[0], *(p.grad for p in model.parameters())])
    assert len(rows) == 4 * 2 * 3                        # of float32 alone: 4 per block, two passes, gradient
    assert set(rows) == {2 * x.numel()}                  # of the chosen rows alone
    for i, (a, b) in enumerate(zip(*pairs, strict=True)):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-7, i


# ---- Losses --------------------------------------------------------------------------------------


def plain_router():
    """h(x) = ReLU(x)."""
    router = Router(3, 0, SimpleNamespace(n_embd=3, d_router=3, top_k=2))
    with torch.no_grad():
        router.B.weight.copy_(torch.eye(3))
        router.A.weight.copy_(torch.eye(3))
    return router


def test_losses_by_hand():
    router = plain_router()
    prob = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.1, 0.7]])
    gate, choice, found = router(prob.log() + 5)         # past the ReLU; softmax undoes logarithm and shift
    assert choice.tolist() == [[0, 1], [2, 0]]
    assert torch.allclose(gate, torch.tensor([[0.6, 0.3], [0.7, 0.2]]))
    assert list(found) == ['mi', 'concentration']
    H = -(0.4 * math.log(0.4) + 0.2 * math.log(0.2) + 0.4 * math.log(0.4))
    given = -sum(p * math.log(p) for p in prob.flatten().tolist()) / 2
    assert abs(found['concentration'].item() - H) < 1e-6
    assert abs(found['mi'].item() - (given - H)) < 1e-6
    found = router(99 * torch.eye(3))[2]                 # sharp and balanced: the least there is
    assert abs(found['mi'].item() + math.log(3)) < 1e-5
    assert abs(found['concentration'].item() - math.log(3)) < 1e-5
    found = router(99 * torch.eye(3)[[1, 1]])[2]         # collapsed
    assert abs(found['mi'].item()) < 1e-5 and abs(found['concentration'].item()) < 1e-5
    wide = Router(3, 2, SimpleNamespace(n_embd=3, d_router=3, top_k=2))
    with torch.no_grad():
        for p in wide.parameters():
            p.copy_(torch.arange(float(p.numel())).view_as(p))
    assert wide(torch.randn(4, 3))[2]['rout_reg'].item() == 0 + 1 + 4 + 9 + 16 + 25


def test_losses_survive_a_certain_router():
    router = plain_router()
    x = (1e4 * torch.eye(3)[[1, 1]]).requires_grad_()
    gate, _, found = router(x)
    (gate.sum() + found['mi'] + found['concentration']).backward()
    for grad in (x.grad, router.A.weight.grad, router.B.weight.grad):
        assert grad.isfinite().all()
    assert abs(found['mi']) < 1e-6 and abs(found['concentration']) < 1e-6


@pytest.mark.parametrize('name', ['mi', 'concentration'])
def test_what_minimising_does(name):
    """mi: modules used alike, each token sure of its own; concentration: fewer modules."""
    torch.manual_seed(0)
    router = Router(4, 0, SimpleNamespace(n_embd=8, d_router=16, top_k=2))
    x = torch.randn(64, 8)
    for p in router.parameters():
        torch.nn.init.normal_(p, std=0.5)
    optimizer = torch.optim.Adam(router.parameters(), lr=0.02)

    def entropy(p):
        return -(p * (p + 1e-12).log()).sum(-1)

    def entropies():
        prob = (F.relu(x @ router.B.weight.T) @ router.A.weight.T).softmax(-1)
        return entropy(prob.mean(0)).item(), entropy(prob).mean().item()
    before = entropies()
    for _ in range(150):
        optimizer.zero_grad()
        router(x)[2][name].backward()
        optimizer.step()
    marginal, given = entropies()
    if name == 'mi':
        assert marginal > 0.98 * math.log(4) and marginal > before[0] and given < 0.2 * before[1]
    else:
        assert marginal < 0.05


# ---- Protocol ------------------------------------------------------------------------------------


MODELS = [dict(), WIDE, dict(new=(1, 1), n_att=[2, 4])]


@pytest.mark.parametrize('changes', MODELS, ids=str)
def test_causal_batched_and_cache_in_pieces(changes):
    model, x = make(**changes).eval(), tokens(3, 16)
    full = model(x)[0]
    for t in (5, 15):
        changed = x.clone()
        changed[:, t] = (changed[:, t] + 1) % 37
        difference = (model(changed)[0] - full).abs().amax((0, 2))
        assert difference[:t].sum() < 1e-12 and (difference[t:] > 1e-9).all()
    embedded = []
    hook = model.wte.register_forward_hook(lambda *a: embedded.append(a[2].retain_grad() or a[2]))
    model(x)[0][:, 9].square().sum().backward()
    hook.remove()
    reach = embedded[0].grad.abs().amax((0, 2))
    assert (reach[10:] == 0).all() and (reach[:10] > 0).all()
    assert torch.allclose(full, torch.cat([model(row[None])[0] for row in x]), rtol=0, atol=1e-12)
    cache = []
    pieces = [model(part, cache=cache)[0] for part in x.split([5, 1, 7, 3], dim=1)]
    assert torch.allclose(full, torch.cat(pieces, 1), rtol=0, atol=1e-12)
    c = model.config
    shape = (3, c.n_head, 16, c.d_att // c.n_head)
    assert len(cache) == 2 and all(k.shape == v.shape == shape for k, v in cache)


def last(cache, n):
    """What train.py keeps for the next segment: n keys and values, without their gradients."""
    return [(k[:, :, -n:].detach(), v[:, :, -n:].detach()) for k, v in cache]


@pytest.mark.parametrize('changes', [dict(), WIDE], ids=str)
def test_segment_memory(changes):
    """At depth 3: a first segment of T, a second with its keys and values = one pass of 2T. Cut shorter, not
    the same."""
    model, x, y = make(n_layer=3, **changes).eval(), tokens(2, 16), tokens(2, 16, seed=2)
    whole = model(x)[0]
    cache = []
    first = model(x[:, :8], cache=cache)[0]
    memory = last(cache, 8)
    assert torch.allclose(whole[:, :8], first, rtol=0, atol=1e-12)
    shorter = last(memory, 3)
    second = model(x[:, 8:], cache=memory)[0]
    assert torch.allclose(whole[:, 8:], second, rtol=0, atol=1e-12) and memory[0][0].size(2) == 16
    assert (model(x[:, 8:], cache=shorter)[0] - second).abs().max() > 1e-6
    memory = last(memory, 8)                             # in training: a third segment, gradients within it
    loss = model(y[:, :8], y[:, 1:9], cache=memory)[1]
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert abs(loss - model(y[:, :8], y[:, 1:9])[1]) > 1e-6


def test_any_length():
    """Four times the block size, in one pass; the first tokens do not notice."""
    model, x = make().eval(), tokens(2, 32)
    logits = model(x)[0]
    assert logits.shape == (2, 32, 37)
    assert torch.allclose(logits[:, :8], model(x[:, :8])[0], rtol=0, atol=1e-12)
    assert model.generate(x, 5, temperature=0).shape == (2, 37)


def uncached(model, idx, n, temperature, top_k=None):
    for _ in range(n):
        logits = model(idx)[0][:, -1].float()
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            allowed = logits.sort(descending=True).indices[:, :top_k]
            logits = torch.full_like(logits, -math.inf).scatter(1, allowed, logits.gather(1, allowed))
            new = torch.multinomial((logits / temperature).softmax(-1), 1)
        idx = torch.cat((idx, new), 1)
    return idx


@pytest.mark.parametrize('changes, start', [
    (dict(), 1), slow(WIDE, 13), slow(dict(), 13), slow(WIDE, 1), slow(MODELS[2], 1), slow(MODELS[2], 13)])
def test_cached_generation_is_uncached(changes, start):
    model, x = make(2, **changes).eval(), tokens(2, start)
    out = model.generate(x, 12, temperature=0)
    assert torch.equal(out, uncached(model, x, 12, 0)) and torch.equal(out[:, :start], x)
    assert len(set(out[:, start:].flatten().tolist())) > 4               # not one token for ever
    for args in ((1.0,), (0.7, 5)):
        torch.manual_seed(3)
        out = model.generate(x, 12, *args)
        torch.manual_seed(3)
        assert torch.equal(out, uncached(model, x, 12, *args))
    assert torch.equal(model.generate(x, 8, top_k=1), model.generate(x, 8, temperature=0))
    assert model.generate(x, 3, top_k=1000).shape == (2, start + 3)      # more than the vocabulary: all of it


def test_reduction_and_ignored_targets():
    model, x, y = make(), tokens(), tokens(seed=2)
    y[:, ::3] = -1
    each = model(x, y, reduction='none')[1]
    want = -model(x)[0].log_softmax(-1).gather(2, y.clamp(min=0)[:, :, None])[:, :, 0]
    assert each.shape == y.shape and torch.allclose(each, want * (y >= 0), rtol=0, atol=1e-12)
    assert abs(model(x, y)[1] - each[y >= 0].mean()) < 1e-12


def test_eval_and_training_draw_nothing():
    model, x = make(), tokens()
    state = torch.get_rng_state()
    assert torch.equal(model(x)[0], model.eval()(x)[0])
    model.routes(x), model.generate(x, 3, temperature=0), count_usage(model, [(x, x)])
    assert torch.equal(state, torch.get_rng_state())


def test_params_by_hand():
    D, A, V, Ff, R = 16, 8, 37, 12, 16
    att, ffd = 2 * D * A, 2 * D * Ff
    base = 2 * (2 * 2 * D + 2 * R * D + 2 * D * A) + 2 * D + V * D       # norms, two B, kv; last norm, head
    assert make().count_params() == (base + 2 * (4 * (att + R) + 5 * (ffd + R)) + V * D,
                                     base + 2 * (2 * (att + ffd) + (4 + 5) * R))
    listed = make(n_att=[2, 4], n_ffd=[5, 3], new=(1, 2))
    assert listed.count_params() == (base + (3 + 5) * (att + R) + (7 + 5) * (ffd + R) + V * D,
                                     base + 2 * 2 * (att + ffd) + (3 + 5 + 7 + 5) * R)
    narrow = make(identity_kv=True, d_att=16, n_head=1, top_k=4)
    base += 2 * (-2 * D * A)                             # no kv
    assert narrow.count_params() == (base + 2 * (4 * (2 * D * D + R) + 5 * (ffd + R)) + V * D,
                                     base + 2 * (4 * (2 * D * D + ffd) + (4 + 5) * R))


@pytest.mark.parametrize('n_layer, top_k, total, active', [
    slow(24, 2, 4e9, 350e6), slow(24, 4, 4e9, 700e6), slow(48, 2, 8e9, 700e6)])
def test_sizes_of_the_paper(n_layer, top_k, total, active):
    """Table 1; and the trainable parameters of Tables 4 and 5 (MoLM-4B-K4)."""
    with torch.device('meta'):
        model = ModuleFormer(ModuleFormerConfig(**MOLM, n_layer=n_layer, top_k=top_k))
        found = model.count_params()
        assert abs(found[0] / total - 1) < 0.1 and abs(found[1] / active - 1) < 0.1
        if top_k == 4:
            for router, millions in (('partial', 151), ('full', 266)):
                new = insert_experts(model, router=router)
                trained = sum(p.numel() for p in new.parameters() if p.requires_grad)
                assert abs(trained / (millions * 1e6) - 1) < 0.01


def test_initialisation():
    torch.manual_seed(0)
    shape = dict(vocab_size=512, n_layer=4, n_embd=128, d_att=64, d_ffd=256, d_router=64)
    old = ModuleFormer(ModuleFormerConfig(**shape))
    for model in (old, insert_experts(old, 2, 2)):
        for name, p in model.named_parameters():
            if 'ln_' in name:
                assert (p == ('weight' in name)).all(), name
                continue
            fan_in = dict(q=128, o=64, fc=128, down=256, kv=128, B=128).get(name.split('.')[-2])
            std = 1 / math.sqrt(fan_in) if fan_in else 0.02
            std /= math.sqrt(8) if '.o.' in name or '.down.' in name else 1
            assert abs(p.std() / std - 1) < (0.25 if '.A.' in name else 0.03), name


SIZES = ['vocab_size', 'block_size', 'n_layer', 'n_embd', 'd_att', 'n_head', 'd_ffd', 'top_k', 'd_router',
         'query_block', 'n_att', 'n_ffd']


@pytest.mark.parametrize('wrong, word', [
    *[({name: 0}, name) for name in SIZES], (dict(n_head=3), 'heads'), (dict(top_k=5), 'top_k'),
    (dict(n_att=[4]), 'n_att'), (dict(n_ffd=[4, 4, 4]), 'n_ffd'), (dict(n_att=[1, 4]), 'n_att'),
    (dict(n_ffd=[4, 1]), 'n_ffd'), (dict(new_att=-1), 'new_att'), (dict(new_ffd=-1), 'new_ffd'),
    (dict(dropout=1.0), 'dropout'), (dict(dropout=-0.1), 'dropout'),
    (dict(identity_kv=True), 'identity_kv'), (dict(WIDE, n_head=2), 'identity_kv')], ids=str)
def test_config_errors(wrong, word):
    ModuleFormerConfig(**SMALL)
    with pytest.raises(ValueError, match=word):
        ModuleFormerConfig(**{**SMALL, **wrong})


def test_dropout_places():
    """On the embeddings and on what each pool adds, in training only; usage is counted without it."""
    model, x, seen = make(dropout=0.5), tokens(), []
    plain = make()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, args, out: seen.append((out == 0).any().item()))
    assert not torch.equal(model(x)[0], model(x)[0]) and seen == [True] * 2 * (1 + 2 * 2)
    usage = count_usage(model, [(x, x)])
    assert model.training and not any(seen[10:])
    assert all(torch.equal(usage[name], count) for name, count in count_usage(plain, [(x, x)]).items())
    assert torch.equal(model.eval()(x)[0], plain(x)[0])


# ---- Precision, compilation ----------------------------------------------------------------------


@pytest.mark.slow
@NO_BF16
@pytest.mark.parametrize('changes', [dict(), dict(WIDE, query_block=8)], ids=str)
def test_bfloat16_autocast_and_one_graph(compile_model, changes):
    """Under autocast modules compute in bfloat16, the router in float32; one graph, no value is read.
    In float32 it breaks; what it computes then is compared in test_compiled.py."""
    every = dict(d_ffd=16, n_att=3, n_ffd=3, top_k=3)    # widths in multiples of 8; K = E: no choice flips
    torch.manual_seed(0)
    model, x = ModuleFormer(ModuleFormerConfig(**{**SMALL, **every, **changes})), tokens(2, 8)
    seen, graphs = [], []
    exact = model(x, x)[1]
    exact.backward()
    exact_grads = [p.grad.clone() for p in model.parameters()]

    def backend(graph, inputs):                          # as backend='aot_eager', and the graph is kept
        graphs.append(graph)
        return torch._dynamo.lookup_backend('aot_eager')(graph, inputs)
    compiled = compile_model(model, backend=backend, fullgraph=True)
    hooks = [m.register_forward_hook(lambda m, a, out: seen.append((a[0].dtype, out[0].dtype)))
             for m in model.modules() if isinstance(m, Router)]
    for m in (model, compiled):
        model.zero_grad()
        with torch.autocast('cpu', torch.bfloat16):
            _, loss, aux = m(x, x)
        assert 0 < abs(loss - exact) < 0.01 * exact and loss.dtype == torch.float32
        assert all(v.dtype == torch.float32 for v in aux.values())
        (loss + 0 * aux['mi']).backward()
        for (name, p), g in zip(model.named_parameters(), exact_grads):
            assert p.grad.dtype == torch.float32 and p.grad.isfinite().all(), name
            assert (p.grad - g).norm() < 0.05 * g.norm(), name
        if m is model:
            assert seen == [(torch.float32, torch.float32)] * 4          # the second pass is traced
            for hook in hooks:
                hook.remove()
    assert len(graphs) == 1
    called = {str(node.target) for node in graphs[0].graph.nodes}        # fullgraph alone lets .item() pass
    assert not called & {'item', 'tolist', '_local_scalar_dense'}


# ---- Insertion -----------------------------------------------------------------------------------


def close_router(model, modules):
    """{layer: modules}: their logits are -10^6 times a positive number, their probabilities exactly 0."""
    with torch.no_grad():
        for layer, closed in modules.items():
            A = model.get_submodule(layer).router.A
            for e in closed:
                rows_of(A)[e].fill_(-1e6)
    return model


@pytest.mark.parametrize('router', ['full', 'partial'])
@pytest.mark.parametrize('changes', [dict(), dict(WIDE, n_att=[2, 4])], ids=str)
def test_inserted_modules_that_nobody_takes_change_nothing(router, changes):
    old, x = make(**changes).eval(), tokens(3, 8)
    before = copy.deepcopy(old.state_dict())
    new = insert_experts(old, 2, 1, router)
    assert new.config.new_att == 2 and new.config.new_ffd == 1 and not new.training
    assert not torch.allclose(new(x)[0], old(x)[0], atol=1e-3)           # as they come, they are taken
    sizes = {name: gate.size(-1) for name, gate in old.routes(x).items()}
    close_router(new, {name: [n, n + 1] if 'att' in name else [n] for name, n in sizes.items()})
    assert torch.allclose(new(x)[0], old(x)[0], rtol=0, atol=1e-12)
    for name, loss in old(x)[2].items():
        assert abs(new(x)[2][name] - loss) < 1e-7
    for p in new.parameters():
        torch.nn.init.zeros_(p)
    assert all(torch.equal(p, before[n]) for n, p in old.state_dict().items())   # a copy


def train_20(model, **weights):
    s = Settings(learning_rate=1e-2)
    optimizer = train.make_optimizer(model, s, SimpleNamespace(device=torch.device('cpu'), cuda=False))
    x = tokens(4, 8, seed=5)
    for _ in range(20):
        optimizer.zero_grad()
        _, loss, aux = model(x, x.roll(-1, 1))
        (loss + sum(weight * aux[name] for name, weight in weights.items())).backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize('router', ['full', 'partial'])
def test_frozen_stays_bit_equal(router):
    """20 steps of AdamW with weight decay: what is frozen does not move, everything else does."""
    model = insert_experts(make(dtype=torch.float32), 1, 2, router)
    x = tokens(4, 8, seed=5)
    first = model(x, x.roll(-1, 1))[1]
    before = copy.deepcopy(model.state_dict())
    assert train_20(model, mi=0.01, rout_reg=0.01) < first
    for name, p in model.named_parameters():
        shared = name in ('wte.weight', 'head.weight') or 'router.A' in name or 'router.B' in name
        trains = 'inserted' in name or (router == 'full' and shared)
        assert p.requires_grad == trains and (p.grad is not None) == trains, name
        assert torch.equal(p, before[name]) != trains, name
        if 'inserted' in name and 'router' not in name:
            assert all(not torch.equal(a, b) for a, b in zip(p, before[name])), name
    assert torch.equal(rebuilt(model)(x)[0], model(x)[0])


@pytest.mark.slow
def test_routing_regularisation_restrains_new_modules():
    free, held = (insert_experts(make(dtype=torch.float32), 1, 1, 'partial') for _ in range(2))
    train_20(free)
    train_20(held, rout_reg=1.0)
    assert held(tokens())[2]['rout_reg'] < free(tokens())[2]['rout_reg']


def test_inserting_twice_and_absorbing():
    x, model = tokens(3, 8), make(new=(1, 2), n_att=[2, 4]).eval()
    flat = absorb_inserted(model)
    assert flat.config.n_att == [3, 5] and flat.config.n_ffd == [7, 7]
    assert flat.config.new_att == flat.config.new_ffd == 0
    assert torch.equal(flat(x)[0], model(x)[0]) and flat.count_params() == model.count_params()
    assert all(torch.equal(a, b) for a, b in zip(flat.routes(x).values(), model.routes(x).values()))
    assert model.config.n_att == [2, 4] and model.blocks[0].att.q.inserted is not None   # left alone
    twice = insert_experts(model, 2, 0, 'partial')
    assert (twice.config.n_att, twice.config.new_att, twice.config.new_ffd) == ([3, 5], 2, 0)
    close_router(twice, {'blocks.0.att': [3, 4], 'blocks.1.att': [5, 6]})
    assert torch.allclose(twice(x)[0], model(x)[0], rtol=0, atol=1e-12)
    assert {n for n, p in twice.named_parameters() if p.requires_grad} == {
        f'blocks.{i}.att.{part}.inserted' for i in range(2) for part in ('q', 'o', 'router.A')}
    for m in (model, flat, twice, insert_experts(make(), 0, 3)):
        assert torch.equal(rebuilt(m)(x)[0], m(x)[0])
        assert m.generate(x, 2).shape == (3, 10)
    assert 'rout_reg' not in flat(x)[2]


def test_insertion_errors():
    model = make()
    with pytest.raises(ValueError, match='full or partial'):
        insert_experts(model, router='half')
    for wrong in ((0, 0), (-1, 2), (2, -1), (0.5, 1)):
        with pytest.raises(ValueError, match='not both 0'):
            insert_experts(model, *wrong)
    new = insert_experts(model)
    assert new.config.new_att == new.config.new_ffd == 1
    assert new.wte.weight.requires_grad                  # one of each, full


# ---- Pruning -------------------------------------------------------------------------------------


# token -> its first and second module
TABLE = dict(att=[[0, 1], [0, 2], [0, 1], [0, 1], [3, 0], [1, 2]],
             ffd=[[4, 0], [4, 0], [4, 0], [4, 1], [2, 4], [4, 0]])


def forced(new=0):
    """A model whose routes can be read off TABLE: tokens are one-hot, no module writes, a router looks its
    token up. In the second layer the modules stand in reverse. The last `new` of them are inserted ones."""
    c = dict(vocab_size=6, n_embd=6, n_att=4 - new, n_ffd=5 - new, d_att=6, n_head=2, d_router=6)
    model = ModuleFormer(ModuleFormerConfig(**{**SMALL, **c}))
    model = insert_experts(model, new, new) if new else model
    with torch.no_grad():
        model.wte.weight.copy_(torch.eye(6))
        for i, b in enumerate(model.blocks):
            for pool, part in (('att', b.att), ('ffd', b.ffd)):
                n = 4 if pool == 'att' else 5
                out = part.o if pool == 'att' else part.down
                for p in out.parameters():
                    p.zero_()
                part.router.B.weight.copy_(torch.eye(6))
                A = torch.zeros(n, 6)
                for token, (first, second) in enumerate(TABLE[pool]):
                    A[first, token], A[second, token] = 3, 2
                A = A.flip(0) if i else A
                part.router.A.weight.copy_(A[:n - new])
                if new:
                    part.router.A.inserted.copy_(A[n - new:])
    return model


def forced_batches():
    """Of the tokens 0 0 1 2 3 4 | 5 5 5 3, those with a target: 0 0 1 2 4 | 3."""
    return [(torch.tensor([[0, 0, 1], [2, 3, 4]]), torch.tensor([[0, 1, 2], [3, -1, 5]])),
            (torch.tensor([[5, 5, 5, 3]]), torch.tensor([[-1, -1, -1, 0]]))]


COUNTS = dict(att=[6, 4, 1, 1], ffd=[4, 1, 1, 0, 6])


@pytest.mark.parametrize('new', [0, 1])
def test_count_usage_by_hand(new):
    model = forced(new).train()
    usage = count_usage(model, iter(forced_batches()))
    assert model.training and not count_usage(model.eval(), []) and not model.training
    assert list(usage) == ['blocks.0.att', 'blocks.0.ffd', 'blocks.1.att', 'blocks.1.ffd']
    for i in range(2):
        for pool, want in COUNTS.items():
            assert usage[f'blocks.{i}.{pool}'].tolist() == (want[::-1] if i else want)


@pytest.mark.parametrize('new', [0, 1])
@pytest.mark.parametrize('threshold, normalise, kept', [
    (0.2, 'max', dict(att=[0, 1], ffd=[0, 4])), (0.16, 'max', dict(att=[0, 1, 2, 3], ffd=[0, 1, 2, 4])),
    (1 / 12, 'sum', dict(att=[0, 1, 2, 3], ffd=[0, 1, 2, 4])), (0.09, 'sum', dict(att=[0, 1], ffd=[0, 4])),
    (9.0, 'max', dict(att=[0, 1], ffd=[0, 4])), (0.0, 'sum', dict(att=[0, 1, 2, 3], ffd=[0, 1, 2, 3, 4])),
    (0.7, 'max', dict(att=[0, 1], ffd=[0, 4]))])         # at least K stay; at the threshold is not below it
def test_prune_by_hand(new, threshold, normalise, kept):
    model = forced(new)
    before = copy.deepcopy(model.state_dict())
    pruned, table = prune_experts(model, threshold=threshold, normalise=normalise, batches=forced_batches())
    flat = absorb_inserted(model).state_dict()
    for i in range(2):
        for pool, parts in (('att', ('q', 'o', 'router.A')), ('ffd', ('fc', 'down', 'router.A'))):
            n = 4 if pool == 'att' else 5
            stay = sorted(n - 1 - e for e in kept[pool]) if i else kept[pool]
            for part in parts:
                name = f'blocks.{i}.{pool}.{part}.weight'
                assert torch.equal(pruned.state_dict()[name], flat[name][stay]), name
    assert pruned.config.n_att == [len(kept['att'])] * 2 and pruned.config.n_ffd == [len(kept['ffd'])] * 2
    for name in ('wte.weight', 'head.weight', 'ln_f.weight', 'blocks.1.att.kv.weight',
                 'blocks.0.ffd.router.B.weight'):
        assert torch.equal(pruned.state_dict()[name], before[name])
    assert list(table) == [dict(layer=f'blocks.{i}.{pool}', before=n, after=len(kept[pool]))
                           for i in range(2) for pool, n in (('att', 4), ('ffd', 5))]
    share = sum(p.numel() for p in pruned.parameters()) / sum(p.numel() for p in model.parameters())
    assert abs(table.left - share) < 1e-9 and f'{100 * share:.1f}%' in str(table)
    assert str(table).splitlines()[2].split() == ['blocks.0.ffd', str(len(kept['ffd'])), 'of', '5']
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())     # a copy
    again, _ = prune_experts(model, count_usage(model, forced_batches()), threshold, normalise)
    assert all(torch.equal(p, again.state_dict()[n]) for n, p in pruned.state_dict().items())


@pytest.mark.parametrize('changes', [dict(), dict(new=(1, 2)), WIDE], ids=str)
def test_pruned_is_the_model_with_those_modules_closed(changes):
    """A router row that is gone leaves the softmax over the others: what a logit of -inf does. Where a token
    had chosen only modules that stay, it takes the same ones, with gates that share out the lost probability
    alike."""
    model, x = make(**changes).eval(), tokens(4, 8)
    before = model.routes(x)['blocks.0.att']
    a, b = (before.flatten(0, 1) > 0).sum(0).topk(2).indices.sort().values.tolist()
    keep = {'blocks.0.att': [a, b], 'blocks.0.ffd': [0, 2, 4], 'blocks.1.att': [0, 2, 3],
            'blocks.1.ffd': [1, 3]}
    usage, gone = {}, {}
    for name, gate in model.routes(x).items():
        usage[name] = torch.tensor([9 if e in keep[name] else 0 for e in range(gate.size(-1))])
        gone[name] = [e for e in range(gate.size(-1)) if e not in keep[name]]
    pruned, table = prune_experts(model, usage)
    assert [row['after'] for row in table] == [2, 3, 3, 2] and not pruned.training
    assert pruned.config.n_att == [2, 3] and pruned.config.n_ffd == [3, 2] and pruned.config.new_att == 0
    closed = close_router(copy.deepcopy(model), gone)
    assert torch.allclose(pruned(x)[0], closed(x)[0], rtol=0, atol=1e-11)
    assert not torch.allclose(pruned(x)[0], model(x)[0], atol=1e-3)
    after = pruned.routes(x)['blocks.0.att']
    same = (before[..., [a, b]] > 0).all(-1)
    gates = before[..., [a, b]][same]
    assert same.any() and (after[same] > gates).all()
    assert torch.allclose(after[same], gates / gates.sum(-1, keepdim=True))      # K of K are left
    again, _ = prune_experts(closed, batches=[(x, x)], threshold=1e-9)
    assert torch.allclose(again(x)[0], closed(x)[0], rtol=0, atol=1e-11)         # they had no probability


def test_a_pruned_model_is_a_model():
    """It rebuilds, samples, trains, takes new modules, and is pruned again."""
    model, x = make(dtype=torch.float32), tokens(3, 8)
    pruned, _ = prune_experts(insert_experts(model, 1, 1, 'partial'), threshold=0.5, batches=[(x, x)])
    again = rebuilt(pruned)
    assert torch.equal(again(x)[0], pruned(x)[0])
    assert pruned.generate(x, 3).shape == (3, 11) and pruned.training
    assert all(p.requires_grad for p in pruned.parameters())
    new = insert_experts(pruned, 1, 1)
    y = tokens(4, 8, seed=5)                             # what train_20 trains on
    assert train_20(pruned, concentration=0.001) < again(y, y.roll(-1, 1))[1]
    twice, table = prune_experts(new, threshold=9, batches=[(x, x)])
    assert all(row['after'] == 2 for row in table) and rebuilt(twice)(x)[0].shape == (3, 8, 37)


def test_surgery_keeps_a_router_of_your_own():
    class Sharp(Router):
        def forward(self, x_ND):
            return super().forward(8 * x_ND)

    class Mine(ModuleFormer):
        router = Sharp
    torch.manual_seed(0)
    model, x = Mine(ModuleFormerConfig(**SMALL)), tokens()
    again = absorb_inserted(model)
    assert type(again) is Mine and torch.equal(again(x)[0], model(x)[0])
    assert type(prune_experts(insert_experts(model), batches=[(x, x)])[0]) is Mine


def test_pruning_errors():
    assert ModuleFormerConfig(n_layer=2, n_att=(4, 3)).per_layer((4, 3)) == [4, 3]
    model, x = make().train(), tokens()
    with pytest.raises(ValueError, match='max or sum'):
        prune_experts(model, batches=[(x, x)], normalise='mean')
    for batches in (None, [], [(x, torch.full_like(x, -1))]):
        with pytest.raises(ValueError, match='at least one target'):
            prune_experts(model, batches=batches)
    usage = count_usage(model, [(x, x)])
    for wrong in (dict(list(usage.items())[1:]), {name: count[1:] for name, count in usage.items()}):
        with pytest.raises(ValueError, match='not of this model'):
            prune_experts(model, wrong)
    with pytest.raises(IndexError):                      # ids beyond the vocabulary: an error in between
        count_usage(model, [(x + 99, x)])
    assert model.training and not any(m._forward_hooks for m in model.modules())


def test_pruning_defaults():
    """1% of the most frequent: 10 of 1,000 stays, 5 does not; of the sum, 10 would go too."""
    model = make()
    counts = torch.tensor([5, 1000, 10, 100, 0])
    usage = {name: counts[:gate.size(-1)] for name, gate in model.routes(tokens()).items()}
    assert [row['after'] for row in prune_experts(model, usage)[1]] == [3] * 4
    assert [row['after'] for row in prune_experts(model, usage, normalise='sum')[1]] == [2] * 4
