"""The number of queries in a call changes no bit of a query's result: whole prompts, chunks of any size and single tokens."""

import itertools

import numpy as np
import pytest
from cache_kinds import FORMATS, fill, filled
from kvfast.attention.families import families

import kvfast

COUNTS = 1, 2, 15, 16, 17, 33, 64, 100, 512
TOKENS, HEADS, DIM = 2300, 2, 24
STORAGE = {name: name for name in ("float32", "float16", "bfloat16", "float16/bfloat16")} | FORMATS
EXACT = [isa for isa, names in families().items() if set(names.values()) == {"vectors"}]  # tiers without panels
# Precisions whose results do not depend on the number of queries: exact and fast on all formats, or on those of codes alone.
WAYS = [(isa, precision) for isa in kvfast.available_isas() if isa != "scalar" for precision in ("exact", "fast", "invariant")]
BEST = WAYS[:3]


def holds(way, dtype):
    fmt = kvfast.KVFormat.of(STORAGE[dtype])
    has_floats = "float" in f"{fmt.k_dtype} {fmt.v_dtype}" or fmt.floats_of_steps
    return way[0] not in EXACT if way[1] == "invariant" else way[0] in EXACT or not has_floats


def ways(tiers, dtypes):
    """Cases of a test, by the way and the storage dtype."""
    cases = [(way, dtype) for way in tiers for dtype in dtypes if holds(way, dtype)]
    return pytest.mark.parametrize(("way", "dtype"), cases, ids=["-".join((*way, dtype)) for way, dtype in cases])


OPTIONS = [
    {},
    {"sliding_window": 700},
    {"sliding_window": 1500, "num_sink_tokens": 5},
    {"attention_chunk_size": 900, "num_sink_tokens": 3, "softcap": 8.0},
    {"alibi_slopes": np.linspace(0.001, 0.1, 3 * HEADS)},
    {"num_splits": 3},
    {"causal": False, "sliding_window": 1100, "num_sink_tokens": 2},
]


@pytest.fixture
def attend(way):
    """Attention in the precision of the way, on its tier."""
    isa, precision = way
    with kvfast.use_isa(isa):
        yield lambda cache, q, **options: cache.attend(0, q, return_lse=True, precision=precision, **options)


def queries(count, dim=DIM, heads=3 * HEADS):
    return np.random.default_rng(7).standard_normal((count, heads, dim)).astype(np.float32)


def cache_of(dtype, length=TOKENS):
    return fill(kvfast.KVCache(1, HEADS, DIM, dtype=STORAGE[dtype]), np.random.default_rng(5), length)


def same(some, whole, rows):
    return all(np.array_equal(one, other[rows]) for one, other in zip(some, whole, strict=True))


def check_counts(attend, cache, q, counts=COUNTS, **options):
    """The last queries of a call have the bits that they have in a smaller call."""
    whole = attend(cache, q, **options)
    for n in counts:
        assert same(attend(cache, q[-n:], **options), whole, slice(len(q) - n, None)), (n, options)


@ways(WAYS, STORAGE)
def test_any_number_of_queries(attend, dtype):
    cache, q = cache_of(dtype), queries(max(COUNTS) + 1)
    check_counts(attend, cache, q)
    check_counts(attend, cache, q, (17, 1), num_threads=7)


@pytest.mark.parametrize("dtype", ["float16", "int4", "int3"])
@pytest.mark.parametrize("way", [way for way in WAYS if way[1] != "invariant"], ids="-".join)
def test_a_few_queries(way, dtype, attend):
    """Up to 16 queries have the bits of one, in all formats, also where their codes go through panels."""
    q, cache = queries(16, heads=32 * HEADS), cache_of(dtype, 700)
    check_counts(attend, cache, q, (1, 2, 7))
    if dtype == "int4" and way[1] == "exact" and families()[way[0]]["int4"] != "vectors":
        assert "attend_" in str(cache.explain(0, q.shape))


