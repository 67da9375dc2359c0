"""
Conditional depth for Super Tiny Language Models (Guertler, Hillier et al. 2024, section 5.3): not
every token needs every layer. The paper names two methods; the config defaults to the first alone.

- Mixture of depths (Raposo et al. 2024). In every second layer a router gives each token a score r,
  and only the 12.5% of a window's tokens with the highest scores pass through the block:
      x + r * f(x)  if the token passes, else x
  f(x) is what the block adds, and the factor r gives the router its gradient. The other tokens skip
  the block, attention and FFN: in training they cost nothing there, and no token sees them.
- Early exit (LayerSkip, Elhoushi et al. 2024). Training drops layers, later ones more often, and
  adds a loss after earlier layers (exits), all through the same final norm and head. So the first
  layers alone make a fair guess. `generate(..., draft_layers=E)` drafts tokens with the first E
  layers, one at a time; the other layers then read all drafts at once and verify them. Greedy text
  is the same as without drafts, up to rounding, and sampled text has the same distribution.

What to look at first: `RoutedLayer`, then `draft`, `accept` and `STLMDepth.generate`.

Departures that change results (docs/stlm_depth.md has all of them, and what we measured):
- Train with `loss + 0.01 * aux['forecast']`, or no token passes in evaluation (see `RoutedLayer`).
- Each row of a batch draws one exit. `aux_weights = dict(exit=1.0)` is LayerSkip's e_scale = 0.11
  at ten layers.
- The rate of layer dropout is constant. A dropped layer is computed and then multiplied by 0.

Dimension letters: B batch, T sequence, K tokens that pass, S keys, D width, d width of one head, H
heads, V vocabulary, L layers, E that draft, n drafts. This is the last file; the first is moep.py.
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

NEVER = math.inf                   # the position of a token that skips: no query sees that far


class RoutedLayer(nn.Module):
    """A block that some tokens pass through, at their own positions, while the others skip it.

    Which tokens are a window's top is known only at its end. So in training a later token can
    change whether an earlier one passes, although attention is causal. In evaluation each token
    decides by itself: it passes if a forecast, a linear map of its state, says that it would be
    among the top. The forecast has a loss of its own, which trains nothing else."""
    def __init__(self, config, layer):
        super().__init__()
        self.capacity = config.capacity
        self.block = Block(config, layer)
        self.router = nn.Parameter(0.02 * torch.randn(config.n_embd))
        self.forecast = nn.Parameter(torch.zeros(config.n_embd))
        self.forecast_bias = nn.Parameter(torch.zeros(1))

    def forward(self, x, position, table, cache):
        """-> r * f(x), or 0 for tokens that skip; who passes, 1 or 0 (B, T); losses by name"""
        score = (x * self.router).sum(-1)                # r. Autocast would round a matrix product
        state = F.rms_norm(x.detach(), x.shape[-1:])
        forecast = (state * self.forecast).sum(-1) + self.forecast_bias      # (B, T)
        if not self.training:                            # all are computed: this saves nothing
            passes = (forecast > 0).type_as(x)
            position = torch.where(passes > 0, position, NEVER)
            y = self.block(x, position, table, cache)
            return y * (score * passes)[..., None], passes, {}

        index, passes, losses = self.choose(score, forecast)
        index_BKD = index[..., None].expand(-1, -1, x.size(-1))
        position = position[0, index]                    # (B, K)
        table = [angle[0, index][:, None] for angle in table]    # cosine and sine, (B, 1, K, d)
        y = self.block(x.gather(1, index_BKD), position, table, cache)       # only what passes
        y = y * score.gather(1, index)[..., None]
        update = torch.zeros_like(x).scatter(1, index_BKD, y.type_as(x))
        return update, passes, losses

    def choose(self, score, forecast):
        """The K highest scores (B, T) of each row -> their index (B, K) in order, e.g. [[1, 3]];
        who passes, [[0, 1, 0, 1]]; the forecasts' loss, and how often they are right."""
        K = max(1, round(self.capacity * score.size(1)))
        best = score.argsort(descending=True, stable=True)[:, :K]    # topk breaks ties by device
        index = best.sort().values
        passes = torch.zeros_like(score).scatter(1, index, 1.0)
        loss = F.binary_cross_entropy_with_logits(forecast, passes)
        hits = ((forecast > 0) == (passes > 0)).float().mean()
        return index, passes, dict(forecast=loss, forecast_hits=hits)


