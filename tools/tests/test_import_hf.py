"""tools/import_hf.py: models of transformers compute the same here, train on, and go back."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

import selfmoe
from plumbing.bins import load_bin
from plumbing.checkpoint import (build_model, load_checkpoint, read_checkpoint,
                                 write_checkpoint)
from plumbing.machine import widen
from plumbing.settings import Settings
from plumbing.tokenizer import build_tokenizer, load_tokenizer
from prepare import write_data_set

transformers = pytest.importorskip('transformers')
from safetensors.torch import load_file, save_file       # noqa: E402
from tools import export_hf                              # noqa: E402
from tools.import_hf import find_folder, read_model      # noqa: E402

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=150, vocab_size=300, rms_norm_eps=1e-5)
LLAMA = dict(vocab_size=30, n_layer=2, n_head=2, n_kv_head=1, n_embd=16)


@pytest.fixture(scope='module')
def byte_data(tmp_path_factory):
    """A data set of 257 tokens."""
    target = tmp_path_factory.mktemp('data') / 'bytes'
    texts = [('train', f'{a} + {b} = {a + b}.') for a in range(30) for b in range(20)]
    write_data_set(target, texts, build_tokenizer('bytes'))
    return target


# ---- The same logits -----------------------------------------------------------------------------

LLAMA3 = dict(rope_type='llama3', rope_theta=500.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=40)
MOE = dict(num_experts=5, num_experts_per_tok=2)
FAMILIES = {                                             # class of transformers, settings
    'gpt2': ('GPT2', {}),
    'llama': ('Llama', dict(rope_parameters=dict(rope_type='default', rope_theta=5e5))),
    'llama 3.1': ('Llama', dict(rope_parameters=LLAMA3, num_key_value_heads=1)),
    'mistral': ('Mistral', dict(sliding_window=7, head_dim=6)),
    'qwen2': ('Qwen2', dict(sliding_window=9)),          # which it does not use
    'qwen3': ('Qwen3', dict(head_dim=6)),
    'mixtral': ('Mixtral', dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=9)),
    'qwen3 moe': ('Qwen3Moe', dict(MOE, head_dim=6, moe_intermediate_size=24)),
    'qwen3 moe, normed': ('Qwen3Moe', dict(MOE, norm_topk_prob=True, moe_intermediate_size=24)),
    'olmoe': ('Olmoe', MOE)}


def save_random(folder, kind='Llama', dtype='bfloat16', shards=True, **changes):
    """A random model of transformers, as it saves it -> itself, in float32."""
    sizes = SIZES
    if kind == 'GPT2':
        sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=150, vocab_size=300)
    torch.manual_seed(0)
    config = getattr(transformers, f'{kind}Config')(**{**sizes, **changes})
    cls = getattr(transformers, {'GPT2': 'GPT2LMHeadModel'}.get(kind, f'{kind}ForCausalLM'))
    model = cls(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.dim() == 1), std=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(
        folder, max_shard_size='20KB' if shards else '1GB')
    assert (len([*folder.glob('*.safetensors')]) > 1) == shards
    return cls.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
@pytest.mark.parametrize('tied, dtype, shards', [
    (True, 'float32', False), (False, 'bfloat16', True),
    pytest.param(True, 'bfloat16', True, marks=pytest.mark.slow),
    pytest.param(False, 'float32', False, marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', FAMILIES)
def test_same_as_transformers(name, tied, dtype, shards, run, byte_data, tmp_path):
    """Logits, 100 greedy tokens, precision; and back, as a class of transformers with the same
    weights."""
    kind, changes = FAMILIES[name]
    theirs = save_random(tmp_path / 'hf', kind, dtype, shards, tie_word_embeddings=tied, **changes)
    run('tools.import_hf', tmp_path / 'hf', '--out', tmp_path / 'run', '--tokenizer', byte_data,
        here=True)
    ours, ckpt = load_checkpoint(tmp_path / 'run')
    assert {str(w.dtype) for w in ckpt['weights'].values()} == {f'torch.{dtype}'}
    idx = torch.randint(0, 257, (2, 30))
    assert (theirs(idx).logits - ours(idx)[0]).abs().max() < 1e-5
    text = theirs.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=100,
                           do_sample=False, eos_token_id=None)
    assert text.tolist() == ours.generate(idx, 100, temperature=0).tolist()
    run('tools.export_hf', tmp_path / 'run', here=True)
    back = type(theirs).from_pretrained(tmp_path / 'run/hf')
    assert not [*(tmp_path / 'run/hf').glob('*.py')]
    again, before = back.state_dict(), theirs.state_dict()
    assert again.keys() == before.keys()
    assert all(torch.equal(again[key], w) for key, w in before.items())


@torch.no_grad()
@pytest.mark.parametrize('kind, name', [('Llama', 'model.embed_tokens.weight'),
                                        ('GPT2', 'transformer.wte.weight')])
def test_a_tied_matrix_has_either_name(kind, name, tmp_path):
    """safetensors keeps one of the two; several architectures: the first known one. Masks of old
    files are passed over."""
    theirs = save_random(tmp_path, kind, 'float32', False, tie_word_embeddings=True)
    weights = load_file(tmp_path / 'model.safetensors')
    weights['lm_head.weight'] = weights.pop(name)
    weights['transformer.h.0.attn.bias'] = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    save_file(weights, tmp_path / 'model.safetensors')
    config = json.loads((tmp_path / 'config.json').read_text())
    config['architectures'].insert(0, 'MyOwnForCausalLM')
    (tmp_path / 'config.json').write_text(json.dumps(config))
    _, ours = read_model(tmp_path)
    idx = torch.arange(20)[None]
    assert (theirs(idx).logits - ours.eval()(idx)[0]).abs().max() < 1e-5


def test_download(tmp_path, monkeypatch):
    """No other weights than transformers'."""
    hub = pytest.importorskip('huggingface_hub')
    asked = []

    def download(name, allow_patterns):
        names = ['config.json', 'model-00001-of-00002.safetensors', 'consolidated.safetensors',
                 'model.fp16.safetensors', 'pytorch_model.bin']
        chosen = hub.utils.filter_repo_objects(names, allow_patterns=allow_patterns)
        asked.append((name, [*chosen]))
        return tmp_path
    monkeypatch.setattr(hub, 'snapshot_download', download)
    assert find_folder('owner/name') == tmp_path
    assert asked == [('owner/name', ['config.json', 'model-00001-of-00002.safetensors'])]


