"""The routers of arena/ against slow oracles: one token, one choice at a time, in float64."""

import importlib
import math
from collections import Counter

import pytest
import torch

import arena.bias
import moduleformer
import moep
from arena import dense, moduleformer_routers
from arena.bias import BiasedChoice
from arena.noisy import NoisyScores
from arena.sigmoid import SigmoidGates
from arena.zloss import ZLoss
from tools.check import CHECKS, run_check

MOEP = dict(vocab_size=31, block_size=8, n_layer=2, n_head=2, n_embd=16, n_parallel=2,
            n_head_parallel=1, n_embd_parallel=8, n_block=4, n_expert=3, top_k=2, dropout=0.0)
POOLS = dict(vocab_size=31, block_size=8, n_layer=1, n_embd=16, n_att=3, d_att=8, n_head=2, n_ffd=5,
             d_ffd=12, top_k=2, d_router=6, query_block=5)
EXPERTS = dict(vocab_size=31, block_size=8, n_layer=2, n_head=2, n_embd=24, n_expert=4, top_k=2)
MIXINS = dict(sigmoid=SigmoidGates, bias=BiasedChoice, zloss=ZLoss, noisy=NoisyScores)
LEARNED = [('moep', 'shared'), *((base, idea) for base in ('moep', 'moduleformer', 'dense')
                                 for idea in MIXINS)]
ROUTERS = (moep.Router, moduleformer.Router, dense.Router)


def module_and_keys(base, idea):
    if base == 'moep':
        return importlib.import_module(f'arena.{idea}'), MOEP
    if base == 'moduleformer':
        return moduleformer_routers, dict(POOLS, router=idea)
    return dense, EXPERTS


def make(base, idea, **changes):
    torch.manual_seed(0)
    module, keys = module_and_keys(base, idea)
    Model = module.Model
    if base == 'dense':
        Router = type('MixedRouter', (MIXINS[idea], dense.Router), {})
        Model = type('MixedDense', (dense.Dense,), dict(router=Router))
    model = Model(module.Config(**{**keys, **changes})).double()
    biases = [tensor for name, tensor in model.named_buffers() if name.endswith('.b')]
    for tensor in [*model.parameters(), *biases]:
        tensor.data.add_(0.3 * torch.randn_like(tensor))
    return model


def routers(model):
    return [module for module in model.modules() if isinstance(module, ROUTERS)]


def inputs(router, n=9):
    return torch.randn(n, next(router.parameters()).size(1), dtype=torch.float64)


# ---- The slow oracle -----------------------------------------------------------------------------


def scores(router, x):
    """One token's scores, and the scales of its noise."""
    if isinstance(router, moduleformer.Router):
        hidden = torch.stack([(b @ x).clamp(min=0) for b in router.B.weight])
        h = [a @ hidden for a in router.A.weight]
    else:
        h = [w @ x for w in router.linear.weight]
    v = router.noise.weight if hasattr(router, 'noise') else []
    return h, [torch.log(1 + torch.exp(row @ x)) for row in v]


def best(values, k):
    return sorted(range(len(values)), key=lambda i: -values[i].item())[:k]


def shares(values, among):
    total = sum(values[i] for i in among)
    return {i: values[i] / total for i in among}


def route(idea, router, x, noise, k):
    """One token -> its gates {choice: gate}, the shares of what it may choose from, log sum exp."""
    h, scales = scores(router, x)
    h = [score + n * scale for score, n, scale in zip(h, noise, scales)] if scales else h
    allowed = range(len(h))
    values = [torch.exp(score) for score in h]
    z = torch.log(sum(values))
    if idea in ('sigmoid', 'bias'):
        values = [1 / (1 + torch.exp(-score)) for score in h]
    chosen = best(values, k)
    if idea == 'bias':
        chosen = best([value + b for value, b in zip(values, router.bias.b)], k)
    if idea == 'shared':
        allowed = allowed[1:]
        chosen = [0] + [i + 1 for i in best(values[1:], k - 1)]
    gates = shares(values, chosen)
    if idea in ('zloss', 'noisy') and isinstance(router, moduleformer.Router):
        gates = {i: shares(values, allowed)[i] for i in chosen}     # not renormalised
    return gates, shares(values, allowed), z


def balance(gates, probs):
    """E sum f_i p_i: the Switch form."""
    took = Counter(i for gate in gates for i in gate if i in probs[0])
    mean = {i: sum(p[i] for p in probs) / len(probs) for i in probs[0]}
    return len(mean) * sum(took[i] / sum(took.values()) * mean[i] for i in mean)


def mutual_information(probs):
    """-> the losses mi (Eq. 7) and concentration (Eq. 8)"""
    mean = {i: sum(p[i] for p in probs) / len(probs) for i in probs[0]}
    entropy = -sum(p * torch.log(p) for p in mean.values())
    conditional = -sum(p * torch.log(p) for prob in probs for p in prob.values()) / len(probs)
    return conditional - entropy, entropy


