"""Threads of this process for Python calls: a process that was forked begins with none of its parent's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future, ThreadPoolExecutor

    from typing_extensions import Self


class Workers:
    """Threads that begin with the first call. A context manager that waits for all calls.

    While Python ends, in exit handlers and in threads that outlive the main one, no thread can begin: calls then run in their
    caller.
    """

    def __init__(self, count: int, name: str = "kvfast") -> None:
        self._count, self._name, self._process = count, name, 0
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Begin a call."""
        try:
            if self._pool is None or self._process != os.getpid():
                from concurrent.futures import ThreadPoolExecutor  # slow to import, and only files need it

                self._pool, self._process = ThreadPoolExecutor(self._count, self._name), os.getpid()
            return self._pool.submit(work)
        except RuntimeError:  # Python ends
            return _done(work)

    def results(self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Results of calls with such arguments, in order."""
        begun = [self.submit(lambda arguments=arguments: function(*arguments)) for arguments in calls]
        return [call.result() for call in begun]

    def close(self, wait: bool = True) -> None:
        """Let the threads end, and wait for all calls."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait)
        self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def wait_for_any(calls: Iterable[Future[Any]], seconds: float) -> None:
    """Wait until one of these calls has ended, at most `seconds`."""
    from concurrent.futures import FIRST_COMPLETED, wait

    wait(calls, seconds, FIRST_COMPLETED)


def _done(work):
    """The Future of a call that runs here and now."""
    from concurrent.futures import Future

    call = Future()
    try:
        call.set_result(work())
    except BaseException as error:  # noqa: BLE001  (its caller gets it)
        call.set_exception(error)
    return call