def test_molm_has_a_place_for_every_tensor(run, byte_data, tmp_path):
    """What they compute: tests/test_moduleformer.py has the oracle (`released`)."""
    shapes = {'wte.weight': (300, 16), 'ln_f.weight': (16,), 'ln_f.bias': (16,)}
    for norm in ('ln_1', 'ln_2'):
        shapes |= {f'h.0.{norm}.weight': (16,), f'h.0.{norm}.bias': (16,)}
    for name in ('k_proj', 'v_proj'):
        shapes |= {f'h.0.attn.{name}.weight': (8, 16), f'h.0.attn.{name}.bias': (8,)}
    for pool, width in (('h.0.attn.q_proj', 8), ('h.0.mlpf', 24)):
        shapes |= {f'{pool}.experts.weight': (3, 16, width), f'{pool}.gate.w_gate.0.bias': (10,),
                   f'{pool}.output_experts.weight': (3, width, 16),
                   f'{pool}.gate.w_gate.0.weight': (10, 16),
                   f'{pool}.gate.w_gate.3.weight': (3, 10)}
    tensors = {f'transformer.{name}': torch.randn(shape) for name, shape in shapes.items()}
    config = dict(architectures=['ModuleFormerForCausalLM'], n_embd=16, n_layer=1, n_head=2,
                  att_hidden=8, ffd_hidden=24, gating_size=10, k_att=2, k_mlp=2, n_att_experts=3,
                  n_mlp_experts=3, block_size=32)
    (tmp_path / 'hf').mkdir()
    (tmp_path / 'hf/config.json').write_text(json.dumps(config))
    save_file(tensors, tmp_path / 'hf/model.safetensors')
    run('tools.import_hf', tmp_path / 'hf', '--out', tmp_path / 'run', '--tokenizer', byte_data,
        here=True)
    ckpt = read_checkpoint(tmp_path / 'run')
    values = tensors['transformer.h.0.attn.v_proj.bias']
    assert torch.equal(ckpt['weights']['blocks.0.att.kv.bias'][8:], values)
    assert run('sample.py', tmp_path / 'run', '--max_new_tokens', 3, here=True).stdout


