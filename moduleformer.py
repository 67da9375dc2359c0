"""
ModuleFormer (Shen et al. 2023, "ModuleFormer: Learning Modular Large Language Models From Uncurated Data").

A decoder whose every layer is two pools of modules, attention modules and FFN modules, of which each token takes K:

    x = x + sum_k gate_k * Attention_k(norm(x))        then        x = x + sum_k gate_k * FFN_k(norm(x))

An attention module has a query and an output map of its own; keys and values are shared by all modules of the layer, so
that it does not matter which modules an earlier token took. Attention is *stick-breaking*: seen from the query, going back
in time, each key takes a share sigmoid(z) of what the later keys left of a stick of length 1. That favours the latest
match, so no positional embedding is needed, and a model trained on T tokens runs at any length.

Modules come and go after training. `insert_experts` adds new ones beside frozen old ones, to learn a new domain and forget less of the
old one (how much less: docs/moduleformer.md); `prune_experts` removes those that a domain does not use, after `concentration` has made
it use fewer.

What to look at first: `stick_weights`, where Eq. 3 and 4 are three lines, and `Router`, which chooses and holds all losses.

Measured: trained on 128 tokens, it has 1.071 nats per token at positions 448 to 511, where rotary positions have 3.2 (toy stories, three
seeds: docs/moduleformer.md). On one H200, 104M parameters, 22M active, 40M words, three seeds: 3.436 nats per token and BLiMP 69.3, a dense
model with as many active 3.385 and 66.6 (docs/results.md); 0.83M training tokens/s at batch 32 x 512 (docs/speed.md).

Departures from the paper, and gaps it leaves:
- Eq. 3 prints no scale; z is divided by sqrt(d_head), as usual. A module's width may be split into heads.
- Gates are the softmax values themselves (Eq. 1), not renormalised over the K. p(m) and H(m|x) of the losses are taken
  before Top-K: of the printed g, which is 0 for all but K modules, neither would be a distribution.
- Eq. 7 is minimised as printed; the name "MI loss" is that of its negative. Its weight is not given: 0.01 in our configs.
- "Previous batch" (section 3.2) means the previous segment of the same text: `train.py --stream --memory=T`. That doubles
  the direct context, as section 5.1 says; N_L*T of section 3.2 is how far information can travel through N_L layers.
- With `identity_kv` keys and values are the layer's normalised input, for modules as wide as the model, with one head.
- The paper gives neither initialisation (see `init_weights`) nor activation, norm, biases, tying: GELU, LayerNorm, none in experts, untied.

Dimension letters, used as suffixes where routing makes shapes hard to see:
B batch, T sequence, S keys (memory and sequence), N = B*T tokens, D width, E modules, K chosen per token, R = N*K rows that
are computed, sorted by module, H heads, d width of a head, A = H*d width of an attention module, Q queries of a block.
In Router alone, A and B are the paper's two matrices.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class ModuleFormerConfig:
    vocab_size: int = 50295        # tokens the model knows, end-of-text included
    block_size: int = 512          # the window that is trained and sampled; the model itself runs at any length
    n_layer: int = 8               # blocks, each a pool of attention modules and a pool of FFN modules
    n_embd: int = 384              # width, D
    n_att: int | list = 8          # attention modules of a layer, or a list with the number of each layer (after pruning)
    d_att: int = 256               # width of an attention module
    n_head: int = 4                # heads that it is split into
    n_ffd: int | list = 16         # FFN modules of a layer, or a list
    d_ffd: int = 768               # hidden width of an FFN module
    top_k: int = 2                 # K: modules of each pool that a token takes
    d_router: int = 256            # hidden width of a router
    identity_kv: bool = False      # keys and values are the layer's input itself (section 3.2)
    new_att: int = 0               # attention modules that insert_experts has added to every layer
    new_ffd: int = 0               # FFN modules likewise
    query_block: int = 128         # queries whose attention weights are held at one time
    sparse: bool = True            # False: every module works on every token, then the chosen are kept (reference)

    def __post_init__(self):
        for name in ('vocab_size', 'block_size', 'n_layer', 'n_embd', 'd_att', 'n_head', 'd_ffd', 'top_k', 'd_router',
                     'query_block'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} = {getattr(self, name)} is too small')
        for name in ('n_att', 'n_ffd'):
            number = getattr(self, name)
            if isinstance(number, list) and len(number) != self.n_layer:
                raise ValueError(f'{name} lists {len(number)} layers, but n_layer is {self.n_layer}')
            if min(per_layer(number, self)) < self.top_k:
                raise ValueError(f'{name} = {number} is less than top_k = {self.top_k}')
        if min(self.new_att, self.new_ffd) < 0:
            raise ValueError('new_att and new_ffd must be at least 0')
        if self.d_att % self.n_head:
            raise ValueError(f'a module of width {self.d_att} cannot be split into {self.n_head} heads')
        if self.identity_kv and (self.d_att != self.n_embd or self.n_head > 1):
            raise ValueError('identity_kv needs attention modules as wide as the model (d_att = n_embd), with one head')


def per_layer(number, config):
    return number if isinstance(number, list) else [number] * config.n_layer


# ---------------------------------------------------------------------------------------------------------------
# Stick-breaking attention


def stick_weights(q, k, first):
    """Eq. 3 and 4 for queries (B, H, Q, K, d) at positions first, first + 1, ... and keys (B, H, S, d):
    -> logits z and weights p, (B, H, Q*K, S). What is left of the stick attends to nothing.
    log p_i = log sigmoid(z_i) + sum_{i<j<=t} log(1 - sigmoid(z_j)) = z_i + sum_{i<=j<=t} log sigmoid(-z_j)"""
    wide = torch.promote_types(q.dtype, torch.float32)          # a sum over all keys: bfloat16 would lose the early ones
    z = (q.flatten(2, 3) @ k.transpose(2, 3)).to(wide) / math.sqrt(q.size(-1))
    future = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).triu(first + 1)    # (Q, S)
    z = z.masked_fill(future.repeat_interleave(q.size(3), 0), -math.inf)                            # takes nothing
    left = F.logsigmoid(-z).flip(-1).cumsum(-1).flip(-1)        # from the query backwards
    return z, (z + left).exp()


def query_blocks(q, k, size):
    """(tokens, position of the first of them, number of keys that they may see) for each block of `size` tokens."""
    past = k.size(2) - q.size(2)
    for start in range(0, q.size(2), size):
        stop = min(start + size, q.size(2))
        yield slice(start, stop), past + start, past + stop


class StickBreaking(torch.autograd.Function):
    """Attention (Eq. 5's sum over the values) of (B, H, T, K, d) queries, K for each token, to (B, H, S, d) keys and values,
    of which the last T are the tokens' own. Only one block of queries has its weights in memory at a time, B*H*size*K*S
    of them instead of B*H*T*K*S: they are not kept for backward, but computed again."""

    @staticmethod
    def forward(ctx, q, k, v, size):
        ctx.save_for_backward(q, k, v)
        ctx.size, outputs = size, []
        for here, first, end in query_blocks(q, k, size):
            _, p = stick_weights(q[:, :, here], k[:, :, :end], first)
            outputs.append((p.type_as(v) @ v[:, :, :end]).view_as(q[:, :, here]))
        return torch.cat(outputs, 2)

    @staticmethod
    def backward(ctx, grad):
        """Let g_i = p_i * dL/dp_i. Raising z_j lets key j take more, and takes sigmoid(z_j) of it from every key at or
        before j: dL/dz_j = g_j - sigmoid(z_j) * sum_{i<=j} g_i."""
        q, k, v = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)      # blocks add up: in bfloat16 the last ones would be lost
        dq, dk, dv = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for here, first, end in query_blocks(q, k, ctx.size):
            q_here, k_seen, v_seen = q[:, :, here], k[:, :, :end], v[:, :, :end]
            grad_here = grad[:, :, here].flatten(2, 3)          # (B, H, Q*K, d)
            z, p = stick_weights(q_here, k_seen, first)
            g = p * (grad_here @ v_seen.transpose(2, 3))
            dz = ((g - z.sigmoid() * g.cumsum(-1)) / math.sqrt(q.size(-1))).type_as(q)
            dq.append((dz @ k_seen).view_as(q_here))
            dk[:, :, :end] += dz.transpose(2, 3) @ q_here.flatten(2, 3)
            dv[:, :, :end] += p.type_as(v).transpose(2, 3) @ grad_here
        return torch.cat(dq, 2), dk.type_as(k), dv.type_as(v), None


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


class Dispatch:
    """N tokens that chose K of E modules each, as R = N*K rows sorted by module: one contiguous group of rows for each,
    however unequal the groups. No token is dropped."""

    def __init__(self, choice_NK, n_modules):
        self.pair_R, self.row, self.ends_E = order_by_choice(choice_NK, n_modules)
        self.row_NK, self.K = self.row.view_as(choice_NK), choice_NK.size(1)

    def spread(self, x_ND):                              # every row gets its token's vector
        return Gather.apply(x_ND, self.pair_R // self.K, self.row_NK)

    def sort(self, x_NKD):                               # (token, k) pairs to rows
        return Gather.apply(x_NKD.flatten(0, 1), self.pair_R, self.row[:, None])

    def restore(self, y_RD):                             # rows to (token, k) pairs
        return Gather.apply(y_RD, self.row, self.pair_R[:, None]).view(-1, self.K, y_RD.size(1))

    def combine(self, y_RD, gate_NK):                    # weighted and summed over the K
        return (gate_NK[:, :, None] * self.restore(y_RD)).sum(1)


class Stack(nn.Module):
    """One matrix (or vector) for each of E modules, stacked: an unchosen module has a zero gradient, not none. What
    insert_experts adds is a parameter of its own, so that the old ones can be frozen: a gradient of zero would not do,
    since weight decay and AdamW's momentum move a parameter without one."""

    def __init__(self, n, n_new, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, *shape))
        self.inserted = nn.Parameter(torch.empty(n_new, *shape)) if n_new else None

    def forward(self):
        return self.weight if self.inserted is None else torch.cat((self.weight, self.inserted))


