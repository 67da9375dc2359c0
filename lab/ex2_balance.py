"""2. The Switch balance loss, and a sign that collapses

Nothing makes a router use all its choices. One that is a little better at first gets more tokens,
so it learns more, and in the end every token may take it: the router has collapsed. A balance
loss, added to the loss of the language model, works against that. This is the Switch
Transformer's, in the form that the code of MoEP (Tapaninaho 2025) has for K choices:

    loss = E * sum_i f_i * p_i

    f_i   the share of all N*K picks that went to choice i: they sum to 1. Counted, so no gradient
    p_i   the mean probability of choice i over the N tokens: the gradient flows through it

    N = 2 tokens, E = 3, K = 1: both take choice 0
    probabilities (0.6, 0.3, 0.1) and (0.5, 0.1, 0.4)
    f = (1, 0, 0)    p = (0.55, 0.2, 0.25)    loss = 3 * 1 * 0.55 = 1.65

It is 1 if all choices are used alike. At worst, if all tokens put everything on the same K, it is
E/K.

Another form uses the entropy of p, again the mean over the tokens (its logarithm is natural):

    H = -sum_i p_i log p_i         p = (0.5, 0.5): H = log 2 = 0.69        p = (1, 0): H = 0

The MoEP paper prints the loss -sum_i p_i log p_i, to be minimised. What would descent do to p?
Write the form that spreads tokens over the choices when it is minimised. The checks let a small
router descend on your loss, and look at where its tokens went.
"""

import torch


def switch_loss(prob_NE, choice_NK):
    """Probabilities (N, E) and the choices taken (N, K) -> one number."""
    raise NotImplementedError    # 4 lines


def entropy_loss(prob_NE):
    """Probabilities (N, E) -> one number. It and its gradient are finite even if a p_i is 0."""
    raise NotImplementedError    # 3 lines
