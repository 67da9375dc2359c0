"""
Tables instead of a router: dense.py with more parameters, which are looked up, not chosen.

    values of attention in the last n_value blocks:  v_t = V norm(x_t) + A[id_t]
    the embedding:  norm(W[id_t] + B[hash(id_{t-1}, id_t)])           B has n_bigram rows

A token reads a few of a table's parameters, as it does of experts', but its last two ids say which.
A routed model with as many parameters should beat that. Tables start at 0, and cost no arithmetic.

Both tables: modded-nanogpt (Jordan et al. 2024). Trigrams, too, with a gate: Cheng et al. 2026,
"Conditional Memory via Scalable Lookup" (Engram, arXiv 2601.07372).
"""

from dataclasses import dataclass

import torch
import torch.nn as nn

from arena.dense import Dense, DenseConfig


@dataclass
class TableConfig(DenseConfig):
    n_value: int = 2                  # blocks, the last ones, whose values have a table
    n_bigram: int = 4096              # rows of the table of bigrams; at least 1

    def __post_init__(self):
        super().__post_init__()
        assert self.n_value <= self.n_layer, 'n_value must be at most n_layer'


class Lookup(nn.Module):
    """A map or an embedding, plus rows of a table. The model first sets row_BT: which ones."""
    def __init__(self, plain, n_row, D):
        super().__init__()
        self.plain = plain
        self.weight = plain.weight                       # wte's, which the head reads, too
        self.table = nn.Embedding(n_row, D)
        nn.init.zeros_(self.table.weight)

    def forward(self, x):
        return self.plain(x) + self.table(self.row_BT)


class Table(Dense):
    def __init__(self, config):
        super().__init__(config)
        for block in self.blocks[config.n_layer - config.n_value:]:
            block.v = Lookup(block.v, config.vocab_size, config.n_embd)
        self.wte = Lookup(self.wte, config.n_bigram, config.n_embd)

    def features(self, idx, cache=None):
        c = self.config
        for block in self.blocks[c.n_layer - c.n_value:]:
            block.v.row_BT = idx
        no_id = idx.new_full((len(idx), 1), c.vocab_size)
        before = torch.cat((cache[0][2] if cache else no_id, idx[:, :-1]), 1)
        self.wte.row_BT = (before * 1_000_003 + idx) % c.n_bigram
        x, aux = super().features(idx, cache)
        if cache is not None:
            cache[0] += (idx[:, -1:],)                   # behind keys and values: the last id
        return x, aux

    def count_params(self, taken={}):
        total, active = super().count_params(taken)      # a table multiplies nothing
        tables = sum(p.numel() for name, p in self.named_parameters() if '.table.' in name)
        return total, active - tables


Config, Model = TableConfig, Table                       # what train.py looks for
