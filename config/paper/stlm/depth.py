"""Section 5.3, mixture of depths: the baseline, whose every second layer takes 12.5% of the tokens.

    python prepare.py simplewiki && python train.py config/paper/stlm/depth.py
    --n_layer=18        # as many FLOPs per token as the baseline
    --capacity=1 --n_layer=6 --aux_weights={}    # plain, of about as many FLOPs as this
"""
model = 'stlm_depth'
data = 'simplewiki'

block_size = 512
n_layer = 10
n_head = 16
n_kv_head = 4                   # not given in the paper; gives 55.9M parameters (the paper: 50M)
n_embd = 512
ffn_hidden = 1536
dropout = 0.1
capacity = 0.125                # Raposo et al.
route_every = 2
aux_weights = dict(forecast=0.01)  # trains only the forecasts

epochs = 2                      # 18M tokens; the paper: 25,000 steps of 480 rows
batch_size = 24
gradient_accumulation_steps = 1 # the paper: 20
learning_rate = 6e-4
min_lr = 6e-5                   # not given in the paper
schedule = 'cosine'
warmup_iters = 100              # the paper: 5,000
weight_decay = 0.1
