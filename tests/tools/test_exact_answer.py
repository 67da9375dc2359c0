"""tools/exact_answer.py: numbers by hand, batched = one by one, and what a user can get wrong."""

import json

import pytest
import torch
import torch.nn.functional as F

import moep
import papaformer
import selfmoe
import stlm
from conftest import documents
from plumbing.cli import UserError
from plumbing.tokenizer import choose_tokenizer
from tools import exact_answer
from test_stlm import stream
from tools.exact_answer import complete, last_number, read_problems

TINY = dict(vocab_size=40, block_size=32, n_layer=2, n_head=2, n_embd=16)
PARALLEL = dict(n_parallel=1, n_embd_parallel=8, n_head_parallel=1, dropout=0.0)
PATHS = dict(n_parallel=1, path_embd=[8, 8], path_head=[1, 1], connection='gumbel2')
MODELS = dict(
    moep=(moep, PARALLEL),
    papaformer=(papaformer, PATHS),
    selfmoe=(selfmoe, dict(n_kv_head=1, gate='vector', n_expert=3, top_k=2)))


def make(name):
    module, keys = MODELS[name]
    return module.Model(module.Config(**TINY, **keys))


@pytest.mark.parametrize('text, number', [
    ('37+49-18=68. The answer is 68 (games).', 68),
    ('so 288*4 = 1,152 chocolates\n#### 1152', 1152),
    ('it costs $3.50.', 3.5),
    ('x = -7', -7),
    ('9-5', 5),
    ('(3)-2', 2),
    ('1,2', 2),
    ('12,345,678', 12345678),
    ('none', None),
    ('', None),
    ('= -0.25', -.25),
    ('The answer is 4.', 4),
    ('version 2.0', 2)])
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize('name', MODELS)
def test_batched_is_one_by_one(name):
    """Prompts of many lengths in one batch, against the model's own greedy generate, cut at end-of-text."""
    torch.manual_seed(3)
    model = make(name).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 9, 1, 20, 5, 9, 14, 2, 7)
    prompts = [torch.randint(1, 40, (n,), generator=generator).tolist() for n in lengths]
    expected = []
    for prompt in prompts:
        text = model.generate(torch.tensor([prompt]), 12, temperature=0)[0, len(prompt):].tolist()
        expected.append(text)
    # take as end-of-text one that some of them write
    eot = max(range(1, 40), key=lambda i: sum(i in text for text in expected))
    expected = [text[:text.index(eot)] if eot in text else text for text in expected]
    assert len({len(text) for text in expected}) > 1
    for batch_size in (1, 4, 100):
        assert complete(model, prompts, eot, 12, batch_size) == expected


def test_chunks_are_completed_as_one_by_one():
    """Prompts of some lengths; symbols 6, 7, 8 are end-of-chunk, end-of-text and padding."""
    torch.manual_seed(3)
    keys = dict(n_kv_head=1, ffn_hidden=8, byte_limit=3, byte_embd=8, byte_layer=1, byte_head=1, dropout=0.0)
    model = stlm.STLM(stlm.STLMConfig(**dict(TINY, vocab_size=9, block_size=40), **keys)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 * torch.randn_like(p))
    prompts = [stream(1, n, seed=i)[0].tolist() for i, n in enumerate((8, 4, 12, 4, 8, 20, 8, 4, 8))]
    expected = []
    for prompt in prompts:
        text = model.generate(torch.tensor([prompt]), 20, temperature=0)[0, len(prompt):].tolist()
        expected.append(text[:text.index(7)] if 7 in text else text)
    assert len({*map(tuple, expected)}) > 3 and len({len(text) for text in expected}) > 1
    for batch_size in (1, 3, 100):
        assert complete(model, prompts, 7, 20, batch_size) == expected


