"""MultiHeadKVCache against NumPy in float64: every width, codebook, head_dim and tier; what it holds, and what it refuses."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import attention

import kvfast
from kvfast import DimensionMismatchError, MultiHeadKVCache, NonFiniteInputError
from kvfast.caches.multi_head import MultiHeadConfig

BITS = [2, 3, 4, 5, 6, 7, 8, (5, 4), (8, 2)]
DIMS = [1, 2, 3, 7, 16, 20, 33, 64, 80, 100, 127, 128, 255, 256]
# Relative rms error of Gaussian vectors of 128 elements, a little above what is measured.
ERRORS = {2: 0.36, 3: 0.195, 4: 0.108, 5: 0.055, 6: 0.028, 7: 0.0145, 8: 0.0073}
BYTES = {2: 34, 3: 50, 4: 66, 5: 82, 6: 98, 7: 114, 8: 132}


def filled(rng, num_heads, n, dim, *bits, **options):
    """A cache of n tokens, and the keys and values that it was given."""
    cache = MultiHeadKVCache(num_heads, MultiHeadConfig(dim, *bits, **options))
    k, v = rng.standard_normal((2, n, num_heads, dim)).astype(np.float32)
    for token in range(n):
        cache.push_token(k[token], v[token])
    return cache, k, v


def scores_of(q, k):
    """(num_q_heads, tokens) in float64; q (num_q_heads, dim), k (tokens, num_heads, dim)."""
    k = np.repeat(k.astype(np.float64), len(q) // k.shape[1], axis=1)
    return np.einsum("hd,thd->ht", q.astype(np.float64), k) / np.sqrt(q.shape[1])


def agree(cache, q):
    """Scores, weights and output are those of what is stored, and each head's view tells the same."""
    k, v = cache.k(), cache.v()
    assert k.shape == v.shape == (len(cache), cache.num_heads, cache.head_dim) and k.dtype == v.dtype == np.float32
    expected, got = scores_of(q, k), cache.attention_scores(q)
    assert got.shape == expected.shape and got.dtype == np.float32
    # What a score may differ by: 1e-3 of the product of the norms, of which it is a part.
    norms = np.sqrt(scores_of(q, q[:, None]).diagonal())[:, None] * np.linalg.norm(k, axis=2).max() / k.shape[2] ** 0.25
    assert np.all(np.abs(got - expected) <= 1e-3 * norms)
    weights = cache.attention_scores(q, softmax=True)
    exact = np.exp(expected - expected.max(1, keepdims=True))
    assert np.allclose(weights, exact / exact.sum(1, keepdims=True), rtol=5e-3, atol=1e-7)
    assert np.allclose(weights.sum(1), 1, atol=1e-5)
    out = cache.attend(q)
    exact, _ = attention(q[None], k, v)
    scale = np.sqrt((v.astype(np.float64) ** 2).sum(2).max())
    assert out.dtype == np.float32 and np.abs(out - exact[0]).max() <= 1e-3 * scale
    group = len(q) // cache.num_heads
    for i in range(cache.num_heads):
        head, mine = cache.head(i), slice(i * group, (i + 1) * group)
        assert np.array_equal(head.attention_scores(q[mine]), got[mine])
        assert np.array_equal(head.attention_scores(q[mine], softmax=True), weights[mine])
        assert np.allclose(head.attend(q[mine]), out[mine], rtol=1e-4, atol=1e-5 * scale)
        assert np.array_equal(head.k(), k[:, i : i + 1]) and np.array_equal(head.v(), v[:, i : i + 1])


