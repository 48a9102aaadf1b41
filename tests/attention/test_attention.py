"""Fused attention against float64, on every ISA tier."""

import ml_dtypes
import numpy as np
import pytest
from cache_kinds import CENTRED, DTYPES, PLAIN, fill, filled
from reference import attention, bound, halves_bound, relative_error, ways_agree
from selection import TIERS, pairwise

import kvfast

# head_dim, context, query tokens, KV heads, query heads: block edges, odd sizes, GQA ratios, prefill.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 15, 1, 1, 3),
    (3, 16, 2, 2, 2),
    (8, 17, 17, 1, 2),
    (15, 63, 1, 2, 8),
    (16, 64, 3, 1, 5),
    (17, 65, 65, 2, 6),
    (64, 127, 1, 3, 9),
    (80, 128, 5, 1, 16),
    (96, 300, 1, 1, 17),
    (128, 129, 40, 2, 8),
    (256, 200, 1, 2, 4),
    (512, 70, 2, 1, 32),
]


def normal(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def cache_with(rng, head_dim, length, num_kv_heads, *dtypes):
    """A cache of one format, or of two plain dtypes for keys and values."""
    names = {"dtype": dtypes[0]} if len(set(dtypes)) == 1 else {"k_dtype": dtypes[0], "v_dtype": dtypes[1]}
    return fill(kvfast.KVCache(1, num_kv_heads, head_dim, **names), rng, length)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_and_size(isa, rng, shape):
    head_dim, length, n, num_kv_heads, num_q_heads = shape
    plain = [name.removesuffix("-plain") for name in PLAIN]
    pairs = [(name, plain[(i + 1 + length) % 5]) for i, name in enumerate(plain)] + [(dtype, dtype) for dtype in DTYPES]
    for k_dtype, v_dtype in pairs:
        cache = cache_with(rng, head_dim, length, num_kv_heads, k_dtype, v_dtype)
        q = normal(rng, n, num_q_heads, head_dim)
        out, lse = cache.attend(0, q, return_lse=True)
        expected, expected_lse = attention(q, cache.k(0), cache.v(0))
        assert out.dtype == np.float32 and out.shape == q.shape
        assert relative_error(out, expected) < bound(k_dtype, v_dtype)
        assert np.abs(lse - expected_lse).max() < 1e-3


OPTIONS = [
    {"scale": 0.3},
    {"causal": False},
    {"softcap": 2.0},
    {"sliding_window": 1},
    {"sliding_window": 20},
    {"attention_chunk_size": 7},
    {"attention_chunk_size": 32, "softcap": 5.0},
    {"sliding_window": 100, "causal": False},
    {"sinks": True},
    {"alibi_slopes": True},
    {"softcap": 5.0, "sliding_window": 70, "sinks": True, "alibi_slopes": True, "scale": 0.2},
]


@pairwise(("isa", "dtype", "options"), TIERS, ["float32", "int8-plain", "int4-plain", "k8v4", "int4", CENTRED], OPTIONS, ids=str)
def test_options(isa, rng, dtype, options):
    cache = cache_with(rng, 64, 300, 2, dtype, dtype)
    q = normal(rng, 150, 6, 64)
    options = dict(options)
    for name in ("sinks", "alibi_slopes"):
        if name in options:
            options[name] = rng.uniform(0.01, 0.5, 6).astype(np.float32)
    out, lse = cache.attend(0, q, return_lse=True, **options)
    expected, expected_lse = attention(q, cache.k(0), cache.v(0), **options)
    assert relative_error(out, expected) < bound(dtype)
    assert np.abs(lse - expected_lse).max() < 1e-3


@pytest.mark.parametrize("length, n", [(1, 2), (5, 40), (63, 64), (130, 700)])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 20}, {"sliding_window": 3, "num_sink_tokens": 2}, {"softcap": 2.0}, {"alibi": 1}, {"indices": 1}]
)
def test_more_queries_than_keys(isa, rng, length, n, options):
    """A decoder reads a short encoder. Queries beyond the keys stand before the first of them."""
    k, v, q, options = normal(rng, length, 2, 64), normal(rng, length, 2, 64), normal(rng, n, 6, 64), dict(options)
    if options.pop("alibi", None):
        options["alibi_slopes"] = rng.uniform(0.01, 0.1, 6).astype(np.float32)
    if options.pop("indices", None):
        options["indices"] = np.argsort(rng.random((n, length)))[:, : min(length, 7)]
    out, lse = kvfast.attention(q, k, v, causal=False, return_lse=True, **options)
    expected, expected_lse = attention(q, k, v, causal=False, **options)
    assert relative_error(out, expected) < 1e-5 and np.abs(lse - expected_lse).max() < 1e-4
    with pytest.raises(ValueError, match=f"q must hold at most the {length} tokens of k and v, got {n}"):
        kvfast.attention(q, k, v)


