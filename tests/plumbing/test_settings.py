"""Config files and --key=value: what is read, what is refused, and how it is said."""

import dataclasses
import importlib
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from moep import MoEPConfig
from plumbing.cli import UserError
from plumbing.models import make_config
from plumbing.settings import Settings, assign_keys, print_help, read_command, read_config, read_settings

CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob('config/**/*.py'))


def test_help_names_every_setting(run):
    text = run('train.py', 'config/papaformer.py', '--help', here=True).stdout
    for word in ('learning_rate: float = 0.003           # of AdamW', 'path_embd',
                 'python train.py config',
                 'in papaformer.py', 'in plumbing/settings.py'):
        assert word in text
    for field in dataclasses.fields(Settings):
        assert f'\n    {field.name}: ' in text
    assert 'def ' not in text


@dataclasses.dataclass
class MineConfig(MoEPConfig):
    slack: float = 0.5             # of my router


def test_help_names_inherited_settings(capsys):
    print_help('', dict(n_block=8), MineConfig)
    text = capsys.readouterr().out
    assert '\n    n_block: int = 8 ' in text and '\n    slack: float = 0.5             # of my router' in text
    assert text.index('MoEPConfig, in moep.py:') < text.index('MineConfig, in tests/plumbing/')


def test_help_through_a_link(tmp_path):
    """PYTHONPATH may name one, and so does a drive letter on Windows."""
    (tmp_path / 'link').symlink_to(ROOT)
    code = f"import sys; sys.path[:0] = [{str(tmp_path / 'link')!r}]; import train; train.main()"
    environ = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    command = [sys.executable, '-c', code, '--help']
    found = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert '\nMoEPConfig, in moep.py:\n' in found.stdout, found.stderr


@pytest.mark.parametrize('config', CONFIGS)
def test_every_config_can_be_read(config, monkeypatch):
    """Its keys are known and of their types; test_train.py trains it."""
    monkeypatch.chdir(ROOT)
    s, module, model_keys = read_settings([config])
    assert s.out_dir == config.replace('config', 'out', 1).removesuffix('.py')
    make_config(module, model_keys)


def test_config_files(tmp_path):
    good = tmp_path / 'good.py'
    good.write_text('"""doc"""\nbatch_size = 2 * 8\naux_weights = dict(block_balance=0.01)  # comment\n'
                    'model = "moep"\n')
    values, _ = read_command([str(good), '--batch-size=1e1', '--resume', '--data=toy_math'])
    assert values == dict(out_dir='out/good', batch_size=10.0, aux_weights=dict(block_balance=0.01),
                          model='moep', resume=True, data='toy_math')
    assert read_command(['--out_dir=out/mine', str(good)])[0]['out_dir'] == 'out/mine'
    assert read_command(['--batch_size=3', str(good)])[0]['batch_size'] == 16    # what comes later counts
    given, keys = assign_keys(values, Settings, MoEPConfig)
    assert given['batch_size'] == 10 and type(given['batch_size']) is int and not keys
    assert read_command([str(ROOT / 'config/paper/moep.py')])[0]['out_dir'] == 'out/paper/moep'
    assert assign_keys(dict(out_dir=2024, data=7), Settings) == [dict(out_dir='2024', data='7')]
    named, _ = read_command(['--out_dir=2024-10-12', '--data=0x10', '--init_from=1_0', '--seed=2_0'])
    assert named == dict(out_dir='2024-10-12', data='0x10', init_from='1_0', seed=20, model='moep')


def test_a_word_that_looks_like_a_number(tmp_path, monkeypatch):
    """It is kept as it was typed, also for the model's own config; what comes later counts."""
    (tmp_path / 'worded.py').write_text('''from dataclasses import dataclass

@dataclass
class Base:
    tag: str = ''

@dataclass
class Mine(Base):
    size: int | str = 'small'

Config, Model = Mine, None
''')
    (tmp_path / 'later.py').write_text('tag = 5')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr('plumbing.models.ROOT', tmp_path)
    monkeypatch.delitem(sys.modules, 'worded', raising=False)
    args = ['--tag=1e3', '--size=2_0', '--seed=1e1', '--model=worded']
    s, _, keys = read_settings(args)
    assert keys == dict(tag='1e3', size=20) and s.seed == 10
    assert read_settings([*args, f'{tmp_path}/later.py'])[2]['tag'] == '5'


