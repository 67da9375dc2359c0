"""stlm_depth.py against a slow version from the papers' definitions, one token at a time; who
passes and what that may look at, early exits, and drafts: the text is that which the model writes
without them."""

import itertools
import math
from collections import Counter

import pytest
import torch

import stlm_depth
import test_contract
from oracles import attention, compare, rms, swiglu, tokens, uncached
from stlm_depth import accept

SMALL = dict(block_size=16, n_head=4, n_kv_head=2, ffn_hidden=12)
ROUTED = [{}, dict(route_every=3, n_layer=3, n_kv_head=1),
          dict(capacity=0.01, n_layer=2, n_kv_head=4)]
PLAIN = dict(capacity=1.0, n_layer=1)
EXITS = dict(n_layer=5, capacity=1.0, exit_loss=True)


@pytest.fixture(autouse=True)
def double():
    """All numbers, angles too, in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(seed=0, scale=0.25, **changes):
    """A small model in training mode, of which about half of the tokens pass."""
    return test_contract.make('stlm_depth', scale, seed, **{**SMALL, **changes}).train()


def routed_layers(model):
    return [layer for layer in model.layers if hasattr(layer, 'router')]


def same(a, b, atol=1e-9):
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=atol)


# ---- The slow version ----------------------------------------------------------------------------

def block(b, x, H, G):
    """{position: vector} of those who pass -> {position: f(x)}. Each sees itself and earlier
    ones."""
    normed = [rms(v, b.norm_1.weight) for v in x.values()]
    heads = attention(normed, b.qkv.weight, H, G, positions=[*x])
    out = {}
    for (t, v), joined in zip(x.items(), heads):
        added = b.proj.weight @ joined
        out[t] = added + swiglu(rms(v + added, b.norm_2.weight), b.fc.weight, b.down.weight)
    return out


def oracle(model, idx, training):
    """-> states {layer: (B, T, D)}, passes {routed layer: [the positions of a row]}, and the
    cross-entropies of the forecasts, a list for each routed layer."""
    c = model.config
    states, passes, surprise = {}, {}, {}
    x = [[model.wte.weight[i] for i in row] for row in idx.tolist()]
    for i, layer in enumerate(model.layers):
        routed = c.capacity < 1 and (i + 1) % c.route_every == 0
        after = []
        for row in x:
            T = len(row)
            if not routed:
                update = block(layer, dict(enumerate(row)), c.n_head, c.n_kv_head)
                after.append([v + update[t] for t, v in enumerate(row)])
                continue
            r = [layer.router @ v for v in row]
            guess = [layer.forecast @ rms(v.detach(), eps=1e-300) + layer.forecast_bias[0]
                     for v in row]
            K = max(1, math.floor(c.capacity * T + 0.5))
            top = sorted(range(T), key=lambda t: -r[t].item())[:K]
            chosen = top if training else [t for t in range(T) if guess[t] > 0]
            update = block(layer.block, {t: row[t] for t in sorted(chosen)}, c.n_head, c.n_kv_head)
            after.append([v + r[t] * update[t] if t in chosen else v for t, v in enumerate(row)])
            right = [1 / (1 + torch.exp(-g if t in top else g)) for t, g in enumerate(guess)]
            passes.setdefault(i, []).append(sorted(chosen))
            surprise.setdefault(i, []).extend(-torch.log(p) for p in right)
        x = after
        states[i] = torch.stack([torch.stack(row) for row in x])
    return states, passes, list(surprise.values())


def mean_surprisal(model, state, targets):
    """Nats per target, through the final norm and the head."""
    nats = []
    for v, y in zip(state.flatten(0, 1), targets.flatten().tolist()):
        if y >= 0:
            logits = model.wte.weight @ rms(v, model.norm_f.weight)
            nats.append(torch.log(torch.exp(logits).sum()) - logits[y])
    return sum(nats) / len(nats)


def passing(model, idx):
    """[for each routed layer: for each row: who passes]."""
    return [[(row == 0).nonzero().flatten().tolist() for row in route[..., 1]]
            for route in model.routes(idx).values()]


@pytest.mark.parametrize('changes, T', [
    *((changes, 6) for changes in ROUTED), (PLAIN, 3), (ROUTED[0], 1)], ids=str)
@pytest.mark.parametrize('training', [True, False])
def test_oracle(changes, T, training):
    """Logits, losses, every gradient, who passes. The forecasts learn from their own loss only."""
    model = make(**changes).train(training)
    x, y = tokens(2, T), tokens(2, T, seed=2)
    y[0, 0] = -1
    states, passes, surprise = oracle(model, x, training)
    last = states[len(states) - 1]
    logits = torch.stack([torch.stack([model.wte.weight @ rms(v, model.norm_f.weight) for v in row])
                          for row in last])
    aux = {}
    if training and passes:
        layers = [torch.stack(layer) for layer in surprise]
        aux['forecast'] = sum(layer.mean() for layer in layers) / len(layers)
        hits = [(layer < math.log(2)).double().mean() for layer in layers]
        aux['forecast_hits'] = sum(hits) / len(hits)
    weights = dict(forecast=0.7) if aux else {}
    grads = compare(model, x, y, logits, aux, weights, atol=1e-9)
    assert passing(model, x) == [*passes.values()]
    someone = all(any(rows) for rows in passes.values())
    for name, grad in grads.items():
        if T > 1 and someone and (training or '.forecast' not in name):
            assert grad.abs().max() > 1e-9, name         # nothing else is out of reach
    if aux:
        fast_aux = model(x, y)[2]
        assert abs(fast_aux['forecast_hits'] - aux['forecast_hits']) < 1e-6
        forecast = fast_aux['forecast']
        reached = torch.autograd.grad(forecast, [*model.parameters()], allow_unused=True)
        for (name, _), grad in zip(model.named_parameters(), reached):
            assert (grad is not None) == ('.forecast' in name), name


@pytest.mark.parametrize('T, capacity, K', [
    (13, 0.125, 2), (10, 0.125, 1), (3, 0.125, 1), (6, 0.99, 6), (5, 0.001, 1)])
def test_only_those_who_pass_cost_anything(T, capacity, K):
    """In training K of T tokens reach the linear maps; in evaluation all do, many for nothing."""
    model, x = make(capacity=capacity, n_layer=2), tokens(3, T)
    seen = []
    for name in ('qkv', 'proj', 'fc', 'down'):
        linear = getattr(model.layers[1].block, name)
        linear.register_forward_hook(lambda m, args, out: seen.append(out.shape[:2]))
    model(x), model.eval()(x)
    assert seen == [(3, K)] * 4 + [(3, T)] * 4


def test_ties_go_to_the_earlier_token():
    layer = make().layers[1]
    score = torch.tensor([[0.0] * 5, [1.0, 2.0, 1.0, 2.0, 1.0]])
    index, passes, _ = layer.choose(score, torch.zeros(2, 5))
    assert index.tolist() == [[0, 1], [1, 3]]
    assert passes.tolist() == [[1, 1, 0, 0, 0], [0, 1, 0, 1, 0]]


# ---- The cache -----------------------------------------------------------------------------------

def pick(model, tokens_that_pass, strength=4.0):
    """Only these tokens pass: a channel of their embeddings says so."""
    with torch.no_grad():
        model.wte.weight[:, 0] = -strength
        model.wte.weight[tokens_that_pass, 0] = strength
        for layer in routed_layers(model):
            layer.forecast.zero_()[0] = 1.0
            layer.forecast_bias.zero_()
    return model


@pytest.mark.parametrize('sizes', [[1] * 16, [5, 1, 7, 3], [16], [2, 14]], ids=str)
def test_cache_in_pieces(sizes):
    """Rows in which nobody passes, all do, only the first, only the last, some."""
    model, x = pick(make(), [0]).eval(), 1 + tokens(5, 16, V=36)
    x[1], x[2, 0], x[3, -1], x[4, 3::4] = 0, 0, 0, 0
    assert passing(model, x) == [[[], [*range(16)], [0], [15], [3, 7, 11, 15]]] * 2
    for rows in (x, x[:1], x[2:3], x[[0, 3]]):
        full = model(rows)[0]
        cache = []
        pieces = [model(part, cache=cache)[0] for part in rows.split(sizes, dim=1)]
        assert same(torch.cat(pieces, 1), full, 1e-12)
        assert len(cache) == 4 and cache[0][0].shape == (len(rows), 2, 16, 4)


# ---- Generation ----------------------------------------------------------------------------------

@pytest.fixture
def accepted(monkeypatch):
    """(drafts, tokens that came of them) of every call of accept."""
    found = []

    def record(p, drafts, draft_probs):
        out = accept(p, drafts, draft_probs)
        found.append((len(drafts), len(out)))
        return out
    monkeypatch.setattr(stlm_depth, 'accept', record)
    return found


@pytest.mark.parametrize('capacity', [0.25, 1.0])
def test_drafts_change_no_greedy_text(capacity, accepted):
    """50 prompts, one or three at a time, with every number of layers, several of drafts, past the
    context (5); also for one token."""
    model = make(4, 0.3, capacity=capacity, block_size=5, n_layer=3).eval()
    ways = itertools.cycle([(1, 3), (2, 1), (2, 3), (1, 20), (1, 1), (2, 20), (2, 3)])
    for start in (1, 2, 4, 5, 8):
        prompts = tokens(10, start, seed=start)
        want = uncached(model, prompts, 6)
        assert torch.equal(model.generate(prompts, 6, temperature=0), want)
        for rows, text in zip(prompts.split([1, 1, 1, 1, 3, 3]), want.split([1, 1, 1, 1, 3, 3])):
            E, n_draft = next(ways)
            got = model.generate(rows, 6, temperature=0, draft_layers=E, n_draft=n_draft)
            assert torch.equal(got, text)
        one = model.generate(rows, 1, temperature=0, draft_layers=E, n_draft=n_draft)
        assert torch.equal(one, text[:, :start + 1])
    stayed = {(out > 1) + (out > n) for n, out in accepted if n > 1}
    assert stayed == {0, 1, 2}                           # none, some, and all of the drafts
    assert max(n for n, _ in accepted) == 4              # no more than there is room for


# ---- Sampling with drafts ------------------------------------------------------------------------

@torch.no_grad()
def exact_texts(model, text, n, temperature, top_k):
    """{n tokens: probability} of all continuations of a text that can be."""
    if n == 0:
        return {(): 1.0}
    logits = model(torch.tensor([text]))[0][0, -1] / temperature
    best = sorted(range(len(logits)), key=lambda i: -logits[i].item())[:top_k]
    chances = {}
    for i in best:
        chance = (logits[i].exp() / logits[best].exp().sum()).item()
        for rest, p in exact_texts(model, [*text, i], n - 1, temperature, top_k).items():
            chances[i, *rest] = chance * p
    return chances


TINY = dict(vocab_size=4, block_size=8, n_layer=3, n_head=1, n_kv_head=1, n_embd=8, ffn_hidden=8)


def test_sampled_drafts_have_the_models_distribution(accepted):
    """Three tokens: of many rows at once, which go on from the shortest; and alone, where drafts
    stay."""
    model = make(7, 0.5, capacity=0.5, **TINY).eval()
    keys = dict(temperature=0.8, top_k=2)
    want = exact_texts(model, [1, 2], 3, **keys)
    torch.manual_seed(0)
    for rows, calls in ((10_000, 1), (1, 100)):
        counts = Counter()
        for _ in range(calls):
            texts = model.generate(torch.tensor([[1, 2]] * rows), 3, **keys, draft_layers=1,
                                   n_draft=2)
            counts.update(map(tuple, texts[:, 2:].tolist()))
        n = rows * calls
        assert counts.keys() <= want.keys()
        for text, p in want.items():
            assert abs(counts[text] / n - p) < 5 * math.sqrt(p / n), text
    assert {(2, 1), (2, 2), (2, 3)} <= {*accepted}


# ---- Early exit ----------------------------------------------------------------------------------

def test_dropped_layers_add_nothing():
    """Rows as a whole, each by itself, at LayerSkip's rates; what is kept is not scaled."""
    model, x = make(layer_dropout=0.8), tokens(3000, 2)
    states, *_ = model.read(x)
    position = torch.tensor([[0.0, 1.0]])
    before = model.wte(x)
    for i, after in enumerate(states):
        update = model.layers[i](before, position, stlm_depth.rotary(position, 4), None)
        if i % 2:
            update, *_ = update
        dropped = (after == before).flatten(1).all(1)
        assert torch.equal(after[~dropped], (before + update)[~dropped])
        rate = 0.8 * (2 ** (i / 3) - 1)
        assert abs(dropped.double().mean() - rate) <= 4 * math.sqrt(rate * (1 - rate) / 3000)
        before = after


