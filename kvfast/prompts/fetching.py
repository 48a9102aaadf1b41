"""Chunks from a store to the blocks of a cache, several at once."""

from __future__ import annotations

from threading import local
from typing import TYPE_CHECKING, Any

from kvfast.core.threads import get_num_threads
from kvfast.errors import CorruptFileError
from kvfast.prompts.chain import key_of
from kvfast.prompts.envelope import HEADER_BYTES, payload_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvfast.prompts.patient import PatientStore
    from kvfast.prompts.prompt import Prompt

BYTES_AT_ONCE = 8 << 20  # bytes of chunks that are asked for in one call, while those of the last one are written


def fetch_chunks(store: PatientStore, prompt: Prompt, indices: Sequence[int], deadline: float,
                 write: Callable[[int, memoryview], None], meanwhile: Callable[[], object]) -> int:
    """Fetch chunks, verify them, and write them.

    Parameters
    ----------
    write : callable
        Gets the index and the payload of a chunk. Several threads call it at once. Chunks behind one that is no good may have been
        written too.
    meanwhile : callable
        Is called once, while chunks come.

    Returns
    -------
    int
        Number of first chunks that were sound.
    """
    from concurrent.futures import ThreadPoolExecutor

    if not len(indices):
        meanwhile()
        return 0
    secret, memory = prompt.secret, local()
    batch = max(1, BYTES_AT_ONCE // max(prompt.form.nbytes(i) for i in indices))
    digests = [prompt.chain.chunk(i) for i in indices]

    def take(i: int, digest: bytes, value: Any) -> bool:
        if value is None:
            return False
        expected = HEADER_BYTES + prompt.form.nbytes(i)
        try:
            with value:
                if len(value) != expected:
                    raise CorruptFileError(f"it must have {expected} bytes, got {len(value)}")
                # Memory that a thread uses again stays in the processor's cache.
                if not hasattr(memory, "bytes") or len(memory.bytes) < expected:
                    memory.bytes = bytearray(expected)
                data = value.read(0, expected, memoryview(memory.bytes))
            write(i, payload_of(data, digest, secret))
        except (CorruptFileError, EOFError, OSError) as error:
            store.delete(key_of("c", digest), error)
            return False
        return True

    good = 0
    with ThreadPoolExecutor(get_num_threads()) as threads, ThreadPoolExecutor(1) as ahead:
        starts = range(0, len(indices), batch)
        calls = [ahead.submit(store.get_many, [key_of("c", one) for one in digests[at : at + batch]], deadline) for at in starts[:1]]
        for number, at in enumerate(starts):
            values = calls[number].result()
            other = threads.submit(meanwhile if number == 0 else int)
            if number + 1 < len(starts):  # comes while these are written
                after = digests[at + batch : at + 2 * batch]
                calls.append(ahead.submit(store.get_many, [key_of("c", one) for one in after], deadline))
            sound = list(threads.map(take, indices[at : at + batch], digests[at : at + batch], values))
            other.result()
            good += (*sound, False).index(False)
            if not all(sound):
                break
    return good
