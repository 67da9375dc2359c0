"""Section 5.2: the byte-level model. Each byte also sees the earlier bytes of its chunk.

    python prepare.py simplewiki --name simplewiki_chunks --chunks
    python train.py config/paper/stlm/bytes_causal.py

--decoder=parallel decodes all bytes of a chunk at once: the release's way, with other depths.
"""
model = 'stlm'
data = 'simplewiki_chunks'

vocab_size = 259
block_size = 6656               # 512 chunks of 13 slots
byte_limit = 12                 # ours
byte_embd = 128                 # "64 for example"
byte_head = 4                   # ours; all other sizes are the defaults, those of baseline.py

epochs = 2                      # 18M chunks; the paper: 25,000 steps of 480 rows
batch_size = 24                 # the paper accumulates 20 of them per step
learning_rate = 6e-4
min_lr = 6e-5                   # not given in the paper
warmup_iters = 100              # the paper: 5,000
