"""
A nanopaths model for Hugging Face transformers (tried with 4.51 and 5.22). tools/export_hf.py puts
this file beside the model's own file, which stays as it is.

The models know no padding. So the wrapper moves the real tokens of each row to the front: a model is
causal, and what stands behind a token cannot reach it.
"""

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .moep import Config, Model          # export_hf writes the name of the model's file here


class NanopathsConfig(PretrainedConfig):
    model_type = 'nanopaths'

    def __init__(self, model_config=None, aux_weights=None, restart_at=None, **others):
        self.model_config = model_config or {}           # of the model's own Config
        self.aux_weights = aux_weights or {}             # auxiliary losses, added while training
        self.restart_at = restart_at                     # the longest context; None: no limit
        super().__init__(**others)


class NanopathsModel(PreTrainedModel):
    """(B, T) ids -> last_hidden_state (B, T, D), after the final norm."""
    config_class = NanopathsConfig
    base_model_prefix = 'nanopaths'

    def __init__(self, config):
        super().__init__(config)
        self.model = Model(Config(**config.model_config))
        self.post_init()

    def _init_weights(self, module):                     # the model has done so itself
        pass

    def get_input_embeddings(self):
        return self.model.wte

    def compute(self, ids, cache=None):
        """What this class returns for each token, and the auxiliary losses."""
        return self.model.features(ids, cache)

    def read(self, ids, mask, past):
        """`compute` of every token, as if no masked token were there."""
        for p in self.parameters():
            if p.data_ptr() % 16:                        # as mapped from the file; torch 2.10 minds
                p.data = p.data.clone()
        keep = kept_tokens(ids, mask)
        if past is not None:
            return past.read(self, ids, keep)
        if keep.all():
            return self.compute(ids)
        order = (~keep).int().argsort(dim=1, stable=True)            # kept tokens to the front
        out, aux = self.compute(ids.gather(1, order))
        back = order.argsort(1)[:, :, None].expand_as(out)
        return out.gather(1, back), aux

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None,
                return_dict=True, **others):
        past = Past() if use_cache and past_key_values is None else past_key_values
        states, _ = self.read(input_ids, attention_mask, past)
        output = BaseModelOutputWithPast(last_hidden_state=states, past_key_values=past)
        return output if return_dict is not False else output.to_tuple()


class NanopathsForCausalLM(NanopathsModel, GenerationMixin):
    """(B, T) ids -> logits (B, T, V); with labels, their loss too."""

    def compute(self, ids, cache=None):
        logits, _, aux = self.model(ids, cache=cache)
        return logits, aux

    def forward(self, input_ids, attention_mask=None, labels=None, past_key_values=None,
                use_cache=None, return_dict=True, **others):
        past = Past() if use_cache and past_key_values is None else past_key_values
        logits, aux = self.read(input_ids, attention_mask, past)
        loss = None
        if labels is not None:                           # of the next token; -100 is no target
            loss = self.loss_function(logits, labels, vocab_size=logits.size(-1), **others)
        if labels is not None and self.training:
            for name, weight in self.config.aux_weights.items():
                loss = loss + weight * aux[name]
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past)
        return output if return_dict is not False else output.to_tuple()

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None,
                                      use_cache=True, **others):
        past = Past() if use_cache and past_key_values is None else past_key_values
        new = input_ids[:, past.n_read:] if past else input_ids
        return dict(input_ids=new, attention_mask=attention_mask, past_key_values=past)

    def _supports_default_dynamic_cache(self):           # generate is to leave the cache to us
        return False

    def _reorder_cache(self, past, beam_idx):
        return past.reorder_cache(beam_idx)


def kept_tokens(ids, mask):
    """(B, T): True for real tokens. The mask is (B, T), or (B, S) where a cache holds S - T tokens
    before them, or (B, T, T)."""
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    keep = mask.bool()
    if mask.dim() == 3:
        keep = keep.diagonal(dim1=1, dim2=2)             # does a token see itself?
        causal = torch.ones_like(mask[0], dtype=torch.bool).tril()
        as_expected = (keep[:, None] & causal) == mask.bool()
        if not as_expected[keep].all():
            raise ValueError('attention_mask may hide padding and the future, and nothing else')
    return keep[:, -ids.size(1):]


class Past:
    """What generate keeps from step to step. Rows without padding share one cache; with padding
    each row has its own, as if it were alone."""

    def __init__(self):
        self.n_read = 0                                  # tokens of a row, padding included
        self.parts = []                                  # [(ids, cache)] of all rows, or of each

    def get_seq_length(self, layer=0):
        return self.n_read

    def read(self, model, ids, keep):
        """`compute` of new tokens."""
        if not self.parts:
            n_parts = 1 if keep.all() else len(ids)
            self.parts = [(rows[:, :0], []) for rows in ids.chunk(n_parts)]
        n_parts = len(self.parts)
        if n_parts < len(ids) and not keep.all():
            raise ValueError('padding may stand only in the first tokens that a cache reads')
        self.n_read += ids.size(1)
        outputs = []
        for i, (rows, kept) in enumerate(zip(ids.chunk(n_parts), keep.chunk(n_parts))):
            out, aux = self.read_part(model, i, rows, kept[0].nonzero().flatten())
            outputs.append(out)
        return torch.cat(outputs), aux

    def read_part(self, model, i, rows, columns):
        """As `generate` in the model's file: a full cache restarts from its last half."""
        before, cache = self.parts[i]
        new = rows[:, columns]
        ids = torch.cat((before, new), 1)
        limit = model.config.restart_at
        if limit and cache and cache[0][0].size(2) + new.size(1) > limit:
            cache, new = [], ids[:, -max(1, limit // 2):]
        elif limit:
            new = new[:, -limit:]
        self.parts[i] = (ids, cache)
        out, aux = model.compute(new, cache)
        full = out.new_zeros(*rows.shape, out.size(-1))  # what was cut off or masked stays 0
        columns = columns[-out.size(1):]
        return full.index_copy(1, columns, out[:, -len(columns):]), aux

    def reorder_cache(self, beam_idx):
        """Beam search: row i goes on from row beam_idx[i]."""
        if len(self.parts) > 1:
            self.parts = [(self.parts[i][0], list(self.parts[i][1])) for i in beam_idx.tolist()]
        else:
            ids, cache = self.parts[0]
            self.parts = [(ids[beam_idx], [(k[beam_idx], v[beam_idx]) for k, v in cache])]
        return self
