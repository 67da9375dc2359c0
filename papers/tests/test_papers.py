"""papers/: each number against a slow, obvious way to get it."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import moduleformer
import moep
import test_papaformer as papaformers
from moduleformer import count_usage, prune_experts
from oracles import tokens
from papers import depth, eval_length, exact_answer, passes, path_usage, prune_curve
from papers.exact_answer import complete, last_number, read_problems
from plumbing.bins import load_bin, val_batches
from plumbing.checkpoint import data_folders, load_checkpoint
from plumbing.machine import Machine
from plumbing.settings import read_settings
from plumbing.tokenizer import choose_tokenizer, load_meta, load_tokenizer
from stlm_depth import STLMDepth, STLMDepthConfig

# ---- passes -------------------------------------------------------------------------------------

def test_passes(data_dir, tmp_path, monkeypatch):
    """All models of a seed read the same share of every set, those of the next seed the next one.
    Bits per byte are those of all bytes."""
    (tmp_path / 'data').symlink_to(data_dir)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(passes, 'PROSE', ('toy_stories', 'toy_math'))
    log = [dict(run=dict(steps=2, tokens_per_step=64, parameters=9)), dict(loss=1.0),
           dict(val=dict(toy_stories=dict(bits_per_byte=1.0), toy_math=dict(bits_per_byte=2.0)))]
    monkeypatch.setattr(passes, 'read_log', lambda out: log)
    runs, parts = [], {}

    def call(script, *args):
        if script == 'train.py':
            return runs.append(read_settings(args)[0])
        _, _, name, _, *parts[name] = args               # mix --name NAME --input ...
    monkeypatch.setattr(passes, 'call', call)
    models = passes.PASSES
    rows = [passes.train(models, model, 1000.0, seed) for seed in (1, 2) for model in models]
    stories, math = (load_meta(data_dir / name)['splits'] for name in passes.PROSE)
    share = 1000 / (stories['train']['tokens'] + math['train']['tokens'])
    first, second = ([f'data/{name}:{low}:{low + share}' for name in passes.PROSE]
                     for low in (0.0, share))
    assert [parts[s.data] for s in runs] == [first] * 3 + [second] * 3
    assert {s.max_iters for s in runs} == {passes.STEPS}
    n, m = (split['val']['bytes'] for split in (stories, math))
    for row in rows:
        assert row['passes'] == pytest.approx(2 * 64 / 1000)
        assert row['bits_per_byte'] == pytest.approx((n + 2 * m) / (n + m))


# ---- exact_answer -------------------------------------------------------------------------------

TINY = dict(vocab_size=40, block_size=32, n_layer=2, n_head=2, n_embd=16)


@pytest.mark.parametrize('text, number', [
    ('37+49-18=68. The answer is 68 (games).', 68),
    ('so 288*4 = 1,152 chocolates\n#### 1152', 1152),
    ('it costs $3.50.', 3.5),
    ('= -0.25', -.25),
    ('9-5', 5),
    ('1,2', 2),
    ('none', None)])
def test_last_number(text, number):
    assert last_number(text) == number


def shake(model, size):
    """Far from uniform, so that an error shows"""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * torch.randn_like(p))
    return model.eval()


def generate_one_by_one(model, prompts, n_new):
    for prompt in prompts:
        yield model.generate(torch.tensor([prompt]), n_new, temperature=0)[0, len(prompt):].tolist()


def test_batched_is_one_by_one():
    """Prompts of many lengths: as the model's own generate, cut at end-of-text"""
    torch.manual_seed(3)
    keys = dict(n_parallel=1, n_embd_parallel=8, n_head_parallel=1, dropout=0.0)
    model = shake(moep.Model(moep.Config(**TINY, **keys)), 0.3)
    prompts = [torch.randint(1, 40, (n,)).tolist() for n in (3, 9, 1, 20, 5, 9, 14, 2, 7)]
    texts = [*generate_one_by_one(model, prompts, 12)]
    eot = max(range(1, 40), key=lambda i: sum(i in text for text in texts))
    texts = [text[:text.index(eot)] if eot in text else text for text in texts]
    assert len({len(text) for text in texts}) > 1
    for batch_size in (1, 4, 100):
        assert complete(model, prompts, eot, 12, batch_size, 'cpu') == texts


def test_problems(data_dir):
    problems = read_problems(data_dir / 'toy_math')
    for other in ('toy_pauses', 'toy_thoughts'):
        assert read_problems(data_dir / other) == problems
    tokenizer = load_tokenizer(data_dir / 'toy_math')
    tokens = [tokenizer.eot]
    for problem in problems:                             # they are all of val.bin
        tokens += [*tokenizer.encode('\n'.join(problem)), tokenizer.eot]
    assert tokens == load_bin(data_dir / 'toy_math', 'val').tolist()


