"""Checkpoints: written, read, and built into a model; and the folders of runs that hold them."""

import importlib
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from plumbing.cli import UserError, new_file, reading
from plumbing.settings import ROOT, code_of, import_model, make_config, model_sources
from plumbing.tokenizer import load_tokenizer


# ---- Checkpoints --------------------------------------------------------------------------------

def write_checkpoint(path, model, weights, s, tokenizer, **state):
    """What rebuilds the model. state: whatever else a reader needs, such as `iter` and `words`."""
    ckpt = dict(
        model=s.model, config=asdict(model.config), settings=asdict(s), weights=weights,
        tokenizer=tokenizer.hash, adapted=getattr(model, 'adapted', []),     # see tools/lora.py
        base=getattr(model, 'base', None),               # the imported model that it began as
        frozen=[name for name, p in model.named_parameters() if not p.requires_grad], **state)
    try:
        with new_file(path, 'wb') as file:               # complete or not at all
            torch.save(ckpt, file)
    except (OSError, RuntimeError) as error:
        raise UserError(f'{path} could not be written ({str(error).splitlines()[0]}): is the disk '
                        'full? The checkpoint before it is intact') from None


def read_checkpoint(path, mmap=False):
    """What train.py saved. path: a run's folder, its name in out/, or one of its .pt files. mmap:
    leave its tensors on disk until they are used."""
    path = Path(path)
    if not path.exists() and Path('out', path).exists():
        path = Path('out', path)
    file = path if path.suffix == '.pt' else path / 'ckpt.pt'
    if not file.is_file():
        runs = sorted(p.parent.as_posix() for p in Path('out').glob('**/ckpt.pt'))
        hint = f"there are {', '.join(runs)}" if runs else 'make one with train.py'
        if ',' in str(path):
            hint = 'join runs first: python -m tools.surgery compose out/p1 out/p2 --out out/p1_p2'
        raise UserError(f'there is no checkpoint {file}; {hint}')
    with reading(file):
        ckpt = torch.load(file, map_location='cpu', weights_only=True, mmap=mmap)
        if 'weights' not in ckpt:
            raise UserError(f'{file} is not a checkpoint of train.py')
        return dict(ckpt, folder=str(file.parent))


def build_model(ckpt, device='cpu', **changes):
    """The model of a checkpoint, with its weights and adapters. changes: of its config."""
    file = Path(ckpt['model'].replace('.', '/') + '.py')
    copy = Path(ckpt['folder'], file.name)
    if copy.exists() and not Path(ROOT, file).exists():
        raise UserError(f'there is no {file} any more; put it back: cp {copy} {Path(ROOT, file)}')
    module = import_model(ckpt['model'])
    for old in changed_files(ckpt):
        print(f"note: the code of {ckpt['model']} has changed since {ckpt['folder']} was begun: "
              f"this is today's, on the old weights. Compare it with {old}", file=sys.stderr)
    # Imported weights of 16 bits are taken as they are. Others, and those of a model with adapters,
    # are copied into a new one.
    dtypes = {w.dtype for w in ckpt['weights'].values()}
    is_narrow = bool(dtypes & {torch.bfloat16, torch.float16}) and not ckpt['adapted']
    with torch.device('meta' if is_narrow else 'cpu'):
        model = module.Model(make_config(module, ckpt['config'] | changes))
    surgeries = find_surgeries(module.Model)
    for name, args in ckpt['adapted']:                   # the config does not mention adapters
        if name not in surgeries:
            raise UserError(f"{ckpt['folder']}: {name} is no surgery of {ckpt['model']}")
        model = surgeries[name](model, **args)
    try:
        model.load_state_dict(ckpt['weights'], assign=is_narrow)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()
        raise UserError(f"{ckpt['folder']} does not fit {module.__name__}.py: {first}") from None
    for name, p in model.named_parameters():             # what was frozen stays frozen
        if name in ckpt['frozen']:
            p.requires_grad_(False)
    model.base = ckpt['base']
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


