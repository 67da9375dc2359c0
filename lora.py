"""
LoRA (Hu et al. 2021): train low-rank changes of a model's linear maps, and nothing else.

    add_lora(model, rank=8, alpha=16)         # every linear map is now W + alpha/rank * A B; only A and B train
    merge_lora(model)                         # the sums become the weights: a plain model again

    python train.py --init_from=out/moep --surgery=lora.add_lora --surgery_args="{'rank': 4}" --out_dir=out/moep_lora
    python train.py --init_from=out/moep_lora --surgery=lora.merge_lora --max_iters=0 --out_dir=out/moep_merged

It knows no model: an adapted map is the weight of an nn.Linear or a stacked parameter (E, in, out), of which every expert
gets factors of its own. Not the vocabulary's head: neither a module of that name nor a weight that two modules share.
B starts at zero, so that an adapted model begins as exactly the model it was.

What to look at first: `LowRank.forward`. The sum is made in the space of weights, when a weight is read, and not beside
the map in the space of activations: stacked experts have no module that could be wrapped, their rows pass through one
grouped matrix product. Names stay as they are: `qkv.weight` is the frozen weight, `qkv.lora.weight.a` is new beside it.

A departure: the original drops inputs of the adapter at random for each token. A sum of weights is the same for all
tokens, so here an input channel is dropped for a whole forward pass (of each map, and of each expert, separately).
"""

import functools
import math
import re
from collections import Counter

import torch
import torch.nn as nn
import torch.nn.functional as F


class LowRank(nn.Module):
    """The factors of one map: a (in, rank) and b (rank, out), or a stack of each."""

    def __init__(self, weight, rank, alpha, dropout):
        super().__init__()
        *stack, d_in, d_out = weight.shape if weight.dim() == 3 else weight.T.shape    # nn.Linear holds (out, in)
        self.scale, self.dropout = alpha / rank, dropout
        self.a = nn.Parameter(weight.new_empty(*stack, d_in, rank).uniform_(-1 / math.sqrt(d_in), 1 / math.sqrt(d_in)))
        self.b = nn.Parameter(weight.new_zeros(*stack, rank, d_out))

    def forward(self, weight):
        a = self.a
        if self.training and self.dropout:
            a = a * F.dropout(a.new_ones(*a.shape[:-1], 1), self.dropout)       # one channel in or out, for all tokens
        with torch.autocast(a.device.type, enabled=False):      # small, and added to a weight: in the weight's precision
            change = self.scale * (a @ self.b)
        return weight + (change if weight.dim() == 3 else change.mT)


@functools.cache
def adapted_class(cls, names):
    """A subclass whose parameters of these names are read with their change added. It has no state of its own, so that
    copies of a model may share it; the parameters stay where they were, under their own names and in their own order."""
    def read(name):
        return property(lambda module: module.lora[name](module._parameters[name]))
    return type(f'LoRA{cls.__name__}', (cls,), {'plain': cls, **{name: read(name) for name in names}})


def linear_maps(model):
    """[(module, its parameter's name, the full name), ...] of every weight that can be adapted."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    return [(module, name, f'{path}.{name}'.lstrip('.')) for path, module in model.named_modules()
            for name, p in module._parameters.items() if p is not None and owners[id(p)] == 1
            and (p.dim() == 3 or isinstance(module, nn.Linear) and name == 'weight')]


def add_lora(model, rank=8, alpha=16, dropout=0.1, only=None, also=None):
    """Adapters on all linear maps but the head, or on those whose full name (parallel.0.qkv, last.0.fc.weight) holds the
    pattern `only`, which may name the head too. Everything else is frozen, but for parameters whose name holds the pattern
    `also` (as 'wte|head'), which train as they are -> the same model, changed in place."""
    if hasattr(model, 'adapted'):
        raise ValueError('the model has adapters already; merge them first (merge_lora)')
    if not (isinstance(rank, int) and rank >= 1 and alpha > 0 and 0 <= dropout < 1):
        raise ValueError(f'rank = {rank}, alpha = {alpha}, dropout = {dropout}: rank is a whole number of at least 1, '
                         'alpha more than 0, dropout at least 0 and less than 1')
    maps = linear_maps(model)
    try:
        chosen = [entry for entry in maps if (re.search(only, entry[2]) if only is not None
                                              else 'head' not in entry[2].split('.')[-2:])]
        whole = [p for name, p in model.named_parameters() if also is not None and re.search(also, name)]
    except re.error as e:
        raise ValueError(f"'{e.pattern}' is not a regular expression: {e}") from None
    if not chosen:
        raise ValueError(f"no linear map has a name that matches '{only}'; there are {', '.join(m[2] for m in maps)}")
    if also is not None and not whole:
        raise ValueError(f"no parameter has a name that matches also = '{also}'")
    model.requires_grad_(False)
    for p in whole:
        p.requires_grad_(True)
    for module in dict.fromkeys(module for module, _, _ in chosen):
        names = tuple(name for owner, name, _ in chosen if owner is module)
        lora = nn.ModuleDict({name: LowRank(getattr(module, name), rank, alpha, dropout) for name in names})
        module.lora = lora.train(module.training)
        module.__class__ = adapted_class(type(module), names)
    settings = dict(rank=rank, alpha=alpha, dropout=dropout, only=only, also=also)
    model.adapted = [('lora.add_lora', settings)]        # how to rebuild it
    return model


@torch.no_grad()
def merge_lora(model):
    """The changes become part of the weights, and everything trains again -> the same model, changed in place."""
    if not hasattr(model, 'adapted'):
        raise ValueError('the model has no adapters to merge')
    for module in [module for module in model.modules() if hasattr(type(module), 'plain')]:
        for name, change in module.lora.eval().items():
            module._parameters[name].copy_(change(module._parameters[name]))
        del module.lora
        module.__class__ = module.plain
    del model.adapted
    return model.requires_grad_(True)
