"""A run's folder (docs/training.md says what is in it), and what may be resumed."""

import contextlib
import json
import secrets
import time
from dataclasses import asdict
from pathlib import Path

import torch

from plumbing.checkpoint import named_shards, read_checkpoint, unpickle
from plumbing.cli import UserError, lock, new_file, parse_json
from plumbing.shard import is_sharded, rows_like, shard_files, split_tree
from plumbing.tokenizer import copy_tokenizer


# ---- Resuming -----------------------------------------------------------------------------------

def check_resume(ckpt, s, model_keys, machine):
    """A resumed run keeps its model and data. Other settings may change, and are printed."""
    if 'optimizer' not in ckpt:
        raise UserError(f'{s.out_dir}/ckpt.pt holds weights only; start a new run from it with --init_from')
    if s.surgery:
        model_keys = {}                                  # it may have changed them
    fixed = {'model', 'data', 'seq_len', 'stride', 'stream', 'memory', 'epoch_words', 'seed',
             'init_from', 'surgery', 'surgery_args', 'optimizer', *model_keys}
    if s.stream:
        fixed.add('batch_size')
    old = ckpt['config'] | ckpt['settings']
    for key, value in (asdict(s) | model_keys).items():
        before = old.get(key)
        reordered = key == 'data' and [*before] != [*value]      # another text, end to end
        if before == value and not reordered or key in ('resume', 'overwrite'):
            continue
        if key in fixed:
            raise UserError(f'{s.out_dir} was trained with {key} = {before!r}, not {value!r}: '
                            'resume with the same, or start a new run with --out_dir and --init_from')
        machine.say(f'resume    {key} was {before!r}, is now {value!r}')
    processes = len(ckpt['ranks'])
    if processes != machine.world:
        machine.say(f'resume    there were {processes} processes, there are now {machine.world}')
    micro = old['gradient_accumulation_steps'] * processes
    if s.stream and micro != s.gradient_accumulation_steps * machine.world:
        raise UserError(f'{s.out_dir} reads {micro} micro-batches of streams per step: keep '
                        'gradient_accumulation_steps x processes')


# ---- The folder ---------------------------------------------------------------------------------

