"""
Self-MoE (anonymous 2024, "Self-MoE: Self Mixture of Experts in between decoder layers").

Take a trained LLaMA-style decoder. Let the input of every block B_i but the first also pass around
the block, through a small gate G_i, which is a matrix, one weight per channel, or a single weight:

    h_i = B_i(h_{i-1}) + G_i(h_{i-1})        Eq. 2

The "experts" are two consecutive layers, this one and, through the gate, the previous one. Nothing
is routed. As B_i contains a skip connection, h_{i-1} passes with the weight I + G_i instead of I,
so a negative gate can erase it. Gates start at zero, where they change nothing but do get
gradients. Then everything trains on a new domain, and `select_gates` removes each gate without
which the model's head predicts at least as well from that layer's state. The rival in the paper's
Table 5 is a mixture of copied FFNs, which `upcycle` makes.

What to look at first: `gated_layers`, where Eq. 2 is computed, then `select_gates`.

Departures that change results (docs/selfmoe.md has all of them, and what we measured):
- Eq. 5 as printed removes the gates that lower perplexity. `select_gates` keeps these.
- The paper projects states through the head. We apply the final norm first, as the model does.

Dimension letters, as suffixes in the mixture (x_ND has shape N x D): B batch, T sequence, N = B*T
tokens, D width, H heads, d width of a head, E experts, K chosen per token, R rows (at most N*K),
F hidden width. Next to read: papaformer.py.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class SelfMoEConfig:
    vocab_size: int = 50257           # tokens the model knows, end-of-text included
    block_size: int = 256             # longest context
    n_layer: int = 8                  # n: blocks
    n_head: int = 8                   # query heads
    n_kv_head: int = 4                # key and value heads; n_head/n_kv_head query heads share one
    n_embd: int = 256                 # width
    d_head: int | None = None         # width of a head; None: n_embd / n_head
    ffn_hidden: int | None = None     # FFN width; None: 8/3 n_embd, rounded up to a multiple of 32
    gate: str = 'none'                # gates around the blocks: none | matrix | vector | scalar
    gate_layers: list | None = None   # blocks (from 0) that have a gate; None: all but the first
    n_expert: int = 1                 # E: SwiGLU experts per block; 1: a plain FFN without a router
    top_k: int = 1                    # K: experts that each token takes
    gates_sum_to_1: bool = True       # of a token's K experts; False: plain probabilities (OLMoE)
    rope_base: float = 10000.0        # of the rotary positions: larger turns more slowly
    rope_scaling: list | None = None  # Llama 3.1's factor, low, high, tokens: see `rotary_table`
    qkv_bias: bool = False            # queries, keys and values have biases (Qwen2)
    qk_norm: str = 'none'             # norm of queries, keys: none | head (Qwen3) | width (OLMoE)
    norm_eps: float = 1e-6            # added to the mean square in RMSNorm
    window: int | None = None         # tokens that a token sees, itself included; None: all
    tied: bool = False                # the embedding is also the head
    dropout: float = 0.0              # on attention and both residual branches
    sparse: bool = True               # False: all E experts for every token, then drop E - K

    def __post_init__(self):
        assert self.d_head or self.n_embd % (2 * self.n_head) == 0, \
            f'a width of {self.n_embd} has no {self.n_head} heads of even width'
        assert self.n_head % self.n_kv_head == 0, 'n_head must be a multiple of n_kv_head'
        assert self.gate in ('none', 'matrix', 'vector', 'scalar'), \
            f"gate is '{self.gate}'; it can be none, matrix, vector or scalar"
        assert self.qk_norm in ('none', 'head', 'width'), \
            f"qk_norm is '{self.qk_norm}'; it can be none, head or width"
        assert 1 <= self.top_k <= self.n_expert, \
            f'top_k = {self.top_k} must lie between 1 and n_expert = {self.n_expert}'


# ---- The idea: a gate around each block ----------------------------------------------------------

class Gate(nn.Module):
    """G_i (section 3.3): a matrix mixes the channels of the block's input, a vector weights each
    channel, a scalar weights all alike."""
    def __init__(self, kind, D):
        super().__init__()
        shape = dict(matrix=(D, D), vector=(D,), scalar=())[kind]
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, h):
        return F.linear(h, self.weight) if self.weight.dim() == 2 else self.weight * h


def gated_layers(blocks, gates, h, table, cache):
    """Yields, for each layer, its state h = block_out + gate_out, block_out, gate_out (None where
    there is no gate), and the block's auxiliary losses. `table` has the rotary positions."""
    for i, block in enumerate(blocks):
        block_out, losses = block(h, table, cache)
        gate_out = gates[str(i)](h) if str(i) in gates else None
        h = block_out if gate_out is None else block_out + gate_out          # Eq. 1, Eq. 2
        yield h, block_out, gate_out, losses


