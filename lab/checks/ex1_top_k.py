import torch

from lab.checks import expect, gradient, numbers, randn, returned, same, slope

HINT = """
softmax, then topk: it returns the K largest values and where they stand, the largest first. Divide
by sum(-1, keepdim=True).
The gradient: compute it as (N, K) first, then put it into zeros (N, E) at the places that choice_NK
names, with scatter along dimension 1."""
PLACES = ['moep.py, Router.forward']

PROB = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.05, 0.05, 0.1, 0.8]])


def slow_gates(score_NE, k):
    """One token after the other -> gates, choices"""
    gates, choices = [], []
    for score in score_NE:
        best = sorted(range(len(score)), key=lambda i: -score[i].item())[:k]
        total = sum(score[i].exp() for i in best)
        gates.append(torch.stack([score[i].exp() / total for i in best]))
        choices.append(torch.tensor(best))
    return torch.stack(gates), torch.stack(choices)


def gates_of(ex, score_NE, k):
    """-> the exercise's gates, choices"""
    shape = (len(score_NE), k)
    gate_NK, choice_NK = returned(ex.top_k_gates(score_NE, k), shape, shape)
    expect(not choice_NK.is_floating_point(),
           'the choices are not integers: did you return (choices, gates)?')
    return gate_NK, choice_NK


def best_are_chosen(ex):
    """a token's choices are its K best, the best first"""
    score_NE = randn(3, 5)                               # N = K, so a missing keepdim does not crash
    _, choice_NK = gates_of(ex, score_NE, 3)
    _, wanted_NK = slow_gates(score_NE, 3)
    for score, choice, wanted in zip(score_NE, choice_NK.tolist(), wanted_NK.tolist()):
        expect(choice == wanted,
               f'a token with the scores {numbers(score)} takes {choice}, not {wanted}: '
               'the three best of its own scores, the best first')


def gates_sum_to_one(ex):
    """a token's gates sum to 1"""
    gate, _ = gates_of(ex, PROB.log(), 2)
    for total in gate.sum(-1).tolist():
        expect(abs(total - 1) < 1e-4,
               f'the gates of a token sum to {total:.2f}, not 1: divide by the sum over the K of '
               'this token (with keepdim=True)')


def ratios_stay(ex):
    """gates have the ratios of the probabilities: 4 to 3 in the example"""
    gate, _ = gates_of(ex, PROB.log(), 2)
    ratio = gate[:, 0] / gate[:, 1]
    expect(same(ratio, torch.tensor([4 / 3, 8.0])),
           f'probabilities of 0.8 and 0.1 get gates of {numbers(gate[1])}: '
           'their ratio has changed. Is there a second softmax, none, or one over tokens?')


def gates_carry_gradient(ex):
    """autograd finds the gradient of your gates, as finite differences do"""
    score, weight = randn(3, 4), randn(3, 2)

    def f(score):
        gate, _ = gates_of(ex, score, 2)
        return (weight * gate).sum()
    expect(same(gradient(f, score), slope(f, score)),
           'autograd and finite differences disagree: is a part of the gates detached?')


def both_gradients(ex, k):
    """score_gradient's and the true one, of three tokens with four choices; and the choices"""
    score, g = randn(3, 4), randn(3, k)
    gate, choice = slow_gates(score, k)
    found = returned(ex.score_gradient(gate, choice, g, 4), (3, 4))
    wanted = slope(lambda x: (g * slow_gates(x, k)[0]).sum(), score)
    return found, wanted, choice


def gradient_of_others(ex):
    """score_gradient: it is 0 at the scores that were not chosen"""
    found, wanted, _ = both_gradients(ex, k=2)
    expect(torch.equal(found != 0, wanted.abs() > 1e-6),
           f'the gradient of a token is {numbers(found[0])}, not {numbers(wanted[0])}: '
           'the column is the number of the choice, and the others stay 0')


def gradient_of_chosen(ex):
    """score_gradient: at the chosen scores it is what finite differences find"""
    found, wanted, choice = both_gradients(ex, k=2)
    found, wanted = found.gather(1, choice), wanted.gather(1, choice)
    expect(same(found, wanted),
           f"the gradient of a token's two chosen scores is {numbers(found[0])}, not "
           f'{numbers(wanted[0])}. A higher score also lowers the other gate: that is the sum, '
           'over the K of one token')


def gradient_of_one(ex):
    """score_gradient: at K = 1 it is 0, since the gate is always 1"""
    found, _, _ = both_gradients(ex, k=1)
    expect(found.abs().max() < 1e-5,
           f'at K = 1 the gate is 1 whatever the score, but your gradient is {numbers(found[0])}')


CHECKS = [best_are_chosen, gates_sum_to_one, ratios_stay, gates_carry_gradient,
          gradient_of_others, gradient_of_chosen, gradient_of_one]
