"""What `kvfast.h` refuses, what a compiler lets pass too: a code and a text, and nothing is read, written or changed before."""

import functools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from c_api import INT, SIZE, C, batch, made, options, rows

import kvfast

OK, INVALID, SHAPE, NOT_FINITE, FULL, BUSY, NO_MEMORY, NO_LAYER = range(0, -8, -1)
SPANS = {"spans": np.array([[16, 20]]), "num_spans": 1}
FLOATS = np.zeros(99, np.float32)
ODD = FLOATS.view(np.uint8)[1:].ctypes.data  # an address between two floats
ONE = np.zeros((5, 1), np.int64)


def refused(call, told, code, text):
    assert call() == code, told()
    assert re.search(text, told().decode()), told()


def filled(handle, k, v):
    for at in range(0, len(k), 50):
        assert C.append(handle, 0, rows(k[at : at + 50]), rows(v[at : at + 50])) == C.advance(handle, len(k[at : at + 50])) == OK


@pytest.fixture
def given(rng):
    """A cache and a pool of three sequences, a fourth that was freed, and one of another pool: handles, with 20 tokens in each."""
    pool, other = (kvfast.PagedKVCache(1, 2, 64, num_blocks=60, block_size=16, dtype="int8") for _ in range(2))
    cache, pools = kvfast.KVCache(1, 2, 64, 24, dtype="int8"), [C.open_batches(one) for one in (pool, other)]
    handles = [C.open(cache), *(made(C.new_sequence, pools[i])[1] for i in (0, 0, 0, 0, 1))]
    k, v = rng.standard_normal((2, 20, 2, 64), np.float32)
    for handle in handles:
        filled(handle, k, v)
    assert C.free_sequence(handles[4]) == OK
    names = ("cache", "one", "two", "three", "freed", "foreign")
    q = rng.standard_normal((5, 4, 64), np.float32)
    yield SimpleNamespace(python=cache, pool=pools[0], q=q, k=k, v=v, of_pool=pool, **dict(zip(names, handles, strict=True)))
    for handle in handles:
        C.close(handle)
    for handle in pools:
        C.close_batches(handle)


def seen(given):
    """All that a refused call could have changed."""
    handles = (given.cache, given.one, given.two, given.three, given.foreign)
    return [(C.length(one), C.layer_length(one, 0)) for one in handles], C.num_free_blocks(given.pool), given.python.k(0).tobytes()


def told_of(handle):
    return lambda: C.error(handle)


def told_of_pool(pool):
    return lambda: C.pool_error(pool)


def calls(given, way):
    """attend and append of a cache alone, or of a batch of one sequence, and the text of the last error."""
    if way == "alone":
        attend = functools.partial(C.attend, given.cache)
        return attend, functools.partial(C.append, given.cache), told_of(given.cache)

    def of_one(n, fields=()):
        words = {"span": "spans", "parent": "tree_parents"}
        counts = {f"{name}_counts": np.array([fields[f"num_{name}s"]]) for name, word in words.items() if word in fields}
        return batch([given.one], starts=np.array([0, n]), **counts)

    def attend(layer, q, given_options, out, fields=()):
        return C.attend_batch(given.pool, layer, of_one(5, fields), q, given_options, out)

    def append(layer, k, v, n=3):
        return C.append_batch(given.pool, layer, of_one(n), k, v)

    return attend, append, told_of_pool(given.pool)


# What C alone can pass: numbers of which 0 has a meaning of its own, and pointers and counts that do not go together. Python's refusals are those of one plan; see `test_codes`.
OPTIONS = [
    ({"num_sink_tokens": -2}, "num_sink_tokens must be at least 0, got -2"),
    ({"sliding_window": -1}, "sliding_window must be at least 1, got -1"),
    ({"attention_chunk_size": -1}, "attention_chunk_size must be at least 1, got -1"),
    ({"num_threads": -3}, "num_threads must be "),
    ({"precision": 4}, "precision must be 0, KVFAST_EXACT, KVFAST_FAST or KVFAST_INVARIANT, got 4"),
    ({"sinks": ODD}, "sinks must be aligned to its elements of 4 bytes"),
    ({"lse": ODD}, "lse must be aligned to its elements of 4 bytes"),
    ({"index_block": 7}, "index_heads and index_block are for chosen tokens, which are NULL"),
    ({"indices": np.zeros(9, np.int64)}, "indices must point to num_indices aligned positions"),
    ({"num_indices": 2}, "indices must point to num_indices aligned positions"),
    # Heads are counted before they are read.
    ({"indices": ONE, "num_indices": 1, "index_heads": 2**31 - 1}, "index_heads must be 0, 1 or the 2 KV heads .* got 2147483647"),
    ({"num_spans": 2}, "spans must point to num_spans of them, got 2 and NULL"),
    ({"num_spans": -1}, "spans must point to num_spans of them, got -1 and NULL"),
    ({"num_parents": 1}, "tree_parents must point to num_parents of them, got 1 and NULL"),
    # More than there can be are refused before memory is taken for them.
    *[(SPANS | {"num_spans": many}, "spans must point to num_spans of them, got .* and an address") for many in (2**60, 2**63 - 1)],
    (SPANS | {"num_spans": 10**9}, r"spans(\[0\])? must not overlap, got 1000000000 of them in 20 tokens"),
    ({"tree_parents": ONE, "num_parents": 10**9}, r"tree_parents(\[0\])? must have at most 64 drafts, .* got 1000000000"),
    *[({"indices": ONE, "num_indices": many}, "indices must point to num_indices aligned positions") for many in (2**60, 2**63 - 1)],
]


