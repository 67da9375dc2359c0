"""
Conditional depth for Super Tiny Language Models (Guertler, Hillier et al. 2024, section 5.3): not
every token needs every layer. The paper names two methods; the config defaults to the first alone.

- Mixture of depths (Raposo et al. 2024). In every second layer a router gives each token a score r,
  and only the 12.5% of a window's tokens with the highest scores pass through the block:
      x + r * f(x)  if the token passes, else x
  f(x) is what the block adds; the factor r gives the router gradients. The other tokens skip the
  block, attention and FFN: there they cost nothing, and no token sees them.
- Early exit (LayerSkip, Elhoushi et al. 2024). Training drops layers, later ones more often, and
  adds a loss after earlier layers (exits), all through the same final norm and head. So the first
  layers alone make a fair guess. `generate(..., draft_layers=E)` drafts tokens with the first E
  layers, one at a time; the other layers then read all drafts at once and verify them. Greedy text
  is the same as without drafts, up to rounding, and sampled text has the same distribution.

What to look at first: `RoutedLayer`, then `STLMDepth.exit_loss` and `generate`.
Measured (two epochs of 39 MB of Simple English Wikipedia, three seeds): a plain model of 10 layers
has 1.518 bits per byte. With mixture of depths it has 1.520, for the FLOPs of a plain model of 6
layers, which has 1.525. With early exit: 1.514, for 44% more FLOPs in training
(docs/stlm_depth.md).

Causality. The top 12.5% of a window are known only at its end. So in training a later token can
change whether an earlier one passes (attention itself is causal). In evaluation and generation a
forecast decides instead: a linear map of the token's own state, trained to tell whether the token
is in the top. Train with `loss + 0.01 * aux['forecast']` (train.py: `aux_weights`). This trains the
forecast alone; without it no token passes in evaluation. `aux` has it in training only, and only if
a layer is routed.

Departures from the papers, and gaps they leave:
- Raposo et al. forecast with a small MLP, or with the router's own score. Ours is linear and reads
  the normalised state.
- Elhoushi et al. weight the loss at exit l by l(l+1)/2, and let the exits take turns, some at a
  time. Here each row of a batch draws one exit, with probability proportional to these weights. So
  the expected loss is the weighted mean over all exits, for the cost of one more head. With
  `aux_weights = dict(exit=1.0)` the exits together weigh as much as the last layer: at ten layers,
  that is their factor e_scale = 0.11.
- They also raise the rate of layer dropout over the run, and compute only the layers that stay. Our
  rate is constant, and a dropped layer is computed and then multiplied by 0.
- Rows of a batch may accept different numbers of drafts. All stop at the first that a row rejects.
- LayerSkip can also generate from an early exit without verification. Here every token is verified.

Dimension letters: B batch, T sequence, K tokens that pass, S keys, D width, d width of one head,
H heads, V vocabulary, L layers, E of them that draft.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class STLMDepthConfig:
    vocab_size: int = 50257        # tokens, end-of-text included
    block_size: int = 512          # longest context
    n_layer: int = 10
    n_head: int = 16               # query heads
    n_kv_head: int = 4             # key and value heads; n_head / n_kv_head query heads share one
    n_embd: int = 512              # width
    ffn_hidden: int = 1536         # hidden width of SwiGLU
    dropout: float = 0.1           # on embeddings, attention and both residual branches
    capacity: float = 0.125        # share of tokens that pass through a routed layer; 1: no routing
    route_every: int = 2           # 2: every second layer is routed (1, 3, 5, ... counted from 0)
    layer_dropout: float = 0.0     # how often the last layer is dropped; earlier ones less often
    exit_loss: bool = False        # in training, aux['exit'] is the loss at an earlier exit

    def __post_init__(self):
        assert self.n_embd % (2 * self.n_head) == 0, \
            f'a width of {self.n_embd} has no {self.n_head} heads of even width'
        assert self.n_head % self.n_kv_head == 0, 'n_head must be a multiple of n_kv_head'
        assert 0 < self.capacity <= 1, f'capacity = {self.capacity} is not a share of the tokens'
        assert self.route_every > 1, 'route_every must be 2 or more: all tokens pass layer 0'
        assert not self.exit_loss or self.n_layer > 2, 'exit_loss needs at least 3 layers'

    def is_routed(self, layer):
        return self.capacity < 1 and layer % self.route_every == self.route_every - 1


# ---- The first idea: mixture of depths -----------------------------------------------------------

NEVER = 2 ** 30                    # position of an empty slot: after any query, so no token sees it


class RoutedLayer(nn.Module):
    """A block that some tokens pass through, at their own positions, while the others skip it."""
    def __init__(self, config, layer):
        super().__init__()
        self.capacity = config.capacity
        self.layer = layer
        self.block = Block(config, layer)
        self.router = nn.Parameter(torch.empty(config.n_embd))
        self.forecast = nn.Parameter(torch.empty(config.n_embd))
        self.forecast_bias = nn.Parameter(torch.empty(1))

    def choose(self, x):
        """(B, T, D) -> index (B, K) of the tokens that pass, in order; filled (B, K), False where a
        row has fewer than K (an empty slot); score (B, T); in training, the loss and the hits of
        the forecasts. Example: if tokens 1 and 3 pass in one row, and token 2 in another, index is
        [[1, 3], [2, 0]] and filled is [[True, True], [True, False]]."""
        score = (x * self.router).sum(-1)                # no matrix product: autocast keeps float32
        state = F.rms_norm(x.detach(), x.shape[-1:])
        forecast = (state * self.forecast).sum(-1) + self.forecast_bias
        if self.training:
            K = max(1, round(self.capacity * x.size(1)))
            index = score.topk(K).indices.sort().values
            is_top = torch.zeros_like(score).scatter(1, index, 1.0)
            loss = F.binary_cross_entropy_with_logits(forecast, is_top)
            hits = ((forecast > 0) == (is_top > 0)).float().mean()
            aux = dict(forecast=loss, forecast_hits=hits)
            return index, torch.ones_like(index, dtype=torch.bool), score, aux
        passes = forecast > 0                            # each token decides by itself: causal
        K = int(passes.sum(1).max())
        index = passes.long().argsort(dim=1, descending=True, stable=True)[:, :K]  # they come first
        return index, passes.gather(1, index), score, {}

    def forward(self, x, position, turn, cache):
        """-> the update to add to x, who passes (B, T), auxiliary losses. For one row:
        update = zeros_like(x); update[index] = score[index] * block(x[index])"""
        index, filled, score, aux = self.choose(x)
        passes = torch.zeros_like(score).scatter(1, index, filled.type_as(score))
        if index.size(1) == 0:                           # nobody passes
            if cache is None or self.layer < len(cache):
                return torch.zeros_like(x), passes, aux
            index = index.new_zeros(len(x), 1)           # empty: layers append to the cache in turn
            filled = torch.zeros_like(index, dtype=torch.bool)
        cos, sin = turn                                  # of rotary angles, each (1, T, d/2)
        turn = cos[0, index], sin[0, index]              # (B, K, d/2)
        position = torch.where(filled, position[0, index], NEVER)
        index_BKD = index[..., None].expand(-1, -1, x.size(-1))
        y = self.block(x.gather(1, index_BKD), position, turn, cache)
        y = y * (score.gather(1, index) * filled)[..., None]
        update = torch.zeros_like(x).scatter_add(1, index_BKD, y.type_as(x))     # r * f(x), or 0
        return update, passes, aux


# ---- The LLaMA block -----------------------------------------------------------------------------

def rotary(position, d):
    """Positions (1, T) -> cosine and sine of their rotary angles, each (1, T, d/2)."""
    frequency = 10000.0 ** (-torch.arange(d // 2, device=position.device) * (2 / d))
    angle = position[..., None] * frequency
    unit = torch.polar(torch.ones_like(angle), angle)    # if compiled: one table, never inlined
    return torch.view_as_real(unit).unbind(-1)           # angle.cos(), angle.sin()


def rotate(x, turn):
    """Turn channels i and i + d/2 of (B, H, T, d) heads by the angles of their positions."""
    cos, sin = turn[0][:, None], turn[1][:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)


class Block(nn.Module):
    """RMSNorm, rotary grouped-query attention, RMSNorm, SwiGLU -> what they add to x, f(x)."""
    def __init__(self, config, layer):
        super().__init__()
        c, D = config, config.n_embd
        self.layer = layer
        self.d_head = D // c.n_head
        self.counts = (c.n_head, c.n_kv_head, c.n_kv_head)       # heads of queries, keys, values
        self.norm_1, self.norm_2 = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.qkv = nn.Linear(D, sum(self.counts) * self.d_head, bias=False)
        self.proj = nn.Linear(D, D, bias=False)
        self.fc = nn.Linear(D, 2 * c.ffn_hidden, bias=False)     # gate and up
        self.down = nn.Linear(c.ffn_hidden, D, bias=False)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, position, turn, cache):
        B, T, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(B, T, -1, self.d_head).transpose(1, 2)
        q, k, v = heads.split(self.counts, 1)            # (B, H, T, d); fewer heads in k, v
        y = self.attend(rotate(q, turn), rotate(k, turn), v, position, cache)
        attention = self.dropout(self.proj(y.transpose(1, 2).flatten(2)))
        gate, up = self.fc(self.norm_2(x + attention)).chunk(2, dim=-1)
        return attention + self.dropout(self.down(F.silu(gate) * up))

    def attend(self, q, k, v, position, cache):
        """Causal attention. A cache, a (k, v, position) per layer, is read and extended. No token
        sees empty slots: in a call they come last, and in a cache their position is after any
        query's."""
        mask = None
        if cache is not None:
            if self.layer < len(cache):
                old = cache[self.layer]
                k, v = torch.cat((old[0], k), 2), torch.cat((old[1], v), 2)
                seen = torch.cat((old[2], position), 1)
                cache[self.layer] = (k, v, seen)
            else:
                seen = position
                cache.append((k, v, seen))
            mask = (seen[:, None] <= position[:, :, None])[:, None]      # (B, 1, T, S)
        dropout = self.dropout.p if self.training else 0.0
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None,
            enable_gqa=q.size(1) > k.size(1))            # fewer heads in k, v


