"""depth_routing.py, threshold.py and table.py, against slow oracles: token by token, in float64."""

import pytest
import torch

import arena.threshold
from arena import dense, depth_routing, table, threshold
from oracles import attend, compare, rms, tokens, turn
from test_dense import attention, expert
from tools.check import CHECKS, run_check

SMALL = dict(vocab_size=37, block_size=16, n_layer=3, n_head=2, n_embd=16, dropout=0.0)
ROUTED = dict(SMALL, n_expert=6, top_k=2, n_shared=2, route_every=2)


def make(module, config):
    torch.manual_seed(0)
    model = module.Model(module.Config(**config)).double()
    for p in model.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    return model


@pytest.mark.parametrize('config', [SMALL, ROUTED], ids=['dense', 'routed'])
@pytest.mark.parametrize('module', [depth_routing, threshold, table])
def test_contract(module, config):
    """Causal, cached = uncached, gradients, sparse = not sparse, saved and resumed: tools.check."""
    verdicts = [run_check(check, module, module.Config(**config)) for check in CHECKS]
    assert [text for verdict, text in verdicts if verdict == 'WRONG'] == []


def block(b, x):
    return add_ffn(b, [u + a for u, a in zip(x, attention(b, [rms(u) for u in x], 2))])


def add_ffn(b, x):
    return [u + expert(rms(u), b.ffn.fc.weight, b.ffn.down.weight) for u in x]


# ---- Depth routing -------------------------------------------------------------------------------


def weighted_mean(query, sources):
    """Of one token's sources."""
    power = [torch.exp(query @ rms(source)) for source in sources]
    return sum(p / sum(power) * source for p, source in zip(power, sources))


