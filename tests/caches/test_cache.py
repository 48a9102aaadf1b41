"""KVCache: what is stored, and what the object tells."""

import copy
import gc

import numpy as np
import pytest
from cache_kinds import DTYPES, PLAIN, filled

import kvfast


def rows(rng, n, num_kv_heads=2, head_dim=24):
    return rng.standard_normal((n, num_kv_heads, head_dim)).astype(np.float32)


@pytest.mark.parametrize("max_seq_len", [None, 700])
@pytest.mark.parametrize("dtype", PLAIN)
def test_stores_what_the_codec_makes(isa, rng, dtype, max_seq_len):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    cache = kvfast.KVCache(2, 2, 24, max_seq_len=max_seq_len, dtype=dtype)
    k, v = rows(rng, 600), rows(rng, 600)
    for start, stop in [(0, 1), (1, 3), (3, 63), (63, 65), (65, 600)]:
        filled(cache, each=[(k[start:stop] + layer, v[start:stop] - layer) for layer in range(2)])
    for layer in range(2):
        for stored, given in ((cache.k(layer), k + layer), (cache.v(layer), v - layer)):
            if dtype in ("int8-plain", "int4-plain"):
                codes, scales = kvfast.quantize(given, bits=int(dtype[3]))
                expected = kvfast.dequantize(codes, scales, head_dim=24)
            else:
                expected = given.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).astype(np.float32)
            assert np.array_equal(stored, expected)


@pytest.mark.parametrize("dtype", ["int8", "int4", "float16"])
def test_large_output_is_written_past_the_caches(rng, dtype):
    """k() and v() of 16 MiB and more are those of a small cache."""
    rows = rng.standard_normal((2, 9000, 8, 62), np.float32)
    small, large = (kvfast.KVCache(1, 8, 62, dtype=dtype) for _ in range(2))
    for cache, n in ((small, 1000), (large, 9000)):
        for first in range(0, n, 1000):
            filled(cache, *rows[:, first : first + 1000])
    coded = 832  # whole blocks; what is newer is float rows in the small cache
    for read in (kvfast.KVCache.k, kvfast.KVCache.v):
        assert read(large, 0).nbytes >= 16 << 20
        assert np.array_equal(read(large, 0)[:coded], read(small, 0)[:coded])
        assert np.abs(read(large, 0) - rows[int(read is kvfast.KVCache.v)]).max() < 0.8


def test_float32_is_a_read_only_view(rng):
    cache = kvfast.KVCache(2, 3, 20, max_seq_len=100, dtype="float32")
    k = rows(rng, 70, 3, 20)
    cache.append(1, k, k + 1)
    view = cache.k(1)
    assert np.array_equal(view, k) and np.array_equal(cache.v(1), k + 1) and not view.flags.writeable
    cache.append(1, k[:1], k[:1])
    assert np.shares_memory(view, cache.k(1)) and cache.k(0).shape == (0, 3, 20)
    del cache
    gc.collect()
    assert np.array_equal(view, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_advance_truncate_clear(rng, dtype):
    cache = kvfast.KVCache(2, 2, 24, dtype=dtype)
    assert len(cache) == 0 and not cache
    k = rows(rng, 100)
    cache.append(0, k, k)
    assert len(cache) == 0 and cache.layer_length(0) == 100 and cache.layer_length(1) == 0
    cache.append(1, k[:99], k[:99])
    with pytest.raises(ValueError, match="layer 1 has 99"):
        cache.advance(100)
    cache.append(1, k[99:], k[99:])
    cache.advance(100)
    assert len(cache) == 100 and cache
    cache.append(0, k[:5], k[:5])
    before = cache.k(0)
    cache.truncate(70)
    assert len(cache) == 70 and cache.layer_length(0) == cache.layer_length(1) == 70
    assert np.array_equal(cache.k(0), before[:70])
    cache.append(0, k[70:], k[70:])
    assert np.array_equal(cache.k(0), before[:100])
    held = cache.nbytes
    cache.clear()
    assert len(cache) == 0 and cache.nbytes == held
    filled(cache, k, k)
    assert np.array_equal(cache.k(0), before[:100])


@pytest.mark.parametrize("max_seq_len", [None, 80])
@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda cache: cache.copy()])
def test_copies_are_independent(rng, copier, max_seq_len):
    cache = kvfast.KVCache(1, 2, 24, max_seq_len=max_seq_len, k_dtype="int8", v_dtype="int4")
    k = rows(rng, 70)
    filled(cache, k, k)
    other = copier(cache)
    q = rows(rng, 3, 4)
    assert np.array_equal(other.attend(0, q), cache.attend(0, q)) and len(other) == 70 and other.dtype == cache.dtype
    before = cache.k(0)
    other.truncate(10)
    other.append(0, k[:60] * 2, k[:60])
    assert np.array_equal(cache.k(0), before) and not np.array_equal(other.k(0), before)


