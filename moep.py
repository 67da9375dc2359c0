"""
MoEP (Tapaninaho 2025, "MoEP: Modular Expert Paths for Sample-Efficient Language Modeling").

A GPT-2 whose middle layers have half the width and P small blocks each, of which a token takes K:

    Layer Block -> MoE shrink -> [Parallel Layer: P small blocks] x N -> MoE grow -> Layer Block

For each token a linear router chooses K of the blocks (in shrink and grow: K of E experts). It
weights them by their softmax probabilities, renormalised to sum to 1. A block's attention reads
*all* earlier tokens, whether or not they chose it: otherwise it would read a text full of holes.
So all P blocks attend; output projection and FFN run only in the chosen K.

What to look at first: `Router`, `Rows`, then `ParallelLayer.forward`.

Departures that change results (docs/moep.md has all of them, and what we measured):
- Minimising the printed balance loss, -sum p log p, rewards collapse. The default is the Switch
  form, as in a copy of the author's code. `entropy` flips the printed sign, `printed` keeps it.
- No weight is given: train with `loss + 0.01 * (aux['block_balance'] + aux['expert_balance'])`. The
  copy has a weight of 0.2, router biases, and initialises every map with std 0.02.
- At top_k = 1 the renormalised gate is always 1: the router learns from the balance loss alone.

Dimension letters (x_ND has shape N x D): B batch, T sequence, N = B*T tokens, D width, H heads,
P blocks, E choices of a router (P, or n_expert), K chosen per token, R rows (at most N*K, if
sparse), F hidden width. Next to read: arena/dense.py.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class MoEPConfig:
    vocab_size: int = 16384        # tokens the model knows, end-of-text included
    block_size: int = 512          # longest context: rows of the position table
    n_layer: int = 2               # full-width Layer Blocks, half of them before the parallel ones
    n_head: int = 6                # their attention heads
    n_embd: int = 384              # their width, the paper's d_L
    n_parallel: int = 10           # Parallel Layers; 0 makes this a plain GPT-2 of n_layer blocks
    n_head_parallel: int = 3       # attention heads of each small block
    n_embd_parallel: int = 192     # width of each small block, d_P: in the paper half of n_embd
    n_block: int = 4               # P: small blocks side by side in a Parallel Layer
    n_expert: int = 4              # E: experts of the shrinking and of the growing projection
    top_k: int = 2                 # K: blocks, and experts, that each token takes
    swiglu: bool = False           # MoEP-SwiGLU: SwiGLU instead of GELU in blocks, SwiGLU experts
    expert_hidden: int = 512       # hidden width of a SwiGLU expert
    tied: bool = True              # the embedding is also the head
    dropout: float = 0.1           # on embeddings, attention and both residual branches
    balance: str = 'switch'        # form of the balance losses: switch | entropy | printed
    sparse: bool = True            # False: compute all E choices for every token, then drop E - K

    def __post_init__(self):
        assert self.n_embd % self.n_head == 0, 'n_embd must be a multiple of n_head'
        assert self.n_embd_parallel % self.n_head_parallel == 0, \
            'n_embd_parallel must be a multiple of n_head_parallel'
        most = min(self.n_block, self.n_expert)
        assert not self.n_parallel or 1 <= self.top_k <= most, \
            f'top_k = {self.top_k} must lie between 1 and {most}, the smaller of n_block, n_expert'
        assert self.balance in ('switch', 'entropy', 'printed'), \
            f"balance is '{self.balance}'; it can be switch, entropy or printed"


# ---- The idea: each token chooses K of P blocks --------------------------------------------------

class Router(nn.Module):
    """Scores E choices per token, takes the best K -> gates (N, K) that sum to 1, choices (N, K),
    losses by name. A token's K choices differ: ParallelLayer relies on it."""
    def __init__(self, d, n_choices, config):
        super().__init__()
        self.config = config
        self.n_choices = n_choices
        self.linear = nn.Linear(d, n_choices, bias=False)

    def forward(self, x_ND):
        score_NE = self.score(x_ND)
        choice_NK = self.choose(score_NE)
        gate_NK, losses = self.weigh(score_NE, choice_NK)
        return gate_NK, choice_NK, losses

    def score(self, x_ND):                              # how good is each choice?
        with torch.autocast(x_ND.device.type, enabled=False):   # in bfloat16 close scores would tie
            return self.linear(x_ND.to(self.linear.weight.dtype))

    def choose(self, score_NE):                         # which K does a token take?
        prob_NE = score_NE.softmax(-1)
        order_NE = prob_NE.argsort(descending=True, stable=True)    # topk breaks ties by device
        return order_NE[:, :self.config.top_k]

    def weigh(self, score_NE, choice_NK):               # with which gates?
        prob_NE = score_NE.softmax(-1)
        gate_NK = prob_NE.gather(1, choice_NK)
        gate_NK = gate_NK / gate_NK.sum(-1, keepdim=True)
        return gate_NK, dict(balance=self.balance_loss(prob_NE, choice_NK))

    def balance_loss(self, prob_NE, choice_NK):
        """Section 3.4. Minimising `switch` or `entropy` spreads the tokens over the choices."""
        p_E = prob_NE.mean(0)                           # mean probability of each choice
        if self.config.balance == 'switch':             # E sum f_i p_i: 1 if balanced, at most E/K
            chosen_NE = torch.zeros_like(prob_NE).scatter(1, choice_NK, 1.0)
            f_E = chosen_NE.mean(0) / choice_NK.size(1)  # share of all N*K picks, no gradient
            return len(p_E) * (f_E * p_E).sum()
        negative_entropy = (p_E * p_E.clamp(min=1e-9).log()).sum()
        return negative_entropy if self.config.balance == 'entropy' else -negative_entropy


