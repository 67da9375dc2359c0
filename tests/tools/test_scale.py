"""tools/scale.py: its sums by hand, and as a user runs it. tests/test_shard.py compares the memory of
weights, gradients and moments with what two processes hold."""

import json

import pytest
import torch

import moduleformer
from plumbing.models import sketch
from plumbing.settings import Settings
from tools import scale

CONFIG = 'config/paper/moduleformer/molm_4b_k2.py'


def test_rows_are_divided():
    """16 experts: two for each of 8 processes, one for each of 16, and beyond that no fewer."""
    stack = torch.empty(16, 3, 5, device='meta')
    assert [scale.held(stack, world) for world in (1, 3, 8, 16, 64)] == [240, 90, 30, 15, 15]
    assert scale.held(torch.empty((), device='meta'), 8) == 1


def test_memory_by_hand():
    keys = dict(vocab_size=5000, block_size=8, n_layer=3, n_embd=4, n_att=2, d_att=4, n_head=1, n_ffd=2,
                d_ffd=6, top_k=2, d_router=5, identity_kv=True)
    model = sketch(moduleformer, keys)
    block = 16 + 2 * (4 * 5 + 2 * 5) + 2 * 2 * 4 * 4 + 2 * 2 * 4 * 6     # norms, routers, attention, FFNs
    rest = 2 * 5000 * 4 + 8
    found = scale.memory(model, Settings(model='moduleformer', batch_size=2), 8, world=1)
    assert found['weights'] == found['gradients'] == found['AdamW'] / 2 == 4 * (3 * block + rest)
    inside = 4 * (4 * 4 + 2 * 5) + 2 * 4 + 2 * 2 * (4 * 4 + 2 * 4 + 2 * 6)       # bytes for a token
    assert found['blocks'] == 3 * 16 * inside and found['in bfloat16'] == 2 * 3 * block
    assert found['logits'] == 14 * 16 * 5000
    s = Settings(model='moduleformer', batch_size=2, shard=True, checkpoint_activations=True, memory=8)
    found = scale.memory(model, s, 8, world=2)
    assert found['gathered'] == 4 * (rest + 2 * block) and found['gradients to send'] == 4 * (rest + block)
    assert found['in bfloat16'] == 2 * block
    assert found['block inputs'] == 4 * 3 * 16 * 4 and found['one block'] == 2 * 16 * inside
    assert found['segment memory'] == 2 * 2 * 3 * 2 * 16 * 4     # keys and values, two bytes each
    s.gradient_accumulation_steps = 3
    more = scale.memory(model, s, 8, world=2)
    assert more['gradients to send'] == 4 * (3 * block + rest)
    assert more['segment memory'] == 3 * found['segment memory']
    s.shard = False                                      # DDP: every process has all of it
    whole = scale.memory(model, s, 8, world=2)
    assert whole['weights'] == whole['gradients'] == whole['gradients to send'] == 4 * (3 * block + rest)
    assert whole['AdamW'] == 8 * (3 * block + rest) and 'gathered' not in whole


@pytest.mark.filterwarnings('ignore:mkldnn')
@pytest.mark.parametrize('keys', [dict(d_att=128, identity_kv=True), dict(d_att=64)])
def test_what_a_block_keeps(keys):
    """The formula, and what autograd really saves for backward, under autocast."""
    config = moduleformer.ModuleFormerConfig(vocab_size=50, n_layer=1, n_embd=128, n_att=4, n_head=1, n_ffd=4,
                                             d_ffd=256, d_router=32, **keys)
    block = moduleformer.ModuleFormer(config).blocks[0]
    weights = {p.data_ptr() for p in block.parameters()}
    saved = {}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor
    x = torch.randn(1, 256, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), \
            torch.autocast('cpu', torch.bfloat16):
        block(x, [])
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    formula = 256 * scale.in_moduleformer(config) + 2 * scale.count(block.parameters())
    assert formula == pytest.approx(measured, rel=0.1)


