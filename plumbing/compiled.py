"""torch.compile, one layer class at a time, so that equal layers are compiled only once."""

import copy
import types
import warnings

import torch

from plumbing.shard import blocks

# These cost more than they save here. The fused gradients of norms were four times as slow, the
# one-pass softmax twice. Autotuning compiles and times variants of small kernels, to no effect.
OFF = {'triton.mix_order_reduction', 'online_softmax', 'triton.autotune_pointwise'}
# A router turns autocast off. Torch caches what it compiles of such a graph only if told to.
CACHED = {f'torch.amp.autocast_mode.{name}': '1' for name in ('_enter_autocast', '_exit_autocast')}


def compile_model(model, whole=False):
    """-> a twin of the model that shares its weights. Its layers are compiled, each kind once, and
    what lies between them by itself. The model stays as it is: it evaluates and samples uncompiled.
    As a whole it compiles for longer, and a step is up to 5% faster (docs/speed.md).
    A model whose lists hold no ...Block or ...Layer, but parts of them, is compiled as a whole."""
    warnings.filterwarnings('ignore', 'Torchinductor does not support code generation for complex')
    from torch._functorch import config as functorch     # torch imports it late
    functorch.autograd_cache_allow_custom_autograd_functions = True
    options = dict.fromkeys(OFF & {*torch._inductor.list_options()}, False)
    options['unsafe_marked_cacheable_functions'] = CACHED
    if model.config.vocab_size % 8 == 0:             # padded products are timed first: a slow start
        options['shape_padding'] = False             # (with 50,257 tokens they bring GPT-2 80%)
    if 'inductor_choices_class' in torch._inductor.list_options():
        options['inductor_choices_class'] = whole_rows
    compiled = lambda fn: torch.compile(fn, dynamic=False, options=options)
    # Also what a part keeps, such as a router's loss: a tensor with its graph cannot be copied.
    kept = [value for part in model.modules() for value in vars(part).values()]
    tensors = (*model.parameters(), *model.buffers(), *filter(torch.is_tensor, kept))
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    is_layer = lambda block: type(block).__name__.endswith(('Block', 'Layer'))
    layers = [] if whole else filter(is_layer, blocks(twin))
    forwards = {}
    for layer in layers:
        kind = type(layer)
        if kind not in forwards:
            forwards[kind] = untraced(compiled(kind.forward))
        layer.forward = types.MethodType(forwards[kind], layer)
    return compiled(twin.train())


def untraced(compiled):
    """Keep callers from tracing into it. (disable(compiled) would also turn off its compilation.)"""
    return torch.compiler.disable(lambda *args, **kwargs: compiled(*args, **kwargs))


def whole_rows():
    """Torch's choices, but for one: a kernel that adds up rows of up to 1,024 numbers holds each row
    whole. Otherwise it may store a row in parts and read it back before all threads have stored theirs
    (triton-lang/triton#10924). That ruined gradients of strong.py's experts: docs/arena.md."""
    from torch._inductor.choices import InductorChoices, V

    class WholeRows(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features, cooperative_reduction):
            usual = InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)
            is_short = V.graph.sizevars.statically_known_leq(features.reduction_numel, 1024)
            across = 'OUTER' in str(features.get_reduction_hint())
            return usual or bool(is_short) and not across and not cooperative_reduction

        def uuid(self):
            return 'whole rows'                          # for the key of torch's cache

    return WholeRows()
