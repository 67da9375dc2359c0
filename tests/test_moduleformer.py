"""moduleformer.py against a slow version written from the paper's equations: one token, one module
and one key at a time."""

import copy
import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import moduleformer
import test_contract
from moduleformer import (absorb_inserted, break_stick, count_usage, insert_experts, prune_experts,
                          stick_weights)
from oracles import compare, gelu, same_routes, tokens, with_gradients

WIDE = dict(identity_kv=True, d_att=16, n_head=1)        # without maps for keys and values
make = functools.partial(test_contract.make, 'moduleformer', 0.4)
NO_BF16 = pytest.mark.filterwarnings('ignore:mkldnn_matmul failed')   # CPUs without bfloat16 say so


# ---- The slow oracle -----------------------------------------------------------------------------

def attend(q, keys, values):
    """Eq. 3 to 5 for one query and the keys up to its own: the product form, the latest key
    first."""
    beta = [1 / (1 + torch.exp(-(k @ q) / math.sqrt(len(q)))) for k in keys]   # Eq. 3, with a scale
    out = 0
    for i in range(len(keys)):
        p = beta[i]
        for j in range(i + 1, len(keys)):
            p = p * (1 - beta[j])                                                # Eq. 4
        out = out + p * values[i]
    return out


def rows_of(stack):
    return [*stack.weight, *([] if stack.inserted is None else stack.inserted)]


def route(router, x, log):
    """Eq. 1, 2 and 9 for one token -> {module: gate}."""
    hidden = [torch.clamp(b @ x, min=0) for b in router.B.weight]
    if router.config.released:                           # IBM's: a bias, and exact GELU
        hidden = gelu(router.B.weight @ x + router.B.bias)
    score = [torch.exp(sum(a_i * h for a_i, h in zip(a, hidden))) for a in rows_of(router.A)]
    prob = [s / sum(score) for s in score]
    best = sorted(range(len(prob)), key=lambda e: -prob[e].item())[:router.config.top_k]
    log.append((torch.stack(prob), {e: prob[e] for e in best}))
    return {e: prob[e] for e in best}


def norm(ln, x):
    return F.layer_norm(x, x.shape, ln.weight, ln.bias)


def attention_module(att, e, u, t, c):
    """Module e of token t, which sees the normalised inputs u[0..t]; the width is split into n_head
    heads."""
    d = c.d_att // c.n_head
    queries = (rows_of(att.q)[e].T @ u[t]).split(d)
    keys = values = [[x] for x in u[:t + 1]]
    if not c.identity_kv:
        kv = [att.kv.weight @ x + (att.kv.bias if c.released else 0) for x in u[:t + 1]]
        keys, values = [x[:c.d_att].split(d) for x in kv], [x[c.d_att:].split(d) for x in kv]
    heads = [attend(q, [k[h] for k in keys], [v[h] for v in values])
             for h, q in enumerate(queries)]
    return rows_of(att.o)[e].T @ torch.cat(heads)


def ffn_module(ffd, e, x):
    h = gelu(rows_of(ffd.fc)[e].T @ x, tanh=ffd.config.released)
    return rows_of(ffd.down)[e].T @ h


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
    """-> logits (B, T, V), aux, {pool: [(probabilities, {module: gate}) of a token]}"""
    c, out = model.config, []
    logs = {f'blocks.{i}.{pool}': [] for i in range(c.n_layer) for pool in ('att', 'ffd')}
    for row in idx:
        x = [model.wte.weight[i] for i in row]
        for i, b in enumerate(model.blocks):
            u = [norm(b.norm_1, v) for v in x]
            for t in range(len(x)):
                gates = route(b.att.router, u[t], logs[f'blocks.{i}.att'])
                x[t] = x[t] + sum(g * attention_module(b.att, e, u, t, c) for e, g in gates.items())
            for t in range(len(x)):
                v = norm(b.norm_2, x[t])
                gates = route(b.ffd.router, v, logs[f'blocks.{i}.ffd'])
                x[t] = x[t] + sum(g * ffn_module(b.ffd, e, v) for e, g in gates.items())
        out.append(torch.stack([model.head.weight @ norm(model.norm_f, v) for v in x]))
    aux = {}
    for name, log in logs.items():
        for kind, loss in losses(log, model.get_submodule(name).router.A).items():
            aux[kind] = aux.get(kind, 0) + loss
    return torch.stack(out), aux, logs


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
        out.append(attend(q[b, h, t, n], k[b, h, :seen], v[b, h, :seen]))
    return torch.stack(out).view(q.shape)


