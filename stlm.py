"""
Super Tiny Language Models (Guertler, Hillier et al. 2024, "Super Tiny Language Models").

A modern 56M-parameter Transformer (RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings), and
two ways to make it smaller:

- Byte-level with pooling (5.2). Nearly half of the baseline is its table of 50,257 embeddings. Instead, a BPE only
  marks where chunks of bytes begin and end; a small Transformer reads the bytes of each chunk, their mean becomes one
  vector of the core's width, the core is causal over chunks, and a small decoder spells out the next chunk:

      bytes -> [encoder, inside each chunk] -> mean -> core over chunks -> [decoder, inside each chunk] -> next bytes

- Shared weights (5.1). One FFN for all layers (`share='ffn'`, as MobiLlama), or one whole block for all (`'all'`, as
  ALBERT), each optionally with a low-rank adapter of its own in every layer (`lora_rank`).

What to look at first: `STLM.encode`, `STLM.core` and `STLM.spell`, which together are the byte-level model.

Measured on one H200: two epochs of 39 MB of Simple English Wikipedia, three seeds: 1.517 bits per byte, 1.586 with half the parameters
(`share='all'`), 1.978 byte-level with the causal decoder: docs/results.md. The baseline trains 0.89M tokens/s at batch 64 x 512, 46% of
the GPU's matrix rate: docs/speed.md.

To the outside a byte-level model is a model of symbols: the bytes, then end-of-chunk, end-of-text and padding (the last
three of the vocabulary). Every chunk takes L = byte_limit + 1 slots: its bytes, end-of-chunk, padding; end-of-text is a
chunk by itself. `prepare.py --chunks` writes such streams. logits[t] is the distribution of symbol t+1; padding is no
target (loader.py makes it -1). What cannot come gets no probability: a chunk begins with a byte or end-of-text, goes on
with bytes or end-of-chunk, and ends after byte_limit bytes. So the probabilities of all chunks sum to 1.

Departures from the paper, and gaps it leaves:
- It decodes all bytes of a chunk at once from the core's vector (`decoder='parallel'`): given that vector, the bytes
  are independent. By default each byte also sees the earlier ones of its chunk (`causal`), a better probability model.
- It names no widths but "64 for example" for bytes. Ours is 128, and the parts that replace embedding and head still
  have 96% fewer parameters. They are LLaMA blocks as in the core, without dropout, with learned positions in a chunk.
- The core starts with a learned vector, from which the rest of a window's first chunk is predicted, and the first chunk
  of a text that has no beginning. The mean over a chunk includes its end-of-chunk; encoder, decoder and head have one
  table of symbols in common.
- Table 1 gives no number of key and value heads; 4 makes the parameters 55.9M.

Dimension letters: B batch, T sequence (tokens or symbols), C chunks, L slots of a chunk, D width, H heads,
V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class STLMConfig:
    vocab_size: int = 50257           # tokens, end-of-text included; byte-level: 256 bytes and three more symbols
    block_size: int = 512             # longest context; byte-level: in symbols, a multiple of byte_limit + 1
    n_layer: int = 10
    n_head: int = 16                  # query heads
    n_kv_head: int = 4                # key and value heads, each shared by n_head / n_kv_head query heads
    n_embd: int = 512                 # width
    ffn_hidden: int = 1536            # hidden width of SwiGLU
    dropout: float = 0.1              # on embeddings, attention, both residual branches; not on attention if scheduled
    share: str = 'none'               # weights that all layers have in common: none | ffn | all
    lora_rank: int = 0                # with share: rank of each layer's own adapters beside shared maps; 0: none
    byte_limit: int = 0               # 0: a model of tokens; else byte-level: the most bytes in a chunk
    decoder: str = 'causal'           # how a chunk is spelled: causal | parallel
    byte_embd: int = 128              # width of the byte encoder and decoder
    byte_layer: int = 2               # layers of each
    byte_head: int = 4                # attention heads of each

    def __post_init__(self):
        for name in ('vocab_size', 'block_size', 'n_layer', 'n_kv_head', 'ffn_hidden', 'byte_layer'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} = {getattr(self, name)} is too small')
        for d, h in ((self.n_embd, self.n_head), (self.byte_embd, self.byte_head)):
            if h < 1 or d < 1 or d % (2 * h):            # rotary positions turn pairs
                raise ValueError(f'a width of {d} cannot be split into {h} heads of an even width')
        if self.n_head % self.n_kv_head:
            raise ValueError(f'{self.n_head} query heads cannot share {self.n_kv_head} key and value heads evenly')
        for name, names in dict(share=('none', 'ffn', 'all'), decoder=('causal', 'parallel')).items():
            if getattr(self, name) not in names:
                raise ValueError(f"{name} is '{getattr(self, name)}'; it can be {', '.join(names)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout = {self.dropout} must be at least 0 and less than 1')
        if self.lora_rank < 0 or self.lora_rank and self.share == 'none':
            raise ValueError("lora_rank gives the layers adapters beside shared weights: set share='ffn' or 'all'")
        slots = self.byte_limit + 1
        if slots < 1 or slots > 1 and (self.block_size % slots or self.block_size < 2 * slots):
            raise ValueError(f'block_size = {self.block_size} must be two or more times byte_limit + 1 = {slots}')
        if self.byte_limit and self.vocab_size < 4:
            raise ValueError('a byte-level vocabulary holds at least one byte and three more symbols')


# ---------------------------------------------------------------------------------------------------------------
# Layers


class Dropout(nn.Module):
    """Dropout whose rate is a tensor: a schedule can change it without rebuilding a compiled model or a graph."""

    def __init__(self, p):
        super().__init__()
        self.register_buffer('p', torch.tensor(float(p)), persistent=False)
        self.attention_p = p                             # a plain number: SDPA takes no tensor; 0 under a schedule
        self.active = p > 0

    def forward(self, x):
        if not (self.training and self.active):
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.p
        return torch.where(keep, x / (1 - self.p).to(x.dtype), 0)


def rope(x, past):
    """Rotary positions for (B, H, T, d) heads: channels i and i + d/2 turn by an angle that grows with position."""
    half, wide = x.size(-1) // 2, torch.promote_types(x.dtype, torch.float32)   # bfloat16 cannot tell positions apart
    position = torch.arange(past, past + x.size(-2), device=x.device, dtype=wide)
    angle = position[:, None] * 10000.0 ** (-torch.arange(half, device=x.device, dtype=wide) / half)
    cos, sin = torch.view_as_real(torch.polar(torch.ones_like(angle), angle)).unbind(-1)  # complex: torch.compile makes it one table, for all layers
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)


def attend(q, k, v, cache, layer, dropout):
    """Causal attention over (B, H, T, d) heads. A cache (one (k, v) per attention layer) is read and extended."""
    if cache is not None:
        if layer < len(cache):
            k, v = torch.cat((cache[layer][0], k), 2), torch.cat((cache[layer][1], v), 2)
            cache[layer] = (k, v)
        else:
            cache.append((k, v))
    T, S = q.size(2), k.size(2)
    mask, causal = None, False                           # a lone last query sees every key
    if T == S:
        causal = True                                    # as a branch: torch.compile wants a plain bool for any length
    elif T > 1:                                          # query t stands at position S - T + t
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal,
                                          enable_gqa=q.size(1) > k.size(1))


class Adapter(nn.Module):
    """A low-rank map, zero at first, that makes a layer's use of a shared map its own."""

    def __init__(self, linear, rank):
        super().__init__()
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.up(self.down(x))


