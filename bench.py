"""
How fast? Tokens per second, memory, and the share of what the machine could do; everything in one run, so that it compares.

    python bench.py config/moep.py config/gpt2.py                                    # toy sizes, on a laptop
    python bench.py config/paper/gpt2.py config/paper/moep.py --batch_size 16 64 128 --dense
    python bench.py config/paper/moep.py --sweep n_block=2,4,8,16 --batch_size 64    # cost against size
    python bench.py config/paper/moep.py --sweep sparse=True,False                   # the sparse path and its reference
    python bench.py config/moduleformer.py --generate 512 --batch_size 1 64          # decoding, with and without cache
    python bench.py config/moduleformer.py --prefill --dense                         # reading 32 x 1,024 tokens

A training step is train.py's own: forward, backward, clipping, optimiser, on random tokens. --dense puts beside every model a
GPT-2 (moep.py without parallel layers) of as many parameters. FLOPs per token of training are 6 per active parameter and, for
causal attention, 6 per unit of its width and position; the machine's rate is that of one large matrix product, measured in the
same run. Any setting can be given as --key=value, as to train.py.
"""

import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from errors import Parser, UserError, check_writable, run_main, write_json
from loader import Data
from machine import Machine, Replay
from moep import MoEP, MoEPConfig
from settings import make_config, read_settings
from train import FASTER, make_optimizer, short, train_step

ATTENTION = dict(      # the width of all heads that a token asks with, summed over layers; add your model's here
    moep=lambda c: c.n_layer * c.n_embd + c.n_parallel * c.n_block * c.n_embd_parallel,
    papaformer=lambda c: c.n_layer * c.n_embd + c.n_parallel * sum(c.path_embd),
    moduleformer=lambda c: c.n_layer * c.top_k * c.d_att,
    selfmoe=lambda c: c.n_layer * c.n_embd, stlm=lambda c: c.n_layer * c.n_embd)


class RandomTokens(Data):
    """Chunks of random tokens, at random places."""

    def __init__(self, vocab_size, rows, T, device):
        self.tokens = torch.randint(vocab_size, (64 * (T + 1),), device=device).short()
        self.rows, self.T, self.pad, self.random = rows, T, -1, np.random.default_rng(0)

    def take(self, n):
        return self.random.integers(63 * (self.T + 1), size=n)


def synchronize(machine):
    if machine.cuda:
        torch.cuda.synchronize()
    elif machine.device.type == 'mps':
        torch.mps.synchronize()


def seconds(work, machine, repeat=5, at_least=0.2):
    """The median time of one call, of `repeat` measurements that each last `at_least` seconds; warmed up."""
    def measure(n):
        synchronize(machine)
        start = time.perf_counter()
        for _ in range(n):
            work()
        synchronize(machine)
        return (time.perf_counter() - start) / n
    measure(1)
    once = measure(1)
    if once > at_least:                                  # slow: one call each, and beyond some seconds no more
        return statistics.median([once, *(measure(1) for _ in range(repeat - 1 if once < 10 * at_least else 0))])
    n = max(1, round(at_least / measure(2)))
    return statistics.median(measure(n) for _ in range(repeat))


def matrix_rate(machine):
    """FLOP per second of a large matrix product, in the precision that is trained in."""
    n = 8192 if machine.cuda else 1024
    a, b = (torch.randn(n, n, device=machine.device, dtype=machine.dtype) for _ in range(2))
    return 2 * n ** 3 / seconds(lambda: a @ b, machine)


def peak_memory(machine):
    return torch.cuda.max_memory_allocated() / 2 ** 30 if machine.cuda else None


def reset_memory(machine):
    if machine.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ---------------------------------------------------------------------------------------------------------------
# What is measured


