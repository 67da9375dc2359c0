"""The base model for the comparison on real text in docs/selfmoe.md: 31.6M parameters, TinyStories.
All its settings are ours: the paper starts from trained models of 1.3B to 8B parameters
(Mistral-7B, Llama-3-8B, Phi-3-mini, deepseek-coder).

    python prepare.py tinystories && python train.py config/paper/selfmoe/base.py
"""
model = 'selfmoe'
data = 'tinystories'

block_size = 512
n_layer = 8
n_head = 8
n_kv_head = 4                   # grouped queries, as in Mistral and Llama 3
n_embd = 256
gate = 'none'

epochs = 4
min_lr = 1e-4
warmup_iters = 100
