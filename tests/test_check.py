"""tools/check.py: green for every model; each planted fault turns its own row red."""

import importlib.util
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from conftest import ROOT
from moep import MoEP, MoEPConfig, Router
from plumbing.settings import import_model
from tools import check

SMALL = dict(vocab_size=32, block_size=12, n_layer=2, n_head=2, n_embd=16)
MOEP = dict(SMALL, n_parallel=2, n_head_parallel=1, n_embd_parallel=8, n_block=3, n_expert=3)
POOLS = dict(SMALL, n_att=3, d_att=8, n_ffd=4, d_ffd=8, d_router=8, query_block=5)
STLM = dict(SMALL, n_kv_head=1, ffn_hidden=16)
BYTES = dict(STLM, byte_limit=3, byte_embd=8, byte_layer=1, byte_head=2)


def check_all(module, config):
    """-> {row: (verdict, text)}, and the names of the red ones."""
    checks = (check.builds, *check.CHECKS)
    rows = {c.__name__: check.run_check(c, module, module.Config(**config)) for c in checks}
    return rows, [name for name, (verdict, _) in rows.items() if verdict == 'WRONG']


@pytest.mark.parametrize('name, config', [
    ('moep', MOEP),
    ('papaformer', dict(SMALL, n_parallel=2, path_embd=[8, 8], path_head=[1, 1],
                        connection='gumbel1')),
    ('moduleformer', POOLS),
    ('selfmoe', dict(SMALL, n_layer=3, n_kv_head=1, gate='matrix', n_expert=3, top_k=2)),
    ('stlm', dict(STLM, share='ffn', lora_rank=2)),
    ('stlm', BYTES),
    ('stlm_depth', dict(STLM, capacity=0.4)),
    ('arena.dense', dict(SMALL, n_expert=4, top_k=2))], ids=str)
def test_ours_are_green(name, config):
    rows, red = check_all(import_model(name), config)
    assert red == [], rows


# ---- Planted faults: the row that each turns red ------------------------------------------------

FAULTS = []


def fault(row):
    def add(Model):
        FAULTS.append(pytest.param(row, Model, id=Model.__name__))
        return Model
    return add


class Changed(MoEP):
    """A MoEP whose final states are changed."""
    def features(self, idx, cache=None):
        x, aux = super().features(idx, cache)
        return self.change(x, idx), aux


@fault('causal')
class NextToken(Changed):
    def change(self, x, idx):
        return x + self.ln_f.bias * x.roll(-1, 1)        # hidden while the bias is zero


@fault('causal')
class LastToken(Changed):
    def change(self, x, idx):
        return x + self.wte(idx[:, -1:])


@fault('causal')
class ExpertChoice(MoEP):
    class router(Router):
        def score(self, x_ND):
            return super().score(x_ND).softmax(0)


@fault('cached')
class Positions(Changed):
    def change(self, x, idx):
        return x + self.wpe.weight[:idx.size(1)]         # from 0, whatever the cache holds


@fault('cached')
class OneAtATime(Changed):
    def change(self, x, idx):
        return x * min(2, idx.size(1))


@fault('cached')
class LostToken(MoEP):
    def generate(self, idx, *args, **kwargs):
        return torch.cat((idx[:, :1], super().generate(idx[:, 1:], *args, **kwargs)), 1)


@fault('cached')
class OnlyNewTokens(MoEP):
    def generate(self, idx, *args, **kwargs):
        return super().generate(idx, *args, **kwargs)[:, idx.size(1):]


@fault('batched')
class OtherRows(Changed):
    def change(self, x, idx):
        return x - x.mean(0)


@fault('repeats')
class Noise(Changed):
    def change(self, x, idx):
        return x * torch.rand(()) ** 1e-3


@fault('rebuilds')
class RandomWeights(Changed):
    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.randn(config.n_embd)

    def change(self, x, idx):
        return x * self.scale


@fault('routes')
class GatesThatSumTo2(MoEP):
    class router(Router):
        def weigh(self, score_NE, choice_NK):
            gate_NK, losses = super().weigh(score_NE, choice_NK)
            return 2 * gate_NK, losses


@fault('routes')
class NegativeGates(MoEP):
    class router(Router):
        def weigh(self, score_NE, choice_NK):
            gate_NK, losses = super().weigh(score_NE, choice_NK)
            return 99 * gate_NK - 49, losses


@fault('routes')
class MoreInTraining(MoEP):
    class router(Router):
        def choose(self, score_NE):
            best_NE = score_NE.argsort(descending=True)
            return best_NE[:, :3 if self.training else 2]


@fault('routes')
class TheSameTwice(MoEP):
    gates_sum_to_1 = False

    class router(Router):
        def choose(self, score_NE):
            return super().choose(score_NE)[:, :1].expand(-1, 2)


@fault('gradients')
class RootOf0(Changed):
    def change(self, x, idx):
        return x + (x - x).square().sqrt()


@fault('gradients')
class UnusedParameter(MoEP):
    def __init__(self, config):
        super().__init__(config)
        self.unused = nn.Parameter(torch.ones(3))


class Counting(Changed):
    def change(self, x, idx):
        if self.training:
            self.steps = self.steps + 1
        return x / self.steps


@fault('resume')
class PlainNumber(Counting):
    steps = 1


@fault('resume')
class UnsavedBuffer(Counting):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer('steps', torch.ones(()), persistent=False)


