"""Connections to a Redis server that keep a deadline."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any


def connection_class(base: type) -> type:
    """A connection of redis-py whose answers must be complete `timeout` seconds after `begin_answer`.

    The time limit of redis-py is one for each piece of an answer, so that a server that sends drops is waited for without end.
    """

    class TimedConnection(base):  # type: ignore[misc,valid-type]
        def __init__(self, timeout: float, **options: Any) -> None:
            from redis.backoff import NoBackoff
            from redis.retry import Retry

            self._timeout, self._timed, self.is_cancelled = timeout, None, False
            super().__init__(socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0), **options)

        def _connect(self):
            self._timed = _TimedSocket(super()._connect())
            self.begin_answer()
            return self._timed

        def begin_answer(self) -> None:
            """Give the server its time from now on."""
            if self._timed is not None:
                self._timed.deadline = time.monotonic() + self._timeout

        def cancel(self) -> None:
            """End what another thread waits for."""
            self.is_cancelled = True
            if self._timed is not None:
                with contextlib.suppress(OSError):  # not connected any more
                    socket.socket.shutdown(self._timed.socket, socket.SHUT_RDWR)

    return TimedConnection


class _TimedSocket:
    def __init__(self, connected):
        self.socket, self.deadline = connected, 0.0

    def recv(self, *args):
        self._set_timeout()
        return self.socket.recv(*args)

    def recv_into(self, *args):
        self._set_timeout()
        return self.socket.recv_into(*args)

    def sendall(self, data):
        data = memoryview(data).cast("B")
        while data:
            self._set_timeout()
            data = data[self.socket.send(data) :]

    def __getattr__(self, name):
        return getattr(self.socket, name)

    def _set_timeout(self):
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.socket.settimeout(left)
