"""
How much memory does each GPU need, and how much do GPUs send each other? Nothing is built.

    python -m tools.scale config/paper/moduleformer/molm_4b_k2.py --batch_size=16 --shard
    python -m tools.scale config/paper/moduleformer/molm_4b_k2.py --routes docs/results/routes.json

Memory is that of the first process. With --shard it holds the largest part; without, a whole copy
(DistributedDataParallel). Traffic is what one GPU receives for a step of one micro-batch: by FSDP,
whatever the tokens choose; and by expert parallelism, where GPUs keep their experts and send each
other tokens (not built here). --routes has measured loads, {run: {layer: {"load": [share of each
expert]}}}: the busiest GPU sets the pace.
"""

from pathlib import Path

from plumbing.cli import Parser, UserError, between, parse_json, run_main, short
from plumbing.data import named_sets
from plumbing.models import sketch
from plumbing.settings import read_settings
from plumbing.shard import SLICE, blocks
from plumbing.tokenizer import load_meta


def in_moduleformer(c):
    """Bytes that a block keeps for one token. In float32: what enters and leaves two norms, and
    the hidden layer of two routers. In bfloat16: the norm's output, keys and values; for each of K
    rows, what enters and leaves both pools (4 D), queries and what they read (2 d_att), before and
    after GELU (2 d_ffd)."""
    wide = 4 * (4 * c.n_embd + 2 * c.d_router)
    shared = 2 * c.n_embd                                # with identity_kv, these are keys and values
    if not c.identity_kv:
        shared += 2 * 2 * c.d_att
    return wide + shared + 2 * c.top_k * (4 * c.n_embd + 2 * c.d_att + 2 * c.d_ffd)


INSIDE = dict(moduleformer=in_moduleformer)              # under autocast; add your model's here


def count(parameters):
    return sum(p.numel() for p in parameters)


