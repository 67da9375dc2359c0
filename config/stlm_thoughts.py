"""Next thoughts (section 5.4) on toy math: a chunk is a sentence of up to 12 tokens. The small
encoder reads it, the core predicts the next one, the small decoder spells it.

    python -m papers.exact_answer out/stlm_thoughts --max_new_tokens=65     # five sentences

On tokens, with as many parameters and windows of as much text:

    python train.py config/stlm_pause.py --data=toy_math --block_size=128 --out_dir=out/stlm_math
"""
model = 'stlm'
data = 'toy_thoughts'

block_size = 286                # 22 sentences of 13 slots
byte_limit = 12                 # tokens in a sentence
byte_embd = 48
byte_layer = 2
byte_head = 2
n_layer = 3
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
