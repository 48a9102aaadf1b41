"""Trees of drafts against float64 attention: a draft sees what is before the tree, its ancestors and itself."""

import functools

import numpy as np
import pytest
from attention_rows import DIM, HEADS, queries, tokens
from cache_kinds import FORMATS
from cache_kinds import filled as filled_and_counted
from reference import attention, relative_error
from selection import parametrize

import kvfast

filled = functools.partial(filled_and_counted, counted=False)
BUSHY = [-1, 0, 0, 1, 1, 2, -1, 3, 6, 5, 4, 7]  # three branches, whose tokens lie between each other
OPTIONS = [
    {},
    {"sliding_window": 50, "num_sink_tokens": 4},
    {"sliding_window": 3},  # fewer tokens than the tree is deep
    {"attention_chunk_size": 292},  # a chunk begins within the tree
    {"attention_chunk_size": 48, "num_sink_tokens": 2},
    {"softcap": 5.0},
    {"alibi_slopes": np.linspace(0.01, 0.5, 3 * HEADS)},
]


def random_tree(rng, count):
    return [int(rng.integers(-1, i)) if rng.random() < 0.5 else i - 1 for i in range(count)]


@parametrize(
    ("dtype", "options"),
    [(dtype, options) for dtype in ["float32", "float16", *FORMATS] for options in OPTIONS],
    [(dtype, options) for dtype in ("float32", "int8-rotated", "int4") for options in (OPTIONS[0], OPTIONS[6])],
)
def test_against_float64_on_every_tier(isa, rng, dtype, options):
    cache = filled(kvfast.KVCache(1, HEADS, DIM, dtype=FORMATS.get(dtype, dtype)), *tokens(rng))
    for n, parents in ((12, BUSHY), (13, BUSHY), (90, BUSHY), (1, [-1]), (64, random_tree(rng, 64)), (70, random_tree(rng, 40))):
        q = queries(rng, n)
        expected, lse = attention(q, cache.k(0), cache.v(0), tree_parents=parents, **options)
        got, got_lse = cache.attend(0, q, tree_parents=parents, return_lse=True, **options)
        assert relative_error(got, expected) < (1e-5 if dtype == "float32" else 1e-3) and np.abs(got_lse - lse).max() < 1e-3


@pytest.mark.parametrize("length", [0, 5, 16, 64, 65, 128, 1024, 5000])
@pytest.mark.parametrize("dtype", ["float32", "int8-rotated", "int4"])
def test_any_tree_after_any_length(rng, length, dtype):
    """The tree begins where a block or a tile does, or the window sees nothing before it."""
    for count in (1, 2, 17, 64):
        cache, parents, q = kvfast.KVCache(1, HEADS, DIM, dtype=dtype), random_tree(rng, count), queries(rng, count)
        filled(cache, *tokens(rng, length + count))
        for window, splits in ((None, 0), (2, 0), (40, 0), (None, 3)):
            expected, _ = attention(q, cache.k(0), cache.v(0), tree_parents=parents, sliding_window=window)
            got = cache.attend(0, q, tree_parents=parents, sliding_window=window, num_splits=splits)
            assert relative_error(got, expected) < (1e-5 if dtype == "float32" else 1e-3)
    for parents in ([-1] * count, [-1, *range(count - 1)]):  # all of them siblings, or a chain
        expected, _ = attention(q, cache.k(0), cache.v(0), tree_parents=parents)
        assert relative_error(cache.attend(0, q, tree_parents=parents), expected) < (1e-5 if dtype == "float32" else 1e-3)


@pytest.mark.parametrize("tree", [0, 16, 256, 1024])
def test_a_window_that_sees_nothing_before_the_tree(rng, tree):
    """Not even in the tile where the tree begins."""
    for parents in ([-1, 0, 0, -1, 1], [-1, 0, 1, 2]):
        for options in ({"sliding_window": 1}, {"sliding_window": 2}, {"attention_chunk_size": 16}):
            cache, q = kvfast.KVCache(1, HEADS, DIM, dtype="float32"), queries(rng, len(parents))
            filled(cache, *tokens(rng, tree + len(parents)))
            expected, _ = attention(q, cache.k(0), cache.v(0), tree_parents=parents, **options)
            assert relative_error(cache.attend(0, q, tree_parents=parents, **options), expected) < 1e-5
            ring = filled(kvfast.RingKVCache(1, HEADS, DIM, 17, dtype="float32"), *tokens(rng, tree + len(parents)))
            assert ring.attend(0, q, tree_parents=parents, **options).shape == q.shape


