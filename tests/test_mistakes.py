"""A user's mistake, or a damaged file, ends in one line that says what to do, with exit code 2.
Nothing that comes from a file is executed. A bug keeps its traceback."""

import gzip
import importlib
import json
import os
import shutil

import pytest
import torch

import moep
import train
from plumbing.cli import UserError
from plumbing.settings import ROOT

QUICK = ['--batch_size=2', '--max_iters=2', '--sample_tokens=0', '--eval_tokens=64',
         '--data=toy_math']
MODEL = ['--block_size=32', '--n_layer=2', '--n_head=2', '--n_embd=16', '--n_parallel=1',
         '--n_head_parallel=1', '--n_embd_parallel=8', *QUICK]
NEW = ['train.py', *MODEL, '--out_dir=out/new']
RESUME = ['train.py', *MODEL, '--out_dir=out/run', '--resume', '--max_iters=3']
FROM = ['train.py', *QUICK, '--out_dir=out/new', '--init_from=out/run']
SAMPLE = ['sample.py', 'out/run', '--max_new_tokens=2']
BLIMP = ['eval_blimp.py', 'out/run', '--data=data/toy_blimp']
TEXT = ['prepare.py', 'text', '--name=mine']


@pytest.fixture(scope='module')
def stock(run, data_dir, tmp_path_factory):
    """A folder with configs, data sets, a run, and files that no script can use."""
    home = tmp_path_factory.mktemp('mistakes')
    (home / 'config').symlink_to(ROOT / 'config')
    (home / 'data').mkdir()
    for name in ('toy_math', 'toy_bytes', 'toy_stories', 'toy_blimp'):
        (home / 'data' / name).symlink_to(data_dir / name)
    run(*NEW[:-1], '--out_dir=out/run', cwd=home, here=True)
    (home / 'book.txt').write_text('A line.\n\nAnother.\n' * 20)
    (home / 'latin.txt').write_bytes('Caf\xe9\n'.encode('latin-1') * 20)
    (home / 'rows.jsonl').write_text('{"body": "A line."}\n' * 20)
    row = dict(sentence_good='The dogs run. ' * 9, sentence_bad='')
    (home / 'long.jsonl').write_text(json.dumps(row))
    (home / 'books.tar.gz').write_bytes(gzip.compress(b'A tar is text, and headers.\n' * 20))
    (home / 'cut.txt.gz').write_bytes(gzip.compress(b'A line.\n' * 20)[:-9])
    (home / 'broken.py').write_text('batch_size = (\n')
    (home / 'a_file').write_text('')
    return home


@pytest.fixture
def home(stock, tmp_path):
    """A copy, to be damaged."""
    shutil.copytree(stock, tmp_path / 'home', symlinks=True)
    return tmp_path / 'home'


def one_line(done, script):
    assert done.stderr.startswith(f'{script}: ') and done.stderr.count('\n') == 1, done.stderr
    assert len(done.stderr) < 400
    return done.stderr