# ---- The second idea: early exit, and drafts that the other layers verify ------------------------

def drop_rate(config, layer):
    """layer_dropout * (2^(l / (L-1)) - 1): 0 in the first layer, layer_dropout in the last."""
    depth = layer / max(1, config.n_layer - 1)
    return config.layer_dropout * (2 ** depth - 1)


def draw_exits(states):
    """The states (B, T, D) after each layer -> those after one layer, which each row draws for
    itself: layer l, counted from 0, with probability proportional to l(l+1), never the first or the
    last. So the expected loss at this exit is LayerSkip's weighted mean over all exits."""
    depth = torch.arange(len(states) - 1, device=states[0].device)
    rows = torch.arange(len(states[0]), device=states[0].device)
    exits = torch.multinomial((depth * (depth + 1)).float(), len(rows), replacement=True)
    return torch.stack(states[:-1])[exits, rows]


def draft(model, new, cache, E, n, predict):
    """The first E layers read tokens (B, t) that are new to the cache, then draw and read n drafts,
    one by one -> the drafts, each (B, 1); their distributions, each (B, V); the states after these
    layers (B, t + n, D). The last draft is read, too, because the other layers predict the token
    after it from its state."""
    def early_state(tokens):                             # extends the cache of these layers
        past = cache[0][0].size(2) if cache else 0
        x = model.wte(tokens)
        return model.run(x, range(E), past, cache)[0][-1] if E else x

    drafts, draft_probs, states = [], [], [early_state(new)]
    for _ in range(n):
        draft_probs.append(predict(states[-1][:, -1]))
        drafts.append(torch.multinomial(draft_probs[-1], 1))
        states.append(early_state(drafts[-1]))
    return drafts, draft_probs, torch.cat(states, 1)


def verify(model, state, past, cache, E, n, predict):
    """The other layers read all these states at once -> their distributions p (B, n + 1, V) for the
    n drafts and for one token after them."""
    states, _, _ = model.run(state, range(E, model.config.n_layer), past, cache)
    return predict(states[-1][:, -n - 1:])


def accept(p, drafts, draft_probs):
    """Speculative sampling (Leviathan et al. 2023) -> the drafts that stay and one token after
    them, each (B, 1). p (B, n + 1, V) are the probabilities by all layers, q (B, V) those by the
    layers that draft. A draft x stays with probability min(1, p(x) / q(x)). The first that does not
    stay is drawn again, in proportion to max(0, p - q). So every token has the distribution p. All
    rows stop at the first draft that any row rejects."""
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


def probabilities(logits, temperature, top_k):
    """Return the next token's probabilities. At temperature 0 the best one has 1, others 0."""
    logits = logits.float()
    if temperature <= 0:
        return F.one_hot(logits.argmax(-1), logits.size(-1)).float()
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    return (logits / temperature).softmax(-1)


# ---- The LLaMA block -----------------------------------------------------------------------------

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


class Block(nn.Module):
    """RMSNorm, rotary grouped-query attention, RMSNorm, SwiGLU -> what they add to x, f(x)."""
    def __init__(self, config, layer):
        super().__init__()
        c, D = config, config.n_embd
        small = 0.02 / math.sqrt(2 * c.n_layer)          # these add to the stream, twice per layer
        self.layer = layer
        self.d_head = D // c.n_head
        self.counts = (c.n_head, c.n_kv_head, c.n_kv_head)       # heads of queries, keys, values
        self.norm_1, self.norm_2 = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.qkv = linear(D, sum(self.counts) * self.d_head)
        self.proj = linear(D, D, small)
        self.fc = linear(D, 2 * c.ffn_hidden)            # gate and up
        self.down = linear(c.ffn_hidden, D, small)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, position, table, cache):
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.d_head)).transpose(1, 2)
        q, k, v = heads.split(self.counts, 1)            # (B, H, T, d); fewer heads in k, v
        y = self.attend(rotate(q, table), rotate(k, table), v, position, cache)
        attention = self.dropout(self.proj(y.transpose(1, 2).flatten(2)))
        gate, up = self.fc(self.norm_2(x + attention)).chunk(2, dim=-1)
        return attention + self.dropout(self.down(F.silu(gate) * up))

    def attend(self, q, k, v, position, cache):
        """A query sees keys at its own and earlier positions (1 or B, T). A query at NEVER sees
        all, but its result is not used. `cache`, a (k, v, position) per layer, is read and
        extended."""
        key_at = position                                # where the keys stand
        if cache is not None:
            if self.layer < len(cache):
                old_k, old_v, old_at = cache[self.layer]
                k, v = torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)
                key_at = torch.cat((old_at, key_at), 1)
                cache[self.layer] = (k, v, key_at)
            else:
                cache.append((k, v, key_at))
        causal = self.training and cache is None         # all that pass are here, in order
        mask = None if causal else (key_at[:, None] <= position[..., None])[:, None]  # (B, 1, T, S)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal,
            dropout_p=self.dropout.p if self.training else 0.0,
            enable_gqa=q.size(1) > k.size(1))            # fewer heads in k, v


