"""Path 1 of the recipe in docs/papaformer.md: a narrow LLaMA on 60% of the toy stories. First:

    python prepare.py toy
    python prepare.py mix --name stories_60 --input data/toy_stories:0:0.6

Path 2 reads 60% of the toy math:

    python prepare.py mix --name math_60 --input data/toy_math:0:0.6
    python train.py config/papaformer_path_1.py --data=math_60 --out_dir=out/papaformer_path_2
"""
model = 'papaformer'
data = 'stories_60'

block_size = 64
n_layer = 3
n_head = 2
n_embd = 48
n_parallel = 0

epochs = 2
batch_size = 8
learning_rate = 3e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