@pytest.mark.parametrize("way", ["alone", "batch"])
@pytest.mark.parametrize(("fields", "text"), OPTIONS)
def test_options(given, fields, text, way):
    before, out, (attend, _, told) = seen(given), np.full_like(given.q, 7), calls(given, way)
    more, code = ({"fields": fields} if way == "batch" else {}), SHAPE if fields.get("index_heads", 0) > 0 else INVALID
    refused(lambda: attend(0, rows(given.q), options(**fields), rows(out), **more), told, code, text)
    assert (out == 7).all() and seen(given) == before


@pytest.mark.parametrize("way", ["alone", "batch"])
def test_codes(given, way):
    """One refusal for each code, and those of rows that C alone can pass."""
    q, k, out, before, (attend, append, told) = given.q, given.k[:3], np.full_like(given.q, 7), seen(given), calls(given, way)
    overlap = r"the rows of out must not overlap each other, got shape \(5, 4, 64\)"  # as of a caller who counts strides in elements
    many, window = rows(np.ones((2000 if way == "batch" else 5, 2, 64), np.float32)), options(attention_chunk_size=8, not_causal=1)
    for call, code, text in [
        (functools.partial(attend, 0, rows(q), window, rows(out)), INVALID, "attention_chunk_size needs causal=True"),
        (functools.partial(attend, 0, rows(q), None, rows(out, num_tokens=2)), SHAPE, "out must have "),
        (functools.partial(attend, 0, rows(q * np.nan), None, rows(out)), NOT_FINITE, "q must be finite"),
        (functools.partial(attend, -(2**31), rows(q), None, rows(out)), NO_LAYER, f"layer must be between 0 and 0, got {-(2**31)}"),
        (functools.partial(attend, 0, None, None, rows(out)), INVALID, "q must not be NULL"),
        (functools.partial(attend, 0, rows(q), None, rows(out, data=None)), INVALID, "out must not be NULL"),
        (functools.partial(attend, 0, rows(q), None, rows(out, token_stride=256)), INVALID, overlap),
        (functools.partial(attend, 0, rows(q), None, rows(out, head_stride=64)), INVALID, overlap),
        (functools.partial(append, 0, None, rows(k)), INVALID, "k must not be NULL"),
        (functools.partial(append, 0, rows(k), None), INVALID, "v must not be NULL"),
        (functools.partial(append, 0, rows(k), rows(k[:2])), SHAPE, "k and v must hold the same number of tokens, got 3 and 2"),
        (functools.partial(append, 0, rows(k, dtype=9), rows(k)), INVALID, "k must be KVFAST_FLOAT32, .* got dtype 9"),
        (functools.partial(append, 0, rows(k, data=ODD), rows(k)), INVALID, "k must be aligned to its elements of 4 bytes"),
        (functools.partial(append, 0, rows(k), rows(k * np.inf)), NOT_FINITE, "v must be finite"),
        (functools.partial(append, 1, rows(k), rows(k)), NO_LAYER, "layer must be between 0 and 0, got 1"),
        (
            functools.partial(append, 0, many, many, **{"n": 2000} if way == "batch" else {}),
            FULL,
            "room for 4 of 24|blocks of 16 tokens",
        ),
    ]:
        refused(call, told, code, text)
    assert (out == 7).all() and seen(given) == before


def test_numbers_of_tokens(given):
    """Numbers of 64 bits stay whole."""
    before, cache = seen(given), given.cache
    for call, code, text in [
        (lambda: C.advance(cache, 2**32 + 1), INVALID, f"needs {2**32 + 21} tokens in every layer"),
        (lambda: C.truncate(cache, 2**32), INVALID, f"n must be between 0 and the 20 tokens of the cache, got {2**32}"),
        (lambda: C.keep_branch(cache, 20, None, 3), INVALID, "keep must point to num_kept numbers, got 3 and NULL"),
        (lambda: C.layer_length(cache, 2), NO_LAYER, "layer must be between 0 and 0, got 2"),
    ]:
        refused(call, told_of(cache), code, text)
    assert seen(given) == before


