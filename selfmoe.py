"""
Self-MoE (anonymous 2024, "Self-MoE: Self Mixture of Experts in between decoder layers").

Take a trained LLaMA-style decoder. Let the input of every block B_i but the first also pass around
the block, through a small gate G_i:

    h_i = B_i(h_{i-1}) + G_i(h_{i-1})        Eq. 2

A gate is a D x D matrix, or one weight per channel, or a single weight. It changes the block's skip
connection: h_{i-1} now passes with the weight I + G_i instead of I, so a negative gate can erase
it. The "experts" are two consecutive layers: the previous one, through the gate, and this one.
There is no router; both always run. All gates start at zero, so at first the model computes what it
did without them, but the gates do get gradients. Then everything trains on a new domain. After that
`select_gates` removes each gate without which the model's head predicts at least as well from that
layer's state. `upcycle` makes Table 5's rival, the usual mixture of FFNs.

What to look at first: `SelfMoE.states`, where Eq. 2 is computed, then `select_gates`.
Measured (three seeds, docs/results.md): a model of 31.6M parameters, fine-tuned on math, has 2.436
nats per token without gates, 2.431 with matrix gates (32.1M), and 2.405 as a mixture (36.0M). In
the paper's Table 5 gates beat the mixture.

Departures from the paper, and gaps it leaves:
- Eq. 5 as printed removes the gates that lower perplexity and keeps the others (rule `printed`).
  The text removes those that change it little (`changes`), Table 6 removes all gates before some
  layer (`from_layer`). The default of `select_gates`, `improves`, keeps the gates that lower it.
- The paper projects states through the head; we apply the final norm first, as the model does.
  While a gate is judged, the gates before it stay in place. The paper calibrates on a part of the
  training set; here the caller passes the batches.
- The paper has n-1 gates for n blocks. That the first block has none is our reading.
- Section 3.2's "approximately 200M" for a 7B model should be 0.52B, 31 gates of 4,096 x 4,096;
  section 4.3.2's 8.5B for Mistral with gates should be 7.8B.
- We read Fig. 2's "mean activation" as the root mean square over channels, averaged over tokens.
- The paper's mixture is made with MergeKit; its router is not described. Ours starts at random: if
  it weighted the copies equally, they would get equal gradients forever. A token's K weights sum to
  1, so the mixture starts as its base, up to rounding. At K = 1 only the balance loss trains the
  router.
- The paper starts from trained models of 1.3B to 8B parameters. Here the base is trained first, or
  read by tools/import_hf.py; rope_base, norm_eps, window, d_head and tied fit those models.
- train.py decays matrix gates, but not vector and scalar gates, as they are no matrices.

Dimension letters, as suffixes in the mixture (x_ND has shape N x D): B batch, T sequence, N = B*T
tokens, D width, H heads, E experts, K chosen per token, F hidden width.
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
    rope_base: float = 10000.0        # of the rotary positions: larger turns more slowly
    norm_eps: float = 1e-6            # added to the mean square in RMSNorm
    window: int | None = None         # tokens that a token sees, itself included; None: all
    tied: bool = False                # the embedding is also the head
    dropout: float = 0.0              # on attention and both residual branches

    def __post_init__(self):
        assert self.d_head or self.n_embd % (2 * self.n_head) == 0, \
            f'a width of {self.n_embd} has no {self.n_head} heads of even width'
        assert self.n_head % self.n_kv_head == 0, 'n_head must be a multiple of n_kv_head'
        assert self.gate in ('none', 'matrix', 'vector', 'scalar'), \
            f"gate is '{self.gate}'; it can be none, matrix, vector or scalar"
        assert 1 <= self.top_k <= self.n_expert, \
            f'top_k = {self.top_k} must lie between 1 and n_expert = {self.n_expert}'


# ---- The idea: a gate around each block ----------------------------------------------------------

class Gate(nn.Module):
    """G_i (section 3.3): a matrix mixes the channels of the block's input, a vector weights each
    channel, a scalar weights all alike."""
    def __init__(self, kind, d):
        super().__init__()
        shape = dict(matrix=(d, d), vector=(d,), scalar=())[kind]
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, h):
        if self.weight.dim() == 2:
            return F.linear(h, self.weight)
        return self.weight * h


class SelfMoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        gated = range(1, c.n_layer) if c.gate_layers is None else c.gate_layers
        if c.gate == 'none':
            gated = []
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c, i) for i in range(c.n_layer))
        self.gates = nn.ModuleDict({str(i): Gate(c.gate, c.n_embd) for i in gated})
        self.norm_f = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        if not c.tied:
            self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.init_weights()

    def states(self, idx, cache=None):
        """Yields for each layer: its state h = block_out + gate_out; block_out; gate_out, None if
        there is no gate; the block's auxiliary losses."""
        past = cache[0][0].size(2) if cache else 0
        length = past + idx.size(1)
        if length > self.config.block_size:
            raise ValueError(
                f'{length} tokens are more than the block_size of {self.config.block_size}')
        h = self.wte(idx)                                # (B, T, D)
        for i, block in enumerate(self.blocks):
            block_out, losses = block(h, past, cache)
            if str(i) in self.gates:
                gate_out = self.gates[str(i)](h)
                h = block_out + gate_out                 # Eq. 2
            else:
                gate_out = None
                h = block_out                            # Eq. 1
            yield h, block_out, gate_out, losses

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
        """Of final-norm states (B, T, D)."""
        return F.linear(x, self.head_weight)

    def forward(self, idx, targets=None, cache=None, reduction='mean'):
        """-> logits, None, aux; with targets (-1: ignored) None, loss, aux. Extends a cache."""
        x, aux = self.features(idx, cache)
        if targets is None:
            return self.logits(x), None, aux
        loss = head_loss(x, self.head_weight, targets, reduction)    # cross-entropy of the logits
        return None, loss, aux

    @property
    def head_weight(self):
        return self.wte.weight if self.config.tied else self.head.weight

    def init_weights(self):
        """Std 0.02, less where a matrix adds to the residual stream, as in GPT-2."""
        for name, p in self.named_parameters():
            if 'norm_' not in name and not name.startswith('gates'):     # ones and zeros already
                std = 0.02
                if '.proj' in name or '.down' in name:
                    std *= 1 / math.sqrt(2 * self.config.n_layer)
                nn.init.normal_(p, std=std)

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
        """{layer: (B, T, E)}: weights of a mixture, 0 if not chosen. Call eval() first."""
        routes = {}                                      # in the order of the layers
        with ExitStack() as hooks:                       # removed at the end of `with`
            for name, module in self.named_modules():
                if isinstance(module, Router):
                    def record(router, args, result, name=name.removesuffix('.ffn.router')):
                        weight_NE, balance = result
                        routes[name] = weight_NE.view(*idx.shape, -1)
                    hooks.enter_context(module.register_forward_hook(record))
            self.features(idx)
        return routes

    def count_params(self):
        """Total, and active: K of E experts, and not the embedding, which is only looked up."""
        total = sum(p.numel() for p in self.parameters())
        idle = 0 if self.config.tied else self.wte.weight.numel()
        for name, p in self.named_parameters():
            if p.dim() == 3 and '.router.' not in name:  # stacks of E experts, E adapters
                idle += p.numel() - p.numel() * self.config.top_k // self.config.n_expert
        return total, total - idle


