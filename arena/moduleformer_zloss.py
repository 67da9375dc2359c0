"""
Router z-loss in ModuleFormer. arena/zloss.py has the idea and its source.

    h = A ReLU(B x);  choice and gates as in moduleformer.py, not renormalised
    z = mean over tokens of (log sum_i exp h_i)^2

It is an auxiliary loss of its own, summed over all routers: aux_weights = dict(mi=0.01, z=0.001).
"""

import torch
import torch.nn.functional as F

from moduleformer import ModuleFormer, ModuleFormerConfig, Router


class ZLossRouter(Router):
    def forward(self, x_ND):
        gate_NK, choice_NK, losses = super().forward(x_ND)
        with torch.autocast(x_ND.device.type, enabled=False):
            hidden = F.relu(self.B(x_ND.to(self.B.weight.dtype)))
            losses['z'] = F.linear(hidden, self.A()).logsumexp(-1).square().mean()
        return gate_NK, choice_NK, losses


class ZLossModuleFormer(ModuleFormer):
    router = ZLossRouter


Config, Model = ModuleFormerConfig, ZLossModuleFormer    # what train.py looks for
