"""train.py as a user meets it: runs, kills, resumes, processes, surgery, and what it says to mistakes."""

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
import typing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import moep
import plumbing.folder
import train
from conftest import ROOT, train_in_fork
from moep import MoEP, MoEPConfig
from plumbing.checkpoint import load_checkpoint, read_checkpoint
from plumbing.cli import UserError, short
from plumbing.data import Corpus, Data
from plumbing.folder import RunFolder
from plumbing.machine import Machine
from plumbing.settings import DropoutSchedule, Settings, read_settings

TRAINING = ['--dropout=0.1', '--batch_size=2', '--warmup_iters=5', '--eval_tokens=256', '--log_interval=1',
            '--sample_tokens=5']
TINY = ['--model=moep', '--block_size=32', '--n_layer=2', '--n_head=2', '--n_embd=16', '--n_parallel=1',
        '--n_head_parallel=1', '--n_embd_parallel=16', '--n_block=2', '--n_expert=2', '--top_k=1', *TRAINING]
ENDLESS = ['--model=moduleformer', '--block_size=32', '--n_layer=1', '--n_embd=16', '--n_att=2', '--d_att=8',
           '--n_head=1', '--n_ffd=2', '--d_ffd=16', '--top_k=1', '--d_router=8',
           *TRAINING[1:]]                       # without positions: what segment memory needs
CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob('config/**/*.py')
                 if 'arena' not in path.parts)   # those: tests/tools/test_arena.py


@pytest.fixture
def tiny(run, data_dir, tmp_path):
    """A small run, in this process unless the process itself is what is tested."""
    def tiny(*args, out='run', keys=TINY, here=True, **more):
        folders = [f'--data_dir={data_dir}', f'--out_dir={tmp_path / out}']
        return run('train.py', *keys, *folders, *args, here=here, **more)
    return tiny


@pytest.fixture
def tiny_fork(fork, data_dir, tmp_path):
    """A small run in a process of its own. Such runs have the same bits; those of one here may differ."""
    def tiny_fork(*args, out='run', keys=TINY, **more):
        return fork(*keys, f'--data_dir={data_dir}', f'--out_dir={tmp_path / out}', *args, **more)
    return tiny_fork


def read_log(folder):
    return [json.loads(line) for line in open(folder / 'log.jsonl')]


def losses(folder):
    """{step: exact loss}; a step that stands twice is an error."""
    steps = [(r['iter'], r['loss']) for r in read_log(folder) if 'loss' in r]
    assert len(dict(steps)) == len(steps)
    return dict(steps)


def weights(folder):
    return torch.load(folder / 'ckpt.pt', weights_only=True)['weights']


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---- A run --------------------------------------------------------------------------------------


def test_a_run_from_start_to_end(tiny, tmp_path):
    done = tiny('--max_iters=30', '--eval_interval=15', '--aux_weights={"block_balance": 0.01}')
    for word in ('parameters', 'active', 'val loss', 'bits per byte', 'sample', 'next', 'sample.py'):
        assert word in done.stdout
    log = read_log(tmp_path / 'run')
    assert list(losses(tmp_path / 'run')) == list(range(1, 31))
    keys = {'loss', 'block_balance', 'expert_balance', 'lr', 'grad_norm', 'tokens_per_s', 'epoch', 'words'}
    assert log[0]['iter'] == 0 and keys <= log[2].keys()
    about = log[0]['run']
    assert about['command'].startswith('train.py --model=moep') and about['settings']['max_iters'] == 30
    assert about['config']['n_embd'] == 16 and about['parameters'] >= about['active'] and about['torch']
    assert all(a['seconds'] <= b['seconds'] for a, b in zip(log, log[1:]))
    evals = [r for r in log if 'val' in r]
    assert [r['iter'] for r in evals] == [0, 15, 30]
    assert evals[-1]['val']['toy_stories']['loss'] < evals[0]['val']['toy_stories']['loss'] - 0.1
    assert evals[0]['routes'].keys() == {'shrink', 'parallel.0', 'grow'}
    assert all(abs(sum(share) - 1) < 1e-3 for share in evals[0]['routes'].values())
    model, ckpt = load_checkpoint(tmp_path / 'run')
    assert not model.training and ckpt['iter'] == 30 and (tmp_path / 'run' / 'meta.json').exists()


def test_what_is_recommended(tiny):
    routed = tiny('--max_iters=1', out='a').stdout
    assert '--routes' in routed and 'python eval_blimp.py' in routed
    plain = tiny('--max_iters=1', '--n_parallel=0', '--data=toy_math', out='b').stdout
    assert '--routes' not in plain and 'python -m tools.exact_answer' in plain and 'eval_blimp' not in plain


def test_plan_writes_nothing(tiny, tmp_path):
    done = tiny('--max_iters=0', '--batch_size=4', '--gradient_accumulation_steps=3')
    assert '4 windows x 32 tokens x 3 accumulated x 1 process = 384 tokens' in done.stdout
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('config, total', [('gpt2', 28e6), ('moep', 28e6), ('moep_swiglu', 38e6)])
def test_paper_sizes_without_data(run, tmp_path, config, total):
    args = [f'config/paper/{config}.py', '--max_iters=0', f'--data_dir={tmp_path}']
    told = run('train.py', *args, here=True).stdout
    count = float(told.split('moep: ')[1].split('M')[0]) * 1e6
    assert abs(count / total - 1) < 0.02
    assert 'python prepare.py babylm' in told


@pytest.mark.slow
@pytest.mark.parametrize('config', CONFIGS)
def test_every_config_trains(smokes, config):
    folder = smokes[config].result()
    assert len(losses(folder)) == 2 if folder else 'molm' in config


