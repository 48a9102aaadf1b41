"""Compressors: what they keep, what they cost, and attention on what is compressed, against float64 NumPy."""

import copy

import numpy as np
import pytest
import reference
from compressed_rows import METHODS, correlated, tokens_first
from selection import TIERS, pairwise

import kvfast
from kvfast import CompressedKV, Hybrid, KVCacheCompressor, LowRank, Quantize, VectorQuantization
from kvfast.compression.stores import CacheStore


@pytest.fixture
def kv(rng):
    return correlated(rng, 3, 500, 48), correlated(rng, 3, 500, 48)


@pairwise(("isa", "method", "num_queries"), TIERS, METHODS, [1, 2, 7, 40], ids=str)
def test_attend(method, num_queries, kv, rng, isa):
    """Attention on the compressed form is attention to what it decodes to: several queries, GQA, log-sum-exps."""
    if method == Quantize(4) and num_queries > 16:
        pytest.skip("of formats that seal blocks, queries further back read some tokens as floats that decode as codes")
    compressor = KVCacheCompressor(method)
    compressed = compressor.compress_kv_3d(*kv)
    k, v = compressor.decompress_kv_3d(compressed)
    q = rng.standard_normal((num_queries, 6, 48)).astype(np.float32)
    for options in ({}, {"causal": False}, {"scale": 0.3}):
        out, lse = compressed.attend(q, return_lse=True, **options)
        exact, exact_lse = reference.attention(q, tokens_first(k), tokens_first(v), **options)
        assert reference.relative_error(out, exact) < 1e-3
        np.testing.assert_allclose(lse, exact_lse, atol=1e-3 * np.abs(exact_lse).max())
    if num_queries > 1:
        alone = compressed.attend(q[-1:])
        if num_queries <= 16:
            assert np.array_equal(alone[0], compressed.attend(q)[-1])
    assert np.array_equal(compressed.attend(q, num_threads=1), compressed.attend(q, num_threads=2))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_batches(method, rng):
    """A batch is what its sequences are by themselves, and the two layouts are not taken for each other."""
    k, v = correlated(rng, 2, 3, 200, 32), correlated(rng, 2, 3, 200, 32)
    if isinstance(method, LowRank) and method.rank:
        method = LowRank(rank=16, dtype=method.dtype)
    if isinstance(method, Hybrid):
        method = Hybrid(rank=20, quant_bits=method.quant_bits)
    compressor = KVCacheCompressor(method)
    batch = compressor.compress_kv(k, v)
    ones = [compressor.compress_kv_3d(*pair) for pair in zip(k, v)]
    assert batch.layout.shape == k.shape and batch.layout.is_batched
    assert batch.nbytes == sum(one.nbytes for one in ones)
    for whole, parts in zip(compressor.decompress_kv(batch), zip(*map(compressor.decompress_kv_3d, ones))):
        assert np.array_equal(whole, np.stack(parts))
    q = rng.standard_normal((2, 3, 6, 32)).astype(np.float32)
    assert np.array_equal(batch.attend(q), np.stack([one.attend(rows) for one, rows in zip(ones, q)]))
    with pytest.raises(kvfast.DimensionMismatchError, match="use decompress_kv_3d"):
        compressor.decompress_kv(ones[0])
    with pytest.raises(kvfast.DimensionMismatchError, match="use decompress_kv$"):
        compressor.decompress_kv_3d(batch)
    with pytest.raises(kvfast.DimensionMismatchError, match="batch of 2"):
        batch.attend(q[:1])


@pytest.mark.parametrize("rank", [1, 7, 16, 47])
def test_low_rank_is_optimal(rank, kv):
    """What is left out has the norm of the discarded singular values."""
    compressed = KVCacheCompressor(LowRank(rank=rank, dtype="float32")).compress_kv_3d(*kv)
    for given, decoded, error in zip(kv, compressed.decode(), compressed.reconstruction_error):
        discarded = [np.linalg.svd(head.astype(np.float64), compute_uv=False)[rank:] for head in given]
        expected = np.sqrt(np.sum(np.square(discarded)))
        assert np.linalg.norm(decoded - given) == pytest.approx(expected, rel=2e-3)
        assert error == pytest.approx(expected / np.linalg.norm(given), rel=2e-3)


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99, 1])
def test_energy(energy, kv):
    compressed = KVCacheCompressor(LowRank(energy=energy)).compress_kv_3d(*kv)
    for given, decoded in zip(kv, compressed.decode()):
        left_out = np.square(decoded - given).sum((1, 2)) / np.square(given).sum((1, 2))
        assert (left_out < 1 - energy + 1e-5).all()
    assert energy == 1 or compressed.compression_ratio > KVCacheCompressor(LowRank(energy=1)).compress_kv_3d(*kv).compression_ratio


