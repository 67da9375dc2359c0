"""tools/check.py: green for every model and its variants; each planted fault turns its own row red."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from conftest import ROOT
from plumbing.models import import_model
from plumbing.settings import Settings
from tools import check

SMALL = dict(vocab_size=32, block_size=12, n_layer=2, n_head=2, n_embd=16)
MOEP = dict(SMALL, n_parallel=2, n_head_parallel=1, n_embd_parallel=8, n_block=3, n_expert=3)
PAPA = dict(SMALL, n_parallel=2, path_embd=[8, 8], path_head=[1, 1])
POOLS = dict(SMALL, n_att=3, d_att=8, n_ffd=4, d_ffd=8, d_router=8, query_block=5)
SELF = dict(SMALL, n_layer=3, n_kv_head=1)
STLM = dict(SMALL, n_kv_head=1, ffn_hidden=16)
BYTES = dict(STLM, byte_limit=3, byte_embd=8, byte_layer=1, byte_head=2)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def check_all(module, config):
    """-> {row: (verdict, text)}, and the names of the red ones."""
    rows = {c.__name__: check.run_check(c, module, module.Config(**config)) for c in check.CHECKS}
    return rows, [name for name, (verdict, _) in rows.items() if verdict == 'WRONG']


@pytest.mark.parametrize('name, config', [
    ('moep', MOEP),
    slow('moep', dict(MOEP, sparse=False, top_k=1)),
    slow('moep', dict(MOEP, swiglu=True, expert_hidden=8)),
    slow('moep', dict(SMALL, n_parallel=0)),
    slow('papaformer', PAPA),
    ('papaformer', dict(PAPA, connection='gumbel1')),
    slow('papaformer', dict(PAPA, connection='gumbel2', hard=False)),
    slow('papaformer', dict(SMALL, n_parallel=0)),
    ('moduleformer', POOLS),
    slow('moduleformer', dict(POOLS, sparse=False, top_k=1)),
    slow('moduleformer', dict(POOLS, new_att=1, new_ffd=2, n_att=[2, 3])),
    slow('moduleformer', dict(POOLS, identity_kv=True, d_att=16, n_head=1)),
    slow('selfmoe', SELF),
    slow('selfmoe', dict(SELF, gate='scalar', gate_layers=[2])),
    ('selfmoe', dict(SELF, gate='matrix', n_expert=3, top_k=2)),
    slow('stlm', STLM),
    slow('stlm', dict(STLM, share='all')),
    ('stlm', dict(STLM, share='ffn', lora_rank=2)),
    ('stlm', BYTES),
    slow('stlm', dict(BYTES, decoder='parallel')),
    ('stlm_depth', dict(STLM, capacity=0.4)),
    slow('stlm_depth', dict(STLM, capacity=1.0))], ids=str)
def test_ours_are_green(name, config):
    rows, red = check_all(import_model(name), config)
    assert red == [], rows
    assert rows['sparse'][0] == ('ok' if name in ('moep', 'moduleformer') else '-')


@pytest.fixture
def load(tmp_path):
    """A text as a module of its own, mine.py."""
    def load(text):
        (tmp_path / 'mine.py').write_text(text, encoding='utf-8')
        spec = importlib.util.spec_from_file_location('mine', tmp_path / 'mine.py')
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return load


@pytest.fixture
def patched(load):
    """A model file with some text replaced."""
    def patched(name, old, new):
        text = (ROOT / f'{name}.py').read_text(encoding='utf-8')
        assert text.count(old) == 1
        return load(text.replace(old, new))
    return patched


def counting(steps, when='if True'):
    """A Router that counts its steps; its scores depend on how many there were, by 'else' in eval mode."""
    count = '        if self.training:\n            self.steps = self.steps + 1\n'
    use = f'        {when}:\n            x_ND = x_ND / self.steps\n'
    return LINEAR + FORWARD, f'{LINEAR}        {steps}\n{FORWARD}{count}{use}'


LINEAR = '        self.linear = nn.Linear(d, n_choices, bias=False)\n'
FORWARD = '\n    def forward(self, x_ND):\n'
DROPOUT = 'self.dropout(self.wte(idx) + self.wpe(position))'
POST_INIT = '    def __post_init__(self):\n'
SCATTER = 'gate_NK = gate_NK.new_zeros(len(gate_NK), n_choices).scatter(1, choice_NK, gate_NK)'
TOP_K = '[:, :self.config.top_k]'
BUFFER = "self.register_buffer('steps', torch.ones(()))"
FAULTS = {                                               # of moep.py: the row, what is replaced, by what
    'mask': ('causal', 'is_causal=causal', 'is_causal=False'),
    'next token': ('causal', 'return self.ln_f(x), aux',  # and hidden while the bias is zero
                   'return self.ln_f(x) + self.ln_f.bias * x.roll(-1, 1), aux'),
    'last token': ('causal', DROPOUT, f'{DROPOUT} + self.wte(idx[:, -1:])'),
    'expert choice': ('causal', 'weight.dtype)).softmax(-1)', 'weight.dtype)).softmax(0)'),
    'positions': ('cached', 'torch.arange(past, length', 'torch.arange(0, length - past'),
    'window': ('cached', 'idx[:, -max(1, limit // 2):]', 'idx[:, -limit:]'),
    'long prompt': ('cached', 'cache, new = [], idx[:, -limit:]', 'cache, new = [], idx[:, :limit]'),
    'short prompt': ('cached', 'cache, new = [], idx[:, -limit:]', 'cache, new = [], idx[:, 1:][:, -limit:]'),
    'one at a time': ('cached', 'F.linear(x, self.wte.weight)',
                      'F.linear(x, self.wte.weight) / min(2, idx.size(1))'),
    'only new tokens': ('cached', '        return idx\n', '        return idx[:, -max_new_tokens:]\n'),
    'pieces': ('cached', 'if 1 < T < S:', 'if 1 < T < S < 0:'),
    'batch': ('batched', 'return self.ln_f(x), aux', 'return self.ln_f(x - x.mean(0)), aux'),
    'noise': ('repeats', DROPOUT, DROPOUT.replace('self.', 'F.', 1)),
    'little noise': ('repeats', 'return self.ln_f(x), aux',
                     'return self.ln_f(x) * torch.rand(()) ** 1e-3, aux'),
    'growing config': ('rebuilds', POST_INIT, f'{POST_INIT}        self.n_expert += 1\n'),
    'object in config': ('rebuilds', POST_INIT, f"    device: object = torch.device('cpu')\n\n{POST_INIT}"),
    'random weights': ('rebuilds', 'nn.LayerNorm(c.n_embd)\n', 'torch.randn(c.n_embd).mul\n'),
    'gates': ('routes', '        gate_NK = gate_NK / gate_NK.sum(-1, keepdim=True)\n', ''),
    'negative gates': ('routes', 'gate_NK / gate_NK.sum(-1, keepdim=True)',
                       '99 * gate_NK / gate_NK.sum(-1, keepdim=True) - 49'),
    'choices': ('routes', f'best_NE{TOP_K}, order_NE{TOP_K}', 'best_NE, order_NE'),
    'choices in training': ('routes', f'best_NE{TOP_K}, order_NE{TOP_K}',
                            'best_NE[:, :K], order_NE[:, :K]'.replace('K', '(4 if self.training else 2)')),
    'root of 0': ('gradients', 'return self.ln_f(x), aux',
                  'return self.ln_f(x + (x - x).square().sqrt()), aux'),
    'unused parameter': ('gradients', LINEAR, f'{LINEAR}        self.scale = nn.Parameter(torch.ones(3))\n'),
    'number': ('resume', *counting('self.steps = 1')),
    'tensor': ('resume', *counting('self.steps = torch.ones(())')),
    'list': ('resume', 'activate(h, swiglu):\n',
             'activate(h, swiglu, calls=[1]):\n    calls[0] += 1\n    h = h / calls[0]\n'),
    'unsaved buffer': ('resume', *counting(BUFFER.replace(')))', ')), persistent=False)'))),
    'unsaved buffer in eval': ('resume', *counting(BUFFER.replace(')))', ')), persistent=False)'), 'else')),
    'dense': ('sparse', SCATTER, SCATTER.replace('choice_NK, gate_NK)', 'choice_NK, 0.5)')),
    'gradient': ('sparse', 'rows.masked_fill(readers[:, :, None] < 0, 0).sum(1)', 'rows.sum(1)'),
    'size': ('counts', 'return total, total - idle', 'return total - idle, total'),
    'nothing active': ('counts', 'return total, total - idle', 'return total, 0'),
    'loss': ('shapes', 'return None, loss, aux', 'return None, loss + sum(aux.values()), aux'),
    'ignored targets': ('shapes', 'ignore_index=-1', 'ignore_index=-100'),
    'each loss': ('shapes', 'loss = loss.view_as(targets) if', 'loss = 2 * loss.view_as(targets) if'),
    'mean loss': ('shapes', "if reduction == 'none' else loss", "if reduction == 'none' else 2 * loss"),
    'loss of each choice': ('builds', '(f_E * p_E).sum()', '(f_E * p_E)')}


@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_turns_its_row_red(patched, fault):
    row, old, new = FAULTS[fault]
    module = patched('moep', old, new)
    assert check.run_check(getattr(check, row), module, module.Config(**MOEP))[0] == 'WRONG'


@pytest.mark.slow
@pytest.mark.parametrize('fault', ['positions', 'batch', 'gates', 'unused parameter', 'unsaved buffer'])
def test_a_fault_turns_no_other_row_red(patched, fault):
    row, old, new = FAULTS[fault]
    assert check_all(patched('moep', old, new), MOEP)[1] == [row]


@pytest.mark.parametrize('name, config, row, old, new', [
    ('moduleformer', POOLS, 'routes', 'gate_NK, choice_NK = best_NE', 'gate_NK, choice_NK = -best_NE'),
    ('selfmoe', dict(SELF, n_expert=3, top_k=2), 'routes', 'prob_NE.topk(self.top_k)', 'prob_NE.topk(3)'),
    ('stlm', BYTES, 'causal', 'x + F.pad(before, (0, 0, 1, 0))', 'x + self.wte(chunks)'),
    ('stlm', BYTES, 'cached', 'done = whole - max(1, limit // 2)', 'done = whole - limit + 1')])
def test_faults_of_other_models(patched, name, config, row, old, new):
    module = patched(name, old, new)
    assert check.run_check(getattr(check, row), module, module.Config(**config))[0] == 'WRONG'


def test_states_of_another_shape(load):
    """What a forward of its own hides."""
    text = (ROOT / 'moep.py').read_text(encoding='utf-8')
    text = text.replace('return self.ln_f(x), aux', 'return self.ln_f(x)[None], aux')
    text = text.replace('        logits = F.linear(x, ', '        logits = F.linear(x[0], ')
    module = load(text)
    found = check.run_check(check.shapes, module, module.Config(**MOEP))
    assert found == ('WRONG', 'states of features() are not (B, T, width)')


def test_state_that_is_not_saved_is_named(patched):
    module = patched('moep', *counting('self.steps = 1'))
    found = check.run_check(check.resume, module, module.Config(**MOEP))
    assert found == ('WRONG', 'training changes parallel.0.router.steps; use register_buffer')


def test_state_in_a_buffer_is_green(patched):
    module = patched('moep', *counting(BUFFER))
    assert check.run_check(check.resume, module, module.Config(**MOEP))[0] == 'ok'


def test_a_frozen_parameter_is_green(patched):
    frozen = '        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)\n'
    module = patched('moep', LINEAR, LINEAR + frozen)
    assert check.run_check(check.gradients, module, module.Config(**MOEP))[0] == 'ok'


def test_gradients_that_are_only_rounding_are_green():
    """At top_k = 1 the gate is always 1, so the loss has no gradient for the router."""
    strong = import_model('strong')
    config = strong.Config(**SMALL, n_expert=4, top_k=1)
    assert check.run_check(check.sparse, strong, config)[0] == 'ok'
    verdict, text = check.run_check(check.gradients, strong, config)
    assert verdict == 'ok' and text.endswith('loss alone: blocks.0.ffn.router.linear.weight (2 in all)')


@pytest.mark.parametrize('old, new', [
    ('gate_NK / gate_NK.sum(-1, keepdim=True)', 'gate_NK.detach() / gate_NK.detach().sum(-1, keepdim=True)'),
    ('gate_NK / gate_NK.sum(-1, keepdim=True)', 'torch.full_like(gate_NK, 1 / self.config.top_k)'),
    ('top_k: int = 2 ', 'top_k: int = 1 ')], ids=['detached', 'constant', 'K = 1'])
def test_a_router_that_learns_from_an_auxiliary_loss_alone_is_named(patched, old, new):
    module = patched('moep', old, new)
    verdict, text = check.run_check(check.gradients, module, module.Config(**MOEP))
    assert verdict == 'ok'
    assert text.endswith('; from an auxiliary loss alone: parallel.0.router.linear.weight (4 in all)')


def test_where_the_loss_reaches_every_parameter_none_is_named():
    module = import_model('moep')
    text = check.run_check(check.gradients, module, module.Config(**MOEP))[1]
    assert text == check.gradients.__doc__


def test_noise_is_named_first(patched):
    rows, red = check_all(patched('moep', DROPOUT, DROPOUT.replace('self.', 'F.', 1)), MOEP)
    assert red[0] == 'repeats', rows


def test_two_kinds_of_routers_are_both_named(patched):
    line = 'self.router = router(D, P, config)'
    module = patched('moep', line, line.replace('router(', 'type("Another", (router,), {})('))
    verdict, text = check.run_check(check.routes, module, module.Config(**MOEP))
    assert verdict == 'ok'
    assert text.startswith("Another, Router: a token's choices differ")


# ---- Routers that are a file of their own --------------------------------------------------------


ROUTER = """import torch
from {base} import {model}, {model}Config, Router

