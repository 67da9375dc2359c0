"""
Look at what a trained model does.

    python sample.py out/moep --prompt "Once upon a time" --num 3    # text
    python sample.py out/moep --prompt "Once upon a time" --next 5   # the most probable next tokens
    python sample.py out/moep --prompt "Once upon a time" --routes   # what each token took
    python sample.py out/moep --score book.txt --show 5              # how well it predicts a text
    python sample.py out/moep out/gpt2 --score book.txt              # both as one model
"""

import re
from pathlib import Path

import numpy as np
import torch

from plumbing.bins import score_batches, val_batches
from plumbing.checkpoint import context_limit, run_tokenizer
from plumbing.cli import Parser, UserError, between, reading, run_main
from plumbing.machine import Machine
from plumbing.together import load_together


def cell(tokenizer, i):
    """A token as it is printed in a table."""
    names = {tokenizer.eot: '<eot>', tokenizer.pad: '<pause>' if tokenizer.pauses else '<pad>'}
    return names.get(i) or repr(tokenizer.decode([i]))[1:-1] or '<end>'


def show_next(logits, tokenizer, n):
    """The n most probable next tokens, with their probabilities."""
    prob = logits.float().softmax(-1)
    top, tokens = prob.topk(min(n, len(prob)))
    for p, i in zip(top.tolist(), tokens.tolist()):
        print(f'{p:8.4f}  {cell(tokenizer, i)}')


def show_routes(model, tokenizer, idx, which):
    """One line per token: the choices that it took in each layer."""
    routes = model.routes(idx)
    rows = [['token', *routes]]
    for t, token in enumerate(idx[0].tolist()):
        rows.append([cell(tokenizer, token), *(choices(gate[0, t]) for gate in routes.values())])
    widths = [max(map(len, column)) for column in zip(*rows)]
    print(f'what {which} took, as choice:percent; choices count from 0')
    for row in rows:
        print('  '.join(text.ljust(width) for text, width in zip(row, widths)).rstrip())


def choices(gate):
    """The choices whose gate is not 0, the largest first, as choice:percent."""
    chosen = gate.nonzero().flatten().tolist()
    chosen.sort(key=lambda i: -gate[i])
    return ' '.join(f'{i}:{100 * gate[i]:.0f}' for i in chosen)


def show_scores(model, tokenizer, paths, n_shown, machine):
    """Print the scores of each file, read as one document, and of its n_shown worst sentences."""
    for path in paths:
        with reading(path):
            text = Path(path).read_text(encoding='utf-8')
        ids = np.array([*tokenizer.end, *tokenizer.encode(text), *tokenizer.end])
        batches = val_batches(ids, model.config.block_size, 8, tokenizer.pad)
        nats = []
        score = score_batches(model, batches, tokenizer, machine, nats)
        print(f"{path}: loss {score['loss']:.4f} per token, perplexity {score['perplexity']:.5g}, "
              f"{score['bits_per_byte']:.4f} bits per byte")
        if n_shown:
            show_worst(torch.cat(nats).numpy()[:len(ids) - 1], ids[1:], tokenizer, n_shown)


def show_worst(nats, ids, tokenizer, n):
    """Print the n sentences with the highest loss per token, which is printed before each."""
    parts = [tokenizer.token_bytes[i] for i in ids]
    text, size = b''.join(parts), np.array([*map(len, parts)])
    end = np.array([m.end() for m in re.finditer(rb'[.!?]["\')\]]*(?=\s)|\n|$', text)])
    is_text = size > 0                                   # not end-of-text, nor padding
    sentence = end.searchsorted(size.cumsum())[is_text]
    count = np.bincount(sentence, minlength=len(end))
    loss = np.bincount(sentence, nats[is_text], len(end)) / count.clip(1)
    words = [text[a:b].decode('utf-8', 'replace').strip() for a, b in zip([0, *end], end)]
    worst = sorted(filter(words.__getitem__, range(len(end))), key=lambda i: -loss[i])
    for i in worst[:n]:
        print(f'{loss[i]:8.4f}  {words[i]}')


