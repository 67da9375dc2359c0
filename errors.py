"""What a user can meet is one line that says what is wrong and what to do, and exit code 2; never a traceback, nor half a result."""

import argparse
import json
import os
import sys
from pathlib import Path


class UserError(Exception):
    """Its text is that line."""


class Parser(argparse.ArgumentParser):
    """Of a script's command line: its docstring is the help, a mistake is that line."""

    def __init__(self, doc):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        raise UserError(f'{message}; see python {self.prog} --help')


def check_writable(path):
    """Before the work whose result goes there, not after it."""
    if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise UserError(f'{path} cannot be written: it is a folder, or its folder does not exist')


def write_json(path, value):
    """Whole or not at all."""
    temporary = Path(f'{path}.tmp')
    with open(temporary, 'w', encoding='utf-8') as f:
        f.write(json.dumps(value, default=str) + '\n')     # paths may be among the settings
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def run_main(main):
    """How every script ends: if __name__ == '__main__': run_main(main)"""
    try:
        main()
    except UserError as error:
        print(f'{Path(sys.argv[0]).name}: {error}', file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:                              # the reader went away, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:                             # a full disk, a folder that may not be written
        print(f'{Path(sys.argv[0]).name}: ' + (f'{error.filename}: {error.strerror}' if error.filename else str(error)), file=sys.stderr)
        sys.exit(2)
