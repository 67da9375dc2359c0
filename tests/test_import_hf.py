"""tools/import_hf.py: models of transformers compute the same here, and train on."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch

from plumbing.checkpoint import load_checkpoint, read_checkpoint
from plumbing.tokenizer import build_tokenizer, load_tokenizer, rank_tokenizer, ranks_blob
from prepare import write_data_set
from tools.import_hf import read_tokenizer
from train import as_tensor, load_bin, tokens_at

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=64, vocab_size=300, rms_norm_eps=1e-5)
LLAMA = dict(SIZES, architectures=['LlamaForCausalLM'], num_key_value_heads=2, eos_token_id=2)


# ---- A folder without transformers ---------------------------------------------------------------

def write_safetensors(path, tensors):
    """The format: the header's length, the header, the numbers. Everything is bfloat16."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = dict(dtype='BF16', shape=list(tensor.shape), data_offsets=[begin, end])
    text = json.dumps(header).encode()
    raw = [tensor.bfloat16().view(torch.int16).numpy().tobytes() for tensor in tensors.values()]
    path.write_bytes(len(text).to_bytes(8, 'little') + text + b''.join(raw))


def llama_tensors(c):
    D, F, V = c['hidden_size'], c['intermediate_size'], c['vocab_size']
    kv = D // c['num_attention_heads'] * c['num_key_value_heads']
    shapes = dict(embed_tokens=(V, D), norm=(D,))
    for i in range(c['num_hidden_layers']):
        parts = dict(q=(D, D), k=(kv, D), v=(kv, D), o=(D, D))
        shapes |= {f'layers.{i}.self_attn.{part}_proj': shape for part, shape in parts.items()}
        parts = dict(gate=(F, D), up=(F, D), down=(D, F))
        shapes |= {f'layers.{i}.mlp.{part}_proj': shape for part, shape in parts.items()}
        shapes |= {f'layers.{i}.{part}_layernorm': (D,) for part in ('input', 'post_attention')}
    generator = torch.Generator().manual_seed(0)
    tensors = {f'model.{name}.weight': 0.2 * torch.randn(shape, generator=generator)
               for name, shape in shapes.items()}
    return tensors | {'lm_head.weight': 0.2 * torch.randn(V, D, generator=generator)}


def write_folder(folder, tensors=None, **changes):
    """A Llama in two shards. Its tokenizer is given on the command line."""
    folder.mkdir()
    config = dict(LLAMA, **changes)
    (folder / 'config.json').write_text(json.dumps(config))
    tensors = tensors or llama_tensors(LLAMA)
    names = {'a.safetensors': [*tensors][::2], 'b.safetensors': [*tensors][1::2]}
    for file, part in names.items():
        write_safetensors(folder / file, {name: tensors[name] for name in part})
    index = dict(weight_map={name: file for file, part in names.items() for name in part})
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
    return folder


@pytest.fixture(scope='module')
def byte_data(tmp_path_factory):
    """A data set of 257 tokens."""
    target = tmp_path_factory.mktemp('data') / 'bytes'
    texts = [('train', f'{a} + {b} = {a + b}.') for a in range(30) for b in range(20)]
    write_data_set(target, texts, build_tokenizer('bytes'))
    return target


# ---- The same logits -----------------------------------------------------------------------------

TIED, UNTIED = dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)
MODELS = {                                               # class: settings, precision, shards, model
    'gpt2': ('GPT2', TIED, 'float32', False, None),
    'gpt2 untied': ('GPT2', UNTIED, 'bfloat16', True, None),
    'llama': ('Llama', dict(UNTIED, rope_parameters=dict(rope_type='default', rope_theta=5e5)),
              'bfloat16', True, None),
    'llama tied': ('Llama', dict(TIED, num_key_value_heads=1), 'float16', False, None),
    'papaformer': ('Llama', TIED, 'float32', True, 'papaformer'),
    'mistral': ('Mistral', dict(UNTIED, sliding_window=7, head_dim=6), 'float16', True, None),
    'mixtral': ('Mixtral', dict(UNTIED, num_local_experts=4, num_experts_per_tok=2,
                                sliding_window=9), 'bfloat16', False, None),
    'mixtral tied': ('Mixtral', dict(TIED, num_local_experts=3), 'float32', False, None)}


