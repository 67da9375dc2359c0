"""
Bad input for every command, made from a seed.

    python tests/fuzz.py --cases 3000 --seed 1 --jobs 2     # what goes wrong, case by case, then by cause
    python tests/fuzz.py --cases 3000 --only train          # the cases of one command
    python tests/fuzz.py --seed 1 --case 17                 # one case: its command, output and files

A case is a command with one thing wrong: a checkpoint, a data set, a config, a log, a text, an option. It
must succeed, or end in one line of at most 300 characters with exit code 2, in 30 s and 2 GiB, and leave
nothing behind that it was not to write. Tiny runs are trained first; every case gets a copy of them. A case
runs in a fork of this process, which has imported everything: that saves seconds each.
"""

import argparse
import bz2
import contextlib
import dataclasses
import faulthandler
import gzip
import importlib
import io
import json
import lzma
import multiprocessing
import os
import pickle
import random
import re
import resource
import runpy
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from plumbing.settings import Settings  # noqa: E402
from plumbing.toy import Dice, story  # noqa: E402

SECONDS, MIB, COLUMNS = 30, 2048, 300
PATIENCE = 10                           # seconds, after which long work is stopped by SIGTERM


@dataclasses.dataclass
class Case:
    command: str                        # train.py, tools.exact_answer, ...
    args: list
    about: str = ''                     # what is wrong, in words
    must_fail: bool = False             # success would be a wrong result
    must_succeed: bool = False          # nothing is wrong
    is_long: bool = False               # much work is asked for: to be still at it is no fault
    ascii: bool = False                 # a terminal that knows ASCII only
    feed: tuple = ()                    # (a FIFO that is read, what comes through it)
    disk: int = 2 ** 33                 # bytes that a file may have


# ---- What every case starts from ----------------------------------------------------------------

SHORT = dict(batch_size=2, max_iters=3, sample_tokens=2, eval_tokens=64, log_interval=1)
SIZES = dict(SHORT, save_interval=2, block_size=64, n_layer=2, n_head=2, n_embd=16)
STREAM = dict(stream=True, memory=8)
BOTH = dict(toy_stories=(0.0, 1.0), toy_math=(0.0, 1.0))
CONFIGS = dict(
    moep=dict(SIZES, model='moep', n_parallel=1, n_head_parallel=1, n_embd_parallel=16, n_block=2,
              n_expert=2, top_k=1, checkpoint_words=[100]),
    modules=dict(SIZES, **STREAM, model='moduleformer', n_att=2, d_att=8, n_ffd=2, d_ffd=16, top_k=1,
                 d_router=8),
    moduleformer=dict(SHORT, **STREAM, model='moduleformer', init_from='out/modules',
                      surgery='insert_experts', surgery_args=dict(n_att=1, n_ffd=1)),
    decoder=dict(SIZES, model='selfmoe', n_kv_head=1),
    selfmoe=dict(SHORT, model='selfmoe', init_from='out/decoder', surgery='add_gates',
                 surgery_args=dict(kind='matrix')),
    path_1=dict(SIZES, model='papaformer', n_parallel=0),
    path_2=dict(SIZES, model='papaformer', n_parallel=0, data='toy_math'),
    papaformer=dict(SHORT, model='papaformer', init_from=['out/path_1', 'out/path_2'], surgery='compose',
                    surgery_args=dict(connection='share'), data=BOTH),
    paths=dict(SIZES, model='papaformer', n_parallel=1, path_embd=[8, 8], path_head=[1, 1],
               connection='gumbel1'),
    stlm=dict(SIZES, model='stlm', data='toy_bytes', vocab_size=259, block_size=80, byte_limit=4,
              byte_embd=8, byte_layer=1, byte_head=1, n_kv_head=1, ffn_hidden=16),
    stlm_depth=dict(SIZES, model='stlm_depth', n_layer=3, n_kv_head=1, ffn_hidden=16, capacity=0.25,
                    exit_loss=True, aux_weights=dict(forecast=0.01, exit=1.0)),
    lora=dict(SHORT, model='moep', init_from='out/moep', surgery='lora.add_lora', surgery_args=dict(rank=2)))
# configs whose model is not made from another run, and runs whose files are spoilt
FRESH = ('moep', 'modules', 'decoder', 'paths', 'stlm', 'stlm_depth')
RUNS = ('moep', 'moduleformer', 'selfmoe', 'papaformer', 'stlm', 'stlm_depth', 'lora')
WIKI = ('<mediawiki><page><title>A</title><ns>0</ns><revision><text>{text}</text></revision></page>'
        '</mediawiki>')


def make_stock(stock):
    """Tiny data sets and runs, as the commands themselves make them."""
    dice = Dice('fuzz')
    stories = [story(dice) for _ in range(40)]
    sums = [(f'{a} + {b} = ?', f'It is {a + b}.') for a in range(12) for b in range(12)]
    pairs = [(f'The {noun}s are happy.', f'The {noun}s is happy.') for noun in ('dog', 'cat', 'bird')]
    pairs = [dict(sentence_good=good, sentence_bad=bad) for good, bad in pairs]
    people = [dict(sentence='Tom is here.', label='he'), dict(sentence='Sue is here.', label='she')]
    rows = {
        'raw/stories.jsonl': [dict(text=text) for text in stories],
        'raw/problems.jsonl': [dict(question=q, generated_solution=a) for q, a in sums],
        'data/toy_blimp/number.jsonl': pairs,
        'data/toy_blimp/other.jsonl': pairs,
        'data/toy_glue/toy.train.jsonl': people * 4,
        'data/toy_glue/toy.valid.jsonl': people}
    for name, some in rows.items():
        (stock / name).parent.mkdir(parents=True, exist_ok=True)
        (stock / name).write_text(''.join(json.dumps(row) + '\n' for row in some))
    (stock / 'raw/book.txt').write_text('\n\n'.join(stories[:9]) + '\n')
    (stock / 'raw/bomb.gz').write_bytes(gzip.compress((b'a ' * 31 + b'\n') * 2 ** 16) * 128)     # 0.5 GB

    text = ['prepare.py', 'text', '--val_fraction=0.1', '--input']
    same = '--tokenizer=data/toy_stories'
    must(stock, *text, 'raw/stories.jsonl', '--name=toy_stories', '--vocab_size=300')
    must(stock, *text, 'raw/problems.jsonl', '--name=toy_math', same, '--field=question,generated_solution')
    must(stock, *text, 'raw/stories.jsonl', '--name=toy_bytes', same, '--chunks=4')
    (stock / 'data/toy_lingo').mkdir()                   # nobody reads it, but nobody makes it either
    (stock / 'config').mkdir()
    for name, keys in CONFIGS.items():
        lines = [f'{key} = {value!r}\n' for key, value in keys.items()]
        (stock / f'config/{name}.py').write_text(''.join(lines))
        must(stock, 'train.py', f'config/{name}.py')