# ---- The model -----------------------------------------------------------------------------------

class STLMDepth(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)  # also the head
        kinds = [RoutedLayer if c.is_routed(i) else Block for i in range(c.n_layer)]
        self.layers = nn.ModuleList(kind(c, i) for i, kind in enumerate(kinds))
        self.norm_f = nn.RMSNorm(c.n_embd, eps=1e-6)
        self.dropout = nn.Dropout(c.dropout)
        self.init_weights()

    def init_weights(self):
        """Std 0.02 for matrices and routers, less where a matrix adds to the residual stream.
        Forecasts start at zero."""
        for name, p in self.named_parameters():
            if 'norm' in name:
                continue                                 # the gains are ones already
            std = 0.02
            if '.proj.' in name or '.down.' in name:     # these add, twice per layer
                std /= math.sqrt(2 * self.config.n_layer)
            if '.forecast' in name:
                std = 0.0
            nn.init.normal_(p, std=std)

    def run(self, x, layers, past, cache=None):
        """Run these layers (a range) on (B, T, D) tokens that follow `past` others -> the states
        after each of these layers; auxiliary losses; {routed layer: who passes (B, T)}."""
        position = torch.arange(past, past + x.size(1), device=x.device)[None]
        turn = rotary(position, self.config.n_embd // self.config.n_head)
        states = []
        losses = []
        passed = {}
        for i in layers:
            if self.config.is_routed(i):
                update, passed[i], layer_losses = self.layers[i](x, position, turn, cache)
                losses.append(layer_losses)
            else:
                update = self.layers[i](x, position, turn, cache)
            if self.training and self.drop_rate(i) > 0:
                stays = torch.rand(len(x), 1, 1, device=x.device) >= self.drop_rate(i)
                update = update * stays                  # drops rows; no scaling, as in LayerSkip
            x = x + update
            states.append(x)
        return states, mean_of(losses), passed

    def read(self, idx, cache=None):
        """(B, T) ids -> the states after each layer, auxiliary losses, who passes."""
        past = cache[0][0].size(2) if cache else 0
        length = past + idx.size(1)
        if length > self.config.block_size:
            raise ValueError(
                f'{length} tokens are more than the block_size of {self.config.block_size}')
        return self.run(self.dropout(self.wte(idx)), range(self.config.n_layer), past, cache)

    def features(self, idx, cache=None):
        """(B, T) ids -> final-norm states (B, T, D), auxiliary losses."""
        states, aux, _ = self.read(idx, cache)
        return self.norm_f(states[-1]), aux

    def exit_logits(self, state):
        """Logits from the states after any layer: all exits have the same norm and head."""
        return F.linear(self.norm_f(state), self.wte.weight)

    def forward(self, idx, targets=None, cache=None, reduction='mean'):
        """-> logits, None, aux; with targets (-1: ignored) None, loss, aux. Extends a cache."""
        states, aux, _ = self.read(idx, cache)
        if targets is None:
            return self.exit_logits(states[-1]), None, aux
        loss = head_loss(self.norm_f(states[-1]), self.wte.weight, targets, reduction)
        if self.training and self.config.exit_loss:
            aux['exit'] = self.exit_loss(states, targets)
        return None, loss, aux

    # ---- The second idea: early exit ----

    def drop_rate(self, layer):
        """layer_dropout * (2^(l / (L-1)) - 1): 0 in the first layer, layer_dropout in the last."""
        depth = layer / max(1, self.config.n_layer - 1)
        return self.config.layer_dropout * (2 ** depth - 1)

    def exit_loss(self, states, targets):
        """The loss at an earlier exit. Each row of the batch draws its own: after layer l, counted
        from 0, with a probability in proportion to l(l+1). So never after the first layer."""
        depth = torch.arange(self.config.n_layer - 1, device=targets.device)
        exits = torch.multinomial((depth * (depth + 1)).float(), len(targets), replacement=True)
        rows = torch.arange(len(targets), device=targets.device)
        state = torch.stack(states[:-1])[exits, rows]    # (B, T, D)
        return head_loss(self.norm_f(state), self.wte.weight, targets, 'mean')

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, draft_layers=0, n_draft=4):
        """Continue (B, T) prompts; call eval() first. A full cache restarts from its newer half.
        The first draft_layers layers draft up to n_draft tokens, and the others verify them."""
        L, limit = self.config.n_layer, self.config.block_size
        if not 0 <= draft_layers < L or n_draft < 1:
            raise ValueError(f'draft_layers = {draft_layers} must be at least 0 and less than {L}, '
                             f'n_draft = {n_draft} at least 1')
        end = idx.size(1) + max_new_tokens
        begin = max(0, idx.size(1) - limit)              # where in the text the cache begins
        cache = []
        while idx.size(1) < end:
            if idx.size(1) - begin > limit:
                cache = []
                begin = idx.size(1) - max(1, limit // 2)
            past = cache[0][0].size(2) if cache else 0
            room = min(limit - (idx.size(1) - begin), end - idx.size(1) - 1)  # verifying adds one
            n = min(n_draft, room) if draft_layers else 0

            # draft: the first layers read the new text, then one draft after the other
            drafts, draft_probs, states = [], [], []
            new = idx[:, begin + past:]
            n_read = past                                # tokens that the first layers have read
            for i in range(n + 1):                       # the last draft is read as well
                state = self.wte(new)
                if draft_layers:
                    state = self.run(state, range(draft_layers), n_read, cache)[0][-1]
                states.append(state)
                n_read += new.size(1)
                if i < n:
                    logits = self.exit_logits(state[:, -1])
                    draft_probs.append(probabilities(logits, temperature, top_k))
                    new = torch.multinomial(draft_probs[-1], 1)
                    drafts.append(new)

            # verify: the other layers read all of this at once
            state = self.run(torch.cat(states, 1), range(draft_layers, L), past, cache)[0][-1]
            logits = self.exit_logits(state[:, -n - 1:])     # (B, n + 1, V)
            p = probabilities(logits, temperature, top_k)
            idx = torch.cat((idx, *accept(p, drafts, draft_probs)), 1)
            self.forget(cache, idx.size(1) - begin - 1)  # the newest token is not yet read
        return idx

    def forget(self, cache, length):
        """Drop all but the first `length` tokens. Routed layers, where rows differ, hide them."""
        for i, (k, v, position) in enumerate(cache):
            if self.config.is_routed(i):
                cache[i] = (k, v, position.masked_fill(position >= length, NEVER))
            else:
                cache[i] = (k[:, :, :length], v[:, :, :length], position[:, :length])

    @torch.no_grad()
    def routes(self, idx):
        """{layer: (B, T, 2)}: 1 and 0 where a token passes through the block, 0 and 1 where it
        skips it. Not the scores, which may be negative. Call eval() first."""
        _, _, passed = self.read(idx)
        return {f'layers.{i}': torch.stack((p, 1 - p), -1) for i, p in passed.items()}

    def count_params(self):
        """Total, and active: what multiplies a token on average."""
        total = active = sum(p.numel() for p in self.parameters())
        for i, layer in enumerate(self.layers):
            if self.config.is_routed(i):
                block = sum(p.numel() for p in layer.block.parameters())
                active -= round((1 - self.config.capacity) * block)
        return total, active


def mean_of(losses):
    """[{name: value}, ...] of the routed layers -> {name: mean value}."""
    names = losses[0] if losses else {}
    return {name: torch.stack([layer[name] for layer in losses]).mean() for name in names}


def probabilities(logits, temperature, top_k):
    """Of the next token. At temperature 0 (or below): 1 for the best token, 0 for the others."""
    logits = logits.float()
    if temperature <= 0:
        return F.one_hot(logits.argmax(-1), logits.size(-1)).float()
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    return (logits / temperature).softmax(-1)


def accept(p, drafts, draft_probs):
    """Speculative sampling (Leviathan et al. 2023) -> the drafts that stay and one token after
    them, each (B, 1). p (B, n + 1, V): probabilities by all layers; q (B, V): by those that draft.
    A draft x stays with probability min(1, p(x) / q(x)). The first that does not is drawn again, in
    proportion to max(0, p - q). So every token has the distribution p."""
    accepted = []
    for i, (x, q) in enumerate(zip(drafts, draft_probs)):
        ratio = p[:, i].gather(1, x) / q.gather(1, x)
        rest = (p[:, i] - q).clamp(min=0)
        same = rest.sum(1, keepdim=True) == 0            # p = q: nothing to draw again from
        stays = (torch.rand_like(ratio) < ratio) | same  # (B, 1)
        if not stays.all():                              # rows whose draft stays keep it
            rest = torch.where(stays, p[:, i], rest)     # multinomial refuses a row of zeros
            return [*accepted, torch.where(stays, x, torch.multinomial(rest, 1))]
        accepted.append(x)
    return [*accepted, torch.multinomial(p[:, -1], 1)]


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


Config, Model = STLMDepthConfig, STLMDepth               # what train.py looks for
