"""
MoEP: Modular Expert Paths (Tapaninaho 2025, "MoEP: Modular Expert Paths for Sample-Efficient Language Modeling").

A GPT-2 whose middle is wide instead of thick. Two full-width Layer Blocks stand at the ends; between them the
width is halved and every layer holds P small Transformer blocks side by side, of which each token takes K:

    Layer Block -> MoE shrink d_L->d_P -> [Parallel Layer, P blocks of d_P] x N -> MoE grow d_P->d_L -> Layer Block

Blocks and shrink/grow experts are chosen by linear top-K routers whose K weights are renormalised to sum to 1. A block's attention reads
*all* earlier tokens, whether or not they chose it. Without parallel layers this is the paper's GPT-2 baseline, with `swiglu` MoEP-SwiGLU.

What to look at first: `Router`, then `ParallelLayer.forward`; what stands before `Router` only makes its choices fast. The authors'
release runs every block on every token and throws half away (`sparse=False` here, the reference). By default only what is chosen is computed:
attention of all P blocks in one call, then projection and FFN of the chosen (token, block) pairs by grouped products. Same numbers, tested.

Measured on one H200: 28M parameters, 100M words of BabyLM-style text: 3.487 nats per token and BLiMP 65.6 in `harness` mode,
GPT-2 (this file) 3.343 and 67.8 (three seeds each): docs/results.md. 1.28M training tokens/s at batch 128 x 512: docs/speed.md.

Departures from the paper, and gaps it leaves:
- The printed balance loss -sum p log p, minimised, rewards collapse. We default to the Switch form that the
  release uses; `entropy` is the printed one with its sign turned, `printed` is the formula to the letter.
- At top_k = 1 the renormalised weight is always 1: the router then learns from the balance loss alone.
- The paper says only that the chosen outputs "are summed". That they are weighted, that the weights are renormalised, and that attention
  reads all earlier tokens is our reading; so are a tied head, biases in experts, none in routers, and the initialisation (docs/moep.md).

Dimension letters, as suffixes where routing makes shapes hard to see: B batch, T sequence, N = B*T tokens, D width, H heads, P parallel
blocks, E choices (experts, or blocks: then E = P), K chosen per token, R = N*K rows, sorted by choice, F another width, V vocabulary.
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
            if field.type is int and getattr(self, field.name) < (0 if field.name == 'n_parallel' else 1):
                raise ValueError(f'{field.name} = {getattr(self, field.name)} is too small')
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout = {self.dropout} must be at least 0 and less than 1')
        if self.balance not in ('switch', 'entropy', 'printed'):
            raise ValueError(f"balance is '{self.balance}'; it can be switch, entropy or printed")
        for d, h in ((self.n_embd, self.n_head), (self.n_embd_parallel, self.n_head_parallel)):
            if d % h:
                raise ValueError(f'a width of {d} cannot be split into {h} heads')
        if self.n_parallel and not 1 <= self.top_k <= min(self.n_block, self.n_expert):
            raise ValueError(f'top_k is {self.top_k}; it can be 1 to {min(self.n_block, self.n_expert)}, the smaller of n_block and n_expert')


# ---------------------------------------------------------------------------------------------------------------
# Routing: who goes where, and the rows that are then computed


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


class Gather(torch.autograd.Function):
    """x[index], with a gradient that is gathered too (torch would add it up row by row): readers (M, J) tells which rows of the
    result read each of x's M rows; -1: none."""

    @staticmethod
    def forward(ctx, x, index, readers):
        ctx.save_for_backward(readers)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        readers, = ctx.saved_tensors
        rows = grad.index_select(0, readers.clamp(min=0).flatten()).view(*readers.shape, -1)
        return rows.masked_fill(readers[:, :, None] < 0, 0).sum(1), None, None


def order_by_choice(choice_NK, n_choices):
    """The N*K (token, k) pairs as rows, ordered by choice and then by token: -> the pair of each row, the row of each pair, the
    end row of each group (int32). No sort: one count through all groups tells how many pairs come before a pair, its row."""
    choice = choice_NK.flatten()
    chose_ER = choice == torch.arange(n_choices, device=choice.device)[:, None]
    count_ER = chose_ER.flatten().cumsum(0, dtype=torch.int32).view_as(chose_ER)
    row = count_ER.gather(0, choice[None])[0].long() - 1
    pair = torch.empty_like(row).scatter(0, row, torch.arange(len(row), device=row.device))
    return pair, row, count_ER[:, -1].contiguous()


