"""train.py as a user meets it: runs, kills, resumes, processes, surgery, and what it says to mistakes."""

import contextlib
import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import configurator
import moep
import settings
import train
from conftest import ROOT
from moep import MoEP, MoEPConfig
from prepare import UserError

TINY = ['--model=moep', '--block_size=32', '--n_layer=2', '--n_head=2', '--n_embd=16', '--n_parallel=1',
        '--n_head_parallel=1', '--n_embd_parallel=16', '--n_block=2', '--n_expert=2', '--top_k=1', '--dropout=0.1',
        '--batch_size=2', '--warmup_iters=5', '--eval_tokens=256', '--log_interval=1', '--sample_tokens=5']
ENDLESS = ['--model=moduleformer', '--block_size=32', '--n_layer=1', '--n_embd=16', '--n_att=2', '--d_att=8', '--n_head=1', '--n_ffd=2',
           '--d_ffd=16', '--top_k=1', '--d_router=8', *TINY[12:]]        # without positions: what segment memory needs


@pytest.fixture
def tiny(run, data_dir, tmp_path):
    def tiny(*args, code=0, out='run', keys=TINY, **env):
        return run('train.py', *keys, f'--data_dir={data_dir}', f'--out_dir={tmp_path / out}', *args, code=code, **env)
    return tiny


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


# ------------------------------------------------------------------------------------------------ a run


def test_a_run_from_start_to_end(tiny, tmp_path):
    done = tiny('--max_iters=30', '--eval_interval=15', '--aux_weights={"block_balance": 0.01}')
    for word in ('parameters', 'active', 'val loss', 'bits per byte', 'sample', 'next', 'sample.py'):
        assert word in done.stdout
    log = read_log(tmp_path / 'run')
    assert list(losses(tmp_path / 'run')) == list(range(1, 31))
    assert {'loss', 'block_balance', 'expert_balance', 'lr', 'grad_norm', 'tokens_per_s', 'epoch', 'words'} <= log[1].keys()
    evals = [r for r in log if 'val' in r]
    assert [r['iter'] for r in evals] == [0, 15, 30]
    assert evals[-1]['val']['toy_stories']['loss'] < evals[0]['val']['toy_stories']['loss'] - 0.1
    assert evals[0]['routes'].keys() == {'shrink', 'parallel.0', 'grow'}
    assert all(abs(sum(share) - 1) < 1e-3 for share in evals[0]['routes'].values())
    model, ckpt = train.load_checkpoint(tmp_path / 'run')
    assert not model.training and ckpt['iter'] == 30 and (tmp_path / 'run' / 'meta.json').exists()


def test_what_is_recommended(tiny):
    routed = tiny('--max_iters=1', out='a').stdout
    assert '--routes' in routed and 'python eval_blimp.py' in routed
    plain = tiny('--max_iters=1', '--n_parallel=0', '--data=toy_math', out='b').stdout
    assert '--routes' not in plain and 'python exact_answer.py' in plain and 'eval_blimp' not in plain


def test_help_names_every_setting(run):
    text = run('train.py', 'config/papaformer.py', '--help').stdout
    for word in ('learning_rate: float = 1e-3            # of AdamW', 'path_embd', 'python train.py config', 'in papaformer.py'):
        assert word in text
    assert 'def ' not in text


def test_plan_writes_nothing(tiny, tmp_path):
    done = tiny('--max_iters=0', '--batch_size=4', '--gradient_accumulation_steps=3')
    assert '4 chunks x 32 tokens x 3 accumulated x 1 process = 384 tokens' in done.stdout
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('config, total', [('gpt2', 28e6), ('moep', 28e6), ('moep_swiglu', 38e6)])
def test_paper_sizes_without_data(run, tmp_path, config, total):
    done = run('train.py', f'config/paper/{config}.py', '--max_iters=0', f'--data_dir={tmp_path}')
    count = float(done.stdout.split('moep: ')[1].split('M')[0]) * 1e6
    assert abs(count / total - 1) < 0.02
    assert 'python prepare.py babylm' in done.stdout


@pytest.mark.parametrize('config', sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob('config/**/*.py')))
def test_every_config_trains(smokes, config):
    folder = smokes[config].result()
    assert len(losses(folder)) == 2 if folder else 'molm' in config


