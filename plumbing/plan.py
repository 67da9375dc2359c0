"""What train.py prints before and after a run, and the checks before anything is written."""

import platform
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from plumbing.cli import UserError, short
from plumbing.data import tokens_at
from plumbing.models import explain, make_config, model_file, reads_past_block_size, sketch
from plumbing.toy import TOYS


def show_size_only(module, model_keys, s, machine, why_no_data=None):
    """Without data, or of a huge model, --max_iters=0 prints the size only -> whether it did so."""
    if s.max_iters != 0 or s.init_from:
        return False
    model = sketch(module, model_keys)
    if not why_no_data and model.count_params()[0] <= 1e9:
        return False
    show_size(model, s, machine)
    text = 'plan      a model of this size is counted, not built'
    if why_no_data:
        text = f'data      a vocabulary of {model.config.vocab_size:,} is assumed: {why_no_data}'
    machine.say(text)
    return True


def set_vocabulary(module, model_keys, corpus):
    """The model's vocabulary is the tokenizer's, unless the config names a larger one. The data
    must hold what the model reads: tokens, or chunks of its length."""
    vocab = corpus.tokenizer.n_vocab
    size = model_keys.setdefault('vocab_size', vocab)
    slots = getattr(make_config(module, model_keys), 'byte_limit', 0) + 1    # per chunk; 1: tokens
    if slots != corpus.slots:
        name = lambda n: f'chunks of {n} slots' if n > 1 else 'tokens'
        form = f'with --chunks {slots - 1}' if slots > 1 else 'without --chunks or --sentences'
        raise UserError(f'{corpus.folder} holds {name(corpus.slots)}, but {module.__name__} '
                        f'reads {name(slots)}: prepare it {form}')
    if size < vocab or slots > 1 and size != vocab:      # byte symbols are counted from the end
        raise UserError(f'vocab_size is {size}, but {corpus.folder} has a vocabulary of {vocab}')


def check_size(module, model_keys, s, machine):
    """Whether weights, gradients and AdamW's two moments fit into the machine's memory. A model that is
    sharded is first built as a whole."""
    count = sum(p.numel() for p in sketch(module, model_keys).parameters())
    needed = 16 * count
    if s.shard and machine.cuda:                         # processes on CPUs share their memory
        needed = 4 * count + 16 * count / machine.world
    if needed > machine.memory():
        raise UserError(f'a model of {short(count)} parameters takes {short(needed)}B to train, '
                        f'and this machine has {short(machine.memory())}B')


def show_size(model, s, machine):
    total, active = model.count_params()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    text = f'model     {s.model}: {total / 1e6:.2f}M parameters, {active / 1e6:.2f}M active per token'
    if trained < sum(p.numel() for p in model.parameters()):
        text += f', {trained / 1e6:.2f}M trained'
    machine.say(text)


def show_plan(model, s, corpus, data, machine, last_step, ckpt=None):
    """last_step: where the run ends; ckpt: what it continues."""
    show_size(model, s, machine)
    for name, (begin, end, passes, _) in zip(corpus.ranges, data.sets):
        times = '' if passes == 1 else f', seen {passes:g} times per epoch'
        machine.say(f'data      {name}: {short(end - begin)} {data.noun}{times}, '
                    f'{short(len(corpus.val[name]))} for validation')
    for name in [each for each in corpus.scored if each not in corpus.ranges]:
        length = short(len(corpus.val[name]))
        machine.say(f'data      {name}: {length} {data.noun}, for validation only')
    processes = 'process' if machine.world == 1 else 'processes'
    machine.say(f'step      {s.batch_size} windows x {data.T} {data.noun} '
                f'x {s.gradient_accumulation_steps} accumulated '
                f'x {machine.world} {processes} = {data.rows * data.T:,} {data.noun}')
    it = ckpt['iter'] if ckpt else 0
    left = max(0, last_step - it)
    read = data.seen + left * data.rows                  # windows, at the end
    machine.say(f'plan      {it + left:,} steps, {short(read * data.T)} {data.noun}, '
                f'{read / len(data.starts):.2f} epochs of {len(data.starts):,} windows')
    machine.say(f'machine   {machine.device}, {machine.dtype}, run folder {s.out_dir}')
    if ckpt:
        machine.say(f'resume    from step {it:,}' + ('' if left else ': nothing is left to train'))


