"""Several runs as one model, whose probabilities are the mean of theirs."""

import json

import pytest
import torch

from plumbing.checkpoint import load_checkpoint, run_tokenizer
from plumbing.together import Together
from test_eval_blimp import make, one_by_one, write_pairs


def test_mean_of_probabilities():
    models = [make('moep'), make('moduleformer'), make('stlm_depth')]
    idx = torch.randint(257, (2, 20), generator=torch.Generator().manual_seed(1))
    prob = sum(model(idx)[0].softmax(-1) for model in models) / 3
    nats = -prob[:, :-1].gather(-1, idx[:, 1:, None])[..., 0].log()
    together = Together(models)(idx[:, :-1], idx[:, 1:].masked_fill(idx[:, 1:] < 20, -1), 'none')[1]
    torch.testing.assert_close(together, nats * (idx[:, 1:] >= 20))


def test_scripts(run, smoke, tmp_path):
    folders = [smoke('config/moep.py'), smoke('config/gpt2.py', '--max_iters=4')]
    models, ckpts = zip(*map(load_checkpoint, folders))
    score = one_by_one(Together(models), 'The dogs.', 'harness', run_tokenizer(ckpts[0]))
    data = write_pairs(tmp_path / 'd', {'p': [('The dogs.', 'A')]})
    blimp = ['--together', '--data', data, '--json', data / 'x.json']
    run('eval_blimp.py', *folders, *blimp, here=True)
    *_, last = json.loads((data / 'x.json').read_text())['runs']
    assert last['paradigms']['p']['good'] == pytest.approx([score], abs=1e-4)
    losses = [float(run('sample.py', *runs, '--score', data / 'p.jsonl', here=True).stdout
                    .split()[2]) for runs in (folders[:1], folders[1:], folders)]
    assert losses[2] < (losses[0] + losses[1]) / 2       # Jensen
    other = smoke('config/stlm_bytes.py')
    assert 'one tokenizer' in run('eval_blimp.py', folders[0], other, *blimp, code=2).stderr
