"""Model files, by name: only those beside train.py and in arena/ are ever imported."""

import difflib
import importlib
import inspect
import itertools
import traceback
from dataclasses import is_dataclass
from pathlib import Path

import torch

from plumbing.cli import UserError

ROOT = Path(__file__).parent.parent                      # where the model files lie


def model_file(name):
    """moep -> moep.py, arena.mine -> arena/mine.py"""
    return name.replace('arena.', 'arena/') + '.py'


def import_model(name):
    """The module of a model file, NAME or arena.NAME: one that ends with `Config, Model = ...`."""
    files = {p.stem: p for p in sorted(ROOT.glob('[!.]*.py'))}   # hidden ones are an editor's
    files |= {f'arena.{p.stem}': p for p in sorted(ROOT.glob('arena/[!.]*.py'))}
    names = [each for each, p in files.items() if b'\nConfig, Model =' in p.read_bytes()]
    if name in names:
        try:
            module = importlib.import_module(name)
            assert is_dataclass(module.Config), 'in its last line, Config is no dataclass'
            return module
        except Exception as e:
            raise UserError(f'{name}: {explain(e)}') from None
    if name in files:
        raise UserError(f"{model_file(name)} lacks the line 'Config, Model = ...' at its end")
    near = difflib.get_close_matches(name, names, 1)
    close = [f'arena.{name}'] if f'arena.{name}' in names else near
    top = ', '.join(each for each in names if '.' not in each)
    hint = f'did you mean {close[0]}?' if close else f'there are: {top}, and those in arena/'
    raise UserError(f'there is no model file {model_file(name)}; {hint}')


def make_config(module, keys):
    for key in ('n_layer', 'n_parallel'):                # some configs make lists of this length
        if type(keys.get(key)) is int and keys[key] > 10_000:
            raise UserError(f'{module.__name__}: {key} = {keys[key]:,} is more than 10,000')
    try:
        return module.Config(**keys)
    except Exception as e:
        raise UserError(f'{module.__name__}: {explain(e)}') from None


class NoWeights(torch.overrides.TorchFunctionMode):
    """Skip normal_: on the meta device it would load half of torch's compiler."""
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ == 'normal_':
            return args[0] if args else kwargs['tensor']
        return func(*args, **(kwargs or {}))


def sketch(module, keys, adapt=lambda model: model, most=20_000):
    """A model without weights, so its size costs no memory. The number of parameter tensors is capped:
    endless layers would take forever."""
    config = make_config(module, keys)
    count = itertools.count(1)

    def register(*_):
        if next(count) > most:
            raise UserError(f'{module.__name__}: more than {most:,} parameter tensors')
    hook = torch.nn.modules.module.register_module_parameter_registration_hook(register)
    try:
        with torch.device('meta'), NoWeights():
            return adapt(module.Model(config))
    except UserError:
        raise
    except Exception as e:
        raise UserError(f'{module.__name__} with these settings: {explain(e)}') from None
    finally:
        hook.remove()


def build(module, keys, device, adapt=lambda model: model):
    """A model of these keys. Above a billion parameters, directly on the device: on the CPU, random
    numbers would take minutes. Below, on the CPU, so that a seed gives the same weights everywhere."""
    size = sum(p.numel() for p in sketch(module, keys, adapt).parameters())
    with torch.device(device if size > 1e9 else 'cpu'):
        return adapt(module.Model(make_config(module, keys)))


def explain(error):
    """What a model file raises on purpose, in its own words; a bug in it, with its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent in (ROOT, ROOT / 'arena')]
    if not own or (own[-1] is frames[-1] and own[-1].line.startswith('raise')):
        return str(error)
    return f'{Path(own[-1].filename).name}:{own[-1].lineno}: {type(error).__name__}: {error}'


@torch.no_grad()
def reads_past_block_size(model):
    """Whether `features` reads more than block_size tokens: a model without positions does."""
    device = next(model.parameters()).device
    try:
        model.features(torch.zeros(1, model.config.block_size + 1, dtype=torch.long, device=device))
    except (AssertionError, IndexError, RuntimeError, ValueError):       # an assert, a table, a mask
        return False
    return True


def find_surgery(surgery, module):
    """A function of one or several models, by its name in the model's own file or, as file.name, in
    another beside train.py. Nothing else is imported."""
    file, _, name = surgery.rpartition('.')
    if file.isidentifier() and (ROOT / f'{file}.py').is_file():
        module = importlib.import_module(file)
    home = file or module.__name__
    functions = inspect.getmembers(module, inspect.isfunction)
    own = {key: f for key, f in functions if f.__module__ == home}
    takes = [*inspect.signature(own[name]).parameters][:1] if name in own else []
    if takes and takes[0] in ('model', 'models', 'paths'):
        return own[name]
    near = difflib.get_close_matches(name, own, 1)
    hint = f"; did you mean '{near[0]}'?" if near else ''
    raise UserError(f"there is no surgery '{surgery}': {home}.py has no function {name} of a model{hint}")
