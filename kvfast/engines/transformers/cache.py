"""The cache that ``generate`` takes."""

import contextlib
import copy
import warnings

import numpy as np
import torch
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from kvfast import PromptCache
from kvfast.engine import MAX_TOKENS, as_array, as_integer, check_size, formats_of, key_bias_note, read_shape, shown, size_text
from kvfast.engines.transformers.attention import NAME
from kvfast.engines.transformers.layers import IndexedLayer, kinds_of, new_layer
from kvfast.engines.transformers.rows import RowCaches
from kvfast.engines.transformers.states import LayerStates, Recomputing
from kvfast.engines.transformers.versions import asks_for_states


class KVFastCache(Cache):
    """Keys and values of a batch in kvfast's storage, for ``model.generate(cache=...)``.

    With ``attn_implementation="kvfast"``, prompts and single tokens attend to the stored bytes. Under any other
    implementation the cache decodes all of its tokens at every step, which takes time and memory.

    Parameters
    ----------
    config : PreTrainedConfig
        ``model.config``: it has the layers, the windows and the attention implementation, which may change between steps.
    dtype, k_dtype, v_dtype
        As in `kvfast.KVCache`, or a dtype of PyTorch; ``"int4"`` by default.
    max_seq_len : int, optional
        Largest number of tokens of a row; their memory is reserved at once. Without it rows grow. Not for models with
        sliding windows, whose layers take constant memory.
    rollback : int
        Tokens that `crop` can go back in layers with a sliding window.
    prompt_cache : kvfast.PromptCache, or its `store` argument, optional
        Where `restore_prompt` and `save_prompt` keep prompts.
    max_state_bytes : int
        For a model with recurrent layers: the most bytes of a row's checkpoints, see `kvfast.KVCache`.
    checkpoint_tokens : int
        Generated tokens from one checkpoint to the next. There are others before and after every piece of a prompt.
    model : PreTrainedModel, optional
        For a model with recurrent layers, that which the cache is used with: where `crop` finds no checkpoint, the cache lets it compute
        the tokens since the last one again. Assisted generation needs this.

    Raises
    ------
    ValueError
        For models with unknown layers, such as encoder-decoders, and where `kvfast.KVCache` raises it.

    Notes
    -----
    Each row of the batch is a cache of its own (`rows`), which holds no padding. Beams share blocks: `reorder_cache` copies
    no block, and a beam copies a block before it writes to it. To keep a row on disk, call ``cache.rows[0].save(path)``
    between steps.

    Layers may differ in their KV heads, their head_dim, and the tokens that they see: all, a sliding window, or chunks. A layer that
    reads the keys and values of another layer stores nothing.

    Layers with a state, such as linear attention or a convolution, keep it in transformers' own tensors, which `nbytes` leaves out.
    `rows` have copies of all states at some positions, their `checkpoints`: for snapshots, files and prompt stores, and to go back.

    Keys and values may have different widths. Each side is stored in its own width.

    Threads are those of ``torch.get_num_threads()``. A cache serves one thread at a time.

    Examples
    --------
    >>> import kvfast.transformers, torch                                                    # doctest: +SKIP
    >>> cache = kvfast.transformers.KVFastCache(model.config, dtype="int8")                  # doctest: +SKIP
    >>> tokens = model.generate(**inputs, cache=cache, max_new_tokens=20)          # doctest: +SKIP
    >>> cache                                                                                # doctest: +SKIP
    KVFastCache(int8, 30 layers, batch of 1, 25 tokens, 1.5 MiB)
    """

    def __init__(
        self,
        config,
        dtype="int4",
        k_dtype=None,
        v_dtype=None,
        *,
        max_seq_len=None,
        rollback=64,
        prompt_cache=None,
        max_state_bytes=1 << 30,
        checkpoint_tokens=512,
        model=None,
    ):
        if not hasattr(config, "get_text_config"):
            raise TypeError(f"config must be the configuration of a model, got a {type(config).__name__}: pass model.config")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"KVFastCache is for models with a decoder only, and {config.model_type} has an encoder")
        config = config.get_text_config(decoder=True)
        if getattr(config, "use_cache", True) is False:
            raise ValueError(
                f"the configuration of this {config.model_type} has use_cache=False, with which generate gives a cache every "
                f"token again at each step: set model.config.use_cache = model.generation_config.use_cache = True before"
            )
        if getattr(config, "cross_attention_layers", None):
            raise ValueError(
                f"KVFastCache keeps the keys and values of a model's own tokens, and layer {config.cross_attention_layers[0]} of "
                f"{config.model_type} attends to others: use transformers' DynamicCache(config=model.config)"
            )
        layer_types, options = get_layer_types_and_kwargs(config)
        kinds = kinds_of(config.model_type, layer_types)
        stored = [index for index, kind in enumerate(kinds) if kind.has_rows]
        if any(kind.has_state for kind in kinds) and not asks_for_states():
            raise ValueError(
                f"KVFastCache needs transformers 5.21 or later for models with recurrent layers, such as {config.model_type}: "
                f'pip install "transformers>=5.21,<6"'
            )
        windows = [options[index].get("sliding_window") for index in stored]
        chunks = [window if layer_types[index] == "chunked_attention" else None for index, window in zip(stored, windows)]
        configs = config.per_layer_config
        configured = [
            tuple(getattr(configs[index], name, None) for name in ("num_key_value_heads", "head_dim", "v_head_dim")) for index in stored
        ]
        if max_seq_len is not None:
            max_seq_len = check_size(max_seq_len, "max_seq_len", 1, MAX_TOKENS)
            if any(windows):
                raise ValueError(f"max_seq_len is for models without sliding windows, and {config.model_type} has them")
        dtype, k_dtype, v_dtype = (
            str(one).removeprefix("torch.") if isinstance(one, torch.dtype) else one for one in (dtype, k_dtype, v_dtype)
        )
        formats = formats_of(dtype, k_dtype, v_dtype, len(windows))  # refuses now what it would refuse at the first token
        if bias := key_bias_note(config.model_type, {str(one): one for one in formats}):
            warnings.warn(bias, stacklevel=2)
        rollback = check_size(rollback, "rollback", 0, MAX_TOKENS)
        self._config, self._dtype, self._max_seq_len = config, dtype, max_seq_len
        self.prompt_cache = prompt_cache if prompt_cache is None or isinstance(prompt_cache, PromptCache) else PromptCache(prompt_cache)
        settings = {"dtype": dtype, "k_dtype": k_dtype, "v_dtype": v_dtype}
        if any(kind.has_state for kind in kinds):
            settings["max_state_bytes"] = check_size(max_state_bytes, "max_state_bytes", 1)
        self._checkpoint_tokens = check_size(checkpoint_tokens, "checkpoint_tokens", 1)
        indexed = [kinds[index].has_indexer for index in stored]
        self._rows = RowCaches(stored, windows, chunks, indexed, configured, settings, max_seq_len, rollback)
        places = {index: place for place, index in enumerate(stored)}
        self._kinds = [(kind, places.get(index), options[index].get("number_of_states", 1)) for index, kind in enumerate(kinds)]
        super().__init__(layers=self._new_layers())
        self._states = self._new_states()
        self._again = Recomputing(model, self) if self._states and model is not None else None

    def _new_layers(self):
        return [new_layer(*kind, (self._config, self._rows), self._max_seq_len) for kind in self._kinds]

    def _new_states(self):
        has_states = any(kind.has_state for kind, *_ in self._kinds)
        last = max(index for index, (kind, *_) in enumerate(self._kinds) if kind.has_rows or kind.has_state)
        return LayerStates(self.layers, self._rows, self._checkpoint_tokens, last) if has_states else None

    def _indexed(self):
        """The layers that have an indexer."""
        return [layer for layer in self.layers if isinstance(layer, IndexedLayer)]

    def _enter(self, layer_idx):
        if self._states:
            self._states.enter(layer_idx)

    # As a model calls them in each of its layers, in their order.

    def get_conv_state(self, layer_idx, *args, **options):
        self._enter(layer_idx)
        return super().get_conv_state(layer_idx, *args, **options)

    def get_recurrent_state(self, layer_idx, *args, **options):
        self._enter(layer_idx)
        return super().get_recurrent_state(layer_idx, *args, **options)

    def update_conv_state(self, conv_states, layer_idx, *args, **options):
        self._enter(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **options)

    def update_recurrent_state(self, recurrent_states, layer_idx, *args, **options):
        self._enter(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **options)

    def get_mask_sizes(self, query_length, layer_idx):
        if self._states:
            self._states.begin(query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    def update(self, key_states, value_states, layer_idx, *args, **options):
        """Store the keys and values of a layer; see transformers' ``Cache.update``."""
        self._enter(layer_idx)
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"this cache was made for the {len(self.layers)} layers of a {self._config.model_type}, and the model has a "
                f"layer {layer_idx}: make it by KVFastCache(model.config)"
            )
        return super().update(key_states, value_states, layer_idx, *args, **options)

    @property
    def rows(self):
        """The caches of the batch's rows: a list of `kvfast.KVCache` or `kvfast.RingKVCache`, to be read, saved and forked. To change them,
        change the cache. Those of a model with recurrent layers have a checkpoint after their last token. RuntimeError if the last step did
        not reach every layer; `crop` takes it back.
        """
        rows = list(self._rows.settled())
        if self._states:
            self._states.check_whole()
            self._states.take()
        return rows

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
        """Bytes reserved for keys, values and checkpoints; what beams share counts once."""
        return self._rows.nbytes

    def restore_prompt(self, input_ids, model=None, *, tokens_per_second=None):
        """Take the longest prefix of a prompt that `prompt_cache` has; ``model.generate(input_ids)`` then computes the rest.

        Parameters
        ----------
        input_ids : integers of shape (1, num_tokens)
            Without padding.
        model : str, optional
            As in `kvfast.PromptCache.restore`; by default the name and revision in the configuration.
        tokens_per_second : float, optional
            As in `kvfast.PromptCache.restore`.

        Returns
        -------
        int
            Tokens that the cache now holds. It must be empty before: otherwise a ValueError.
        """
        token_ids, model = self._prompt(input_ids, model)
        if self._rows.rows:
            raise ValueError("restore_prompt fills an empty cache: reset() it before")
        found = 0
        with self._filling() as (row,):
            found = self.prompt_cache.restore(row, token_ids, model, tokens_per_second=tokens_per_second)
        self._jumped(found, token_ids[:found])
        return found

    def restore(self, snapshots):
        """Take the tokens of snapshots, one for each row of a batch.

        Parameters
        ----------
        snapshots : list of kvfast.Snapshot
            Of `rows` of a cache for the same model, or from their files. If some have fewer tokens, their rows are padded on the left:
            pass an ``attention_mask`` that says so.

        Raises
        ------
        ValueError
            If the cache is not empty, or there is no snapshot.
        kvfast.IncompatibleSnapshotError
            If a snapshot is of another model, or of other formats.
        kvfast.MissingCheckpointError
            If the model has recurrent layers, and a snapshot has no checkpoint after its last token.
        """
        if not isinstance(snapshots, (list, tuple)):
            raise TypeError(f"snapshots must be a list with one for each row, got a {type(snapshots).__name__}")
        if self._rows.rows or not len(snapshots):
            raise ValueError("restore fills an empty cache from at least one snapshot: reset() it before")
        if self._states:
            for one in snapshots:
                one.states_at()
        with self._filling(len(snapshots)) as rows:
            for row, snapshot in zip(rows, snapshots):
                row.restore(snapshot)
        self._jumped(len(rows[0]), () if snapshots[0].token_ids is None else snapshots[0].token_ids)

    @contextlib.contextmanager
    def _filling(self, batch=1):
        """Rows to be filled otherwise than by the model."""
        if self._indexed():
            raise ValueError(
                f"the rows of a {self._config.model_type} do not have the keys of its indexers, so the model has to compute its prompts"
            )
        rows = self._rows.begin(self._row_shapes(), self._config._attn_implementation == NAME, batch)
        try:
            yield rows
            self._rows.go_on()
            if self._states and self._rows.rows:
                self._states.load()
        except BaseException:
            self.reset()
            raise

    def save_prompt(self, input_ids, model=None):
        """Save the tokens that the cache holds in `prompt_cache`.

        Parameters
        ----------
        input_ids : integers of shape (1, num_tokens)
            At least the tokens that the cache holds: the prompt, or the result of ``model.generate``.
        model : str, optional
            As in `restore_prompt`.

        Returns
        -------
        bool
            As `kvfast.PromptCache.save`.
        """
        token_ids, model = self._prompt(input_ids, model)
        rows = self.rows
        if len(rows) != 1 or len(rows[0]) > len(token_ids):
            raise ValueError(
                f"save_prompt needs the {len(rows[0]) if rows else 0} tokens of the one row of the cache, got {len(token_ids)} and {len(rows)} rows"
            )
        return self.prompt_cache.save(rows[0], token_ids[: len(rows[0])], model)

    def _row_shapes(self):
        """KV heads, head_dim and v_head_dim of each layer, before the first keys tell them."""
        config, shapes = self._config, []
        for layer in read_shape(config).layers:
            if layer.rope_dim is None:
                shapes.append((layer.num_kv_heads, layer.head_dim, layer.v_head_dim or layer.head_dim))
            elif self._config._attn_implementation == NAME:  # what a layer makes of its latents
                shapes.append((config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim))
            else:
                shapes.append((1, layer.head_dim, layer.rope_dim))
        return shapes

    def _prompt(self, input_ids, model):
        if self.prompt_cache is None:
            raise ValueError("this cache was made without a prompt_cache")
        token_ids = as_array(input_ids, "input_ids")
        if token_ids.ndim != 2 or len(token_ids) != 1:
            raise ValueError(f"input_ids must have shape (1, num_tokens), of one prompt, got {token_ids.shape}")
        if model is None:
            model = f"{self._config.name_or_path} {getattr(self._config, '_commit_hash', None)}"
        return token_ids[0], model

    def reset(self):
        """Forget everything, the size of the batch included."""
        self._rows.clear()
        self.layers = self._new_layers()
        self._states = self._new_states()
        self._jumped(0)

    def crop(self, tokens_to_remove):
        """Drop the last tokens of every row. A step that broke off before it reached every layer is taken back, too: its tokens count
        as far as `get_seq_length` does.

        Parameters
        ----------
        tokens_to_remove : int
            The number of tokens to drop, as a negative number (as transformers passes it), or 0.

        Raises
        ------
        ValueError
            For a positive number, or if a sliding window has dropped tokens that it would need. The cache stays as it was.
        RuntimeError
            If a step broke off, and this would keep some of its tokens.
        kvfast.MissingCheckpointError
            If the model has recurrent layers, there is no checkpoint after the tokens that stay, and the cache was made without `model`.
            The cache stays as it was.
        """
        tokens_to_remove = as_integer(tokens_to_remove, "tokens_to_remove")
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative integer, got {shown(tokens_to_remove)}")
        if not self._rows.rows:
            if self._states and not self._states.is_whole():
                self.reset()  # a first step broke off before it came to keys
        elif self._states is None:
            if tokens_to_remove:
                self._rows.crop(-tokens_to_remove)
                for layer in self._indexed():
                    layer.crop_indexer(self._rows.seen[0])
        elif tokens_to_remove or not self._states.is_whole():
            self._states.crop(-tokens_to_remove, self, self._again)
        else:
            self._states.crop_records(0)

    def _jumped(self, n, token_ids=()):
        if self._again is not None:
            self._again.jumped(n, np.asarray(token_ids, np.int64).tolist())

    @property
    def is_croppable(self):
        """Whether `crop` can go back to any number of tokens."""
        return self._again is not None or super().is_croppable

    def activate_past_recording(self):
        """Let convolutions record their states, where these are the only ones, and where the model does not compute them again."""
        if self._again is None:
            super().activate_past_recording()

    def reorder_cache(self, beam_idx):
        """Replace row i by the old row ``beam_idx[i]``, for all rows."""
        self._select(self._rows.indices_of(beam_idx, "beam_idx"))

    def batch_select_indices(self, indices):
        """Keep the rows with the given indices, in the order of the indices, or those of a mask."""
        self._select(self._rows.indices_of(indices, "indices", True))

    def batch_repeat_interleave(self, repeats):
        """Repeat each row `repeats` times."""
        self._select([i for i in range(len(self._rows.rows)) for _ in range(check_size(repeats, "repeats", 1))])

    def _select(self, indices):
        if self._states:
            self._states.check_whole()
        self._rows.select(indices)
        for layer in self._indexed():
            layer.select_indexer(indices)
        if self._states:
            self._states.select(indices)

    def __deepcopy__(self, memo):
        if self._states:
            self._states.check_whole()
        other = copy.copy(self)
        other._rows = self._rows.copy()
        other.layers = copy.deepcopy(self.layers, {id(self._rows): other._rows, id(self._config): self._config})
        other._states, again = other._new_states(), self._again
        other._again = again and again.copy(other)
        return other

    def __repr__(self):
        rows = self._rows
        name = self._dtype if isinstance(self._dtype, str) else rows.rows[0].dtype_name if rows.rows else "not yet used"
        return (
            f"KVFastCache({name}, {len(self.layers)} layers, batch of {len(rows.rows)}, {rows.seen[0]} tokens, "
            f"{size_text(self.nbytes)})"
        )
