"""MoEP on the toy stories: 0.7M parameters learn the grammar in a minute on two CPU cores."""
model = 'moep'
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
aux_weights = dict(block_balance=0.01, expert_balance=0.01)

optimizer = 'muon'              # AdamW needs twice as many tokens for the same loss
learning_rate = 5e-3
muon_rate = 4.0
min_lr = 2e-4
warmup_iters = 25
eval_interval = 100
save_interval = 250
