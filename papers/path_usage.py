"""
Which path of a PaPaformer does a prompt use? (The paper's Table 6.)

    python -m papers.path_usage out/papaformer_composed --data data/toy_stories data/toy_math

It takes prompts from each data set (the paper has 20 in all) and looks at the path that the last
token uses in each parallel layer: for Gumbel a path or the mix of all, for Share-Linear the path
whose output is most similar to the joined one, in every layer but the last. A choice is right if it
is the path that was trained on the prompt's domain: the first data set belongs to path 0, the
second to path 1, and so on; the mix counts as wrong.
"""

from contextlib import ExitStack

import numpy as np
import torch
import torch.nn.functional as F

from papers.common import open_run, run_parser, val_tokens
from plumbing.cli import UserError, between, run_main, write_json


@torch.no_grad()
def path_usage(model, idx):
    """Table 6 -> (B, layers): the path that each prompt's last token uses, counted from 0; k is the
    mix. With Gumbel this is the router's choice. Share has no router, so we take the path whose
    output is most similar (cosine) to the Connection's result, and leave out the last layer, where
    their widths differ. Call eval() first."""
    share = model.config.connection == 'share'
    if not share:
        return torch.stack([pi[:, -1].argmax(-1) for pi in model.routes(idx).values()], 1)
    used = []                                            # (B,) of each layer

    def record(connection, args, result):
        outputs, = args
        inputs, _ = result
        similar = [F.cosine_similarity(f[:, -1], x[:, -1], dim=-1) for f, x in zip(outputs, inputs)]
        used.append(torch.stack(similar, -1).argmax(-1))
    with ExitStack() as hooks:
        for layer in model.parallel[:-1]:
            hooks.enter_context(layer.connection.register_forward_hook(record))
        model.features(idx)
    return torch.stack(used, 1)


def document_starts(folder, tokenizer, num, length):
    """The first `length` tokens of validation documents, end-of-text in front, as in training."""
    tokens = val_tokens(folder, tokenizer)
    ends = np.flatnonzero(tokens == tokenizer.eot)
    starts = [i for i, j in zip(ends, ends[1:]) if j - i > length][:num]
    if not starts:
        raise UserError(f'no document of {folder} has {length} tokens: choose a smaller --length')
    prompts = np.stack([tokens[i:i + 1 + length] for i in starts])
    return torch.from_numpy(prompts.astype(np.int64))


def main():
    parser = run_parser(__doc__, data=dict(
        nargs='+', required=True, help='one data set per path, in order'))
    parser.add_argument('--num', type=between(1, 10 ** 6), default=500,
                        help='prompts of each data set')
    parser.add_argument('--length', type=between(1, 10 ** 6), default=16,
                        help='tokens in each of them')
    args = parser.parse_args()
    model, ckpt, tokenizer, machine = open_run(args)
    if ckpt['model'] != 'papaformer' or not model.config.n_parallel:
        raise UserError(f'{args.run} is not a PaPaformer with parallel layers: it has no paths')
    names = [f'path {i}' for i in range(len(model.config.path_embd))]
    if len(args.data) != len(names):
        raise UserError(f'--data needs a data set for each of {len(names)} paths, '
                        f'not {len(args.data)}')
    by_domain = []                                       # (prompts, layers) of each
    for folder in args.data:
        prompts = document_starts(folder, tokenizer, args.num, args.length)
        by_domain.append(path_usage(model, prompts.to(machine.device)).cpu())

    if model.config.connection != 'share':
        names.append('   mix')
    print(f"{'domain':24}{'prompts':>8}  {'  '.join(names)}   right")
    result = {}
    for path, (domain, choices) in enumerate(zip(args.data, by_domain)):
        share = [(choices == i).float().mean().item() for i in range(len(names))]
        result[domain] = dict(prompts=len(choices), share=share, right=share[path])
        shares = '  '.join(f'{100 * part:5.1f}%' for part in share)
        print(f'{domain:24}{len(choices):8}  {shares}  {100 * share[path]:5.1f}%')
    right = torch.cat([choices == path for path, choices in enumerate(by_domain)])
    result['accuracy'] = right.float().mean().item()
    print(f"all: {100 * result['accuracy']:.1f}% right")
    if args.json:
        write_json(args.json, result)


if __name__ == '__main__':
    run_main(main)
