"""Several processes that share one model (FSDP2), activations computed again, checkpoints in parts. What
takes minutes runs on demand: NANOPATHS_LONG=1 python -m pytest -s tests/test_shard.py"""

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import UserList
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from conftest import ROOT, run_script
from plumbing.checkpoint import build_model, freeze, read_checkpoint
from plumbing.cli import UserError
from plumbing import folder as folder_module
from plumbing.folder import RunFolder
from plumbing.machine import Machine
from plumbing.models import import_model
from plumbing.settings import Settings
from plumbing.shard import blocks, merge_trees, recompute, rows_like, slice_loss, split_tree
from tools.scale import memory

long = pytest.mark.skipif(not os.environ.get('NANOPATHS_LONG'), reason='takes minutes: NANOPATHS_LONG=1')
ONE_THREAD = {**os.environ, 'OMP_NUM_THREADS': '1'}
QUIET = dict(env=ONE_THREAD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
COMMON = ['--batch_size=2', '--warmup_iters=5', '--eval_tokens=256', '--log_interval=1', '--sample_tokens=2']
KEYS = dict(
    moep=dict(block_size=32, n_layer=4, n_head=2, n_embd=16, n_parallel=2, n_head_parallel=1,
              n_embd_parallel=16, n_block=3, n_expert=3, top_k=2, dropout=0.0),
    moduleformer=dict(block_size=32, n_layer=2, n_embd=16, n_att=3, d_att=8, n_head=1, n_ffd=3, d_ffd=16,
                      top_k=2, d_router=8),
    stlm=dict(block_size=32, n_layer=3, n_head=2, n_kv_head=1, n_embd=16, ffn_hidden=24, share='all',
              dropout=0.0),
    papaformer=dict(block_size=32, n_layer=4, n_head=2, n_embd=16, n_parallel=2, path_embd=[8, 8],
                    path_head=[1, 1]),
    selfmoe=dict(block_size=32, n_layer=3, n_head=2, n_kv_head=1, n_embd=16, gate='vector'),
    stlm_depth=dict(block_size=32, n_layer=4, n_head=2, n_kv_head=1, n_embd=16, ffn_hidden=24, dropout=0.0,
                    capacity=0.25))
AUX = dict(moep='dict(block_balance=0.01, expert_balance=0.01)', moduleformer='dict(mi=0.01)', stlm='{}',
           stlm_depth='dict(forecast=0.1)')


def command(name, out, *args):
    keys = [f'--{key}={value}' for key, value in KEYS[name].items()]
    return [f'--model={name}', *keys, f'--aux_weights={AUX[name]}', *COMMON, f'--out_dir={out}', *args]


def frozen(base, out, *args):
    """A base that a surgery froze, with new experts and the memory of the last segment."""
    surgery = ['--surgery=insert_experts', "--surgery_args=dict(n_att=1, n_ffd=1, router='partial')"]
    return ['--model=moduleformer', f'--init_from={base}', *surgery, '--aux_weights=dict(rout_reg=0.1)',
            *COMMON, '--stream', '--memory=16', f'--out_dir={out}', *args]


def adapted(base, out, *args):
    surgery = ['--surgery=lora.add_lora', '--surgery_args=dict(rank=2, dropout=0.0)']
    return ['--model=moduleformer', f'--init_from={base}', *surgery, *COMMON, f'--out_dir={out}', *args]


def losses(folder):
    steps = [json.loads(line) for line in open(folder / 'log.jsonl')]
    return {r['iter']: r['loss'] for r in steps if 'loss' in r}


def gap(a, b):
    """The largest difference of two runs: of their losses, of their weights."""
    first, second = losses(a), losses(b)
    assert first.keys() == second.keys()
    w, v = read_checkpoint(a)['weights'], read_checkpoint(b)['weights']
    assert w.keys() == v.keys()
    return max(abs(first[i] - second[i]) for i in first), max((w[n] - v[n]).abs().max().item() for n in w)


def train_many(processes, commands, data_dir):
    argv = json.dumps([[*map(str, each), f'--data_dir={data_dir}'] for each in commands])
    start = [*TORCHRUN, f'--nproc_per_node={processes}', str(ROOT / 'tests/train_many.py'), argv]
    done = subprocess.run(start, capture_output=True, text=True, env=ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def small(name, **changes):
    module = import_model(name)
    torch.manual_seed(0)
    return module.Model(module.Config(**{**KEYS[name], 'vocab_size': 50, **changes}))


def load_frozen(path):
    ckpt = read_checkpoint(path)
    model = build_model(ckpt)
    freeze(model, ckpt)
    return model


# ---- The same numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize('name', KEYS)
def test_recomputing_changes_nothing(name, monkeypatch):
    """Losses and gradients, with dropout where there is one; the logits of 7 tokens at a time."""
    monkeypatch.setattr('plumbing.shard.SLICE', 7)
    more = {} if name == 'moduleformer' else dict(dropout=0.2)
    if name == 'stlm_depth':
        more |= dict(exit_loss=True, layer_dropout=0.2)
    plain = small(name, **more)
    changed = copy.deepcopy(plain)
    for block in blocks(changed):
        block.forward = recompute(block.forward)
    slice_loss(changed, Machine('cpu'))
    assert len(blocks(changed)) >= 2
    x = torch.randint(50, (3, 32))
    y = x.roll(-1, 1).masked_fill(x == 3, -1)
    found = []
    for model in (plain, changed):
        torch.manual_seed(1)
        _, loss, aux = model(x, y)
        (loss + sum(aux.values())).backward()
        found.append([loss, *aux.values(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found):
        assert torch.allclose(a, b, atol=1e-6)
    each = [model.eval()(x, y, reduction='none')[1] for model in (plain, changed)]
    assert torch.allclose(*each, atol=1e-6) and torch.equal(plain(x)[0], changed(x)[0])


def test_recomputing_reads_the_memory_as_it_was():
    """Segment memory: a block extends the cache, and must not find it extended in backward."""
    plain = small('moduleformer')
    changed = copy.deepcopy(plain)
    for block in blocks(changed):
        block.forward = recompute(block.forward)
    x = torch.randint(50, (2, 64))
    caches = [], []
    for model, cache in zip((plain, changed), caches):
        for part in x.split(32, 1):
            model(part, part, cache=cache)[1].backward()
            cache[:] = [(k.detach(), v.detach()) for k, v in cache]
    assert [k.shape for k, _ in caches[1]] == [k.shape for k, _ in caches[0]] == [(2, 1, 64, 8)] * 2
    for a, b in zip(plain.parameters(), changed.parameters()):
        assert torch.equal(a.grad, b.grad)


def test_recomputing_takes_keywords():
    def forward(x, *, cache):
        cache.append((x, x))
        return x * len(cache)
    x = torch.ones((), requires_grad=True)
    cache = [(x, x)]
    recompute(forward)(x, cache=cache).backward()
    assert x.grad == len(cache) == 2


def test_logits_are_never_whole(monkeypatch):
    """No tensor of (tokens, vocabulary) is made, forward or backward."""
    monkeypatch.setattr('plumbing.shard.SLICE', 8)
    model = small('moduleformer', vocab_size=501)
    slice_loss(model, Machine('cpu'))
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and 501 in result.shape:
                largest.append(result.numel())
            return result
    x = torch.randint(501, (2, 32))
    with Watch():
        model(x, x)[1].backward()
    assert 501 * 8 <= max(largest) <= 501 * 16           # 16: the head's own width


def test_the_random_state_of_the_gpu():
    """torch restores that of the tensors' devices: they must be among the arguments, not in a closure."""
    x, k = torch.ones(2, requires_grad=True), torch.ones(3)
    run = recompute(lambda x, cache: x * cache[0][0].sum())
    with mock.patch('torch.utils.checkpoint._infer_device_type', side_effect=lambda *args: 'cpu') as asked:
        run(x, UserList([(k, k)]))
    found, (cache,) = asked.call_args_list[0].args[0], asked.call_args_list[0].args[1]
    assert found is x and cache[0] is k


def own_loss(model):
    plain = model.forward
    model.forward = lambda *args, **kwargs: (plain(*args)[0], 2 * (plain(*args)[1] or 0), {})


def other_head(model):
    model.head.bias = torch.nn.Parameter(torch.full((50,), 0.1))         # the same loss: softmax ignores it


@pytest.mark.parametrize('name, change, more', [
    ('stlm', own_loss, {}), ('papaformer', other_head, {}), ('stlm_depth', None, dict(exit_loss=True))])
def test_a_loss_of_its_own_is_not_sliced(name, change, more):
    """Twice the cross-entropy; other logits; one more auxiliary loss, and that only in training."""
    model = small(name, **more)
    said = []
    machine = SimpleNamespace(device=torch.device('cpu'), cuda=False, say=said.append)
    slice_loss(model, machine)
    assert (said == []) == (not more)
    model = small(name, **more)
    if change:
        change(model)
    plain = model.forward
    random = torch.get_rng_state()
    slice_loss(model, machine)
    assert model.forward == plain and 'is computed whole' in said[-1]
    assert torch.equal(torch.get_rng_state(), random) and model.training


def test_the_check_of_the_loss_leaves_no_trace():
    """A router that counts its load does not count the tokens of the check."""
    module = import_model('arena.bias')
    model = module.Model(module.Config(**KEYS['moep'], vocab_size=50))
    before = copy.deepcopy(model.state_dict())
    slice_loss(model, Machine('cpu'))
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_a_model_may_name_its_head_as_it_likes():
    """Its loss is then computed whole."""
    model = small('papaformer')
    model.unembed, model.embed = model.head, model.wte
    del model.head, model.wte
    plain = model.forward
    said = []
    slice_loss(model, SimpleNamespace(say=said.append))
    assert model.forward == plain and 'is computed whole' in said[0]


def train_sharded(data_dir, folder):
    """MoEP, a base that a surgery froze, and one with adapters: by one process, and by two that share the
    model -> what the two print. (Another process runs it beside the tests.)"""
    seven = ['--max_iters=7', f'--data_dir={data_dir}']
    alone = [*seven, '--gradient_accumulation_steps=4']
    run_script('train.py', *command('moep', folder / 'one'), *alone, here=True)
    run_script('train.py', *command('moduleformer', folder / 'base'), '--max_iters=1', seven[1], here=True)
    run_script('train.py', *frozen(folder / 'base', folder / 'one_frozen'), *alone, here=True)
    run_script('train.py', *adapted(folder / 'base', folder / 'one_adapted'), *alone, here=True)
    shard = ['--shard', '--checkpoint_activations', '--gradient_accumulation_steps=2', '--save_interval=4']
    half = command('moep', folder / 'halves', *shard)
    memory_too = frozen(folder / 'base', folder / 'two_frozen', *shard)
    lora = adapted(folder / 'base', folder / 'two_adapted', *shard)
    exits = command('stlm_depth', folder / 'exits', *shard, '--exit_loss=True', '--max_iters=3')
    return train_many(2, [command('moep', folder / 'two', *shard, seven[0]), [*half, '--max_iters=5'],
                          [*half, '--resume', seven[0]], [*exits, '--aux_weights=dict(exit=1.0)'],
                          [*lora, '--max_iters=5'], [*lora, '--resume', seven[0]],
                          [*memory_too, '--max_iters=5'], [*memory_too, '--resume', seven[0]]], data_dir)


@pytest.mark.slow
def test_two_processes_with_one_model(run, sharded, data_dir):
    """They equal one process with as many micro-batches; half a run and its resumption, bit for bit the
    whole; every tool reads it; one process goes on with it."""
    tmp_path, future = sharded
    told = future.result()
    assert max(gap(tmp_path / 'one', tmp_path / 'two')) < 1e-4
    assert max(gap(tmp_path / 'one_frozen', tmp_path / 'two_frozen')) < 1e-4
    assert max(gap(tmp_path / 'one_adapted', tmp_path / 'two_adapted')) < 1e-4
    first, second = (read_checkpoint(tmp_path / f'{n}_adapted')['frozen'] for n in ('one', 'two'))
    assert first == second
    held = [json.loads(line[5:]) for line in told.stdout.splitlines() if line.startswith('held')]
    for measured, out in ((held[0], 'two'), (held[-1], 'two_frozen')):
        formula = memory(load_frozen(tmp_path / out), Settings(shard=True), 32, world=2)
        assert {key: formula[key] for key in measured} == measured
    parts = sorted(path.name.split('.') for path in (tmp_path / 'two' / 'shards').iterdir())
    assert [[p[0], p[1], p[3]] for p in parts] == [['ckpt', '7', f'{rank}-of-2'] for rank in (0, 1)]
    assert torch.load(tmp_path / 'two_frozen' / 'ckpt.pt', weights_only=True)['ranks'] == []
    for part in (tmp_path / 'two_frozen' / 'shards').iterdir():          # its own two micro-batches
        assert len(torch.load(part, weights_only=True)['rank']['memory'][0]) == 2
    assert 'is computed whole' in told.stdout and '"exit"' in (tmp_path / 'exits' / 'log.jsonl').read_text()
    run('sample.py', tmp_path / 'exits', '--max_new_tokens=3', here=True)
    assert gap(tmp_path / 'halves', tmp_path / 'two') == (0, 0)
    run('sample.py', tmp_path / 'two', '--max_new_tokens=3', here=True)
    for out in ('one', 'two'):
        run('train.py', *command('moep', tmp_path / out), f'--data_dir={data_dir}', '--resume',
            '--max_iters=9', '--gradient_accumulation_steps=4', here=True)
    assert max(gap(tmp_path / 'one', tmp_path / 'two')) < 1e-4
    assert not list((tmp_path / 'two' / 'shards').iterdir())             # it is one file again


@long
@pytest.mark.parametrize('processes', [2, 4])
def test_all_models_all_ways(run, data_dir, tmp_path, processes):
    """20 steps: --shard, with and without recomputed activations, equals DDP equals one process."""
    twenty = ['--max_iters=20']
    run('train.py', *command('moduleformer', tmp_path / 'base'), '--max_iters=3', f'--data_dir={data_dir}',
        here=True)
    makers = {name: lambda out, *args, name=name: command(name, out, *args) for name in AUX}
    makers['frozen'] = lambda out, *args: frozen(tmp_path / 'base', out, *args)
    ways = dict(ddp=[], shard=['--shard'], all=['--shard', '--checkpoint_activations'])
    share = f'--gradient_accumulation_steps={4 // processes}'
    commands = []
    for name, make in makers.items():
        run('train.py', *make(tmp_path / f'{name}_one', *twenty, '--gradient_accumulation_steps=4'),
            f'--data_dir={data_dir}', here=True)
        commands += [make(tmp_path / f'{name}_{way}', *twenty, share, *args) for way, args in ways.items()]
    train_many(processes, commands, data_dir)
    for name in makers:
        for way in ways:
            loss, weight = gap(tmp_path / f'{name}_one', tmp_path / f'{name}_{way}')
            print(f'\n{processes} processes, {name}, {way}: losses {loss:.1e}, weights {weight:.1e}', end='')
            assert max(loss, weight) < 1e-4


# ---- Killed and resumed -------------------------------------------------------------------------


def children(pid):
    return [int(child) for child in open(f'/proc/{pid}/task/{pid}/children').read().split()]


def steps_in_log(out):
    return (out / 'log.jsonl').read_bytes().count(b'"loss"') if (out / 'log.jsonl').exists() else 0


@long
@pytest.mark.parametrize('worlds', [[2], [2, 1, 4]])
def test_ten_kills(data_dir, tmp_path, worlds):
    """One process of several, or all, by SIGKILL: during saves and at random moments."""
    rng = random.Random(0)
    name = 'moep' if worlds == [2] else 'moduleformer'
    dropout = ['--dropout=0.1'] if worlds == [2] else []                # random states come along

    def start(out, world):
        share = f'--gradient_accumulation_steps={4 // world}'
        args = command(name, out, '--shard', '--max_iters=120', '--save_interval=5', '--eval_interval=60',
                       share, f'--data_dir={data_dir}', '--resume', *dropout)
        torchrun = [*TORCHRUN, f'--nproc_per_node={world}', str(ROOT / 'train.py'), *args]
        return subprocess.Popen(torchrun, **QUIET)
    assert start(tmp_path / 'calm', 2).wait(300) == 0
    out = tmp_path / 'run'
    at = 0                                               # the step of the last checkpoint
    slowest = in_save = 0
    for kill in range(10):
        process = start(out, worlds[kill % len(worlds)])
        steps = at + rng.randint(1, 14)
        while steps_in_log(out) <= steps and process.poll() is None:
            time.sleep(0.002)
        if kill % 2:                                     # a save lasts milliseconds: no sleep
            while not any(out.glob('**/*.tmp')) and steps_in_log(out) <= min(steps + 20, 110):
                pass
        in_save += any(out.glob('**/*.tmp'))
        workers = children(process.pid)
        for pid in rng.sample(workers, rng.choice([1, len(workers)])):
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        process.wait(90)
        slowest = max(slowest, time.monotonic() - killed)
        assert (out / 'ckpt.pt').exists() or at == 0
        if (out / 'ckpt.pt').exists():
            at = read_checkpoint(out)['iter']            # it can be read
    print(f'\n{worlds} processes: killed at steps up to {at}, {in_save} of 10 during a save; the others '
          f'ended after {slowest:.1f} s at most', end='')
    assert slowest < 60 and 0 < at < 120
    assert start(out, worlds[-1]).wait(300) == 0
    loss, weight = gap(tmp_path / 'calm', out)
    print(f'; losses {loss:.1e}, weights {weight:.1e}', end='')
    assert max(loss, weight) < 1e-4 and (len(worlds) > 1 or (loss, weight) == (0, 0))


@long
def test_torchrun_restarts_it(data_dir, tmp_path):
    """--max-restarts and --resume: nobody has to be there."""
    args = ['--shard', '--max_iters=60', '--save_interval=5', f'--data_dir={data_dir}', '--resume']
    torchrun = [*TORCHRUN, '--nproc_per_node=2', '--max-restarts=3', str(ROOT / 'train.py')]
    subprocess.run([*torchrun, *command('moep', tmp_path / 'calm', *args)], check=True, **QUIET)
    process = subprocess.Popen([*torchrun, *command('moep', tmp_path / 'run', *args)], **QUIET)
    while steps_in_log(tmp_path / 'run') < 20:
        time.sleep(0.01)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    assert process.wait(200) == 0
    assert gap(tmp_path / 'calm', tmp_path / 'run') == (0, 0)


# ---- Checkpoints in parts -----------------------------------------------------------------------


class Rows:
    """What a sharded tensor is to a checkpoint."""
    def __init__(self, rows):
        self.rows = rows
        self.full_tensor = None

    def to_local(self):
        return self.rows


TOKEN = '0123abcd'


def in_parts(ckpt, out):
    """The files that two processes with halves of every matrix would save."""
    (out / 'shards').mkdir()
    weights = {name: w.chunk(2) for name, w in ckpt['weights'].items() if len(w) > 1}
    state = ckpt['optimizer']['state']
    for rank in range(2):
        mine = {name: Rows(halves[rank]) for name, halves in weights.items()}
        moments = {i: {key: Rows(v.chunk(2)[rank]) if v.dim() and len(v) > 1 else v for key, v in m.items()}
                   for i, m in state.items()}
        tensors = dict(weights={**ckpt['weights'], **mine}, optimizer=dict(ckpt['optimizer'], state=moments))
        name = f"ckpt.{ckpt['iter']}.{TOKEN}.{rank}-of-2.pt"
        torch.save({**split_tree(tensors, sharded=True), 'rank': ckpt['ranks'][0]}, out / 'shards' / name)
    rest = {**split_tree(tensors, sharded=False), 'ranks': [], 'shards': 2, 'token': TOKEN}
    torch.save({**ckpt, **rest}, out / 'ckpt.pt')


def test_parts_are_read_as_one(run, data_dir, tmp_path):
    """Resumed by one process, they give what the whole gives. A lost or broken part is told."""
    args = [*command('stlm', tmp_path / 'whole'), f'--data_dir={data_dir}']
    run('train.py', *args, '--max_iters=3', here=True)
    shutil.copytree(tmp_path / 'whole', tmp_path / 'parts')
    in_parts(torch.load(tmp_path / 'whole' / 'ckpt.pt', weights_only=True), tmp_path / 'parts')
    assert gap(tmp_path / 'whole', tmp_path / 'parts') == (0, 0)
    last = tmp_path / 'parts' / 'shards' / f'ckpt.3.{TOKEN}.1-of-2.pt'
    shutil.copytree(tmp_path / 'parts', tmp_path / 'broken')
    for out in ('whole', 'parts'):
        run('train.py', *args, '--max_iters=5', '--resume', f'--out_dir={tmp_path / out}', here=True)
    assert gap(tmp_path / 'whole', tmp_path / 'parts') == (0, 0) and not last.exists()
    broken = tmp_path / 'broken' / 'shards' / last.name
    broken.write_bytes(b'no checkpoint')
    told = run('sample.py', tmp_path / 'broken', code=2).stderr
    assert 'cannot be read as a checkpoint' in told and len(told.splitlines()) == 1
    broken.unlink()
    told = run('sample.py', tmp_path / 'broken', code=2).stderr
    assert f'{last.name} is missing' in told and len(told.splitlines()) == 1


def test_a_token_is_no_path(tmp_path):
    torch.save(dict(iter=3, shards=2, token='../../../x'), tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='cannot be read as a checkpoint'):
        read_checkpoint(tmp_path)


def test_merge_trees():
    trees = [dict(a=1, w=dict(x=2)), dict(w=dict(y=3)), dict(w=dict(y=4), o={})]
    assert merge_trees(trees) == dict(a=1, w=dict(x=2, y=[3, 4]), o={})


@pytest.mark.parametrize('parts', [1, 3])
def test_each_process_takes_its_rows(monkeypatch, parts):
    """Of a tensor that was saved by one process or by three, for two, four and sixteen."""
    monkeypatch.setattr('torch.distributed.tensor.DTensor.from_local', lambda rows, *args, **kwargs: rows)
    p = torch.arange(20.0).view(10, 2)
    p.full_tensor = p.placements = None
    for world in (2, 4, 16):
        expected = [*p.chunk(world), *[p[:0]] * 16]
        for rank in range(world):
            p.device_mesh = SimpleNamespace(size=lambda: world, get_local_rank=lambda: rank)
            assert torch.equal(rows_like(list(p.chunk(parts)), p), expected[rank])
    for wrong in (p[:9], p[:, :1], [p, p], [p[:5], p[5:, :1]]):
        with pytest.raises(ValueError):
            rows_like(wrong, p)


# ---- Two processes that save, played one after the other ----------------------------------------


def save_part_by_part(out, it, token, name='ckpt.pt', ranks=(1, 0), errors=()):
    """Each of `ranks` saves; `errors` are what other processes tell."""
    for rank in ranks:
        machine = SimpleNamespace(rank=rank, world=2, gather=lambda item: [item, *errors])
        machine.fail_all = lambda text: Machine.fail_all(machine, text)
        folder = RunFolder(Settings(out_dir=str(out)), machine)
        model = SimpleNamespace(state_dict=lambda: dict(w=Rows(torch.tensor([float(it), rank]))), config=KIND,
                                named_parameters=lambda: [])
        with mock.patch('secrets.token_hex', lambda n: token):
            folder.save(it, model, SimpleNamespace(words=1.0), SimpleNamespace(hash='x'), name=name)
    return folder


KIND = Settings()                                        # a config is any dataclass


def files_in(out):
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob('*.pt*')}


def names(out):
    return sorted(path.name for path in (out / 'shards').iterdir())


def test_a_part_that_cannot_be_written(tmp_path):
    """The first process says so in one line, the others end; the old checkpoint of this very step stays, and
    nothing of the new one."""
    save_part_by_part(tmp_path, 7, 'aaaaaaaa')
    before = files_in(tmp_path)
    assert len(before) == 3
    with mock.patch('plumbing.folder.save_file', side_effect=UserError('x could not be written')), \
            pytest.raises(UserError, match='^x could not be written$'):
        save_part_by_part(tmp_path, 7, 'bbbbbbbb', ranks=[0])
    assert files_in(tmp_path) == before
    with pytest.raises(SystemExit) as raised:
        save_part_by_part(tmp_path, 7, 'bbbbbbbb', ranks=[1], errors=['the other process: no space left'])
    assert raised.value.code == 2 and files_in(tmp_path) == before


def test_a_checkpoint_that_cannot_be_written(tmp_path):
    """Its parts are, but ckpt.pt is not."""
    save_part_by_part(tmp_path, 7, 'aaaaaaaa')
    before = files_in(tmp_path)
    save_part_by_part(tmp_path, 7, 'bbbbbbbb', ranks=[1])
    real = folder_module.save_file

    def full(state, path):
        if path.name == 'ckpt.pt':
            raise UserError('no space left')
        real(state, path)
    with mock.patch('plumbing.folder.save_file', full), pytest.raises(UserError, match='no space left'):
        save_part_by_part(tmp_path, 7, 'bbbbbbbb', ranks=[0])
    assert files_in(tmp_path) == before


def test_no_part_is_written_twice(tmp_path):
    """A later run comes to the same step and is killed during its save: the old parts are as they were."""
    save_part_by_part(tmp_path, 7, 'aaaaaaaa', 'ckpt_1.5M.pt')
    save_part_by_part(tmp_path, 9, 'bbbbbbbb')
    before = files_in(tmp_path)
    folder = save_part_by_part(tmp_path, 7, 'cccccccc', 'ckpt_1.5M.pt', ranks=[1])
    folder = save_part_by_part(tmp_path, 8, 'dddddddd', 'ckpt_2M.pt', ranks=[1])     # there is no ckpt_2M.pt
    after = files_in(tmp_path)
    assert {name: after[name] for name in before} == before and len(after) == len(before) + 2
    folder.remove_orphans()                              # as the next run does, when it opens the folder
    assert files_in(tmp_path) == before
    save_part_by_part(tmp_path, 7, 'eeeeeeee', 'ckpt_1.5M.pt')
    kept = [f'ckpt.9.bbbbbbbb.{rank}-of-2.pt' for rank in (0, 1)]
    assert names(tmp_path) == [*kept, *(f'ckpt_1.5M.7.eeeeeeee.{rank}-of-2.pt' for rank in (0, 1))]
    (tmp_path / 'ckpt_1.5M.pt').write_bytes(b'broken')   # nobody knows which parts it names
    save_part_by_part(tmp_path, 10, 'ffffffff')
    assert len(names(tmp_path)) == 6


def test_a_disk_that_not_all_machines_see(tmp_path):
    """The part of the other process is not here, or its checkpoint is another."""
    save_part_by_part(tmp_path, 7, 'aaaaaaaa')
    before = files_in(tmp_path)
    with pytest.raises(UserError, match='1-of-2.pt is not here: out_dir must be on a file system shared'):
        save_part_by_part(tmp_path, 8, 'bbbbbbbb', ranks=[0])
    assert files_in(tmp_path) == before
    for rank, error in ((0, UserError), (1, SystemExit)):
        machine = SimpleNamespace(rank=rank, world=2, gather=lambda item: [item, (8, 'bbbbbbbb', 1.0)])
        machine.fail_all = lambda text: Machine.fail_all(machine, text)
        folder = RunFolder(Settings(out_dir=str(tmp_path / 'empty'), resume=True), machine)
        with pytest.raises(error, match='do not find the same checkpoint' if rank == 0 else '2'):
            folder.find({})


# ---- A disk that is full ------------------------------------------------------------------------


@long
@pytest.mark.parametrize('limit', [100_000, 460_000])
def test_a_full_disk(data_dir, tmp_path, limit):
    """No file may grow beyond `limit`: the old checkpoint stays, one line says why, all processes end."""
    resource = pytest.importorskip('resource')
    args = ['--shard', f'--data_dir={data_dir}', '--save_interval=5', '--resume']
    torchrun = [*TORCHRUN, '--nproc_per_node=2', str(ROOT / 'train.py')]
    out = tmp_path / 'run'

    def start(steps, **more):
        return subprocess.run([*torchrun, *command('moep', out, *args, f'--max_iters={steps}')], text=True,
                              env=ONE_THREAD, capture_output=True, timeout=120, **more)
    assert start(10).returncode == 0
    before = {path.name: path.read_bytes() for path in out.rglob('ckpt*')}

    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    done = start(20, preexec_fn=fill)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith('train.py: ')]
    print('\n' + '\n'.join(lines), end='')
    assert len(lines) == 1 and 'could not be written' in lines[0]
    assert {path.name: path.read_bytes() for path in out.rglob('ckpt*')} == before
    assert start(20).returncode == 0
