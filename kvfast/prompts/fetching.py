"""Chunks from a store to the blocks of a cache, several at once."""

from __future__ import annotations

from threading import local
from typing import TYPE_CHECKING, Any

from kvfast.core.threads import get_num_threads
from kvfast.core.workers import Workers
from kvfast.prompts.chain import key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvfast.prompts.patient import PatientStore

# Bytes of chunks that are asked for in one call, while those of the two calls before are written.
BYTES_AT_ONCE = 8 << 20


def fetch_chunks(
    store: PatientStore,
    chunks: Sequence[tuple[int, bytes, int]],
    secret: bytes,
    deadline: float,
    write: Callable[[int, memoryview], None],
    meanwhile: Callable[[], object],
) -> int:
    """Fetch chunks, verify them, and write them.

    Parameters
    ----------
    store : PatientStore
    chunks : sequence of (int, bytes, int)
        Index, digest and bytes of the payload of each.
    secret : bytes
    deadline : float
    write : callable
        Gets the index and the payload of a chunk. Several threads call it at once. Chunks after a bad one may have been
        written too.
    meanwhile : callable
        Is called once, while chunks come.

    Returns
    -------
    int
        Number of first chunks that were sound.
    """
    if not chunks:
        meanwhile()
        return 0
    memory = local()
    batch = max(1, BYTES_AT_ONCE // max(nbytes for _, _, nbytes in chunks))

    def room(size: int) -> memoryview:
        """Memory that a thread uses again stays in the processor's cache."""
        if not hasattr(memory, "bytes") or len(memory.bytes) < size:
            memory.bytes = bytearray(size)
        return memoryview(memory.bytes)

    def take(i: int, digest: bytes, nbytes: int, value: Any) -> bool:
        def use(payload: memoryview) -> bool:
            write(i, payload)
            return True

        return bool(store.take(key_of("c", digest), value, digest, secret, use, nbytes, room))

    def ask(at: int) -> Any:
        return ahead.submit(lambda: store.get_many([key_of("c", digest) for _, digest, _ in chunks[at : at + batch]], deadline))

    sound: list[bool] = []
    with Workers(get_num_threads()) as threads, Workers(1) as ahead:
        values, writing, other = ask(0), [], None
        for at in range(0, len(chunks), batch):
            jobs = [
                threads.submit(lambda chunk=chunk, value=value: take(*chunk, value))
                for chunk, value in zip(chunks[at : at + batch], values.result())
            ]
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
