"""Stage 2: matrix gates around its blocks, the other half of the tokens."""
model = 'selfmoe'
data = 'toy_stories'

init_from = 'out/arena/toy/selfmoe_gates/1_base'
surgery = 'add_gates'
surgery_args = dict(kind='matrix')

max_iters = 488                 # 0.25M tokens, a part of the budget of all entries
batch_size = 8
learning_rate = 8e-3            # the best of 2e-3, 4e-3, 8e-3, 1.6e-2
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
