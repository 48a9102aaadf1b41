"""Values on their way to a store."""

from __future__ import annotations

from threading import Condition
from typing import TYPE_CHECKING, Any

from kvfast.core.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from kvfast.prompts.patient import PatientStore
    from kvfast.prompts.stats import PromptCacheStats

MOST_PENDING = 256 << 20  # bytes that wait; a store that is slower than its user then holds the user up


class Writer:
    """Puts values into a store, several at once, and counts what the store takes and what not."""

    def __init__(self, store: PatientStore, stats: PromptCacheStats) -> None:
        self._store, self._stats, self._threads = store, stats, Workers(2, "kvfast-writer")
        self._pending, self._room, self._calls = 0, Condition(), set()

    def put(self, key: str, value: Any) -> Future[bool]:
        """Whether the store keeps the value, in the future."""
        with self._room:
            self._room.wait_for(lambda: self._fits(value))
            self._pending += len(value)
        return self._begin(lambda: self._put(key, value))

    def put_missing(self, key: str, value: Any, complete: Callable[[], object]) -> Future[bool] | None:
        """As `put`, for a value that the store may have, and whose header `complete` writes if it has not. None, and the value is
        dropped, where `put` would wait."""
        with self._room:
            if not self._fits(value):
                return None
            self._pending += len(value)

        def is_here() -> bool:
            (here,) = self._store.contains_many([key], self._store.deadline())
            if not here:
                complete()
            return here

        return self._begin(lambda: self._put(key, value, is_here))

    def after(self, calls: list[Future[bool]], then: Callable[[], None]) -> Future[bool]:
        """Call `then` when these calls have ended. The result is whether all of them are true."""

        def work() -> bool:
            kept = [call.result() for call in calls]  # which began before this one, so that it never waits for a thread
            then()
            return all(kept)

        return self._begin(work)

    def flush(self) -> None:
        """Wait until all has been written."""
        from concurrent.futures import wait

        wait(list(self._calls))

    def close(self) -> None:
        self._threads.close()

    def _fits(self, value):
        return not self._pending or self._pending + len(value) <= MOST_PENDING

    def _put(self, key, value, is_here=bool):
        counts = {}
        try:
            if is_here():
                return True
            if self._store.is_paused:
                return False
            is_kept = self._store.put(key, value)
            counts = {"bytes_written": len(value)} if is_kept else {"num_refused": 1, "bytes_refused": len(value)}
            return is_kept
        finally:
            with self._room:
                self._pending -= len(value)
                self._room.notify_all()
                self._stats.add(**counts)

    def _begin(self, work):
        call = self._threads.submit(work)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call
