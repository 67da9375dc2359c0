"""Self-MoE's comparison, a mixture of experts, from scratch on the toy stories."""
model = 'selfmoe'
data = 'toy_stories'

block_size = 64
n_layer = 2
n_head = 4
n_kv_head = 2
n_embd = 80
ffn_hidden = 128
gate = 'none'
n_expert = 4
top_k = 2
aux_weights = dict(balance=0.01)

max_iters = 976                 # 0.5M tokens, the budget of all entries
batch_size = 8
learning_rate = 4e-3            # the best of 2e-3, 4e-3, 8e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
