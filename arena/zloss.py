"""
Router z-loss: MoEP whose router is punished for large scores.

    h = W x;  choice and gates as ever
    z = mean over tokens of (log sum_i exp h_i)^2

A softmax does not feel a constant that is added to all its scores, so nothing stops them from
growing. Large scores round badly, and a softmax of large differences passes no gradient on. The
loss pulls log sum exp towards 0, where the p_i = exp h_i need no division.

Zoph et al. 2022, "ST-MoE: Designing Stable and Transferable Sparse Expert Models", Eq. 5. Its weight
there is 0.001 beside a balance loss of 0.01; so z counts a tenth here, and is added to the balance.
"""

import torch

from moep import MoEP, MoEPConfig, Router


class ZLossRouter(Router):
    def forward(self, x_ND):
        gate_NK, choice_NK, balance = super().forward(x_ND)
        with torch.autocast(x_ND.device.type, enabled=False):
            score_NE = self.linear(x_ND.to(self.linear.weight.dtype))
            z = score_NE.logsumexp(-1).square().mean()
        return gate_NK, choice_NK, balance + 0.1 * z


class ZLossMoEP(MoEP):
    router = ZLossRouter


Config, Model = MoEPConfig, ZLossMoEP                    # what train.py looks for
