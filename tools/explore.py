"""
Where do tokens go, and does a choice mean something? One page to look at in a browser.

    python -m tools.explore out/moep                        # writes out/moep/explore.html
    python -m tools.explore out/moep out/mine               # out/moep/explore_moep_mine.html
    python -m tools.explore out/moep --prompt "The dogs near the tree are happy."
    python -m tools.explore out/moep --text notes.txt --tokens 20000 --out routes.html
    python -m tools.explore out/moep --live                 # out/moep/live.html: the model itself

The page needs no network. It shows a text as tokens, coloured by their choice in a layer; the gates
and the loss of each; the tokens that a choice serves most; and what the class of a token says about
its choice, beside chance. Statistics are of the validation set, which it shows if you give no text.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from plumbing.bins import load_bin, val_batches
from plumbing.checkpoint import load_checkpoint, run_tokenizer
from plumbing.cli import Parser, UserError, between, reading, run_main
from plumbing.machine import Machine
from plumbing.tokenizer import shared_tokenizer
from tools.compare import write_page
from tools.live import write_live

CLASSES = ['punctuation', 'digits', 'function word', 'word start', 'word continued', 'space, end']
FUNCTION_WORDS = set('''a an the this that these those my your his her its our their some any no
    every each all both i you he she it we they me him us them who whom whose which what there
    and or but nor so yet if because while although though than as when where how why until unless
    of in on at by for with from to into onto over under about after before between through near
    up down out off am is are was were be been being do does did have has had having
    will would shall should can could may might must not n't 's 't 'm 're 've 'll 'd'''.split())


def token_class(text, before='a'):
    """One of CLASSES. `before` is the token before: it may end inside the same word."""
    word = text.strip().lower()
    begins = text[:1].isspace() or not before[-1:].isalnum()
    if not word:
        return 'space, end'
    if word in FUNCTION_WORDS and (begins or word[0] == "'"):
        return 'function word'
    if word[0].isnumeric():
        return 'digits'
    if not any(letter.isalnum() for letter in word):
        return 'punctuation'
    return 'word start' if begins else 'word continued'


def mutual_information(classes, choices):
    """Return in bits how much one of two sequences of equal length says about the other."""
    a, row = np.unique(classes, return_inverse=True)
    b, column = np.unique(choices, return_inverse=True)
    joint = np.zeros((len(a), len(b)))
    np.add.at(joint, (row, column), 1 / len(row))
    apart = joint.sum(1, keepdims=True) * joint.sum(0)   # what it would be if they were independent
    seen = joint > 0
    return max(0.0, float((joint[seen] * np.log2(joint[seen] / apart[seen])).sum()))


def beside_chance(classes, choices):
    """-> the mutual information, and its mean over 20 shuffles of the choices."""
    _, classes = np.unique(classes, return_inverse=True)     # numbers are sorted faster than words
    rng = np.random.default_rng(0)
    shuffled = [mutual_information(classes, rng.permutation(choices)) for _ in range(20)]
    return mutual_information(classes, choices), float(np.mean(shuffled))


def tokens_served(share, ids):
    """Return for each choice the 12 tokens that it serves most, as [id, count, its part of their
    gates, three positions where it gets most]. A token counts if it occurs five times."""
    tokens, row, counts = np.unique(ids, return_inverse=True, return_counts=True)
    part = np.zeros((len(tokens), share.shape[1]))
    np.add.at(part, row, share)
    part *= (counts >= 5)[:, None] / counts[:, None]
    served = [[] for _ in part.T]
    for choice, listed in enumerate(served):
        for i in np.argsort(-part[:, choice], kind='stable')[:12]:
            places = np.flatnonzero(row == i)
            best = places[np.argsort(-share[places, choice], kind='stable')[:3]]
            if part[i, choice] >= 0.005:
                mean = round(part[i, choice], 4)
                listed.append([int(tokens[i]), int(counts[i]), mean, best.tolist()])
    return served


def describe_layer(gate, ids, classes, sets):
    """The statistics of one layer, from its (N, choices) gates."""
    total = gate.sum(1, keepdims=True)
    share = gate / np.where(total > 0, total, 1)
    top = np.where(total[:, 0] > 0, gate.argmax(1), -1)  # -1: the token takes none
    is_top = top[:, None] == np.arange(gate.shape[1])
    load = share.mean(0)
    entropy = lambda share: -(share * np.log2(np.maximum(share, 1e-12))).sum(-1)
    heat = []                                            # name, tokens, those of each choice
    for name in dict.fromkeys(sets.tolist()):
        for kind in [name, *CLASSES]:
            rows = (sets == name) & ((classes == kind) | (kind == name))
            heat.append([kind, int(rows.sum()), is_top[rows].sum(0).tolist()])
    return dict(
        chosen=(gate > 0).mean(0).tolist(), heaviest=is_top.mean(0).tolist(), load=load.tolist(),
        gate_bits=float(entropy(share).mean()), load_bits=float(entropy(load)),
        by_class=beside_chance(classes, top), by_set=beside_chance(sets, top),
        heat=heat, served=tokens_served(share, ids))


def validation_parts(ckpt, tokenizer, n):
    """[(data set, its first validation tokens)], together n."""
    s = ckpt['settings']
    folders = [Path(s['data_dir'], name) for name in (s['eval_data'] or s['data']).split(',')]
    shared_tokenizer(Path(ckpt['folder']), *folders)
    slots = len(tokenizer.end)
    size = max(1, n // len(folders) // slots) * slots    # full chunks of bytes
    return [(folder.name, load_bin(folder, 'val')[:size]) for folder in folders]


def text_parts(args, tokenizer):
    """[('', tokens)] of --text or --prompt, or []."""
    text = args.prompt
    if args.text:
        with reading(args.text):
            text = Path(args.text).read_text(encoding='utf-8')
    if not text:
        return []
    ids = [*tokenizer.end, *tokenizer.encode(text[:50 * args.tokens])]
    size = args.tokens // len(tokenizer.end) * len(tokenizer.end)        # full chunks of bytes
    return [('', np.array(ids[:size], tokenizer.dtype))]


def look(model, x):
    """{layer: gates} of (B, T) tokens."""
    routes = model.routes(x)
    if hasattr(model, 'gates') and hasattr(model, 'states'):     # a Self-MoE: routes lacks these
        for i, (_, block, gate, _) in enumerate(model.states(x)):
            if gate is not None:
                sizes = torch.stack([part.square().mean(-1).sqrt() for part in (block, gate)], -1)
                routes[f'gate.{i}'] = sizes / sizes.sum(-1, keepdim=True)
    return {name: gate.flatten(0, 1).float().cpu() for name, gate in routes.items()}


@torch.no_grad()
def read(model, tokens):
    """-> the loss of each token, {layer: (N, choices) gates}. Windows of block_size are read side
    by side; the first token of one is predicted from the window before, the very first never."""
    T = min(model.config.block_size, len(tokens))
    nats, gates = [], defaultdict(list)
    one_more = np.append(tokens, tokens[-1:])            # else the last is predicted, but not read
    device = model.wte.weight.device
    for x, y in val_batches(one_more, T, max(1, 2048 // T), pad=-1):
        x, y = x.to(device), y.to(device)
        nats.append(model(x, y, reduction='none')[1].flatten().float().cpu())
        for layer, gate in look(model, x).items():
            gates[layer].append(gate)
    join = lambda batches: torch.cat(batches)[:len(tokens)].numpy()
    losses = np.append(np.nan, join(nats)[:-1])
    return losses, {layer: join(batches) for layer, batches in gates.items()}


def pack(gate):
    """(N, choices) gates -> `width`, and a string of two letters per gate, which keeps the page
    small. Each token has `width` gates (at most 8, of 1% or more), the heaviest first:
    chr(35 + choice), chr(35 + percent). Where it has fewer, the choice is the number of choices."""
    order = np.argsort(-gate, axis=1, kind='stable')[:, :8]
    value = np.take_along_axis(gate, order, axis=1)
    percent = np.minimum(np.round(100 * value), 9999).astype(int)
    width = max(1, int((percent > 0).sum(1).max()))
    pairs = np.stack((np.where(percent > 0, order, gate.shape[1]), percent), -1)[:, :width]
    return width, ''.join(map(chr, (35 + pairs).ravel().tolist()))


def describe_run(path, args, machine):
    """All that the page shows of a run, as plain values."""
    model, ckpt = load_checkpoint(path, machine.device)
    tokenizer = run_tokenizer(ckpt)
    notes = []
    parts = text_parts(args, tokenizer)
    try:
        parts += validation_parts(ckpt, tokenizer, args.tokens)
    except UserError as error:
        if not parts:
            raise UserError(f'{error}; or give a --text') from None
        notes.append(f'The statistics are of this text alone: {error}')
    readings = [read(model, tokens) for _, tokens in parts]
    ids = np.concatenate([tokens for _, tokens in parts])
    sets = np.concatenate([np.full(len(tokens), name) for name, tokens in parts])
    texts = {i: tokenizer.token_bytes[i].decode('utf-8', 'backslashreplace')
             for i in {*ids.tolist()}}
    pairs = zip(ids.tolist(), [tokenizer.eot, *ids.tolist()])
    classes = np.array([token_class(texts[i], texts.get(before, '')) for i, before in pairs])
    # The page shows the text if there is one. Statistics are of the validation set if there is one.
    is_text = sets == ''
    shown = is_text if is_text.any() else ~is_text
    studied = is_text if is_text.all() else ~is_text
    layers = []
    for name in readings[0][1]:
        gate = np.concatenate([gates[name] for _, gates in readings])
        width, packed = pack(gate[shown])
        layers.append(dict(name=name, choices=gate.shape[1], width=width, gates=packed))
        layers[-1] |= describe_layer(gate[studied], ids[studied], classes[studied], sets[studied])
    if not layers:
        notes.append('This model has no routers: there is nothing to choose.')
    loss = np.concatenate([nats for nats, _ in readings])
    loss[ids == tokenizer.pad] = np.nan                  # what only fills a chunk, and pauses
    loss = [round(nats, 3) if np.isfinite(nats) else None for nats in loss[shown].tolist()]
    return dict(
        name=str(path), model=ckpt['model'], step=ckpt['iter'], folder=ckpt['folder'],
        layers=layers, notes=notes, ids=ids.tolist(), loss=loss, studied=int(studied.argmax()),
        sets=[name for name, _ in parts], texts=texts, eot=tokenizer.eot)


def main():
    parser = Parser(__doc__)
    parser.add_argument('runs', nargs='+', help='run folders or checkpoints, to show side by side')
    text = parser.add_mutually_exclusive_group()
    text.add_argument('--text', help='a file to show instead of the validation set')
    text.add_argument('--prompt', help='a text to show')
    parser.add_argument('--tokens', type=between(300, 10 ** 5), default=2000,
                        help='to read at most')
    parser.add_argument('--live', action='store_true',
                        help='a page that runs the model: type, and knock blocks out')
    parser.add_argument('--out', help="the page; if not given, in the first run's folder")
    parser.add_argument('--device', default='auto', help='cuda, mps, cpu; auto: the first there is')
    args = parser.parse_args()
    if args.live:
        if len(args.runs) > 1 or args.text:
            raise UserError('--live shows one run; its reader types the text, which may begin with '
                            'your --prompt')
        write_live(args.runs[0], args.prompt, args.out)
        return
    machine = Machine(args.device)
    runs = [describe_run(path, args, machine) for path in args.runs]
    for run in runs:
        sets = ', '.join(filter(None, run['sets'])) or 'the text'    # which has no name
        print(f"{run['name']}: {len(run['loss']):,} tokens; the statistics are of {sets}")
        for note in run['notes']:
            print(f'  {note}')
    names = [Path(run['folder']).name for run in runs] if len(runs) > 1 else []
    out = args.out or Path(runs[0]['folder'], '_'.join(['explore', *names]) + '.html')
    write_page(out, 'explore', runs)


if __name__ == '__main__':
    run_main(main)
