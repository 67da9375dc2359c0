"""MoLM-4B-K2 of the paper's Tables 1 and 6: 4.14B parameters, 366M of them active. The paper
trained it on the Pile (360B tokens, the Codegen tokenizer) with 48 A100s. This command counts its
parameters without allocating them:

    python train.py config/paper/moduleformer/molm_4b_k2.py --max_iters=0

MoLM-4B-K4 is --top_k=4 (668M active), MoLM-8B-K2 is --n_layer=48 (8.18B, 681M active). How to train
them, on one GPU or on many, is in docs/scale.md."""
model = 'moduleformer'
data = 'pile'

vocab_size = 50304              # 50,295, padded: multiples of 64 are multiplied faster
block_size = 512
n_layer = 24
n_embd = 1024
n_att = 16
d_att = 1024
n_head = 1
n_ffd = 32
d_ffd = 2048
top_k = 2
d_router = 256                  # not given in the paper; gives its count of trainable parameters
identity_kv = True              # "in the case of D_att equal to D_emb"
aux_weights = dict(mi=0.01)     # not given in the paper

stream = True                   # with the previous segment's keys and values: a context of 1,024
memory = 512
batch_size = 64                 # 64 x 96 x 512 tokens = 3.1M
gradient_accumulation_steps = 96
max_iters = 114_441             # 360B tokens
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 954              # 3B tokens
warmup_lr = 3e-5
weight_decay = 0.01
