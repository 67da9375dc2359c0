"""The 100M member of section 3's family. Its sizes are ours: the paper gives none.

    python prepare.py simplewiki && python train.py config/paper/stlm/baseline_100m.py
"""
model = 'stlm'
data = 'simplewiki'

block_size = 512
n_layer = 14
n_head = 20
n_kv_head = 5
n_embd = 640
ffn_hidden = 1920
dropout = 0.1

max_iters = 25000
batch_size = 24
gradient_accumulation_steps = 20
learning_rate = 6e-4
min_lr = 6e-5                   # not given in the paper
schedule = 'cosine'
warmup_iters = 5000
weight_decay = 0.1
seed = 42
eval_interval = 1000
save_interval = 1000
