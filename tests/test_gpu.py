"""What only a GPU can show: a step as a CUDA graph is the plain step, padded logits, grouped products in
bfloat16."""

import copy
import dataclasses
import json
import re

import pytest
import torch
import torch.distributed as dist

import moduleformer
import moep
import papaformer
import selfmoe
import stlm
import stlm_depth
import strong
import train
from plumbing import settings, shard
from plumbing.compiled import compile_model
from plumbing.machine import Machine, Replay
from tools import measure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')

TINY = dict(vocab_size=100, block_size=32, n_layer=2, n_head=2, n_embd=32)
MODELS = dict(
    gpt2=moep.MoEP(moep.MoEPConfig(**TINY, n_parallel=0)),
    moep=moep.MoEP(moep.MoEPConfig(**TINY, n_embd_parallel=16, n_head_parallel=1, n_parallel=2)),
    papaformer=papaformer.PaPaformer(papaformer.PaPaformerConfig(
        **TINY, path_embd=[16, 16], path_head=[1, 1], connection='gumbel1', dropout=0.1)),
    moduleformer=moduleformer.ModuleFormer(moduleformer.ModuleFormerConfig(
        **TINY, n_att=4, d_att=16, n_ffd=4, d_ffd=32, d_router=16)),
    selfmoe=selfmoe.SelfMoE(selfmoe.SelfMoEConfig(**TINY, n_kv_head=1)),
    stlm=stlm.STLM(stlm.STLMConfig(**TINY, n_kv_head=1, ffn_hidden=48, dropout=0.1)),
    stlm_depth=stlm_depth.STLMDepth(stlm_depth.STLMDepthConfig(
        **dict(TINY, n_layer=4), n_kv_head=1, ffn_hidden=48, dropout=0.1, capacity=0.25, layer_dropout=0.2,
        exit_loss=True)),
    strong=strong.Strong(strong.StrongConfig(**TINY, n_expert=4, top_k=2)))
READS_BACK = re.compile(r'for r0_offset.*tl\.store\((in_out_ptr\d+).*for r0_offset.*tl\.load\(\1', re.S)
WEIGHTS = {stlm_depth.STLMDepth: dict(forecast=0.1, exit=1.0), strong.Strong: dict(balance=0.01)}


def steps(model, n, machine, model_as=lambda m: m, wanted=True):
    """The losses of n training steps, what took them, and the model they leave."""
    model = copy.deepcopy(model).to(machine.device).train()
    s = settings.Settings(batch_size=4, gradient_accumulation_steps=2,
                          aux_weights=WEIGHTS.get(type(model), {}))
    torch.manual_seed(0)
    data = measure.RandomTokens(100, 8, 32, machine.device)
    torch.manual_seed(1)                                 # of dropout and Gumbel noise
    trained = model_as(model)
    optimizer = train.make_optimizer(model, s, machine)

    def take_step(starts):
        return train.train_step(trained, optimizer, data, starts, None, s, machine)
    step = Replay(take_step, machine, wanted)
    losses = []
    for it in range(n):
        train.set_rate(optimizer, 1e-2 / (1 + it))
        losses.append(step(torch.from_numpy(data.take(8)).to(machine.device))[0]['loss'].item())
    return losses, step, model


@pytest.mark.parametrize('name', ['moep', 'moduleformer', 'strong'])
def test_an_older_gpu_computes_in_float32(name, monkeypatch):
    """Without F.grouped_mm and our Triton kernels, which want a newer one. (This GPU only says it is old.)"""
    usual, _, _ = steps(MODELS[name], 4, Machine('cuda', 'float32'), wanted=False)
    assert Machine('cuda').dtype == torch.bfloat16
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: (7, 5))
    monkeypatch.delattr(torch.nn.functional, 'grouped_mm')
    monkeypatch.setattr('stick_kernels.forward', None)
    machine = Machine('cuda')
    assert machine.dtype == torch.float32
    old, _, _ = steps(MODELS[name], 4, machine, wanted=False)
    assert old == pytest.approx(usual, rel=1e-2)         # usually as TF32


@pytest.mark.parametrize('name', MODELS)
def test_recomputed_and_sharded_steps_are_plain_steps(name):
    """--checkpoint_activations; and FSDP2, with one process: autocast, fused AdamW, a rate in a tensor."""
    machine = Machine('cuda')
    s = settings.Settings(checkpoint_activations=True)
    plain, _, _ = steps(MODELS[name], 6, machine, wanted=False)
    change = lambda model: shard.shard_and_recompute(model, s, machine) or model
    recomputed, _, _ = steps(MODELS[name], 6, machine, change, wanted=False)
    assert recomputed == pytest.approx(plain, rel=1e-2)
    dist.init_process_group('nccl', store=dist.HashStore(), rank=0, world_size=1)
    try:
        change = lambda model: shard.shard(model, machine) or model
        sharded, _, _ = steps(MODELS[name], 6, machine, change, wanted=False)
    finally:
        dist.destroy_process_group()
    assert sharded == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize('name', ['moep', 'papaformer', 'stlm', 'stlm_depth'])
