"""
The settings of a training run: every key with its comment, config files, and --key=value.

A config is a file of plain assignments. It is not executed: a value is an expression of literals,
dict(...) and arithmetic. Every key must be a field of Settings or of the model's own Config, and of
that field's type.
"""

import ast
import contextlib
import difflib
import inspect
import operator
import re
import sys
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Literal

from plumbing.cli import NANOGPT, UserError
from plumbing.models import ROOT, import_model

DropoutSchedule = Literal['constant', 'early', 'late', 'linear', 'rising', 'triangle', 'triangles']


@dataclass
class Settings:
    model: str = 'moep'                    # the model file, without .py
    out_dir: str = ''                      # the run's folder; out/<name of the config> if not given
    seed: int = 42                         # for weights, dropout and the order of the data
    # what is read
    data: str | dict = 'toy_stories'       # folders of data_dir: a,b or {a: (from, to[, passes])}
    data_dir: str = 'data'                 # where prepare.py put them
    seq_len: int | None = None             # tokens per window; the model's block_size if not given
    stride: int | None = None              # tokens between window starts; seq_len if not given
    stream: bool = False                   # no shuffling: each batch row reads on where it stopped
    memory: int = 0                        # with stream: past keys and values to keep as context
    epoch_words: float | None = None       # words per epoch; if not given, an epoch is all windows
    # how long
    epochs: float = 1.0                    # passes over the windows, each reordered and newly cut
    max_iters: int | None = None           # steps, instead of epochs; 0: print the plan, do the surgery, stop
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
    dropout_schedule: DropoutSchedule = 'constant'   # or early, late, linear, rising, triangle, triangles
    dropout_phase: float = 0.5             # early: dropout until this part of the run; late: from there on
    aux_weights: dict[str, float] = field(default_factory=dict)   # {name of an auxiliary loss: its weight}
    # what is written
    log_interval: int = 10                 # steps between lines of the log
    eval_interval: int = 500               # steps between evaluations (also at the start and end)
    eval_data: str | list[str] | None = None   # folders whose val.bin is scored; data's if not given
    eval_tokens: int | None = None         # score at most this many val tokens per data set; None: all
    save_interval: int = 500               # steps between checkpoints
    checkpoint_words: list[float] = field(default_factory=list)   # also keep the weights at these word counts
    sample_tokens: int = 120               # length of the text sample at the end; 0: none
    # how it starts
    resume: bool = False                   # continue from out_dir's checkpoint (start if none)
    overwrite: bool = False                # delete the run in out_dir and start over
    init_from: str | list[str] | None = None   # start from this run; a list for a surgery of several
    surgery: str | None = None             # rebuilds it: a function of the model's file, or FILE.NAME
    surgery_args: dict = field(default_factory=dict)
    surgery_batches: int = 8               # of training text, for a surgery that asks for `batches`
    # the machine
    device: str = 'auto'                   # auto (cuda, else mps, else cpu), cuda, mps or cpu
    dtype: str = 'auto'                    # auto | bfloat16 | float32; auto: bfloat16 if a GPU has it
    compile: bool | None = None            # torch.compile; if not given, on cuda for 200 steps or more
    graph: bool = True                     # capture the step as a CUDA graph if possible
    checkpoint_activations: bool = False   # recompute blocks and logits in backward: less memory, slower
    shard: bool = False                    # several processes each hold a part of the model (FSDP2)


# ---- From the command line to Settings ----------------------------------------------------------

def read_settings(argv, usage=''):
    """-> Settings, the model's module, and the keys given for the model's own Config."""
    if not argv:
        raise UserError('name a config, such as config/moep.py, or see --help')
    asked_for_help = '-h' in argv or '--help' in argv
    values, module = read_command([arg for arg in argv if arg not in ('-h', '--help')])
    if asked_for_help:
        print_help(usage, values, Settings, module.Config)
        sys.exit(0)
    given, model_keys = assign_keys(values, Settings, module.Config)
    s = Settings(**given)
    s.out_dir = s.out_dir or f'out/{s.model}'
    check_ranges(s)
    if s.shard or s.checkpoint_activations:     # their hooks cannot be compiled, nor recorded as a graph
        s.compile = s.graph = False
    return s, module, model_keys


def print_help(usage, values, *owners):
    """The fields as they stand in the source, comments included, with the values given for this run."""
    print(usage.strip())
    for owner in [each for owner in owners for each in owner.__mro__[::-1] if is_dataclass(each)]:
        path = Path(inspect.getsourcefile(owner)).relative_to(ROOT)
        print(f'\n{owner.__name__}, in {path.as_posix()}:')
        for line in inspect.getsource(owner).splitlines():
            if not re.match(r'    (\w+: |#)', line):
                continue
            head, mark, comment = line.partition('  #')
            name = head.partition(':')[0].strip()
            if values.get(name, '') != '':
                head = f'{head.partition(" = ")[0].rstrip()} = {values[name]!r}'.ljust(len(head))
            print(head + mark + comment)


