"""
MoEP: Modular Expert Paths (Tapaninaho 2025, "MoEP: Modular Expert Paths for Sample-Efficient Language Modeling").

A GPT-2 whose middle is wide instead of thick. Two full-width Layer Blocks stand at the ends; between them the
width is halved and every layer holds P small Transformer blocks side by side, of which each token takes K:

    Layer Block -> MoE shrink d_L->d_P -> [Parallel Layer, P blocks of d_P] x N -> MoE grow d_P->d_L -> Layer Block

Blocks and shrink/grow experts are chosen by linear top-K routers whose K weights are renormalised to sum to 1.
A block's attention reads the keys and values of *all* earlier tokens, whether or not they chose that block. With
no parallel layers this file is the paper's GPT-2 baseline; with `swiglu` it is MoEP-SwiGLU.

What to look at first: `ParallelLayer.forward`. The authors' release runs every block on every token and throws
half of it away (`sparse=False` here, the reference). By default only what is chosen is computed: queries, keys
and values of all P blocks in one projection and one attention call, then output projection and FFN for the chosen
(token, block) pairs alone, sorted by block and multiplied by a grouped matrix product. Same numbers, tested.

Departures from the paper, and gaps it leaves:
- The printed balance loss -sum p log p, minimised, rewards collapse. We default to the Switch form that the
  release uses; `entropy` is the printed one with its sign turned, `printed` is the formula to the letter.
- At top_k = 1 the renormalised weight is always 1: the router then learns from the balance loss alone.
- The paper says only that the chosen outputs "are summed". That they are weighted, that the weights are renormalised,
  and that attention reads all earlier tokens is our reading; so are a tied head and biases in experts.
- Routers read the stream as it is, without a norm, and have no bias ("size d_P x P").
- The paper gives no initialisation. We take GPT-2's, except for shrink and grow: they are no branches beside the
  stream but the stream itself, and keep its size. With 0.02 there, learning is far slower (docs/moep.md).

Dimension letters, used as suffixes where routing makes shapes hard to see:
B batch, T sequence, N = B*T tokens, D width, H heads, P parallel blocks, E choices (experts, or blocks: then E = P),
K chosen per token, R rows that are computed (N*K when sparse, sorted by choice), F another width, V vocabulary.
"""

import math
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class MoEPConfig:
    vocab_size: int = 16384        # tokens the model knows, end-of-text included
    block_size: int = 512          # longest context: rows of the position table
    n_layer: int = 2               # full-width Layer Blocks, half of them (rounded down) before the parallel stack
    n_head: int = 6                # their attention heads
    n_embd: int = 384              # their width, the paper's d_L
    n_parallel: int = 10           # Parallel Layers; 0 makes this a plain GPT-2 of n_layer blocks
    n_head_parallel: int = 3       # attention heads of each small block
    n_embd_parallel: int = 192     # width of each small block, the paper's d_P
    n_block: int = 4               # P: small blocks side by side in a Parallel Layer
    n_expert: int = 4              # E: experts of the shrinking and of the growing projection
    top_k: int = 2                 # K: blocks, and experts, that each token takes
    swiglu: bool = False           # MoEP-SwiGLU: SwiGLU instead of GELU in every block, SwiGLU experts
    expert_hidden: int = 512       # hidden width of a SwiGLU expert
    dropout: float = 0.1           # on embeddings, attention and both residual branches
    balance: str = 'switch'        # form of the balance losses: switch | entropy | printed
    sparse: bool = True            # False: every block and expert on every token, then keep the chosen (reference)

    def __post_init__(self):
        for field in fields(self):
            if field.type is int and getattr(self, field.name) < (field.name != 'n_parallel'):
                raise ValueError(f'{field.name} = {getattr(self, field.name)} is too small')
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout = {self.dropout} must be at least 0 and less than 1')
        if self.balance not in ('switch', 'entropy', 'printed'):
            raise ValueError(f"balance is '{self.balance}'; it can be switch, entropy or printed")
        for d, h in ((self.n_embd, self.n_head), (self.n_embd_parallel, self.n_head_parallel)):
            if d % h:
                raise ValueError(f'a width of {d} cannot be split into {h} heads')
        if self.n_parallel and not 1 <= self.top_k <= min(self.n_block, self.n_expert):
            raise ValueError(f'top_k is {self.top_k}; it must lie between 1 and n_block and n_expert')


# ---------------------------------------------------------------------------------------------------------------
# Routing: who goes where, and the rows that are then computed


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
        return F.grouped_mm(x_RD, w_EDF, offs=ends_E)
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    return torch.cat([x @ w for x, w in zip(x_RD.split(sizes), w_EDF)])


