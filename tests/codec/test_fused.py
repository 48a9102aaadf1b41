"""split_qkv_norm_rope, and write of every kind of cache."""

import numpy as np
import pytest
from selection import pairwise

import kvfast

HEADS, KV_HEADS = 6, 2


def tables(positions, pairs):
    angles = np.multiply.outer(np.arange(positions), 10000.0 ** (-np.arange(pairs) / pairs))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def expected(qkv, dim, cos, sin, rows, q_norm, k_norm, interleaved, eps=1e-5):
    """The same steps in float64."""
    x = np.asarray(qkv, np.float64).reshape(len(qkv), -1, dim)
    q, k, v = x[:, :HEADS].copy(), x[:, HEADS : HEADS + KV_HEADS].copy(), x[:, HEADS + KV_HEADS :]
    for part, norm in ((q, q_norm), (k, k_norm)):
        if norm is not None:
            part /= np.sqrt(np.mean(part * part, axis=-1, keepdims=True) + eps)
            part *= norm
        if cos is not None:
            pairs = cos.shape[1]
            c, s = cos[rows].astype(np.float64)[:, None], sin[rows].astype(np.float64)[:, None]
            first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
            second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
            a, b = part[..., first].copy(), part[..., second].copy()
            part[..., first], part[..., second] = a * c - b * s, b * c + a * s
    return q, k, v


@pytest.mark.parametrize("dim, pairs", [(64, 32), (64, 12), (128, 64), (20, 10), (17, 3)])
@pytest.mark.parametrize("mode", ["copy", "norm", "half", "norm+half", "interleaved"])
def test_against_float64_on_every_tier(isa, rng, dim, pairs, mode):
    qkv = rng.standard_normal((5, (HEADS + 2 * KV_HEADS) * dim)).astype(np.float32)
    cos, sin = tables(50, pairs) if "half" in mode or mode == "interleaved" else (None, None)
    rows = np.array([7, 0, 49, 3, 3])
    q_norm, k_norm = rng.standard_normal((2, dim)).astype(np.float32) if "norm" in mode else (None, None)
    options = {
        "cos": cos,
        "sin": sin,
        "positions": rows if cos is not None else None,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "eps": 1e-5,
        "interleaved": mode == "interleaved",
    }
    got = kvfast.split_qkv_norm_rope(qkv, HEADS, KV_HEADS, dim, **options)
    for a, b in zip(got, expected(qkv, dim, cos, sin, rows, q_norm, k_norm, mode == "interleaved")):
        assert a.dtype == np.float32 and np.allclose(a, b, rtol=1e-5, atol=2e-6)


@pairwise(
    ("kind", "dtype", "source"),
    ["contiguous", "ring", "paged", "batch"],
    ["float32", "float16", "bfloat16", "int8-plain", "int8/int4", "int8", "k8v4", "int4"],
    [np.float32, np.float16],
)
def test_write_is_split_and_append(rng, kind, dtype, source):
    storage = {"dtype": dtype}
    dim, pool = 64, kvfast.PagedKVCache(1, KV_HEADS, 64, num_blocks=8, **storage)
    make = {
        "contiguous": lambda: kvfast.KVCache(1, KV_HEADS, dim, **storage),
        "ring": lambda: kvfast.RingKVCache(1, KV_HEADS, dim, sliding_window=30, **storage),
        "paged": pool.new_sequence,
        "batch": pool.new_sequence,
    }[kind]
    written, appended = make(), make()
    cos, sin = tables(200, 32)
    norm = np.linspace(0.5, 2, dim).astype(np.float32)
    start = 0
    for n in (37, 1, 21):
        qkv = rng.standard_normal((n, (HEADS + 2 * KV_HEADS) * dim)).astype(source)
        options = {"cos": cos, "sin": sin, "q_norm": norm, "k_norm": norm}
        q, k, v = kvfast.split_qkv_norm_rope(qkv, HEADS, KV_HEADS, dim, positions=np.arange(start, start + n), **options)
        appended.append(0, k, v)
        if kind == "batch":
            slots = pool.slot_mapping([written], n)
            got = pool.write_batch(0, qkv, slots, positions=np.arange(start, start + n), **options)
        else:
            got = written.write(0, qkv, num_q_heads=HEADS, **options)
        assert np.array_equal(got, q)
        for cache in (written, appended):
            cache.advance(n)
        start += n
    assert np.array_equal(written.k(0), appended.k(0)) and np.array_equal(written.v(0), appended.v(0))


