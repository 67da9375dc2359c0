"""
Triton kernels against plain forms in float64, outputs and gradients: plumbing/stick_kernels.py and
the blocks of queries it replaces (moduleformer.break_stick), plumbing/row_kernels.py and Rows. On a
GPU; and by Triton's interpreter, where there is Triton.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import moduleformer
import test_contract
from common import ROOT
from moduleformer import break_stick
from oracles import with_gradients

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
needs_triton = pytest.mark.skipif(not importlib.util.find_spec('triton'), reason='needs Triton')
# As shares of the largest number; float32 is multiplied as TF32.
BOUNDS = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
SHAPES = [(1, 1, 1, 1, 0, 16), (2, 3, 7, 2, 0, 8), (1, 2, 70, 3, 30, 24), (1, 1, 1, 2, 200, 64),
          (1, 2, 150, 1, 77, 64), (1, 1, 90, 1, 0, 128)]                     # B, H, T, K, past, d


def inputs(B, H, T, K, past, d, dtype, size=1.0, device='cpu'):
    """q, k, v as AttentionModules makes them: views of what linear layers return."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, T, K, H, d, generator=generator) * size
    kv = torch.randn(B, past + T, 2, H, d, generator=generator) * size
    k, v = kv.to(device, dtype).unbind(2)
    return [q.to(device, dtype).permute(0, 3, 1, 2, 4), k.transpose(1, 2), v.transpose(1, 2)]


def compare(tensors, function, bound):
    blocks = lambda q, k, v: break_stick(q, k, v, 64)
    want = with_gradients(blocks, [x.double() for x in tensors])
    for name, a, b in zip(('y', 'dq', 'dk', 'dv'), with_gradients(function, tensors), want):
        assert a.dtype == tensors[0].dtype and a.shape == b.shape, name
        error = ((a - b).abs().max() / (b.abs().max() + 1e-6)).item()
        assert error < bound, f'{name}: {error}'


def interpret():
    """What the process of the next test runs. Small tiles, as it is slow and several must meet."""
    from plumbing import stick_kernels as kernels
    number = lambda bound: bound if isinstance(bound, int) else bound.handle.data.item()
    kernels.range = lambda *bounds: range(*map(number, bounds))  # NumPy 2.4: no int() of an array
    kernels.TILES = {key: (16, (32, 1, 1), (16, 1, 1)) for key in kernels.TILES}
    for size, shape, dtype, bound in [                   # the interpreter has no bfloat16 products
            (1, (1, 1, 1, 1, 0, 16), torch.float32, 1e-4),
            (5, (2, 1, 7, 2, 0, 8), torch.float32, 1e-4),
            (1, (1, 1, 17, 3, 30, 24), torch.float16, 4e-3)]:
        compare(inputs(*shape, dtype, size), kernels.stick_breaking, bound)


@needs_triton
@pytest.mark.parametrize('function', ['interpret', 'interpret_rows'])
def test_interpreted(function):
    env = {**os.environ, 'TRITON_INTERPRET': '1', 'OMP_NUM_THREADS': '1',
           'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT / 'tests')])}
    code = f'import test_kernels; test_kernels.{function}()'
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- Rows of experts ----------------------------------------------------------------------------

def compare_rows(N, E, K, D, width, dtype, device, bound):
    """The kernels, and dense.py's plain experts in float64. A third of the gates is 0."""
    from plumbing import row_kernels, rows
    torch.manual_seed(0)
    choice = torch.rand(N, E).argsort(-1)[:, :K].clamp(max=E - 2).to(device)     # the last: no rows
    gate = torch.rand(N, K) * (torch.rand(N, K) > 1 / 3)
    fc, down = torch.randn(E, D, width) / D ** 0.5, torch.randn(E, width, D) / width ** 0.5
    inputs = [t.to(device, dtype).double() for t in (torch.randn(N, D), gate, fc, down)]

    def kernels(x, gate, fc, down):
        r = rows.Rows(gate, choice, E)
        return row_kernels.FeedForward.apply(x.float(), r.gate_NK, fc, down, r.token, r.pair,
                                             r.row_NK, r.ends_E, dtype)

    def plain(x, gate, fc, down):                        # every expert for every token
        gate = torch.where(gate == 0, 0, gate)           # a gate of 0 gets no gradient
        every = torch.einsum('nd,edf->nef', x, fc).relu().square()
        every = torch.einsum('nef,efd->ned', every, down)
        return (gate[:, :, None] * every[torch.arange(N, device=device)[:, None], choice]).sum(1)
    both = with_gradients(kernels, inputs), with_gradients(plain, inputs)
    for name, a, b in zip(('y', 'dx', 'd_gate', 'd_fc', 'd_down'), *both, strict=True):
        assert (a - b).norm() < bound * b.norm(), name


def interpret_rows():
    from plumbing import row_kernels as kernels
    number = lambda bound: bound if isinstance(bound, int) else bound.handle.data.item()
    kernels.range = lambda *bounds: range(*map(number, bounds))
    small = dict(TILE_R=16, TILE_F=32, TILE_D=32)
    for tiles in (kernels.PRODUCT, kernels.BACKWARD, kernels.GRADIENT):
        tiles.update(small)
    kernels.PART = 32                                    # several parts of a group must meet
    compare_rows(70, 4, 2, 32, 64, torch.float32, 'cpu', 1e-5)
    compare_rows(33, 6, 1, 64, 32, torch.float32, 'cpu', 1e-5)


@needs_gpu
@pytest.mark.parametrize('N, E, K, D, width', [(5000, 16, 2, 384, 384), (700, 5, 1, 64, 192),
                                               (33, 40, 3, 32, 96)])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_rows_of_experts(N, E, K, D, width, dtype):
    compare_rows(N, E, K, D, width, dtype, 'cuda', 1e-2)


# ---- What only a GPU can show --------------------------------------------------------------------


@needs_gpu
@needs_triton
@pytest.mark.parametrize('dtype', BOUNDS)
@pytest.mark.parametrize('shape', [*SHAPES, (2, 4, 512, 2, 512, 64), (1, 2, 3000, 1, 0, 64)])
def test_kernels_are_the_blocks(shape, dtype):
    from plumbing import stick_kernels as kernels
    torch.set_float32_matmul_precision('high')
    for size in (1.0, 3.0):
        tensors = inputs(*shape, dtype, size, 'cuda')
        assert kernels.can_fuse(*tensors)
        compare(tensors, kernels.stick_breaking, BOUNDS[dtype])


@needs_gpu
@needs_triton
def test_a_model_uses_them_under_autocast(monkeypatch):
    """Also with the memory of the last segment."""
    from plumbing import stick_kernels as kernels
    torch.manual_seed(0)
    model = test_contract.build('moduleformer', d_att=64).cuda()
    x = test_contract.text(model, 4, 40).cuda()
    calls = []
    monkeypatch.setattr(moduleformer, 'can_fuse', lambda *tensors: calls.append(
        kernels.can_fuse(*tensors)) or calls[-1])
    cache = []
    with torch.autocast('cuda', torch.bfloat16):
        model(x[:2], cache=cache)
        cache = [(k.detach(), v.detach()) for k, v in cache]
        model(x[2:], x[2:].flip(1), cache=cache)[1].backward()
    assert calls == [True] * 4
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
