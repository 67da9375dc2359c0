"""Teach the model of config/moduleformer.py a second language, without any of the old stories (the
paper's Table 5). Each layer gets one new attention module and one new FFN module, with their rows
in the routers; everything else is frozen. First:

    python -m tools.surgery insert_experts out/moduleformer --router partial --out out/inserted

rout_reg keeps those rows small: a larger weight forgets less of the stories, and learns less of the
new language."""
init_from = 'out/inserted'
data = 'toy_lingo'
eval_data = 'toy_stories,toy_lingo'
aux_weights = dict(rout_reg=0.25)

epochs = 4
batch_size = 8
schedule = 'constant'
warmup_iters = 20
weight_decay = 0.01
eval_interval = 200
save_interval = 200
