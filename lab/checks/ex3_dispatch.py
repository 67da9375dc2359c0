import torch
import torch.nn as nn

from lab.checks import expect, gradient, numbers, randn, returned, same

HINT = """
For expert e, (choice_NK == e).nonzero(as_tuple=True) gives the tokens that chose it, and which of
their K choices it was. y.index_add_(0, tokens, rows) adds rows to the places of their tokens.
The project sorts instead: choice_NK.flatten().argsort() orders all N*K pairs by expert, and
pair // K is a pair's token. Then one call can multiply all groups."""
PLACES = ['moep.py, Rows', 'moep.py, grouped_mm']


def dense(x_ND, gate_NK, choice_NK, experts):
    """All experts on all tokens, one token after the other."""
    rows = []
    for x, gate, choice in zip(x_ND, gate_NK, choice_NK.tolist()):
        outputs = [expert(x[None])[0] for expert in experts]
        rows.append(sum(g * outputs[e] for g, e in zip(gate, choice)))
    return torch.stack(rows)


def routed(N, K, E):
    """-> random tokens of width 3, gates, choices, and experts"""
    experts = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double() for _ in range(E)]
    choice = torch.rand(N, E).argsort(1)[:, :K]
    return randn(N, 3), torch.rand(N, K, dtype=torch.float64), choice, experts


def only_chosen_rows(ex):
    """an expert is called at most once, with one row for each token that chose it"""
    x, gate, choice, experts = routed(N=8, K=2, E=4)
    given = [[], [], [], []]                             # the rows of each call

    def counting(e):
        def expert(rows):
            given[e].append(len(rows))
            return experts[e](rows)
        return expert
    returned(ex.dispatch(x, gate, choice, [counting(e) for e in range(4)]), (8, 3))
    for e, calls in enumerate(given):
        wanted = choice.flatten().tolist().count(e)
        expect(sum(calls) == wanted,
               f'expert {e} computes {sum(calls)} rows, but {wanted} of the 8 tokens chose it: '
               'pick their rows first')
        expect(len(calls) <= 1,
               f'expert {e} is called {len(calls)} times: make one matrix of its rows')


def tokens_keep_places(ex):
    """at K = 1 with gates of 1, every token gets the output of its own expert"""
    x, gate, choice, experts = routed(N=8, K=1, E=3)
    gate = torch.ones_like(gate)
    y = returned(ex.dispatch(x, gate, choice, experts), (8, 3))
    expect(same(y, dense(x, gate, choice, experts)),
           'even at K = 1 with gates of 1, outputs differ from the dense ones: do all rows go back '
           'to the places of their tokens, after they were collected by expert?')


def gates_multiply(ex):
    """at K = 1 with other gates, outputs are multiplied by them"""
    x, gate, choice, experts = routed(N=8, K=1, E=3)
    y, wanted = ex.dispatch(x, gate, choice, experts), dense(x, gate, choice, experts)
    expect(same(returned(y, (8, 3)), wanted),
           f'with a gate of {gate[0].item():.2f} an output is {numbers(y[0])}, not '
           f'{numbers(wanted[0])}: is every row multiplied by the gate of its own token? '
           'And is it the output, not the input?')


def outputs_add_up(ex):
    """at K = 2 a token's two outputs are added, each with its own gate"""
    experts = [lambda rows, e=e: rows * 10 ** e for e in range(3)]
    x, choice = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[2, 0], [0, 1], [2, 1]])
    y = returned(ex.dispatch(x, torch.full((3, 2), 0.5), choice, experts), (3, 1))
    expect(same(y, torch.tensor([[50.5], [11.0], [165.0]])),
           f'the example gives {numbers(y)}, not [50.5, 11, 165]: a token has K rows, and all must '
           'be added to its place. y[index] = rows overwrites what another expert put there; '
           '+= with a repeated index keeps one row')
    x, gate, choice, experts = routed(N=8, K=2, E=4)
    y = returned(ex.dispatch(x, gate, choice, experts), (8, 3))
    expect(same(y, dense(x, gate, choice, experts)),
           'with unequal gates, outputs differ from the dense ones: which gate does each row take?')


def idle_expert(ex):
    """it also works if no token chose some expert"""
    outputs_add_up(ex)                                   # or this would fail for the same reason
    x, gate, _, experts = routed(N=8, K=2, E=3)
    choice = torch.tensor([[0, 2]] * 8)
    y = returned(ex.dispatch(x, gate, choice, experts), (8, 3))
    expect(same(y, dense(x, gate, choice, experts)),
           'outputs differ from the dense ones if no token chose expert 1 of 3')


def dense_gradients(ex):
    """gradients of tokens, gates and experts are the dense ones"""
    x, gate, choice, _ = routed(N=8, K=2, E=4)
    w, weight = randn(4, 3, 3), randn(8, 3)

    def loss(dispatch):
        def f(x, gate, w):
            experts = [lambda rows, e=e: (rows @ w[e]).tanh() for e in range(4)]
            return (weight * dispatch(x, gate, choice, experts)).sum()
        return f
    both = zip(gradient(loss(ex.dispatch), x, gate, w), gradient(loss(dense), x, gate, w))
    for name, (found, wanted) in zip(('tokens', 'gates', 'experts'), both):
        expect(same(found, wanted), f'the gradient of the {name} differs from the dense one')


CHECKS = [only_chosen_rows, tokens_keep_places, gates_multiply, outputs_add_up, idle_expert,
          dense_gradients]
