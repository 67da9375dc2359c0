"""
A nanopaths model for Hugging Face transformers (tried with 4.51 and 5.22). tools/export_hf.py puts
this file beside the model's own file, which stays as it is.

The models know no padding. So the wrapper moves the real tokens of each row to the front: a model
is causal, and what stands behind a token cannot reach it.
"""

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .moep import Config, Model          # export_hf writes the name of the model's file here

UNKNOWN = ('position_ids', 'inputs_embeds', 'output_attentions', 'output_hidden_states')


class NanopathsConfig(PretrainedConfig):
    model_type = 'nanopaths'

    def __init__(self, model_config=None, aux_weights=None, context_limit=None, **others):
        self.model_config = model_config or {}           # of the model's own Config
        self.aux_weights = aux_weights or {}             # auxiliary losses, added while training
        self.context_limit = context_limit               # in tokens; None: there is none
        super().__init__(**others)


class NanopathsModel(PreTrainedModel):
    """(B, T) ids -> last_hidden_state (B, T, D), after the final norm."""
    config_class = NanopathsConfig
    base_model_prefix = 'nanopaths'

    def __init__(self, config):
        super().__init__(config)
        self.model = Model(Config(**config.model_config))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, **keys):
        loaded = super().from_pretrained(*args, **keys)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for p in model.parameters():
            if p.data_ptr() % 16:                        # as mapped from the file; torch 2.10 minds
                p.data = p.data.clone()
        return loaded

    def _init_weights(self, module):                     # the model has done so itself
        pass

    def get_input_embeddings(self):
        return self.model.wte

    def resize_token_embeddings(self, *args, **keys):
        raise ValueError('the vocabulary of this model cannot be resized')

    def compute(self, ids, cache=None):
        """What this class returns for each token, and the auxiliary losses."""
        return self.model.features(ids, cache)

    def compute_cached(self, ids, mask, past, others):
        """`compute` of all tokens, or of new ones behind those that `past` has read."""
        for name in UNKNOWN:
            if others.get(name) is not None and others[name] is not False:
                raise ValueError(f'{name} is not supported')
        if past is not None and not isinstance(past, Past):
            raise ValueError('past_key_values must be what this model has returned')
        keep = kept_tokens(ids, mask, past)
        if past is not None:
            return past.extend(self, ids, keep)
        if keep.all():
            return self.compute(ids)
        order = front(keep)
        out, aux = self.compute(ids.gather(1, order))
        return restore(out, order, keep), aux

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None,
                return_dict=True, **others):
        past = Past() if use_cache and past_key_values is None else past_key_values
        states, _ = self.compute_cached(input_ids, attention_mask, past, others)
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
        logits, aux = self.compute_cached(input_ids, attention_mask, past, others)
        loss = None
        if labels is not None:
            keep = kept_tokens(input_ids, attention_mask, past)
            loss = self.loss(logits, labels, keep, aux, others.get('num_items_in_batch'))
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past)
        return output if return_dict is not False else output.to_tuple()

    def loss(self, logits, labels, keep, aux, n_items):
        """Of each next token; -100 is not a target. Trainer gives the number of targets in all
        batches that it accumulates: then this is the batch's share of their mean."""
        V = logits.size(-1)
        if not keep.all():                               # padding must not separate neighbours
            order = front(keep)
            logits = logits.gather(1, order[:, :, None].expand(-1, -1, V))
            labels = labels.masked_fill(~keep, -100).gather(1, order)
        loss = self.loss_function(logits, labels, vocab_size=V, num_items_in_batch=n_items)
        share = 1 if n_items is None else (labels[:, 1:] != -100).sum() / n_items
        if self.training:
            for name, weight in self.config.aux_weights.items():
                loss = loss + share * weight * aux[name]
        return loss

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None,
                                      use_cache=True, **others):
        if attention_mask is not None and not attention_mask[:, -1].all():
            raise ValueError("generate needs padding on the left: tokenizer.padding_side = 'left'")
        past = Past() if use_cache and past_key_values is None else past_key_values
        new = input_ids[:, past.n_read:] if past else input_ids
        if self.config.context_limit:
            new = new[:, -self.config.context_limit:]
        if past:
            past.n_read = input_ids.size(1) - new.size(1)
        mask = attention_mask if attention_mask is None else attention_mask[:, -new.size(1):]
        return dict(input_ids=new, attention_mask=mask, past_key_values=past)

    def _supports_default_dynamic_cache(self):           # generate is to leave the cache to us
        return False

    def _reorder_cache(self, past, beam_idx):
        return past.reorder_cache(beam_idx)


