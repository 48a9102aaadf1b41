"""Recurrent states of a sequence, kept at some of its positions.

A checkpoint never changes, and neither do the `Checkpoints` of a sequence: a change makes others. So copies, forks and snapshots share
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from kvfast.codec.blocks import Arena
from kvfast.core.interchange import aligned, as_array
from kvfast.core.text import shown, size_text
from kvfast.errors import DimensionMismatchError, MissingCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

ALIGNMENT = 64  # of each state in the bytes of a checkpoint: a cache line
MAX_STATES, MAX_STATE_BYTES = 1 << 16, 1 << 38  # of a checkpoint
MOST_DIMS, MOST_NAME = 8, 256
_BITS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
DTYPES = ("bool", "bfloat16", *(f"{kind}{bits}" for kind, all_bits in _BITS.items() for bits in all_bits))


class StateForms:
    """The states of a model: the shape and dtype of each, and its place in the bytes of a checkpoint.

    `fields` has ``{"shape": list of int, "dtype": name}`` for each state, as a file has it.
    """

    def __init__(self, fields: dict[str, dict[str, Any]]) -> None:
        self.fields, self._places, at = {name: fields[name] for name in sorted(fields)}, {}, 0
        for name, one in self.fields.items():
            dtype, shape = _dtype(one["dtype"]), tuple(one["shape"])
            nbytes = math.prod(shape) * dtype.itemsize
            self._places[name] = slice(at, at + nbytes), dtype, shape
            at += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = at
        if at > MAX_STATE_BYTES:
            raise ValueError(f"states must take at most {size_text(MAX_STATE_BYTES)}, got {size_text(at)}")

    @classmethod
    def of(cls, states: dict[str, NDArray[Any]]) -> StateForms:
        return cls({name: {"shape": [*array.shape], "dtype": array.dtype.name} for name, array in states.items()})

    def packed(self, states: dict[str, NDArray[Any]], secure: bool) -> NDArray[np.uint8]:
        """The bytes of a checkpoint."""
        data = self.empty(secure)
        for name, (place, dtype, shape) in self._places.items():
            data[place].view(dtype).reshape(shape)[...] = states[name].view(dtype)
        return data

    def empty(self, secure: bool) -> NDArray[np.uint8]:
        """Bytes of a checkpoint that are still to be written."""
        return np.frombuffer(Arena(self.nbytes, True), np.uint8) if secure else np.zeros(self.nbytes, np.uint8)

    def unpacked(self, data: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """The states in the bytes of a checkpoint: read-only views."""
        source = np.frombuffer(memoryview(data).toreadonly() if len(data) else b"", np.uint8)  # nobody can make it writable
        return {name: source[place].view(dtype).reshape(shape) for name, (place, dtype, shape) in self._places.items()}

    def check(self, other: StateForms) -> None:
        """DimensionMismatchError unless other states have these names, shapes and dtypes."""
        for name in self.fields | other.fields:
            mine, got = (one.fields.get(name) for one in (self, other))
            if mine != got:
                raise DimensionMismatchError(
                    f"state {shown(name)} must be {_text(mine)}, as in the checkpoints before, got {_text(got)}"
                )


def checked_states(states: Any) -> dict[str, NDArray[Any]]:
    """States as arrays."""
    if not isinstance(states, Mapping) or not 0 < len(states) <= MAX_STATES:
        raise TypeError(f"states must be a mapping of 1 to {MAX_STATES} names to arrays, got {shown(states)}")
    found = {}
    for name, state in states.items():
        if not isinstance(name, str) or len(name) > MOST_NAME:
            raise TypeError(f"states must have names of at most {MOST_NAME} characters, got {shown(name)}")
        array = found[name] = aligned(as_array(state, f"state {shown(name)}"))
        if array.dtype.name not in DTYPES or not array.dtype.isnative or array.ndim > MOST_DIMS:
            raise TypeError(
                f"state {shown(name)} must be an array of numbers of at most {MOST_DIMS} dimensions, got {array.dtype} {array.shape}"
            )
    return found


class Checkpoint:
    """States after some tokens: their forms, and their bytes, which nobody writes any more."""

    def __init__(self, forms: StateForms, data: NDArray[np.uint8]) -> None:
        self.forms, self.data = forms, data
        self.owners: WeakSet[Checkpoints] = WeakSet()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self.forms.fields == other.forms.fields and np.array_equal(self.data, other.data)

    __hash__ = object.__hash__


class Checkpoints:
    """The checkpoints of a sequence: those in `held`, in the order of their positions.

    Where they take more than `max_bytes`, those go whose neighbours are near, as seen from the end: the rest lies densest at the newest
    tokens.
    """

    def __init__(self, max_bytes: int | None = None, held: Iterable[tuple[int, Checkpoint]] = ()) -> None:
        self.max_bytes, self.held = max_bytes, dict(held)
        if self.held:
            self._thin()
        for one in self.held.values():
            one.owners.add(self)

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(self.held)

    @property
    def forms(self) -> StateForms | None:
        """The forms of the states of all checkpoints; None before the first."""
        return next((one.forms for one in self.held.values()), None)

    @property
    def nbytes(self) -> int:
        return sum(one.data.nbytes for one in self.held.values())

    @property
    def nbytes_alone(self) -> int:
        """Bytes that no other sequence or snapshot has."""
        return sum(one.data.nbytes for one in self.held.values() if len(one.owners) == 1)

    def nearest(self, n: int) -> int:
        """The last position up to `n` with a checkpoint, or 0."""
        return max((one for one in self.held if one <= n), default=0)

    def at(self, n: int) -> Checkpoint:
        """The checkpoint after `n` tokens; MissingCheckpointError."""
        if n not in self.held:
            before = self.nearest(n)
            way = f"truncate({before}) and compute {n - before} tokens again" if before else "compute all tokens again"
            raise MissingCheckpointError(
                f"there must be a checkpoint after {n} tokens, and the nearest one before is after {before}: {way}", before
            )
        return self.held[n]

    def check_truncate(self, n: int, length: int) -> None:
        """MissingCheckpointError where a sequence of `length` tokens cannot go back to `n`."""
        if 0 < n < length:
            self.at(n)

    def upto(self, n: int) -> Checkpoints:
        """The checkpoints of the first `n` tokens."""
        return Checkpoints(self.max_bytes, [one for one in self.held.items() if one[0] <= n])

    def taking(self, other: Checkpoints) -> Checkpoints:
        """The checkpoints of another sequence, as far as there is room."""
        if other.forms is not None:
            self._check_room(other.forms)
        return Checkpoints(self.max_bytes, other.held.items())

    def with_states(self, n: int, states: Any, secure: bool) -> Checkpoints:
        """`plus` with copies of some states."""
        states = checked_states(states)
        forms = StateForms.of(states)
        if self.forms is not None:
            self.forms.check(forms)
            forms = self.forms
        self._check_room(forms)  # before memory is allocated
        return self.plus(n, Checkpoint(forms, forms.packed(states, secure)))

    def plus(self, n: int, checkpoint: Checkpoint) -> Checkpoints:
        """These and one more, after the last of them or in its place."""
        self._check_room(checkpoint.forms)
        return Checkpoints(self.max_bytes, (self.held | {n: checkpoint}).items())

    def _check_room(self, forms):
        if self.max_bytes is not None and forms.nbytes > self.max_bytes:
            raise ValueError(
                f"max_state_bytes must be at least the {forms.nbytes} bytes of one checkpoint, got {self.max_bytes}: make the cache with more"
            )

    def _thin(self):
        room = len(self.held) if self.max_bytes is None else self.max_bytes // max(self.forms.nbytes, 1)
        while len(self.held) > room:
            at = [0, *self.held]
            # The last one stays.
            costs = [((at[i + 1] - at[i - 1]) / (at[-1] - at[i]), at[i]) for i in range(1, len(at) - 1)]
            del self.held[min(costs, default=(0, at[-1]))[1]]


class KnownCheckpoints:
    """Checkpoints that a pool finds by the digest of the tokens before them; see `PrefixIndex`. Where they take more than `max_bytes`,
    the least recently used are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._nbytes = max_bytes, 0
        self._found: dict[bytes, Checkpoint] = {}  # the least recently used first

    def add(self, digest: bytes, checkpoint: Checkpoint) -> None:
        self._drop(digest)
        self._found[digest] = checkpoint
        self._nbytes += checkpoint.data.nbytes
        while self._nbytes > self._max_bytes:
            self._drop(next(iter(self._found)))

    def last(self, digests: list[bytes]) -> tuple[int, Checkpoint | None]:
        """The number of digests up to the last that has a checkpoint, and this checkpoint; or 0 and None."""
        for count in range(len(digests), 0, -1):
            checkpoint = self._found.get(digests[count - 1])
            if checkpoint is not None:
                self.add(digests[count - 1], checkpoint)
                return count, checkpoint
        return 0, None

    def clear(self) -> None:
        self._found.clear()
        self._nbytes = 0

    def _drop(self, digest):
        old = self._found.pop(digest, None)
        self._nbytes -= 0 if old is None else old.data.nbytes


def _dtype(name):
    """The dtype of a name in DTYPES; bfloat16 as its bits where ml_dtypes, which knows it, is missing."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ModuleNotFoundError:
        return np.dtype(np.uint16)
    return np.dtype(bfloat16)


def _text(form):
    return "absent" if form is None else f"{form['dtype']} {tuple(form['shape'])}"
