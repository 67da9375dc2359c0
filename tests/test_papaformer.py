"""papaformer.py against a slow oracle written from the paper: one token, one path, one pair of channels at
a time."""

import itertools
import json
import math
from dataclasses import asdict, dataclass

import pytest
import torch
import torch.nn.functional as F

import papaformer
from lora import add_lora
from papaformer import PaPaformer, PaPaformerConfig, compose, path_usage

SMALL = dict(vocab_size=31, block_size=12, n_layer=2, n_head=2, n_embd=16, ffn_hidden=24, n_parallel=2,
             path_embd=[8, 8], path_head=[2, 2], path_ffn_hidden=[12, 20])
THREE = dict(path_embd=[8, 8, 8], path_head=[2, 1, 4], path_ffn_hidden=[12, 20, 8])
UNEQUAL = dict(path_embd=[8, 4, 8], path_head=[2, 1, 4], path_ffn_hidden=None)
DENSE = dict(n_parallel=0, n_layer=3, dropout=0.0)
CONNECTIONS = ['share', 'gumbel1', 'gumbel2']


def make(seed=0, dtype=torch.float64, **changes):
    torch.manual_seed(seed)
    model = PaPaformer(PaPaformerConfig(**{**SMALL, **changes})).to(dtype)
    with torch.no_grad():                                # gains, routers and residual branches that matter
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def make_path(seed=0, **changes):
    return make(seed, torch.float32, **{**DENSE, 'n_embd': 8, 'ffn_hidden': None, **changes})


def tokens(B=2, T=7, seed=1):
    return torch.randint(0, SMALL['vocab_size'], (B, T), generator=torch.Generator().manual_seed(seed))


def router_of(form='intended', n=3, **changes):
    """A router whose scores are what it reads."""
    config = PaPaformerConfig(**{**SMALL, 'connection': 'gumbel2', 'aux_form': form, **changes})
    router = papaformer.Router(n, n, config)
    with torch.no_grad():
        router.linear.weight.copy_(torch.eye(n))
    return router.double()


# ---- The slow oracle -----------------------------------------------------------------------------


def rms_norm(x, gain):
    return x / torch.sqrt(sum(v * v for v in x) / len(x) + 1e-5) * gain


