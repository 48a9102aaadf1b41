"""Methods that all caches of one sequence share, for any kind of contents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn

from kvfast.caches.snapshot import Snapshot, checked_metadata
from kvfast.core.checks import checked_lengths, checked_path, checked_token_ids
from kvfast.core.kernels import default_precision
from kvfast.errors import IncompatibleSnapshotError
from kvfast.files.state import from_arrays
from kvfast.storage.kinds import decoded
from kvfast.storage.sequences.branches import keep_branch
from kvfast.storage.settings import NAMES

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

    from kvfast.codec.calibration import Calibration, LayerCalibration


def storage_in(cache):
    """The `SequenceStorage` of a cache or a snapshot, for packages above the caches."""
    return cache._storage


def settings_of(cache):
    """Kind, shape and formats of a cache, for the header of a file."""
    return cache._settings


def salt_of(cache):
    """The salt of a sequence's tokens, empty for other caches; None for a sequence from a file, which does not store the salt."""
    return cache._salt


def know_tokens(cache, token_ids, salt):
    """Let the pool of a sequence find its blocks by their token ids, under its salt, or without one, under `salt`. Does nothing for a
    cache without a pool."""
    cache._know_tokens(token_ids, salt)


class StoredSequence:
    """Lengths, going back, snapshots and files, over the compiled storage."""

    __slots__ = ("__weakref__", "_settings", "_storage")

    is_paged = False

    _salt: bytes | None = b""

    @property
    def precision(self) -> str:
        """The precision of calls that name none, ``"exact"`` or ``"fast"``; see [precision](../concepts/precision.md).

        Set it for all later calls; None returns to that of the process. It says how stored bytes are read, so files, snapshots and
        prompt stores know nothing of it. Forks and copies inherit it.
        """
        return self._storage.precision or default_precision()

    @precision.setter
    def precision(self, name: str | None) -> None:
        self._storage.precision = name

    @classmethod
    def _over(cls, settings, storage):
        """A cache over a storage with these settings."""
        cache = cls.__new__(cls)
        cache._open(settings, storage)
        return cache

    def _open(self, settings, storage):
        self._settings, self._storage = settings, storage

    def _decoded(self, layer):
        """The two sides of a layer's tokens, float32 of shape (tokens, heads, dim)."""
        return decoded(self._settings, self._storage, layer)

    # A sequence of a pool also keeps the ids of its tokens: these are called while no other thread is in the pool.
    _cut_ids = _move_ids = _forget_ids = _know_states = None
    _unmovable: str | None = None  # why rows cannot move

    def _ids_and_salt(self, token_ids):
        return token_ids, b""

    def _set_ids(self, token_ids, salt):
        pass

    def _know_tokens(self, token_ids, salt):
        pass

    def advance(self, n: int = 1) -> None:
        """Count `n` tokens as complete; every layer must hold exactly that many new ones.

        Raises
        ------
        ValueError
            If layers hold more or fewer; the message names them.
        """
        self._storage.advance(n)

    def layer_length(self, layer: int) -> int:
        """Tokens that a layer holds, advanced or not."""
        return self._storage.layer_length(layer)

    def truncate(self, n: int, keep: ArrayLike | None = None) -> None:
        """Keep the first `n` complete tokens. Tokens that were never counted with `advance` are dropped too.

        So ``truncate(len(cache))`` undoes a step that failed half way. The bytes of the kept tokens do not change.

        Parameters
        ----------
        n : int
        keep : integers of shape (num_kept,), optional
            Also keep these of the later tokens, whether they were counted or not: rising numbers, 0 for the token at position
            `n`, as in the `parents` of `attend`. They follow directly on the first `n` tokens, and no bit of them changes. So
            one call keeps the right branch of a tree of drafts. Call it before `advance`: tokens that were not counted before
            are not counted afterwards, either, and no block of them is sealed yet.

        Raises
        ------
        MissingCheckpointError
            If the cache is of a model with recurrent states, and there is no checkpoint after `n` tokens. The attribute `nearest` of the
            error is the last position before with one.
        ValueError
            For an `n` beyond the complete tokens, if a ring has dropped tokens that it would need, for numbers that do not rise, or
            beyond the tokens of a layer. Where tokens would have to move that cannot: into a sealed block, to the first tokens that a
            format keeps as floats, in a spliced cache, or in a ring with a `rope`. The message says what to do instead, and the cache
            stays as it was.
        CacheFullError
            If a pool has no block for a copy of one that others share.
        """
        if keep is None:
            self._storage.truncate(n, self._cut_ids)
        else:
            keep_branch(self._storage, n, keep, self._move_ids, self._unmovable)

    def add_checkpoint(self, states: Mapping[str, ArrayLike]) -> None:
        """Keep the recurrent states of a model after all complete tokens, for `truncate`, snapshots and files.

        Keys and values of a token can be dropped, a recurrent state cannot go back. So whoever computes gives the states at some
        positions: after each piece of a prompt, before tokens that may be rejected, at the end of an answer.

        Parameters
        ----------
        states : mapping of str to array
            The states of all layers, under names of your choice: any numbers and shapes, bfloat16 as that of ml_dtypes. Copied. All
            checkpoints of a cache have the same names, shapes and dtypes. States may be infinite; nothing looks at their values.

        Raises
        ------
        DimensionMismatchError
            If the names, shapes or dtypes are others than in the checkpoints before.
        TypeError
        ValueError
            If the cache was made without `max_state_bytes`, if one checkpoint needs more, if there are no tokens, or tokens that were
            never counted with `advance`.

        Examples
        --------
        >>> import kvfast, numpy as np
        >>> cache = kvfast.KVCache(1, 2, 64, max_state_bytes=1 << 20)
        >>> for state in range(3):
        ...     cache.append(0, *np.ones((2, 100, 2, 64), np.float32))
        ...     cache.advance(100)
        ...     cache.add_checkpoint({"recurrent": np.full((16, 64), state, np.float32)})
        >>> cache.checkpoints
        (100, 200, 300)
        >>> cache.truncate(200)
        >>> int(cache.states_at()["recurrent"][0, 0])
        1
        """
        self._storage.add_checkpoint(states, self._know_states)

    def clear(self) -> None:
        """Drop all tokens; the memory is kept for new ones, except what a prompt took in a ring."""
        self._storage.truncate(0)

    def copy(self) -> Self:
        """An independent deep copy, with all tokens, counted or not."""
        return self._over(self._settings, self._storage.copy())

    def fork(self) -> Self:
        """Another cache with the same tokens, counted or not, in the same blocks.

        A block is copied when one of the two writes to it. The two share memory, and for threads they count as one cache.
        """
        return self._over(self._settings, self._storage.share())

    def snapshot(
        self,
        token_ids: ArrayLike | None = None,
        metadata: Mapping[str, str] | None = None,
        *,
        uncounted: Literal["raise", "drop"] = "raise",
    ) -> Snapshot:
        """Snapshot of the current complete tokens.

        Copies the block table only. Blocks are shared, and copied when this cache writes to them.

        Parameters
        ----------
        token_ids : integers of shape (len(cache),), optional
            The token ids, to store with the tokens.
        metadata : dict of str to str, optional
            Anything else to store, for example the name of the model.
        uncounted : {"raise", "drop"}
            What to do if layers hold tokens that were never counted with `advance`: refuse the call, or leave them out.

        Returns
        -------
        Snapshot

        Raises
        ------
        ValueError
            If layers hold tokens that were never counted, or if the number of `token_ids` differs.
        """
        self._check_snapshot(token_ids, metadata)
        known = []
        storage = self._storage.share_counted(uncounted, lambda: known.extend(self._ids_and_salt(token_ids)))
        return Snapshot(self._settings, storage, known[0], metadata, known[1])

    def _check_snapshot(self, token_ids, metadata):
        """Refuse what cannot be stored before blocks are shared."""
        if token_ids is not None:
            checked_token_ids(token_ids, len(self))
        checked_metadata(metadata)

    def restore(self, snapshot: Snapshot, convert: bool = False) -> None:
        """Return to the state of a snapshot of this cache, or of another with the same settings.

        A snapshot of this cache is restored by sharing its blocks. The bytes of a snapshot of another cache are copied. A
        snapshot of a `KVCache` can be restored into a `Sequence`, and the reverse.

        Parameters
        ----------
        snapshot : Snapshot
        convert : bool
            Also accept a snapshot with other storage formats: its tokens are decoded, and encoded in the formats of this
            cache. They do not become more exact if these have more bits.

        Raises
        ------
        IncompatibleSnapshotError
            If layers, heads, head_dim or windows differ, or the dtypes without `convert`; if a ring has dropped tokens that
            are to be converted; or if there is no room for the tokens. The cache stays as it was.
        NonFiniteInputError
            For converted values beyond the range of a dtype.
        CacheFullError
            If the pool of a `Sequence` has too few blocks.
        """
        storage = self._fitting(snapshot, convert)
        self._storage.restore(storage, self._forget_ids, lambda: self._set_ids(snapshot.token_ids, snapshot._salt))

    def _fitting(self, snapshot, convert):
        """The storage to restore."""
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"restore needs a Snapshot, got {type(snapshot).__name__}")
        return snapshot._fitted(self, convert)

    def save(
        self,
        path: str | os.PathLike[str],
        token_ids: ArrayLike | None = None,
        metadata: Mapping[str, str] | None = None,
        *,
        uncounted: Literal["raise", "drop"] = "raise",
    ) -> None:
        """Write the stored bytes of the complete tokens to a file: safetensors, with checksums.

        If the process dies meanwhile, the file is either the old one or the new one; the next `save` to this path removes the
        unfinished file. A new file gets its mode from the umask, and a replaced file keeps its mode.

        Parameters
        ----------
        path : path-like
        token_ids, metadata, uncounted
            As in `snapshot`.

        Raises
        ------
        OSError
            Also if `path` is a folder, a device, a pipe or a socket: only files are replaced.
        ValueError
        ModuleNotFoundError
            Without the packages of ``kvfast[files]``.
        """
        path = checked_path(path, "path")  # anything else is refused before the snapshot shares blocks
        self.snapshot(token_ids, metadata, uncounted=uncounted).save(path)

    def state_dict(self, *, uncounted: Literal["raise", "drop"] = "raise") -> dict[str, NDArray[Any]]:
        """The stored bytes as plain arrays; see `Snapshot.state_dict`, and `snapshot` for `uncounted`."""
        return self.snapshot(uncounted=uncounted).state_dict()

    @classmethod
    def from_state_dict(cls, arrays: Mapping[str, NDArray[Any]], calibration: Calibration | LayerCalibration | None = None) -> Self:
        """A cache from the result of `state_dict`; `calibration` as in `kvfast.load`.

        Raises
        ------
        CorruptFileError, IncompatibleSnapshotError
            If the arrays are damaged, of another kind of cache, or of a version that this kvfast cannot read. A sequence is made by
            its pool: restore ``kvfast.Snapshot.from_state_dict(arrays)`` into a new one.
        """
        settings, storage, *_ = from_arrays(arrays, calibration)
        name = NAMES[settings["kind"]]
        if name != cls.__name__:
            way = ": pool.new_sequence().restore(kvfast.Snapshot.from_state_dict(arrays))" if cls.is_paged else ""
            raise IncompatibleSnapshotError(f"this is the state of a {name}, not of a {cls.__name__}{way}")
        return cls._over(settings, storage)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be pickled; save() writes it to a file that is safe to load")

    def __len__(self) -> int:
        return self._storage.length

    def __bool__(self) -> bool:
        return self._storage.length > 0

    def _tokens_text(self, most=""):
        """The number of tokens, for `__repr__`, with the number of uncounted tokens."""
        uncounted = self._storage.num_uncounted
        checkpoints = "" if self._storage.checkpoints is None else f" with {len(self._storage.checkpoints.held)} checkpoints"
        return f"{len(self)}{most} tokens" + (f" + {uncounted} not counted" if uncounted else "") + checkpoints

    @property
    def max_seq_len(self) -> int | None:
        """Largest number of tokens, or None for a cache that grows."""
        return self._storage.max_seq_len

    @property
    def context_lens(self) -> NDArray[np.int32]:
        """Tokens that each layer holds, advanced or not: int32 of shape (num_layers,). ValueError from 2**31 tokens on."""
        return checked_lengths([self._storage.layer_length(layer) for layer in range(self.num_layers)], "context_lens")

    def capacity(self, layer: int = 0) -> int:
        """Tokens that the memory reserved for a layer has room for."""
        return self._storage.capacity(layer)

    def block_indices(self, layer: int = 0) -> NDArray[np.int32]:
        """Blocks that hold a layer's tokens, in their order: int32 of shape (num_blocks,)."""
        return self._storage.block_ids(layer)