@pytest.mark.parametrize('text, message', [
    ('import os', ':1: a config'),
    ('a = b = 1', ':1:'),
    ('x = 1\ny = open("f")', ':2: the value of y'),
    ('x = (', ':1:'),
    ('x = ().__class__', 'is not a literal'),
    ('x = [y for y in (1,)]', 'is not a literal'),
    ('x = dict.fromkeys([1])', 'is not a literal'),
    ('x = (lambda: 1)()', 'is not a literal'),
    ('x = len', 'is not a literal'),
    ('', 'bad.py sets nothing'),
    ('"""Only a docstring."""', 'bad.py sets nothing'),
    ('x = "\0"', 'bad.py:1: .*null bytes|it cannot be parsed')])
def test_what_a_config_may_not_say(tmp_path, text, message):
    (tmp_path / 'bad.py').write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(str(tmp_path / 'bad.py'))


@pytest.mark.parametrize('value', [
    '9**9**9', '10**-10**9', '"x" * 10**9', '[0] * 10**9', '-' * 3000 + '1', '(' * 3000 + ')' * 3000,
    '2**64**2', '1e12 * 10', '1e999 - 1', '(-1)**0.5', '1 / 0',
    'dict(**dict(a=1))', '{**{}}', 'f"{1}"',
    '"a" + "b"', '+'.join('1' * 3000), '{[]: 1}', '10**400'])
def test_arithmetic_has_a_bound(tmp_path, value):
    (tmp_path / 'bad.py').write_text(f'epochs = {value}')
    with pytest.raises(UserError) as told:
        assign_keys(read_config(str(tmp_path / 'bad.py')), Settings)
    assert len(str(told.value)) < 200
    assert read_command([f'--x={value}'])[0]['x'] in (value, 10 ** 400)      # on the command line, a string


def test_arithmetic(tmp_path):
    lines = ['a = -(2**10) * 3 / 4', 'b = [1 + 1, (7 // 2, 7 % 2)]', 'c = {"x": dict(y=1e-3)}']
    (tmp_path / 'good.py').write_text('\n'.join(lines))
    assert read_config(tmp_path / 'good.py') == dict(a=-768.0, b=[2, (3, 1)], c=dict(x=dict(y=0.001)))


def test_types_of_a_model_of_your_own(tmp_path, monkeypatch):
    """Ordinary annotations are read, also as strings."""
    (tmp_path / 'mine.py').write_text('''from __future__ import annotations
from dataclasses import dataclass, field
from typing import Literal, Optional

@dataclass
class Config:
    widths: list[int] = field(default_factory=list)
    most: Optional[int] = None
    pair: tuple[int, float] = (1, 2.0)
    rates: dict[str, float] = field(default_factory=dict)
    kind: Literal['a', 'b'] = 'a'
    on: bool = False
''')
    monkeypatch.syspath_prepend(tmp_path)
    owner = importlib.import_module('mine').Config
    given = dict(widths=(1e3, 2), most=3.0, pair=[1, 2], rates=dict(x=1), kind='b', on=True)
    fitted, = assign_keys(given, owner)
    assert fitted == dict(widths=[1000, 2], most=3, pair=(1, 2.0), rates=dict(x=1.0), kind='b', on=True)
    assert type(fitted['widths'][0]) is int and assign_keys(dict(most=None), owner) == [dict(most=None)]
    for wrong in (dict(widths=[1.5]), dict(widths=3), dict(most='x'), dict(rates={'x': 'y'}),
                  dict(on=1), dict(most=True)):
        with pytest.raises(UserError, match='is not of type') as error:
            assign_keys(wrong, owner)
        assert str(error.value).endswith('; write True or False') == ('on' in wrong)
    with pytest.raises(UserError, match="kind = 'c'; it can be a, b$"):
        assign_keys(dict(kind='c'), owner)


@pytest.mark.parametrize('value', ['float("nan")', '1e999', '-1e999', '1e13', '10**13', '[1e999]'])
def test_numbers_are_finite(value):
    number = eval(value)
    for key in ('learning_rate', 'epochs', 'seed', 'max_iters', 'data', 'checkpoint_words'):
        with pytest.raises(UserError, match='must be a finite number|is not of type'):
            assign_keys({key: number}, Settings)
    with pytest.raises(UserError, match='aux_weights must be a finite number|is not of type'):
        assign_keys(dict(aux_weights=dict(a=number)), Settings)


