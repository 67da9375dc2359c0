"""
GLUE and SuperGLUE: fine-tune a trained model, with low-rank adapters (tools/lora.py) or as a whole.

    python -m tools.finetune out/moep                              # the toy task, made if missing
    python -m tools.finetune out/moep --task rte --data data/glue  # one task, PaPaformer's seeds
    python -m tools.finetune out/moep --data data/glue --full --seeds 3,12,42 --json glue.json

The data folder holds BabyLM's files (rte.train.jsonl, rte.valid.jsonl) or GLUE's (RTE/train.tsv,
RTE/dev.tsv). The model reads end-of-text, then the text; the two texts of a pair are joined by a
newline. The last token's final-norm state goes through a linear classifier. The settings are those
of PaPaformer's Table 5. The best epoch counts; --patience epochs without gain, or 100%, end a run.
`majority` is the score of always answering the training set's most common label.
"""

import copy
import json
import math
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from plumbing.checkpoint import load_checkpoint, run_tokenizer
from plumbing.cli import (Parser, UserError, between, human, numbers, reading, run_main,
                          write_json)
from plumbing.graph import CUDAGraphStep
from plumbing.machine import Machine
from plumbing.settings import Settings
from plumbing.text import read_lines
from plumbing.toy import PLACES, THINGS, Dice, expand
from prepare import write_jsonl
from tools.lora import add_lora, merge_lora
from train import learning_rate, make_optimizer, set_rate, train_step


@dataclass
class Task:
    texts: list                            # one text or two, made of a row's columns
    labels: list                           # names of labels 0, 1, ...
    metrics: list                          # the first one decides
    seeds: tuple = (3, 12, 42, 100, 200)   # PaPaformer, section 5.3.1


PAIR = ['{sentence1}', '{sentence2}']
BOOLEAN = ['false', 'true']
TASKS = dict(
    cola=Task(['{sentence}'], ['unacceptable', 'acceptable'], ['Matthews', 'accuracy']),
    sst2=Task(['{sentence}'], ['negative', 'positive'], ['accuracy']),
    mrpc=Task(PAIR, ['not_equivalent', 'equivalent'], ['F1', 'accuracy']),
    qqp=Task(['{question1}', '{question2}'], ['not_duplicate', 'duplicate'], ['F1', 'accuracy'],
             seeds=(42,)),
    mnli=Task(PAIR, ['entailment', 'neutral', 'contradiction'], ['accuracy'], seeds=(12, 42)),
    qnli=Task(['{question}', '{sentence}'], ['entailment', 'not_entailment'], ['accuracy']),
    rte=Task(PAIR, ['entailment', 'not_entailment'], ['accuracy']),
    boolq=Task(['{passage}', '{question}'], BOOLEAN, ['accuracy']),
    wsc=Task(['{text}', '{span2_text}: {span1_text}'], BOOLEAN, ['accuracy']),
    multirc=Task(['{paragraph}', '{question} {answer}'], BOOLEAN, ['accuracy']),
    toy=Task(['{sentence}'], ['he', 'she'], ['accuracy'], seeds=(12, 42)))
RENAMED = {'premise': 'sentence1', 'hypothesis': 'sentence2', '#1 String': 'sentence1',
           '#2 String': 'sentence2', 'Quality': 'label', 'is_duplicate': 'label',
           'gold_label': 'label'}                        # what some files call these columns


class Classifier(nn.Module):
    """A linear map on the last real token's state. Called as train.py calls a model, with (ids,
    place of the last token) and labels."""

    def __init__(self, model, n_labels):
        super().__init__()
        self.model = model
        self.out = nn.Linear(model.config.n_embd, n_labels)

    def forward(self, x, labels=None):
        ids, last = x
        states, _ = self.model.features(ids)             # (B, T, D)
        rows = torch.arange(len(ids), device=ids.device)
        out = self.out(states[rows, last]).float()       # (B, n_labels)
        return out, None if labels is None else F.cross_entropy(out, labels), {}


