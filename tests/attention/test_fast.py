"""The fast precision: its bound on hard inputs, its bits, and who reads with it."""

import os
import subprocess
import sys

import numpy as np
import pytest
from cache_kinds import FORMATS, cache_of, filled
from reference import attention
from selection import parametrize

import kvfast

CODED = {name: form for name, form in FORMATS.items() if not name.startswith(("float", "bfloat"))}
# Tiers that have products of one byte; others compute exactly.
FAST_TIERS = ("amx", "avx512_vbmi", "avx512_vnni", "avx512", "avx_vnni", "avx2", "neon_dotprod")


def error(cache, q, scale=None, **options):
    """The largest error of a row, in parts of its bound; see docs/concepts/precision.md."""
    k, v = cache.k(0), cache.v(0)
    expected, expected_lse = attention(q, k, v, scale=scale, **options)
    values, _ = attention(q, k, np.linalg.norm(v, axis=2, keepdims=True), scale=scale, **options)
    got, lse = cache.attend(0, q, scale=scale, precision="fast", return_lse=True, **options)
    reach = np.linalg.norm(q, axis=2) * np.linalg.norm(k, axis=2).max() * abs(q.shape[2] ** -0.5 if scale is None else scale)
    bound = 0.03 + 0.02 * reach
    return max((np.linalg.norm(got - expected, axis=2) / (values[:, :, 0] * bound)).max(), (np.abs(lse - expected_lse) / bound).max())


@parametrize("name", list(CODED), ["int8", "int4", "k8v4", "int3", "int5"])
def test_gaussian_rows(isa, rng, name):
    for tokens, dim, v_dim in ((3, 16, 16), (330, 64, 64), (330, 20, 40), (700, 128, 128)):
        cache = cache_of(CODED[name], *(rng.standard_normal((tokens, 2, one)).astype(np.float32) for one in (dim, v_dim)))
        for n in (1, 5, 40, 300):
            if n <= tokens:
                q = rng.standard_normal((n, 8, dim)).astype(np.float32)
                assert error(cache, q) < 1, (tokens, dim, n)
                assert error(cache, q, sliding_window=70, num_sink_tokens=4, softcap=10.0) < 1, (tokens, dim, n)


