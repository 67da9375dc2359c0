"""
What tools.bench measures: a training step, generation, or reading a prompt. And the machine.
"""

import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from plumbing.compiled import compile_model
from plumbing.data import Data
from plumbing.machine import Replay
from tools.bench_others import nanogpt_step
from train import make_optimizer, train_step


def seconds(work, machine, repeat=5, at_least=0.2):
    """The median time of one call, of `repeat` measurements that each last `at_least` seconds."""
    def timed(n):
        start = time.perf_counter()
        for _ in range(n):
            work()
        if machine.device.type != 'cpu':
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) / n
    timed(1)                                             # warms up
    once = timed(1)
    if once > 10 * at_least:                             # very slow: one is enough
        return once
    n = max(1, round(at_least / once))
    return statistics.median(timed(n) for _ in range(repeat))


def matrix_rate(machine):
    """FLOP per second of a large matrix product, in the precision that is trained in."""
    n = 8192 if machine.cuda else 1024
    a, b = (torch.randn(n, n, device=machine.device, dtype=machine.dtype) for _ in range(2))
    return 2 * n ** 3 / seconds(lambda: a @ b, machine)


class RandomTokens(Data):
    """Windows of random tokens, at random places. Of Data only next_starts and batch are used; what they
    need is set here."""
    def __init__(self, vocab_size, rows, T, device):
        self.tokens = torch.randint(vocab_size, (64 * (T + 1),), device=device).short()
        self.rows = rows
        self.T = T
        self.pad = -1
        self.random = np.random.default_rng(0)

    def take(self, n):
        return self.random.integers(63 * (self.T + 1), size=n)


def make_step(model, s, T, machine):
    """-> a function that takes a training step: train.py's own, or nanoGPT's."""
    s = replace(s, memory=0)
    rows = s.batch_size * s.gradient_accumulation_steps
    data = RandomTokens(model.config.vocab_size, rows, T, machine.device)
    if hasattr(model, 'configure_optimizers'):
        return nanogpt_step(model, data, s, machine)
    optimizer = make_optimizer(model, s, machine)
    compiles = s.compile or (s.compile is None and machine.cuda)
    trained = compile_model(model.train()) if compiles else model.train()
    take_step = lambda starts: train_step(trained, optimizer, data, starts, None, s, machine)
    replay = Replay(take_step, machine, s.graph)
    return lambda: replay(data.next_starts())


def training(model, s, T, machine):
    """One training step after another."""
    step = make_step(model, s, T, machine)
    step()                                               # compiles, and allocates AdamW's state
    if machine.cuda:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):                               # the third is recorded as a CUDA graph
            step()
    took = seconds(step, machine)
    tokens = s.batch_size * s.gradient_accumulation_steps * T
    return dict(tokens_per_s=tokens / took, ms=1e3 * took)


@torch.no_grad()
def generation(model, rows, n, machine):
    """n greedy tokens, with the cache and without. Stacked experts are cast once, for good: autocast
    would cast all of them again for every token, chosen or not."""
    for p in model.parameters():
        if p.dim() == 3:
            p.data = p.data.to(machine.dtype)
    start = torch.zeros(rows, 1, dtype=torch.long, device=machine.device)

    def uncached():
        ids = start
        for _ in range(n):
            ids = torch.cat((ids, model(ids)[0][:, -1:].argmax(-1)), 1)
    with machine.autocast():
        fast = seconds(lambda: model.generate(start, n, temperature=0), machine, repeat=3)
        slow = seconds(uncached, machine, repeat=3)
    return dict(tokens_per_s=rows * n / fast, no_cache=rows * n / slow, ms=1e3 * fast / n)


@torch.no_grad()
def prefill(model, rows, T, machine):
    """One forward over (rows, T) tokens, logits of the last one."""
    ids = torch.randint(model.config.vocab_size, (rows, T), device=machine.device)
    head = model.head if hasattr(model, 'head') else model.wte

    def read():
        states, _ = model.features(ids)
        return states[:, -1] @ head.weight.T.to(states.dtype)
    with machine.autocast():
        took = seconds(read, machine)
    return dict(tokens_per_s=rows * T / took, ms=1e3 * took)
