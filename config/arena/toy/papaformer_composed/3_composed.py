"""Stage 3: both paths side by side in one model, the other 40% of the tokens, on all of the
text."""
model = 'papaformer'
data = 'toy_stories'

init_from = ['out/arena/toy/papaformer_composed/1_path_1',
             'out/arena/toy/papaformer_composed/2_path_2']
surgery = 'compose'
surgery_args = dict(connection='share')

max_iters = 390                 # 0.2M tokens, a part of the budget of all entries
batch_size = 8
learning_rate = 8e-3            # the best of 2e-3, 4e-3, 8e-3, 1.6e-2
min_lr = 2e-4
warmup_iters = 50
eval_interval = 1000
save_interval = 500