def adapted(linear, x, adapters, name):
    """A map, and beside it the layer's own adapter if it has one of that name."""
    y = linear(x)
    return y + adapters[name](x) if adapters is not None and name in adapters else y


class Attention(nn.Module):
    """Grouped-query attention: over all positions before, rotary and with a cache, or only `inside` chunks."""

    def __init__(self, d, n_head, n_kv_head):
        super().__init__()
        self.d_head, self.n_head, self.n_kv_head = d // n_head, n_head, n_kv_head
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.qkv = nn.Linear(d, (n_head + 2 * n_kv_head) * self.d_head, bias=False)
        self.proj = nn.Linear(d, d, bias=False)

    def heads(self, x, adapters=None):
        counts = (self.n_head, self.n_kv_head, self.n_kv_head)
        y = adapted(self.qkv, self.norm(x), adapters, 'qkv').view(*x.shape[:2], sum(counts), self.d_head)
        return y.transpose(1, 2).split(counts, 1)                               # q, k, v, each (B, heads, T, d)

    def forward(self, x, past, cache, layer, dropout, adapters):
        q, k, v = self.heads(x, adapters)
        y = attend(rope(q, past), rope(k, past), v, cache, layer, dropout)
        return adapted(self.proj, y.transpose(1, 2).flatten(2), adapters, 'proj')

    def inside(self, x, visible):
        """visible (chunks, 1, 1, L): the slots that all may read. None: a slot reads itself and those before it."""
        y = F.scaled_dot_product_attention(*self.heads(x), attn_mask=visible, is_causal=visible is None)
        return self.proj(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """The FFN. The norm before it stands outside: layers that share the FFN have norms of their own."""

    def __init__(self, d, hidden):
        super().__init__()
        self.fc = nn.Linear(d, 2 * hidden, bias=False)   # gate and up
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x, adapters=None):
        gate, up = adapted(self.fc, x, adapters, 'fc').chunk(2, dim=-1)
        return adapted(self.down, F.silu(gate) * up, adapters, 'down')


