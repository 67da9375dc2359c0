"""
What turns an exercise green. Each has a file here, with its checks, a hint, and where the project
does the same. Spoiler: what a check compares with is often the answer, as a slow loop.

A check takes the exercise's module. Its docstring says what it asks for, the message of `expect`
what to look at. Tensors are tiny, and float64 where gradients are compared.
"""

import torch


def expect(is_right, message):
    if not is_right:
        raise AssertionError(message)


def returned(result, *shapes):
    """What a function of the exercise has returned, if these are tensors of these shapes."""
    expect(result is not None, 'the function returns None: is a return missing?')
    results = result if isinstance(result, (tuple, list)) else (result,)
    expect(len(results) == len(shapes), f'{len(shapes)} results are asked for, not {len(results)}')
    for value, shape in zip(results, shapes):
        expect(torch.is_tensor(value), f'a result is a {type(value).__name__}, not a tensor')
        expect(value.shape == shape, f'a result has the shape {tuple(value.shape)}, not {shape}')
    return results if len(results) > 1 else results[0]


def same(a, b):
    return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5)


def numbers(tensor):
    return [round(value, 3) for value in tensor.flatten().tolist()]


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def gradient(f, *inputs):
    """Of a scalar f(*inputs), by autograd: a tensor, or one for each of several inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = f(*inputs)
    found = [None] * len(inputs)
    if y.requires_grad:
        found = torch.autograd.grad(y, inputs, allow_unused=True)
    expect(all(x is not None for x in found),
           'no gradient flows back: look for detach, .data, .item(), torch.tensor, no_grad; '
           'argmax and one_hot also have none')
    return found if len(found) > 1 else found[0]


def slope(f, x, step=1e-6):
    """The gradient by finite differences."""
    found = torch.zeros_like(x)
    for i in range(x.numel()):
        change = torch.zeros_like(x)
        change.view(-1)[i] = step
        found.view(-1)[i] = (f(x + change) - f(x - change)) / (2 * step)
    return found
