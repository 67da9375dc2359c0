"""
What a token's choice says about the token: the numbers of docs/routes.md.

    python docs/results/routes.py routes.json out/moep out/moduleformer ...

For every layer, over 60,000 validation tokens (of all data sets together): the mutual information
between a token's heaviest choice and its class, its id, and its data set, each beside that of
shuffled choices; the load; and the tokens that each choice serves most. A gate of Self-MoE chooses
nothing, so the quartile of its size stands for a choice.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from plumbing.checkpoint import load_checkpoint, run_tokenizer  # noqa: E402
from plumbing.data import load_bin, named_sets  # noqa: E402
from plumbing.settings import Settings  # noqa: E402
from tools.explore import beside_chance, look, mutual_information, token_class, tokens_served  # noqa: E402

TOKENS = 60_000


@torch.no_grad()
def read_run(run):
    """-> ids, data sets and classes of the tokens (N each), and {layer: gates (N, choices)}."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model, ckpt = load_checkpoint(run, device)
    tokenizer = run_tokenizer(ckpt)
    s = Settings(**ckpt['settings'])
    names = named_sets(s)[1]
    length = s.seq_len or model.config.block_size
    ids, sets, gates = [], [], {}
    for name in names:
        tokens = load_bin(Path(s.data_dir, name), 'val')[:TOKENS // len(names)].astype(np.int64)
        rows = torch.from_numpy(tokens[:len(tokens) // length * length]).view(-1, length)
        for some in rows.split(8):
            for layer, gate in look(model, some.to(device), {}).items():
                gates.setdefault(layer, []).append(gate.numpy())
        ids += rows.flatten().tolist()
        sets += [name] * rows.numel()
    texts = [tokenizer.decode([i]) for i in ids]
    classes = [token_class(text, before) for text, before in zip(texts, ['', *texts])]
    gates = {layer: np.concatenate(parts) for layer, parts in gates.items()}
    return tokenizer, np.array(ids), np.array(sets), np.array(classes), gates


def measure(layer, tokenizer, ids, sets, classes, gate):
    heaviest = gate.argmax(1)
    share = gate / gate.sum(1, keepdims=True)
    if layer.startswith('gate.'):
        heaviest = np.searchsorted(np.quantile(share[:, 1], [0.25, 0.5, 0.75]), share[:, 1])
    served = [[(tokenizer.decode([i]), count, percent) for i, count, percent, _ in tokens[:6]]
              for tokens in tokens_served(share, ids)]
    return dict(
        choices=gate.shape[1], load=(np.bincount(heaviest) / len(heaviest)).tolist(),
        share=share.mean(0).tolist(), entropy=mutual_information(heaviest, heaviest),
        by_class=beside_chance(classes, heaviest), by_token=beside_chance(ids, heaviest),
        by_set=beside_chance(sets, heaviest), served=served)


if __name__ == '__main__':
    found = {}
    for run in sys.argv[2:]:
        *about, gates = read_run(run)
        found[run] = {layer: measure(layer, *about, gate) for layer, gate in gates.items()}
        for layer, row in found[run].items():
            print(run, layer, {key: row[key] for key in ('entropy', 'by_class', 'by_token', 'by_set')})
    Path(sys.argv[1]).write_text(json.dumps(found).replace('}, ', '},\n ') + '\n')
