"""What the slow versions of the models have in common: the parts of a Transformer, written one
vector at a time, a router, and the comparison of a model with its slow version."""

import math

import torch
import torch.nn.functional as F


def tokens(B=2, T=6, seed=1, V=37):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


def rms(x, gain=1.0, eps=1e-6):
    return x / torch.sqrt((x * x).sum() / len(x) + eps) * gain


def turn(x, t, base=10000.0):
    """Rotary positions of one head's vector: a 2 x 2 rotation for each pair (i, i + d/2)."""
    half, out = len(x) // 2, [None] * len(x)
    for i in range(half):
        angle = t * base ** (-2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = cos * x[i] - sin * x[i + half]
        out[i + half] = sin * x[i] + cos * x[i + half]
    return torch.stack(out)


def attend(q, k, v, reads=lambda t: range(t + 1)):
    """The heads of each vector's query, key and value -> its joined heads. Vector t reads the
    vectors in reads(t); if keys have fewer heads, neighbouring queries share one."""
    out = []
    for t in range(len(q)):
        heads = []
        for h, query in enumerate(q[t]):
            g = h * len(k[t]) // len(q[t])
            scores = torch.stack([query @ k[s][g] for s in reads(t)]) / math.sqrt(len(query))
            weight = torch.exp(scores) / torch.exp(scores).sum()
            heads.append(sum(w * v[s][g] for w, s in zip(weight, reads(t))))
        out.append(torch.cat(heads))
    return out


def attention(x, qkv, n_head, n_kv_head, positions=None, reads=lambda t: range(t + 1),
              base=10000.0):
    """Of normed vectors with rotary positions; x[t] stands at positions[t]."""
    d = len(qkv) // (n_head + 2 * n_kv_head)
    wq, wk, wv = qkv.split((n_head * d, n_kv_head * d, n_kv_head * d))
    positions = range(len(x)) if positions is None else positions
    q = [[turn(head, p, base) for head in (wq @ u).split(d)] for p, u in zip(positions, x)]
    k = [[turn(head, p, base) for head in (wk @ u).split(d)] for p, u in zip(positions, x)]
    v = [(wv @ u).split(d) for u in x]
    return attend(q, k, v, reads)


def gate_up(h):
    """SwiGLU's activation."""
    gate, up = h.chunk(2)
    return gate / (1 + torch.exp(-gate)) * up


def swiglu(x, fc, down):
    return down @ gate_up(fc @ x)


def gelu(h, tanh=False):
    if tanh:
        return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h ** 3)))
    return 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))


# ---- Routers -------------------------------------------------------------------------------------

def route(weight, x, K):
    """-> the probabilities of all choices, {choice: gate} of the K best: their gates sum to 1."""
    prob = torch.exp(weight @ x) / torch.exp(weight @ x).sum()
    best = sorted(range(len(prob)), key=lambda e: -prob[e].item())[:K]
    return prob, {e: prob[e] / sum(prob[i] for i in best) for e in best}


def switch_balance(log):
    """Of what `route` returned for each token: E times the sum of share f_i and mean p_i."""
    E = len(log[0][0])
    p = sum(prob for prob, _ in log) / len(log)
    picks = [sum(e in gates for _, gates in log) for e in range(E)]
    return E * sum(n / sum(picks) * q for n, q in zip(picks, p))


# ---- A fast form and its plain one ---------------------------------------------------------------

def with_gradients(function, tensors, weight=None):
    """[output, the gradient of each tensor], where the output's own gradient is `weight`, or
    random."""
    tensors = [x.detach().requires_grad_() for x in tensors]     # strides stay
    y = function(*tensors)
    if weight is None:
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y, *torch.autograd.grad(y, tensors, weight.to(y))]


# ---- A model and its slow version ----------------------------------------------------------------

def compare(model, x, y, logits, aux, weights, atol=1e-10):
    """The model's logits, loss, auxiliary losses and every gradient of loss + sum of weight * aux,
    against the slow logits and aux -> {name: the slow gradient}. Noise is drawn from seed 5."""
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
    objective = loss + sum(weight * aux[name] for name, weight in weights.items())
    names, parameters = zip(*model.named_parameters())
    grads = torch.autograd.grad(objective, parameters, materialize_grads=True)
    torch.manual_seed(5)
    assert torch.allclose(model(x)[0], logits, rtol=0, atol=atol)
    torch.manual_seed(5)
    _, fast_loss, fast_aux = model(x, y)
    assert abs(fast_loss - loss) < atol and fast_aux.keys() == aux.keys()
    for name in weights:
        assert abs(fast_aux[name] - aux[name]) < atol, name
    (fast_loss + sum(weight * fast_aux[name] for name, weight in weights.items())).backward()
    for name, p, grad in zip(names, parameters, grads):
        fast = torch.zeros_like(p) if p.grad is None else p.grad
        assert torch.allclose(fast, grad, rtol=0, atol=atol), name
    return dict(zip(names, grads))


def same_routes(routes, logs):
    """routes(): {layer: (B, T, E)}, against {layer: [(_, {choice: gate}) of each token]}."""
    assert list(routes) == list(logs)                    # in the order in which a token meets them
    for name, gate_BTE in routes.items():
        for gate_E, (_, slow) in zip(gate_BTE.flatten(0, 1), logs[name], strict=True):
            assert gate_E.nonzero().flatten().tolist() == sorted(slow), name
            assert all(abs(gate_E[e] - slow[e]) < 1e-12 for e in slow), name


# ---- Generation ----------------------------------------------------------------------------------

def slots(model):
    """Symbols of a chunk; a token is a chunk of one."""
    return getattr(model.config, 'byte_limit', 0) + 1


def has_limit(model):
    return not hasattr(model.config, 'query_block')      # ModuleFormer reads any length


@torch.no_grad()
def uncached(model, idx, n):
    """The rule in plain words: read the window; when it is full, go on with its newer half.
    Byte-level: a chunk at a time, beside a start; a chunk that has ended gets padding."""
    L, V = slots(model), model.config.vocab_size
    start = 1 if L > 1 else 0
    limit = model.config.block_size // L if has_limit(model) else math.inf
    first = max(0, idx.size(1) // L + start - limit)
    for _ in range(n):
        now = idx.size(1) // L
        if now - first + start > limit:
            first = now - limit // 2
        new = model(idx[:, first * L:])[0][:, -1:].argmax(-1)
        if L > 1:
            ended = (idx[:, now * L:] >= V - 3).any(1, keepdim=True)
            new = new.masked_fill(ended, V - 1)
        idx = torch.cat((idx, new), 1)
    return idx
