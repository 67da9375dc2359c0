"""
Sigmoid gates in ModuleFormer. arena/sigmoid.py has the idea and its sources; the router keeps its
hidden layer.

    s = sigmoid(A ReLU(B x))      a token takes the K largest
    gate_i = s_i / (sum of s over its K)

A difference from moduleformer.py: there the gates sum to at most 1, here to 1. `mi` and
`concentration` are computed from the shares s / sum(s) instead of the softmax.
"""

import torch
import torch.nn.functional as F

from moduleformer import ModuleFormer, ModuleFormerConfig, Router


class SigmoidRouter(Router):
    def forward(self, x_ND):
        with torch.autocast(x_ND.device.type, enabled=False):   # in bfloat16 close scores would tie
            hidden = F.relu(self.B(x_ND.to(self.B.weight.dtype)))
            score_NE = F.linear(hidden, self.A())
        choice_NK = self.choose(score_NE)
        log_NE = F.logsigmoid(score_NE)                 # s / sum(s) is the softmax of log s
        gate_NK = log_NE.gather(1, choice_NK).softmax(-1)       # over the chosen
        log_share_NE = log_NE.log_softmax(-1)                   # over all
        return gate_NK, choice_NK, self.losses(log_share_NE)

    def choose(self, score_NE):
        """The K largest: a sigmoid keeps the order. arena/moduleformer_bias.py has another rule."""
        return score_NE.argsort(descending=True, stable=True)[:, :self.top_k]


class SigmoidModuleFormer(ModuleFormer):
    router = SigmoidRouter


Config, Model = ModuleFormerConfig, SigmoidModuleFormer  # what train.py looks for
