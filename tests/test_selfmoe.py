"""selfmoe.py against a slow oracle written from the paper's equations and LLaMA's definitions, one token at
a time."""

import copy
import math
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

import selfmoe
from selfmoe import SelfMoE, SelfMoEConfig, add_gates, select_gates, upcycle

SMALL = dict(vocab_size=37, block_size=16, n_layer=3, n_head=4, n_kv_head=2, n_embd=16, ffn_hidden=8)
KINDS = ['matrix', 'vector', 'scalar']


def make(seed=0, dtype=torch.float64, n=1, k=1, scale=0.15, **changes):
    """A small model, upcycled to n experts if n > 1, with gains, gates, routers and experts that matter."""
    torch.manual_seed(seed)
    model = SelfMoE(SelfMoEConfig(**{**SMALL, **changes}))
    model = (upcycle(model, n, k) if n > 1 else model).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_((0.4 if 'gates' in name or 'router' in name else scale) * torch.randn_like(p))
    return model


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def tokens(B=2, T=6, seed=1):
    return torch.randint(0, SMALL['vocab_size'], (B, T), generator=torch.Generator().manual_seed(seed))


# ---- The slow oracle -----------------------------------------------------------------------------


def rms(x, gain):
    return x / torch.sqrt((x * x).sum() / len(x) + 1e-6) * gain