# ---- The LLaMA block that gates stand around -----------------------------------------------------

def linear(d_in, d_out, std=0.02):
    """A linear map without a bias, its weights drawn with this standard deviation."""
    new = nn.Linear(d_in, d_out, bias=False)
    nn.init.normal_(new.weight, std=std)
    return new


def rotary_table(position, d, base, scaling):
    """Rotary positions: channels i and i + d/2 of a head are a pair, which turns by an angle that
    grows with the position. Positions (T,) -> cosines and sines, each (T, d), for `rotate`. They
    are float32 or wider, because bfloat16 cannot tell large positions apart."""
    pair = torch.arange(d // 2, device=position.device, dtype=position.dtype)
    frequency = base ** (-pair / (d // 2))
    if scaling is not None:
        # Llama 3.1 was first trained on texts of at most `tokens`. A pair that turns at least
        # `high` times within these keeps its angle. At most `low` times: `factor` times slower.
        factor, low, high, tokens = scaling
        turns = tokens * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)        # 1: as it was, 0: slowed
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = position[..., None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x, table):
    """Turn (B, H, T, d) heads: (a, b) becomes (a cos - b sin, b cos + a sin)."""
    cos, sin = table
    other = x.roll(x.size(-1) // 2, -1)                  # (b, a)
    return (x * cos + other * sin).type_as(x)


def attend_window(q, k, v, cache, layer, dropout, window):
    """Causal attention of (B, H, T, d) heads to the last `window` keys, or to all if it is None.
    `cache`, a (k, v) per layer, is read and extended."""
    if cache is not None:
        if layer < len(cache):
            k, v = torch.cat((cache[layer][0], k), 2), torch.cat((cache[layer][1], v), 2)
            cache[layer] = (k, v)
        else:
            cache.append((k, v))
    T, S = q.size(2), k.size(2)
    mask = None                                          # plain causal: the kernel needs no mask
    if T < S or window and window < S:                   # the queries are the last T positions
        position = torch.arange(S, device=q.device)
        distance = position[S - T:, None] - position     # (T, S), from a query back to a key
        mask = (distance >= 0) & (distance < (window or S))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None,
        enable_gqa=q.size(1) > k.size(1))                # fewer heads in k, v


class HeadNorm(nn.RMSNorm):
    """RMSNorm of (B, T, H, d) queries or keys: of each head (Qwen3), or of all as one (OLMoE)."""
    def forward(self, x):
        return super().forward(x.flatten(2).unflatten(2, (-1, *self.normalized_shape))).view_as(x)


class FFN(nn.Module):
    """SwiGLU. It has no auxiliary losses: {}."""
    def __init__(self, d, hidden, small):
        super().__init__()
        self.fc = linear(d, 2 * hidden)                  # gate and up
        self.down = linear(hidden, d, small)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up), {}


class Block(nn.Module):
    """B_i (Eq. 6 and 7): RMSNorm, rotary grouped-query attention, RMSNorm, FFN or mixture."""
    def __init__(self, config, layer, router):
        super().__init__()
        c, D = config, config.n_embd
        self.layer = layer
        self.window = c.window
        self.d_head = c.d_head or D // c.n_head
        self.counts = (c.n_head, c.n_kv_head, c.n_kv_head)       # heads of queries, keys, values
        hidden = c.ffn_hidden or math.ceil(8 * D / 3 / 32) * 32
        # As in GPT-2, what adds to the residual stream, twice per layer, starts smaller.
        small = 0.02 / math.sqrt(2 * c.n_layer)
        self.norm_1 = nn.RMSNorm(D, eps=c.norm_eps)
        self.norm_2 = nn.RMSNorm(D, eps=c.norm_eps)
        self.qkv = linear(D, sum(self.counts) * self.d_head)
        if c.qkv_bias:
            self.qkv.bias = nn.Parameter(torch.zeros(len(self.qkv.weight)))
        self.norm_q = self.norm_k = nn.Identity()
        if c.qk_norm != 'none':
            q, k, _ = self.counts if c.qk_norm == 'width' else (1, 1, 1)
            self.norm_q = HeadNorm(q * self.d_head, eps=c.norm_eps)
            self.norm_k = HeadNorm(k * self.d_head, eps=c.norm_eps)
        self.proj = linear(c.n_head * self.d_head, D, small)
        self.ffn = FFN(D, hidden, small) if c.n_expert == 1 else Mixture(c, hidden, small, router)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, table, cache):
        B, T, D = x.shape
        heads = self.qkv(self.norm_1(x)).view(B, T, -1, self.d_head)
        q, k, v = heads.split(self.counts, 2)            # (B, T, H, d); fewer heads in k, v
        q, k, v = (z.transpose(1, 2) for z in (self.norm_q(q), self.norm_k(k), v))
        q, k = rotate(q, table), rotate(k, table)
        dropout = self.dropout.p if self.training else 0.0
        y = attend_window(q, k, v, cache, self.layer, dropout, self.window)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(B, T, -1)))
        y, losses = self.ffn(self.norm_2(x))
        return x + self.dropout(y), losses


