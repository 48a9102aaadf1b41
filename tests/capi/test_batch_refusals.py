"""Pools, sequences and batches of `kvfast.h`: a call that is refused says why, and changes nothing."""

import numpy as np
import pytest

import kvfast

INVALID, SHAPE, NOT_FINITE, FULL, BUSY, NO_MEMORY, NO_LAYER = range(-1, -8, -1)


def new_pool():
    return kvfast.PagedKVCache(2, 2, 64, num_blocks=60, block_size=16, dtype="int8")


def test_what_a_batch_refuses_changes_nothing(c, rng):
    pool, others = new_pool(), new_pool()
    handle = c.Pool(pool)
    a, b, freed = (handle.new_sequence() for _ in range(3))
    k = rng.standard_normal((3, 2, 64), np.float32)
    handle.append(0, [a, b, freed], k, k)
    freed.free()
    foreign, cache = c.Pool(others).new_sequence(), c.Sequence.of(kvfast.KVCache(2, 2, 64, dtype="int8"))
    nan, wide = k.copy(), rng.standard_normal((3, 3, 64), np.float32)
    nan[2, 1, 5] = np.nan
    free = handle.num_free_blocks

    def lengths():
        return [(len(one), one.layer_length(0), one.layer_length(1)) for one in (a, b, foreign, cache)]

    before, of_each = lengths(), (0, 1, 2, 3)
    rises = r"starts must rise from 0 to the 3 tokens of . in 4 entries, got "
    both = [
        (INVALID, r"batch must point to sequences, got NULL", (None, None)),
        (INVALID, r"num_sequences must be at least 1, got 0", ([], None)),
        (INVALID, r"num_sequences must be at least 1, got -1", ([a], None, -1)),
        (
            INVALID,
            r"sequences\[1\] must be a sequence of this pool, got NULL: see new_sequence\(\) and fork\(\)",
            ([a, None, b], of_each),
        ),
        (INVALID, r"sequences\[2\] must be a sequence that is in use, got one that has been freed", ([a, b, freed], of_each)),
        (
            INVALID,
            r"sequences\[0\] must be a sequence of this pool, got a Sequence that has other blocks: restore\(\) its",
            ([foreign], (0, 3)),
        ),
        (INVALID, r"sequences\[1\] must be a sequence of this pool, got a KVCache that has other blocks", ([a, cache], (0, 1, 3))),
        (SHAPE, rises.replace("4", "3") + "NULL, which is for one token of each sequence", ([a, b], None)),
        (SHAPE, rises.replace("4", "3") + r"\[1, 2, 3\]", ([a, b], (1, 2, 3))),
        (SHAPE, rises.replace("4", "3") + r"\[0, 1, 2\]", ([a, b], (0, 1, 2))),
        (SHAPE, rises.replace("4", "3") + r"\[0, 4, 3\]", ([a, b], (0, 4, 3))),
        (SHAPE, rises.replace("4", "3") + rf"\[0, {2**32}, 3\]", ([a, b], (0, 2**32, 3))),
        (SHAPE, rises.replace("4", "3") + rf"\[0, 1, {2**32 + 3}\]", ([a, b], (0, 1, 2**32 + 3))),
    ]
    two = ([a, b], (0, 1, 3))
    appends = [
        *[(0, code, text, batch, k, k) for code, text, batch in both],
        (0, INVALID, r"sequences\[1\] must be another than sequences\[0\]", ([a, a], (0, 1, 3)), k, k),
        (0, NOT_FINITE, "v must be finite", two, k, nan),
        (0, SHAPE, r"k must have shape \(num_tokens, 2, 64\), got \(3, 3, 64\)", two, wide, wide),
        (0, SHAPE, "k and v must hold the same number of tokens, got 3 and 2", two, k, k[:2]),
        (0, INVALID, "k must not be NULL", two, None, k),
        (0, INVALID, "v must not be NULL", two, k, None),
        (2, NO_LAYER, "layer must be between 0 and 1, got 2", two, k, k),
        (-(2**31), NO_LAYER, f"layer must be between 0 and 1, got {-(2**31)}", two, k, k),
    ]
    for layer, code, text, batch, keys, values in appends:
        with pytest.raises(ValueError, match=f"^{code}: {text}"):
            handle.append(layer, batch[0], keys, values, *batch[1:])
        assert lengths() == before and handle.num_free_blocks == free
    out = np.full((3, 4, 64), 7, np.float32)
    q, few = rng.standard_normal((3, 4, 64), np.float32), np.zeros((2, 4, 64), np.float32)
    bad = q.copy()
    bad[0, 0, 0] = np.inf
    once = ([a, b, a], of_each)
    attends = [
        *[(0, code, text, batch, q, out) for code, text, batch in both],
        (0, INVALID, "sequence 1 of the batch holds 1 tokens, and q 2 of them", two, q, out),
        (0, NOT_FINITE, "q must be finite", once, bad, out),
        (0, SHAPE, "out must have", once, q, few),
        (0, INVALID, "q must not be NULL", once, None, out),
        (0, INVALID, "out must not be NULL", once, q, None),
        (7, NO_LAYER, "layer must be between 0 and 1, got 7", once, q, out),
    ]
    for layer, code, text, batch, queries, target in attends:
        with pytest.raises(ValueError, match=f"^{code}: {text}"):
            handle.attend(layer, batch[0], queries, target, *batch[1:])
        assert (out == 7).all() and lengths() == before and handle.num_free_blocks == free
    handle.attend(0, *once[:1], q, out, once[1])
    assert not (out == 7).any()


