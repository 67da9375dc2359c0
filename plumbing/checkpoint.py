"""
Checkpoints: read, and built into a model. train.py writes them.

    python -m plumbing.checkpoint out/moep moep.py > old.py      # the model file as it was then
"""

import importlib
import re
import sys
from pathlib import Path

import torch

from plumbing.cli import UserError, reading
from plumbing.settings import ROOT, code_of, import_model, make_config, model_sources
from plumbing.tokenizer import load_tokenizer


def read_checkpoint(path):
    """What train.py saved. path: a run's folder, its name in out/, or one of its .pt files."""
    path = Path(path)
    if not path.exists() and Path('out', path).exists():
        path = Path('out', path)
    file = path if path.suffix == '.pt' else path / 'ckpt.pt'
    if not file.is_file():
        runs = sorted(p.parent.as_posix() for p in Path('out').glob('**/ckpt.pt'))
        hint = f"there are {', '.join(runs)}" if runs else 'make one with train.py'
        if any(Path(ROOT, folder, path, 'ckpt.pt').exists() for folder in ('', 'out')):
            hint = f'run this in {ROOT}'
        raise UserError(f'there is no checkpoint {file}; {hint}')
    with reading(file):
        ckpt = torch.load(file, map_location='cpu', weights_only=True)
        if 'weights' not in ckpt:
            raise UserError(f'{file} is not a checkpoint of train.py')
        return dict(ckpt, folder=str(file.parent))


def changed_sources(ckpt):
    """{file: its text then}, of the model files whose code is no longer that of the training."""
    now = model_sources(ckpt['model'])
    return {file: text for file, text in ckpt.get('sources', {}).items()
            if code_of(text) != code_of(now.get(file, ''))}


def build_model(ckpt, device='cpu', **changes):
    """The model of a checkpoint, with its weights and adapters. changes: of its config."""
    module = import_model(ckpt['model'])
    for file in changed_sources(ckpt):
        print(f"note: {file} has changed since {ckpt['folder']} was trained: this is today's "
              'code on the old weights. The old file: python -m plumbing.checkpoint '
              f"{ckpt['folder']} {file} > old.py", file=sys.stderr)
    # Imported weights of 16 bits are taken as they are. Others, and those of a model with adapters,
    # are copied into a new one.
    dtypes = {w.dtype for w in ckpt['weights'].values()}
    is_narrow = bool(dtypes & {torch.bfloat16, torch.float16}) and not ckpt['adapted']
    with torch.device('meta' if is_narrow else 'cpu'):
        model = module.Model(make_config(module, ckpt['config'] | changes))
    for name, args in ckpt['adapted']:                   # the config does not mention adapters
        model = find_surgery(name, module)(model, **args)
    try:
        model.load_state_dict(ckpt['weights'], assign=is_narrow)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()
        raise UserError(f"{ckpt['folder']} does not fit {module.__name__}.py: {first}") from None
    return model.to(device)


def load_checkpoint(path, device='cpu'):
    """-> (model in eval mode and float32, the checkpoint's dictionary)"""
    ckpt = read_checkpoint(path)
    return build_model(ckpt, device).float().eval(), ckpt


def run_tokenizer(ckpt):
    """The tokenizer beside a checkpoint."""
    tokenizer = load_tokenizer(ckpt['folder'])
    if tokenizer.hash != ckpt['tokenizer']:
        raise UserError(f"the tokenizer in {ckpt['folder']} is not the one of its training")
    return tokenizer


def data_folder(ckpt):
    """The data set that a run was trained on, the first of several."""
    data = ckpt['settings']['data']
    name = data.split(',')[0] if isinstance(data, str) else next(iter(data))
    return Path(ckpt['settings']['data_dir'], name)


@torch.no_grad()
def context_limit(model):
    """The most tokens that it reads at once: block_size, or None for a model without positions."""
    device = next(model.parameters()).device
    try:
        model.features(torch.zeros(1, model.config.block_size + 1, dtype=torch.long, device=device))
    except (AssertionError, IndexError, RuntimeError, ValueError):  # an assert, a table, a mask
        return model.config.block_size


def find_surgery(surgery, module):
    """A function of a model, or of several, by its name in the model's own file or, as
    tools.lora.add_lora, in another of this project."""
    file, _, name = surgery.rpartition('.')
    file = file or module.__name__
    path = ROOT / f"{file.replace('.', '/')}.py"
    is_ours = re.fullmatch(r'((tools|arena)\.)?\w+', file) and path.is_file()
    definition = rf'(?m)^def {re.escape(name)}\((model|models|paths)\b'
    if not (is_ours and re.search(definition, path.read_text(encoding='utf-8'))):
        raise UserError(f"there is no surgery '{surgery}': {file}.py has no function {name}(model)")
    return getattr(importlib.import_module(file), name)


if __name__ == '__main__':
    print(read_checkpoint(sys.argv[1])['sources'][sys.argv[2]], end='')