def rotate(x, position):
    """The 2x2 rotation of each pair (i, i + d/2) by position * 10000^(-2i/d)."""
    half, out = len(x) // 2, [None] * len(x)
    for i in range(half):
        angle = position * 10000 ** (-2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = cos * x[i] - sin * x[i + half]
        out[i + half] = sin * x[i] + cos * x[i + half]
    return torch.stack(out)


def block(x, b, n_head, out_proj):
    """One LLaMA block (Fig. 1) over one sequence, a list of vectors."""
    D = len(x[0])
    d, hidden = D // n_head, b.down.weight.size(1)
    h = [b.qkv.weight @ rms_norm(v, b.norm_1.weight) for v in x]
    heads = []
    for n in range(n_head):
        q, k, v = ([u[part * D + n * d:part * D + (n + 1) * d] for u in h] for part in range(3))
        q, k = ([rotate(u, t) for t, u in enumerate(m)] for m in (q, k))
        seen = []
        for t in range(len(x)):
            score = [torch.exp(q[t] @ k[i] / math.sqrt(d)) for i in range(t + 1)]
            seen.append(sum(s / sum(score) * v[i] for i, s in enumerate(score)))
        heads.append(seen)
    out = []
    for t, v in enumerate(x):
        joined = torch.cat([seen[t] for seen in heads])
        v = v + (b.proj.weight @ joined if out_proj else joined)
        u = b.fc.weight @ rms_norm(v, b.norm_2.weight)
        gate, up = u[:hidden], u[hidden:]
        out.append(v + b.down.weight @ (gate / (1 + torch.exp(-gate)) * up))
    return out


class OneHot(torch.autograd.Function):
    """Straight-through: forward the best choice alone, backward the softmax's Jacobian, written out."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return torch.tensor([float(i == z.argmax()) for i in range(len(z))], dtype=z.dtype)

    @staticmethod
    def backward(ctx, grad):
        e = torch.exp(ctx.saved_tensors[0])
        p = e / e.sum()
        n = len(p)
        return torch.stack([sum(grad[j] * p[j] * (float(i == j) - p[i]) for j in range(n)) for i in range(n)])


def choose(logits, noise, c):
    """Routing weights of one token. Noise is -log of an exponential draw, which is Gumbel's distribution."""
    z = (logits if noise is None else logits + noise) / c.temperature
    if c.hard and noise is None:
        return OneHot.apply(z.detach())
    if c.hard:
        return OneHot.apply(z)
    return torch.exp(z) / torch.exp(z).sum()


def auxiliary(pi, form):
    """Eq. 8 and 9 over all tokens; 1e-8 keeps the logarithm of a one-hot finite, as in the release."""
    def entropy(p):
        return -sum(v * torch.log(v + 1e-8) for v in p)
    per_token, load = sum(entropy(p) for p in pi) / len(pi), entropy(sum(pi) / len(pi))
    signs = dict(printed=(1, 1), intended=(-1, -1), released=(-1, 1))[form]
    return dict(entropy=signs[0] * per_token, load=signs[1] * load)


def oracle(model, idx, noise=None):
    """-> logits (B, T, V), auxiliary losses, {layer: weights (B, T, k+1)}. noise: (B, T, k+1) per layer."""
    c, m, k = model.config, model, len(model.config.path_embd)
    unequal = len(set(c.path_embd)) > 1
    assert [len(m.first), len(m.last)] == [c.n_layer // 2, (c.n_layer + 1) // 2] or not c.n_parallel
    weights, probabilities, rows = {}, {}, []
    for n_row, row in enumerate(idx):
        x = [m.wte.weight[i] for i in row]
        for b in m.first:
            x = block(x, b, c.n_head, c.attn_out_proj)
        if c.n_parallel:
            reads = [[m.shrink.maps[i if unequal else 0].weight @ v for v in x] for i in range(k)]
        for n, layer in enumerate(m.parallel):
            con, name = layer.connection, f'parallel.{n}'
            f = [block(reads[i], layer.blocks[i], c.path_head[i], c.attn_out_proj) for i in range(k)]
            y = [torch.cat([f[i][t] for i in range(k)]) for t in range(len(x))]             # Eq. 1
            if c.connection == 'share':
                last = n == c.n_parallel - 1
                reads = [[con.maps[i if unequal and not last else 0].weight @ v for v in y] for i in range(k)]
                x = reads[0]
                continue
            out = []
            for t in range(len(x)):
                x_comb = con.combine.weight @ y[t]                                          # Eq. 2, 6
                read = x_comb if c.connection == 'gumbel1' else y[t]
                logits = con.router.linear.weight @ read                                    # Eq. 4
                pi = choose(logits, None if noise is None else noise[n][n_row, t], c)       # Eq. 5
                out.append(sum(pi[i] * f[i][t] for i in range(k)) + pi[k] * x_comb)         # Eq. 3, 7
                weights.setdefault(name, []).append(pi)
                plain = torch.exp(logits) / torch.exp(logits).sum()
                probabilities.setdefault(name, []).append(pi if c.aux_form == 'released' else plain)
            reads, x = [out] * k, [m.grow.maps[0].weight @ v for v in out]
        for b in m.last:
            x = block(x, b, c.n_head, c.attn_out_proj)
        rows.append(torch.stack([m.head.weight @ rms_norm(v, m.norm_f.weight) for v in x]))
    layers = [auxiliary(pi, c.aux_form) for pi in probabilities.values()]
    aux = {name: sum(layer[name] for layer in layers) for name in ('entropy', 'load')} if layers else {}
    return torch.stack(rows), aux, {n: torch.stack(w).view(*idx.shape, -1) for n, w in weights.items()}


def objective(loss, aux):
    return loss + 0.3 * aux.get('entropy', 0) + 0.7 * aux.get('load', 0)


G1, G2 = dict(connection='gumbel1'), dict(connection='gumbel2')


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize('changes, training', [
    (UNEQUAL, False), (DENSE, False), (G1, True), (G2 | dict(aux_form='released', temperature=1.7), True),
    (G2 | dict(hard=False, aux_form='printed', temperature=0.6), False),
    slow(dict(), True), slow(THREE, False), slow(dict(attn_out_proj=False, n_layer=3), False),
    slow(dict(n_parallel=1, n_layer=1, path_ffn_hidden=None, ffn_hidden=None), False),
    slow(G1, False), slow(G1 | THREE | dict(aux_form='printed', temperature=0.6), True),
    slow(G1 | dict(hard=False), False),
    slow(G1 | dict(aux_form='released', attn_out_proj=False), True),
    slow(G2, True), slow(G2 | THREE, False),
    slow(G2 | THREE | dict(hard=False, temperature=0.6), True)])
def test_oracle(changes, training):
    """Outputs, auxiliary losses, routes and all gradients; in training with the noise that the seed fixes."""
    model, x, y = make(**changes).train(training), tokens(T=6), tokens(T=6, seed=2)
    y[0, 3] = -1
    noise = None
    if training:
        torch.manual_seed(5)
        shape = (*x.shape, len(model.config.path_embd) + 1)
        noise = [-torch.log(torch.empty(shape, dtype=torch.float64).exponential_()) for _ in model.parallel]
    logits, aux, weights = oracle(model, x, noise)
    kept = y.flatten() >= 0
    loss = F.cross_entropy(logits.flatten(0, 1)[kept], y.flatten()[kept])
    grads = torch.autograd.grad(objective(loss, aux), list(model.parameters()), allow_unused=True)
    torch.manual_seed(5)
    assert torch.allclose(model(x)[0], logits, rtol=0, atol=1e-10)
    torch.manual_seed(5)
    _, fast_loss, fast_aux = model(x, y)
    assert abs(fast_loss - loss) < 1e-10 and fast_aux.keys() == aux.keys()
    assert all(abs(fast_aux[name] - aux[name]) < 1e-10 for name in aux)
    objective(fast_loss, fast_aux).backward()
    for (name, p), g in zip(model.named_parameters(), grads):
        got, want = (torch.zeros_like(p) if v is None else v for v in (p.grad, g))
        assert torch.allclose(got, want, rtol=0, atol=1e-10), name
    torch.manual_seed(5)
    found = model.routes(x)
    assert not any(m._forward_hooks for m in model.modules())
    assert list(found) == list(weights) == [f'parallel.{i}' for i in range(len(weights))]
    assert all(torch.allclose(found[n], weights[n], rtol=0, atol=1e-12) for n in found)


# ---- Gumbel routing ------------------------------------------------------------------------------


@pytest.mark.parametrize('changes', [G1, G2, G1 | THREE])
def test_training_routes_are_one_hot_and_noisy_and_learn(changes):
    model, x = make(**changes).train(), tokens(4, 12)
    a, b = model.routes(x), model.routes(x)
    for name in a:
        assert ((a[name] == 0) | (a[name] == 1)).all() and (a[name].sum(-1) == 1).all()
        assert not torch.equal(a[name], b[name])
        assert a[name].flatten(0, 1).sum(0).min() > 0    # every choice is explored
    model(x, x.flip(1))[1].backward()                    # the cross-entropy alone
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 0, name
        if 'router' in name or 'combine' in name:
            assert (p.grad.abs().max(1).values > 0).all(), name


@pytest.mark.parametrize('temperature', [0.5, 1.0, 3.0])
def test_choices_are_drawn_from_the_softmax(temperature):
    """The hard choice has the probabilities softmax(logits) at any temperature."""
    logits, N = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64), 6000
    router = router_of(temperature=temperature).train()
    torch.manual_seed(0)
    count = router(logits.expand(2, N // 2, 3))[0].sum((0, 1))
    want = N * logits.softmax(-1)
    assert count.sum() == N and ((count - want) ** 2 / want).sum() < 14   # chi-square, 2 degrees: p = 0.001


def test_eval_mode_takes_the_best_choice():
    logits = torch.tensor([[[1.0, -0.5, 0.3], [0.2, 0.1, 0.4]]], dtype=torch.float64)
    hard, _ = router_of(temperature=0.5).eval()(logits)
    assert hard.tolist() == [[[1, 0, 0], [0, 0, 1]]]
    soft, _ = router_of(temperature=0.5, hard=False).eval()(logits)
    assert torch.allclose(soft, (2 * logits).softmax(-1))


def test_the_router_is_exact_under_autocast():
    """Scores that bfloat16 would round to a tie are told apart."""
    with torch.autocast('cpu', torch.bfloat16):
        pi, _ = router_of().float().eval()(torch.tensor([[[1.0, 1.001, 1.002]]]))
    assert pi.tolist() == [[[0, 0, 1]]] and pi.dtype == torch.float32


@pytest.mark.parametrize('changes', [G1, G2, G1 | dict(hard=False), dict()])
def test_eval_mode_draws_nothing(changes):
    model, x = make(dropout=0.5, **changes).eval(), tokens()
    state = torch.get_rng_state()
    assert torch.equal(model(x)[0], model(x)[0]) and torch.equal(state, torch.get_rng_state())
    model.train()
    assert not torch.equal(model(x)[0], model(x)[0])


# ---- Auxiliary losses ----------------------------------------------------------------------------


def test_auxiliary_losses_by_hand():
    """Two tokens, (.5 .25 .25) and (.1 .6 .3), have entropies of 1.039721 and 0.897946; their mean
    (.3 .425 .275) has 1.079871."""
    logits = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.6, 0.3]]], dtype=torch.float64).log() + 3.0
    hard = torch.tensor([[[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]], dtype=torch.float64)
    want = dict(intended=(-0.968833, -1.079871), printed=(0.968833, 1.079871), released=(0.0, math.log(2)))
    for form, (entropy, load) in want.items():
        losses = papaformer.routing_losses(logits, hard, form)
        assert losses.keys() == {'entropy', 'load'}
        assert abs(losses['entropy'] - entropy) < 2e-6 and abs(losses['load'] - load) < 2e-6, form
    soft = papaformer.routing_losses(logits, logits.softmax(-1), 'released')     # its signs, entropy above 0
    assert abs(soft['entropy'] + 0.968833) < 2e-6 and abs(soft['load'] - 1.079871) < 2e-6
    losses = router_of('intended', temperature=0.3).train()(logits)[1]           # no noise, no temperature
    assert abs(losses['entropy'] + 0.968833) < 2e-6 and abs(losses['load'] + 1.079871) < 2e-6


def minimise(form, names):
    """40 steps from a slightly unbalanced router -> largest load, the tokens' mean largest probability."""
    torch.manual_seed(0)
    config = PaPaformerConfig(**{**SMALL, 'connection': 'gumbel2', 'aux_form': form})
    router = papaformer.Router(8, 3, config).train()
    x = torch.randn(1, 256, 8) + 1.0
    with torch.no_grad():
        router.linear.weight[0] += 0.1
    optimizer = torch.optim.Adam(router.parameters(), lr=0.1)
    for _ in range(40):
        losses = router(x)[1]
        optimizer.zero_grad()
        sum(losses[name] for name in names).backward()
        optimizer.step()
    prob = router.linear(x).softmax(-1)[0]
    return prob.mean(0).max().item(), prob.max(1).values.mean().item()


def test_minimising_spreads_or_collapses():
    """Both losses together, then each alone, in the text's signs and in the printed ones."""
    for names in (['entropy', 'load'], ['load'], ['entropy']):
        load, token = minimise('intended', names)
        assert load < 0.36, (names, load)
        assert token < 0.36 or names == ['load'], (names, token)
    for names in (['entropy', 'load'], ['load']):
        load, token = minimise('printed', names)
        assert load > 0.97 and token > 0.97, (names, load, token)
    assert minimise('printed', ['entropy'])[1] > 0.97    # every token decided


# ---- Compose -------------------------------------------------------------------------------------


def test_compose_keeps_dropout():
    paths = [make_path(i, dropout=p) for i, p in enumerate([0.1, 0.2])]
    assert compose(paths).config.dropout == 0.2
    assert compose(paths, dropout=0.0).config.dropout == 0.0


def test_compose_keeps_your_class():
    class Mine(PaPaformer):
        pass
    paths = [Mine(make_path(i).config) for i in range(2)]
    assert type(compose(paths)) is Mine


def test_compose_knows_a_setting_of_your_own():
    @dataclass
    class MyConfig(PaPaformerConfig):
        mine: float = 1.0
    paths = [PaPaformer(MyConfig(**asdict(make_path(i).config))) for i in range(2)]
    assert compose(paths, mine=2.0).config.mine == 2.0


@pytest.mark.parametrize('connection', CONNECTIONS)
@pytest.mark.parametrize('k', [2, 3])
def test_compose_copies_paths_and_rebuilds(connection, k):
    """Tensors of the paths stand where Fig. 5 puts them, the rest is fresh, the config rebuilds the model."""
    heads, widths = [2, 1, 4], [8, 4, 16] if connection == 'share' else [8, 8, 8]
    hidden = [None, 20, None]                            # an explicit one is kept
    paths = [make_path(i, n_embd=widths[i], n_head=heads[i], ffn_hidden=hidden[i]) for i in range(k)]
    settings = dict(connection=connection, n_layer=3, n_head=2, ffn_hidden=28, dropout=0.1)
    settings['aux_form'] = 'printed'
    torch.manual_seed(0)
    model = compose(paths, **settings)
    torch.manual_seed(0)
    fresh = PaPaformer(model.config).state_dict()
    c, state = model.config, model.state_dict()
    assert (c.n_embd, c.n_parallel, c.path_embd, c.path_head) == (sum(widths[:k]), 3, widths[:k], heads[:k])
    assert c.path_ffn_hidden == [64 if w == 16 else 20 if i == 1 else 32 for i, w in enumerate(widths[:k])]
    assert all(getattr(c, name) == value for name, value in settings.items())
    copied = {'wte.weight', 'head.weight'}
    start = 0
    for n, path in enumerate(paths):
        end = start + widths[n]
        assert torch.equal(state['wte.weight'][:, start:end], path.wte.weight)
        assert torch.equal(state['head.weight'][:, start:end], path.head.weight)
        for layer, name in itertools.product(range(3), path.first[0].state_dict()):
            ours = f'parallel.{layer}.blocks.{n}.{name}'
            assert torch.equal(state[ours], path.first[layer].state_dict()[name]), ours
            copied.add(ours)
        start = end
    assert all(torch.equal(state[name], fresh[name]) != (name in copied) for name in state)
    assert len(state) - len(copied) > 20 and torch.equal(model.norm_f.weight, torch.ones(c.n_embd))
    for config in (c, PaPaformerConfig(**json.loads(json.dumps(asdict(c))))):
        again = PaPaformer(config)
        again.load_state_dict(state)
        assert torch.equal(model.eval()(tokens())[0], again.eval()(tokens())[0])
    before = paths[0].first[0].qkv.weight.clone()
    with torch.no_grad():                                # a copy, not the path's own tensor
        model.parallel[0].blocks[0].qkv.weight.add_(1)
    assert torch.equal(before, paths[0].first[0].qkv.weight)


def test_compose_errors():
    a, b = make_path(0), make_path(1)
    wide, deep = make_path(n_embd=16), make_path(n_layer=2)
    parallel = make(dtype=torch.float32)
    for paths, settings, words in (
            ([a, wide], dict(connection='gumbel1'), r"gumbel1 adds the paths' outputs.*\[8, 16\].*='share'"),
            ([a, deep], {}, r'the paths differ in n_layer: \[3, 2\]'),
            ([a, make_path(vocab_size=37)], {}, r'the paths differ in vocab_size: \[31, 37\]'),
            ([a, make_path(attn_out_proj=False)], {}, 'the paths differ in attn_out_proj'),
            ([a, parallel], {}, 'without parallel layers'),
            ([], {}, 'list of path models'),
            (a, {}, 'list of path models'),
            ([make_path(n_embd=24, n_head=3), make_path(n_embd=16, n_head=4)], {}, 'width of 40 .*n_head'),
            ([a, b], dict(conection='share'), "'conection' is not a setting"),
            ([a, b], dict(n_embd=16), "'n_embd' follows from the paths"),
            ([a, b], dict(path_ffn_hidden=[8, 8]), "'path_ffn_hidden' follows from the paths")):
        with pytest.raises(ValueError, match=words):
            compose(paths, **settings)
    assert compose([a, b]).config.n_head == 4            # the sum, if it is not given
    with pytest.raises(ValueError, match='a path has adapters: merge them first'):
        compose([a, add_lora(make_path())])
    assert compose([a, make_path(block_size=20)]).config.block_size == 20
    assert compose([a.double(), b.double()]).wte.weight.dtype == torch.float64


# ---- Which path is used --------------------------------------------------------------------------


def test_path_usage_of_gumbel():
    """Identity blocks; channel 0 of a token's embedding says path 0 or 1, channel 1 asks for the mix. The
    second layer has its rows swapped. Only the last token counts."""
    for connection in ('gumbel1', 'gumbel2'):
        model = make(connection=connection).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith(('proj.weight', 'down.weight', 'linear.weight')):
                    p.zero_()
            model.shrink.maps[0].weight.copy_(torch.eye(8, 16))
            model.wte.weight[:3, :2] = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.1, 2.0]])
            for layer, (up, down) in zip(model.parallel, ((0, 1), (1, 0))):
                layer.connection.combine.weight.copy_(torch.eye(8, 16))
                w = layer.connection.router.linear.weight
                w[up, 0], w[down, 0], w[2, 1] = 1.0, -1.0, 1.0
        idx = torch.tensor([[2, 1, 0], [0, 0, 1], [0, 1, 2]])
        assert path_usage(model, idx).tolist() == [[0, 1], [1, 0], [2, 2]]
        assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize('widths', [[8, 8], [8, 4], [8, 8, 8]])