def must(folder, command, *args):
    code, out, err, *_ = run(Case(command, list(args)), folder)
    if code:
        sys.exit(f'{command} {args}: exit {code}\n{out}\n{err}')


TRAIN = ['--max_iters=5', '--sample_tokens=2', '--eval_tokens=64', '--log_interval=1']


def data_of(model):
    return 'toy_bytes' if model == 'stlm' else 'toy_stories'


def base(rng, command, model):
    """The arguments of a command that succeeds."""
    name = f'out/{model}'
    if command == 'prepare.py':
        return ['text', '--name=mine', '--input', 'raw/book.txt', '--vocab_size=300']
    if command == 'train.py' and rng.random() < 0.3:
        keys = [f"--model={CONFIGS[model]['model']}", f'--data={data_of(model)}', '--batch_size=2', *TRAIN]
        return [f'--init_from={name}', '--out_dir=out/new', *keys]
    if command == 'train.py':
        return [f'config/{model}.py', rng.choice(['--resume'] * 6 + ['--overwrite']), *TRAIN]
    looks = ['--num=1', '--next=3', '--prompt=The dog']
    if model in ('moep', 'moduleformer', 'lora'):
        looks.append('--routes')
    return [name] + {
        'sample.py': ['--max_new_tokens=8', rng.choice(looks)],
        'eval_blimp.py': ['--data=data/toy_blimp'],
        'finetune.py': ['--data=data/toy_glue', '--epochs=1', '--seeds=1', '--num=4', '--batch_size=4'],
        'tools.exact_answer': ['--data=raw/problems.jsonl', '--num=4', '--max_new_tokens=8'],
        'tools.eval_length': ['--length=64', f'--data=data/{data_of(model)}'],
        'tools.prune_curve': ['--thresholds', '0', '0.5'],
        'tools.path_usage': ['--data', 'data/toy_stories', 'data/toy_math', '--num=4', '--length=8']}[command]


# ---- Odd values ---------------------------------------------------------------------------------

NAN, INF = float('nan'), float('inf')
NUMBERS = [NAN, INF, -INF, -1, 0, 1, 2, 3, 0.5, 1e-320, 1e9, 10 ** 5, 10 ** 9, 10 ** 19, 10 ** 400,
           -10 ** 400]
PLAIN = [*NUMBERS, '', 'x', 'x' * 10 ** 5, '\0', '\ud800', '../..', 'os.system', [], [[]], [None], [1, 2],
         {}, {'x': [1]}, None, True, False]              # what JSON can hold
OBJECTS = [b'', b'\0' * 9, (), 1j, {1, 2}, torch.float16, torch.Size([10 ** 9]), torch.device('cpu'),
           torch.zeros(2), torch.zeros(1).expand(10 ** 10)]      # and what a checkpoint can
EVIL = '__import__("os").system("touch EVIL")'
LORA = [{'rank': 10 ** 9}, {'rank': -1}, {'rank': NAN}, {'rank': 2, 'evil': 1}, {'alpha': NAN},
        {'only': '('}, []]
ADAPTED = [*([('lora.add_lora', args)] for args in LORA), [('lora.add_lora', {'rank': 2})] * 2,
           [('timeit.timeit', {'stmt': EVIL, 'number': 1})], [('os.system', {'command': 'touch EVIL'})],
           [('lora.merge_lora', {})], [('add_lora', {})], [(None, {})], ['lora.add_lora'], [()], [1], 'xy', 7]
DIGITS = ['nan', 'inf', '-inf', '1e999', '-1', '0', '1', '0.5', '1e-320', '1000000000', '1' + '0' * 19,
          '1' + '0' * 400, '9' * 5000]
WORDS = ['', ' ', 'x', 'x' * 10 ** 5, '\udcff', 'é', '../..', 'nowhere', 'None', 'True', '[]', '{}', '-',
         'out/moep', 'data/toy_stories', 'raw/book.txt']
SUMS = ['1e999', '1e999 - 1e999', '-1', '0', '1', '2', '3', '0.5', '1e-320', '1e300', '10**5', '10**9',
        '10**19', '10**400', '1e9', '1e19', '9**9**9', '10**-10**9', '1 << 10**9', '1/0', '0**-1']
EXPRESSIONS = [
    *SUMS, "'x' * 10**9", '[0] * 10**9', '[[0] * 1000] * 1000000', "b'x' * 10**10", "'%9999999999d' % 3",
    '(' * 3000 + ')' * 3000, '[' * 3000 + ']' * 3000, '-' * 3000 + '1', '1+' * 3000 + '1', '1' * 5000,
    '1 @ 2', '...', '[]', '{}', "''", 'None', 'True', "'\\0'", "'\\ud800'", '[[]]', '[1]', '[-1]', '(1, 2)',
    "'x' * 100000", '{[]: 1}', '{**{}}', '*[1]', 'nan', "float('nan')", EVIL, '1j', '().__class__',
    'lambda: 0', "f'{1}'", '[i for i in (1,)]', '(i := 1)', 'dict(a=1, **{"b": 2})', 'dict(1)', 'not 1',
    '1 if 1 else 2', "{'x': nan}", "{'toy_stories': (0, 1, 1e12)}", "{'toy_stories': (0, 1e-9)}",
    "{'toy_stories': 1}", "{'': (0, 1)}", "{'block_balance': 1e999}", "'toy_stories,toy_math'",
    "['out/moep']", "'timeit.timeit'", "'lora.merge_lora'", 'dict(rank=10**9)']
