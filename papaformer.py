"""
PaPaformer (Tapaninaho, Oussalah 2025, "PaPaformer: Language Model from Pre-trained Parallel Paths")

A language model composed of smaller ones. Narrow LLaMA-style models, the k paths, are trained
separately, each on its own kind of text. Then their layers are put side by side in the middle of a
wider model, whose width is the sum of theirs, and that model is trained on text of all kinds:

    Layer Block (256) -> shrink to 128 -> [k blocks of 128 -> Connection] x 3 -> grow -> Layer Block

Every block runs on every token, so unlike a sparse mixture this saves no computation. A Connection
joins the outputs of the k blocks. `share` maps their concatenation to the width of a path (after
the last layer to 256, so it needs no `grow`). With `gumbel1` and `gumbel2` each token takes one
path's output, or a linear mix of all. A composed model does not start from what its paths knew,
because its first layers, shrink and Connections are new. `n_parallel=0` makes a plain LLaMA.

What to look at first: `Gumbel.forward`, which is Eq. 1 to 7, and `compose`, which is Fig. 5.

Departures that change results (docs/papaformer.md has all of them, and what we measured):
- Eq. 8 and 9 as printed reward the opposite of what the text wants: see `routing_losses`. They also
  leave out the mix, which we count as one of k+1 choices. The weights are ours: train with
  `loss + 0.01 * (aux['entropy'] + aux['load'])`.
- In eval mode a token takes the best choice. The authors' code samples.
- Table 2's FFN sizes contradict its parameter counts. 8/3 of the width fits the counts.

Dimension letters: B batch, T sequence, N = B*T tokens, D width (d_L: Layer Block, d': path), H
heads, d width of a head, k paths. Next to read: moduleformer.py.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class PaPaformerConfig:
    vocab_size: int = 50278        # tokens the model knows, end-of-text included
    block_size: int = 256          # longest context
    n_layer: int = 2               # full-width Layer Blocks, half of them before the parallel ones
    n_head: int = 8                # their attention heads
    n_embd: int = 256              # their width, d_L
    ffn_hidden: int | None = None  # FFN width; None: 8/3 n_embd, rounded up to a multiple of 32
    n_parallel: int = 3            # parallel layers; 0 makes this a plain LLaMA: a baseline, a path
    path_embd: list[int] = field(default_factory=lambda: [128, 128])  # d' of the k paths
    path_head: list[int] = field(default_factory=lambda: [4, 4])      # attention heads of each path
    path_ffn_hidden: list[int] | None = None                          # ffn_hidden of each path
    connection: str = 'share'      # what joins the outputs of the paths: share | gumbel1 | gumbel2
    temperature: float = 1.0       # of the Gumbel-softmax
    hard: bool = True              # one choice per token, straight-through gradient; False: soft
    aux_form: str = 'intended'     # form of the auxiliary losses: intended | printed | released
    attn_out_proj: bool = True     # output projection in attention (the authors' code has none)
    rope_base: float = 10000.0     # of the rotary positions: larger turns more slowly
    norm_eps: float = 1e-5         # added to the mean square in RMSNorm
    dropout: float = 0.0           # in the parallel blocks (in all blocks if n_parallel = 0)

    def __post_init__(self):
        assert self.connection in ('share', 'gumbel1', 'gumbel2'), \
            f"connection is '{self.connection}'; it can be share, gumbel1 or gumbel2"
        assert self.aux_form in SIGNS, \
            f"aux_form is '{self.aux_form}'; it can be {', '.join(SIGNS)}"
        assert len(self.path_embd) == len(self.path_head), 'path_head needs one entry per path'
        assert self.connection == 'share' or len(set(self.path_embd)) == 1, \
            f"{self.connection} adds the paths' outputs: path_embd must be equal, or use 'share'"
        for d, n_head in [(self.n_embd, self.n_head), *zip(self.path_embd, self.path_head)]:
            assert d % (2 * n_head) == 0, f'a width of {d} has no {n_head} heads of even width'


# ---- The idea: k paths side by side, joined by a Connection --------------------------------------
# A Connection takes the outputs of a layer's k blocks -> the inputs of the next blocks, and losses.

class Share(nn.Module):
    """Share-Linear (Fig. 3): one linear map of the concatenated outputs. All next blocks read its
    result; if their `widths` differ, each has its own map. `shrink` and `grow` are Shares, too."""
    def __init__(self, d_in, widths):
        super().__init__()
        self.n_next = len(widths)
        if len(set(widths)) == 1:
            widths = widths[:1]                          # equal widths: one map for all
        std = 1 / math.sqrt(d_in)                        # replaces the stream, keeps its size
        self.maps = nn.ModuleList(linear(d_in, d, std) for d in widths)

    def forward(self, outputs):
        y = torch.cat(outputs, -1)                       # (B, T, sum of their widths), Eq. 1
        # Under autocast the product is bfloat16; the residual stream stays float32.
        inputs = [linear_map(y).type_as(y) for linear_map in self.maps]
        if len(inputs) == 1:
            inputs = inputs * self.n_next                # all next blocks read the same tensor
        return inputs, {}


class Gumbel(nn.Module):
    """Gumbel MoE (Fig. 4): each token takes the output of one path, or a linear mix of them all:

        y = sum_i pi_i f_i + pi_comb x_comb              Eq. 3, 7

    f_i are the outputs, x_comb is the mix, and pi is one-hot (soft if config.hard is False).
    Training is straight-through: backward treats pi as the soft weights, so the router learns from
    every choice, since dL/dpi_i = dL/dy . f_i even where pi_i is 0. But dL/dy itself reaches only
    the choice taken. The other f_i get a gradient through the router's input, and through the mix
    if it is taken."""
    def __init__(self, config, router):                  # router: a class, Router or your own
        super().__init__()
        k, d = len(config.path_embd), config.path_embd[0]
        self.router_reads_mix = config.connection == 'gumbel1'
        self.combine = linear(k * d, d, std=1 / math.sqrt(k * d))
        d_router = d if self.router_reads_mix else k * d                     # Table 1
        self.router = router(d_router, k + 1, config)

    def forward(self, outputs):
        joined = torch.cat(outputs, -1)                                      # (B, T, k*d'), Eq. 1
        mix = self.combine(joined).type_as(joined)                           # (B, T, d'), Eq. 2, 6
        router_input = mix if self.router_reads_mix else joined
        gates, _, losses = self.router(router_input.flatten(0, 1))           # (N, k+1)
        pi = gates.view(*mix.shape[:2], -1)                                  # (B, T, k+1), Eq. 4, 5
        y = sum(p * f for p, f in zip(pi.split(1, -1), [*outputs, mix]))     # (B, T, d'), Eq. 3, 7
        return [y] * len(outputs), losses


class Router(nn.Module):
    """Scores k+1 choices per token, the k paths and their mix -> gates (N, k+1), which are pi;
    choices (N, k+1); losses. A token keeps all k+1 choices, because pi has a gradient for each of
    them, even where it is 0."""
    def __init__(self, d, n_choices, config):
        super().__init__()
        self.config = config
        self.n_choices = n_choices
        self.linear = linear(d, n_choices)

    def forward(self, x):
        score = self.score(x)
        choices = self.choose(score)
        pi, losses = self.weigh(score, choices)
        return pi, choices, losses

    def score(self, x):                                  # how good is each path, and the mix?
        with torch.autocast(x.device.type, enabled=False):   # in bfloat16 close scores would tie
            return self.linear(x.to(self.linear.weight.dtype))

    def choose(self, score):                             # all of them; what tools read
        return torch.arange(score.size(-1), device=score.device).expand_as(score)

    def weigh(self, score, choices):                     # with which weights?
        c = self.config
        if self.training:
            pi = F.gumbel_softmax(score, c.temperature, c.hard)
        elif c.hard:
            pi = F.one_hot(score.argmax(-1), score.size(-1)).to(score.dtype)
        else:
            pi = (score / c.temperature).softmax(-1)
        return pi, routing_losses(score, pi, c.aux_form)


SIGNS = dict(intended=(-1, -1), printed=(1, 1), released=(-1, 1))    # of Eq. 8, 9; -1 rewards high


def routing_losses(score, pi, form):
    """Eq. 8 is the entropy of a token's choice, which is high while the token is undecided. Eq. 9
    is the entropy of the load, which is high if all k+1 choices are used equally. The text wants
    both high, and `intended` rewards that. `printed`, the equations as they stand, rewards both
    low. `released`, the authors' code, rewards Eq. 8 high and Eq. 9 low, and computes them from pi
    instead of the softmax. (For a one-hot pi Eq. 8 is 0, but its gradient is not.)"""
    entropy = lambda p: -(p * (p + 1e-8).log()).sum(-1)  # 1e-8 as released: log(0) is -inf
    prob = pi if form == 'released' else score.softmax(-1)               # (N, k+1)
    load = prob.mean(0)                                                  # (k+1,) share of each
    sign_8, sign_9 = SIGNS[form]
    return dict(entropy=sign_8 * entropy(prob).mean(), load=sign_9 * entropy(load))


class ParallelLayer(nn.Module):
    """k blocks side by side and their Connection. Block i uses entry layer + i of the KV cache."""
    def __init__(self, config, layer, router, is_last):
        super().__init__()
        c, k = config, len(config.path_embd)
        hidden = c.path_ffn_hidden or [None] * k
        self.blocks = nn.ModuleList(
            Block(c, layer + i, c.path_embd[i], c.path_head[i], hidden[i], c.dropout)
            for i in range(k))
        if c.connection == 'share':
            next_widths = [c.n_embd] if is_last else c.path_embd
            self.connection = Share(sum(c.path_embd), next_widths)
        else:
            self.connection = Gumbel(c, router)          # after the last layer, `grow` maps to d_L

    def forward(self, inputs, tables, cache):
        outputs = [block(x, tables, cache) for block, x in zip(self.blocks, inputs)]
        return self.connection(outputs)


# ---- The LLaMA block, for Layer Blocks, parallel blocks and paths --------------------------------

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


class Block(nn.Module):
    """Fig. 1: RMSNorm, rotary attention, RMSNorm, SwiGLU. `layer` is its place in the KV cache."""
    def __init__(self, config, layer, d, n_head, hidden, dropout):
        super().__init__()
        hidden = hidden or math.ceil(8 * d / 3 / 32) * 32
        # As in GPT-2, what adds to the residual stream, twice per layer, starts smaller.
        small = 0.02 / math.sqrt(2 * (config.n_layer + config.n_parallel))
        self.layer = layer
        self.n_head = n_head
        self.d_head = d // n_head
        self.norm_1 = nn.RMSNorm(d, eps=config.norm_eps)
        self.norm_2 = nn.RMSNorm(d, eps=config.norm_eps)
        self.qkv = linear(d, 3 * d)
        self.proj = linear(d, d, small) if config.attn_out_proj else nn.Identity()
        self.fc = linear(d, 2 * hidden)                  # gate and up
        self.down = linear(hidden, d, small)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, tables, cache):
        B, T, D = x.shape
        qkv = self.qkv(self.norm_1(x)).view(B, T, 3, self.n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)             # each (B, H, T, d)
        table = tables[self.d_head]
        dropout = self.dropout.p if self.training else 0.0
        y = attend(rotate(q, table), rotate(k, table), v, cache, self.layer, dropout)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(B, T, D)))
        gate, up = self.fc(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.dropout(self.down(F.silu(gate) * up))


# ---- The model -----------------------------------------------------------------------------------

class PaPaformer(nn.Module):
    router = Router                                      # a class that an idea may replace

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        k = len(c.path_embd)
        before = c.n_layer // 2 if c.n_parallel else c.n_layer   # plain LLaMA: all are in `first`
        dropout = 0.0 if c.n_parallel else c.dropout
        full = (c.n_embd, c.n_head, c.ffn_hidden, dropout)       # the same for all Layer Blocks
        heads = [(c.n_embd, c.n_head), *zip(c.path_embd, c.path_head)]
        self.head_widths = sorted({d // n_head for d, n_head in heads})
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.first = nn.ModuleList(Block(c, i, *full) for i in range(before))
        self.parallel = nn.ModuleList(
            ParallelLayer(c, before + k * i, self.router, is_last=i == c.n_parallel - 1)
            for i in range(c.n_parallel))
        self.last = nn.ModuleList(
            Block(c, k * c.n_parallel + i, *full) for i in range(before, c.n_layer))
        if c.n_parallel:
            self.shrink = Share(c.n_embd, c.path_embd)
            if c.connection != 'share':                  # the last Share already maps to d_L
                self.grow = Share(c.path_embd[0], [c.n_embd])
        self.norm_f = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        self.head = linear(c.n_embd, c.vocab_size)
        nn.init.normal_(self.wte.weight, std=0.02)

    def features(self, idx, cache=None):
        """(B, T) token ids -> final-norm states (B, T, D), auxiliary losses summed over layers."""
        past = cache[0][0].size(2) if cache else 0
        length = past + idx.size(1)
        if length > self.config.block_size:
            raise ValueError(
                f'{length} tokens are more than the block_size of {self.config.block_size}')
        x = self.wte(idx)                                # (B, T, d_L)
        wide = torch.promote_types(x.dtype, torch.float32)
        position = torch.arange(past, length, device=x.device, dtype=wide)
        tables = {d: rotary(position, d, self.config.rope_base) for d in self.head_widths}
        aux = {}
        for block in self.first:
            x = block(x, tables, cache)
        if self.config.n_parallel:
            inputs, _ = self.shrink([x])                 # k times (B, T, d')
            for layer in self.parallel:
                inputs, losses = layer(inputs, tables, cache)
                for name, loss in losses.items():
                    aux[name] = aux.get(name, 0) + loss
            if self.config.connection != 'share':
                inputs, _ = self.grow(inputs[:1])        # all k are the same tensor
            x, = inputs                                  # (B, T, d_L)
        for block in self.last:
            x = block(x, tables, cache)
        return self.norm_f(x), aux

    def logits(self, x):
        """Final-norm states (B, T, D) -> logits (B, T, vocab_size)."""
        return self.head(x)

    def forward(self, idx, targets=None, cache=None, reduction='mean'):
        """-> logits, None, aux; with targets (-1: ignored) None, loss, aux. Extends a cache."""
        x, aux = self.features(idx, cache)
        logits = self.logits(x)
        if targets is None:
            return logits, None, aux
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                               reduction=reduction)
        loss = loss.view_as(targets) if reduction == 'none' else loss
        return None, loss, aux

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Continue (B, T) prompts; call eval() first. A full cache restarts from its newer half."""
        limit = self.config.block_size
        cache, new = [], idx[:, -limit:]                 # new: what the cache does not hold yet
        for _ in range(max_new_tokens):
            if cache and cache[0][0].size(2) == limit:
                cache, new = [], idx[:, -max(1, limit // 2):]
            logits = self(new, cache=cache)[0][:, -1].float()
            if top_k:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            new = logits.argmax(-1, keepdim=True)        # greedy, if temperature is 0
            if temperature > 0:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            idx = torch.cat((idx, new), 1)
        return idx

    @torch.no_grad()
    def routes(self, idx):
        """{layer: (B, T, k+1)}: the weights pi of paths and mix; {}: `share`. Call eval() first."""
        routes = {}                                      # in the order of the layers
        with ExitStack() as hooks:                       # removed at the end of `with`
            for name, module in self.named_modules():
                if isinstance(module, self.router):
                    def record(router, args, result, name=name.removesuffix('.connection.router')):
                        pi, _, _ = result
                        routes[name] = pi.view(*idx.shape, -1)
                    hooks.enter_context(module.register_forward_hook(record))
            self.features(idx)
        return routes

    def count_params(self):
        """Total, and active: all but the embedding, which is only looked up. No path is skipped."""
        total = sum(p.numel() for p in self.parameters())
        return total, total - self.wte.weight.numel()


# ---- Surgery -------------------------------------------------------------------------------------

def compose(paths, **settings):
    """Fig. 5: the layers of k trained paths become the parallel layers of a new model, as wide
    as the paths together. Embedding and head are concatenated along the width, in the order of the
    paths. Layer Blocks, Connections and the final norm are fresh. `settings` are fields of the new
    config that do not follow from the paths. By default there are two Layer Blocks with as many
    heads as all paths together, and block_size and dropout are the largest of the paths."""
    configs = [path.config for path in paths]
    first = configs[0]
    alike = ('vocab_size', 'attn_out_proj', 'rope_base', 'norm_eps')
    for name in ('n_layer', *alike):
        values = [getattr(c, name) for c in configs]
        assert len(set(values)) == 1, f'the paths differ in {name}: {values}'
    assert not any(c.n_parallel for c in configs), 'a path has no parallel layers (n_parallel=0)'
    usual = dict(n_layer=2,
                 n_head=sum(c.n_head for c in configs),
                 ffn_hidden=None,
                 block_size=max(c.block_size for c in configs),
                 dropout=max(c.dropout for c in configs))
    fixed = dict(n_embd=sum(c.n_embd for c in configs),
                 n_parallel=first.n_layer,
                 path_embd=[c.n_embd for c in configs],
                 path_head=[c.n_head for c in configs],
                 path_ffn_hidden=[path.first[0].down.in_features for path in paths])
    given = settings.keys() & {*alike, *fixed}
    assert not given, f"{', '.join(sorted(given))} cannot be set: the paths decide"
    config = replace(first, **usual | settings, **fixed)
    model = type(paths[0])(config).to(paths[0].wte.weight)   # as the paths: class, device, dtype
    with torch.no_grad():
        model.wte.weight.copy_(torch.cat([path.wte.weight for path in paths], 1))
        model.head.weight.copy_(torch.cat([path.head.weight for path in paths], 1))
    for i, layer in enumerate(model.parallel):
        for block, path in zip(layer.blocks, paths):
            block.load_state_dict(path.first[i].state_dict())
    return model


surgeries = [compose]                                    # what tools/surgery.py offers
Config, Model = PaPaformerConfig, PaPaformer             # what train.py looks for
