"""Batches that are prepared once for all layers: the bits of the arrays they were made from, and nothing that is stale."""

import copy
import pickle

import numpy as np
import pytest
from cache_kinds import filled

import kvfast
from kvfast.storage.batches.prepared_batch import PreparedBatch

LAYERS, HEADS, DIM, SIZE = 2, 2, 32, 32


def new_pool(num_blocks=40, **options):
    return kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks, SIZE, **{"dtype": "int8-rotated"} | options)


def step(rng, num_blocks, queries=(1, 1, 3, 1), lengths=(300, 290, 310, 0), shared=9):
    """Tables of sequences whose first blocks are the same, and which have `queries` as their last tokens."""
    lengths = np.maximum(lengths, queries).astype(np.int32)
    free = iter(rng.permutation(num_blocks).tolist())
    prefix = [next(free) for _ in range(shared)]
    table = np.full((len(lengths), max(12, shared + 6)), -7, np.int32)
    for row, n in zip(table, lengths):
        count = -(-int(n) // SIZE)
        own = [next(free) for _ in range(max(0, count - shared))]
        row[:count] = (prefix + own)[:count] if n > shared * SIZE else [next(free) for _ in range(count)]
    starts = np.cumsum([0, *queries]).astype(np.int32)
    positions = [np.arange(n - m, n) for n, m in zip(lengths, queries)]
    slots = np.concatenate([row[p // SIZE] * SIZE + p % SIZE for row, p in zip(table, positions)]).astype(np.int64)
    return {"block_table": table, "seq_lens": lengths, "cu_seqlens_q": starts}, slots


def fill(pool, rng, every=True):
    """Write to all slots of a pool, as its own scheduler."""
    slots = np.arange(pool.num_blocks * SIZE)
    for layer in range(LAYERS if every else 1):
        pool.append_batch(layer, *rng.standard_normal((2, len(slots), HEADS, DIM), np.float32), slots)
    return pool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8-rotated", "int3-plain", "k8v4-rotated"])
@pytest.mark.parametrize("cascade", [True, False])
def test_the_bits_of_the_arrays(isa, rng, dtype, cascade):
    one, other = (fill(new_pool(dtype=dtype), np.random.default_rng(1)) for _ in "ab")
    for queries in ((1, 1, 3, 1), (1, 1, 1, 1), (40, 0, 1, 20)):
        tables, slots = step(rng, 40, queries)
        batch = one.prepare_batch(**tables, slot_mapping=slots)
        assert (batch.num_sequences, batch.num_tokens) == (4, sum(queries))
        for layer in range(LAYERS):
            k, v, q = rng.standard_normal((3, sum(queries), HEADS, DIM), np.float32)
            one.append_batch(layer, k, v, batch)
            other.append_batch(layer, k, v, slots)
            for options in ({}, {"causal": False}, {"sliding_window": 50}, {"attention_chunk_size": 64}, {"num_splits": 3}):
                options = options | {"cascade": cascade}
                assert np.array_equal(one.attend_batch(layer, q, batch, **options), other.attend_batch(layer, q, **tables, **options))
            assert one.explain_batch(layer, q.shape, batch) == other.explain_batch(layer, q.shape, **tables)


def test_shared_blocks_are_read_once(rng):
    pool = fill(new_pool(60), rng)
    tables, _ = step(rng, 60, lengths=(1100, 1090, 1200, 0), shared=33)
    batch = pool.prepare_batch(**tables)
    together, apart = (
        pool.explain_batch(0, batch.num_tokens, batch, num_q_heads=HEADS, cascade=each).code_bytes for each in (True, False)
    )
    assert together < 0.7 * apart


def test_latent_rows(rng):
    pool = kvfast.PagedMLAKVCache(1, 64, 16, 40, 32)
    tables, slots = step(rng, 40)
    pool.append_batch(0, rng.standard_normal((40 * 32, 80), np.float32), np.arange(40 * 32))
    batch = pool.prepare_batch(**tables, slot_mapping=slots)
    pool.append_batch(0, rng.standard_normal((6, 80), np.float32), batch)
    q = rng.standard_normal((6, 4, 80), np.float32)
    assert np.array_equal(pool.attend_batch(0, q, batch), pool.attend_batch(0, q, **tables))


def test_a_fused_projection(rng):
    one, other = new_pool(), new_pool()
    qkv = rng.standard_normal((5, 4 * HEADS * DIM), np.float32)
    batch = one.prepare_batch([[3]], [5], [0, 5], slot_mapping=3 * SIZE + np.arange(5))
    assert np.array_equal(one.write_batch(0, qkv, batch), other.write_batch(0, qkv, 3 * SIZE + np.arange(5)))
    q = rng.standard_normal((5, HEADS, DIM), np.float32)
    assert np.array_equal(one.attend_batch(0, q, batch), other.attend_batch(0, q, block_table=[[3]], seq_lens=[5], cu_seqlens_q=[0, 5]))


def test_it_holds_copies(rng):
    pool = fill(new_pool(), rng)
    tables, slots = step(rng, 40)
    q = rng.standard_normal((6, HEADS, DIM), np.float32)
    batch, before = pool.prepare_batch(**tables, slot_mapping=slots), pool.attend_batch(0, q, **tables)
    for array in (*tables.values(), slots):
        array[...] = 10**6
    assert np.array_equal(pool.attend_batch(0, q, batch), before)
    pool.append_batch(0, q, q, batch)


def test_a_pool_with_a_window(rng):
    """Blocks that the pool's window has left need not be there; a call may have a smaller window."""
    pool = fill(new_pool(sliding_window=64, num_sink_tokens=4), rng)
    table = np.array([[5, -1, 10**6, -1, 7, 8, 9, 2]], np.int32)
    batch = pool.prepare_batch(table, [240], [0, 2])
    q = rng.standard_normal((2, HEADS, DIM), np.float32)
    for options in ({}, {"sliding_window": 20}, {"num_sink_tokens": 0}):
        expected = pool.attend_batch(0, q, block_table=table, seq_lens=[240], cu_seqlens_q=[0, 2], **options)
        assert np.array_equal(pool.attend_batch(0, q, batch, **options), expected)
    with pytest.raises(ValueError, match="blocks between 0 and 39"):
        pool.prepare_batch(np.where(table == 8, 40, table), [240], [0, 2])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"block_table": [[0, 40], [1, 2]]}, ValueError, "blocks between 0 and 39 for the tokens of seq_lens, got 0 to 40"),
        ({"block_table": [[0, -1], [1, 2]]}, ValueError, "blocks between 0 and 39 for the tokens of seq_lens, got -1 to 2"),
        ({"block_table": [[0, 3]]}, kvfast.DimensionMismatchError, r"shape \(2, max_blocks\), one row per sequence, got \(1, 2\)"),
        ({"block_table": [0, 3]}, kvfast.DimensionMismatchError, "integers with 2 dimensions"),
        ({"block_table": [[0.5, 3], [1, 2]]}, kvfast.DimensionMismatchError, "integers with 2 dimensions"),
        ({"block_table": np.zeros((2, 0), int)}, kvfast.DimensionMismatchError, "max_blocks"),
        ({"seq_lens": [40, 65]}, ValueError, "between 0 and the 64 tokens of block_table's 2 blocks, got 40 to 65"),
        ({"seq_lens": [-1, 50]}, ValueError, "got -1 to 50"),
        ({"seq_lens": []}, ValueError, "at least one sequence"),
        ({"seq_lens": [40, 1]}, ValueError, "sequence 1 of the batch holds 1 tokens, and q 2 of them"),
        ({"cu_seqlens_q": [0, 2, 1]}, kvfast.DimensionMismatchError, r"cu_seqlens_q must rise from 0 in 3 entries, got \[0 2 1\]"),
        ({"cu_seqlens_q": [0, 1]}, kvfast.DimensionMismatchError, "in 3 entries"),
        ({"cu_seqlens_q": [1, 2, 3]}, kvfast.DimensionMismatchError, "rise from 0"),
        ({"slot_mapping": [0, -2, 5]}, ValueError, r"slot_mapping\[1\] must be -1 or between 0 and 1279, got -2"),
        ({"slot_mapping": [0, 1, 1280]}, ValueError, r"slot_mapping\[2\] must be -1 or between 0 and 1279, got 1280"),
        ({"slot_mapping": [7, 1, 7]}, ValueError, "a slot twice"),
        ({"slot_mapping": [[1]]}, kvfast.DimensionMismatchError, "slot_mapping must be integers with 1 dimension"),
    ],
)
def test_what_is_refused(rng, change, error, text):
    pool = fill(new_pool(), rng)
    with pytest.raises(error, match=text):
        pool.prepare_batch(
            **{"block_table": [[0, 3], [1, 2]], "seq_lens": [40, 50], "cu_seqlens_q": [0, 1, 3], "slot_mapping": [-1, -1, 60]} | change
        )


