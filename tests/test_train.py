"""What train.py promises: the order of the data, scores, steps, and that nothing is lost."""

import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import moep
import prepare
import train
from plumbing.bins import count_routes, score_batches, val_batches
from plumbing.checkpoint import load_checkpoint, read_checkpoint
from plumbing.cli import UserError
from plumbing.machine import Machine
from plumbing.settings import ROOT, Settings
from plumbing.tokenizer import load_tokenizer

EOT = 99
COMMON = dict(batch_size=2, warmup_iters=5, eval_tokens=256, log_interval=1, sample_tokens=0)
MOEP = dict(COMMON, model='moep', block_size=32, n_layer=2, n_head=2, n_embd=16, n_parallel=1,
            n_head_parallel=1, n_embd_parallel=16, n_block=2, n_expert=2, top_k=1, dropout=0.1)
MODULEFORMER = dict(COMMON, model='moduleformer', block_size=32, n_layer=2, n_embd=16, n_att=3,
                    d_att=8, n_head=1, n_ffd=3, d_ffd=16, top_k=2, d_router=8)
STLM = dict(COMMON, model='stlm', block_size=32, n_layer=2, n_head=2, n_kv_head=2, n_embd=16,
            ffn_hidden=24, dropout=0.2)
PAPAFORMER = dict(COMMON, model='papaformer', block_size=32, n_layer=2, n_head=2, n_embd=16,
                  n_parallel=2, path_embd=[8, 8], path_head=[1, 1])


def arguments(settings):
    return [f'--{key}={value}' for key, value in settings.items()]


@pytest.fixture
def tiny(run, data_dir, tmp_path, monkeypatch):
    """A small run in this process, in the folder tmp_path / out."""
    monkeypatch.setattr(Machine, 'matrix_rate', 1e9)     # in float16, a CPU takes seconds for it
    def tiny(out, model=MOEP, code=0, **settings):
        settings = dict(data_dir=data_dir, out_dir=tmp_path / out) | model | settings
        return run('train.py', *arguments(settings), here=True, code=code)
    return tiny


def read_log(folder):
    """The lines of log.jsonl, without clocks and the line about the machine."""
    rows = [json.loads(line) for line in open(folder / 'log.jsonl')]
    clocks = ('seconds', 'tokens_per_s', 'mfu')
    return [{k: v for k, v in row.items() if k not in clocks} for row in rows if 'run' not in row]


def losses(folder):
    return {row['iter']: row['loss'] for row in read_log(folder) if 'loss' in row}


def weights(folder):
    return read_checkpoint(folder)['weights']


def is_same(a, b):
    """Bit for bit, at any depth."""
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return a == b


def assert_same_run(folder, other):
    assert read_log(folder) == read_log(other)
    a, b = read_checkpoint(folder), read_checkpoint(other)
    for part in ('weights', 'optimizer', 'scaler', 'ranks', 'frozen', 'adapted', 'iter', 'words'):
        assert is_same(a[part], b[part]), part


def assert_close_run(folder, other):
    """What differs only by the order of sums."""
    assert losses(folder) == pytest.approx(losses(other), abs=1e-4)
    ours, theirs = weights(folder), weights(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name] - theirs[name]).abs().max() < 1e-4, name


# ---- The order of the data -----------------------------------------------------------------------

@pytest.fixture
def make_data(monkeypatch):
    """Data of token lists instead of folders, with half a word per token."""
    def make(T=8, end=(EOT,), pad=-1, world=1, rank=0, **settings):
        sets = {name: value for name, value in settings.items() if isinstance(value, np.ndarray)}
        settings = {name: value for name, value in settings.items() if name not in sets}
        tokenizer = SimpleNamespace(end=[*end], pad=pad)

        def load_meta(name):
            return dict(splits=dict(train=dict(tokens=len(sets[name]), words=len(sets[name]) / 2)))
        monkeypatch.setattr(train, 'load_meta', load_meta)
        monkeypatch.setattr(train, 'load_bin', lambda name, split: sets[name].astype(np.uint16))
        machine = Machine('cpu')
        machine.world, machine.rank = world, rank
        s = Settings(data=','.join(sets), **settings)
        return train.Data(s, [*sets], [], tokenizer, T, machine)
    return make


