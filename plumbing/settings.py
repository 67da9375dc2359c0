"""
The settings of a training run: every key with its comment, config files, and --key=value.

A config is a Python file of plain assignments, and is run. Every key is a field of Settings or of
the model's own Config.
"""

import difflib
import importlib
import inspect
import re
import runpy
import sys
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Literal

from plumbing.cli import UserError

ROOT = Path(__file__).parent.parent                      # where the model files lie


@dataclass
class Settings:
    model: str = 'moep'                    # the model file, without .py
    out_dir: str = ''                      # the run's folder; out/<name of the config> if not given
    seed: int = 42                         # for weights, dropout and the order of the data
    seeds: list = field(default_factory=list)   # 1,2,3: a run for each, in out_dir/seed_1, ...
    # what is read
    data: str = 'toy_stories'              # folders of data_dir; a,b are joined and shuffled
    data_dir: str = 'data'                 # where prepare.py put them
    seq_len: int | None = None             # tokens per window; the model's block_size if not given
    stride: int | None = None              # tokens between window starts; seq_len if not given
    stream: bool = False                   # read in order: a batch row goes on where it stopped
    epoch_words: float | None = None       # words per epoch; if not given, an epoch is all windows
    # how long
    epochs: float = 1.0                    # passes over the data
    max_iters: int | None = None           # steps, instead of epochs; 0: print the plan only
    batch_size: int = 16                   # windows per micro-batch
    gradient_accumulation_steps: int = 1   # micro-batches per step, in each process
    # optimiser
    optimizer: Literal['adamw', 'muon'] = 'adamw'   # plumbing/muon.py
    learning_rate: float = 1e-3            # of AdamW, at its highest
    muon_rate: float = 10.0                # of Muon, in multiples of AdamW's
    min_lr: float = 0.0                    # where cosine and linear end
    schedule: Literal['cosine', 'linear', 'constant'] = 'cosine'   # after the warm-up
    warmup_iters: int = 0                  # steps of linear warm-up
    warmup_lr: float = 0.0                 # the rate that the warm-up starts from
    weight_decay: float = 0.1              # on matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0                 # largest gradient norm; 0: no clipping
    aux_weights: dict = field(default_factory=dict)  # {name of an auxiliary loss: its weight}
    # what is written
    log_interval: int = 10                 # steps between lines of the log
    eval_interval: int = 500               # steps between evaluations (also at the start and end)
    eval_data: str | None = None           # folders whose val.bin is scored; data's if not given
    eval_tokens: int | None = None         # score at most this many val tokens per data set
    save_interval: int = 500               # steps between checkpoints
    checkpoint_words: list = field(default_factory=list)   # also keep weights at these word counts
    sample_tokens: int = 120               # length of the text sample at the end; 0: none
    # how it starts
    resume: bool = False                   # continue from out_dir's checkpoint (start if none)
    overwrite: bool = False                # delete the run in out_dir and start over
    init_from: str | None = None           # start from this run's model (see tools/surgery.py)
    # the machine
    device: str = 'auto'                   # auto (cuda, else mps, else cpu), cuda, mps or cpu
    dtype: Literal['auto', 'bfloat16', 'float16', 'float32'] = 'auto'    # auto: the first that a
    #                                        GPU has; otherwise float32
    compile: bool | None = None            # torch.compile; default: on cuda, for 200 steps or more
    graph: bool = True                     # capture the step as a CUDA graph if possible
    deterministic: bool = False            # on a GPU: the same bits every time, somewhat slower
    checkpoint_activations: bool = False   # recompute blocks in backward: less memory, slower
    shard: bool = False                    # several processes each hold a part of the model (FSDP2)


# ---- From the command line to Settings ----------------------------------------------------------

