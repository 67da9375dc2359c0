"""Early exit on the toy stories: training drops layers and adds the loss at earlier exits, so that
the first layers can draft what the others verify (python -m papers.depth out/stlm_exit).

    --exit_loss=False --layer_dropout=0.0 --aux_weights='{}'       # the same model without
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
capacity = 1.0                                     # no routing
layer_dropout = 0.1
exit_loss = True

aux_weights = dict(exit=1.0)

epochs = 2
batch_size = 8
learning_rate = 3e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
