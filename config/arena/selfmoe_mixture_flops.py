"""Self-MoE's comparison, a mixture of experts, from scratch, at GPT-2's FLOPs per token."""
model = 'selfmoe'
data = 'babylm'

vocab_size = 16384
block_size = 512
n_layer = 13
n_head = 6
n_kv_head = 3
n_embd = 384
ffn_hidden = 512
gate = 'none'
n_expert = 4
top_k = 2
dropout = 0.1
aux_weights = dict(balance=0.01)

stride = 128                    # the budget of all entries
epoch_words = 10e6
epochs = 10
batch_size = 64
learning_rate = 4e-3            # the best for selfmoe_mixture; only 1e-3 and 2e-3 were swept here
min_lr = 0.0
warmup_iters = 100
weight_decay = 0.1
eval_interval = 1000
save_interval = 500
