"""sample.py on a small trained run, as a user calls it."""

import math
import re

import pytest
import torch

import sample
from plumbing.checkpoint import load_checkpoint
from plumbing.tokenizer import load_tokenizer


@pytest.fixture(scope='module')
def trained(smoke):
    return smoke('config/moep.py', '--block_size=32', '--n_parallel=1')


@pytest.fixture
def call(run, trained):
    """sample.py in this process -> what it prints."""
    def call(*args, folder=trained):
        return run('sample.py', folder, *args, '--device', 'cpu', here=True).stdout
    return call


def test_text(call):
    args = ['--prompt', 'Once upon a time', '--max_new_tokens', 40]
    first = call(*args, '--num', 2)
    assert first.startswith('Once upon a time') and first.count('-' * 40) == 1
    assert call(*args, '--num', 2) == first              # the seed decides
    assert call(*args, '--num', 2, '--seed', 1) != first
    greedy = call(*args, '--temperature', 0)
    assert greedy == call(*args, '--top_k', 1, '--seed', 5)
    assert call('--max_new_tokens', 5).strip()


def test_next(call, trained):
    """The probabilities are the model's."""
    lines = call('--prompt', 'Once upon a', '--next', 5).splitlines()
    model, _ = load_checkpoint(trained)
    tokenizer = load_tokenizer(trained)
    ids = [tokenizer.eot, *tokenizer.encode('Once upon a')]
    with torch.no_grad():
        best = model(torch.tensor([ids]))[0][0, -1].softmax(-1).topk(5)
    assert lines == [f'{p:8.4f}  {sample.cell(tokenizer, i)}'
                     for p, i in zip(best.values.tolist(), best.indices.tolist())]


def test_routes(call):
    text = call('--prompt', 'The dogs', '--routes', '--max_new_tokens', 6)
    legend, *table = text.split('\n\n')[-1].splitlines()
    assert table[0].split() == ['token', 'shrink', 'parallel.0', 'grow']
    assert legend.startswith('what each token took') and table[1].startswith('<eot>')
    for line in table[1:]:               # two choices in each of three layers, which share 100%
        ways = re.findall(r'(\d):(\d+)', line)
        assert len(ways) == 6
        for (_, a), (_, b) in zip(ways[::2], ways[1::2]):
            assert int(a) >= int(b) and abs(int(a) + int(b) - 100) <= 1


def test_routes_of_a_long_text_begin_with_the_prompt(call, smoke):
    """A model without positions shows all."""
    text = call('--prompt', 'The dogs', '--routes', '--max_new_tokens', 60)
    table = text[text.index('what the first 32 of 6'):].splitlines()
    assert [line.split()[0] for line in table[2:4]] == ['<eot>', 'The'] and len(table) == 34
    folder = smoke('config/moduleformer.py', '--block_size=32')
    text = call('--routes', '--max_new_tokens', 40, folder=folder)
    assert 'what each token took' in text and text[text.rindex('token'):].count('\n') == 1 + 1 + 40


def test_a_prompt_inside_a_chunk_of_bytes(call, smoke):
    """The last chunk of the prompt is left open: the model may end it or go on with it."""
    folder = smoke('config/stlm_bytes.py', '--block_size=72')
    text = call('--prompt', 'Once upon a ti', '--max_new_tokens', 40, folder=folder)
    assert text.startswith('Once upon a ti') and len(text) > 16
    for before in ('', 5 * 'The dogs run. '):            # a long one loses full chunks
        lines = call('--prompt', before + 'Once upon a ti', '--next', 257, folder=folder)
        assert '<end>' in lines and '<eot>' not in lines


def test_scores(call, trained, tmp_path):
    """Of a file as one document, end-of-text included; and of its sentences, the worst first."""
    sentences = ['The dogs are happy.', 'Zq "xx"?', 'One day the king ran home!', 'No end']
    text = ' '.join(sentences)
    (tmp_path / 'a.txt').write_text(text)
    first, *lines = call('--score', tmp_path / 'a.txt', '--show', 9).splitlines()
    model, _ = load_checkpoint(trained)
    tokenizer = load_tokenizer(trained)
    parts = [tokenizer.encode(' ' * (i > 0) + part) for i, part in enumerate(sentences)]
    ids = torch.tensor([[tokenizer.eot, *sum(parts, []), tokenizer.eot]])
    nats = model(ids[:, :-1], ids[:, 1:], reduction='none')[1][0].detach()
    mean = nats.mean().item()
    bits = nats.sum().item() / math.log(2) / len(text)
    numbers = map(float, re.findall(r'\d+\.\d+', first.rpartition('a.txt')[2]))
    assert [*numbers] == pytest.approx([mean, math.exp(mean), bits], rel=1e-3)
    *costs, _ = nats.split([*map(len, parts), 1])
    loss = {sentence: cost.mean().item() for sentence, cost in zip(sentences, costs)}
    shown = [line.split(maxsplit=1) for line in lines]
    assert [sentence for _, sentence in shown] == sorted(sentences, key=loss.get, reverse=True)
    assert all(float(n) == pytest.approx(loss[sentence], abs=1e-3) for n, sentence in shown)
