"""Stage 2: windows of 512 tokens, the other half of the epochs."""
model = 'strong'
data = 'babylm'

init_from = 'out/arena/strong_muon_short/1_short'

stride = 128                    # a part of the budget of all entries
epoch_words = 10e6
epochs = 5
batch_size = 64
optimizer = 'muon'
learning_rate = 5e-3            # of the embeddings; not swept itself: the best for strong_muon
muon_rate = 4.0                 # the matrices': 0.02
min_lr = 0.0
schedule = 'linear'
warmup_iters = 20
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
