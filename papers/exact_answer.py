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
    if Path(path).suffix == '.jsonl':
        names = ['question', 'generated_solution']
        return [tuple(row[name] for name in names) for _, row in read_rows(Path(path), names)]
    tokenizer = load_tokenizer(path)
    tokens = load_bin(path, 'val')
    ends = np.flatnonzero(tokens == tokenizer.eot) + 1
    documents = np.split(tokens, ends)
    texts = [tokenizer.decode(ids[:-1].tolist()) for ids in documents if len(ids) > 1]
    return [tuple(text.split('\n', 1)) for text in texts if '\n' in text.strip()]


# ---- Solutions ----------------------------------------------------------------------------------

def complete(model, prompts, eot, max_new_tokens, batch_size, device):
    """Greedy continuations of prompts (lists of ids), without end-of-text. Prompts of one length
    share a batch, so none needs padding."""
    texts = {}
    length = lambda i: len(prompts[i])
    groups = [[*group] for _, group in groupby(sorted(range(len(prompts)), key=length), length)]
    batches = [group[i:i + batch_size]
               for group in groups for i in range(0, len(group), batch_size)]
    for batch in tqdm(batches, unit='batch', disable=None, leave=False):
        ids = torch.tensor([prompts[i] for i in batch], device=device)
        written = model.generate(ids, max_new_tokens, temperature=0)[:, ids.size(1):].tolist()
        for i, text in zip(batch, written):
            texts[i] = text[:text.index(eot)] if eot in text else text
    return [texts[i] for i in range(len(prompts))]


def exact_answer(model, tokenizer, problems, max_new_tokens, batch_size, device):
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
        raise UserError('there is no problem with a number in its solution that leaves '
                        f'{max_new_tokens} tokens of the context; lower --max_new_tokens')
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
    if args.json:
        write_json(args.json, result)


if __name__ == '__main__':
    run_main(main)