class MyRouter(Router):
{body}

class Mine({model}):
    router = MyRouter
    gates_sum_to_1 = False

Config, Model = {model}Config, Mine
"""


@pytest.fixture
def router(load):
    """A model file that replaces the router, and its Config."""
    def router(base, body):
        model, config = dict(moep=('MoEP', MOEP), moduleformer=('ModuleFormer', POOLS))[base]
        module = load(ROUTER.format(base=base, model=model, body=body))
        return module, module.Config(**config)
    return router


def test_the_router_of_the_docs(load):
    """As it stands there, and with the loss of its own that the page adds."""
    page = (ROOT / 'docs/routers.md').read_text()
    whole, _, with_loss, *_ = re.findall('```python\n(.*?)```', page, re.DOTALL)
    for text in (whole, re.sub('        return .*\n', with_loss, whole)):
        module = load(text)
        rows, red = check_all(module, MOEP)
        assert red == [], rows
    aux = module.Model(module.Config(**MOEP))(torch.zeros(1, 4, dtype=torch.long))[2]
    assert list(aux) == ['block_balance', 'block_z', 'expert_balance', 'expert_z']


def test_the_router_of_the_docs_that_looks_back(load):
    page = (ROOT / 'docs/routers.md').read_text()
    module = load(re.findall('```python\n(.*?)```', page, re.DOTALL)[-1])
    rows, red = check_all(module, dict(SMALL, n_expert=4, top_k=2))
    assert red == [] and 'BackRouter' in rows['routes'][1], rows
    model = module.Model(module.Config(**SMALL, n_expert=4, top_k=2))
    model(torch.zeros(2, 3, dtype=torch.long))
    router, x_ND = model.blocks[0].ffn.router, torch.randn(6, 16)
    assert router(x_ND)[0].equal(router(x_ND)[0])        # as with --checkpoint_activations


def test_the_experts_of_the_docs(load):
    page = (ROOT / 'docs/routers.md').read_text()
    module = load(re.findall('```python\n(.*?)```', page, re.DOTALL)[-2])
    rows, red = check_all(module, dict(SMALL, n_expert=4, top_k=2))
    assert red == [], rows
    assert 'copy' in dir(module.Model(module.Config(**SMALL, n_expert=4, top_k=2)).blocks[1].ffn)


def changed(line, when='True'):
    return f"""
    def forward(self, x_ND):
        gates, choices, losses = super().forward(x_ND)
        if {when}:
            {line}
        return gates, choices, losses"""


TWICE = 'choices = choices[:, :1].expand(-1, 2)'


@pytest.mark.parametrize('base, first', [('moep', 'shrink'), ('moduleformer', 'blocks.0.att')])
@pytest.mark.parametrize('when, mode', [
    ('True', 'eval'), ('self.training', 'training'), ('not self.training', 'eval')])
def test_a_choice_that_is_taken_twice(router, base, first, when, mode):
    found = check.run_check(check.routes, *router(base, changed(TWICE, when)))
    assert found == ('WRONG', f'{first}: in {mode} a token takes one choice twice')


def test_a_choice_that_is_taken_twice_is_told_before_its_gates(router):
    """They do not sum to 1 either, and gates_sum_to_1 = False would hide that."""
    module, config = router('moep', changed(TWICE))
    module.Model.gates_sum_to_1 = True
    assert 'one choice twice' in check.run_check(check.routes, module, config)[1]


def test_one_token_that_takes_a_choice_twice(router):
    line = 'choices = choices.clone(); choices[-1] = 1'
    assert 'one choice twice' in check.run_check(check.routes, *router('moduleformer', changed(line)))[1]


def test_experts_that_choose_tokens(router):
    """In training a token may be chosen by all experts: it then costs more than is counted."""
    line = 'gates, choices = gates.new_full((len(x_ND), 3), 1 / 3), torch.arange(3).expand(len(x_ND), 3)'
    found = check.run_check(check.routes, *router('moep', changed(line, 'self.training')))
    assert found == ('WRONG', 'shrink: in training a token takes 3 choices; its cost is counted from '
                              'top_k = 2: take no more')


def test_what_reads_sparse(patched):
    for change, verdict in ((1, 'WRONG'), (1e-6, 'ok')):
        scaled = f'self.ln_f(x) * (1 + {change} * self.config.sparse), aux'
        module = patched('moep', 'self.ln_f(x), aux', scaled)
        assert check.run_check(check.sparse, module, module.Config(**SMALL, n_parallel=0))[0] == verdict


@pytest.mark.parametrize('base', ['moep', 'moduleformer'])
@pytest.mark.parametrize('line, shapes', [
    ('return gates, choices', '(48, 2), (48, 2)'),
    ('return', 'NoneType'),
    ('return gates', '(48, 2)'),
    ('losses = None', '(48, 2), (48, 2), NoneType'),
    ('losses = gates.sum()', '(48, 2), (48, 2), ()'),
    ('gates = gates.repeat(1, 2)', '(48, 4), (48, 2), dict'),
    ('gates, choices = gates[:, :1], choices[:, :1]', '(48, 1), (48, 1), dict')],
    ids=['two values', 'nothing', 'gates', 'no loss', 'a scalar', 'gates of all', 'too few'])
def test_a_router_that_returns_the_wrong_thing(router, base, line, shapes):
    """It is named before the model fails over it."""
    found = check.run_check(check.builds, *router(base, changed(line)))
    assert found == ('WRONG', f'MyRouter.forward returned {shapes}; it must return gates and choices, '
                              'both (N, top_k) = (48, 2), and a dict of losses (docs/routers.md)')


@pytest.mark.parametrize('line, dtype', [
    ('gates, choices = choices, gates', 'torch.float32'), ('choices = choices.int()', 'torch.int32')])
def test_choices_that_are_no_indices(router, line, dtype):
    found = check.run_check(check.builds, *router('moep', changed(line)))
    assert found == ('WRONG', f'MyRouter.forward returned choices of {dtype}; they are indices, '
                              'torch.int64, and come after the gates')


@pytest.mark.parametrize('loss', ['gates', '1.0', 'gates.sum() / 0'])
def test_a_loss_that_is_not_one_number(router, loss):
    found = check.run_check(check.builds, *router('moep', changed(f'losses = dict(balance={loss})')))
    assert found == ('WRONG', "aux['block_balance'] is not a tensor of one finite number")


def test_the_router_is_named(load):
    """A misspelt `router = MyRouter` would go unnoticed: the model would take its own."""
    text = ROUTER.format(base='moep', model='MoEP', body='    pass')
    for line, name in (('router =', 'MyRouter'), ('rooter =', 'Router')):
        module = load(text.replace('router =', line))
        verdict, said = check.run_check(check.routes, module, module.Config(**MOEP))
        assert verdict == 'ok' and said.startswith(f"{name}: a token's choices differ")


def test_a_buffer_that_is_written_in_eval_mode(patched):
    counted = counting(BUFFER)
    module = patched('moep', counted[0], counted[1].replace('if self.training', 'if True'))
    found = check.run_check(check.repeats, module, module.Config(**MOEP))
    assert found == ('WRONG', 'two passes differ; is noise drawn, or a buffer written?')


def test_a_buffer_that_only_a_loss_reads(patched):
    """Written in eval mode, where it changes no logit."""
    module = patched('moep', LINEAR, f'{LINEAR}        {BUFFER}\n')
    forward = module.Router.forward

    def count(self, x_ND):
        gates, choices, losses = forward(self, x_ND)
        self.steps += 1
        return gates, choices, dict(balance=losses['balance'] * self.steps)
    module.Router.forward = count
    assert check.run_check(check.repeats, module, module.Config(**MOEP))[0] == 'WRONG'


@pytest.mark.parametrize('gates, note', [
    ('gates', ''),
    ('gates.detach()', '; from an auxiliary loss alone: parallel.0.router.linear.weight (4 in all)')])
def test_gates_without_a_gradient_are_noted(router, gates, note):
    module, config = router('moep', changed(f'gates = {gates}'))
    assert check.run_check(check.gradients, module, config) == ('ok', check.gradients.__doc__ + note)


WRONG_LOSS = """
    def forward(self, x_ND):
        return *super().forward(x_ND)[:2], dict(balance=self.balance_loss(x_ND, None))"""
NO_SUPER = """
    def __init__(self, d, n_choices, config):
        self.linear = torch.nn.Linear(d, n_choices)"""


def line_of(path, text):
    """Where a text stands last, as file:line."""
    lines = path.read_text(encoding='utf-8').splitlines()
    return f'{path.name}:{max(i for i, line in enumerate(lines, 1) if text in line)}'


@pytest.mark.parametrize('body, file, line, error', [
    (changed('losses = dict(balance=None)'), 'moep.py', "aux[f'block_{name}'] =", 'TypeError: '),
    (WRONG_LOSS, 'mine.py', 'self.balance_loss', 'TypeError: scatter()'),
    (NO_SUPER, 'mine.py', 'self.linear', 'AttributeError: cannot assign module before')],
    ids=['no loss', 'wrong loss', 'no super().__init__()'])
def test_a_model_that_does_not_run_is_told_once(run, monkeypatch, tmp_path, router, body, file, line, error):
    """By the last line of the user's own file; if there is none, by that of another model file."""
    module, _ = router('moep', body)
    monkeypatch.setattr(check, 'read_settings', lambda argv: (Settings(), module, MOEP))
    head, *rows = run('tools.check', 'mine', cwd=tmp_path, here=True, code=1).stdout.splitlines()
    place = line_of((tmp_path if file == 'mine.py' else ROOT) / file, line)
    assert len(rows) == 1 and rows[0].startswith(f'WRONG  builds     {place}: {error}')


