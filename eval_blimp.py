"""
BLiMP: does a model give the grammatical sentence of a minimal pair the higher probability?

    python eval_blimp.py out/moep                                  # the toy pairs, made if missing
    python eval_blimp.py out/moep --data data/blimp --paradigms    # BLiMP itself, all 67 paradigms
    python eval_blimp.py out/moep --data data/blimp_fast --mode babylm2025    # BabyLM's own subset
    python eval_blimp.py out/moep/ckpt_*.pt out/gpt2 --data data/blimp --json curve.json
    python eval_blimp.py out/moep out/gpt2 --together              # and both as one model

`python prepare.py blimp` downloads BLiMP. BabyLM's subsets are folders of its evaluation data
(docs/eval_blimp.md); `python prepare.py blimp --name blimp_fast --input FOLDER` copies one.

The score of a sentence is the sum of the natural-log probabilities of its tokens; a pair is right
if good >= bad. Sentences are never cut: one that is too long for the model ends the command. A
sentence becomes tokens as the official pipelines do it:

    harness          [end-of-text] + encode(' ' + sentence); every token of the sentence is scored
                     (lm-evaluation-harness; BabyLM up to 2024)
    babylm2025       encode(sentence); the first token is read, but not scored (BabyLM 2025)
    babylm2025_bos   [end-of-text] + encode(sentence); every token is scored (BabyLM 2025, of what
                     tools.export_hf --bos writes)

For the byte-level model a token is a chunk of bytes; for a model of sentences, a sentence (not in
`babylm2025`). Everything is float32, on a GPU too (no autocast, no TF32), and sums are float64, so
that rounding decides few close pairs. --data takes any folder of .jsonl files whose rows have
`sentence_good` and `sentence_bad`; `UID` (else the file's name) is the paradigm,
`linguistics_term` the phenomenon.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from plumbing.checkpoint import read_checkpoint, run_tokenizer
from plumbing.cli import Parser, UserError, human, run_main, write_json
from plumbing.machine import Machine
from plumbing.text import read_rows
from plumbing.together import load_together
from prepare import make_toys


# ---- Minimal pairs ------------------------------------------------------------------------------

@dataclass
class Paradigm:
    phenomenon: str | None       # one of BLiMP's 12, if the rows name one
    pairs: list                  # (good sentence, bad sentence)


def read_pairs(data):
    """{name: Paradigm} of a folder of .jsonl files, or of one such file."""
    data = Path(data)
    files = [data] if data.is_file() else sorted(data.glob('[!.]*.jsonl'))
    paradigms = {}
    for path in files:
        for _, row in read_rows(path, ['sentence_good', 'sentence_bad']):
            term = row.get('linguistics_term')
            if term == 's-selection':                    # 13 terms, 12 phenomena
                term = 'argument_structure'
            paradigm = paradigms.setdefault(row.get('UID') or path.stem, Paradigm(term, []))
            paradigm.pairs.append((row['sentence_good'], row['sentence_bad']))
    if not paradigms:
        raise UserError(f'there are no .jsonl files with pairs in {data}; BLiMP itself comes with '
                        'python prepare.py blimp')
    return dict(sorted(paradigms.items()))


# ---- Scores -------------------------------------------------------------------------------------

class Sentences:
    """Each distinct sentence of the pairs, once, as token ids. Sorted, so that batches, and with
    them rounding, do not depend on the order of files. Two identical sentences of a pair have one
    score: an exact tie."""

    def __init__(self, paradigms, tokenizer, mode='harness'):
        slots = len(tokenizer.end)                       # ids in a chunk or sentence; 1: tokens
        self.slots = slots
        self.end = tokenizer.end
        self.pad = tokenizer.pad
        texts = sorted({text for p in paradigms.values() for pair in p.pairs for text in pair})
        self.number = {text: i for i, text in enumerate(texts)}
        start = [] if mode == 'babylm2025' else self.end
        space = ' ' if mode == 'harness' else ''
        self.ids = [start + tokenizer.encode(space + text) for text in texts]
        self.length = np.array([len(ids) for ids in self.ids])
        # The last token is only predicted. The last chunk is read, too: each symbol in it may help
        # to predict the next.
        self.width = np.maximum(self.length - (slots == 1), slots)       # at least one token

    def batches(self, budget):
        """Sentences of similar length, the longest first; at most `budget` tokens with padding."""
        order = np.argsort(-self.width, kind='stable')
        i = 0
        while i < len(order):
            n = max(1, int(budget // self.width[order[i]]))
            yield order[i:i + n]
            i += n


@torch.inference_mode()
def score_sentences(model, sentences, budget=1024, device='cpu'):
    """-> (n,) float64: the log-probability of each sentence."""
    s = sentences
    scores = np.zeros(len(s.ids))
    for rows in tqdm(list(s.batches(budget)), unit='batch', leave=False, disable=None):
        size = int(s.width[rows[0]]) + 1                 # the first is the widest
        ids = torch.tensor([(s.ids[i] + s.end * size)[:size] for i in rows], device=device)
        t = torch.arange(size, device=device)
        inside = t < torch.tensor(s.length[rows, None], device=device)
        # The first token (or chunk) is only read. Padding inside chunks is not a target either.
        is_target = inside & (t >= s.slots) & (ids != s.pad)
        targets = ids.masked_fill(~is_target, -1)
        _, nats, _ = model(ids[:, :-1], targets[:, 1:], reduction='none')
        scores[rows] = -nats.cpu().double().sum(1).numpy()
    return scores


def evaluate(paradigms, sentences, scores):
    """Per paradigm: its accuracy, and the scores of its pairs."""
    result = {}
    for name, p in paradigms.items():
        good, bad = scores[[[sentences.number[text] for text in pair] for pair in p.pairs]].T
        result[name] = dict(accuracy=100 * float((good >= bad).mean()),
                            good=good.round(6).tolist(), bad=bad.round(6).tolist())
    return result


def score_checkpoints(paths, paradigms, args):
    """Everything that --json writes about one checkpoint, or about several as one model."""
    model, ckpt = load_together(paths, args.device)
    path = ' + '.join(map(str, paths))
    tokenizer = run_tokenizer(ckpt)
    if tokenizer.kind == 'sentences' and args.mode == 'babylm2025':
        raise UserError(f'{path} reads sentences, and --mode babylm2025 does not score the first: '
                        'take --mode harness')
    sentences = Sentences(paradigms, tokenizer, args.mode)
    if sentences.width.max() > model.config.block_size:
        raise UserError(f'{path} reads {model.config.block_size} tokens at once, and a sentence '
                        f'has {sentences.width.max()}: train with a larger block_size')
    fitting = 2 ** 29 // tokenizer.n_vocab               # (tokens, vocabulary) of float32 in 2 GiB
    useful = sentences.slots * (1024 if args.device == 'cpu' else 32768)
    scores = score_sentences(model, sentences, min(useful, fitting), args.device)
    result = evaluate(paradigms, sentences, scores)
    accuracy = {name: r['accuracy'] for name, r in result.items()}
    means = {name: mean(accuracy, names) for name, names in groups(paradigms)}
    return dict(checkpoint=path, folder=ckpt['folder'], model=ckpt['model'],
                parameters=model.count_params()[0], iter=ckpt['iter'], words=ckpt['words'],
                overall=means.pop('overall'), phenomena=means, paradigms=result)


# ---- Tables -------------------------------------------------------------------------------------

def groups(paradigms):
    """[(name, the names of its paradigms)]: overall, and the phenomena."""
    phenomena = {}
    for name, p in paradigms.items():
        if p.phenomenon:
            phenomena.setdefault(p.phenomenon, []).append(name)
    return [('overall', list(paradigms)), *sorted(phenomena.items())]


def mean(column, names):
    """Over paradigms; each counts once, whatever its number of pairs."""
    return sum(column[name] for name in names) / len(names)


def show(paradigms, runs, args):
    """A line per checkpoint (those of one run are its learning curve), then tables: a row per
    phenomenon, or paradigm, and a column per checkpoint."""
    pairs = sum(len(p.pairs) for p in paradigms.values())
    print(f'{args.data}: {pairs:,} pairs in {len(paradigms)} paradigms; mode {args.mode}')
    width = max(len(run['checkpoint']) for run in runs)
    for i, run in enumerate(runs, 1):
        print(f"({i})  {run['checkpoint']:{width}}  {human(run['parameters'])} parameters, "
              f"step {run['iter']:,}, {human(run['words'])} words: {run['overall']:.2f}%")
    tables = [groups(paradigms)]
    if args.paradigms:
        order = sorted(paradigms, key=lambda name: (paradigms[name].phenomenon or '', name))
        tables.append([(name, [name]) for name in order])
    columns = [{name: r['accuracy'] for name, r in run['paradigms'].items()} for run in runs]
    width = max(len(name) for rows in tables for name, _ in rows) + 2
    heads = [f'({i})' for i in range(1, len(runs) + 1)]
    print(f"\n{'':{width}}paradigms", *(f'{head:>7}' for head in heads))
    for rows in tables:
        print()
        for name, names in rows:
            cells = [f'{mean(column, names):7.1f}' for column in columns]
            print(f'{name:{width}}{len(names):9}', *cells)


# ---- The command line ---------------------------------------------------------------------------

def read_arguments():
    parser = Parser(__doc__)
    parser.add_argument('runs', nargs='+',
                        help='run folders (out/moep) or checkpoints (out/moep/ckpt_1M.pt)')
    parser.add_argument('--data', type=Path, default='data/toy_blimp',
                        help='a folder of .jsonl files, or one such file')
    parser.add_argument('--together', action='store_true',
                        help='score the runs as one model, too: the mean of their probabilities')
    parser.add_argument('--mode', choices=['harness', 'babylm2025', 'babylm2025_bos'],
                        default='harness', help='how a sentence becomes tokens')
    parser.add_argument('--paradigms', action='store_true',
                        help='print every paradigm, not only phenomena')
    parser.add_argument('--json', type=Path, metavar='FILE',
                        help='write everything, the scores of every pair too')
    parser.add_argument('--device', default='auto', help='cuda, mps, cpu; auto: the first there is')
    return parser.parse_args()


def main():
    args = read_arguments()
    args.device = Machine(args.device).device.type
    torch.set_float32_matmul_precision('highest')        # no TF32
    if args.data == Path('data/toy_blimp'):
        make_toys([args.data.name], args.data.parent)
    paradigms = read_pairs(args.data)
    for path in args.runs:
        read_checkpoint(path, mmap=True)                 # one that is missing is reported at once
    last = [score_checkpoints(args.runs, paradigms, args)] if args.together else []
    runs = [score_checkpoints([path], paradigms, args) for path in args.runs]
    folders = [run['folder'] for run in runs]
    runs.sort(key=lambda run: (folders.index(run['folder']), run['words'], run['iter']))
    show(paradigms, runs + last, args)
    if args.json:
        write_json(args.json, dict(data=str(args.data), mode=args.mode, device=args.device,
                                   runs=runs + last))


if __name__ == '__main__':
    run_main(main)