def test_a_run_equals_the_loop_written_out(tiny, data_dir, tmp_path):
    """Micro-batches, auxiliary losses, clipping, AdamW with decay for matrices, warm-up and cosine, dropout: by hand, step by step."""
    tiny('--max_iters=8', '--gradient_accumulation_steps=2', '--warmup_iters=3', '--warmup_lr=1e-3', '--learning_rate=2e-2', '--min_lr=4e-3',
         '--beta1=0.8', '--beta2=0.9', '--eps=1e-4', '--weight_decay=0.3', '--grad_clip=0.5', '--eval_interval=3', '--seed=7',
         '--aux_weights=dict(block_balance=0.5, expert_balance=0.2)', '--n_block=4', '--n_expert=4', '--top_k=2')
    rates = [1e-3 + 19e-3 * (i + 1) / 4 for i in range(3)] + [4e-3 + 8e-3 * (1 + math.cos(math.pi * i / 5)) for i in range(5)]
    text = torch.from_numpy(np.fromfile(data_dir / 'toy_stories' / 'train.bin', np.uint16).astype(np.int64))
    corpus = train.Corpus(settings.Settings(data='toy_stories', data_dir=str(data_dir)), train.Machine('cpu'))
    order = train.Data(settings.Settings(seed=7), corpus, 32, train.Machine('cpu')).order(0)
    torch.manual_seed(7)
    model = MoEP(MoEPConfig(**torch.load(tmp_path / 'run' / 'ckpt.pt', weights_only=True)['config']))
    torch.manual_seed(8)
    named = dict(model.named_parameters())
    first, second = ({n: torch.zeros_like(p) for n, p in named.items()} for _ in range(2))
    log = [r for r in read_log(tmp_path / 'run') if 'loss' in r]
    for step, (lr, told) in enumerate(zip(rates, log, strict=True), 1):
        total = {n: torch.zeros_like(p) for n, p in named.items()}
        losses = []
        for half in order[4 * step - 4:4 * step].reshape(2, 2):
            x, y = (torch.stack([text[s + shift:s + shift + 32] for s in half]) for shift in (0, 1))
            _, loss, aux = model(x, y)
            losses.append(loss.item())
            for n, g in zip(named, torch.autograd.grad(loss + 0.5 * aux['block_balance'] + 0.2 * aux['expert_balance'], named.values())):
                total[n] += g / 2
        norm = torch.stack([g.square().sum() for g in total.values()]).sum().sqrt()
        assert (told['lr'], told['loss'], told['grad_norm']) == pytest.approx((lr, sum(losses) / 2, norm.item()), rel=1e-4)
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


def test_memory_ends_with_the_epoch(data_dir, tmp_path, tiny):
    """One step per epoch: the second step's text has nothing before it."""
    args = ['--stream', '--seq_len=16', '--memory=16', '--learning_rate=1e-9', "--data={'toy_stories': (0.0, 0.02)}"]
    s, _, _ = settings.read_settings([*ENDLESS, *args, f'--data_dir={data_dir}'])
    machine, s.batch_size = train.Machine('cpu'), 1
    s.batch_size = len(train.Data(s, train.Corpus(s, machine), 16, machine).starts) // 2 + 1
    tiny('--max_iters=2', *args, f'--batch_size={s.batch_size}', keys=ENDLESS)
    data = train.Data(s, train.Corpus(s, machine), 16, machine)
    model, _ = train.load_checkpoint(tmp_path / 'run')
    assert len(data.starts) == s.batch_size
    for step in (1, 2):
        assert abs(losses(tmp_path / 'run')[step] - model(*data.batch(data.take(s.batch_size)))[1].item()) < 1e-5


def test_an_auxiliary_value_without_gradient_is_told(run, data_dir, tmp_path):
    """A weight for what is there to be logged does nothing, and train.py says so."""
    told = run('train.py', 'config/selfmoe.py', '--max_iters=0', f'--data_dir={data_dir}', '--aux_weights=dict(layer_size_0=1.0)', f'--out_dir={tmp_path}/x').stdout
    assert "aux_weights names 'layer_size_0', which no weight that trains can change" in told
    # one that has a gradient in training alone: the released losses read the choices, which are sampled there
    told = run('train.py', 'config/papaformer.py', '--max_iters=0', '--connection=gumbel1', '--aux_form=released',
               '--aux_weights=dict(entropy=0.01, load=0.01)', f'--data_dir={data_dir}', f'--out_dir={tmp_path}/y').stdout
    assert 'no weight that trains' not in told


def test_shares_of_routes():
    """Counted where some get nothing; where all get something, the gates are added up."""
    hard, soft = torch.tensor([[[0.7, 0.3, 0.0], [0.0, 0.6, 0.4]]]), torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.2, 0.3]]])
    model = SimpleNamespace(eval=lambda: None, train=lambda: None, routes=lambda x: dict(hard=hard, soft=soft))
    assert train.route_shares(model, None, train.Machine('cpu')) == dict(hard=[0.25, 0.5, 0.25], soft=[0.6, 0.2, 0.2])


