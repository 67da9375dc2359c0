"""Stage 1 of PaPaformer composed: a narrow LLaMA, 30% of the tokens, on the first half of the
text."""
model = 'papaformer'
data = {'toy_stories': (0.0, 0.5)}

block_size = 64
n_layer = 5
n_head = 2
n_embd = 40
n_parallel = 0

max_iters = 293                 # 0.15M tokens, a part of the budget of all entries
batch_size = 8
learning_rate = 8e-3            # the best of 2e-3, 4e-3, 8e-3, 1.6e-2
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