class Rows:
    """Each pair of a token and a choice is a row. Rows of the same choice lie together, so each
    choice needs one matrix product. If sparse, pairs with gate 0 get no row."""
    def __init__(self, gate_NK, choice_NK, n_choices, sparse):
        if not sparse:                                   # K = E: all choices, gate 0 if not chosen
            gate_NK = gate_NK.new_zeros(len(gate_NK), n_choices).scatter(1, choice_NK, gate_NK)
            choice_NK = torch.arange(n_choices, device=gate_NK.device).expand_as(gate_NK)
        self.shape = N, K = choice_NK.shape
        gate, choice = gate_NK.flatten(), choice_NK.flatten()    # pair n*K + k: token n's k-th
        pair = choice.argsort(stable=True)               # all pairs, by choice
        if sparse:
            pair = pair[gate[pair] != 0]
        self.pair, self.token = pair, pair // K          # (R,): each row's pair and token,
        self.choice, self.gate = choice[pair], gate[pair]                # choice and gate
        self.sizes = self.choice.bincount(minlength=n_choices).tolist()  # rows of each choice

    def spread(self, x_ND):                              # tokens -> rows
        return x_ND[self.token]

    def pick(self, x_NED):                               # a token's row of all E -> rows
        return x_NED[self.token, self.choice]

    def linear(self, x_RD, w_EDF, b_EF):                 # x_RD @ w_EDF[choice] + b_EF[choice]
        y_RF = torch.cat([x @ w for x, w in zip(x_RD.split(self.sizes), w_EDF)])
        return y_RF + b_EF[self.choice].type_as(y_RF)

    def norm_linear(self, x_RD, gain_ED, bias_ED, w_EDF, b_EF):      # each choice has its own norm
        n_RD = F.layer_norm(x_RD, x_RD.shape[-1:]) * gain_ED[self.choice] + bias_ED[self.choice]
        return self.linear(n_RD, w_EDF, b_EF)

    def combine(self, y_RD):                             # rows -> a token's gated sum
        y_RD = self.gate[:, None] * y_RD
        return y_RD.new_zeros(self.shape[0], y_RD.size(1)).index_add(0, self.token, y_RD)


class ParallelLayer(nn.Module):
    """P small Transformer blocks read the same input; a token gets the weighted sum of its K:
        out[t] = sum_k gate[t, k] * block[choice[t, k]](x)[t]
    A block returns x plus an update. The gates sum to 1, so out is x plus the gated updates."""
    def __init__(self, config, layer, router):           # router: a class, Router or your own
        super().__init__()
        P, D = config.n_block, config.n_embd_parallel
        self.config = config
        self.layer = layer
        self.router = router(D, P, config)
        # The P blocks' weights are stacked. So vectors are 2-D, like matrices. Their names end in
        # gain or bias, which tells train.py not to decay them.
        self.norm_1_gain = nn.Parameter(torch.ones(P, D))
        self.norm_1_bias = nn.Parameter(torch.zeros(P, D))
        self.norm_2_gain = nn.Parameter(torch.ones(P, D))
        self.norm_2_bias = nn.Parameter(torch.zeros(P, D))
        self.qkv, self.qkv_bias = linear_stack(P, D, 3 * D)
        self.proj, self.proj_bias = linear_stack(P, D, D)
        hidden = (8 if config.swiglu else 4) * D         # SwiGLU: gate and up
        self.fc, self.fc_bias = linear_stack(P, D, hidden)
        self.down, self.down_bias = linear_stack(P, 4 * D, D)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cache=None):
        P, H = self.config.n_block, self.config.n_head_parallel
        x_ND = x.flatten(0, 1)

        # Attention runs in all blocks, as later tokens may choose any of them: P*H heads at once.
        q, k, v = project_all(x, self.norm_1_gain, self.norm_1_bias, self.qkv, self.qkv_bias, H)
        y = attend(q, k, v, cache, self.layer, self.dropout.p if self.training else 0.0)
        y_NPD = y.transpose(1, 2).reshape(len(x_ND), P, -1)

        # The rest runs in the chosen blocks.
        gate_NK, choice_NK, losses = self.router(x_ND)
        rows = Rows(gate_NK, choice_NK, P, self.config.sparse)
        att_RD = self.dropout(rows.linear(rows.pick(y_NPD), self.proj, self.proj_bias))
        x_RD = rows.spread(x_ND) + att_RD
        h_RF = rows.norm_linear(x_RD, self.norm_2_gain, self.norm_2_bias, self.fc, self.fc_bias)
        h_RF = activate(h_RF, self.config.swiglu)
        ffn_RD = self.dropout(rows.linear(h_RF, self.down, self.down_bias))
        update_ND = rows.combine(att_RD + ffn_RD)
        return x + update_ND.view_as(x), losses


