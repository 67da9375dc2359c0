"""PaPaformer from scratch, Gumb-MoE-1, on the toy stories, of about GPT-2's FLOPs per token."""
model = 'papaformer'
data = 'toy_stories'

block_size = 64
n_layer = 2
n_head = 4
n_embd = 96
n_parallel = 3
path_embd = [48, 48]
path_head = [2, 2]
connection = 'gumbel1'
aux_weights = dict(entropy=0.01, load=0.01)

max_iters = 976                 # 0.5M tokens, the budget of all entries
batch_size = 8
learning_rate = 4e-3            # the best of 2e-3, 4e-3, 8e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
