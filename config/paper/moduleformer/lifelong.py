"""Table 5 at our size: math as the new domain and nothing of the old text; two new modules in every layer, everything else frozen. The
weight of rout_reg holds the new modules back (the paper: 0, 0.25, 0.5, 1).

after small.py: python prepare.py openmath --name openmath_babylm --tokenizer data/babylm --input MATH.jsonl && python train.py config/paper/moduleformer/lifelong.py
Other rows, each with its own --out_dir: --aux_weights="dict(rout_reg=W)"; fully tuned --aux_weights={} --surgery=None --surgery_args={}; dense
--model=papaformer --aux_weights={} --init_from=out/paper/moduleformer/dense, fully tuned likewise or with --surgery=lora.add_lora
--surgery_args="dict(rank=8, alpha=16, dropout=0.0)" (and rank=32, alpha=64).
"""
model = 'moduleformer'
init_from = 'out/paper/moduleformer/small'
surgery = 'insert_experts'
surgery_args = dict(n_att=1, n_ffd=1, router='partial')
data = 'openmath_babylm'
eval_data = ['babylm', 'openmath_babylm']
aux_weights = dict(rout_reg=0.25)

epochs = 2
batch_size = 32
learning_rate = 5e-4            # for every method
min_lr = 5e-5
warmup_iters = 20
weight_decay = 0.01
seed = 42
eval_interval = 200
save_interval = 200
