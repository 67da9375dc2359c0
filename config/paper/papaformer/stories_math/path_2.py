"""Path_2 of Table 7, second phase: 60% of the math problems (the paper: 60% of 20% of
OpenMathInstruct-1).

    python prepare.py openmath --name openmath_neox --tokenizer 20B_tokenizer.json
    python prepare.py mix --name openmath_60 --input data/openmath_neox:0:0.6
    python train.py config/paper/papaformer/stories_math/path_2.py
"""
model = 'papaformer'
data = 'openmath_60'

block_size = 256
n_layer = 3
n_head = 4
n_embd = 128
n_parallel = 0

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
