"""Prune the model of config/moduleformer_math.py, then train it a little more. A module goes if
math uses it less than a twentieth as often as the busiest module of its pool. First:

    python -m tools.surgery prune_experts out/moduleformer_math --threshold 0.05 --out out/pruned

To choose another threshold:

    python -m papers.prune_curve out/moduleformer_math
"""
init_from = 'out/pruned'
data = 'toy_math'

batch_size = 8
schedule = 'constant'
warmup_iters = 20
weight_decay = 0.01
eval_interval = 200
save_interval = 200