def data_folders(ckpt):
    """The data sets that a run was trained on."""
    s = ckpt['settings']
    return [Path(s['data_dir'], name) for name in s['data'].split(',')]


@torch.no_grad()
def context_limit(model):
    """The most tokens that it reads at once: block_size, or None for a model without positions.
    It is in eval mode afterwards."""
    model.eval()
    device = next(model.parameters()).device
    try:
        model.features(torch.zeros(1, model.config.block_size + 1, dtype=torch.long, device=device))
    except (AssertionError, IndexError, RuntimeError, ValueError):  # an assert, a table, a mask
        return model.config.block_size


def find_surgeries(model):
    """{name: function} for a class: the `surgeries` of its file and of those that it builds on, and
    of tools/lora.py, which fit any model."""
    names = [kind.__module__ for kind in model.__mro__]
    names += ['tools.lora'] * Path(ROOT, 'tools/lora.py').exists()
    modules = map(importlib.import_module, dict.fromkeys(names))
    return {f.__name__: f for module in modules for f in getattr(module, 'surgeries', [])}


# ---- Run folders --------------------------------------------------------------------------------

def find_run(out, s, keys, machine):
    """The checkpoint that --resume continues, or None if a new run starts. A resumed run keeps its
    model and data; what else has changed is printed."""
    if (out / 'train.bin').exists():                     # a run would replace its meta.json
        raise UserError(f'{out} is a data set: set another --out_dir')
    if any(out.glob('ckpt*.pt')) and not (s.resume or s.overwrite):
        raise UserError(f'{out} already holds a run: add --resume to continue it, --overwrite to '
                        'start over, or set another --out_dir')
    if s.overwrite or not (out / 'ckpt.pt').exists():
        if s.resume:
            machine.say(f'resume    there is no ckpt.pt in {out}: a new run begins')
        return None
    ckpt = read_checkpoint(out)
    if not {'optimizer', 'scaler', 'threads', 'log', 'text'} <= ckpt.keys():
        raise UserError(f'{out} cannot be resumed: it was made by a tool, or by an older version. '
                        f'Start a new run from its weights, with --init_from={out} and --out_dir')
    fixed = {'model', 'data', 'seed', 'seq_len', 'stride', 'stream', 'epoch_words', 'batch_size',
             'gradient_accumulation_steps', 'optimizer', 'processes', *keys}
    before = ckpt['config'] | ckpt['settings'] | dict(processes=len(ckpt['ranks']))
    now = asdict(s) | keys | dict(processes=machine.world)
    for key in [key for key in now if key in before and now[key] != before[key]]:
        if key in fixed:
            raise UserError(f'{out} has {key} = {before[key]!r}, not {now[key]!r}: resume with the '
                            'same, or start anew with --out_dir and --init_from')
        if key not in ('resume', 'overwrite', 'out_dir'):
            machine.say(f'resume    {key} was {before[key]!r}, is now {now[key]!r}')
    return ckpt


def start_from(path, name, keys, tokenizer):
    """The model of another run, which must be of this kind and tokenizer. keys: changes of its
    config."""
    ckpt = read_checkpoint(path)
    if ckpt['model'] != name:
        raise UserError(f"{ckpt['folder']} holds a model of {ckpt['model']}, not {name}")
    if ckpt['tokenizer'] != tokenizer.hash:
        raise UserError(f"{ckpt['folder']} has another tokenizer than the data")
    return build_model(ckpt, **keys)


def copy_model(name, out):
    """The model's file, and those of ours that it imports, into a run's folder."""
    for file, text in model_sources(name).items():
        (out / Path(file).name).write_text(text, encoding='utf-8')


def changed_files(ckpt):
    """The files that copy_model wrote, if their code is no longer today's."""
    copies = {Path(ckpt['folder'], Path(file).name): text
              for file, text in model_sources(ckpt['model']).items()}
    return [path for path, text in copies.items()
            if path.exists() and code_of(path.read_text(encoding='utf-8')) != code_of(text)]
