"""The heart alone, in an empty folder: without tools, arena, papers, lab and docs it trains,
samples, scores, and its own tests pass."""

import os
import shutil
import subprocess
import sys

import pytest

from common import ROOT

FOLDERS = ['config', 'plumbing', 'tests']
FILES = ['README.md', 'pyproject.toml', 'requirements.txt']


@pytest.fixture(scope='module')
def heart(data_dir, tmp_path_factory):
    """heart('train.py', ...) runs a script of the copy -> what it prints"""
    home = tmp_path_factory.mktemp('heart')
    for name in FOLDERS:
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns('__pycache__'))
    for path in [*ROOT.glob('*.py'), *(ROOT / name for name in FILES)]:
        shutil.copy(path, home)
    (home / 'data').symlink_to(data_dir)
    env = {**os.environ, 'OMP_NUM_THREADS': '1'}
    env.pop('PYTHONPATH', None)                          # or it would find the rooms

    def run(*words):
        done = subprocess.run([sys.executable, *words], cwd=home, env=env, text=True,
                              capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
    return run


@pytest.mark.slow
def test_it_trains_samples_and_scores(heart):
    assert 'saved' in heart('train.py', 'config/moep.py', '--max_iters=5', '--eval_tokens=256')
    assert heart('sample.py', 'out/moep', '--prompt=The girl', '--max_new_tokens=5')
    assert '3,400 pairs' in heart('eval_blimp.py', 'out/moep')


@pytest.mark.slow
def test_its_tests_are_its_own(heart):
    """None needs a room to be read; some, that take seconds, are run."""
    some = 'test_moep or test_style'
    assert ' passed' in heart('-m', 'pytest', '-q', '-m', 'not slow', '-k', some)
