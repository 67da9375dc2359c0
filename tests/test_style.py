"""What keeps the model files independent of each other, alike where they are alike, and short."""

import ast
import importlib
import inspect
import sys
from itertools import combinations

from conftest import ROOT

MODELS = [name for name in ('papaformer', 'moep', 'moduleformer', 'selfmoe', 'stlm') if (ROOT / f'{name}.py').exists()]


def helpers(source):
    """{name: text} of the functions and classes at the top of a file."""
    return {node.name: ast.get_source_segment(source, node) for node in ast.parse(source).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def drifted(sources):
    """Names that two files share with different texts."""
    found = [helpers(source) for source in sources]
    return sorted({name for a, b in combinations(found, 2) for name in a.keys() & b.keys() if a[name] != b[name]})


def test_same_name_same_text():
    assert drifted(['def f(x):\n    return x\n', 'def f(x):\n    return  x\n', 'def g():\n    pass\n']) == ['f']
    shared = [(ROOT / f'{name}.py').read_text() for name in MODELS]
    own = {'Block', 'ParallelLayer', 'Router'}           # each paper's own
    assert [name for name in drifted(shared) if name not in own] == []
    generate = {inspect.getsource(importlib.import_module(name).Model.generate) for name in ('moep', 'papaformer', 'selfmoe')}
    assert len(generate) == 1                            # the two others have rules of their own: no position table, chunks of bytes


def test_model_files_stand_alone():
    for name in MODELS:
        tree = ast.parse((ROOT / f'{name}.py').read_text())
        for node in ast.walk(tree):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                [node.module] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                root = module.split('.')[0]
                assert root == 'torch' or root in sys.stdlib_module_names, f'{name}.py imports {module}'


def test_sizes():
    limits = dict(moduleformer=600, stlm=600, train=600, prepare=600, eval_blimp=600)   # BLiMP's published table is 67 lines
    sources = {p.stem: p.read_text() for p in ROOT.glob('*.py')}
    for name in (name for name, text in sources.items() if name in MODELS or '\nConfig, Model =' not in text):     # yours may be longer
        lines = len(sources[name].splitlines())
        assert lines <= limits.get(name, 450), f'{name}.py has {lines} lines'
        assert max(map(len, sources[name].splitlines())) <= 150, f'{name}.py has a line that is too wide'


def test_every_model_has_config_docs_and_protocol():
    for name in MODELS:
        module = importlib.import_module(name)
        assert (ROOT / 'config' / f'{name}.py').exists() and (ROOT / 'docs' / f'{name}.md').exists()
        for method in ('features', 'forward', 'generate', 'routes', 'count_params'):
            assert callable(getattr(module.Model, method)), f'{name}.{method}'
