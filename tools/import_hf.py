"""
Read a model in Hugging Face's format, trained elsewhere, as a run that every script takes.

    python -m tools.import_hf path/to/TinyLlama-1.1B --out out/tinyllama
    python -m tools.import_hf HuggingFaceTB/SmolLM2-135M --out out/smollm     # a name: downloaded
    python sample.py out/tinyllama --prompt "Once upon a time"

    architecture                    becomes
    GPT2LMHeadModel                 moep.py, without parallel layers
    LlamaForCausalLM, Mistral...    selfmoe.py; with --model papaformer its plain LLaMA
    MixtralForCausalLM              selfmoe.py's mixture
    ModuleFormerForCausalLM         moduleformer.py (IBM's MoLM)

The folder has config.json, .safetensors files and tokenizer.json. Nothing in it is executed: no
code, no pickle. Weights keep their precision until they train. docs/weights.md says how to go on.
"""

import json
import math
import re
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from plumbing.cli import Parser, UserError, new_file, reading, run_main, write_json
from plumbing.settings import Settings, import_model, make_config, model_sources
from plumbing.tokenizer import choose_tokenizer, json_tokenizer

# safetensors' names: as numpy maps the bytes, as torch reads them
DTYPES = dict(F32=('float32', torch.float32), F16=('float16', torch.float16),
              BF16=('int16', torch.bfloat16))
# Masks and tables that old files hold and no model needs
BUFFERS = r'attn\.(bias|masked_bias|mask|cum_weight)|rotary_emb\.inv_freq'


# ---- The folder ---------------------------------------------------------------------------------

def find_folder(name):
    """A folder, or a model's name on Hugging Face's hub, whose files are downloaded once."""
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(name, allow_patterns=['*.json', '*.safetensors']))
    except Exception as error:                           # no such name, no network, no package
        reason = str(error).partition('\n')[0] or type(error).__name__
        raise UserError(f'there is no folder {name}, and no download of that name ({reason})')


def read_json(path):
    with reading(path):
        return json.loads(path.read_text(encoding='utf-8'))


def find_shards(folder):
    """The .safetensors files: those of the index, or the only one."""
    index = folder / 'model.safetensors.index.json'
    names = ['model.safetensors']
    if index.exists():
        names = sorted({*read_json(index)['weight_map'].values()})
    for name in names:
        if not (folder / name).is_file():
            if any(folder.glob('*.bin')) and not index.exists():
                raise UserError(f'{folder} has its weights as pickles (.bin), which run code when '
                                'they are read: get its .safetensors files, or convert it')
            raise UserError(f'{folder / name} is missing: is the download complete?')
    return [folder / name for name in names]


class Tensors:
    """The tensors of a folder by name, without the prefix that some files have. A .safetensors file
    is the length of a header (8 bytes), the header (JSON), and raw numbers."""

    def __init__(self, folder):
        self.folder = folder
        self.places = {}                                 # {name: (file, type, shape, first byte)}
        for path in find_shards(folder):
            with reading(path), open(path, 'rb') as file:
                size = int.from_bytes(file.read(8), 'little')
                header = json.loads(file.read(size))
                header.pop('__metadata__', None)
                for name, entry in header.items():
                    name = re.sub(r'^(transformer|model)\.', '', name)
                    first = 8 + size + entry['data_offsets'][0]
                    self.places[name] = path, entry['dtype'], tuple(entry['shape']), first

    def take(self, name):
        """A tensor, mapped from its file: it takes no memory until it is read."""
        if name not in self.places:
            raise UserError(f'{self.folder} has no tensor {name}')
        path, kind, shape, first = self.places.pop(name)
        if kind not in DTYPES:
            raise UserError(f'{name} is {kind}; only F32, F16 and BF16 can be read')
        as_numpy, as_torch = DTYPES[kind]
        with reading(path):
            return torch.from_numpy(np.memmap(path, as_numpy, 'c', first, shape)).view(as_torch)

    def take_head(self, config):
        """The output head, or None if it is the embedding."""
        if 'lm_head.weight' not in self.places:
            return None
        head = self.take('lm_head.weight')
        return None if config.get('tie_word_embeddings') else head

    def check_empty(self):
        left = [name for name in self.places if not re.search(BUFFERS, name)]
        if left:
            raise UserError(f'{self.folder} has a tensor {left[0]}: our model has no place for it')


