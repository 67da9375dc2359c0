"""
What conditional depth costs and saves, for a run of stlm_depth.py.

    python -m papers.depth out/stlm_depth   # mixture of depths: who passes, causal or looking ahead
    python -m papers.depth out/stlm_exit    # early exit: the loss at each, drafts and their speed
    python -m papers.depth out/stlm_exit --draft_layers 1 2 --json depth.json

Losses are those of val.bin. A routed model is scored twice: with its forecast, as in generation,
and with the true top of every window, as in training. The second looks ahead, so it is not a
probability of text; the difference is what causality costs. Drafts are greedy and in float32, one
prompt at a time: `kept` is the share of drafted tokens that end up in the text.
"""

import time
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F

from papers.common import open_run, run_parser, val_tokens
from plumbing.bins import count_routes, read_windows, score_batches, val_batches
from plumbing.checkpoint import data_folders
from plumbing.cli import UserError, between, run_main, write_json

BATCH = 16                                               # windows at a time, for the losses
N_DRAFT = 4                                              # tokens to draft at a time


class LookingAhead(torch.nn.Module):
    """The model with the choice of training: the true top of every window. Without dropout."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y, reduction):
        routed = [module for module in self.model.modules() if hasattr(module, 'choose')]
        for module in routed:
            module.training = True
        result = self.model(x, y, reduction=reduction)
        for module in routed:
            module.training = False
        return result


class Exit(torch.nn.Module):
    """The model that ends after `n` layers."""

    def __init__(self, model, n):
        super().__init__()
        self.model = model
        self.n = n

    def forward(self, x, y, reduction):
        states, *_ = self.model.run(self.model.wte(x), range(self.n), 0)
        logits = self.model.exit_logits(states[-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, y.flatten(), ignore_index=-1, reduction=reduction)
        return None, loss.view_as(y), {}


@torch.no_grad()
def decode(model, prompts, n_new, draft_layers):
    """Greedy text of each prompt -> tokens (prompts, T), tokens per second, share of drafts kept"""
    calls = Counter()                                    # of the first layer and the last
    hooks = [layer.register_forward_hook(lambda layer, *_: calls.update([layer]))
             for layer in (model.layers[0], model.layers[-1])]

    def write(prompt):                                   # .cpu() waits for the last token
        return model.generate(prompt, n_new, 0, None, draft_layers, N_DRAFT).cpu()
    write(prompts[:1])                                   # warms up
    calls.clear()
    start = time.perf_counter()
    texts = torch.cat([write(prompt) for prompt in prompts.split(1)])
    took = time.perf_counter() - start
    for hook in hooks:
        hook.remove()
    kept = None
    if draft_layers:
        # A round reads its drafts and one token more with the first layer, one at a time, and all
        # of them at once with the last. It adds the drafts that are kept, and one token.
        rounds = calls[model.layers[-1]]
        drafted = calls[model.layers[0]] - rounds
        kept = (len(prompts) * n_new - rounds) / max(1, drafted)
    return texts, len(prompts) * n_new / took, kept


def main():
    parser = run_parser(__doc__)
    parser.add_argument('--draft_layers', type=between(1, 1000), nargs='+',
                        help='how many layers draft; every number of them if not given')
    parser.add_argument('--prompts', type=between(1, 10 ** 4), default=50, help='texts to continue')
    parser.add_argument('--max_new_tokens', type=between(1, 10 ** 6), default=100,
                        help='length of each text')
    parser.add_argument('--eval_tokens', type=between(1, 10 ** 9),
                        help='most val tokens to score; all if not given')
    args = parser.parse_args()
    model, ckpt, tokenizer, machine = open_run(args)
    if not hasattr(model.config, 'route_every'):
        raise UserError(f"{args.run} is a run of {ckpt['model']}, not of stlm_depth")
    L = model.config.n_layer
    draft_layers = args.draft_layers or range(1, L)
    if max(draft_layers, default=0) >= L:                # a model of one layer has none
        raise UserError(f'--draft_layers {max(draft_layers)}: the model has {L} layers, '
                        'and at least one must verify')
    folder = args.data or data_folders(ckpt)[0]
    tokens = val_tokens(folder, tokenizer)
    T = model.config.block_size

    def windows():
        return val_batches(tokens, T, BATCH, tokenizer.pad, args.eval_tokens)

    def score(model):
        return score_batches(model, windows(), tokenizer, machine)

    def show(title, scores):
        print(f"{title:20}  loss {scores['loss']:.4f}, {scores['bits_per_byte']:.4f} bits per byte")

    routed = {}
    if model.config.capacity < 1:
        x, _ = next(windows())
        passed = {layer: share for layer, (share, _)
                  in count_routes(model, x, machine)['routes'].items()}
        routed = dict(forecast=score(model), top=score(LookingAhead(model)), passed=passed)
        show('the forecast decides', routed['forecast'])
        show('looking ahead', routed['top'])
        print('passed                ' + ', '.join(
            f'{layer}: {100 * share:.1f}%' for layer, share in passed.items()))
    exits = []
    for n in range(1, L + 1):
        scores = score(Exit(model, n))
        exits.append(dict(layers=n, **scores))
        show(f'exit after layer {n}', scores)

    length = min(32, max(1, T // 2), len(tokens))
    starts = np.linspace(0, len(tokens) - length, args.prompts, dtype=np.int64)
    prompts = machine.send(read_windows([tokens], starts, length))
    model.eval()
    plain, rate, _ = decode(model, prompts, args.max_new_tokens, 0)
    print(f'no drafts             {rate:,.0f} tokens/s')
    drafts = [dict(layers=0, tokens_per_s=rate, kept=None, same=len(prompts))]
    for n in draft_layers:
        texts, rate, kept = decode(model, prompts, args.max_new_tokens, n)
        same = int((texts == plain).all(1).sum())
        drafts.append(dict(layers=n, tokens_per_s=rate, kept=kept, same=same))
        print(f'{n:3} layers draft {N_DRAFT:3}   {rate:,.0f} tokens/s, {100 * kept:.1f}% '
              f'kept, {same} of {len(prompts)} texts the same')
    if args.json:
        write_json(args.json, dict(run=args.run, data=str(folder), n_draft=N_DRAFT,
                                   prompts=len(prompts), max_new_tokens=args.max_new_tokens,
                                   routed=routed, exits=exits, drafts=drafts))


if __name__ == '__main__':
    run_main(main)
