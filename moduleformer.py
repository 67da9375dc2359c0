"""
"ModuleFormer: Learning Modular Large Language Models From Uncurated Data" (Shen et al. 2023).

Every layer is two pools of modules, first attention, then FFN. In each pool a router chooses K
modules for each token, whose results are added up, weighted by gates:

    x = x + sum_k gate_k * Attention_k(norm(x))
    x = x + sum_k gate_k * FFN_k(norm(x))

An attention module has its own query and output maps. All modules of a layer share keys and values,
so a token can attend to every earlier token, whichever modules that token chose. Attention is
*stick-breaking*: of two keys that match equally well, the later one gets more weight. So the model
needs no positional embeddings, and it runs at any length.

What to look at first: `stick_weights`, `Router`, `Rows`, then `AttentionModules.forward`.

Departures that change results (docs/moduleformer.md has all of them, and what we measured):
- Eq. 3 has no scale. We divide z by sqrt(d), and a module has several heads, as in IBM's release.
- Eq. 6 is a mutual information, which the text wants large. We minimise its negative, Eq. 7: train
  with `loss + 0.01 * aux['mi']`. The weight is ours.
- Every loss is summed over all 2 * n_layer routers, and uses the softmax before Top-K.

Dimension letters (x_ND has shape N x D): B batch, T sequence, S keys (T and the cache's), N = B*T
tokens, D width, E modules of a pool, K chosen per token, P = N*K pairs, R rows (at most P), F inner
width (d_att, d_ffd), H heads of width d, Q tokens of a query block. Next to read: stlm.py.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
try:                            # in a copy of this file: import them from where you put the kernels
    from plumbing.stick_kernels import can_fuse, stick_breaking as fused     # for a GPU
except ImportError:             # no Triton, or no kernels: slower, the same results
    can_fuse = lambda q, k, v: False


@dataclass
class ModuleFormerConfig:
    vocab_size: int = 50295        # tokens the model knows, end-of-text included
    block_size: int = 512          # training window; the model itself runs at any length
    n_layer: int = 8               # blocks, each a pool of attention and a pool of FFN modules
    n_embd: int = 384              # D: width of the residual stream
    n_att: int | list = 8          # attention modules of a layer; a list if layers differ (pruned)
    d_att: int = 256               # width of an attention module
    n_head: int = 4                # heads of an attention module
    n_ffd: int | list = 16         # FFN modules of a layer; likewise
    d_ffd: int = 768               # hidden width of an FFN module
    top_k: int = 2                 # K: modules of each pool that a token takes
    d_router: int = 256            # hidden width of a router
    identity_kv: bool = False      # no maps for keys and values: both are norm(x) (section 3.2)
    new_att: int = 0               # attention modules that insert_experts has added to every layer
    new_ffd: int = 0               # FFN modules likewise
    released: bool = False         # as IBM's MoLM: bias and GELU in routers, kv bias, tanh GELU
    dropout: float = 0.0           # on embeddings and what pools add; helps with little text
    memory: int = 0                # in a stream: tokens of the text before that are still seen
    query_block: int = 128         # tokens whose attention is in memory at once, without kernels
    sparse: bool = True            # False: compute every module for every token, to compare

    def __post_init__(self):
        assert self.d_att % self.n_head == 0, 'd_att must be a multiple of n_head'
        fewest = min(self.per_layer(self.n_att) + self.per_layer(self.n_ffd))
        assert 1 <= self.top_k <= fewest, \
            f'top_k = {self.top_k} must lie between 1 and {fewest}, the fewest modules of a pool'
        assert not self.identity_kv or (self.d_att == self.n_embd and self.n_head == 1), \
            'identity_kv needs d_att = n_embd and a single head (n_head = 1)'

    def per_layer(self, number):
        return [number] * self.n_layer if isinstance(number, int) else list(number)


# ---- The idea: stick-breaking attention, and pools of modules to choose from ---------------------

def stick_weights(q, k, first):
    """Eq. 3 and 4. A query walks back from its own position t with a stick of length 1. Key i has
    the logit z_i, and breaks off the fraction sigmoid(z_i) of what later keys have left:

        p_i = sigmoid(z_i) * prod_{i<j<=t} (1 - sigmoid(z_j))

    In logarithms, log p_i = z_i + sum_{i<=j<=t} log sigmoid(-z_j), because 1 - sigmoid(z) is
    sigmoid(-z), and sigmoid(z) is exp(z) * sigmoid(-z). What remains of the stick attends to
    nothing, so the weights sum to at most 1. q (B, H, Q, K, d) has K queries for each of Q tokens,
    the first at position `first`; k (B, H, S, d) -> logits z and weights p, both (B, H, Q*K, S)."""
    Q, K, d = q.shape[2:]
    wide = torch.promote_types(q.dtype, torch.float32)   # bfloat16 is too coarse for long sums
    future = torch.ones(Q, k.size(2), dtype=torch.bool, device=q.device).triu(first + 1)
    z = (q.flatten(2, 3) @ k.transpose(2, 3)).to(wide) / math.sqrt(d)           # Eq. 3
    z = z.masked_fill(future.repeat_interleave(K, 0), -math.inf)                # sigmoid(z) = 0
    log_rest = F.logsigmoid(-z).flip(-1).cumsum(-1).flip(-1)    # log of what key i leaves
    return z, (z + log_rest).exp()                                              # Eq. 4


def stick_attend(q, k, v, first):
    """The sum of the values, weighted by `stick_weights`."""
    _, p = stick_weights(q, k.type_as(q), first)
    return (p.type_as(q) @ v.type_as(q)).view_as(q)


def break_stick(q, k, v, size):
    """`stick_attend` for `size` tokens at a time, each time without the keys after them. Backward
    computes the weights again, so only those of one piece are in memory at once."""
    if can_fuse(q, k, v):                                # the same in one kernel
        return fused(q, k, v)
    wide = torch.promote_types(k.dtype, torch.float32)
    k, v = k.to(wide), v.to(wide)                        # so that gradients add up in float32
    outputs = []
    end = k.size(2) - q.size(2)                          # keys before the first query
    for q_here in q.split(size, 2):
        first, end = end, end + q_here.size(2)
        seen = k[:, :, :end], v[:, :, :end]
        outputs.append(checkpoint(stick_attend, q_here, *seen, first, use_reentrant=False))
    return torch.cat(outputs, 2)


class Stack(nn.Module):
    """One matrix (or vector) per module of a pool. Those of inserted modules are a parameter of
    their own, so that the old ones can be frozen. (Weight decay moves what has zero gradients.)"""
    def __init__(self, n, n_new, *shape):
        super().__init__()
        self.n_modules = n + n_new
        self.weight = nn.Parameter(torch.empty(n, *shape))
        self.inserted = nn.Parameter(torch.empty(n_new, *shape)) if n_new else None

    def forward(self):
        return self.weight if self.inserted is None else torch.cat((self.weight, self.inserted))


class Router(nn.Module):
    """Scores h(x) = A ReLU(B x), a softmax over all modules of the pool, and its K largest (Eq. 1,
    2) -> gates (N, K), choices (N, K), losses by name. Gates are not renormalised. At K = 1 they
    would all be 1, and the language modelling loss could not train the router."""
    def __init__(self, d, n_choices, config, n_new=0):   # n_new of the n_choices are inserted
        super().__init__()
        self.config = config
        self.n_choices = n_choices
        self.B = nn.Linear(d, config.d_router, bias=config.released)
        self.A = Stack(n_choices - n_new, n_new, config.d_router)    # each module's embedding

    def forward(self, x_ND):
        score_NE = self.score(x_ND)
        choice_NK = self.choose(score_NE)
        gate_NK, losses = self.weigh(score_NE, choice_NK)
        return gate_NK, choice_NK, losses

    def score(self, x_ND):                              # h(x): how good is each module?
        with torch.autocast(x_ND.device.type, enabled=False):   # in bfloat16 close scores would tie
            activate = F.gelu if self.config.released else F.relu
            hidden = activate(self.B(x_ND.to(self.B.weight.dtype)))
            return F.linear(hidden, self.A())                   # Eq. 2; with inserted modules Eq. 9

    def choose(self, score_NE):                         # which K does a token take?
        prob_NE = score_NE.log_softmax(-1).exp()
        order_NE = prob_NE.argsort(descending=True, stable=True)    # the lower index wins a tie
        return order_NE[:, :self.config.top_k]

    def weigh(self, score_NE, choice_NK):               # with which gates?
        log_prob_NE = score_NE.log_softmax(-1)
        gate_NK = log_prob_NE.gather(1, choice_NK).exp()        # Eq. 1
        return gate_NK, self.losses(log_prob_NE)

    def losses(self, log_prob_NE):
        """`mi` is for pretraining: the pool uses all modules, but each token is sure of its own.
        `concentration` is for the time before pruning: the pool uses few. `rout_reg` is for
        inserted modules: it keeps their embeddings A' small, and so their scores."""
        prob_NE = log_prob_NE.exp()
        p_E = prob_NE.mean(0)                                                   # p(m)
        entropy = -(p_E * p_E.clamp(min=1e-9).log()).sum()                      # H(m); 0 log 0 is 0
        conditional = -(prob_NE * log_prob_NE.clamp(min=-100)).sum(-1).mean()   # H(m|x)
        losses = dict(mi=conditional - entropy, concentration=entropy)          # Eq. 7, Eq. 8
        if self.A.inserted is not None:
            losses['rout_reg'] = self.A.inserted.square().sum()                 # Eq. 10
        return losses


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

    def sort(self, x_NKD):                               # pairs (token, k) -> rows
        return x_NKD.flatten(0, 1)[self.pair]

    def restore(self, y_RD):                             # rows -> pairs; 0 if there is no row
        N, K = self.shape
        y_PD = y_RD.new_zeros(N * K, y_RD.size(1)).index_copy(0, self.pair, y_RD)
        return y_PD.view(N, K, -1)

    def combine(self, y_RD):                             # rows -> a token's gated sum
        y_RD = self.gate[:, None] * y_RD
        return y_RD.new_zeros(self.shape[0], y_RD.size(1)).index_add(0, self.token, y_RD)