def test_path_usage_of_share(widths):
    """The first Connection passes path 0's output on, the second the last path's; the third has no say. The
    other path's output is larger, so that a plain product would choose it."""
    k = len(widths)
    changes = dict(n_parallel=3, path_embd=widths, path_head=[1] * k, path_ffn_hidden=None)
    model = make(**changes).eval()
    eye = torch.eye(sum(widths), dtype=torch.float64)
    with torch.no_grad():
        for layer, chosen in zip(model.parallel, (0, k - 1)):
            for i, (w, m) in enumerate(zip(widths, layer.connection.maps)):
                picked = i if len(layer.connection.maps) > 1 else chosen
                m.weight.copy_(eye[sum(widths[:picked]):][:w] * (1 if picked == chosen else -3))
            for i, b in enumerate(layer.blocks):
                b.down.weight.mul_(1 if i == chosen else 30)
    assert path_usage(model, tokens(5, 6)).tolist() == [[0, k - 1]] * 5
    assert not any(m._forward_hooks for m in model.modules())
    model, idx = make(**changes).eval(), tokens(5, 6)
    by_length = torch.stack([path_usage(model, idx[:, :t]) for t in range(1, 7)])
    assert (by_length != by_length[0]).any()             # the last token's, not the first one's
    for changes in (DENSE, DENSE | G1, dict(n_parallel=1)):
        with pytest.raises(ValueError, match='parallel layers'):
            path_usage(make(**changes), tokens())


