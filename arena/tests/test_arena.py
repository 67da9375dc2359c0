"""arena/: the entries, the race, sweeps, rules, tables and Welch's test; tools/flops.py."""

import json
import statistics
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from arena import __main__ as arena
from arena import leaderboard
from arena.entries import ENTRIES
from common import ROOT, run_here
from plumbing import settings
from plumbing.bins import load_bin
from plumbing.checkpoint import read_checkpoint
from plumbing.cli import UserError
from plumbing.log import read_log
from plumbing.settings import import_model, read_settings
from tools.flops import training_flops
from tools.welch import interval, welch

TINY = dict(model='moep', data='toy_stories', block_size=32, n_layer=1, n_head=1, n_embd=8,
            n_parallel=0, dropout=0.0, max_iters=6, batch_size=2, learning_rate=1e-2,
            log_interval=1, save_interval=2)
PATH = TINY | dict(model='papaformer')
del PATH['dropout']
STAGES = [
    PATH | dict(part=(0, 0.5), max_iters=2), PATH | dict(part=(0.5, 1), max_iters=2),
    dict(surgery='compose', runs=[0, 1], connection='gumbel1'),
    dict(model='papaformer', data='toy_stories', init_from=2, max_iters=2, batch_size=2,
         log_interval=1)]
RULES = dict(parameters=17e3, within=0.2, window=32, tokens=6 * 2 * 32)


@pytest.fixture
def home(tmp_path, data_dir, monkeypatch):
    """A folder with little text and one minimal pair, for a track of tiny entries."""
    for key, value in RULES.items():
        monkeypatch.setitem(leaderboard.TRACKS['toy'], key, value)
    monkeypatch.setitem(ENTRIES, 'toy', dict(gpt2=TINY, mine=TINY, staged=STAGES))
    stories = shutil.copytree(data_dir / 'toy_stories', tmp_path / 'data/toy_stories')
    os.truncate(stories / 'val.bin', 2 * 64)
    pairs = tmp_path / 'data/toy_blimp'
    pairs.mkdir()
    pair = dict(sentence_good='The dog is happy.', sentence_bad='The dog are happy.')
    (pairs / 'pairs.jsonl').write_text(json.dumps(pair) + '\n')
    return tmp_path


@pytest.fixture
def called(home, monkeypatch):
    """Scripts run in this process, and tools.check finds nothing wrong. -> the list of what runs:
    (script, run folder or model)."""
    scripts = []

    def call(script, *args):
        args = [*map(str, args)]
        name = next((arg[10:] for arg in args if arg.startswith('--out_dir=')), args[0])
        scripts.append((script, name.removeprefix('out/arena/toy/')))
        if script != 'tools.check':
            done = run_here(script.removesuffix('.py'), [str(ROOT / script), *args], home)
            if done.returncode:
                raise UserError(done.stderr)
    monkeypatch.setattr(arena, 'call', call)
    return scripts


def go(home, *args, code=0):
    """python -m arena, in this process -> what it prints, errors last"""
    done = run_here('arena.__main__', ['arena', *args, '--results=results'], home)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(home, name='arena_toy'):
    return leaderboard.read_rows(f'{name}.jsonl', [home / 'results'])


def race_of(name, seed):
    folder = f'{name}_{seed}'
    return [('train.py', folder), ('eval_blimp.py', folder), ('eval_blimp.py', folder)]


# ---- Races --------------------------------------------------------------------------------------

def test_a_race_goes_on_after_a_stop(home, called, monkeypatch):
    """Stopped in the second of four runs: that one and the others are run, the first is not."""
    call = arena.call

    def stopped(script, *args):
        if script == 'train.py' and len(rows(home)) == 1:
            raise KeyboardInterrupt
        call(script, *args)
    monkeypatch.setattr(arena, 'call', stopped)
    go(home, 'gpt2', 'mine', '--seeds=1,2', code=130)
    assert called == [('tools.check', 'moep'), *race_of('gpt2', 1), ('tools.check', 'moep')]
    monkeypatch.setattr(arena, 'call', call)
    called.clear()
    go(home, 'gpt2', 'mine', '--seeds=1,2')
    assert called == [('tools.check', 'moep'), *race_of('mine', 1), *race_of('gpt2', 2),
                      *race_of('mine', 2)]
    called.clear()
    tables = go(home, 'gpt2', 'mine', '--seeds=1,2')
    assert called == [] and tables == go(home, 'gpt2', 'mine', '--table')


