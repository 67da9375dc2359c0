"""Teach the model of config/moduleformer.py a second language, with one part of the old stories to
four parts of the new text (the paper's Table 4). Each layer gets new modules as in
config/moduleformer_lifelong.py; the routers, the embedding and the head train too. First:

    python prepare.py mix --name lingo_stories --input data/toy_lingo data/toy_stories \\
        --passes 4 0.2428
    python -m tools.surgery insert_experts out/moduleformer --router full --out out/inserted_full
"""
init_from = 'out/inserted_full'
data = 'lingo_stories'          # four passes over the new text, a quarter of one over the old
eval_data = 'toy_stories,toy_lingo'

batch_size = 8
schedule = 'constant'
warmup_iters = 20
weight_decay = 0.01
eval_interval = 200
save_interval = 200