def project_all(x, gain_PD, bias_PD, w_PDF, b_PF, n_head):
    """norm_p(x) @ w[p] + b[p] for all P blocks -> queries, keys, values, each (B, P*H, T, d)"""
    n_BTD = F.layer_norm(x, x.shape[-1:])
    n_PBTD = n_BTD * gain_PD[:, None, None] + bias_PD[:, None, None]
    qkv_PBTF = n_PBTD @ w_PDF[:, None] + b_PF[:, None, None]
    heads = qkv_PBTF.unflatten(3, (3, n_head, -1))       # (P, B, T, 3, H, d)
    return heads.permute(3, 1, 0, 4, 2, 5).flatten(2, 3)


def linear_stack(n, d_in, d_out):
    return nn.Parameter(torch.empty(n, d_in, d_out)), nn.Parameter(torch.zeros(n, d_out))


class MoE(nn.Module):
    """Shrink or grow (section 3.3): K of E linear or SwiGLU experts change a token's width."""
    def __init__(self, d_in, d_out, config, router):
        super().__init__()
        self.config = config
        self.router = router(d_in, config.n_expert, config)
        if config.swiglu:
            self.fc, self.fc_bias = linear_stack(config.n_expert, d_in, 2 * config.expert_hidden)
            d_in = config.expert_hidden
        self.down, self.down_bias = linear_stack(config.n_expert, d_in, d_out)

    def forward(self, x):
        x_ND = x.flatten(0, 1)
        gate_NK, choice_NK, losses = self.router(x_ND)
        rows = Rows(gate_NK, choice_NK, self.config.n_expert, self.config.sparse)
        if self.config.swiglu:          # quadratic in x: without a norm, the stream explodes
            n_RD = rows.spread(F.layer_norm(x_ND, x.shape[-1:]))
            h_RF = activate(rows.linear(n_RD, self.fc, self.fc_bias), swiglu=True)
        else:
            h_RF = rows.spread(x_ND)
        y_ND = rows.combine(rows.linear(h_RF, self.down, self.down_bias))
        return y_ND.unflatten(0, x.shape[:2]), losses


# ---- GPT-2's own parts ---------------------------------------------------------------------------

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


def activate(h, swiglu):
    if swiglu:
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.gelu(h, approximate='tanh')


class Block(nn.Module):
    """The full-width Layer Block: a pre-LayerNorm GPT-2 block."""
    def __init__(self, config, layer):
        super().__init__()
        D = config.n_embd
        self.config = config
        self.layer = layer
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc, self.down = nn.Linear(D, (8 if config.swiglu else 4) * D), nn.Linear(4 * D, D)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cache=None):
        B, T, D = x.shape
        qkv = self.qkv(self.norm_1(x)).view(B, T, 3, self.config.n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)             # each (B, H, T, D/H)
        y = attend(q, k, v, cache, self.layer, self.dropout.p if self.training else 0.0)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(B, T, D)))
        return x + self.dropout(self.down(activate(self.fc(self.norm_2(x)), self.config.swiglu)))


# ---- The model -----------------------------------------------------------------------------------