def test_what_the_calls_refuse(rng):
    pool = fill(new_pool(), rng)
    batch = pool.prepare_batch([[0, 3], [1, 2]], [40, 50], slot_mapping=[100, 49])
    q = rng.standard_normal((2, HEADS, DIM), np.float32)
    before = pool.attend_batch(0, q, batch)
    with pytest.raises(kvfast.DimensionMismatchError, match="q must have the 2 tokens of the batch, got 1"):
        pool.attend_batch(0, q[:1], batch)
    with pytest.raises(kvfast.DimensionMismatchError, match=r"slot_mapping must have shape \(1,\)"):
        pool.append_batch(0, q[:1], q[:1], batch)
    with pytest.raises(kvfast.NonFiniteInputError):
        pool.append_batch(0, q, q * np.nan, batch)
    with pytest.raises(ValueError, match="a PreparedBatch has its own"):
        pool.attend_batch(0, q, batch, cu_seqlens_q=[0, 1, 2])
    with pytest.raises(ValueError, match="prepared without slot_mapping"):
        pool.append_batch(0, q, q, pool.prepare_batch([[0, 3], [1, 2]], [40, 50]))
    with pytest.raises(TypeError, match="prepare_batch"):
        PreparedBatch()
    assert np.array_equal(pool.attend_batch(0, q, batch), before)


