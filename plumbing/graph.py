"""A training step as a CUDA graph."""

import math

import torch
from tqdm import tqdm


class CUDAGraphStep:
    """A training step fn(*tensors) as one CUDA graph. A small model spends most of a step waiting
    for the host to launch some thousand kernels one by one; a graph launches them all at once.

    After some plain calls with the same shapes, the next one records the kernels, and later ones
    replay them. Python runs only before and while recording, so what changes between calls must
    live in tensors that stay: inputs, weights, the optimiser's state and learning rate. The results
    are the same tensors every time: read them before the next call. Where a graph is not possible,
    this is just fn."""

    def __init__(self, fn, machine):
        self.fn = fn
        self.device = machine.device
        self.calls = {}                                  # {shapes: plain calls so far}
        self.graphs = {}                                 # {shapes: what was recorded}
        self.plain_calls = 3 if machine.cuda and machine.world == 1 else math.inf
        self.pool = None                        # the graphs of all shapes share their memory

    def __call__(self, *inputs):
        shapes = tuple(x.shape for x in inputs)
        calls = self.calls.get(shapes, 0)
        self.calls[shapes] = calls + 1
        if calls == self.plain_calls:
            self.record(shapes, inputs)
        if shapes not in self.graphs:   # the first calls compile, and allocate AdamW's state
            return self.fn(*inputs)
        graph, held, result = self.graphs[shapes]
        for ours, new in zip(held, inputs):
            ours.copy_(new)
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
            self.graphs[shapes] = (graph, held, result)
        except RuntimeError as e:                        # such as a model that reads a number back
            reason = str(e.__context__ or e).partition('\n')[0]
            tqdm.write(f'graph     not possible, plain steps instead ({reason})')
            self.graphs = {}
            self.plain_calls = math.inf
            # The random generator still belongs to the graph. Give it a state of its own.
            generator = torch.cuda.default_generators[self.device.index or 0]
            generator.graphsafe_set_state(torch.Generator(self.device).graphsafe_get_state())
            torch.cuda.set_rng_state(random)