def test_problems(tmp_path, data_dir):
    problems = read_problems(data_dir / 'toy_math')
    for other in ('toy_pauses', 'toy_thoughts'):
        assert read_problems(data_dir / other) == problems
    assert len(problems) > 100
    assert all('answer is' in solution and '\n' not in question for question, solution in problems)
    assert ['\n'.join(problem) for problem in problems] == documents(data_dir / 'toy_math', 'val')
    rows = [dict(question='a\nb', generated_solution='c = 4'), dict(question='q', generated_solution='5')]
    (tmp_path / 'p.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
    assert read_problems(tmp_path / 'p.jsonl') == [('a\nb', 'c = 4'), ('q', '5')]


class Parrot(torch.nn.Module):
    """Writes 7 and end-of-text, whatever the question."""
    config = moep.MoEPConfig(vocab_size=257, block_size=16, n_layer=1, n_embd=8, n_head=1, n_parallel=0)

    def forward(self, idx, cache=None):
        following = torch.where(idx == ord('7'), 256, ord('7'))
        return F.one_hot(following, 257).float(), None, {}


def test_result():
    problems = [('a', '3 + 4 = 7'), ('b', 'it is 5'), ('c', 'nothing'), ('d' * 20, '7'), ('e', 'is 5'),
                ('f', '7.0'), ('g', '14/2 = 7')]
    result = exact_answer.exact_answer(Parrot(), choose_tokenizer('bytes'), problems, 4, batch_size=2)
    assert (result['accuracy'], result['right']) == (0.6, 3)
    assert (result['problems'], result['left_out']) == (5, 2)
    assert result['guess'] == 0.6 and [e['text'] for e in result['examples']] == ['7'] * 5


def test_no_problem_can_be_asked():
    with pytest.raises(UserError, match='no problem with a number in its solution leaves 4 tokens'):
        exact_answer.exact_answer(Parrot(), choose_tokenizer('bytes'), [('a', 'nothing')], 4)


def test_what_the_model_is_given(monkeypatch):
    seen = []

    def complete(model, prompts, *rest):
        seen.extend(prompts)
        return [[ord('7')]] * len(prompts)
    monkeypatch.setattr(exact_answer, 'complete', complete)
    tokenizer = choose_tokenizer('bytes')
    problems = [('3 + 4?', '7'), ('2?', '2')]
    assert exact_answer.exact_answer(make('moep'), tokenizer, problems, 4)['right'] == 1
    assert seen == [[tokenizer.eot, *b'3 + 4?\n'], [tokenizer.eot, *b'2?\n']]


@pytest.mark.parametrize('name, content, message', [
    ('bad.jsonl', b'{"question": "a", "generated_solution": "1"}\n{"question": "b"}\n', 'bad.jsonl:2'),
    ('deep.jsonl', b'[' * 100000, 'deep.jsonl:1'),
    ('half.jsonl', b'{"question": "\\ud800", "generated_solution": "1"}', 'half.jsonl:1'),
    ('empty.jsonl', b'\n', 'no problems'),
    ('none.jsonl', None, 'none.jsonl'),
    ('latin.jsonl', '{"question": "é", "generated_solution": "1"}\n'.encode('latin-1'),
     'latin.jsonl: line 1, byte 14 is not UTF-8')])
def test_broken_files(tmp_path, name, content, message):
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_problems(tmp_path / name)


@pytest.mark.slow
def test_as_a_user(run, smoke, data_dir, tmp_path):
    folder = smoke('config/selfmoe_math.py')
    math = f'--data={data_dir}/toy_math'
    done = run('tools.exact_answer', folder, math, '--num=20', '--show=1', f'--json={tmp_path}/r.json')
    assert 'of 20 problems' in done.stdout and '-> ' in done.stdout
    assert 'the question is the first line of a document' in done.stdout
    assert json.loads((tmp_path / 'r.json').read_text())['problems'] == 20
    row = dict(question='1+1?', generated_solution='x' * 1000 + ' 2')
    (tmp_path / 'long.jsonl').write_text(json.dumps(row) + '\n')
    told = run('tools.exact_answer', folder, f'--data={tmp_path}/long.jsonl', '--show=1', here=True).stdout
    assert 'x' * 500 in told and 'x' * 501 not in told and 'first line' not in told
    (tmp_path / 'bad.jsonl').write_text('{"question": "b"}\n')
    for args, message in (
            ([f'--data={tmp_path}/bad.jsonl'], 'bad.jsonl:1'),
            ([f'--data={tmp_path}/none.jsonl'], 'none.jsonl'),
            ([math, '--max_new_tokens=500'], 'lower --max_new_tokens'),
            ([math, '--num=0'], 'not between 1'),
            ([math, '--show=-1'], 'not between 0'),
            ([math, '--json=/none/x.json'], 'cannot be written')):
        text = run('tools.exact_answer', folder, *args, code=2).stderr
        assert message in text and text.count('\n') == 1
    both = run('tools.exact_answer', smoke('config/papaformer.py'), code=2).stderr
    assert 'several data sets' in both and both.count('\n') == 1
    for config in ('stlm_pause', 'stlm_thoughts', 'stlm_bytes'):
        folder = smoke(f'config/{config}.py')
        done = run('tools.exact_answer', folder, math, '--num=3', '--max_new_tokens=26', here=True)
        assert 'of 3 problems' in done.stdout
