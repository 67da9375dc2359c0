"""
Rows, fast: dispatch for mixtures, with the results of the plain class in the model files.

Its shapes never change, so a step can be compiled and captured as a CUDA graph: rows with gate 0
are not left out but sorted to the end, where the products of the experts do not reach.
"""

import inspect
import sys
import zlib

import torch
import torch.nn.functional as F

from plumbing.settings import code_of
try:
    from plumbing import row_kernels as kernels
except ImportError:                                      # no Triton: torch's own products
    kernels = None

# Checksums of the plain forms for which the fast ones below stand (tests/test_rows.py prints them)
KNOWN = {3021512803, 3215922438, 4231343050, 2766329615, 4838153}


def faster(plain):
    """The form below in place of a model file's own class or function, while that is unedited."""
    if checksum(plain) in KNOWN:
        return globals()[plain.__name__]
    print(f'note: {plain.__name__} in {plain.__module__}.py was edited, so it runs as it stands, '
          'without its fast form in plumbing/rows.py', file=sys.stderr)
    return plain


def checksum(plain):
    """Of its code, without comments and docstrings; None if its source is not there."""
    try:
        return zlib.crc32(code_of(inspect.getsource(plain)).encode())
    except (OSError, TypeError):
        return None


# ---- The fast forms -----------------------------------------------------------------------------

class Rows:
    def __init__(self, gate_NK, choice_NK, n_choices, sparse=True):
        if not sparse:
            gate_NK = gate_NK.new_zeros(len(gate_NK), n_choices).scatter(1, choice_NK, gate_NK)
            choice_NK = torch.arange(n_choices, device=gate_NK.device).expand_as(gate_NK)
        is_small = not torch.is_grad_enabled() and gate_NK.numel() <= 4096
        self.leaves_out = sparse and not is_small        # for so few, leaving out costs more
        self.gate_NK, self.choice_NK = gate_NK, choice_NK
        group, n_groups = choice_NK.flatten(), n_choices
        if self.leaves_out:                              # the last group: all rows with gate 0
            is_empty_NK = gate_NK == 0
            self.gate_NK = torch.where(is_empty_NK, 0, gate_NK)  # without a row, no gradient
            group = group.masked_fill(is_empty_NK.flatten(), n_choices)
            n_groups = n_choices + 1
        self.pair, self.row, ends = order_by_choice(group, n_groups)
        self.ends_E = ends[:n_choices]
        self.row_NK = self.row.view_as(choice_NK)
        self.token = self.pair // choice_NK.size(1)
        self.choice = choice_NK.flatten()[self.pair]

    def spread(self, x_ND):
        return Gather.apply(x_ND, self.token, self.row_NK)

    def pick(self, x_NED):
        N, E, _ = x_NED.shape
        row_NE = self.row.new_full((N, E), -1).scatter(1, self.choice_NK, self.row_NK)
        return Gather.apply(x_NED.flatten(0, 1), self.token * E + self.choice, row_NE.view(-1, 1))

    def linear(self, x_RD, w_EDF, b_EF=None):
        y_RF = grouped_mm(x_RD, w_EDF, self.ends_E, self.leaves_out)
        return y_RF if b_EF is None else y_RF + GroupBias.apply(b_EF.type_as(y_RF), self.choice)

    def norm_linear(self, x_RD, gain_ED, bias_ED, w_EDF, b_EF):
        w_EDF, b_EF = fold(gain_ED, bias_ED, w_EDF, b_EF)
        return self.linear(F.layer_norm(x_RD, x_RD.shape[-1:]), w_EDF, b_EF)

    def sort(self, x_NKD):
        return Gather.apply(x_NKD.flatten(0, 1), self.pair, self.row[:, None])

    def restore(self, y_RD):
        return Gather.apply(y_RD, self.row, self.pair[:, None]).view(*self.row_NK.shape, -1)

    def combine(self, y_RD):
        return (self.gate_NK[:, :, None] * self.restore(y_RD)).sum(1)

    def feed_forward(self, x_ND, fc_EDF, down_EFD):
        is_autocast = torch.is_autocast_enabled(x_ND.device.type)
        dtype = torch.get_autocast_dtype(x_ND.device.type) if is_autocast else x_ND.dtype
        if has_kernel(dtype, fc_EDF):
            return kernels.FeedForward.apply(x_ND, self.gate_NK, fc_EDF, down_EFD, self.token,
                                             self.pair, self.row_NK, self.ends_E, dtype)
        h_RF = F.relu(self.linear(self.spread(x_ND), fc_EDF)).square()
        return self.combine(self.linear(h_RF, down_EFD))


def fold(gain_PD, bias_PD, w_PDF, b_PF):
    """Put a norm's gain g and bias c into the map: (n*g + c) @ w + b = n @ (g*w) + (c@w + b)"""
    return gain_PD[:, :, None] * w_PDF, torch.einsum('pd,pdf->pf', bias_PD, w_PDF) + b_PF


def project_all(x, gain_PD, bias_PD, w_PDF, b_PF, n_head):
    """One normalised x serves all blocks. Three products, because the gradients of one would be
    copied into one tensor."""
    n = F.layer_norm(x, x.shape[-1:])
    w_PDF, b_PF = fold(gain_PD, bias_PD, w_PDF, b_PF)
    w = w_PDF.unflatten(2, (3, -1)).permute(2, 0, 3, 1).flatten(1, 2)        # (3, P*D, D)
    b = b_PF.unflatten(1, (3, -1)).transpose(0, 1).flatten(1)                # (3, P*D)
    heads = len(gain_PD) * n_head
    return [F.linear(n, w[i], b[i]).unflatten(2, (heads, -1)).transpose(1, 2) for i in range(3)]