def test_dropout_schedules(run, data_dir, tmp_path):
    rates = {name: [round(train.dropout_rate(it, settings.Settings(dropout_schedule=name, dropout_phase=0.25), 8, 0.2), 4)
                    for it in range(8)] for name in ('constant', 'early', 'late', 'linear', 'triangle')}
    assert rates == dict(constant=[0.2] * 8, early=[0.2] * 2 + [0.0] * 6, late=[0.0] * 2 + [0.2] * 6,
                         linear=[0.2, 0.175, 0.15, 0.125, 0.1, 0.075, 0.05, 0.025],
                         triangle=[0.0, 0.05, 0.1, 0.15, 0.2, 0.15, 0.1, 0.05])
    args = ['config/stlm.py', f'--data_dir={data_dir}', '--dropout=0.2', '--dropout_schedule=triangle', '--batch_size=1',
            '--log_interval=1', '--save_interval=3', '--eval_tokens=64', '--sample_tokens=1']
    run('train.py', *args, '--max_iters=8', f'--out_dir={tmp_path}/whole')
    log = [r for r in read_log(tmp_path / 'whole') if 'loss' in r]
    assert [round(r['dropout'], 4) for r in log] == rates['triangle']
    ckpt = tmp_path / 'half' / 'ckpt.pt'                 # and a resumed run drops what an uninterrupted one drops
    ckpt.parent.mkdir()
    killer = (f"import sys, train; sys.argv = ['train.py', *{args!r}, '--max_iters=8', '--out_dir={tmp_path}/half']\n"
              "save = train.Trainer.save\n"
              "def once(self, *a, **k):\n    save(self, *a, **k)\n    sys.exit(0)\n"
              "train.Trainer.save = once\ntrain.main()")
    subprocess.run([sys.executable, '-c', killer], cwd=ROOT, check=True, capture_output=True,
                   env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)})
    run('train.py', *args, '--max_iters=8', f'--out_dir={tmp_path}/half', '--resume')
    assert losses(tmp_path / 'half') == losses(tmp_path / 'whole')


def test_a_scheduled_rate_reaches_the_model(tiny, tmp_path):
    """Late, from half of the run on: until then it is the run without dropout."""
    model = ['--model=stlm', '--block_size=32', '--n_layer=2', '--n_head=2', '--n_kv_head=2', '--n_embd=16', *TINY[12:]]
    tiny('--max_iters=4', '--dropout=0.5', '--dropout_schedule=late', '--dropout_phase=0.5', keys=model, out='late')
    tiny('--max_iters=4', '--dropout=0.0', keys=model, out='never')
    late, never = losses(tmp_path / 'late'), losses(tmp_path / 'never')
    assert [late[step] == never[step] for step in (1, 2, 3, 4)] == [True, True, False, False]


def test_checkpoints_by_words(tiny, tmp_path):
    tiny('--max_iters=12', '--checkpoint_words=[100, 200, 1e3]', "--eval_data=['toy_lingo', 'toy_stories']")
    assert [list(r['val']) for r in read_log(tmp_path / 'run') if 'val' in r] == [['toy_lingo', 'toy_stories']] * 2
    kept = sorted(p.name for p in (tmp_path / 'run').glob('ckpt_*'))
    assert kept == ['ckpt_100.pt', 'ckpt_200.pt']
    words = [train.load_checkpoint(tmp_path / 'run' / k)[1]['words'] for k in kept]
    assert 100 <= words[0] < 200 <= words[1] < 300
    tiny('--max_iters=14', '--checkpoint_words=[100, 200, 1e3]', '--resume')   # those of before stay what they are
    assert [train.load_checkpoint(tmp_path / 'run' / k)[1]['words'] for k in kept] == words


def test_segment_memory_extends_the_context(data_dir, tmp_path, tiny):
    """Steps over one stream with memory: from the second on, a loss is that of the second half of a context twice as long (one layer:
    keys and values are those of the tokens alone)."""
    args = ['--stream', '--seq_len=16', '--memory=16', '--batch_size=1', '--gradient_accumulation_steps=2', '--learning_rate=1e-9']
    tiny('--max_iters=4', *args, keys=ENDLESS)
    s, module, keys = settings.read_settings([*ENDLESS, *args, f'--data_dir={data_dir}'])
    machine = train.Machine(s.device)
    data = train.Data(s, train.Corpus(s, machine), 16, machine)
    model, _ = train.load_checkpoint(tmp_path / 'run')
    before, _ = data.batch(data.take(2))
    for step in (2, 3, 4):
        x, y = data.batch(data.take(2))
        _, want, _ = model(torch.cat((before, x), 1), torch.cat((torch.full_like(x, -1), y), 1))
        assert abs(losses(tmp_path / 'run')[step] - want.item()) < 1e-5
        assert abs(model(x, y)[1].item() - want.item()) > 1e-5     # without the memory it is another number
        before = x


def test_memory_is_no_longer_than_asked():
    k, v = torch.arange(12.0).view(1, 2, 6, 1).requires_grad_(), torch.ones(1, 2, 6, 1)
    (key, value), = train.trim([(k * 1, v)], 4)
    assert torch.equal(key, k[:, :, 2:]) and value.shape == (1, 2, 4, 1) and not key.requires_grad


