"""Stage 3: both paths side by side in one model, the other four epochs, on all of the text."""
model = 'papaformer'
data = 'babylm'

init_from = ['out/arena/papaformer_composed/1_path_1',
             'out/arena/papaformer_composed/2_path_2']
surgery = 'compose'
surgery_args = dict(connection='share', dropout=0.1)

stride = 128                    # a part of the budget of all entries
epoch_words = 10e6
epochs = 4
batch_size = 64
learning_rate = 2e-3            # not swept itself: the best for llama_flops
min_lr = 0.0
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
