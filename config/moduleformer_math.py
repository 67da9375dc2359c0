"""Fine-tune the model of config/moduleformer.py on toy math with the load concentration loss, so
that it needs fewer of its modules (the paper's section 5.3). docs/moduleformer.md prunes it. A
module goes if math uses it less than a twentieth as often as the busiest module of its pool."""
init_from = 'out/moduleformer'
data = 'toy_math'
aux_weights = dict(concentration=0.01)      # the paper's 0.001 does little in so few steps

epochs = 3
batch_size = 8
schedule = 'constant'
warmup_iters = 20
weight_decay = 0.01
eval_interval = 200
save_interval = 200
