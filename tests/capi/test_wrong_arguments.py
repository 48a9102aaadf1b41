"""What a compiler lets pass and `kvfast.h` refuses: with and without the interpreter alike, and nothing is read or written before."""

import numpy as np
import pytest
from c_api import C, batch, made, options, rows

import kvfast

OK, INVALID, SHAPE = 0, -1, -2


@pytest.fixture
def cache(rng):
    """(its handle, five queries, the outputs that Python gives them)."""
    k, v = rng.standard_normal((2, 20, 2, 64), np.float32)
    q = rng.standard_normal((5, 4, 64), np.float32)
    of_python = kvfast.KVCache(1, 2, 64, dtype="int8")
    handle = C.open(of_python)
    assert C.append(handle, 0, rows(k), rows(v)) == C.advance(handle, 20) == OK
    yield handle, q, of_python.attend(0, q)
    C.close(handle)


def new_pool(rng, num_sequences, tokens, **settings):
    """(the pool, its handle, those of sequences with the same tokens)."""
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=64, dtype="int8", **settings)
    handle = C.open_batches(pool)
    k, v = rng.standard_normal((2, tokens, 2, 64), np.float32)
    code, first = made(C.new_sequence, handle)
    assert code == OK
    for at in range(0, tokens, 50):
        assert C.append(first, 0, rows(k[at : at + 50]), rows(v[at : at + 50])) == C.advance(first, len(k[at : at + 50])) == OK
    return pool, handle, [first, *(made(C.fork, first)[1] for _ in range(num_sequences - 1))]


SPANS = {"spans": np.array([[16, 20]]), "num_spans": 1}


@pytest.mark.parametrize("more", [{}, SPANS], ids=["plain", "spans"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_sink_tokens": -2}, "num_sink_tokens must be at least 0, got -2"),
        ({"num_splits": 2**31 - 1}, "num_splits must be between 0 and"),
        ({"chosen_run": 7}, "chosen_heads and chosen_run are for chosen tokens, which are NULL"),
        ({"chosen_heads": -3}, "chosen_heads and chosen_run are for chosen tokens, which are NULL"),
        ({"chosen": np.zeros(9, np.int64)}, "chosen must point to num_chosen aligned positions"),
        ({"sinks": np.zeros(9, np.float32).view(np.uint8)[1:].ctypes.data}, "sinks must be aligned to its elements of 4 bytes"),
        ({"lse": np.zeros(99, np.float32).view(np.uint8)[1:].ctypes.data}, "lse must be aligned to its elements of 4 bytes"),
    ],
)
def test_options(cache, given, message, more):
    handle, q, _ = cache
    out = np.full_like(q, 7)
    assert C.attend(handle, 0, rows(q), options(**given, **more), rows(out)) == INVALID
    assert message in C.error(handle).decode()
    assert (out == 7).all()


def test_heads_of_chosen_tokens_are_counted_before_they_are_read(cache):
    handle, q, _ = cache
    few = options(chosen=np.zeros(5, np.int64), num_chosen=1, chosen_heads=2**31 - 1)
    assert C.attend(handle, 0, rows(q), few, rows(q.copy())) == SHAPE
    assert "chosen_heads must be 0, 1 or the 2 KV heads of the cache, got 2147483647" in C.error(handle).decode()


@pytest.mark.parametrize("more", [{}, SPANS], ids=["plain", "spans"])
@pytest.mark.parametrize("strides", [{"token_stride": 256}, {"head_stride": 64}], ids=str)
def test_rows_of_outputs_that_overlap(cache, strides, more):
    """As of a caller who counts strides in elements."""
    handle, q, _ = cache
    out = np.full_like(q, 7)
    assert C.attend(handle, 0, rows(q), options(**more), rows(out, **strides)) == INVALID
    assert "the rows of out must not overlap each other, got shape (5, 4, 64)" in C.error(handle).decode()
    assert (out == 7).all()