class Parrot(torch.nn.Module):
    """Writes 7 and end-of-text, whatever the question"""
    config = moep.MoEPConfig(vocab_size=257, block_size=16, n_layer=1, n_embd=8, n_head=1,
                             n_parallel=0)
    seen = []

    def generate(self, idx, n_new, temperature):
        self.seen += idx.tolist()
        return torch.cat((idx, torch.tensor([[ord('7'), 256]] * len(idx))), 1)


def test_exact_answers():
    problems = [('a', '3 + 4 = 7'), ('b', 'it is 5'), ('c', 'nothing'), ('d' * 20, '7'),
                ('e', 'is 5'), ('f', '7.0'), ('g', '14/2 = 7')]
    tokenizer = choose_tokenizer('bytes')
    result = exact_answer.exact_answer(Parrot(), tokenizer, problems, 4, batch_size=2, device='cpu')
    assert (result['accuracy'], result['right'], result['guess']) == (0.6, 3, 0.6)
    assert (result['problems'], result['left_out']) == (5, 2)
    assert [example['text'] for example in result['examples']] == ['7'] * 5
    assert Parrot.seen[0] == [tokenizer.eot, *b'a\n']


# ---- path_usage ---------------------------------------------------------------------------------

@pytest.mark.parametrize('changes', [
    dict(connection='gumbel1'), dict(connection='gumbel2'), dict(n_parallel=3),
    dict(papaformers.UNEQUAL, n_parallel=3)], ids=str)
def test_path_usage(changes):
    """Of the last token. Gumbel: its choice. Share: the path whose output is most similar to what
    the next layer reads, in all layers except the last."""
    model, x = papaformers.make(**changes).eval(), tokens(9, 4)
    _, _, weights, outputs = papaformers.oracle(model, x)
    want = [[row[-1].tolist().index(1) for row in layer] for layer in weights.values()]
    for n in range(len(model.parallel) - 1) if not weights else ():
        layer = []
        for f, reads in outputs[n]:                      # of each path, for the last token of a row
            cosines = [a @ b / torch.sqrt((a @ a) * (b @ b)) for a, b in zip(f, reads)]
            layer.append(cosines.index(max(cosines)))
        want.append(layer)
    assert len({*sum(want, [])}) > 1
    assert torch.equal(path_usage.path_usage(model, x), torch.tensor(want).T)
    assert not any(m._forward_hooks for m in model.modules())


def test_prompts(run, smoke, data_dir, tmp_path, monkeypatch):
    """Every prompt begins with end-of-text, as documents do in training"""
    folder = smoke('config/papaformer.py')
    seen = []

    def usage(model, idx):
        seen.append(idx)
        return torch.tensor([[0, 1]] * len(idx))
    monkeypatch.setattr('papers.path_usage.path_usage', usage)
    stories, out = data_dir / 'toy_stories', tmp_path / 'u.json'
    eot = load_tokenizer(stories).eot
    run('papers.path_usage', folder, '--data', stories, data_dir / 'toy_math', '--num=5',
        '--length=7', f'--json={out}', here=True)
    assert seen[0].shape == (5, 8) and (seen[0][:, 0] == eot).all()
    assert (seen[0][:, 1:] != eot).all()
    result = json.loads(out.read_text())
    assert result[str(stories)]['share'] == [0.5, 0.5] and result['accuracy'] == 0.5


# ---- prune_curve --------------------------------------------------------------------------------

def test_pruned_and_scored_by_hand(run, smoke, tmp_path, monkeypatch):
    """Counted on one half of val.bin, scored on the other"""
    out = smoke('config/moduleformer.py')
    monkeypatch.setattr(prune_curve, 'THRESHOLDS', [0, 0.9])
    run('papers.prune_curve', out, f'--json={tmp_path}/c.json', here=True)
    rows = json.loads((tmp_path / 'c.json').read_text())['rows']
    model, ckpt = load_checkpoint(out)
    tokens = load_bin(*data_folders(ckpt), 'val')
    half = len(tokens) // 2
    T = model.config.block_size
    usage = count_usage(model, val_batches(tokens[:half], T, 16, -1))
    x, y = map(torch.cat, zip(*val_batches(tokens[half:], T, 16, -1)))
    all_parameters = sum(p.numel() for p in model.parameters())
    for row, small in zip(rows, (model, prune_experts(model, usage, 0.9)[0]), strict=True):
        with torch.no_grad():
            assert abs(row['loss'] - small(x, y)[1].item()) < 1e-4
        parameters = sum(p.numel() for p in small.parameters())
        assert (row['parameters'], row['left']) == (parameters, parameters / all_parameters)
        pools = [len(m.weight) for name, m in small.named_modules() if name.endswith('.A')]
        assert row['modules'] == sum(pools) / (3 * (4 + 8))
    assert rows[0]['left'] == 1 and rows[1]['left'] < 1


