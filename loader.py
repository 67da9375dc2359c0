"""
Token bins -> batches: which chunks a run reads, in which order, and the windows on which it is validated.

The bins are small (uint16), so they are held whole on the device that trains; a batch is one indexing operation.
Nothing here knows a model. train.py uses `Corpus` and `Data`; `val_batches` also serves calibration and evaluation.
"""

import math
from pathlib import Path

import numpy as np
import torch

import prepare
from errors import UserError


def as_tensor(tokens, device):
    """uint16 ids as the int16 tensor of the same bits: half the memory, and every device can index it."""
    return torch.from_numpy(np.asarray(tokens).view(np.int16).copy()).to(device)


def fetch(tokens, positions):
    return tokens[positions].long() & 0xFFFF


class Corpus:
    """The prepared data sets that `data` names, and those that are only scored: ranges, counts, val tokens, tokenizer."""

    def __init__(self, s, machine):
        self.s, self.machine = s, machine
        ranges = {s.data: (0.0, 1.0)} if isinstance(s.data, str) else s.data
        if not ranges:
            raise UserError('data names no data set')
        if isinstance(s.data, str) and ',' in s.data:
            raise UserError(f'several data sets are a dict: --data="{dict.fromkeys(s.data.split(","), (0.0, 1.0))}"')
        for name, span in ranges.items():
            numbers = isinstance(span, (tuple, list)) and all(isinstance(v, (int, float)) for v in span)
            if not (numbers and len(span) in (2, 3) and 0 <= span[0] < span[1] <= 1 and (*span, 1)[2] > 0):
                raise UserError(f'data[{name!r}] = {span!r} should be (from, to) or (from, to, passes), '
                                'with 0 <= from < to <= 1')
        self.ranges = {name: (*span, 1.0)[:3] for name, span in ranges.items()}
        self.scored = [s.eval_data] if isinstance(s.eval_data, str) else s.eval_data or list(ranges)
        self.folders = {name: Path(s.data_dir, str(name)) for name in [*ranges, *self.scored]}
        if any(folder.name.startswith('toy_') for folder in self.folders.values()):     # toy corpora make themselves
            if machine.rank == 0 and not all(folder.exists() for folder in self.folders.values()):
                prepare.make_toy(s.data_dir)
            machine.sum(torch.zeros(1, device=machine.device))   # the others wait for it
        self.metas = {name: prepare.load_meta(folder) for name, folder in self.folders.items()}
        first = next(iter(ranges))
        self.folder, meta = self.folders[first], self.metas[first]
        self.hash, self.align, self.pad = meta['tokenizer']['hash'], meta.get('slots', 1), meta.get('pad', -1)
        for name, other in self.metas.items():
            if other['tokenizer']['hash'] != self.hash:
                raise UserError(f'{first} and {name} have different tokenizers; '
                                f'prepare {name} again with --tokenizer {self.folder}')
        self.tokenizer = prepare.load_tokenizer(self.folder)
        self.token_lengths = torch.tensor([len(b) for b in self.tokenizer.token_bytes])
        self.val = {name: as_tensor(prepare.load_bin(folder, 'val'), machine.device)
                    for name, folder in self.folders.items()}

    def calibration(self, seq_len):
        """The first batches of the val sets of `data`, for a surgery that has to look at some."""
        of = lambda name: val_batches(self.val[name], seq_len, self.s.batch_size, self.pad, self.s.eval_tokens)
        return [batch for name in self.ranges for batch, _ in zip(of(name), range(self.s.surgery_batches))]


