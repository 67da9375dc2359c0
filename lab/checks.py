"""
What turns an exercise green. Spoiler: a check often compares with the answer.

A check takes the exercise's module; its docstring says what it asks for. Where the answer differs,
expect and expect_same raise AssertionError with what to look at.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def expect(is_right, hint):
    if not is_right:
        raise AssertionError(hint)


def expect_same(answer, wanted, hint):
    expect(torch.is_tensor(answer), f'the result is a {type(answer).__name__}, not a tensor')
    expect(answer.shape == wanted.shape,
           f'the result has the shape {tuple(answer.shape)}, not {tuple(wanted.shape)}')
    expect(torch.allclose(answer.double(), wanted.double(), rtol=1e-4, atol=1e-5),
           f'{numbers(answer)} should be {numbers(wanted)}: {hint}')


def numbers(tensor):
    """The last row of a tensor, rounded."""
    while tensor.dim() > 1:
        tensor = tensor[-1]
    return [round(value, 3) for value in tensor.reshape(-1).tolist()]


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def gradient(f, x):
    """Return the gradient of a scalar f(x), by autograd."""
    x = x.detach().clone().requires_grad_()
    y = f(x)
    grad, = torch.autograd.grad(y, x, allow_unused=True) if y.requires_grad else [None]
    expect(grad is not None,
           'no gradient flows back: look for detach, .item(), no_grad, argmax, one_hot')
    return grad


def expect_same_gradient(f, slow_f, x, hint):
    """Compare the gradients of f(x) and slow_f(x), each times the same random numbers."""
    weight = torch.randn_like(slow_f(x))
    grad, wanted = [gradient(lambda x: (weight * g(x)).sum(), x) for g in (f, slow_f)]
    expect_same(grad, wanted, hint)


# ---- 1. Top-k gates ------------------------------------------------------------------------------

def right_gates(score_NE, k):
    """-> gates, choices"""
    prob_NK, choice_NK = score_NE.softmax(-1).topk(k)
    return prob_NK / prob_NK.sum(-1, keepdim=True), choice_NK


def gates_are_shares(ex):
    """a token takes its K best, the best first; their gates sum to 1: 4/7 and 3/7 in the example"""
    for score in (torch.tensor([[0.05, 0.05, 0.1, 0.8], [0.4, 0.3, 0.2, 0.1]]).log(), randn(3, 5)):
        k = len(score)                                   # N = K: no keepdim is no crash
        gate, choice = ex.top_k_gates(score, k)
        wanted_gate, wanted_choice = right_gates(score, k)
        expect_same(choice, wanted_choice, 'the K best of the scores of a token, the best first')
        expect_same(gate, wanted_gate, 'one softmax over the scores of a token, then divided by '
                                       'the sum of its K (with keepdim=True)')
    expect_same_gradient(lambda x: ex.top_k_gates(x, 2)[0], lambda x: right_gates(x, 2)[0],
                         randn(3, 4), 'the gradient of your gates. Is a part of them detached?')


def formula_is_right(ex):
    """score_gradient is what autograd finds, and 0 at the scores that were not chosen"""
    for k in (2, 1):
        score, g = randn(3, 4), randn(3, k)
        wanted = gradient(lambda x: (g * right_gates(x, k)[0]).sum(), score)
        expect_same(ex.score_gradient(*right_gates(score, k), g, 4), wanted,
                    f'at K = {k}. The column is the number of the choice. A higher score also '
                    'lowers the other gates: that is the sum, over the K of one token')


# ---- 2. Balance ----------------------------------------------------------------------------------

def right_switch_loss(prob_NE, choice_NK):
    E = prob_NE.size(1)
    f_E = torch.bincount(choice_NK.flatten(), minlength=E) / choice_NK.numel()
    return E * (f_E * prob_NE.mean(0)).sum()


def switch_loss_is_right(ex):
    """switch_loss: 1.65 in the example; at K = 2 all picks count; the gradient flows through p"""
    prob = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.1, 0.4]])
    for choice in (torch.tensor([[0], [0]]), torch.tensor([[0, 1], [0, 2]])):
        expect_same(ex.switch_loss(prob, choice), right_switch_loss(prob, choice),
                    'look at the sign, the factor E, and f, the share of all N*K picks')
        expect_same_gradient(lambda x: ex.switch_loss(x.softmax(-1), choice),
                             lambda x: right_switch_loss(x.softmax(-1), choice), randn(2, 3),
                             'the gradient. f is counted from the choices, p is the mean of the '
                             'probabilities')


def entropy_value(ex):
    """entropy_loss is the entropy of p, up to its sign; a p_i of 0 does no harm"""
    for p, wanted in (([[1.0, 0.0], [0.0, 1.0]], math.log(2)), ([[1.0, 0.0]], 0.0)):
        expect_same(ex.entropy_loss(torch.tensor(p)).abs(), torch.tensor(wanted),
                    f'of the tokens {p}. Take the mean over tokens first; mind 0 * log 0, and keep '
                    'an epsilon small')
    grad = gradient(ex.entropy_loss, torch.tensor([[1.0, 0.0]]))
    expect(grad.isfinite().all(), f'at p = (1, 0) the gradient is {numbers(grad)}: mind log 0')


def entropy_balances(ex):
    """a router that prefers choice 0 of 4, and minimises entropy_loss, ends with even shares"""
    score, bias = randn(64, 4), torch.tensor([1.5, 0, 0, 0], dtype=torch.float64)
    for _ in range(100):
        bias = bias - gradient(lambda b: ex.entropy_loss((score + b).softmax(-1)), bias)
    shares = (score + bias).softmax(-1).mean(0)
    expect(shares.max() < 0.5,
           f'after 100 steps the mean probabilities are {numbers(shares)}: minimising your loss '
           'collapses the router. Look at its sign')


# ---- 3. Dispatch ---------------------------------------------------------------------------------

def dense(x_ND, gate_NK, choice_NK, experts):
    """All experts compute all tokens."""
    y_END = torch.stack([expert(x_ND) for expert in experts])
    y_NKD = y_END[choice_NK, torch.arange(len(x_ND))[:, None]]
    return (gate_NK[..., None] * y_NKD).sum(1)


def routed(N, K, E):
    """-> random tokens of width 3, gates, choices, and experts"""
    experts = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double() for _ in range(E)]
    choice = torch.rand(N, E).argsort(1)[:, :K]
    return randn(N, 3), torch.rand(N, K, dtype=torch.float64), choice, experts


def only_chosen_rows(ex):
    """an expert is called at most once, with one row for each token that chose it"""
    x, gate, choice, experts = routed(N=8, K=2, E=4)
    calls = [[] for _ in experts]                        # the rows of each call

    def counting(e):
        def expert(rows):
            calls[e].append(len(rows))
            return experts[e](rows)
        return expert
    ex.dispatch(x, gate, choice, [counting(e) for e in range(4)])
    for e, rows in enumerate(calls):
        wanted = choice.flatten().tolist().count(e)
        expect(sum(rows) == wanted and len(rows) <= 1,
               f'{wanted} of the 8 tokens chose expert {e}, but it computes {sum(rows)} rows in '
               f'{len(rows)} calls: make one matrix of their rows')


def outputs_add_up(ex):
    """a token's K outputs are added, each with its own gate; an expert may be idle; gradients flow
    to the tokens and the gates"""
    for K in (1, 2):
        x, gate, _, experts = routed(N=8, K=K, E=4)
        choice = torch.rand(8, 3).argsort(1)[:, :K]      # no token chooses expert 3
        expect_same(ex.dispatch(x, gate, choice, experts), dense(x, gate, choice, experts),
                    f'at K = {K}. Multiply every output, not the input, by the gate of its own '
                    'token, and add it at the place of that token: y[index] = rows overwrites '
                    'what another expert put there')
    expect_same_gradient(lambda x: ex.dispatch(x, gate, choice, experts),
                         lambda x: dense(x, gate, choice, experts), x, 'the gradient of the tokens')
    expect_same_gradient(lambda g: ex.dispatch(x, g, choice, experts),
                         lambda g: dense(x, g, choice, experts), gate, 'the gradient of the gates')


# ---- 4. Gumbel -----------------------------------------------------------------------------------

def noise_is_gumbel(ex):
    """gumbel_noise is -log(-log(u))"""
    expect_same(ex.gumbel_noise(torch.tensor([0.1, 0.5, 0.9])),
                torch.tensor([-0.83403, 0.36651, 2.25037]),
                'there are two logarithms and two signs')


def largest_sum_is_taken(ex):
    """in training the weights are one-hot for the largest sum of logit and noise; their gradient is
    that of the soft weights, at every temperature"""
    logits, noise = randn(6, 4), randn(6, 4)
    weights = ex.straight_through(logits, noise, 1.0, training=True)
    expect_same(weights, F.one_hot((logits + noise).argmax(-1), 4),
                'one-hot, for the largest sum; the soft weights are for backward alone')
    expect(weights.dtype == logits.dtype, f'the weights are {weights.dtype}, unlike the logits')
    for t in (1.0, 0.5):
        expect_same_gradient(lambda x: ex.straight_through(x, noise, t, True),
                             lambda x: ((x + noise) / t).softmax(-1), logits,
                             f'the gradient of softmax((logits + noise) / temperature), at {t}')


def eval_repeats(ex):
    """in eval mode there is no noise: one-hot for the largest logit"""
    logits = randn(6, 4)
    expect_same(ex.straight_through(logits, 5 * randn(6, 4), 1.0, training=False),
                F.one_hot(logits.argmax(-1), 4), 'the noise is for training alone')


# ---- 5. Stick-breaking ---------------------------------------------------------------------------

def slow_stick(z_TT):
    """p (T, T), one query and one key after the other."""
    share_TT, p_TT = z_TT.sigmoid(), torch.zeros_like(z_TT)
    for t in range(len(z_TT)):
        left = 1
        for i in range(t, -1, -1):
            p_TT[t, i] = left * share_TT[t, i]
            left = left * (1 - share_TT[t, i])
    return p_TT


def stick_is_broken(ex):
    """the weights that a loop over the keys finds: 1/8, 1/4, 1/2 in the example; later: 0"""
    for z in (torch.zeros(3, 3), 2 * randn(7, 7)):
        expect_same(ex.log_stick_weights(z).exp(), slow_stick(z),
                    '(exp of what you return.) Key i takes its share of what the keys after it, '
                    'up to t, have left. Set z to -inf where i > t before you add up')
    expect_same_gradient(lambda x: ex.log_stick_weights(x).exp().tril(), slow_stick,
                         randn(4, 4).tril(),
                         'the gradient. If the weights are right, is a part of them detached?')


def nothing_underflows(ex):
    """500 keys, or matches of 40 and -200: log p and its gradient are finite"""
    expect_same(ex.log_stick_weights(torch.zeros(500, 500))[-1, 0],
                torch.tensor(500 * math.log(0.5)),
                'a product of 500 factors underflows. Add logarithms')
    z = torch.tensor([[0.0, 0, 0], [0, 0, 0], [-200, 40, 40]])
    expect_same(ex.log_stick_weights(z)[2], torch.tensor([-280.0, -40.0, 0.0]),
                'in float32 1 - sigmoid(40) and sigmoid(-200) are 0. F.logsigmoid loses nothing')
    grad = gradient(lambda x: ex.log_stick_weights(x)[2].sum(), z)
    expect(grad.isfinite().all(),
           f'the gradient is {numbers(grad)}: some log is taken of 0, even if its value is then '
           'replaced. F.logsigmoid loses nothing')


# ---- 6. Compose ----------------------------------------------------------------------------------

def two_paths(ex):
    """-> two paths (10 tokens, width 3, two blocks), and what compose makes of them"""
    paths = [ex.Path(10, 3, n_layer=2) for _ in range(2)]
    return paths, ex.compose(paths)


def blocks_read_x(ex):
    """ParallelLayer: all blocks read x; their outputs, side by side, go through the connection"""
    layer, x = ex.ParallelLayer(2, 3, 5), torch.randn(1, 4, 3)
    a, b = [block(x) for block in layer.blocks]
    left, right = layer.connection.weight.split(3, 1)
    expect_same(layer(x), a @ left.T + b @ right.T,
                'connection(a and b side by side), for a and b that the blocks make of the same x')


def tables_side_by_side(ex):
    """a token's embeddings, and its rows in the heads, stand side by side in the paths' order"""
    paths, model = two_paths(ex)
    for name in ('wte', 'head'):
        tables = [getattr(path, name).weight for path in paths]
        expect_same(getattr(model, name).weight, torch.cat(tables, 1), f"the last token's {name}")


def blocks_are_copies(ex):
    """block p of layer i computes what block i of path p does, with weights of its own"""
    paths, model = two_paths(ex)
    x = torch.randn(4, 3)
    for i, layer in enumerate(model.layers):
        for p, block in enumerate(layer.blocks):
            expect_same(block(x), paths[p].blocks[i](x), f'layers[{i}].blocks[{p}]')
    ours, theirs = ({p.data_ptr() for module in modules for p in module.parameters()}
                    for modules in ([model], paths))
    expect(not ours & theirs,
           'a path changes when the composed model is trained: they share tensors. Copy the values')


# ---- 7. Gate -------------------------------------------------------------------------------------

SIZES = dict(matrix=16, vector=4, scalar=1)              # weights of each kind, at a width of 4


def starts_at_zero(ex):
    """a gate has d * d, d or one weight, returns 0 at first, and can learn from there"""
    h = torch.randn(2, 3, 4)
    for kind, wanted in SIZES.items():
        gate = ex.Gate(kind, 4)
        size = sum(p.numel() for p in gate.parameters())
        expect(size == wanted, f'a {kind} gate of width 4 has {size} parameters, not {wanted}: '
                               'is it an nn.Parameter, and is there a bias?')
        expect_same(gate(h), torch.zeros(2, 3, 4), f'the weights of a {kind} gate must start at 0')
        (torch.randn(2, 3, 4) * gate(h)).sum().backward()
        expect(all(p.grad is not None and p.grad.any() for p in gate.parameters()),
               f'no gradient reaches a {kind} gate, so it stays at zero')


def gate_computes(ex):
    """a trained gate: a matrix mixes all channels, a vector and a scalar weight them"""
    h = torch.randn(2, 3, 4)
    for kind in SIZES:
        gate = ex.Gate(kind, 4)
        for p in gate.parameters():
            nn.init.constant_(p, 0.5)
        wanted = 0.5 * h
        if kind == 'matrix':
            wanted = wanted.sum(-1, keepdim=True).expand_as(h)
        expect_same(gate(h), wanted, f'a {kind} gate with all weights 0.5')


def gate_is_added(ex):
    """gated_layer: the gate reads what the block reads, and is added to what the block returns"""
    block, gate, h = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 3, 4)
    expect_same(ex.gated_layer(block, gate, h), block(h) + gate(h),
                'block(h) + G(h). Is h added twice?')
    expect_same_gradient(lambda h: ex.gated_layer(block, gate, h), lambda h: block(h) + gate(h), h,
                         'the gradient of h. Is a part detached?')


def low_rank_learns(ex):
    """low_rank: a @ b is 0 at first, and two steps of training move both factors"""
    a, b = ex.low_rank(6, 2)
    expect_same(a @ b, torch.zeros(6, 6), 'one factor must be zero at first')
    before = a.detach().clone(), b.detach().clone()
    for _ in range(2):
        loss = (a @ b - torch.eye(6)).square().sum()
        for p, grad in zip((a, b), torch.autograd.grad(loss, (a, b))):
            p.data -= 0.1 * grad
    expect(not before[0].equal(a) and not before[1].equal(b),
           'training does not move a factor: if both are zero, so are both gradients. '
           'Start one of them at random')


# ---- 8. Prune ------------------------------------------------------------------------------------

def picks_are_counted(ex):
    """count_usage: all K picks of a token count, padding does not, unused modules have a 0"""
    choice = torch.tensor([[0, 1], [0, 3], [0, 1], [3, 0], [2, 0]])
    for target, wanted in ((0, [5, 2, 1, 2, 0, 0]), (-1, [4, 2, 1, 1, 0, 0])):
        expect_same(ex.count_usage(choice, torch.tensor([7, 2, 9, target, 4]), 6),
                    torch.tensor(wanted),
                    'count both picks of a token. A target of -1 is padding, 0 is a token')


def most_used_stay(ex):
    """prune: a count is compared with the largest, and the K most used stay whatever the threshold;
    what stays keeps its order"""
    for count, threshold, k, wanted in (([5, 90, 1, 100, 80], 0.2, 1, [1, 3, 4]),
                                        ([60, 30, 20], 0.5, 1, [0, 1]),
                                        ([3, 100, 2, 4, 1], 0.9, 3, [0, 1, 3])):
        number = torch.arange(len(count)).float()        # row and matrix i are full of i
        router, w = number[:, None].repeat(1, 2), number[:, None, None].repeat(1, 2, 3)
        router, w = ex.prune(router, w, torch.tensor(count), threshold, k)
        expect_same(w[:, 0, 0], torch.tensor(wanted),
                    f'the modules that stay, of counts {count} and a threshold of {threshold}, at '
                    f'K = {k}. Divide by the largest count, not by the sum; 0.5 is not below 0.5; '
                    'the K most used always stay; keep the order')
        expect_same(router[:, 0], w[:, 0, 0], "the router's rows are not those of the matrices")


# ---- Of each exercise: its checks, and where the project has the answer --------------------------

CHECKS = dict(
    ex1_top_k=[gates_are_shares, formula_is_right],
    ex2_balance=[switch_loss_is_right, entropy_value, entropy_balances],
    ex3_dispatch=[only_chosen_rows, outputs_add_up],
    ex4_gumbel=[noise_is_gumbel, largest_sum_is_taken, eval_repeats],
    ex5_stick=[stick_is_broken, nothing_underflows],
    ex6_compose=[blocks_read_x, tables_side_by_side, blocks_are_copies],
    ex7_gate=[starts_at_zero, gate_computes, gate_is_added, low_rank_learns],
    ex8_prune=[picks_are_counted, most_used_stay])
PLACES = dict(
    ex1_top_k='moep.py, Router.choose; moep.py, Router.weigh',
    ex2_balance='moep.py, Router.balance_loss',
    ex3_dispatch='moep.py, Rows',
    ex4_gumbel='papaformer.py, Router.weigh',
    ex5_stick='moduleformer.py, stick_weights',
    ex6_compose='papaformer.py, compose; papaformer.py, Share',
    ex7_gate='selfmoe.py, Gate; selfmoe.py, SelfMoE.states; tools/lora.py, LowRank',
    ex8_prune='moduleformer.py, count_usage; moduleformer.py, prune_experts')
