"""GPT-2 on the toy stories: the dense baseline of config/moep.py, about as large and from the same
model file."""
model = 'moep'
data = 'toy_stories'

block_size = 64
n_layer = 4
n_head = 3
n_embd = 96
n_parallel = 0
dropout = 0.0

optimizer = 'muon'              # AdamW needs twice as many tokens for the same loss
learning_rate = 5e-3
muon_rate = 4.0
min_lr = 2e-4
warmup_iters = 25
eval_interval = 100
save_interval = 250
