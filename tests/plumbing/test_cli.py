"""One-line errors, and results that are whole or not there."""

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys

import pytest
from tqdm import tqdm

from conftest import ROOT
from plumbing.cli import (
    Parser, UserError, catch_signals, check_writable, read_lines, run_main, short, write_json)


@pytest.mark.parametrize('error, code, line', [
    (UserError('say what to do'), 2, 'train.py: say what to do\n'),
    (FileNotFoundError(2, 'No such file', 'data/x'), 2, 'train.py: data/x: No such file\n'),
    (OSError('disk full'), 2, 'train.py: disk full\n'),
    (KeyboardInterrupt(), 130, '')])
def test_how_scripts_end(monkeypatch, capsys, error, code, line):
    monkeypatch.setattr('sys.argv', ['/somewhere/train.py'])

    def main():
        raise error
    with pytest.raises(SystemExit) as stop:
        run_main(main)
    assert stop.value.code == code and capsys.readouterr().err == line


def test_a_python_without_lzma(tmp_path):
    """As pyenv builds it where the headers are missing: only a packed file needs it."""
    (tmp_path / 'a.txt').write_text('hello\n')
    (tmp_path / 'a.xz').write_bytes(lzma.compress(b'hello\n'))
    code = """import sys; sys.modules.update(lzma=None, _lzma=None, bz2=None, _bz2=None)
from pathlib import Path; from plumbing.cli import read_lines, run_main
run_main(lambda: [print(*read_lines(Path(name))) for name in sys.argv[1:]])"""
    command = [sys.executable, '-c', code, tmp_path / 'a.txt', tmp_path / 'a.xz']
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "(1, 'hello\\n')\n")
    assert 'a.xz: broken or unreadable' in found.stderr and 'lzma' in found.stderr


def test_without_stdout_and_stderr(monkeypatch):
    """Closed, as in `nohup ... >&- 2>&-`, they are None."""
    monkeypatch.setattr('sys.stdout', None)
    monkeypatch.setattr('sys.stderr', None)
    run_main(lambda: tqdm.write('nobody reads this'))


@pytest.mark.parametrize('name, code', [('SIGTERM', 143), ('SIGHUP', 129)])
def test_how_scripts_are_stopped(name, code):
    """A terminal that is closed sends SIGHUP. nohup lets nobody hear it, and so it stays."""
    number = getattr(signal, name, None) or pytest.skip(f'there is no {name} here')
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as stop:
            run_main(lambda: signal.raise_signal(number))
        assert stop.value.code == code
        if name == 'SIGHUP':
            signal.signal(number, signal.SIG_IGN)
            run_main(lambda: signal.raise_signal(number))
    finally:
        signal.signal(number, before)


def test_a_closed_terminal_sends_two_signals(terminal):
    """The shell sends one and the kernel another: only a second Ctrl-C may end what saves."""
    caught = catch_signals()
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)
    assert caught == [signal.SIGHUP] * 2 and signal.getsignal(signal.SIGINT) == signal.SIG_DFL


def test_nohup(terminal):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    caught = catch_signals()
    signal.raise_signal(signal.SIGHUP)
    assert caught == []


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 / 0)


def test_a_wrong_option_is_an_error_of_the_user():
    with pytest.raises(UserError, match='--speed.*see --help'):
        Parser('doc').parse_args(['--speed'])


def test_help_shows_defaults(capsys):
    """Of options that have one."""
    parser = Parser('doc')
    parser.add_argument('run', nargs='?', default='out/moep', help='a folder')
    parser.add_argument('--num', default=3, help='samples')
    parser.add_argument('--prompt', default='', help='a text')
    parser.add_argument('--next', help='tokens')
    parser.add_argument('--routes', action='store_true', help='where tokens go')
    with pytest.raises(SystemExit):
        parser.parse_args(['--help'])
    lines = [' '.join(line.split()) for line in capsys.readouterr().out.splitlines()]
    options = [line for line in lines if line.startswith(('run', '--'))]
    assert options == ['run a folder', '--num NUM samples (default 3)', '--prompt PROMPT a text',
                       '--next NEXT tokens', '--routes where tokens go']


def test_short_numbers():
    numbers = (5, 999, 1000, 1234, 1e6, 12.5e6, 2e9, 0.5)
    assert [short(n) for n in numbers] == ['5', '999', '1K', '1.234K', '1M', '12.5M', '2B', '0.5']


def test_results_are_whole_or_not_there(tmp_path):
    path = tmp_path / 'r.json'
    write_json(path, dict(a=1, where=tmp_path))          # paths may be among the settings
    assert json.loads(path.read_text()) == dict(a=1, where=str(tmp_path))
    with pytest.raises(TypeError):
        write_json(path, {(1, 2): 'no key of JSON'})
    assert json.loads(path.read_text())['a'] == 1 and os.listdir(tmp_path) == ['r.json']


def test_where_results_can_go(tmp_path, monkeypatch):
    check_writable(None)
    check_writable(tmp_path / 'r.json')
    (tmp_path / 'link').symlink_to('r.json')             # leads to what may be written
    check_writable(tmp_path / 'link')
    (tmp_path / 'lost').symlink_to('nowhere/r.json')
    for path, reason in {tmp_path: 'it is not a file', '/dev/null': 'it is not a file',
                         tmp_path / 'nowhere/r.json': f'there is no folder {tmp_path}/nowhere to .*',
                         tmp_path / 'lost': f'there is no folder {tmp_path}/nowhere to .*'}.items():
        with pytest.raises(UserError, match=f'{path} cannot be written: {reason}$'):
            check_writable(path)
    monkeypatch.setattr(os, 'access', lambda *_: False)  # another's folder; root may write everywhere
    with pytest.raises(UserError, match=f'r.json cannot be written: there is no folder {tmp_path} to'):
        check_writable(tmp_path / 'r.json')


def test_lines_of_plain_and_compressed_files(tmp_path):
    text = '\ufeffone\r\ntwo\u2028still\n\nlast'.encode()
    lines = [(1, 'one\n'), (2, 'two\u2028still\n'), (3, '\n'), (4, 'last')]
    packs = {'.txt': bytes, '.gz': gzip.compress, '.xz': lzma.compress, '.TXT.GZ': gzip.compress}
    for end, pack in packs.items():
        path = tmp_path / f'a{end}'
        path.write_bytes(pack(text))
        assert list(read_lines(path)) == lines
    (tmp_path / 'bad.txt').write_bytes(b'fine\nbad \xff')
    with pytest.raises(UserError, match='bad.txt: line 2, byte 9 is not UTF-8'):
        list(read_lines(tmp_path / 'bad.txt'))
