"""The cache that ``generate`` takes."""

import copy

from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from ..formats import formats_of
from ..options import check_size
from ..storage_properties import size_text
from .attention import NAME, as_numpy
from .rows import Rows

__all__ = ["KVFastCache"]

_LAYER_TYPES = ("full_attention", "sliding_attention")


class KVFastCache(Cache):
    """Keys and values of a batch in kvfast's storage, for ``model.generate(past_key_values=...)``.

    With ``attn_implementation="kvfast"``, prompts and single tokens attend straight on the stored bytes. Under any other
    implementation the cache also works: it decodes all of itself at every step, which takes time and memory.

    Parameters
    ----------
    config : PreTrainedConfig
        ``model.config``: of layers, windows, and the attention implementation, which may change between steps.
    dtype, k_dtype, v_dtype
        As in `kvfast.KVCache`; ``"int4"`` by default.
    max_seq_len : int, optional
        Most tokens of a row; their memory is then reserved at once. Without it rows grow. Not for models with sliding
        windows, whose layers take constant memory.
    rollback : int
        Tokens that `crop` can go back in layers with a sliding window.

    Raises
    ------
    ValueError
        For models with other layers than full and sliding attention, encoder-decoders among them, and as `kvfast.KVCache`.

    Notes
    -----
    Each row of the batch is a cache of its own (`rows`), which holds no padding. Beams share blocks: `reorder_cache` copies
    none, and a beam copies the block that it writes to. Where the model makes no new tokens for a while, a row can be kept
    with ``cache.rows[0].save(path)``.

    Threads are those of ``torch.get_num_threads()``. A cache serves one thread at a time.

    Examples
    --------
    >>> import kvfast.transformers, torch                                                    # doctest: +SKIP
    >>> cache = kvfast.transformers.KVFastCache(model.config, dtype="int8")                  # doctest: +SKIP
    >>> tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=20)          # doctest: +SKIP
    >>> cache                                                                                # doctest: +SKIP
    KVFastCache(int8, 30 layers, batch of 1, 25 tokens, 1.5 MiB)
    """

    def __init__(self, config, dtype="int4", k_dtype=None, v_dtype=None, *, max_seq_len=None, rollback=64):
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"KVFastCache is for models with a decoder only, and {config.model_type} has an encoder")
        config = config.get_text_config(decoder=True)
        layer_types, options = get_layer_types_and_kwargs(config)
        unknown = sorted(set(layer_types) - set(_LAYER_TYPES))
        if unknown:
            raise ValueError(f"KVFastCache knows layers of {' and '.join(_LAYER_TYPES)}, and {config.model_type} has {', '.join(unknown)}")
        windows = [one.get("sliding_window") for one in options]
        if max_seq_len is not None:
            max_seq_len = check_size(max_seq_len, "max_seq_len", 1, 1 << 40)
            if any(windows):
                raise ValueError(f"max_seq_len is for models without sliding windows, and {config.model_type} has them")
        formats_of(dtype, k_dtype, v_dtype, len(windows))  # refuses now what it would refuse at the first token
        rollback = check_size(rollback, "rollback", 0, 1 << 40)
        self._config, self._dtype, self._max_seq_len = config, dtype, max_seq_len
        self._rows = Rows(windows, {"dtype": dtype, "k_dtype": k_dtype, "v_dtype": v_dtype}, max_seq_len, rollback)
        super().__init__(layers=[_Layer(config, self._rows, index, max_seq_len) for index in range(len(windows))])

    @property
    def rows(self):
        """The caches of the batch's rows: a list of `kvfast.KVCache` or `kvfast.RingKVCache`."""
        return list(self._rows.settled())

    @property
    def batch_size(self):
        """Rows of the batch, -1 before the first tokens."""
        return len(self._rows.rows) or -1

    @property
    def is_initialized(self):
        """Whether the cache has seen tokens."""
        return bool(self._rows.rows)

    @property
    def nbytes(self):
        """Bytes reserved for keys and values; what beams share counts once."""
        return self._rows.nbytes

    def reset(self):
        """Forget everything, the size of the batch included."""
        self._rows.clear()

    def crop(self, tokens_to_remove):
        """Drop the last tokens of every row.

        Parameters
        ----------
        tokens_to_remove : int
            Their number, as transformers gives it: negative, or 0 for none.

        Raises
        ------
        ValueError
            For a positive number, or where a sliding window has dropped what it would need; the cache is as it was.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative integer, got {tokens_to_remove}")
        if tokens_to_remove and self._rows.rows:
            self._rows.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx):
        """Let row i be what row ``beam_idx[i]`` was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices):
        """Keep the rows of some indices, in their order."""
        if self._rows.rows:
            self._rows.select(indices.tolist())

    def batch_repeat_interleave(self, repeats):
        """Let each row be there `repeats` times."""
        self._rows.select([i for i in range(len(self._rows.rows)) for _ in range(repeats)])

    def __deepcopy__(self, memo):
        other = copy.copy(self)
        other._rows = self._rows.copy()
        other.layers = [_Layer(self._config, other._rows, index, self._max_seq_len) for index in range(len(self.layers))]
        return other

    def __repr__(self):
        rows = self._rows
        name = self._dtype if isinstance(self._dtype, str) else rows.rows[0].dtype_name if rows.rows else "not yet used"
        return (f"KVFastCache({name}, {len(self.layers)} layers, batch of {len(rows.rows)}, {rows.seen[0]} tokens, "
                f"{size_text(self.nbytes)})")


class _Layer(CacheLayerMixin):
    """One layer, as transformers asks for it; everything is in the rows."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, config, rows, index, max_seq_len):
        self._config, self._rows, self._index, self._max_seq_len = config, rows, index, max_seq_len

    def update(self, key_states, value_states, *args, **kwargs):
        """Take new keys and values. Under ``"kvfast"`` they are stored by the attention function, which knows the mask."""
        rows, layer = self._rows, self._index
        direct = self._config._attn_implementation == NAME
        if not direct:
            rows.check_whole()
        rows.receive(layer, key_states, value_states, direct)
        if direct:
            key_states = key_states.view_as(key_states)
            key_states.kvfast_place = rows, layer
            return key_states, value_states
        rows.store(layer, rows.parts(layer, key_states.shape[2], None), as_numpy(key_states), as_numpy(value_states))
        return tuple(tensor.to(key_states.dtype) for tensor in rows.decoded(layer))

    def get_mask_sizes(self, query_length):
        return self._rows.seen[self._index] + query_length, 0

    def get_seq_length(self):
        return self._rows.seen[self._index]

    def get_max_length(self):
        return self._rows.windows[self._index] or self._max_seq_len or -1

    def lazy_initialization(self, key_states, value_states):
        """Nothing: the rows are made by the first tokens."""

    @property
    def keys(self):
        """Keys decoded to float32, of shape (batch, num_kv_heads, tokens, head_dim); None before the first."""
        return self._rows.decoded(self._index)[0] if self._rows.rows else None

    @property
    def values(self):
        """Values, as `keys`."""
        return self._rows.decoded(self._index)[1] if self._rows.rows else None

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
