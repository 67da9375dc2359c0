"""Tests run from anywhere: the repository's root goes onto the path, and small runs stay single-threaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


@pytest.fixture(scope='session')
def run():
    """Run a script of the repository as a user would; one thread, so that two runs give the same bits."""
    def run(*args, cwd=ROOT, code=0, **env):
        command = [sys.executable, str(ROOT / args[0]), *map(str, args[1:])]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True,
                              env={**os.environ, 'OMP_NUM_THREADS': '1', **env})
        assert done.returncode == code, f'{args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}'
        return done
    return run


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    """The toy corpora, made once per session."""
    import prepare
    folder = tmp_path_factory.mktemp('data')
    prepare.make_toy(folder)
    return folder
