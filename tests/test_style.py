"""What keeps the files independent of each other, alike where they are alike, and short."""

import ast
import importlib
import inspect
import sys
from itertools import combinations

import pytest

from conftest import ROOT

MODELS = ['papaformer', 'moep', 'moduleformer', 'selfmoe', 'stlm', 'stlm_depth', 'strong']
SCRIPTS = ['lora', 'train', 'prepare', 'eval_blimp', 'finetune', 'sample']
ROUTERS = ['bias', 'hash', 'noisy', 'shared', 'sigmoid', 'zloss', 'moduleformer_bias', 'moduleformer_noisy',
           'moduleformer_sigmoid', 'moduleformer_zloss']
OPTIONAL = ['stick_kernels']                             # a model runs without it, only slower
LIMITS = dict(train=300, prepare=400, moduleformer=550, stick_kernels=300)       # lines; the others: 450
PLUMBING = sorted(ROOT.glob('plumbing/*.py'))
TOOLS = sorted(ROOT.glob('tools/*.py'))
TOP = sorted(ROOT.glob('*.py'))
ARENA = sorted(ROOT.glob('arena/*.py'))
FOLDERS = ('arena', 'config', 'docs', 'lab', 'tests')
ALL = [*TOP, *PLUMBING, *TOOLS, *(path for name in FOLDERS for path in sorted((ROOT / name).rglob('*.py')))]


def size(path):
    return len(lines(path))


def lines(path):
    return path.read_text(encoding='utf-8').splitlines()


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def is_yours(path):
    """A model that somebody added: it may be as long and as wide as they like."""
    is_model = '\nConfig, Model =' in path.read_text(encoding='utf-8')
    known = dict(arena=ROUTERS).get(path.parent.name, MODELS)
    return path.parent in (ROOT, ROOT / 'arena') and is_model and path.stem not in known


def imports(path):
    """The modules that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f'{node.module}.{alias.name}' for alias in node.names}
    return found


# ---- Sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', [*MODELS, *SCRIPTS, *OPTIONAL])
def test_a_file_at_the_top_is_short(name):
    found, limit = size(ROOT / f'{name}.py'), LIMITS.get(name, 450)
    assert found <= limit, f'{name}.py has {found} lines'


def test_what_is_at_the_top_is_known():
    assert sorted(path.stem for path in TOP if not is_yours(path)) == sorted([*MODELS, *SCRIPTS, *OPTIONAL])


def test_the_top_together():
    total = sum(size(ROOT / f'{name}.py') for name in [*MODELS, *SCRIPTS])
    assert total <= 4930, f'the files at the top have {total} lines'


def test_plumbing_together():
    total = sum(map(size, PLUMBING))
    assert total <= 3067, f'plumbing has {total} lines'


def test_a_tool_is_short():
    long = [f'{name_of(path)} has {size(path)} lines' for path in TOOLS if size(path) > 250]
    assert long == []


def test_a_router_is_short():
    long = [f'{name_of(path)} has {size(path)} lines' for path in ARENA
            if size(path) > 60 and not is_yours(path)]
    assert long == []


def test_no_line_is_too_wide():
    wide = [f'{name_of(path)}:{number}: {len(line)} columns' for path in ALL if not is_yours(path)
            for number, line in enumerate(lines(path), 1) if len(line) > 110]
    assert not wide, '\n'.join(wide)


def test_few_lines_are_wide():
    """Over 100 columns: at most one in twenty, or one."""
    found = []
    for path in [*TOP, *PLUMBING, *TOOLS, *ARENA]:
        wide = sum(len(line) > 100 for line in lines(path))
        if not is_yours(path) and wide > max(1, 0.05 * size(path)):
            found.append(f'{name_of(path)}: {wide} of {size(path)} lines')
    assert not found, '\n'.join(found)


# ---- Who imports whom ---------------------------------------------------------------------------


@pytest.mark.parametrize('name', MODELS)
def test_model_files_stand_alone(name):
    for module in imports(ROOT / f'{name}.py'):
        root = module.split('.')[0]
        known = root in ('torch', *OPTIONAL) or root in sys.stdlib_module_names
        assert known, f'{name}.py imports {module}'


def test_plumbing_imports_no_script_and_no_model():
    others = {*MODELS, *SCRIPTS, 'tools'}
    for path in PLUMBING:
        roots = {module.split('.')[0] for module in imports(path)}
        assert not roots & others, f'{name_of(path)} imports {roots & others}'


def test_who_imports_train():
    """Only for its step: everything else that is shared lies in plumbing."""
    found = [name_of(path) for path in [*TOP, *PLUMBING, *TOOLS] if 'train' in imports(path)]
    assert set(found) <= {'finetune.py', 'tools/measure.py'}


def test_train_knows_no_model_by_name():
    assert not imports(ROOT / 'train.py') & {*MODELS, 'lora'}
    words = ast.unparse(ast.parse((ROOT / 'train.py').read_text(encoding='utf-8')).body[1:])
    assert [name for name in MODELS if name in words] == []


# ---- Alike where they are alike -----------------------------------------------------------------


def helpers(source):
    """{name: text} of the functions and classes at the top of a file."""
    return {node.name: ast.get_source_segment(source, node) for node in ast.parse(source).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def drifted(sources):
    """Names that two files share with different texts."""
    found = [helpers(source) for source in sources]
    pairs = combinations(found, 2)
    return sorted({name for a, b in pairs for name in a.keys() & b.keys() if a[name] != b[name]})


def test_same_name_same_text():
    one, other = 'def f(x):\n    return x\n', 'def f(x):\n    return  x\n'
    assert drifted([one, other, 'def g():\n    pass\n']) == ['f']
    shared = [(ROOT / f'{name}.py').read_text(encoding='utf-8') for name in MODELS]
    own = {'Block', 'ParallelLayer', 'Router', 'Rows'}   # each paper's own
    assert [name for name in drifted(shared) if name not in own] == []
    models = [importlib.import_module(name).Model for name in ('moep', 'papaformer', 'selfmoe', 'strong')]
    # the others have rules of their own: no position table, chunks of bytes, drafts
    assert len({inspect.getsource(model.generate) for model in models}) == 1


@pytest.mark.parametrize('name', MODELS)
def test_every_model_has_config_docs_and_protocol(name):
    module = importlib.import_module(name)
    assert (ROOT / 'config' / f'{name}.py').exists() and (ROOT / 'docs' / f'{name}.md').exists()
    for method in ('features', 'forward', 'generate', 'routes', 'count_params'):
        assert callable(getattr(module.Model, method)), f'{name}.{method}'
