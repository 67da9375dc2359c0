"""Stage 1 of short windows first: strong_muon.py on windows of 64 tokens, half of the epochs."""
model = 'strong'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 12
n_head = 6
n_embd = 384
dropout = 0.1

seq_len = 64
stride = 16                     # a part of the budget of all entries
epoch_words = 10e6
epochs = 5
batch_size = 512
optimizer = 'muon'
learning_rate = 5e-3            # of the embeddings; not swept itself: the best for strong_muon
muon_rate = 4.0                 # the matrices': 0.02
schedule = 'constant'           # stage 2 lowers it
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
