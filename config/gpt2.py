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

epochs = 2
batch_size = 8
learning_rate = 3e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
save_interval = 500