def test_a_run_equals_the_loop_written_out(tiny, data_dir, tmp_path):
    """Micro-batches, auxiliary losses, clipping, AdamW with decay for matrices, warm-up and cosine, dropout:
    by hand, step by step."""
    tiny('--max_iters=8', '--gradient_accumulation_steps=2', '--warmup_iters=3', '--warmup_lr=1e-3',
         '--learning_rate=2e-2', '--min_lr=4e-3', '--beta1=0.8', '--beta2=0.9', '--eps=1e-4',
         '--weight_decay=0.3', '--grad_clip=0.5', '--eval_interval=3', '--seed=7', '--n_block=4',
         '--n_expert=4', '--top_k=2', '--aux_weights=dict(block_balance=0.5, expert_balance=0.2)')
    rates = [1e-3 + 19e-3 * (i + 1) / 4 for i in range(3)]
    rates += [4e-3 + 8e-3 * (1 + math.cos(math.pi * i / 5)) for i in range(5)]
    text = np.fromfile(data_dir / 'toy_stories' / 'train.bin', np.uint16).astype(np.int64)
    text = torch.from_numpy(text)
    corpus = Corpus(Settings(data='toy_stories', data_dir=str(data_dir)), Machine('cpu'))
    order = Data(Settings(seed=7), corpus, 32, Machine('cpu')).order(0)
    torch.manual_seed(7)
    model = MoEP(MoEPConfig(**torch.load(tmp_path / 'run' / 'ckpt.pt', weights_only=True)['config']))
    torch.manual_seed(8)
    named = dict(model.named_parameters())
    first, second = ({n: torch.zeros_like(p) for n, p in named.items()} for _ in range(2))
    log = [r for r in read_log(tmp_path / 'run') if 'loss' in r]
    for step, (lr, told) in enumerate(zip(rates, log, strict=True), 1):
        total = {n: torch.zeros_like(p) for n, p in named.items()}
        nats = []
        for half in order[4 * step - 4:4 * step].reshape(2, 2):
            x, y = (torch.stack([text[s + shift:s + shift + 32] for s in half]) for shift in (0, 1))
            _, loss, aux = model(x, y)
            nats.append(loss.item())
            objective = loss + 0.5 * aux['block_balance'] + 0.2 * aux['expert_balance']
            for n, g in zip(named, torch.autograd.grad(objective, named.values())):
                total[n] += g / 2
        norm = torch.stack([g.square().sum() for g in total.values()]).sum().sqrt()
        expected = lr, sum(nats) / 2, norm.item()
        assert (told['lr'], told['loss'], told['grad_norm']) == pytest.approx(expected, rel=1e-4)
        with torch.no_grad():
            for n, p in named.items():
                g = total[n] * min(1.0, 0.5 / norm.item())
                first[n] = 0.8 * first[n] + 0.2 * g
                second[n] = 0.9 * second[n] + 0.1 * g * g
                p *= 1 - lr * 0.3 * (p.dim() >= 2 and not n.endswith(('gain', 'bias')))
                p -= lr * (first[n] / (1 - 0.8 ** step)) / ((second[n] / (1 - 0.9 ** step)).sqrt() + 1e-4)
    assert norm > 0.5                                    # it was clipped
    for n, w in weights(tmp_path / 'run').items():
        assert (w - model.state_dict()[n]).abs().max() < 1e-4, n


def test_an_auxiliary_value_without_gradient_is_told(run, data_dir, tmp_path):
    """A weight for what is there to be logged does nothing, and train.py says so."""
    def plan(*args):
        folders = [f'--data_dir={data_dir}', f'--out_dir={tmp_path}/x']
        return run('train.py', *args, '--max_iters=0', *folders, here=True).stdout
    told = plan('config/selfmoe.py', '--aux_weights=dict(layer_size_0=1.0)')
    assert "aux_weights names 'layer_size_0', which no weight that trains can change" in told
    # one that has a gradient in training alone: the released losses read the choices, which are sampled there
    told = plan('config/papaformer.py', '--connection=gumbel1', '--aux_form=released',
                '--aux_weights=dict(entropy=0.01, load=0.01)')
    assert 'no weight that trains' not in told


def test_dropout_schedules(run, data_dir, tmp_path, monkeypatch):
    rates = {}
    for name in typing.get_args(DropoutSchedule):
        s = Settings(dropout_schedule=name, dropout_phase=0.25)
        rates[name] = [round(train.dropout_rate(it, s, 8, 0.2), 4) for it in range(8)]
    assert rates == dict(constant=[0.2] * 8, early=[0.2] * 2 + [0.0] * 6, late=[0.0] * 2 + [0.2] * 6,
                         linear=[0.2, 0.175, 0.15, 0.125, 0.1, 0.075, 0.05, 0.025],
                         rising=[0.0, 0.025, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175],
                         triangle=[0.0, 0.05, 0.1, 0.15, 0.2, 0.15, 0.1, 0.05], triangles=[0.0, 0.2] * 4)
    assert [round(train.dropout_rate(it, s, 32, 0.2), 4) for it in range(8, 13)] == [0, 0.05, 0.1, 0.15, 0.2]
    for s.dropout_schedule, last in dict(linear=0.0, rising=0.2, triangle=0.0).items():
        assert train.dropout_rate(9, s, 8, 0.2) == last  # a resumed run may read a little more than planned

    def triangle(out, *args):
        run('train.py', 'config/stlm.py', f'--data_dir={data_dir}', '--dropout=0.2', '--batch_size=1',
            '--dropout_schedule=triangle', '--log_interval=1', '--save_interval=3', '--eval_tokens=64',
            '--sample_tokens=1', '--max_iters=8', f'--out_dir={tmp_path / out}', *args, here=True)
    triangle('whole')
    log = [r for r in read_log(tmp_path / 'whole') if 'loss' in r]
    assert [round(r['dropout'], 4) for r in log] == rates['triangle']
    # and a resumed run drops what an uninterrupted one drops
    save = RunFolder.save

    def save_and_end(*args):
        save(*args)
        sys.exit(0)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, 'save', save_and_end)
        triangle('half')
    assert list(losses(tmp_path / 'half')) == [1, 2, 3]
    triangle('half', '--resume')
    assert losses(tmp_path / 'half') == losses(tmp_path / 'whole')


def test_a_scheduled_rate_reaches_the_model(tiny, tmp_path):
    """Late, from half of the run on: until then it is the run without dropout."""
    model = ['--model=stlm', '--block_size=32', '--n_layer=2', '--n_head=2', '--n_kv_head=2', '--n_embd=16',
             *TRAINING[1:], '--max_iters=4']
    tiny('--dropout=0.5', '--dropout_schedule=late', '--dropout_phase=0.5', keys=model, out='late')
    tiny('--dropout=0.0', keys=model, out='never')
    late, never = losses(tmp_path / 'late'), losses(tmp_path / 'never')
    assert [abs(late[step] - never[step]) < 1e-4 for step in (1, 2, 3, 4)] == [True, True, False, False]


