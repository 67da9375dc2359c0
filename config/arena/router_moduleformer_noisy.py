"""ModuleFormer with noisy top-k (arena/moduleformer_noisy.py)."""
model = 'arena.moduleformer_noisy'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 8
n_embd = 384
n_att = 4
d_att = 192
n_head = 3
n_ffd = 8
d_ffd = 192
top_k = 2
d_router = 64
dropout = 0.1
aux_weights = dict(mi=0.01)

stride = 128                    # the budget of all entries
epoch_words = 10e6
epochs = 10
batch_size = 64
learning_rate = 2e-3            # not swept itself: the best for moduleformer
min_lr = 0.0
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
