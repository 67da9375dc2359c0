"""lab/: nothing is begun as shipped, right answers are green, mistakes are caught."""

import ast
import re
import textwrap

import pytest

from common import ROOT
from lab.__main__ import FILES, run_checks, state_of
from lab.checks import CHECKS, PLACES
from lab_solutions import RIGHT, WRONG

HOLE = re.compile(r'^( *)raise NotImplementedError.*\n', re.MULTILINE)


def answered(folder, name, old='', new=''):
    """The exercise with the right answer in its holes, or with one in which old is new."""
    assert not old or sum(answer.count(old) for answer in RIGHT[name]) == 1, old
    source = (ROOT / 'lab' / f'{name}.py').read_text()
    assert len(HOLE.findall(source)) == len(RIGHT[name])
    answers = (answer.replace(old, new) if old else answer for answer in RIGHT[name])
    path = folder / f'{name}.py'
    path.write_text(HOLE.sub(lambda hole: textwrap.indent(next(answers).lstrip(), hole[1]), source))
    return path


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_as_shipped_nothing_is_begun(path):
    assert state_of(run_checks(path)) == 'not begun'


@pytest.mark.parametrize('name', CHECKS)
def test_a_right_answer_is_green(name, tmp_path):
    results = run_checks(answered(tmp_path, name))
    assert state_of(results) == 'green', results


@pytest.mark.parametrize('name, mistake, old, new, check', WRONG,
                         ids=[' '.join(row[:2]) for row in WRONG])
def test_a_mistake_is_caught(name, mistake, old, new, check, tmp_path):
    results = run_checks(answered(tmp_path, name, old, new))
    failed = [function.__name__ for function, (verdict, _, _) in zip(CHECKS[name], results)
              if verdict == 'wrong']
    assert failed and failed[0] == check, results


def test_an_error_names_its_line(tmp_path):
    source = (ROOT / 'lab' / 'ex3_dispatch.py').read_text()
    path = tmp_path / 'ex3_dispatch.py'
    for answer, message in (('return x_ND.softmaxx()', 'AttributeError'),
                            ('return (x_ND', 'SyntaxError')):
        path.write_text(HOLE.sub(f'    {answer}\n', source))
        assert all(text.startswith(f'line 27: {message}') for _, _, text in run_checks(path))


def test_the_command(run):
    assert '0 of 8 are green' in run('lab.__main__', here=True, code=1).stdout
    for args in (['--hint', 3], [3, '--hint']):
        assert 'index_add_' in run('lab.__main__', *args, here=True).stdout
    assert 'needs the number' in run('lab.__main__', '--hint', code=2).stderr
    assert 'not between 1 and 8' in run('lab.__main__', 9, code=2).stderr


@pytest.mark.parametrize('name', CHECKS)
def test_the_project_has_the_answer_where_the_lab_says(name):
    for place in PLACES[name].split('; '):
        file, names = place.split(', ')
        node = ast.parse((ROOT / file).read_text())
        for part in names.split('.'):
            node, = [child for child in node.body if getattr(child, 'name', None) == part]
