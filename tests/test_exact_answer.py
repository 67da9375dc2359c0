"""exact_answer.py: numbers by hand, batched = one by one, and what a user can get wrong."""

import json
import sys

import pytest
import torch

import exact_answer
import moep
import papaformer
import prepare
import selfmoe
from errors import UserError
from exact_answer import complete, last_number, read_problems

TINY = dict(vocab_size=40, block_size=32, n_layer=2, n_head=2, n_embd=16)
MODELS = dict(moep=lambda: moep.MoEP(moep.MoEPConfig(**TINY, n_parallel=1, n_embd_parallel=8, n_head_parallel=1, dropout=0.0)),
              papaformer=lambda: papaformer.PaPaformer(papaformer.PaPaformerConfig(
                  **TINY, n_parallel=1, path_embd=[8, 8], path_head=[1, 1], connection='gumbel2')),
              selfmoe=lambda: selfmoe.SelfMoE(selfmoe.SelfMoEConfig(**TINY, n_kv_head=1, gate='vector', n_expert=3, top_k=2)))


@pytest.mark.parametrize('text, number', [
    ('37+49-18=68. The answer is 68 (games).', 68), ('so 288*4 = 1,152 chocolates\n#### 1152', 1152), ('it costs $3.50.', 3.5),
    ('x = -7', -7), ('9-5', 5), ('(3)-2', 2), ('1,2', 2), ('12,345,678', 12345678), ('none', None), ('', None), ('= -0.25', -.25),
    ('The answer is 4.', 4), ('version 2.0', 2)])
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize('name', MODELS)
def test_batched_is_one_by_one(name):
    """Prompts of many lengths in one batch, against the model's own greedy generate, cut at end-of-text."""
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 40, (n,), generator=generator).tolist() for n in (3, 9, 1, 20, 5, 9, 14, 2, 7)]
    expected = []
    for prompt in prompts:
        text = model.generate(torch.tensor([prompt]), 12, temperature=0)[0, len(prompt):].tolist()
        expected.append(text)
    eot = max(range(1, 40), key=lambda i: sum(i in text for text in expected))   # one that some of them write
    expected = [text[:text.index(eot)] if eot in text else text for text in expected]
    assert len({len(text) for text in expected}) > 1
    for batch_size in (1, 4, 100):
        assert complete(model, prompts, eot, 12, batch_size) == expected


def test_problems_and_result(tmp_path, data_dir):
    problems = read_problems(data_dir / 'toy_math')
    assert len(problems) > 100 and all('answer is' in solution and '\n' not in question for question, solution in problems)
    tokenizer, texts, ids = prepare.load_tokenizer(data_dir / 'toy_math'), [], []
    for i in prepare.load_bin(data_dir / 'toy_math', 'val').tolist():
        if i == tokenizer.eot and ids:
            texts.append(tokenizer.decode(ids))
        ids = [] if i == tokenizer.eot else [*ids, i]
    assert ['\n'.join(problem) for problem in problems] == texts
    rows = [dict(question='a\nb', generated_solution='c = 4'), dict(question='q', generated_solution='5')]
    (tmp_path / 'p.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
    assert read_problems(tmp_path / 'p.jsonl') == [('a\nb', 'c = 4'), ('q', '5')]

    class Parrot(torch.nn.Module):
        """Writes 7 and end-of-text, whatever the question."""
        config = papaformer.PaPaformerConfig(vocab_size=257, block_size=16, n_layer=1, n_embd=8, n_head=1, n_parallel=0)

        def forward(self, idx, cache=None):
            following = torch.where(idx == ord('7'), 256, ord('7'))
            return torch.nn.functional.one_hot(following, 257).float(), None, {}
    tokenizer = prepare.choose_tokenizer('bytes')
    result = exact_answer.exact_answer(Parrot(), tokenizer, [('a', '3 + 4 = 7'), ('b', 'it is 5'), ('c', 'nothing'), ('d' * 20, '7'),
                                                            ('e', 'is 5'), ('f', '7.0'), ('g', '14/2 = 7')], 4, batch_size=2)
    assert (result['accuracy'], result['right'], result['problems'], result['left_out']) == (0.6, 3, 5, 2)
    assert result['guess'] == 0.6 and [e['text'] for e in result['examples']] == ['7'] * 5


def test_what_the_model_is_given(monkeypatch):
    seen, tokenizer = [], prepare.choose_tokenizer('bytes')
    monkeypatch.setattr(exact_answer, 'complete', lambda model, prompts, *rest: seen.extend(prompts) or [[ord('7')]] * len(prompts))
    model = MODELS['moep']()
    assert exact_answer.exact_answer(model, tokenizer, [('3 + 4?', '7'), ('2?', '2')], 4)['right'] == 1
    assert seen == [[tokenizer.eot, *b'3 + 4?\n'], [tokenizer.eot, *b'2?\n']]


def test_as_a_user(run, smoke, data_dir, tmp_path, monkeypatch):
    folder = smoke('config/selfmoe_math.py')
    done = run('exact_answer.py', folder, f'--data={data_dir}/toy_math', '--num=20', '--show=1', f'--json={tmp_path}/r.json')
    assert 'of 20 problems' in done.stdout and '-> ' in done.stdout
    assert json.loads((tmp_path / 'r.json').read_text())['problems'] == 20
    (tmp_path / 'bad.jsonl').write_text('{"question": "a", "generated_solution": "1"}\n{"question": "b"}\n')
    (tmp_path / 'empty.jsonl').write_text('\n')
    (tmp_path / 'latin.jsonl').write_bytes('{"question": "é", "generated_solution": "1"}\n'.encode('latin-1'))
    for args, message in ((['--data', tmp_path / 'bad.jsonl'], 'bad.jsonl:2'), (['--data', tmp_path / 'empty.jsonl'], 'no problems'),
                          (['--data', tmp_path / 'none.jsonl'], 'none.jsonl'), (['--max_new_tokens=500'], 'lower --max_new_tokens'),
                          (['--data', tmp_path / 'latin.jsonl'], 'latin.jsonl: line 1, byte 14 is not UTF-8'),
                          (['--num=0'], 'at least 1'), (['--json=/none/x.json'], 'cannot be written')):
        args = args if '--data' in args else [f'--data={data_dir}/toy_math', *args]
        monkeypatch.setattr(sys, 'argv', ['exact_answer.py', str(folder), *map(str, args)])
        with pytest.raises(UserError, match=message):
            exact_answer.main()
    both = run('exact_answer.py', smoke('config/papaformer.py'), code=2).stderr
    assert 'several data sets' in both and both.count('\n') == 1
