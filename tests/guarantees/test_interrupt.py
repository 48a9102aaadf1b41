"""Ctrl-C in the middle of a long call: it ends at once, and the cache is what it was."""

import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
from cache_kinds import filled
from kvfast.storage.sequences.heads import push
from selection import parametrize

import kvfast
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.compression import pq_training as codebook

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals of POSIX")

HEADS, DIM = 8, 128
LONG = 1 << 17


@pytest.fixture(autouse=True)
def slow_tier():
    """Calls that take seconds with little memory."""
    with kvfast.use_isa("scalar"):
        yield


def ctrl_c(call, after=0.05):
    """Seconds from Ctrl-C, `after` seconds from the start of a call, to the end of the call, which must take longer if left alone."""
    sent, ended = [], False

    def send():
        time.sleep(after)
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        call()
        ended = True
        thread.join()
        time.sleep(0.1)
    except KeyboardInterrupt:
        seconds = time.perf_counter() - sent[0]
    assert not ended, "the call came to its end before Ctrl-C"
    return seconds


def long_rows(rng, tokens, heads=HEADS):
    """As long an array as is wanted, of little memory: its tokens are copies of each other."""
    return np.broadcast_to(rng.standard_normal((1, heads, DIM), np.float32), (tokens, heads, DIM))


@parametrize(
    ("dtype", "num_threads"),
    list(itertools.product(["float16", "int8", "int4"], [1, 2])),
    usual=[("float16", 1), ("int8", 2), ("int4", 1), ("int4", 2)],
)
def test_prefill(rng, dtype, num_threads):
    cache = filled(kvfast.KVCache(1, HEADS, DIM, dtype=dtype), *rng.standard_normal((2, 4096, HEADS, DIM), np.float32))
    out = np.empty((4096, 4 * HEADS, DIM), np.float16)
    q = long_rows(rng, 4096, 4 * HEADS)
    before = cache.attend(0, q[:1])
    assert ctrl_c(lambda: cache.attend(0, q, out=out, num_threads=num_threads)) < 1
    assert np.array_equal(cache.attend(0, q[:1]), before)


@pytest.mark.parametrize("tokens", [1, 200])
def test_attention_over_a_long_context(rng, tokens):
    k = np.ascontiguousarray(long_rows(rng, LONG))
    q = rng.standard_normal((tokens, 64 * HEADS, DIM), np.float32)
    assert ctrl_c(lambda: kvfast.attention(q, k, k, num_splits=1, num_threads=1)) < 1


def test_batch(rng):
    pool = kvfast.PagedKVCache(1, HEADS, DIM, num_blocks=130)
    sequence = pool.new_sequence()
    sequence.append(0, *rng.standard_normal((2, 4096, HEADS, DIM), np.float32))
    q = long_rows(rng, 4096, 4 * HEADS)
    assert ctrl_c(lambda: pool.attend_batch(0, q, [sequence], cu_seqlens_q=[0, 4096])) < 1
    assert pool.attend_batch(0, q[:1], [sequence]).shape == q[:1].shape


