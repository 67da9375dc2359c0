"""Every toy config trains, after those it starts from and the commands in its docstring; every
config of a paper can be built."""

import json
import re

import pytest
import torch

from plumbing import checkpoint
from plumbing.settings import ROOT, make_config, read_settings

TOYS = sorted(ROOT.glob('config/*.py'))
PAPER = ROOT / 'config/paper'


@pytest.mark.slow
@pytest.mark.parametrize('path', TOYS, ids=lambda path: path.stem)
def test_a_toy_config_trains(smoke, path):
    folder = smoke(f'config/{path.name}')
    log = [json.loads(line) for line in open(folder / 'log.jsonl')]
    assert [row['iter'] for row in log if 'loss' in row] == [1, 2]


@pytest.mark.parametrize('name', sorted(
    path.relative_to(PAPER).with_suffix('').as_posix() for path in PAPER.rglob('*.py')))
def test_a_config_of_a_paper(name, monkeypatch):
    paper = name.split('/')[0]
    monkeypatch.setattr(checkpoint, 'read_checkpoint', lambda path, mmap: dict(model=paper))
    s, module, keys = read_settings([str(PAPER / f'{name}.py')])
    assert s.out_dir == f'out/paper/{name}'
    named = re.findall(r'tools\.surgery (\w+)', (PAPER / f'{name}.py').read_text())
    if (ROOT / 'tools').exists():                        # a room that may be taken away
        assert {*named} <= checkpoint.find_surgeries(module.Model).keys()
    if s.init_from:                                      # the model's sizes are those of that run
        return
    with torch.device('meta'):
        total, active = module.Model(make_config(module, keys)).count_params()
    assert total > 0 and active > 0