class ChunkTransformer(nn.Module):
    """A small Transformer inside each chunk: the byte encoder and the byte decoder."""

    def __init__(self, config):
        super().__init__()
        d, n = config.byte_embd, config.byte_layer
        self.position = nn.Parameter(torch.empty(config.byte_limit + 1, d))
        self.attention = nn.ModuleList(Attention(d, config.byte_head, config.byte_head) for _ in range(n))
        self.norm = nn.ModuleList(nn.RMSNorm(d, eps=1e-6) for _ in range(n))
        self.ffn = nn.ModuleList(SwiGLU(d, 3 * d) for _ in range(n))
        self.norm_f = nn.RMSNorm(d, eps=1e-6)

    def forward(self, x, visible):                       # (chunks, L, d)
        x = x + self.position
        for attention, norm, ffn in zip(self.attention, self.norm, self.ffn):
            x = x + attention.inside(x, visible)
            x = x + ffn(norm(x))
        return self.norm_f(x)


# ---------------------------------------------------------------------------------------------------------------
# The model


def head_loss(x, weight, targets, reduction):
    """Cross-entropy of states (B, T, D) against the (V, D) head. On a GPU the vocabulary is padded to a multiple of 64: odd rows
    of logits are slow to write and to read. What is added has a bias of -inf and counts nothing."""
    V, extra, bias = len(weight), -len(weight) % 64 if x.is_cuda else 0, None
    if extra:
        weight, bias = F.pad(weight, (0, 0, 0, extra)), F.pad(weight.new_zeros(V), (0, extra), value=-math.inf)
    logits = F.linear(x, weight, bias).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=reduction)
    return loss if reduction == 'mean' else loss.view_as(targets)


class STLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        own = 1 if c.share == 'all' else c.n_layer       # a shared part is a list of one: one key in the state dict
        self.attention = nn.ModuleList(Attention(c.n_embd, c.n_head, c.n_kv_head) for _ in range(own))
        self.norm = nn.ModuleList(nn.RMSNorm(c.n_embd, eps=1e-6) for _ in range(own))
        self.ffn = nn.ModuleList(SwiGLU(c.n_embd, c.ffn_hidden) for _ in range(c.n_layer if c.share == 'none' else 1))
        maps = {'fc': self.ffn[0].fc, 'down': self.ffn[0].down}
        if c.share == 'all':
            maps |= {'qkv': self.attention[0].qkv, 'proj': self.attention[0].proj}
        self.adapters = nn.ModuleList(
            nn.ModuleDict({name: Adapter(linear, c.lora_rank) for name, linear in maps.items()})
            for _ in range(c.n_layer if c.lora_rank else 0))
        self.norm_f = nn.RMSNorm(c.n_embd, eps=1e-6)
        self.dropout = Dropout(c.dropout)
        if c.byte_limit:
            self.wte = nn.Embedding(c.vocab_size, c.byte_embd)     # of symbols; also the head
            self.encoder, self.decoder = ChunkTransformer(c), ChunkTransformer(c)
            self.pool = nn.Linear(c.byte_embd, c.n_embd, bias=False)
            self.spread = nn.Linear(c.n_embd, c.byte_embd, bias=False)
            self.start = nn.Parameter(torch.empty(c.n_embd))       # what stands before the first chunk
            self.register_buffer('allowed', self.allowed_symbols(), persistent=False)
        else:
            self.wte = nn.Embedding(c.vocab_size, c.n_embd)        # also the head
        self.init_weights()

    def allowed_symbols(self):
        """(L, V): what may stand in each slot of a chunk; after end-of-chunk or end-of-text nothing is predicted."""
        L, V = self.config.byte_limit + 1, self.config.vocab_size
        allowed = torch.zeros(L, V, dtype=torch.bool)
        allowed[:-1, :V - 3] = True                      # bytes
        allowed[1:, V - 3] = True                        # end-of-chunk, never first, alone in the last slot
        allowed[0, V - 2] = True                         # end-of-text, a chunk by itself
        return allowed

    def init_weights(self):
        """Matrices from N(0, 0.02), smaller where they write to the residual stream; adapters start at zero. 0.02 is
        made for wide models: the byte parts are narrow and get 1/sqrt(width), without which they learn far more slowly
        (docs/stlm.md). What pool and spread carry over enters the other stream with the size of its embeddings."""
        c, narrow = self.config, 1 / math.sqrt(self.config.byte_embd)
        for name, p in self.named_parameters():
            if 'norm' in name:
                continue                                 # ones already
            in_bytes = c.byte_limit and name.startswith(('wte', 'encoder', 'decoder'))
            std = 1 / math.sqrt(p.size(-1)) if in_bytes else 0.02
            if name in ('pool.weight', 'spread.weight'):
                std = (0.02 if name == 'pool.weight' else narrow) / math.sqrt(p.size(-1))
            if name.startswith('adapters'):
                std = 0.0 if '.up.' in name else 0.02
            elif '.proj.' in name or '.down.' in name:
                std /= math.sqrt(2 * (c.byte_layer if in_bytes else c.n_layer))
            nn.init.normal_(p, std=std)

    def set_dropout(self, p):
        """Called by train.py at every step of a schedule. Attention's own dropout is off then."""
        self.dropout.p.fill_(p)
        self.dropout.active, self.dropout.attention_p = True, 0.0

    def layers(self, x, past=0, cache=None):
        """The Transformer over (B, T, D) tokens or chunks, up to the final norm."""
        x = self.dropout(x)
        dropout = self.dropout.attention_p if self.training else 0.0
        for i in range(self.config.n_layer):
            attention, norm = self.attention[i % len(self.attention)], self.norm[i % len(self.norm)]
            ffn, adapters = self.ffn[i % len(self.ffn)], self.adapters[i] if self.adapters else None
            x = x + self.dropout(attention(x, past, cache, i, dropout, adapters))
            x = x + self.dropout(ffn(norm(x), adapters))
        return self.norm_f(x)

    # byte-level

    def encode(self, chunks):
        """(B, C, L) symbols -> one vector per chunk, (B, C, D): the mean of what the encoder makes of its symbols."""
        B, C, L = chunks.shape
        slots = chunks.reshape(B * C, L)
        visible = slots != self.config.vocab_size - 1                           # all but padding
        visible = visible | (torch.arange(L, device=slots.device) == 0)         # a chunk of padding alone is finite
        h = self.encoder(self.wte(slots), visible[:, None, None])               # (B * C, L, d)
        h = (h * visible[:, :, None]).sum(1) / visible.sum(1, keepdim=True)
        return self.pool(h).type_as(h).view(B, C, -1)                           # the stream stays in its own precision

    def core(self, chunks, cache=None):
        """(B, C, L) symbols of whole chunks -> (B, C + 1, D): state c has read the chunks before c. With a cache that
        holds earlier chunks (and the start), (B, C, D)."""
        past = cache[0][0].size(2) if cache else 0
        x = [] if past else [self.start.expand(len(chunks), 1, -1)]
        if chunks.size(1):
            x.append(self.encode(chunks))
        return self.layers(torch.cat(x, 1), past, cache)

    def spell(self, states, chunks):
        """(B, C, D) states and the (B, C, L) chunks they predict -> logits (B, C, L, V). Slot j reads the state and, if
        `causal`, the symbols before it; what stands in the slot and behind it is never read."""
        B, C, L = chunks.shape
        x, visible = self.spread(states).type_as(states).view(B * C, 1, -1).expand(-1, L, -1), None
        if self.config.decoder == 'causal':
            before = self.wte(chunks.reshape(B * C, L)[:, :-1])
            x = x + F.pad(before, (0, 0, 1, 0))                                 # slot j gets symbol j - 1
        else:
            visible = torch.ones(1, 1, 1, L, dtype=torch.bool, device=x.device)
        logits = F.linear(self.decoder(x, visible), self.wte.weight).view(B, C, L, -1)
        return logits.masked_fill(~self.allowed, -math.inf)

    def whole_chunks(self, idx):
        """(B, T) -> (B, C + 1, L): C whole chunks, and the one that T ends in, filled up with padding."""
        L = self.config.byte_limit + 1
        fill = (idx.size(1) // L + 1) * L - idx.size(1)
        return F.pad(idx, (0, fill), value=self.config.vocab_size - 1).view(len(idx), -1, L)

    # the protocol

    def check(self, idx, cache):
        """-> how many tokens the cache holds."""
        past = cache[0][0].size(2) if cache else 0
        if past + idx.size(1) > self.config.block_size:
            raise ValueError(f'{past + idx.size(1)} tokens are more than the block_size of {self.config.block_size}')
        if self.config.byte_limit and cache is not None:
            raise ValueError('the byte-level model keeps its cache inside generate')
        return past

    def features(self, idx, cache=None):
        """(B, T) ids -> final-norm states (B, T, D). Byte-level: at each symbol, the state that has read every chunk
        which is whole by then, its last slot of padding included."""
        past = self.check(idx, cache)
        if not self.config.byte_limit:
            return self.layers(self.wte(idx), past, cache), {}
        states = self.core(self.whole_chunks(idx)[:, :-1])
        whole = torch.arange(1, idx.size(1) + 1, device=idx.device) // (self.config.byte_limit + 1)
        return states[:, whole], {}

    def forward(self, idx, targets=None, cache=None, reduction='mean'):
        if self.config.byte_limit:
            self.check(idx, cache)
            chunks = self.whole_chunks(idx)
            logits = self.spell(self.core(chunks[:, :-1]), chunks).flatten(1, 2)[:, 1:idx.size(1) + 1]
        else:
            x = self.features(idx, cache)[0]
            if targets is not None:
                return None, head_loss(x, self.wte.weight, targets, reduction), {}
            logits = F.linear(x, self.wte.weight)
        if targets is None:
            return logits, None, {}
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)
        return None, loss if reduction == 'mean' else loss.view_as(targets), {}

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Continue (B, T) prompts; call eval() first. When the context is full, its last half starts a new cache.
        Byte-level: max_new_tokens counts symbols, padding too; the prompt may end inside a chunk."""
        next_logits, memory = self.next_symbol if self.config.byte_limit else self.next_token, {}
        for _ in range(max_new_tokens):
            logits = next_logits(idx, memory).float()
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            idx = torch.cat((idx, new), 1)
        return idx

    def next_token(self, idx, memory):
        """Logits after (B, T) tokens; memory holds the cache of those before the last."""
        limit, new = self.config.block_size, idx[:, -1:]
        if not memory:
            memory['cache'], new = [], idx[:, -limit:]
        elif memory['cache'][0][0].size(2) == limit:
            memory['cache'], new = [], idx[:, -max(1, limit // 2):]
        return self(new, cache=memory['cache'])[0][:, -1]

    def next_symbol(self, idx, memory):
        """Logits after (B, T) symbols. A whole chunk passes through encoder and core once; then memory holds the state
        from which the next one is spelled. A row whose chunk has ended is led through padding to the last slot."""
        L, V = self.config.byte_limit + 1, self.config.vocab_size
        room, whole = self.config.block_size // L - 1, idx.size(1) // L         # whole chunks that fit, that there are
        if not memory:
            memory.update(cache=[], first=max(0, whole - room), read=-1)
        elif whole > memory['read'] and whole - memory['first'] > room:
            memory.update(cache=[], first=whole - (room + 1) // 2, read=-1)
        if whole > memory['read']:
            new = idx[:, max(memory['first'], memory['read']) * L:whole * L].view(len(idx), -1, L)
            memory.update(state=self.core(new, memory['cache'])[:, -1:], read=whole)
        chunk = F.pad(idx[:, whole * L:], (0, (whole + 1) * L - idx.size(1)), value=V - 1)
        logits = self.spell(memory['state'], chunk[:, None])[:, 0, idx.size(1) - whole * L]
        ended = ((chunk == V - 3) | (chunk == V - 2)).any(1, keepdim=True)
        padding = torch.zeros(V, device=idx.device).masked_fill(torch.arange(V, device=idx.device) < V - 1, -math.inf)
        return torch.where(ended, padding, logits.float())

    def routes(self, idx):
        return {}                                        # every token takes the same way

    def count_params(self):
        """Total, and active: what multiplies a token (byte-level: a chunk or one of its symbols). Shared weights count
        once in the first, in the second as often as they are used; the embedding table counts as the head."""
        total = active = sum(p.numel() for p in self.parameters())
        for shared in (self.ffn, self.attention, self.norm):
            active += (self.config.n_layer - len(shared)) * sum(p.numel() for p in shared[0].parameters())
        return total, active


Config, Model = STLMConfig, STLM                         # what train.py looks for
