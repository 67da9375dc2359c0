"""What only a GPU can show: a step as a CUDA graph is the plain step, compiled is eager, bfloat16
is close, grouped products and padded logits are exact."""

import functools
import importlib.util
import json
import math

import pytest
import torch
import torch.distributed as dist

import moduleformer
import moep
import papaformer
import selfmoe
import stlm
import stlm_depth
import train
from oracles import with_gradients
from plumbing import rows
from plumbing.compile import compile_model
from plumbing.graph import CUDAGraphStep
from plumbing.machine import Machine
from plumbing.settings import Settings
from plumbing.shard import shard

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')

TINY = dict(vocab_size=100, block_size=32, n_layer=2, n_head=2, n_embd=32)
MODELS = dict(
    gpt2=(moep, dict(n_parallel=0)),
    moep=(moep, dict(n_embd_parallel=16, n_head_parallel=1, n_parallel=2)),
    papaformer=(papaformer, dict(path_embd=[16, 16], path_head=[1, 1], connection='gumbel1',
                                 dropout=0.1)),
    moduleformer=(moduleformer, dict(n_att=4, d_att=16, n_ffd=4, d_ffd=32, d_router=16)),
    selfmoe=(selfmoe, dict(n_kv_head=1)),
    stlm=(stlm, dict(n_kv_head=1, ffn_hidden=48, dropout=0.1)),
    stlm_depth=(stlm_depth, dict(n_layer=4, n_kv_head=1, ffn_hidden=48, dropout=0.1, capacity=0.25,
                                 layer_dropout=0.2, exit_loss=True)))
if importlib.util.find_spec('arena'):                    # a room: it may be taken away
    MODELS['dense'] = importlib.import_module('arena.dense'), dict(n_expert=4, top_k=2)
AUX = dict(stlm_depth=dict(forecast=0.1, exit=1.0), dense=dict(balance=0.01))
# Grouped products are fast in bfloat16 only. A list: pytest-xdist wants the same order everywhere.
EXPERTS = [name for name in ('moep', 'moduleformer', 'dense') if name in MODELS]


def make(name, **changes):
    module, keys = MODELS[name]
    torch.manual_seed(0)
    return module.Model(module.Config(**TINY | keys | changes)).cuda()


def windows(it):
    """x, y of two micro-batches of random tokens, in the place of train.Data's."""
    tokens = torch.randint(100, (4000,), generator=torch.Generator().manual_seed(0))
    ids = tokens[it:].unfold(0, 33, 50)[:8].reshape(2, 4, 33).cuda()
    return ids[..., :-1].contiguous(), ids[..., 1:].contiguous()


def take_steps(name, n, machine, change=lambda model: None, graph=True, **settings):
    """-> the losses of n steps of two micro-batches at a changing rate, the stepper, the model"""
    model = make(name)
    s = Settings(batch_size=4, gradient_accumulation_steps=2, aux_weights=AUX.get(name, {}),
                 **settings)
    changed = change(model)                              # shard changes the model itself
    trained = model if changed is None else changed
    optimizer = train.make_optimizer(model, s, machine)
    torch.manual_seed(1)                                 # of dropout and Gumbel noise
    plain_step = functools.partial(train.train_step, trained, optimizer, s, machine)
    step = CUDAGraphStep(plain_step, machine)
    if not graph:
        step.plain_calls = math.inf
    losses = []
    for it in range(n):
        train.set_rate(optimizer, 1e-2 / (1 + it))
        losses.append(step(*windows(it))[0]['loss'].item())
    return losses, step, model


# ---- Steps ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', MODELS)
def test_a_graph_is_the_plain_step(name):
    """With dropout, two micro-batches, a learning rate that changes."""
    is_routed = name in EXPERTS
    machine = Machine('cuda', 'bfloat16' if is_routed else 'float32')
    torch.set_float32_matmul_precision('highest')
    plain, no_graph, model = take_steps(name, 9, machine, graph=False)
    graphed, graph, other = take_steps(name, 9, machine)
    assert len(graph.graphs) == 1 and not no_graph.graphs
    assert graphed == pytest.approx(plain, abs=0.02 if is_routed else 2e-4)
    for (key, p), q in zip(model.named_parameters(), other.parameters()):
        assert (p - q).norm() <= (0.2 if is_routed else 2e-2) * p.norm() + 1e-3, key
    if is_routed or name == 'stlm_depth':                # also compiled
        compiled, graph, _ = take_steps(name, 9, machine, compile_model)
        assert len(graph.graphs) == 1 and abs(plain[0] - compiled[0]) < 0.05
        assert abs(plain[-1] - compiled[-1]) < 0.3