class AttentionModules(nn.Module):
    """The pool of attention modules. Each has its own queries; all share keys and values."""
    def __init__(self, config, layer, router):           # router: a class, Router or your own
        super().__init__()
        self.config = c = config
        n = c.per_layer(c.n_att)[layer]
        self.router = router(c.n_embd, n + c.new_att, c, c.new_att)
        self.q = Stack(n, c.new_att, c.n_embd, c.d_att)
        self.o = Stack(n, c.new_att, c.d_att, c.n_embd)
        self.kv = None if c.identity_kv else nn.Linear(c.n_embd, 2 * c.d_att, bias=c.released)

    def forward(self, x, cache):
        x_ND = x.flatten(0, 1)
        gate_NK, choice_NK, losses = self.router(x_ND)
        rows = Rows(gate_NK, choice_NK, self.q.n_modules, self.config.sparse)
        q_NKF = rows.restore(rows.linear(rows.spread(x_ND), self.q()))
        q = q_NKF.unflatten(0, x.shape[:2]).unflatten(-1, (self.config.n_head, -1))
        q = q.permute(0, 3, 1, 2, 4)                            # (B, H, T, K, d)
        k, v = self.keys_and_values(x.to(q.dtype), cache)        # (B, H, S, d)
        y = break_stick(q, k, v, self.config.query_block)
        y_NKF = y.permute(0, 2, 3, 1, 4).reshape(q_NKF.shape)
        y_ND = rows.combine(rows.linear(rows.sort(y_NKF), self.o()))     # Eq. 5
        return y_ND.view_as(x), (k, v), losses

    def keys_and_values(self, x, cache):
        """-> keys and values, each (B, H, S, d): those that the cache holds, then those of x."""
        k, v = (x, x) if self.kv is None else self.kv(x).chunk(2, -1)
        k, v = (y.unflatten(-1, (self.config.n_head, -1)).transpose(1, 2) for y in (k, v))
        if cache:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        return k, v


