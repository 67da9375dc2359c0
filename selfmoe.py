"""
Self-MoE: gates between decoder layers ("Self-MoE: Self Mixture of Experts in between decoder layers", anonymous, 2024).

Take a trained LLaMA-style decoder and let every block's input go around it through a small trainable gate:

    h_i = B_i(h_{i-1}) + G_i(h_{i-1})        Eq. 2

for every block but the first. A gate is a D x D matrix, one weight per channel, or a single weight. All start at zero,
so that the gated copy of a model *is* that model until it is trained; then everything trains, on a new domain.

What to look at first: `SelfMoE.features`, where Eq. 2 is one line, and `select_gates`, which asks after training, layer
by layer, whether the model's own head would predict better with or without the gate. `upcycle` is the mixture that the
paper compares with (Table 5): every FFN copied n times behind a router, which also starts out as the base model.

Measured on one H200: 31.6M parameters fine-tuned on math have 2.436 nats per token without gates, 2.431 with matrix gates, 2.405 as a mixture
(three seeds: docs/results.md).

Departures from the paper, and gaps it leaves:
- Eq. 5 as printed drops the gates that lower perplexity and keeps those that raise it. The text drops the gates that
  change little, Table 6 drops all gates before some layer. `select_gates` has all three (`printed`, `changes`,
  `from_layer`) and, as its default, the rule one would expect: keep the gates that help (`improves`).
- "We utilize language model head as a projection layer": we take the final norm and then the head, as the model does;
  earlier gates stay in place while a later one is judged; and batches come from the validation set, not from training.
- Section 3.2's "approximately 200M" for a 7B model does not fit 31 gates of 4,096 x 4,096, which are 0.52B (its tables
  agree); nor does 4.3.2's 8.5B for Mistral with gates, which has 7.8B.
- Fig. 2's "mean activation" is read as the root mean square of a token's state, averaged over tokens (`size`).
- The paper's mixture is MergeKit's, its router unnamed. Ours is random: copies that are weighted alike would get the
  same gradient forever. The K gates are renormalised, so the mixture still starts equal to its base, up to rounding.
  At K = 1 that makes the weight a constant 1, and the router learns from the balance loss alone.
- No sliding-window attention, which Mistral has.

Dimension letters: B batch, T sequence, N = B*T tokens, D width, H heads, E experts, K chosen per token,
R = N*K rows that are computed, sorted by expert, F hidden width, V vocabulary.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class SelfMoEConfig:
    vocab_size: int = 50257           # tokens the model knows, end-of-text included
    block_size: int = 256             # longest context
    n_layer: int = 8                  # n: blocks
    n_head: int = 8                   # query heads
    n_kv_head: int = 4                # key and value heads, each shared by n_head / n_kv_head query heads
    n_embd: int = 256                 # width
    ffn_hidden: int | None = None     # hidden width of SwiGLU; None: 8/3 of the width, rounded up to a multiple of 32
    gate: str = 'none'                # gates around the blocks: none | matrix | vector | scalar
    gate_layers: list | None = None   # blocks (counted from 0) that have one; None: all but the first
    n_expert: int = 1                 # E: SwiGLU experts per block; 1: a plain FFN without a router
    top_k: int = 1                    # K: experts that each token takes
    dropout: float = 0.0              # on attention and both residual branches

    def __post_init__(self):
        for name in ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'n_expert'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} = {getattr(self, name)} is too small')
        if self.n_embd % (2 * self.n_head):              # rotary positions turn pairs
            raise ValueError(f'a width of {self.n_embd} cannot be split into {self.n_head} heads of an even width')
        if self.n_head % self.n_kv_head:
            raise ValueError(f'{self.n_head} query heads cannot share {self.n_kv_head} key and value heads evenly')
        if self.gate not in ('none', 'matrix', 'vector', 'scalar'):
            raise ValueError(f"gate is '{self.gate}'; it can be none, matrix, vector or scalar")
        if self.ffn_hidden is not None and self.ffn_hidden < 1:
            raise ValueError(f'ffn_hidden = {self.ffn_hidden} is too small')
        if not set(self.gate_layers or []) <= set(range(1, self.n_layer)):
            raise ValueError(f'gate_layers is {self.gate_layers}; gates stand around blocks 1 to {self.n_layer - 1}')
        if not 1 <= self.top_k <= self.n_expert:
            raise ValueError(f'top_k is {self.top_k}; it must lie between 1 and n_expert = {self.n_expert}')
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout = {self.dropout} must be at least 0 and less than 1')


# ---------------------------------------------------------------------------------------------------------------
# Attention


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


# ---------------------------------------------------------------------------------------------------------------
# Feed-forward: one SwiGLU, or E of them behind a router


class GroupedProduct(torch.autograd.Function):
    """torch's grouped product. Its own gradient of the weights has one multiprocessor add up all rows of a group for a tile of
    the matrix: with few long groups most of a GPU idles. Here they are cut: some 32 parts, of 2,048 rows or more."""

    @staticmethod
    def forward(ctx, x_RD, w_EDF, ends_E):
        ctx.save_for_backward(x_RD, w_EDF, ends_E)
        return F.grouped_mm(x_RD, w_EDF, offs=ends_E)

    @staticmethod
    def backward(ctx, grad_RF):
        x_RD, w_EDF, ends_E = ctx.saved_tensors
        grad_RF, parts = grad_RF.contiguous(), max(1, min(32 // len(w_EDF), len(x_RD) // 2048))
        sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        left = torch.arange(parts - 1, -1, -1, device=ends_E.device, dtype=torch.int32)
        ends = (ends_E[:, None] - sizes_E[:, None] * left // parts).flatten()   # of the parts
        dx = F.grouped_mm(grad_RF, w_EDF.transpose(1, 2), offs=ends_E) if ctx.needs_input_grad[0] else None
        dw = F.grouped_mm(x_RD.T, grad_RF, offs=ends) if ctx.needs_input_grad[1] else None
        return dx, dw if dw is None else dw.unflatten(0, (-1, parts)).sum(1), None


def grouped_mm(x_RD, w_EDF, ends_E):
    """Rows sorted by group, each times its own group's matrix; ends_E (int32) is the end row of each group.
    Autocast does not reach this product, so its dtype is applied here. Where torch has no kernel (Apple's mps, float64,
    float16, compiled float32, widths that are no multiple of 16 bytes) a loop over the groups gives the same."""
    if torch.is_autocast_enabled(x_RD.device.type):
        dtype = torch.get_autocast_dtype(x_RD.device.type)
        x_RD, w_EDF = x_RD.to(dtype), w_EDF.to(dtype)
    dtypes = (torch.bfloat16,) if torch.compiler.is_compiling() else (torch.bfloat16, torch.float32)
    aligned = all(width * x_RD.element_size() % 16 == 0 for width in w_EDF.shape[1:])
    if x_RD.device.type in ('cuda', 'cpu') and x_RD.dtype in dtypes and aligned:
        return GroupedProduct.apply(x_RD, w_EDF, ends_E)
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    return torch.cat([x @ w for x, w in zip(x_RD.split(sizes), w_EDF)])


class FFN(nn.Module):
    """SwiGLU."""

    def __init__(self, d, hidden):
        super().__init__()
        self.fc = nn.Linear(d, 2 * hidden, bias=False)   # gate and up
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up), {}


class Mixture(nn.Module):
    """E SwiGLU experts, of which each token takes K; only those are computed."""

    def __init__(self, d, hidden, n_expert, top_k):
        super().__init__()
        self.router = Router(d, n_expert, top_k)
        self.fc = nn.Parameter(torch.empty(n_expert, d, 2 * hidden))
        self.down = nn.Parameter(torch.empty(n_expert, hidden, d))

    def forward(self, x):
        x_ND = x.flatten(0, 1)
        gate_NK, choice_NK, balance = self.router(x_ND)
        choice_R, order_R = choice_NK.flatten().sort(stable=True)               # rows sorted by expert
        is_E = choice_R[:, None] == torch.arange(len(self.fc), device=x.device)
        ends_E = is_E.sum(0).cumsum(0).to(torch.int32)
        x_RD = x_ND.index_select(0, order_R // choice_NK.size(1))               # a row belongs to token order // K
        gate, up = grouped_mm(x_RD, self.fc, ends_E).chunk(2, dim=-1)
        y_RD = grouped_mm(F.silu(gate) * up, self.down, ends_E)
        y_NKD = y_RD.index_select(0, order_R.argsort()).view(*choice_NK.shape, -1)
        return (gate_NK[:, :, None] * y_NKD).sum(1).view_as(x), dict(balance=balance)


class Router(nn.Module):
    """A linear map to E scores, softmax, the K best renormalised to sum to 1 -> (gates, choices, balance loss)."""

    def __init__(self, d, n_expert, top_k):
        super().__init__()
        self.linear = nn.Linear(d, n_expert, bias=False)
        self.top_k = top_k

    def forward(self, x_ND):
        with torch.autocast(x_ND.device.type, enabled=False):   # in float32 (TF32 on a GPU): near ties should not hang on rounding
            prob_NE = self.linear(x_ND.to(self.linear.weight.dtype)).softmax(-1)
        gate_NK, choice_NK = prob_NE.topk(self.top_k)
        share_E = torch.zeros_like(prob_NE).scatter(1, choice_NK, 1.0).mean(0) / self.top_k
        balance = prob_NE.size(1) * (share_E * prob_NE.mean(0)).sum()           # Switch: 1 balanced, E collapsed
        return gate_NK / gate_NK.sum(-1, keepdim=True), choice_NK, balance


# ---------------------------------------------------------------------------------------------------------------
# The model


class Block(nn.Module):
    """B_i: RMSNorm, rotary grouped-query attention, RMSNorm, feed-forward (Eq. 6 and 7)."""

    def __init__(self, config, layer):
        super().__init__()
        D, self.layer, self.n_head, self.n_kv_head = config.n_embd, layer, config.n_head, config.n_kv_head
        self.d_head = D // config.n_head
        hidden = config.ffn_hidden or math.ceil(8 * D / 3 / 32) * 32
        self.norm_1, self.norm_2 = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.qkv = nn.Linear(D, (self.n_head + 2 * self.n_kv_head) * self.d_head, bias=False)
        self.proj = nn.Linear(D, D, bias=False)
        self.ffn = FFN(D, hidden) if config.n_expert == 1 else Mixture(D, hidden, config.n_expert, config.top_k)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, past=0, cache=None):
        B, T, D = x.shape
        heads = self.qkv(self.norm_1(x)).view(B, T, -1, self.d_head).transpose(1, 2)            # (B, H + 2 H_kv, T, d)
        q, k, v = heads.split((self.n_head, self.n_kv_head, self.n_kv_head), 1)
        y = attend(rope(q, past), rope(k, past), v, cache, self.layer, self.dropout.p if self.training else 0.0)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(B, T, D)))
        y, aux = self.ffn(self.norm_2(x))
        return x + self.dropout(y), aux


class Gate(nn.Module):
    """G_i: all of the block's input mixed, or weighted by channel, or weighted as a whole (section 3.3)."""

    def __init__(self, kind, d):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dict(matrix=(d, d), vector=(d,), scalar=())[kind]))

    def forward(self, h):
        return F.linear(h, self.weight) if self.weight.dim() == 2 else self.weight * h


