"""Checkpoints: read, checked and built into a model; and where a new run's model starts."""

import contextlib
import difflib
import inspect
import io
import os
import re
import typing
import warnings
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch

from plumbing.cli import UserError
from plumbing.models import build, explain, find_surgery, import_model, make_config, model_file, sketch
from plumbing.plan import check_size
from plumbing.settings import LARGEST, Settings, assign_keys, coerce
from plumbing.shard import join_rows, merge_trees, shard_files, whole_tensor
from plumbing.tokenizer import load_tokenizer


# ---- Reading a checkpoint: nothing in it is believed before it is checked -----------------------

# What RunFolder.save in folder.py writes. The config is checked by the model's own class.
FIELDS = dict(model=str, config=object, settings=dict[str, typing.Any], iter=int, tokenizer=str,
              weights=dict[str, torch.Tensor], words=float, adapted=list[list], frozen=list[str],
              shards=int, token=str)
RESUME_FIELDS = dict(optimizer=dict, data=dict, ranks=list[dict], log_bytes=int, seconds=float)
PLACE = dict(epoch=int, position=int, words=float, seen=int, unit=int, size=int)     # in the data


def read_checkpoint(path):
    """The dictionary that a run saved. path: the run's folder, its name in out/, or one of its .pt files."""
    path = Path(path)
    if not path.exists() and Path('out', path).exists():
        path = Path('out', path)
    file = path if path.suffix == '.pt' else path / 'ckpt.pt'
    if not file.is_file():
        raise UserError(f'there is no checkpoint {file}{checkpoint_hint(file.parent)}')
    try:
        ckpt = check_fields(add_shards(unpickle(file), file))
    except (PermissionError, MemoryError):
        raise
    except Exception as e:
        reason = str(e) if isinstance(e, UserError) else 'truncated, or another format'
        refused = re.search(r'GLOBAL (\S+)', str(e))     # how torch names a class or function
        if refused:
            reason = f'it holds a {refused[1]}; only plain values and tensors are read'
        raise UserError(f'{file} cannot be read as a checkpoint ({reason}); '
                        'try another file in its folder') from None
    try:
        module = import_model(ckpt['model'])
        config = asdict(make_config(module, ckpt['config']))
    except Exception as e:                               # the model file does not fit
        reason = e if isinstance(e, UserError) else 'its config is no config of its model'
        raise UserError(f'{file}: {reason}') from None
    return {**ckpt, 'config': config, 'folder': str(file.parent)}


def check_fields(ckpt):
    """The checkpoint, every field but `config` of the right type and in range; raises if not."""
    kinds = FIELDS | RESUME_FIELDS if 'optimizer' in ckpt else FIELDS
    ckpt = {key: coerce(ckpt[key], kind) for key, kind in kinds.items()}
    known = {key: value for key, value in ckpt['settings'].items() if key in Settings.__dataclass_fields__}
    [known] = assign_keys(known, Settings)
    ckpt['settings'] = asdict(Settings(**known))     # one that was not there yet has its default
    counts = [ckpt['iter'], ckpt['words']]
    if 'optimizer' in ckpt:
        ckpt['data'] = {key: coerce(ckpt['data'][key], kind) for key, kind in PLACE.items()}
        counts += [ckpt['log_bytes'], ckpt['seconds'], *ckpt['data'].values()]
        counts += [len(ckpt['ranks']) - 1, ckpt['data']['unit'] - 1]     # at least 1
    if not all(0 <= count <= LARGEST for count in counts):
        raise ValueError
    return ckpt


def add_shards(ckpt, file):
    """Add what the processes of a run saved next to ckpt.pt. Weights are joined. AdamW's moments stay
    memory-mapped lists of parts, so that a resumed process reads only its own rows."""
    files = named_shards(ckpt, file)
    if not files:
        return ckpt
    lost = [each.name for each in files if not each.is_file()]
    if lost:
        raise UserError(f'shards/{lost[0]} is missing')
    parts = [unpickle(each) for each in files]
    ranks = [part.pop('rank') for part in parts]
    ckpt = merge_trees([ckpt, *parts])
    ckpt['weights'] = {name: join_rows(rows) for name, rows in ckpt['weights'].items()}
    return {**ckpt, 'ranks': ranks}


