"""
Dense: today's plain Transformer, the baseline of the arena, and its routed sibling.

There is no paper behind this file. A routed model that beats a weak GPT-2 proves nothing, so here
is what small dense models are made of today, after modded-nanogpt (Jordan et al. 2024) and nanochat
(Karpathy 2025). The differences from GPT-2, each a line or two:

    RMSNorm without gains, also on the embeddings     rotary positions
    queries and keys are normed                       ReLU squared in the FFN
    maps that add to the residual stream start at 0   no biases

With n_expert > 1 every FFN becomes E experts, of which each token takes K (fine-grained, Dai et al.
2024, "DeepSeekMoE"); all tokens take `n_shared` more. The width of an expert makes the arithmetic
equal to the dense model's: (top_k + n_shared) * width = 4 * n_embd.

What to look at first: `Block.forward`, then `Rows` and `Experts.forward`.

Choices, and their reasons (docs/arena.md has what we measured):
- Norms have no gains, as the next matrix can hold them. So all parameters are matrices, for Muon.
- The embedding is also the head. Two tables would be over a third of a model of this size.
- A token's gates sum to 1, and the gated sum is multiplied by K: with equal gates, the K experts
  add up as the parts of a dense FFN do. Train experts with `loss + 0.01 * aux['balance']`. At
  top_k = 1 the gate is always 1, so only that loss trains the router.

Dimension letters (x_ND has shape N x D): B batch, T sequence, N = B*T tokens, D width, H heads, d
width of a head, E experts, K chosen per token, R rows, F hidden width. Next to read: selfmoe.py.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class DenseConfig:
    vocab_size: int = 16384           # tokens the model knows, end-of-text included
    block_size: int = 512             # longest context
    n_layer: int = 12                 # blocks
    n_head: int = 6                   # attention heads
    n_embd: int = 384                 # width
    n_expert: int = 1                 # E: experts of each FFN; 1: a plain FFN without a router
    top_k: int = 1                    # K: experts that each token takes
    n_shared: int = 0                 # more experts, which every token takes
    route_every: int = 1              # 2: every second block has experts, the others a plain FFN
    dropout: float = 0.1              # on embeddings, attention and both residual branches
    drop_expert: float = 0.0          # in training a choice is left out with this probability
    sparse: bool = True               # False: all E experts for every token, then drop E - K

    def __post_init__(self):
        assert self.n_embd % (2 * self.n_head) == 0, \
            f'a width of {self.n_embd} has no {self.n_head} heads of even width'
        assert 1 <= self.top_k <= self.n_expert, \
            f'top_k = {self.top_k} must lie between 1 and n_expert = {self.n_expert}'
        assert self.n_expert > 1 or not (self.n_shared or self.drop_expert), \
            'n_shared and drop_expert need n_expert > 1'
        assert 0 <= self.drop_expert < 1, f'drop_expert = {self.drop_expert} must be in [0, 1)'
        assert 4 * self.n_embd % (self.top_k + self.n_shared) == 0, \
            'top_k + n_shared must divide 4 * n_embd: it sets the width of an expert'


# ---- The dense block -----------------------------------------------------------------------------

def norm(x):
    """RMSNorm without gains: every vector gets the length sqrt(its width)."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


class FeedForward(nn.Module):
    """ReLU squared (So et al. 2021, "Primer"). It has no auxiliary losses: {}."""
    def __init__(self, D, hidden):
        super().__init__()
        self.fc = nn.Linear(D, hidden, bias=False)
        self.down = nn.Linear(hidden, D, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.fc(x)).square()), {}


class Block(nn.Module):
    """Attention, then the FFN or the experts. `layer` is its place in the KV cache."""
    def __init__(self, config, layer, router):           # router: a class, Router or your own
        super().__init__()
        c, D = config, config.n_embd
        self.config = config
        self.layer = layer
        # Three matrices, not one: Muon treats each by itself.
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.proj = nn.Linear(D, D, bias=False)
        is_routed = c.n_expert > 1 and layer % c.route_every == c.route_every - 1
        self.ffn = Experts(c, router) if is_routed else FeedForward(D, 4 * D)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, table, cache):
        B, T, D = x.shape
        n = norm(x)
        heads = (B, T, self.config.n_head, -1)
        q, k, v = (linear(n).view(heads).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = rotate(norm(q), table), rotate(norm(k), table)    # (B, H, T, d), of length sqrt(d)
        y = attend(q, k, v, cache, self.layer, self.dropout.p if self.training else 0.0)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(B, T, D)))
        y, losses = self.ffn(norm(x))
        return x + self.dropout(y), losses


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


# ---- The routed sibling: K of E experts instead of one FFN ---------------------------------------

class Router(nn.Module):
    """Scores E experts per token, takes the best K -> gates (N, K) that sum to 1, choices (N, K),
    losses by name."""
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
        order_NE = prob_NE.argsort(descending=True, stable=True)    # the lower index wins a tie
        return order_NE[:, :self.config.top_k]

    def weigh(self, score_NE, choice_NK):               # with which gates?
        prob_NE = score_NE.softmax(-1)
        gate_NK = prob_NE.gather(1, choice_NK)
        gate_NK = gate_NK / gate_NK.sum(-1, keepdim=True)
        return gate_NK, dict(balance=self.balance_loss(prob_NE, choice_NK))

    def balance_loss(self, prob_NE, choice_NK):
        """Switch: E * sum of share of the picks * mean probability; 1 if balanced, at most E/K."""
        chosen_NE = torch.zeros_like(prob_NE).scatter(1, choice_NK, 1.0)
        share_E = chosen_NE.mean(0) / choice_NK.size(1)  # of all N*K picks, no gradient
        return prob_NE.size(1) * (share_E * prob_NE.mean(0)).sum()


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

    def linear(self, x_RD, w_EDF):                       # x_RD @ w_EDF[choice]
        return torch.cat([x @ w for x, w in zip(x_RD.split(self.sizes), w_EDF)])

    def combine(self, y_RD):                             # rows -> a token's gated sum
        y_RD = self.gate[:, None] * y_RD
        return y_RD.new_zeros(self.shape[0], y_RD.size(1)).index_add(0, self.token, y_RD)

    def feed_forward(self, x_ND, fc_EDF, down_EFD):      # a token's gated sum of its experts
        h_RF = F.relu(self.linear(self.spread(x_ND), fc_EDF)).square()
        return self.combine(self.linear(h_RF, down_EFD))


