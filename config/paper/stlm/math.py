"""Section 5.4, the baseline of math_pauses.py and math_thoughts.py. All settings are ours: the paper
has no experiment on it. The sizes are those of baseline_10m.py, with fewer tokens 2.4M parameters.

    python prepare.py openmath --name openmath_4096 --vocab_size 4096
    python train.py config/paper/stlm/math.py
    python -m tools.exact_answer out/paper/stlm/math --max_new_tokens 256
"""
model = 'stlm'
data = 'openmath_4096'

block_size = 512
n_layer = 6
n_head = 4
n_kv_head = 2
n_embd = 160
ffn_hidden = 432
dropout = 0.1

epochs = 8                      # of 2.9M tokens
batch_size = 24
learning_rate = 1e-3
min_lr = 1e-4
schedule = 'cosine'
warmup_iters = 100
weight_decay = 0.1
seed = 42
eval_interval = 500
save_interval = 500
