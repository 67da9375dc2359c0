"""
Router z-loss: MoEP whose router is punished for large scores.

    h = W x;  choice and gates as in moep.py
    z = mean over tokens of (log sum_i exp h_i)^2

A constant added to all scores does not change their softmax, so nothing stops the scores from
growing. Large scores round badly, and a softmax of large differences passes no gradient on. The
loss pulls log sum exp towards 0, where the exp h_i already sum to 1.

Zoph et al. 2022, "ST-MoE: Designing Stable and Transferable Sparse Expert Models", Eq. 5. Its weight
there is 0.001, that of the balance loss 0.01. So here a tenth of z is added to the balance loss.
"""

import torch

from moep import MoEP, MoEPConfig, Router


class ZLossRouter(Router):
    def forward(self, x_ND):
        gate_NK, choice_NK, losses = super().forward(x_ND)
        with torch.autocast(x_ND.device.type, enabled=False):
            score_NE = self.linear(x_ND.to(self.linear.weight.dtype))
            z = score_NE.logsumexp(-1).square().mean()
        return gate_NK, choice_NK, dict(balance=losses['balance'] + 0.1 * z)


class ZLossMoEP(MoEP):
    router = ZLossRouter


Config, Model = MoEPConfig, ZLossMoEP                    # what train.py looks for
