"""A ModuleFormer small enough for one GPU: ten minutes on a shared H200. Its sizes are ours; the
paper's smallest model has 4B parameters.

    python prepare.py babylm && python train.py config/paper/moduleformer/small.py
"""
model = 'moduleformer'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 8
n_embd = 384
n_att = 8
d_att = 256
n_head = 4
n_ffd = 16
d_ffd = 768
top_k = 2
aux_weights = dict(mi=0.01)

stride = 128                    # as in config/paper/moep.py
epoch_words = 10e6
epochs = 4                      # 60M tokens
batch_size = 32
min_lr = 1e-4
warmup_iters = 400
weight_decay = 0.01             # as in the paper
eval_interval = 1000
save_interval = 1000
