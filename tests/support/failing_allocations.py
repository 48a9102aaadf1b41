"""Makes each allocation of an operation fail in turn: MemoryError, and everything as it was; then the operation succeeds.

``python failing_allocations.py memory``, with failing_malloc.c preloaded, lets fail what kvfast's modules ask the C library
for; ``python failing_allocations.py objects`` all that Python asks for itself, by CPython's own ``_testcapi``. Tells how many
allocations of each operation have failed. Names of operations may follow.
"""

import ctypes
import gc
import os
import sys
import tempfile

import numpy as np
from cache_kinds import DIM, HEADS, LAYERS, QUERIES, make, normals, tokens

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
            operation(subject)
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
            operation(subject)
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


def fill(cache, seed, n):
    """The cache, with the same tokens each time: it is made again for each allocation."""
    for layer in range(LAYERS):
        cache.append(layer, *normals(seed, (LAYERS, 2, n, HEADS, DIM))[layer])
    cache.advance(n)
    return cache


class Cache:
    """A cache with some tokens, and another that shares or has shared its blocks."""

    def __init__(self, kind, fmt):
        self.cache = fill(make(kind, fmt), 1, 90)
        self.snapshot = self.cache.snapshot()
        self.foreign = fill(make(kind, fmt), 2, 130).snapshot()

    def seen(self):
        told = seen(self.cache)
        if self.cache.is_paged:
            told.append(self.cache.pool.num_free_blocks)
        return told


def append(self):
    self.cache.append(1, *ROWS)


def append_one(self):
    self.cache.append(0, *ROWS[:, :1])


def write(self):
    self.cache.write(0, np.ones((3, 4 * HEADS * DIM), np.float32))


def advance(self):
    # What comes before it is not to fail; a second call finds it done.
    self.cache.advance(100)


def both_layers(self):
    for layer in range(LAYERS):
        self.cache.append(layer, *ROWS)


def attend(self):
    return self.cache.attend(0, QUERIES, return_lse=True)


def prefill(self):
    return self.cache.attend(0, np.ones((40, 8, DIM), np.float32), num_splits=3)


def explain(self):
    return self.cache.explain(0, QUERIES.shape)


def copy(self):
    self.copied = self.cache.copy()


def truncate(self):
    self.cache.truncate(85)


def keep_branch(self):
    self.cache.truncate(85, [1, 4])


def clear(self):
    self.cache.clear()


def snapshot(self):
    self.snapshot = self.cache.snapshot([1] * 90)


def restore(self):
    self.cache.restore(self.snapshot)


def restore_foreign(self):
    self.cache.restore(self.foreign)


def state(self):
    self.arrays = self.cache.state_dict()


def from_state(self):
    kvfast.Snapshot.from_state_dict(self.arrays)


def keys(self):
    return self.cache.k(0), self.cache.v(1)


def save(self):
    self.cache.save(self.path)


def load(self):
    self.loaded = kvfast.load(self.path)


def with_file(self):
    self.path = os.path.join(self.folder.name, "cache")
    self.cache.save(self.path)


ROPE = kvfast.Rope()


def splice(self):
    self.cache.splice(self.foreign, self.snapshot, rope=ROPE)


def drop(self):
    self.cache.drop(5, 75, rope=ROPE)


def attend_spliced(self):
    return self.cache.attend(0, QUERIES, return_lse=True)


def drop_spliced(self):
    self.cache.drop(60, 150, rope=ROPE)


def truncate_spliced(self):
    self.cache.truncate(200)


def copy_spliced(self):
    self.copied = self.cache.copy(), self.cache.fork()


def restore_spliced(self):
    self.cache.restore(self.spliced)


def another_spliced(self):
    kind = "growing" if not self.cache.is_paged else "sequence"
    other = fill(make(kind, self.cache.format), 3, 100)
    other.drop(10, 30, rope=ROPE)
    self.spliced = other.snapshot()


