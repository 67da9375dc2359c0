"""Bad input for every command: some cases of fuzz.py, and whether it would see a fault."""

import stat

import pytest
import torch

from fuzz import Case, judge, judge_files, judge_run

FILE, OTHER = (stat.S_IFREG, 3, 1), (stat.S_IFREG, 3, 2)         # a file, and the same written again
FOLDER = (stat.S_IFDIR,)
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nKeyError: 1\n'


@pytest.mark.slow
def test_cases(fuzzed):
    """Each succeeds, or ends in one line: else the exit code is 1, and what went wrong is printed."""
    assert '96 cases' in fuzzed.result().stdout


@pytest.mark.parametrize('fault, code, err, stopped', [
    ('KeyError', 1, TRACEBACK, None),
    ('2 lines', 2, 'a warning\ntrain.py: wrong\n', None),
    ('0 lines', 2, '', None),
    ('301 characters', 2, 'x' * 301, None),
    ('exit code 3', 3, '', None),
    ('exit code 143', 143, '', None),
    ('on stderr', 0, 'a warning\n', None),
    ('SIGSEGV', -11, '', None),
    ('30 s', -9, '', 'time'),
    ('2048 MiB', -9, '', 'memory'),
    (None, 0, '', None),
    (None, 2, 'train.py: wrong; do this\n', None),
    (None, 143, '', 'request')])
def test_how_it_ends(fault, code, err, stopped):
    found = judge(Case('sample.py', []), code, err, stopped)
    assert fault in found if fault else found is None


def test_the_wrong_end():
    assert 'should not' in judge(Case('sample.py', [], must_fail=True), 0, '', None)
    assert 'nothing is wrong' in judge(Case('sample.py', [], must_succeed=True), 2, 'x\n', None)


@pytest.mark.parametrize('fault, command, code, before, after', [
    ('r.json.tmp is left', 'sample.py', 0, {}, {'r.json.tmp': FILE}),
    ('left behind', 'prepare.py', 2, {}, {'data/.mine.0123456789ab': FOLDER}),
    ('train.bin is made', 'prepare.py', 2, {}, {'data/mine/train.bin': FILE}),
    ('x.bin is made', 'prepare.py', 0, {}, {'data/mine/x.bin': FILE}),
    ('ckpt.pt is changed', 'sample.py', 0, {'out/ckpt.pt': FILE}, {'out/ckpt.pt': OTHER}),
    ('train.bin is changed', 'train.py', 0, {'train.bin': FILE}, {'train.bin': OTHER}),
    ('ckpt.pt is gone', 'train.py', 0, {'out/ckpt.pt': FILE}, {}),
    (None, 'train.py', 2, {'out/log.jsonl': FILE}, {'out/log.jsonl': OTHER, 'out/ckpt_1M.pt': FILE}),
    (None, 'prepare.py', 0, {}, {'data/mine': FOLDER, 'data/mine/train.bin': FILE})])
def test_what_it_leaves(fault, command, code, before, after):
    found = judge_files(Case(command, []), code, before, after)
    assert fault in found if fault else found is None


def test_what_a_run_has_written(tmp_path):
    torch.save({'weights': {'w': torch.tensor([1.0, float('nan')])}}, tmp_path / 'ckpt.pt')
    assert 'not finite' in judge_run(tmp_path, {}, {'ckpt.pt': FILE})
    (tmp_path / 'log.jsonl').write_text('{"iter": 0}\n{"iter"')
    assert 'no JSON' in judge_run(tmp_path, {}, {'log.jsonl': FILE})
    assert judge_run(tmp_path, {'ckpt.pt': FILE}, {'ckpt.pt': FILE}) is None
