"""The best positions of an indexer against float64: which positions are in, ties, and the same for any number of threads."""

import latent_reference
import numpy as np
import pytest
from cache_kinds import filled
from selection import parametrize

import kvfast

DIM = 48


def keys_of(dtype, rows, **settings):
    cache = kvfast.MLAKVCache(1, rows.shape[1], 0, dtype=dtype, **settings)
    cache.append(0, rows)
    return cache


def scores(q, keys, weights):
    """(queries, keys), and the size of what was added up."""
    products = np.maximum(np.einsum("nhd,td->nht", q.astype(np.float64), keys.astype(np.float64)), 0)
    terms = weights[..., None].astype(np.float64) * products
    reach = np.linalg.norm(q, axis=-1)[..., None] * np.linalg.norm(keys, axis=-1) * np.abs(weights)[..., None]
    return terms.sum(1), reach.sum(1)


def check(got, expected, reach, k, tolerance):
    """Every row has the `k` best of what its query sees, but for those that are as good as the last of them within the tolerance."""
    for i, row in enumerate(got):
        seen = expected.shape[1] - len(got) + i + 1
        count = min(k, seen)
        assert np.array_equal(row[count:], np.full(k - count, -1)) and np.all(np.diff(row[:count]) > 0)
        assert row[0] >= 0 and row[count - 1] < seen
        left = np.setdiff1d(np.arange(seen), row[:count])
        if len(left):
            slack = tolerance * reach[i, :seen].max()
            assert expected[i, row[:count]].min() >= expected[i, left].max() - slack


@parametrize("dtype", latent_reference.DTYPES, ["int8", "int4", "float16", "float32"])
def test_against_float64_on_every_tier(isa, rng, dtype):
    rows = latent_reference.rows(rng, 700, DIM)
    cache = keys_of(dtype, rows)
    stored = cache.get_latent(0)
    for n, heads, k in ((1, 1, 5), (1, 64, 100), (3, 20, 700), (20, 4, 1), (2, 33, 1000)):
        q, weights = latent_reference.rows(rng, n, heads, DIM), latent_reference.rows(rng, n, heads)
        got = cache.top_k(0, q, weights, k)
        assert got.shape == (n, k) and got.dtype == np.int64
        check(got, *scores(q, stored, weights), k, 1e-5)


def test_the_choice_is_what_attend_reads(rng):
    """An indexer and a cache side by side, as in DeepSeek-V3.2."""
    rows, keys = latent_reference.rows(rng, 500, 64), latent_reference.rows(rng, 500, DIM)
    latents, indexer = kvfast.MLAKVCache(1, 48, 16, dtype="float32"), keys_of("int8", keys)
    latents.append(0, rows)
    q = latent_reference.rows(rng, 5, 8, 64)
    chosen = indexer.top_k(0, latent_reference.rows(rng, 5, 4, DIM), np.ones((5, 4), np.float32), 64)
    got = latents.attend(0, q, indices=chosen)
    for i in range(5):
        alone = kvfast.MLAKVCache(1, 48, 16, dtype="float32")
        alone.append(0, rows[chosen[i]])
        assert np.allclose(alone.attend(0, q[i : i + 1], scale=64**-0.5), got[i : i + 1], atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "int4", "float32"])
def test_the_same_for_any_number_of_threads_and_companions(rng, dtype):
    rows = latent_reference.rows(rng, 5000, DIM)
    cache = keys_of(dtype, rows)
    q, weights = latent_reference.rows(rng, 9, 20, DIM), latent_reference.rows(rng, 9, 20)
    whole = cache.top_k(0, q, weights, 300)
    for threads in (1, 2, 5):
        assert np.array_equal(cache.top_k(0, q, weights, 300, num_threads=threads), whole)
    assert np.array_equal(cache.top_k(0, q[-1:], weights[-1:], 300), whole[-1:])
    pool = kvfast.PagedMLAKVCache(1, DIM, 0, num_blocks=100, dtype=dtype)
    sequence = pool.new_sequence()
    sequence.append(0, rows)
    assert np.array_equal(sequence.top_k(0, q, weights, 300), whole)


