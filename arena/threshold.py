"""
Expert threshold: each token of dense.py takes every expert that scores it above a usual score.

    token n takes expert e if score_ne > threshold_e, and at most `most` experts
    gate_ne = sigmoid(score_ne) / K
    threshold_e = the score of e that K/E of the tokens exceed, a mean over some 50 steps

A token may take many experts or none, but K on average, and all experts are equally busy, without a
balance loss. The model is causal, as it would not be if experts ranked the tokens of a batch.

Sun et al. 2026, "Expert Threshold Routing for Autoregressive Language Modeling with Dynamic
Computation Allocation and Load Balancing" (arXiv 2603.11535). A departure: there is no `most`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from arena.dense import Dense, DenseConfig, Router


@dataclass
class ThresholdConfig(DenseConfig):
    most: int = 0                     # experts that a token may take; 0: twice top_k

    def __post_init__(self):
        super().__post_init__()
        self.most = min(self.most or 2 * self.top_k, self.n_expert)
        assert self.most >= self.top_k, f'most = {self.most} is below top_k = {self.top_k}'


class ThresholdRouter(Router):
    def __init__(self, d, n_choices, config):
        super().__init__(d, n_choices, config)
        self.register_buffer('threshold', torch.zeros(n_choices))
        self.register_buffer('latest', torch.zeros(n_choices))      # the threshold of the last pass
        self.register_buffer('seen', torch.zeros_like(self.linear.weight))      # and its weight
        self.register_buffer('step', torch.zeros(()))

    def choose(self, score_NE):
        if self.training:
            self.move(score_NE)
        order_NE = (score_NE - self.threshold).argsort(descending=True, stable=True)
        return order_NE[:, :self.config.most]

    @torch.no_grad()
    def move(self, score_NE):
        stepped = (self.linear.weight != self.seen).any()   # if not: one more pass of this step
        self.step.add_(stepped)
        rate = stepped / (self.step - 1).clamp(1, 50)    # at first a plain mean of all steps
        self.threshold.lerp_(self.latest, rate)
        self.seen.copy_(self.linear.weight)
        below = len(score_NE) * (self.n_choices - self.config.top_k) // self.n_choices
        self.latest.copy_(score_NE.sort(0).values[below])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.latest.div_(dist.get_world_size()))

    def weigh(self, score_NE, choice_NK):
        is_above_NK = (score_NE > self.threshold).gather(1, choice_NK)
        gate_NK = score_NE.gather(1, choice_NK).sigmoid() / self.config.top_k
        return gate_NK * is_above_NK, {}


class Threshold(Dense):
    router = ThresholdRouter
    gates_sum_to_1 = False


Config, Model = ThresholdConfig, Threshold               # what train.py looks for
