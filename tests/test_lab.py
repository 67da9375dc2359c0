"""lab/: nothing is begun as shipped, right answers are green, and a wrong one is told what to look at."""

import ast
import re
import shutil
import sys
import textwrap

import pytest

from conftest import ROOT
from lab.__main__ import FILES, checks_of, run_checks, show, state_of
from lab_solutions import ALSO_RIGHT, RIGHT, WRONG
from test_style import imports

NAMES = [path.stem for path in FILES.values()]
HOLE = re.compile(r'^( *)raise NotImplementedError.*\n', re.MULTILINE)


def answered(name, old='', new=''):
    """The shipped exercise with the right answer in its holes, or with one in which old is new."""
    assert not old or sum(answer.count(old) for answer in RIGHT[name]) == 1, old
    source = (ROOT / 'lab' / f'{name}.py').read_text()
    holes = len(HOLE.findall(source))
    assert holes == len(RIGHT[name]), f'it is not as shipped: git checkout lab/{name}.py'
    answers = (answer.replace(old, new) if old else answer for answer in RIGHT[name])
    return HOLE.sub(lambda hole: textwrap.indent(next(answers).lstrip(), hole[1]), source)


def check(folder, name, source):
    """-> green, red or not begun; the checks that fail; what they say"""
    path = folder / f'{name}.py'
    path.write_text(source)
    found = run_checks(path)
    failed = [(check.__name__, text) for verdict, check, text in found if verdict != 'ok']
    return state_of(found), [name for name, _ in failed], [text for _, text in failed]


# ---- Exercises ----------------------------------------------------------------------------------


def test_nothing_is_begun_as_shipped(run):
    said = run('lab.__main__', here=True, code=1).stdout
    assert re.findall(r'^not begun  (\d)\. ', said, re.MULTILINE) == list('12345678'), said
    assert '0 of 8 are green' in said and 'Next: lab/ex1_top_k.py' in said
    assert not re.search(r'moep|papaformer|moduleformer|selfmoe|lora', said)     # where the answers are


@pytest.mark.parametrize('name', NAMES)
def test_a_right_answer_is_green(name, tmp_path):
    assert check(tmp_path, name, answered(name)) == ('green', [], [])


@pytest.mark.parametrize('name, old, new', ALSO_RIGHT)
def test_another_right_answer_is_green(name, old, new, tmp_path):
    assert check(tmp_path, name, answered(name, old, new)) == ('green', [], [])


@pytest.mark.parametrize('name, _, old, new, checks, words', WRONG, ids=[' '.join(row[:2]) for row in WRONG])
def test_a_wrong_answer_is_told_what_to_look_at(name, _, old, new, checks, words, tmp_path):
    state, failed, messages = check(tmp_path, name, answered(name, old, new))
    assert (state, failed) == ('red', checks), messages
    assert words in messages[0] and '\n' not in messages[0]
    assert all(len(message) < 300 for message in messages), messages     # not cut off


def test_no_underflow_is_blamed_for_a_finite_number(tmp_path):
    source = answered('ex5_stick', 'return z_TT + log_rest', 'return F.logsigmoid(z_TT) + log_rest')
    said = ' '.join(check(tmp_path, 'ex5_stick', source)[2])
    assert 'the sum of 500 logarithms' in said and 'underflows' not in said and 'F.logsigmoid' not in said


def test_every_check_finds_a_mistake():
    for path in FILES.values():
        found = {check for name, _, _, _, checks, _ in WRONG if name == path.stem for check in checks}
        assert found == {check.__name__ for check in checks_of(path).CHECKS}, path.stem
        assert sum(name == path.stem for name, *_ in WRONG) >= 2


@pytest.mark.parametrize('answer, words', [
    ('return score_NE.softmax(-1', "SyntaxError: '(' was never closed"),
    ('return score_NE.softmaxx(-1)', 'AttributeError'),
    ('return score_NE.softmax(-1)', '2 results are asked for, not 1'),
    ('return score_NE, k', 'a result has the shape (3, 5), not (3, 3)'),
    ('pass', 'the function returns None: is a return missing?'),
    ('return top_k_gates(score_NE, k)', 'RecursionError'),
    ('assert k == 0', 'AssertionError'),
    ('sys.exit()', "NameError: name 'sys' is not defined"),
    ('raise SystemExit(0)', 'SystemExit: 0'),
    ('raise NotImplementedError("no kernel")', 'NotImplementedError: no kernel')])
