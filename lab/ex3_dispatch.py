"""3. Sparse dispatch: only the chosen experts compute

A token takes K of E experts. The obvious way is dense: all E experts compute all N tokens, and
what was not chosen gets a gate of 0. That is E/K times the work. The sparse way has the same
result. Collect the tokens of each expert in one matrix, let it compute those rows alone, bring the
rows back to their tokens, and add them up:

    y[n] = sum_k gate[n, k] * expert_choice[n, k](x[n])

    N = 3 tokens, K = 2, gates of 0.5    expert e multiplies by 10 ** e    x = (1, 2, 3)
    choices      token 0: 2, 0           token 1: 0, 1           token 2: 2, 1
    by expert    expert 0: tokens 0, 1   expert 1: tokens 1, 2   expert 2: tokens 0, 2
    y = (0.5 * 100 + 0.5 * 1,  0.5 * 2 + 0.5 * 20,  0.5 * 300 + 0.5 * 30) = (50.5, 11, 165)

Call an expert at most once, with one row for each token that chose it: few large matrix products
are fast, many small ones are not. A token's K choices differ. If no token chose some expert, call
it with no rows, or not at all. Gradients must flow to x, to the gates and into the experts.

The checks use float64: make new tensors like the input (x_ND.new_zeros).
"""

import torch


def dispatch(x_ND, gate_NK, choice_NK, experts):
    """Tokens (N, D) -> outputs (N, D). `experts`: E functions, (rows, D) -> (rows, D)."""
    raise NotImplementedError    # 5 to 10 lines
