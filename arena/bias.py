"""
Balance without a loss: a router that adds a bias to the scores, only when it chooses.

    s_i = sigmoid(score_i)        a token takes the K largest of s_i + b_i
    gate_i = s_i / (sum of s over its K): b has no part in it
    after each step:  b_i += 0.001 * sign(mean load - load_i), if load_i tokens took i

A balance loss also pulls at weights that the language modelling loss trains. A bias has no
gradient: it only shifts what is chosen. The balance loss (in ModuleFormer: mi) is only for the log:
give it no weight in the config.

Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"; DeepSeek-AI
2024, "DeepSeek-V3 Technical Report", Eq. 16, which adds a very small balance loss per sequence.
"""

import torch
import torch.distributed as dist
import torch.nn as nn

from arena.sigmoid import SigmoidGates
from moep import MoEP, MoEPConfig, Router


class LoadBias(nn.Module):
    """Chooses K by s + b. Its buffers change in place, so that a CUDA graph sees it."""
    def __init__(self, n_choices, weight):
        super().__init__()
        self.register_buffer('b', torch.zeros(n_choices))
        self.register_buffer('load', torch.zeros(n_choices, dtype=torch.long))
        self.register_buffer('seen', torch.zeros_like(weight))      # the weight of the last pass

    @torch.no_grad()
    def forward(self, s_NE, top_k, weight):
        if self.training:
            # A step may take several passes. If the weight moved, a new step began.
            stepped = (weight != self.seen).any()
            missing_E = self.load.sum() - len(self.load) * self.load    # positive: below the mean
            self.b.add_((stepped * missing_E.sign()).to(self.b.dtype), alpha=0.001)
            self.load.mul_(~stepped)
            self.seen.copy_(weight)
        choice_NK = (s_NE + self.b).argsort(descending=True, stable=True)[:, :top_k]
        if self.training:
            load_E = torch.zeros_like(s_NE).scatter(1, choice_NK, 1.0).sum(0, dtype=torch.long)
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(load_E)                  # the load of all processes
            self.load.add_(load_E)
        return choice_NK


class BiasedChoice(SigmoidGates):
    """A mixin: it goes before the Router of any model."""
    def __init__(self, d, n_choices, *args):
        super().__init__(d, n_choices, *args)
        self.bias = LoadBias(n_choices, next(self.parameters()))

    def choose(self, score_NE):
        return self.bias(score_NE.sigmoid(), self.config.top_k, next(self.parameters()))


class BiasRouter(BiasedChoice, Router):
    pass


class BiasMoEP(MoEP):
    router = BiasRouter


Config, Model = MoEPConfig, BiasMoEP                     # what train.py looks for