@pytest.mark.parametrize('T, K, past, sizes', [
    (1, 1, 0, [1, 4]), (7, 2, 0, [1, 3, 7, 100]), (6, 1, 4, [4, 5]), (5, 3, 1, [2]), (1, 2, 6, [1]),
    (2, 2, 9, [1, 8])])
def test_stick_breaking_is_the_product(T, K, past, sizes):
    inputs = qkv(T, K, past)
    want = with_gradients(slow_stick, inputs)
    for size in sizes:
        for a, b in zip(with_gradients(lambda *qkv: break_stick(*qkv, size), inputs), want):
            assert torch.allclose(a, b, rtol=0, atol=1e-11), size


@pytest.mark.parametrize('logits', [
    100 * torch.randint(2, (40,), generator=torch.Generator().manual_seed(0)) - 50.0,
    torch.full((40,), 1000.1)], ids=['mixed', 'large'])
def test_stable_for_large_logits(logits):
    """Finite, and in float32 what the product is in float64."""
    q, k = torch.ones(1, 1, 40, 1, 1), logits.view(1, 1, 40, 1)
    v = torch.randn(1, 1, 40, 1, generator=torch.Generator().manual_seed(1))
    fast = with_gradients(lambda *qkv: break_stick(*qkv, 16), (q, k, v))
    exact = with_gradients(slow_stick, (q.double(), k.double(), v.double()))
    for a, b in zip(fast, exact):
        assert (a - b).abs().max() < 1e-4 * max(b.abs().max(), 1e-3)


@NO_BF16
def test_blocks_add_up_in_float32():
    """A key that all queries read, gradients of one sign: what the last of 128 blocks add is not
    lost."""
    q, k, v = (x.detach().bfloat16() for x in qkv(512, 1, B=1, H=1, d=16))
    q[...], k[..., :] = 1.0, -2.0                        # few keys match
    k[:, :, 0] = 2.0                                     # but the first one does
    blocks = lambda *qkv: break_stick(*qkv, 4)
    grad = torch.rand(1, 1, 512, 1, 16).bfloat16()
    rough = with_gradients(blocks, (q, k, v), grad)
    exact = with_gradients(blocks, (q.double(), k.double(), v.double()), grad)
    for x, y in zip(rough[2:], exact[2:]):
        assert (x - y).abs().max() < 6e-3 * y.abs().max()


def test_memory_is_bounded_by_the_query_block(monkeypatch):
    """Forward and backward hold the weights of one block at a time, without later keys; nothing but
    q, k and v is kept in between."""
    T, size = 64, 8
    shapes, saved = [], []

    def record(q, k, first):
        shapes.append((q.size(2), k.size(2)))
        return stick_weights(q, k, first)
    monkeypatch.setattr(moduleformer, 'stick_weights', record)
    inputs = qkv(T, 1)
    keep = lambda x: saved.append(x) or x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = break_stick(*inputs, size)
    out.sum().backward()
    assert sorted(shapes) == sorted([(size, end) for end in range(size, T + 1, size)] * 2)
    home = lambda x: x.untyped_storage().data_ptr()
    assert {*map(home, saved)} == {*map(home, inputs)}


# ---- The whole model -----------------------------------------------------------------------------

@pytest.mark.parametrize('changes', [
    dict(), dict(n_head=1, top_k=1), WIDE, dict(new_att=2, n_att=[3, 2]), dict(sparse=False),
    dict(n_head=4, top_k=4, n_ffd=4, query_block=1), dict(released=True),
    dict(new_att=1, new_ffd=2, n_ffd=[5, 3], sparse=False)], ids=str)