def test_sums_over_queries_or_outputs(cache):
    handle, q, expected = cache
    memory = np.zeros(expected.size + 20, np.float32)
    out, given = memory[: expected.size].reshape(expected.shape), q.copy()
    for name, place in (("out", out), ("q", given)):
        for lse in (place.ctypes.data, place.ctypes.data + place.nbytes - 4, place.ctypes.data - 20 * 4 + 4):
            assert C.attend(handle, 0, rows(given), options(lse=lse), rows(out)) == INVALID
            assert f"lse must not share memory with {name}: it takes 5 x 4 floats of its own" in C.error(handle).decode()
    assert C.attend(handle, 0, rows(given), options(lse=memory[expected.size :].ctypes.data), rows(out)) == OK
    assert np.array_equal(out, expected) and np.array_equal(given, q) and memory[expected.size :].all()


def test_sequences_that_were_freed(rng):
    _, pool, (one, other) = new_pool(rng, 2, 20)
    assert C.free_sequence(one) == OK
    assert C.free_sequence(one) == OK  # twice is harmless
    for call in (C.length, lambda handle: C.layer_length(handle, 0)):
        assert call(one) == INVALID and b"this sequence has been freed: its handle can only be closed" in C.error(one)
    assert C.length(other) == C.layer_length(other, 0) == 20
    for handle in (one, other):
        C.close(handle)
    C.close_batches(pool)


def test_what_a_refused_call_would_have_made_is_null():
    for function in (C.new_sequence, C.fork, C.snapshot):
        assert made(function, None) == (INVALID, None)
    assert made(C.match_prefix, None, None, 0, None, 0) == (INVALID, None)


def test_counts_of_spans_and_parents(rng):
    _, pool, sequences = new_pool(rng, 3, 20)
    q = rng.standard_normal((3, 4, 64), np.float32)
    for name, one in (("span", SPANS), ("parent", {"parents": np.array([-1]), "num_parents": 1})):
        for counts, given in (([1, 1, 0], {}), ([2**63 - 1, 2**63 - 1, 3], one), ([-1, 1, 1], one)):
            work = batch(sequences, **{f"{name}_counts": np.array(counts)})
            assert C.attend_batch(pool, 0, work, rows(q), options(**given), rows(q.copy())) == INVALID
            assert f"{name}_counts must have a number for each of the 3 sequences" in C.pool_error(pool).decode()
    assert C.attend_batch(pool, 0, batch(sequences, span_counts=np.zeros(3, int)), rows(q), options(), rows(q.copy())) == OK
    for handle in sequences:
        C.close(handle)
    C.close_batches(pool)


@pytest.mark.parametrize("tokens", [250, 300, 500, 1000])
def test_sequences_with_a_window_have_short_tables(rng, tokens):
    """What they share is not looked for where their tables end; ci/sanitize.sh sees a read that is too far."""
    _, pool, sequences = new_pool(rng, 2, tokens, sliding_window=64)
    q = rng.standard_normal((2, 4, 64), np.float32)
    out = np.empty_like(q)
    assert C.attend_batch(pool, 0, batch(sequences), rows(q), None, rows(out)) == OK
    alone = np.empty_like(q[:1])
    for i, handle in enumerate(sequences):
        assert C.attend(handle, 0, rows(q[i : i + 1]), None, rows(alone)) == OK
        assert np.array_equal(alone[0], out[i])
        C.close(handle)
    C.close_batches(pool)


def test_memory_beyond_the_last_address():
    from kvfast.caches.foreign_memory import pool_over

    shape = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 64, "num_blocks": 4, "dtype": "int8"}
    for address, stride in ((64, 2**62), (2**64 - 64, 0)):
        with pytest.raises(
            ValueError, match=r"layers\[0\] must have 4 blocks within the addresses of a process, got 0x.* and block_stride"
        ):
            pool_over([address], stride, None, **shape)
