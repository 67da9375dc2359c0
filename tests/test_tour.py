"""docs/tour.md, and the notebook made from it: every command and every number of the page, and the
notebook's cells, are one and the same. The glossary."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT
from test_results import split_page
from test_style import MODELS

sys.path.insert(0, str(ROOT / 'notebooks'))
import build

PARTS = build.split(build.PAGE.read_text(encoding='utf-8'))
NUMBER = re.compile(r'[-+]?\d[\d,]*(?:\.\d+)?')


def agrees(shown, printed):
    """Words and whole numbers are the same; numbers with a decimal point are within 0.1 or 5%. The
    line may go on behind what the page shows."""
    words = [' '.join(NUMBER.sub(' # ', line).split()) for line in (shown, printed)]
    if not words[1].startswith(words[0]):
        return False
    for mine, its in zip(NUMBER.findall(shown), NUMBER.findall(printed)):
        a, b = [float(number.replace(',', '')) for number in (mine, its)]
        if abs(a - b) > ('.' in mine) * max(0.1, 0.05 * abs(a)):
            return False
    return True


def missing(shown, output):
    """The first line of the page that the output lacks; lines come in the same order."""
    lines = iter(output.splitlines())
    for line in shown.splitlines():
        if not any(agrees(line, printed) for printed in lines):
            return line


def as_script(cells):
    """A Python script that does what Jupyter does with the code cells, and prints a line after each."""
    lines = ['import subprocess']
    for source in cells:
        if source.startswith('%%bash -e\n'):
            commands = source.partition('\n')[2]
            source = f"subprocess.run(['bash', '-e'], input={commands!r}, text=True, check=True)"
        lines += [source, "print('end of cell')"]
    return '\n'.join(lines)


def run_page(data_dir, tmp_path):
    """-> what each of the notebook's cells prints, in a copy of the project."""
    for path in ROOT.glob('*.py'):
        shutil.copy(path, tmp_path)
    for name in ('config', 'plumbing', 'tools'):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / 'data').symlink_to(data_dir)

    env = dict(OMP_NUM_THREADS='1', MPLBACKEND='Agg', CUDA_VISIBLE_DEVICES='')   # as the page: on a CPU
    here = dict(cwd=tmp_path, env=dict(os.environ, **env), text=True)
    short = ('--max_iters=2', '--eval_tokens=64', '--sample_tokens=2')       # what takes minutes: two steps
    long = [subprocess.Popen([sys.executable, *text.split()[1:], *short], stdout=subprocess.PIPE, **here)
            for kind, text in PARTS if kind == 'sh minutes']
    cells = json.loads(build.NOTEBOOK.read_text(encoding='utf-8'))['cells']
    codes = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
    done = subprocess.run([sys.executable, '-u', '-'], input=as_script(codes), capture_output=True, **here)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(long) == 1 and 'step      2' in long[0].communicate()[0]
    return done.stdout.split('end of cell\n')[:-1]


@pytest.mark.slow
def test_the_page_runs_and_prints_what_it_shows(tour):
    """The notebook's cells. (That they are the page's is another test.)"""
    _, *outputs = tour.result()
    at = -1
    for kind, text in PARTS:
        if kind in ('sh', 'python'):
            at += 1
        elif kind == 'text':
            lacks = missing(text, outputs[at])
            assert lacks is None, f'the page shows\n{lacks}\nthe block before it printed\n{outputs[at]}'
    assert at == len(outputs) - 1


def test_what_the_page_shows_is_compared():
    assert agrees('loss 4.18 of 100', 'loss   4.2199 of 100')
    assert agrees('step 0: loss 7.57', 'step      0: loss 7.5725, perplexity 1943.99')
    assert not agrees('loss 4.18 of 100', 'loss 4.18 of 101')
    assert not agrees('loss 4.18', 'loss 4.40')
    assert not agrees('loss 0.10', 'loss -0.04')
    assert not agrees('loss 4.18', 'val loss 4.18')
    assert missing('a 1\nb 2', 'a 1\nc 3\nb 2') is None
    assert missing('b 2\na 1', 'a 1\nb 2') == 'a 1'


def test_the_notebook_is_made_from_the_page():
    """With outputs, and small enough to be read on the web. To repair: see notebooks/build.py."""
    assert build.NOTEBOOK.stat().st_size < 300_000
    cells = json.loads(build.NOTEBOOK.read_text(encoding='utf-8'))['cells']
    found = [(cell['cell_type'], ''.join(cell['source'])) for cell in cells]
    assert found == build.cells(build.PAGE.read_text(encoding='utf-8'))
    for link in re.findall(r'\]\(([^)#:]+)', ''.join(source for kind, source in found if kind == 'markdown')):
        assert (build.HERE / link).exists(), link
    outputs = [output for cell in cells for output in cell.get('outputs', [])]
    kinds = [output['output_type'] for output in outputs]
    assert 'error' not in kinds and 'display_data' in kinds      # the picture
    assert len(kinds) >= len([kind for kind, _ in PARTS if kind == 'text'])


def set_up(folder, repository=''):
    """The first code cell in a folder, and what stands after it."""
    code = build.SETUP.replace("REPOSITORY = ''", f'REPOSITORY = {str(repository)!r}') + 'print(os.getcwd())'
    return subprocess.run([sys.executable, '-'], input=code, cwd=folder, capture_output=True, text=True)


def test_the_notebook_finds_the_project(tmp_path):
    assert set_up(ROOT / 'notebooks').stdout == f'{ROOT}\n'
    assert 'set REPOSITORY' in set_up(tmp_path).stderr


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which('git'), reason='needs git')
def test_the_notebook_clones_and_installs(tmp_path):
    origin = tmp_path / 'origin'
    origin.mkdir()
    for name in ('train.py', 'requirements.txt'):
        (origin / name).touch()
    who = ('-c', 'user.name=x', '-c', 'user.email=x@example.org')
    for command in (['init', '-q'], ['add', '.'], [*who, 'commit', '-q', '-m', 'x']):
        subprocess.run(['git', *command], cwd=origin, check=True)
    for repository in (origin, ''):                      # the second time it is there
        assert set_up(tmp_path, repository).stdout.endswith(f"{tmp_path / 'nanopaths'}\n")


def test_glossary():
    """Two dozen words in the order of the alphabet, each described; all models' pages lead to it."""
    page = ROOT / 'docs' / 'glossary.md'
    prose, _ = split_page(page)
    words = re.findall(r'^\*\*(.+?)\*\*', '\n'.join(line for _, line in prose), re.MULTILINE)
    assert len(words) >= 24 and words == sorted(words, key=str.lower)
    for name in MODELS:
        head = (ROOT / 'docs' / f'{name}.md').read_text(encoding='utf-8').partition('\n## ')[0]
        assert '(glossary.md)' in head, name