LINES = [b'\0', b'\xff\xfe', '\ufeff'.encode(), b'x = y = 1', b'seed: int = 1', b'seed += 1', b'import os',
         b'"""', b'if 1:\n    seed = 1', b'seed =', b'a, b = 1, 2', b'seed.x = 1', b'seed[0] = 1',
         b'unknown = 1', b'del seed', b'seed = 1\r\n', b'\tseed = 1', b'#' * 10 ** 6, b'# x\n' * 10 ** 5,
         'seed = "é"'.encode('latin-1')]
DEVICES = ['meta', 'mkldnn', 'cuda', 'cuda:99', 'cpu:7', 'mps', 'xpu', 'vulkan', '', 'cpu:', 'x' * 9999]
NANOGPT = ['lr=3', 'wandb_log=True', 'wandb_project=x', 'eval_iters=9', 'num_samples=3', 'start=x',
           'dataset=x', 'lr_decay_iters=9', 'decay_lr=False', 'eval_only', 'always_save_checkpoint=True',
           'init_from=scratch', 'init_from=gpt2', 'backend=nccl', 'bias=False', 'compile=maybe']


def show(value):
    if isinstance(value, torch.Tensor):
        return f'a tensor {tuple(value.shape)}'
    text = repr(value)
    return text if len(text) < 60 else f'{text[:40]}... of {len(text)}'


def odd_tensor(rng, x):
    """A tensor that is not what it was, and the word for it."""
    kinds = dict(
        nan=lambda: x * NAN,
        one_nan=lambda: x.flatten().index_fill(0, torch.tensor(0), NAN).view(x.shape),
        inf=lambda: x + INF,
        huge=lambda: x * 1e38,
        empty=lambda: x[:0],
        scalar=lambda: torch.tensor(1.0),
        wider=lambda: torch.cat([x, x], -1),
        transposed=lambda: x.mT,
        half=lambda: x.half(),
        double=lambda: x.double(),
        whole=lambda: x.to(torch.int8),
        complex=lambda: x.to(torch.complex64),
        bool=lambda: x.bool(),
        meta=lambda: x.to('meta'),
        sparse=lambda: x.to_sparse(),
        csr=lambda: x.to_sparse_csr(),
        repeated=lambda: x.flatten()[:1].expand(x.numel()).view(x.shape),
        expanded=lambda: torch.zeros(1).expand(10 ** 10),
        nested=lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        parameter=lambda: torch.nn.Parameter(x))
    name = rng.choice(list(kinds))
    try:
        return kinds[name](), name
    except (RuntimeError, IndexError):                   # not of every shape and type
        return torch.zeros(0), 'empty'


STILL_FITS = ('huge', 'scalar', 'transposed', 'half', 'double', 'whole', 'complex', 'bool', 'sparse', 'csr',
              'repeated', 'parameter')                   # such weights may be taken


def mutate(rng, value, odd, deeper=0.85):
    """value with one thing in it replaced, removed or added -> it, and what was done."""
    goes_in = rng.random() < deeper
    chance = rng.random()
    if isinstance(value, dict) and value and goes_in:
        key = rng.choice(list(value))
        if chance < 0.1:
            return {k: v for k, v in value.items() if k != key}, f'{key} is missing'
        if chance < 0.15:
            return {**value, rng.choice(['x', '', 1, 'x' * 1000, None]): rng.choice(odd)}, 'one more'
        part, about = mutate(rng, value[key], odd)
        return {**value, key: part}, f'{key}: {about}'
    if isinstance(value, (list, tuple)) and value and goes_in:
        at = rng.randrange(len(value))
        if chance < 0.2:
            return type(value)([*value[:at], *value[at + 1:]]), f'{at} is missing'
        if chance < 0.3:
            return type(value)([*value, rng.choice(odd)]), 'one more'
        part, about = mutate(rng, value[at], odd)
        return type(value)([*value[:at], part, *value[at + 1:]]), f'{at}: {about}'
    if isinstance(value, torch.Tensor) and goes_in:
        return odd_tensor(rng, value)
    if isinstance(value, (int, float)) and chance < 0.7:
        odd = NUMBERS
    new = rng.choice(odd)
    return new, show(new)


def damage(rng, path):
    """Do something to a file, whatever it holds -> what was done."""
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    flipped = bytearray(data)
    for _ in range(rng.choice([1, 10, 100])):
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    contents = dict(
        truncated=data[:at], cut=data[:-rng.choice([1, 2, 30])], empty=b'', flipped=bytes(flipped),
        garbage=rng.randbytes(1000), zeros=b'\0' * len(data), spoilt=data[:at] + rng.randbytes(9) + data[at:],
        longer=data + data[-99:], twice=data + data, deep=b'[' * 10 ** 5, other=b'[1, 2]\n',
        pickle=pickle.dumps({'model': Evil()}), zip=evil_zip())
    ways = dict(
        missing=lambda: None,
        folder=path.mkdir,
        fifo=lambda: os.mkfifo(path),
        loop=lambda: path.symlink_to(path.name),
        dangling=lambda: path.symlink_to('nowhere'),
        immense=lambda: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2 ** 33))
    way = rng.choice([*contents, *ways])
    path.unlink()
    if way in contents:
        path.write_bytes(contents[way])
    else:
        ways[way]()
    return f'{path.parent.name}/{path.name} {way}'


class Evil:
    """To unpickle it makes a file that should not be there."""

    def __reduce__(self):
        return os.system, ('touch EVIL',)


def evil_zip():
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w') as pack:
        pack.writestr('archive/data.pkl', pickle.dumps({'model': Evil()}))
        pack.writestr('../../outside.txt', 'x')
    return file.getvalue()


