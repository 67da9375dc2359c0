"""Section 5.4: math.py with ten pauses between question and solution.

    python prepare.py openmath --name openmath_pauses --vocab_size 4096 --pauses 10
    python train.py config/paper/stlm/math_pauses.py
    python -m tools.exact_answer out/paper/stlm/math_pauses --max_new_tokens 256
"""
model = 'stlm'
data = 'openmath_pauses'

block_size = 544                # as much text as 512 tokens without pauses
n_layer = 6
n_head = 4
n_kv_head = 2
n_embd = 160
ffn_hidden = 432
dropout = 0.1

epochs = 8                      # of 2.9M tokens and 0.2M pauses
batch_size = 24
learning_rate = 1e-3
min_lr = 1e-4
schedule = 'cosine'
warmup_iters = 100
weight_decay = 0.1
seed = 42
eval_interval = 500
save_interval = 500
