"""
Attention residuals: dense.py whose blocks choose, token by token, which depths they read.

In the usual residual stream a block reads the plain sum of all that came before it. Here a group
of blocks reads a weighted mean of the embedding b_0 and of what the groups before it added:

    weight_j = softmax over j < n of  query_n . rmsnorm(b_j)         for each token
    h_n = sum over j < n of  weight_j * b_j
    b_n = group n(h_n) - h_n        what its blocks add; between them, residuals are the usual sum

The head reads such a mean, too. A group's query is a learned vector, which starts at zero: all
weights are equal at first. With group = 1 every block chooses.

Kimi Team 2026, "Attention Residuals" (arXiv 2603.15031), block form. A departure: there every
attention and every FFN has a query of its own, and also chooses among the sum so far in its group.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn

from arena.dense import Dense, DenseConfig, norm, rotary


@dataclass
class DepthRoutingConfig(DenseConfig):
    group: int = 2                    # blocks that read one mean

    def __post_init__(self):
        super().__post_init__()
        assert self.group >= 1, f'group = {self.group} must be at least 1'


class DepthRouting(Dense):
    def __init__(self, config):
        super().__init__(config)
        self.queries = nn.ParameterList(                 # of group 2, 3, ..., and of the head
            torch.zeros(config.n_embd) for _ in range(0, config.n_layer, config.group))

    def features(self, idx, cache=None):                 # as in Dense, except for sources
        past = cache[0][0].size(2) if cache else 0
        length = past + idx.size(1)
        if length > self.config.block_size:
            raise ValueError(
                f'{length} tokens are more than the block_size of {self.config.block_size}')
        x = self.dropout(norm(self.wte(idx)))            # (B, T, D)
        wide = torch.promote_types(x.dtype, torch.float32)
        position = torch.arange(past, length, device=x.device, dtype=wide)
        table = rotary(position, self.config.n_embd // self.config.n_head)
        sources, aux = [x], {}
        for n, query in enumerate(self.queries):
            start = x
            for block in self.blocks[n * self.config.group:][:self.config.group]:
                x, losses = block(x, table, cache)
                for name, loss in losses.items():
                    aux[name] = aux.get(name, 0) + loss
            sources.append(x - start)
            x = mix(sources, query)
        return norm(x), aux


def mix(sources, query):
    """The mean of (B, T, D) sources, weighted by a softmax of their products with the query."""
    source_BTSD = torch.stack(sources, 2)
    weight_BTS = (norm(source_BTSD) * query).sum(-1).softmax(-1)
    return (weight_BTS[..., None] * source_BTSD).sum(2)


Config, Model = DepthRoutingConfig, DepthRouting         # what train.py looks for
