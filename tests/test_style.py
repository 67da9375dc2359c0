"""What ruff (pyproject.toml) cannot see: files to copy stand alone and are alike where they are
alike."""

import ast
import importlib.util
import sys
from itertools import combinations
from unittest import mock

import pytest

from common import ROOT
from test_contract import CASES, pair

MODELS = ['moep', 'papaformer', 'moduleformer', 'selfmoe', 'stlm', 'stlm_depth']
MODELS += ['arena/dense'] * (ROOT / 'arena').exists()    # a room that may be taken away
FAST = 'plumbing.stick_kernels', 'plumbing.rows'         # files run without them, only slower
OWN = {'Block', 'ParallelLayer', 'Router', 'Rows'}       # each paper has its own


def read(path):
    return path.read_text(encoding='utf-8')


def source(name):
    return read(ROOT / f'{name}.py')


@pytest.mark.parametrize('name', MODELS)
def test_model_files_stand_alone(name):
    """They import torch and the standard library, and train without the rest."""
    for node in ast.walk(ast.parse(source(name))):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module]
        for module in modules:
            root = module.split('.')[0]
            assert root == 'torch' or root in sys.stdlib_module_names or module in FAST, module
    spec = importlib.util.spec_from_file_location('alone', ROOT / f'{name}.py')
    alone = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, dict.fromkeys(FAST)):      # an import of them fails
        spec.loader.exec_module(alone)
    model = alone.Model(alone.Config(**CASES[name.removeprefix('arena/')][1]))
    model(*pair(model))[1].backward()


def helpers(text):
    """{name: text} of the functions and classes at the top of a file."""
    nodes = [node for node in ast.parse(text).body if getattr(node, 'name', None)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes if node.name not in OWN}


def drifted(texts):
    """Names that two files share with different texts."""
    pairs = combinations(map(helpers, texts), 2)
    return sorted({name for a, b in pairs for name in a.keys() & b.keys() if a[name] != b[name]})


def test_same_name_same_text():
    assert drifted(map(source, MODELS)) == []


def test_same_generate():
    """The others have rules of their own: any length, chunks of bytes, drafts."""
    texts = set()
    for name in {*MODELS} & {'moep', 'papaformer', 'selfmoe', 'arena/dense'}:
        text = source(name)
        texts |= {ast.get_source_segment(text, node) for node in ast.walk(ast.parse(text))
                  if isinstance(node, ast.FunctionDef) and node.name == 'generate'}
    assert len(texts) == 1


def test_nothing_is_unpickled():
    """Tests may: they read what they have just written."""
    folders = ('arena', 'docs', 'lab', 'papers', 'plumbing', 'tools')
    paths = [path for name in folders for path in (ROOT / name).rglob('*.py')]
    for path in [*ROOT.glob('*.py'), *(path for path in paths if path.parent.name != 'tests')]:
        text = read(path)
        assert 'pickle.load' not in text, path
        assert text.count('torch.load(') == text.count('weights_only=True'), path