class Pool:
    """A pool with sequences that share blocks, and known prefixes."""

    def __init__(self, fmt):
        self.pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=400, dtype=fmt)
        self.one = fill(self.pool.new_sequence(), 1, 90)
        self.ids = np.arange(300)
        self.known = self.pool.new_sequence()
        for layer in range(LAYERS):
            self.known.append(layer, *normals(2, (LAYERS, 2, 300, HEADS, DIM))[layer])
        self.known.advance(300, self.ids)
        self.freed = fill(self.pool.new_sequence(), 3, 40)
        self.freed.free()
        self.child = self.one.fork()
        self.foreign = fill(kvfast.KVCache(LAYERS, HEADS, DIM, dtype=fmt), 4, 100).snapshot()
        self.born = None

    def seen(self):
        told = [self.pool.num_free_blocks, self.pool.num_cached_blocks, self.pool._batches.owners().tobytes()]
        for one in (self.one, self.known, self.child):
            told += ["freed"] if one._storage.closed else seen(one)
        return told + ([] if self.born is None else seen(self.born))


def new_sequence(self):
    self.born = self.pool.new_sequence()


def fork(self):
    self.born = self.one.fork()


def match(self):
    self.born = self.pool.match_prefix(self.ids)


def restore_into_pool(self):
    self.born = self.pool.restore(self.foreign)


def free(self):
    self.known.free()


def append_shared(self):
    self.child.append(0, *ROWS)


def slots(self):
    self.slots = self.pool.slot_mapping([self.one, self.child, self.known], [20, 5, 70])


def append_batch(self):
    self.pool.append_batch(0, *ROWS[:, :95], self.slots)


def attend_batch(self):
    return self.pool.attend_batch(0, np.ones((3, 4, DIM), np.float32), [self.one, self.child, self.known])


def more_for_known(self):
    for layer in range(LAYERS):
        self.known.append(layer, *ROWS)


def advance_known(self):
    self.known.advance(100, np.arange(100))


def truncate_known(self):
    self.known.truncate(100)


def keep_known(self):
    self.known.truncate(290, [1, 4])


class Latent:
    def __init__(self):
        self.cache = kvfast.MLAKVCache(2, 64, 16)
        self.rows = np.random.default_rng(3).standard_normal((100, 80), np.float32)
        for layer in range(2):
            self.cache.append(layer, self.rows)
        self.cache.advance(100)

    def seen(self):
        return seen(self.cache)


def append_latent(self):
    self.cache.append(0, self.rows)


def attend_latent(self):
    return self.cache.attend(0, np.ones((20, 32, 80), np.float32))


class ManyHeads:
    def __init__(self):
        self.cache = kvfast.MultiHeadKVCache(3, MultiHeadConfig(head_dim=DIM, bits=5, num_q_heads=6))
        for row in np.random.default_rng(4).standard_normal((64, 2, 3, DIM), np.float32):
            self.cache.push_token(*row)

    def seen(self):
        return [len(self.cache), self.cache.k().tobytes(), self.cache.v().tobytes()]


def push(self):
    self.cache.push_token(*np.ones((2, 3, DIM), np.float32))


def scores(self):
    return self.cache.attention_scores(np.ones((6, DIM), np.float32), softmax=True), self.cache.head(1).attend(
        np.ones((2, DIM), np.float32)
    )


def evict(self):
    self.cache.evict_outside_window(10)


class Plain:
    def __init__(self):
        self.x = np.random.default_rng(5).standard_normal((40, 2, 20), np.float32)

    def seen(self):
        return [self.x.tobytes()]


def codecs(self):
    return kvfast.dequantize(*kvfast.quantize(self.x, 4), head_dim=20)


def attention(self):
    return kvfast.attention(self.x, self.x, self.x)


def compress(self):
    compressor = compression.KVCacheCompressor(compression.VectorQuantization(codebook_size=16))
    return compressor.compress_kv_3d(self.x.swapaxes(0, 1), self.x.swapaxes(0, 1)).attend(self.x)


def make_cache(self):
    return make("growing"), make("ring of two windows"), make("sequence"), kvfast.MLAKVCache(2, 64, 16)