def test_outliers_are_exact(kv):
    """The first tokens and those far out come back as float16, whatever the others lose; ordinary ones do not."""
    for method in (Hybrid(rank=4, quant_bits=4), VectorQuantization(codebook_size=4, num_subvectors=6)):
        compressed = KVCacheCompressor(method).compress_kv_3d(*kv)
        for given, decoded in zip(kv, compressed.decode()):
            exact = np.isclose(decoded, given, rtol=1e-3, atol=1e-3).all((0, 2))
            assert exact[[0, 1, 2, 3, 250, 497]].all() and 6 <= exact.sum() <= 500 // 64


def test_sinks_are_exact(kv):
    """So do tokens whose values are next to nothing in one head."""
    k, v = kv[0].copy(), kv[1].copy()
    v[1, 77] *= 0.01
    decoded = KVCacheCompressor(VectorQuantization(4)).compress_kv_3d(k, v).decode()
    for given, one in zip((k, v), decoded):
        np.testing.assert_allclose(one[:, 77], given[:, 77], rtol=1e-3, atol=1e-3)


def test_exact_tokens_beyond_float16(rng):
    k, v = correlated(rng, 2, 500, 16), correlated(rng, 2, 500, 16)
    k[:, 50] = 1e6
    decoded, _ = KVCacheCompressor(Hybrid()).compress_kv_3d(k, v).decode()
    assert np.array_equal(decoded[:, 50], k[:, 50])
    with pytest.raises(kvfast.NonFiniteInputError, match="within the range of float16 codebooks"):
        KVCacheCompressor(VectorQuantization(16)).compress_kv_3d(1e6 * k, v)


@pytest.mark.parametrize("size", [2, 16, 17, 256])
def test_codes_are_nearest(size, rng, isa):
    """Every code is that of the nearest centroid, the first one where several are; centroids are means of their points."""
    from kvfast.compression import pq_training as codebook

    n, dims = 700, 10
    points = np.zeros((2, dims, 704), np.float32)
    points[:, :, :n] = rng.standard_normal((2, dims, n))
    bounds = np.array([[0, 3, 4, 10], [0, 1, 5, 10]], np.int32)
    centroids = codebook.train(points, n, bounds, size, 0)
    codes = codebook.encode(points, n, bounds, size, centroids)
    assert codes.shape == (2, n, 3)
    for head, j in np.ndindex(2, 3):
        first, last = bounds[head, j : j + 2]
        book = centroids[head, first * size : last * size].reshape(size, -1).astype(np.float64)
        x = points[head, first:last, :n].T.astype(np.float64)
        distances = np.square(x[:, None] - book).sum(2)
        chosen = distances[np.arange(n), codes[head, :, j]]
        assert (chosen <= distances.min(1) + 1e-5).all()
        error = chosen.mean()
        means = np.stack([x[codes[head, :, j] == c].mean(0) for c in np.unique(codes[head, :, j])])
        better = np.square(x[:, None] - means).sum(2).min(1).mean()
        assert better >= 0.99 * error  # another step would gain next to nothing
    twins = np.repeat(centroids[:, : 10 * size].reshape(2, -1)[:, :1], 20, axis=1).copy()
    assert not codebook.encode(points, n, np.array([[0, 10]] * 2, np.int32), 2, twins).any()


def test_training_is_reproducible(kv):
    """The same bytes for any number of threads and every time; others for another seed."""

    def state(threads, seed=0):
        kvfast.set_num_threads(threads)
        try:
            return KVCacheCompressor(VectorQuantization(64, seed=seed)).compress_kv_3d(*kv).state_dict()
        finally:
            kvfast.set_num_threads(None)

    one = state(1)
    assert all(np.array_equal(array, one[name]) for name, array in state(2).items())
    assert not np.array_equal(state(2, seed=1)["0.store.k.centroids"], one["0.store.k.centroids"])


