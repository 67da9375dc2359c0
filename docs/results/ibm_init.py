"""
Train a ModuleFormer whose modules start as in IBM's release: uniform within ±1/fan-in, far smaller
than ours. Everything else is train.py.

    python docs/results/ibm_init.py config/paper/moduleformer/small.py --out_dir=out/ibm
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # noqa: E402
from moduleformer import ModuleFormer  # noqa: E402
from plumbing.cli import run_main  # noqa: E402

ours = ModuleFormer.init_weights


@torch.no_grad()
def init_weights(model):
    ours(model)
    for p in model.parameters():
        if p.dim() == 3:                                 # a stack of modules: (E, in, out)
            p.uniform_(-1 / p.size(1), 1 / p.size(1))


ModuleFormer.init_weights = init_weights

if __name__ == '__main__':
    run_main(train.main)