def read_arguments():
    parser = Parser(__doc__)
    parser.add_argument('runs', nargs='+', help='run folders or .pt files; several with --score')
    parser.add_argument('--prompt', default='', help='text to continue; if empty, a new document')
    parser.add_argument('--num', type=between(1, 1000), default=1, help='how many samples')
    parser.add_argument('--max_new_tokens', type=between(0, 10 ** 6),
                        help='length of a sample (default 200, or 0 with --prompt and --routes)')
    parser.add_argument('--temperature', type=between(0, 100, float), default=0.8,
                        help='0: always the most probable token')
    parser.add_argument('--top_k', type=between(0, 65536), default=50,
                        help='draw from this many most probable tokens; 0: from all')
    parser.add_argument('--seed', type=int, default=1337, help='of the draws')
    parser.add_argument('--device', default='auto', help='cuda, mps, cpu; auto: the first there is')
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument('--next', type=between(1, 65536), metavar='N',
                       help='print the N most probable next tokens instead of text')
    shown.add_argument('--routes', action='store_true',
                       help='print the blocks and experts that each token took')
    shown.add_argument('--score', nargs='+', metavar='FILE',
                       help='loss, perplexity and bits per byte of text files')
    parser.add_argument('--show', type=between(1, 10 ** 6), metavar='N',
                        help='with --score: print the N sentences with the highest loss per token')
    args, words = parser.parse_known_args()
    if not args.score:
        words = args.runs[1:] + words
    if words:
        parser.error(f'unknown: {" ".join(words)}; a text goes into --prompt "...", '
                     'and several runs go with --score')
    if args.show and not args.score:
        parser.error('--show goes with --score')
    if args.prompt and args.score:
        parser.error('--score reads files, so it does not go with --prompt')
    return args


def encode_prompt(prompt, tokenizer):
    if tokenizer.pauses and prompt and '\n' not in prompt:
        prompt += '\n'                           # pauses follow a line
    ids = [*tokenizer.end, *tokenizer.encode(prompt)]
    while prompt and len(tokenizer.end) > 1 and not tokenizer.token_bytes[ids[-1]]:
        ids.pop()                                # leave the last chunk open, to continue it
    return ids


@torch.no_grad()
def main():
    args = read_arguments()
    n_new = args.max_new_tokens
    if n_new is None:
        n_new = 0 if args.routes and args.prompt else 200
    machine = Machine(args.device)
    device = machine.device
    model, ckpt = load_together(args.runs, device)
    tokenizer = run_tokenizer(ckpt)
    if args.score:
        return show_scores(model, tokenizer, args.score, args.show, machine)
    prompt = torch.tensor([encode_prompt(args.prompt, tokenizer)], device=device)
    limit = context_limit(model) or 10 ** 9
    if args.next:
        slots = len(tokenizer.end)               # of a chunk; 1: tokens
        over = max(0, prompt.size(1) - limit)
        first = -(-over // slots) * slots        # full chunks are cut off in front
        show_next(model(prompt[:, first:])[0][0, -1], tokenizer, args.next)
        return
    if args.routes and not model.routes(prompt[:, :limit]):
        raise UserError('this model has no routers: there is nothing to choose')

    torch.manual_seed(args.seed)
    for n in range(args.num):
        if n > 0:
            print('-' * 40)
        idx = model.generate(prompt, n_new, args.temperature, args.top_k or None)
        new = idx[0, prompt.size(1):].tolist()           # an imported model ends its text
        n_text = next((i for i, token in enumerate(new) if token in tokenizer.stop), len(new))
        idx = idx[:, :prompt.size(1) + n_text]
        print(tokenizer.show(idx[0].tolist()))
        if args.routes:
            print()
            which = 'each token'
            if idx.size(1) > limit:
                which = (f'the first {limit} of {idx.size(1)} tokens '
                         '(the model sees no more at once)')
            show_routes(model, tokenizer, idx[:, :limit], which)


if __name__ == '__main__':
    run_main(main)