def rms(h):
    """The mean size of a state's entries: root mean square over channels, mean over tokens. For the log only."""
    return h.detach().float().square().mean(-1).sqrt().mean()


def head_loss(x, weight, targets, reduction):
    """Cross-entropy of states (B, T, D) against the (V, D) head. On a GPU the vocabulary is padded to a multiple of 64: odd rows
    of logits are slow to write and to read. What is added has a bias of -inf and counts nothing."""
    V, extra, bias = len(weight), -len(weight) % 64 if x.is_cuda else 0, None
    if extra:
        weight, bias = F.pad(weight, (0, 0, 0, extra)), F.pad(weight.new_zeros(V), (0, extra), value=-math.inf)
    logits = F.linear(x, weight, bias).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=reduction)
    return loss if reduction == 'mean' else loss.view_as(targets)


class SelfMoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        gated = range(1, c.n_layer) if c.gate_layers is None else c.gate_layers
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c, i) for i in range(c.n_layer))
        self.gates = nn.ModuleDict({str(i): Gate(c.gate, c.n_embd) for i in gated if c.gate != 'none'})
        self.norm_f = nn.RMSNorm(c.n_embd, eps=1e-6)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self):
        """Matrices from N(0, 0.02), smaller where they write to the residual stream; gates zero."""
        for name, p in self.named_parameters():
            if name.startswith('gates'):
                nn.init.zeros_(p)
            elif 'norm_' not in name:                    # norms are ones already
                small = 1 / math.sqrt(2 * self.config.n_layer) if '.proj' in name or '.down' in name else 1.0
                nn.init.normal_(p, std=0.02 * small)

    def features(self, idx, cache=None):
        """(B, T) token ids -> final-norm states (B, T, D); aux: the balance loss of a mixture, summed over layers, and
        the size of every block's output and every gate's contribution (Fig. 2)."""
        past = cache[0][0].size(2) if cache else 0
        if past + idx.size(1) > self.config.block_size:
            raise ValueError(f'{past + idx.size(1)} tokens are more than the block_size of {self.config.block_size}')
        h, aux, sizes = self.wte(idx), {}, {}                                   # (B, T, D)
        for i, block in enumerate(self.blocks):
            out, losses = block(h, past, cache)
            aux = {name: aux.get(name, 0) + loss for name, loss in losses.items()}
            sizes[f'layer_size_{i}'] = rms(out)
            if str(i) in self.gates:
                around = self.gates[str(i)](h)
                sizes[f'gate_size_{i}'] = rms(around)
                out = out + around                                              # Eq. 2
            h = out
        return self.norm_f(h), {**aux, **sizes}

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
        """{layer: (B, T, E)} of an upcycled model: the gates as multiplied in, 0 where a token did not go; else {}."""
        found, hooks = {}, []
        for name, module in self.named_modules():
            if isinstance(module, Router):
                def record(router, _, output, name=name.removesuffix('.ffn.router')):
                    gate_NK, choice_NK, _ = output
                    gate_NE = gate_NK.new_zeros(len(gate_NK), self.config.n_expert).scatter(1, choice_NK, gate_NK)
                    found[name] = gate_NE.view(*idx.shape, -1)
                hooks.append(module.register_forward_hook(record))
        try:
            self.features(idx)
        finally:
            for hook in hooks:
                hook.remove()
        return found                                     # in the order in which a token meets them

    def count_params(self):
        """Total, and active: K of E experts, and not the embedding, which is only looked up."""
        c, total = self.config, sum(p.numel() for p in self.parameters())
        experts = sum(p.numel() for b in self.blocks for p in b.ffn.parameters(recurse=False))
        return total, total - self.wte.weight.numel() - experts + experts * c.top_k // c.n_expert


