"""Rows of caches as arrays, and back."""

import numpy as np

from kvfast.caches.mla import MLAKVCache
from kvfast.caches.multi_head import MultiHeadKVCache
from kvfast.caches.paged import PagedKVCache
from kvfast.caches.paged_mla import PagedMLAKVCache
from kvfast.caches.sequence_cache import SequenceCache, storage_in
from kvfast.errors import DimensionMismatchError


def check_kind(cache):
    """Refuse all but caches of one sequence."""
    if not isinstance(cache, (SequenceCache, MultiHeadKVCache)):
        needed = "a sequence of the pool" if isinstance(cache, (PagedKVCache, PagedMLAKVCache)) else "a cache of one sequence"
        raise TypeError(f"cache must be {needed}, got {type(cache).__name__}")


def rows_of(cache, layer):
    """Keys and values of the tokens of a layer, or latents and rotary parts, as arrays of shape (tokens, heads, dim)."""
    check_kind(cache)
    if isinstance(cache, MultiHeadKVCache):
        storage_in(cache).shape(layer)  # IndexError for another than 0
        return cache.k(), cache.v()
    if isinstance(cache, MLAKVCache):
        rows = cache.get_latent(layer)[:, None]
        return _filled(rows[..., : cache.latent_dim], _width(cache)), _filled(rows[..., cache.latent_dim :], _width(cache))
    return cache.k(layer), cache.v(layer)


def append_rows(cache, layer, k, v):
    """Append what `rows_of` gave, or decoded keys and values of the same shape."""
    if isinstance(cache, MLAKVCache):
        cache.append(layer, _latent_rows(cache, k, v))
        return
    heads, dim = k.shape[1:]
    shape = storage_in(cache).shape(layer)
    if shape != (heads, dim, dim):
        dims = shape[1] if shape[1] == shape[2] else f"{shape[1]} (values {shape[2]})"
        raise DimensionMismatchError(f"compressed must have {shape[0]} heads of {dims} like the cache, got {heads} of {dim}")
    if isinstance(cache, MultiHeadKVCache):
        cache.push_tokens(k, v)
    else:
        cache.append(layer, k, v)


def _latent_rows(cache, latent, rope):
    """The rows of latents and rotary parts of `rows_of`."""
    if latent.shape[1:] != (1, _width(cache)):
        raise DimensionMismatchError(
            f"latents of {cache.latent_dim} with rotary parts of {cache.rope_dim} are compressed as one "
            f"head of {_width(cache)}, got {latent.shape[1]} of {latent.shape[2]}"
        )
    return np.concatenate((latent[:, 0, : cache.latent_dim], rope[:, 0, : cache.rope_dim]), axis=1)


def _width(cache):
    return max(cache.latent_dim, cache.rope_dim)


def _filled(array, width):
    """An array of shape (tokens, 1, dim), padded with zeros to `width`."""
    return np.pad(array, ((0, 0), (0, 0), (0, width - array.shape[2])))
