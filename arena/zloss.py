"""
Router z-loss: a router that is punished for large scores.

    choice and gates as in the model's own router
    z = mean over tokens of (log sum_i exp score_i)^2

A constant added to all scores does not change their softmax, so nothing stops the scores from
growing. Large scores round badly, and a softmax of large differences passes no gradient on. The
loss pulls log sum exp towards 0, where the exp score_i already sum to 1.

Zoph et al. 2022, "ST-MoE: Designing Stable and Transferable Sparse Expert Models", Eq. 5, where its
weight is 0.001. The model sums it as it sums its other losses: `z` in ModuleFormer; in MoEP
`block_z` of the parallel layers and `expert_z` of shrink and grow.
"""

from moep import MoEP, MoEPConfig, Router


class ZLoss:
    """A mixin: it goes before the Router of any model."""
    def weigh(self, score_NE, choice_NK):
        gate_NK, losses = super().weigh(score_NE, choice_NK)
        losses['z'] = score_NE.logsumexp(-1).square().mean()
        return gate_NK, losses


class ZLossRouter(ZLoss, Router):
    pass


class ZLossMoEP(MoEP):
    router = ZLossRouter


Config, Model = MoEPConfig, ZLossMoEP                    # what train.py looks for
