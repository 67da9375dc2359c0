"""
BLiMP: does a model give the grammatical sentence of a minimal pair the higher probability?

    python eval_blimp.py out/moep                                    # the toy pairs, which are made if missing
    python eval_blimp.py out/moep --data data/blimp --paradigms      # the real ones (python prepare.py blimp), all 67
    python eval_blimp.py out/moep --data data/blimp --mode babylm2025 --subset fast
    python eval_blimp.py out/moep/ckpt_*.pt out/gpt2 --data data/blimp --plot curve.png    # a learning curve
    python eval_blimp.py out/moep --data data/blimp --json blimp.json          # everything, every pair's scores too

A sentence's score is the sum of its tokens' natural-log probabilities; a pair is right if good >= bad. Two ways to
turn a sentence into tokens, each exactly as one of the official pipelines does it:

    harness      [end-of-text] + encode(' ' + sentence); every token of the sentence is scored
                 (lm-evaluation-harness; BabyLM up to 2024)
    babylm2025   encode(sentence); the first token is read, but not scored (BabyLM 2025)

For the byte-level model a token is a chunk of bytes. Everything is float32, on a GPU too (no autocast, no TF32), so
that close pairs are not decided by rounding. --data takes any folder of .jsonl files whose rows have `sentence_good`
and `sentence_bad`; `UID` (else the file's name) is the paradigm, `linguistics_term` the phenomenon.
"""

import importlib.util
import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import prepare
from errors import Parser, UserError, check_writable, run_main, write_json
from machine import Machine
from train import load_checkpoint, read_checkpoint, short


# ---------------------------------------------------------------------------------------------------------------
# Minimal pairs


@dataclass
class Paradigm:
    phenomenon: str | None       # one of BLiMP's 12, where the rows name one
    field: str | None            # one of its 4: morphology, semantics, syntax, syntax_semantics
    places: list                 # (file, line) of each pair
    good: list                   # and its sentences
    bad: list


def read_pair(path, number, line):
    """-> the row of one line, with two sentences that can be scored."""
    try:
        row = json.loads(line)
        for key in ('sentence_good', 'sentence_bad'):
            row[key].encode('utf-8')                     # JSON can spell half a character; UTF-8 cannot
            if not row[key].strip():
                raise KeyError
    except ValueError as e:
        raise UserError(f'{path}:{number}: not a row of JSON in Unicode ({e})') from None
    except (KeyError, TypeError, AttributeError):
        has = ', '.join(row) if isinstance(row, dict) else 'no fields'
        raise UserError(f'{path}:{number}: no text in {key} (the row has: {has})') from None
    return row


def read_subset(data, subset):
    """{file name without .jsonl: row numbers}, from the JSON file that lies in the data folder or beside it."""
    if subset == 'full':
        return None
    name = f'blimp_{subset}_pair_ids.json'
    path = next((p for p in (data / name, data.parent / name) if p.is_file()), None)
    if path is None:
        raise UserError(f'--subset {subset} needs {name} in {data} or {data.parent}: {{paradigm: [rows, from 0]}}')
    try:
        return {key: {int(i) for i in rows} for key, rows in json.loads(path.read_text(encoding='utf-8')).items()}
    except (ValueError, TypeError, AttributeError):
        raise UserError(f'{path} is broken: it should hold {{paradigm: [row numbers from 0]}}') from None


