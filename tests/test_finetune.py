"""tools/finetune.py: metrics by hand, padding and cutting, a task that is learned, file formats."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from plumbing.machine import Machine
from plumbing.settings import Settings, import_model
from plumbing.tokenizer import choose_tokenizer, chunk_tokenizer
from plumbing.toy import MEN, PLURALS, WOMEN, subject_rows
from tools import finetune
from tools.finetune import (
    METRICS, TASKS, Classifier, Examples, encode, find_task_files, majority, predict,
    read_examples, shorten)

CPU = torch.device('cpu')
BAR = SimpleNamespace(update=lambda n=1: None, set_postfix_str=lambda text: None)
SMALL = dict(vocab_size=257, block_size=32, n_layer=2, n_head=2, n_embd=16)
MODELS = dict(
    gpt2=('moep', dict(n_parallel=0, dropout=0.0)),
    moep=('moep', dict(n_parallel=1, n_embd_parallel=8, n_head_parallel=1, dropout=0.0)),
    papaformer=('papaformer', dict(path_embd=[8, 8], path_head=[1, 1], connection='gumbel2')),
    moduleformer=('moduleformer', dict(n_att=3, d_att=8, n_ffd=3, d_ffd=8, query_block=8)),
    selfmoe=('selfmoe', dict(n_kv_head=1, n_expert=3, top_k=2)),
    stlm_bytes=('stlm', dict(vocab_size=259, block_size=64, n_kv_head=1, ffn_hidden=24,
                             byte_limit=1, byte_embd=8, byte_head=1, byte_layer=1)))


def make(name, **changes):
    """A model of bytes, with weights far from zero."""
    torch.manual_seed(1)
    file, keys = MODELS[name]
    module = import_model(file)
    model = module.Model(module.Config(**SMALL | keys | changes)).eval()
    for p in model.parameters():
        p.data.add_(0.3 * torch.randn(p.shape))
    return model


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
    assert metric('F1', [0, 0, 1], [1, 0, 0]) == metric('F1', [0, 0], [0, 0]) == 0
    assert metric('Matthews', [1, 1, 1], [1, 0, 1]) == 0
    assert metric('Matthews', [0, 1], [1, 0]) == pytest.approx(-1)


def test_correlations_by_hand():
    # means 2 and 3; deviations (-1 0 1) and (-2 1 1): 3 / sqrt(2 * 6)
    assert metric('Pearson', [1, 2, 3], [1, 4, 4]) == pytest.approx(3 / math.sqrt(12))
    assert metric('Spearman', [10, 20, 1000], [1, 2, 3]) == pytest.approx(1)
    # ranks 1 2 3 4 and, with a tie, 1 2.5 2.5 4: deviations (-1.5 -.5 .5 1.5) and (-1.5 0 0 1.5)
    tied = metric('Spearman', [1, 2, 3, 4], [0.1, 0.7, 0.7, 5])
    assert tied == pytest.approx(4.5 / math.sqrt(5 * 4.5))
    # three tied at the front: ranks 2 2 2 4 against 4 3 2 1:
    # deviations (-.5 -.5 -.5 1.5) and (1.5 .5 -.5 -1.5)
    assert metric('Spearman', [0, 0, 0, 1], [4, 3, 2, 1]) == pytest.approx(-3 / math.sqrt(3 * 5))
    assert metric('Pearson', [2, 2, 2], [1, 2, 3]) == metric('Spearman', [1, 2], [3, 3]) == 0
    both = 3 / math.sqrt(12) + 1.5 / math.sqrt(2 * 1.5)
    assert metric('correlation', [1, 2, 3], [1, 4, 4]) == pytest.approx(both / 2)


def test_majority():
    # of the training set
    assert majority([1, 1, 0], [0, 0, 1, 0], TASKS['rte']) == dict(accuracy=25.0)
    f1 = pytest.approx(100 * 6 / 7)
    assert majority([1, 1, 0], [1, 1, 0, 1], TASKS['mrpc']) == dict(F1=f1, accuracy=75.0)
    assert majority([1, 1, 0], [1, 0], TASKS['cola']) == dict(Matthews=0.0, accuracy=50.0)
    nothing = dict.fromkeys(TASKS['stsb'].metrics, 0.0)
    assert majority([1.0, 1.0, 5.0], [2.0, 3.0], TASKS['stsb']) == nothing


def test_averages_of_suites():
    result = lambda task, value: dict(task=task, mean={TASKS[task].metrics[0]: value, 'other': 0})
    glue = [result('cola', 30.0), result('rte', 60.0), result('mrpc', 88.2)]
    superglue = [result('wsc', 55.9)]
    means = finetune.averages([*glue, *superglue, result('toy', 100.0)])
    assert means['GLUE'] == dict(mean=pytest.approx(59.4), tasks=3, of=8)
    assert means['SuperGLUE'] == dict(mean=55.9, tasks=1, of=3)


# ---- Texts to batches ---------------------------------------------------------------------------

def test_shorten():
    for a in range(12):
        for b in range(12):
            for room in range(1, 16):
                x, y = a, b
                while x + y > room:              # one token from the longer, the second first
                    x, y = (x - 1, y) if x > y else (x, y - 1)
                assert shorten([a, b], room) == [x, y], (a, b, room)
    assert shorten([9], 5) == [5] and shorten([3], 5) == [3]


def test_encode():
    tokenizer = choose_tokenizer('bytes')

    def text(*texts):
        return ''.join(chr(i) if i < 256 else '#' for i in encode(texts, tokenizer, 8))
    assert text('abc') == '#abc'
    assert text('abcdefghij') == '#abcdefg'
    assert text('abc', 'de') == '#abc\nde'
    assert text('abcdefgh', 'xy') == '#abcd\nxy'
    assert text('ab', 'uvwxyz') == '#ab\nuvwx'
    assert text('abcdef', 'uvwxyz') == '#abc\nuvw'
    chunks = chunk_tokenizer(tokenizer, 2)       # a chunk is a byte, end-of-chunk and padding
    ids = encode(['abcdefgh', 'xy'], chunks, 8)
    assert len(ids) == 24 and ids[:3] == [257, 258, 258]
    assert bytes(i for i in ids if i < 256) == b'abcd\nxy'


@pytest.mark.parametrize('name', MODELS)
def test_padding_changes_nothing(name):
    """Alone and without padding, or among longer ones: the same outputs, from the last token."""
    model = make(name).double()
    tokenizer = choose_tokenizer('bytes')
    if name == 'stlm_bytes':
        tokenizer = chunk_tokenizer(tokenizer, 1)
    limit = model.config.block_size // len(tokenizer.end)
    texts = [['a'], ['bcb' * 7], ['azkfcxy' * 2], ['kc'], ['bcb' * 5]]
    classifier = Classifier(model, 3).double().eval()
    data = Examples(texts, [0] * len(texts), tokenizer, limit, CPU)
    encoded = [encode(text, tokenizer, limit) for text in texts]
    states = [model.features(torch.tensor([ids]))[0][:, -1] for ids in encoded]
    alone = classifier.out(torch.cat(states))
    assert (alone[:-1] - alone[1:]).abs().max() > 1e-2

    def check(ids, last, rows):
        out = classifier(ids, last).double()
        torch.testing.assert_close(out, alone[rows], rtol=1e-5, atol=1e-6)
    rows = torch.tensor([3, 0, 2, 1, 4])
    ids, last = data.batch(rows, int(data.lengths.max()))
    assert last.tolist() == [len(encoded[i]) - 1 for i in rows]
    assert ids.size(1) > data.lengths.min()
    check(ids, last, rows)
    check(*data.batch(rows[:1], 16 * data.slots), rows[:1])      # whatever the batch
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
    rows, ids = seen[0]
    first = bytes(ids[0, 1:data.lengths[rows[0]]].tolist())
    assert first.decode() == texts[rows[0]][0][:63]


# ---- Files --------------------------------------------------------------------------------------

FORMATS = dict(
    cola=('CoLA/dev.tsv', 'gj04\t0\t*\tThe more.\r\nks08\t1\t\tA "quote\n',
          [['The more.'], ['A "quote']], [0, 1]),
    sst2=('SST-2/dev.tsv', 'sentence\tlabel\na fine film \t1\n\nbad\t0',
          [['a fine film '], ['bad']], [1, 0]),
    mrpc=('MRPC/dev.tsv',
          '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tone\ttwo\n',
          [['one', 'two']], [1]),
    qqp=('qqp/dev.tsv',
         'id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tWhy?\tHow?\t0\n',
         [['Why?', 'How?']], [0]),
    mnli=('MNLI/dev_matched.tsv',
          'index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tp\th\tneutral\tcontradiction\n',
          [['p', 'h']], [2]),
    qnli=('QNLI/dev.tsv', 'index\tquestion\tsentence\tlabel\n0\tq\ts\tnot_entailment\n',
          [['q', 's']], [1]),
    rte=('rte.valid.jsonl', '{"sentence1": "a\\u2028b", "sentence2": "c", "label": 1, "idx": 3}\n',
         [['a\u2028b', 'c']], [1]),
    stsb=('STS-B/dev.tsv', 'index\tsentence1\tsentence2\tscore\n0\ta\tb\t3.800\n',
          [['a', 'b']], [3.8]),
    boolq=('boolq.valid.jsonl', '{"question": "q", "passage": "p", "label": true}\n',
           [['p', 'q']], [1]),
    wsc=('wsc.valid.jsonl', '{"text": "T", "span1_text": "Mark", "span2_text": "He", "label": 0}\n',
         [['T', 'He: Mark']], [0]),
    multirc=('multirc.valid.jsonl',
             '{"paragraph": "P", "question": "Q?", "answer": "A", "label": "1"}',
             [['P', 'Q? A']], [1]))


@pytest.mark.parametrize('name', FORMATS)
def test_formats(name, tmp_path):
    file, content, texts, labels = FORMATS[name]
    train_file = file.replace('dev', 'train').replace('valid', 'train')
    for path in (file, train_file, 'MNLI/dev_mismatched.tsv', 'MRPC/dev_ids.tsv'):
        path = tmp_path / path
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode())
    tasks = find_task_files(tmp_path)
    assert list(tasks) == [name] and [len(files) for files in tasks[name].values()] == [1, 1]
    assert read_examples(tasks[name]['valid'], name) == (texts, labels)


def test_toy_task():
    rows = subject_rows(2300)
    assert sum(r['label'] for r in rows) == 1150 and len({r['sentence'] for r in rows}) == 2300

    def forms(words):
        return {form for word in words for form in (word, PLURALS.get(word, word + 's'))}
    females, males = forms(WOMEN), forms(MEN)
    for row in rows:
        words = row['sentence'].rstrip('.').split()
        people = [word in females for word in words if word in females | males]
        assert people == [bool(row['label']), not row['label']]  # only who comes first tells


@pytest.fixture(scope='module')
def tiny(run, data_dir, tmp_path_factory):
    """A run folder with the toy tokenizer and weights that are as good as untrained."""
    out = tmp_path_factory.mktemp('tiny') / 'run'
    run('train.py', '--n_parallel=0', '--n_embd=32', '--n_head=2', '--block_size=32',
        '--dropout=0.0', '--max_iters=1', '--eval_tokens=64', '--sample_tokens=0',
        f'--data_dir={data_dir}', f'--out_dir={out}', here=True)
    return out


@pytest.mark.slow
def test_default_command_learns_the_toy_task(run, tiny, data_dir, tmp_path):
    (tmp_path / 'data').symlink_to(data_dir)
    done = run('tools.finetune', tiny, '--seeds=12', '--json', tmp_path / 'r.json', cwd=tmp_path)
    result = json.loads((tmp_path / 'r.json').read_text())['tasks'][0]
    assert result['mean']['accuracy'] >= 90 and result['majority'] == {'accuracy': 50.0}
    head, line = (text.split() for text in done.stdout.splitlines()[1:3])
    assert head[:5] == ['task', 'metric', 'mean', '±', 'majority']
    assert line[:5] == ['toy', 'accuracy', f"{result['mean']['accuracy']:.2f}", '-', '50.00']
    (one,) = result['runs']
    assert one['best_epoch'] < len(one['history']) + 1 <= 33
    assert one['scores'] == one['history'][one['best_epoch'] - 1]
    block = 8 * (32 + 96 + 32 + 32 + 32 + 128 + 128 + 32)        # adapters of rank 8
    assert one['trained'] == 2 * block + 2 * 32 + 2              # two of them, the classifier


def write_task(folder, name, rows, splits=('train', 'valid')):
    for split in splits:
        (folder / f'{name}.{split}.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')


@pytest.mark.slow
def test_all_tasks_of_a_folder(run, tiny, tmp_path):
    """Regression, three classes, pairs cut to the context and a task without training data;
    patience, two seeds, --full."""
    words = ['The boys like the park', 'The girl saw a dog', 'He was sad', 'They ran', 'She sang']
    pairs = [dict(sentence1=words[i % 5], sentence2=words[i % 3], label=i % 3) for i in range(12)]
    write_task(tmp_path, 'mnli', pairs)
    write_task(tmp_path, 'stsb', [{**row, 'label': row['label'] + 0.5} for row in pairs])
    questions = [dict(passage=w * 9, question=w, label=i % 2) for i, w in enumerate(words)]
    write_task(tmp_path, 'boolq', questions)
    untrained = [dict(paragraph='a', question='b', answer='c', label=0)]
    write_task(tmp_path, 'multirc', untrained, ['valid'])
    printed = run('tools.finetune', tiny, '--data', tmp_path, '--seeds=1,2', '--epochs=5',
                  '--patience=2', '--batch_size=5', '--full', '--learning_rate=1e-4',
                  '--json', tmp_path / 'r.json', here=True).stdout
    assert 'multirc is left out' in printed and '2 of its 8 tasks' in printed
    assert 'Spearman' in printed
    tasks = json.loads((tmp_path / 'r.json').read_text())['tasks']
    assert [task['task'] for task in tasks] == ['stsb', 'mnli', 'boolq']
    assert tasks[2]['limit'] == 32
    for task in tasks:
        main = TASKS[task['task']].metrics[0]
        one, two = (r['scores'][main] for r in task['runs'])
        assert task['mean'][main] == pytest.approx((one + two) / 2)
        assert task['spread'][main] == pytest.approx(abs(one - two) / math.sqrt(2))
        assert all(r['trained'] > 80_000 for r in task['runs'])      # everything, not only adapters


@pytest.mark.parametrize('full', [False, True])
def test_the_seed_fixes_everything_and_the_base_stays(full):
    model = make('gpt2')
    before = copy.deepcopy(model.state_dict())
    texts = [[chr(97 + i % 7) * (i % 9 + 1)] for i in range(40)]
    data = Examples(texts, [i % 2 for i in range(40)], choose_tokenizer('bytes'), 16, CPU)
    args = SimpleNamespace(full=full, rank=2, learning_rate=1e-2, epochs=3, patience=5,
                           batch_size=8)
    a, b, c = (finetune.fit(model, TASKS['rte'], data, data, seed, args, Machine('cpu'), BAR)
               for seed in (3, 3, 4))
    assert a['history'] == b['history'] and a['history'] != c['history']
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_numbers_reach_the_examples(run, tiny, data_dir, tmp_path, monkeypatch):
    """--num counts training examples alone, --length cuts all; adapters that the run has are merged
    before others are added."""
    run('train.py', '--model=moep', f'--init_from={tiny}', '--surgery=tools.lora.add_lora',
        '--max_iters=0', f'--data_dir={data_dir}', f'--out_dir={tmp_path}/lora', here=True)
    calls = []
    result = dict(scores=dict(accuracy=1.0), best_epoch=1, seconds=1.0)
    monkeypatch.setattr(finetune, 'fit', lambda *args: calls.append(args) or result)
    run('tools.finetune', f'{tmp_path}/lora', f'--data={data_dir}/toy_glue', '--num=7',
        '--length=9', '--seeds=1', here=True)
    (base, _, trained, valid, *_), = calls
    rows = sum(1 for _ in open(data_dir / 'toy_glue' / 'toy.valid.jsonl'))
    assert len(trained.lengths) == 7 and len(valid.lengths) == rows > 7
    assert max(*trained.lengths, *valid.lengths) == 9
    assert not hasattr(base, 'adapted')


@pytest.mark.parametrize('task', ['rte', 'stsb'])
def test_steps_by_hand(monkeypatch, task):
    """Fresh gradients, clipped, at a rate that falls: two epochs of two batches against a loop
    written out."""
    base = make('gpt2', n_layer=1, block_size=8)
    labels = [0, 1, 1, 0] if task == 'rte' else [0.5, 4.0, 2.5, 5.0]
    texts = [['a'], ['bc'], ['d'], ['efg']]
    data = Examples(texts, labels, choose_tokenizer('bytes'), 8, CPU)
    made, modes = [], []

    def classifier(*args):
        made.append(Classifier(*args))
        note = lambda module, _: modes.append(module.training and module.model.training)
        made[0].register_forward_pre_hook(note)
        return made[0]
    monkeypatch.setattr(finetune, 'Classifier', classifier)
    monkeypatch.setattr(finetune, 'score_predictions', lambda *_: {TASKS[task].metrics[0]: 50})
    args = SimpleNamespace(full=True, learning_rate=1e-2, epochs=2, patience=9, batch_size=2)
    finetune.fit(base.eval(), TASKS[task], data, data, 3, args, Machine('cpu'), BAR)
    assert modes == [True, True, False] * 2              # two batches, then the validation

    torch.manual_seed(3)
    expected = Classifier(copy.deepcopy(base), 2 if task == 'rte' else 1)
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
            out, y = expected(ids, last), data.labels[rows]
            loss = F.cross_entropy(out, y) if task == 'rte' else (out[:, 0] - y).square().mean()
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
    ([50, 60, 55, 55, 61, 50, 50, 50, 99], 8, 5),
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
    result = finetune.fit(model, TASKS['rte'], data, data, 3, args, Machine('cpu'), BAR)
    assert (result['epochs'], result['best_epoch']) == (epochs, best)
    assert result['scores']['accuracy'] == values[best - 1]
