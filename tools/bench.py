"""
How fast? Tokens per second, memory, and the share of what the machine could do.

    python -m tools.bench config/moep.py config/gpt2.py                    # toy sizes, on a laptop
    python -m tools.bench config/paper/gpt2.py config/paper/moep.py --batch_size 16 64 --dense
    python -m tools.bench config/paper/moep.py --sweep n_block=2,4,8,16    # cost against size
    python -m tools.bench config/moduleformer.py --generate 512            # decoding, cached or not
    python -m tools.bench config/moduleformer.py --prefill --dense         # reading a long prompt
    python -m tools.bench config/paper/gpt2.py --nanogpt ../nanoGPT        # and nanoGPT itself

A training step is train.py's own, on random tokens. --dense adds for every model a GPT-2 (moep.py
without parallel layers) of as many parameters. Training takes 6 FLOPs per token for each active
parameter and, for causal attention, 6 per unit of its width and position. The machine's rate is that
of one large matrix product in the same run. Any setting can be given as --key=value, as to train.py.
"""

import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from moep import MoEP
from plumbing.cli import Parser, UserError, check_writable, run_main, short, write_json
from plumbing.data import Data
from plumbing.machine import Machine, Replay
from plumbing.models import make_config
from plumbing.settings import read_settings
from tools.bench_others import dense_like, nanogpt_like, nanogpt_step
from train import compile_model, make_optimizer, train_step

