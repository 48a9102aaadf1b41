"""The errors of kvfast that are not plain ``ValueError``, ``TypeError`` or ``IndexError``.

All checks run before anything is written: a refused call leaves the cache as it was.
"""

from __future__ import annotations


class DimensionMismatchError(ValueError):
    """An array has the wrong rank, or a dimension differs from what the cache holds."""


class NonFiniteInputError(ValueError):
    """An array holds NaN, infinity, or a value beyond the range of its storage dtype; or what is computed of numbers that are
    finite is beyond the range of float32, or of the dtype of ``out``."""


class IncompatibleSnapshotError(ValueError):
    """A snapshot or file is of another kind of cache, or of another version of the format."""


class CorruptFileError(ValueError):
    """A file, or a state of plain arrays, is not what kvfast has written: truncated, damaged, or foreign."""


class CacheFullError(RuntimeError):
    """More tokens than a cache has room for.

    Attributes
    ----------
    needed : int
        Tokens that the call would have added; blocks that it would have taken, for a paged cache.
    free : int
        Tokens that the cache had room for, or blocks.
    """

    def __init__(self, message: str, needed: int, free: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free

    def __reduce__(self) -> tuple[type, tuple[str, int, int]]:
        return type(self), (self.args[0], self.needed, self.free)


class MissingCheckpointError(ValueError):
    """A sequence has no checkpoint of its recurrent states after this number of tokens.

    Attributes
    ----------
    nearest : int
        The last position before it that has a checkpoint; 0, where there are no states yet, if none has.
    """

    def __init__(self, message: str, nearest: int) -> None:
        super().__init__(message)
        self.nearest = nearest

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (self.args[0], self.nearest)


class StoreError(OSError):
    """A store of prompts cannot be reached, does not answer in time, or refuses. The text shows no password."""
