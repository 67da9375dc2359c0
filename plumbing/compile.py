"""torch.compile, one layer class at a time; layers whose activations backward computes again."""

import copy
import types

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


# ---- The layers of a model ----------------------------------------------------------------------

def blocks(model, least=1):
    """The model's layers: modules with a matrix, in ModuleLists of at least `least` modules."""
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    members = [block for modules in lists if len(modules) >= least for block in modules]
    has_matrix = lambda block: any(p.dim() > 1 for p in block.parameters())
    return [b for b in members if has_matrix(b) and not isinstance(b, nn.ModuleDict)]  # no forward


def recompute_blocks(model):
    """Keep only the arguments of each block, and run it again in backward."""
    for block in blocks(model):
        block.forward = recompute(block.forward)


def recompute(forward):
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


# ---- torch.compile ------------------------------------------------------------------------------

# These cost more than they save here. The fused gradients of norms were four times as slow, the
# one-pass softmax twice. Autotuning compiles and times variants of small kernels, to no effect.
SLOW_OPTIONS = {'triton.mix_order_reduction', 'online_softmax', 'triton.autotune_pointwise'}
# A router turns autocast off. Torch caches what it compiles of such a graph only if told to.
CACHEABLE = {'torch.amp.autocast_mode._enter_autocast': '1',
             'torch.amp.autocast_mode._exit_autocast': '1'}


def compile_model(model, recomputed=False):
    """-> a twin of the model that shares its weights. Its layers are compiled, each kind once, and
    what lies between them by itself. The model stays as it is: it evaluates and samples uncompiled.
    recomputed: backward runs the compiled layers again.
    A model whose lists hold no ...Block or ...Layer, but parts of them, is compiled as a whole."""
    from torch._functorch import config as functorch     # torch imports it late
    functorch.autograd_cache_allow_custom_autograd_functions = True
    options = dict.fromkeys(SLOW_OPTIONS & {*torch._inductor.list_options()}, False)
    options['unsafe_marked_cacheable_functions'] = CACHEABLE
    if model.config.vocab_size % 8 == 0:             # padded products are timed first: a slow start
        options['shape_padding'] = False             # (with 50,257 tokens they bring GPT-2 80%)
    if torch.are_deterministic_algorithms_enabled():
        options['deterministic'] = True              # choose no kernel by a race
    if 'inductor_choices_class' in torch._inductor.list_options():
        options['inductor_choices_class'] = full_rows
    compiled = lambda fn: torch.compile(fn, dynamic=False, options=options)
    # Also what a part keeps, such as a router's loss: a tensor with its graph cannot be copied.
    kept = [value for part in model.modules() for value in vars(part).values()]
    tensors = (*model.parameters(), *model.buffers(), *filter(torch.is_tensor, kept))
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    is_layer = lambda block: type(block).__name__.endswith(('Block', 'Layer'))
    forwards = {}
    for layer in filter(is_layer, blocks(twin)):
        kind = type(layer)
        if kind not in forwards:
            forward = compiled(kind.forward)
            forwards[kind] = untraced(recompute(forward) if recomputed else forward)
        layer.forward = types.MethodType(forwards[kind], layer)
    return compiled(twin.train())


def untraced(compiled):
    """Keep callers from tracing into it. (disable(compiled) would turn off its compilation.)"""
    return torch.compiler.disable(lambda *args, **kwargs: compiled(*args, **kwargs))


def full_rows():
    """Torch's choices, but for one: a kernel that adds up rows of up to 1,024 numbers holds the
    full row. Otherwise it may store a row in parts and read it back before all threads have stored
    theirs (triton-lang/triton#10924). That ruined gradients of arena/dense.py's experts."""
    from torch._inductor.choices import InductorChoices, V

    class FullRows(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features, cooperative_reduction):
            usual = InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)
            is_short = V.graph.sizevars.statically_known_leq(features.reduction_numel, 1024)
            across = 'OUTER' in str(features.get_reduction_hint())
            return usual or bool(is_short) and not across and not cooperative_reduction

        def uuid(self):
            return 'full rows'                          # for the key of torch's cache

    return FullRows()
