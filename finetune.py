"""
GLUE and SuperGLUE: fine-tune a trained model on classification tasks, with low-rank adapters (lora.py) or as a whole.

    python finetune.py out/moep                                      # the toy task, which is made if missing
    python finetune.py out/moep --task rte --data data/glue          # one task of a folder, with the paper's seeds
    python finetune.py out/moep --task all --data data/glue --full --seeds 3,12,42 --json glue.json  # all weights train

The data folder holds BabyLM's files (rte.train.jsonl, rte.valid.jsonl) or GLUE's (RTE/train.tsv, RTE/dev.tsv). A text is
read as end-of-text and its tokens; of a pair, a newline stands between the two. The state of the last of these tokens,
after the model's final norm, goes through a linear classifier. What is longer than --length tokens is shortened at its
end: of a pair the longer text until both are equally long, then both.
Settings are those of PaPaformer's Table 5. The best epoch counts; after --patience epochs without a better one training
stops. `majority` is what always the commonest label of the training set would get.
"""

import copy
import json
import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import prepare
from errors import Parser, UserError, check_writable, run_main, write_json
from lora import add_lora, merge_lora
from machine import Machine, Replay
from settings import Settings
from train import learning_rate, load_checkpoint, make_optimizer, set_rate, short


@dataclass
class Task:
    texts: list                            # one text or two, made of a row's columns
    labels: list | None                    # the names of labels 0, 1, ...; None: a score from 0 to 5
    metrics: list                          # the first one decides and counts in the averages
    suite: str = 'GLUE'                    # whose average it belongs to
    seeds: tuple = (3, 12, 42, 100, 200)   # section 5.3.1


PAIR, ENTAILS = ['{sentence1}', '{sentence2}'], ['entailment', 'not_entailment']
TASKS = dict(
    cola=Task(['{sentence}'], ['unacceptable', 'acceptable'], ['Matthews', 'accuracy']),
    sst2=Task(['{sentence}'], ['negative', 'positive'], ['accuracy']),
    mrpc=Task(PAIR, ['not_equivalent', 'equivalent'], ['F1', 'accuracy']),
    stsb=Task(PAIR, None, ['correlation', 'Pearson', 'Spearman']),
    qqp=Task(['{question1}', '{question2}'], ['not_duplicate', 'duplicate'], ['F1', 'accuracy'], seeds=(42,)),
    mnli=Task(PAIR, ['entailment', 'neutral', 'contradiction'], ['accuracy'], seeds=(12, 42)),
    qnli=Task(['{question}', '{sentence}'], ENTAILS, ['accuracy']),
    rte=Task(PAIR, ENTAILS, ['accuracy']),
    boolq=Task(['{passage}', '{question}'], ['false', 'true'], ['accuracy'], 'SuperGLUE'),
    wsc=Task(['{text}', '{span2_text}: {span1_text}'], ['false', 'true'], ['accuracy'], 'SuperGLUE'),
    multirc=Task(['{paragraph}', '{question} {answer}'], ['false', 'true'], ['accuracy'], 'SuperGLUE'),
    toy=Task(['{sentence}'], ['he', 'she'], ['accuracy'], 'toy', seeds=(12, 42)))
RENAMED = {'premise': 'sentence1', 'hypothesis': 'sentence2', '#1 String': 'sentence1', '#2 String': 'sentence2',
           'Quality': 'label', 'is_duplicate': 'label', 'gold_label': 'label', 'score': 'label'}


# ---------------------------------------------------------------------------------------------------------------
# Files -> examples


def find_files(folder):
    """{task: {'train': files, 'valid': files}} of what a folder holds; tasks by their names with or without signs."""
    found = {}
    plain = lambda name: re.sub(r'[^a-z0-9]', '', name.lower())                 # SST-2 -> sst2
    for path in sorted([*folder.glob('*'), *folder.glob('*/*')]):
        task = next((t for t in (plain(path.name.split('.')[0]), plain(path.parent.name)) if t in TASKS), None)
        split = re.search(r'train|valid|val|dev', path.stem)
        if task and split and path.suffix in ('.jsonl', '.tsv') and 'mismatched' not in path.stem:
            files = found.setdefault(task, dict(train=[], valid=[]))
            (files := files['train' if split[0] == 'train' else 'valid']).append(path)
            if len({(file.parent, file.suffix) for file in files}) > 1:
                raise UserError(f'{task} is there twice: {files[0]} and {path}')
    return found