@pytest.mark.parametrize('group', [1, 2])
def test_depth_routing_oracle(group):
    model, idx, y = make(depth_routing, SMALL | dict(group=group)), tokens(), tokens(seed=2)
    rows = []
    for row in idx:
        x = [rms(model.wte(i)) for i in row]
        sources = [[u] for u in x]                       # of each token
        for i, b in enumerate(model.blocks):
            if i % group == 0:
                start = x
            x = block(b, x)
            if i % group == group - 1 or i == 2:
                for u, before, own in zip(x, start, sources):
                    own.append(u - before)
                x = [weighted_mean(model.queries[i // group], own) for own in sources]
        rows.append(torch.stack([model.wte.weight @ rms(u) for u in x]))
    compare(model, idx, y, torch.stack(rows), {}, {})


def test_depth_routing_begins_with_plain_means():
    torch.manual_seed(0)
    sources = [torch.randn(2, 3, 8) for _ in range(4)]
    mean = depth_routing.mix(sources, torch.zeros(8))
    assert torch.allclose(mean, sum(sources) / 4, atol=1e-6)


# ---- Threshold -----------------------------------------------------------------------------------


def slow_gates(router, x):
    """One token -> {expert: gate}, of what exceeds its threshold, at most `most` of them."""
    score = [w @ x for w in router.linear.weight]
    excess = {e: s - t for e, (s, t) in enumerate(zip(score, router.threshold)) if s > t}
    taken = sorted(excess, key=lambda e: -excess[e])[:router.config.most]
    return {e: 1 / (1 + torch.exp(-score[e])) / router.config.top_k for e in taken}


def routers(model):
    return [part for part in model.modules() if isinstance(part, threshold.ThresholdRouter)]


@pytest.mark.parametrize('most', [2, 3])
def test_threshold_oracle(most):
    """Gates, and the gradient of inputs and weights."""
    router, = routers(make(threshold, ROUTED | dict(most=most)).eval())
    router.threshold.copy_(0.5 + 0.2 * torch.randn(6))
    x = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    gate_NK, choice_NK, losses = router(x)
    gate_NE = torch.zeros(40, 6, dtype=torch.float64).scatter(1, choice_NK, gate_NK)
    slow_NE = torch.zeros_like(gate_NE)
    for n in range(40):
        for e, gate in slow_gates(router, x[n]).items():
            slow_NE[n, e] = gate
    assert torch.allclose(gate_NE, slow_NE, rtol=0, atol=1e-12) and losses == {}
    assert (slow_NE > 0).sum(1).unique().tolist() == list(range(most + 1))   # some take none
    pull_NE = torch.randn_like(gate_NE)
    leaves = [x, router.linear.weight]
    fast, slow = (torch.autograd.grad((gate * pull_NE).sum(), leaves)
                  for gate in (gate_NE, slow_NE))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(fast, slow))


def test_threshold_follows_the_scores():
    """It is the mean of the earlier steps' quantiles; the last pass of a step counts. eval changes
    nothing. With scores that stay as they are, tokens take K experts on average."""
    router, = routers(make(threshold, ROUTED).train())
    quantiles = []
    for _ in range(4):
        for _ in range(2):
            x = torch.randn(60, 16, dtype=torch.float64)
            router(x)
            wanted = sum(quantiles) / len(quantiles) if quantiles else torch.zeros(6)
            assert torch.allclose(router.threshold, wanted.double(), atol=1e-12)
        quantiles.append(router.linear(x).sort(0).values[40].detach())    # 19 of 60 are above it
        router.eval()(x)
        router.train().linear.weight.data[0, 0] += 1e-9
    router(x)
    gate_NK, _, _ = router.eval()(torch.randn(5000, 16, dtype=torch.float64))
    assert 1.7 < (gate_NK > 0).double().sum(1).mean() < 2.1


def test_threshold_is_the_mean_of_all_processes(monkeypatch):
    monkeypatch.setattr(arena.threshold.dist, 'is_initialized', lambda: True)
    monkeypatch.setattr(arena.threshold.dist, 'get_world_size', lambda: 4)
    monkeypatch.setattr(arena.threshold.dist, 'all_reduce', lambda x: x.add_(3.0))
    one, = routers(make(threshold, ROUTED).train())
    x = torch.randn(60, 16, dtype=torch.float64)
    one(x)
    assert torch.allclose(one.latest, one.linear(x).sort(0).values[40] / 4 + 3)


# ---- Tables --------------------------------------------------------------------------------------


def test_table_oracle():
    model = make(table, SMALL | dict(n_value=2, n_bigram=11))
    idx, y = tokens(), tokens(seed=2)
    rows = []
    for row in idx:
        before = [37, *row.tolist()]                     # 37: no token
        x = []
        for t, i in enumerate(row):
            bigram = model.wte.table.weight[(before[t] * 1_000_003 + int(i)) % 11]
            x.append(rms(model.wte.weight[i] + bigram))
        for n, b in enumerate(model.blocks):
            x = valued_block(b, x, row) if n > 0 else block(b, x)
        rows.append(torch.stack([model.wte.weight @ rms(u) for u in x]))
    compare(model, idx, y, torch.stack(rows), {}, {})


def valued_block(b, x, row):
    """A block whose values have a table, at head width 8."""
    normed = [rms(u) for u in x]
    q, k = ([[turn(rms(head), t) for head in (linear.weight @ u).split(8)]
             for t, u in enumerate(normed)] for linear in (b.q, b.k))
    v = [(b.v.weight @ u + b.v.table.weight[i]).split(8) for u, i in zip(normed, row)]
    return add_ffn(b, [u + b.proj.weight @ a for u, a in zip(x, attend(q, k, v))])


def test_table_starts_as_the_dense_model_and_multiplies_nothing():
    torch.manual_seed(0)
    plain = dense.Dense(dense.DenseConfig(**SMALL))
    torch.manual_seed(0)
    tables = table.Table(table.TableConfig(**SMALL, n_value=0, n_bigram=11))
    assert torch.equal(plain(tokens())[0], tables(tokens())[0])
    total, active = plain.count_params()
    assert tables.count_params() == (total + 11 * 16, active)
