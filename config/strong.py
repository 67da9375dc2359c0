"""The strong dense model on the toy stories: as large as config/gpt2.py, with today's recipe."""
model = 'strong'
data = 'toy_stories'

block_size = 64
n_layer = 4
n_head = 3
n_embd = 96
dropout = 0.0

epochs = 2
batch_size = 8
learning_rate = 3e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
