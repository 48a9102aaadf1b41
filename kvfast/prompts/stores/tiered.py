"""A folder in front of a far store."""

from __future__ import annotations

import time
import warnings
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvfast.core.workers import Workers
from kvfast.errors import StoreError
from kvfast.prompts.stores.store import Entry, Store, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PAUSE = 30.0  # seconds without calls of the far store after it failed
MOST_PENDING = 256 << 20  # bytes that wait to be kept in the near store; more are not kept


class TieredStore(Store):
    """Two stores. What is read from the far one is kept in the near one, in the background; what is written goes to both.

    If the far store fails, what the near one has is still found: a warning says why, and the far one is left alone for half a minute.

    Parameters
    ----------
    near, far : Store
    """

    def __init__(self, near: Store, far: Store) -> None:
        self.near, self.far = near, far
        self.url = f"{near.url} in front of {far.url}"
        self._threads = Workers(1, "kvfast-tier")
        self._lock, self._pending, self._resume_at, self._warned = Lock(), 0, 0.0, False

    def get_many(self, keys: Sequence[str]) -> list[Value | None]:
        values = self._near(lambda: list(self.near.get_many(keys)), [None] * len(keys))
        missing = [i for i, value in enumerate(values) if value is None]
        if missing:
            asked = [keys[i] for i in missing]
            for i, value in zip(missing, self._far(lambda: self.far.get_many(asked), [None] * len(missing))):
                values[i] = value
                if value is not None:
                    self._keep(keys[i], value)
        return values

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        here = self._near(lambda: list(self.near.contains_many(keys)), [False] * len(keys))
        missing = [i for i, is_here in enumerate(here) if not is_here]
        if missing:
            asked = [keys[i] for i in missing]
            for i, is_there in zip(missing, self._far(lambda: self.far.contains_many(asked), [False] * len(missing))):
                here[i] = is_there
        return here

    def put(self, key: str, value: Any) -> bool:
        is_near = self._near(lambda: self.near.put(key, value), False)
        return self._far(lambda: self.far.put(key, value), False) or is_near

    def touch(self, keys: Sequence[str], is_hit: bool = True) -> None:
        self._near(lambda: self.near.touch(keys, is_hit), None)
        self._far(lambda: self.far.touch(keys, is_hit), None)

    def delete(self, keys: Sequence[str]) -> None:
        self.near.delete(keys)
        self.far.delete(keys)

    def entries(self) -> Iterator[Entry]:
        return self.far.entries()

    def cancel(self) -> None:
        self.far.cancel()

    def flush(self) -> None:
        """Wait until the near store has what was read from the far one."""
        self._threads.close()  # the next call begins others

    def close(self) -> None:
        self.flush()
        self.near.close()
        self.far.close()

    def _near(self, call: Callable[[], Any], otherwise: Any) -> Any:
        """A folder that fails, as on a disk that is full, does not keep anybody from the far store."""
        try:
            return call()
        except StoreError as error:
            self._warn(f"{self.near.url} fails: {error}")
            return otherwise

    def _far(self, call: Callable[[], Any], otherwise: Any) -> Any:
        if time.monotonic() < self._resume_at:
            return otherwise
        try:
            return call()
        except StoreError as error:
            self._resume_at = time.monotonic() + PAUSE
            self._warn(f"{self.far.url} fails, and {self.near.url} serves alone: {error}")
            return otherwise

    def _warn(self, text):
        if not self._warned:
            self._warned = True
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def _keep(self, key, value):
        """Keep a value in the near store, soon."""
        data = value.read(0, len(value))
        with self._lock:
            if self._pending + len(data) > MOST_PENDING:
                return
            self._pending += len(data)
        self._threads.submit(lambda: self._put_near(key, data))

    def _put_near(self, key, data):
        try:
            self._near(lambda: self.near.put(key, data), False)
        finally:
            with self._lock:
                self._pending -= len(data)
