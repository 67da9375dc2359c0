"""
How fast? Tokens per second, memory, and the share of what the machine could do.

    python -m tools.bench config/moep.py config/gpt2.py                    # toy sizes, on a laptop
    python -m tools.bench config/paper/gpt2.py config/paper/moep.py --batch_size 16 64
    python -m tools.bench config/paper/moep.py --sweep n_block=2,4,8,16    # cost against size
    python -m tools.bench config/moduleformer.py --generate 512            # text: tokens per second
    python -m tools.bench config/paper/gpt2.py --nanogpt ../nanoGPT        # and nanoGPT itself

A training step is train.py's own, on random tokens. tools/flops.py says how FLOPs are counted; the
machine's rate is that of one large matrix product in the same run. Any setting can be given as
--key=value, as to train.py.
"""

import contextlib
import importlib.util
import re
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from plumbing.cli import Parser, UserError, between, human, run_main, write_json
from plumbing.machine import Machine
from plumbing.settings import Settings, import_model, make_config, read_settings
from tools.flops import training_flops
from train import Data, make_step, make_optimizer


# ---- The rows of the table ----------------------------------------------------------------------

@dataclass
class Row:
    name: str
    model: str                           # the model file, or nanogpt
    config: object
    s: Settings
    T: int

    def build(self, args):
        torch.manual_seed(self.s.seed)
        if self.model == 'nanogpt':
            return nanogpt_like(args.nanogpt, self.config)
        return import_model(self.model).Model(self.config)


def plan_rows(args, extra):
    """A row for every config, value of --sweep and batch size; nanoGPT beside a GPT-2."""
    key, _, values = (args.sweep or '').partition('=')
    for config in args.configs:
        for value in re.split(r',(?![^\[(]*[\])])', values):     # not at the commas of a list
            name, setting = Path(config).stem, []
            if args.sweep:
                name, setting = f'{name} {key}={value}', [f'--{key}={value}']
            s, module, keys = read_settings([config, *extra, *setting])
            if s.init_from or keys.get('byte_limit'):
                raise UserError(f'{config}: bench measures fresh models of tokens, not what starts '
                                'from another run, and not chunks of bytes')
            keys = dict(vocab_size=args.vocab_size, block_size=module.Config.block_size) | keys
            T = s.seq_len or keys['block_size']
            if args.generate:
                s.batch_size, T = 1, args.generate + 1
            keys['block_size'] = max(T, keys['block_size'])
            model_config = make_config(module, keys)
            for batch_size in args.batch_size or [s.batch_size]:
                s = replace(s, batch_size=batch_size)
                yield Row(name, s.model, model_config, s, T)
                is_gpt2 = s.model == 'moep' and not model_config.n_parallel
                if args.nanogpt and is_gpt2:
                    yield Row('  nanoGPT', 'nanogpt', model_config, s, T)


# ---- nanoGPT from a checkout, with its own model.py, optimiser and compilation ------------------

def nanogpt_like(path, config):
    """nanoGPT of the same sizes as a GPT-2 of ours, a MoEPConfig without parallel layers."""
    spec = importlib.util.spec_from_file_location('nanogpt', Path(path, 'model.py'))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=config.block_size, vocab_size=config.vocab_size, n_layer=config.n_layer,
        n_head=config.n_head, n_embd=config.n_embd, dropout=config.dropout, bias=True)
    with contextlib.redirect_stdout(None):               # it prints its size
        model = module.GPT(config)
    total = sum(p.numel() for p in model.parameters())
    model.count_params = lambda: (total, total - model.transformer.wpe.weight.numel())
    return model


def nanogpt_step(model, s, machine):
    """-> a training step as nanoGPT's train.py takes it on one GPU."""
    with contextlib.redirect_stdout(None):
        optimizer = model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2),
                                               machine.device.type)
    compiled = torch.compile(model.train()) if machine.cuda else model.train()

    def step(xs, ys):
        for x, y in zip(xs, ys):
            with machine.autocast():
                _, loss = compiled(x, y)
            (loss / s.gradient_accumulation_steps).backward()
        torch.nn.utils.clip_grad_norm_(compiled.parameters(), s.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


# ---- What is measured ---------------------------------------------------------------------------

def seconds(work, machine, repeat=5, at_least=0.2):
    """The median time of one call, of `repeat` measurements that each last `at_least` seconds."""
    def timed(n):
        start = time.perf_counter()
        for _ in range(n):
            work()
        if machine.device.type != 'cpu':
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) / n
    timed(1)                                             # warms up
    once = timed(1)
    if once > 10 * at_least:                             # very slow: one is enough
        return once
    n = max(1, round(at_least / once))
    return statistics.median(timed(n) for _ in range(repeat))


