"""How scripts end, and how they print numbers."""

import pytest

from plumbing.cli import UserError, human, run_main


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