def check_ranges(s):
    positive = ('batch_size', 'gradient_accumulation_steps', 'log_interval', 'eval_interval',
                'save_interval', 'epochs', 'seq_len', 'stride', 'epoch_words', 'eval_tokens')
    for key, value in asdict(s).items():
        if isinstance(value, (int, float)) and (value < 0 or value == 0 and key in positive):
            least = 'more than' if key in positive else 'at least'
            raise UserError(f'{key} = {value} must be {least} 0')
    if s.out_dir.endswith('.pt'):
        raise UserError(f'out_dir = {s.out_dir} is a folder: its name cannot end in .pt')
    if re.search('[\ud800-\udfff]', s.out_dir + s.data_dir):     # a checkpoint could not be read
        raise UserError('out_dir or data_dir is not UTF-8: rename the folder, or set PYTHONUTF8=1')
    if s.beta1 >= 1 or s.beta2 >= 1:
        raise UserError('beta1 and beta2 must be less than 1')
    if s.min_lr > s.learning_rate and s.schedule != 'constant':
        raise UserError(f'min_lr = {s.min_lr} is above learning_rate = {s.learning_rate}: lower it, too')
    if s.memory and not s.stream:
        raise UserError('memory needs contiguous text: set stream=True')
    if s.stream and (s.stride or s.epoch_words):
        raise UserError('a stream has no stride and no epoch_words')
    if s.resume and s.overwrite:
        raise UserError('resume and overwrite exclude each other: set one to False')
    if s.compile and (s.shard or s.checkpoint_activations):
        raise UserError('shard and checkpoint_activations do not go with compile: remove it')
    if s.shard and s.optimizer == 'muon':
        raise UserError('muon needs whole matrices: train with optimizer=adamw, or without shard')
    if s.surgery_args and not s.surgery:
        raise UserError('surgery_args without a surgery')


# ---- Config files and --key=value ---------------------------------------------------------------

ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
              ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos}
LARGEST = 1e12                                           # number that any setting may have


def literal(node):
    """The value of an expression of literals, arithmetic and dict(...), and of nothing else."""
    inner = lambda *nodes: [literal(each) for each in nodes]
    match node:
        case ast.Constant(value) if '\0' not in str(value):
            return value
        case ast.List(nodes):
            return inner(*nodes)
        case ast.Tuple(nodes):
            return tuple(inner(*nodes))
        case ast.Dict(keys, nodes) if None not in keys:
            return dict(zip(inner(*keys), inner(*nodes)))
        case ast.Call(ast.Name('dict'), [], keywords) if all(k.arg for k in keywords):
            return {k.arg: literal(k.value) for k in keywords}
        case ast.UnaryOp(op, a) if type(op) in ARITHMETIC:
            return compute(op, *inner(a))
        case ast.BinOp(a, op, b) if type(op) in ARITHMETIC:
            return compute(op, *inner(a, b))
    raise ValueError(f'{ast.unparse(node)[:60]} is not a literal')


def compute(op, *numbers):
    """With bounds: 9**9**9 would take forever."""
    in_range = lambda x: isinstance(x, (int, float)) and abs(x) <= LARGEST
    if not all(map(in_range, numbers)) or isinstance(op, ast.Pow) and abs(numbers[1]) > 64:
        raise ValueError('arithmetic is for numbers, and not for huge ones')
    result = ARITHMETIC[type(op)](*numbers)
    if not in_range(result):
        raise ValueError('the number is too large')
    return result


def read_config(path):
    """{name: value} of the assignments in a config file."""
    try:
        with open(path, encoding='utf-8') as file:
            text = file.read(2 ** 20)
        tree = ast.parse(text)
    except OSError:
        raise UserError(f'there is no config file {path}{config_hint(str(path))}') from None
    except SyntaxError as e:
        raise UserError(f'{path}:{e.lineno or 1}: {e.msg}') from None
    except (ValueError, RecursionError, MemoryError):    # no UTF-8, null bytes, endless brackets
        raise UserError(f'{path} is not a config: it cannot be parsed') from None
    values = {}
    for node in tree.body:
        where = f'{path}:{node.lineno}'
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue                                     # the docstring
        targets = node.targets if isinstance(node, ast.Assign) else []
        if len(targets) != 1 or not isinstance(targets[0], ast.Name):
            raise UserError(f'{where}: a config holds plain assignments only (name = value)')
        name = targets[0].id
        try:
            values[name] = literal(node.value)
        except Exception as e:
            raise UserError(f'{where}: the value of {name} cannot be read: {e}') from None
    if not values:
        raise UserError(f"{path} sets nothing; a config has lines such as model = 'moep'")
    return values


