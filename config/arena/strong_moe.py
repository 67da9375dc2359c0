"""strong.py, smaller, with 2 of 8 experts for its FFNs: 27.8M parameters, 12.1M active."""
model = 'strong'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 10
n_head = 4
n_embd = 256
n_expert = 8
top_k = 2
dropout = 0.1
aux_weights = dict(balance=0.01)

stride = 128                    # the budget of all entries
epoch_words = 10e6
epochs = 10
batch_size = 64
learning_rate = 2e-3            # not swept
min_lr = 0.0
schedule = 'linear'
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
