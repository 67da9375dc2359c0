"""
Do the official pipelines score an exported run on BLiMP as eval_blimp.py scores the run itself?

    pip install 'lm-eval[hf]'
    git clone https://github.com/babylm/evaluation-pipeline-2025
    python -m papers.parity_blimp out/moep data/blimp evaluation-pipeline-2025

It exports the run twice, without and with --bos. lm-evaluation-harness, which downloads BLiMP,
scores the first folder, BabyLM's sentence_zero_shot both, as their users run them. A row compares
one of them with us: how many pairs have the same verdict, how many paradigms the same accuracy, and
the largest difference of a sentence's log-probability. This executes code of the checkout.
"""

import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch

from eval_blimp import Sentences, evaluate, read_pairs, score_sentences
from plumbing.checkpoint import load_checkpoint, run_tokenizer
from plumbing.cli import Parser, UserError, run_main
from tools.export_hf import export

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'  # as the pipeline chooses it


# ---- Theirs -> {paradigm: accuracy}, [((good, bad), (log-probability of good, of bad))] ---------

def run_harness(folder, paradigms):
    import lm_eval
    output = lm_eval.simple_evaluate(
        model='hf', model_args=dict(pretrained=str(folder), trust_remote_code=True), batch_size=64,
        tasks=[f'blimp_{name}' for name in paradigms], bootstrap_iters=0, device=DEVICE)
    accuracy, pairs = {}, []
    for name in paradigms:
        accuracy[name] = 100 * output['results'][f'blimp_{name}']['acc,none']
        for sample in output['samples'][f'blimp_{name}']:
            texts = sample['doc']['sentence_good'], sample['doc']['sentence_bad']
            pairs.append((texts, [score for score, _ in sample['filtered_resps']]))
    return accuracy, pairs


def run_babylm(folder, data):
    """It writes only which sentence wins, so look at what its last step is given."""
    from evaluation_pipeline.sentence_zero_shot import compute_results, run
    rank = compute_results.rank_and_evaluate
    counts, pairs = {}, []

    def rank_and_look(args, results, log_probs, raw_pairs, *more):
        rank(args, results, log_probs, raw_pairs, *more)
        counts.update(results[1.0]['UID'])               # at temperature 1
        scores = zip(*(column.tolist() for column in log_probs[1.0]))
        pairs.extend(zip((pair['sentences'] for pair in raw_pairs), scores))
    argv = ['run', '--model_path_or_name', folder, '--backend', 'causal', '--task', 'blimp',
            '--data_path', data, '--output_dir', folder / 'results']
    with (mock.patch.object(sys, 'argv', [str(word) for word in argv]),
          mock.patch.object(compute_results, 'rank_and_evaluate', rank_and_look)):
        run.main()
    return {name: 100 * counts['correct'][name] / n for name, n in counts['total'].items()}, pairs


# ---- The comparison -----------------------------------------------------------------------------

def compare(title, theirs, model, tokenizer, paradigms, mode):
    """-> a row"""
    accuracy, pairs = theirs
    sentences = Sentences(paradigms, tokenizer, mode)
    scores = score_sentences(model, sentences, device=next(model.parameters()).device)
    ours = evaluate(paradigms, sentences, scores)
    same_accuracy = sum(abs(accuracy[name] - ours[name]['accuracy']) < 1e-9 for name in ours)
    same_verdict, difference = 0, 0
    for texts, (good, bad) in pairs:
        our_good, our_bad = (scores[sentences.number[text]] for text in texts)
        same_verdict += (good >= bad) == (our_good >= our_bad)
        difference = max(difference, abs(good - our_good), abs(bad - our_bad))
    mean = sum(accuracy.values()) / len(accuracy)
    return (f'{title:38} {same_verdict:6,} of {len(pairs):6,} {same_accuracy:8} of {len(ours):2} '
            f'{difference:12.6f} {mean:9.2f}')


def main():
    parser = Parser(__doc__)
    parser.add_argument('run', help="a run's folder, or one of its checkpoints")
    parser.add_argument('data', type=Path, help="a folder of BLiMP's .jsonl files, all or some")
    parser.add_argument('pipeline', type=Path, help="a clone of BabyLM's evaluation-pipeline-2025")
    args = parser.parse_args()
    if not (args.pipeline / 'evaluation_pipeline').is_dir():
        raise UserError(f'{args.pipeline} has no evaluation_pipeline: it is not the checkout')
    os.environ['TRANSFORMERS_VERBOSITY'] = 'error'
    sys.path.append(str(args.pipeline))
    paradigms = read_pairs(args.data)
    model, ckpt = load_checkpoint(args.run, DEVICE)
    tokenizer = run_tokenizer(ckpt)
    ours = model, tokenizer, paradigms
    with tempfile.TemporaryDirectory() as home:
        plain, bos = Path(home, 'plain'), Path(home, 'bos')
        export(args.run, plain)
        export(args.run, bos, bos=True)
        rows = [compare('lm-evaluation-harness, --mode harness', run_harness(plain, paradigms),
                        *ours, 'harness'),
                compare('BabyLM 2025, --mode babylm2025', run_babylm(plain, args.data),
                        *ours, 'babylm2025'),
                compare('BabyLM 2025, --mode babylm2025_bos', run_babylm(bos, args.data),
                        *ours, 'babylm2025_bos')]
    print(f"{'':38}     same verdict  same accuracy   difference  accuracy", *rows, sep='\n')


if __name__ == '__main__':
    run_main(main)
