"""What train.py prints before and after a run, and the first line of its log."""

import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from plumbing.cli import human
from plumbing.settings import ROOT

USUAL_SHARE = 0.25                      # what training reaches of the rate of a matrix product


def show_plan(model, data, it, steps, s, machine):
    total, active = model.count_params()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    part = f', {trained / 1e6:.2f}M trained' if trained < total else ''
    machine.say(f'model     {s.model}: {total / 1e6:.2f}M parameters, '
                f'{active / 1e6:.2f}M active per token{part}')
    val = ', '.join(f'{human(len(tokens))} of {name}' for name, tokens in data.val.items())
    machine.say(f'data      {s.data}: {human(data.size)} {data.noun} to train on; validation on '
                f'{val}')
    n = s.gradient_accumulation_steps
    accumulated = f' x {n} accumulated' * (n > 1)
    processes = f' x {machine.world} processes' * (machine.world > 1)
    machine.say(f'step      {s.batch_size} windows x {data.T} {data.noun}{accumulated}{processes} '
                f'= {data.rows * data.T:,} {data.noun}')
    windows = steps * data.rows
    machine.say(f'plan      {steps:,} steps, {human(windows * data.T)} {data.noun}, '
                f'{windows / data.n_windows:.2f} epochs of {data.n_windows:,} windows')
    tokens = (steps - it) * data.rows * data.T
    minutes = utilisation(model, tokens, machine) / USUAL_SHARE / 60
    lasts = f'about {minutes:.0f} min' if minutes >= 1 else 'less than a minute'
    machine.say(f'takes     {lasts}; weights, gradients and optimiser '
                f'{human(4 * total + 12 * trained)}B, activations more')
    threads = f', threads: {torch.get_num_threads()}' * (machine.device.type == 'cpu')
    machine.say(f'machine   {machine.device}, {machine.dtype}{threads}, run folder {s.out_dir}')
    if it:
        left = '' if it < steps else ': nothing is left to train'
        machine.say(f'resume    from step {it:,} of {steps:,}{left}')


def utilisation(model, speed, machine):
    """Model FLOPs utilisation at `speed` tokens/s: FLOPs of a step, without attention's, as a share
    of what matrix products alone would reach on this machine."""
    _, active = model.count_params()
    return 6 * active * speed / machine.world / machine.matrix_rate


def show_step(bar, it, loss, speed, mfu, data, s, machine):
    memory = f', {torch.cuda.max_memory_reserved() / 1e9:.2g} GB' if machine.cuda else ''
    speed = f'{human(speed)} {data.noun}/s, {100 * mfu:.0f}% MFU{memory}'
    bar.set_postfix_str(f'loss {loss:.3f}, {speed}')
    if bar.disable and it % (10 * s.log_interval) == 0:  # no terminal: a line now and then
        machine.say(f'step {it:6,}  loss {loss:.4f}, {speed}')


def describe(model, data, steps, s, machine):
    """The first line of a run's log: what was run, and where."""
    total, active = model.count_params()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    git = subprocess.run('git rev-parse HEAD', shell=True, cwd=ROOT, capture_output=True, text=True)
    device = torch.cuda.get_device_name() if machine.cuda else str(machine.device)
    return dict(
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), settings=asdict(s),
        config=asdict(model.config), parameters=total, active=active, trained=trained, steps=steps,
        tokens_per_step=data.rows * data.T, device=device, dtype=str(machine.dtype),
        processes=machine.world, torch=torch.__version__, python=platform.python_version(),
        commit=git.stdout.strip(), date=time.strftime('%Y-%m-%d %H:%M:%S'))


def show_sample(model, data, s, machine):
    """A sample of text, and what to do next."""
    model.eval()
    start = torch.tensor([[data.tokenizer.eot]], device=machine.device)
    with machine.autocast():
        ids = model.generate(start, s.sample_tokens, temperature=0.8, top_k=50)
        is_routed = bool(model.routes(start))
    machine.say(f'\nsample\n{data.tokenizer.show(ids[0, 1:].tolist()).strip()}\n\nnext')
    run = shlex.quote(s.out_dir)
    hints = {f'python sample.py {run}': 'more text'}
    if is_routed:
        hints = {f'python sample.py {run} --routes': 'more text, and the path each token took',
                 f'python -m tools.explore {run}': 'a page: where tokens go, what a choice means'}
    hints[f'python eval_blimp.py {run}'] = 'how many minimal pairs it gets right'
    hints[f'python -m tools.compare {run}'] = 'a table; name more runs to compare them'
    hints[f'python train.py --model={s.model} --help'] = 'every setting'
    width = max(map(len, hints))
    for command, what in hints.items():
        machine.say(f'  {command:{width}}   # {what}')
