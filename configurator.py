"""
Settings from a config file and the command line: `config/x.py --key=value`.

A config is a file of plain assignments. It is not executed: each value must be an expression of literals, dict(...)
and arithmetic, and nothing else is computed. Every key must be a field of one of the dataclasses that the caller names, and of that field's type.
"""

import ast
import difflib
import types
import typing
from dataclasses import fields
from pathlib import Path

from errors import UserError


PLAIN = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.keyword, ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator,
         ast.expr_context)


def evaluate(text):
    tree = ast.parse(text.strip(), mode='eval')
    for node in ast.walk(tree):
        of_dict = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) or isinstance(node, ast.Name) and node.id == 'dict'
        if not (of_dict or isinstance(node, PLAIN)):     # a call's name is a node of its own, and must be dict
            raise ValueError(f'{ast.unparse(node)} is no literal')
    return eval(compile(tree, '', 'eval'), {'__builtins__': {}, 'dict': dict})


def read_config(path):
    """{name: value} of the assignments in a config file."""
    try:
        tree = ast.parse(Path(path).read_text(encoding='utf-8'), path)
    except OSError:
        near = Path('config', Path(path.removeprefix('config/').removesuffix('.py') + '.py'))
        like = difflib.get_close_matches(near.name, [p.name for p in near.parent.glob('*.py')], 1)
        near = [near] if near.exists() else [near.with_name(name) for name in like]
        hint = f'write --{path.lstrip("-")}' if '=' in path else f'did you mean {near[0].as_posix()}?' if near else ''
        raise UserError(f'there is no config file {path}' + f'; {hint}' * bool(hint)) from None
    except ValueError:                                   # bytes that are no UTF-8, or null bytes
        raise UserError(f'{path} is not a config: it holds no text') from None
    except SyntaxError as e:
        raise UserError(f'{path}:{e.lineno}: {e.msg}') from None
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue                                     # the docstring
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise UserError(f'{path}:{node.lineno}: a config holds plain assignments only (name = value)')
        name = node.targets[0].id
        try:
            values[name] = evaluate(ast.unparse(node.value))
        except Exception as e:
            raise UserError(f'{path}:{node.lineno}: the value of {name} cannot be read: {e}') from None
    return values


def read_command(argv):
    """Config files and --key=value in the order given, later ones win; a bare --key means True."""
    values, out_dir, bare = {}, '', None
    for arg in argv:
        if not arg.startswith('--'):
            if bare and not Path(arg).exists():
                raise UserError(f'write {bare}={arg}, without a space')
            values.update(read_config(arg))
            path = Path(arg).with_suffix('')
            inside = path.parts[path.parts.index('config') + 1:] if 'config' in path.parts[:-1] else [path.name]
            out_dir = Path('out', *inside).as_posix()    # config/paper/moep.py -> out/paper/moep
            continue
        key, equals, text = arg[2:].partition('=')
        try:
            value = evaluate(text) if equals else True
        except Exception:
            value = text                                 # not a Python value: a plain string, as data=toy_math
        values[key.replace('-', '_')] = value
        bare = None if equals else arg
    return {'out_dir': out_dir, **values}


def check_type(key, value, kind):
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(value) in kinds:
        return value
    if int in kinds and isinstance(value, float) and value.is_integer():
        return int(value)                                # 1e6 steps
    if float in kinds and type(value) is int:
        return float(value)
    if str in kinds and type(value) is int:
        return str(value)                                # a folder named 2024
    if list in kinds and isinstance(value, tuple):
        return list(value)
    names = ' or '.join('None' if k is type(None) else k.__name__ for k in kinds)
    raise UserError(f'{key} = {value!r} is not of type {names}')


def sort_keys(values, *owners):
    """For each dataclass the values that are its fields, checked. A key that is nobody's is an error."""
    kinds = [{f.name: f.type for f in fields(owner)} for owner in owners]
    given = [{} for _ in owners]
    for key, value in values.items():
        mine = [i for i, own in enumerate(kinds) if key in own]
        if not mine:
            near = difflib.get_close_matches(key, [k for own in kinds for k in own], 1, 0.6)
            bare = next((owner.__name__ for owner in owners if hasattr(owner, key)), None)
            hint = f'{bare} has it without a type, as in {key}: float = 1.0' if bare else f"did you mean '{near[0]}'?" if near else ''
            raise UserError(f"unknown key '{key}'" + f'; {hint}' * bool(hint))
        given[mine[0]][key] = check_type(key, value, kinds[mine[0]][key])
    return given
