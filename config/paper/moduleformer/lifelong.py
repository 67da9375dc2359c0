"""Table 5 at our size: math as the new domain, without any of the old text. Each layer gets two new
modules, with their rows in the routers; everything else is frozen. rout_reg keeps those rows small.

After small.py:

    python prepare.py openmath --name openmath_babylm --tokenizer data/babylm --input MATH.jsonl
    python -m tools.surgery insert_experts out/paper/moduleformer/small --router partial \\
        --out out/paper/moduleformer/inserted
    python train.py config/paper/moduleformer/lifelong.py

The other rows, each with an --out_dir of its own:

    other weights                 --aux_weights="dict(rout_reg=W)"      # the paper: 0, 0.25, 0.5, 1
    ModuleFormer, fully tuned     --aux_weights={} --init_from=out/paper/moduleformer/small
    dense, fully tuned            --aux_weights={} --init_from=out/paper/moduleformer/dense
    dense, LoRA                   --aux_weights={} --init_from=the --out of: python -m tools.surgery
                                  add_lora out/paper/moduleformer/dense --dropout 0.0
                                  --rank 8 --alpha 16                   # and 32, 64
"""
init_from = 'out/paper/moduleformer/inserted'
data = 'openmath_babylm'
eval_data = 'babylm,openmath_babylm'
aux_weights = dict(rout_reg=0.25)

epochs = 2
batch_size = 32
learning_rate = 5e-4            # the same for every method
schedule = 'constant'           # as in the paper
warmup_iters = 20
weight_decay = 0.01
eval_interval = 200
save_interval = 200