def require(config, **supported):
    """What else a config may ask for, our models do not have."""
    for key, values in supported.items():
        if config.get(key, values[0]) not in values:
            raise UserError(f'{key} = {config[key]!r} is not supported, only '
                            f"{' or '.join(map(repr, values))}")


# ---- The architectures. Each: config.json and tensors -> our file, its config, its weights -------

def read_gpt2(c, tensors, model):
    D = c['n_embd']
    require(c, activation_function=['gelu_new', 'gelu_pytorch_tanh'], n_inner=[None, 4 * D],
            layer_norm_epsilon=[1e-5], scale_attn_weights=[True],
            scale_attn_by_inverse_layer_idx=[False], add_cross_attention=[False])
    names = {'ln_1': 'ln_1', 'ln_2': 'ln_2', 'attn.c_attn': 'qkv', 'attn.c_proj': 'proj',
             'mlp.c_fc': 'fc', 'mlp.c_proj': 'down'}
    weights = {name: tensors.take(name)
               for name in ('wte.weight', 'wpe.weight', 'ln_f.weight', 'ln_f.bias')}
    for i in range(c['n_layer']):
        for theirs, ours in names.items():
            weight = tensors.take(f'h.{i}.{theirs}.weight')
            weights[f'first.{i}.{ours}.weight'] = weight.t().contiguous()    # theirs are (in, out)
            weights[f'first.{i}.{ours}.bias'] = tensors.take(f'h.{i}.{theirs}.bias')
    head = tensors.take_head(c)
    if head is not None:
        weights['head.weight'] = head
    return 'moep', weights, dict(
        block_size=c['n_positions'], n_layer=c['n_layer'], n_head=c['n_head'], n_embd=D,
        n_parallel=0, tied=head is None)