@ways(BEST, ["float32", "bfloat16", "int8", "k8v4", "int4", "int3"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "none")
def test_what_a_query_sees(attend, dtype, options):
    check_counts(attend, cache_of(dtype), queries(max(COUNTS) + 1), (1, 16, 33, 100), **options)


@ways(WAYS, ["float32", "float16", *(name for name in FORMATS if not kvfast.KVFormat.of(FORMATS[name]).open_tokens)])
def test_a_prompt_cut_at_random_places(attend, dtype):
    """Each piece is computed when the tokens after it are not yet there. Formats without tokens in both forms."""
    cache, q = cache_of(dtype), queries(700)
    first, rng = TOKENS - len(q), np.random.default_rng()
    for options in ({}, {"sliding_window": 900, "num_sink_tokens": 4}):
        whole = attend(cache, q, **options)
        cuts = [0, *sorted(rng.choice(np.arange(1, len(q)), 4, replace=False)), len(q)]
        copy = cache.copy()
        for end, begin in itertools.pairwise(cuts[::-1]):
            copy.truncate(first + end)
            assert same(attend(copy, q[begin:end], **options), whole, slice(begin, end)), (cuts, options)


@ways(WAYS, [name for name, dtype in FORMATS.items() if not kvfast.KVFormat.of(dtype).floats_of_steps])
def test_a_prompt_in_steps_of_any_size(way, dtype):
    """Each query reads its own newest tokens as floats, wherever a step ends: in a cache, a pool's sequences, and another scheduler's
    blocks."""
    fmt, first, rng = kvfast.KVFormat.of(STORAGE[dtype]), 300, np.random.default_rng()
    k, v = np.random.default_rng(5).standard_normal((2, 1100, HEADS, DIM)).astype(np.float32)
    q, outs = queries(len(k)), []
    cuts = sorted(rng.choice(np.arange(first + 1, len(k)), 5, replace=False).tolist())
    with kvfast.use_isa(way[0]):
        for steps in ([0, first, len(k)], [0, first, *cuts, len(k)]):
            cache = kvfast.KVCache(1, HEADS, DIM, dtype=fmt)
            pool, blocks = (kvfast.PagedKVCache(1, HEADS, DIM, 40, fmt.block_size or 32, fmt) for _ in "ab")
            pool.precision = blocks.precision = way[1]
            sequence, size, parts = pool.new_sequence(), blocks.block_size, []
            table = np.random.default_rng(1).permutation(40)[None, : -(-len(k) // size)]
            slots = (table[0, :, None] * size + np.arange(size)).reshape(-1)
            for begin, end in itertools.pairwise(steps):
                rows = slice(begin, end)
                cache.append(0, k[rows], v[rows])
                sequence.append(0, k[rows], v[rows])
                batch = blocks.prepare_batch(table, [end], [0, end - begin], slots[rows])
                blocks.append_batch(0, k[rows], v[rows], batch)
                parts.append(
                    (
                        cache.attend(0, q[rows], precision=way[1]),
                        pool.attend_batch(0, q[rows], [sequence], cu_seqlens_q=[0, end - begin]),
                        blocks.attend_batch(0, q[rows], batch),
                    )
                )
                cache.advance(end - begin)
                sequence.advance(end - begin)
            outs += [np.concatenate(part)[first:] for part in zip(*parts, strict=True)]
    assert all(np.array_equal(out, outs[0]) for out in outs), cuts


@ways(BEST, ["float32", "float16", "int8", "int4-plain", "int4"])
def test_spans_trees_and_chosen_tokens(attend, dtype):
    cache, q, rng = cache_of(dtype), queries(max(COUNTS) + 1), np.random.default_rng(3)
    for options in ({}, {"sliding_window": 1200, "num_sink_tokens": 3}):
        check_counts(attend, cache, q, (1, 17, 64), spans=[(1000, 1100), (2020, 2150), (2290, 2298)], **options)
    parents = [int(rng.integers(-1, i)) for i in range(12)]
    for options in ({}, {"sliding_window": 1300}, {"sliding_window": 1300, "num_sink_tokens": 2}):
        check_counts(attend, cache, q, (12, 16, 17, 100), tree_parents=parents, **options)
    indices = np.stack([rng.permutation(TOKENS - len(q))[:1400] for _ in range(len(q))])
    whole = attend(cache, q, indices=indices)
    for n in (1, 16, 17, 100):
        assert same(attend(cache, q[-n:], indices=indices[-n:]), whole, slice(len(q) - n, None))


@ways(BEST, ["float32", "float16", "int8", "int4-plain", "int4"])
def test_splices(attend, dtype):
    """Segments shorter and longer than a split; the tasks of many queries take all of them."""
    cache = cache_of(dtype, 1300)
    for seed, length in enumerate((40, 1100, 300)):
        other = fill(kvfast.KVCache(1, HEADS, DIM, dtype=STORAGE[dtype]), np.random.default_rng(seed), length)
        cache.splice(other.snapshot(), rope=kvfast.Rope())
    fill(cache, np.random.default_rng(9), 350)
    for options in ({}, {"sliding_window": 600}, {"sliding_window": 1500, "num_sink_tokens": 4}):
        for threads in (1, 2, 16):
            check_counts(attend, cache, queries(301), (1, 16, 17, 100), num_threads=threads, **options)


@ways(WAYS, ["float32", "int8", "int4"])
@pytest.mark.parametrize("cascade", [True, False])
def test_batches(way, dtype, cascade):
    isa, precision = way
    pool = kvfast.PagedKVCache(1, HEADS, DIM, 300, 64, STORAGE[dtype])
    counts = 1, 40, 3, 150, 17
    q, starts = queries(sum(counts)), np.r_[0, np.cumsum(counts)]
    shared = fill(pool.new_sequence(), np.random.default_rng(1), 2200)
    sequences = [fill(shared.fork(), np.random.default_rng(2 + i), 150 + 90 * i) for i in range(3)]
    sequences += [fill(pool.new_sequence(), np.random.default_rng(7 + n), n) for n in (1500, 90)]
    with kvfast.use_isa(isa):
        together = pool.attend_batch(0, q, sequences, cu_seqlens_q=starts, precision=precision, cascade=cascade)
        for i, sequence in enumerate(sequences):
            rows = slice(starts[i], starts[i + 1])
            assert np.array_equal(sequence.attend(0, q[rows], precision=precision), together[rows])


@ways(WAYS, ["float32", "bfloat16", "int8", "int8-plain", "int4"])
@pytest.mark.parametrize(("heads", "rope_dim"), [(3, 16), (40, 0)])
def test_latent_rows(attend, dtype, heads, rope_dim):
    """Few heads, and many, of which a single token has rows for panels."""
    cache = kvfast.MLAKVCache(1, 48, rope_dim, dtype=dtype)
    filled(cache, np.random.default_rng(4).standard_normal((TOKENS, 48 + rope_dim)).astype(np.float32))
    check_counts(attend, cache, queries(65, 48 + rope_dim, heads), (1, 2, 16, 17, 33))
