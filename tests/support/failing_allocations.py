"""Makes each allocation of an operation fail in turn: MemoryError, and everything as it was; then the operation succeeds.

``python failing_allocations.py memory``, with failing_malloc.c preloaded, lets fail what kvfast's modules ask the C library
for; ``python failing_allocations.py objects`` all that Python asks for itself, by CPython's own ``_testcapi``. Tells how many
allocations of each operation have failed. Names of operations may follow.
"""

import ctypes
import gc
import itertools
import os
import sys
import tempfile

import numpy as np
from cache_kinds import DIM, HEADS, LAYERS, QUERIES, filled, make, normals, tokens

import kvfast
from kvfast import compression
from kvfast.caches.multi_head import MultiHeadConfig

FORMATS = ("int4", "int8-plain", "float32", kvfast.KVFormat("int8", num_first_float_tokens=4))
ENOUGH = 25  # successes in a row: no allocation of the operation was left to fail
RNG = np.random.default_rng(0)
ROWS = tokens(RNG, 100)
unraisable = []


class Memory:
    """Allocations of kvfast's modules."""

    def __init__(self):
        self.shim = ctypes.CDLL(None)

    def __call__(self, operation, subject, skipped):
        self.shim.failing_malloc_arm(skipped)
        try:
            subject.kept = operation(subject)
            return True
        except MemoryError:
            return False
        finally:
            self.was_last = self.shim.failing_malloc_disarm() <= skipped


# What NumPy's ufuncs and CPython's locks make of a failed allocation, instead of a MemoryError.
MISNAMED = (
    "error return without exception set",
    "without setting an exception",
    "NULL object passed",
    "can't allocate lock",
    "can't start new thread",
)


class Objects:
    """Allocations of Python."""

    def __init__(self):
        from _testcapi import remove_mem_hooks, set_nomemory

        self.start, self.stop, self.successes = set_nomemory, remove_mem_hooks, 0

    def __call__(self, operation, subject, skipped):
        done = False
        self.start(skipped, skipped + 1)
        try:
            subject.kept = operation(subject)
            done = True
        except MemoryError:
            pass
        except (SystemError, RuntimeError) as error:
            if not any(text in str(error) for text in MISNAMED):
                raise
        finally:
            self.stop()
        self.successes = self.successes + 1 if done and skipped else int(done)
        self.was_last = self.successes == ENOUGH
        return done


def array_of(value):
    return value.tobytes() if isinstance(value, np.ndarray) else value


def seen(cache):
    """All that can be seen of a sequence."""
    told = [len(cache), *(cache.layer_length(layer) for layer in range(cache.num_layers))]
    for layer in range(cache.num_layers):
        if isinstance(cache, kvfast.MLAKVCache):
            told.append(cache.get_latent(layer).tobytes())
            continue
        told += [array_of(np.array(cache.k(layer))), array_of(np.array(cache.v(layer)))]
        if cache.layer_length(layer):
            told.append(cache.attend(layer, QUERIES[:1]).tobytes())
    return told


def fill(cache, seed, n, ids=None):
    """The cache, with the same tokens each time: it is made again for each allocation."""
    for layer in range(LAYERS):
        cache.append(layer, *normals(seed, (LAYERS, 2, n, HEADS, DIM))[layer])
    cache.advance(n) if ids is None else cache.advance(n, ids)
    return cache


class Cache:
    """A cache with some tokens, and another that shares or has shared its blocks."""

    def __init__(self, kind="growing", fmt="int4"):
        self.cache = fill(make(kind, fmt), 1, 90)
        self.snapshot = self.cache.snapshot()
        self.foreign = fill(make(kind, fmt), 2, 130).snapshot()

    def append(self):
        for layer in range(LAYERS):
            self.cache.append(layer, *ROWS)

    def spliced(self):
        """A snapshot of another such cache, from which tokens were dropped."""
        other = fill(make("sequence" if self.cache.is_paged else "growing", self.cache.format), 3, 100)
        other.drop(10, 30, rope=ROPE)
        return other.snapshot()

    def seen(self):
        return [seen(self.cache), self.cache.pool.num_free_blocks if self.cache.is_paged else 0]


