"""Threads of this process: a process that was forked begins with none of its parent's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future, ThreadPoolExecutor


class Threads:
    """Threads that begin with the first call.

    Parameters
    ----------
    count : int
    name : str
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name, self._process = count, name, 0
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Begin a call."""
        from concurrent.futures import ThreadPoolExecutor  # takes 10 ms, and only prompts need it

        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(self._count, self._name), os.getpid()
        return self._pool.submit(work)

    def close(self) -> None:
        """Wait for all calls."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=True)
        self._pool = None
