"""
Parts of tools.check: what numbers are, and the routers of a model. If the model's class
names the class of its routers, as in moep.py, moduleformer.py, strong.py and arena/, they return
gates, choices and a dict of losses.
"""

import torch

from plumbing.cli import UserError


def same(a, b, least=0.0):
    """Up to the rounding of float32, of numbers as large as the largest of a, or as `least`; -inf,
    the logit of what is impossible, equals -inf."""
    return torch.allclose(a, b, rtol=0, atol=1e-4 * max(least, a[a.isfinite()].abs().max().item()))


def is_number(value):
    """What train.py can add to the loss, or log."""
    return torch.is_tensor(value) and value.dim() == 0 and bool(value.isfinite())


def find_routers(model):
    """{name: router}"""
    kind = getattr(type(model), 'router', ())
    return {name: part for name, part in model.named_modules() if isinstance(part, kind)}


def choices(model, x):
    """{name without .router: choices (N, K)}"""
    found = {}
    for name, router in find_routers(model).items():
        name = name.removesuffix('.router')
        router.register_forward_hook(lambda _, __, out, name=name: found.update({name: out[1]}))
    model.features(x)
    return found


def watch_outputs(model):
    """A router that returns the wrong thing is told as such, before the model fails over it."""
    def look(router, args, out):
        size = len(args[0]), model.config.top_k
        parts = out if isinstance(out, (tuple, list)) else [out]
        given = [tuple(each.shape) if hasattr(each, 'shape') else type(each).__name__ for each in parts]
        if given != [size, size, 'dict']:
            shapes = ', '.join(map(str, given[:4]))
            raise UserError(
                f'{type(router).__name__}.forward returned {shapes}; it must return gates '
                f'and choices, both (N, top_k) = {size}, and a dict of losses (docs/routers.md)')
        if out[1].dtype != torch.long:
            raise UserError(f'{type(router).__name__}.forward returned choices of {out[1].dtype}; they are '
                            'indices, torch.int64, and come after the gates')
    for router in find_routers(model).values():
        router.register_forward_hook(look)


def largest_gradient(model):
    return max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)


def only_auxiliary(model, x, y):
    """Names a parameter that the loss itself does not reach, as in a router whose gates are detached,
    or always 1. '' if there is none."""
    model.zero_grad()
    model.train()(x, y)[1].backward()
    least = 1e-6 * largest_gradient(model)               # less is rounding
    alone = []
    for name, p in model.named_parameters():
        if p.requires_grad and (p.grad is None or p.grad.abs().max() < least):
            alone.append(name)
    if not alone:
        return ''
    return f'; from an auxiliary loss alone: {alone[0]} ({len(alone)} in all)'