def test_a_stale_batch_reads_nothing_that_is_gone(rng):
    pool, other = (fill(new_pool(), np.random.default_rng(1)) for _ in "ab")
    q = rng.standard_normal((2, HEADS, DIM), np.float32)
    batch = pool.prepare_batch([[0, 3], [1, 2]], [40, 50], slot_mapping=[100, 49])
    for use in (lambda: other.attend_batch(0, q, batch), lambda: other.append_batch(0, q, q, batch)):
        with pytest.raises(ValueError, match="prepared by another pool"):
            use()
    pool.clear()
    with pytest.raises(ValueError, match="belongs to no sequence"):
        pool.attend_batch(0, q, batch)
    sequence = pool.new_sequence()
    with pytest.raises(ValueError, match="a slot that no sequence has"):
        pool.append_batch(0, q, q, batch)
    k = rng.standard_normal((120, HEADS, DIM), np.float32)
    filled(sequence, k, k)
    kept = sequence.k(0)
    with pytest.raises(ValueError, match="did not give out for writing|next to be written|a slot that no sequence has"):
        pool.append_batch(0, q, q, batch)
    assert np.array_equal(sequence.k(0), kept)
    table = pool.block_table([sequence])
    batch = pool.prepare_batch(table, [120])
    assert np.array_equal(pool.attend_batch(0, q[:1], batch), pool.attend_batch(0, q[:1], [sequence]))
    sequence.free()
    with pytest.raises(ValueError, match="belongs to no sequence"):
        pool.attend_batch(0, q[:1], batch)


def test_the_first_slots_of_a_pool(rng):
    """A batch can be prepared before anything was written."""
    pool = new_pool()
    k = rng.standard_normal((3, HEADS, DIM), np.float32)
    batch = pool.prepare_batch([[7]], [3], [0, 3], slot_mapping=7 * SIZE + np.arange(3))
    with pytest.raises(ValueError, match="belongs to no sequence"):
        pool.attend_batch(0, k, batch)
    pool.append_batch(0, k, k, batch)
    pool.attend_batch(0, k, batch)
    with pytest.raises(ValueError, match="another scheduler gives out the blocks"):
        pool.new_sequence()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8-rotated", kvfast.KVFormat("int4", rotation="kv")])
def test_rows_that_are_not_finite_are_zeros(isa, rng, dtype):
    """If asked for; other rows have the bits they have without them. In float16, 70,000 is too large as well."""
    one, other = (kvfast.PagedKVCache(1, HEADS, DIM, 4, 64, dtype) for _ in "ab")
    k, v = rng.standard_normal((2, 40, HEADS, DIM), np.float32)
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[3, 1, 5], bad_k[7, 0, 0], bad_v[9, 1] = np.nan, -np.inf, np.nan
    k[3, 1], k[7, 0], v[9, 1] = 0, 0, 0
    if dtype == "float16":
        bad_v[11, 0, 1], v[11, 0] = 70000, 0
    with pytest.raises(kvfast.NonFiniteInputError):
        one.append_batch(0, bad_k, bad_v, np.arange(40))
    one.append_batch(0, bad_k, bad_v, np.arange(40), zero_nonfinite=True)
    other.append_batch(0, k, v, np.arange(40), zero_nonfinite=True)
    q = rng.standard_normal((40, HEADS, DIM), np.float32)
    tables = {"block_table": [[0]], "seq_lens": [40], "cu_seqlens_q": [0, 40]}
    assert np.array_equal(one.attend_batch(0, q, **tables), other.attend_batch(0, q, **tables))
    sequence = kvfast.PagedKVCache(1, HEADS, DIM, 4, 64, dtype).new_sequence()
    sequence.pool.append_batch(0, bad_k, bad_v, sequence.pool.slot_mapping([sequence], 40), zero_nonfinite=True)
    assert np.array_equal(sequence.attend(0, q), other.attend_batch(0, q, **tables))


def test_a_batch_is_copied_as_itself():
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=4, dtype="int8-rotated")
    batch = pool.prepare_batch(np.zeros((1, 1), np.int32), [3], [0, 3], np.arange(3))
    assert copy.copy(batch) is copy.deepcopy(batch) is batch and copy.copy(batch.only(0)).num_tokens == 3
    with pytest.raises(TypeError, match="a PreparedBatch cannot be pickled"):
        pickle.dumps(batch)
