"""Stage 1 of PaPaformer composed: a narrow LLaMA, three of the ten epochs, on the first half of
the text."""
model = 'papaformer'
data = {'babylm': (0.0, 0.5)}

vocab_size = 16384
block_size = 512
n_layer = 12
n_head = 3
n_embd = 192
n_parallel = 0
dropout = 0.1

stride = 128                    # a part of the budget of all entries
epoch_words = 10e6
epochs = 3
batch_size = 64
learning_rate = 2e-3            # not swept itself: the best for llama_flops
min_lr = 0.0
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
