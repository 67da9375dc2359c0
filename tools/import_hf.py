"""
Read a model in Hugging Face's format, trained elsewhere, as a run that every script takes.

    python -m tools.import_hf path/to/TinyLlama-1.1B --out out/tinyllama
    python -m tools.import_hf HuggingFaceTB/SmolLM2-135M --out out/smollm     # a name: downloaded
    python sample.py out/tinyllama --prompt "Once upon a time"

    architecture                            becomes
    GPT2LMHeadModel                         moep.py, without parallel layers
    Llama, Mistral, Qwen2, Qwen3            selfmoe.py
    Mixtral, Qwen3-MoE, OLMoE               selfmoe.py's mixture
    ModuleFormerForCausalLM                 moduleformer.py (IBM's MoLM)

The folder has config.json, .safetensors files and tokenizer.json. Nothing in it is executed: no
code, no pickle. Weights keep their precision until they train. docs/weights.md says how to go on.
"""

import json
import math
import re
from pathlib import Path

import torch

from plumbing.checkpoint import copy_model, write_checkpoint
from plumbing.cli import Parser, UserError, new_file, reading, run_main, write_json
from plumbing.hf import byte_letters, hf_tokenizer
from plumbing.settings import Settings, import_model, make_config
from plumbing.tokenizer import EOT, choose_tokenizer, rank_tokenizer, ranks_blob

# What is downloaded: not Mistral's consolidated.safetensors, for instance
FILES = ['*.json', 'README.md', 'model.safetensors', 'model-*.safetensors']
# Masks and tables that old files hold and no model needs
BUFFERS = r'(\battn\.(bias|masked_bias|mask|cum_weight)|rotary_emb\.inv_freq)$'


# ---- The folder ---------------------------------------------------------------------------------

def find_folder(name):
    """A folder, or a model's name on Hugging Face's hub, whose files are downloaded once."""
    if Path(name).is_dir():
        return Path(name)
    if name.count('/') != 1:                             # on the hub it is OWNER/NAME
        raise UserError(f'there is no folder {name}')
    try:
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:                           # no such name, no network, no package
        raise UserError(f'there is no folder {name}, and no download of that name ({error})')


def read_json(path):
    with reading(path):
        return json.loads(path.read_text(encoding='utf-8'))


def find_shards(folder):
    """The .safetensors files: those of the index, or the only one."""
    index = folder / 'model.safetensors.index.json'
    names = {*read_json(index)['weight_map'].values()} if index.exists() else {'model.safetensors'}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise UserError(f'{folder / name} is missing: is the download complete? Pickles (.bin) '
                            'run code when they are read; docs/weights.md converts them')
    return [folder / name for name in sorted(names)]


def read_tensors(folder):
    """{name: tensor}, without the prefix that some files have. Each is mapped from its file: it
    takes no memory until it is read."""
    from safetensors.torch import load_file
    tensors = {}
    for path in find_shards(folder):
        with reading(path):
            for name, tensor in load_file(path).items():
                if not re.search(BUFFERS, name):
                    tensors[re.sub(r'^(transformer|model)\.', '', name)] = tensor
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UserError(f'{name} is {tensor.dtype}, not float32, float16 or bfloat16')
    return tensors


def take_all(tensors, names, config):
    """Our tensors by name, of {ours: theirs}, and whether embedding and head are one. If so, either
    of their names may be missing in the file. What is left in `tensors` has no place."""
    embedding, = names['wte.weight']
    is_tied = 'lm_head.weight' not in tensors or bool(config.get('tie_word_embeddings'))
    if not is_tied:
        names = names | {'head.weight': ['lm_head.weight']}
    elif 'lm_head.weight' in tensors:
        tensors.setdefault(embedding, tensors.pop('lm_head.weight'))
    return {ours: join(tensors, theirs) for ours, theirs in names.items()}, is_tied


