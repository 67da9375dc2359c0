"""
The arena's entries: found, held to the rules, and told from what they were when something was kept.
"""

import ast
import json
import zlib

from plumbing.cli import UserError, parse_json
from plumbing.data import named_sets
from plumbing.models import ROOT, sketch
from plumbing.settings import read_config, read_settings
from tools.flops import training_flops
from tools.leaderboard import TRACKS, classes


def find_entries(paths, track):
    """{name: its stages}. On the track toy, a config of baby stands for its namesake in toy/."""
    entries = {}
    for given in paths:
        path = given
        if track == 'toy' and given.parent.name != 'toy':
            path = given.parent / 'toy' / given.name
        if given.exists() and not path.exists():
            if given.is_file():
                read_config(given)                       # a model file is no config, and says so
            print(f'{given.stem} is left out: there is no {path}')
            continue
        stages = sorted(path.glob('*.py')) if path.is_dir() else [path]
        if not stages:
            raise UserError(f'{path}: an entry that is a folder holds a config for each stage')
        check_entry(stages, track)
        entries[path.stem] = stages
    return entries


def check_entry(stages, track):
    """Whether it keeps the rules of the track, before anything is trained."""
    rules = TRACKS[track]
    for config in stages:
        s, module, keys = read_settings([str(config)])
        trained, scored = named_sets(s)
        if {*trained, *scored} != {rules['data']}:
            raise UserError(f"{config} reads {', '.join({*trained, *scored})}; "
                            f"the track {track} reads {rules['data']} alone")
    if len(stages) > 1:                                  # what they make is measured afterwards
        return
    model = sketch(module, dict(vocab_size=rules['vocab_size']) | keys)
    total, active = model.count_params()
    cost = training_flops(s.model, model.config, active, s.seq_len or model.config.block_size)
    if not classes(dict(parameters=total, flops_per_token=cost), track):
        raise UserError(f'{config} has {total / 1e6:.2f}M parameters and takes {cost / 1e6:.2f}M '
                        f"FLOPs per token; an entry has {rules['parameters'] / 1e6:g}M, or takes "
                        f"{rules['flops_per_token'] / 1e6:g}M, give or take {rules['within']:.0%}")


def identify(stages, swept=None):
    """What an entry is, as JSON keeps it: its configs, without a setting that is swept, and a checksum
    of its model files, in which comments do not count."""
    configs = []
    code = ''
    for config in stages:
        s, _, _ = read_settings([str(config)])
        file = ROOT / f"{s.model.replace('.', '/')}.py"
        code += ast.unparse(ast.parse(file.read_text(encoding='utf-8')))
        configs.append({key: value for key, value in read_config(config).items() if key != swept})
    return parse_json(json.dumps(dict(configs=configs, code=zlib.crc32(code.encode()))))


def check_kept(entry, kept, file, run):
    """An entry may have been changed since its result, or its run, was made. With another config that
    is an error; with other code they are taken up again, but a line says so. (Older ones do not know
    their code.)"""
    mark = run / 'entry.json'
    begun = parse_json(mark.read_text()) if mark.exists() else {}
    for made in (kept, begun):
        if made.get('configs', entry['configs']) != entry['configs']:
            raise UserError(f'{file} or {run} is of another version of the config: delete both, or '
                            'give the new version a name of its own')
        if made.get('code', entry['code']) != entry['code']:
            print(f'{file} or {run} was made with other code: to run the entry again, delete both')
