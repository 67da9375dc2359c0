"""Beyond one GPU: activations recomputed in backward, sharded models (FSDP2), checkpoints in parts."""

from collections import UserList

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from plumbing.cli import UserError

SLICE = 2048                             # tokens whose logits are in memory at one time


def shard_and_recompute(model, s, machine):
    """Change the model in place, as the settings ask for. Its parameters keep their names."""
    if s.checkpoint_activations:
        for block in blocks(model):
            block.forward = recompute(block.forward)
        slice_loss(model, machine)
    if s.shard and machine.world > 1:
        shard(model, machine)


def blocks(model, least=1):
    """The model's layers: modules with a matrix, in ModuleLists of at least `least` modules."""
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    found = [block for each in lists if len(each) >= least for block in each]
    has_matrix = lambda block: any(p.dim() > 1 for p in block.parameters())
    return [b for b in found if has_matrix(b) and not isinstance(b, nn.ModuleDict)]  # it has no forward


# ---- Activations: compute them again instead of keeping them -------------------------------------

def recompute(forward):
    """A block's forward that keeps only its arguments, and runs again in backward. torch then draws
    the same dropout on the devices of these arguments, so all of them are passed to it.
    A block may append to a list: its cache. Backward runs the block again and must find the list as it
    was. So each run gets a copy, and the caller's list is extended once, after the first."""
    lists = (list, UserList)
    copy = lambda args: [list(arg) if isinstance(arg, lists) else arg for arg in args]

    def run(*args, **kwargs):
        given = [*args, *kwargs.values()]

        def once(*values):
            values = copy(values)
            by_name = dict(zip(kwargs, values[len(args):]))
            return forward(*values[:len(args)], **by_name), values

        result, extended = checkpoint(once, *copy(given), use_reentrant=False)
        for value, new in zip(given, extended):
            if isinstance(value, lists):
                value[:] = new
        return result
    return run


def slice_loss(model, machine):
    """Let the model compute its loss in slices of tokens: no (tokens, vocabulary) tensor exists."""
    if getattr(model.config, 'byte_limit', 0):           # a vocabulary of bytes is small
        return
    whole = model.forward
    head = getattr(model, 'head', getattr(model, 'wte', None))   # wte: a tied one

    def nats_of(x, weight, targets):
        return F.cross_entropy(F.linear(x, weight), targets, ignore_index=-1, reduction='none')

    def forward(idx, targets=None, cache=None, reduction='mean'):
        if targets is None:
            return whole(idx, cache=cache)
        states, aux = model.features(idx, cache)
        weight = head.weight
        slices = zip(states.flatten(0, 1).split(SLICE), targets.flatten().split(SLICE))
        nats = torch.cat([checkpoint(nats_of, x, weight, y, use_reentrant=False) for x, y in slices])
        if reduction == 'none':
            return None, nats.view_as(targets), aux
        return None, nats.sum() / (targets >= 0).sum(), aux

    if hasattr(head, 'weight') and is_same_loss(model, whole, forward, head, machine):
        model.forward = forward
    else:                                                # its blocks are recomputed all the same
        machine.say('note      the loss of this model is computed whole: '
                    'it is not the plain cross-entropy of model.head or model.wte')


