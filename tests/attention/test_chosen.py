"""Chosen tokens against float64 attention: a query reads the positions that were chosen for it, and no other."""

import latent_reference
import numpy as np
import pytest
from attention_rows import DIM, HEADS, TOKENS, queries, tokens
from cache_kinds import FORMATS, filled
from reference import attention, bound, relative_error
from rotated_reference import turn
from selection import parametrize

import kvfast

OPTIONS = [
    {},
    {"sliding_window": 50, "num_sink_tokens": 20},
    {"attention_chunk_size": 72, "num_sink_tokens": 2},
    {"softcap": 5.0, "sinks": np.linspace(-1, 2, 3 * HEADS)},
    {"causal": False},
    {"spans": [(100, 290)]},
]


def seen(at, length, sliding_window=None, num_sink_tokens=0, attention_chunk_size=None, causal=True, spans=(), **others):
    """Positions that a query sees."""
    first = at + 1 - sliding_window if sliding_window else 0
    if attention_chunk_size:
        first = at // attention_chunk_size * attention_chunk_size
    stop = at + 1 if causal else length
    for start, end in spans:
        if start <= at < end:
            first, stop = min(first, start), max(stop, end)
    positions = np.arange(stop)
    return positions[(positions >= first) | (positions < num_sink_tokens)]


