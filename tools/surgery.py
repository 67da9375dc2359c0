"""
Rebuild trained models: compose paths, add gates or modules, prune, add adapters or merge them.

    python -m tools.surgery compose out/papaformer_path_1 out/papaformer_path_2 --out out/composed
    python -m tools.surgery prune_experts out/moduleformer --threshold 0.05 --out out/pruned
    python -m tools.surgery add_lora out/moep --rank 4 --out out/moep_lora
    python train.py --init_from=out/pruned --data=toy_math --out_dir=out/pruned_math    # train it

A surgery is a function of a model's own file, or of tools/lora.py; its arguments are options here.
One that looks at text, such as prune_experts, reads the first training windows of --data. The
result is a run's folder, which every script takes.
"""

import inspect
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from plumbing.bins import load_bin, val_batches
from plumbing.checkpoint import (build_model, copy_model, data_folders, find_surgeries,
                                 read_checkpoint, run_tokenizer, write_checkpoint)
from plumbing.cli import Parser, UserError, between, human, run_main, write_json
from plumbing.machine import Machine
from plumbing.settings import Settings, as_type, import_model, model_names, parse_value
from plumbing.tokenizer import copy_tokenizer, shared_tokenizer


def options_of(function):
    """{name: default} of a surgery's arguments; the models and the text come from elsewhere."""
    _, *parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters
            if p.kind != p.VAR_KEYWORD and p.name not in ('batches', 'usage')}


def list_surgeries():
    """Return the surgeries of all model files, with their arguments and defaults."""
    models = [import_model(name).Model for name in model_names() if '.' not in name]
    functions = dict.fromkeys(f for model in models for f in find_surgeries(model).values())
    lines = ['surgeries:']
    for function in functions:
        options = [f'--{key} {value}' for key, value in options_of(function).items()]
        options += ['--KEY VALUE of the new config'] * takes_config(function)
        lines.append(f'  {function.__module__:14}{function.__name__:18}' + ' '.join(options))
    return '\n'.join(lines)


def takes_config(function):
    return 'settings' in inspect.signature(function).parameters


def read_options(words, function, model):
    """['--threshold', '0.1'] or ['--threshold=0.1'] -> {'threshold': 0.1}, a surgery's arguments"""
    known = options_of(function)
    if takes_config(function):
        known |= asdict(model.config)
    options, words = {}, [*words]
    while words:
        key, equals, text = words.pop(0).lstrip('-').partition('=')
        key = key.replace('-', '_')
        if key not in known:
            raise UserError(f'{function.__name__} has no argument --{key}; it has '
                            f"{', '.join(known) or 'none'}")
        if not equals and not words:
            raise UserError(f'--{key} needs a value')
        value = parse_value(text if equals else words.pop(0))
        is_number = type(known[key]) in (int, float)
        options[key] = as_type(f'--{key}', value, int | float) if is_number else value
    return options


def operate(function, models, options, machine):
    """-> the new model, and a report or None"""
    torch.set_default_dtype(models[0].wte.weight.dtype)  # bfloat16, if it was imported
    first, *_ = inspect.signature(function).parameters
    if first == 'model' and len(models) > 1:
        raise UserError(f'{function.__name__} takes one run')
    try:
        with machine.device:                             # new weights are made where they are used
            result = function(models[0] if first == 'model' else models, **options)
    except (AssertionError, ValueError) as error:        # its own words; a bug keeps its traceback
        raise UserError(f'{function.__name__}: {error}') from None
    finally:
        torch.set_default_dtype(torch.float32)
    return result if isinstance(result, tuple) else (result, None)


def freeze_old(model, ckpts):
    """Train only what the surgery has added, such as gates."""
    old = {name for ckpt in ckpts for name in ckpt['weights']}
    for name, p in model.named_parameters():
        p.requires_grad_(name not in old)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError('--freeze: the surgery added nothing that could train')


def main():
    is_help = {'-h', '--help'} & {*sys.argv}
    parser = Parser(f'{__doc__}\n{list_surgeries()}' if is_help else __doc__)
    parser.add_argument('surgery', help='its name')
    parser.add_argument('runs', nargs='+', help='runs of one model, with one tokenizer')
    parser.add_argument('--out', type=Path, required=True, help='the folder of the new run')
    parser.add_argument('--freeze', action='store_true', help='train only what is added')
    parser.add_argument('--data', nargs='+', help="text to look at; the run's own if not given")
    parser.add_argument('--batches', type=between(1, 10 ** 6), default=8,
                        help='how many of it, of 16 windows')
    parser.add_argument('--seq_len', type=between(1, 10 ** 6),
                        help="tokens of a window; the model's block_size if not given")
    parser.add_argument('--seed', type=int, default=42, help='of new weights')
    parser.add_argument('--device', default='auto', help='cuda, mps, cpu; auto: the first there is')
    args, words = parser.parse_known_args()
    if any(args.out.glob('ckpt*.pt')):
        raise UserError(f'{args.out} holds a run already: choose another --out')
    ckpts = [read_checkpoint(run) for run in args.runs]
    first, folder = ckpts[0], Path(ckpts[0]['folder'])
    if len({(ckpt['model'], ckpt['tokenizer']) for ckpt in ckpts}) > 1:
        raise UserError('the runs have different models or tokenizers')
    functions = find_surgeries(import_model(first['model']).Model)
    if args.surgery not in functions:
        raise UserError(f"{first['model']} has no surgery {args.surgery}; there are "
                        f"{', '.join(functions)}")
    function = functions[args.surgery]
    if first['adapted'] and args.surgery != 'merge_lora':
        raise UserError(f'{args.runs[0]} has adapters: merge them first, with merge_lora')
    machine = Machine(args.device)
    models = [build_model(ckpt, machine.device).eval() for ckpt in ckpts]
    options, text = read_options(words, function, models[0]), {}
    if 'batches' in inspect.signature(function).parameters:
        models = [model.float() for model in models]
        T = args.seq_len or models[0].config.block_size
        folders = [Path(data) for data in args.data or data_folders(first)]
        pad = shared_tokenizer(folder, *folders).pad
        text['batches'] = [
            tuple(map(machine.send, batch)) for data in folders for batch in
            val_batches(load_bin(data, 'train')[:args.batches * 16 * T + 1], T, 16, pad)]
    before = ' + '.join(human(model.count_params()[0]) for model in models)
    torch.manual_seed(args.seed)
    model, table = operate(function, models, options | text, machine)
    model.base = models[0].base
    if args.freeze:
        freeze_old(model, ckpts)

    args.out.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(folder, args.out)
    copy_model(first['model'], args.out)
    write_json(args.out / 'log.jsonl', dict(
        iter=0, seconds=0, surgery=args.surgery, runs=args.runs, options=options, report=table))
    s = Settings(model=first['model'], data=first['settings']['data'],
                 data_dir=first['settings']['data_dir'], out_dir=str(args.out))
    write_checkpoint(args.out / 'ckpt.pt', model, model.state_dict(), s, run_tokenizer(first),
                     iter=0, words=0.0)
    for row in table or []:
        print('  ' + ', '.join(f'{key} {f"{v:.4g}" if type(v) is float else v}'
                               for key, v in row.items()))
    total, active = model.count_params()
    print(f"{args.out}: {before} -> {human(total)} parameters, {human(active)} active; train it "
          f"with: python train.py --init_from={args.out} --data=... --out_dir=...")


if __name__ == '__main__':
    run_main(main)