def test_recomputed_dropout_is_the_same(name):
    """Backward computes each block again with the masks of forward: the gradients are the plain ones."""
    machine = Machine('cuda', 'float32')
    torch.set_float32_matmul_precision('highest')
    config = dataclasses.replace(MODELS[name].config, dropout=0.5)
    torch.manual_seed(0)
    plain = type(MODELS[name])(config).to(machine.device)
    changed = copy.deepcopy(plain)
    shard.shard_and_recompute(changed, settings.Settings(checkpoint_activations=True), machine)
    x = torch.randint(100, (4, 32), device=machine.device)
    found = []
    for model in (plain, changed):
        torch.manual_seed(1)
        _, loss, aux = model(x, x.flip(1))
        (loss + sum(aux.values())).backward()
        found.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def is_recorded(step):
    return len(step.found) == 1


@pytest.mark.parametrize('name', MODELS)
def test_a_graph_is_the_plain_step(name):
    """With dropout, two micro-batches, a learning rate that changes."""
    experts = name in ('moep', 'moduleformer', 'strong') # grouped products wait for the device in float32
    machine = Machine('cuda', 'bfloat16' if experts else 'float32')
    torch.set_float32_matmul_precision('highest')
    plain, off, model = steps(MODELS[name], 9, machine, wanted=False)
    graphed, on, other = steps(MODELS[name], 9, machine)
    assert is_recorded(on) and not is_recorded(off)
    assert max(abs(a - b) for a, b in zip(plain, graphed)) < (0.02 if experts else 2e-4)
    assert plain[-1] != plain[-2]
    for (key, p), q in zip(model.named_parameters(), other.parameters()):
        assert (p - q).norm() <= (0.2 if experts else 2e-2) * p.norm() + 1e-3, key


@pytest.mark.parametrize('name', ['moep', 'stlm_depth', 'strong'])
def test_bfloat16_and_compiled(name):
    machine = Machine('cuda', 'bfloat16')
    plain, _, _ = steps(MODELS[name], 8, machine, wanted=False)
    compiled, on, _ = steps(MODELS[name], 8, machine, train.compile_model)
    assert is_recorded(on)
    assert abs(plain[0] - compiled[0]) < 0.05 and abs(plain[-1] - compiled[-1]) < 0.3


def test_one_graph_for_every_shape():
    """As fine-tuning needs it: batches of several widths in turn, one optimiser, one pool of memory."""
    machine = Machine('cuda', 'float32')
    ends = []
    torch.set_float32_matmul_precision('highest')
    for wanted in (True, False):
        torch.manual_seed(0)
        linear = torch.nn.Linear(8, 8).cuda()
        optimizer = train.make_optimizer(linear, settings.Settings(), machine)

        def step(x):
            optimizer.zero_grad(set_to_none=True)
            loss = (linear(x).relu() @ linear(x).T).square().mean()
            loss.backward()
            optimizer.step()
            return loss
        replay = Replay(step, machine, wanted)
        losses = [replay(torch.randn(3 + it % 3, 8, device='cuda')).item() for it in range(24)]
        assert len(replay.calls) == 3 and len(replay.found) == 3 * wanted
        ends.append([*losses, *linear.weight.detach().flatten().tolist()])
    assert max(abs(a - b) for a, b in zip(*ends)) < 1e-4