def test_a_forward_of_two_values(patched):
    module = patched('moep', 'return logits, None, aux', 'return logits, aux')
    found = check.run_check(check.builds, module, module.Config(**MOEP))
    assert found == ('WRONG', 'forward() does not return (logits, loss, aux)')


def test_nan_is_told_once(run, patched, monkeypatch, tmp_path):
    module = patched('moep', 'gate_NK / gate_NK.sum(-1, keepdim=True)', 'gate_NK / (0 * gate_NK)')
    monkeypatch.setattr(check, 'read_settings', lambda argv: (Settings(), module, MOEP))
    rows = run('tools.check', 'mine', cwd=tmp_path, here=True, code=1).stdout.splitlines()[1:]
    assert rows == ['WRONG  builds     logits are nan; is something divided by 0?']


def test_a_crash_is_told_by_its_line(patched):
    line = 'rows = Rows(gate_NK, choice_NK, self.config.n_block, self.config.sparse)'
    module = patched('moep', line, 'rows = 1 / 0')
    found = check.run_check(check.causal, module, module.Config(**MOEP))
    place = line_of(Path(module.__file__), 'rows = 1 / 0')
    assert found == ('WRONG', f'{place}: ZeroDivisionError: division by zero')


def test_table_and_exit_code(run, monkeypatch):
    args = ['moep', '--n_embd=12', '--n_parallel=0', '--n_layer=1']
    monkeypatch.setattr(check, 'CHECKS', (check.shapes, check.routes))
    lines = run('tools.check', *args, here=True).stdout.splitlines()
    assert lines[0] == 'moep.py with config/moep.py --n_embd=12 --n_parallel=0 --n_layer=1'
    assert [line.split()[:2] for line in lines[1:]] == [['ok', 'shapes'], ['-', 'routes']]
    monkeypatch.setattr(check, 'same', lambda a, b: False)
    assert run('tools.check', *args, here=True, code=1).stdout.splitlines()[1].startswith('WRONG  shapes')