class SparseRows:
    """N tokens that chose K of E each, as R = N*K rows sorted by choice: one contiguous group of rows per choice."""

    def __init__(self, choice_NK, n_choices):
        self.choice_NK = choice_NK
        choice, order = choice_NK.flatten().sort(stable=True)
        self.token = order // choice_NK.size(1)          # (R,) the token that a row belongs to
        self.choice = choice                             # (R,) the block or expert that works on it
        self.place = order.argsort()                     # (N*K,) the row of each (token, k) pair
        self.onehot_RE = choice[:, None] == torch.arange(n_choices, device=choice.device)
        self.ends_E = self.onehot_RE.sum(0).cumsum(0).to(torch.int32)

    def spread(self, x_ND):                              # every row gets its token's vector
        return x_ND.index_select(0, self.token)

    def pick(self, x_NED):                               # every row gets what its own choice made of its token
        return x_NED.flatten(0, 1).index_select(0, self.token * x_NED.size(1) + self.choice)

    def linear(self, x_RD, w_EDF, b_EF):                 # a bias by one-hot product: its gradient is a product too
        return grouped_mm(x_RD, w_EDF, self.ends_E) + self.onehot_RE.to(x_RD.dtype) @ b_EF

    def combine(self, y_RD, gate_NK):                    # back in token order, weighted and summed over the K
        y_NKD = y_RD.index_select(0, self.place).view(*self.choice_NK.shape, -1)
        return (gate_NK[:, :, None] * y_NKD).sum(1)


class DenseRows:
    """The reference: the same methods with every choice computed on every token, as E x N rows."""

    def __init__(self, choice_NK, n_choices):
        self.choice_NK, self.n_choices = choice_NK, n_choices

    def spread(self, x_ND):
        return x_ND.expand(self.n_choices, -1, -1)

    def pick(self, x_NED):
        return x_NED.transpose(0, 1)

    def linear(self, x_END, w_EDF, b_EF):
        return x_END @ w_EDF + b_EF[:, None]

    def combine(self, y_END, gate_NK):
        gate_NE = gate_NK.new_zeros(y_END.size(1), self.n_choices).scatter(1, self.choice_NK, gate_NK)
        return (gate_NE.T[:, :, None] * y_END).sum(0)


class Router(nn.Module):
    """A linear map to E scores, softmax, the K best renormalised to sum to 1: -> (gates, rows to compute, balance loss)."""

    def __init__(self, d, n_choices, config):
        super().__init__()
        self.linear = nn.Linear(d, n_choices, bias=False)
        self.n_choices, self.top_k, self.balance = n_choices, config.top_k, config.balance
        self.rows = SparseRows if config.sparse else DenseRows

    def forward(self, x_ND):
        with torch.autocast(x_ND.device.type, enabled=False):   # in float32: near ties should not hang on rounding
            prob_NE = self.linear(x_ND.to(self.linear.weight.dtype)).softmax(-1)
        gate_NK, choice_NK = prob_NE.topk(self.top_k)
        gate_NK = gate_NK / gate_NK.sum(-1, keepdim=True)
        return gate_NK, self.rows(choice_NK, self.n_choices), self.balance_loss(prob_NE, choice_NK)

    def balance_loss(self, prob_NE, choice_NK):          # section 3.4
        p_E = prob_NE.mean(0)                            # p_i: "the average routing probability over a batch"
        if self.balance == 'switch':                     # E * sum f_i p_i: 1 when balanced, E when collapsed
            chosen_NE = torch.zeros_like(prob_NE).scatter(1, choice_NK, 1.0)
            f_E = chosen_NE.mean(0) / self.top_k         # share of the routed slots; sums to 1, carries no gradient
            return self.n_choices * (f_E * p_E).sum()
        negative_entropy = (p_E * p_E.clamp(min=1e-9).log()).sum()
        return negative_entropy if self.balance == 'entropy' else -negative_entropy


# ---------------------------------------------------------------------------------------------------------------
# Blocks


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


def activate(h, swiglu):
    if swiglu:
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.gelu(h, approximate='tanh')


class Block(nn.Module):
    """The full-width Layer Block: a pre-LayerNorm GPT-2 block."""

    def __init__(self, config, layer):
        super().__init__()
        D, self.n_head, self.layer, self.swiglu = config.n_embd, config.n_head, layer, config.swiglu
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)
        self.fc = nn.Linear(D, (8 if config.swiglu else 4) * D)
        self.down = nn.Linear(4 * D, D)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cache=None):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)   # each (B, H, T, d)
        y = attend(q, k, v, cache, self.layer, self.dropout.p if self.training else 0.0)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(B, T, D)))
        return x + self.dropout(self.down(activate(self.fc(self.ln_2(x)), self.swiglu)))


