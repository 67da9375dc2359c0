"""ModuleFormer with a router z-loss (arena/moduleformer_zloss.py)."""
model = 'arena.moduleformer_zloss'
data = 'toy_stories'

block_size = 64
n_layer = 2
n_embd = 80
n_att = 4
d_att = 40
n_head = 2
n_ffd = 8
d_ffd = 80
top_k = 2
d_router = 32
query_block = 32
aux_weights = dict(mi=0.01, z=0.001)

max_iters = 976                 # 0.5M tokens, the budget of all entries
batch_size = 8
learning_rate = 8e-3            # the best of 2e-3, 4e-3, 8e-3, 1.6e-2
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
