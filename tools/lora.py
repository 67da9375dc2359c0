r"""
LoRA (Hu et al. 2021): train low-rank changes of a model's linear maps, and nothing else.

    add_lora(model, rank=8, alpha=16)   # every linear map is W + alpha/rank * A B; only A, B train
    merge_lora(model)                   # the sums become the weights: a plain model again

    python -m tools.surgery add_lora out/moep --rank 4 --out out/adapters
    python train.py --init_from=out/adapters --data=toy_math --out_dir=out/moep_lora
    python -m tools.surgery merge_lora out/moep_lora --out out/moep_merged

It works for any model: an adapted map is the weight of an nn.Linear, or a stacked parameter
(E, in, out), in which every expert gets its own A and B. The output head gets none (a module named
`head`, or a weight that two modules share). B starts at zero, so an adapted model starts
equal to the original. Other parameters (Self-MoE's matrix gates, the module embeddings of
ModuleFormer's routers) are frozen and get no adapter; name them in `also` to train them.

What to look at first: `LowRank.forward`. The change is added to the weight whenever the weight is
read, not to the map's output, because stacked experts have no module that could be wrapped: their
tokens pass through one grouped matrix product. Names stay as they are: `qkv.weight` is the frozen
weight, `qkv.lora.weight.a` is new beside it.

Departures: A is (in, rank) and B (rank, out), the original's transposed. The original drops inputs
of the adapter at random for each token. Here the change is part of a weight, one for all tokens, so
an input channel is dropped for a whole forward pass (separately for each map and each expert).
"""

import functools
import math
import re
from collections import Counter

import torch
import torch.nn as nn
import torch.nn.functional as F


class LowRank(nn.Module):
    """The change of one map: factors a (in, rank) and b (rank, out), or a stack of each."""

    def __init__(self, weight, rank, alpha, dropout):
        super().__init__()
        if weight.dim() == 2:
            weight = weight.T                            # nn.Linear holds (out, in)
        *stack, d_in, d_out = weight.shape
        bound = 1 / math.sqrt(d_in)                      # nn.Linear's own
        self.scale = alpha / rank
        self.dropout = dropout
        self.a = nn.Parameter(weight.new_empty(*stack, d_in, rank).uniform_(-bound, bound))
        self.b = nn.Parameter(weight.new_zeros(*stack, rank, d_out))

    def forward(self, weight):
        if hasattr(weight, 'full_tensor'):               # sharded: FSDP reads it, no map does
            return weight
        a = self.a
        if self.training and self.dropout:
            channels = a.new_ones(*a.shape[:-1], 1)      # each kept or dropped, for all tokens
            a = a * F.dropout(channels, self.dropout)
        with torch.autocast(a.device.type, enabled=False):       # small: in the weight's precision
            change = self.scale * (a @ self.b)
        return weight + (change if weight.dim() == 3 else change.mT)


@functools.cache
def adapted_class(cls, names):
    """A subclass of cls in which each of these names is a property: the parameter plus its change.
    Python finds a property before it asks nn.Module.__getattr__ for a parameter, which stays in
    _parameters under its own name. Cached: all modules of a class, and copies, share one."""
    def with_change(name):
        return property(lambda module: module.lora[name](module._parameters[name]))
    properties = {name: with_change(name) for name in names}
    return type(f'LoRA{cls.__name__}', (cls,), {'plain': cls, **properties})


def linear_maps(model):
    """{full name: (module, the parameter's own name)} of every weight that can be adapted."""
    owners = Counter()                                   # how many modules hold a parameter
    for module in model.modules():
        owners.update(module.parameters(recurse=False))
    maps = {}
    for path, module in model.named_modules():
        for full_name, p in module.named_parameters(path, recurse=False):
            name = full_name.split('.')[-1]
            of_linear = isinstance(module, nn.Linear) and name == 'weight'
            tied = owners[p] > 1                         # an adapter would untie it
            if (of_linear or p.dim() == 3) and not tied:
                maps[full_name] = (module, name)
    return maps


def add_lora(model, rank=8, alpha=16, dropout=0.1, only=None, also=None):
    """Add adapters to all linear maps but the head, and freeze everything else -> the same model,
    changed in place. `only`, a pattern, restricts this to the maps whose full name (parallel.0.qkv,
    last.0.fc.weight) matches; these may include the head. Parameters whose name matches the pattern
    `also` (for example 'wte|head') are not frozen."""
    maps = linear_maps(model)
    if only is None:
        is_head = lambda name: 'head' in name.split('.')[-2:]            # head.weight, head
        chosen = [name for name in maps if not is_head(name)]
    else:
        chosen = [name for name in maps if re.search(only, name)]
    assert chosen, f"no linear map has a name that matches '{only}'; there are {', '.join(maps)}"

    for name, p in model.named_parameters():
        p.requires_grad_(also is not None and bool(re.search(also, name)))
    by_module = {}                               # {module: the names of its chosen parameters}
    for module, name in [maps[full_name] for full_name in chosen]:
        by_module.setdefault(module, []).append(name)
    for module, names in by_module.items():
        changes = {name: LowRank(getattr(module, name), rank, alpha, dropout) for name in names}
        module.lora = nn.ModuleDict(changes).train(module.training)
        module.__class__ = adapted_class(type(module), tuple(names))
    settings = dict(rank=rank, alpha=alpha, dropout=dropout, only=only, also=also)
    model.adapted = [('add_lora', settings)]             # how to rebuild the adapted model
    return model


@torch.no_grad()
def merge_lora(model):
    """Add the changes to the weights for good, and unfreeze all -> the same model, changed in
    place."""
    assert hasattr(model, 'adapted'), 'the model has no adapters to merge'
    adapted = [module for module in model.modules() if hasattr(type(module), 'plain')]
    for module in adapted:
        for name, change in module.lora.eval().items():  # eval: no dropout
            weight = module._parameters[name]
            weight.copy_(change(weight))
        del module.lora
        module.__class__ = module.plain
    del model.adapted
    return model.requires_grad_(True)


surgeries = [add_lora, merge_lora]                       # what tools/surgery.py offers