def turn(x, t):
    """Rotary positions for one head's vector at position t: one 2 x 2 rotation for each pair (i, i + d/2)."""
    half, out = len(x) // 2, [None] * len(x)
    for i in range(half):
        angle = t * 10000.0 ** (-2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = cos * x[i] - sin * x[i + half]
        out[i + half] = sin * x[i] + cos * x[i + half]
    return torch.stack(out)


def attention(b, x, c):
    """Att of Eq. 6 over one sequence (T, D): consecutive query heads share a key and value head, and token t
    reads 0..t."""
    H, G, d, T = c.n_head, c.n_kv_head, c.n_embd // c.n_head, len(x)
    wq, wk, wv = b.qkv.weight.split((H * d, G * d, G * d))
    q = [[turn((wq @ v)[h * d:(h + 1) * d], t) for h in range(H)] for t, v in enumerate(x)]
    k = [[turn((wk @ v)[g * d:(g + 1) * d], t) for g in range(G)] for t, v in enumerate(x)]
    out = []
    for t in range(T):
        heads = []
        for h in range(H):
            g = h // (H // G)
            score = torch.stack([q[t][h] @ k[s][g] for s in range(t + 1)]) / math.sqrt(d)
            weight = torch.exp(score) / torch.exp(score).sum()
            heads.append(sum(weight[s] * (wv @ x[s])[g * d:(g + 1) * d] for s in range(t + 1)))
        out.append(b.proj.weight @ torch.cat(heads))
    return torch.stack(out)


def swiglu(x, gate, up, down):
    h = gate @ x
    return down @ (h / (1 + torch.exp(-h)) * (up @ x))


def feed_forward(ffn, x, c, log):
    """mlp of Eq. 7 for one token: SwiGLU, or the K likeliest of E of them, weights renormalised."""
    if c.n_expert == 1:
        return swiglu(x, *ffn.fc.weight.chunk(2), ffn.down.weight)
    prob = torch.exp(ffn.router.linear.weight @ x)
    prob = prob / prob.sum()
    best = sorted(range(c.n_expert), key=lambda e: -prob[e].item())[:c.top_k]
    gates = {e: prob[e] / sum(prob[i] for i in best) for e in best}
    log.append((prob, gates))
    return sum(g * swiglu(x, *ffn.fc[e].T.chunk(2), ffn.down[e].T) for e, g in gates.items())


def contribution(gate, x):
    """G_i of section 3.3 for one token."""
    w = gate.weight
    if w.dim() == 2:
        return w @ x
    return torch.stack([(w[i] if w.dim() else w) * x[i] for i in range(len(x))])


def oracle(model, idx):
    """-> logits (B, T, V), aux, {layer: [weights of a token]}, states of Eq. 3 and 4 by layer and row."""
    c = model.config
    rows = []
    routed = [[] for _ in model.blocks]
    states = [[] for _ in model.blocks]                  # per row: (B_i(h), G_i(h) or None)
    for row in idx:
        h = [model.wte.weight[i] for i in row]
        for i, b in enumerate(model.blocks):
            att = attention(b, torch.stack([rms(v, b.norm_1.weight) for v in h]), c)
            a = [v + u for v, u in zip(h, att)]                                                 # Eq. 6
            out = [v + feed_forward(b.ffn, rms(v, b.norm_2.weight), c, routed[i]) for v in a]   # Eq. 7
            gate = None
            if str(i) in model.gates:
                gate = [contribution(model.gates[str(i)], v) for v in h]
            states[i].append((out, gate))
            h = [v + g for v, g in zip(out, gate)] if gate else out                             # Eq. 2
        rows.append(project(model, h))
    aux = {}
    if c.n_expert > 1:
        aux['balance'] = 0
        for log in routed:
            p = sum(prob for prob, _ in log) / len(log)
            share = [sum(e in gates for _, gates in log) / (c.top_k * len(log)) for e in range(c.n_expert)]
            aux['balance'] = aux['balance'] + c.n_expert * sum(f * q for f, q in zip(share, p))
    for i, layer in enumerate(states):
        for which, name in enumerate((f'layer_size_{i}', f'gate_size_{i}')):
            if layer[0][which]:
                sizes = [torch.sqrt((v * v).sum() / len(v)) for row in layer for v in row[which]]
                aux[name] = torch.stack(sizes).mean()
    weights = {f'blocks.{i}': [gates for _, gates in log] for i, log in enumerate(routed)}
    return torch.stack(rows), aux, weights, states


def project(model, h):
    return torch.stack([model.head.weight @ rms(v, model.norm_f.weight) for v in h])


QUICK = [dict(gate='matrix'), dict(gate='vector', n_kv_head=1), dict(gate='scalar', n_kv_head=4),
         dict(n=4, k=2), dict(n=4, k=1, gate='matrix', gate_layers=[1])]
MORE = [dict(n_kv_head=1), dict(gate='matrix', gate_layers=[2]), dict(gate='vector', gate_layers=[]),
        dict(n=2, k=2), dict(n=2, k=2, gate='scalar', n_kv_head=4)]


@pytest.mark.parametrize('changes', [*QUICK, *map(slow, MORE)], ids=str)
def test_oracle(changes):
    """Logits, loss, every aux entry, every gradient, and the routes."""
    model, x, y = make(**changes), tokens(), tokens(seed=2)
    y[0, 3] = -1
    logits, aux, gates, _ = oracle(model, x)
    kept = y.flatten() >= 0
    loss = F.cross_entropy(logits.flatten(0, 1)[kept], y.flatten()[kept])
    grads = torch.autograd.grad(loss + 0.7 * aux.get('balance', 0), list(model.parameters()))
    assert torch.allclose(model(x)[0], logits, rtol=0, atol=1e-10)
    none, fast_loss, fast_aux = model(x, y)
    assert none is None and abs(fast_loss - loss) < 1e-10 and fast_aux.keys() == aux.keys()
    for name, value in aux.items():                      # sizes are for the log: float32, without a gradient
        assert abs(fast_aux[name] - value) < (1e-10 if name == 'balance' else 1e-5 * value), name
        assert fast_aux[name].requires_grad == (name == 'balance'), name
    (fast_loss + 0.7 * fast_aux.get('balance', 0)).backward()
    for (name, p), g in zip(model.named_parameters(), grads, strict=True):
        assert torch.allclose(p.grad, g, rtol=0, atol=1e-10), name
        assert g.abs().max() > 1e-6, name                # nothing here is out of reach
    found = model.routes(x)
    assert not any(m._forward_hooks for m in model.modules())
    assert list(found) == (list(gates) if 'n' in changes else [])
    for name, weight_BTE in found.items():
        assert weight_BTE.shape == (*x.shape, changes['n'])
        assert (weight_BTE.sum(-1) - 1).abs().max() < 1e-12
        assert ((weight_BTE > 0).sum(-1) == changes['k']).all()
        for got, want in zip(weight_BTE.flatten(0, 1), gates[name], strict=True):
            assert got.nonzero().flatten().tolist() == sorted(want)
            assert all(abs(got[e] - want[e]) < 1e-12 for e in want)


@pytest.mark.parametrize('n, k', [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize('T', [12, 1])                   # one token leaves experts without work
def test_float32_is_float64_and_idle_experts_stand_still(n, k, T):
    single, x = make(dtype=torch.float32, n=n, k=k, gate='matrix'), tokens(3 if T > 1 else 1, T)
    double = copy.deepcopy(single).double()
    pairs = []
    for model in (single, double):
        logits = model(x)[0]
        _, loss, aux = model(x, x.flip(1))
        (loss + 0.7 * aux['balance']).backward()
        pairs.append([logits, *(p.grad for p in model.parameters())])
    for i, (a, b) in enumerate(zip(*pairs, strict=True)):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-9, i
    for b in single.blocks:
        idle = single.routes(x)[f'blocks.{b.layer}'].sum((0, 1)) == 0
        assert T > 1 or idle.sum() == n - k
        assert (b.ffn.fc.grad[idle] == 0).all() and (b.ffn.down.grad[idle] == 0).all()      # zero, not none


def test_the_router_is_exact_under_autocast():
    """Scores that bfloat16 would round to a tie are told apart."""
    router = selfmoe.Router(4, 4, 2)
    torch.nn.init.eye_(router.linear.weight)
    with torch.autocast('cpu', torch.bfloat16):
        weight, _ = router(torch.tensor([[1.0, 1.001, 1.002, 1.003]]))
    assert (weight > 0).tolist() == [[False, False, True, True]] and weight.dtype == torch.float32


def test_balance_by_hand():
    router = selfmoe.Router(3, 3, 2)
    prob = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.1, 0.4]])
    router.linear.weight.data = torch.eye(3)
    weight, balance = router(prob.log())                 # softmax undoes the logarithm
    assert (weight == 0).tolist() == [[False, False, True], [False, True, False]]
    assert torch.allclose(weight, torch.tensor([[6 / 9, 3 / 9, 0], [5 / 9, 0, 4 / 9]]))
    assert abs(balance.item() - 3 * (0.5 * 0.55 + 0.25 * 0.2 + 0.25 * 0.25)) < 1e-6
    router.top_k = 1
    assert abs(router(99 * torch.eye(3))[1].item() - 1) < 1e-6           # balanced
    assert abs(router(99 * torch.eye(3)[:1])[1].item() - 3) < 1e-6       # collapsed


