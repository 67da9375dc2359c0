"""STLM, 28M parameters: two layers in a row share one FFN, so it is wider than the others."""
model = 'stlm'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 10
n_head = 8
n_kv_head = 4
n_embd = 512
ffn_hidden = 1536
share = 'ffn'
share_group = 2
dropout = 0.1

stride = 128                    # the budget of all entries
epoch_words = 10e6
epochs = 10
batch_size = 64
learning_rate = 2e-3            # not swept itself: the best for stlm_shared_flops
min_lr = 0.0
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
