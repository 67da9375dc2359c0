"""The base model of the recipe in docs/selfmoe.md: a small LLaMA without gates, on toy stories."""
model = 'selfmoe'
data = 'toy_stories'

block_size = 128
n_layer = 6
n_head = 4
n_kv_head = 2
n_embd = 96
gate = 'none'

epochs = 2
batch_size = 4
learning_rate = 3e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