class Router(nn.Module):
    """h(x) = A ReLU(B x), softmax over all modules, the K largest (Eq. 1, 2, 9) -> (gates, choices, losses)."""

    def __init__(self, n, n_new, config):
        super().__init__()
        self.top_k, self.sparse = config.top_k, config.sparse
        self.B = nn.Linear(config.n_embd, config.d_router, bias=False)
        self.A = Stack(n, n_new, config.d_router)        # a row is a module's embedding

    def forward(self, x_ND):
        with torch.autocast(x_ND.device.type, enabled=False):   # in float32 (TF32 on a GPU): near ties should not hang on rounding
            h_NE = F.linear(F.relu(self.B(x_ND.to(self.B.weight.dtype))), self.A())
            log_prob_NE = F.log_softmax(h_NE, -1)
            prob_NE = log_prob_NE.exp()
            gate_NK, choice_NK = largest_k(prob_NE, self.top_k)
            p_E = prob_NE.mean(0)                                               # p(m), every token as likely
            entropy = -(p_E * p_E.clamp(min=1e-9).log()).sum()                  # H(m)
            conditional = -(prob_NE * log_prob_NE.clamp(min=-100)).sum(-1).mean()       # H(m | x)
            losses = dict(mi=conditional - entropy, concentration=entropy)      # Eq. 7, Eq. 8
            if self.A.inserted is not None:
                losses['rout_reg'] = self.A.inserted.square().sum()             # Eq. 10
        if not self.sparse:                              # K = E choices, with a gate of 0 for those not chosen
            gate_NK = torch.zeros_like(prob_NE).scatter(1, choice_NK, gate_NK)
            choice_NK = torch.arange(prob_NE.size(1), device=x_ND.device).expand_as(prob_NE)
        return gate_NK, choice_NK, losses