def order_by_choice(choice, n_choices):
    """-> pair = choice.argsort(stable=True), row = pair.argsort(), and where the rows of each
    choice end (int32). Counting is faster than sorting."""
    chose_ER = choice == torch.arange(n_choices, device=choice.device)[:, None]
    count_ER = chose_ER.flatten().cumsum(0, dtype=torch.int32).view_as(chose_ER)
    row = count_ER.gather(0, choice[None])[0].long() - 1  # pairs before: lower choice, or earlier
    pair = torch.empty_like(row).scatter(0, row, torch.arange(len(row), device=row.device))
    return pair, row, count_ER[:, -1].contiguous()


class Gather(torch.autograd.Function):
    """x[index], with a faster gradient: it gathers, where torch would add up row by row. For each
    of x's M rows, readers (M, J) lists the rows of the result that were read from it; -1: none."""
    @staticmethod
    def forward(ctx, x, index, readers):
        ctx.save_for_backward(readers)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        readers, = ctx.saved_tensors
        rows = grad.index_select(0, readers.clamp(min=0).flatten()).view(*readers.shape, -1)
        return rows.masked_fill(readers[:, :, None] < 0, 0).sum(1), None, None


class GroupBias(torch.autograd.Function):
    """b[choice], with a faster gradient: a matrix product sums over the rows of each choice."""
    @staticmethod
    def forward(ctx, b_EF, choice):
        ctx.save_for_backward(choice)
        ctx.n_choices = len(b_EF)
        return b_EF.index_select(0, choice)

    @staticmethod
    def backward(ctx, grad_RF):
        choice, = ctx.saved_tensors
        chose_ER = torch.arange(ctx.n_choices, device=choice.device)[:, None] == choice
        return chose_ER.to(grad_RF.dtype) @ grad_RF, None


def grouped_mm(x_RD, w_EDF, ends_E, has_rest=True):
    """x_RD @ w_EDF[group]: rows sorted by group, ends_E (int32) their ends; 0 in rows after the
    last, if there are any. Autocasts by hand. A loop serves float64, float16, float32 on a GPU or
    compiled, and widths off 16 bytes."""
    if torch.is_autocast_enabled(x_RD.device.type):
        dtype = torch.get_autocast_dtype(x_RD.device.type)
        x_RD, w_EDF = x_RD.to(dtype), w_EDF.to(dtype)
    cpu_float32 = x_RD.dtype == torch.float32 and x_RD.is_cpu and not torch.compiler.is_compiling()
    bfloat16 = x_RD.dtype == torch.bfloat16 and (x_RD.is_cuda or x_RD.is_cpu)
    aligned = all(width * x_RD.element_size() % 16 == 0 for width in w_EDF.shape[1:])
    if hasattr(F, 'grouped_mm') and (cpu_float32 or bfloat16) and aligned:
        return GroupedProduct.apply(x_RD, w_EDF, ends_E, has_rest)
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    *parts, rest = x_RD.split([*sizes, len(x_RD) - sum(sizes)])
    zeros = x_RD.new_zeros(len(rest), w_EDF.size(2))
    return torch.cat([*(x @ w for x, w in zip(parts, w_EDF)), zeros])


def has_kernel(dtype, w_EDF):
    """Whether Triton's kernels take it: half precision, and widths that their tiles divide."""
    return (kernels and w_EDF.is_cuda and torch.version.cuda
            and dtype in (torch.bfloat16, torch.float16)
            and all(width % 32 == 0 for width in w_EDF.shape[1:]))


class GroupedProduct(torch.autograd.Function):
    """F.grouped_mm with a faster gradient of w, where there is a kernel for it. Rows after the last
    group are not computed; torch leaves them undefined, here they are 0."""
    @staticmethod
    def forward(ctx, x_RD, w_EDF, ends_E, has_rest):
        ctx.save_for_backward(x_RD, w_EDF, ends_E)
        ctx.has_rest = has_rest
        return zero_rest(F.grouped_mm(x_RD, w_EDF, offs=ends_E), ends_E, has_rest)

    @staticmethod
    def backward(ctx, grad_RF):
        x_RD, w_EDF, ends_E = ctx.saved_tensors
        grad_RF = grad_RF.contiguous()
        dx = F.grouped_mm(grad_RF, w_EDF.transpose(1, 2), offs=ends_E)
        dx = zero_rest(dx, ends_E, ctx.has_rest)
        if has_kernel(x_RD.dtype, w_EDF):
            dw = kernels.weight_gradient(x_RD, grad_RF, ends_E, None, None, None).type_as(w_EDF)
        else:
            dw = F.grouped_mm(x_RD.T, grad_RF, offs=ends_E)
        return dx, dw, None, None


def zero_rest(y_RF, ends_E, has_rest):
    if not has_rest:
        return y_RF
    if y_RF.is_cpu and not torch.compiler.is_compiling():
        y_RF[int(ends_E[-1]):] = 0
        return y_RF
    is_rest = torch.arange(len(y_RF), device=y_RF.device) >= ends_E[-1]
    return y_RF.masked_fill(is_rest[:, None], 0)