# ---- The mixture that gates are compared with ----------------------------------------------------

class Router(nn.Module):
    """Scores E experts per token, takes the best K -> gates (N, K), choices (N, K), losses by
    name."""
    def __init__(self, d, n_choices, config):
        super().__init__()
        self.config = config
        self.n_choices = n_choices
        self.linear = linear(d, n_choices)

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
        if self.config.gates_sum_to_1:
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


class Mixture(nn.Module):
    """E SwiGLU experts, of which each token takes K:
        out[t] = sum_k gate[t, k] * expert[choice[t, k]](x[t])"""
    def __init__(self, config, hidden, small, router):
        super().__init__()
        E, D = config.n_expert, config.n_embd
        self.sparse = config.sparse
        self.router = router(D, E, config)
        self.fc = nn.Parameter(0.02 * torch.randn(E, D, 2 * hidden))         # gate and up
        self.down = nn.Parameter(small * torch.randn(E, hidden, D))

    def forward(self, x):
        x_ND = x.flatten(0, 1)
        gate_NK, choice_NK, losses = self.router(x_ND)
        rows = Rows(gate_NK, choice_NK, len(self.fc), self.sparse)
        gate_RF, up_RF = rows.linear(rows.spread(x_ND), self.fc).chunk(2, dim=-1)
        y_ND = rows.combine(rows.linear(F.silu(gate_RF) * up_RF, self.down))
        return y_ND.view_as(x), losses


# ---- The model -----------------------------------------------------------------------------------

class SelfMoE(nn.Module):
    router = Router                                      # a class that an idea may replace

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.gates_sum_to_1 = c.gates_sum_to_1           # tools.check reads this
        gated = range(1, c.n_layer) if c.gate_layers is None else c.gate_layers
        if c.gate == 'none':
            gated = []
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c, i, self.router) for i in range(c.n_layer))
        self.gates = nn.ModuleDict({str(i): Gate(c.gate, c.n_embd) for i in gated})
        self.norm_f = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        if not c.tied:
            self.head = linear(c.n_embd, c.vocab_size)
        nn.init.normal_(self.wte.weight, std=0.02)

    def states(self, idx, cache=None):
        """What `gated_layers` yields for (B, T) token ids."""
        past = cache[0][0].size(2) if cache else 0
        length = past + idx.size(1)
        if length > self.config.block_size:
            raise ValueError(
                f'{length} tokens are more than the block_size of {self.config.block_size}')
        h = self.wte(idx)                                # (B, T, D)
        wide = torch.promote_types(h.dtype, torch.float32)
        c, d = self.config, self.blocks[0].d_head
        position = torch.arange(past, length, device=h.device, dtype=wide)
        table = rotary_table(position, d, c.rope_base, c.rope_scaling)
        return gated_layers(self.blocks, self.gates, h, table, cache)

    def features(self, idx, cache=None):
        """(B, T) token ids -> final-norm states (B, T, D), aux. aux has a mixture's balance loss,
        summed over layers, and the mean size of what each block and each gate returns (Fig. 2)."""
        aux = {}
        for i, (h, block_out, gate_out, losses) in enumerate(self.states(idx, cache)):
            for name, loss in losses.items():
                aux[name] = aux.get(name, 0) + loss
            aux[f'layer_size_{i}'] = mean_size(block_out)
            if gate_out is not None:
                aux[f'gate_size_{i}'] = mean_size(gate_out)
        return self.norm_f(h), aux

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
        """{layer: (B, T, E)}: a mixture's gates, 0 if not chosen. Call eval() first."""
        routes = {}                                      # in the order of the layers
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
        """Total, and active: what multiplies a token. Of E experts K do, or as many as `taken`
        says, {layer: choices per token}. An embedding does only if it is also the head."""
        total = sum(p.numel() for p in self.parameters())
        idle = 0 if self.config.tied else self.wte.weight.numel()
        for name, p in self.named_parameters():
            if p.dim() == 3 and '.router.' not in name:  # stacks of E experts, E adapters
                used = taken.get(name.partition('.ffn.')[0], self.config.top_k)
                idle += p.numel() - round(p.numel() * used / self.config.n_expert)
        return total, total - idle