# ---------------------------------------------------------------------------------------------------------------
# The two kinds of modules, and the model


class AttentionModules(nn.Module):
    """Mixture of attention heads: each token asks with its K modules' queries for keys and values that all share."""

    def __init__(self, config, layer):
        super().__init__()
        c, n = config, per_layer(config.n_att, config)[layer]
        self.layer, self.n_head, self.query_block = layer, c.n_head, c.query_block
        self.router = Router(n, c.new_att, c)
        self.q = Stack(n, c.new_att, c.n_embd, c.d_att)
        self.o = Stack(n, c.new_att, c.d_att, c.n_embd)
        self.kv = None if c.identity_kv else nn.Linear(c.n_embd, 2 * c.d_att, bias=False)

    def forward(self, x, cache):
        B, T, D = x.shape
        x_ND = x.flatten(0, 1)
        gate_NK, choice_NK, losses = self.router(x_ND)
        q_EDA, o_EAD = self.q(), self.o()
        rows = Dispatch(choice_NK, len(q_EDA))
        q_NKA = rows.restore(grouped_mm(rows.spread(x_ND), q_EDA, rows.ends_E))
        q = q_NKA.view(B, T, rows.K, self.n_head, -1).permute(0, 3, 1, 2, 4)    # (B, H, T, K, d)
        k, v = self.keys_and_values(x.to(q.dtype), cache)                       # (B, H, S, d)
        y = StickBreaking.apply(q, k, v, self.query_block)                      # (B, H, T, K, d)
        y_NKA = y.permute(0, 2, 3, 1, 4).reshape(B * T, rows.K, -1)
        y_RD = grouped_mm(rows.sort(y_NKA), o_EAD, rows.ends_E)                 # Eq. 5
        return rows.combine(y_RD, gate_NK).view_as(x), losses

    def keys_and_values(self, x, cache):
        """Of this segment, after those that the cache holds; the cache is extended."""
        k, v = (x, x) if self.kv is None else self.kv(x).chunk(2, -1)
        k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in (k, v))
        if cache is not None:
            if self.layer < len(cache):
                k, v = torch.cat((cache[self.layer][0], k), 2), torch.cat((cache[self.layer][1], v), 2)
                cache[self.layer] = (k, v)
            else:
                cache.append((k, v))
        return k, v