def describe(model, s, data, machine, steps):
    """The first line of a run's log: what was run, and where."""
    total, active = model.count_params()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    device = torch.cuda.get_device_name() if machine.cuda else str(machine.device)
    return dict(
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), settings=asdict(s),
        config=asdict(model.config), parameters=total, active=active, trained=trained, steps=steps,
        tokens_per_step=data.rows * data.T, torch=torch.__version__, python=platform.python_version(),
        device=device, dtype=str(machine.dtype), processes=machine.world,
        date=time.strftime('%Y-%m-%d %H:%M:%S'))


def check_model(model, s, data, machine):
    """One forward pass on zeros, so that what does not fit is reported before anything is written. The
    model's buffers are put back: a router may keep its load there."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    idx = torch.zeros(1, data.T, dtype=torch.long, device=machine.device)
    try:
        with machine.autocast():
            aux = model(idx, idx)[2]
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        raise UserError(f'{s.model} with a seq_len of {data.T}: {explain(e)}') from None
    if s.memory and not reads_past_block_size(model):    # cached keys keep their positions
        raise UserError('memory needs a model that reads beyond block_size, such as moduleformer')
    for name, buffer in model.named_buffers():
        if name not in buffers:
            raise UserError(f'{s.model}: forward adds a buffer, {name}: register it in __init__')
        buffer.copy_(buffers[name])
    if s.dropout_schedule != 'constant' and not (hasattr(model, 'set_dropout') and model.config.dropout):
        raise UserError('dropout_schedule needs a model that has set_dropout, and dropout above 0')
    for name, value in aux.items():
        if not (isinstance(value, torch.Tensor) and value.dim() == 0):
            raise UserError(f"{model_file(s.model)}: aux['{name}'] must be a tensor of one number")
    for name in s.aux_weights:
        if name not in aux:
            returned = ', '.join(aux) or 'no auxiliary loss'
            raise UserError(f"aux_weights names '{name}', but {s.model} returns {returned}")
        if not aux[name].requires_grad:
            machine.say(f"note      aux_weights names '{name}', which no weight that trains "
                        'can change: it is only logged')


def show_sample(model, s, corpus, machine):
    """A sample of text, and what to do next."""
    model.eval()
    start = torch.tensor([[corpus.tokenizer.eot]], device=machine.device)
    if corpus.tokenizer.pauses:                          # what follows them was learned
        text = tokens_at(corpus.val[corpus.scored[0]], slice(model.config.block_size // 2))
        pauses = (text == corpus.pad).nonzero()
        if len(pauses):
            start = text[None, :pauses.max() + 1]
    with machine.autocast():
        ids = model.generate(start, s.sample_tokens, temperature=0.8, top_k=50)
        routed = bool(model.routes(start))
    machine.say(f'\nsample\n{corpus.tokenizer.show(ids[0, 1:].tolist()).strip()}\n\nnext')
    run = shlex.quote(s.out_dir)
    hints = {f'python sample.py {run}': 'more text'}
    if routed:
        hints = {f'python sample.py {run} --routes': 'more text, and the path each token took'}
        hints[f'python -m tools.explore {run}'] = 'a page: where tokens go, and what a choice means'
    if all(any(word in name for word in ('math', 'pauses', 'thoughts')) for name in corpus.scored):
        hints[f'python -m tools.exact_answer {run}'] = 'how many problems it solves'
    elif all(name in TOYS for name in corpus.scored):
        hints[f'python eval_blimp.py {run}'] = 'how many minimal pairs it gets right'
    else:
        pairs = 'how many minimal pairs it gets right (after: python prepare.py blimp)'
        hints[f'python eval_blimp.py {run} --data data/blimp'] = pairs
    hints[f'python -m tools.compare {run}'] = 'a table; name more runs to compare them'
    hints[f'python train.py --model={s.model} --help'] = f'every setting; the log is {s.out_dir}/log.jsonl'
    width = max(map(len, hints))
    for command, what in hints.items():
        machine.say(f'  {command:{width}}   # {what}')
