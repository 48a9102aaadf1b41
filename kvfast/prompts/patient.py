"""Calls of a store that may be slow, full or gone: they cost time, never an exception."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvfast.core.workers import Workers
from kvfast.prompts.stores.store import Refusal
from kvfast.prompts.stores.troubles import Troubles

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfast.prompts.stores.store import Store

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds without calls after a failure, doubled by each failure that follows


class Patience:
    """A deadline for each call of a store, a warning for the first failure of a kind, and a pause after failures and refusals.

    A store that cannot be written, as on a full disk, may still be read: such a failure pauses writing alone. `time_limit` are the seconds
    for the calls of one prompt.
    """

    def __init__(self, store: Store, time_limit: float) -> None:
        self.store, self.time_limit = store, time_limit
        self._threads = Workers(2, "kvfast-store")
        self._pauses, self._troubles = {False: _Pause(), True: _Pause()}, Troubles(store)  # of reading, and of writing

    def deadline(self) -> float:
        """When the calls of a prompt that begins now must have ended."""
        return time.monotonic() + self.time_limit

    def call(self, work: Callable[[], Any], deadline: float, otherwise: Any, writes: bool = False) -> Any:
        """The result of `work`, or `otherwise` if the store fails, is late, or has failed shortly before."""
        from concurrent.futures import TimeoutError as Late

        now = time.monotonic()
        if now < self._pauses[writes].end or now >= deadline:
            return otherwise
        call = self._threads.submit(work)
        try:
            result = call.result(deadline - now)
        except Late:
            call.cancel()
            self.store.cancel()
            self._failed(f"no answer within {self.time_limit:g} s", (False, True))
        except OSError as error:  # a StoreError
            if isinstance(error, Refusal) and not error.is_general:
                self.warn(f"a value is not saved in {self.store.url}: {error}")
                return otherwise
            self._failed(str(error), (True,) if writes else (False, True))
        else:
            if not writes:  # where nothing is put, writing may fail all the same
                self.is_well(False)
            return result
        return otherwise

    def is_well(self, writes: bool) -> None:
        """Tell that a call has succeeded, of those that write or of those that read."""
        self._pauses[writes].forget()
        self._troubles.end(writes, f"prompts are {'saved' if writes else 'found'} again, as {self.store.url} is well")

    @property
    def is_paused(self) -> bool:
        """Whether nothing is written now, after a failure."""
        return time.monotonic() < self._pauses[True].end

    def warn(self, text: str) -> None:
        """Warn, once for each text."""
        self._troubles.begin(None, text)

    def close(self) -> None:
        self._threads.close()
        self.store.close()

    def _failed(self, why, paused):
        for writes in paused:
            self._pauses[writes].begin()
        computed = f"prompts are computed, as {self.store.url} fails: {why}"
        if False in paused:
            self._troubles.begin(False, computed)
        elif not self._troubles.lasts(computed):  # which says more
            self._troubles.begin(True, f"prompts are not saved, as {self.store.url} fails: {why}")


class _Pause:
    """Time without calls, which each failure doubles."""

    def __init__(self):
        self.end, self._next = 0.0, FIRST_PAUSE

    def begin(self):
        now = time.monotonic()
        if now >= self.end:  # calls that fail at once are one failure
            self.end = now + self._next
            self._next = min(2 * self._next, LONGEST_PAUSE)

    def forget(self):
        self._next = FIRST_PAUSE
