"""The dense model to beat on the toy stories. In both classes."""
model = 'strong'
data = 'toy_stories'

block_size = 64
n_layer = 4
n_head = 3
n_embd = 96
dropout = 0.0

max_iters = 976                 # 0.5M tokens, the budget of all entries
batch_size = 8
learning_rate = 1.6e-2          # the best of 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