def test_out_and_strides(rng):
    cache = kvfast.KVCache(1, KV_HEADS, 64)
    wide = rng.standard_normal((4, 2 * 10 * 64)).astype(np.float32)
    qkv = wide[::-1, : 10 * 64]
    out = np.zeros((4, HEADS, 64), np.float16)
    assert cache.write(0, qkv, out=out) is out
    assert np.array_equal(out, qkv.reshape(4, 10, 64)[:, :HEADS].astype(np.float16))


def test_bad_input(rng):
    cache = kvfast.KVCache(1, 2, 64, dtype="float16")
    qkv = np.ones((3, 10 * 64), np.float32)
    cos, sin = tables(10, 32)
    for error, options, message in [
        (kvfast.DimensionMismatchError, {"num_q_heads": 4}, "num_q_heads|\\(4 \\+ 2"),
        (ValueError, {"cos": cos}, "must be given together"),
        (ValueError, {"positions": [0, 1, 2]}, "positions need cos and sin"),
        (ValueError, {"cos": cos, "sin": sin, "positions": [0, 1, 10]}, "between 0 and 9"),
        (kvfast.DimensionMismatchError, {"cos": cos, "sin": sin, "positions": [0, 1]}, "one per token"),
        (kvfast.DimensionMismatchError, {"cos": cos[:2], "sin": sin[:2]}, "positions 0 to 2"),
        (kvfast.DimensionMismatchError, {"cos": cos, "sin": sin[:, :3]}, "the same shape"),
        (kvfast.DimensionMismatchError, {"cos": np.ones((9, 33)), "sin": np.ones((9, 33))}, "1 to 32 pairs"),
        (kvfast.DimensionMismatchError, {"q_norm": np.ones(3)}, "q_norm must have shape \\(64,\\)"),
        (kvfast.NonFiniteInputError, {"k_norm": np.full(64, np.nan)}, "k_norm must be finite"),
        (kvfast.NonFiniteInputError, {"k_norm": np.full(64, 1e6)}, "beyond the range of what is stored \\(\\+-65504"),
        (ValueError, {"q_norm": np.ones(64), "eps": -1}, "eps must be"),
        (kvfast.DimensionMismatchError, {"out": np.ones((3, 2, 64), np.float32)}, "out must have shape"),
    ]:
        with pytest.raises(error, match=message):
            cache.write(0, qkv, **options)
    for bad in (np.ones((3, 10 * 64 + 1)), np.ones((3, 4 * 64)), np.ones((3, 7 * 64)), np.ones(640)):
        with pytest.raises(kvfast.DimensionMismatchError, match="qkv must have shape|multiple of the 2 KV heads"):
            cache.write(0, bad.astype(np.float32))
    qkv[1, -1] = np.nan
    with pytest.raises(kvfast.NonFiniteInputError, match=r"v must be finite, got nan at \[1, 1, 63\]"):
        cache.write(0, qkv)
    assert cache.layer_length(0) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_where_nothing_is_rotated(rng, value):
    """Queries, keys and values alike: rows that are only split must be finite too."""
    for part, head in (("queries", 1), ("keys", HEADS), ("values", HEADS + KV_HEADS + 1)):
        qkv = rng.standard_normal((3, (HEADS + 2 * KV_HEADS) * 64)).astype(np.float32)
        qkv[2, 64 * head + 5] = value
        for source in (qkv, qkv.astype(np.float16)):
            with pytest.raises(kvfast.NonFiniteInputError):
                kvfast.split_qkv_norm_rope(source, HEADS, KV_HEADS, 64)
            cache = kvfast.KVCache(1, KV_HEADS, 64)
            with pytest.raises(kvfast.NonFiniteInputError):
                cache.write(0, source)
            assert cache.layer_length(0) == 0, part
