"""Caches that are put together from parts, which were computed apart, or cut in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfast.caches.snapshot import Snapshot
from kvfast.codec.rope import Rope, frequencies_of
from kvfast.core.checks import check_size
from kvfast.core.limits import MAX_TOKENS
from kvfast.core.text import shown
from kvfast.storage.sequences.splicing import check_splice, drop, splice

if TYPE_CHECKING:
    from collections.abc import Sequence


class Splicing:
    """Methods that move tokens to other positions without computing their keys again."""

    __slots__ = ()

    def splice(self, *parts: Any, rope: Rope | None | Sequence[Rope | None], recomputed: int = 0) -> None:
        """Append parts that were computed apart, one after another, to the tokens of this cache.

        Each part was computed from position 0, by itself. Its keys stay as they are stored, and `attend` rotates the
        queries back by the distance that the part was moved: rotary scores depend on distances alone. Tokens of a part
        did not see the tokens that now precede the part, which changes a model's answers. Computing the part's first
        tokens again reduces the change.

        Parameters
        ----------
        *parts : Snapshot, KVCache or Sequence
            With the shape and formats of this cache. Their complete tokens are taken: shared if they are in the same pool, else
            copied.
        rope : Rope or None, or a list with one per layer
            The rotation that the model applies to keys and queries; None for layers without rotation (ALiBi, NoPE). All calls
            for a cache need the same `rope`.
        recomputed : int
            For a single part: number of its first tokens that were computed again, in their new place, as the last tokens of
            this cache. They replace the part's first tokens, and the rest of the part follows.

        Raises
        ------
        IncompatibleSnapshotError
            If a part has another shape or other formats.
        CacheFullError
            If the tokens do not fit `max_seq_len` or the blocks of the pool.
        ValueError
            For a ring or a pool with a window, if layers hold tokens that are not complete, for a rope that does not fit the heads
            or is not that of earlier calls, and for `recomputed` with several parts or more tokens than there are.
            The cache stays as it was.

        Notes
        -----
        Everything goes on as before: `append`, `attend` (positions are those in the whole cache), `truncate`, `snapshot`, `fork`.
        Only files, `state_dict` and prompt caches refuse a spliced cache. Each part has blocks of its own, so its last block may be
        partly empty. Another thread must not use a part's cache meanwhile.

        Examples
        --------
        >>> import kvfast, numpy as np
        >>> def computed(num_tokens):
        ...     cache = kvfast.KVCache(1, 2, 64)
        ...     cache.append(0, *np.ones((2, num_tokens, 2, 64), np.float32))
        ...     cache.advance(num_tokens)
        ...     return cache
        >>> documents = [computed(n).snapshot() for n in (100, 300)]
        >>> cache = computed(20)
        >>> cache.splice(*documents, rope=kvfast.Rope())
        >>> len(cache)
        420
        """
        recomputed = check_size(recomputed, "recomputed", 0, MAX_TOKENS)
        ropes = self._rotations(rope)
        snapshots = [self._checked_part(part) for part in parts]
        if recomputed and (len(snapshots) != 1 or recomputed > len(snapshots[0])):
            raise ValueError(
                f"recomputed needs one part of at least as many tokens, got {recomputed} with parts of "
                f"{shown([len(one) for one in snapshots])} tokens"
            )
        snapshots = [one for one in snapshots if len(one)]
        storages = [one._storage for one in snapshots]
        check_splice(self._storage, storages, ropes, recomputed)
        if len(self) == 0 and len(snapshots) == 1:
            self.restore(snapshots[0])
        elif snapshots:
            splice(self._storage, storages, ropes, recomputed, self._forget_ids)

    def drop(self, first: int, last: int, *, rope: Rope | None | Sequence[Rope | None]) -> None:
        """Take the tokens from position `first` to `last` out; later tokens move up (context shift).

        Later keys stay as they are stored, and `attend` rotates the queries instead. This works for every format, and any
        number of times. Blocks without tokens are given back, so that a conversation without end fits a cache of a fixed size.

        Parameters
        ----------
        first, last : int
            ``0 <= first <= last <= len(cache)``; the token at `last` stays.
        rope : Rope or None, or a list with one per layer
            As in `splice`.

        Raises
        ------
        ValueError, TypeError
            As in `splice`, and for positions out of range. The cache stays as it was.
        CacheFullError
            If a secure pool has no blocks for copies of those that are cut and shared with others.

        Notes
        -----
        Drop many tokens at a time: each call adds a segment, which attention reads apart from the others.

        Examples
        --------
        >>> import kvfast, numpy as np
        >>> cache = kvfast.KVCache(1, 2, 64, max_seq_len=512)
        >>> cache.append(0, *np.ones((2, 512, 2, 64), np.float32))
        >>> cache.advance(512)
        >>> cache.drop(16, 272, rope=kvfast.Rope())
        >>> len(cache)
        256
        """
        drop(self._storage, first, last, self._rotations(rope), self.truncate, self._forget_ids)

    @property
    def is_spliced(self) -> bool:
        """Whether the cache holds tokens that were moved by `splice` or `drop`."""
        return self._storage.is_spliced

    def _rotations(self, rope):
        """The rotation of each layer as `storage.splicing` takes it."""
        if self._settings.get("has_states"):
            raise ValueError("a cache with recurrent states cannot be spliced: they depend on every token before them")
        if self._settings.get("rope") is not None:
            raise ValueError("a ring with a rope cannot be spliced: it rotates queries and keys itself")
        ropes = list(rope) if isinstance(rope, (list, tuple)) else [rope] * self.num_layers
        if len(ropes) != self.num_layers:
            raise ValueError(f"rope must be one Rope or {self.num_layers}, one per layer, got {len(ropes)}")
        for one in ropes:
            if one is not None and not isinstance(one, Rope):
                raise TypeError(f"rope must be a Rope or None, got {type(one).__name__}")
        return tuple(
            None if one is None else (frequencies_of(one, self._head_dim(layer)), bool(one.interleaved))
            for layer, one in enumerate(ropes)
        )

    def _checked_part(self, part):
        """A part as a Snapshot that fits this cache, apart from its number of tokens."""
        if isinstance(part, Splicing):
            part = part.snapshot()
        if not isinstance(part, Snapshot):
            raise TypeError(f"splice needs snapshots and caches, got {type(part).__name__}")
        part._check_settings(self)
        return part

    def _forget_ids(self):
        """Forget the token ids, which only a sequence in one piece has; see `PagedSequence`."""