# ---- Surgery -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings('ignore:mkldnn_matmul failed')   # CPUs without bfloat16 say so, and go on
@pytest.mark.parametrize('kind', KINDS)
def test_add_gates_starts_as_the_base_and_learns(kind):
    x = tokens(3, 16)
    for dtype in (torch.float32, torch.bfloat16):
        for n in (1, 2):
            base = make(dtype=dtype, n=n, k=n)
            gated = add_gates(base, kind)
            assert gated.wte.weight.dtype == dtype and torch.equal(base(x)[0], gated(x)[0])
    D, base = 16, make()
    before = copy.deepcopy(base.state_dict())
    gated = add_gates(base, kind)
    added = gated.count_params()[0] - base.count_params()[0]
    assert added == 2 * dict(matrix=D * D, vector=D, scalar=1)[kind]     # n - 1 gates
    assert gated.count_params()[1] - base.count_params()[1] == added
    assert list(gated.gates) == ['1', '2'] and gated.config.gate == kind and base.config.gate == 'none'
    optimizer = torch.optim.AdamW(gated.parameters(), lr=1e-3)
    gated(x, x.roll(-1, 1))[1].backward()
    assert all((p.grad != 0).all() for p in gated.gates.parameters())
    optimizer.step()
    assert all((p != 0).all() for p in gated.gates.parameters())
    assert not torch.allclose(base(x)[0], gated(x)[0], atol=1e-6)
    assert all(torch.equal(p, before[name]) for name, p in base.state_dict().items())    # a copy was trained
    for again in (gated, add_gates(base, 'scalar')):
        with pytest.raises(ValueError, match='already'):
            add_gates(again, kind)
    with pytest.raises(ValueError, match='gate is'):
        add_gates(base, 'tensor')


