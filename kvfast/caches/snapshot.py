"""A cache at one point in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfast.caches.storage_properties import StorageProperties
from kvfast.core.checks import check_flag, check_size, checked_list, checked_token_ids
from kvfast.core.interchange import as_floats
from kvfast.core.limits import MAX_KV_HEADS
from kvfast.core.text import same_or_tuple, shown, size_text
from kvfast.errors import DimensionMismatchError, IncompatibleSnapshotError
from kvfast.files import cache_file
from kvfast.files.state import arrays_of, from_arrays, to_arrays
from kvfast.storage.kinds import append_decoded, storage_of
from kvfast.storage.sequences.heads import truncate_held
from kvfast.storage.sequences.sequence import SequenceStorage
from kvfast.storage.settings import full

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

    from kvfast.codec.calibration import Calibration, LayerCalibration


class Snapshot(StorageProperties):
    """The complete tokens of a cache at one point in time: from `KVCache.snapshot`, a file, or arrays.

    A snapshot shares the blocks of its cache. Only the block table is copied, and a block when the cache writes to it. The
    snapshot stays valid after the cache is gone. It can be restored any number of times, into its own cache or into
    another cache with the same settings; the other cache copies the blocks. `kvfast.load` makes a new cache from it.
    For threads, a snapshot and its cache count as one: see `KVCache`.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> cache = kvfast.KVCache(1, 2, 64)
    >>> k = v = np.ones((3, 2, 64), np.float32)
    >>> cache.append(0, k, v)
    >>> cache.advance(3)
    >>> snapshot = cache.snapshot()
    >>> cache.clear()
    >>> cache.restore(snapshot)
    >>> len(cache)
    3
    """

    __slots__ = ("_metadata", "_salt", "_settings", "_storage", "_token_ids")

    def __init__(
        self,
        settings: dict[str, Any],
        storage: Any,
        token_ids: ArrayLike | None = None,
        metadata: Mapping[str, str] | None = None,
        salt: bytes | None = b"",
    ) -> None:
        if not (isinstance(settings, dict) and isinstance(storage, SequenceStorage)):
            raise TypeError("a Snapshot is made by the snapshot() of a cache, by Snapshot.load or by Snapshot.from_arrays")
        self._settings = settings  # see `kvfast.storage.settings`
        self._storage = storage  # a SequenceStorage that nothing else refers to, so that it never changes
        self._token_ids = None
        if token_ids is not None:
            ids = checked_token_ids(token_ids, self.seq_len)
            self._token_ids = np.ndarray(ids.shape, ids.dtype, ids.tobytes())  # bytes cannot be made writable
        self._metadata = checked_metadata(metadata)
        self._salt = salt  # of the sequence it is of, for a pool that it is restored to; None: of a file, which does not tell it

    @property
    def seq_len(self) -> int:
        """Number of tokens."""
        return self._storage.num_held

    @property
    def token_ids(self) -> NDArray[np.int64] | None:
        """The token ids, int64 of shape (seq_len,), read-only; None if they are not known."""
        return self._token_ids

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata given to `KVCache.snapshot`: a dict of str to str."""
        return dict(self._metadata)

    @property
    def nbytes(self) -> int:
        """Bytes that only this snapshot needs: its table, and blocks and checkpoints that its cache has since overwritten or dropped."""
        return self._storage.nbytes_alone

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The numbers of first tokens after which there is a checkpoint, in ascending order."""
        return () if self._storage.checkpoints is None else self._storage.checkpoints.positions

    def states_at(self, n: int | None = None) -> dict[str, NDArray[Any]]:
        """The recurrent states of a checkpoint; see `KVCache.states_at`."""
        return self._storage.states_at(n)

    @property
    def max_state_bytes(self) -> int | None:
        """The most bytes that checkpoints take; None for any number, or if there are no states."""
        return None if self._storage.checkpoints is None else self._storage.checkpoints.max_bytes

    def to_arrays(self) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
        """Decode all tokens.

        Returns
        -------
        keys : list with one ndarray of shape (seq_len, num_kv_heads * head_dim), float32, per layer
        values : list with one ndarray of shape (seq_len, num_kv_heads * v_head_dim), float32, per layer
            For a ring: the visible tokens, see `RingKVCache.positions`. For an `MLAKVCache`: the latents, and their
            rotary parts.
        """
        pairs = [self._decoded(layer) for layer in range(self.num_layers)]
        keys, values = ([np.array(one).reshape(len(one), one.shape[1] * one.shape[2]) for one in side] for side in zip(*pairs))
        return keys, values

    @classmethod
    def from_arrays(
        cls,
        keys: Sequence[ArrayLike],
        values: Sequence[ArrayLike],
        num_kv_heads: int,
        dtype: Any = "int4",
        k_dtype: Any = None,
        v_dtype: Any = None,
        *,
        token_ids: ArrayLike | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Self:
        """Encode tokens into a snapshot that a `KVCache` or a `Sequence` can restore.

        Parameters
        ----------
        keys : sequence of arrays of shape (seq_len, num_kv_heads * head_dim), one per layer
        values : sequence of arrays of shape (seq_len, num_kv_heads * v_head_dim), one per layer
            Arrays of float32, float16 or bfloat16.
        num_kv_heads : int
        dtype, k_dtype, v_dtype
            As in `KVCache`.
        token_ids, metadata
            As in `KVCache.snapshot`.
        """
        keys, values = (
            [as_floats(array, name) for array in checked_list(side, name, "arrays, one for each layer")]
            for name, side in (("keys", keys), ("values", values))
        )
        if not keys or len(keys) != len(values):
            raise DimensionMismatchError(f"keys and values must hold one array per layer, got {len(keys)} and {len(values)}")
        num_kv_heads, dims = check_size(num_kv_heads, "num_kv_heads", 1, MAX_KV_HEADS), []
        for name, arrays in (("keys", keys), ("values", values)):
            shape = arrays[0].shape
            if len(shape) != 2 or shape[1] == 0 or shape[1] % num_kv_heads:
                raise DimensionMismatchError(f"{name} must have shape (seq_len, {num_kv_heads} * head_dim), got {shape}")
            for array in arrays:
                if array.shape != shape:
                    raise DimensionMismatchError(f"{name} must have the same shape in every layer, got {shape} and {array.shape}")
            dims.append(shape[1] // num_kv_heads)
        seq_len = len(keys[0])
        if len(values[0]) != seq_len:
            raise DimensionMismatchError(f"keys and values must hold the same number of tokens, got {seq_len} and {len(values[0])}")
        settings = full(len(keys), num_kv_heads, dims[0], dtype, k_dtype, v_dtype, dims[1])
        storage = storage_of(settings, None, max(1, seq_len))
        if seq_len:
            for layer, pair in enumerate(zip(keys, values)):
                storage.append(layer, *(one.reshape(seq_len, num_kv_heads, dim) for one, dim in zip(pair, dims)))
            storage.advance(seq_len)
        storage.max_seq_len = None
        return cls(settings, storage, token_ids, metadata)

    def truncated(self, n: int) -> Snapshot:
        """A snapshot of the first `n` tokens; ValueError if there are fewer, or if a ring has dropped some of them."""
        storage = self._storage.share()
        truncate_held(storage, n)
        return Snapshot(self._settings, storage, None if self._token_ids is None else self._token_ids[:n], self._metadata, self._salt)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """The stored bytes as plain arrays.

        Returns
        -------
        dict of str to ndarray
            All arrays but ``"token_ids"`` are uint8:

            - ``"header"``: JSON.
            - ``"layers.0.k.0"``, ``"layers.0.v.0"`` ...: the full blocks of a layer and head, of shape (num_blocks, bytes
              of a block).
            - ``"layers.0.k.tail"`` ...: the blocks after the full ones, block after block and head after head. Only present
              if there are any.
            - ``"layers.0.k.floats"`` ...: float rows in pieces of 16 tokens, of shape (num_pieces * num_kv_heads, bytes of
              a piece), piece after piece and head after head. Only present if there are any.
            - ``"states.0"`` ...: the bytes of each checkpoint, of shape (1, bytes of a checkpoint).
            - ``"token_ids"``: int64 of shape (seq_len,), if they are known.
        """
        return to_arrays(self._settings, self._storage, self._token_ids, self._metadata, self._is_salted)

    @classmethod
    def from_state_dict(cls, arrays: Mapping[str, NDArray[Any]], calibration: Calibration | LayerCalibration | None = None) -> Self:
        """Make a snapshot from the result of `state_dict`; `calibration` and errors as in `kvfast.load`."""
        return cls(*from_arrays(arrays, calibration))

    def save(self, path: str | os.PathLike[str], key: bytes | Sequence[bytes] | None = None) -> None:
        """Write to a file; see `KVCache.save`."""
        cache_file.write(self._settings, self._storage, self._token_ids, self._metadata, self._is_salted, path, key)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        mmap: bool = False,
        calibration: Calibration | LayerCalibration | None = None,
        key: bytes | Sequence[bytes] | None = None,
    ) -> Self:
        """Read from a file; see `kvfast.load`."""
        return cls(*cache_file.read(path, mmap, None, calibration, key))

    def to_bytes(self) -> bytes:
        """The bytes that `save` would write to a file, for a database or a socket."""
        return cache_file.to_bytes(self._settings, self._storage, self._token_ids, self._metadata, self._is_salted)

    @classmethod
    def from_bytes(cls, data: Any, calibration: Calibration | LayerCalibration | None = None) -> Self:
        """A snapshot from the result of `to_bytes`, or from the bytes of any file that kvfast wrote, in any object with a buffer.

        `calibration` and errors are those of `kvfast.load`.
        """
        return cls(*cache_file.from_bytes(data, calibration))

    def _fitted(self, cache, convert):
        """The storage that `cache` restores: this storage, or with `convert` its tokens in the formats of `cache`."""
        self._check_settings(cache, ("dtype",) if check_flag(convert, "convert") else ())
        self._check_room(cache.max_seq_len)
        if self._settings == cache._settings:
            return self._storage
        storage = storage_of(cache._settings, cache.block_size, secure=cache.secure)
        for layer in range(self.num_layers):
            k, v = self._decoded(layer)
            if len(k) < self.seq_len:
                raise IncompatibleSnapshotError(
                    f"a snapshot must hold all tokens to be converted, but layer {layer} has dropped "
                    f"{self.seq_len - len(k)} of {self.seq_len}"
                )
            if self.seq_len:
                append_decoded(cache._settings, storage, layer, k, v)
        if self.seq_len:
            storage.advance(self.seq_len)
        storage.checkpoints = self._storage.checkpoints
        return storage

    def _copied(self, max_seq_len, block_size=None):
        """A storage of its own with the same tokens."""
        storage = storage_of(self._settings, block_size or self.block_size, max_seq_len, self.secure, self.max_state_bytes)
        self._check_room(max_seq_len)
        storage.reserve_as(self._storage)
        storage.restore(self._storage)
        return storage

    @property
    def _held_states(self):
        return None if self._storage.checkpoints is None else self._storage.checkpoints.held

    @property
    def _is_salted(self):
        """Whether the tokens come from a sequence with a salt."""
        return self._salt != b""

    def _check_room(self, max_seq_len):
        if max_seq_len is not None and self.seq_len > max_seq_len:
            raise IncompatibleSnapshotError(f"the snapshot holds {self.seq_len} tokens, the cache has room for {max_seq_len}")

    def _check_settings(self, cache, but=()):
        """Raise unless `cache` has the settings of this snapshot; those in `but` may differ."""
        mine, other = self._settings, cache._settings
        for name in mine | other:  # the kind first, and the number of layers before their settings
            if name == "has_states" and mine.get(name) != other.get(name):
                of = ("without", "with")[self._storage.checkpoints is not None]
                raise IncompatibleSnapshotError(
                    f"the snapshot is of a cache {of} recurrent states, and this cache is not: make it {of} max_state_bytes"
                )
            if name not in but and mine.get(name) != other.get(name):
                wrong = [_shown(name, settings.get(name)) for settings in (mine, other)]
                raise IncompatibleSnapshotError(f"the snapshot has {name} {shown(wrong[0])}, the cache {shown(wrong[1])}")

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same bytes for the same tokens; their block sizes may differ."""
        if not isinstance(other, Snapshot):
            return NotImplemented
        if self._settings != other._settings or self.seq_len != other.seq_len or self._held_states != other._held_states:
            return False
        if self._storage.is_spliced or other._storage.is_spliced:
            same = self._storage.segment_list() == other._storage.segment_list()
            return same and all(np.array_equal(*pair) for pairs in zip(self.to_arrays(), other.to_arrays()) for pair in zip(*pairs))
        if self.block_size > other.block_size:
            return other == self
        storage = other._storage
        if self.block_size != other.block_size:  # a ring with smaller blocks may hold fewer tokens before the window
            storage = other._copied(None, self.block_size)
        if self._storage.resume_states() != storage.resume_states():
            return False
        mine, others = arrays_of(self._storage), arrays_of(storage)
        return all(np.array_equal(array, others[name]) for name, array in mine.items())

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return self.seq_len

    def __bool__(self) -> bool:
        return True

    def __copy__(self) -> Snapshot:
        return self  # a snapshot never changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"Snapshot({self._shape()}, {self.seq_len} tokens, {size_text(self.nbytes)} of its own)"


def _shown(name, value):
    """The text of a setting for messages: formats by name, and a value that all layers share once."""
    if name == "dtype":
        value = [str(one) for one in value]
    return same_or_tuple(value) if isinstance(value, list) else value


def checked_metadata(metadata):
    """A copy of the metadata of a snapshot; TypeError for other than texts."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must map str to str, got {shown(metadata)}")
    metadata = {} if metadata is None else dict(metadata)
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"metadata must map str to str, got {shown(name)}: {shown(text)}")
    return metadata