@pytest.mark.parametrize("shape", [(17, 65, 3, 2, 6), (64, 127, 1, 3, 9), (80, 300, 5, 1, 3), (128, 40, 40, 2, 8)], ids=str)
def test_queries_in_bfloat16(isa, rng, shape):
    """Queries that are bfloat16 may be multiplied as such: the results are right, and those of each are the same among others."""
    head_dim, length, n, num_kv_heads, num_q_heads = shape
    cache = cache_with(rng, head_dim, length, num_kv_heads, "bfloat16", "bfloat16")
    q = normal(rng, n, num_q_heads, head_dim)
    halves = q.astype(ml_dtypes.bfloat16)
    out, lse = cache.attend(0, halves, return_lse=True)
    expected, expected_lse = attention(halves.astype(np.float32), cache.k(0), cache.v(0))
    assert relative_error(out, expected) < halves_bound() and np.abs(lse - expected_lse).max() < 1e-4
    same = halves.astype(np.float32)
    assert np.array_equal(cache.attend(0, same), out)
    if n <= 16:
        mixed = np.where(np.arange(num_q_heads)[:, None] % 3 == 1, q, same)
        among = cache.attend(0, mixed)
        assert np.array_equal(among[:, np.arange(num_q_heads) % 3 != 1], out[:, np.arange(num_q_heads) % 3 != 1])
        assert relative_error(among, attention(mixed, cache.k(0), cache.v(0))[0]) < halves_bound()


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_context_crosses_splits(rng, dtype):
    cache = cache_with(rng, 64, 5000, 2, dtype, dtype)
    q = normal(rng, 2, 8, 64)
    expected, _ = attention(q, cache.k(0), cache.v(0))
    one = cache.attend(0, q, num_splits=1)
    for num_splits in (0, 2, 3, 7, 1000):
        out = cache.attend(0, q, num_splits=num_splits)
        assert relative_error(out, expected) < bound(dtype)
        assert np.allclose(out, one, rtol=1e-4, atol=1e-5)
    window, _ = attention(q, cache.k(0), cache.v(0), sliding_window=2500)
    assert relative_error(cache.attend(0, q, sliding_window=2500, num_splits=4), window) < bound(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_and_far_tokens(isa, rng, dtype):
    """Weights of almost zero, and one token that takes all."""
    cache = kvfast.KVCache(1, 1, 64, dtype=dtype)
    k = normal(rng, 200, 1, 64) * 8
    cache.append(0, k, normal(rng, 200, 1, 64))
    q = k[-3:] * 4
    expected, _ = attention(q, cache.k(0), cache.v(0))
    out = cache.attend(0, q)
    assert np.isfinite(out).all()
    assert relative_error(out, expected) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunked_prefill_and_decode_agree(isa, rng, dtype):
    k, v, q = normal(rng, 90, 2, 32), normal(rng, 90, 2, 32), normal(rng, 90, 4, 32)
    whole = kvfast.KVCache(1, 2, 32, dtype=dtype)
    whole.append(0, k, v)
    at_once = whole.attend(0, q)
    stepwise = kvfast.KVCache(1, 2, 32, dtype=dtype)
    for start, stop in [(0, 1), (1, 2), (2, 40), (40, 41), (41, 90)]:
        stepwise.append(0, k[start:stop], v[start:stop])
        out = stepwise.attend(0, q[start:stop])
        assert ways_agree(out, at_once[start:stop], dtype, rtol=1e-4)


def test_tiers_agree(rng):
    cache = cache_with(rng, 80, 200, 2, "int8", "int4")
    q = normal(rng, 3, 6, 80)
    outs = []
    for name in kvfast.available_isas():
        with kvfast.use_isa(name):
            outs.append(cache.attend(0, q))
    for out in outs[1:]:
        assert relative_error(out, outs[0]) < 3e-4  # tiles differ


def test_merge_states(rng):
    q, k, v = normal(rng, 1, 4, 32), normal(rng, 100, 2, 32), normal(rng, 100, 2, 32)
    whole, whole_lse = kvfast.attention(q, k, v, return_lse=True)
    a = kvfast.attention(q, k[:37], v[:37], return_lse=True)
    b = kvfast.attention(q, k[37:], v[37:], return_lse=True)
    out, lse = kvfast.merge_states(*a, *b)
    assert np.allclose(out, whole, atol=1e-6) and np.allclose(lse, whole_lse, atol=1e-5)
    nothing = np.zeros_like(whole), np.full_like(whole_lse, -np.inf)
    out, lse = kvfast.merge_states(*a, *nothing)
    assert np.array_equal(out, a[0]) and np.array_equal(lse, a[1])


@pytest.mark.parametrize("head_dim", [5, 48, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_arrays(isa, rng, head_dim, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    q, k, v = (normal(rng, *shape).astype(kind) for shape in [(3, 6, head_dim), (77, 2, head_dim), (77, 2, head_dim)])
    expected, _ = attention(*(a.astype(np.float32) for a in (q, k, v)))
    assert relative_error(kvfast.attention(q, k, v), expected) < 1e-5
    out = kvfast.attention(q[:, ::-1], k[:, ::-1], np.asfortranarray(v[:, ::-1]))
    assert relative_error(out[:, ::-1], expected) < 1e-5


def test_out(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    cache = cache_with(rng, 32, 50, 2, "int8", "int8")
    q = normal(rng, 2, 4, 32)
    expected = cache.attend(0, q)
    for kind in (np.float32, np.float16, ml_dtypes.bfloat16):
        out = np.zeros((2, 8, 32), kind)[:, ::2]
        assert cache.attend(0, q, out=out) is out
        assert np.allclose(out.astype(np.float32), expected, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_few_queries_get_the_bits_of_each_alone(isa, rng, dtype):
    """So that drafted tokens, verified together, are what one token after the other would be."""
    cache = kvfast.KVCache(1, 2, 20, dtype=dtype)
    k, v = rng.standard_normal((2, 2700, 2, 20)).astype(np.float32)
    q = rng.standard_normal((16, 6, 20)).astype(np.float32)
    # 2,048 and 2,560 tokens are where the context is cut into more splits, or longer ones.
    for length in (40, 131, 1000, 2055, 2567, 2700):
        filled(cache, k[cache.layer_length(0) : length], v[cache.layer_length(0) : length])
        for options in ({}, {"sliding_window": 100, "num_sink_tokens": 3}, {"sliding_window": 2050}, {"num_splits": 3}):
            together = cache.attend(0, q, **options)
            for i in range(16):
                part = cache.copy()
                part.truncate(length - 15 + i)
                assert np.array_equal(part.attend(0, q[i : i + 1], **options)[0], together[i]), (length, options, i)
