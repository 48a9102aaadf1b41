"""What of a secret stays in the memory of a process, run as a script of its own by `test_security`.

    python tests/support/process_memory.py KIND DTYPE SECURE

Fills a cache with keys and values that are one number, asks it with queries that are it, gives everything back, and prints how
often RUN such numbers stand one after the other in the writable memory of the process: heaps, arenas, and the stacks of all threads.
"""

import ctypes
import gc
import sys

import numpy as np

import kvfast

DIM, TOKENS, RUN, STATES = 64, 600, 24, 1 << 18
SECRET = np.float32(0.17626953125)  # as float16 the same number; no other data of the process repeats it


def caches(kind, dtype, secure):
    """Empty caches, and what keeps their pool."""
    if kind == "sequence":
        pool = kvfast.PagedKVCache(1, 2, DIM, num_blocks=64, dtype=dtype, secure=secure)
        return pool.new_sequence(), pool
    if kind == "ring":
        return kvfast.RingKVCache(1, 2, DIM, sliding_window=100, num_sink_tokens=4, dtype=dtype, secure=secure), None
    if kind == "latent":
        return kvfast.MLAKVCache(1, DIM, DIM, dtype=dtype, secure=secure), None
    return kvfast.KVCache(1, 2, DIM, dtype=dtype, secure=secure, max_state_bytes=STATES if kind == "states" else None), None


def use(kind, dtype, secure):
    cache, pool = caches(kind, dtype, secure)
    latent = kind == "latent"
    rows = np.full((TOKENS, 2 * DIM) if latent else (TOKENS, 2, DIM), SECRET)
    q = np.full((17, 4, 2 * DIM if latent else DIM), SECRET)
    for start in range(0, TOKENS, 50):
        part = rows[start : start + 50]
        cache.append(0, part) if latent else cache.append(0, part, part)
        cache.advance(len(part))
        if kind == "states":  # more of them than there is room for
            cache.add_checkpoint({"state": part})
        for num_threads in (1, 2):
            cache.attend(0, q, num_splits=3, num_threads=num_threads)[:] = 0
    snapshot = cache.snapshot()
    cache.truncate(TOKENS - (50 if kind == "states" else 7))
    one = rows[:1]
    cache.append(0, one) if latent else cache.append(0, one, one)
    del snapshot, part, one
    cache.clear()
    if pool is not None:
        cache.free()
    rows[:] = 0
    q[:] = 0


def regions():
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, rights, *rest = line.split()
            if rights.startswith("rw") and (len(rest) < 4 or rest[3].startswith("[heap") or rest[3].startswith("[stack")):
                first, last = (int(one, 16) for one in place.split("-"))
                yield first, last


def pieces():
    """Pieces of the process's own memory, whole words of it, one after the other in one buffer, which is not searched itself."""
    buffer = np.zeros(1 << 20, np.uint8)
    own = buffer.ctypes.data
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for first, last in regions():
            # The buffer may lie within a region of others: the memory before and after it is searched.
            for begin, end in ((first, min(last, own)), (max(first, own + buffer.size), last)):
                for at in range(begin, end, buffer.size):
                    size = min(buffer.size, end - at)
                    memory.seek(at)
                    try:
                        size = memory.readinto(memoryview(buffer)[:size])
                    except OSError:
                        continue
                    yield buffer[: size // 4 * 4]
                    buffer[:] = 0


def count(kind):
    """Runs of the secret in the process's own memory, as float32 or float16."""
    wanted, found = SECRET.astype(kind).view(f"u{np.dtype(kind).itemsize}"), 0
    for piece in pieces():
        same = np.flatnonzero(piece.view(wanted.dtype) == wanted)
        if len(same) >= RUN:
            found += int((same[RUN - 1 :] - same[: -RUN + 1] == RUN - 1).sum())
    return found


def main():
    kind, dtype, secure = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
    if dtype == "open":  # float rows next to codes
        dtype = kvfast.KVFormat("int4", per_channel=True, num_first_float_tokens=16)
    use(kind, dtype, secure)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    print(count("float32") + count("float16"))


if __name__ == "__main__":
    main()
