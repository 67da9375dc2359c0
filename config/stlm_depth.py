"""Mixture of depths on the toy stories: every second layer takes one token in eight.

    --capacity=0.5                                 # more tokens pass; 1: all, a plain Transformer
    --n_layer=8                                    # twice as deep at little cost
"""
model = 'stlm_depth'
data = 'toy_stories'

block_size = 64
n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 96
ffn_hidden = 256
dropout = 0.0
capacity = 0.125
route_every = 2

aux_weights = dict(forecast=0.01)                  # trains only the forecasts

epochs = 2
batch_size = 8
learning_rate = 3e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
