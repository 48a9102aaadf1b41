"""How contexts are cut: by positions alone, so that a result has the same bits for every number of threads and of queries."""

import numpy as np
import pytest
from cache_kinds import fill, filled

import kvfast

THREADS = 1, 2, 3, 7, 16, 64
TILE = 256  # most tokens between two softmax corrections


def cache_with(length, heads, dim, dtype):
    return fill(kvfast.KVCache(1, heads, dim, dtype=dtype), np.random.default_rng(length), length)


def queries(tokens, heads, dim, seed=0):
    return np.random.default_rng(seed).standard_normal((tokens, heads, dim)).astype(np.float32)


def starts_of(plan):
    (item,) = plan.items
    return item.splits


def test_splits_lie_at_the_same_positions():
    cache = cache_with(20000, 2, 64, "int8-rotated")
    for length in (20000, 4097, 4096, 1025, 1024, 1):
        cache.truncate(length)
        assert starts_of(cache.explain(0, (1, 4, 64))) == tuple(range(0, length, 1024))


def test_windows_are_cut_where_their_context_is():
    cache = cache_with(20000, 2, 64, "int8-rotated")
    whole = starts_of(cache.explain(0, (1, 4, 64)))
    for window in (1, 100, 3000, 20000):
        begin = (20000 - window) // TILE * TILE
        expected = begin, *(start for start in whole if start > begin)
        assert starts_of(cache.explain(0, (1, 4, 64), sliding_window=window)) == expected


@pytest.mark.parametrize("dtype", ["int8-rotated", "int4", "k8v4-rotated", "float32", "bfloat16"])
def test_the_bits_for_any_number_of_threads(dtype):
    cache = cache_with(5000, 2, 64, dtype)
    for tokens, options in (
        (1, {}),
        (1, {"sinks": np.linspace(-1, 1, 6, dtype=np.float32), "softcap": 5.0}),
        (7, {"sliding_window": 3000, "num_sink_tokens": 4}),
        (40, {}),
    ):
        q = queries(tokens, 6, 64)
        expected = cache.attend(0, q, num_threads=1, return_lse=True, **options)
        for num_threads in THREADS:
            got = cache.attend(0, q, num_threads=num_threads, return_lse=True, **options)
            assert np.array_equal(got[0], expected[0]) and np.array_equal(got[1], expected[1])


def filled_latents(length):
    cache = kvfast.MLAKVCache(1, 128, 32, dtype="int8-rotated")
    filled(cache, np.random.default_rng(length).standard_normal((length, 160)).astype(np.float32))
    return cache


def test_latent_rows_for_any_number_of_threads():
    cache = filled_latents(5000)
    for heads in (4, 40):
        q = queries(2, heads, 160)
        expected = cache.attend(0, q, num_threads=1)
        for num_threads in THREADS:
            assert np.array_equal(cache.attend(0, q, num_threads=num_threads), expected)


def test_no_row_block_is_empty():
    """For any number of query rows, which latent rows have many of, and of threads."""
    cache = filled_latents(300)
    for heads in range(20, 300, 3):
        for num_threads in (1, 2, 8, 16, 64):
            plan = cache.explain(0, num_q_heads=heads, num_threads=num_threads)
            assert plan.items[0].row_blocks == -(-heads // plan.rows), (heads, num_threads)


@pytest.mark.parametrize("num_threads", [8, 64])
def test_latent_rows_whose_shapes_change(num_threads):
    """More threads than blocks of query rows, whose memory other calls have left."""
    rng = np.random.default_rng(num_threads)
    for _ in range(60):
        cache = filled_latents(int(rng.choice([20, 70, 150, 400])))
        heads, n, run = int(rng.choice([8, 64, 100, 128])), int(rng.choice([1, 5, 16])), int(rng.choice([1, 16]))
        q = queries(n, heads, 160)
        options = {}
        if len(cache) > n + 6 * run:  # enough for six runs each
            chosen = np.stack([rng.permutation((len(cache) - n + i) // run + 1)[:6] for i in range(n)])
            options = {"indices": chosen * run, "index_block": run}
        expected = cache.attend(0, q, num_threads=1, **options)
        assert np.array_equal(cache.attend(0, q, num_threads=num_threads, **options), expected)


@pytest.mark.parametrize("dtype", ["int8-rotated", "int4"])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 700}, {"sliding_window": 2100, "num_sink_tokens": 5}, {"attention_chunk_size": 900}]
)
@pytest.mark.parametrize("length", [1030, 2050, 4155])
def test_a_query_alone_has_the_bits_of_a_few(length, options, dtype):
    """Here some of the queries end in another split than others."""
    cache = cache_with(length, 2, 64, dtype)
    q = queries(16, 4, 64)
    together = cache.attend(0, q, **options)
    for i in range(15, -1, -1):
        assert np.array_equal(cache.attend(0, q[i : i + 1], **options), together[i : i + 1])
        cache.truncate(len(cache) - 1)


@pytest.mark.parametrize("dtype", ["float32", "int8-rotated", "int4"])
def test_the_last_of_a_few_queries_that_look_ahead_has_its_bits(dtype):
    """Their sink tokens lie in another split than their windows, which begin in different splits."""
    q = queries(16, 4, 64)
    for length, splits in ((280, 3), (536, 3), (1048, 0)):
        cache = cache_with(length, 2, 64, dtype)
        for window in (14, 18, 22):
            options = {"causal": False, "sliding_window": window, "num_sink_tokens": 2, "num_splits": splits}
            assert np.array_equal(cache.attend(0, q, **options)[-1:], cache.attend(0, q[-1:], **options))


def test_splits_without_a_visible_token():
    """The first splits of the first query's window lie before the windows of the others."""
    cache = cache_with(4000, 1, 64, "float32")
    q = queries(3, 2, 64)
    k, v = cache.k(0), cache.v(0)
    expected = kvfast.attention(q, k, v, sliding_window=33, num_splits=1)
    assert np.allclose(cache.attend(0, q, sliding_window=33), expected, atol=1e-5)
    assert np.allclose(cache.attend(0, q, num_threads=5), kvfast.attention(q, k, v, num_splits=1), atol=1e-5)


def test_batches_have_the_bits_of_their_sequences():
    """For any number of threads, each of which changes how many splits a task has."""
    pool = kvfast.PagedKVCache(1, 2, 64, 400, 64, "int8-rotated")
    lengths = 5000, 1, 600, 2500, 4096
    sequences = [pool.new_sequence() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        filled(sequence, *np.random.default_rng(length).standard_normal((2, length, 2, 64)).astype(np.float32))
    q = queries(len(lengths), 8, 64)
    for num_threads in THREADS:
        together = pool.attend_batch(0, q, sequences, num_threads=num_threads)
        for i, sequence in enumerate(sequences):
            assert np.array_equal(sequence.attend(0, q[i : i + 1]), together[i : i + 1])
