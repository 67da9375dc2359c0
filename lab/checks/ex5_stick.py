import math

import torch

from lab.checks import expect, gradient, numbers, randn, returned, same, slope

HINT = """
Mask first: where z is -inf (masked_fill with a triu mask), sigmoid(z) is 0 and log sigmoid(-z) is
0, so later keys take nothing and leave everything.
The sum runs over the keys after i, a cumulative sum from the right: flip, cumsum, flip. It is
simpler with j = i included: since sigmoid(z) = exp(z) * sigmoid(-z), log p_i is z_i + that sum."""
PLACES = ['moduleformer.py, stick_weights']


def slow_stick(z_TT):
    """p (T, T), one query and one key after the other."""
    rows = []
    for t, z in enumerate(z_TT):
        row = [torch.zeros_like(z[0])] * len(z)
        left = torch.ones_like(z[0])
        for i in range(t, -1, -1):
            row[i] = left * z[i].sigmoid()
            left = left * (1 - z[i].sigmoid())
        rows.append(torch.stack(row))
    return torch.stack(rows)


def halves(ex):
    """equal matches: half of the stick for key t, a quarter for the one before"""
    found = returned(ex.log_stick_weights(torch.zeros(3, 3)), (3, 3))[2].exp()
    expect(same(found, torch.tensor([0.125, 0.25, 0.5])),
           f'for z = 0, query 2 gives its keys the weights {numbers(found)} (exp of what you '
           'return), not 1/8, 1/4, 1/2: the sum runs over the keys after i, up to t')


def later_keys_get_nothing(ex):
    """a key after t gets nothing"""
    p = returned(ex.log_stick_weights(randn(5, 5)), (5, 5)).exp()
    expect(p.triu(1).abs().max() == 0,
           f'query 0 gives keys 1 to 4 the weights {numbers(p[0, 1:])} (exp of what you return): '
           'log p must be -inf where i > t')


def later_keys_change_nothing(ex):
    """a key after t does not change what the others get"""
    z = randn(5, 5)
    before, after = [ex.log_stick_weights(x) for x in (z, z + 3 * torch.ones(5, 5).triu(1))]
    expect(same(before.tril().exp(), after.tril().exp()),
           'weights change with the matches of later keys: the future leaks into the sum. '
           'Set z to -inf where i > t before you add up')


def stick_is_broken(ex):
    """random matches: the weights that a loop over the keys finds, summing to at most 1"""
    z = 2 * randn(7, 7)
    found, wanted = returned(ex.log_stick_weights(z), (7, 7))[-1].exp(), slow_stick(z)[-1]
    expect(same(found, wanted),
           f'the last query has the weights {numbers(found)} (exp of what you return), not '
           f'{numbers(wanted)}: key i takes sigmoid(z_i) of what the keys after it have left')


def gradient_is_right(ex):
    """the gradient, as finite differences find it"""
    z, weight = randn(4, 4).tril(), randn(4, 4).tril()
    found = gradient(lambda x: (weight * ex.log_stick_weights(x).tril().exp()).sum(), z).tril()
    wanted = slope(lambda x: (weight * slow_stick(x)).sum(), z)
    expect(same(found, wanted),
           f'at the last query it is {numbers(found[-1])}, not {numbers(wanted[-1])}: '
           'if the weights are right, is a part of them detached?')


def nothing_underflows(ex):
    """500 keys: log p is finite for the first"""
    found = returned(ex.log_stick_weights(torch.zeros(500, 500)), (500, 500))[-1, 0].item()
    wanted = 500 * math.log(0.5)
    said = f'of 500 equal matches the first key has log p = {found:.1f}, not {wanted:.1f}'
    expect(math.isfinite(found) and found != 0,
           f'{said}: a product of 500 factors underflows. Add logarithms')
    expect(abs(found - wanted) < 0.1, f'{said}, the sum of 500 logarithms')


def sure_matches(ex):
    """matches of 40 and -200: log p and its gradient are finite"""
    z = torch.tensor([[0.0, 0, 0], [0, 0, 0], [-200, 40, 40]])
    found = returned(ex.log_stick_weights(z), (3, 3))[2]
    said = f'matches of -200, 40, 40 have log p = {numbers(found)}, not [-280, -40, 0]'
    expect(found.isfinite().all(),
           f'{said}: in float32 1 - sigmoid(40) and sigmoid(-200) are 0. '
           'F.logsigmoid loses nothing')
    expect(same(found, torch.tensor([-280.0, -40.0, 0.0])),
           f'{said}: if the checks above are ok, look for a clamp or an epsilon')
    slopes = gradient(lambda x: ex.log_stick_weights(x)[2].sum(), z)
    expect(slopes.isfinite().all(),
           f'the gradient is {numbers(slopes[2])}: some log is taken of 0, even if its value is '
           'then replaced. F.logsigmoid loses nothing')


def no_loop(ex):
    """as many torch operations for 32 keys as for 8"""
    def operations(T):
        """Nodes of the graph that backward would walk."""
        todo = [ex.log_stick_weights(torch.zeros(T, T, requires_grad=True)).grad_fn]
        seen = set()
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo.extend(parent for parent, _ in node.next_functions)
        return len(seen)
    few, many = operations(8), operations(32)
    expect(many == few,
           f'{few} operations for 8 keys, {many} for 32: a loop over keys or queries is slow. '
           'cumsum adds up all of them at once')


CHECKS = [halves, later_keys_get_nothing, later_keys_change_nothing, stick_is_broken,
          gradient_is_right, nothing_underflows, sure_matches, no_loop]
