"""
Every entry of the arena: the recipe of its track, and what the entry changes in it.

To enter arena/mine.py, add one line to TOY:

    mine=moep | dict(model='arena.mine'),

Then find its learning rate, and race:

    python -m arena mine --sweep learning_rate=2e-3,4e-3,8e-3
    python -m arena mine moep

An entry is a dict of settings, as train.py takes them. A list of dicts is an entry of several
stages. `init_from=0` starts from stage 0; `part=(0, 0.5)` reads the first half of the text;
dict(surgery='compose', runs=[0, 1], ...) is a surgery on stages 0 and 1 (tools/surgery.py).
NAME_flops is a variant for the class of equal FLOPs. docs/arena.md has the rules,
papers/results/arena_TRACK_sweeps.jsonl the sweeps of learning rates.
"""

MOEP_BALANCE = dict(block_balance=0.01, expert_balance=0.01)
MOEP_ZLOSS = MOEP_BALANCE | dict(block_z=1e-3, expert_z=1e-3)
MODULEFORMER = dict(model='arena.moduleformer_routers')
GUMBEL = dict(connection='gumbel1', aux_weights=dict(entropy=0.01, load=0.01))


# ---- toy: 0.66M parameters or 3.75M FLOPs per token, 0.5M tokens --------------------------------

recipe = dict(
    data='toy_stories', max_iters=976, batch_size=8, learning_rate=4e-3, min_lr=2e-4,
    warmup_iters=50, eval_interval=1000, save_interval=500)
base = recipe | dict(block_size=64, n_embd=96)
muon = dict(optimizer='muon', muon_rate=6.0)

dense = base | dict(model='arena.dense', n_layer=4, n_head=3, dropout=0.0, learning_rate=1.6e-2)
experts = dense | dict(n_expert=16, top_k=4, aux_weights=dict(balance=0.01), learning_rate=8e-3)
shared = experts | muon | dict(n_expert=8, top_k=2, n_shared=2)
loop = dense | muon | dict(model='arena.loop', n_head=4, n_embd=128, hidden=192, d_token=64,
                           learning_rate=8e-3)
# The papers' models train with AdamW here, config/moep.py with Muon: dense_muon shows its effect.
moep_unbalanced = base | dict(
    model='moep', n_layer=2, n_head=3, n_parallel=2, n_head_parallel=1, n_embd_parallel=48,
    n_block=4, n_expert=4, top_k=2, dropout=0.0)
moep = moep_unbalanced | dict(aux_weights=MOEP_BALANCE)
papaformer = base | dict(
    model='papaformer', n_layer=2, n_head=4, n_parallel=3, path_embd=[48, 48], path_head=[2, 2],
    connection='share')
path = base | dict(
    model='papaformer', n_layer=5, n_head=2, n_embd=40, n_parallel=0, max_iters=293,
    learning_rate=8e-3)
moduleformer_unbalanced = base | dict(
    model='moduleformer', n_layer=2, n_embd=80, n_att=4, d_att=40, n_head=2, n_ffd=8, d_ffd=80,
    top_k=2, d_router=32, query_block=32, learning_rate=8e-3)
moduleformer = moduleformer_unbalanced | dict(aux_weights=dict(mi=0.01))
selfmoe = base | dict(model='selfmoe', n_head=4, n_kv_head=2, n_embd=80, gate='none')
stlm = base | dict(n_layer=4, n_head=4, n_kv_head=2, ffn_hidden=256, dropout=0.0)