def test_surgery_keeps_your_class():
    class Mine(SelfMoE):
        pass
    model = Mine(SelfMoEConfig(**SMALL))
    assert type(add_gates(model)) is type(upcycle(model)) is Mine
    assert type(select_gates(add_gates(model), [(tokens(), tokens())])[0]) is Mine


def test_surgery_keeps_the_mode():
    """A model that evaluates goes on without dropout."""
    for training in (True, False):
        model = make(dropout=0.5).train(training)
        for new in (add_gates(model), upcycle(model)):
            assert all(part.training == training for part in new.modules())


def test_sizes_of_the_paper():
    """Mistral-7B: matrix gates add 0.52B (section 4.1: 0.5B), the mixture of two has 13B (section 4.3.2)."""
    mistral = dict(vocab_size=32000, n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, ffn_hidden=14336)
    with torch.device('meta'):
        base = SelfMoE(SelfMoEConfig(**mistral))
        total = base.count_params()[0]
        assert total == 7_241_732_096                    # the published model's own count
        assert round((add_gates(base, 'matrix').count_params()[0] - total) / 1e9, 2) == 0.52
        mixed, active = SelfMoE(SelfMoEConfig(**mistral, n_expert=2, top_k=2)).count_params()
    assert round(mixed / 1e9) == 13 and mixed - active == 32000 * 4096   # both experts are active


def test_upcycle_starts_as_the_base_and_breaks_symmetry():
    x = tokens(3, 12)
    for n, k in ((2, 2), (4, 2), (4, 1)):
        base = make(gate='matrix', dropout=0.1).eval()
        mixture = upcycle(base, n, k).eval()
        assert (mixture(x)[0] - base(x)[0]).abs().max() < 1e-12
        mixture(x, x.roll(-1, 1))[1].backward()
        for b in mixture.blocks:
            for p in (b.ffn.fc, b.ffn.down):
                assert all((p.grad[0] - p.grad[e]).norm() > 1e-3 * p.grad[0].norm() for e in range(1, n))
            if k == 1:                                   # the weight is always 1: nothing to learn
                assert b.ffn.router.linear.weight.grad.abs().max() < 1e-12
        again = SelfMoE(SelfMoEConfig(**asdict(mixture.config))).double().eval()
        again.load_state_dict(mixture.state_dict())
        assert torch.equal(again(x)[0], mixture(x)[0])
    mixture = upcycle(base)
    assert mixture.config.n_expert == mixture.config.top_k == 2
    for b in mixture.blocks:
        torch.nn.init.zeros_(b.ffn.router.linear.weight)
    mixture(x, x.roll(-1, 1))[1].backward()              # why the router has to be random
    assert all(torch.allclose(*b.ffn.fc.grad, rtol=0, atol=1e-15) for b in mixture.blocks)
    for wrong, args in ((mixture, (2, 2)), (base, (1, 1)), (base, (2, 3)), (base, (2, 0))):
        with pytest.raises(ValueError):
            upcycle(wrong, *args)


# ---- Choosing gates ------------------------------------------------------------------------------


V = 6


def votes():
    """Blocks that do nothing; token i has one channel that votes for i + 1 and one that votes for i + 2. The
    gates weigh the first kind up (helps), the second up (spoils), nothing, and the first up a little."""
    shape = dict(vocab_size=V, n_layer=5, n_head=1, n_kv_head=1, n_embd=2 * V)
    model = SelfMoE(SelfMoEConfig(**shape, gate='vector'))
    with torch.no_grad():
        for b in model.blocks:
            b.proj.weight.zero_()
            b.ffn.down.weight.zero_()
        for i in range(V):
            model.wte.weight[i] = torch.eye(2 * V)[i] + torch.eye(2 * V)[V + i]
            model.head.weight[i] = torch.eye(2 * V)[(i - 1) % V] + torch.eye(2 * V)[V + (i - 2) % V]
        for layer, first, second in ((1, 1.0, 0.0), (2, 0.0, 1.0), (4, 0.01, 0.0)):
            model.gates[str(layer)].weight.copy_(torch.tensor([first] * V + [second] * V))
    return model


