"""Train the two paths of the recipe in docs/papaformer.md together, on the other 40% of both
corpora. First, after path 1:

    python train.py config/papaformer_path_1.py --data=math_60 --out_dir=out/papaformer_path_2
    python prepare.py mix --name both_40 --input data/toy_stories:0.6:1 data/toy_math:0.6:1
    python -m tools.surgery compose out/papaformer_path_1 out/papaformer_path_2 --out out/composed

With --connection gumbel1 or gumbel2, add --aux_weights="dict(entropy=0.01, load=0.01)" here.
"""
init_from = 'out/composed'
data = 'both_40'
eval_data = 'toy_stories,toy_math'

epochs = 2
batch_size = 8
learning_rate = 3e-3
min_lr = 2e-4
warmup_iters = 50
eval_interval = 250
