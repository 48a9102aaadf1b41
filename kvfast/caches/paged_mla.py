"""Latent rows of many sequences in one pool of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfast.caches.mla import MLAKVCache, check_indexer
from kvfast.caches.paged_sequence import Sequence
from kvfast.caches.pool import Pool
from kvfast.storage.settings import latent as latent_settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray


class MLASequence(Sequence, MLAKVCache):
    """One sequence of a `PagedMLAKVCache`; made by its `new_sequence`, `match_prefix`, or by `fork`.

    Has the methods of `MLAKVCache`, and those of a `Sequence`.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> pool = kvfast.PagedMLAKVCache(1, 512, 64, num_blocks=8)
    >>> with pool.new_sequence() as sequence:
    ...     sequence.append(0, np.ones((40, 576), np.float32))
    ...     sequence.advance(40)
    ...     sequence.attend(0, np.ones((1, 128, 576), np.float32)).shape
    (1, 128, 512)
    """

    __slots__ = ()


class PagedMLAKVCache(Pool):
    """Cache of latent rows of many sequences in one pool of blocks: rows as in `MLAKVCache`, a pool as in `PagedKVCache`.

    Parameters
    ----------
    num_layers, latent_dim, rope_dim : int
        As in `MLAKVCache`.
    dtype, secure
        As in `MLAKVCache`.
    num_blocks, block_size, buffer, max_state_bytes
        As in `PagedKVCache`; the size of a `buffer` is that of `buffer_layout` with `rope_dim`.

    Notes
    -----
    Sequences, forks, known prefixes and the tables of another scheduler work as in `PagedKVCache`. A snapshot of a sequence
    can be restored into an `MLAKVCache`, and the reverse.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> pool = kvfast.PagedMLAKVCache(num_layers=1, latent_dim=512, rope_dim=64, num_blocks=64)
    >>> a, b = pool.new_sequence(), pool.new_sequence()
    >>> pool.append_batch(0, np.ones((5, 576), np.float32), pool.slot_mapping([a, b], [3, 2]))
    >>> pool.attend_batch(0, np.ones((2, 128, 576), np.float32), [a, b], scale=192**-0.5).shape
    (2, 128, 512)
    """

    _sequence = MLASequence

    def __init__(
        self,
        num_layers: int,
        latent_dim: int,
        rope_dim: int,
        num_blocks: int,
        block_size: int | None = None,
        dtype: Any = "int8",
        secure: bool = False,
        buffer: Any = None,
        max_state_bytes: int | None = None,
    ) -> None:
        settings = latent_settings(num_layers, latent_dim, rope_dim, dtype)
        super().__init__(settings, num_blocks, block_size, secure, buffer, max_state_bytes)

    @property
    def latent_dim(self) -> int:
        return self._storage.head_dim

    @property
    def rope_dim(self) -> int:
        return self._storage.rope_dim

    def append_batch(self, layer: int, latent: ArrayLike, slot_mapping: ArrayLike, *, zero_nonfinite: bool = False) -> None:
        """Store rows of several sequences: `latent` as in `MLAKVCache.append`, all others as in `PagedKVCache.append_batch`."""
        self._batches.append_batch(layer, latent, None, slot_mapping, zero_nonfinite)

    def top_k_batch(
        self,
        layer: int,
        q: ArrayLike,
        weights: ArrayLike,
        k: int,
        sequences: Any = None,
        *,
        block_table: ArrayLike | None = None,
        seq_lens: ArrayLike | None = None,
        cu_seqlens_q: ArrayLike | None = None,
        num_threads: int | None = None,
    ) -> NDArray[np.int64]:
        """The best positions of an indexer in each sequence of a ragged batch, for the `indices` of `attend_batch`.

        Parameters
        ----------
        layer, weights, k, num_threads
            As in `MLAKVCache.top_k`.
        q : array of shape (num_tokens, num_heads, latent_dim), float32, float16 or bfloat16
            Queries of the indexer for the last tokens of each sequence, sequence after sequence.
        sequences, block_table, seq_lens, cu_seqlens_q
            As in `attend_batch`.

        Returns
        -------
        ndarray of shape (num_tokens, k), int64
            As of `MLAKVCache.top_k` for each sequence alone: positions within the sequence.
        """
        check_indexer(self.rope_dim)
        return self._batches.top_k_batch(
            layer, q, weights, k, *self._batch(sequences, block_table, seq_lens, cu_seqlens_q), num_threads
        )
