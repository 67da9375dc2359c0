"""Teach the model of config/moduleformer.py a second language, with one part of the old stories to
four parts of the new text (the paper's Table 4). Each layer gets new modules as in
config/moduleformer_lifelong.py; the routers, the embedding and the head train too."""
model = 'moduleformer'
init_from = 'out/moduleformer'
surgery = 'insert_experts'
surgery_args = dict(n_att=1, n_ffd=1, router='full')
data = {'toy_lingo': (0.0, 1.0), 'toy_stories': (0.0, 1.0, 0.0607)}     # 4 : 1 in tokens
eval_data = ['toy_stories', 'toy_lingo']

epochs = 4
batch_size = 8
learning_rate = 1e-3
schedule = 'constant'
warmup_iters = 20
weight_decay = 0.01
eval_interval = 200
save_interval = 200