@pytest.mark.parametrize("dtype", ["int8", "int4", "float32"])
def test_a_batch_has_the_positions_of_each_sequence_alone(isa, rng, dtype):
    pool = kvfast.PagedMLAKVCache(2, DIM, 0, num_blocks=100, dtype=dtype, block_size=64)
    lengths, counts = (700, 5, 1300, 64), (1, 3, 0, 2)
    sequences = []
    for length in lengths:
        sequences.append(pool.new_sequence())
        filled(sequences[-1], each=[(latent_reference.rows(rng, length, DIM),) for _ in range(2)])
    starts = np.cumsum((0, *counts))
    q, weights = latent_reference.rows(rng, 6, 20, DIM), latent_reference.rows(rng, 6, 20)
    alone = np.concatenate(
        [one.top_k(1, q[begin:end], weights[begin:end], 30) for one, begin, end in zip(sequences, starts, starts[1:]) if begin < end]
    )
    options = {"cu_seqlens_q": starts}
    for threads in (1, 2, 5):
        assert np.array_equal(pool.top_k_batch(1, q, weights, 30, sequences, num_threads=threads, **options), alone)
    table = pool.block_table(sequences)
    assert np.array_equal(pool.top_k_batch(1, q, weights, 30, block_table=table, seq_lens=lengths, **options), alone)
    prepared = pool.prepare_batch(block_table=table, seq_lens=lengths, **options)
    assert np.array_equal(pool.top_k_batch(1, q, weights, 30, prepared), alone)
    last = pool.top_k_batch(1, q[:4], weights[:4], 30, sequences)  # one token of each
    assert np.array_equal(last[2:3], sequences[2].top_k(1, q[2:3], weights[2:3], 30))


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"cu_seqlens_q": [0, 6, 7]}, ValueError, "sequence 0 of the batch holds 5 tokens, and q 6 of them"),
        ({"cu_seqlens_q": [0, 6]}, kvfast.DimensionMismatchError, "to the 7 tokens of q in 3 entries"),
        ({"sequences": None}, ValueError, "either sequences, or block_table and seq_lens"),
        ({"sequences": []}, ValueError, "at least one sequence"),
        ({"q": np.ones((0, 2, DIM)), "weights": np.ones((0, 2)), "cu_seqlens_q": [0, 0, 0]}, ValueError, "at least one token"),
        ({"weights": np.ones((6, 2))}, kvfast.DimensionMismatchError, r"weights must have shape \(7, 2\)"),
    ],
)
def test_bad_batches(rng, change, error, text):
    pool = kvfast.PagedMLAKVCache(1, DIM, 0, num_blocks=4, dtype="float32")
    sequences = [pool.new_sequence(), pool.new_sequence()]
    for one in sequences:
        one.append(0, latent_reference.rows(rng, 5, DIM))
    given = {"q": np.ones((7, 2, DIM)), "weights": np.ones((7, 2)), "k": 3, "sequences": sequences, "cu_seqlens_q": [0, 4, 7]} | change
    with pytest.raises(error, match=text):
        pool.top_k_batch(0, **given)
    with pytest.raises(ValueError, match="made with rope_dim=0, got rope_dim 16"):
        kvfast.PagedMLAKVCache(1, DIM, 16, num_blocks=4).top_k_batch(0, given["q"], given["weights"], 3, sequences)


def test_ties_go_to_lower_positions(rng):
    """Keys that no head likes all have 0, and keys that are the same have the same score."""
    rows = np.repeat(latent_reference.rows(rng, 4, DIM), 50, axis=0)[rng.permutation(200)]
    for dtype in ("float32", "int8"):
        cache = keys_of(dtype, rows)
        stored = cache.get_latent(0)
        q = stored[7][None, None]
        expected = np.argsort(-np.maximum(q[0] @ stored.T, 0)[0].round(3), kind="stable")
        for k in (1, 30, 50, 51, 120, 199):
            assert np.array_equal(cache.top_k(0, q, np.ones((1, 1)), k), np.sort(expected[:k])[None])
        assert np.array_equal(cache.top_k(0, -1e-3 * np.abs(q), np.zeros((1, 1)), 60), np.arange(60)[None])
        assert np.array_equal(cache.top_k(0, np.zeros_like(q), -np.ones((1, 1)), 60), np.arange(60)[None])  # -0


def test_many_queries_come_in_turns(rng, monkeypatch):
    rows = latent_reference.rows(rng, 6000, 16)
    cache = keys_of("int8", rows)
    q, weights = latent_reference.rows(rng, 6000, 1, 16), np.ones((6000, 1), np.float32)  # more than fit at once
    got = cache.top_k(0, q, weights, 3)
    assert np.array_equal(got[:3], [[0, -1, -1], [0, 1, -1], [0, 1, 2]])
    for i in (2795, 2796, 2797, 5999):
        shorter = keys_of("int8", rows[: i + 1])
        assert np.array_equal(shorter.top_k(0, q[i : i + 1], weights[:1], 3), got[i : i + 1])


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"q": np.ones((1, 2, DIM + 1))}, kvfast.DimensionMismatchError, "48 elements in a row, as the keys have, got 49"),
        ({"q": np.ones((6, 2, DIM))}, ValueError, "q must hold 1 to 5 tokens, as the layer has, got 6"),
        ({"q": np.full((1, 2, DIM), np.nan)}, kvfast.NonFiniteInputError, "q"),
        ({"q": np.full((1, 2, DIM), 1e38)}, kvfast.NonFiniteInputError, "a score is beyond float32"),
        ({"q": np.ones((2, DIM))}, kvfast.DimensionMismatchError, "q"),
        ({"weights": np.ones((1, 3))}, kvfast.DimensionMismatchError, r"weights must have shape \(1, 2\), one for each head of q"),
        ({"weights": np.ones(2)}, kvfast.DimensionMismatchError, r"got \(2,\)"),
        ({"weights": [[np.inf, 0]]}, kvfast.NonFiniteInputError, "weights must be finite"),
        ({"k": 0}, ValueError, "k must be"),
        ({"k": 1.5}, TypeError, "k must be"),
        ({"layer": 1}, IndexError, "layer"),
    ],
)
def test_bad_input(rng, change, error, text):
    cache = keys_of("float32", np.full((5, DIM), 10, np.float32))
    given = {"layer": 0, "q": np.ones((1, 2, DIM)), "weights": np.ones((1, 2)), "k": 3} | change
    with pytest.raises(error, match=text):
        cache.top_k(**given)


def test_rows_that_are_no_keys_of_an_indexer(rng):
    cache = kvfast.MLAKVCache(1, 32, 16)
    cache.append(0, latent_reference.rows(rng, 5, 48))
    with pytest.raises(ValueError, match="top_k needs rows without a rotary part, made with rope_dim=0, got rope_dim 16"):
        cache.top_k(0, np.ones((1, 2, 48)), np.ones((1, 2)), 3)
    with pytest.raises(ValueError, match="layer 0 holds no tokens to choose from"):
        kvfast.MLAKVCache(1, 32, 0).top_k(0, np.ones((1, 2, 32)), np.ones((1, 2)), 3)
