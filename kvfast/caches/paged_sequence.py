"""One sequence of a paged cache."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfast.caches.sequence_cache import SequenceCache
from kvfast.caches.token_ids import TokenIds
from kvfast.core.checks import check_size, checked_token_ids
from kvfast.core.text import shown
from kvfast.storage.sequences.sequence import SequenceStorage
from kvfast.storage.sequences.sequence import advance_all as advance_storages

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self


def advance_all(sequences: list[Sequence], counts: list[int], token_ids: NDArray[np.int64] | None) -> None:
    """`advance` of some sequences of a pool: of all of them or of none. `token_ids`: those of all, sequence after sequence."""
    parts = [None] * len(sequences) if token_ids is None else np.split(token_ids, np.cumsum(counts)[:-1])
    begins = [partial(one._ids.add, token_ids=part) for one, part in zip(sequences, parts, strict=True)]
    advance_storages([one._storage for one in sequences], counts, begins)


class Sequence(SequenceCache):
    """One sequence of a `PagedKVCache`; made by its `new_sequence`, `match_prefix`, or by `fork`.

    Has the methods of `KVCache`. Use it in a ``with`` statement or call `free` to release its blocks. Otherwise they are
    released when Python collects the sequence.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=8)
    >>> with pool.new_sequence() as sequence:
    ...     k = v = np.ones((40, 2, 64), np.float32)
    ...     sequence.append(0, k, v)
    ...     sequence.advance(40)
    ...     pool.num_free_blocks
    7
    >>> pool.num_free_blocks
    8
    """

    __slots__ = ("_pool", "_table", "num_cached_tokens")

    is_paged = True

    def __init__(self, pool: Any, token_ids: Any = (), digests: Any = (), salt: bytes = b"") -> None:
        """`digests`: of the full blocks of `token_ids`. The sequence starts with those of them that the pool has."""
        # Only a pool makes sequences of its class; any other argument is refused here.
        if getattr(type(pool), "_sequence", None) is not type(self):
            raise TypeError(f"a {type(self).__name__} is made by its pool: see new_sequence(), match_prefix() and fork()")
        if not isinstance(digests, (list, tuple)):
            raise TypeError(f"digests must be a list with one for each full block of token_ids, got {shown(digests)}")
        self._pool, self._table, known = pool, pool._batches.new_table(), pool._known_states
        # If a later step fails, this storage releases the blocks that the table holds by then.
        layers = [(self._table, layer) for layer in range(pool.num_layers)]
        storage = SequenceStorage([self._table], layers, None, pool._no_checkpoints, pool._batches.precision)
        self._open(pool._settings, storage, TokenIds(storage, pool._batches.index, known, salt))
        if known is not None:
            digests = digests[: known.last(digests)[0]]
        pool._batches.start(self._table, digests)
        found = self._table.length
        if found:
            digests = digests[: found // pool.block_size]
            self._ids.begin(token_ids[:found], digests)
            if known is not None:
                count, checkpoint = known.last(digests)
                storage.checkpoints = storage.checkpoints.plus(found := count * pool.block_size, checkpoint)
                self.truncate(found)
        self.num_cached_tokens = found  # tokens that match_prefix found

    @property
    def pool(self) -> Any:
        """The cache that holds the blocks."""
        return self._pool

    def advance(self, n: int = 1, token_ids: ArrayLike | None = None) -> None:
        """Count `n` tokens as complete, as `KVCache.advance`.

        Parameters
        ----------
        n : int
        token_ids : integers of shape (n,), optional
            The token ids. `PagedKVCache.match_prefix` can then find the blocks that these tokens fill. After tokens
            without ids, later blocks of the sequence cannot be found.
        """
        if token_ids is not None:
            token_ids = checked_token_ids(token_ids, check_size(n, "n", 1))
        self._storage.advance(n, lambda before: self._ids.add(before, token_ids))

    def fork(self) -> Self:
        """Another sequence with the same tokens, counted or not. No block is copied until one of the two writes to it."""
        self._check_open()
        other = type(self)(self._pool)
        self._pool._batches.fork(self._table, other._table, lambda: other._know_as(self))
        return other

    def _know_as(self, other):
        self._storage.precision = other._storage.precision
        self._ids.copy_from(other._ids)
        self.num_cached_tokens = other.num_cached_tokens
        self._storage.take_segments(other._storage)
        self._storage.checkpoints = other._storage.checkpoints

    copy = fork
    __copy__ = fork

    def can_append(self, n: int) -> bool:
        """Whether the pool has enough blocks for `n` more tokens, all of them appended before the next `advance`.

        `advance` returns the blocks that have left a window to the pool, so a sequence with a window needs fewer blocks if
        the tokens come in several steps.
        """
        self._check_open()
        return self._pool._batches.blocks_needed([self._table], [check_size(n, "n", 0)]) <= self._pool.num_free_blocks

    def free(self) -> None:
        """Release all blocks. The sequence cannot be used afterwards; freeing it twice is harmless."""
        if self._storage.closed:
            return
        try:
            self._pool._save_freed(self, self._ids.ids, self._ids.salt)
        finally:
            self._pool._batches.free(self._table)
            self._storage.forget_segments()
            self._storage.checkpoints = None

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.free()

    def _check_open(self):
        if self._storage.closed:
            raise ValueError("this sequence has been freed")

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks of this sequence, shared blocks included."""
        return self.nbytes_used

    def __repr__(self) -> str:
        state = "freed" if self._storage.closed else f"{self._tokens_text()} in {len(self.block_indices())} blocks"
        return f"{type(self).__name__}({self._shape()}, {state})"
