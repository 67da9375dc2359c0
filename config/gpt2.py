"""GPT-2 on the toy stories, about as many parameters as config/moep.py: the dense baseline, from the same file."""
model = 'moep'
data = 'toy_stories'

block_size = 128
n_layer = 6
n_head = 4
n_embd = 128
n_parallel = 0
dropout = 0.0

epochs = 3
batch_size = 16
learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
save_interval = 250
