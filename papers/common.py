"""What the scripts of this folder share: their first arguments, a run, and its validation data."""

from plumbing.bins import load_bin
from plumbing.checkpoint import load_checkpoint, run_tokenizer
from plumbing.cli import Parser, UserError
from plumbing.machine import Machine
from plumbing.tokenizer import load_meta


def run_parser(doc, run=None, data=None):
    """A parser of RUN, --data, --json and --device; run and data change the first two"""
    run = dict(help='a run folder or one of its checkpoints') | (run or {})
    data = dict(help="a data set's folder; the run's own data if not given") | (data or {})
    parser = Parser(doc)
    parser.add_argument('run', **run)
    parser.add_argument('--data', **data)
    parser.add_argument('--json', help='write the result there')
    parser.add_argument('--device', default='auto', help='cuda, mps, cpu; auto: the first there is')
    return parser


def open_run(args):
    """-> model, ckpt, tokenizer, machine"""
    machine = Machine(args.device)
    model, ckpt = load_checkpoint(args.run, machine.device)
    return model, ckpt, run_tokenizer(ckpt), machine


def val_tokens(folder, tokenizer):
    """val.bin of a data set, which must have the run's tokenizer"""
    if load_meta(folder)['tokenizer']['hash'] != tokenizer.hash:
        raise UserError(f'{folder} has another tokenizer than the run')
    return load_bin(folder, 'val')