@pytest.mark.parametrize('name, head', [
    ('arena.sigmoid', 'arena/sigmoid.py with config/arena/toy/router_sigmoid.py'),
    ('arena/sigmoid.py', 'arena/sigmoid.py with config/arena/toy/router_sigmoid.py'),
    ('arena.moduleformer_bias',
     'arena/moduleformer_bias.py with config/arena/toy/router_moduleformer_bias.py'),
    ('moep.py', 'moep.py with config/moep.py'),
    ('./strong.py', 'strong.py with config/strong.py')])
def test_which_config_is_taken(run, monkeypatch, name, head):
    monkeypatch.setattr(check, 'CHECKS', ())
    assert run('tools.check', name, here=True).stdout.splitlines() == [head]


def test_a_config_of_the_same_name_comes_first(run, monkeypatch, tmp_path):
    """Of those in config/arena/toy; one that is named comes before both."""
    monkeypatch.setattr(check, 'CHECKS', ())
    toy = tmp_path / 'config/arena/toy'
    toy.mkdir(parents=True)
    for file in ('router_sigmoid.py', 'sigmoid.py', 'other.py'):
        (toy / file).write_text("model = 'arena.sigmoid'\nn_embd = 12\nn_parallel = 0\n")
    for args, file in (([], 'sigmoid.py'), (['--config', 'config/arena/toy/other.py'], 'other.py')):
        said = run('tools.check', 'arena.sigmoid', *args, cwd=tmp_path, here=True).stdout
        assert said == f'arena/sigmoid.py with config/arena/toy/{file}\n'


