"""
Train any model of this repository, in one plain loop.

    python train.py config/moep.py                       # the toy corpus, minutes on a laptop
    python train.py config/moep.py --n_block=8 --out_dir=out/p8  # any setting of training or model
    python train.py config/moep.py --resume              # go on after a kill: on a CPU, bit for bit
    python train.py config/moep.py --max_iters=0         # print sizes and plan, train nothing
    python train.py config/moep.py --seeds=1,2,3         # three runs; then python -m tools.compare
    torchrun --nproc_per_node=2 train.py config/moep.py  # several processes (large models: --shard)

A config is a Python file of assignments, and `--key=value` overrides it. A key belongs to
`Settings` (plumbing/settings.py) or to the model's own Config. `model` names the model's file,
which ends with `Config, Model = ...`; docs/extending.md lists the methods.

A run's folder holds ckpt.pt (everything needed to resume), ckpt_<words>.pt (weights at given word
counts, to score or start from), log.jsonl (one JSON object per line), the tokenizer, and copies of
the model's files.
"""

import functools
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from plumbing.bins import count_routes, load_bin, read_windows, score_batches, val_batches
from plumbing.checkpoint import (build_model, context_limit, copy_model, find_run, start_from,
                                 write_checkpoint)
from plumbing.cli import UserError, caught_signals, human, run_main
from plumbing.log import Log
from plumbing.machine import Machine, widen
from plumbing.report import describe, show_plan, show_sample, show_step, utilisation
from plumbing.settings import check_vocabulary, make_config, read_settings
from plumbing.tokenizer import copy_tokenizer, load_meta, shared_tokenizer


# ---- Data: the windows of every step ------------------------------------------------------------

