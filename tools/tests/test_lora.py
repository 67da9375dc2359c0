"""tools/lora.py on every model: nothing changes at first, only adapters train, merging keeps what
they learned."""

import copy

import pytest
import torch
import torch.nn as nn

import train
from plumbing.machine import Machine
from plumbing.settings import Settings
from test_contract import build, text
from tools.lora import add_lora, merge_lora

ALL = pytest.mark.parametrize('name', [
    'moep', 'moep_swiglu', 'gpt2', 'papaformer_unequal', 'gumbel2', 'moduleformer', 'gate_matrix',
    'mixture', 'stlm_ffn', 'stlm_bytes', 'stlm_depth', 'dense_routed'])


def make(name):
    torch.manual_seed(1)
    return build(name).eval()


def stir(model):
    """Adapters as training could have left them."""
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        if p.requires_grad:
            p.data.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def linear_maps(model):
    """{name: weight} of what ought to be adapted."""
    maps = {}
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            of_linear = type(module) is nn.Linear and name == 'weight'
            if p is not None and path.split('.')[-1] != 'head' and (p.dim() == 3 or of_linear):
                maps[f'{path}.{name}'] = p
    return maps


def predict(model, x):
    """Probabilities: the logits of a symbol that a slot cannot hold are -inf."""
    return model(x)[0].softmax(-1)


@ALL
def test_nothing_changes_at_first(name):
    """A copy of an adapted model is one; the sizes are those of both factors."""
    model = make(name)
    x, before = text(model), predict(model, text(model))
    total = sum(p.numel() for p in model.parameters())
    added = sum(3 * (p.size(-1) + p.size(-2)) * (p.size(0) if p.dim() == 3 else 1)
                for p in linear_maps(model).values())
    assert add_lora(model, rank=3) is model
    assert torch.equal(predict(model, x), before)
    assert torch.equal(predict(copy.deepcopy(model), x), before)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == added > 0
    assert sum(p.numel() for p in model.parameters()) == total + added


@ALL
def test_merged_is_adapted(name):
    """Against the sum of weights written out, and after merging: the same model, plain in every
    respect."""
    plain = make(name).double()
    x = text(plain)
    adapted = stir(add_lora(copy.deepcopy(plain), rank=3, alpha=5))
    by_hand, state = copy.deepcopy(plain), adapted.state_dict()
    for full_name, p in linear_maps(by_hand).items():
        path, _, own = full_name.rpartition('.')
        a, b = (state[f'{path}.lora.{own}.{factor}'] for factor in 'ab')
        p.data.add_(5 / 3 * torch.einsum('eir,ero->eio' if p.dim() == 3 else 'ir,ro->oi', a, b))
    out = predict(adapted, x)
    assert (out - predict(plain, x)).abs().max() > 1e-4
    torch.testing.assert_close(out, predict(by_hand, x), rtol=1e-9, atol=1e-9)

    merged = merge_lora(copy.deepcopy(adapted).train()).eval()         # dropout takes no part in it
    torch.testing.assert_close(predict(merged, x), out, rtol=1e-9, atol=1e-9)
    assert list(merged.state_dict()) == list(plain.state_dict()) and not hasattr(merged, 'adapted')
    assert [type(m) for m in merged.modules()] == [type(m) for m in plain.modules()]
    assert all(p.requires_grad for p in merged.parameters()) and merged.config == plain.config
    assert torch.equal(predict(adapted, x), out)         # its copy was merged, not it


@pytest.mark.parametrize('name', ['moduleformer', 'mixture', 'dense_routed'])
def test_adapters_of_experts_not_taken_are_not_active(name):
    model = make(name)
    _, before = model.count_params()
    added = sum(3 * (p.size(-1) + p.size(-2)) * (model.config.top_k if p.dim() == 3 else 1)
                for p in linear_maps(model).values())
    assert add_lora(model, rank=3).count_params()[1] - before == added


def test_a_sharded_weight_is_read_as_it_is():
    """FSDP asks for it by its name, to keep it: with the change, it would be changed twice."""
    linear = add_lora(nn.Sequential(nn.Linear(2, 3)), rank=1)[0]
    weight = linear._parameters['weight']
    assert linear.weight is not weight
    weight.full_tensor = None                            # as a DTensor has it
    assert linear.weight is weight


def test_which_maps():
    def adapted(model):
        return {n.removesuffix('.a') for n, _ in model.named_parameters() if n.endswith('.a')}
    parallel = add_lora(make('moep'), only=r'^parallel.*\.qkv$')
    assert adapted(parallel) == {'parallel.0.lora.qkv', 'parallel.1.lora.qkv'}
    assert adapted(add_lora(make('selfmoe'), only='head')) == {'head.lora.weight'}
    headings = nn.ModuleDict(dict(headings=nn.Linear(2, 3), head=nn.Linear(3, 4)))
    assert adapted(add_lora(headings)) == {'headings.lora.weight'}
    tied = make('selfmoe')
    tied.head.weight = tied.wte.weight                   # an adapter would untie them
    with pytest.raises((AssertionError, ValueError), match='no linear map has a name that matches'):
        add_lora(tied, only='head')


def test_others_may_train_too():
    model = add_lora(make('selfmoe'), also='wte|head')
    trained = {n for n, p in model.named_parameters() if p.requires_grad and '.lora.' not in n}
    assert trained == {'wte.weight', 'head.weight'}


def test_dropout():
    """In training an input channel is out for all tokens, or in and larger; in evaluation none is
    out."""
    only = 'parallel.0.(fc|router)'
    model = stir(add_lora(make('moep'), rank=4, alpha=4, dropout=0.25, only=only)).train()
    layer = model.parallel[0]
    for module, own, dim in ((layer, 'fc', 2), (layer.router.linear, 'weight', 0)):
        low, weight = module.lora[own], module._parameters[own]
        full = low.a @ low.b if dim == 2 else (low.a @ low.b).T
        kept = 0.0
        for _ in range(100):
            share = ((getattr(module, own) - weight) / full).mean(dim)   # one value per channel
            assert ((share.abs() < 1e-3) | ((share - 4 / 3).abs() < 1e-3)).all()
            kept += (share > 1).float().mean().item() / 100
        assert abs(kept - 0.75) < 0.06
        if dim == 2:                                     # each expert has its own
            assert len({*map(tuple, (share > 1).tolist())}) > 1
        model.eval()
        torch.testing.assert_close(getattr(module, own), weight + full)
        model.train()


@pytest.mark.filterwarnings('ignore:mkldnn_matmul failed')   # on CPUs without bfloat16
def test_precision():
    """Adapters have the type of their weight; under autocast the change is made in that type,
    too."""
    for dtype in (torch.float64, torch.bfloat16):
        assert {p.dtype for p in add_lora(make('gpt2').to(dtype)).parameters()} == {dtype}
    model = stir(add_lora(make('moep')))
    x = text(model)
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(model(x)[0], merge_lora(copy.deepcopy(model))(x)[0])


def test_compiled(compile_model):
    """In one graph, and with the adapters in it."""
    model = stir(add_lora(make('papaformer')))
    compiled = compile_model(model, backend='eager', fullgraph=True)
    x = text(model)
    torch.testing.assert_close(compiled(x)[0], model(x)[0])


def test_adapters_stay_with_adamw():
    """LoRA's factors are (in, rank) and (rank, out), not (out, in); all else is frozen."""
    groups = train.make_optimizer(add_lora(make('mixture')), Settings(optimizer='muon'),
                                  Machine('cpu')).param_groups
    adapters, _, by_muon = [group['params'] for group in groups]
    assert adapters and not by_muon