def test_traffic_by_hand():
    keys = dict(vocab_size=100, block_size=8, n_layer=3, n_embd=4, n_att=2, d_att=4, n_head=1, n_ffd=4,
                d_ffd=6, top_k=2, d_router=5, identity_kv=True)
    model = sketch(moduleformer, keys)
    total = scale.count(model.parameters())
    assert scale.fsdp_bytes(model, 4) == 3 * 4 * total * 3 / 4
    s = Settings(model='moduleformer')
    plain, _ = scale.expert_bytes(model, s, 4)
    assert plain == 2 * 2 * 2 * 3 * (2 * (4 + 4) + 2 * 4) * 3 / 4
    s.checkpoint_activations = True                      # forward once more
    per_token, gradients = scale.expert_bytes(model, s, 4)
    assert per_token == 1.5 * plain
    experts = 3 * (2 * 2 * 4 * 4 + 2 * 4 * 4 * 6)
    of_pairs = 3 * 2 * 4 * 4                             # two copies of each attention module
    assert gradients == 2 * 4 * ((total - experts) * 3 / 4 + of_pairs / 2)


def test_the_busiest_gpu():
    load = [0.4, 0.1, 0.3, 0.2]
    assert scale.imbalance(load, 2) == pytest.approx(1.4)        # experts 0 and 2 on the first
    assert scale.imbalance(load, 4) == scale.imbalance(load, 64) == pytest.approx(1.6)


def test_as_a_user_runs_it(run, tmp_path):
    loads = {'moduleformer': {'blocks.0.att': {'load': [0.4, 0.1, 0.3, 0.2]}}}
    (tmp_path / 'routes.json').write_text(json.dumps(loads))
    args = ['--checkpoint_activations', '--shard', '--batch_size=16', '--gradient_accumulation_steps=1']
    told = run('tools.scale', CONFIG, *args, '--processes', 1, 8, 64, '--routes', tmp_path / 'routes.json',
               here=True).stdout
    rows = {line[:20].strip(): line[20:].split() for line in told.splitlines()}
    assert rows['weights'][:2] == ['16.57', '2.07'] and rows['together'][0] == '71.48'
    assert '8 43.5 13.5 0.8 27,569 tokens 1.60 x, 1.60 x of 1 pools' in ' '.join(told.split())
    assert told.startswith('moduleformer: 4.143B parameters, 16 x 512 tokens, micro-batches: 1\n')
    told = run('tools.scale', 'config/moep.py', '--routes', tmp_path / 'routes.json', code=2).stderr
    assert 'for moduleformer only' in told
    for text in ('no JSON', '[]', '{"moep": {}}', '{"moduleformer": {}}', '{"moduleformer": {"a": [1]}}',
                 '{"moduleformer": {"a": {"load": [0]}}}'):
        (tmp_path / 'routes.json').write_text(text)
        told = run('tools.scale', CONFIG, '--routes', tmp_path / 'routes.json', code=2)
        assert 'routes.json has no loads of moduleformer' in told.stderr and not told.stdout


def test_the_vocabulary_is_that_of_the_data(run, data_dir):
    def scale_moep(*args):
        return run('tools.scale', 'config/moep.py', '--processes', 1, 8, *args, here=True).stdout.splitlines()
    first, heads, *_ = scale_moep(f'--data_dir={data_dir}')
    assert first.startswith('moep: 679.5K parameters') and heads.split() == 'GB per GPU 1 GPU 8 GPUs'.split()
    told, first, *_ = scale_moep(f'--data_dir={data_dir}', '--data=mine')
    assert 'a vocabulary of 50,257 is assumed' in told and first.startswith('moep: 5.319M')
    assert scale_moep('--data=mine', '--vocab_size=1926')[0].startswith('moep: 679.5K')


@pytest.mark.parametrize('flags', [[], ['--checkpoint_activations']])
def test_what_is_not_counted_is_told(run, flags):
    args = ['--vocab_size=1926', '--processes', 1, *flags]
    told = run('tools.scale', 'config/moep.py', *args, here=True).stdout
    assert 'not counted: activations inside the blocks of moep\n' in told
    assert '\nblocks ' not in told and '\none block ' not in told
    told = run('tools.scale', 'config/moep.py', *args, '--stream', '--memory=8', code=2).stderr
    assert told == 'scale.py: moep has no segment memory: leave out --memory\n'


@pytest.mark.parametrize('config', ['config/moduleformer_math.py', 'config/papaformer_composed.py'])
def test_a_run_that_starts_from_another_is_refused(run, config):
    told = run('tools.scale', config, code=2)            # else: the sizes of a default config
    assert told.stderr == f'scale.py: {config} starts from another run; scale counts fresh models\n'
    assert not told.stdout
