"""Connections to a Redis server that keep a deadline, and bring values straight to memory."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

LINE_BYTES = 4096  # bytes that are read at once where a line is due
LARGEST = 512 << 20  # bytes of a value, which no server goes beyond


def connection_class(base: type) -> type:
    """A connection of redis-py whose answers must be complete `timeout` seconds after `begin_answer`.

    The time limit of redis-py is one for each piece of an answer, so that a server that sends drops is waited for without end.
    """
    from redis import exceptions

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

        def read_value(self) -> bytearray | None:
            """The answer to GET. The bytes that redis-py would copy three times come straight to their memory."""
            try:
                return self._timed.read_value()
            except TimeoutError as error:
                raise exceptions.TimeoutError(str(error)) from None
            except OSError as error:
                raise exceptions.ConnectionError(str(error)) from None
            except _Wrong as error:
                raise exceptions.InvalidResponse(f"an answer to GET is not one of a Redis server: {error}") from None
            except _Refused as error:
                raise exceptions.ResponseError(str(error)) from None

        @property
        def has_more(self) -> bool:
            """Whether more came than was asked for."""
            return self._timed is not None and self._timed.has_more

        def cancel(self) -> None:
            """End what another thread waits for."""
            self.is_cancelled = True
            if self._timed is not None:
                with contextlib.suppress(OSError):  # not connected any more
                    socket.socket.shutdown(self._timed.socket, socket.SHUT_RDWR)

    return TimedConnection


class _Refused(Exception):
    """The server says why it gives no value."""


class _Wrong(Exception):
    """No server of Redis answers so."""


class _TimedSocket:
    """A socket with a deadline.

    Bytes that came after a value are kept here, and redis-py does not see them: it reads only what follows on commands of its own.
    """

    def __init__(self, connected):
        self.socket, self.deadline = connected, 0.0
        self._received = bytearray()

    def read_value(self):
        """A bytearray or None, in the protocol's versions 2 and 3."""
        line = self._line()
        if line[:1] == b"-":
            raise _Refused(line[1:].decode("utf-8", "replace"))
        if line in (b"$-1", b"_"):
            return None
        if line[:1] != b"$" or not line[1:].isdigit() or len(line) > 10 or int(line[1:]) > LARGEST:
            raise _Wrong(line[:40])
        value = bytearray(int(line[1:]))
        num_here = min(len(value), len(self._received))
        value[:num_here] = self._received[:num_here]
        del self._received[:num_here]
        left = memoryview(value)[num_here:]
        while left:
            left = left[_some(self.recv_into(left)) :]
        if self._line():
            raise _Wrong(f"more than {len(value)} bytes")
        return value

    @property
    def has_more(self):
        return len(self._received) > 0

    def _line(self):
        while (end := self._received.find(b"\r\n")) < 0:
            if len(self._received) > LINE_BYTES:
                raise _Wrong(bytes(self._received[:40]))
            piece = self.recv(LINE_BYTES)
            _some(len(piece))
            self._received += piece
        line = bytes(self._received[:end])
        del self._received[: end + 2]
        return line

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


def _some(count):
    if not count:
        raise ConnectionError("the server closed the connection")
    return count