def votes_batches():
    """Batches of 3 and 1 sequences. Of the targets: 1 follows the first vote, 2 the second, 0 is left out."""
    votes_by_row = [[[1, 1, 1, 1], [1, 2, 1, 0], [0, 0, 0, 0]], [[0, 1, 0, 0]]]
    batches = []
    for vote in map(torch.tensor, votes_by_row):
        idx = torch.arange(vote.numel()).view_as(vote) % V
        batches.append((idx, torch.where(vote > 0, (idx + vote) % V, -1)))
    return batches, votes_by_row


def votes_perplexity(first, second, votes_by_row):
    """Eq. 3 and 4 on paper. 2 of 2V channels are not zero: the norm divides by their root mean square."""
    scale = math.sqrt((first ** 2 + second ** 2) / (2 * V) + 1e-6)
    total = math.exp(first / scale) + math.exp(second / scale) + V - 2
    nats = {1: math.log(total) - first / scale, 2: math.log(total) - second / scale}
    rows = [[nats[v] for v in row if v] for batch in votes_by_row for row in batch]
    each = [math.exp(sum(row) / len(row)) for row in rows if row]
    return sum(each) / len(each)


@pytest.mark.parametrize('rule, args, kept', [
    ('improves', {}, [1, 4]), ('printed', {}, [2]), ('changes', {}, [1, 2]),
    ('from_layer', dict(layer=3), [3, 4]),
    ('changes', dict(threshold=1e-4), [1, 2, 4]), ('changes', dict(threshold=0.9), []),
    ('changes', dict(threshold=0.3), [2])])              # -27% and +37% of what it is without the gate
def test_select_gates_by_rule(rule, args, kept):
    model, (batches, votes_by_row) = votes(), votes_batches()
    chosen, table = select_gates(model, iter(batches), rule, **args)
    assert [row['layer'] for row in table if row['kept']] == kept
    weights = [(1, 1), (2, 1), (2, 2), (2, 2), (2.02, 2)]                # of both votes, after each layer
    for i, row in enumerate(table):                                      # the gates below stay in place
        assert row['layer'] == i + 1
        assert row['without'] == pytest.approx(votes_perplexity(*weights[i], votes_by_row), rel=1e-5)
        assert row['with'] == pytest.approx(votes_perplexity(*weights[i + 1], votes_by_row), rel=1e-5)
    assert len(table) == 4 and table[2]['without'] == table[2]['with']   # a gate of zero: no rounding either
    lines = str(table).splitlines()
    assert lines[0].split()[1:6] == ['layer', 'without', 'with', 'change', '(perplexity']
    for i, line in enumerate(lines[1:], 1):
        assert line.split()[::4] == [str(i), 'kept' if i in kept else 'removed']
    removed = {1, 2, 3, 4} - {*kept}
    assert chosen.config.gate_layers == kept
    assert chosen.state_dict().keys() == model.state_dict().keys() - {f'gates.{i}.weight' for i in removed}
    again = SelfMoE(SelfMoEConfig(**asdict(chosen.config)))
    again.load_state_dict(chosen.state_dict())
    for i in removed:                                    # a removed gate is a gate of zero
        torch.nn.init.zeros_(model.gates[str(i)].weight)
    x = torch.arange(6)[None]
    assert torch.equal(again(x)[0], chosen(x)[0]) and torch.equal(again(x)[0], model(x)[0])
    if not kept:
        assert list(add_gates(chosen, 'matrix').gates) == ['1', '2', '3', '4']


def test_a_change_of_more_than_a_hundredth_counts():
    model, (batches, _) = votes(), votes_batches()
    model.gates['4'].weight.data.mul_(2)                 # a change by 1.8%, not by 0.9%
    assert select_gates(model, batches, 'changes')[0].config.gate_layers == [1, 2, 4]


