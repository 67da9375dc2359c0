"""Section 5.4: next thoughts. The core reads and predicts sentences of up to 32 tokens; a longer
one becomes several. 2.3M parameters, 5% fewer than math.py.

    python prepare.py openmath --name openmath_thoughts --vocab_size 4096 --sentences
    python train.py config/paper/stlm/math_thoughts.py
    python -m papers.exact_answer out/paper/stlm/math_thoughts --max_new_tokens 528  # 16 sentences
"""
model = 'stlm'
data = 'openmath_thoughts'

block_size = 1056               # 32 sentences of 33 slots: as much text as 512 tokens
byte_limit = 32                 # tokens in a sentence
byte_embd = 96
byte_layer = 2
byte_head = 4
n_layer = 3
n_head = 4
n_kv_head = 2
n_embd = 160
ffn_hidden = 432

epochs = 8                      # of 185,000 sentences
batch_size = 24
min_lr = 1e-4
warmup_iters = 100