def held(p, world):
    """Numbers of a parameter that the first of `world` processes holds: FSDP divides its rows."""
    rows = len(p) if p.dim() else 1
    return -(-rows // world) * p.numel() // rows


def memory(model, s, T, world):
    """{what: bytes of one GPU}"""
    c = model.config
    N = s.batch_size * T
    found = {}
    parts = world if s.shard else 1
    trained = [p for p in model.parameters() if p.requires_grad]
    found['weights'] = 4 * sum(held(p, parts) for p in model.parameters())
    found['gradients'] = 4 * sum(held(p, parts) for p in trained)
    found['AdamW'] = 8 * sum(held(p, parts) for p in trained)
    if world > parts:
        found['gradients to send'] = 4 * count(trained)          # DDP's buckets
    if parts > 1:
        sizes = [count(block.parameters()) for block in blocks(model, least=2)] or [0]
        rest = count(model.parameters()) - sum(sizes)
        found['gathered'] = 4 * (rest + 2 * max(sizes))          # a block, and the next one
        summed = count(trained) if s.gradient_accumulation_steps > 1 else rest + max(sizes)
        found['gradients to send'] = 4 * summed
    sizes = [count(block.parameters()) for block in blocks(model)]
    layers = len(sizes)
    if s.checkpoint_activations:
        found['block inputs'] = 4 * layers * N * c.n_embd
        if s.model in INSIDE:
            found['one block'] = 2 * INSIDE[s.model](c) * N      # and its gradients
        found['in bfloat16'] = 2 * max(sizes)                    # a copy of its weights
        found['logits'] = 14 * min(SLICE, N) * c.vocab_size      # bfloat16, float32, their gradients
    else:
        if s.model in INSIDE:
            found['blocks'] = layers * INSIDE[s.model](c) * N
        found['in bfloat16'] = 2 * sum(sizes)
        found['logits'] = 14 * N * c.vocab_size
    if s.memory:                                                 # keys and values in bfloat16
        positions = s.gradient_accumulation_steps * s.batch_size * (T + s.memory)
        found['segment memory'] = 4 * positions * layers * c.d_att
    return found


def fsdp_bytes(model, world):
    """Each parameter is gathered twice in float32, for forward and backward, and its gradient is
    summed up. Recomputation is a part of backward, and gathers nothing more."""
    return 3 * 4 * count(model.parameters()) * (world - 1) / world


def expert_bytes(model, s, world):
    """(for each token of a GPU's own, for gradients). In bfloat16, a token goes to K attention modules
    and comes back as queries, goes to them again as what was read, and comes back; it goes to K FFN
    modules and comes back. Backward does the same, and so does recomputation. Gradients in float32: of
    all that is not an expert, and of experts that have copies, where there are more GPUs than experts."""
    c = model.config
    passes = 3 if s.checkpoint_activations else 2
    per_token = passes * 2 * c.top_k * c.n_layer * (2 * (c.n_embd + c.d_att) + 2 * c.n_embd)
    gradients = 0
    for p in model.parameters():
        copies, size = world, p.numel()
        if p.dim() == 3:                                 # a stack of experts
            copies, size = max(1, world // len(p)), p[0].numel()
        gradients += 2 * 4 * size * (copies - 1) / copies        # to the sum, and from it
    return per_token * (world - 1) / world, gradients


def imbalance(load, world):
    """The rows of the busiest GPU relative to the mean, if experts are dealt to GPUs in turn; where
    there are more GPUs than experts, each expert has as many of its own."""
    places = min(world, len(load))
    return max(sum(load[place::places]) for place in range(places)) * places / sum(load)


def read_loads(path, model):
    """[the share of each expert] of every pool."""
    try:
        runs = parse_json(Path(path).read_text(encoding='utf-8'))
        loads = [layer['load'] for layer in runs[model].values()]
        is_whole = loads and all(sum(load) > 0 for load in loads)
    except (ValueError, LookupError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise UserError(f'{path} has no loads of {model}; what they look like: '
                        f'{{"{model}": {{"layer": {{"load": [0.5, 0.5]}}}}}}')
    return loads


def show_memory(model, s, T, worlds):
    columns = [memory(model, s, T, world) for world in worlds]
    heads = ['1 GPU' if world == 1 else f'{world} GPUs' for world in worlds]
    print(f"{'GB per GPU':20}" + ''.join(f'{head:>13}' for head in heads))
    for name in dict.fromkeys(name for column in columns for name in column):
        print(f'{name:20}' + ''.join(f'{column.get(name, 0) / 1e9:13.2f}' for column in columns))
    if s.model not in INSIDE:
        print(f'not counted: activations inside the blocks of {s.model}')
    print(f"{'together':20}" + ''.join(f'{sum(column.values()) / 1e9:13.2f}' for column in columns))


def show_traffic(model, s, T, worlds, loads):
    N = s.batch_size * T
    print(f'\nGB that a GPU receives for a step of {N:,} tokens')
    heads = f"{'GPUs':>6}{'FSDP':>10}{'experts':>10}{'gradients':>11}{'equal at':>18}"
    print(f"{heads}{'busiest GPU, mean and worst pool':>36}")
    for world in worlds:
        fsdp = fsdp_bytes(model, world)
        per_token, gradients = expert_bytes(model, s, world)
        uneven = [imbalance(load, world) for load in loads]
        busiest = f'{sum(uneven) / len(uneven):.2f} x, {max(uneven):.2f} x of {len(uneven)} pools'
        received = f'{fsdp / 1e9:10.1f}{(per_token * N + gradients) / 1e9:10.1f}{gradients / 1e9:11.1f}'
        print(f'{world:6}{received}{(fsdp - gradients) / per_token:11,.0f} tokens{busiest:>36}')


def find_vocabulary(s):
    """The size of the tokenizer's, if the data is here."""
    ranges, _ = named_sets(s)
    folder = Path(s.data_dir, str(next(iter(ranges))))
    if (folder / 'meta.json').exists():
        return load_meta(folder)['tokenizer']['vocab_size']
    print(f'a vocabulary of 50,257 is assumed: there is no {folder}, and no --vocab_size')
    return 50257


def main():
    parser = Parser(__doc__)
    parser.add_argument('config')
    parser.add_argument('--processes', type=between(1, 10 ** 5), nargs='+', default=[1, 8, 32, 64],
                        help='how many GPUs')
    parser.add_argument('--routes', help='measured loads; then also the traffic is shown')
    args, extra = parser.parse_known_args()
    s, module, keys = read_settings([args.config, *extra])
    if s.init_from:                                      # whose sizes the config does not say
        raise UserError(f'{args.config} starts from another run; scale counts fresh models')
    if 'vocab_size' not in keys:
        keys['vocab_size'] = find_vocabulary(s)
    model = sketch(module, keys)
    T = s.seq_len or model.config.block_size
    if s.memory and not hasattr(model.config, 'd_att'):
        raise UserError(f'{s.model} has no segment memory: leave out --memory')
    if args.routes:
        if s.model != 'moduleformer':
            raise UserError('--routes: the traffic of experts is counted for moduleformer only')
        loads = read_loads(args.routes, s.model)
    print(f'{s.model}: {short(count(model.parameters()))} parameters, {s.batch_size} x {T} tokens, '
          f'micro-batches: {s.gradient_accumulation_steps}')
    show_memory(model, s, T, args.processes)
    if args.routes:
        show_traffic(model, s, T, [world for world in args.processes if world > 1], loads)


if __name__ == '__main__':
    run_main(main)