# ---- Sizes ---------------------------------------------------------------------------------------


def count(**changes):
    with torch.device('meta'):
        return PaPaformer(PaPaformerConfig(**changes)).count_params()


LLAMA_256, LLAMA_192 = dict(n_parallel=0, n_layer=8), dict(n_parallel=0, n_layer=8, n_embd=192, n_head=6)
PATH = dict(n_parallel=0, n_layer=3, n_embd=128, n_head=4)


@pytest.mark.parametrize('changes, paper, release', [(LLAMA_256, 32e6, 33.6e6), (LLAMA_192, 22.5e6, 23.7e6),
                                                     (PATH, 13.5e6, 13.6e6)]
                         + [(dict(connection=c), 28.5e6, 29.4e6) for c in CONNECTIONS])
def test_paper_sizes(changes, paper, release):
    """Table 2 within 2%, and the release's own counts, from 4d and no output projection."""
    total, active = count(**changes)
    assert abs(total / paper - 1) < 0.02 and total - active == 50278 * changes.get('n_embd', 256)
    hidden = dict(ffn_hidden=4 * changes.get('n_embd', 256), path_ffn_hidden=[512, 512])
    assert abs(count(**changes, **hidden, attn_out_proj=False)[0] / release - 1) < 0.005


def test_initialisation():
    torch.manual_seed(0)
    for connection in CONNECTIONS:
        model = PaPaformer(PaPaformerConfig(vocab_size=512, block_size=64, connection=connection)).eval()
        std = {n: p.std().item() for n, p in model.named_parameters()}
        for name in ('wte.weight', 'head.weight', 'parallel.2.blocks.1.qkv.weight', 'first.0.fc.weight'):
            assert abs(std[name] - 0.02) < 1e-3, name
        for name in ('first.0.proj.weight', 'last.0.down.weight', 'parallel.0.blocks.1.proj.weight'):
            assert abs(std[name] - 0.02 / math.sqrt(2 * 5)) < 1e-3, name
        for name, p in model.named_parameters():
            if '.maps.' in name or '.combine.' in name:
                assert abs(std[name] * math.sqrt(p.size(1)) - 1) < 0.05, name
        assert all((p == 1).all() for n, p in model.named_parameters() if 'norm' in n)
        sizes = []                                       # the stream keeps its size
        model.last[0].register_forward_hook(lambda m, args, out: sizes.append(args[0].std().item()))
        model(torch.randint(0, 512, (4, 64)))
        assert 0.5 < sizes[0] / 0.02 < 2, sizes