def test_an_epoch_reads_every_window_once_and_is_cut_anew(make_data):
    data = make_data(a=np.arange(1000))
    offsets, orders = set(), []
    for epoch in range(60):
        orders.append(data.epoch_starts(epoch))
        starts = np.sort(orders[-1])
        missing = np.setdiff1d(np.arange(starts.min() % 8, 992, 8), starts)
        assert len(missing) <= 1 and len(np.unique(starts)) == data.n_windows == 124
        assert starts.max() + 8 < 1000                           # the last target is there
        offsets.add(starts.min() % 8)
    assert offsets == {*range(8)} and not np.array_equal(orders[0], np.sort(orders[0]))
    again = make_data(a=np.arange(1000))
    assert np.array_equal(again.epoch_starts(3), orders[3])      # seed and epoch alone
    assert not np.array_equal(make_data(a=np.arange(1000), seed=7).epoch_starts(3), orders[3])


def test_windows_are_a_function_of_the_step(make_data):
    """In any order of asking, by any object. A step runs on into the next epoch, a window into the
    next data set."""
    sets = dict(a=np.arange(400), b=np.arange(400, 403), c=np.arange(403, 1000))
    settings = dict(sets, batch_size=25, gradient_accumulation_steps=2)
    data, other = make_data(**settings), make_data(**settings)
    orders = np.concatenate([data.epoch_starts(epoch) for epoch in range(3)])
    for step in (6, 0, 2, 1, 6):
        x, y = data.windows(step)
        assert x.shape == (2, 25, 8) and x.dtype == torch.int64 and torch.equal(y, x + 1)
        starts = orders[50 * step:50 * step + 50]
        assert np.array_equal(x.view(50, 8), starts[:, None] + np.arange(8))
        assert all(map(torch.equal, other.windows(step), (x, y)))
    assert data.words_per_step == pytest.approx(50 * 8 * 0.5)
    assert data.size == 1000 and data.n_windows == 124


def test_padding_is_no_target(make_data):
    x, y = make_data(a=np.tile([1, 2, 50], 100), pad=50, batch_size=2).windows(0)
    assert (x == 50).any() and (y == -1).any() and not (y == 50).any()
    assert torch.equal(y[..., :-1] == -1, x[..., 1:] == 50)


def test_stride_and_words_per_epoch(make_data):
    starts = np.sort(make_data(a=np.arange(1000), stride=2).epoch_starts(0))
    assert {*np.diff(starts)} <= {2, 4} and len(starts) == 496
    assert len(make_data(a=np.arange(1000), stride=2, epoch_words=100.0).epoch_starts(0)) == 25


def test_chunks_stay_aligned(make_data):
    data = make_data(a=np.tile([1, 2, 3, EOT], 100), end=[EOT] * 4)
    assert all((data.epoch_starts(epoch) % 4 == 0).all() for epoch in range(4))
    with pytest.raises(UserError, match='multiples of a chunk'):
        make_data(a=np.arange(400), end=[EOT] * 4, T=10)


def test_rows_of_a_stream_read_on_where_they_stopped(make_data):
    data = make_data(a=np.arange(1000), stream=True, batch_size=3, gradient_accumulation_steps=2)
    steps = data.n_windows // 6
    starts = np.array([data.step_starts(step) for step in range(2 * steps)])
    for epoch in (starts[:steps], starts[steps:]):
        assert (np.diff(epoch, axis=0) == 8).all() and len(np.unique(epoch)) == epoch.size == 120
    assert [step for step in range(2 * steps) if data.restarts_text(step)] == [0, steps]


def test_the_number_of_steps(make_data):
    settings = dict(a=np.arange(83), batch_size=2)               # 9 windows an epoch
    for epochs, steps in ((1.0, 4), (3.0, 13), (7.5, 34), (0.01, 1)):
        assert make_data(**settings, epochs=epochs).steps() == steps
    assert make_data(**settings, epochs=3.0, world=2).steps() == 6


# ---- Evaluation ----------------------------------------------------------------------------------

@pytest.mark.parametrize('n', [9, 10, 17, 18, 33])
def test_val_batches_score_every_token_but_the_first_once(n):
    tokens = np.arange(n, dtype=np.uint16)

    def targets(*more):
        batches = val_batches(tokens, 8, 2, -1, *more)
        return [target for _, y in batches for target in y[y >= 0].tolist()]
    assert targets() == list(range(1, n))
    assert sorted(targets(None, 0, 2) + targets(None, 1, 2)) == list(range(1, n))
    shares = [[len(x) for x, _ in val_batches(tokens, 8, 2, -1, None, rank, 2)]
              for rank in (0, 1)]
    assert shares[0] == shares[1]                                # or a process would wait for ever
    assert targets(17) == list(range(1, min(n, 17)))             # full windows of 17 tokens: two
    assert targets(3) == list(range(1, 9))                       # but at least one