def test_a_full_pool_takes_all_of_a_batch_or_nothing(c, rng):
    pool = kvfast.PagedKVCache(2, 2, 64, num_blocks=4, block_size=16, dtype="int8")
    handle, k = c.Pool(pool), rng.standard_normal((64, 2, 64), np.float32)
    a, b = handle.new_sequence(), handle.new_sequence()
    handle.append(0, [a, b], k[:40], k[:40], (0, 20, 40))
    with pytest.raises(ValueError, match=rf"^{FULL}: 1 blocks? of 16 tokens .* needed, and 0 of 4 are free"):
        handle.append(0, [a, b], k[:14], k[:14], (0, 1, 14))
    assert [a.layer_length(0), b.layer_length(0)] == [20, 20] and handle.num_free_blocks == 0
    handle.append(0, [a, b], k[:24], k[:24], (0, 12, 24))
    assert [a.layer_length(0), b.layer_length(0)] == [32, 32]
    b.free()
    assert handle.num_free_blocks == 2 and pool.num_sequences == 1
    b.free()  # twice is harmless
    handle.append(0, [a], k[:32], k[:32], (0, 32))


def test_a_freed_sequence(c, rng):
    pool, k = new_pool(), rng.standard_normal((1, 2, 64), np.float32)
    sequence = c.Pool(pool).new_sequence()
    sequence.append(0, k, k)
    sequence.free()
    assert pool.num_free_blocks == 60
    for call in (
        lambda: sequence.append(0, k, k),
        lambda: sequence.attend(0, k, k.copy()),
        lambda: sequence.advance(1),
        lambda: sequence.advance_ids(np.arange(1)),
        lambda: sequence.truncate(0),
        lambda: sequence.truncate(0, [0]),
        lambda: sequence.fork(),
        lambda: sequence.snapshot(),
    ):
        with pytest.raises(ValueError, match=f"{INVALID}: this sequence has been freed"):
            call()
    cache = c.Sequence.of(kvfast.KVCache(1, 2, 64))
    with pytest.raises(ValueError, match=r"-1: free_sequence needs a sequence of a pool, got a KVCache: call truncate\(cache, 0\)"):
        cache.free()


def test_null(c):
    codes, text = c.without_a_pool()
    assert codes == [INVALID] * 14 and text == "the pool is NULL"
    handle = c.Pool(new_pool())
    with pytest.raises(ValueError, match="-1: sequence must point to where the new sequence goes, got NULL"):
        handle.new_sequence(nowhere=True)
    assert handle.num_free_blocks == 60
    for wrong in (None, kvfast.KVCache(1, 2, 64), new_pool().new_sequence()):
        with pytest.raises(TypeError, match="pool must be a PagedKVCache or PagedMLAKVCache, got "):
            c.Pool(wrong)


def test_wrong_prefixes(c):
    handle, ids, cache = c.Pool(new_pool()), np.arange(5), c.Sequence.of(kvfast.KVCache(1, 2, 64))
    for call, text in (
        (lambda: handle.match_prefix(ids, nowhere=True), "sequence must point to where the new sequence goes, got NULL"),
        (lambda: handle.match_prefix(None, n=3), "token_ids must point to n of them, got 3 and NULL"),
        (lambda: handle.match_prefix(ids, n=-1), "token_ids must point to n of them, got -1 and an address"),
        (lambda: handle.match_prefix(ids, salt_nbytes=4), "salt must point to salt_nbytes bytes, got 4 and NULL"),
        (lambda: handle.match_prefix(ids, b"x" * 65), "salt must"),
        (lambda: cache.advance_ids(ids), "advance_ids needs a sequence of a pool, got a KVCache: call advance"),
        (lambda: handle.new_sequence().advance_ids(ids), "needs 5 tokens in every layer"),
    ):
        with pytest.raises(ValueError, match=f"{INVALID}: .*{text}"):
            call()
    assert handle.num_free_blocks == 60


def test_numbers_of_64_bits_stay_whole(c):
    handle = c.Sequence.of(kvfast.KVCache(1, 2, 64))
    with pytest.raises(ValueError, match=f"needs {2**32 + 1} tokens in every layer"):
        handle.advance(2**32 + 1)
    with pytest.raises(ValueError, match=f"n must be between 0 and the 0 tokens of the cache, got {2**32}"):
        handle.truncate(2**32)
