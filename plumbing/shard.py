"""A model that is spread over several processes (FSDP2). A checkpoint holds the whole of it."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import distribute_tensor

from plumbing.compile import blocks


def shard(model, machine):
    """Every process holds a part of each parameter and of its gradient. A block gathers its
    parameters when it runs, in float32, so autocast computes what it does without sharding. The
    embedding, the head, norms, and a block that all layers share stay gathered."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(machine.device.type, (machine.world,))
    for block in blocks(model, least=2):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in ('generate', 'routes'):                  # these gather, too
        register_fsdp_forward_method(model, name)
    model.register_state_dict_post_hook(lambda model, state, *_: state.update(whole(state)))


def shard_optimizer(optimizer):
    """state_dict() returns the whole moments, and load_state_dict() takes a process's part."""
    params = [p for group in optimizer.param_groups for p in group['params']]

    def part(p, value):
        if value.shape != p.shape:                       # such as the number of steps
            return value
        return distribute_tensor(value.to(p.device), p.device_mesh, p.placements)

    def split(optimizer, state):
        parts = {i: {name: part(params[i], value) for name, value in moments.items()}
                 for i, moments in state['state'].items()}
        return dict(state, state=parts)
    optimizer.register_load_state_dict_pre_hook(split)
    optimizer.register_state_dict_post_hook(lambda optimizer, state: dict(
        state, state={i: whole(moments) for i, moments in state['state'].items()}))


def whole(tensors):
    """{name: tensor}, gathered one after the other. Only the first process keeps them."""
    full = {}
    for name, x in tensors.items():
        if hasattr(x, 'full_tensor'):
            x = x.full_tensor()
        full[name] = x.cpu() if dist.get_rank() == 0 else None
    return full
