"""Memory: allocations that fail, sizes beyond all memory, and nothing that leaks."""

import gc
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cache_kinds import KINDS, fill, filled, make
from failing_allocations import OPERATIONS
from selection import parametrize

import kvfast
from kvfast.caches.multi_head import MultiHeadConfig

SUPPORT = Path(__file__).parents[1] / "support"


def failing(mode, *names, **environment):
    """Number of allocations that failed, by operation."""
    done = subprocess.run(
        [sys.executable, SUPPORT / "failing_allocations.py", mode, *names],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    return {name: int(count) for name, _, count in (line.rpartition(": ") for line in done.stdout.splitlines())}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or shutil.which("cc") is None, reason="needs glibc and a compiler")
@parametrize("which", ["some", "all"], usual=["some"])
def test_every_allocation_of_the_modules(tmp_path, which):
    shim = tmp_path / "failing_malloc.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, SUPPORT / "failing_malloc.c", "-ldl"], check=True)
    some = ["append, growing, int4", "attend_batch, pool, int4", "codecs", "splice, growing, int4", "attend_spliced, growing, int4"]
    failed = failing("memory", *(some if which == "some" else []), LD_PRELOAD=str(shim), KVFAST_NUM_THREADS="1")
    assert [failed[name] >= least for name, least in zip(some, (3, 2, 2, 2, 1))] == [True] * 5
    assert which == "some" or len(failed) > 100 and sum(failed.values()) > 500


@parametrize("which", ["some", "all"], usual=["some"])
def test_every_object(which):
    """What Python asks for itself. (Of files it is not tried: safetensors panics. Nor of `advance` with token ids, where it may
    cost what is known of a prefix, and nothing else.)"""
    if not hasattr(pytest.importorskip("_testcapi"), "set_nomemory"):
        pytest.skip("needs CPython's own tests")
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        pytest.skip("without a GIL, CPython 3.13 damages its heap where (lambda *a: a)(1, *array) finds no memory")
    if which == "some":
        names = ["append, growing, int4", "keep_branch, sequence, int4", "fork, pool, int4", "attend_batch, pool, int4", "attention"]
    else:
        other = re.compile("bounded|rotates|advance_known|free, pool|(clear|from_state|save|load|evict|compress)$|, (?!int4$)[^,]+$")
        names = [*filter(lambda name: not other.search(name), OPERATIONS)]
        names += [f"{operation}, ring that rotates, int4" for operation in ("append_one", "attend")]
    failed = failing("objects", *names, KVFAST_NUM_THREADS="1")
    assert failed.keys() == set(names) and sum(failed.values()) > (5000 if which == "all" else 50)


