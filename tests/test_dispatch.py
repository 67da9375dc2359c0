"""How rows of experts are chosen, sorted and multiplied. (The rest: the oracles of the models.)"""

import math

import pytest
import torch

import moduleformer
import moep


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


@pytest.mark.parametrize('top_k', [1, 3, 4])
@pytest.mark.parametrize('module', [moep, moduleformer])
def test_no_choice_is_taken_twice(module, top_k):
    """Not even if scores underflow, tie or are nan."""
    router = module.Router(4, 4, module.Config(top_k=top_k))
    choice = router.choose(torch.tensor([[1e4, 0, 0, 0], [0.5] * 4, [math.nan] * 4]))
    assert all(len({*row}) == top_k for row in choice.tolist())


@pytest.mark.parametrize('N, E, K', [(1, 1, 1), (1, 4, 4), (9, 7, 3)])
def test_order_by_choice_is_a_stable_sort(N, E, K):
    torch.manual_seed(0)
    choice = torch.stack([torch.randperm(E)[:K] for _ in range(N)])
    pair, row, ends = moep.order_by_choice(choice, E)
    want = choice.flatten().argsort(stable=True)
    assert torch.equal(pair, want) and torch.equal(row, want.argsort())
    assert ends.dtype == torch.int32
    assert ends.tolist() == choice.flatten().bincount(minlength=E).cumsum(0).tolist()
