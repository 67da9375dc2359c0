"""The machine a script runs on: its device and precision, and the other processes if torchrun started several."""

import os

import torch
import torch.distributed as dist

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
            raise UserError(f"device '{device}' is not on this machine; it can be auto, cuda, mps or cpu") from None
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
