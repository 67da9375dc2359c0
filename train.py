"""
Train any model of this repository: one plain loop.

    python train.py config/moep.py                                 # the toy corpus, minutes on a laptop
    python train.py config/moep.py --n_block=8 --out_dir=out/p8    # any setting, of training or of the model
    python train.py config/moep.py --resume                        # go on after a kill; on a CPU bit for bit
    python train.py config/moep.py --max_iters=0                   # print sizes and plan, train nothing
    torchrun --nproc_per_node=2 train.py config/moep.py            # several processes

A config is a file of plain assignments; `--key=value` comes after it and wins. A key belongs to `Settings` (settings.py)
or to the model's own config. The loop knows no model by name: it imports the file that `model` names and uses what
every model file offers: Config, Model, forward(idx, targets) -> (logits, loss, aux), generate, routes, count_params.
`aux` holds unweighted auxiliary losses by name; `aux_weights` says which of them are added to the loss.

A run folder holds ckpt.pt (everything that is needed to go on), ckpt_<words>.pt (weights at given word counts),
log.jsonl (one JSON object per line) and a copy of the tokenizer, so that it stands alone.
"""

import contextlib
import difflib
import importlib
import inspect
import json
import math
import os
import signal
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import prepare
from errors import UserError, run_main
from loader import Corpus, Data, val_batches
from machine import Machine, Replay
from settings import import_model, make_config, read_settings


