"""
The loop: one block of arena/dense.py for all depths (Super Tiny's shared layers, taken to the end).

    x = wide(embedding)             narrow tables (Super Tiny's factorised embedding), not tied
    n_layer times: x = block(x)     the same attention and FFN in each pass
    logits = head(narrow(norm(x)))

What the layers share can be spent on width. With n_expert > 1 the FFN is a pool of experts, and
each pass has a router of its own, so that passes may differ (Csordás et al. 2024, "MoEUT", with
groups of layers). Measured: docs/arena.md.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn

from arena.dense import Dense, DenseConfig, FeedForward


@dataclass
class LoopConfig(DenseConfig):
    n_layer: int = 6                  # passes through the one block
    n_head: int = 10
    n_embd: int = 640
    hidden: int = 1920                # width of the FFN; an expert has hidden / top_k
    d_token: int = 192                # width of the embedding and of the head

    def __post_init__(self):
        super().__post_init__()
        assert self.hidden % self.top_k == 0 and not self.n_shared, \
            'hidden must be a multiple of top_k, and there are no shared experts'


class Loop(Dense):
    def __init__(self, config):
        super().__init__(config)
        c, D = config, config.n_embd
        self.wte = nn.Sequential(nn.Embedding(c.vocab_size, c.d_token),
                                 nn.Linear(c.d_token, D, bias=False))
        self.narrow = nn.Linear(D, c.d_token, bias=False)
        self.head = nn.Linear(c.d_token, c.vocab_size, bias=False)
        first, *others = self.blocks
        if c.n_expert == 1:
            first.ffn = FeedForward(D, c.hidden)
        else:
            first.ffn.fc = nn.Parameter(torch.empty(c.n_expert, D, c.hidden // c.top_k))
            first.ffn.down = nn.Parameter(torch.empty(c.n_expert, c.hidden // c.top_k, D))
        for block in others:                             # its own: router and cache place
            block.q, block.k, block.v, block.proj = first.q, first.k, first.v, first.proj
            block.ffn.fc, block.ffn.down = first.ffn.fc, first.ffn.down
        self.init_weights()

    def logits(self, x):
        return self.head(self.narrow(x))

    def count_params(self, taken={}):
        """Total, and active: a weight that a token meets in each pass counts each time."""
        active = sum(m.weight.numel() for m in (self.wte[1], self.narrow, self.head))
        for name, p in self.blocks.named_parameters(remove_duplicate=False):
            is_stack = p.dim() == 3 and '.router.' not in name
            used = taken.get(f'blocks.{name.partition(".ffn.")[0]}', self.config.top_k)
            active += round(p.numel() * used / len(p)) if is_stack else p.numel()
        return sum(p.numel() for p in self.parameters()), active


Config, Model = LoopConfig, Loop                         # what train.py looks for
