"""
Stick-breaking attention in Triton: one GPU kernel forward, one backward. Optional: moduleformer.py
uses it if it can import it and `can_fuse` allows it, else its own `stick_attend` in torch.
`stick_breaking(q, k, v)` is `moduleformer.stick_weights(q, k, S - T)[1] @ v`.

The idea is FlashAttention's. The weights of all queries and keys are many times larger than q, k
and v, so they are never written to memory. A program (a GPU runs many at once) holds a tile of
queries and walks over the keys, one tile at a time. It computes the weights of these queries and
keys, uses them and discards them; backward computes them again. A softmax would have to track the
largest logit. A stick needs only what the later keys have left of it, one number for each query:

    forward, from the newest key to the oldest:       p_i = sigmoid(z_i) * rest_i
                                                      rest_{i-1} = rest_i * (1 - sigmoid(z_i))

z_i is the logit of key i, p_i its weight, rest_i what keys i+1, ..., t leave to it (t is the
query's position). Everything is in base-2 logarithms, which GPUs compute natively. Within a tile,
the sum over later keys is a matrix product with a triangle of ones, on otherwise idle tensor cores.

Backward. Let y be the output and g_i = p_i * dL/dp_i, where dL/dp_i = dL/dy . v_i. As log p_i = log
sigmoid(z_i) + sum_{i<j<=t} log(1 - sigmoid(z_j)), a logit z_j acts on p_j, and on p_i of every
older key i < j:

    d log p_j / dz_j = 1 - sigmoid(z_j)        d log p_i / dz_j = -sigmoid(z_j)
    dL/dz_j = g_j * (1 - sigmoid(z_j)) - sigmoid(z_j) * sum_{i<j} g_i

The sum runs over older keys, so backward walks from the oldest key to the newest and carries the
sum along. (In the other direction it would subtract the g already seen from dL/dy . y: a small
difference of large numbers, in bfloat16.)

Backward also needs rest_i. Forward keeps `rest` as it is at the end of its walk, and backward
undoes the steps: log rest_i = log rest_{i-1} - log(1 - sigmoid(z_i)). Over thousands of keys this
would become a small difference of large numbers, too. But once rest < 2^-150, all older weights are
0 in float32, and the query is dead: its rest stays fixed, and `oldest` is the tile of keys in which
it died (0 if it never did). Once all queries of a program are dead, both walks skip the older keys.

Finally, as z = q . k / sqrt(D): dL/dq = dL/dz k / sqrt(D), dL/dk = dL/dz^T q / sqrt(D), and
dL/dv = p^T dL/dy. Programs of different queries add to the same dL/dk and dL/dv, in float32 and in
any order, so two runs can differ in the last bits.

Letters: B batch, T tokens, K queries for each of them, M = T*K rows of queries, S keys (the last T
are the tokens' own, so the first token stands at `first` = S - T), H heads, D width of a head. q is
(B, T, K, H, D), k and v (B, S, H, D), as linear layers make them. k_b, k_s, k_h are k's strides.

What to look at first: `logs_of_stick`, `forward_kernel`, `backward_kernel`. The rest calls them.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

DEAD = tl.constexpr(-150.0)              # log2 of a rest that is 0 in float32
RUN = tl.constexpr(8)                    # tiles of keys between two checks for dead queries

# {(bits of a number, width of a head): (keys of a tile, forward, backward)}, the last two each as
# (queries of a tile, warps, stages of the load pipeline). They change the speed, not the results.
TILES = {(16, 64): (32, (64, 4, 3), (64, 4, 3)),
         (16, 128): (64, (128, 8, 2), (64, 8, 2)),
         (32, 64): (32, (64, 4, 1), (64, 4, 1)),
         (32, 128): (32, (64, 4, 1), (32, 4, 1))}


# ---- The kernels ---------------------------------------------------------------------------------

@triton.jit
def place(rows, stride, n, D: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of a tile of rows, and which of them exist: WIDTH, a power of 2, may exceed D."""
    columns = tl.arange(0, WIDTH)
    return rows[:, None] * stride + columns[None, :], (rows < n)[:, None] & (columns < D)[None, :]


@triton.jit
def logs_of_stick(q, k, keys, position, scale):
    """log_match = log2 sigmoid(z), log_pass = log2 (1 - sigmoid(z)). A later key: -inf, 0."""
    z = tl.dot(q, tl.trans(k)) * scale                   # base 2: scale = log2(e) / sqrt(D)
    z = tl.where(keys[None, :] <= position[:, None], z, -float('inf'))
    small = tl.log2(1 + tl.exp2(-tl.abs(z)))                             # never overflows
    return tl.minimum(z, 0) - small, -tl.maximum(z, 0) - small


@triton.jit
def sum_later(log_pass, later):
    """For each key, the sum over the later keys of its tile. float16 is more exact here than
    bfloat16; the clamp keeps it finite. A key's own term, large where z is large, is not in the
    sum, so not rounded."""
    return tl.dot(tl.maximum(log_pass, -60000).to(later.dtype), later)


