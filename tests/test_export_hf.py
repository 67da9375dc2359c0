"""tools/export_hf.py: what transformers loads from the folder computes what our model computes."""

import importlib
import json
import random
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

from conftest import ROOT
from plumbing.bpe import train_bpe
from plumbing.checkpoint import load_checkpoint
from plumbing.tokenizer import (
    build_tokenizer, copy_tokenizer, load_tokenizer, rank_tokenizer, ranks_blob)
from tools.lora import add_lora

transformers = pytest.importorskip('transformers')
from tools import export_hf                              # noqa: E402

TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=24)
MODELS = {
    'moep': ('moep', dict(n_parallel=2, n_embd_parallel=16, n_head_parallel=2)),
    'moep_swiglu': ('moep', dict(n_parallel=1, n_embd_parallel=16, n_head_parallel=2, swiglu=True)),
    'gpt2': ('moep', dict(n_parallel=0)),
    'papaformer': ('papaformer', dict(path_embd=[16, 16], path_head=[2, 2])),
    'gumbel': ('papaformer', dict(path_embd=[16, 16], path_head=[2, 2], connection='gumbel2')),
    'llama': ('papaformer', dict(n_parallel=0)),
    'moduleformer': ('moduleformer', dict(n_att=4, n_ffd=4, d_att=16, d_ffd=16, new_att=1,
                                          new_ffd=1)),
    'pruned': ('moduleformer', dict(n_att=[2, 3], n_ffd=[4, 2], d_att=16, d_ffd=16)),
    'selfmoe': ('selfmoe', dict(n_kv_head=1, gate='matrix')),
    'mixture': ('selfmoe', dict(n_kv_head=2, n_expert=4, top_k=2)),
    'stlm': ('stlm', dict(n_kv_head=1, ffn_hidden=32)),
    'shared': ('stlm', dict(n_kv_head=1, ffn_hidden=32, share='all', lora_rank=2)),
    'depth': ('stlm_depth', dict(n_kv_head=1, ffn_hidden=32, n_layer=4, capacity=0.5)),
}


def make_run(folder, data, name, keys, lora=False):
    """A checkpoint with random weights, as train.py saves it, beside the data's tokenizer."""
    torch.manual_seed(0)
    module = importlib.import_module(name)
    tokenizer = load_tokenizer(data)
    model = module.Model(module.Config(**{**TINY, 'vocab_size': tokenizer.n_vocab, **keys}))
    if lora:
        add_lora(model, rank=2)
    for p in model.parameters():                         # gates and adapters start at zero
        torch.nn.init.normal_(p, std=0.2)
    folder.mkdir()
    copy_tokenizer(data, folder)
    torch.save(dict(model=name, config=asdict(model.config), iter=7, words=10.0,
                    settings=dict(data='toy', aux_weights={}), tokenizer=tokenizer.hash,
                    weights=model.state_dict(), adapted=getattr(model, 'adapted', []), frozen=[]),
               folder / 'ckpt.pt')
    return folder


@pytest.fixture(scope='module')
def exported(data_dir, tmp_path_factory, request):
    """name -> our model, and the one that transformers loads; each is made once."""
    home = tmp_path_factory.mktemp('hf')
    patch = pytest.MonkeyPatch()
    patch.setattr(transformers.dynamic_module_utils, 'HF_MODULES_CACHE', str(home / 'modules'))
    made = {}

    def exported(name):
        if name not in made:
            file, keys = MODELS[name.removesuffix('+lora')]
            data, lora = data_dir / 'toy_stories', name.endswith('+lora')
            run = make_run(home / name, data, file, keys, lora)
            folder = run / f'hf_{name}'
            export_hf.export(run, folder)
            ours, _ = load_checkpoint(run)
            made[name] = ours, load(folder).eval(), folder
        return made[name]
    yield exported
    patch.undo()


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def random_ids(rows, length, seed=0):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---- The model ----------------------------------------------------------------------------------

