"""sample.py on a small trained run, as a user calls it."""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch

import sample
from plumbing.tokenizer import load_tokenizer
from test_train import TINY


@pytest.fixture(scope='module')
def trained(run, data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp('out') / 'run'
    run('train.py', *TINY, '--top_k=2', f'--data_dir={data_dir}', f'--out_dir={out}', '--max_iters=30',
        here=True)
    return out


@pytest.fixture
def call(run, trained):
    """sample.py in this process -> what it prints."""
    def call(*args, folder=trained):
        return run('sample.py', folder, *args, '--device', 'cpu', here=True).stdout
    return call


@pytest.mark.slow
def test_as_a_user(run, trained):
    args = ['--prompt', 'Once upon a time', '--max_new_tokens', 10, '--routes', '--device', 'cpu']
    text = run('sample.py', trained, *args).stdout
    assert text.startswith('Once upon a time') and 'choice:percent' in text
    assert text == run('sample.py', trained, *args, here=True).stdout


@pytest.mark.slow
def test_text(call):
    args = ['--prompt', 'Once upon a time', '--max_new_tokens', 40]
    first = call(*args, '--num', 2)
    assert first.startswith('Once upon a time') and first.count('-' * 40) == 1
    assert call(*args, '--num', 2) == first              # the seed decides
    assert call(*args, '--num', 2, '--seed', 1) != first
    greedy = call(*args, '--temperature', 0)
    assert greedy == call(*args, '--top_k', 1, '--seed', 5)
    assert call('--max_new_tokens', 5).strip()


def test_next(call):
    lines = call('--prompt', 'Once upon a', '--next', 5).splitlines()
    probabilities = [float(line.split()[0]) for line in lines]
    assert len(lines) == 5 and probabilities == sorted(probabilities, reverse=True)
    assert 0 < sum(probabilities) <= 1


def test_routes(call):
    text = call('--prompt', 'The dogs', '--routes', '--max_new_tokens', 6)
    legend, *table = text.split('\n\n')[-1].splitlines()
    assert table[0].split() == ['token', 'shrink', 'parallel.0', 'grow']
    assert 'choice:percent' in legend and table[1].startswith('<eot>')
    for line in table[1:]:                       # two choices in each of three layers, which share 100%
        ways = re.findall(r'(\d):(\d+)', line)
        assert len(ways) == 6
        for (_, a), (_, b) in zip(ways[::2], ways[1::2]):
            assert int(a) >= int(b) and abs(int(a) + int(b) - 100) <= 1


def test_routes_of_the_prompt_alone(call, run, trained):
    text = call('--prompt', 'The dogs', '--routes', '--max_new_tokens', 0)
    assert text.startswith('The dogs\n\nwhat each token took') and text.splitlines()[-1].startswith(' dogs')
    assert 'not allowed with' in run('sample.py', trained, '--next', 3, '--routes', code=2).stderr


def test_the_heaviest_choice_comes_first(data_dir, capsys):
    model = SimpleNamespace(routes=lambda idx: dict(layer=torch.tensor([[[0.2, 0.0, 0.7, 0.1]]])))
    sample.show_routes(model, load_tokenizer(data_dir / 'toy_stories'), torch.tensor([[5]]), 'each token')
    assert capsys.readouterr().out.splitlines()[2].endswith('2:70 0:20 3:10')


def test_routes_of_a_long_text_begin_with_the_prompt(call):
    text = call('--prompt', 'The dogs', '--routes', '--max_new_tokens', 60)
    table = text[text.index('what the first 32 of 6'):].splitlines()
    assert 'tokens (the model sees no more at once) took, as choice:percent' in table[0]
    assert [line.split()[0] for line in table[2:4]] == ['<eot>', 'The'] and len(table) == 34


def test_routes_of_a_model_without_positions_are_not_cut(call, smoke):
    folder = smoke('config/moduleformer.py')
    text = call('--routes', '--max_new_tokens', 130, folder=folder)      # it was trained on windows of 128
    table = text[text.rindex('token'):].splitlines()
    assert 'what each token took' in text and len(table) == 1 + 1 + 130


def test_weights_that_overflow(run, trained, tmp_path):
    shutil.copytree(trained, tmp_path / 'broken')
    ckpt = torch.load(tmp_path / 'broken/ckpt.pt', weights_only=True)
    ckpt['weights']['ln_f.weight'].fill_(3e38)           # finite, but not what it computes
    torch.save(ckpt, tmp_path / 'broken/ckpt.pt')
    for how in (['--next', 3], ['--temperature', 0], []):
        done = run('sample.py', tmp_path / 'broken', *how, code=2)
        assert 'probabilities are not numbers' in done.stderr and done.stderr.count('\n') == 1


def test_documents_are_set_apart(data_dir):
    tokenizer = load_tokenizer(data_dir / 'toy_stories')
    texts = [tokenizer.encode(text) for text in ('The dogs run.', 'Mia waits.')]
    ids = [i for text in texts for i in (tokenizer.eot, *text)]
    assert tokenizer.show(ids) == 'The dogs run.\n\nMia waits.'
    assert tokenizer.decode(ids) == 'The dogs run.Mia waits.'


def test_cells(data_dir):
    """Tokens without text have names."""
    found = {}
    for name in ('toy_stories', 'toy_bytes', 'toy_thoughts', 'toy_pauses'):
        tokenizer = load_tokenizer(data_dir / name)
        ids = [i for i, text in enumerate(tokenizer.token_bytes) if not text and i != tokenizer.eot]
        found[name] = [sample.cell(tokenizer, i) for i in (tokenizer.eot, *ids)]
    assert found['toy_stories'] == ['<eot>'] and found['toy_pauses'] == ['<eot>', '<pause>']
    assert found['toy_bytes'] == ['<eot>', '<end>', '<pad>']
    assert found['toy_thoughts'][-1] == '<pad>'
    assert sample.cell(tokenizer, tokenizer.encode('\n')[0]) == '\\n'


@pytest.mark.slow
def test_a_prompt_inside_a_chunk_of_bytes(call, smoke):
    """The last chunk of the prompt is left open: the model may end it or go on with it."""
    folder = smoke('config/stlm_bytes.py')
    text = call('--prompt', 'Once upon a ti', '--max_new_tokens', 40, folder=folder)
    assert text.startswith('Once upon a ti') and len(text) > 16
    for before in ('', 50 * 'The dogs run. '):           # more than the model reads: whole chunks are cut off
        lines = call('--prompt', before + 'Once upon a ti', '--next', 257, folder=folder)
        assert '<end>' in lines and '<eot>' not in lines


def test_mistakes(run, trained, tmp_path):
    done = run('sample.py', tmp_path / 'nothing', code=2)
    assert done.stderr.startswith('sample.py: ') and done.stderr.count('\n') == 1
    for wrong in (['--top_k', -1], ['--temperature', -1], ['--device', 'tpu']):
        assert run('sample.py', trained, *wrong, code=2).stderr.count('\n') == 1
    (tmp_path / 'ckpt.pt').write_bytes(b'broken')
    assert 'cannot be read as a checkpoint' in run('sample.py', tmp_path, code=2).stderr
