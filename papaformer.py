"""
PaPaformer: a language model made of pretrained parallel paths
(Tapaninaho and Oussalah 2025, "PaPaformer: Language Model from Pre-trained Parallel Paths").

Narrow LLaMA-style models, the paths, are trained apart, each on its own kind of text. Then their layers are laid side
by side in the middle of a wider model, whose width is the sum of theirs, and that model is trained on:

    Layer Block (256) -> Connection 256->128 -> [k blocks of 128 side by side -> Connection] x 3 -> Layer Block (256)

Every block of a parallel layer works on every token; what differs is how a Connection joins the k outputs:
`share` concatenates them and maps them back to the paths' width. `gumbel1` and `gumbel2` let each token take one
output alone or a linear mix of all, chosen by a Gumbel-softmax router that reads the mix (1) or the concatenation (2).
With no parallel layers this file is a plain LLaMA: the paper's dense baselines, and the paths themselves.

What to look at first: `Gumbel.forward`, the paper's Eq. 2 to 7 in five lines, and `compose`, its Fig. 5.

Measured on one H200: six epochs of 3M tokens of stories and of math, three seeds: composed `share` has 2.628 and 3.114 nats per token, a
dense LLaMA_192 on the same text 2.241 and 2.595: docs/results.md. 2.55M training tokens/s at batch 128 x 256: docs/speed.md.

Departures from the paper, and gaps it leaves:
- The text wants auxiliary losses that keep each token's choice soft and spread the load; the printed Eq. 8 and 9 have
  both signs the other way, and sum over k of the k+1 choices. `intended` follows the text, `printed` the formulas'
  signs; the release has the first sign as intended, the second as printed, and takes both of the sampled one-hot
  weights (`released`). All three count all k+1 choices, and add 1e-8 inside the logarithm as the release does.
- In eval mode the router takes the best route without noise, so that evaluations can be repeated. The release samples.
- Table 2's FFN sizes contradict its parameter counts. Two thirds of 4d, rounded up to a multiple of 32, fits the
  counts within 2%, with an output projection in attention. The release has 4d and none (`ffn_hidden`, `attn_out_proj`).
- Section 3.4.1 speaks of 3 Layer Blocks and 2 parallel layers; Table 2 and the release have 2 and 3, and so have we.
- Paths of different widths (the paper's future work) work with `share`: one map per path instead of one for all.
- The paper gives no initialisation; the release's is 0.02 everywhere. Ours too, but the Connections are the residual
  stream itself and keep its size. Smaller differences to the release are listed in docs/papaformer.md.

Dimension letters: B batch, T sequence, D width, H heads, k paths, V vocabulary.
"""

import math
from dataclasses import dataclass, field, fields

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class PaPaformerConfig:
    vocab_size: int = 50278        # tokens the model knows, end-of-text included
    block_size: int = 256          # longest context
    n_layer: int = 2               # full-width Layer Blocks, half of them (rounded down) before the parallel layers
    n_head: int = 8                # their attention heads
    n_embd: int = 256              # their width, the paper's d
    ffn_hidden: int | None = None  # hidden width of their SwiGLU; None: 8/3 of the width, rounded up to 32s
    n_parallel: int = 3            # parallel layers; 0 makes this a plain LLaMA of n_layer blocks: a baseline, a path
    path_embd: list = field(default_factory=lambda: [128, 128])   # width of each of the k paths, the paper's d'
    path_head: list = field(default_factory=lambda: [4, 4])       # attention heads of each path
    path_ffn_hidden: list | None = None                           # hidden width of each; None: as ffn_hidden
    connection: str = 'share'      # how the paths' outputs are joined: share | gumbel1 | gumbel2
    temperature: float = 1.0       # of the Gumbel-softmax
    hard: bool = True              # a token takes one route, with a straight-through gradient; False: a soft mix of all
    aux_form: str = 'intended'     # signs of the auxiliary losses: intended | printed | released
    attn_out_proj: bool = True     # output projection in attention (the release has none)
    dropout: float = 0.0           # in the parallel blocks; without any, in all blocks

    def __post_init__(self):
        widths = [self.n_embd, *(self.path_embd if self.n_parallel else [])]
        heads = [self.n_head, *(self.path_head if self.n_parallel else [])]
        for name in ('vocab_size', 'block_size', 'n_layer', 'temperature'):
            if getattr(self, name) <= 0:
                raise ValueError(f'{name} = {getattr(self, name)} is too small')
        if self.n_parallel < 0 or not 0 <= self.dropout < 1:
            raise ValueError('n_parallel must be at least 0, dropout at least 0 and less than 1')
        if len(widths) != len(heads) or self.n_parallel and not self.path_embd:
            raise ValueError(f'path_embd {self.path_embd} and path_head {self.path_head} must have one entry per path')
        if self.path_ffn_hidden is not None and len(self.path_ffn_hidden) != len(self.path_embd):
            raise ValueError(f'path_ffn_hidden has {len(self.path_ffn_hidden)} entries for {len(self.path_embd)} paths')
        if any(hidden is not None and hidden < 1 for hidden in (self.ffn_hidden, *(self.path_ffn_hidden or []))):
            raise ValueError('ffn_hidden and path_ffn_hidden must be at least 1')
        for d, h in zip(widths, heads):
            if d < 1 or h < 1 or d % (2 * h):            # rotary positions turn pairs
                raise ValueError(f'a width of {d} cannot be split into {h} heads of an even width')
        choices = dict(connection=('share', 'gumbel1', 'gumbel2'), aux_form=('intended', 'printed', 'released'))
        for name, names in choices.items():
            if getattr(self, name) not in names:
                raise ValueError(f"{name} is '{getattr(self, name)}'; it can be {', '.join(names)}")
        if self.n_parallel and self.connection != 'share' and len(set(self.path_embd)) > 1:
            raise ValueError(f"{self.connection} adds the paths' outputs, so path_embd {self.path_embd} must be equal; "
                             "use connection='share'")