# ---- The faults. Each takes a folder with the stock in it, spoils it, and gives a case ----------


def nothing(rng, folder, command, model):
    """If a command fails anyway, no fault would show."""
    model = rng.choice(READS.get(command, RUNS))
    return Case(command, base(rng, command, model), 'nothing wrong', must_succeed=True)


def bad_entry(rng, folder, command, model):
    """One entry of a checkpoint that is whole otherwise."""
    path = folder / f'out/{model}/ckpt.pt'
    ckpt = torch.load(path, weights_only=True)
    case = Case(command, base(rng, command, model))
    top = rng.choice(['config', 'config', 'weights', 'weights', 'adapted', 'model', 'tokenizer', 'settings'])
    if command == 'train.py' or rng.random() < 0.1:
        top = rng.choice([top, *ckpt, 'optimizer', 'optimizer'])
    chance = rng.random()
    if chance < 0.05:
        del ckpt[top]
        case.about = f'{top} is missing'
    elif top == 'adapted' and chance < 0.7:
        ckpt[top] = rng.choice(ADAPTED)
        case.about = f'adapted: {show(ckpt[top])}'
    elif top == 'model' and chance < 0.7:
        ckpt[top] = rng.choice([*RUNS, 'os', 'train', 'tests.conftest', 'moep.py', 'config.moep'])
        case.about = f'model: {ckpt[top]}'
    elif top == 'config' and chance < 0.15:
        case.about = grow(rng, ckpt)
    else:
        ckpt[top], done = mutate(rng, ckpt[top], PLAIN + OBJECTS, 0.9)
        case.about = f'{top}: {done}'
        fits = done.endswith(STILL_FITS)
        if command not in ('sample.py', 'tools.exact_answer', 'train.py'):       # which write text
            fits = fits or done.endswith(('nan', 'inf'))
        case.must_fail = top == 'weights' and not fits and '--overwrite' not in case.args
    torch.save(ckpt, path)
    return case


def grow(rng, ckpt):
    """A small file that declares a large model: its weights repeat one number, their shapes fit."""
    size = rng.choice([10 ** 8, 10 ** 9, 10 ** 12])
    had = ckpt['config']['vocab_size']
    ckpt['config']['vocab_size'] = size
    for name, x in ckpt['weights'].items():
        if had in x.shape:
            shape = [size if n == had else n for n in x.shape]
            ckpt['weights'][name] = torch.zeros(1).expand(shape)
    return f'a vocabulary of {size:,} in weights that repeat a number'


def bad_file(rng, folder, command, model):
    """A checkpoint that is none, or not where it should be."""
    path = folder / f'out/{model}/ckpt.pt'
    case = Case(command, base(rng, command, model))
    chance = rng.random()
    if chance < 0.1:
        torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
        case.about = 'the older format of torch.save'
    elif chance < 0.2:
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))
        case.about = 'TorchScript'
    elif chance < 0.3 and command != 'train.py':
        case.args[0] += rng.choice(['/ckpt.pt', '/ckpt_100.pt', '/../..', 'x', '/', '/log.jsonl', '\udcff'])
        case.about = f'the run is {show(case.args[0])}'
    else:
        case.about = damage(rng, path)
        is_read = '--overwrite' not in case.args and (path.exists() or '--resume' not in case.args)
        case.must_fail = is_read and not case.about.endswith(('flipped', 'spoilt', 'longer', 'twice'))
    return case


def bad_meta(rng, folder, command, model):
    """meta.json, the tokenizer or a bin, of the run or of its data."""
    case = Case(command, base(rng, command, model))
    home = folder / f'out/{model}'
    if command not in ('sample.py', 'eval_blimp.py', 'finetune.py') and rng.random() < 0.8:
        home = folder / 'data' / rng.choice([data_of(model)] * 3 + ['toy_math'])
    if command == 'prepare.py':
        case.args[-1] = f'--tokenizer={home.relative_to(folder)}'
    if command == 'tools.exact_answer':
        case.args[1] = f'--data=data/{rng.choice([home.name, "toy_math"])}'
    path = rng.choice([p for p in sorted(home.iterdir()) if p.suffix in ('.tiktoken', '.bin', '.json')])
    if path.suffix == '.json' or rng.random() < 0.5:
        path = home / 'meta.json'
        names = ['bpe', 'gpt2', 'neox', 'bytes', 'chunks', '/etc/passwd', '../../raw/book.txt', 256, 65536]
        meta, done = mutate(rng, json.loads(path.read_text()), PLAIN + names, 0.95)
        case.about = f'{home.name}/meta.json: {done}'
        path.write_text(json.dumps(meta))
        if rng.random() < 0.2:
            case.about = damage(rng, path)
    elif path.suffix == '.bin' and rng.random() < 0.5:
        path.write_bytes(b'\xff' * path.stat().st_size)
        case.about = f'{home.name}/{path.name}: ids beyond the vocabulary'
        case.must_fail = command == 'train.py' and model == 'moep' and home.name == 'toy_stories'
    else:
        case.about = damage(rng, path)
    return case


def bad_option(rng, folder, command, model):
    """An option with a value that no one expects, or --json to an odd place."""
    kinds = r"add_argument\('--(\w+)'(?:, nargs='\+')?(?:, type=(\w+))?"
    options = re.findall(kinds, script_of(command).read_text())
    option, kind = rng.choice(options)
    value = rng.choice(DIGITS + WORDS)
    if kind in ('int', 'float', 'number') and rng.random() < 0.8:
        value = rng.choice(DIGITS)
    elif option == 'device':
        value = rng.choice(DEVICES)
    elif option in ('json', 'plot', 'out') and rng.random() < 0.7:
        value = odd_target(rng, folder)
    case = Case(command, base(rng, command, model), f'--{option} {show(value)}')
    if option == 'tokenizer':
        case.args.pop()                                  # --vocab_size, which excludes it
    case.args += rng.choice([[f'--{option}={value}'], [f'--{option}', value]])
    case.is_long = option in ('max_new_tokens', 'num', 'epochs')
    return case