@pytest.mark.parametrize('command, hint', [
    (['train.py'], 'name a config, such as config/moep.py'),
    ([*NEW, '--n_emdb=8'], "did you mean 'n_embd'?"),
    ([*NEW, '--batch_size=big'], "batch_size = 'big' is not of type int"),
    ([*NEW, '--batch_size', '8'], 'a setting is written --batch_size=8'),
    ([*NEW, '--lr=1e-3'], "did you mean 'learning_rate'?"),
    (['train.py', 'config/meop.py'], 'did you mean config/moep.py?'),
    (['train.py', 'config/mine.py'], 'begin with a copy'),
    ([*NEW, '--top_k=5'], 'between 1 and 4'),
    (['train.py', 'config/moep.py', 'config/gpt2.py'], 'is a second config'),
    (['train.py', 'broken.py'], 'broken.py:1: '),
    ([*NEW, '--batch_size=0'], 'batch_size = 0 must be more than 0'),
    ([*NEW, '--data={}'], 'there is no data set'),
    (['train.py', 'config/moduleformer.py', '--memory=16'], 'set stream=True'),
    (['train.py', 'config/stlm.py', '--dropout_schedule=late'], 'needs a dropout above 0'),
    ([*NEW, '--stream', '--stride=8'], 'a stream has no stride'),
    ([*NEW, '--resume', '--overwrite'], 'set one to False'),
    ([*NEW, '--shard', '--compile'], 'does not go with compile'),
    ([*NEW, '--shard', '--optimizer=muon'], 'without shard'),
    ([*NEW, '--model=mope'], 'did you mean moep?'),
    ([*NEW, '--model=prepare'], 'Config, Model ='),
    ([*NEW, '--n_head=3'], 'n_embd must be a multiple of n_head'),
    ([*NEW, '--data=my_book'], 'python prepare.py text --name my_book'),
    ([*NEW, '--data=babylm'], 'python prepare.py babylm'),
    ([*NEW, '--data=toy_bytes'], 'slots per chunk'),
    ([*NEW, '--data=toy_math,toy_bytes'], 'different tokenizers: prepare toy_bytes again'),
    ([*NEW, '--vocab_size=100'], 'vocab_size is 100'),
    ([*NEW, '--seq_len=100000000'], 'add text, or lower seq_len'),
    (['train.py', 'config/moduleformer.py', '--memory=8', '--stream', '--shard'], 'with shard'),
    ([*NEW, '--seq_len=64'], 'reads no more than its block_size'),
    ([*NEW, '--aux_weights=dict(balance=1.0)'], 'block_balance'),
    ([*NEW, '--device=gpu'], 'name cuda, mps or cpu'),
    (['train.py', str(ROOT / 'moep.py')], '--model=moep'),
    ([*NEW, '--data=data/toy_math'], '--data=toy_math'),
    ([*NEW, '--config=config/moep.py'], 'train.py config/moep.py'),
    ([*NEW, '--init_from=out/run,out/run'], 'tools.surgery compose'),
    ([*NEW, '--max_iters=-5'], 'max_iters = -5 must be at least 0'),
    ([*NEW, '--out_dir=out/run'], '--resume to continue it, --overwrite'),
    ([*NEW, '--out_dir=data/toy_math'], 'data/toy_math is a data set'),
    ([*NEW, f'--vocab_size={10 ** 13}'], 'halve batch_size'),
    ([*RESUME, '--batch_size=4'], 'resume with the same'),
    ([*RESUME, '--n_embd=32'], 'has n_embd = 16, not 32'),
    ([*FROM, '--init_from=out/rnu'], 'there is no checkpoint out/rnu/ckpt.pt; there are out/run'),
    ([*FROM, '--model=stlm'], 'holds a model of moep, not stlm'),
    ([*FROM, '--n_embd=32'], 'does not fit moep.py'),
    (['sample.py'], 'required: run'),
    (['sample.py', 'out/run', 'Once', 'upon'], 'a text goes into --prompt'),
    (['sample.py', 'out/run', '--show=3'], 'goes with --score'),
    (['sample.py', 'out/run', '--score', 'book.txt', '--prompt=Once'], 'does not go with --prompt'),
    (['eval_blimp.py', 'out/rnu'], 'there are out/run'),
    ([*BLIMP, '--data=data/nothing'], 'data/nothing'),
    ([*BLIMP, '--data=long.jsonl'], 'train with a larger block_size'),
    ([*TEXT], '--input'),
    ([*TEXT, '--input', 'latin.txt'], 'latin.txt: line 1 is not UTF-8'),
    ([*TEXT, '--input', 'rows.jsonl'], 'see --field'),
    ([*TEXT, '--input', 'a_file'], 'there is no text to train on'),
    ([*TEXT, '--input', 'cut.txt.gz'], 'cut.txt.gz cannot be read: EOFError'),
    ([*TEXT, '--input', 'books.tar.gz'], 'books.tar.gz is an archive: unpack it'),
    ([*TEXT, '--input', 'book.txt', '--tokenizer=nothing'], 'nothing'),
    (['prepare.py', 'text', '--name=toy_math', '--input', 'book.txt'], '--overwrite'),
    (['prepare.py', 'mix', '--name=mine', '--input', 'data/toy_math:0.6:0.2'], 'FROM < TO'),
    (['prepare.py', 'python', '--input', 'book.txt'], 'python takes no --input'),
], ids=lambda value: ' '.join(value[:1] + value[-1:]) if isinstance(value, list) else '')
def test_a_mistake_is_one_line(run, stock, command, hint):
    assert hint in one_line(run(*command, cwd=stock, code=2), command[0])
    assert not (stock / 'data/mine').exists() and not (stock / 'out/new/ckpt.pt').exists()


# ---- Damaged files -------------------------------------------------------------------------------

@pytest.mark.parametrize('path, content, command', [
    ('out/run/ckpt.pt', b'not a checkpoint', SAMPLE),
    ('out/run/ckpt.pt', dict(model={}), SAMPLE),         # one of something else
    ('out/run/meta.json', b'{', SAMPLE),
    ('out/run/meta.json', b'{}', SAMPLE),
    ('out/run/tokenizer.tiktoken', b'\xff', SAMPLE),
    ('data/mine/meta.json', b'[]', [*NEW, '--data=mine']),
    ('data/mine/tokenizer.tiktoken', b'IQ== 0\n', [*NEW, '--data=mine']),
    ('data/mine/train.bin', b'', [*NEW, '--data=mine']),
    ('data/mine/val.bin', b'123', [*NEW, '--data=mine']),
    ('data/mine/val.bin', None, [*NEW, '--data=mine']),
    ('data/mine/tokenizer.tiktoken', None, [*NEW, '--data=mine'])])