class Experts(nn.Module):
    """out[t] = K * sum_k gate[t, k] * expert[choice[t, k]](x[t]) + shared experts(x[t])"""
    def __init__(self, config, router):
        super().__init__()
        c, D = config, config.n_embd
        hidden = 4 * D // (c.top_k + c.n_shared)
        self.config = c
        self.router = router(D, c.n_expert, c)
        self.fc = nn.Parameter(torch.empty(c.n_expert, D, hidden))
        self.down = nn.Parameter(torch.empty(c.n_expert, hidden, D))
        self.shared = FeedForward(D, c.n_shared * hidden) if c.n_shared else None

    def forward(self, x):
        x_ND = x.flatten(0, 1)
        gate_NK, choice_NK, losses = self.router(x_ND)
        # Left-out choices have a gate of 0, the others count 1 / (1 - drop_expert). The balance
        # loss and routes() still see all of them.
        gate_NK = F.dropout(gate_NK, self.config.drop_expert, self.training)
        rows = Rows(gate_NK, choice_NK, len(self.fc), self.config.sparse)
        y_ND = rows.feed_forward(x_ND, self.fc, self.down)
        y = self.config.top_k * y_ND.view_as(x)
        if self.shared:
            y = y + self.shared(x)[0]
        return y, losses


# ---- The model -----------------------------------------------------------------------------------

class Dense(nn.Module):
    router = Router                                      # a class that an idea may replace

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)  # also the output head
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c, i, self.router) for i in range(c.n_layer))
        self.init_weights()

    def init_weights(self):
        """Maps that add to the residual stream are 0: at first a block returns what it was given.
        The others keep the size of what they read, 1/sqrt(fan-in); embedding and router are small.
        So at first a token predicts itself, with a logit of 0.02 * n_embd: a loss above ln V."""
        for name, p in self.named_parameters():
            if 'router.' in name and not name.endswith('router.linear.weight'):
                continue                         # a custom router initialises its own extra weights
            if '.proj' in name or '.down' in name:
                nn.init.zeros_(p)
            elif name == 'wte.weight' or 'router.' in name:
                nn.init.normal_(p, std=0.02)
            else:
                nn.init.normal_(p, std=1 / math.sqrt(self.config.n_embd))

    def features(self, idx, cache=None):
        """(B, T) token ids -> final-norm states (B, T, D), losses summed over layers."""
        past = cache[0][0].size(2) if cache else 0
        length = past + idx.size(1)
        if length > self.config.block_size:
            raise ValueError(
                f'{length} tokens are more than the block_size of {self.config.block_size}')
        x = self.dropout(norm(self.wte(idx)))            # (B, T, D)
        wide = torch.promote_types(x.dtype, torch.float32)
        position = torch.arange(past, length, device=x.device, dtype=wide)
        table = rotary(position, self.config.n_embd // self.config.n_head)
        aux = {}
        for block in self.blocks:
            x, losses = block(x, table, cache)
            for name, loss in losses.items():
                aux[name] = aux.get(name, 0) + loss
        return norm(x), aux

    def logits(self, x):
        """Final-norm states (B, T, D) -> logits (B, T, vocab_size)."""
        return F.linear(x, self.wte.weight)

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
        """{layer: (B, T, E)}: the gates, which sum to 1; 0 if not chosen. Call eval() first."""
        routes = {}                                      # in the order in which a token meets them
        with ExitStack() as hooks:                       # removed at the end of `with`
            for name, module in self.named_modules():
                if isinstance(module, self.router):
                    def record(router, args, result, name=name.removesuffix('.ffn.router')):
                        gate_NK, choice_NK, losses = result
                        gate_NE = gate_NK.new_zeros(len(gate_NK), router.n_choices)
                        routes[name] = gate_NE.scatter(1, choice_NK, gate_NK).view(*idx.shape, -1)
                    hooks.enter_context(module.register_forward_hook(record))
            self.features(idx)
        return routes

    def count_params(self, taken={}):
        """Total, and active: of E experts K, or as many as {layer: choices per token} `taken` says.
        wte counts once, as the head."""
        total = sum(p.numel() for p in self.parameters())
        idle = 0
        for name, p in self.named_parameters():
            if p.dim() == 3 and '.router.' not in name:  # stacks of E experts, E adapters
                used = taken.get(name.partition('.ffn.')[0], self.config.top_k)
                idle += p.numel() - round(p.numel() * used / self.config.n_expert)
        return total, total - idle


try:                            # the same results, faster on a GPU, while they are unedited
    from plumbing.rows import faster
    Rows = faster(Rows)
except ImportError:             # a copy of this file needs nothing else
    pass

Config, Model = DenseConfig, Dense                       # what train.py looks for
