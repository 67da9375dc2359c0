"""
Eight exercises on routing. Each is a file lab/ex*.py: read its docstring, and replace the lines
`raise NotImplementedError` by an answer.

    python -m lab               # which exercises are green
    python -m lab 3             # one exercise: all of its checks
    python -m lab --hint 3      # a hint

It takes seconds on a CPU and needs no data. The exit code is 0 if all are green, 1 if not.
"""

import importlib.util
import sys
import traceback
from pathlib import Path

import torch

from lab.checks import CHECKS, PLACES
from plumbing.cli import Parser, between, run_main

FILES = [Path(__file__).with_name(f'{name}.py') for name in CHECKS]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    exercise = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exercise)
    return exercise


def describe(error, path):
    """One line: what a check says, or an error with the line of the exercise that it passed."""
    if isinstance(error, AssertionError) and str(error):
        return str(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
             if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    place = f'line {lines[-1]}: ' if lines else ''
    return place + traceback.format_exception_only(error)[-1].splitlines()[0]


def run_checks(path):
    """-> a (verdict, what is asked for, message) for each check of an exercise"""
    results = []
    for check in CHECKS[path.stem]:
        torch.manual_seed(0)
        verdict, message = 'ok', ''
        try:
            check(load(path))
        except NotImplementedError:
            verdict = 'not yet'
        except Exception as error:
            verdict, message = 'wrong', describe(error, path)
        results.append((verdict, check.__doc__, message))
    return results


def state_of(results):
    verdicts = {verdict for verdict, _, _ in results}
    if verdicts == {'ok'}:
        return 'green'
    return 'not begun' if verdicts == {'not yet'} else 'red'


def show(path, details):
    """Print how an exercise stands -> is it green?"""
    results = run_checks(path)
    state = state_of(results)
    title = path.read_text(encoding='utf-8').partition('\n')[0].strip('"')
    print(f'{state:9}  {title}')
    if details:
        for verdict, asked, message in results:
            print(f'  {verdict:9}  {asked}')
            if message:
                print(f'             {message}')
    if state == 'green':
        print(f'           The project does it in {PLACES[path.stem]}')
    return state == 'green'


def main():
    parser = Parser(__doc__)
    parser.add_argument('number', nargs='?', type=between(1, len(FILES)),
                        help='of an exercise; all if not given')
    parser.add_argument('--hint', action='store_true', help='give a hint for this exercise')
    args = parser.parse_args()
    if args.hint and not args.number:
        parser.error('--hint needs the number of an exercise')
    if args.hint:
        hints = Path(__file__).with_name('hints.md').read_text(encoding='utf-8')
        print(hints.split('\n## ')[args.number].strip())
        return
    if args.number:
        sys.exit(0 if show(FILES[args.number - 1], details=True) else 1)
    left = [number for number, path in enumerate(FILES, 1) if not show(path, details=False)]
    print(f'\n{len(FILES) - len(left)} of {len(FILES)} are green.')
    if left:
        print(f'Next: lab/{FILES[left[0] - 1].name}. Its checks: python -m lab {left[0]}. '
              f'A hint: python -m lab --hint {left[0]}.')
        sys.exit(1)


if __name__ == '__main__':
    run_main(main)