@pytest.mark.parametrize('kind', ['adamw', 'muon'])
def test_float16_in_a_graph(kind, monkeypatch):
    """The scale overflows at first, also while the graph is replayed: such steps move nothing."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0 ** 26)
    monkeypatch.setattr(torch.amp, 'GradScaler', scaler)
    machine = Machine('cuda', 'float16')
    plain, no_graph, model = take_steps('gpt2', 20, machine, graph=False, optimizer=kind)
    graphed, graph, other = take_steps('gpt2', 20, machine, optimizer=kind)
    assert len(graph.graphs) == 1 and graphed == pytest.approx(plain, abs=0.02)
    scales = [step.fn.args[1].scaler.get_scale() for step in (no_graph, graph)]
    assert scales[0] == scales[1] < 2 ** 22              # halved after the recording, too
    start = dict(make('gpt2').named_parameters())
    for (key, p), q in zip(model.named_parameters(), other.parameters()):
        assert (p - q).norm() <= 0.05 * p.norm() + 1e-3 and not torch.equal(p, start[key]), key


def test_one_graph_for_every_shape():
    """As fine-tuning needs it: batches of several widths in turn, one optimiser."""
    machine = Machine('cuda', 'float32')
    torch.set_float32_matmul_precision('highest')
    results = []
    for wanted in (True, False):
        torch.manual_seed(0)
        linear = torch.nn.Linear(8, 8).cuda()
        optimizer = train.make_optimizer(linear, Settings(), machine)

        def step(x):
            optimizer.zero_grad(set_to_none=True)
            loss = (linear(x).relu() @ linear(x).T).square().mean()
            loss.backward()
            optimizer.step()
            return loss
        graph = CUDAGraphStep(step, machine)
        if not wanted:
            graph.plain_calls = math.inf
        losses = [graph(torch.randn(3 + it % 3, 8, device='cuda')).item() for it in range(24)]
        assert len(graph.calls) == 3 and len(graph.graphs) == 3 * wanted
        results.append([*losses, *linear.weight.detach().flatten().tolist()])
    assert results[0] == pytest.approx(results[1], abs=1e-4)


def test_what_cannot_be_recorded_goes_on_plainly(capsys):
    """A model that reads a number back from the GPU."""
    def change(model):
        def wait(module, args):
            assert args[0].max().item() < 100
        model.register_forward_pre_hook(wait)
    machine = Machine('cuda', 'float32')
    plain, _, _ = take_steps('gpt2', 7, machine, graph=False)
    waits, graph, _ = take_steps('gpt2', 7, machine, change)
    assert not graph.graphs and waits == pytest.approx(plain, abs=1e-3)
    assert capsys.readouterr().out.count('graph     not possible') == 1


@pytest.mark.parametrize('name', MODELS)
def test_sharded_steps_are_plain_steps(name):
    """FSDP2 with one process: autocast, fused AdamW, a rate in a tensor."""
    machine = Machine('cuda')
    change = lambda model: shard(model, machine)
    plain, _, _ = take_steps(name, 6, machine, graph=False)
    dist.init_process_group('nccl', store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded, _, _ = take_steps(name, 6, machine, change, graph=False)
    finally:
        dist.destroy_process_group()
    assert sharded == pytest.approx(plain, rel=1e-2)


@pytest.mark.slow
def test_a_resumed_run(run, data_dir, tmp_path):
    settings = ['config/gpt2.py', '--n_layer=2', '--block_size=32', '--batch_size=4',
                '--eval_tokens=64', '--log_interval=1', '--save_interval=8', '--sample_tokens=2',
                f'--data_dir={data_dir}', '--dtype=float32', '--schedule=constant', '--resume']
    logs = []
    for name, stops in (('whole', [16]), ('twice', [8, 16])):
        for stop in stops:
            run('train.py', *settings, f'--max_iters={stop}', f'--out_dir={tmp_path}/{name}')
        rows = [json.loads(line) for line in open(tmp_path / name / 'log.jsonl')]
        logs.append([row['loss'] for row in rows if 'loss' in row])
    assert len(logs[0]) == 16 and logs[1] == pytest.approx(logs[0], abs=2e-3)


# ---- Kernels -------------------------------------------------------------------------------------

def poison():
    """What is allocated next holds NaN: what is not written shows."""
    blocks = [torch.full((1 << n,), 255, dtype=torch.uint8, device='cuda') for n in range(9, 28)]
    del blocks


@pytest.mark.parametrize('ends', [
    [0, 300, 300, 301, 1000, 1000], [1000] * 6, [100, 200, 500, 700, 900, 1000], [0, 40_000]])
@pytest.mark.parametrize('D, H', [(64, 128), (384, 200)])
def test_grouped_products_with_empty_groups(ends, D, H):
    torch.manual_seed(0)
    x = torch.randn(ends[-1], D, device='cuda').bfloat16()
    w = torch.randn(len(ends), D, H, device='cuda').bfloat16()
    grad = torch.randn(ends[-1], H, device='cuda').bfloat16()
    ends = torch.tensor(ends, device='cuda', dtype=torch.int32)
    results = []
    for dtype in (torch.bfloat16, torch.float64):        # float64: the loop
        poison()
        results.append(with_gradients(lambda x, w: rows.grouped_mm(x, w, ends),
                                      (x.to(dtype), w.to(dtype)), grad))
    for rough, exact in zip(*results, strict=True):
        assert (rough - exact).norm() < 5e-3 * exact.norm()
        assert ((exact == 0) <= (rough == 0)).all()


@pytest.mark.parametrize('compiled', [False, True])
def test_order_by_choice_is_a_stable_sort_at_full_size(compiled):
    """The compiled running count is one kernel whose blocks wait for each other."""
    E, order = 8, lambda choice: rows.order_by_choice(choice.flatten(), 8)
    order = torch.compile(order, dynamic=False) if compiled else order
    for _ in range(100):
        choice = torch.rand(32_768, E, device='cuda').topk(2).indices
        pair = choice.flatten().argsort(stable=True)
        ends = torch.bincount(choice.flatten(), minlength=E).cumsum(0).int()
        poison()
        for got, want in zip(order(choice), (pair, pair.argsort(), ends), strict=True):
            assert torch.equal(got, want)