def test_oracle(changes):
    """Logits, loss, every aux loss, every gradient, and the routes: gates are not renormalised."""
    model, x, y = make(**changes), tokens(T=5), tokens(T=5, seed=2)
    y[0, 3] = -1
    logits, aux, logs = oracle(model, x)
    weights = dict(mi=0.7, concentration=0.3) | (dict(rout_reg=0.2) if 'new_att' in changes else {})
    grads = compare(model, x, y, logits, aux, weights)
    for name, grad in grads.items():
        assert grad.abs().max() > 1e-6 or 'inserted' in name, name    # nothing else is out of reach
    same_routes(model.routes(x), logs)


@pytest.mark.parametrize('changes', [
    dict(memory=4), dict(memory=99), dict(WIDE, memory=4)], ids=str)
def test_memory_of_the_text_before(changes):
    """In training a cache keeps the last keys, as copies: the next segment has the loss and the
    gradients of one that is given them as constants."""
    model, first, second, y = make(**changes), tokens(), tokens(T=5, seed=2), tokens(T=5, seed=3)
    given, kept, results = [], [], []
    model.eval()(first, cache=given)                     # all of them
    given = [[k[:, :, -model.config.memory:].detach() for k in keys] for keys in given]
    model.train()(first, cache=kept)
    assert all(k.untyped_storage().nbytes() == k.nbytes for keys in kept for k in keys)
    for training, cache in ((True, kept), (False, given)):
        loss = model.train(training)(second, y, cache=cache)[1]
        grads = torch.autograd.grad(loss, model.parameters(), materialize_grads=True)
        results.append([loss, *grads])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


# ---- Insertion -----------------------------------------------------------------------------------

def close_router(model, modules):
    """{layer: modules}: their logits are -10^6 times a positive number, their probabilities exactly
    0."""
    with torch.no_grad():
        for layer, closed in modules.items():
            A = model.get_submodule(layer).router.A
            for e in closed:
                rows_of(A)[e].fill_(-1e6)
    return model


