"""Token bins: windows read from disk, and scored by a model."""

import math
from pathlib import Path

import numpy as np
import torch

from plumbing.cli import reading
from plumbing.tokenizer import load_meta


def load_bin(folder, split):
    """A split's token ids, as a read-only memory map."""
    path = Path(folder) / f'{split}.bin'
    with reading(path):
        return np.memmap(path, load_meta(folder).get('dtype', 'uint16'), 'r')


def read_windows(bins, starts, length, pinned=False):
    """(N,) places in a list of bins, end to end -> (N, length) int64 ids. A window may run on into
    the next bin. Nothing else is read from disk. pinned: in memory that a GPU reads by itself."""
    begins = np.cumsum([0, *map(len, bins)])
    windows = torch.empty(len(starts), length, dtype=torch.int64, pin_memory=pinned)
    for window, start in zip(windows.numpy(), starts):
        np.concatenate([ids[max(start - begin, 0):max(start - begin + length, 0)]
                        for begin, ids in zip(begins, bins)], out=window)
    return windows


def val_batches(tokens, seq_len, batch_size, pad, eval_tokens=None, rank=0, world=1):
    """x, y of windows with seq_len targets that cover every token but the first exactly once, or
    the first eval_tokens; this process's share of them. y is -1 where there is no target."""
    seq_len = min(seq_len, len(tokens))
    starts = np.arange(0, len(tokens) - 1, seq_len)
    if eval_tokens:
        starts = starts[:max(1, eval_tokens // seq_len)]
    empty = np.full(-len(starts) % world, len(tokens))   # all processes read equally many windows
    starts = np.concatenate((starts, empty))[rank::world]
    for i in range(0, len(starts), batch_size):
        positions = starts[i:i + batch_size, None] + np.arange(seq_len + 1)
        window = np.asarray(tokens[positions.clip(max=len(tokens) - 1)], np.int64)
        x, y = window[:, :-1].copy(), window[:, 1:].copy()
        y[(y == pad) | (positions[:, 1:] >= len(tokens))] = -1
        yield torch.from_numpy(x), torch.from_numpy(y)


@torch.no_grad()
def score_batches(model, batches, tokenizer, machine, each=None):
    """Loss per token, perplexity, and bits per byte: the cost of all tokens, end-of-text included,
    over the bytes of the text. each: a list that gets the cost of each token, batch by batch."""
    model.eval()
    token_lengths = torch.tensor([len(b) for b in tokenizer.token_bytes])
    sums = torch.zeros(3, dtype=torch.float64)           # nats, targets, bytes
    for x, y in batches:
        with machine.autocast():
            nats = model(machine.send(x), machine.send(y), reduction='none')[1]
        scored = y >= 0
        nats = nats.flatten().float().cpu()
        if each is not None:
            each.append(nats)
        sums += torch.stack((nats.double().sum(), scored.sum(), token_lengths[y[scored]].sum()))
    nats, targets, n_bytes = machine.sum(sums).tolist()
    model.train()
    loss = nats / targets
    return dict(loss=loss, perplexity=math.exp(min(loss, 700)),
                bits_per_byte=nats / math.log(2) / max(n_bytes, 1))


@torch.no_grad()
def count_routes(model, x, machine):
    """routes: {layer: the share of the picks that went to each choice}. Where every choice gets
    something from every token, the share of the gates. taken: {layer: choices per token}"""
    model.eval()
    with machine.autocast():
        routes = model.routes(machine.send(x))
    model.train()
    shares, taken = {}, {}
    for name, gate in routes.items():
        picks = gate if gate.all() else gate != 0
        count = picks.flatten(0, 1).sum(0).cpu().double()
        shares[name] = [round(v, 4) for v in (count / count.sum().clamp(min=1)).tolist()]
        taken[name] = (gate != 0).sum(-1).double().mean().item()
    return dict(routes=shares, taken=taken)