def mean_size(h):
    """Root mean square over channels, mean over tokens. For the log only."""
    return h.detach().float().square().mean(-1).sqrt().mean()


# ---- The LLaMA block that gates stand around -----------------------------------------------------

def rope(x, past, base=10000.0):
    """Rotary positions of (B, H, T, d) heads: channels i and i + d/2, a pair, turn by an angle that
    grows with position, from `past` on. (torch.compile warns of complex numbers; ignore it.)"""
    half = x.size(-1) // 2
    wide = torch.promote_types(x.dtype, torch.float32)   # bfloat16 cannot tell positions apart
    position = torch.arange(past, past + x.size(-2), device=x.device, dtype=wide)
    frequency = base ** (-torch.arange(half, device=x.device, dtype=wide) / half)
    angle = position[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)    # if compiled: one table, never inlined
    cos, sin = torch.view_as_real(turn).unbind(-1)       # angle.cos(), angle.sin()
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)


def attend_window(q, k, v, cache, layer, dropout, window):
    """Causal attention of (B, H, T, d) heads to the last `window` keys (None: to all). `cache`, a
    (k, v) per layer, is read and extended."""
    if cache is not None:
        if layer < len(cache):
            k, v = torch.cat((cache[layer][0], k), 2), torch.cat((cache[layer][1], v), 2)
            cache[layer] = (k, v)
        else:
            cache.append((k, v))
    T, S = q.size(2), k.size(2)
    is_cut = True if window and window < S else False    # plain bools, which torch.compile needs
    causal = True if T == S and not is_cut else False
    mask = None                                          # if causal, or if one query sees every key
    if is_cut or 1 < T < S:                              # query t stands at position S - T + t
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    if is_cut:
        mask = mask.triu(S - T - window + 1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal,
        enable_gqa=q.size(1) > k.size(1))                # fewer heads in k, v


