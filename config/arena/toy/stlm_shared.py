"""STLM on the toy stories, one FFN shared by all layers, of about GPT-2's FLOPs per token."""
model = 'stlm'
data = 'toy_stories'

block_size = 64
n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 96
ffn_hidden = 256
share = 'ffn'
dropout = 0.0

max_iters = 976                 # 0.5M tokens, the budget of all entries
batch_size = 8
learning_rate = 4e-3            # the best of 2e-3, 4e-3, 8e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