def named_shards(ckpt, file):
    """The files of the parts that a checkpoint names."""
    it, token, n = coerce(ckpt['iter'], int), ckpt['token'], coerce(ckpt['shards'], int)
    if not 0 <= n <= 2 ** 16 or not re.fullmatch('([0-9a-f]{8})?', token):
        raise ValueError
    return shard_files(file, it, token, n)


def unpickle(file):
    """Load plain values and tensors. Tensors are memory-mapped, except on Windows, where an open file
    cannot be replaced."""
    with zipfile.ZipFile(file) as pack:
        unpacked = sum(member.file_size for member in pack.infolist())
    if unpacked > file.stat().st_size:
        raise UserError('it unpacks to more than its size')
    with warnings.catch_warnings(action='ignore'):       # about other formats
        ckpt = torch.load(file, map_location='cpu', weights_only=True, mmap=os.name == 'posix')
    check_values(ckpt)
    return ckpt


def check_values(value, left=10 ** 6):
    """Raise if a tensor claims more than its storage, or if there are over a million values: a small
    pickle can hold lists that unfold forever. Returns how many values are left."""
    if isinstance(value, torch.Tensor):
        plain = value.layout == torch.strided and value.device.type == 'cpu' and not value.is_nested
        if not plain or value.nbytes > value.untyped_storage().nbytes():
            raise UserError('a tensor is declared larger than it is')
    inside = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    for each in inside:
        left = check_values(each, left - 1)
        if left < 0:
            raise UserError('it has too many values')
    return left


def checkpoint_hint(folder):
    files = sorted(p.name for p in folder.glob('ckpt*.pt'))
    if files:
        return f"; there are {', '.join(files)}"
    config = Path('config', f"{folder.as_posix().removeprefix('out/')}.py")
    if config.exists():
        return f'; train it first, for example: python train.py {config}'
    runs = sorted(p.parent.as_posix() for p in Path('out').glob('**/ckpt.pt'))
    near = difflib.get_close_matches(folder.as_posix(), runs, 1, 0.8)
    if near:
        return f'; did you mean {near[0]}?'
    return f"; there are {', '.join(runs)}" if runs else ''


def build_model(ckpt, device='cpu', **changes):
    """The model of a checkpoint, with its weights and, if it has any, its adapters. It is sketched
    first: a config that claims more than the file holds is refused before memory is allocated."""
    module = import_model(ckpt['model'])
    keys = ckpt['config'] | changes

    def adapt(model):
        for name, args in ckpt['adapted']:               # the config does not mention adapters
            model = find_surgery(name, module)(model, **args)
        return model

    kinds = lambda weights: {(name, w.shape, w.dtype) for name, w in weights.items()}
    try:
        planned = sketch(module, keys, adapt, most=100 + 2 * len(ckpt['weights']))
        unlike = {name for name, *_ in kinds(planned.state_dict()) ^ kinds(ckpt['weights'])}
        why = f'the first that differs is {min(unlike)}' if unlike else ''
    except UserError as e:                               # the file was edited, and has a bug now
        why = str(e)
    if why:
        changed = [f'{k} = {keys[k]!r} (it has {v!r})' for k, v in ckpt['config'].items() if keys[k] != v]
        raise UserError(f"{ckpt['folder']}: its weights do not fit {model_file(ckpt['model'])} with "
                        f"{', '.join(changed) or 'its own config'}: {why}")
    model = build(module, keys, device, adapt)
    model.load_state_dict(ckpt['weights'])
    if not is_finite(model):
        raise UserError(f"{ckpt['folder']}: some of its weights are not finite: this checkpoint is broken")
    return model


def is_finite(model):
    return all(whole_tensor(p.isfinite().all()) for p in model.parameters())


def load_checkpoint(path, device='cpu'):
    """-> (model in eval mode, the checkpoint's dictionary). For sample.py and the other tools."""
    ckpt = read_checkpoint(path)
    return build_model(ckpt, device).to(device).eval(), ckpt


def run_tokenizer(ckpt):
    """The tokenizer that lies beside a checkpoint."""
    tokenizer = load_tokenizer(ckpt['folder'])
    if tokenizer.hash != ckpt['tokenizer']:
        raise UserError(f"the tokenizer in {ckpt['folder']} is not the one the run was trained with")
    return tokenizer