def resident():
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_leaks():
    """KVFAST_CYCLES: how often each kind of cache is made, filled, forked and freed."""
    cycles, rng = int(os.environ.get("KVFAST_CYCLES", "300")), np.random.default_rng(0)
    pool = kvfast.PagedKVCache(2, 2, 20, num_blocks=64)
    ids = np.arange(100)

    def cycle(i):
        cache = fill(make(KINDS[i % len(KINDS)]), rng, 40)
        other, snapshot = cache.copy(), cache.snapshot()
        fill(cache, rng, 30)
        cache.restore(snapshot)
        with pytest.raises(kvfast.NonFiniteInputError):
            other.append(0, *np.full((2, 100, 2, 20), np.inf, np.float32))
        sequence = pool.new_sequence()
        fill(sequence, rng, 100, token_ids=ids + i)
        child = sequence.fork()
        fill(child, rng, 5)
        child.attend(0, np.ones((1, 4, 20), np.float32))
        if i % 2:  # else Python collects them
            sequence.free()
            child.free()

    for i in range(max(50, cycles // 10)):
        cycle(i)
    gc.collect()
    before = resident()
    for i in range(cycles):
        cycle(i)
    gc.collect()
    assert pool.num_free_blocks == 64 and pool.num_sequences == 0 and pool.usage == 0
    assert resident() - before < 4e6, f"{cycles} cycles left {resident() - before:,} bytes"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_when_it_is_written():
    """And given back with the cache: the C library would keep it for the next one, and zero it then."""
    rows = np.ones((4000, 8, 128), np.float32)
    before = resident()
    for _ in range(3):
        used = kvfast.KVCache(1, 8, 128, 4000, "float16")  # 16 MB
        used.append(0, rows, rows)
        del used
    caches = [kvfast.KVCache(1, 8, 128, 4000, "float16") for _ in range(4)]
    assert resident() - before < 8e6 and len(caches[0]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["int8", "int4", "float32"])
def test_small_caches_take_little_and_give_it_back(dtype):
    rows = np.ones((3, 1, 64), np.float32)

    def small():
        return filled(kvfast.KVCache(1, 1, 64, dtype=dtype), rows, rows)

    one = small()
    assert one.nbytes <= max(2 * 4096, one.nbytes_used) * 1.6
    before = resident()
    caches = [small() for _ in range(2000)]
    taken = resident() - before
    assert taken < 2000 * 60_000 if dtype == "float32" else taken < 2000 * 32_000
    del caches
    gc.collect()
    assert resident() - before < 0.25 * taken


@pytest.mark.parametrize("step", [1, 7, 100])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_growing_cache_grows_by_half(step, dtype):
    """However small it begins, it takes few steps to any length."""
    cache, sizes = kvfast.KVCache(1, 2, 20, dtype=dtype), []
    rows = np.ones((step, 2, 20), np.float32)
    for _ in range(4000 // step):
        filled(cache, rows, rows)
        sizes.append(cache.nbytes)
    assert len(set(sizes)) < 25 and sizes[-1] < 2.5 * cache.nbytes_used
    assert sizes[0] <= sizes[-1] / 20 or step > cache.block_size


@pytest.mark.parametrize("dtype", ["int8", "int4", "float16"])
@pytest.mark.parametrize("begun", [0, 3, 100])
def test_a_ring_gives_the_memory_of_a_prompt_back(dtype, begun):
    """With the step that ends it, however it began, and with `clear`; what it holds is the same."""
    rows = np.random.default_rng(0).standard_normal((2, 8192, 2, 64), np.float32)
    small, ring, whole = (kvfast.RingKVCache(1, 2, 64, sliding_window=512, num_sink_tokens=4, dtype=dtype) for _ in range(3))
    for first in range(0, 8192, 64):
        filled(small, *rows[:, first : first + 64])
    for n in [*[begun] * (begun > 0), 8192 - begun]:
        filled(ring, *rows[:, len(ring) : len(ring) + n])
    assert ring.nbytes <= 1.2 * small.nbytes and ring.nbytes < 3 * ring.nbytes_used
    assert np.array_equal(ring.k(0), small.k(0)) and np.array_equal(ring.positions(0), small.positions(0))
    q = rows[0, -3:]
    assert np.array_equal(ring.attend(0, q), small.attend(0, q))
    for one in (ring, small):
        filled(one, *rows[:, :200])
    assert np.array_equal(ring.attend(0, q), small.attend(0, q)) and ring.snapshot() == small.snapshot()
    whole.append(0, *rows)
    assert whole.nbytes > 4 * ring.nbytes
    whole.clear()
    assert whole.nbytes <= 1.2 * small.nbytes
    held = ring.snapshot()  # what others own is not moved
    filled(ring, *rows)
    assert np.array_equal(kvfast.load(held).k(0), small.k(0)) and ring.nbytes_used < 2 * small.nbytes


HUGE = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)


@pytest.mark.parametrize("size", HUGE)
def test_sizes_that_no_memory_has(size):
    """Refused by arithmetic, whatever they are of, and at once."""
    refused = (ValueError, MemoryError)
    for arguments in ((size, 8, 128), (32, size, 128), (32, 8, size), (size, size, size)):
        for make_one in (
            lambda *shape: kvfast.KVCache(*shape, max_seq_len=4096),
            lambda *shape: kvfast.KVCache(*shape),
            lambda *shape: kvfast.PagedKVCache(*shape, num_blocks=64),
            lambda *shape: kvfast.RingKVCache(*shape, sliding_window=64),
            lambda *shape: kvfast.MLAKVCache(shape[0], shape[2], shape[1]),
        ):
            with pytest.raises(refused):
                make_one(*arguments)
    for make_one in (
        lambda: kvfast.KVCache(32, 8, 128, max_seq_len=size),
        lambda: kvfast.KVCache(64, 1 << 16, 512, max_seq_len=size, dtype="float32"),
        lambda: kvfast.KVCache(32, 8, 128, block_size=size),
        lambda: kvfast.PagedKVCache(32, 8, 128, num_blocks=size),
        lambda: kvfast.PagedKVCache(1, 1, 1, num_blocks=size, block_size=256),
        lambda: kvfast.PagedMLAKVCache(1, 512, 64, num_blocks=size),
        lambda: kvfast.MultiHeadKVCache(size, MultiHeadConfig(head_dim=64)),
    ):
        with pytest.raises(refused):
            make_one()


@pytest.mark.parametrize("size", HUGE)
def test_counts_beyond_all_bounds(rng, size):
    """Tokens, splits, windows and threads: refused, or cut to what there is."""
    cache = fill(make("growing"), rng, 40)
    pool = kvfast.PagedKVCache(1, 2, 20, num_blocks=4)
    q = np.ones((1, 4, 20), np.float32)
    expected = cache.attend(0, q)
    for call in (
        lambda: cache.advance(size),
        lambda: cache.truncate(size),
        lambda: cache.attend(0, q, num_threads=size),
        lambda: cache.explain(0, size),
        lambda: cache.explain(0, (size, 4, 20)),
        lambda: cache.explain(0, (1, size, 20)),
        lambda: pool.slot_mapping([pool.new_sequence()], size),
        lambda: pool.append_batch(0, *np.ones((2, 1, 2, 20), np.float32), [size]),
        lambda: pool.attend_batch(0, q, block_table=[[size]], seq_lens=[1]),
        lambda: pool.attend_batch(0, q, block_table=[[0]], seq_lens=[size]),
        lambda: cache.append(size, q[:, :2], q[:, :2]),
        lambda: kvfast.set_num_threads(size),
    ):
        with pytest.raises((ValueError, IndexError, OverflowError, MemoryError, TypeError, kvfast.CacheFullError)):
            call()
    for name in ("num_splits", "sliding_window"):
        try:
            got = cache.attend(0, q, **{name: size})
        except ValueError:
            assert size >= 1 << 30
        else:
            assert np.allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(cache.attend(0, q), expected) and pool.num_free_blocks == 4
    if size < 1 << 60:
        assert not pool.can_append(size)


@pytest.mark.skipif(sys.maxsize < 2**32, reason="needs 64 bits")
def test_a_cache_beyond_32_bits_is_addressed_right():
    """Blocks that lie further than 2^31 and 2^32 bytes apart: memory that nobody touches takes none."""
    tokens, heads, dim = 1 << 19, 8, 128
    try:
        cache = kvfast.KVCache(1, heads, dim, max_seq_len=tokens, dtype="float32")
    except MemoryError:
        pytest.skip("the system gives no memory ahead of its use")
    assert cache.nbytes > 1 << 32
    rows = np.arange(heads * dim, dtype=np.float32).reshape(1, heads, dim)
    filled(cache, rows, -rows)
    assert np.array_equal(cache.k(0), rows) and np.array_equal(cache.v(0), -rows)
    assert np.array_equal(cache.attend(0, rows), -rows)


def test_an_array_of_another_process_memory_limit():
    """Where the system refuses memory (ulimit), a cache of more is a MemoryError, and the process lives on."""
    resource = pytest.importorskip("resource")
    code = (
        "import resource, numpy as np, kvfast\n"
        "cache = kvfast.KVCache(1, 8, 128, dtype='int8')\n"
        "k = np.ones((4096, 8, 128), np.float32)\n"
        "cache.append(0, k, k)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))\n"
        "refused = 0\n"
        "for _ in range(40):\n"
        "    before = cache.layer_length(0)\n"
        "    try:\n"
        "        cache.append(0, k, k)\n"
        "    except MemoryError:\n"
        "        refused += 1\n"
        "        assert cache.layer_length(0) == before\n"
        "try:\n"
        "    kvfast.KVCache(32, 8, 128, max_seq_len=1 << 20)\n"
        "except MemoryError:\n"
        "    refused += 1\n"
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "assert cache.attend(0, np.ones((1, 8, 128), np.float32)).shape == (1, 8, 128)\n"
        "print(refused)\n"
    )
    if sys.platform != "linux" or resource.getrlimit(resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY:
        pytest.skip("needs Linux without a limit")
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "KVFAST_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2
