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
counts, to score or start from), log.jsonl (a JSON object per line), the tokenizer, and copies of
the model's files.
"""

import functools
import math
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from plumbing.bins import load_bin, read_windows, route_shares, score_batches, val_batches
from plumbing.checkpoint import (build_model, context_limit, copy_model, find_run, start_from,
                                 write_checkpoint)
from plumbing.cli import UserError, caught_signals, human, run_main
from plumbing.compile import compile_model, recompute_blocks
from plumbing.log import Log
from plumbing.machine import CUDAGraphStep, Machine, widen
from plumbing.muon import Muon, split_groups
from plumbing.report import describe, show_plan, show_sample
from plumbing.settings import check_vocabulary, make_config, read_settings
from plumbing.shard import shard, shard_optimizer
from plumbing.tokenizer import copy_tokenizer, load_meta, shared_tokenizer


# ---- Data: the windows of every step ------------------------------------------------------------

class Data:
    """The training text of one data set, or of several end to end, and the windows of every step.

    An epoch cuts the text into windows, from a random offset on, and shuffles them. All epochs have
    equally many. So the windows of a step are a function of (seed, step): nothing here changes
    during a run, a resumed run needs only its step, and `data.windows(700)` is what step 700 reads.
    With `stream` the windows stay in order: row r of each batch reads the r-th part of the text.
    The text stays on disk, as memory maps of the bins."""

    def __init__(self, s, folders, tokenizer, seq_len, machine):
        self.s, self.machine, self.tokenizer = s, machine, tokenizer
        self.pad = tokenizer.pad                         # never a target
        self.slots = len(tokenizer.end)                  # ids per unit: 1, or those of a byte chunk
        self.noun = 'tokens' if self.slots == 1 else 'slots'
        names = s.data.split(',')
        self.folder = folders[names[0]]
        self.bins = [load_bin(folders[name], 'train') for name in names]
        self.size = sum(map(len, self.bins))
        self.val = {name: load_bin(folders[name], 'val')
                    for name in (s.eval_data or s.data).split(',')}
        counts = [load_meta(folders[name])['splits']['train'] for name in names]
        words = sum(n['words'] for n in counts) / sum(n['tokens'] for n in counts)

        self.T, self.stride = seq_len, s.stride or seq_len
        self.rows = s.batch_size * s.gradient_accumulation_steps * machine.world     # of a step
        self.words_per_step = self.rows * self.T * words
        if self.T % self.slots or self.stride % self.slots:
            raise UserError(f'seq_len and stride must be multiples of a chunk: {self.slots} slots')
        self.n_windows = (self.size - self.T) // self.stride     # of an epoch: fit at any offset
        if s.epoch_words:
            limit = math.ceil(s.epoch_words / (self.T * words))
            self.n_windows = min(self.n_windows, limit)
        if s.stream:
            self.n_windows -= self.n_windows % self.rows
        if self.n_windows < self.rows:
            raise UserError(f'an epoch of {max(0, self.n_windows)} windows is less than one step '
                            f'of {self.rows}: add text, or lower seq_len, stride or batch_size')

    @functools.lru_cache(2)                              # a step may run on into the next epoch
    def order(self, epoch):
        """Where the windows of an epoch start."""
        rng = np.random.default_rng([self.s.seed, epoch])
        offset = rng.integers(self.stride // self.slots) * self.slots
        starts = np.arange(offset, self.size - self.T, self.stride)
        if self.s.stream:
            return starts[:self.n_windows].reshape(self.rows, -1).T.flatten()
        rng.shuffle(starts)
        return starts[:self.n_windows]

    def starts(self, step):
        """Where the windows of a step start, those of all processes."""
        epoch, place = np.divmod(step * self.rows + np.arange(self.rows), self.n_windows)
        return np.concatenate([self.order(e)[place[epoch == e]] for e in np.unique(epoch)])

    def windows(self, step):
        """x, y of (A, B, T): this process's A micro-batches of a step. y is x shifted by one, and
        -1 where nothing is to be predicted. Micro-batches are dealt out in turn, so W processes
        with A micro-batches each read what one process with W * A reads."""
        shape = self.s.gradient_accumulation_steps, self.machine.world, self.s.batch_size
        mine = self.starts(step).reshape(shape)[:, self.machine.rank]
        ids = read_windows(self.bins, mine.flatten(), self.T + 1, pinned=self.machine.cuda)
        ids = ids.to(self.machine.device, non_blocking=True).view(*mine.shape, -1)
        x, y = ids[..., :-1].contiguous(), ids[..., 1:]
        return x, y.masked_fill(y == self.pad, -1)

    def begins(self, step):
        """Whether a step of a stream reads from the beginning of the text."""
        return step % (self.n_windows // self.rows) == 0

    def steps(self):
        """How many there are in all epochs."""
        return max(1, round(self.s.epochs * self.n_windows) // self.rows)


# ---- Evaluation ---------------------------------------------------------------------------------

def evaluate(model, data, it, s, machine):
    """Score every val set, print a line for each -> what is logged."""
    batches = lambda val, *share: val_batches(val, data.T, s.batch_size, data.pad, s.eval_tokens,
                                              *share)
    scores = {}
    for name, val in data.val.items():
        scores[name] = score_batches(model, batches(val, machine.rank, machine.world),
                                     data.tokenizer, machine)
        loss, perplexity, bits = scores[name].values()
        perplexity = f'{perplexity:.2f}' if perplexity < 1e6 else f'{perplexity:.0e}'
        machine.say(f'step {it:6,}  {name}: val loss {loss:.4f}, perplexity {perplexity}, '
                    f'{bits:.4f} bits per byte')
    x, _ = next(batches(next(iter(data.val.values()))))
    return dict(words=round(it * data.words_per_step), val=scores,
                routes=route_shares(model, x, machine))


# ---- Where a run starts, and what is kept of it -------------------------------------------------

def start(s, module, keys, ckpt, machine):
    """-> the data and the model: of the run that goes on, of another run, or a fresh one."""
    names = s.data.split(',') + (s.eval_data or s.data).split(',')
    folders = {name: Path(s.data_dir, name) for name in names}
    if machine.rank == 0 and not all(folder.exists() for folder in folders.values()):
        from prepare import make_missing_toys            # a run that asks for a toy corpus gets it
        make_missing_toys(folders, s.data_dir)
    machine.gather(None)                                 # all processes wait for it
    tokenizer = shared_tokenizer(*folders.values())
    torch.manual_seed(s.seed)
    if ckpt:
        model = build_model(ckpt)
    elif s.init_from:
        model = start_from(s.init_from, s.model, keys, tokenizer)
    else:
        config = make_config(module, dict(vocab_size=tokenizer.n_vocab) | keys)
        check_vocabulary(config, tokenizer, folders[names[0]])
        with torch.device('meta' if s.max_iters == 0 else 'cpu'):    # meta: only the plan
            model = module.Model(config)
    data = Data(s, folders, tokenizer, s.seq_len or model.config.block_size, machine)
    if ckpt and ckpt['text'] != data.size:
        raise UserError('the text has changed since the run began: start a new one, with '
                        '--out_dir and --init_from')
    return data, model


def save(path, it, model, data, s, machine, carry=(), **state):
    """The weights and what rebuilds the model; with an optimiser's `state`, all that a resumed run
    needs."""
    weights = model.state_dict()
    ranks = machine.gather(dict(random=machine.random_state(), carry=carry))
    if machine.rank == 0:
        write_checkpoint(path, model, weights, s, data.tokenizer, iter=it, ranks=ranks,
                         words=it * data.words_per_step, text=data.size, **state)


# ---- One step -----------------------------------------------------------------------------------

def train_step(model, optimizer, s, machine, xs, ys, carry=None):
    """One optimiser step on this process's micro-batches -> its mean loss and auxiliary values, and
    the gradient norm. `carry` (ModuleFormer's memory): a cache for each micro-batch, in which the
    model finds the keys and values of the text before, and leaves those of this one."""
    mean = {}
    optimizer.zero_grad(set_to_none=True)
    for a, (x, y) in enumerate(zip(xs, ys)):
        if machine.world > 1:                            # add up gradients once, at the end
            model.require_backward_grad_sync = a == len(xs) - 1
        with machine.autocast():
            _, loss, aux = model(x, y, cache=carry[a]) if carry else model(x, y)
        if not s.aux_weights.keys() <= aux.keys():
            raise UserError(f'aux_weights names {[*s.aux_weights]}, but {s.model} returns {[*aux]}')
        objective = loss + sum(weight * aux[name] for name, weight in s.aux_weights.items())
        (objective / len(xs)).backward()
        for name, value in dict(aux, loss=loss).items():
            mean[name] = mean.get(name, 0.0) + value.detach() / len(xs)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
    optimizer.step()
    return mean, norm.full_tensor() if hasattr(norm, 'full_tensor') else norm    # of a sharded one


def fast_step(model, optimizer, s, machine, steps):
    """train_step as a function of x, y and carry, as fast as settings and machine allow: compiled,
    as a CUDA graph, in several processes. steps: of the whole run, also of a resumed one, so that
    it computes what it did before."""
    is_sharded = s.shard and machine.world > 1           # its hooks cannot be compiled
    by_default = machine.cuda and steps >= 200           # compiling takes half a minute
    if not is_sharded and (by_default if s.compile is None else s.compile):
        model = compile_model(model, s.checkpoint_activations)
    if machine.world > 1 and not is_sharded:             # copies that add up their gradients
        model = torch.nn.parallel.DistributedDataParallel(model)
    step = functools.partial(train_step, model, optimizer, s, machine)
    if s.stream or s.checkpoint_activations or is_sharded:       # a graph needs tensors that stay
        return step
    return CUDAGraphStep(step, machine, wanted=s.graph)


# ---- Optimiser and schedule ---------------------------------------------------------------------

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
    ckpt = find_run(out, s, keys, machine)               # what --resume continues, or None
    data, model = start(s, module, keys, ckpt, machine)
    it = ckpt['iter'] if ckpt else 0
    steps = data.steps() if s.max_iters is None else s.max_iters
    show_plan(model, data, it, steps, s, machine)
    if s.max_iters == 0:                                 # the plan was all
        return
    if data.T > model.config.block_size and context_limit(model.eval()):
        raise UserError(f'{s.model} reads no more than its block_size: lower seq_len')

    # optimiser, random state, compiled step
    model.to(machine.device).train()
    widen(model, machine)
    if s.checkpoint_activations:
        recompute_blocks(model)
    is_sharded = s.shard and machine.world > 1
    if is_sharded:
        shard(model, machine)
    optimizer = make_optimizer(model, s, machine)
    if is_sharded:
        shard_optimizer(optimizer)
    torch.manual_seed(s.seed + 1 + machine.rank)         # dropout differs between processes
    remembers = s.stream and getattr(model.config, 'memory', 0)
    carry = []                          # a cache per micro-batch, of the text before it
    if ckpt:
        today = optimizer.state_dict()['param_groups']   # the moments are old, the settings today's
        optimizer.load_state_dict(dict(ckpt['optimizer'], param_groups=today))
        state = ckpt['ranks'][machine.rank]
        machine.set_random_state(state['random'])
        carry = [[tuple(map(machine.send, keys)) for keys in cache]
                 for cache in state['carry']]
    step = fast_step(model, optimizer, s, machine, steps)

    # the run's folder
    log = Log(out, machine, ckpt, s.overwrite)
    if machine.rank == 0:
        copy_tokenizer(data.folder, out)
        if not ckpt:
            copy_model(s.model, out)
    log.write(it, run=describe(model, data, steps, s, machine))
    resumed_at = it if ckpt else None
    del ckpt                                             # the moments of a large model are in there

    bar = tqdm(total=steps, initial=it, smoothing=0, unit='step',
               disable=None if machine.rank == 0 else True)      # None: without a terminal
    timed, clock = it, time.perf_counter()               # tokens/s count from this step on
    mean, norm = {}, None
    with caught_signals() as caught:
        while True:
            # evaluate and save, if due; a resumed run did so before it stopped
            is_last = it >= steps
            if it != resumed_at:
                if is_last or it % s.eval_interval == 0:
                    log.write(it, **evaluate(model, data, it, s, machine))
                    timed, clock = it, time.perf_counter()
                must_stop = not is_last and asked_to_stop(caught, it, s, machine)
                if is_last or must_stop or (it and it % s.save_interval == 0):
                    check_finite(mean, norm, it, out)
                    save(out / 'ckpt.pt', it, model, data, s, machine, carry=carry,
                         optimizer=optimizer.state_dict(), log=log.place())
                    timed, clock = it, time.perf_counter()
                if must_stop:
                    machine.say(f'stopped at step {it:,}; to continue, add --resume to the command')
                    machine.close()
                    sys.exit(128 + (caught or [signal.SIGTERM])[0])
            if is_last:
                break

            # one step
            lr = learning_rate(it, s, steps)
            set_rate(optimizer, lr)
            if hasattr(model, 'set_progress'):           # what a model changes during training
                model.set_progress(it / steps)
            inputs = data.windows(it)
            if remembers:
                if data.begins(it):
                    carry = [[] for _ in range(s.gradient_accumulation_steps)]
                inputs += (carry,)
            mean, norm = step(*inputs)
            it += 1
            bar.update()

            # log, and keep the weights at given word counts
            if it % s.log_interval == 0 or it >= steps:
                check_finite(mean, norm, it, out)
                values = {name: machine.mean(value) for name, value in mean.items()}
                rate = (it - timed) * data.rows * data.T / (time.perf_counter() - clock)
                timed, clock = it, time.perf_counter()
                log.write(it, **values, lr=lr, grad_norm=norm.item(), tokens_per_s=round(rate),
                          words=round(it * data.words_per_step))
                speed = f'{human(rate)} {data.noun}/s{machine.memory()}'
                bar.set_postfix_str(f"loss {values['loss']:.3f}, {speed}")
                if bar.disable and it % (10 * s.log_interval) == 0:  # no terminal: a line at times
                    machine.say(f"step {it:6,}  loss {values['loss']:.4f}, {speed}")
            for words in s.checkpoint_words:
                if it == int(words / data.words_per_step):
                    check_finite(mean, norm, it, out)
                    save(out / f'ckpt_{human(words)}.pt', it, model, data, s, machine)
    bar.close()
    if s.sample_tokens:
        show_sample(model, data, s, machine)
    else:
        machine.say(f'saved     {out}/ckpt.pt')


def asked_to_stop(caught, it, s, machine):
    """Several processes must agree: they ask each other only where they wait anyway."""
    if machine.world > 1 and it % s.log_interval:
        return False
    return any(machine.gather(bool(caught)))


def check_finite(mean, norm, it, out):
    if norm is not None and not math.isfinite(mean['loss'] + norm):
        raise UserError(f'the loss or its gradient is not finite at step {it}; {out}/ckpt.pt, if '
                        'there is one, is good: try a lower learning_rate; if the first val loss '
                        'is nan too, python -m tools.check says more')


if __name__ == '__main__':
    run_main(main)
