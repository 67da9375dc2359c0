"""What rows of experts pass through, against plain indexing."""

import math

import pytest
import torch

import moduleformer
import moep

BOTH = pytest.mark.parametrize('module', [moep, moduleformer])


@pytest.mark.parametrize('E, ends', [
    (1, [50]), (3, [0, 1, 70]), (40, [min(2 * i, 61) for i in range(1, 41)]),    # too few rows
    (1, [4099]), (3, [0, 1, 9000]), (3, [9000] * 3), (5, [7, 7, 3300, 6400, 6401]),
    (40, [100 * i for i in range(1, 41)])])
def test_weight_gradient_in_parts(E, ends):
    """Long groups are cut. Also with fewer rows than parts, no rows, more groups than parts; a
    gradient of one number, expanded."""
    torch.manual_seed(0)
    n_rows = ends[-1]
    ends = torch.tensor(ends, dtype=torch.int32)
    x, w = torch.randn(n_rows, 8), torch.randn(E, 8, 16)
    for weight in (torch.randn(n_rows, 16), torch.ones(()).expand(n_rows, 16)):
        results = []
        for dtype in (torch.float32, torch.float64):     # the kernel; the loop over the groups
            ins = [t.to(dtype, copy=True).requires_grad_() for t in (x, w)]
            y = moep.grouped_mm(*ins, ends)
            results.append([y, *torch.autograd.grad(y, ins, weight.to(dtype))])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)


def router_of(module, top_k):
    """A router of four choices whose scores are what it reads, if that is not negative."""
    if module is moep:
        router = moep.Router(4, 4, moep.MoEPConfig(top_k=top_k))
        weights = [router.linear.weight]
    else:
        config = moduleformer.ModuleFormerConfig(n_embd=4, d_router=4, top_k=top_k)
        router = moduleformer.Router(4, 4, config)
        weights = [router.A.weight, router.B.weight]
    for weight in weights:
        torch.nn.init.eye_(weight)
    return router


@BOTH
@pytest.mark.parametrize('top_k', [1, 3, 4])
def test_routers_take_the_best_and_none_twice(module, top_k):
    router = router_of(module, top_k)
    scores = 3 * torch.rand(50, 4, generator=torch.Generator().manual_seed(0))
    gate, choice, _ = router(scores)
    best, order = scores.softmax(-1).topk(top_k)
    if module is moep:
        best = best / best.sum(-1, keepdim=True)
    assert torch.equal(choice, order) and torch.allclose(gate, best)
    underflow, ties, nan = [1e4, 0, 0, 0], [0.5] * 4, [math.nan] * 4
    _, choice, _ = router(torch.tensor([underflow, ties, nan]))
    assert all(len(set(row)) == top_k for row in choice.tolist())


@pytest.mark.parametrize('N, E, K', [(1, 1, 1), (1, 4, 4), (9, 7, 3)])
def test_order_by_choice_is_a_stable_sort(N, E, K):
    torch.manual_seed(0)
    choice = torch.stack([torch.randperm(E)[:K] for _ in range(N)])
    pair, row, ends = moep.order_by_choice(choice, E)
    want = choice.flatten().argsort(stable=True)
    assert torch.equal(pair, want) and torch.equal(row, want.argsort())
    assert ends.dtype == torch.int32
    assert ends.tolist() == choice.flatten().bincount(minlength=E).cumsum(0).tolist()
