"""plumbing/decode.py without its CUDA graph, which test_gpu.py records: padding, the place of the
last token, and what happens when the context is full."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from plumbing import decode
from test_contract import build

MACHINE = SimpleNamespace(cuda=True, world=1, dtype=torch.float32, autocast=nullcontext)


@pytest.mark.parametrize('name', ['gpt2', 'moep', 'gumbel2', 'moduleformer', 'selfmoe', 'dense',
                                  'loop'])
def test_the_same_tokens(name, monkeypatch):
    """Far beyond the context, greedy and drawn, from prompts of any length."""
    lengths = []
    monkeypatch.setattr(decode, 'CUDAGraphStep', lambda predict, machine, plain_calls: (
        lambda ids, last: lengths.append(ids.size(1)) or predict(ids, last)))
    torch.manual_seed(0)
    faster = dict(query_block=256) if name == 'moduleformer' else {}
    model = build(name, block_size=70, **faster).eval()
    for p in model.parameters():
        p.data.add_(0.05 * torch.randn_like(p))          # so that tokens differ
    writer = decode.fast_writer(model, MACHINE)
    for T, temperature in ((3, 0.0), (65, 0.8), (90, 0.0)):
        prompt = torch.randint(37, (2, T))
        expected, ids = ([torch.manual_seed(1), m.generate(prompt, 8, temperature, 5)][1]
                         for m in (model, writer))
        assert torch.equal(ids, expected)
    assert {*lengths} == {256 if name == 'moduleformer' else 70}    # which has no limit
    assert model(prompt[:, :9])[0].shape[1] == 9         # the model itself is as before


def test_where_the_model_writes_itself():
    model = build('gpt2')
    cpu = SimpleNamespace(cuda=False, world=1)
    assert decode.fast_writer(model, cpu) is decode.fast_writer(model, MACHINE, rows=65) is model
    for model in (build('stlm_all'), build('stlm_depth')):
        assert decode.fast_writer(model, MACHINE) is model
