"""
ModuleFormer with the routers of this folder: the same mixins, before its own Router.

`router = 'noisy'`, 'sigmoid', 'bias' or 'zloss' chooses; the file of that name has the idea and its
source. The scores are A ReLU(B x), as in moduleformer.py. What differs from MoEP's routers:

- noisy, zloss: gates are not renormalised, as in moduleformer.py.
- sigmoid, bias: gates are divided by their sum, so that they sum to 1. `mi` and `concentration` are
  computed from the shares s / sum(s) instead of the softmax.
- bias: `mi` does two things. The bias does the first: all modules are used. The second, that a
  token is sure of its K, is left to the language modelling loss. Give `mi` no weight in the config.
"""

from dataclasses import dataclass

from arena.bias import BiasedChoice
from arena.noisy import NoisyScores
from arena.sigmoid import SigmoidGates
from arena.zloss import ZLoss
from moduleformer import ModuleFormer, ModuleFormerConfig, Router


class NoisyRouter(NoisyScores, Router):
    pass


class SigmoidRouter(SigmoidGates, Router):
    pass


class BiasRouter(BiasedChoice, Router):
    pass


class ZLossRouter(ZLoss, Router):
    pass


ROUTERS = dict(noisy=NoisyRouter, sigmoid=SigmoidRouter, bias=BiasRouter, zloss=ZLossRouter)


@dataclass
class RoutersConfig(ModuleFormerConfig):
    router: str = 'noisy'          # noisy | sigmoid | bias | zloss

    def __post_init__(self):
        super().__post_init__()
        assert self.router in ROUTERS, f"router is '{self.router}'; it can be {', '.join(ROUTERS)}"


class RoutersModuleFormer(ModuleFormer):
    def __init__(self, config):
        self.router = ROUTERS[config.router]
        super().__init__(config)


Config, Model = RoutersConfig, RoutersModuleFormer       # what train.py looks for
