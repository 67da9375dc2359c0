"""One-line errors, help texts, and files that are complete or not there."""

import gzip
import json
import os

import pytest

from plumbing.cli import UserError, human, reading, run_main, write_json
from plumbing.text import read_lines


def throw(error):
    raise error


@pytest.mark.parametrize('error, code, line', [
    (UserError('say\nwhat to do'), 2, 'train.py: say what to do\n'),
    (FileNotFoundError(2, 'No such file', 'data/x'), 2, 'train.py: data/x: No such file\n'),
    (OSError('disk full'), 2, 'train.py: disk full\n'),
    (RuntimeError('CUDA out of memory. Tried'), 2, 'train.py: out of memory: halve batch_size'),
    (MemoryError(), 2, 'train.py: out of memory: halve batch_size'),
    (KeyboardInterrupt(), 130, '')])
def test_how_scripts_end(monkeypatch, capsys, error, code, line):
    monkeypatch.setattr('sys.argv', ['/somewhere/train.py'])
    with pytest.raises(SystemExit) as stop:
        run_main(lambda: throw(error))
    message = capsys.readouterr().err
    assert stop.value.code == code and message.startswith(line)
    assert message.count('\n') == (code == 2)


def test_human_numbers():
    numbers = (5, 999, 1000, 1234, 1e6, 12.5e6, 2e9, 0.5)
    assert [human(n) for n in numbers] == ['5', '999', '1K', '1.234K', '1M', '12.5M', '2B', '0.5']


def test_files_are_complete_or_not_there(tmp_path):
    path = tmp_path / 'new' / 'r.json'
    write_json(path, dict(a=1, where=tmp_path))
    assert json.loads(path.read_text()) == dict(a=1, where=str(tmp_path))
    with pytest.raises(TypeError):
        write_json(path, {(1, 2): 'no key of JSON'})
    assert json.loads(path.read_text())['a'] == 1 and os.listdir(path.parent) == ['r.json']


def test_what_goes_wrong_while_reading_names_the_file(tmp_path):
    missing = FileNotFoundError(2, 'No such file', 'a')
    for error in (ValueError('odd\nand more'), KeyError('x'), missing):
        with pytest.raises(UserError, match='^a.pt cannot be read: .*(odd|x|No such file).?$'):
            with reading('a.pt'):
                raise error
    full = RuntimeError('CUDA out of memory')
    for error in (UserError('other'), MemoryError(), KeyboardInterrupt(), full):
        with pytest.raises(type(error)), reading('a.pt'):
            raise error
    (tmp_path / 'cut.gz').write_bytes(gzip.compress(b'a' * 999)[:-9])
    with pytest.raises(UserError, match='cut.gz cannot be read: EOFError'):
        list(read_lines(tmp_path / 'cut.gz'))
