"""Fine-tune the base model of config/selfmoe.py with matrix gates on toy math. First:

    python -m tools.surgery add_gates out/selfmoe --kind matrix --out out/gated

Instead, each with an --out and an --out_dir of its own:

    python -m tools.surgery add_gates out/selfmoe --kind vector     # or scalar, none
    python -m tools.surgery upcycle out/selfmoe --n 2 --k 2         # a mixture of experts
"""
init_from = 'out/gated'
data = 'toy_math'

epochs = 4
batch_size = 4
min_lr = 1e-4
warmup_iters = 50
eval_interval = 250
