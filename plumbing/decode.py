"""
Text on a GPU at the speed of the GPU: model.generate, without waiting for the host.

A small model computes a token in microseconds; launching its hundreds of kernels one by one takes
milliseconds. So the pass that predicts the next token is recorded as a CUDA graph, and replayed. A
graph needs tensors that stay, but a cache of keys and values grows with every token. So there is no
such cache: the graph reads all tokens again, padded to a multiple of 64. Later tokens never change
earlier logits, so the padding does no harm.
"""

import copy
import inspect

import torch
import torch.nn.functional as F

from plumbing.checkpoint import context_limit
from plumbing.machine import CUDAGraphStep


def fast_writer(model, machine, rows=1):
    """-> a twin of the model with a fast generate(), for up to this many rows at once. It is the
    model itself on a CPU, in several processes, for more than 64 rows (a cache serves them better),
    and if its generate() is not the usual loop (stlm.py)."""
    is_usual = 'self(new, cache=cache)' in inspect.getsource(type(model).generate)
    if not (machine.cuda and machine.world == 1 and rows <= 64 and is_usual):
        return model
    # Matrices are cast once, not for every token; but routers keep float32, as in training.
    own = {id(p): torch.nn.Parameter(p.to(machine.dtype), requires_grad=False)
           for name, p in model.named_parameters() if p.dim() > 1 and 'router' not in name}
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared | own).eval()
    limit = context_limit(twin)
    last_norm = getattr(twin, 'ln_f', None) or getattr(twin, 'norm_f', None)
    place = None                                         # of the last token, while predict runs
    if last_norm:                                        # then the head multiplies one token a row
        last_norm.register_forward_hook(lambda _, args, x: x.index_select(1, place))
    read = twin.forward

    def predict(ids, last):
        """(B, T) ids and the place of the last true one -> (B, 1, V) logits of the one after it."""
        nonlocal place
        place = last
        with torch.no_grad(), machine.autocast():
            logits, _, _ = read(ids)
        return logits if last_norm else logits.index_select(1, last)

    replay = CUDAGraphStep(predict, machine, plain_calls=1)

    def forward(new, cache):
        """What generate() calls. In place of keys, its cache holds the tokens so far: (B, 1, T)."""
        ids = torch.cat((cache[0][0][:, 0], new), 1) if cache else new
        cache[:] = [(ids[:, None],)]
        T = ids.size(1)
        length = -(-T // 64) * 64
        padding = (min(length, limit) if limit else length) - T
        last = torch.full((1,), T - 1, device=ids.device)
        return replay(F.pad(ids, (0, padding)), last), None, {}

    twin.forward = forward
    return twin
