"""PaPaformer from scratch on both toy corpora: two paths of width 48, joined by Share-Linear.

The recipe in docs/papaformer.md trains the paths separately and then composes them."""
model = 'papaformer'
data = 'toy_stories,toy_math'

block_size = 64
n_layer = 2
n_head = 4
n_embd = 96
n_parallel = 3
path_embd = [48, 48]
path_head = [2, 2]
# gumbel1 or gumbel2: add --aux_weights="dict(entropy=0.01, load=0.01)"
connection = 'share'

epochs = 2
batch_size = 8
learning_rate = 3e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
