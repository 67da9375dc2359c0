"""
Triton kernels for plumbing/rows.py: the products of rows with the weights of their group.

Rows are sorted by group, and ends_E says where the rows of each group end; rows after the last end
belong to no group. A program computes one tile of a result. Each group starts a new tile, so a tile
has one weight matrix, and finds its group by itself (`find_rows`): the GPU never waits for the host
to read the sizes. Results do not depend on the order in which programs run.

The products also do what stands around them, which would otherwise read and write all rows again:
rows are gathered from tokens as they are loaded, and ReLU, its square and the gates are applied on
the way in or out.

Letters: R rows, D width of a row, F width of the result, E groups; a part is a run of rows.
"""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows, columns and summands of a tile, warps, stages of the load pipeline: speed, not results.
PRODUCT = dict(TILE_R=128, TILE_F=128, TILE_D=64, num_warps=8, num_stages=3)
BACKWARD = dict(PRODUCT, TILE_R=64, num_warps=4)         # more programs at once: more to load after
GRADIENT = dict(TILE_R=64, TILE_D=128, TILE_F=128, num_warps=8, num_stages=3)
PART = 1024                              # rows of a group whose gradient one program adds up


# ---- The kernels --------------------------------------------------------------------------------

@triton.jit
def find_rows(tile, ends, R, E: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """-> the group of a tile of TILE rows, its first row, and the end of the group. Group E: the
    rows of no group."""
    group = tl.arange(0, GROUPS)
    start, end, tiles = bounds(ends, R, E, GROUPS, TILE)
    after = tl.cumsum(tiles, 0)                          # tiles of this group and of those before
    mine = tl.sum((after <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(group == mine, start + (tile - after + tiles) * TILE, 0), 0)
    return mine, first, tl.sum(tl.where(group == mine, end, 0), 0)


@triton.jit
def bounds(ends, R, E: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Of all groups: the first row, the end, the number of tiles. GROUPS is a power of 2 over E."""
    group = tl.arange(0, GROUPS)
    end = tl.load(ends + group, mask=group < E, other=R)
    start = tl.load(ends + group - 1, mask=(group > 0) & (group <= E), other=0)
    start = tl.where(group <= E, start, R)
    return start, end, (end - start + TILE - 1) // TILE


@triton.jit
def product_kernel(x, index, w, out, kept, gate, d_gate, ends, R, w_d, w_f,
                   E: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
                   SQUARE: tl.constexpr, AFTER: tl.constexpr,
                   TILE_R: tl.constexpr, TILE_F: tl.constexpr, TILE_D: tl.constexpr):
    """out[r] = x[index[r]] @ w[group of r]. SQUARE: of x squared. AFTER: what is done to it."""
    column = tl.program_id(0) % (F // TILE_F)
    tile = tl.program_id(0) // (F // TILE_F)
    group, first, end = find_rows(tile, ends, R, E, GROUPS, TILE_R)
    row = first + tl.arange(0, TILE_R)
    exists = row < end
    d = tl.arange(0, TILE_D)
    f = column * TILE_F + tl.arange(0, TILE_F)
    y = tl.zeros((TILE_R, TILE_F), tl.float32)
    if group < E:
        place = row
        if index is not None:
            place = tl.load(index + row, mask=exists, other=0)
        x_at = x + place.to(tl.int64)[:, None] * D + d[None, :]
        w_at = w + group.to(tl.int64) * D * F + d[:, None] * w_d + f[None, :] * w_f
        for _ in range(0, D, TILE_D):
            x_tile = tl.load(x_at, mask=exists[:, None], other=0.0)
            if SQUARE:
                x_tile = x_tile * x_tile
            y = tl.dot(x_tile, tl.load(w_at), y)
            x_at += TILE_D
            w_at += TILE_D * w_d
    out_at = row.to(tl.int64)[:, None] * F + f[None, :]
    if AFTER == 'relu':
        y = tl.maximum(y, 0)
    if AFTER == 'relu_squared_gradient':                 # y is the gradient of relu ** 2, no gate
        relu = tl.load(kept + out_at, mask=exists[:, None], other=0.0).to(tl.float32)
        tl.store(d_gate + column * R + row, tl.sum(y * relu * relu, 1), mask=exists)
        y = y * 2 * relu * tl.load(gate + row, mask=exists, other=0.0)[:, None]
    tl.store(out + out_at, y.to(out.dtype.element_ty), mask=exists[:, None])


@triton.jit
def gradient_kernel(x, x_index, grad, grad_index, gate, sums, ends, R,
                    E: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
                    SQUARE: tl.constexpr, PART: tl.constexpr,
                    TILE_R: tl.constexpr, TILE_D: tl.constexpr, TILE_F: tl.constexpr):
    """sums[part] = x[part]^T @ grad[part], or of x squared times gate."""
    part = tl.program_id(1)
    group, first, end = find_rows(part, ends, R, E, GROUPS, PART)
    d = tl.program_id(0) // (F // TILE_F) * TILE_D + tl.arange(0, TILE_D)
    f = tl.program_id(0) % (F // TILE_F) * TILE_F + tl.arange(0, TILE_F)
    if group < E:
        end = tl.minimum(end, first + PART)
        total = tl.zeros((TILE_D, TILE_F), tl.float32)
        for begin in range(first, end, TILE_R):
            row = begin + tl.arange(0, TILE_R)
            exists = row < end
            x_row, grad_row = row, row
            if x_index is not None:
                x_row = tl.load(x_index + row, mask=exists, other=0)
            if grad_index is not None:
                grad_row = tl.load(grad_index + row, mask=exists, other=0)
            x_at = x_row.to(tl.int64)[:, None] * D + d[None, :]
            grad_at = grad_row.to(tl.int64)[:, None] * F + f[None, :]
            x_tile = tl.load(x + x_at, mask=exists[:, None], other=0.0)
            grad_tile = tl.load(grad + grad_at, mask=exists[:, None], other=0.0)
            if SQUARE:
                g = tl.load(gate + row, mask=exists, other=0.0)
                x_tile = (x_tile * x_tile * g[:, None]).to(grad_tile.dtype)
            total = tl.dot(tl.trans(x_tile), grad_tile, total)
        at = part.to(tl.int64) * D * F + d[:, None] * F + f[None, :]
        tl.store(sums + at, total)


@triton.jit
def add_parts_kernel(sums, out, ends, R, E: tl.constexpr, GROUPS: tl.constexpr,
                     SIZE: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr):
    """out[e] = the sum of the parts of group e."""
    e = tl.program_id(1)
    start, end, parts = bounds(ends, R, E, GROUPS, PART)
    group = tl.arange(0, GROUPS)
    first = tl.sum(tl.where(group < e, parts, 0), 0)     # the parts before its own
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = sums + first.to(tl.int64) * SIZE + i
    total = tl.zeros((TILE,), tl.float32)
    for _ in range(tl.sum(tl.where(group == e, parts, 0), 0)):
        total += tl.load(at)
        at += SIZE
    tl.store(out + e.to(tl.int64) * SIZE + i, total)


# ---- Calling them: torch operators, into which torch.compile does not look -----------------------

def launch_product(x, index, w, out, kept, gate, d_gate, ends, square, after, transposed):
    R, F = out.shape
    E, D = len(w), x.size(1)
    tiles = BACKWARD if gate is not None else PRODUCT
    tiles = dict(tiles, TILE_F=tile_of(F, tiles['TILE_F']), TILE_D=tile_of(D, tiles['TILE_D']))
    grid = (triton.cdiv(R, tiles['TILE_R']) + E + 1) * (F // tiles['TILE_F'])
    w_d, w_f = (1, D) if transposed else (F, 1)
    with torch.cuda.device_of(x):
        product_kernel[grid,](x, index, w, out, kept, gate, d_gate, ends, R, w_d, w_f, E,
                              triton.next_power_of_2(E + 1), D, F, square, after, **tiles)


def tile_of(width, most):
    return min(most, 128 if width % 128 == 0 else 64 if width % 64 == 0 else 32)


@torch.library.custom_op('nanopaths::product', mutates_args=())
def product(x: Tensor, w: Tensor, ends: Tensor, index: Optional[Tensor], square: bool, relu: bool,
            transposed: bool) -> Tensor:
    """(R, F): x[index] @ w[group], or of x squared; w (E, D, F), or (E, F, D) if transposed."""
    out = make_product(x, w, ends, index, square, relu, transposed)
    launch_product(x.contiguous(), index, w.contiguous(), out, None, None, None, ends, square,
                   'relu' if relu else None, transposed)
    return out


@product.register_fake
def make_product(x, w, ends, index, square, relu, transposed):
    return x.new_empty(len(x if index is None else index), w.size(1 if transposed else 2))


@torch.library.custom_op('nanopaths::relu_squared_gradient', mutates_args=())
def relu_squared_gradient(dy: Tensor, w: Tensor, ends: Tensor, index: Tensor, relu: Tensor,
                          gate: Tensor) -> tuple[Tensor, Tensor]:
    """Of out = gate * (relu ** 2 @ w): the gradients of what ReLU got, (R, F), and of the gates.
    dy is a row per token."""
    d_in, parts = make_relu_squared_gradient(dy, w, ends, index, relu, gate)
    launch_product(dy.contiguous(), index, w.contiguous(), d_in, relu, gate, parts, ends, False,
                   'relu_squared_gradient', True)
    return d_in, parts


@relu_squared_gradient.register_fake
def make_relu_squared_gradient(dy, w, ends, index, relu, gate):
    columns = relu.size(1) // tile_of(relu.size(1), BACKWARD['TILE_F'])
    return torch.empty_like(relu), relu.new_empty(columns, len(relu), dtype=torch.float32)


@torch.library.custom_op('nanopaths::weight_gradient', mutates_args=())
def weight_gradient(x: Tensor, grad: Tensor, ends: Tensor, x_index: Optional[Tensor],
                    grad_index: Optional[Tensor], gate: Optional[Tensor]) -> Tensor:
    """(E, D, F), float32: the sum of x^T @ grad over the rows of each group. With gates: of gate *
    x ** 2."""
    E, D, F = len(ends), x.size(1), grad.size(1)
    R = len(next(t for t in (gate, x_index, grad_index, x) if t is not None))
    shape = dict(E=E, GROUPS=triton.next_power_of_2(E + 1))
    tiles = dict(GRADIENT, TILE_D=tile_of(D, GRADIENT['TILE_D']),
                 TILE_F=tile_of(F, GRADIENT['TILE_F']))
    parts = triton.cdiv(R, PART) + E
    sums = x.new_empty(parts, D, F, dtype=torch.float32)
    out = make_weight_gradient(x, grad, ends, x_index, grad_index, gate)
    with torch.cuda.device_of(x):
        gradient_kernel[D // tiles['TILE_D'] * (F // tiles['TILE_F']), parts](
            x.contiguous(), x_index, grad.contiguous(), grad_index, gate, sums, ends, R, D=D, F=F,
            SQUARE=gate is not None, PART=PART, **shape, **tiles)
        add_parts_kernel[D * F // 1024, E](sums, out, ends, R, SIZE=D * F, PART=PART, TILE=1024,
                                           **shape)
    return out


@weight_gradient.register_fake
def make_weight_gradient(x, grad, ends, x_index, grad_index, gate):
    return x.new_empty(len(ends), x.size(1), grad.size(1), dtype=torch.float32)


# ---- What plumbing/rows.py calls -----------------------------------------------------------------

class FeedForward(torch.autograd.Function):
    """A token's gated sum of its experts relu(x @ fc) ** 2 @ down. Row r is read from token[r], and
    belongs to choice pair[r] of all N*K; row_NK says which row a choice has.

    Forward keeps relu(x @ fc) alone, since backward can square it again. The gradient of a gate is
    dy . (h @ down) = (dy @ down^T) . h, so the outputs of the experts need not be kept."""
    @staticmethod
    def forward(ctx, x_ND, gate_NK, fc, down, token, pair, row_NK, ends, dtype):
        x_ND, fc, down = x_ND.to(dtype), fc.to(dtype), down.to(dtype)
        # After `ends`: from which rows of x, whether to square them, ReLU, a transposed w
        relu = product(x_ND, fc, ends, token, False, True, False)
        y_RD = product(relu, down, ends, None, True, False, False)
        ctx.save_for_backward(x_ND, gate_NK, fc, down, token, pair, row_NK, ends, relu)
        return (gate_NK[:, :, None] * y_RD[row_NK]).sum(1)

    @staticmethod
    def backward(ctx, dy_ND):
        x_ND, gate_NK, fc, down, token, pair, row_NK, ends, relu = ctx.saved_tensors
        dy_ND = dy_ND.to(x_ND.dtype)
        gate_R = gate_NK.flatten()[pair].float()
        d_in, d_gate = relu_squared_gradient(dy_ND, down, ends, token, relu, gate_R)
        d_down = weight_gradient(relu, dy_ND, ends, None, token, gate_R)
        d_fc = weight_gradient(x_ND, d_in, ends, token, None, None)
        dx_RD = product(d_in, fc, ends, None, False, False, True)
        dx_ND = dx_RD[row_NK].sum(1, dtype=torch.float32)
        d_gate_NK = d_gate.sum(0)[row_NK].type_as(gate_NK)
        return dx_ND, d_gate_NK, d_fc, d_down, *[None] * 5
