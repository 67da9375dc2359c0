"""Checkpoints without a run: what is believed of them, and the model that is built. tests/test_train.py has
the runs."""

import dataclasses
import enum
import os
import zipfile
from types import SimpleNamespace

import pytest
import torch

import lora
import moep
from plumbing import checkpoint
from plumbing.checkpoint import (build_model, check_start, data_folder, freeze, load_checkpoint,
                                 read_checkpoint, run_surgery, run_tokenizer, start_model)
from plumbing.cli import UserError
from plumbing.folder import save_file
from plumbing.machine import Machine
from plumbing.settings import Settings

SMALL = dict(vocab_size=10, block_size=8, n_layer=1, n_embd=8, n_head=1, n_parallel=0)


def state(**changes):
    """What a run would save."""
    torch.manual_seed(0)
    model = moep.Model(moep.Config(**SMALL))
    config, settings = dataclasses.asdict(model.config), dataclasses.asdict(Settings())
    weights = dict(model='moep', config=config, settings=settings, iter=3, tokenizer='its hash',
                   weights=model.state_dict(), words=12.0, adapted=[], frozen=[], shards=0, token='')
    place = dict(epoch=0, position=48, words=12.0, seen=48, unit=16, size=9999)
    rest = dict(optimizer={}, data=place, ranks=[{}], log_bytes=0, seconds=1.0)
    return {**weights, **rest, **changes}


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
    os.makedirs('config')
    (tmp_path / 'config' / 'moep.py').touch()
    with pytest.raises(UserError, match='; train it first, for example: python train.py config/moep.py'):
        read_checkpoint('out/moep')
    os.makedirs('out/other')
    save_file(state(), tmp_path / 'out/other/ckpt.pt')
    with pytest.raises(UserError, match=r'; did you mean out/other\?$'):
        read_checkpoint('out/ohter')
    with pytest.raises(UserError, match='; there are out/other$'):
        read_checkpoint('out/x')
    os.makedirs('out/moep')
    save_file(state(), tmp_path / 'out/moep/ckpt_1M.pt')
    with pytest.raises(UserError, match='; there are ckpt_1M.pt'):
        read_checkpoint('out/moep')


@pytest.mark.parametrize('name, file', [('mine', 'mine.py'), ('arena.mine', 'arena/mine.py')])
def test_a_run_starts_from_one_of_its_own_model(name, file):
    told = f'holds a model of moep.py, but this run trains {file}: a run starts only from one of the same'
    with pytest.raises(UserError, match=f'{told} file .--model=moep.$'):
        check_start(state(folder='out/a'), Settings(model=name), None)


def test_a_run_starts_from_one_with_its_tokenizer():
    corpus = SimpleNamespace(hash='its hash', folder='data/mine')
    check_start(state(folder='out/a'), Settings(), corpus)
    corpus.hash = 'another'
    with pytest.raises(UserError, match='out/a has another tokenizer than data/mine: set --data'):
        check_start(state(folder='out/a'), Settings(), corpus)


@pytest.mark.parametrize('changes, message', [
    (dict(model='mine'), 'there is no model file mine.py; there are: '),
    (dict(model='arena.mine'), 'there is no model file arena/mine.py; '),
    (dict(config=dict(n_blok=3)), "moep: MoEPConfig.__init__() got an unexpected keyword argument 'n_blok'"),
    (dict(config={None: 2}), 'moep: '),
    (dict(config=[1]), 'its config is no config of its model'),
    (dict(config=dict(n_layer=[1])), 'moep: '),
    (dict(config=dict(n_layer=10 ** 400)), 'moep: n_layer = 10,000,')])