@pytest.mark.parametrize('args, hint', [
    (['--lr=3'], "unknown key 'lr'; here it is learning_rate"),
    (['--wandb_log=True'], 'the log is log.jsonl'),
    (['--eval_iters=3'], 'here it is eval_tokens, which counts tokens'),
    (['--eval_only'], 'here it is not needed: every run logs its val loss'),
    (['--num_samples=3'], 'here it is --num of sample.py'),
    (['--start=x'], 'here it is --prompt of sample.py'),
    (['--batch_size', '8'], 'write --batch_size=8, without a space'),
    (['--out_dir', 'config'], 'write --out_dir=config, without a space')])
def test_what_nanogpt_users_write(args, hint, run):
    assert hint in run('train.py', *args, code=2).stderr


def test_what_nanogpt_users_write_to_sample(run):
    told = run('sample.py', 'out/x', '--start=x', '--num_samples=3', code=2).stderr
    assert '; here --start is --prompt of sample.py; here --num_samples is --num of sample.py' in told


def test_a_config_that_is_no_text(tmp_path):
    (tmp_path / 'bad.py').write_bytes(b'x = "\xff"')
    with pytest.raises(UserError, match='it cannot be parsed'):
        read_config(str(tmp_path / 'bad.py'))


@pytest.mark.parametrize('value', ['3', 'None', '["moep"]'])
def test_a_model_that_is_no_name(tmp_path, value):
    (tmp_path / 'bad.py').write_text(f'model = {value}')
    with pytest.raises(UserError, match='there is no model file'):
        read_settings([str(tmp_path / 'bad.py')])


def test_a_key_that_every_class_has():
    with pytest.raises(UserError, match="unknown key 'mro'") as told:
        read_settings(['--mro=1'])
    assert 'lacks its type' not in str(told.value)


def test_a_field_without_a_type_is_told():
    class Bare:
        noise = 1.0

    class Undecorated(Settings):
        noise: float = 1.0
    for owner in (dataclasses.dataclass(Bare), Undecorated):
        told = f"unknown key 'noise'; {owner.__name__} lacks its type .noise: float = 1.0. or the line"
        with pytest.raises(UserError, match=told):
            assign_keys(dict(noise=2.0), owner)


@pytest.mark.parametrize('wrong', [
    'batch_size=0', 'gradient_accumulation_steps=0', 'log_interval=0', 'epochs=0', 'epochs=-1.0',
    'grad_clip=-1.0', 'seed=-1', 'max_iters=-1', 'stride=-5', 'eval_tokens=0', 'beta1=2.0',
    'checkpoint_words=["1M"]', 'out_dir="x.pt"', 'eval_data=[[]]', 'out_dir=out/m\udcc3\udcb6',
    'data_dir=\udce9', 'init_from=[1.5]', 'aux_weights={"block_balance": "x"}', 'surgery_args={"n": 2}'])
def test_values_out_of_range(wrong):
    with pytest.raises(UserError):
        read_settings([f'--{wrong}'])


@pytest.mark.parametrize('wrong, message', [
    (['--memory=16'], 'memory needs contiguous text: set stream=True'),
    (['--stream', '--stride=8'], 'a stream has no stride and no epoch_words'),
    (['--stream', '--epoch_words=100.0'], 'a stream has no stride and no epoch_words'),
    (['--learning_rate=1e-4', '--min_lr=2e-4'], 'min_lr = 0.0002 is above learning_rate = 0.0001'),
    (['--resume', '--overwrite'], 'set one to False')])
def test_settings_that_exclude_each_other(wrong, message):
    with pytest.raises(UserError, match=message):
        read_settings(wrong)


@pytest.mark.parametrize('wrong', ['dropout=2', 'block_size=0', 'n_head=0', 'n_layer=-1', 'top_k=0',
                                   'n_parallel=-1'])
def test_model_values_out_of_range(wrong):
    key, _, value = wrong.partition('=')
    with pytest.raises(ValueError):
        MoEPConfig(**{key: int(value)})