@pytest.mark.parametrize('top_k', [2, 3])
@pytest.mark.parametrize('base, idea', LEARNED)
def test_oracle(base, idea, top_k):
    """Gates, losses, and the gradients of inputs and weights, in training, of every router."""
    for router in routers(make(base, idea, top_k=top_k).train()):
        x = inputs(router).requires_grad_()
        torch.manual_seed(7)
        noise = torch.randn(9, router.n_choices, dtype=torch.float64)
        gates, probs, logs = zip(*(route(idea, router, *token, top_k) for token in zip(x, noise)))
        if base == 'moduleformer':
            mi, concentration = mutual_information(probs)
            wanted = dict(mi=mi, concentration=concentration)
        else:
            wanted = dict(balance=balance(gates, probs))
        if idea == 'zloss':
            wanted['z'] = sum(log ** 2 for log in logs) / len(logs)
        torch.manual_seed(7)
        gate_NK, choice_NK, losses = router(x)
        assert losses.keys() == wanted.keys()
        assert all(abs(losses[key] - wanted[key]) < 1e-12 for key in wanted)
        for gate, choice, slow in zip(gate_NK, choice_NK.tolist(), gates):
            assert sorted(choice) == sorted(slow) and len(slow) == top_k
            assert all(abs(g - slow[i]) < 1e-12 for g, i in zip(gate, choice))
        pull = lambda gate, i, n: gate * math.sin(3 * n + i)         # gradients that differ
        fast = sum(pull(g, i, n) for n in range(9)
                   for g, i in zip(gate_NK[n], choice_NK[n].tolist()))
        slow = sum(pull(g, i, n) for n, gate in enumerate(gates) for i, g in gate.items())
        for i, key in enumerate(wanted, 1):
            fast, slow = fast + i * losses[key], slow + i * wanted[key]
        leaves = [x, *router.parameters()]
        for a, b in zip(torch.autograd.grad(fast, leaves), torch.autograd.grad(slow, leaves)):
            assert torch.allclose(a, b, atol=1e-11) and a.abs().max() > 1e-6
        if idea == 'bias':
            counted = Counter(i for gate in gates for i in gate)
            assert router.bias.load.tolist() == [counted[i] for i in range(router.n_choices)]


def test_hash_oracle():
    """Everywhere and always, a token id takes the K choices its table names, with equal gates."""
    model = make('moep', 'hash', top_k=3).eval()
    idx = torch.randint(31, (2, 8))
    routes = model.routes(idx)
    assert len(routes) == len(routers(model)) == 4
    for layer, gate in routes.items():
        table = model.get_submodule(layer).router.table
        assert all(len({*row}) == 3 for row in table.tolist())
        for i, row in zip(idx.flatten().tolist(), gate.flatten(0, 1)):
            assert row.nonzero().flatten().tolist() == sorted(table[i].tolist())
            assert torch.allclose(row[row > 0], row.new_tensor(1 / 3))
    tables = [router.table for router in routers(model)]
    assert not tables[1].equal(tables[2])                # each layer has its own
    share = torch.stack([routes[layer].mean((0, 1)) for layer in ('shrink', 'grow')])
    wanted = 3 * share.square().sum()                    # E sum f_i^2, of both
    assert abs(model(idx)[2]['expert_balance'] - wanted) < 1e-12


# ---- The model around it -------------------------------------------------------------------------


@pytest.mark.parametrize('base, idea', [('moep', 'hash'), *LEARNED[:9]])
def test_contract(base, idea):
    """Causal, cached = uncached, gates that sum to 1, gradients, saved and resumed: tools.check."""
    module, keys = module_and_keys(base, idea)
    verdicts = [run_check(check, module, module.Config(**keys)) for check in CHECKS]
    assert [text for verdict, text in verdicts if verdict == 'WRONG'] == []


@pytest.mark.parametrize('name', ['fc', 'hidden', 'q', 'down', 'proj'])
@pytest.mark.parametrize('base', [moep, moduleformer])
def test_a_router_names_its_layers_as_it_likes(base, name):
    """They keep the values that it gives them, and are counted whole."""
    class MyRouter(base.Router):
        def __init__(self, *args):
            super().__init__(*args)
            setattr(self, name, torch.nn.Linear(4, 4))
            torch.nn.init.eye_(getattr(self, name).weight)

    class MyModel(base.Model):
        router = MyRouter

    config = base.Config(**(MOEP if base is moep else POOLS))
    plain, own = base.Model(config), MyModel(config)
    added = [getattr(router, name) for router in routers(own)]
    assert all(torch.equal(layer.weight, torch.eye(4)) for layer in added)
    assert own.count_params()[1] - plain.count_params()[1] == len(added) * 20


# ---- The bias ------------------------------------------------------------------------------------


def step(router, batches):
    """One step of several passes; a single weight moves, a little."""
    for x in batches:
        router.train()(x)
    next(router.parameters()).data[0, 0] += 1e-9


@pytest.mark.parametrize('base', ['moep', 'moduleformer', 'dense'])
def test_bias_moves_once_per_step(base):
    """Three passes and a step do what one pass over all their tokens does. eval changes nothing."""
    one, other = [routers(make(base, 'bias'))[0] for _ in range(2)]
    start = one.bias.b.clone()
    for _ in range(4):
        batches = [inputs(one, 8) + 1 for _ in range(3)]
        step(one, batches)
        step(other, [torch.cat(batches)])
        assert one.bias.b.equal(other.bias.b) and one.bias.load.equal(other.bias.load)
        mean = one.bias.load.double().mean()
        wanted = one.bias.b + 0.001 * (mean - one.bias.load).sign()
        one.eval()(batches[0])
        one.train()(batches[0])                          # the first pass after the step
        assert torch.allclose(one.bias.b, wanted, rtol=0, atol=1e-15)
        other.train()(batches[0])
    assert not one.bias.b.equal(start)


def test_bias_counts_the_tokens_of_all_processes(monkeypatch):
    monkeypatch.setattr(arena.bias.dist, 'is_initialized', lambda: True)
    monkeypatch.setattr(arena.bias.dist, 'all_reduce', lambda x: x.mul_(5))
    router = make('moep', 'bias').parallel[0].router.train()
    router(inputs(router, 10))
    assert router.bias.load.sum() == 5 * 10 * 2