class FFNModules(nn.Module):
    """Sparse mixture of D -> d_ffd -> D experts, GELU between, no biases."""

    def __init__(self, config, layer):
        super().__init__()
        c, n = config, per_layer(config.n_ffd, config)[layer]
        self.router = Router(n, c.new_ffd, c)
        self.fc = Stack(n, c.new_ffd, c.n_embd, c.d_ffd)
        self.down = Stack(n, c.new_ffd, c.d_ffd, c.n_embd)

    def forward(self, x):
        x_ND = x.flatten(0, 1)
        gate_NK, choice_NK, losses = self.router(x_ND)
        fc_EDF, down_EFD = self.fc(), self.down()
        rows = Dispatch(choice_NK, len(fc_EDF))
        h_RF = F.gelu(grouped_mm(rows.spread(x_ND), fc_EDF, rows.ends_E))
        y_RD = grouped_mm(h_RF, down_EFD, rows.ends_E)
        return rows.combine(y_RD, gate_NK).view_as(x), losses


class Block(nn.Module):
    """LayerNorm, attention modules, LayerNorm, FFN modules, each beside the residual stream."""

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.att, self.ffd = AttentionModules(config, layer), FFNModules(config, layer)

    def forward(self, x, cache):
        y, att_losses = self.att(self.ln_1(x), cache)
        x = x + y
        y, ffd_losses = self.ffd(self.ln_2(x))
        return x + y, [att_losses, ffd_losses]


def head_loss(x, weight, targets, reduction):
    """Cross-entropy of states (B, T, D) against the (V, D) head. On a GPU the vocabulary is padded to a multiple of 64: odd rows
    of logits are slow to write and to read. What is added has a bias of -inf and counts nothing."""
    V, extra, bias = len(weight), -len(weight) % 64 if x.is_cuda else 0, None
    if extra:
        weight, bias = F.pad(weight, (0, 0, 0, extra)), F.pad(weight.new_zeros(V), (0, extra), value=-math.inf)
    logits = F.linear(x, weight, bias).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=reduction)
    return loss if reduction == 'mean' else loss.view_as(targets)


