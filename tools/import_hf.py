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
import re
from pathlib import Path

import numpy as np
import torch

from plumbing.checkpoint import copy_model, write_checkpoint
from plumbing.cli import Parser, UserError, new_file, reading, run_main, write_json
from plumbing.settings import Settings, import_model, make_config
from plumbing.tokenizer import choose_tokenizer, json_tokenizer

# safetensors' names: as numpy maps the bytes, as torch reads them
DTYPES = dict(F32=('float32', torch.float32), F16=('float16', torch.float16),
              BF16=('int16', torch.bfloat16))
# Masks and tables that old files hold and no model needs
BUFFERS = r'(attn\.(bias|masked_bias|mask|cum_weight)|rotary_emb\.inv_freq)$'


# ---- The folder ---------------------------------------------------------------------------------

def find_folder(name):
    """A folder, or a model's name on Hugging Face's hub, whose files are downloaded once."""
    if Path(name).is_dir():
        return Path(name)
    if name.count('/') != 1:                             # on the hub it is OWNER/NAME
        raise UserError(f'there is no folder {name}')
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
                                'they are read: get its .safetensors files, or convert it as '
                                'docs/weights.md does')
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
    names = {'ln_1': 'norm_1', 'ln_2': 'norm_2', 'attn.c_attn': 'qkv', 'attn.c_proj': 'proj',
             'mlp.c_fc': 'fc', 'mlp.c_proj': 'down'}
    weights = {name.replace('ln_', 'norm_'): tensors.take(name)
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
    head = tensors.take_head(c)
    weights = {'wte.weight': tensors.take('embed_tokens.weight'),
               'norm_f.weight': tensors.take('norm.weight')}
    if head is not None:
        weights['head.weight'] = head
    n_expert = c['num_local_experts'] if 'Mixtral' in c['architectures'][0] else 1
    for i in range(c['num_hidden_layers']):
        take = lambda name, i=i: tensors.take(f'layers.{i}.{name}.weight')
        block = dict(norm_1=take('input_layernorm'), norm_2=take('post_attention_layernorm'),
                     qkv=torch.cat([take(f'self_attn.{name}_proj') for name in 'qkv']),
                     proj=take('self_attn.o_proj'))
        if n_expert == 1:
            block['ffn.fc'] = torch.cat((take('mlp.gate_proj'), take('mlp.up_proj')))
            block['ffn.down'] = take('mlp.down_proj')
        else:
            expert = [f'block_sparse_moe.experts.{e}.w' for e in range(n_expert)]
            block['ffn.router.linear'] = take('block_sparse_moe.gate')
            fc = [torch.cat((take(f'{w}1'), take(f'{w}3'))).T for w in expert]   # ours: (in, out)
            weights[f'blocks.{i}.ffn.fc'] = torch.stack(fc)
            weights[f'blocks.{i}.ffn.down'] = torch.stack([take(f'{w}2').T for w in expert])
        weights |= {f'blocks.{i}.{name}.weight': weight for name, weight in block.items()}
    n_head = c['num_attention_heads']
    windows = dict(MistralForCausalLM=4096, MixtralForCausalLM=None)     # what transformers assumes
    name, = c['architectures']
    keys = dict(
        block_size=c['max_position_embeddings'], n_layer=c['num_hidden_layers'], n_head=n_head,
        n_kv_head=c.get('num_key_value_heads') or n_head, n_embd=c['hidden_size'],
        d_head=c.get('head_dim') or c['hidden_size'] // n_head, ffn_hidden=c['intermediate_size'],
        n_expert=n_expert, top_k=c.get('num_experts_per_tok', 1), norm_eps=c['rms_norm_eps'],
        rope_base=float(rope.get('rope_theta', c.get('rope_theta', 10000.0))),
        window=c.get('sliding_window', windows[name]) if name in windows else None,
        tied=head is None)
    return ('papaformer', *as_papaformer(weights, **keys)) if model == 'papaformer' \
        else ('selfmoe', weights, keys)


def as_papaformer(weights, n_kv_head, d_head, n_expert, top_k, window, tied, **keys):
    """What selfmoe.py has and papaformer.py has not is written out, or refused."""
    n_head, D = keys['n_head'], keys['n_embd']
    if n_expert > 1 or n_head * d_head != D:
        raise UserError('papaformer.py has no experts and no heads of another width: omit --model')
    if tied:
        weights['head.weight'] = weights['wte.weight'].clone()
    renamed = {}
    for name, weight in weights.items():
        if name.endswith('qkv.weight'):                  # a key and a value for each query head
            q, *shared = weight.split((D, n_kv_head * d_head, n_kv_head * d_head))
            own = [w.unflatten(0, (n_kv_head, d_head)).repeat_interleave(n_head // n_kv_head, 0)
                   for w in shared]
            weight = torch.cat((q, *(w.flatten(0, 1) for w in own)))
        renamed[name.replace('blocks.', 'first.').replace('.ffn.', '.')] = weight
    keys['block_size'] = min(keys['block_size'], window or keys['block_size'])
    return renamed, dict(keys, n_parallel=0)


def read_molm(c, tensors, model):
    """IBM's MoLM."""
    require(c, activation_function=['gelu_new'], gate_type=['mlp'], layer_norm_epsilon=[1e-5],
            k_mlp=[c['k_att']])
    identity_kv = c['att_hidden'] == c['n_embd'] and c['n_head'] == 1
    names = {'ln_1.weight': 'norm_1.weight', 'ln_1.bias': 'norm_1.bias',
             'ln_2.weight': 'norm_2.weight', 'ln_2.bias': 'norm_2.bias'}
    for theirs, ours, maps in (('attn.q_proj', 'att', ('q', 'o')), ('mlpf', 'ffd', ('fc', 'down'))):
        names |= {f'{theirs}.experts.weight': f'{ours}.{maps[0]}.weight',
                  f'{theirs}.output_experts.weight': f'{ours}.{maps[1]}.weight',
                  f'{theirs}.gate.w_gate.0.weight': f'{ours}.router.B.weight',
                  f'{theirs}.gate.w_gate.0.bias': f'{ours}.router.B.bias',
                  f'{theirs}.gate.w_gate.3.weight': f'{ours}.router.A.weight'}
    weights = {name.replace('ln_', 'norm_'): tensors.take(name)
               for name in ('wte.weight', 'ln_f.weight', 'ln_f.bias')}
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
        raise UserError(f'{folder} has no tokenizer.json: name a data set that has the '
                        "model's tokenizer, --tokenizer data/NAME, or --tokenizer gpt2")
    end = read_json(folder / 'config.json').get('eos_token_id')
    with reading(path):
        return json_tokenizer(path.read_bytes(), end[0] if isinstance(end, list) else end)


def write_run(out, file, model, tokenizer, source):
    """What train.py leaves, without an optimiser."""
    s = Settings(model=file, out_dir=str(out), data=source)
    if tokenizer.file:
        with new_file(out / tokenizer.file, 'wb') as target:
            target.write(tokenizer.blob)
    write_json(out / 'meta.json', dict(name=source, source=[source], splits={},
                                       dtype=tokenizer.dtype, tokenizer=tokenizer.about()))
    copy_model(file, out)
    write_checkpoint(out / 'ckpt.pt', model, model.state_dict(), s, tokenizer, iter=0, words=0.0)


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
    folder = find_folder(args.source)
    tokenizer = read_tokenizer(folder, args.tokenizer)
    file, model = read_model(folder, args.model)
    if tokenizer.n_vocab > model.config.vocab_size:
        raise UserError(f'the tokenizer has {tokenizer.n_vocab:,} tokens, the model only '
                        f'{model.config.vocab_size:,}: name another with --tokenizer')
    write_run(out, file, model, tokenizer, folder.resolve().name)
    total, _ = model.count_params()
    print(f'{out}: {file}, {total / 1e6:,.2f}M parameters in {model.wte.weight.dtype}, '
          f'{tokenizer.n_vocab:,} tokens, a context of {model.config.block_size:,}')
    print(f'next: python sample.py {out} --prompt "Once upon a time"')


if __name__ == '__main__':
    run_main(main)
