"""Conversion between caches and compressed keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvfast.caches.mla import MLAKVCache
from kvfast.caches.multi_head import MultiHeadKVCache
from kvfast.caches.paged import PagedKVCache
from kvfast.caches.paged_mla import PagedMLAKVCache
from kvfast.caches.sequence_cache import SequenceCache, storage_in
from kvfast.errors import DimensionMismatchError

if TYPE_CHECKING:
    from kvfast.compression.compressed import CompressedKV


class CacheBridges:
    """Methods of `KVCacheCompressor` for whole caches."""

    def compress_cache(self, cache: Any, layer: int) -> CompressedKV:
        """Compress the tokens that a layer of a cache holds, counted by `advance` or not; the cache stays as it is. ValueError if there are
        none, and as `compress_kv`.

        Parameters
        ----------
        cache : KVCache, RingKVCache, Sequence, MLAKVCache, MLASequence or MultiHeadKVCache
            From a ring, the visible tokens are compressed; see `RingKVCache.positions`.
        layer : int
            0 for a `MultiHeadKVCache`.

        Returns
        -------
        CompressedKV
            Without a batch. Latent rows give one head, whose keys are the latents and whose values are the rotary parts; the
            shorter of the two are padded with zeros. Use it with `decompress_to_cache`, not with `attend`.
        """
        k, v = _rows_of(cache, layer)
        if not len(k):
            raise ValueError(f"layer {layer} is empty: there is nothing to compress")
        return self.compress_kv_3d(k.swapaxes(0, 1), v.swapaxes(0, 1))

    def decompress_to_cache(self, compressed: CompressedKV, cache: Any, layer: int) -> None:
        """Append the decoded tokens to a layer of a cache. Call `advance` when all layers have their tokens, as after `append`.

        Parameters
        ----------
        compressed : CompressedKV
            Without a batch, and with the heads and the head_dim of the cache.
        cache : KVCache, RingKVCache, Sequence, MLAKVCache, MLASequence or MultiHeadKVCache
            A cache with the same kind of contents as in `compress_cache`; a `MultiHeadKVCache` needs no `advance`.
        layer : int
        """
        _check_kind(cache)
        k, v = (np.ascontiguousarray(one.swapaxes(0, 1)) for one in self.decompress_kv_3d(compressed))
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


def _check_kind(cache):
    if not isinstance(cache, (SequenceCache, MultiHeadKVCache)):
        needed = "a sequence of the pool" if isinstance(cache, (PagedKVCache, PagedMLAKVCache)) else "a cache of one sequence"
        raise TypeError(f"cache must be {needed}, got {type(cache).__name__}")


def _rows_of(cache, layer):
    """Keys and values of the tokens of a layer, or latents and rotary parts, as arrays of shape (tokens, heads, dim)."""
    _check_kind(cache)
    if isinstance(cache, MultiHeadKVCache):
        storage_in(cache).shape(layer)  # IndexError for another than 0
        return cache.k(), cache.v()
    if isinstance(cache, MLAKVCache):
        rows = cache.get_latent(layer)[:, None]
        return _filled(rows[..., : cache.latent_dim], _width(cache)), _filled(rows[..., cache.latent_dim :], _width(cache))
    return cache.k(layer), cache.v(layer)


def _latent_rows(cache, latent, rope):
    """The rows of latents and rotary parts of `_rows_of`."""
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
