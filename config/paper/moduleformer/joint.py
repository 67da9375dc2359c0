"""Table 4 at our size: math as the new domain, with one part of the old text to four parts of math.
Each layer gets two new modules; the routers, the embedding and the head train too.

After small.py:

    python prepare.py openmath --name openmath_babylm --tokenizer data/babylm --input MATH.jsonl
    python prepare.py mix --name openmath_and_babylm --input data/openmath_babylm data/babylm \\
        --passes 2 0.1132
    python -m tools.surgery insert_experts out/paper/moduleformer/small --router full \\
        --out out/paper/moduleformer/inserted_full
    python train.py config/paper/moduleformer/joint.py

The mix has two copies of the math, and for four tokens of it (3.26M a copy) one of babylm (14.42M).
The other rows, each with an --out_dir of its own:

    ModuleFormer, fully tuned     --init_from=out/paper/moduleformer/small
    dense, fully tuned            --init_from=out/paper/moduleformer/dense
    dense, LoRA                   --init_from=the --out of: python -m tools.surgery add_lora
                                  out/paper/moduleformer/dense --rank 32 --alpha 64 --dropout 0.0
                                  --also "wte|head"
"""
init_from = 'out/paper/moduleformer/inserted_full'
data = 'openmath_and_babylm'
eval_data = 'babylm,openmath_babylm'

batch_size = 32
learning_rate = 5e-4            # the same for every method
schedule = 'constant'           # as in the paper
warmup_iters = 20
weight_decay = 0.01
eval_interval = 200
save_interval = 200
