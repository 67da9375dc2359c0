"""
FLOPs per token, as tools.bench and tools.arena count them: in a forward 2 for each active parameter
and, for causal attention, 4 per unit of its width and earlier token. Backward takes twice as many.
"""

from plumbing.cli import UserError
from plumbing.models import import_model

ATTENTION = {          # the width of a token's query heads in all layers; add your model's here
    'nanogpt_model': lambda c: c.n_layer * c.n_embd,
    'moep': lambda c: c.n_layer * c.n_embd + c.n_parallel * c.n_block * c.n_embd_parallel,
    'papaformer': lambda c: c.n_layer * c.n_embd + c.n_parallel * sum(c.path_embd),
    'moduleformer': lambda c: c.n_layer * c.top_k * c.d_att,
    'selfmoe': lambda c: c.n_layer * c.n_embd,
    'stlm': lambda c: c.n_layer * c.n_embd,
    'strong': lambda c: c.n_layer * c.n_embd,
    'stlm_depth': lambda c: c.n_embd * (       # a routed layer attends among a share of the tokens
        c.n_layer - (1 - c.capacity ** 2) * (c.n_layer // c.route_every))}


def training_flops(name, config, active, T):
    """Of the model file `name`, at a context of T. A subclass of a known model counts as that model."""
    kinds = [name]
    if name not in ATTENTION:
        kinds = [kind.__module__ for kind in import_model(name).Model.__mro__]
    known = [kind for kind in kinds if kind in ATTENTION]
    if not known:
        raise UserError(f'tools/flops.py cannot count the attention of {name}: add to ATTENTION '
                        f'a line such as \'{name}\': lambda c: c.n_layer * c.n_embd')
    return 6 * active + 6 * ATTENTION[known[0]](config) * T          # T / 2 earlier tokens
