"""Tables 1, 3 and 5 at our size: gates around the layers of the base model, fine-tuned on worked
math problems. The comments give the paper's own settings.

After base.py:

    python prepare.py openmath && python train.py config/paper/selfmoe/math.py

The other rows, each with an --out_dir of its own:

    --surgery_args="dict(kind='none')"                         # or vector, scalar
    --surgery=upcycle --surgery_args="dict(n=2, k=2)"
"""
model = 'selfmoe'
init_from = 'out/paper/selfmoe/base'
surgery = 'add_gates'
surgery_args = dict(kind='matrix')
data = 'openmath'               # Orca-Math, 200K problems

seq_len = 512                   # 1,024
epochs = 4                      # about 2
batch_size = 16                 # 1, accumulated 64 times
learning_rate = 5e-4            # 2.5e-6
min_lr = 5e-5                   # not given
warmup_iters = 100              # 12,800 of 128,000 iterations
