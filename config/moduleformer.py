"""ModuleFormer on the toy stories: 1M parameters, 0.4M of them active per token; about ten minutes
on two CPU cores."""
model = 'moduleformer'
data = 'toy_stories'

block_size = 128
n_layer = 3
n_embd = 96
n_att = 4
d_att = 48
n_head = 2
n_ffd = 8
d_ffd = 96
top_k = 2
d_router = 32
query_block = 32
aux_weights = dict(mi=0.01)

epochs = 2
batch_size = 8
learning_rate = 3e-3
min_lr = 3e-4
warmup_iters = 50
weight_decay = 0.01
