"""docs/tour.md: every command of the page runs, and prints what the page shows."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

PAGE = (ROOT / 'docs' / 'tour.md').read_text(encoding='utf-8')
NUMBER = re.compile(r'[-+]?\d[\d,]*(?:\.\d+)?')


def agrees(shown, printed):
    """The same words and whole numbers; numbers with a decimal point within 0.1 or 5%. The line may
    go on behind what the page shows."""
    words = [' '.join(NUMBER.sub(' # ', line).split()) for line in (shown, printed)]
    if not words[1].startswith(words[0]):
        return False
    for text, other in zip(NUMBER.findall(shown), NUMBER.findall(printed)):
        a, b = [float(number.replace(',', '')) for number in (text, other)]
        if abs(a - b) > ('.' in text) * max(0.1, 0.05 * abs(a)):
            return False
    return True


def copy_project(folder):
    for path in ROOT.glob('*.py'):
        shutil.copy(path, folder)
    for name in ('arena', 'config', 'plumbing', 'tools'):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns('__pycache__'))


@pytest.mark.slow
def test_the_page_runs_and_prints_what_it_shows(data_dir, tmp_path):
    copy_project(tmp_path)
    (tmp_path / 'data').symlink_to(data_dir)
    blocks = re.findall(r'^```(sh|python|text)\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
    script, shown = ['import subprocess'], []            # one Python session runs all blocks
    for kind, text in blocks:
        if kind == 'text':
            shown[-1] = text
            continue
        if kind == 'sh':
            text = f"subprocess.run(['bash', '-e'], input={text!r}, text=True, check=True)"
        script += [text, "print('end of block', flush=True)"]
        shown.append('')

    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ['PATH']])
    env = dict(os.environ, PATH=path, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    done = subprocess.run([sys.executable, '-u', '-'], input='\n'.join(script), text=True,
                          cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for text, output in zip(shown, done.stdout.split('end of block\n')):
        lines = iter(output.splitlines())
        for line in text.splitlines():                   # in the same order
            assert any(agrees(line, printed) for printed in lines), f'{line}\nis not in\n{output}'


def test_agrees():
    assert agrees('step 0: loss 7.57', 'step      0: loss 7.5725, perplexity 1943.99')
    assert not agrees('loss 4.18 of 100', 'loss 4.18 of 101')
    assert not agrees('loss 4.18', 'loss 4.40')
