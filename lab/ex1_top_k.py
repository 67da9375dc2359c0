"""1. Top-k gates that sum to 1, and their gradient

A router scores E choices (experts, or blocks) for each token. The token takes the K best of them
and adds up their outputs, each weighted by a gate. In MoEP (Tapaninaho 2025) the gates are
probabilities, a softmax over all E scores. The K largest are kept and divided by their sum, so
that they sum to 1:

    probability   0.4   0.3   0.2   0.1       E = 4 choices
    the K = 2 best                            choices 0 and 1, the best first
    gate          4/7   3/7                   0.4 / 0.7 and 0.3 / 0.7

Then the gradient. Autograd would find it, but by hand you see what a router can learn and what it
cannot. Dividing by the sum cancels the denominator of the softmax, so the gates are a softmax over
the K chosen scores alone. For a loss L, with g_k = dL/dgate_k:

    dL/dscore_k = gate_k * (g_k - sum_j gate_j * g_j)     for the K chosen, 0 for the others

    gates 4/7 and 3/7, g = (1, 0):    dL/dscore = (4/7 * (1 - 4/7), 3/7 * (0 - 4/7), 0, 0)
                                                = (12/49, -12/49, 0, 0)

A choice that was not taken gets no gradient: the loss cannot tell the router that it would have
been better. And at K = 1 the gate is always 1, its gradient always 0: then the loss teaches the
router nothing. Exercise 2 is about what helps.

Names carry shapes: score_NE is N tokens by E choices. The checks use float64: make new tensors like
the input (g_NK.new_zeros).
"""

import torch


def top_k_gates(score_NE, k):
    """Scores (N, E) -> gates (N, K), and choices (N, K): which are the K best, the best first."""
    raise NotImplementedError    # 3 lines


def score_gradient(gate_NK, choice_NK, g_NK, n_choices):
    """g_NK is dL/dgate -> dL/dscore (N, E), E = n_choices, by the formula above."""
    raise NotImplementedError    # 3 lines