class RandomTokens(Data):
    """Windows of random tokens at random places, read and sent as train.py does."""

    def __init__(self, vocab_size, s, T, machine):
        self.s, self.machine, self.T, self.pad = s, machine, T, -1
        self.random = np.random.default_rng(0)
        self.bins = [self.random.integers(vocab_size, size=64 * (T + 1), dtype=np.uint32)]

    def step_starts(self, step):
        rows = self.s.batch_size * self.s.gradient_accumulation_steps
        return self.random.integers(63 * (self.T + 1), size=rows)


def training(model, s, T, machine):
    """One training step after another: train.py's own, or nanoGPT's."""
    rows = s.batch_size * s.gradient_accumulation_steps
    data = RandomTokens(model.config.vocab_size, s, T, machine)
    if hasattr(model, 'configure_optimizers'):
        take = nanogpt_step(model, s, machine)
    else:
        optimizer = make_optimizer(model, s, machine)
        take = make_step(model.train(), optimizer, s, machine, steps=200)
    step = lambda: take(*data.windows(0))
    step()                                               # compiles, and allocates AdamW's state
    if machine.cuda:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):                               # the third is recorded as a CUDA graph
            step()
    took = seconds(step, machine)
    return dict(tokens_per_s=rows * T / took, ms=1e3 * took)


@torch.no_grad()
def generation(model, rows, n, machine):
    """Time n greedy tokens."""
    start = torch.zeros(rows, 1, dtype=torch.long, device=machine.device)
    with machine.autocast():
        took = seconds(lambda: model.generate(start, n, temperature=0), machine, repeat=3)
    return dict(tokens_per_s=rows * n / took, ms=1e3 * took / n)


def measure(row, args, machine, rate):
    """Return a line of the table."""
    s, model = row.s, row.build(args).to(machine.device).eval()
    if machine.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    total, active = model.count_params()
    flops = training_flops(row.config, active, row.T)
    rows = s.batch_size
    if args.generate:
        speed = generation(model, rows, args.generate, machine)
        flops /= 3                                       # forward alone
    else:
        speed = training(model, s, row.T, machine)
        rows *= s.gradient_accumulation_steps
    gib = torch.cuda.max_memory_allocated() / 2 ** 30 if machine.cuda else None
    return dict(name=row.name, rows=rows, T=row.T, total=total, active=active, **speed, gib=gib,
                flops_per_token=flops, share=flops * speed['tokens_per_s'] / rate)


# ---- The command line ---------------------------------------------------------------------------

def show(row):
    rate = row['tokens_per_s']
    gib = '-' if row['gib'] is None else f"{row['gib']:.2f}"
    print(f"{row['name']:30}{row['rows']:6} x {row['T']:<4}{human(row['total']):>11}"
          f"{human(row['active']):>10}{rate:11,.0f}{row['ms']:10.2f}{gib:>8}"
          f"{row['flops_per_token'] * rate / 1e12:10.4g}{100 * row['share']:6.1f}%", flush=True)


def read_arguments():
    parser = Parser(__doc__)
    parser.add_argument('configs', nargs='+', help='config files')
    parser.add_argument('--batch_size', type=between(1, 10 ** 6), nargs='+',
                        help="the config's own if not given")
    parser.add_argument('--nanogpt', metavar='PATH', help='a checkout, to train beside each GPT-2')
    parser.add_argument('--sweep', metavar='KEY=A,B,...', help='each config with each of these')
    parser.add_argument('--generate', type=between(1, 10 ** 6), metavar='N',
                        help='decode N tokens instead')
    parser.add_argument('--vocab_size', type=between(1, 65536), default=16384,
                        help='where the config names none')
    parser.add_argument('--json', type=Path, help='write the table there')
    return parser.parse_known_args()


def main():
    args, extra = read_arguments()
    planned = list(plan_rows(args, extra))
    machine = Machine(planned[0].s.device, planned[0].s.dtype)
    rate = machine.matrix_rate
    device = torch.cuda.get_device_name() if machine.cuda else machine.device.type
    print(f'{machine.device}, {machine.dtype}: {rate / 1e12:.4g} TFLOP/s in a large matrix product'
          f'; a vocabulary of {args.vocab_size:,} where a config names none')
    print(f"{'model':30}   batch x T  parameters    active   tokens/s"
          '        ms     GiB   TFLOP/s  share', flush=True)
    rows = []
    for row in planned:
        rows.append(measure(row, args, machine, rate))
        show(rows[-1])
    if args.json:
        write_json(args.json, dict(device=device, dtype=str(machine.dtype), rows=rows,
                                   torch=torch.__version__, matrix_rate=rate))


if __name__ == '__main__':
    run_main(main)