# ---- From there on -------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_what_stays_narrow(dtype, tmp_path):
    """Frozen matrices, where the machine computes in bfloat16; also in a checkpoint."""
    model = selfmoe.Model(selfmoe.Config(**LLAMA, n_expert=2, gate='matrix')).bfloat16()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith('gates'))
    widen(model, SimpleNamespace(dtype=dtype))
    weights = model.state_dict()
    narrow = {name for name, w in weights.items() if w.dtype == torch.bfloat16}
    maps = {f'blocks.{i}.{name}' for i in range(2)
            for name in ('qkv.weight', 'proj.weight', 'ffn.fc', 'ffn.down')} | {'head.weight'}
    assert narrow == (maps if dtype == torch.bfloat16 else set())
    write_checkpoint(tmp_path / 'ckpt.pt', model, weights, Settings(model='selfmoe'),
                     SimpleNamespace(hash=''))
    again = build_model(read_checkpoint(tmp_path)).state_dict()
    assert all(torch.equal(again[name], w) and again[name].dtype == w.dtype
               for name, w in weights.items())
    loaded, _ = load_checkpoint(tmp_path)
    assert {w.dtype for w in loaded.state_dict().values()} == {torch.float32}


# ---- Tokenizers ----------------------------------------------------------------------------------

TEXT = "Once upon a time, 1,234 cats (naïve) sat.\n\n  They don't   sing: " \
    'é ▁ 🙂 日本 <s> x</s>'