class Data:
    """The training tokens of all data sets end to end, and the order in which chunks of them are read. A chunk never
    crosses from one set into another. The order is a function of (seed, epoch): only the place in it is state.
    With `stream`, the chunks stay in the order of the text, and row r of the batch reads the r-th part of them."""

    def __init__(self, s, corpus, seq_len, machine, slots=None):
        self.s, self.T, self.align, self.pad = s, seq_len, corpus.align, corpus.pad
        if slots not in (None, self.align):              # of the model's chunks; 1: it reads tokens
            kinds = [f'chunks of {n} slots' if n > 1 else 'tokens' for n in (self.align, slots)]
            raise UserError(f'{corpus.folder} holds {kinds[0]}, but the model reads {kinds[1]}')
        self.rows = s.batch_size * s.gradient_accumulation_steps * machine.world   # chunks per step
        self.epoch, self.position, self.words = 0, 0, 0.0
        self.stride = s.stride or seq_len
        if seq_len % self.align or self.stride % self.align:
            raise UserError(f'seq_len and stride must be multiples of {self.align}, the slots of a chunk of bytes')
        parts, self.sets, begin = [], [], 0              # sets: (begin, end, passes, words per token)
        for name, (low, high, passes) in corpus.ranges.items():
            tokens, count = prepare.load_bin(corpus.folders[name], 'train'), corpus.metas[name]['splits']['train']
            ends = np.flatnonzero(tokens == corpus.tokenizer.eot) + self.align
            low, high = (0 if f == 0 else len(tokens) if f == 1 else ends[np.searchsorted(ends, f * len(tokens))]
                         for f in (low, high))           # from the end of one document to that of another
            parts.append(tokens[low:high])
            end = begin + len(parts[-1])
            self.sets.append((begin, end, passes, count['words'] / count['tokens']))
            if end - begin < seq_len + self.stride:      # an epoch's offset may take away stride - 1
                raise UserError(f'{name} has {end - begin} tokens in its range: too few for a seq_len of {seq_len}')
            begin = end
        self.tokens = as_tensor(np.concatenate(parts), machine.device)
        self.starts = self.order(0)

    def order(self, epoch):
        """Where the chunks of an epoch start. Every epoch is cut at another offset, then shuffled."""
        rng = np.random.default_rng([self.s.seed, epoch])
        starts = []
        for begin, end, passes, _ in self.sets:
            while passes > 0:
                offset = rng.integers(self.stride // self.align) * self.align
                chunks = np.arange(begin + offset, end - self.T, self.stride)
                chunks = chunks if self.s.stream else rng.permutation(chunks)
                starts.append(chunks[:math.ceil(len(chunks) * min(passes, 1.0))])
                passes -= 1
        starts = np.concatenate(starts)
        if self.s.stream:
            steps = len(starts) // self.rows
            if steps == 0:
                raise UserError(f'{len(starts)} chunks of {self.T} tokens are too few for {self.rows} streams')
            return starts[:steps * self.rows].reshape(self.rows, steps).T.flatten()
        starts = rng.permutation(starts)
        if self.s.epoch_words:
            starts = starts[:np.searchsorted(self.words_in(starts).cumsum(), self.s.epoch_words) + 1]
        return starts

    def words_in(self, starts):
        """Words per chunk, at its data set's mean number of words per token."""
        begins, density = [b for b, _, _, _ in self.sets], np.array([d for _, _, _, d in self.sets])
        return density[np.searchsorted(begins, starts, 'right') - 1] * self.T

    def count_chunks(self, epochs):
        lengths = [len(self.order(e)) for e in range(math.ceil(epochs))]
        return sum(lengths) - round((math.ceil(epochs) - epochs) * lengths[-1])

    def take(self, n):
        """The starts of the next n chunks; a batch may run on into the next epoch."""
        taken = []
        while n > 0:
            if self.position >= len(self.starts):
                self.epoch, self.position = self.epoch + 1, 0
                self.starts = self.order(self.epoch)
            taken.append(self.starts[self.position:self.position + n])
            self.position, n = self.position + len(taken[-1]), n - len(taken[-1])
        taken = np.concatenate(taken)
        self.words += float(self.words_in(taken).sum())
        return taken

    def batch(self, starts):
        """-> x, y of (B, T): y is x shifted by one, with -1 where nothing is to be predicted."""
        starts = torch.as_tensor(starts, device=self.tokens.device)
        chunk = fetch(self.tokens, starts[:, None] + torch.arange(self.T + 1, device=starts.device))
        x, y = chunk[:, :-1].contiguous(), chunk[:, 1:]
        return x, y.masked_fill(y == self.pad, -1)

    def state(self):
        return dict(epoch=self.epoch, position=self.position, words=self.words)

    def load_state(self, state):
        self.epoch, self.position, self.words = state['epoch'], state['position'], state['words']
        self.starts = self.order(self.epoch)


def val_batches(tokens, seq_len, batch_size, pad, eval_tokens=None, rank=0, world=1):
    """Windows of seq_len targets that cover every token but the first exactly once, or the first eval_tokens; this process's share."""
    device = tokens.device
    starts = torch.arange(0, len(tokens) - 1, seq_len, device=device)
    starts = starts[:max(1, eval_tokens // seq_len) if eval_tokens else None][rank::world]
    for some in starts.split(batch_size) if len(starts) else ():
        positions = some[:, None] + torch.arange(seq_len + 1, device=device)
        chunk = fetch(tokens, positions.clamp(max=len(tokens) - 1))
        x, y = chunk[:, :-1].contiguous(), chunk[:, 1:]
        yield x, y.masked_fill((positions[:, 1:] >= len(tokens)) | (y == pad), -1)
