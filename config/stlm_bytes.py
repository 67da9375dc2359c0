"""The byte-level Super Tiny model on the toy stories, in chunks of at most 8 bytes.
--decoder=parallel spells all bytes of a chunk at once, as the authors' release does."""
model = 'stlm'
data = 'toy_bytes'

vocab_size = 259
block_size = 576                # 64 chunks of 9 slots
byte_limit = 8
byte_embd = 48
byte_layer = 2
byte_head = 2
n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 96
ffn_hidden = 256
dropout = 0.0

epochs = 2
batch_size = 8
learning_rate = 3e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
