"""
Write a run as a Hugging Face model, for transformers, peft, lm-evaluation-harness and BabyLM.

    python -m tools.export_hf out/moep                               # -> out/moep/hf
    python -m tools.export_hf out/moep --revision-per-checkpoint     # also hf/chck_1M, hf/chck_2M
    python -m tools.export_hf out/moep --bos     # its tokenizer puts end-of-text in front of a text

    AutoModelForCausalLM.from_pretrained('out/moep/hf', trust_remote_code=True)

A run that is a plain GPT-2, Llama, Mistral, Qwen, Mixtral or OLMoE becomes transformers' own model.
Another folder holds the model's own file, untouched, and a wrapper (tools/modeling_nanopaths.py).
It needs nothing of this project: copy it, or upload it. Adapters are merged. When it is written, it
is loaded again: its logits and ids must be ours. Chunks of bytes, sentences and pauses are not
exported: no tokenizer there makes them. docs/ecosystem.md says more.
"""

import json
from pathlib import Path

import torch

from plumbing.checkpoint import context_limit, load_checkpoint, read_checkpoint, run_tokenizer
from plumbing.cli import Parser, UserError, run_main
from plumbing.hf import byte_letters
from plumbing.settings import ROOT, import_model, model_sources
from plumbing.tokenizer import EOT, PATTERN, load_meta
from tools.import_hf import (FAMILIES, GPT2_SETTINGS, LLAMA_SETTINGS, MIXTRAL, SCALING, WINDOWS,
                             gpt2_names, llama_names)
from tools.lora import merge_lora

# What every export is checked on: prose, code, runs of spaces, accents, emoji, a special token.
SAMPLE = """Once upon a time, in a far-away land, there lived 1,234 cats.
    def f(x):  return x   # don't
\u201cna\u00efve caf\u00e9\u201d \u4f60\u597d \U0001f642\u200d <|endoftext|>\t\n\n  """


# ---- Tokenizer ----------------------------------------------------------------------------------

def start_token(name, i):
    """A post_processor that puts this token in front of a text, as prepare.py does: there every
    document follows an end-of-text, without a space in between."""
    text = [dict(SpecialToken=dict(id=name, type_id=0)), dict(Sequence=dict(id='A', type_id=0))]
    return dict(type='TemplateProcessing', single=text,
                pair=[*text, dict(Sequence=dict(id='B', type_id=0))],
                special_tokens={name: dict(id=name, ids=[i], tokens=[name])})


def tokenizer_json(tokenizer):
    """The same tokenizer in Hugging Face's form: ids by letters that stand for bytes."""
    if tokenizer.kind == 'hf':
        return json.loads(tokenizer.blob)
    letters = {byte: letter for letter, byte in byte_letters().items()}
    spell = lambda token: ''.join(letters[byte] for byte in token)
    tokens = tokenizer.token_bytes[:tokenizer.eot]       # end-of-text is the last
    vocab = {spell(token): i for i, token in enumerate(tokens)}
    # tiktoken joins any two neighbours whose sum is a token, the lowest id first. So each token
    # stands here with every pair that makes it up, the longest left part first.
    vocabulary = set(tokens)
    merges = []
    for token in tokens:
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append([spell(left), spell(right)])
    byte_level = dict(type='ByteLevel', add_prefix_space=False, trim_offsets=False,
                      use_regex=False)
    split = dict(type='Split', pattern=dict(Regex=PATTERN.pattern), behavior='Isolated',
                 invert=False)
    steps = [byte_level] if tokenizer.kind == 'bytes' else [split, byte_level]
    end = dict(id=tokenizer.eot, content=EOT, single_word=False, lstrip=False, rstrip=False,
               normalized=False, special=True)
    return dict(version='1.0', truncation=None, padding=None, added_tokens=[end], normalizer=None,
                pre_tokenizer=dict(type='Sequence', pretokenizers=steps),
                post_processor=None, decoder=byte_level,
                model=dict(type='BPE', dropout=None, unk_token=None, continuing_subword_prefix=None,
                           end_of_word_suffix=None, fuse_unk=False, byte_fallback=False,
                           ignore_merges=True, vocab=vocab, merges=merges))


def token_name(spec, i):
    names = {token['id']: token['content'] for token in spec['added_tokens']}
    return names.get(i) or next(name for name, j in spec['model']['vocab'].items() if j == i)


# ---- Architectures of transformers --------------------------------------------------------------

def find_native(name, model):
    """transformers' class for a run that is a plain GPT-2, or a Llama or one of its relatives."""
    c = model.config
    if name == 'moep' and not c.n_parallel and not c.swiglu:
        return 'GPT2LMHeadModel'
    if name != 'selfmoe' or model.gates:
        return None
    for architecture, (qkv_bias, qk_norm, mixture) in FAMILIES.items():
        if (c.qkv_bias, c.qk_norm, c.n_expert > 1) == (qkv_bias, qk_norm, mixture is not None) \
                and (c.gates_sum_to_1 or mixture != MIXTRAL) \
                and (c.window is None or architecture in WINDOWS) \
                and (qk_norm != 'width' or model.blocks[0].d_head * c.n_head == c.n_embd):
            return architecture


