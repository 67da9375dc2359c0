"""
FLOPs per token, as tools.bench and the arena count them: in a forward 2 for each active parameter
and, for causal attention, 4 per unit of its width and earlier token. Backward takes twice as many.
"""

from plumbing.cli import UserError

ATTENTION = {          # the width of a token's query heads in all layers, by the name of the Config
    'MoEPConfig': lambda c: c.n_layer * c.n_embd + c.n_parallel * c.n_block * c.n_embd_parallel,
    'PaPaformerConfig': lambda c: c.n_layer * c.n_embd + c.n_parallel * sum(c.path_embd),
    'ModuleFormerConfig': lambda c: c.n_layer * c.top_k * c.d_att,
    'SelfMoEConfig': lambda c: c.n_layer * c.n_embd,
    'STLMConfig': lambda c: c.n_layer * c.n_embd,
    'DenseConfig': lambda c: c.n_layer * c.n_embd,
    'STLMDepthConfig': lambda c: c.n_embd * (  # a routed layer attends among a share of the tokens
        c.n_layer - (1 - c.capacity ** 2) * (c.n_layer // c.route_every))}


def training_flops(config, active, T):
    """Return the FLOPs per token at a context of T. A Config counts as the one of ATTENTION that it
    inherits. A subclass whose layers attend otherwise needs a Config and a line of its own."""
    kinds = [kind.__name__ for kind in type(config).__mro__]
    widths = [ATTENTION[kind](config) for kind in kinds if kind in ATTENTION]
    if not widths:
        raise UserError(f'tools/flops.py cannot count the attention of {kinds[0]}: add to '
                        f"ATTENTION a line such as '{kinds[0]}': lambda c: c.n_layer * c.n_embd")
    return 6 * active + 6 * widths[0] * T                # T / 2 earlier tokens
