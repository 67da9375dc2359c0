"""papaformer.py against a slow version written from the paper: one token and one path at a time."""

import functools
import itertools

import pytest
import torch

import test_contract
from oracles import attention, compare, rms, swiglu, tokens
from papaformer import PaPaformer, compose

THREE = dict(path_embd=[8, 8, 8], path_head=[2, 1, 4], path_ffn_hidden=[12, 20, 8])
UNEQUAL = dict(path_embd=[8, 4, 8], path_head=[2, 1, 4], path_ffn_hidden=None)
DENSE = dict(n_parallel=0, n_layer=3, dropout=0.0)
CONNECTIONS = ['share', 'gumbel1', 'gumbel2']


make = functools.partial(test_contract.make, 'papaformer')


def make_path(seed=0, **changes):
    return make(seed=seed, dtype=torch.float32, **{**DENSE, 'n_embd': 8, **changes})


# ---- The slow version ----------------------------------------------------------------------------

def block(x, b, n_head, out_proj):
    """One LLaMA block (Fig. 1) over one sequence, a list of vectors."""
    heads = attention([rms(v, b.norm_1.weight, 1e-5) for v in x], b.qkv.weight, n_head, n_head)
    out = []
    for v, joined in zip(x, heads):
        v = v + (b.proj.weight @ joined if out_proj else joined)
        out.append(v + swiglu(rms(v, b.norm_2.weight, 1e-5), b.fc.weight, b.down.weight))
    return out