# ---------------------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def score(model, batches, token_lengths, machine):
    """Loss per token, perplexity, and bits per byte: all costs, end-of-text's too, over the bytes of the text."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)           # nats, targets, bytes
    for x, y in batches:
        with machine.autocast():
            nats = model(x, y, reduction='none')[1]
        y = y.cpu()
        sums += torch.stack((nats.float().cpu().double().sum(), (y >= 0).sum(), token_lengths[y[y >= 0]].sum()))
    nats, targets, n_bytes = machine.sum(sums.to(machine.device) if machine.cuda else sums).tolist()
    model.train()
    loss = nats / targets
    return dict(loss=loss, perplexity=math.exp(min(loss, 700)), bits_per_byte=nats / math.log(2) / max(n_bytes, 1))


@torch.no_grad()
def route_shares(model, x, machine):
    """{layer: the share of the routed slots that went to each choice}. Where all get something, the share of the gates."""
    model.eval()
    with machine.autocast():
        gates = model.routes(x)
    model.train()
    counts = {name: (gate if gate.all() else gate != 0).flatten(0, 1).sum(0).cpu().double() for name, gate in gates.items()}
    return {name: [round(v, 4) for v in (count / count.sum()).tolist()] for name, count in counts.items()}


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints and where a model starts


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


def lock(file):
    """For one process at a time, until it ends; where the system has no such locks, for any."""
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f'{file.name} is being written by another run: wait for it, or set another --out_dir') from None
    except (ImportError, OSError):
        pass


def read_checkpoint(path):
    """The dictionary that a run saved; path is its folder or one of its .pt files."""
    path = Path(path)
    file = path / 'ckpt.pt' if path.suffix != '.pt' else path
    if not file.exists():
        config = Path('config', f"{file.parent.as_posix().removeprefix('out/')}.py")
        there = sorted(p.name for p in file.parent.glob('ckpt*.pt'))
        hint = f"; there are {', '.join(there)}" if there else f'; train it first, as with: python train.py {config}' if config.exists() else ''
        raise UserError(f'there is no checkpoint {file}{hint}')
    try:
        ckpt = torch.load(file, map_location='cpu', weights_only=True)
        if not {'model', 'config', 'settings', 'iter', 'tokenizer', 'weights', 'words'} <= ckpt.keys():
            raise KeyError
        return {**ckpt, 'folder': str(file.parent)}
    except Exception:
        raise UserError(f'{file} is not a whole checkpoint of this project (truncated, or another format); another of its folder may be, '
                        'or train it again with --overwrite') from None


def build(ckpt, **changes):
    """The model of a checkpoint, with its weights and, if it has any, its adapters."""
    module = import_model(ckpt['model'])
    model = module.Model(make_config(module, {**ckpt['config'], **changes}))
    for name, args in ckpt.get('adapted', []):           # as lora.add_lora, which the config does not tell of
        model = find_surgery(name, module)(model, **args)
    try:
        model.load_state_dict(ckpt['weights'])
    except RuntimeError:
        other = ', '.join(f"{k} = {v!r} (it has {ckpt['config'].get(k)!r})" for k, v in changes.items() if v != ckpt['config'].get(k))
        raise UserError(f"{ckpt['folder']}: its weights do not fit {ckpt['model']}.py with {other or 'its own config'}") from None
    return model


def freeze(model, ckpt):
    """What the surgery of a run has frozen stays frozen when it goes on, or another run starts from it."""
    for name, p in model.named_parameters():
        if name in ckpt.get('frozen', []):
            p.requires_grad_(False)
    return model


def load_checkpoint(path, device='cpu'):
    """-> (model in eval mode, the checkpoint's dictionary). What sample.py and the other tools use."""
    ckpt = read_checkpoint(path)
    return build(ckpt).to(device).eval(), ckpt


def find_surgery(surgery, module):
    """A function by its name in the model's own file, or by file.name."""
    file, _, name = surgery.rpartition('.')
    try:
        module = importlib.import_module(file) if file else module
        if inspect.isfunction(getattr(module, name)):
            return getattr(module, name)
        raise AttributeError
    except (ImportError, AttributeError):
        near = difflib.get_close_matches(name, vars(module), 1) if not file or file == module.__name__ else []
        hint = f"; did you mean '{near[0]}'?" if near else ''
        raise UserError(f"there is no surgery '{surgery}': {file or module.__name__}.py has no function {name}{hint}") from None


def initial_model(s, module, model_keys, corpus):
    """A fresh model, one from other runs' weights, or what a surgery makes of them."""
    if not s.init_from:
        if s.surgery:
            raise UserError(f"surgery '{s.surgery}' needs a trained model: set init_from")
        return module.Model(make_config(module, model_keys)), None
    ckpts = [read_checkpoint(path) for path in ([s.init_from] if isinstance(s.init_from, str) else s.init_from)]
    operate = find_surgery(s.surgery, module) if s.surgery else None
    home = inspect.getmodule(operate)                    # the surgery's file: a model's own, or one for all, as lora
    own = hasattr(home, 'Model') and home.Model.__module__ == home.__name__
    for ckpt in ckpts:
        if own and ckpt['model'] != home.__name__:
            raise UserError(f"{s.surgery} rebuilds models of {home.__name__}.py, but {ckpt['folder']} holds one of {ckpt['model']}.py")
        if ckpt['model'] != s.model:
            raise UserError(f"{ckpt['folder']} holds a model of {ckpt['model']}.py, but this run trains {s.model}.py: "
                            f"add --model={ckpt['model']}")
        if ckpt['tokenizer'] != corpus.hash:
            raise UserError(f"{ckpt['folder']} was trained with another tokenizer than this data has")
    if not s.surgery:
        if len(ckpts) > 1:
            raise UserError('init_from names several runs: set the surgery that joins them')
        return freeze(build(ckpts[0], **model_keys), ckpts[0]), None
    if other := [key for key, value in model_keys.items() if any(ckpt['config'].get(key) != value for ckpt in ckpts)]:
        raise UserError(f"with a surgery the model's settings come from init_from and surgery_args; remove {', '.join(other)}")
    if s.surgery != 'lora.merge_lora' and any(ckpt.get('adapted') for ckpt in ckpts):
        raise UserError(f'surgery {s.surgery}: the model has adapters; merge them first, with --surgery=lora.merge_lora')
    models = [build(ckpt).to(corpus.machine.device).eval() for ckpt in ckpts]
    args = dict(s.surgery_args)
    if 'batches' in inspect.signature(operate).parameters:
        args['batches'] = corpus.calibration(s.seq_len or models[0].config.block_size)
    try:
        result = operate(models if isinstance(s.init_from, list) else models[0], **args)
        model, report = result if isinstance(result, tuple) else (result, None)     # some return (model, report)
        if not isinstance(model, module.Model):
            raise TypeError('it does not return a model')
        return model, report
    except (AttributeError, TypeError, ValueError) as e:
        several = ' (init_from is a list; this surgery may want one run)' if isinstance(e, AttributeError) and isinstance(s.init_from, list) else ''
        raise UserError(f'surgery {s.surgery}: {e}{several}') from None


# ---------------------------------------------------------------------------------------------------------------
# The loop


def make_optimizer(model, s, machine):
    """AdamW that decays matrices. Stacked vectors are matrices by shape, but are named ...gain or ...bias."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decays = [p.dim() >= 2 and not n.endswith(('gain', 'bias')) for n, p in named]
    groups = [dict(params=[p for (_, p), d in zip(named, decays) if d], weight_decay=s.weight_decay),
              dict(params=[p for (_, p), d in zip(named, decays) if not d], weight_decay=0.0)]
    lr = torch.tensor(s.learning_rate, device=machine.device) if machine.cuda else s.learning_rate
    return torch.optim.AdamW(groups, lr=lr, betas=(s.beta1, s.beta2), eps=s.eps, capturable=machine.cuda,
                             fused=machine.device.type in ('cuda', 'cpu'))


def set_rate(optimizer, lr):
    """On a GPU the rate is a tensor: a CUDA graph reads it anew at every replay."""
    for group in optimizer.param_groups:
        group['lr'] = group['lr'].fill_(lr) if torch.is_tensor(group['lr']) else lr


def learning_rate(it, s, max_iters):
    if it < s.warmup_iters:
        return s.warmup_lr + (s.learning_rate - s.warmup_lr) * (it + 1) / (s.warmup_iters + 1)
    done = (it - s.warmup_iters) / max(1, max_iters - s.warmup_iters)
    shape = dict(cosine=0.5 * (1 + math.cos(math.pi * min(done, 1.0))), linear=1 - min(done, 1.0), constant=1.0)
    return s.min_lr + shape[s.schedule] * (s.learning_rate - s.min_lr)


def dropout_rate(it, s, max_iters, p):
    """The model's own rate p, shaped over the run: on then off, off then on, falling to 0, rising to p and falling."""
    done = it / max_iters
    return p * dict(constant=1.0, early=float(done < s.dropout_phase), late=float(done >= s.dropout_phase),
                    linear=1 - done, triangle=1 - abs(2 * done - 1))[s.dropout_schedule]


def trim(cache, length):
    """The last keys and values of a cache, without their history: the next segment's memory."""
    return [(k[:, :, -length:].detach(), v[:, :, -length:].detach()) for k, v in cache]


def train_step(model, optimizer, data, starts, memory, s, machine):
    """One update from the chunks at `starts`. Returns the mean loss and auxiliary values of this process's micro-batches,
    and the gradient norm. The micro-batches of a step are dealt to the processes in turn, so that W processes with A
    micro-batches each see what one process with W*A sees."""
    A, B, world, mean = s.gradient_accumulation_steps, s.batch_size, machine.world, {}
    optimizer.zero_grad(set_to_none=True)
    for a in range(A):
        m = a * world + machine.rank
        x, y = data.batch(starts[m * B:(m + 1) * B])
        sync = contextlib.nullcontext() if world == 1 or a == A - 1 else model.no_sync()
        with sync:
            with machine.autocast():
                _, loss, aux = model(x, y, cache=memory[a]) if s.memory else model(x, y)
            objective = loss + sum(weight * aux[name] for name, weight in s.aux_weights.items())
            (objective / A).backward()
        if s.memory:
            memory[a] = trim(memory[a], s.memory)
        for name, value in dict(aux, loss=loss).items():
            mean[name] = mean.get(name, 0.0) + value.detach() / A
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
    optimizer.step()
    return mean, norm


# two ways of torch.compile that cost more than they save here: the gradients of norms were four times as slow, softmax twice
FASTER = {'triton.mix_order_reduction': False, 'online_softmax': False}


class Trainer:
    """A run: model, optimiser and place in the data; how they are saved, and the loop that moves them on."""

    def __init__(self, s, machine, corpus, data, model, max_iters, say):
        self.s, self.machine, self.corpus, self.data, self.model = s, machine, corpus, data, model
        self.max_iters, self.say, self.out = max_iters, say, Path(s.out_dir)
        self.optimizer = make_optimizer(model, s, machine)
        self.it, self.memory = 0, [[] for _ in range(s.gradient_accumulation_steps)]
        self.health = torch.zeros((), device=machine.device)   # becomes nan with the first loss or norm that is not finite
        self.caught = []                                 # signals
        self.check_model()
        torch.manual_seed(s.seed + 1 + machine.rank)     # dropout differs between processes

    def check_model(self):
        """One step's forward on nothing, so that what does not fit is told before anything is written."""
        self.model.train()
        idx = torch.zeros(1, self.data.T, dtype=torch.long, device=self.machine.device)
        try:
            with self.machine.autocast():
                aux = self.model(idx)[2]
        except ValueError as e:
            raise UserError(f'{self.s.model} with a seq_len of {self.data.T}: {e}') from None
        if self.s.memory:                                # cached keys keep the positions they were made with
            try:
                with torch.no_grad(), self.machine.autocast():
                    self.model(idx.new_zeros(1, self.model.config.block_size + 1))
            except ValueError:
                raise UserError(f'memory needs a model without positions, as moduleformer: {self.s.model} cannot read on without end') from None
        if self.s.dropout_schedule != 'constant' and not (hasattr(self.model, 'set_dropout') and self.model.config.dropout):
            raise UserError('dropout_schedule needs a model that has set_dropout, and a dropout of more than 0')
        for name, value in aux.items():
            if not (isinstance(value, torch.Tensor) and value.dim() == 0):
                raise UserError(f"{self.s.model}.py: the auxiliary value '{name}' should be a tensor of one number")
        for name in self.s.aux_weights:
            if name not in aux:
                raise UserError(f"aux_weights names '{name}', but {self.s.model} returns "
                                f"{', '.join(aux) or 'no auxiliary loss'}")
            if not aux[name].requires_grad:
                self.say(f"note      aux_weights names '{name}', which no weight that trains can change: it is only logged")

    def open_folder(self, ckpt):
        """Make the run's folder, or restore what it holds and cut its log back to the checkpoint."""
        log = self.out / 'log.jsonl'
        if self.machine.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            self.log_file = open(log, 'a', encoding='utf-8')
            lock(self.log_file)
            for old in self.out.glob('ckpt*' if self.s.overwrite else 'ckpt*.tmp'):
                old.unlink()
            prepare.copy_tokenizer(self.corpus.folder, self.out)
            if ckpt and self.log_file.tell() < ckpt['log_bytes']:
                self.say(f'resume    {log} has lost lines since the checkpoint was saved')
            self.log_file.truncate(min(self.log_file.tell(), ckpt['log_bytes'] if ckpt else 0))
        if ckpt:
            self.it = ckpt['iter']
            now = [{k: v for k, v in g.items() if k != 'params'} for g in self.optimizer.param_groups]
            self.optimizer.load_state_dict(ckpt['optimizer'])
            for group, settings in zip(self.optimizer.param_groups, now):
                group.update(settings)                   # the moments are the checkpoint's, the settings today's
            self.data.load_state(ckpt['data'])
            if self.machine.rank < len(ckpt['ranks']):
                mine = ckpt['ranks'][self.machine.rank]
                self.machine.set_random_state(mine['random'])
                self.memory = [[(k.to(self.machine.device), v.to(self.machine.device)) for k, v in m] for m in mine['memory']]
            else:                                        # a process that was not there before
                torch.manual_seed(self.s.seed + 1 + self.machine.rank + self.it)
            self.say(f'resume    from step {self.it:,}' + ': nothing is left to train' * (self.it >= self.max_iters))

    def log(self, **record):
        if self.machine.rank == 0:
            self.log_file.write(json.dumps(dict(iter=self.it, **record)) + '\n')
            self.log_file.flush()

    def save(self, name='ckpt.pt', whole=True):
        """whole: everything that going on needs, every process's random state included; else the weights."""
        self.check_health()
        memory = [[(k.cpu().clone(), v.cpu().clone()) for k, v in m] for m in self.memory]
        ranks = self.machine.gather(dict(random=self.machine.random_state(), memory=memory)) if whole else []
        if self.machine.rank == 0:
            state = dict(model=self.s.model, config=asdict(self.model.config), settings=asdict(self.s), iter=self.it,
                         tokenizer=self.corpus.hash, weights=self.model.state_dict(), words=self.data.words,
                         adapted=getattr(self.model, 'adapted', []),
                         frozen=[name for name, p in self.model.named_parameters() if not p.requires_grad])
            if whole:
                state.update(optimizer=self.optimizer.state_dict(), data=self.data.state(), ranks=ranks,
                             log_bytes=self.log_file.tell())
            save_file(state, self.out / name)

    def check_health(self):
        if self.health.item() != 0:
            kept = 'no checkpoint was saved yet'
            if (self.out / 'ckpt.pt').exists():
                kept = f'the last good checkpoint is {self.out}/ckpt.pt'
            raise UserError(f'the loss or its gradient is not finite at step {self.it}; {kept}; try a lower learning_rate')

    def evaluate(self):
        """Scores on every val set, and where tokens go, into the log; one line per data set on the screen."""
        self.check_health()
        s, machine, scores = self.s, self.machine, {}
        for name in self.corpus.scored:
            batches = val_batches(self.corpus.val[name], self.data.T, s.batch_size, self.corpus.pad, s.eval_tokens, machine.rank, machine.world)
            scores[name] = v = score(self.model, batches, self.corpus.token_lengths, machine)
            self.say(f"step {self.it:6,}  {name}: val loss {v['loss']:.4f}, perplexity {v['perplexity']:.2f}, "
                     f"{v['bits_per_byte']:.4f} bits per byte")
        x, _ = next(val_batches(self.corpus.val[self.corpus.scored[0]], self.data.T, s.batch_size, self.corpus.pad, s.eval_tokens))
        self.log(words=round(self.data.words), val=scores, routes=route_shares(self.model, x, machine))

    def wrap(self):
        """The model as it is trained: compiled where that pays, and averaged over processes."""
        model, s = self.model, self.s
        if s.compile or (s.compile is None and self.machine.cuda and self.max_iters >= 200):
            warnings.filterwarnings('ignore', 'Torchinductor does not support code generation for complex')     # rope's table
            model = torch.compile(model, options=FASTER)
        return torch.nn.parallel.DistributedDataParallel(model) if self.machine.world > 1 else model

    def due(self, interval):
        return self.it % interval == 0 or self.it >= self.max_iters

    def asked_to_stop(self):
        """After SIGINT or SIGTERM. Several processes must agree, and do so where they wait for each other anyway."""
        if self.machine.world == 1:
            return bool(self.caught)
        if not self.due(self.s.log_interval):
            return False
        return self.machine.sum(torch.tensor(float(len(self.caught)), device=self.machine.device)).item() > 0

    def run(self, ckpt, report=None):
        s, data, machine = self.s, self.data, self.machine
        self.open_folder(ckpt)
        if report:
            self.log(surgery=report)
        if s.dropout_schedule != 'constant':
            self.model.set_dropout(0.0)                  # before it is compiled; from now on only a tensor changes
        model = self.wrap()
        step = Replay(lambda starts: train_step(model, self.optimizer, data, starts, self.memory, s, machine), machine,
                      s.graph and not s.memory)         # a memory's tensors are new ones at every step
        for number in (signal.SIGINT, signal.SIGTERM):   # the first asks for a checkpoint, the second ends at once
            signal.signal(number, lambda n, _: (self.caught.append(n), signal.signal(n, signal.SIG_DFL)))
        pending = [w for w in sorted(s.checkpoint_words) if w > data.words]
        bar = tqdm(total=self.max_iters, initial=self.it, smoothing=0, unit='step',   # time left: at the mean rate so far
                   disable=None if machine.rank == 0 else True)
        evaluated = ckpt is not None                     # a checkpoint is saved after its step's evaluation
        tokens, clock = 0, time.perf_counter()
        while True:
            if not evaluated and (self.due(s.eval_interval) or self.due(s.save_interval)):
                if self.due(s.eval_interval):
                    self.evaluate()
                if self.due(s.save_interval) and (self.it or s.surgery):
                    self.save()
                tokens, clock = 0, time.perf_counter()
            evaluated = False
            if self.it >= self.max_iters:
                break
            if self.asked_to_stop():
                self.save()
                bar.close()
                self.say(f'stopped at step {self.it:,}; go on with the same command and --resume')
                sys.exit(128 + (self.caught or [signal.SIGTERM])[0])

            lr, also = learning_rate(self.it, s, self.max_iters), {}
            if hasattr(self.model, 'set_dropout'):
                also['dropout'] = dropout_rate(self.it, s, self.max_iters, self.model.config.dropout)
            if s.dropout_schedule != 'constant':
                self.model.set_dropout(also['dropout'])
            if s.memory and data.position in (0, len(data.starts)):
                self.memory[:] = [[] for _ in self.memory]      # a new epoch: nothing came before
            set_rate(self.optimizer, lr)
            mean, norm = step(torch.from_numpy(data.take(data.rows)).to(machine.device))
            self.it, tokens = self.it + 1, tokens + data.rows * data.T
            self.health += 0 * (mean['loss'] + norm)     # 0 * inf and 0 * nan are nan; the device is not waited for
            if self.due(s.log_interval):
                self.check_health()
                values = {name: machine.sum(v.clone()).item() / machine.world for name, v in mean.items()}
                rate = tokens / (time.perf_counter() - clock)
                tokens, clock = 0, time.perf_counter()
                self.log(**values, **also, lr=lr, grad_norm=norm.item(), tokens_per_s=round(rate), epoch=data.epoch, words=round(data.words))
                bar.set_postfix_str(f"loss {values['loss']:.3f}, {short(rate)} tokens/s")
                if bar.disable and self.due(10 * s.log_interval):       # no terminal: a line now and then
                    self.say(f"step {self.it:6,}  loss {values['loss']:.4f}, {short(rate)} tokens/s")
            while pending and data.words >= pending[0]:
                self.save(f'ckpt_{short(pending.pop(0))}.pt', whole=False)
            bar.update()
        bar.close()

    def finish(self):
        """A sample of text, and what to do next."""
        if self.machine.rank == 0:
            self.model.eval()
            start = torch.tensor([[self.corpus.tokenizer.eot]], device=self.machine.device)
            with self.machine.autocast():
                text = self.model.generate(start, self.s.sample_tokens, temperature=0.8, top_k=50)[0, 1:].tolist()
                routed = bool(self.model.routes(start))
            self.say(f'\nsample\n{self.corpus.tokenizer.show(text).strip()}\n\nnext')
            sample = (' --routes', 'more text, and the way each token took') if routed else ('', 'more text')
            measure = ('eval_blimp', 'how many minimal pairs it gets right')
            if all('math' in name for name in self.corpus.scored):
                measure = ('exact_answer', 'how many problems it solves')
            hints = {f'sample.py {self.out}{sample[0]}': sample[1], f'{measure[0]}.py {self.out}': measure[1],
                     'train.py --help': f'every setting; the log is {self.out}/log.jsonl'}
            for command, what in hints.items():
                self.say(f'  python {command:{max(map(len, hints))}}   # {what}')


def short(n):
    """1000000 -> 1M"""
    size, letter = next(((s, c) for s, c in ((1e9, 'B'), (1e6, 'M'), (1e3, 'K')) if n >= s), (1, ''))
    return f'{n / size:.4g}{letter}'


def check_resume(ckpt, s, model_keys, corpus, machine, say):
    """A resumed run is the same run: the same model and tokenizer. Other settings may change, and are told."""
    if ckpt['model'] != s.model:
        raise UserError(f"{s.out_dir} holds a model of {ckpt['model']}.py, but this config trains {s.model}.py")
    if ckpt['tokenizer'] != corpus.hash:
        raise UserError(f'{s.out_dir} was trained with another tokenizer than this data has')
    for key, value in ({} if s.surgery else model_keys).items():         # a surgery may have changed them
        if ckpt['config'].get(key) != value:
            raise UserError(f"{s.out_dir} was trained with {key} = {ckpt['config'].get(key)!r}, not {value!r}: "
                            'resume with the same model, or set another --out_dir')
    if 'optimizer' not in ckpt:
        raise UserError(f'{s.out_dir}/ckpt.pt holds weights only; start a new run from it with --init_from')
    fixed = {'data', 'seq_len', 'stride', 'stream', 'memory', 'epoch_words', 'seed'}      # the order of the data
    fixed |= {'batch_size', 'gradient_accumulation_steps'} if s.stream else set()
    for key, value in asdict(s).items():
        before = ckpt['settings'].get(key)
        if before != value and key in fixed:
            raise UserError(f'{s.out_dir} reads its data with {key} = {before!r}, not {value!r}: '
                            'resume with the same, or start a new run from it with --init_from')
        if before != value and key in ('init_from', 'surgery', 'surgery_args'):
            raise UserError(f'{s.out_dir} started with {key} = {before!r}, not {value!r}: resume with the same')
        if before != value and key not in ('resume', 'overwrite'):
            say(f'resume    {key} was {before!r}, is now {value!r}')
    if len(ckpt['ranks']) != machine.world:
        if s.stream:
            raise UserError(f"{s.out_dir} was trained by {len(ckpt['ranks'])} processes; its streams need as many")
        say(f"resume    there were {len(ckpt['ranks'])} processes, there are now {machine.world}")


def sketch(module, model_keys):
    """A model without weights, to be counted: it needs no memory, whatever its size."""
    with torch.device('meta'):
        return module.Model(make_config(module, model_keys))


def show_plan(model, s, corpus, data, machine, max_iters, say):
    total, active = model.count_params()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f'model     {s.model}: {total / 1e6:.2f}M parameters, {active / 1e6:.2f}M active per token'
        + (f', {trained / 1e6:.2f}M trained' if trained < sum(p.numel() for p in model.parameters()) else ''))
    if data is None:
        return
    for name, (begin, end, passes, _) in zip(corpus.ranges, data.sets):
        times = '' if passes == 1 else f', seen {passes:g} times per epoch'
        say(f'data      {name}: {short(end - begin)} tokens{times}, {short(len(corpus.val[name]))} for validation')
    for name in corpus.scored:
        if name not in corpus.ranges:
            say(f'data      {name}: {short(len(corpus.val[name]))} tokens, for validation only')
    chunks, tokens = ('chunks', 'tokens') if data.align == 1 else ('windows', 'slots')       # slots of chunks of bytes
    say(f'step      {s.batch_size} {chunks} x {data.T} {tokens} x {s.gradient_accumulation_steps} accumulated x {machine.world} '
        f'process{"es" * (machine.world > 1)} = {data.rows * data.T:,} {tokens}')
    say(f'plan      {max_iters:,} steps, {short(max_iters * data.rows * data.T)} {tokens}, '
        f'{max_iters * data.rows / len(data.starts):.2f} epochs of {len(data.starts):,} {chunks}')
    say(f'machine   {machine.device}, {machine.dtype}, run folder {s.out_dir}')


