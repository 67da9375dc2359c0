"""eval_length.py: the loss at each position by hand, and as a user runs it."""

import json
import math
import sys

import numpy as np
import pytest
import torch

import eval_length
import prepare
from errors import UserError
from loader import as_tensor, fetch
from machine import Machine
from train import load_checkpoint


def test_loss_by_position_one_window_at_a_time(smoke, data_dir):
    model, ckpt = load_checkpoint(smoke('config/moduleformer.py'))
    tokens = as_tensor(prepare.load_bin(data_dir / 'toy_stories', 'val')[:700], 'cpu')
    found = eval_length.loss_by_position(model, tokens, 200, 90, 4, Machine('cpu'))
    windows = [fetch(tokens, torch.arange(start, start + 201)) for start in (0, 90, 180, 270, 360, 450)]
    for t in (0, 1, 127, 128, 199):                      # one token, given all before it
        with torch.no_grad():
            logits = torch.cat([model(w[None, :t + 1])[0][:, -1] for w in windows])
        nats = -logits.log_softmax(-1)[range(6), [w[t + 1] for w in windows]].mean()
        assert math.isclose(found[t].item(), nats.item(), rel_tol=1e-5)


def test_as_a_user(run, smoke, data_dir, tmp_path, monkeypatch):
    folder, rotary = smoke('config/moduleformer.py'), smoke('config/llama.py')
    done = run('eval_length.py', folder, rotary, '--length=160', '--stride=3000', f'--json={tmp_path}/l.json')
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines[2:5]] == [['0', 'to', '63'], ['64', 'to', '127'], ['128', 'to', '159']]
    assert lines[5].startswith('moduleformer: trained at 128') and lines[6].startswith('llama: trained at 64')
    rows = json.loads((tmp_path / 'l.json').read_text())['runs']
    assert [len(row['loss']) for row in rows] == [160, 160] and [row['trained'] for row in rows] == [128, 64]
    for row, column in zip(rows, (3, 4)):                # each line the mean of its own positions
        assert [line.split()[column] for line in lines[2:5]] == [f"{np.mean(row['loss'][a:b]):.4f}" for a, b in ((0, 64), (64, 128), (128, 160))]
    seen = []                                            # dropout is off
    with monkeypatch.context() as m:
        m.setattr(eval_length, 'loss_by_position', lambda model, *_: seen.append(model.training) or torch.zeros(64))
        m.setattr(sys, 'argv', ['eval_length.py', str(smoke('config/gpt2.py')), '--length=64'])
        eval_length.main()
    assert seen == [False]
    for args, message in (([smoke('config/moep.py'), '--length=128'], 'table of 64 positions'), ([folder, '--length=0'], 'at least 1'),
                          ([folder, '--length=50000'], 'too few'), ([folder, '--data=nothing'], 'nothing'),
                          ([smoke('config/stlm_bytes.py')], 'chunks of bytes'),
                          ([folder, f'--data={data_dir}/toy_bytes'], 'chunks of bytes')):
        monkeypatch.setattr(sys, 'argv', ['eval_length.py', *map(str, args)])
        with pytest.raises(UserError, match=message):
            eval_length.main()
