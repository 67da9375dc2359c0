"""MoEP with a router z-loss (arena/zloss.py)."""
model = 'arena.zloss'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 2
n_head = 6
n_embd = 384
n_parallel = 10
n_head_parallel = 3
n_embd_parallel = 192
n_block = 4
n_expert = 4
top_k = 2
dropout = 0.1
aux_weights = dict(block_balance=0.01, expert_balance=0.01, block_z=0.001, expert_z=0.001)

stride = 128                    # the budget of all entries
epoch_words = 10e6
epochs = 10
batch_size = 64
learning_rate = 2e-3            # not swept itself: the best for moep
min_lr = 0.0
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
