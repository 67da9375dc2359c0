"""A trainer for byte-level BPE."""

import heapq
from collections import defaultdict


def train_bpe(counts, vocab_size):
    """Byte-level BPE on {pre-token: count} -> the tokens in rank order, at most vocab_size - 1.
    The most frequent pair is merged first; ties go to the smaller pair of ranks; a pair seen once
    is not merged. A merge touches only words with the pair, and updates their pairs' counts."""
    vocab = [bytes([b]) for b in range(256)]
    rank = {token: i for i, token in enumerate(vocab)}
    words = [list(word.encode('utf-8')[:256]) for word in counts]  # real ones have some 100 at most
    weights = list(counts.values())
    pairs = defaultdict(int)
    where = defaultdict(list)                    # words that hold a pair, or held it once
    for w, ids in enumerate(words):
        for pair in zip(ids, ids[1:]):
            pairs[pair] += weights[w]
            where[pair].append(w)
    heap = [(-n, pair) for pair, n in pairs.items()]  # counts that sank are corrected when popped
    heapq.heapify(heap)
    while heap and len(vocab) < vocab_size - 1:
        n, pair = heapq.heappop(heap)
        if -n != pairs[pair]:
            heapq.heappush(heap, (-pairs[pair], pair))
            continue
        if -n < 2:
            break
        token = vocab[pair[0]] + vocab[pair[1]]
        new = rank.setdefault(token, len(vocab))  # bytes that are a token already keep their rank
        if new == len(vocab):
            vocab.append(token)
        grown = set()
        for w in set(where.pop(pair)):
            ids = words[w]
            merged = merge(ids, *pair, new)
            if len(merged) == len(ids):
                continue
            for p in zip(ids, ids[1:]):
                pairs[p] -= weights[w]
            for p in zip(merged, merged[1:]):
                pairs[p] += weights[w]
                if new in p:
                    where[p].append(w)
                    grown.add(p)
            words[w] = merged
        for p in grown:
            heapq.heappush(heap, (-pairs[p], p))
    return vocab


def merge(ids, a, b, new):
    out = []
    for i in ids:
        if i == b and out[-1:] == [a]:
            out[-1] = new
        else:
            out.append(i)
    return out
