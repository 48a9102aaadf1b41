"""Calls of a store that may be slow, full or gone: they cost time, never an exception."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvfast.core.workers import Workers
from kvfast.errors import CorruptFileError, IncompatibleSnapshotError
from kvfast.prompts.envelope import HEADER_BYTES, payload_of
from kvfast.prompts.stores.store import Refusal
from kvfast.prompts.stores.troubles import Troubles, put_or_refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvfast.prompts.stores.store import Store, Value

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds without calls after a failure, doubled by each failure that follows
WEIGHT = 0.5  # of the newest measurement of the rate
FORGETTING = 1.1  # by which the rate is raised when a fetch was not begun for it: a store that got faster is found out


class PatientStore:
    """A store with a deadline for each call, a warning for the first failure of a kind, and a pause after failures and refusals.

    What cannot be written, as on a full disk, may still be read: such a failure pauses writing alone.

    Parameters
    ----------
    store : Store
    time_limit : float
        Seconds for the calls of one prompt.
    """

    def __init__(self, store: Store, time_limit: float) -> None:
        self.store, self.time_limit = store, time_limit
        self.rate = 0.0  # bytes per second of what was fetched, 0 if not known
        # A separate one, because the calls of `touch` wait for one of the others.
        self._threads, self._later = Workers(2, "kvfast-store"), Workers(1, "kvfast-touch")
        self._pauses, self._troubles = {False: _Pause(), True: _Pause()}, Troubles(store)  # of reading, and of writing

    def deadline(self) -> float:
        """When the calls of a prompt that begins now must have ended."""
        return time.monotonic() + self.time_limit

    def contains_many(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """Which keys are there; none if the store fails."""
        return self._call(lambda: self.store.contains_many(keys), deadline, [False] * len(keys)) if keys else []

    def get_many(self, keys: Sequence[str], deadline: float) -> list[Value | None]:
        """The values that are there; none if the store fails."""
        return self._call(lambda: list(self.store.get_many(keys)), deadline, [None] * len(keys)) if keys else []

    def take(
        self,
        key: str,
        value: Value | None,
        digest: bytes,
        secret: bytes,
        use: Callable[[memoryview], Any] = lambda payload: payload,
        nbytes: int | None = None,
        room: Callable[[int], memoryview | None] = lambda size: None,
    ) -> Any:
        """What `use` makes of the payload of a value; None if it is not there, or not sound: then it is deleted.

        `nbytes` is the size that the payload must have, `room` gives memory for the bytes of a value.
        """
        if value is None:
            return None
        try:
            with value:
                size = len(value)
                if nbytes is not None and size != HEADER_BYTES + nbytes:
                    raise CorruptFileError(f"it must have {HEADER_BYTES + nbytes} bytes, got {size}")
                return use(payload_of(value.read(0, size, room(size)), digest, secret))
        except (CorruptFileError, IncompatibleSnapshotError, EOFError, OSError) as error:
            self.delete(key, error)
            return None

    def put(self, key: str, value: Any) -> bool:
        """Whether the store has taken the value."""
        is_kept = self._call(lambda: put_or_refuse(self.store, key, value), self.deadline(), False, writes=True)
        if is_kept:
            self._is_well(True)
        return is_kept

    def touch(self, keys: Sequence[str], is_hit: bool = True) -> None:
        """Mark keys as used, the last of them as the newest. Nobody waits for it."""
        deadline = self.deadline()
        self._later.submit(lambda: self._call(lambda: self.store.touch(keys, is_hit), deadline, None, writes=True))

    @property
    def is_paused(self) -> bool:
        """Whether nothing is written now, after a failure."""
        return time.monotonic() < self._pauses[True].end

    def settle(self) -> None:
        """Wait for `touch`."""
        self._later.submit(int).result()

    def delete(self, key: str, why: object) -> None:
        """Delete a damaged value, and warn."""
        self.warn(f"a value of {self.store.url} cannot be used ({why}); what it had is computed")
        self._call(lambda: self.store.delete([key]), self.deadline(), None, writes=True)

    def takes_longer(self, nbytes: int, seconds: float) -> bool:
        """Whether fetching `nbytes` would take longer than `seconds`, as far as is known."""
        if not self.rate or nbytes / self.rate <= seconds:
            return False
        self.rate *= FORGETTING
        return True

    def measured(self, nbytes: int, seconds: float) -> None:
        """Remember how fast bytes came."""
        rate = nbytes / max(seconds, 1e-9)
        self.rate = WEIGHT * rate + (1 - WEIGHT) * self.rate if self.rate else rate

    def warn(self, text: str) -> None:
        """Warn, once for each text."""
        self._troubles.begin(None, text)

    def close(self) -> None:
        self._later.close()
        self._threads.close()
        self.store.close()

    def _call(self, work: Callable[[], Any], deadline: float, otherwise: Any, writes: bool = False) -> Any:
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
                self._is_well(False)
            return result
        return otherwise

    def _is_well(self, writes):
        self._pauses[writes].forget()
        self._troubles.end(writes, f"prompts are {'saved' if writes else 'found'} again, as {self.store.url} is well")

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