@pytest.fixture(scope='module')
def transformers(tmp_path_factory):
    transformers = pytest.importorskip('transformers')
    with pytest.MonkeyPatch.context() as patch:          # where it copies the code of an export
        patch.setattr(transformers.dynamic_module_utils, 'HF_MODULES_CACHE',
                      str(tmp_path_factory.mktemp('modules')))
        yield transformers


@torch.no_grad()
@pytest.mark.parametrize('name', MODELS)
def test_same_as_transformers(name, transformers, run, byte_data, tmp_path):
    """Logits, greedy text, precision; and logits again after the way back."""
    from tools import export_hf
    kind, changes, dtype, shards, model = MODELS[name]
    sizes = dict(SIZES, num_key_value_heads=2)
    if kind == 'GPT2':
        sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=300)
    torch.manual_seed(0)
    config = getattr(transformers, f'{kind}Config')(**{**sizes, **changes})
    cls = getattr(transformers, {'GPT2': 'GPT2LMHeadModel'}.get(kind, f'{kind}ForCausalLM'))
    theirs = cls(config)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, mean=float(p.dim() == 1), std=0.1)
    theirs.to(getattr(torch, dtype)).save_pretrained(
        tmp_path / 'hf', max_shard_size='20KB' if shards else '1GB')
    assert (len([*(tmp_path / 'hf').glob('*.safetensors')]) > 1) == shards
    run('tools.import_hf', tmp_path / 'hf', '--out', tmp_path / 'run', '--tokenizer', byte_data,
        *(['--model', model] if model else []), here=True)
    ours, ckpt = load_checkpoint(tmp_path / 'run')
    assert {str(w.dtype) for w in ckpt['weights'].values()} == {f'torch.{dtype}'}
    theirs = cls.from_pretrained(tmp_path / 'hf', dtype=torch.float32).eval()
    idx = torch.randint(0, 257, (2, 30))
    logits = ours(idx)[0]
    assert (theirs(idx).logits - logits).abs().max() < 1e-5
    text = theirs.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=30,
                           do_sample=False, eos_token_id=None)
    assert text.tolist() == ours.generate(idx, 30, temperature=0).tolist()
    folder = tmp_path / name.replace(' ', '_')
    export_hf.export(tmp_path / 'run', folder)
    back = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert torch.equal(back.eval()(idx).logits, logits)


def test_molm_has_a_place_for_every_tensor(run, byte_data, tmp_path):
    """What the names mean: tests/test_moduleformer.py has the oracle (`released`)."""
    shapes = {'transformer.wte.weight': (300, 16), 'lm_head.weight': (300, 16),
              'transformer.ln_f.weight': (16,), 'transformer.ln_f.bias': (16,)}
    block = {'ln_1.weight': (16,), 'ln_1.bias': (16,), 'ln_2.weight': (16,), 'ln_2.bias': (16,),
             'attn.mask': (4, 4), 'attn.k_proj.weight': (8, 16), 'attn.k_proj.bias': (8,),
             'attn.v_proj.weight': (8, 16), 'attn.v_proj.bias': (8,)}
    for pool, width in (('attn.q_proj', 8), ('mlpf', 24)):
        block |= {f'{pool}.experts.weight': (3, 16, width), f'{pool}.gate.w_gate.0.bias': (10,),
                  f'{pool}.output_experts.weight': (3, width, 16),
                  f'{pool}.gate.w_gate.0.weight': (10, 16), f'{pool}.gate.w_gate.3.weight': (3, 10)}
    shapes |= {f'transformer.h.0.{name}': shape for name, shape in block.items()}
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    write_folder(tmp_path / 'hf', tensors, architectures=['ModuleFormerForCausalLM'], n_embd=16,
                 n_layer=1, n_head=2, att_hidden=8, ffd_hidden=24, gating_size=10, k_att=2, k_mlp=2,
                 n_att_experts=3, n_mlp_experts=3, block_size=32)
    run('tools.import_hf', tmp_path / 'hf', '--out', tmp_path / 'run', '--tokenizer', byte_data,
        here=True)
    ckpt = read_checkpoint(tmp_path / 'run')
    assert ckpt['config']['released'] and ckpt['config']['d_ffd'] == 24
    v_bias = ckpt['weights']['blocks.0.att.kv.bias'][8:]
    assert torch.equal(v_bias, tensors['transformer.h.0.attn.v_proj.bias'])
    assert run('sample.py', tmp_path / 'run', '--max_new_tokens', 3, here=True).stdout


