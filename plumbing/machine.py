"""The machine a script runs on: device, precision, processes."""

import ctypes
import functools
import os
import sys
import time

import torch
import torch.distributed as dist
from tqdm import tqdm

from plumbing.cli import UserError


class Machine:
    """The device and precision of this process, and its place among the processes of the run."""

    def __init__(self, device='auto', dtype='auto', deterministic=False):
        if torch.__version__ < (2, 10):
            raise UserError(f'torch>=2.10 is needed; this is {torch.__version__}')
        self.rank = int(os.environ.get('RANK', 0))
        self.world = int(os.environ.get('WORLD_SIZE', 1))
        self.device = find_device(device)
        self.cuda = self.device.type == 'cuda'
        self.rng = {'cuda': torch.cuda, 'mps': torch.mps}.get(self.device.type)
        if dtype == 'auto':                              # a T4 or V100 (7.x) has no bfloat16
            version = torch.cuda.get_device_capability(self.device)[0] if self.cuda else 0
            dtype = 'bfloat16' if version >= 8 else 'float16' if version == 7 else 'float32'
        self.dtype = getattr(torch, dtype)
        if deterministic:
            os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'    # read when a GPU is first used
            torch.use_deterministic_algorithms(True)     # torch refuses what it cannot promise
            torch.utils.deterministic.fill_uninitialized_memory = False  # that costs time only
        if self.device.type == 'cpu':
            keep_freed_memory()
            choose_threads()
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream())   # the default one cannot record graphs
            torch.set_float32_matmul_precision('high')
        if self.world > 1:
            dist.init_process_group('nccl' if self.cuda else 'gloo')

    def say(self, text):
        """Print on the first process, above the progress bar."""
        if self.rank == 0:
            tqdm.write(text)

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def send(self, x):
        """A tensor of the host to the device, without waiting until it is there."""
        return x.pin_memory().to(self.device, non_blocking=True) if self.cuda else x.to(self.device)

    def sum(self, x):
        """Over all processes."""
        if self.world > 1:
            x = x.to(self.device)                        # nccl adds up on GPUs only
            dist.all_reduce(x)
        return x

    def mean(self, x):
        return self.sum(x.clone()).item() / self.world

    def gather(self, item):
        """Every process's item, in a list, on every process."""
        items = [item] * self.world
        if self.world > 1:
            dist.all_gather_object(items, item)
        return items

    def barrier(self):
        """All processes wait for each other."""
        if self.world > 1:
            dist.barrier()

    def close(self):
        """All processes end together: if one ends early, torchrun ends the others."""
        self.barrier()
        if self.world > 1:
            dist.destroy_process_group()

    @functools.cached_property
    def matrix_rate(self):
        """FLOP per second of a large matrix product, in the precision that is trained in."""
        n = 8192 if self.cuda else 1024
        a = torch.rand(n, n, device=self.device, generator=torch.Generator(self.device))
        a, times = a.to(self.dtype), []
        for _ in range(5):                               # the first ones warm up
            began = time.perf_counter()
            (a @ a)[0, 0].item()                         # waits until it is computed
            times.append(time.perf_counter() - began)
        return 2 * n ** 3 / min(times)

    def set_threads(self, n):
        """As many as the run that is resumed had: another number may change the last bits."""
        if self.device.type == 'cpu' and 'OMP_NUM_THREADS' not in os.environ:
            torch.set_num_threads(min(n, os.cpu_count()))

    def random_state(self):
        return dict(cpu=torch.get_rng_state(), device=self.rng and self.rng.get_rng_state())

    def set_random_state(self, state):
        torch.set_rng_state(state['cpu'])
        if self.rng and state['device'] is not None:
            self.rng.set_rng_state(state['device'])


def find_device(kind):
    if kind == 'auto':
        has_mps = torch.backends.mps.is_available() and 'RANK' not in os.environ     # gloo lacks it
        kind = 'cuda' if torch.cuda.is_available() else 'mps' if has_mps else 'cpu'
    index = int(os.environ.get('LOCAL_RANK', 0)) if kind == 'cuda' else None
    try:
        device = torch.device(kind, index)
        torch.zeros(1, device=device)
    except Exception as error:
        reason = str(error).partition('\n')[0][:100]
        raise UserError(f'device {kind} does not work: name cuda, mps or cpu ({reason})') from None
    return device


def keep_freed_memory():
    """Linux's malloc returns freed memory to the system, so that every step asks for it again, page
    by page. Not to do so makes a step of a small model 5 to 12% faster."""
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None) if sys.platform == 'linux' else None
    if mallopt:
        mallopt(-1, 2 ** 31 - 1)                         # M_TRIM_THRESHOLD
        mallopt(-3, 2 ** 25)                             # M_MMAP_THRESHOLD, the largest there is


def choose_threads():
    """Threads wait for each other after every operation, so one that waits for its core stalls all.
    Halve their number while that makes small operations faster: then something else keeps the CPU
    busy. OMP_NUM_THREADS decides instead, if it is set."""
    n = torch.get_num_threads()
    while n > 1 and 'OMP_NUM_THREADS' not in os.environ and additions(n) < additions(n // 2):
        n //= 2
    torch.set_num_threads(n)


def additions(n_threads, seconds=0.03):
    """How many numbers the threads add in `seconds`."""
    torch.set_num_threads(n_threads)
    x = torch.zeros(n_threads * 2 ** 15) + 1             # the least that torch shares out
    end, done = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        x += 1
        done += len(x)
    return done


def widen(model, machine):
    """Imported weights may be bfloat16. What trains becomes float32. A frozen matrix stays as it is
    where autocast can use it; embeddings, norms and routers take little room, and need more."""
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, p in model.named_parameters():
        is_map = p.dim() >= 2 and p not in tables and '.router.' not in name
        if p.requires_grad or not is_map or machine.dtype == torch.float32:
            p.data = p.data.float()