def fit(base, task, train, valid, seed, args, machine):
    """Train a copy of `base` -> its scores at the best epoch, and how it got there."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    model = copy.deepcopy(base)
    if not args.full:
        model = add_lora(model, rank=args.rank)
    classifier = Classifier(model, len(task.labels)).to(machine.device)
    s = Settings(learning_rate=args.learning_rate, weight_decay=0.1, beta2=0.999, schedule='linear')
    optimizer = make_optimizer(classifier, s, machine)

    step = CUDAGraphStep(lambda ids, last, labels: train_step(
        classifier, optimizer, s, machine, [(ids, last)], [labels]), machine)
    steps_per_epoch = math.ceil(len(train.lengths) / args.batch_size)
    history = []
    for epoch in tqdm(range(args.epochs), f'seed {seed}', unit='epoch', disable=None, leave=False):
        classifier.train()
        batches = train.batches(train.shuffled(seed, epoch, args.batch_size), args.batch_size)
        for it, (rows, ids, last) in enumerate(batches, start=epoch * steps_per_epoch):
            set_rate(optimizer, learning_rate(it, s, steps_per_epoch * args.epochs))
            step(ids, last, train.labels[rows])
        predictions = predict(classifier, valid, machine)
        history.append(score_predictions(predictions, valid.labels.cpu(), task))
        values = [scores[task.metrics[0]] for scores in history]
        best = int(np.argmax(values))                    # the first of equals; 100% ends the run
        if epoch - best >= args.patience or values[best] == 100:
            break
    step.graphs.clear()                                  # the next run records its own
    trained = sum(p.numel() for p in classifier.parameters() if p.requires_grad)
    return dict(seed=seed, scores=history[best], best_epoch=best + 1, epochs=len(history),
                history=history, trained=trained, seconds=time.perf_counter() - began)


@torch.no_grad()
def predict(classifier, data, machine):
    """Labels of all examples, in their order. Waits for the device only once."""
    classifier.eval()
    order = np.argsort(-data.lengths, kind='stable')
    tokens_per_batch = 65536 if machine.cuda else 4096
    size = max(1, tokens_per_batch * data.slots // int(data.lengths.max()))
    with machine.autocast():
        outputs = [classifier((ids, last))[0] for _, ids, last in data.batches(order, size)]
    outputs = torch.cat(outputs).cpu()
    if not outputs.isfinite().all():
        raise UserError("the model's outputs are not finite; lower --learning_rate")
    return outputs.argmax(1).numpy()[np.argsort(order)]          # back in the examples' own order


def run_task(name, train_set, valid_set, base, tokenizer, args, machine):
    """One run per seed -> everything that --json writes of a task."""
    task = TASKS[name]
    limit = min(args.length, base.config.block_size // len(tokenizer.end))
    train = Examples(*train_set, tokenizer, limit, machine.device)
    valid = Examples(*valid_set, tokenizer, limit, machine.device)
    runs = [fit(base, task, train, valid, seed, args, machine)
            for seed in args.seeds or task.seeds]
    values = {metric: [run['scores'][metric] for run in runs] for metric in task.metrics}
    std = statistics.stdev if len(runs) > 1 else lambda values: None
    return dict(task=name, train=len(train.lengths), valid=len(valid.lengths), limit=limit,
                majority=majority(train_set[1], valid_set[1], task),
                mean={metric: statistics.fmean(values[metric]) for metric in values},
                spread={metric: std(values[metric]) for metric in values}, runs=runs)


# ---- Metrics ------------------------------------------------------------------------------------

def matthews(p, y):
    """The correlation of zeros and ones."""
    p = np.asarray(p, float) - np.mean(p)
    y = np.asarray(y, float) - np.mean(y)
    size = np.sqrt(np.sum(p * p) * np.sum(y * y))
    return float(np.sum(p * y) / size) if size > 0 else 0.0      # a constant is uncorrelated


METRICS = dict(                                                  # of predictions p and labels y
    accuracy=lambda p, y: np.mean(p == y),
    F1=lambda p, y: 2 * np.sum(p * y) / max(1, np.sum(p + y)),   # of class 1; labels are 0 and 1
    Matthews=matthews)


def score_predictions(predictions, labels, task):
    p, y = np.asarray(predictions), np.asarray(labels)
    return {name: 100 * float(METRICS[name](p, y)) for name in task.metrics}


def majority(train_labels, labels, task):
    """The scores of always answering the most common label."""
    return score_predictions([statistics.mode(train_labels)] * len(labels), labels, task)


# ---- Files -> texts and labels -> batches -------------------------------------------------------

def find_files(folder, name):
    """{'train': files, 'valid': files} of a task, by their names without signs: sst2/dev.tsv"""
    files = dict(train=[], valid=[])
    for path in sorted([*folder.glob('*'), *folder.glob('*/*')]):
        plain = re.sub('[^a-z0-9/.]', '', path.relative_to(folder).as_posix().lower())
        match = re.fullmatch(rf'{name}[./](train|valid|val|dev|devmatched)\.(jsonl|tsv)', plain)
        if match:
            files['train' if match[1] == 'train' else 'valid'].append(path)
    return files


# In the grammar of plumbing/toy.ini: is [person/a] a man or a woman?
SUBJECT = ['The [size] [person/a] [near] the [person/b] [be/a] [feel].',
           'The [person/a] who [met] the [person/b] [move/a] [how].',
           'The [person/a] [near] the [person/b] [like/a] the [thing] at the [place].']


def make_toy_task(folder):
    """Is a sentence about men (label 0) or women (1)? The others in it are of the other sex, so
    that counting words does not help."""
    dice = Dice('toy_glue')
    rows = {}
    while len(rows) < 2300:
        label = len(rows) % 2
        place = dice.pick(PLACES)
        many, others, past = dice.coin(), dice.coin(), dice.coin()
        who = dict(a=[many, label], b=[others, 1 - label], h=[0, 0])
        sentence = expand(SUBJECT, dice, who, past, dict(thing=THINGS[place], place=place))
        rows.setdefault(sentence, dict(sentence=sentence, label=label))
    rows = list(rows.values())
    write_jsonl(folder, {'toy.train': rows[:2000], 'toy.valid': rows[2000:]}, overwrite=False)


def choose_tasks(wanted, folder):
    """{task: its files}. 'all' are those of which the folder has a file."""
    tasks = {name: find_files(folder, name)
             for name in (TASKS if wanted == 'all' else wanted.split(','))}
    if wanted == 'all':
        tasks = {name: files for name, files in tasks.items() if any(files.values())}
    missing = [name for name, files in tasks.items()
               if name not in TASKS or not all(files.values())]
    if missing or not tasks:
        raise UserError(f"{folder} lacks the train or the valid file of "
                        f"{', '.join(missing) or 'any task'}; tasks are {', '.join(TASKS)}, files "
                        'are named rte.train.jsonl, rte.valid.jsonl')
    return tasks


def read_table(path, name):
    """{column: value} of each row of a .tsv or .jsonl file."""
    lines = [line.rstrip('\r\n') for _, line in read_lines(path) if line.strip()]
    if path.suffix == '.jsonl':
        rows = map(json.loads, lines)
    else:
        columns, *values = [line.split('\t') for line in lines]
        if name == 'cola' and 'sentence' not in columns:         # its authors wrote no header
            columns, values = ['source', 'label', 'mark', 'sentence'], [columns, *values]
        rows = [dict(zip(columns, row)) for row in values]
    return [{RENAMED.get(column, column): value for column, value in row.items()} for row in rows]


def read_examples(paths, name):
    """-> [texts of each example], [labels], which a file gives by name or number"""
    task = TASKS[name]
    numbers = [str(i) for i in range(len(task.labels))]
    texts, labels = [], []
    for path in paths:
        with reading(path):
            for row in read_table(path, name):
                texts.append([template.format_map(row) for template in task.texts])
                label = str(row['label']).strip().lower()
                names = task.labels if label in task.labels else numbers
                labels.append(names.index(label))        # ValueError: no such label
    return texts, labels


def encode(texts, tokenizer, limit):
    """Token ids, at most `limit`: end-of-text and the text; a newline joins the texts of a pair, of
    which first the longer is cut, then both alike."""
    slots = len(tokenizer.end)                           # of a chunk of bytes; 1: tokens
    first, second = [*map(tokenizer.encode, texts), []][:2]
    newline = tokenizer.encode('\n') if len(texts) == 2 else []
    room = limit - 1 - len(newline) // slots
    n_first = max(room - len(second) // slots, math.ceil(room / 2))
    first = first[:n_first * slots]
    return [*tokenizer.end, *first, *newline, *second[:room * slots - len(first)]]


class Examples:
    """Encoded texts and labels, all of them on the device; a batch is one indexing operation."""

    def __init__(self, texts, labels, tokenizer, limit, device):
        encoded = [encode(text, tokenizer, limit) for text in texts]
        self.slots = len(tokenizer.end)
        self.lengths = np.array([len(ids) for ids in encoded])
        table = np.tile(np.array(tokenizer.end, tokenizer.dtype), (len(encoded), limit))
        for row, ids in zip(table, encoded):
            row[:len(ids)] = ids                 # what follows is not seen (but see stlm_depth.md)
        self.ids = torch.from_numpy(table.astype(np.int32)).to(device)       # (N, limit * slots)
        self.last = torch.from_numpy(self.lengths - 1).to(device)
        self.labels = torch.tensor(labels, device=device)

    def batches(self, order, size):
        """(rows on the device, ids (B, T), place of the last real token (B,)), in that order."""
        rows = torch.from_numpy(order).to(self.ids.device)
        step = 8 * self.slots                            # few widths: few CUDA graphs
        for i in range(0, len(order), size):
            longest = self.lengths[order[i:i + size]].max()
            width = math.ceil(longest / step) * step
            batch = rows[i:i + size]
            yield batch, self.ids[batch, :width].long(), self.last[batch]

    def shuffled(self, seed, epoch, size):
        """A new order, with similar lengths in a batch: sorted in pools of 16 batches."""
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(len(self.lengths))
        for i in range(0, len(order), 16 * size):
            pool = order[i:i + 16 * size]                # a view: this sorts a part of order
            pool[:] = pool[np.argsort(self.lengths[pool], kind='stable')]
        n = len(order) // size * size                    # in full batches; the others come last
        batches = rng.permutation(order[:n].reshape(-1, size)).ravel()
        return np.concatenate((batches, order[n:]))


# ---- The command line ---------------------------------------------------------------------------

def show(task, train, valid, majority, mean, spread, runs, **_):
    epoch = statistics.fmean(run['best_epoch'] for run in runs)
    minutes = sum(run['seconds'] for run in runs) / 60
    for metric in mean:
        std = '-' if len(runs) == 1 else f'{spread[metric]:.2f}'
        print(f'{task:10}{metric:11}{mean[metric]:8.2f}{std:>7}{majority[metric]:10.2f}'
              f'{len(runs):7}{epoch:7.1f}{train:9,}{valid:8,}{minutes:9.1f}', flush=True)


def main():
    parser = Parser(__doc__)
    parser.add_argument('run', help='a run folder (out/moep) or one of its checkpoints')
    parser.add_argument('--task', default='all', help=f"all, or some of {','.join(TASKS)}")
    parser.add_argument('--data', type=Path, default='data/toy_glue', help='where the tasks are')
    parser.add_argument('--full', action='store_true', help='train all weights, not only adapters')
    parser.add_argument('--seeds', type=numbers,
                        help="such as 3,12,42; else PaPaformer's, task by task")
    count = between(1, 10 ** 6)
    parser.add_argument('--rank', type=count, default=8, help='rank of the adapters')
    parser.add_argument('--epochs', type=count, default=32, help='at most this many')
    parser.add_argument('--patience', type=count, default=5,
                        help='epochs without gain until it stops')
    parser.add_argument('--batch_size', type=count, default=64, help='examples per step')
    parser.add_argument('--learning_rate', type=between(1e-12, 1e6, float), default=1e-3,
                        help='falls linearly to zero')
    parser.add_argument('--length', type=between(8, 10 ** 6), default=128,
                        help='cut texts to this many tokens (at most block_size)')
    parser.add_argument('--json', type=Path, help="write every epoch's scores to this file")
    parser.add_argument('--device', default='auto', help='cuda, mps, cpu; auto: the first there is')
    args = parser.parse_args()
    machine = Machine(args.device)
    if args.data == Path('data/toy_glue') and not args.data.exists():
        make_toy_task(args.data)
    sets = {name: [read_examples(files[split], name) for split in ('train', 'valid')]
            for name, files in choose_tasks(args.task, args.data).items()}
    model, ckpt = load_checkpoint(args.run, machine.device)
    if hasattr(model, 'adapted'):
        model = merge_lora(model)
    tokenizer = run_tokenizer(ckpt)
    trained = 'all of them trained' if args.full else f'adapters of rank {args.rank}'
    print(f"{args.run}: {ckpt['model']}, {human(model.count_params()[0])} parameters, {trained}, "
          f'{machine.device}, {machine.dtype}')
    print('task      metric         mean      ±  majority  seeds  epoch    train   valid  minutes')
    results = []
    for name, (train_set, valid_set) in sets.items():
        results.append(run_task(name, train_set, valid_set, model, tokenizer, args, machine))
        show(**results[-1])
        if args.json:                                    # after every task: nothing done is lost
            write_json(args.json, dict(settings=vars(args), model=ckpt['model'], tasks=results))


if __name__ == '__main__':
    run_main(main)
