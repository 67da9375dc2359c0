"""Prune the model of config/moduleformer_math.py, then train it a little more. A module goes if
math uses it less than a twentieth as often as the busiest module of its pool. --max_iters=0 prunes
without training.

To choose another threshold:

    python -m papers.prune_curve out/moduleformer_math
"""
model = 'moduleformer'
init_from = 'out/moduleformer_math'
surgery = 'prune_experts'
surgery_args = dict(threshold=0.05, normalise='max')
data = 'toy_math'

epochs = 1
batch_size = 8
learning_rate = 1e-3
schedule = 'constant'
warmup_iters = 20
weight_decay = 0.01
eval_interval = 200
save_interval = 200
