"""lora.py on every model: nothing changes at first, only adapters train, merging keeps what they learned."""

import ast
import copy
import sys

import pytest
import torch
import torch.nn as nn

import lora
import moduleformer
import moep
import papaformer
import selfmoe
import stlm
import stlm_depth
import strong
from conftest import ROOT
from lora import add_lora, merge_lora
from plumbing.checkpoint import load_checkpoint

TINY = dict(vocab_size=40, block_size=32, n_layer=2, n_head=2, n_embd=16)
MOEP = dict(**TINY, n_embd_parallel=8, n_head_parallel=1, dropout=0.0)
PAPA = dict(**TINY, n_parallel=2, path_head=[1, 1])
STLM = dict(**TINY, n_kv_head=1, ffn_hidden=24, dropout=0.0)
MODULES = dict(**TINY, n_att=4, d_att=8, n_ffd=8, d_ffd=24, d_router=16)


def papa(**keys):
    return papaformer.PaPaformer(papaformer.PaPaformerConfig(**PAPA, **keys))


def self_moe(**keys):
    return selfmoe.SelfMoE(selfmoe.SelfMoEConfig(**TINY, n_kv_head=1, **keys))


MODELS = dict(
    moep=lambda: moep.MoEP(moep.MoEPConfig(**MOEP, n_parallel=2)),
    moep_swiglu=lambda: moep.MoEP(moep.MoEPConfig(**MOEP, n_parallel=1, swiglu=True, expert_hidden=12)),
    gpt2=lambda: moep.MoEP(moep.MoEPConfig(**MOEP, n_parallel=0)),
    papaformer_share=lambda: papa(path_embd=[8, 4], connection='share'),
    papaformer_gumbel=lambda: papa(path_embd=[8, 8], connection='gumbel2'),
    selfmoe=lambda: self_moe(gate='matrix'),
    selfmoe_upcycled=lambda: selfmoe.upcycle(self_moe(gate='vector'), n=3, k=2),
    stlm=lambda: stlm.STLM(stlm.STLMConfig(**STLM)),
    stlm_shared=lambda: stlm.STLM(stlm.STLMConfig(**STLM, share='ffn', lora_rank=2)),
    stlm_depth=lambda: stlm_depth.STLMDepth(stlm_depth.STLMDepthConfig(**STLM, capacity=0.5)),
    stlm_bytes=lambda: stlm.STLM(stlm.STLMConfig(**STLM, byte_limit=3, byte_embd=8, byte_head=1)),
    moduleformer=lambda: moduleformer.ModuleFormer(moduleformer.ModuleFormerConfig(**MODULES)),
    strong_moe=lambda: strong.Strong(strong.StrongConfig(**TINY, n_expert=3, n_shared=1, dropout=0.0)))


def make(name):
    torch.manual_seed(1)
    return MODELS[name]().eval()


def some_ids(n=3):
    ids = torch.randint(0, 37, (n, 24), generator=torch.Generator().manual_seed(2))
    ids[:, 3::4] = 37                                    # for the byte-level model: end-of-chunk
    return ids


def stir(model):
    """Adapters as training could have left them."""
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        if p.requires_grad:
            p.data.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def maps(model):
    """{name: weight} of what ought to be adapted."""
    found = {}
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            of_linear = type(module) is nn.Linear and name == 'weight'
            if p is not None and path.split('.')[-1] != 'head' and (p.dim() == 3 or of_linear):
                found[f'{path}.{name}'] = p
    return found


@pytest.mark.parametrize('name', ['moduleformer', 'selfmoe_upcycled', 'strong_moe'])
def test_adapters_of_experts_not_taken_are_not_active(name):
    model = make(name)
    _, before = model.count_params()
    expected = 0
    for p in maps(model).values():
        expected += 3 * (p.size(-1) + p.size(-2)) * (model.config.top_k if p.dim() == 3 else 1)
    assert add_lora(model, rank=3).count_params()[1] - before == expected