TOY = dict(
    gpt2=base | dict(model='moep', n_layer=4, n_head=3, n_parallel=0, dropout=0.0,
                     learning_rate=8e-3),
    llama=base | dict(model='papaformer', n_layer=4, n_head=4, n_parallel=0, learning_rate=8e-3),

    dense=dense,
    dense_muon=dense | muon,
    dense_moe=experts | dict(n_layer=3, n_head=2, n_embd=68, n_expert=8, top_k=2,
                             learning_rate=1.6e-2),
    dense_moe_flops=experts,
    dense_moe_muon_flops=experts | muon,
    dense_moe_shared_muon_flops=shared,
    dense_moe_shared_muon_flops_drop_expert=shared | dict(drop_expert=0.2),
    dense_muon_drop_expert=shared | dict(n_expert=2, aux_weights={}, drop_expert=0.2),
    loop=loop,
    loop_routed=loop | dict(n_expert=24, top_k=4, aux_weights=dict(balance=0.01),
                            learning_rate=4e-3),

    moep=moep,

    papaformer_share=papaformer,
    papaformer_gumbel=papaformer | GUMBEL,
    papaformer_composed=[
        path | dict(part=(0, 0.5)),
        path | dict(part=(0.5, 1)),
        dict(surgery='compose', runs=[0, 1], connection='share'),
        recipe | dict(model='papaformer', init_from=2, max_iters=390, learning_rate=8e-3)],

    moduleformer=moduleformer,

    selfmoe_mixture=selfmoe | dict(n_layer=2, ffn_hidden=128, n_expert=4, top_k=2,
                                   aux_weights=dict(balance=0.01)),
    selfmoe_gates=[
        selfmoe | dict(n_layer=4, max_iters=488, learning_rate=8e-3),
        dict(surgery='add_gates', runs=[0], kind='matrix'),
        recipe | dict(model='selfmoe', init_from=1, max_iters=488, learning_rate=8e-3)],

    stlm_shared=stlm | dict(model='stlm', share='ffn'),
    stlm_depth=stlm | dict(model='stlm_depth', capacity=0.125, route_every=2,
                           aux_weights=dict(forecast=0.01)),

    router_bias=moep_unbalanced | dict(model='arena.bias'),
    router_hash=moep_unbalanced | dict(model='arena.hash', learning_rate=8e-3),
    router_noisy=moep | dict(model='arena.noisy'),
    router_shared=moep | dict(model='arena.shared'),
    router_sigmoid=moep | dict(model='arena.sigmoid', learning_rate=8e-3),
    router_zloss=moep | dict(model='arena.zloss', aux_weights=MOEP_ZLOSS),
    router_moduleformer_bias=moduleformer_unbalanced | MODULEFORMER | dict(router='bias'),
    router_moduleformer_noisy=moduleformer | MODULEFORMER | dict(router='noisy'),
    router_moduleformer_sigmoid=moduleformer | MODULEFORMER | dict(router='sigmoid'),
    router_moduleformer_zloss=moduleformer | MODULEFORMER | dict(
        router='zloss', aux_weights=dict(mi=0.01, z=1e-3)),
)


# ---- baby: 28M parameters or 180M FLOPs per token, 150M tokens ----------------------------------

recipe = dict(
    data='babylm', stride=128, epoch_words=10e6, epochs=10, batch_size=64, learning_rate=2e-3,
    min_lr=0.0, warmup_iters=100, weight_decay=0.1, eval_interval=1000, save_interval=500)
base = recipe | dict(vocab_size=16384, block_size=512, n_head=6, n_embd=384, dropout=0.1)
linear = dict(schedule='linear')
muon = linear | dict(optimizer='muon', learning_rate=5e-3, muon_rate=4.0)

dense = base | dict(model='arena.dense', n_layer=12)
experts = dense | dict(n_expert=16, top_k=4, aux_weights=dict(balance=0.01))
shared = experts | muon | dict(n_expert=8, top_k=2, n_shared=2)
loop = dense | muon | dict(model='arena.loop', n_layer=6, n_head=10, n_embd=640, hidden=1920,
                           d_token=192)
llama = base | dict(model='papaformer', n_parallel=0)
moep_unbalanced = base | dict(
    model='moep', n_layer=2, n_parallel=10, n_head_parallel=3, n_embd_parallel=192,
    n_block=4, n_expert=4, top_k=2)
moep = moep_unbalanced | dict(aux_weights=MOEP_BALANCE)
papaformer = base | dict(
    model='papaformer', n_layer=2, n_parallel=12, path_embd=[192, 192], path_head=[3, 3],
    connection='share', learning_rate=1e-3)
path = llama | dict(n_layer=12, n_head=3, n_embd=192, epochs=3)
moduleformer_unbalanced = base | dict(
    model='moduleformer', n_layer=8, n_att=4, d_att=192, n_head=3, n_ffd=8, d_ffd=192, top_k=2,
    d_router=64)
