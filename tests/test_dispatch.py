"""How rows of experts are chosen and multiplied. (The rest: the oracles of the models.)"""

import math

import pytest
import torch
import torch.nn.functional as F

import moduleformer
import moep


@pytest.mark.parametrize('E, ends', [
    (1, [50]), (3, [0, 1, 70]), (40, [min(2 * i, 61) for i in range(1, 41)]),    # too few rows
    (1, [4099]), (3, [0, 1, 9000]), (3, [9000] * 3), (5, [7, 7, 3300, 6400, 6401]),
    (40, [100 * i for i in range(1, 41)])])
def test_grouped_products(E, ends, monkeypatch):
    """By the kernel, in whose gradient long groups are cut; by a loop where widths or an older
    torch rule the kernel out. Also with fewer rows than parts, no rows, more groups than parts; a
    gradient of one number, expanded."""
    torch.manual_seed(0)
    ends = torch.tensor(ends, dtype=torch.int32)
    group = torch.searchsorted(ends, torch.arange(ends[-1]), right=True)
    for has_kernel, d_in, d_out in ((True, 8, 16), (True, 7, 16), (True, 8, 5), (False, 8, 16)):
        if not has_kernel:
            monkeypatch.delattr(F, 'grouped_mm')
        inputs = [torch.randn(len(group), d_in, requires_grad=True),
                  torch.randn(E, d_in, d_out, requires_grad=True)]
        x, w = [tensor.double() for tensor in inputs]
        products = (moep.grouped_mm(*inputs, ends), (x[:, None] @ w[group])[:, 0])
        for weight in (torch.randn(len(group), d_out), torch.ones(()).expand(len(group), d_out)):
            results = [[y, *torch.autograd.grad(y, inputs, weight.to(y), retain_graph=True)]
                       for y in products]
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize('top_k', [1, 3, 4])
@pytest.mark.parametrize('module', [moep, moduleformer])
def test_no_choice_is_taken_twice(module, top_k):
    """Not even if scores underflow, tie or are nan."""
    router = module.Router(4, 4, module.Config(top_k=top_k))
    choice = router.choose(torch.tensor([[1e4, 0, 0, 0], [0.5] * 4, [math.nan] * 4]))
    assert all(len({*row}) == top_k for row in choice.tolist())
