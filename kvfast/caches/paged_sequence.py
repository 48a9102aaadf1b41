"""One sequence of a paged cache."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfast.caches.sequence_cache import SequenceCache
from kvfast.caches.splicing import Splicing
from kvfast.caches.states import States
from kvfast.caches.storage_properties import StorageProperties
from kvfast.caches.stored_sequence import StoredSequence
from kvfast.core.checks import check_size, checked_token_ids
from kvfast.storage.sequences.sequence import SequenceStorage
from kvfast.storage.sequences.sequence import advance_all as advance_storages

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

__all__ = ["Sequence"]


def advance_all(sequences: list[PagedSequence], counts: list[int], token_ids: NDArray[np.int64] | None) -> None:
    """`advance` of some sequences of a pool: of all of them or of none. `token_ids`: those of all, sequence after sequence."""
    parts = [None] * len(sequences) if token_ids is None else np.split(token_ids, np.cumsum(counts)[:-1])
    begins = [partial(one._take_ids, token_ids=part) for one, part in zip(sequences, parts, strict=True)]
    advance_storages([one._storage for one in sequences], counts, begins)


class PagedSequence:
    """What a sequence with blocks from a pool does otherwise than `StoredSequence`, for any kind of contents."""

    __slots__ = ()

    # The slots of each class of sequences: Python lets one base alone have slots of its own.
    _slots = ("_digests", "_own_salt", "_pool", "_salt", "_table", "_token_ids", "num_cached_tokens")

    is_paged = True

    def __init__(self, pool: Any, token_ids: Any = (), digests: Any = (), salt: bytes = b"") -> None:
        """`digests`: of the full blocks of `token_ids`. The sequence starts with those of them that the pool has."""
        # Only a pool makes sequences of its class; any other argument is refused here.
        if getattr(type(pool), "_sequence", None) is not type(self):
            raise TypeError(f"a {type(self).__name__} is made by its pool: see new_sequence(), match_prefix() and fork()")
        self._pool, self._settings, self._table = pool, pool._settings, pool._batches.new_table()
        # If a later step fails, this storage releases the blocks that the table holds by then.
        layers = [(self._table, layer) for layer in range(pool.num_layers)]
        states, precision, known = pool._no_checkpoints, pool._batches.precision, pool._known_states
        self._storage = SequenceStorage([self._table], layers, None, states, precision)
        if known is not None:
            digests = digests[: known.last(digests)[0]]
        pool._batches.start(self._table, digests)
        found = self._table.length
        # None after tokens came without ids: later blocks cannot be indexed by their tokens.
        self._token_ids = np.asarray(token_ids[:found], np.int64).tolist()
        self._digests = list(digests[: found // pool.block_size])
        # Without a salt of its own, that of its tokens may be another: they may come from a tenant's snapshot or store.
        self._salt = self._own_salt = salt
        if known is not None and found:
            count, checkpoint = known.last(self._digests)
            self._storage.checkpoints = self._storage.checkpoints.plus(found := count * pool.block_size, checkpoint)
            self.truncate(found)
        self.num_cached_tokens = found  # tokens that match_prefix found

    @property
    def pool(self) -> Any:
        """The cache that holds the blocks."""
        return self._pool

    def advance(self, n: int = 1, token_ids: ArrayLike | None = None) -> None:
        """Count `n` tokens as complete; every layer must hold exactly that many new ones.

        Parameters
        ----------
        n : int
        token_ids : integers of shape (n,), optional
            The token ids. `PagedKVCache.match_prefix` can then find the blocks that these tokens fill. After tokens
            without ids, later blocks of the sequence cannot be found.

        Raises
        ------
        ValueError
            If layers hold more or fewer (the message names them), or if `token_ids` are not `n` integers.
        """
        if token_ids is not None:
            token_ids = checked_token_ids(token_ids, check_size(n, "n", 1))
        self._storage.advance(n, lambda before: self._take_ids(before, token_ids))

    def _take_ids(self, before, token_ids):
        """Keep the ids of the tokens after the first `before`, while no other thread is in the pool.

        An interrupted call may have left more or fewer ids than tokens; all ids are then dropped. They are also dropped if
        memory runs out. Without ids, the blocks only cannot be found.
        """
        if token_ids is None or self._token_ids is None or len(self._token_ids) != before:
            self._token_ids = None
            return
        try:
            del self._digests[before // self._pool.block_size :]
            self._token_ids.extend(token_ids.tolist())
            self._make_known()
        except MemoryError:
            self._token_ids = None

    def _make_known(self):
        """Let `match_prefix` find the blocks that have filled up since the last call."""
        index, size, first = self._pool._batches.index, self._pool.block_size, len(self._digests)
        if len(self._token_ids) // size > first:
            self._digests = index.digests(self._token_ids, size, self._salt, self._digests)
            for i in range(first, len(self._digests)):
                block = self._table.knowable_block(i)
                if block >= 0:
                    index.add(self._digests[i], block)

    def _know_states(self):
        self._make_states_known([len(self)])

    def _make_states_known(self, positions):
        """Let `match_prefix` find checkpoints that are at ends of blocks."""
        size = self._pool.block_size
        if self._token_ids is not None and len(self._token_ids) == len(self):
            for n in positions:
                if n % size == 0:
                    self._pool._known_states.add(self._digests[n // size - 1], self._storage.checkpoints.held[n])

    def _cut_ids(self, n):
        if self._token_ids is not None:
            del self._digests[n // self._pool.block_size :]  # first, so that no digest is wrong if the next line fails
            del self._token_ids[n:]
        if n == 0:
            self._token_ids, self._digests, self._salt = [], [], self._own_salt

    def _move_ids(self, first, positions):
        """Let the ids at some positions follow on the `first` ones. All later ids are dropped."""
        if self._token_ids is not None:
            moved = [self._token_ids[position] for position in positions]
            del self._digests[first // self._pool.block_size :]
            self._token_ids[first:] = moved
        if first == 0 and not positions:
            self._cut_ids(0)

    def clear(self) -> None:
        """Drop all tokens and release their blocks."""
        self.truncate(0)

    def fork(self) -> Self:
        """Another sequence with the same tokens, counted or not. No block is copied until one of the two writes to it.

        Returns
        -------
        Sequence or MLASequence
        """
        self._check_open()
        other = type(self)(self._pool)
        self._pool._batches.fork(self._table, other._table, lambda: other._know_as(self))
        return other

    def _know_as(self, other):
        self._storage.precision = other._storage.precision
        self._token_ids = None if other._token_ids is None else other._token_ids.copy()
        self._digests, self.num_cached_tokens = other._digests.copy(), other.num_cached_tokens
        self._salt, self._own_salt = other._salt, other._own_salt
        self._storage.take_segments(other._storage)
        self._storage.checkpoints = other._storage.checkpoints

    copy = fork
    __copy__ = fork

    def _ids_and_salt(self, token_ids):
        if token_ids is None and self._token_ids is not None and len(self._token_ids) == len(self):
            token_ids = np.array(self._token_ids, np.int64)
        return token_ids, self._salt

    def _forget_ids(self):
        self._token_ids = None

    def _know_tokens(self, token_ids, salt):
        self._storage.alone(lambda: self._set_ids(token_ids, salt))

    def _set_ids(self, token_ids, salt):
        """Replace the ids of all tokens, while no other thread is in the pool. None: they are not known.

        `salt` is that of who had the tokens before, for a sequence without its own. If that is None, nobody finds them.
        """
        self._token_ids, self._digests, self._salt = [] if len(self) == 0 else None, [], self._own_salt
        if len(self):
            self._salt = self._own_salt or salt
        try:
            if (
                token_ids is not None and self._salt is not None and not self._storage.is_spliced
            ):  # whose blocks do not follow from the tokens before them
                self._token_ids = token_ids.tolist()
                self._make_known()
                self._make_states_known(self.checkpoints)
        except MemoryError:
            self._token_ids = None

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
            self._pool._save_freed(self, self._token_ids, self._salt)
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


class Sequence(PagedSequence, SequenceCache, Splicing, States, StoredSequence, StorageProperties):
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

    __slots__ = PagedSequence._slots

    def positions(self, layer: int = 0) -> NDArray[np.int64]:
        """Positions of the visible tokens of a layer, in the order of `k` and `v`.

        Returns
        -------
        ndarray of shape (num_tokens,), int64
            All positions. In a pool with a window: the sinks, then the window, as in `RingKVCache.positions`.
        """
        return self._storage.positions(layer)

    @property
    def rollback(self) -> int | None:
        """Number of tokens that `truncate` can go back from the longest the sequence has been; None for any number."""
        return self._pool.rollback