def training(model, s, T, machine):
    """One training step after another, as train.py takes them."""
    optimizer = make_optimizer(model, s, machine)
    data = RandomTokens(model.config.vocab_size, s.batch_size * s.gradient_accumulation_steps, T, machine.device)
    compiled = torch.compile(model.train(), options=FASTER) if s.compile or (s.compile is None and machine.cuda) else model.train()
    s = replace(s, memory=0)
    replay = Replay(lambda starts: train_step(compiled, optimizer, data, starts, None, s, machine), machine, s.graph)
    step = lambda: replay(torch.from_numpy(data.take(data.rows)).to(machine.device))
    step()                                               # compiles, and allocates the optimiser's state
    reset_memory(machine)
    for _ in range(3 if machine.cuda else 0):            # the last is recorded as a CUDA graph; replays allocate nothing,
        step()                                           # so memory is measured here
    gib, took = peak_memory(machine), seconds(step, machine)
    return dict(tokens_per_s=data.rows * T / took, ms=1e3 * took, gib=gib)


@torch.no_grad()
def generation(model, rows, n, machine):
    """n greedy tokens, with the cache and without."""
    model.eval()
    start = torch.zeros(rows, 1, dtype=torch.long, device=machine.device)

    def without():
        ids = start
        for _ in range(n):
            ids = torch.cat((ids, model(ids)[0][:, -1:].argmax(-1)), 1)
    with machine.autocast():
        cached = seconds(lambda: model.generate(start, n, temperature=0), machine, repeat=3)
        uncached = seconds(without, machine, repeat=3)
    return dict(tokens_per_s=rows * n / cached, no_cache=rows * n / uncached, ms=1e3 * cached / n, gib=peak_memory(machine))


@torch.no_grad()
def prefill(model, batch_size, T, machine):
    """One forward over (batch_size, T) tokens, logits of the last one."""
    model.eval()
    ids = torch.randint(model.config.vocab_size, (batch_size, T), device=machine.device)

    def read():
        states, _ = model.features(ids)
        head = model.head.weight if hasattr(model, 'head') else model.wte.weight
        return states[:, -1] @ head.T.to(states.dtype)
    with machine.autocast():
        took = seconds(read, machine)
    return dict(tokens_per_s=ids.numel() / took, ms=1e3 * took, gib=peak_memory(machine))


# ---------------------------------------------------------------------------------------------------------------
# Which models


def dense_like(model, T):
    """A GPT-2 with as many parameters as the model, as near as layers and a width of whole heads of 64 come to it."""
    total, V = model.count_params()[0], model.config.vocab_size
    size = lambda L, D: V * D + T * D + L * (12 * D * D + 13 * D) + 2 * D
    heads = 64 if total > 5e6 else 16
    shapes = [(L, D) for L in range(2, 49) for D in range(heads, 4097, heads) if 16 <= D / L <= 128]    # not too thin, nor flat
    L, D = min(shapes, key=lambda shape: abs(size(*shape) - total))
    return MoEPConfig(vocab_size=V, block_size=T, n_layer=L, n_embd=D, n_head=D // heads, n_parallel=0,
                      dropout=getattr(model.config, 'dropout', 0.0))


def variants(args, extra):
    """(name, settings, model file, its keys) for every config and every value of --sweep."""
    key, _, values = (args.sweep or '').partition('=')
    for config in args.configs:
        for value in values.split(',') if args.sweep else [None]:
            given = [] if value is None else [f'--{key}={value}']
            s, module, keys = read_settings([config, *extra, *given])
            if s.init_from:
                raise UserError(f'{config} starts from another run; bench.py measures models that a config describes alone')
            keys.setdefault('vocab_size', args.vocab_size)
            keys.setdefault('block_size', module.Config.block_size)
            if keys.get('byte_limit'):
                raise UserError(f'{config}: bench.py measures models of tokens, not of chunks of bytes')
            make_config(module, keys)                    # a mistake is told before anything is measured
            yield ' '.join([Path(config).stem, *(v[2:] for v in given)]), s, module, keys


