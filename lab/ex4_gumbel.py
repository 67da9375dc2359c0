"""4. Straight-through Gumbel: take one choice, and still learn

A PaPaformer (Tapaninaho, Oussalah 2025) runs several paths side by side. With its Gumbel
connection each token takes the output of one path alone: the weights of the paths are one-hot, 1
for the largest logit and 0 for the others. Two things are wrong with a plain argmax: it never
tries another path, and it has no gradient. So in training

- the choice is sampled from softmax(logits): add Gumbel noise -log(-log(u)) to every logit, u
  uniform between 0 and 1, and take the largest sum;
- the gradient is straight-through: the weights that go forward are one-hot, but backward treats
  them as the soft weights, softmax((logits + noise) / temperature).

    u = 0.5           noise = -log(-log(0.5)) = -log(0.693) = 0.367

    logits (1, 0), noise (0, 2), temperature 1
    soft weights      softmax((1, 2)) = (0.269, 0.731)
    weights           (0, 1): one-hot, though choice 0 has the larger logit
    gradient of the first weight by the logits: that of the soft one,
                      0.269 * 0.731 * (1, -1) = (0.197, -0.197)

In eval mode nothing is sampled: the weights are one-hot for the largest logit, so that results
repeat. F.gumbel_softmax does most of this. Here, do without it.
"""

import torch
import torch.nn.functional as F


def gumbel_noise(u):
    """Uniform numbers between 0 and 1, of any shape -> Gumbel noise of that shape."""
    raise NotImplementedError    # 1 line


def straight_through(logits_NE, noise_NE, temperature, training):
    """-> weights (N, E), one-hot, of the logits' dtype. In training their gradient is that of the
    soft weights. If training is False, noise_NE is still passed in: ignore it."""
    raise NotImplementedError    # 4 to 8 lines