def kept_tokens(ids, mask, past):
    """(B, T): True for real tokens. The mask is (B, T) or (B, T, T), or covers the past as well."""
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    (B, T), n_read = ids.shape, past.n_read if past else 0
    if tuple(mask.shape) not in ((B, T), (B, T, T), (B, n_read + T)):
        raise ValueError(f'attention_mask is {tuple(mask.shape)}, not {(B, T)} or {(B, T, T)}')
    keep = mask.bool()
    if mask.dim() == 3:
        keep = keep.diagonal(dim1=1, dim2=2)             # does a token see itself?
        causal = torch.ones_like(mask[0], dtype=torch.bool).tril()
        as_expected = (keep[:, None] & causal) == mask.bool()
        if not as_expected[keep].all():
            raise ValueError('attention_mask may hide padding and the future, and nothing else')
    return keep[:, -T:]


def front(keep):
    """(B, N): the columns of each row's kept tokens, in order; in shorter rows others follow."""
    longest = max(1, int(keep.sum(1).max()))
    return (~keep).int().argsort(dim=1, stable=True)[:, :longest]


def restore(out, order, keep):
    """Back to the columns where the tokens stood; 0 where a token was masked."""
    full = out.new_zeros(*keep.shape, out.size(-1))
    full = full.scatter(1, order[:, :, None].expand_as(out), out)
    return full.masked_fill(~keep[:, :, None], 0)


class Past:
    """What generate keeps from step to step. Rows without padding share one cache; with padding
    each row has its own, as if it were alone."""
    is_compileable = False                               # generate asks

    def __init__(self):
        self.n_read = 0                                  # tokens of a row, padding included
        self.parts = []                                  # [(ids, cache)] of all rows, or of each

    def get_seq_length(self, layer=0):
        return self.n_read

    def extend(self, model, ids, keep):
        """`compute` of new tokens."""
        if not self.parts:
            n_parts = 1 if keep.all() else len(ids)
            self.parts = [(rows[:, :0], []) for rows in ids.chunk(n_parts)]
        n_parts = len(self.parts)
        if n_parts < len(ids) and not keep.all():
            raise ValueError('padding may stand only in the first tokens that a cache reads')
        outputs, aux = [], {}
        for i, (rows, kept) in enumerate(zip(ids.chunk(n_parts), keep.chunk(n_parts))):
            order = front(kept)
            new = rows.gather(1, order) if kept.any() else rows[:, :1]   # padding alone: any token
            out, aux = self.extend_part(model, i, new, kept.any())
            outputs.append(restore(out, order, kept))
        self.n_read += ids.size(1)
        return torch.cat(outputs), aux

    def extend_part(self, model, i, new, remember):
        """As `generate` in the model's file: a full cache restarts from its last half."""
        before, cache = self.parts[i]
        n_new = new.size(1)
        ids = torch.cat((before, new), 1)
        limit = model.config.context_limit
        if limit and cache and cache[0][0].size(2) + n_new > limit:
            cache, new = [], ids[:, -max(n_new, limit // 2):]
        if not remember:
            return model.compute(new)
        self.parts[i] = (ids, cache)
        out, aux = model.compute(new, cache)
        return out[:, -n_new:], aux

    def reorder_cache(self, beam_idx):
        """Beam search: row i goes on from row beam_idx[i]."""
        if len(self.parts) > 1:
            self.parts = [(self.parts[i][0], list(self.parts[i][1])) for i in beam_idx.tolist()]
        else:
            ids, cache = self.parts[0]
            pick = lambda x: x[beam_idx] if len(x) == len(ids) else x    # positions are of all rows
            self.parts = [(ids[beam_idx], [tuple(map(pick, layer)) for layer in cache])]
        return self
