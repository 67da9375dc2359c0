"""
Text on a GPU at the speed of the GPU: model.generate, without waiting for the host.

A small model computes a token in microseconds; launching its hundreds of kernels one by one takes
milliseconds. So the pass that predicts the next token is recorded as a CUDA graph, and replayed. A
graph needs tensors that stay, but a cache of keys and values grows with every token. So there is no
such cache: the graph reads all tokens again, padded to a round length. Later tokens never change
earlier logits, so the padding does no harm.
"""

import copy

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from plumbing.checkpoint import context_limit
from plumbing.machine import CUDAGraphStep


def fast_writer(model, machine, rows=1):
    """-> a twin of the model with a fast generate(), for up to this many rows at once. It is the
    model itself on a CPU, in several processes, and for more than 64 rows (a cache serves them
    better). A model that has a method logits(states) promises that its generate() is the usual
    loop, which calls self(new, cache=cache). Others (stlm.py) are returned as they are."""
    if not (machine.cuda and machine.world == 1 and rows <= 64 and hasattr(model, 'logits')):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared).eval()
    limit = context_limit(twin)
    unit = 256 if rows <= 8 else 64      # lengths are multiples: few graphs, or little to compute

    def predict(ids, last):
        """(B, T) ids and the place of the last true one -> (B, 1, V) logits of the one after it."""
        with torch.no_grad(), machine.autocast():
            states, _ = twin.features(ids)
            return twin.logits(states.index_select(1, last))

    passes = {}                                          # {shape: the pass, shortened}

    def predict_fast(ids, last):
        if ids.shape not in passes:
            passes[ids.shape] = shorten(predict, ids, last)
        return passes[ids.shape](ids, last)

    replay = CUDAGraphStep(predict_fast, machine, plain_calls=1)

    def forward(new, cache):
        """What generate() calls. In place of keys, its cache holds the tokens so far: (B, 1, T)."""
        ids = torch.cat((cache[0][0][:, 0], new), 1) if cache else new
        cache[:] = [(ids[:, None],)]
        T = ids.size(1)
        length = -(-T // unit) * unit
        padding = (min(length, limit) if limit else length) - T
        last = torch.full((1,), T - 1, device=ids.device)
        return replay(F.pad(ids, (0, padding)), last), None, {}

    twin.forward = forward
    return twin


# ---- A third fewer kernels ----------------------------------------------------------------------

class Recorder(TorchDispatchMode):
    """Lists the calls of torch's operators: (operator, args, kwargs, result)."""
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, result))
        return result


class Slot:
    """In a list of calls: a tensor that the inputs decide, and that every replay computes anew."""


def shorten(fn, *inputs):
    """-> fn without the calls that do not depend on the inputs, such as casts of weights (their
    results are kept), and without those that the result does not need, such as auxiliary losses.
    It is fn itself if that reads numbers back, or if the shorter one does not give the same."""
    with Recorder() as recorder:
        expected = fn(*inputs)
    slots = {id(x): Slot() for x in inputs}
    is_slot = lambda x: isinstance(x, Slot)
    slots_in = lambda tree: {*filter(is_slot, tree_leaves(tree))}
    as_slots = lambda tree: tree_map(lambda x: slots.get(id(x), x), tree)
    # What is changed in place must be made anew in each replay.
    in_place = {id(args[0]) for operator, args, *_ in recorder.calls if operator._schema.is_mutable}
    calls = []
    for operator, args, kwargs, result in recorder.calls:
        results = {id(x) for x in tree_leaves(result) if torch.is_tensor(x)}
        args, kwargs = as_slots((args, kwargs))
        if slots_in((args, kwargs)) or results & in_place:
            if torch.Tag.data_dependent_output in operator.tags:
                return fn
            for key in results - slots.keys():
                slots[key] = Slot()
            calls.append((operator, args, kwargs, as_slots(result)))
    starts, end = as_slots(inputs), slots[id(expected)]
    needed, kept = {end}, []
    for call in reversed(calls):
        operator, args, kwargs, result = call
        if operator._schema.is_mutable or needed & slots_in(result):
            needed |= slots_in((args, kwargs))
            kept.append(call)
    kept.reverse()

    def replay(*inputs):
        values = dict(zip(starts, inputs))
        fill = lambda tree: tree_map(lambda x: values[x] if is_slot(x) else x, tree)
        with torch.autocast(expected.device.type, enabled=False):        # casts are recorded
            for operator, args, kwargs, result in kept:
                results = operator(*fill(args), **fill(kwargs))
                values.update(zip(tree_leaves(result), tree_leaves(results)))
        return values[end]

    others = [inputs[0].flip(-1), *inputs[1:]]
    return replay if torch.allclose(replay(*others), fn(*others), rtol=1e-3, atol=1e-3) else fn