def read_settings(argv, usage=''):
    """-> Settings, the model's module, and the keys given for its Config. Later arguments win."""
    if not argv:
        raise UserError('name a config, such as config/moep.py, or see --help')
    values, texts, key, out_dir = {}, {}, '', ''         # texts: as typed on the command line
    for arg in argv:
        if arg.startswith('-'):
            key, equals, text = arg.lstrip('-').partition('=')
            key = key.replace('-', '_')
            values[key] = parse_value(text) if equals else True
            texts[key] = text
        else:
            if values.get(key) is True and not arg.endswith('.py'):  # --max_iters 300
                raise UserError(f'a setting is written --{key}={arg}')
            if out_dir:
                raise UserError(f'{arg} is a second config: name one, and write --key=value')
            values |= read_config(arg)
            out_dir = default_out_dir(arg)
    if values.get('init_from') and 'model' not in values:
        from plumbing.checkpoint import read_checkpoint  # which imports this file
        values['model'] = read_checkpoint(str(values['init_from']), mmap=True)['model']
    module = import_model(str(values.get('model', Settings.model)))
    if 'help' in values or 'h' in values:
        print_help(usage, values, Settings, *filter(is_dataclass, module.Config.__mro__))
        sys.exit(0)
    kinds = typing.get_type_hints(Settings) | typing.get_type_hints(module.Config)
    for key, value in values.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, 1)
            near += [name for name in kinds if key == ''.join(word[0] for word in name.split('_'))]
            hint = f"did you mean '{near[0]}'?" if near else 'see --help'
            if key == 'config' and value is not True:
                hint = f'a config is named without it: train.py {value}'
            raise UserError(f"unknown key '{key}'; {hint}")
        values[key] = as_type(key, value, kinds[key], texts.get(key))
    ours = {f.name for f in fields(Settings)}
    s = Settings(**{key: value for key, value in values.items() if key in ours})
    s.out_dir = s.out_dir or out_dir or f'out/{s.model}'
    keys = {key: value for key, value in values.items() if key not in ours}
    check(s, keys)
    return s, module, keys


def read_config(path):
    """{name: value} of the assignments in a config file."""
    if not Path(path).is_file():
        configs = [p.as_posix() for p in Path('config').glob('**/*.py')]
        near = difflib.get_close_matches(f'config/{path}', configs, 1, 0.7)
        hint = 'a setting is written --key=value'
        if path.endswith('.py'):
            hint = 'begin with a copy of config/moep.py'
        if near:
            hint = f'did you mean {near[0]}?'
        if Path(ROOT, path).is_file():
            hint = f'run this in {ROOT}'
        raise UserError(f'there is no config file {path}; {hint}')
    if '\nConfig, Model =' in Path(path).read_text(encoding='utf-8'):
        raise UserError(f'{path} is a model: train it with --model={Path(path).stem}, or by a '
                        f'config, such as config/{Path(path).name}')
    names = runpy.run_path(str(path))
    return {name: value for name, value in names.items() if not name.startswith('_')}


def default_out_dir(config):
    """config/paper/moep.py -> out/paper/moep"""
    path = Path(config).with_suffix('')
    parts = path.parts[path.parts.index('config') + 1:] if 'config' in path.parts else [path.name]
    return Path('out', *parts).as_posix()


def parse_value(text):
    """A Python value such as 3e-4, [1, 2] or dict(a=1); anything else is a string."""
    try:
        return eval(text, {'__builtins__': {}, 'dict': dict})
    except Exception:
        return text


def as_type(key, value, kind, text=None):
    """The value as its field has it: 1e6 is an int, 3 a float, and a folder may be named 2024."""
    is_union = isinstance(kind, types.UnionType)
    options = [typing.get_origin(k) or k for k in (typing.get_args(kind) if is_union else [kind])]
    if options == [Literal]:
        if value not in typing.get_args(kind):
            raise UserError(f"{key} = {value!r}; it can be {', '.join(typing.get_args(kind))}")
        return value
    if type(value) in options or value is None and types.NoneType in options:
        return value
    if int in options and isinstance(value, float) and value.is_integer():
        return int(value)
    if float in options and type(value) is int:
        return float(value)
    if list in options and type(value) in (tuple, int, float):
        return list(value) if type(value) is tuple else [value]
    if str in options and text:
        return text
    names = ' or '.join(kind.__name__ for kind in options if kind is not types.NoneType)
    example = ', such as 1,2,3' if list in options else ''
    raise UserError(f'{key} = {value!r} is not of type {names}{example}')


