"""tools/check.py: green for every model and its variants; each planted fault turns its own row red."""

import importlib.util

import pytest

from conftest import ROOT
from plumbing.models import import_model
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
    assert (rows['sparse'][0] == 'ok') == (name in ('moep', 'moduleformer'))


@pytest.fixture
def patched(tmp_path):
    """A model file with some text replaced, as a module of its own."""
    def patched(name, old, new):
        text = (ROOT / f'{name}.py').read_text(encoding='utf-8')
        assert text.count(old) == 1
        (tmp_path / 'mine.py').write_text(text.replace(old, new), encoding='utf-8')
        spec = importlib.util.spec_from_file_location('mine', tmp_path / 'mine.py')
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return patched


def counting(steps):
    """A Router that counts its steps, and whose scores depend on how many there were."""
    count = '        if self.training:\n            self.steps = self.steps + 1\n'
    return LINEAR + FORWARD, f'{LINEAR}        {steps}\n{FORWARD}{count}        x_ND = x_ND / self.steps\n'


LINEAR = '        self.linear = nn.Linear(d, n_choices, bias=False)\n'
FORWARD = '\n    def forward(self, x_ND):\n'
DROPOUT = 'self.dropout(self.wte(idx) + self.wpe(position))'
POST_INIT = '    def __post_init__(self):\n'
SCATTER = 'gate_NK = torch.zeros_like(prob_NE).scatter(1, choice_NK, gate_NK)'
TOP_K = '[:, :self.config.top_k]'
BUFFER = "self.register_buffer('steps', torch.ones(()))"
FAULTS = {                                               # of moep.py: the row, what is replaced, by what
    'mask': ('causal', 'is_causal=causal', 'is_causal=False'),
    'expert choice': ('causal', 'weight.dtype)).softmax(-1)', 'weight.dtype)).softmax(0)'),
    'positions': ('cached', 'torch.arange(past, length', 'torch.arange(0, length - past'),
    'window': ('cached', 'idx[:, -max(1, limit // 2):]', 'idx[:, -limit:]'),
    'long prompt': ('cached', 'cache, new = [], idx[:, -limit:]', 'cache, new = [], idx[:, :limit]'),
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
    'unused parameter': ('gradients', LINEAR, f'{LINEAR}        self.scale = nn.Parameter(torch.ones(3))\n'),
    'number': ('buffers', *counting('self.steps = 1')),
    'tensor': ('buffers', *counting('self.steps = torch.ones(())')),
    'list': ('buffers', 'activate(h, swiglu):\n',
             'activate(h, swiglu, calls=[1]):\n    calls[0] += 1\n    h = h / calls[0]\n'),
    'unsaved buffer': ('resume', *counting(BUFFER.replace(')))', ')), persistent=False)'))),
    'dense': ('sparse', SCATTER, SCATTER.replace('gate_NK)', '1 / self.config.top_k)')),
    'gradient': ('sparse', 'rows.masked_fill(readers[:, :, None] < 0, 0).sum(1)', 'rows.sum(1)'),
    'size': ('counts', 'return total, total - idle', 'return total - idle, total'),
    'nothing active': ('counts', 'return total, total - idle', 'return total, 0'),
    'loss': ('shapes', 'return None, loss, aux', 'return None, loss + sum(aux.values()), aux')}


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
    ('moduleformer', POOLS, 'routes', 'gate_NK, choice_NK = best_NE', 'gate_NK, choice_NK = 2 * best_NE'),
    ('stlm', BYTES, 'causal', 'x + F.pad(before, (0, 0, 1, 0))', 'x + model.wte(chunks)'),
    ('stlm', BYTES, 'cached', 'done = whole - max(1, limit // 2)', 'done = whole - limit + 1')])
def test_faults_of_other_models(patched, name, config, row, old, new):
    module = patched(name, old, new)
    assert check.run_check(getattr(check, row), module, module.Config(**config))[0] == 'WRONG'


def test_state_in_a_buffer_is_green(patched):
    module = patched('moep', *counting(BUFFER))
    for row in (check.buffers, check.resume):
        assert check.run_check(row, module, module.Config(**MOEP))[0] == 'ok'


def test_a_crash_is_told_by_its_line(patched):
    module = patched('moep', 'rows = Rows(choice_NK, n_choices=len(self.proj_bias))', 'rows = 1 / 0')
    lines = (ROOT / 'moep.py').read_text(encoding='utf-8').splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if 'len(self.proj_bias))' in line)
    found = check.run_check(check.causal, module, module.Config(**MOEP))
    assert found == ('WRONG', f'mine.py:{number}: ZeroDivisionError: division by zero')


def test_table_and_exit_code(run, monkeypatch):
    args = ['moep', '--n_embd=12', '--n_parallel=0', '--n_layer=1']
    monkeypatch.setattr(check, 'CHECKS', (check.shapes, check.routes))
    lines = run('tools.check', *args, here=True).stdout.splitlines()
    assert lines[0] == 'moep.py with config/moep.py --n_embd=12 --n_parallel=0 --n_layer=1'
    assert [line.split()[:2] for line in lines[1:]] == [['ok', 'shapes'], ['-', 'routes']]
    monkeypatch.setattr(check, 'same', lambda a, b: False)
    assert run('tools.check', *args, here=True, code=1).stdout.splitlines()[1].startswith('WRONG  shapes')


@pytest.mark.parametrize('args, message', [
    ([], 'model'),
    (['nothing'], 'there is no model file nothing.py; there are: moduleformer, moep'),
    (['arena.sigmiod'], 'there is no model file arena.sigmiod.py; did you mean arena.sigmoid?'),
    (['moep', '--n_blok=3'], 'n_block'),
    (['moduleformer', '--config=config/moduleformer_lifelong.py'], 'starts from another run')])
def test_mistakes(run, args, message):
    text = run('tools.check', *args, code=2).stderr
    assert message in text and text.count('\n') == 1


@pytest.mark.slow
@pytest.mark.parametrize('args', ['moep', 'stlm --config config/stlm_bytes.py'])
def test_as_a_user(run, args):
    table = run('tools.check', *args.split()).stdout.splitlines()[1:]
    assert len(table) == 12 and {line.split()[0] for line in table} <= {'ok', '-'}