def test_minutes(home, called, monkeypatch):
    """Equal time: an entry whose steps take 1.5 times as long takes two thirds of them. The dense
    entry runs for all budgets, once. Its curve says how long it must train for a loss."""
    monkeypatch.setitem(ENTRIES['toy'], 'dense_muon', TINY | dict(learning_rate=2e-2))
    times = iter([1.0, 1.5])
    monkeypatch.setattr(arena, 'relative_time', lambda *args: next(times))
    table = go(home, 'mine', '--minutes', '--seeds=1,2')
    dense = {(row['seed'], row['budget']): row for row in rows(home, 'arena_toy_minutes')
             if row['entry'] == 'dense_muon'}
    steps = {key: row['tokens'] / 64 for key, row in dense.items()}
    assert steps == {(1, 0.5): 3, (1, 1): 6, (2, 1): 6, (1, 1.5): 9, (1, 2): 12}
    mine = [row for row in rows(home, 'arena_toy_minutes') if row['entry'] == 'mine']
    assert [row['tokens'] / 64 for row in mine] == [4, 4] and mine[0]['time'] == 1.5
    called.clear()
    again = go(home, 'mine', '--minutes', '--seeds=1,2')
    assert called == [] and table.endswith(again)
    curve = {0.5: 4.0, 1: 3.0, 2: 2.0}
    speedups = [leaderboard.effective_speedup(bits, curve) for bits in (5, 4, 3, 2.5, 1.9)]
    assert speedups == ['below 0.5', '0.50', '1.00', '1.41', 'over 2']


def test_relative_time(monkeypatch):
    monkeypatch.setitem(ENTRIES, 'toy', dict(dense_muon=TINY))
    assert arena.relative_time('dense_muon', [TINY], 'toy') == 1
    assert arena.relative_time('mine', [TINY | dict(n_layer=2)], 'toy', repeat=1) > 0


def test_stages(home, called):
    """Two on halves of the text, their composition, which is made once, and its training. Costs are
    added up, the scores are the last one's."""
    go(home, 'staged', '--seeds=1')
    paths = [(script, name) for n in (0, 1) for script, name in (
        ('prepare.py', 'mix'), ('train.py', f'staged_1/stage_{n}'))]
    last = 'staged_1/stage_3'
    assert called == [*paths, ('tools.surgery', 'compose'), ('train.py', last),
                      ('eval_blimp.py', last), ('eval_blimp.py', last)]
    row, = rows(home)
    assert row['tokens'] == 3 * 2 * 2 * 32
    logs = [read_log(home / f'out/arena/toy/staged_1/stage_{n}') for n in (0, 1, 3)]
    assert row['minutes'] == pytest.approx(sum(log[-1]['seconds'] for log in logs) / 60)
    assert row['loss'] == logs[2][-1]['val']['toy_stories']['loss']
    assert row['parameters'] == logs[2][0]['run']['parameters'] > logs[0][0]['run']['parameters']
    assert logs[2][0]['run']['config']['connection'] == 'gumbel1'
    texts = [log[0]['run']['settings']['data'] for log in logs]
    one, two, whole = (load_bin(home / 'data' / text, 'train').tolist() for text in texts)
    assert texts[2] == 'toy_stories' and one + two[1:] == whole      # end-of-text begins each
    (home / 'results/arena_toy.jsonl').unlink()
    called.clear()
    go(home, 'staged', '--seeds=1')
    assert called == [paths[1], paths[3], ('train.py', last), ('eval_blimp.py', last),
                      ('eval_blimp.py', last)]


@pytest.mark.slow
def test_a_killed_arena_lets_train_save(data_dir, tmp_path):
    """In real processes: SIGTERM reaches train.py. (That it goes on: tests/test_train.py.)"""
    code = 'from arena.__main__ import call, run_main, sys; run_main(lambda: call(*sys.argv[1:]))'
    settings = TINY | dict(data_dir=data_dir, max_iters=1000, save_interval=9999, eval_tokens=64)
    process = subprocess.Popen([sys.executable, '-c', code, 'train.py', *arena.options(settings)],
                               cwd=tmp_path, env=dict(os.environ, PYTHONPATH=str(ROOT)),
                               stdout=subprocess.PIPE, text=True)
    log = tmp_path / 'out/moep/log.jsonl'
    while process.poll() is None and not (log.exists() and 'grad_norm' in log.read_text()):
        time.sleep(0.02)
    process.terminate()
    last = process.communicate()[0].splitlines()[-1]
    assert process.returncode == 143 and last == 'the arena stopped; the same command continues'
    assert read_checkpoint(log.parent)['iter'] < 1000