class RunFolder:
    """out/<run>. Only the first process writes; another run cannot write at the same time."""

    def __init__(self, s, machine):
        self.s = s
        self.machine = machine
        self.path = Path(s.out_dir)
        self.began = time.monotonic()                    # or earlier, if the run is resumed

    def find(self, model_keys):
        """The checkpoint that --resume continues, or None. No run is overwritten silently."""
        s = self.s
        log = self.path / 'log.jsonl'
        will_save = s.max_iters != 0 or s.surgery
        if will_save and not (s.resume or s.overwrite):
            if any(self.path.glob('ckpt*.pt')):
                raise UserError(f'{self.path} already holds a run: add --resume to continue it, '
                                '--overwrite to start over, or set another --out_dir')
            if log.is_file() and log.stat().st_size > 0:
                raise UserError(f'{log} is the log of a run that has no checkpoint: '
                                'add --overwrite to start over, or set another --out_dir')
        is_there = s.resume and (self.path / 'ckpt.pt').exists()
        ckpt = read_checkpoint(self.path) if is_there else None
        found = ckpt and (ckpt['iter'], ckpt['token'], ckpt.get('seconds'))
        if len({*self.machine.gather(found)}) > 1:
            self.machine.fail_all(f'the processes do not find the same checkpoint in {self.path}: '
                                  'it must be on a file system shared by all machines')
        if ckpt:
            check_resume(ckpt, s, model_keys, self.machine)
        elif s.resume:
            self.machine.say(f'resume    nothing to resume in {self.path}: a new run and log begin')
        return ckpt

    def open(self, corpus, ckpt):
        """Make the folder, or cut the log of the one that is there back to the checkpoint."""
        if self.machine.rank > 0:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        log = self.path / 'log.jsonl'
        if log.exists() and not log.is_file():           # a pipe would wait forever
            raise UserError(f'{log} is not a file; set another --out_dir')
        self.log_file = open(log, 'a', encoding='utf-8')
        if not lock(self.log_file):
            raise UserError(f'{log} is being written by another run: wait for it, '
                            'or set another --out_dir')
        stale = ['ckpt*.pt.tmp', 'meta.json.tmp', 'tokenizer.*.tmp', 'shards/*.tmp']
        if self.s.overwrite:                             # else only what a killed run left
            stale += ['ckpt*.pt', 'shards/*.pt']
        for old in [path for pattern in stale for path in self.path.glob(pattern)]:
            old.unlink()
        self.remove_orphans()
        copy_tokenizer(corpus.folder, self.path)
        if not ckpt:
            self.log_file.truncate(0)
            return
        kept = log.read_bytes()[:ckpt['log_bytes']]
        whole = b''.join(line for line in kept.splitlines(keepends=True) if is_record(line))
        if len(whole) < ckpt['log_bytes']:
            self.machine.say(f'resume    {log} was damaged: it has lost lines since the checkpoint was saved')
        if whole != kept:
            self.log_file.truncate(0)
            self.log_file.buffer.write(whole)
        self.log_file.truncate(len(whole))

    def log(self, it, **record):
        if self.machine.rank == 0:
            seconds = time.monotonic() - self.began
            line = json.dumps(dict(iter=it, seconds=round(seconds, 3), **record), default=str)
            self.log_file.write(line + '\n')
            self.log_file.flush()

    def remove_orphans(self):
        """Parts that no checkpoint names: older ones, and what a kill or a full disk left."""
        parts = {*self.path.glob('shards/*.pt')}
        files = [*self.path.glob('ckpt*.pt')] if parts else []
        try:
            named = [part for file in files for part in named_shards(unpickle(file), file)]
        except Exception:                                # a broken checkpoint may name any of them
            return
        for part in parts.difference(named):
            part.unlink()

    def save(self, it, model, data, corpus, optimizer=None, memory=None, name='ckpt.pt'):
        """With the optimiser: everything needed to resume. Without: weights. Processes that share a
        model, or each have a memory of their own, write parts. checkpoint.FIELDS lists all."""
        machine = self.machine
        file = self.path / name
        tensors = dict(weights=model.state_dict())
        rank = {}
        if optimizer:
            tensors['optimizer'] = optimizer.state_dict()
            kept = {part: move(layers, 'cpu') for part, layers in (memory or {}).items()}
            rank = dict(random=machine.random_state(), memory=kept)
        in_parts = any(map(is_sharded, tensors['weights'].values())) or rank.get('memory')
        token, parts, ranks = '', [], []
        if machine.world > 1 and in_parts:
            token = machine.gather(secrets.token_hex(4))[0]
            parts = shard_files(file, it, token, machine.world)
            self.save_part({**split_tree(tensors, sharded=True), 'rank': rank}, parts)
        else:
            ranks = machine.gather(rank)
        if machine.rank > 0:
            return
        frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
        state = dict(model=self.s.model, config=asdict(model.config), settings=asdict(self.s),
                     iter=it, tokenizer=corpus.hash, words=data.words, shards=len(parts), token=token,
                     adapted=getattr(model, 'adapted', []), frozen=frozen,
                     **split_tree(tensors, sharded=False))
        if optimizer:
            state.update(data=data.state(), ranks=ranks, log_bytes=self.log_file.tell(),
                         seconds=time.monotonic() - self.began)
        try:
            save_file(state, file)
        finally:
            self.remove_orphans()

    def save_part(self, state, parts):
        """Every process writes its own. If one cannot, all end, and ckpt.pt stays the old one."""
        machine = self.machine
        mine = parts[machine.rank]
        error = None
        try:
            mine.parent.mkdir(exist_ok=True)
            save_file(state, mine)
        except (OSError, UserError) as e:
            error = str(e)
        errors = [e for e in machine.gather(error) if e]
        if machine.rank == 0:
            errors += [f'{part} is not here: out_dir must be on a file system shared by all machines; '
                       'what was saved before is whole' for part in parts if not part.is_file()]
        if errors:
            mine.unlink(missing_ok=True)
            machine.fail_all(errors[0])

    def give_up(self, it):
        raise UserError(f'the loss, its gradient or a weight is not finite at step {it}; '
                        f'{self.path}/ckpt.pt, if one was saved, is good; try a lower '
                        'learning_rate, or look into the model if step 0 has a val loss of nan')

    def restore(self, ckpt, model, optimizer, memory):
        """Put back what the checkpoint holds besides the weights and the place in the data, and empty it:
        the moments of a large model are in there."""
        machine, s = self.machine, self.s
        try:
            self.began -= ckpt['seconds']
            load_optimizer(optimizer, ckpt['optimizer'])
            ranks = ckpt['ranks']
            for part in ranks[0]['memory']:              # micro-batches are dealt to processes in turn
                mine = range(machine.rank, s.gradient_accumulation_steps * machine.world, machine.world)
                dealt = [ranks[m % len(ranks)]['memory'][part][m // len(ranks)] for m in mine]
                memory[part] = move(dealt, machine.device)
                for layers in memory[part]:              # does it fit the model?
                    idx = torch.zeros(s.batch_size, 1, dtype=torch.long, device=machine.device)
                    with torch.no_grad(), machine.autocast():
                        model.eval()(idx, cache=list(layers))
            model.train()
            if machine.rank < len(ranks):
                machine.set_random_state(ranks[machine.rank]['random'])
            else:                                        # a process that was not there before
                torch.manual_seed(s.seed + 1 + machine.rank + ckpt['iter'])
            ckpt.clear()
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            raise UserError(f'{self.path}/ckpt.pt: its weights are whole, but the rest does not fit them; '
                            f'start a new run from them, with --init_from={self.path}') from None


def load_optimizer(optimizer, saved):
    """The moments are the checkpoint's, the settings today's. torch would load moments of any
    shape, and crash in the step."""
    now = [{k: v for k, v in group.items() if k != 'params'} for group in optimizer.param_groups]
    weights = [(p, group) for group in optimizer.param_groups for p in group['params']]
    state = {}
    for i, moments in saved['state'].items():
        p, group = weights[i]
        names = ('exp_avg',) if 'muon' in group else ('exp_avg', 'exp_avg_sq')
        state[i] = {name: rows_like(moments[name], p) for name in names}
        state[i]['step'] = moments['step'].clone().reshape(())
    optimizer.load_state_dict(dict(saved, state=state))
    for group, settings in zip(optimizer.param_groups, now):
        group.update(settings)


def move(memory, device):
    """A copy of keys and values, per micro-batch and layer, on this device."""
    return [[(k.to(device, copy=True), v.to(device, copy=True)) for k, v in layers] for layers in memory]


def is_record(line):
    """Whether a line of a log is whole."""
    with contextlib.suppress(ValueError):
        return line.endswith(b'\n') and isinstance(parse_json(line), dict)
    return False


def save_file(state, path):
    """Whole or not at all: a kill at any moment leaves the old file or the new one."""
    try:
        with new_file(path, 'wb') as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as e:
        reason = e if isinstance(e, OSError) else 'is the disk full?'
        raise UserError(f'{path} could not be written ({reason}); what was saved before is whole') from None
