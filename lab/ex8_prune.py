"""8. Pruning the modules that a domain does not use

A pool of ModuleFormer (Shen et al. 2023) has E modules, of which each token takes K. The text of
one domain may hardly use some of them. Count on held-out text, and remove those:

1. Count for each module the tokens that took it, but not padding: a target of -1.
2. A module's frequency is its count divided by the largest count of the pool. If it is below the
   threshold the module goes; but the K most used always stay, since a token has to find K.
3. Remove the module's matrix, and its row in the router. The router's row i scores module i: both
   must lose the same modules, and keep the order of the others.

    N = 5 tokens, K = 2, E = 4
    choices   (0, 1)   (0, 3)   (0, 1)   (3, 0)   (2, 0)
    target       7        2        9       -1        4
    count     (4, 2, 1, 1)             module 3: one of its two tokens is padding
    frequency (1, 0.5, 0.25, 0.25)     threshold 0.3: modules 0 and 1 stay
                                       threshold 0.9: the same two, since K = 2

The router's softmax then runs over fewer modules, so all gates rise a little. Nothing else changes
for a token that took none of the removed ones.
"""

import torch


def count_usage(choice_NK, target_N, n_modules):
    """The modules each token took (N, K), the targets (N,) -> counts (E,), whole numbers."""
    raise NotImplementedError    # 2 lines


def prune(router_ED, w_EDF, count_E, threshold, k):
    """The router's rows (E, D) and the modules' matrices (E, D, F) -> both, of those that stay."""
    raise NotImplementedError    # 4 lines
