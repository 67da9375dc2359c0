"""
Train any model of this repository: one plain loop.

    python train.py config/moep.py                       # the toy corpus, minutes on a laptop
    python train.py config/moep.py --n_block=8 --out_dir=out/p8  # any setting of training or model
    python train.py config/moep.py --resume              # go on after a kill: on a CPU, bit for bit
    python train.py config/moep.py --max_iters=0         # print sizes and plan, train nothing
    python train.py config/moep.py --seeds=1,2,3         # three runs; then python -m tools.compare
    torchrun --nproc_per_node=2 train.py config/moep.py  # several processes (large models: --shard)

A config is a Python file of assignments, and `--key=value` overrides it. A key belongs to
`Settings` (plumbing/settings.py) or to the model's own Config. The model is the file that `model`
names; it ends with `Config, Model = ...`, and docs/extending.md lists its methods.

A run's folder holds ckpt.pt (everything needed to resume), ckpt_<words>.pt (weights at given word
counts, to score or start from), log.jsonl (a JSON object per line) and a copy of the tokenizer.
"""

import functools
import inspect
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from plumbing.checkpoint import (build_model, changed_sources, context_limit, find_surgery,
                                 read_checkpoint)
from plumbing.cli import UserError, human, lock, new_file, reading, run_main
from plumbing.machine import CUDAGraphStep, Machine, compile_model
from plumbing.muon import Muon, split_groups
from plumbing.report import describe, show_plan, show_sample
from plumbing.settings import make_config, model_sources, read_settings
from plumbing.shard import full_state, load_optimizer, recompute_blocks, shard, sync_gradients
from plumbing.tokenizer import copy_tokenizer, load_meta, load_tokenizer


# ---- Data: windows of token bins ----------------------------------------------------------------

