"""strong_muon.py with 4 of 16 experts, on the toy stories: the dense model's FLOPs."""
model = 'strong'
data = 'toy_stories'

block_size = 64
n_layer = 4
n_head = 3
n_embd = 96
n_expert = 16
top_k = 4
dropout = 0.0
aux_weights = dict(balance=0.01)

max_iters = 976                 # 0.5M tokens, the budget of all entries
batch_size = 8
optimizer = 'muon'
learning_rate = 8e-3            # of embeddings and routers; the best of 4e-3, 8e-3, 1.6e-2, 3.2e-2
muon_rate = 6.0                 # the matrices': 0.048
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
