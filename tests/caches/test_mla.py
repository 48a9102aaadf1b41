"""The cache of latent rows against attention on decoded rows in float64."""

import numpy as np
import pytest
from cache_kinds import filled
from latent_reference import DTYPES, oracle, rows
from reference import bound, halves_bound, relative_error

import kvfast

# (latent_dim, rope_dim, context, query heads, query tokens): lane, tile and block edges
SHAPES = [
    (512, 64, 300, 32, 1),
    (512, 64, 700, 17, 3),
    (32, 0, 1, 4, 1),
    (48, 16, 63, 20, 2),
    (40, 24, 65, 8, 5),
    (128, 128, 129, 40, 17),
    (100, 10, 64, 16, 4),
]


def make(rng, latent_dim, rope_dim, context, dtype="int8", num_layers=1, **options):
    cache = kvfast.MLAKVCache(num_layers, latent_dim, rope_dim, dtype=dtype, **options)
    filled(cache, each=[(rows(rng, context, latent_dim + rope_dim),) for _ in range(num_layers)])
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend(isa, rng, dtype):
    for latent_dim, rope_dim, context, heads, n in SHAPES:
        if isa == "scalar" and context > 300:
            continue
        n = min(n, context)
        cache = make(rng, latent_dim, rope_dim, context, dtype)
        q = rows(rng, n, heads, latent_dim + rope_dim)
        scale = 0.7 / np.sqrt(latent_dim + rope_dim)
        out, lse = cache.attend(0, q, scale=scale, return_lse=True)
        expected, expected_lse = oracle(q, cache.get_latent(0), latent_dim, scale)
        limit = bound(dtype)
        if dtype in ("float16", "bfloat16"):
            limit = halves_bound()
        assert relative_error(out, expected) < limit, (latent_dim, rope_dim, context)
        assert np.abs(lse - expected_lse).max() < limit


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_options(isa, rng, dtype):
    cache = make(rng, 64, 32, 200, dtype)
    q = rows(rng, 3, 32, 96)
    latent = cache.get_latent(0)
    for options in (
        {"causal": False},
        {"softcap": 3.0},
        {"scale": -0.1},
        {"scale": 0.3},
        {},
        {"sliding_window": 50, "num_sink_tokens": 5, "sinks": rows(rng, 32)},
        {"attention_chunk_size": 64, "alibi_slopes": rng.random(32)},
        {"spans": [[10, 30], [150, 200]], "sliding_window": 20},
        {"spans": [[150, 200]], "sliding_window": 20, "clamp_spans": True},
        {"tree_parents": [-1, 0, 0]},
        {"indices": [[7, 0, 190], [20, 150, 3], [199, 5, -1]]},
    ):
        scale = options.get("scale", 96**-0.5)
        others = {name: value for name, value in options.items() if name != "scale"}
        expected, _ = oracle(q, latent, 64, scale, **others)
        out = np.full((3, 32, 64), np.nan, np.float32)
        assert cache.attend(0, q, out=out, **options) is out
        assert relative_error(out, expected) < bound(dtype)


def test_long_scores_do_not_overflow(isa, rng):
    """The int32 sums at their largest: all codes and activations at their ends."""
    cache = kvfast.MLAKVCache(1, 512, 128, dtype="int8-plain")
    signs = np.where(rng.random((20, 640)) < 0.5, -1, 1).astype(np.float32)
    cache.append(0, signs)
    q = np.broadcast_to(signs[3], (1, 32, 640)).astype(np.float32)
    out = cache.attend(0, q, scale=1e-2)
    assert relative_error(out, oracle(q, cache.get_latent(0), 512, 1e-2)[0]) < bound("int8")


