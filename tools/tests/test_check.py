"""tools/check.py: green for every model; each planted fault turns its own row red."""

import importlib.util
import re
import shutil
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from common import ROOT
from moep import MoEP, MoEPConfig, ParallelLayer, Router
from plumbing.bins import load_bin
from plumbing.checkpoint import data_folders, load_checkpoint
from plumbing.settings import import_model
from test_contract import CASES
from tools import check

SMALL = dict(vocab_size=32, block_size=12, n_layer=2, n_head=2, n_embd=16)
MOEP = dict(SMALL, n_parallel=2, n_head_parallel=1, n_embd_parallel=8, n_block=4, n_expert=4)


def check_all(module, config):
    """-> {row: (verdict, text)}, and the names of the red ones."""
    checks = (check.builds, *check.CHECKS)
    rows = {c.__name__: check.run_check(c, module, module.Config(**config)) for c in checks}
    return rows, [name for name, (verdict, _) in rows.items() if verdict == 'WRONG']


@pytest.mark.parametrize('name', CASES)
def test_ours_are_green(name):
    module, config = CASES[name]
    rows, red = check_all(import_model(module), dict(config, dropout=0.0))
    assert red == [], rows


# ---- Planted faults: the row that each turns red ------------------------------------------------

def changed(**methods):
    return type('Changed', (MoEP,), methods)


def states(change, **methods):
    """A MoEP whose final states are changed."""
    def features(self, idx, cache=None):
        x, aux = MoEP.features(self, idx, cache)
        return change(self, x, idx), aux
    return changed(features=features, **methods)


def loss(change):
    def forward(self, idx, targets=None, cache=None, reduction='mean'):
        logits, loss, aux = MoEP.forward(self, idx, targets, cache, reduction)
        return logits, loss if loss is None else change(loss, aux, reduction), aux
    return changed(forward=forward)


def router(**methods):
    return changed(router=type('ChangedRouter', (Router,), methods))


def built(add, Base=MoEP):
    """The constructor also does this."""
    def __init__(self, *args):
        Base.__init__(self, *args)
        add(self)
    return __init__


def count(self, x, idx):
    if self.training:
        self.steps = self.steps + 1
    return x / self.steps


def only_new(self, idx, *args, **keys):
    return MoEP.generate(self, idx, *args, **keys)[:, idx.size(1):]


def steps_buffer(persistent):
    add = lambda self: self.register_buffer('steps', torch.ones(()), persistent=persistent)
    return states(count, __init__=built(add))


def four_in_training(self, score_NE):
    return score_NE.argsort(descending=True)[:, :4 if self.training else 2]


def doubled(self, score_NE, choice_NK):
    gate_NK, losses = Router.weigh(self, score_NE, choice_NK)
    return 2 * gate_NK, losses


def the_same_twice(self, score_NE):
    return Router.choose(self, score_NE)[:, :1].expand(-1, 2)


FAULTS = [pytest.param(row, Model, id=name) for row, name, Model in [
    # hidden while the bias is zero
    ('causal', 'next token', states(lambda m, x, idx: x + m.norm_f.bias * x.roll(-1, 1))),
    ('causal', 'expert choice', router(score=lambda r, x: Router.score(r, x).softmax(0))),
    # from 0, whatever the cache holds
    ('cached', 'positions', states(lambda m, x, idx: x + m.wpe.weight[:idx.size(1)])),
    ('cached', 'one at a time', states(lambda m, x, idx: x * min(2, idx.size(1)))),
    ('cached', 'only new tokens', changed(generate=only_new)),
    ('batched', 'other rows', states(lambda m, x, idx: x - x.mean(0))),
    ('repeats', 'noise', states(lambda m, x, idx: x * torch.rand(()) ** 1e-3)),
    ('rebuilds', 'random weights', states(
        lambda m, x, idx: x * m.scale,
        __init__=built(lambda m: setattr(m, 'scale', torch.randn(m.config.n_embd))))),
    ('routes', 'gates sum to 2', router(weigh=doubled)),
    ('routes', 'more in training', router(choose=four_in_training)),
    ('routes', 'the same twice', type('Twice', (router(choose=the_same_twice),),
                                      dict(gates_sum_to_1=False))),
    ('gradients', 'root of 0', states(lambda m, x, idx: x + (x - x).square().sqrt())),
    ('gradients', 'unused parameter', changed(
        __init__=built(lambda m: m.register_parameter('unused', nn.Parameter(torch.ones(3)))))),
    ('resume', 'plain number', states(count, steps=1)),
    ('resume', 'unsaved buffer', steps_buffer(persistent=False)),
    ('sparse', 'other logits', states(lambda m, x, idx: x * (1 + m.config.sparse))),
    ('sparse', 'other gradients', states(
        lambda m, x, idx: x + (x - x.detach()) * m.config.sparse)),
    ('counts', 'wrong total', changed(count_params=lambda m: MoEP.count_params(m)[::-1])),
    ('shapes', 'loss with aux', loss(lambda loss, aux, reduction: loss + sum(aux.values()))),
    ('shapes', 'doubled mean', loss(
        lambda loss, aux, reduction: loss * (1 + (reduction == 'mean')))),
    ('shapes', 'flat losses', loss(lambda loss, aux, reduction: loss.flatten())),
    ('builds', 'two values', changed(forward=lambda m, *a, **k: MoEP.forward(m, *a, **k)[::2])),
    ('builds', 'nan', states(lambda m, x, idx: x / (0 * x))),
    ('builds', 'loss of each choice', router(balance_loss=lambda r, prob, choice: prob.mean(0))),
    # init_weights leaves a router's own parameters alone
    ('builds', 'uninitialised', router(__init__=built(lambda r: r.register_parameter(
        'extra', nn.Parameter(torch.empty(3))), Router)))]]


