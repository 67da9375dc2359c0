"""
Super Tiny Language Models (Guertler, Hillier et al. 2024, "Super Tiny Language Models").

A LLaMA-style Transformer of 56M parameters (the paper: 50M), and two ways to make it smaller:
- Bytes (section 5.2). Nearly half of the baseline is its table of 50,257 embeddings. Here a BPE
  tokenizer only marks where chunks of bytes begin and end. A small encoder turns each chunk into
  one vector, the core is causal over chunks, and a small decoder spells the next chunk:
    bytes -> [encoder: in a chunk] -> mean -> [core: over chunks] -> [decoder: in a chunk] -> bytes
- Shared weights (section 5.1). All layers, or each group of `share_group` layers, use one FFN
  (`share='ffn'`, as in MobiLlama) or one whole block (`share='all'`, as in ALBERT). `lora_rank`
  gives each layer its own low-rank adapters. Sharing saves parameters, not computation.
Section 5.3 is stlm_depth.py. Section 5.4 changes the data and not the model (docs/stlm.md).

What to look at first: `ByteEnds.embed`, `encode` and `spell`, then `Transformer.run_layers`.

Departures that change results (docs/stlm.md has all of them, and what we measured):
- About the decoder, the paper says only that it resembles the encoder. The authors' code spells
  all bytes at once (`parallel`). Our `causal` decoder also reads earlier bytes, and is far better.
- The byte parts are 128 wide (the paper: "64 for example") and have learned positions.
- Table 1 gives no number of key and value heads. 4, as in the authors' code, make 55.9M parameters.
- Under a dropout schedule (section 5.5) attention has no dropout.

Dimension letters: B batch, T sequence (tokens, symbols or the core's vectors), C chunks, L slots of
a chunk, D width, d width of the byte parts or of one head, H heads, V vocabulary.
Next to read: stlm_depth.py.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class STLMConfig:
    vocab_size: int = 50257        # tokens, end-of-text included; byte-level: 259 symbols
    block_size: int = 512          # longest context; byte-level: counted in symbols
    n_layer: int = 10
    n_head: int = 16               # query heads
    n_kv_head: int = 4             # key and value heads; n_head / n_kv_head query heads share one
    n_embd: int = 512              # width
    ffn_hidden: int = 1536         # hidden width of SwiGLU
    dropout: float = 0.1           # on embeddings, attention and both residual branches
    dropout_schedule: str = 'constant'     # section 5.5; `dropout_rates` below has the others
    dropout_phase: float = 0.5     # early: dropout before this part of the run; late: after it
    share: str = 'none'            # weights that layers have in common: none | ffn | all
    share_group: int = 0           # with share: how many layers in a row share; 0: all of them
    lora_rank: int = 0             # with share: rank of each layer's own adapters; 0: none
    byte_limit: int = 0            # most bytes in a chunk (tokens in a sentence); 0: a token model
    decoder: str = 'causal'        # how a chunk is spelled: causal | parallel
    byte_embd: int = 128           # width of the byte encoder and decoder
    byte_layer: int = 2            # layers of each
    byte_head: int = 4             # attention heads of each

    def __post_init__(self):
        assert self.share in ('none', 'ffn', 'all'), \
            f"share is '{self.share}'; it can be none, ffn or all"
        assert self.decoder in ('causal', 'parallel'), \
            f"decoder is '{self.decoder}'; it can be causal or parallel"
        schedules = dropout_rates(self, 0)
        assert self.dropout_schedule in schedules, \
            f"dropout_schedule is '{self.dropout_schedule}'; it can be {', '.join(schedules)}"
        assert self.dropout_schedule == 'constant' or self.dropout, \
            'a dropout_schedule needs a dropout above 0'
        assert self.share != 'none' or not (self.lora_rank or self.share_group), \
            "lora_rank and share_group need shared weights: set share='ffn' or share='all'"
        assert self.n_head % self.n_kv_head == 0, 'n_head must be a multiple of n_kv_head'
        for d, n_head in ((self.n_embd, self.n_head), (self.byte_embd, self.byte_head)):
            assert d % (2 * n_head) == 0, f'a width of {d} has no {n_head} heads of even width'
        slots = self.byte_limit + 1
        assert not self.byte_limit or self.block_size % slots == 0, \
            f'block_size must be a multiple of {slots} (byte_limit + 1)'


# ---- The first idea: bytes at both ends of the core (section 5.2) --------------------------------

class TokenEnds(nn.Module):
    """Turns tokens into the core's input, its states into logits. ByteEnds does so with bytes."""
    def __init__(self, config):
        super().__init__()
        self.slots = 1                                   # a token is a chunk of one
        self.n_start = 0
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)    # also the head
        nn.init.normal_(self.wte.weight, std=0.02)

    def embed(self, idx, cache):
        return self.wte(idx)

    def logits(self, states, idx):
        return F.linear(states, self.wte.weight)


