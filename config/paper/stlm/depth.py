"""Section 5.3, mixture of depths: the baseline, whose every second layer takes 12.5% of the tokens.

    python prepare.py simplewiki && python train.py config/paper/stlm/depth.py
    --n_layer=18        # as many FLOPs per token as the baseline
    --capacity=1 --n_layer=6 --aux_weights={}    # plain, of about as many FLOPs as this
"""
model = 'stlm_depth'
data = 'simplewiki'

# The sizes are the defaults, those of baseline.py.
capacity = 0.125                # Raposo et al.
aux_weights = dict(forecast=0.01)  # trains only the forecasts

epochs = 2                      # 18M tokens; the paper: 25,000 steps of 480 rows
batch_size = 24                 # the paper accumulates 20 of them per step
learning_rate = 6e-4
min_lr = 6e-5                   # not given in the paper
warmup_iters = 100              # the paper: 5,000
