"""Stage 1 of Self-MoE's gates: a LLaMA without them, half of the epochs."""
model = 'selfmoe'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 8
n_head = 6
n_kv_head = 3
n_embd = 384
ffn_hidden = 1120
gate = 'none'
dropout = 0.1

stride = 128                    # a part of the budget of all entries
epoch_words = 10e6
epochs = 5
batch_size = 64
learning_rate = 2e-3            # not swept itself: the best for llama_flops
min_lr = 0.0
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
