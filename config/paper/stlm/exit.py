"""Section 5.3, early exit: the baseline with layer dropout and the loss at earlier exits
(LayerSkip).

    python prepare.py simplewiki && python train.py config/paper/stlm/exit.py
    python -m papers.depth out/paper/stlm/exit      # the loss at each exit; drafts, and their speed
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
capacity = 1.0                  # no routing
layer_dropout = 0.1             # Elhoushi et al., when they train from scratch
exit_loss = True
aux_weights = dict(exit=1.0)    # as their e_scale of 0.11

epochs = 2                      # 18M tokens; the paper: 25,000 steps of 480 rows
batch_size = 24
gradient_accumulation_steps = 1 # the paper: 20
learning_rate = 6e-4
min_lr = 6e-5                   # not given in the paper
schedule = 'cosine'
warmup_iters = 100              # the paper: 5,000
weight_decay = 0.1
