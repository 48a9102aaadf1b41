"""A cache of a fixed size, for models whose step PyTorch compiles: the operators of `kvfast.torch` change and read its tensors."""

from typing import NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

import kvfast.torch
from kvfast import CacheFullError
from kvfast.engine import MAX_TOKENS, as_integer, check_size, size_text
from kvfast.engines.transformers.attention import check_call

STATIC = "kvfast_static"
TYPES = "full_attention", "sliding_attention"


def register_static():
    """Make ``attn_implementation="kvfast_static"`` known to transformers."""
    AttentionInterface.register(STATIC, static_attention)
    AttentionMaskInterface.register(STATIC, padding_of)


class New(NamedTuple):
    """New keys or values of a layer, which the attention function stores: it knows the padding."""

    tensor: torch.Tensor
    layer: "BlocksLayer"


class BlocksLayer(CacheLayerMixin):
    """A layer, as transformers asks for it. Row i of a batch has the blocks from i * blocks_per_row on."""

    is_compileable = is_croppable = True
    is_sliding = False

    def __init__(self, config, window, max_cache_len, dtype, block_size):
        super().__init__()
        self._config, self.window = config, window
        self.max_cache_len, self.dtype, self.block_size = max_cache_len, dtype, block_size
        self.cumulative_length = torch.tensor(0)  # tokens, with padding; a tensor, so that a graph is good for all of them
        self.padding = None  # of each row, as far as steps that are not compiled have told

    def lazy_initialization(self, key_states, value_states):
        batch, heads, _, head_dim = key_states.shape
        per_row, self.v_head_dim = -(-self.max_cache_len // self.block_size), value_states.shape[3]
        self.blocks = kvfast.torch.new_blocks(
            batch * per_row, heads, head_dim, self.dtype, block_size=self.block_size, v_head_dim=self.v_head_dim
        )
        self.block_table = torch.arange(batch * per_row, dtype=torch.int32).view(batch, per_row)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Count new keys and values, and hand them to the attention function."""
        self._check_attention()
        n = key_states.shape[2]
        if not torch.compiler.is_compiling() and self.cumulative_length + n > self.max_cache_len:  # else the operator refuses them
            raise CacheFullError(
                f"{int(self.cumulative_length)} tokens and {n} more do not fit max_cache_len={self.max_cache_len}: make a longer cache",
                n,
                self.max_cache_len - int(self.cumulative_length),
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if len(key_states) != len(self.block_table):
            raise ValueError(f"this cache holds a batch of {len(self.block_table)}, got keys of {len(key_states)}: make another one")
        self.cumulative_length.add_(n)
        return New(key_states, self), New(value_states, self)

    def check_padding(self, padding, n):
        """Refuse other padding before the `n` new tokens of rows that hold some: stored tokens keep their places."""
        before = self.cumulative_length - n
        if self.padding is not None and ((padding != self.padding) & (self.padding < before)).any():
            self.cumulative_length.sub_(n)
            raise ValueError(
                f"attention_mask has {padding.tolist()} tokens of padding before the rows, and had {self.padding.tolist()} when the "
                f"{int(before)} tokens before came: pass the mask of all tokens"
            )
        self.padding = padding

    def _check_attention(self):
        if self._config._attn_implementation != STATIC:
            raise ValueError(
                f"a KVFastStaticCache needs a model with attn_implementation={STATIC!r}, got {self._config._attn_implementation!r}: "
                f"model.set_attn_implementation({STATIC!r})"
            )

    def get_mask_sizes(self, query_length):
        self._check_attention()  # before masks of another kind fail
        return self.max_cache_len, 0

    def get_seq_length(self):
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self):
        return self.max_cache_len

    def reset(self):
        self.cumulative_length.zero_()
        self.padding = None

    def reorder_cache(self, beam_idx):
        """Give row i the tokens that row ``beam_idx[i]`` has."""
        if self.is_initialized:
            rows = self.blocks.view(len(self.block_table), -1)
            if len(beam_idx) != len(rows):  # one index would be copied to all rows
                raise ValueError(f"beam_idx must have an index for each of the {len(rows)} rows, got {len(beam_idx)}")
            rows.copy_(rows.index_select(0, beam_idx))
            self.padding = None if self.padding is None else self.padding[beam_idx]


class KVFastStaticCache(Cache):
    """A cache of a fixed size for ``generate``, whose tensors stay where they are, so that PyTorch can compile a model's step.

    Parameters
    ----------
    config : PretrainedConfig
        Configuration of the model. The ``attn_implementation`` must be ``"kvfast_static"``. Layers have full attention or
        sliding windows. A window saves no memory.
    max_cache_len : int
        Most tokens of a row, padding included. Its memory is taken at the first tokens.
    dtype, block_size
        As in `kvfast.torch.new_blocks`.

    Notes
    -----
    Every row of a batch has as many tokens; those of padding are not stored.

    >>> cache = KVFastStaticCache(model.config, max_cache_len=4096, dtype="int8")                # doctest: +SKIP
    >>> model.generate(**inputs, cache=cache)                                                    # doctest: +SKIP
    """

    def __init__(self, config, max_cache_len, dtype="int8", *, block_size=64):
        max_cache_len, text = check_size(max_cache_len, "max_cache_len", 1, MAX_TOKENS), config.get_text_config(decoder=True)
        types, options = get_layer_types_and_kwargs(text)
        unknown = set(types) - set(TYPES) | ({"latents"} if getattr(text, "kv_lora_rank", None) else set())
        if unknown or config.is_encoder_decoder:
            raise ValueError(
                f"a KVFastStaticCache is for decoders with layers of {' or '.join(TYPES)}, and {config.model_type} has "
                f"{', '.join(sorted(unknown)) or 'an encoder'}: take a KVFastCache"
            )
        kvfast.torch.new_blocks(1, 1, block_size, dtype, block_size=block_size)  # which refuses formats and sizes
        windows = [one.get("sliding_window") for one in options]
        super().__init__(layers=[BlocksLayer(text, window, max_cache_len, dtype, block_size) for window in windows])

    def update(self, key_states, value_states, layer_idx, *args, **options):
        """As transformers' ``Cache.update``. RuntimeError after a step that broke off between two layers."""
        if layer_idx == 0 and not torch.compiler.is_compiling() and len({int(one.cumulative_length) for one in self.layers}) > 1:
            raise RuntimeError("the last step did not reach every layer: crop(-n) takes its n tokens back, or reset() the cache")
        return super().update(key_states, value_states, layer_idx, *args, **options)

    def crop(self, tokens_to_remove):
        """Drop the last tokens, -`tokens_to_remove` of those that the first layer has seen: so it takes back a step that broke off."""
        keep = (self.layers[0].cumulative_length - abs(as_integer(tokens_to_remove, "tokens_to_remove"))).clamp(min=0)
        for layer in self.layers:
            layer.cumulative_length.clamp_(max=keep)

    def __repr__(self):
        first = self.layers[0]
        blocks = [layer.blocks for layer in self.layers if layer.is_initialized]
        return (
            f"KVFastStaticCache({first.dtype}, {len(self.layers)} layers, batch of {len(first.block_table) if blocks else 0}, "
            f"{int(first.cumulative_length)} of {first.max_cache_len} tokens, {size_text(sum(one.nbytes for one in blocks))})"
        )


def padding_of(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function, attention_mask=None, **others
):
    """What ``AttentionMaskInterface`` calls: the tokens of padding before each row, of shape (batch, 1, 1, 1), int64.

    ValueError for a mask that is more than causal, a window, and padding before the tokens of a row.
    """
    if mask_function is not causal_mask_function and not _is_window(mask_function):
        raise ValueError(f'attn_implementation={STATIC!r} has causal masks and sliding windows alone: take "kvfast" and a KVFastCache')
    if attention_mask is None:
        return torch.zeros((batch_size, 1, 1, 1), dtype=torch.int64)
    seen = attention_mask[:, : int(q_offset) + q_length].bool()
    padding = (~seen).sum(-1)
    if (seen.cumsum(-1) > 0).sum(-1).ne(seen.sum(-1)).any():
        raise ValueError("rows must be padded on the left, got padding after a token: tokenizer.padding_side = 'left'")
    return padding.view(-1, 1, 1, 1)


def _is_window(mask_function):
    """Whether a function of transformers is that of a sliding window, and nothing is laid over it."""
    window = sliding_window_causal_mask_function(1)
    return getattr(mask_function, "__code__", None) is window.__code__ and _parts(mask_function) == _parts(window)


def _parts(joined):
    """The code of each function that transformers' ``and_masks`` has joined."""
    return [getattr(part, "__code__", None) for part in joined.__closure__[0].cell_contents]


def static_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, **others):
    """Attention of a model's layer, as transformers calls it; see `kvfast.engines.transformers.attention.attention`."""
    if not isinstance(key, New):
        raise TypeError(f"attn_implementation={STATIC!r} needs a KVFastStaticCache: pass cache=KVFastStaticCache(model.config, ...)")
    if attention_mask is not None and (attention_mask.shape[1:] != (1, 1, 1) or attention_mask.dtype != torch.int64):
        raise ValueError(
            f"attn_implementation={STATIC!r} takes masks of padding, of shape (batch, tokens), got {attention_mask.dtype} of shape "
            f'{tuple(attention_mask.shape)}: for others take "kvfast" and a KVFastCache'
        )
    layer = key.layer
    check_call(module, query, layer.window, dropout, others)
    batch, num_q_heads, n, head_dim = query.shape
    capacity = layer.block_table.shape[1] * layer.block_size
    padding = attention_mask.view(-1) if attention_mask is not None else torch.zeros(batch, dtype=torch.int64)
    if not torch.compiler.is_compiling():
        layer.check_padding(padding, n)
    places = layer.cumulative_length - n + torch.arange(n) - padding[:, None]  # of each token among its row's own
    slots = torch.arange(batch)[:, None] * capacity + places
    # Those of padding are left out; a token after the last place gets a slot that the operator refuses.
    slots = torch.where(places < 0, -1, torch.where(places < layer.max_cache_len, slots, batch * capacity)).view(-1)
    k, v, q = (rows.transpose(1, 2).flatten(0, 1) for rows in (key.tensor, value.tensor, query))
    torch.ops.kvfast.append(layer.blocks, k, v, slots, layer.dtype)
    options = {
        "scale": head_dim**-0.5 if scaling is None else scaling,
        "softcap": softcap or 0.0,
        "sliding_window": layer.window or 0,
        "sinks": s_aux,
        "v_head_dim": layer.v_head_dim,
    }
    lengths = (places[:, -1] + 1).int()
    if n == 1:
        found = torch.ops.kvfast.attend(layer.blocks, q, layer.block_table, lengths, layer.dtype, **options)
    else:
        kept = slots >= 0
        starts = torch.nn.functional.pad((places >= 0).sum(1).cumsum(0), (1, 0)).int()
        found = q.new_zeros((batch * n, num_q_heads, layer.v_head_dim))
        found[kept] = torch.ops.kvfast.attend(layer.blocks, q[kept], layer.block_table, lengths, layer.dtype, starts, **options)
    return found.view(batch, n, num_q_heads, layer.v_head_dim), None
