"""Tables 1, 3 and 5 at our size: gates around the layers of the base model, fine-tuned on worked
math problems. The comments give the paper's own settings.

After base.py:

    python prepare.py openmath
    python -m tools.surgery add_gates out/paper/selfmoe/base --out out/paper/selfmoe/gated
    python train.py config/paper/selfmoe/math.py

The other rows, each with an --out and an --out_dir of its own:

    python -m tools.surgery add_gates out/paper/selfmoe/base --kind none       # or vector, scalar
    python -m tools.surgery upcycle out/paper/selfmoe/base --n 2 --k 2
"""
init_from = 'out/paper/selfmoe/gated'
data = 'openmath'               # Orca-Math, 200K problems

seq_len = 512                   # 1,024
epochs = 4                      # about 2
batch_size = 16                 # 1, accumulated 64 times
learning_rate = 5e-4            # 2.5e-6
min_lr = 5e-5                   # not given
warmup_iters = 100              # 12,800 of 128,000 iterations