@pytest.mark.parametrize('row, Model', FAULTS)
def test_a_fault_turns_its_row_red(row, Model):
    module = SimpleNamespace(Config=MoEPConfig, Model=Model)
    verdict, text = check.run_check(getattr(check, row), module, MoEPConfig(**MOEP))
    assert verdict == 'WRONG' and 'Traceback' not in text
    assert not torch.are_deterministic_algorithms_enabled()


@dataclass
class NotPlain(MoEPConfig):
    device: object = torch.device('cpu')


def test_a_config_that_no_checkpoint_holds():
    module = SimpleNamespace(Config=NotPlain, Model=MoEP)
    assert check.run_check(check.rebuilds, module, NotPlain(**MOEP))[0] == 'WRONG'


def test_a_router_that_only_an_auxiliary_loss_trains_is_named():
    """With K = 1 the gate is always 1."""
    module = import_model('moep')
    found = check.run_check(check.loss, module, module.Config(**MOEP, top_k=1))
    alone = 'from an auxiliary loss alone: parallel.0.router.linear.weight (4 in all)'
    assert found == ('NOTE', alone)
    assert check.run_check(check.loss, module, module.Config(**MOEP))[0] == 'ok'


def test_a_layer_that_count_params_does_not_know_is_named():
    Model = changed(layer=type('MyLayer', (ParallelLayer,), {}))
    module = SimpleNamespace(Config=MoEPConfig, Model=Model)
    assert check.run_check(check.counts, module, MoEPConfig(**MOEP))[0] == 'NOTE'


def test_a_bug_keeps_its_traceback():
    module = SimpleNamespace(Config=MoEPConfig, Model=states(lambda m, x, idx: 1 / 0))
    verdict, text = check.run_check(check.builds, module, MoEPConfig(**MOEP))
    assert verdict == 'WRONG' and '1 / 0' in text and 'ZeroDivisionError' in text


def test_what_a_block_is_worth(run, smoke, tmp_path):
    """Against a model whose list lacks the block. One that was made idle is called so."""
    ckpt = torch.load(smoke('config/moep.py') / 'ckpt.pt', weights_only=True)
    for name in ckpt['weights']:
        if name.startswith('last.0.'):
            ckpt['weights'][name].zero_()
        elif name.startswith('first.0.'):
            ckpt['weights'][name].normal_(std=0.1)       # two steps taught it little
    shutil.copytree(smoke('config/moep.py'), tmp_path / 'run')
    torch.save(ckpt, tmp_path / 'run/ckpt.pt')
    lines = run('tools.check', tmp_path / 'run', here=True).stdout.splitlines()
    rows = {line.split()[0]: line.split(maxsplit=3)[1:] for line in lines[2:]}
    assert rows['last.0'][1:] == ['+0.0000', 'adds almost nothing']

    model, ckpt = load_checkpoint(tmp_path / 'run')
    tokens = torch.tensor(load_bin(*data_folders(ckpt), 'val')[:8192].astype(int))
    x, y = (tokens[i:len(tokens) - 1 + i].unfold(0, 64, 64) for i in (0, 1))
    loss = model(x, y)[1].item()
    size = (model.wte(x) + model.wpe.weight).std().item()
    model.first = nn.ModuleList()
    assert float(rows['first.0'][0]) == pytest.approx(size, rel=0.05)
    assert float(rows['first.0'][1]) == pytest.approx(model(x, y)[1].item() - loss, abs=0.02)


# ---- The command --------------------------------------------------------------------------------

def test_the_models_of_the_docs_are_green(tmp_path):
    """Every model file that README.md and docs/routers.md print."""
    pages = ((ROOT / name).read_text(encoding='utf-8') for name in ('README.md', 'docs/routers.md'))
    files = [text for text in re.findall('```python\n(.*?)```', '\n'.join(pages), re.DOTALL)
             if re.search('^from (moep|arena)(?s:.*)Config, Model =', text, re.M)]
    assert files
    for n, text in enumerate(files):
        path = tmp_path / f'mine_{n}.py'
        path.write_text(text, encoding='utf-8')
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = MOEP if 'from moep' in text else dict(SMALL, n_expert=4, top_k=2)
        rows, red = check_all(module, config)
        assert red == [], rows


def test_table_and_exit_code(run, monkeypatch):
    args = ['moep.py', '--n_embd=12', '--n_parallel=0', '--n_layer=1']
    monkeypatch.setattr(check, 'CHECKS', (check.shapes, check.routes))
    lines = run('tools.check', *args, here=True).stdout.splitlines()
    assert lines[0] == 'moep.py with config/moep.py --n_embd=12 --n_parallel=0 --n_layer=1'
    assert [line.split()[:2] for line in lines[1:]] == [['ok', 'shapes'], ['-', 'routes']]
    assert 'there is no checkpoint out/mine' in run('tools.check', 'out/mine', code=2).stderr
    monkeypatch.setattr(check, 'same', lambda a, b: False)
    lines = run('tools.check', *args, here=True, code=1).stdout.splitlines()
    assert lines[1].startswith('WRONG  shapes')


@pytest.mark.parametrize('name, said', [
    ('arena/sigmoid.py', 'arena/sigmoid.py with config/moep.py\n'),
    ('arena.dense', 'arena/dense.py with small sizes\n')])
def test_where_sizes_come_from(name, said, run, monkeypatch):
    monkeypatch.setattr(check, 'CHECKS', ())
    assert run('tools.check', name, here=True).stdout == said