class Data:
    """The training tokens of all data sets end to end, and the order in which windows are read. A
    window never crosses from one set into another. The order is a function of (seed, epoch); only
    the place in it is state. With `stream` the windows stay in the order of the text, and row r of
    the batch reads the r-th part of it."""

    def __init__(self, s, machine):
        self.s, self.machine = s, machine
        # {name: (from, to[, passes])}: which part of each text, and how often an epoch reads it
        names = dict.fromkeys(s.data.split(','), (0.0, 1.0)) if isinstance(s.data, str) else s.data
        self.scored = s.eval_data.split(',') if isinstance(s.eval_data, str) else s.eval_data
        self.scored = self.scored or list(names)         # the data sets whose val.bin is scored
        make_toys([*names, *self.scored], s, machine)
        self.folders = {name: Path(s.data_dir, name) for name in [*names, *self.scored]}
        metas = {name: load_meta(folder) for name, folder in self.folders.items()}
        self.folder = self.folders[next(iter(names))]
        self.tokenizer = load_tokenizer(self.folder)
        for name, meta in metas.items():
            if meta['tokenizer']['hash'] != self.tokenizer.hash:
                raise UserError(f'{self.folder.name} and {name} have different tokenizers: prepare '
                                f'{name} again with --tokenizer {self.folder}')
        self.slots = len(self.tokenizer.end)             # ids per unit: 1, or those of a byte chunk
        self.pad = self.tokenizer.pad                    # never a target
        self.noun = 'tokens' if self.slots == 1 else 'slots'
        self.token_lengths = torch.tensor([len(b) for b in self.tokenizer.token_bytes])
        self.val = {name: as_tensor(load_bin(folder, 'val'), machine.device)
                    for name, folder in self.folders.items()}
        if s.stream and len(names) > 1:
            raise UserError('a stream reads one data set')

        self.sets = {}                                   # (begin, end, passes, words per token)
        bins, begin = [], 0
        for name, (low, high, *passes) in names.items():
            tokens = load_bin(self.folders[name], 'train')
            if not 0 <= low < high <= 1:
                raise UserError(f'data: {name} is read from {low} to {high}; 0 <= from < to <= 1')
            ends = np.flatnonzero(tokens == self.tokenizer.eot) + self.slots
            cuts = np.concatenate(([0], ends, [len(tokens)]))    # ranges end where documents do
            first, last = cuts[np.searchsorted(cuts, (low * len(tokens), high * len(tokens)))]
            bins.append(tokens[first:last])
            count = metas[name]['splits']['train']
            end = begin + len(bins[-1])
            self.sets[name] = (begin, end, *(passes or [1.0]), count['words'] / count['tokens'])
            begin = end
        self.tokens = as_tensor(np.concatenate(bins), machine.device)

    def start(self, seq_len):
        """From here on, windows have this length."""
        s = self.s
        self.T, self.stride = seq_len, s.stride or seq_len
        self.rows = s.batch_size * s.gradient_accumulation_steps * self.machine.world  # of a step
        if self.T % self.slots or self.stride % self.slots:
            raise UserError(f'seq_len and stride must be multiples of a chunk: {self.slots} slots')
        self.epoch = self.position = self.seen = 0       # seen: windows so far
        self.words = 0.0
        self.starts = self.order(0)
        if len(self.starts) < self.rows:
            raise UserError(f'an epoch of {len(self.starts)} windows is less than one step of '
                            f'{self.rows}: lower batch_size')

    def order(self, epoch):
        """Where an epoch's windows start. Every epoch is cut at another offset, then shuffled."""
        rng = np.random.default_rng([self.s.seed, epoch])
        parts = []
        for name, (begin, end, passes, _) in self.sets.items():
            if end - begin < self.T + self.stride:       # the offset may take away stride - 1
                raise UserError(f'{name}: {end - begin} {self.noun} are too few for seq_len and '
                                f'stride ({self.T} and {self.stride}): add text, or lower seq_len')
            while passes > 0:                            # 2.5 passes: two full ones and half of one
                offset = rng.integers(self.stride // self.slots) * self.slots
                windows = np.arange(begin + offset, end - self.T, self.stride)
                if not self.s.stream:                    # so that half of a pass is a random half
                    windows = rng.permutation(windows)
                parts.append(windows[:math.ceil(len(windows) * min(passes, 1.0))])
                passes -= 1
        if self.s.stream:                                # row r of each batch: the r-th part
            steps = [len(windows) // self.rows for windows in parts]
            parts = [windows[:n * self.rows].reshape(self.rows, n).T.flatten()
                     for n, windows in zip(steps, parts)]
            return np.concatenate(parts)
        starts = rng.permutation(np.concatenate(parts))
        if self.s.epoch_words:
            words = self.words_in(starts).cumsum()
            starts = starts[:np.searchsorted(words, self.s.epoch_words) + 1]
        return starts

    def words_in(self, starts):
        """Words per window, at its data set's mean number of words per token."""
        begins, _, _, density = map(np.array, zip(*self.sets.values()))
        return density[np.searchsorted(begins, starts, 'right') - 1] * self.T

    def steps(self):
        """How many steps all epochs have."""
        epochs = math.ceil(self.s.epochs)
        lengths = [len(self.order(epoch)) for epoch in range(epochs)]
        windows = sum(lengths) - round((epochs - self.s.epochs) * lengths[-1])
        return max(1, windows // self.rows)

    def next_starts(self):
        """The starts of the next step's windows. A step may run on into the next epoch."""
        taken, n = [], self.rows
        while n > 0:
            if self.position >= len(self.starts):
                self.epoch, self.position = self.epoch + 1, 0
                self.starts = self.order(self.epoch)
            taken.append(self.starts[self.position:self.position + n])
            self.position += len(taken[-1])
            n -= len(taken[-1])
        taken = np.concatenate(taken)
        self.seen += len(taken)
        self.words += float(self.words_in(taken).sum())
        return torch.from_numpy(taken).to(self.tokens.device)

    def batch(self, starts):
        """-> x, y of (B, T): y is x shifted by one, with -1 where nothing is to be predicted."""
        positions = starts[:, None] + torch.arange(self.T + 1, device=starts.device)
        window = tokens_at(self.tokens, positions)
        x, y = window[:, :-1].contiguous(), window[:, 1:]
        return x, y.masked_fill(y == self.pad, -1)

    def place(self):
        """What a resumed run needs to read on where it stopped."""
        return dict(epoch=self.epoch, position=self.position, seen=self.seen, words=self.words,
                    size=len(self.tokens))

    def go_to(self, place):
        if place['size'] != len(self.tokens):
            raise UserError('the text has changed since the run began: start a new one, with '
                            '--out_dir and --init_from')
        self.epoch, self.position = place['epoch'], place['position']
        self.seen, self.words = place['seen'], place['words']
        self.starts = self.order(self.epoch)


def make_toys(names, s, machine):
    """A run that asks for a toy corpus gets it."""
    if machine.rank == 0 and any(not Path(s.data_dir, name).exists() for name in names):
        from prepare import make_missing_toys
        make_missing_toys(names, s.data_dir)
    machine.gather(None)                                 # all processes wait for it


def load_bin(folder, split):
    """A split's token ids, as a read-only memory map."""
    path = Path(folder) / f'{split}.bin'
    with reading(path):
        return np.memmap(path, load_meta(folder).get('dtype', 'uint16'), 'r')


def as_tensor(tokens, device):
    """Unsigned ids as a signed tensor of the same bits, which every device can index."""
    signed = np.int16 if tokens.itemsize == 2 else np.int32
    return torch.from_numpy(np.asarray(tokens).view(signed).copy()).to(device)


def tokens_at(tokens, positions):
    return tokens[positions].long() & (256 ** tokens.element_size() - 1)


# ---- Evaluation ---------------------------------------------------------------------------------

def val_batches(tokens, seq_len, batch_size, pad, eval_tokens=None, rank=0, world=1):
    """Windows of seq_len targets that cover every token but the first exactly once, or the first
    eval_tokens; this process's share of them."""
    device = tokens.device
    seq_len = min(seq_len, len(tokens))
    starts = torch.arange(0, len(tokens) - 1, seq_len, device=device)
    if eval_tokens:
        starts = starts[:max(1, eval_tokens // seq_len)]
    starts = F.pad(starts, (0, -len(starts) % world), value=len(tokens))     # no targets in these
    for batch in starts[rank::world].split(batch_size):
        positions = batch[:, None] + torch.arange(seq_len + 1, device=device)
        window = tokens_at(tokens, positions.clamp(max=len(tokens) - 1))
        x, y = window[:, :-1].contiguous(), window[:, 1:]
        yield x, y.masked_fill((positions[:, 1:] >= len(tokens)) | (y == pad), -1)


@torch.no_grad()
def score_batches(model, batches, token_lengths, machine):
    """Loss per token, perplexity, and bits per byte: the cost of all tokens, end-of-text included,
    over the bytes of the text."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)           # nats, targets, bytes
    for x, y in batches:
        with machine.autocast():
            nats = model(x, y, reduction='none')[1]
        y = y.cpu()
        scored = y >= 0
        cost = nats.float().cpu().double().sum()
        sums += torch.stack((cost, scored.sum(), token_lengths[y[scored]].sum()))
    if machine.cuda:
        sums = sums.to(machine.device)                   # nccl adds up on GPUs only
    nats, targets, n_bytes = machine.sum(sums).tolist()
    model.train()
    loss = nats / targets
    return dict(loss=loss, perplexity=math.exp(min(loss, 700)),
                bits_per_byte=nats / math.log(2) / max(n_bytes, 1))


@torch.no_grad()
def route_shares(model, x, machine):
    """{layer: the share of the picks that went to each choice}. Where every choice gets something
    from every token, the share of the gates."""
    model.eval()
    with machine.autocast():
        routes = model.routes(x)
    model.train()
    shares = {}
    for name, gate in routes.items():
        taken = gate if gate.all() else gate != 0
        count = taken.flatten(0, 1).sum(0).cpu().double()
        shares[name] = [round(v, 4) for v in (count / count.sum().clamp(min=1)).tolist()]
    return shares


def evaluate(model, data, it, s, machine):
    """Score every val set, print a line for each -> what is logged."""
    batches = lambda name, *share: val_batches(data.val[name], data.T, s.batch_size, data.pad,
                                               s.eval_tokens, *share)
    scores = {}
    for name in data.scored:
        scores[name] = score_batches(model, batches(name, machine.rank, machine.world),
                                     data.token_lengths, machine)
        loss, perplexity, bits = scores[name].values()
        perplexity = f'{perplexity:.2f}' if perplexity < 1e6 else f'{perplexity:.0e}'
        machine.say(f'step {it:6,}  {name}: val loss {loss:.4f}, perplexity {perplexity}, '
                    f'{bits:.4f} bits per byte')
    x, _ = next(batches(data.scored[0]))
    return dict(words=round(data.words), val=scores, routes=route_shares(model, x, machine))


# ---- Where a model starts, and what is kept of it -----------------------------------------------

def start_model(s, module, keys, data, machine):
    """-> a fresh model, another run's, or what a surgery makes of other runs'; and its report."""
    if not s.init_from:
        keys.setdefault('vocab_size', data.tokenizer.n_vocab)
        config = make_config(module, keys)
        check_vocabulary(config, data)
        with torch.device('meta' if s.max_iters == 0 else 'cpu'):        # meta: only the plan
            return module.Model(config), None
    paths = [s.init_from] if isinstance(s.init_from, str) else s.init_from
    ckpts = [read_checkpoint(path) for path in paths]
    for ckpt in ckpts:
        if ckpt['model'] != s.model:
            raise UserError(f"{ckpt['folder']} holds a model of {ckpt['model']}, not {s.model}")
        if ckpt['tokenizer'] != data.tokenizer.hash:
            raise UserError(f"{ckpt['folder']} has another tokenizer than {data.folder}")
    if not s.surgery:
        if len(ckpts) > 1:
            raise UserError('init_from names several runs: set the surgery that joins them')
        return freeze(build_model(ckpts[0], **keys), ckpts[0]), None

    changed = [key for key in keys if any(ckpt['config'].get(key) != keys[key] for ckpt in ckpts)]
    if changed:
        raise UserError(f"{', '.join(changed)}: with a surgery, the model's settings come from "
                        'init_from and surgery_args')
    if any(ckpt['adapted'] for ckpt in ckpts) and s.surgery != 'tools.lora.merge_lora':
        raise UserError('the model has adapters: first --surgery=tools.lora.merge_lora')
    operate = find_surgery(s.surgery, module)
    models = [build_model(ckpt, machine.device).eval() for ckpt in ckpts]
    arguments = dict(s.surgery_args)
    if 'batches' in inspect.signature(operate).parameters:       # such as pruning
        models = [model.float() for model in models]
        seq_len = s.seq_len or models[0].config.block_size
        arguments['batches'] = calibration_batches(data, seq_len, s)
    try:
        inspect.signature(operate).bind(models, **arguments)
    except TypeError as error:
        raise UserError(f'surgery_args: {s.surgery}: {error}') from None
    before = {name for model in models for name, _ in model.named_parameters()}
    torch.set_default_dtype(next(models[0].parameters()).dtype)      # bfloat16, if it was imported
    try:
        with machine.device:                             # new weights are made where they are used
            result = operate(models if isinstance(s.init_from, list) else models[0], **arguments)
    except (AssertionError, ValueError) as error:        # its own words; a bug keeps its traceback
        raise UserError(f'{s.surgery}: {error}') from None
    finally:
        torch.set_default_dtype(torch.float32)
    model, report = result if isinstance(result, tuple) else (result, None)
    if s.freeze:
        for name, p in model.named_parameters():
            p.requires_grad_(name not in before)
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError(f'freeze: {s.surgery} added nothing that could train')
    return model, report


def check_vocabulary(config, data):
    """The data must hold what the model reads: its tokens, or chunks of its length."""
    slots = getattr(config, 'byte_limit', 0) + 1         # per chunk; 1: tokens
    if slots != data.slots:
        raise UserError(f'{data.folder} has {data.slots} slots per chunk (1: plain tokens), but '
                        f'the model reads {slots}: see --chunks and --sentences of prepare.py')
    if config.vocab_size < data.tokenizer.n_vocab:
        raise UserError(f'vocab_size is {config.vocab_size}, but {data.folder} has a vocabulary of '
                        f'{data.tokenizer.n_vocab}')


def calibration_batches(data, seq_len, s):
    """The first batches of the training text, for a surgery that has to look at some."""
    batches = []
    for begin, end, _, _ in data.sets.values():
        end = min(end, begin + s.surgery_batches * s.batch_size * seq_len + 1)
        batches += val_batches(data.tokens[begin:end], seq_len, s.batch_size, data.pad)
    return batches


def freeze(model, ckpt):
    """What a surgery froze stays frozen when the run is resumed, or another starts from it."""
    for name, p in model.named_parameters():
        if name in ckpt['frozen']:
            p.requires_grad_(False)
    return model


def widen(model, machine):
    """Imported weights may be bfloat16. What trains becomes float32. A frozen matrix stays as it is
    where autocast can use it; embeddings, norms and routers take little room, and need more."""
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, p in model.named_parameters():
        is_map = p.dim() >= 2 and p not in tables and '.router.' not in name
        if p.requires_grad or not is_map or machine.dtype == torch.float32:
            p.data = p.data.float()


def find_run(out, s, keys, machine):
    """The checkpoint that --resume continues, or None if a new run starts. A resumed run keeps its
    model and data; what else has changed is printed."""
    if (out / 'train.bin').exists():                     # a run would replace its meta.json
        raise UserError(f'{out} is a data set: set another --out_dir')
    is_plan = s.max_iters == 0 and not s.surgery
    if is_plan or s.overwrite or not any(out.glob('ckpt*.pt')):
        if s.resume and not is_plan:
            machine.say(f'resume    there is no run in {out}: a new one begins')
        return None
    if not s.resume:
        raise UserError(f'{out} already holds a run: add --resume to continue it, --overwrite to '
                        'start over, or set another --out_dir')
    if not (out / 'ckpt.pt').exists():
        return None
    ckpt = read_checkpoint(out)
    fixed = {'model', 'data', 'seed', 'seq_len', 'stride', 'stream', 'memory', 'epoch_words',
             'batch_size', 'gradient_accumulation_steps', 'optimizer', 'processes', *keys}
    before = ckpt['config'] | ckpt['settings'] | dict(processes=len(ckpt['ranks']))
    now = asdict(s) | dict(processes=machine.world)
    if not s.surgery:                                    # it may have changed the model's keys
        now |= keys
    for key in [key for key in now if key in before and now[key] != before[key]]:
        if key in fixed:
            raise UserError(f'{out} has {key} = {before[key]!r}, not {now[key]!r}: resume with the '
                            'same, or start anew with --out_dir and --init_from')
        if key not in ('resume', 'overwrite', 'out_dir'):
            machine.say(f'resume    {key} was {before[key]!r}, is now {now[key]!r}')
    return ckpt


def save(path, it, model, data, s, machine, optimizer=None, memory=None, log_bytes=0, seconds=0.0):
    """The weights and, with an optimiser, everything needed to resume."""
    weights, moments = full_state(model, optimizer)
    ranks = machine.gather(dict(random=machine.random_state(), memory=memory))
    if machine.rank > 0:
        return
    state = dict(
        model=s.model, config=asdict(model.config), settings=asdict(s), iter=it, words=data.words,
        tokenizer=data.tokenizer.hash, weights=weights, sources=model_sources(s.model),
        adapted=getattr(model, 'adapted', []),           # how to rebuild adapters (tools/lora.py)
        frozen=[name for name, p in model.named_parameters() if not p.requires_grad])
    if optimizer:
        state |= dict(optimizer=moments, data=data.place(), ranks=ranks, log_bytes=log_bytes,
                      seconds=seconds)
    try:
        with new_file(path, 'wb') as file:               # complete or not at all
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        raise UserError(f'{path} could not be written ({str(error).splitlines()[0]}): is the disk '
                        'full? The checkpoint before it is intact') from None


# ---- One step -----------------------------------------------------------------------------------

def train_step(model, optimizer, data, s, machine, starts, memory=None):
    """One optimiser step -> this process's mean loss and auxiliary values, and the gradient norm.
    `starts` holds the windows of all processes; micro-batches are dealt out in turn, so W processes
    with A micro-batches each see the same data as one process with W * A. `memory` (ModuleFormer)
    holds the keys and values of each micro-batch's previous segment."""
    accumulate = s.gradient_accumulation_steps
    mean = {}
    optimizer.zero_grad(set_to_none=True)
    for a in range(accumulate):
        m = a * machine.world + machine.rank
        x, y = data.batch(starts[m * s.batch_size:(m + 1) * s.batch_size])
        if machine.world > 1:
            sync_gradients(model, a == accumulate - 1)   # once, for all micro-batches
        with machine.autocast():
            _, loss, aux = model(x, y, cache=memory[a]) if memory else model(x, y)
        if not s.aux_weights.keys() <= aux.keys():
            raise UserError(f'aux_weights names {[*s.aux_weights]}, but {s.model} returns {[*aux]}')
        objective = loss + sum(weight * aux[name] for name, weight in s.aux_weights.items())
        if memory:                      # the model has added its keys and values
            memory[a] = [last_keys(k, v, s.memory) for k, v in memory[a]]
        (objective / accumulate).backward()
        for name, value in dict(aux, loss=loss).items():
            mean[name] = mean.get(name, 0.0) + value.detach() / accumulate
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
    optimizer.step()
    return mean, norm.full_tensor() if s.shard and machine.world > 1 else norm


def fast_step(model, optimizer, data, s, machine, steps):
    """train_step as a function of starts (and memory), as fast as settings and machine allow:
    compiled, as a CUDA graph, in several processes. steps: of the run, also of a resumed one, so
    that it is computed as before."""
    is_sharded = s.shard and machine.world > 1           # its hooks cannot be compiled
    recomputed = s.checkpoint_activations
    by_default = machine.cuda and steps >= 200           # compiling takes half a minute
    if not is_sharded and (by_default if s.compile is None else s.compile):
        model = compile_model(model, recomputed)
    if machine.world > 1 and not is_sharded:             # copies that add up their gradients
        model = torch.nn.parallel.DistributedDataParallel(model)
    step = functools.partial(train_step, model, optimizer, data, s, machine)
    if s.memory or recomputed or is_sharded:    # a graph needs tensors that stay: memory is new
        return step
    return CUDAGraphStep(step, machine, wanted=s.graph)


def last_keys(k, v, n):
    """The last n, as copies: a view would keep all of them in memory."""
    last = k[:, :, -n:].detach().clone()
    return last, last if v is k else v[:, :, -n:].detach().clone()


# ---- Optimiser and schedules --------------------------------------------------------------------

def make_optimizer(model, s, machine):
    """AdamW or Muon. Only matrices decay, not stacked vectors (named ...gain or ...bias)."""
    matrices, vectors = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            is_matrix = p.dim() >= 2 and not name.endswith(('gain', 'bias'))
            (matrices if is_matrix else vectors).append(p)
    groups = [dict(params=matrices, weight_decay=s.weight_decay),
              dict(params=vectors, weight_decay=0.0)]
    lr = torch.tensor(s.learning_rate, device=machine.device) if machine.cuda else s.learning_rate
    kind = torch.optim.AdamW
    if s.optimizer == 'muon':
        kind, groups = Muon, split_groups(groups, model, s.muon_rate)
    return kind(groups, lr=lr, betas=(s.beta1, s.beta2), eps=s.eps,
                capturable=machine.cuda, fused=machine.device.type in ('cuda', 'cpu'))


def set_rate(optimizer, lr):
    """On a GPU the rate is a tensor: a CUDA graph reads it again at every replay."""
    for group in optimizer.param_groups:
        if torch.is_tensor(group['lr']):
            group['lr'].fill_(lr)
        else:
            group['lr'] = lr


def learning_rate(it, s, steps):
    """Linear warm-up, then the schedule, from learning_rate to min_lr unless it is constant."""
    if it < s.warmup_iters:
        return s.warmup_lr + (s.learning_rate - s.warmup_lr) * (it + 1) / (s.warmup_iters + 1)
    done = min(1.0, (it - s.warmup_iters) / max(1, steps - s.warmup_iters))
    shapes = dict(cosine=0.5 * (1 + math.cos(math.pi * done)), linear=1 - done, constant=1.0)
    return s.min_lr + shapes[s.schedule] * (s.learning_rate - s.min_lr)


def dropout_rate(it, s, steps, p):
    """The model's rate p at a step. early: p, then 0; late: 0, then p; linear: from p to 0; rising:
    from 0 to p; triangle: one peak; triangles: four."""
    done = min(1.0, it / steps)
    shapes = dict(constant=1, early=done < s.dropout_phase, late=done >= s.dropout_phase,
                  linear=1 - done, rising=done, triangle=1 - abs(2 * done - 1),
                  triangles=1 - abs(8 * done % 2 - 1))
    return p * shapes[s.dropout_schedule]


# ---- The run ------------------------------------------------------------------------------------

def main():
    s, module, keys = read_settings(sys.argv[1:], __doc__)
    machine = Machine(s.device, s.dtype, s.deterministic)
    for seed in s.seeds:
        out = f'{s.out_dir}/seed_{seed}'
        machine.say(f'\nseed      {seed}')
        run(replace(s, seed=seed, seeds=[], out_dir=out), module, dict(keys), machine)
    if not s.seeds:
        run(s, module, keys, machine)
    machine.close()


def run(s, module, keys, machine):
    out = Path(s.out_dir)
    ckpt = find_run(out, s, keys, machine)               # what --resume continues, or None

    # data and model
    data = Data(s, machine)
    torch.manual_seed(s.seed)
    report = None
    if ckpt:
        model = freeze(build_model(ckpt), ckpt)
    else:
        model, report = start_model(s, module, keys, data, machine)
    data.start(s.seq_len or model.config.block_size)
    it = 0
    if ckpt:
        it = ckpt['iter']
        data.go_to(ckpt['data'])
    is_surgery_alone = s.max_iters == 0 and s.surgery
    last_step = 0 if is_surgery_alone else s.max_iters or data.steps()
    show_plan(model, data, it, last_step, s, machine)
    if s.max_iters == 0 and not s.surgery:               # the plan was all
        return
    if (s.memory or data.T > model.config.block_size) and context_limit(model.eval()):
        raise UserError(f'{s.model} reads no more than its block_size: lower seq_len, set no '
                        'memory, or take a model such as moduleformer')

    # optimiser, compiled step, and the rest of the run's state
    model.to(machine.device).train()
    widen(model, machine)
    if s.checkpoint_activations:
        recompute_blocks(model)
    if s.shard and machine.world > 1:
        shard(model, machine)
    optimizer = make_optimizer(model, s, machine)
    memory = None                       # with --memory: keys and values of each micro-batch's past
    torch.manual_seed(s.seed + 1 + machine.rank)         # dropout differs between processes
    began = time.monotonic()
    if ckpt:
        load_optimizer(model, optimizer, ckpt['optimizer'])
        state = ckpt['ranks'][machine.rank]
        machine.set_random_state(state['random'])
        if state['memory']:
            memory = [[tuple(x.to(machine.device) for x in layer) for layer in layers]
                      for layers in state['memory']]
        began -= ckpt['seconds']
    if s.dropout_schedule != 'constant':
        if not (hasattr(model, 'set_dropout') and model.config.dropout):
            raise UserError('dropout_schedule needs a model with set_dropout, and dropout above 0')
        model.set_dropout(0.0)          # a tensor from now on: the loop sets it without recompiling
    step = fast_step(model, optimizer, data, s, machine, last_step)

    # the run's folder
    log = open_log(out, ckpt, s) if machine.rank == 0 else open(os.devnull, 'w')
    if machine.rank == 0:
        copy_tokenizer(data.folder, out)
        for file, text in changed_sources(ckpt).items() if ckpt else ():     # a save has the new
            (out / f'until_{it}_{Path(file).name}').write_text(text, encoding='utf-8')
    write_log(log, it, began, run=describe(model, data, last_step, s, machine))
    if report:
        machine.say(str(report))
        write_log(log, it, began, surgery=report)
    resumed_at = it if ckpt else None
    del ckpt                                             # the moments of a large model are in there
    pending = [words for words in sorted(s.checkpoint_words) if words > data.words]
    stop, handlers = catch_signals()
    mean, norm = {}, None
    bar = tqdm(total=last_step, initial=it, smoothing=0, unit='step',
               disable=None if machine.rank == 0 else True)      # None: without a terminal
    tokens, clock = 0, time.perf_counter()
    while True:
        # evaluate and save, if due; a resumed run did so before it stopped
        is_last = it >= last_step
        if it != resumed_at:
            if is_last or it % s.eval_interval == 0:
                write_log(log, it, began, **evaluate(model, data, it, s, machine))
                tokens, clock = 0, time.perf_counter()
            is_stopping = asked_to_stop(stop, it, s, machine)
            if is_last or is_stopping or (it and it % s.save_interval == 0):
                check_finite(mean, norm, it, out)
                save(out / 'ckpt.pt', it, model, data, s, machine, optimizer, memory, log.tell(),
                     time.monotonic() - began)
                tokens, clock = 0, time.perf_counter()
            if is_stopping and not is_last:
                machine.say(f'stopped at step {it:,}; to continue, add --resume to the command')
                machine.close()
                sys.exit(128 + (stop or [signal.SIGTERM])[0])
        if is_last:
            break

        # one step
        lr = learning_rate(it, s, last_step)
        set_rate(optimizer, lr)
        scheduled = dict(lr=lr)
        if hasattr(model, 'set_dropout'):
            scheduled['dropout'] = dropout_rate(it, s, last_step, model.config.dropout)
        if s.dropout_schedule != 'constant':
            model.set_dropout(scheduled['dropout'])
        starts = data.next_starts()
        if s.memory:
            if starts[0] < data.stride:                  # row 0 is back at the text's beginning
                memory = [[] for _ in range(s.gradient_accumulation_steps)]
            mean, norm = step(starts, memory)
        else:
            mean, norm = step(starts)
        it += 1
        tokens += data.rows * data.T
        bar.update()

        # log
        if it % s.log_interval == 0 or it >= last_step:
            check_finite(mean, norm, it, out)
            values = {name: machine.sum(value.clone()).item() / machine.world
                      for name, value in mean.items()}
            rate = tokens / (time.perf_counter() - clock)
            tokens, clock = 0, time.perf_counter()
            write_log(log, it, began, **values, **scheduled, grad_norm=norm.item(),
                      tokens_per_s=round(rate), epoch=data.epoch, windows=data.seen,
                      words=round(data.words))
            speed = f'{human(rate)} {data.noun}/s{machine.memory()}'
            bar.set_postfix_str(f"loss {values['loss']:.3f}, {speed}")
            if bar.disable and it % (10 * s.log_interval) == 0:  # no terminal: a line now and then
                machine.say(f"step {it:6,}  loss {values['loss']:.4f}, {speed}")
        words_per_step = data.words / it                 # steps are rounded down: the last may miss
        reached = data.words + (words_per_step if it >= last_step else 0)    # its target by one
        while pending and reached >= pending[0]:
            check_finite(mean, norm, it, out)
            save(out / f'ckpt_{human(pending.pop(0))}.pt', it, model, data, s, machine)
    bar.close()
    for number, handler in handlers.items():             # the run is saved: Ctrl-C ends the script
        signal.signal(number, handler)
    if last_step and s.sample_tokens:
        show_sample(model, data, s, machine)
    else:
        machine.say(f'saved     {out}/ckpt.pt')


def catch_signals():
    """-> a list that fills with signals: the loop saves and stops. A second one ends it at once.
    And the handlers that there were before."""
    caught = []

    def catch(number, _):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)
    handlers = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    return caught, handlers


def asked_to_stop(stop, it, s, machine):
    """Several processes must agree: they ask each other only where they wait anyway."""
    if machine.world > 1 and it % s.log_interval:
        return False
    return any(machine.gather(stop))


def check_finite(mean, norm, it, out):
    if norm is not None and not math.isfinite(mean['loss'] + norm):
        raise UserError(f'the loss or its gradient is not finite at step {it}; {out}/ckpt.pt, if '
                        'there is one, is good: try a lower learning_rate; if the first val loss '
                        'is nan too, python -m tools.check says more')


def open_log(out, ckpt, s):
    """log.jsonl, without the lines that a killed run wrote after its last checkpoint. It is locked
    until the run ends: of two that start together, one may write."""
    out.mkdir(parents=True, exist_ok=True)
    log = open(out / 'log.jsonl', 'a', encoding='utf-8')
    if not lock(log):
        raise UserError(f'another run is writing to {out}: set another --out_dir')
    for old in out.glob('ckpt*.pt') if s.overwrite else []:
        old.unlink()
    log.truncate(min(ckpt['log_bytes'], log.tell()) if ckpt else 0)
    log.seek(0, os.SEEK_END)
    return log


def write_log(log, it, began, **record):
    seconds = round(time.monotonic() - began, 3)
    log.write(json.dumps(dict(iter=it, seconds=seconds, **record), default=str) + '\n')
    log.flush()


if __name__ == '__main__':
    run_main(main)
