"""MoEP of the paper's Appendices A and B: 28M parameters, BabyLM strict-small, 10 x 10M words.

    python prepare.py babylm && python train.py config/paper/moep.py

MoEP-SwiGLU, 38M parameters; the width of its experts is not given in the paper, this one gives its
parameter count:

    python train.py config/paper/moep.py --swiglu --expert_hidden=512 \\
        --out_dir=out/paper/moep_swiglu
"""
model = 'moep'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 2
n_head = 6
n_embd = 384
n_parallel = 10
n_head_parallel = 3
n_embd_parallel = 192
n_block = 4
n_expert = 4
top_k = 2
dropout = 0.1
balance = 'switch'              # as in a copy of the author's code; the paper's sign is opposite
aux_weights = dict(block_balance=0.01, expert_balance=0.01)   # the paper gives no weights

stride = 128                    # a window of 512 tokens every 128, drawn without replacement
epoch_words = 10e6              # "each epoch stopped after approximately 10M words"
epochs = 10
batch_size = 16
learning_rate = 3e-4
warmup_iters = 800
# The paper's cosine, weight decay, betas and eps are train.py's defaults. It gives no min_lr and
# no grad_clip.
eval_interval = 2000
save_interval = 2000
checkpoint_words = [1e6, 2e6, 3e6, 4e6, 5e6, 6e6, 7e6, 8e6, 9e6, 10e6,
                    20e6, 30e6, 40e6, 50e6, 60e6, 70e6, 80e6, 90e6, 100e6]