def mean_size(h):
    """Root mean square over channels, mean over tokens. For the log only."""
    return h.detach().float().square().mean(-1).sqrt().mean()


# ---- Surgery: add gates to a trained model, remove some after training ---------------------------

def rebuild(model, **changes):
    """A new model with a changed config and the weights that both have, in the same mode."""
    new = type(model)(replace(model.config, **changes)).to(model.wte.weight)
    new.load_state_dict(model.state_dict(), strict=False)    # leaves out what only one has
    return new.train(model.training)


def add_gates(model, kind='matrix'):
    """Add zero gates around every block but the first. The model computes the same as before, until
    it is trained further. Kind 'none' adds nothing, as the control in a comparison."""
    assert not model.gates, 'the model has gates already'
    return rebuild(model, gate=kind, gate_layers=None)


@torch.no_grad()
def gate_perplexities(model, batches):
    """{layer: [perplexity without its gate, with it]}. norm_f and head predict from the layer's
    state; earlier gates stay. Means over the sequences of `batches`, a list of (idx, targets)."""
    was_training = model.training
    model.eval()
    pairs = {}                                           # {layer: [(2, B) of each batch]}
    for idx, targets in batches:
        for i, (h, block_out, gate_out, _) in enumerate(model.states(idx)):
            if gate_out is not None:
                both = [perplexity(model, x, targets) for x in (block_out, h)]   # Eq. 3, Eq. 4
                pairs.setdefault(i, []).append(torch.stack(both))
    model.train(was_training)
    # A sequence without a target has a perplexity of exp(0 / 0) = nan, and does not count.
    return {i: torch.cat(parts, 1).nanmean(1).tolist() for i, parts in pairs.items()}


def perplexity(model, h, targets):
    """(B,), one per sequence, where the model's norm and head predict from states h (B, T, D)."""
    logits = model.logits(model.norm_f(h)).float()       # bfloat16 is too coarse
    nats = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1, reduction='none')
    return (nats.sum(1) / (targets >= 0).sum(1)).exp()


def select_gates(model, batches, rule='improves', threshold=0.01, layer=None):
    """Remove gates after training -> (model, a list with a dict per gate). The rule `improves`
    keeps a gate that lowers the perplexity of its layer, `changes` one that changes it by more than
    `threshold` (0.01 is 1%). `printed` is Eq. 5 to the letter. `from_layer`, as in Table 6, keeps
    the gates of block `layer` and of later ones."""
    last = model.config.n_layer - 1
    assert model.gates, 'the model has no gates'
    assert rule in ('improves', 'changes', 'printed', 'from_layer'), \
        f"rule is '{rule}'; it can be improves, changes, printed, from_layer"
    assert rule != 'from_layer' or layer in range(1, last + 1), \
        f"rule 'from_layer' needs layer, from 1 to {last}: the first block whose gate stays"
    table = []
    for i, (without, with_gate) in gate_perplexities(model, batches).items():
        kept = dict(
            improves=with_gate < without,
            changes=abs(with_gate - without) / without > threshold,
            printed=with_gate > without,
            from_layer=i >= (layer or 0))[rule]
        table.append({'layer': i, 'without': without, 'with': with_gate, 'kept': kept})
    return rebuild(model, gate_layers=[row['layer'] for row in table if row['kept']]), table


@torch.no_grad()
def upcycle(model, n=2, k=2):
    """Every FFN becomes n copies of itself, of which a token takes k, behind a random router."""
    assert model.config.n_expert == 1, 'the model is a mixture of experts already'
    new = rebuild(model, n_expert=n, top_k=k)
    for block, old in zip(new.blocks, model.blocks):
        block.ffn.fc.copy_(old.ffn.fc.weight.T.expand(n, -1, -1))
        block.ffn.down.copy_(old.ffn.down.weight.T.expand(n, -1, -1))
    return new


try:                            # the same results, faster on a GPU, while they are unedited
    from plumbing.rows import faster
    Rows = faster(Rows)
except ImportError:             # a copy of this file needs nothing else
    pass

surgeries = [add_gates, select_gates, upcycle]           # what tools/surgery.py offers
Config, Model = SelfMoEConfig, SelfMoE                   # what train.py looks for
