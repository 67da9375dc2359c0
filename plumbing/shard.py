"""Beyond the memory of one GPU: activations recomputed in backward, and sharded models (FSDP2)."""

import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


def blocks(model, least=1):
    """The model's layers: modules with a matrix, in ModuleLists of at least `least` modules."""
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    members = [block for modules in lists if len(modules) >= least for block in modules]
    has_matrix = lambda block: any(p.dim() > 1 for p in block.parameters())
    return [b for b in members if has_matrix(b) and not isinstance(b, nn.ModuleDict)]  # no forward


def recompute_blocks(model):
    """Keep only the arguments of each block, and run it again in backward."""
    for block in blocks(model):
        block.forward = recompute(block.forward)


def recompute(forward):
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def shard(model, machine):
    """FSDP2: every process holds a part of each parameter, its gradient and AdamW's moments. A
    block gathers its parameters when it runs, in float32: autocast then computes what it does
    without sharding. Embedding, head, norms, and a block that all layers share stay gathered."""
    from torch.distributed.device_mesh import init_device_mesh   # these take a second to import
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    for tensor in (*model.parameters(), *model.buffers()):       # a surgery may differ by rounding
        dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(machine.device.type, (machine.world,))
    for block in blocks(model, least=2):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in ('generate', 'routes'):                  # these gather, too
        register_fsdp_forward_method(model, name)


def sync_gradients(model, wanted):
    """Whether the next backward adds up the gradients of all processes."""
    if is_sharded(model):
        model.set_requires_gradient_sync(wanted)
    else:                                                # DistributedDataParallel
        model.require_backward_grad_sync = wanted


def full_state(model, optimizer):
    """Weights and, with an optimiser, its state; of a sharded model on the first process alone."""
    if not is_sharded(model):
        return model.state_dict(), optimizer and optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, get_model_state_dict, get_optimizer_state_dict)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    return weights, optimizer and get_optimizer_state_dict(model, optimizer, options=options)


def load_optimizer(model, optimizer, state):
    """The moments are the checkpoint's, the settings today's. Every process gets its part."""
    if not is_sharded(model):
        today = optimizer.state_dict()['param_groups']
        return optimizer.load_state_dict(dict(state, param_groups=today))
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict)
    today = get_optimizer_state_dict(model, optimizer)['param_groups']
    set_optimizer_state_dict(model, optimizer, dict(state, param_groups=today),
                             options=StateDictOptions(full_state_dict=True))


def is_sharded(model):
    return hasattr(model, 'set_requires_gradient_sync')