# ---- The model -----------------------------------------------------------------------------------

class STLMDepth(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)  # also the head
        nn.init.normal_(self.wte.weight, std=0.02)
        kinds = [RoutedLayer if c.is_routed(i) else Block for i in range(c.n_layer)]
        self.layers = nn.ModuleList(kind(c, i) for i, kind in enumerate(kinds))
        self.norm_f = nn.RMSNorm(c.n_embd, eps=1e-6)
        self.dropout = nn.Dropout(c.dropout)

    def run(self, x, layers, past, cache=None):
        """Run these layers (a range) on (B, T, D) tokens that follow `past` others -> the states
        after each of these layers; losses by name; {routed layer: who passes (B, T)}."""
        c = self.config
        wide = torch.promote_types(x.dtype, torch.float32)
        position = torch.arange(past, past + x.size(1), device=x.device, dtype=wide)[None]
        table = rotary(position, c.n_embd // c.n_head)   # cosine and sine, each (1, T, d)
        states = []
        losses = []
        passed = {}
        for i in layers:
            if c.is_routed(i):
                update, passed[i], layer_losses = self.layers[i](x, position, table, cache)
                losses.append(layer_losses)
            else:
                update = self.layers[i](x, position, table, cache)
            if self.training and drop_rate(c, i) > 0:
                stays = torch.rand(len(x), 1, 1, device=x.device) >= drop_rate(c, i)
                update = update * stays                  # drops rows; no scaling, as in LayerSkip
            x = x + update
            states.append(x)
        names = losses[0] if losses else {}
        aux = {name: torch.stack([layer[name] for layer in losses]).mean() for name in names}
        return states, aux, passed

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
        logits = self.exit_logits(states[-1])
        if targets is None:
            return logits, None, aux
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                               reduction=reduction)
        loss = loss.view_as(targets) if reduction == 'none' else loss
        if self.training and self.config.exit_loss:
            early = self.exit_logits(draw_exits(states))
            aux['exit'] = F.cross_entropy(early.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return None, loss, aux

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, draft_layers=0, n_draft=4):
        """Continue (B, T) prompts; call eval() first. A full cache restarts from its newer half.
        The first draft_layers layers draft up to n_draft tokens, and the others verify them."""
        E, L, limit = draft_layers, self.config.n_layer, self.config.block_size
        if not 0 <= E < L or n_draft < 1:
            raise ValueError(f'draft_layers = {E} must be at least 0 and less than {L}, '
                             f'n_draft = {n_draft} at least 1')

        def predict(state):
            return probabilities(self.exit_logits(state), temperature, top_k)
        end = idx.size(1) + max_new_tokens
        begin = max(0, idx.size(1) - limit)              # where in the text the cache begins
        cache = []
        while idx.size(1) < end:
            if idx.size(1) - begin > limit:
                cache = []
                begin = idx.size(1) - max(1, limit // 2)
            past = cache[0][0].size(2) if cache else 0
            room = min(limit - (idx.size(1) - begin), end - idx.size(1) - 1)  # verifying adds one
            n = min(n_draft, room) if E else 0
            drafts, q, state = draft(self, idx[:, begin + past:], cache, E, n, predict)
            p = verify(self, state, past, cache, E, n, predict)
            idx = torch.cat((idx, *accept(p, drafts, q)), 1)
            n_read = idx.size(1) - begin - 1             # the newest token is not read yet
            cache = [(k[:, :, :n_read], v[:, :, :n_read], position[:, :n_read])
                     for k, v, position in cache]        # forgets the drafts that did not stay
        return idx

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


Config, Model = STLMDepthConfig, STLMDepth               # what train.py looks for
