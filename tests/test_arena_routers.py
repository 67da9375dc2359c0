"""The routers of arena/ against slow oracles: one token, one choice at a time, in float64."""

import math
import re
from collections import Counter

import pytest
import torch

import arena.bias
import moduleformer
import moep
from conftest import ROOT
from plumbing.cli import UserError
from plumbing.models import import_model
from tools.check import CHECKS, run_check

MOEP = dict(vocab_size=31, block_size=8, n_layer=2, n_head=2, n_embd=16, n_parallel=2, n_head_parallel=1,
            n_embd_parallel=8, n_block=4, n_expert=3, top_k=2, dropout=0.0)
POOLS = dict(vocab_size=31, block_size=8, n_layer=1, n_embd=16, n_att=3, d_att=8, n_head=2, n_ffd=5, d_ffd=12,
             top_k=2, d_router=6, query_block=5)
NAMES = ['sigmoid', 'bias', 'shared', 'zloss', 'noisy', 'hash', 'moduleformer_sigmoid', 'moduleformer_bias',
         'moduleformer_zloss', 'moduleformer_noisy']


def config_of(name, **changes):
    keys = POOLS if name.startswith('moduleformer') else MOEP
    return import_model(f'arena.{name}').Config(**{**keys, **changes})


def make(name, **changes):
    torch.manual_seed(0)
    model = import_model(f'arena.{name}').Model(config_of(name, **changes)).double()
    for tensor in [*model.parameters(), *(b for key, b in model.named_buffers() if key.endswith('.b'))]:
        tensor.data.add_(0.3 * torch.randn_like(tensor))
    return model


def routers(model):
    return [m for m in model.modules() if isinstance(m, (moep.Router, moduleformer.Router))]


# ---- The slow oracle -----------------------------------------------------------------------------


def scores(router, x):
    """One token's scores, and the scales of its noise."""
    if isinstance(router, moep.Router):
        h = [w @ x for w in router.linear.weight]
    else:
        hidden = torch.stack([(b @ x).clamp(min=0) for b in router.B.weight])
        h = [a @ hidden for a in router.A.weight]
    v = router.noise.weight if hasattr(router, 'noise') else []
    return h, [torch.log(1 + torch.exp(each @ x)) for each in v]


def best(values, k):
    return sorted(range(len(values)), key=lambda i: -values[i].item())[:k]


def shares(values, among):
    total = sum(values[i] for i in among)
    return {i: values[i] / total for i in among}


def route(name, router, x, k, noise):
    """One token -> its gates {choice: gate}, the shares of what it may choose from, log sum exp of scores."""
    h, scales = scores(router, x)
    h = [score + n * scale for score, n, scale in zip(h, noise, scales)] if scales else h
    everyone = range(len(h))
    values = [torch.exp(score) for score in h]
    z = torch.log(sum(values))
    if name in ('sigmoid', 'bias'):
        values = [1 / (1 + torch.exp(-score)) for score in h]
    chosen = best(values, k)
    if name == 'bias':
        chosen = best([value + b for value, b in zip(values, router.bias.b)], k)
    if name == 'shared':
        everyone = everyone[1:]
        chosen = [0] + [i + 1 for i in best(values[1:], k - 1)]
    gates = shares(values, chosen)
    if name in ('zloss', 'noisy') and isinstance(router, moduleformer.Router):
        gates = {i: shares(values, everyone)[i] for i in chosen}     # not renormalised
    return gates, shares(values, everyone), z


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
@pytest.mark.parametrize('name', [name for name in NAMES if name != 'hash'])
def test_oracle(name, top_k):
    """Gates, losses, and the gradients of inputs and weights, in training, of every router."""
    idea = name.removeprefix('moduleformer_')
    for router in routers(make(name, top_k=top_k).train()):
        weight = (router.linear if hasattr(router, 'linear') else router.B).weight
        x = torch.randn(9, weight.size(1), dtype=torch.float64, requires_grad=True)
        torch.manual_seed(7)
        noise = torch.randn(9, router.n_choices if hasattr(router, 'n_choices') else router.A.n_modules,
                            dtype=torch.float64)
        found = [route(idea, router, each, top_k, n) for each, n in zip(x, noise)]
        gates, probs, logs = zip(*found)
        z = sum(log ** 2 for log in logs) / len(logs)
        if isinstance(router, moep.Router):
            wanted = dict(balance=balance(gates, probs))
        else:
            mi, concentration = mutual_information(probs)
            wanted = dict(mi=mi, concentration=concentration)
        if idea == 'zloss':
            wanted['z'] = z
        torch.manual_seed(7)
        gate_NK, choice_NK, losses = router(x)
        assert losses.keys() == wanted.keys()
        assert all(abs(losses[key] - wanted[key]) < 1e-12 for key in wanted)
        for gate, choice, slow in zip(gate_NK, choice_NK.tolist(), gates):
            assert sorted(choice) == sorted(slow) and len(slow) == top_k
            assert all(abs(g - slow[i]) < 1e-12 for g, i in zip(gate, choice))
        pull = lambda gate, i, n: gate * math.sin(3 * n + i)         # gradients that differ
        fast = sum(pull(g, i, n) for n in range(9) for g, i in zip(gate_NK[n], choice_NK[n].tolist()))
        slow = sum(pull(g, i, n) for n, gate in enumerate(gates) for i, g in gate.items())
        for i, key in enumerate(wanted, 1):
            fast, slow = fast + i * losses[key], slow + i * wanted[key]
        inputs = [x, *router.parameters()]
        ours = torch.autograd.grad(fast, inputs)
        for a, b in zip(ours, torch.autograd.grad(slow, inputs)):
            assert torch.allclose(a, b, atol=1e-11) and a.abs().max() > 1e-6
        if idea == 'bias':
            counted = Counter(i for gate in gates for i in gate)
            assert router.bias.load.tolist() == [counted[i] for i in range(len(router.bias.load))]


