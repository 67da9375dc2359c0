"""Parallel_Share_Linear of Table 7, second phase: Path_1 and Path_2 composed, then trained on the
other 40% of both data sets.

After both paths of path_1.py:

    python prepare.py mix --name neox_40 \\
        --input data/tinystories_neox:0.6:1 data/openmath_neox:0.6:1
    P=out/paper/papaformer/stories_math
    python -m tools.surgery compose $P/path_1 $P/path_2 --out $P/composed
    python train.py config/paper/papaformer/stories_math/share.py

Parallel_Gumb_MoE_1, and with gumbel2 Parallel_Gumb_MoE_2:

    python -m tools.surgery compose $P/path_1 $P/path_2 --connection gumbel1 --out $P/composed_1
    python train.py config/paper/papaformer/stories_math/share.py --init_from=$P/composed_1 \\
        --aux_weights="dict(entropy=0.01, load=0.01)" --out_dir=$P/gumbel1
"""
init_from = 'out/paper/papaformer/stories_math/composed'
data = 'neox_40'                # what the paths have not read
eval_data = 'tinystories_neox,openmath_neox'

epochs = 6                      # over 3M tokens per set; the paper: 2, over far more
batch_size = 32                 # the paper accumulates 8 of them per step
learning_rate = 5e-4
eps = 1e-5
eval_interval = 1000
save_interval = 1000
