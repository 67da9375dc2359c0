"""
A nanopaths model for Hugging Face transformers (tried with 4.51 and 5.23). tools/export_hf.py puts
this file beside the model's own file, which stays as it is.

The models know no padding. So the wrapper moves the real tokens of each row to the front: a model
is causal, and what stands behind a token cannot reach it. `generate` has a cache where no row is
padded; a padded batch is read anew for every token.
"""

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from .moep import Config, Model          # export_hf writes the name of the model's file here


class NanopathsConfig(PretrainedConfig):
    model_type = 'nanopaths'

    def __init__(self, model_config=None, aux_weights=None, context_limit=None, **others):
        self.model_config = model_config or {}           # of the model's own Config
        self.aux_weights = aux_weights or {}             # auxiliary losses, added while training
        self.context_limit = context_limit               # in tokens; None: there is none
        super().__init__(**others)


class NanopathsForCausalLM(PreTrainedModel, GenerationMixin):
    """(B, T) ids -> logits (B, T, V); with labels, their loss too."""
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

    def forward(self, input_ids, attention_mask=None, labels=None, past_key_values=None,
                use_cache=None, return_dict=True, num_items_in_batch=None, **others):
        past = Past() if use_cache and past_key_values is None else past_key_values
        keep = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            keep = attention_mask[:, -input_ids.size(1):].bool()
        if past_key_values is not None and not keep.all():
            raise ValueError('a cache takes no padding')
        if past is not None and keep.all():
            logits, aux = past.extend(self, input_ids)
        else:
            past = None
            logits, aux = self.compute_padded(self.model, input_ids, keep)
        loss = None
        if labels is not None:
            loss = self.loss(logits, labels, keep, aux, num_items_in_batch)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past)
        return output if return_dict is not False else output.to_tuple()

    def compute_padded(self, compute, ids, keep):
        """Logits or states where the tokens stood, 0 at padding; and the auxiliary losses."""
        longest = max(1, int(keep.sum(1).max()))
        order = (~keep).int().argsort(dim=1, stable=True)[:, :longest]
        values, *_, aux = compute(ids.gather(1, order))
        padded = values.new_zeros(*ids.shape, values.size(-1))
        padded = padded.scatter(1, order[:, :, None].expand_as(values), values)
        return padded.masked_fill(~keep[:, :, None], 0), aux

    def loss(self, logits, labels, keep, aux, n_items):
        """Return the mean over next tokens; -100 is not a target. If Trainer gives the number of
        targets in all batches that it accumulates, this is the batch's share of their mean."""
        labels = labels.masked_fill(~(keep & keep.roll(1, 1)), -100)     # padding predicts nothing
        loss = self.loss_function(logits, labels, vocab_size=logits.size(-1),
                                  num_items_in_batch=n_items)
        share = 1 if n_items is None else (labels[:, 1:] != -100).sum() / n_items
        if self.training:
            for name, weight in self.config.aux_weights.items():
                loss = loss + share * weight * aux[name]
        return loss

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None,
                                      use_cache=True, **others):
        is_padded = attention_mask is not None and not attention_mask.all()
        past = past_key_values or (Past() if use_cache and not is_padded else None)
        new = input_ids[:, past.n_read:] if past else input_ids
        if self.config.context_limit:
            new = new[:, -self.config.context_limit:]
        if past:
            past.n_read = input_ids.size(1) - new.size(1)
        mask = attention_mask[:, -new.size(1):] if is_padded else None
        return dict(input_ids=new, attention_mask=mask, past_key_values=past)

    def _supports_default_dynamic_cache(self):           # generate is to leave the cache to us
        return False


class NanopathsModel(NanopathsForCausalLM):
    """AutoModel: the states under the head, on which BabyLM's pipeline trains a classifier."""

    def forward(self, input_ids, attention_mask=None, **others):
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        states, _ = self.compute_padded(self.model.features, input_ids, keep.bool())
        return BaseModelOutput(states)


class Past:
    """What generate keeps from step to step."""
    is_compileable = False                               # generate asks

    def __init__(self):
        self.n_read = 0
        self.ids = None
        self.cache = []

    def get_seq_length(self, layer=0):
        return self.n_read

    def reorder_cache(self, beams):
        """Beam search goes on from these rows."""
        self.ids = self.ids[beams]
        pick = lambda part: part[beams] if len(part) == len(beams) else part     # one for all rows
        self.cache = [tuple(map(pick, entry)) for entry in self.cache]

    def extend(self, model, new):
        """Logits of new tokens. As `generate` in the model's file: a full cache restarts from its
        last half."""
        n_new = new.size(1)
        self.ids = new if self.ids is None else torch.cat((self.ids, new), 1)
        self.n_read += n_new
        limit = model.config.context_limit
        if limit and self.cache and self.cache[0][0].size(2) + n_new > limit:
            self.cache, new = [], self.ids[:, -max(n_new, limit // 2):]
        logits, _, aux = model.model(new, cache=self.cache)
        return logits[:, -n_new:], aux
