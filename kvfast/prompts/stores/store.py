"""The interface of a store."""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfast.core.checks import check_positive
from kvfast.core.text import shown
from kvfast.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

_KEY = re.compile(r"[a-z0-9]{1,8}-[0-9a-f]{64}")


class Entry(NamedTuple):
    """A value of a store, as `Store.entries` lists it.

    Parameters
    ----------
    key : str
    nbytes : int
    last_used : float
        Seconds since 1970; NaN if the store does not know.
    hits : int
        Number of hits, see `Store.touch`; -1 if the store does not know.
    """

    key: str
    nbytes: int
    last_used: float
    hits: int


class Value:
    """The bytes of a key. A context manager that closes the file or connection that they came from."""

    def __init__(self, data: Any) -> None:
        self._data = memoryview(data).cast("B")

    def __len__(self) -> int:
        return len(self._data)

    def read(self, start: int, count: int, memory: memoryview | None = None) -> memoryview:
        """`count` bytes from byte `start` on; EOFError if there are fewer.

        Parameters
        ----------
        memory : writable memoryview of at least `count` bytes, optional
            Where the bytes may be put.
        """
        if start + count > len(self._data):
            raise EOFError(f"it must have {start + count} bytes, got {len(self._data)}")
        return self._data[start : start + count]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._data.release()


def tell_user(text: str, kind: str) -> None:
    """Warn of a trouble, or log that it is there again, which Python does not show as a warning, or that it is over."""
    if kind == "new":
        warnings.warn(text, RuntimeWarning, stacklevel=6)
    else:
        import logging

        logging.getLogger("kvfast").warning("%s", text)  # as visible as the warning


class Refusal(StoreError):
    """Why a store that can be read does not take a value; or, if that `is_general`, no value for now."""

    def __init__(self, why: str, is_general: bool = True) -> None:
        super().__init__(why)
        self.is_general = is_general


class Store(ABC):
    """Values by their keys.

    Keys are those of `check_key`. A missing key is not an error. Whatever else goes wrong is a StoreError, whose text shows no password.
    Several threads may call a store at once.
    """

    url: str
    """For messages; without a password."""

    tell: Callable[[str, str], None] = staticmethod(tell_user)
    """Gets what goes wrong, and "new", "again" or "over": by default a warning, and then lines of the log."""

    @abstractmethod
    def get_many(self, keys: Sequence[str]) -> list[Value | None]:
        """The values of some keys, None where there is none."""

    @abstractmethod
    def put(self, key: str, value: Any) -> bool:
        """Store the bytes of a value. Readers see all of it or nothing. False, or a Refusal that says why, if there is no room."""

    @abstractmethod
    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """Which of some keys there are, in one round trip."""

    @abstractmethod
    def touch(self, keys: Sequence[str], is_hit: bool = True) -> None:
        """Count each key as used now, the last of them as the newest; and as a hit, if it was found."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys, if they are there."""

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """All values. This lists the store, and is slow if it is large."""

    def cancel(self) -> None:
        """End the calls of other threads, which have taken too long."""

    def close(self) -> None:
        """Let go of files and connections. Closing twice is harmless."""


def check_key(key: str) -> str:
    """The key; ValueError if it is not letters or digits, a hyphen, and 64 hexadecimal digits."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"a key must be like 'c-' and 64 hexadecimal digits, got {shown(key)}")
    return key


def check_timeout(timeout: float) -> float:
    """The time limit of a server in seconds; ValueError if it is not positive and finite."""
    check_positive(timeout, "timeout", "number of seconds", finite=True)
    return float(timeout)


def is_key(name: str) -> bool:
    """Whether a name is one of a key."""
    return _KEY.fullmatch(name) is not None
