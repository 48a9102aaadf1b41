"""What queries to a spliced cache see: spans, trees of drafts and chosen tokens, as in any other cache."""

import numpy as np
import pytest
from cache_kinds import FORMATS, filled
from reference import relative_error
from rotated_reference import HEADS, Model
from selection import parametrize

import kvfast

ROPE = kvfast.Rope()
TREE = [-1, 0, 0, 1, 1, 2, -1, 3, 6, 5, 4, 7]
WINDOW = {"sliding_window": 90, "num_sink_tokens": 30}
DTYPES = {"float32": "float32", "float16": "float16"} | FORMATS
FEW = ["float32", "int8", "int4"]


def spliced(dtype="int8", pool=None, tail=40, seed=0):
    """40 tokens, two documents of 100 and 70, 50 more, of which positions 60 to 90 were dropped, and a tail."""
    new = (lambda: kvfast.KVCache(1, HEADS, 32, dtype=DTYPES.get(dtype, dtype))) if pool is None else pool.new_sequence
    documents = [Model(new(), ROPE, seed + 1 + i).append(n) for i, n in enumerate((100, 70))]
    model = Model(new(), ROPE, seed).append(40).splice(*documents).append(50).drop(60, 90)
    return model.append(tail) if tail else model


def choice(rng, length, n, k, heads, run=1, window=None, sinks=0):
    """Up to k positions or runs that each of the last n queries sees, for each of some heads."""
    chosen = np.full((n, heads, k), -1)
    for i in range(n):
        at = length - n + i
        seen = np.arange(at + 1)
        seen = seen[(seen > at - window) | (seen < sinks)] if window else seen
        for head in range(heads):
            some = rng.permutation(np.unique(seen // run * run))[: rng.integers(1, k + 1)]
            chosen[i, head, : len(some)] = some
    return chosen if heads > 1 else chosen[:, 0]


@parametrize("dtype", list(DTYPES), FEW)
@pytest.mark.parametrize("options", [{}, WINDOW, {"softcap": 5.0}], ids=["all", "window", "softcap"])
def test_against_float64_on_every_tier(isa, rng, dtype, options):
    model = spliced(dtype)
    length = len(model.cache)
    for n in (1, 12, 40, 150):
        model.check(n, spans=[(20, 45), (length - 8, length)], clamp_spans="sliding_window" in options, **options)
        model.check(n, tree_parents=TREE[:n], **options)
        for k, run, heads in ((5, 1, 1), (100, 1, HEADS), (9, 16, HEADS)):
            chosen = choice(rng, length, n, k, heads, run, options.get("sliding_window"), options.get("num_sink_tokens", 0))
            model.check(n, indices=chosen, index_block=run, **options)
    model.check(40, alibi_slopes=np.linspace(0.1, 0.5, 3 * HEADS), tree_parents=TREE)


@pytest.mark.parametrize("dtype", FEW)
@pytest.mark.parametrize("window", [1, 2, 9, 30])
def test_a_tree_among_the_sink_tokens(dtype, window):
    for tail in (12, 16):
        model = spliced(dtype, tail=tail)
        for n in (12, 30):
            model.check(n, tree_parents=TREE, sliding_window=window, num_sink_tokens=len(model.cache) - 7)


def test_a_tree_follows_the_splice():
    model = spliced(tail=11)
    with pytest.raises(ValueError, match="at most 11 drafts, as many tokens as were appended since the last splice, got 12"):
        model.cache.attend(0, model.queries(12), tree_parents=TREE)
    model.check(12, tree_parents=TREE[:11])


@pytest.mark.parametrize("dtype", ["float32", "int8-plain", "int4-plain"])
def test_the_bits_do_not_depend_on_other_queries(rng, dtype):
    model = spliced(dtype)
    cache, q, length = model.cache, model.queries(12), len(model.cache)
    chosen = choice(rng, length, 12, 150, HEADS)
    calls = ({"indices": chosen}, {"tree_parents": TREE}, {"spans": [(length - 12, length)]})
    together = [cache.attend(0, q, **options) for options in calls]
    for threads in (1, 2, 5):
        assert all(np.array_equal(cache.attend(0, q, num_threads=threads, **options), one) for options, one in zip(calls, together))
    chain = cache.attend(0, q, tree_parents=[-1, *range(11)])
    assert np.array_equal(chain, cache.attend(0, q))
    for at in (0, 5, 11):
        alone = cache.fork()
        alone.truncate(length - 11 + at)
        assert np.array_equal(alone.attend(0, q[at : at + 1], indices=chosen[at : at + 1])[0], together[0][at])


@pytest.mark.parametrize("dtype", FEW)
def test_batches(rng, dtype):
    """Sequences that were spliced, and one that was not, each with spans, drafts or choices of its own."""
    pool = kvfast.PagedKVCache(1, HEADS, 32, num_blocks=64, dtype=dtype)
    models = [spliced(dtype, pool), Model(pool.new_sequence(), ROPE, 7).append(90), spliced(dtype, pool, tail=5, seed=20)]
    sequences, counts = [model.cache for model in models], (12, 3, 5)
    q = np.concatenate([model.queries(n) for model, n in zip(models, counts)])
    starts = np.cumsum((0, *counts))
    chosen = [choice(rng, len(one), n, 60, HEADS) for one, n in zip(sequences, counts)]
    given = {"spans": [[(30, len(one))] for one in sequences], "tree_parents": [TREE, [], [-1, 0, 0]], "indices": chosen}
    for name, each in given.items():
        together = pool.attend_batch(
            0, q, sequences, cu_seqlens_q=starts, **{name: np.concatenate(each) if name == "indices" else each}
        )
        for i, one in enumerate(sequences):
            alone = one.attend(0, q[starts[i] : starts[i + 1]], **{name: each[i]})
            assert np.array_equal(together[starts[i] : starts[i + 1]], alone)
    with pytest.raises(ValueError, match=r"parents\[2\] must be -1 or a draft before its child, got 1 for draft 1"):
        pool.attend_batch(0, q, sequences, cu_seqlens_q=starts, tree_parents=[TREE, [], [-1, 1]])
    with pytest.raises(ValueError, match=r"spans\[0\] must end within the 270 tokens"):
        pool.attend_batch(0, q, sequences, cu_seqlens_q=starts, spans=[[(0, 300)], [], []])
    with pytest.raises(ValueError, match="indices hold 269 for query 0, which sees the positions 0 to 258"):
        pool.attend_batch(0, q, sequences, cu_seqlens_q=starts, indices=np.full((20, 1), 269))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4", "int3", "k8v4"])
@pytest.mark.parametrize("counted", [False, True])
def test_a_branch_is_kept(dtype, counted):
    """What stays is what a cache has that never held the other drafts."""
    rng = np.random.default_rng(3)
    tree, alone = spliced(dtype, tail=7).cache, spliced(dtype, tail=7).cache
    length, keep = len(tree), [0, 2, 5, 9]
    k, v = rng.standard_normal((2, 12, HEADS, 32)).astype(np.float32)
    tree.append(0, k, v)
    alone.append(0, k[keep], v[keep])
    if counted:
        tree.advance(12)
        alone.advance(4)
    tree.truncate(length, keep)
    assert len(tree) == len(alone) and tree.layer_length(0) == alone.layer_length(0) == length + 4
    assert np.array_equal(tree.k(0), alone.k(0)) and np.array_equal(tree.v(0), alone.v(0))
    for one in (tree, alone):
        filled(one, k[:1], v[:1])
    q = rng.standard_normal((2, 3 * HEADS, 32)).astype(np.float32)
    assert np.array_equal(tree.attend(0, q), alone.attend(0, q))


def test_spliced_tokens_do_not_move():
    cache = spliced(tail=0).cache
    before = cache.k(0)
    with pytest.raises(ValueError, match=r"to position 201, among the 230 tokens that were spliced or shifted: call truncate\(201\)"):
        cache.truncate(200, [0, 2])
    assert np.array_equal(cache.k(0), before)
    cache.truncate(200, [0, 1])
    assert len(cache) == 202


def test_only_chosen_segments_are_read():
    model = spliced(tail=600)
    q = (1, 3 * HEADS, 32)
    few, all_ = (model.cache.explain(0, q, **options) for options in ({"indices": [[0, 50, 51]]}, {}))
    assert few.bytes_read < all_.bytes_read / 10 and len(few.items) == 2
    out = model.cache.attend(0, model.queries(1), indices=np.arange(len(model.cache))[None])
    assert relative_error(out, model.cache.attend(0, model.queries(1))) < 1e-3