@pytest.mark.parametrize("dtype", ["int8", "int4", "bfloat16"])
@pytest.mark.parametrize("heads", [8, 24, 128])
def test_same_bits(isa, rng, dtype, heads):
    """Threads, splits into calls, and tokens of one call do not change a token's result."""
    latent = rows(rng, 420, 80)
    one, two = kvfast.MLAKVCache(1, 64, 16, dtype=dtype), kvfast.MLAKVCache(1, 64, 16, dtype=dtype)
    one.append(0, latent)
    for first in range(0, 420, 37):
        two.append(0, latent[first : first + 37])
    q = rows(rng, 5, heads, 80)
    together = one.attend(0, q)
    for threads in (1, 2, 3):
        assert np.array_equal(two.attend(0, q, num_threads=threads), together)
    one.advance(420)
    for i in range(4, -1, -1):
        one.truncate(416 + i)
        assert np.array_equal(one.attend(0, q[i : i + 1]), together[i : i + 1])


def test_splits_agree(isa, rng):
    cache = make(rng, 64, 16, 1000)
    q = rows(rng, 1, 64, 80)
    one = cache.attend(0, q, num_splits=1)
    assert relative_error(cache.attend(0, q, num_splits=4), one) < bound("int8")


def test_strided_and_half_inputs(isa, rng):
    latent, q = rows(rng, 50, 80), rows(rng, 2, 20, 80)
    cache, other = (kvfast.MLAKVCache(1, 64, 16, dtype="float16") for _ in range(2))
    cache.append(0, latent.astype(np.float16))
    wide = np.zeros((50, 160), np.float16)
    wide[:, ::2] = latent
    other.append(0, wide[:, ::2])
    assert np.array_equal(cache.get_latent(0), latent.astype(np.float16).astype(np.float32))
    assert np.array_equal(cache.get_latent(0), other.get_latent(0))
    assert np.array_equal(cache.attend(0, q.astype(np.float16)), other.attend(0, q.astype(np.float16).astype(np.float32)))