def test_hash_oracle():
    """Everywhere and always, a token id takes the K choices that its table names, with equal gates."""
    model = make('hash', top_k=3).eval()
    idx = torch.randint(31, (2, 8))
    found = model.routes(idx)
    assert len(found) == len(routers(model)) == 4
    for layer, gate in found.items():
        table = model.get_submodule(layer).router.table
        assert all(len({*row}) == 3 for row in table.tolist())
        for i, row in zip(idx.flatten().tolist(), gate.flatten(0, 1)):
            assert row.nonzero().flatten().tolist() == sorted(table[i].tolist())
            assert torch.allclose(row[row > 0], row.new_tensor(1 / 3))
    tables = [router.table for router in routers(model)]
    assert not tables[1].equal(tables[2])                # each layer has its own
    share = torch.stack([gate.mean((0, 1)) for gate in [found['shrink'], found['grow']]])
    wanted = 3 * share.square().sum()                    # E sum f_i^2, of both
    assert abs(model(idx)[2]['expert_balance'] - wanted) < 1e-12


# ---- The model around it -------------------------------------------------------------------------


@pytest.mark.parametrize('name', NAMES)
def test_contract(name):
    """Causal, cached = uncached, gates that sum to 1, gradients, saved and resumed: tools.check."""
    module = import_model(f'arena.{name}')
    found = {check.__name__: run_check(check, module, config_of(name)) for check in CHECKS}
    assert [text for verdict, text in found.values() if verdict != 'ok'] == []
    kinds = {type(router) for router in routers(make(name))}
    assert kinds == {module.Model.router} and not kinds & {moep.Router, moduleformer.Router}


@pytest.mark.parametrize('name', [name for name in NAMES if name != 'hash'])
def test_bfloat16_changes_no_choice(name):
    """Nor a gate, nor a loss: routers stay out of autocast."""
    for router in routers(make(name).float().eval()):
        weight = (router.linear if hasattr(router, 'linear') else router.B).weight
        x = torch.randn(9, weight.size(1))
        gate, choice, losses = router(x)
        with torch.autocast('cpu', torch.bfloat16):
            again = router(x)
        assert gate.equal(again[0]) and choice.equal(again[1]) and losses == again[2]


def test_routers_come_from_one_place():
    assert {type(r) for r in routers(moep.MoEP(moep.MoEPConfig(**MOEP)))} == {moep.Router}
    for name in ('arena.nothing', 'arena/sigmoid', 'arena.__init__', 'tools.arena', 'arena..moep'):
        with pytest.raises(UserError, match='there is no model file|lacks the line'):
            import_model(name)


@pytest.mark.parametrize('name', ['fc', 'hidden', 'q', 'down', 'proj'])
@pytest.mark.parametrize('base', [moep, moduleformer])
def test_a_router_names_its_layers_as_it_likes(base, name):
    """They keep the values that it gives them, and are counted whole."""
    class MyRouter(base.Router):
        def __init__(self, *args):
            super().__init__(*args)
            setattr(self, name, torch.nn.Linear(4, 4))
            torch.nn.init.eye_(getattr(self, name).weight)

    class Mine(base.Model):
        router = MyRouter

    config = base.Config(**(MOEP if base is moep else POOLS))
    plain, mine = base.Model(config), Mine(config)
    added = [getattr(router, name) for router in routers(mine)]
    assert all(torch.equal(layer.weight, torch.eye(4)) for layer in added)
    assert mine.count_params()[1] - plain.count_params()[1] == len(added) * 20


def test_a_router_that_inherits_nothing_is_seen():
    class Whole(torch.nn.Module):
        def __init__(self, d, n_choices, config):
            super().__init__()
            self.n_choices = n_choices

        def forward(self, x_ND):
            choice_NK = torch.arange(self.n_choices).expand(len(x_ND), -1)
            return torch.full(choice_NK.shape, 1 / self.n_choices), choice_NK, dict(balance=x_ND.sum() * 0)

    class Mine(moep.MoEP):
        router = Whole

    ids = torch.randint(31, (2, 8))
    model = Mine(moep.MoEPConfig(**MOEP)).eval()
    assert [gate.shape[-1] for gate in model.routes(ids).values()] == [3, 4, 4, 3]
    routes = next(check for check in CHECKS if check.__name__ == 'routes')
    with pytest.raises(AssertionError, match='a token takes 3 choices; its cost is counted from top_k = 2'):
        routes(moep, model, ids, ids)


