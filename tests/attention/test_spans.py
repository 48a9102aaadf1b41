"""Spans, whose tokens see each other, against float64 attention: every tier, format and cache."""

import numpy as np
import pytest
from attention_rows import DIM, HEADS, TOKENS, queries, tokens
from cache_kinds import FORMATS, filled
from reference import attention, bound, relative_error
from selection import parametrize

import kvfast

SPANS = [(0, 7), (40, 41), (90, 260)]
OPTIONS = [
    {},
    {"sliding_window": 50},
    {"sliding_window": 200, "num_sink_tokens": 4},
    {"softcap": 5.0},
    {"attention_chunk_size": 64},
    {"sliding_window": 50, "num_sink_tokens": 3, "clamp_spans": True},
    {"attention_chunk_size": 64, "clamp_spans": True},
]


@parametrize(
    ("dtype", "options"),
    [(dtype, options) for dtype in ["float32", "float16", *FORMATS] for options in OPTIONS],
    [(dtype, {}) for dtype in ("float32", "int8-rotated", "int4")],
)
def test_against_float64_on_every_tier(isa, rng, dtype, options):
    cache = filled(kvfast.KVCache(1, HEADS, DIM, dtype=FORMATS.get(dtype, dtype)), *tokens(rng))
    for n in (1, 3, 41, TOKENS):
        q = queries(rng, n)
        expected, lse = attention(q, cache.k(0), cache.v(0), spans=SPANS, **options)
        got, got_lse = cache.attend(0, q, spans=SPANS, return_lse=True, **options)
        assert relative_error(got, expected) < bound(dtype) and np.abs(got_lse - lse).max() < 1e-3
    q = queries(rng, TOKENS)
    causal = cache.attend(0, q, **options)
    assert np.array_equal(cache.attend(0, q, spans=[], **options), causal)
    assert not np.array_equal(cache.attend(0, q, spans=SPANS, **options), causal)


@pytest.mark.parametrize("dtype", ["int8-rotated", "int4", "float32"])
def test_the_bits_do_not_depend_on_threads_chunks_and_caches(rng, dtype):
    k, v = tokens(rng)
    cache, q = filled(kvfast.KVCache(1, HEADS, DIM, dtype=dtype), k, v, counted=False), queries(rng, TOKENS)
    whole = cache.attend(0, q, spans=SPANS)
    for threads in (1, 2, 5):
        assert np.array_equal(cache.attend(0, q, spans=SPANS, num_threads=threads), whole)
    for few in (2, 5, 16):
        alone = [cache.attend(0, q[-few:], spans=SPANS[:-1])[i] for i in range(few)]
        assert np.array_equal(np.stack(alone), cache.attend(0, q[-few:], spans=SPANS[:-1]))
    pool = kvfast.PagedKVCache(1, HEADS, DIM, 16, dtype=dtype)
    one, other = filled(pool.new_sequence(), k, v, counted=False), filled(pool.new_sequence(), k[:100], v[:100], counted=False)
    both = pool.attend_batch(0, np.concatenate((q, q[:100])), [one, other], cu_seqlens_q=[0, TOKENS, TOKENS + 100], spans=[SPANS, None])
    assert np.array_equal(both[:TOKENS], whole) and np.array_equal(both[TOKENS:], other.attend(0, q[:100]))
    assert pool.explain_batch(0, (1, 6, DIM), [one], spans=[SPANS]).num_tasks == one.explain(0, (1, 6, DIM), spans=SPANS).num_tasks
    if dtype == "float32":
        assert relative_error(kvfast.attention(q, k, v, spans=SPANS), whole) < 1e-6


def test_a_prompt_in_chunks_sees_what_it_sees_whole(rng):
    """No chunk ends inside a span, so that each span is there before its queries attend."""
    k, v = tokens(rng)
    q, cache, parts = queries(rng, TOKENS), kvfast.KVCache(1, HEADS, DIM, dtype="float32"), []
    for first, last in ((0, 41), (41, 90), (90, 260), (260, TOKENS)):
        filled(cache, k[first:last], v[first:last])
        parts.append(cache.attend(0, q[first:last], spans=[span for span in SPANS if span[1] <= last]))
    assert relative_error(np.concatenate(parts), attention(q, k, v, spans=SPANS)[0]) < 1e-5