def test_constant_data():
    """Fewer distinct vectors than centroids, and directions without variance."""
    k = np.ones((2, 64, 16), np.float32)
    v = np.zeros((2, 64, 16), np.float32)
    for method in (VectorQuantization(16), Hybrid(quant_bits=4), LowRank(rank=3), LowRank(energy=0.9)):
        compressed = KVCacheCompressor(method).compress_kv_3d(k, v)
        for given, decoded in zip((k, v), compressed.decode()):
            np.testing.assert_allclose(decoded, given, atol=2e-3)
        assert np.abs(compressed.attend(np.ones((2, 4, 16), np.float32))).max() < 1e-3


def test_sizes(kv):
    """nbytes counts all that is stored, and codebooks up to 16 take half the codes."""
    for method in METHODS:
        compressed = KVCacheCompressor(method).compress_kv_3d(*kv)
        assert compressed.bits_per_element == 8 * compressed.nbytes / (2 * 3 * 500 * 48)
        assert compressed.compression_ratio == pytest.approx(32 / compressed.bits_per_element)
        assert compressed.compression_ratio > 1
        if not isinstance(method, VectorQuantization):
            continue
        state = compressed.state_dict()
        assert compressed.nbytes == sum(array.nbytes for name, array in state.items() if ".store." in name or "positions" in name) + (
            KVCacheCompressor(Quantize("float16")).compress_kv_3d(*(x[:, :16] for x in kv)).nbytes
        )
        assert state["0.store.k.codes"].shape[2] == {64: 12, 16: 12, 5: 4}[method.codebook_size]
    smaller = [KVCacheCompressor(method, bits).compress_kv_3d(*kv).nbytes for method in (Hybrid(), Quantize()) for bits in (8, 4)]
    assert smaller[1] < smaller[0] and smaller[3] < smaller[2]


