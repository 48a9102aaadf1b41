"""A compressed prefix, and live tokens after it."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvfast.attention.dense import merge_states
from kvfast.caches.contiguous import KVCache
from kvfast.caches.mla import MLAKVCache
from kvfast.caches.paged_sequence import Sequence
from kvfast.caches.sequence_cache import storage_in
from kvfast.compression.compressed import CompressedKV, check_out
from kvfast.compression.compressor import KVCacheCompressor
from kvfast.core.checks import check_flag, check_size, checked_list
from kvfast.core.interchange import as_array
from kvfast.core.limits import MAX_TOKENS
from kvfast.core.text import size_text
from kvfast.errors import DimensionMismatchError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self


class PrefixKVCache:
    """Key/value cache of one sequence with a compressed prefix; later tokens are stored in blocks as in a `KVCache`.

    Attention to the two parts is merged by their log-sum-exps.

    Parameters
    ----------
    layers : list of CompressedKV
        The prefix of each layer. All have the same shape, without a batch.
    max_seq_len : int, optional
        Largest number of tokens, including the prefix; without it the cache grows.
    dtype, k_dtype, v_dtype
        Storage of the live tokens, as in `KVCache`.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> cache = kvfast.KVCache(num_layers=1, num_kv_heads=2, head_dim=64)
    >>> k = v = np.random.default_rng(0).standard_normal((500, 2, 64), np.float32)
    >>> cache.append(0, k, v)
    >>> cache.advance(500)
    >>> small = kvfast.PrefixKVCache.compress(cache, kvfast.KVCacheCompressor(kvfast.Hybrid(quant_bits=4)))
    >>> small.append(0, k[:1], v[:1])
    >>> small.attend(0, np.ones((1, 8, 64), np.float32)).shape
    (1, 8, 64)
    >>> small.advance()
    >>> len(small)
    501
    """

    def __init__(
        self, layers: Any, max_seq_len: int | None = None, dtype: Any = "int4", k_dtype: Any = None, v_dtype: Any = None
    ) -> None:
        layers = checked_list(layers, "layers", "CompressedKV, one for each layer")
        if not layers or not all(isinstance(one, CompressedKV) for one in layers):
            raise TypeError("layers must be a list with a CompressedKV for each layer")
        layout = layers[0].layout
        for one in layers:
            if one.layout.is_batched or one.layout != layout:
                raise DimensionMismatchError(
                    f"the layers must have the same shape, without a batch, got {layout.shape} and {one.layout.shape}"
                )
        if max_seq_len is not None:
            max_seq_len = check_size(max_seq_len, "max_seq_len", layout.seq_len + 1, MAX_TOKENS) - layout.seq_len
        self._layers, self._layout = layers, layout
        self._live = KVCache(len(layers), layout.num_heads, layout.head_dim, max_seq_len, dtype, k_dtype, v_dtype)

    @classmethod
    def compress(
        cls,
        cache: Any,
        compressor: Any,
        max_seq_len: int | None = None,
        dtype: Any = "int4",
        k_dtype: Any = None,
        v_dtype: Any = None,
        *,
        uncounted: Literal["raise", "drop"] = "raise",
    ) -> Self:
        """Make a cache whose prefix is the complete tokens of a `KVCache` or `Sequence`, which stays as it is.

        Parameters
        ----------
        cache : KVCache or Sequence
        compressor : KVCacheCompressor
        max_seq_len, dtype, k_dtype, v_dtype
            As in `PrefixKVCache`.
        uncounted
            As in `KVCache.snapshot`.

        Raises
        ------
        ValueError
            If the cache is empty or layers hold tokens that were never counted, or where `KVCacheCompressor.compress_kv` raises it.
        """
        if not isinstance(cache, (KVCache, Sequence)) or isinstance(cache, MLAKVCache):  # as a sequence of latent rows is
            raise TypeError(f"cache must be a KVCache or a Sequence, got {type(cache).__name__}")
        if not isinstance(compressor, KVCacheCompressor):
            raise TypeError(f"compressor must be a KVCacheCompressor, got {type(compressor).__name__}")
        storage_in(cache).check_counted(uncounted)
        n, layers = len(cache), []
        if not n:
            raise ValueError("the cache is empty: there is nothing to compress")
        for layer in range(cache.num_layers):
            k, v = cache.k(layer)[:n], cache.v(layer)[:n]
            if len(k) != n:
                raise ValueError(
                    "the cache must hold all of its tokens, got one that has dropped some: tokens after a prefix need their positions in it"
                )
            layers.append(compressor.compress_kv_3d(k.swapaxes(0, 1), v.swapaxes(0, 1)))
        return cls(layers, max_seq_len, dtype, k_dtype, v_dtype)

    def copy(self) -> Self:
        """An independent deep copy, for example for another thread."""
        return deepcopy(self)

    __copy__ = copy

    def append(self, layer: int, k: ArrayLike, v: ArrayLike) -> None:
        """Store the keys and values of one or more tokens; see `KVCache.append`."""
        self._live.append(layer, k, v)

    def write(
        self, layer: int, qkv: ArrayLike, *, positions: ArrayLike | None = None, cos: ArrayLike | None = None, **options: Any
    ) -> NDArray[Any]:
        """See `KVCache.write`; by default positions continue after the prefix."""
        if positions is None and cos is not None:
            start, shape = self.layer_length(layer), as_array(qkv, "qkv").shape
            positions = np.arange(start, start + (shape[0] if shape else 1))
        return self._live.write(layer, qkv, positions=positions, cos=cos, **options)

    def attend(
        self,
        layer: int,
        q: ArrayLike,
        *,
        out: NDArray[Any] | None = None,
        scale: float | None = None,
        causal: bool = True,
        return_lse: bool = False,
        num_threads: int | None = None,
    ) -> Any:
        """Attention of the last tokens, which must be live, to the prefix and to the live tokens; see `KVCache.attend`."""
        check_flag(return_lse, "return_lse")
        if out is not None:
            check_out(out, as_array(q, "q").shape)
        options = {"scale": scale, "num_threads": num_threads, "return_lse": True}
        live = self._live.attend(layer, q, causal=causal, **options)
        result, lse = merge_states(*self._layers[layer].attend(q, causal=False, **options), *live)
        if out is not None:
            out[...] = result
            result = out
        return (result, lse) if return_lse else result

    def advance(self, n: int = 1) -> None:
        """Count `n` tokens as complete; every layer must hold exactly `n` new tokens."""
        self._live.advance(n)

    def k(self, layer: int) -> NDArray[np.float32]:
        """Keys of a layer, decoded: float32 of shape (layer_length(layer), num_kv_heads, head_dim)."""
        live = self._live.k(layer)
        return np.concatenate([self._layers[layer].decode()[0].swapaxes(0, 1), live])

    def v(self, layer: int) -> NDArray[np.float32]:
        """Values of a layer; see `k`."""
        live = self._live.v(layer)
        return np.concatenate([self._layers[layer].decode()[1].swapaxes(0, 1), live])

    def layer_length(self, layer: int) -> int:
        """Tokens that a layer holds, advanced or not."""
        return self.prefix_len + self._live.layer_length(layer)

    def truncate(self, n: int) -> None:
        """Keep the first `n` complete tokens; `n` must include the prefix."""
        check_size(n, "n", self.prefix_len)
        self._live.truncate(n - self.prefix_len)

    def clear(self) -> None:
        """Drop all live tokens."""
        self._live.clear()

    def __len__(self) -> int:
        return self.prefix_len + len(self._live)

    @property
    def prefix_len(self) -> int:
        """Tokens of the prefix."""
        return self._layout.seq_len

    @property
    def prefix(self) -> Any:
        """The `CompressedKV` of each layer."""
        return tuple(self._layers)

    @property
    def live(self) -> Any:
        """The `KVCache` of the live tokens."""
        return self._live

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_kv_heads(self) -> int:
        return self._layout.num_heads

    @property
    def head_dim(self) -> int:
        return self._layout.head_dim

    @property
    def max_seq_len(self) -> int | None:
        """Largest number of tokens, or None for a cache that grows."""
        return None if self._live.max_seq_len is None else self.prefix_len + self._live.max_seq_len

    @property
    def nbytes(self) -> int:
        """Bytes of the prefix, and those reserved for live tokens."""
        return sum(one.nbytes for one in self._layers) + self._live.nbytes

    @property
    def nbytes_used(self) -> int:
        """Bytes of the prefix, and of the blocks that hold live tokens."""
        return sum(one.nbytes for one in self._layers) + self._live.nbytes_used

    def __repr__(self) -> str:
        shape = f"{self.num_layers} layers x {self.num_kv_heads} heads x {self.head_dim}"
        tokens = f"{self.prefix_len} tokens compressed and {len(self._live)} in {self._live.dtype_name}"
        return f"PrefixKVCache({shape}, {tokens}, {size_text(self.nbytes)})"
