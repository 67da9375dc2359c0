"""Every toy config trains, after those it starts from; every config of a paper can be built."""

import inspect
import json

import pytest
import torch

from plumbing.checkpoint import find_surgery
from plumbing.settings import ROOT, make_config, read_config, read_settings

TOYS = sorted(ROOT.glob('config/*.py'))
PAPER = ROOT / 'config/paper'


@pytest.mark.slow
@pytest.mark.parametrize('path', TOYS, ids=lambda path: path.stem)
def test_a_toy_config_trains(smoke, path):
    folder = smoke(f'config/{path.name}')
    log = [json.loads(line) for line in open(folder / 'log.jsonl')]
    assert [row['iter'] for row in log if 'loss' in row] == [1, 2]
    has_report = read_config(path).get('surgery') == 'prune_experts'
    assert any('surgery' in row for row in log) == has_report


@pytest.mark.parametrize('name', sorted(
    path.relative_to(PAPER).with_suffix('').as_posix() for path in PAPER.rglob('*.py')))
def test_a_config_of_a_paper(name):
    s, module, keys = read_settings([str(PAPER / f'{name}.py')])
    assert s.out_dir == f'out/paper/{name}'
    if s.surgery:
        parameters = inspect.signature(find_surgery(s.surgery, module)).parameters
        takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
        assert takes_all or {*s.surgery_args} <= {*parameters}
    if s.init_from:                                      # the model's sizes are those of that run
        return
    with torch.device('meta'):
        total, active = module.Model(make_config(module, keys)).count_params()
    assert total > 0 and active > 0
