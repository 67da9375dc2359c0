"""
Do our models compute what the authors' code computes? Both get the same weights, in float64.

    git clone https://github.com/Jtapsa/Decoder_Only_Transformer_Research
    python -m papers.parity papaformer Decoder_Only_Transformer_Research
    git clone https://github.com/IBM/ModuleFormer                        # needs transformers
    python -m papers.parity moduleformer ModuleFormer
    git clone https://github.com/LeonGuertler/SuperTinyLanguageModels
    python -m papers.parity stlm SuperTinyLanguageModels
    git clone https://github.com/Jia0603/BabyLM-Project                  # needs transformers
    python -m papers.parity moep BabyLM-Project          # a copy of the author's code by others

A row compares one setting of both models: the largest difference of logits, losses and gradients,
which must be below 1e-10. The title says what is done to theirs first, where ours departs from it.
This executes code of the checkout.
"""

import importlib
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

import moduleformer
import moep
import papaformer
import stlm
from plumbing.cli import Parser, UserError, run_main
from tools.import_hf import read_molm

VOCAB, BATCH, LENGTH = 97, 3, 20


# ---- The comparison -----------------------------------------------------------------------------

def compare(title, theirs, run, ours, copy):
    """Print a row. run(theirs, idx) -> logits, {name: auxiliary loss}; a name a+b is a sum of ours.
    copy(theirs) -> {our name: weight}, computed from their parameters, so that autograd gives the
    gradient of our loss for *their* parameters, too."""
    idx, targets = torch.randint(4, VOCAB - 1, (2, BATCH, LENGTH))   # no special tokens
    weights = copy(theirs)
    weights = {name: weights[name] for name, _ in ours.named_parameters()}
    torch.manual_seed(1)                                 # the same noise each time
    logits, aux = run(theirs, idx)
    losses = [F.cross_entropy(logits.flatten(0, 1), targets.flatten()), *aux.values()]
    torch.manual_seed(1)
    our_logits, _, _ = functional_call(ours, weights, (idx,))
    torch.manual_seed(1)
    _, our_loss, our_aux = functional_call(ours, weights, (idx, targets))
    our_losses = [our_loss, *(sum(our_aux[part] for part in name.split('+')) for name in aux)]
    parameters = [*theirs.parameters()]
    grads = torch.autograd.grad(sum(losses), parameters, allow_unused=True, materialize_grads=True)
    our_grads = torch.autograd.grad(sum(our_losses), parameters, allow_unused=True)
    in_both = [pair for pair in zip(grads, our_grads) if pair[1] is not None]
    differences = [largest([(logits, our_logits)]), largest(zip(losses, our_losses)),
                   largest(in_both)]
    print(f'{title:66}', *(f'{d:8.0e}' for d in differences))
    if not max(differences) < 1e-10:
        raise UserError(f'{title}: this should be equal')


def largest(pairs):
    """The largest difference."""
    return max((a - b).abs().max().item() for a, b in pairs)


