"""A run's folder: what may be resumed, a log of whole lines, and files that are whole or not there."""

import contextlib
import dataclasses
import json
import os
from types import SimpleNamespace

import pytest
import torch

import moep
from plumbing.cli import UserError, lock
from plumbing.folder import RunFolder, check_resume, save_file
from plumbing.settings import Settings
from test_checkpoint import SMALL, state


@pytest.fixture
def said():
    return []


@pytest.fixture
def machine(said):
    return SimpleNamespace(rank=0, world=1, device=torch.device('cpu'), say=said.append,
                           gather=lambda item: [item])


# ---- Resuming -----------------------------------------------------------------------------------


def test_what_may_be_resumed(machine, said):
    def resume(ckpt, **changes):
        keys = changes.pop('keys', {})
        check_resume(ckpt, Settings(out_dir='out/x', **changes), keys, machine)
    same = state()
    same['settings']['out_dir'] = 'out/x'
    resume(same, resume=True)
    resume(same, keys=dict(n_embd=8))
    assert said == []
    resume(same, learning_rate=0.5)
    assert said == ['resume    learning_rate was 0.001, is now 0.5']
    for changes, message in [
            (dict(seed=7), 'was trained with seed = 42, not 7'),
            (dict(memory=16), 'was trained with memory = 0, not 16'),
            (dict(surgery='widen'), "was trained with surgery = None, not 'widen'"),
            (dict(surgery_args=dict(n=3)), "was trained with surgery_args = {}, not {'n': 3}"),
            (dict(init_from='out/y'), "was trained with init_from = None, not 'out/y'"),
            (dict(model='stlm'), "was trained with model = 'moep', not 'stlm'"),
            (dict(keys=dict(n_embd=16)), 'was trained with n_embd = 8, not 16')]:
        with pytest.raises(UserError, match=message):
            resume(same, **changes)
    with pytest.raises(UserError, match="was trained with data = 'toy_stories', not 'toy_math'"):
        resume(same, data='toy_math')
    same['settings']['data'] = dict(a=(0.0, 1.0), b=(0.0, 1.0))
    resume(same, data=dict(a=(0, 1), b=(0, 1)))
    with pytest.raises(UserError, match='was trained with data'):        # it would be another text
        resume(same, data=dict(b=(0.0, 1.0), a=(0.0, 1.0)))
    weights_only = {key: value for key, value in same.items() if key != 'optimizer'}
    with pytest.raises(UserError, match='holds weights only; start a new run from it with --init_from'):
        resume(weights_only)


def test_streams_need_as_many_processes_and_rows(machine, said):
    corpus = SimpleNamespace(hash='its hash')
    s = Settings(out_dir='out/x', stream=True)
    two = state(settings=dataclasses.asdict(s), ranks=[{}, {}])
    with pytest.raises(UserError, match='reads 2 micro-batches of streams per step'):
        check_resume(two, s, {}, machine)
    check_resume(two, dataclasses.replace(s, gradient_accumulation_steps=2), {}, machine)
    said.clear()
    one = state(settings=dataclasses.asdict(s))
    with pytest.raises(UserError, match='was trained with batch_size = 16, not 4'):
        check_resume(one, dataclasses.replace(s, batch_size=4), {}, machine)
    shuffled = state(settings=dataclasses.asdict(Settings(out_dir='out/x')), ranks=[{}, {}])
    check_resume(shuffled, Settings(out_dir='out/x'), {}, machine)
    assert said == ['resume    there were 2 processes, there are now 1']


def test_no_run_is_overwritten_silently(tmp_path, machine, said):
    def find(**settings):
        return RunFolder(Settings(out_dir=str(tmp_path), **settings), machine).find({})
    assert find() is None
    save_file(state(), tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='already holds a run: add --resume .* --overwrite'):
        find()
    assert find(overwrite=True) is None and find(max_iters=0) is None and said == []
    assert find(resume=True)['iter'] == 3
    with pytest.raises(UserError, match="trained with data = 'toy_stories', not 'toy_math'"):
        find(resume=True, data='toy_math')               # before any data is made or read
    (tmp_path / 'ckpt.pt').rename(tmp_path / 'ckpt_1M.pt')
    assert find(resume=True) is None and 'nothing to resume in' in said[-1]


def test_no_log_is_lost_silently(tmp_path, machine, said):
    """Whether somebody deleted ckpt.pt, or the run was killed before its first save."""
    def find(**settings):
        return RunFolder(Settings(out_dir=str(tmp_path), **settings), machine).find({})
    (tmp_path / 'log.jsonl').touch()
    assert find() is None                                # there is nothing to lose
    (tmp_path / 'log.jsonl').write_text('{"iter": 1}\n')
    with pytest.raises(UserError, match='log of a run that has no checkpoint: add --overwrite to start over'):
        find()
    assert find(overwrite=True) is None and find(max_iters=0) is None and said == []
    assert find(resume=True) is None
    assert said == [f'resume    nothing to resume in {tmp_path}: a new run and log begin']


