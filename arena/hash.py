"""
Hash routing: MoEP that routes by a fixed random table. Nothing is learned: this is the floor.

    choices of a token = table[its id], K different ones, drawn once
    gate = 1 / K

A router that learns should beat this. The table knows neither context nor frequency: the blocks of
a common word have more to do, and a word with two meanings always takes the same blocks. But a
block sees the same words from the first step to the last, and nothing ever collapses.

Roller, Sukhbaatar, Szlam, Weston 2021, "Hash Layers For Large Sparse Models", random hash.
With K = 1 it is theirs; for K > 1 we take the mean of K blocks (their MultiHash joins parts of
K experts).
"""

import torch

from moep import MoEP, MoEPConfig, Router


class HashRouter(Router):
    def __init__(self, d, n_choices, config):
        super().__init__(d, n_choices, config)
        del self.linear                                  # no scores
        order = torch.rand(config.vocab_size, n_choices).argsort(-1)    # a permutation per token id
        self.register_buffer('table', order[:, :config.top_k].contiguous())
        self.idx_N = None                                # the tokens' ids, which HashMoEP sets

    def forward(self, x_ND):
        choice_NK = self.table[self.idx_N]
        gate_NK = x_ND.new_full(choice_NK.shape, 1 / self.config.top_k)
        gate_NE = x_ND.new_zeros(len(x_ND), self.n_choices).scatter(1, choice_NK, gate_NK)
        balance = self.balance_loss(gate_NE, choice_NK)                      # only to be logged
        return gate_NK, choice_NK, dict(balance=balance)


class HashMoEP(MoEP):
    router = HashRouter

    def features(self, idx, cache=None):
        for module in self.modules():
            if isinstance(module, HashRouter):
                module.idx_N = idx.flatten()
        return super().features(idx, cache)


Config, Model = MoEPConfig, HashMoEP                     # what train.py looks for
