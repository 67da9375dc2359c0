"""Every toy config trains, after those it starts from and the commands in its docstring; every
config of a paper can be built, and has the paper's size."""

import json
import re
from dataclasses import fields

import pytest
import torch

import moep
from moduleformer import insert_experts
from plumbing import checkpoint
from plumbing.settings import ROOT, import_model, make_config, read_config, read_settings

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
    if not s.init_from:                                  # else the model's sizes are that run's
        with torch.device('meta'):
            module.Model(make_config(module, keys))


def test_the_defaults_of_moep_are_the_papers():
    """Whoever copies the file trains it."""
    defaults = vars(moep.Config())
    paper = read_config(PAPER / 'moep.py')
    assert all(defaults[key] == value for key, value in paper.items() if key in defaults)


# ---- The sizes that the papers print -------------------------------------------------------------

def build(config, **changes):
    """A model without weights, of a paper's config (or of the defaults of a model) and changes."""
    path = PAPER / f'{config}.py'
    settings = read_config(path) if path.exists() else {}
    module = import_model(settings.get('model', config))
    names = {field.name for field in fields(module.Config)}
    keys = {key: value for key, value in settings.items() if key in names}
    with torch.device('meta'):
        return module.Model(module.Config(**keys | changes))


CONNECTIONS = ['share', 'gumbel1', 'gumbel2']
MOLM = 'moduleformer/molm_4b_k2'
LLAMA, SHARE = 'papaformer/stories/llama_256', 'papaformer/stories/share'
PATH = 'papaformer/stories_math/path_1'
# What the authors released: inner widths of 4d, no output projection
WIDE = dict(attn_out_proj=False, path_ffn_hidden=[512, 512])
MISTRAL = dict(vocab_size=32000, n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, ffn_hidden=14336)


@pytest.mark.parametrize('config, changes, total, within', [
    ('gpt2', {}, 28e6, 0.02), ('moep', {}, 28e6, 0.02), ('moep', dict(swiglu=True), 38e6, 0.02),
    (MOLM, {}, 4e9, 0.1), (MOLM, dict(n_layer=48), 8e9, 0.1),
    (LLAMA, {}, 32e6, 0.02), (LLAMA, dict(WIDE, ffn_hidden=1024), 33.6e6, 0.005),
    (LLAMA, dict(n_embd=192, n_head=6), 22.5e6, 0.02),
    (LLAMA, dict(WIDE, n_embd=192, n_head=6, ffn_hidden=768), 23.7e6, 0.005),
    (PATH, {}, 13.5e6, 0.02), (PATH, dict(WIDE, ffn_hidden=512), 13.6e6, 0.005),
    *((SHARE, dict(connection=name), 28.5e6, 0.02) for name in CONNECTIONS),
    *((SHARE, dict(WIDE, connection=name, ffn_hidden=1024), 29.4e6, 0.005) for name in CONNECTIONS),
    ('selfmoe', MISTRAL, 7_241_732_096, 0.0),            # the published model's own count
    ('selfmoe', dict(MISTRAL, n_expert=2, top_k=2), 13e9, 0.04),
    ('stlm/baseline', {}, 55.9e6, 0.002)])
def test_sizes_of_the_papers(config, changes, total, within):
    assert abs(build(config, **changes).count_params()[0] / total - 1) <= within


def test_what_the_papers_count_apart():
    for top_k, n_layer, active in ((2, 24, 350e6), (4, 24, 700e6), (2, 48, 700e6)):    # Table 1
        model = build(MOLM, top_k=top_k, n_layer=n_layer)
        assert abs(model.count_params()[1] / active - 1) < 0.1
    for router, trained in (('partial', 151e6), ('full', 266e6)):        # Tables 4 and 5
        with torch.device('meta'):
            new = insert_experts(build(MOLM), router=router)
        found = sum(p.numel() for p in new.parameters() if p.requires_grad)
        assert abs(found / trained - 1) < 0.01
    base = build('selfmoe', **MISTRAL)
    gated = build('selfmoe', **MISTRAL, gate='matrix')
    added = gated.count_params()[0] - base.count_params()[0]
    assert round(added / 1e9, 2) == 0.52                 # Self-MoE, section 4.1: 0.5B
    ends = sum(p.numel() for p in build('stlm/bytes_causal').ends.parameters())
    assert round(1 - ends / (50257 * 512), 2) == 0.93    # STLM, section 5.2: 90 to 95% fewer
