"""
Word problems: does the model's worked solution end in the right number?

    python -m papers.exact_answer out/selfmoe_math                        # on the run's own data
    python -m papers.exact_answer out/selfmoe_math --data data/toy_math   # on another data set
    python -m papers.exact_answer out/run --data val.jsonl --json F       # on rows of JSON

A problem is a question, a newline, and a worked solution. The model reads [end-of-text] + question
+ newline and goes on greedily until it writes end-of-text; the last number of its text is compared
with the last number of the given solution. In a data set's val.bin the question is the first line
of a document; a row of JSON has the fields question and generated_solution. Problems without a
number in their solution, and those that leave fewer than --max_new_tokens of the model's context,
are left out and counted. Models of chunks (of bytes, or sentences) count symbols there, padding
included.
"""

import re
from collections import Counter
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from papers.common import open_run, run_parser
from plumbing.bins import load_bin
from plumbing.checkpoint import data_folders
from plumbing.cli import UserError, between, run_main, write_json
from plumbing.text import read_rows
from plumbing.tokenizer import load_tokenizer

# in 9-5 the minus is not a sign
NUMBER = re.compile(r'(?:(?<![\w).])-)?\d+(?:,\d{3})*(?:\.\d+)?')


def last_number(text):
    """'... 4 * 288 = 1,152.' -> 1152.0; None if there is no number."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(',', '')) if numbers else None


# ---- Problems -----------------------------------------------------------------------------------

def read_problems(path):
    """[(question, solution), ...] of a .jsonl file or of a data set's validation documents."""
    path = Path(path)
    if path.suffix == '.jsonl':
        names = ['question', 'generated_solution']
        problems = [tuple(row[name] for name in names) for _, row in read_rows(path, names)]
    else:
        problems = read_val_documents(path)
    if not problems:
        raise UserError(f'{path} holds no problems (a question, a newline, a solution)')
    return problems


def read_val_documents(folder):
    tokenizer = load_tokenizer(folder)
    tokens = load_bin(folder, 'val')
    ends = np.flatnonzero(tokens == tokenizer.eot) + 1
    documents = np.split(tokens, ends)
    texts = [tokenizer.decode(ids[:-1].tolist()) for ids in documents if len(ids) > 1]
    return [tuple(text.split('\n', 1)) for text in texts if '\n' in text.strip()]


# ---- Solutions ----------------------------------------------------------------------------------

@torch.no_grad()
def complete(model, prompts, eot, max_new_tokens, batch_size=128, device='cpu'):
    """Greedy continuations of prompts (lists of ids), without end-of-text."""
    texts = [None] * len(prompts)

    def length(i):
        return len(prompts[i])
    order = sorted(range(len(prompts)), key=length)
    groups = [order]
    write = complete_batch
    if getattr(model.config, 'byte_limit', 0):
        groups = [[*group] for _, group in groupby(order, length)]
        write = complete_chunks
    batches = [group[i:i + batch_size]
               for group in groups for i in range(0, len(group), batch_size)]
    with tqdm(total=len(prompts), unit='problem', disable=None, leave=False) as bar:
        for batch in batches:
            written = write(model, [prompts[i] for i in batch], eot, max_new_tokens, device)
            for i, text in zip(batch, written):
                texts[i] = text[:text.index(eot)] if eot in text else text
            bar.update(len(batch))
    return texts


def complete_chunks(model, prompts, eot, max_new_tokens, device):
    """Prompts of one length: a model of chunks keeps its cache inside generate."""
    ids = model.generate(torch.tensor(prompts, device=device), max_new_tokens, temperature=0)
    return ids[:, len(prompts[0]):].tolist()


def complete_batch(model, prompts, eot, max_new_tokens, device):
    """All prompts start at the end of the shortest; a longer one is fed its own tokens until it
    ends. So padding is never needed, the cache computes each position once, and the result is that
    of one prompt at a time."""
    lengths = [len(prompt) for prompt in prompts]
    length = torch.tensor(lengths, device=device)
    ids = torch.full((len(prompts), max(lengths) + max_new_tokens), eot, device=device)
    for row, prompt in zip(ids, prompts):
        row[:len(prompt)] = torch.tensor(prompt, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    cache = []
    new = ids[:, :min(lengths)]
    for t in range(min(lengths), ids.size(1)):
        logits, _, _ = model(new, cache=cache)
        written = torch.where(done, eot, logits[:, -1].argmax(-1))
        ids[:, t] = torch.where(t < length, ids[:, t], written)
        new = ids[:, t:t + 1]
        done |= (t >= length) & (new[:, 0] == eot)
        if done.all():
            break
    return [row[n:n + max_new_tokens].tolist() for row, n in zip(ids, lengths)]


def exact_answer(model, tokenizer, problems, max_new_tokens, batch_size=128, device='cpu'):
    """-> a dict: the share of right answers, the numbers behind it, and every continuation."""
    fitting = []
    prompts = []
    for question, solution in problems:
        prompt = [*tokenizer.end, *tokenizer.encode(question + '\n')]
        fits = len(prompt) + max_new_tokens <= model.config.block_size
        if fits and last_number(solution) is not None:
            fitting.append((question, solution))
            prompts.append(prompt)
    if not fitting:
        raise UserError(
            f'no problem with a number in its solution leaves {max_new_tokens} tokens of the '
            f'context of {model.config.block_size}; lower --max_new_tokens')
    answers = Counter()
    examples = []
    texts = complete(model, prompts, tokenizer.eot, max_new_tokens, batch_size, device)
    for (question, solution), ids in zip(fitting, texts):
        text = tokenizer.decode(ids)
        answer = last_number(solution)
        answers[answer] += 1
        is_right = last_number(text) == answer
        examples.append(dict(question=question, solution=solution, text=text, right=is_right))
    n = len(examples)
    right = sum(example['right'] for example in examples)
    guess = answers.most_common(1)[0][1] / n             # always the most common answer
    return dict(accuracy=right / n, right=right, problems=n, left_out=len(problems) - n,
                guess=guess, examples=examples)


# ---- The command line ---------------------------------------------------------------------------

def main():
    parser = run_parser(__doc__, data=dict(
        help="a data set or a .jsonl file; the run's own data if not given"))
    parser.add_argument('--max_new_tokens', type=between(1, 10 ** 6), default=64,
                        help='longest solution; for models of chunks, in symbols')
    parser.add_argument('--batch_size', type=between(1, 10 ** 5), default=64,
                        help='problems at a time')
    args = parser.parse_args()
    model, ckpt, tokenizer, machine = open_run(args)
    data = args.data or data_folders(ckpt)[0]
    problems = read_problems(data)
    result = exact_answer(model, tokenizer, problems, args.max_new_tokens, args.batch_size,
                          machine.device)
    print(f"exact answers: {100 * result['accuracy']:.1f}%, {result['right']:,} of "
          f"{result['problems']:,} problems of {data} ({result['left_out']:,} left out; "
          f"always the most common answer: {100 * result['guess']:.1f}%)")
    if Path(data).suffix != '.jsonl':
        print('the question is the first line of a document, '
              'the answer the last number of the rest')
    if args.json:
        write_json(args.json, result)


if __name__ == '__main__':
    run_main(main)
