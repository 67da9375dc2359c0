"""
Command lines: one-line errors, signals, parsers, results as JSON, small prints.

A mistake that a user can make ends in one line that says what is wrong and what to do, with exit
code 2: never in a traceback, nor in half a result.
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import signal
import sys
from pathlib import Path


class UserError(Exception):
    """The user's mistake. Its text is the one line that is printed."""


# Settings that nanoGPT names differently (and lr, which it does not have), and what to write here.
NANOGPT = dict(
    lr='learning_rate', dataset='data', eval_iters='eval_tokens, which counts tokens',
    lr_decay_iters='max_iters', decay_lr='schedule (constant for False)',
    eval_only='not needed: every run logs its val loss', num_samples='--num of sample.py',
    start='--prompt of sample.py', always_save_checkpoint='save_interval', wandb_run_name='out_dir',
    wandb_log='not needed: the log is log.jsonl in the run\'s folder',
    wandb_project='not needed: the log is log.jsonl in the run\'s folder')


class Parser(argparse.ArgumentParser):
    """A script's command line. The script's docstring is the help."""

    def __init__(self, doc):
        spec = sys.modules['__main__'].__spec__          # there is one for python -m tools.NAME
        prog = f'python -m {spec.name}' if spec else None
        super().__init__(prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_argument(self, *names, **settings):
        """The help of an option ends with its default."""
        if names[0].startswith('--') and settings.get('default'):
            settings['help'] += ' (default %(default)s)'
        return super().add_argument(*names, **settings)

    def error(self, message):
        for arg in message.split():
            name = arg.partition('=')[0]
            if name.startswith('--') and name[2:] in NANOGPT:
                message += f'; here {name} is {NANOGPT[name[2:]]}'
        raise UserError(f'{message}; see --help')


def between(low, high, kind=int):
    """A type for Parser.add_argument: a number in this range."""
    def number(text):
        value = kind(text)
        if not low <= value <= high:                     # nan is in no range
            raise argparse.ArgumentTypeError(f'{text} is not between {low:,} and {high:,}')
        return value
    return number


def run_main(main):
    """How every script ends: if __name__ == '__main__': run_main(main)"""
    sys.stdout, sys.stderr = (each or open(os.devnull, 'w') for each in (sys.stdout, sys.stderr))  # closed
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='backslashreplace')    # a terminal that knows ASCII only
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is half written is cleared away
    if hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not nohup's
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))   # the terminal was closed
    try:
        main()
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:                              # the reader went away, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:                    # a full disk, a folder that may not be written
        fail(f'{error.filename}: {error.strerror}' if error.filename else str(error))
    except (MemoryError, RuntimeError) as error:
        first = str(error).partition('\n')[0]
        is_full = isinstance(error, MemoryError) or 'out of memory' in first or 'allocate memory' in first
        if not is_full:
            raise
        fail('out of memory: halve batch_size (and double gradient_accumulation_steps, where there '
             f'is one), or take a smaller model ({first[:80]})')


def catch_signals():
    """-> a list that fills with signals. The first asks train.py's loop to save and stop. A second SIGINT
    or SIGTERM ends the process at once. A second SIGHUP does not: a terminal that closes may send two."""
    caught = []

    def catch(number, _):
        caught.append(number)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # not nohup's
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, catch)
    return caught


def fail(text):
    """One line on stderr, and exit code 2. Long lines, such as echoed input, lose their middle."""
    line = ''.join(c if c.isprintable() else ' ' for c in f'{Path(sys.argv[0]).name}: {text}')
    if len(line) > 300:
        line = f'{line[:150]} ... {line[-140:]}'
    print(line, file=sys.stderr)
    sys.exit(2)


def short(n):
    """1000000 -> 1M"""
    for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'K')):
        if n >= size:
            return f'{n / size:.4g}{letter}'
    return f'{n:.4g}'


def check_writable(path):
    """Called before the work whose result goes there."""
    if not path:
        return
    folder = os.path.dirname(os.path.realpath(path))     # of a link, where it leads
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f'{path} cannot be written: it is not a file')
    if not os.access(folder, os.W_OK):
        raise UserError(f'{path} cannot be written: there is no folder {folder} to write in')


@contextlib.contextmanager
def new_file(path, mode='w'):
    """A file to write that takes the name `path` when it is whole; if writing fails, it vanishes."""
    temporary = Path(f'{path}.tmp')
    try:
        with open(temporary, mode, encoding=None if 'b' in mode else 'utf-8') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, value):
    with new_file(os.path.realpath(path)) as file:       # of a link, what it leads to
        file.write(json.dumps(value, default=str) + '\n')        # paths may be among the settings


def parse_json(text):
    """json.loads, with ValueError for everything that it cannot read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError('its brackets are nested too deeply') from None


def lock(file):
    """Lock a file until this process ends -> False if another holds it. Some systems have no locks."""
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


LARGE, RATIO = 2 ** 26, 200
LONGEST_LINE = 2 ** 26                                   # bytes


def unpack_limit(path):
    """The most bytes that a packed file may hold. A bomb, of a few bytes, holds more."""
    return max(LARGE, RATIO * path.stat().st_size)


def read_blocks(path, read):
    """What read(file) returns of a plain, .gz, .xz or .bz2 file, until its end."""
    kind = {'.gz': 'gzip', '.xz': 'lzma', '.bz2': 'bz2'}.get(path.suffix.lower(), 'builtins')
    try:
        module = importlib.import_module(kind)           # a Python may lack lzma and bz2
        left = math.inf if kind == 'builtins' else unpack_limit(path)
        with module.open(path, 'rb') as file:
            while block := read(file):
                left -= len(block)
                if left < 0:
                    raise UserError(f'{path} unpacks to over {RATIO} times its size: it is no text')
                yield block
    except (MemoryError, UserError):
        raise
    except Exception as error:                           # each kind has its own
        why = getattr(error, 'strerror', None) or f'broken or unreadable ({error}); unpack or get it again'
        raise UserError(f'{path}: {why}') from None


def read_lines(path):
    """(number, text) of each line of a plain, .gz, .xz or .bz2 file. A line ends at \\n only."""
    number, offset = 0, 0
    try:
        for line in read_blocks(path, lambda file: file.readline(LONGEST_LINE)):
            number += 1
            if len(line) == LONGEST_LINE:
                raise UserError(f'{path}: line {number} is longer than 64 MB; break it into lines')
            text = line.decode('utf-8')
            if number == 1:
                text = text.removeprefix('\ufeff')
            yield number, text.replace('\r\n', '\n')
            offset += len(line)
    except UnicodeDecodeError as error:
        place = f'line {number}, byte {offset + error.start}'
        raise UserError(f'{path}: {place} is not UTF-8; convert the file first') from None
