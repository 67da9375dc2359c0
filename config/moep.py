"""MoEP on the toy stories: a small model that learns their grammar in minutes on two CPU cores."""
model = 'moep'
data = 'toy_stories'

block_size = 128
n_layer = 2
n_head = 4
n_embd = 128
n_parallel = 4
n_head_parallel = 2
n_embd_parallel = 64
n_block = 4
n_expert = 4
top_k = 2
dropout = 0.0
aux_weights = dict(block_balance=0.01, expert_balance=0.01)

epochs = 3
batch_size = 16
learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
save_interval = 250