def test_an_entry_that_fails_does_not_stop_the_others(home, called):
    ENTRIES['toy']['bad'] = TINY | dict(aux_weights=dict(nothing=1.0))
    go(home, 'bad', 'mine', '--seeds=1', code=2)
    assert [row['entry'] for row in rows(home)] == ['mine']


# ---- Entries that have changed ------------------------------------------------------------------

def test_changed_settings_are_not_mixed(home, called):
    """Neither with rows, nor with a run that was stopped."""
    go(home, 'mine', '--seeds=1')
    ENTRIES['toy']['mine'] = TINY | dict(learning_rate=1e-3)
    for seeds in '1', '1,2':                             # an old row is no result
        assert 'mine: it has changed' in go(home, 'mine', f'--seeds={seeds}', code=2)
    (home / 'results/arena_toy.jsonl').unlink()
    go(home, 'mine', '--seeds=1', code=2)
    assert called.count(('train.py', 'mine_1')) == 1


def test_changed_code_is_another_entry(monkeypatch):
    """Of the model file and of what it imports; comments and docstrings are no code."""
    assert settings.model_sources('arena.noisy').keys() == {'arena/noisy.py', 'moep.py'}
    sources = {'mine.py': 'x = 1\n'}
    monkeypatch.setattr(arena, 'model_sources', lambda name: sources)
    identity = arena.identify([TINY])
    sources['mine.py'] = '"""Parts,\n\nin two lines."""\n\nx = 1      # one\n'
    assert arena.identify([TINY]) == identity
    sources['mine.py'] = 'x = 2\n'
    assert arena.identify([TINY]) != identity


# ---- Sweeps -------------------------------------------------------------------------------------

def test_a_sweep(home, called):
    """One seed and a third of the tokens for each value, which may be spelt in two ways."""
    go(home, 'mine', '--sweep=learning_rate=1e-3,2e-3,0.002')
    assert called == [('tools.check', 'moep'), ('train.py', 'sweeps/mine_learning_rate=0.001'),
                      ('train.py', 'sweeps/mine_learning_rate=0.002')]
    assert [row['tokens'] for row in rows(home, 'arena_toy_sweeps')] == [2 * 2 * 32] * 2


def test_length():
    assert arena.of_length(TINY, 0.5) == TINY | dict(max_iters=3)
    assert arena.of_length(dict(epochs=6), 1 / 3) == dict(epochs=2)


# ---- Rules and tables ---------------------------------------------------------------------------

@pytest.mark.parametrize('track', ENTRIES)
def test_every_entry_keeps_the_rules(track):
    """Its class, its data, and its budget: ten epochs of 10M words, or 0.5M tokens."""
    for name, stages in arena.find_entries([], track).items():
        settings = [read_settings(arena.options(stage))[0]
                    for stage in filter(arena.is_training, stages)]
        if track == 'baby':
            for s in settings:
                window = s.seq_len or 512
                assert (s.stride * 4, s.epoch_words) == (window, 10e6), name
                assert s.batch_size * window == 64 * 512, name
            assert sum(s.epochs for s in settings) == 10, name
        else:
            tokens = sum(s.max_iters * s.batch_size * 64 for s in settings)
            assert tokens == pytest.approx(0.5e6, rel=0.01), name


@pytest.mark.parametrize('track', ENTRIES)
def test_the_results_are_those_of_the_entries(track):
    for name, seeds in leaderboard.read_results(track, [leaderboard.PUBLISHED]).items():
        entry = ENTRIES[track][name]
        stages = entry if isinstance(entry, list) else [entry]
        for row in seeds.values():
            assert row['configs'] == arena.identify(stages)['configs'], name


@pytest.mark.parametrize('track, within', [('toy', 0.1), ('baby', 0.05)])
def test_who_is_in_a_class(track, within):
    """Near enough to either number, after about as many tokens as the track has."""
    rules = leaderboard.TRACKS[track]
    costs = dict(parameters=rules['parameters'], flops_per_token=rules['flops_per_token'])
    for key, other in (('parameters', 'flops_per_token'), ('flops_per_token', 'parameters')):
        for off in (-within, within):
            near, far = (costs | {key: rules[key] * (1 + times * off)} for times in (0.9, 1.1))
            assert leaderboard.classes(near, track) == ['parameters', 'flops_per_token']
            assert leaderboard.classes(far, track) == [other]
    for share, n_classes in ((0.88, 0), (0.92, 2), (1.08, 2), (1.12, 0)):
        tokens = dict(tokens=share * rules['tokens'])
        assert len(leaderboard.classes(costs | tokens, track)) == n_classes


