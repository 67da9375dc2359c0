"""
Which path of a PaPaformer does a prompt use? (The paper's Table 6.)

    python path_usage.py out/papaformer_composed --data data/toy_stories data/toy_math     # many prompts of each domain
    python path_usage.py out/papaformer_composed                                           # the paper's 20 prompts

One line per prompt: the path that its last token uses in each parallel layer, counted from 1; the number after the last
path is the mix of all (Gumbel). For Share-Linear: the path whose output is most similar to the joined one, in every layer
but the last. A choice is right if it is the path that was trained on the prompt's domain: the first data set belongs to
path 1, the second to path 2, and so on; the mix counts as wrong.
"""

import numpy as np
import torch

import prepare
from errors import Parser, UserError, check_writable, run_main, write_json
from machine import Machine
from papaformer import path_accuracy, path_usage
from train import load_checkpoint

STORIES = ['Once upon a time, there was a little', 'Once upon a time, there was a little boy named Lily.',
           'There was a little girl.', 'There was a little girl named Timmy.', 'Little girl',
           'He liked to play with his toys', 'One day', 'went to the park', 'yummy soup', 'She loved playing with']
MATH = ['Solve this', ' Express your answer', ' <llm-code>', 'Find the largest', 'Evaluate', 'from sympy import sqrt',
        'Simplify', "Let's solve this problem", 'Python code', '1 + 1']


def document_starts(folder, tokenizer, num, length):
    """The first `length` tokens of validation documents, as prompts; end-of-text in front, as in training."""
    if prepare.load_meta(folder)['tokenizer']['hash'] != tokenizer.hash:
        raise UserError(f'{folder} has another tokenizer than the run')
    tokens = prepare.load_bin(folder, 'val')
    ends = np.flatnonzero(tokens == tokenizer.eot)
    starts = [i for i, j in zip(ends, ends[1:]) if j - i > length][:num]
    if not starts:
        raise UserError(f'no document of {folder} has {length} tokens: choose a smaller --length')
    return torch.tensor(np.stack([tokens[i:i + 1 + length] for i in starts]).astype(np.int64))


def main():
    parser = Parser(__doc__)
    parser.add_argument('run', help='a run folder of a PaPaformer with parallel layers')
    parser.add_argument('--data', nargs='+', help="one data set per path, in order; the paper's prompts if not given")
    parser.add_argument('--num', type=int, default=500, help='prompts of each data set')
    parser.add_argument('--length', type=int, default=16, help='tokens in each of them')
    parser.add_argument('--json', help='write shares and accuracy there')
    parser.add_argument('--device', default='auto', help='cuda, mps or cpu, whichever is there')
    args = parser.parse_args()
    check_writable(args.json)
    machine = Machine(args.device)
    model, ckpt = load_checkpoint(args.run, machine.device)
    if ckpt['model'] != 'papaformer':
        raise UserError(f"{args.run} holds a model of {ckpt['model']}.py; only a PaPaformer has paths")
    tokenizer = prepare.load_tokenizer(ckpt['folder'])
    if args.num < 1 or args.length < 1 or args.length >= model.config.block_size:
        raise UserError(f'num and length must be at least 1, length less than {model.config.block_size}')
    try:
        if args.data:
            if len(args.data) > len(model.config.path_embd):
                raise UserError(f'{len(args.data)} data sets for {len(model.config.path_embd)} paths')
            found = [path_usage(model, document_starts(folder, tokenizer, args.num, args.length).to(machine.device)).cpu()
                     for folder in args.data]
        else:
            found = []
            for prompts in (STORIES, MATH):
                ids = [torch.tensor([[tokenizer.eot, *tokenizer.encode(p)]], device=machine.device) for p in prompts]
                found.append(torch.cat([path_usage(model, i) for i in ids]).cpu())
                for prompt, ways in zip(prompts, found[-1].tolist()):
                    print(f"{prompt!r:54}  {' -> '.join(str(way + 1) for way in ways)}")
    except ValueError as e:
        raise UserError(str(e)) from None

    n = len(model.config.path_embd) + (model.config.connection != 'share')
    names, result = args.data or ['stories', 'math'], {}
    print(f"{'domain':24}{'prompts':>8}  " + '  '.join(f'path {i + 1}' for i in range(len(model.config.path_embd)))
          + ('     mix' if model.config.connection != 'share' else '') + '   right')
    for path, (name, choices) in enumerate(zip(names, found)):
        share = [(choices == i).float().mean().item() for i in range(n)]
        layers = [[(choices[:, j] == i).float().mean().item() for i in range(n)] for j in range(choices.size(1))]
        right = path_accuracy(choices, torch.full((len(choices),), path))
        result[name] = dict(prompts=len(choices), share=share, layers=layers, right=right)
        print(f'{name:24}{len(choices):8}  ' + '  '.join(f'{100 * s:5.1f}%' for s in share) + f'  {100 * right:5.1f}%')
    paths = torch.cat([torch.full((len(choices),), path) for path, choices in enumerate(found)])
    result['accuracy'] = path_accuracy(torch.cat(found), paths)
    print(f"all: {100 * result['accuracy']:.1f}% right")
    if args.json:
        write_json(args.json, result)


if __name__ == '__main__':
    run_main(main)
