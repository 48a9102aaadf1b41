"""Compression of keys and values that no longer change."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfast.codec.formats import PRESETS
from kvfast.compression.bridges import append_rows, check_kind, rows_of
from kvfast.compression.compressed import CompressedKV, CompressedShape, Part, ReconstructionError, checked
from kvfast.compression.methods import METHODS, Hybrid, LowRank, Quantize, VectorQuantization, check_bits
from kvfast.compression.product import ProductStore
from kvfast.compression.stores import HYBRID_FORMATS, CacheStore, RankStore
from kvfast.core.limits import MAX_FLOAT16, MAX_HEAD_DIM
from kvfast.core.text import shown
from kvfast.errors import DimensionMismatchError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

FIRST_TOKENS = 4
FAR = 2.0  # times the distance of the median token from the mean of the head
SMALL = 0.5  # times the norm of the median token's value
MOST_EXACT = 64  # at most one token in this many is exact; for few tokens, the first ones come in addition


class KVCacheCompressor:
    """Compresses keys and values that no longer change, such as a prompt that is archived, sent, or kept small.

    Parameters
    ----------
    method : LowRank, VectorQuantization, Hybrid or Quantize
    quant_bits : {8, 4}
        Bits for a `Hybrid` or `Quantize` without bits of its own.

    Notes
    -----
    `Hybrid` and `VectorQuantization` store some tokens exactly, in float16 (or float32 if a number exceeds its range):

    - the first 4 tokens;
    - tokens whose value, in any head, has less than half the norm of the median token's value. Attention sinks have such
      values: tokens that receive attention when nothing else is relevant;
    - tokens whose keys or values are, in any head, more than twice as far from the head's mean as the median token's.

    The tokens farthest beyond these bounds come first, at most one token in 64. For few tokens the limit is the first
    4, but no more than one in 16, and one or two others.

    Keys may be given before or after rotary embedding; attention uses them as they were given. Keys without rotary
    embedding need fewer directions (Palu, arXiv 2407.21118).

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 8, 1024, 64), np.float32)
    >>> compressor = kvfast.KVCacheCompressor(kvfast.VectorQuantization(codebook_size=16, num_subvectors=32))
    >>> compressed = compressor.compress_kv_3d(k, v)
    >>> compressed.attend(np.ones((1, 32, 64), np.float32)).shape
    (1, 32, 64)
    >>> keys, values = compressor.decompress_kv_3d(compressed)
    >>> keys.shape
    (8, 1024, 64)
    """

    def __init__(self, method: Any, quant_bits: int = 8) -> None:
        if type(method) not in METHODS.values():
            raise TypeError(f"method must be one of {', '.join(METHODS)}, got {shown(method)}")
        if quant_bits is None:
            raise ValueError("bits must be 8 or 4, got None")
        self._method, self._quant_bits = method, check_bits(quant_bits)

    @property
    def method(self) -> Any:
        return self._method

    @property
    def quant_bits(self) -> int:
        return self._quant_bits

    def compress_kv(self, k: ArrayLike, v: ArrayLike) -> CompressedKV:
        """Compress a batch of sequences, each independently.

        Parameters
        ----------
        k, v : arrays of shape (batch, num_heads, seq_len, head_dim), float32, float16 or bfloat16

        Raises
        ------
        ValueError
            For a rank above head_dim, and for codebooks with more centroids than there are tokens.
        """
        k, v = self._checked(k, v, 4, "(batch, num_heads, seq_len, head_dim)")
        return self._compress(k, v, len(k))

    def compress_kv_3d(self, k: ArrayLike, v: ArrayLike) -> CompressedKV:
        """As `compress_kv`, for one sequence: arrays of shape (num_heads, seq_len, head_dim)."""
        k, v = self._checked(k, v, 3, "(num_heads, seq_len, head_dim)")
        return self._compress(k[None], v[None], None)

    def decompress_kv(self, compressed: CompressedKV) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Decode the result of `compress_kv`, for any method: keys and values, float32 with its shape.

        A DimensionMismatchError if `compressed` has no batch.
        """
        if not _layout_of(compressed).is_batched:
            shape = compressed.layout.shape
            raise DimensionMismatchError(f"this was compressed without a batch, as {shape}: use decompress_kv_3d")
        return compressed.decode()

    def decompress_kv_3d(self, compressed: CompressedKV) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Decode the result of `compress_kv_3d`: keys and values, ndarrays of shape (num_heads, seq_len, head_dim), float32."""
        if _layout_of(compressed).is_batched:
            raise DimensionMismatchError(f"this was compressed as a batch, {compressed.layout.shape}: use decompress_kv")
        return compressed.decode()

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
        k, v = rows_of(cache, layer)
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
        check_kind(cache)
        k, v = (np.ascontiguousarray(one.swapaxes(0, 1)) for one in self.decompress_kv_3d(compressed))
        append_rows(cache, layer, k, v)

    def _checked(self, k, v, rank, shape):
        k, v = checked(k, "k", rank, shape), checked(v, "v", rank, shape)
        if k.shape != v.shape:
            raise DimensionMismatchError(f"k and v must have the same shape, got {k.shape} and {v.shape}")
        seq_len, head_dim = k.shape[-2:]
        if head_dim > MAX_HEAD_DIM:
            raise DimensionMismatchError(f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")
        rank = getattr(self._method, "rank", None)
        if rank is not None and rank > head_dim:
            raise ValueError(f"rank must be at most head_dim, {head_dim}, got {rank}")
        if isinstance(self._method, VectorQuantization):
            if self._method.codebook_size > seq_len - _room(seq_len):
                raise ValueError(
                    f"codebook_size must be at most the number of tokens ({_room(seq_len)} of {seq_len} may be stored "
                    f"exactly), got {self._method.codebook_size}"
                )
            if (self._method.num_subvectors or 1) > head_dim:
                raise ValueError(f"num_subvectors must be at most head_dim, {head_dim}, got {self._method.num_subvectors}")
        return k, v

    def _compress(self, k, v, batch):
        method = self._method
        if isinstance(method, Hybrid):
            method = replace(method, rank=method.rank or k.shape[3], quant_bits=method.quant_bits or self._quant_bits)
        elif isinstance(method, Quantize):
            method = replace(method, bits=method.bits or self._quant_bits)
        elif isinstance(method, VectorQuantization) and method.num_subvectors is None:
            method = replace(method, num_subvectors=max(1, k.shape[3] // 4))
        parts = [_part(method, *pair) for pair in zip(k, v)]
        squares = np.zeros((2, 2))  # for keys and for values: squares of the errors, and of the given numbers
        for part, *pair in zip(parts, k, v):
            for sums, given, decoded in zip(squares, pair, part.decode()):
                sums += square_sum(decoded - given), square_sum(given)
        error = ReconstructionError(*(float(np.sqrt(wrong / all_)) if all_ else 0.0 for wrong, all_ in squares))
        return CompressedKV(CompressedShape(*k.shape[1:], batch), method, parts, error)

    def __repr__(self) -> str:
        return f"KVCacheCompressor({self._method}, quant_bits={self._quant_bits})"


def _part(method, k, v):
    """The `Part` of one sequence. k, v: (heads, tokens, dim), float32."""
    positions, exact = np.empty(0, np.int64), None
    if isinstance(method, Quantize):
        bits = method.bits
        return Part(CacheStore.of(k, v, PRESETS[f"int{bits}"] if isinstance(bits, int) else bits), positions, exact)
    if isinstance(method, LowRank):
        ranks = [method.rank] * len(k) if method.rank else RankStore.ranks_of_energy(k, v, method.energy)
        return Part(RankStore.of(k, v, ranks, False, method.dtype), positions, exact)
    positions = outliers(k, v)
    if len(positions):
        kept = k[:, positions], v[:, positions]
        exact = CacheStore.of(*kept, "float16" if max(abs(one).max() for one in kept) <= MAX_FLOAT16 else "float32")
        k, v = (np.delete(one, positions, axis=1) for one in (k, v))
    if isinstance(method, Hybrid):
        store = RankStore.of(k, v, [method.rank] * len(k), True, HYBRID_FORMATS[method.quant_bits])
    else:
        store = ProductStore.of(k, v, method)
    return Part(store, positions, exact)


def outliers(k, v):
    """Positions of the tokens that are stored exactly, ascending; see `KVCacheCompressor`."""
    tokens = k.shape[1]
    room = _room(tokens)
    k, v = k.astype(np.float64), v.astype(np.float64)
    norms = np.linalg.norm(v, axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        beyond = np.fmax.reduce(SMALL * np.median(norms, axis=1, keepdims=True) / norms, axis=0)
        for x in (k, v):
            distances = np.linalg.norm(x - x.mean(axis=1, keepdims=True), axis=2)
            ratios = distances / (FAR * np.median(distances, axis=1, keepdims=True))
            beyond = np.fmax(beyond, np.fmax.reduce(ratios, axis=0))
    beyond[: min(FIRST_TOKENS, room)] = np.inf
    farthest = np.argsort(-np.nan_to_num(beyond, nan=0.0, posinf=np.inf), kind="stable")[:room]
    return np.sort(farthest[beyond[farthest] > 1])


def _room(tokens):
    """Largest number of tokens that are stored exactly."""
    first = min(FIRST_TOKENS, tokens // 16)
    return max(tokens // MOST_EXACT, first + min(tokens // MOST_EXACT, -(-tokens // (4 * MOST_EXACT))))


def square_sum(x):
    """Sum of squares of an array of three dimensions, in float64."""
    return float(np.einsum("htd,htd->", x, x, dtype=np.float64))


def _layout_of(compressed):
    if not isinstance(compressed, CompressedKV):
        raise TypeError(f"compressed must be a CompressedKV, got {type(compressed).__name__}")
    return compressed.layout
