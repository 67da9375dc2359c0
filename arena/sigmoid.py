"""
Sigmoid gates: a router that judges every choice by itself.

    s_i = sigmoid(score_i)        a token takes the K largest
    gate_i = s_i / (sum of s over its K)

With a softmax, a choice gains only what others lose, and its gradient depends on all of them. Here
a token can find two choices good at once. But a gate near 1 says "better than the other one", not
"good": what else s says is lost in the division, which makes the gates sum to 1.

Csordás, Irie, Schmidhuber 2023, "Approximating Two-Layer Feedforward Networks for Efficient
Transformers" has sigmoid gates that are not divided. The division: DeepSeek-AI 2024, "DeepSeek-V3
Technical Report", Eq. 13 to 15; the balance loss of shares s / sum(s): Eq. 17 to 20.
"""

import torch.nn.functional as F

from moep import MoEP, MoEPConfig, Router


class SigmoidGates:
    """A mixin: it goes before the Router of any model."""
    def choose(self, score_NE):                          # a sigmoid keeps the order of the scores
        return score_NE.argsort(descending=True, stable=True)[:, :self.config.top_k]

    def weigh(self, score_NE, choice_NK):
        log_NE = F.logsigmoid(score_NE)                         # the softmax of log s is s / sum(s)
        gate_NK = log_NE.gather(1, choice_NK).softmax(-1)       # over the chosen
        _, losses = super().weigh(log_NE, choice_NK)            # of the shares over all choices
        return gate_NK, losses


class SigmoidRouter(SigmoidGates, Router):
    pass


class SigmoidMoEP(MoEP):
    router = SigmoidRouter


Config, Model = MoEPConfig, SigmoidMoEP                  # what train.py looks for
