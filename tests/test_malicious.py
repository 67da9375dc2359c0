"""Checkpoints, configs, meta files and archives that try to run something or to write elsewhere: nothing
runs, nothing is written but where it should be, and the answer is one line."""

import json
import os
import pickle
import re
import shutil
import stat
import zipfile
from pathlib import Path

import pytest
import torch

from plumbing.cli import UserError
from plumbing.download import unpack
from plumbing.tokenizer import load_tokenizer

TINY = ['--batch_size=2', '--max_iters=1', '--sample_tokens=2', '--eval_tokens=64']
MODEL = ['--block_size=32', '--n_layer=2', '--n_head=1', '--n_embd=8', '--n_parallel=0', *TINY]
TOUCH = 'touch EVIL'
CALL = '__import__("os").system("touch EVIL")'


@pytest.fixture(scope='module')
def stock(run, data_dir, tmp_path_factory):
    """A folder with a data set and a run, and what must not be touched beside it."""
    top = tmp_path_factory.mktemp('malicious')
    shutil.copytree(data_dir / 'toy_math', top / 'home/data/toy_math')
    run('train.py', *MODEL, '--data=toy_math', '--out_dir=out/run', cwd=top / 'home', here=True)
    (top / 'secret').write_text('secret')
    shutil.copy(top / 'home/data/toy_math/tokenizer.tiktoken', top / 'tokenizer')
    (top / 'x.py').write_text(f'{CALL}\nConfig, Model = 1, 2\n')
    shutil.copy(top / 'x.py', top / 'home/evil.py')
    return top


@pytest.fixture
def home(stock, tmp_path):
    """A copy of it to spoil. At the end nothing has run, and what is new lies where it should."""
    shutil.copytree(stock, tmp_path, dirs_exist_ok=True)
    (tmp_path / 'home/bad').mkdir()
    before = set(tmp_path.rglob('*'))
    yield tmp_path / 'home'
    after = set(tmp_path.rglob('*'))
    assert not before - after
    new = [path.relative_to(tmp_path).as_posix() for path in after - before]
    assert not [path for path in new if not path.startswith(('home/out/', 'home/data/', 'home/bad/'))]
    assert not [path for path in new if re.search(r'EVIL|\.tmp$|/\.', path)]
    assert (tmp_path / 'secret').read_text() == 'secret'


def one_line(done):
    assert len(done.stderr.splitlines()) == 1 and len(done.stderr) <= 301, done.stderr
    return done.stderr


# ---- Checkpoints --------------------------------------------------------------------------------


class Evil:
    def __init__(self, function, *args):
        self.how = function, args

    def __reduce__(self):
        return self.how


def spoil(home, **parts):
    ckpt = torch.load(home / 'out/run/ckpt.pt', weights_only=True)
    for key, value in parts.items():
        if isinstance(value, dict):
            value = {**ckpt[key], **value}
        ckpt[key] = value
    torch.save(ckpt, home / 'out/run/ckpt.pt')


READERS = {                                              # every way in which a checkpoint is read
    'sample': ['sample.py', 'out/run', '--max_new_tokens=2'],
    'init_from': ['train.py', '--init_from=out/run', '--data=toy_math', '--out_dir=out/new', *TINY],
    'resume': ['train.py', *MODEL, '--data=toy_math', '--out_dir=out/run', '--resume', '--max_iters=2'],
    'exact_answer': ['tools.exact_answer', 'out/run', '--num=1', '--max_new_tokens=1']}


@pytest.mark.parametrize('reader', READERS)
@pytest.mark.parametrize('parts', [
    dict(adapted=[('timeit.timeit', {'setup': CALL, 'number': 1})]),
    dict(adapted=[('os.system', {'command': TOUCH})]),
    dict(adapted=[('subprocess.getoutput', {'cmd': TOUCH})]),
    dict(adapted=[('lora.merge_lora', {})]),
    dict(adapted=[('lora.add_lora', {'rank': 1, 'evil': CALL})]),
    dict(adapted=[('evil.add_lora', {'rank': 1})]),
    dict(model='os'),
    dict(model='../x'),
    dict(model='evil'),
    dict(model='tests.conftest'),
    dict(model='prepare'),
    dict(config={'vocab_size': CALL}),
    dict(weights={'wte.weight': CALL}),
    dict(optimizer=Evil(os.system, TOUCH)),
    dict(ranks=[Evil(eval, CALL)]),
    dict(settings=Evil(exec, CALL))], ids=lambda parts: str(parts)[:40])
def test_a_checkpoint_runs_nothing(run, home, parts, reader):
    spoil(home, **parts)
    one_line(run(*READERS[reader], cwd=home, code=2))


@pytest.mark.parametrize('settings', [
    dict(surgery='os.system', surgery_args={'command': TOUCH}),
    dict(surgery='evil.make', init_from='../secret'),
    dict(out_dir='../elsewhere'),
    dict(data='../../secret', data_dir='..'),
    dict(data={'../../secret': (0.0, 1.0)}),
    dict(model='evil', device='evil')], ids=lambda settings: str(settings)[:40])
def test_the_settings_in_a_checkpoint_are_not_followed(run, home, settings):
    """Refused, or of no consequence: the command's own settings count."""
    spoil(home, settings=settings)
    for name, reader in READERS.items():
        try:
            run(*reader, cwd=home, here=True)
        except AssertionError as error:
            assert 'exit 2' in str(error), name


@pytest.mark.slow
@pytest.mark.parametrize('make, here', [
    (lambda path: path.write_bytes(pickle.dumps({'model': Evil(os.system, TOUCH)}, 2)), True),
    (lambda path: torch.save({'model': Evil(os.system, TOUCH)}, path, _use_new_zipfile_serialization=False),
     True),
    (lambda path: torch.save(Evil(exec, CALL), path), False)], ids=['pickle', 'older format', 'zip'])
