"""papers.parity and parity_blimp: the comparisons themselves."""

import pytest
import torch

import moep
from eval_blimp import read_pairs
from papers import parity_blimp
from papers.parity import VOCAB, compare
from plumbing.checkpoint import load_checkpoint, run_tokenizer
from plumbing.cli import UserError


@pytest.mark.parametrize('factor', [1, 1 + 1e-6])
def test_compare(factor, capsys):
    """A weight that is wrong by a millionth is found, if only in its gradient."""
    model = moep.MoEP(moep.MoEPConfig(VOCAB, 32, n_head=2, n_embd=16, n_parallel=1, dropout=0.0,
                                      n_head_parallel=1, n_embd_parallel=8)).double()
    copy = lambda theirs: {name: p * (factor if name == 'parallel.0.fc_bias' else 1)
                           for name, p in theirs.named_parameters()}
    run = lambda theirs, idx: (theirs(idx)[0], {})
    compare('itself', model, run, model, copy, differs=factor != 1)
    assert ('differs' if factor != 1 else 'equal') in capsys.readouterr().out
    with pytest.raises(UserError, match='this should'):
        compare('itself', model, run, model, copy, differs=factor == 1)


# ---- BLiMP --------------------------------------------------------------------------------------

@pytest.mark.parametrize('swapped', [0, 1])
def test_compare_scores(smoke, data_dir, swapped):
    """With the log-probability of each sentence alone, all is equal; a swapped pair is found."""
    model, ckpt = load_checkpoint(smoke('config/moep.py'))
    tokenizer, paradigms = run_tokenizer(ckpt), read_pairs(data_dir / 'toy_blimp')
    name, paradigm = next(iter(paradigms.items()))
    paradigm.pairs = paradigm.pairs[:20]

    def score(text):
        ids = torch.tensor([tokenizer.end + tokenizer.encode(' ' + text)])
        return -model(ids[:, :-1], ids[:, 1:], reduction='none')[1].sum().item()
    pairs = [(texts, [score(text) for text in texts]) for texts in paradigm.pairs]
    for _, scores in pairs[:swapped]:
        scores.reverse()
    accuracy = {name: 100 * sum(good >= bad for _, (good, bad) in pairs) / 20}
    row = parity_blimp.compare('', (accuracy, pairs), model, tokenizer, {name: paradigm}, 'harness')
    assert f'{20 - swapped} of     20        {1 - swapped} of  1' in row
    assert ('0.00000' in row) == (not swapped)