class FFN(nn.Module):
    """SwiGLU. It has no auxiliary losses: {}."""
    def __init__(self, d, hidden):
        super().__init__()
        self.fc = nn.Linear(d, 2 * hidden, bias=False)   # gate and up
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up), {}


class Block(nn.Module):
    """B_i (Eq. 6 and 7): RMSNorm, rotary grouped-query attention, RMSNorm, FFN or mixture."""
    def __init__(self, config, layer):
        super().__init__()
        c, D = config, config.n_embd
        self.config = config
        self.layer = layer
        self.d_head = c.d_head or D // c.n_head
        hidden = c.ffn_hidden or math.ceil(8 * D / 3 / 32) * 32
        self.norm_1, self.norm_2 = nn.RMSNorm(D, eps=c.norm_eps), nn.RMSNorm(D, eps=c.norm_eps)
        self.qkv = nn.Linear(D, (c.n_head + 2 * c.n_kv_head) * self.d_head, bias=False)
        self.proj = nn.Linear(c.n_head * self.d_head, D, bias=False)
        self.ffn = FFN(D, hidden) if c.n_expert == 1 else Mixture(D, hidden, c.n_expert, c.top_k)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, past, cache):
        B, T, D = x.shape
        c, n_head, n_kv_head = self.config, self.config.n_head, self.config.n_kv_head
        heads = self.qkv(self.norm_1(x)).view(B, T, -1, self.d_head).transpose(1, 2)
        q, k, v = heads.split((n_head, n_kv_head, n_kv_head), 1)     # (B, H, T, d); fewer in k, v
        dropout = self.dropout.p if self.training else 0.0
        q, k = rope(q, past, c.rope_base), rope(k, past, c.rope_base)
        y = attend_window(q, k, v, cache, self.layer, dropout, c.window)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(B, T, -1)))
        y, losses = self.ffn(self.norm_2(x))
        return x + self.dropout(y), losses


# ---- Surgery: add gates to a trained model, remove some after training ---------------------------

def rebuild(model, **changes):
    """A new model with a changed config and the weights that both have, in the same mode."""
    new = type(model)(replace(model.config, **changes)).to(model.wte.weight)
    new.load_state_dict(model.state_dict(), strict=False)    # leaves out what only one has
    return new.train(model.training)


def add_gates(model, kind='matrix'):
    """Add zero gates around every block but the first. The model computes the same as before, until
    it is trained further. Kind 'none' adds nothing, as the control in a comparison."""
    if model.gates:
        raise ValueError('the model has gates already')
    return rebuild(model, gate=kind, gate_layers=None)


@torch.no_grad()
def select_gates(model, batches, rule='improves', threshold=0.01, layer=None):
    """Remove gates after training -> (model, GateTable). For each gate, norm_f and head predict
    from its layer's state, once without gate_out, once with it. `rule` compares the perplexities,
    means over the sequences of `batches`, a list of (idx, targets). `changes` keeps a gate if they
    differ by more than `threshold` (0.01: 1%), `from_layer` if it is at block `layer` or later."""
    rules = dict(                                        # keep the gate if this is true
        improves=lambda i, without, with_gate: with_gate < without,
        changes=lambda i, without, with_gate: abs(with_gate - without) / without > threshold,
        printed=lambda i, without, with_gate: with_gate > without,          # Eq. 5 to the letter
        from_layer=lambda i, without, with_gate: i >= layer)                # what Table 6 did
    if not model.gates:
        raise ValueError('the model has no gates')
    if rule not in rules:
        raise ValueError(f"rule is '{rule}'; it can be {', '.join(rules)}")
    if rule == 'from_layer' and layer not in range(1, model.config.n_layer):
        raise ValueError(f"rule 'from_layer' needs layer, from 1 to {model.config.n_layer - 1}: "
                         'the first block whose gate stays')

    def perplexity(h, targets):                          # (B,): one per sequence
        logits = F.linear(model.norm_f(h), model.head_weight).float()    # bfloat16 is too coarse
        nats = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1, reduction='none')
        return (nats.sum(1) / (targets >= 0).sum(1)).exp()

    perplexities = {int(i): [] for i in model.gates}     # layer: [(2, B), ...]
    was_training = model.training
    model.eval()
    try:
        for idx, targets in batches:
            scored = (targets >= 0).any(1)               # sequences with at least one target
            if not scored.any():
                continue
            targets = targets[scored]
            for i, (h, block_out, gate_out, _) in enumerate(model.states(idx[scored])):
                if gate_out is not None:
                    without = perplexity(block_out, targets)                    # Eq. 3
                    with_gate = perplexity(h, targets)                          # Eq. 4
                    perplexities[i].append(torch.stack((without, with_gate)))
    finally:
        model.train(was_training)
    table = GateTable()
    for i, pairs in perplexities.items():
        without, with_gate = torch.cat(pairs, 1).mean(1).tolist()
        keep = rules[rule](i, without, with_gate)
        table.append({'layer': i, 'without': without, 'with': with_gate, 'kept': keep})
    return rebuild(model, gate_layers=[row['layer'] for row in table if row['kept']]), table