def choice(rng, count, k, run=1, heads=HEADS, length=TOKENS, **options):
    """A choice of at most `k` for each of the last `count` queries and each KV head, with pads among them."""
    chosen = np.full((count, heads, k), -1)
    for i in range(count):
        runs = np.unique(seen(length - count + i, length, **options) // run * run)
        for head in range(heads):
            some = rng.permutation(runs)[: rng.integers(1, k + 1)]
            chosen[i, head, rng.permutation(k)[: len(some)]] = some
    return chosen if heads > 1 else chosen[:, 0]


@parametrize(
    ("dtype", "options"),
    [(dtype, options) for dtype in ["float32", "float16", *FORMATS] for options in OPTIONS],
    [(dtype, options) for dtype in ("float32", "int8-rotated", "int4", "int3") for options in OPTIONS[:2]],
)
def test_against_float64_on_every_tier(isa, rng, dtype, options):
    cache = filled(kvfast.KVCache(1, HEADS, DIM, dtype=FORMATS.get(dtype, dtype)), *tokens(rng))
    for n, k, run, heads in ((1, 40, 1, HEADS), (5, 300, 1, 1), (40, 7, 1, HEADS), (3, 19, 16, 1), (20, 6, 16, HEADS), (1, 1, 1, 1)):
        q, chosen = queries(rng, n), choice(rng, n, k, run, heads, **options)
        expected, lse = attention(q, cache.k(0), cache.v(0), indices=chosen, index_block=run, **options)
        got, got_lse = cache.attend(0, q, indices=chosen, index_block=run, return_lse=True, **options)
        assert relative_error(got, expected) < bound(dtype) and np.abs(got_lse - lse).max() < 1e-3


@parametrize("dtype", ["float32", "float16", *FORMATS], ["float32", "int4", "means, k8v4", "channels, int3, 32"])
def test_blocks_that_were_cut_and_counted(isa, rng, dtype):
    """Tokens keep their float rows at the start, at the end, and in blocks that were patched; the others have codes alone."""
    k, v = tokens(rng, 900)
    cache = filled(kvfast.KVCache(1, HEADS, DIM, dtype=FORMATS.get(dtype, dtype)), k[:600], v[:600])
    cache.truncate(421)
    filled(cache, k[600:], v[600:])
    filled(cache, *tokens(rng, 9), counted=False)
    length = cache.layer_length(0)
    for n, most, run in ((1, 500, 1), (1, 40, 16), (9, 100, 1), (9, 30, 16)):
        q, chosen = queries(rng, n), choice(rng, n, most, run, length=length)
        expected, _ = attention(q, cache.k(0), cache.v(0), indices=chosen, index_block=run)
        assert relative_error(cache.attend(0, q, indices=chosen, index_block=run), expected) < bound(dtype)


@parametrize("dtype", latent_reference.DTYPES, ["int8-rotated", "int4", "bfloat16", "float32"])
@pytest.mark.parametrize("num_q_heads", [1, 20, 128])
def test_latent_rows(isa, rng, dtype, num_q_heads):
    latents = latent_reference.rows(rng, TOKENS, 48 + 16)
    cache = filled(kvfast.MLAKVCache(1, 48, 16, dtype=dtype), latents)
    stored, scale = cache.get_latent(0), 0.2
    pool = kvfast.PagedMLAKVCache(1, 48, 16, num_blocks=16, dtype=dtype)
    sequences = [filled(pool.new_sequence(), latents), filled(pool.new_sequence(), latents[:150])]
    for n, k, run in ((1, 200, 1), (3, 9, 16)):
        q, chosen = latent_reference.rows(rng, n, num_q_heads, 64), choice(rng, n, k, run, 1)
        got = cache.attend(0, q, scale=scale, indices=chosen, index_block=run)
        expected, _ = attention(q, stored[:, None], stored[:, None, :48], scale=scale, indices=chosen, index_block=run)
        assert relative_error(got, expected) < bound(dtype)
        others = choice(rng, n, k, run, 1, 150)
        both = np.concatenate((q, q)), sequences
        batch = {"cu_seqlens_q": [0, n, 2 * n], "scale": scale, "indices": np.concatenate((chosen, others)), "index_block": run}
        assert np.array_equal(pool.attend_batch(0, *both, **batch)[:n], got)
        alone = sequences[1].attend(0, q, scale=scale, indices=others, index_block=run)
        assert np.array_equal(pool.attend_batch(0, *both, **batch)[n:], alone)
    plans = cache.explain(0, (1, num_q_heads, 64), indices=chosen[:1], index_block=run), cache.explain(0, (1, num_q_heads, 64))
    assert plans[0].bytes_read < plans[1].bytes_read


@pytest.mark.parametrize("dtype", ["int8-rotated", "int4", "int3", "float32"])
def test_bits_ignore_threads_order_pads_and_companions(rng, dtype):
    k, v = tokens(rng, 3000)
    cache, q = filled(kvfast.KVCache(1, HEADS, DIM, dtype=dtype), k, v), queries(rng, 12)
    for run, heads in ((1, HEADS), (16, HEADS), (1, 1), (16, 1)):
        options = {"index_block": run, "num_splits": 3}
        chosen = choice(rng, 12, 1500 // run, run, heads, 3000)
        whole = cache.attend(0, q, indices=chosen, **options)
        for threads in (1, 2, 5):
            assert np.array_equal(cache.attend(0, q, indices=chosen, num_threads=threads, **options), whole)
        for i in range(11, 12):
            assert np.array_equal(cache.attend(0, q[i:], indices=chosen[i:], **options), whole[i:])
        mixed = np.concatenate((np.full_like(chosen, -1), rng.permuted(chosen, axis=-1)), axis=-1)
        assert np.array_equal(cache.attend(0, q, indices=mixed, **options), whole)
        if heads == 1:
            apart = np.repeat(chosen[:, None], HEADS, axis=1)
            assert np.array_equal(cache.attend(0, q, indices=apart, **options), whole)
        if run == 16:
            singles = (chosen[..., None] + np.arange(16)).reshape(*chosen.shape[:-1], -1)
            at = np.arange(2988, 3000).reshape(12, *[1] * (chosen.ndim - 1))
            singles[(np.repeat(chosen, 16, axis=-1) < 0) | (singles > at)] = -1
            assert np.array_equal(cache.attend(0, q, indices=singles, num_splits=3), whole)


@pytest.mark.parametrize("dtype", ["int8-rotated", "int4", "float16"])
def test_pools_and_tables_of_another_scheduler(rng, dtype):
    k, v = tokens(rng)
    cache, q = filled(kvfast.KVCache(1, HEADS, DIM, dtype=dtype), k, v), queries(rng, 20)
    chosen = choice(rng, 20, 30)
    whole = cache.attend(0, q, indices=chosen)
    pool = kvfast.PagedKVCache(1, HEADS, DIM, 16, dtype=dtype)
    one, other = filled(pool.new_sequence(), k, v), filled(pool.new_sequence(), k[:100], v[:100])
    others = choice(rng, 4, 30, length=100)
    batch = {"cu_seqlens_q": [0, 20, 24], "indices": np.concatenate((chosen, others))}
    both = pool.attend_batch(0, np.concatenate((q, q[:4])), [one, other], **batch)
    assert np.array_equal(both[:20], whole) and np.array_equal(both[20:], other.attend(0, q[:4], indices=others))
    assert pool.explain_batch(0, (24, 6, DIM), [one, other], **batch).num_tasks == 24 * HEADS
    if dtype != "int4":
        external = kvfast.PagedKVCache(1, HEADS, DIM, 8, 64, dtype=dtype)
        prepared = external.prepare_batch(np.arange(5)[None], np.array([TOKENS]), [0, 20], np.arange(280, 300))
        external.append_batch(0, k[:280], v[:280], np.arange(280))
        external.append_batch(0, k[280:], v[280:], prepared)
        assert np.array_equal(external.attend_batch(0, q, prepared, indices=chosen), whole)
    assert relative_error(kvfast.attention(q, cache.k(0), cache.v(0), indices=chosen), whole) < 1e-3


def test_a_prefix_that_sequences_share_is_not_read_together(rng):
    k, v = tokens(rng, 700)
    pool, q = kvfast.PagedKVCache(1, HEADS, DIM, 40, dtype="int8-rotated"), queries(rng, 2)
    first = filled(pool.new_sequence(), k[:640], v[:640])
    members = [first, first.fork()]
    for member, extra in zip(members, (0, 30)):
        filled(member, k[640 + extra : 644 + extra], v[640 + extra : 644 + extra])
    chosen = choice(rng, 2, 60, length=600)
    got = pool.attend_batch(0, q, members, indices=chosen)
    for i, member in enumerate(members):
        assert np.array_equal(got[i : i + 1], member.attend(0, q[i : i + 1], indices=chosen[i : i + 1]))


@pytest.mark.parametrize("dim, strides", [(32, 1), (20, 1), (32, 3)])
def test_plain_arrays(rng, dim, strides):
    """Read where they lie, or copied."""
    k, v = (rng.standard_normal((TOKENS, strides * HEADS, dim)).astype(np.float16)[:, :HEADS] for _ in range(2))
    q = rng.standard_normal((4, 6, dim)).astype(np.float32)
    for run in (1, 16):
        chosen = choice(rng, 4, 12, run)
        expected, _ = attention(q, k, v, indices=chosen, index_block=run)
        assert relative_error(kvfast.attention(q, k, v, indices=chosen, index_block=run), expected) < 1e-5


def test_rings(rng):
    k, v = tokens(rng)
    q, options = queries(rng, 12), {"sliding_window": 60, "num_sink_tokens": 4}
    ring = filled(kvfast.RingKVCache(1, HEADS, DIM, dtype="float32", **options), k, v)
    for run in (1, 16):
        chosen = choice(rng, 12, 4, run, **options)
        expected, _ = attention(q, k, v, indices=chosen, index_block=run, **options)
        assert relative_error(ring.attend(0, q, indices=chosen, index_block=run), expected) < 1e-5
    with pytest.raises(ValueError, match="indices hold 100 for query 0, which sees the positions 229 to 288, and those before 4"):
        ring.attend(0, q, indices=np.full((12, 1), 100))


@pytest.mark.parametrize("dtype", ["float32", "int8-rotated", "int4"])
def test_rings_with_a_rope(isa, rng, dtype):
    """Their sink tokens follow the window, so that a query is rotated once more for them."""
    rope, window, sinks = kvfast.Rope(), 60, 20
    for length in (TOKENS, 70):
        k, v = (rows[:length] for rows in tokens(rng))
        ring = filled(kvfast.RingKVCache(1, HEADS, DIM, window, sinks, rope=rope, dtype=dtype), k, v)
        stored = np.stack((k, v))
        stored[:, ring.positions()] = ring.k(0), ring.v(0)
        # A ring shows what its last query sees; of what other queries see, float32 alone is what was given.
        for n, most, run in ((1, 70, 1), (3 if dtype == "float32" else 1, 9, 1), (1, 3, 16), (1, 1, 1)):
            q = queries(rng, n)
            chosen = choice(rng, n, most, run, length=length, sliding_window=window, num_sink_tokens=sinks)
            got = ring.attend(0, q, indices=chosen, index_block=run, num_splits=3 if most > 60 else 0)
            for i in range(n):
                at = length - n + i
                places = np.arange(length)
                places[: min(sinks, max(0, at + 1 - window))] += max(0, at - (sinks + window - 1))  # closer to the query than they are
                keys = turn(stored[0], places, rope)
                seen, one = slice(at + 1), slice(i, i + 1)
                given = {"indices": chosen[one], "index_block": run, "sliding_window": window, "num_sink_tokens": sinks}
                expected, _ = attention(turn(q[one], at, rope), keys[seen], stored[1][seen], **given)
                assert relative_error(got[one], expected) < bound(dtype)


@pytest.mark.parametrize("dtype", ["int8-rotated", "int4", "int3-plain", "float16", "float32"])
def test_other_than_chosen_tokens_are_not_read(rng, dtype):
    """As many bytes for as many runs after any context; a single token takes the lines of its keys, and some of its values."""
    few, many = (filled(kvfast.KVCache(1, HEADS, DIM, dtype=dtype), *tokens(rng, count)) for count in (2000, 20000))
    runs = 16 * rng.permutation(120)[:40].reshape(1, 40)
    plans = [cache.explain(0, (1, 6, DIM), indices=runs + shift, index_block=16) for cache, shift in ((few, 0), (many, 17920))]
    assert plans[0].bytes_read == plans[1].bytes_read < 0.5 * few.explain(0, (1, 6, DIM)).bytes_read
    assert plans[0].items[0].begin == 0 and plans[0].items[0].end == 640
    spread = many.explain(0, (1, 6, DIM), indices=16 * np.arange(640).reshape(1, 640))
    dense = sum(getattr(plans[0], name) for name in ("code_bytes", "float_bytes"))
    touched = (spread.code_bytes + spread.float_bytes) / dense
    assert touched == 1 if dtype.startswith("float") else 8 < touched <= 16


def test_calls_without_a_choice_are_as_before(rng):
    cache, q = filled(kvfast.KVCache(1, HEADS, DIM, dtype="int8-rotated"), *tokens(rng)), queries(rng, 3)
    before = cache.attend(0, q)
    cache.attend(0, q, indices=choice(rng, 3, 20))
    assert np.array_equal(cache.attend(0, q), before)
    everything = np.where(np.arange(TOKENS) <= np.arange(TOKENS - 3, TOKENS)[:, None], np.arange(TOKENS), -1)
    assert relative_error(cache.attend(0, q, indices=everything), before) < 1e-4


@pytest.mark.parametrize(
    "chosen, run, error, text",
    [
        ([[0, 5], [3, 3]], 1, ValueError, "must not hold a position twice, got 3 for query 1"),
        ([[0, -2], [3, 4]], 1, ValueError, "must hold -1 or positions, got -2 for query 0"),
        ([[0, 299], [3, 4]], 1, ValueError, "hold 299 for query 0, which sees the positions 0 to 298"),
        ([[0, 1], [300, 4]], 1, ValueError, "hold 300 for query 1, which sees the positions 0 to 299"),
        ([[0, 1], [2**63 - 1, 4]], 1, ValueError, "hold 9223372036854775807 for query 1"),
        ([[0, 1], [-1, -1]], 1, ValueError, "a position for each query, got none for query 1"),
        ([[[0, 1], [2, 2]], [[0, 1], [2, 3]]], 1, ValueError, "got 2 for query 0 in KV head 1"),
        ([[0, 16], [8, 16]], 16, ValueError, "must hold -1 or multiples of 16, got 8 for query 1"),
        ([[0, 16], [16, 16]], 16, ValueError, "twice, got 16 for query 1"),
        ([[0, 304], [16, 32]], 16, ValueError, "hold 304 for query 0"),
        ([[0], [2**63 - 16]], 16, ValueError, "hold 9223372036854775792 for query 1"),
        ([[0], [1]], 8, ValueError, "index_block must be 1, or with indices 16, got 8"),
        (None, 16, ValueError, "index_block must be 1, or with indices 16, got 16"),
        ([[0], [1]], 0, ValueError, "index_block must be"),
        ([[0], [1]], 1.0, TypeError, "index_block must be"),
        ([[0, 1]], 1, kvfast.DimensionMismatchError, r"shape \(2, k\), or \(2, 2, k\) with a choice for each KV head, got \(1, 2\)"),
        ([0, 1], 1, kvfast.DimensionMismatchError, r"got \(2,\)"),
        ([[], []], 1, kvfast.DimensionMismatchError, r"got \(2, 0\)"),
        (np.zeros((2, 3, 4), int), 1, kvfast.DimensionMismatchError, r"got \(2, 3, 4\)"),
        ([[0.0], [1.0]], 1, kvfast.DimensionMismatchError, "integers"),
        ([[2**70], [1]], 1, (ValueError, kvfast.DimensionMismatchError), "indices must"),
        (5, 1, kvfast.DimensionMismatchError, r"got \(\)"),
    ],
)
def test_bad_choices(rng, chosen, run, error, text):
    cache, q = filled(kvfast.KVCache(1, HEADS, DIM, dtype="int8-rotated"), *tokens(rng)), queries(rng, 2)
    out = np.full((2, 6, DIM), 7, np.float32)
    for call in (
        lambda: cache.attend(0, q, indices=chosen, index_block=run, out=out),
        lambda: cache.explain(0, q, indices=chosen, index_block=run),
    ):
        with pytest.raises(error, match=text):
            call()
    assert (out == 7).all()


def test_options_that_exclude_indices(rng):
    cache, q = filled(kvfast.KVCache(1, HEADS, DIM, dtype="int8-rotated"), *tokens(rng)), queries(rng, 2)
    for others in ({"tree_parents": [-1]}, {"alibi_slopes": np.ones(6)}):
        with pytest.raises(ValueError, match="indices need tree_parents=None and alibi_slopes=None"):
            cache.attend(0, q, indices=[[0], [1]], **others)
