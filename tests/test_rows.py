"""How rows of experts are chosen and multiplied: the fast forms of plumbing/rows.py against the
plain ones of the model files, outputs and gradients. (The rest: the oracles of the models.)"""

import functools
import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F

import moduleformer
import moep
import selfmoe
from common import ROOT
from oracles import with_gradients
from plumbing import rows

FILES = dict(moep=moep, moduleformer=moduleformer, selfmoe=selfmoe)
if importlib.util.find_spec('arena'):                    # a room: it may be taken away
    FILES['dense'] = importlib.import_module('arena.dense')


def load(name, folder, change=lambda text: text):
    """A model file as a module of its own, from a folder, after a change of its text."""
    path = folder / f'{name}_{len([*folder.iterdir()])}.py'
    path.write_text(change((ROOT / FILES[name].__file__).read_text(encoding='utf-8')), 'utf-8')
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(name, folder):
    return load(name, folder, lambda text: text.replace('from plumbing.rows', 'from nowhere'))


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
@pytest.mark.parametrize('sparse', [True, False])
@pytest.mark.parametrize('K', [1, 2, 3])
def test_the_fast_rows_are_the_plain_ones(tmp_path, K, sparse, dtype):
    """With tokens that take fewer than K: a third of the gates is 0."""
    torch.manual_seed(0)
    N, E, D, H = 50, 4, 8, 16
    choice = torch.rand(N, E).argsort(-1)[:, :K]
    gate = torch.rand(N, K, dtype=dtype) * (torch.rand(N, K) > 1 / 3)
    new = lambda *shape: torch.randn(shape, dtype=dtype)

    def as_moep(Rows, gate, x, x_NED, gain, bias, fc, fc_bias, down, down_bias):
        r = Rows(gate, choice, E, sparse)
        h = r.norm_linear(r.spread(x) + r.pick(x_NED), gain, bias, fc, fc_bias)
        return r.combine(r.linear(h.tanh(), down, down_bias))

    def as_moduleformer(Rows, gate, x, fc, down):
        r = Rows(gate, choice, E, sparse)
        h = r.restore(r.linear(r.spread(x), fc))
        return r.combine(r.linear(r.sort(h.tanh()), down))

    def as_dense(Rows, gate, x, fc, down):
        return Rows(gate, choice, E, sparse).feed_forward(x, fc, down)
    maps = new(E, D, H), new(E, H, D)
    cases = dict(
        dense=(as_dense, [gate, new(N, D), *maps]),
        moep=(as_moep, [gate, new(N, D), new(N, E, D), new(E, D), new(E, D), maps[0], new(E, H),
                        maps[1], new(E, D)]),
        moduleformer=(as_moduleformer, [gate, new(N, D), *maps]))
    for name in cases.keys() & FILES.keys():
        use, inputs = cases[name]
        close = {} if dtype == torch.float64 else dict(rtol=1e-4, atol=1e-5)
        both = (with_gradients(functools.partial(use, Rows), inputs)
                for Rows in (plain(name, tmp_path).Rows, rows.Rows))
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b, **close)


def test_the_fast_projections_are_the_plain_ones(tmp_path):
    torch.manual_seed(0)
    P, D, n_head = 3, 8, 2
    inputs = [torch.randn(*shape, dtype=torch.float64)
              for shape in ((2, 5, D), (P, D), (P, D), (P, D, 3 * D), (P, 3 * D))]
    functions = plain('moep', tmp_path).project_all, rows.project_all
    both = (with_gradients(lambda *tensors: torch.stack([*project(*tensors, n_head)]), inputs)
            for project in functions)
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('name', FILES)
def test_an_edited_plain_form_is_what_runs(tmp_path, name, capsys):
    edit = lambda text: text.replace('y_RD = self.gate[:, None] * y_RD', 'y_RD = 7 * y_RD')
    comment = lambda text: text.replace('# tokens -> rows', '# another comment')
    assert load(name, tmp_path, comment).Rows is rows.Rows
    assert not capsys.readouterr().err
    edited = load(name, tmp_path, edit)
    assert edited.Rows is not rows.Rows and 'Rows in' in capsys.readouterr().err
    r = edited.Rows(torch.tensor([[0.5], [0.0]]), torch.tensor([[0], [1]]), 2, True)
    assert r.combine(r.spread(torch.ones(2, 3))).tolist() == [[7.0] * 3, [0.0] * 3]


def test_every_plain_form_is_known(tmp_path):
    """If one was changed on purpose, and its fast form with it: put its checksum into KNOWN."""
    modules = {name: plain(name, tmp_path) for name in FILES}
    forms = [*(module.Rows for module in modules.values()), modules['moep'].project_all]
    assert {*map(rows.checksum, forms)} == rows.KNOWN or 'dense' not in FILES


@pytest.mark.parametrize('E, ends', [
    (1, [50]), (3, [0, 1, 70]), (40, [min(2 * i, 61) for i in range(1, 41)]), (3, [90] * 3)])
@pytest.mark.parametrize('rest', [0, 33])
def test_grouped_products(E, ends, rest, monkeypatch):
    """By torch's kernel; by a loop where widths or an older torch rule it out. Also with groups
    without rows; a gradient of one number, expanded; and `rest` rows of no group, whose product is
    0."""
    torch.manual_seed(0)
    ends = torch.tensor(ends, dtype=torch.int32)
    group = torch.searchsorted(ends, torch.arange(ends[-1]), right=True)
    for has_kernel, d_in, d_out in ((True, 8, 16), (True, 7, 16), (True, 8, 5), (False, 8, 16)):
        if not has_kernel:
            monkeypatch.delattr(F, 'grouped_mm')
        inputs = torch.randn(len(group) + rest, d_in), torch.randn(E, d_in, d_out)

        def slow(x, w):
            return F.pad((x[:len(group), None] @ w[group])[:, 0], (0, 0, 0, rest))
        for weight in (None, torch.ones(()).expand(len(inputs[0]), d_out)):
            fast = with_gradients(lambda x, w: rows.grouped_mm(x, w, ends), inputs, weight)
            exact = with_gradients(slow, [tensor.double() for tensor in inputs], weight)
            for a, b in zip(fast, exact, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)