def choose_tasks(wanted, folder):
    """{task: its files} of the tasks that can be trained; what cannot is an error, or with 'all' told and left out."""
    names = list(TASKS) if wanted == 'all' else wanted.split(',')
    if wrong := [name for name in names if name not in TASKS]:
        raise UserError(f"there is no task '{wrong[0]}'; there are: all, {', '.join(TASKS)}")
    if not folder.is_dir():
        raise UserError(f'there is no folder {folder}')
    found, chosen = find_files(folder), {}
    for name in names:
        files = found.get(name, dict(train=[], valid=[]))
        missing = ' and no '.join(split for split, paths in files.items() if not paths)
        if not missing:
            chosen[name] = files
        elif wanted != 'all':
            raise UserError(f'{folder} holds no {missing} file of {name}, as {name}.train.jsonl and {name}.valid.jsonl, '
                            f'or {name}/train.tsv and {name}/dev.tsv')
        elif name in found:
            print(f'{name} is left out: {folder} holds no {missing} file of it')
    if not chosen:
        raise UserError(f'{folder} holds no task with a train and a valid file, as rte.train.jsonl and rte.valid.jsonl')
    return chosen


def read_rows(path, name):
    """(line number, {column: value}) of a file's rows."""
    try:
        lines = path.read_text(encoding='utf-8-sig').split('\n')
    except UnicodeDecodeError:
        raise UserError(f'{path} is not UTF-8 text') from None
    columns, first = lines[0].rstrip('\r').split('\t'), int(path.suffix == '.tsv')
    if name == 'cola' and first and 'sentence' not in columns:
        columns, first = ['source', 'label', 'mark', 'sentence'], 0             # its authors wrote no header
    for number, line in enumerate(lines[first:], first + 1):
        if not line.strip():
            continue
        if path.suffix == '.tsv':
            row = dict(zip(columns, line.rstrip('\r').split('\t')))
        else:
            try:
                row = dict(json.loads(line))
            except (ValueError, TypeError):
                raise UserError(f'{path}:{number}: not a row of JSON, {{"column": value, ...}}') from None
        yield number, {RENAMED.get(column, column): value for column, value in row.items()}


def read_label(value, task):
    """The number of a label that is given by number or name; a score. ValueError if it is none."""
    text = str(value).strip().lower()
    if task.labels is None and 0 <= float(text) <= 5:
        return float(text)
    names = task.labels or []
    return names.index(text) if text in names else list(map(str, range(len(names)))).index(text)


def read_examples(paths, name, n=None):
    """-> [texts of each example], [labels]; the first n of them"""
    task, texts, labels = TASKS[name], [], []
    needed = [*re.findall(r'{(\w+)}', ' '.join(task.texts)), 'label']
    for path in paths:
        before = len(labels)
        for number, row in read_rows(path, name):
            if missing := [column for column in needed if column not in row]:
                raise UserError(f"{path}:{number}: there is no column '{missing[0]}'; {name} needs {', '.join(needed)}")
            try:
                texts.append([template.format_map(row) for template in task.texts])
                for column in needed[:-1]:
                    row[column].encode('utf-8')          # JSON can spell half a character
            except (AttributeError, ValueError):
                raise UserError(f"{path}:{number}: column '{column}' is not text") from None
            try:
                labels.append(read_label(row['label'], task))
            except ValueError:
                allowed = '0 to 5' if task.labels is None else ', '.join(f'{i} ({w})' for i, w in enumerate(task.labels))
                raise UserError(f"{path}:{number}: label {row['label']!r} is none of {name}'s: {allowed}") from None
        if len(labels) == before:
            raise UserError(f'{path}:1: the file is empty, no example in it')
    return texts[:n], labels[:n]


# ---------------------------------------------------------------------------------------------------------------
# Examples -> batches


