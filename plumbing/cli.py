"""
Command lines: one-line errors, parsers, files that are complete or not there.

A user's mistake ends in one line that says what to do, with exit code 2. A bug keeps its traceback.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path


class UserError(Exception):
    """A user's mistake. Its text is the one line that is printed."""


# ---- Scripts ------------------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    """A script's command line. The script's docstring is the help."""

    def __init__(self, doc):
        spec = sys.modules['__main__'].__spec__          # set by python -m tools.NAME
        prog = f"python -m {spec.name.removesuffix('.__main__')}" if spec else None
        super().__init__(prog, description=doc,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_argument(self, *names, **settings):
        """The help of an option ends with its default."""
        if names[0].startswith('--') and settings.get('default'):
            settings['help'] += ' (default %(default)s)'
        return super().add_argument(*names, **settings)

    def error(self, message):
        raise UserError(f'{message}; see --help')


def between(low, high, kind=int):
    """A type for Parser.add_argument: a number in this range."""
    def number(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f'{text} is not between {low:,} and {high:,}')
        return value
    return number


def numbers(text):
    """A type for Parser.add_argument: 1,2,3"""
    return [int(number) for number in text.split(',')]


def run_main(main):
    """How every script ends: if __name__ == '__main__': run_main(main)"""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='backslashreplace')    # for a terminal without Unicode
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))      # ends workers, removes half a file
    try:
        main()
    except UserError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:                              # the reader went away, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except ModuleNotFoundError as error:
        fail(f'{error.name} is missing: pip install {error.name}')
    except SyntaxError as error:                         # of a config, or of a model file
        fail(f'{error.filename}:{error.lineno}: {error.msg}')
    except OSError as error:                             # a full disk, a folder that is read-only
        fail(f'{error.filename}: {error.strerror}' if error.filename else error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fail('out of memory: halve batch_size (and double gradient_accumulation_steps, where there '
             f'is one), or take a smaller model ({str(error)[:80]})')


@contextlib.contextmanager
def caught_signals():
    """A list that fills with the signals to stop, SIGINT and SIGTERM. A second one ends the process
    at once."""
    caught = []

    def catch(number, _):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)
    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fail(message):
    script = Path(sys.argv[0].removesuffix(f'{os.sep}__main__.py')).name
    print(f'{script}: {" ".join(str(message).split())}', file=sys.stderr)
    sys.exit(2)


def is_out_of_memory(error):
    """Python's error, or one of torch's, which are RuntimeErrors."""
    words = re.search('(out of|allocate|enough) memory', str(error))
    return isinstance(error, MemoryError) or bool(words)


def human(n):
    """1000000 -> 1M"""
    for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'K')):
        if n >= size:
            return f'{n / size:.4g}{letter}'
    return f'{n:.4g}'


# ---- Files --------------------------------------------------------------------------------------

@contextlib.contextmanager
def new_file(path, mode='w'):
    """A file to write. It gets its name when it is complete; if writing fails, it vanishes."""
    temporary = Path(f'{path}.tmp')
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, mode, encoding=None if 'b' in mode else 'utf-8') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, value):
    with new_file(path) as file:
        file.write(json.dumps(value, default=str) + '\n')        # paths may be among the settings


@contextlib.contextmanager
def reading(path):
    """Whatever goes wrong while a file is read becomes one line that names the file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        first_line = str(error).partition('\n')[0]
        reason = getattr(error, 'strerror', None) or f'{type(error).__name__}: {first_line}'
        if isinstance(error, FileNotFoundError) and Path(path).with_name('meta.json').exists():
            reason += '; put it back, or make its folder again, with --overwrite'
        raise UserError(f'{path} cannot be read: {reason}') from None