@parametrize(
    ("dtype", "kind"),
    list(itertools.product(["int8", "int5", "int4"], ["contiguous", "paged"])),
    usual=[("int8", "contiguous"), ("int5", "paged"), ("int4", "contiguous"), ("int4", "paged")],
)
def test_append(rng, kind, dtype):
    """Nothing of it has happened; and then it does."""
    caches = []
    for _ in range(2):
        if kind == "contiguous":
            caches.append(kvfast.KVCache(1, HEADS, DIM, dtype=dtype))
        else:
            pool = kvfast.PagedKVCache(1, HEADS, DIM, num_blocks=LONG // 32 + 4, dtype=dtype)
            caches.append(pool.new_sequence())
        filled(caches[-1], *rng.standard_normal((2, 70, HEADS, DIM), np.float32))
        caches[-1].restore(caches[0].snapshot())
    cache, other = caches
    blocks = cache.block_indices().tolist()
    k = long_rows(rng, LONG)
    assert ctrl_c(lambda: cache.append(0, k, k)) < 1
    assert len(cache) == cache.layer_length(0) == 70 and cache.block_indices().tolist() == blocks
    assert np.array_equal(cache.k(0), other.k(0))
    for one in caches:
        filled(one, k[:300], k[:300])
    assert np.array_equal(cache.k(0), other.k(0)) and np.array_equal(cache.v(0), other.v(0))


def test_sealing_a_long_prompt(rng):
    """Blocks that are encoded as a whole are so when they are full: all, or none. Then no token is appended."""
    cache, other = (kvfast.KVCache(1, HEADS, DIM, dtype="int4") for _ in range(2))
    tokens = rng.standard_normal((2, 1 << 14, HEADS, DIM), np.float32)
    assert ctrl_c(lambda: cache.append(0, *tokens), 0.03) < 1
    assert cache.layer_length(0) == 0
    with kvfast.use_isa(kvfast.available_isas()[0]):
        for one in (cache, other):
            filled(one, *tokens)
        assert cache.snapshot() == other.snapshot()


@parametrize("read", ["k", "v", "copy"], usual=["k"])
def test_reading_and_copying(rng, read):
    cache = kvfast.KVCache(1, HEADS, DIM, dtype="int5")
    with kvfast.use_isa(kvfast.available_isas()[0]):
        cache.append(0, *(long_rows(rng, LONG),) * 2)
    arguments = () if read == "copy" else (0,)
    assert ctrl_c(lambda: [getattr(cache, read)(*arguments) for _ in range(50)]) < 1
    cache.truncate(0)
    assert cache.layer_length(0) == 0


def test_write_of_a_fused_projection(rng):
    cache = kvfast.KVCache(1, HEADS, DIM, dtype="int8")
    qkv = np.broadcast_to(rng.standard_normal((1, 6 * HEADS * DIM), np.float32), (LONG // 2, 6 * HEADS * DIM))
    angles = np.ones((LONG // 2, DIM // 2), np.float32)
    out = np.empty((LONG // 2, 4 * HEADS, DIM), np.float16)
    norm = np.ones(DIM, np.float32)
    assert ctrl_c(lambda: cache.write(0, qkv, cos=angles, sin=angles, q_norm=norm, out=out)) < 1
    assert cache.layer_length(0) == 0


def test_codecs(rng):
    x = rng.standard_normal((1 << 18, 256), np.float32)
    assert ctrl_c(lambda: [kvfast.quantize(x, 4) for _ in range(20)]) < 1
    codes, scales = kvfast.quantize(x, 4)
    assert ctrl_c(lambda: [kvfast.dequantize(codes, scales) for _ in range(40)]) < 1


def test_training_of_codebooks(rng):
    points = rng.standard_normal((4, DIM, 16384), np.float32)
    bounds = np.tile(np.arange(0, DIM + 1, 4, dtype=np.int32), (4, 1))
    assert ctrl_c(lambda: codebook.train(points, 16384, bounds, 256, 0)) < 1
    centroids = rng.standard_normal((4, 256 * DIM), np.float32)
    assert ctrl_c(lambda: [codebook.encode(points, 16384, bounds, 256, centroids) for _ in range(20)]) < 1


def test_heads(rng):
    cache = kvfast.MultiHeadKVCache(2, MultiHeadConfig(head_dim=DIM, bits=5, num_q_heads=512))
    with kvfast.use_isa(kvfast.available_isas()[0]):
        push(cache._storage, *(long_rows(rng, LONG, 2),) * 2)
    q = rng.standard_normal((512, DIM), np.float32)
    assert ctrl_c(lambda: cache.attention_scores(q, softmax=True)) < 1
    assert len(cache) == LONG


def test_handlers_run_and_the_call_goes_on(rng):
    """A handler that does not raise is called in the middle; the result is what it would have been."""
    cache = kvfast.KVCache(1, HEADS, DIM, dtype="int8")
    cache.append(0, *rng.standard_normal((2, 1024, HEADS, DIM), np.float32))
    q = long_rows(rng, 512, 4 * HEADS)
    expected, alone, seen = cache.attend(0, q), cache.attend(0, q[-1:]), []

    def handler(*_):
        with pytest.raises(RuntimeError, match="in use"):  # by the call that it interrupts
            cache.truncate(0)
        assert np.array_equal(cache.attend(0, q[-1:]), alone)  # reading goes with reading
        seen.append(time.perf_counter())

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        out = cache.attend(0, q)
        end = time.perf_counter()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert np.array_equal(out, expected) and len(seen) == 1 and seen[0] < end
