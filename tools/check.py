"""
Does a model file keep the contract of docs/extending.md? A table of what holds, and what does not.

    python -m tools.check arena.mine      # with the config of the model that it builds on
    python -m tools.check mine --top_k=1  # mine.py, with config/mine.py and another setting
    python -m tools.check out/mine        # a trained run: what is each of its blocks worth?

It takes seconds on a CPU and needs no data: tokens are random, in windows of 48. Noise is added to
all weights, since a gate that starts at zero hides its faults. The exit code is 1 if one is found.
Of a run it shows, on validation text, the size of the residual stream that each block reads, and
how much the loss rises if the block adds nothing. A block worth nothing is dead.
"""

import contextlib
import json
import traceback
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from plumbing.bins import load_bin, val_batches
from plumbing.checkpoint import data_folders, load_checkpoint, run_tokenizer
from plumbing.cli import Parser, UserError, run_main
from plumbing.settings import import_model, make_config, read_settings

SMALL = dict(n_layer=2, n_head=2, n_embd=64)             # where no config has sizes

def batch(config):
    """Random tokens and their targets, (B, T) each; some targets are -1."""
    x = torch.randint(config.vocab_size - 3, (4, config.block_size + 1))
    if getattr(config, 'byte_limit', 0):                 # every chunk of bytes has its end
        x[:, config.byte_limit::config.byte_limit + 1] = config.vocab_size - 3
    return x[:, :-1], x[:, 1:].masked_fill(torch.rand(4, config.block_size) < 0.1, -1)


def same(a, b, least=0.0):
    """Compare up to float32's rounding of numbers as large as the largest of a, or as `least`.
    -inf, the logit of what is impossible, equals -inf."""
    largest = a[a.isfinite()].abs().max().item()
    return torch.allclose(a, b, rtol=0, atol=1e-4 * max(least, largest))


def build(module, config):
    """A fresh model in eval mode. Deterministic torch fills new memory with nan: a parameter that
    nothing sets is seen."""
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        model = module.Model(deepcopy(config)).eval()
    finally:
        torch.use_deterministic_algorithms(was_on)
    for name, p in model.named_parameters():
        assert not p.isnan().any(), f'{name} is never initialised: init_weights does not know it'
    return model


def rebuild(module, model, **changes):
    """The model as a checkpoint brings it back: from plain values and the state_dict."""
    json.dumps(asdict(model.config))                     # fails if something is not plain
    other = module.Model(module.Config(**asdict(model.config) | changes))
    other.load_state_dict(model.state_dict())
    return other.eval()


