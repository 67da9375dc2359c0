"""The parts that rows of experts pass through, in every file that has them, against plain indexing."""

import math

import pytest
import torch

import moduleformer
import moep
import selfmoe


@pytest.mark.parametrize('module', [moep, moduleformer, selfmoe])
@pytest.mark.parametrize('E, ends', [
    (1, [50]), (3, [0, 1, 70]), (40, [min(2 * i, 61) for i in range(1, 41)]),                    # too few rows for parts
    (1, [4099]), (3, [0, 1, 9000]), (3, [9000] * 3), (5, [7, 7, 3300, 6400, 6401]), (40, [100 * i for i in range(1, 41)])])
def test_weight_gradient_in_parts(module, E, ends):
    """Long groups are cut; fewer rows than parts, no rows, more groups than parts; a gradient that is one number, expanded."""
    torch.manual_seed(0)
    ends = torch.tensor(ends, dtype=torch.int32)
    x, w = torch.randn(int(ends[-1]), 8), torch.randn(E, 8, 16)
    for weight in (torch.randn(int(ends[-1]), 16), torch.ones(()).expand(int(ends[-1]), 16)):
        found = []
        for dtype in (torch.float32, torch.float64):     # the kernel; the loop over the groups
            ins = [t.to(dtype).requires_grad_() for t in (x, w)]
            found.append(torch.autograd.grad(module.grouped_mm(*ins, ends), ins, weight.to(dtype)))
        for a, b in zip(*found):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize('module', [moep, moduleformer])
def test_top_k_is_topk_and_never_chooses_twice(module):
    prob = torch.rand(50, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for k in (1, 3, 5):
        for a, b in zip(module.largest_k(prob, k), prob.topk(k)):
            assert torch.equal(a, b)
    scores = torch.randn(50, 5, generator=torch.Generator().manual_seed(1)) - 2    # a router of one's own may have negative ones
    for a, b in zip(module.largest_k(scores, 3), scores.topk(3)):
        assert torch.equal(a, b)
    for odd in (torch.tensor([[1.0, 0, 0, 0]]), torch.full((1, 4), 0.25), torch.full((1, 4), math.nan),    # underflow, ties, nan
                torch.tensor([[-math.inf, 1.0, -math.inf, -math.inf]])):
        assert module.largest_k(odd, 4)[1].sort().values.tolist() == [[0, 1, 2, 3]]
    leaf = prob.clone().requires_grad_()
    module.largest_k(leaf, 2)[0].sum().backward()
    assert torch.equal(leaf.grad != 0, torch.zeros_like(prob, dtype=torch.bool).scatter(1, prob.topk(2).indices, True))


@pytest.mark.parametrize('module', [moep, moduleformer])
@pytest.mark.parametrize('N, E, K', [(1, 1, 1), (1, 4, 4), (9, 7, 3)])
def test_order_by_choice_is_a_stable_sort(module, N, E, K):
    torch.manual_seed(0)
    choice = torch.stack([torch.randperm(E)[:K] for _ in range(N)])
    pair, row, ends = module.order_by_choice(choice, E)
    want = choice.flatten().argsort(stable=True)
    assert torch.equal(pair, want) and torch.equal(row, want.argsort()) and ends.dtype == torch.int32
    assert ends.tolist() == choice.flatten().bincount(minlength=E).cumsum(0).tolist()


def same_gradient(ours, plain, *inputs):
    """Value and gradients of both, in float64."""
    found = []
    for f in (ours, plain):
        ins = [t.clone().requires_grad_() for t in inputs]
        y = f(*ins)
        found.append([y, *torch.autograd.grad((y * torch.arange(y.numel()).view_as(y).sin()).sum(), ins)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_and_dispatch_are_plain_indexing():
    torch.manual_seed(0)
    N, E, K, D = 9, 11, 3, 4                             # more choices than eight: a bias gradient of two eights
    choice = torch.stack([torch.randperm(E - 1)[:K] for _ in range(N)])         # nobody takes the last
    gate, order = torch.rand(N, K).double(), choice.flatten().argsort(stable=True)
    rows, dispatch = moep.Rows(choice, E), moduleformer.Dispatch(choice, E)
    x, x_NED, y = torch.randn(N, D).double(), torch.randn(N, E, D).double(), torch.randn(N * K, D).double()
    for r in (rows, dispatch):
        same_gradient(r.spread, lambda x: x[order // K], x)
        same_gradient(lambda y: r.combine(y, gate), lambda y: (gate[:, :, None] * y[order.argsort()].view(N, K, D)).sum(1), y)
    same_gradient(dispatch.sort, lambda x: x.flatten(0, 1)[order], x_NED[:, :K])
    same_gradient(dispatch.restore, lambda y: y[order.argsort()].view(N, K, D), y)
    same_gradient(rows.pick, lambda x: x[order // K, choice.flatten()[order]], x_NED)
    same_gradient(lambda b: moep.GroupBias.apply(b, rows.choice), lambda b: b[choice.flatten()[order]], torch.randn(E, D).double())


def test_dropout_on_both_branches_of_a_parallel_layer():
    """Everything that a block adds is dropped out: at a rate of nearly 1 the layer is the identity for almost every number."""
    torch.manual_seed(0)
    layer = moep.ParallelLayer(moep.MoEPConfig(n_embd_parallel=16, n_head_parallel=1, top_k=1, dropout=0.99), 0).train()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x = torch.randn(2, 50, 16)
    assert 0 < (layer(x)[0] != x).float().mean() < 0.05
