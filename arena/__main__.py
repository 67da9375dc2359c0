"""
The arena: which routing idea pays at equal cost? docs/arena.md has the rules and the tables.

    python -m arena mine moep                               # race, and test one against the other
    python -m arena mine --sweep learning_rate=2e-3,4e-3    # a short run for each value
    python -m arena mine --minutes                          # race for equal time
    python -m arena mine --track baby                       # BabyLM-style text: one GPU
    python -m arena                                         # every entry
    python -m arena --table                                 # run nothing

arena/entries.py has the entries, and says how to add one. On toy, a new one first has to pass
tools.check. train.py trains it with each seed, eval_blimp.py scores it, and arena_TRACK.jsonl in
out/arena gets a row. What has its row is not run again. After a kill, the same command continues
from the last checkpoint.
"""

import ast
import json
import shlex
import statistics
import subprocess
import sys
import zlib
from difflib import get_close_matches
from pathlib import Path

import torch

from arena.entries import ENTRIES
from arena.leaderboard import (BUDGETS, DENSE_OF_MINUTES, MODES, PUBLISHED, TRACKS, classes,
                               minutes_table, print_columns, read_rows, show, show_sweep)
from plumbing.cli import Parser, UserError, numbers, run_main, write_json
from plumbing.log import read_log
from plumbing.machine import Machine
from plumbing.settings import (ROOT, code_of, import_model, make_config, model_sources,
                               read_settings)
from prepare import make_toys
from tools import bench
from tools.flops import training_flops


# ---- Entries ------------------------------------------------------------------------------------

def find_entries(names, track):
    """Return {name: its stages}, all of which keep the rules."""
    entries = {}
    for name in names or ENTRIES[track]:
        if name not in ENTRIES[track]:
            hint = f"add {name}=moep | dict(model='arena.{name}'),"
            if not (ROOT / 'arena' / f'{name}.py').exists():
                near = get_close_matches(name, ENTRIES[track])
                hint = f"it has {', '.join(near or ENTRIES[track])}"
            raise UserError(f'arena/entries.py has no {name} on the track {track}; {hint}')
        entry = ENTRIES[track][name]
        entries[name] = entry if isinstance(entry, list) else [entry]
        check_rules(name, entries[name], track)
    return entries


def check_rules(name, stages, track):
    """What stages make, and the tokens of epochs, are only known after training."""
    rules = TRACKS[track]
    for stage in filter(is_training, stages):
        s, *_ = read_settings(options(stage))
        if stage.get('data', s.data) != rules['data'] or s.eval_data or s.eval_tokens:
            raise UserError(f"{name}: the track {track} reads {rules['data']}, and is scored on it")
    if len(stages) > 1:
        return
    with torch.device('meta'):
        model, s, window = build(stages[0], track)
    total, active = model.count_params()
    costs = dict(parameters=total, flops_per_token=training_flops(model.config, active, window))
    if s.max_iters:
        costs['tokens'] = s.max_iters * s.batch_size * s.gradient_accumulation_steps * window
    if window != rules['window'] or not classes(costs, track):
        raise UserError(f'{name} has {costs | dict(window=window)}; the track {track} has {rules}, '
                        'of which an entry may miss either parameters or flops_per_token')


def build(stage, track):
    """-> a fresh model, its settings, and the length of a window"""
    s, module, keys = read_settings(options(stage))
    torch.manual_seed(s.seed)
    config = make_config(module, dict(vocab_size=TRACKS[track]['vocab_size']) | keys)
    return module.Model(config), s, s.seq_len or config.block_size


def is_training(stage):
    return 'surgery' not in stage


def options(stage, out=Path('out')):
    """A stage's settings as train.py takes them. It may start from an earlier one, in `out`."""
    stage = dict(stage)
    if 'init_from' in stage:
        stage['init_from'] = stage_folder(out, stage['init_from'])
    if part := stage.pop('part', None):
        stage['data'] += '_{}_{}'.format(*part)
    return [f'--{key}={value}' for key, value in stage.items()]


def stage_folder(out, n):
    return (out / f'stage_{n}').as_posix()


def identify(stages, swept=None):
    """What an entry is, as its rows have it: all its settings except the swept one, and a checksum
    of its code."""
    configs = [{key: value for key, value in stage.items() if key != swept} for stage in stages]
    code = ''.join(code_of(text) for stage in filter(is_training, stages)
                   for text in model_sources(stage['model']).values())
    return dict(configs=json.loads(json.dumps(configs)), checksum=zlib.crc32(code.encode()))


def has_changed(row, identity):
    """Whether settings or code differ from this row's. (Older rows have no checksum.)"""
    return any(row.get(key, value) != value for key, value in identity.items())


# ---- A run --------------------------------------------------------------------------------------

