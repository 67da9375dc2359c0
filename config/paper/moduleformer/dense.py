"""The dense baseline of small.py: a LLaMA with rotary positions and as many active
parameters, 22.2M.

    python prepare.py babylm && python train.py config/paper/moduleformer/dense.py
"""
model = 'papaformer'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 8
n_head = 6
n_embd = 384
ffn_hidden = 1216
n_parallel = 0

stride = 128                    # from here on the same as small.py
epoch_words = 10e6
epochs = 4
batch_size = 32
min_lr = 1e-4
warmup_iters = 400
weight_decay = 0.01
eval_interval = 1000
save_interval = 1000
