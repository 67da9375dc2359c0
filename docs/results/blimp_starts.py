"""
Does it matter what stands before a sentence of BLiMP? Scores of one run with several starts.

    python docs/results/blimp_starts.py out/arena/baby/strong_muon_2 --data data/blimp --device cuda

All tokens of a sentence are scored (those of a start cost both sentences of a pair the same). Only
in `babylm2025`, which has no start, the first token is read in its place and not scored.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from eval_blimp import Sentences, evaluate, mean, read_pairs, score_sentences  # noqa: E402
from plumbing.checkpoint import load_checkpoint, run_tokenizer  # noqa: E402
from plumbing.cli import Parser, run_main  # noqa: E402


def main():
    parser = Parser(__doc__)
    parser.add_argument('run')
    parser.add_argument('--data', default='data/toy_blimp', help='a folder of minimal pairs')
    parser.add_argument('--device', default='cpu', help='cpu or cuda')
    args = parser.parse_args()
    model, ckpt = load_checkpoint(args.run, args.device)
    tokenizer = run_tokenizer(ckpt)
    encode = tokenizer.encode
    before = encode('.') + encode(' It was so.')
    ways = {
        'babylm2025: no start': lambda text: encode(text),
        'harness: end-of-text, a space': lambda text: tokenizer.end + encode(' ' + text),
        'end-of-text': lambda text: tokenizer.end + encode(text),
        'a newline': lambda text: encode('\n') + encode(text),
        'a newline, a space': lambda text: encode('\n') + encode(' ' + text),
        'a full stop, a space': lambda text: encode('.') + encode(' ' + text),
        '. It was so.': lambda text: before + encode(' ' + text)}
    pairs = read_pairs(args.data)
    for name, read in ways.items():
        s = Sentences(pairs, tokenizer)
        s.ids = [read(text) for text in s.number]
        s.length = np.array([len(ids) for ids in s.ids])
        s.width = s.length - 1
        scores = score_sentences(model, s, 1024 if args.device == 'cpu' else 32768, args.device)
        found = evaluate(pairs, s, scores)
        accuracy = {paradigm: result['accuracy'] for paradigm, result in found.items()}
        print(f'{name:32} {mean(accuracy, list(pairs)):5.2f}%')


if __name__ == '__main__':
    run_main(main)