def test_scores_against_a_slow_loop():
    """Token by token: the cost of every target but padding, over the bytes of the text."""
    torch.manual_seed(0)
    model = moep.Model(moep.Config(vocab_size=20, block_size=8, n_head=2, n_embd=16, n_parallel=0))
    tokens = torch.randint(20, (30,))
    lengths = torch.randint(5, (20,))
    tokenizer = SimpleNamespace(token_bytes=[b' ' * n for n in lengths])
    machine = Machine('cpu')
    batches = list(val_batches(tokens.numpy(), 8, 2, pad=3))
    got = score_batches(model, batches, tokenizer, machine)
    assert model.training
    model.eval()
    nats, n_bytes, count = 0.0, 0, 0
    for i in range(1, 30):
        if tokens[i] != 3:
            begin = (i - 1) // 8 * 8
            logits = model(tokens[None, begin:i])[0][0, -1]
            nats -= logits.log_softmax(-1)[tokens[i]].item()
            n_bytes += lengths[tokens[i]].item()
            count += 1
    want = dict(loss=nats / count, perplexity=math.exp(nats / count),
                bits_per_byte=nats / math.log(2) / n_bytes)
    assert got == pytest.approx(want, rel=1e-5)
    model.wte.weight.data *= 1e5                                 # a perplexity that overflows
    assert score_batches(model, batches, tokenizer, machine)['perplexity'] == math.exp(700)


def test_shares_of_routes():
    """Picks are counted; where every choice gets something, the gates are added up."""
    hard = torch.tensor([[[0.7, 0.3, 0.0], [0.0, 0.6, 0.4]]])
    soft = torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.2, 0.3]]])
    routes = dict(hard=hard, soft=soft, none=torch.zeros(1, 2, 3))
    model = SimpleNamespace(eval=lambda: None, train=lambda: None, routes=lambda x: routes)
    shares = count_routes(model, torch.zeros(1), Machine('cpu'))['routes']
    assert shares == dict(hard=[0.25, 0.5, 0.25], soft=[0.6, 0.2, 0.2], none=[0.0, 0.0, 0.0])


# ---- Schedules and steps -------------------------------------------------------------------------

def test_learning_rate():
    """(Warm-up and cosine: the loop written out, below.)"""
    s = Settings(learning_rate=1.0, min_lr=0.1, warmup_iters=9, schedule='linear')
    rates = [train.learning_rate(it, s, 109) for it in (9, 34, 109, 119)]
    assert rates == pytest.approx([1.0, 0.775, 0.1, 0.1])
    s.schedule = 'constant'
    assert train.learning_rate(109, s, 109) == 1.0
    s.warmup_lr = 0.5
    assert [train.learning_rate(it, s, 109) for it in (0, 8)] == pytest.approx([0.55, 0.95])


def test_a_scheduled_rate_reaches_the_model(tiny, tmp_path):
    """Through set_progress. Late, from half of the run on: until then it is the run without."""
    tiny('late', STLM, max_iters=4, dropout=0.5, dropout_schedule='late')
    tiny('never', STLM, max_iters=4, dropout=0.0)
    late, never = losses(tmp_path / 'late'), losses(tmp_path / 'never')
    is_close = [abs(late[step] - never[step]) < 1e-4 for step in (1, 2, 3, 4)]
    assert is_close == [True, True, False, False]


