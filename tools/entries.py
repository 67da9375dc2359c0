"""
Find the arena's entries, check them against the rules, and notice if one has changed since its
results were saved.
"""

import ast
import io
import json
import os
import shlex
import statistics
import tokenize
import zlib
from pathlib import Path

from plumbing.cli import UserError, parse_json
from plumbing.data import named_sets
from plumbing.models import ROOT, import_model, sketch
from plumbing.settings import read_config, read_settings
from tools.flops import training_flops
from tools.leaderboard import TRACKS, classes


def on_track(path, track):
    """config/arena/moep.py -> config/arena/toy/moep.py on the track toy."""
    if track == 'toy' and path.parent.name != 'toy':
        return path.parent / 'toy' / path.name
    return path


def find_entries(paths, track):
    """{name: its stages}. A name alone is that of a config, or of a folder, in config/arena."""
    entries = {}
    for given in paths:
        is_name = given.name == str(given) and not given.suffix
        if is_name and not (given.exists() or on_track(given, track).exists()):
            given = Path('config/arena', given)
            if not on_track(given, track).is_dir():
                given = given.with_suffix('.py')
        path = on_track(given, track)
        if given.is_dir() and (given.name == 'toy' or (given / 'toy').is_dir()):
            raise UserError(f'{given} is a folder of entries, not an entry: name those in it, {given}/*.py')
        if given.exists() and not path.exists():
            if given.is_file():
                read_config(given)                       # a model file is not a config: it says so
            print(f'{given.stem} is left out: there is no {path}')
            continue
        stages = sorted(path.glob('[!.]*.py')) if path.is_dir() else [path]
        if not stages:
            raise UserError(f'{path}: an entry that is a folder holds a config for each stage')
        if entries.get(path.stem, stages) != stages:
            raise UserError(f'two entries are named {path.stem}: rename one of them')
        for n, config in enumerate(stages):
            try:
                check_entry(config, stages[:n], len(stages) == 1, track)
            except UserError as error:
                where = '' if str(config) in str(error) else f'{config}: '
                raise UserError(f'{where}{error}') from None
        entries[path.stem] = stages
    if paths and not entries:
        raise UserError(f'none of these has a config of the track {track}')
    return entries


def check_entry(config, earlier, alone, track):
    """Whether it keeps the rules of the track, before anything is trained. A stage starts from earlier
    ones."""
    rules = TRACKS[track]
    if 'model' not in read_config(config):               # train.py would take moep.py
        raise UserError(f"{config} names no model: add a line such as model = 'arena.mine'")
    s, module, keys = read_settings([str(config)])
    trained, scored = named_sets(s)
    if {*trained, *scored} != {rules['data']}:
        raise UserError(f"{config} reads {', '.join({*trained, *scored})}; "
                        f"the track {track} reads {rules['data']} alone")
    if s.eval_tokens:
        raise UserError(f'{config} sets eval_tokens; the arena scores all of the validation text')
    starts = [s.init_from] if isinstance(s.init_from, str) else s.init_from or []
    for start in starts:
        if Path(start).name not in [stage.stem for stage in earlier]:
            raise UserError(f'init_from names {start}, which is not an earlier stage of this entry')
    if not alone:                                        # what stages make is measured afterwards
        return
    model = sketch(module, dict(vocab_size=rules['vocab_size']) | keys)
    total, active = model.count_params()
    window = s.seq_len or model.config.block_size
    if window != rules['window']:
        raise UserError(f'{config} reads windows of {window} tokens; '
                        f"the track {track} has {rules['window']}")
    cost = training_flops(model.config, active, window)
    count = dict(parameters=total, flops_per_token=cost)
    if not classes(count, track):
        raise UserError(f'{config} has {total / 1e6:.2f}M parameters and takes {cost / 1e6:.2f}M '
                        f"FLOPs per token; an entry has {rules['parameters'] / 1e6:g}M, or takes "
                        f"{rules['flops_per_token'] / 1e6:g}M, give or take {rules['within']:.0%}")
    if s.max_iters is not None:                          # those of epochs are counted afterwards
        count['tokens'] = s.max_iters * s.batch_size * s.gradient_accumulation_steps * window
    if not classes(count, track):
        raise UserError(f"{config} reads {count['tokens'] / 1e6:.2f}M tokens; "
                        f"the track {track} has {rules['tokens'] / 1e6:g}M")