def largest_k(prob_NE, k):
    """The k largest of each row and where they are, never twice the same: topk, but many times faster on a GPU where E is small."""
    choices, left_NE = [], prob_NE.detach().clamp(min=torch.finfo(prob_NE.dtype).min)    # so that what is taken, -inf, is less
    for _ in range(k):
        choices.append(left_NE.argmax(-1, keepdim=True))
        left_NE = left_NE.masked_fill(torch.arange(prob_NE.size(1), device=prob_NE.device) == choices[-1], -math.inf)
    choice_NK = torch.cat(choices, 1)
    return prob_NE.gather(1, choice_NK), choice_NK


class GroupBias(torch.autograd.Function):
    """b[choice], with a gradient (a sum over the rows of each choice) that is a matrix product; E padded to eights is faster."""

    @staticmethod
    def forward(ctx, b_EF, choice_R):
        ctx.save_for_backward(choice_R, torch.arange(len(b_EF) + -len(b_EF) % 8, device=b_EF.device))
        ctx.n = len(b_EF)
        return b_EF.index_select(0, choice_R)

    @staticmethod
    def backward(ctx, grad_RF):
        choice_R, choices = ctx.saved_tensors
        return ((choices[:, None] == choice_R).to(grad_RF.dtype) @ grad_RF)[:ctx.n], None


class Rows:
    """N tokens that chose K different of E each, as R = N*K rows sorted by choice: one contiguous group of rows per choice."""

    def __init__(self, choice_NK, n_choices):
        self.pair, self.row, self.ends_E = order_by_choice(choice_NK, n_choices)
        self.choice_NK, self.row_NK = choice_NK, self.row.view_as(choice_NK)
        self.token = self.pair // choice_NK.size(1)      # (R,) the token that a row belongs to
        self.choice = choice_NK.flatten()[self.pair]     # (R,) the block or expert that works on it

    def spread(self, x_ND):                              # every row gets its token's vector
        return Gather.apply(x_ND, self.token, self.row_NK)

    def pick(self, x_NED):                               # every row gets what its own choice made of its token
        x, index = x_NED.flatten(0, 1), self.token * x_NED.size(1) + self.choice
        readers = torch.full_like(x[:, 0], -1, dtype=torch.long).scatter(0, index, torch.arange(len(index), device=x.device))
        return Gather.apply(x, index, readers[:, None])

    def linear(self, x_RD, w_EDF, b_EF):
        y_RF = grouped_mm(x_RD, w_EDF, self.ends_E)
        return y_RF + GroupBias.apply(b_EF.to(y_RF.dtype), self.choice)

    def combine(self, y_RD, gate_NK):                    # back in token order, weighted and summed over the K
        y_NKD = Gather.apply(y_RD, self.row, self.pair[:, None]).view(*self.choice_NK.shape, -1)
        return (gate_NK[:, :, None] * y_NKD).sum(1)


