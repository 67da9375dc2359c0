"""
The arena: which routing idea pays at equal cost? docs/arena.md has the rules and the tables.

    python -m tools.arena config/arena/*.py                          # track toy: a laptop
    python -m tools.arena config/arena/*.py --track baby             # BabyLM-style text: one GPU
    python -m tools.arena moep --sweep learning_rate=2e-3,4e-3,8e-3  # config/arena/toy/moep.py
    python -m tools.arena --table                                    # only make the tables again

An entry is a config: config/arena/NAME.py for the track baby, config/arena/toy/NAME.py for toy. Or
it is a folder of that name: its configs are stages, run in the order of their names, and their costs
are added up. On toy, a new entry first has to pass tools.check. train.py trains each entry with each
seed, eval_blimp.py scores it, and a small file TRACK/NAME_SEED.json in --results keeps what came out.
What has its file is not run again. After a kill, the same command continues from the last checkpoint.
"""

import subprocess
import sys
from pathlib import Path

import prepare
from plumbing.cli import Parser, UserError, between, parse_json, run_main, write_json
from plumbing.models import ROOT, model_file
from plumbing.settings import read_config, read_settings
from tools.entries import (
    check_kept, find_entries, identify, read_kept, read_run, saved_entry, split_values, third_of_tokens)
from tools.leaderboard import MODES, SEEDS, TRACKS, classes, read_results, show, show_sweep

RESULTS = ROOT / 'docs' / 'results' / 'arena'
FIXED = ('model', 'data', 'data_dir', 'seed', 'out_dir', 'init_from', 'resume', 'overwrite', 'epochs',
         'max_iters', 'epoch_words', 'seq_len', 'block_size', 'eval_data', 'eval_tokens')


# ---- Running ------------------------------------------------------------------------------------

def call(script, *args):
    """A script of this project, or a tool (tools.NAME). If this process is told to stop, so is the
    script: once, and then train.py saves. Ctrl-C would reach both, hence a session of its own."""
    start = [ROOT / script] if script.endswith('.py') else ['-m', script]
    process = subprocess.Popen([sys.executable, *start, *map(str, args)], start_new_session=True)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        print('the arena stopped; to continue, repeat its command, without --resume', flush=True)
        raise
    if code:
        raise UserError(f'{script} ended with exit code {code}; its message is above')


def train(stages, entry, out, seed, data_dir, setting=None):
    """Train the stages, or resume them -> the last one's folder, and a result: the entry, and what
    the logs say. A stage that starts from earlier ones finds them beside itself. With a setting: a
    third of the tokens."""
    found = []
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / 'entry.json', entry)                # what is resumed, should it be killed
    for config in stages:
        folder = out / config.stem if len(stages) > 1 else out
        args = [config, f'--seed={seed}', f'--out_dir={folder}', f'--data_dir={data_dir}']
        if setting:
            args += [third_of_tokens(config, setting), f'--{setting}']
        starts = read_config(config).get('init_from')
        if isinstance(starts, list):
            args.append(f'--init_from={[str(out / Path(start).name) for start in starts]}')
        elif starts:
            args.append(f'--init_from={out / Path(starts).name}')
        call('train.py', *args, '--sample_tokens=0', '--resume')
        found.append(read_run(folder))
    tokens = sum(run['tokens'] for run in found)
    sums = dict(
        tokens=tokens,
        minutes=sum(run['minutes'] for run in found),
        flops_per_token=sum(run['flops_per_token'] * run['tokens'] for run in found) / tokens,
        tokens_per_s=tokens / sum(run['tokens'] / run['tokens_per_s'] for run in found),
        commands=[run.pop('command') for run in found])
    return folder, entry | found[-1] | sums


def score_pairs(folder, pairs):
    """{mode: percent of the minimal pairs}; None where there are no pairs."""
    scores = dict.fromkeys(MODES)
    if not pairs.is_dir():
        return scores
    for mode in MODES:
        file = folder / f'{mode}.json'
        call('eval_blimp.py', folder, '--data', pairs, '--mode', mode, '--json', file)
        scores[mode] = parse_json(file.read_text())['runs'][0]['overall']
    return scores


def need_data(args):
    """Fail now rather than in every run."""
    name = TRACKS[args.track]['data']
    prepare.make_missing_toys([name], args.data_dir)
    if not (args.data_dir / name / 'meta.json').exists():
        raise UserError(f'there is no {args.data_dir / name}: make it with python prepare.py {name}')


def find_fault(name, stages, track):
    """Why a new entry is refused: '' if tools.check finds nothing wrong. Not checked are stages, which
    may start from other runs, and the models of baby, which would take too long on a CPU."""
    if track != 'toy' or len(stages) > 1:
        return ''
    config, = stages
    s, _, _ = read_settings([str(config)])
    print(f'\n==== {name} is new: tools.check', flush=True)
    try:
        call('tools.check', s.model, '--config', config)
    except UserError:
        return f'{name} is refused: python -m tools.check {s.model} --config {config} says why'
    return ''


def find_runs(name, entry, args):
    """-> what the entry was in earlier results and runs, the runs to make, and the paths of all."""
    earlier, todo, paths = [], [], []
    for seed in range(1, SEEDS + 1):                     # the tables show all that there are
        file = args.results / args.track / f'{name}_{seed}.json'
        out = args.out / args.track / f'{name}_{seed}'
        paths += [file, out]
        earlier += [read_kept(file), saved_entry(out)]
        if seed <= args.seeds and not file.exists():
            todo.append((seed, name, entry, file, out))
    return earlier, todo, paths