# ---- From there on -------------------------------------------------------------------------------

@pytest.mark.filterwarnings('ignore:mkldnn_matmul failed')
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_gates_beside_a_frozen_base(dtype, run, byte_data, tmp_path):
    """Gates alone train, in float32. Where the machine computes in bfloat16, frozen matrices stay
    so. A resumed run knows."""
    write_folder(tmp_path / 'hf')
    run('tools.import_hf', tmp_path / 'hf', '--out', tmp_path / 'run', '--tokenizer', byte_data,
        here=True)
    command = ['train.py', '--model=selfmoe', f'--init_from={tmp_path}/run', '--surgery=add_gates',
               '--freeze', '--data=bytes', f'--data_dir={byte_data.parent}', '--seq_len=16',
               '--batch_size=2', '--sample_tokens=0', '--eval_tokens=32', f'--dtype={dtype}',
               f'--out_dir={tmp_path}/gated', '--learning_rate=0.1']
    run(*command, '--max_iters=2', here=True)
    run(*command, '--max_iters=3', '--resume', here=True)
    before, after = (read_checkpoint(tmp_path / name) for name in ('run', 'gated'))
    assert {*after['weights']} - {*before['weights']} == {'gates.1.weight'}
    assert {*after['frozen']} == {*before['weights']}
    assert all(torch.equal(after['weights'][name].bfloat16(), w)
               for name, w in before['weights'].items())
    assert after['weights']['gates.1.weight'].dtype == torch.float32
    assert after['weights']['gates.1.weight'].abs().max() > 0
    assert after['weights']['blocks.0.ffn.fc.weight'].dtype == getattr(torch, dtype)
    run('sample.py', tmp_path / 'gated', '--max_new_tokens', 3, here=True)


# ---- Tokenizers ----------------------------------------------------------------------------------

TEXT = "Once upon a time, 1,234 cats (naïve) sat.\n\n  They don't   sing: é ▁ 🙂 日本 <s> x</s>"