class FFNModules(nn.Module):
    """The pool of FFN modules, D -> d_ffd -> D. No token is ever dropped."""
    def __init__(self, config, layer, router):
        super().__init__()
        self.config = config
        n = config.per_layer(config.n_ffd)[layer]
        self.router = router(config.n_embd, n + config.new_ffd, config, config.new_ffd)
        self.fc = Stack(n, config.new_ffd, config.n_embd, config.d_ffd)
        self.down = Stack(n, config.new_ffd, config.d_ffd, config.n_embd)

    def forward(self, x):
        x_ND = x.flatten(0, 1)
        gate_NK, choice_NK, losses = self.router(x_ND)
        rows = Rows(gate_NK, choice_NK, self.fc.n_modules, self.config.sparse)
        gelu = 'tanh' if self.config.released else 'none'
        h_RF = F.gelu(rows.linear(rows.spread(x_ND), self.fc()), approximate=gelu)
        y_ND = rows.combine(rows.linear(h_RF, self.down()))
        return y_ND.view_as(x), losses


# ---- The model -----------------------------------------------------------------------------------

class Block(nn.Module):
    """Both pools read the residual stream through a LayerNorm, and add to it."""
    def __init__(self, config, layer, router):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.att = AttentionModules(config, layer, router)
        self.ffd = FFNModules(config, layer, router)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cache):
        y, keys, att_losses = self.att(self.norm_1(x), cache)
        x = x + self.dropout(y)
        y, ffd_losses = self.ffd(self.norm_2(x))
        losses = [*att_losses.items(), *ffd_losses.items()]      # names repeat
        return x + self.dropout(y), keys, losses