def test_tokens_per_second(tiny, tmp_path, monkeypatch):
    """Of all micro-batches, in steps of two seconds; evaluations do not count."""
    clock = [0.0]

    def lasting(seconds, work):
        def timed(*args):
            clock[0] += seconds
            return work(*args)
        return timed
    monkeypatch.setattr(train, 'time', SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(train, 'train_step', lasting(2, train.train_step))
    monkeypatch.setattr(train, 'evaluate', lasting(100, train.evaluate))
    tiny('--max_iters=3', '--eval_interval=1', '--gradient_accumulation_steps=3')

    def rates(folder):
        return [r['tokens_per_s'] for r in read_log(folder) if 'loss' in r]
    assert rates(tmp_path / 'run') == [2 * 3 * 32 / 2] * 3
    # a line counts from the one before, also where no evaluation lies between: the second step is slower
    seconds = iter((0, 6, 0))
    plain = train.train_step
    monkeypatch.setattr(train, 'train_step', lambda *args: lasting(next(seconds), plain)(*args))
    tiny('--max_iters=3', out='b')
    assert rates(tmp_path / 'b') == [2 * 32 / 2, 2 * 32 / 8, 2 * 32 / 2]


def test_checkpoints_by_words(tiny, tmp_path):
    at = '--checkpoint_words=[100, 101, 200, 1e3]'       # a step may pass two of them
    tiny('--max_iters=12', at, "--eval_data=['toy_lingo', 'toy_stories']")
    scored = [list(r['val']) for r in read_log(tmp_path / 'run') if 'val' in r]
    assert scored == [['toy_lingo', 'toy_stories']] * 2
    kept = sorted(p.name for p in (tmp_path / 'run').glob('ckpt_*'))
    assert kept == ['ckpt_100.pt', 'ckpt_101.pt', 'ckpt_200.pt']
    words = [load_checkpoint(tmp_path / 'run' / k)[1]['words'] for k in kept]
    assert 100 <= words[0] == words[1] < 200 <= words[2] < 300
    tiny('--max_iters=14', at, '--resume')               # those of before stay what they are
    assert [load_checkpoint(tmp_path / 'run' / k)[1]['words'] for k in kept] == words


def test_a_word_count_at_the_very_end(tiny, tmp_path):
    """The last windows fill no step, so a run falls short of its words by a part of one."""
    tiny('--max_iters=3', out='a')
    words = load_checkpoint(tmp_path / 'a')[1]['words']
    at = f'--checkpoint_words=[{1.1 * words}, {2 * words}]'
    said = tiny('--max_iters=3', at).stdout
    kept, = (tmp_path / 'run').glob('ckpt_*')
    assert load_checkpoint(kept)[1]['words'] == words
    assert f'the run ends at {short(words)} words: there is no checkpoint for {short(2 * words)}' in said
    assert 'no checkpoint' not in tiny('--max_iters=3', at, '--resume').stdout   # the first is there


def test_routes_are_those_of_the_first_validation_batch(monkeypatch):
    """Of the first data set that is scored, whatever the others are."""
    score = dict(loss=1.0, perplexity=2.0, bits_per_byte=3.0)
    monkeypatch.setattr(train, 'score_batches', lambda *_: score)
    monkeypatch.setattr(train, 'route_shares', lambda model, x, machine: x)
    batches = lambda name, *_: iter([(f'{name} 1', None), (f'{name} 2', None)])
    corpus = SimpleNamespace(scored=['b', 'a'], val_batches=batches, token_lengths=None)
    found = train.evaluate(None, corpus, SimpleNamespace(T=8, words=6.7), 3, Machine('cpu'))
    assert found == dict(words=7, val=dict(b=score, a=score), routes='b 1')


def test_a_word_count_that_is_met_exactly(tiny, tmp_path):
    """Its checkpoint is not written again when the run goes on."""
    tiny('--max_iters=2', out='a')
    words = load_checkpoint(tmp_path / 'a')[1]['words']
    for steps in (2, 3):
        tiny(f'--max_iters={steps}', f'--checkpoint_words=[{words!r}]', '--resume')
        kept, = (tmp_path / 'run').glob('ckpt_*')
        assert load_checkpoint(kept)[1]['iter'] == 2


# ---- Segment memory -----------------------------------------------------------------------------


def test_memory_ends_with_the_epoch(data_dir, tmp_path, tiny):
    """One step per epoch: the second step's text has nothing before it."""
    args = ['--stream', '--seq_len=16', '--memory=16', '--learning_rate=1e-9',
            "--data={'toy_stories': (0.0, 0.02)}"]
    s, _, _ = read_settings([*ENDLESS, *args, f'--data_dir={data_dir}'])
    machine = Machine('cpu')
    s.batch_size = 1
    s.batch_size = len(Data(s, Corpus(s, machine), 16, machine).starts) // 2 + 1
    tiny('--max_iters=2', *args, f'--batch_size={s.batch_size}', keys=ENDLESS)
    data = Data(s, Corpus(s, machine), 16, machine)
    model, _ = load_checkpoint(tmp_path / 'run')
    assert len(data.starts) == s.batch_size
    for step in (1, 2):
        _, want, _ = model(*data.batch(data.take(s.batch_size)))
        assert abs(losses(tmp_path / 'run')[step] - want.item()) < 1e-5


def test_segment_memory_extends_the_context(data_dir, tmp_path, tiny):
    """Steps over one stream with memory: from the second on, a loss is that of the second half of a context
    twice as long (one layer: keys and values are those of the tokens alone)."""
    args = ['--stream', '--seq_len=16', '--memory=16', '--batch_size=1', '--gradient_accumulation_steps=2',
            '--learning_rate=1e-9']
    tiny('--max_iters=4', *args, keys=ENDLESS)
    s, _, _ = read_settings([*ENDLESS, *args, f'--data_dir={data_dir}'])
    machine = Machine(s.device)
    data = Data(s, Corpus(s, machine), 16, machine)
    model, _ = load_checkpoint(tmp_path / 'run')
    before, _ = data.batch(data.take(2))
    for step in (2, 3, 4):
        x, y = data.batch(data.take(2))
        _, want, _ = model(torch.cat((before, x), 1), torch.cat((torch.full_like(x, -1), y), 1))
        assert abs(losses(tmp_path / 'run')[step] - want.item()) < 1e-5
        assert abs(model(x, y)[1].item() - want.item()) > 1e-5     # without the memory it is another number
        before = x


def test_memory_is_no_longer_than_asked():
    """After a step: the last keys and values of each micro-batch, without their history."""
    k = torch.arange(12.0).view(1, 2, 6, 1)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x, y, cache):
            assert all(pair[0].size(2) == 4 for pair in cache)   # what the step before left
            cache[:] = [(k * self.scale * x, torch.ones(1, 2, 6, 1))]
            return None, self.scale * 1.0, {}
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = SimpleNamespace(batch=lambda starts: (starts[0], None))
    s = SimpleNamespace(gradient_accumulation_steps=2, batch_size=1, memory=4, aux_weights={}, grad_clip=0)
    cpu = SimpleNamespace(world=1, rank=0, autocast=contextlib.nullcontext)
    memory = [[], []]
    for _ in range(2):
        train.train_step(model, optimizer, data, torch.tensor([3, 5]), memory, s, cpu)
    for ((key, value),), x in zip(memory, (3, 5)):
        assert torch.equal(key, k[:, :, 2:] * x) and value.shape == (1, 2, 4, 1) and not key.requires_grad


