"""
Router z-loss: MoEP whose router is punished for large scores.

    h = W x;  choice and gates as in moep.py
    z = mean over tokens of (log sum_i exp h_i)^2

A constant added to all scores does not change their softmax, so nothing stops the scores from
growing. Large scores round badly, and a softmax of large differences passes no gradient on. The
loss pulls log sum exp towards 0, where the exp h_i already sum to 1.

Zoph et al. 2022, "ST-MoE: Designing Stable and Transferable Sparse Expert Models", Eq. 5, where its
weight is 0.001. The model sums it as it sums the balance loss: `block_z` of the parallel layers and
`expert_z` of shrink and grow.
"""

import torch

from moep import MoEP, MoEPConfig, Router


class ZLossRouter(Router):
    def forward(self, x_ND):
        gate_NK, choice_NK, losses = super().forward(x_ND)
        with torch.autocast(x_ND.device.type, enabled=False):
            score_NE = self.linear(x_ND.to(self.linear.weight.dtype))
            losses['z'] = score_NE.logsumexp(-1).square().mean()
        return gate_NK, choice_NK, losses


class ZLossMoEP(MoEP):
    router = ZLossRouter


Config, Model = MoEPConfig, ZLossMoEP                    # what train.py looks for
