"""The contract that every model keeps (docs/extending.md), written once and run over all models.
Most of it is tools.check's: what a forward pass returns, causality, caches, batches, gradients.
test_check.py runs that over these models, test_arena_routers.py over routers. Here is the rest:
generation, active parameters, surgery, chance, routers, precision."""

import copy
import json
import math
from dataclasses import asdict

import pytest
import torch

from moduleformer import absorb_inserted, insert_experts, prune_experts
from oracles import slots, tokens, uncached
from papaformer import compose
from selfmoe import add_gates, select_gates, upcycle

SMALL = dict(vocab_size=37, block_size=12, n_layer=2, n_head=2, n_embd=16)
MOEP = dict(SMALL, n_parallel=2, n_head_parallel=2, n_embd_parallel=8, n_block=4, n_expert=3,
            top_k=2, expert_hidden=24)
PAPA = dict(SMALL, n_parallel=2, path_embd=[8, 8], path_head=[2, 1], path_ffn_hidden=[12, 20])
POOLS = dict(SMALL, n_att=4, d_att=8, n_ffd=5, d_ffd=16, top_k=2, d_router=16, query_block=5)
LLAMA = dict(SMALL, n_kv_head=1, ffn_hidden=16)
BYTES = dict(LLAMA, vocab_size=9, block_size=16, byte_limit=3, byte_embd=8, byte_layer=1,
             byte_head=2)
DEPTH = dict(LLAMA, n_layer=4, capacity=0.4)
ROUTED = dict(SMALL, n_expert=5, top_k=3, n_shared=1)

CASES = {                                                # name: (module, settings)
    'moep': ('moep', MOEP),
    'moep_swiglu': ('moep', dict(MOEP, swiglu=True, n_parallel=1)),
    'gpt2': ('moep', dict(MOEP, n_parallel=0)),
    'gpt2_untied': ('moep', dict(MOEP, n_parallel=0, tied=False)),
    'papaformer': ('papaformer', PAPA),
    'papaformer_unequal': ('papaformer', dict(PAPA, path_embd=[8, 4])),
    'gumbel1': ('papaformer', dict(PAPA, connection='gumbel1')),
    'gumbel2': ('papaformer', dict(PAPA, connection='gumbel2')),
    'llama': ('papaformer', dict(PAPA, n_parallel=0)),
    'moduleformer': ('moduleformer', POOLS),
    'identity_kv': ('moduleformer', dict(POOLS, n_layer=1, identity_kv=True, d_att=16, n_head=1)),
    'inserted': ('moduleformer', dict(POOLS, n_att=[2, 4], new_att=1, new_ffd=2)),
    'molm': ('moduleformer', dict(POOLS, n_layer=1, released=True)),
    'selfmoe': ('selfmoe', LLAMA),
    'mistral': ('selfmoe', dict(LLAMA, window=8, d_head=6, tied=True, rope_base=500.0)),
    'gate_scalar': ('selfmoe', dict(LLAMA, gate='scalar')),
    'gate_vector': ('selfmoe', dict(LLAMA, gate='vector')),
    'gate_matrix': ('selfmoe', dict(LLAMA, n_layer=3, gate='matrix', gate_layers=[2])),
    'mixture': ('selfmoe', dict(LLAMA, n_expert=4, top_k=2)),
    'qwen': ('selfmoe', dict(LLAMA, qkv_bias=True, qk_norm='head', rope_scaling=[8, 1, 4, 40])),
    'olmoe': ('selfmoe', dict(LLAMA, n_expert=4, top_k=2, gates_sum_to_1=False, qk_norm='width')),
    'stlm': ('stlm', LLAMA),
    'stlm_ffn': ('stlm', dict(LLAMA, share='ffn', lora_rank=2)),
    'stlm_all': ('stlm', dict(LLAMA, n_layer=3, share='all', share_group=2, lora_rank=2)),
    'stlm_bytes': ('stlm', BYTES),
    'stlm_bytes_parallel': ('stlm', dict(BYTES, decoder='parallel', share='ffn')),
    'stlm_depth': ('stlm_depth', DEPTH),
    'stlm_exit': ('stlm_depth', dict(DEPTH, capacity=1.0, exit_loss=True)),
    'dense': ('arena.dense', SMALL),
    'dense_routed': ('arena.dense', ROUTED),
    'loop': ('arena.loop', dict(SMALL, d_token=12, hidden=24)),
    'loop_routed': ('arena.loop', dict(SMALL, d_token=12, hidden=24, n_expert=5, top_k=2)),
}
ONE_EACH = ['moep', 'papaformer', 'moduleformer', 'selfmoe', 'stlm', 'stlm_bytes', 'stlm_depth',
            'dense']