class MoEP(nn.Module):
    router, layer = Router, ParallelLayer                # classes that an idea may replace

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        before = c.n_layer // 2 if c.n_parallel else c.n_layer
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd)
        self.dropout = nn.Dropout(c.dropout)
        self.first = nn.ModuleList(Block(c, i) for i in range(before))
        self.parallel = nn.ModuleList(
            self.layer(c, before + i, self.router) for i in range(c.n_parallel))
        self.last = nn.ModuleList(Block(c, c.n_parallel + i) for i in range(before, c.n_layer))
        if c.n_parallel:
            self.shrink = MoE(c.n_embd, c.n_embd_parallel, c, self.router)
            self.grow = MoE(c.n_embd_parallel, c.n_embd, c, self.router)
        self.norm_f = nn.LayerNorm(c.n_embd)
        if not c.tied:
            self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self):
        """As in GPT-2, except for the experts of shrink and grow, whose output is the new residual
        stream. Linear experts start at 1/sqrt(fan-in), which keeps its size; SwiGLU experts start
        at GPT-2's 0.02, times sqrt(384 / width)."""
        for name, p in self.named_parameters():
            if 'router.' in name and not name.endswith('router.linear.weight'):
                continue                         # a custom router initialises its own extra weights
            std = 0.02
            is_expert = name in ('shrink.fc', 'shrink.down', 'grow.fc', 'grow.down')
            if is_expert and self.config.swiglu:
                std = 0.02 * math.sqrt(384 / self.config.n_embd)
            elif is_expert:                              # linear (E, d_in, d_out)
                std = 1 / math.sqrt(p.size(1))
            elif '.proj' in name or '.down' in name:  # adds to the residual stream, twice per layer
                std = 0.02 / math.sqrt(2 * (self.config.n_layer + self.config.n_parallel))
            if name.endswith('bias'):
                nn.init.zeros_(p)
            elif 'norm_' not in name:                    # gains are ones already
                nn.init.normal_(p, std=std)

    def features(self, idx, cache=None):
        """(B, T) token ids -> final-norm states (B, T, D), auxiliary losses summed over layers."""
        past = cache[0][0].size(2) if cache else 0
        length = past + idx.size(1)
        if length > self.config.block_size:
            raise ValueError(
                f'{length} tokens are more than the block_size of {self.config.block_size}')
        position = torch.arange(past, length, device=idx.device)
        x = self.dropout(self.wte(idx) + self.wpe(position))    # (B, T, d_L)
        aux = {}
        for block in self.first:
            x = block(x, cache)
        if self.config.n_parallel:
            x, shrink_losses = self.shrink(x)                   # (B, T, d_P)
            for layer in self.parallel:
                x, losses = layer(x, cache)
                for name, loss in losses.items():
                    aux[f'block_{name}'] = aux.get(f'block_{name}', 0) + loss
            x, grow_losses = self.grow(x)                       # (B, T, d_L)
            for name, loss in [*shrink_losses.items(), *grow_losses.items()]:
                aux[f'expert_{name}'] = aux.get(f'expert_{name}', 0) + loss
        for block in self.last:
            x = block(x, cache)
        return self.norm_f(x), aux

    def logits(self, x):
        """Final-norm states (B, T, D) -> logits (B, T, vocab_size)."""
        return F.linear(x, (self.wte if self.config.tied else self.head).weight)

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
        """{layer: (B, T, choices)}: each token's gates, 0 if not chosen. Call eval() first."""
        routes = {}                                      # in the order in which a token meets them
        with ExitStack() as hooks:                       # removed at the end of `with`
            for name, module in self.named_modules():
                if isinstance(module, self.router):
                    def record(router, args, result, name=name.removesuffix('.router')):
                        gate_NK, choice_NK, losses = result
                        gate_NE = gate_NK.new_zeros(len(gate_NK), router.n_choices)
                        routes[name] = gate_NE.scatter(1, choice_NK, gate_NK).view(*idx.shape, -1)
                    hooks.enter_context(module.register_forward_hook(record))
            self.features(idx)
        return routes

    def count_params(self, taken={}):
        """Total, and active: the parameters that multiply a token. Of a layer's P or E projections,
        FFNs or experts only K count, or taken[layer] if that is given."""
        total = sum(p.numel() for p in self.parameters())
        idle = self.wpe.weight.numel()                   # only looked up
        if not self.config.tied:                         # otherwise wte is also the head
            idle += self.wte.weight.numel()
        for name, p in self.named_parameters():
            routed = name.startswith(('parallel', 'shrink', 'grow')) and '.router.' not in name
            if routed and any(part in name for part in ('proj', 'norm_2', 'fc', 'down')):
                used = taken.get(name.rpartition('.')[0], self.config.top_k)
                idle += p.numel() - round(p.numel() * used / len(p))
        return total, total - idle


try:                            # faster forms with the same results, while the above is unedited
    from plumbing.rows import faster
    Rows, project_all = faster(Rows), faster(project_all)
except ImportError:             # a copy of this file needs nothing else
    pass

Config, Model = MoEPConfig, MoEP                         # what train.py looks for
