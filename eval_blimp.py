"""
BLiMP: does a model give the grammatical sentence of a minimal pair the higher probability?

    python eval_blimp.py out/moep                                  # the toy pairs, made if missing
    python eval_blimp.py out/moep --data data/blimp --paradigms    # BLiMP itself, all 67 paradigms
    python eval_blimp.py out/moep --data data/blimp_fast --mode babylm2025    # BabyLM's own subset
    python eval_blimp.py out/moep --data data/blimp --json blimp.json     # every pair's scores too
    python eval_blimp.py out/moep/ckpt_*.pt out/gpt2 --data data/blimp --json curve.json
    python eval_blimp.py out/moep out/gpt2 --together              # and both as one model

`python prepare.py blimp` downloads BLiMP. BabyLM's subsets are folders of its evaluation data
(docs/eval_blimp.md); `python prepare.py blimp --name blimp_fast --input FOLDER` copies one.

The score of a sentence is the sum of the natural-log probabilities of its tokens; a pair is right
if good >= bad. A sentence becomes tokens as the official pipelines do it:

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

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from plumbing.checkpoint import read_checkpoint, run_tokenizer
from plumbing.cli import Parser, UserError, between, human, run_main, write_json
from plumbing.machine import Machine
from plumbing.text import read_rows
from plumbing.together import load_together
from prepare import make_missing_toys

PUBLISHED = Path(__file__).parent / 'plumbing/blimp_published.txt'


# ---- Minimal pairs ------------------------------------------------------------------------------

@dataclass
class Paradigm:
    phenomenon: str | None       # one of BLiMP's 12, if the rows name one
    field: str | None            # one of its 4: morphology, semantics, syntax, syntax_semantics
    pairs: list                  # ((file, line), good sentence, bad sentence)


def read_pairs(data):
    """{name: Paradigm} of a folder of .jsonl files, or of one such file."""
    data = Path(data)
    files = [data] if data.is_file() else sorted(data.glob('[!.]*.jsonl'))
    paradigms = {}
    for path in files:
        for number, row in read_rows(path, ['sentence_good', 'sentence_bad']):
            name = row.get('UID') or path.stem
            term = row.get('linguistics_term')
            if term == 's-selection':                    # 13 terms, 12 phenomena
                term = 'argument_structure'
            field = (row.get('field') or '').replace('/', '_')   # both spellings occur
            paradigms.setdefault(name, Paradigm(term, field, []))
            pair = row['sentence_good'], row['sentence_bad']
            paradigms[name].pairs.append(((path, number), *pair))
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
        self.n_vocab = tokenizer.n_vocab
        texts = sorted({text for p in paradigms.values() for _, *pair in p.pairs for text in pair})
        self.number = {text: i for i, text in enumerate(texts)}
        start = [] if mode == 'babylm2025' else self.end
        space = ' ' if mode == 'harness' else ''
        self.ids = [start + tokenizer.encode(space + text) for text in texts]
        self.length = np.array([len(ids) for ids in self.ids])
        # The first token (or chunk) is only read. Padding inside chunks is not a target either.
        self.scored = np.array([len(ids) - slots - ids[slots:].count(self.pad) for ids in self.ids])
        # The last token is only predicted. The last chunk is read, too: each symbol in it may help
        # to predict the next.
        self.width = np.maximum(self.length - (slots == 1), slots)       # at least one token
        self.context = math.inf                          # the smallest of the models that read them

    def batches(self, budget):
        """Sentences of similar length, the longest first; at most `budget` tokens with padding."""
        fitting = np.flatnonzero(self.width <= self.context)
        order = fitting[np.argsort(-self.width[fitting], kind='stable')]
        i = 0
        while i < len(order):
            n = max(1, int(budget // self.width[order[i]]))
            yield order[i:i + n]
            i += n


def read_sentences(paradigms, args):
    """{tokenizer: Sentences}. A missing checkpoint is reported here, before any is scored."""
    by_tokenizer = {}
    for path in args.runs:
        ckpt = read_checkpoint(path)                     # for its context; it is built later
        key = ckpt['tokenizer']
        if key not in by_tokenizer:
            tokenizer = run_tokenizer(ckpt)
            if tokenizer.kind == 'sentences' and args.mode == 'babylm2025':
                raise UserError(f'{path} reads sentences, and --mode babylm2025 does not score '
                                'the first: take --mode harness')
            by_tokenizer[key] = Sentences(paradigms, tokenizer, args.mode)
        sentences = by_tokenizer[key]
        sentences.context = min(sentences.context, ckpt['config']['block_size'])
    return by_tokenizer


def leave_out_long(paradigms, by_tokenizer, skip_long):
    """A cut sentence would get the score of another one, so nothing is cut. A pair that is too
    long for one model is an error, or left out for all of them -> how many are left out."""
    total = sum(len(p.pairs) for p in paradigms.values())
    long = {}                                            # {(file, line): how long}
    for p in paradigms.values():
        for s in by_tokenizer.values():
            for place, good, bad in p.pairs:
                width = max(s.width[s.number[good]], s.width[s.number[bad]])
                if width > s.context:
                    long[place] = f'needs {width} tokens of context, block_size is {s.context}'
    if long and (len(long) == total or not skip_long):
        (path, number), why = next(iter(long.items()))
        raise UserError(f'{len(long):,} of {total:,} pairs are too long, the first is '
                        f'{path}:{number} ({why}); --skip_long leaves them out')
    for name, p in list(paradigms.items()):
        p.pairs = [pair for pair in p.pairs if pair[0] not in long]
        if not p.pairs:
            print(f'{name} is left out: all its pairs are too long')
            del paradigms[name]
    return len(long)


@torch.inference_mode()
def score_sentences(model, sentences, budget=1024, device='cpu'):
    """-> (n,) float64: the log-probability of each sentence, 0 for those over the context."""
    s = sentences
    scores = np.zeros(len(s.ids))
    for rows in tqdm(list(s.batches(budget)), unit='batch', leave=False, disable=None):
        size = int(s.width[rows[0]]) + 1                 # the first is the widest
        ids = torch.tensor([(s.ids[i] + s.end * size)[:size] for i in rows], device=device)
        t = torch.arange(size, device=device)
        inside = t < torch.tensor(s.length[rows, None], device=device)
        is_target = inside & (t >= s.slots) & (ids != s.pad)
        targets = ids.masked_fill(~is_target, -1)
        _, nats, _ = model(ids[:, :-1], targets[:, 1:], reduction='none')
        scores[rows] = -nats.cpu().double().sum(1).numpy()
    return scores


def evaluate(paradigms, sentences, scores):
    """Per paradigm: accuracy, how often the good sentence has fewer tokens, and the scores."""
    result = {}
    for name, p in paradigms.items():
        places = [place for place, *_ in p.pairs]
        rows = np.array([[sentences.number[text] for text in pair] for _, *pair in p.pairs])
        good, bad = scores[rows].T
        n_good, n_bad = sentences.scored[rows].T
        identical = sum(a == b for _, a, b in p.pairs)
        close = (good != bad) & (abs(good - bad) < 1e-4)     # another batch size may flip these
        result[name] = dict(
            accuracy=100 * float((good >= bad).mean()),
            shorter=100 * float((np.sign(n_bad - n_good) + 1).mean() / 2),
            pairs=len(good),
            identical=identical,
            ties=int((good == bad).sum()) - identical,           # between two different sentences
            close=int(close.sum()),
            files=[path.name for path, _ in places],
            lines=[number for _, number in places],
            good=[round(float(v), 6) for v in good],
            bad=[round(float(v), 6) for v in bad])
    return result


def score_checkpoints(paths, paradigms, by_tokenizer, args):
    """Everything that --json writes about one checkpoint, or about several as one model."""
    model, ckpt = load_together(paths, args.device)
    sentences = by_tokenizer[ckpt['tokenizer']]
    fitting = 2 ** 29 // sentences.n_vocab               # (tokens, vocabulary) of float32 in 2 GiB
    useful = sentences.slots * (1024 if args.device == 'cpu' else 32768)
    budget = args.batch_tokens or min(useful, fitting)
    scores = score_sentences(model, sentences, budget, args.device)
    result = evaluate(paradigms, sentences, scores)
    accuracy = {name: r['accuracy'] for name, r in result.items()}
    means = {'': {}, 'field': {}, 'phenomenon': {}}
    for heading, name, names in groups(paradigms):
        means[heading][name] = mean(accuracy, names)
    return dict(checkpoint=' + '.join(map(str, paths)), folder=ckpt['folder'],
                model=ckpt['model'], iter=ckpt['iter'], words=ckpt['words'],
                parameters=model.count_params()[0], tokenizer=ckpt['tokenizer'],
                overall=means['']['overall'], fields=means['field'], phenomena=means['phenomenon'],
                paradigms=result)


# ---- Tables -------------------------------------------------------------------------------------

def groups(paradigms):
    """[(heading, name, the names of its paradigms)]: overall, fields, phenomena."""
    rows = [('', 'overall', list(paradigms))]
    for heading in ('field', 'phenomenon'):
        members = {}
        for name, p in paradigms.items():
            group = getattr(p, heading)
            if group:
                members.setdefault(group, []).append(name)
        rows += [(heading, group, names) for group, names in sorted(members.items())]
    return rows


def mean(column, names):
    """Over paradigms; each counts once, whatever its number of pairs."""
    return sum(column[name] for name in names) / len(names)


def published_columns(paradigms):
    """{column: {paradigm: percent}} beside BLiMP's own paradigms; beside the toy's, none."""
    lines = PUBLISHED.read_text(encoding='utf-8').splitlines()
    head, *rows = [line.split() for line in lines if not line.startswith('#')]
    if not set(paradigms) <= {row[0] for row in rows}:
        return {}
    return {column: {row[0]: float(row[i]) for row in rows}
            for i, column in enumerate(head[1:], 1)}


def table(paradigms, columns, all_paradigms):
    """Lines of text: a row per group (and paradigm), a column per model."""
    rows = groups(paradigms)
    if all_paradigms:
        order = sorted(paradigms, key=lambda name: (paradigms[name].phenomenon or '', name))
        rows += [('paradigm', name, [name]) for name in order]
    name_width = max(len(name) for _, name, _ in rows) + 2
    widths = {label: max(len(label), 6) + 2 for label in columns}
    yield ' ' * name_width + 'paradigms' + ''.join(label.rjust(widths[label]) for label in columns)
    previous = ''
    for heading, name, names in rows:
        if heading != previous:
            yield ''
        previous = heading
        cells = [f'{mean(column, names):{widths[label]}.1f}' for label, column in columns.items()]
        yield f'{name:{name_width}}{len(names):9}' + ''.join(cells)


def show(paradigms, runs, skipped, args):
    """A line per checkpoint (those of one run are its learning curve), then one table for all."""
    first = runs[0]['paradigms'].values()
    pairs = sum(r['pairs'] for r in first)
    identical = sum(r['identical'] for r in first)
    plural = 's' * (len(paradigms) != 1)
    print(f'{args.data}: {pairs:,} pairs in {len(paradigms)} paradigm{plural}, '
          f'{identical} of them with identical sentences (ties count as right); mode {args.mode}')
    if skipped:
        print(f'{skipped:,} of {pairs + skipped:,} pairs are left out: '
              'they are longer than the context')
    columns, shorter = {}, {}                            # shorter: a column per tokenizer
    width = max(len(run['checkpoint']) for run in runs)
    for i, run in enumerate(runs, 1):
        results = run['paradigms']
        columns[f'({i})'] = {name: r['accuracy'] for name, r in results.items()}
        baseline = {name: r['shorter'] for name, r in results.items()}
        shorter.setdefault(run['tokenizer'], (f'shorter({i})', baseline))
        ties, close = (sum(r[key] for r in results.values()) for key in ('ties', 'close'))
        print(f"({i})  {run['checkpoint']:{width}}  {human(run['parameters'])} parameters, "
              f"step {run['iter']:,}, {human(run['words'])} words: {run['overall']:.2f}%  "
              f'({ties} other ties, {close} closer than 0.0001)')
    for label, baseline in shorter.values():
        columns['shorter' if len(shorter) == 1 else label] = baseline
    published = published_columns(paradigms)
    print()
    print('\n'.join(table(paradigms, columns | published, args.paradigms)))
    print('\nshorter: how often the good sentence has fewer tokens (equal numbers count half); '
          'an untrained model scores about this')
    if published:
        print('5-gram, LSTM, GPT-2 (large) and human: '
              'published by the authors of BLiMP, for all pairs')


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
    parser.add_argument('--skip_long', action='store_true',
                        help="leave out pairs that are longer than the model's context")
    parser.add_argument('--paradigms', action='store_true',
                        help='print every paradigm, not only fields and phenomena')
    parser.add_argument('--json', type=Path, metavar='FILE',
                        help='write everything, the scores of every pair too')
    parser.add_argument('--device', default='auto', help='cuda, mps, cpu; auto: the first there is')
    parser.add_argument('--batch_tokens', type=between(0, 2 ** 24), default=0,
                        help='tokens in a batch, padding included; 0: automatic')
    return parser.parse_args()


def main():
    args = read_arguments()
    args.device = Machine(args.device).device.type
    torch.set_float32_matmul_precision('highest')        # no TF32
    if args.data == Path('data/toy_blimp'):
        make_missing_toys([args.data.name], args.data.parent)
    paradigms = read_pairs(args.data)
    by_tokenizer = read_sentences(paradigms, args)
    skipped = leave_out_long(paradigms, by_tokenizer, args.skip_long)
    common = paradigms, by_tokenizer, args
    last = [score_checkpoints(args.runs, *common)] if args.together else []  # may be refused
    runs = [score_checkpoints([path], *common) for path in args.runs]
    folders = [run['folder'] for run in runs]
    runs.sort(key=lambda run: (folders.index(run['folder']), run['words'], run['iter']))
    show(paradigms, runs + last, skipped, args)
    if args.json:
        about = dict(data=str(args.data), mode=args.mode, device=args.device, skipped=skipped)
        write_json(args.json, dict(about, runs=runs + last))


if __name__ == '__main__':
    run_main(main)