@pytest.mark.parametrize('name', MODELS)
def test_nothing_changes_at_first(name):
    model, ids = make(name), some_ids()
    before = model(ids)[0]
    total = sum(p.numel() for p in model.parameters())
    expected = 0
    for p in maps(model).values():
        expected += 3 * (p.size(-1) + p.size(-2)) * (p.size(0) if p.dim() == 3 else 1)
    assert add_lora(model, rank=3) is model
    assert torch.equal(model(ids)[0], before)
    if name != 'papaformer_gumbel':                      # which draws its routes
        assert torch.equal(model.train()(ids, ids)[1], copy.deepcopy(model)(ids, ids)[1])
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trainable) == expected > 0
    assert sum(p.numel() for p in model.parameters()) == total + expected


@pytest.mark.parametrize('name', MODELS)
def test_merged_is_adapted(name):
    """Against the sum of weights written out, and after merging: the same model, plain in every respect."""
    plain, ids = make(name).double(), some_ids()
    adapted = stir(add_lora(copy.deepcopy(plain), rank=3, alpha=5))
    by_hand, state = copy.deepcopy(plain), adapted.state_dict()
    for full_name, p in maps(by_hand).items():
        path, _, own = full_name.rpartition('.')
        a, b = (state[f'{path}.lora.{own}.{factor}'] for factor in 'ab')
        change = torch.einsum('eir,ero->eio' if p.dim() == 3 else 'ir,ro->oi', a, b)
        p.data.add_(5 / 3 * change)
    out, expected = adapted(ids)[0], by_hand(ids)[0]
    assert (expected - plain(ids)[0]).nan_to_num().abs().max() > 1e-3
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)

    merged = merge_lora(copy.deepcopy(adapted).train()).eval()           # dropout takes no part in it
    torch.testing.assert_close(merged(ids)[0], out, rtol=1e-9, atol=1e-9)
    assert list(merged.state_dict()) == list(plain.state_dict()) and not hasattr(merged, 'adapted')
    assert [n for n, _ in merged.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [type(m) for m in merged.modules()] == [type(m) for m in plain.modules()]
    assert all(p.requires_grad for p in merged.parameters()) and merged.config == plain.config
    again = type(plain)(merged.config).double().eval()
    again.load_state_dict(merged.state_dict())
    assert torch.equal(again(ids)[0], merged(ids)[0])
    assert torch.equal(adapted(ids)[0], out)             # its copy was merged, not it


@pytest.mark.parametrize('name', MODELS)
def test_only_adapters_train(name):
    model, ids = add_lora(make(name), rank=2).train(), some_ids()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        loss = model(ids[:, :-1], ids[:, 1:])[1]
        loss.backward()
        optimizer.step()
    assert loss.isfinite()
    for n, p in model.named_parameters():
        assert p.requires_grad == n.endswith(('.a', '.b')) and (p.grad is not None) == p.requires_grad, n
        assert torch.equal(p, before[n]) != p.requires_grad, n


def test_only_some_maps():
    def names(model):
        return {n.removesuffix('.a') for n, p in model.named_parameters() if n.endswith('.a')}
    some = add_lora(make('moep'), only=r'^parallel.*\.qkv$')
    assert names(some) == {'parallel.0.lora.qkv', 'parallel.1.lora.qkv'}
    assert names(add_lora(make('selfmoe'), only='head')) == {'head.lora.weight'}
    assert 'head.lora.weight' not in names(add_lora(make('selfmoe')))
    mine = nn.ModuleDict(dict(headings=nn.Linear(2, 3), head=nn.Linear(3, 4)))
    assert names(add_lora(mine)) == {'headings.lora.weight'}
    model = make('selfmoe')
    model.head.weight = model.wte.weight                 # tied: an adapter would untie them
    with pytest.raises(ValueError, match='no linear map has a name that matches'):
        add_lora(model, only='head')
    assert 'blocks.0.qkv.lora.weight' in names(add_lora(model))


def test_others_may_train_too():
    model = add_lora(make('selfmoe'), also='wte|head')
    trained = {n for n, p in model.named_parameters() if p.requires_grad and '.lora.' not in n}
    assert trained == {'wte.weight', 'head.weight'}
    with pytest.raises(ValueError, match="also = 'embed'"):
        add_lora(make('selfmoe'), also='embed')


@pytest.mark.parametrize('keys, message', [
    (dict(only='attn'), "matches 'attn'; there are first.0.qkv.weight"),
    (dict(only='('), 'not a regular expression'), (dict(rank=0), 'rank = 0'), (dict(rank=2.5), 'rank = 2.5'),
    (dict(dropout=1.0), 'less than 1'), (dict(alpha=0), 'alpha more than 0')])
def test_mistakes(keys, message):
    model = make('moep')
    with pytest.raises(ValueError, match=message.replace('(', r'\(')) as error:
        add_lora(model, **keys)
    assert '\n' not in str(error.value) and all(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match='no adapters'):
        merge_lora(model)
    with pytest.raises(ValueError, match='adapters already'):
        add_lora(add_lora(model))


def test_dropout():
    """In training an input channel is out for all tokens, or in and larger; in eval mode none is out."""
    model = stir(add_lora(make('moep'), rank=4, alpha=4, dropout=0.25, only='parallel.0.(fc|router)')).train()
    for module, own, dim in ((model.parallel[0], 'fc', 2), (model.parallel[0].router.linear, 'weight', 0)):
        low, weight = module.lora[own], module._parameters[own]
        whole = low.a @ low.b if dim == 2 else (low.a @ low.b).T
        kept = 0.0
        for _ in range(50):
            change = getattr(module, own) - weight
            share = (change / whole).mean(dim)           # one value per input channel
            assert (((share - 0).abs() < 1e-3) | ((share - 4 / 3).abs() < 1e-3)).all()
            kept += (share > 1).float().mean().item() / 50
        assert abs(kept - 0.75) < 0.06
        model.eval()
        torch.testing.assert_close(getattr(module, own), weight + whole)
        model.train()


def test_each_expert_drops_channels_of_its_own():
    low = lora.LowRank(torch.zeros(6, 32, 5), rank=2, alpha=2, dropout=0.5)
    low.b.data.fill_(1.0)
    low.a.data.fill_(1.0)
    kept = low(torch.zeros(6, 32, 5))[:, :, 0] > 0       # (E, in)
    assert len({tuple(row) for row in kept.tolist()}) == 6


def test_how_adapters_start():
    """a: evenly between -1/sqrt(in) and 1/sqrt(in), whatever the rank and the width out; b: 0."""
    torch.manual_seed(0)
    for weight in (torch.zeros(8, 400), torch.zeros(3, 400, 8)):     # nn.Linear holds (out, in)
        low = lora.LowRank(weight, rank=16, alpha=16, dropout=0.0)
        assert low.a.shape[-2:] == (400, 16) and not low.b.any()
        assert 0.048 < low.a.abs().max() <= 0.05 and abs(low.a.std() - 0.05 / 3 ** 0.5) < 1e-3


@pytest.mark.filterwarnings('ignore:mkldnn_matmul failed')   # a CPU without bfloat16
def test_state_dict_copies_and_precision():
    ids = some_ids()
    model = stir(add_lora(make('moep'), rank=3, only='qkv|down'))
    (name, args), = model.adapted
    assert (name, args) == ('lora.add_lora', dict(rank=3, alpha=16, dropout=0.1, only='qkv|down', also=None))
    fresh = getattr(lora, name.split('.')[1])(MODELS['moep'](), **args).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(ids)[0], model(ids)[0]) and fresh.adapted == model.adapted
    twin = copy.deepcopy(model)
    stir(model).first[0].qkv.lora['weight'].b.data.zero_()
    assert torch.equal(twin(ids)[0], fresh(ids)[0]) and not torch.equal(model(ids)[0], fresh(ids)[0])
    for dtype in (torch.float64, torch.bfloat16):
        wide = add_lora(make('gpt2').to(dtype))
        assert {p.dtype for p in wide.parameters()} == {dtype} and wide(ids)[0].dtype == dtype
    cast = add_lora(make('moep').to(torch.float64)).float()
    assert cast(ids)[0].dtype == torch.float32
    with torch.autocast('cpu', torch.bfloat16):          # nothing changes at first there either
        assert torch.equal(add_lora(make('moep'))(ids)[0], make('moep')(ids)[0])
        trained = stir(add_lora(make('moep')))           # and the change is made in the weight's precision
        assert torch.equal(trained(ids)[0], merge_lora(copy.deepcopy(trained))(ids)[0])


