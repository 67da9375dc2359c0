"""Every toy config trains, after those it starts from; every config of a paper has its size."""

import inspect
import json

import pytest
import torch

from plumbing.checkpoint import find_surgery
from plumbing.settings import ROOT, make_config, read_config, read_settings

TOYS = sorted(ROOT.glob('config/*.py'))
PAPER = ROOT / 'config/paper'
QUICK = ['--max_iters=2', '--batch_size=2', '--log_interval=1', '--eval_tokens=64',
         '--sample_tokens=4']
SIZES = {'gpt2': 28e6, 'moep': 28e6, 'moep_swiglu': 38e6, 'moduleformer/molm_4b_k2': 4e9,
         'moduleformer/molm_4b_k4': 4e9, 'moduleformer/molm_8b_k2': 8e9, 'stlm/baseline': 50e6}


@pytest.fixture(scope='module')
def train_config(run, data_dir, tmp_path_factory):
    """Train a config for two steps, once -> the log of its run."""
    home = tmp_path_factory.mktemp('configs')
    (home / 'config').symlink_to(ROOT / 'config')

    def train_config(name):
        log = home / f'out/{name}/log.jsonl'
        if not log.exists():
            starts = read_config(ROOT / f'config/{name}.py').get('init_from', [])
            for start in [starts] if isinstance(starts, str) else starts:
                train_config(start.removeprefix('out/'))
            settings = [*QUICK, f'--data_dir={data_dir}']
            run('train.py', f'config/{name}.py', *settings, cwd=home, here=True)
        return [json.loads(line) for line in open(log)]
    return train_config


@pytest.mark.slow
@pytest.mark.parametrize('path', TOYS, ids=lambda path: path.stem)
def test_a_toy_config_trains(train_config, path):
    log = train_config(path.stem)
    assert [row['iter'] for row in log if 'loss' in row] == [1, 2]
    surgery = read_config(path).get('surgery')
    assert any('surgery' in row for row in log) == (surgery in ('prune_experts', 'select_gates'))


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
    if name in SIZES:
        assert total == pytest.approx(SIZES[name], rel=0.12)