@pytest.mark.parametrize('config', ['moep', 'gpt2', 'papaformer', 'llama', 'selfmoe', 'stlm', 'stlm_depth'])
def test_segment_memory_is_refused_where_keys_have_positions(run, data_dir, tmp_path, config):
    """They would keep those of their own segment, and stand where the next one's tokens do."""
    args = ['--stream', '--seq_len=16', '--memory=16', f'--data_dir={data_dir}', f'--out_dir={tmp_path}/x']
    told = run('train.py', f'config/{config}.py', *args, code=2).stderr
    assert 'memory needs a model that reads beyond block_size, such as moduleformer' in told
    assert not (tmp_path / 'x').exists()


# ---- Killed and resumed -------------------------------------------------------------------------


@pytest.mark.slow
def test_five_kills(tiny_fork, tmp_path):
    """SIGKILL before the first save, during saves and at random moments: the run is the one that nobody
    disturbed."""
    args = ['--max_iters=90', '--save_interval=7', '--eval_interval=30', '--dropout=0.2']
    calm = tiny_fork(*args, out='calm')
    out = tmp_path / 'run'
    rng = random.Random(0)

    def steps_in_log():
        return (out / 'log.jsonl').read_bytes().count(b'"loss"') if (out / 'log.jsonl').exists() else 0
    during_save = 0
    at = 0                                               # the step of the last checkpoint
    for kill in range(5):
        (out / 'ckpt.tmp').unlink(missing_ok=True)
        process = tiny_fork('--resume', *args)
        if kill == 0:                                    # before the first checkpoint
            while steps_in_log() == 0:
                time.sleep(0.001)
        elif kill % 2:                                   # during a save, which lasts milliseconds: no sleep
            while not (out / 'ckpt.pt.tmp').exists() and process.is_alive():
                pass
        else:                                            # anywhere
            steps = at + rng.randint(1, 20)
            while steps_in_log() < steps and process.is_alive():
                time.sleep(0.001)
        during_save += (out / 'ckpt.pt.tmp').exists()
        process.kill()
        process.join()
        assert (out / 'ckpt.pt').exists() or at == 0     # once there is a checkpoint, there is always one,
        if (out / 'ckpt.pt').exists():
            at = read_checkpoint(out)['iter']            # and it can be read
    assert during_save >= 2 and at > 0
    for process in (calm, tiny_fork('--resume', *args)):
        process.join()
        assert process.exitcode == 0
    calm, disturbed = losses(tmp_path / 'calm'), losses(out)
    assert calm == disturbed and list(calm) == list(range(1, 91))
    assert same(weights(tmp_path / 'calm'), weights(out))
    logs = [read_log(tmp_path / 'calm'), read_log(out)]
    for record in [*logs[0], *logs[1]]:
        record.pop('tokens_per_s', None)
        record.pop('seconds')
    calm, disturbed = ([r for r in log if 'run' not in r] for log in logs)
    assert calm == disturbed                            # evaluations too


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signals_save_first(tiny_fork, tmp_path, number):
    args = ['--max_iters=60', '--save_interval=1000', '--eval_interval=1000', '--stream', '--seq_len=16',
            '--memory=16']
    calm = tiny_fork(*args, out='calm', keys=ENDLESS)
    out = tmp_path / 'run'
    process = tiny_fork(*args, keys=ENDLESS, output=tmp_path / 'output')
    while not (out / 'log.jsonl').exists() or (out / 'log.jsonl').read_bytes().count(b'"loss"') < 5:
        time.sleep(0.001)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 128 + number and '--resume' in (tmp_path / 'output').read_text()
    at = torch.load(out / 'ckpt.pt', weights_only=True)['iter']
    assert 4 <= at < 60                                  # the first "loss" is that of validation
    for process in (calm, tiny_fork('--resume', *args, keys=ENDLESS)):
        process.join()
        assert process.exitcode == 0
    assert losses(out) == losses(tmp_path / 'calm')      # segment memory and place in the streams came along


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_inside_a_step(tiny, tmp_path, monkeypatch, terminal, number):
    """The same without processes: the step is finished, saved, and the run goes on as if nothing had been."""
    args = ['--max_iters=6', '--stream', '--seq_len=16', '--memory=16', '--dropout=0.1']
    tiny(*args, out='calm', keys=ENDLESS)
    step = train.train_step
    calls = []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return step(*given)
    with monkeypatch.context() as patch:
        patch.setattr(train, 'train_step', interrupted)
        told = tiny('--overwrite', *args, keys=ENDLESS, code=128 + number).stdout
    assert 'stopped at step 3; to continue, run the same command with --resume --overwrite=False' in told
    assert read_checkpoint(tmp_path / 'run')['iter'] == 3
    tiny('--overwrite', *args, '--resume', '--overwrite=False', keys=ENDLESS)
    assert losses(tmp_path / 'run') == losses(tmp_path / 'calm')
    assert same(weights(tmp_path / 'run'), weights(tmp_path / 'calm'))


def test_loss_that_is_not_finite(tiny, tmp_path):
    done = tiny('--max_iters=40', '--learning_rate=1e12', '--grad_clip=0', '--save_interval=1',
                '--warmup_iters=0', '--weight_decay=0', code=2)
    assert 'not finite' in done.stderr and 'ckpt.pt' in done.stderr and 'Traceback' not in done.stderr
    assert all(w.isfinite().all() for w in weights(tmp_path / 'run').values())


def test_a_checkpoint_never_holds_nan(tiny, tmp_path):
    """With eps = 0 the weights are lost while every loss and gradient is still finite."""
    told = tiny('--max_iters=9', '--eps=0', '--save_interval=1', '--grad_clip=0', code=2).stderr
    assert 'a weight is not finite at step 1' in told
    assert not (tmp_path / 'run' / 'ckpt.pt').exists()


