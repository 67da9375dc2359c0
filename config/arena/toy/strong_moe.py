"""strong.py, smaller, with 2 of 8 experts for its FFNs, on the toy stories."""
model = 'strong'
data = 'toy_stories'

block_size = 64
n_layer = 3
n_head = 2
n_embd = 68
n_expert = 8
top_k = 2
dropout = 0.0
aux_weights = dict(balance=0.01)

max_iters = 976                 # 0.5M tokens, the budget of all entries
batch_size = 8
learning_rate = 1.6e-2          # the best of 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