def train_package(kind):
    """A small tokenizer.json: Llama 2's, with bytes for unknown letters, or one of bytes."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, normalizers, processors, \
        trainers
    special = ['<unk>', '<s>', '</s>']
    text = [TEXT.replace(' 日本', '')] * 5
    if kind == 'bytes':
        package = ByteLevelBPETokenizer(add_prefix_space=True)
        package.train_from_iterator(text, 340, special_tokens=special, show_progress=False)
    else:
        package = Tokenizer(models.BPE(unk_token='<unk>', fuse_unk=True, byte_fallback=True))
        package.normalizer = normalizers.Sequence([normalizers.Prepend('▁'),
                                                   normalizers.Replace(' ', '▁')])
        package.train_from_iterator(text, trainers.BpeTrainer(special_tokens=special,
                                                              show_progress=False))
        spec = json.loads(package.to_str())
        vocab = spec['model']['vocab']
        vocab |= {f'<0x{byte:02X}>': len(vocab) + byte for byte in range(256)}
        package = Tokenizer.from_str(json.dumps(spec))
    package.post_processor = processors.TemplateProcessing(single='<s> $A',
                                                           special_tokens=[('<s>', 1)])
    return package


@pytest.mark.parametrize('kind', ['llama2', 'bytes'])
def test_same_ids(kind, run, tmp_path):
    """As transformers reads the file, also after the way back; bytes give the text back; a data set
    knows its tokenizer."""
    save_random(tmp_path / 'hf', vocab_size=1000)
    train_package(kind).save(str(tmp_path / 'hf/tokenizer.json'))
    run('tools.import_hf', tmp_path / 'hf', '--out', tmp_path / 'run', here=True)
    export_hf.export(tmp_path / 'run', tmp_path / 'back')
    ours = load_tokenizer(tmp_path / 'run')
    for folder in ('hf', 'back'):
        file = str(tmp_path / folder / 'tokenizer.json')
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
        for text in (TEXT, f' {TEXT}' * 3, '', 'plain'):
            assert theirs(text)['input_ids'] == [ours.eot, *ours.encode(text)]
    plain = TEXT.partition('▁')[0] + '🙂 日本'
    assert ours.decode(ours.encode(plain)).removeprefix(' ') == plain
    write_data_set(tmp_path / 'd', [('train', TEXT)] * 9, ours)
    assert load_tokenizer(tmp_path / 'd').hash == ours.hash
    assert load_bin(tmp_path / 'd', 'train')[1:].tolist()[:9] == ours.encode(TEXT)[:9]


def test_the_end_of_a_text(run, tmp_path):
    """sample.py and what is exported stop where the model does; bos, eos, base and licence stay. A
    token without a row in the model is left out."""
    package = train_package('llama2')
    n_vocab = package.get_vocab_size()
    theirs = save_random(tmp_path / 'hf', 'Llama', 'float32', False, vocab_size=n_vocab)
    package.add_special_tokens(['<pad>'])
    package.save(str(tmp_path / 'hf/tokenizer.json'))
    prompt = torch.tensor([[1, *package.encode('cats', add_special_tokens=False).ids]])
    greedy = lambda model: model.generate(prompt, max_new_tokens=60, do_sample=False)[0].tolist()
    end = greedy(theirs)[-20]                            # as if the model ended its text so
    (tmp_path / 'hf/generation_config.json').write_text(
        json.dumps(dict(bos_token_id=1, eos_token_id=[end])))
    (tmp_path / 'hf/README.md').write_text('---\nlicense: apache-2.0\n---\n')
    done = run('tools.import_hf', tmp_path / 'hf', '--out', tmp_path / 'run', here=True)
    assert f'{n_vocab} tokens' in done.stdout
    stopped = greedy(type(theirs).from_pretrained(tmp_path / 'hf'))
    assert stopped[-1] == end and end not in stopped[prompt.size(1):-1]
    text = run('sample.py', tmp_path / 'run', '--prompt', 'cats', '--temperature', 0, here=True)
    assert text.stdout.strip('\n') == load_tokenizer(tmp_path / 'run').show(stopped[:-1])
    run('tools.export_hf', tmp_path / 'run', here=True)
    assert greedy(type(theirs).from_pretrained(tmp_path / 'run/hf')) == stopped
    config = json.loads((tmp_path / 'run/hf/generation_config.json').read_text())
    assert (config['bos_token_id'], config['eos_token_id']) == (1, end)
    card = (tmp_path / 'run/hf/README.md').read_text()
    assert card.startswith('---\nlicense: apache-2.0\nbase_model: hf\n') and '0 steps' not in card
    run('tools.surgery', 'add_gates', tmp_path / 'run', '--out', tmp_path / 'gated', here=True)
    assert read_checkpoint(tmp_path / 'gated')['base']['license'] == 'apache-2.0'
    assert load_tokenizer(tmp_path / 'gated').stop == [end]


# ---- Mistakes ------------------------------------------------------------------------------------

def cut_short(folder):
    for file in folder.glob('*.safetensors'):
        file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize('damage, changes, hint', [
    (shutil.rmtree, {}, 'there is no folder'),
    (lambda folder: next(folder.glob('*.safetensors')).unlink(), {}, 'is the download complete?'),
    (cut_short, {}, '.safetensors cannot be read'),
    (None, dict(architectures=['Gemma2ForCausalLM']), 'is a Gemma2ForCausalLM; there is a place'),
    (None, dict(architectures=[]), 'is a model without a name'),
    (None, dict(rope_parameters=dict(rope_type='yarn')), "rope_scaling = 'yarn' is not supp"),
    (None, dict(attention_bias=True), 'attention_bias = True is not supported'),
    (None, dict(num_hidden_layers=1), 'has a tensor layers.1.'),
    (None, dict(num_hidden_layers=3), 'there is no tensor layers.2.'),
    (None, dict(intermediate_size=40), 'does not fit its config.json')])
def test_mistakes(damage, changes, hint, run, byte_data, tmp_path, monkeypatch):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    folder = tmp_path / 'hf'
    save_random(folder)
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps({**config, **changes}))
    if damage:
        damage(folder)
    done = run('tools.import_hf', folder, '--out', tmp_path / 'run', '--tokenizer', byte_data,
               code=2)
    assert hint in done.stderr and done.stderr.count('\n') == 1


def test_mistakes_about_tokenizers(run, byte_data, tmp_path, monkeypatch):
    save_random(tmp_path / 'hf')
    into = ['tools.import_hf', tmp_path / 'hf', '--out', tmp_path / 'run']
    assert 'no tokenizer.json: name a data set' in run(*into, code=2).stderr
    spec = dict(model=dict(type='BPE', vocab={}), added_tokens=[], decoder=None)
    (tmp_path / 'hf/tokenizer.json').write_text(json.dumps(spec))
    monkeypatch.setitem(sys.modules, 'tokenizers', None)     # as if it were not installed
    assert 'pip install tokenizers' in run(*into, code=2).stderr
    run(*into, '--tokenizer', byte_data, here=True)
    assert 'holds a run already' in run(*into, code=2).stderr