def shorten(lengths, room):
    """How many tokens to keep of one text, or of two: the longer one is cut down to the other, then both alike."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first = min(lengths[0], max(room - lengths[1], -(-room // 2)))
    return [first, min(lengths[1], room - first)]


def encode(texts, tokenizer, limit):
    """Token ids: end-of-text, the text; of a pair a newline and the second. At most `limit` tokens; for the byte-level
    model a token is a chunk of `slots` symbols, and is kept or dropped whole."""
    slots = len(tokenizer.end)
    parts = [tokenizer.encode(text) for text in texts]
    between = tokenizer.encode('\n') if len(parts) == 2 else []
    kept = shorten([len(part) // slots for part in parts], limit - 1 - len(between) // slots)
    first, *second = [part[:n * slots] for part, n in zip(parts, kept)]
    return [*tokenizer.end, *first, *between, *chain(*second)]


class Examples:
    """Encoded texts and labels, all of them on the device; a batch is one indexing operation."""

    def __init__(self, texts, labels, tokenizer, limit, device):
        ids = [encode(text, tokenizer, limit) for text in texts]
        self.slots, self.width, self.device = len(tokenizer.end), limit * len(tokenizer.end), device
        self.lengths = np.array([len(i) for i in ids])
        self.flat = torch.from_numpy(np.fromiter(chain.from_iterable(ids), np.int32)).to(device)
        self.length = torch.from_numpy(self.lengths).to(device)
        self.start = self.length.cumsum(0) - self.length
        self.filler = torch.tensor(tokenizer.end, device=device)
        self.labels = torch.tensor(labels, device=device)

    def batch(self, rows, longest):
        """-> ids (B, T), filled up on the right, which a causal model does not see, and each row's last real place."""
        step = 8 * self.slots                            # few widths: few shapes for a GPU to prepare for
        t = torch.arange(min(-(-longest // step) * step, self.width), device=self.device)
        length = self.length[rows, None]
        ids = self.flat[(self.start[rows, None] + t).clamp(max=len(self.flat) - 1)].long()
        return torch.where(t < length, ids, self.filler[t % self.slots]), length[:, 0] - 1

    def batches(self, order, size):
        """(rows on the device, ids, last) of examples in that order."""
        for i, rows in enumerate(torch.from_numpy(order).to(self.device).split(size)):
            yield rows, *self.batch(rows, int(self.lengths[order[i * size:(i + 1) * size]].max()))

    def shuffled(self, seed, epoch, size):
        """All examples in a new order, with those of a batch of like length: sorted within pools of 16 batches."""
        rng = np.random.default_rng([seed, epoch])
        order, pool = rng.permutation(len(self.lengths)), 16 * size
        for i in range(0, len(order), pool):
            order[i:i + pool] = sorted(order[i:i + pool], key=lambda row: self.lengths[row])
        whole = len(order) // size                       # batches; what is left over comes last
        return np.concatenate((rng.permutation(order[:whole * size].reshape(whole, size)).ravel(), order[whole * size:]))


# ---------------------------------------------------------------------------------------------------------------
# Metrics, from predictions and labels as arrays


def f1(p, y):                                            # of class 1
    return 2 * np.sum((p == 1) & (y == 1)) / max(1, np.sum(p == 1) + np.sum(y == 1))


def pearson(p, y):
    p, y = (np.asarray(v, float) - np.mean(v) for v in (p, y))
    size = np.sqrt(np.sum(p * p) * np.sum(y * y))
    return float(np.sum(p * y) / size) if size > 0 else 0.0       # a constant goes along with nothing


def spearman(p, y):
    """The correlation of ranks; equal values have their mean rank."""
    def ranks(v):
        _, which, count = np.unique(v, return_inverse=True, return_counts=True)
        return (count.cumsum() - (count - 1) / 2)[which]
    return pearson(ranks(p), ranks(y))


METRICS = {'accuracy': lambda p, y: np.mean(p == y), 'F1': f1, 'Pearson': pearson, 'Spearman': spearman,
           'Matthews': lambda p, y: pearson(p == 1, y == 1),                    # of two classes it is just that
           'correlation': lambda p, y: (pearson(p, y) + spearman(p, y)) / 2}    # as GLUE counts STS-B


def score(predictions, labels, task):
    return {name: 100 * float(METRICS[name](np.asarray(predictions), np.asarray(labels))) for name in task.metrics}


def majority(train_labels, labels, task):                # the scores of always the same answer
    return score([Counter(train_labels).most_common(1)[0][0]] * len(labels), labels, task)


# ---------------------------------------------------------------------------------------------------------------
# Training


class Classifier(nn.Module):
    """A linear map on the last real token's state; one output for a score."""

    def __init__(self, model, n_out):
        super().__init__()
        self.model, self.out = model, nn.Linear(model.config.n_embd, n_out)

    def forward(self, ids, last):
        states, _ = self.model.features(ids)
        return self.out(states[torch.arange(len(ids), device=ids.device), last]).float()


@torch.no_grad()
def predict(classifier, data, machine):
    """Predictions for all examples, in their order: labels or scores. The device is waited for once."""
    classifier.eval()
    order = np.argsort(-data.lengths, kind='stable')
    size = max(1, (65536 if machine.cuda else 4096) * data.slots // int(data.lengths.max()))
    with machine.autocast():
        outputs = torch.cat([classifier(ids, last) for _, ids, last in data.batches(order, size)]).cpu()
    if not outputs.isfinite().all():
        raise UserError("the model's outputs are not finite; lower --learning_rate")
    found = outputs[:, 0] if outputs.size(1) == 1 else outputs.argmax(1)
    return found.numpy()[np.argsort(order)]              # back in the examples' own order


def fit(base, task, train, valid, seed, args, machine, bar):
    """One run -> its scores at the best epoch, and how it came there."""
    torch.manual_seed(seed)
    began, model = time.perf_counter(), copy.deepcopy(base)
    model = model if args.full else add_lora(model, rank=args.rank)
    classifier = Classifier(model, len(task.labels or [0])).to(machine.device)
    s = Settings(learning_rate=args.learning_rate, weight_decay=0.1, beta2=0.999, schedule='linear')
    optimizer, history = make_optimizer(classifier, s, machine), []
    it, steps = 0, -(-len(train.lengths) // args.batch_size)

    def step(ids, last, y):
        optimizer.zero_grad(set_to_none=True)
        with machine.autocast():
            out = classifier(ids, last)
        loss = F.mse_loss(out[:, 0], y) if task.labels is None else F.cross_entropy(out, y)
        loss.backward()
        nn.utils.clip_grad_norm_(classifier.parameters(), s.grad_clip)
        optimizer.step()
    step = Replay(step, machine)
    for epoch in range(args.epochs):
        classifier.train()
        for rows, ids, last in train.batches(train.shuffled(seed, epoch, args.batch_size), args.batch_size):
            set_rate(optimizer, learning_rate(it, s, steps * args.epochs))
            step(ids, last, train.labels[rows])
            it += 1
            bar.update()
        history.append(score(predict(classifier, valid, machine), valid.labels.cpu(), task))
        values = [scores[task.metrics[0]] for scores in history]
        best = int(np.argmax(values))                    # the first of equals
        bar.set_postfix_str(f'seed {seed}, epoch {epoch + 1}: {values[-1]:.2f}')
        if epoch - best >= args.patience or values[best] == 100:                # or no better one is possible
            bar.update(steps * (args.epochs - epoch - 1))
            break
    step.found.clear()                                   # its graphs, before another run records its own
    return dict(seed=seed, scores=history[best], best_epoch=best + 1, epochs=len(history), history=history,
                trained=sum(p.numel() for p in classifier.parameters() if p.requires_grad),
                seconds=time.perf_counter() - began)


def run_task(name, rows, base, tokenizer, args, machine):
    """-> everything that --json writes of one task."""
    task, seeds = TASKS[name], args.seeds or TASKS[name].seeds
    limit = min(args.length, base.config.block_size // len(tokenizer.end))
    train, valid = (Examples(*rows[split], tokenizer, limit, machine.device) for split in ('train', 'valid'))
    total = len(seeds) * args.epochs * -(-len(train.lengths) // args.batch_size)
    with tqdm(total=total, desc=name, unit='step', disable=None, leave=False) as bar:
        runs = [fit(base, task, train, valid, seed, args, machine, bar) for seed in seeds]
    scores = {metric: [run['scores'][metric] for run in runs] for metric in task.metrics}
    return dict(task=name, train=len(train.lengths), valid=len(valid.lengths), limit=limit,
                majority=majority(rows['train'][1], rows['valid'][1], task),
                mean={metric: statistics.fmean(values) for metric, values in scores.items()},
                spread={metric: statistics.stdev(v) if len(v) > 1 else None for metric, v in scores.items()}, runs=runs)


# ---------------------------------------------------------------------------------------------------------------
# The command


def averages(results, blimp):
    """The columns of Table 7: the mean of each suite's tasks, and the mean of BLiMP, GLUE and SuperGLUE."""
    found = {}
    for suite in ('GLUE', 'SuperGLUE'):
        members = [name for name, task in TASKS.items() if task.suite == suite]
        if scores := [r['mean'][TASKS[r['task']].metrics[0]] for r in results if r['task'] in members]:
            found[suite] = dict(mean=statistics.fmean(scores), tasks=len(scores), of=len(members))
    if blimp is not None and len(found) == 2:
        found['macro'] = dict(mean=(blimp + found['GLUE']['mean'] + found['SuperGLUE']['mean']) / 3)
    return found


def show(result):
    name, runs = result['task'], result['runs']
    rest = (f"{len(runs):7}{statistics.fmean(r['best_epoch'] for r in runs):7.1f}{result['train']:9,}{result['valid']:8,}"
            f"{sum(r['seconds'] for r in runs) / 60:9.1f}")
    for metric, mean in result['mean'].items():
        spread = '-' if len(runs) == 1 else f"{result['spread'][metric]:.2f}"
        print(f"{name:10}{metric:11}{mean:8.2f}{spread:>7}{result['majority'][metric]:10.2f}{rest}", flush=True)
        name = rest = ''                                 # its other metrics stand below


def read_blimp(path, run):
    try:
        found = json.loads(path.read_text())
        if Path(found['data']).name == 'toy_blimp':
            raise UserError(f'{path} holds a score on the toy pairs; the average needs BLiMP itself')
        return {Path(r['checkpoint']).resolve(): float(r['overall']) for r in found['runs']}[Path(run).resolve()]
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f'{path} has no score of {run}, as eval_blimp.py --json writes it') from None


def read_arguments():
    parser = Parser(__doc__)
    parser.add_argument('run', help='a run folder (out/moep) or one of its checkpoints')
    parser.add_argument('--task', default='all', help=f"all that the folder holds, or some: {','.join(TASKS)}")
    parser.add_argument('--data', type=Path, default=Path('data/toy_glue'), help='the folder of the tasks; the toy task at first')
    how = parser.add_mutually_exclusive_group()
    how.add_argument('--lora', action='store_true', help='train adapters and the classifier (the default)')
    how.add_argument('--full', action='store_true', help='train all weights')
    parser.add_argument('--seeds', help="as 3,12,42; each task's own if not given (the paper's)")
    parser.add_argument('--rank', type=int, default=8, help='of the adapters')
    parser.add_argument('--epochs', type=int, default=32, help='at most')
    parser.add_argument('--patience', type=int, default=5, help='epochs without a better score')
    parser.add_argument('--batch_size', type=int, default=64)
    parser.add_argument('--learning_rate', type=float, default=1e-3, help='at the start; it falls linearly to zero')
    parser.add_argument('--length', type=int, default=128, help="tokens, or less if the model's block_size is less")
    parser.add_argument('--num', type=int, help='so many training examples, from the front; all if not given')
    parser.add_argument('--blimp', type=Path, metavar='FILE', help='what eval_blimp.py --json wrote, for the average')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write everything, every epoch of every seed too')
    parser.add_argument('--device', default='auto', help='cuda, mps or cpu, whichever is there')
    args = parser.parse_args()
    for name, least in dict(rank=1, epochs=1, patience=1, batch_size=1, learning_rate=1e-12, num=1, length=8).items():
        if getattr(args, name) is not None and not getattr(args, name) >= least:
            raise UserError(f'--{name} {getattr(args, name)}: it must be at least {least}')
    try:
        args.seeds = args.seeds and [int(seed) for seed in args.seeds.split(',')]
        if args.seeds and (min(args.seeds) < 0 or len(set(args.seeds)) < len(args.seeds)):
            raise ValueError
    except ValueError:
        raise UserError(f'--seeds {args.seeds}: different whole numbers with commas, as 3,12,42') from None
    return args


def main():
    args = read_arguments()
    check_writable(args.json)
    machine = Machine(args.device)
    blimp = read_blimp(args.blimp, args.run) if args.blimp else None
    if args.data.name == 'toy_glue' and not args.data.exists():
        prepare.make_toy(args.data.parent)
    tasks = choose_tasks(args.task, args.data)
    rows = {name: {split: read_examples(paths, name, args.num if split == 'train' else None)
                   for split, paths in files.items()} for name, files in tasks.items()}      # all files, before any work
    model, ckpt = load_checkpoint(args.run, machine.device)
    model = merge_lora(model) if hasattr(model, 'adapted') else model
    tokenizer = prepare.load_tokenizer(ckpt['folder'])
    if tokenizer.hash != ckpt['tokenizer']:
        raise UserError(f'{args.run} was trained with another tokenizer than lies beside it')
    if model.config.block_size // len(tokenizer.end) < 8:
        raise UserError(f'a block_size of {model.config.block_size} is too short for texts')
    print(f"{args.run}: {ckpt['model']}.py, {short(model.count_params()[0])} parameters, "
          f"{'all of them trained' if args.full else f'adapters of rank {args.rank}'}, {machine.device}, {machine.dtype}")
    print('task      metric         mean      ±  majority  seeds  epoch    train   valid  minutes')
    results = []
    for name in tasks:
        results.append(run_task(name, rows[name], model, tokenizer, args, machine))
        show(results[-1])
        means = averages(results, blimp)
        if args.json:                                    # after every task: what is done is not lost
            write_json(args.json, dict(settings=vars(args), model=ckpt['model'], averages=means, tasks=results))
    for suite, value in means.items():
        about = f"{value['tasks']} of its {value['of']} tasks" if 'of' in value else f'with BLiMP {blimp:.2f}'
        print(f"{suite:21}{value['mean']:8.2f}   {about}")


if __name__ == '__main__':
    run_main(main)