@pytest.mark.parametrize('changes', [EXITS, dict(EXITS, capacity=0.4)], ids=str)
def test_exit_loss_oracle(changes, monkeypatch):
    """For each row the cross-entropy at its exit, with all gradients. An exit after layer l is
    drawn with a weight of l(l+1)."""
    model, x, y = make(**changes), tokens(3, 4), tokens(3, 4, seed=2)
    y[1, 2:] = -1
    states, _, _ = oracle(model, x, True)
    drawn = []

    def draw(weights, count, replacement):
        assert count == 3 and replacement
        drawn.append(weights.tolist())
        return torch.tensor([2, 1, 2])
    monkeypatch.setattr(torch, 'multinomial', draw)
    _, loss, aux = model(x, y)
    assert drawn == [[0, 2, 6, 12]]
    state = torch.stack([states[layer][row] for row, layer in enumerate([2, 1, 2])])
    want = mean_surprisal(model, state, y)
    assert same(aux['exit'], want) and same(loss, mean_surprisal(model, states[len(states) - 1], y))
    grads = (torch.autograd.grad(v, [*model.parameters()], materialize_grads=True)
             for v in (aux['exit'], want))
    for (name, _), a, b in zip(model.named_parameters(), *grads, strict=True):
        assert same(a, b), name
    assert 'exit' not in model.eval()(x, y)[2] and 'exit' not in model.train()(x)[2]