def test_sizes_and_dtypes():
    cache = kvfast.KVCache(32, 8, 128, max_seq_len=128, dtype="int8")
    assert cache.bytes_per_token == 32 * 8 * 2 * (128 + 4)
    assert 128 * cache.bytes_per_token <= cache.nbytes <= 1.01 * 128 * cache.bytes_per_token
    assert cache.entry_size == 1024 and cache.max_seq_len == 128
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (32, 8, 128)
    assert repr(cache) == "KVCache(int8, 32 layers x 8 heads x 128, 0/128 tokens, 8.2 MiB)"
    # Each block has an offset and a scale for 32 channels of the keys, float16, and a scale of each token's values, float16.
    assert kvfast.KVCache(1, 1, 20, dtype="int4").bytes_per_token == 2 * 16 + 32 * 4 // 64 + 2
    grows = kvfast.KVCache(1, 1, 20, dtype="int4-plain")
    assert grows.nbytes == 0 and grows.max_seq_len is None and grows.bytes_per_token == 2 * (16 + 4)
    mixed = kvfast.KVCache(3, 1, 16, k_dtype=["f16", "i8", "I8"], v_dtype=np.dtype("float32"))
    assert mixed.k_dtype == ("float16", "int8", "int8") and mixed.v_dtype == "float32"
    assert mixed.dtype == ("float16/float32", "int8/float32", "int8/float32") and "mixed" in repr(mixed)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("fp32", "float32"), ("half", "float16"), ("F16", "float16"), ("bf16", "bfloat16"), ("i8", "int8"), ("q4", "int4")],
)
def test_aliases(alias, name):
    assert kvfast.KVCache(1, 1, 16, dtype=alias).dtype == name


def test_input_dtypes_and_layouts(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    k = rows(rng, 9).astype(ml_dtypes.bfloat16).astype(np.float32)
    frozen = k.copy()
    frozen.flags.writeable = False
    wide = np.zeros((9, 2, 48), np.float32)
    wide[:, :, ::2] = k
    same = [
        *(frozen, np.asfortranarray(k), wide[:, :, ::2], k[::-1].copy()[::-1]),
        *(k[:, :, ::-1].copy()[:, :, ::-1], k.astype(ml_dtypes.bfloat16)),
        *(k.astype(ml_dtypes.bfloat16).view(np.uint16), memoryview(k)),
    ]
    for array in same:
        cache = kvfast.KVCache(1, 2, 24, dtype="float32")
        cache.append(0, array, array)
        assert np.array_equal(cache.k(0), k) and np.array_equal(cache.v(0), k)
        assert np.array_equal(cache.attend(0, array), cache.attend(0, k))
    half = k.astype(np.float16)
    cache = kvfast.KVCache(1, 2, 24, dtype="float16")
    cache.append(0, half, half)
    assert np.array_equal(cache.k(0), half.astype(np.float32))
