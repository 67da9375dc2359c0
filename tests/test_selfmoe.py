"""selfmoe.py against a slow version written from the paper's equations, one token at a time."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import test_contract
from oracles import attention, compare, rms, route, same_routes, swiglu, switch_balance, tokens
from selfmoe import add_gates, select_gates, upcycle

SMALL = dict(block_size=16, n_layer=3, n_head=4, n_kv_head=2, ffn_hidden=8)


def make(n=1, k=1, **changes):
    """A small mixture of n experts, or a dense model."""
    return test_contract.make('selfmoe', **{**SMALL, 'n_expert': n, 'top_k': k, **changes})


# ---- The slow version ----------------------------------------------------------------------------

def feed_forward(ffn, x, c, log):
    """mlp of Eq. 7 for one token: SwiGLU, or the K likeliest of E of them, weights renormalised."""
    if c.n_expert == 1:
        return swiglu(x, ffn.fc.weight, ffn.down.weight)
    _, gates = routed = route(ffn.router.linear.weight, x, c.top_k)
    log.append(routed)
    return sum(g * swiglu(x, ffn.fc[e].T, ffn.down[e].T) for e, g in gates.items())


def contribution(gate, x):
    """G_i of section 3.3 for one token."""
    w = gate.weight
    if w.dim() == 2:
        return w @ x
    return torch.stack([(w[i] if w.dim() else w) * x[i] for i in range(len(x))])


def oracle(model, idx):
    """-> logits (B, T, V), aux, {layer: [(probabilities, gates) of a token]}, states of Eq. 3 and 4
    by layer and row."""
    c = model.config
    rows = []
    routed = [[] for _ in model.blocks]
    states = [[] for _ in model.blocks]                  # per row: (B_i(h), G_i(h) or None)
    for row in idx:
        h = [model.wte.weight[i] for i in row]
        for i, b in enumerate(model.blocks):
            normed = [rms(v, b.norm_1.weight, c.norm_eps) for v in h]
            seen = lambda t: range(max(0, t + 1 - (c.window or 99)), t + 1)
            heads = attention(normed, b.qkv.weight, c.n_head, c.n_kv_head, None, seen, c.rope_base)
            a = [v + b.proj.weight @ u for v, u in zip(h, heads)]                        # Eq. 6
            out = [v + feed_forward(b.ffn, rms(v, b.norm_2.weight, c.norm_eps), c, routed[i])
                   for v in a]                                                           # Eq. 7
            gate = None
            if str(i) in model.gates:
                gate = [contribution(model.gates[str(i)], v) for v in h]
            states[i].append((out, gate))
            h = [v + g for v, g in zip(out, gate)] if gate else out                      # Eq. 2
        rows.append(project(model, h))
    logs = {f'blocks.{i}': log for i, log in enumerate(routed) if log}
    aux = dict(balance=sum(map(switch_balance, routed))) if logs else {}
    for i, layer in enumerate(states):
        for which, name in enumerate((f'layer_size_{i}', f'gate_size_{i}')):
            if layer[0][which]:
                sizes = [torch.sqrt((v * v).sum() / len(v)) for row in layer for v in row[which]]
                aux[name] = torch.stack(sizes).mean()
    return torch.stack(rows), aux, logs, states


def project(model, h):
    head, eps = model.wte if model.config.tied else model.head, model.config.norm_eps
    return torch.stack([head.weight @ rms(v, model.norm_f.weight, eps) for v in h])


@pytest.mark.parametrize('changes', [
    dict(gate='matrix'), dict(gate='vector', n_kv_head=1), dict(gate='scalar', n_kv_head=4),
    dict(gate='vector', gate_layers=[]), dict(n=4, k=2), dict(n=2, k=2, gate='scalar'),
    dict(n=4, k=1, gate='matrix', gate_layers=[1], sparse=False),
    dict(gate='matrix', rope_base=500.0, norm_eps=0.1, window=3, d_head=6, tied=True)], ids=str)
def test_oracle(changes):
    """Logits, loss, every aux entry, every gradient, and the routes."""
    model, x, y = make(**changes), tokens(), tokens(seed=2)
    y[0, 3] = -1
    logits, aux, logs, _ = oracle(model, x)
    grads = compare(model, x, y, logits, aux, dict(balance=0.7) if 'n' in changes else {})
    assert all(grad.abs().max() > 1e-6 for grad in grads.values())       # nothing is out of reach
    same_routes(model.routes(x), logs)
    for name, value in model(x)[2].items():              # sizes are for the log: without a gradient
        assert abs(value - aux[name]) < 1e-5 * aux[name], name
        assert value.requires_grad == (name == 'balance'), name


# ---- Surgery -------------------------------------------------------------------------------------

@pytest.mark.parametrize('n', [1, 2])
@pytest.mark.parametrize('kind', ['matrix', 'vector', 'scalar'])
def test_add_gates_starts_as_the_base(kind, n):
    base, x = make(n=n, k=n), tokens(3, 16)
    gated = add_gates(base, kind)
    assert torch.equal(base(x)[0], gated(x)[0])
    assert list(gated.gates) == ['1', '2'] and gated.config.gate == kind          # n - 1 gates


@pytest.mark.parametrize('n, k', [(2, 2), (4, 2), (4, 1)])
def test_upcycle_starts_as_the_base_and_breaks_symmetry(n, k):
    base, x = make(gate='matrix'), tokens(3, 12)
    mixture = upcycle(base, n, k)
    assert (mixture.config.n_expert, mixture.config.top_k) == (n, k)
    assert (mixture(x)[0] - base(x)[0]).abs().max() < 1e-12
    mixture(x, x.roll(-1, 1))[1].backward()
    for b in mixture.blocks:
        for p in (b.ffn.fc, b.ffn.down):
            for e in range(1, n):
                assert (p.grad[0] - p.grad[e]).norm() > 1e-3 * p.grad[0].norm()
        if k == 1:                                       # the weight is always 1: nothing to learn
            assert b.ffn.router.linear.weight.grad.abs().max() < 1e-12


# ---- Choosing gates ------------------------------------------------------------------------------

@pytest.mark.parametrize('rule, args, keeps', [
    ('improves', {}, lambda row: row['with'] < row['without']),
    ('printed', {}, lambda row: row['with'] > row['without']),
    ('changes', {}, lambda row: abs(row['with'] / row['without'] - 1) > 0.01),
    ('changes', dict(threshold=0.05), lambda row: abs(row['with'] / row['without'] - 1) > 0.05),
    ('from_layer', dict(layer=3), lambda row: row['layer'] >= 3)])
def test_select_gates_by_rule(rule, args, keeps):
    """A gate of zero changes nothing, to the last bit; a gate that is removed is one of zero. There
    is no dropout while it calibrates."""
    model, x = make(seed=5, gate='vector', n_layer=6, dropout=0.5).train(), tokens(4)
    torch.nn.init.zeros_(model.gates['3'].weight)
    chosen, table = select_gates(model, iter([(x, x.roll(-1, 1))]), rule, **args)
    assert table == select_gates(model.eval(), [(x, x.roll(-1, 1))], rule, **args)[1]
    assert table[2]['without'] == table[2]['with']
    kept = [row['layer'] for row in table if keeps(row)]
    removed = [row['layer'] for row in table if not keeps(row)]
    assert kept and removed and sorted(kept + removed) == [1, 2, 3, 4, 5]
    assert chosen.config.gate_layers == kept and list(chosen.gates) == list(map(str, kept))
    assert [row['layer'] for row in table if row['kept']] == kept
    expected = copy.deepcopy(model)
    for i in removed:
        torch.nn.init.zeros_(expected.gates[str(i)].weight)
    assert torch.equal(chosen.eval()(x)[0], expected(x)[0])


@pytest.mark.parametrize('changes', [
    dict(gate='matrix'), dict(gate='scalar', gate_layers=[2], n=2, k=2)], ids=str)
def test_select_gates_table_against_the_oracle(changes):
    model, x, y = make(**changes), tokens(4), tokens(4, seed=2)
    y[0, 2:] = y[2, 0] = y[3] = -1
    states = oracle(model, x)[3]
    _, table = select_gates(model, [(x[:1], y[:1]), (x[1:3], y[1:3]), (x[3:], y[3:])])
    for row in table:
        without, with_gate = [], []
        for b in range(3):                               # row 3 has no target
            out, gate = states[row['layer']][b]
            gated = [v + g for v, g in zip(out, gate)]
            for perplexities, h in ((without, out), (with_gate, gated)):
                log_prob = project(model, h).log_softmax(-1)
                nats = [-log_prob[t, y[b, t]].item() for t in range(6) if y[b, t] >= 0]
                perplexities.append(math.exp(sum(nats) / len(nats)))
        assert row['without'] == pytest.approx(sum(without) / 3, rel=1e-5)
        assert row['with'] == pytest.approx(sum(with_gate) / 3, rel=1e-5)


# CPUs without bfloat16 say so, and go on
@pytest.mark.filterwarnings('ignore:mkldnn_matmul failed')
def test_select_gates_is_exact_in_bfloat16():
    """Its logits are rounded, but not the perplexity: else gates that help a little look
    useless."""
    model, x = make(gate='matrix', dtype=torch.bfloat16), tokens(3)
    _, table = select_gates(model, [(x, x.roll(-1, 1))])
    nats = F.cross_entropy(model(x)[0].float().transpose(1, 2), x.roll(-1, 1), reduction='none')
    assert table[-1]['with'] == pytest.approx(nats.mean(1).exp().mean().item(), rel=1e-6)