@torch.no_grad()
@pytest.mark.parametrize('name', [*MODELS, 'moep+lora', 'llama+lora'])
def test_same_logits_and_text(exported, name):
    ours, theirs, folder = exported(name)
    idx = random_ids(2, 20)
    assert (theirs(idx).logits - ours(idx)[0]).abs().max() < 1e-5
    assert (folder / f'{MODELS[name.removesuffix("+lora")][0]}.py').exists()
    # past the end of the context, where the cache restarts
    long = theirs.generate(idx, max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert long.tolist() == ours.generate(idx, 40, temperature=0).tolist()


@torch.no_grad()
@pytest.mark.parametrize('name', ['moep', 'moduleformer', 'papaformer', 'shared'])
def test_padding_is_not_seen(exported, name):
    """Left, right, in the middle; masks of (B, T) and (B, T, T)."""
    ours, theirs, _ = exported(name)
    idx = random_ids(4, 12)
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[0, :5] = 0
    mask[1, 7:] = 0
    mask[2, [3, 6]] = 0
    square = mask[:, None].repeat(1, 12, 1).tril()       # as BabyLM's fine-tuning makes it
    for given in (mask, square):
        logits = theirs(idx, attention_mask=given).logits
        for row in range(4):
            keep = mask[row].bool()
            assert (logits[row, keep] - ours(idx[row:row + 1, keep])[0][0]).abs().max() < 1e-5
    changed = torch.where(mask.bool(), idx, 5)
    assert torch.equal(theirs(changed, attention_mask=mask).logits[mask.bool()],
                       theirs(idx, attention_mask=mask).logits[mask.bool()])


@torch.no_grad()
@pytest.mark.parametrize('name', ['moep', 'moduleformer', 'llama'])
def test_padded_batch_generates_as_one_by_one(exported, name):
    ours, theirs, _ = exported(name)
    rows = [random_ids(1, n, seed=n) for n in (3, 9, 6)]
    pad = lambda row: F.pad(row, (9 - row.size(1), 0))
    idx = torch.cat([pad(row) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row)) for row in rows])
    texts = theirs.generate(idx, attention_mask=mask, max_new_tokens=30, do_sample=False,
                            eos_token_id=None)
    for row, text in zip(rows, texts):
        assert text[9:].tolist() == ours.generate(row, 30, temperature=0)[0, row.size(1):].tolist()


@torch.no_grad()
def test_cache_in_parts(exported):
    """A text in three calls; without a cache; too long for one call."""
    ours, theirs, _ = exported('moep')
    idx = random_ids(2, 20)
    past, parts = None, []
    for part in idx.split([9, 1, 10], 1):
        output = theirs(part, past_key_values=past, use_cache=True)
        past = output.past_key_values
        parts.append(output.logits)
    assert (torch.cat(parts, 1) - ours(idx)[0]).abs().max() < 1e-5
    keys = dict(do_sample=False, eos_token_id=None)
    uncached = theirs.generate(idx, max_new_tokens=4, use_cache=False, **keys)
    assert uncached.tolist() == ours.generate(idx, 4, temperature=0).tolist()
    long = random_ids(2, 30)
    continued = theirs.generate(long, max_new_tokens=20, **keys)
    assert continued.tolist() == ours.generate(long, 20, temperature=0).tolist()


@pytest.mark.parametrize('name', ['moep', 'depth'])
@torch.no_grad()
def test_beams(exported, name):
    """Beam search finds a text at least as probable as the greedy one, with a cache as without."""
    _, theirs, _ = exported(name)
    mask = torch.ones(2, 6, dtype=torch.long)
    for padded in (False, True):
        mask[0, :2] = 1 - int(padded)
        keys = dict(attention_mask=mask, max_new_tokens=8, num_beams=3, do_sample=False,
                    eos_token_id=None)
        cached = theirs.generate(random_ids(2, 6), **keys)
        uncached = theirs.generate(random_ids(2, 6), use_cache=False, **keys)
        assert cached.tolist() == uncached.tolist()


def test_loss_and_gradient(exported):
    ours, theirs, folder = exported('moep')
    idx = random_ids(2, 10)
    labels = idx.clone()
    labels[0, :4] = -100
    targets = labels[:, 1:].masked_fill(labels[:, 1:] < 0, -1)
    _, loss, aux = ours(idx[:, :-1], targets)
    assert abs(theirs(idx, labels=labels).loss - loss) < 1e-5
    theirs.config.aux_weights = dict(block_balance=0.5)
    theirs.train()
    trained = theirs(idx, labels=labels)                 # this model has a dropout of 0.1
    trained.loss.backward()
    assert theirs.model.parallel[0].router.linear.weight.grad.abs().sum() > 0
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    expected = loss + 0.5 * ours(idx)[2]['block_balance']
    assert abs(theirs(idx, labels=labels).loss - expected) < 1e-5
    # Trainer: 15 targets here, 30 in all that it accumulates
    assert abs(theirs(idx, labels=labels, num_items_in_batch=30).loss - expected / 2) < 1e-5
    theirs.config.aux_weights = {}
    theirs.eval()
    assert len(theirs(idx, labels=labels, return_dict=False)) == 2


@torch.no_grad()
def test_padding_is_not_in_the_loss(exported):
    """Left, right, in the middle, more than the context: the loss of the real tokens alone."""
    ours, theirs, _ = exported('moep')
    idx = random_ids(1, 30)
    for kept in (range(10, 30), range(0, 20), [3, 4, 7, 8, 20]):
        mask = torch.zeros_like(idx)
        mask[0, list(kept)] = 1
        alone = idx[mask.bool()][None]
        _, loss, _ = ours(alone[:, :-1], alone[:, 1:])
        assert abs(theirs(idx, attention_mask=mask, labels=idx).loss - loss) < 1e-5


def test_loaded_in_inference_mode_and_trained(exported):
    model = load(exported('pruned')[2])                  # its stacks have odd sizes
    assert all(p.data_ptr() % 16 == 0 for p in model.parameters())
    with torch.inference_mode():
        model(random_ids(1, 4))
    model(random_ids(1, 4), labels=random_ids(1, 4)).loss.backward()