@pytest.mark.parametrize('config', ['moep', 'gpt2', 'papaformer', 'llama', 'selfmoe', 'stlm'])
def test_segment_memory_is_refused_where_keys_have_positions(run, data_dir, tmp_path, config):
    """They would keep those of their own segment, and stand where the next one's tokens do."""
    told = run('train.py', f'config/{config}.py', '--stream', '--seq_len=16', '--memory=16', f'--data_dir={data_dir}', f'--out_dir={tmp_path}/x', code=2).stderr
    assert 'memory needs a model without positions, as moduleformer' in told and not (tmp_path / 'x').exists()


# ------------------------------------------------------------------------------------------------ killed and resumed


def test_ten_kills(tiny, data_dir, tmp_path):
    """SIGKILL before the first save, during saves and at random moments: the run is the one that nobody disturbed."""
    args = ['--max_iters=200', '--save_interval=7', '--eval_interval=50', '--dropout=0.2']
    tiny(*args, out='calm')
    out = tmp_path / 'run'
    command = [sys.executable, str(ROOT / 'train.py'), *TINY, f'--data_dir={data_dir}', f'--out_dir={out}', '--resume', *args]
    rng = random.Random(0)

    def steps_in_log():
        return (out / 'log.jsonl').read_bytes().count(b'"loss"') if (out / 'log.jsonl').exists() else 0
    during_save, at = 0, 0                               # at: the step of the last checkpoint
    for kill in range(10):
        (out / 'ckpt.tmp').unlink(missing_ok=True)
        process = subprocess.Popen(command, env={**os.environ, 'OMP_NUM_THREADS': '1'}, stdout=subprocess.DEVNULL)
        if kill == 0:                                    # before the first checkpoint
            while steps_in_log() == 0:
                time.sleep(0.001)
        elif kill % 2:                                   # during a save, which lasts milliseconds: no sleep
            while not (out / 'ckpt.tmp').exists() and process.poll() is None:
                pass
        else:                                            # anywhere
            steps = at + rng.randint(1, 20)
            while steps_in_log() < steps and process.poll() is None:
                time.sleep(0.001)
        during_save += (out / 'ckpt.tmp').exists()
        process.kill()
        process.wait()
        assert (out / 'ckpt.pt').exists() or at == 0     # once there is a checkpoint, there is always one,
        if (out / 'ckpt.pt').exists():
            at = train.read_checkpoint(out)['iter']      # and it can be read
    assert during_save >= 2 and at > 0
    tiny('--resume', *args)
    calm, disturbed = losses(tmp_path / 'calm'), losses(out)
    assert calm == disturbed and list(calm) == list(range(1, 201))
    assert same(weights(tmp_path / 'calm'), weights(out))
    strip = [[{k: v for k, v in r.items() if k != 'tokens_per_s'} for r in read_log(f)] for f in (tmp_path / 'calm', out)]
    assert strip[0] == strip[1]                          # evaluations too


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signals_save_first(tiny, data_dir, tmp_path, number):
    args = ['--max_iters=60', '--save_interval=1000', '--eval_interval=1000', '--stream', '--seq_len=16', '--memory=16']
    tiny(*args, out='calm', keys=ENDLESS)
    out = tmp_path / 'run'
    process = subprocess.Popen([sys.executable, str(ROOT / 'train.py'), *ENDLESS, f'--data_dir={data_dir}', f'--out_dir={out}', *args],
                               env={**os.environ, 'OMP_NUM_THREADS': '1'}, stdout=subprocess.PIPE, text=True)
    while not (out / 'log.jsonl').exists() or (out / 'log.jsonl').read_bytes().count(b'"loss"') < 5:
        time.sleep(0.001)
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number and '--resume' in stdout
    at = torch.load(out / 'ckpt.pt', weights_only=True)['iter']
    assert 5 <= at < 60
    tiny('--resume', *args, keys=ENDLESS)
    assert losses(out) == losses(tmp_path / 'calm')      # segment memory and place in the streams came along


def test_loss_that_is_not_finite(tiny, tmp_path):
    done = tiny('--max_iters=40', '--learning_rate=1e18', '--grad_clip=0', '--save_interval=1', '--warmup_iters=0',
                '--weight_decay=0', code=2)
    assert 'not finite' in done.stderr and 'ckpt.pt' in done.stderr and 'Traceback' not in done.stderr
    assert all(w.isfinite().all() for w in weights(tmp_path / 'run').values())


def test_a_gradient_that_is_not_finite(tiny, tmp_path, monkeypatch):
    """Also where every loss is."""
    step = train.train_step
    monkeypatch.setattr(train, 'train_step', lambda *args: (step(*args)[0], torch.tensor(math.inf)))
    assert 'the loss or its gradient is not finite at step 1' in tiny('--max_iters=3', code=2).stderr