def train(model, seed):
    """Three steps -> the last loss, and the logits that the model then has in eval mode."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters())     # no weight decay: gradients alone
    for _ in range(3):
        _, loss, aux = model.train()(*batch(model.config))
        assert loss.isfinite(), \
            'in training a loss or a gradient is nan or inf; is it 0 / 0, or of a root or log of 0?'
        optimizer.zero_grad()
        (loss + sum(aux.values())).backward()
        optimizer.step()
    return loss.item(), model.eval()(batch(model.config)[0])[0].tolist()


# ---- Routers: a model's class names the class of its routers, as in moep.py and docs/routers.md --

def find_routers(model):
    """{name: router}"""
    kind = getattr(type(model), 'router', ())
    return {name: part for name, part in model.named_modules() if isinstance(part, kind)}


def choices(model, x):
    """{name without .router: choices (N, K)}"""
    chosen = {}
    for name, router in find_routers(model).items():
        name = name.removesuffix('.router')
        router.register_forward_hook(lambda _, __, out, name=name: chosen.update({name: out[1]}))
    model.features(x)
    return chosen


# ---- The checks. Each gets a fresh model in eval mode, and a batch ------------------------------

def builds(module, model, x, y):
    """the model can be built and run: without that, there is nothing to check"""
    assert len(model(x)) == 3, 'forward() does not return (logits, loss, aux)'
    logits, _, aux = model(x)
    assert not logits.isnan().any(), 'logits are nan; is something divided by 0?'
    for name, value in aux.items():
        assert torch.is_tensor(value) and value.dim() == 0 and value.isfinite(), \
            f"aux['{name}'] is not a tensor of one finite number"


def repeats(module, model, x, y):
    """two passes in eval mode are equal"""
    (logits, _, aux), (again, _, other) = model(x), model(x)
    assert same(logits, again) and aux == other, \
        'two passes differ; is noise drawn, or a buffer written?'


def shapes(module, model, x, y):
    """forward and features return what they should; the loss is the cross-entropy alone"""
    logits = model(x)[0]
    assert logits.shape == (*x.shape, model.config.vocab_size), 'logits are not (B, T, vocab_size)'
    states = model.features(x)[0]
    assert states.shape[:-1] == x.shape, 'states of features() are not (B, T, width)'
    nats = F.cross_entropy(logits.transpose(1, 2), y, ignore_index=-1, reduction='none')
    losses, mean = model(x, y, reduction='none')[1], model(x, y)[1]
    assert losses.shape == y.shape and same(nats, losses), \
        "reduction='none' is not cross-entropy, (B, T)"
    assert same(nats.sum() / (y >= 0).sum(), mean), 'the loss is not the mean cross-entropy alone'


def causal(module, model, x, y):
    """no token changes an earlier logit, at any position"""
    logits, _, _ = model(x[:1])                          # what rows do to each other is `batched`
    V = logits.size(-1)
    for t in range(1, x.size(1)):
        changed = x[:1].clone()
        changed[0, t] = (x[0, t] + torch.randint(1, V, ())) % V
        assert same(logits[:, :t], model(changed)[0][:, :t]), \
            f'token {t} changes earlier logits; look at masks, and at ranks and means over tokens'


def cached(module, model, x, y):
    """with a cache logits are the same, token by token or in parts; so is what generate() takes"""
    T = x.size(1)
    for n in () if getattr(model.config, 'byte_limit', 0) else (1, T // 2 + 1):
        cache = []
        logits = torch.cat([model(part, cache=cache)[0] for part in x.split(n, 1)], 1)
        assert same(model(x)[0], logits), \
            f'cached, {n} at a time, logits differ; look at positions and state'
    for n in (T - 2, T + 5):
        prompt = x.repeat(1, 2)[:, :n]
        out = model.generate(prompt, T // 3, temperature=0)
        assert torch.equal(out[:, :-(T // 3)], prompt), 'generate() does not extend the prompt'
        wrong = first_wrong(model, out, n, T)
        with contextlib.suppress(Exception):             # a model may have no limit of length
            wrong = wrong and first_wrong(model, out, n, 2 * out.size(1))
        assert not wrong, (
            f'generate(), given {n} tokens, does not take the best one at position {wrong}; '
            f'look at what it drops when block_size = {T} is full')


def first_wrong(model, out, n, limit):
    """The first token after n that is not the best for a model without a cache, or None."""
    slots = getattr(model.config, 'byte_limit', 0) + 1
    limit, begin = limit // slots, int(slots > 1)        # a byte model reads a start chunk, too
    first = max(0, n // slots + begin - limit)           # first chunk (or token) in the window
    for t in range(n, out.size(1)):
        if t // slots + begin - first > limit:
            first = t // slots - limit // 2              # full: it goes on with the last half
        logits = model(out[:, first * slots:t])[0][:, -1]
        best, taken = logits.max(-1).values, logits.gather(1, out[:, t:t + 1])[:, 0]
        if not same(best, taken.where(taken.isfinite(), best)):  # -inf: padding behind a chunk
            return t


def batched(module, model, x, y):
    """rows have the same logits together and one by one"""
    alone = torch.cat([model(row[None])[0] for row in x])
    assert same(alone, model(x)[0]), \
        'rows change others; look at capacities, ranks, means over tokens'


def rebuilds(module, model, x, y):
    """Model(Config(**asdict(config))) loads the weights, and gives the same logits"""
    assert same(model(x)[0], rebuild(module, model)(x)[0]), \
        'other logits; is a choice not in the config?'


def routes(module, model, x, y):
    """a token's choices differ, at most top_k + 1; gates sum to 1 (or gates_sum_to_1 = False)"""
    sum_to_1 = getattr(model, 'gates_sum_to_1', True)
    notes = {}                                           # {layer: how many choices a token takes}
    for mode in ('eval', 'training'):
        gates = model.train(mode == 'training').routes(x)
        for name, chosen in choices(model, x).items():
            assert chosen.sort(-1).values.diff().all(), \
                f'{name}: in {mode} a token takes one choice twice'
        for name, gate in gates.items():
            assert gate.shape[:-1] == x.shape, f'{name}: {tuple(gate.shape)} is not (B, T, choices)'
            assert gate.min() >= 0 and gate.isfinite().all(), f'{name}: a gate is below 0 or inf'
            total = gate.sum(-1)
            assert not sum_to_1 or same(total, torch.ones_like(total)), (
                f'{name}: gates sum to {total.min():.3g} up to {total.max():.3g}, not 1; if that '
                'is intended, set gates_sum_to_1 = False')
            taken = (gate != 0).sum(-1).float()
            K = getattr(model.config, 'top_k', gate.size(-1))
            assert taken.max() <= K + 1, (
                f'{name}: in {mode} a token takes {taken.max():.0f} choices: no more than top_k = '
                f'{K}, and one that all tokens take')
            if taken.mean() != K:
                notes[name] = f'{name} takes {taken.mean():.2f}'
    kinds = sorted({type(router).__name__ for router in find_routers(model).values()})
    text = f"{', '.join(kinds)}: {routes.__doc__}".lstrip(': ')
    if gates:
        return 'ok', '; '.join([text, *notes.values()])
    is_plain = getattr(model.config, 'n_expert', 0) == 1
    return '-', 'nothing is chosen' + '; to check experts: --n_expert=4 --top_k=2' * is_plain


