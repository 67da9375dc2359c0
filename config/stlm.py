"""The Super Tiny baseline on the toy stories: a modern Transformer on tokens.

    --share=ffn                                    # or all: share weights between layers
    --share=ffn --share_group=2                    # between two layers each
    --share=ffn --lora_rank=8                      # with a low-rank adapter for each layer
    --dropout=0.1 --dropout_schedule=early         # or late, linear, rising, triangle, triangles
"""
model = 'stlm'
data = 'toy_stories'

block_size = 64
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