def test_a_run_equals_the_loop_written_out(tiny, data_dir, tmp_path):
    """Micro-batches, auxiliary losses (weighted into the gradient, logged unweighted), clipping,
    AdamW with decay of matrices, warm-up and cosine, dropout: by hand, step by step."""
    tiny('run', max_iters=8, gradient_accumulation_steps=2, warmup_iters=3, warmup_lr=1e-3,
         learning_rate=2e-2, min_lr=4e-3, beta1=0.8, beta2=0.9, eps=1e-4, weight_decay=0.3,
         grad_clip=0.5, eval_interval=3, seed=7, n_block=4, n_expert=4, top_k=2,
         aux_weights=dict(block_balance=0.5, expert_balance=0.2))
    rates = [1e-3 + 19e-3 * (i + 1) / 4 for i in range(3)]
    rates += [4e-3 + 8e-3 * (1 + math.cos(math.pi * i / 5)) for i in range(5)]
    text = torch.from_numpy(np.fromfile(data_dir / 'toy_stories/train.bin', np.uint16).astype(int))
    folder = data_dir / 'toy_stories'
    data = train.Data(Settings(seed=7), [folder], [], load_tokenizer(folder), 32, Machine('cpu'))
    torch.manual_seed(7)
    model = moep.Model(moep.Config(**read_checkpoint(tmp_path / 'run')['config']))
    torch.manual_seed(8)
    named = dict(model.named_parameters())
    first, second = ({n: torch.zeros_like(p) for n, p in named.items()} for _ in range(2))
    log = [row for row in read_log(tmp_path / 'run') if 'loss' in row]
    for step, (lr, row) in enumerate(zip(rates, log, strict=True), 1):
        gradient = {n: torch.zeros_like(p) for n, p in named.items()}
        mean = dict(loss=0.0, block_balance=0.0, expert_balance=0.0)
        for half in data.epoch_starts(0)[4 * step - 4:4 * step].reshape(2, 2):
            x, y = (torch.stack([text[i + shift:i + shift + 32] for i in half]) for shift in (0, 1))
            _, loss, aux = model(x, y)
            for name, value in dict(aux, loss=loss).items():
                mean[name] += value.item() / 2
            objective = loss + 0.5 * aux['block_balance'] + 0.2 * aux['expert_balance']
            for n, g in zip(named, torch.autograd.grad(objective, named.values())):
                gradient[n] += g / 2
        norm = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt().item()
        want = dict(mean, lr=lr, grad_norm=norm)
        assert {name: row[name] for name in want} == pytest.approx(want, rel=1e-4)
        with torch.no_grad():
            for n, p in named.items():
                g = gradient[n] * min(1.0, 0.5 / norm)
                first[n] = 0.8 * first[n] + 0.2 * g
                second[n] = 0.9 * second[n] + 0.1 * g * g
                p *= 1 - lr * 0.3 * (p.dim() >= 2 and not n.endswith(('gain', 'bias')))
                root = (second[n] / (1 - 0.9 ** step)).sqrt() + 1e-4
                p -= lr * (first[n] / (1 - 0.8 ** step)) / root
    assert norm > 0.5                                            # it was clipped
    for n, w in weights(tmp_path / 'run').items():
        assert (w - model.state_dict()[n]).abs().max() < 1e-4, n


