"""Table 4 at our size: math as the new domain, four parts of it to one of the old text; two new modules in every layer, and routers,
embedding and head train too.

after small.py: python prepare.py openmath --name openmath_babylm --tokenizer data/babylm --input MATH.jsonl && python train.py config/paper/moduleformer/joint.py
Other rows, each with its own --out_dir: fully tuned --surgery=None --surgery_args={}; dense --model=papaformer --init_from=out/paper/moduleformer/dense, fully
tuned or with --surgery=lora.add_lora --surgery_args="dict(rank=32, alpha=64, dropout=0.0, also='wte|head')".
"""
model = 'moduleformer'
init_from = 'out/paper/moduleformer/small'
surgery = 'insert_experts'
surgery_args = dict(n_att=1, n_ffd=1, router='full')
data = {'openmath_babylm': (0.0, 1.0), 'babylm': (0.0, 1.0, 0.0566)}    # in tokens 4 : 1, for 3.26M of math and 14.42M of babylm
eval_data = ['babylm', 'openmath_babylm']

epochs = 2
batch_size = 32
learning_rate = 5e-4            # for every method
min_lr = 5e-5
warmup_iters = 20
weight_decay = 0.01
seed = 42
eval_interval = 200
save_interval = 200