def batches(given):
    """Batches that no call takes, for 3 rows: (batch, code, text)."""
    one, two, three, null = given.one, given.two, given.three, "sequences.1. must be a sequence of this pool, got NULL"
    each, rises = np.array([0, 1, 2, 3]), "starts must rise from 0 to the 3 tokens of .* in {} entries, got {}"
    yield None, INVALID, "batch must point to sequences, got NULL"
    yield batch([]), INVALID, "num_sequences must be at least 1, got 0"
    yield batch([one], num_sequences=-1), INVALID, "num_sequences must be at least 1, got -1"
    yield batch([one, None, two], starts=each), INVALID, null
    yield (
        batch([one, two, given.freed], starts=each),
        INVALID,
        "sequences.2. must be a sequence that is in use, got one that has been freed",
    )
    yield (
        batch([given.foreign], starts=each[::3]),
        INVALID,
        "sequences.0. must be a sequence of this pool, got a Sequence that has other",
    )
    yield batch([one, given.cache], starts=each[[0, 1, 3]]), INVALID, "sequences.1. .* got a KVCache that has other blocks"
    yield batch([one, two]), SHAPE, rises.format(3, "NULL, which is for one token of each sequence")
    for starts in ([1, 2, 3], [0, 1, 2], [0, 4, 3], [0, 4, -1], [0, 0, -1], [0, 2**32, 3], [0, 1, 2**32 + 3]):
        yield batch([one, three], starts=np.array(starts)), SHAPE, rises.format(3, re.escape(str(starts)))


def test_batches(given):
    q, k, v, out, before = given.q[:3], given.k[:3], given.v[:3], np.full_like(given.q[:3], 7), seen(given)
    pool, told = given.pool, told_of_pool(given.pool)
    for work, code, text in batches(given):
        refused(lambda work=work: C.append_batch(pool, 0, work, rows(k), rows(v)), told, code, text)
        refused(lambda work=work: C.attend_batch(pool, 0, work, rows(q), None, rows(out)), told, code, text)
        if not text.startswith("starts"):  # of an advance, these tell how many tokens there are
            refused(lambda work=work: C.advance_batch(pool, work, None), told, code, text)
    twice = batch([given.one, given.one], starts=np.array([0, 1, 3]))
    for call in (lambda: C.append_batch(pool, 0, twice, rows(k), rows(v)), lambda: C.advance_batch(pool, twice, None)):
        refused(call, told, INVALID, "sequences.1. must be another than sequences.0.")
    assert (out == 7).all() and seen(given) == before
    for name, one in (("span", SPANS), ("parent", {"tree_parents": np.array([-1]), "num_parents": 1})):
        for counts, fields in (([1, 1, 0], {}), ([2**63 - 1, 2**63 - 1, 3], one), ([-1, 1, 1], one)):
            work = batch([given.one, given.two, given.three], **{f"{name}_counts": np.array(counts)})
            text = f"{name}_counts must have a number for each of the 3 sequences"
            refused(lambda: C.attend_batch(pool, 0, work, rows(q), options(**fields), rows(out)), told, INVALID, text)  # noqa: B023
    none = batch([given.one, given.two, given.three], span_counts=np.zeros(3, int))
    assert C.attend_batch(pool, 0, none, rows(q), options(), rows(out)) == OK and not (out == 7).any()
    # A sequence may come twice, as none is changed.
    assert C.attend_batch(pool, 0, batch([given.one, given.two, given.one]), rows(q), None, rows(out)) == OK


def test_a_freed_sequence(given):
    freed, k, ids = given.freed, given.k, np.arange(1)
    assert C.free_sequence(freed) == OK  # twice is harmless
    for call in (
        lambda: C.length(freed),
        lambda: C.layer_length(freed, 0),
        lambda: C.append(freed, 0, rows(k), rows(k)),
        lambda: C.attend(freed, 0, rows(given.q), None, rows(given.q.copy())),
        lambda: C.advance(freed, 1),
        lambda: C.advance_ids(freed, ids.ctypes.data, 1),
        lambda: C.truncate(freed, 0),
        lambda: C.keep_branch(freed, 0, ids.ctypes.data, 1),
        lambda: made(C.fork, freed)[0],
        lambda: made(C.snapshot, freed)[0],
    ):
        refused(call, told_of(freed), INVALID, "this sequence has been freed")
    text = r"free_sequence needs a sequence of a pool, got a KVCache: call truncate\(cache, 0\)"
    refused(lambda: C.free_sequence(given.cache), told_of(given.cache), INVALID, text)


