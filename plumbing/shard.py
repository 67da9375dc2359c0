"""
Beyond one GPU: activations computed again in backward, models sharded over processes (FSDP2), and
checkpoints of which every process writes a part. No model file knows of it.
"""

import contextlib
import functools
from collections import UserList
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from plumbing.cli import UserError

SLICE = 2048                             # tokens whose logits are in memory at one time


def scale(model, s, machine):
    """Change the model in place, as the settings ask for. Its parameters keep their names."""
    if s.checkpoint_activations:
        for block in blocks(model):
            block.forward = recompute(block.forward)
        slice_loss(model, machine)
    if s.shard and machine.world > 1:
        shard(model, machine)


def blocks(model, least=1):
    """The layers: modules with a matrix, in the model's lists of at least so many."""
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    found = [block for each in lists if len(each) >= least for block in each]
    has_matrix = lambda block: any(p.dim() > 1 for p in block.parameters())
    return [b for b in found if has_matrix(b) and not isinstance(b, nn.ModuleDict)]  # it has no forward


# ---- Activations: compute them again instead of keeping them -------------------------------------


def recompute(forward):
    """A block's forward that keeps its inputs alone. A list among them may be a cache, which forward
    extends: the second time, it must find it as it was."""
    lists = (list, UserList)
    copies = lambda args: [list(arg) if isinstance(arg, lists) else arg for arg in args]

    def run(*args):
        before = copies(args)

        def once():
            now = copies(before)
            return forward(*now), now
        result, after = checkpoint(once, use_reentrant=False)
        for arg, new in zip(args, after):
            if isinstance(arg, lists):
                arg[:] = new
        return result
    return run


def slice_loss(model, machine):
    """Let the model compute its loss over slices of tokens: no (tokens, vocabulary) tensor exists. A
    vocabulary of bytes needs none of this."""
    if getattr(model.config, 'byte_limit', 0):
        return
    whole = model.forward
    head = model.head if hasattr(model, 'head') else model.wte

    def nats_of(x, weight, targets):
        return F.cross_entropy(F.linear(x, weight), targets, ignore_index=-1, reduction='none')

    def forward(idx, targets=None, cache=None, reduction='mean'):
        if targets is None:
            return whole(idx, cache=cache)
        states, aux = model.features(idx, cache)
        weight = head.weight
        nats = []
        for x, y in zip(states.flatten(0, 1).split(SLICE), targets.flatten().split(SLICE)):
            nats.append(checkpoint(nats_of, x, weight, y, use_reentrant=False))
        nats = torch.cat(nats)
        if reduction == 'none':
            return None, nats.view_as(targets), aux
        return None, nats.sum() / (targets >= 0).sum(), aux

    model.eval()
    ids = torch.arange(2, device=machine.device)[None]
    with torch.no_grad(), machine.autocast():
        same = torch.allclose(whole(ids, ids)[1].float(), forward(ids, ids)[1].float(), rtol=1e-2)
    model.train()
    if not same:
        raise UserError('checkpoint_activations: the loss of this model is not the cross-entropy of '
                        'features @ head.weight.T, so it cannot be computed in slices')
    model.forward = forward


# ---- Sharding ------------------------------------------------------------------------------------


def replicate(model, s, machine):
    """Several processes that do not share one model each have a copy, and add up their gradients."""
    if machine.world > 1 and not s.shard:
        return nn.parallel.DistributedDataParallel(model)
    return model


def shard(model, machine):
    """FSDP2: every process holds a part of each parameter, of its gradient and of AdamW's moments. A
    block gathers its own parameters when it runs; the rest stay gathered, and so does a list of one
    block, which all layers may share. They are gathered in float32, so that autocast computes what
    it does without sharding: a policy of bfloat16 parameters would round routers and norms, too."""
    from torch.distributed.device_mesh import init_device_mesh   # these take a second to import
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    single = [name for name, p in model.named_parameters() if p.dim() == 0]
    if single:
        raise UserError(f'shard: {single[0]} is a single number, which cannot be divided; '
                        'train this model without --shard')
    mesh = init_device_mesh(machine.device.type, (machine.world,))
    for block in blocks(model, least=2):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in ('generate', 'routes'):                  # these gather, too
        register_fsdp_forward_method(model, name)
    model.register_forward_pre_hook(hide_cache, with_kwargs=True, prepend=True)
    model.no_sync = functools.partial(no_sync, model)    # as DistributedDataParallel has it


def hide_cache(model, args, kwargs):
    """Of a list, FSDP gives each block a copy, which it would extend in vain. Not so of a UserList."""
    if kwargs.get('cache') is not None:
        hidden = UserList()
        hidden.data = kwargs['cache']                    # extends the list itself
        kwargs = {**kwargs, 'cache': hidden}
    return args, kwargs


@contextlib.contextmanager
def no_sync(model):
    """Gradients add up in each process, until the last micro-batch."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def is_sharded(x):
    return hasattr(x, 'full_tensor')                     # a DTensor


def full(x):
    """The tensor that the processes hold together, in each of them."""
    return x.full_tensor() if is_sharded(x) else x


def part_like(tensor, p):
    """This process's part of a whole tensor, sharded as p is."""
    if not is_sharded(p) or tensor.dim() == 0:
        return tensor
    from torch.distributed.tensor import DTensor
    parts = tensor.chunk(p.device_mesh.size())
    rank = p.device_mesh.get_local_rank()
    mine = parts[rank] if rank < len(parts) else tensor[:0]
    return DTensor.from_local(mine.to(p.device, copy=True), p.device_mesh, p.placements,
                              run_check=False, shape=tensor.shape, stride=tensor.stride())


# ---- Checkpoints in parts ------------------------------------------------------------------------
#
# ckpt.pt then holds all but the sharded tensors, and the number of parts. These lie in shards/, a
# file for each process: {weights: {name: rows}, optimizer: {state: {index: {moment: rows}}}}. They
# are plain tensors, read with weights_only. torch.distributed.checkpoint would keep its directory as
# a pickle, which can run code.


def pick(tree, sharded):
    """Of nested dicts, the tensors that are sharded, this process's rows; or all the rest."""
    picked = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            picked[key] = pick(value, sharded)
        elif is_sharded(value) == sharded:
            picked[key] = value.to_local().to('cpu', copy=True) if sharded else value
    return picked


def merge(trees):
    """One nested dict of several. A tensor that lies in parts becomes a list of them."""
    if not isinstance(trees[0], dict):
        return trees[0] if len(trees) == 1 else trees
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return {key: merge([tree[key] for tree in trees if key in tree]) for key in keys}


def join(parts):
    return torch.cat(parts) if isinstance(parts, list) else parts


def shard_file(file, it, rank, world):
    """out/run/ckpt.pt at step 20 -> out/run/shards/ckpt.20.0-of-2.pt"""
    file = Path(file)
    return file.parent / 'shards' / f'{file.stem}.{it}.{rank}-of-{world}.pt'


def remove_shards(file, kept=()):
    """Those of a checkpoint file, but not these."""
    for old in (file.parent / 'shards').glob(f'{file.stem}.*'):
        if old not in kept:
            old.unlink()