def test_a_model_file_that_has_changed(tmp_path, changes, message):
    """The checkpoint is whole: nobody is told to train it again."""
    torch.save(state(**changes), tmp_path / 'ckpt.pt')
    with pytest.raises(UserError) as told:
        read_checkpoint(tmp_path)
    assert str(told.value).startswith(f'{tmp_path}/ckpt.pt: {message}')


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'was_here'),)
    torch.save(state(words=Evil()), tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=r'as a checkpoint \(it holds a \w+.mkdir; only plain values'):
        read_checkpoint(tmp_path)
    assert os.listdir(tmp_path) == ['ckpt.pt']
    setup = f'import os; os.mkdir({str(tmp_path / "was_here")!r})'
    for name in ('timeit.timeit', 'prepare.main', 'os.mkdir'):       # functions, but no adapters
        torch.save(state(adapted=[(name, dict(setup=setup, number=0))]), tmp_path / 'ckpt.pt')
        with pytest.raises(UserError, match='its weights do not fit moep.py with its own config'):
            load_checkpoint(tmp_path)
    assert os.listdir(tmp_path) == ['ckpt.pt']


def test_a_checkpoint_with_a_field_missing(tmp_path):
    whole = state()
    whole.pop('words')
    torch.save(whole, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='cannot be read as a checkpoint'):
        read_checkpoint(tmp_path)
    torch.save([1, 2], tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='cannot be read as a checkpoint'):
        read_checkpoint(tmp_path)


class Kind(str, enum.Enum):
    WIDE = 'wide'


def test_a_whole_checkpoint_is_not_called_broken(tmp_path):
    """Nor is anybody told to overwrite a run: its file may be of use by hand."""
    torch.save(state(config=dict(kind=Kind.WIDE)), tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=r'\(it holds a .*Kind; only plain values and tensors are') as told:
        read_checkpoint(tmp_path)
    (tmp_path / 'ckpt.pt').write_bytes(b'PK')
    with pytest.raises(UserError, match=r'\(truncated, or another format\); try another file') as other:
        read_checkpoint(tmp_path)
    assert 'overwrite' not in f'{told.value} {other.value}'


def shared(depth):
    """A list of two lists of two lists ..., which are one: small in a file, endless to walk."""
    value = []
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize('changes', [
    dict(iter=-1), dict(iter='3'), dict(iter=2.5), dict(words=float('nan')), dict(words=[1]), dict(model=3.5),
    dict(tokenizer=None), dict(settings=None), dict(settings=dict(data=[1])),
    dict(settings=dict(learning_rate=float('inf'))), dict(weights=[]), dict(weights={'a': 3}),
    dict(frozen=[None]), dict(log_bytes=-1), dict(ranks=[3]), dict(ranks=[]), dict(data=dict(epoch=0)),
    dict(data=dict(epoch=0, position=-1, words=0.0)),
    dict(data=dict(epoch=0, position=48, words=12.0, seen=48, unit=0, size=9999)),
    dict(weights=dict(a=torch.zeros(1).expand(10 ** 9))), dict(weights=dict(a=torch.zeros(3, device='meta'))),
    dict(weights=dict(a=torch.zeros(3).to_sparse())), dict(config=dict(a=shared(60))),
    dict(adapted=3), dict(adapted=['lora.add_lora'])])
def test_parts_that_cannot_be(tmp_path, changes):
    torch.save(state(**changes), tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='ckpt.pt cannot be read as a checkpoint'):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize('sizes', [
    dict(n_layer=10 ** 9), dict(vocab_size=10 ** 12), dict(n_embd=10 ** 12), dict(block_size=10 ** 11),
    dict(n_head=3), dict(n_parallel=-1)])
def test_no_declared_size_is_allocated(tmp_path, sizes):
    config = dataclasses.asdict(moep.Config(**SMALL)) | sizes
    torch.save(state(config=config), tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='not fit moep.py with its own config|ckpt.pt: moep: '):
        load_checkpoint(tmp_path)