moduleformer = moduleformer_unbalanced | dict(aux_weights=dict(mi=0.01))
mixture = base | dict(
    model='selfmoe', n_layer=6, n_kv_head=3, ffn_hidden=480, gate='none', n_expert=4, top_k=2,
    aux_weights=dict(balance=0.01), learning_rate=4e-3)
stlm = base | dict(model='stlm', n_layer=12, n_kv_head=6, ffn_hidden=1024, share='ffn',
                   share_group=2)
depth = base | dict(
    model='stlm_depth', n_layer=12, n_kv_head=6, ffn_hidden=1024, capacity=0.125, route_every=2,
    aux_weights=dict(forecast=0.01))

BABY = dict(
    gpt2=base | dict(model='moep', n_layer=12, n_parallel=0),
    llama=llama | dict(n_layer=8, ffn_hidden=1216),
    llama_flops=llama | dict(n_layer=12, ffn_hidden=1024),

    dense=dense | linear,
    dense_muon=dense | muon,
    dense_moe=experts | linear | dict(n_layer=10, n_head=4, n_embd=256, n_expert=8, top_k=2),
    dense_moe_flops=experts | linear,
    dense_moe_muon_flops=experts | muon,
    dense_moe_shared_muon_flops=shared,
    dense_moe_shared_muon_flops_drop_expert=shared | dict(drop_expert=0.2),
    dense_muon_drop_expert=shared | dict(n_expert=2, aux_weights={}, drop_expert=0.2),
    dense_muon_short=[
        dense | muon | dict(seq_len=64, stride=16, epochs=5, batch_size=512, schedule='constant'),
        recipe | muon | dict(model='arena.dense', init_from=0, epochs=5, warmup_iters=20)],

    loop=loop,
    loop_routed=loop | dict(n_expert=64, top_k=8, aux_weights=dict(balance=0.01)),

    moep=moep,
    moep_flops=moep | dict(n_parallel=13),

    papaformer_share=papaformer,
    papaformer_share_flops=papaformer | dict(n_parallel=17),
    papaformer_gumbel=papaformer | GUMBEL,
    papaformer_composed=[
        path | dict(part=(0, 0.5)),
        path | dict(part=(0.5, 1)),
        dict(surgery='compose', runs=[0, 1], connection='share', dropout=0.1),
        recipe | dict(model='papaformer', init_from=2, epochs=4)],

    moduleformer=moduleformer,
    moduleformer_flops=moduleformer | dict(n_layer=10, d_att=256, n_head=4, d_ffd=896,
                                           d_router=256),
    moduleformer_no_dropout=moduleformer | dict(dropout=0.0),

    selfmoe_mixture=mixture,
    selfmoe_mixture_flops=mixture | dict(n_layer=13, ffn_hidden=512),
    selfmoe_gates=[
        base | dict(model='selfmoe', n_layer=8, n_kv_head=3, ffn_hidden=1120, gate='none',
                    epochs=5),
        dict(surgery='add_gates', runs=[0], kind='matrix'),
        recipe | dict(model='selfmoe', init_from=1, epochs=5)],

    stlm_shared=stlm | dict(n_layer=10, n_head=8, n_kv_head=4, n_embd=512, ffn_hidden=1536),
    stlm_shared_flops=stlm,
    stlm_depth=depth,
    stlm_depth_flops=depth | dict(n_layer=22),

    router_bias=moep_unbalanced | dict(model='arena.bias'),
    router_hash=moep_unbalanced | dict(model='arena.hash'),
    router_noisy=moep | dict(model='arena.noisy'),
    router_shared=moep | dict(model='arena.shared'),
    router_sigmoid=moep | dict(model='arena.sigmoid'),
    router_zloss=moep | dict(model='arena.zloss', aux_weights=MOEP_ZLOSS),
    router_moduleformer_bias=moduleformer_unbalanced | MODULEFORMER | dict(router='bias'),
    router_moduleformer_noisy=moduleformer | MODULEFORMER | dict(router='noisy'),
    router_moduleformer_sigmoid=moduleformer | MODULEFORMER | dict(router='sigmoid'),
    router_moduleformer_zloss=moduleformer | MODULEFORMER | dict(
        router='zloss', aux_weights=dict(mi=0.01, z=1e-3)),
)

ENTRIES = dict(toy=TOY, baby=BABY)
