"""
The machine a script runs on: its device and precision, the other processes if torchrun started several, and CUDA graphs.
"""

import math
import os

import torch
import torch.distributed as dist
from tqdm import tqdm

from errors import UserError


class Machine:
    """The device and precision of this process, and its place among the processes that torchrun started."""

    def __init__(self, device='auto', dtype='auto'):
        self.rank, self.world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
        kind = device
        if kind == 'auto':
            kind = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
        try:
            self.device = torch.device(kind, int(os.environ.get('LOCAL_RANK', 0)) if kind == 'cuda' else None)
            torch.zeros(1, device=self.device)
        except Exception:
            raise UserError(f"device '{device}' is not on this machine; it can be auto, cuda, mps or cpu (one of several GPUs: set "
                            'CUDA_VISIBLE_DEVICES)') from None
        self.cuda = self.device.type == 'cuda'
        if dtype not in ('auto', 'bfloat16', 'float32'):
            raise UserError(f"dtype is '{dtype}'; it can be auto, bfloat16 or float32")
        self.dtype = torch.bfloat16 if dtype == 'bfloat16' or (dtype == 'auto' and self.cuda) else torch.float32
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream())   # on the default stream no CUDA graph can be recorded
            torch.set_float32_matmul_precision('high')
        if self.world > 1:
            dist.init_process_group('nccl' if self.cuda else 'gloo')

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def sum(self, x):                                    # over all processes
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def gather(self, item):                              # every process's item, in a list, on the first process
        items = [item] * self.world
        if self.world > 1:
            dist.gather_object(item, items if self.rank == 0 else None)
        return items

    def random_state(self):
        generator = {'cuda': torch.cuda, 'mps': torch.mps}.get(self.device.type)
        return dict(cpu=torch.get_rng_state(), device=generator.get_rng_state() if generator else None)

    def set_random_state(self, state):
        torch.set_rng_state(state['cpu'])
        generator = {'cuda': torch.cuda, 'mps': torch.mps}.get(self.device.type)
        if generator and state['device'] is not None:
            generator.set_rng_state(state['device'])


class Replay:
    """A training step fn(*tensors) as one CUDA graph. The fourth call with tensors of the same shapes records the kernels that
    it launches, and from then on they are started as a whole: a small model need not wait for the host, which would start
    some thousand of them one by one. Python runs in the first calls and while recording, not in replays: what changes
    between calls must lie in tensors that stay (inputs, weights, the optimiser's state and learning rate). The results are
    the same tensors every time: read them before the next call. Where a graph is not wanted or not possible, and in the
    first calls, this is just fn; tests compare the two."""

    def __init__(self, fn, machine, wanted=True):
        self.fn, self.device = fn, machine.device
        self.calls, self.found = {}, {}                  # {shapes: plain calls so far}, {shapes: what was recorded}
        self.plain_calls = 3 if wanted and machine.cuda and machine.world == 1 else math.inf
        self.pool = None                                 # the graphs of all shapes share their memory

    def __call__(self, *inputs):
        shapes = tuple(x.shape for x in inputs)
        calls = self.calls[shapes] = self.calls.get(shapes, -1) + 1
        if calls == self.plain_calls:
            self.record(shapes, inputs)
        if shapes not in self.found:                     # the first calls also compile, and allocate the optimiser's state
            return self.fn(*inputs)
        graph, held, result = self.found[shapes]
        for mine, new in zip(held, inputs):
            mine.copy_(new)
        graph.replay()
        return result

    def record(self, shapes, inputs):
        graph, held, random = torch.cuda.CUDAGraph(), [x.clone() for x in inputs], torch.cuda.get_rng_state()
        try:
            with torch.cuda.graph(graph, self.pool, torch.cuda.current_stream()):
                result = self.fn(*held)                  # nothing is computed yet
            self.pool, self.found[shapes] = graph.pool(), (graph, held, result)
        except RuntimeError as e:                        # as of a model that waits for the device
            tqdm.write(f'graph     not possible, plain steps instead ({str(e.__context__ or e).splitlines()[0]})')
            self.found, self.plain_calls = {}, math.inf
            # the random generator still belongs to the graph: it gets another state, with the numbers of before
            generator = torch.cuda.default_generators[self.device.index or 0]
            generator.graphsafe_set_state(torch.Generator(self.device).graphsafe_get_state())
            torch.cuda.set_rng_state(random)