def test_a_bomb_is_not_unpacked(tmp_path):
    torch.save(state(weights=dict(a=torch.zeros(10 ** 6))), tmp_path / 'plain.pt')
    with zipfile.ZipFile(tmp_path / 'plain.pt') as plain, \
            zipfile.ZipFile(tmp_path / 'ckpt.pt', 'w', zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(UserError, match='it unpacks to more than its size'):
        read_checkpoint(tmp_path)


def test_weights_that_are_not_finite(tmp_path):
    broken = state()
    broken['weights']['wte.weight'][0, 0] = float('nan')
    torch.save(broken, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='some of its weights are not finite'):
        load_checkpoint(tmp_path)


def test_runs_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('moep', 'paper/moep'):
        os.makedirs(f'out/{name}')
        save_file(state(), tmp_path / f'out/{name}/ckpt.pt')
    assert read_checkpoint('moep')['folder'] == 'out/moep'
    with pytest.raises(UserError, match='no checkpoint moepp/ckpt.pt; there are out/moep, out/paper/moep'):
        read_checkpoint('moepp')


def test_weights_that_do_not_fit_the_config():
    ckpt = state(folder='out/x')
    told = r'out/x: its weights do not fit moep.py with n_embd = 16 .it has 8.: the first that differs is '
    with pytest.raises(UserError, match=f'{told}first.0.down.bias'):
        build_model(ckpt, n_embd=16, n_layer=1)
    assert build_model(ckpt, dropout=0.5).config.dropout == 0.5
    double = {name: w.double() for name, w in ckpt['weights'].items()}   # loading would round them
    with pytest.raises(UserError, match='do not fit moep.py with its own config'):
        build_model(ckpt | dict(weights=double))
    ckpt['weights'].pop('wte.weight')
    with pytest.raises(UserError, match='with its own config: the first that differs is wte.weight'):
        build_model(ckpt)


def test_a_bug_in_an_edited_model_file_is_told(monkeypatch):
    """Not only that the weights do not fit."""
    ckpt = state(folder='out/x')
    monkeypatch.setattr(moep, 'Block', None)
    with pytest.raises(UserError, match="with its own config: .*moep.py:.*'NoneType' object"):
        build_model(ckpt)


class Grows(moep.MoEPConfig):
    def __post_init__(self):
        super().__post_init__()
        self.n_embd *= 2


@pytest.mark.parametrize('base, field', [
    (moep.MoEPConfig, ('kind', Kind, Kind.WIDE)),
    (moep.MoEPConfig, ('width', int, dataclasses.field(default=1, init=False))),
    (Grows, ('width', int, 1))])
def test_a_run_that_could_not_be_read_does_not_start(base, field):
    mine = SimpleNamespace(Model=moep.MoEP, Config=dataclasses.make_dataclass('Mine', [field], bases=(base,)),
                           __name__='mine')
    corpus = SimpleNamespace(machine=Machine('cpu'))
    with pytest.raises(UserError, match='mine: no checkpoint could be read: its Config must'):
        start_model(Settings(), mine, SMALL, corpus)
    mine.Config = dataclasses.make_dataclass('Mine', [('top', float, float('inf'))], bases=(moep.MoEPConfig,))
    start_model(Settings(), mine, SMALL, corpus)


def test_adapters_are_put_back():
    torch.manual_seed(1)
    model = lora.add_lora(moep.Model(moep.Config(**SMALL)), rank=2)
    again = build_model(state(weights=model.state_dict(), adapted=model.adapted, folder='out/x'))
    assert again.state_dict().keys() == model.state_dict().keys()
    x = torch.arange(8)[None]
    assert torch.equal(again.eval()(x)[0], model.eval()(x)[0])


def test_adapters_of_any_pattern_are_read(tmp_path):
    """What could be trained can be read again."""
    pattern = r'^(first|last)?\.*\d*\.*(qkv|proj)(\.weight)?$'
    model = lora.add_lora(moep.Model(moep.Config(**SMALL)), rank=2, only=pattern)
    save_file(state(weights=model.state_dict(), adapted=model.adapted), tmp_path / 'ckpt.pt')
    again, _ = load_checkpoint(tmp_path)
    assert again.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize('adapter', [
    ('lora.merge_lora', {}), ('lora.add_lora', dict(rank='a')), ('lora.add_lora', dict(device='cpu')),
    ('lora.add_lora', dict(only='(')), ('add_lora', {}), (None, {}), ()])
def test_adapters_that_cannot_be(adapter):
    with pytest.raises(UserError, match='its weights do not fit moep.py with its own config'):
        build_model(state(adapted=[adapter], folder='out/x'))


def test_what_was_frozen_is_frozen():
    ckpt = state(frozen=['wte.weight'])
    model = build_model(ckpt)
    freeze(model, ckpt)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ['wte.weight']


def test_the_tokenizer_beside_a_checkpoint(data_dir):
    used = str(data_dir / 'toy_stories')
    tokenizer = checkpoint.load_tokenizer(used)
    assert run_tokenizer(dict(folder=used, tokenizer=tokenizer.hash)).hash == tokenizer.hash
    with pytest.raises(UserError, match='the tokenizer in .* is not the one the run was trained with'):
        run_tokenizer(dict(folder=used, tokenizer='another'))


def test_the_data_of_a_run():
    for data in ('a', 'a,b', {'a': (0.0, 1.0), 'b': (0.0, 0.5)}):
        assert data_folder(dict(settings=dict(data=data, data_dir='data'))).as_posix() == 'data/a'


# ---- Starting from other runs -------------------------------------------------------------------


def surgery_of(ckpts, operate, model_keys={}, **settings):
    s = Settings(surgery='mine.cut', init_from=[ckpt['folder'] for ckpt in ckpts], **settings)
    corpus = SimpleNamespace(machine=SimpleNamespace(device='cpu'), calibration=lambda seq_len: seq_len)
    return run_surgery(operate, ckpts, s, moep, model_keys, corpus)


def test_what_a_surgery_is_given():
    """Models in eval mode, and batches of the length that the run will read."""
    seen = []

    def cut(models, batches):
        seen.append((batches, [model.training for model in models]))
        return models[0]
    ckpts = [state(folder='out/a'), state(folder='out/b')]
    for seq_len in (None, 4):
        surgery_of(ckpts, cut, seq_len=seq_len)
    assert seen == [(8, [False, False]), (4, [False, False])]


def test_what_no_surgery_is_given():
    """Adapters, in any of the models; and settings that are not those of all models."""
    refused = lambda models: pytest.fail('it is run')
    adapted = state(folder='out/b', adapted=[['lora.add_lora', {}]])
    with pytest.raises(UserError, match='the model has adapters; merge them first'):
        surgery_of([state(folder='out/a'), adapted], refused)
    other = state(folder='out/b', config=dataclasses.asdict(moep.Config(**SMALL | dict(n_layer=2))))
    with pytest.raises(UserError, match='come from init_from and surgery_args; remove n_layer$'):
        surgery_of([state(folder='out/a'), other], refused, dict(n_layer=1, n_embd=8))


def test_every_run_that_another_starts_from_is_checked(monkeypatch):
    found = dict(a=state(folder='out/a'), b=state(folder='out/b', tokenizer='another'))
    monkeypatch.setattr(checkpoint, 'read_checkpoint', found.get)
    corpus = SimpleNamespace(hash='its hash', folder='data/mine')
    with pytest.raises(UserError, match='out/b has another tokenizer than data/mine'):
        start_model(Settings(init_from=['a', 'b']), moep, {}, corpus)


def test_no_run_deletes_what_it_starts_from(tmp_path):
    """However the folder is spelled."""
    (tmp_path / 'run').mkdir()
    (tmp_path / 'link').symlink_to(tmp_path / 'run')
    corpus = SimpleNamespace(hash='its hash', folder='data/mine')
    for name in ('run', 'link', 'run/../run'):
        s = Settings(overwrite=True, out_dir=f'{tmp_path}/{name}')
        with pytest.raises(UserError, match='which --overwrite deletes: set another --out_dir'):
            check_start(state(folder=str(tmp_path / 'run')), s, corpus)
