"""Answers to the exercises of lab/, for test_lab.py: right ones, and mistakes that are likely."""

# {exercise: the lines for each of its holes, in order}
RIGHT = dict(
    ex1_top_k=['''
prob_NK, choice_NK = score_NE.softmax(-1).topk(k)
gate_NK = prob_NK / prob_NK.sum(-1, keepdim=True)
return gate_NK, choice_NK
''', '''
grad_NK = gate_NK * (g_NK - (gate_NK * g_NK).sum(-1, keepdim=True))
zeros_NE = g_NK.new_zeros(len(g_NK), n_choices)
return zeros_NE.scatter(1, choice_NK, grad_NK)
'''],
    ex2_balance=['''
E, K = prob_NE.size(1), choice_NK.size(1)
f_E = torch.zeros_like(prob_NE).scatter(1, choice_NK, 1.0).mean(0) / K
p_E = prob_NE.mean(0)
return E * (f_E * p_E).sum()
''', '''
p_E = prob_NE.mean(0)
entropy = -(p_E * p_E.clamp(min=1e-9).log()).sum()
return -entropy
'''],
    ex3_dispatch=['''
y_ND = torch.zeros_like(x_ND)
for e, expert in enumerate(experts):
    token, k = (choice_NK == e).nonzero(as_tuple=True)
    rows = gate_NK[token, k, None] * expert(x_ND[token])
    y_ND = y_ND.index_add(0, token, rows)
return y_ND
'''],
    ex4_gumbel=['''
return -(-u.log()).log()
''', '''
if not training:
    noise_NE = torch.zeros_like(logits_NE)
soft_NE = ((logits_NE + noise_NE) / temperature).softmax(-1)
hard_NE = F.one_hot(soft_NE.argmax(-1), soft_NE.size(-1)).to(soft_NE.dtype)
return hard_NE + soft_NE - soft_NE.detach()
'''],
    ex5_stick=['''
future = torch.ones_like(z_TT, dtype=torch.bool).triu(1)
z_TT = z_TT.masked_fill(future, -torch.inf)
log_rest = F.logsigmoid(-z_TT).flip(-1).cumsum(-1).flip(-1)
return z_TT + log_rest
'''],
    ex6_compose=['''
outputs = [block(x) for block in self.blocks]
return self.connection(torch.cat(outputs, -1))
''', '''
with torch.no_grad():
    model.wte.weight.copy_(torch.cat([path.wte.weight for path in paths], 1))
    model.head.weight.copy_(torch.cat([path.head.weight for path in paths], 1))
for i, layer in enumerate(model.layers):
    for p, block in enumerate(layer.blocks):
        block.load_state_dict(paths[p].blocks[i].state_dict())
return model
'''],
    ex7_gate=['''
self.kind = kind
shape = dict(matrix=(d, d), vector=(d,), scalar=())[kind]
self.weight = nn.Parameter(torch.zeros(shape))
''', '''
if self.kind == 'matrix':
    return h @ self.weight
return h * self.weight
''', '''
return block(h) + gate(h)
''', '''
a = nn.Parameter(torch.randn(d, rank) / d ** 0.5)
b = nn.Parameter(torch.zeros(rank, d))
return a, b
'''],
    ex8_prune=['''
counted_NK = choice_NK[target_N >= 0]
return torch.bincount(counted_NK.flatten(), minlength=n_modules)
''', '''
frequency = count_E / count_E.max()
frequency[count_E.topk(k).indices] = torch.inf
kept = (frequency >= threshold).nonzero().flatten()
return router_ED[kept], w_EDF[kept]
'''])

