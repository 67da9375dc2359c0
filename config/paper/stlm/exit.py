"""Section 5.3, early exit: the baseline with layer dropout and the loss at earlier exits
(LayerSkip).

    python prepare.py simplewiki && python train.py config/paper/stlm/exit.py
    python -m papers.depth out/paper/stlm/exit      # the loss at each exit; drafts, and their speed
"""
model = 'stlm_depth'
data = 'simplewiki'

# The sizes are the defaults, those of baseline.py.
capacity = 1.0                  # no routing
layer_dropout = 0.1             # Elhoushi et al., when they train from scratch
exit_loss = True
aux_weights = dict(exit=1.0)    # as their e_scale of 0.11

epochs = 2                      # 18M tokens; the paper: 25,000 steps of 480 rows
batch_size = 24                 # the paper accumulates 20 of them per step
learning_rate = 6e-4
min_lr = 6e-5                   # not given in the paper
warmup_iters = 100              # the paper: 5,000
