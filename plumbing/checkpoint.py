"""
A run's folder: its log, its checkpoints, what may be resumed, and where a model starts.

ckpt.pt holds everything that going on needs: weights, optimiser, place in the data, random states,
segment memory. ckpt_<words>.pt hold weights only. log.jsonl has one JSON object per line.
"""

import difflib
import importlib
import inspect
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch

from plumbing.cli import UserError
from plumbing.settings import import_model, make_config
from plumbing.tokenizer import copy_tokenizer, load_tokenizer


# ---- Reading a checkpoint -----------------------------------------------------------------------


def read_checkpoint(path):
    """The dictionary that a run saved; path is the run's folder or one of its .pt files."""
    path = Path(path)
    file = path if path.suffix == '.pt' else path / 'ckpt.pt'
    if not file.exists():
        raise UserError(f'there is no checkpoint {file}{checkpoint_hint(file.parent)}')
    try:
        ckpt = torch.load(file, map_location='cpu', weights_only=True)
        needed = {'model', 'config', 'settings', 'iter', 'tokenizer', 'weights', 'words'}
        if not needed <= ckpt.keys():
            raise KeyError
        return {**ckpt, 'folder': str(file.parent)}
    except Exception:
        hint = 'another of its folder may be, or train it again with --overwrite'
        raise UserError(f'{file} is not a whole checkpoint of this project '
                        f'(truncated, or another format); {hint}') from None


def checkpoint_hint(folder):
    there = sorted(p.name for p in folder.glob('ckpt*.pt'))
    if there:
        return f"; there are {', '.join(there)}"
    config = Path('config', f"{folder.as_posix().removeprefix('out/')}.py")
    return f'; train it first, as with: python train.py {config}' if config.exists() else ''


def build_model(ckpt, **changes):
    """The model of a checkpoint, with its weights and, if it has any, its adapters."""
    module = import_model(ckpt['model'])
    model = module.Model(make_config(module, {**ckpt['config'], **changes}))
    for name, args in ckpt.get('adapted', []):           # of which the config knows nothing
        if name != 'lora.add_lora':                      # a file runs no function of its choice
            raise UserError(f"{ckpt['folder']}: {name} is no adapter of this project")
        model = find_surgery(name, module)(model, **args)
    try:
        model.load_state_dict(ckpt['weights'])
    except RuntimeError:
        had = ckpt['config']
        changed = [k for k, v in changes.items() if v != had.get(k)]
        listed = [f'{k} = {changes[k]!r} (it has {had.get(k)!r})' for k in changed]
        other = ', '.join(listed) or 'its own config'
        raise UserError(f"{ckpt['folder']}: its weights do not fit "
                        f"{ckpt['model']}.py with {other}") from None
    return model


def load_checkpoint(path, device='cpu'):
    """-> (model in eval mode, the checkpoint's dictionary). For sample.py and the other tools."""
    ckpt = read_checkpoint(path)
    return build_model(ckpt).to(device).eval(), ckpt


def run_tokenizer(ckpt):
    """The tokenizer that lies beside a checkpoint."""
    tokenizer = load_tokenizer(ckpt['folder'])
    if tokenizer.hash != ckpt['tokenizer']:
        raise UserError(f"{ckpt['folder']} was trained with another tokenizer than lies beside it")
    return tokenizer


def data_folder(ckpt):
    """The data set that a run was trained on, the first of several."""
    used = ckpt['settings']['data']
    name = used if isinstance(used, str) else next(iter(used))
    return Path(ckpt['settings']['data_dir'], name)


# ---- Where a model starts -----------------------------------------------------------------------


def start_model(s, module, model_keys, corpus):
    """-> a fresh model, another run's, or what a surgery makes of other runs'; and its report."""
    if not s.init_from:
        if s.surgery:
            raise UserError(f"surgery '{s.surgery}' needs a trained model: set init_from")
        return module.Model(make_config(module, model_keys)), None
    paths = [s.init_from] if isinstance(s.init_from, str) else s.init_from
    ckpts = [read_checkpoint(path) for path in paths]
    operate = find_surgery(s.surgery, module) if s.surgery else None
    for ckpt in ckpts:
        check_start(ckpt, s, operate, corpus)
    if operate:
        return run_surgery(operate, ckpts, s, module, model_keys, corpus)
    if len(ckpts) > 1:
        raise UserError('init_from names several runs: set the surgery that joins them')
    model = build_model(ckpts[0], **model_keys)
    freeze(model, ckpts[0])
    return model, None