# (exercise, the mistake, a part of the right answer, what replaces it, the first check that fails)
WRONG = [
    ('ex1_top_k', 'no keepdim', 'prob_NK.sum(-1, keepdim=True)', 'prob_NK.sum(-1)',
     'gates_are_shares'),
    ('ex1_top_k', 'a sum that counts as a constant',
     'prob_NK.sum(-1, keepdim=True)', 'prob_NK.sum(-1, keepdim=True).detach()',
     'gates_are_shares'),
    ('ex1_top_k', 'no sum in the gradient',
     '(g_NK - (gate_NK * g_NK).sum(-1, keepdim=True))', 'g_NK', 'formula_is_right'),

    ('ex2_balance', 'f counts tokens, not picks', '.mean(0) / K', '.mean(0)',
     'switch_loss_is_right'),
    ('ex2_balance', 'detached probabilities', '(f_E * p_E)', '(f_E * p_E.detach())',
     'switch_loss_is_right'),
    ('ex2_balance', 'log 0', '.clamp(min=1e-9)', '', 'entropy_value'),
    ('ex2_balance', 'the printed sign', 'return -entropy', 'return entropy', 'entropy_balances'),

    ('ex3_dispatch', 'all experts on all tokens', 'expert(x_ND[token])', 'expert(x_ND)[token]',
     'only_chosen_rows'),
    ('ex3_dispatch', 'written without adding', 'index_add', 'index_copy', 'outputs_add_up'),
    ('ex3_dispatch', 'detached gates', 'gate_NK[token', 'gate_NK.detach()[token',
     'outputs_add_up'),

    ('ex4_gumbel', 'one logarithm', '-(-u.log()).log()', '-u.log()', 'noise_is_gumbel'),
    ('ex4_gumbel', 'a soft choice',
     'return hard_NE + soft_NE - soft_NE.detach()', 'return soft_NE if training else hard_NE',
     'largest_sum_is_taken'),
    ('ex4_gumbel', 'no temperature', ' / temperature', '', 'largest_sum_is_taken'),
    ('ex4_gumbel', 'noise in eval mode', 'noise_NE = torch.zeros_like(logits_NE)', 'pass',
     'eval_repeats'),

    ('ex5_stick', 'no mask', 'z_TT = z_TT.masked_fill(future, -torch.inf)', 'pass',
     'stick_is_broken'),
    ('ex5_stick', 'detached in part', 'return z_TT + log_rest', 'return z_TT + log_rest.detach()',
     'stick_is_broken'),
    ('ex5_stick', 'a product',
     'F.logsigmoid(-z_TT).flip(-1).cumsum(-1).flip(-1)',
     'z_TT.neg().sigmoid().flip(-1).cumprod(-1).flip(-1).log()', 'nothing_underflows'),

    ('ex6_compose', 'the order of the paths',
     '[path.head.weight for path in paths]', '[path.head.weight for path in paths[::-1]]',
     'tables_side_by_side'),
    ('ex6_compose', 'layers and paths mixed up', 'paths[p].blocks[i]', 'paths[i].blocks[p]',
     'blocks_are_copies'),
    ('ex6_compose', 'shared, not copied',
     'block.load_state_dict(paths[p].blocks[i].state_dict())',
     'layer.blocks[p] = paths[p].blocks[i]',
     'blocks_are_copies'),

    ('ex7_gate', 'not zero at the start', 'torch.zeros(shape)', '0.02 * torch.randn(shape)',
     'starts_at_zero'),
    ('ex7_gate', 'a residual of its own', 'block(h) + gate(h)', 'h + block(h) + gate(h)',
     'gate_is_added'),
    ('ex7_gate', 'both factors zero', 'torch.randn(d, rank) / d ** 0.5', 'torch.zeros(d, rank)',
     'low_rank_learns'),

    ('ex8_prune', 'padding counts', '[target_N >= 0]', '', 'picks_are_counted'),
    ('ex8_prune', 'the sum for the largest', 'count_E.max()', 'count_E.sum()', 'most_used_stay'),
    ('ex8_prune', 'fewer than K stay', 'frequency[count_E.topk(k).indices] = torch.inf', 'pass',
     'most_used_stay'),
]
