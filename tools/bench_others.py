"""
What tools.bench measures beside a model: a GPT-2 of as many parameters (--dense), and nanoGPT from
a checkout (--nanogpt PATH), with its own model.py, optimiser and compilation.
"""

import contextlib
import importlib.util
from pathlib import Path

import torch

from moep import MoEPConfig


def dense_like(model, T):
    """A GPT-2 of as many parameters, as near as layers and a width of whole heads come to it."""
    total = model.count_params()[0]
    V = model.config.vocab_size
    size = lambda L, D: V * D + T * D + L * (12 * D * D + 13 * D) + 2 * D
    head = 64 if total > 5e6 else 16                     # the width of one
    shapes = [(L, D) for L in range(2, 49) for D in range(head, 4097, head) if 16 <= D / L <= 128]
    L, D = min(shapes, key=lambda shape: abs(size(*shape) - total))
    return MoEPConfig(vocab_size=V, block_size=T, n_layer=L, n_embd=D, n_head=D // head, n_parallel=0,
                      dropout=getattr(model.config, 'dropout', 0.0))


def nanogpt_like(path, like):
    """nanoGPT of the same sizes as a GPT-2 of ours, a MoEPConfig without parallel layers."""
    spec = importlib.util.spec_from_file_location('nanogpt_model', Path(path, 'model.py'))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=like.block_size, vocab_size=like.vocab_size, n_layer=like.n_layer,
        n_head=like.n_head, n_embd=like.n_embd, dropout=like.dropout, bias=True)
    with contextlib.redirect_stdout(None):               # it prints its size
        model = module.GPT(config)
    total = sum(p.numel() for p in model.parameters())
    model.count_params = lambda: (total, total - model.transformer.wpe.weight.numel())
    return model


def nanogpt_step(model, data, s, machine):
    """-> a training step on the next chunks of data, as nanoGPT's train.py takes it on one GPU."""
    betas = (s.beta1, s.beta2)
    with contextlib.redirect_stdout(None):
        optimizer = model.configure_optimizers(s.weight_decay, s.learning_rate, betas,
                                               machine.device.type)
    compiled = torch.compile(model.train()) if machine.cuda else model.train()

    def step():
        for _ in range(s.gradient_accumulation_steps):
            x, y = data.batch(data.next_starts()[:s.batch_size])
            with machine.autocast():
                _, loss = compiled(x, y)
            (loss / s.gradient_accumulation_steps).backward()
        torch.nn.utils.clip_grad_norm_(compiled.parameters(), s.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step