class Pool:
    """A pool with sequences that share blocks, and known prefixes."""

    def __init__(self, fmt):
        self.pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=400, dtype=fmt)
        self.one = fill(self.pool.new_sequence(), 1, 90)
        self.ids = np.arange(300)
        self.known = fill(self.pool.new_sequence(), 2, 300, self.ids)
        self.freed = fill(self.pool.new_sequence(), 3, 40)
        self.freed.free()
        self.child = self.one.fork()
        self.foreign = fill(kvfast.KVCache(LAYERS, HEADS, DIM, dtype=fmt), 4, 100).snapshot()

    def append(self):
        for layer in range(LAYERS):
            self.known.append(layer, *ROWS)

    def seen(self):
        told = [self.pool.num_free_blocks, self.pool.num_cached_blocks, self.pool._batches.owners().tobytes()]
        for one in (self.one, self.known, self.child):
            told += ["freed"] if one._storage.closed else seen(one)
        return told + (seen(self.kept) if isinstance(self.kept, kvfast.Sequence) else [])


class Latent:
    def __init__(self):
        self.rows = np.random.default_rng(3).standard_normal((100, 80), np.float32)
        self.cache = filled(kvfast.MLAKVCache(2, 64, 16), self.rows)

    def seen(self):
        return seen(self.cache)


class ManyHeads:
    def __init__(self):
        self.cache = kvfast.MultiHeadKVCache(3, MultiHeadConfig(head_dim=DIM, bits=5, num_q_heads=6))
        for row in np.random.default_rng(4).standard_normal((64, 2, 3, DIM), np.float32):
            self.cache.push_token(*row)

    def scores(self):
        scores = self.cache.attention_scores(np.ones((6, DIM), np.float32), softmax=True)
        return scores, self.cache.head(1).attend(np.ones((2, DIM), np.float32))

    def seen(self):
        return [len(self.cache), self.cache.k().tobytes(), self.cache.v().tobytes()]


class Plain:
    def __init__(self):
        self.x = np.random.default_rng(5).standard_normal((40, 2, 20), np.float32)

    def compress(self):
        compressor = compression.KVCacheCompressor(compression.VectorQuantization(codebook_size=16))
        return compressor.compress_kv_3d(self.x.swapaxes(0, 1), self.x.swapaxes(0, 1)).attend(self.x)

    def seen(self):
        return [self.x.tobytes()]


ROPE = kvfast.Rope()
PATH = "cache"  # in the current folder
# Each operation by its name, alone or with what is done before it and cannot fail: functions of a subject. `kept` is the result of
# the one before.
OF_CACHES = {
    "append": lambda it: it.cache.append(1, *ROWS),
    "append_one": lambda it: it.cache.append(0, *ROWS[:, :1]),
    "advance": (Cache.append, lambda it: it.cache.advance(100)),
    "attend": lambda it: it.cache.attend(0, QUERIES, return_lse=True),
    "prefill": lambda it: it.cache.attend(0, np.ones((40, 8, DIM), np.float32), num_splits=3),
    "copy": lambda it: it.cache.copy(),
    "truncate": lambda it: it.cache.truncate(85),
    "snapshot": lambda it: it.cache.snapshot([1] * 90),
    "restore": (lambda it: it.cache.append(1, *ROWS), lambda it: it.cache.restore(it.snapshot)),
    "restore_foreign": (lambda it: it.cache.append(1, *ROWS), lambda it: it.cache.restore(it.foreign)),
    "keys": lambda it: (it.cache.k(0), it.cache.v(1)),
    "state": lambda it: it.cache.state_dict(),
}
OF_BRANCHES = {"keep_branch": lambda it: it.cache.truncate(85, [1, 4])}


def splice(it):
    it.cache.splice(it.foreign, it.snapshot, rope=ROPE)