def gradients(module, model, x, y):
    """every parameter gets a gradient, from the loss or from an auxiliary loss"""
    before = deepcopy(model.state_dict())
    train(model, seed=1)
    idle = [name for name, p in model.named_parameters()
            if p.requires_grad and p.equal(before[name])]
    assert not idle, f"no gradient reaches {', '.join(idle[:3])} ({len(idle)} in all); is it used?"


def loss(module, model, x, y):
    """every parameter gets a gradient from the loss itself"""
    model.train()(x, y)[1].backward()
    sizes = {name: 0.0 if p.grad is None else p.grad.abs().max().item()
             for name, p in model.named_parameters() if p.requires_grad}
    least = 1e-6 * max(sizes.values())                   # less is rounding
    names = [name for name, size in sizes.items() if size < least]
    if names:                                            # as if gates are detached, or always 1
        return 'NOTE', f'from an auxiliary loss alone: {names[0]} ({len(names)} in all)'


def resume(module, model, x, y):
    """a run that is saved, rebuilt and resumed has the same losses, bit for bit"""
    train(model, seed=1)
    other = rebuild(module, model)
    a, b = train(model, seed=2), train(other, seed=2)
    for (name, part), twin in zip(model.named_modules(), other.modules()):
        for key in vars(part).keys() - vars(nn.Module()):
            ours, theirs = repr(vars(part)[key]), repr(vars(twin).get(key))
            assert ours == theirs or ' at 0x' in ours, \
                f'training changes {name}.{key}; use register_buffer'
    assert a == b, 'losses differ; look for globals, and for buffers with persistent=False'


def sparse(module, model, x, y):
    """sparse=True and sparse=False have the same logits and gradients"""
    if not hasattr(model.config, 'sparse'):
        return '-', "the config has no field 'sparse'"
    other = rebuild(module, model, sparse=not model.config.sparse)
    assert same(model(x)[0], other(x)[0]), 'logits differ with sparse=True and sparse=False'
    (model(x, y)[1] + other(x, y)[1]).backward()
    grads = [(name, p.grad, twin.grad) for (name, p), twin
             in zip(model.named_parameters(), other.parameters()) if p.grad is not None]
    least = max(grad.abs().max().item() for _, grad, _ in grads) / 100   # 0 is rounded, too
    for name, grad, twin in grads:
        assert same(grad, twin, least), f'gradients of {name} differ with sparse'


def counts(module, model, x, y):
    """count_params() gives the number of all parameters (the active ones are not checked)"""
    total, active = model.count_params()
    exact = sum(p.numel() for p in model.parameters())
    assert total == exact and active > 0, f'{total:,} and {active:,} active of {exact:,}'
    layer = getattr(type(model), 'layer', None)
    if layer and layer.__module__ != model.count_params.__module__:      # which does not know it
        return 'NOTE', f'{active:,} active: is that so, with your {layer.__name__}?'


CHECKS = (repeats, shapes, causal, cached, batched, rebuilds, routes, gradients, loss, resume,
          sparse, counts)