# Each: how to make the subject, what is done before, and the operation.
OPERATIONS = {}
for _kind in ("growing", "bounded", "sequence", "ring with sinks", "ring of two windows", "ring that rotates"):
    for _format in FORMATS:
        for _before, _operation in (
            (None, append),
            (None, append_one),
            (both_layers, advance),
            (None, attend),
            (None, prefill),
            (None, copy),
            (None, truncate),
            (None, snapshot),
            (append, restore),
            (append, restore_foreign),
            (None, keys),
            (None, state),
        ):
            OPERATIONS[f"{_operation.__name__}, {_kind}, {_format}"] = lambda k=_kind, f=_format: Cache(k, f), _before, _operation
for _kind in ("growing", "sequence"):
    for _format in FORMATS:
        for _before, _operation in (
            (None, splice),
            (None, drop),
            (splice, attend_spliced),
            (splice, drop_spliced),
            (splice, truncate_spliced),
            (splice, copy_spliced),
            (another_spliced, restore_spliced),
        ):
            OPERATIONS[f"{_operation.__name__}, {_kind}, {_format}"] = lambda k=_kind, f=_format: Cache(k, f), _before, _operation
for _kind in ("growing", "sequence", "ring of two windows"):
    for _format in FORMATS:
        OPERATIONS[f"keep_branch, {_kind}, {_format}"] = lambda k=_kind, f=_format: Cache(k, f), None, keep_branch
for _before, _operation in ((None, write), (None, explain), (None, clear), (state, from_state), (with_file, save), (with_file, load)):
    OPERATIONS[_operation.__name__] = lambda: Cache("growing", "int4"), _before, _operation
for _format in FORMATS:
    for _before, _operation in (
        (None, new_sequence),
        (None, fork),
        (None, match),
        (None, restore_into_pool),
        (None, free),
        (None, append_shared),
        (None, slots),
        (slots, append_batch),
        (None, attend_batch),
        (more_for_known, advance_known),
        (None, truncate_known),
        (None, keep_known),
    ):
        OPERATIONS[f"{_operation.__name__}, pool, {_format}"] = lambda f=_format: Pool(f), _before, _operation
for _subject, _operation in (
    (Latent, append_latent),
    (Latent, attend_latent),
    (ManyHeads, push),
    (ManyHeads, scores),
    (ManyHeads, evict),
    (Plain, codecs),
    (Plain, attention),
    (Plain, compress),
    (Plain, make_cache),
):
    OPERATIONS[_operation.__name__] = _subject, None, _operation


def subject_of(name, folder):
    subject, before, operation = OPERATIONS[name]
    made = subject()
    made.folder = folder
    if before is not None:
        before(made)
    return made, operation


def run(name, allocations, folder):
    """How many allocations have failed, one at a time."""
    made, operation = subject_of(name, folder)
    operation(made)
    expected, failed = made.seen(), 0
    before = subject_of(name, folder)[0].seen()
    for skipped in range(100000):
        made, operation = subject_of(name, folder)
        if not allocations(operation, made, skipped):
            failed += 1
            assert made.seen() == before, f"{name}: the allocation after {skipped} left something behind"
            operation(made)
        assert made.seen() == expected, f"{name}: after the allocation after {skipped} failed, the result is another"
        if allocations.was_last:
            return failed
    raise AssertionError(f"{name}: no end")


def main():
    allocations = {"memory": Memory, "objects": Objects}[sys.argv[1]]()
    sys.unraisablehook = lambda told: unraisable.append(str(told.exc_value))
    with tempfile.TemporaryDirectory() as folder_name:
        folder = type("Folder", (), {"name": folder_name})
        for name in sys.argv[2:] or OPERATIONS:
            failed = run(name, allocations, folder)
            gc.collect()
            print(f"{name}: {failed}", flush=True)
            assert not unraisable, unraisable
            assert set(os.listdir(folder_name)) <= {"cache"}, "files are left behind"


if __name__ == "__main__":
    main()