def split_values(text):
    """At the commas outside of brackets: dict(a=1,b=2),dict(a=3,b=4) are two values."""
    source = f'[{text}]'
    try:
        values = ast.parse(source, mode='eval').body.elts
    except (SyntaxError, AttributeError):
        raise UserError(f'--sweep: {text} is not a list of values, such as 1e-3,3e-3') from None
    return [ast.get_source_segment(source, value) for value in values]


def third_of_tokens(config, setting):
    """The option by which a config with this setting, even another batch size, reads a third of
    its tokens."""
    s, _, _ = read_settings([str(config)])
    swept, _, _ = read_settings([str(config), f'--{setting}'])
    if not s.max_iters:
        return f'--epochs={s.epochs / 3}'
    rows, swept_rows = [each.batch_size * each.gradient_accumulation_steps for each in (s, swept)]
    return f'--max_iters={s.max_iters * rows // (3 * swept_rows)}'


# ---- What was made before -----------------------------------------------------------------------

def identify(stages, swept=None):
    """What an entry is, as JSON keeps it: its configs, without a setting that is swept, and a
    checksum of its code."""
    configs = []
    code = ''
    for config in stages:
        s, _, _ = read_settings([str(config)])
        code += read_code(s.model)
        configs.append({key: value for key, value in read_config(config).items() if key != swept})
    return parse_json(json.dumps(dict(configs=configs, checksum=zlib.crc32(code.encode()))))


def read_code(name):
    """The code of a model file and of those that it imports, without comments, docstrings and empty
    lines: the same text with every version of Python."""
    path = ROOT / f"{name.replace('.', '/')}.py"
    if not path.exists():
        return ''
    text = path.read_text(encoding='utf-8')
    lines = text.split('\n')
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    tree = ast.parse(text)
    for node in ast.walk(tree):                          # docstrings: statements that are a string
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, 'value', None), str):
            lines[node.lineno - 1:node.end_lineno] = [''] * (node.end_lineno - node.lineno + 1)
    code = '\n'.join(filter(None, map(str.rstrip, lines)))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *[f'{node.module}.{alias.name}' for alias in node.names]]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        code += ''.join(map(read_code, names))
    return code


def read_run(folder):
    """What a run cost, and how good it is: from its log."""
    lines = [parse_json(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    about = next(line['run'] for line in lines if 'run' in line)
    last = [line for line in lines if 'val' in line][-1]
    scores, = last['val'].values()
    s = about['settings']
    config = import_model(s['model']).Config(**about['config'])
    return dict(
        {key: about[key] for key in ('device', 'torch', 'parameters', 'active')},
        command=f"python {about['command']}",
        flops_per_token=training_flops(config, about['active'], s['seq_len'] or config.block_size),
        tokens=about['steps'] * about['tokens_per_step'],
        tokens_per_s=statistics.median(line['tokens_per_s'] for line in lines if 'loss' in line),
        minutes=last['seconds'] / 60,
        loss=scores['loss'],
        bits_per_byte=scores['bits_per_byte'])


def read_kept(path):
    """What tools.arena wrote there; {} if there is no such file."""
    try:
        return parse_json(path.read_text()) if path.exists() else {}
    except ValueError:
        raise UserError(f'{path} is broken: delete it') from None


def saved_entry(run):
    """What an entry was when this run of it began; {} if it saved nothing that could be resumed."""
    return read_kept(run / 'entry.json') if any(run.rglob('ckpt.pt')) else {}


def check_kept(name, entry, earlier, todo, paths):
    """Compare an entry with what it was in earlier results and unfinished runs ({} where there are
    none). A changed config is an error. Changed code is an error if runs are to be made (todo), since
    two versions would share a row; otherwise it is a message -> a list of them. Both tell how to delete
    `paths`. (Older results have no checksum.)"""
    for key, what in dict(configs='config', checksum='code').items():
        if all(each.get(key, entry[key]) == entry[key] for each in earlier):
            continue
        changed = f'{name}: its {what} has changed since it ran'
        rename = 'give the new one another name, or delete the old results'
        command = shlex.join(['rm', '-rf', *[os.path.relpath(path) for path in paths if path.exists()]])
        if todo or key == 'configs':
            print(command)                               # a line of its own, since errors are cut short
            raise UserError(f'{changed}: {rename}, with the command above')
        return [f'{changed}, and what is shown is of the old code; {rename}: {command}']
    return []