class SavedBuffer(Counting):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer('steps', torch.ones(()))


@fault('resume')
class GlobalList(Changed):
    calls = [1]

    def change(self, x, idx):
        self.calls[0] += 1
        return x / self.calls[0]


@fault('sparse')
class OtherLogits(Changed):
    def change(self, x, idx):
        return x * (1 + self.config.sparse)


@fault('sparse')
class OtherGradients(Changed):
    def change(self, x, idx):
        return x + (x - x.detach()) * self.config.sparse


@fault('counts')
class WrongTotal(MoEP):
    def count_params(self):
        return super().count_params()[::-1]


@fault('counts')
class NothingActive(MoEP):
    def count_params(self):
        return super().count_params()[0], 0


class ChangedLoss(MoEP):
    def forward(self, idx, targets=None, cache=None, reduction='mean'):
        logits, loss, aux = super().forward(idx, targets, cache, reduction)
        return logits, loss if loss is None else self.change(loss, aux, reduction), aux


@fault('shapes')
class LossWithAux(ChangedLoss):
    def change(self, loss, aux, reduction):
        return loss + sum(aux.values())


@fault('shapes')
class DoubledMean(ChangedLoss):
    def change(self, loss, aux, reduction):
        return loss if reduction == 'none' else 2 * loss


@fault('shapes')
class FlatLosses(ChangedLoss):
    def change(self, loss, aux, reduction):
        return loss.flatten() if reduction == 'none' else loss


@fault('builds')
class TwoValues(MoEP):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)[::2]


@fault('builds')
class NaN(Changed):
    def change(self, x, idx):
        return x / (0 * x)


@fault('builds')
class LossOfEachChoice(MoEP):
    class router(Router):
        def balance_loss(self, prob_NE, choice_NK):
            return prob_NE.mean(0)


@fault('builds')
class NoLosses(MoEP):
    class router(Router):
        def forward(self, x_ND):
            return super().forward(x_ND)[:2]


@fault('builds')
class ChoicesFirst(MoEP):
    class router(Router):
        def forward(self, x_ND):
            gate_NK, choice_NK, losses = super().forward(x_ND)
            return choice_NK, gate_NK, losses


@pytest.mark.parametrize('row, Model', FAULTS)
def test_a_fault_turns_its_row_red(row, Model):
    module = SimpleNamespace(Config=MoEPConfig, Model=Model)
    verdict, text = check.run_check(getattr(check, row), module, MoEPConfig(**MOEP))
    assert verdict == 'WRONG' and 'Traceback' not in text


@pytest.mark.slow
@pytest.mark.parametrize('row, Model', [param for param in FAULTS if param.id in (
    'OtherRows', 'GatesThatSumTo2', 'UnusedParameter', 'UnsavedBuffer')])
def test_a_fault_turns_no_other_row_red(row, Model):
    assert check_all(SimpleNamespace(Config=MoEPConfig, Model=Model), MOEP)[1] == [row]


@dataclass
class Growing(MoEPConfig):
    def __post_init__(self):
        self.n_expert += 1


@dataclass
class NotPlain(MoEPConfig):
    device: object = torch.device('cpu')


@pytest.mark.parametrize('Config', [Growing, NotPlain])
def test_a_config_that_does_not_rebuild_the_model(Config):
    module = SimpleNamespace(Config=Config, Model=MoEP)
    assert check.run_check(check.rebuilds, module, Config(**MOEP))[0] == 'WRONG'


def test_state_in_a_buffer_is_green():
    module = SimpleNamespace(Config=MoEPConfig, Model=SavedBuffer)
    assert check.run_check(check.resume, module, MoEPConfig(**MOEP))[0] == 'ok'


def test_a_router_that_only_an_auxiliary_loss_trains_is_named():
    """With K = 1 the gate is always 1."""
    module = import_model('moep')
    verdict, text = check.run_check(check.gradients, module, module.Config(**MOEP, top_k=1))
    assert verdict == 'ok'
    assert text.endswith('an auxiliary loss alone: parallel.0.router.linear.weight (4 in all)')
    _, text = check.run_check(check.gradients, module, module.Config(**MOEP))
    assert text == check.gradients.__doc__


def test_a_bug_keeps_its_traceback():
    class Bug(Changed):
        def change(self, x, idx):
            return 1 / 0
    module = SimpleNamespace(Config=MoEPConfig, Model=Bug)
    verdict, text = check.run_check(check.builds, module, MoEPConfig(**MOEP))
    assert verdict == 'WRONG' and 'return 1 / 0' in text and 'ZeroDivisionError' in text


# ---- The command --------------------------------------------------------------------------------

def test_the_models_of_the_docs_are_green(tmp_path):
    """Every model file that docs/routers.md prints."""
    page = (ROOT / 'docs/routers.md').read_text(encoding='utf-8')
    files = [text for text in re.findall('```python\n(.*?)```', page, re.DOTALL)
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
    monkeypatch.setattr(check, 'same', lambda a, b: False)
    lines = run('tools.check', *args, here=True, code=1).stdout.splitlines()
    assert lines[1].startswith('WRONG  shapes')


def test_the_entry_of_a_router(run, monkeypatch):
    monkeypatch.setattr(check, 'CHECKS', ())
    for name in ('arena.sigmoid', 'arena/sigmoid.py'):
        text = run('tools.check', name, here=True).stdout
        assert text == 'arena/sigmoid.py with arena/entries.py: router_sigmoid\n'