# ---- Protocol ------------------------------------------------------------------------------------


@pytest.mark.parametrize('changes', [dict(), G1, G2, UNEQUAL, DENSE])
def test_causal(changes):
    model, x = make(**changes).eval(), tokens(1, 12)
    before = model(x)[0]
    for t in (1, 5, 11):
        changed = x.clone()
        changed[0, t] = (changed[0, t] + 1) % 31
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
        new = model(window)[0][:, -1].argmax(-1, keepdim=True)
        idx, window = torch.cat((idx, new), 1), torch.cat((window, new), 1)
    return idx


@pytest.mark.parametrize('changes, start', [
    (G1, 12), (UNEQUAL | dict(n_layer=1), 20), (DENSE, 1),
    slow(dict(), 1), slow(dict(), 12), slow(dict(), 20), slow(G1, 1), slow(G1, 20),
    slow(G2, 1), slow(G2, 12), slow(G2, 20), slow(UNEQUAL | dict(n_layer=1), 1),
    slow(UNEQUAL | dict(n_layer=1), 12), slow(DENSE, 12), slow(DENSE, 20)])
def test_cached_generation_is_uncached(changes, start):
    """Also far past the context length (12), and from prompts as long as it or longer."""
    model, x = make(**changes).eval(), tokens(3, start)
    assert torch.equal(model.generate(x, 30, temperature=0), uncached(model, x, 30))


