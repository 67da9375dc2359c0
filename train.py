"""
Train any model of this repository: one plain loop.

    python train.py config/moep.py                      # the toy corpus, minutes on a laptop
    python train.py config/moep.py --n_block=8 --out_dir=out/p8  # any setting of training or model
    python train.py config/moep.py --resume             # resume after a kill (bit for bit on a CPU)
    python train.py config/moep.py --max_iters=0        # print sizes and plan, train nothing
    torchrun --nproc_per_node=2 train.py config/moep.py          # several processes (large models: --shard)

A config is a file of plain assignments, which `--key=value` overrides. A key belongs to `Settings`
(plumbing/settings.py) or to the model's own config. The loop knows no model by name: it imports the
file that `model` names, for Config, Model, forward(idx, targets) -> (logits, loss, aux), features,
generate, routes and count_params (set_dropout(p) and config.byte_limit are optional). `aux` holds
unweighted auxiliary losses by name, and other values to log; `aux_weights` says which are added to
the loss.

A run's folder holds ckpt.pt (everything needed to resume), ckpt_<words>.pt (weights at given word
counts), log.jsonl (one JSON object per line) and a copy of the tokenizer.
"""

import math
import signal
import sys
import time

import torch
from tqdm import tqdm

import prepare
from plumbing.checkpoint import build_model, check_start, freeze, is_finite, start_model
from plumbing.cli import UserError, catch_signals, run_main, short
from plumbing.compiled import compile_model
from plumbing.data import Corpus, Data, named_sets, route_shares, score_batches
from plumbing.folder import RunFolder
from plumbing.machine import Machine, Replay
from plumbing.muon import Muon, split_groups
from plumbing.plan import check_model, describe, set_vocabulary, show_plan, show_sample, show_size_only
from plumbing.settings import read_settings
from plumbing.shard import shard_and_recompute, sync_gradients, whole_tensor


# ---- One step -----------------------------------------------------------------------------------

def train_step(model, optimizer, data, starts, memory, s, machine):
    """One optimiser step. `starts` holds the windows of all processes; micro-batches are dealt out in
    turn, so W processes with A micro-batches each see the same data as one process with W * A. `memory`
    (ModuleFormer; else None) holds the keys and values of each micro-batch's previous segment.
    Returns this process's mean loss and auxiliary values, and the global gradient norm."""
    accumulate = s.gradient_accumulation_steps
    mean = {}
    optimizer.zero_grad(set_to_none=True)
    for a in range(accumulate):
        m = a * machine.world + machine.rank
        x, y = data.batch(starts[m * s.batch_size:(m + 1) * s.batch_size])
        if machine.world > 1:
            sync_gradients(model, a == accumulate - 1)   # once, for all micro-batches
        with machine.autocast():
            _, loss, aux = model(x, y, cache=memory[a]) if s.memory else model(x, y)
        objective = loss + sum(weight * aux[name] for name, weight in s.aux_weights.items())
        (objective / accumulate).backward()
        if s.memory:                            # the next segment reads these keys and values
            recent = slice(-s.memory, None)
            memory[a] = [(k[:, :, recent].detach(), v[:, :, recent].detach()) for k, v in memory[a]]
        for name, value in dict(aux, loss=loss).items():
            mean[name] = mean.get(name, 0.0) + value.detach() / accumulate
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
    optimizer.step()
    return mean, whole_tensor(norm)


# ---- Optimiser and schedules -----------------------------------------------------------------------

def make_optimizer(model, s, machine):
    """AdamW or Muon. Only matrices get weight decay, not stacked vectors (named ...gain or ...bias)."""
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
    shapes = dict(constant=1, early=done < s.dropout_phase, late=done >= s.dropout_phase, linear=1 - done,
                  rising=done, triangle=1 - abs(2 * done - 1), triangles=1 - abs(8 * done % 2 - 1))
    return p * shapes[s.dropout_schedule]


# ---- The run ------------------------------------------------------------------------------------