@pytest.mark.slow
def test_a_sharded_weight_is_read_as_it_is():
    """FSDP asks for it by its name, to keep it: with the change, it would be changed twice."""
    linear = add_lora(nn.Sequential(nn.Linear(2, 3)), rank=1)[0]
    weight = linear._parameters['weight']
    assert linear.weight is not weight
    weight.full_tensor = None                            # as a DTensor has it
    assert linear.weight is weight


def test_compiled(compile_model):
    """In one graph, and with the adapters in it."""
    model, ids = stir(add_lora(make('papaformer_share'))), some_ids()
    compiled = compile_model(model, backend='eager', fullgraph=True)
    torch.testing.assert_close(compiled(ids)[0], model(ids)[0])


def test_stands_alone():
    for node in ast.walk(ast.parse((ROOT / 'lora.py').read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        assert all(n.split('.')[0] == 'torch' or n in sys.stdlib_module_names for n in names)
    assert len((ROOT / 'lora.py').read_text().splitlines()) < 150


@pytest.mark.slow
def test_as_surgery(run, smoke, data_dir, tmp_path):
    """train.py adds adapters, trains and resumes them, and merges them into a plain run."""
    base, ids = smoke('config/moep.py'), some_ids()
    common = [f'--data_dir={data_dir}', '--batch_size=1', '--eval_tokens=64', '--sample_tokens=2',
              '--learning_rate=0.1']
    adding = [*common, f'--init_from={base}', '--surgery=lora.add_lora']
    added = [*adding, "--surgery_args={'rank': 2}", '--schedule=constant']
    told = run('train.py', *added, '--max_iters=3', f'--out_dir={tmp_path}/lora', here=True).stdout
    for more in (['--max_iters=2'], ['--max_iters=3', '--resume']):
        run('train.py', *added, f'--out_dir={tmp_path}/half', *more, here=True)
    adapted, resumed = (load_checkpoint(tmp_path / name)[0] for name in ('lora', 'half'))
    resumed = resumed.state_dict()
    assert all(torch.equal(p, resumed[name]) for name, p in adapted.state_dict().items())
    run('train.py', *common, f'--init_from={tmp_path}/lora', '--surgery=lora.merge_lora', '--max_iters=0',
        f'--out_dir={tmp_path}/merged', here=True)
    plain, merged = (load_checkpoint(path)[0] for path in (base, tmp_path / 'merged'))
    trained = sum(p.numel() for name, p in adapted.named_parameters() if 'lora' in name)
    assert 0 < trained and f'active per token, {trained / 1e6:.2f}M trained\n' in told
    assert adapted.adapted[0][1]['rank'] == 2 and 'lora' not in ' '.join(merged.state_dict())
    assert torch.equal(adapted.wte.weight, plain.wte.weight)
    assert torch.equal(adapted.shrink._parameters['down'], plain.shrink.down)
    assert (adapted(ids)[0] - plain(ids)[0]).abs().max() > 1e-3
    torch.testing.assert_close(merged(ids)[0], adapted(ids)[0], rtol=1e-4, atol=1e-4)
    for args in (["--surgery_args={'only': 'nothing'}"], ["--surgery_args={'rank': 0}"]):
        told = run('train.py', *adding, *args, '--max_iters=0', f'--out_dir={tmp_path}/x', code=2)
        assert told.stderr.startswith('train.py: surgery lora.add_lora: ') and told.stderr.count('\n') == 1
    told = run('train.py', *common, f'--init_from={tmp_path}/lora', '--surgery=lora.add_lora',
               f'--out_dir={tmp_path}/x', code=2)
    assert 'merge them first' in told.stderr and told.stderr.count('\n') == 1