def read_llama(c, tensors, model):
    """Llama, Mistral, Mixtral."""
    rope = c.get('rope_parameters') or c.get('rope_scaling') or {}
    kind = rope.get('rope_type', rope.get('type', 'default'))
    require(dict(c, rope_scaling=kind), rope_scaling=['default'], hidden_act=['silu'],
            attention_bias=[False], mlp_bias=[False])
    D, n_head, n_layer = c['hidden_size'], c['num_attention_heads'], c['num_hidden_layers']
    n_kv_head = c.get('num_key_value_heads') or n_head
    d_head = c.get('head_dim') or D // n_head
    window = c.get('sliding_window') if c['architectures'] != ['LlamaForCausalLM'] else None
    n_expert = c.get('num_local_experts', 1)
    as_paths = model == 'papaformer'
    keys = dict(
        block_size=c['max_position_embeddings'], n_layer=n_layer, n_head=n_head, n_embd=D,
        ffn_hidden=c['intermediate_size'], norm_eps=c['rms_norm_eps'],
        rope_base=float(rope.get('rope_theta', c.get('rope_theta', 10000.0))))
    if as_paths:
        if n_expert > 1 or d_head * n_head != D:
            raise UserError('papaformer.py has no experts, and no heads of another width: leave '
                            'out --model')
        keys |= dict(n_parallel=0, block_size=min(window or math.inf, keys['block_size']))
    else:
        keys |= dict(n_kv_head=n_kv_head, d_head=d_head, window=window, n_expert=n_expert,
                     top_k=c.get('num_experts_per_tok', 1))
    weights = {'wte.weight': tensors.take('embed_tokens.weight'),
               'norm_f.weight': tensors.take('norm.weight')}
    head = tensors.take_head(c)
    if as_paths:                                         # its head is never tied: take a copy
        head = weights['wte.weight'].clone() if head is None else head
    else:
        keys['tied'] = head is None
    if head is not None:
        weights['head.weight'] = head
    for i in range(n_layer):
        take = lambda name, i=i: tensors.take(f'layers.{i}.{name}.weight')
        block = f'first.{i}.' if as_paths else f'blocks.{i}.'
        ffn = block if as_paths else f'{block}ffn.'
        weights[f'{block}norm_1.weight'] = take('input_layernorm')
        weights[f'{block}norm_2.weight'] = take('post_attention_layernorm')
        q, k, v = (take(f'self_attn.{name}_proj') for name in 'qkv')
        if as_paths:                                     # one key and value per query head
            k, v = (w.view(n_kv_head, d_head, D).repeat_interleave(n_head // n_kv_head, 0)
                    .view(-1, D) for w in (k, v))
        weights[f'{block}qkv.weight'] = torch.cat((q, k, v))
        weights[f'{block}proj.weight'] = take('self_attn.o_proj')
        if n_expert == 1:
            weights[f'{ffn}fc.weight'] = torch.cat((take('mlp.gate_proj'), take('mlp.up_proj')))
            weights[f'{ffn}down.weight'] = take('mlp.down_proj')
            continue
        experts = [f'block_sparse_moe.experts.{e}.w' for e in range(n_expert)]
        weights[f'{ffn}router.linear.weight'] = take('block_sparse_moe.gate')
        weights[f'{ffn}fc'] = torch.stack([torch.cat((take(f'{e}1'), take(f'{e}3'))).T
                                           for e in experts])        # ours are (in, out)
        weights[f'{ffn}down'] = torch.stack([take(f'{e}2').T for e in experts])
    return 'papaformer' if as_paths else 'selfmoe', weights, keys


def read_molm(c, tensors, model):
    """IBM's MoLM."""
    require(c, activation_function=['gelu_new'], gate_type=['mlp'], layer_norm_epsilon=[1e-5],
            k_mlp=[c['k_att']])
    identity_kv = c['att_hidden'] == c['n_embd'] and c['n_head'] == 1
    names = {'ln_1.weight': 'ln_1.weight', 'ln_1.bias': 'ln_1.bias',
             'ln_2.weight': 'ln_2.weight', 'ln_2.bias': 'ln_2.bias'}
    for theirs, ours, maps in (('attn.q_proj', 'att', ('q', 'o')), ('mlpf', 'ffd', ('fc', 'down'))):
        names |= {f'{theirs}.experts.weight': f'{ours}.{maps[0]}.weight',
                  f'{theirs}.output_experts.weight': f'{ours}.{maps[1]}.weight',
                  f'{theirs}.gate.w_gate.0.weight': f'{ours}.router.B.weight',
                  f'{theirs}.gate.w_gate.0.bias': f'{ours}.router.B.bias',
                  f'{theirs}.gate.w_gate.3.weight': f'{ours}.router.A.weight'}
    weights = {name: tensors.take(name) for name in ('wte.weight', 'ln_f.weight', 'ln_f.bias')}
    head = tensors.take_head(c)
    weights['head.weight'] = weights['wte.weight'].clone() if head is None else head    # untied
    for i in range(c['n_layer']):
        for theirs, ours in names.items():
            weights[f'blocks.{i}.{ours}'] = tensors.take(f'h.{i}.{theirs}')
        for kind in () if identity_kv else ('weight', 'bias'):
            k, v = (tensors.take(f'h.{i}.attn.{name}_proj.{kind}') for name in 'kv')
            weights[f'blocks.{i}.att.kv.{kind}'] = torch.cat((k, v))
    return 'moduleformer', weights, dict(
        block_size=c['block_size'], n_layer=c['n_layer'], n_embd=c['n_embd'], n_head=c['n_head'],
        n_att=c['n_att_experts'], d_att=c['att_hidden'], n_ffd=c['n_mlp_experts'],
        d_ffd=c['ffd_hidden'], top_k=c['k_att'], d_router=c['gating_size'],
        identity_kv=identity_kv, released=True)


READERS = dict(GPT2LMHeadModel=read_gpt2, LlamaForCausalLM=read_llama,
               MistralForCausalLM=read_llama, MixtralForCausalLM=read_llama,
               ModuleFormerForCausalLM=read_molm)


# ---- The run's folder ---------------------------------------------------------------------------

def read_model(folder, model=None):
    """-> the name of our file, and a model with the folder's weights, in their precision."""
    config = read_json(folder / 'config.json')
    name, = config.get('architectures') or ['']
    if name not in READERS:
        raise UserError(f"{folder} is a {name or 'model without a name'}; there is a place for "
                        f"{', '.join(READERS)}")
    tensors = Tensors(folder)
    with reading(folder / 'config.json'):                # a key may be missing
        file, weights, keys = READERS[name](config, tensors, model)
    tensors.check_empty()
    if model not in (None, file):
        raise UserError(f'a {name} becomes a model of {file}.py, not of {model}.py')
    module = import_model(file)
    keys = dict(keys, vocab_size=len(weights['wte.weight']), dropout=0.0)
    with torch.device('meta'):                           # no memory: the weights take its place
        ours = module.Model(make_config(module, keys))
    try:
        ours.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise UserError(f'{folder} does not fit its config.json: {str(error).splitlines()[1]}')
    return file, ours


def read_tokenizer(folder, name=None):
    if name:
        return choose_tokenizer(name)
    path = folder / 'tokenizer.json'
    if not path.is_file():
        raise UserError(f'{folder} has no tokenizer.json: name one, such as --tokenizer gpt2')
    end = read_json(folder / 'config.json').get('eos_token_id')
    with reading(path):
        return json_tokenizer(path.read_bytes(), end[0] if isinstance(end, list) else end)


def write_run(out, file, model, tokenizer, source):
    """What train.py leaves, without an optimiser."""
    settings = Settings(model=file, out_dir=str(out), data=source)
    state = dict(model=file, config=asdict(model.config), settings=asdict(settings), iter=0,
                 words=0.0, tokenizer=tokenizer.hash, weights=model.state_dict(),
                 sources=model_sources(file), adapted=[], frozen=[])
    if tokenizer.file:
        with new_file(out / tokenizer.file, 'wb') as target:
            target.write(tokenizer.blob)
    write_json(out / 'meta.json', dict(name=source, source=[source], splits={},
                                       dtype=tokenizer.dtype, tokenizer=tokenizer.about()))
    with new_file(out / 'ckpt.pt', 'wb') as target:
        torch.save(state, target)


def main():
    parser = Parser(__doc__)
    parser.add_argument('source', help="a folder, or a model's name on Hugging Face's hub")
    parser.add_argument('--out', required=True, help='the run folder to write, such as out/llama')
    parser.add_argument('--model', help='papaformer: read a Llama as its plain LLaMA')
    parser.add_argument('--tokenizer', help='instead of tokenizer.json: gpt2, data/NAME, ...')
    args = parser.parse_args()
    out = Path(args.out)
    if any(out.glob('ckpt*.pt')):
        raise UserError(f'{out} holds a run already: remove it, or name another --out')
    began = time.monotonic()
    folder = find_folder(args.source)
    file, model = read_model(folder, args.model)
    tokenizer = read_tokenizer(folder, args.tokenizer)
    if tokenizer.n_vocab > model.config.vocab_size:
        raise UserError(f'the tokenizer has {tokenizer.n_vocab:,} tokens, the model only '
                        f'{model.config.vocab_size:,}: name another with --tokenizer')
    write_run(out, file, model, tokenizer, folder.resolve().name)
    total, active = model.count_params()
    kinds = sorted({str(p.dtype).removeprefix('torch.') for p in model.parameters()})
    print(f"{out}: {file}, {total / 1e6:,.2f}M parameters ({', '.join(kinds)}), tokenizer "
          f'{tokenizer.kind} of {tokenizer.n_vocab:,}, context {model.config.block_size:,}, in '
          f'{time.monotonic() - began:.0f} s')
    print(f'next: python sample.py {out} --prompt "Once upon a time"')


if __name__ == '__main__':
    run_main(main)