class ModuleFormer(nn.Module):
    router = Router                                      # a class that an idea may replace
    gates_sum_to_1 = False                               # not renormalised; tools.check reads this

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c, i, self.router) for i in range(c.n_layer))
        self.norm_f = nn.LayerNorm(c.n_embd)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self):
        """1/sqrt(fan-in), less for maps that add to the residual stream; 0.02 for wte, head, A."""
        for name, p in self.named_parameters():
            part = name.split('.')[-2]                   # of blocks.0.att.q.weight: q
            if '.router.' in name and part not in ('A', 'B'):
                continue                         # a custom router initialises its own extra weights
            if name.endswith('bias'):
                nn.init.zeros_(p)
            elif part in ('q', 'fc', 'kv', 'B'):         # (E, in, out) or (out, in): size(1) is in
                nn.init.normal_(p, std=1 / math.sqrt(p.size(1)))
            elif part in ('o', 'down'):                  # these add, twice per layer
                nn.init.normal_(p, std=1 / math.sqrt(p.size(1) * 2 * self.config.n_layer))
            elif part in ('A', 'wte', 'head'):           # A: modules start nearly equal
                nn.init.normal_(p, std=0.02)

    def features(self, idx, cache=None):
        """(B, T) token ids, any T -> final-norm states (B, T, D), losses summed over routers.
        `cache`, the keys and values of each layer, is read and extended."""
        x = self.dropout(self.wte(idx))                  # (B, T, D)
        aux = {}
        for i, block in enumerate(self.blocks):
            x, keys, losses = block(x, cache[i] if cache and i < len(cache) else None)
            if cache is not None:
                if self.training:                        # copies, as a view would keep all of them
                    first = max(0, keys[0].size(2) - self.config.memory)
                    keys = [y[:, :, first:].detach().clone() for y in keys]
                cache[i:i + 1] = [keys]                  # replaces the layer's old entry, if any
            for name, loss in losses:
                aux[name] = aux.get(name, 0) + loss
        return self.norm_f(x), aux

    def logits(self, x):
        """Final-norm states (B, T, D) -> logits (B, T, vocab_size)."""
        return self.head(x)

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
        """Continue (B, T) prompts; call eval() first. There is no length limit: the cache grows."""
        cache, new = [], idx                             # new: what the cache does not hold yet
        for _ in range(max_new_tokens):
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
        """{pool, such as blocks.0.att: (B, T, E) gates, 0 if not chosen}. Call eval() first."""
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
        """Total, and active: what multiplies a token. The head counts, the embedding does not. A
        pool's router counts, and K of its modules, or as many as `taken` says, {pool: modules per
        token}. Adapters (tools/lora.py) count with their modules."""
        total = sum(p.numel() for p in self.parameters())
        idle = self.wte.weight.numel()
        for name, stack in self.named_modules():
            if isinstance(stack, Stack) and '.router.' not in name:   # a router is used whole
                size = sum(p.numel() for p in stack.parameters())
                used = taken.get(name.rpartition('.')[0], self.config.top_k)
                idle += size - round(size * used / stack.n_modules)
        return total, total - idle


# ---- Surgery: modules come and go ----------------------------------------------------------------

