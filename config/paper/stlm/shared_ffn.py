"""Section 5.1: the baseline with one FFN shared by all layers, as in MobiLlama.

    python prepare.py simplewiki && python train.py config/paper/stlm/shared_ffn.py
    --share_group=5                                # one for each half of the layers
"""
model = 'stlm'
data = 'simplewiki'

block_size = 512
n_layer = 10
n_head = 16
n_kv_head = 4                   # not given in the paper; gives its count of 55.9M
n_embd = 512
ffn_hidden = 1536
dropout = 0.1
share = 'ffn'

epochs = 2                      # 18M tokens; the paper: 25,000 steps of 480 rows
batch_size = 24
gradient_accumulation_steps = 1 # the paper: 20
learning_rate = 6e-4
min_lr = 6e-5                   # not given in the paper
schedule = 'cosine'
warmup_iters = 100              # the paper: 5,000
weight_decay = 0.1
seed = 42
eval_interval = 500
save_interval = 500