# ---------------------------------------------------------------------------------------------------------------
# Surgery


def rebuild(model, **changes):
    """A model with another config, in the same mode; what both have keeps its weights."""
    if hasattr(model, 'adapted'):
        raise ValueError('the model has adapters: merge them first')
    new = SelfMoE(SelfMoEConfig(**{**asdict(model.config), **changes})).to(model.wte.weight)
    old, known = model.state_dict(), new.state_dict().keys()
    new.load_state_dict({name: old[name] for name in old.keys() & known}, strict=False)
    return new.train(model.training)


def add_gates(model, kind='matrix'):
    """Zero gates around every block but the first: the same function as before, until it is trained on. Kind 'none'
    adds nothing: the control of a comparison."""
    if model.gates:
        raise ValueError('the model has gates already')
    if model.config.n_layer < 2:
        raise ValueError('a model of one block has no place for a gate')
    return rebuild(model, gate=kind, gate_layers=None)


def upcycle(model, n=2, k=2):
    """Every FFN becomes n copies of itself behind a random router, of which a token takes k (Table 5)."""
    if model.config.n_expert > 1:
        raise ValueError('the model is a mixture of experts already')
    if n < 2:
        raise ValueError(f'n = {n} copies make no mixture')
    new = rebuild(model, n_expert=n, top_k=k)
    for block, old in zip(new.blocks, model.blocks):
        for name in ('fc', 'down'):
            copy = getattr(old.ffn, name).weight.detach().T
            getattr(block.ffn, name).data.copy_(copy.expand(n, -1, -1))
    return new