def data_folder(ckpt):
    """The data set that a run was trained on, the first of several."""
    used = ckpt['settings']['data']
    name = used.split(',')[0] if isinstance(used, str) else next(iter(used), '')
    return Path(ckpt['settings']['data_dir'], str(name))


# ---- Where a model starts -----------------------------------------------------------------------

def start_model(s, module, model_keys, corpus):
    """-> a fresh model, another run's, or what a surgery makes of other runs'; and its report."""
    if not s.init_from:
        if s.surgery:
            raise UserError(f"surgery '{s.surgery}' needs a trained model: set init_from")
        check_size(module, model_keys, s, corpus.machine)
        check_config(module, make_config(module, model_keys))
        return build(module, model_keys, corpus.machine.device), None
    paths = [s.init_from] if isinstance(s.init_from, str) else s.init_from
    ckpts = [read_checkpoint(path) for path in paths]
    for ckpt in ckpts:
        check_start(ckpt, s, corpus)
    if s.surgery:
        return run_surgery(find_surgery(s.surgery, module), ckpts, s, module, model_keys, corpus)
    if len(ckpts) > 1:
        raise UserError('init_from names several runs: set the surgery that joins them')
    return freeze(build_model(ckpts[0], **model_keys), ckpts[0]), None


def check_config(module, config):
    """Whether a run of this model could be read again."""
    keys = asdict(config)
    file = io.BytesIO()
    with contextlib.suppress(Exception):
        torch.save(keys, file)
        file.seek(0)
        if asdict(module.Config(**torch.load(file, weights_only=True))) == keys:
            return
    raise UserError(f'{module.__name__}: no checkpoint could be read: its Config must hold plain values, '
                    'and Config(**asdict(config)) must equal config')


def check_start(ckpt, s, corpus):
    """Whether a run can start from this checkpoint, or continue it."""
    if ckpt['model'] != s.model:
        raise UserError(f"{ckpt['folder']} holds a model of {model_file(ckpt['model'])}, "
                        f'but this run trains {model_file(s.model)}: '
                        f"a run starts only from one of the same file (--model={ckpt['model']})")
    if ckpt['tokenizer'] != corpus.hash:
        raise UserError(f"{ckpt['folder']} has another tokenizer than {corpus.folder}: set --data")
    if s.overwrite and os.path.realpath(ckpt['folder']) == os.path.realpath(s.out_dir):
        raise UserError(f'the run starts from {s.out_dir}, which --overwrite deletes: set another --out_dir')


def run_surgery(operate, ckpts, s, module, model_keys, corpus):
    """-> the model that the surgery makes of the checkpoints, and its report if it gives one."""
    configs = [ckpt['config'] for ckpt in ckpts]
    other = [key for key, value in model_keys.items() if any(c.get(key) != value for c in configs)]
    if other:
        raise UserError("with a surgery the model's settings come from init_from and surgery_args; "
                        f"remove {', '.join(other)}")
    if s.surgery != 'lora.merge_lora' and any(ckpt['adapted'] for ckpt in ckpts):
        raise UserError(f'surgery {s.surgery}: the model has adapters; '
                        'merge them first, with --surgery=lora.merge_lora')
    models = [build_model(ckpt).to(corpus.machine.device).eval() for ckpt in ckpts]
    args = dict(s.surgery_args)
    if 'batches' in inspect.signature(operate).parameters:
        args['batches'] = corpus.calibration(s.seq_len or models[0].config.block_size)
    try:
        result = operate(models if isinstance(s.init_from, list) else models[0], **args)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        call = f'{operate.__name__}{inspect.signature(operate)}'
        raise UserError(f'surgery {s.surgery}: {explain(e)}; it is called as {call}') from None
    model, report = result if isinstance(result, tuple) else (result, None)
    if not isinstance(model, module.Model):
        raise UserError(f'surgery {s.surgery}: it does not return a model')
    return model, report


def freeze(model, ckpt):
    """What a run's surgery froze stays frozen when the run is resumed, or another starts from it."""
    for name, p in model.named_parameters():
        if name in ckpt['frozen']:
            p.requires_grad_(False)
    return model
