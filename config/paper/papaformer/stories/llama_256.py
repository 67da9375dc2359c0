"""LLaMA_256 of Table 7, first phase: TinyStories only.

    python prepare.py tinystories && python train.py config/paper/papaformer/stories/llama_256.py

LLaMA_192:

    python train.py config/paper/papaformer/stories/llama_256.py --n_head=6 --n_embd=192 \\
        --out_dir=out/paper/papaformer/stories/llama_192

Second phase, TinyStories and math (the paper: 20% of OpenMathInstruct-1):

    python prepare.py tinystories --name tinystories_neox --tokenizer 20B_tokenizer.json
    python prepare.py openmath --name openmath_neox --tokenizer 20B_tokenizer.json
    python train.py config/paper/papaformer/stories/llama_256.py \\
        --data=tinystories_neox,openmath_neox --out_dir=out/paper/papaformer/stories_math/llama_256
"""
model = 'papaformer'
data = 'tinystories'            # GPT-2's tokenizer

block_size = 256
n_layer = 8
n_head = 8
n_embd = 256
n_parallel = 0

epochs = 6                      # over 3M tokens per set; the paper: 2, over far more
batch_size = 32                 # the paper accumulates 8 of them per step
learning_rate = 5e-4
eps = 1e-5
# The paper's cosine, weight decay and betas are train.py's defaults. It gives no min_lr, no
# warm-up and no grad_clip.
eval_interval = 1000
save_interval = 1000
