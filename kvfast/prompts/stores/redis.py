"""Values in a Redis or Valkey server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kvfast.core.text import needed_for
from kvfast.errors import StoreError
from kvfast.prompts.stores.redis_connection import LARGEST, connection_class
from kvfast.prompts.stores.store import Entry, Refusal, Store, Value, check_key, check_timeout, is_key

PREFIX, HITS = b"kvfast:", b"kvfast:hits:"
HITS_SECONDS = 30 * 86400  # that a count of uses stays after the last one; its value may have been removed long before
# Commands that are sent before their answers are there. A server copies what it cannot send yet, so asking for many large
# values at once is slower than asking for the next one while one comes (bench/bench_store.py).
LEAST_AHEAD, MOST_AHEAD, BYTES_AHEAD = 2, 1000, 1 << 20
SCANNED = 1000  # keys that are listed at once
# What redis-py makes of answers that no Redis server gives.
_OF_OTHER_SERVERS = (OSError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
_FILES = "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"
_OPTIONS = ("db", *_FILES, "ssl_cert_reqs", "ssl_check_hostname")


class RedisStore(Store):
    """Values in a Redis or Valkey server, by the package redis.

    The server bounds its memory (``maxmemory``) and chooses what is removed (``maxmemory-policy allkeys-lru``). Keys begin with
    ``kvfast:``; others are left alone. Nothing is sent before the first call. After a fork, each process has connections of its own.

    The URL is as redis-py takes it: ``redis://user:password@host:6379/0``, ``rediss://`` (TLS) or ``unix://``. Options after ``?``: ``ttl``,
    the seconds that a value stays after its last use, ``db``, and for TLS ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``,
    ``ssl_cert_reqs``, ``ssl_check_hostname``. `timeout` are seconds for connecting, and for each answer, however slowly it comes.
    """

    def __init__(self, url: str, timeout: float = 5.0) -> None:
        timeout = check_timeout(timeout)
        self.url, options, self._ttl = _parsed(url)
        base = options.pop("connection_class", None)
        self._new = lambda: connection_class(base or _redis().Connection)(timeout, **options)
        self._lock, self._process = Lock(), os.getpid()
        self._idle: list[Any] = []
        self._busy: list[Any] = []

    def get_many(self, keys: Sequence[str]) -> list[Value | None]:
        answers = self._call([(b"GET", PREFIX + key) for key in _encoded(keys)], ahead=LEAST_AHEAD, read="read_value")
        return [None if value is None else Value(value) for value in answers]

    def put(self, key: str, value: Any) -> bool:
        (key,), data = _encoded([key]), memoryview(value).cast("B")
        if len(data) > LARGEST:
            raise Refusal(f"a value has more than {LARGEST} bytes", is_general=False)
        end = (b"EX", self._ttl) if self._ttl else ()
        (answer,) = self._call([(b"SET", PREFIX + key, data, *end)], _is_full)
        if isinstance(answer, Exception):
            raise Refusal(f"it is full, {answer}")
        return True

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        return [bool(found) for found in self._call([(b"EXISTS", PREFIX + key) for key in _encoded(keys)])]

    def touch(self, keys: Sequence[str], is_hit: bool = True) -> None:
        commands: list[tuple[Any, ...]] = []
        for key in _encoded(keys):
            commands.append((b"EXPIRE", PREFIX + key, self._ttl) if self._ttl else (b"TOUCH", PREFIX + key))
            if is_hit:
                commands += [(b"INCR", HITS + key), (b"EXPIRE", HITS + key, max(self._ttl, HITS_SECONDS))]
        self._call(commands, _is_full)

    def delete(self, keys: Sequence[str]) -> None:
        self._call([(b"UNLINK", PREFIX + key, HITS + key) for key in _encoded(keys)])

    def entries(self) -> Iterator[Entry]:
        cursor, seen = b"0", set()
        while True:
            (answer,) = self._call([(b"SCAN", cursor, b"MATCH", PREFIX + b"*-*", b"COUNT", SCANNED)])
            self._check(isinstance(answer, (list, tuple)) and len(answer) == 2 and isinstance(answer[1], list), "SCAN")
            cursor, found = answer
            self._check(all(isinstance(one, bytes) for one in (cursor, *found)), "SCAN")
            # A scan may list a key twice.
            keys = [key for key in dict.fromkeys(found) if key not in seen and is_key(key[len(PREFIX) :].decode("latin-1"))]
            seen.update(keys)
            yield from self._listed([key[len(PREFIX) :] for key in keys])
            if cursor == b"0":
                return

    def cancel(self) -> None:
        with self._lock:
            for connection in self._busy:
                connection.cancel()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def _listed(self, keys):
        # A value that has gone, or is not kvfast's, has no length. A server that removes by frequency knows no time of use.
        answers = self._call(
            [
                command
                for key in keys
                for command in ((b"STRLEN", PREFIX + key), (b"OBJECT", b"IDLETIME", PREFIX + key), (b"GET", HITS + key))
            ],
            lambda error: True,
        )
        for key, nbytes, idle, hits in zip(keys, answers[::3], answers[1::3], answers[2::3]):
            if isinstance(nbytes, int) and nbytes:
                used = time.time() - idle if isinstance(idle, int) else float("nan")
                yield Entry(key.decode(), nbytes, used, int(hits) if isinstance(hits, bytes) and hits.isdigit() else 0)

    def _check(self, is_right, command):
        if not is_right:
            raise StoreError(f"{self.url}: an answer to {command} is not one of a Redis server")

    def _call(
        self,
        commands: Sequence[tuple[Any, ...]],
        may_fail: Callable[[Exception], bool] = lambda error: False,
        ahead: int = MOST_AHEAD,
        read: str = "read_response",
    ) -> list[Any]:
        """The answers to commands, of which `ahead` are sent at first, by a method of the connection. An error that `may_fail` accepts
        is an answer."""
        if not commands:
            return []
        while True:
            connection, is_new = self._take()
            why = None
            try:
                return self._answers(connection, commands, may_fail, ahead, getattr(connection, read))
            except _redis().RedisError as error:
                # A server that was started again has closed all connections. Each command may be sent twice.
                is_old = isinstance(error, _redis().ConnectionError) and not is_new and not connection.is_cancelled
                why = "the call took too long" if connection.is_cancelled else str(error)
            except _OF_OTHER_SERVERS as error:
                is_old, why = False, f"{type(error).__name__}: {error}"
                if not isinstance(error, OSError):
                    why = f"an answer is not one of a Redis server ({why})"
            finally:
                self._give_back(connection, why is None and not connection.has_more)
            if not is_old:
                raise StoreError(f"{self.url}: {why}")
            self.close()  # the other connections are as old

    @staticmethod
    def _answers(connection, commands, may_fail, ahead, read):
        failed, answers, num_sent = None, [], 0
        try:
            while len(answers) < len(commands):
                connection.begin_answer()
                if num_sent - len(answers) <= ahead // 2 and num_sent < len(commands):
                    group = commands[num_sent : len(answers) + ahead]
                    connection.send_packed_command(connection.pack_commands(group))
                    num_sent += len(group)
                    connection.begin_answer()
                try:
                    answers.append(read())
                except _redis().ResponseError as error:
                    answers.append(error)
                    if not may_fail(error):
                        failed = failed or error
                nbytes = len(answers[-1]) if isinstance(answers[-1], (bytes, bytearray)) else 1
                ahead = min(2 * ahead, max(LEAST_AHEAD, BYTES_AHEAD // (nbytes + 1)), MOST_AHEAD)
        except BaseException:
            connection.disconnect()  # answers may be under way
            raise
        if failed is not None:
            raise failed
        return answers

    def _take(self):
        """A connection, and whether it is new."""
        with self._lock:
            if self._process != os.getpid():  # connections of the process that this one was forked from
                self._process, self._idle, self._busy = os.getpid(), [], []
            is_new = not self._idle
            connection = self._new() if is_new else self._idle.pop()
            self._busy.append(connection)
        return connection, is_new

    def _give_back(self, connection, is_sound):
        with self._lock:
            if connection in self._busy:
                self._busy.remove(connection)
            if is_sound and not connection.is_cancelled:
                self._idle.append(connection)
                return
        connection.disconnect()


def _redis():
    with needed_for("Redis servers need", "redis"):
        import redis
    return redis


def _encoded(keys):
    return [check_key(key).encode() for key in keys]


def _is_full(error):
    return isinstance(error, _redis().exceptions.OutOfMemoryError)


def _parsed(url):
    """(URL for messages, options of a connection, seconds to live or 0). Errors show nothing of the URL, which may have a password."""
    parse_url = _redis().connection.parse_url
    try:
        parts = urlsplit(url)
        where = f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        ttl = int(given.pop("ttl", 0))
        shown = f"{parts.scheme}://{where}{unquote(parts.path)}"
        rest = "&".join(one for one in parts.query.split("&") if one and not one.startswith("ttl="))
        options = parse_url(url.partition("?")[0] + (f"?{rest}" if rest else ""))
    except ValueError:
        options = None
    if options is not None and parts.scheme != "unix" and parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        options = None  # redis-py would take database 0
    if options is not None and parts.scheme == "unix" and (parts.hostname or not parts.path):
        raise ValueError("the URL of a socket must be like unix:///run/redis.sock, with a whole path after the second slash")
    if options is None:
        raise ValueError(
            "the URL of a Redis server must be like redis://user:password@host:6379/0?ttl=3600, with special letters of the "
            "password as %40"
        )
    if ttl < 0:
        raise ValueError(f"ttl must be a number of seconds from 1, got {ttl}")
    if unknown := sorted(set(given) - set(_OPTIONS)):
        raise ValueError(f"the URL of {shown} may have the options ttl, {', '.join(_OPTIONS)}, got {', '.join(unknown)}")
    # Connections that are made later read them again, when the program may have changed its directory.
    return shown, options | {name: os.path.join(os.getcwd(), options[name]) for name in _FILES if name in options}, ttl