class GateTable(list):
    """A dict per gate: its layer, the perplexities without and with it, whether it was kept."""
    def __str__(self):
        lines = ['gates     layer   without      with    change   (perplexity through the head)']
        for row in self:
            change = 100 * (row['with'] / row['without'] - 1)
            verdict = 'kept' if row['kept'] else 'removed'
            lines.append(f"          {row['layer']:5}{row['without']:10.4g}{row['with']:10.4g}"
                         f"{change:9.2f}%  {verdict}")
        return '\n'.join(lines)


# ---- The mixture it is compared with -------------------------------------------------------------

class Router(nn.Module):
    """Scores E experts per token -> weights (N, E), 0 for all but its best K; balance loss."""
    def __init__(self, d, n_expert, top_k):
        super().__init__()
        self.linear = nn.Linear(d, n_expert, bias=False)
        self.top_k = top_k

    def forward(self, x_ND):
        with torch.autocast(x_ND.device.type, enabled=False):   # in bfloat16 close scores would tie
            prob_NE = self.linear(x_ND.to(self.linear.weight.dtype)).softmax(-1)
        prob_NK, choice_NK = prob_NE.topk(self.top_k)
        chosen_NE = torch.zeros_like(prob_NE).scatter(1, choice_NK, 1.0)
        share_E = chosen_NE.mean(0) / self.top_k         # of all N*K picks, no gradient
        balance = prob_NE.size(1) * (share_E * prob_NE.mean(0)).sum()    # 1 if balanced, or K = E
        weight_NK = prob_NK / prob_NK.sum(-1, keepdim=True)              # they sum to 1
        return torch.zeros_like(prob_NE).scatter(1, choice_NK, weight_NK), balance


class Mixture(nn.Module):
    """E SwiGLU experts, of which each token takes K. All E are computed for all tokens; a weight of
    0 drops what was not chosen. In the paper's case, 2 of 2, this is fastest (docs/speed.md). With
    K < E the experts cost E/K times what the chosen ones alone would."""
    def __init__(self, d, hidden, n_expert, top_k):
        super().__init__()
        self.router = Router(d, n_expert, top_k)
        self.fc = nn.Parameter(torch.empty(n_expert, d, 2 * hidden))
        self.down = nn.Parameter(torch.empty(n_expert, hidden, d))

    def forward(self, x):
        x_ND = x.flatten(0, 1)
        weight_NE, balance = self.router(x_ND)
        gate_ENF, up_ENF = (x_ND @ self.fc).chunk(2, dim=-1)
        y_END = (F.silu(gate_ENF) * up_ENF) @ self.down
        y_ND = (weight_NE.T[:, :, None] * y_END).sum(0)  # weights as (E, N, 1)
        return y_ND.view_as(x), dict(balance=balance)


def upcycle(model, n=2, k=2):
    """Every FFN becomes n copies of itself, of which a token takes k, behind a random router."""
    if model.config.n_expert > 1:
        raise ValueError('the model is a mixture of experts already')
    new = rebuild(model, n_expert=n, top_k=k)
    with torch.no_grad():
        for block, old in zip(new.blocks, model.blocks):
            block.ffn.fc.copy_(old.ffn.fc.weight.T.expand(n, -1, -1))
            block.ffn.down.copy_(old.ffn.down.weight.T.expand(n, -1, -1))
    return new


# ---- Fast path: the same results, faster (docs/speed.md) -----------------------------------------

def head_loss(x, weight, targets, reduction):
    """Cross-entropy of the logits F.linear(x, weight): states x (B, T, D), head (V, D). On a GPU
    the vocabulary is padded to a multiple of 64: logits in rows of another length are slow to write
    and to read. The padding has a bias of -inf, so its probability is 0."""
    V = len(weight)
    extra = -V % 64 if x.is_cuda else 0
    bias = None
    if extra:
        weight = F.pad(weight, (0, 0, 0, extra))
        bias = F.pad(weight.new_zeros(V), (0, extra), value=-math.inf)
    logits = F.linear(x, weight, bias).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=reduction)
    return loss.view_as(targets) if reduction == 'none' else loss


surgeries = [add_gates, select_gates, upcycle]           # what tools/surgery.py offers
Config, Model = SelfMoEConfig, SelfMoE                   # what train.py looks for
