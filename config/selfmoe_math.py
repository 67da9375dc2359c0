"""Add matrix gates to the base model of config/selfmoe.py and fine-tune it on toy math.

Instead of matrix gates, each with an --out_dir of its own:

    --surgery_args="dict(kind='vector')"                       # or scalar, none
    --surgery=upcycle --surgery_args="dict(n=2, k=2)"          # a mixture of experts
"""
model = 'selfmoe'
init_from = 'out/selfmoe'
surgery = 'add_gates'
surgery_args = dict(kind='matrix')
data = 'toy_math'

epochs = 4
batch_size = 4
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 50
eval_interval = 250
