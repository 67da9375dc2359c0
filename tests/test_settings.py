"""Config files and --key=value: what is read, and as which type."""

import dataclasses
import typing

import pytest

from plumbing.cli import UserError
from plumbing.settings import (Settings, as_type, code_of, default_out_dir, parse_value,
                               read_config, read_settings)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / 'mine.py'
    path.write_text('"""doc"""\n_half = 8\nbatch_size = 2 * _half\nmodel = "moep"\nn_embd = 48\n'
                    'aux_weights = dict(block_balance=0.01)  # comment\n')
    return str(path)


def test_a_config_is_run_and_names_with_an_underscore_are_its_own(config):
    assert read_config(config) == dict(batch_size=16, model='moep', n_embd=48,
                                       aux_weights=dict(block_balance=0.01))


def test_keys_go_to_their_owners_and_later_ones_win(config):
    s, module, keys = read_settings([config, '--data=toy_math', '--n_head=4', '--resume'])
    assert (s.batch_size, s.data, s.resume, module.__name__) == (16, 'toy_math', True, 'moep')
    assert keys == dict(n_embd=48, n_head=4)
    assert read_settings([config, '--batch_size=3', '--batch-size=4'])[0].batch_size == 4
    assert read_settings(['--batch_size=3', config])[0].batch_size == 16


def test_the_folder_of_a_run(config):
    assert default_out_dir('config/moep.py') == 'out/moep'
    assert default_out_dir('/somewhere/config/a/b.py') == 'out/a/b'
    assert read_settings([config])[0].out_dir == 'out/mine'
    assert read_settings(['--out_dir=x', config])[0].out_dir == 'x'
    assert read_settings(['--model=stlm'])[0].out_dir == 'out/stlm'


@pytest.mark.parametrize('text, value', [
    ('3', 3), ('3e-4', 3e-4), ('None', None), ('True', True), ('[1, 2]', [1, 2]),
    ("dict(a=1, b='x')", dict(a=1, b='x')), ("{'a': (0.0, 0.5)}", dict(a=(0.0, 0.5))),
    ('toy_math', 'toy_math'), ('a,b', 'a,b'), ('out/moep', 'out/moep'), ('', ''),
    ('__import__("os")', '__import__("os")')])
def test_values_on_the_command_line(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize('value, kind, wanted', [
    (1e6, int, 1_000_000), (3, float, 3.0), ((1, 2), list, [1, 2]), (None, int | None, None),
    (5, int | None, 5), ('a', str | None, 'a'), ([8, 8], list[int], [8, 8]), (True, bool, True),
    ('b', typing.Literal['a', 'b'], 'b'), ([1], list[int] | None, [1]), (2, list, [2])])
def test_types(value, kind, wanted):
    fitted = as_type('key', value, kind)
    assert fitted == wanted and type(fitted) is type(wanted)


@pytest.mark.parametrize('value, kind', [
    (1.5, int), ('big', int), (True, int), (True, float), (1, bool), ('yes', bool), (None, int),
    (3, dict), ('c', typing.Literal['a', 'b']), (2024, str)])
def test_wrong_types(value, kind):
    with pytest.raises(UserError, match='key = .* (is not of type|it can be a, b)'):
        as_type('key', value, kind)


def test_code_is_compared_without_comments_but_with_whole_strings():
    assert code_of('r"""doc"""\nx = "#a"  # b "c"\n') == 'x = "#a"'


def test_a_name_that_looks_like_a_number_stays_as_typed():
    s, _, _ = read_settings(['--out_dir=2024', '--data=1_000', '--seed=1_000'])
    assert (s.out_dir, s.data, s.seed) == ('2024', '1_000', 1000)


@pytest.mark.parametrize('name', ['moep', 'arena.moduleformer_routers'])
def test_help_prints_every_field(run, name):
    """With this run's values; also the fields that a Config inherits."""
    module = pytest.importorskip(name)
    told = run('train.py', f'--model={name}', '--learning_rate=0.003', '--help', here=True).stdout
    for owner in (Settings, module.Config):
        assert all(f'\n    {field.name}: ' in told for field in dataclasses.fields(owner))
    assert 'learning_rate: float = 0.003           # of AdamW' in told
    assert 'python train.py config' in told and 'def ' not in told
