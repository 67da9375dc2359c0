"""Stage 1 of Self-MoE's gates: a LLaMA without them, half of the tokens."""
model = 'selfmoe'
data = 'toy_stories'

block_size = 64
n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 80
gate = 'none'

max_iters = 488                 # 0.25M tokens, a part of the budget of all entries
batch_size = 8
learning_rate = 8e-3            # the best of 2e-3, 4e-3, 8e-3, 1.6e-2
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
