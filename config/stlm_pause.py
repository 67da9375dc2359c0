"""The Super Tiny baseline on toy math, with ten pauses between question and solution (section 5.4).

    python -m papers.exact_answer out/stlm_pause                       # how many answers are right

Without pauses, on windows of as much text:

    python train.py config/stlm_pause.py --data=toy_math --block_size=128 --out_dir=out/stlm_math
"""
model = 'stlm'
data = 'toy_pauses'

block_size = 164
n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 96
ffn_hidden = 256
dropout = 0.0

epochs = 4
batch_size = 4
learning_rate = 3e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
