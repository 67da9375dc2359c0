"""Runs of train.py one after the other in the same processes, for torchrun: starting them takes longest.
python tests/train_many.py '[["config/moep.py", "--shard"], ...]'"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train                                             # noqa: E402

torch.set_num_threads(1)
real_step, real_start = train.train_step, train.start_model


def held(tensors):
    """Bytes of this process's own part."""
    parts = [t.to_local() if hasattr(t, 'to_local') else t for t in tensors]
    return sum(t.nbytes for t in parts if t.dim())


def train_step(model, optimizer, *args):
    """train.py's own; and then what the first process holds."""
    result = real_step(model, optimizer, *args)
    weights = list(model.parameters())
    gradients = [p.grad for p in weights if p.grad is not None]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    if dist.get_rank() == 0:
        print('held', json.dumps(dict(weights=held(weights), gradients=held(gradients), AdamW=held(moments))))
    return result


@torch.no_grad()
def start_model(*args):
    """train.py's own; but every process starts with other weights. Only the first one's may count."""
    model, report = real_start(*args)
    for p in model.parameters():
        p += 0.01 * dist.get_rank()
    return model, report


begin, end = dist.init_process_group, dist.destroy_process_group
with mock.patch.object(dist, 'init_process_group', lambda *args, **kwargs: None), \
        mock.patch.object(dist, 'destroy_process_group', lambda: None), \
        mock.patch.object(train, 'train_step', train_step), \
        mock.patch.object(train, 'start_model', start_model):
    begin('gloo')
    for argv in json.loads(sys.argv[1]):
        sys.argv = ['train.py', *argv]
        train.main()
end()