def fold(ln_gain_PD, ln_bias_PD, w_PDF, b_PF):
    """The P blocks differ in the gain and bias of their LayerNorms, but not in the mean and variance they read.
    So normalise once and move gain and bias into the map behind: W(g*n + c) + b = (Wg)n + (Wc + b)."""
    return ln_gain_PD[:, :, None] * w_PDF, torch.einsum('pd,pdf->pf', ln_bias_PD, w_PDF) + b_PF


class ParallelLayer(nn.Module):
    """P small Transformer blocks read the same input; a token's output is the weighted sum of the K it chose:
        out[t] = sum_k gate[t, k] * Block_choice[t, k](x)[t]
    The residual stream runs inside each block; since the gates sum to 1, x passes through exactly once."""

    def __init__(self, config, layer):
        super().__init__()
        P, D, self.n_head, self.layer = config.n_block, config.n_embd_parallel, config.n_head_parallel, layer
        F_in, self.swiglu = (8 if config.swiglu else 4) * D, config.swiglu
        self.router = Router(D, P, config)
        # stacked parameters: an unchosen block has a zero gradient, not none. train.py decays matrices; vectors
        # that are stacked look like matrices too, and are known by names that end in 'gain' or 'bias'
        self.ln_1_gain, self.ln_1_bias = nn.Parameter(torch.ones(P, D)), nn.Parameter(torch.zeros(P, D))
        self.ln_2_gain, self.ln_2_bias = nn.Parameter(torch.ones(P, D)), nn.Parameter(torch.zeros(P, D))
        self.qkv, self.qkv_bias = nn.Parameter(torch.empty(P, D, 3 * D)), nn.Parameter(torch.zeros(P, 3 * D))
        self.proj, self.proj_bias = nn.Parameter(torch.empty(P, D, D)), nn.Parameter(torch.zeros(P, D))
        self.fc, self.fc_bias = nn.Parameter(torch.empty(P, D, F_in)), nn.Parameter(torch.zeros(P, F_in))
        self.down, self.down_bias = nn.Parameter(torch.empty(P, 4 * D, D)), nn.Parameter(torch.zeros(P, D))
        self.dropout = nn.Dropout(config.dropout)

    def attention(self, x, cache):
        """All P blocks attend for all tokens: any later token may ask for any block's keys and values."""
        (B, T, D), P = x.shape, self.qkv.size(0)
        w_PDF, b_PF = fold(self.ln_1_gain, self.ln_1_bias, self.qkv, self.qkv_bias)
        w = w_PDF.view(P, D, 3, D).permute(2, 0, 3, 1).reshape(3 * P * D, D)    # q of all blocks, then k, then v
        b = b_PF.view(P, 3, D).transpose(0, 1).flatten()
        qkv = F.linear(F.layer_norm(x, (D,)), w, b).view(B, T, 3, P * self.n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                                    # each (B, P*H, T, d)
        y = attend(q, k, v, cache, self.layer, self.dropout.p if self.training else 0.0)
        return y.transpose(1, 2).reshape(B * T, P, D)

    def forward(self, x, cache=None):
        x_ND = x.flatten(0, 1)
        y_NPD = self.attention(x, cache)
        gate_NK, rows, balance = self.router(x_ND)
        # from here on only the chosen: R rows, each with the weights of its own block
        x_RD = rows.spread(x_ND) + self.dropout(rows.linear(rows.pick(y_NPD), self.proj, self.proj_bias))
        fc = fold(self.ln_2_gain, self.ln_2_bias, self.fc, self.fc_bias)
        h_RF = activate(rows.linear(F.layer_norm(x_RD, x_RD.shape[-1:]), *fc), self.swiglu)
        x_RD = x_RD + self.dropout(rows.linear(h_RF, self.down, self.down_bias))
        return rows.combine(x_RD, gate_NK).view_as(x), balance


class MoE(nn.Module):
    """Shrink or grow: E linear (or SwiGLU) experts between two widths, of which each token takes K (section 3.3)."""

    def __init__(self, d_in, d_out, config):
        super().__init__()
        E, hidden, self.swiglu = config.n_expert, config.expert_hidden, config.swiglu
        self.router = Router(d_in, E, config)
        if self.swiglu:
            self.fc, self.fc_bias = nn.Parameter(torch.empty(E, d_in, 2 * hidden)), nn.Parameter(torch.zeros(E, 2 * hidden))
        d_down = hidden if self.swiglu else d_in
        self.down, self.down_bias = nn.Parameter(torch.empty(E, d_down, d_out)), nn.Parameter(torch.zeros(E, d_out))

    def forward(self, x):
        x_ND = x.flatten(0, 1)
        gate_NK, rows, balance = self.router(x_ND)
        h_RF = rows.spread(x_ND)
        if self.swiglu:
            h_RF = activate(rows.linear(h_RF, self.fc, self.fc_bias), swiglu=True)
        y_RD = rows.linear(h_RF, self.down, self.down_bias)
        return rows.combine(y_RD, gate_NK).view(*x.shape[:2], -1), balance


# ---------------------------------------------------------------------------------------------------------------
# The model


class MoEP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        before = c.n_layer // 2 if c.n_parallel else c.n_layer
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)  # also the output head
        self.wpe = nn.Embedding(c.block_size, c.n_embd)
        self.dropout = nn.Dropout(c.dropout)
        self.first = nn.ModuleList(Block(c, i) for i in range(before))
        self.parallel = nn.ModuleList(ParallelLayer(c, before + i) for i in range(c.n_parallel))
        self.last = nn.ModuleList(Block(c, c.n_parallel + i) for i in range(before, c.n_layer))
        if c.n_parallel:
            self.shrink = MoE(c.n_embd, c.n_embd_parallel, c)
            self.grow = MoE(c.n_embd_parallel, c.n_embd, c)
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.init_weights()

    def init_weights(self):
        """GPT-2's: matrices from N(0, 0.02), smaller where they write to the residual stream, biases zero. Shrink and
        grow are the stream itself and keep its size: 1/sqrt(fan-in) for linear experts. A SwiGLU expert is quadratic
        for small inputs, so its first map also lifts the young stream to size 1, and its second brings it back."""
        depth = self.config.n_layer + self.config.n_parallel
        young = 0.02 * math.sqrt(2)                      # the stream's size at the start: two embeddings
        for name, p in self.named_parameters():
            if 'ln_' in name:
                continue                                 # ones and zeros already
            if name.endswith('bias'):
                nn.init.zeros_(p)
            elif name in ('shrink.fc', 'grow.fc'):
                nn.init.normal_(p, std=1 / (young * math.sqrt(p.size(1))))
            elif name in ('shrink.down', 'grow.down'):   # 0.6: the size of silu(a) * b for a and b of size 1
                nn.init.normal_(p, std=(young / 0.6 if self.config.swiglu else 1.0) / math.sqrt(p.size(1)))
            else:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * depth) if '.proj' in name or '.down' in name else 0.02)

    def features(self, idx, cache=None):
        """(B, T) token ids -> final-norm states (B, T, D) and the auxiliary losses, each summed over layers."""
        past = cache[0][0].size(2) if cache else 0
        if past + idx.size(1) > self.config.block_size:
            raise ValueError(f'{past + idx.size(1)} tokens are more than the block_size of {self.config.block_size}')
        pos = torch.arange(past, past + idx.size(1), device=idx.device)
        x = self.dropout(self.wte(idx) + self.wpe(pos))                         # (B, T, d_L)
        aux = {}
        for block in self.first:
            x = block(x, cache)
        if self.config.n_parallel:
            x, shrink_balance = self.shrink(x)                                  # (B, T, d_P)
            balances = []
            for layer in self.parallel:
                x, balance = layer(x, cache)
                balances.append(balance)
            x, grow_balance = self.grow(x)                                      # (B, T, d_L)
            aux = dict(block_balance=sum(balances), expert_balance=shrink_balance + grow_balance)
        for block in self.last:
            x = block(x, cache)
        return self.ln_f(x), aux

    def forward(self, idx, targets=None, cache=None, reduction='mean'):
        x, aux = self.features(idx, cache)
        logits = F.linear(x, self.wte.weight)
        if targets is None:
            return logits, None, aux
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)
        return None, loss if reduction == 'mean' else loss.view_as(targets), aux

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
        """{layer: (B, T, choices)}: the gates as multiplied in, 0 where a token did not go."""
        found, hooks = {}, []
        for name, module in self.named_modules():
            if isinstance(module, Router):
                def record(router, _, output, name=name.removesuffix('.router')):
                    gate_NK, rows, _ = output
                    gate_NE = gate_NK.new_zeros(len(gate_NK), router.n_choices).scatter(1, rows.choice_NK, gate_NK)
                    found[name] = gate_NE.view(*idx.shape, -1)
                hooks.append(module.register_forward_hook(record))
        try:
            self.features(idx)
        finally:
            for hook in hooks:
                hook.remove()
        return found                                     # in the order in which a token meets them

    def count_params(self):
        """Total, and active: what multiplies a token on the sparse path. The head counts (once), the position table is
        only looked up; of a parallel layer all queries, keys and values count, but K of P output projections and FFNs."""
        total = sum(p.numel() for p in self.parameters())
        idle = self.wpe.weight.numel()
        for name, p in self.named_parameters():
            if name.startswith(('parallel', 'shrink', 'grow')) and any(s in name for s in ('proj', 'ln_2', 'fc', 'down')):
                idle += p.numel() - p.numel() * self.config.top_k // p.size(0)
        return total, total - idle


Config, Model = MoEPConfig, MoEP                         # what train.py looks for
