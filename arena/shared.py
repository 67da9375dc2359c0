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
        if config.top_k < 2:
            raise ValueError('top_k = 1 leaves nothing to choose beside the shared block; set 2 or more')

    def forward(self, x_ND):
        with torch.autocast(x_ND.device.type, enabled=False):   # in bfloat16 close scores would tie
            score_NE = self.linear(x_ND.to(self.linear.weight.dtype))
        rest = score_NE[:, 1:].softmax(-1)                      # (N, E-1)
        best = rest.argsort(descending=True, stable=True)[:, :self.config.top_k - 1]    # (N, K-1)
        choice_NK = torch.cat((torch.zeros_like(best[:, :1]), best + 1), 1)
        gate_NK = score_NE.gather(1, choice_NK).softmax(-1)     # p / sum(p) over the chosen
        return gate_NK, choice_NK, dict(balance=self.balance_loss(rest, best))


class SharedMoEP(MoEP):
    router = SharedRouter


Config, Model = MoEPConfig, SharedMoEP                   # what train.py looks for
