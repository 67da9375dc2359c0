"""What is checked and counted before a run."""

from types import SimpleNamespace

import pytest
import torch

import moduleformer
import moep
import stlm
from plumbing.cli import UserError
from plumbing.machine import Machine
from plumbing.models import sketch
from plumbing.plan import check_model, check_size, describe, set_vocabulary, show_sample, show_size_only
from plumbing.settings import Settings


def test_a_check_leaves_no_trace_in_the_model():
    """A router may keep its load in a buffer: the forward pass on zeros must not count."""
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('seen', torch.zeros(()))
            self.register_buffer('table', torch.ones(2), persistent=False)

        def forward(self, idx, targets=None):
            self.seen += idx.numel()
            self.table *= 2
            return None, None, {}
    model = Counting()
    check_model(model, Settings(), SimpleNamespace(T=8), Machine('cpu'))
    assert model.seen == 0 and model.table.tolist() == [1, 1]


def test_a_buffer_that_forward_adds():
    """Its checkpoint would not fit the model that is built from the config."""
    class Late(torch.nn.Module):
        def forward(self, idx, targets=None):
            self.register_buffer('seen', torch.zeros(()))
            return None, None, {}
    with pytest.raises(UserError, match='moep: forward adds a buffer, seen: register it in __init__'):
        check_model(Late(), Settings(), SimpleNamespace(T=8), Machine('cpu'))


def test_a_check_is_of_training():
    """A surgery leaves a model in eval mode, where it may return no auxiliary loss."""
    class Exits(torch.nn.Linear):
        def forward(self, idx, targets=None):
            return None, None, dict(exit=self.weight.sum()) if self.training else {}
    s = Settings(aux_weights=dict(exit=1.0))
    check_model(Exits(2, 2).eval(), s, SimpleNamespace(T=8), Machine('cpu'))


def vocabulary(module, keys, n_vocab=100, slots=1):
    """The size that the model gets for this data."""
    corpus = SimpleNamespace(tokenizer=SimpleNamespace(n_vocab=n_vocab), slots=slots, folder='data/a')
    set_vocabulary(module, keys, corpus)
    return keys['vocab_size']


def test_a_vocabulary_is_the_tokenizers_or_larger():
    assert vocabulary(moep, {}) == 100 and vocabulary(moep, dict(vocab_size=128)) == 128
    with pytest.raises(UserError, match='vocab_size is 64, but data/a has a vocabulary of 100$'):
        vocabulary(moep, dict(vocab_size=64))
    chunks = dict(byte_limit=12, block_size=130)
    assert vocabulary(stlm, {**chunks}, 259, slots=13) == 259
    with pytest.raises(UserError, match='vocab_size is 260'):        # symbols are counted from the end
        vocabulary(stlm, dict(chunks, vocab_size=260), 259, slots=13)


def test_the_model_reads_what_the_data_holds():
    with pytest.raises(UserError, match='data/a holds chunks of 4 slots, but moep reads tokens: prepare it '
                                        'without --chunks or --sentences$'):
        vocabulary(moep, {}, 259, slots=4)
    with pytest.raises(UserError, match='data/a holds tokens, but stlm reads chunks of 9 slots: prepare it '
                                        'with --chunks 8$'):
        vocabulary(stlm, dict(byte_limit=8, block_size=90))
    with pytest.raises(UserError, match='stlm: byte_limit'):
        vocabulary(stlm, dict(byte_limit=-1))


@pytest.mark.parametrize('shard, cuda, size', [
    (False, False, 16), (False, True, 16), (True, False, 16), (True, True, 4 + 16 / 8)])
def test_what_training_takes(shard, cuda, size):
    """Per parameter: weight, gradient and two moments of four bytes each. Eight GPUs share them, but each
    first holds the whole model; processes on a CPU share its memory."""
    keys = dict(vocab_size=100, n_layer=1, n_embd=16, n_ffd=2, d_ffd=16)
    count = sketch(moduleformer, keys).count_params()[0]
    machine = SimpleNamespace(cuda=cuda, world=8, memory=lambda: size * count)
    check_size(moduleformer, keys, Settings(shard=shard), machine)
    machine.memory = lambda: size * count - 1
    with pytest.raises(UserError, match='a model of .* parameters takes .* to train, and this machine has'):
        check_size(moduleformer, keys, Settings(shard=shard), machine)