def test_compiled_depth_is_plain():
    """Nothing is drawn: the compiled step takes the same tokens, and has the same gradients."""
    machine = Machine('cuda', 'float32')
    torch.set_float32_matmul_precision('highest')
    config = stlm_depth.STLMDepthConfig(**TINY, n_kv_head=1, ffn_hidden=48, dropout=0.0, capacity=0.25)
    torch.manual_seed(0)
    model = stlm_depth.STLMDepth(config).cuda()
    x = torch.randint(100, (8, 32), device=machine.device)
    found = []
    for call in (model, train.compile_model(model)):
        model.zero_grad()
        _, loss, aux = call(x, x.flip(1))
        (loss + aux['forecast']).backward()
        found.append([loss, *aux.values(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('capacity', [0.25, 1.0])
def test_drafts_change_no_greedy_text(capacity):
    torch.manual_seed(0)
    shape = dict(TINY, n_layer=4, n_kv_head=1, ffn_hidden=48, capacity=capacity)
    model = stlm_depth.STLMDepth(stlm_depth.STLMDepthConfig(**shape)).cuda().double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    x = torch.randint(100, (5, 7), device='cuda')
    want = model.generate(x, 60, temperature=0)
    assert torch.equal(want.cpu(), model.cpu().generate(x.cpu(), 60, temperature=0))
    model.cuda()
    for E in (1, 2, 3):
        for rows, text in ((x, want), (x[:1], want[:1])):
            assert torch.equal(model.generate(rows, 60, temperature=0, draft_layers=E), text)
    assert model.generate(x, 60, top_k=5, draft_layers=2).shape == want.shape


class Waits(torch.nn.Module):
    """A model that asks the device for a number."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, idx, targets):
        assert idx.max().item() < 100
        return self.model(idx, targets)


def test_what_cannot_be_recorded_goes_on_plainly(capsys):
    machine = Machine('cuda', 'float32')
    plain, _, _ = steps(MODELS['gpt2'], 7, machine, wanted=False)
    waits, stepper, _ = steps(MODELS['gpt2'], 7, machine, Waits)
    assert not is_recorded(stepper)
    assert capsys.readouterr().out.count('graph     not possible') == 1, 'told once'
    assert max(abs(a - b) for a, b in zip(plain, waits)) < 1e-3


@pytest.mark.parametrize('module', [papaformer, selfmoe, stlm, stlm_depth])
@pytest.mark.parametrize('V', [100, 128])
def test_padded_logits(module, V):
    torch.manual_seed(0)
    x, w, y = torch.randn(2, 7, 16), torch.randn(V, 16), torch.randint(-1, V, (2, 7))
    found = []
    for device in ('cuda', 'cpu'):
        ins = [t.double().to(device).requires_grad_() for t in (x, w)]
        loss = module.head_loss(*ins, y.to(device), 'mean')
        each = module.head_loss(*ins, y.to(device), 'none')
        found.append([t.cpu() for t in (loss, each, *torch.autograd.grad(loss, ins))])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)


def poison():
    """What is allocated next holds NaN, or -1 where integers are read: what is not written shows."""
    held = [torch.full((1 << n,), 255, dtype=torch.uint8, device='cuda') for n in range(9, 28)]
    del held


def recorded(fn, *inputs):
    """-> fn as a CUDA graph, whose memory is poisoned at every replay."""
    held = [x.clone() for x in inputs]
    for _ in range(2):
        fn(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        poison()
        result = fn(*held)

    def run(*new):
        for mine, x in zip(held, new):
            mine.copy_(x)
        graph.replay()
        return result
    return run


@pytest.mark.parametrize('compiled', [False, True])
def test_order_is_argsort_at_full_size(compiled):
    """The compiled running count is one kernel whose blocks wait for each other."""
    E, order = 8, lambda choice: strong.order_by_choice(choice, 8)
    order = torch.compile(order, dynamic=False) if compiled else order
    draw = lambda: torch.rand(32_768, E, device='cuda').topk(2).indices
    graph = recorded(order, draw())
    for it in range(200):
        choice = draw() if it else torch.tensor([2, 5], device='cuda').expand(32_768, 2).contiguous()
        pair = choice.flatten().argsort(stable=True)
        ends = torch.bincount(choice.flatten(), minlength=E).cumsum(0).int()
        poison()
        for found in (order(choice), graph(choice)):
            assert all(torch.equal(a, b) for a, b in zip(found, (pair, pair.argsort(), ends), strict=True))


def test_grouped_products_write_all_they_return():
    """At the size of config/arena/strong_moe.py, in a graph, with and without empty groups."""
    torch.manual_seed(0)
    R, E = 65_536, 8
    x, w = torch.randn(R, 256, device='cuda').bfloat16(), torch.randn(E, 256, 512, device='cuda').bfloat16()
    grad = torch.randn(R, 512, device='cuda').bfloat16()

    def products(ends):
        ins = [t.detach().requires_grad_() for t in (x, w)]
        y = strong.grouped_mm(*ins, ends)
        return y, *torch.autograd.grad(y, ins, grad)
    even = torch.arange(1, E + 1, device='cuda', dtype=torch.int32) * (R // E)
    graph = recorded(products, even)
    for ends in (even, (even - 1000).clamp(max=R // 2), torch.tensor([0, 0, 9, 9, 9, R, R, R])):
        ends = ends.to('cuda', torch.int32)
        ends[-1] = R
        ins = [t.double().requires_grad_() for t in (x, w)]
        y = strong.grouped_mm(*ins, ends)                # float64: the loop
        exact = (y, *torch.autograd.grad(y, ins, grad.double()))
        for _ in range(20):
            poison()
            for found in (products(ends), graph(ends)):
                for rough, right in zip(found, exact, strict=True):
                    assert (rough - right).norm() < 5e-3 * right.norm()


@pytest.mark.parametrize('sparse', [True, False])
def test_compiled_experts_are_plain(sparse):
    """Loss and every gradient of the compiled layers, plain and recorded, at a size that splits the count."""
    machine = Machine('cuda', 'bfloat16')
    config = strong.StrongConfig(vocab_size=128, block_size=256, n_layer=2, n_head=2, n_embd=64, n_expert=8,
                                 top_k=2, dropout=0.0, sparse=sparse)
    torch.manual_seed(0)
    model = strong.Strong(config).cuda()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))           # maps that start at 0 would hide the experts
    x = torch.randint(128, (64, 256), device='cuda')

    def grads(call):
        def run(x):
            for p in model.parameters():
                p.grad = None
            with machine.autocast():
                _, loss, aux = call(x, x.flip(1))
            (loss + 0.01 * aux['balance']).backward()
            return loss.detach(), *(p.grad for p in model.parameters())
        return run
    plain = [t.clone() for t in grads(model)(x)]
    twin = train.compile_model(model)
    poison()
    for found in (grads(twin)(x), recorded(grads(twin), x)(x)):
        for a, b in zip(found, plain, strict=True):
            assert (a - b).norm() <= 0.1 * b.norm() + 1e-6


@pytest.mark.parametrize('ends', [
    [0, 300, 300, 301, 1000, 1000], [1000] * 6, [100, 200, 500, 700, 900, 1000], [0, 40_000]])
def test_grouped_products_with_empty_groups(ends):
    torch.manual_seed(0)
    x = torch.randn(ends[-1], 64, device='cuda').bfloat16()
    w = torch.randn(len(ends), 64, 128, device='cuda').bfloat16()
    grad = torch.randn(ends[-1], 128, device='cuda').bfloat16()
    ends = torch.tensor(ends, device='cuda', dtype=torch.int32)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        ins = [t.to(dtype, copy=True).requires_grad_() for t in (x, w)]
        poison()
        y = moep.grouped_mm(*ins, ends)
        found.append([y, *torch.autograd.grad(y, ins, grad.to(dtype))])
    for rough, exact in zip(*found, strict=True):
        assert (rough - exact).norm() < 5e-3 * exact.norm()
        assert ((exact == 0) <= (rough == 0)).all()


def test_sparse_is_dense_in_bfloat16():
    """Every gradient of the sparse path against the reference, relative to its own size."""
    machine = Machine('cuda', 'bfloat16')
    found = []
    x = torch.randint(100, (8, 32), generator=torch.Generator().manual_seed(0)).cuda()
    for sparse in (True, False):
        model = copy.deepcopy(MODELS['moep']).cuda().eval()
        model.config.sparse = sparse                     # all layers share this config
        with machine.autocast():
            model(x, x.flip(1))[1].backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name in found[0]:
        assert (found[0][name] - found[1][name]).norm() <= 0.1 * found[1][name].norm() + 1e-6, name


@pytest.mark.slow
def test_resumed_is_uninterrupted(run, data_dir, tmp_path):
    args = ['--n_layer=2', '--block_size=32', '--batch_size=4', '--eval_tokens=64', '--log_interval=1',
            '--save_interval=8', '--sample_tokens=2', f'--data_dir={data_dir}', '--dtype=float32',
            '--schedule=constant', '--resume']
    logs = []
    for name, stops in (('whole', [16]), ('twice', [8, 16])):
        for stop in stops:
            out = f'--out_dir={tmp_path}/{name}'
            run('train.py', 'config/gpt2.py', *args, f'--max_iters={stop}', out)
        lines = [json.loads(line) for line in (tmp_path / name / 'log.jsonl').read_text().splitlines()]
        logs.append([line['loss'] for line in lines if 'loss' in line])
    assert len(logs[0]) == len(logs[1]) == 16 and max(abs(a - b) for a, b in zip(*logs)) < 2e-3


def test_no_compiled_kernel_reads_back_a_row_that_it_writes_in_parts():
    """Its threads would read what others have not written yet. Without plumbing/compiled.py's whole_rows, the
    gradient of config/arena/strong_moe.py's block has such a kernel."""
    from torch._inductor.utils import fresh_cache, run_and_get_code
    machine = Machine('cuda', 'bfloat16')
    config = strong.StrongConfig(vocab_size=512, block_size=512, n_layer=1, n_head=4, n_embd=256, n_expert=8,
                                 top_k=2, dropout=0.1)
    model = strong.Strong(config).to(machine.device)
    x = torch.randint(512, (64, 512), device=machine.device)

    def take_step():
        with machine.autocast():
            compile_model(model)(x, x)[1].backward()
    with fresh_cache():
        torch._dynamo.reset()
        _, codes = run_and_get_code(take_step)
    kernels = ''.join(codes).split('@triton.jit')[1:]
    assert any('rms_norm_backward' in kernel for kernel in kernels)
    assert not [kernel for kernel in kernels if READS_BACK.search(kernel)]