def join(tensors, theirs):
    if isinstance(theirs[0], list):
        parts = [join(tensors, names).T for names in theirs]
        return torch.stack(parts) if len(parts) > 1 else parts[0].contiguous()
    for name in theirs:
        if name not in tensors:
            raise UserError(f'there is no tensor {name} in the .safetensors files')
    parts = [tensors.pop(name) for name in theirs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def require(config, **supported):
    """Refuse settings that our models do not support."""
    for key, values in supported.items():
        if config.get(key, values[0]) not in values:
            raise UserError(f'{key} = {config[key]!r} is not supported, only '
                            f"{' or '.join(map(repr, values))}")


# ---- The architectures. Names and settings serve tools/export_hf.py, too -------------------------

# Of GPT-2 and Llama, our settings: theirs
GPT2_SETTINGS = dict(block_size='n_positions', n_layer='n_layer', n_head='n_head', n_embd='n_embd')
LLAMA_SETTINGS = dict(
    block_size='max_position_embeddings', n_layer='num_hidden_layers', n_head='num_attention_heads',
    n_embd='hidden_size', norm_eps='rms_norm_eps')
SCALING = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'
# What a mixture calls its number of experts, their width, and its parts: all of it, gate, up, down
MIXTRAL = 'num_local_experts', 'intermediate_size', 'block_sparse_moe', 'w1', 'w3', 'w2'
OLMOE = 'num_experts', 'intermediate_size', 'mlp', 'gate_proj', 'up_proj', 'down_proj'
QWEN3 = 'num_experts', 'moe_intermediate_size', *OLMOE[2:]
FAMILIES = dict(                                         # qkv_bias, qk_norm, names of a mixture
    LlamaForCausalLM=(False, 'none', None), MistralForCausalLM=(False, 'none', None),
    Qwen2ForCausalLM=(True, 'none', None), Qwen3ForCausalLM=(False, 'head', None),
    MixtralForCausalLM=(False, 'none', MIXTRAL), Qwen3MoeForCausalLM=(False, 'head', QWEN3),
    OlmoeForCausalLM=(False, 'width', OLMOE))
WINDOWS = dict(MistralForCausalLM=4096, MixtralForCausalLM=None)     # what transformers assumes


# {our tensor: theirs}. Of a list of names ours has all rows. Of a list of lists, such as one per
# expert, each is transposed, and ours is the stack.

def all_layers(n_layer, ours, theirs, block):
    """The names of `block` in every layer, behind the names of the layer."""
    def place(names, layer):
        return [place(name, layer) if isinstance(name, list) else f'{layer}.{name}'
                for name in names]
    return {f'{ours}.{i}.{name}': place(names, f'{theirs}.{i}')
            for i in range(n_layer) for name, names in block.items()}


def gpt2_names(n_layer):
    """Return {ours: theirs}. Theirs are (in, out), ours (out, in)."""
    block = {}
    for ours, theirs in dict(norm_1='ln_1', norm_2='ln_2', qkv='attn.c_attn', proj='attn.c_proj',
                             fc='mlp.c_fc', down='mlp.c_proj').items():
        weight = [f'{theirs}.weight']
        block[f'{ours}.weight'] = weight if 'norm' in ours else [weight]
        block[f'{ours}.bias'] = [f'{theirs}.bias']
    return {'wte.weight': ['wte.weight'], 'wpe.weight': ['wpe.weight'],
            'norm_f.weight': ['ln_f.weight'], 'norm_f.bias': ['ln_f.bias'],
            **all_layers(n_layer, 'first', 'h', block)}


def llama_names(family, n_layer, n_expert):
    qkv_bias, qk_norm, mixture = family
    block = {'norm_1.weight': ['input_layernorm.weight'],
             'norm_2.weight': ['post_attention_layernorm.weight'],
             'qkv.weight': [f'self_attn.{z}_proj.weight' for z in 'qkv'],
             'proj.weight': ['self_attn.o_proj.weight']}
    if qkv_bias:
        block['qkv.bias'] = [f'self_attn.{z}_proj.bias' for z in 'qkv']
    if qk_norm != 'none':
        block |= {f'norm_{z}.weight': [f'self_attn.{z}_norm.weight'] for z in 'qk'}
    if mixture:
        *_, home, gate, up, down = mixture
        experts = [f'{home}.experts.{e}' for e in range(n_expert)]
        block |= {'ffn.router.linear.weight': [f'{home}.gate.weight'],
                  'ffn.fc': [[f'{e}.{gate}.weight', f'{e}.{up}.weight'] for e in experts],
                  'ffn.down': [[f'{e}.{down}.weight'] for e in experts]}
    else:
        block |= {'ffn.fc.weight': ['mlp.gate_proj.weight', 'mlp.up_proj.weight'],
                  'ffn.down.weight': ['mlp.down_proj.weight']}
    return {'wte.weight': ['embed_tokens.weight'], 'norm_f.weight': ['norm.weight'],
            **all_layers(n_layer, 'blocks', 'layers', block)}


def molm_names(n_layer, identity_kv):
    block = {f'norm_{n}.{kind}': [f'ln_{n}.{kind}'] for n in (1, 2) for kind in ('weight', 'bias')}
    for ours, theirs, into, out in (('att', 'attn.q_proj', 'q', 'o'),
                                    ('ffd', 'mlpf', 'fc', 'down')):
        block |= {f'{ours}.{into}.weight': [f'{theirs}.experts.weight'],
                  f'{ours}.{out}.weight': [f'{theirs}.output_experts.weight'],
                  f'{ours}.router.B.weight': [f'{theirs}.gate.w_gate.0.weight'],
                  f'{ours}.router.B.bias': [f'{theirs}.gate.w_gate.0.bias'],
                  f'{ours}.router.A.weight': [f'{theirs}.gate.w_gate.3.weight']}
    for kind in () if identity_kv else ('weight', 'bias'):
        block[f'att.kv.{kind}'] = [f'attn.k_proj.{kind}', f'attn.v_proj.{kind}']
    return {'wte.weight': ['wte.weight'], 'norm_f.weight': ['ln_f.weight'],
            'norm_f.bias': ['ln_f.bias'], **all_layers(n_layer, 'blocks', 'h', block)}


# Each: config.json, tensors and the architecture's name -> our file, its weights, its config

def read_gpt2(c, tensors, name):
    require(c, activation_function=['gelu_new', 'gelu_pytorch_tanh'],
            n_inner=[None, 4 * c['n_embd']], layer_norm_epsilon=[1e-5], scale_attn_weights=[True],
            scale_attn_by_inverse_layer_idx=[False], add_cross_attention=[False])
    keys = {ours: c[theirs] for ours, theirs in GPT2_SETTINGS.items()}
    weights, tied = take_all(tensors, gpt2_names(c['n_layer']), c)
    return 'moep', weights, dict(keys, n_parallel=0, tied=tied)


def read_llama(c, tensors, name):
    """Llama and its relatives."""
    qkv_bias, qk_norm, mixture = family = FAMILIES[name]
    rope = c.get('rope_parameters') or c.get('rope_scaling') or {}
    kind = rope.get('rope_type', rope.get('type', 'default'))
    require(dict(c, rope_scaling=kind), rope_scaling=['default', 'llama3'], hidden_act=['silu'],
            attention_bias=[False], mlp_bias=[False], use_sliding_window=[False], clip_qkv=[None],
            mlp_only_layers=[[]], decoder_sparse_step=[1])
    n_expert = c.get('num_experts', c.get('num_local_experts')) if mixture else 1
    weights, tied = take_all(tensors, llama_names(family, c['num_hidden_layers'], n_expert), c)
    n_head = c['num_attention_heads']
    return 'selfmoe', weights, {ours: c[theirs] for ours, theirs in LLAMA_SETTINGS.items()} | dict(
        n_kv_head=c.get('num_key_value_heads') or n_head,
        d_head=c.get('head_dim') or c['hidden_size'] // n_head,
        ffn_hidden=c[mixture[1] if mixture else 'intermediate_size'], n_expert=n_expert,
        top_k=c['num_experts_per_tok'] if mixture else 1,
        gates_sum_to_1=mixture in (None, MIXTRAL) or c.get('norm_topk_prob', False),
        rope_base=float(rope.get('rope_theta', c.get('rope_theta', 10000.0))),
        rope_scaling=[rope[key] for key in SCALING] if kind == 'llama3' else None,
        window=c.get('sliding_window', WINDOWS[name]) if name in WINDOWS else None,
        qkv_bias=qkv_bias, qk_norm=qk_norm, tied=tied)


def read_molm(c, tensors, name=None):
    """IBM's MoLM."""
    require(c, activation_function=['gelu_new'], gate_type=['mlp'], layer_norm_epsilon=[1e-5],
            k_mlp=[c['k_att']])
    identity_kv = c['att_hidden'] == c['n_embd'] and c['n_head'] == 1
    weights, tied = take_all(tensors, molm_names(c['n_layer'], identity_kv), c)
    if tied:                                             # ours is untied
        weights['head.weight'] = weights['wte.weight'].clone()
    return 'moduleformer', weights, dict(
        block_size=c['block_size'], n_layer=c['n_layer'], n_embd=c['n_embd'], n_head=c['n_head'],
        n_att=c['n_att_experts'], d_att=c['att_hidden'], n_ffd=c['n_mlp_experts'],
        d_ffd=c['ffd_hidden'], top_k=c['k_att'], d_router=c['gating_size'],
        identity_kv=identity_kv, released=True)


READERS = dict(GPT2LMHeadModel=read_gpt2, ModuleFormerForCausalLM=read_molm,
               **dict.fromkeys(FAMILIES, read_llama))


# ---- The run's folder ---------------------------------------------------------------------------

def read_model(folder):
    """-> the name of our file, and a model with the folder's weights, in their precision."""
    config = read_json(folder / 'config.json')
    names = config.get('architectures') or ['']
    name = next((name for name in names if name in READERS), names[0])
    if name not in READERS:
        raise UserError(f"{folder} is a {name or 'model without a name'}; there is a place for "
                        f"{', '.join(READERS)}")
    tensors = read_tensors(folder)
    with reading(folder / 'config.json'):                # a key may be missing
        file, weights, keys = READERS[name](config, tensors, name)
    for name in tensors:                                 # those that are left
        raise UserError(f'{folder} has a tensor {name}: our model has no place for it')
    module = import_model(file)
    keys = dict(keys, vocab_size=len(weights['wte.weight']), dropout=0.0)
    with torch.device('meta'):                           # no memory: the weights take its place
        ours = module.Model(make_config(module, keys))
    try:
        ours.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise UserError(f'{folder} does not fit its config.json: {str(error).splitlines()[1]}')
    return file, ours


def read_tokenizer(folder, n_vocab):
    """tokenizer.json, and the ids that end a text."""
    path = folder / 'tokenizer.json'
    if not path.is_file():
        raise UserError(f'{folder} has no tokenizer.json: name a data set that has the '
                        "model's tokenizer, --tokenizer data/NAME, or --tokenizer gpt2")
    spec = read_json(path)
    with reading(path):
        known = [token for token in spec['added_tokens'] if token['id'] < n_vocab]
        blob = path.read_bytes()
        if known != spec['added_tokens']:                # such as a pad token without a row
            blob = json.dumps(spec | dict(added_tokens=known)).encode()
        ends = [read_json(file).get('eos_token_id') for file in (
            folder / 'generation_config.json', folder / 'config.json') if file.is_file()]
        stop = next((end for end in ends if end is not None), [])
        stop = stop if isinstance(stop, list) else [stop]
        tokenizer = gpt2_tokenizer(spec['model']) or hf_tokenizer(blob, *stop[:1])
        tokenizer.stop = [i for i in stop if i < tokenizer.n_vocab]
        return tokenizer


def gpt2_tokenizer(spec):
    """GPT-2's own, which then needs no package; None if the file holds another one."""
    byte = byte_letters()
    vocab = spec['vocab'] if spec['type'] == 'BPE' else {}
    tokens = sorted({*vocab} - {EOT}, key=vocab.get)
    if len(tokens) != 50256 or not {*''.join(tokens)} <= byte.keys():
        return None
    ranks = rank_tokenizer(ranks_blob([bytes(map(byte.get, token)) for token in tokens]))
    return ranks if ranks.kind == 'gpt2' else None


def read_licence(folder):
    """Return the licence that the front of its model card names."""
    card = folder / 'README.md'
    text = card.read_text(encoding='utf-8', errors='replace') if card.is_file() else ''
    found = re.match(r'---\n(?:(?!---).*\n)*?license: *(\S+)', text)
    return found[1] if found else 'unknown'


def write_run(out, file, model, tokenizer, source):
    """Write what train.py leaves, without an optimiser."""
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
    parser.add_argument('--tokenizer', help='instead of tokenizer.json: gpt2, data/NAME, ...')
    args = parser.parse_args()
    out = Path(args.out)
    if any(out.glob('ckpt*.pt')):
        raise UserError(f'{out} holds a run already: remove it, or name another --out')
    folder = find_folder(args.source)
    n_vocab = read_json(folder / 'config.json').get('vocab_size', math.inf)
    tokenizer = choose_tokenizer(args.tokenizer) if args.tokenizer \
        else read_tokenizer(folder, n_vocab)
    file, model = read_model(folder)
    name = folder.resolve().name if Path(args.source).is_dir() else args.source
    model.base = dict(license=read_licence(folder), base_model=name)
    if tokenizer.n_vocab > model.config.vocab_size:
        raise UserError(f'the tokenizer has {tokenizer.n_vocab:,} tokens, the model only '
                        f'{model.config.vocab_size:,}: name another with --tokenizer')
    write_run(out, file, model, tokenizer, Path(name).name)
    total, _ = model.count_params()
    print(f'{out}: {file}, {total / 1e6:,.2f}M parameters in {model.wte.weight.dtype}, '
          f'{tokenizer.n_vocab:,} tokens, a context of {model.config.block_size:,}')
    print(f'next: python sample.py {out} --prompt "Once upon a time"')


if __name__ == '__main__':
    run_main(main)
