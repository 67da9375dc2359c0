"""
Token bins -> batches: which windows a run reads and in which order, and those it is validated on.

The bins are small (uint16), so they are held whole on the device that trains; a batch is one
indexing operation. Nothing here knows a model.
"""

import itertools
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from plumbing.cli import UserError, short
from plumbing.tokenizer import load_meta, load_tokenizer


def load_bin(folder, split):
    """A split's token ids, as a read-only memory map."""
    path = Path(folder) / f'{split}.bin'
    meta = load_meta(folder)
    expected = 2 * meta['splits'][split]['tokens']
    found = path.stat().st_size if path.is_file() else 0
    again = f'delete {folder}, run prepare.py again'
    if found != expected or found < 4:
        raise UserError(f'{path}: expected {expected:,} bytes, found {found:,}; {again}')
    tokens = np.memmap(path, dtype=np.uint16, mode='r')
    largest = tokens.max()
    if largest >= meta['tokenizer']['vocab_size']:
        raise UserError(f'{path} holds token {largest}, which its tokenizer does not have; {again}')
    return tokens


def as_tensor(tokens, device):
    """uint16 ids as an int16 tensor of the same bits, which every device can index."""
    return torch.from_numpy(np.asarray(tokens).view(np.int16).copy()).to(device)


def tokens_at(tokens, positions):
    return tokens[positions].long() & 0xFFFF


def named_sets(s):
    """{data set: (from, to, passes per epoch)} to train on, and the names of those to score."""
    ranges = dict.fromkeys(s.data.split(','), (0.0, 1.0)) if isinstance(s.data, str) else s.data
    if not ranges:
        raise UserError('data names no data set')
    for name, span in ranges.items():
        numbers = isinstance(span, (tuple, list)) and all(isinstance(v, (int, float)) for v in span)
        fits = numbers and len(span) in (2, 3)
        low, high, passes = (*span, 1.0)[:3] if fits else (0, 0, 0)
        if not (0 <= low < high <= 1 and passes > 0):
            raise UserError(f'data[{name!r}] = {span!r} should be (from, to) or (from, to, passes), '
                            'with 0 <= from < to <= 1')
    scored = s.eval_data.split(',') if isinstance(s.eval_data, str) else s.eval_data or list(ranges)
    return {name: (*span, 1.0)[:3] for name, span in ranges.items()}, scored


class Corpus:
    """The prepared data sets of a run, trained on or only scored: counts, val tokens, tokenizer."""

    def __init__(self, s, machine):
        self.s = s
        self.machine = machine
        self.ranges, self.scored = named_sets(s)
        self.folders = {name: Path(s.data_dir, str(name)) for name in [*self.ranges, *self.scored]}
        self.metas = {name: load_meta(folder) for name, folder in self.folders.items()}
        first = next(iter(self.ranges))
        self.folder = self.folders[first]
        self.hash = self.metas[first]['tokenizer']['hash']
        for name, other in self.metas.items():
            if other['tokenizer']['hash'] != self.hash:
                raise UserError(f'{first} and {name} have different tokenizers: set --data or --eval_data, '
                                f'or prepare {name} again with --tokenizer {self.folder}')
        self.tokenizer = load_tokenizer(self.folder)
        self.slots = len(self.tokenizer.end)             # of a chunk; a token is one
        self.pad = self.tokenizer.pad                    # never a target
        self.token_lengths = torch.tensor([len(b) for b in self.tokenizer.token_bytes])
        self.val = {name: as_tensor(load_bin(folder, 'val'), machine.device)
                    for name, folder in self.folders.items()}

    def val_batches(self, name, seq_len, rank=0, world=1):
        s = self.s
        return val_batches(self.val[name], seq_len, s.batch_size, self.pad, s.eval_tokens, rank, world)

    def calibration(self, seq_len):
        """The first batches of the training text, for a surgery that has to look at some. The val sets are
        kept for scoring what it makes."""
        s = self.s
        limit = s.surgery_batches * s.batch_size * seq_len
        batches = []
        for name, (low, high, _) in self.ranges.items():
            tokens = read_range(self, name, low, high)[:limit + 1]
            if len(tokens) > 1:                          # else Data says that these are too few
                tokens = as_tensor(tokens, self.machine.device)
                batches += val_batches(tokens, seq_len, s.batch_size, self.pad)
        return batches


def read_range(corpus, name, low, high):
    """The training tokens of a data set from fraction `low` to `high`, cut at ends of documents."""
    tokens = load_bin(corpus.folders[name], 'train')
    ends = np.flatnonzero(tokens == corpus.tokenizer.eot) + corpus.slots
    cuts = np.concatenate(([0], ends, [len(tokens)]))
    begin, end = cuts[np.searchsorted(cuts, (low * len(tokens), high * len(tokens)))]
    return tokens[begin:end]