class ByteEnds(nn.Module):
    """Symbols are bytes, end-of-chunk ($), end-of-text and padding (_). Every chunk takes L =
    byte_limit + 1 slots. If L = 5, the token 'cats!' is |c a t s $|! $ _ _ _|: a token of more than
    byte_limit bytes becomes several chunks. End-of-text is a chunk of its own, without $.
    The model predicts $ like a byte, but never _, so give _ the target -1 (train.py does). A symbol
    that a slot cannot hold gets probability 0 (as a target it costs inf), so the probabilities of
    all valid chunks sum to 1."""
    def __init__(self, config):
        super().__init__()
        V, D, d = config.vocab_size, config.n_embd, config.byte_embd
        self.causal = config.decoder == 'causal'
        self.slots = config.byte_limit + 1               # L
        self.n_start = 1                                 # the core reads `start` first, so logits
                                                         # begin at symbol 0, not at 1
        self.end_of_chunk, self.end_of_text, self.padding = V - 3, V - 2, V - 1
        self.wte = nn.Embedding(V, d)                    # of symbols; also the head
        nn.init.normal_(self.wte.weight, std=1 / math.sqrt(d))
        self.encoder, self.decoder = ChunkTransformer(config), ChunkTransformer(config)
        self.pool = linear(d, D, 0.02 / math.sqrt(d))    # about as large as embeddings of tokens
        self.spread = linear(D, self.slots * d, 1 / math.sqrt(d * D))    # ... and of symbols
        self.start = nn.Parameter(0.02 * torch.randn(D))

    def embed(self, idx, cache):
        """(B, T) -> (B, C + 1, D): the start, then C chunks. So the core's state c has read the
        chunks before chunk c, and spells chunk c. If a cache holds the start: (B, C, D)."""
        chunks = self.cut(idx)[:, :-1]                   # without the unfinished one
        x = [] if cache else [self.start.expand(len(idx), 1, -1)]
        if chunks.size(1):
            x.append(self.encode(chunks))
        return torch.cat(x, 1)

    def cut(self, idx):
        """(B, T) symbols -> (B, C + 1, L): C chunks, then the unfinished one (or only padding)."""
        missing = self.slots - idx.size(1) % self.slots
        return F.pad(idx, (0, missing), value=self.padding).view(len(idx), -1, self.slots)

    def encode(self, chunks):
        """(B, C, L) symbols -> (B, C, D). The symbols of a chunk see each other. Their mean without
        padding is the chunk's vector. Only later chunks are predicted from it."""
        visible = chunks != self.padding                 # (B, C, L)
        visible[:, :, 0] = True                          # so a chunk of padding has a mean, too
        mask = visible.flatten(0, 1)[:, None, None]      # (B * C, 1, 1, L)
        h = self.encoder(self.wte(chunks), mask)         # (B, C, L, d)
        mean = (h * visible[..., None]).sum(2) / visible.sum(2, keepdim=True)
        return self.pool(mean).type_as(mean)             # float32, also under autocast

    def spell(self, states, chunks):
        """(B, C, D) states, the (B, C, L) chunks that they predict -> logits (B, C, L, V). Slot j
        reads the state and, if `causal`, the symbols before it; never its own or later ones."""
        x = self.spread(states).type_as(states)
        x = x.unflatten(2, (self.slots, -1))             # a vector per slot
        if self.causal:
            before = self.wte(chunks[:, :, :-1])
            x = x + F.pad(before, (0, 0, 1, 0))          # slot j gets symbol j - 1, slot 0 none
        h = self.decoder(x, causal=self.causal)          # (B, C, L, d)
        logits = F.linear(h, self.wte.weight)
        possible = torch.zeros(logits.shape[2:], dtype=torch.bool, device=logits.device)    # (L, V)
        possible[:-1, :self.end_of_chunk] = True         # bytes, in all slots but the last
        possible[1:, self.end_of_chunk] = True           # no chunk is empty
        possible[0, self.end_of_text] = True             # a chunk by itself
        return logits.masked_fill(~possible, -math.inf)

    def logits(self, states, idx):
        """(B, T + 1, V) logits of symbols 0 to T. Symbol 0 is no target, so forward drops it."""
        return self.spell(states, self.cut(idx)).flatten(1, 2)[:, :idx.size(1) + 1]


