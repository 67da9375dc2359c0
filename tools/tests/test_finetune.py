"""tools/finetune.py: metrics by hand, padding and cutting, a task that is learned."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import test_contract
from plumbing.chunks import chunk_tokenizer
from plumbing.machine import Machine
from plumbing.settings import Settings
from plumbing.tokenizer import choose_tokenizer
from tools import finetune
from tools.finetune import (METRICS, TASKS, Classifier, Examples, encode, find_files, majority,
                            predict, read_examples)

CPU = torch.device('cpu')


def make(name, **changes):
    """A model of bytes, with weights far from zero."""
    settings = dict(dtype=torch.float32, vocab_size=257, block_size=32) | changes
    return test_contract.make(name, 0.3, **settings)


# ---- Metrics ------------------------------------------------------------------------------------

def metric(name, p, y):
    return float(METRICS[name](np.array(p), np.array(y)))


def test_metrics_by_hand():
    # 3 true, 3 false, 1 missed, 1 too much
    p, y = [1, 1, 1, 0, 0, 1, 0, 0], [1, 0, 1, 0, 1, 1, 0, 0]
    assert metric('accuracy', p, y) == 6 / 8
    assert metric('F1', p, y) == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert metric('Matthews', p, y) == pytest.approx((3 * 3 - 1 * 1) / math.sqrt(4 * 4 * 4 * 4))
    # TP 2, FP 2, FN 1, TN 1: precision 1/2, recall 2/3
    p, y = [1, 1, 1, 1, 0, 0], [1, 0, 0, 1, 1, 0]
    assert metric('F1', p, y) == pytest.approx(2 * (1 / 2) * (2 / 3) / (1 / 2 + 2 / 3))
    assert metric('Matthews', p, y) == pytest.approx((2 * 1 - 2 * 1) / math.sqrt(4 * 3 * 3 * 2))
    assert metric('F1', [0, 0], [0, 0]) == metric('Matthews', [1, 1, 1], [1, 0, 1]) == 0


def test_majority():
    # of the training set
    assert majority([1, 1, 0], [0, 0, 1, 0], TASKS['rte']) == dict(accuracy=25.0)
    assert majority([1, 1, 0], [1, 0], TASKS['cola']) == dict(Matthews=0.0, accuracy=50.0)


# ---- Texts to batches ---------------------------------------------------------------------------

def test_encode():
    tokenizer = choose_tokenizer('bytes')

    def text(*texts, limit=8):
        ids = encode(texts, tokenizer, limit)
        return ''.join(chr(i) if i < 256 else '#' for i in ids)
    assert text('abc') == '#abc'
    assert text('abcdefghij') == '#abcdefg'
    assert text('abc', 'de') == '#abc\nde'
    for a in range(12):
        for b in range(12):
            for limit in range(3, 18):
                x, y = a, b
                while x + y + 2 > limit:         # one token from the longer, the second first
                    x, y = (x - 1, y) if x > y else (x, y - 1)
                assert text('x' * a, 'y' * b, limit=limit) == '#' + 'x' * x + '\n' + 'y' * y
    chunks = chunk_tokenizer(tokenizer, 2)       # a chunk is a byte, end-of-chunk and padding
    ids = encode(['abcdefgh', 'xy'], chunks, 8)
    assert len(ids) == 24 and ids[:3] == [257, 258, 258]
    assert bytes(i for i in ids if i < 256) == b'abcd\nxy'


@pytest.mark.parametrize('name', ['gpt2', 'moduleformer', 'stlm_bytes'])
def test_padding_changes_nothing(name):
    """Alone and without padding, or among longer ones: the same outputs, from the last token."""
    model, tokenizer = make(name, dtype=torch.float64), choose_tokenizer('bytes')
    if name == 'stlm_bytes':
        model = make(name, dtype=torch.float64, vocab_size=259, block_size=64)
        tokenizer = chunk_tokenizer(tokenizer, 3)
    limit = model.config.block_size // len(tokenizer.end)
    texts = [['a'], ['bcb' * 7], ['azkfcxy' * 2], ['kc'], ['bcb' * 5]]
    classifier = Classifier(model, 3).double().eval()
    data = Examples(texts, [0] * len(texts), tokenizer, limit, CPU)
    encoded = [encode(text, tokenizer, limit) for text in texts]
    states = [model.features(torch.tensor([ids]))[0][:, -1] for ids in encoded]
    alone = classifier.out(torch.cat(states))
    assert (alone[:-1] - alone[1:]).abs().max() > 1e-2

    for size in (5, 2):                                  # whatever the batch
        for rows, ids, last in data.batches(np.array([3, 0, 2, 1, 4]), size):
            assert last.tolist() == [len(encoded[i]) - 1 for i in rows]
            torch.testing.assert_close(classifier((ids, last))[0].double(), alone[rows],
                                       rtol=1e-5, atol=1e-6)
    predictions = predict(classifier, data, Machine('cpu'))      # in the examples' own order
    assert predictions.tolist() == alone.argmax(1).tolist()


def test_batches_are_reproducible_and_hold_everything():
    texts = [['x' * (1 + i * 37 % 90)] for i in range(150)]
    data = Examples(texts, list(range(150)), choose_tokenizer('bytes'), 64, CPU)
    seeds_and_epochs = (3, 0), (3, 0), (3, 1), (4, 0)
    orders = [data.shuffled(seed, epoch, 4).tolist() for seed, epoch in seeds_and_epochs]
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) == 3
    for order in orders:
        assert sorted(order) == list(range(150))
        widths = [np.ptp(data.lengths[order[i:i + 4]]) for i in range(0, 148, 4)]
        assert np.mean(widths) < 8                       # of like length; at random it is about 40
        longest = data.lengths[order[3:64:4]].tolist()
        assert longest != sorted(longest)                # but not the shortest batch first
    seen = [(rows, ids) for rows, ids, _ in data.batches(np.array(orders[0]), 4)]
    assert torch.cat([rows for rows, _ in seen]).tolist() == orders[0]
    assert max(ids.size(1) for _, ids in seen) == 64


# ---- Tasks --------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, file, content, texts, label', [
    ('cola', 'CoLA/dev.tsv', 'gj04\t0\t*\tA "quote.\r\n', ['A "quote.'], 0),
    ('mnli', 'MNLI/dev_matched.tsv',
     'index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tp\th\tneutral\tcontradiction\n',
     ['p', 'h'], 2),
    ('wsc', 'wsc.valid.jsonl',
     '{"text": "T", "span1_text": "Mark", "span2_text": "He", "label": 0}\n',
     ['T', 'He: Mark'], 0)])
def test_formats(name, file, content, texts, label, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode())
    assert read_examples(find_files(tmp_path, name)['valid'], name) == ([texts], [label])


@pytest.fixture(scope='module')
def tiny(smoke):
    """A run folder with the toy tokenizer and weights that are as good as untrained."""
    return smoke('config/gpt2.py', '--n_layer=2', '--n_embd=32', '--n_head=2', '--block_size=32',
                 '--dropout=0.0', '--max_iters=1')


@pytest.mark.slow
def test_default_command_learns_the_toy_task(run, tiny, tmp_path):
    run('tools.finetune', tiny, '--seeds=12', '--json', tmp_path / 'r.json', cwd=tmp_path)
    result = json.loads((tmp_path / 'r.json').read_text())['tasks'][0]
    assert result['mean']['accuracy'] >= 90 and result['majority'] == {'accuracy': 50.0}
    (one,) = result['runs']
    assert one['best_epoch'] < len(one['history']) + 1 <= 33
    assert one['scores'] == one['history'][one['best_epoch'] - 1]
    block = 8 * (32 + 96 + 32 + 32 + 32 + 128 + 128 + 32)        # adapters of rank 8
    assert one['trained'] == 2 * block + 2 * 32 + 2              # two of them, the classifier


@pytest.mark.slow
def test_all_tasks_of_a_folder(run, tiny, tmp_path):
    """Three classes and pairs cut to the context; two seeds, --full."""
    columns = ('sentence1', 'sentence2', 'passage', 'question')
    for name, n_labels in (('mnli', 3), ('boolq', 2)):
        rows = [dict.fromkeys(columns, f'The girl saw {i} dogs. ' * 9) | dict(label=i % n_labels)
                for i in range(12)]
        for split in ('train', 'valid'):
            file = tmp_path / f'{name}.{split}.jsonl'
            file.write_text('\n'.join(map(json.dumps, rows)) + '\n')
    run('tools.finetune', tiny, '--data', tmp_path, '--seeds=1,2', '--epochs=5', '--batch_size=5',
        '--full', '--learning_rate=1e-4', '--json', tmp_path / 'r.json', here=True)
    tasks = json.loads((tmp_path / 'r.json').read_text())['tasks']
    assert [task['task'] for task in tasks] == ['mnli', 'boolq']
    for task in tasks:
        main = TASKS[task['task']].metrics[0]
        one, two = (r['scores'][main] for r in task['runs'])
        assert task['mean'][main] == pytest.approx((one + two) / 2)
        assert task['spread'][main] == pytest.approx(abs(one - two) / math.sqrt(2))
        assert all(r['trained'] > 80_000 for r in task['runs'])      # everything, not only adapters


def test_steps_by_hand(monkeypatch):
    """Fresh gradients, clipped, at a rate that falls: two epochs of two batches against a loop
    written out."""
    base = make('gpt2', n_layer=1, block_size=8)
    texts = [['a'], ['bc'], ['d'], ['efg']]
    data = Examples(texts, [0, 1, 1, 0], choose_tokenizer('bytes'), 8, CPU)
    made = []

    def classifier(*args):
        made.append(Classifier(*args))
        return made[0]
    monkeypatch.setattr(finetune, 'Classifier', classifier)
    monkeypatch.setattr(finetune, 'score_predictions', lambda *_: {'accuracy': 50})
    args = SimpleNamespace(full=True, learning_rate=1e-2, epochs=2, patience=9, batch_size=2)
    finetune.fit(base.eval(), TASKS['rte'], data, data, 3, args, Machine('cpu'))

    torch.manual_seed(3)
    expected = Classifier(copy.deepcopy(base), 2)
    s = Settings()
    matrices = [p for p in expected.parameters() if p.dim() > 1]
    vectors = [p for p in expected.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(s.beta1, 0.999), eps=s.eps)
    it, norms = 0, []
    for epoch in (0, 1):
        for rows, ids, last in data.batches(data.shuffled(3, epoch, 2), 2):
            for group in optimizer.param_groups:
                group['lr'] = 1e-2 * (1 - it / 4)
            loss = F.cross_entropy(expected((ids, last))[0], data.labels[rows])
            grads = torch.autograd.grad(loss, list(expected.parameters()), allow_unused=True)
            norms.append(torch.stack([g.norm() for g in grads if g is not None]).norm())
            for p, g in zip(expected.parameters(), grads):
                p.grad = None if g is None else g * min(1, s.grad_clip / norms[-1])
            optimizer.step()
            it += 1
    assert max(norms) > s.grad_clip                      # or clipping would not be tested
    for (name, p), q in zip(expected.named_parameters(), made[0].parameters()):
        if p.dim() > 1:      # the gradient of a key's bias is rounding, which AdamW makes large
            assert (p - q).norm() < 1e-4 * p.norm(), name


@pytest.mark.parametrize('values, epochs, best', [
    ([50, 60, 60, 55, 59, 99], 5, 2),
    ([40, 100, 99], 2, 2),
    ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 9, 9)])
def test_patience(monkeypatch, values, epochs, best):
    """Three epochs without a better one, of at most nine; equally good is not better, and nothing
    is better than 100."""
    data = Examples([['a']] * 4, [0, 1] * 2, choose_tokenizer('bytes'), 8, CPU)
    model = make('gpt2')
    scores = iter(values)
    monkeypatch.setattr(finetune, 'score_predictions', lambda *_: {'accuracy': next(scores)})
    args = SimpleNamespace(full=True, learning_rate=1e-2, epochs=9, patience=3, batch_size=2)
    result = finetune.fit(model, TASKS['rte'], data, data, 3, args, Machine('cpu'))
    assert (result['epochs'], result['best_epoch']) == (epochs, best)
    assert result['scores']['accuracy'] == values[best - 1]
