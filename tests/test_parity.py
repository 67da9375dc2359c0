"""papers.parity and parity_blimp: the comparisons themselves, and, where NANOPATHS_RELEASES names a
folder with clones of the others' repositories (the scripts' help lists them), ours against theirs.
"""

import os
from pathlib import Path

import pytest
import torch

import moep
from conftest import run_script
from eval_blimp import read_pairs
from papers import parity_blimp
from papers.parity import VOCAB, compare
from plumbing.checkpoint import load_checkpoint, run_tokenizer
from plumbing.cli import UserError
from tools.export_hf import export

CLONES = dict(papaformer='Decoder_Only_Transformer_Research', moduleformer='ModuleFormer',
              stlm='SuperTinyLanguageModels', moep='BabyLM-Project')


@pytest.fixture
def releases():
    if 'NANOPATHS_RELEASES' not in os.environ:
        pytest.skip('NANOPATHS_RELEASES is not set')
    return Path(os.environ['NANOPATHS_RELEASES'])


@pytest.mark.slow
@pytest.mark.parametrize('name', CLONES)
def test_releases(releases, name):
    table = run_script('papers.parity', name, releases / CLONES[name]).stdout
    assert 'equal' in table


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

def ours(smoke, data):
    model, ckpt = load_checkpoint(smoke('config/moep.py'))
    return model, run_tokenizer(ckpt), read_pairs(data)


@pytest.mark.parametrize('swapped', [0, 1])
def test_compare_scores(smoke, data_dir, swapped):
    """With the log-probability of each sentence alone, all is equal; a swapped pair is found."""
    model, tokenizer, paradigms = ours(smoke, data_dir / 'toy_blimp')
    name, paradigm = next(iter(paradigms.items()))
    paradigm.pairs = paradigm.pairs[:20]

    def score(text):
        ids = torch.tensor([tokenizer.end + tokenizer.encode(' ' + text)])
        return -model(ids[:, :-1], ids[:, 1:], reduction='none')[1].sum().item()
    pairs = [(texts, [score(text) for text in texts]) for _, *texts in paradigm.pairs]
    for _, scores in pairs[:swapped]:
        scores.reverse()
    accuracy = {name: 100 * sum(good >= bad for _, (good, bad) in pairs) / 20}
    row = parity_blimp.compare('', (accuracy, pairs), model, tokenizer, {name: paradigm}, 'harness')
    assert f'{20 - swapped} of     20        {1 - swapped} of  1' in row
    assert ('0.00000' in row) == (not swapped)


@pytest.mark.slow
def test_babylm(releases, smoke, data_dir, tmp_path, monkeypatch):
    """The pipeline on an exported folder."""
    monkeypatch.syspath_prepend(releases / 'evaluation-pipeline-2025')
    data = data_dir / 'toy_blimp'
    export(smoke('config/moep.py'), tmp_path / 'hf')
    theirs = parity_blimp.run_babylm(tmp_path / 'hf', data)
    row = parity_blimp.compare('', theirs, *ours(smoke, data), 'babylm2025')
    n = len(theirs[1])
    assert f'{n:6,} of {n:6,}' in row