def test_bfloat16_and_strides(kv):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    compressor = KVCacheCompressor(Hybrid())
    rounded = [x.astype(ml_dtypes.bfloat16) for x in kv]
    expected = compressor.compress_kv_3d(*(x.astype(np.float32) for x in rounded)).decode()
    for given in (rounded, [x.view(np.uint16) for x in rounded], [np.asfortranarray(x.astype(np.float32)) for x in rounded]):
        for one, other in zip(compressor.compress_kv_3d(*given).decode(), expected):
            np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: LowRank(), ValueError, "either rank or energy"),
        (lambda: LowRank(rank=3, energy=0.5), ValueError, "either rank or energy"),
        (lambda: LowRank(rank=0), ValueError, "rank must be between 1 and 512, got 0"),
        (lambda: LowRank(rank=2.5), TypeError, "rank must be an integer"),
        (lambda: LowRank(energy=1.5), ValueError, "at most 1, got 1.5"),
        (lambda: LowRank(energy=float("nan")), ValueError, "at most 1, got nan"),
        (lambda: LowRank(rank=4, dtype="int9"), ValueError, "unknown storage dtype 'int9'"),
        (lambda: Hybrid(quant_bits=3), ValueError, "bits must be 8 or 4, got 3"),
        (lambda: Quantize(16), ValueError, "bits must be 8 or 4, got 16"),
        (lambda: Quantize("int9"), ValueError, "unknown storage dtype 'int9'"),
        (lambda: VectorQuantization(257), ValueError, "codebook_size must be between 2 and 256, got 257"),
        (lambda: VectorQuantization(1), ValueError, "between 2 and 256"),
        (lambda: VectorQuantization(16, 0), ValueError, "num_subvectors"),
        (lambda: VectorQuantization(16, seed=-1), ValueError, "seed"),
        (lambda: KVCacheCompressor("lowrank"), TypeError, "method must be one of LowRank"),
        (lambda: KVCacheCompressor(LowRank), TypeError, "method must be one of LowRank"),
        (lambda: KVCacheCompressor(Hybrid(), 5), ValueError, "bits must be 8 or 4, got 5"),
        (lambda: KVCacheCompressor(Hybrid(), None), ValueError, "bits must be 8 or 4, got None"),
        (lambda: KVCacheCompressor(Hybrid()).decompress_kv("x"), TypeError, "compressed must be a CompressedKV"),
    ],
)
def test_bad_methods(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_numpy_numbers(kv):
    """Are as good as Python's, also in files."""
    for one, other in (
        (LowRank(rank=np.int64(16)), LowRank(rank=16)),
        (LowRank(energy=np.float32(0.5)), LowRank(energy=0.5)),
        (Hybrid(quant_bits=np.int8(4)), Hybrid(quant_bits=4)),
        (VectorQuantization(np.int64(16), np.uint8(4), np.int32(1)), VectorQuantization(16, 4, 1)),
        (Quantize(np.int64(8)), Quantize(8)),
    ):
        assert one == other
        states = [KVCacheCompressor(method).compress_kv_3d(*kv).state_dict() for method in (one, other)]
        assert all(np.array_equal(array, states[1][name]) for name, array in states[0].items())
    for make in (lambda: Quantize(8.0), lambda: Hybrid(quant_bits=True), lambda: LowRank(energy=True)):
        with pytest.raises(ValueError):
            make()


def test_large_values_are_refused_or_kept(kv):
    """float16 coordinates are not silently something else; exact tokens become float32."""
    k, v = (array * 1e5 for array in kv)
    with pytest.raises(kvfast.NonFiniteInputError):
        KVCacheCompressor(Quantize("float16")).compress_kv_3d(k, v)
    decoded = KVCacheCompressor(Hybrid()).compress_kv_3d(k, v).decode()
    assert all(np.abs(one - other).max() < 0.05 * np.abs(other).max() for one, other in zip(decoded, (k, v)))


def test_bad_input(kv):
    k, v = kv
    compressor = KVCacheCompressor(Hybrid())
    with pytest.raises(kvfast.DimensionMismatchError, match=r"the same shape, got \(3, 500, 48\) and \(3, 499, 48\)"):
        compressor.compress_kv_3d(k, v[:, 1:])
    with pytest.raises(kvfast.DimensionMismatchError, match="hold at least one of each"):
        compressor.compress_kv_3d(k[:, :0], v[:, :0])
    with pytest.raises(kvfast.DimensionMismatchError, match="k must have shape .batch"):
        compressor.compress_kv(k, v)
    with pytest.raises(kvfast.DimensionMismatchError, match="k must have shape .num_heads"):
        compressor.compress_kv_3d(k[None], v[None])
    with pytest.raises(TypeError, match="got int64"):
        compressor.compress_kv_3d(k.astype(np.int64), v)
    with pytest.raises(kvfast.DimensionMismatchError, match="at most 512, got 520"):
        compressor.compress_kv_3d(*np.zeros((2, 1, 20, 520), np.float32))
    bad = v.copy()
    bad[2, 30, 7] = np.nan
    with pytest.raises(kvfast.NonFiniteInputError, match=r"v must be finite, got nan at \[2, 30, 7\]"):
        compressor.compress_kv_3d(k, bad)
    for method in (LowRank(rank=49), Hybrid(rank=49)):
        with pytest.raises(ValueError, match="rank must be at most head_dim, 48, got 49"):
            KVCacheCompressor(method).compress_kv_3d(k, v)
    with pytest.raises(ValueError, match="codebook_size must be at most the number of tokens"):
        KVCacheCompressor(VectorQuantization(256)).compress_kv_3d(k[:, :200], v[:, :200])
    with pytest.raises(ValueError, match="num_subvectors must be at most head_dim, 48, got 49"):
        KVCacheCompressor(VectorQuantization(16, 49)).compress_kv_3d(k, v)


def test_bad_queries(kv):
    compressed = KVCacheCompressor(VectorQuantization(16)).compress_kv_3d(*kv)
    q = np.zeros((1, 6, 48), np.float32)
    for wrong, error, match in [
        (q[..., :40], kvfast.DimensionMismatchError, "head_dim 48, got 40"),
        (q[:, :4], kvfast.DimensionMismatchError, "multiple of the 3 heads, got 4"),
        (q[0], kvfast.DimensionMismatchError, "q must have shape"),
        (q + np.inf, kvfast.NonFiniteInputError, "q must be finite"),
        (np.repeat(q, 501, axis=0), ValueError, "q must hold at most the 500 compressed tokens, got 501"),
        (q.astype(int), TypeError, "got int64"),
    ]:
        with pytest.raises(error, match=match):
            compressed.attend(wrong)
    for options in ({"scale": float("inf")}, {"num_threads": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            compressed.attend(q, **options)


def test_cannot_be_pickled(kv):
    import pickle

    compressed = KVCacheCompressor(Quantize(8)).compress_kv_3d(*kv)
    assert isinstance(compressed, CompressedKV)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(compressed)


@pytest.mark.parametrize("method", [kvfast.Hybrid(8), kvfast.LowRank(8), kvfast.Quantize(), kvfast.VectorQuantization(16, 4)], ids=str)
def test_a_copy_is_independent(rng, method):
    k, v = rng.standard_normal((2, 2, 200, 16), np.float32)
    given = kvfast.KVCacheCompressor(method).compress_kv_3d(k, v)
    q = rng.standard_normal((3, 4, 16)).astype(np.float32)
    expected, arrays = given.attend(q), given.state_dict()
    for other in (given.copy(), copy.copy(given), copy.deepcopy(given)):
        assert other is not given and (other.layout, other.method, other.nbytes) == (given.layout, given.method, given.nbytes)
        assert other.reconstruction_error == given.reconstruction_error
        assert all(np.array_equal(array, arrays[name]) for name, array in other.state_dict().items())
        for mine, others in zip(given._arrays().values(), other._arrays().values()):
            assert not np.shares_memory(mine, others)
        np.testing.assert_array_equal(other.attend(q), expected)
    del given
    np.testing.assert_array_equal(other.attend(q), expected)


@pytest.mark.parametrize(
    "tokens, method, most",
    [
        (512, Hybrid(quant_bits=4), 9.0),
        (64, Hybrid(quant_bits=4), 23.0),
        (320, Hybrid(quant_bits=4), 12.0),
        (512, Hybrid(quant_bits=8), 13.0),
        (512, Hybrid(rank=64, quant_bits=4), 5.0),
        (130, Quantize(4), 7.6),
        (512, Quantize(4), 5.0),
    ],
)
def test_finished_cache_has_no_float_tail(rng, tokens, method, most):
    """With Hybrid INT4, the bases of 8 x 512 x 128 alone take 4.0 bits, and the codes 4.4."""
    k, v = rng.standard_normal((2, 8, tokens, 128)).astype(np.float32)
    compressed = KVCacheCompressor(method).compress_kv_3d(k, v)
    assert compressed.bits_per_element < most
    if tokens >= 128 and not getattr(method, "rank", None):
        assert compressed.reconstruction_error.k < 0.115  # of Gaussian channels, which gain nothing by more bits for some
    q = rng.standard_normal((min(tokens, 5), 16, 128)).astype(np.float32)
    keys, values = (one.swapaxes(0, 1) for one in compressed.decode())
    for other in (compressed, CompressedKV.from_state_dict(compressed.state_dict())):
        for causal in (False, True):
            want, _ = reference.attention(q, keys, values, causal=causal)
            assert reference.relative_error(other.attend(q, causal=causal), want) < 2e-3


@pytest.mark.parametrize("tokens", [64, 100, 200, 319, 500])
def test_an_outlier_is_found_in_a_short_prompt(rng, tokens):
    """Besides the first tokens, which are kept in any case."""
    k, v = rng.standard_normal((2, 2, tokens, 32)).astype(np.float32)
    k[:, tokens // 2] *= 30
    compressed = KVCacheCompressor(Hybrid(quant_bits=4)).compress_kv_3d(k, v)
    (part,) = compressed._parts
    assert tokens // 2 in part.positions and list(part.positions[:4]) == [0, 1, 2, 3]
    np.testing.assert_allclose(compressed.decode()[0][:, tokens // 2], k[:, tokens // 2], rtol=1e-3)


def test_a_compressed_prompt_has_no_recent_floats(kv):
    """No tokens follow, so that all of them are codes, whatever the format keeps of tokens that others follow."""
    for options in ({"dtype": "int8"}, {"dtype": "int4", "per_channel": True}):
        plain = CacheStore.of(*kv, kvfast.KVFormat(**options))
        recent = CacheStore.of(*kv, kvfast.KVFormat(**options, num_recent_float_tokens=256))
        assert recent.nbytes == plain.nbytes and np.array_equal(recent.cache.k(0), plain.cache.k(0))