def race(entries, args):
    """Every entry with seed 1, then with the next. The others still run if one fails -> those that
    failed, and messages about changed code."""
    results = args.results / args.track
    pairs = args.data_dir / TRACKS[args.track]['pairs']
    failed, changed, runs, new = [], [], [], []
    for name, stages in entries.items():
        entry = identify(stages)
        earlier, todo, paths = find_runs(name, entry, args)
        changed += check_kept(name, entry, earlier, todo, paths)
        if not any(earlier):
            new.append(name)
        runs += todo
    runs.sort(key=lambda run: run[0])                    # by seed, else in this order
    if runs:
        need_data(args)
        results.mkdir(parents=True, exist_ok=True)
        prepare.make_missing_toys([pairs.name], args.data_dir)
        if not pairs.is_dir():
            print(f'there is no {pairs} (see prepare.py): nothing will be scored on minimal pairs, '
                  f'until you make it, delete the new files in {results}, and repeat the command')
    for name in new:
        if fault := find_fault(name, entries[name], args.track):
            failed.append(fault)
            runs = [run for run in runs if run[1] != name]
    for number, (seed, name, entry, file, out) in enumerate(runs, 1):
        model = model_file(entry['configs'][-1]['model'])
        print(f'\n==== {number} of {len(runs)}: {name} ({model}), seed {seed}', flush=True)
        try:
            folder, result = train(entries[name], entry, out, seed, args.data_dir)
            result |= score_pairs(folder, pairs)
        except UserError as error:
            failed.append(f'{name} with seed {seed}: {error}; the same command tries again')
            continue
        if not classes(result, args.track):              # stages, or another number of tokens
            print(f'{name} is in neither class, or not within the budget: it is in no table')
        write_json(file, result)
    return failed, changed


def sweep(entries, args):
    """One seed and a third of the tokens for each value of a setting -> as race()."""
    key, _, values = args.sweep.partition('=')
    key = key.replace('-', '_')
    if key in FIXED:
        raise UserError(f'{key} cannot be swept: it is the same for all entries')
    wanted = {}                                          # each once: 2e-3 and 0.002 are the same
    for stages in entries.values():
        for value in split_values(values):               # what is mistyped ends it here
            s, _, keys = read_settings([str(stages[-1]), f'--{key}={value}'])
            wanted[f'{key}={(vars(s) | keys)[key]}'] = None
    failed, changed = [], []
    runs = args.out / args.track / 'sweeps'
    for name, stages in entries.items():
        file = args.results / args.track / 'sweeps' / f'{name}.json'
        found = read_kept(file)
        entry = identify(stages, key)
        earlier = [result for setting, result in found.items() if setting.startswith(f'{key}=')]
        earlier += [saved_entry(runs / f'{name}_{setting}') for setting in wanted]
        todo = [setting for setting in wanted if setting not in found]
        changed += check_kept(name, entry, earlier, todo, [file, *runs.glob(f'{name}_{key}=*')])
        if todo:
            need_data(args)
        if not (found or any(earlier)) and (fault := find_fault(name, stages, args.track)):
            failed.append(fault)
            continue
        for setting in todo:
            print(f'\n==== {name}, {setting}', flush=True)
            try:
                _, result = train(stages, entry, runs / f'{name}_{setting}', 1, args.data_dir, setting)
            except UserError as error:
                failed.append(f'{name} with {setting}: {error}; the same command tries again')
                continue
            found[setting] = result
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, found)
        show_sweep(name, key, found, stages)
    return failed, changed


# ---- The command line ---------------------------------------------------------------------------

def read_arguments():
    parser = Parser(__doc__)
    parser.add_argument('entries', nargs='*', type=Path, help='names, configs, or folders of stages')
    parser.add_argument('--track', choices=TRACKS, default='toy', help='which race')
    parser.add_argument('--seeds', type=between(1, SEEDS), default=3, help='how many: 1, 2, ...')
    parser.add_argument('--sweep', metavar='KEY=A,B,...', help='a short run for each value')
    parser.add_argument('--table', action='store_true', help='run nothing')
    parser.add_argument('--out', type=Path, default=Path('out/arena'), help='where the runs go')
    parser.add_argument('--results', type=Path, default=RESULTS, help='where the small files go')
    parser.add_argument('--data_dir', type=Path, default=Path('data'), help='where prepare.py put it')
    args = parser.parse_args()
    if bool(args.entries) == args.table or args.table and args.sweep:
        raise UserError('name entries, such as config/arena/*.py, or --table alone')
    if args.sweep and not args.sweep.partition('=')[2]:
        raise UserError(f'--sweep {args.sweep}: a setting and its values, such as learning_rate=1e-3,3e-3')
    return args


def main():
    args = read_arguments()
    entries = find_entries(args.entries, args.track)
    known = {track: read_results(track, args.results) for track in TRACKS}     # none is broken
    if args.table and not known[args.track]:
        raise UserError(f'{args.results} has no results of the track {args.track}')
    failed, changed = sweep(entries, args) if args.sweep else race(entries, args)
    is_new = read_results(args.track, args.results) != known[args.track]
    if not args.sweep and (is_new or not failed):        # old tables would hide what failed
        few = entries if len(entries) <= 5 else []       # of many, the tables say enough
        show(args.track, args.results, few)
        if args.results.resolve() == RESULTS:
            call('docs/results/tables.py')               # docs/arena.md
    for message in changed:
        print(message)
    if failed:
        raise UserError(f"not finished: {'; '.join(failed)}")


if __name__ == '__main__':
    run_main(main)
