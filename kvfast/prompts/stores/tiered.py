"""A folder in front of a far store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any

from kvfast.core.workers import Workers
from kvfast.errors import StoreError
from kvfast.prompts.stores.store import Entry, Refusal, Store, Value
from kvfast.prompts.stores.troubles import Troubles, put_or_refuse

PAUSE = 30.0  # seconds without calls of a store after it failed
MOST_PENDING = 256 << 20  # bytes that wait to be kept in the near store; more are not kept


class TieredStore(Store):
    """Two stores. What is read from the far one is kept in the near one, in the background; what is written goes to both.

    If one fails, the other serves alone: a warning says why, and the first one is left alone for half a minute. One that takes no values
    is still read.

    Parameters
    ----------
    near, far : Store
    """

    def __init__(self, near: Store, far: Store) -> None:
        self.near, self.far = near, far
        self.url = f"{near.url} in front of {far.url}"
        self._threads = Workers(1, "kvfast-tier")
        self._lock, self._pending, self._troubles = Lock(), 0, Troubles(self)
        self._resume_at: dict[tuple[bool, bool], float] = {}  # by whether it is the far store, and whether it is written

    def get_many(self, keys: Sequence[str]) -> list[Value | None]:
        values, missing = self._found(keys, lambda store, some: store.get_many(some), None)
        for i in missing:
            if values[i] is not None:
                self._keep(keys[i], values[i])
        return values

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        return self._found(keys, lambda store, some: store.contains_many(some), False)[0]

    def _found(self, keys: Sequence[str], call: Callable[[Store, Sequence[str]], Any], nothing: Any) -> tuple[list[Any], list[int]]:
        """What the near store has of some keys, else the far one; and the numbers of the keys that the near one has not."""
        found = self._ask(False, lambda store: list(call(store, keys)), [nothing] * len(keys))
        missing = [i for i, one in enumerate(found) if one is None or (nothing is False and not one)]
        if missing:
            asked = [keys[i] for i in missing]
            for i, one in zip(missing, self._ask(True, lambda store: call(store, asked), [nothing] * len(missing))):
                found[i] = one
        return found, missing

    def put(self, key: str, value: Any) -> bool:
        is_near = self._put(False, key, value)
        if not self._put(True, key, value) and not is_near:
            raise Refusal("neither takes a value", all(self._is_paused(is_far, True) for is_far in (False, True)))
        return True

    def touch(self, keys: Sequence[str], is_hit: bool = True) -> None:
        for is_far in (False, True):
            self._ask(is_far, lambda store: store.touch(keys, is_hit), None, writes=True)

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

    def _put(self, is_far: bool, key: str, value: Any) -> bool:
        is_kept = self._ask(is_far, lambda store: put_or_refuse(store, key, value), False, writes=True)
        if is_kept:
            self._troubles.end((is_far, True), f"{(self.far if is_far else self.near).url} takes values again")
        return is_kept

    def _ask(self, is_far: bool, call: Callable[[Store], Any], otherwise: Any, writes: bool = False) -> Any:
        """What a store answers. One that fails does not keep anybody from the other."""
        store, other = (self.far, self.near) if is_far else (self.near, self.far)
        if self._is_paused(is_far, writes):
            return otherwise
        try:
            answer = call(store)
        except StoreError as error:
            if isinstance(error, Refusal) and not error.is_general:
                return otherwise
            for one in (True,) if writes else (False, True):  # what cannot be written may still be read
                self._resume_at[is_far, one] = time.monotonic() + PAUSE
            fails = f"{store.url} fails, and {other.url} serves alone: {error}"
            if not writes:
                self._troubles.begin((is_far, False), fails)
            elif not self._troubles.lasts(fails):  # which says more
                self._troubles.begin((is_far, True), f"{store.url} takes no values: {error}")
            return otherwise
        if not writes:  # where nothing is put, writing may fail all the same
            self._troubles.end((is_far, False), f"{store.url} answers again")
        return answer

    def _is_paused(self, is_far, writes):
        return time.monotonic() < self._resume_at.get((is_far, writes), 0.0)

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
            self._put(False, key, data)
        finally:
            with self._lock:
                self._pending -= len(data)
