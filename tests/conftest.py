"""Tests run from anywhere: the repository's root goes onto the path, and small runs stay single-threaded."""

import contextlib
import importlib
import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, wait as wait_for
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


def run_here(module, argv, cwd):
    """A script in this process, from sys.argv to its exit code: much can be tried without starting Python."""
    from plumbing.cli import run_main
    out, err = (io.TextIOWrapper(io.BytesIO(), 'utf-8', write_through=True) for _ in range(2))
    numbers = [getattr(signal, name) for name in ('SIGINT', 'SIGTERM', 'SIGHUP') if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    with mock.patch.object(sys, 'argv', argv), contextlib.chdir(cwd), \
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_main(importlib.import_module(module).main)
            code = 0
        except SystemExit as stop:
            code = stop.code
    for number, handler in handlers.items():             # train.py catches signals
        signal.signal(number, handler)
    said = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return SimpleNamespace(returncode=code or 0, stdout=said[0], stderr=said[1])


def run_script(name, *args, cwd=ROOT, code=0, here=None, **env):
    """Run a script ('train.py') or a tool ('tools.bench', as python -m tools.bench) as a user would; one
    thread, so that two runs give the same bits. What is meant to fail (code=2), and what a test asks for by
    here=True, runs in this process, which is ten times faster; a run that names an env gets a process."""
    module = name.removesuffix('.py')
    script = str(ROOT / f"{module.replace('.', '/')}.py")
    args = list(map(str, args))
    if here is None:
        here = code == 2 and not env
    if here:
        done = run_here(module, [script, *args], cwd)
    else:
        start = [script] if name.endswith('.py') else ['-m', name]
        paths = [str(ROOT), env.pop('PYTHONPATH', ''), os.environ.get('PYTHONPATH', '')]
        env['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
        done = subprocess.run([sys.executable, *start, *args], cwd=cwd, capture_output=True, text=True,
                              env={**os.environ, 'OMP_NUM_THREADS': '1', **env})
    assert done.returncode == code, f'{name} {args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}'
    return done


@pytest.fixture(scope='session')
def run():
    return run_script


FORKS = multiprocessing.get_context('forkserver')


def train_in_fork(args, output, env):
    import train
    from plumbing.cli import run_main
    os.environ.update(env)
    sys.argv = ['train.py', *args]
    sys.stdout = sys.stderr = open(output, 'w')
    run_main(train.main)


@pytest.fixture(scope='session')
def fork():
    """Start train.py in a process of its own, which a test may kill. It is a fork of one that has imported
    torch, which saves seconds each time."""
    FORKS.set_forkserver_preload(['pytest', 'torch._dynamo', 'train'])
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        forkserver.ensure_running()

    def fork(*args, output=os.devnull, target=train_in_fork, **env):
        process = FORKS.Process(target=target, args=(list(map(str, args)), output, env))
        process.start()
        return process
    return fork


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    """The toy corpora, made once per session. A test that changes something takes a copy."""
    import prepare
    folder = tmp_path_factory.mktemp('data')
    prepare.make_toy(folder)
    return folder


@pytest.fixture(scope='session')
def beside():
    """A process for long work, one piece after the other, beside the tests: these keep one core busy."""
    with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


def train_smoke(config, folder, data_dir, keep):
    """Train a config for two steps -> its run folder, or None if it is too large to train."""
    out = folder / config.replace('config', 'out', 1).removesuffix('.py')
    data = ['--data=toy_stories', '--eval_data=None', '--seq_len=64'] if 'paper' in config else []
    if data and 'byte_limit' in (ROOT / config).read_text():
        data = ['--data=toy_bytes', '--byte_limit=8', '--block_size=576']
    args = [ROOT / config, *data, f'--data_dir={data_dir}']
    if 'molm' in config:                                 # billions of parameters: counted, not trained
        run_script('train.py', *args, '--max_iters=0', cwd=folder, here=True)
        return None
    run_script('train.py', *args, '--max_iters=2', '--batch_size=1', '--gradient_accumulation_steps=1',
               '--eval_tokens=64', '--sample_tokens=2', '--log_interval=1', cwd=folder, here=True)
    if not keep:
        (out / 'ckpt.pt').unlink()
    return out


@pytest.fixture(scope='session')
def smoke(beside, data_dir, tmp_path_factory):
    """Train a config for two steps and give its run folder, after those it starts from; each only once per
    session. config/*.py keep their own toy data; config/paper/*.py, their own architecture and optimiser, on
    windows of 64. Those who need not wait get a future."""
    from plumbing.settings import read_config
    folder = tmp_path_factory.mktemp('smoke')
    futures = {}

    def starts(config):
        runs = read_config(ROOT / config).get('init_from') or []
        runs = [runs] if isinstance(runs, str) else runs
        return [f"config/{run.removeprefix('out/')}.py" for run in runs]
    needed = {start for path in ROOT.glob('config/**/*.py') for start in starts(path)}

    def smoke(config, wait=True):
        for start in starts(config):
            smoke(start, wait=False)
        if config not in futures:
            keep = 'paper' not in config or config in needed     # others are hundreds of megabytes
            futures[config] = beside.submit(train_smoke, config, folder, data_dir, keep)
        return futures[config].result() if wait else futures[config]
    yield smoke
    for future in futures.values():
        future.cancel()
    wait_for(futures.values())
    shutil.rmtree(folder)


@pytest.fixture(scope='session')
def smokes(smoke, request):
    """{config: the future of its run folder} of all tests that ask for one by `config`. The toys come first:
    other tests wait for them."""
    items = [item for item in request.session.items if 'smokes' in item.fixturenames]
    configs = [item.callspec.params['config'] for item in items]
    return {config: smoke(config, wait=False) for config in sorted(configs, key=lambda c: 'paper' in c)}


@pytest.fixture(scope='session')
def tour(beside, data_dir, tmp_path_factory):
    """The future of what the tour's page prints."""
    from test_tour import run_page
    return beside.submit(run_page, data_dir, tmp_path_factory.mktemp('tour'))


@pytest.fixture(scope='session')
def sharded(beside, data_dir, tmp_path_factory):
    """A folder of runs that two processes make, and the future of what they print."""
    from test_shard import train_sharded
    folder = tmp_path_factory.mktemp('sharded')
    return folder, beside.submit(train_sharded, data_dir, folder)


@pytest.fixture(scope='session')
def fuzzed(beside, tmp_path_factory):
    """The future of 96 cases of fuzz.py."""
    folder = tmp_path_factory.mktemp('fuzz')
    return beside.submit(run_script, 'tests/fuzz.py', '--cases=96', '--seed=4', cwd=folder)


@pytest.fixture(scope='session')
def checked(beside):
    """{model and options: the future of what tools.check prints}"""
    names = ('moep', 'stlm --config config/stlm_bytes.py')
    return {name: beside.submit(run_script, 'tools.check', *name.split()) for name in names}


@pytest.fixture(scope='session')
def benched(beside):
    """The future of a table of tools.bench."""
    from test_bench import TINY
    return beside.submit(run_script, 'tools.bench', 'config/gpt2.py', *TINY)


BESIDE = ('smokes', 'tour', 'sharded', 'fuzzed', 'checked', 'benched')


def is_beside(item):
    return any(name in item.fixturenames for name in BESIDE)


def pytest_collection_modifyitems(items):
    """Tests that wait for work beside them come last."""
    items.sort(key=is_beside)


@pytest.fixture(scope='session', autouse=True)
def start_early(request):
    for name in BESIDE:
        if any(name in item.fixturenames for item in request.session.items):
            request.getfixturevalue(name)


@pytest.fixture
def terminal():
    """The handlers of signals as in a terminal, also if the tests run with nohup; afterwards as they were."""
    numbers = [signal.SIGINT, signal.SIGTERM, getattr(signal, 'SIGHUP', None) or pytest.skip('Windows')]
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def compile_model():
    """torch.compile without what it remembers of other tests: for sizes that change it takes far longer."""
    torch.compiler.reset()
    return torch.compile


def documents(folder, split):
    """The texts of a bin, cut at end-of-text."""
    from plumbing.data import load_bin
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