def measure(model, name, s, T, args, machine, rate):
    """One line of the table."""
    reset_memory(machine)
    total, active = model.count_params()
    width = ATTENTION.get(type(model).__module__, lambda config: 0)(model.config)       # of a file it does not know: none
    flops = 2 * active + 2 * width * T                   # of a token's forward, at the mean position T / 2
    if args.generate:
        found = generation(model, s.batch_size, args.generate, machine)
    elif args.prefill:
        found = prefill(model, s.batch_size, T, machine)
    else:
        found, flops = training(model, s, T, machine), 3 * flops
    rows = s.batch_size * (1 if args.generate or args.prefill else s.gradient_accumulation_steps)
    return dict(name=name, rows=rows, T=T, total=total, active=active, **found, flops_per_token=flops,
                share=flops * found['tokens_per_s'] / rate)


# ---------------------------------------------------------------------------------------------------------------
# The table


def show_head(machine, rate, args):
    print(f'{machine.device}, {machine.dtype}: {rate / 1e12:.4g} TFLOP/s in a large matrix product; a vocabulary of '
          f'{args.vocab_size:,} where a config names none')
    decode = '  no cache  ratio' if args.generate else ''
    print(f"{'model':30}   batch x T  parameters    active   tokens/s{decode}        ms     GiB   TFLOP/s  share", flush=True)


def show(row, args):
    gib = '-' if row['gib'] is None else f"{row['gib']:.2f}"
    decode = f"{row['no_cache']:10,.0f}{row['tokens_per_s'] / row['no_cache']:7.1f}" if args.generate else ''
    print(f"{row['name']:30}{row['rows']:6} x {row['T']:<4}{short(row['total']):>11}{short(row['active']):>10}{row['tokens_per_s']:11,.0f}"
          f"{decode}{row['ms']:10.2f}{gib:>8}{row['flops_per_token'] * row['tokens_per_s'] / 1e12:10.4g}{100 * row['share']:6.1f}%", flush=True)


def main():
    parser = Parser(__doc__)
    parser.add_argument('configs', nargs='+', help='config files')
    parser.add_argument('--batch_size', type=int, nargs='+', help="several to try; the config's own if not given, 1 to decode")
    parser.add_argument('--dense', action='store_true', help='beside every model a GPT-2 of as many parameters')
    parser.add_argument('--sweep', metavar='KEY=A,B,...', help='every config with each of these values')
    parser.add_argument('--generate', type=int, metavar='N', help='decode N tokens instead, with and without the cache')
    parser.add_argument('--prefill', action='store_true', help='read 32 x 1,024 tokens instead (--batch_size, --seq_len=T)')
    parser.add_argument('--vocab_size', type=int, default=16384, help='where the config names none')
    parser.add_argument('--json', type=Path, help='write the table there')
    args, extra = parser.parse_known_args()
    if min([*(args.batch_size or []), 1 if args.generate is None else args.generate, args.vocab_size]) < 1:
        raise UserError('batch_size, generate and vocab_size must be at least 1')
    check_writable(args.json)
    if args.sweep and not args.sweep.partition('=')[2]:
        raise UserError(f"--sweep {args.sweep}: it should be a setting and its values, as n_block=2,4,8")
    rows, machine = [], None
    for name, s, module, keys in list(variants(args, extra)):
        if machine is None:
            machine = Machine(s.device, s.dtype)
            rate = matrix_rate(machine)
            show_head(machine, rate, args)
        T = args.generate + 1 if args.generate else s.seq_len or (1024 if args.prefill else keys['block_size'])
        keys['block_size'] = max(T, keys['block_size'])
        for batch_size in args.batch_size or [1 if args.generate else 32 if args.prefill else s.batch_size]:
            s.batch_size = batch_size
            torch.manual_seed(s.seed)
            model = module.Model(make_config(module, keys)).to(machine.device)
            rows.append(measure(model, name, s, T, args, machine, rate))
            show(rows[-1], args)
            if args.dense:
                model = MoEP(dense_like(model, T)).to(machine.device)
                rows.append(measure(model, '  GPT-2 of that size', replace(s, aux_weights={}), T, args, machine, rate))
                show(rows[-1], args)
    if args.json:
        device = torch.cuda.get_device_name() if machine.cuda else machine.device.type
        write_json(args.json, dict(device=device, dtype=str(machine.dtype), torch=torch.__version__, matrix_rate=rate, rows=rows))


if __name__ == '__main__':
    run_main(main)
