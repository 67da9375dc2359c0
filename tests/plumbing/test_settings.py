"""Config files and --key=value: what is read, what is refused, and how it is said."""

import dataclasses
import os

import pytest

from conftest import ROOT
from moep import MoEPConfig
from plumbing.cli import UserError
from plumbing.settings import (Settings, import_model, make_config, read_command, read_config, read_settings,
                               sort_keys)

CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob('config/**/*.py'))


def test_help_names_every_setting(run):
    text = run('train.py', 'config/papaformer.py', '--help', here=True).stdout
    for word in ('learning_rate: float = 1e-3            # of AdamW', 'path_embd', 'python train.py config',
                 'in papaformer.py', 'in plumbing/settings.py'):
        assert word in text
    for field in dataclasses.fields(Settings):
        assert f'\n    {field.name}: ' in text
    assert 'def ' not in text


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
    values = read_command([str(good), '--batch-size=1e1', '--resume', '--data=toy_math'])
    assert values == dict(out_dir='out/good', batch_size=10.0, aux_weights=dict(block_balance=0.01),
                          model='moep', resume=True, data='toy_math')
    assert read_command(['--out_dir=out/mine', str(good)])['out_dir'] == 'out/mine'
    assert read_command(['--batch_size=3', str(good)])['batch_size'] == 16   # what comes later counts
    given, keys = sort_keys(values, Settings, MoEPConfig)
    assert given['batch_size'] == 10 and type(given['batch_size']) is int and not keys
    assert read_command([str(ROOT / 'config/paper/moep.py')])['out_dir'] == 'out/paper/moep'
    assert sort_keys(dict(out_dir=2024, data=7), Settings) == [dict(out_dir='2024', data='7')]


@pytest.mark.parametrize('text, message', [
    ('import os', ':1: a config'),
    ('a = b = 1', ':1:'),
    ('x = 1\ny = open("f")', ':2: the value of y'),
    ('x = (', ':1:'),
    ('x = ().__class__', 'no literal'),
    ('x = [y for y in (1,)]', 'no literal'),
    ('x = dict.fromkeys([1])', 'no literal'),
    ('x = (lambda: 1)()', 'no literal'),
    ('x = len', 'no literal'),
    ('x = "\0"', 'bad.py:1: .*null bytes|it holds no text')])
def test_what_a_config_may_not_say(tmp_path, text, message):
    (tmp_path / 'bad.py').write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(str(tmp_path / 'bad.py'))


def test_a_config_that_is_no_text(tmp_path):
    (tmp_path / 'bad.py').write_bytes(b'x = "\xff"')
    with pytest.raises(UserError, match='it holds no text'):
        read_config(str(tmp_path / 'bad.py'))


def test_a_field_without_a_type_is_told():
    class Bare:
        noise = 1.0
    told = "unknown key 'noise'; Bare has it without a type, as in noise: float = 1.0"
    with pytest.raises(UserError, match=told):
        sort_keys(dict(noise=2.0), dataclasses.dataclass(Bare))


@pytest.mark.parametrize('wrong', [
    'batch_size=0', 'gradient_accumulation_steps=0', 'log_interval=0', 'epochs=0', 'epochs=-1.0',
    'grad_clip=-1.0', 'seed=-1', 'max_iters=-1', 'stride=-5', 'eval_tokens=0', 'beta1=2.0',
    'checkpoint_words=["1M"]', 'aux_weights={"block_balance": "x"}', 'surgery_args={"n": 2}'])
def test_values_out_of_range(wrong):
    with pytest.raises(UserError):
        read_settings([f'--{wrong}'])


@pytest.mark.parametrize('wrong, message', [
    (['--memory=16'], 'memory needs contiguous text: set stream=True'),
    (['--stream', '--stride=8'], 'a stream has no stride and no epoch_words'),
    (['--stream', '--epoch_words=100.0'], 'a stream has no stride and no epoch_words'),
    (['--resume', '--overwrite'], 'choose one')])
def test_settings_that_exclude_each_other(wrong, message):
    with pytest.raises(UserError, match=message):
        read_settings(wrong)


@pytest.mark.parametrize('wrong', ['dropout=2', 'block_size=0', 'n_head=0', 'n_layer=-1', 'top_k=0',
                                   'n_parallel=-1'])
def test_model_values_out_of_range(wrong):
    key, _, value = wrong.partition('=')
    with pytest.raises(ValueError):
        MoEPConfig(**{key: int(value)})


def test_a_model_is_a_file_beside_train_py(tmp_path, monkeypatch):
    """Nothing else is imported, whatever a checkpoint names."""
    assert import_model('moep').Config is MoEPConfig
    (tmp_path / 'evil.py').write_text("open('was_here', 'w')\nConfig, Model = None, None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ('evil', 'os', str(tmp_path / 'evil'), 'plumbing.cli'):
        with pytest.raises(UserError, match='there is no model file|lacks the line'):
            import_model(name)
    assert os.listdir(tmp_path) == ['evil.py']
