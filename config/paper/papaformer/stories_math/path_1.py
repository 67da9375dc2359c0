"""Path_1 of Table 7, second phase: 60% of TinyStories.

    python prepare.py tinystories --name tinystories_neox --tokenizer 20B_tokenizer.json
    python prepare.py mix --name tinystories_60 --input data/tinystories_neox:0:0.6
    python train.py config/paper/papaformer/stories_math/path_1.py

Path_2, 60% of the math problems (the paper: 60% of 20% of OpenMathInstruct-1):

    python prepare.py openmath --name openmath_neox --tokenizer 20B_tokenizer.json
    python prepare.py mix --name openmath_60 --input data/openmath_neox:0:0.6
    python train.py config/paper/papaformer/stories_math/path_1.py --data=openmath_60 \\
        --out_dir=out/paper/papaformer/stories_math/path_2
"""
model = 'papaformer'
data = 'tinystories_60'

block_size = 256
n_layer = 3
n_head = 4
n_embd = 128
n_parallel = 0

epochs = 6                      # over 3M tokens per set; the paper: 2, over far more
batch_size = 32                 # the paper accumulates 8 of them per step
learning_rate = 5e-4
eps = 1e-5
eval_interval = 1000
save_interval = 1000