def test_resume_goes_by_the_place_in_the_data(tiny, tmp_path):
    """Another batch size, or other processes: no window twice, none lost, no step back in the schedule."""
    plan = ['--epochs=0.005']                            # 104 windows
    tiny(*plan, out='whole')
    steps = [r for r in read_log(tmp_path / 'whole') if 'loss' in r]
    assert steps[-1]['windows'] == 104 and len(steps) == 52
    tiny(*plan, '--max_iters=23')
    told = tiny(*plan, '--resume', '--batch_size=5').stdout
    assert 'resume    batch_size was 2, is now 5' in told
    tokens = 32 * 101                                    # 23 steps of 2 windows, 11 of 5
    assert f'plan      34 steps, {tokens / 1000:g}K tokens' in told
    tiny(*plan, '--resume', '--batch_size=4')            # 3 windows are left: no step
    assert [r['iter'] for r in read_log(tmp_path / 'run') if 'val' in r] == [0, 23, 34]      # none twice
    log = [r for r in read_log(tmp_path / 'run') if 'loss' in r]
    assert [r['iter'] for r in log] == list(range(1, 35))
    assert [r['windows'] for r in log] == [*range(2, 47, 2), *range(51, 102, 5)]
    at = {r['windows']: r['lr'] for r in steps}           # the rate after so many windows
    for a, b in zip(log[22:], log[23:]):
        if a['windows'] + 2 in at:
            assert math.isclose(b['lr'], at[a['windows'] + 2])
    assert 'nothing is left to train' in tiny(*plan, '--resume', '--batch_size=5').stdout
    assert 'from step 34' in tiny(*plan, '--resume', '--max_iters=0').stdout
    assert 'plan      34 steps' in tiny(*plan, '--resume', '--max_iters=0', '--batch_size=5').stdout


def test_a_gradient_that_is_not_finite(tiny, tmp_path, monkeypatch):
    """Also where every loss is; and a loss that is not, where every gradient is: of an impossible target."""
    step = train.train_step
    inf = torch.tensor(math.inf)
    breaks = dict(gradient=lambda mean, norm: (mean, inf),
                  loss=lambda mean, norm: (mean | dict(loss=inf), norm))
    for name, broken in breaks.items():
        monkeypatch.setattr(train, 'train_step', lambda *args: broken(*step(*args)))
        told = tiny('--max_iters=3', out=name, code=2).stderr
        assert 'the loss, its gradient or a weight is not finite at step 1' in told


def test_compiling_goes_by_the_steps_that_are_left(tiny, monkeypatch):
    asked = []

    def compile_model(model, whole):
        asked.append(whole)
        raise UserError('enough')
    tiny('--max_iters=2')
    monkeypatch.setattr(train, 'compile_model', compile_model)
    for steps in (50_001, 50_002):
        tiny('--compile', '--resume', f'--max_iters={steps}', code=2)
    assert asked == [False, True]


def test_finished_runs_are_not_lost(tiny, tmp_path):
    out = tmp_path / 'run'
    tiny('--max_iters=3')
    before = weights(out)
    told = tiny('--max_iters=3', code=2).stderr
    assert '--resume' in told and '--overwrite' in told and same(before, weights(out))
    # what would be another data order
    for other in ('seed=1', 'stride=8', 'seq_len=16', 'data=toy_math', 'epoch_words=100.0', 'stream'):
        told = tiny('--max_iters=5', '--resume', f'--{other}', code=2).stderr
        assert 'was trained with ' + other.split('=')[0] in told
    done = tiny('--max_iters=5', '--resume', '--weight_decay=0.5')
    assert 'max_iters was 3, is now 5' in done.stdout
    optimizer = torch.load(out / 'ckpt.pt', weights_only=True)['optimizer']
    assert optimizer['param_groups'][0]['weight_decay'] == 0.5
    assert list(losses(out)) == [1, 2, 3, 4, 5]
    (out / 'ckpt.pt').rename(out / 'ckpt_1M.pt')         # weights kept, the rest deleted
    assert '--overwrite' in tiny('--max_iters=3', code=2).stderr and (out / 'ckpt_1M.pt').exists()
    tiny('--max_iters=2', '--overwrite')
    assert list(losses(out)) == [1, 2] and not (out / 'ckpt_1M.pt').exists()


# ---- Processes ----------------------------------------------------------------------------------


def two_processes():
    """The environment that torchrun gives both."""
    with socket.create_server(('localhost', 0)) as free:
        port = str(free.getsockname()[1])
    return dict(MASTER_ADDR='localhost', MASTER_PORT=port, WORLD_SIZE='2')


def train_and_save_slowly(*given):
    save = plumbing.folder.save_file

    def slow(*args):
        time.sleep(1)
        save(*args)
    plumbing.folder.save_file = slow
    train_in_fork(*given)


@pytest.mark.slow
def test_two_processes_stop_together(tiny_fork, tmp_path):
    """torchrun ends all processes as soon as one has ended: none may while the first still saves."""
    env = two_processes()
    ranks = [tiny_fork('--max_iters=100000', '--save_interval=100000', '--eval_interval=100000', **env,
                       RANK=str(rank), target=train_and_save_slowly) for rank in (0, 1)]
    log = tmp_path / 'run/log.jsonl'
    while not log.exists() or log.read_bytes().count(b'"loss"') < 5:
        assert all(process.is_alive() for process in ranks)
        time.sleep(0.01)
    os.kill(ranks[1].pid, signal.SIGTERM)
    ranks[1].join(60)
    assert read_checkpoint(tmp_path / 'run')['iter'] >= 4
    ranks[0].join(60)
    assert [process.exitcode for process in ranks] == [128 + signal.SIGTERM] * 2


@pytest.mark.slow
def test_two_processes_equal_one(tiny, tiny_fork, tmp_path):
    common = ['--max_iters=8', '--dropout=0.0', '--top_k=2',
              '--aux_weights=dict(block_balance=0.01, expert_balance=0.01)']
    tiny(*common, '--gradient_accumulation_steps=4', out='one')

    def two(*args, out='two'):
        env = two_processes()
        outputs = [tmp_path / f'output_{rank}' for rank in (0, 1)]
        ranks = [tiny_fork(*common, '--gradient_accumulation_steps=2', *args, out=out, output=output, **env,
                           RANK=str(rank)) for rank, output in enumerate(outputs)]
        for process, output in zip(ranks, outputs):
            process.join()
            assert process.exitcode == 0, output.read_text()

    def val_losses(folder):
        return [r['val']['toy_stories']['loss'] for r in read_log(folder) if 'val' in r]
    two()
    one, both = losses(tmp_path / 'one'), losses(tmp_path / 'two')
    assert one.keys() == both.keys() and all(abs(one[i] - both[i]) < 1e-4 for i in one)
    for name, w in weights(tmp_path / 'one').items():
        assert (w - weights(tmp_path / 'two')[name]).abs().max() < 1e-4, name
    assert np.allclose(val_losses(tmp_path / 'one'), val_losses(tmp_path / 'two'), atol=1e-4)
    two('--max_iters=10', '--resume')
    assert list(losses(tmp_path / 'two')) == list(range(1, 11))
    tiny(*common, '--gradient_accumulation_steps=4', '--max_iters=10', '--resume', out='one')
    one, both = losses(tmp_path / 'one'), losses(tmp_path / 'two')
    assert abs(one[10] - both[10]) < 1e-4                # every process went on where it was
    two('--max_iters=11', '--resume', out='one')
    for folder in ('two', 'one'):                        # in the second, one process more than before
        ranks = torch.load(tmp_path / folder / 'ckpt.pt', weights_only=True)['ranks']
        assert len(ranks) == 2                           # each with random numbers of its own
        assert not torch.equal(*(rank['random']['cpu'] for rank in ranks))