ATTENTION = dict(      # the width of a token's query heads in all layers; add your model's here
    nanogpt_model=lambda c: c.n_layer * c.n_embd,
    moep=lambda c: c.n_layer * c.n_embd + c.n_parallel * c.n_block * c.n_embd_parallel,
    papaformer=lambda c: c.n_layer * c.n_embd + c.n_parallel * sum(c.path_embd),
    moduleformer=lambda c: c.n_layer * c.top_k * c.d_att,
    selfmoe=lambda c: c.n_layer * c.n_embd,
    stlm=lambda c: c.n_layer * c.n_embd,
    strong=lambda c: c.n_layer * c.n_embd,
    stlm_depth=lambda c: c.n_embd * (c.n_layer - (1 - c.capacity ** 2) * (c.n_layer // c.route_every)))
DATA_SHEET = dict(H200=989, H100=989, A100=312)          # TFLOP/s in bfloat16


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
    if once > at_least:                                  # slow: a call is a measurement
        more = repeat - 1 if once < 10 * at_least else 0         # very slow: one is enough
        return statistics.median([once, *(timed(1) for _ in range(more))])
    n = max(1, round(at_least / timed(2)))
    return statistics.median(timed(n) for _ in range(repeat))


def matrix_rate(machine):
    """FLOP per second of a large matrix product, in the precision that is trained in."""
    n = 8192 if machine.cuda else 1024
    a, b = (torch.randn(n, n, device=machine.device, dtype=machine.dtype) for _ in range(2))
    return 2 * n ** 3 / seconds(lambda: a @ b, machine)


class RandomTokens(Data):
    """Chunks of random tokens, at random places."""
    def __init__(self, vocab_size, rows, T, device):
        self.tokens = torch.randint(vocab_size, (64 * (T + 1),), device=device).short()
        self.rows = rows
        self.T = T
        self.pad = -1
        self.random = np.random.default_rng(0)

    def take(self, n):
        return self.random.integers(63 * (self.T + 1), size=n)


def training(model, s, T, machine):
    """One training step after another: train.py's own, or nanoGPT's."""
    s = replace(s, memory=0)
    rows = s.batch_size * s.gradient_accumulation_steps
    data = RandomTokens(model.config.vocab_size, rows, T, machine.device)
    if hasattr(model, 'configure_optimizers'):
        step = nanogpt_step(model, data, s, machine)
    else:
        optimizer = make_optimizer(model, s, machine)
        compiles = s.compile or (s.compile is None and machine.cuda)
        trained = compile_model(model.train()) if compiles else model.train()
        take_step = lambda starts: train_step(trained, optimizer, data, starts, None, s, machine)
        replay = Replay(take_step, machine, s.graph)
        step = lambda: replay(data.next_starts())
    step()                                               # compiles, and allocates AdamW's state
    if machine.cuda:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):                               # the third is recorded as a CUDA graph
            step()
    took = seconds(step, machine)
    return dict(tokens_per_s=rows * T / took, ms=1e3 * took)


@torch.no_grad()
def generation(model, rows, n, machine):
    """n greedy tokens, with the cache and without."""
    start = torch.zeros(rows, 1, dtype=torch.long, device=machine.device)

    def uncached():
        ids = start
        for _ in range(n):
            ids = torch.cat((ids, model(ids)[0][:, -1:].argmax(-1)), 1)
    with machine.autocast():
        fast = seconds(lambda: model.generate(start, n, temperature=0), machine, repeat=3)
        slow = seconds(uncached, machine, repeat=3)
    return dict(tokens_per_s=rows * n / fast, no_cache=rows * n / slow, ms=1e3 * fast / n)


@torch.no_grad()
def prefill(model, rows, T, machine):
    """One forward over (rows, T) tokens, logits of the last one."""
    ids = torch.randint(model.config.vocab_size, (rows, T), device=machine.device)
    head = model.head if hasattr(model, 'head') else model.wte

    def read():
        states, _ = model.features(ids)
        return states[:, -1] @ head.weight.T.to(states.dtype)
    with machine.autocast():
        took = seconds(read, machine)
    return dict(tokens_per_s=rows * T / took, ms=1e3 * took)


def measure(model, name, s, T, args, machine, rate):
    """One line of the table."""
    model.to(machine.device).eval()
    if machine.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    total, active = model.count_params()
    kinds = [kind.__module__ for kind in type(model).__mro__ if kind.__module__ in ATTENTION]
    width = ATTENTION[kinds[0]](model.config) if kinds else 0    # of all queries of a token
    flops = 2 * active + 2 * width * T                   # of a forward, at the mean position T / 2
    rows = s.batch_size
    if args.generate:
        found = generation(model, rows, args.generate, machine)
    elif args.prefill:
        found = prefill(model, rows, T, machine)
    else:
        found = training(model, s, T, machine)
        rows *= s.gradient_accumulation_steps
        flops *= 3                                       # backward costs twice the forward
    gib = torch.cuda.max_memory_allocated() / 2 ** 30 if machine.cuda else None
    return dict(name=name, rows=rows, T=T, total=total, active=active, **found, gib=gib,
                flops_per_token=flops, share=flops * found['tokens_per_s'] / rate)


def variants(args, extra):
    """(name, settings, model file, its keys, T) for every config and every value of --sweep."""
    key, _, values = (args.sweep or '').partition('=')
    for config in args.configs:
        for value in values.split(','):
            name = Path(config).stem
            given = [config, *extra]
            if args.sweep:
                name += f' {key}={value}'
                given.append(f'--{key}={value}')
            s, module, keys = read_settings(given)
            if s.init_from:
                raise UserError(f'{config} starts from another run; bench measures fresh models')
            if keys.get('byte_limit'):
                raise UserError(f'{config}: bench measures models of tokens, not of chunks of bytes')
            keys = dict(vocab_size=args.vocab_size, block_size=module.Config.block_size) | keys
            T = s.seq_len or keys['block_size']
            if args.generate:
                s.batch_size, T = 1, args.generate + 1
            elif args.prefill:
                s.batch_size, T = 32, s.seq_len or 1024
            keys['block_size'] = max(T, keys['block_size'])
            make_config(module, keys)                    # reports mistakes before any work
            yield name, s, module, keys, T


def show(row):
    rate = row['tokens_per_s']
    gib = '-' if row['gib'] is None else f"{row['gib']:.2f}"
    uncached = f"{row['no_cache']:10,.0f}{rate / row['no_cache']:7.1f}" if 'no_cache' in row else ''
    print(f"{row['name']:30}{row['rows']:6} x {row['T']:<4}{short(row['total']):>11}"
          f"{short(row['active']):>10}{rate:11,.0f}{uncached}{row['ms']:10.2f}{gib:>8}"
          f"{row['flops_per_token'] * rate / 1e12:10.4g}{100 * row['share']:6.1f}%", flush=True)


def read_arguments():
    parser = Parser(__doc__)
    parser.add_argument('configs', nargs='+', help='config files')
    parser.add_argument('--batch_size', type=int, nargs='+', help="the config's own if not given")
    parser.add_argument('--dense', action='store_true', help='add a GPT-2 of the same size to each')
    parser.add_argument('--nanogpt', metavar='PATH', help='a checkout: beside each GPT-2')
    parser.add_argument('--sweep', metavar='KEY=A,B,...', help='each config with each of these values')
    parser.add_argument('--generate', type=int, metavar='N', help='decode N tokens instead')
    parser.add_argument('--prefill', action='store_true', help='read 32 x 1,024 tokens instead')
    parser.add_argument('--vocab_size', type=int, default=16384, help='where the config names none')
    parser.add_argument('--json', type=Path, help='write the table there')
    args, extra = parser.parse_known_args()
    if min(args.vocab_size, args.generate or 1, *args.batch_size or [1]) < 1:
        raise UserError('batch_size, generate and vocab_size must be at least 1')
    if args.nanogpt and (args.generate or args.prefill or not Path(args.nanogpt, 'model.py').is_file()):
        raise UserError('--nanogpt measures training, and takes the folder of a checkout, with model.py')
    check_writable(args.json)
    if args.sweep and not args.sweep.partition('=')[2]:
        raise UserError(f'--sweep {args.sweep}: a setting and its values are needed, as n_block=2,4,8')
    return args, extra


def main():
    args, extra = read_arguments()
    planned = list(variants(args, extra))
    machine = Machine(planned[0][1].device, planned[0][1].dtype)
    rate = matrix_rate(machine)
    uncached = '  no cache  ratio' if args.generate else ''
    device = torch.cuda.get_device_name() if machine.cuda else machine.device.type
    sheet = next((f' (data sheet: {DATA_SHEET[name]})' for name in DATA_SHEET if name in device), '')
    print(f'{machine.device}, {machine.dtype}: {rate / 1e12:.4g} TFLOP/s in a large matrix product{sheet}; '
          f'a vocabulary of {args.vocab_size:,} where a config names none')
    print(f"{'model':30}   batch x T  parameters    active   tokens/s{uncached}"
          '        ms     GiB   TFLOP/s  share', flush=True)
    rows = []
    def add(name, model, s, T):
        rows.append(measure(model, name, s, T, args, machine, rate))
        show(rows[-1])
    for name, s, module, keys, T in planned:
        for batch_size in args.batch_size or [s.batch_size]:
            s.batch_size = batch_size
            torch.manual_seed(s.seed)
            model = module.Model(make_config(module, keys))
            add(name, model, s, T)
            if args.dense:
                model = MoEP(dense_like(model, T))       # the other one gives its memory back
                add('  GPT-2 of that size', model, replace(s, aux_weights={}), T)
            if args.nanogpt and isinstance(model, MoEP) and not model.config.n_parallel:
                add('  nanoGPT', nanogpt_like(args.nanogpt, model.config), s, T)
    if args.json:
        write_json(args.json, dict(device=device, dtype=str(machine.dtype), torch=torch.__version__,
                                   matrix_rate=rate, rows=rows))


if __name__ == '__main__':
    run_main(main)
