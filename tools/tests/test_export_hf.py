"""tools/export_hf.py: what transformers loads from the folder computes what our model computes."""

import importlib
import json
import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import selfmoe
from common import ROOT
from plumbing.bins import load_bin
from plumbing.bpe import train_bpe
from plumbing.checkpoint import load_checkpoint, write_checkpoint
from plumbing.settings import Settings
from plumbing.tokenizer import (build_tokenizer, copy_tokenizer, load_tokenizer, rank_tokenizer,
                                ranks_blob)
from test_contract import CASES
from tools.lora import add_lora

transformers = pytest.importorskip('transformers')
from tools import export_hf                              # noqa: E402

MODELS = {name: CASES[name][:2] for name in (
    'moep', 'moep_swiglu', 'gpt2', 'gpt2_untied', 'papaformer', 'gumbel2', 'llama', 'moduleformer',
    'inserted', 'molm', 'gate_matrix', 'mistral', 'mixture', 'stlm', 'stlm_all', 'dense_routed',
    'stlm_depth')}


def make_run(folder, data, name, keys, lora=False):
    """A checkpoint with random weights, as train.py saves it, beside the data's tokenizer."""
    torch.manual_seed(0)
    module = importlib.import_module(name)
    tokenizer = load_tokenizer(data)
    keys = dict(keys, vocab_size=tokenizer.n_vocab, block_size=24)
    model = module.Model(module.Config(**keys))
    if lora:
        add_lora(model, rank=2)
    for p in model.parameters():                         # gates and adapters start at zero
        torch.nn.init.normal_(p, std=0.2)
    folder.mkdir()
    copy_tokenizer(data, folder)
    write_checkpoint(folder / 'ckpt.pt', model, model.state_dict(), Settings(model=name),
                     tokenizer, iter=7, words=10.0)
    return folder


@pytest.fixture(scope='module', autouse=True)
def modules(tmp_path_factory):
    """Where transformers puts the code of what it loads, as a package that Python remembers."""
    patch = pytest.MonkeyPatch()
    cache = tmp_path_factory.mktemp('modules')
    patch.setattr(transformers.dynamic_module_utils, 'HF_MODULES_CACHE', str(cache))
    for name in [name for name in sys.modules if name.startswith('transformers_modules')]:
        patch.delitem(sys.modules, name)
    yield
    patch.undo()


@pytest.fixture(scope='module')
def exported(data_dir, tmp_path_factory):
    """name -> our model, and the one that transformers loads; each is made once."""
    home = tmp_path_factory.mktemp('hf')
    made = {}

    def exported(name):
        if name not in made:
            file, keys = MODELS[name.removesuffix('+lora')]
            data, lora = data_dir / 'toy_stories', name.endswith('+lora')
            run = make_run(home / name, data, file, keys, lora)
            folder = run / f'hf_{name}'
            export_hf.export(run, folder)
            ours, _ = load_checkpoint(run)
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder,
                                                                       trust_remote_code=True)
            made[name] = ours, theirs.eval()
        return made[name]
    return exported


def random_ids(rows, length, seed=0):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---- The model ----------------------------------------------------------------------------------

@torch.no_grad()
@pytest.mark.parametrize('name', [*MODELS, 'moep+lora', 'llama+lora'])
def test_same_logits_and_text(exported, name):
    ours, theirs = exported(name)
    idx = random_ids(2, 20)
    assert (theirs(idx).logits - ours(idx)[0]).abs().max() < 1e-5
    n_new = 4
    if theirs.config.model_type == 'nanopaths':          # past the end of the context, twice
        n_new, idx = 40, random_ids(2, 30)
    long = theirs.generate(idx, max_new_tokens=n_new, do_sample=False, eos_token_id=None)
    assert long.tolist() == ours.generate(idx, n_new, temperature=0).tolist()


def test_an_edited_model_stays_ours(run, data_dir, tmp_path, monkeypatch):
    """Its config says Llama, its code does not."""
    folder = make_run(tmp_path / 'run', data_dir / 'toy_stories', *MODELS['mistral'])
    with monkeypatch.context() as edited:
        edited.setattr(selfmoe, 'rotate', lambda x, table: x)
        assert 'add --ours' in run('tools.export_hf', folder, code=2).stderr
    run('tools.export_hf', folder, '--ours', '--out', tmp_path / 'hf_edited', here=True)
    assert (tmp_path / 'hf_edited/selfmoe.py').exists()