def call(script, *args):
    """Run a script of this project, or a tool (tools.NAME). SIGTERM is passed on once, so that
    train.py can save. Ctrl-C would reach both, hence a session of its own."""
    args = [*map(str, args)]
    start = [ROOT / script] if script.endswith('.py') else ['-m', script]
    print('$', shlex.join(['python', *map(str, [*start[:-1], script]), *args]), flush=True)
    process = subprocess.Popen([sys.executable, *start, *args], start_new_session=True)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        print('the arena stopped; the same command continues', flush=True)
        raise
    if code:
        raise UserError(f'{script} ended with exit code {code}; its message is above')


def make_row(run, stages, identity, rows, track):
    """Train and score an entry. A run is dict(entry, seed) in a race; a sweep adds a setting, the
    class of minutes a budget. Only a race scores pairs. rows: those that there are."""
    name, seed = run['entry'], run['seed']
    folder = f'{name}_{seed}'
    if 'setting' in run:
        folder = f"sweeps/{name}_{run['setting']}"
        key, _, value = run['setting'].partition('=')
        stages = [of_length(stage, 1 / 3) | {key: value} if is_training(stage) else stage
                  for stage in stages]
    elif 'budget' in run:
        times = [row['time'] for row in rows if row['entry'] == name]
        run = run | dict(time=times[0] if times else relative_time(name, stages, track))
        folder = f"minutes/{name}_{run['budget']}_{seed}"
        stages = [of_length(stages[0], run['budget'] / run['time'])]
    out = Path('out/arena', track, folder)
    begun = out / 'entry.json'
    if any(out.rglob('ckpt.pt')) and has_changed(json.loads(begun.read_text()), identity):
        raise UserError(f'{out} was begun with other settings or code: delete it, or rename {name}')
    write_json(begun, identity)
    folder, costs = train(stages, out, seed)
    if run.keys() == {'entry', 'seed'}:
        if not classes(costs, track):
            print(f'{name} is in neither class, or not within the budget: it is in no table')
        costs |= score_pairs(folder, track)
    return run | identity | costs


def train(stages, out, seed):
    """Train the stages, or resume them -> the last one's folder, and what all cost."""
    logs = []
    for n, stage in enumerate(stages):
        folder = stage_folder(out, n) if len(stages) > 1 else out.as_posix()
        if not is_training(stage):                       # it rebuilds earlier ones
            stage = dict(stage)
            function, runs = stage.pop('surgery'), stage.pop('runs')
            if not Path(folder, 'ckpt.pt').exists():
                call('tools.surgery', function, *(stage_folder(out, run) for run in runs),
                     '--out', folder, '--seed', seed, *options(stage))
            continue
        if 'part' in stage:                              # of the track's text
            text, (low, high) = stage['data'], stage['part']
            part = f'{text}_{low}_{high}'
            if not Path('data', part).exists():
                call('prepare.py', 'mix', '--name', part, '--input', f'data/{text}:{low}:{high}')
        call('train.py', *options(stage, out), f'--seed={seed}', f'--out_dir={folder}',
             '--sample_tokens=0', '--resume')
        logs.append(measure(folder))
    tokens = sum(log['tokens'] for log in logs)
    return folder, logs[-1] | dict(
        tokens=tokens,
        minutes=sum(log['minutes'] for log in logs),
        flops_per_token=sum(log['flops_per_token'] * log['tokens'] for log in logs) / tokens,
        tokens_per_s=tokens / sum(log['tokens'] / log['tokens_per_s'] for log in logs),
        commands=[command for log in logs for command in log['commands']])


def of_length(stage, factor):
    """The stage with this factor of its steps or epochs."""
    if stage.get('max_iters'):
        return stage | dict(max_iters=round(stage['max_iters'] * factor))
    return stage | dict(epochs=stage.get('epochs', 1.0) * factor)


def relative_time(name, stages, track, repeat=5):
    """The time of a training step, relative to the dense entry's; the best of several, in turn."""
    if len(stages) > 1:
        raise UserError(f'{name} has several stages: its time is not compared')
    if name == DENSE_OF_MINUTES:
        return 1.0
    machine = Machine()
    times = []
    for stage in [ENTRIES[track][DENSE_OF_MINUTES], *stages] * repeat:
        model, s, window = build(stage, track)
        times.append(bench.training(model.to(machine.device), s, window, machine)['ms'])
    return round(min(times[1::2]) / min(times[::2]), 3)


def measure(folder):
    """What a run cost, and how good it is."""
    lines = read_log(folder)
    run = next(line['run'] for line in lines if 'run' in line)
    last = [line for line in lines if 'val' in line][-1]
    scores, = last['val'].values()
    module = import_model(run['settings']['model'])
    config = module.Config(**run['config'])
    window = run['settings']['seq_len'] or config.block_size
    active = run['active']
    other = {layer: n for layer, n in last['taken'].items() if n != getattr(config, 'top_k', n)}
    if other:                                            # a token does not always take top_k
        with torch.device('meta'):
            _, active = module.Model(config).count_params(other)
    return dict(
        {key: run[key] for key in ('device', 'torch', 'parameters')},
        active=active,
        flops_per_token=training_flops(config, active, window),
        tokens=run['steps'] * run['tokens_per_step'],
        tokens_per_s=statistics.median(line['tokens_per_s'] for line in lines if 'loss' in line),
        minutes=last['seconds'] / 60,
        loss=scores['loss'],
        bits_per_byte=scores['bits_per_byte'],
        commands=[f"python {run['command']}"])