def test_a_stream_with_memory_is_one_long_text(tiny, data_dir, tmp_path):
    """Each epoch has two steps: the second sees the keys and values of the first. The next epoch
    begins without a memory."""
    folder = tmp_path / 'data/short'
    prepare.mix(folder, [f'{data_dir}/toy_stories:0:0.02'], None, False)

    def stream(batch_size):
        s = Settings(stream=True, data='short', batch_size=batch_size,
                     gradient_accumulation_steps=2)
        return train.Data(s, [folder], [], load_tokenizer(folder), 16, Machine('cpu'))
    data = stream(stream(1).n_windows // 5)
    tiny('run', MODULEFORMER, max_iters=4, stream=True, seq_len=16, memory=16, learning_rate=0.0,
         data_dir=folder.parent, data='short', batch_size=data.s.batch_size,
         gradient_accumulation_steps=2)
    segments = [[part.flatten(0, 1) for part in data.windows(step)] for step in range(4)]
    assert data.restarts_text(2) and not data.restarts_text(1)
    model, _ = load_checkpoint(tmp_path / 'run')
    costs = []
    with torch.no_grad():
        for epoch in (segments[:2], segments[2:]):
            x, y = (torch.cat(parts, 1) for parts in zip(*epoch))
            nats = model(x, y, reduction='none')[1]
            costs += [part.mean().item() for part in nats.split(16, 1)]
        alone = model(*segments[3])[1].item()
    assert [*losses(tmp_path / 'run').values()] == pytest.approx(costs)
    assert abs(alone - costs[3]) > 1e-5                          # without the memory it is another


@pytest.mark.parametrize('model, more', [
    (MOEP, {}), (STLM, dict(share='all')), (PAPAFORMER, dict(connection='gumbel2')),
    (MODULEFORMER, dict(stream=True, memory=16, seq_len=16, gradient_accumulation_steps=2))])
def test_recomputed_activations_change_nothing(tiny, tmp_path, model, more):
    tiny('plain', model, max_iters=4, **more)
    tiny('recomputed', model, max_iters=4, checkpoint_activations=True, **more)
    assert_same_run(tmp_path / 'recomputed', tmp_path / 'plain')


# ---- A run's folder ------------------------------------------------------------------------------

def test_a_run_from_start_to_end(tiny, tmp_path):
    tiny('run', max_iters=30, eval_interval=15, sample_tokens=5)
    about = json.loads((tmp_path / 'run/log.jsonl').read_text().splitlines()[0])['run']
    assert about['settings']['max_iters'] == 30 and about['config']['n_embd'] == 16
    log = read_log(tmp_path / 'run')
    assert [row['iter'] for row in log if 'loss' in row] == list(range(1, 31))
    evaluations = [row for row in log if 'val' in row]
    assert [row['iter'] for row in evaluations] == [0, 15, 30]
    scores = [row['val']['toy_stories']['loss'] for row in evaluations]
    assert scores[2] < scores[0] - 0.1
    assert evaluations[0]['routes'].keys() == {'shrink', 'parallel.0', 'grow'}
    model, ckpt = load_checkpoint(tmp_path / 'run')
    assert not model.training and ckpt['iter'] == 30 and (tmp_path / 'run/meta.json').exists()


def test_checkpoints_by_words(tiny, tmp_path):
    settings = dict(checkpoint_words=[100, 101, 200, 1e3], eval_data='toy_lingo,toy_stories')
    tiny('run', max_iters=12, **settings)                        # a step may pass two of them
    scored = [[*row['val']] for row in read_log(tmp_path / 'run') if 'val' in row]
    assert scored == [['toy_lingo', 'toy_stories']] * 2
    files = sorted((tmp_path / 'run').glob('ckpt_*'))
    assert [file.name for file in files] == ['ckpt_100.pt', 'ckpt_101.pt', 'ckpt_200.pt']
    words = [load_checkpoint(file)[1]['words'] for file in files]
    assert 50 < words[0] == words[1] <= 100 < words[2] <= 200    # the last step before
    tiny('run', max_iters=14, resume=True, **settings)           # those of before stay
    assert [load_checkpoint(file)[1]['words'] for file in files] == words
    (tmp_path / 'run/ckpt.pt').unlink()
    assert 'there is no ckpt.pt' in tiny('run', max_iters=2, resume=True, **settings).stdout
    tiny('run', max_iters=2, overwrite=True)                     # nothing of before stays
    assert [*losses(tmp_path / 'run')] == [1, 2] and not any(file.exists() for file in files)


def test_a_folder_in_use_is_left_alone(tiny, tmp_path):
    fcntl = pytest.importorskip('fcntl')                 # Windows has none
    tiny('run', max_iters=1)
    with open(tmp_path / 'run/log.jsonl', 'a') as log:
        fcntl.flock(log, fcntl.LOCK_EX)                  # what another run does
        before = (tmp_path / 'run/log.jsonl').read_text()
        told = tiny('run', max_iters=1, overwrite=True, code=2).stderr
        assert 'another run is writing to' in told
    assert (tmp_path / 'run/log.jsonl').read_text() == before and weights(tmp_path / 'run')


def test_each_seed_is_a_run_of_its_own(tiny, tmp_path):
    tiny('alone', seed=2, max_iters=3)
    with killed_in_step(5):                              # in the second run
        tiny('run', seeds=[1, 2], max_iters=3, code=9)
    tiny('run', seeds=[1, 2], max_iters=3, resume=True)
    assert_same_run(tmp_path / 'run/seed_2', tmp_path / 'alone')
    assert losses(tmp_path / 'run/seed_1') != losses(tmp_path / 'alone')


@pytest.mark.parametrize('what', ['loss', 'gradient'])
def test_a_loss_that_is_not_finite_leaves_the_checkpoint(tiny, tmp_path, monkeypatch, what):
    step, norms = train.train_step, itertools.chain([1.0] * 3, itertools.repeat(math.inf))

    def broken(*args):
        mean, _ = step(*args)
        norm = torch.tensor(next(norms))
        return (mean, norm) if what == 'gradient' else (mean | dict(loss=norm), torch.ones(()))
    monkeypatch.setattr(train, 'train_step', broken)
    told = tiny('run', max_iters=6, save_interval=1, log_interval=100, code=2).stderr
    assert 'not finite at step 4' in told and 'ckpt.pt' in told
    assert read_checkpoint(tmp_path / 'run')['iter'] == 3


# ---- Starting from other runs --------------------------------------------------------------------

def test_a_model_file_that_changed_is_named(tiny, tmp_path, capsys):
    """Its code, not its comments: otherwise new code on old weights looks like an old result"""
    tiny('run', max_iters=1)
    copy = tmp_path / 'run/moep.py'
    text = copy.read_text(encoding='utf-8')
    assert text == (ROOT / 'moep.py').read_text(encoding='utf-8')
    for before, says in ((text + '\n# a comment\n', False), (text.replace('top_k', 'k'), True)):
        copy.write_text(before, encoding='utf-8')
        capsys.readouterr()
        load_checkpoint(tmp_path / 'run')
        assert ('the code of moep has changed' in capsys.readouterr().err) == says
    tiny('run', max_iters=2, resume=True)                        # the old file stays
    assert copy.read_text(encoding='utf-8') == before


def test_fine_tuning_starts_where_the_base_ended(tiny, tmp_path):
    tiny('base', max_iters=10)
    tiny('tuned', COMMON, init_from=tmp_path / 'base', max_iters=1, dropout=0.0)    # no model
    first, last = read_log(tmp_path / 'tuned')[0], read_log(tmp_path / 'base')[-1]
    assert first['val'] == last['val'] and first['words'] == 0


@pytest.fixture
def inserted(run, tiny, tmp_path):
    """A ModuleFormer with new modules, in which all else is frozen."""
    pytest.importorskip('tools.surgery')                 # a room that may be taken away
    tiny('base', MODULEFORMER, max_iters=2)
    run('tools.surgery', 'insert_experts', tmp_path / 'base', '--router', 'partial', '--out',
        tmp_path / 'inserted', here=True)
    return dict(COMMON, init_from=tmp_path / 'inserted')


# ---- Killed and resumed --------------------------------------------------------------------------

def before_step(n, action):
    step, calls = train.train_step, itertools.count(1)

    def changed(*args):
        if next(calls) == n:
            action()
        return step(*args)
    return mock.patch.object(train, 'train_step', changed)


def killed_in_step(n):
    """What is on disk is what a kill leaves."""
    return before_step(n, lambda: sys.exit(9))


@pytest.mark.parametrize('model, more', [
    (MOEP, dict(gradient_accumulation_steps=2)),
    (MODULEFORMER, dict(stream=True, memory=16, seq_len=16, gradient_accumulation_steps=2)),
    (MOEP, dict(optimizer='muon')),
    (STLM, dict(dropout_schedule='triangle')),
    (PAPAFORMER, dict(connection='gumbel1', aux_weights=dict(entropy=0.01, load=0.01))),
    (MOEP, dict(data='toy_math,toy_lingo', stride=2000, batch_size=50)),
    (MOEP, dict(optimizer='muon', dtype='float16', seq_len=8, eval_tokens=64,
                aux_weights=dict(block_balance=300))),   # overflows
], ids=['accumulated', 'stream', 'muon', 'dropout', 'gumbel', 'epochs', 'float16'])
def test_a_killed_run_goes_on_bit_for_bit(tiny, tmp_path, model, more):
    """Killed before the first save and after a later one, with lines in the log that come again."""
    settings = dict(max_iters=9, save_interval=3, eval_interval=2, **more)
    tiny('calm', model, **settings)
    for place in (2, 8):
        with killed_in_step(place):
            tiny('killed', model, code=9, resume=True, **settings)
    assert read_checkpoint(tmp_path / 'killed')['iter'] == 6
    assert max(losses(tmp_path / 'killed')) == 7                 # lines that are cut off
    tiny('killed', model, resume=True, **settings)
    assert_same_run(tmp_path / 'killed', tmp_path / 'calm')


def test_a_busy_cpu_gets_fewer_threads(tiny, tmp_path, monkeypatch):
    """A resumed run keeps its number."""
    chosen = []
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setattr(os, 'cpu_count', lambda: 8)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: chosen[-1] if chosen else 8)
    monkeypatch.setattr(torch, 'set_num_threads', chosen.append)
    monkeypatch.setattr('plumbing.machine.additions', {8: 1, 4: 9, 2: 5, 1: 3}.get)
    told = tiny('run', max_iters=1).stdout
    assert 'threads: 4' in told and chosen == [4]
    monkeypatch.setattr('plumbing.machine.additions', {4: 1, 2: 3, 1: 7}.get)
    tiny('run', max_iters=2, resume=True)
    assert chosen == [4, 1, 4] and read_checkpoint(tmp_path / 'run')['threads'] == 4


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(tiny, tmp_path, number):
    settings = dict(stream=True, memory=16, seq_len=16, max_iters=6)
    tiny('calm', MODULEFORMER, **settings)
    with before_step(3, lambda: os.kill(os.getpid(), number)):
        told = tiny('run', MODULEFORMER, code=128 + number, **settings).stdout
    assert 'stopped at step 3; to continue, add --resume' in told
    assert read_checkpoint(tmp_path / 'run')['iter'] == 3
    tiny('run', MODULEFORMER, resume=True, **settings)
    assert_same_run(tmp_path / 'run', tmp_path / 'calm')


