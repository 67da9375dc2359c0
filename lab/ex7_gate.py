"""7. A gate that changes nothing at first

Self-MoE (anonymous 2024) changes a trained model: the input h of a block also passes around it,
through a gate G, and is added to what the block returns:

    h_next = block(h) + G(h)

block(h) already contains its own residual, if it has one. A gate has no bias. It is one of three
kinds: a `matrix` mixes all channels of h, a `vector` has one weight for each channel, a `scalar`
has one weight for all.

    h = (2, 3), block(h) = (5, 1)
    vector (0.5, -1)      G(h) = (1, -3)      h_next = (6, -2)
    scalar 0.1            G(h) = (0.2, 0.3)   h_next = (5.2, 1.3)
    any kind, untrained   G(h) = (0, 0)       h_next = (5, 1)

The last line is the point. A trained model that gets gates must compute exactly what it did
before, or its training would be partly lost. But the gates must learn: at the start their gradient
is not zero.

The second part does the same for a matrix in two factors, a @ b (LoRA, Hu et al. 2021): few
weights, added to a trained map. Again the product must start at zero, and again training must be
able to move it. With g = dL/d(a @ b), the gradients of the factors are

    dL/da = g @ b.T        dL/db = a.T @ g

What do you get if both factors start at zero?
"""

import torch
import torch.nn as nn


class Gate(nn.Module):
    """kind is 'matrix' (d * d weights), 'vector' (d) or 'scalar' (1)."""
    def __init__(self, kind, d):
        super().__init__()
        raise NotImplementedError    # 2 to 6 lines

    def forward(self, h):
        """h (B, T, d) -> G(h) (B, T, d)"""
        raise NotImplementedError    # 3 lines


def gated_layer(block, gate, h):
    """-> h_next (B, T, d)"""
    raise NotImplementedError    # 1 line


def low_rank(d, rank):
    """-> two parameters, a (d, rank) and b (rank, d)"""
    raise NotImplementedError    # 3 lines