@pytest.mark.parametrize('changes', [UNEQUAL, G2])
def test_cache_in_pieces(changes):
    """Reading a text in pieces through the cache gives the logits of reading it at once."""
    model, x = make(**changes).eval(), tokens(2, 12)
    cache = []
    pieces = [model(part, cache=cache)[0] for part in x.split([3, 1, 6, 2], dim=1)]
    assert torch.allclose(torch.cat(pieces, 1), model(x)[0], atol=1e-12)
    assert len(cache) == 2 + 2 * len(model.config.path_embd)
    assert cache[0][0].shape == (2, 2, 12, 8) and cache[1][1].shape == (2, 2, 12, 4)


@pytest.mark.parametrize('connection', CONNECTIONS)
def test_batched_is_one_by_one(connection):
    model, x = make(connection=connection).eval(), tokens(4, 12)
    assert torch.allclose(model(x)[0], torch.cat([model(row[None])[0] for row in x]), atol=1e-12)
    states, _ = model.features(x)
    assert states.shape == (4, 12, 16) and torch.equal(model.head(states), model(x)[0])


def test_reduction_and_ignored_targets():
    model, x, y = make(), tokens(), tokens(seed=2)
    y[:, ::3] = -1
    none, each, _ = model(x, y, reduction='none')
    assert none is None and each.shape == y.shape and (each[y < 0] == 0).all()
    log_prob = model(x)[0].log_softmax(-1)
    for b, t in itertools.product(range(2), range(7)):
        if y[b, t] >= 0:
            assert abs(each[b, t] + log_prob[b, t, y[b, t]]) < 1e-12
    assert abs(model(x, y)[1] - each[y >= 0].mean()) < 1e-12


