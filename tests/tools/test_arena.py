"""tools/arena.py, entries.py and leaderboard.py: what is run, costs, rules, tables, Welch's test."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import papaformer
import selfmoe
from conftest import ROOT, run_here
from plumbing.cli import UserError
from plumbing.models import import_model, sketch
from plumbing.settings import read_settings
from tools import arena, check, entries, flops, leaderboard

TINY = """model = 'moep'
data = 'toy_stories'
block_size = 32
n_layer = 1
n_head = 1
n_embd = 8
n_parallel = 0
dropout = 0.0
max_iters = 6
batch_size = 2
learning_rate = 1e-2
log_interval = 1
save_interval = 2
sample_tokens = 2
"""
PATH = TINY.replace('moep', 'papaformer').replace("'toy_stories'", "{'toy_stories': (0.0, 0.5)}")
COMPOSED = """model = 'papaformer'
data = 'toy_stories'
init_from = ['out/1_path', 'out/2_path']
surgery = 'compose'
max_iters = 3
batch_size = 2
log_interval = 1
sample_tokens = 2
"""


@pytest.fixture
def track(tmp_path, data_dir, monkeypatch):
    """A toy track for tiny models, with a pair of sentences, in tmp_path; scripts run in this process, and
    tools.check has nothing to check. -> a list of the other scripts that are run, as (script, config or run
    folder)."""
    for key, value in dict(parameters=17e3, within=0.2, window=32, tokens=6 * 2 * 32).items():
        monkeypatch.setitem(leaderboard.TRACKS['toy'], key, value)
    (tmp_path / 'data' / 'toy_blimp').mkdir(parents=True)
    stories = shutil.copytree(data_dir / 'toy_stories', tmp_path / 'data/toy_stories')
    meta = json.loads((stories / 'meta.json').read_text())
    meta['splits']['val']['tokens'] = 64                 # entries are scored on all of it
    (stories / 'meta.json').write_text(json.dumps(meta))
    os.truncate(stories / 'val.bin', 2 * 64)
    pair = dict(sentence_good='The dog is happy.', sentence_bad='The dog are happy.')
    (tmp_path / 'data/toy_blimp/pairs.jsonl').write_text(json.dumps(pair) + '\n')
    (tmp_path / 'toy').mkdir()
    for name in ('gpt2', 'mine'):
        (tmp_path / 'toy' / f'{name}.py').write_text(TINY)
    called = []

    def call(script, *args):
        if script != 'tools.check':
            called.append((script, Path(args[0]).stem))
        done = run_here(script.removesuffix('.py'), [str(ROOT / script), *map(str, args)], tmp_path)
        if done.returncode:
            raise UserError(done.stderr)
    monkeypatch.setattr(arena, 'call', call)
    monkeypatch.setattr(check, 'CHECKS', ())
    monkeypatch.setattr(arena, 'RESULTS', tmp_path / 'results')  # a test that fails leaves docs/ alone
    return called


@pytest.fixture
def go(run, tmp_path):
    def go(*args, **more):
        return run('tools.arena', *args, '--results=r', here=True, cwd=tmp_path, **more)
    return go


def scripts(*runs):
    return [(script, name) for config, folder in runs for script, name in
            (('train.py', config), ('eval_blimp.py', folder), ('eval_blimp.py', folder))]


# ---- Races --------------------------------------------------------------------------------------


def test_a_race_goes_on_after_a_kill(track, go, tmp_path, monkeypatch):
    """Killed in the second of four runs: that one and the others are run, the first is not run again."""
    call = arena.call

    def killed(script, *args):
        if len(track) == 3:
            raise KeyboardInterrupt
        call(script, *args)
    monkeypatch.setattr(arena, 'call', killed)
    go('toy/gpt2.py', 'mine.py', '--seeds=2', code=130)
    assert track == scripts(('gpt2', 'gpt2_1'))
    assert [path.name for path in tmp_path.glob('r/toy/*')] == ['gpt2_1.json']

    monkeypatch.setattr(arena, 'call', call)
    track.clear()
    text = go('toy/gpt2.py', 'mine.py', '--seeds=2').stdout
    assert track == scripts(('mine', 'mine_1'), ('gpt2', 'gpt2_2'), ('mine', 'mine_2'))
    assert '1 of 3: mine (moep.py), seed 1' in text
    track.clear()
    last = go('toy/gpt2.py', 'mine.py', '--seeds=2').stdout
    tables = go('--table').stdout
    assert track == [] and last.replace('> ', '  ').startswith(tables)
    _, title, head, *rows, _, other, same_head = tables.splitlines()
    assert [title, other] == ['Equal parameters', 'Equal FLOPs per token']       # none is in the other
    assert head.split() == same_head.split() and head.startswith('  entry')
    assert [row.split()[:2] for row in rows] == [['gpt2', '2'], ['mine', '2']]
    assert rows[0].endswith('the dense entry') and rows[1].endswith('open, p = 1')

    kept = json.loads((tmp_path / 'r/toy/mine_2.json').read_text())
    assert kept['commands'] == ['python train.py toy/mine.py --seed=2 --out_dir=out/arena/toy/mine_2 '
                                '--data_dir=data --sample_tokens=0 --resume']
    assert kept['tokens'] == 6 * 2 * 32 and kept['harness'] in (0, 100) and kept['minutes'] > 0
    assert kept['flops_per_token'] == 6 * kept['active'] + 6 * 8 * 32
    log = [json.loads(line) for line in open(tmp_path / 'out/arena/toy/mine_2/log.jsonl')]
    assert kept['loss'] == log[-1]['val']['toy_stories']['loss']


@pytest.mark.slow
def test_a_killed_arena_saves_and_goes_on(track, go, tmp_path, monkeypatch):
    """SIGTERM to its process reaches train.py, which saves; the same command goes on from there."""
    changes = 'n_layer = 4\nn_embd = 96\nmax_iters = 100\nbatch_size = 1\nsave_interval = 1000\n'
    (tmp_path / 'toy/long.py').write_text(TINY + changes)
    rules = dict(parameters=0.65e6, tokens=100 * 32, window=32)
    leaderboard.TRACKS['toy'].update(rules)              # until `track` ends
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    log = tmp_path / 'out/arena/toy/long_1/log.jsonl'
    code = f"""from tools import arena