def odd_target(rng, folder):
    """Where a result can or cannot be written. No device of the machine: writing might replace it."""
    kind = rng.choice(['missing/r.json', 'data', 'r.json', 'loop', 'pipe', 'full', 'x' * 300, 'raw/x/r'])
    if kind == 'loop':
        (folder / kind).symlink_to('loop')
    if kind == 'pipe':
        os.mkfifo(folder / kind)
    if kind == 'full' and os.geteuid() == 0:
        os.mknod(folder / kind, stat.S_IFCHR | 0o666, os.makedev(1, 7))
    return kind


def bad_setting(rng, folder, command, model):
    """A key of train.py or of the model, on the command line or in the config."""
    model = rng.choice(FRESH)
    module = importlib.import_module(CONFIGS[model]['model'])
    fields = [f for owner in (Settings, module.Config) for f in dataclasses.fields(owner)]
    field = rng.choice([f for f in fields if f.name not in ('max_iters', 'compile')])  # long, but legal
    value = rng.choice(EXPRESSIONS + DIGITS + WORDS)
    if field.name == 'device':
        value = rng.choice(DEVICES)
    elif (field.default is None or isinstance(field.default, (int, float))) and rng.random() < 0.6:
        value = rng.choice(SUMS)
    case = Case(command, [f'config/{model}.py', *TRAIN], f'{field.name} = {show(value)}')
    if field.name == 'epochs':
        case.args.remove('--max_iters=5')
    case.is_long = field.name in ('sample_tokens', 'epochs')
    case.args += rng.choice([['--resume'], ['--out_dir=out/new'], ['--out_dir=out/new']])
    form = rng.random()
    if form < 0.4:
        with open(folder / f'config/{model}.py', 'a', errors='surrogateescape') as config:
            config.write(f'{field.name} = {value}\n')
    elif form < 0.9:
        case.args.append(f'--{field.name}={value}')
    else:
        case.args += [f'--{field.name}', value]
    return case


def bad_config(rng, folder, command, model):
    """A config that is no plain assignments; nanoGPT's names; loose words."""
    case = Case(command, [f'config/{model}.py', *TRAIN, '--out_dir=out/new'])
    path = folder / f'config/{model}.py'
    chance = rng.random()
    if chance < 0.4:
        line = rng.choice(LINES)
        lines = path.read_bytes().splitlines()
        lines.insert(rng.randrange(len(lines) + 1), line)
        path.write_bytes(b'\n'.join(lines))
        case.about = f'config with {show(line)}'
    elif chance < 0.6:
        case.about = damage(rng, path)
        case.is_long = path.is_fifo()                    # somebody may still write into it
    elif chance < 0.8:
        key = rng.choice(NANOGPT)
        case.args += rng.choice([[f'--{key}'], f'--{key}'.split('='), [key]])
        case.about = f"nanoGPT's {key}"
    else:
        key = rng.choice([*vars(Settings()), 'x' * 9999, '', '-', '__class__', 'batch-size', '\udcff'])
        value = rng.choice(DIGITS + WORDS)
        case.args += rng.choice([[f'--{key}'], [f'--{key}', value], [f'{key}={value}'], [value, f'--{key}']])
        case.about = f'{show(key)} and {show(value)}'
    return case


def bad_log(rng, folder, command, model):
    about = damage(rng, folder / f'out/{model}/log.jsonl')
    return Case(command, [f'config/{model}.py', '--resume', *TRAIN], about)


def small_disk(rng, folder, command, model):
    """The disk is full: no file may grow beyond some bytes, in which stdout and stderr fit."""
    case = Case(command, base(rng, command, model), disk=rng.choice([4096, 16384, 65536]))
    if command not in ('train.py', 'prepare.py'):
        case.args.append('--json=r.json')
    case.about = f'no file over {case.disk} bytes'
    return case


