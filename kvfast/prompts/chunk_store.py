"""Chunks of prompts in a store: found, fetched and put, for a cache and for an engine."""

from __future__ import annotations

import time
from threading import Lock, local
from typing import TYPE_CHECKING, Any

from kvfast.core.checks import check_positive
from kvfast.core.threads import get_num_threads
from kvfast.core.workers import Workers
from kvfast.errors import CorruptFileError, IncompatibleSnapshotError
from kvfast.files.cache_file import need_files
from kvfast.prompts.chain import Chain, digest_of, part_of
from kvfast.prompts.envelope import HEADER_BYTES, complete, payload_of
from kvfast.prompts.patient import Patience
from kvfast.prompts.rate import Rate
from kvfast.prompts.stats import PromptCacheStats
from kvfast.prompts.stores.store import Store
from kvfast.prompts.stores.troubles import put_or_refuse
from kvfast.prompts.stores.urls import open_store
from kvfast.prompts.writer import Writer

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

# Bytes of chunks that are asked for in one call, while those of the two calls before are written.
BYTES_AT_ONCE = 8 << 20


class ChunkStore:
    """The values of prompts in a store, by their keys.

    A key is a digest of all tokens of a prompt up to the end of the value, see `chain`. A store that is slow, full or gone costs time and
    a warning, never an exception: what it does not give is computed, and what it does not take is dropped. A damaged value is deleted.

    Parameters
    ----------
    store, max_bytes, near, secret, time_limit
        As in `kvfast.PromptCache`.
    stats : PromptCacheStats, optional
        Or another object with a method `add`. Counts ``bytes_fetched``, ``bytes_written``, ``num_refused`` and ``bytes_refused``.
    tell : callable, optional
        As `Store.tell`.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        max_bytes: int | None = None,
        near: str | os.PathLike[str] | None = None,
        *,
        secret: bytes = b"",
        time_limit: float = 5.0,
        stats: Any = None,
        tell: Callable[[str, str], None] | None = None,
    ) -> None:
        if not isinstance(secret, bytes):
            raise TypeError(f"secret must be bytes, got {type(secret).__name__}")
        if len(secret) > 64:
            raise ValueError(f"secret must be at most 64 bytes, got {len(secret)}")  # and no message shows it
        check_positive(time_limit, "time_limit", "number of seconds")
        need_files()
        self.store = store if isinstance(store, Store) else open_store(store, max_bytes, near, min(5.0, time_limit))
        if tell is not None:
            self.store.tell = tell
        self.stats, self.rate, self._secret = PromptCacheStats() if stats is None else stats, Rate(), secret
        self._patience, self._writer, self._lock = Patience(self.store, time_limit), Writer(2), Lock()
        # A thread of its own, because its calls wait for those of the store.
        self._later = Workers(1, "kvfast-touch")
        self.deadline, self.warn = self._patience.deadline, self._patience.warn

    def chain(self, settings: str, token_ids: NDArray[np.int64], chunk_tokens: int) -> Chain:
        """The keys of a prompt; see `Chain`."""
        return Chain(settings, token_ids, chunk_tokens, self._secret)

    def part(self, node: bytes, name: str) -> str:
        """The key of a part of the chunk that ends at a node: what one process of several keeps of it, or one kind of layers."""
        return part_of(node, name, self._secret)

    def contains(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """Which keys are there; none if the store fails."""
        return self._patience.call(lambda: self.store.contains_many(keys), deadline, [False] * len(keys)) if keys else []

    def count_first(self, keys: Sequence[str], deadline: float) -> int:
        """How many first keys are there."""
        return (*self.contains(keys, deadline), False).index(False)

    def values(self, keys: Sequence[str], deadline: float, parse: Callable[[memoryview], Any]) -> list[Any]:
        """What `parse` makes of the payloads of some keys; None for a value that is not there or not sound."""

        def use(payload: memoryview) -> Any:
            self.count(bytes_fetched=HEADER_BYTES + len(payload))
            return parse(payload)

        return [self._take(key, value, use) for key, value in zip(keys, self._get(keys, deadline))]

    def fetch(
        self,
        chunks: Sequence[tuple[str, int]],
        deadline: float,
        write: Callable[[int, memoryview], object],
        meanwhile: Callable[[], object] = int,
        used: Sequence[str] = (),
        num_threads: int | None = None,
    ) -> int:
        """Fetch chunks, several at once, verify them, and write them.

        Each chunk has its key, and the bytes of its payload. `write` gets the number of a chunk and its payload. Several threads call it at
        once, `num_threads` or those of kvfast, perhaps also for chunks after a bad one. `meanwhile` is called once, while chunks come. The
        keys `used` count as used before the chunks, so that a store forgets them first. Returns the number of first chunks that were sound.
        """
        begin = time.perf_counter()
        good = self._fetch(chunks, deadline, write, meanwhile, num_threads) if chunks else meanwhile() or 0
        nbytes = sum(size for _, size in chunks[:good])
        self.count(bytes_fetched=nbytes)
        if nbytes and good == len(chunks):
            self.rate.measured(nbytes, time.perf_counter() - begin)
        self.touch([*used, *(key for key, _ in reversed(chunks[:good]))])
        return good

    @property
    def is_paused(self) -> bool:
        """Whether nothing is written now, after a failure."""
        return self._patience.is_paused

    def put(self, key: str, value: bytearray, num_tokens: int) -> Future[bool]:
        """Begin to put a value, whose payload is there (`new_value`); waits while too many bytes are on their way. The result is whether
        the store has taken it."""
        return self._writer.begin(lambda: self._put(key, value, num_tokens), len(value))

    def put_missing(self, key: str, value: bytearray, num_tokens: int) -> Future[bool] | None:
        """As `put`, for a value that the store may have. None, and the value is dropped, where `put` would wait."""

        def work() -> bool:
            return self.count_first([key], self.deadline()) > 0 or self._put(key, value, num_tokens)

        return self._writer.begin(work, len(value), False)

    def after(self, calls: list[Future[bool]], used: Sequence[str]) -> Future[bool]:
        """Mark keys as used when these calls have ended. The result is whether all values were taken."""

        def work() -> bool:
            kept = [call.result() for call in calls]  # which began before this one, so that it never waits for a thread
            self.touch(used, False)
            return all(kept)

        return self._writer.begin(work)

    def touch(self, keys: Sequence[str], is_hit: bool = True) -> None:
        """Mark keys as used, the last of them as the newest. Nobody waits for it."""
        deadline = self.deadline()
        if keys:
            self._later.submit(lambda: self._patience.call(lambda: self.store.touch(keys, is_hit), deadline, None, True))

    def flush(self) -> None:
        """Wait until the store has all that is on its way."""
        self._writer.flush()
        self._later.submit(int).result()

    def close(self) -> None:
        """Wait for values on their way, and close the store."""
        self._writer.close()
        self._later.close()
        self._patience.close()

    def count(self, **counts):
        with self._lock:
            self.stats.add(**counts)

    def _get(self, keys, deadline):
        return self._patience.call(lambda: list(self.store.get_many(keys)), deadline, [None] * len(keys)) if keys else []

    def _take(self, key, value, use, nbytes=None, room=lambda size: None):
        """What `use` makes of the payload of a value; None if it is not there, or not sound: then it is deleted. `room` gives memory."""
        if value is None:
            return None
        try:
            with value:
                size = len(value)
                if nbytes is not None and size != HEADER_BYTES + nbytes:
                    raise CorruptFileError(f"it must have {HEADER_BYTES + nbytes} bytes, got {size}")
                return use(payload_of(value.read(0, size, room(size)), digest_of(key), self._secret))
        except (CorruptFileError, IncompatibleSnapshotError, EOFError, OSError) as error:
            self.warn(f"a value of {self.store.url} cannot be used ({error}); what it had is computed")
            self._patience.call(lambda: self.store.delete([key]), self.deadline(), None, True)
            return None

    def _fetch(self, chunks, deadline, write, meanwhile, num_threads):
        memory, batch = local(), max(1, BYTES_AT_ONCE // max(1, *(nbytes for _, nbytes in chunks)))

        def room(size: int) -> memoryview:
            """Memory that a thread uses again stays in the processor's cache."""
            if not hasattr(memory, "bytes") or len(memory.bytes) < size:
                memory.bytes = bytearray(size)
            return memoryview(memory.bytes)

        def take(i: int, value: Any) -> bool:
            key, nbytes = chunks[i]
            return self._take(key, value, lambda payload: (write(i, payload),), nbytes, room) is not None

        def ask(at: int) -> Any:
            return ahead.submit(lambda: self._get([key for key, _ in chunks[at : at + batch]], deadline))

        sound: list[bool] = []
        with Workers(num_threads or get_num_threads()) as threads, Workers(1) as ahead:
            values, writing, other = ask(0), [], None
            for at in range(0, len(chunks), batch):
                some = zip(range(at, min(at + batch, len(chunks))), values.result())
                jobs = [threads.submit(lambda i=i, value=value: take(i, value)) for i, value in some]
                # After the first chunks: a thread that has begun with those is not waited for.
                other = other or threads.submit(meanwhile)
                if at + batch < len(chunks):
                    values = ask(at + batch)
                sound += [job.result() for job in writing]  # of the call before
                writing = jobs
                if not all(sound):
                    break
            sound += [job.result() for job in writing]
            other.result()
        return (*sound, False).index(False)

    def _put(self, key, value, num_tokens):
        if self.is_paused:
            return False
        complete(value, digest_of(key), self._secret, num_tokens)
        is_kept = self._patience.call(lambda: put_or_refuse(self.store, key, value), self.deadline(), False, True)
        if is_kept:
            self._patience.is_well(True)
        self.count(**{"bytes_written": len(value)} if is_kept else {"num_refused": 1, "bytes_refused": len(value)})
        return is_kept
