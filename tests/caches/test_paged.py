"""PagedKVCache: sequences, batches, forks, shared prefixes, other people's tables."""

import gc
import re

import numpy as np
import pytest
from attention_rows import DIM, HEADS, queries, tokens
from cache_kinds import CENTRED, DTYPES, fill, filled, seals
from reference import attention, bound, relative_error, ways_agree

import kvfast


def new_pool(num_blocks=32, layers=1, **options):
    """By default of int8, whose blocks are all that is stored, with blocks of 32 tokens unless the format has a size of its own."""
    if "k_dtype" not in options:
        options = {"dtype": "int8-rotated"} | options
    if not kvfast.KVFormat.of(options.get("dtype", "int8-rotated")).seals:
        options = {"block_size": 32} | options
    return kvfast.PagedKVCache(layers, HEADS, DIM, num_blocks, **options)


@pytest.mark.parametrize(
    ("dtype", "block_size"), [(dtype, size) for dtype in DTYPES for size in ([None] if seals(dtype) else [16, 32, 64, 128])]
)
def test_ragged_batches_have_the_bits_of_contiguous_caches(isa, rng, dtype, block_size):
    pool = new_pool(2048 // (block_size or 32), block_size=block_size, dtype=dtype)
    lengths, counts = [1, 17, 200, 64, 333], [1, 5, 1, 64, 1]
    sequences = [pool.new_sequence() for _ in lengths]
    caches = [kvfast.KVCache(1, HEADS, DIM, dtype=dtype) for _ in lengths]
    for sequence, cache, n in zip(sequences, caches, lengths):
        k, v = tokens(rng, n)
        for one in (sequence, cache):
            filled(one, k, v)
    k, v = tokens(rng, sum(counts))
    q = queries(rng, sum(counts))
    slots = pool.slot_mapping(sequences, counts)
    pool.append_batch(0, k, v, slots)
    bounds = np.r_[0, np.cumsum(counts)]
    out, lse = pool.attend_batch(0, q, sequences, cu_seqlens_q=bounds, return_lse=True)
    table = pool.block_table(sequences)
    plain = {"block_table": table, "seq_lens": pool.seq_lens(sequences) + counts, "cu_seqlens_q": bounds.astype(np.int32)}
    if seals(dtype):
        with pytest.raises(ValueError, match="this pool needs sequences"):
            pool.attend_batch(0, q, **plain)
    else:
        assert np.array_equal(pool.attend_batch(0, q, **plain), out)
    for i, cache in enumerate(caches):
        part = slice(bounds[i], bounds[i + 1])
        cache.append(0, k[part], v[part])
        alone, alone_lse = cache.attend(0, q[part], return_lse=True)
        assert np.array_equal(out[part], alone) and np.array_equal(lse[part], alone_lse)
        sequences[i].advance(counts[i]), cache.advance(counts[i])
        assert np.array_equal(sequences[i].k(0), cache.k(0)) and np.array_equal(sequences[i].v(0), cache.v(0))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_float_tokens_are_those_of_the_sequence(isa, rng, block_size, secure):
    """Each sequence holds a constant of its own, which no other's rows give."""
    form = kvfast.KVFormat("int8", num_first_float_tokens=4)
    pool = new_pool(64, block_size=block_size, dtype=form, secure=secure)
    q = queries(rng, 1)
    sequences = {}
    for constant in [100, *range(1000, 1006)]:
        sequences[constant] = sequence = pool.new_sequence()
        k = tokens(rng, 2 * block_size + 3)[0]
        filled(sequence, k, np.full_like(k, constant))
    for constant, sequence in sequences.items():
        assert np.allclose(sequence.attend(0, q), constant, rtol=1e-3)
        fork = sequence.fork()
        fork.truncate(3)
        assert np.allclose(fork.attend(0, q), constant, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_prefixes_are_read_once(isa, rng, dtype):
    """Two levels of sharing: a system prompt, and a question that some have in common."""
    pool = new_pool(256, dtype=dtype)
    system = fill(pool.new_sequence(), rng, 1100)
    question = fill(system.fork(), rng, 1000)
    sequences = [system.fork() for _ in range(3)] + [question.fork() for _ in range(4)] + [fill(pool.new_sequence(), rng, 90)]
    counts = [1, 2, 1, 1, 1, 3, 1, 1]
    slots = pool.slot_mapping(sequences, counts)
    pool.append_batch(0, *tokens(rng, sum(counts)), slots)
    q, bounds = queries(rng, sum(counts)), np.r_[0, np.cumsum(counts)]
    shared, shared_lse = pool.attend_batch(0, q, sequences, cu_seqlens_q=bounds, return_lse=True)
    apart, apart_lse = pool.attend_batch(0, q, sequences, cu_seqlens_q=bounds, cascade=False, return_lse=True)
    once, each = (pool.explain_batch(0, q, sequences, cu_seqlens_q=bounds, cascade=cascade) for cascade in (True, False))
    assert once.bytes_read < each.bytes_read
    assert ways_agree(shared, apart, dtype) and ways_agree(shared_lse, apart_lse, dtype)
    for i, sequence in enumerate(sequences):
        part = slice(bounds[i], bounds[i + 1])
        assert np.array_equal(sequence.attend(0, q[part]), apart[part])
        expected, _ = attention(q[part], sequence.k(0), sequence.v(0))
        assert relative_error(shared[part], expected) < bound(dtype)
    for num_threads in (1, 2):
        again = pool.attend_batch(0, q, sequences, cu_seqlens_q=bounds, num_threads=num_threads)
        assert np.array_equal(again, shared)


@pytest.mark.parametrize("dtype", ["int8-rotated", CENTRED])
def test_forks_copy_a_block_when_they_write_to_it(rng, dtype):
    pool = new_pool(dtype=dtype)
    parent = fill(pool.new_sequence(), rng, 70)  # 3 blocks, the last with 6 tokens
    child = parent.fork()
    assert pool.num_blocks - pool.num_free_blocks == 3
    before = parent.k(0)
    k, v = tokens(rng, 1)
    child.append(0, k, v)
    assert pool.num_blocks - pool.num_free_blocks == 4
    assert parent.block_indices()[:2].tolist() == child.block_indices()[:2].tolist()
    assert parent.block_indices()[2] != child.block_indices()[2]
    assert np.array_equal(parent.k(0), before) and np.array_equal(child.k(0)[:70], before)
    parent.append(0, k, v)  # the last owner writes in place
    assert pool.num_blocks - pool.num_free_blocks == 4
    child.truncate(64)
    child.append(0, k, v)
    parent.free()
    assert np.array_equal(child.k(0)[:64], before[:64])
    child.free()
    assert pool.num_free_blocks == pool.num_blocks


def test_forks_of_long_sequences_take_no_memory(rng):
    pool = new_pool(4, block_size=256)
    parent = fill(pool.new_sequence(), rng, 1000)
    forks = [parent.fork() for _ in range(50)]
    assert pool.num_free_blocks == 0 and parent.nbytes == forks[7].nbytes
    assert not parent.can_append(1)  # its last block is shared, and there is no other


class TestPrefixes:
    @pytest.mark.parametrize("dtype", ["int8-rotated", "k8v4-rotated", CENTRED])
    def test_found_with_their_keys(self, rng, dtype):
        pool = new_pool(16, dtype=dtype)
        ids = rng.integers(0, 1000, 100)
        first = fill(pool.new_sequence(), rng, 100, token_ids=ids)
        if seals(dtype):
            first.append(0, *tokens(rng, 20))  # whose tokens have lost their float rows: found blocks do not have them
            first.advance(20, range(20))
        with pool.match_prefix(ids) as second:
            assert len(second) == second.num_cached_tokens == 96
            assert np.array_equal(second.k(0), first.k(0)[:96])
            assert second.block_indices().tolist() == first.block_indices()[:3].tolist()
        with pool.match_prefix(ids[:96]) as second:  # one token is left to compute
            assert len(second) == 64
        with pool.match_prefix(np.r_[ids[:40], 5, ids[41:]]) as second:
            assert len(second) == 32
        assert len(pool.match_prefix(ids[1:])) == 0

    def test_salts_keep_tenants_apart(self, rng):
        pool = new_pool(16)
        ids = rng.integers(0, 1000, 64)
        fill(pool.new_sequence(), rng, 64, token_ids=ids)
        assert len(pool.match_prefix(np.r_[ids, 1], salt=b"a")) == 0
        with pool.match_prefix(np.r_[ids, 1], salt=b"a") as other:
            fill(other, rng, 64, token_ids=ids)
            assert len(pool.match_prefix(np.r_[ids, 1], salt=b"a")) == 64
            assert len(pool.match_prefix(np.r_[ids, 1], salt=b"b")) == 0

    def test_digests_differ_from_pool_to_pool(self):
        first, second = (new_pool(4)._batches.index for _ in "ab")
        assert first.digests(range(64), 32) != second.digests(range(64), 32)
        assert first.digests(range(64), 32) == first.digests(range(64), 32)
        assert first.digests(range(64), 32)[1] != first.digests(range(32, 64), 32)[0]

    def test_freed_blocks_stay_until_needed_least_recently_used_first(self, rng):
        pool = new_pool(6)
        prompts = [rng.integers(0, 1000, 64) for _ in range(3)]
        for ids in prompts:
            fill(pool.new_sequence(), rng, 64, token_ids=ids).free()
        assert pool.num_free_blocks == 6 and pool.num_cached_blocks == 6
        pool.match_prefix(np.r_[prompts[0], 1]).free()  # now the most recently used
        kept = fill(pool.new_sequence(), rng, 96)
        assert pool.num_cached_blocks == 3
        assert [len(pool.match_prefix(np.r_[ids, 1])) for ids in prompts] == [64, 0, 32]
        kept.free()

    def test_a_known_block_is_never_overwritten(self, rng):
        pool = new_pool(8)
        ids = rng.integers(0, 1000, 64)
        first = fill(pool.new_sequence(), rng, 64, token_ids=ids)
        stored = first.k(0)
        first.truncate(40)
        fill(first, rng, 24, token_ids=np.arange(24))
        with pool.match_prefix(np.r_[ids, 1]) as second:
            assert np.array_equal(second.k(0), stored)

    def test_tokens_without_ids_end_it(self, rng):
        pool = new_pool(8)
        sequence = fill(fill(pool.new_sequence(), rng, 10, token_ids=np.arange(10)), rng, 1)
        fill(sequence, rng, 60, token_ids=np.arange(60))
        assert pool.num_cached_blocks == 0


class TestForeignTables:
    def test_slots_of_another_scheduler(self, rng):
        pool = new_pool(8)
        k, v = tokens(rng, 40)
        slots = np.r_[7 * 32 : 8 * 32, 2 * 32 : 2 * 32 + 8]
        order = rng.permutation(40)
        pool.append_batch(0, k[order], v[order], slots[order])
        pool.append_batch(0, k[:2], v[:2], [-1, -1])
        cache = kvfast.KVCache(1, HEADS, DIM, dtype="int8-rotated")
        cache.append(0, k, v)
        q = queries(rng, 2)
        out = pool.attend_batch(0, q, block_table=[[7, 2, -1]], seq_lens=[40], cu_seqlens_q=[0, 2])
        assert np.array_equal(out, cache.attend(0, q))
        with pytest.raises(ValueError, match="another scheduler"):
            pool.new_sequence()
        pool.clear()
        pool.new_sequence()

    def test_refused(self, rng):
        pool = new_pool(8)
        k, v = tokens(rng, 3)
        for slots, error, message in [
            ([0, 1, 1], ValueError, "twice"),
            ([0, 1, 256], ValueError, "between 0 and 255, got 256"),
            ([0, 1, -2], ValueError, "got -2"),
            ([0, 1], kvfast.DimensionMismatchError, r"shape \(3,\)"),
            ([0.0, 1.0, 2.0], kvfast.DimensionMismatchError, "must be integers"),
        ]:
            with pytest.raises(error, match=message):
                pool.append_batch(0, k, v, slots)
        bad = v.copy()
        bad[2, 1, 0] = np.inf
        with pytest.raises(kvfast.NonFiniteInputError, match=r"v must be finite, got inf at \[2, 1, 0\]"):
            pool.append_batch(0, k, bad, [0, 1, 2])
        assert not pool._batches.is_external  # nothing was written
        q = queries(rng, 1)
        sequence = fill(pool.new_sequence(), rng, 40)
        table = pool.block_table([sequence])
        for options, error, message in [
            ({"seq_lens": [65]}, ValueError, "between 0 and the 64 tokens"),
            ({"seq_lens": [40, 1], "cu_seqlens_q": [0, 1, 1]}, kvfast.DimensionMismatchError, "one row per sequence"),
            ({"seq_lens": [40], "block_table": [[0, 9]]}, ValueError, "between 0 and 7"),
            ({"seq_lens": [40], "block_table": [[0, -1]]}, ValueError, "between 0 and 7"),
            ({"seq_lens": [0]}, ValueError, "holds 0 tokens"),
            ({"seq_lens": [40], "cu_seqlens_q": [0, 2]}, kvfast.DimensionMismatchError, "rise from 0 to the 1"),
            ({"seq_lens": None}, ValueError, "either sequences, or block_table and seq_lens"),
        ]:
            with pytest.raises(error, match=message):
                pool.attend_batch(0, q, **{"block_table": table, **options})
        assert pool.attend_batch(0, q, block_table=table, seq_lens=[40]).shape == q.shape
        sequence.free()
        with pytest.raises(ValueError, match="belongs to no sequence"):
            pool.attend_batch(0, q, block_table=table, seq_lens=[40])

    @pytest.mark.parametrize(
        ("dtype", "name"),
        [("int4", "int4"), (CENTRED, "centring=True"), (kvfast.KVFormat("int8", num_first_float_tokens=4), "num_first_float_tokens=4")],
    )
    def test_refused_by_formats_with_float_tokens(self, rng, dtype, name):
        """They need to know where a sequence begins and ends."""
        pool = new_pool(8, dtype=dtype)
        k, v = tokens(rng, 3)
        q = queries(rng, 1)
        match = re.escape("this pool needs sequences") + ".*" + re.escape(name)
        with pytest.raises(ValueError, match=match):
            pool.append_batch(0, k, v, [0, 1, 2])
        with pytest.raises(ValueError, match=match):
            pool.write_batch(0, np.ones((3, 8 * DIM), np.float32), [5, 6, 7])
        assert not pool._batches.is_external
        sequence = fill(pool.new_sequence(), rng, 40)
        expected = sequence.attend(0, q)
        with pytest.raises(ValueError, match=match):
            pool.append_batch(0, k, v, np.arange(3) + 7 * pool.block_size)
        with pytest.raises(ValueError, match=match):
            pool.attend_batch(0, q, block_table=pool.block_table([sequence]), seq_lens=[40])
        assert np.array_equal(pool.attend_batch(0, q, [sequence]), expected)


class TestRefused:
    def test_slots_must_be_the_next_of_their_sequence(self, rng):
        pool = new_pool(8)
        a, b = fill(pool.new_sequence(), rng, 10), fill(pool.new_sequence(), rng, 40)
        k, v = tokens(rng, 3)
        slots = pool.slot_mapping([a, b], [2, 1])
        for wrong in (slots + 1, slots[::-1], slots[[0, 0, 2]], np.r_[slots[:2], 7 * 32], np.r_[slots[:2], b.block_indices()[0] * 32]):
            with pytest.raises(ValueError, match="slot"):
                pool.append_batch(0, k, v, wrong)
        with pytest.raises(ValueError, match="only once"):
            pool.slot_mapping([a, a])
        assert a.layer_length(0) == 10 and b.layer_length(0) == 40
        pool.append_batch(0, k, v, slots)
        with pytest.raises(ValueError, match="is the next to be written"):
            pool.append_batch(0, k, v, slots)
        with pytest.raises(ValueError, match="layer 0 has 12"):
            a.advance(1)
        a.advance(2), b.advance(1)
        a.free()
        with pytest.raises(ValueError, match="slot"):
            pool.append_batch(0, k[:2], v[:2], slots[:2])

    def test_slots_are_stale_once_their_block_is_shared_or_known(self, rng):
        pool = new_pool(8)
        a = pool.new_sequence()
        slots = pool.slot_mapping([a], 32)
        k, v = tokens(rng, 32)
        pool.append_batch(0, k, v, slots)
        a.advance(32, np.arange(32))
        with a.fork() as b:
            a.truncate(4)
            with pytest.raises(ValueError, match="shared since"):
                pool.append_batch(0, k[:4], v[:4], slots[4:8])
            assert np.array_equal(b.k(0)[4:], filled(pool.new_sequence(), k, v).k(0)[4:])
        with pytest.raises(ValueError, match="ask it for slots again"):
            pool.append_batch(0, k[:4], v[:4], slots[4:8])

    def test_shared_blocks_in_flight_are_counted(self, rng):
        pool = new_pool(5)
        a = pool.new_sequence()
        slots = pool.slot_mapping([a], 70)
        pool.append_batch(0, *tokens(rng, 70), slots)  # not advanced
        b, c = a.fork(), pool.new_sequence()
        with pytest.raises(kvfast.CacheFullError):
            pool.slot_mapping([c, a], [1, 70])
        assert pool.num_free_blocks == 2 and len(c.block_indices()) == 0 and b.layer_length(0) == 70

    def test_full_pools_change_nothing(self, rng):
        pool = new_pool(4)
        a, b, c = fill(pool.new_sequence(), rng, 31), fill(pool.new_sequence(), rng, 32), fill(pool.new_sequence(), rng, 32)
        with pytest.raises(kvfast.CacheFullError, match="2 blocks of 32 tokens are needed, and 1 of 4 are free") as error:
            pool.slot_mapping([a, b, c])
        assert (error.value.needed, error.value.free) == (2, 1)
        assert pool.num_free_blocks == 1 and len(b.block_indices()) == 1
        with pytest.raises(kvfast.CacheFullError):
            a.append(0, *tokens(rng, 34))
        assert pool.num_free_blocks == 1 and a.layer_length(0) == 31
        assert a.can_append(33) and not a.can_append(34)
        assert pool.can_append(32) and not pool.can_append(33)
        pool.slot_mapping([a, b])
        d = b.fork()
        assert not d.can_append(1)

    def test_freed_and_foreign_sequences(self, rng):
        pool, other = new_pool(4), new_pool(4)
        sequence, stranger = fill(pool.new_sequence(), rng, 5), fill(other.new_sequence(), rng, 5)
        q = queries(rng, 1)
        with pytest.raises(ValueError, match="not a sequence of this pool"):
            pool.attend_batch(0, q, [stranger])
        sequence.free()
        sequence.free()
        k, v = tokens(rng, 1)
        for call in (
            lambda: sequence.append(0, k, v),
            lambda: sequence.attend(0, q),
            lambda: sequence.k(0),
            lambda: sequence.advance(1),
            lambda: sequence.truncate(0),
            *(sequence.fork, sequence.snapshot, sequence.state_dict, lambda: sequence.restore(stranger.snapshot())),
            lambda: sequence.can_append(1),
            lambda: sequence.write(0, np.ones((1, 8 * DIM), np.float32)),
            lambda: sequence.__enter__(),
            lambda: pool.slot_mapping([sequence]),
            lambda: pool.attend_batch(0, q, [sequence]),
        ):
            with pytest.raises(ValueError, match="has been freed"):
                call()
        assert "freed" in repr(sequence)
        assert pool.num_free_blocks == 4 and pool.num_sequences == 0

    def test_forgotten_sequences_give_their_blocks_back(self, rng):
        pool = new_pool(4)
        sequence = fill(pool.new_sequence(), rng, 100)
        assert pool.num_free_blocks == 0
        del sequence
        gc.collect()
        assert pool.num_free_blocks == 4 and pool.num_sequences == 0

    def test_sequences_forgotten_while_the_pool_is_busy(self, rng):
        pool, q = new_pool(4), queries(rng, 1)
        forgotten, kept = [fill(pool.new_sequence(), rng, 60)], fill(pool.new_sequence(), rng, 5)

        class Query:
            def __array__(self, dtype=None, copy=None):
                forgotten.clear()  # in the middle of attend_batch
                return q

        expected = kept.attend(0, q)
        assert np.array_equal(pool.attend_batch(0, Query(), [kept]), expected)
        assert not forgotten and pool.num_free_blocks == 3 and pool.num_sequences == 1

    def test_construction(self):
        for options, message in [
            ({"num_blocks": 0}, "num_blocks must be between 1 and"),
            ({"block_size": 24, "dtype": "int8-rotated"}, "16, 32, 64, 128 or 256"),
            ({"block_size": 8, "dtype": "int8-rotated"}, "between 16 and 256"),
            ({"block_size": 32}, "block_size must be 64, the tokens that share the statistics"),
            ({"dtype": "int9"}, "unknown storage dtype"),
        ]:
            with pytest.raises(ValueError, match=message):
                kvfast.PagedKVCache(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "num_blocks": 4, **options})

    def test_token_ids(self, rng):
        pool = new_pool(4)
        sequence = pool.new_sequence()
        sequence.append(0, *tokens(rng, 2))
        with pytest.raises(ValueError, match="token_ids must be 2 integers"):
            sequence.advance(2, [1])
        assert len(sequence) == 0
        with pytest.raises(ValueError, match="token_ids must be integers"):
            pool.match_prefix([[1]])
        with pytest.raises(TypeError, match="salt must be bytes, got str"):
            pool.match_prefix([1], salt="a")


def test_accessors(rng):
    pool = new_pool(8, layers=2, k_dtype="int8", v_dtype="int4")
    assert (pool.block_size, pool.num_blocks, pool.capacity(), pool.usage) == (32, 8, 256, 0)
    assert pool.dtype == pool.dtype_name == "int8/int4" and pool.is_paged
    assert pool.bytes_per_token == kvfast.KVCache(2, HEADS, DIM, k_dtype="int8", v_dtype="int4").bytes_per_token
    sequence = pool.new_sequence()
    k, v = tokens(rng, 40)
    sequence.append(1, k, v)
    assert sequence.context_lens.tolist() == [0, 40] and len(sequence) == 0
    assert sequence.block_size == 32 and sequence.capacity() == 256 and sequence.is_paged
    assert pool.block_table([sequence]).tolist() == [[0, 1]] and pool.seq_lens([sequence]).tolist() == [0]
    assert pool.usage == 0.25
    cache = kvfast.KVCache(1, HEADS, DIM, max_seq_len=100)
    assert not cache.is_paged and cache.block_indices().size == 0 and cache.capacity() == 128


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", ["int4", "k4v3", "int3", "k8v4-rotated", "int8-rotated", "float16"])
def test_a_prefix_as_computed(rng, dtype, window):
    """Once a prompt is complete, it does not matter that a part of it was found: no token is read as codes that would be floats."""
    pool = new_pool(64, dtype=dtype, block_size=kvfast.KVFormat.of(dtype).block_size, sliding_window=window)
    size, ids = pool.block_size, list(range(700))
    k, v = tokens(rng, 700)
    with pool.new_sequence() as first:
        filled(first, k, v, token_ids=ids)
    for n in (1, size, size + 1, 200, 2 * size + 16, 2 * size + 17, 321, 500):
        found = pool.match_prefix(ids[:n], as_computed=True)
        computed, at = pool.new_sequence(), len(found)
        assert max(0, n - 1 - 2 * size - kvfast.KVFormat.of(dtype).open_tokens) <= at <= len(pool.match_prefix(ids[:n]))
        for sequence in (found, computed):
            start = len(sequence)
            filled(sequence, k[start:n], v[start:n])
            for _ in range(3):
                filled(sequence, k[-3:], v[-3:])
        q = queries(rng, 5)[: min(5, n)]
        assert np.array_equal(found.attend(0, q), computed.attend(0, q))


def test_sequences_of_an_iterator():
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=4)
    sequences = [pool.new_sequence(), pool.new_sequence()]
    sequences[0].append(0, *np.ones((2, 3, 2, 64), np.float32))
    assert np.array_equal(pool.block_table(iter(sequences)), pool.block_table(sequences))
    assert pool.block_table(iter(sequences)).shape == (2, 1)


def test_no_blocks():
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=4)
    assert pool.are_coded([]).shape == (0,)
    pool.take_blocks(())
