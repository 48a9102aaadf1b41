"""Values on their way to a store."""

from __future__ import annotations

from threading import Condition
from typing import TYPE_CHECKING

from kvfast.core.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

MOST_PENDING = 256 << 20  # bytes that wait; a store that is slower than its user then holds the user up


class Writer:
    """Calls that write, in the background: on `count` threads, and with a bounded number of bytes."""

    def __init__(self, count: int) -> None:
        self._threads = Workers(count, "kvfast-writer")
        self._pending, self._room, self._calls = 0, Condition(), set()

    def begin(self, work: Callable[[], bool], nbytes: int = 0, waits: bool = True) -> Future[bool] | None:
        """Begin a call that needs `nbytes` bytes until it ends, when there is room for them; None without `waits`, where there is none."""
        with self._room:
            if not waits and not self._fits(nbytes):
                return None
            self._room.wait_for(lambda: self._fits(nbytes))
            self._pending += nbytes

        def run() -> bool:
            try:
                return work()
            finally:
                with self._room:
                    self._pending -= nbytes
                    self._room.notify_all()

        call = self._threads.submit(run)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def flush(self) -> None:
        """Wait until all calls have ended."""
        from concurrent.futures import wait

        wait(list(self._calls))

    def close(self) -> None:
        self._threads.close()

    def _fits(self, nbytes):
        return not nbytes or not self._pending or self._pending + nbytes <= MOST_PENDING
