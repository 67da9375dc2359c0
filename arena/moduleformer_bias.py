"""
Balance without a loss in ModuleFormer. arena/bias.py has the idea, its sources, and the bias.

    s = sigmoid(A ReLU(B x))      a token takes the K largest of s_i + b_i
    gate_i = s_i / (sum of s over its K)
    after each step:  b_i += 0.001 * sign(mean load - load_i)

The `mi` loss does two things. The bias does the first: all modules are used. The second, that a
token is sure of its K, is left to the language modelling loss. Give `mi` no weight in the config.
"""

from arena.bias import LoadBias
from arena.moduleformer_sigmoid import SigmoidRouter
from moduleformer import ModuleFormer, ModuleFormerConfig


class BiasRouter(SigmoidRouter):
    def __init__(self, n, n_new, config):
        super().__init__(n, n_new, config)
        self.bias = LoadBias(n + n_new, self.B.weight)

    def choose(self, score_NE):
        return self.bias(score_NE.sigmoid(), self.top_k, self.B.weight)


class BiasModuleFormer(ModuleFormer):
    router = BiasRouter


Config, Model = ModuleFormerConfig, BiasModuleFormer     # what train.py looks for
