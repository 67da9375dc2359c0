"""5. Stick-breaking attention weights without a product

ModuleFormer (Shen et al. 2023) has no softmax in its attention, and no positions. Query t holds a
stick of length 1. It goes back in time, from its own key t to key 0. Key i breaks off the share
sigmoid(z_i) of what the later keys have left (for one query t, z_i is z_TT[t, i]):

    p_i = sigmoid(z_i) * product of (1 - sigmoid(z_j)) over i < j <= t

    t = 2, z = (0, 0, 0): every key takes half of what is left
    key 2: 1/2     key 1: 1/4     key 0: 1/8     and 1/8 of the stick attends to nothing

So of equal matches the later one gets more: that is how the model knows order. A key after t gets
nothing, and must not change what the others get.

The product is a bad idea on a computer. Of 500 factors of 1/2 nothing is left in float32. A factor
1 - sigmoid(40) is 0 already, and so is its gradient. And a loop over the keys is slow. So compute

    log p_i = log sigmoid(z_i) + sum of log(1 - sigmoid(z_j)) over i < j <= t

by a fixed number of torch operations, whatever the length. In the example log p is (-2.08, -1.39,
-0.69). Two things help: 1 - sigmoid(z) = sigmoid(-z), and F.logsigmoid(z) is about z where
log(sigmoid(z)) is already -inf.
"""

import torch
import torch.nn.functional as F


def log_stick_weights(z_TT):
    """z_TT[t, i] is how well key i matches query t -> log p (T, T), -inf where i > t."""
    raise NotImplementedError    # 4 lines
