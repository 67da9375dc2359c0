"""Fig. 2 at our size: fine-tune on math with the load concentration loss, then prune.

After small.py:

    python prepare.py openmath --name openmath_babylm --tokenizer data/babylm --input MATH.jsonl
    python train.py config/paper/moduleformer/math.py
    python -m papers.prune_curve out/paper/moduleformer/math

Without the loss: --aux_weights={}. The paper's weight is 0.001.
"""
init_from = 'out/paper/moduleformer/small'
data = 'openmath_babylm'
aux_weights = dict(concentration=0.01)

epochs = 2
batch_size = 32
learning_rate = 5e-4            # the same for every method
schedule = 'constant'           # as in the paper
warmup_iters = 20
weight_decay = 0.01
eval_interval = 200
save_interval = 200
