"""Attention of many query rows, of which a task takes up to 256 of a KV head at a time: by a matrix unit or as words."""

import ml_dtypes
import numpy as np
import pytest
from cache_kinds import CENTRED, filled
from reference import attention, bound, relative_error

import kvfast

HALVES = ["float16", "bfloat16", "float16/bfloat16"]
FORMATS = ["int8", "int8-plain", "int4-plain", "k8v4", "int4", CENTRED, "int8/float16", *HALVES]
WORD_TIERS = ("avx512_vbmi", "avx512_vnni")
needs_amx = pytest.mark.skipif("amx" not in kvfast.available_isas(), reason="this CPU has no matrix unit")


@pytest.fixture(autouse=True)
def tier():
    with kvfast.use_isa(kvfast.available_isas()[0]):
        yield


def stored(rng, dtype, length, num_kv_heads=2, head_dim=64, chunk=100, **settings):
    cache = kvfast.KVCache(1, num_kv_heads, head_dim, dtype=dtype, **settings)
    for start in range(0, length, chunk):
        n = min(chunk, length - start)
        filled(cache, *rng.standard_normal((2, n, num_kv_heads, head_dim), np.float32))
    return cache


@pytest.mark.parametrize("head_dim", [8, 33, 48, 80, 128, 160, 256, 512])
@pytest.mark.parametrize("dtype", FORMATS)
def test_head_dims(rng, dtype, head_dim):
    cache = stored(rng, dtype, 300, head_dim=head_dim)
    q = rng.standard_normal((70, 6, head_dim), np.float32)
    out, lse = cache.attend(0, q, return_lse=True)
    expected, expected_lse = attention(q, cache.k(0), cache.v(0))
    assert relative_error(out, expected) < bound(dtype)
    assert np.abs(lse - expected_lse).max() < 1e-3


@pytest.mark.parametrize("head_dim", [16, 33, 64, 128, 512])
@pytest.mark.parametrize("dtype", HALVES)
def test_floats_are_cut(isa, rng, dtype, head_dim):
    """Far within the contract where they are cut to 17 bits, and within it where a few channels are much larger than the others or
    where they become words."""
    words = isa in WORD_TIERS
    outliers = np.where(np.arange(head_dim) % 13 == 5, 10, 1).astype(np.float32)
    for spread, limit in ((1, 3e-4 if words else 3e-5), (outliers, 1e-3 if words else 3e-4)):
        cache = kvfast.KVCache(1, 2, head_dim, dtype=dtype)
        cache.append(0, *(rng.standard_normal((2, 1500, 2, head_dim), np.float32) * spread))
        q = rng.standard_normal((50, 6, head_dim), np.float32)
        out, lse = cache.attend(0, q, return_lse=True)
        expected, expected_lse = attention(q, cache.k(0), cache.v(0))
        assert relative_error(out, expected) < limit
        assert np.abs(lse - expected_lse).max() < limit


@pytest.mark.parametrize("dtype", HALVES)
def test_masked_floats_leave_no_trace(rng, dtype):
    """Zero values come out as zero, however large those are that a row does not see."""
    k, v = rng.standard_normal((2, 400, 2, 64), np.float32)
    v[:300], v[300:] = 0, 6e4
    cache = kvfast.KVCache(1, 2, 64, dtype=dtype)
    cache.append(0, k, v)
    out = cache.attend(0, rng.standard_normal((150, 6, 64), np.float32))
    assert not out[:50].any() and out[50:].all()