# ---- Writing ------------------------------------------------------------------------------------


def test_a_file_is_whole_or_as_before(tmp_path, monkeypatch):
    path = tmp_path / 'ckpt.pt'
    save_file(dict(a=1), path)
    before = path.read_bytes()

    def full_disk(state, file):
        file.write(b'half')
        raise OSError('No space left on device')
    monkeypatch.setattr(torch, 'save', full_disk)
    with pytest.raises(UserError, match='ckpt.pt could not be written .No space.* saved before is whole'):
        save_file(dict(a=2), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ['ckpt.pt']


def test_one_writer_at_a_time(tmp_path):
    fcntl = pytest.importorskip('fcntl')
    with open(tmp_path / 'log.jsonl', 'a') as mine, open(tmp_path / 'log.jsonl', 'a') as other:
        assert lock(mine) and not lock(other)
        fcntl.flock(mine, fcntl.LOCK_UN)
        assert lock(other)


@pytest.mark.parametrize('damage', [
    lambda text: text[:-5], lambda text: text.replace(b'"loss": 2', b'"lo\n\xff'), lambda text: b'',
    lambda text: b'garbage\n' + text])
def test_a_damaged_log_is_repaired(tmp_path, machine, data_dir, said, damage):
    corpus = SimpleNamespace(folder=data_dir / 'toy_math')
    folder = RunFolder(Settings(out_dir=str(tmp_path)), machine)
    folder.open(corpus, None)
    for it in (1, 2, 3):
        folder.log(it, loss=float(it))
    folder.log_file.close()
    log = tmp_path / 'log.jsonl'
    text = log.read_bytes()
    log.write_bytes(damage(text))
    inode = log.stat().st_ino
    folder.open(corpus, dict(log_bytes=len(text)))
    assert log.stat().st_ino == inode                    # Windows replaces no open file
    folder.log(4, loss=4.0)
    folder.log_file.close()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert records[-1]['loss'] == 4.0 and {r['iter'] for r in records} <= {1, 2, 3, 4}
    assert len(said) == 1 and 'log.jsonl was damaged' in said[0]


@pytest.mark.parametrize('break_it', [
    lambda state: state['state'][0].update(exp_avg=torch.zeros(2)), lambda state: state.pop('state'),
    lambda state: state['state'].update({99: state['state'][0]}), lambda state: state['param_groups'].pop(),
    lambda state: state['state'][0].update(step=3), lambda state: state['state'][0].pop('exp_avg_sq')])
def test_an_optimiser_that_does_not_fit(tmp_path, machine, break_it):
    """torch would take moments of any shape, and crash in the next step."""
    model = moep.Model(moep.Config(**SMALL))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.long))[0].sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    ranks = [dict(random=dict(cpu=torch.get_rng_state(), device=None), memory={})]
    machine.set_random_state = lambda random: None
    folder = RunFolder(Settings(out_dir=str(tmp_path)), machine)
    began = folder.began
    folder.restore(state(optimizer=saved, ranks=ranks), model, optimizer, {})
    assert folder.began == began - 1.0                   # the second that the run had taken
    break_it(saved)
    with pytest.raises(UserError, match='its weights are whole, but the rest does not fit them'):
        folder.restore(state(optimizer=saved, ranks=ranks), model, optimizer, {})


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path, machine, data_dir, said):
    corpus = SimpleNamespace(folder=data_dir / 'toy_math')
    folder = RunFolder(Settings(out_dir=str(tmp_path / 'run')), machine)
    folder.open(corpus, None)
    folder.log(1, loss=2.0)
    kept = folder.log_file.tell()
    folder.log(2, loss=1.0)
    folder.log_file.close()
    (tmp_path / 'run' / 'ckpt.pt.tmp').touch()              # a kill during a save left it
    folder.open(corpus, dict(log_bytes=kept))
    folder.log(2, loss=1.5)
    folder.log_file.close()
    log = (tmp_path / 'run' / 'log.jsonl').read_text()
    records = [json.loads(line) for line in log.splitlines()]
    assert [(r['iter'], r['loss']) for r in records] == [(1, 2.0), (2, 1.5)] and said == []
    assert 0 <= records[0]['seconds'] <= records[1]['seconds']
    assert sorted(os.listdir(tmp_path / 'run')) == ['log.jsonl', 'meta.json', 'tokenizer.tiktoken']