@torch.no_grad()
def test_auto_model_gives_states(exported):
    ours, _, folder = exported('papaformer')
    model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    states = model(random_ids(2, 8), attention_mask=torch.ones(2, 8)).last_hidden_state
    assert (states - ours.features(random_ids(2, 8))[0]).abs().max() < 1e-5
    assert model.config.hidden_size == states.size(-1) == 32
    assert model.config.max_position_embeddings == 24


# ---- Tokenizers ---------------------------------------------------------------------------------

def fast(tokenizer, folder):
    """The tokenizer.json that we write, as transformers loads it."""
    (folder / 'tokenizer.json').write_text(json.dumps(export_hf.tokenizer_json(tokenizer)))
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / 'tokenizer.json'),
                                                split_special_tokens=True)


def odd_texts(n, seed=0):
    """Runs of one character, words cut in odd places, and any Unicode."""
    dice = random.Random(seed)
    for _ in range(n):
        kind = dice.randrange(3)
        if kind == 0:
            yield dice.choice(' a=\n\t1ab') * dice.randrange(1, 40) + dice.choice('x \n.')
        elif kind == 1:
            letters = "the and 's 12 ., \n\taab"
            yield ''.join(dice.choice(letters) for _ in range(dice.randrange(60)))
        else:
            points = (dice.randrange(0x30000) for _ in range(20))
            yield ''.join(chr(p) for p in points if not 0xD800 <= p < 0xE000)


@pytest.mark.parametrize('kind', ['trained', 'bytes', 'repeats'])
def test_same_ids(data_dir, tmp_path, kind):
    if kind == 'trained':
        tokenizer = load_tokenizer(data_dir / 'toy_stories')
    elif kind == 'bytes':
        tokenizer = build_tokenizer('bytes')
    else:                                                # tokens that several pairs make up
        words = {'aaaaaaa': 9, 'aaaab': 7, 'abab': 8, 'ababa': 5, '      ': 6, 'baabaa': 4,
                 'babab': 3}
        tokenizer = rank_tokenizer(ranks_blob(train_bpe(words, 300)))
    theirs = fast(tokenizer, tmp_path)
    texts = [export_hf.SAMPLE, *odd_texts(300)]
    assert [text for text in texts if theirs(text)['input_ids'] != tokenizer.encode(text)] == []
    assert theirs.decode(tokenizer.encode(texts[0])) == texts[0]


# ---- As a user ----------------------------------------------------------------------------------

def test_what_is_refused(run, data_dir, tmp_path):
    keys = dict(n_kv_head=2, byte_limit=7, byte_head=2, byte_embd=8, byte_layer=1, block_size=32)
    chunks = make_run(tmp_path / 'bytes', data_dir / 'toy_bytes', 'stlm', keys)
    assert 'reads chunks' in run('tools.export_hf', chunks, code=2).stderr
    routed = make_run(tmp_path / 'routed', data_dir / 'toy_stories', 'arena.sigmoid', {})
    assert 'which needs other files' in run('tools.export_hf', routed, code=2).stderr


FRESH = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained('model', trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained('model', trust_remote_code=True)
ids = tokenizer(['The dogs', 'Once upon a time'], return_tensors='pt', padding=True)
print(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.is_fast)
print(model(**ids).logits.shape[-1], model.generate(**ids, max_new_tokens=3).shape[1])
"""


@pytest.mark.slow
def test_as_a_user(run, data_dir, tmp_path):
    """Export with the checkpoints by words; a fresh process elsewhere loads a copy."""
    run('train.py', ROOT / 'config/moep.py', f'--data_dir={data_dir}', '--max_iters=2',
        '--batch_size=2', '--gradient_accumulation_steps=1', '--eval_tokens=64',
        '--sample_tokens=0', '--checkpoint_words=[99]', cwd=tmp_path, here=True)
    home = str(tmp_path / 'home')
    printed = run('tools.export_hf', 'moep', '--revision-per-checkpoint', cwd=tmp_path,
                  HF_HOME=home).stdout
    folder = tmp_path / 'out/moep/hf'
    assert printed.count('the same ids, the same logits') == 2
    assert (folder / 'chck_99/config.json').exists()
    card = (folder / 'README.md').read_text()
    for text in ('config/moep.py', 'bits per byte', '`toy_stories`', '2 steps', 'torch 2.'):
        assert text in card
    assert (folder / 'moep.py').read_bytes() == (ROOT / 'moep.py').read_bytes()
    (tmp_path / 'elsewhere').mkdir()
    folder.rename(tmp_path / 'elsewhere/model')
    done = subprocess.run([sys.executable, '-I', '-c', FRESH], cwd=tmp_path / 'elsewhere',
                          text=True, capture_output=True, env=dict(HF_HOME=home, PATH=''))
    eot = load_tokenizer(tmp_path / 'out/moep').eot
    first, second = done.stdout.splitlines()
    assert first == f'{eot} {eot} {eot} True' and second.startswith(f'{eot + 1} ')