def bad_text(rng, folder, command, model):
    """Text for prepare.py that is odd, broken or none, under any name."""
    book = (folder / 'raw/book.txt').read_bytes()
    rows = (folder / 'raw/stories.jsonl').read_text()
    letter = rng.choice(' \t\n\ra.1é中\u0301\u200b\0\x85\u2028').encode()
    unclosed = rng.choice(['&lt;ref', '&lt;!--', 'http', '[[', '{{', '{|', '[[File:', "''", ' ', '\n=='])
    row, done = mutate(rng, dict(text='A word.'), PLAIN)
    entities = ''.join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip('abcdefgh', 'bcdefghi'))
    laughs = f'<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa">{entities}]>{WIKI.format(text="&i;")}'
    kinds = dict(
        txt={
            f'a million {letter}': book + letter * 10 ** 6 + book,
            f'half a million {letter} and a': (letter + b'a') * (5 * 10 ** 5),
            'four thousand blank lines': b'a line\n' + b'\n' * 2000 + b'x\n' + b' \n' * 2000,
            'half a character': book + b'\xed\xa0\x80',
            'UTF-16': book.decode().encode('utf-16'),
            'garbage': book + rng.randbytes(99),
            'nothing': b'',
            'blanks': b' \n' * 99,
            'ends of text': b'<|endoftext|>' * 9999,
            'a bomb': (folder / 'raw/bomb.gz').read_bytes(),
            'a book': book},
        jsonl={
            'brackets': b'{"text": ' + b'[' * 10 ** 5,
            'half a character': b'{"text": "\\ud800"}\n',
            'a long number': b'{"text": ' + b'1' * 5000 + b'}',
            f'a row with {done}': f'{rows}{json.dumps(row)}\n'.encode(),
            'no row': book},
        xml={
            f'many {unclosed}': WIKI.format(text=unclosed * 10 ** 5).encode(),
            'no title': WIKI.format(text='x').replace('<title>A</title>', '').encode(),
            'a billion laughs': laughs.encode(),
            'half of it': WIKI.encode()[:60]})
    suffix = rng.choice(['txt', 'txt', 'jsonl', 'xml'])
    what = rng.choice(list(kinds[suffix]))
    content = kinds[suffix][what]
    suffix = rng.choice([f'.{suffix}'] * 8 + ['.jsonl', '.TXT', '.csv', '.md', '', '.zip', '.train'])
    pack = rng.choice(['', '', '', '.gz', '.xz', '.bz2'])
    if what == 'a bomb':
        pack = '.gz'
    elif pack:
        packed = {'.gz': gzip.compress, '.xz': lzma.compress, '.bz2': bz2.compress}[pack](content)
        content = rng.choice([packed, packed[:len(packed) // 2], packed[:-1], content])
    path = folder / f'raw/x{suffix}{pack}'
    case = Case(command, ['text', '--name=mine', '--input', f'raw/{path.name}', 'raw/book.txt'])
    case.about = f'{what} in {path.name}'
    case.args.append(rng.choice(['--vocab_size=300', '--tokenizer=bytes', '--tokenizer=data/toy_stories']))
    case.args += rng.choice([[], [], ['--chunks=4'], ['--split=blank'], ['--split=row'],
                             ['--split=passage'], ['--split=file'], ['--split=eot']])
    chance = rng.random()
    if chance < 0.1:
        os.mkfifo(path)
        case.feed = (path, content[:2 ** 16])
        case.about += ', a FIFO'
    else:
        path.write_bytes(content)
    if chance > 0.9:
        case.args[3] = rng.choice(['raw', 'nowhere', 'data', '.', '..', 'data/toy_stories', 'raw/x*'])
        case.about += f', but read {case.args[3]}'
    return case


def bad_archive(rng, folder, command, model):
    """Zip files that were downloaded for prepare.py babylm."""
    raw = folder / 'data/raw/babylm'
    raw.mkdir(parents=True)
    name = rng.choice(['a.train', '../a.txt', '/a.txt', '..\\a.txt', '.a.txt', 'x' * 300 + '.txt', '\n.txt'])
    method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(raw / 'val.zip', 'w') as pack:
        pack.write(folder / 'raw/book.txt', 'book.dev')
    with zipfile.ZipFile(raw / 'train.zip', 'w', method) as pack:
        pack.write(folder / 'raw/book.txt', 'book.train')
        with pack.open(name, 'w', force_zip64=True) as file:
            file.write(b'a line of it\n' * 10 ** 4)
            if method == zipfile.ZIP_DEFLATED:           # a bomb; others take long to pack one
                file.write(b'\0' * 10 ** 8)
    data = bytearray((raw / 'train.zip').read_bytes())
    places = [found.start() for found in re.finditer(b'PK\x01\x02|PK\x03\x04', data)]
    about = f'a zip with {name!r}'
    if rng.random() < 0.5:
        at = rng.choice(places) + rng.randrange(4, 30)   # flags, method, sizes
        data[at] = rng.randrange(256)
        about += f', byte {at} changed'
    elif rng.random() < 0.3:
        data = data[:rng.randrange(len(data))]
        about += ', cut'
    (raw / 'train.zip').write_bytes(data)
    return Case(command, ['babylm', '--vocab_size=300'], about)


def bad_rows(rng, folder, command, model):
    """Pairs for eval_blimp.py and prepare.py, GLUE for finetune.py, problems for exact_answer."""
    case = Case(command, base(rng, command, model))
    path = folder / 'data/toy_blimp/number.jsonl'
    if command == 'finetune.py':
        path = folder / f"data/toy_glue/toy.{rng.choice(['train', 'valid'])}.jsonl"
    elif command == 'tools.exact_answer':
        path = folder / 'raw/problems.jsonl'
    elif command == 'prepare.py':
        case.args = ['blimp', '--name=pairs', '--input', 'data/toy_blimp']
    chance = rng.random()
    if chance < 0.5:
        lines = path.read_text().splitlines()
        at = rng.randrange(2)
        row, done = mutate(rng, json.loads(lines[at]), PLAIN + ['1' * 400, 'word ' * 999, 'no number'])
        lines[at] = json.dumps(row)
        path.write_text('\n'.join(lines))
        case.about = f'{path.name}, row {at}: {done}'
    elif chance < 0.6:
        data = gzip.compress(path.read_bytes())
        path.with_name(f'{path.name}.gz').write_bytes(data[:rng.choice([50, 99999])])
        path.unlink()
        case.args = [arg.replace('.jsonl', '.jsonl.gz') for arg in case.args]
        case.about = f'{path.name}.gz, whole or cut'
    elif chance < 0.7 and command == 'finetune.py':
        table = rng.choice(['label\tsentence\nhe\tTom.\nshe\n', 'sentence\n', 'sentence\tlabel\n\t\n'])
        path.with_suffix('.tsv').write_text(table)
        path.unlink()
        case.about = f'a table {table!r}'
    else:
        case.about = damage(rng, path)
        case.is_long = path.is_fifo()                    # somebody may still write into it
    return case


READ_A_RUN = [nothing, bad_entry, bad_entry, bad_entry, bad_file, bad_meta, bad_option, bad_option]
COMMANDS = {                                             # what is tried on each
    'train.py': [nothing, *[bad_setting] * 4, *[bad_entry] * 3, bad_file, bad_meta, bad_config, bad_log,
                 small_disk],
    'prepare.py': [nothing, *[bad_text] * 5, *[bad_option] * 2, bad_rows, bad_meta, bad_archive, small_disk],
    'sample.py': READ_A_RUN,
    'eval_blimp.py': [*READ_A_RUN, bad_rows, bad_rows, small_disk],
    'finetune.py': [*READ_A_RUN, bad_rows, bad_rows, small_disk],
    'tools.exact_answer': [*READ_A_RUN, bad_rows, bad_rows, small_disk],
    'tools.eval_length': [*READ_A_RUN, small_disk],
    'tools.prune_curve': [*READ_A_RUN, small_disk],
    'tools.path_usage': [*READ_A_RUN, small_disk]}
SHARES = [8, 5, 4, 3, 3, 1, 1, 1, 1]
READS = {'tools.prune_curve': ['moduleformer'], 'tools.path_usage': ['papaformer'],
         'tools.exact_answer': ['moep', 'selfmoe', 'lora'], 'tools.eval_length': ['moduleformer', 'moep']}


def choose(seed, number):
    """The command of a case, and the random numbers that make the rest of it."""
    rng = random.Random(f'{seed} {number}')
    return rng.choices(list(COMMANDS), SHARES)[0], rng


def make_case(seed, number, folder):
    command, rng = choose(seed, number)
    model = rng.choice(RUNS)
    if command in READS and rng.random() < 0.9:
        model = rng.choice(READS[command])
    case = rng.choice(COMMANDS[command])(rng, folder, command, model)
    case.ascii = rng.random() < 0.1
    return case


# ---- Running it ---------------------------------------------------------------------------------


def script_of(command):
    return ROOT / f"{command.removesuffix('.py').replace('.', '/')}.py"


def run(case, folder):
    """-> exit code (negative: a signal), stdout, stderr, what stopped it if it was stopped, MiB."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            become(case, folder, out, err)
        code, stopped, mib = watch(case, pid, out)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(10 ** 6).decode('utf-8', 'replace'))
    return code, *texts, stopped, mib


def become(case, folder, out, err):
    """In the child: what Python does when the command is typed."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.chdir(folder)
        coding = 'ascii' if case.ascii else 'utf-8'
        sys.stdout = open(1, 'w', 1, coding, closefd=False)
        sys.stderr = open(2, 'w', 1, coding, 'backslashreplace', closefd=False)
        torch.set_warn_always(True)                      # this process may have had its one warning
        faulthandler.enable(sys.stderr)
        faulthandler.register(signal.SIGUSR1, sys.stderr)
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.disk, case.disk))
        resource.setrlimit(resource.RLIMIT_AS, (2 ** 36, 2 ** 36))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        script = str(script_of(case.command))
        sys.argv = [script, *case.args]
        try:
            if case.command.endswith('.py'):
                runpy.run_path(script, run_name='__main__')
            else:
                sys.modules.pop(case.command)            # or Python warns that it is imported already
                runpy.run_module(case.command, run_name='__main__', alter_sys=True)
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):               # a full disk
            sys.stdout.flush()
        os._exit(code)