def read_pairs(data, subset='full'):
    """{name: Paradigm} of a folder of .jsonl files, or of one such file."""
    data = Path(data)
    files = [data] if data.is_file() else sorted(data.glob('*.jsonl'))
    if not files:
        what = 'no .jsonl file in' if data.is_dir() else 'there is no folder'
        raise UserError(f'{what} {data}; BLiMP comes with: python prepare.py blimp')
    wanted, paradigms = read_subset(data, subset), {}
    for path in files:
        lines = [(n, line) for n, line in prepare.read_lines(path) if not line.isspace()]
        rows = set(range(len(lines))) if wanted is None else wanted.get(path.stem)
        if not lines:
            raise UserError(f'{path}: there is no pair in it')
        if not rows or max(rows) >= len(lines) or min(rows) < 0:
            raise UserError(f'{path}: --subset {subset} does not fit its {len(lines)} rows')
        for i, (number, line) in enumerate(lines):
            row = read_pair(path, number, line)
            if i in rows:
                name = str(row.get('UID') or path.stem)
                if name not in paradigms:                # 13 terms for 12 phenomena, two spellings of a field
                    term, area = (str(row.get(key) or '') or None for key in ('linguistics_term', 'field'))
                    term = 'argument_structure' if term == 's-selection' else term
                    paradigms[name] = Paradigm(term, area and area.replace('/', '_'), [], [], [])
                p = paradigms[name]
                p.places.append((path, number))
                p.good.append(row['sentence_good'])
                p.bad.append(row['sentence_bad'])
    return {name: paradigms[name] for name in sorted(paradigms)}


# ---------------------------------------------------------------------------------------------------------------
# Scores