def test_a_pickle(run, home, make, here):
    """One of them in a process of its own."""
    make(home / 'out/run/ckpt.pt')
    one_line(run('sample.py', 'out/run', cwd=home, code=2, here=here))


# ---- Configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize('line', [
    f'seed = {CALL}', 'seed = (lambda: 1)()', 'seed = ().__class__.__bases__', "data = f'{__import__}'",
    f'seed = [{CALL} for _ in (1,)]', f'seed = (x := {CALL})', 'aux_weights = dict(**{"a": 1})',
    'data = "{0.__class__}".format(1)', 'data = "%999999999999d" % 1', f'def f(x={CALL}): pass',
    'import evil', f'@{CALL}\nclass A: pass', f'seed: {CALL} = 1', f'globals()["x"] = {CALL}',
    f'if {CALL}: pass', "model = 'evil'", "model = '../x'", "model = 'os'", "device = 'evil'",
    "checkpoint_words = ['../../x']"])
def test_a_config_is_not_executed(run, home, line):
    (home / 'bad/config.py').write_text(line + '\n')
    where = ['--data=toy_math', '--out_dir=out/new']
    one_line(run('train.py', 'bad/config.py', *TINY, *where, cwd=home, code=2))


@pytest.mark.parametrize('surgery, args', [
    ('timeit.timeit', dict(stmt=CALL, number=1)), ('os.system', dict(command=TOUCH)),
    ('builtins.exec', {}), ('subprocess.run', dict(args=['touch', 'EVIL'])), ('evil.make', {}),
    ('shutil.rmtree', dict(path='../secret')), ('prepare.make_toy', dict(root='../elsewhere')),
    ('plumbing.cli.write_json', dict(path='EVIL', value=1)), ('torch.save', dict(f='EVIL')),
    ('../x.make', {}), ('Path', {}), ('torch.hub.load', {})])
def test_a_surgery_is_one_of_ours(run, home, surgery, args):
    where = ['--init_from=out/run', '--data=toy_math', '--out_dir=out/new']
    done = run('train.py', *TINY, *where, f'--surgery={surgery}', f'--surgery_args={args}', cwd=home, code=2)
    assert 'no surgery' in one_line(done)


# ---- meta.json, archives, links -----------------------------------------------------------------


@pytest.mark.parametrize('file', ['../../../tokenizer', '../../../secret', '/etc/passwd', '..', 'meta.json',
                                  'train.bin', '../../evil.py', 'a/../tokenizer.tiktoken', '\0'])
@pytest.mark.parametrize('folder', ['data/toy_math', 'out/run'])
def test_a_meta_file_names_no_other_file(run, home, folder, file):
    path = home / folder / 'meta.json'
    meta = json.loads(path.read_text())
    meta['tokenizer']['file'] = file
    path.write_text(json.dumps(meta))
    with pytest.raises(UserError):
        load_tokenizer(home / folder)
    reader = ['train.py', *MODEL, '--data=toy_math', '--out_dir=out/deep/new']   # a copy would lie in home
    if folder == 'out/run':
        reader = READERS['sample']
    one_line(run(*reader, cwd=home, code=2))


def test_an_archive_writes_into_its_folder(home):
    """Whatever its members are called; a link in it is a file of text, if anything."""
    bad = home / 'bad'
    link = zipfile.ZipInfo('link.txt')
    link.create_system = 3                               # Unix: with a mode
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    names = ['../up.txt', '../../up.txt', f'{home.parent}/absolute.txt', '..\\..\\back.txt', 'C:\\drive.txt',
             'a/../../../deep.txt', '.hidden.txt', '....txt', '/.txt', '../link.txt/through.txt']
    with zipfile.ZipFile(bad / 'pack.zip', 'w') as pack:
        pack.writestr(link, str(home.parent / 'secret'))
        for name in names:
            pack.writestr(name, 'x')
    unpack(bad / 'pack.zip')
    found = [path for path in bad.rglob('*') if path.name not in ('pack', 'pack.zip')]
    assert all(path.parent == bad / 'pack' and not path.is_symlink() for path in found) and found


@pytest.mark.parametrize('name', ['../mine', '/mine', '..', '.', 'a/b', '-x', 'x\0'])
def test_a_data_set_has_a_plain_name(run, home, name):
    (home / 'bad/book.txt').write_text('A line.\n\nAnother.\n')
    one_line(run('prepare.py', 'text', f'--name={name}', '--input', 'bad/book.txt', cwd=home, code=2))


def test_a_link_is_not_followed_where_data_is_replaced(run, home):
    """data/mine is a link to a folder elsewhere, whose files stay."""
    elsewhere = home.parent / 'elsewhere'
    shutil.copytree(home / 'data/toy_math', elsewhere)
    (home / 'data/mine').symlink_to(elsewhere)
    (home / 'bad/book.txt').write_text('A line.\n\nAnother.\n' * 9)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    args = ['--tokenizer=bytes', '--overwrite', '--input', 'bad/book.txt']
    try:
        run('prepare.py', 'text', '--name=mine', *args, cwd=home, here=True)
    except AssertionError as error:
        assert 'exit 2' in str(error)
    after = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    shutil.rmtree(elsewhere)
    assert after == before


def test_pairs_may_be_links_but_not_anything(run, home):
    (home / 'bad/pairs.jsonl').symlink_to(home.parent / 'secret')
    said = one_line(run('prepare.py', 'blimp', '--name=pairs', '--input', 'bad', cwd=home, code=2))
    assert re.search('pairs.jsonl:1', said) and not Path(home, 'data/pairs').exists()
