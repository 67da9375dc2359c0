"""Compiling layer by layer: the same losses and gradients, each kind of layer once."""

import types

import pytest
import sympy
import torch

import moduleformer
import moep
import papaformer
import selfmoe
import stlm
import stlm_depth
import strong
from plumbing import compiled

TINY = dict(vocab_size=50, block_size=16, n_head=2, n_embd=16)
MODELS = dict(
    gpt2=(moep, dict(n_layer=2, n_parallel=0)),
    moep=(moep, dict(n_layer=2, n_embd_parallel=16, n_head_parallel=1, n_parallel=2)),
    papaformer=(papaformer, dict(n_layer=2, n_parallel=2, path_embd=[8, 8], path_head=[1, 1],
                                 connection='gumbel2')),
    moduleformer=(moduleformer, dict(n_layer=2, n_att=4, d_att=16, n_ffd=4, d_ffd=16, d_router=8)),
    selfmoe=(selfmoe, dict(n_layer=2, n_kv_head=1)),
    stlm=(stlm, dict(n_layer=2, n_kv_head=1, ffn_hidden=16, share='all', lora_rank=2)),
    stlm_depth=(stlm_depth, dict(n_layer=4, n_kv_head=1, ffn_hidden=16, capacity=0.25)),
    strong=(strong, dict(n_layer=2, n_expert=4, top_k=2)))


@pytest.fixture
def compilations(monkeypatch):
    """torch.compile without code generation -> the graphs it was given."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    torch._dynamo.reset()
    plain = torch.compile
    light = lambda fn, dynamic, options: plain(fn, backend=backend, dynamic=dynamic)
    monkeypatch.setattr(torch, 'compile', light)
    return graphs


@pytest.mark.parametrize('name', MODELS)
def test_twin_is_model(name, compilations):
    """The twin shares every weight and computes what the model does. The model itself is not compiled."""
    module, keys = MODELS[name]
    torch.manual_seed(0)
    keys = dict(TINY, **keys)
    if 'dropout' in module.Config.__dataclass_fields__:
        keys['dropout'] = 0.0
    model = module.Model(module.Config(**keys)).eval()   # as an evaluation leaves it for a moment
    twin = compiled.compile_model(model)
    assert all(part.training for part in twin.modules())
    model.train()
    for kind in ('parameters', 'buffers'):               # such as a rate of dropout, or a router's load
        assert {*map(id, getattr(twin, kind)())} == {*map(id, getattr(model, kind)())}
    ids = torch.randint(50, (2, 16))
    found = []
    for m in (model, twin):
        torch.manual_seed(1)                             # of Gumbel noise
        model.zero_grad()
        _, loss, aux = m(ids, ids)
        before = len(compilations)
        (loss + sum(aux.values())).backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 1
    for plain, of_twin in zip(*found):
        torch.testing.assert_close(of_twin, plain)
    assert before > 0
    model(ids, ids)
    assert len(compilations) == before                   # nothing new: the model runs as it is


class LoudRouter(moep.Router):
    """It keeps a tensor with its graph, which the model reads."""
    def forward(self, x_ND):
        gate_NK, choice_NK, losses = super().forward(x_ND)
        self.loud = gate_NK.square().mean()
        return gate_NK, choice_NK, losses


class Loud(moep.MoEP):
    router = LoudRouter

    def features(self, idx, cache=None):
        x, aux = super().features(idx, cache)
        routers = [part for part in self.modules() if isinstance(part, LoudRouter)]
        return x, aux | dict(loud=sum(router.loud for router in routers))


def test_a_loss_that_a_router_keeps(compilations):
    """The check before training leaves one in the model, with its graph. Copies cannot hold that."""
    torch.manual_seed(0)
    model = Loud(moep.Config(**dict(TINY, **MODELS['moep'][1], dropout=0.0))).train()
    ids = torch.randint(50, (2, 16))
    found = []
    for make in (lambda: model, lambda: compiled.compile_model(model)):
        model.zero_grad()
        loss = make()(ids, ids)[2]['loud']
        loss.backward()
        found.append([loss.detach(), *(part.linear.weight.grad.clone() for part in model.modules()
                                       if isinstance(part, LoudRouter))])
    assert len(found[0]) == 5 and found[0][-1].any() and compilations
    for plain, of_twin in zip(*found, strict=True):
        torch.testing.assert_close(of_twin, plain)


@pytest.mark.parametrize('name', ['gpt2', 'moduleformer', 'selfmoe', 'strong'])
def test_each_kind_once(name, compilations):
    """Twice as many layers are not one graph more."""
    module, keys = MODELS[name]
    counts = []
    for n_layer in (3, 6):
        torch._dynamo.reset()
        compilations.clear()
        model = module.Model(module.Config(**dict(TINY, **dict(keys, n_layer=n_layer)))).train()
        ids = torch.randint(50, (2, 16))
        with torch.autocast('cpu', torch.bfloat16):      # in float32 grouped products are a loop
            compiled.compile_model(model)(ids, ids)
        counts.append(len(compilations))
    assert counts[0] == counts[1] > 1                    # a layer, and what follows the last one


@pytest.mark.parametrize('vocab_size, off', [(48, True), (50, False)])
def test_a_vocabulary_of_odd_size_is_padded(vocab_size, off, monkeypatch):
    """Half of the speed of GPT-2 with its 50,257 tokens hangs on it."""
    given = []
    monkeypatch.setattr(torch, 'compile', lambda fn, dynamic, options: given.append(options) or fn)
    keys = dict(TINY, vocab_size=vocab_size, n_layer=1, n_parallel=0)
    compiled.compile_model(moep.Model(moep.Config(**keys)))
    assert [options.get('shape_padding') is False for options in given] == [off] * 2


def test_a_block_that_is_called_with_a_keyword(compilations):
    model = moep.Model(moep.Config(**dict(TINY, **MODELS['gpt2'][1], dropout=0.0)))
    twin = compiled.compile_model(model)._orig_mod       # compiled blocks in a plain model
    x = torch.randn(2, 16, 16)
    torch.testing.assert_close(twin.first[0](x, cache=None), model.first[0](x, cache=None))
    assert compilations


@pytest.mark.parametrize('length, hint, is_whole', [
    (64, 'DEFAULT', True), (256, 'DEFAULT', True), (1024, 'DEFAULT', True), (1025, 'DEFAULT', False),
    (1024, 'INNER', True), (256, 'OUTER', False)])
def test_short_rows_are_reduced_whole(length, hint, is_whole):
    """Torch alone reads rows of 256 numbers in parts if they are gathered: a race (whole_rows says which)."""
    from torch._inductor.choices import ReductionHint, V
    features = types.SimpleNamespace(reduction_numel=sympy.Integer(length),
                                     get_reduction_hint=lambda: ReductionHint[hint])
    sizes = types.SimpleNamespace(statically_known_leq=lambda a, b: a <= b)
    with V.set_graph_handler(types.SimpleNamespace(sizevars=sizes)):
        assert bool(compiled.whole_rows().should_use_persistent_reduction(features, False)) == is_whole


def test_torch_takes_the_choice_of_whole_rows(monkeypatch):
    taken = []
    monkeypatch.setattr(torch, 'compile', lambda fn, dynamic, options: taken.append(options) or fn)
    compiled.compile_model(strong.Strong(strong.StrongConfig(**TINY, n_layer=1)))
    assert all(options['inductor_choices_class'] is compiled.whole_rows for options in taken) and taken
    torch._inductor.config.patch(taken[0])               # an unknown option raises
