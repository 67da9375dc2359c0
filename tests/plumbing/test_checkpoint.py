"""Checkpoints without a run: what is read, what may be resumed, and files that are whole or not there.
tests/test_train.py has the runs."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch

import lora
import moep
from plumbing import checkpoint
from plumbing.checkpoint import (RunFolder, build_model, check_resume, data_folder, find_surgery, freeze,
                                 load_checkpoint, lock, read_checkpoint, run_tokenizer, save_file)
from plumbing.cli import UserError
from plumbing.settings import Settings

SMALL = dict(vocab_size=10, block_size=8, n_layer=1, n_embd=8, n_head=1, n_parallel=0)


@pytest.fixture
def said():
    return []


@pytest.fixture
def machine(said):
    return SimpleNamespace(rank=0, world=1, device=torch.device('cpu'), say=said.append)


def state(**changes):
    """What a run would save."""
    torch.manual_seed(0)
    model = moep.Model(moep.Config(**SMALL))
    config, settings = dataclasses.asdict(model.config), dataclasses.asdict(Settings())
    weights = dict(model='moep', config=config, settings=settings, iter=3, tokenizer='its hash',
                   weights=model.state_dict(), words=12.0, adapted=[], frozen=[])
    return {**weights, 'optimizer': {}, 'data': {}, 'ranks': [{}], 'log_bytes': 0, **changes}


# ---- Reading ------------------------------------------------------------------------------------


def test_a_folder_or_a_file_is_read(tmp_path):
    save_file(state(), tmp_path / 'ckpt.pt')
    for path in (tmp_path, str(tmp_path), tmp_path / 'ckpt.pt'):
        ckpt = read_checkpoint(path)
        assert ckpt['iter'] == 3 and ckpt['folder'] == str(tmp_path)
    model, ckpt = load_checkpoint(tmp_path)
    assert not model.training and torch.equal(model.wte.weight, ckpt['weights']['wte.weight'])


def test_a_checkpoint_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match='there is no checkpoint out/moep/ckpt.pt$'):
        read_checkpoint('out/moep')
    (tmp_path / 'config').mkdir()
    (tmp_path / 'config' / 'moep.py').touch()
    with pytest.raises(UserError, match='; train it first, as with: python train.py config/moep.py'):
        read_checkpoint('out/moep')
    os.makedirs('out/moep')
    save_file(state(), tmp_path / 'out/moep/ckpt_1M.pt')
    with pytest.raises(UserError, match='; there are ckpt_1M.pt'):
        read_checkpoint('out/moep')


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'was_here'),)
    torch.save(state(words=Evil()), tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='not a whole checkpoint'):
        read_checkpoint(tmp_path)
    assert os.listdir(tmp_path) == ['ckpt.pt']
    setup = f'import os; os.mkdir({str(tmp_path / "was_here")!r})'
    for name in ('timeit.timeit', 'prepare.main', 'os.mkdir'):       # functions, but no adapters
        torch.save(state(adapted=[(name, dict(setup=setup, number=0))]), tmp_path / 'ckpt.pt')
        with pytest.raises(UserError, match=f'{name} is no adapter of this project'):
            load_checkpoint(tmp_path)
    assert os.listdir(tmp_path) == ['ckpt.pt']


def test_a_checkpoint_with_a_part_missing(tmp_path):
    whole = state()
    whole.pop('words')
    torch.save(whole, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='not a whole checkpoint'):
        read_checkpoint(tmp_path)
    torch.save([1, 2], tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='not a whole checkpoint'):
        read_checkpoint(tmp_path)


def test_weights_that_do_not_fit_the_config():
    ckpt = state(folder='out/x')
    with pytest.raises(UserError, match=r'out/x: its weights do not fit moep.py with n_embd = 16 .it has 8.'):
        build_model(ckpt, n_embd=16, n_layer=1)
    assert build_model(ckpt, dropout=0.5).config.dropout == 0.5
    ckpt['weights'].pop('wte.weight')
    with pytest.raises(UserError, match='do not fit moep.py with its own config'):
        build_model(ckpt)


def test_adapters_are_put_back():
    torch.manual_seed(1)
    model = lora.add_lora(moep.Model(moep.Config(**SMALL)), rank=2)
    again = build_model(state(weights=model.state_dict(), adapted=model.adapted, folder='out/x'))
    assert again.state_dict().keys() == model.state_dict().keys()
    x = torch.arange(8)[None]
    assert torch.equal(again.eval()(x)[0], model.eval()(x)[0])


def test_what_was_frozen_is_frozen():
    ckpt = state(frozen=['wte.weight'])
    model = build_model(ckpt)
    freeze(model, ckpt)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ['wte.weight']


def test_the_tokenizer_beside_a_checkpoint(data_dir):
    used = str(data_dir / 'toy_stories')
    tokenizer = checkpoint.load_tokenizer(used)
    assert run_tokenizer(dict(folder=used, tokenizer=tokenizer.hash)).hash == tokenizer.hash
    with pytest.raises(UserError, match='was trained with another tokenizer than lies beside it'):
        run_tokenizer(dict(folder=used, tokenizer='another'))


def test_the_data_of_a_run():
    for data in ('a', {'a': (0.0, 1.0), 'b': (0.0, 0.5)}):
        assert data_folder(dict(settings=dict(data=data, data_dir='data'))).as_posix() == 'data/a'


def test_surgeries_by_name():
    assert find_surgery('add_lora', lora) is lora.add_lora is find_surgery('lora.add_lora', moep)
    for name, message in {'add_lara': "lora.py has no function add_lara; did you mean 'add_lora'?",
                          'nowhere.cut': 'nowhere.py has no function cut',
                          'math.pi': 'math.py has no function pi'}.items():
        with pytest.raises(UserError, match=message):
            find_surgery(name, lora)


# ---- Resuming -----------------------------------------------------------------------------------


def test_what_may_be_resumed(machine, said):
    corpus = SimpleNamespace(hash='its hash')

    def resume(ckpt, **changes):
        keys = changes.pop('keys', {})
        check_resume(ckpt, Settings(out_dir='out/x', **changes), keys, corpus, machine)
    same = state()
    same['settings']['out_dir'] = 'out/x'
    resume(same, resume=True)
    resume(same, keys=dict(n_embd=8))
    assert said == []
    resume(same, learning_rate=0.5)
    assert said == ['resume    learning_rate was 0.001, is now 0.5']
    for changes, message in [
            (dict(seed=7), 'reads its data with seed = 42, not 7'),
            (dict(surgery='widen'), "started with surgery = None, not 'widen'"),
            (dict(model='stlm'), 'holds a model of moep.py, but this config trains stlm.py'),
            (dict(keys=dict(n_embd=16)), 'was trained with n_embd = 8, not 16')]:
        with pytest.raises(UserError, match=message):
            resume(same, **changes)
    weights_only = {key: value for key, value in same.items() if key != 'optimizer'}
    with pytest.raises(UserError, match='holds weights only; start a new run from it with --init_from'):
        resume(weights_only)


def test_streams_need_as_many_processes_and_rows(machine, said):
    corpus = SimpleNamespace(hash='its hash')
    s = Settings(out_dir='out/x', stream=True)
    two = state(settings=dataclasses.asdict(s), ranks=[{}, {}])
    with pytest.raises(UserError, match='was trained by 2 processes; its streams need as many'):
        check_resume(two, s, {}, corpus, machine)
    one = state(settings=dataclasses.asdict(s))
    with pytest.raises(UserError, match='reads its data with batch_size = 16, not 4'):
        check_resume(one, dataclasses.replace(s, batch_size=4), {}, corpus, machine)
    shuffled = state(settings=dataclasses.asdict(Settings(out_dir='out/x')), ranks=[{}, {}])
    check_resume(shuffled, Settings(out_dir='out/x'), {}, corpus, machine)
    assert said == ['resume    there were 2 processes, there are now 1']


def test_no_run_is_overwritten_silently(tmp_path, machine, said):
    def find(**settings):
        return RunFolder(Settings(out_dir=str(tmp_path), **settings), machine).find()
    assert find() is None
    save_file(state(), tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='holds a run already: add --resume .* --overwrite'):
        find()
    assert find(overwrite=True) is None and find(max_iters=0) is None and said == []
    assert find(resume=True)['iter'] == 3
    (tmp_path / 'ckpt.pt').rename(tmp_path / 'ckpt_1M.pt')
    assert find(resume=True) is None and 'holds no checkpoint: from the beginning' in said[0]


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
        lock(mine)
        with pytest.raises(UserError, match='log.jsonl is being written by another run'):
            lock(other)
        fcntl.flock(mine, fcntl.LOCK_UN)
        lock(other)


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path, machine, data_dir, said):
    corpus = SimpleNamespace(folder=data_dir / 'toy_math')
    folder = RunFolder(Settings(out_dir=str(tmp_path / 'run')), machine)
    folder.open(corpus, None)
    folder.log(1, loss=2.0)
    kept = folder.log_file.tell()
    folder.log(2, loss=1.0)
    folder.log_file.close()
    (tmp_path / 'run' / 'ckpt.tmp').touch()              # a kill during a save left it
    folder.open(corpus, dict(log_bytes=kept))
    folder.log(2, loss=1.5)
    folder.log_file.close()
    log = (tmp_path / 'run' / 'log.jsonl').read_text()
    assert log == '{"iter": 1, "loss": 2.0}\n{"iter": 2, "loss": 1.5}\n' and said == []
    assert sorted(os.listdir(tmp_path / 'run')) == ['log.jsonl', 'meta.json', 'tokenizer.tiktoken']
