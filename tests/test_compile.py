"""Compiling layer by layer: the same losses and gradients, each kind of layer once. Without code
generation; test_gpu.py runs the compiled kernels."""

import types

import pytest
import sympy
import torch

from plumbing.compile import compile_model, full_rows, recompute_blocks
from test_contract import build

MODELS = ['gpt2', 'moep', 'gumbel2', 'moduleformer', 'selfmoe', 'stlm_all', 'stlm_depth',
          'dense_routed']


@pytest.fixture
def graphs(monkeypatch):
    """torch.compile without code generation -> the graphs it was given."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    torch._dynamo.reset()
    compile = torch.compile
    monkeypatch.setattr(torch, 'compile',
                        lambda fn, dynamic, options: compile(fn, backend=backend, dynamic=dynamic))
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize('name, recomputed', [
    *((name, False) for name in MODELS), ('moep', True), ('moduleformer', True),
    ('stlm_all', True)])
def test_the_twin_is_the_model(name, recomputed, graphs):
    """It shares every weight and computes what the model does. The model stays uncompiled."""
    torch.manual_seed(0)
    model = build(name).eval()                            # as an evaluation leaves it for a moment
    model.note = next(model.parameters()).sum()          # a router may keep a tensor with its graph
    if recomputed:
        recompute_blocks(model)
    twin = compile_model(model, recomputed=recomputed)
    assert all(part.training for part in twin.modules())
    model.train()
    for kind in ('parameters', 'buffers'):
        assert {*map(id, getattr(twin, kind)())} == {*map(id, getattr(model, kind)())}
    ids = torch.randint(37, (2, 12))
    results = []
    for call in (model, twin):
        model.zero_grad()
        torch.manual_seed(1)
        _, loss, aux = call(ids, ids.flip(1))
        (loss + sum(aux.values())).backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([loss, *aux.values(), *grads])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours)
    before = len(graphs)
    model(ids, ids)
    assert len(graphs) == before > 0


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gpt2', 'moduleformer', 'selfmoe', 'dense_routed'])
def test_each_kind_of_layer_once(name, graphs):
    """Twice as many layers are not one graph more."""
    counts = []
    for n_layer in (3, 6):
        torch._dynamo.reset()
        graphs.clear()
        ids = torch.randint(37, (2, 12))
        with torch.autocast('cpu', torch.bfloat16):      # in float32 grouped products are a loop
            compile_model(build(name, n_layer=n_layer))(ids, ids)
        counts.append(len(graphs))
    assert counts[0] == counts[1] > 1                    # a layer, and what follows the last one


@pytest.mark.parametrize('length, hint, is_full', [
    (64, 'DEFAULT', True), (1024, 'DEFAULT', True), (1025, 'DEFAULT', False), (1024, 'INNER', True),
    (256, 'OUTER', False)])
def test_short_rows_are_reduced_in_full(length, hint, is_full):
    """Torch alone reads gathered rows of 256 numbers in parts: a race (see full_rows)."""
    from torch._inductor.choices import ReductionHint, V
    features = types.SimpleNamespace(
        reduction_numel=sympy.Integer(length), get_reduction_hint=lambda: ReductionHint[hint],
        strict_reduction_rblock=lambda: None)            # torch 2.15 asks for it
    sizes = types.SimpleNamespace(statically_known_leq=lambda a, b: a <= b)
    with V.set_graph_handler(types.SimpleNamespace(sizevars=sizes)):
        assert bool(full_rows().should_use_persistent_reduction(features, False)) == is_full
