"""
A Triton kernel for plumbing/rows.py: the gradient of the weights of grouped products.

For each group of rows it is x^T @ grad, a small matrix summed over thousands of rows. A program
computes one tile of one group's matrix. Where groups and tiles are too few for the GPU, the rows of
a group are cut into parts, whose sums are added up in float32. The result does not depend on the
order in which programs run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 200                           # an H100 or H200 has 132 multiprocessors


@triton.jit
def kernel(x, grad, sums, ends, parts, D: tl.constexpr, F: tl.constexpr,
           TILE_D: tl.constexpr, TILE_F: tl.constexpr, ROWS: tl.constexpr):
    """x (R, D), grad (R, F); sums (groups * parts, D, F); ends: where the rows of a group end."""
    group, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    end = tl.load(ends + group)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    first = start + (end - start) * part // parts
    last = start + (end - start) * (part + 1) // parts
    d = tl.program_id(0) // tl.cdiv(F, TILE_F) * TILE_D + tl.arange(0, TILE_D)
    f = tl.program_id(0) % tl.cdiv(F, TILE_F) * TILE_F + tl.arange(0, TILE_F)
    total = tl.zeros((TILE_D, TILE_F), tl.float32)
    for begin in range(first, last, ROWS):
        row = begin + tl.arange(0, ROWS)
        here = (row < last)[:, None]
        x_tile = tl.load(x + row[:, None] * D + d, mask=here & (d < D), other=0.0)
        grad_tile = tl.load(grad + row[:, None] * F + f, mask=here & (f < F), other=0.0)
        total = tl.dot(tl.trans(x_tile), grad_tile, total)
    place = tl.program_id(1).to(tl.int64) * D * F + d[:, None] * F + f
    tl.store(sums + place, total, mask=(d < D)[:, None] & (f < F))


@torch.library.custom_op('nanopaths::weight_gradient', mutates_args=())
def weight_gradient(x_RD: Tensor, grad_RF: Tensor, ends_E: Tensor) -> Tensor:
    """(E, D, F): the sum of x^T @ grad over the rows of each group, which are sorted by group."""
    E, D, F = len(ends_E), x_RD.size(1), grad_RF.size(1)
    tile_d, tile_f = (128 if width % 128 == 0 else 64 for width in (D, F))
    tiles = triton.cdiv(D, tile_d) * triton.cdiv(F, tile_f)
    parts = max(1, round(PROGRAMS / (tiles * E)))
    sums = x_RD.new_empty(E * parts, D, F, dtype=x_RD.dtype if parts == 1 else torch.float32)
    kernel[tiles, E * parts](
        x_RD.contiguous(), grad_RF.contiguous(), sums, ends_E.contiguous(), parts, D, F,
        TILE_D=tile_d, TILE_F=tile_f, ROWS=64, num_warps=8 if tile_d * tile_f > 8192 else 4,
        num_stages=3)
    return sums if parts == 1 else sums.unflatten(0, (E, parts)).sum(1).to(x_RD.dtype)


@weight_gradient.register_fake
def make_gradient(x_RD, grad_RF, ends_E):                # its shape, for torch.compile
    return x_RD.new_empty(len(ends_E), x_RD.size(1), grad_RF.size(1))