# ---- A model of your own ------------------------------------------------------------------------


LOOSE = '''
import math
from dataclasses import dataclass
from moep import MoEP, MoEPConfig

@dataclass
class LooseConfig(MoEPConfig):
    noise: float = None
    most: float = math.inf

Config, Model = LooseConfig, MoEP
'''


def test_defaults_that_are_not_of_their_type(tiny, run, tmp_path, monkeypatch):
    """Such a Config is common. Its run can be resumed and read."""
    (tmp_path / 'loose.py').write_text(LOOSE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr('plumbing.models.ROOT', tmp_path)    # where model files are looked for
    monkeypatch.delitem(sys.modules, 'loose', raising=False)
    tiny('--model=loose', '--max_iters=2')
    tiny('--model=loose', '--max_iters=3', '--resume')
    assert list(losses(tmp_path / 'run')) == [1, 2, 3]
    run('sample.py', tmp_path / 'run', '--max_new_tokens=2', here=True)
    config = load_checkpoint(tmp_path / 'run')[0].config
    assert config.noise is None and config.most == math.inf


# ---- Starting from other runs -------------------------------------------------------------------


SURGERY = '''
from moep import Model, MoEPConfig

def widen(model, factor=2, batches=None):
    """Doubles the number of blocks by copying them; looks at calibration data; returns a report too."""
    config = MoEPConfig(**{**model.config.__dict__, 'n_block': model.config.n_block * factor})
    new = Model(config)
    state = model.state_dict()
    for name, v in state.items():
        if name.startswith('parallel'):
            state[name] = v.repeat(factor, *[1] * (v.dim() - 1))
    new.load_state_dict(state)
    x, y = batches[0]
    return new, f'saw {len(batches)} batches of {tuple(x.shape)}'

def freeze(model):
    for p in model.first.parameters():
        p.requires_grad_(False)
    return model

def average(models):
    for group in zip(*(m.parameters() for m in models)):
        group[0].data = sum(p.data for p in group) / len(group)
    return models[0]

def count(model):
    return dict(parameters=1)
'''


@pytest.fixture
def start(tiny, tmp_path, monkeypatch):
    """A run that starts from others: the model's settings come from the checkpoint."""
    (tmp_path / 'my_surgery.py').write_text(SURGERY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr('plumbing.models.ROOT', tmp_path)    # where surgeries are looked for
    for path in ROOT.glob('*.py'):
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.delitem(sys.modules, 'my_surgery', raising=False)
    rest = [a for a in TINY if a.split('=')[0][2:] not in MoEPConfig.__dataclass_fields__]

    def start(*args, out='new', keys=rest, **more):
        return tiny(*args, out=out, keys=keys, **more)
    return start


def test_fine_tuning_starts_where_the_base_ended(tiny, start, tmp_path):
    base = tmp_path / 'base'
    tiny('--max_iters=20', out='base')
    start(f'--init_from={base}', '--max_iters=2', '--dropout=0.0', out='tuned')
    first = [r for r in read_log(tmp_path / 'tuned') if 'val' in r][0]
    assert first['val'] == [r for r in read_log(base) if 'val' in r][-1]['val']


def test_init_from_and_surgery(tiny, start, tmp_path):
    base = tmp_path / 'base'
    tiny('--max_iters=4', out='base')
    told = tiny('--max_iters=4', '--seed=1', '--resume', out='other').stdout
    assert 'other: a new run and log begin' in told
    widen = [f'--init_from={base}', '--surgery=my_surgery.widen']
    # a surgery with calibration batches and a report, stopped before training, then resumed into training
    done = start(*widen, '--max_iters=0', '--surgery_batches=3')
    report = read_log(tmp_path / 'new')[1]['surgery']
    assert 'saw 3 batches of (2, 32)' in done.stdout and report in done.stdout
    model, ckpt = load_checkpoint(tmp_path / 'new')
    assert model.config.n_block == 4 and ckpt['iter'] == 0
    start(*widen, '--max_iters=3', '--resume')
    assert list(losses(tmp_path / 'new')) == [1, 2, 3]
    assert weights(tmp_path / 'new')['parallel.0.fc'].size(0) == 4
    # the same with the base's config, which says n_block = 2; after the surgery the model has 4
    for more in ([], ['--resume']):
        tiny(*widen, f'--max_iters={2 + len(more)}', *more, out='config')
    assert list(losses(tmp_path / 'config')) == [1, 2, 3]
    # several runs into one
    both = f'--init_from=["{base}", "{tmp_path / "other"}"]'
    start(both, '--surgery=my_surgery.average', '--max_iters=0', out='mean')
    a, b, mean = weights(base), weights(tmp_path / 'other'), weights(tmp_path / 'mean')
    assert torch.allclose(mean['wte.weight'], (a['wte.weight'] + b['wte.weight']) / 2)


def test_what_a_surgery_froze_stays_frozen(tiny, start, tmp_path):
    base = tmp_path / 'base'
    tiny('--max_iters=2', out='base')
    before = weights(base)

    def check(folder):
        for name, w in weights(folder).items():
            assert torch.equal(w, before[name]) == name.startswith('first.'), name
    freeze = [f'--init_from={base}', '--surgery=my_surgery.freeze']
    start(*freeze, '--max_iters=2', '--save_interval=1', '--checkpoint_words=[10]', out='frozen')
    start(*freeze, '--max_iters=4', '--resume', out='frozen')
    check(tmp_path / 'frozen')                           # after a resume too
    for where in ('frozen', 'frozen/ckpt_10.pt'):        # or when another run starts from it
        start(f'--init_from={tmp_path}/{where}', '--max_iters=2', '--overwrite', out='onwards')
        check(tmp_path / 'onwards')
    widen = [f'--init_from={base}', '--surgery=my_surgery.widen']
    told = start(*widen, '--max_iters=6', '--resume', out='frozen', code=2).stderr
    assert "was trained with surgery = 'my_surgery.freeze'" in told


def test_mistakes_in_starting_from_other_runs(tiny, start, tmp_path):
    base = tmp_path / 'base'
    tiny('--max_iters=1', out='base')
    no_widn = "my_surgery.py has no function widn of a model; did you mean 'widen'?"
    for args, message in [
            (['--surgery=my_surgery.widn'], no_widn),
            (['--surgery=moduleformer.insert_experts'], 'it is called as insert_experts(model, '),
            (['--surgery=my_surgery.nothing'], 'no surgery'),
            (['--surgery=math.pi'], 'math.py has no function pi'),
            (['--surgery=my_surgery.widen', '--surgery_args={"x": 1}'], "'x'; it is called as widen(model, "),
            (['--surgery=my_surgery.widen', '--n_embd=8'], 'n_embd'),
            (['--n_embd=32'], 'do not fit'),
            ([f'--init_from=["{base}", "{base}"]'], 'surgery'),
            (['--surgery=my_surgery.count'], 'does not return a model'),
            ([f'--init_from=["{base}"]', '--surgery=my_surgery.freeze'], 'called as freeze(model')]:
        assert message in start(f'--init_from={base}', *args, code=2, out='bad').stderr
    assert 'init_from' in start('--surgery=my_surgery.widen', code=2, out='bad').stderr
    told = start(f'--init_from={base}', '--max_iters=1', '--overwrite', code=2, out='base').stderr
    assert 'which --overwrite deletes' in told and (base / 'ckpt.pt').exists()


# ---- Mistakes -----------------------------------------------------------------------------------


def one_line(done):
    assert done.stderr.startswith('train.py: ') and done.stderr.count('\n') == 1
    assert 'Traceback' not in done.stderr
    return done.stderr


@pytest.mark.parametrize('args, words', [
    (['--n_emdb=8'], ["'n_emdb'", "'n_embd'"]),
    (['--batch_size=big'], ['batch_size', "'big'", 'int']),
    (['--n_embd=8.5'], ['n_embd', 'int']),
    (['--dropout=True'], ['dropout', 'float']),
    (['--data=nothing'], ['nothing', 'python prepare.py']),
    (['--data=toy_bytes'], ['toy_bytes holds chunks of 9 slots', 'moep reads tokens: prepare it without']),
    (['--dropout_schedule=early'], ['needs a model that has set_dropout']),
    (['--dropout_schedule=never'], ['never', 'it can be constant, early, late, linear, rising']),
    (['--data=babylm'], ['babylm', 'python prepare.py babylm']),
    (['--data=tinystories_neox'], ['python prepare.py tinystories --name tinystories_neox, and the options']),
    (['--data=my_book'], ['python prepare.py text --name my_book']),
    (['--vocab_size=100'], ['vocab_size', '100']),
    (['--model=nothing'], ['nothing.py', 'moep']),
    (['--balance=swich'], ['swich', 'switch']),
    (['--n_head=3'], ['heads']),
    (['--schedule=cosin'], ['cosine']),
    (['--aux_weights={"balance": 1.0}'], ['balance', 'block_balance']),
    (['--init_from=out/nothing_there'], ['no checkpoint']),
    (['--memory=16'], ['stream']),
    (['--seq_len=64'], ['a seq_len of 64', 'block_size']),
    (['--data=toy_storys'], ["did you mean 'toy_stories'? If not, make the data set with: "
                             'python prepare.py text --name toy_storys']),
    (['--batch_size', '8'], ['--batch_size=8']),
    (['--device=tpu'], ['tpu']),
    (['--device=cuda:1'], ['cuda:1', 'CUDA_VISIBLE_DEVICES']),
    (['--init_from=config/moep.py'], ['no checkpoint config/moep.py/ckpt.pt']),
    (['config/qqqqqqq.py'], ['no config file config/qqqqqqq.py\n']),
    (['config/meop.py'], ['did you mean config/moep.py?']),
    (['config/paper/stlm/basline.py'], ['did you mean config/paper/stlm/baseline.py?']),
    (['learning_rate=1e-3'], ['write --learning_rate=1e-3']),
    (['moduleformer'], ['did you mean config/moduleformer.py?']),
    (['LICENSE'], ['LICENSE:1: ']),
    (['config/arena/selfmoe_gates'], ['selfmoe_gates: that is a folder; name a config in it\n']),
    (['--model=prepare'], ["prepare.py lacks the line 'Config, Model"]),
    (['--top_k=9'], ['top_k = 9 is more than n_block or n_expert']),
    (['--qqq=1'], ["unknown key 'qqq', which is no field of Settings and MoEPConfig\n"]),
    (['--init_from=docs', '--surgery=compose'], ['no checkpoint docs/ckpt.pt']),
])
def test_mistakes_are_one_line(tiny, tmp_path, args, words):
    line = one_line(tiny('--max_iters=5', *args, code=2))
    assert all(word in line for word in words), line
    assert not (tmp_path / 'run').exists()


def test_without_a_config(run):
    done = run('train.py', code=2, here=True)
    assert one_line(done) == 'train.py: name a config, such as config/moep.py, or see --help\n'


@pytest.mark.parametrize('value', [0.5, torch.ones(2)])
def test_an_auxiliary_value_is_one_number(tiny, monkeypatch, value):
    real = moep.MoEP.forward

    def forward(self, *args, **kwargs):
        logits, loss, aux = real(self, *args, **kwargs)
        return logits, loss, dict(aux, odd=value)
    monkeypatch.setattr(moep.MoEP, 'forward', forward)
    line = one_line(tiny('--max_iters=2', code=2))
    assert "aux['odd'] must be a tensor of one number" in line


def test_one_run_at_a_time_in_a_folder(tiny, tmp_path):
    fcntl = pytest.importorskip('fcntl')
    (tmp_path / 'run').mkdir()
    with open(tmp_path / 'run' / 'log.jsonl', 'a') as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert 'log.jsonl is being written by another run' in one_line(tiny('--max_iters=2', code=2))
    tiny('--max_iters=2')


def test_what_is_said_without_a_terminal(tiny, tmp_path):
    """A line with the loss every ten log intervals; that nothing is left to train, or the log was lost."""
    told = tiny('--max_iters=4', '--log_interval=1').stdout
    assert re.search(r'step +4  loss [0-9.]+, [0-9.K]+ tokens/s', told)
    sizes = dict(model='stlm', n_layer=1, n_embd=32, n_head=2, n_kv_head=2, byte_limit=8, block_size=36)
    keys = [f'--{key}={value}' for key, value in sizes.items()]
    told = tiny('--max_iters=1', '--data=toy_bytes', keys=keys, out='bytes').stdout
    assert 'slots/s' in told and 'slots, 125.5K for validation' in told and 'tokens' not in told
    assert 'from step 4: nothing is left to train' in tiny('--max_iters=3', '--resume').stdout
    (tmp_path / 'run' / 'log.jsonl').unlink()
    told = tiny('--max_iters=5', '--resume').stdout
    assert 'log.jsonl was damaged: it has lost lines since the checkpoint was saved' in told


def test_broken_data(tiny, data_dir, tmp_path):
    root = tmp_path / 'data'
    shutil.copytree(data_dir / 'toy_stories', root / 'cut')
    with open(root / 'cut' / 'train.bin', 'r+b') as f:
        f.truncate(1001)
    line = one_line(tiny('--max_iters=2', f'--data_dir={root}', '--data=cut', code=2))
    assert 'train.bin' in line
    shutil.copytree(data_dir / 'toy_math', root / 'other')
    meta = json.loads((root / 'other' / 'meta.json').read_text())
    meta['tokenizer']['hash'] = 'another'
    (root / 'other' / 'meta.json').write_text(json.dumps(meta))
    shutil.copytree(data_dir / 'toy_stories', root / 'stories')
    data = '--data={"stories": (0, 1), "other": (0, 1)}'
    line = one_line(tiny('--max_iters=2', f'--data_dir={root}', data, code=2))
    assert 'different tokenizers' in line and '--tokenizer' in line
    scored = ['--data=stories', '--eval_data=other']
    line = one_line(tiny('--max_iters=2', f'--data_dir={root}', *scored, code=2))
    assert 'stories and other have different tokenizers' in line and '--eval_data' in line
    assert not (tmp_path / 'run').exists()


def test_broken_checkpoints(tiny, tmp_path):
    tiny('--max_iters=2')
    out = tmp_path / 'run'

    def resume(*args):
        return one_line(tiny('--max_iters=4', '--resume', *args, code=2))
    assert 'n_embd' in resume('--n_embd=32')
    whole = (out / 'ckpt.pt').read_bytes()
    ckpt = torch.load(out / 'ckpt.pt', weights_only=True)
    torch.save(dict(ckpt, model='papaformer'), out / 'ckpt.pt')
    assert "unexpected keyword argument 'n_head_parallel'" in resume()   # it has a config of another model
    torch.save(dict(ckpt, tokenizer='another'), out / 'ckpt.pt')
    assert 'tokenizer' in resume()
    line = one_line(tiny('--max_iters=4', f'--init_from={out}', code=2, out='next'))
    assert 'another tokenizer' in line
    for broken in (whole[:len(whole) // 2], b'', b'not a checkpoint'):
        (out / 'ckpt.pt').write_bytes(broken)
        assert 'cannot be read as a checkpoint' in resume()
        assert (out / 'ckpt.pt').read_bytes() == broken


def test_a_folder_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / 'run').write_text('a file, where the folder should be')
    assert 'run' in one_line(tiny('--max_iters=2', code=2))


def test_epochs_make_the_plan(tiny):
    plan = ['--max_iters=0', '--epochs=0.001', '--batch_size=8']
    assert '2 steps' in tiny(*plan).stdout
    assert ' 1 steps' in tiny(*plan, '--gradient_accumulation_steps=2').stdout


# ---- Optimiser and schedules --------------------------------------------------------------------


def test_set_rate_reaches_the_optimizer():
    """A number on the CPU; on a GPU a tensor that stays the same one, since a graph holds it."""
    for lr in (1e-3, torch.tensor(1e-3)):
        groups = [dict(params=[torch.nn.Parameter(torch.ones(2))]) for _ in range(2)]
        optimizer = torch.optim.AdamW(groups, lr=lr)
        before = [group['lr'] for group in optimizer.param_groups]
        train.set_rate(optimizer, 0.5)
        for group, old in zip(optimizer.param_groups, before):
            assert float(group['lr']) == 0.5 and (not torch.is_tensor(lr) or group['lr'] is old)


def test_a_step_leaves_no_old_gradient():
    """Two steps at a rate of 0: the second gradient is that of its own data alone."""
    linear = torch.nn.Linear(2, 1)
    seen = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x, y):
            return None, self.linear(x.float()).mean(), {}
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = SimpleNamespace(batch=lambda starts: (starts[:, None].expand(-1, 2), None))
    s = SimpleNamespace(gradient_accumulation_steps=2, batch_size=1, memory=0, aux_weights={}, grad_clip=0)
    cpu = SimpleNamespace(world=1, rank=0, autocast=contextlib.nullcontext)
    for starts in ([1, 3], [5, 7]):
        train.train_step(model, optimizer, data, torch.tensor(starts), None, s, cpu)
        seen.append(linear.weight.grad.tolist())
    assert seen == [[[2.0, 2.0]], [[6.0, 6.0]]]


def test_decay_on_matrices_only():
    model = MoEP(MoEPConfig(vocab_size=10, block_size=8, n_embd=16, n_head=2, n_embd_parallel=8,
                            n_head_parallel=1, n_parallel=1))
    decayed, spared = train.make_optimizer(model, Settings(weight_decay=0.3), Machine('cpu')).param_groups
    assert decayed['weight_decay'] == 0.3 and spared['weight_decay'] == 0
    names = {id(p): n for n, p in model.named_parameters()}
    matrices = ('weight', 'qkv', 'proj', 'fc', 'down')
    assert all(names[id(p)].split('.')[-1] in matrices for p in decayed['params'])
    vectors = {'parallel.0.ln_1_gain', 'parallel.0.fc_bias', 'shrink.down_bias', 'ln_f.weight'}
    assert {names[id(p)] for p in spared['params']} >= vectors
    assert len(decayed['params']) + len(spared['params']) == len(names)


def test_learning_rate():
    s = Settings(learning_rate=1.0, min_lr=0.1, warmup_iters=9, schedule='cosine')
    rates = [train.learning_rate(i, s, 109) for i in (0, 8, 9, 59, 109)]
    assert rates == pytest.approx([0.1, 0.9, 1.0, 0.55, 0.1])
    s.schedule = 'linear'
    assert train.learning_rate(34, s, 109) == pytest.approx(0.775)
    for s.schedule in ('cosine', 'linear'):              # a resumed run may read a little more than planned
        assert train.learning_rate(119, s, 109) == pytest.approx(0.1)
    s.schedule = 'constant'
    assert train.learning_rate(109, s, 109) == 1.0
    s.warmup_lr = 0.5
    assert [train.learning_rate(i, s, 109) for i in (0, 8)] == pytest.approx([0.55, 0.95])
