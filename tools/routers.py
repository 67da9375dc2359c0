"""
The routers of a model, for tools.check. If the model's class names the class of its routers, as in
moep.py, moduleformer.py, strong.py and arena/, they return gates, choices and a dict of losses.
"""

from plumbing.cli import UserError


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
        given = [tuple(each.shape) if hasattr(each, 'shape') else type(each).__name__ for each in out]
        if given != [size, size, 'dict']:
            shapes = ', '.join(map(str, given[:4]))
            raise UserError(
                f'{type(router).__name__}.forward returned {shapes}; it must return gates '
                f'and choices, both (N, top_k) = {size}, and a dict of losses (docs/routers.md)')
    for router in find_routers(model).values():
        router.register_forward_hook(look)
