"""Which windows are read, in which order; those of evaluation, and what is counted on them."""

import contextlib
import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from plumbing.cli import UserError
from plumbing.data import Corpus, Data, load_bin, named_sets, route_shares, score_batches, val_batches
from plumbing.machine import Machine
from plumbing.settings import Settings

EOT = 99


def machine():
    return SimpleNamespace(device=torch.device('cpu'), rank=0, world=1, sum=lambda x: x, cuda=False,
                           autocast=contextlib.nullcontext)


def corpus(sets, **ranges):
    """sets: {name: tokens}, without files: just what Data reads of a Corpus."""
    counts = {name: dict(words=len(tokens) // 2, tokens=len(tokens)) for name, tokens in sets.items()}
    metas = {name: dict(splits=dict(train=count)) for name, count in counts.items()}
    ranges = {name: ranges.get(name, (0.0, 1.0, 1.0)) for name in sets}
    return SimpleNamespace(ranges=ranges, metas=metas, slots=1, pad=-1, folder='data/a', folders=sets,
                           tokenizer=SimpleNamespace(eot=EOT))


@pytest.fixture(autouse=True)
def bins_are_arrays(monkeypatch):
    monkeypatch.setattr('plumbing.data.load_bin', lambda tokens, split: np.asarray(tokens, dtype=np.uint16))


def data(sets, T=8, ranges={}, **settings):
    return Data(Settings(**settings), corpus(sets, **ranges), T, machine())


def test_epoch_covers_everything_once_and_is_cut_anew():
    d = data(dict(a=np.arange(1000)))
    offsets, orders = set(), []
    for epoch in range(60):
        order = d.order(epoch)
        starts = np.sort(order)
        assert np.array_equal(np.diff(starts), np.full(len(starts) - 1, 8))     # no overlap, no gap
        assert starts[0] < 8 and starts[-1] + 8 < 1000 <= starts[-1] + 8 + 8     # the next would not fit
        offsets.add(starts[0])
        orders.append(order)
    assert offsets == {*range(8)} and not np.array_equal(orders[0], np.sort(orders[0]))
    assert np.array_equal(d.order(3), data(dict(a=np.arange(1000))).order(3))   # seed and epoch alone
    assert not np.array_equal(d.order(0), data(dict(a=np.arange(1000)), seed=7).order(0))


def test_batch_and_take_run_over_epochs():
    d = data(dict(a=np.arange(1000)), batch_size=4)
    first, second = d.order(0), d.order(1)
    taken = np.concatenate([d.take(50) for _ in range(4)])
    assert np.array_equal(taken, np.concatenate((first, second))[:200]) and d.epoch == 1
    x, y = d.batch(taken[:3])
    assert np.array_equal(x, taken[:3, None] + np.arange(8)) and np.array_equal(y, x + 1)
    assert math.isclose(d.words, 200 * 8 * 0.5)
    again = data(dict(a=np.arange(1000)), batch_size=4)
    again.load_state(json.loads(json.dumps(d.state())))
    assert np.array_equal(again.take(70), d.take(70))


def test_a_run_goes_on_with_the_data_it_had():
    d = data(dict(a=np.arange(1000)))
    again = data(dict(a=np.arange(1200)))
    with pytest.raises(UserError, match='a text of 1,000 tokens, but now it has 1,200'):
        again.load_state(d.state())


def test_ids_above_int16():
    d = data(dict(a=np.arange(65536 - 100, 65536)))
    assert d.batch(np.array([80]))[1].max() == 65536 - 100 + 88


def test_stride_and_epoch_words():
    d = data(dict(a=np.arange(1000)), stride=2)
    starts = np.sort(d.order(0))
    assert set(np.diff(starts)) == {2} and len(starts) in (495, 496)
    d = data(dict(a=np.arange(1000)), stride=2, epoch_words=100.0)   # 4 words per window
    assert len(d.order(0)) == 25


def test_mixture_passes_and_no_window_across_sets():
    d = data(dict(a=np.zeros(400), b=np.ones(800)), ranges=dict(b=(0.0, 1.0, 2.5)))
    x, y = d.batch(d.order(0))
    assert all(len(set(row.tolist())) == 1 for row in torch.cat((x, y), 1))
    counts = x[:, 0].bincount().tolist()
    assert counts[0] in (49, 50) and 245 <= counts[1] <= 252
    a, b = d.sets
    in_b = np.sort(d.order(0)[d.order(0) >= b[0]])
    assert len(np.unique(in_b % 8)) > 1                  # the passes over b are cut differently
    for quarter in x[:, 0].chunk(4):                     # and the sets come mixed
        assert 0 < (quarter == 0).float().mean() < 0.4


def test_half_a_pass_reads_windows_from_everywhere():
    """Not those of the beginning: another half in every epoch."""
    d = data(dict(a=np.arange(8000)), ranges=dict(a=(0.0, 1.0, 0.5)))
    for epoch in range(3):
        starts = d.order(epoch)
        assert len(starts) in (499, 500) and len(np.unique(starts)) == len(starts)
        assert 0.4 < (starts < 4000).mean() < 0.6
    d = data(dict(a=np.arange(8000)), ranges=dict(a=(0.0, 1.0, 1e-6)))
    assert len(d.order(0)) == 1                          # a small part is at least a window


def test_words_are_counted_by_set():
    a = np.where(np.arange(400) == 199, EOT, 0)          # two documents, of which the first is read
    c = corpus(dict(a=a, b=np.ones(800)), a=(0.0, 0.5, 1.0))
    c.metas['b']['splits']['train']['words'] = 80        # 0.1 per token, where a has 0.5
    d = Data(Settings(), c, 8, machine())
    starts = d.order(0)
    in_b = d.batch(starts)[0][:, 0] == 1
    assert np.allclose(d.words_in(starts), np.where(in_b, 0.8, 4.0))
    d.take(len(starts))
    assert math.isclose(d.words, 0.8 * in_b.sum() + 4.0 * (~in_b).sum(), rel_tol=1e-6)


def test_windows_of_some_epochs():
    """Epochs are cut at other offsets and need not be equally long; of the last, its part."""
    d = data(dict(a=np.arange(83)), T=8)
    lengths = [len(d.order(epoch)) for epoch in range(8)]
    assert len(set(lengths)) == 2
    counts = [d.count_windows(epochs) for epochs in (1.0, 3.0, 7.5)]
    assert counts == [lengths[0], sum(lengths[:3]), sum(lengths) - round(lengths[7] / 2)]


def test_ranges_are_complementary_and_end_with_documents():
    tokens = np.random.default_rng(0).integers(0, 50, 2000)
    tokens[np.arange(36, 2000, 37)] = EOT
    tokens[-1] = EOT
    low = data(dict(a=tokens), ranges=dict(a=(0.0, 0.6, 1.0))).tokens
    high = data(dict(a=tokens), ranges=dict(a=(0.6, 1.0, 1.0))).tokens
    assert np.array_equal(torch.cat((low, high)), tokens) and low[-1] == EOT
    assert 1200 <= len(low) < 1200 + 37


def test_streams_are_contiguous():
    d = data(dict(a=np.arange(1000)), stream=True, batch_size=3, gradient_accumulation_steps=2)
    steps = d.order(0).reshape(-1, 6)
    assert (np.diff(steps, axis=0) == 8).all()           # each row reads on where it stopped
    assert len(np.unique(steps)) == steps.size and steps.max() + 8 < 1000


def test_streams_over_several_sets():
    """A mixture is read set by set, as often as it says; no window crosses, and all rows are equally long."""
    sets = dict(a=np.zeros(400), b=np.ones(400))
    d = data(sets, ranges=dict(b=(0.0, 1.0, 3.0)), stream=True, batch_size=4)
    x, y = d.batch(d.order(0))
    assert all(len(set(row.tolist())) == 1 for row in torch.cat((x, y), 1)) and len(x) % 4 == 0
    share = (x[:, 0] == 1).float().mean()
    assert abs(share - 0.75) < 0.02


def test_the_steps_of_a_stream_are_spread_evenly():
    """One of a, of two rows, stands in the middle of four of b."""
    d = data(dict(a=np.arange(1000)), stream=True, batch_size=2)
    order = d.take_turns([[np.arange(2)], [np.arange(100, 108)]])
    assert order.reshape(-1, 2).tolist() == [[100, 104], [101, 105], [0, 1], [102, 106], [103, 107]]


def test_byte_chunks_are_aligned_and_padding_is_no_target():
    tokens = np.tile([1, 2, 256, 258], 100)              # slots of 4, padding 258
    c = corpus(dict(a=tokens))
    c.slots = 4
    c.pad = 258
    d = Data(Settings(), c, 8, machine())
    for epoch in range(4):
        assert (d.order(epoch) % 4 == 0).all()
    x, y = d.batch(d.order(0))
    assert (y[x == 256] == -1).all() and (y == -1).sum() * 4 == y.numel()
    with pytest.raises(UserError, match='multiples of a chunk: 4 slots'):
        Data(Settings(), c, 10, machine())


def test_ranges_of_byte_chunks_end_after_the_chunk_of_end_of_text():
    tokens = np.tile([1, 2, 256, 258, EOT, 258, 258, 258], 50)
    c = corpus(dict(a=tokens), a=(0.0, 0.51, 1.0))
    c.slots = 4
    c.pad = 258
    assert np.array_equal(Data(Settings(), c, 8, machine()).tokens, tokens[:208])


def test_too_few_tokens():
    with pytest.raises(UserError, match='12 tokens are too few for .*: add text, or lower seq_len'):
        data(dict(a=np.arange(12)))
    with pytest.raises(UserError, match='too few'):
        data(dict(a=np.arange(100)), stream=True, batch_size=50)


@pytest.mark.parametrize('n', [9, 10, 17, 18, 33])
def test_val_windows_score_every_token_but_the_first_once(n):
    tokens = torch.arange(n, dtype=torch.int16)

    def targets(*more):
        return [t for _, y in val_batches(tokens, 8, 2, -1, *more) for t in y[y >= 0].tolist()]
    assert targets() == list(range(1, n))
    halves = targets(None, 0, 2) + targets(None, 1, 2)
    assert sorted(halves) == list(range(1, n))           # two processes share the windows
    (_, y), = val_batches(tokens[:5], 8, 16, -1, None, 1, 2)     # as many each: this one predicts nothing
    assert y.shape == (1, 5) and (y == -1).all()
    assert targets(17) == list(range(1, min(n, 17)))     # whole windows of 17 tokens: two
    assert targets(3) == list(range(1, 9))               # but at least one


def test_bits_per_byte_of_a_uniform_model():
    """log2(V) * tokens / bytes, end-of-text scored but without bytes; the last window's filler is none."""
    class Uniform(torch.nn.Module):
        def forward(self, x, y, reduction):
            assert not self.training
            return None, torch.where(y >= 0, math.log(100.0), 0.0), {}
    tokens = torch.randint(0, 100, (1001,), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    lengths = torch.tensor([0] + [i % 5 + 1 for i in range(99)])  # end-of-text is 0
    model = Uniform()
    got = score_batches(model, val_batches(tokens, 64, 4, -1), lengths, machine())
    assert model.training                                # as it was
    n_bytes = lengths[tokens[1:].long()].sum().item()
    assert math.isclose(got['bits_per_byte'], math.log2(100) * 1000 / n_bytes, rel_tol=1e-6)
    assert math.isclose(got['loss'], math.log(100), rel_tol=1e-6)
    assert math.isclose(got['perplexity'], 100, rel_tol=1e-5)


@pytest.mark.parametrize('cost', [4.59375, 1000.0])
def test_costs_that_are_rough_or_large(cost):
    """In bfloat16 they are added up exactly; a perplexity that no float can hold is cut."""
    class Rough(torch.nn.Module):
        def forward(self, x, y, reduction):
            return None, torch.where(y >= 0, cost, 0.0).bfloat16(), {}
    batches = val_batches(torch.zeros(1001, dtype=torch.int16), 64, 4, -1)
    got = score_batches(Rough(), batches, torch.ones(1, dtype=torch.long), machine())
    assert got['loss'] == cost and got['perplexity'] == math.exp(min(cost, 700))


def test_corpus_refuses_bad_ranges(tmp_path):
    with pytest.raises(UserError, match='no data set'):
        Corpus(Settings(data={}, data_dir=str(tmp_path)), machine())
    for span in ((0.5, 0.2), (0, 2), (0, 1, 0), 0.5, (0.1,), ('a', 'b')):
        with pytest.raises(UserError, match='from, to'):
            Corpus(Settings(data={'a': span}, data_dir=str(tmp_path)), machine())


def test_what_is_read_and_what_is_scored():
    assert named_sets(Settings(data='a')) == ({'a': (0.0, 1.0, 1.0)}, ['a'])
    assert named_sets(Settings(data='a', eval_data='b')) == ({'a': (0.0, 1.0, 1.0)}, ['b'])
    both = named_sets(Settings(data='a,b', eval_data='c,a'))
    assert both == ({'a': (0.0, 1.0, 1.0), 'b': (0.0, 1.0, 1.0)}, ['c', 'a'])
    mixture = {'a': (0.0, 0.5), 'b': (0.0, 1.0, 2.5)}
    ranges, scored = named_sets(Settings(data=mixture))
    assert ranges == {'a': (0.0, 0.5, 1.0), 'b': (0.0, 1.0, 2.5)} and scored == ['a', 'b']
    assert named_sets(Settings(data=mixture, eval_data=['c', 'a']))[1] == ['c', 'a']


def test_a_surgery_sees_training_text():
    """The first batches of what is trained on, never the val set."""
    a = np.arange(1000, 2000)
    a[599] = EOT                                         # the first end of a document behind the half
    c = corpus(dict(a=a, b=np.arange(3000, 3050), c=np.arange(9)), a=(0.5, 1.0, 1.0), c=(0.5, 1.0, 1.0))
    c.s = Settings(surgery_batches=3, batch_size=2)
    c.machine = machine()
    batches = Corpus.calibration(c, 8)
    assert all(torch.equal(y, x + 1) for x, y in batches)        # every window is whole
    starts = [x[:, 0].tolist() for x, _ in batches]
    assert starts[:3] == [[1600, 1608], [1616, 1624], [1632, 1640]]
    assert starts[3:] == [[3000, 3008], [3016, 3024], [3032, 3040]]


def test_a_stream_reads_one_data_set_per_step():
    """The sets take turns. Each begins anew once per pass, so that what came before can be forgotten."""
    sets = dict(a=np.zeros(100), b=np.ones(300))
    d = data(sets, ranges=dict(a=(0.0, 1.0, 2.0)), stream=True, batch_size=2)
    last = {}
    for step in range(len(d.order(0)) // 2 + 1):
        n, begins = d.next_set()
        starts = d.next_starts()
        assert (d.set_of(starts.numpy()) == n).all()
        assert begins == (n not in last or not np.array_equal(starts, last[n] + d.T))
        last[n] = starts
    first = d.order(0).reshape(-1, 2)[:, 0]
    order = d.set_of(first).tolist()
    assert order.count(0) >= 10 and 1 <= order[:6].count(0) < 6 and 1 <= order[-6:].count(0) < 6


def test_too_much_to_plan():
    for settings in (dict(epochs=1e9), dict(batch_size=10 ** 10), dict(gradient_accumulation_steps=10 ** 10)):
        with pytest.raises(UserError, match='too many to plan|too large'):
            data(dict(a=np.arange(100)), **settings)
    with pytest.raises(UserError, match='too many to plan'):
        data(dict(a=np.arange(100)), ranges=dict(a=(0.0, 1.0, 1e12)))


def test_the_plan_goes_by_windows():
    """Half the batch: twice the steps of what is left; a max_iters counts steps, whatever they hold."""
    d = data(dict(a=np.arange(1000)), batch_size=10, epochs=2.0)
    assert d.plan(0) == (24, 24)
    d.take(100)
    again = data(dict(a=np.arange(1000)), batch_size=5, epochs=2.0)
    again.load_state(d.state())
    assert again.seen == 100 and again.plan(10) == (24, 10 + (d.count_windows(2.0) - 100) // 5)
    again.s.max_iters = 12
    assert again.plan(10) == (12, 12)
    few = data(dict(a=np.arange(100)), batch_size=50, epochs=1.0)
    assert few.plan(0) == (1, 1)                         # less text than a step reads: still a step
    few.take(50)
    assert few.plan(7) == (1, 7)                         # nothing is left, and no step is taken back


def test_tokens_that_no_tokenizer_has(tmp_path, data_dir):
    copy = tmp_path / 'toy_math'
    shutil.copytree(data_dir / 'toy_math', copy)
    tokens = np.fromfile(copy / 'val.bin', np.uint16)
    n_vocab = json.loads((copy / 'meta.json').read_text())['tokenizer']['vocab_size']
    tokens[7] = n_vocab                                  # the first that it does not have
    tokens.tofile(copy / 'val.bin')
    with pytest.raises(UserError, match=f'val.bin holds token {n_vocab}, which its tokenizer does not have'):
        load_bin(copy, 'val')


def test_shares_of_routes():
    """Counted where some get nothing; where all get something, the gates are added up; 0 if none does."""
    hard = torch.tensor([[[0.7, 0.3, 0.0], [0.0, 0.6, 0.4]]])
    soft = torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.2, 0.3]]])
    routes = dict(hard=hard, soft=soft, none=torch.zeros(1, 2, 3))
    model = SimpleNamespace(eval=lambda: None, train=lambda: None, routes=lambda x: routes)
    shares = route_shares(model, None, Machine('cpu'))
    assert shares == dict(hard=[0.25, 0.5, 0.25], soft=[0.6, 0.2, 0.2], none=[0.0, 0.0, 0.0])