def run_check(check, module, config):
    """-> ok, NOTE, WRONG or -, and the check's docstring or what there is to say."""
    torch.manual_seed(0)
    try:
        model = build(module, config)
        for p in model.parameters():
            p.data.add_(0.05 * torch.randn_like(p))
        return check(module, model, *batch(config)) or ('ok', check.__doc__)
    except AssertionError as error:
        return 'WRONG', str(error)
    except Exception:                                    # a bug in the model
        return 'WRONG', traceback.format_exc()


def find_settings(name):
    """-> the source of the sizes, and the arguments: the config named like the model, or like the
    one that it builds on; small ones if there is none."""
    Config = import_model(name).Config
    for stem in (name, *(kind.__module__ for kind in Config.__mro__)):
        path = Path(f'config/{stem}.py')
        if path.exists():
            return str(path), [str(path)]
    return 'small sizes', [f'--{key}={n}' for key, n in SMALL.items() if hasattr(Config, key)]


# ---- A trained run: what is each block worth? ---------------------------------------------------

def residual_blocks(model):
    """{name: block}: what its lists of modules hold, if it has a matrix; of nested lists, the inner
    ones. Single maps and adapters are not blocks."""
    members = {f'{name}.{i}': part for name, parts in model.named_modules()
               if isinstance(parts, nn.ModuleList) for i, part in enumerate(parts)}
    blocks = {name: part for name, part in members.items()
              if any(p.dim() > 1 for p in part.parameters())
              and not isinstance(part, (nn.Linear, nn.ModuleDict))}
    is_outer = lambda name: any(other.startswith(f'{name}.') for other in blocks)
    return {name: part for name, part in blocks.items() if not is_outer(name)}


@torch.no_grad()
def show_blocks(path):
    """Print the stream that each block of a run reads, and the loss if the block adds nothing."""
    model, ckpt = load_checkpoint(path)
    config, pad, folder = model.config, run_tokenizer(ckpt).pad, data_folders(ckpt)[0]
    batches = list(val_batches(load_bin(folder, 'val'), config.block_size, 8, pad, 8192))
    loss = lambda: sum(model(x, y)[1].item() for x, y in batches) / len(batches)
    blocks = residual_blocks(model)
    sizes = {}
    for name, block in blocks.items():
        block.register_forward_pre_hook(
            lambda _, args, name=name: sizes.update({name: args[0].float().std().item()}))
    whole = loss()
    print(f'{path}: val loss {whole:.4f} on {len(batches)} batches of {folder}')
    print(f"{'block':24}{'stream, std':>12}{'loss without it':>18}")
    for name, block in blocks.items():
        before = deepcopy(block.state_dict())
        for p in block.parameters():
            p.zero_()                                    # it then adds zeros to the stream
        rise = loss() - whole
        block.load_state_dict(before)
        dead = '  adds almost nothing' if rise < 0.01 else ''
        print(f'{name:24}{sizes[name]:12.4g}{rise:+18.4f}{dead}')


def main():
    parser = Parser(__doc__)
    parser.add_argument('model', help='mine, mine.py, arena.mine or arena/mine.py; or a run')
    parser.add_argument('--config', help='if not given, the one named like the model')
    args, extra = parser.parse_known_args()
    if Path(args.model).is_dir() or Path(args.model).parts[0] == 'out':
        return show_blocks(args.model)
    name = '.'.join(Path(args.model.removesuffix('.py')).parts)
    source, settings = (args.config, [args.config]) if args.config else find_settings(name)
    s, module, keys = read_settings([*settings, *extra, f'--model={name}'])
    if s.init_from:
        raise UserError(f'{source} starts from another run; check builds fresh models')
    slots = keys.get('byte_limit', 0) + 1
    keys['block_size'] = max(2, 48 // slots) * slots
    config = make_config(module, dict(vocab_size=256) | keys)
    print(' '.join([f"{name.replace('.', '/')}.py with {source}", *extra]))
    torch.set_num_threads(1)                             # faster at this size
    wrong = 0
    for check in CHECKS if run_check(builds, module, config)[0] == 'ok' else [builds]:
        verdict, text = run_check(check, module, config)
        wrong += verdict == 'WRONG'
        print(f'{verdict:5}  {check.__name__:9}  {text}', flush=True)
    raise SystemExit(min(wrong, 1))


if __name__ == '__main__':
    run_main(main)
