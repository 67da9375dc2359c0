"""
Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks").

A matrix moves by its momentum with all singular values set to about 1, so that every direction is
learned at the same pace. Unlike torch.optim.Muon, this one updates all matrices of the same shape,
and all experts of a stack, as one batch, and accepts a tensor as learning rate, so that a CUDA
graph can replay the step. Embeddings, heads, routers, adapters and vectors stay with AdamW.
"""

import functools
import math

import torch

MOMENTUM = 0.95
QUINTIC = 3.4445, -4.7750, 2.0315        # Jordan's: steep at 0, so small singular values grow fast
# Tables, or stored as (in, out).
BY_ADAMW = {'wte', 'wpe', 'position', 'head', 'lm_head', 'router', 'lora', 'adapters'}


def split_groups(groups, model, rate):
    """AdamW's groups, without what Muon takes, and Muon's: `rate` times as fast as the others."""
    names = {p: name for name, p in model.named_parameters()}
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    is_hidden = lambda p: p not in tables and not BY_ADAMW & {*names[p].split('.')}
    hidden = [p for p in groups[0]['params'] if is_hidden(p)]
    taken = {*hidden}
    groups[0]['params'] = [p for p in groups[0]['params'] if p not in taken]
    return [*groups, dict(groups[0], params=hidden, muon=rate)]


class Muon(torch.optim.AdamW):
    """AdamW, but in groups that have `muon` the matrices take Muon's step."""
    compiled = False

    def compile(self):
        """Fuse all but the matrix products. Each size of matrices takes a second or two."""
        self.compiled = True

    def step(self):
        groups = self.param_groups
        self.param_groups = [group for group in groups if 'muon' not in group]
        super().step()
        self.param_groups = groups
        for group in groups:
            if 'muon' in group:
                self.step_matrices(group)

    @torch.no_grad()
    def step_matrices(self, group):
        rate = torch.as_tensor(group['lr'] * group['muon'])
        overflow = getattr(self, 'found_inf', None)      # float16's scaler: 1 if nothing may move
        if overflow is not None:
            rate = rate * (1 - overflow)
        movers = look_ahead, move_cautiously if group.get('cautious') else move_by
        ahead, move, even = (fused(f) if self.compiled else f for f in (*movers, even_out))
        batches = {}                                     # matrices of one size, alone or in stacks
        for p in group['params']:
            if p.grad is not None:
                is_stack = group.get('normuon') and p.dim() == 3     # its neurons are columns
                key = p.shape[-2:], update_scale(p.shape), is_stack
                batches.setdefault(key, []).append(p)
                if not self.state[p]:                    # AdamW asks every parameter for its step
                    self.state[p] = dict(step=torch.zeros(()), exp_avg=torch.zeros_like(p))
                    if group.get('normuon'):
                        neurons = p[..., :1, :] if is_stack else p[:, :1]
                        self.state[p]['exp_avg_sq'] = torch.zeros_like(neurons)
        for (_, scale, is_stack), params in batches.items():
            momenta = [self.state[p]['exp_avg'] for p in params]
            grads = [p.grad for p in params]
            if overflow is not None:                     # a momentum moved towards itself stays
                grads = [torch.where(overflow > 0, m, grad) for m, grad in zip(momenta, grads)]
            update = orthogonal(ahead(grads, momenta))
            if group.get('normuon'):
                update = even(update, [self.state[p]['exp_avg_sq'] for p in params], is_stack)
            move(params, update, scale, rate, group['weight_decay'])


@functools.cache
def fused(f):
    deterministic = torch.are_deterministic_algorithms_enabled()     # choose no kernel by a race
    return torch.compile(f, dynamic=False, options=dict(deterministic=deterministic))


def look_ahead(grads, momenta):
    """Nesterov's momentum, as one batch (n, rows, columns) of matrices of length 1."""
    torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
    ahead = torch._foreach_lerp(grads, momenta, MOMENTUM)
    x = torch.cat([y.view(-1, *y.shape[-2:]) for y in ahead])
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # an expert without tokens stays at 0
    return x.bfloat16() if x.is_cuda else x              # on a GPU that is fast


def even_out(update, squares, is_stack):
    """NorMuon (Li et al. 2025): each neuron's update over the root of the running mean of its
    squares. The length of the whole stays the same."""
    update = update.float()
    new = update.square().mean(-2 if is_stack else -1, keepdim=True)
    parts = new.split([s[..., 0, 0].numel() for s in squares])
    torch._foreach_lerp_(squares, [n.reshape(s.shape) for n, s in zip(parts, squares)], 0.05)
    mean = torch.cat([s.view(-1, *s.shape[-2:]) for s in squares])
    even = update / (mean.sqrt() + 1e-8)
    length = lambda x: x.norm(dim=(-2, -1), keepdim=True)
    return even * (length(update) / (length(even) + 1e-8))


def move_by(params, update, scale, rate, decay):
    parts = update.split([p[..., 0, 0].numel() for p in params])
    torch._foreach_mul_(params, 1 - rate * decay)
    torch._foreach_sub_(params, [rate * scale * u.reshape(p.shape) for p, u in zip(params, parts)])


def move_cautiously(params, update, scale, rate, decay):
    """Weight decay only where it has the direction of the update (Chen et al. 2025)."""
    parts = update.split([p[..., 0, 0].numel() for p in params])
    for p, u in zip(params, parts):
        u = u.reshape(p.shape)
        p.sub_(rate * (scale * u + decay * p * (u * p > 0)))


def update_scale(shape):
    """Jordan's: sqrt(max(1, rows / columns)) of a weight (out, in), so that an update changes a
    map's output equally, whatever its shape. A stack of experts is (E, in, out)."""
    d_out, d_in = shape if len(shape) == 2 else (shape[-1], shape[-2])
    return math.sqrt(max(1, d_out / d_in))


def orthogonal(x, steps=5):
    """Roughly U V^T of each matrix x = U S V^T of a batch, of length 1: Newton-Schulz brings the
    singular values to about 0.7 to 1.2, all at once; very small ones stay smaller.

    A step is x = (a + b s + c s s) x with s = x x^T. The polynomial of s is written as a square,
    c ((s + h)^2 + a/c - h^2) with h = b / 2c, because a product that adds to a matrix copies it
    first, and numbers are added to a diagonal at no cost."""
    a, b, c = QUINTIC
    h = b / (2 * c)
    is_tall = x.size(1) > x.size(2)
    x = x.mT if is_tall else x
    for _ in range(steps):
        s = x @ x.mT
        s.diagonal(dim1=1, dim2=2).add_(h)
        s = s @ s
        s.diagonal(dim1=1, dim2=2).add_(a / c - h * h)
        x = torch.baddbmm(x, s, x, beta=0, alpha=c)      # c * s @ x
    return x.mT if is_tall else x