def shake(model):
    """Weights of size 0.2, gains around 1, biases that are not 0: an error shows."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    return model


def zero_biases(model, *modules):
    for name, p in model.named_parameters():
        if name.endswith('bias') and any(module in name for module in modules):
            p.data.zero_()


def load(path, remove=''):
    """A file of the checkout as a module, without the piece of text `remove`."""
    module = sys.modules[path.stem] = ModuleType(path.stem)
    text = path.read_text(encoding='utf-8')
    assert remove in text
    exec(compile(text.replace(remove, ''), path, 'exec'), vars(module))
    return module


def halves(w, n_head):
    """Their rotary positions turn channels 2i and 2i + 1, ours i and i + d/2: reorder the rows."""
    return w.view(n_head, -1, 2, w.size(-1)).transpose(1, 2).reshape(w.shape)


# ---- PaPaformer ---------------------------------------------------------------------------------

def check_papaformer(checkout):
    sizes = dict(vocab_size=VOCAB, n_layers=2, head_dim=16, max_seq_len=32, pad_id=VOCAB - 1,
                 attention_type='MultiH', ff_type='SwiGLU', norm='RMS', device='cpu',
                 n_parallel_blocks=2)
    wide = SimpleNamespace(**sizes, dim=64, n_heads=4)
    narrow = SimpleNamespace(**sizes, dim=32, n_heads=2)

    def run(theirs, idx):
        logits, *losses = theirs(idx) if routed else [theirs(idx)]
        return logits, dict(zip(('entropy', 'load'), losses))
    # Theirs draws uniform numbers u, ours exponential ones: -log(u) makes the noise the same
    draw = lambda x: x.copy_(-torch.rand_like(x).log())
    files = dict(share='Paformer_lin.py', gumbel1='gumbel_moe.py', gumbel2='gumbel_moe_2.py')
    for connection, file in files.items():
        routed = connection != 'share'
        theirs = shake(load(checkout / file).Decoder(wide, narrow))
        ours = papaformer.PaPaformer(papaformer.PaPaformerConfig(
            vocab_size=VOCAB, block_size=32, n_layer=2, n_head=4, n_embd=64, ffn_hidden=256,
            n_parallel=3, path_embd=[32, 32], path_head=[2, 2], path_ffn_hidden=[128, 128],
            connection=connection, attn_out_proj=False, aux_form='released'))
        pair = theirs, run, ours, papaformer_weights
        with mock.patch.object(torch.Tensor, 'exponential_', draw):
            zero_biases(theirs, 'MoE')
            compare(f'{connection}, their biases 0, their beta folded into W1, W2', *pair)


def papaformer_weights(theirs):
    first, *layers, last = theirs.layers
    weights = {'wte.weight': theirs.embeddings.weight, 'head.weight': theirs.Linear.linear.weight,
               'norm_f.weight': theirs.norm.weight,
               'shrink.maps.0.weight': first.Share.linear.weight}
    blocks = {'first.0': first.block, 'last.0': last.block}
    for i, layer in enumerate(layers):
        blocks |= {f'parallel.{i}.blocks.{j}': block for j, block in enumerate(layer.blocks)}
        connection = f'parallel.{i}.connection'
        if hasattr(layer, 'Share'):
            weights[f'{connection}.maps.0.weight'] = layer.Share.linear.weight
        else:
            weights[f'{connection}.combine.weight'] = layer.MoE.share_linear.weight
            weights[f'{connection}.router.linear.weight'] = layer.MoE.router.weight
    if hasattr(layer, 'out_linear'):                     # of the last layer
        weights['grow.maps.0.weight'] = layer.out_linear.linear.weight
    for name, block in blocks.items():
        attention, ffn = block.attention, block.feedforward
        q, k, v = (x.linear.weight for x in (attention.Q, attention.K, attention.V))
        q, k = halves(q, attention.n_heads), halves(k, attention.n_heads)
        beta = ffn.beta.view(-1, 1)                      # a sigmoid(beta a) b = silu(beta a) b/beta
        weights |= {
            f'{name}.norm_1.weight': block.norm_1.weight,
            f'{name}.norm_2.weight': block.norm_2.weight,
            f'{name}.qkv.weight': torch.cat((q, k, v)),
            f'{name}.fc.weight': torch.cat((beta * ffn.linear1.weight, ffn.linear2.weight / beta)),
            f'{name}.down.weight': ffn.linear3.weight}
    return weights


# ---- ModuleFormer -------------------------------------------------------------------------------

def check_moduleformer(checkout):
    # transformers 5 has no ONNX and no head masks; IBM's file imports the one and calls the other
    sys.modules['transformers.onnx'] = SimpleNamespace(OnnxConfigWithPast=object, PatchingSpec=None)
    sys.modules['ibm'] = package = ModuleType('ibm')     # `moduleformer` is ours
    package.__path__ = [str(checkout / 'moduleformer')]
    ibm = importlib.import_module('ibm.modeling_moduleformer')
    gating = importlib.import_module('ibm.utils.gate').top_k_gating
    ibm.ModuleFormerModel.get_head_mask = lambda self, mask, n: [None] * n

    def run(theirs, idx):
        logits = theirs.lm_head(theirs.transformer(idx).last_hidden_state)
        return logits, dict(mi=theirs.transformer.aux_loss)

    def read(theirs):
        """Read it as tools.import_hf reads files -> weights, settings of our model"""
        tensors = {name.removeprefix('transformer.'): p for name, p in theirs.named_parameters()}
        _, weights, settings = read_molm(vars(theirs.config), tensors)
        return weights, dict(settings, vocab_size=VOCAB, query_block=7)

    def pair(theirs, **changes):
        config = moduleformer.ModuleFormerConfig(**read(theirs)[1] | changes)
        return theirs, run, moduleformer.ModuleFormer(config), lambda theirs: read(theirs)[0]
    exact = mock.patch.object(gating.get_aux_loss_and_clear, '__defaults__', (0.0,))     # eps
    for title, sizes in (('top-1', dict(k_att=1, k_mlp=1)),
                         ('identity_kv', dict(n_head=1, att_hidden=32)),
                         ('top-2', {})):
        theirs = shake(ibm.ModuleFormerForCausalLM(ibm.ModuleFormerConfig(**dict(
            vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=3, att_hidden=24, n_att_experts=6,
            n_mlp_experts=8, ffd_hidden=40, gating_size=16, block_size=LENGTH, bos_token_id=0,
            eos_token_id=0) | sizes)))
        with exact:
            compare(f'{title}, released=True, theirs without 1e-8 in log p(m)', *pair(theirs))
    zero_biases(theirs, 'w_gate', '_proj')
    for module in theirs.modules():
        if isinstance(module, gating):
            module.w_gate[1] = nn.ReLU()
        elif isinstance(module, ibm.MoE) and module.activation:
            module.activation = nn.GELU()
    with exact:
        compare('top-2, theirs without 1e-8, with ReLU, exact GELU, biases 0',
                *pair(theirs, released=False))


# ---- MoEP ---------------------------------------------------------------------------------------

def check_moep(checkout):
    def run(theirs, idx):
        states, balance = theirs.model(idx, return_dict=False, return_aux=True)
        return theirs.lm_head(states), {'block_balance+expert_balance': balance}

    code = load(checkout / 'modeling_moep.py', remove=' + 1e-9')
    for top_k in (1, 4, 2):
        theirs = shake(code.MoEPForCausalLM(code.MoEPLMConfig(
            vocab_size=VOCAB, dim=48, n_heads=6, n_layers=5, parallel_dim=24, parallel_n_heads=3,
            parallel_k=top_k, moe_k=top_k, max_position_embeddings=LENGTH)).eval())
        ours = moep.MoEP(moep.MoEPConfig(
            vocab_size=VOCAB, block_size=LENGTH, n_layer=2, n_head=6, n_embd=48, n_parallel=3,
            n_head_parallel=3, n_embd_parallel=24, top_k=top_k)).eval()
        zero_biases(theirs, 'router')
        compare(f"top-{top_k}, their router biases 0, without 1e-9 in the gates' sum", theirs, run,
                ours, moep_weights)


def moep_weights(theirs):
    model = theirs.model
    first, shrink, *layers, grow, last = model.layers
    weights = {'wte.weight': model.embed_tokens.weight, 'wpe.weight': model.embed_positions.weight,
               'norm_f.weight': model.norm.layer_norm.weight,
               'norm_f.bias': model.norm.layer_norm.bias}
    for name, block in (('first.0', first), ('last.0', last)):
        weights |= {f'{name}.{part}.{kind}': p for (part, kind), p in block_weights(block).items()}
    for name, layer in (('shrink', shrink), ('grow', grow)):
        weights |= {
            f'{name}.router.linear.weight': layer.router.router.linear.weight,
            f'{name}.down': torch.stack([expert.weight.T for expert in layer.experts]),
            f'{name}.down_bias': torch.stack([expert.bias for expert in layer.experts])}
    for i, layer in enumerate(layers):
        weights[f'parallel.{i}.router.linear.weight'] = layer.router.router.linear.weight
        blocks = [block_weights(block) for block in layer.blocks]
        for part, kind in blocks[0]:
            stack = torch.stack([block[part, kind] for block in blocks])
            norm = part in ('norm_1', 'norm_2')
            suffix = '_bias' if kind == 'bias' else '_gain' if norm else ''
            weights[f'parallel.{i}.{part}{suffix}'] = stack if suffix else stack.mT  # ours: in, out
    return weights


def block_weights(block):
    """{(our name, weight or bias): tensor}"""
    attention, ffn = block.attention, block.feedforward
    parts = dict(norm_1=[block.norm_1.layer_norm], norm_2=[block.norm_2.layer_norm],
                 qkv=[attention.Q, attention.K, attention.V], proj=[attention.O],
                 fc=[ffn.linear1], down=[ffn.linear2])
    return {(part, kind): torch.cat([getattr(module, kind) for module in modules])
            for part, modules in parts.items() for kind in ('weight', 'bias')}


# ---- Super Tiny Language Models -----------------------------------------------------------------

def check_stlm(checkout):
    sys.path.append(str(checkout))
    # Theirs are downloaded; both models get numbers here
    sys.modules['models.components.tokenizers'] = SimpleNamespace(build_tokenizer=lambda **_: None)
    from models import core_models, model_heads
    common = dict(normalization='rms_norm', bias=False)
    ffn = common | dict(ffn_type='swiglu', ffn_dim=96)
    attn = common | dict(attn_type='generic', num_heads=8, group_size=4, is_causal=True)
    config = dict(
        hidden_dim=64, context_window=32, vocab_size=VOCAB, positional_encoding_type='rope',
        lm_head=common, core_model=dict(num_layers=3, ffn=ffn, attn=attn))

    def run(theirs, idx):
        x = theirs.core(F.embedding(idx, theirs.head.linear.weight))
        return theirs.head(x)[0], {}

    for share, core in (('none', core_models.GenericTransformer),
                        ('ffn', core_models.GenericFFNSharedTransfomer)):
        head = model_heads.AutoregressiveLMHead(config)
        theirs = shake(nn.ModuleDict(dict(core=core(config), head=head))).eval()
        ours = stlm.STLM(stlm.STLMConfig(
            vocab_size=VOCAB, block_size=32, n_layer=3, n_head=8, n_kv_head=2, n_embd=64,
            ffn_hidden=96, share=share)).eval()
        compare(f'tokens, share={share}', theirs, run, ours, stlm_weights)


def stlm_weights(theirs):
    weights = {'norm_f.weight': theirs.head.layer_norm.weight,
               'ends.wte.weight': theirs.head.linear.weight}
    for i, block in enumerate(theirs.core.transformer.h):
        attn, ffn = block.attn, block.ffn
        q, k, v = attn.c_attn.weight.split((64, 16, 16))
        qkv = torch.cat((halves(q, 8), halves(k, 2), v))
        weights |= {f'attention.{i}.norm.weight': block.attn_norm.weight,
                    f'attention.{i}.qkv.weight': qkv,
                    f'attention.{i}.proj.weight': attn.c_proj.weight,
                    f'norm.{i}.weight': block.ffn_norm.weight,
                    f'ffn.{i}.fc.weight': torch.cat((ffn.linear_1.weight, ffn.linear_3.weight)),
                    f'ffn.{i}.down.weight': ffn.linear_2.weight}
    return weights


CHECKS = dict(papaformer=(check_papaformer, 'gumbel_moe.py'),
              moduleformer=(check_moduleformer, 'moduleformer/modeling_moduleformer.py'),
              moep=(check_moep, 'modeling_moep.py'),
              stlm=(check_stlm, 'models/core_models.py'))


def main():
    parser = Parser(__doc__)
    parser.add_argument('name', choices=CHECKS)
    parser.add_argument('checkout', type=Path)
    args = parser.parse_args()
    check, file = CHECKS[args.name]
    if not (args.checkout / file).is_file():
        raise UserError(f'{args.checkout} has no {file}: it is not the checkout for {args.name}')
    warnings.simplefilter('ignore')                      # their code is older than its libraries
    os.environ['TRANSFORMERS_VERBOSITY'] = 'error'
    torch.set_default_dtype(torch.float64)
    print(f"{'largest difference':66}   logits   losses gradients")
    with mock.patch.object(torch.Tensor, 'float', torch.Tensor.double):      # theirs call .float()
        check(args.checkout)


if __name__ == '__main__':
    run_main(main)
