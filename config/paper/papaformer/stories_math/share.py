"""Parallel_Share_Linear of Table 7, second phase: Path_1 and Path_2 composed, then trained on the
other 40% of both data sets.

After path_1.py and path_2.py:

    python train.py config/paper/papaformer/stories_math/share.py

Parallel_Gumb_MoE_1, and with gumbel2 Parallel_Gumb_MoE_2:

    python train.py config/paper/papaformer/stories_math/share.py \\
        --surgery_args="dict(connection='gumbel1')" \\
        --aux_weights="dict(entropy=0.01, load=0.01)" \\
        --out_dir=out/paper/papaformer/stories_math/gumbel1
"""
model = 'papaformer'
# what the paths have not read
data = {'tinystories_neox': (0.6, 1.0), 'openmath_neox': (0.6, 1.0)}
init_from = ['out/paper/papaformer/stories_math/path_1', 'out/paper/papaformer/stories_math/path_2']
surgery = 'compose'
surgery_args = dict(connection='share')

epochs = 6                      # over 3M tokens per set; the paper: 2, over far more
batch_size = 32
gradient_accumulation_steps = 1 # the paper: 8
learning_rate = 5e-4
min_lr = 0.0                    # not given in the paper
schedule = 'cosine'
warmup_iters = 0                # not given in the paper
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
eps = 1e-5
grad_clip = 1.0                 # not given in the paper
eval_interval = 1000
save_interval = 1000