# ---- The second idea: layers share their weights (section 5.1) -----------------------------------

class Transformer(nn.Module):
    """The layers of the core, the encoder or the decoder. What several layers share exists once."""
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        group = c.share_group or c.n_layer               # how many layers in a row share
        own = [*range(c.n_layer)]                        # [0, 1, 2]: three layers, one part each
        shared = [i // group for i in own]               # [0, 0, 1]: in groups of two
        self.attention_of = shared if c.share == 'all' else own      # which one a layer uses
        self.ffn_of = own if c.share == 'none' else shared
        self.attention = nn.ModuleList(Attention(c) for _ in {*self.attention_of})
        self.norm = nn.ModuleList(nn.RMSNorm(c.n_embd, eps=1e-6) for _ in {*self.attention_of})
        self.ffn = nn.ModuleList(SwiGLU(c) for _ in {*self.ffn_of})
        maps = dict(fc=self.ffn[0].fc, down=self.ffn[0].down)        # what the layers share
        if c.share == 'all':
            maps |= dict(qkv=self.attention[0].qkv, proj=self.attention[0].proj)
        self.adapters = nn.ModuleList(                   # each layer's own, one per shared map
            nn.ModuleDict({name: adapter(base, c.lora_rank) for name, base in maps.items()})
            for _ in range(c.n_layer if c.lora_rank else 0))
        self.norm_f = nn.RMSNorm(c.n_embd, eps=1e-6)
        is_constant = c.dropout_schedule == 'constant'
        self.dropout = nn.Dropout(c.dropout) if is_constant else ScheduledDropout()

    def run_layers(self, x, attend_in):
        """(B, T, D) -> final-norm states. attend_in(layer, q, k, v): attention of core or chunk."""
        x = self.dropout(x)
        for i, (a, f) in enumerate(zip(self.attention_of, self.ffn_of)):
            adapters = self.adapters[i] if self.adapters else {}
            x = x + self.dropout(self.attention[a](x, adapters, attend_in, i))
            x = x + self.dropout(self.ffn[f](self.norm[a](x), adapters))
        return self.norm_f(x)


def adapter(shared, rank):
    """A low-rank map, zero at first, that a layer adds to a linear map that it shares."""
    down = linear(shared.in_features, rank)
    up = linear(rank, shared.out_features, std=0.0)
    return nn.Sequential(OrderedDict(down=down, up=up))


def adapted(shared, x, adapters, name):
    """shared(x), plus what the layer's own adapter of that name adds, if it has one."""
    y = shared(x)
    return y + adapters[name](x) if name in adapters else y


# ---- The plain parts: rotary positions, attention, FFN, the Transformer inside a chunk -----------

def linear(d_in, d_out, std=0.02):
    """A linear map without a bias, its weights drawn with this standard deviation."""
    new = nn.Linear(d_in, d_out, bias=False)
    nn.init.normal_(new.weight, std=std)
    return new


def rotary(position, d, base=10000.0):
    """Rotary positions: channels i and i + d/2 of a head are a pair, which turns by an angle that
    grows with the position. Positions (T,) -> cosines and sines, each (T, d), for `rotate`. They
    are float32 or wider, because bfloat16 cannot tell large positions apart."""
    pair = torch.arange(d // 2, device=position.device, dtype=position.dtype)
    frequency = base ** (-pair / (d // 2))
    angle = position[..., None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x, table):
    """Turn (B, H, T, d) heads: (a, b) becomes (a cos - b sin, b cos + a sin)."""
    cos, sin = table
    other = x.roll(x.size(-1) // 2, -1)                  # (b, a)
    return (x * cos + other * sin).type_as(x)


def attend(q, k, v, cache, layer, dropout):
    """Causal attention of (B, H, T, d) heads. `cache`, a (k, v) per layer, is read and extended."""
    if cache is not None:
        if layer < len(cache):
            k, v = torch.cat((cache[layer][0], k), 2), torch.cat((cache[layer][1], v), 2)
            cache[layer] = (k, v)
        else:
            cache.append((k, v))
    T, S = q.size(2), k.size(2)
    causal = True if T == S else False                   # a plain bool, which torch.compile needs
    mask = None                                          # if causal, or if one query sees every key
    if 1 < T < S:                                        # query t stands at position S - T + t
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal,
        enable_gqa=q.size(1) > k.size(1))                # fewer heads in k, v


class Attention(nn.Module):
    """Grouped-query attention: n_head / n_kv_head query heads read each key and value head."""
    def __init__(self, config):
        super().__init__()
        d, n_head, n_kv_head = config.n_embd, config.n_head, config.n_kv_head
        self.counts = (n_head, n_kv_head, n_kv_head)     # heads of queries, keys, values
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.qkv = linear(d, sum(self.counts) * (d // n_head))
        self.proj = linear(d, d, 0.02 / math.sqrt(2 * config.n_layer))   # adds to the stream

    def forward(self, x, adapters, attend_in, layer):
        heads = adapted(self.qkv, self.norm(x), adapters, 'qkv')
        heads = heads.unflatten(-1, (sum(self.counts), -1)).transpose(1, 2)
        q, k, v = heads.split(self.counts, 1)            # each (B, heads, T, d)
        y = attend_in(layer, q, k, v)
        return adapted(self.proj, y.transpose(1, 2).flatten(2), adapters, 'proj')


class SwiGLU(nn.Module):
    """The FFN, without its norm: under share='ffn' each layer has a norm of its own."""
    def __init__(self, config):
        super().__init__()
        d, hidden = config.n_embd, config.ffn_hidden
        self.fc = linear(d, 2 * hidden)                  # gate and up
        self.down = linear(hidden, d, 0.02 / math.sqrt(2 * config.n_layer))

    def forward(self, x, adapters):
        gate, up = adapted(self.fc, x, adapters, 'fc').chunk(2, dim=-1)
        return adapted(self.down, F.silu(gate) * up, adapters, 'down')


class ChunkTransformer(Transformer):
    """The byte encoder or decoder: a small Transformer in each chunk, with learned positions."""
    def __init__(self, config):
        d, heads = config.byte_embd, config.byte_head
        small = replace(config, n_layer=config.byte_layer, n_embd=d, n_head=heads, n_kv_head=heads,
                        ffn_hidden=3 * d, dropout=0.0, share='none', share_group=0, lora_rank=0,
                        dropout_schedule='constant')
        super().__init__(small)
        self.position = nn.Parameter(0.02 * torch.randn(config.byte_limit + 1, d))
        for p in self.parameters():
            if p.dim() == 2:             # 1/sqrt(fan-in), from which narrow maps learn far faster
                p.data.mul_(1 / (0.02 * math.sqrt(p.size(1))))

    def forward(self, x, mask=None, causal=False):       # x is (B, C, L, d)
        def attend_in(layer, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.run_layers((x + self.position).flatten(0, 1), attend_in).view_as(x)


# ---- Dropout whose rate changes during training (section 5.5) ------------------------------------

def dropout_rates(config, done):
    """{schedule: the rate when this part of the run, from 0 to 1, is done}"""
    p, is_early = config.dropout, done < config.dropout_phase
    return dict(
        constant=p, early=p * is_early, late=p * (not is_early), linear=p * (1 - done),
        rising=p * done, triangle=p * (1 - abs(2 * done - 1)),
        triangles=p * (1 - abs(8 * done % 2 - 1)))       # one peak, four peaks


class ScheduledDropout(nn.Module):
    """Dropout at the rate p. Because p is a tensor, compiled models and captured CUDA graphs read
    it anew at every step; because it is a buffer, it moves with the model. SDPA takes no tensor as
    its rate, so attention has no dropout under a schedule."""
    def __init__(self):
        super().__init__()
        self.register_buffer('p', torch.zeros(()), persistent=False)

    def forward(self, x):
        if not self.training:
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.p
        return torch.where(keep, x / (1 - self.p).to(x.dtype), 0)


# ---- The model -----------------------------------------------------------------------------------

class STLM(Transformer):
    def __init__(self, config):
        super().__init__(config)
        self.ends = ByteEnds(config) if config.byte_limit else TokenEnds(config)

    @property
    def wte(self):                                       # tools expect every model to have a `wte`
        return self.ends.wte

    def set_progress(self, done):
        """train.py calls this before every step, with the part of the run that is done."""
        if self.config.dropout_schedule != 'constant':
            self.dropout.p.fill_(dropout_rates(self.config, done)[self.config.dropout_schedule])

    def core(self, x, cache=None):
        """(B, T, D) vectors of tokens or chunks -> final-norm states (B, T, D)."""
        c = self.config
        past = cache[0][0].size(2) if cache else 0
        wide = torch.promote_types(x.dtype, torch.float32)
        position = torch.arange(past, past + x.size(1), device=x.device, dtype=wide)
        # torch.compile computes one stacked table; a pair it would compute again in every layer
        table = torch.stack(rotary(position, c.n_embd // c.n_head))
        dropout = c.dropout if self.training and c.dropout_schedule == 'constant' else 0.0

        def attend_in(layer, q, k, v):
            return attend(rotate(q, table), rotate(k, table), v, cache, layer, dropout)
        return self.run_layers(x, attend_in)

    def read(self, idx, cache):
        """(B, T) ids -> the core's states: one per token, or one for the start and per chunk."""
        if self.config.byte_limit and cache is not None:
            raise ValueError('the byte-level model keeps its cache inside generate')
        past = cache[0][0].size(2) if cache else 0
        length = past + idx.size(1)
        if length > self.config.block_size:
            raise ValueError(
                f'{length} tokens are more than the block_size of {self.config.block_size}')
        return self.core(self.ends.embed(idx, cache), cache)

    def features(self, idx, cache=None):
        """(B, T) ids -> (B, T, D): for each symbol, the final-norm state that spells the next."""
        states = self.read(idx, cache).repeat_interleave(self.ends.slots, 1)    # a state per symbol
        return states[:, self.ends.n_start:][:, :idx.size(1)], {}        # bytes: without symbol 0's

    def forward(self, idx, targets=None, cache=None, reduction='mean'):
        """-> logits, None, {}; with targets (-1: ignored) None, loss, {}. Extends a cache."""
        logits = self.ends.logits(self.read(idx, cache), idx)[:, self.ends.n_start:]
        if targets is None:
            return logits, None, {}
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                               reduction=reduction)
        loss = loss.view_as(targets) if reduction == 'none' else loss
        return None, loss, {}

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Continue (B, T) prompts; call eval() first. A full cache restarts from its newer half.
        The core reads a chunk of bytes once it is complete, and its last state spells the next one.
        max_new_tokens counts symbols, padding included. A prompt may end inside a chunk."""
        slots = self.ends.slots                          # of a chunk; a token is a chunk of one
        limit = self.config.block_size // slots          # vectors in a cache, the start included
        cache = []
        # The first chunk that the core has not read. A prompt that is too long loses its oldest.
        unread = max(0, idx.size(1) // slots + self.ends.n_start - limit)
        for _ in range(max_new_tokens):
            complete = idx.size(1) // slots              # complete chunks
            if unread < complete or not cache:           # a new chunk, or the first step
                if cache and cache[0][0].size(2) == limit:       # full: read the newer half again
                    cache, unread = [], complete - max(1, limit // 2)
                chunks = idx[:, unread * slots:complete * slots]
                state = self.core(self.ends.embed(chunks, cache), cache)[:, -1:]
                unread = complete
            chunk = idx[:, complete * slots:]            # the one being spelled; empty for tokens
            logits = self.ends.logits(state, chunk)[:, -1].float()
            if top_k:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            new = logits.argmax(-1, keepdim=True)        # greedy, if temperature is 0
            if temperature > 0:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            if slots > 1:                                # a chunk that has ended gets only padding
                ended = (chunk >= self.ends.end_of_chunk).any(1, keepdim=True)
                new = new.masked_fill(ended, self.ends.padding)
            idx = torch.cat((idx, new), 1)
        return idx

    def routes(self, idx):
        return {}                                        # no routers: all tokens take the same path

    def count_params(self):
        """Total, and active: a shared weight counts once for each layer that uses it."""
        count = lambda *parts: sum(p.numel() for part in parts for p in part.parameters())
        stored = count(self.attention, self.norm, self.ffn)
        used = sum(count(self.attention[a], self.norm[a], self.ffn[f])
                   for a, f in zip(self.attention_of, self.ffn_of))
        total = count(self)
        return total, total - stored + used


Config, Model = STLMConfig, STLM                         # what train.py looks for