@pytest.mark.parametrize("limit", [{"sliding_window": 1}, {"sliding_window": 3}, {"attention_chunk_size": 4}])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_drafts_that_are_sink_tokens(rng, length, limit):
    """Sink tokens are those at the first positions, and a draft sees only its ancestors among them."""
    for sinks in (1, 2, 4, 9):
        cache = filled(kvfast.KVCache(1, HEADS, DIM, dtype="float32"), *tokens(rng, length + len(BUSHY)))
        q = queries(rng, len(BUSHY))
        expected, _ = attention(q, cache.k(0), cache.v(0), tree_parents=BUSHY, num_sink_tokens=sinks, **limit)
        got = cache.attend(0, q, tree_parents=BUSHY, num_sink_tokens=sinks, **limit)
        assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("dtype", ["int8-rotated", "int4", "float32"])
def test_a_chain_and_no_tree_have_the_bits_of_causal_attention(rng, dtype):
    cache, q = filled(kvfast.KVCache(1, HEADS, DIM, dtype=dtype), *tokens(rng)), queries(rng, 40)
    causal = cache.attend(0, q)
    assert np.array_equal(cache.attend(0, q, tree_parents=[]), causal)
    for count in (1, 5, 40):
        assert np.array_equal(cache.attend(0, q, tree_parents=[-1, *range(count - 1)]), causal)
        assert np.array_equal(cache.attend(0, q[:count], tree_parents=[-1, *range(count - 1)]), cache.attend(0, q[:count]))


@pytest.mark.parametrize("dtype", ["int8-rotated", "int4", "float32"])
def test_the_bits_do_not_depend_on_threads_and_batches(rng, dtype):
    k, v = tokens(rng, 3000)
    cache, q = filled(kvfast.KVCache(1, HEADS, DIM, dtype=dtype), k, v), queries(rng, 12)
    whole = cache.attend(0, q, tree_parents=BUSHY)
    for threads in (1, 2, 5):
        assert np.array_equal(cache.attend(0, q, tree_parents=BUSHY, num_threads=threads), whole)
    pool = kvfast.PagedKVCache(1, HEADS, DIM, 120, dtype=dtype)
    one, other = filled(pool.new_sequence(), k, v), filled(pool.new_sequence(), k[:100], v[:100])
    both = pool.attend_batch(0, np.concatenate((q, q)), [one, other], cu_seqlens_q=[0, 12, 24], tree_parents=[BUSHY, None])
    assert np.array_equal(both[:12], whole) and np.array_equal(both[12:], other.attend(0, q))
    if dtype != "int4":
        one.advance(3000)
        table = {"block_table": pool.block_table([one]), "seq_lens": pool.seq_lens([one]), "cu_seqlens_q": [0, 12]}
        assert np.array_equal(pool.attend_batch(0, q, **table, tree_parents=[BUSHY]), whole)
    assert relative_error(kvfast.attention(q, cache.k(0), cache.v(0), tree_parents=BUSHY), whole) < 1e-3


def test_forks_that_read_a_prefix_together(rng):
    k, v = tokens(rng, 700)
    pool, q = kvfast.PagedKVCache(1, HEADS, DIM, 80, dtype="int8-rotated"), queries(rng, 8)
    first = filled(pool.new_sequence(), k[:640], v[:640])
    members = [first, first.fork()]
    for member, extra in zip(members, (0, 30)):
        filled(member, k[640 + extra : 644 + extra], v[640 + extra : 644 + extra])
    trees = [[-1, -1, 0, 1], [-1, 0, 0, 1]]
    got = pool.attend_batch(0, q, members, cu_seqlens_q=[0, 4, 8], tree_parents=trees)
    for i, (member, parents) in enumerate(zip(members, trees)):
        expected, _ = attention(q[4 * i : 4 * i + 4], member.k(0), member.v(0), tree_parents=parents)
        assert relative_error(got[4 * i : 4 * i + 4], expected) < 1e-3


