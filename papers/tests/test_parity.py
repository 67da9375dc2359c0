"""papers.parity: the comparison itself."""

from contextlib import nullcontext

import pytest

import moep
from papers.parity import VOCAB, compare
from plumbing.cli import UserError


@pytest.mark.parametrize('factor', [1, 1 + 1e-6])
def test_compare(factor):
    """A weight that is wrong by a millionth is found, if only in its gradient."""
    model = moep.MoEP(moep.MoEPConfig(VOCAB, 32, n_head=2, n_embd=16, n_parallel=1, dropout=0.0,
                                      n_head_parallel=1, n_embd_parallel=8)).double()
    copy = lambda theirs: {name: p * (factor if name == 'parallel.0.fc_bias' else 1)
                           for name, p in theirs.named_parameters()}
    run = lambda theirs, idx: (theirs(idx)[0], {})
    wrong = pytest.raises(UserError, match='should be equal') if factor > 1 else nullcontext()
    with wrong:
        compare('itself', model, run, model, copy)