@torch.no_grad()
def is_same_loss(model, whole, sliced, head, machine):
    """Whether both give the same logits and loss, in float32 on a few random tokens, and in
    training the same auxiliary losses. Random states and buffers stay as they were."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng([machine.device] if machine.cuda else []):
        idx = torch.randint(model.config.vocab_size, (8, 1), device=machine.device)
        model.eval()
        logits = whole(idx)[0]
        ours = F.linear(model.features(idx)[0], head.weight)
        same = torch.allclose(ours, logits, rtol=1e-4, atol=1e-4 * logits.abs().max().item())
        same &= torch.allclose(sliced(idx, idx)[1], whole(idx, idx)[1], rtol=1e-3)
        model.train()
        same &= sliced(idx, idx)[2].keys() == whole(idx, idx)[2].keys()
    for buffer, before in zip(model.buffers(), buffers):
        buffer.copy_(before)
    return same


# ---- Sharding ------------------------------------------------------------------------------------

def shard(model, machine):
    """FSDP2: every process holds a part of each parameter, its gradient and AdamW's moments. A block
    gathers its own parameters when it runs. Embedding, head and norms stay gathered through the step;
    so does a block that all layers share. All is gathered in float32, so that autocast computes what
    it does without sharding: a policy of bfloat16 would round routers and norms, too."""
    from torch.distributed.device_mesh import init_device_mesh   # these take a second to import
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    single = [name for name, p in model.named_parameters() if p.dim() == 0]
    if single:
        raise UserError(f'shard: {single[0]} is a single number, which cannot be divided; '
                        'train this model without --shard')
    for tensor in (*model.parameters(), *model.buffers()):       # a surgery may differ by rounding
        dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(machine.device.type, (machine.world,))
    for block in blocks(model, least=2):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in ('generate', 'routes'):                  # these gather, too
        register_fsdp_forward_method(model, name)
    model.register_forward_pre_hook(hide_cache, with_kwargs=True, prepend=True)


def hide_cache(model, args, kwargs):
    """FSDP hands each block a copy of a list, so what the block appends is lost; a UserList is passed
    as it is."""
    if kwargs.get('cache') is not None:
        hidden = UserList()
        hidden.data = kwargs['cache']                    # extends the list itself
        kwargs = {**kwargs, 'cache': hidden}
    return args, kwargs


def sync_gradients(model, wanted):
    """Whether the next backward adds up the gradients of all processes."""
    if hasattr(model, 'set_requires_gradient_sync'):     # FSDP2
        model.set_requires_gradient_sync(wanted)
    else:                                                # DistributedDataParallel
        model.require_backward_grad_sync = wanted


def is_sharded(x):
    return hasattr(x, 'full_tensor')                     # a DTensor


def whole_tensor(x):
    """The tensor that the processes hold together, in each of them."""
    return x.full_tensor() if is_sharded(x) else x


# ---- Checkpoints in parts ------------------------------------------------------------------------
# Every process writes a file: {weights: {name: rows}, optimizer: {state: {index: {moment: rows}}},
# rank: its own random state and segment memory}. ckpt.pt holds the rest, and names the parts by their
# number and a token, a new one for every save. All is read with weights_only.


def split_tree(tree, sharded):
    """Of nested dicts: this process's rows of the tensors that are sharded, or all the rest."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found[key] = split_tree(value, sharded)
        elif is_sharded(value) == sharded:
            found[key] = value.to_local().to('cpu', copy=True) if sharded else value
    return found


def merge_trees(trees):
    """One nested dict of several. A tensor that lies in parts becomes a list of them."""
    if not isinstance(trees[0], dict):
        return trees[0] if len(trees) == 1 else trees
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return {key: merge_trees([tree[key] for tree in trees if key in tree]) for key in keys}


def join_rows(value):
    return torch.cat(value) if isinstance(value, list) else value


def rows_like(value, p):
    """A copy of a tensor, or of the list of its parts; if p is sharded, of the rows that this
    process holds of it. The parts lie in files: other rows are not read."""
    if not is_sharded(p):
        value = join_rows(value)
        if value.shape != p.shape:
            raise ValueError
        return value.to(p.device, copy=True)
    from torch.distributed.tensor import DTensor
    parts = value if isinstance(value, list) else [value]
    if sum(map(len, parts)) != len(p) or any(part.shape[1:] != p.shape[1:] for part in parts):
        raise ValueError
    size = -(-len(p) // p.device_mesh.size())            # rows of a process, as Tensor.chunk has them
    begin = p.device_mesh.get_local_rank() * size
    mine = []
    for part in parts:
        mine.append(part[max(0, begin):max(0, begin + size)])
        begin -= len(part)
    return DTensor.from_local(torch.cat(mine).to(p.device), p.device_mesh, p.placements,
                              run_check=False, shape=p.shape, stride=p.stride())


def shard_files(file, it, token, world):
    """out/run/ckpt.pt at step 20 -> [out/run/shards/ckpt.20.1f2e3d4c.0-of-2.pt, ...]"""
    name = f'{file.stem}.{it}.{token}'
    return [file.parent / 'shards' / f'{name}.{rank}-of-{world}.pt' for rank in range(world)]