arena.TRACKS['toy'].update({rules})
arena.find_fault = lambda *args: ''                      # no tools.check
arena.run_main(arena.main)"""
    command = [sys.executable, '-c', code, 'toy/long.py', '--seeds=1', '--results=r']
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    while process.poll() is None and not (log.exists() and 'grad_norm' in log.read_text()):
        time.sleep(0.02)
    process.terminate()
    last = process.communicate()[0].splitlines()[-1]
    assert process.returncode == 143 and last.startswith('the arena stopped; to continue, ')
    assert (log.parent / 'ckpt.pt').exists() and not any(tmp_path.glob('r/toy/*'))
    go('toy/long.py', '--seeds=1')
    lines = [json.loads(line) for line in open(log)]
    again, = [line['iter'] for line in lines if 'run' in line][1:]
    assert 0 < again < 100 and lines[-1]['iter'] == 100
    assert (tmp_path / 'r/toy/long_1.json').exists()


CHANGED = 'has changed since it ran'
RENAME = 'give the new one another name, or delete the old results'


def test_a_changed_entry_is_not_mixed_with_what_it_was(track, go, tmp_path):
    """Neither its results are kept as they are, nor is its run resumed."""
    go('mine.py', '--seeds=1')
    config = tmp_path / 'toy/mine.py'
    config.write_text('# only a comment\n' + TINY)
    go('mine.py', '--seeds=1')
    config.write_text(TINY.replace('1e-2', '1e-3'))
    refused = f'mine: its config {CHANGED}: {RENAME}, with the command above'
    done = go('mine.py', code=2)
    assert refused in done.stderr and done.stdout == 'rm -rf r/toy/mine_1.json out/arena/toy/mine_1\n'
    (tmp_path / 'r/toy/mine_1.json').unlink()
    done = go('mine.py', '--seeds=1', code=2)
    assert refused in done.stderr and done.stdout == 'rm -rf out/arena/toy/mine_1\n'
    assert track == scripts(('mine', 'mine_1'))


def test_the_command_deletes_all_seeds_of_this_entry(track, go, tmp_path):
    """Every shell can read it; all that it names is there."""
    entry = json.dumps(entries.identify([tmp_path / 'toy/mine.py']) | dict.fromkeys(leaderboard.SCORES, 1.0))
    for name in ('mine_2x_1', 'mine_flops_1', 'mine_7', 'mine_100'):
        (tmp_path / 'r/toy').mkdir(parents=True, exist_ok=True)
        (tmp_path / f'r/toy/{name}.json').write_text(entry)
    (tmp_path / 'out/arena/toy/mine_12').mkdir(parents=True)
    (tmp_path / 'toy/mine.py').write_text(TINY.replace('1e-2', '1e-3'))
    told = go('mine.py', f'--results={tmp_path}/r', code=2).stdout
    assert told == 'rm -rf r/toy/mine_7.json out/arena/toy/mine_12 r/toy/mine_100.json\n'


@pytest.mark.parametrize('imports', ['from arena.parts import x', 'from arena import parts',
                                     'import arena.parts'])
def test_the_code_that_an_entry_imports(tmp_path, monkeypatch, imports):
    monkeypatch.setattr(entries, 'ROOT', tmp_path)
    (tmp_path / 'arena').mkdir()
    (tmp_path / 'mine.py').write_text(imports)
    (tmp_path / 'arena/parts.py').write_text('x = 1')
    assert entries.read_code('mine').endswith('x = 1')


def test_the_code_of_every_stage_counts(tmp_path, monkeypatch):
    stages = [tmp_path / '1_a.py', tmp_path / '2_b.py']
    for path, model in zip(stages, ('moep', 'selfmoe')):
        path.write_text(f"model = '{model}'\n")
    code = dict(moep='a', selfmoe='b')
    monkeypatch.setattr(entries, 'read_code', code.get)
    seen = [entries.identify(stages)['checksum']]
    for model in code:
        code[model] += 'x'
        seen.append(entries.identify(stages)['checksum'])
    assert len({*seen}) == 3


def test_what_counts_as_code(tmp_path, monkeypatch):
    """The text itself, since what Python makes of it differs between versions."""
    monkeypatch.setattr(entries, 'ROOT', tmp_path)
    (tmp_path / 'mine.py').write_text('''"""A file.
    # of two lines"""

def f(x): ...           # does nothing


class A:
    """One."""
    name = f"# {'a'!r}"     \n''')
    assert entries.read_code('mine') == '''def f(x): ...
