"""A second language for the model of config/moduleformer.py, with nothing of the first one to read: one new attention module
and one new FFN module in every layer; all that was there is frozen (the paper's Table 5). The weight of rout_reg holds the
new modules' embeddings back: more of it forgets less of the stories and learns less of the new language."""
model = 'moduleformer'
init_from = 'out/moduleformer'
surgery = 'insert_experts'
surgery_args = dict(n_att=1, n_ffd=1, router='partial')
data = 'toy_lingo'
eval_data = ['toy_stories', 'toy_lingo']
aux_weights = dict(rout_reg=0.25)

epochs = 4
batch_size = 8
learning_rate = 1e-3
schedule = 'constant'
warmup_iters = 20
weight_decay = 0.01
eval_interval = 200
save_interval = 200
