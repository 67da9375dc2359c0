"""ModuleFormer with the load balancing loss of the Switch Transformer beside its own."""

import torch.nn.functional as F

from moduleformer import ModuleFormer, ModuleFormerConfig, Router


class SwitchRouter(Router):
    def weigh(self, score_NE, choice_NK):
        gate_NK, losses = super().weigh(score_NE, choice_NK)
        share_E = F.one_hot(choice_NK, self.n_choices).float().mean((0, 1))     # of the picks
        losses['switch'] = self.n_choices * (share_E * score_NE.softmax(-1).mean(0)).sum()
        return gate_NK, losses


class SwitchModuleFormer(ModuleFormer):
    router = SwitchRouter


Config, Model = ModuleFormerConfig, SwitchModuleFormer   # what train.py looks for
