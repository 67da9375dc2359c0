"""
Look at what a trained model does.

    python sample.py out/moep --prompt "Once upon a time" --num 3      # text
    python sample.py out/moep --prompt "Once upon a time" --next 5     # the most probable next tokens
    python sample.py out/moep --prompt "Once upon a time" --routes     # the way each token took, layer by layer
"""

import torch

from errors import Parser, UserError, run_main
from machine import Machine
from prepare import load_tokenizer
from train import load_checkpoint


def cell(tokenizer, i):
    """A token as it is printed in a table."""
    return '<eot>' if i == tokenizer.eot else repr(tokenizer.decode([i]))[1:-1] or '<end>'


def show_next(model, tokenizer, idx, n):
    """The n most probable tokens after the prompt, with their probabilities."""
    prob = model(idx)[0][0, -1].float().softmax(-1)
    for p, i in zip(*(t.tolist() for t in prob.topk(min(n, len(prob))))):
        print(f'{p:8.4f}  {cell(tokenizer, i)}')


def show_routes(model, tokenizer, idx):
    """One line per token: in each layer the choices it took, the heaviest first, as choice:percent."""
    routes = {name: gate[0] for name, gate in model.routes(idx).items()}

    def way(gate):
        chosen = gate.nonzero().flatten().tolist()
        return ' '.join(f'{i}:{100 * gate[i]:.0f}' for i in sorted(chosen, key=lambda i: -gate[i]))
    tokens = [cell(tokenizer, i) for i in idx[0].tolist()]
    table = [['token', *routes]] + [[token, *(way(gate[t]) for gate in routes.values())] for t, token in enumerate(tokens)]
    widths = [max(len(row[c]) for row in table) for c in range(len(table[0]))]
    for row, legend in zip(table, ['   what each token took, as choice:percent; choices count from 0', *[''] * len(tokens)]):
        print(('  '.join(text.ljust(width) for text, width in zip(row, widths)) + legend).rstrip())


@torch.no_grad()
def main():
    parser = Parser(__doc__)
    parser.add_argument('run', help='a run folder (out/moep) or one of its checkpoints (out/moep/ckpt_1M.pt)')
    parser.add_argument('--prompt', default='', help='text to go on from; a document starts here if it is empty')
    parser.add_argument('--num', type=int, default=1, help='samples')
    parser.add_argument('--max_new_tokens', type=int, default=200)
    parser.add_argument('--temperature', type=float, default=0.8, help='0: always the most probable token')
    parser.add_argument('--top_k', type=int, default=50, help='draw from this many most probable tokens; 0: from all')
    parser.add_argument('--seed', type=int, default=1337)
    parser.add_argument('--device', default='auto', help='cuda, mps or cpu, whichever is there')
    parser.add_argument('--next', type=int, metavar='N', help='print the N most probable next tokens instead of text')
    parser.add_argument('--routes', action='store_true', help='print the blocks and experts that each token took')
    args = parser.parse_args()

    if args.temperature < 0 or args.top_k < 0 or args.max_new_tokens < 1:
        raise UserError('temperature and top_k must be at least 0, max_new_tokens at least 1')
    device = Machine(args.device).device
    model, ckpt = load_checkpoint(args.run, device)
    tokenizer = load_tokenizer(ckpt['folder'])
    ids = [*tokenizer.end, *tokenizer.encode(args.prompt)]
    while args.prompt and not tokenizer.token_bytes[ids[-1]]:
        ids.pop()                                        # chunks of bytes: the model may go on with the last one
    prompt, limit = torch.tensor([ids], device=device), model.config.block_size
    if args.next is not None:
        slots = len(tokenizer.end)                       # of a chunk of bytes; a token is one
        over = -(-max(0, len(ids) - limit) // slots) * slots
        show_next(model, tokenizer, prompt[:, over:], max(1, args.next))
        return
    if args.routes and not model.routes(prompt[:, :limit]):
        raise UserError('this model has no routes: every token takes the same way')
    torch.manual_seed(args.seed)
    for n in range(args.num):
        idx = model.generate(prompt, args.max_new_tokens, args.temperature, args.top_k or None)
        print(tokenizer.show(idx[0].tolist()))
        if args.routes:
            print(f'\nthe first {limit} of {idx.size(1)} tokens, which is as far as the model sees at once:' if idx.size(1) > limit else '')
            show_routes(model, tokenizer, idx[:, :limit])
        if n < args.num - 1:
            print('-' * 40)


if __name__ == '__main__':
    run_main(main)