@pytest.mark.parametrize('args, message', [
    ([], 'model'),
    (['arena/nothing.py'], 'there is no model file arena/nothing.py; '),
    (['nothing'], 'there is no model file nothing.py; there are: '),
    (['nothing'], ', and those in arena/'),
    (['arena.sigmiod'], 'there is no model file arena/sigmiod.py; did you mean arena.sigmoid?'),
    (['arena/bias.py', '--config=config/arena/toy/router_sigmoid.py'],
     "config/arena/toy/router_sigmoid.py has model = 'arena.sigmoid', not 'arena.bias'"),
    (['config/arena/toy/moep.py'], 'config/arena/toy/moep.py is a config: name its model file, such as'),
    (['moep', '--n_blok=3'], 'n_block'),
    (['moduleformer', '--config=config/moduleformer_lifelong.py'], 'starts from another run')])
def test_mistakes(run, args, message):
    text = run('tools.check', *args, code=2).stderr
    assert message in text and text.count('\n') == 1


@pytest.mark.slow
@pytest.mark.parametrize('args', ['moep', 'stlm --config config/stlm_bytes.py'])
def test_as_a_user(checked, args):
    table = checked[args].result().stdout.splitlines()[1:]
    assert len(table) == 11 and {line.split()[0] for line in table} <= {'ok', '-'}
