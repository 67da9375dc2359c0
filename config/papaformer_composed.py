"""Compose the two trained paths of the recipe in docs/papaformer.md, and train the result on the
other 40% of both corpora."""
model = 'papaformer'
init_from = ['out/papaformer_path_1', 'out/papaformer_path_2']
surgery = 'compose'
# for gumbel1 or gumbel2 add --aux_weights="dict(entropy=0.01, load=0.01)"
surgery_args = dict(connection='share')
data = {'toy_stories': (0.6, 1.0), 'toy_math': (0.6, 1.0)}

epochs = 2
batch_size = 8
learning_rate = 3e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
