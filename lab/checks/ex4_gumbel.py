from unittest import mock

import torch
import torch.nn.functional as F

from lab.checks import expect, gradient, numbers, randn, returned, same, slope

HINT = """
You need a tensor with the value of one and the gradient of another. soft.detach() has the value of
`soft` and no gradient, so soft - soft.detach() is 0 with the gradient of `soft`. Add it to what
you want to have.
F.one_hot(index, n) returns integers: convert them to the dtype of the logits."""
PLACES = ['papaformer.py, Router.forward']


def weights_of(ex, logits, noise, temperature, training):
    ready_made = AssertionError('F.gumbel_softmax does it, but here you write it yourself')
    with mock.patch.object(F, 'gumbel_softmax', side_effect=ready_made):
        weights = ex.straight_through(logits, noise, temperature, training)
    weights = returned(weights, tuple(logits.shape))
    expect(weights.dtype == logits.dtype,
           f'the weights are {weights.dtype}, not {logits.dtype} like the logits')
    return weights


def is_one_hot(weights):
    two_largest = weights.sort(-1).values[:, -2:]
    return same(two_largest, torch.tensor([0.0, 1.0]).expand_as(two_largest))


def noise_is_gumbel(ex):
    """gumbel_noise is -log(-log(u))"""
    noise = returned(ex.gumbel_noise(torch.tensor([0.1, 0.5, 0.9])), (3,))
    expect(same(noise, torch.tensor([-0.83403, 0.36651, 2.25037])),
           f'u = 0.1, 0.5, 0.9 give {numbers(noise)}, not [-0.834, 0.367, 2.25]: '
           'there are two logarithms and two signs')


def weights_are_one_hot(ex):
    """in training the weights are one-hot"""
    weights = weights_of(ex, randn(6, 4), randn(6, 4), 1.0, training=True)
    expect(is_one_hot(weights),
           f'the weights that go forward are {numbers(weights[0])}, not one-hot: '
           'the soft weights are for backward alone')


def largest_sum_is_taken(ex):
    """in training the largest sum of logit and noise is taken"""
    logits, noise = randn(6, 4), randn(6, 4)
    weights = weights_of(ex, logits, noise, 1.0, training=True)
    expect(weights.argmax(-1).equal((logits + noise).argmax(-1)),
           f'logits + noise are {numbers((logits + noise)[0])}, the weights {numbers(weights[0])}: '
           'take the largest sum, not the largest logit')


def choices_are_samples(ex):
    """with your noise, each choice is taken as often as softmax(logits) says"""
    prob = torch.tensor([0.5, 0.3, 0.2])
    noise = ex.gumbel_noise(torch.rand(20000, 3).clamp(1e-6, 1 - 1e-6))
    weights = weights_of(ex, prob.log().expand(20000, 3), noise, 1.0, training=True)
    shares = weights.argmax(-1).bincount(minlength=3) / 20000
    expect((shares - prob).abs().max() < 0.03,
           f'20,000 tokens take the choices with shares of {numbers(shares)}, not [0.5, 0.3, 0.2]: '
           'look at the noise, and at where it is added')


def gradient_is_soft(ex):
    """in training the gradient is that of the soft weights, at every temperature"""
    logits, noise, w = randn(6, 4), randn(6, 4), randn(6, 4)
    for t in (1.0, 0.5):
        found = gradient(lambda x: (w * weights_of(ex, x, noise, t, training=True)).sum(), logits)
        wanted = slope(lambda x: (w * ((x + noise) / t).softmax(-1)).sum(), logits)
        expect(same(found, wanted),
               f'at temperature {t} the gradient of a token is {numbers(found[0])}, not '
               f'{numbers(wanted[0])}: make it that of softmax((logits + noise) / temperature)')


def eval_repeats(ex):
    """in eval mode there is no noise: one-hot for the largest logit"""
    logits = randn(6, 4)
    weights = weights_of(ex, logits, 5 * randn(6, 4), 1.0, training=False)
    wanted = F.one_hot(logits.argmax(-1), 4)
    expect(is_one_hot(weights), f'in eval mode the weights are {numbers(weights[0])}, not one-hot')
    expect(same(weights, wanted),
           f'in eval mode, logits {numbers(logits[0])} give the weights {numbers(weights[0])}, not '
           f'{wanted[0].tolist()}: the noise is for training alone')


CHECKS = [noise_is_gumbel, weights_are_one_hot, largest_sum_is_taken, choices_are_samples,
          gradient_is_soft, eval_repeats]
