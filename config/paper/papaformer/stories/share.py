"""Parallel_Share_Linear of Table 7, first phase: TinyStories only, from random weights.

    python prepare.py tinystories && python train.py config/paper/papaformer/stories/share.py

Parallel_Gumb_MoE_1, and with gumbel2 Parallel_Gumb_MoE_2:

    python train.py config/paper/papaformer/stories/share.py --connection=gumbel1 \\
        --aux_weights="dict(entropy=0.01, load=0.01)" --out_dir=out/paper/papaformer/stories/gumbel1

--aux_form=printed trains them with Eq. 8 and 9 as printed, which have the opposite sign.
"""
model = 'papaformer'
data = 'tinystories'            # GPT-2's tokenizer

block_size = 256
n_layer = 2
n_head = 8
n_embd = 256
n_parallel = 3
path_embd = [128, 128]
path_head = [4, 4]
connection = 'share'

epochs = 6                      # over 3M tokens per set; the paper: 2, over far more
batch_size = 32                 # the paper accumulates 8 of them per step
learning_rate = 5e-4
eps = 1e-5
# The paper's cosine, weight decay and betas are train.py's defaults. It gives no min_lr, no
# warm-up and no grad_clip.
eval_interval = 1000
save_interval = 1000
