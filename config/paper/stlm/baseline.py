"""The baseline of Table 1: 55.9M parameters (the paper says 50M), Simple English Wikipedia.

    python prepare.py simplewiki && python train.py config/paper/stlm/baseline.py

Section 5.1, weight sharing, each with an --out_dir of its own:

    --share=ffn                     # one FFN for all layers, as in MobiLlama
    --share=ffn --share_group=5     # one for each half of the layers
    --share=ffn --lora_rank=16      # one for all, a low-rank adapter for each; the rank is ours
    --share=all                     # one block for all layers, as in ALBERT

Section 3's family, with the paper's steps. The sizes are ours: the paper gives none.

    --epochs=1 --max_iters=25000 --gradient_accumulation_steps=20 --warmup_iters=5000
        10M     --n_layer=6 --n_head=4 --n_kv_head=2 --n_embd=160 --ffn_hidden=432
        100M    --n_layer=14 --n_head=20 --n_kv_head=5 --n_embd=640 --ffn_hidden=1920
"""
model = 'stlm'
data = 'simplewiki'

block_size = 512
n_layer = 10
n_head = 16
n_kv_head = 4                   # not given in the paper; gives 55.9M parameters (the paper: 50M)
n_embd = 512
ffn_hidden = 1536
dropout = 0.1

epochs = 2                      # 18M tokens; the paper: 25,000 steps of 480 rows
batch_size = 24                 # the paper accumulates 20 of them per step
learning_rate = 6e-4
min_lr = 6e-5                   # not given in the paper
warmup_iters = 100              # the paper: 5,000