class OneHot(torch.autograd.Function):
    """Straight-through: forward the best choice alone, backward the softmax's Jacobian, written
    out."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return torch.tensor([float(i == z.argmax()) for i in range(len(z))], dtype=z.dtype)

    @staticmethod
    def backward(ctx, grad):
        e = torch.exp(ctx.saved_tensors[0])
        p = e / e.sum()
        n = len(p)
        return torch.stack([sum(grad[j] * p[j] * (float(i == j) - p[i]) for j in range(n))
                            for i in range(n)])


def choose(logits, noise, c):
    """Routing weights of one token. Noise is -log of an exponential draw, which is Gumbel's
    distribution."""
    z = (logits if noise is None else logits + noise) / c.temperature
    if c.hard and noise is None:
        return OneHot.apply(z.detach())
    if c.hard:
        return OneHot.apply(z)
    return torch.exp(z) / torch.exp(z).sum()


def auxiliary(pi, form):
    """Eq. 8 and 9 over all tokens; 1e-8 keeps the logarithm of a one-hot finite, as in the
    release."""
    def entropy(p):
        return -sum(v * torch.log(v + 1e-8) for v in p)
    per_token, load = sum(entropy(p) for p in pi) / len(pi), entropy(sum(pi) / len(pi))
    signs = dict(printed=(1, 1), intended=(-1, -1), released=(-1, 1))[form]
    return dict(entropy=signs[0] * per_token, load=signs[1] * load)


def oracle(model, idx, noise=None):
    """-> logits (B, T, V), auxiliary losses, {layer: weights (B, T, k+1)}, {layer: (outputs of the
    paths, what the next blocks read), for the last token of each row}. noise: (B, T, k+1) per
    layer."""
    c, m, k = model.config, model, len(model.config.path_embd)
    unequal = len(set(c.path_embd)) > 1
    assert [len(m.first), len(m.last)] == [c.n_layer // 2, (c.n_layer + 1) // 2] or not c.n_parallel
    weights, probabilities, rows, outputs = {}, {}, [], {}
    for n_row, row in enumerate(idx):
        x = [m.wte.weight[i] for i in row]
        for b in m.first:
            x = block(x, b, c.n_head, c.attn_out_proj)
        if c.n_parallel:
            reads = [[m.shrink.maps[i if unequal else 0].weight @ v for v in x] for i in range(k)]
        for n, layer in enumerate(m.parallel):
            con, name = layer.connection, f'parallel.{n}'
            f = [block(reads[i], layer.blocks[i], c.path_head[i], c.attn_out_proj)
                 for i in range(k)]
            y = [torch.cat([f[i][t] for i in range(k)]) for t in range(len(x))]             # Eq. 1
            if c.connection == 'share':
                own_maps = unequal and n < c.n_parallel - 1
                reads = [[con.maps[i if own_maps else 0].weight @ v for v in y] for i in range(k)]
                last = [path[-1] for path in f], [path[-1] for path in reads]
                outputs.setdefault(n, []).append(last)
                x = reads[0]
                continue
            out = []
            for t in range(len(x)):
                x_comb = con.combine.weight @ y[t]                                        # Eq. 2, 6
                read = x_comb if c.connection == 'gumbel1' else y[t]
                logits = con.router.linear.weight @ read                                    # Eq. 4
                pi = choose(logits, None if noise is None else noise[n][n_row, t], c)       # Eq. 5
                out.append(sum(pi[i] * f[i][t] for i in range(k)) + pi[k] * x_comb)       # Eq. 3, 7
                weights.setdefault(name, []).append(pi)
                plain = torch.exp(logits) / torch.exp(logits).sum()
                probabilities.setdefault(name, []).append(pi if c.aux_form == 'released' else plain)
            reads, x = [out] * k, [m.grow.maps[0].weight @ v for v in out]
        for b in m.last:
            x = block(x, b, c.n_head, c.attn_out_proj)
        rows.append(torch.stack([m.head.weight @ rms(v, m.norm_f.weight, 1e-5) for v in x]))
    layers = [auxiliary(pi, c.aux_form) for pi in probabilities.values()]
    names = ('entropy', 'load') if layers else ()
    aux = {name: sum(layer[name] for layer in layers) for name in names}
    weights = {name: torch.stack(w).view(*idx.shape, -1) for name, w in weights.items()}
    return torch.stack(rows), aux, weights, outputs


G1, G2 = dict(connection='gumbel1'), dict(connection='gumbel2')


@pytest.mark.parametrize('changes, training', [
    (dict(attn_out_proj=False, n_layer=3), False), (UNEQUAL, True), (DENSE, False), (G1, True),
    (G1 | THREE | dict(aux_form='printed'), False),
    (G2 | dict(aux_form='released', temperature=1.7), True),
    (G2 | dict(hard=False, aux_form='printed', temperature=0.6), False),
    (G2 | THREE | dict(hard=False, temperature=0.6), True),
    (dict(n_parallel=1, n_layer=1, path_ffn_hidden=None, ffn_hidden=None), False)], ids=str)
def test_oracle(changes, training):
    """Outputs, auxiliary losses, routes and all gradients; in training with the noise of the
    seed."""
    model, x, y = make(**changes).train(training), tokens(T=5), tokens(T=5, seed=2)
    y[0, 3] = -1
    noise = None
    if training:
        torch.manual_seed(5)
        shape = (*x.shape, len(model.config.path_embd) + 1)
        noise = [-torch.log(torch.empty(shape, dtype=torch.float64).exponential_())
                 for _ in model.parallel]
    logits, aux, weights, _ = oracle(model, x, noise)
    compare(model, x, y, logits, aux, dict(entropy=0.3, load=0.7) if aux else {})
    torch.manual_seed(5)
    routes = model.routes(x)
    assert list(routes) == list(weights)
    assert all(torch.allclose(routes[n], weights[n], rtol=0, atol=1e-12) for n in routes)


# ---- Compose -------------------------------------------------------------------------------------

@pytest.mark.parametrize('connection', CONNECTIONS)
@pytest.mark.parametrize('k', [2, 3])
def test_compose_copies_paths(connection, k):
    """Tensors of the paths stand where Fig. 5 puts them, the rest is fresh, the config rebuilds
    it."""
    heads, widths = [2, 1, 4], [8, 4, 16] if connection == 'share' else [8, 8, 8]
    hidden = [None, 20, None]                            # an explicit one is kept
    paths = [make_path(i, n_embd=widths[i], n_head=heads[i], ffn_hidden=hidden[i])
             for i in range(k)]
    settings = dict(connection=connection, n_layer=3, n_head=2, ffn_hidden=28, aux_form='printed')
    torch.manual_seed(0)
    model = compose(paths, **settings)
    torch.manual_seed(0)
    c, state = model.config, model.state_dict()
    fresh = PaPaformer(c).state_dict()
    assert (c.n_embd, c.n_parallel) == (sum(widths[:k]), 3)
    assert (c.path_embd, c.path_head) == (widths[:k], heads[:k])
    assert c.path_ffn_hidden == [32, 20, 64 if connection == 'share' else 32][:k]
    assert all(getattr(c, name) == value for name, value in settings.items())
    copied = {'wte.weight', 'head.weight'}
    start = 0
    for n, path in enumerate(paths):
        end = start + widths[n]
        assert torch.equal(state['wte.weight'][:, start:end], path.wte.weight)
        assert torch.equal(state['head.weight'][:, start:end], path.head.weight)
        for layer, name in itertools.product(range(3), path.first[0].state_dict()):
            copy = f'parallel.{layer}.blocks.{n}.{name}'
            assert torch.equal(state[copy], path.first[layer].state_dict()[name]), copy
            copied.add(copy)
        start = end
    assert all(torch.equal(state[name], fresh[name]) != (name in copied) for name in state)


def test_what_compose_takes_from_the_paths():
    paths = [make_path(dropout=p, block_size=size) for p, size in ((0.1, 12), (0.2, 20))]
    c = compose(paths).config
    assert (c.dropout, c.block_size, c.n_head) == (0.2, 20, 4)           # largest, largest, sum
    assert compose(paths, dropout=0.0).config.dropout == 0.0
