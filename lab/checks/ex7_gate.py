import torch
import torch.nn as nn

from lab.checks import expect, numbers, returned, same

HINT = """
nn.Parameter(torch.zeros(shape)), where the shape is (d, d), (d,) or (). Only a matrix needs a
matrix product: h @ weight.
G(h) is linear in the weight, so the weight's gradient depends on h, not on the weight: a start at
zero is no trap. In a product a @ b, each factor's gradient contains the other factor. One of them
may be zero, the other must not be."""
PLACES = ['selfmoe.py, Gate', 'selfmoe.py, SelfMoE.states', 'lora.py, LowRank']

SIZES = dict(matrix=16, vector=4, scalar=1)              # weights of each kind, at a width of 4


def some_layer():
    return nn.Linear(4, 4), torch.randn(2, 3, 4)         # a block, and its input


def starts_at_zero(ex):
    """at first a gate returns 0"""
    _, h = some_layer()
    for kind in SIZES:
        most = returned(ex.Gate(kind, 4)(h), (2, 3, 4)).abs().max().item()
        expect(most == 0, f'a new {kind} gate returns up to {most:.3f}: '
                          'its weights must start at 0')


def sizes(ex):
    """a matrix has d * d weights, a vector d, a scalar one"""
    for kind, wanted in SIZES.items():
        found = sum(p.numel() for p in ex.Gate(kind, 4).parameters())
        expect(found == wanted, f'a {kind} gate of width 4 has {found} parameters, not {wanted}: '
                                'is it an nn.Parameter, and is there a bias?')


def gate_learns(ex):
    """at first the gradient of a gate is not 0"""
    block, h = some_layer()
    for kind in SIZES:
        gate = ex.Gate(kind, 4)
        (torch.randn(2, 3, 4) * ex.gated_layer(block, gate, h)).sum().backward()
        moves = [p.grad is not None and p.grad.any() for p in gate.parameters()]
        expect(all(moves), f'no gradient reaches a {kind} gate, so it stays at zero: '
                           'is it a product of two zeros, or detached?')


def gate_computes(ex):
    """a trained gate: a matrix mixes all channels, a vector and a scalar weight them"""
    _, h = some_layer()
    for kind in SIZES:
        gate = ex.Gate(kind, 4)
        for p in gate.parameters():
            nn.init.constant_(p, 0.5)
        wanted = 0.5 * h
        if kind == 'matrix':
            wanted = wanted.sum(-1, keepdim=True).expand_as(h)
        found = returned(gate(h), (2, 3, 4))
        expect(same(found, wanted),
               f'with all weights 0.5, a {kind} gate makes {numbers(found[0, 0])} of '
               f'{numbers(h[0, 0])}, not {numbers(wanted[0, 0])}')


def zero_changes_nothing(ex):
    """where the gate returns 0, the gated layer returns what the block does, bit for bit"""
    block, h = some_layer()
    y = returned(ex.gated_layer(block, torch.zeros_like, h), (2, 3, 4))
    most = (y - block(h)).abs().max().item()
    expect(most == 0, 'with a gate that returns 0, the output differs from block(h) by up to '
                      f'{most:.3f}: is h added twice?')


def gate_reads_input(ex):
    """the gate reads what the block reads, and is added to what the block returns"""
    block, h = some_layer()
    y = returned(ex.gated_layer(block, lambda h: 2 * h, h), (2, 3, 4))
    expect(same(y, block(h) + 2 * h),
           'the output is not block(h) + G(h). Is h added twice? What does the gate read? '
           'It should be the input of the block')


def product_starts_at_zero(ex):
    """low_rank: a @ b is 0 at first"""
    a, b = returned(ex.low_rank(6, 2), (6, 2), (2, 6))
    most = (a @ b).abs().max().item()
    expect(most == 0, f'at first a @ b has entries up to {most:.3f}: one factor must be zero')


def both_factors_learn(ex):
    """low_rank: after two steps of training both factors have moved"""
    a, b = returned(ex.low_rank(6, 2), (6, 2), (2, 6))
    expect(a.requires_grad and b.requires_grad, 'the factors must be parameters: nn.Parameter(...)')
    before = [a.detach().clone(), b.detach().clone()]
    for _ in range(2):
        loss = (a @ b - torch.eye(6)).square().sum()
        for p, grad in zip((a, b), torch.autograd.grad(loss, (a, b))):
            p.data -= 0.1 * grad
    stuck = [name for name, old, new in zip('ab', before, (a, b)) if old.equal(new)]
    expect(not stuck, f"training does not move {' and '.join(stuck)}: if both factors are zero, "
                      'so are both gradients. Start one of them at random')


CHECKS = [starts_at_zero, sizes, gate_learns, gate_computes, zero_changes_nothing, gate_reads_input,
          product_starts_at_zero, both_factors_learn]