def test_rings_and_tables_of_another_scheduler(rng):
    k, v = tokens(rng)
    q, slots = queries(rng, TOKENS), np.arange(TOKENS)
    ring = filled(kvfast.RingKVCache(1, HEADS, DIM, sliding_window=180, num_sink_tokens=4, dtype="float32"), k, v)
    expected, _ = attention(q[-20:], k, v, sliding_window=180, num_sink_tokens=4, spans=[(285, 300)])
    assert relative_error(ring.attend(0, q[-20:], spans=[(285, 300)]), expected) < 1e-5
    pool = kvfast.PagedKVCache(1, HEADS, DIM, 8, 64, dtype="int8-rotated")
    table, lengths = np.arange(5)[None], np.array([TOKENS])
    batch = pool.prepare_batch(table, lengths, [0, TOKENS], slots)
    pool.append_batch(0, k, v, batch)
    cache = filled(kvfast.KVCache(1, HEADS, DIM, dtype="int8-rotated"), k, v)
    assert np.array_equal(pool.attend_batch(0, q, batch, spans=[SPANS]), cache.attend(0, q, spans=SPANS))


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("clamp, span", [(False, (265, 300)), (True, (265, 300)), (True, (210, 300))])
def test_rings_with_a_rope(rng, sinks, clamp, span):
    """The window and its sinks keep their places, and tokens of a span see what follows them in the text."""
    window, rope = 40, kvfast.Rope(10000.0)
    k, v = tokens(rng)
    q = queries(rng, 30)
    ring = kvfast.RingKVCache(1, HEADS, DIM, sliding_window=window, num_sink_tokens=sinks, dtype="float32", rope=rope)
    got = filled(ring, k, v).attend(0, q, spans=[span], clamp_spans=clamp)

    def turn(rows, places):
        half, angles = DIM // 2, np.outer(places, 10000.0 ** (-np.arange(DIM // 2) * 2 / DIM))[:, None]
        a, b, cos, sin = rows[..., :half], rows[..., half:], np.cos(angles), np.sin(angles)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    for i, at in enumerate(range(TOKENS - 30, TOKENS)):
        seen = np.concatenate((np.arange(sinks), np.arange(at + 1 - window, span[1])))
        places = np.concatenate((np.arange(sinks), sinks + np.arange(len(seen) - sinks)))
        turned = turn(q[i : i + 1].astype(float), [sinks + window - 1])
        expected, _ = attention(turned, turn(k[seen].astype(float), places), v[seen], causal=False)
        assert relative_error(got[i : i + 1], expected) < 1e-5
    with pytest.raises(
        ValueError, match="must not be longer than the window of 40 tokens in a ring with a rope.*got 60: pass clamp_spans"
    ):
        ring.attend(0, q, spans=[(240, 300)])
    with pytest.raises(ValueError, match="spans must end within the 300 tokens"):
        ring.attend(0, q, spans=[(280, 301)])


@pytest.mark.parametrize(
    "spans, error, text",
    [
        ([(5, 5)], ValueError, "a start of at least 0 and a later stop each, got 5 and 5"),
        ([(-1, 5)], ValueError, "got -1 and 5"),
        ([(9, 5)], ValueError, "got 9 and 5"),
        ([(3, 20), (10, 30)], ValueError, "must not overlap, got 3 to 20 and 10 to 30"),
        ([(280, 301)], ValueError, "within the 300 tokens that are held, got 280 to 301: append all tokens of a span"),
        ([(1 << 70, 5)], (ValueError, kvfast.DimensionMismatchError), "spans must"),
        ([1, 2], kvfast.DimensionMismatchError, "integers with 2 dimensions"),
        (5, kvfast.DimensionMismatchError, "integers with 2 dimensions"),
        ([(1, 2, 3)], kvfast.DimensionMismatchError, r"shape \(num_spans, 2\), a start and a stop of each, got \(1, 3\)"),
        ([(1.0, 2.0)], kvfast.DimensionMismatchError, "integers"),
    ],
)
def test_bad_spans(rng, spans, error, text):
    cache = filled(kvfast.KVCache(1, HEADS, DIM, dtype="int8-rotated"), *tokens(rng))
    with pytest.raises(error, match=text):
        cache.attend(0, queries(rng, 2), spans=spans)
    with pytest.raises(ValueError, match="spans need causal=True"):
        cache.attend(0, queries(rng, 2), spans=[(0, 2)], causal=False)
    pool = kvfast.PagedKVCache(1, HEADS, DIM, 16, dtype="int8-rotated")
    sequence = filled(pool.new_sequence(), *tokens(rng))
    with pytest.raises(kvfast.DimensionMismatchError, match="one entry for each of the 1 sequences, got 2"):
        pool.attend_batch(0, queries(rng, 1), [sequence], spans=[None, None])
    with pytest.raises(TypeError, match="a list with one entry per sequence, got int"):
        pool.attend_batch(0, queries(rng, 1), [sequence], spans=5)
