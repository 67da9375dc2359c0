"""
Noisy top-k: MoEP whose router explores, and learns how much.

    h_i = w_i x + n_i * softplus(v_i x)    n_i from N(0, 1), drawn anew for each token
    p = softmax(h)                a token takes the K largest
    gate_i = p_i / (sum of p over its K)

Without noise, a choice that starts badly is not taken, so it is not trained, and stays bad. With
noise every choice is tried now and then. The scale of the noise has its own weights v: where the
router is sure, it can learn to be quiet. In eval mode there is no noise.

Shazeer et al. 2017, "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
Layer", Eq. 3 to 5. Departures: the balance loss is MoEP's, instead of their two (Eq. 7, Eq. 11), and
v starts as small as all of MoEP's maps, not at 0: the scale starts near softplus(0) = 0.69.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from moep import MoEP, MoEPConfig, Router


class NoisyRouter(Router):
    def __init__(self, d, n_choices, config):
        super().__init__(d, n_choices, config)
        self.noise = nn.Linear(d, n_choices, bias=False)        # v
        nn.init.normal_(self.noise.weight, std=0.02)

    def forward(self, x_ND):
        with torch.autocast(x_ND.device.type, enabled=False):   # in bfloat16 close scores would tie
            x_ND = x_ND.to(self.linear.weight.dtype)
            score_NE = self.linear(x_ND)
            if self.training:
                score_NE = score_NE + torch.randn_like(score_NE) * F.softplus(self.noise(x_ND))
        order_NE = score_NE.argsort(descending=True, stable=True)
        choice_NK = order_NE[:, :self.config.top_k]
        gate_NK = score_NE.gather(1, choice_NK).softmax(-1)     # p / sum(p) over the chosen
        return gate_NK, choice_NK, dict(balance=self.balance_loss(score_NE.softmax(-1), choice_NK))


class NoisyMoEP(MoEP):
    router = NoisyRouter


Config, Model = MoEPConfig, NoisyMoEP                    # what train.py looks for
