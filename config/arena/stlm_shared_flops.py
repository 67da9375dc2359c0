"""STLM of GPT-2's FLOPs per token: two layers in a row share one FFN; 20.5M parameters."""
model = 'stlm'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 12
n_head = 6
n_kv_head = 6
n_embd = 384
ffn_hidden = 1024
share = 'ffn'
share_group = 2
dropout = 0.1

stride = 128                    # the budget of all entries
epoch_words = 10e6
epochs = 10
batch_size = 64
learning_rate = 2e-3            # the best of 1e-3, 2e-3, 4e-3
min_lr = 0.0
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