class TestAgainstTheOracle:
    @pytest.mark.parametrize("dim", DIMS)
    def test_every_width_and_codebook(self, isa, rng, dim):
        for bits in BITS:
            for codebook in ("gaussian", "uniform"):
                for rotation in (True, False):
                    cache, _, _ = filled(rng, 2, 17, dim, bits, codebook=codebook, rotation=rotation, num_q_heads=6)
                    agree(cache, rng.standard_normal((6, dim)).astype(np.float32))

    @pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 128, 129, 300])
    def test_lengths(self, isa, rng, n):
        for bits in (3, 4, 7, 8):
            cache, _, _ = filled(rng, 3, n, 20, bits)
            agree(cache, rng.standard_normal((3, 20)).astype(np.float32))

    @pytest.mark.parametrize("num_heads, num_q_heads", [(1, 1), (1, 40), (2, 34), (4, 4), (8, 32)])
    def test_shared_heads(self, isa, rng, num_heads, num_q_heads):
        for bits in (4, 5):
            cache, _, _ = filled(rng, num_heads, 70, 32, bits, num_q_heads=num_q_heads)
            assert cache.num_q_heads == num_q_heads and cache.head(0).num_q_heads == num_q_heads // num_heads
            agree(cache, rng.standard_normal((num_q_heads, 32)).astype(np.float32))

    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 1 << 30),
        dim=st.integers(1, 256),
        n=st.integers(1, 140),
        bits=st.integers(2, 8),
        rotation=st.booleans(),
        codebook=st.sampled_from(["gaussian", "uniform"]),
        exponent=st.integers(-40, 30),
    )
    def test_any_size_and_magnitude(self, seed, dim, n, bits, rotation, codebook, exponent):
        rng = np.random.default_rng(seed)
        cache, k, v = filled(rng, 2, 0, dim, bits, rotation=rotation, codebook=codebook, seed=seed)
        k, v = rng.standard_normal((2, n, 2, dim)).astype(np.float32) * rng.choice(np.float32([0, 1]), (2, n, 2, 1), p=[0.1, 0.9])
        for token in range(n):
            cache.push_token(np.ldexp(k[token], exponent), v[token])
        agree(cache, np.ldexp(rng.standard_normal((2, dim)), -exponent).astype(np.float32))
        assert not cache.k()[~k.any(2)].any() and not cache.v()[~v.any(2)].any()


class TestPrecision:
    @pytest.mark.parametrize("codebook", ["gaussian", "uniform"])
    @pytest.mark.parametrize("bits", range(2, 9))
    def test_errors_and_bytes(self, isa, rng, bits, codebook):
        cache, k, v = filled(rng, 4, 128, 128, bits, codebook=codebook)
        bound = ERRORS[bits] * (1.12 if codebook == "uniform" else 1)
        for got, was in ((cache.k(), k), (cache.v(), v)):
            assert np.sqrt(np.mean((got - was) ** 2) / np.mean(was**2)) < bound
        assert cache.bytes_per_token == 4 * 2 * (BYTES[bits] + (2 if bits == 4 and codebook == "uniform" else 0))

    def test_a_gaussian_codebook_is_better_up_to_5_bits(self, rng):
        for bits in range(2, 9):
            error = {}
            for codebook in ("gaussian", "uniform"):
                cache, k, _ = filled(np.random.default_rng(1), 4, 200, 128, bits, codebook=codebook)
                error[codebook] = np.mean((cache.k() - k) ** 2)
            assert error["gaussian"] < 0.99 * error["uniform"] if bits <= 5 else error["gaussian"] == error["uniform"]

    def test_rotation_helps_where_an_element_stands_out(self, rng):
        for bits in (2, 3, 4, 5, 8):
            error = {}
            for rotation in (True, False):
                cache = MultiHeadKVCache(2, MultiHeadConfig(64, bits, rotation))
                k = rng.standard_normal((100, 2, 64)).astype(np.float32)
                k[:, :, 5] *= 30
                for token in k:
                    cache.push_token(token, token)
                error[rotation] = np.mean((np.delete(cache.k() - k, 5, axis=2)) ** 2)
            assert error[True] < 0.7 * error[False]

    def test_outputs_stay_close(self):
        """32 heads, 512 tokens of 128: mean cosine similarity of outputs with those of exact attention, of 8 draws."""
        for bits, least in ((3, 0.968), (4, 0.992), ((5, 4), 0.9948), (5, 0.9978), (8, 0.9999)):
            cosines = []
            for seed in range(8):
                q = np.random.default_rng(100 + seed).standard_normal((32, 128)).astype(np.float32)
                cache, k, v = filled(np.random.default_rng(seed), 32, 512, 128, bits)
                exact, out = attention(q[None], k, v)[0][0], cache.attend(q)
                cosines.append((out * exact).sum(1) / np.linalg.norm(out, axis=1) / np.linalg.norm(exact, axis=1))
            assert np.mean(cosines) > least

    def test_seeds(self, rng):
        k, v, q = rng.standard_normal((3, 2, 48)).astype(np.float32)
        rows = []
        for seed in (0, 0, 1, (1 << 64) - 1):
            cache = MultiHeadKVCache(2, MultiHeadConfig(48, 3, seed=seed))
            cache.push_token(k, v)
            rows.append(cache.k())
            agree(cache, q)
        assert np.array_equal(rows[0], rows[1])
        assert not np.array_equal(rows[0], rows[2]) and not np.array_equal(rows[0], rows[3])
        cache.push_token([k[0], k[0]], v)
        assert not np.array_equal(cache.k()[1, 0], cache.k()[1, 1])  # heads have signs of their own

    def test_threads(self, rng):
        cache, _, _ = filled(rng, 8, 1500, 64, 3)
        q = rng.standard_normal((8, 64)).astype(np.float32)
        for call in (cache.attend, cache.attention_scores, lambda q, **n: cache.attention_scores(q, softmax=True, **n)):
            assert np.array_equal(call(q, num_threads=1), call(q, num_threads=4))


