"""
Sigmoid gates: MoEP whose router judges every choice by itself.

    s_i = sigmoid(w_i x)          a token takes the K largest
    gate_i = s_i / (sum of s over its K)

With a softmax, a choice gains only what others lose, and its gradient depends on all of them. Here a
token can find two choices good at once. But a gate near 1 says "better than the other one", not
"good": what else s says is lost in the division, which makes the gates sum to 1.

Csordás, Irie, Schmidhuber 2023, "Approximating Two-Layer Feedforward Networks for Efficient
Transformers" has sigmoid gates that are not divided. The division: DeepSeek-AI 2024, "DeepSeek-V3
Technical Report", Eq. 13 to 15; the balance loss of shares s / sum(s): Eq. 17 to 20.
"""

import torch
import torch.nn.functional as F

from moep import MoEP, MoEPConfig, Router


class SigmoidRouter(Router):
    def forward(self, x_ND):
        with torch.autocast(x_ND.device.type, enabled=False):   # in bfloat16 close scores would tie
            score_NE = self.linear(x_ND.to(self.linear.weight.dtype))
        choice_NK = self.choose(score_NE)
        log_NE = F.logsigmoid(score_NE)                 # s / sum(s) is the softmax of log s
        gate_NK = log_NE.gather(1, choice_NK).softmax(-1)       # over the chosen
        share_NE = log_NE.softmax(-1)                           # over all
        return gate_NK, choice_NK, dict(balance=self.balance_loss(share_NE, choice_NK))

    def choose(self, score_NE):
        """The K largest: a sigmoid keeps the order. arena/bias.py has another rule."""
        return score_NE.argsort(descending=True, stable=True)[:, :self.config.top_k]


class SigmoidMoEP(MoEP):
    router = SigmoidRouter


Config, Model = MoEPConfig, SigmoidMoEP                  # what train.py looks for