class Data:
    """The training text, of one data set or of several end to end, and the windows of every step.

    Each epoch cuts the text into windows at a random offset, and shuffles them. All epochs keep the
    same number of windows, so with the same settings the seed and the step tell which ones a step
    reads. Nothing here changes during a run: a resumed run needs only its step, and
    `data.windows(700)` shows what comes after 700 steps. With `stream` the windows stay in order:
    row r of every step reads the r-th part of the text. The text stays on disk, as memory maps."""

    def __init__(self, s, folders, scored, tokenizer, seq_len, machine):
        self.s, self.machine, self.tokenizer = s, machine, tokenizer
        self.pad = tokenizer.pad                         # never a target
        self.slots = len(tokenizer.end)                  # ids per unit: 1, more in chunks of bytes
        self.noun = 'tokens' if self.slots == 1 else 'slots'
        self.folder = folders[0]
        self.bins = [load_bin(folder, 'train') for folder in folders]
        self.size = sum(map(len, self.bins))
        self.val = {folder.name: load_bin(folder, 'val') for folder in scored}
        counts = [load_meta(folder)['splits']['train'] for folder in folders]
        words_per_token = sum(n['words'] for n in counts) / sum(n['tokens'] for n in counts)

        self.T, self.stride = seq_len, s.stride or seq_len
        self.rows = s.batch_size * s.gradient_accumulation_steps * machine.world     # per step
        self.words_per_step = self.rows * self.T * words_per_token
        if self.T % self.slots or self.stride % self.slots:
            raise UserError(f'seq_len and stride must be multiples of a chunk: {self.slots} slots')
        self.n_windows = (self.size - self.T) // self.stride     # per epoch: fit at any offset
        if s.epoch_words:
            limit = math.ceil(s.epoch_words / (self.T * words_per_token))
            self.n_windows = min(self.n_windows, limit)
        if s.stream:
            self.n_windows -= self.n_windows % self.rows
        if self.n_windows < self.rows:
            raise UserError(f'an epoch of {max(0, self.n_windows)} windows is less than one step '
                            f'of {self.rows}: add text, or lower seq_len, stride or batch_size')

    @functools.lru_cache(2)                              # a step may span two epochs
    def epoch_starts(self, epoch):
        """Where the windows of an epoch start."""
        rng = np.random.default_rng([self.s.seed, epoch])
        offset = rng.integers(self.stride // self.slots) * self.slots
        starts = np.arange(offset, self.size - self.T, self.stride)
        if self.s.stream:
            return starts[:self.n_windows].reshape(self.rows, -1).T.flatten()
        rng.shuffle(starts)
        return starts[:self.n_windows]

    def step_starts(self, step):
        """Where the windows of a step start, for all processes."""
        epoch, place = np.divmod(step * self.rows + np.arange(self.rows), self.n_windows)
        return np.concatenate([self.epoch_starts(e)[place[epoch == e]] for e in np.unique(epoch)])

    def windows(self, step):
        """x, y of shape (A, B, T): this process's A micro-batches of a step. y is x shifted by one,
        with -1 where there is nothing to predict. Micro-batches are dealt out in turn, so together
        W processes of A micro-batches read what one process of W * A would."""
        shape = self.s.gradient_accumulation_steps, self.machine.world, self.s.batch_size
        mine = self.step_starts(step).reshape(shape)[:, self.machine.rank]
        ids = read_windows(self.bins, mine.flatten(), self.T + 1, pinned=self.machine.cuda)
        ids = ids.to(self.machine.device, non_blocking=True).view(*mine.shape, -1)
        x, y = ids[..., :-1].contiguous(), ids[..., 1:]
        return x, y.masked_fill(y == self.pad, -1)

    def restarts_text(self, step):
        """Whether a step of a stream starts the text again."""
        return step % (self.n_windows // self.rows) == 0

    def steps(self):
        """The number of steps in all epochs."""
        return max(1, round(self.s.epochs * self.n_windows) // self.rows)

    def validation(self, name, rank=0, world=1):
        """x, y of a validation text, or of the first eval_tokens of it: a process's share."""
        return val_batches(self.val[name], self.T, self.s.batch_size, self.pad, self.s.eval_tokens,
                           rank, world)


# ---- Evaluation ---------------------------------------------------------------------------------

def evaluate(model, data, it, machine):
    """Score every validation text and print a line for each -> what to log"""
    scores = {}
    for name in data.val:
        batches = data.validation(name, machine.rank, machine.world)
        scores[name] = score = score_batches(model, batches, data.tokenizer, machine)
        machine.say(f"step {it:6,}  {name}: val loss {score['loss']:.4f}, perplexity "
                    f"{score['perplexity']:.5g}, {score['bits_per_byte']:.4f} bits per byte")
    x, _ = next(data.validation(next(iter(data.val))))
    return dict(words=round(it * data.words_per_step), val=scores,
                **count_routes(model, x, machine))


# ---- Where a run starts, and what it saves ------------------------------------------------------

def load_data_and_model(s, module, keys, ckpt, machine):
    """The data, and the model: continued (ckpt), from another run (init_from), or fresh."""
    folders = [Path(s.data_dir, name) for name in s.data.split(',')]
    scored = [Path(s.data_dir, name) for name in (s.eval_data or s.data).split(',')]
    if machine.rank == 0 and not all(folder.exists() for folder in folders + scored):
        from prepare import make_toys                    # toy corpora are made on demand
        make_toys([folder.name for folder in folders + scored], s.data_dir)
    machine.barrier()                                    # until the first process has made them
    tokenizer = shared_tokenizer(*folders, *scored)
    torch.manual_seed(s.seed)                            # of the initial weights
    if ckpt:
        model = build_model(ckpt)
    elif s.init_from:
        model = start_from(s.init_from, s.model, keys, tokenizer)
    else:
        multiple = 64 if len(tokenizer.end) == 1 else 1  # 64 is faster on a GPU
        vocab_size = math.ceil(tokenizer.n_vocab / multiple) * multiple
        config = make_config(module, dict(vocab_size=vocab_size) | keys)
        check_vocabulary(config, tokenizer, folders[0])
        with torch.device('meta' if s.max_iters == 0 else 'cpu'):    # meta: a plan needs no weights
            model = module.Model(config)
    data = Data(s, folders, scored, tokenizer, s.seq_len or model.config.block_size, machine)
    if ckpt and ckpt['text'] != data.size:
        raise UserError('the text has changed since the run began: start a new one, with '
                        '--out_dir and --init_from')
    return data, model


def save(path, it, model, data, s, machine, **state):
    """The weights and what rebuilds the model; with more `state`, all that a resumed run needs."""
    weights = model.state_dict()                         # sharded: all processes take part
    if machine.rank == 0:
        write_checkpoint(path, model, weights, s, data.tokenizer, iter=it, text=data.size,
                         words=it * data.words_per_step, **state)


def restore(ckpt, optimizer, machine):
    """Load the optimiser's moments and this process's random state -> the run's carry"""
    today = optimizer.state_dict()['param_groups']   # today's rates and decays, not the saved ones
    optimizer.load_state_dict(dict(ckpt['optimizer'], param_groups=today))
    if ckpt['scaler']:                                   # empty if it was not float16
        optimizer.scaler.load_state_dict(ckpt['scaler'])
    state = ckpt['ranks'][machine.rank]
    machine.set_random_state(state['random'])
    return [[tuple(map(machine.send, pair)) for pair in cache] for cache in state['carry']]


# ---- One step -----------------------------------------------------------------------------------

def train_step(model, optimizer, s, machine, xs, ys, carry=()):
    """One optimiser step on this process's micro-batches -> their mean loss and auxiliary values,
    and the gradient norm. `carry` (ModuleFormer's memory): one cache per micro-batch, in which the
    model reads the keys and values of the preceding text and leaves those of the current one."""
    mean = {}
    optimizer.zero_grad(set_to_none=True)
    for a, (x, y) in enumerate(zip(xs, ys)):
        if machine.world > 1:                            # DDP syncs gradients once, at the end
            model.require_backward_grad_sync = a == len(xs) - 1
        with machine.autocast():
            _, loss, aux = model(x, y, cache=carry[a]) if carry else model(x, y)
        if not s.aux_weights.keys() <= aux.keys():
            raise UserError(f'aux_weights names {[*s.aux_weights]}, but {s.model} returns {[*aux]}')
        objective = loss + sum(weight * aux[name] for name, weight in s.aux_weights.items())
        optimizer.scaler.scale(objective / len(xs)).backward()
        for name, value in dict(aux, loss=loss).items():
            mean[name] = mean.get(name, 0.0) + value.detach() / len(xs)
    optimizer.scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
    optimizer.scaler.step(optimizer)
    optimizer.scaler.update()
    return mean, norm.full_tensor() if hasattr(norm, 'full_tensor') else norm    # if sharded


def make_step(model, optimizer, s, machine, steps):
    """train_step as a function of x, y and carry, as fast as the settings and the machine allow:
    compiled, as a CUDA graph, in several processes. steps: the run's total, also if it is resumed,
    so that the choice to compile stays the same."""
    by_default = machine.cuda and steps >= 200           # compiling takes half a minute
    wants_compiled = by_default if s.compile is None else s.compile
    if wants_compiled and not s.shard:                   # the hooks of FSDP cannot be compiled
        from plumbing.compile import compile_model
        model = compile_model(model, s.checkpoint_activations)
        if s.optimizer == 'muon':
            optimizer.compile()
    if machine.world > 1 and not s.shard:                # replicas that average gradients
        model = torch.nn.parallel.DistributedDataParallel(model)
    step = functools.partial(train_step, model, optimizer, s, machine)
    if s.stream or s.checkpoint_activations or not s.graph:
        return step                                      # a graph needs fixed tensors
    from plumbing.graph import CUDAGraphStep
    graph = CUDAGraphStep(step, machine)
    return lambda x, y, carry=(): graph(x, y)            # only a stream has something to carry


# ---- Optimiser and schedule ---------------------------------------------------------------------

def make_optimizer(model, s, machine):
    """AdamW or Muon. Matrices have weight decay; vectors, also stacked ones (named ...gain or
    ...bias), have none. Its `scaler` keeps small gradients from vanishing in float16; a step whose
    gradients overflow is left out, and the scale halved. In other precisions it does nothing."""
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
        from plumbing.muon import Muon, split_groups
        kind, groups = Muon, split_groups(groups, model, s.muon_rate)
    optimizer = kind(groups, lr=lr, betas=(s.beta1, s.beta2), eps=s.eps,
                     capturable=machine.cuda, fused=machine.device.type in ('cuda', 'cpu'))
    optimizer.scaler = torch.amp.GradScaler(machine.device.type,
                                            enabled=machine.dtype == torch.float16)
    return optimizer


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


# ---- The run ------------------------------------------------------------------------------------

def main():
    s, module, keys = read_settings(sys.argv[1:], __doc__)
    machine = Machine(s.device, s.dtype, s.deterministic)
    for seed in s.seeds:
        machine.say(f'\nseed      {seed}')
        run(replace(s, seed=seed, seeds=[], out_dir=f'{s.out_dir}/seed_{seed}'), module, keys,
            machine)
    if not s.seeds:
        run(s, module, keys, machine)
    machine.close()


def run(s, module, keys, machine):
    out = Path(s.out_dir)
    s = replace(s, shard=s.shard and machine.world > 1)
    ckpt = None if s.max_iters == 0 else find_run(out, s, keys, machine)
    data, model = load_data_and_model(s, module, keys, ckpt, machine)
    it = ckpt['iter'] if ckpt else 0
    if ckpt:
        machine.set_threads(ckpt['threads'])
    steps = s.max_iters or data.steps()                  # 0: only the plan is wanted
    show_plan(model, data, it, steps, s, machine)
    if s.max_iters == 0:
        return
    if data.T > model.config.block_size and context_limit(model):
        raise UserError(f'{s.model} reads no more than its block_size: lower seq_len')

    # optimiser, random state, compiled step
    model.to(machine.device).train()
    widen(model, machine)                                # what trains is float32
    if s.checkpoint_activations:
        from plumbing.compile import recompute_blocks
        recompute_blocks(model)
    if s.shard:
        from plumbing.shard import shard, shard_optimizer
        shard(model, machine)
    optimizer = make_optimizer(model, s, machine)
    if s.shard:
        shard_optimizer(optimizer)
    torch.manual_seed(s.seed + 1 + machine.rank)         # dropout differs between processes
    remembers = s.stream and getattr(model.config, 'memory', 0)
    carry = restore(ckpt, optimizer, machine) if ckpt else []    # stays empty without a memory
    take_step = make_step(model, optimizer, s, machine, steps)

    # the run's folder
    log = Log(out, machine, ckpt, s.overwrite)
    if machine.rank == 0:
        copy_tokenizer(data.folder, out)
        if not ckpt:
            copy_model(s.model, out)
    log.write(it, run=describe(model, data, steps, s, machine))
    del ckpt                                             # frees memory: it holds the moments

    bar = tqdm(total=steps, initial=it, smoothing=0, unit='step',
               disable=None if machine.rank == 0 else True)      # None: hidden if no terminal
    with bar, caught_signals() as caught:
        if it == 0:
            log.write(it, **evaluate(model, data, it, machine))
        timed, clock = it, time.perf_counter()           # tokens/s are measured from here
        while it < steps:
            # one step
            lr = learning_rate(it, s, steps)
            set_rate(optimizer, lr)
            if hasattr(model, 'set_progress'):           # for what changes during training
                model.set_progress(it / steps)
            if remembers and data.restarts_text(it):
                carry = [[] for _ in range(s.gradient_accumulation_steps)]
            mean, norm = take_step(*data.windows(it), carry)
            it += 1
            bar.update()

            # what is due after it; ckpt.pt comes last, as it keeps the log's place
            is_last = it >= steps
            stop = asked_to_stop(caught, it, s, machine)
            due = lambda interval: is_last or it % interval == 0
            logs, evaluates = due(s.log_interval), due(s.eval_interval)
            saves = due(s.save_interval) or stop
            milestones = [words for words in s.checkpoint_words
                          if it == max(1, int(words / data.words_per_step))]
            if logs or milestones or saves:
                check_finite(mean, norm, optimizer.scaler, it, out)
            if logs:
                values = {name: machine.mean(value) for name, value in mean.items()}
                speed = (it - timed) * data.rows * data.T / (time.perf_counter() - clock)
                mfu = utilisation(model, speed, machine)
                log.write(it, **values, lr=lr, grad_norm=norm.item(), tokens_per_s=round(speed),
                          mfu=round(mfu, 4), words=round(it * data.words_per_step))
                show_step(bar, it, values['loss'], speed, mfu, data, s, machine)
            for words in milestones:
                save(out / f'ckpt_{human(words)}.pt', it, model, data, s, machine)
            if evaluates:
                log.write(it, **evaluate(model, data, it, machine))
            if saves:
                ranks = machine.gather(dict(random=machine.random_state(), carry=carry))
                save(out / 'ckpt.pt', it, model, data, s, machine, ranks=ranks,
                     optimizer=optimizer.state_dict(), scaler=optimizer.scaler.state_dict(),
                     threads=torch.get_num_threads(), log=log.place())
            if logs or milestones or evaluates or saves:
                timed, clock = it, time.perf_counter()
            if stop and not is_last:
                machine.say(f'stopped at step {it:,}; to continue, add --resume to the command')
                machine.close()
                sys.exit(128 + stop)
    machine.say(f'saved     {out}/ckpt.pt')
    if s.sample_tokens:
        show_sample(model, data, s, machine)


def asked_to_stop(caught, it, s, machine):
    """The signal that was caught, or 0. Several processes must agree, so they ask each other only
    where they wait anyway. A second signal ends a process at once (caught_signals)."""
    if machine.world > 1 and it % s.log_interval:
        return 0
    return max(machine.gather(caught[0] if caught else 0))


def check_finite(mean, norm, scaler, it, out):
    can_halve = scaler.is_enabled() and scaler.get_scale() >= 1      # an overflow is no harm yet
    if not math.isfinite(mean['loss'] + (0 if can_halve else norm)):
        raise UserError(f'the loss or its gradient is not finite at step {it}; {out}/ckpt.pt, if '
                        'there is one, is good: try a lower learning_rate; if the first val loss '
                        'is nan too, python -m tools.check says more')


if __name__ == '__main__':
    run_main(main)
