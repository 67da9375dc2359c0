"""Loss, modules used, bits of choice and domain, and the loss after pruning to 27 and 18 of 36 modules
by Max and Sum, of runs NAME_SEED; the rows of papers/results/moduleformer_balance.jsonl.

    python measure_balance.py ROWS.jsonl toy_stories,toy_math,toy_lingo out/mi_1 out/switch_1
"""
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch

from moduleformer import count_usage, prune_experts
from plumbing.bins import load_bin, score_batches, val_batches
from plumbing.checkpoint import load_checkpoint, run_tokenizer
from plumbing.machine import Machine
from tools.explore import mutual_information

DOMAINS = ['toy_stories', 'toy_math', 'toy_lingo']


def entropy(p):
    return float(-(p * p.clamp(min=1e-12).log2()).sum(-1).mean())


@torch.no_grad()
def gates(model, batches):
    found = {}
    for x, y in batches:
        for pool, gate in model.routes(x).items():
            found.setdefault(pool, []).append(gate[y >= 0])
    return {pool: torch.cat(parts) for pool, parts in found.items()}


def frequency(count, normalise):
    return count / (count.max() if normalise == 'max' else count.sum())


def kept(usage, normalise, threshold):
    """How many modules prune_experts keeps: the two most used of a pool always stay."""
    stay = 0
    for count in usage.values():
        share = frequency(count, normalise)
        share[share.topk(2).indices] = math.inf
        stay += int((share >= threshold).sum())
    return stay


def measure(run, domains):
    model, ckpt = load_checkpoint(run, 'cpu')
    tokenizer, T, machine = run_tokenizer(ckpt), model.config.block_size, Machine('cpu')
    text = {name: (load_bin(f'data/{name}', 'train')[:6400], load_bin(f'data/{name}', 'val')[:6400])
            for name in DOMAINS}
    batches = lambda tokens: val_batches(tokens, T, 16, tokenizer.pad)
    score = lambda model, name: score_batches(model, batches(text[name][1]), tokenizer,
                                              machine)['loss']
    row = dict(loss={name: round(score(model, name), 4) for name in DOMAINS})
    model.eval()
    found = {name: gates(model, batches(text[name][1][:3200])) for name in DOMAINS}
    bits, load, total, unused = [], [], [], 0
    for pool in found[DOMAINS[0]]:
        each = [found[name][pool] for name in DOMAINS]
        size = min(map(len, each))                       # as many tokens of each domain
        gate = torch.cat([part[:size] for part in each])
        bits.append(mutual_information(np.repeat(np.arange(3), size), gate.argmax(1).numpy()))
        picks = (gate > 0).float().mean(0)
        picks = picks / picks.sum()
        unused += int((picks < 0.01).sum())
        load.append(entropy(picks) / math.log2(len(picks)))
        total.append(float(gate.sum(1).mean()))
    row |= dict(bits=[round(b, 4) for b in bits], bits_mean=round(float(np.mean(bits)), 4),
                unused=[unused, 36], load_entropy=round(float(np.mean(load)), 4),
                gates_sum=round(float(np.mean(total)), 4), pruned=[])
    for name in domains:
        usage = count_usage(model, batches(text[name][0]))
        for normalise in ('max', 'sum'):
            values = sorted({float(v) for count in usage.values()
                             for v in frequency(count, normalise)})
            for least in (27, 18):
                threshold = max(v for v in values if kept(usage, normalise, v) >= least)
                pruned, table = prune_experts(model, usage, threshold, normalise)
                row['pruned'].append(dict(
                    data=name, normalise=normalise, modules=sum(pool['after'] for pool in table),
                    threshold=round(threshold, 4), loss=round(score(pruned, name), 4)))
                model.eval()
    return row


if __name__ == '__main__':
    for path in sys.argv[3:]:
        name, seed = Path(path).name.rsplit('_', 1)
        row = dict(run=name, seed=int(seed)) | measure(path, sys.argv[2].split(','))
        with open(sys.argv[1], 'a') as file:
            file.write(json.dumps(row) + '\n')
