"""Stage 2: matrix gates around its blocks, the other half of the epochs."""
model = 'selfmoe'
data = 'babylm'

init_from = 'out/arena/selfmoe_gates/1_base'
surgery = 'add_gates'
surgery_args = dict(kind='matrix')

stride = 128                    # a part of the budget of all entries
epoch_words = 10e6
epochs = 5
batch_size = 64
learning_rate = 2e-3            # not swept itself: the best for llama_flops
min_lr = 0.0
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