@pytest.mark.parametrize("options", [{}, {"sliding_window": 90}, {"softcap": 3.0, "sliding_window": 200}], ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_row_does_not_depend_on_its_neighbours(rng, dtype, options):
    """Nor on the threads: the same bits in tasks of other sizes, and with other queries, if these are enough for panels."""
    cache = stored(rng, dtype, 700)
    q = rng.standard_normal((300, 6, 64), np.float32)
    out = cache.attend(0, q, num_splits=1, num_threads=1, **options)
    for n in (32, 40, 123):
        for num_threads in (1, 2, 5):
            assert np.array_equal(cache.attend(0, q[-n:], num_splits=1, num_threads=num_threads, **options), out[-n:])


@pytest.mark.parametrize("head_dim", [8, 33, 64, 80, 128, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16/float16"])
def test_queries_in_bfloat16(rng, dtype, head_dim):
    outliers = np.where(np.arange(head_dim) % 13 == 5, 10, 1).astype(np.float32)
    cache = kvfast.KVCache(1, 2, head_dim, dtype=dtype)
    k, v = rng.standard_normal((2, 1500, 2, head_dim), np.float32)
    cache.append(0, k * outliers, v)
    q = rng.standard_normal((50, 6, head_dim), np.float32).astype(ml_dtypes.bfloat16)
    for options in ({}, {"sliding_window": 300, "softcap": 20.0}):
        out, lse = cache.attend(0, q, return_lse=True, **options)
        expected, expected_lse = attention(q.astype(np.float32), cache.k(0), cache.v(0), **options)
        assert relative_error(out, expected) < bound(dtype)
        assert np.abs(lse - expected_lse).max() < 1e-3
        for n, num_threads in ((32, 1), (40, 2), (49, 5)):
            whole = cache.attend(0, q, num_splits=1, **options)
            assert np.array_equal(cache.attend(0, q[-n:], num_splits=1, num_threads=num_threads, **options), whole[-n:])


@pytest.mark.parametrize("rope_dim", [0, 16])
def test_latent_rows_and_queries_in_bfloat16(rng, rope_dim):
    cache = kvfast.MLAKVCache(1, 80, rope_dim, dtype="bfloat16")
    cache.append(0, rng.standard_normal((900, 80 + rope_dim), np.float32))
    q = rng.standard_normal((30, 20, 80 + rope_dim), np.float32).astype(ml_dtypes.bfloat16)
    latent = cache.get_latent(0)[:, None]
    expected = attention(q.astype(np.float32), latent, latent[..., :80], scale=0.1)[0]
    assert relative_error(cache.attend(0, q, scale=0.1), expected) < bound("bfloat16")


@pytest.mark.parametrize("dtype", ["int8", "k8v4", "int4-plain", *HALVES])
def test_block_sizes(rng, dtype):
    """The same bits in blocks of every size, contiguous and paged."""
    k, v = rng.standard_normal((2, 500, 2, 64), np.float32)
    q = rng.standard_normal((90, 6, 64), np.float32)
    outs = []
    for block_size in (16, 32, 64, 128, 256):
        pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=-(-500 // block_size), block_size=block_size, dtype=dtype)
        sequence = pool.new_sequence()
        sequence.append(0, k, v)
        outs.append(sequence.attend(0, q))
    whole = kvfast.KVCache(1, 2, 64, dtype=dtype)
    whole.append(0, k, v)
    assert all(np.array_equal(out, whole.attend(0, q)) for out in outs)


@pytest.mark.parametrize("dtype", ["int8", "int4", *HALVES])
def test_extreme_queries(rng, dtype):
    """Nothing but zeros, weights that vanish, a negative scale; huge numbers stay finite."""
    cache = stored(rng, dtype, 260)
    q = rng.standard_normal((40, 2, 64), np.float32)
    q[3] = 0
    q[5] *= 30
    q[7] *= 1e-30
    for scale in (None, -0.3):
        out = cache.attend(0, q, scale=scale)
        assert relative_error(out, attention(q, cache.k(0), cache.v(0), scale=scale or 0.125)[0]) < 1e-3
    q *= 1e30
    assert np.isfinite(cache.attend(0, q)).all()


@pytest.mark.parametrize("dim", [64, 512])
@pytest.mark.parametrize("dtype", ["int8-plain", "int4-plain", "int6"])
def test_the_largest_products(rng, dtype, dim):
    """Every code and every word of the queries is as large as can be: an integer that wraps would turn a score round."""
    k = np.ones((400, 2, dim), np.float32)
    k[::2] *= -1
    cache = kvfast.KVCache(1, 2, dim, dtype=dtype)
    cache.append(0, k, rng.standard_normal(k.shape, np.float32))
    q = np.ones((128, 2, dim), np.float32)
    q[::2] *= -1
    out = cache.attend(0, q, scale=1 / dim)
    assert relative_error(out, attention(q, cache.k(0), cache.v(0), scale=1 / dim)[0]) < 1e-3


def test_queries_beyond_bfloat16(rng):
    """The largest float32 rounds to no finite bfloat16. Equal weights are rounded alike: 32 of them to 131050, but for 2."""
    cache = kvfast.KVCache(1, 2, 64, dtype="bfloat16")
    cache.append(0, np.full((400, 2, 64), 2.0**-120, np.float32), np.ones((400, 2, 64), np.float32))
    out = cache.attend(0, np.full((40, 2, 64), 3.4e38, np.float32), scale=1.0)
    assert np.abs(out - 1).max() < 2e-5


@pytest.mark.parametrize("dtype", ["int8", "int4", *HALVES])
def test_ring_and_sinks(rng, dtype):
    ring = kvfast.RingKVCache(1, 2, 64, sliding_window=150, num_sink_tokens=4, dtype=dtype)
    whole = kvfast.KVCache(1, 2, 64, dtype=dtype)
    for n in (100, 170, 60, 90):
        k, v = rng.standard_normal((2, n, 2, 64), np.float32)
        ring.append(0, k, v), whole.append(0, k, v)
        q = rng.standard_normal((n, 6, 64), np.float32)
        expected = whole.attend(0, q, sliding_window=150, num_sink_tokens=4)
        assert relative_error(ring.attend(0, q), expected) < bound(dtype)
        ring.advance(n), whole.advance(n)


@needs_amx
def test_is_used(rng):
    """More than 16 queries are multiplied by tiles. On codes alone they come out as by vectors; float rows are rounded."""
    q = rng.standard_normal((40, 4, 64), np.float32)
    for dtype in ("int8", "k8v4", "int4-plain", "int5", "int4", "float16", "bfloat16", "float32"):
        cache = stored(rng, dtype, 400)
        exact = dtype in ("int8", "k8v4", "int4-plain", "int5", "float32")
        many, few = cache.attend(0, q), cache.attend(0, q[-16:])
        assert ("attend_tiles" in str(cache.explain(0, 40, num_q_heads=4))) == (dtype not in ("int5", "float32"))
        with kvfast.use_isa("avx512"):
            assert np.array_equal(many, cache.attend(0, q)) == exact
            assert relative_error(few, cache.attend(0, q[-16:])) < (1e-6 if exact or "float" in dtype else 3e-4)


@pytest.mark.parametrize("loud", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "k8v4", "int4-plain", "int4"])
def test_the_number_of_rows_changes_no_bit(rng, dtype, loud):
    """On codes. INT4 has float tokens, which weigh nothing here. Loud keys are multiplied with what rounding left out."""
    k, v = rng.standard_normal((2, 900, 2, 64), np.float32)
    q = rng.standard_normal((100, 6, 64), np.float32) * (3 if loud else 1)
    if loud:
        k[..., 3] *= 30
        k[..., 40] += 40
        v[..., 5] *= 8
    if dtype == "int4":
        k[:16, :, 0], k[-300:, :, 0], q[..., 0] = -400, -400, 40
    cache = kvfast.KVCache(1, 2, 64, dtype=dtype)
    for start in range(0, 900, 300):
        filled(cache, k[start : start + 300], v[start : start + 300])
    for options in ({}, {"scale": -0.05}, {"sliding_window": 333, "softcap": 20.0}):
        if dtype == "int4" and options:
            continue
        out = cache.attend(0, q, num_splits=1, **options)
        for n in (1, 16, 17, 40):
            assert np.array_equal(cache.attend(0, q[-n:], num_splits=1, **options), out[-n:])


@pytest.mark.parametrize("rope_dim", [0, 16])
@pytest.mark.parametrize("dtype", ["int8", "int4-plain"])
def test_latent_rows_have_the_bits_of_vectors(isa, rng, dtype, rope_dim):
    cache = kvfast.MLAKVCache(1, 80, rope_dim, dtype=dtype)
    cache.append(0, rng.standard_normal((600, 80 + rope_dim), np.float32))
    q = rng.standard_normal((3, 20, 80 + rope_dim), np.float32) * 3
    with kvfast.use_isa("avx512" if isa in ("amx", *WORD_TIERS) else isa):
        expected = cache.attend(0, q, num_splits=1)
    assert np.array_equal(cache.attend(0, q, num_splits=1), expected)


@pytest.mark.parametrize("isa", WORD_TIERS)
def test_words_are_used(rng, isa):
    """More than 16 queries are multiplied as words. Codes come out as by vectors, also those of each query's newest tokens; other float
    rows are rounded to words."""
    if isa not in kvfast.available_isas():
        pytest.skip(f"this CPU has no {isa}")
    q = rng.standard_normal((40, 4, 64), np.float32)
    for dtype in ("int8", "k8v4", "int4-plain", "int5", "int4-recent", "int4", "int3", "float16", "bfloat16", "float32"):
        cache = stored(rng, dtype, 400)
        outs = []
        for tier in (isa, "avx512"):
            with kvfast.use_isa(tier):
                outs.append(
                    (cache.attend(0, q), cache.attend(0, q[-16:]), "attend_words16" in str(cache.explain(0, 40, num_q_heads=4)))
                )
        (many, few, used), (many_floats, few_floats, _) = outs
        assert used != (dtype == "float32") and np.array_equal(few, few_floats)
        assert np.array_equal(many, many_floats) == (dtype not in ("int4", "int3", "float16", "bfloat16"))


@pytest.mark.parametrize("isa", WORD_TIERS)
def test_loud_keys_are_multiplied_as_floats(rng, isa):
    """A key with one loud element leaves its others few bits as a word, and the queries may not look at that element."""
    if isa not in kvfast.available_isas():
        pytest.skip(f"this CPU has no {isa}")
    k, v = rng.standard_normal((2, 500, 2, 64), np.float32)
    k[np.arange(0, 500, 37), :, 5] = 6e4
    q = rng.standard_normal((40, 6, 64), np.float32)
    q[:, :, 5] = 1e-6
    cache = kvfast.KVCache(1, 2, 64, dtype="float16")
    cache.append(0, k, v)
    with kvfast.use_isa(isa):
        out = cache.attend(0, q)
    assert relative_error(out, attention(q, cache.k(0), cache.v(0))[0]) < 5e-4
