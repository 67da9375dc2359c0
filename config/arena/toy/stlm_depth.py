"""STLM with a mixture of depths on the toy stories: every second layer takes one token in eight."""
model = 'stlm_depth'
data = 'toy_stories'

block_size = 64
n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 96
ffn_hidden = 256
capacity = 0.125
route_every = 2
dropout = 0.0
aux_weights = dict(forecast=0.01)

max_iters = 976                 # 0.5M tokens, the budget of all entries
batch_size = 8
learning_rate = 4e-3            # the best of 2e-3, 4e-3, 8e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