def evaluate(model, corpus, data, it, machine):
    """Score every val set in eval mode, print a line for each, count routes -> what is logged."""
    scores = {}
    for name in corpus.scored:
        batches = corpus.val_batches(name, data.T, machine.rank, machine.world)
        scores[name] = v = score_batches(model, batches, corpus.token_lengths, machine)
        machine.say(f"step {it:6,}  {name}: val loss {v['loss']:.4f}, "
                    f"perplexity {v['perplexity']:.2f}, {v['bits_per_byte']:.4f} bits per byte")
    x, _ = next(corpus.val_batches(corpus.scored[0], data.T))
    return dict(words=round(data.words), val=scores, routes=route_shares(model, x, machine))


def main():
    s, module, model_keys = read_settings(sys.argv[1:], __doc__)
    machine = Machine(s.device, s.dtype)
    folder = RunFolder(s, machine)
    ckpt = folder.find(model_keys)                       # what --resume continues, or None

    # data
    ranges, scored = named_sets(s)
    if machine.rank == 0:
        prepare.make_missing_toys([*ranges, *scored], s.data_dir)
    machine.wait()
    try:
        corpus = Corpus(s, machine)
    except UserError as e:
        if show_size_only(module, model_keys, s, machine, why_no_data=e):
            return machine.close()
        raise
    if not (ckpt or s.init_from):
        set_vocabulary(module, model_keys, corpus)
    if show_size_only(module, model_keys, s, machine):
        return machine.close()

    # model
    torch.manual_seed(s.seed)
    report = None
    if ckpt:
        check_start(ckpt, s, corpus)
        model = freeze(build_model(ckpt, machine.device), ckpt)
        del ckpt['weights']             # otherwise each process would hold them twice
    else:
        model, report = start_model(s, module, model_keys, corpus)
    model.to(machine.device)
    data = Data(s, corpus, s.seq_len or model.config.block_size, machine)
    resumed = bool(ckpt)
    it = ckpt['iter'] if resumed else 0
    if resumed:
        data.load_state(ckpt['data'])
    schedule_steps, last_step = data.plan(it)            # they differ if the batch size was changed
    show_plan(model, s, corpus, data, machine, last_step, ckpt)
    check_model(model, s, data, machine)
    if s.max_iters == 0:
        if not s.surgery:               # only the plan was asked for
            return machine.close()
        last_step = 0

    # optimiser, and the rest of the run's state
    shard_and_recompute(model, s, machine)
    optimizer = make_optimizer(model, s, machine)
    memories = {}                       # with --memory: {data set: keys and values per micro-batch}
    memory = None                       # of the data set that is read now
    health = torch.zeros((), device=machine.device)      # nan once a loss or gradient is not finite
    torch.manual_seed(s.seed + 1 + machine.rank)         # dropout differs between processes
    folder.open(corpus, ckpt)
    if resumed:
        folder.restore(ckpt, model, optimizer, memories)
    folder.log(it, run=describe(model, s, data, machine, last_step))
    if report:
        machine.say(str(report))
        folder.log(it, surgery=report)

    if s.dropout_schedule != 'constant':
        model.set_dropout(0.0)          # makes the rate a tensor: changing it recompiles nothing
    left = last_step - it
    by_default = machine.cuda and left >= 200            # compiling takes half a minute
    compiles = by_default if s.compile is None else s.compile
    whole = left >= 50_000      # compiling the model as a whole takes longer, and pays only in a long run
    trained = compile_model(model, whole) if compiles else model
    if machine.world > 1 and not s.shard:                # copies that add up their gradients
        trained = torch.nn.parallel.DistributedDataParallel(trained)
    take_step = lambda starts: train_step(trained, optimizer, data, starts, memory, s, machine)
    # a CUDA graph, if possible; not with memory, whose tensors are new in each step
    step = Replay(take_step, machine, wanted=s.graph and not s.memory)
    if compiles and machine.cuda:
        machine.say('compile   the first step takes up to half a minute')

    caught = catch_signals()

    def due(interval):
        return it % interval == 0 or it >= last_step

    def check_health(weights=True):
        """Stop if a loss, a gradient or a weight is not finite."""
        if health.item() != 0 or weights and not is_finite(model):
            folder.give_up(it)

    def save(name='ckpt.pt', resumable=True):
        check_health()
        folder.save(it, model, data, corpus, optimizer if resumable else None, memories, name)

    def asked_to_stop():
        """Several processes must agree: they ask each other only where they wait anyway."""
        if machine.world > 1 and not due(s.log_interval):
            return False
        return any(machine.gather(caught))

    pending = [words for words in sorted(s.checkpoint_words) if words > data.words]
    hidden = None if machine.rank == 0 else True         # None: hidden unless there is a terminal
    bar = tqdm(total=last_step, initial=it, smoothing=0, unit='step', disable=hidden)
    tokens, clock = 0, time.perf_counter()
    skip_eval = resumed                 # ckpt.pt was saved after this step's evaluation
    while True:
        # evaluate and save, if due
        if not skip_eval and (due(s.eval_interval) or due(s.save_interval)):
            if due(s.eval_interval):
                check_health()
                folder.log(it, **evaluate(model, corpus, data, it, machine))
            if due(s.save_interval) and (it or s.surgery):
                save()
            tokens, clock = 0, time.perf_counter()
        skip_eval = False
        if it >= last_step:
            break
        if asked_to_stop():
            save()
            bar.close()
            how = '--resume --overwrite=False' if s.overwrite else '--resume'
            machine.say(f'stopped at step {it:,}; to continue, run the same command with {how}')
            machine.close()
            sys.exit(128 + (caught or [signal.SIGTERM])[0])

        # one step; if the run's length is in epochs, schedules follow the windows read, not the steps
        progress = it if s.max_iters else data.seen / data.unit
        lr = learning_rate(progress, s, schedule_steps)
        set_rate(optimizer, lr)
        scheduled = dict(lr=lr)
        if hasattr(model, 'set_dropout'):
            scheduled['dropout'] = dropout_rate(progress, s, schedule_steps, model.config.dropout)
        if s.dropout_schedule != 'constant':
            model.set_dropout(scheduled['dropout'])
        if s.memory:
            part, begins = data.next_set()
            if begins:                                   # no text came before
                memories[part] = [[] for _ in range(s.gradient_accumulation_steps)]
            memory = memories[part]
        mean, norm = step(data.next_starts())
        health += 0 * (mean['loss'] + norm)  # 0 * inf and 0 * nan are nan; this does not wait for the device
        it += 1
        tokens += data.rows * data.T

        # log
        if due(s.log_interval):
            check_health(weights=False)
            values = {name: machine.sum(v.clone()).item() / machine.world for name, v in mean.items()}
            rate = tokens / (time.perf_counter() - clock)
            tokens, clock = 0, time.perf_counter()
            folder.log(it, **values, **scheduled, grad_norm=norm.item(), tokens_per_s=round(rate),
                       epoch=data.epoch, windows=data.seen, words=round(data.words))
            bar.set_postfix_str(f"loss {values['loss']:.3f}, {short(rate)} {data.noun}/s")
            if bar.disable and due(10 * s.log_interval):         # no terminal: a line now and then
                machine.say(f"step {it:6,}  loss {values['loss']:.4f}, {short(rate)} {data.noun}/s")
        slack = data.words / it if it >= last_step else 0        # one step: the last may not be full
        while pending and data.words + slack >= pending[0]:
            save(f'ckpt_{short(pending.pop(0))}.pt', resumable=False)
        bar.update()
    bar.close()
    if pending and left > 0:            # else it was said when the run ended
        machine.say(f'note      the run ends at {short(data.words)} words: there is no checkpoint '
                    f"for {', '.join(map(short, pending))}")
    if last_step and s.sample_tokens:
        show_sample(model, s, corpus, machine)
    else:
        machine.say(f'saved     {s.out_dir}/ckpt.pt')
    machine.close()


if __name__ == '__main__':
    run_main(main)
