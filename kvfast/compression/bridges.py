"""Conversion between caches and compressed keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvfast.caches.contiguous import KVCache
from kvfast.caches.mla import MLAKVCache
from kvfast.caches.paged import PagedKVCache
from kvfast.caches.paged_mla import PagedMLAKVCache
from kvfast.caches.paged_sequence import PagedSequence
from kvfast.caches.ring import RingKVCache
from kvfast.caches.stored_sequence import buffer_of
from kvfast.errors import DimensionMismatchError

if TYPE_CHECKING:
    from kvfast.compression.compressed import CompressedKV


class CacheBridges:
    """Methods of `KVCacheCompressor` for whole caches. All pairs are based on `_compress_layer` and `_append_layer`."""

    def compress_cache(self, cache: Any, layer: int) -> CompressedKV:
        """Compress the tokens of a layer of a `KVCache`; the cache stays as it is.

        Parameters
        ----------
        cache : KVCache
        layer : int

        Returns
        -------
        CompressedKV
            Without a batch.

        Raises
        ------
        IndexError
        ValueError
            If the layer is empty, and as in `compress_kv`.
        """
        return self._compress_layer(_of_kind(cache, KVCache), layer)

    def decompress_to_cache(self, compressed: CompressedKV, cache: Any, layer: int) -> None:
        """Append the decoded tokens to a layer of a `KVCache`. As after `KVCache.append`, call `advance` when all layers have
        their tokens.

        Raises
        ------
        DimensionMismatchError
            If heads or head_dim differ, or if `compressed` is a batch.
        CacheFullError, IndexError
        """
        self._append_layer(compressed, _of_kind(cache, KVCache), layer)

    def compress_ring_cache(self, cache: Any, layer: int) -> CompressedKV:
        """As `compress_cache`, for a `RingKVCache`: the visible tokens of the layer, see `RingKVCache.positions`."""
        return self._compress_layer(_of_kind(cache, RingKVCache), layer)

    def decompress_to_ring_cache(self, compressed: CompressedKV, cache: Any, layer: int) -> None:
        """As `decompress_to_cache`, for a `RingKVCache`."""
        self._append_layer(compressed, _of_kind(cache, RingKVCache), layer)

    def compress_paged_cache(self, cache: Any, layer: int, sequence: Any) -> CompressedKV:
        """As `compress_cache`, for a `Sequence` of a `PagedKVCache`."""
        return self._compress_layer(_sequence_of(cache, sequence), layer)

    def decompress_to_paged_cache(self, compressed: CompressedKV, cache: Any, layer: int, sequence: Any) -> None:
        """As `decompress_to_cache`, for a `Sequence` of a `PagedKVCache`; CacheFullError if the pool has too few blocks."""
        self._append_layer(compressed, _sequence_of(cache, sequence), layer)

    def compress_mla_cache(self, cache: Any, layer: int, sequence: Any = None) -> CompressedKV:
        """As `compress_cache`, for an `MLAKVCache`, or for a sequence of a `PagedMLAKVCache`. The result has one head: its
        keys are the latents and its values the rotary parts, and the shorter of the two are padded with zeros. Use it with
        `decompress_to_mla_cache`, not with `attend`."""
        cache = _latents_of(cache, sequence)
        rows = cache.get_latent(layer)[:, None]
        latent, rope = rows[..., : cache.latent_dim], rows[..., cache.latent_dim :]
        return self._compress_pair(layer, *(_filled(one, _width(cache)) for one in (latent, rope)))

    def decompress_to_mla_cache(self, compressed: CompressedKV, cache: Any, layer: int, sequence: Any = None) -> None:
        """As `decompress_to_cache`, for an `MLAKVCache`, or for a sequence of a `PagedMLAKVCache`."""
        cache = _latents_of(cache, sequence)
        latent, rope = self.decompress_kv_3d(compressed)
        if latent.shape[::2] != (1, _width(cache)):
            raise DimensionMismatchError(
                f"latents of {cache.latent_dim} with rotary parts of {cache.rope_dim} are compressed as one "
                f"head of {_width(cache)}, got {latent.shape[0]} of {latent.shape[2]}"
            )
        cache.append(layer, np.concatenate((latent[0, :, : cache.latent_dim], rope[0, :, : cache.rope_dim]), axis=1))

    def _compress_layer(self, cache, layer):
        return self._compress_pair(layer, cache.k(layer), cache.v(layer))

    def _compress_pair(self, layer, k, v):
        if not len(k):
            raise ValueError(f"layer {layer} is empty: there is nothing to compress")
        return self.compress_kv_3d(k.swapaxes(0, 1), v.swapaxes(0, 1))

    def _append_layer(self, compressed, cache, layer):
        k, v = self.decompress_kv_3d(compressed)
        heads, _, dim = k.shape
        shape = buffer_of(cache).shape(layer)
        if shape != (heads, dim, dim):
            dims = shape[1] if shape[1] == shape[2] else f"{shape[1]} (values {shape[2]})"
            raise DimensionMismatchError(f"compressed must have {shape[0]} heads of {dims} like the cache, got {heads} of {dim}")
        cache.append(layer, np.ascontiguousarray(k.swapaxes(0, 1)), np.ascontiguousarray(v.swapaxes(0, 1)))


def _of_kind(cache, kind):
    if not isinstance(cache, kind):
        raise TypeError(f"cache must be a {kind.__name__}, got {type(cache).__name__}")
    return cache


def _width(cache):
    return max(cache.latent_dim, cache.rope_dim)


def _filled(array, width):
    """An array of shape (tokens, 1, dim), padded with zeros to `width`."""
    return np.pad(array, ((0, 0), (0, 0), (0, width - array.shape[2])))


def _sequence_of(cache, sequence, kind=PagedKVCache):
    _of_kind(cache, kind)
    if not isinstance(sequence, PagedSequence):
        raise TypeError(f"sequence must be a sequence of the cache, got {type(sequence).__name__}")
    cache.seq_lens([sequence])  # raises if the sequence is freed, or of another pool
    return sequence


def _latents_of(cache, sequence):
    if sequence is None:
        return _of_kind(cache, MLAKVCache)
    return _sequence_of(cache, sequence, PagedMLAKVCache)