@triton.jit
def count_tiles(block, first, M, K: tl.constexpr, TILE_M: tl.constexpr, TILE_S: tl.constexpr):
    """How many tiles of keys the last row of a tile of queries sees."""
    last = tl.minimum((block + 1) * TILE_M, M) - 1
    return tl.cdiv(first + last // K + 1, TILE_S)


@triton.jit(do_not_specialize=['M', 'S', 'first'])
def forward_kernel(q_ptr, k_ptr, v_ptr, y_ptr, rest_ptr, oldest_ptr, M, S, first, scale,
                   k_b, k_s, k_h, v_b, v_s, v_h,
                   H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
                   TILE_M: tl.constexpr, TILE_S: tl.constexpr, SUMS: tl.constexpr):
    b = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    block = tl.num_programs(1) - 1 - tl.program_id(1)    # those that see most keys start first
    rows = block * TILE_M + tl.arange(0, TILE_M)
    position = first + rows // K
    at, exists = place(rows, H * D, M, D, WIDTH)
    at += (b * M * H + h) * D
    q = tl.load(q_ptr + at, mask=exists, other=0.0)
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    key = tl.arange(0, TILE_S)
    later = (key[:, None] > key[None, :]).to(SUMS)       # [j, i]: 1 if key j comes after key i
    y = tl.zeros([TILE_M, WIDTH], tl.float32)
    rest = tl.zeros([TILE_M], tl.float32)                # log2 of what is left: a whole stick
    oldest = tl.zeros([TILE_M], tl.int32)
    end = count_tiles(block, first, M, K, TILE_M, TILE_S)
    while (end > 0) & (tl.max(rest, 0) > DEAD):
        run = tl.minimum(end, RUN)
        for back in range(run):                          # a plain loop, in which Triton loads ahead
            tile = end - 1 - back
            keys = tile * TILE_S + key
            k_at, k_exists = place(keys, k_s, S, D, WIDTH)
            v_at, v_exists = place(keys, v_s, S, D, WIDTH)
            k = tl.load(k_ptr + k_at, mask=k_exists, other=0.0)
            v = tl.load(v_ptr + v_at, mask=v_exists, other=0.0)
            log_match, log_pass = logs_of_stick(q, k, keys, position, scale)
            p = tl.exp2(log_match + sum_later(log_pass, later) + rest[:, None])
            y = tl.dot(p.to(v.dtype), v, y)
            lives = rest > DEAD
            oldest = tl.where(lives, tile, oldest)
            rest += tl.where(lives, tl.sum(log_pass, 1), 0.0)
        end -= run
    tl.store(y_ptr + at, y.to(q.dtype), mask=exists)
    row_at = tl.program_id(0).to(tl.int64) * M + rows
    tl.store(rest_ptr + row_at, rest, mask=rows < M)
    tl.store(oldest_ptr + row_at, oldest, mask=rows < M)


@triton.jit(do_not_specialize=['M', 'S', 'first'])
def backward_kernel(q_ptr, k_ptr, v_ptr, rest_ptr, oldest_ptr, dy_ptr, dq_ptr, dk_ptr, dv_ptr,
                    M, S, first, scale, dz_scale, k_b, k_s, k_h, v_b, v_s, v_h,
                    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
                    TILE_M: tl.constexpr, TILE_S: tl.constexpr, SUMS: tl.constexpr):
    b = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    rows = block * TILE_M + tl.arange(0, TILE_M)
    position = first + rows // K
    at, exists = place(rows, H * D, M, D, WIDTH)
    at += (b * M * H + h) * D
    q = tl.load(q_ptr + at, mask=exists, other=0.0)
    dy = tl.load(dy_ptr + at, mask=exists, other=0.0)
    row_at = tl.program_id(0).to(tl.int64) * M + rows
    rest = tl.load(rest_ptr + row_at, mask=rows < M, other=0.0)
    oldest = tl.load(oldest_ptr + row_at, mask=rows < M, other=2**30)    # no row: no tile
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    dk_ptr += (b * S * H + h) * D
    dv_ptr += (b * S * H + h) * D
    key = tl.arange(0, TILE_S)
    later = (key[:, None] > key[None, :]).to(SUMS)       # [j, i]: 1 if key j comes after key i
    older = (key[:, None] < key[None, :]).to(q.dtype)    # [i, j]: 1 if key i comes before key j
    dq = tl.zeros([TILE_M, WIDTH], tl.float32)
    g_sum = tl.zeros([TILE_M], tl.float32)               # sum of g over all older tiles
    for tile in range(tl.min(oldest, 0), count_tiles(block, first, M, K, TILE_M, TILE_S)):
        keys = tile * TILE_S + key
        k_at, k_exists = place(keys, k_s, S, D, WIDTH)
        v_at, v_exists = place(keys, v_s, S, D, WIDTH)
        k = tl.load(k_ptr + k_at, mask=k_exists, other=0.0)
        v = tl.load(v_ptr + v_at, mask=v_exists, other=0.0)
        log_match, log_pass = logs_of_stick(q, k, keys, position, scale)
        rest -= tl.where(tile >= oldest, tl.sum(log_pass, 1), 0.0)  # as in forward before this tile
        p = tl.exp2(log_match + sum_later(log_pass, later) + rest[:, None])
        g = p * tl.dot(dy, tl.trans(v))
        g_older = tl.dot(g.to(q.dtype), older) + g_sum[:, None]
        g_sum += tl.sum(g, 1)
        dz = ((g - tl.exp2(log_match) * (g + g_older)) * dz_scale).to(q.dtype)
        dq = tl.dot(dz, k, dq)
        dk = tl.dot(tl.trans(dz), q)
        dv = tl.dot(tl.trans(p.to(q.dtype)), dy)
        d_at, _ = place(keys, H * D, S, D, WIDTH)
        tl.atomic_add(dk_ptr + d_at, dk, mask=k_exists, sem='relaxed')
        tl.atomic_add(dv_ptr + d_at, dv, mask=v_exists, sem='relaxed')
    tl.store(dq_ptr + at, dq.to(q.dtype), mask=exists)


# ---- Calling them: torch operators, into which torch.compile does not look -----------------------

def launch(kernel, tensors, scales, q, k, v):
    B, T, K, H, D = q.shape
    S = k.size(1)
    bits = 8 * q.element_size()
    TILE_S, *both = TILES[bits, 64 if D <= 64 else 128]
    TILE_M, warps, stages = both[kernel is backward_kernel]
    sums = tl.float16 if bits == 16 else tl.float32
    grid = (B * H, triton.cdiv(T * K, TILE_M))
    with torch.cuda.device_of(q):                        # Triton takes the current GPU
        kernel[grid](*tensors, T * K, S, S - T, *scales, *k.stride()[:3], *v.stride()[:3],
                     H=H, K=K, D=D, WIDTH=max(16, triton.next_power_of_2(D)),
                     TILE_M=TILE_M, TILE_S=TILE_S, SUMS=sums,
                     num_warps=warps, num_stages=stages)


@torch.library.custom_op('nanopaths::stick_breaking', mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = q.contiguous()
    y, rest, oldest = make_outputs(q, k, v)
    scale = math.log2(math.e) / math.sqrt(q.size(-1))
    launch(forward_kernel, (q, k, v, y, rest, oldest), (scale,), q, k, v)
    return y, rest, oldest


@forward.register_fake
def make_outputs(q, k, v):                               # shapes for torch.compile; used by forward
    B, T, K, H, D = q.shape
    rest = q.new_empty(B, H, T * K, dtype=torch.float32)
    return q.new_empty(q.shape), rest, torch.empty_like(rest, dtype=torch.int32)


@torch.library.custom_op('nanopaths::stick_breaking_backward', mutates_args=())
def backward(q: Tensor, k: Tensor, v: Tensor, rest: Tensor, oldest: Tensor,
             dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    D = q.size(-1)
    q = q.contiguous()
    dq = q.new_empty(q.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (k, v))
    scales = (math.log2(math.e) / math.sqrt(D), 1 / math.sqrt(D))
    tensors = (q, k, v, rest, oldest, dy.contiguous(), dq, dk, dv)
    launch(backward_kernel, tensors, scales, q, k, v)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@backward.register_fake
def make_gradients(q, k, v, rest, oldest, dy):           # shapes and dtypes for torch.compile
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output[1:])


def differentiate(ctx, dy, d_rest, d_oldest):
    return backward(*ctx.saved_tensors, dy)


forward.register_autograd(differentiate, setup_context=keep)


# ---- What moduleformer.py calls ------------------------------------------------------------------

@torch.compiler.assume_constant_result                   # torch.compile need not look into it
def known_dtypes():
    if torch.cuda.get_device_capability() < (8, 0):      # before 2020: no bfloat16, no TF32
        return []
    if torch.get_float32_matmul_precision() == 'highest':
        return [torch.bfloat16, torch.float16]
    return [torch.bfloat16, torch.float16, torch.float32]


def can_fuse(q, k, v):
    """Whether the kernels take these tensors. Heads wider than 128 do not fit into registers.
    float32 is multiplied as TF32, which torch must allow. If torch must be deterministic, the
    kernels are not used: dk and dv can differ in their last bits from run to run."""
    if not q.is_cuda or torch.version.cuda is None or torch.are_deterministic_algorithms_enabled():
        return False
    return q.dtype in known_dtypes() and q.dtype == k.dtype == v.dtype and q.size(-1) <= 128


def stick_breaking(q, k, v):
    """q (B, H, T, K, D): K queries for each of T tokens; k, v (B, H, S, D) -> (B, H, T, K, D)."""
    k, v = (x.transpose(1, 2) for x in (k, v))
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))  # kernels need stride 1
    return forward(q.permute(0, 2, 3, 1, 4), k, v)[0].permute(0, 3, 1, 2, 4)
