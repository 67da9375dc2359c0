"""docs/tour.md: every command of the page runs, and prints what the page shows. Runs are shorter
and fewer than on the page, so numbers that come from them are not compared."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from common import ROOT

PAGE = (ROOT / 'docs' / 'tour.md').read_text(encoding='utf-8')
NUMBER = re.compile(r'[-+]?\d[\d,]*(?:\.\d+)?')
SHORTER = [('max_iters = 80\n', 'max_iters = 4\n')]
UNTRAINED = ('show(',)     # Python blocks that read no run


def agrees(shown, printed, compare_numbers=True):
    """The same words and whole numbers; numbers with a decimal point within 0.1 or 5%. The line may
    go on behind what the page shows."""
    words = [' '.join(NUMBER.sub(' # ', line).split()) for line in (shown, printed)]
    if not compare_numbers:
        return words[1].startswith(words[0].removesuffix(' True'))
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
    page = PAGE
    for text, shorter in SHORTER:
        assert text in page
        page = page.replace(text, shorter)
    blocks = re.findall(r'^```(sh|python|text)\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    script, shown = ['import subprocess'], []            # one Python session runs all blocks
    for kind, text in blocks:
        if kind == 'text':
            shown[-1] = text, any(name in script[-2] for name in UNTRAINED)
            continue
        if kind == 'sh':
            text = f"subprocess.run(['bash', '-e'], input={text!r}, text=True, check=True)"
        script += [text, "print('end of block', flush=True)"]
        shown.append(('', False))

    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ['PATH']])
    env = dict(os.environ, PATH=path, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    done = subprocess.run([sys.executable, '-u', '-'], input='\n'.join(script), text=True,
                          cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for (text, compare_numbers), output in zip(shown, done.stdout.split('end of block\n')):
        lines = iter(output.splitlines())
        for line in text.splitlines():                   # in the same order
            is_printed = any(agrees(line, printed, compare_numbers) for printed in lines)
            assert is_printed, f'{line}\nis not in\n{output}'
