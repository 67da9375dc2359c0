"""docs/results/: what is kept of a run, and the tables that are made of it."""

import json
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / 'docs' / 'results'))
import keep
import tables


def test_tables_in_the_docs_are_those_of_the_kept_files():
    for path in [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]:
        text = path.read_text(encoding='utf-8')
        assert tables.fill(text) == text, f'{path.name}: python docs/results/tables.py'
    assert '<!-- moep -->' in (ROOT / 'docs' / 'results.md').read_text(encoding='utf-8')


def test_a_table_is_made_anew():
    filled = tables.fill('before\n<!-- glue -->\n| old |\n<!-- end -->\nafter')
    assert filled.startswith('before\n<!-- glue -->\n| task, metric |') and filled.endswith('|\n<!-- end -->\nafter')
    assert '| old |' not in filled and '|---|---|---|---|---|---|---|' in filled


def test_spread():
    assert tables.spread([1.0, 2.0, 3.0], 1) == '2.0 ± 1.0' and tables.spread([1.25], 1) == '1.2' and tables.spread([None], 1) == '-'


def test_unused_choices():
    assert tables.idle(dict(routes={'a': [0.5, 0.5, 0.0, 0.0], 'b': [0.009, 0.011, 0.5, 0.48]})) == (3, 8)


def test_seeds_and_runs_that_were_stopped(tmp_path, monkeypatch):
    """Seeds in one order; a run without BLiMP is in no table of ends, and one that was stopped has a dash."""
    (tmp_path / 'moep').mkdir()
    point = lambda step, loss: dict(iter=step, words=5e3 * step, val={'babylm': dict(loss=loss, bits_per_byte=loss / 2)}, routes={'a': [1.0, 0.0]})
    for name, last, loss in (('moep_1', 10000, 3.0), ('moep_2', 10000, 4.0), ('moep_42', 10000, 5.0), ('none_42', 6000, 6.0)):
        scores = [dict(mode=mode, subset=subset, runs=[dict(words=1e6, overall=50.0), dict(words=1e8, overall=10 * loss)])
                  for mode in ('harness', 'babylm2025') for subset in ('fast', 'full')] if last == 10000 else []
        run = dict(evaluations=[point(step, loss) for step in (0, 2000, 6000, 10000) if step <= last], blimp=scores)
        (tmp_path / 'moep' / f'{name}.json').write_text(json.dumps(run))
    monkeypatch.setattr(tables, 'HERE', tmp_path)
    assert list(tables.runs('moep')['moep']) == [42, 1, 2]
    assert list(tables.moep())[1:] == ['MoEP, `switch` | 3 | 4.000 ± 1.000 | 2.000 ± 0.500 | 40.0 ± 10.0 | 40.0 ± 10.0 | 1 of 2, 1 of 2, 1 of 2']
    assert list(tables.moep_words())[1].startswith('1M | 50.0 ± 0.0') and list(tables.moep_words())[-1] == '100M | 40.0 ± 10.0'
    assert list(tables.moep_routes())[1:] == [f'MoEP, `switch` | {seed} | ' + ' | '.join([f'{loss}, 1 of 2'] * 3 + ['-'])
                                              for seed, loss in ((42, '5.000'), (1, '3.000'), (2, '4.000'))] + [
        'MoEP, no balance loss | 42 | 6.000, 1 of 2 | 6.000, 1 of 2 | - | -']
    (tmp_path / 'moep' / 'other_42.json').write_text('{}')
    with pytest.raises(ValueError, match='other_42'):
        tables.runs('moep')


def test_keep_a_run(run, tmp_path):
    lines = [dict(iter=0, val={'x': {'loss': 7.6543210}}, routes={})]
    lines += [dict(iter=i, loss=1 / i, tokens_per_s=100 * i) for i in range(1, 7)] + [dict(iter=6, val={'x': {'loss': 1.5}}, routes={})]
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'log.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
    scores = dict(checkpoint='out/run/ckpt_1M.pt', iter=6, words=1e6, overall=61.23456, fields={'syntax': 60.0}, phenomena={'npi': 1.0}, paradigms={})
    for subset in ('fast', 'full'):
        (tmp_path / f'{subset}.json').write_text(json.dumps(dict(mode='harness', subset=subset, runs=[scores])))
    (tmp_path / 'run.log').write_text('a warning\nmodel     papaformer: 30.24M parameters, 23.94M active per token, 14.30M trained\n')
    (tmp_path / 'usage.json').write_text('{"accuracy": 0.46650001}')
    out = tmp_path / 'kept' / 'a_1.json'
    run('docs/results/keep.py', tmp_path / 'run', '--out', out, '--command', 'train.py x', '--every', '3', '--minutes', '2.5',
        '--blimp', tmp_path / 'fast.json', tmp_path / 'full.json', '--printed', tmp_path / 'run.log', '--with', f"usage={tmp_path / 'usage.json'}")
    kept = json.loads(out.read_text())
    assert kept['command'] == 'train.py x' and kept['minutes'] == 2.5 and kept['tokens_per_s'] == 350
    assert [e['val']['x']['loss'] for e in kept['evaluations']] == [7.6543, 1.5]
    assert kept['steps'] == [dict(iter=3, loss=0.33333), dict(iter=6, loss=0.16667)]
    fast, full = kept['blimp']
    assert fast['runs'] == [dict(checkpoint='ckpt_1M.pt', iter=6, words=1e6, overall=61.235, fields={'syntax': 60.0})]
    assert full['runs'][0]['phenomena'] == {'npi': 1.0}
    assert (kept['parameters'], kept['active'], kept['trained']) == (30.24e6, 23.94e6, 14.3e6) and kept['usage'] == {'accuracy': 0.4665}


def test_a_model_that_trains_whole(tmp_path):
    (tmp_path / 'run.log').write_text('model     moep: 28.36M parameters, 21.30M active per token\n')
    assert keep.read_size(tmp_path / 'run.log') == dict(parameters=28.36e6, active=21.3e6, trained=28.36e6)


def test_keep_fine_tuning(tmp_path):
    paths = []
    for seed in (3, 12):
        result = dict(seed=seed, scores={'accuracy': 50.0 + seed}, best_epoch=2, epochs=7, history=[], trained=9, seconds=90.0)
        task = dict(task='rte', train=10, valid=5, majority={'accuracy': 50.0}, runs=[result])
        paths.append(tmp_path / f'{seed}.json')
        paths[-1].write_text(json.dumps(dict(settings=dict(run='out/moep_42'), tasks=[task])))
    kept = keep.read_glue(paths)
    assert kept['moep_42']['rte']['seeds'] == {seed: dict(accuracy=50.0 + seed, best_epoch=2, epochs=7, minutes=1.5) for seed in (3, 12)}