def watch(case, pid, out):
    """Wait for the child, but not longer than it may take -> exit code, what stopped it, MiB."""
    began = time.monotonic()
    stopped = None
    most = 0
    fed = not case.feed
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        seconds = time.monotonic() - began
        most = max(most, resident(pid))
        if most > MIB or seconds > SECONDS:
            stopped = 'memory' if most > MIB else 'time'
            os.kill(pid, signal.SIGUSR1)                 # it tells where it is
            time.sleep(0.3)
            os.kill(pid, signal.SIGKILL)
        at_work = case.is_long or b'val loss' in os.pread(out.fileno(), 10 ** 5, 0)
        if seconds > PATIENCE and at_work and not stopped:
            stopped = 'request'
            os.kill(pid, signal.SIGTERM)
        fed = fed or feed(*case.feed)
        time.sleep(min(0.05, 0.002 + seconds / 20))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)                   # what it started
    return os.waitstatus_to_exitcode(status), stopped, most


def resident(pid):
    """MiB that a process has in memory."""
    try:
        return int(Path(f'/proc/{pid}/statm').read_text().split()[1]) * resource.getpagesize() >> 20
    except (OSError, IndexError):
        return 0


def feed(path, content):
    """Write into a FIFO as soon as it is read -> whether it was."""
    try:
        end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    os.write(end, content)
    os.close(end)
    return True


# ---- Judging it ---------------------------------------------------------------------------------


def judge(case, code, err, stopped):
    """What is wrong with how it ended: None, if nothing."""
    lines = err.splitlines()
    if stopped in ('memory', 'time'):
        limit = f'more than {MIB} MiB' if stopped == 'memory' else f'more than {SECONDS} s'
        return f'{limit}, {place(err) or case.about}'
    if code < 0:
        return f'{signal.Signals(-code).name}, {place(err)}'
    if 'Traceback (most recent' in err or 'panicked at' in err:
        return f'{last_words(err)}, {place(err)}'
    if code not in (0, 2) and not (stopped and code == 143):
        return f'exit code {code}'
    if code == 2 and len(lines) != 1:
        return f'{len(lines)} lines of error: {err[:90]}'
    if code == 2 and len(lines[0]) > COLUMNS:
        return f'a line of {len(lines[0])} characters'
    in_a_model = r'\.py:\d+: TypeError: '                # a config of wrong types: with file and line
    words = 'enforce fail|has no attribute|instances of'
    if code == 2 and re.search(words, lines[0]) and not re.search(in_a_model, lines[0]):
        return f'words of Python or torch: {plain(lines[0])}'
    if code == 2 and case.must_succeed:
        return f'it fails, but nothing is wrong: {lines[0]}'
    if code == 0 and lines:
        return f'success, but on stderr: {err[:90]}'
    if code == 0 and case.must_fail and not stopped:
        return f'it succeeds, but should not: {plain(case.about)}'
    return None


def plain(text):
    """Without what differs from case to case."""
    return re.sub(r'\d+', 'N', re.sub(r'out/\w+|[0-9a-f]{12}', 'X', text))[:100]


def place(err):
    """file:line of this project, the innermost that a traceback or faulthandler names."""
    frames = re.findall(rf'File "{ROOT}/(?!tests/fuzz)([\w/]+\.py)", line (\d+)', err)
    newest = 0 if 'most recent call first' in err else -1
    return ':'.join(frames[newest]) if frames else ''


def last_words(err):
    """The last exception."""
    lines = err.rpartition('Traceback (most')[2].splitlines()[1:]
    return plain(' '.join(line for line in lines if line[:1] != ' '))