def test_whatever_an_answer_does_is_one_line(answer, words, tmp_path):
    source = (ROOT / 'lab' / 'ex1_top_k.py').read_text()
    source = HOLE.sub(lambda hole: f'{hole[1]}{answer}\n', source, count=1)
    state, _, messages = check(tmp_path, 'ex1_top_k', source)
    assert state == 'red' and words in messages[0] and '\n' not in messages[0]
    if 'result' not in words and 'return' not in words:  # an error in the answer has its line number
        line = source[:source.index(f' {answer}')].count('\n') + 1
        assert f'line {line}: ' in messages[0]


def test_one_hole_of_two(tmp_path, capsys):
    source = (ROOT / 'lab' / 'ex4_gumbel.py').read_text()
    source = HOLE.sub('    return -(-u.log()).log()\n', source, count=1)
    state, failed, messages = check(tmp_path, 'ex4_gumbel', source)
    assert state == 'red' and 'noise_is_gumbel' not in failed and messages[0].endswith(': not written yet')
    show(tmp_path / 'ex4_gumbel.py', details=True)
    assert re.search(r'not yet +in training the weights are one-hot', capsys.readouterr().out)


# ---- The command --------------------------------------------------------------------------------


def test_all_green(run, tmp_path):
    shutil.copytree(ROOT / 'lab', tmp_path / 'lab', ignore=shutil.ignore_patterns('__pycache__'))
    for name in NAMES:
        (tmp_path / 'lab' / f'{name}.py').write_text(answered(name))
    (tmp_path / 'lab' / 'ex3_dispatch_old.py').write_text('a copy that does not matter')
    said = run('lab', cwd=tmp_path).stdout
    assert said.count('green      ') == 8 and '8 of 8 are green.' in said
    for path in FILES.values():
        assert f"In the repository's root: {'; '.join(checks_of(path).PLACES)}\n" in said


def test_one_exercise_in_detail(tmp_path, capsys):
    path = tmp_path / 'ex3_dispatch.py'
    path.write_text(answered('ex3_dispatch', 'gate_NK[token, k, None] * expert', 'expert'))
    assert not show(path, details=True)
    said = capsys.readouterr().out
    assert re.match(r'red +3\. Sparse dispatch', said) and 'moep.py' not in said
    assert re.search(r'ok +an expert is called at most once', said)
    assert re.search(r'wrong +at K = 1 with other gates.*\n +with a gate of 0\.', said)
    assert said.count('the example gives') == 1          # an error is told once
    assert re.search(r'wrong +it also works if no token chose some expert\n +the same error\n', said)


@pytest.mark.parametrize('number', FILES)
def test_a_hint(number, run):
    hint = run('lab.__main__', '--hint', number, here=True).stdout
    assert len(hint) > 100 and hint.strip() == checks_of(FILES[number]).HINT.strip()


@pytest.mark.parametrize('args', [['9'], ['0'], ['--hint', '9'], ['--hint', '0'], ['three'], ['--hint']])
def test_there_is_no_such_exercise(args, run):
    said = run('lab.__main__', *args, code=2).stderr
    assert said.count('\n') == 1 and ('they are 1 to 8' in said or 'see --help' in said)


# ---- The files ----------------------------------------------------------------------------------


def test_the_lab_imports_no_answer():
    for path in (ROOT / 'lab').rglob('*.py'):
        for module in imports(path) - {'plumbing.cli'}:
            root = module.split('.')[0]
            allowed = root in ('torch', 'lab') or root in sys.stdlib_module_names
            assert allowed or module.startswith('plumbing.cli.'), f'{path} imports {module}'


def test_the_readme_has_the_titles():
    text = (ROOT / 'lab' / 'README.md').read_text().lower()
    for number, path in FILES.items():
        title = path.read_text().partition('\n')[0].removeprefix(f'"""{number}. ').lower()
        assert f'| {number} | [{title}]({path.name}) |' in text


def test_an_exercise_is_short():
    for path in FILES.values():
        source = path.read_text()
        assert 1 <= len(HOLE.findall(source)) <= 4 and source.count('\n') <= 90
        assert all(1 <= answer.strip().count('\n') + 1 <= 15 for answer in RIGHT[path.stem])


@pytest.mark.parametrize('name', NAMES)
def test_the_project_has_the_answer_where_the_lab_says(name):
    for place in checks_of(FILES[NAMES.index(name) + 1]).PLACES:
        file, names = place.split(', ')
        node = ast.parse((ROOT / file).read_text())
        for part in names.split('.'):
            node, = [child for child in node.body if getattr(child, 'name', None) == part]