@pytest.mark.parametrize('changes', [dict(), UNEQUAL, DENSE])
def test_where_dropout_is(changes, monkeypatch):
    """In the parallel blocks only, or in all blocks of a dense model: attention and both branches."""
    model, x = make(**changes | dict(dropout=0.3)).train(), tokens()
    kernel = F.scaled_dot_product_attention
    attention, branches = [], []

    def record(*args, dropout_p, **rest):
        attention.append(dropout_p)
        return kernel(*args, dropout_p=dropout_p, **rest)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', record)
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.register_forward_hook(lambda m, args, out: branches.append(0.3 if (out == 0).any() else 0.0))
    model(x)
    paths = [0.3] * 2 * len(model.config.path_embd)
    assert attention == ([0.3] * 3 if changes is DENSE else [0.0, *paths, 0.0])
    assert branches == [p for p in attention for _ in range(2)]
    model.eval()(x)
    assert set(attention[len(attention) // 2:]) == {0.0}


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:mkldnn_matmul failed')   # CPUs without bfloat16 say so, and go on
@pytest.mark.parametrize('connection', CONNECTIONS)
def test_bfloat16_autocast_and_one_graph(compile_model, connection):
    """Under autocast the model trains in bfloat16, and compiles without a graph break: no value is read."""
    model, x = make(dtype=torch.float32, connection=connection).train(), tokens(2, 12)
    compiled = compile_model(model, backend='eager', fullgraph=True)
    torch.manual_seed(3)
    exact = model(x, x)[1]
    with torch.autocast('cpu', torch.bfloat16):
        for m in (model, compiled):
            torch.manual_seed(3)                         # the same Gumbel noise
            _, loss, aux = m(x, x)
            assert abs(loss - exact) < 0.05 * exact and loss.dtype == torch.float32
    assert all(v.dtype == torch.float32 for v in aux.values())   # routers stay out of bfloat16
    streams = []
    for block in model.modules():
        if isinstance(block, papaformer.Block):
            block.register_forward_hook(lambda _, args, output: streams.extend((args[0].dtype, output.dtype)))
    with torch.autocast('cpu', torch.bfloat16):
        model(x)
    assert set(streams) == {torch.float32}               # and so does the residual stream
    objective(loss, aux).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_config_errors():
    for wrong, words in (
            (dict(vocab_size=0), 'vocab_size = 0'), (dict(block_size=-1), 'block_size'),
            (dict(n_layer=0), 'n_layer'), (dict(temperature=0.0), 'temperature'),
            (dict(n_parallel=-1), 'n_parallel'),
            (dict(dropout=1.0), 'dropout'), (dict(dropout=-0.1), 'dropout'),
            (dict(path_head=[2]), r'path_embd.*path_head.*one entry'),
            (dict(path_embd=[], path_head=[], path_ffn_hidden=None), 'one entry per path'),
            (dict(path_ffn_hidden=[8]), 'path_ffn_hidden has 1 entries for 2 paths'),
            (dict(ffn_hidden=0), 'ffn_hidden'), (dict(path_ffn_hidden=[8, -1]), 'path_ffn_hidden'),
            (dict(n_head=3), '16 cannot be split into 3'), (dict(n_head=16), 'even width'),
            (dict(n_head=0), '0 heads'), (dict(n_embd=0), 'width of 0'),
            (dict(path_head=[2, 3]), '8 cannot be split'),
            (dict(connection='gumble1'), "'gumble1'; it can be share, gumbel1, gumbel2"),
            (dict(aux_form='paper'), 'intended, printed, released'),
            (dict(connection='gumbel2', path_embd=[8, 4]), r"gumbel2 adds .*\[8, 4\].*share")):
        with pytest.raises(ValueError, match=words):
            PaPaformerConfig(**{**SMALL, **wrong})
    PaPaformerConfig(n_parallel=0, path_embd=[3], path_head=[])          # a dense model ignores its paths
    with pytest.raises(ValueError, match='13 tokens are more than the block_size of 12'):
        make()(tokens(1, 13))
