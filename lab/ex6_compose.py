"""6. Composing two trained paths into one model

PaPaformer (Tapaninaho, Oussalah 2025) trains narrow language models apart, each on its own kind of
text: the paths. Then it puts them side by side in one wider model, and trains that a little more.

    a path, width d           wte -> blocks[0] -> blocks[1] -> ... -> head
    k of them, width k*d      wte -> shrink to d -> layers[0] -> layers[1] -> ... -> head

A parallel layer, layers[i], holds one block of each path. All of them read the same x. Their
outputs are concatenated along the width, in the order of the paths, and the connection maps that
to the next x. The next x has width d; after the last layer, k*d.

What the paths have learned goes into the new model like this:

- block p of parallel layer i is a copy of blocks[i] of path p;
- a token's embedding is the concatenation of its embeddings in the paths;
- the head's row for a token is the concatenation of its rows in the paths.

    token 7        path 0      path 1      composed
    embedding      (1, 2)      (3, 4)      (1, 2, 3, 4)
    head's row     (10, 20)    (30, 40)    (10, 20, 30, 40)
    its logit, for the states (a, b) and (c, d) side by side: 10a + 20b + 30c + 40d
    = the sum of the two paths' logits

The rest, shrink and connections, is fresh: it stays as Composed makes it. The paths must not
change, neither now nor when the composed model is trained. (PaPaformer also has a fresh full-width
block at each end, and its blocks have attention and norms. That changes nothing here.)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.fc(x)))


class Path(nn.Module):
    """A trained narrow model: (B, T) tokens -> (B, T, V) logits."""
    def __init__(self, vocab_size, d, n_layer):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, d)                       # weight (V, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(n_layer))
        self.head = nn.Linear(d, vocab_size, bias=False)             # weight (V, d)

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ParallelLayer(nn.Module):
    def __init__(self, k, d, d_next):
        super().__init__()
        self.blocks = nn.ModuleList(Block(d) for _ in range(k))
        self.connection = nn.Linear(k * d, d_next, bias=False)

    def forward(self, x):
        """x (B, T, d) -> (B, T, d_next)"""
        raise NotImplementedError    # 2 lines


class Composed(nn.Module):
    def __init__(self, vocab_size, k, d, n_layer):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, k * d)
        self.shrink = nn.Linear(k * d, d, bias=False)
        widths = [d] * (n_layer - 1) + [k * d]                       # after each parallel layer
        self.layers = nn.ModuleList(ParallelLayer(k, d, d_next) for d_next in widths)
        self.head = nn.Linear(k * d, vocab_size, bias=False)

    def forward(self, idx):
        x = self.shrink(self.wte(idx))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def compose(paths):
    """A list of paths of equal sizes -> a Composed model that holds what they have learned."""
    vocab_size, d = paths[0].wte.weight.shape
    model = Composed(vocab_size, len(paths), d, n_layer=len(paths[0].blocks))
    raise NotImplementedError    # 5 to 8 lines, then return model
