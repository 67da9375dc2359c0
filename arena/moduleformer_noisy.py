"""
Noisy top-k in ModuleFormer. arena/noisy.py has the idea and its source.

    h_i = (A ReLU(B x))_i + n_i * softplus(v_i x)    n_i from N(0, 1), drawn anew for each token
    gate = the K largest of softmax(h), not renormalised, as in moduleformer.py

In eval mode there is no noise. The losses use the softmax with noise. v starts at 0, as in Shazeer
et al., so the noise starts with a scale of softplus(0) = 0.69 everywhere.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from moduleformer import ModuleFormer, ModuleFormerConfig, Router


class NoisyRouter(Router):
    def __init__(self, n, n_new, config):
        super().__init__(n, n_new, config)
        self.noise = nn.Linear(config.n_embd, n + n_new, bias=False)    # v
        nn.init.zeros_(self.noise.weight)

    def forward(self, x_ND):
        with torch.autocast(x_ND.device.type, enabled=False):   # in bfloat16 close scores would tie
            x_ND = x_ND.to(self.B.weight.dtype)
            h_NE = F.linear(F.relu(self.B(x_ND)), self.A())
            if self.training:
                h_NE = h_NE + torch.randn_like(h_NE) * F.softplus(self.noise(x_ND))
            log_prob_NE = F.log_softmax(h_NE, -1)
        choice_NK = log_prob_NE.argsort(descending=True, stable=True)[:, :self.top_k]
        gate_NK = log_prob_NE.gather(1, choice_NK).exp()
        return gate_NK, choice_NK, self.losses(log_prob_NE)


class NoisyModuleFormer(ModuleFormer):
    router = NoisyRouter


Config, Model = ModuleFormerConfig, NoisyModuleFormer    # what train.py looks for
