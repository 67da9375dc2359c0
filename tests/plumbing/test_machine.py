"""Precision, and Replay's bookkeeping with a recorder in place of CUDA's (test_gpu.py has the real one)."""

import contextlib
import errno
import sys
import types

import pytest
import torch
from tqdm import tqdm

from plumbing.cli import UserError
from plumbing.machine import Machine, Replay, find_device


def test_precision():
    x = torch.ones(2, 2)
    for dtype, expected in dict(auto=torch.float32, float32=torch.float32, bfloat16=torch.bfloat16).items():
        machine = Machine('cpu', dtype)
        with machine.autocast():
            assert machine.dtype == (x @ x).dtype == expected
    with pytest.raises(UserError, match="dtype is 'float16'; it can be auto, bfloat16 or float32"):
        Machine('cpu', 'float16')


def test_a_device_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setenv('LOCAL_RANK', '99')               # more processes than GPUs
    with pytest.raises(UserError, match=r'device cuda:99 does not work \(.+\); see --device'):
        Machine('auto')


def test_only_the_first_process_speaks(capsys):
    for rank in (0, 1):
        Machine.say(types.SimpleNamespace(rank=rank), f'from {rank}')
    assert capsys.readouterr().out == 'from 0\n'


@pytest.mark.parametrize('number, passes', [(errno.EIO, True), (errno.EPIPE, False)])
def test_what_cannot_be_printed(monkeypatch, number, passes):
    """A terminal that was closed stops nobody from saving; a reader that went away ends the script."""
    def write(text):
        raise OSError(number, 'closed')
    monkeypatch.setattr(tqdm, 'write', write)
    with contextlib.nullcontext() if passes else pytest.raises(BrokenPipeError):
        Machine.say(types.SimpleNamespace(rank=0), 'text')


def test_all_processes_fail_and_the_first_says_why():
    with pytest.raises(UserError, match='the disk is full'):
        Machine.fail_all(types.SimpleNamespace(rank=0), 'the disk is full')
    with pytest.raises(SystemExit, match='2'):
        Machine.fail_all(types.SimpleNamespace(rank=1), 'the disk is full')


def test_memory_is_in_bytes():
    assert Machine('cpu').memory() > 2 ** 28


def test_an_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, '__version__', torch.torch_version.TorchVersion('2.9.1'))
    with pytest.raises(UserError, match='torch>=2.10 .+; torch is 2.9.1'):
        Machine('cpu')


def test_an_old_python_is_refused(monkeypatch):
    """It would train, and call every checkpoint truncated."""
    monkeypatch.setattr(sys, 'version_info', (3, 10, 12))
    with pytest.raises(UserError, match='Python>=3.11 are needed'):
        Machine('cpu')


def test_several_processes_on_a_mac(monkeypatch):
    """They add up on the CPU: gloo knows no other device there."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: True)
    monkeypatch.setenv('RANK', '0')
    assert find_device('auto').type == 'cpu'


class FakeGraph:
    """Runs the step in 'replay' and not in recording, on the tensors that it was recorded with."""
    pools, recording = [], None

    def pool(self):
        return 'pool'

    def replay(self):
        self.step()


@pytest.fixture
def cuda(monkeypatch):
    @contextlib.contextmanager
    def graph(graph, pool, stream):
        FakeGraph.pools.append(pool)
        FakeGraph.recording = graph
        try:
            yield
        finally:
            FakeGraph.recording = None
    FakeGraph.pools, FakeGraph.recording = [], None
    generator = types.SimpleNamespace(graphsafe_set_state=lambda state: None)
    fakes = dict(CUDAGraph=FakeGraph, graph=graph, current_stream=lambda: None,
                 default_generators=[generator],
                 get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state)
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    new = types.SimpleNamespace(graphsafe_get_state=lambda: None)
    monkeypatch.setattr(torch, 'Generator', lambda device: new)
    return types.SimpleNamespace(device=torch.device('cpu'), cuda=True, world=1)


def counted(calls, error=None):
    """A step that adds its input up; in recording it only notes what a replay shall do."""
    total, result = torch.zeros(()), torch.zeros(())

    def work(x):
        result.copy_(total.add_(x.sum()))

    def step(x):
        calls.append(x)
        if FakeGraph.recording is None:
            work(x)
        elif error:
            torch.rand(3)                                # a failed recording used random numbers
            raise error
        else:
            FakeGraph.recording.step = lambda: work(x)
        return result
    return step


def test_replay_counts_shapes_copies_inputs_and_shares_memory(cuda):
    calls, given, sums, total = [], [], [], 0
    replay = Replay(counted(calls), cuda)
    for it in range(14):
        given.append(torch.full((2 + it % 2,), float(it)))
        total += given[-1].sum().item()
        sums.append((replay(given[-1]).item(), total))
    assert all(a == b for a, b in sums)
    assert all((x == it).all() for it, x in enumerate(given)), 'what is handed in is left alone'
    assert len(calls) == 2 * 4                           # of both shapes three plain calls and one recording
    assert FakeGraph.pools == [None, 'pool']


@pytest.mark.parametrize('changes', [dict(cuda=False), dict(world=2), dict(wanted=False)])
def test_replay_is_plain_where_no_graph_is_possible(cuda, changes):
    calls, wanted = [], changes.pop('wanted', True)
    replay = Replay(counted(calls), types.SimpleNamespace(**{**vars(cuda), **changes}), wanted)
    assert [replay(torch.ones(2)).item() for _ in range(9)] == [2 * i for i in range(1, 10)]
    assert len(calls) == 9 and FakeGraph.pools == []


@pytest.mark.parametrize('reason', ['waits for the device', ''])
def test_replay_goes_on_after_a_failed_recording(cuda, capsys, reason):
    calls = []
    replay = Replay(counted(calls, RuntimeError(reason)), cuda)
    torch.manual_seed(0)
    want = torch.get_rng_state()
    assert [replay(torch.ones(2)).item() for _ in range(9)] == [2 * i for i in range(1, 10)]
    assert len(calls) == 10 and torch.equal(torch.get_rng_state(), want)
    assert capsys.readouterr().out.count(f'plain steps instead ({reason})') == 1
