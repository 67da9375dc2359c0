"""
Command lines: one-line errors, parsers, results as JSON, small prints.

A mistake that a user can make ends in one line that says what is wrong and what to do, with exit
code 2: never in a traceback, nor in half a result.
"""

import argparse
import gzip
import json
import lzma
import os
import sys
from pathlib import Path


class UserError(Exception):
    """Its text is that line."""


class Parser(argparse.ArgumentParser):
    """A script's command line. The script's docstring is the help."""

    def __init__(self, doc):
        spec = sys.modules['__main__'].__spec__          # there is one for python -m tools.NAME
        prog = f'python -m {spec.name}' if spec else None
        super().__init__(prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        raise UserError(f'{message}; see --help')


def run_main(main):
    """How every script ends: if __name__ == '__main__': run_main(main)"""
    script = Path(sys.argv[0]).name
    try:
        main()
    except UserError as error:
        print(f'{script}: {error}', file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:                              # the reader went away, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:                    # a full disk, a folder that may not be written
        reason = f'{error.filename}: {error.strerror}' if error.filename else str(error)
        print(f'{script}: {reason}', file=sys.stderr)
        sys.exit(2)


def short(n):
    """1000000 -> 1M"""
    for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'K')):
        if n >= size:
            return f'{n / size:.4g}{letter}'
    return f'{n:.4g}'


def check_writable(path):
    """Called before the work whose result goes there."""
    if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise UserError(f'{path} cannot be written: it is a folder, or its folder does not exist')


def write_json(path, value):
    """Write the whole file or nothing. A device or a pipe is written through, not replaced."""
    text = json.dumps(value, default=str) + '\n'         # paths may be among the settings
    if Path(path).exists() and not Path(path).is_file():
        Path(path).write_text(text, encoding='utf-8')
        return
    temporary = Path(f'{path}.tmp')
    try:
        with open(temporary, 'w', encoding='utf-8') as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_lines(path):
    """(number, text) of each line of a plain, .gz or .xz file. A line ends at \\n only."""
    number, offset = 0, 0
    open_file = {'.gz': gzip.open, '.xz': lzma.open}.get(path.suffix, open)
    try:
        with open_file(path, 'rb') as file:
            for number, line in enumerate(file, 1):
                text = line.decode('utf-8')
                if number == 1:
                    text = text.removeprefix('\ufeff')
                if text.endswith('\r\n'):
                    text = text[:-2] + '\n'
                yield number, text
                offset += len(line)
    except UnicodeDecodeError as error:
        place = f'line {number}, byte {offset + error.start}'
        raise UserError(f'{path}: {place} is not UTF-8; convert the file first') from None