def test_a_damaged_file_is_named(run, home, data_dir, path, content, command):
    shutil.copytree(data_dir / 'toy_math', home / 'data/mine')
    if content is None:
        (home / path).unlink()
    elif isinstance(content, dict):
        torch.save(content, home / path)
    else:
        (home / path).write_bytes(content)
    line = one_line(run(*command, cwd=home, code=2), command[0])
    assert path in line and ('make its folder again' in line) == (content is None)


def test_a_log_that_was_deleted(run, home):
    """The run goes on with a new one."""
    (home / 'out/run/log.jsonl').unlink()
    run(*RESUME, '--log_interval=1', cwd=home, here=True)
    rows = [json.loads(line) for line in open(home / 'out/run/log.jsonl')]
    assert [row['iter'] for row in rows if 'loss' in row] == [3]


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_a_full_disk(run, home):
    """The checkpoint of before is intact."""
    before = (home / 'out/run/ckpt.pt').read_bytes()
    (home / 'out/run/ckpt.pt.tmp').symlink_to('/dev/full')
    line = one_line(run(*RESUME, cwd=home, code=2), 'train.py')
    assert 'is the disk full?' in line and (home / 'out/run/ckpt.pt').read_bytes() == before


def test_an_old_torch(run, stock, monkeypatch):
    monkeypatch.setattr(torch, '__version__', torch.torch_version.TorchVersion('2.4.0'))
    assert 'torch>=2.10 is needed' in one_line(run(*NEW, cwd=stock, code=2), 'train.py')


def test_a_missing_package(run, stock, monkeypatch):
    monkeypatch.setattr(train, 'Data', lambda *_: importlib.import_module('a_package'))
    assert 'pip install a_package' in one_line(run(*NEW, cwd=stock, code=2), 'train.py')


# ---- How scripts end -----------------------------------------------------------------------------

@pytest.mark.parametrize('error, code, line', [
    (UserError('say\nwhat to do'), 2, 'train.py: say what to do\n'),
    (FileNotFoundError(2, 'No such file', 'data/x'), 2, 'train.py: data/x: No such file\n'),
    (OSError('disk full'), 2, 'train.py: disk full\n'),
    (RuntimeError('CUDA out of memory. Tried'), 2, 'train.py: out of memory: halve batch_size'),
    (MemoryError(), 2, 'train.py: out of memory: halve batch_size'),
    (KeyboardInterrupt(), 130, '')])
def test_how_scripts_end(run, monkeypatch, error, code, line):
    def main():
        raise error
    monkeypatch.setattr(train, 'main', main)
    message = run('train.py', here=True, code=code).stderr
    assert message.startswith(line) and message.count('\n') == (code == 2)


# ---- Nothing from a file is executed -------------------------------------------------------------

class Evil:
    def __reduce__(self):
        return os.system, ('touch EVIL',)


@pytest.mark.parametrize('command', [SAMPLE, RESUME, FROM, BLIMP], ids=lambda command: command[0])
def test_a_pickle_does_nothing(run, home, command):
    torch.save(dict(model=Evil()), home / 'out/run/ckpt.pt')
    assert 'ckpt.pt cannot be read' in one_line(run(*command, cwd=home, code=2), command[0])
    assert not (home / 'EVIL').exists()


@pytest.mark.parametrize('part', [
    dict(model='evil'), dict(model='../evil'), dict(model='os'),
    dict(adapted=[('os.system', {'command': 'touch EVIL'})])], ids=str)
def test_a_name_in_a_checkpoint_is_one_of_ours(run, home, monkeypatch, part):
    (home / 'evil.py').write_text('open("EVIL", "w")\nConfig, Model = 1, 2\n')
    monkeypatch.syspath_prepend(home)
    ckpt = torch.load(home / 'out/run/ckpt.pt', weights_only=True)
    torch.save(ckpt | part, home / 'out/run/ckpt.pt')
    line = one_line(run(*SAMPLE, cwd=home, code=2), 'sample.py')
    assert ' is no ' in line and not (home / 'EVIL').exists()


def test_a_bug_keeps_its_traceback(run, stock, monkeypatch):
    def forward(*args, **kwargs):
        raise RuntimeError('a bug')
    monkeypatch.setattr(moep.MoEP, 'forward', forward)
    with pytest.raises(RuntimeError, match='a bug'):
        run(*NEW, cwd=stock, here=True)
