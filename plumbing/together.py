"""Several runs as one model, whose next-token probabilities are the mean of theirs."""

import math

import torch
from torch import nn

from plumbing.checkpoint import load_checkpoint
from plumbing.cli import UserError


class Together(nn.Module):
    """It gives a loss per token only: -log of the mean probability of the target."""

    def __init__(self, models):
        super().__init__()
        self.models = nn.ModuleList(models)
        self.config = min((m.config for m in models), key=lambda config: config.block_size)

    def forward(self, idx, targets, reduction):
        assert reduction == 'none'
        nats = torch.stack([m(idx, targets, reduction=reduction)[1] for m in self.models])
        return None, math.log(len(nats)) - (-nats).logsumexp(0), {}

    def count_params(self):
        return [sum(counts) for counts in zip(*(m.count_params() for m in self.models))]


def load_together(paths, device='cpu'):
    """As load_checkpoint. Of several runs, the first one's dictionary, with all steps and words."""
    models, ckpts = zip(*[load_checkpoint(path, device) for path in paths])
    if len({ckpt['tokenizer'] for ckpt in ckpts}) > 1:
        raise UserError(f"{', '.join(map(str, paths))} do not share one tokenizer")
    model = Together(models) if len(models) > 1 else models[0]
    return model, ckpts[0] | {key: sum(c[key] for c in ckpts) for key in ('iter', 'words')}
