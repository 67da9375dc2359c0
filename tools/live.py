"""
A page that runs a small model by itself, in a browser: type, and see which way each token takes.
`python -m tools.explore out/moep --live` writes it. live_model.js is the model, live_page.js what
the page does with it.
"""

import base64
import os
from dataclasses import asdict
from pathlib import Path

from plumbing.checkpoint import load_checkpoint, run_tokenizer
from plumbing.cli import UserError
from plumbing.settings import ROOT, import_model
from tools.compare import write_page

# The models that live_model.js can run, and their papers.
MODELS = dict(moep='https://aclanthology.org/2025.babylm-main.39',
              moduleformer='https://arxiv.org/abs/2306.04640v1')


def pack_weights(model, n_vocab):
    """-> (name, shape) of all weights; their values in float16, one after the other, as base64.
    Stacks of (E, in, out) become (E, out, in): then every map is as nn.Linear has it. Tables lose
    what pads the vocabulary."""
    weights = {name: p.transpose(1, 2) if p.dim() == 3 else p
               for name, p in model.state_dict().items()}
    weights |= {name: weights[name][:n_vocab] for name in ('wte.weight', 'head.weight')
                if name in weights}
    values = b''.join(p.half().contiguous().numpy().tobytes() for p in weights.values())
    return [(name, list(p.shape)) for name, p in weights.items()], base64.b64encode(values).decode()


def describe(path, prompt):
    """All that the page knows of a run, as plain values."""
    model, ckpt = load_checkpoint(path)
    tokenizer = run_tokenizer(ckpt)
    name = ckpt['model']
    if name not in MODELS or ckpt['adapted']:
        adapted = ' with adapters' if ckpt['adapted'] else ''
        raise UserError(f'--live knows {" and ".join(MODELS)}, not {name}{adapted}')
    if tokenizer.kind not in ('bpe', 'gpt2', 'bytes'):
        raise UserError(f'--live knows byte-level BPE and bytes, not {tokenizer.kind}')
    if name == 'moduleformer':
        model = import_model(name).absorb_inserted(model)    # inserted modules, among the others
    elif not model.config.n_parallel:
        raise UserError(f'{path} has no routers: there is nothing to choose')
    shapes, weights = pack_weights(model, tokenizer.n_vocab)
    tokens = [token.decode('latin-1') for token in tokenizer.token_bytes[:tokenizer.eot]]
    return dict(
        name=str(path), folder=ckpt['folder'], model=name, config=asdict(model.config),
        data=str(ckpt['settings']['data']), prompt=prompt, tokens=tokens, shapes=shapes,
        weights=weights, paper=MODELS[name])


def write_live(path, prompt, out):
    data = describe(path, prompt or 'The dogs near the tree')
    folder = data.pop('folder')
    out = out or Path(folder, 'live.html')
    readme = os.path.relpath(ROOT / 'README.md', Path(out).parent)
    write_page(out, 'live', dict(data, readme=Path(readme).as_posix()))