class A:
    name = f"# {'a'!r}"'''


@pytest.fixture
def code(track, tmp_path, monkeypatch):
    """A file that the model of an entry imports."""
    monkeypatch.setattr(entries, 'ROOT', tmp_path)
    (tmp_path / 'moep.py').write_text('from arena.parts import x\nimport torch\nfrom math import pi\n')
    code = tmp_path / 'arena/parts.py'
    code.parent.mkdir()
    code.write_text('x = 1\n')
    return code


def test_changed_code_is_told(track, go, code):
    """If nothing is left to run, results stay, with a line about it at the end; a comment is no change."""
    go('mine.py', '--seeds=2')
    go('mine.py', '--sweep=learning_rate=1e-3')
    code.write_text('"""Parts."""\nx = 1    # one\n')
    assert 'code' not in go('mine.py', '--seeds=2').stdout
    code.write_text('x = 2\n')
    told = f'mine: its code {CHANGED}, and what is shown is of the old code; {RENAME}: rm -rf'
    files = 'r/toy/mine_1.json out/arena/toy/mine_1 r/toy/mine_2.json out/arena/toy/mine_2'
    text = go('mine.py', '--seeds=2').stdout
    assert text.endswith(f'\n{told} {files}\n') and text.count(CHANGED) == 1
    files = 'r/toy/sweeps/mine.json out/arena/toy/sweeps/mine_learning_rate=0.001'
    assert go('mine.py', '--sweep=learning_rate=1e-3').stdout.endswith(f'\n{told} {files}\n')
    assert len(track) == 7


def test_other_code_is_not_mixed(track, go, code, tmp_path):
    """Neither with seeds that have run, asked for or not, nor with a run that was interrupted."""
    refused = f'mine: its code {CHANGED}: {RENAME}, with the command above'
    go('mine.py', '--seeds=2')
    code.write_text('x = 2\n')
    assert refused in go('mine.py', '--seeds=3', code=2).stderr
    for path in (tmp_path / 'r/toy/mine_1.json', *tmp_path.glob('out/arena/toy/mine_1/ckpt*')):
        path.unlink()
    assert refused in go('mine.py', '--seeds=1', code=2).stderr          # there is seed 2
    (tmp_path / 'r/toy/mine_2.json').unlink()            # its run is still there
    assert refused in go('mine.py', '--seeds=2', code=2).stderr
    assert track == scripts(('mine', 'mine_1'), ('mine', 'mine_2'))
    shutil.rmtree(tmp_path / 'out/arena/toy/mine_2')
    go('mine.py', '--seeds=1')


def test_other_code_is_not_mixed_in_a_sweep(track, go, code, tmp_path):
    refused = f'mine: its code {CHANGED}: {RENAME}, with the command above'
    go('mine.py', '--sweep=learning_rate=1e-3')
    code.write_text('x = 2\n')
    assert refused in go('mine.py', '--sweep=learning_rate=1e-3,3e-3', code=2).stderr
    assert refused in go('mine.py', '--sweep=learning_rate=3e-3', code=2).stderr
    assert len(track) == 1
    go('mine.py', '--sweep=weight_decay=0.1')            # no value of it was made before
    (tmp_path / 'r/toy/sweeps/mine.json').unlink()       # the run is still there
    assert refused in go('mine.py', '--sweep=learning_rate=1e-3', code=2).stderr


def test_older_results_have_no_checksum():
    entry = dict(configs=[1], checksum=2)
    assert entries.check_kept('mine', entry, [dict(configs=[1]), {}], ['a run'], []) == []


def test_a_stage_that_was_saved_is_a_run_that_began(tmp_path):
    (tmp_path / 'entry.json').write_text('{"configs": []}')
    assert entries.saved_entry(tmp_path) == {}              # nothing to resume
    (tmp_path / '1_path').mkdir()
    (tmp_path / '1_path/ckpt.pt').touch()
    assert entries.saved_entry(tmp_path) == dict(configs=[])


def test_an_entry_that_fails_does_not_stop_the_others(track, go, tmp_path):
    """Nothing was made of it, so it can be corrected under its name."""
    (tmp_path / 'toy/bad.py').write_text(TINY + "aux_weights = dict(nothing=1.0)\n")
    text = go('toy/bad.py', 'toy/mine.py', '--seeds=1', code=2).stderr
    assert 'not finished: bad with seed 1' in text and "names 'nothing'" in text
    assert text.endswith('; the same command tries again\n')
    assert [path.name for path in tmp_path.glob('r/toy/*')] == ['mine_1.json']
    (tmp_path / 'toy/bad.py').write_text(TINY)
    go('toy/bad.py', '--seeds=1')


@pytest.fixture
def two_heads(track, tmp_path, monkeypatch):
    """A new entry that is faulty: it has two heads, which tools.check finds wrong."""
    def heads(module, model, x, y):
        assert model.config.n_head == 1, 'two heads'
    monkeypatch.setattr(check, 'CHECKS', (heads,))
    config = tmp_path / 'toy/bad.py'
    config.write_text(TINY.replace('n_head = 1', 'n_head = 2'))
    return config


def test_a_faulty_entry_is_refused(two_heads, track, go):
    """It is checked once, before anything trains; corrected, it runs under its name."""
    done = go('bad.py', 'mine.py', '--seeds=2', code=2)
    assert track == scripts(('mine', 'mine_1'), ('mine', 'mine_2'))
    told = 'not finished: bad is refused: python -m tools.check moep --config toy/bad.py says why\n'
    assert done.stderr.endswith(told) and 'Equal parameters' in done.stdout
    assert done.stdout.count('bad is new: tools.check') == done.stdout.count('mine is new: tools.check') == 1
    assert done.stdout.index('mine is new') < done.stdout.index('==== 1 of 2: mine (moep.py), seed 1')
    done = go('bad.py', code=2)
    assert done.stderr.endswith(told) and 'Equal' not in done.stdout     # tables would hide what is wrong
    two_heads.write_text(TINY)
    go('bad.py', '--seeds=1')


def test_a_faulty_entry_is_not_swept(two_heads, track, go, tmp_path):
    done = go('bad.py', 'mine.py', '--sweep=learning_rate=1e-3,1e-2', code=2)
    assert track == 2 * [('train.py', 'mine')] and 'not finished: bad is refused' in done.stderr
    assert done.stdout.count('bad is new') == done.stdout.count('mine is new') == 1
    assert [path.name for path in tmp_path.glob('r/toy/sweeps/*')] == ['mine.json']
    assert 'is new' not in go('mine.py', '--sweep=learning_rate=3e-3').stdout
    (tmp_path / 'r/toy/sweeps/mine.json').unlink()       # there are runs that began
    assert 'is new' not in go('mine.py', '--sweep=learning_rate=3e-3').stdout


def test_what_is_not_checked(two_heads, track, go, tmp_path, monkeypatch):
    """What has run or began to, what is in stages, and the track baby."""
    begun = tmp_path / 'out/arena/toy/bad_2'
    begun.mkdir(parents=True)
    (begun / 'entry.json').write_text(json.dumps(entries.identify([two_heads])))
    (begun / 'ckpt.pt').touch()
    assert 'is new' not in go('bad.py', '--seeds=2', code=2).stdout      # that checkpoint is broken
    shutil.rmtree(begun)
    assert track[:3] == scripts(('bad', 'bad_1')) and 'is new' not in go('bad.py', '--seeds=2').stdout
    monkeypatch.setattr(arena, 'call', lambda *args: pytest.fail('it is checked'))
    assert arena.find_fault('bad', [two_heads], 'baby') == ''
    assert arena.find_fault('bad', [two_heads, two_heads], 'toy') == ''


def test_a_tool_is_called_as_a_user_would(monkeypatch):
    """A script by its path, a tool by -m."""
    started = []
    fake = lambda command, **_: started.append(command) or SimpleNamespace(wait=lambda: len(started) - 1)
    monkeypatch.setattr(arena.subprocess, 'Popen', fake)
    arena.call('train.py', Path('a'))
    with pytest.raises(UserError, match='tools.check ended with exit code 1; its message is above'):
        arena.call('tools.check', 'b')
    assert started == [[sys.executable, ROOT / 'train.py', 'a'], [sys.executable, '-m', 'tools.check', 'b']]


def test_no_minimal_pairs(track, go, tmp_path, monkeypatch):
    """It is told before the work. Made later, they are scored without training again."""
    (tmp_path / 'data/toy_blimp').rename(tmp_path / 'data/later')
    monkeypatch.setitem(leaderboard.TRACKS['toy'], 'pairs', 'pairs')
    told = 'there is no data/pairs (see prepare.py): nothing will be scored'
    assert go('mine.py', '--seeds=1').stdout.startswith(told)
    file = tmp_path / 'r/toy/mine_1.json'
    kept = json.loads(file.read_text())
    assert kept['harness'] is None and kept['babylm2025'] is None
    file.unlink()
    (tmp_path / 'data/later').rename(tmp_path / 'data/pairs')
    assert told not in go('mine.py', '--seeds=1').stdout
    again = json.loads(file.read_text())
    assert again['harness'] in (0, 100) and again['minutes'] == kept['minutes']


def test_few_entries_are_repeated(track, go, tmp_path):
    """Their places come again after the tables; those of many would only repeat them."""
    go('mine.py', '--seeds=1')
    names = [f'mine{n}' for n in range(6)]
    for name in names:
        shutil.copy(tmp_path / 'toy/mine.py', tmp_path / f'toy/{name}.py')
        shutil.copy(tmp_path / 'r/toy/mine_1.json', tmp_path / f'r/toy/{name}_1.json')
    tables = go('--table').stdout
    assert go(*[f'{name}.py' for name in names], '--seeds=1').stdout == tables
    bits = json.loads((tmp_path / 'r/toy/mine_1.json').read_text())['bits_per_byte']
    text = go('mine3.py', 'mine1.py', '--seeds=1').stdout
    marked = [line.split()[1] for line in text.splitlines() if line.startswith('> ')]
    assert marked == ['mine1', 'mine3']
    assert text.replace('> ', '  ').removeprefix(tables).splitlines() == [
        '',
        f'Equal parameters, 2 of 7: mine1, {bits:.4f} bits per byte, -',         # no entry is dense
        f'Equal parameters, 4 of 7: mine3, {bits:.4f} bits per byte, -',
        'Equal parameters: mine3 against mine1: one seed: no test']


def test_where_results_go(track, go, tmp_path, monkeypatch):
    """Those of the page make it anew, however their folder is spelled; a folder is made for results only."""
    assert 'r has no results of the track toy' in go('--table', code=2).stderr
    assert not (tmp_path / 'r').exists()
    go('mine.py', '--seeds=1')
    monkeypatch.setattr(arena, 'call', lambda script: track.append(script))
    monkeypatch.setattr(arena, 'RESULTS', tmp_path / 'r')
    go('--table')
    assert track[-1] == 'docs/results/tables.py'


def test_stages_are_added_up(track, go, tmp_path):
    """Two paths, then both composed: the costs of all three, the scores of the last."""
    folder = tmp_path / 'toy/composed'
    folder.mkdir()
    for name, text in {'1_path': PATH, '2_path': PATH, '3_both': COMPOSED}.items():
        (folder / f'{name}.py').write_text(text.replace('n_embd = 8', 'n_embd = 4'))
    text = go('composed', '--seeds=1').stdout
    assert track[:3] == [('train.py', name) for name in ('1_path', '2_path', '3_both')]
    assert track[3:] == 2 * [('eval_blimp.py', '3_both')]
    kept = json.loads((tmp_path / 'r/toy/composed_1.json').read_text())
    home = tmp_path / 'out/arena/toy/composed_1'
    runs = [arena.read_run(home / name) for name in ('1_path', '2_path', '3_both')]
    tokens = [6 * 2 * 32, 6 * 2 * 32, 3 * 2 * 32]
    assert [run['tokens'] for run in runs] == tokens and kept['tokens'] == sum(tokens)
    cost = sum(run['flops_per_token'] * n for run, n in zip(runs, tokens))
    assert kept['flops_per_token'] == pytest.approx(cost / sum(tokens))
    assert kept['minutes'] == pytest.approx(sum(run['minutes'] for run in runs))
    seconds = sum(n / run['tokens_per_s'] for run, n in zip(runs, tokens))
    assert kept['tokens_per_s'] == pytest.approx(sum(tokens) / seconds)
    assert kept['parameters'] == runs[2]['parameters'] and len(kept['commands']) == 3
    assert kept['loss'] == runs[2]['loss']
    assert 'composed is in neither class' in text


def test_a_stage_starts_from_those_beside_it(tmp_path, monkeypatch):
    """Of the same entry and seed, wherever its config says that they are: from one, or from a list."""
    starts = {'1_a': '', '2_b': "init_from = 'out/1_a'", '3_c': "init_from = ['out/1_a', 'out/2_b']"}
    for name, text in starts.items():
        (tmp_path / f'{name}.py').write_text(f"model = 'moep'\n{text}\n")
    given = []
    cost = dict(tokens=1, minutes=1.0, flops_per_token=1, tokens_per_s=1)
    monkeypatch.setattr(arena, 'call', lambda script, config, *args: given.append(args))
    monkeypatch.setattr(arena, 'read_run', lambda folder: dict(cost, command=folder.name))
    home = tmp_path / 'runs'
    folder, _ = arena.train([tmp_path / f'{name}.py' for name in starts], {}, home, 5, 'data')
    assert folder == home / '3_c'
    common = [['--seed=5', f'--out_dir={home / name}', '--data_dir=data'] for name in starts]
    both = [str(home / '1_a'), str(home / '2_b')]
    inits = [[], [f'--init_from={both[0]}'], [f'--init_from={both}']]
    last = ['--sample_tokens=0', '--resume']
    assert [*map(list, given)] == [[*args, *init, *last] for args, init in zip(common, inits)]


@pytest.mark.parametrize('line, message', [
    ('vocab_size = 4000', 'has 0.84M parameters'), ('seq_len = 32', 'reads windows of 32 tokens'),
    ('max_iters = 0', 'reads 0.00M tokens; the track toy has 0.5M')])
def test_what_an_entry_sets_itself_counts(tmp_path, line, message):
    text = (ROOT / 'config/arena/toy/gpt2.py').read_text()
    config = tmp_path / 'mine.py'
    config.write_text(text)
    entries.check_entry(config, [], alone=True, track='toy')
    config.write_text(f'{text}\n{line}\n')
    with pytest.raises(UserError, match=message):
        entries.check_entry(config, [], alone=True, track='toy')


def test_a_stage_does_not_start_from_itself(tmp_path):
    config = tmp_path / '1_a.py'
    config.write_text("model = 'moep'\ndata = 'toy_stories'\ninit_from = 'out/1_a'\n")
    with pytest.raises(UserError, match='init_from names out/1_a, which is not an earlier stage'):
        entries.check_entry(config, [], alone=False, track='toy')


def test_what_a_run_cost(tmp_path):
    """Read from its log: the median speed, the time and the scores of the end, also if they were better
    before, the window it was given."""
    config = dict(vocab_size=40, block_size=32, n_layer=1, n_head=1, n_embd=8, n_parallel=0)
    about = dict(device='cpu', torch='2', command='train.py x', parameters=70, active=50, steps=6,
                 tokens_per_step=48, settings=dict(model='moep', seq_len=16), config=config)
    val = lambda loss, bits: dict(toy_stories=dict(loss=loss, bits_per_byte=bits))
    lines = [dict(run=about), dict(seconds=1.0, val=val(1.9, 1.4)), *(dict(loss=3.0, tokens_per_s=n) for n in
             (10, 90, 30)), dict(seconds=120.0, val=val(2.0, 1.5)), dict(run=dict(about, command='again'))]
    (tmp_path / 'log.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    assert arena.read_run(tmp_path) == dict(
        device='cpu', torch='2', command='python train.py x', parameters=70, active=50, tokens=6 * 48,
        flops_per_token=6 * 50 + 6 * 8 * 16, tokens_per_s=30, minutes=2.0, loss=2.0, bits_per_byte=1.5)


def test_every_mode_is_scored(tmp_path, monkeypatch):
    def call(script, folder, *args):
        given = dict(zip(args[::2], args[1::2]))
        given['--json'].write_text(json.dumps(dict(runs=[dict(overall=len(given['--mode']))])))
    monkeypatch.setattr(arena, 'call', call)
    assert arena.score_pairs(tmp_path, tmp_path) == dict(harness=7, babylm2025=10)


def test_a_sweep_of_what_counts_epochs(track, go, tmp_path):
    (tmp_path / 'toy/mine.py').write_text(TINY.replace('max_iters = 6', 'epochs = 0.0015'))
    go('mine.py', '--sweep=learning_rate=1e-3')
    result, = json.loads((tmp_path / 'r/toy/sweeps/mine.json').read_text()).values()
    assert '--seed=1 ' in result['commands'][0] and '--epochs=0.0005 ' in result['commands'][0]


def test_a_sweep(track, go, tmp_path):
    """A third of the steps for each value; what is known is not run again; the best comes first."""
    go('mine.py', '--sweep=learning_rate=1e-3,3e-2')
    text = go('mine.py', '--sweep=learning-rate=0.03,1e-4,.0001').stdout
    assert track == 3 * [('train.py', 'mine')]
    kept = json.loads((tmp_path / 'r/toy/sweeps/mine.json').read_text())
    assert [*kept] == [f'learning_rate={rate}' for rate in ('0.001', '0.03', '0.0001')]
    assert all('--max_iters=2 ' in result['commands'][0] for result in kept.values())
    shown = [line.split()[1] for line in text.splitlines() if 'val loss' in line]
    assert shown == sorted(kept, key=lambda setting: kept[setting]['loss'])
    config = tmp_path / 'toy/mine.py'
    config.write_text(TINY.replace('1e-2', '1e-3'))      # the rate that was found: the sweep still holds
    go('mine.py', '--sweep=learning_rate=3e-2', '--data_dir=none')       # nothing is left, so no text is made
    assert not (tmp_path / 'none').exists()
    config.write_text(TINY.replace('dropout = 0.0', 'dropout = 0.1'))
    told = go('mine.py', '--sweep=learning_rate=3e-2', code=2).stdout
    assert told.startswith('rm -rf r/toy/sweeps/mine.json out/arena/toy/sweeps/mine_learning_rate=')
    assert told.count('learning_rate=') == 3
    assert len(track) == 3


def test_what_a_killed_sweep_has_found_is_kept(track, go, tmp_path, monkeypatch):
    call = arena.call

    def killed(script, *args):
        if track:
            raise KeyboardInterrupt
        call(script, *args)
    monkeypatch.setattr(arena, 'call', lambda script, *args: script == 'tools.check' or killed(script, *args))
    go('mine.py', '--sweep=learning_rate=1e-3,3e-2', code=130)
    assert [*json.loads((tmp_path / 'r/toy/sweeps/mine.json').read_text())] == ['learning_rate=0.001']


@pytest.mark.parametrize('key', [
    'model', 'data', 'data_dir', 'seed', 'out_dir', 'init_from', 'resume', 'overwrite', 'epochs', 'max_iters',
    'epoch_words', 'seq_len', 'block_size', 'eval_data', 'eval_tokens'])
def test_what_is_the_same_for_all_entries_is_not_swept(key):
    with pytest.raises(UserError, match=f'{key} cannot be swept'):
        arena.sweep({}, SimpleNamespace(sweep=f'{key}=1'))


@pytest.mark.parametrize('config, setting, option', [
    ('toy/moep.py', 'learning_rate=1e-3', '--max_iters=325'),
    ('toy/moep.py', 'batch_size=16', '--max_iters=162'),
    ('toy/moep.py', 'gradient_accumulation_steps=2', '--max_iters=162'),
    ('moep.py', 'batch_size=16', f'--epochs={10 / 3}')])
def test_every_value_of_a_sweep_reads_as_many_tokens(monkeypatch, tmp_path, config, setting, option):
    said = []
    monkeypatch.setattr(arena, 'call', lambda *args: said.extend(args))
    monkeypatch.setattr(arena, 'read_run', lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):               # what follows is not of interest
        arena.train([ROOT / 'config/arena' / config], {}, tmp_path, 1, 'data', setting)
    assert option in said and f'--{setting}' in said


def test_a_sweep_of_what_has_commas(track, go, tmp_path):
    """They part values only outside of brackets and quotes."""
    assert arena.split_values("[(1,2),{3}], 3e-4,cosine,'a,b'") == ['[(1,2),{3}]', '3e-4', 'cosine', "'a,b'"]
    for text in ('[1', '1,,2', '1]+[2', 'a b'):
        with pytest.raises(UserError, match='--sweep: .* is not a list of values'):
            arena.split_values(text)
    go('mine.py', '--sweep=checkpoint_words=[1e5,2e5],[3e5]')
    kept = json.loads((tmp_path / 'r/toy/sweeps/mine.json').read_text())
    assert [*kept] == ['checkpoint_words=[100000.0, 200000.0]', 'checkpoint_words=[300000.0]']


def test_values_are_read_before_data_is_made(track, go, tmp_path):
    assert "'abc'" in go('mine.py', '--data_dir=none', '--sweep=learning_rate=1e-3,abc', code=2).stderr
    assert not (tmp_path / 'none').exists()


@pytest.mark.parametrize('losses, told', [
    ({'0.002': 2.0, '0.004': 1.5, '0.008': 1.0}, 'mine the highest is the best: try also rate=0.016'),
    ({'0.002': 1.0, '0.004': 2.0, '1e-05': 0.5}, 'mine the lowest is the best: try also rate=5e-06'),
    ({'0.002': 2.0, '0.016': 1.5, '0.008': 1.0}, 'mine write rate = 0.008 into toy/mine.py; then race: '
                                                 'this command without --sweep'),
    ({'0.0': 1.0, '0.1': 2.0}, 'mine write rate = 0 into toy/mine.py; then race: '        # nothing is lower
                               'this command without --sweep'),
    ({'0.002': 1.0}, 'mine rate=0.002 val loss 1.0000'),
    ({'muon': 1.0, 'adamw': 2.0}, 'mine rate=adamw val loss 2.0000')])
def test_what_to_do_after_a_sweep(capsys, losses, told):
    found = {f'rate={value}': dict(loss=loss) for value, loss in losses.items()}
    leaderboard.show_sweep('mine', 'rate', found | {'rates=9': dict(loss=0.0)}, [Path('toy/mine.py')])
    assert ' '.join(capsys.readouterr().out.splitlines()[-1].split()) == told


# ---- Names ------------------------------------------------------------------------------------------


def test_an_entry_by_its_name(monkeypatch):
    """In config/arena, or in toy/ there; a config, or a folder of stages."""
    monkeypatch.chdir(ROOT)
    found = entries.find_entries([Path('moep'), Path('selfmoe_gates')], 'toy')
    assert found['moep'] == [Path('config/arena/toy/moep.py')]
    assert {stage.parent for stage in found['selfmoe_gates']} == {Path('config/arena/toy/selfmoe_gates')}
    found = entries.find_entries([Path('moep'), Path('selfmoe_gates')], 'baby')
    assert found['moep'] == [Path('config/arena/moep.py')]
    assert {stage.parent for stage in found['selfmoe_gates']} == {Path('config/arena/selfmoe_gates')}


# ---- Mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize('args, message', [
    ([], 'name entries'),
    (['mine.py', '--table'], 'or --table alone'),
    (['--table', '--sweep=learning_rate=1e-3'], 'or --table alone'),
    (['--sweep=learning_rate=1e-3'], 'name entries'),
    (['model.py'], 'model.py'),
    (['mine.py', '--sweep=learning_rate=1e-3,abc'], "'abc'"),
    (['none.py'], 'there is no config file toy/none.py'),
    (['none'], 'there is no config file config/arena/toy/none.py'),
    (['none', '--track=baby'], 'there is no config file config/arena/none.py'),
    (['part.py'], 'toy/part.py sets eval_tokens; the arena scores all of the validation text'),
    (['mine.py', '--sweep=eval_tokens=64'], 'eval_tokens cannot be swept'),
    (['empty'], 'a config for each stage'),
    (['toy'], 'toy is a folder of entries, not an entry: name those in it, toy/*.py'),
    (['other'], 'other is a folder of entries, not an entry: name those in it, other/*.py'),
    (['other', '--track=baby'], 'other is a folder of entries, not an entry: name those in it, other/*.py'),
    (['large.py'], 'toy/large.py has 0.03M parameters and takes 0.21M FLOPs per token; an entry has 0.017M'),
    (['math.py'], 'toy/math.py reads toy_math; the track toy reads toy_stories alone'),
    (['scored.py'], "the track toy reads toy_stories alone"),
    (['short.py'], 'toy/short.py reads windows of 16 tokens; the track toy has 32'),
    (['long.py'], 'toy/long.py reads 0.00M tokens; the track toy has 0.000384M'),
    (['twice.py'], 'toy/twice.py reads 0.00M tokens; the track toy has 0.000384M'),
    (['mine.py', 'other/toy/mine.py'], 'two entries are named mine'),
    (['only_baby.py'], 'none of these has a config of the track toy'),
    (['wrong.py'], "toy/wrong.py: unknown key 'n_embed'"),
    (['nameless.py'], "toy/nameless.py names no model: add a line such as model = 'arena.mine'"),
    (['stages'], 'toy/stages/2_composed.py: init_from names out/2_path, which is not an earlier stage'),
    (['mine.py', '--sweep=max_iters=1,2'], 'max_iters cannot be swept'),
    (['mine.py', '--sweep=out-dir=x'], 'out_dir cannot be swept'),
    (['mine.py', '--sweep=learning_rate'], 'a setting and its values'),
    (['mine.py', '--sweep=learnin_rate=1e-3'], "unknown key 'learnin_rate'"),
    (['mine.py', '--seeds=0'], '0 is not between'),
    (['mine.py', '--results=broken'], 'broken/toy/mine_1.json is not a result: delete it'),
    (['--table', '--results=half'], 'half/toy/mine_1.json is not a result: delete it'),
    (['--table', '--results=baby'], 'baby/baby/mine_1.json is not a result: delete it'),
    (['mine.py', '--out=broken'], 'broken/toy/mine_1/entry.json is broken: delete it'),
    (['mine.py', '--results=swept', '--sweep=learning_rate=1'], 'sweeps/mine.json is broken: delete it')])
def test_mistakes_are_told_before_any_work(track, run, tmp_path, args, message):
    (tmp_path / 'toy/empty').mkdir()
    (tmp_path / 'model.py').write_text('import torch\n\nclass Model:\n    pass\n')
    for name, old, new in (('large', 'n_embd = 8', 'n_embd = 16'), ('math', 'toy_stories', 'toy_math'),
                           ('part', 'n_layer = 1', 'n_layer = 1\neval_tokens = 64'),
                           ('nameless', "model = 'moep'", ''),
                           ('wrong', 'n_embd', 'n_embed'), ('short', '32', '16'),
                           ('long', 'max_iters = 6', 'max_iters = 7'), ('../only_baby', '', ''),
                           ('scored', 'n_layer = 1', "n_layer = 1\neval_data = 'toy_math'"),
                           ('twice', 'max_iters = 6', 'max_iters = 6\ngradient_accumulation_steps = 2'),
                           ('../other/toy/mine', '', '')):
        path = tmp_path / 'toy' / f'{name}.py'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TINY.replace(old, new))
    (tmp_path / 'toy/stages').mkdir()
    (tmp_path / 'toy/stages/1_path.py').write_text(PATH)
    (tmp_path / 'toy/stages/2_composed.py').write_text(COMPOSED)
    for name, text in {'broken/toy/mine_1.json': '{"loss": 1.0', 'half/toy/mine_1.json': '{"loss": 1.0}',
                       'baby/baby/mine_1.json': '',
                       'swept/toy/sweeps/mine.json': '{', 'broken/toy/mine_1/entry.json': '{',
                       'broken/toy/mine_1/ckpt.pt': ''}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert message in run('tools.arena', *args, cwd=tmp_path, code=2).stderr
    assert track == []


@pytest.mark.parametrize('args', [['--seeds=2'], ['--sweep=learning_rate=1e-3']])
def test_missing_text_is_told_once(track, go, monkeypatch, args):
    monkeypatch.setattr(arena.prepare, 'make_missing_toys', lambda *args: None)
    done = go('mine.py', '--data_dir=none', *args, code=2)
    assert 'there is no none/toy_stories: make it with python prepare.py toy_stories' in done.stderr
    assert track == [] and '====' not in done.stdout


def test_a_note_beside_the_results(track, go, tmp_path):
    go('mine.py', '--seeds=1')
    (tmp_path / 'r/toy/notes.json').write_text('[]')
    assert 'mine' in go('--table').stdout


def test_what_has_no_toy_config_is_left_out(track, go, tmp_path):
    (tmp_path / 'only_baby.py').write_text(TINY)
    text = go('only_baby.py', 'mine.py', '--seeds=1').stdout
    assert 'only_baby is left out: there is no toy/only_baby.py' in text
    assert track == scripts(('mine', 'mine_1'))


def test_attention_by_hand():
    """The width of all heads that a token's queries have, in all layers: of a Config, and of one that
    inherits it."""
    size = dict(n_layer=5, n_embd=16)
    for name, keys, width in (
            ('moep', dict(n_parallel=3, n_block=4, n_embd_parallel=6), 5 * 16 + 3 * 4 * 6),
            ('papaformer', dict(n_parallel=3, path_embd=[4, 8]), 5 * 16 + 3 * (4 + 8)),
            ('moduleformer', dict(top_k=2, d_att=8), 5 * 2 * 8),
            ('selfmoe', {}, 5 * 16), ('stlm', {}, 5 * 16), ('strong', {}, 5 * 16),
            ('stlm_depth', dict(capacity=0.25, route_every=2), 3 * 16 + 2 * 16 / 16)):   # 1/4 reads 1/4
        kind = type(import_model(name).Config.__name__, (SimpleNamespace,), {})
        for config in (kind, type('MineConfig', (kind,), {})):
            cost = flops.training_flops(config(**size, **keys), 100, 10)
            assert cost == 6 * 100 + 6 * width * 10, name


def test_a_model_whose_attention_is_not_known():
    """The line that is told is one of Python."""
    config = type('MineConfig', (SimpleNamespace,), {})(n_layer=2, n_embd=3)
    with pytest.raises(UserError, match='attention of MineConfig: add to ATTENTION a line ') as told:
        flops.training_flops(config, 1, 1)
    line = str(told.value).rpartition('such as ')[2]
    assert eval(f'{{{line}}}')['MineConfig'](config) == 6


# ---- The table ----------------------------------------------------------------------------------


@pytest.mark.parametrize('freedom, t', [
    (1, 63.6567), (2, 9.92484), (4, 4.60409), (10, 3.16927), (100, 2.62589)])
def test_student(freedom, t):
    """The two-sided 1% points that every table has; closed forms for one and two degrees of freedom."""
    assert leaderboard.student(t, freedom) == pytest.approx(0.01, rel=1e-4)
    assert leaderboard.student(0, freedom) == pytest.approx(1)
    assert leaderboard.student(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t))
    assert leaderboard.student(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-5)


def test_welch():
    """The first example of Wikipedia's page on the test, and the ends."""
    a = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4]
    b = [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4]
    assert leaderboard.welch(a, b) == leaderboard.welch(b, a) == pytest.approx(0.021, abs=5e-4)
    assert leaderboard.welch([1.0, 2.0], [2.0, 1.0]) == pytest.approx(1)
    assert leaderboard.welch([1.0, 1.0], [1.0, 1.0]) == 1 and leaderboard.welch([1.0, 1.0], [2.0, 2.0]) == 0


@pytest.mark.parametrize('track, within', [('toy', 0.1), ('baby', 0.05)])
def test_who_is_in_a_class(track, within):
    """Near enough to either number, from above or below, after about as many tokens as the track has."""
    rules = leaderboard.TRACKS[track]
    size = dict(parameters=rules['parameters'], flops_per_token=rules['flops_per_token'])
    for key, other in (('parameters', 'flops_per_token'), ('flops_per_token', 'parameters')):
        for off in (-within, within):
            near, far = (size | {key: rules[key] * (1 + times * off)} for times in (0.9, 1.1))
            assert leaderboard.classes(near, track) == ['parameters', 'flops_per_token']
            assert leaderboard.classes(far, track) == [other]
    for share, found in ((0.88, 0), (0.92, 2), (1.08, 2), (1.12, 0)):
        assert len(leaderboard.classes(size | dict(tokens=share * rules['tokens']), track)) == found


def test_every_column_has_its_own_score(tmp_path):
    kept = dict(parameters=28e6, active=20e6, flops_per_token=90e6, tokens=150e6, tokens_per_s=4e5,
                minutes=7.0, loss=3.2, bits_per_byte=1.25, harness=66.0, babylm2025=65.0)
    (tmp_path / 'baby').mkdir()
    (tmp_path / 'baby/mine_1.json').write_text(json.dumps(kept))
    head, row = leaderboard.table('baby', 'parameters', tmp_path)
    assert dict(zip(head, row, strict=True)) == {
        'entry': 'mine', 'seeds': '1', 'parameters, M': '28.00', 'active, M': '20.00',
        'MFLOPs per token': '90.00', 'tokens/s': '400,000', 'minutes': '7.0', 'val loss': '3.200',
        'bits per byte': '1.2500', 'pairs `harness`': '66.0', 'pairs `babylm2025`': '65.0',
        'against the dense entry': '-'}


def test_table(tmp_path, capsys):
    """Both classes; the dense entry is `strong` where it is, else `gpt2`; the best comes first."""
    base = dict.fromkeys(leaderboard.SCORES, 1.0)
    base |= dict(parameters=28e6, active=2e7, flops_per_token=9e7, tokens=1.5e8)
    rows = dict(
        gpt2=(dict(flops_per_token=1.8e8), [1.300, 1.301, 1.302]),
        strong=({}, [1.250, 1.251, 1.252]),
        good=({}, [1.240, 1.241, 1.242]),
        bad=(dict(flops_per_token=1.75e8, parameters=9e7, harness=None), [1.400, 1.405]),
        once=({}, [1.245]),
        outside=(dict(parameters=30e6), [1.0, 1.0]))
    (tmp_path / 'baby').mkdir()
    for name, (changes, bits) in rows.items():
        for seed, value in enumerate(bits, 1):
            kept = base | changes | dict(bits_per_byte=value)
            (tmp_path / f'baby/{name}_{seed}.json').write_text(json.dumps(kept))
    found = []
    for key in leaderboard.CLASSES:
        head, *rows = leaderboard.table('baby', key, tmp_path)
        found += [(key, row[0], row[1], row[-4], row[-1]) for row in rows]
    p = leaderboard.welch([1.240, 1.241, 1.242], [1.250, 1.251, 1.252])
    q = leaderboard.welch([1.300, 1.301, 1.302], [1.250, 1.251, 1.252])
    r = leaderboard.welch([1.400, 1.405], [1.300, 1.301, 1.302])
    assert p < 0.01 < r
    same, cost = leaderboard.CLASSES
    assert found == [
        (same, 'good', '3', '1.2410 ± 0.0010', f'better, p = {p:.3g}'),
        (same, 'once', '1', '1.2450', 'one seed: no test'),
        (same, 'strong', '3', '1.2510 ± 0.0010', 'the dense entry'),
        (same, 'gpt2', '3', '1.3010 ± 0.0010', f'worse, p = {q:.3g}'),
        (cost, 'gpt2', '3', '1.3010 ± 0.0010', 'the dense entry'),
        (cost, 'bad', '2', '1.4025 ± 0.0035', f'open, p = {r:.3g}')]
    assert len(head) == len(rows[0]) and rows[-1][-3] == '-'

    leaderboard.show('baby', tmp_path, ['once', 'bad', 'outside'])
    assert capsys.readouterr().out.splitlines()[-5:] == [
        '',
        'Equal parameters, 2 of 4: once, 1.2450 bits per byte, one seed: no test',
        'Equal parameters, 3 of 4: strong, 1.2510 ± 0.0010 bits per byte, the dense entry',
        'Equal FLOPs per token, 1 of 2: gpt2, 1.3010 ± 0.0010 bits per byte, the dense entry',
        f'Equal FLOPs per token, 2 of 2: bad, 1.4025 ± 0.0035 bits per byte, open, p = {r:.3g}']
    leaderboard.show('baby', tmp_path, ['good', 'strong'])
    text = capsys.readouterr().out
    assert text.endswith(f'Equal parameters: good against strong: better, p = {p:.3g}\n') and '`' not in text
    leaderboard.show('baby', tmp_path, ['good'])
    assert 'Equal FLOPs per token, ' not in capsys.readouterr().out      # it is not in that class
    assert leaderboard.verdict([1.0, 1.1], [1.0]) == 'one seed: no test'
    assert leaderboard.verdict([1.0, 1.1], []) == '-'


# ---- The entries that are here ------------------------------------------------------------------


@pytest.mark.parametrize('track', leaderboard.TRACKS)
def test_every_entry_keeps_the_rules(track, monkeypatch):
    """Its class, its data, and its budget: ten epochs of 10M words, or 0.5M tokens."""
    monkeypatch.chdir(ROOT)
    home = Path('config/arena', 'toy' if track == 'toy' else '')
    folders = [path for path in home.iterdir() if path.is_dir() and path.name not in ('toy', '__pycache__')]
    found = arena.find_entries([*home.glob('*.py'), *folders], track)
    assert {'gpt2', 'moep', 'papaformer_composed'} <= {*found}
    for name, stages in found.items():
        settings = [read_settings([str(stage)])[0] for stage in stages]
        if track == 'baby':
            for s in settings:
                window = s.seq_len or 512
                assert (s.stride * 4, s.epoch_words, s.batch_size * window) == (window, 10e6, 64 * 512), name
            assert sum(s.epochs for s in settings) == 10, name
        else:
            tokens = sum(s.max_iters * s.batch_size * 64 for s in settings)
            assert tokens == pytest.approx(0.5e6, rel=0.01), name


@pytest.mark.parametrize('track', leaderboard.TRACKS)
def test_what_the_stages_make_is_in_a_class(track):
    vocabulary = dict(vocab_size=leaderboard.TRACKS[track]['vocab_size'])
    home = ROOT / 'config/arena' / ('toy' if track == 'toy' else '')

    def model(path):
        _, module, keys = read_settings([str(home / path)])
        return sketch(module, vocabulary | keys)
    paths = [model(f'papaformer_composed/{n}_path_{n}.py') for n in (1, 2)]
    for made in (papaformer.compose(paths), selfmoe.add_gates(model('selfmoe_gates/1_base.py'))):
        count = dict(parameters=made.count_params()[0], flops_per_token=0)
        assert leaderboard.classes(count, track) == ['parameters']