def train_package(kind):
    """A small tokenizer.json as Llama 2 or Llama 3 has it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, \
        processors, trainers
    special = ['<unk>', '<s>', '</s>']
    if kind == 'llama2':
        package = Tokenizer(models.BPE(unk_token='<unk>', fuse_unk=True, byte_fallback=True))
        package.normalizer = normalizers.Sequence([normalizers.Prepend('▁'),
                                                   normalizers.Replace(' ', '▁')])
        package.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback()])
        alphabet = [f'<0x{byte:02X}>' for byte in range(256)]
    else:
        package = Tokenizer(models.BPE())
        package.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(r'\p{N}{1,3}| ?\p{L}+|\s+|.'), 'isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        package.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False,
                                  initial_alphabet=[] if kind == 'llama2' else alphabet)
    package.train_from_iterator([TEXT.replace(' 日本', '')] * 5, trainer)
    if kind == 'llama2':
        spec = json.loads(package.to_str())
        spec['model']['vocab'] |= {byte: len(spec['model']['vocab']) + i
                                   for i, byte in enumerate(alphabet)}
        package = Tokenizer.from_str(json.dumps(spec))
    package.post_processor = processors.TemplateProcessing(single='<s> $A',
                                                           special_tokens=[('<s>', 1)])
    return package


@pytest.mark.parametrize('kind', ['llama2', 'llama3'])
def test_same_ids(kind, transformers, tmp_path):
    """As transformers reads the file; bytes give the text back; a data set knows its tokenizer."""
    package = train_package(kind)
    package.save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'config.json').write_text('{"eos_token_id": 2}')
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / 'tokenizer.json'))
    ours = read_tokenizer(tmp_path)
    for text in (TEXT, f' {TEXT}' * 3, '', 'plain'):
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)['input_ids']
    assert theirs('plain')['input_ids'] == [ours.eot, *ours.encode('plain')]
    plain = TEXT.partition('▁')[0] + '🙂 日本'
    assert ours.decode(ours.encode(plain)).removeprefix(' ') == plain
    write_data_set(tmp_path / 'd', [('train', TEXT)] * 9, ours)
    assert load_tokenizer(tmp_path / 'd').hash == ours.hash
    assert load_bin(tmp_path / 'd', 'train')[1:].tolist()[:9] == ours.encode(TEXT)[:9]


def test_more_than_65536_tokens(tmp_path):
    vocab = [bytes([b]) for b in range(256)] + [b'%05d!' % i for i in range(70000)]
    write_data_set(tmp_path / 'd', [('train', 'a b 00007! 69999!')] * 9,
                   rank_tokenizer(ranks_blob(vocab)))
    ids = load_bin(tmp_path / 'd', 'train')
    assert ids.dtype == np.uint32 and json.loads((tmp_path / 'd/meta.json').read_text())['dtype']
    assert ids[0] == 70256 and 256 < ids.max()
    assert tokens_at(as_tensor(ids, 'cpu'), torch.arange(len(ids))).tolist() == ids.tolist()
    signed = as_tensor(np.array([65535, 3], np.uint16), 'cpu')
    assert tokens_at(signed, torch.arange(2)).tolist() == [65535, 3]


# ---- Mistakes ------------------------------------------------------------------------------------

def as_pickle(folder):
    (folder / 'model.safetensors.index.json').unlink()
    (folder / 'pytorch_model.bin').write_bytes(b'')


def cut_short(folder):
    file = folder / 'a.safetensors'
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize('damage, changes, hint', [
    (shutil.rmtree, {}, 'there is no folder'),
    (lambda folder: (folder / 'b.safetensors').unlink(), {}, 'b.safetensors is missing'),
    (as_pickle, {}, 'pickles (.bin), which run code'),
    (cut_short, {}, 'a.safetensors cannot be read'),
    (None, dict(architectures=['Qwen2ForCausalLM']), 'is a Qwen2ForCausalLM; there is a place for'),
    (None, dict(rope_scaling=dict(rope_type='llama3')), "rope_scaling = 'llama3' is not supported"),
    (None, dict(attention_bias=True), 'attention_bias = True is not supported'),
    (None, dict(num_hidden_layers=1), 'has a tensor layers.1.'),
    (None, dict(intermediate_size=40), 'does not fit its config.json'),
    (None, dict(hidden_size=None), 'config.json cannot be read')])
def test_mistakes(damage, changes, hint, run, byte_data, tmp_path, monkeypatch):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    folder = write_folder(tmp_path / 'hf', **changes)
    if damage:
        damage(folder)
    done = run('tools.import_hf', folder, '--out', tmp_path / 'run', '--tokenizer', byte_data,
               code=2)
    assert hint in done.stderr and done.stderr.count('\n') == 1


def test_mistakes_about_tokenizers(run, byte_data, tmp_path, monkeypatch):
    folder = write_folder(tmp_path / 'hf')
    into = ['tools.import_hf', folder, '--out', tmp_path / 'run']
    assert 'no tokenizer.json: name one' in run(*into, code=2).stderr
    spec = dict(model=dict(type='BPE'), added_tokens=[], decoder=None)
    (folder / 'tokenizer.json').write_text(json.dumps(spec))
    monkeypatch.setitem(sys.modules, 'tokenizers', None)     # as if it were not installed
    assert 'pip install tokenizers' in run(*into, code=2).stderr
    run(*into, '--tokenizer', byte_data, here=True)
    assert 'holds a run already' in run(*into, code=2).stderr
