"""
A shared block: MoEP in which every token takes choice 0, and K - 1 others that it chooses.

    p = softmax(W x)              a token takes 0, and the K - 1 largest of p_1 ... p_{E-1}
    gate_i = p_i / (sum of p over its K)

What all tokens need is then learned once, in the shared block, and not again in each of the others,
which are free to specialise. The balance loss covers only the others.

Dai et al. 2024, "DeepSeekMoE: Towards Ultimate Expert Specialization in Mixture-of-Experts Language
Models". A departure: there the shared expert's output is added as it is. Here the gates of a token
sum to 1, as MoEP's layers require, so the router also says how much of the shared block it wants.
"""

import torch

from moep import MoEP, MoEPConfig, Router


class SharedRouter(Router):
    def __init__(self, d, n_choices, config):
        super().__init__(d, n_choices, config)
        assert config.top_k > 1, 'top_k = 1 leaves nothing to choose beside the shared block'

    def choose(self, score_NE):
        others = score_NE[:, 1:].softmax(-1)                    # (N, E-1)
        best = others.argsort(descending=True, stable=True)[:, :self.config.top_k - 1] + 1
        return torch.cat((torch.zeros_like(best[:, :1]), best), 1)

    def weigh(self, score_NE, choice_NK):
        gate_NK = score_NE.gather(1, choice_NK).softmax(-1)     # p / sum(p) over the chosen
        others = score_NE[:, 1:].softmax(-1)                    # (N, E-1)
        return gate_NK, dict(balance=self.balance_loss(others, choice_NK[:, 1:] - 1))


class SharedMoEP(MoEP):
    router = SharedRouter


Config, Model = MoEPConfig, SharedMoEP                   # what train.py looks for
