"""Every storage format in every kind of cache, once: for tools under which the test suite would take days.

Written, read, attended, forked, cut, saved and loaded; what attention tells is compared with NumPy's on the decoded rows.
"""

import tempfile
from pathlib import Path

import numpy as np

import kvfast
from kvfast import KVFormat

HEADS, DIM, TOKENS = 2, 40, 150
FORMATS = [
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "k8v4",
    "int4",
    "int4-plain",
    KVFormat("int4", rotation="kv", codebook="gaussian", centring=True, block_size=32),
    KVFormat("int5/int3", rotation="kv", codebook="gaussian"),
    KVFormat("int4/int8", per_channel=True, block_size=32, num_first_float_tokens=2),
]
rng = np.random.default_rng(0)


def exact(cache, q):
    """Attention of the last token over what a cache of one layer holds."""
    k, v = np.repeat(cache.k(0), 2, 1), np.repeat(cache.v(0), 2, 1)
    weights = np.exp(np.einsum("hd,thd->ht", q[0], k, dtype=np.float64) * DIM**-0.5)
    return np.einsum("ht,thd->hd", weights / weights.sum(-1, keepdims=True), v)


def fill(cache, n):
    cache.append(0, *rng.standard_normal((2, n, HEADS, DIM), np.float32))
    cache.advance(n)
    return cache


def check(cache, folder):
    for n in (TOKENS, 1, 1):
        fill(cache, n)
    q = rng.standard_normal((1, 2 * HEADS, DIM), np.float32)
    snapshot, before = cache.snapshot(), cache.attend(0, q, num_threads=2)
    if not isinstance(cache, kvfast.RingKVCache):
        assert np.abs(before - exact(cache, q)).max() < 0.02
    fill(cache, 40)
    cache.attend(0, rng.standard_normal((3, 2 * HEADS, DIM), np.float32))
    cache.restore(snapshot)
    assert np.array_equal(cache.attend(0, q), before)
    cache.save(folder / "cache.safetensors")
    assert np.array_equal(kvfast.load(folder / "cache.safetensors").attend(0, q), before)
    assert np.array_equal(cache.copy().attend(0, q), before)
    cache.truncate(len(cache) - 2)
    cache.clear()


with tempfile.TemporaryDirectory() as folder:
    for form in FORMATS:
        pool = kvfast.PagedKVCache(1, HEADS, DIM, num_blocks=40, dtype=form)
        for cache in (
            kvfast.KVCache(1, HEADS, DIM, dtype=form),
            kvfast.KVCache(1, HEADS, DIM, 400, dtype=form),
            kvfast.RingKVCache(1, HEADS, DIM, sliding_window=60, num_sink_tokens=4, rollback=50, dtype=form),
            pool.new_sequence(),
        ):
            check(cache, Path(folder))
        with fill(pool.new_sequence(), 50) as sequence, sequence.fork() as fork:
            fill(fork, 3)
            pool.attend_batch(0, rng.standard_normal((2, 2 * HEADS, DIM), np.float32), [sequence, fork], cu_seqlens_q=[0, 1, 2])
latent = kvfast.MLAKVCache(1, 48, 16, 200)
latent.append(0, rng.standard_normal((70, 64), np.float32))
latent.advance(70)
latent.attend(0, rng.standard_normal((1, 4, 64), np.float32))
print(f"{kvfast.active_isa()}: {len(FORMATS)} storage formats in every kind of cache")