def check_start(ckpt, s, operate, corpus):
    """Whether a run can start from this checkpoint."""
    home = inspect.getmodule(operate)   # the surgery's file: a model's own, or one for all, as lora
    is_own = hasattr(home, 'Model') and home.Model.__module__ == home.__name__
    if is_own and ckpt['model'] != home.__name__:
        raise UserError(f"{s.surgery} rebuilds models of {home.__name__}.py, "
                        f"but {ckpt['folder']} holds one of {ckpt['model']}.py")
    if ckpt['model'] != s.model:
        raise UserError(f"{ckpt['folder']} holds a model of {ckpt['model']}.py, "
                        f"but this run trains {s.model}.py: add --model={ckpt['model']}")
    if ckpt['tokenizer'] != corpus.hash:
        raise UserError(f"{ckpt['folder']} was trained with another tokenizer than this data has")


def find_surgery(surgery, module):
    """A function by its name in the model's own file, or by file.name."""
    file, _, name = surgery.rpartition('.')
    try:
        module = importlib.import_module(file) if file else module
        if inspect.isfunction(getattr(module, name)):
            return getattr(module, name)
        raise AttributeError
    except (ImportError, AttributeError):
        names = vars(module) if file in ('', module.__name__) else ()
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ''
        home = file or module.__name__
        raise UserError(f"there is no surgery '{surgery}': "
                        f'{home}.py has no function {name}{hint}') from None


def run_surgery(operate, ckpts, s, module, model_keys, corpus):
    """-> the model that the surgery makes of the checkpoints, and its report if it gives one."""
    configs = [ckpt['config'] for ckpt in ckpts]
    other = [key for key, value in model_keys.items() if any(c.get(key) != value for c in configs)]
    if other:
        raise UserError("with a surgery the model's settings come from init_from and surgery_args; "
                        f"remove {', '.join(other)}")
    if s.surgery != 'lora.merge_lora' and any(ckpt.get('adapted') for ckpt in ckpts):
        raise UserError(f'surgery {s.surgery}: the model has adapters; '
                        'merge them first, with --surgery=lora.merge_lora')
    models = [build_model(ckpt).to(corpus.machine.device).eval() for ckpt in ckpts]
    several = isinstance(s.init_from, list)
    args = dict(s.surgery_args)
    if 'batches' in inspect.signature(operate).parameters:
        args['batches'] = corpus.calibration(s.seq_len or models[0].config.block_size)
    try:
        result = operate(models if several else models[0], **args)
    except (AttributeError, TypeError, ValueError) as e:
        hint = ''
        if isinstance(e, AttributeError) and several:
            hint = ' (init_from is a list; this surgery may want one run)'
        raise UserError(f'surgery {s.surgery}: {e}{hint}') from None
    model, report = result if isinstance(result, tuple) else (result, None)
    if not isinstance(model, module.Model):
        raise UserError(f'surgery {s.surgery}: it does not return a model')
    return model, report


def freeze(model, ckpt):
    """What a run's surgery froze stays frozen when the run goes on, or another starts from it."""
    for name, p in model.named_parameters():
        if name in ckpt.get('frozen', []):
            p.requires_grad_(False)


# ---- Resuming -----------------------------------------------------------------------------------


def check_resume(ckpt, s, model_keys, corpus, machine):
    """A resumed run keeps model, tokenizer and data. Other settings may change, and are told."""
    if ckpt['model'] != s.model:
        raise UserError(f"{s.out_dir} holds a model of {ckpt['model']}.py, "
                        f'but this config trains {s.model}.py')
    if ckpt['tokenizer'] != corpus.hash:
        raise UserError(f'{s.out_dir} was trained with another tokenizer than this data has')
    if 'optimizer' not in ckpt:
        raise UserError(f'{s.out_dir}/ckpt.pt holds weights only; '
                        'start a new run from it with --init_from')
    for key, value in model_keys.items():
        has = ckpt['config'].get(key)
        if has != value and not s.surgery:               # a surgery may have changed it
            raise UserError(f'{s.out_dir} was trained with {key} = {has!r}, not {value!r}: '
                            'resume with the same model, or set another --out_dir')
    fixed = {'data', 'seq_len', 'stride', 'stream', 'memory', 'epoch_words', 'seed'}  # data order
    if s.stream:
        fixed |= {'batch_size', 'gradient_accumulation_steps'}
    for key, value in asdict(s).items():
        before = ckpt['settings'].get(key)
        if before == value or key in ('resume', 'overwrite'):
            continue
        if key in fixed:
            raise UserError(f'{s.out_dir} reads its data with {key} = {before!r}, not {value!r}: '
                            'resume with the same, or start a new run from it with --init_from')
        if key in ('init_from', 'surgery', 'surgery_args'):
            raise UserError(f'{s.out_dir} started with {key} = {before!r}, not {value!r}: '
                            'resume with the same')
        machine.say(f'resume    {key} was {before!r}, is now {value!r}')
    processes = len(ckpt['ranks'])
    if processes != machine.world:
        if s.stream:
            raise UserError(f'{s.out_dir} was trained by {processes} processes; its streams need as many')
        machine.say(f'resume    there were {processes} processes, there are now {machine.world}')