def config_hint(path):
    if '=' in path:
        return f'; write --{path.lstrip("-")}'
    if Path(path).is_dir():
        return ': that is a folder; name a config in it'
    guess = Path('config', path.removeprefix('config/').removesuffix('.py') + '.py')
    near = difflib.get_close_matches(guess.name, [p.name for p in guess.parent.glob('*.py')], 1)
    return f'; did you mean {guess.with_name(near[0]).as_posix()}?' if near else ''


def read_command(argv):
    """-> {key: value} of config files and --key=value in the order given, later ones win; and the
    model's module. A bare --key means True."""
    given = {'model': (Settings.model, None)}    # {key: (value, its text on the command line)}
    out_dir = ''
    bare = None
    for arg in argv:
        if not arg.startswith('--'):
            if bare and not arg.endswith('.py'):
                raise UserError(f'write {bare}={arg}, without a space')
            given |= {key: (value, None) for key, value in read_config(arg).items()}
            out_dir = default_out_dir(arg)
            continue
        key, equals, text = arg[2:].partition('=')
        try:
            value = literal(ast.parse(text.strip(), mode='eval').body) if equals else True
        except Exception:
            value = text                # not a Python value: a plain string, such as data=toy_math
        given[key.replace('-', '_')] = value, text
        bare = None if equals else arg
    module = import_model(str(given['model'][0]))
    kinds = typing.get_type_hints(Settings) | typing.get_type_hints(module.Config)
    values = {'out_dir': out_dir}
    for key, (value, text) in given.items():
        kind = str(kinds.get(key))
        is_word = 'str' in kind and not re.search('int|float', kind)
        if text and is_word and type(value) in (int, float):
            value = text                # a folder may be named 2024-10-12
        values[key] = value
    return values, module


def default_out_dir(config):
    """config/paper/moep.py -> out/paper/moep"""
    path = Path(config).with_suffix('')
    inside = [path.name]
    if 'config' in path.parts[:-1]:
        inside = path.parts[path.parts.index('config') + 1:]
    return Path('out', *inside).as_posix()


def coerce(value, kind):
    """The value as this type has it: 1e6 is an int, 3 a float, and a folder may be named 2024.
    TypeError if it has none; ValueError for nan, infinity and what no machine can count."""
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
        raise ValueError
    if kind is typing.Any:
        kind = type(value)
    origin = typing.get_origin(kind) or kind
    inside = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        exact = [k for k in inside if type(value) is (typing.get_origin(k) or k)]
        for option in [*exact, *inside]:
            with contextlib.suppress(TypeError):
                return coerce(value, option)
        raise TypeError
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        each = [k for k in inside if k is not ...] or [typing.Any]
        each += each[-1:] * (len(value) - len(each))     # tuple[int, float] has a type for each
        return origin(map(coerce, value, each))
    if origin is dict and isinstance(value, dict):
        of_key, of_value = inside or (typing.Any, typing.Any)
        return {coerce(k, of_key): coerce(v, of_value) for k, v in value.items()}
    if origin is Literal and value in inside:
        return value
    if origin is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if origin in (float, str) and type(value) is int:
        return origin(value)
    if isinstance(value, bool) == (origin is bool) and isinstance(value, origin):
        return value
    raise TypeError


def assign_keys(values, *owners):
    """For each dataclass the values of its fields, checked. A key that is nobody's is an error."""
    kinds = [typing.get_type_hints(owner) for owner in owners]
    given = [{} for _ in owners]
    for key, value in values.items():
        mine = next((i for i, owner in enumerate(owners) if key in owner.__dataclass_fields__), None)
        if mine is None:
            raise UserError(f"unknown key '{key}'{key_hint(key, owners)}")
        try:
            given[mine][key] = coerce(value, kinds[mine][key])
        except ValueError:
            raise UserError(f'{key} must be a finite number, at most {LARGEST:g}') from None
        except TypeError:
            kind = kinds[mine][key]
            if typing.get_origin(kind) is Literal:
                choices = ', '.join(map(str, typing.get_args(kind)))
                raise UserError(f'{key} = {value!r}; it can be {choices}') from None
            name = kind if typing.get_args(kind) else kind.__name__
            hint = '; write True or False' if 'bool' in str(kind) else ''
            raise UserError(f'{key} = {value!r} is not of type {name}{hint}') from None
    return given


def key_hint(key, owners):
    if key in NANOGPT:
        return f'; here it is {NANOGPT[key]}'
    for owner in owners:
        if hasattr(owner, key) and not hasattr(type, key):   # a class attribute that is not a field
            return f'; {owner.__name__} lacks its type ({key}: float = 1.0) or the line @dataclass'
    known = [f.name for owner in owners for f in fields(owner)]
    near = difflib.get_close_matches(key, known, 1, 0.6)
    names = ' and '.join(owner.__name__ for owner in owners)
    return f"; did you mean '{near[0]}'?" if near else f', which is no field of {names}'
