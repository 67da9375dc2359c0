"""
Word problems: does the model's worked solution end in the right number?

    python exact_answer.py out/selfmoe_math                              # the validation problems of the run's own data
    python exact_answer.py out/selfmoe_math --data data/toy_math         # of another data set
    python exact_answer.py out/run --data val.jsonl --show 3             # fields question and generated_solution

A problem is a question, a newline, and a worked solution. The model gets [end-of-text] + question + newline and goes on
greedily until it writes end-of-text; the last number of its text is compared with the last number of the given solution.
In a data set's val.bin the question is a document's first line. Problems without a number in their solution, and
those that leave fewer than --max_new_tokens of the model's context, are left out and counted.
"""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import prepare
from errors import Parser, UserError, check_writable, run_main, write_json
from machine import Machine
from train import load_checkpoint

NUMBER = re.compile(r'(?:(?<![\w).])-)?\d+(?:,\d{3})*(?:\.\d+)?')    # in 9-5 the minus is no sign


def last_number(text):
    """'... 4 * 288 = 1,152.' -> 1152.0; None if there is no number."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(',', '')) if found else None


def read_problems(path):
    """[(question, solution), ...] of a .jsonl file or of a data set's validation documents."""
    path = Path(path)
    if path.suffix != '.jsonl':
        tokenizer, tokens = prepare.load_tokenizer(path), prepare.load_bin(path, 'val')
        documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.eot) + 1)
        texts = [tokenizer.decode(d[:-1].tolist()) for d in documents if len(d) > 1]
        problems = [tuple(text.split('\n', 1)) for text in texts if '\n' in text.strip()]
    else:
        problems = []
        if not path.exists():
            raise UserError(f'there is no file {path}')
        for number, line in prepare.read_lines(path):
            if line.strip():
                try:
                    row = json.loads(line)
                    problems.append((str(row['question']), str(row['generated_solution'])))
                except (ValueError, KeyError, TypeError):
                    raise UserError(f'{path}:{number}: not a row with question and generated_solution') from None
    if not problems:
        raise UserError(f'{path} holds no problems (a question, a newline, a solution)')
    return problems


@torch.no_grad()
def complete(model, prompts, eot, max_new_tokens, batch_size=128, device='cpu'):
    """Greedy continuations of prompts (lists of ids), without end-of-text. Prompts of a batch may differ in length: all
    start at the shortest one's end, and a longer one is fed its own tokens until it ends. So padding is never needed,
    and with a cache each position is computed once; the result is that of one prompt at a time."""
    out, order = [None] * len(prompts), sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    with tqdm(total=len(prompts), unit='problem', disable=None, leave=False) as bar:
        for some in (order[i:i + batch_size] for i in range(0, len(order), batch_size)):
            length = torch.tensor([len(prompts[i]) for i in some], device=device)
            ids = torch.full((len(some), int(length.max()) + max_new_tokens), eot, device=device)
            for row, i in enumerate(some):
                ids[row, :len(prompts[i])] = torch.tensor(prompts[i], device=device)
            done, cache, new = torch.zeros(len(some), dtype=torch.bool, device=device), [], ids[:, :int(length.min())]
            for t in range(int(length.min()), ids.size(1)):
                best = model(new, cache=cache)[0][:, -1].argmax(-1)
                ids[:, t] = torch.where(t < length, ids[:, t], torch.where(done, eot, best))
                new = ids[:, t:t + 1]
                done |= (t >= length) & (new[:, 0] == eot)
                if done.all():
                    break
            for row, i in enumerate(some):
                text = ids[row, len(prompts[i]):len(prompts[i]) + max_new_tokens].tolist()
                out[i] = text[:text.index(eot)] if eot in text else text
            bar.update(len(some))
    return out


def exact_answer(model, tokenizer, problems, max_new_tokens, batch_size=128, device='cpu'):
    """-> a dict: the share of right answers, the numbers behind it, and every continuation."""
    fitting = []
    for question, solution in problems:
        prompt = [tokenizer.eot, *tokenizer.encode(question + '\n')]
        if last_number(solution) is not None and len(prompt) + max_new_tokens <= model.config.block_size:
            fitting.append((question, solution, prompt))
    if not fitting:
        raise UserError(f'no problem leaves {max_new_tokens} tokens of the context of {model.config.block_size}; '
                        'lower --max_new_tokens')
    texts = complete(model, [p for _, _, p in fitting], tokenizer.eot, max_new_tokens, batch_size, device)
    texts = [tokenizer.decode(text) for text in texts]
    answers = [last_number(solution) for _, solution, _ in fitting]
    right = [last_number(text) == answer for text, answer in zip(texts, answers)]
    return dict(accuracy=sum(right) / len(right), right=sum(right), problems=len(right),
                left_out=len(problems) - len(fitting), guess=Counter(answers).most_common(1)[0][1] / len(right),
                examples=[dict(question=q, solution=s, text=t, right=r) for (q, s, _), t, r in zip(fitting, texts, right)])


def main():
    parser = Parser(__doc__)
    parser.add_argument('run', help='a run folder (out/selfmoe_math) or one of its checkpoints')
    parser.add_argument('--data', help="a data set's folder or a .jsonl file; the run's own data if not given")
    parser.add_argument('--num', type=int, help='so many problems, from the front; all if not given')
    parser.add_argument('--max_new_tokens', type=int, default=64, help='longest solution')
    parser.add_argument('--batch_size', type=int, default=128)
    parser.add_argument('--show', type=int, default=0, metavar='N', help='print the first N problems and what was written')
    parser.add_argument('--json', help='write the result and every continuation there')
    parser.add_argument('--device', default='auto', help='cuda, mps or cpu, whichever is there')
    args = parser.parse_args()
    if args.max_new_tokens < 1 or args.batch_size < 1 or (args.num is not None and args.num < 1):
        raise UserError('num, max_new_tokens and batch_size must be at least 1')
    check_writable(args.json)
    machine = Machine(args.device)
    model, ckpt = load_checkpoint(args.run, machine.device)
    tokenizer, used = prepare.load_tokenizer(ckpt['folder']), ckpt['settings']['data']
    if tokenizer.kind == 'chunks':
        raise UserError('exact_answer.py reads models of tokens, not of chunks of bytes')
    if not args.data and not isinstance(used, str) and len(used) > 1:
        one = Path(ckpt['settings']['data_dir'], next(iter(used)))
        raise UserError(f'the run was trained on several data sets: choose one, as --data={one}')
    data = args.data or Path(ckpt['settings']['data_dir'], used if isinstance(used, str) else next(iter(used)))
    problems = read_problems(data)[:args.num]
    result = exact_answer(model, tokenizer, problems, args.max_new_tokens, args.batch_size, machine.device)
    for example in result['examples'][:args.show]:
        print(f"{example['question']}\n-> {example['text']}\n   {'right' if example['right'] else 'wrong'}: "
              f"{example['solution']}\n")
    print(f"exact answers: {100 * result['accuracy']:.1f}%, {result['right']:,} of {result['problems']:,} problems of {data} "
          f"({result['left_out']:,} left out; always the commonest answer: {100 * result['guess']:.1f}%)")
    if args.json:
        write_json(args.json, result)


if __name__ == '__main__':
    run_main(main)