def main():
    s, module, model_keys = read_settings(sys.argv[1:], __doc__)
    machine = Machine(s.device, s.dtype)
    say = tqdm.write if machine.rank == 0 else lambda text: None
    ckpt = report = None
    if (s.max_iters != 0 or s.surgery) and any(Path(s.out_dir).glob('ckpt*.pt')) and not s.overwrite:
        if not s.resume:
            raise UserError(f'{s.out_dir} holds a run already: add --resume to go on with it, '
                            '--overwrite to start anew, or choose another --out_dir')
        ckpt = read_checkpoint(s.out_dir) if Path(s.out_dir, 'ckpt.pt').exists() else None
    if s.resume and not ckpt:
        say(f'resume    {s.out_dir} holds no checkpoint: from the beginning')
    try:
        corpus = Corpus(s, machine)
    except UserError as e:
        if s.max_iters != 0 or s.init_from:
            raise
        show_plan(sketch(module, model_keys), s, None, None, machine, 0, say)
        say(f'data      {e}')                            # the model's size can be told without data
        return
    vocab = corpus.tokenizer.n_vocab
    size = vocab if ckpt or s.init_from else model_keys.setdefault('vocab_size', vocab)
    if size < vocab or corpus.align > 1 and size != vocab:       # symbols of bytes are counted from the end
        bytewise = '; a byte-level model reads what prepare.py --chunks writes' if model_keys.get('byte_limit') and corpus.align == 1 else ''
        raise UserError(f'vocab_size is {size}, but the tokenizer of {corpus.folder} has {vocab} entries{bytewise}')

    if s.max_iters == 0 and not s.init_from and sketch(module, model_keys).count_params()[0] > 1e9:
        show_plan(sketch(module, model_keys), s, corpus, None, machine, 0, say)
        say('plan      a model of this size is counted, not built')
        return
    torch.manual_seed(s.seed)
    if ckpt:
        check_resume(ckpt, s, model_keys, corpus, machine, say)
        model = build(ckpt)
        freeze(model, ckpt)
    else:
        model, report = initial_model(s, module, model_keys, corpus)
    model.to(machine.device)
    data = Data(s, corpus, s.seq_len or model.config.block_size, machine, getattr(model.config, 'byte_limit', 0) + 1)
    planned = s.max_iters or max(1, data.count_chunks(s.epochs) // data.rows)
    max_iters = 0 if s.max_iters == 0 else planned
    show_plan(model, s, corpus, data, machine, planned, say)
    if report:
        say(str(report))
    trainer = Trainer(s, machine, corpus, data, model, max_iters, say)
    if max_iters or s.surgery:
        trainer.run(ckpt, report)
    if max_iters:
        trainer.finish()
    elif s.surgery:
        say(f'saved     {s.out_dir}/ckpt.pt')
    if machine.world > 1:
        if not machine.cuda:                             # wait for the first one: a process that ends right after it has sent something
            dist.barrier()                               # can die of gloo's threads, which still hold it (torch does not end them)
        dist.destroy_process_group()


if __name__ == '__main__':
    run_main(main)