@torch.no_grad()
@pytest.mark.parametrize('name', ['moep', 'moduleformer', 'stlm_depth', 'gate_matrix'])
def test_beams(exported, name):
    """With a cache as without."""
    _, theirs = exported(name)
    beams = [theirs.generate(random_ids(2, 9), max_new_tokens=15, num_beams=3, do_sample=False,
                             eos_token_id=None, use_cache=cached) for cached in (True, False)]
    assert beams[0].tolist() == beams[1].tolist()


@torch.no_grad()
@pytest.mark.parametrize('name', ['moep', 'moduleformer', 'llama'])
def test_padded_batch_is_as_one_by_one(exported, name):
    ours, theirs = exported(name)
    rows = [random_ids(1, n, seed=n) for n in (3, 9, 6)]
    pad = lambda row: F.pad(row, (9 - row.size(1), 0))
    idx = torch.cat([pad(row) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row)) for row in rows])
    logits = theirs(idx, attention_mask=mask).logits
    texts = theirs.generate(idx, attention_mask=mask, max_new_tokens=15, do_sample=False,
                            eos_token_id=None)
    for i, row in enumerate(rows):
        n = row.size(1)
        assert (logits[i, -n:] - ours(row)[0][0]).abs().max() < 1e-5
        assert texts[i, 9:].tolist() == ours.generate(row, 15, temperature=0)[0, n:].tolist()
    on_the_right = theirs(rows[0].repeat(1, 3), attention_mask=mask[:1].flip(1)).logits
    assert (on_the_right[0, :3] - ours(rows[0])[0][0]).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize('name', ['moep', 'moduleformer', 'stlm_depth'])
def test_states_for_a_classifier(exported, name):
    """AutoModel, on a row with padding and one without."""
    ours, theirs = exported(name)
    model = transformers.AutoModel.from_pretrained(theirs.name_or_path, trust_remote_code=True)
    idx = random_ids(2, 9)
    mask = torch.ones_like(idx)
    mask[0, :3] = 0
    states = model.eval()(idx, attention_mask=mask).last_hidden_state
    assert (states[0, 3:] - ours.features(idx[:1, 3:])[0][0]).abs().max() < 1e-5
    assert (states[1] - ours.features(idx[1:])[0][0]).abs().max() < 1e-5


def test_loss(exported):
    ours, theirs = exported('moep')
    idx = random_ids(2, 10)
    labels = idx.clone()
    labels[0, :4] = -100
    targets = labels[:, 1:].masked_fill(labels[:, 1:] < 0, -1)
    _, loss, aux = ours(idx[:, :-1], targets)
    assert abs(theirs(idx, labels=labels).loss - loss) < 1e-5
    theirs.config.aux_weights = dict(block_balance=0.5)
    theirs.train()
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    expected = loss + 0.5 * ours(idx)[2]['block_balance']
    assert abs(theirs(idx, labels=labels).loss - expected) < 1e-5
    # Trainer: 15 targets here, 30 in all that it accumulates
    assert abs(theirs(idx, labels=labels, num_items_in_batch=30).loss - expected / 2) < 1e-5
    theirs.config.aux_weights = {}
    theirs.eval()


@torch.no_grad()
def test_padding_is_not_in_the_loss(exported):
    """Rows of different length, padded on either side: the mean over their own targets."""
    ours, theirs = exported('moep')
    idx = random_ids(2, 20)
    for places in [(slice(8, 20), slice(3, 20)), (slice(0, 12), slice(0, 17))]:
        mask = torch.zeros_like(idx)
        total = 0
        for i, place in enumerate(places):
            mask[i, place] = 1
            alone = idx[i:i + 1, place]
            total += ours(alone[:, :-1], alone[:, 1:], reduction='none')[1].sum()
        loss = theirs(idx, attention_mask=mask, labels=idx).loss
        assert abs(loss - total / (11 + 16)) < 1e-5


# ---- Tokenizers ---------------------------------------------------------------------------------