@parametrize("name", list(CODED), ["int8", "int4", "k8v4"])
@pytest.mark.parametrize("whose", ["keys", "queries", "values"])
def test_loud_channels(isa, rng, name, whose):
    for dim, loud in [(64, 3), (64, 40), (128, 20)]:
        k, v = rng.standard_normal((2, 330, 2, dim)).astype(np.float32)
        q = rng.standard_normal((60, 8, dim)).astype(np.float32)
        {"keys": k, "queries": q, "values": v}[whose][:, :, dim // 3] *= loud
        cache = cache_of(CODED[name], k, v)
        for n in (1, 60):
            assert error(cache, q[:n]) < 1, (dim, loud, n)


def test_a_loud_channel_leaves_bits_to_the_others(isa, rng):
    """With many queries as with few. Queries are small where keys are large."""
    for loud in (3, 20, 80):
        k, v = rng.standard_normal((2, 1000, 2, 128)).astype(np.float32)
        q = rng.standard_normal((64, 8, 128)).astype(np.float32)
        k[:, :, 5] *= loud
        q[:, :, 5] /= loud
        cache = cache_of("int4", k, v)
        few = np.concatenate([cache.attend(0, q[i : i + 8], causal=False, precision="fast") for i in range(0, 64, 8)])
        many = cache.attend(0, q, causal=False, precision="fast")
        exact = cache.attend(0, q, causal=False)
        assert np.linalg.norm(many - exact) < 1.5 * np.linalg.norm(few - exact) + 1e-3 * np.linalg.norm(exact)


@parametrize("name", list(CODED), ["int8", "int4", "k8v4"])
def test_many_small_weights_beside_a_large_one(isa, rng, name):
    """Each is less than a step of 7 bits. Their sum is right: what the rounding of one leaves out goes to the next."""
    dim = 32
    for below in (3, 5, 6.5, 9):
        k, v = rng.standard_normal((2, 1000, 1, dim)).astype(np.float32) * 0.02
        k[:, :, 3] -= below
        k[700, :, 3] += below
        v[:, :, 5] += 1
        v[700, :, 5] = -0.2
        cache = cache_of(CODED[name], k, v)
        for n in (1, 40):
            q = np.zeros((n, 4, dim), np.float32)
            q[:, :, 3] = 1
            assert error(cache, q, scale=1.0) < 1, (below, n)


@parametrize("name", list(CODED), ["int8", "int4", "k8v4"])
def test_lone_values(isa, rng, name):
    k, v = rng.standard_normal((2, 400, 1, 64)).astype(np.float32)
    v[300], v[300, 0, 5] = 0, 100
    cache = cache_of(CODED[name], k, v)
    for n in (1, 40):
        assert error(cache, rng.standard_normal((n, 4, 64)).astype(np.float32)) < 1


def share(name, k, v, q, sinks):
    """The largest error of a row, in parts of the documented bound, and those of what is less than float32 may lose."""
    cache = cache_of(CODED[name], k, v)
    stored, values = cache.k(0), cache.v(0)
    expected, expected_lse = attention(q, stored, values, sinks=sinks)
    sizes, _ = attention(q, stored, np.linalg.norm(values, axis=2, keepdims=True), sinks=sinks)
    got, lse = cache.attend(0, q, sinks=sinks, precision="fast", return_lse=True)
    reach = np.linalg.norm(q, axis=2) * np.linalg.norm(stored, axis=2).max() * q.shape[2] ** -0.5
    allowed = 0.08 + 0.02 * reach
    lost = 1e-28 * len(k) * np.linalg.norm(values, axis=2).max()
    return max(
        (np.linalg.norm(got - expected, axis=2) / (allowed * sizes[..., 0] + lost)).max(), (np.abs(lse - expected_lse) / allowed).max()
    )


@parametrize("name", list(CODED), ["int8", "int4", "k8v4", "int8-plain"])
@pytest.mark.parametrize("n", [1, 40])
def test_scores_of_any_size(isa, name, n):
    """A search for what is farthest from exact attention: scores in the thousands, whose weight goes to values of zero or to sinks."""
    rng, worst = np.random.default_rng(n), (0.0, None)
    for step in range(120):
        dim, tokens = int(rng.choice([32, 64, 128])), int(rng.choice([40, 70]))
        loud, size = rng.choice([0, 3, 10, 30, 100, 300]), rng.choice([1, 3, 10])
        if step % 2 and worst[1]:  # near the worst so far
            dim, tokens, loud, size = worst[1]
            loud, size = loud * rng.uniform(0.7, 1.5), size * rng.uniform(0.7, 1.5)
        k, v = rng.standard_normal((2, tokens, 1, dim)).astype(np.float32)
        q = (rng.standard_normal((n, 4, dim)) * size).astype(np.float32)
        k[rng.integers(tokens), 0, 0] += loud * 5
        sinks = None
        if rng.integers(2):
            v[np.argmax(np.abs(k[:, 0, 0]))] = 0
        else:
            largest = np.einsum("qhd,td->hqt", q, k[:, 0]).max((1, 2)) * dim**-0.5
            sinks = (largest + rng.choice([0, 20])).astype(np.float32)
        worst = max(worst, (float(share(name, k, v, q, sinks)), (dim, tokens, loud, size)), key=lambda one: one[0])
    assert worst[0] < 1, worst


@parametrize("dtype", ["int8", "int4", "int4-plain", "int3-plain"], ["int8", "int4"])
def test_latent_rows(isa, rng, dtype):
    cache = filled(kvfast.MLAKVCache(1, 64, 16, dtype=dtype), rng.standard_normal((300, 80)).astype(np.float32))
    k = cache.get_latent(0)[:, None]
    for n in (1, 30):
        q = rng.standard_normal((n, 20, 80)).astype(np.float32)
        expected, _ = attention(q, k, k[:, :, :64])
        values, _ = attention(q, k, np.linalg.norm(k[:, :, :64], axis=2, keepdims=True))
        got = cache.attend(0, q, precision="fast")
        assert (np.linalg.norm(got - expected, axis=2) / values[:, :, 0]).max() < 0.05


@parametrize("name", list(CODED), ["int8-rotated", "int4", "int3"])
def test_the_bits_do_not_depend_on_threads_batches_and_other_queries(isa, rng, name):
    k, v = rng.standard_normal((2, 2500, 2, 64)).astype(np.float32)
    q = rng.standard_normal((16, 8, 64)).astype(np.float32)
    pool = kvfast.PagedKVCache(1, 2, 64, 200, dtype=CODED[name])
    cache, sequence = cache_of(CODED[name], k, v), pool.new_sequence()
    filled(sequence, k, v)
    q[::3] *= 60  # rows that are read again
    together = cache.attend(0, q, precision="fast")
    for threads in (1, 2, 7):
        assert np.array_equal(cache.attend(0, q, precision="fast", num_threads=threads), together)
    batch = pool.attend_batch(0, q, [sequence], cu_seqlens_q=[0, 16], precision="fast", cascade=False)
    assert np.array_equal(batch, together)
    for i in (0, 7, 15):
        shorter = cache_of(CODED[name], k, v)
        if i < 15:
            shorter.truncate(len(k) - 15 + i)
        assert np.array_equal(shorter.attend(0, q[i : i + 1], precision="fast")[0], together[i])


@parametrize("name", list(CODED), ["int8", "int4", "int3"])
def test_the_bits_of_many_queries_do_not_depend_on_threads(isa, rng, name):
    """Which change the rows and the tokens that a task has."""
    k, v = rng.standard_normal((2, 1500, 2, 64)).astype(np.float32) * np.geomspace(0.01, 3, 1500, dtype=np.float32)[:, None, None]
    k[:, :, 5] *= np.where(np.arange(1500) // 64 % 2, 1, 30)[:, None]  # some blocks have a channel that is loud
    q = rng.standard_normal((300, 8, 64)).astype(np.float32)
    cache = cache_of(CODED[name], k, v)
    one = cache.attend(0, q, precision="fast", num_threads=1, sliding_window=777, num_sink_tokens=2)
    for threads in (2, 7, 64):
        more = cache.attend(0, q, precision="fast", num_threads=threads, sliding_window=777, num_sink_tokens=2)
        assert np.array_equal(more, one), threads


def told(cache):
    return cache.explain(0, precision="fast").notes


def test_float_rows_stay_exact(isa, rng):
    k, v = rng.standard_normal((2, 300, 2, 64)).astype(np.float32)
    q = rng.standard_normal((40, 8, 64)).astype(np.float32)
    for dtype in ("float32", "float16", "bfloat16"):
        cache = cache_of(dtype, k, v)
        for n in (1, 40):
            assert np.array_equal(cache.attend(0, q[:n], precision="fast"), cache.attend(0, q[:n]))
        assert any(f"no fast kernels for {dtype}" in note for note in told(cache))
    assert any("no fast" in note for note in told(cache_of("int4", k, v))) == (kvfast.active_isa() not in FAST_TIERS)
    few = cache_of("int4", k[:12], v[:12])  # not yet codes
    assert np.array_equal(few.attend(0, q[:1], precision="fast"), few.attend(0, q[:1]))


def differs(cache, q, **options):
    return not np.array_equal(cache.attend(0, q, **options), cache.attend(0, q, precision="exact"))


def test_who_reads_with_it(rng):
    """A call, or else its cache, or else the process. Forks inherit it; snapshots and files do not know of it."""
    k, v = rng.standard_normal((2, 500, 2, 64)).astype(np.float32)
    q, has = rng.standard_normal((3, 4, 64)).astype(np.float32), kvfast.active_isa() in FAST_TIERS
    cache = cache_of("int4", k, v)
    assert cache.precision == "exact" and not differs(cache, q) and differs(cache, q, precision="fast") == has
    assert cache.explain(0).precision == "exact" and cache.explain(0, precision="fast").precision == "fast"
    assert ", fast: scores_int4" in str(cache.explain(0, precision="fast"))
    state = cache.snapshot()
    cache.precision = "fast"
    assert cache.precision == "fast" and differs(cache, q) == has and not differs(cache, q, precision="exact")
    assert cache.explain(0).precision == "fast"
    assert cache.snapshot() == state and b"precision" not in cache.snapshot().to_bytes()
    assert cache.fork().precision == cache.copy().precision == "fast"
    assert kvfast.load(cache.snapshot()).precision == "exact"
    cache.precision = None
    assert cache.precision == "exact" and not differs(cache, q)


def test_sequences_take_it_from_their_pool(rng):
    k, v = rng.standard_normal((2, 500, 2, 64)).astype(np.float32)
    q, has = rng.standard_normal((3, 4, 64)).astype(np.float32), kvfast.active_isa() in FAST_TIERS
    pool = kvfast.PagedKVCache(1, 2, 64, 40, dtype="int4")
    before, pool.precision = pool.new_sequence(), "fast"
    sequence = pool.new_sequence()
    for one in (before, sequence):
        filled(one, k, v)
    assert before.precision == "exact" and sequence.precision == sequence.fork().precision == "fast"
    assert np.array_equal(before.attend(0, q), sequence.attend(0, q)) != has
    batch = pool.attend_batch(0, np.tile(q[:1], (2, 1, 1)), [before, sequence])  # by the pool's
    assert np.array_equal(batch[0], batch[1])
    before.precision = "fast"
    assert np.array_equal(before.attend(0, q), sequence.attend(0, q))


@pytest.mark.parametrize("setting", ["fast", "exact", "invariant", ""])
def test_the_environment(setting):
    code = "import kvfast; print(kvfast.KVCache(1, 1, 16).precision); kvfast.show_config()"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "KVFAST_PRECISION": setting}, capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith(setting or "exact") and f"Precision:    {setting or 'exact'}\n" in run.stdout


def test_other_names_are_refused(rng):
    cache = cache_of("int8", *rng.standard_normal((2, 20, 1, 16)).astype(np.float32))
    q = np.ones((1, 1, 16), np.float32)
    for bad in ("half", "", 1, b"fast"):
        with pytest.raises(ValueError, match="precision must be 'exact', 'fast', 'invariant' or None, got"):
            cache.attend(0, q, precision=bad)
        with pytest.raises(ValueError, match="precision must be 'exact', 'fast', 'invariant' or None, got"):
            cache.precision = bad
        with pytest.raises(ValueError, match="precision must be 'exact', 'fast', 'invariant' or None, got"):
            kvfast.attention(q, np.ones((1, 1, 16), np.float32), np.ones((1, 1, 16), np.float32), precision=bad)
    run = subprocess.run(
        [sys.executable, "-c", "import kvfast"],
        env={**os.environ, "KVFAST_PRECISION": "half"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "KVFAST_PRECISION in the environment: precision must be 'exact', 'fast', 'invariant' or None, got 'half'" in run.stderr


@pytest.mark.parametrize("num_queries", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize("loud", [100, 252, 500])
def test_small_weights_of_values_that_alternate(isa, num_queries, dtype, loud):
    """Weights of about half a unit are rounded without a pattern that the values could have, too."""
    tokens, dim = 1024, 64
    for period in (1, 2, 3, 8, 13, 16, 32):
        k, v = np.zeros((2, tokens, 1, dim), np.float32)
        v[np.arange(tokens), 0, np.arange(tokens) // period % 2] = 1
        v[::128] = 0
        v[::128, 0, 40] = loud
        cache = filled(kvfast.KVCache(1, 1, dim, dtype=dtype), k, v)
        with kvfast.use_isa(isa):
            got = cache.attend(0, np.zeros((num_queries, 1, dim), np.float32), precision="fast", causal=False)[0, 0]
        values = cache.v(0)[:, 0].astype(np.float64)
        error = np.linalg.norm(got - values.mean(0)) / np.linalg.norm(values, axis=1).mean()
        assert error < 0.03, (period, error)


@pytest.mark.parametrize("num_queries", [1, 64])
@pytest.mark.parametrize("dtype", ["int8", "k8v4", "int4", "int6"])
def test_one_value_far_above_all_others(isa, rng, num_queries, dtype):
    """It takes the range of a tile's weights: the hardest rows that are known, for which the contract has 0.08."""
    q, k = np.zeros((num_queries, 1, 64), np.float32), np.ones((300, 1, 64), np.float32)
    for loud in (100, 250, 500, 1000):
        for whole_row in (True, False):
            v = rng.standard_normal((300, 1, 64)).astype(np.float32)
            if whole_row:
                v[50] *= loud
            else:
                v[50, 0, 40] = loud
            cache = cache_of(dtype, k, v)
            values = cache.v(0)[:, 0].astype(np.float64)
            with kvfast.use_isa(isa):
                got = cache.attend(0, q, precision="fast", causal=False)[:, 0]
            assert np.linalg.norm(got - values.mean(0), axis=1).max() <= 0.08 * np.linalg.norm(values, axis=1).mean(), (loud, whole_row)
