"""What the tests of all folders share. They run from anywhere: the repository's root goes onto the
path. One thread, so that two runs give the same bits."""

import ast
import contextlib
import functools
import importlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


def run_here(module, argv, cwd):
    """A script in this process, from sys.argv to its exit code: ten times faster than a new one."""
    from plumbing.cli import run_main
    out, err = (io.TextIOWrapper(io.BytesIO(), 'utf-8', write_through=True) for _ in range(2))
    names = [name for name in ('SIGINT', 'SIGTERM', 'SIGHUP') if hasattr(signal, name)]
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in names}
    with mock.patch.object(sys, 'argv', argv), contextlib.chdir(cwd), \
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_main(importlib.import_module(module).main)
            code = 0
        except SystemExit as stop:
            code = stop.code
    for name, handler in handlers.items():               # train.py catches signals
        signal.signal(getattr(signal, name), handler)
    stdout, stderr = (stream.buffer.getvalue().decode() for stream in (out, err))
    return SimpleNamespace(returncode=code or 0, stdout=stdout, stderr=stderr)


def run_script(name, *args, cwd=ROOT, code=0, here=None, **env):
    """Run a script ('train.py') or a module ('tools.bench', as python -m tools.bench) as a user
    would. What is meant to fail (code=2), or asked for by here=True, runs in this process."""
    module = name.removesuffix('.py')
    args = list(map(str, args))
    if here is None:
        here = code == 2 and not env
    if here:
        done = run_here(module, [str(ROOT / f"{module.replace('.', '/')}.py"), *args], cwd)
    else:
        start = [str(ROOT / name)] if name.endswith('.py') else ['-m', name]
        paths = [str(ROOT), env.pop('PYTHONPATH', ''), os.environ.get('PYTHONPATH', '')]
        env['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
        env = {**os.environ, 'OMP_NUM_THREADS': '1', **env}
        command = [sys.executable, *start, *args]
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    output = f'{done.stdout}\n{done.stderr}'
    assert done.returncode == code, f'{name} {args}: exit {done.returncode}\n{output}'
    return done


@pytest.fixture(scope='session')
def run():
    return run_script


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    """The toy corpora, made once per session. A test that changes something takes a copy."""
    import prepare
    folder = tmp_path_factory.mktemp('data')
    prepare.make_toys(root=folder)
    return folder


def first_commands(config):
    """The mixes, surgeries and runs of others that a config's docstring asks for, as words."""
    module = ast.parse((ROOT / config).read_text(encoding='utf-8'))
    doc = ast.get_docstring(module, clean=False)
    lines = re.findall('^    python (.*)', doc.replace('\\\n', ' '), re.MULTILINE)
    commands = [line.removeprefix('-m ').split() for line in lines]
    return [words for words in commands if words[:2] == ['prepare.py', 'mix']
            or words[0] == 'tools.surgery' and '--out' in words
            or words[0] == 'train.py' and words[1] != config]


@pytest.fixture(scope='session')
def smoke(data_dir, tmp_path_factory):
    """smoke('config/moep.py', '--top_k=1') trains a config for two steps, after the commands of its
    docstring and the runs that these and init_from name -> its run folder. Each only once per
    session."""
    from plumbing.settings import read_config
    folder = tmp_path_factory.mktemp('smoke')
    (folder / 'data').mkdir()                            # for mixes, beside the toy corpora
    for path in data_dir.iterdir():
        (folder / 'data' / path.name).symlink_to(path)

    @functools.cache
    def call(*words):
        for config in [word.replace('out/', 'config/') + '.py' for word in words]:
            if config.startswith('config/') and (ROOT / config).exists():
                train(config)
        if words[0].startswith('tools.'):
            pytest.importorskip(words[0])                # a room that may be taken away
        if len(words) > 1:
            with torch.enable_grad():                    # a test may be under no_grad
                run_script(*words, cwd=folder, here=True)

    @functools.cache
    def train(config, *settings):
        for words in first_commands(config):
            if words[0] == 'train.py':
                train(*words[1:])
            else:
                call(*words)
        call(read_config(ROOT / config).get('init_from', ''))
        out = folder / config.replace('config', 'out', 1).removesuffix('.py')
        if settings:
            out = tmp_path_factory.mktemp(out.name)
        call('train.py', str(ROOT / config), f'--data_dir={folder}/data', '--max_iters=2',
             '--batch_size=1', '--gradient_accumulation_steps=1', '--eval_tokens=64',
             '--sample_tokens=2', '--log_interval=1', f'--out_dir={out}', *settings)
        return out
    return train


@pytest.fixture
def compile_model():
    """torch.compile without what it remembers of other tests: for sizes that change it takes far
    longer."""
    torch.compiler.reset()
    return torch.compile


def documents(folder, split):
    """The texts of a bin, cut at end-of-text."""
    from plumbing.bins import load_bin
    from plumbing.tokenizer import load_tokenizer
    tokenizer = load_tokenizer(folder)
    ids = [i for i in load_bin(folder, split).tolist() if i != tokenizer.pad]
    assert ids[0] == ids[-1] == tokenizer.eot
    texts = []
    text = []
    for i in ids[1:]:
        if i == tokenizer.eot:
            texts.append(tokenizer.decode(text))
            text = []
        else:
            text.append(i)
    return texts