@pytest.mark.parametrize('kind', ['trained', 'bytes', 'repeats'])
def test_same_ids(data_dir, tmp_path, kind):
    """Of runs of one character, of words cut in odd places, and of any Unicode."""
    if kind == 'trained':
        tokenizer = load_tokenizer(data_dir / 'toy_stories')
    elif kind == 'bytes':
        tokenizer = build_tokenizer('bytes')
    else:                                                # tokens that several pairs make up
        words = {'aaaaaaa': 9, 'aaaab': 7, 'abab': 8, 'ababa': 5, '      ': 6, 'baabaa': 4,
                 'babab': 3}
        tokenizer = rank_tokenizer(ranks_blob(train_bpe(words, 300)))
    path = tmp_path / 'tokenizer.json'
    path.write_text(json.dumps(export_hf.tokenizer_json(tokenizer)))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path),
                                                  split_special_tokens=True)
    dice = random.Random(0)
    unicode = [chr(point) for point in range(0x30000) if not 0xD800 <= point < 0xE000]
    texts = [export_hf.SAMPLE]
    for _ in range(100):
        texts += [dice.choice(' a=\n\t1ab') * dice.randrange(1, 40) + dice.choice('x \n.'),
                  ''.join(dice.choices("the and 's 12 ., \n\taab", k=dice.randrange(60))),
                  ''.join(dice.choices(unicode, k=20))]
    assert [text for text in texts if theirs(text)['input_ids'] != tokenizer.encode(text)] == []
    assert theirs.decode(tokenizer.encode(texts[0])) == texts[0]


@pytest.mark.parametrize('bos', [False, True])
def test_start_token(exported, data_dir, tmp_path, bos):
    """With --bos a text begins as in prepare.py's bins: end-of-text, then its first word."""
    data = data_dir / 'toy_stories'
    run = make_run(tmp_path / 'run', data, *MODELS['gpt2'])
    folder = tmp_path / f'hf_bos_{bos}'
    export_hf.export(run, folder, bos)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    first = load_bin(data, 'train')[:40].tolist()
    text = load_tokenizer(data).decode(first)
    assert theirs(text)['input_ids'] == first[0 if bos else 1:]
    assert theirs.decode(first, skip_special_tokens=True) == text


# ---- As a user ----------------------------------------------------------------------------------

FRESH = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained('model', trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained('model', trust_remote_code=True)
ids = tokenizer(['The dogs', 'Once upon a time'], return_tensors='pt', padding=True)
print(tokenizer.eos_token_id, model.generate(**ids, max_new_tokens=3).shape[0])
"""


@pytest.mark.slow
def test_as_a_user(run, data_dir, tmp_path):
    """Export with the checkpoints by words; a fresh process elsewhere loads the folder."""
    run('train.py', ROOT / 'config/moep.py', f'--data_dir={data_dir}', '--max_iters=2',
        '--batch_size=2', '--gradient_accumulation_steps=1', '--eval_tokens=64',
        '--sample_tokens=0', '--checkpoint_words=[200]', cwd=tmp_path, here=True)
    env = dict(HF_HOME=str(tmp_path / 'home'))
    run('tools.export_hf', 'moep', '--revision-per-checkpoint', f'--out={tmp_path}/model',
        cwd=tmp_path, **env)
    assert (tmp_path / 'model/chck_200/config.json').exists()
    done = subprocess.run([sys.executable, '-I', '-c', FRESH], cwd=tmp_path, text=True,
                          capture_output=True, env=env | dict(PATH=''))
    assert done.stdout == f"{load_tokenizer(tmp_path / 'out/moep').eot} 2\n", done.stderr


def test_what_is_refused(run, data_dir, tmp_path):
    keys = dict(n_kv_head=2, byte_limit=7, byte_head=2, byte_embd=8, byte_layer=1, block_size=32)
    chunks = make_run(tmp_path / 'bytes', data_dir / 'toy_bytes', 'stlm', keys)
    assert 'reads chunks' in run('tools.export_hf', chunks, code=2).stderr
    routed = make_run(tmp_path / 'routed', data_dir / 'toy_stories', 'arena.sigmoid', {})
    assert 'which needs other files' in run('tools.export_hf', routed, code=2).stderr
    message = run('tools.export_hf', chunks, f'--out={tmp_path}', code=2).stderr
    assert 'exists already' in message