@pytest.mark.parametrize('changes', [
    dict(gate='matrix'), dict(gate='scalar', gate_layers=[2], n=2, k=2)], ids=str)
def test_select_gates_table_against_the_oracle(changes):
    model, x, y = make(**changes), tokens(4), tokens(4, seed=2)
    y[0, 2:] = y[2, 0] = y[3] = -1
    states = oracle(model, x)[3]
    _, table = select_gates(model, [(x[:1], y[:1]), (x[1:], y[1:])])
    for row in table:
        each = [[], []]
        for b in range(3):                               # row 3 has no target
            out, gate = states[row['layer']][b]
            for found, h in zip(each, (out, [v + g for v, g in zip(out, gate)])):
                log_prob = project(model, h).log_softmax(-1)
                nats = [-log_prob[t, y[b, t]].item() for t in range(6) if y[b, t] >= 0]
                found.append(math.exp(sum(nats) / len(nats)))
        assert [row['without'], row['with']] == pytest.approx([sum(found) / 3 for found in each], rel=1e-5)
    nats = model.eval()(x, y, reduction='none')[1]       # after the last gate: the model's own perplexity
    own = (nats.sum(1) / (y >= 0).sum(1))[:3].exp().mean().item()
    assert table[-1]['with'] == pytest.approx(own, rel=1e-5)


def test_token_0_is_a_target_like_any_other():
    """Also in a sequence that has no other."""
    model, x = make(gate='vector').eval(), tokens(3)
    y = torch.zeros_like(x)
    y[0, 1] = 5
    y[1, 2:] = -1
    _, table = select_gates(model, [(x, y)])
    nats = model(x, y, reduction='none')[1]
    own = (nats.sum(1) / torch.tensor([6, 2, 6])).exp().mean().item()
    assert table[-1]['with'] == pytest.approx(own, rel=1e-6)


@pytest.mark.filterwarnings('ignore:mkldnn_matmul failed')   # CPUs without bfloat16 say so, and go on
def test_select_gates_is_exact_in_bfloat16():
    """Its logits are rounded, but not the perplexity: else gates that help a little look useless."""
    model, x = make(gate='matrix', dtype=torch.bfloat16).eval(), tokens(3)
    _, table = select_gates(model, [(x, x.roll(-1, 1))])
    nats = F.cross_entropy(model(x)[0].float().transpose(1, 2), x.roll(-1, 1), reduction='none')
    assert table[-1]['with'] == pytest.approx(nats.mean(1).exp().mean().item(), rel=1e-6)


def test_select_gates_leaves_the_model_alone():
    model, x = make(gate='matrix', dropout=0.5, dtype=torch.float32), tokens(3, 9)
    before, tables = copy.deepcopy(model.state_dict()), []
    for training in (True, False):
        model.train(training)
        chosen, table = select_gates(model, [(x, x.roll(-1, 1))], 'from_layer', layer=2)
        tables.append(table)
        assert all(m.training == training for m in model.modules())
    assert tables[0] == tables[1]                        # no dropout while calibrating
    assert list(chosen.gates) == ['2'] and all(p.requires_grad for p in chosen.parameters())
    with torch.no_grad():
        for p in chosen.parameters():
            p.zero_()
    assert list(model.gates) == ['1', '2']
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_select_gates_errors():
    model, batches = make(gate='vector'), [(tokens(), tokens())]
    with pytest.raises(ValueError, match='improves, changes, printed, from_layer'):
        select_gates(model, batches, 'improve')
    for layer in (None, 0, 3):
        with pytest.raises(ValueError, match='from 1 to 2'):
            select_gates(model, batches, 'from_layer', layer=layer)
    with pytest.raises(ValueError, match='17 tokens are more than'):
        select_gates(model, [(tokens(T=17), tokens(T=17))])
    for gateless in (make(), make(gate='vector', gate_layers=[])):
        with pytest.raises(ValueError, match='no gates'):
            select_gates(gateless, batches)
    nothing = tokens(), torch.full_like(tokens(), -1)    # a batch without targets is passed over
    assert select_gates(model, [nothing, *batches])[1] == select_gates(model, batches)[1]
    for empty in ([], [nothing]):
        with pytest.raises(ValueError, match='calibration batches'):
            select_gates(model.train(), empty)
        assert model.training
    with pytest.raises(ValueError, match='one block'):
        add_gates(make(n_layer=1))


