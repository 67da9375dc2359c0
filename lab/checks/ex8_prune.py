import torch

from lab.checks import expect, returned

HINT = """
target_N >= 0 picks the tokens that count; torch.bincount(..., minlength=n_modules) counts.
count_E.topk(k).indices are the modules that always stay: set their frequency to inf. The numbers of
all that stay, (frequency >= threshold).nonzero().flatten(), index both tensors."""
PLACES = ['moduleformer.py, count_usage', 'moduleformer.py, prune_experts']

CHOICE = torch.tensor([[0, 1], [0, 3], [0, 1], [3, 0], [2, 0]])


def all_picks_count(ex):
    """count_usage: all K picks of a token count, and unused modules have a 0"""
    found = ex.count_usage(CHOICE, torch.tensor([7, 2, 9, 0, 4]), 6)
    if torch.is_tensor(found):
        expect(found.shape == (6,), f'count_usage returns {tuple(found.shape)}, not (6,): '
                                    'one count for each module, used or not')
    found = returned(found, (6,))
    expect(found.tolist() == [5, 2, 1, 2, 0, 0],
           f'without padding the counts of 6 modules are {found.tolist()}, not [5, 2, 1, 2, 0, 0]: '
           'count both picks of a token; a target of 0 is a token like any other')


def padding_does_not_count(ex):
    """count_usage of the example is (4, 2, 1, 1)"""
    found = returned(ex.count_usage(CHOICE, torch.tensor([7, 2, 9, -1, 4]), 4), (4,))
    expect(found.tolist() == [4, 2, 1, 1],
           f'the counts of the example are {found.tolist()}, not [4, 2, 1, 1]: '
           'a token with a target of -1 is padding')


def kept_by(ex, count, threshold, k):
    """-> the modules whose router row stays, and those whose matrix stays"""
    mark = torch.arange(len(count), dtype=torch.float32)         # row and matrix i are full of i
    router, w = mark[:, None].expand(-1, 2), mark[:, None, None].expand(-1, 2, 3)
    result = ex.prune(router.clone(), w.clone(), torch.tensor(count), threshold, k)
    expect(isinstance(result, (tuple, list)) and len(result) == 2, 'prune should return two tensors')
    router, w = result
    expect(router.shape[1:] == (2,) and w.shape[1:] == (2, 3),
           f'the results have shapes {tuple(router.shape)} and {tuple(w.shape)}: '
           'only the first dimension should shrink')
    return router[:, 0].int().tolist(), w[:, 0, 0].int().tolist()


def expect_modules(kept, wanted, message):
    expect(sorted(kept) == wanted, message)
    expect(kept == wanted, f'the right modules stay, but in the order {kept}: '
                           f'keep them in the order they had, {wanted}')


def most_used_stay(ex):
    """prune: the most used modules stay, in the order they had"""
    _, kept = kept_by(ex, [5, 90, 1, 100, 80], threshold=0.2, k=1)
    expect_modules(kept, [1, 3, 4], f'with counts of 5, 90, 1, 100, 80 modules {kept} stay, not '
                                    '[1, 3, 4]: remove those that are used least')


def largest_is_the_measure(ex):
    """prune: a count is compared with the largest"""
    _, kept = kept_by(ex, [60, 30, 20], threshold=0.5, k=1)
    expect_modules(kept, [0, 1],
                   f'with counts of 60, 30, 20 and a threshold of 0.5 modules {kept} stay, not '
                   '[0, 1]: divide by the largest count, not by the sum; and 0.5 is not below 0.5')


def k_stay(ex):
    """prune: the K most used stay, whatever the threshold"""
    _, kept = kept_by(ex, [3, 100, 2, 4, 1], threshold=0.9, k=3)
    expect_modules(kept, [0, 1, 3],
                   f'with counts of 3, 100, 2, 4, 1 and a threshold of 0.9 modules {kept} stay, not '
                   '[0, 1, 3]: a token takes K = 3, so the three most used always stay')


def router_fits(ex):
    """prune: row i of the router still scores matrix i"""
    rows, kept = kept_by(ex, [5, 90, 1, 100, 80], threshold=0.2, k=1)
    expect(rows == kept,
           f'the router has the rows of modules {rows}, but the matrices are those of {kept}: '
           'index both with the same numbers')


CHECKS = [all_picks_count, padding_does_not_count, most_used_stay, largest_is_the_measure, k_stay,
          router_fits]