ALL = pytest.mark.parametrize('name', CASES)
EACH = pytest.mark.parametrize('name', ONE_EACH)


def build(name, **changes):
    module, settings = CASES[name]
    module = pytest.importorskip(module)                 # arena/ may be taken away
    return module.Model(module.Config(**{'dropout': 0.0, **settings, **changes}))


def make(name, scale=0.2, seed=0, dtype=torch.float64, **changes):
    """In evaluation mode; gains, gates, routers, and what starts at zero are random, so that all
    matter."""
    torch.manual_seed(seed)
    model = build(name, **changes).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn_like(p))
    return model


def text(model, B=3, T=12, seed=1):
    """(B, T) ids. A byte-level model reads chunks: bytes, end-of-chunk and padding, or end-of-text
    and padding."""
    L, V = slots(model), model.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    if L == 1:
        return torch.randint(0, V, (B, T), generator=generator)
    chunks = torch.randint(0, V - 3, (B, T // L + 1, L), generator=generator)
    end = torch.randint(1, L, (B, T // L + 1, 1), generator=generator)
    place = torch.arange(L)
    chunks = chunks.where(place != end, V - 3).where(place <= end, V - 1)
    is_text_end = torch.rand(end.shape, generator=generator) < 0.2
    chunks = torch.where(is_text_end, (V - 2) + (place > 0), chunks)
    return chunks.flatten(1)[:, :T]


def pair(model, B=3, T=12):
    """Inputs and targets; padding is no target."""
    ids = text(model, B, T + 1)
    x, y = ids[:, :-1], ids[:, 1:].clone()
    if slots(model) > 1:
        y[y == model.config.vocab_size - 1] = -1
    return x, y


# ---- Time ----------------------------------------------------------------------------------------

@pytest.mark.parametrize('start', [3, 22])
@ALL
def test_cached_generation_is_uncached(name, start):
    """Past the context length, and from a prompt that is longer than it."""
    model = make(name, scale=0.4, seed=2)
    x = text(model, T=start)
    out = model.generate(x, 11, temperature=0)
    assert torch.equal(out[:, :start], x) and torch.equal(out, uncached(model, x, 11))
    assert len(set(out[:, start:].flatten().tolist())) > 2               # not one token for ever


@pytest.mark.parametrize('name', [name for name in CASES if CASES[name][0] != 'moduleformer'])
def test_a_text_that_is_too_long(name):
    """Also where a part of it is in the cache."""
    model = make(name)
    limit = model.config.block_size
    x, cache = text(model, T=limit + 1), []
    with pytest.raises(ValueError, match=f'{limit + 1} .*{limit}'):
        model(x)
    if slots(model) == 1:
        model(x[:, :9], cache=cache)
        with pytest.raises(ValueError, match=f'{limit + 1} .*{limit}'):
            model(x[:, 9:], cache=cache)


# ---- Counts --------------------------------------------------------------------------------------

TABLE, FFN = 37 * 16, 3 * 16 * 16                        # an embedding; SwiGLU of a hidden width 16
ATTENTION = 16 * (2 + 1 + 1) * 8 + 16 * 16               # two heads of queries, one of keys, values
SMALL_BLOCK = 8 * 8 + 8 + 2 * 8 + 4 * 8 * 8 + 8          # MoEP's: without norm_1, qkv, fc
IDLE = {
    'moep': 12 * 16 + 2 * 2 * (SMALL_BLOCK + 8 * 32 + 32) + 16 * 8 + 8 + 8 * 16 + 16,
    'moep_swiglu': 12 * 16 + 2 * (SMALL_BLOCK + 8 * 64 + 64)
    + 16 * 48 + 48 + 24 * 8 + 8 + 8 * 48 + 48 + 24 * 16 + 16,
    'gpt2': 12 * 16, 'gpt2_untied': 12 * 16 + TABLE, 'papaformer': TABLE,
    'moduleformer': TABLE + 2 * (2 * 2 * 16 * 8 + 3 * 2 * 16 * 16),
    'identity_kv': TABLE + 2 * 2 * 16 * 16 + 3 * 2 * 16 * 16,
    'inserted': TABLE + (1 + 3) * 2 * 16 * 8 + 2 * 5 * 2 * 16 * 16,
    'gate_matrix': TABLE, 'mistral': 0, 'mixture': TABLE + 2 * 2 * FFN,
    'stlm': 0, 'stlm_ffn': -FFN, 'stlm_all': -(ATTENTION + FFN + 2 * 16), 'stlm_bytes': 0,
    'stlm_depth': 2 * round(0.6 * (ATTENTION + FFN + 2 * 16)), 'stlm_exit': 0,
    'dense': 0, 'dense_routed': 2 * 2 * 2 * 16 * 16,
    'loop': 37 * 12 - (4 * 16 * 16 + 2 * 16 * 24),
    'loop_routed': 37 * 12 - 4 * 16 * 16 + (5 - 2 * 2) * 2 * 16 * 12}


@pytest.mark.parametrize('name, idle', IDLE.items())
def test_active_parameters(name, idle):
    """By hand: what is only looked up or not chosen is idle; what layers share is active in each
    of them. (That the total is right, tools.check finds.)"""
    total, active = build(name).count_params()
    assert total - active == idle


# ---- Surgery -------------------------------------------------------------------------------------

BATCH = tokens(), tokens(seed=2)


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('name, operate', [
    ('selfmoe', add_gates), ('gate_vector', upcycle),
    ('gate_vector', lambda model: select_gates(model, iter([BATCH]))[0]),
    ('moduleformer', insert_experts), ('inserted', absorb_inserted),
    ('inserted', lambda model: prune_experts(model, batches=iter([BATCH]), threshold=0.5)[0]),
    ('llama', lambda model: compose([model, model]))])
def test_surgery_makes_a_copy(name, operate, training):
    """Of the model's class, dtype and mode; its config rebuilds it. The model stays as it was."""
    model = make(name).train(training)
    model.__class__ = type('Mine', (type(model),), {})
    before = copy.deepcopy(model.state_dict())
    new = operate(model)
    assert type(new) is type(model) and next(new.parameters()).dtype == torch.float64
    assert all(module.training == training for module in model.modules())
    if name != 'llama':                                  # paths of several modes may be composed
        assert all(module.training == training for module in new.modules())
    config = type(new.config)(**json.loads(json.dumps(asdict(new.config))))
    type(new)(config).load_state_dict(new.state_dict())
    for p in new.parameters():
        torch.nn.init.zeros_(p)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


# ---- Chance --------------------------------------------------------------------------------------

@ALL
def test_evaluation_draws_nothing(name):
    noise = dict(dense_routed=dict(drop_expert=0.5), stlm_exit=dict(layer_dropout=0.5))
    model, calm = make(name, dropout=0.5, **noise.get(name, {})), make(name)
    x, y = pair(model)
    state = torch.get_rng_state()
    assert torch.equal(model(x)[0], calm(x)[0])
    model(x, y), model.routes(x)
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())  # routes() removes its own
    model.train()
    assert not torch.equal(model(x)[0], model(x)[0])


@EACH
def test_sampling(name):
    """Temperature and top_k against the distribution that the logits give, by count."""
    model = make(name, dtype=torch.float32)
    x = text(model, 1, 4)
    logits = model(x)[0][0, -1]
    best = logits.topk(3).indices
    temperature = (logits[best[0]] - logits[best[2]]).item()           # so that all three are drawn
    torch.manual_seed(0)
    drawn = model.generate(x.expand(2000, -1), 1, temperature=temperature, top_k=3)[:, -1]
    expected = (logits[best] / temperature).softmax(-1)
    share = torch.stack([(drawn == i).float().mean() for i in best])
    assert abs(share.sum() - 1) < 1e-5 and torch.allclose(share, expected, atol=0.04)
    assert torch.equal(model.generate(x, 6, top_k=1), model.generate(x, 6, temperature=0))
    assert model.generate(x, 3, top_k=1000).shape == (1, 7)              # all of the vocabulary


# ---- Precision and compilation -------------------------------------------------------------------

ROUTED_MODELS = [
    'moep', 'gumbel1', 'gumbel2', 'moduleformer', 'inserted', 'mixture', 'dense_routed']


def routers(model):
    """[(router, inputs)]"""
    found = [module for module in model.modules() if type(module).__name__ == 'Router']
    return [(router, torch.randn(9, next(router.parameters()).size(1))) for router in found]


@pytest.mark.parametrize('name', ROUTED_MODELS)
def test_routers_are_exact_under_autocast(name):
    """In bfloat16 close scores would tie."""
    for router, x in routers(make(name, dtype=torch.float32)):
        exact = router(x)
        with torch.autocast('cpu', torch.bfloat16):
            rough = router(x)
        assert torch.equal(exact[0], rough[0])                         # gates
        assert str(exact[1:]) == str(rough[1:])                        # choices, losses


@pytest.mark.parametrize('name, changes', [
    *((name, {}) for name in ROUTED_MODELS), ('moep', dict(balance='entropy', top_k=1))])
def test_routers_at_their_limits(name, changes):
    """A probability of 0, whose logarithm is not finite, adds nothing. Ties go to the lower index.
    No choice is taken twice, not even if scores underflow or are nan."""
    for router, x in routers(make(name, dtype=torch.float32, **changes)):
        gates, choices, losses = router(1e6 * x)
        (gates.sum() + sum(losses.values())).backward()
        assert all(loss.isfinite() for loss in losses.values())
        assert all(p.grad.isfinite().all() for p in router.parameters() if p.grad is not None)
        certain = [1e4] + [0.0] * (router.n_choices - 1)
        scores = torch.tensor([certain, [0.5] * router.n_choices, [math.nan] * router.n_choices])
        choice = router.choose(scores).tolist()
        assert all(len({*row}) == len(row) for row in choice)
        assert choice[0] == choice[1] == [*range(len(choice[0]))]


def compile_and_record(compile_model, model):
    """-> the compiled model, which runs as with backend='eager'; a list of its graphs, to come."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph
    return compile_model(model, backend=backend, fullgraph=True), graphs


def assert_one_graph(graphs):
    """In which no value is read: fullgraph lets .item() pass."""
    called = {str(node.target) for node in graphs[0].graph.nodes}
    assert len(graphs) == 1 and not called & {'item', 'tolist', '_local_scalar_dense'}


@pytest.mark.slow
# CPUs without bfloat16 say so, and go on
@pytest.mark.filterwarnings('ignore:mkldnn_matmul failed')
@pytest.mark.parametrize('name', [*ONE_EACH, 'gumbel2', 'mixture', 'dense_routed'])
def test_bfloat16_in_one_graph(name, compile_model):
    """Under autocast a model trains in bfloat16, while losses and the residual stream stay float32.
    It compiles without a graph break, and no value is read."""
    model = make(name, scale=0.1, dtype=torch.float32, dropout=0.1).train()
    x, y = pair(model)
    compiled, graphs = compile_and_record(compile_model, model)
    streams = []
    losses = []
    for call, autocast in ((model, False), (model, True), (compiled, True)):
        torch.manual_seed(3)                             # the same noise
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            _, loss, aux = call(x, y)
        losses.append(loss.item())
        assert all(value.dtype == torch.float32 for value in (loss, *aux.values()))
    assert 0 < abs(losses[1] - losses[0]) < 0.05 * losses[0]
    assert abs(losses[2] - losses[1]) < 1e-3 * losses[0]
    assert_one_graph(graphs)
    (loss + sum(aux.values())).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())

    def record(module, args):
        inputs = args[0] if isinstance(args[0], list) else args[:1]
        streams.extend(value.dtype for value in inputs)
    for path, module in model.named_modules():
        is_layer = path.count('.') == 1 and path.split('.')[0] in ('blocks', 'layers', 'parallel')
        if is_layer or isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm)):
            module.register_forward_pre_hook(record)
    with torch.autocast('cpu', torch.bfloat16):
        model(x)
    assert {*streams} == {torch.float32}