class Router(nn.Module):
    """A linear map to E scores, softmax, the K best renormalised to sum to 1: -> (gates (N, K), rows to compute, balance loss, one number).
    In a router of your own a token's K choices must differ; `ParallelLayer` counts on the sum of 1; `sparse` and `balance` are read here alone."""

    def __init__(self, d, n_choices, config):
        super().__init__()
        self.linear = nn.Linear(d, n_choices, bias=False)
        self.n_choices, self.top_k, self.balance, self.sparse = n_choices, config.top_k, config.balance, config.sparse

    def forward(self, x_ND):
        with torch.autocast(x_ND.device.type, enabled=False):   # in float32 (TF32 on a GPU): near ties should not hang on rounding
            prob_NE = self.linear(x_ND.to(self.linear.weight.dtype)).softmax(-1)
        gate_NK, choice_NK = largest_k(prob_NE, self.top_k)
        gate_NK, balance = gate_NK / gate_NK.sum(-1, keepdim=True), self.balance_loss(prob_NE, choice_NK)
        if not self.sparse:                              # K = E choices, with a gate of 0 for those not chosen
            gate_NK = torch.zeros_like(prob_NE).scatter(1, choice_NK, gate_NK)
            choice_NK = torch.arange(self.n_choices, device=x_ND.device).expand_as(prob_NE)
        return gate_NK, Rows(choice_NK, self.n_choices), balance

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
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc, self.down = nn.Linear(D, (8 if config.swiglu else 4) * D), nn.Linear(4 * D, D)
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
    The residual stream runs inside each block. Since the gates sum to 1, that is x[t] and the gated sum of what they add."""

    def __init__(self, config, layer):
        super().__init__()
        P, D, self.n_head, self.layer = config.n_block, config.n_embd_parallel, config.n_head_parallel, layer
        F_in, self.swiglu = (8 if config.swiglu else 4) * D, config.swiglu
        self.router = Router(D, P, config)
        # stacked: an unchosen block has a zero gradient, not none. Stacked vectors are named ...gain, ...bias: no decay
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
        w = w_PDF.view(P, D, 3, D).permute(2, 0, 3, 1).flatten(1, 2)            # (3, P*D, D): q of all blocks, k, v
        b, n = b_PF.view(P, 3, D).transpose(0, 1).flatten(1), F.layer_norm(x, (D,))
        q, k, v = (F.linear(n, w[i], b[i]).view(B, T, P * self.n_head, -1).transpose(1, 2) for i in range(3))   # (B, P*H, T, d)
        y = attend(q, k, v, cache, self.layer, self.dropout.p if self.training else 0.0)
        return y.transpose(1, 2).reshape(B * T, P, D)

    def forward(self, x, cache=None):
        x_ND = x.flatten(0, 1)
        y_NPD = self.attention(x, cache)
        gate_NK, rows, balance = self.router(x_ND)
        # from here on only the chosen: R rows, each with the weights of its own block
        att_RD = self.dropout(rows.linear(rows.pick(y_NPD), self.proj, self.proj_bias))
        fc = fold(self.ln_2_gain, self.ln_2_bias, self.fc, self.fc_bias)
        h_RF = activate(rows.linear(F.layer_norm(rows.spread(x_ND) + att_RD, x.shape[-1:]), *fc), self.swiglu)
        ffn_RD = self.dropout(rows.linear(h_RF, self.down, self.down_bias))
        return x + rows.combine(att_RD + ffn_RD, gate_NK).view_as(x), balance


class MoE(nn.Module):
    """Shrink or grow: E linear (or SwiGLU) experts between two widths, of which each token takes K (section 3.3)."""

    def __init__(self, d_in, d_out, config):
        super().__init__()
        E, hidden, self.swiglu = config.n_expert, config.expert_hidden, config.swiglu
        self.router = Router(d_in, E, config)
        if self.swiglu:
            self.fc, self.fc_bias = nn.Parameter(torch.empty(E, d_in, 2 * hidden)), nn.Parameter(torch.zeros(E, 2 * hidden))
        self.down = nn.Parameter(torch.empty(E, hidden if self.swiglu else d_in, d_out))
        self.down_bias = nn.Parameter(torch.zeros(E, d_out))

    def forward(self, x):
        x_ND = x.flatten(0, 1)
        gate_NK, rows, balance = self.router(x_ND)
        h_RF = rows.spread(x_ND)
        if self.swiglu:
            h_RF = activate(rows.linear(h_RF, self.fc, self.fc_bias), swiglu=True)
        return rows.combine(rows.linear(h_RF, self.down, self.down_bias), gate_NK).unflatten(0, x.shape[:2]), balance


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
        """GPT-2's, but shrink and grow are the stream itself, and each expert keeps its size (the mean of K is smaller, at most by sqrt(K)):
        1/sqrt(fan-in). A SwiGLU expert is quadratic for small inputs: its first map also lifts the young stream to 1, its second brings it back."""
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
        x, aux = self.dropout(self.wte(idx) + self.wpe(pos)), {}                # (B, T, d_L)
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
        """Total, and active: what multiplies a token on the sparse path. The head counts, the position table does not; of a
        parallel layer all queries, keys and values, but K of P output projections and FFNs."""
        total = sum(p.numel() for p in self.parameters())
        idle = self.wpe.weight.numel()
        for name, p in self.named_parameters():
            if name.startswith(('parallel', 'shrink', 'grow')) and any(s in name for s in ('proj', 'ln_2', 'fc', 'down')):
                idle += p.numel() - p.numel() * self.config.top_k // p.size(0)
        return total, total - idle


Config, Model = MoEPConfig, MoEP                         # what train.py looks for
