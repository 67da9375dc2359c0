"""The machine a script runs on: device, precision, torchrun's processes, CUDA graphs."""

import errno
import math
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from tqdm import tqdm

from plumbing.cli import UserError


class Machine:
    """The device and precision of this process, and its place among the processes of the run."""

    def __init__(self, device='auto', dtype='auto'):
        if torch.__version__ < (2, 10) or sys.version_info < (3, 11):
            raise UserError(f'torch>=2.10 and Python>=3.11 are needed; torch is {torch.__version__}')
        self.rank = int(os.environ.get('RANK', 0))
        self.world = int(os.environ.get('WORLD_SIZE', 1))
        self.device = find_device(device)
        self.cuda = self.device.type == 'cuda'
        self.rng = {'cuda': torch.cuda, 'mps': torch.mps}.get(self.device.type)
        if dtype not in ('auto', 'bfloat16', 'float32'):
            raise UserError(f"dtype is '{dtype}'; it can be auto, bfloat16 or float32")
        if dtype == 'auto':                              # a T4 or V100 has no bfloat16
            known = self.cuda and torch.cuda.get_device_capability(self.device) >= (8, 0)
            dtype = 'bfloat16' if known else 'float32'
        self.dtype = getattr(torch, dtype)
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot record a CUDA graph
            torch.set_float32_matmul_precision('high')
        if self.world > 1:
            backend = 'nccl' if self.cuda else 'gloo'
            dist.init_process_group(backend, timeout=timedelta(minutes=10))  # for one that hangs

    def say(self, text):
        """Print on the first process, above the progress bar."""
        if self.rank > 0:
            return
        try:
            tqdm.write(text)
        except OSError as e:
            if e.errno != errno.EIO:                     # closed terminal: train.py still saves
                raise

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def memory(self):
        """Bytes, of the GPU or the computer."""
        if self.cuda:
            return torch.cuda.mem_get_info()[1]
        if not hasattr(os, 'sysconf'):                   # Windows
            return math.inf
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')

    def sum(self, x):
        """Over all processes."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def wait(self):
        """Until all processes are here. Without item(), only the GPUs would wait for each other."""
        self.sum(torch.zeros(1, device=self.device)).item()

    def gather(self, item):
        """Every process's item, in a list, on every process. Keep it small: GPUs pass it on."""
        items = [item] * self.world
        if self.world > 1:
            dist.all_gather_object(items, item)
        return items

    def fail_all(self, text):
        """All processes end, and the first says why."""
        if self.rank == 0:
            raise UserError(text)
        raise SystemExit(2)

    def close(self):
        """All processes end together. If one ends early, torchrun ends the others, or gloo's threads crash.
        (Not with wait(), which can hang: gloo frees its tensor in a thread that waits for Python's lock.)"""
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()

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
    if kind not in ('cuda', 'mps', 'cpu'):
        raise UserError(f"device '{kind}' is unknown; it can be auto, cuda, mps or cpu "
                        '(to choose one of several GPUs, set CUDA_VISIBLE_DEVICES)')
    index = int(os.environ.get('LOCAL_RANK', 0)) if kind == 'cuda' else None
    device = torch.device(kind, index)
    try:
        torch.zeros(1, device=device)
    except Exception as e:
        reason = str(e).partition('\n')[0][:100]
        raise UserError(f'device {device} does not work ({reason}); see --device') from None
    return device


class Replay:
    """A training step fn(*tensors) as one CUDA graph. A small model spends most of a step waiting for the
    host to launch some thousand kernels one by one; a graph launches them as a whole.

    The fourth call with the same shapes records the kernels, later calls replay them. Python runs only
    before and while recording, so what changes between calls must live in tensors that stay: inputs,
    weights, the optimiser's state and learning rate. The results are the same tensors every time: read
    them before the next call. Where a graph is not wanted or not possible, this is just fn."""

    def __init__(self, fn, machine, wanted=True):
        self.fn = fn
        self.device = machine.device
        self.calls = {}                                  # {shapes: plain calls so far}
        self.found = {}                                  # {shapes: what was recorded}
        self.plain_calls = 3 if wanted and machine.cuda and machine.world == 1 else math.inf
        self.pool = None                        # the graphs of all shapes share their memory

    def __call__(self, *inputs):
        shapes = tuple(x.shape for x in inputs)
        calls = self.calls.get(shapes, 0)
        self.calls[shapes] = calls + 1
        if calls == self.plain_calls:
            self.record(shapes, inputs)
        if shapes not in self.found:    # the first calls compile, and allocate AdamW's state
            return self.fn(*inputs)
        graph, held, result = self.found[shapes]
        for mine, new in zip(held, inputs):
            mine.copy_(new)
        graph.replay()
        return result

    def record(self, shapes, inputs):
        graph = torch.cuda.CUDAGraph()
        held = [x.clone() for x in inputs]
        random = torch.cuda.get_rng_state()
        try:
            with torch.cuda.graph(graph, self.pool, torch.cuda.current_stream()):
                result = self.fn(*held)                  # recorded, not computed yet
            self.pool = graph.pool()
            self.found[shapes] = (graph, held, result)
        except RuntimeError as e:                        # such as a model that reads a number back
            reason = str(e.__context__ or e).partition('\n')[0]
            tqdm.write(f'graph     not possible, plain steps instead ({reason})')
            self.found = {}
            self.plain_calls = math.inf
            # The random generator still belongs to the graph. Give it a state of its own.
            generator = torch.cuda.default_generators[self.device.index or 0]
            generator.graphsafe_set_state(torch.Generator(self.device).graphsafe_get_state())
            torch.cuda.set_rng_state(random)