def files(folder):
    """{path: what changes if somebody writes it}"""
    found = {}
    for path in folder.rglob('*'):
        about = path.lstat()
        kind = stat.S_IFMT(about.st_mode)
        found[path.relative_to(folder).as_posix()] = (kind,)
        if kind in (stat.S_IFREG, stat.S_IFLNK):
            found[path.relative_to(folder).as_posix()] += (about.st_size, about.st_mtime_ns)
    return found


OF_A_RUN = r'ckpt\w*\.pt|log\.jsonl|meta\.json|tokenizer\.\w+|nowhere'           # nowhere: a link led there
OF_DATA = r'(train|val)\.bin|meta\.json|tokenizer\.\w+|\w+\.jsonl'


def judge_files(case, code, before, after):
    """What is wrong with what it left. train.py may change its run; whatever else fails leaves nothing."""
    for path in sorted(before.keys() | after.keys()):
        name = path.rpartition('/')[2]
        is_new = path not in before
        if before.get(path) == after.get(path):
            continue
        if is_new and re.search(r'\.(tmp|part|old)$|(^|/)\.|unpacking|EVIL|outside', path):
            return f'{plain(path)} is left behind'
        if 'data/raw/' in path or '/toy_' in path and is_new:    # unpacked, or made because it was missing
            continue
        if path not in after:
            if '--overwrite' in case.args and name.startswith('ckpt'):
                continue
            return f'{path} is gone'
        is_folder = after[path][0] == stat.S_IFDIR
        if case.command == 'train.py' and (is_folder or re.fullmatch(OF_A_RUN, name)):
            continue
        is_data = is_folder or re.fullmatch(OF_DATA, name)
        if case.command == 'prepare.py' and code == 0 and is_new and is_data:
            continue
        if code == 0 and re.search(rf'--(json|plot)[= ]\S*{re.escape(name)}', ' '.join(case.args)):
            continue
        return f"{plain(name)} is {'made' if is_new else 'changed'}, exit code {code}"
    return None


def judge_run(folder, before, after):
    """What train.py has written: finite weights, and a log of whole lines."""
    for path in after:
        if before.get(path) == after[path] or not (folder / path).is_file():
            continue
        if path.endswith('.pt'):
            weights = torch.load(folder / path, weights_only=True)['weights']
            if not all(x.isfinite().all() for x in weights.values()):
                return 'the saved weights are not finite'
        if path.endswith('log.jsonl'):
            try:
                [json.loads(line) for line in (folder / path).read_text().splitlines()]
            except (ValueError, RecursionError):
                return 'the log holds what is no JSON'
    return None


def try_case(seed, number, stock, show_all=False):
    """-> the case's number, the fault or None, the outcome, and lines that describe it."""
    with tempfile.TemporaryDirectory(prefix='fuzz_', ignore_cleanup_errors=True) as top:
        folder = Path(top, 'a/b/c')                      # a case may write to ../..
        shutil.copytree(stock, folder)
        with warnings.catch_warnings(action='ignore'):   # about odd tensors
            case = make_case(seed, number, folder)
        before = files(Path(top))
        pipe = None
        if (folder / 'pipe').is_fifo():
            pipe = os.open(folder / 'pipe', os.O_RDWR)   # somebody is there to read the result
        began = time.monotonic()
        code, out, err, stopped, mib = run(case, folder)
        seconds = time.monotonic() - began
        if pipe is not None:
            os.close(pipe)
        after = files(Path(top))
        fault = judge(case, code, err, stopped) or judge_files(case, code, before, after)
        if not fault and case.command == 'train.py' and case.disk > 10 ** 6:     # else half a line is right
            fault = judge_run(Path(top), before, after)
    words = [arg if len(arg) < 80 else f'{arg[:70]}...' for arg in case.args]
    line = ' '.join([case.command, *words])
    said = err.splitlines() or ['']
    about = [f'case {number}: {line}', f'    with {case.about}', f'    {fault}', f'    {said[-1][:COLUMNS]}']
    if show_all:
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        about[3:] = [f'exit {code}, {seconds:.1f} s, {mib} MiB', *out[-3000:].splitlines(), '--- stderr',
                     *err[-6000:].splitlines(), '--- files', *changed]
    outcome = 'stopped at work' if stopped else {0: 'succeeded', 2: 'refused'}.get(code)
    return number, fault, outcome, about


# ---- The command line ---------------------------------------------------------------------------


def say(text):
    printable = ''.join(c if c.isprintable() else ' ' for c in text)
    print(printable.encode('ascii', 'backslashreplace').decode(), flush=True)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument('--cases', type=int, default=100)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--only', default='', help='part of a command, as train or exact')
    parser.add_argument('--jobs', type=int, default=1)
    parser.add_argument('--case', type=int, help='this one, and everything about it')
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = [keys['model'] for keys in CONFIGS.values()]
    for name in ('torch._dynamo', *COMMANDS, *models):   # the first: an optimizer's step imports it
        importlib.import_module(name.removesuffix('.py'))
    with tempfile.TemporaryDirectory(prefix='fuzz_stock_') as stock:
        make_stock(Path(stock))
        if args.case is not None:
            for line in try_case(args.seed, args.case, stock, show_all=True)[3]:
                say(line)
            return
        numbers = [n for n in range(args.cases) if args.only in choose(args.seed, n)[0]]
        outcomes = Counter()
        causes = defaultdict(list)
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context('fork')) as pool:
            tried = [pool.submit(try_case, args.seed, n, stock) for n in numbers]
            for number, fault, outcome, about in (each.result() for each in tried):
                outcomes['fault' if fault else outcome] += 1
                if fault:
                    causes[fault].append(number)
                    for line in about:
                        say(line)
    counts = ', '.join(f'{n} {outcome}' for outcome, n in outcomes.most_common())
    say(f'seed {args.seed}, {len(numbers)} cases: {counts}')
    for fault, which in sorted(causes.items(), key=lambda item: -len(item[1])):
        say(f"{len(which):4}  {fault}   cases {', '.join(map(str, which[:12]))}")
    sys.exit(1 if causes else 0)


if __name__ == '__main__':
    main()