@pytest.mark.parametrize('changes', [dict(), dict(WIDE, n_att=[2, 4])], ids=str)
def test_inserted_modules_that_nobody_takes_change_nothing(changes):
    old, x = make(**changes), tokens(3, 8)
    new = insert_experts(old, 2, 1)
    assert new.config.new_att == 2 and new.config.new_ffd == 1
    assert not torch.allclose(new(x)[0], old(x)[0], atol=1e-3)        # as they come, they are taken
    sizes = {name: gate.size(-1) for name, gate in old.routes(x).items()}
    close_router(new, {name: [n, n + 1] if 'att' in name else [n] for name, n in sizes.items()})
    assert torch.allclose(new(x)[0], old(x)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize('router', ['full', 'partial'])
def test_what_trains_after_an_insertion(router):
    """(That what is frozen stays as it is: tools/tests/test_surgery.py.)"""
    for name, p in insert_experts(make(), 1, 2, router).named_parameters():
        shared = name in ('wte.weight', 'head.weight') or 'router.A' in name or 'router.B' in name
        assert p.requires_grad == ('inserted' in name or (router == 'full' and shared)), name


def test_inserting_twice_and_absorbing():
    x, model = tokens(3, 8), make(new_att=1, new_ffd=2, n_att=[2, 4])
    flat = absorb_inserted(model)
    assert flat.config.n_att == [3, 5] and flat.config.n_ffd == [7, 7]
    assert torch.equal(flat(x)[0], model(x)[0])
    assert all('inserted' not in name for name, _ in flat.named_parameters())
    twice = insert_experts(model, 2, 0)
    assert (twice.config.n_att, twice.config.new_att, twice.config.new_ffd) == ([3, 5], 2, 0)
    close_router(twice, {'blocks.0.att': [3, 4], 'blocks.1.att': [5, 6]})
    assert torch.allclose(twice(x)[0], model(x)[0], rtol=0, atol=1e-12)


# ---- Pruning -------------------------------------------------------------------------------------

def test_count_usage_against_a_loop():
    """Over the tokens with a target, without dropout; the model keeps its mode."""
    model = make(new_att=1, new_ffd=2, dropout=0.5).train()
    batches = [(tokens(2, 6), tokens(2, 6, seed=2)), (tokens(1, 8, seed=3), tokens(1, 8, seed=4))]
    batches[0][1][:, 3:] = batches[1][1][0, 0] = -1
    usage = count_usage(model, iter(batches))
    assert model.training and not count_usage(model.eval(), []) and not model.training
    want = {pool: torch.zeros_like(count) for pool, count in usage.items()}
    for x, y in batches:
        for pool, log in oracle(model, x)[2].items():
            for (_, gates), target in zip(log, y.flatten()):
                for e in gates if target >= 0 else ():
                    want[pool][e] += 1
    assert len(want) == 4 and all(torch.equal(usage[pool], want[pool]) for pool in want)


COUNTS = dict(att=[6, 4, 1, 1], ffd=[4, 1, 1, 0, 6])     # in the second layer in reverse


@pytest.mark.parametrize('threshold, normalise, kept', [
    (0.16, 'max', dict(att=[0, 1, 2, 3], ffd=[0, 1, 2, 4])),
    (1 / 12, 'sum', dict(att=[0, 1, 2, 3], ffd=[0, 1, 2, 4])),           # not below the threshold
    # K stay
    (0.09, 'sum', dict(att=[0, 1], ffd=[0, 4])), (9.0, 'max', dict(att=[0, 1], ffd=[0, 4]))])
def test_who_stays(threshold, normalise, kept):
    model = make(n_att=3, n_ffd=4, new_att=1, new_ffd=1).requires_grad_(False)
    usage = {f'blocks.{i}.{pool}': torch.tensor(counts[::-1] if i else counts)
             for i in range(2) for pool, counts in COUNTS.items()}
    pruned, table = prune_experts(model, usage, threshold, normalise)
    rows = []
    for pool in usage:
        A, pruned_A = (m.get_submodule(pool).router.A for m in (model, pruned))
        n, kind = len(rows_of(A)), pool[-3:]
        stay = kept[kind] if pool.startswith('blocks.0') else [n - 1 - e for e in kept[kind][::-1]]
        assert torch.equal(pruned_A.weight, torch.stack(rows_of(A))[stay])
        rows.append(dict(layer=pool, before=n, after=len(stay)))
    assert table == rows
    assert all(p.requires_grad for p in pruned.parameters())


@pytest.mark.parametrize('changes', [dict(), dict(new_att=1, new_ffd=2), WIDE], ids=str)
def test_pruned_is_the_model_with_those_modules_closed(changes):
    """A router row that is gone leaves the softmax over the others: what a logit of -inf does."""
    model, x = make(**changes), tokens(4, 8)
    keep = {'blocks.0.att': [1, 3], 'blocks.0.ffd': [0, 2, 4], 'blocks.1.att': [0, 2, 3],
            'blocks.1.ffd': [1, 3]}
    usage, gone = {}, {}
    for name, gate in model.routes(x).items():
        usage[name] = torch.tensor([9 if e in keep[name] else 0 for e in range(gate.size(-1))])
        gone[name] = [e for e in range(gate.size(-1)) if e not in keep[name]]
    pruned, table = prune_experts(model, usage)
    assert [row['after'] for row in table] == [2, 3, 3, 2]
    closed = close_router(copy.deepcopy(model), gone)
    assert torch.allclose(pruned(x)[0], closed(x)[0], rtol=0, atol=1e-11)
    assert not torch.allclose(pruned(x)[0], model(x)[0], atol=1e-3)
    again, _ = prune_experts(closed, batches=[(x, x)], threshold=1e-9)
    assert torch.allclose(again(x)[0], closed(x)[0], rtol=0, atol=1e-11)   # they had no probability
