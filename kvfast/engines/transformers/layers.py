"""Layers of a cache, as transformers asks for them."""

from typing import NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvfast.engine import as_numpy
from kvfast.engines.transformers.attention import NAME
from kvfast.engines.transformers.received import Received
from kvfast.engines.transformers.versions import dummy_layer


class StoredLayer(CacheLayerMixin):
    """A layer with keys and values, as transformers asks for it; everything is in the rows."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, config, rows, index, max_seq_len):
        self._config, self._rows, self._index, self._max_seq_len = config, rows, index, max_seq_len
        # Latents are stored as the keys and values that the layer makes of them.
        self._expands = getattr(config.per_layer_config[rows.numbers[index]], "kv_lora_rank", None) is not None

    def update(self, key_states, value_states, *args, **kwargs):
        """Take new keys and values. Under ``"kvfast"`` they are stored by the attention function, which knows the mask."""
        rows, layer = self._rows, self._index
        direct = self._config._attn_implementation == NAME
        if not direct:
            rows.check_whole()
        rows.receive(layer, key_states, value_states)
        if direct:
            return tuple(Received.of(tensor, rows, layer, rows.seen[layer], self._expands) for tensor in (key_states, value_states))
        rows.fit(layer, key_states, value_states, direct)
        rows.store(layer, rows.parts(layer, key_states.shape[2], None), as_numpy(key_states), as_numpy(value_states))
        first = rows.first_seen(layer, rows.seen[layer] - key_states.shape[2] + 1)
        decoded = tuple(tensor[:, :, first:].to(key_states.dtype) for tensor in rows.decoded(layer))
        decoded[0].is_decoded = True  # which kvfast's attention refuses: it has another configuration than the cache
        return decoded

    def get_mask_sizes(self, query_length):
        seen = self._rows.seen[self._index]
        first = 0 if self._config._attn_implementation == NAME else self._rows.first_seen(self._index, seen + 1)
        return seen + query_length - first, first

    def get_seq_length(self):
        return self._rows.seen[self._index]

    def get_max_length(self):
        return self._rows.windows[self._index] or self._max_seq_len or -1

    def lazy_initialization(self, key_states, value_states):
        """No-op: the first tokens make the rows."""

    @property
    def keys(self):
        """Keys decoded to float32, of shape (batch, num_kv_heads, tokens, head_dim); None before the first."""
        return self._rows.decoded(self._index)[0] if self.is_initialized else None

    @property
    def values(self):
        """Values, as `keys`."""
        return self._rows.decoded(self._index)[1] if self.is_initialized else None

    @property
    def is_initialized(self):
        return self._rows.seen[self._index] > 0

    @property
    def is_sliding(self):
        return self._rows.windows[self._index] is not None

    @property
    def batch_size(self):
        return len(self._rows.rows) or -1

    def offload(self):
        """Nothing: the rows are in the CPU's memory."""

    def prefetch(self):
        """Nothing, as `offload`."""

    def reset(self):
        raise NotImplementedError("a layer of a KVFastCache cannot be reset alone: reset() the cache")

    def reorder_cache(self, beam_idx):
        raise NotImplementedError("a layer of a KVFastCache cannot be reordered alone: reorder_cache() of the cache")


class HybridLayer(LinearAttentionLayer, StoredLayer):
    """A layer with keys and values and a state."""

    is_compileable = False

    def __init__(self, config, rows, index, max_seq_len, number_of_states=1):
        StoredLayer.__init__(self, config, rows, index, max_seq_len)
        LinearAttentionLayer.__init__(self, number_of_states)


class IndexedLayer(StoredLayer):
    """A layer with keys and values, and an indexer that chooses which of them a query reads. The indexer scores its own keys itself, so
    they are a tensor as in transformers' own caches, of shape (batch, tokens, index_head_dim) with padding."""

    def __init__(self, config, rows, index, max_seq_len):
        super().__init__(config, rows, index, max_seq_len)
        self.indexer_keys = self.indexer_position_ids = None

    def update_indexer(self, indexer_key_states):
        """Add keys of the indexer, and return all of them."""
        known = [] if self.indexer_keys is None else [self.indexer_keys]
        self.indexer_keys = torch.cat([*known, indexer_key_states], 1)
        return self.indexer_keys

    def crop_indexer(self, keep):
        """Keep the indexer's keys of the first `keep` tokens."""
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, :keep]
            if self.indexer_position_ids is not None:
                self.indexer_position_ids = self.indexer_position_ids[..., :keep]

    def select_indexer(self, indices):
        """Keep the indexer's keys of some rows."""
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[indices]
            if self.indexer_position_ids is not None:
                self.indexer_position_ids = self.indexer_position_ids[:, indices]


class Kind(NamedTuple):
    """What a KVFastCache keeps of a layer, by the layer's type in the model's configuration."""

    has_rows: bool
    has_state: bool
    has_indexer: bool = False


KINDS = {
    "full_attention": Kind(True, False),
    "sliding_attention": Kind(True, False),
    "chunked_attention": Kind(True, False),
    "indexed_attention": Kind(True, False, True),
    "linear_attention": Kind(False, True),
    "conv": Kind(False, True),
    "hybrid": Kind(True, True),
    "hybrid_sliding": Kind(True, True),
    "dummy": Kind(False, False),  # reads what another layer keeps, or nothing
}
# Models with an indexer that were tried. Those of others keep more than keys, or read packed tokens.
INDEXERS = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text", "mistral_large4_text", "qwen4_exp_text")


def kinds_of(model_type, layer_types):
    """The kind of each layer of a model: ValueError for one that is not known, and where none has keys and values."""
    for index, name in enumerate(layer_types):
        if name not in KINDS or (KINDS[name].has_indexer and model_type not in INDEXERS):
            raise ValueError(
                f"KVFastCache does not know what layer {index} of {model_type} keeps, which is {name}: use "
                f"transformers' DynamicCache(config=model.config)"
            )
    kinds = [KINDS[name] for name in layer_types]
    if not any(kind.has_rows for kind in kinds):
        raise ValueError(
            f"no layer of {model_type} has keys and values, which a KVFastCache needs: use transformers' "
            f"DynamicCache(config=model.config)"
        )
    return kinds


def new_layer(kind, index, number_of_states, of, max_seq_len):
    """A layer of a kind; `index` is its place among those with rows, `of` the configuration and the rows."""
    if kind.has_indexer:
        return IndexedLayer(*of, index, max_seq_len)
    if kind.has_rows:
        return HybridLayer(*of, index, max_seq_len, number_of_states) if kind.has_state else StoredLayer(*of, index, max_seq_len)
    return LinearAttentionLayer(number_of_states) if kind.has_state else dummy_layer()