# ---- Two processes -------------------------------------------------------------------------------

def train_together(commands):
    """torchrun starts two processes, which run this file (see its end)."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
               __file__, json.dumps(commands)]
    env = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT))
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def run_commands(commands):
    """(the step in which the run is killed, or 0; arguments of train.py), one after the other, in
    one process group: a second one cannot be made."""
    dist.init_process_group('gloo')
    with mock.patch.object(dist, 'init_process_group'), \
            mock.patch.object(dist, 'destroy_process_group'):
        for place, sys.argv[1:] in commands:
            with killed_in_step(place), contextlib.suppress(SystemExit):
                train.main()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one(tiny, data_dir, tmp_path, inserted):
    """Plain and sharded, with recomputed activations, with frozen parameters: the same as one
    process with twice the micro-batches. Killed and resumed: bit for bit the same."""
    routed = dict(MOEP, n_layer=4, n_parallel=2, top_k=2, max_iters=8, save_interval=3,
                  aux_weights=dict(block_balance=0.01, expert_balance=0.01))
    calm = dict(routed, dropout=0.0)
    insert = dict(inserted, max_iters=8, save_interval=3)
    tiny('one', calm, gradient_accumulation_steps=4)
    tiny('one_frozen', insert, gradient_accumulation_steps=2)

    def command(out, settings, place=0, **more):
        folders = dict(data_dir=data_dir, out_dir=tmp_path / out)
        return place, arguments(settings | folders | more)
    both = dict(shard=True, checkpoint_activations=True)
    half = dict(gradient_accumulation_steps=2)
    train_together([
        command('two', calm, **half),
        command('shard', calm, **half, **both),
        command('shard_frozen', insert, shard=True),
        *(command(out, routed, place, resume=True, **more)
          for out, more in (('dropout', half), ('shard_dropout', both))
          for out, place in ((out, 0), (f'{out}_killed', 5), (f'{out}_killed', 0)))])
    assert_close_run(tmp_path / 'two', tmp_path / 'one')
    assert_close_run(tmp_path / 'shard', tmp_path / 'one')
    assert_close_run(tmp_path / 'shard_frozen', tmp_path / 'one_frozen')
    scores = [[row['val']['toy_stories'] for row in read_log(tmp_path / out) if 'val' in row]
              for out in ('one', 'two', 'shard')]
    for score in zip(*scores):
        assert score[1] == pytest.approx(score[0], rel=1e-4)
        assert score[2] == pytest.approx(score[0], rel=1e-4)
    frozen = [read_checkpoint(tmp_path / out)['frozen'] for out in ('shard_frozen', 'one_frozen')]
    assert frozen[0] == frozen[1] != []
    for out in ('dropout', 'shard_dropout'):
        assert_same_run(tmp_path / f'{out}_killed', tmp_path / out)
        ranks = read_checkpoint(tmp_path / out)['ranks']         # each draws its own dropout
        assert not torch.equal(*(rank['random']['cpu'] for rank in ranks))
    model, _ = load_checkpoint(tmp_path / 'shard')
    assert model(torch.zeros(1, 4, dtype=torch.long))[0].isfinite().all()


if __name__ == '__main__':
    run_commands(json.loads(sys.argv[1]))