def test_finished_runs_are_not_lost(tiny, tmp_path):
    tiny('--max_iters=3')
    before = weights(tmp_path / 'run')
    done = tiny('--max_iters=3', code=2)
    assert '--resume' in done.stderr and '--overwrite' in done.stderr and same(before, weights(tmp_path / 'run'))
    for other in ('seed=1', 'stride=8', 'seq_len=16', 'data=toy_math', 'epoch_words=100.0', 'stream'):      # would be another data order
        assert 'reads its data with ' + other.split('=')[0] in tiny('--max_iters=5', '--resume', f'--{other}', code=2).stderr
    done = tiny('--max_iters=5', '--resume', '--weight_decay=0.5')
    assert 'max_iters was 3, is now 5' in done.stdout
    assert torch.load(tmp_path / 'run' / 'ckpt.pt', weights_only=True)['optimizer']['param_groups'][0]['weight_decay'] == 0.5
    assert list(losses(tmp_path / 'run')) == [1, 2, 3, 4, 5]
    (tmp_path / 'run' / 'ckpt.pt').rename(tmp_path / 'run' / 'ckpt_1M.pt')     # weights kept, the rest deleted
    assert '--overwrite' in tiny('--max_iters=3', code=2).stderr and (tmp_path / 'run' / 'ckpt_1M.pt').exists()
    tiny('--max_iters=2', '--overwrite')
    assert list(losses(tmp_path / 'run')) == [1, 2]


# ------------------------------------------------------------------------------------------------ processes