# ---- Protocol ------------------------------------------------------------------------------------


MODELS = [dict(gate='matrix', n_kv_head=4), dict(gate='vector', n_kv_head=1), dict(gate='scalar', n=4, k=2)]


@pytest.mark.parametrize('changes', MODELS, ids=str)
def test_causal_batched_and_cache_in_pieces(changes):
    model, x = make(**changes).eval(), tokens(3, 16)
    full = model(x)[0]
    for t in (5, 15):
        changed = x.clone()
        changed[:, t] = (changed[:, t] + 1) % 37
        difference = (model(changed)[0] - full).abs().amax((0, 2))
        assert difference[:t].sum() < 1e-12 and (difference[t:] > 1e-6).all()
    assert torch.allclose(full, torch.cat([model(row[None])[0] for row in x]), rtol=0, atol=1e-12)
    cache = []
    pieces = [model(part, cache=cache)[0] for part in x.split([5, 1, 7, 3], dim=1)]
    assert torch.allclose(full, torch.cat(pieces, 1), rtol=0, atol=1e-12)
    assert len(cache) == 3 and cache[1][0].shape == (3, changes.get('n_kv_head', 2), 16, 4)
    with pytest.raises(ValueError, match='block_size'):
        model(x[:, :1], cache=cache)


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


@pytest.mark.parametrize('changes', MODELS, ids=str)
@pytest.mark.parametrize('start', [slow(1), slow(8), 13])
def test_cached_generation_is_uncached(changes, start):
    """Also far past the context length (8), and from prompts as long as it or longer."""
    model, x = make(2, **changes, block_size=8, scale=0.5).eval(), tokens(2, start)
    out = model.generate(x, 30, temperature=0)
    assert torch.equal(out, uncached(model, x, 30)) and torch.equal(out[:, :start], x)
    assert len(set(out[:, start:].flatten().tolist())) > 5               # not one token for ever


def test_sampling():
    model, x = make(dtype=torch.float32, gate='vector').eval(), tokens(1, 4)
    logits = model(x)[0][0, -1]
    best = logits.topk(3).indices
    torch.manual_seed(0)
    drawn = model.generate(x.expand(4000, -1), 1, temperature=0.5, top_k=3)[:, -1]
    want = (logits[best] / 0.5).softmax(-1)
    assert torch.allclose(torch.stack([(drawn == i).float().mean() for i in best]), want, atol=0.03)
    assert torch.equal(model.generate(x, 8, top_k=1), model.generate(x, 8, temperature=0))
    assert model.generate(x, 3, top_k=1000).shape == (1, 7)              # more than the vocabulary: all of it


def test_reduction_and_ignored_targets():
    model, x, y = make(gate='vector'), tokens(), tokens(seed=2)
    y[:, ::3] = -1
    each = model(x, y, reduction='none')[1]
    want = -model(x)[0].log_softmax(-1).gather(2, y.clamp(min=0)[:, :, None])[:, :, 0]
    assert each.shape == y.shape and torch.allclose(each, want * (y >= 0), rtol=0, atol=1e-12)
    assert abs(model(x, y)[1] - each[y >= 0].mean()) < 1e-12


def test_dropout_places(monkeypatch):
    """On attention and on both branches of a block, in training only; eval mode draws nothing."""
    model, x = make(gate='matrix', dropout=0.5), tokens()
    seen = []
    kernel = F.scaled_dot_product_attention

    def record(*args, dropout_p, **rest):
        seen.append(dropout_p)
        return kernel(*args, dropout_p=dropout_p, **rest)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', record)
    for b in model.blocks:
        b.dropout.register_forward_hook(lambda module, args, out: seen.append('branch'))
    assert not torch.equal(model(x)[0], model(x)[0]) and seen == [0.5, 'branch', 'branch'] * 6
    model.eval()
    state = torch.get_rng_state()
    assert torch.equal(model(x)[0], model(x)[0]) and seen[18:] == [0.0, 'branch', 'branch'] * 6
    model.routes(x), model.generate(x, 3, temperature=0)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:mkldnn_matmul failed')