def test_null(given):
    calls_of = [C.append, C.attend, C.advance, C.length, C.layer_length, C.truncate, C.keep_branch, C.restore, C.save, C.load]
    calls_of += [C.free_sequence, C.advance_ids, C.num_free_blocks, C.append_batch, C.attend_batch, C.advance_batch]
    for function in calls_of:
        assert function(None, *(0 if kind in (INT, SIZE) else None for kind in function.argtypes[1:])) == INVALID
    assert C.error(None) == b"the cache is NULL" and C.pool_error(None) == b"the pool is NULL"
    # What a refused call would have made is NULL.
    for function in (C.new_sequence, C.fork, C.snapshot):
        assert made(function, None) == (INVALID, None)
    assert made(C.match_prefix, None, None, 0, None, 0) == (INVALID, None)
    refused(lambda: C.new_sequence(given.pool, None), told_of_pool(given.pool), INVALID, "sequence must point to where the new")
    for close in (C.close, C.close_batches, C.close_snapshot):
        close(None)
    for wrong in (None, given.python, given.of_pool.new_sequence()):
        with pytest.raises(TypeError, match="pool must be a PagedKVCache or PagedMLAKVCache, got "):
            C.open_batches(wrong)


def test_prefixes(given):
    ids, before = np.arange(65), seen(given)
    address = ids.ctypes.data
    for arguments, text in (
        ((None, 3, None, 0), "token_ids must point to n of them, got 3 and NULL"),
        ((address, -1, None, 0), "token_ids must point to n of them, got -1 and an address"),
        ((address, 5, None, 4), "salt must point to salt_nbytes bytes, got 4 and NULL"),
        ((address, 5, address, 65), "salt must"),
    ):
        refused(lambda given_=arguments: made(C.match_prefix, given.pool, *given_)[0], told_of_pool(given.pool), INVALID, text)
    text = "sequence must point to where the new sequence goes, got NULL"
    refused(lambda: C.match_prefix(given.pool, address, 5, None, 0, None), told_of_pool(given.pool), INVALID, text)
    text = "advance_ids needs a sequence of a pool, got a KVCache: call advance"
    refused(lambda: C.advance_ids(given.cache, address, 5), told_of(given.cache), INVALID, text)
    refused(lambda: C.advance_ids(given.one, address, 5), told_of(given.one), INVALID, "needs 25 tokens in every layer")
    assert seen(given) == before


def test_sums_over_queries_or_outputs(given):
    expected = given.python.attend(0, given.q)
    memory = np.zeros(expected.size + 20, np.float32)
    out, q = memory[: expected.size].reshape(expected.shape), given.q.copy()
    for name, place in (("out", out), ("q", q)):
        for lse in (place.ctypes.data, place.ctypes.data + place.nbytes - 4, place.ctypes.data - 20 * 4 + 4):
            text = f"lse must not share memory with {name}: it takes 5 x 4 floats of its own"
            refused(lambda at=lse: C.attend(given.cache, 0, rows(q), options(lse=at), rows(out)), told_of(given.cache), INVALID, text)
    assert C.attend(given.cache, 0, rows(q), options(lse=memory[expected.size :].ctypes.data), rows(out)) == OK
    assert np.array_equal(out, expected) and np.array_equal(given.q, q) and memory[expected.size :].all()


@pytest.mark.parametrize("tokens", [250, 300, 500, 1000])
def test_sequences_with_a_window_have_short_tables(rng, tokens):
    """What they share is not looked for where their tables end; ci/sanitize.sh sees a read that is too far."""
    pool = C.open_batches(kvfast.PagedKVCache(1, 2, 64, num_blocks=64, dtype="int8", sliding_window=64))
    first = made(C.new_sequence, pool)[1]
    filled(first, *rng.standard_normal((2, tokens, 2, 64), np.float32))
    sequences, q = [first, made(C.fork, first)[1]], rng.standard_normal((2, 4, 64), np.float32)
    out, alone = np.empty_like(q), np.empty_like(q[:1])
    assert C.attend_batch(pool, 0, batch(sequences), rows(q), None, rows(out)) == OK
    for i, handle in enumerate(sequences):
        assert C.attend(handle, 0, rows(q[i : i + 1]), None, rows(alone)) == OK
        assert np.array_equal(alone[0], out[i])
        C.close(handle)
    C.close_batches(pool)


def test_memory_beyond_the_last_address():
    from kvfast.caches.foreign_memory import pool_over

    shape = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 64, "num_blocks": 4, "dtype": "int8"}
    for address, stride in ((64, 2**62), (2**64 - 64, 0)):
        text = r"layers\[0\] must have 4 blocks within the addresses of a process, got 0x.* and block_stride"
        with pytest.raises(ValueError, match=text):
            pool_over([address], stride, None, **shape)