# ---------------------------------------------------------------------------------------------------------------
# The LLaMA block, of which everything is made


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


class Block(nn.Module):
    """The paper's Fig. 1: RMSNorm, rotary attention, RMSNorm, SwiGLU; Layer Block or parallel block, by its width."""

    def __init__(self, d, n_head, hidden, layer, dropout, config):
        super().__init__()
        hidden = hidden or math.ceil(8 * d / 3 / 32) * 32
        self.n_head, self.layer = n_head, layer
        self.norm_1, self.norm_2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d, bias=False) if config.attn_out_proj else nn.Identity()
        self.fc = nn.Linear(d, 2 * hidden, bias=False)   # gate and up
        self.down = nn.Linear(hidden, d, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, past=0, cache=None):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)   # each (B, H, T, d)
        y = attend(rope(q, past), rope(k, past), v, cache, self.layer, self.dropout.p if self.training else 0.0)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(B, T, D)))
        gate, up = self.fc(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.dropout(self.down(F.silu(gate) * up))


# ---------------------------------------------------------------------------------------------------------------
# Connections. Each takes the list of the paths' outputs and returns the list of what the next layer's paths read (one
# tensor for all of them, or one each), and auxiliary losses


class Share(nn.Module):
    """Share-Linear (Fig. 3): the concatenated outputs (Eq. 1) through one linear map, or one per path."""

    def __init__(self, d_in, widths):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(d_in, d, bias=False) for d in widths)

    def forward(self, outputs):
        y = torch.cat(outputs, -1)                       # (B, T, sum of widths), Eq. 1
        return [linear(y).type_as(y) for linear in self.maps], {}     # the stream stays in its own precision


class Router(nn.Module):
    """A linear map to k+1 scores, one per path and one for their mix -> (weights (B, T, k+1), auxiliary losses)."""

    def __init__(self, d, n_choices, config):
        super().__init__()
        self.linear = nn.Linear(d, n_choices, bias=False)
        self.temperature, self.hard, self.aux_form = config.temperature, config.hard, config.aux_form

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):      # in float32 (TF32 on a GPU): near ties should not hang on rounding
            logits = self.linear(x.to(self.linear.weight.dtype))
            if self.training:
                weights = F.gumbel_softmax(logits, self.temperature, self.hard)
            elif self.hard:
                weights = F.one_hot(logits.argmax(-1), logits.size(-1)).to(logits.dtype)
            else:
                weights = (logits / self.temperature).softmax(-1)
            return weights, self.losses(logits, weights)

    def losses(self, logits, weights):
        """Eq. 8 and 9 in the signs of aux_form; minimising `intended` keeps tokens undecided and spreads the load."""
        pi = weights if self.aux_form == 'released' else logits.softmax(-1)     # (B, T, k+1)
        mean = pi.flatten(0, -2).mean(0)                                        # the load of each choice
        entropy = (pi * (pi + 1e-8).log()).sum(-1).mean()                       # minus a token's mean entropy
        load = (mean * (mean + 1e-8).log()).sum()                               # minus the entropy of the load
        sign, load_sign = dict(intended=(1, 1), printed=(-1, -1), released=(1, -1))[self.aux_form]
        return dict(entropy=sign * entropy, load=load_sign * load)