class Data:
    """The training tokens of all data sets end to end, and the order in which their windows are read.
    A window never crosses from one set into another. The order is a function of (seed, epoch); only
    the place in it is state. With `stream` the windows stay in the order of the text: every step reads
    one data set, the sets take turns, and row r of the batch reads the r-th part of each."""

    def __init__(self, s, corpus, seq_len, machine):
        self.s = s
        self.T = seq_len
        self.slots = corpus.slots
        self.noun = 'tokens' if self.slots == 1 else 'slots'
        self.pad = corpus.pad
        self.stride = s.stride or seq_len
        self.rows = s.batch_size * s.gradient_accumulation_steps * machine.world  # windows per step
        if seq_len % self.slots or self.stride % self.slots:
            raise UserError(f'seq_len and stride must be multiples of a chunk: {self.slots} slots')
        self.sets = []                                   # (begin, end, passes, words per token)
        parts = []
        begin = 0
        for name, (low, high, passes) in corpus.ranges.items():
            tokens = read_range(corpus, name, low, high)
            count = corpus.metas[name]['splits']['train']
            end = begin + len(tokens)
            if len(tokens) < seq_len + self.stride:     # an epoch's offset may take away stride - 1
                raise UserError(f'{name}: {len(tokens)} {self.noun} are too few for seq_len '
                                f'+ stride ({seq_len} + {self.stride}): add text, or lower seq_len')
            self.sets.append((begin, end, passes, count['words'] / count['tokens']))
            parts.append(tokens)
            begin = end
        self.size = begin
        self.check_length()
        self.tokens = as_tensor(np.concatenate(parts), machine.device)
        self.epoch = 0
        self.position = 0                                # in the order of this epoch
        self.words = 0.0
        self.seen = 0                                    # windows so far
        self.unit = self.rows                            # windows per step when the run began
        self.starts = self.order(0)

    def check_length(self):
        """Whether the order of all epochs can be computed in seconds, and a step can be held."""
        passes = [passes * self.s.epochs for _, _, passes, _ in self.sets]
        lengths = [(end - begin) / self.stride for begin, end, _, _ in self.sets]
        windows = sum(n * length for n, length in zip(passes, lengths))
        if windows > 1e8 or sum(passes) > 1e5:
            raise UserError(f'{short(self.s.epochs)} epochs, {short(windows)} windows in all, are too many '
                            'to plan: set max_iters, and epochs to 1')
        if self.rows * self.T > 1e9:
            raise UserError(f'a step of {short(self.rows * self.T)} tokens is too large: '
                            'lower batch_size or gradient_accumulation_steps')

    def order(self, epoch):
        """Where an epoch's windows start. Every epoch is cut at another offset, then shuffled."""
        rng = np.random.default_rng([self.s.seed, epoch])
        parts = []                                       # the passes over each data set
        for begin, end, passes, _ in self.sets:
            parts.append([])
            while passes > 0:
                offset = rng.integers(self.stride // self.slots) * self.slots
                windows = np.arange(begin + offset, end - self.T, self.stride)
                if not self.s.stream:
                    windows = rng.permutation(windows)
                share = min(passes, 1.0)                 # 2.5 passes: two whole ones and half of one
                parts[-1].append(windows[:math.ceil(len(windows) * share)])
                passes -= 1
        if self.s.stream:
            return self.take_turns(parts)
        starts = rng.permutation(np.concatenate(list(itertools.chain(*parts))))
        if self.s.epoch_words:
            starts = starts[:np.searchsorted(self.words_in(starts).cumsum(), self.s.epoch_words) + 1]
        return starts

    def take_turns(self, parts):
        """The order of a stream: the steps of each data set, spread evenly over the epoch."""
        steps = []                                       # (when, data set, its windows)
        for n, passes in enumerate(parts):
            lane = []
            for windows in passes:
                length = len(windows) // self.rows
                lane += [*windows[:length * self.rows].reshape(self.rows, length).T]
            steps += [((i + 0.5) / len(lane), n, step) for i, step in enumerate(lane)]
        if not steps:
            raise UserError(f'too few windows of {self.T} tokens for {self.rows} streams')
        steps.sort(key=lambda step: step[:2])
        return np.concatenate([step for _, _, step in steps])

    def words_in(self, starts):
        """Words per window, at its data set's mean number of words per token."""
        density = np.array([words for _, _, _, words in self.sets])
        return density[self.set_of(starts)] * self.T

    def set_of(self, starts):
        begins = [begin for begin, _, _, _ in self.sets]
        return np.searchsorted(begins, starts, 'right') - 1

    def count_windows(self, epochs):
        lengths = [len(self.order(e)) for e in range(math.ceil(epochs))]
        return sum(lengths) - round((math.ceil(epochs) - epochs) * lengths[-1])

    def plan(self, it):
        """-> (steps of the whole run, at the batch size it began with; the step where it ends)"""
        if self.s.max_iters:
            return self.s.max_iters, self.s.max_iters
        windows = self.count_windows(self.s.epochs)
        steps = max(1, windows // self.unit)
        return steps, max(1, it, it + (windows - self.seen) // self.rows)

    def take(self, n):
        """The starts of the next n windows; a batch may run on into the next epoch."""
        taken = []
        self.seen += n
        while n > 0:
            self.turn_over()
            taken.append(self.starts[self.position:self.position + n])
            self.position += len(taken[-1])
            n -= len(taken[-1])
        taken = np.concatenate(taken)
        self.words += float(self.words_in(taken).sum())
        return taken

    def turn_over(self):
        """At the end of an epoch, begin the next."""
        if self.position >= len(self.starts):
            self.epoch += 1
            self.position = 0
            self.starts = self.order(self.epoch)

    def next_starts(self):
        """The windows of the next step, on the device."""
        return torch.from_numpy(self.take(self.rows)).to(self.tokens.device)

    def batch(self, starts):
        """-> x, y of (B, T): y is x shifted by one, with -1 where nothing is to be predicted."""
        starts = torch.as_tensor(starts, device=self.tokens.device)
        window = tokens_at(self.tokens, starts[:, None] + torch.arange(self.T + 1, device=starts.device))
        x, y = window[:, :-1].contiguous(), window[:, 1:]
        return x, y.masked_fill(y == self.pad, -1)

    def next_set(self):
        """With `stream`: the data set that the next step reads, and whether it starts over."""
        self.turn_over()
        first = self.starts[self.position]
        n = int(self.set_of(first))
        return n, first - self.sets[n][0] < self.stride

    def state(self):
        return {key: getattr(self, key) for key in ('epoch', 'position', 'words', 'seen', 'unit', 'size')}

    def load_state(self, state):
        if state['size'] != self.size:
            raise UserError(f"the run read a text of {state['size']:,} tokens, but now it has "
                            f'{self.size:,}: restore it, or start a new run with --init_from')
        self.__dict__.update(state)
        self.starts = self.order(self.epoch)


# ---- Evaluation ---------------------------------------------------------------------------------

def val_batches(tokens, seq_len, batch_size, pad, eval_tokens=None, rank=0, world=1):
    """Windows of seq_len targets that cover every token but the first exactly once, or the first
    eval_tokens; this process's share of them."""
    device = tokens.device
    seq_len = min(seq_len, len(tokens))
    starts = torch.arange(0, len(tokens) - 1, seq_len, device=device)
    if eval_tokens:
        starts = starts[:max(1, eval_tokens // seq_len)]
    starts = F.pad(starts, (0, -len(starts) % world), value=len(tokens))   # as many for every process
    starts = starts[rank::world]
    for i in range(0, len(starts), batch_size):
        some = starts[i:i + batch_size]
        positions = some[:, None] + torch.arange(seq_len + 1, device=device)
        window = tokens_at(tokens, positions.clamp(max=len(tokens) - 1))
        x, y = window[:, :-1].contiguous(), window[:, 1:]
        yield x, y.masked_fill((positions[:, 1:] >= len(tokens)) | (y == pad), -1)


@torch.no_grad()
def score_batches(model, batches, token_lengths, machine):
    """Loss per token, perplexity, and bits per byte: the cost of all tokens, end-of-text included, over
    the bytes of the text."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)           # nats, targets, bytes
    for x, y in batches:
        with machine.autocast():
            nats = model(x, y, reduction='none')[1]
        y = y.cpu()
        scored = y >= 0
        cost = nats.float().cpu().double().sum()
        sums += torch.stack((cost, scored.sum(), token_lengths[y[scored]].sum()))
    if machine.cuda:
        sums = sums.to(machine.device)                   # nccl adds up on GPUs only
    nats, targets, n_bytes = machine.sum(sums).tolist()
    model.train()
    loss = nats / targets
    return dict(loss=loss, perplexity=math.exp(min(loss, 700)),
                bits_per_byte=nats / math.log(2) / max(n_bytes, 1))


@torch.no_grad()
def route_shares(model, x, machine):
    """{layer: the share of the picks that went to each choice}. Where every choice gets something
    from every token, the share of the gates."""
    model.eval()
    with machine.autocast():
        routes = model.routes(x)
    model.train()
    shares = {}
    for name, gate in routes.items():
        taken = gate if gate.all() else gate != 0
        count = taken.flatten(0, 1).sum(0).cpu().double()
        shares[name] = [round(v, 4) for v in (count / count.sum().clamp(min=1)).tolist()]
    return shares