def score_pairs(folder, track):
    """{mode: percent of the minimal pairs}"""
    scores = {}
    for mode in MODES:
        pairs, file = Path('data', TRACKS[track]['pairs']), Path(folder, f'{mode}.json')
        call('eval_blimp.py', folder, '--data', pairs, '--mode', mode, '--json', file)
        scores[mode] = json.loads(file.read_text())['runs'][0]['overall']
    return scores


# ---- Races, sweeps, minutes ---------------------------------------------------------------------

def list_sweep(entries, sweep):
    """learning_rate=1e-3,2e-3 -> learning_rate, and a run for each value"""
    key, _, values = sweep.partition('=')
    runs = []
    for name, stages in entries.items():
        for value in ast.parse(f'[{values}]', mode='eval').body.elts:    # dict(a=1, b=2) is one
            s, _, keys = read_settings([*options(stages[-1]), f'--{key}={ast.unparse(value)}'])
            setting = f'{key}={(vars(s) | keys)[key]}'   # 2e-3 and 0.002 are the same
            runs.append(dict(entry=name, seed=1, setting=setting))
    return key, runs


def list_minutes(entries, seeds):
    """All seeds of all entries for the time of the dense one, which also runs for shorter and
    longer: how long must it train for an entry's loss?"""
    dense = [dict(entry=DENSE_OF_MINUTES, seed=seeds[0], budget=budget) for budget in BUDGETS]
    return dense + [dict(entry=name, seed=seed, budget=1) for seed in seeds for name in entries]


def make_missing(entries, wanted, swept, file, folders, track):
    """Make the wanted runs that have no row. One that fails does not stop the other entries
    -> {name: why its row is missing}"""
    path = folders[-1] / file
    rows = read_rows(file, folders, swept)
    identities = {name: identify(stages, swept) for name, stages in entries.items()}
    checked = {row['entry'] for row in rows}
    failures = {name: f'it has changed: rename it, or delete its rows in {path}'
                for name in entries if any(row['entry'] == name and
                                           has_changed(row, identities[name]) for row in rows)}
    for number, run in enumerate(wanted, 1):
        name = run['entry']
        if name in failures or any(run.items() <= row.items() for row in rows):
            continue
        print(f'\n==== {number} of {len(wanted)}: {run}', flush=True)
        stages = entries[name]
        try:
            find_data(track)
            if track == 'toy' and len(stages) == 1 and name not in checked:
                call('tools.check', stages[0]['model'], *options(stages[0]))
                checked.add(name)
            rows.append(make_row(run, stages, identities[name], rows, track))
        except UserError as error:
            failures[name] = error
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, 'a', encoding='utf-8') as rows_file:
            rows_file.write(json.dumps(rows[-1]) + '\n')
    return failures


def find_data(track):
    """Fail before a run trains, not when its pairs are scored."""
    names = [TRACKS[track]['data'], TRACKS[track]['pairs']]
    make_toys(names)
    for name in names:
        if not Path('data', name).exists():
            raise UserError(f'there is no data/{name}: make it with python prepare.py {name}')


def main():
    parser = Parser(__doc__)
    parser.add_argument('entries', nargs='*', help='names in arena/entries.py; none: all of them')
    parser.add_argument('--track', choices=TRACKS, default='toy', help='which race')
    parser.add_argument('--seeds', type=numbers, default='1,2,3', help='a run for each')
    parser.add_argument('--sweep', metavar='KEY=A,B,...', help='a third of a run for each value')
    parser.add_argument('--minutes', action='store_true', help='equal time, not equal tokens')
    parser.add_argument('--table', action='store_true', help='run nothing')
    parser.add_argument('--results', type=Path, help='where rows are read and written; without it '
                        'they go to out/arena, and ours in papers/results count, too')
    args = parser.parse_args()
    folders = [args.results] if args.results else [PUBLISHED, Path('out/arena')]
    if args.table:
        return show(args.track, folders, args.entries)
    entries, key, kind = find_entries(args.entries, args.track), None, ''
    wanted = [dict(entry=name, seed=seed) for seed in args.seeds for name in entries]
    if args.sweep:
        kind = '_sweeps'
        key, wanted = list_sweep(entries, args.sweep)
    elif args.minutes:
        kind = '_minutes'
        entries = find_entries([DENSE_OF_MINUTES], args.track) | entries
        wanted = list_minutes(entries, args.seeds)
    file = f'arena_{args.track}{kind}.jsonl'
    failures = make_missing(entries, wanted, key, file, folders, args.track)
    if args.sweep:
        for name in entries:
            show_sweep(name, key, args.track, folders)
    elif args.minutes:
        print_columns(list(minutes_table(args.track, folders)))
    else:
        show(args.track, folders, args.entries)
    if failures:
        raise UserError('; '.join(f'{name}: {reason}' for name, reason in failures.items()))


if __name__ == '__main__':
    run_main(main)
