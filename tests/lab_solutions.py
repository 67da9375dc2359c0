"""Answers to the exercises of lab/, for tests/test_lab.py: right ones, and wrong ones that are likely."""

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

# Other right ones: (exercise, a part of the right answer, what replaces it)
ALSO_RIGHT = [
    ('ex1_top_k', 'prob_NK, choice_NK = score_NE.softmax(-1).topk(k)\n'
     'gate_NK = prob_NK / prob_NK.sum(-1, keepdim=True)',
     'score_NK, choice_NK = score_NE.topk(k)\ngate_NK = score_NK.softmax(-1)'),
    ('ex1_top_k', 'return gate_NK, choice_NK', 'return [gate_NK, choice_NK]'),
    ('ex8_prune', 'return router_ED[kept], w_EDF[kept]', 'return [x[kept] for x in (router_ED, w_EDF)]'),
    ('ex2_balance', 'torch.zeros_like(prob_NE).scatter(1, choice_NK, 1.0).mean(0) / K',
     'torch.bincount(choice_NK.flatten(), minlength=E) / choice_NK.numel()'),
    ('ex3_dispatch', RIGHT['ex3_dispatch'][0], '''
K = choice_NK.size(1)
choice, pair = choice_NK.flatten().sort()
sizes = torch.bincount(choice, minlength=len(experts)).tolist()
groups = x_ND[pair // K].split(sizes)
y_RD = torch.cat([expert(rows) for expert, rows in zip(experts, groups)])
y_NKD = y_RD[pair.argsort()].view(*choice_NK.shape, -1)
return (gate_NK[:, :, None] * y_NKD).sum(1)
'''),
    ('ex3_dispatch', 'y_ND = y_ND.index_add(0, token, rows)', 'y_ND[token] += rows'),
    ('ex5_stick', 'return z_TT + log_rest', 'return F.logsigmoid(z_TT) + log_rest - F.logsigmoid(-z_TT)'),
]

