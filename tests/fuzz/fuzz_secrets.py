"""Caches with `secure=True` for `fuzz_caches`: what was forgotten is nowhere in the memory of the process."""

import contextlib
import gc
import mmap
from pathlib import Path

import numpy as np
from fuzz_inputs import often, one_of
from fuzz_oracle import Finding

import kvfast

WIDTH = 32  # elements of a secret; a key and a value repeat it
PAGE = mmap.PAGESIZE
PIECE = 1 << 20  # bytes of memory that are searched at once
KINDS = {"float32": np.float32, "float16": np.float16, "int8-plain": np.int8, "int4": np.float16}  # what a row is in memory


class SecretWorld:
    """One secret row among many: it comes, is attended to, and is forgotten in any way that there is."""

    def __init__(self, case):
        self.case, self.rng = case, case.rng
        rng = self.rng
        self.dtype, self.kind = str(one_of(rng, list(KINDS))), str(one_of(rng, ["full", "full", "ring", "pool"]))
        self.dim, self.rollback = int(one_of(rng, [1, 2])) * WIDTH, int(one_of(rng, [0, 64]))
        # The secret itself is in memory for moments only, and else as its complement: no search finds what it searches with.
        codes, self.hidden = rng.integers(-100, 100, WIDTH).astype(np.int8), {}
        codes[int(rng.integers(WIDTH))] = 127
        for kind in (np.float32, np.float16):
            plain = np.empty(WIDTH, kind)
            np.copyto(plain, codes)
            self.hidden[kind] = ~plain.view(np.uint8)
            plain[:] = 0
        # Values in blocks: 16 elements, each of 4 tokens, kept 128 above what they are.
        self.hidden[np.int8] = np.repeat(codes[:16].view(np.uint8) ^ 0x7F, 4)
        codes[:] = 0
        self.part = np.zeros(WIDTH, np.float32)
        self.rows = np.zeros((300, 1, self.dim), np.float32)  # of which all that a cache is given is a part

    def run(self):
        rng = self.rng
        self.case.note("secret", self.kind, self.dtype, self.dim)
        if self.case.tier.startswith(("avx512", "amx")) and "avx512f" not in Path("/proc/cpuinfo").read_text():
            return  # software in place of the instructions has vectors on the stack that registers would hold
        self.pool = kvfast.PagedKVCache(1, 1, self.dim, 40, dtype=self.dtype, secure=True) if self.kind == "pool" else None
        cache = self.new()
        for _ in range(int(rng.integers(1, 3))):
            self.append(cache, int(rng.integers(0, 150)))
            first = len(cache)
            self.append(cache, int(rng.integers(8, 60)), secret=True)
            last = len(cache)
            self.append(cache, int(one_of(rng, [0, 0, 1, 20, 150])))
            others = [cache.fork() for _ in range(int(rng.integers(2)))]
            if often(rng, 0.5):
                cache.attend(0, np.ones((1, 2, self.dim), np.float32), num_threads=2)[:] = 0  # which may be the secret itself
            ways = ["truncate", "clear", "restore", "gone"] + (["drop"] * 2 if self.kind != "ring" else ["turn"])
            way = str(one_of(rng, ways))
            self.case.note(way, first, last, len(cache), len(others))
            for other in others:
                self.forget(other)
            others = other = None
            cache = getattr(self, way)(cache, first, last)
            self.search(way)

    def new(self):
        if self.kind == "pool":
            return self.pool.new_sequence()
        if self.kind == "ring":
            return kvfast.RingKVCache(1, 1, self.dim, 100, dtype=self.dtype, secure=True, rollback=self.rollback)
        return kvfast.KVCache(1, 1, self.dim, dtype=self.dtype, secure=True)

    def append(self, cache, n, secret=False):
        """Rows of noise, or of the secret, which are overwritten as soon as the cache has them."""
        if not n:
            return
        rows = self.rows[:n]
        if secret:
            np.bitwise_not(self.hidden[np.float32], out=self.part.view(np.uint8))
            rows.reshape(n, -1, WIDTH)[...] = self.part
            self.part[:] = 0
        else:
            self.rng.standard_normal(out=rows, dtype=np.float32)
        self.case.calls += 1
        cache.append(0, rows, rows)
        cache.advance(n)
        self.rows[...] = 0

    def forget(self, cache):
        if hasattr(cache, "free"):
            cache.free()

    # Ways to forget: the cache that goes on.

    def truncate(self, cache, first, last):
        with contextlib.suppress(ValueError):  # a ring cannot go back that far
            keep = np.arange(last, len(cache))[::2] - first if often(self.rng, 0.3) else None  # of what follows on the secret
            cache.truncate(first if keep is not None else int(self.rng.integers(first + 1)), keep)
            return cache
        return self.gone(cache, first, last)

    def clear(self, cache, first, last):
        cache.clear()
        return cache

    def drop(self, cache, first, last):
        cache.drop(first, last, rope=kvfast.Rope())
        return cache

    def restore(self, cache, first, last):
        empty = self.new()
        cache.restore(empty.snapshot())
        self.forget(empty)
        return cache

    def gone(self, cache, first, last):
        self.forget(cache)
        return self.new()

    def turn(self, cache, first, last):
        """A ring that has gone on for long."""
        for _ in range(10):
            self.append(cache, 100)
        return cache

    def search(self, way):
        """Look for the secret in all memory of this process that can be written."""
        gc.collect()
        kinds = sorted({KINDS[self.dtype], np.float32}, key=str)
        needles = [bytearray(len(self.hidden[kind])) for kind in kinds]
        for kind, needle in zip(kinds, needles):
            np.bitwise_not(self.hidden[kind], out=np.frombuffer(needle, np.uint8))
        found = count(needles)
        for kind, needle, times in zip(kinds, needles, found):
            needle[:] = bytes(len(needle))
            if times:
                raise Finding(f"what was forgotten is in memory | {way}", f"{times} times as {np.dtype(kind)}")


def count(needles):
    """How often each of some bytes stand in the memory of this process, apart from the needles themselves."""
    found, longest = [0] * len(needles), max(map(len, needles))
    buffer = bytearray(PIECE)
    places = [np.frombuffer(one, np.uint8).ctypes.data for one in (buffer, *needles)]
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory, open("/proc/self/pagemap", "rb", 0) as pages:
        for line in maps.read().splitlines():
            place, rights, *rest = line.split()
            first, last = (int(one, 16) for one in place.split("-"))
            if not rights.startswith("rw") or rest[3:] and rest[3].startswith("[v"):
                continue
            # All but the buffer, which holds what was read.
            pieces = [(at, min(last, places[0])) for at in range(first, min(last, places[0]), PIECE - longest)]
            pieces += [(at, last) for at in range(max(first, places[0] + PIECE), last, PIECE - longest)]
            for at, end in pieces:
                end = min(at + PIECE, end)
                pages.seek(at // PAGE * 8)
                if not (np.frombuffer(pages.read(((end - at) // PAGE + 2) * 8), np.uint64) >> np.uint64(62)).any():
                    continue  # neither in memory nor swapped out
                with contextlib.suppress(OSError):
                    memory.seek(at)
                    end = at + memory.readinto(memoryview(buffer)[: end - at])
                    for i, needle in enumerate(needles):
                        found[i] += buffer.count(needle, 0, end - at) - (at <= places[1 + i] and places[1 + i] + len(needle) <= end)
    np.frombuffer(buffer, np.uint8)[:] = 0
    return found