def test_a_shared_block_leaves_something_to_choose():
    with pytest.raises(ValueError, match='top_k = 1 leaves nothing to choose'):
        make('shared', top_k=1)


def test_noise_starts_as_the_files_say():
    for name, std in (('noisy', 0.02), ('moduleformer_noisy', 0.0)):
        torch.manual_seed(0)
        fresh = import_model(f'arena.{name}').Model(config_of(name))
        scales = torch.cat([router.noise.weight.flatten() for router in routers(fresh)])
        assert abs(scales.std() - std) <= 0.2 * std, name


# ---- The bias ------------------------------------------------------------------------------------


def passes(router, batches):
    """One step of several passes; a single weight moves, a little."""
    for x in batches:
        router.train()(x)
    next(router.parameters()).data[0, 0] += 1e-9


def skewed(n=64):
    return torch.randn(n, 8, dtype=torch.float64) + torch.linspace(-1, 1, 8)


def loads(router, x):
    _, choice, _ = router.eval()(x)
    return torch.bincount(choice.flatten(), minlength=4) / len(x)


def test_bias_evens_the_load():
    torch.manual_seed(0)
    router = make('bias').parallel[0].router
    router.bias.b.zero_()
    test = skewed(1000)
    before = loads(router, test)
    for _ in range(600):
        passes(router, [skewed()])
    after = loads(router, test)
    assert before.max() - before.min() > 0.3             # of 0.5 that each should have
    assert after.max() - after.min() < 0.1


@pytest.mark.parametrize('name', ['bias', 'moduleformer_bias'])
def test_bias_moves_once_per_step(name):
    """Three passes and a step do what one pass over all their tokens does; eval mode changes nothing."""
    one, other = [routers(make(name))[0] for _ in range(2)]
    start = one.bias.b.clone()
    d = one.bias.seen.size(1)
    for _ in range(4):
        batches = [torch.randn(8, d, dtype=torch.float64) + 1 for _ in range(3)]
        passes(one, batches)
        passes(other, [torch.cat(batches)])
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
    router = make('bias').parallel[0].router.train()
    router(skewed(10))
    assert router.bias.load.sum() == 5 * 10 * 2


def test_bias_compiled():
    """The state that a compiled router keeps is that of a plain one."""
    plain, other = [make('bias').parallel[0].router for _ in range(2)]
    compiled = torch.compile(other, backend='aot_eager')
    for _ in range(5):
        x = skewed(16)
        for router in (plain, compiled):
            passes(router, [x, x.flip(0)])
    assert plain.bias.b.abs().max() > 0 and plain.bias.load.sum() > 0
    for mine, its in zip(plain.buffers(), other.buffers()):
        assert torch.allclose(mine, its, rtol=0, atol=1e-12)


def test_a_run_resumes_with_its_bias(run, data_dir, tmp_path):
    """train.py, killed between two steps of two micro-batches each, and sample.py after it."""
    tiny = [ROOT / 'config/arena/toy/router_bias.py', f'--data_dir={data_dir}', '--n_embd=12', '--n_head=1',
            '--n_embd_parallel=8', '--batch_size=2', '--gradient_accumulation_steps=2', '--eval_tokens=64',
            '--sample_tokens=2', '--learning_rate=1e-3', '--schedule=constant', '--save_interval=3']
    run('train.py', *tiny, '--max_iters=6', f'--out_dir={tmp_path}/whole', here=True)
    run('train.py', *tiny, '--max_iters=3', f'--out_dir={tmp_path}/cut', here=True)
    run('train.py', *tiny, '--max_iters=6', f'--out_dir={tmp_path}/cut', '--resume', here=True)
    whole, cut = [torch.load(tmp_path / out / 'ckpt.pt')['weights'] for out in ('whole', 'cut')]
    assert all(whole[key].equal(cut[key]) for key in whole)
    assert whole['shrink.router.bias.b'].abs().max() > 0
    assert whole['shrink.router.bias.load'].sum() == 2 * 2 * 64 * 2
    told = run('sample.py', tmp_path / 'cut', '--prompt=A dog', '--routes', here=True).stdout
    assert 'parallel.1' in told


# ---- The page ------------------------------------------------------------------------------------


def test_the_page_lists_every_router():
    page = (ROOT / 'docs/routers.md').read_text(encoding='utf-8')
    rows = re.findall(r'\[`arena/(\w+)\.py`\].*?\| (\d+) \| `config/arena/(\w+)\.py`', page)
    assert [name for name, _, _ in rows] == NAMES
    for name, count, config in rows:
        lines = (ROOT / f'arena/{name}.py').read_text(encoding='utf-8').splitlines()
        assert int(count) == len(lines), name
        for folder in ('config/arena', 'config/arena/toy'):
            assert f"model = 'arena.{name}'" in (ROOT / folder / f'{config}.py').read_text(encoding='utf-8')
