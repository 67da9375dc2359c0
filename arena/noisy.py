"""
Noisy top-k: a router that explores, and learns how much.

    h_i = score_i + n_i * softplus(v_i x)    n_i from N(0, 1), drawn anew for each token
    choice and gates from h as in the model's own router

Without noise, a choice that starts badly is not taken, so it is not trained, and stays bad. With
noise every choice is tried now and then. The scale of the noise has its own weights v: where the
router is sure, it can learn to be quiet. In eval mode there is no noise.

Shazeer et al. 2017, "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
Layer", Eq. 3 to 5. Departures: the balance loss is the model's, instead of their two (Eq. 7, Eq.
11). In MoEP v starts as small as all its maps, not at 0; the scale starts near softplus(0) = 0.69.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from moep import MoEP, MoEPConfig, Router


class NoisyScores:
    """A mixin: it goes before the Router of any model."""
    def __init__(self, d, n_choices, *args):
        super().__init__(d, n_choices, *args)
        self.noise = nn.Linear(d, n_choices, bias=False)        # v
        nn.init.zeros_(self.noise.weight)

    def score(self, x_ND):
        score_NE = super().score(x_ND)
        if self.training:
            with torch.autocast(x_ND.device.type, enabled=False):
                scale_NE = F.softplus(self.noise(x_ND.to(self.noise.weight.dtype)))
            score_NE = score_NE + torch.randn_like(score_NE) * scale_NE
        return score_NE


class NoisyRouter(NoisyScores, Router):
    def __init__(self, d, n_choices, config):
        super().__init__(d, n_choices, config)
        nn.init.normal_(self.noise.weight, std=0.02)


class NoisyMoEP(MoEP):
    router = NoisyRouter


Config, Model = MoEPConfig, NoisyMoEP                    # what train.py looks for