def test_projections(rng):
    """Absorbed attention is attention on the keys and values that the latents stand for."""
    heads, k_dim, v_dim, latent_dim, rope_dim, n = 6, 24, 32, 40, 8, 90
    up_k, up_v = rows(rng, latent_dim, heads, k_dim), rows(rng, latent_dim, heads, v_dim)
    cache = make(rng, latent_dim, rope_dim, n, "float32")
    k, v = cache.get_kv(0, up_k, up_v)
    assert k.shape == (n, heads, k_dim + rope_dim) and v.shape == (n, heads, v_dim)
    q = rows(rng, 3, heads, k_dim + rope_dim)
    absorbed = np.concatenate((np.einsum("thd,lhd->thl", q[..., :k_dim], up_k), q[..., k_dim:]), axis=2)
    out = np.einsum("thl,lhv->thv", cache.attend(0, absorbed, scale=0.05), up_v)
    scores = 0.05 * np.einsum("nhd,thd->nht", q.astype(np.float64), k.astype(np.float64))
    scores[:, :, :] = np.where(np.arange(n) > n - 3 + np.arange(3)[:, None, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(2, keepdims=True))
    expected = np.einsum("nht,thv->nhv", weights / weights.sum(2, keepdims=True), v)
    assert relative_error(out, expected) < 1e-5

    down_k, down_v = rows(rng, heads, k_dim, latent_dim), rows(rng, heads, v_dim, latent_dim)
    cache.append_kv(0, k[:4], v[:4], down_k, down_v)
    latent = np.einsum("thd,hdl->tl", k[:4, :, :k_dim], down_k) + np.einsum("thd,hdl->tl", v[:4], down_v)
    got = cache.get_latent(0)[n:]
    assert np.allclose(got[:, :latent_dim], latent, rtol=1e-4, atol=1e-3)
    assert np.array_equal(got[:, latent_dim:], k[:4, 0, k_dim:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope_dim", [0, 16])
def test_going_back_and_keeping(tmp_path, rng, dtype, rope_dim):
    cache = make(rng, 48, rope_dim, 150, dtype, 3, max_seq_len=300)
    q = rows(rng, 2, 20, 48 + rope_dim)
    before, latents = cache.attend(1, q), [cache.get_latent(layer) for layer in range(3)]
    snapshot = cache.snapshot(metadata={"model": "tiny"})
    copy = cache.copy()
    cache.truncate(70)
    assert np.array_equal(cache.get_latent(2), latents[2][:70])
    filled(cache, each=[(rows(rng, 9, 48 + rope_dim),) for _ in range(3)])
    assert len(cache) == 79 and len(copy) == 150
    cache.restore(snapshot)
    other = kvfast.MLAKVCache(3, 48, rope_dim, dtype=dtype)
    other.restore(snapshot)
    path = tmp_path / "latents.safetensors"
    cache.save(path)
    caches = [cache, copy, other, kvfast.load(path), kvfast.load(path, mmap=True), kvfast.load(path, max_seq_len=400)]
    for one in [*caches, kvfast.MLAKVCache.from_state_dict(cache.state_dict()), kvfast.load(snapshot)]:
        assert isinstance(one, kvfast.MLAKVCache) and len(one) == 150
        assert np.array_equal(one.attend(1, q), before)
        assert all(np.array_equal(one.get_latent(layer), latents[layer]) for layer in range(3))
        filled(one, each=[(rows(rng, 1, 48 + rope_dim),) for _ in range(3)])
    assert kvfast.load(path, max_seq_len=400).max_seq_len == 400
    keys, values = snapshot.to_arrays()
    assert np.array_equal(np.concatenate((keys[2], values[2]), axis=1), latents[2])
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="latent_dim|kind"):
        kvfast.MLAKVCache(3, 32, rope_dim, dtype=dtype).restore(snapshot)
    with pytest.raises(kvfast.IncompatibleSnapshotError):
        kvfast.KVCache(3, 1, 48, dtype="float32").restore(snapshot)


def test_sizes(rng):
    cache = kvfast.MLAKVCache(2, 512, 64, max_seq_len=128, dtype="int8")
    assert cache.bytes_per_token == 2 * (512 + 4 + 64 + 4)
    assert (cache.latent_dim, cache.rope_dim, cache.head_dim, cache.entry_size, cache.num_kv_heads) == (512, 64, 576, 576, 1)
    assert kvfast.MLAKVCache(1, 512, 64, dtype="bfloat16").bytes_per_token == 1152
    assert kvfast.MLAKVCache(1, 512, 0, dtype="bfloat16").bytes_per_token == 1024
    assert repr(cache).startswith("MLAKVCache(int8-rotated, 2 layers x (512 + 64), 0/128 tokens")
    filled(cache, each=[(rows(rng, 128, 576),) for _ in range(2)])
    with pytest.raises(kvfast.CacheFullError):
        cache.append(0, rows(rng, 1, 576))
    plan = cache.explain(0, (1, 128, 576))
    assert plan.kernels[:2] == ("scores_int8", "accumulate_latent")
    assert plan.bytes_read % (128 * 584) == 0 and plan.operations == 2 * 128 * 128 * (2 * 512 + 64)


@pytest.fixture
def cache(rng):
    cache = make(rng, 32, 16, 20, "int8", max_seq_len=30)
    before = cache.get_latent(0)
    yield cache
    assert len(cache) == 20 and cache.layer_length(0) == 20 and np.array_equal(cache.get_latent(0), before)


def test_bad_rows(cache, rng):
    for shape in [(48,), (1, 47), (1, 32), (0, 48), (1, 1, 48)]:
        with pytest.raises(kvfast.DimensionMismatchError, match=r"32 \+ 16"):
            cache.append(0, np.ones(shape, np.float32))
    for at in (3, 40):
        for value in (np.nan, np.inf):
            bad = rows(rng, 4, 48)
            bad[2, at] = value
            with pytest.raises(kvfast.NonFiniteInputError, match="latent part" if at < 32 else "rotary part"):
                cache.append(0, bad)
            with pytest.raises(kvfast.NonFiniteInputError):
                cache.attend(0, np.broadcast_to(bad[2], (1, 4, 48)))
    with pytest.raises(TypeError, match="latent"):
        cache.append(0, np.ones((1, 48), int))
    with pytest.raises(IndexError):
        cache.append(1, rows(rng, 1, 48))
    with pytest.raises(kvfast.CacheFullError):
        cache.append(0, rows(rng, 11, 48))


def test_bad_queries(cache, rng):
    for shape in [(4, 48), (1, 4, 32), (1, 4, 49)]:
        with pytest.raises(kvfast.DimensionMismatchError):
            cache.attend(0, np.ones(shape, np.float32))
    q = rows(rng, 1, 4, 48)
    with pytest.raises(ValueError, match="at most the 20 tokens of layer 0, got 21"):
        cache.attend(0, rows(rng, 21, 4, 48))
    with pytest.raises(kvfast.DimensionMismatchError, match="out"):
        cache.attend(0, q, out=np.empty((1, 4, 48), np.float32))
    with pytest.raises(ValueError, match="share memory"):
        cache.attend(0, q, out=q[..., 16:])
    with pytest.raises(kvfast.DimensionMismatchError):
        cache.explain(0, (1, 4, 32))
    with pytest.raises(ValueError, match="no tokens"):
        kvfast.MLAKVCache(1, 32, 16).attend(0, q)


def test_bad_projections(cache, rng):
    k, v = rows(rng, 2, 3, 24), rows(rng, 2, 3, 10)
    k[:, :, 8:] = k[:, :1, 8:]
    down_k, down_v = rows(rng, 3, 8, 32), rows(rng, 3, 10, 32)
    for wrong in (
        (k, v[:1], down_k, down_v),
        (k, v, down_k[:, :7], down_v),
        (k, v, down_k, down_v[..., :31]),
        (k[:, :, :16], v, down_k, down_v),
        (k[0], v, down_k, down_v),
    ):
        with pytest.raises(kvfast.DimensionMismatchError):
            cache.append_kv(0, *wrong)
    other = k.copy()
    other[1, 2, 9] += 1
    with pytest.raises(ValueError, match="rotary part"):
        cache.append_kv(0, other, v, down_k, down_v)
    with pytest.raises(kvfast.NonFiniteInputError):
        cache.append_kv(0, k, v, down_k * np.float32(np.nan), down_v)
    with pytest.raises(kvfast.DimensionMismatchError, match="up_v"):
        cache.get_kv(0, rows(rng, 32, 3, 8), rows(rng, 31, 3, 8))


def test_bad_settings():
    for arguments in ((0, 32, 16), (1, 513, 16), (1, 0, 16), (1, 32, 129), (1, 32, -1)):
        with pytest.raises(ValueError, match="between"):
            kvfast.MLAKVCache(*arguments)
    for fmt in (
        kvfast.KVFormat("int8", centring=True),
        kvfast.KVFormat("int8", num_first_float_tokens=4),
        kvfast.KVFormat("int4", per_channel=True),
    ):
        with pytest.raises(ValueError, match="latent rows"):
            kvfast.MLAKVCache(1, 32, 16, dtype=fmt)
    with pytest.raises(ValueError, match="unknown"):
        kvfast.MLAKVCache(1, 32, 16, dtype="int9")


METHODS = [kvfast.LowRank(energy=0.999999), kvfast.Hybrid(quant_bits=8), kvfast.Quantize(8)]


@pytest.mark.parametrize("rope_dim", [0, 16, 64])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_compression(rng, method, rope_dim):
    cache, other = make(rng, 48, rope_dim, 300, "float32"), kvfast.MLAKVCache(1, 48, rope_dim, dtype="float32")
    compressor = kvfast.KVCacheCompressor(method)
    compressed = compressor.compress_cache(cache, 0)
    compressor.decompress_to_cache(compressed, other, 0)
    other.advance(300)
    assert relative_error(other.get_latent(0), cache.get_latent(0)) < 0.05
    assert compressed.nbytes < cache.nbytes_used or isinstance(method, kvfast.LowRank)
    with pytest.raises(kvfast.DimensionMismatchError):
        compressor.decompress_to_cache(compressed, kvfast.MLAKVCache(1, 80, rope_dim), 0)
    with pytest.raises(ValueError, match="empty"):
        compressor.compress_cache(kvfast.MLAKVCache(1, 48, rope_dim), 0)
