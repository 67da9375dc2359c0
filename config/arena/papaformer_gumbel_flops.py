"""PaPaformer from scratch, Gumb-MoE-1, at GPT-2's FLOPs per token."""
model = 'papaformer'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 2
n_head = 6
n_embd = 384
n_parallel = 17
path_embd = [192, 192]
path_head = [3, 3]
connection = 'gumbel1'
dropout = 0.1
aux_weights = dict(entropy=0.01, load=0.01)

stride = 128                    # the budget of all entries
epoch_words = 10e6
epochs = 10
batch_size = 64
learning_rate = 1e-3            # not swept itself: the best for papaformer_share
min_lr = 0.0
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