def insert_experts(model, n_att=1, n_ffd=1, router='full'):
    """Sections 4.3, 5.2: add random modules to every layer and freeze the rest. `partial`, for new
    data only, trains the new modules and their embeddings A'. `full`, for old and new data mixed,
    also trains A, B, the token embedding and the head (Table 4's 266M). At first the loss rises,
    because tokens choose untrained modules. Eq. 10 keeps their scores near 0, but 0 still beats
    negative scores of old modules."""
    assert router in ('full', 'partial'), f"router is '{router}'; it can be full or partial"
    if model.config.new_att or model.config.new_ffd:
        model = absorb_inserted(model)
    new = rebuild_with(model, model.state_dict(), new_att=n_att, new_ffd=n_ffd)
    for name, p in new.named_parameters():
        shared = '.router.' in name or name.startswith(('wte', 'head'))
        p.requires_grad_(name.endswith('.inserted') or (shared and router == 'full'))
    return new


def absorb_inserted(model):
    """The same function, with inserted modules counted among the old ones and nothing frozen."""
    c, weights = model.config, model.state_dict()
    for name in [name for name in weights if name.endswith('.inserted')]:
        old = name.replace('.inserted', '.weight')
        weights[old] = torch.cat((weights[old], weights.pop(name)))
    n_att = [n + c.new_att for n in c.per_layer(c.n_att)]
    n_ffd = [n + c.new_ffd for n in c.per_layer(c.n_ffd)]
    return rebuild_with(model, weights, n_att=n_att, n_ffd=n_ffd, new_att=0, new_ffd=0)


def rebuild_with(model, weights, kept=None, **changes):
    """A new model from the config with `changes` and these weights. Weights with a row per module
    keep the rows kept[pool] or, without `kept`, all rows and get random ones for new modules."""
    new = type(model)(replace(model.config, **changes)).to(model.wte.weight)
    state = new.state_dict()
    for name, old in weights.items():
        pool = '.'.join(name.split('.')[:3])             # blocks.0.att
        if old.shape != state[name].shape:               # it has a row per module
            old = old[kept[pool]] if kept else torch.cat((old, state[name][len(old):]))
        state[name] = old
    new.load_state_dict(state)
    return new.train(model.training)


def count_usage(model, batches):
    """{pool: (E,) tokens that took each module}; tokens with a target of -1 do not count."""
    was_training = model.training
    model.eval()
    usage = {}
    for idx, targets in batches:
        for pool, gate in model.routes(idx).items():
            usage[pool] = usage.get(pool, 0) + (gate != 0)[targets >= 0].sum(0)
    model.train(was_training)
    return usage


def prune_experts(model, usage=None, threshold=0.01, normalise='max', batches=None):
    """Sections 4.2 and 5.3: remove rarely used modules -> the model, and for each pool how many it
    had and has. A module goes if its count, divided by its pool's largest (`max`) or total (`sum`),
    is below the threshold, but the K most used always stay. count_usage gives `usage`, or counts
    `batches`, a list of (idx, targets). The gates of modules that stay grow, because the softmax
    has fewer terms. Nothing in the result is frozen."""
    assert normalise in ('max', 'sum'), f"normalise is '{normalise}'; it can be max or sum"
    assert usage or batches, 'prune_experts needs usage or batches'
    model = absorb_inserted(model)
    kept, table = {}, []
    sizes = dict(att=[], ffd=[])                         # modules that stay, layer by layer
    for pool, count in (usage or count_usage(model, batches)).items():    # blocks.0.att, ...
        frequency = count / (count.max() if normalise == 'max' else count.sum())
        frequency[frequency.topk(model.config.top_k).indices] = math.inf    # these always stay
        kept[pool] = (frequency >= threshold).nonzero().flatten()
        sizes[pool.rsplit('.', 1)[1]].append(len(kept[pool]))
        table.append(dict(layer=pool, before=len(count), after=len(kept[pool])))
    weights = model.state_dict()
    return rebuild_with(model, weights, kept, n_att=sizes['att'], n_ffd=sizes['ffd']), table


try:                            # the same results, faster on a GPU, while they are unedited
    from plumbing.rows import faster
    Rows = faster(Rows)
except ImportError:             # a copy of this file needs nothing else
    pass

surgeries = [insert_experts, absorb_inserted, prune_experts]     # what tools/surgery.py offers
Config, Model = ModuleFormerConfig, ModuleFormer         # what train.py looks for