def test_rings(rng):
    k, v = tokens(rng)
    q = queries(rng, 12)
    ring = filled(kvfast.RingKVCache(1, HEADS, DIM, sliding_window=40, num_sink_tokens=4, dtype="float32"), k, v)
    expected, _ = attention(q, k, v, sliding_window=40, num_sink_tokens=4, tree_parents=BUSHY)
    assert relative_error(ring.attend(0, q, tree_parents=BUSHY), expected) < 1e-5
    turned = filled(kvfast.RingKVCache(1, HEADS, DIM, sliding_window=64, rope=kvfast.Rope(10000.0)), k, v)
    with pytest.raises(ValueError, match="parents must be None in a ring with a rope"):
        turned.attend(0, q, tree_parents=BUSHY)


def test_a_branch_has_the_bits_of_few_bytes_more(rng):
    """What no draft sees is not read: a tree costs the tile of its tokens."""
    cache = filled(kvfast.KVCache(1, HEADS, DIM, dtype="int8-rotated"), *tokens(rng, 2000))
    plain, tree = cache.explain(0, (12, 6, DIM)), cache.explain(0, (12, 6, DIM), tree_parents=BUSHY)
    assert plain.bytes_read < tree.bytes_read < 1.2 * plain.bytes_read


@pytest.mark.parametrize(
    "parents, error, text",
    [
        ([0], ValueError, "-1 or a draft before its child, got 0 for draft 0"),
        ([-1, 1], ValueError, "got 1 for draft 1"),
        ([-1, -2], ValueError, "got -2 for draft 1"),
        ([-1] * 13, ValueError, "at most 64 drafts, and no more than the 12 tokens of q, got 13"),
        ([1.0], kvfast.DimensionMismatchError, "integers"),
        ([[-1]], kvfast.DimensionMismatchError, "parents must be integers with 1 dimension"),
        (5, kvfast.DimensionMismatchError, "parents must be integers with 1 dimension"),
        ([1 << 70], (ValueError, kvfast.DimensionMismatchError), "parents must"),
    ],
)
def test_bad_trees(rng, parents, error, text):
    cache, q = filled(kvfast.KVCache(1, HEADS, DIM, dtype="int8-rotated"), *tokens(rng)), queries(rng, 12)
    with pytest.raises(error, match=text):
        cache.attend(0, q, tree_parents=parents)
    for others in ({"causal": False}, {"spans": [(0, 2)]}):
        with pytest.raises(ValueError, match="parents need causal=True and spans=None"):
            cache.attend(0, q, tree_parents=[-1], **others)
    with pytest.raises(ValueError, match="at most 64 drafts, and no more than the 80 tokens of q, got 65"):
        cache.attend(0, queries(rng, 80), tree_parents=[-1] * 65)
    pool = kvfast.PagedKVCache(1, HEADS, DIM, 16, dtype="int8-rotated")
    sequence = filled(pool.new_sequence(), *tokens(rng))
    with pytest.raises(error, match=r"parents\[0\] must"):
        pool.attend_batch(0, q, [sequence], cu_seqlens_q=[0, 12], tree_parents=[parents])
    with pytest.raises(kvfast.DimensionMismatchError, match="parents must have one entry for each of the 1 sequences, got 2"):
        pool.attend_batch(0, q[:1], [sequence], tree_parents=[None, None])


@pytest.mark.parametrize("dtype", ["float32", "int8-rotated", "int4"])
def test_a_batch_of_spans_and_trees(rng, dtype):
    """One sequence has spans and another a tree of drafts, as each has them alone."""
    pool = kvfast.PagedKVCache(1, HEADS, DIM, 32, dtype=dtype)
    sequences, q = [filled(pool.new_sequence(), *tokens(rng)) for _ in range(3)], queries(rng, 40)
    own = [{"spans": [(270, 295)]}, {"tree_parents": BUSHY}, {}]
    bounds = [0, 12, 28, 40]
    alone = [one.attend(0, q[a:b], **more) for one, a, b, more in zip(sequences, bounds, bounds[1:], own)]
    lists = {name: [one.get(name) for one in own] for name in ("spans", "tree_parents")}
    assert np.array_equal(pool.attend_batch(0, q, sequences, cu_seqlens_q=bounds, **lists), np.concatenate(alone))
    plan = pool.explain_batch(0, (40, 3 * HEADS, DIM), sequences, cu_seqlens_q=bounds, **lists)
    assert plan.num_tasks > 0
    lists["spans"][1] = [(0, 2)]
    with pytest.raises(ValueError, match=r"parents\[1\] need causal=True and spans=None for their sequence"):
        pool.attend_batch(0, q, sequences, cu_seqlens_q=bounds, **lists)