def test_two_processes_equal_one(tiny, data_dir, tmp_path):
    common = ['--max_iters=20', '--dropout=0.0', '--aux_weights=dict(block_balance=0.01, expert_balance=0.01)', '--top_k=2']
    tiny(*common, '--gradient_accumulation_steps=4', out='one')
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', str(ROOT / 'train.py'),
               *TINY, f'--data_dir={data_dir}', f'--out_dir={tmp_path / "two"}', *common, '--gradient_accumulation_steps=2']
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stderr
    one, two = losses(tmp_path / 'one'), losses(tmp_path / 'two')
    assert one.keys() == two.keys() and all(abs(one[i] - two[i]) < 1e-4 for i in one)
    for name, w in weights(tmp_path / 'one').items():
        assert (w - weights(tmp_path / 'two')[name]).abs().max() < 1e-4, name
    vals = [[r['val']['toy_stories']['loss'] for r in read_log(tmp_path / f) if 'val' in r] for f in ('one', 'two')]
    assert np.allclose(*vals, atol=1e-4)
    done = subprocess.run([*command, '--max_iters=22', '--resume'], capture_output=True, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0 and list(losses(tmp_path / 'two')) == list(range(1, 23)), done.stderr
    tiny(*common, '--gradient_accumulation_steps=4', '--max_iters=22', '--resume', out='one')
    one, two = losses(tmp_path / 'one'), losses(tmp_path / 'two')
    assert abs(one[22] - two[22]) < 1e-4                 # every process went on where it was
    done = subprocess.run([*command, '--max_iters=23', '--resume', f'--out_dir={tmp_path / "one"}'], capture_output=True, text=True,
                          env={**os.environ, 'OMP_NUM_THREADS': '1'})
    for folder in ('two', 'one'):                        # in the second, one process more than before
        ranks = torch.load(tmp_path / folder / 'ckpt.pt', weights_only=True)['ranks']
        assert done.returncode == 0 and len(ranks) == 2  # each with random numbers of its own
        assert not torch.equal(*(rank['random']['cpu'] for rank in ranks))


# ------------------------------------------------------------------------------------------------ starting from other runs


SURGERY = '''
import torch, moep

def widen(model, factor=2, batches=None):
    """Doubles the number of blocks by copying them; looks at calibration data; returns a report too."""
    config = moep.MoEPConfig(**{**model.config.__dict__, 'n_block': model.config.n_block * factor})
    new = moep.MoEP(config)
    state = {k: v.repeat(factor, *[1] * (v.dim() - 1)) if k.startswith('parallel') else v for k, v in model.state_dict().items()}
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


def test_init_from_and_surgery(tiny, tmp_path, monkeypatch):
    (tmp_path / 'my_surgery.py').write_text(SURGERY)
    monkeypatch.syspath_prepend(tmp_path)                # for mistakes, which run in this process
    tiny('--max_iters=20', out='base')
    assert 'other holds no checkpoint: from the beginning' in tiny('--max_iters=20', '--seed=1', '--resume', out='other').stdout
    base = tmp_path / 'base'
    rest = [a for a in TINY if a.split('=')[0][2:] not in MoEPConfig.__dataclass_fields__]

    def start(*args, code=0, out='new'):                 # the model's settings come from the checkpoint
        return tiny(*args, code=code, out=out, keys=rest, **({} if code else dict(PYTHONPATH=str(tmp_path))))
    # plain fine-tuning: starts at the base's validation loss
    start(f'--init_from={base}', '--max_iters=2', '--dropout=0.0', out='tuned')
    first = [r for r in read_log(tmp_path / 'tuned') if 'val' in r][0]
    assert first['val'] == [r for r in read_log(base) if 'val' in r][-1]['val']
    # a surgery with calibration batches and a report, stopped before training, then resumed into training
    done = start(f'--init_from={base}', '--surgery=my_surgery.widen', '--max_iters=0', '--surgery_batches=3')
    assert 'saw 3 batches of (2, 32)' in done.stdout and read_log(tmp_path / 'new')[0]['surgery'] in done.stdout
    model, ckpt = train.load_checkpoint(tmp_path / 'new')
    assert model.config.n_block == 4 and ckpt['iter'] == 0
    start(f'--init_from={base}', '--surgery=my_surgery.widen', '--max_iters=3', '--resume')
    assert list(losses(tmp_path / 'new')) == [1, 2, 3] and weights(tmp_path / 'new')['parallel.0.fc'].size(0) == 4
    # the same with the base's config, which says n_block = 2, as a config file would; the model has 4 after the surgery
    for more in ([], ['--resume']):
        tiny(f'--init_from={base}', '--surgery=my_surgery.widen', f'--max_iters={2 + len(more)}', *more, out='config', PYTHONPATH=str(tmp_path))
    assert list(losses(tmp_path / 'config')) == [1, 2, 3]
    # several runs into one
    start(f'--init_from=["{base}", "{tmp_path / "other"}"]', '--surgery=my_surgery.average', '--max_iters=0', out='mean')
    a, b, m = weights(base), weights(tmp_path / 'other'), weights(tmp_path / 'mean')
    assert torch.allclose(m['wte.weight'], (a['wte.weight'] + b['wte.weight']) / 2)
    # what a surgery froze stays frozen, after a resume too
    start(f'--init_from={base}', '--surgery=my_surgery.freeze', '--max_iters=2', '--save_interval=1', '--checkpoint_words=[10]', out='frozen')
    start(f'--init_from={base}', '--surgery=my_surgery.freeze', '--max_iters=4', '--resume', out='frozen')
    frozen = weights(tmp_path / 'frozen')
    for name, w in frozen.items():
        assert torch.equal(w, a[name]) == name.startswith('first.'), name
    for where in ('frozen', 'frozen/ckpt_10.pt'):        # or when another run starts from it
        start(f'--init_from={tmp_path}/{where}', '--max_iters=2', '--overwrite', out='onwards')
        for name, w in weights(tmp_path / 'onwards').items():
            assert torch.equal(w, a[name]) == name.startswith('first.'), (where, name)
    # mistakes
    again = start(f'--init_from={base}', '--surgery=my_surgery.widen', '--max_iters=6', '--resume', out='frozen', code=2)
    assert "started with surgery = 'my_surgery.freeze'" in again.stderr
    for args, message in ((['--surgery=my_surgery.widn'], "no surgery 'my_surgery.widn': my_surgery.py has no function widn; did you mean 'widen'?"),
                          (['--surgery=moduleformer.insert_experts'], 'insert_experts rebuilds models of moduleformer.py, but'),
                          (['--surgery=my_surgery.nothing'], 'no surgery'), (['--surgery=math.pi'], 'math.py has no function pi'),
                          (['--surgery=my_surgery.widen', '--surgery_args={"x": 1}'], 'x'),
                          (['--surgery=my_surgery.widen', '--n_embd=8'], 'n_embd'), (['--n_embd=32'], 'do not fit'),
                          ([f'--init_from=["{base}", "{base}"]'], 'surgery'), (['--surgery=my_surgery.count'], 'does not return a model'),
                          ([f'--init_from=["{base}"]', '--surgery=my_surgery.freeze'], 'init_from is a list')):
        assert message in start(f'--init_from={base}', *args, code=2, out='bad').stderr
    assert 'init_from' in start('--surgery=my_surgery.widen', code=2, out='bad').stderr


# ------------------------------------------------------------------------------------------------ mistakes


def one_line(done):
    assert done.stderr.startswith('train.py: ') and done.stderr.count('\n') == 1 and 'Traceback' not in done.stderr
    return done.stderr


@pytest.mark.parametrize('args, words', [
    (['--n_emdb=8'], ["'n_emdb'", "'n_embd'"]),
    (['--batch_size=big'], ['batch_size', "'big'", 'int']),
    (['--n_embd=8.5'], ['n_embd', 'int']),
    (['--dropout=True'], ['dropout', 'float']),
    (['--data=nothing'], ['nothing', 'python prepare.py']),
    (['--data=toy_bytes'], ['toy_bytes holds chunks of 9 slots', 'the model reads tokens']),
    (['--dropout_schedule=early'], ['needs a model that has set_dropout']),
    (['--dropout_schedule=never'], ['never', 'constant, early, late, linear, triangle']),
    (['--data=babylm'], ['babylm', 'python prepare.py babylm']),
    (['--data=tinystories_neox'], ['python prepare.py tinystories --name tinystories_neox --tokenizer 20B_tokenizer.json']),
    (['--data=simplewiki_chunks'], ['python prepare.py simplewiki --name simplewiki_chunks --chunks']),
    (['--data=toy_stories,toy_math'], ["--data=\"{'toy_stories': (0.0, 1.0), 'toy_math': (0.0, 1.0)}\""]),
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
    (['--data=toy_storys'], ["did you mean 'toy_stories'? If not, make the data set with: python prepare.py text --name toy_storys"]),
    (['--batch_size', '8'], ['--batch_size=8']),
    (['--device=tpu'], ['tpu']),
    (['--device=cuda:1'], ['cuda:1', 'CUDA_VISIBLE_DEVICES']),
    (['--init_from=config/moep.py'], ['no checkpoint config/moep.py/ckpt.pt\n']),
    (['config/qqqqqqq.py'], ['no config file config/qqqqqqq.py\n']),
    (['config/meop.py'], ['did you mean config/moep.py?']),
    (['config/paper/stlm/basline.py'], ['did you mean config/paper/stlm/baseline.py?']),
    (['learning_rate=1e-3'], ['write --learning_rate=1e-3']),
    (['moduleformer'], ['did you mean config/moduleformer.py?']),
    (['LICENSE'], ['LICENSE:1: ']),
    (['.'], ['there is no config file .\n']),
    (['--model=errors'], ["errors.py lacks the line 'Config, Model"]),
    (['--top_k=9'], ['top_k is 9', '1 to 2, the smaller of n_block and n_expert']),
    (['--qqq=1'], ["unknown key 'qqq'\n"]),
    (['--init_from=docs', '--surgery=compose'], ['no checkpoint docs/ckpt.pt']),
])
def test_mistakes_are_one_line(tiny, tmp_path, args, words):
    line = one_line(tiny('--max_iters=5', *args, code=2))
    assert all(word in line for word in words), line
    assert not (tmp_path / 'run').exists()


def test_a_field_without_a_type_is_told():
    class Bare:
        noise = 1.0
    with pytest.raises(UserError, match="unknown key 'noise'; Bare has it without a type, as in noise: float = 1.0"):
        configurator.sort_keys(dict(noise=2.0), dataclasses.dataclass(Bare))


@pytest.mark.parametrize('value', [0.5, torch.ones(2)])
def test_an_auxiliary_value_is_one_number(tiny, monkeypatch, value):
    real = moep.MoEP.forward
    monkeypatch.setattr(moep.MoEP, 'forward', lambda self, *a, **k: (lambda out: (*out[:2], dict(out[2], odd=value)))(real(self, *a, **k)))
    assert "the auxiliary value 'odd' should be a tensor of one number" in one_line(tiny('--max_iters=2', code=2))


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
    assert 'from step 4: nothing is left to train' in tiny('--max_iters=3', '--resume').stdout
    (tmp_path / 'run' / 'log.jsonl').unlink()
    assert 'log.jsonl has lost lines since the checkpoint was saved' in tiny('--max_iters=5', '--resume').stdout


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
    assert not (tmp_path / 'run').exists()


def test_broken_checkpoints(tiny, tmp_path):
    tiny('--max_iters=2')
    out = tmp_path / 'run'
    assert 'n_embd' in one_line(tiny('--max_iters=4', '--resume', '--n_embd=32', code=2))
    whole = (out / 'ckpt.pt').read_bytes()
    ckpt = torch.load(out / 'ckpt.pt', weights_only=True)
    torch.save(dict(ckpt, model='papaformer'), out / 'ckpt.pt')
    assert 'papaformer' in one_line(tiny('--max_iters=4', '--resume', code=2))
    torch.save(dict(ckpt, tokenizer='another'), out / 'ckpt.pt')
    assert 'tokenizer' in one_line(tiny('--max_iters=4', '--resume', code=2))
    assert 'another tokenizer' in one_line(tiny('--max_iters=4', f'--init_from={out}', code=2, out='next'))
    for broken in (whole[:len(whole) // 2], b'', b'not a checkpoint'):
        (out / 'ckpt.pt').write_bytes(broken)
        assert 'not a whole checkpoint' in one_line(tiny('--max_iters=4', '--resume', code=2))
        assert (out / 'ckpt.pt').read_bytes() == broken


def test_config_files(tmp_path):
    good = tmp_path / 'good.py'
    good.write_text('"""doc"""\nbatch_size = 2 * 8\naux_weights = dict(block_balance=0.01)  # comment\nmodel = "moep"\n')
    values = configurator.read_command([str(good), '--batch-size=1e1', '--resume', '--data=toy_math'])
    assert configurator.read_command(['--out_dir=out/mine', str(good)])['out_dir'] == 'out/mine'
    assert configurator.read_command(['--batch_size=3', str(good)])['batch_size'] == 16      # what comes later counts
    assert values == dict(out_dir='out/good', batch_size=10.0, aux_weights=dict(block_balance=0.01), model='moep', resume=True, data='toy_math')
    given, keys = configurator.sort_keys(values, settings.Settings, MoEPConfig)
    assert given['batch_size'] == 10 and type(given['batch_size']) is int and not keys
    assert configurator.read_command(['config/paper/moep.py'])['out_dir'] == 'out/paper/moep'
    assert configurator.sort_keys(dict(out_dir=2024, data=7), settings.Settings) == [dict(out_dir='2024', data='7')]
    for text, message in (('import os', ':1: a config'), ('a = b = 1', ':1:'), ('x = 1\ny = open("f")', ':2: the value of y'), ('x = (', ':1:'),
                          ('x = ().__class__', 'no literal'), ('x = [y for y in (1,)]', 'no literal'), ('x = dict.fromkeys([1])', 'no literal'),
                          ('x = (lambda: 1)()', 'no literal'), ('x = len', 'no literal')):
        good.write_text(text)
        with pytest.raises(UserError, match=message):
            configurator.read_config(str(good))


@pytest.mark.parametrize('wrong', [
    'batch_size=0', 'gradient_accumulation_steps=0', 'log_interval=0', 'epochs=0', 'epochs=-1.0', 'grad_clip=-1.0', 'seed=-1',
    'max_iters=-1', 'stride=-5', 'eval_tokens=0', 'beta1=2.0', 'checkpoint_words=["1M"]', 'aux_weights={"block_balance": "x"}',
    'surgery_args={"n": 2}'])
def test_values_out_of_range(wrong):
    with pytest.raises(UserError):
        settings.read_settings([f'--{wrong}'])


@pytest.mark.parametrize('wrong', ['dropout=2', 'block_size=0', 'n_head=0', 'n_layer=-1', 'top_k=0', 'n_parallel=-1'])
def test_model_values_out_of_range(wrong):
    key, _, value = wrong.partition('=')
    with pytest.raises(ValueError):
        MoEPConfig(**{key: int(value)})


def test_a_folder_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / 'run').write_text('a file, where the folder should be')
    assert 'run' in one_line(tiny('--max_iters=2', code=2))


def test_epochs_make_the_plan(tiny):
    assert '2 steps' in tiny('--max_iters=0', '--epochs=0.001', '--batch_size=8').stdout
    assert ' 1 steps' in tiny('--max_iters=0', '--epochs=0.001', '--batch_size=8', '--gradient_accumulation_steps=2').stdout


# ------------------------------------------------------------------------------------------------ optimiser


def test_set_rate_reaches_the_optimizer():
    """A number on the CPU; on a GPU a tensor that stays the same one, since a graph holds it."""
    for lr in (1e-3, torch.tensor(1e-3)):
        optimizer = torch.optim.AdamW([dict(params=[torch.nn.Parameter(torch.ones(2))]), dict(params=[torch.nn.Parameter(torch.ones(2))])], lr=lr)
        before = [group['lr'] for group in optimizer.param_groups]
        train.set_rate(optimizer, 0.5)
        for group, old in zip(optimizer.param_groups, before):
            assert float(group['lr']) == 0.5 and (not torch.is_tensor(lr) or group['lr'] is old)


def test_a_step_leaves_no_old_gradient():
    """Two steps at a rate of 0: the second gradient is that of its own data alone."""
    linear, seen = torch.nn.Linear(2, 1), []

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
    model = MoEP(MoEPConfig(vocab_size=10, block_size=8, n_embd=16, n_head=2, n_embd_parallel=8, n_head_parallel=1, n_parallel=1))
    s, machine = settings.Settings(weight_decay=0.3), train.Machine('cpu')
    decayed, spared = train.make_optimizer(model, s, machine).param_groups
    assert decayed['weight_decay'] == 0.3 and spared['weight_decay'] == 0
    names = {id(p): n for n, p in model.named_parameters()}
    assert all(names[id(p)].split('.')[-1] in ('weight', 'qkv', 'proj', 'fc', 'down') for p in decayed['params'])
    assert {names[id(p)] for p in spared['params']} >= {'parallel.0.ln_1_gain', 'parallel.0.fc_bias', 'shrink.down_bias', 'ln_f.weight'}
    assert len(decayed['params']) + len(spared['params']) == len(names)


def test_learning_rate():
    s = settings.Settings(learning_rate=1.0, min_lr=0.1, warmup_iters=9, schedule='cosine')
    assert [train.learning_rate(i, s, 109) for i in (0, 8, 9, 59, 109)] == pytest.approx([0.1, 0.9, 1.0, 0.55, 0.1])
    s.schedule = 'linear'
    assert train.learning_rate(34, s, 109) == pytest.approx(0.775)
    s.schedule = 'constant'
    assert train.learning_rate(109, s, 109) == 1.0
    s.warmup_lr = 0.5
    assert [train.learning_rate(i, s, 109) for i in (0, 8)] == pytest.approx([0.55, 0.95])