def native_config(architecture, model):
    c = model.config
    if architecture == 'GPT2LMHeadModel':
        return {theirs: getattr(c, ours) for ours, theirs in GPT2_SETTINGS.items()}
    experts, width, *_ = FAMILIES[architecture][2] or (None, 'intermediate_size')
    block = model.blocks[0]
    down = getattr(block.ffn.down, 'weight', block.ffn.down)
    config = {theirs: getattr(c, ours) for ours, theirs in LLAMA_SETTINGS.items()} | {
        'num_key_value_heads': c.n_kv_head, 'head_dim': block.d_head, 'sliding_window': c.window,
        width: down.numel() // (c.n_expert * c.n_embd), 'rope_theta': c.rope_base}
    if c.rope_scaling:
        config['rope_scaling'] = dict(zip(SCALING, c.rope_scaling), rope_type='llama3')
    if experts:
        config |= {experts: c.n_expert, 'num_experts_per_tok': c.top_k,
                   'norm_topk_prob': c.gates_sum_to_1}
    return config


def native_weights(architecture, model):
    """Cut what tools.import_hf joins into their tensors."""
    c, ours, weights = model.config, model.state_dict(), {}

    def cut(theirs, w):
        if isinstance(theirs[0], list):
            for names, part in zip(theirs, w.mT if w.dim() == 3 else [w.T]):
                cut(names, part)
        else:
            is_qkv = len(theirs) == 3
            shares = (c.n_head, c.n_kv_head, c.n_kv_head) if is_qkv else (1,) * len(theirs)
            parts = w.split([len(w) // sum(shares) * share for share in shares])
            weights.update({name: part.clone(memory_format=torch.contiguous_format)
                            for name, part in zip(theirs, parts)})
    if architecture in FAMILIES:
        base, names = 'model', llama_names(FAMILIES[architecture], c.n_layer, c.n_expert)
    else:
        base, names = 'transformer', gpt2_names(c.n_layer)
    for name, theirs in names.items():
        cut(theirs, ours[name])
    head = {} if c.tied else {'lm_head.weight': ours['head.weight'].clone()}
    return {f'{base}.{name}': w for name, w in weights.items()} | head


# ---- The files ----------------------------------------------------------------------------------

def export(path, folder, bos=False, ours=False):
    """One checkpoint -> the files of `folder`."""
    import transformers
    from safetensors.torch import save_file
    model, ckpt = load_checkpoint(path)
    tokenizer = run_tokenizer(ckpt)
    source = ROOT / f"{ckpt['model'].replace('.', '/')}.py"
    architecture = None if ours else find_native(ckpt['model'], model)
    if len(model_sources(ckpt['model'])) > 1:
        raise UserError(f'{path} is a model of {source.name}, which needs other files beside it; '
                        'a model file that is exported stands alone, as those of the papers do')
    if tokenizer.pad >= 0:
        raise UserError(f'{path} reads {tokenizer.kind}; no tokenizer of transformers makes them')
    if ckpt['adapted']:
        model = merge_lora(model)
    spec = tokenizer_json(tokenizer)
    start, stop = tokenizer.eot, tokenizer.stop or [tokenizer.eot]
    if load_meta(ckpt['folder'])['splits']:              # trained here, where a document ends so
        stop = [*stop, *{start} - {*stop}]
    end = token_name(spec, stop[0])
    special = dict(bos_token=token_name(spec, start), eos_token=end, pad_token=end)
    ids = dict(bos_token_id=start, eos_token_id=stop if stop[1:] else stop[0],
               pad_token_id=stop[0])
    if bos:
        spec['post_processor'] = start_token(special['bos_token'], start)
    folder.mkdir(parents=True, exist_ok=True)
    if architecture:
        weights, config = native_weights(architecture, model), native_config(architecture, model)
        config |= dict(
            architectures=[architecture], vocab_size=model.config.vocab_size, dtype='float32',
            model_type=getattr(transformers, architecture).config_class.model_type,
            tie_word_embeddings=model.config.tied)
    else:
        weights = {f'model.{name}': w.clone() for name, w in model.state_dict().items()}
        config = hf_config(model, ckpt)
        wrapper = (ROOT / 'tools/modeling_nanopaths.py').read_bytes()
        wrapper = wrapper.replace(b'from .moep ', f'from .{source.stem} '.encode())
        (folder / 'modeling_nanopaths.py').write_bytes(wrapper)
        for file in (source, ROOT / 'LICENSE'):
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / 'README.md').write_text(model_card(model, ckpt, architecture), encoding='utf-8')
    save_file(weights, folder / 'model.safetensors', metadata=dict(format='pt'))
    is_foreign = tokenizer.kind == 'hf'                  # imported
    for name, content in {
            'generation_config.json': ids,
            'tokenizer.json': spec,
            'special_tokens_map.json': special,
            'tokenizer_config.json': special | dict(
                tokenizer_class='PreTrainedTokenizerFast', model_max_length=model.config.block_size,
                model_input_names=['input_ids', 'attention_mask'], padding_side='left',
                clean_up_tokenization_spaces=False, add_prefix_space=False,
                split_special_tokens=not is_foreign),    # in a text <|endoftext|> is text, as here
            'config.json': config | ids}.items():        # the last: without it, nothing is loaded
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + '\n', encoding='utf-8')
    return model, tokenizer


def hf_config(model, ckpt):
    """config.json: what our Config says, and the names under which other tools look for sizes."""
    cache = []
    with torch.no_grad():
        states, _ = model.features(torch.zeros(1, 1, dtype=torch.long), cache)
    home = 'modeling_nanopaths.Nanopaths'
    return dict(
        model_type='nanopaths', architectures=['NanopathsForCausalLM'],
        auto_map=dict(AutoConfig=f'{home}Config', AutoModel=f'{home}Model',
                      AutoModelForCausalLM=f'{home}ForCausalLM'),
        tokenizer_class='PreTrainedTokenizerFast',
        model_config=ckpt['config'], aux_weights=ckpt['settings']['aux_weights'],
        context_limit=context_limit(model), hidden_size=states.size(-1),
        num_hidden_layers=len(cache), vocab_size=model.config.vocab_size,
        max_position_embeddings=model.config.block_size, tie_word_embeddings=False)


# ---- The model card -----------------------------------------------------------------------------

def model_card(model, ckpt, architecture):
    """README.md of the folder."""
    total, active = model.count_params()
    summary = (import_model(ckpt['model']).__doc__ or '').strip().split('\n')[0]
    base, history, code, files = ckpt.get('base'), '', '', ''
    if base:
        history += f"\nIt began as {base['base_model']}, whose licence holds."
    if ckpt['iter']:
        history += f"\nTrained for {ckpt['iter']:,} steps on {ckpt['words']:,.0f} words of " \
            f"`{ckpt['settings']['data']}`."
    if not architecture:
        code = ', trust_remote_code=True'
        file = ckpt['model'].removeprefix('arena.')
        files = f'\n`{file}.py` is the model, in one file that you can read. ' \
            '`modeling_nanopaths.py` is a thin wrapper.\nBoth files are MIT.\n'
    return (ROOT / 'tools/model_card.md').read_text(encoding='utf-8').format(
        title=Path(ckpt['folder']).name, summary=f'A {architecture}.' if architecture else summary,
        base='\n'.join(f'{key}: {v}' for key, v in (base or dict(license='mit')).items()),
        total=total, active=active, context=model.config.block_size, history=history, code=code,
        files=files)


# ---- Whether it is the same model ---------------------------------------------------------------

@torch.no_grad()
def check(folder, model, tokenizer):
    """Load the folder as anybody would, and compare -> the largest difference of a logit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    their_tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = tokenizer.encode(SAMPLE)
    idx = torch.tensor([ids[:model.config.block_size]])
    logits = model(idx)[0]
    difference, largest = (theirs(idx).logits - logits).abs().max().item(), logits.abs().max()
    their_ids = their_tokenizer(SAMPLE, add_special_tokens=False)['input_ids']
    if their_ids != ids or not difference <= 1e-5 * max(1, largest):
        (folder / 'config.json').unlink()                # so that nobody takes it for the model
        raise UserError(f'{folder}: it gives other ids than ours, or logits that differ by '
                        f'{difference:.1e}: if you have edited the model, add --ours; else please '
                        'report this')
    return difference


def main():
    parser = Parser(__doc__)
    parser.add_argument('run', help="a run's folder, or one of its checkpoints")
    parser.add_argument('--out', help="the folder to write; hf in the run's own if not given")
    parser.add_argument('--revision-per-checkpoint', action='store_true',
                        help='also write a folder for each ckpt_<words>.pt, as BabyLM names them')
    parser.add_argument('--bos', action='store_true',
                        help='the tokenizer puts the start token, end-of-text, in front of a text')
    parser.add_argument('--ours', action='store_true',
                        help="our model file, also where transformers has a class that is the same")
    args = parser.parse_args()
    import transformers                                  # for this tool alone, and safetensors
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    home = Path(read_checkpoint(args.run)['folder'])
    out = Path(args.out or home / 'hf')
    if out.exists() and any(out.iterdir()):              # what it holds would be loaded as code
        raise UserError(f'{out} exists already: remove it, or name another --out')
    paths = [Path(args.run)]
    if args.revision_per_checkpoint:
        paths += home.glob('ckpt_*.pt')
    for path in paths:
        folder = out / path.stem.replace('ckpt', 'chck') if path.match('ckpt_*.pt') else out
        difference = check(folder, *export(path, folder, args.bos, args.ours))
        print(f'{folder}: the same ids, the same logits (largest difference {difference:.2g})')


if __name__ == '__main__':
    run_main(main)