# ---- The folder ---------------------------------------------------------------------------------


class RunFolder:
    """out/<run>. Only the first process writes; another run cannot write at the same time."""

    def __init__(self, s, machine):
        self.s = s
        self.machine = machine
        self.path = Path(s.out_dir)

    def find(self):
        """The checkpoint that --resume goes on from, or None. No run is overwritten silently."""
        s, ckpt = self.s, None
        writes = s.max_iters != 0 or s.surgery
        if writes and not s.overwrite and any(self.path.glob('ckpt*.pt')):
            if not s.resume:
                raise UserError(f'{self.path} holds a run already: add --resume to go on with it, '
                                '--overwrite to start anew, or choose another --out_dir')
            if (self.path / 'ckpt.pt').exists():
                ckpt = read_checkpoint(self.path)
        if s.resume and not ckpt:
            self.machine.say(f'resume    {self.path} holds no checkpoint: from the beginning')
        return ckpt

    def open(self, corpus, ckpt):
        """Make the folder, or cut the log of the one that is there back to the checkpoint."""
        if self.machine.rank > 0:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.log_file = open(self.path / 'log.jsonl', 'a', encoding='utf-8')
        lock(self.log_file)
        for old in self.path.glob('ckpt*' if self.s.overwrite else 'ckpt*.tmp'):
            old.unlink()
        copy_tokenizer(corpus.folder, self.path)
        whole = ckpt['log_bytes'] if ckpt else 0
        if self.log_file.tell() < whole:
            self.machine.say(f'resume    {self.log_file.name} has lost lines since the checkpoint was saved')
        self.log_file.truncate(min(self.log_file.tell(), whole))

    def log(self, it, **record):
        if self.machine.rank == 0:
            self.log_file.write(json.dumps(dict(iter=it, **record)) + '\n')
            self.log_file.flush()

    def save(self, it, model, data, corpus, optimizer=None, memory=(), name='ckpt.pt'):
        """With the optimiser: all that going on needs, random states included. Without: weights."""
        ranks = []
        if optimizer:
            memory = [[(k.cpu().clone(), v.cpu().clone()) for k, v in m] for m in memory]
            ranks = self.machine.gather(dict(random=self.machine.random_state(), memory=memory))
        if self.machine.rank > 0:
            return
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        state = dict(model=self.s.model, config=asdict(model.config), settings=asdict(self.s),
                     iter=it, tokenizer=corpus.hash, weights=model.state_dict(), words=data.words,
                     adapted=getattr(model, 'adapted', []), frozen=frozen)
        if optimizer:
            state.update(optimizer=optimizer.state_dict(), data=data.state(), ranks=ranks,
                         log_bytes=self.log_file.tell())
        save_file(state, self.path / name)

    def restore(self, ckpt, optimizer, data, memory):
        """Put back what the checkpoint holds besides the weights -> the step to go on from."""
        machine = self.machine
        now = [{k: v for k, v in g.items() if k != 'params'} for g in optimizer.param_groups]
        optimizer.load_state_dict(ckpt['optimizer'])
        for group, settings in zip(optimizer.param_groups, now):
            group.update(settings)      # the moments are the checkpoint's, the settings today's
        data.load_state(ckpt['data'])
        if machine.rank < len(ckpt['ranks']):
            mine = ckpt['ranks'][machine.rank]
            machine.set_random_state(mine['random'])
            to_device = lambda pair: tuple(x.to(machine.device) for x in pair)
            memory[:] = [[to_device(pair) for pair in layers] for layers in mine['memory']]
        else:                                            # a process that was not there before
            torch.manual_seed(self.s.seed + 1 + machine.rank + ckpt['iter'])
        return ckpt['iter']


def lock(file):
    """For one process at a time, until it ends. Some systems have no such locks."""
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f'{file.name} is being written by another run: wait for it, '
                        'or set another --out_dir') from None
    except (ImportError, OSError):
        pass


def save_file(state, path):
    """Whole or not at all: a kill at any moment leaves the old file or the new one."""
    temporary = path.with_suffix('.tmp')
    try:
        with open(temporary, 'wb') as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:
        temporary.unlink(missing_ok=True)
        raise UserError(f'{path} could not be written ({e}); what was saved before is whole') from None