class Sentences:
    """The distinct sentences of all pairs as token ids, each with what stands before it. Distinct and in an order of
    their own: then no score depends on the order of files, and an identical pair is a tie to the last bit."""

    def __init__(self, paradigms, tokenizer, slots=1, pad=-1, mode='harness'):
        self.slots, self.pad = slots, pad                # of the byte-level model's chunks
        self.n_vocab = tokenizer.n_vocab
        self.end = [tokenizer.eot] + [pad] * (slots - 1)
        texts = sorted({s for p in paradigms.values() for s in p.good + p.bad})
        self.number = {text: i for i, text in enumerate(texts)}
        if mode == 'harness':
            self.ids = [self.end + tokenizer.encode(' ' + text) for text in texts]
        else:
            self.ids = [tokenizer.encode(text) for text in texts]
        self.length = np.array([len(ids) for ids in self.ids])
        # the first token (or chunk) is only read; padding inside chunks is no target either
        self.scored = np.array([len(ids) - slots - ids[slots:].count(pad) for ids in self.ids])
        # inputs: all but the last token; whole chunks, since a chunk's symbols are read while they are predicted
        self.width = np.maximum(-(-(self.length - 1) // slots) * slots, slots)

    def check_length(self, paradigms, limit):
        """A cut sentence would get another sentence's score, so there is no cutting."""
        if self.width.max() > limit:
            for p in paradigms.values():
                for (path, number), pair in zip(p.places, zip(p.good, p.bad)):
                    longest = max(self.width[self.number[s]] for s in pair)
                    if longest > limit:
                        raise UserError(f"{path}:{number}: a sentence needs {longest} tokens of context, the model's "
                                        f'block_size is {limit}; nothing is cut: remove it, or train a longer one')

    def batches(self, budget):
        """Sentences of like length, the longest first, in batches of at most `budget` tokens, padding included."""
        order = np.argsort(-self.width, kind='stable')
        i = 0
        while i < len(order):
            n = max(1, int(budget // self.width[order[i]]))
            yield order[i:i + n]
            i += n


@torch.inference_mode()
def score(model, sentences, budget=1024, device='cpu'):
    """-> (n,) float32: each sentence's log-probability. The bar counts tokens as computed, padding included."""
    s, slots = sentences, sentences.slots
    batches = [(rows, s.width[rows[0]]) for rows in s.batches(budget)]       # the widest comes first in its batch
    flat = torch.from_numpy(np.fromiter(chain.from_iterable(s.ids), np.int64)).to(device)
    length = torch.tensor(s.length, device=device)
    start, filler = length.cumsum(0) - length, torch.tensor(s.end, device=device)
    scores = np.empty(len(s.ids), np.float32)
    total = int(sum(len(rows) * T for rows, T in batches))
    with tqdm(total=total, unit='token', unit_scale=True, smoothing=0, leave=False, disable=None) as progress:
        for rows, T in batches:
            at = torch.from_numpy(rows).to(device)
            t = torch.arange(T + 1, device=device)
            inside = t < length[at, None]                                    # (B, T + 1)
            ids = flat[(start[at, None] + t).clamp(max=len(flat) - 1)]
            ids = torch.where(inside, ids, filler[t % slots])                # end-of-text fills up
            target = inside & (t >= slots) & (ids != s.pad)
            nats = model(ids[:, :-1], ids.masked_fill(~target, -1)[:, 1:], reduction='none')[1]
            scores[rows] = -nats.float().sum(1).cpu().numpy()                # waits for the device: the bar is honest
            progress.update(len(rows) * int(T))
    if np.isnan(scores).any():
        raise UserError("the model's probabilities are not numbers (nan): this checkpoint is broken")
    return scores


def evaluate(paradigms, sentences, scores):
    """Per paradigm: accuracy, the shorter-sentence baseline (ties count half), and the scores themselves."""
    result = {}
    for name, p in paradigms.items():
        g, b = ([sentences.number[s] for s in side] for side in (p.good, p.bad))
        good, bad, fewer = scores[g], scores[b], np.sign(sentences.scored[b] - sentences.scored[g])
        same = sum(x == y for x, y in zip(p.good, p.bad))
        result[name] = dict(
            accuracy=100 * float((good >= bad).mean()), shorter=100 * float((fewer + 1).mean() / 2), pairs=len(good),
            identical=same, ties=int((good == bad).sum()) - same,           # ties between two different sentences
            close=int(((good != bad) & (abs(good - bad) < 1e-4)).sum()),    # what another batch size might turn round
            files=[path.name for path, _ in p.places], lines=[number for _, number in p.places],
            good=[round(float(v), 6) for v in good], bad=[round(float(v), 6) for v in bad])
    return result


# ---------------------------------------------------------------------------------------------------------------
# Tables


# Percent right per paradigm, on all 1,000 pairs: the authors' released summaries (github.com/alexwarstadt/blimp,
# raw_results/summary) to Warstadt et al. 2020, "BLiMP: The Benchmark of Linguistic Minimal Pairs for English".
PUBLISHED = '''
paradigm                                           5-gram  LSTM GPT-2 human
adjunct_island                                       47.9  67.4  89.4  94.0
anaphor_gender_agreement                             43.9  88.2  99.4  96.0
anaphor_number_agreement                             51.9  95.2  99.2  99.0
animate_subject_passive                              70.3  71.5  76.6  86.0
animate_subject_trans                                90.7  86.8  84.9  87.0
causative                                            53.5  68.4  78.2  98.0
complex_NP_island                                    49.7  47.4  72.2  80.4
coordinate_structure_constraint_complex_left_branch  32.0  30.1  81.0  90.0
coordinate_structure_constraint_object_extraction    59.3  70.5  85.4  90.9
determiner_noun_agreement_1                          88.3  91.8  98.8  95.8
determiner_noun_agreement_2                          86.3  91.9  97.7  94.9
determiner_noun_agreement_irregular_1                85.4  81.5  95.7  92.0
determiner_noun_agreement_irregular_2                90.4  86.0  95.3  85.0
determiner_noun_agreement_with_adj_2                 49.7  86.2  94.9  96.0
determiner_noun_agreement_with_adj_irregular_1       53.0  76.2  92.7  93.8
determiner_noun_agreement_with_adj_irregular_2       55.4  82.9  94.0  85.0
determiner_noun_agreement_with_adjective_1           51.9  86.7  97.5  95.0
distractor_agreement_relational_noun                 23.5  76.0  79.5  81.0
distractor_agreement_relative_clause                 21.7  62.7  65.7  85.7
drop_argument                                        71.6  78.9  80.7  86.9
ellipsis_n_bar_1                                     23.4  67.8  91.5  92.0
ellipsis_n_bar_2                                     50.4  67.4  87.2  78.0
existential_there_object_raising                     83.5  65.9  78.4  89.8
existential_there_quantifiers_1                      90.5  96.3  99.5  94.0
existential_there_quantifiers_2                      62.3  16.2  42.4  76.4
existential_there_subject_raising                    77.4  79.5  91.1  88.0
expletive_it_object_raising                          71.5  63.0  79.2  85.7
inchoative                                           50.9  65.3  65.9  82.0
intransitive                                         67.8  78.5  84.2  90.0
irregular_past_participle_adjectives                 79.4  92.8  97.7  99.0
irregular_past_participle_verbs                      79.6  85.3  86.1  95.0
irregular_plural_subject_verb_agreement_1            72.6  81.1  92.8  94.0
irregular_plural_subject_verb_agreement_2            87.6  89.1  92.4  95.0
left_branch_island_echo_question                     95.8  31.6  52.3  91.0
left_branch_island_simple_question                   56.5  36.1  87.1  99.0
matrix_question_npi_licensor_present                  1.2   1.6  65.4  98.0
npi_present_1                                        46.8  53.6  64.8  83.0
npi_present_2                                        46.9  53.9  64.3  98.0
only_npi_licensor_present                            56.6  92.9  94.5  92.0
only_npi_scope                                       29.8  36.4  78.5  72.0
passive_1                                            89.2  71.9  89.3  95.0
passive_2                                            82.2  72.5  90.2  86.0
principle_A_c_command                                57.8  58.8  73.7  86.0
principle_A_case_1                                  100.0 100.0 100.0  98.0
principle_A_case_2                                   48.9  87.3  94.8  96.0
principle_A_domain_1                                 95.2  98.3  98.4  95.0
principle_A_domain_2                                 56.4  68.3  77.5  75.0
principle_A_domain_3                                 52.2  55.2  75.4  82.9
principle_A_reconstruction                           40.4  46.4  46.8  78.0
regular_plural_subject_verb_agreement_1              75.5  89.0  96.7  95.0
regular_plural_subject_verb_agreement_2              80.9  82.5  91.0  95.0
sentential_negation_npi_licensor_present             92.7 100.0  97.1  92.8
sentential_negation_npi_scope                        44.7  23.2  73.2  81.0
sentential_subject_island                            60.5  42.8  35.5  60.6
superlative_quantifiers_1                            44.7  62.8  87.0  91.0
superlative_quantifiers_2                            16.5  82.6  87.2  85.0
tough_vs_raising_1                                   32.6  33.6  72.0  75.0
tough_vs_raising_2                                   77.4  93.0  88.9  81.0
transitive                                           70.8  64.7  86.0  99.0
wh_island                                            56.2  46.7  78.9  73.0
wh_questions_object_gap                              52.7  79.4  84.2  85.0
wh_questions_subject_gap                             82.0  91.5  95.6  98.0
wh_questions_subject_gap_long_distance               85.6  95.6  87.1  84.9
wh_vs_that_no_gap                                    82.5  96.9  96.8  97.0
wh_vs_that_no_gap_long_distance                      81.0  97.3  93.8  91.9
wh_vs_that_with_gap                                  17.6  42.8  55.1  77.0
wh_vs_that_with_gap_long_distance                    20.0  13.7  56.3  74.7
'''


def groups(paradigms):
    """[(heading, name, the names of its paradigms)]: overall, fields, phenomena."""
    rows = [('', 'overall', list(paradigms))]
    for heading in ('field', 'phenomenon'):
        members = {}
        for name, p in paradigms.items():
            if getattr(p, heading):
                members.setdefault(getattr(p, heading), []).append(name)
        rows += [(heading, group, members[group]) for group in sorted(members)]
    return rows


def mean(column, names):
    """Of paradigms, each counting once, whatever its number of pairs."""
    return sum(column[name] for name in names) / len(names)


def published_columns(paradigms):
    """{column: {paradigm: percent}}; none beside other pairs than BLiMP's (some toy paradigms bear the same names)."""
    head, *rows = [line.split() for line in PUBLISHED.strip().splitlines()]
    if not set(paradigms) <= {row[0] for row in rows}:
        return {}
    return {column: {row[0]: float(row[i]) for row in rows} for i, column in enumerate(head[1:], 1)}


def table(paradigms, columns, all_paradigms):
    """Lines of text: a row per group (and paradigm), a column per model."""
    rows = groups(paradigms)
    if all_paradigms:
        order = sorted(paradigms, key=lambda name: (paradigms[name].phenomenon or '', name))
        rows += [('paradigm', name, [name]) for name in order]
    wide = max(len(name) for _, name, _ in rows) + 2
    yield ''.ljust(wide) + 'paradigms' + ''.join(label.rjust(max(len(label), 6) + 2) for label in columns)
    previous = ''
    for heading, name, names in rows:
        if heading != previous:
            yield ''
        previous = heading
        yield name.ljust(wide) + f'{len(names):9}' + ''.join(
            f'{mean(column, names):{max(len(label), 6) + 2}.1f}' for label, column in columns.items())


def show(paradigms, runs, args):
    """The learning curve if there are several checkpoints, then one table for all of them."""
    first = runs[0]['paradigms'].values()
    pairs, identical = sum(r['pairs'] for r in first), sum(r['identical'] for r in first)
    print(f'{args.data}: {pairs:,} pairs in {len(paradigms)} paradigms, {identical} of identical sentences '
          f'(a tie is right); mode {args.mode}, subset {args.subset}')
    columns, wide = {}, max(len(run['checkpoint']) for run in runs)
    for i, run in enumerate(runs, 1):
        label = Path(run['folder']).resolve().name if len(runs) == 1 else f'({i})'
        columns[label] = {name: r['accuracy'] for name, r in run['paradigms'].items()}
        ties, close = (sum(r[key] for r in run['paradigms'].values()) for key in ('ties', 'close'))
        print(f"{label}  {run['checkpoint']:{wide}}  {short(run['parameters'])} parameters, step {run['iter']:,}, "
              f"{short(run['words'])} words: {run['overall']:.2f}%  ({ties} other ties, {close} closer than 0.0001)")
    shorter = {}
    for i, run in enumerate(runs, 1):                    # one such column per tokenizer
        shorter.setdefault(run['tokenizer'], (i, {name: r['shorter'] for name, r in run['paradigms'].items()}))
    for i, column in shorter.values():
        columns['shorter' if len(shorter) == 1 else f'shorter({i})'] = column
    print()
    published = published_columns(paradigms)
    print('\n'.join(table(paradigms, {**columns, **published}, args.paradigms)))
    print('\nshorter: how often the good sentence has fewer tokens (as many: half); an untrained model tends to it')
    if published:
        print('5-gram, LSTM, GPT-2 (large) and human: published by the authors of BLiMP, for all pairs')


def plot(runs, path):
    """Accuracy over words (or steps), a line per run."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    x = 'words' if all(run['words'] for run in runs) else 'iter'
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for folder in dict.fromkeys(run['folder'] for run in runs):
        points = sorted((run[x], run['overall']) for run in runs if run['folder'] == folder)
        axes.plot(*zip(*points), marker='o', label=folder)
    base = sum(r['shorter'] for r in runs[0]['paradigms'].values()) / len(runs[0]['paradigms'])
    axes.axhline(base, color='grey', linestyle=':', label='fewer tokens')
    axes.set(xlabel='words' if x == 'words' else 'steps', ylabel='BLiMP accuracy (%)')
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches='tight', format=path.suffix[1:] or 'png')


# ---------------------------------------------------------------------------------------------------------------
# The command


def score_checkpoint(path, paradigms, args, cache):
    """-> everything that --json writes of one checkpoint."""
    model, ckpt = load_checkpoint(path, args.device)
    meta = prepare.load_meta(ckpt['folder'])
    key = meta['tokenizer']['hash']
    if ckpt['tokenizer'] != key:
        raise UserError(f"{ckpt['folder']}/meta.json describes another tokenizer than {path} was trained with")
    if key not in cache:                                 # checkpoints of one run share their sentences
        tokenizer = prepare.load_tokenizer(ckpt['folder'])
        cache[key] = Sentences(paradigms, tokenizer, meta.get('slots', 1), meta.get('pad', -1), args.mode)
    sentences = cache[key]
    sentences.check_length(paradigms, model.config.block_size)
    # the largest thing in memory is (tokens, vocabulary) of float32: at most 2 GiB of it at once
    most = sentences.slots * (1024 if args.device == 'cpu' else 32768)
    budget = args.batch_tokens or min(most, 2 ** 29 // sentences.n_vocab)
    result = evaluate(paradigms, sentences, score(model, sentences, budget, args.device))
    by_group = {'field': {}, 'phenomenon': {}}
    accuracy = {name: r['accuracy'] for name, r in result.items()}
    for heading, name, names in groups(paradigms)[1:]:
        by_group[heading][name] = mean(accuracy, names)
    return dict(checkpoint=str(path), folder=ckpt['folder'], model=ckpt['model'], parameters=model.count_params()[0],
                tokenizer=key, iter=ckpt['iter'], words=ckpt['words'],
                overall=mean(accuracy, list(accuracy)), fields=by_group['field'], phenomena=by_group['phenomenon'],
                paradigms=result)


def read_arguments():
    parser = Parser(__doc__)
    parser.add_argument('runs', nargs='+', help='run folders (out/moep) or checkpoints (out/moep/ckpt_1M.pt)')
    parser.add_argument('--data', type=Path, help='a folder of .jsonl files, or one; the toy pairs if not given')
    parser.add_argument('--mode', choices=['harness', 'babylm2025'], default='harness')
    parser.add_argument('--subset', choices=['full', 'filtered', 'fast'], default='full',
                        help="BabyLM's, from blimp_<subset>_pair_ids.json in or beside the data folder")
    parser.add_argument('--paradigms', action='store_true', help='print every paradigm, not only fields and phenomena')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write everything, the scores of every pair too')
    parser.add_argument('--plot', type=Path, metavar='FILE', help='draw the learning curve (needs matplotlib)')
    parser.add_argument('--device', default='auto', help='auto, cuda, mps or cpu')
    parser.add_argument('--batch_tokens', type=int, default=0, help='tokens in a batch, padding included; 0: automatic')
    args = parser.parse_args()
    check_writable(args.json)
    check_writable(args.plot)
    if args.plot and args.plot.suffix not in ('.png', '.pdf', '.svg', ''):
        raise UserError(f'--plot {args.plot}: the file can be a .png, .pdf or .svg')
    if args.batch_tokens < 0:
        raise UserError(f'--batch_tokens {args.batch_tokens}: a positive number, or 0')
    if args.plot and not importlib.util.find_spec('matplotlib'):
        raise UserError('--plot needs matplotlib: pip install matplotlib')
    return args


def main():
    args = read_arguments()
    args.device = Machine(args.device).device.type
    torch.set_float32_matmul_precision('highest')        # no TF32
    if args.data is None:
        args.data = Path('data/toy_blimp')
        if not args.data.exists():
            prepare.make_toy()
    if len(args.runs) > 1:
        for path in args.runs:
            read_checkpoint(path)                        # a wrong path is told now, not when its turn comes
    paradigms, cache = read_pairs(args.data, args.subset), {}
    runs = [score_checkpoint(path, paradigms, args, cache) for path in args.runs]
    folders = list(dict.fromkeys(run['folder'] for run in runs))
    runs.sort(key=lambda run: (folders.index(run['folder']), run['words'], run['iter']))   # ckpt_2M before ckpt_10M
    if args.json:
        about = dict(data=str(args.data), mode=args.mode, subset=args.subset, device=args.device)
        write_json(args.json, dict(about, runs=runs))
    if args.plot:
        plot(runs, args.plot)
    show(paradigms, runs, args)


if __name__ == '__main__':
    run_main(main)
