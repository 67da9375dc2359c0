"""The mean of the weights over the last part of training."""

import torch


class Averages:
    """A running mean of the parameters per fraction of the steps, taken every few steps. It lives
    outside the CUDA graph of a step, and a resumed run starts it anew."""

    def __init__(self, model, fractions, steps, every=10):
        fractions = fractions if isinstance(fractions, list) else [fractions]
        self.params = list(model.parameters())
        self.steps, self.every = steps, every
        self.means = {fraction: (0, None) for fraction in fractions if fraction}

    @torch.no_grad()
    def update(self, it):
        if it % self.every and it != self.steps:
            return
        for fraction, (count, mean) in self.means.items():
            if it > self.steps * (1 - fraction):
                if mean is None:
                    mean = [p.detach().clone() for p in self.params]
                torch._foreach_lerp_(mean, self.params, 1 / (count + 1))
                self.means[fraction] = count + 1, mean

    def swapped_in(self):
        """The name of each mean in turn, while the model has its weights."""
        raw = [p.detach().clone() for p in self.params]
        for fraction, (_, mean) in self.means.items():
            self.load(mean)
            yield 'average' if len(self.means) == 1 else f'average_{fraction:g}'
            self.load(raw)

    @torch.no_grad()
    def load(self, values):
        torch._foreach_copy_(self.params, values)