def test_what_a_log_says_of_a_run():
    """Of the parameters, those that train; of a step, the tokens of all its windows."""
    model = moep.Model(moep.Config(vocab_size=10, block_size=8, n_layer=1, n_embd=8, n_head=1, n_parallel=0))
    model.wte.requires_grad_(False)
    s = Settings(batch_size=3, gradient_accumulation_steps=2)
    about = describe(model, s, SimpleNamespace(rows=12, T=8), Machine('cpu'), steps=5)
    total, active = model.count_params()
    assert (about['parameters'], about['active'], about['trained']) == (total, active, total - 10 * 8)
    assert (about['steps'], about['tokens_per_step']) == (5, 12 * 8)


def test_a_sample_goes_on_after_the_last_pauses(capsys):
    """What follows pauses was learned; without any, after an end-of-text, which is not shown."""
    begun, shown = [], []

    def generate(idx, *_, **__):
        begun.append(idx.tolist())
        return torch.cat((idx, torch.tensor([[5, 6]])), 1)
    model = SimpleNamespace(eval=lambda: begun.append('eval'), routes=lambda idx: {}, generate=generate,
                            config=SimpleNamespace(block_size=12))
    tokenizer = SimpleNamespace(eot=0, pauses=[9], show=lambda ids: shown.append(ids) or '')
    for text in ([1, 9, 2, 9, 3, 4, 9, 9], [1, 2, 3, 4, 5, 6, 9, 9]):    # half a window of it is looked at
        corpus = SimpleNamespace(tokenizer=tokenizer, scored=['a'], pad=9, val=dict(a=torch.tensor(text)))
        show_sample(model, Settings(), corpus, Machine('cpu'))
    assert begun == ['eval', [[1, 9, 2, 9]], 'eval', [[0]]] and shown == [[9, 2, 9, 5, 6], [5, 6]]


@pytest.mark.parametrize('data, line', [
    ('toy_stories', 'python eval_blimp.py out/a # how many minimal pairs it gets right'),
    ('play', 'python eval_blimp.py out/a --data data/blimp # how many minimal pairs it gets right '
             '(after: python prepare.py blimp)'),
    ('toy_math', 'python -m tools.exact_answer out/a # how many problems it solves')])
def test_what_to_do_next(capsys, data, line):
    """The toy pairs are for models of the toy corpora: they are in their words."""
    model = SimpleNamespace(eval=lambda: None, generate=lambda idx, *_, **__: idx, routes=lambda idx: {})
    tokenizer = SimpleNamespace(eot=0, pauses=[], show=lambda ids: '')
    corpus = SimpleNamespace(tokenizer=tokenizer, scored=[data])
    show_sample(model, Settings(out_dir='out/a'), corpus, Machine('cpu'))
    lines = [' '.join(each.split()) for each in capsys.readouterr().out.splitlines()]
    assert line in lines
    assert 'python -m tools.compare out/a # a table; name more runs to compare them' in lines
    show_sample(model, Settings(out_dir='out/my run'), corpus, Machine('cpu'))
    assert "python -m tools.compare 'out/my run'" in capsys.readouterr().out     # as a shell takes it


@pytest.mark.slow
def test_a_model_too_large_to_build_is_counted(capsys):
    keys = dict(vocab_size=50304, n_layer=1, n_embd=2048, n_ffd=64, d_ffd=8192)
    s = Settings(model='moduleformer', max_iters=0)
    assert show_size_only(moduleformer, keys, s, Machine('cpu'))
    told = capsys.readouterr().out
    assert 'parameters' in told and 'a model of this size is counted, not built' in told
    small = dict(vocab_size=100, n_layer=1, n_embd=16, n_ffd=2, d_ffd=16)
    assert not show_size_only(moduleformer, small, s, Machine('cpu'))
    assert show_size_only(moduleformer, small, s, Machine('cpu'), why_no_data='no data here')
    assert 'data      a vocabulary of 100 is assumed: no data here' in capsys.readouterr().out
    s.max_iters = 5
    assert not show_size_only(moduleformer, keys, s, Machine('cpu'))
