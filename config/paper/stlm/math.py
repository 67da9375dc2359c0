"""Section 5.4: the baseline of pauses and thoughts. All settings are ours: the paper has no
experiment on it. The sizes are those of the 10M model of baseline.py, with fewer tokens 2.4M
parameters.

    python prepare.py openmath --name openmath_4096 --vocab_size 4096
    python train.py config/paper/stlm/math.py
    python -m papers.exact_answer out/paper/stlm/math --max_new_tokens 256

Ten pauses between question and solution; 544 tokens hold as much text as 512 without them:

    python prepare.py openmath --name openmath_pauses --vocab_size 4096 --pauses 10
    python train.py config/paper/stlm/math.py --data=openmath_pauses --block_size=544 \\
        --out_dir=out/paper/stlm/math_pauses
"""
model = 'stlm'
data = 'openmath_4096'

block_size = 512
n_layer = 6
n_head = 4
n_kv_head = 2
n_embd = 160
ffn_hidden = 432

epochs = 8                      # of 2.9M tokens
batch_size = 24
min_lr = 1e-4
warmup_iters = 100
