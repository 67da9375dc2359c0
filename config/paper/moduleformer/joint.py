"""Table 4 at our size: math as the new domain, with one part of the old text to four parts of math.
Each layer gets two new modules; the routers, the embedding and the head train too.

After small.py:

    python prepare.py openmath --name openmath_babylm --tokenizer data/babylm --input MATH.jsonl
    python train.py config/paper/moduleformer/joint.py

The other rows, each with an --out_dir of its own:

    ModuleFormer, fully tuned     --surgery=None --surgery_args={}
    dense                         --model=papaformer --init_from=out/paper/moduleformer/dense
        and, fully tuned          --surgery=None --surgery_args={}
        or, LoRA                  --surgery=tools.lora.add_lora --surgery_args=
                                  "dict(rank=32, alpha=64, dropout=0.0, also='wte|head')"
"""
model = 'moduleformer'
init_from = 'out/paper/moduleformer/small'
surgery = 'insert_experts'
surgery_args = dict(n_att=1, n_ffd=1, router='full')
# four times as many tokens of math (3.26M) as of babylm (0.0566 of 14.42M)
data = {'openmath_babylm': (0.0, 1.0), 'babylm': (0.0, 1.0, 0.0566)}
eval_data = ['babylm', 'openmath_babylm']

epochs = 2
batch_size = 32
learning_rate = 5e-4            # the same for every method
schedule = 'constant'           # as in the paper
warmup_iters = 20
weight_decay = 0.01
eval_interval = 200
save_interval = 200
