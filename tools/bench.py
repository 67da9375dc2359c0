"""
How fast? Tokens per second, memory, and the share of what the machine could do.

    python -m tools.bench config/moep.py config/gpt2.py                    # toy sizes, on a laptop
    python -m tools.bench config/paper/gpt2.py config/paper/moep.py --batch_size 16 64 --dense
    python -m tools.bench config/paper/moep.py --sweep n_block=2,4,8,16    # cost against size
    python -m tools.bench config/moduleformer.py --generate 512            # decoding, cached or not
    python -m tools.bench config/moduleformer.py --prefill --dense         # reading a long prompt
    python -m tools.bench config/paper/gpt2.py --nanogpt ../nanoGPT        # and nanoGPT itself

A training step is train.py's own, on random tokens. --dense adds for every model a GPT-2 (moep.py
without parallel layers) of as many parameters. On a GPU all rows are compiled at the same time, and
measured one after the other. tools/flops.py says how FLOPs are counted; the machine's rate is that of
one large matrix product in the same run. Any setting can be given as --key=value, as to train.py.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from plumbing.cli import Parser, UserError, between, check_writable, run_main, short, write_json
from plumbing.machine import Machine
from plumbing.models import import_model, make_config, sketch
from plumbing.settings import Settings, read_settings
from tools.bench_others import dense_like, nanogpt_like
from tools.entries import split_values
from tools.flops import training_flops
from tools.measure import generation, make_step, matrix_rate, prefill, training

DATA_SHEET = dict(H200=989, H100=989, A100=312)          # TFLOP/s in bfloat16


# ---- The rows of the table ----------------------------------------------------------------------

@dataclass
class Row:
    name: str
    file: str                            # the model file
    config: object                       # the model's
    s: Settings
    T: int

    def build(self, args):
        torch.manual_seed(self.s.seed)
        if self.file == 'nanogpt_model':
            return nanogpt_like(args.nanogpt, self.config)
        return import_model(self.file).Model(self.config)


def plan_rows(args, extra):
    """A row for every config, value of --sweep and batch size, and those that go beside it."""
    key, _, values = (args.sweep or '').partition('=')
    values = split_values(values) if args.sweep else ['']
    for config in args.configs:
        for value in values:
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
            made = make_config(module, keys)             # reports mistakes before any work
            dense = dense_like(sketch(module, keys), T) if args.dense else None
            for batch_size in args.batch_size or [s.batch_size]:
                s = replace(s, batch_size=batch_size)
                plain = replace(s, aux_weights={})       # for models without auxiliary losses
                yield Row(name, s.model, made, s, T)
                if dense:
                    yield Row('  GPT-2 of that size', 'moep', dense, plain, T)
                like = made if s.model == 'moep' and not made.n_parallel else dense
                if args.nanogpt and like:
                    yield Row('  nanoGPT', 'nanogpt_model', like, plain, T)


def compile_rows(rows, args):
    """torch keeps on disk what it has compiled. So every row takes one step, all at the same time and
    each in a process of its own. When its turn comes to be measured, it starts in seconds."""
    at_once = min(len(rows), 8)
    os.environ.setdefault('TORCHINDUCTOR_COMPILE_THREADS', str(max(1, os.cpu_count() // at_once)))
    with ProcessPoolExecutor(at_once, multiprocessing.get_context('spawn')) as pool:
        for row in rows:
            pool.submit(first_step, row, args)           # what fails here fails again, and says why


def first_step(row, args):
    machine = Machine(row.s.device, row.s.dtype)
    make_step(row.build(args).to(machine.device), row.s, row.T, machine)()


def measure(row, args, machine, rate):
    """One line of the table."""
    s, model = row.s, row.build(args).to(machine.device).eval()
    if machine.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    total, active = model.count_params()
    flops = training_flops(row.config, active, row.T)
    rows = s.batch_size
    if args.generate:
        found = generation(model, rows, args.generate, machine)
    elif args.prefill:
        found = prefill(model, rows, row.T, machine)
    else:
        found = training(model, s, row.T, machine)
        rows *= s.gradient_accumulation_steps
    if args.generate or args.prefill:
        flops /= 3                                       # forward alone
    if args.prefill:
        flops -= 2 * row.config.vocab_size * row.config.n_embd   # the head: last tokens alone
    gib = torch.cuda.max_memory_allocated() / 2 ** 30 if machine.cuda else None
    return dict(name=row.name, rows=rows, T=row.T, total=total, active=active, **found, gib=gib,
                flops_per_token=flops, share=flops * found['tokens_per_s'] / rate)


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
    parser.add_argument('--batch_size', type=between(1, 10 ** 6), nargs='+',
                        help="the config's own if not given")
    parser.add_argument('--dense', action='store_true', help='add a GPT-2 of the same size to each')
    parser.add_argument('--nanogpt', metavar='PATH', help='a checkout: beside each GPT-2')
    parser.add_argument('--sweep', metavar='KEY=A,B,...', help='each config with each of these values')
    parser.add_argument('--generate', type=between(1, 10 ** 6), metavar='N',
                        help='decode N tokens instead')
    parser.add_argument('--prefill', action='store_true', help='read 32 x 1,024 tokens instead')
    parser.add_argument('--vocab_size', type=between(1, 65536), default=16384,
                        help='where the config names none')
    parser.add_argument('--json', type=Path, help='write the table there')
    args, extra = parser.parse_known_args()
    if args.nanogpt and (args.generate or args.prefill or not Path(args.nanogpt, 'model.py').is_file()):
        raise UserError('--nanogpt measures training, and takes the folder of a checkout, with model.py')
    check_writable(args.json)
    if args.sweep and not args.sweep.partition('=')[2]:
        raise UserError(f'--sweep {args.sweep}: a setting and its values are needed, such as n_block=2,4,8')
    return args, extra


def main():
    args, extra = read_arguments()
    planned = list(plan_rows(args, extra))
    machine = Machine(planned[0].s.device, planned[0].s.dtype)
    rate = matrix_rate(machine)
    uncached = '  no cache  ratio' if args.generate else ''
    device = torch.cuda.get_device_name() if machine.cuda else machine.device.type
    sheet = next((f' (data sheet: {DATA_SHEET[name]})' for name in DATA_SHEET if name in device), '')
    print(f'{machine.device}, {machine.dtype}: {rate / 1e12:.4g} TFLOP/s in a large matrix product{sheet}; '
          f'a vocabulary of {args.vocab_size:,} where a config names none')
    if machine.cuda and len(planned) > 1 and not (args.generate or args.prefill):
        compile_rows(planned, args)
    print(f"{'model':30}   batch x T  parameters    active   tokens/s{uncached}"
          '        ms     GiB   TFLOP/s  share', flush=True)
    rows = []
    for row in planned:
        rows.append(measure(row, args, machine, rate))
        show(rows[-1])
    if args.json:
        write_json(args.json, dict(device=device, dtype=str(machine.dtype), torch=torch.__version__,
                                   matrix_rate=rate, rows=rows))


if __name__ == '__main__':
    run_main(main)