class GateTable(list):
    """One dict per gate: layer, perplexity through the head without and with the gate's contribution, kept or not."""

    def __str__(self):
        return '\n'.join(['gates     layer   without      with    change   (perplexity through the head)'] + [
            f"          {r['layer']:5}{r['without']:10.4g}{r['with']:10.4g}{100 * (r['with'] / r['without'] - 1):9.2f}%"
            f"  {'kept' if r['kept'] else 'removed'}" for r in self])


@torch.no_grad()
def select_gates(model, batches, rule='improves', threshold=0.01, layer=None):
    """Remove gates after training -> (model, GateTable). Each layer's state, without and with its gate's contribution,
    goes through the final norm and head, and their perplexities (one per sequence, then the mean) decide (Eq. 3 to 5).
    `threshold` is the relative change that the rule `changes` asks for; `layer` the first block, counted from 0, whose
    gate `from_layer` keeps."""
    rules = dict(improves=lambda i, a, b: b < a,                                # keep what helps
                 changes=lambda i, a, b: abs(b - a) / a > threshold,            # the prose of section 3.3
                 printed=lambda i, a, b: not b <= a,                            # Eq. 5 to the letter
                 from_layer=lambda i, a, b: i >= layer)                         # what Table 6 did
    if not model.gates:
        raise ValueError('the model has no gates')
    if rule not in rules:
        raise ValueError(f"rule is '{rule}'; it can be {', '.join(rules)}")
    if rule == 'from_layer' and layer is None:
        raise ValueError("rule 'from_layer' needs layer: the first block whose gate stays")
    found = {i: [] for i in model.gates}                                        # layer: [(2, B) perplexities, ...]

    def perplexity(h, targets):                                                 # (B,): one per sequence
        logits = model.head(model.norm_f(h))
        nats = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1, reduction='none')
        return (nats.sum(1) / (targets >= 0).sum(1)).exp()

    was_training = model.training
    model.eval()
    try:
        for idx, targets in batches:
            scored = (targets >= 0).any(1)
            if not scored.any():
                continue
            targets, h = targets[scored], model.wte(idx[scored])
            for i, block in enumerate(model.blocks):                            # as in features
                out, _ = block(h)
                if str(i) in model.gates:
                    gated = out + model.gates[str(i)](h)
                    pair = perplexity(out, targets), perplexity(gated, targets)     # Eq. 3, Eq. 4
                    found[str(i)].append(torch.stack(pair))
                    out = gated
                h = out
    finally:
        model.train(was_training)
    table = GateTable()
    for i, pairs in found.items():
        if not pairs:
            raise ValueError('select_gates needs calibration batches with at least one target')
        a, b = torch.cat(pairs, 1).mean(1).tolist()
        table.append({'layer': int(i), 'without': a, 'with': b, 'kept': rules[rule](int(i), a, b)})
    return rebuild(model, gate_layers=[row['layer'] for row in table if row['kept']]), table


Config, Model = SelfMoEConfig, SelfMoE                   # what train.py looks for