class TestSizes:
    @pytest.mark.parametrize("bits", range(2, 9))
    def test_ratio_counts_the_bytes_there_are(self, rng, bits):
        cache = MultiHeadKVCache(4, MultiHeadConfig(128, bits))
        assert cache.compression_ratio == 1.0 and cache.nbytes_used == 0 and not cache
        x = rng.standard_normal((4, 128), np.float32)
        for n in range(1, 129):
            cache.push_token(x, x)
            blocks = -(-n // 64) * 64
            assert cache.nbytes_used == blocks * 4 * 2 * BYTES[bits] <= cache.nbytes
            assert cache.compression_ratio == pytest.approx(n / blocks * 4 * 128 / BYTES[bits])
            assert cache.head(2).nbytes_used * 4 == cache.nbytes_used
            assert cache.head(2).compression_ratio == pytest.approx(cache.compression_ratio)

    def test_eviction_gives_memory_back(self, rng):
        cache, k, _ = filled(rng, 2, 640, 16, 4)
        most = cache.nbytes_used
        q = rng.standard_normal((2, 16)).astype(np.float32)
        before = cache.attention_scores(q)
        assert cache.evict_outside_window(700) == 0 and len(cache) == 640
        assert cache.evict_outside_window(70) == 570 and len(cache) == len(cache.head(0)) == 70
        assert cache.nbytes_used == most * 2 // 10  # places 570 to 640: of two blocks
        assert np.array_equal(cache.attention_scores(q), before[:, -70:])
        assert cache.evict_outside_window(100) == 0 and cache.evict_outside_window(0) == 70
        assert not cache and cache.nbytes_used == 0
        for _ in range(20):
            for token in k[:50]:
                cache.push_token(token, token)
            cache.evict_outside_window(30)
            agree(cache, q)
        assert cache.nbytes_used <= most // 5

    def test_names(self, rng):
        cache, _, _ = filled(rng, 2, 5, 32, 3, seed=7)
        assert "2 heads x 32, int3(rotation=kv, codebook=gaussian), 5 tokens" in repr(cache)
        assert repr(cache.head(1)).startswith("head 1 of MultiHeadKVCache(") and cache.head(np.int64(1))
        assert cache.head_dim == 32 and cache.config == MultiHeadConfig(32, 3, seed=7)
        with pytest.raises(AttributeError):
            cache.config.bits = 4


ONES = np.ones((3, 4), np.float32)
REFUSED = [
    (ONES[:2], DimensionMismatchError, "keys must be 3 vectors, one per head, got 2"),
    (np.ones((4, 4)).tolist(), DimensionMismatchError, "keys must be 3 vectors, one per head, got 4"),
    ([], DimensionMismatchError, "keys must be 3 vectors, one per head, got 0"),
    (np.ones((3, 5), np.float32), DimensionMismatchError, r"keys must have shape \(3, 4\), got \(3, 5\)"),
    ([[1.0] * 4, [1.0] * 3, [1.0] * 4], DimensionMismatchError, r"keys\[1\] must have shape \(4,\), got \(3,\)"),
    ([[1.0] * 4, [1.0, [2.0]], [1.0] * 4], DimensionMismatchError, r"keys\[1\] must have shape \(4,\)"),
    (ONES[:, None], DimensionMismatchError, r"keys must have shape \(3, 4\), got \(3, 1, 4\)"),
    (ONES[:, :0], DimensionMismatchError, r"keys must have shape \(3, 4\), got \(3, 0\)"),
    (ONES * np.nan, NonFiniteInputError, "keys must be finite, got nan in element 0 of head 0"),
    ([[1.0] * 4, [1.0] * 4, [1, 2, np.inf, 4]], NonFiniteInputError, "got inf in element 2 of head 2"),
    ([[1e300] * 4] * 3, NonFiniteInputError, "keys must be finite, got inf in element 0 of head 0"),
    (ONES * np.float32(-1e37), NonFiniteInputError, "at most 6e[+]35 in magnitude, got -9.99"),
    (np.ones((3, 4), np.int64), TypeError, "keys must be float32, .* got int64"),
    (np.ones((3, 4), complex), TypeError, "got complex128"),
    (
        np.ones((3, 4), np.int64),
        TypeError,
        r"keys must be float32, float16 or bfloat16 \(ml_dtypes, or its bits as uint16\), got int64",
    ),
    ([np.ones(4, np.int64)] * 3, TypeError, r"keys\[0\] must be float32, float16 or bfloat16 .* got int64"),
    ([["a"] * 4] * 3, TypeError, r"keys\[0\] must be float32"),
    ([[True] * 4] * 3, TypeError, "got bool"),
    (None, TypeError, "keys must be 3 vectors, one per head, got None"),
    (1.0, TypeError, "keys must be 3 vectors"),
]


class TestInput:
    @pytest.fixture
    def cache(self, rng):
        return filled(rng, 3, 2, 4)[0]

    def test_kinds_of_arrays(self, cache, rng):
        ml_dtypes = pytest.importorskip("ml_dtypes")
        x = rng.integers(-3, 4, (3, 4)).astype(np.float32)
        same = [
            *(x, x.astype(np.float16), x.astype(ml_dtypes.bfloat16), x.tolist(), list(x), tuple(x)),
            *(x.astype(ml_dtypes.bfloat16).view(np.uint16), x.astype(int).tolist(), np.asfortranarray(x)),
            x[::-1][::-1],
        ]
        for one in same:
            cache.push_token(one, one)
        rows = np.concatenate([cache.k()[2:], cache.v()[2:]])
        assert np.array_equal(rows, np.broadcast_to(rows[:1], rows.shape))
        x.setflags(write=False)
        cache.push_token(x, x)
        kept = x.copy()
        assert np.array_equal(cache.attend(x.tolist()), cache.attend(x)) and np.array_equal(x, kept)

    @pytest.mark.parametrize("given, error, message", REFUSED, ids=[str(i) for i in range(len(REFUSED))])
    def test_refused(self, cache, rng, given, error, message):
        before = cache.k(), cache.v(), cache.nbytes_used
        good = np.ones((3, 4), np.float32)
        with pytest.raises(error, match=message):
            cache.push_token(given, good)
        with pytest.raises(error, match=message.replace("keys", "values")):
            cache.push_token(good, given)
        for call in (cache.attention_scores, cache.attend):
            with pytest.raises(error, match=message.replace("keys", "queries")):
                call(given)
        assert len(cache) == 2 and cache.nbytes_used == before[2]
        assert np.array_equal(cache.k(), before[0]) and np.array_equal(cache.v(), before[1])

    def test_queries(self, rng):
        cache, _, _ = filled(rng, 3, 2, 4, num_q_heads=6)
        with pytest.raises(DimensionMismatchError, match="queries must be 6 vectors, one per head, got 3"):
            cache.attend(np.ones((3, 4)))
        with pytest.raises(DimensionMismatchError, match="queries must be 2 vectors, one per head, got 6"):
            cache.head(0).attention_scores(np.ones((6, 4)))

    def test_without_tokens(self):
        cache = MultiHeadKVCache(3, MultiHeadConfig(4))
        q = ONES
        for softmax in (False, True):
            assert cache.attention_scores(q, softmax=softmax).shape == (3, 0)
        for one in (cache, cache.head(2)):
            with pytest.raises(ValueError, match="no tokens to attend to"):
                one.attend(q[: one.num_q_heads])
            assert one.v().shape[0] == len(one) == 0 and one.compression_ratio == 1.0

    @pytest.mark.parametrize("head", [-1, 3, 1 << 70])
    def test_heads_there_are_not(self, cache, head):
        with pytest.raises(IndexError, match="head must be between 0 and 2"):
            cache.head(head)

    def test_the_fields_of_a_configuration_stand_for_it(self, rng):
        fields = {"head_dim": 20, "bits": (5, 3), "rotation": False, "codebook": "uniform", "num_q_heads": 6, "seed": 7}
        pair, rows = [MultiHeadKVCache(2, **fields), MultiHeadKVCache(2, MultiHeadConfig(**fields))], rng.standard_normal((2, 9, 2, 20))
        for one in pair:
            one.push_tokens(*rows)
        assert pair[0].config == pair[1].config and pair[0].snapshot() == pair[1].snapshot()

    def test_other_arguments(self, cache):
        for head in ("0", 1.0, None, True):
            with pytest.raises(TypeError, match="head must be an integer"):
                cache.head(head)
        with pytest.raises(ValueError, match="window must be at least 0, got -1"):
            cache.evict_outside_window(-1)
        with pytest.raises(TypeError, match="window must be an integer"):
            cache.evict_outside_window(2.5)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(cache)
        with pytest.raises(TypeError, match="config must be a MultiHeadConfig, got int"):
            MultiHeadKVCache(2, 64)
        with pytest.raises(TypeError, match="config must be a MultiHeadConfig, got NoneType: pass one, or head_dim"):
            MultiHeadKVCache(2, bits=4)
        with pytest.raises(TypeError, match="config must be None where .* got a MultiHeadConfig and bits, seed"):
            MultiHeadKVCache(2, MultiHeadConfig(64), bits=4, seed=1)
        with pytest.raises(TypeError, match="head_dim must be an integer, got True"):
            MultiHeadKVCache(2, head_dim=True)
        with pytest.raises(ValueError, match="num_heads must be between 1 and 65536, got 0"):
            MultiHeadKVCache(0, MultiHeadConfig(4))
        with pytest.raises(DimensionMismatchError, match="num_q_heads must be a multiple of the 4 heads, got 6"):
            MultiHeadKVCache(4, MultiHeadConfig(4, num_q_heads=6))

    @pytest.mark.parametrize(
        "options, error, message",
        [
            ({"head_dim": 0}, ValueError, "head_dim must be between 1 and 512, got 0"),
            ({"head_dim": 513}, ValueError, "head_dim must be between 1 and 512"),
            ({"head_dim": 2.0}, TypeError, "head_dim must be an integer"),
            ({"bits": 1}, ValueError, "bits must be between 2 and 8, got 1"),
            ({"bits": 9}, ValueError, "bits must be between 2 and 8, got 9"),
            ({"bits": 4.0}, TypeError, "bits must be an integer"),
            ({"bits": (4, 9)}, ValueError, "bits must be between 2 and 8, got 9"),
            ({"bits": (4, 4, 4)}, ValueError, "bits must be one number, or two"),
            ({"rotation": 1}, TypeError, "rotation must be True or False, got 1"),
            ({"codebook": "nf4"}, ValueError, 'codebook must be "gaussian" or "uniform"'),
            ({"num_q_heads": 0}, ValueError, "num_q_heads must be between 1"),
            ({"seed": -1}, ValueError, "seed must be an integer between 0"),
            ({"seed": 1 << 64}, ValueError, "seed must be an integer between 0"),
            ({"seed": 1.5}, ValueError, "seed must be an integer between 0"),
        ],
    )
    def test_configurations(self, options, error, message):
        with pytest.raises(error, match=message):
            MultiHeadConfig(**{"head_dim": 64} | options)


class TestFiles:
    @pytest.mark.parametrize("held", [0, 1, 64, 130, 200])
    @pytest.mark.parametrize("options", [{}, {"bits": (5, 3), "seed": 7, "num_q_heads": 6}, {"bits": 8, "rotation": False}], ids=str)
    def test_save_and_load(self, rng, tmp_path, options, held):
        cache, _, _ = filled(rng, 3, 200, 20, **options)
        cache.evict_outside_window(held)
        cache.save(tmp_path / "heads", {"model": "m"})
        for other in (kvfast.load(tmp_path / "heads"), kvfast.load(tmp_path / "heads", mmap=True)):
            assert type(other) is MultiHeadKVCache and len(other) == held and (other.config, other.num_heads) == (cache.config, 3)
            assert np.array_equal(other.k(), cache.k())
            if held:
                q = rng.standard_normal((cache.num_q_heads, 20)).astype(np.float32)
                assert np.array_equal(other.attend(q), cache.attend(q))
                assert np.array_equal(other.attention_scores(q), cache.attention_scores(q))
            k, v = rng.standard_normal((2, 70, 3, 20)).astype(np.float32)
            one = cache.copy()
            for each in (one, other):
                each.push_tokens(k, v)
                each.evict_outside_window(100)
            assert np.array_equal(other.v(), one.v())
        assert kvfast.Snapshot.load(tmp_path / "heads").metadata == {"model": "m"}

    def test_what_does_not_fit(self, rng):
        cache, _, _ = filled(rng, 3, 20, 16)
        snapshot, kept = cache.snapshot(), cache.k()
        for other in (
            MultiHeadKVCache(2, cache.config),
            MultiHeadKVCache(3, MultiHeadConfig(16, 8)),
            kvfast.KVCache(1, 3, 16),
            MultiHeadKVCache(3, MultiHeadConfig(16, seed=1)),
        ):
            with pytest.raises(kvfast.IncompatibleSnapshotError, match="the snapshot has"):
                other.restore(snapshot)
            with pytest.raises(kvfast.IncompatibleSnapshotError):
                cache.restore(other.snapshot())
        for wrong in (None, cache, b""):
            with pytest.raises(TypeError, match="needs a Snapshot"):
                cache.restore(wrong)
        assert np.array_equal(cache.k(), kept)

    def test_a_state_with_other_tokens_dropped_is_refused(self, rng):
        cache, _, _ = filled(rng, 2, 200, 16)
        cache.evict_outside_window(30)
        arrays = cache.snapshot().state_dict()
        fields = json.loads(arrays["header"].tobytes())
        for name, number in [("evicted_tokens", 201), ("evicted_tokens", -1), ("skipped_blocks", 3), ("evicted_tokens", 100)]:
            place = fields["tables"][0] | {name: number}
            header = np.frombuffer(json.dumps(fields | {"tables": [place]}).encode(), np.uint8)
            with pytest.raises(kvfast.CorruptFileError):
                kvfast.Snapshot.from_state_dict(arrays | {"header": header})

    def test_many_tokens_are_refused_as_a_whole(self, rng):
        cache, k, v = filled(rng, 2, 5, 16)
        bad = np.array(k)
        bad[3, 1, 7] = np.nan
        for keys, values, error, message in [
            (bad, v, NonFiniteInputError, r"keys must be finite, .* got nan at \[3, 1, 7\]"),
            (k, bad * np.float32(0) + np.float32(1e36), NonFiniteInputError, "values must be finite, and at most 6e[+]35"),
            (k[:3], v, DimensionMismatchError, "the same number of tokens, got 3 and 5"),
            (k[0], v, DimensionMismatchError, r"keys must have shape \(num_tokens, 2, 16\)"),
            (k[:0], v[:0], DimensionMismatchError, "at least one token"),
            (k.astype(np.int64), v, TypeError, "got int64"),
        ]:
            with pytest.raises(error, match=message):
                cache.push_tokens(keys, values)
            assert len(cache) == 5


def test_a_snapshot_of_evicted_heads_keeps_what_is_held(rng):
    cache = kvfast.MultiHeadKVCache(2, MultiHeadConfig(head_dim=32))
    cache.push_tokens(*rng.standard_normal((2, 60, 2, 32)).astype(np.float32))
    cache.evict_outside_window(10)
    snapshot = cache.snapshot()
    short = snapshot.truncated(5)
    cache.truncate(5)
    assert len(snapshot) == 10 and len(short) == 5
    cache.restore(short)
    assert len(cache) == 5 and np.array_equal(cache.head(np.array(1)).k(), cache.head(1).k())
    with pytest.raises(ValueError, match="n must be between 0 and the 10 tokens of the cache, got 55"):
        snapshot.truncated(55)