OF_SPLICED = {
    "splice": splice,
    "drop": lambda it: it.cache.drop(5, 75, rope=ROPE),
    "attend_spliced": (splice, lambda it: it.cache.attend(0, QUERIES, return_lse=True)),
    "drop_spliced": (splice, lambda it: it.cache.drop(60, 150, rope=ROPE)),
    "truncate_spliced": (splice, lambda it: it.cache.truncate(200)),
    "copy_spliced": (splice, lambda it: (it.cache.copy(), it.cache.fork())),
    "restore_spliced": (Cache.spliced, lambda it: it.cache.restore(it.kept)),
}
OF_POOLS = {
    "new_sequence": lambda it: it.pool.new_sequence(),
    "fork": lambda it: it.one.fork(),
    "match": lambda it: it.pool.match_prefix(it.ids),
    "restore_into_pool": lambda it: it.pool.restore(it.foreign),
    "free": lambda it: it.known.free(),
    "append_shared": lambda it: it.child.append(0, *ROWS),
    "slots": lambda it: it.pool.slot_mapping([it.one, it.child, it.known], [20, 5, 70]),
    "append_batch": (
        lambda it: it.pool.slot_mapping([it.one, it.child, it.known], [20, 5, 70]),
        lambda it: it.pool.append_batch(0, *ROWS[:, :95], it.kept),
    ),
    "attend_batch": lambda it: it.pool.attend_batch(0, np.ones((3, 4, DIM), np.float32), [it.one, it.child, it.known]),
    "advance_known": (Pool.append, lambda it: it.known.advance(100, np.arange(100))),
    "truncate_known": lambda it: it.known.truncate(100),
    "keep_known": lambda it: it.known.truncate(290, [1, 4]),
}
OF_OTHERS = {
    Cache: {
        "write": lambda it: it.cache.write(0, np.ones((3, 4 * HEADS * DIM), np.float32)),
        "explain": lambda it: it.cache.explain(0, QUERIES.shape),
        "clear": lambda it: it.cache.clear(),
        "from_state": (lambda it: it.cache.state_dict(), lambda it: kvfast.Snapshot.from_state_dict(it.kept)),
        "save": (lambda it: it.cache.save(PATH), lambda it: it.cache.save(PATH)),
        "load": (lambda it: it.cache.save(PATH), lambda it: kvfast.load(PATH)),
    },
    Latent: {
        "append_latent": lambda it: it.cache.append(0, it.rows),
        "attend_latent": lambda it: it.cache.attend(0, np.ones((20, 32, 80), np.float32)),
    },
    ManyHeads: {
        "push": lambda it: it.cache.push_token(*np.ones((2, 3, DIM), np.float32)),
        "scores": ManyHeads.scores,
        "evict": lambda it: it.cache.evict_outside_window(10),
    },
    Plain: {
        "codecs": lambda it: kvfast.dequantize(*kvfast.quantize(it.x, 4), head_dim=20),
        "attention": lambda it: kvfast.attention(it.x, it.x, it.x),
        "compress": Plain.compress,
        "make_cache": lambda _: (make("growing"), make("ring of two windows"), make("sequence"), kvfast.MLAKVCache(2, 64, 16)),
    },
}
KINDS = ("growing", "bounded", "sequence", "ring with sinks", "ring of two windows", "ring that rotates")
# {name: (how to make the subject, the operation)}
OPERATIONS = {}
for _kinds, _named in (
    (KINDS, OF_CACHES),
    (("growing", "sequence", "ring of two windows"), OF_BRANCHES),
    (("growing", "sequence"), OF_SPLICED),
):
    for _kind, _format, (_name, _operation) in itertools.product(_kinds, FORMATS, _named.items()):
        OPERATIONS[f"{_name}, {_kind}, {_format}"] = lambda k=_kind, f=_format: Cache(k, f), _operation
for _format, (_name, _operation) in itertools.product(FORMATS, OF_POOLS.items()):
    OPERATIONS[f"{_name}, pool, {_format}"] = lambda f=_format: Pool(f), _operation
for _subject, _named in OF_OTHERS.items():
    OPERATIONS |= {name: (_subject, operation) for name, operation in _named.items()}


def subject_of(name):
    subject, operation = OPERATIONS[name]
    made, (*before, operation) = subject(), operation if isinstance(operation, tuple) else (operation,)
    made.kept = None
    for one in before:
        made.kept = one(made)
    return made, operation


def run(name, allocations):
    """How many allocations have failed, one at a time."""
    made, operation = subject_of(name)
    made.kept = operation(made)
    expected, failed = made.seen(), 0
    before = subject_of(name)[0].seen()
    for skipped in range(100000):
        made, operation = subject_of(name)
        if not allocations(operation, made, skipped):
            failed += 1
            assert made.seen() == before, f"{name}: the allocation after {skipped} left something behind"
            made.kept = operation(made)
        assert made.seen() == expected, f"{name}: after the allocation after {skipped} failed, the result is another"
        if allocations.was_last:
            return failed
    raise AssertionError(f"{name}: no end")


def main():
    allocations = {"memory": Memory, "objects": Objects}[sys.argv[1]]()
    sys.unraisablehook = lambda told: unraisable.append(str(told.exc_value))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in sys.argv[2:] or OPERATIONS:
            failed = run(name, allocations)
            gc.collect()
            print(f"{name}: {failed}", flush=True)
            assert not unraisable, unraisable
            assert set(os.listdir(folder)) <= {PATH}, "files are left behind"
        os.chdir("/")


if __name__ == "__main__":
    main()