# Wrong ones: (exercise, the mistake, a part of the right answer, what replaces it, all checks that fail,
# words of the first message)
WRONG = [
    ('ex1_top_k', 'no renormalisation',
     'prob_NK / prob_NK.sum(-1, keepdim=True)', 'prob_NK',
     ['gates_sum_to_one'], 'sum to 0.70, not 1'),
    ('ex1_top_k', 'a softmax of probabilities',
     'prob_NK / prob_NK.sum(-1, keepdim=True)', 'prob_NK.softmax(-1)',
     ['ratios_stay'], 'second softmax'),
    ('ex1_top_k', 'a detached gate',
     'return gate_NK, choice_NK', 'return gate_NK.detach(), choice_NK',
     ['gates_carry_gradient'], 'no gradient flows back: look for detach'),
    ('ex1_top_k', 'a sum that counts as a constant',
     'prob_NK.sum(-1, keepdim=True)', 'prob_NK.sum(-1, keepdim=True).detach()',
     ['gates_carry_gradient'], 'detached'),
    ('ex1_top_k', 'the K worst',
     '.topk(k)', '.topk(k, largest=False)',
     ['best_are_chosen', 'ratios_stay'], 'the three best'),
    ('ex1_top_k', 'a softmax over tokens',
     '.softmax(-1)', '.softmax(0)',
     ['best_are_chosen', 'ratios_stay'], 'of its own scores'),
    ('ex1_top_k', 'one sum for all tokens',
     'prob_NK.sum(-1, keepdim=True)', 'prob_NK.sum()',
     ['gates_sum_to_one'], 'over the K of this token'),
    ('ex1_top_k', 'no keepdim',
     'prob_NK.sum(-1, keepdim=True)', 'prob_NK.sum(-1)',
     ['gates_sum_to_one', 'ratios_stay', 'gates_carry_gradient'], 'keepdim'),
    ('ex1_top_k', 'results swapped',
     'return gate_NK, choice_NK', 'return choice_NK, gate_NK',
     ['best_are_chosen', 'gates_sum_to_one', 'ratios_stay', 'gates_carry_gradient'],
     'did you return (choices, gates)?'),
    ('ex1_top_k', 'one sum for all tokens in the gradient',
     '(gate_NK * g_NK).sum(-1, keepdim=True)', '(gate_NK * g_NK).sum()',
     ['gradient_of_chosen', 'gradient_of_one'], 'over the K of one token'),
    ('ex1_top_k', 'no sum in the gradient',
     '(g_NK - (gate_NK * g_NK).sum(-1, keepdim=True))', 'g_NK',
     ['gradient_of_chosen', 'gradient_of_one'], 'lowers the other gate'),
    ('ex1_top_k', 'the gradient in the first K columns',
     'zeros_NE.scatter(1, choice_NK, grad_NK)',
     'zeros_NE.scatter(1, torch.arange(grad_NK.size(1)).expand_as(grad_NK), grad_NK)',
     ['gradient_of_others', 'gradient_of_chosen'], 'the column is the number of the choice'),

    ('ex2_balance', 'no factor E',
     'E * (f_E', '(f_E',
     ['switch_example', 'switch_of_two', 'switch_gradient'], 'factor E'),
    ('ex2_balance', 'f counts tokens, not picks',
     '.mean(0) / K', '.mean(0)',
     ['switch_of_two', 'switch_gradient'], 'share of all N*K picks'),
    ('ex2_balance', 'f of probabilities, not of choices',
     'f_E = torch.zeros_like(prob_NE).scatter(1, choice_NK, 1.0).mean(0) / K',
     'f_E = prob_NE.mean(0)',
     ['switch_example', 'switch_of_two', 'switch_gradient'], 'counts what was taken'),
    ('ex2_balance', 'only the first choice counts',
     'scatter(1, choice_NK, 1.0).mean(0) / K', 'scatter(1, choice_NK[:, :1], 1.0).mean(0)',
     ['switch_of_two', 'switch_gradient'], 'all K choices'),
    ('ex2_balance', 'the wrong sign',
     'return E *', 'return -E *',
     ['switch_example', 'switch_of_two', 'switch_gradient', 'switch_balances'], 'sign'),
    ('ex2_balance', 'detached probabilities',
     'return E * (f_E * p_E).sum()', 'return E * (f_E * p_E.detach()).sum()',
     ['switch_gradient', 'switch_balances'], 'no gradient flows back'),
    ('ex2_balance', 'the printed sign',
     'return -entropy', 'return entropy',
     ['entropy_balances'], 'printed sign'),
    ('ex2_balance', "the mean of the tokens' entropies",
     'p_E = prob_NE.mean(0)\nentropy = -(p_E * p_E.clamp(min=1e-9).log()).sum()',
     'entropy = -(prob_NE * prob_NE.clamp(min=1e-9).log()).sum(-1).mean()',
     ['entropy_value'], 'mean over tokens first'),
    ('ex2_balance', 'a large epsilon',
     'p_E.clamp(min=1e-9).log()', '(p_E + 1e-2).log()',
     ['entropy_value', 'entropy_of_zero'], 'is your epsilon too large?'),
    ('ex2_balance', 'log 0',
     '.clamp(min=1e-9)', '',
     ['entropy_of_zero'], '0 * log 0'),
    ('ex2_balance', 'an infinite slope',
     '-(p_E * p_E.clamp(min=1e-9).log()).sum()', 'torch.special.entr(p_E).sum()',
     ['entropy_of_zero'], 'the gradient is'),

    ('ex3_dispatch', 'all experts on all tokens',
     'rows = gate_NK[token, k, None] * expert(x_ND[token])',
     'rows = gate_NK[token, k, None] * expert(x_ND)[token]',
     ['only_chosen_rows'], 'pick their rows first'),
    ('ex3_dispatch', 'token by token',
     'expert(x_ND[token])', 'torch.cat([expert(x_ND[t:t + 1]) for t in token] or [x_ND[:0]])',
     ['only_chosen_rows'], 'make one matrix of its rows'),
    ('ex3_dispatch', 'written without adding',
     'y_ND = y_ND.index_add(0, token, rows)', 'y_ND = y_ND.index_copy(0, token, rows)',
     ['outputs_add_up', 'idle_expert', 'dense_gradients'], 'overwrites what another expert put there'),
    ('ex3_dispatch', '+= at a repeated index',
     RIGHT['ex3_dispatch'][0],
     '''
choice, pair = choice_NK.flatten().sort()
token = pair // choice_NK.size(1)
groups = x_ND[token].split(torch.bincount(choice, minlength=len(experts)).tolist())
y_RD = torch.cat([expert(rows) for expert, rows in zip(experts, groups)])
y_ND = torch.zeros_like(x_ND)
y_ND[token] += gate_NK.flatten()[pair, None] * y_RD
return y_ND
''',
     ['outputs_add_up', 'idle_expert'], 'a repeated index keeps one row'),
    ('ex3_dispatch', 'rows left in the order of the experts',
     RIGHT['ex3_dispatch'][0],
     '''
choice, pair = choice_NK.flatten().sort()
groups = x_ND[pair // choice_NK.size(1)].split(torch.bincount(choice, minlength=len(experts)).tolist())
y_RD = torch.cat([expert(rows) for expert, rows in zip(experts, groups)])
return (gate_NK[:, :, None] * y_RD.view(*choice_NK.shape, -1)).sum(1)
''',
     ['tokens_keep_places', 'gates_multiply', 'outputs_add_up', 'idle_expert', 'dense_gradients'],
     'places of their tokens'),
    ('ex3_dispatch', 'no gates',
     'gate_NK[token, k, None] * expert', 'expert',
     ['gates_multiply', 'outputs_add_up', 'idle_expert', 'dense_gradients'],
     'the gate of its own token'),
    ('ex3_dispatch', 'gates on the inputs',
     'gate_NK[token, k, None] * expert(x_ND[token])', 'expert(gate_NK[token, k, None] * x_ND[token])',
     ['gates_multiply', 'outputs_add_up', 'idle_expert', 'dense_gradients'],
     'the output, not the input'),
    ('ex3_dispatch', 'a row for nobody',
     'rows = gate', 'if not len(token):\n        y_ND = y_ND + expert(x_ND[:1])\n    rows = gate',
     ['idle_expert'], 'if no token chose expert 1'),
    ('ex3_dispatch', 'always the first gate',
     'gate_NK[token, k, None]', 'gate_NK[token, :1]',
     ['outputs_add_up', 'idle_expert', 'dense_gradients'], 'which gate does each row take'),
    ('ex3_dispatch', 'detached gates',
     'gate_NK[token, k, None]', 'gate_NK.detach()[token, k, None]',
     ['dense_gradients'], 'look for detach'),

    ('ex4_gumbel', 'one logarithm',
     '-(-u.log()).log()', '-u.log()',
     ['noise_is_gumbel', 'choices_are_samples'], 'two logarithms'),
    ('ex4_gumbel', 'a soft choice',
     'return hard_NE + soft_NE - soft_NE.detach()', 'return soft_NE if training else hard_NE',
     ['weights_are_one_hot'], 'not one-hot'),
    ('ex4_gumbel', 'no gradient',
     'return hard_NE + soft_NE - soft_NE.detach()', 'return hard_NE',
     ['gradient_is_soft'], 'argmax and one_hot also have none'),
    ('ex4_gumbel', 'twice the gradient',
     'return hard_NE + soft_NE - soft_NE.detach()',
     'return hard_NE + 2 * (soft_NE - soft_NE.detach())',
     ['gradient_is_soft'], 'the gradient of a token'),
    ('ex4_gumbel', 'no temperature',
     '((logits_NE + noise_NE) / temperature)', '(logits_NE + noise_NE)',
     ['gradient_is_soft'], 'at temperature 0.5'),
    ('ex4_gumbel', 'noise in eval mode',
     'noise_NE = torch.zeros_like(logits_NE)', 'pass',
     ['eval_repeats'], 'the noise is for training alone'),
    ('ex4_gumbel', 'soft in eval mode',
     'noise_NE = torch.zeros_like(logits_NE)',
     'return logits_NE.softmax(-1) * F.one_hot(logits_NE.argmax(-1), logits_NE.size(-1))',
     ['eval_repeats'], 'not one-hot'),
    ('ex4_gumbel', 'integers in eval mode',
     'noise_NE = torch.zeros_like(logits_NE)',
     'return F.one_hot(logits_NE.argmax(-1), logits_NE.size(-1))',
     ['eval_repeats'], 'not torch.float64 like the logits'),
    ('ex4_gumbel', 'the largest logit, whatever the noise',
     'F.one_hot(soft_NE.argmax(-1)', 'F.one_hot(logits_NE.argmax(-1)',
     ['largest_sum_is_taken', 'choices_are_samples'], 'not the largest logit'),
    ('ex4_gumbel', 'ready-made',
     'return hard_NE + soft_NE - soft_NE.detach()',
     'return F.gumbel_softmax(logits_NE, temperature, True) if training else hard_NE',
     ['weights_are_one_hot', 'largest_sum_is_taken', 'choices_are_samples', 'gradient_is_soft'],
     'write it yourself'),

    ('ex5_stick', 'no mask',
     'z_TT = z_TT.masked_fill(future, -torch.inf)', 'pass',
     ['later_keys_get_nothing', 'later_keys_change_nothing', 'gradient_is_right'],
     'must be -inf where i > t'),
    ('ex5_stick', 'masked too late: the future leaks',
     'z_TT = z_TT.masked_fill(future, -torch.inf)\n'
     'log_rest = F.logsigmoid(-z_TT).flip(-1).cumsum(-1).flip(-1)\nreturn z_TT + log_rest',
     'log_rest = F.logsigmoid(-z_TT).flip(-1).cumsum(-1).flip(-1)\n'
     'return (z_TT + log_rest).masked_fill(future, -torch.inf)',
     ['later_keys_change_nothing', 'gradient_is_right'], 'the future leaks'),
    ('ex5_stick', 'key i counted twice',
     'return z_TT + log_rest', 'return F.logsigmoid(z_TT) + log_rest',
     ['halves', 'stick_is_broken', 'gradient_is_right', 'nothing_underflows', 'sure_matches'],
     'over the keys after i'),
    ('ex5_stick', 'from the left',
     '.flip(-1).cumsum(-1).flip(-1)', '.cumsum(-1)',
     ['halves', 'stick_is_broken', 'gradient_is_right', 'nothing_underflows', 'sure_matches'],
     'over the keys after i'),
    ('ex5_stick', 'p for log p',
     'return z_TT + log_rest', 'return (z_TT + log_rest).exp()',
     ['halves', 'later_keys_get_nothing', 'stick_is_broken', 'gradient_is_right', 'nothing_underflows',
      'sure_matches'],
     '(exp of what you return)'),
    ('ex5_stick', 'detached in part',
     'return z_TT + log_rest', 'return z_TT + log_rest.detach()',
     ['gradient_is_right'], 'is a part of them detached?'),
    ('ex5_stick', 'an epsilon',
     'F.logsigmoid(-z_TT)', '(1 - z_TT.sigmoid() + 1e-9).log()',
     ['sure_matches'], 'a clamp or an epsilon'),
    ('ex5_stick', 'a log of 0 that is replaced',
     'F.logsigmoid(-z_TT)', 'torch.where(z_TT > 10, -z_TT, (1 - z_TT.sigmoid()).log())',
     ['sure_matches'], 'even if its value is then replaced'),
    ('ex5_stick', 'a product',
     'log_rest = F.logsigmoid(-z_TT).flip(-1).cumsum(-1).flip(-1)',
     'log_rest = z_TT.neg().sigmoid().flip(-1).cumprod(-1).flip(-1).log()',
     ['nothing_underflows'], 'a product of 500 factors underflows'),
    ('ex5_stick', 'the logarithm of a difference',
     'F.logsigmoid(-z_TT)', '(1 - z_TT.sigmoid()).log()',
     ['sure_matches'], 'F.logsigmoid'),
    ('ex5_stick', 'a loop over keys',
     'log_rest = F.logsigmoid(-z_TT).flip(-1).cumsum(-1).flip(-1)',
     'log_rest = torch.stack([F.logsigmoid(-z_TT[:, i:]).sum(-1) for i in range(len(z_TT))], -1)',
     ['no_loop'], 'a loop over keys'),

    ('ex6_compose', 'one block after the other',
     'outputs = [block(x) for block in self.blocks]',
     'outputs = [self.blocks[0](x), self.blocks[1](self.blocks[0](x))]',
     ['blocks_read_x'], 'of the same x'),
    ('ex6_compose', 'the order of the paths',
     '[path.wte.weight for path in paths]', '[path.wte.weight for path in paths[::-1]]',
     ['embeddings_side_by_side'], 'side by side'),
    ('ex6_compose', 'the order of the paths',
     '[path.head.weight for path in paths]', '[path.head.weight for path in paths[::-1]]',
     ['logits_add_up'], 'in the order of the paths'),
    ('ex6_compose', 'the first path for all',
     'paths[p].blocks[i]', 'paths[0].blocks[i]',
     ['blocks_are_copies'], 'of path 1 does'),
    ('ex6_compose', 'layers and paths mixed up',
     'paths[p].blocks[i]', 'paths[i].blocks[p]',
     ['blocks_are_copies'], 'but it is like blocks[1] of path 0'),
    ('ex6_compose', 'shared, not copied',
     'block.load_state_dict(paths[p].blocks[i].state_dict())',
     'layer.blocks[p] = paths[p].blocks[i]',
     ['paths_stay', 'everything_trains'], 'they share tensors'),
    ('ex6_compose', 'nothing copied',
     'block.load_state_dict(paths[p].blocks[i].state_dict())', 'pass',
     ['blocks_are_copies'], 'no block of a path'),
    ('ex6_compose', 'frozen',
     'return model', 'model.wte.requires_grad_(False)\nreturn model',
     ['everything_trains'], "no gradient reaches ['wte.weight'] (1 in all)"),
    ('ex6_compose', 'copied into leaves of the graph',
     'with torch.no_grad():', 'if True:',
     ['embeddings_side_by_side', 'logits_add_up', 'blocks_are_copies', 'paths_stay', 'everything_trains'],
     'under `with torch.no_grad():`'),
    ('ex6_compose', 'one table below the other',
     'model.wte.weight.copy_(torch.cat([path.wte.weight for path in paths], 1))',
     'model.wte.weight = nn.Parameter(torch.cat([path.wte.weight for path in paths]))',
     ['embeddings_side_by_side', 'logits_add_up', 'blocks_are_copies', 'paths_stay', 'everything_trains'],
     'wte.weight has the shape (20, 3), not (10, 6)'),

    ('ex7_gate', 'not zero at the start',
     'torch.zeros(shape)', '0.02 * torch.randn(shape)',
     ['starts_at_zero'], 'must start at 0'),
    ('ex7_gate', 'the identity matrix taken literally',
     'torch.zeros(shape)', 'torch.ones(shape)',
     ['starts_at_zero'], 'must start at 0'),
    ('ex7_gate', 'a residual of its own',
     'block(h) + gate(h)', 'h + block(h) + gate(h)',
     ['zero_changes_nothing', 'gate_reads_input'], 'is h added twice?'),
    ('ex7_gate', 'a product of two zeros',
     'return h @ self.weight', 'return h @ (self.weight @ self.weight)',
     ['gate_learns', 'gate_computes'], 'a product of two zeros'),
    ('ex7_gate', 'detached',
     'return h * self.weight', 'return h * self.weight.detach()',
     ['gate_learns'], 'detached'),
    ('ex7_gate', 'no parameter',
     'nn.Parameter(torch.zeros(shape))', 'torch.zeros(shape)',
     ['sizes', 'gate_computes'], 'nn.Parameter'),
    ('ex7_gate', "around the block's output",
     'block(h) + gate(h)', 'block(h) + gate(block(h))',
     ['gate_reads_input'], 'the input of the block'),
    ('ex7_gate', 'a matrix that weights channels',
     'return h @ self.weight', 'return h * self.weight.diagonal()',
     ['gate_computes'], 'a matrix gate makes'),
    ('ex7_gate', 'both factors zero',
     'torch.randn(d, rank) / d ** 0.5', 'torch.zeros(d, rank)',
     ['both_factors_learn'], 'a and b'),
    ('ex7_gate', 'none zero',
     'torch.zeros(rank, d)', 'torch.randn(rank, d)',
     ['product_starts_at_zero'], 'one factor must be zero'),

    ('ex8_prune', 'padding counts',
     '[target_N >= 0]', '',
     ['padding_does_not_count'], 'is padding'),
    ('ex8_prune', 'a target of 0 taken for padding',
     'target_N >= 0', 'target_N > 0',
     ['all_picks_count'], 'a token like any other'),
    ('ex8_prune', 'only first choices count',
     'counted_NK.flatten()', 'counted_NK[:, 0]',
     ['all_picks_count', 'padding_does_not_count'], 'both picks'),
    ('ex8_prune', 'no minlength',
     ', minlength=n_modules', '',
     ['all_picks_count'], 'one count for each module, used or not'),
    ('ex8_prune', 'keep the least used',
     'frequency >= threshold', '(frequency < threshold) | frequency.isinf()',
     ['most_used_stay', 'largest_is_the_measure', 'k_stay'], 'used least'),
    ('ex8_prune', 'the sum for the largest',
     'count_E.max()', 'count_E.sum()',
     ['largest_is_the_measure'], 'not by the sum'),
    ('ex8_prune', 'fewer than K stay',
     'frequency[count_E.topk(k).indices] = torch.inf', 'pass',
     ['k_stay'], 'K = 3'),
    ('ex8_prune', 'the router keeps all its rows',
     'router_ED[kept]', 'router_ED',
     ['router_fits'], 'same numbers'),
    ('ex8_prune', 'the first rows of the router',
     'router_ED[kept]', 'router_ED[:len(kept)]',
     ['router_fits'], 'same numbers'),
    ('ex8_prune', 'sorted by use',
     'kept = (frequency >= threshold).nonzero().flatten()',
     'kept = count_E.argsort(descending=True)[:(frequency >= threshold).sum()]',
     ['most_used_stay', 'k_stay'], 'in the order they had, [1, 3, 4]'),
    ('ex8_prune', 'the K most used, sorted by use',
     'frequency[count_E.topk(k).indices] = torch.inf\nkept = (frequency >= threshold).nonzero().flatten()',
     'kept = (frequency >= threshold).nonzero().flatten()\n'
     'kept = kept if len(kept) >= k else count_E.topk(k).indices',
     ['k_stay'], 'in the order they had, [0, 1, 3]'),
]
