"""A dense entry to beat: 27.5M parameters, made as small models are today. In both classes."""
model = 'strong'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 12
n_head = 6
n_embd = 384
dropout = 0.1

stride = 128                    # the budget of all entries
epoch_words = 10e6
epochs = 10
batch_size = 64
learning_rate = 2e-3            # in a sweep made afterwards 4e-3 was better, 1e-3 worse
min_lr = 0.0
schedule = 'linear'
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