def check(s, keys):
    """Mistakes that would be noticed late, or not at all."""
    for key in ('batch_size', 'gradient_accumulation_steps', 'log_interval', 'eval_interval',
                'save_interval', 'epochs', 'seq_len', 'stride', 'epoch_words', 'eval_tokens'):
        if getattr(s, key) is not None and getattr(s, key) <= 0:
            raise UserError(f'{key} = {getattr(s, key)} must be more than 0')
    for key in ('max_iters', 'learning_rate', 'min_lr', 'warmup_iters', 'weight_decay',
                'grad_clip'):
        if (getattr(s, key) or 0) < 0:
            raise UserError(f'{key} = {getattr(s, key)} must be at least 0')
    if s.data.startswith(f'{s.data_dir}/'):
        name = s.data.removeprefix(f'{s.data_dir}/')
        raise UserError(f'data names a folder in {s.data_dir}/: write --data={name}')
    if keys.get('memory') and not s.stream:
        raise UserError('memory needs contiguous text: set stream=True')
    if keys.get('memory') and s.shard:
        raise UserError('memory does not go with shard')
    if s.stream and (s.stride or s.epoch_words):
        raise UserError('a stream has no stride and no epoch_words')
    if s.resume and s.overwrite:
        raise UserError('resume and overwrite exclude each other: set one to False')
    if s.compile and s.shard:
        raise UserError('shard does not go with compile: remove it')
    if s.shard and s.optimizer == 'muon':
        raise UserError('muon needs full matrices: train with optimizer=adamw, or without shard')


def print_help(usage, values, *owners):
    """The fields as they stand in the source, comments included, with the values of this run."""
    print(usage.strip())
    for owner in owners:
        print(f'\n{owner.__name__}, in {Path(inspect.getsourcefile(owner)).name}:')
        for line in inspect.getsource(owner).splitlines():
            name = line.strip().partition(':')[0]
            if name in values:
                code, mark, comment = line.partition('  #')
                code = f'{code.partition(" = ")[0]} = {values[name]!r}'.ljust(len(code))
                line = code + mark + comment
            if re.match(r'    (\w+: |#)', line):
                print(line)


# ---- Model files, by name -----------------------------------------------------------------------

def model_names():
    """All model files: moep, ..., arena.dense, ..."""
    paths = [*ROOT.glob('*.py'), *ROOT.glob('arena/*.py')]
    return ['.'.join(path.relative_to(ROOT).with_suffix('').parts) for path in sorted(paths)
            if '\nConfig, Model =' in path.read_text(encoding='utf-8')]


def import_model(name):
    """The module of a model file, NAME or arena.NAME: one that ends with `Config, Model = ...`."""
    names = model_names()
    name = name.removesuffix('.py').replace('/', '.')    # a path is understood, too
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f'did you mean {near[0]}?' if near else f"there are {', '.join(names)}"
        raise UserError(f'there is no model file {name} that ends with Config, Model = ...; {hint}')
    return importlib.import_module(name)


def model_sources(name):
    """{file: text} of a model file, and of those of ours that it imports."""
    file = name.replace('.', '/') + '.py'
    if not (ROOT / file).is_file():
        return {}
    text = (ROOT / file).read_text(encoding='utf-8')
    sources = {file: text}
    for imported in re.findall(r'(?m)^(?:from|import) ([\w.]+)', text):
        sources |= model_sources(imported)
    return sources


def code_of(text):
    """Without docstrings, comments and empty lines."""
    string = r'("""|\'\'\'|"|\')(?:\\[\s\S]|[^\\])*?\1'    # kept whole: it may hold a #
    code = re.sub(rf'{string}|\s*#.*', lambda found: found[0] if found[1] else '', text)
    code = re.sub(r'(\A|(?<=:\n))\s*r?"""[\s\S]*?"""', '', code)
    return '\n'.join(filter(str.strip, code.split('\n')))


def check_vocabulary(config, tokenizer, folder):
    """The data must hold what the model reads: its tokens, or chunks of its length."""
    slots = getattr(config, 'byte_limit', 0) + 1         # per chunk; 1: tokens
    if slots != len(tokenizer.end):
        raise UserError(f'{folder} has {len(tokenizer.end)} slots per chunk (1: plain tokens), but '
                        f'the model reads {slots}: see --chunks and --sentences of prepare.py')
    if config.vocab_size < tokenizer.n_vocab:
        raise UserError(f'vocab_size is {config.vocab_size}, but {folder} has a vocabulary of '
                        f'{tokenizer.n_vocab}')


def make_config(module, keys):
    """Its own asserts say what is wrong with the keys."""
    try:
        return module.Config(**keys)
    except (AssertionError, ValueError) as error:
        raise UserError(f'{module.__name__}: {error}') from None
    except TypeError as error:
        if 'unexpected keyword' not in str(error):       # else from an older checkpoint
            raise
        raise UserError(f"{module.__name__}: {error}; a run's folder has the model file that it "
                        'was trained with') from None