@pytest.mark.parametrize('changes', [dict(gate='matrix'), dict(gate='vector', n=4, k=2)], ids=str)
def test_bfloat16_autocast_and_one_graph(compile_model, changes):
    """Under autocast the model trains in bfloat16, and compiles without a graph break: no value is read."""
    model, x = make(dtype=torch.float32, **changes), tokens(2, 16)
    exact = model(x, x)[1]
    graphs = []

    def backend(graph, _):                               # as backend='eager', and the graph is kept
        graphs.append(graph)
        return graph
    compiled = compile_model(model, backend=backend, fullgraph=True)
    with torch.autocast('cpu', torch.bfloat16):
        for m in (model, compiled):
            _, loss, aux = m(x, x)
            assert 0 < abs(loss - exact) < 0.02 * exact and loss.dtype == torch.float32
    assert len(graphs) == 1
    called = {str(node.target) for node in graphs[0].graph.nodes}        # fullgraph alone lets .item() pass
    assert not called & {'item', 'tolist', '_local_scalar_dense'} and 'view' in called
    assert all(v.dtype == torch.float32 for v in aux.values())
    (loss + aux.get('balance', 0)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert abs(compiled(x, x)[1] - exact) < 1e-5


def test_initialisation():
    torch.manual_seed(0)
    dense = SelfMoE(SelfMoEConfig(vocab_size=512, n_layer=4, n_embd=128, gate='matrix'))
    for model in (dense, upcycle(dense, 4)):
        for name, p in model.named_parameters():
            if 'norm_' in name or 'gates' in name:
                assert (p == ('norm_' in name)).all(), name
            else:
                std = 0.02 / math.sqrt(8) if '.proj' in name or '.down' in name else 0.02
                assert abs(p.std() / std - 1) < (0.15 if 'router' in name else 0.03), name
    assert dense.blocks[0].ffn.down.in_features == 352   # 8/3 of 128 is 341.3


def test_params_by_hand():
    D, d, H, G, hidden = 16, 4, 4, 2, 8
    attention_ = D * (H + 2 * G) * d + D * D
    expert, head, norms = D * 2 * hidden + hidden * D, 37 * D, 3 * 2 * D + D
    dense = 3 * (attention_ + expert) + norms + head
    assert make().count_params() == (dense + head, dense)                # the embedding is only looked up
    assert make(gate='matrix').count_params() == (dense + 2 * D * D + head, dense + 2 * D * D)
    assert make(gate='vector', gate_layers=[2]).count_params() == (dense + D + head, dense + D)
    mixed = dense + 3 * (4 * D + expert) + 2             # routers, 2 of 4 experts active, scalar gates
    assert make(gate='scalar', n=4, k=2).count_params() == (mixed + 3 * 2 * expert + head, mixed)


@pytest.mark.parametrize('wrong', [
    dict(vocab_size=0), dict(block_size=0), dict(n_layer=0), dict(n_head=0), dict(n_kv_head=0),
    dict(n_embd=0), dict(n_expert=0), dict(n_embd=18), dict(n_head=16, n_kv_head=4), dict(n_kv_head=3),
    dict(n_kv_head=8), dict(gate='full'),
    *[dict(gate='scalar', gate_layers=layers) for layers in ([0], [1, 3], [-1])],
    dict(gate_layers=[1]), dict(top_k=0), dict(top_k=2),
    dict(n_expert=4, top_k=5), dict(dropout=1.0), dict(dropout=-0.1), dict(ffn_hidden=0)], ids=str)
def test_config_errors(wrong):
    SelfMoEConfig(**SMALL)
    with pytest.raises(ValueError):
        SelfMoEConfig(**{**SMALL, **wrong})


def test_adapters_are_not_lost_silently():
    from lora import add_lora
    for operate in (add_gates, upcycle):
        with pytest.raises(ValueError, match='merge them first'):
            operate(add_lora(SelfMoE(SelfMoEConfig(**SMALL))))
