import math

import torch

from lab.checks import expect, gradient, numbers, randn, returned, same

HINT = """
To count: zeros (N, E), a 1 at each choice (scatter along dimension 1), the mean over tokens,
divided by K. Or bincount of all N*K choices. p is prob_NE.mean(0).
The entropy is largest when all choices are used alike, and descent makes a loss small. With
clamp(min=1e-9) before the logarithm, 0 * log 0 is not nan."""
PLACES = ['moep.py, Router.balance_loss']


def slow_switch(prob_NE, choice_NK):
    (N, E), K = prob_NE.shape, choice_NK.size(1)
    total = 0
    for i in range(E):
        f = choice_NK.flatten().tolist().count(i) / (N * K)
        p = sum(prob_NE[n, i] for n in range(N)) / N
        total = total + f * p
    return E * total


def switch_example(ex):
    """switch_loss of the example is 1.65"""
    prob = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.1, 0.4]])
    loss = returned(ex.switch_loss(prob, torch.tensor([[0], [0]])), ()).item()
    expect(abs(loss - 1.65) < 1e-4,
           f'the loss of the example is {loss:.3f}, not 1.65: look at the sign, the factor E, '
           'and f, which counts what was taken')


def switch_of_two(ex):
    """switch_loss at K = 2: 1 if balanced"""
    prob, choice = torch.full((4, 4), 0.25), torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    loss = returned(ex.switch_loss(prob, choice), ()).item()
    expect(abs(loss - 1) < 1e-4,
           f'balanced, with K = 2, the loss is {loss:.2f}, not 1: f is a share of all N*K picks')
    prob = randn(6, 4).softmax(-1)
    choice = prob.topk(2).indices
    loss, wanted = ex.switch_loss(prob, choice).item(), slow_switch(prob, choice).item()
    expect(abs(loss - wanted) < 1e-4,
           f'for K = 2 and random probabilities the loss is {loss:.3f}, not {wanted:.3f}: '
           'f counts all K choices of a token')


def switch_gradient(ex):
    """switch_loss: the gradient flows through p, not through f"""
    score = randn(6, 4)
    choice = score.topk(2).indices
    found = gradient(lambda x: ex.switch_loss(x.softmax(-1), choice), score)
    wanted = gradient(lambda x: slow_switch(x.softmax(-1), choice), score)
    expect(same(found, wanted),
           f'the gradient of a token is {numbers(found[0])}, not {numbers(wanted[0])}: '
           'f is counted from the choices, p is the mean of the probabilities')


def shares_after(loss_of):
    """A router that prefers choice 0 of 4 descends on a loss -> the mean probability of each."""
    score, bias = randn(64, 4), torch.tensor([1.5, 0, 0, 0], dtype=torch.float64)
    for _ in range(100):
        bias = bias - gradient(lambda b: loss_of((score + b).softmax(-1)), bias)
    return (score + bias).softmax(-1).mean(0)


def switch_balances(ex):
    """a router that minimises switch_loss uses all its choices"""
    shares = shares_after(lambda prob: ex.switch_loss(prob, prob.topk(1).indices))
    expect(shares.max() < 0.5,
           f'after 100 steps the mean probabilities are {numbers(shares)}: minimising your loss '
           'collapses the router. Look at its sign')


def entropy_value(ex):
    """entropy_loss is the entropy of p, up to its sign"""
    prob = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    size = abs(returned(ex.entropy_loss(prob), ()).item())
    expect(abs(size - math.log(2)) < 1e-3,
           f'tokens of (1, 0) and (0, 1) have p = (0.5, 0.5), so 0.693, not {size:.3f}: '
           'take the mean over tokens first, then the entropy. Or is your epsilon too large?')


def entropy_of_zero(ex):
    """entropy_loss: the loss and its gradient are finite even if a p_i is 0"""
    prob = torch.tensor([[1.0, 0.0]])
    loss = returned(ex.entropy_loss(prob), ()).item()
    expect(abs(loss) < 1e-3,
           f'p = (1, 0) gives {loss:.3f}, not 0: mind 0 * log 0, and keep an epsilon small')
    slopes = gradient(ex.entropy_loss, prob)
    expect(slopes.isfinite().all(), f'at p = (1, 0) the gradient is {numbers(slopes)}: mind log 0')


def entropy_balances(ex):
    """a router that minimises entropy_loss uses all its choices"""
    shares = shares_after(ex.entropy_loss)
    expect(shares.max() < 0.5,
           f'after 100 steps the mean probabilities are {numbers(shares)}: minimising your loss '
           'collapses the router. That is the printed sign')


CHECKS = [switch_example, switch_of_two, switch_gradient, switch_balances,
          entropy_value, entropy_of_zero, entropy_balances]
