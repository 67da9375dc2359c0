"""Model files: which are imported, how they are sketched, and how their errors are told."""

import os
from types import SimpleNamespace

import pytest
import torch

import lora
import moep
from moep import MoEPConfig
from plumbing import models
from plumbing.cli import UserError
from plumbing.models import find_surgery, import_model, make_config, reads_past_block_size, sketch


def test_a_model_is_a_file_beside_train_py(tmp_path, monkeypatch):
    """Nothing else is imported, whatever a checkpoint names."""
    assert import_model('moep').Config is MoEPConfig
    (tmp_path / 'evil.py').write_text("open('was_here', 'w')\nConfig, Model = None, None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ('evil', 'os', str(tmp_path / 'evil'), 'plumbing.cli'):
        with pytest.raises(UserError, match='there is no model file|lacks the line'):
            import_model(name)
    assert os.listdir(tmp_path) == ['evil.py']
    with pytest.raises(UserError, match=r'no model file zloss.py; did you mean arena.zloss\?'):
        import_model('zloss')


def test_other_files_beside_a_model(tmp_path, monkeypatch):
    """Emacs keeps a dangling link beside a file with unsaved changes, and not every file is UTF-8."""
    (tmp_path / 'own_model.py').write_text('import moep\nConfig, Model = moep.Config, 2\n')
    (tmp_path / '.#own_model.py').symlink_to('user@host.1234')
    (tmp_path / 'old.py').write_bytes('# caf\u00e9'.encode('latin-1'))
    monkeypatch.setattr(models, 'ROOT', tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert import_model('own_model').Config is MoEPConfig


def test_a_field_that_means_something_else_in_a_model_of_your_own():
    """The bound on the number of layers is for numbers: a run of this model must be readable."""
    config = make_config(SimpleNamespace(Config=dict, __name__='mine'), dict(n_layer=[2, 4], n_parallel=None))
    assert config == dict(n_layer=[2, 4], n_parallel=None)


@pytest.mark.parametrize('line, message', [
    ('x = (', r"^bad_model: '\(' was never closed \(bad_model.py, line 2\)$"),
    ('x = y', "^bad_model: bad_model.py:2: NameError: name 'y' is not defined$"),
    ('from moep import Rooter', '^bad_model: bad_model.py:2: ImportError: cannot import name')])
def test_a_model_file_that_cannot_be_imported(tmp_path, monkeypatch, line, message):
    (tmp_path / 'bad_model.py').write_text(f'Model = None\n{line}\nConfig, Model = None, None\n')
    monkeypatch.setattr(models, 'ROOT', tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=message):
        import_model('bad_model')


def test_a_config_that_is_no_dataclass(tmp_path, monkeypatch):
    (tmp_path / 'plain_model.py').write_text('import moep\nConfig, Model = moep.Model, moep.Config\n')
    monkeypatch.setattr(models, 'ROOT', tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match='^plain_model: in its last line, Config is no dataclass$'):
        import_model('plain_model')


@pytest.mark.parametrize('name', [
    'moep', 'moduleformer', 'papaformer', 'selfmoe', 'stlm', 'stlm_depth', 'strong'])
def test_reductions(name):
    module = import_model(name)
    model = module.Model(module.Config(vocab_size=9, block_size=4, n_layer=2, n_head=4, n_embd=16)).eval()
    x, y = torch.arange(8).view(2, 4), torch.tensor([[1, -1, 3, 4], [5, 6, 7, -1]])
    losses = model(x, y, reduction='none')[1]
    assert losses.shape == (2, 4)
    assert torch.allclose(model(x, y, reduction='sum')[1], losses.sum())
    assert torch.allclose(model(x, y)[1], losses.sum() / 6)


@pytest.mark.parametrize('name', ['moep', 'papaformer', 'selfmoe', 'stlm', 'stlm_depth', 'strong'])
def test_a_window_of_one_token(name):
    """Its newer half is that token: generate() goes on from the newest alone."""
    module = import_model(name)
    torch.manual_seed(0)
    model = module.Model(module.Config(vocab_size=9, block_size=1, n_layer=2, n_head=4, n_embd=16)).eval()
    for p in model.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    idx = torch.tensor([[3, 1], [4, 8]])
    out = model.generate(idx, 4, temperature=0)
    for _ in range(4):
        idx = torch.cat((idx, model(idx[:, -1:])[0][:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(out, idx)


@pytest.mark.parametrize('limit', ['none', 'raise', 'assert', 'table', 'mask'])
def test_what_reads_past_its_block_size(limit):
    """However a model file says that it cannot."""
    class Model(torch.nn.Module):
        config = MoEPConfig(block_size=4)

        def __init__(self):
            super().__init__()
            self.wpe = torch.nn.Embedding(4, 2)

        def features(self, idx):
            T = idx.size(1)
            if limit == 'raise' and T > 4:
                raise ValueError('too long')
            assert limit != 'assert' or T <= 4
            if limit == 'table':
                self.wpe(torch.arange(T))
            if limit == 'mask':
                torch.zeros(T) + torch.zeros(4)[:T]
    assert reads_past_block_size(Model()) == (limit == 'none')


def test_surgeries_by_name():
    assert find_surgery('add_lora', lora) is lora.add_lora is find_surgery('lora.add_lora', moep)
    for name, message in {'add_lara': "lora.py has no function add_lara of a model; did you mean 'add_lora'?",
                          'nowhere.cut': 'nowhere.py has no function cut',
                          'math.pi': 'math.py has no function pi',
                          'shutil.rmtree': 'shutil.py has no function rmtree',   # not beside train.py
                          'train.main': 'train.py has no function main of a model',
                          'lora.Counter': 'lora.py has no function Counter'}.items():
        with pytest.raises(UserError, match=message):
            find_surgery(name, lora)


def test_a_sketch_needs_no_memory():
    model = sketch(moep, dict(vocab_size=10 ** 9, n_embd=3 * 10 ** 5, n_head=1))
    assert model.count_params()[0] > 10 ** 14 and model.wte.weight.is_meta
    with pytest.raises(UserError, match='moep: more than 20,000 parameter tensors'):
        sketch(moep, dict(n_layer=10 ** 4))
    with pytest.raises(UserError, match='moep: n_layer = 1,000,000,000 is more than 10,000'):
        sketch(moep, dict(n_layer=10 ** 9))


def test_a_bug_in_a_model_file_is_told_with_its_line(monkeypatch):
    """What it raises on purpose is told in its own words."""
    with pytest.raises(UserError, match="^moep: a width of 384 cannot be split into 5 heads$"):
        sketch(moep, dict(n_head=5))
    monkeypatch.setattr(moep, 'Block', lambda config, *_: config.no_such_field)
    with pytest.raises(UserError, match=r'^moep with these settings: moep.py:\d+: AttributeError: '):
        sketch(moep, {})
