"""
Dense with tools: arena/dense.py with changes of its attention, each off by default.

    partial_rope  rotary positions on half of a head's channels only
    key_offset    half of the others take the key of the token before (needs partial_rope)
    head_gate     each head's output times 2 sigmoid(a map of the block's input), 1 at first
    doc_mask      no attention across documents; an end-of-text counts as the next one's start

For training and scoring: with key_offset or doc_mask there is no KV cache.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from arena.dense import Block, Dense, DenseConfig, attend, norm, rotary, rotate


@dataclass
class DenseToolsConfig(DenseConfig):
    partial_rope: bool = False
    key_offset: bool = False
    head_gate: bool = False
    doc_mask: bool = False
    end_token: int = -1               # ends a document; train.py takes it from the data

    def __post_init__(self):
        super().__post_init__()
        assert self.partial_rope or not self.key_offset, 'key_offset needs partial_rope'
        assert not self.partial_rope or self.n_embd % (4 * self.n_head) == 0, \
            'partial_rope needs heads of a width that 4 divides'
        assert self.end_token >= 0 or not self.doc_mask, 'doc_mask needs end_token'


class ToolsBlock(Block):
    def forward(self, x, table, mask, cache):
        B, T, D = x.shape
        c = self.config
        n = norm(x)
        heads = (B, T, c.n_head, -1)
        q, k, v = (linear(n).view(heads).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = rotate(norm(q), table), rotate(norm(k), table)    # (B, H, T, d), of length sqrt(d)
        if c.key_offset:                                 # of the last quarter of the channels
            kept = k.size(-1) * 3 // 4
            before = torch.cat((k[:, :, :1, kept:], k[:, :, :-1, kept:]), 2)
            k = torch.cat((k[..., :kept], before), -1)
        dropout = self.dropout.p if self.training else 0.0
        if mask is None:
            y = attend(q, k, v, cache, self.layer, dropout)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        y = y.transpose(1, 2)
        if c.head_gate:
            y = y * (2 * self.gate(n).sigmoid())[..., None]
        x = x + self.dropout(self.proj(y.reshape(B, T, D)))
        y, losses = self.ffn(norm(x))
        return x + self.dropout(y), losses


def half_rotary(position, d):
    """rotary for the channels 0 to d/4 and d/2 to 3d/4, which are paired. The others stay."""
    cos, sin = (x[:, :d // 4] for x in rotary(position, d // 2))
    one, zero = torch.ones_like(cos), torch.zeros_like(sin)
    return torch.cat((cos, one, cos, one), -1), torch.cat((sin, zero, -sin, zero), -1)


class DenseTools(Dense):
    def __init__(self, config):
        super().__init__(config)
        for block in self.blocks:                        # the same weights as those of Dense
            block.__class__ = ToolsBlock
            if config.head_gate:
                block.gate = nn.Linear(config.n_embd, config.n_head, bias=False)
                nn.init.zeros_(block.gate.weight)

    def features(self, idx, cache=None):
        """(B, T) token ids -> final-norm states (B, T, D), losses summed over layers."""
        c = self.config
        if cache is not None and (c.key_offset or c.doc_mask):
            raise NotImplementedError('key_offset and doc_mask have no KV cache')
        past = cache[0][0].size(2) if cache else 0
        length = past + idx.size(1)
        if length > c.block_size:
            raise ValueError(f'{length} tokens are more than the block_size of {c.block_size}')
        x = self.dropout(norm(self.wte(idx)))            # (B, T, D)
        wide = torch.promote_types(x.dtype, torch.float32)
        position = torch.arange(past, length, device=x.device, dtype=wide)
        table = (half_rotary if c.partial_rope else rotary)(position, c.n_embd // c.n_head)
        mask = self.document_mask(idx) if c.doc_mask else None
        aux = {}
        for block in self.blocks:
            x, losses = block(x, table, mask, cache)
            for name, loss in losses.items():
                aux[name] = aux.get(name, 0) + loss
        return norm(x), aux

    def document_mask(self, idx):
        """(B, 1, T, T): whether query t may see key s."""
        document = (idx == self.config.end_token).cumsum(1)
        same = document[:, :, None] == document[:, None, :]
        return same.tril()[:, None]


Config, Model = DenseToolsConfig, DenseTools             # what train.py looks for
