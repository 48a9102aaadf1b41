"""The precision contract where it is hardest: loud channels, large scores, one weight next to many small ones, softcaps."""

import numpy as np
import pytest
from cache_kinds import FORMATS, cache_of, filled
from reference import attention, bound, relative_error
from selection import parametrize

import kvfast

STORED = {**FORMATS, "float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}


def with_scores(q, k, largest, scale):
    """Queries whose greatest score is `largest`, in each head."""
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("qhd,khd->qhk", q.astype(np.float64), k.astype(np.float64).repeat(group, 1)) * scale
    return (q * (largest / np.abs(scores).max((0, 2)))[:, None]).astype(np.float32)


@pytest.mark.parametrize("name", STORED)
def test_loud_channels_of_keys(isa, rng, name):
    """As those of real models: a channel that is louder than the others leaves these few bits of an integer."""
    for dim, loud in [(64, 3), (64, 40), (20, 10), (128, 20)]:
        k, v = rng.standard_normal((2, 330, 2, dim)).astype(np.float32)
        k[:, :, dim // 3] *= loud
        cache = cache_of(STORED[name], k, v)
        for n in (1, 20):
            q = with_scores(rng.standard_normal((n, 8, dim)), cache.k(0), 15, dim**-0.5)
            expected, _ = attention(q, cache.k(0), cache.v(0))
            assert relative_error(cache.attend(0, q), expected) < bound(name), (dim, loud, n)


@pytest.mark.parametrize("name", STORED)
def test_loud_channels_of_queries(isa, rng, name):
    k, v = rng.standard_normal((2, 300, 2, 64)).astype(np.float32)
    cache = cache_of(STORED[name], k, v)
    for loud in (3, 40):
        for n in (1, 20):
            q = rng.standard_normal((n, 8, 64))
            q[:, :, 11] *= loud
            q = with_scores(q, cache.k(0), 15, 64**-0.5)
            expected, _ = attention(q, cache.k(0), cache.v(0))
            assert relative_error(cache.attend(0, q), expected) < bound(name), (loud, n)


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("above", (-200, 4, 9, 60, 200))
def test_a_first_token_above_the_splits_after_it(isa, rng, name, above):
    """Later splits begin with its score as their largest so far, and may be all that counts, or nothing."""
    k, v = rng.standard_normal((2, 1400, 1, 32)).astype(np.float32)
    k[:, :, 3] = 0
    k[0, :, 3], k[1, :, 3] = above, above / 2 + 5
    cache = cache_of(STORED[name], k, v)
    for n in (1, 40):
        q = rng.standard_normal((n, 2, 32)).astype(np.float32)
        q[:, :, 3] = 32**0.5
        sinks = [{"sliding_window": window, "num_sink_tokens": 2} for window in (200, 1390)]
        for sees in ({}, {"sliding_window": 1100}, *sinks):
            expected, lse = attention(q, cache.k(0), cache.v(0), **sees)
            output, at = cache.attend(0, q, return_lse=True, **sees)
            assert relative_error(output, expected) < bound(name), (n, sees)
            np.testing.assert_allclose(at, lse, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("name", STORED)
def test_many_small_weights_beside_a_large_one(isa, rng, name):
    """Each is less than a step of 15 bits, and together they are more than the contract allows to lose."""
    dim = 32
    for below in (6, 10.5, 11.5):
        k, v = rng.standard_normal((2, 250, 1, dim)).astype(np.float32) * 0.02
        k[:, :, 3] -= below
        k[200, :, 3] += below
        v[:, :, 5] += 1
        v[200, :, 5] = -0.2
        cache = cache_of(STORED[name], k, v)
        for n in (1, 20):
            q = np.zeros((n, 4, dim), np.float32)
            q[:, :, 3] = 1
            expected, _ = attention(q, cache.k(0), cache.v(0), scale=1.0)
            assert relative_error(cache.attend(0, q, scale=1.0), expected) < bound(name), (below, n)


@pytest.mark.parametrize("name", STORED)
def test_scores_far_below_the_largest(isa, rng, name):
    """What the rounding of queries leaves out of such scores does not count where they are few, and does where they are many. Queries
    are loud where keys are not alike, as those of real models."""
    dim, tokens = 64, 2000
    for below in (2, 5, 7, 9):
        k, v = rng.standard_normal((2, tokens, 1, dim)).astype(np.float32)
        k[:, :, 0] = rng.uniform(-below, -below + 1, (tokens, 1))
        k[3, :, 0] = 0
        cache = cache_of(STORED[name], k, v)
        for n in (1, 40):
            q = rng.standard_normal((n, 4, dim)).astype(np.float32)
            q[:, :, 0], q[:, :, 1] = 1, 60
            q[:, :, 2:] *= 0.1
            expected, _ = attention(q, cache.k(0), cache.v(0), scale=1.0)
            assert relative_error(cache.attend(0, q, scale=1.0), expected) < bound(name), (below, n)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [16, 64])
def test_outliers_of_values_that_cancel(isa, name, dim):
    """Values with a loud channel whose sum is small: the rounding error of the others is large next to the output."""
    loud = np.where(np.arange(dim) % 13 == 5, 10, 1).astype(np.float32)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        k, v = rng.standard_normal((2, 1500, 2, dim), np.float32)
        cache = cache_of(STORED[name], k, v * loud)
        q = rng.standard_normal((50, 6, dim), np.float32)
        expected, _ = attention(q, cache.k(0), cache.v(0))
        assert relative_error(cache.attend(0, q), expected) < bound(name), seed


def one_loud_element(rng, loud):
    """160 full rows of 512, and one of them with a single element."""
    for full in (rng.choice([-1.0, 1.0], (160, 512)), np.ones((160, 512))):
        rows = full.astype(np.float32)
        rows[100], rows[100, 5] = 0, loud
        yield rows


@pytest.mark.parametrize("loud", [40, 300, 3000])
@pytest.mark.parametrize("name", STORED)
def test_one_loud_element_of_values_beside_full_rows(isa, rng, name, loud):
    """It takes the range of a tile's weights and leaves few bits to the others, whose rounding error is large next to the output."""
    for v in one_loud_element(rng, loud):
        cache = cache_of(STORED[name], rng.standard_normal((160, 1, 512)).astype(np.float32), v[:, None])
        for n in (1, 16):
            q = rng.standard_normal((n, 4, 512)).astype(np.float32)
            expected, _ = attention(q, cache.k(0), cache.v(0))
            assert relative_error(cache.attend(0, q), expected) < bound(name), n


@pytest.mark.parametrize("loud", [40, 300, 3000])
@pytest.mark.parametrize("dtype", ["float16", "int8", "int7", "int4", "int3-plain"])
def test_one_loud_element_of_latents_beside_full_rows(isa, rng, dtype, loud):
    for rows in one_loud_element(rng, loud):
        cache = kvfast.MLAKVCache(1, 512, 32, dtype=dtype)
        filled(cache, np.concatenate([rows, rng.standard_normal((160, 32))], 1, dtype=np.float32))
        for n in (1, 16):
            q = rng.standard_normal((n, 20, 544)).astype(np.float32)
            q[:, :, 5] /= loud
            k = cache.get_latent(0)[:, None]
            expected, _ = attention(q, k, k[:, :, :512])
            assert relative_error(cache.attend(0, q), expected) < bound(dtype), n


@pytest.mark.parametrize("softcap", [0.3, 30, 1e3, 1e4, 1e20, 3e38])
def test_softcaps_of_any_size(isa, rng, softcap):
    k, v = rng.standard_normal((2, 300, 2, 32)).astype(np.float32)
    cache = cache_of("float32", k, v)
    q = with_scores(rng.standard_normal((5, 4, 32)), k, 15, 32**-0.5)
    out, lse = cache.attend(0, q, softcap=softcap, return_lse=True)
    expected, expected_lse = attention(q, k, v, softcap=softcap)
    assert relative_error(out, expected) < bound("float32")
    assert np.abs(lse - expected_lse).max() < 1e-5


def test_rounding_of_weights_is_that_of_each_query_alone(isa, rng):
    """Whether the rounding of a query's weights matters does not depend on the other queries of its task."""
    for v in one_loud_element(rng, 3000):
        k = rng.standard_normal((160, 1, 512)).astype(np.float32)
        k[100] = 0
        k[100, 0, 5] = 4
        cache = cache_of(kvfast.KVFormat("int8/int4"), k, v[:, None])
        q = rng.standard_normal((16, 8, 512)).astype(np.float32)
        q[::3, :, 5] = -40  # hides the loud element
        check_each_alone(cache, q)


def check_each_alone(cache, q):
    """The last 16 queries of a cache have the same bits together and alone."""
    together = cache.attend(0, q)
    for i in (0, 1, 5, 9, 15):
        shorter = cache.copy()
        if i < 15:
            shorter.truncate(len(cache) - 15 + i)
        assert np.array_equal(shorter.attend(0, q[i : i + 1])[0], together[i])


def test_rounding_is_that_of_each_query_alone(isa, rng):
    """Whether the rounding error of a query matters does not depend on other queries and tokens."""
    k, v = rng.standard_normal((2, 400, 2, 64)).astype(np.float32)
    k[:, :, 7] *= rng.uniform(0.1, 40, (400, 1))
    for form in ("int8-rotated", "k8v4-rotated", "int4", "int8-plain"):
        cache = cache_of(form, k, v)
        q = rng.standard_normal((16, 12, 64)).astype(np.float32) * np.geomspace(0.01, 10, 16, dtype=np.float32)[:, None, None]
        check_each_alone(cache, q)


@pytest.mark.parametrize("different", [1, 2, 3])
def test_thousands_of_equal_tokens(isa, rng, different):
    """Sums of equal values are rounded alike, so that their errors add up unless each is given to the next sum."""
    few = rng.standard_normal((2, different, 1, 32)).astype(np.float32)
    for length in (1002, 20_004, 60_000):  # as often each
        k, v = few[:, np.arange(length) % different]
        cache = cache_of("float32", k, v)
        for n in (1, 20):
            q = rng.standard_normal((n, 2, 32)).astype(np.float32)
            options = {"causal": False, "num_splits": 1}
            expected, _ = attention(q, k[:different], v[:different], causal=False)
            for out in (cache.attend(0, q, **options), kvfast.attention(q, k, v, **options)):
                assert relative_error(out, expected) < bound("float32")


@parametrize(("name", "tokens"), [("float16", 1 << 18), ("int8", 1 << 18), ("float32", 1 << 21)], [("float16", 1 << 18)])
def test_the_same_token_over_and_over(isa, rng, name, tokens):
    """Each sum of such rows rounds the same way: so no float32 takes very many of them, whatever the number of splits."""
    k, v = rng.standard_normal((2, 1, 1, 16)).astype(np.float32)
    cache = cache_of(name, *(np.broadcast_to(one, (tokens, 1, 16)) for one in (k, v)))
    for n, num_splits in ((1, 0), (1, 1), (17, 0), (64, 1)):
        out = cache.attend(0, rng.standard_normal((n, 2, 16)).astype(np.float32), num_splits=num_splits)
        assert relative_error(out, np.broadcast_to(cache.v(0)[:1].astype(np.float64), out.shape)) < bound(name), (n, num_splits)


@pytest.mark.parametrize("name", ["float32", "float16", "int8", "int4", "k8v4"])
def test_weights_that_underflow(isa, rng, name):
    """One token has all of the weight, and a value of zero. What is left is right down to 1e-28, and nothing but zero below that."""
    k, v = rng.standard_normal((2, 40, 1, 64)).astype(np.float32) * 0.1
    k[7, 0] = 0
    k[7, 0, 5], v[7] = 1, 0
    cache = cache_of(STORED[name], k, v)
    for above in (20, 50, 60, 70, 90, 200):
        q = np.zeros((1, 2, 64), np.float32)
        q[..., 5] = above
        expected, _ = attention(q, cache.k(0), cache.v(0), scale=1.0)
        sizes, _ = attention(q, cache.k(0), np.linalg.norm(cache.v(0), axis=2, keepdims=True), scale=1.0)
        error = np.linalg.norm(cache.attend(0, q, scale=1.0) - expected, axis=2)
        assert (error <= bound(name) * max(1, above / 16) * sizes[..., 0] + 40 * 1e-28).all(), above