class ModuleFormer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c, i) for i in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self):
        """Maps from N(0, 1/fan-in), smaller where they write to the residual stream; embeddings (of tokens, and of modules
        in A) and head from N(0, 0.02), so that at first every module is about as likely as any other."""
        for name, p in self.named_parameters():
            if '.q.' in name or '.fc.' in name:                                 # (E, in, out)
                nn.init.normal_(p, std=1 / math.sqrt(p.size(1)))
            elif '.o.' in name or '.down.' in name:
                nn.init.normal_(p, std=1 / math.sqrt(p.size(1) * 2 * self.config.n_layer))
            elif '.kv.' in name or '.B.' in name:                               # (out, in)
                nn.init.normal_(p, std=1 / math.sqrt(p.size(1)))
            elif 'ln_' not in name:                                             # norms are ones and zeros already
                nn.init.normal_(p, std=0.02)

    def features(self, idx, cache=None):
        """(B, T) token ids, T of any length -> final-norm states (B, T, D) and the auxiliary losses, each summed over all
        routers. A cache (one (k, v) per layer, of earlier tokens) is read and extended."""
        x, aux = self.wte(idx), {}                                              # (B, T, D)
        for block in self.blocks:
            x, routers = block(x, cache)
            for losses in routers:
                for name, loss in losses.items():
                    aux[name] = aux.get(name, 0) + loss
        return self.ln_f(x), aux

    def forward(self, idx, targets=None, cache=None, reduction='mean'):
        x, aux = self.features(idx, cache)
        if targets is None:
            return self.head(x), None, aux
        return None, head_loss(x, self.head.weight, targets, reduction), aux

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Continue (B, T) prompts. There is no limit to the context: the cache grows."""
        cache, new = [], idx                             # new: the tokens that the cache does not hold yet
        for _ in range(max_new_tokens):
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
        """{layer: (B, T, E)}: the gates as multiplied in, 0 where a token did not go; inserted modules come last."""
        found, hooks = {}, []
        for name, module in self.named_modules():
            if isinstance(module, Router):
                def record(router, _, output, name=name.removesuffix('.router')):
                    gate_NK, choice_NK, _ = output
                    gate_NE = gate_NK.new_zeros(len(gate_NK), len(router.A())).scatter(1, choice_NK, gate_NK)
                    found[name] = gate_NE.view(*idx.shape, -1)
                hooks.append(module.register_forward_hook(record))
        try:
            self.features(idx)
        finally:
            for hook in hooks:
                hook.remove()
        return found                                     # in the order in which a token meets them

    def count_params(self):
        """Total, and active: K of E modules, and not the embedding, which is only looked up."""
        total = sum(p.numel() for p in self.parameters())
        idle = 0
        for name, stack in self.named_modules():
            if isinstance(stack, Stack) and not name.endswith('.A'):            # every row of A multiplies every token
                modules = len(stack.weight) + (0 if stack.inserted is None else len(stack.inserted))
                idle += stack.weight[0].numel() * (modules - self.config.top_k)
        return total, total - idle - self.wte.weight.numel()


# ---------------------------------------------------------------------------------------------------------------
# Surgery


def rebuild_with(model, state, **changes):
    """A model with another config and these weights, in the same mode; only what is inserted may be fresh."""
    if hasattr(model, 'adapted'):
        raise ValueError('the model has adapters: merge them first')
    new = ModuleFormer(ModuleFormerConfig(**{**asdict(model.config), **changes})).to(model.wte.weight)
    fresh = {name: p for name, p in new.state_dict().items() if name.endswith('.inserted')}
    new.load_state_dict({**fresh, **state})
    return new.train(model.training)


def settle(model):
    """The same function with inserted modules counted among the old ones, and nothing frozen."""
    c, state = model.config, model.state_dict()
    for name in [name for name in state if name.endswith('.inserted')]:
        old = name.replace('.inserted', '.weight')
        state[old] = torch.cat((state[old], state.pop(name)))
    return rebuild_with(model, state, new_att=0, new_ffd=0, n_att=[n + c.new_att for n in per_layer(c.n_att, c)],
                        n_ffd=[n + c.new_ffd for n in per_layer(c.n_ffd, c)])


def insert_experts(model, n_att=1, n_ffd=1, router='full'):
    """Section 4.3: random new modules in every layer, beside the old ones, which are frozen. What trains besides the new
    modules and their embeddings A' -- `partial`: nothing (lifelong learning, where the old data is gone; restrain A' with
    aux_weights = dict(rout_reg=...)); `full`: A, B, embedding and head (joint training on old and new data). The new modules
    are random and may be chosen at once, so the model changes a little before it is trained."""
    if router not in ('full', 'partial'):
        raise ValueError(f"router is '{router}'; it can be full or partial")
    if not (isinstance(n_att, int) and isinstance(n_ffd, int) and min(n_att, n_ffd) >= 0 < n_att + n_ffd):
        raise ValueError(f'n_att = {n_att} and n_ffd = {n_ffd} should be whole numbers, and not both 0')
    if model.config.new_att or model.config.new_ffd:
        model = settle(model)                            # what was new before is old now
    new = rebuild_with(model, model.state_dict(), new_att=n_att, new_ffd=n_ffd)
    for name, p in new.named_parameters():
        opened = '.router.' in name or name.startswith(('wte', 'head'))
        p.requires_grad_(name.endswith('.inserted') or (router == 'full' and opened))
    return new


@torch.no_grad()
def count_usage(model, batches):
    """{layer: (E,) how many tokens of the (idx, targets) batches took each module}; tokens without a target do not count."""
    usage, was_training = {}, model.training
    model.eval()
    try:
        for idx, targets in batches:
            for name, gate in model.routes(idx).items():
                usage[name] = usage.get(name, 0) + (gate != 0)[targets >= 0].sum(0)
    finally:
        model.train(was_training)
    return usage


class PruneTable(list):
    """One dict per pool of modules: layer, modules before, after; and the share of all parameters that is left."""
    left = 1.0

    def __str__(self):
        return '\n'.join([f'pruned    {100 * self.left:.1f}% of the parameters are left; modules that stayed:'] + [
            f"          {r['layer']:14}{r['after']:4} of {r['before']}" for r in self])


def prune_experts(model, usage=None, threshold=0.01, normalise='max', batches=None):
    """Sections 4.2 and 5.3 -> (model, PruneTable): removes the modules whose frequency, divided by the largest of their
    pool (`max`) or by their sum (`sum`), is below the threshold, with their rows of the router; the K most frequent stay.
    Frequencies are `usage` as count_usage gives it, or are counted on `batches`. In the result nothing is frozen."""
    if normalise not in ('max', 'sum'):
        raise ValueError(f"normalise is '{normalise}'; it can be max or sum")
    if not (isinstance(threshold, (int, float)) and threshold >= 0):
        raise ValueError(f'threshold = {threshold} must be a number of at least 0')
    model = settle(model)
    usage = count_usage(model, batches or []) if usage is None else usage
    if not usage or not all(count.sum() > 0 for count in usage.values()):
        raise ValueError('prune_experts needs usage, or batches with at least one target')
    pools = {name.removesuffix('.router.A'): len(m.weight) for name, m in model.named_modules() if name.endswith('.A')}
    if pools != {layer: len(count) for layer, count in usage.items()}:
        raise ValueError('usage is not of this model: its layers or their numbers of modules differ')
    state, table, sizes = model.state_dict(), PruneTable(), dict(att=[], ffd=[])
    for layer, count in usage.items():                   # 'blocks.0.att', 'blocks.0.ffd', 'blocks.1.att', ...
        share = count / (count.max() if normalise == 'max' else count.sum())
        share[share.topk(model.config.top_k).indices] = math.inf
        kept = (share >= threshold).nonzero().flatten()
        for name in state:
            if name.startswith(layer + '.') and name.rsplit('.', 2)[1] in ('q', 'o', 'fc', 'down', 'A'):
                state[name] = state[name][kept]
        sizes[layer.rsplit('.', 1)[1]].append(len(kept))
        table.append(dict(layer=layer, before=len(count), after=len(kept)))
    new = rebuild_with(model, state, n_att=sizes['att'], n_ffd=sizes['ffd'])
    table.left = new.count_params()[0] / model.count_params()[0]
    return new, table


Config, Model = ModuleFormerConfig, ModuleFormer         # what train.py looks for
