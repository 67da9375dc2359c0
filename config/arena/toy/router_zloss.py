"""MoEP with a router z-loss (arena/zloss.py)."""
model = 'arena.zloss'
data = 'toy_stories'

block_size = 64
n_layer = 2
n_head = 3
n_embd = 96
n_parallel = 2
n_head_parallel = 1
n_embd_parallel = 48
n_block = 4
n_expert = 4
top_k = 2
dropout = 0.0
aux_weights = dict(block_balance=0.01, expert_balance=0.01, block_z=0.001, expert_z=0.001)

max_iters = 976                 # 0.5M tokens, the budget of all entries
batch_size = 8
learning_rate = 4e-3            # the best of 2e-3, 4e-3, 8e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
