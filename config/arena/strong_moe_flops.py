"""strong.py with 4 of 16 experts for its FFNs: the dense entry's FLOPs, 70M parameters."""
model = 'strong'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 12
n_head = 6
n_embd = 384
n_expert = 16
top_k = 4
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
