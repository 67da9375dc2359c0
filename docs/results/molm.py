"""
The paper's Table 2: how long MoLM takes to read 32 x 1,024 tokens, beside dense models in the same code.

    python docs/results/molm.py molm.json                    # all six; one large GPU, three minutes
    python docs/results/molm.py molm.json molm_4b_k2 410M    # some of them

The weights are random and bfloat16. The dense models have the layers, heads and width of Pythia's, but a
tied head. "Compiled" means that the layers are.
"""

import gc
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import moep  # noqa: E402
from plumbing.compiled import compile_model  # noqa: E402
from plumbing.machine import Machine  # noqa: E402
from plumbing.models import sketch  # noqa: E402
from plumbing.settings import read_settings  # noqa: E402
from tools import measure as timing  # noqa: E402

ROWS, T = 32, 1024
DENSE = {'410M': (24, 16, 1024), '1.4B': (24, 16, 2048), '2.8B': (32, 32, 2560)}     # layers, heads, width


def dense(n_layer, n_head, n_embd):
    return moep, dict(vocab_size=50304, n_layer=n_layer, n_head=n_head, n_embd=n_embd, n_parallel=0)


def molm(name):
    _, module, keys = read_settings([f'{ROOT}/config/paper/moduleformer/{name}.py'])
    return module, keys


def measure(name, machine):
    torch._dynamo.reset()                                # it keeps the last model
    gc.collect()
    before = torch.cuda.memory_allocated()
    module, keys = dense(*DENSE[name]) if name in DENSE else molm(name)
    model = sketch(module, {**keys, 'block_size': T})        # without memory
    total, active = model.count_params()
    model = model.to(torch.bfloat16).to_empty(device=machine.device).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(std=p.size(1) ** -0.5)        # attention logits as at the start of training
        else:
            p.data.fill_(1.0)                            # of norms; biases do not matter here
    torch.cuda.reset_peak_memory_stats()
    plain = timing.prefill(model, ROWS, T, machine)
    gib = (torch.cuda.max_memory_allocated() - before) / 2 ** 30
    compiled = timing.prefill(compile_model(model).eval(), ROWS, T, machine)
    return dict(name=name, total=total, active=active, gib=gib, ms=plain['ms'], compiled_ms=compiled['ms'],
                tokens_per_s=compiled['tokens_per_s'])


def main():
    file = Path(sys.argv[1])
    names = sys.argv[2:] or ['410M', '1.4B', 'molm_4b_k2', '2.8B', 'molm_4b_k4', 'molm_8b_k2']
    machine = Machine('cuda', 'bfloat16')
    found = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, rows=[])
    for name in names:
        row = measure(name, machine)
        found['rows'].append(row)
        file.write_text(json.dumps(found) + '\n', encoding='utf-8')
        line = ('{name:12} {total:14,} parameters, {active:13,} active: {ms:7.1f} ms, compiled '
                '{compiled_ms:7.1f} ms, {tokens_per_s:9,.0f} tokens/s, {gib:5.1f} GiB')
        print(line.format(**row), flush=True)
        torch.cuda.empty_cache()


if __name__ == '__main__':
    main()