class Gumbel(nn.Module):
    """Gumbel MoE (Fig. 4): each token takes one path's output, or a linear mix of all of them."""

    def __init__(self, k, d, config):
        super().__init__()
        self.reads_mix = config.connection == 'gumbel1'
        self.combine = nn.Linear(k * d, d, bias=False)
        self.router = Router(d if self.reads_mix else k * d, k + 1, config)     # Table 1

    def forward(self, outputs):
        y = torch.cat(outputs, -1)                                              # (B, T, k*d'), Eq. 1
        mix = self.combine(y).type_as(y)                                        # (B, T, d'), Eq. 2, Eq. 6
        weights, losses = self.router(mix if self.reads_mix else y)             # (B, T, k+1), Eq. 4, Eq. 5
        choices = [*outputs, mix]
        return [sum(w * f for w, f in zip(weights.split(1, -1), choices))], losses    # Eq. 3, Eq. 7


class ParallelLayer(nn.Module):
    """k blocks side by side, each over all tokens, and the Connection that joins them."""

    def __init__(self, config, layer, is_last):
        super().__init__()
        c, k = config, len(config.path_embd)
        hidden = c.path_ffn_hidden or [None] * k
        self.blocks = nn.ModuleList(
            Block(c.path_embd[i], c.path_head[i], hidden[i], layer + i, c.dropout, c) for i in range(k))
        if c.connection == 'share':
            self.connection = Share(sum(c.path_embd), [c.n_embd] if is_last else read_widths(c))
        else:
            self.connection = Gumbel(k, c.path_embd[0], c)

    def forward(self, inputs, past, cache):
        inputs = inputs * (len(self.blocks) // len(inputs))                     # one for all, or one each
        return self.connection([block(x, past, cache) for block, x in zip(self.blocks, inputs)])


def read_widths(config):
    """Paths of one width read the same tensor; of several, each its own."""
    return config.path_embd if len(set(config.path_embd)) > 1 else config.path_embd[:1]


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


class PaPaformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        k, before = len(c.path_embd), c.n_layer // 2 if c.n_parallel else c.n_layer
        dropout = 0.0 if c.n_parallel else c.dropout

        def layer_block(layer):
            return Block(c.n_embd, c.n_head, c.ffn_hidden, layer, dropout, c)
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.first = nn.ModuleList(layer_block(i) for i in range(before))
        self.parallel = nn.ModuleList(
            ParallelLayer(c, before + k * i, i == c.n_parallel - 1) for i in range(c.n_parallel))
        self.last = nn.ModuleList(layer_block(k * c.n_parallel + i) for i in range(before, c.n_layer))
        if c.n_parallel:
            self.shrink = Share(c.n_embd, read_widths(c))
            if c.connection != 'share':                  # the last Share maps to d_L itself
                self.grow = Share(c.path_embd[0], [c.n_embd])
        self.norm_f = nn.RMSNorm(c.n_embd, eps=1e-6)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self):
        """Matrices from N(0, 0.02), smaller where they write to the residual stream. Connections are the stream itself:
        1/sqrt(fan-in) keeps its size."""
        depth = self.config.n_layer + self.config.n_parallel
        for name, p in self.named_parameters():
            if 'norm_' in name:
                continue                                 # ones already
            if '.maps.' in name or '.combine.' in name:
                nn.init.normal_(p, std=1 / math.sqrt(p.size(1)))
            else:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * depth) if '.proj' in name or '.down' in name else 0.02)

    def features(self, idx, cache=None):
        """(B, T) token ids -> final-norm states (B, T, D) and the auxiliary losses, each summed over layers."""
        past = cache[0][0].size(2) if cache else 0
        if past + idx.size(1) > self.config.block_size:
            raise ValueError(f'{past + idx.size(1)} tokens are more than the block_size of {self.config.block_size}')
        x, aux = self.wte(idx), {}                                              # (B, T, d_L)
        for block in self.first:
            x = block(x, past, cache)
        if self.config.n_parallel:
            inputs, _ = self.shrink([x])                                        # (B, T, d') for all, or one each
            for layer in self.parallel:
                inputs, losses = layer(inputs, past, cache)
                aux = {name: aux.get(name, 0) + loss for name, loss in losses.items()}
            (x,), _ = self.grow(inputs) if self.config.connection != 'share' else (inputs, {})   # (B, T, d_L)
        for block in self.last:
            x = block(x, past, cache)
        return self.norm_f(x), aux

    def forward(self, idx, targets=None, cache=None, reduction='mean'):
        x, aux = self.features(idx, cache)
        if targets is None:
            return self.head(x), None, aux
        return None, head_loss(x, self.head.weight, targets, reduction), aux

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Continue (B, T) prompts; call eval() first. When the context is full, its last half starts a new cache."""
        limit = self.config.block_size
        cache, new = [], idx[:, -limit:]                 # new: the tokens that the cache does not hold yet
        for _ in range(max_new_tokens):
            if cache and cache[0][0].size(2) == limit:
                cache, new = [], idx[:, -max(1, limit // 2):]
            logits = self(new, cache=cache)[0][:, -1].float()
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            idx = torch.cat((idx, new), 1)
        return idx

    @torch.no_grad()
    def routes(self, idx):
        """{layer: (B, T, k+1)}: the Gumbel weights as multiplied in, the mix last; {} for `share`."""
        found, hooks = {}, []
        for name, module in self.named_modules():
            if isinstance(module, Router):
                def record(_, args, output, name=name.removesuffix('.connection.router')):
                    found[name] = output[0]
                hooks.append(module.register_forward_hook(record))
        try:
            self.features(idx)
        finally:
            for hook in hooks:
                hook.remove()
        return found                                     # in the order in which a token meets them

    def count_params(self):
        """Total, and active: all but the embedding, which is only looked up (every path works on every token)."""
        total = sum(p.numel() for p in self.parameters())
        return total, total - self.wte.weight.numel()


# ---------------------------------------------------------------------------------------------------------------
# Surgery and analysis


def compose(paths, **settings):
    """Fig. 5: k trained path models become the parallel layers of one new model, whose width is the sum of theirs.
    Embedding and head are concatenated along the width, in the order of the paths; Layer Blocks, Connections and the
    final norm are fresh. `settings` are fields of the new config (connection, n_layer, n_head, dropout, ...)."""
    if not isinstance(paths, list) or not paths:
        raise ValueError('compose takes a list of path models')
    configs = [path.config for path in paths]
    if any(c.n_parallel for c in configs):
        raise ValueError('a path must be a model without parallel layers (n_parallel=0)')
    for name in ('vocab_size', 'n_layer', 'attn_out_proj'):
        values = [getattr(c, name) for c in configs]
        if len(set(values)) > 1:
            raise ValueError(f'the paths differ in {name}: {values}')
    default = dict(block_size=max(c.block_size for c in configs), n_head=sum(c.n_head for c in configs))
    fixed = dict(vocab_size=configs[0].vocab_size, n_parallel=configs[0].n_layer, n_embd=sum(c.n_embd for c in configs),
                 path_embd=[c.n_embd for c in configs], path_head=[c.n_head for c in configs],
                 path_ffn_hidden=[path.first[0].down.in_features for path in paths],
                 attn_out_proj=configs[0].attn_out_proj)
    for name in settings:
        if name in fixed:
            raise ValueError(f"'{name}' follows from the paths")
        if name not in [f.name for f in fields(PaPaformerConfig)]:
            raise ValueError(f"'{name}' is not a setting of the model")
    if 'n_head' not in settings and fixed['n_embd'] % (2 * default['n_head']):
        raise ValueError(f"a width of {fixed['n_embd']} cannot be split into the paths' heads together: set n_head")
    model = PaPaformer(PaPaformerConfig(**{**default, **settings, **fixed})).to(paths[0].wte.weight)
    with torch.no_grad():
        model.wte.weight.copy_(torch.cat([path.wte.weight for path in paths], 1))
        model.head.weight.copy_(torch.cat([path.head.weight for path in paths], 1))
    for i, layer in enumerate(model.parallel):
        for block, path in zip(layer.blocks, paths):
            block.load_state_dict(path.first[i].state_dict())
    return model


@torch.no_grad()
def path_usage(model, idx):
    """(B, layers): the path that the last token of (B, T) prompts uses, counted from 0; k stands for the mix (Table 6).
    Gumbel: the chosen route. Share chooses nothing: the path whose output is most similar (cosine) to what the
    Connection makes of them all, in every layer but the last, whose widths differ. Call eval() first."""
    if model.config.connection != 'share':
        found = [weights[:, -1].argmax(-1) for weights in model.routes(idx).values()]
    else:
        found, hooks = [], []

        def record(_, args, output):
            outputs, (joined, _) = args[0], output
            joined = joined * (len(outputs) // len(joined))
            similar = [F.cosine_similarity(f[:, -1], y[:, -1], dim=-1) for f, y in zip(outputs, joined)]
            found.append(torch.stack(similar, -1).argmax(-1))
        for layer in model.parallel[:-1]:
            hooks.append(layer.connection.register_forward_hook(record))
        try:
            model.features(idx)
        finally:
            for hook in hooks:
                hook.remove()
    if not found:
        raise ValueError('no path to choose: a model with parallel layers is needed (two of them for share)')
    return torch.stack(found, 1)


def path_accuracy(choices, path):
    """The share of (B, layers) choices that are the prompt's own path (B,); the mix counts as wrong."""
    return (choices == path[:, None]).float().mean().item()


Config, Model = PaPaformerConfig, PaPaformer             # what train.py looks for
