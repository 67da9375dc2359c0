"""tools/surgery.py: by command line a surgery does what its function does (tests of the models say
what that is), and the result is a run like any other."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

import moduleformer
import papaformer
from plumbing.bins import load_bin
from plumbing.checkpoint import find_surgeries, load_checkpoint, read_checkpoint
from plumbing.settings import import_model
from tools.surgery import options_of

PATH = dict(model='papaformer', n_parallel=0, n_layer=2, n_head=1, n_embd=8)
RUNS = dict(
    path_1=PATH, path_2=PATH | dict(seed=7),
    dense=dict(model='selfmoe', n_layer=2, n_head=2, n_kv_head=1, n_embd=16, ffn_hidden=8),
    pools=dict(model='moduleformer', n_layer=2, n_head=1, n_embd=16, n_att=4, d_att=8, n_ffd=5,
               d_ffd=8, d_router=8, top_k=1))


@pytest.fixture(scope='module', autouse=True)
def train(run, data_dir, tmp_path_factory):
    """train(name, key=value) -> the checkpoint of out/NAME, in a folder that has RUNS."""
    def train(name, **settings):
        settings |= dict(out_dir=f'out/{name}', batch_size=2, eval_tokens=64, sample_tokens=0)
        args = [f'--{key}={value}' for key, value in settings.items()]
        run('train.py', *args, cwd='.', here=True)
        return read_checkpoint(name)
    with contextlib.chdir(tmp_path_factory.mktemp('surgery')):
        Path('data').symlink_to(data_dir)
        for name, model in RUNS.items():
            train(name, **model, max_iters=2, block_size=16)
        yield train


@pytest.fixture
def operate(run):
    """A command line -> what it prints, errors last"""
    def operate(line, code=0):
        done = run('tools.surgery', *line.split(), cwd='.', here=True, code=code)
        return done.stdout + done.stderr
    return operate


def has_weights(run, model):
    ours, theirs = read_checkpoint(run)['weights'], model.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_paths_composed(operate):
    """With keys of the new config; another seed gives other new weights."""
    operate('compose out/path_1 out/path_2 --connection=gumbel1 --temperature 0.5 --out out/both')
    operate('compose out/path_1 out/path_2 --connection gumbel1 --seed 1 --out out/other')
    paths = [load_checkpoint(name)[0] for name in ('path_1', 'path_2')]
    torch.manual_seed(42)
    model = papaformer.compose(paths, connection='gumbel1', temperature=0.5)
    assert has_weights('both', model) and not has_weights('other', model)


def test_pruned_by_what_the_text_uses(operate):
    """The first windows of the data sets named; the log has the table."""
    said = operate('prune_experts out/pools --threshold 0.9 --batches 2 --seq_len 8 '
                   '--data data/toy_math data/toy_lingo --out out/pruned')
    batches = []
    for name in ('toy_math', 'toy_lingo'):
        text = torch.from_numpy(load_bin(f'data/{name}', 'train')[:257].astype(int))
        batches += zip(text[:-1].view(2, 16, 8), text[1:].view(2, 16, 8))
    pruned, table = moduleformer.prune_experts(load_checkpoint('pools')[0], threshold=0.9,
                                               batches=batches)
    assert has_weights('pruned', pruned)
    assert all(f"layer {row['layer']}, before {row['before']}, after {row['after']}\n" in said
               for row in table)
    log = json.loads(Path('out/pruned/log.jsonl').read_text())
    assert log['report'] == [*table] and log['options'] == dict(threshold=0.9)


def test_adapters_train_and_are_merged(train, operate):
    """All else stays frozen, also in a run that goes on. No run is written over."""
    operate('add_lora out/dense --rank 2 --only "qkv|head" --out out/adapted')
    start = dict(init_from='out/adapted', data='toy_math', learning_rate=0.1)
    train('lora', **start, max_iters=2)
    trained = train('lora', **start, max_iters=3, resume=True)
    before = read_checkpoint('dense')['weights']
    assert {*trained['frozen']} == {*before}
    assert all(torch.equal(trained['weights'][name], before[name]) for name in before)
    assert 'has adapters: merge them first' in operate('add_gates out/lora --out out/new', 2)
    assert 'out/dense holds a run already' in operate('merge_lora out/lora --out out/dense', 2)
    operate('merge_lora out/lora --out out/merged')
    (merged, ckpt), (adapted, _) = load_checkpoint('merged'), load_checkpoint('lora')
    assert ckpt['weights'].keys() == before.keys() and not ckpt['adapted'] and not ckpt['frozen']
    ids = torch.arange(16)[None]
    torch.testing.assert_close(merged(ids)[0], adapted(ids)[0])
    assert (merged(ids)[0] - load_checkpoint('dense')[0](ids)[0]).abs().max() > 1e-3


def test_only_what_is_new_trains(train, operate):
    operate('add_gates out/dense --freeze --out out/gates')
    after, before = train('gated', init_from='out/gates', max_iters=2), read_checkpoint('dense')
    assert {*after['frozen']} == {*before['weights']} < {*after['weights']}
    assert all(torch.equal(after['weights'][name], w) for name, w in before['weights'].items())
    assert after['weights']['gates.1.weight'].abs().max() > 0


@pytest.mark.parametrize('line, message', [
    ('add_gates out/path_1', 'papaformer has no surgery add_gates; there are compose, '),
    ('prune_experts out/pools --treshold 0.1', 'no argument --treshold; it has threshold'),
    ('merge_lora out/dense --rank 2', 'no argument --rank; it has none'),
    ('add_lora out/dense --rank', '--rank needs a value'),
    ('add_lora out/dense --rank few', "--rank = 'few' is not of type int or float"),
    ('merge_lora out/dense', 'merge_lora: the model has no adapters to merge'),
    ('compose out/path_1 out/dense', 'the runs have different models or tokenizers'),
    ('add_gates out/dense out/dense', 'add_gates takes one run'),
    ('add_gates out/dense --kind none --freeze', 'added nothing that could train'),
    ('prune_experts out/pools --data data/toy_bytes', 'pools and toy_bytes have different tok'),
    ('add_gates out/nothing', 'there is no checkpoint out/nothing/ckpt.pt')])
def test_mistakes_are_one_line(operate, line, message):
    said = operate(f'{line} --out out/new', 2)
    assert message in said and said.count('\n') == 1


def test_help_lists_all(operate):
    rows = [line.split() for line in operate('--help').splitlines()]
    for name in ('papaformer', 'moduleformer', 'selfmoe', 'moep'):
        for surgery, function in find_surgeries(import_model(name).Model).items():
            row, = [words for words in rows if words[1:2] == [surgery]]
            assert {f'--{key}' for key in options_of(function)} <= {*row}