# ---- eval_length --------------------------------------------------------------------------------

def tiny_moduleformer():
    torch.manual_seed(0)
    config = moduleformer.Config(vocab_size=50, block_size=8, n_layer=2, n_embd=16, d_att=16,
                                 d_ffd=16, n_att=2, n_ffd=2, top_k=1, n_head=2)
    return shake(moduleformer.Model(config), 0.3)


def test_loss_by_position_one_token_at_a_time():
    model = tiny_moduleformer()
    tokens = torch.randint(50, (70,)).short()
    losses = eval_length.loss_by_position(model, tokens, 20, 9, Machine('cpu'))
    windows = [tokens[start:start + 21].long() for start in range(0, 50, 9)]
    for t in (0, 1, 7, 8, 19):                           # one token, given all before it
        with torch.no_grad():
            logits = torch.cat([model(window[None, :t + 1])[0][:, -1] for window in windows])
        nats = F.cross_entropy(logits, torch.stack([window[t + 1] for window in windows]))
        assert math.isclose(losses[t].item(), nats.item(), rel_tol=1e-5)


def test_with_memory():
    """A segment sees the keys and values of the N tokens before it, which saw N before them"""
    model = tiny_moduleformer()
    tokens = torch.randint(50, (60,)).short()

    def losses(**keys):
        return eval_length.loss_by_position(model, tokens, 24, 35, Machine('cpu'), **keys)
    at_once, (none, few, many) = losses(), (losses(segment=8, memory=n) for n in (0, 4, 100))
    torch.testing.assert_close(many, at_once)            # the memory holds all that came before
    torch.testing.assert_close(few[:8], at_once[:8])     # nothing came before the first segment
    second = torch.stack([tokens[start + 8:start + 17].long() for start in (0, 35)])
    with torch.no_grad():
        alone = model(second[:, :-1], second[:, 1:], reduction='none')[1].mean(0).double()
    torch.testing.assert_close(none[8:16], alone)
    assert (few[8:] - at_once[8:]).abs().max() > 1e-5 and (few[8:] - none[8:]).abs().max() > 1e-5


# ---- depth --------------------------------------------------------------------------------------

FEW = ['--eval_tokens=256', '--prompts=3', '--max_new_tokens=6', '--device=cpu']


def first_windows(data_dir):
    (x, y), = val_batches(load_bin(data_dir / 'toy_stories', 'val'), 64, 4, -1, 256)
    return x, y


@torch.no_grad()
def test_exits(run, smoke, data_dir, tmp_path):
    """After every layer the same norm and head; drafts change the speed and nothing else"""
    out = smoke('config/stlm_exit.py')
    run('papers.depth', out, *FEW, f'--json={tmp_path}/d.json', here=True)
    result = json.loads((tmp_path / 'd.json').read_text())
    model, _ = load_checkpoint(out)
    x, y = first_windows(data_dir)
    for n, row in enumerate(result['exits'], 1):
        states, *_ = model.run(model.wte(x), range(n), 0)
        logits = F.linear(model.norm_f(states[-1]), model.wte.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        assert math.isclose(row['loss'], loss.item(), rel_tol=1e-4)
    assert n == 4 and math.isclose(row['loss'], model(x, y)[1].item(), rel_tol=1e-4)
    assert [row['layers'] for row in result['drafts']] == [0, 1, 2, 3]
    assert all(row['same'] == 3 for row in result['drafts']) and result['routed'] == {}


@torch.no_grad()
def test_causal_and_looking_ahead(run, smoke, data_dir, tmp_path):
    out = smoke('config/stlm_depth.py')
    run('papers.depth', out, *FEW, '--draft_layers=2', f'--json={tmp_path}/d.json', here=True)
    routed = json.loads((tmp_path / 'd.json').read_text())['routed']
    model, _ = load_checkpoint(out)
    x, y = first_windows(data_dir)
    for mode, training in (('forecast', False), ('top', True)):      # it has no dropout
        loss = model.train(training)(x, y)[1].item()
        assert math.isclose(routed[mode]['loss'], loss, rel_tol=1e-4)
    assert set(routed['passed']) == {'layers.1', 'layers.3'}


def test_all_drafts_are_kept():
    """The other layers add nothing to the first, so they confirm what it drafts"""
    config = STLMDepthConfig(vocab_size=37, block_size=32, n_layer=3, n_head=2, n_kv_head=1,
                             n_embd=8, ffn_hidden=8, capacity=1.0)
    model = STLMDepth(config).eval()
    for layer in model.layers[1:]:
        layer.proj.weight.data.zero_()
        layer.down.weight.data.zero_()
    texts, _, kept = depth.decode(model, torch.randint(37, (2, 4)), 10, 1)
    assert texts.shape == (2, 14) and kept == 1