def test_attention_by_hand():
    """The width of all heads that a token's queries have, in all layers: of a Config, and of one
    that inherits it."""
    size = dict(n_layer=5, n_embd=16)
    for name, keys, width in (
            ('moep', dict(n_parallel=3, n_block=4, n_embd_parallel=6), 5 * 16 + 3 * 4 * 6),
            ('papaformer', dict(n_parallel=3, path_embd=[4, 8]), 5 * 16 + 3 * (4 + 8)),
            ('moduleformer', dict(top_k=2, d_att=8), 5 * 2 * 8),
            ('selfmoe', {}, 5 * 16), ('stlm', {}, 5 * 16), ('arena.dense', {}, 5 * 16),
            ('stlm_depth', dict(capacity=0.25, route_every=2), 3 * 16 + 2 * 16 / 16)):
        kind = type(import_model(name).Config.__name__, (SimpleNamespace,), {})
        for config in (kind, type('MineConfig', (kind,), {})):
            assert training_flops(config(**size, **keys), 100, 10) == 6 * 100 + 6 * width * 10, name


def test_welch():
    """The first example of Wikipedia's page on the test, and the ends."""
    a = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4]
    b = [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4]
    assert welch(a, b) == welch(b, a) == pytest.approx(0.021, abs=5e-4)
    assert welch([1.0, 2.0], [2.0, 1.0]) == pytest.approx(1)
    assert welch([1.0, 1.0], [1.0, 1.0]) == 1
    assert welch([1.0, 1.0], [2.0, 2.0]) == 0
    far = [x - statistics.mean(b) + statistics.mean(a) + interval(a, b) for x in b]
    assert welch(a, far) == pytest.approx(0.05, abs=1e-4)


def test_the_deviation_is_pooled(tmp_path):
    """Two entries with the same deviation: Welch's test. A third one that is more even makes the
    interval smaller. One seed, or one that diverged, is not tested."""
    bits = dict(a=[1.0, 2.0, 3.0], b=[2.5, 3.5, 4.5])
    half, p = interval(*bits.values()), welch(*bits.values())
    assert leaderboard.compare(bits, 'a', 'b') == (
        f'-1.5000 ± {half:.4f}, no clear difference, p = {p:.2g}')
    even = dict(c=[9.0, 9.0, 9.0, 9.0, 9.0])              # half the variance, 8 degrees of freedom
    half = 2.306 * (0.5 * 2 / 3) ** 0.5
    assert leaderboard.compare(bits | even, 'b', 'a').startswith(f'+1.5000 ± {half:.3f}')
    more = dict(one=[2.0], diverged=[1.0, 2.0, 99.0])
    with open(tmp_path / 'arena_toy.jsonl', 'w') as file:
        for name, seeds in (bits | more).items():
            for seed, value in enumerate(seeds):
                print(json.dumps(dict(entry=name, seed=seed, bits_per_byte=value)), file=file)
    read = leaderboard.read_bits('toy', [tmp_path])
    assert read == bits | dict(diverged=None)
    assert leaderboard.compare(read, 'one', 'a') == 'no test: one seed'
    assert leaderboard.compare(read, 'a', 'diverged') == 'no test: a seed diverged'
    assert leaderboard.compare(read, 'a', 'b') == leaderboard.compare(bits, 'a', 'b')


def test_flops_are_of_what_is_taken(home, monkeypatch):
    """On the validation text, at the end: not of top_k."""
    entry = TINY | dict(n_parallel=1, n_head_parallel=1, n_embd_parallel=8, n_layer=2)
    run_here('train', ['train.py', *arena.options(entry), '--out_dir=out/routed'], home)
    monkeypatch.chdir(home)
    first = arena.measure('out/routed')
    log = home / 'out/routed/log.jsonl'
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[-1]['taken']['shrink'] -= 1.0                  # of 4 experts of 8 x 8 with a bias
    log.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    assert first['active'] - arena.measure('out/routed')['active'] == 8 * 8 + 8
    assert first['flops_per_token'] - arena.measure('out/routed')['flops_per_token'] == 6 * 72
