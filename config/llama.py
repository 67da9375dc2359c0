"""LLaMA on both toy corpora: the dense baseline of config/papaformer.py, about as large and from
the same model file."""
model = 'papaformer'
data = 'toy_stories,toy_math'

block_size = 64
n_layer = 4
n_head = 4
n_embd = 96
n_parallel = 0

epochs = 2
batch_size = 8
learning_rate = 3e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
