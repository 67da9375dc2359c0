"""moep.py against a slow oracle written from the paper: one token, one block, one expert at a time."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import moep
from conftest import ROOT
from moep import MoEP, MoEPConfig
from plumbing.settings import read_config

SMALL = dict(vocab_size=61, block_size=24, n_layer=2, n_head=2, n_embd=32, n_parallel=2, n_head_parallel=2,
             n_embd_parallel=16, n_block=4, n_expert=3, top_k=2, expert_hidden=24, dropout=0.0)


def make(seed=0, dtype=torch.float64, **changes):
    torch.manual_seed(seed)
    model = MoEP(MoEPConfig(**{**SMALL, **changes})).to(dtype)
    with torch.no_grad():                                # gains, biases and routers that matter
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def tokens(B=2, T=11, seed=1):
    return torch.randint(0, SMALL['vocab_size'], (B, T), generator=torch.Generator().manual_seed(seed))


# ---- The slow oracle -----------------------------------------------------------------------------


def softmax_attention(q, k, v):
    """(T, d) each: token t reads tokens 0..t."""
    out = []
    for t in range(len(q)):
        weights = torch.softmax(torch.stack([q[t] @ k[i] for i in range(t + 1)]) / math.sqrt(q.size(1)), 0)
        out.append(sum(weights[i] * v[i] for i in range(t + 1)))
    return torch.stack(out)


def act(h, swiglu):
    if swiglu:
        half = len(h) // 2
        return h[:half] * torch.sigmoid(h[:half]) * h[half:]
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h ** 3)))


def block(x, n_head, swiglu, ln1, qkv, proj, ln2, fc, down):
    """One pre-LayerNorm Transformer block over one sequence x (T, D); maps are (weight (in, out), bias)."""
    T, D = x.shape
    h = torch.stack([F.layer_norm(x[t], (D,), *ln1) @ qkv[0] + qkv[1] for t in range(T)])
    q, k, v = h[:, :D], h[:, D:2 * D], h[:, 2 * D:]
    d = D // n_head
    heads = [softmax_attention(*(m[:, i * d:(i + 1) * d] for m in (q, k, v))) for i in range(n_head)]
    x = x + torch.cat(heads, 1) @ proj[0] + proj[1]
    out = []
    for t in range(T):
        h = act(F.layer_norm(x[t], (D,), *ln2) @ fc[0] + fc[1], swiglu)
        out.append(x[t] + h @ down[0] + down[1])
    return torch.stack(out)


def route(x, weight, K):
    """-> the gates of one token over all choices, and its probabilities."""
    prob = torch.softmax(weight @ x, 0)
    best = sorted(range(len(prob)), key=lambda i: -prob[i].item())[:K]
    total = sum(prob[i] for i in best)
    return {i: prob[i] / total for i in best}, prob


def balance(probs, gates, form):
    n = len(probs[0])
    p = [sum(prob[i] for prob in probs) / len(probs) for i in range(n)]
    if form == 'switch':
        slots = sum(len(g) for g in gates)
        return n * sum(sum(i in g for g in gates) / slots * p[i] for i in range(n))
    entropy = -sum(q * torch.log(q) for q in p)
    return -entropy if form == 'entropy' else entropy


def oracle(model, idx):
    """-> logits (B, T, V), auxiliary losses, and {layer: [(gates, token number)]}."""
    c, m = model.config, model
    probs, gates = {}, {}

    def choose(name, x, weight):
        gate, prob = route(x, weight, c.top_k)
        probs.setdefault(name, []).append(prob)
        gates.setdefault(name, []).append(gate)
        return gate

    def full(b, x):
        return block(x, c.n_head, c.swiglu, (b.ln_1.weight, b.ln_1.bias), (b.qkv.weight.T, b.qkv.bias),
                     (b.proj.weight.T, b.proj.bias), (b.ln_2.weight, b.ln_2.bias), (b.fc.weight.T, b.fc.bias),
                     (b.down.weight.T, b.down.bias))

    def expert(name, moe, x):
        def one(e):
            h = act(x @ moe.fc[e] + moe.fc_bias[e], True) if c.swiglu else x
            return h @ moe.down[e] + moe.down_bias[e]
        return sum(g * one(e) for e, g in choose(name, x, moe.router.linear.weight).items())

    rows = []
    for row in idx:
        x = torch.stack([m.wte.weight[i] + m.wpe.weight[t] for t, i in enumerate(row)])
        for b in m.first:
            x = full(b, x)
        if c.n_parallel:
            x = torch.stack([expert('shrink', m.shrink, v) for v in x])
            for n, layer in enumerate(m.parallel):
                outs = [block(x, c.n_head_parallel, c.swiglu, (layer.ln_1_gain[p], layer.ln_1_bias[p]),
                              (layer.qkv[p], layer.qkv_bias[p]), (layer.proj[p], layer.proj_bias[p]),
                              (layer.ln_2_gain[p], layer.ln_2_bias[p]), (layer.fc[p], layer.fc_bias[p]),
                              (layer.down[p], layer.down_bias[p])) for p in range(c.n_block)]
                chosen = [choose(f'parallel.{n}', v, layer.router.linear.weight) for v in x]
                x = torch.stack([sum(g * outs[p][t] for p, g in chosen[t].items()) for t in range(len(x))])
            x = torch.stack([expert('grow', m.grow, v) for v in x])
        for b in m.last:
            x = full(b, x)
        rows.append(F.layer_norm(x, (c.n_embd,), m.ln_f.weight, m.ln_f.bias) @ m.wte.weight.T)
    aux = {name: balance(probs[name], gates[name], c.balance) for name in probs}
    sums = {}
    if aux:
        sums['block_balance'] = sum(v for n, v in aux.items() if n.startswith('parallel'))
        sums['expert_balance'] = sum(v for n, v in aux.items() if n in ('shrink', 'grow'))
    return torch.stack(rows), sums, gates


def objective(loss, aux):
    return loss + 0.3 * aux.get('block_balance', 0) + 0.7 * aux.get('expert_balance', 0)


@pytest.mark.parametrize('changes', [
    dict(), dict(swiglu=True), dict(n_parallel=0, n_layer=3), slow(dict(top_k=1)),
    slow(dict(balance='entropy')), slow(dict(balance='printed')), slow(dict(sparse=False)),
    slow(dict(n_layer=3)), slow(dict(swiglu=True, sparse=False))])
def test_oracle(changes):
    """Logits, loss, balance losses, every gradient and every gate."""
    model, x, y = make(**changes), tokens(T=7), tokens(T=7, seed=2)
    y[0, 3] = -1
    logits, aux, gates = oracle(model, x)
    kept = y.flatten() >= 0
    loss = F.cross_entropy(logits.flatten(0, 1)[kept], y.flatten()[kept])
    grads = torch.autograd.grad(objective(loss, aux), list(model.parameters()), allow_unused=True)
    assert torch.allclose(model(x)[0], logits, atol=1e-10)
    _, fast_loss, fast_aux = model(x, y)
    assert abs(fast_loss - loss) < 1e-10 and fast_aux.keys() == aux.keys()
    for name in aux:
        assert abs(fast_aux[name] - aux[name]) < 1e-10
    objective(fast_loss, fast_aux).backward()
    for (name, p), g in zip(model.named_parameters(), grads):
        want = torch.zeros_like(p) if g is None else g
        assert torch.allclose(p.grad, want, atol=1e-10), name
    found = model.routes(x)
    assert not any(m._forward_hooks for m in model.modules())
    assert list(found) == list(gates)                    # in the order in which a token meets them
    for name, gate in found.items():
        for got, want in zip(gate.flatten(0, 1), gates[name]):
            assert got.nonzero().flatten().tolist() == sorted(want)
            assert all(abs(got[i] - want[i]) < 1e-12 for i in want)


# ---- Sparse is dense -----------------------------------------------------------------------------


def compare(sparse, idx, tolerance, relative):
    """Logits and gradients of a model, and of one that computes every choice for every token."""
    dense = MoEP(MoEPConfig(**{**sparse.config.__dict__, 'sparse': False})).to(sparse.wte.weight.dtype)
    dense.load_state_dict(sparse.state_dict())
    gate, choice, _ = sparse.parallel[0].router(torch.zeros(3, 16).to(sparse.wte.weight))
    for m, n_rows in ((sparse, sparse.config.top_k), (dense, dense.config.n_block)):
        assert len(moep.Rows(gate, choice, m.config.n_block, m.config.sparse).token) == 3 * n_rows
    for m in (sparse, dense):
        _, loss, aux = m(idx, idx.flip(1))
        objective(loss, aux).backward()
    assert torch.allclose(sparse(idx)[0], dense(idx)[0], atol=tolerance * 10)
    for (name, p), q in zip(sparse.named_parameters(), dense.parameters()):
        scale = q.grad.norm() if relative else 1.0
        assert (p.grad - q.grad).norm() <= tolerance * scale + 1e-12, name
    return sparse


@pytest.mark.parametrize('swiglu', [False, True])
@pytest.mark.parametrize('top_k', [1, 2, 3])
def test_sparse_is_dense_float64(top_k, swiglu):
    compare(make(top_k=top_k, n_block=3, swiglu=swiglu), tokens(3, 20), 1e-10, relative=False)


@pytest.mark.parametrize('swiglu', [False, True])
@pytest.mark.parametrize('top_k', [1, 2, 4])
def test_sparse_is_dense_float32_through_grouped_mm(top_k, swiglu, monkeypatch):
    rows = []
    kernel = F.grouped_mm

    def record(x, w, offs):
        if w.dim() == 3:                                 # not the gradient of w
            rows.append(len(x))
        return kernel(x, w, offs=offs)
    monkeypatch.setattr(F, 'grouped_mm', record)
    model = make(dtype=torch.float32, top_k=top_k, n_expert=4, swiglu=swiglu)
    compare(model, tokens(3, 20), 1e-4, relative=True)
    assert set(rows) == {60 * top_k, 60 * 4}             # both went through the kernel


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_unused_block_and_one_token(dtype):
    relative = dtype == torch.float32
    tolerance = 1e-4 if relative else 1e-10
    model = make(dtype=dtype)
    with torch.no_grad():                                # so that no token takes block 2 of the first layer
        model.shrink.down_bias += 5
        model.parallel[0].router.linear.weight[2] = -1
    x = tokens(2, 20)
    assert model.routes(x)['parallel.0'][..., 2].abs().max() == 0
    compare(model, x, tolerance, relative)
    for name in ('proj', 'fc', 'down', 'down_bias', 'ln_2_gain'):
        grad = getattr(model.parallel[0], name).grad
        assert grad[2].abs().max() == 0 and grad[1].abs().max() > 0
    compare(make(dtype=dtype), tokens(1, 1), tolerance, relative)


def test_grouped_mm_kernel_equals_loop():
    torch.manual_seed(0)
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)   # the second group is empty
    results = []
    x_RD, w_EDF = torch.randn(10, 8), torch.arange(3 * 8 * 16.0).view(3, 8, 16) / 100
    for dtype in (torch.float32, torch.float64):         # float64 takes the loop
        x = x_RD.to(dtype, copy=True).requires_grad_()
        w = w_EDF.to(dtype, copy=True).requires_grad_()
        y = moep.grouped_mm(x, w, ends)
        (y * torch.linspace(0, 1, y.numel(), dtype=dtype).view_as(y)).sum().backward()
        results.append((y, x.grad, w.grad))
    for a, b in zip(*results):
        assert torch.allclose(a.double(), b, rtol=1e-4, atol=1e-4)
    for d_in, d_out in ((7, 5), (8, 5), (7, 8)):         # widths the kernel refuses
        x, w = torch.randn(10, d_in), torch.randn(3, d_in, d_out)
        want = torch.stack([x[r] @ w[g] for r, g in enumerate([0] * 3 + [2] * 7)])
        assert torch.allclose(moep.grouped_mm(x, w, ends), want, atol=1e-5)


def test_grouped_mm_without_a_kernel(monkeypatch):
    """On a torch without the kernel the loop takes its place."""
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    x, w = torch.randn(10, 8), torch.randn(3, 8, 16)
    want = moep.grouped_mm(x, w, ends)
    monkeypatch.delattr(F, 'grouped_mm')
    assert torch.allclose(moep.grouped_mm(x, w, ends), want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:mkldnn_matmul failed')   # CPUs without bfloat16 say so, and go on
def test_bfloat16_autocast_and_one_graph(compile_model):
    """Under autocast the model trains in bfloat16, and compiles without a graph break: no value is read.
    In float32 it breaks; what it computes then is compared in test_compiled.py."""
    model, x = make(dtype=torch.float32, n_parallel=1), tokens(2, 16)
    exact = model(x, x)[1]
    graphs = []

    def backend(graph, inputs):                          # as backend='aot_eager', and the graph is kept
        graphs.append(graph)
        return torch._dynamo.lookup_backend('aot_eager')(graph, inputs)
    compiled = compile_model(model, backend=backend, fullgraph=True)
    with torch.autocast('cpu', torch.bfloat16):
        for m in (model, compiled):
            _, loss, aux = m(x, x)
            assert abs(loss - exact) < 0.05 * exact and loss.dtype == torch.float32
    assert len(graphs) == 1
    called = {str(node.target) for node in graphs[0].graph.nodes}        # fullgraph alone lets .item() pass
    assert not called & {'item', 'tolist', '_local_scalar_dense'} and 'view' in called
    assert all(v.dtype == torch.float32 for v in aux.values())   # routers stay out of bfloat16
    streams = []
    for part in (*model.first, model.shrink, *model.parallel, model.grow, *model.last):
        part.register_forward_hook(lambda _, args, output: streams.append(output[0].dtype))
    with torch.autocast('cpu', torch.bfloat16):
        model(x)
    assert streams == 5 * [torch.float32]                # and so does the residual stream
    objective(loss, aux).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ---- Balance losses ------------------------------------------------------------------------------


def test_balance_by_hand():
    prob = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.1, 0.4]], requires_grad=True)
    choice = torch.tensor([[0, 1], [0, 2]])
    p = [0.55, 0.2, 0.25]
    entropy = -sum(v * math.log(v) for v in p)
    want = dict(switch=3 * (0.5 * p[0] + 0.25 * p[1] + 0.25 * p[2]), entropy=-entropy, printed=entropy)
    for form, value in want.items():
        router = moep.Router(8, 3, MoEPConfig(**{**SMALL, 'balance': form}))
        assert abs(router.balance_loss(prob, choice).item() - value) < 1e-6
    router = moep.Router(8, 2, MoEPConfig(**{**SMALL, 'top_k': 1}))
    uniform, some = torch.full((4, 2), 0.5), torch.tensor([[0], [1], [0], [1]])
    assert router.balance_loss(uniform, some).item() == 1.0              # balanced
    sure, first = torch.tensor([[1.0, 0.0]] * 4), torch.zeros(4, 1, dtype=torch.long)
    assert router.balance_loss(sure, first).item() == 2.0                # collapsed


def test_entropy_of_a_choice_without_any_probability():
    """A probability may be 0, whose logarithm is not finite. It adds nothing to the loss."""
    router = moep.Router(8, 4, MoEPConfig(**{**SMALL, 'balance': 'entropy'}))
    prob = torch.tensor([[0.5, 0.5, 0.0, 0.0]], requires_grad=True)
    loss = router.balance_loss(prob, torch.tensor([[0, 1]]))
    loss.backward()
    assert abs(loss.item() + math.log(2)) < 1e-6 and prob.grad.isfinite().all()


@pytest.mark.parametrize('form, spreads', [('switch', True), ('entropy', True), ('printed', False)])
def test_minimising_balance_spreads_or_collapses(form, spreads):
    """From the same start the printed sign drives all tokens to one block, the other forms spread them."""
    torch.manual_seed(0)
    router = moep.Router(8, 4, MoEPConfig(**{**SMALL, 'balance': form}))
    x = torch.randn(256, 8) + 1.0
    optimizer = torch.optim.Adam(router.parameters(), lr=0.05)

    def entropy():
        p = router.linear(x).softmax(-1).mean(0)
        return -(p * p.log()).sum().item()
    with torch.no_grad():
        router.linear.weight[0] += 0.1
    start = entropy()
    for _ in range(60):
        optimizer.zero_grad()
        router(x)[2]['balance'].backward()
        optimizer.step()
    if spreads:
        assert entropy() > max(start, 0.99 * math.log(4))
    else:
        assert entropy() < 0.1


# ---- The protocol --------------------------------------------------------------------------------


def test_causal():
    for changes in (dict(), dict(n_parallel=0)):
        model, x = make(**changes).eval(), tokens(1, 16)
        before = model(x)[0]
        for t in (5, 15):
            changed = x.clone()
            changed[0, t] = (changed[0, t] + 1) % 61
            after = model(changed)[0]
            assert (before[:, :t] - after[:, :t]).abs().max() < 1e-12
            assert (before[:, t:] - after[:, t:]).abs().max() > 1e-6


def uncached(model, idx, n):
    """The rule in plain words: read the whole window; when it is full, go on with its last half."""
    limit = model.config.block_size
    window = idx[:, -limit:]
    for _ in range(n):
        if window.size(1) > limit:
            window = idx[:, -(limit // 2):]
        logits = model(window)[0][:, -1]
        new = logits.argmax(-1, keepdim=True)
        idx, window = torch.cat((idx, new), 1), torch.cat((window, new), 1)
    return idx


FORMS = [dict(), dict(n_parallel=0), dict(swiglu=True), dict(sparse=False)]
QUICK = [(dict(), 5), (dict(n_parallel=0), 12), (dict(n_parallel=0), 20)]
MORE = [case for case in itertools.product(FORMS, [1, 5, 12, 20]) if case not in QUICK]


@pytest.mark.parametrize('changes, start', [*QUICK, *(slow(*case) for case in MORE)])
def test_cached_generation_is_uncached(changes, start):
    """Also far past the context length (12), and from prompts as long as it or longer."""
    model, x = make(block_size=12, **changes).eval(), tokens(3, start)
    assert torch.equal(model.generate(x, 25, temperature=0), uncached(model, x, 25))


def test_cache_in_pieces():
    """Reading a text in pieces through the cache gives the logits of reading it at once."""
    model, x = make().eval(), tokens(2, 20)
    cache, pieces = [], []
    for part in x.split([5, 1, 9, 5], dim=1):
        pieces.append(model(part, cache=cache)[0])
    assert torch.allclose(torch.cat(pieces, 1), model(x)[0], atol=1e-12)
    assert len(cache) == 4 and cache[1][0].shape == (2, 8, 20, 8)


def test_batched_is_one_by_one():
    model, x = make().eval(), tokens(4, 12)
    assert torch.allclose(model(x)[0], torch.cat([model(row[None])[0] for row in x]), atol=1e-12)


def test_temperature_and_top_k_by_count():
    """Against the distribution that the logits give: sharpened, cut to the best k, and drawn from."""
    model, x = make(dtype=torch.float32).eval(), tokens(1, 4)
    logits = model(x)[0][0, -1]
    best = logits.topk(3).indices
    torch.manual_seed(0)
    drawn = model.generate(x.expand(4000, -1), 1, temperature=0.5, top_k=3)[:, -1]
    assert set(drawn.tolist()) <= set(best.tolist())
    want = (logits[best] / 0.5).softmax(-1)
    assert torch.allclose(torch.stack([(drawn == i).float().mean() for i in best]), want, atol=0.03)


def test_sampling():
    model, x = make(dtype=torch.float32).eval(), tokens(2, 4)
    torch.manual_seed(3)
    a = model.generate(x, 8, temperature=0.8, top_k=5)
    torch.manual_seed(3)
    assert torch.equal(a, model.generate(x, 8, temperature=0.8, top_k=5))
    assert torch.equal(model.generate(x, 8, top_k=1), model.generate(x, 8, temperature=0))
    assert model.generate(x, 3, top_k=1000).shape == (2, 7)              # more than the vocabulary: all of it


def test_reduction_and_ignored_targets():
    model, x, y = make(), tokens(), tokens(seed=2)
    y[:, ::3] = -1
    _, each, _ = model(x, y, reduction='none')
    assert each.shape == y.shape and (each[y < 0] == 0).all()
    log_prob = model(x)[0].log_softmax(-1)
    for b, t in itertools.product(range(2), range(11)):
        if y[b, t] >= 0:
            assert abs(each[b, t] + log_prob[b, t, y[b, t]]) < 1e-12
    assert abs(model(x, y)[1] - each[y >= 0].mean()) < 1e-12


def test_eval_mode_draws_nothing():
    model, x = make(dropout=0.5).eval(), tokens()
    state = torch.get_rng_state()
    assert torch.equal(model(x)[0], model(x)[0]) and torch.equal(state, torch.get_rng_state())
    model.train()
    assert not torch.equal(model(x)[0], model(x)[0])


@pytest.mark.parametrize('where', ['', 'first.0', 'parallel.0'])
def test_every_place_drops_out(where, monkeypatch):
    """Embeddings, attention and both branches of either kind of block: each one alone changes the output."""
    model, x = make(n_parallel=1, n_layer=2).train(), tokens()
    layer = model.get_submodule(where)
    layer.dropout.p = 0.5
    assert not torch.equal(model(x)[0], model(x)[0])
    seen = []
    layer.dropout.register_forward_hook(lambda module, args, out: seen.append(module))
    rates = []
    real = F.scaled_dot_product_attention

    def attention(*args, dropout_p, **rest):
        rates.append(dropout_p)
        return real(*args, dropout_p=dropout_p, **rest)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', attention)
    model(x)
    assert rates.count(0.5) == (1 if where else 0)
    assert len(seen) == (2 if where else 1)


@pytest.mark.parametrize('swiglu', [False, slow(True)])
def test_initialisation(swiglu):
    torch.manual_seed(0)
    model = MoEP(MoEPConfig(vocab_size=512, block_size=64, swiglu=swiglu, n_parallel=4))
    std = {n: p.std().item() for n, p in model.named_parameters()}
    assert abs(std['wte.weight'] - 0.02) < 1e-3 and abs(std['parallel.3.qkv'] - 0.02) < 1e-3
    for name in ('first.0.proj.weight', 'last.0.down.weight', 'parallel.0.proj', 'parallel.0.down'):
        assert abs(std[name] - 0.02 / math.sqrt(2 * 6)) < 1e-3, name
    down = 0.02 * math.sqrt(2) / 0.6 / math.sqrt(512) if swiglu else 1 / math.sqrt(384)
    assert abs(std['shrink.down'] / down - 1) < 0.02
    assert all(p.abs().max() == 0 for n, p in model.named_parameters() if n.endswith('bias'))
    sizes = []                                           # shrink and grow carry the stream, and keep its size

    def record(module, args, out):
        sizes.append((out[0].std() / args[0].std()).item())
    for moe in (model.shrink, model.grow):
        moe.register_forward_hook(record)
    model.eval()(torch.randint(0, 512, (4, 64)))
    assert len(sizes) == 2 and all(0.3 < s < 3 for s in sizes), sizes


def test_what_a_router_of_your_own_adds_keeps_its_values():
    class Tempered(moep.Router):
        def __init__(self, d, n_choices, config):
            super().__init__(d, n_choices, config)
            self.temperature = torch.nn.Parameter(torch.ones(1))
            self.bias = torch.nn.Parameter(torch.full((n_choices,), 3.0))

    class Mine(MoEP):
        router = Tempered
    model = Mine(MoEPConfig(**SMALL))
    routers = [m for m in model.modules() if isinstance(m, Tempered)]
    assert routers and all(m.temperature == 1 and (m.bias == 3).all() for m in routers)
    assert all(m.linear.weight.std() < 0.03 for m in routers)


def test_a_loss_that_a_router_of_your_own_adds():
    """It is summed over the parallel layers, and over shrink and grow."""
    class Counting(moep.Router):
        def forward(self, x_ND):
            gate_NK, choice_NK, losses = super().forward(x_ND)
            return gate_NK, choice_NK, losses | dict(size=torch.tensor(self.n_choices))

    class Mine(MoEP):
        router = Counting
    aux = Mine(MoEPConfig(**SMALL))(tokens())[2]
    assert list(aux) == ['block_balance', 'block_size', 'expert_balance', 'expert_size']
    assert aux['block_size'] == 2 * 4 and aux['expert_size'] == 2 * 3


def test_paper_sizes():
    for changes, total in ((dict(n_layer=12, n_parallel=0), 28e6), (dict(), 28e6), (dict(swiglu=True), 38e6)):
        with torch.device('meta'):
            model = MoEP(MoEPConfig(**changes))
        assert abs(model.count_params()[0] / total - 1) < 0.02
    defaults = vars(MoEPConfig())                        # whoever copies the file trains the paper's model
    paper = read_config(ROOT / 'config/paper/moep.py')
    assert all(defaults[key] == value for key, value in paper.items() if key in defaults)


def test_active_parameters_by_hand():
    model = make()
    D, d, P, E, K, V = 32, 16, 4, 3, 2, 61
    full = 4 * D + 3 * D * D + 3 * D + D * D + D + 4 * D * D + 4 * D + 4 * D * D + D
    shared = P * d + P * (2 * d + 3 * d * d + 3 * d)                     # router, norm, queries, keys, values
    chosen = K * (d * d + d + 2 * d + 4 * d * d + 4 * d + 4 * d * d + d)
    moe = (E * D + K * (D * d + d)) + (E * d + K * (d * D + D))
    assert model.count_params()[1] == V * D + 2 * full + 2 * (shared + chosen) + moe + 2 * D
    assert model.count_params()[0] == sum(p.numel() for p in model.parameters())
    swiglu = make(swiglu=True)                           # blocks: 8D up; experts: 2 * 24 up, 24 down
    full += 4 * D * D + 4 * D
    chosen += K * (4 * d * d + 4 * d)
    moe = (E * D + K * (D * 48 + 48 + 24 * d + d)) + (E * d + K * (d * 48 + 48 + 24 * D + D))
    assert swiglu.count_params()[1] == V * D + 2 * full + 2 * (shared + chosen) + moe + 2 * D
    dense = make(n_parallel=0)
    assert dense.count_params()[0] - dense.count_params()[1] == 24 * 32  # the position table


def test_config_rebuilds_and_errors():
    model = make()
    again = MoEP(MoEPConfig(**model.config.__dict__)).double()
    again.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens())[0], again(tokens())[0])
    for wrong in (dict(balance='swich'), dict(n_head=5), dict(top_k=9), dict(top_k=0), dict(top_k=4)):
        with pytest.raises(ValueError):
            MoEPConfig(**{**SMALL, **wrong})
    with pytest.raises(ValueError, match='block_size'):
        model(tokens(1, 25))
    odd = make(n_layer=3)
    assert (len(odd.first), len(odd.last)) == (1, 2)     # the smaller half comes first
