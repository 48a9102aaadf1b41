"""Numbers that do not fit the integers of kvfast are refused, never cut."""

import numpy as np
import pytest
from cache_kinds import filled

import kvfast

HUGE = [2**31, 2**32 + 1, 2**32 + 20, 2**63 - 1, 1 - 2**32, -(2**63), np.uint64(2**64 - 1), np.uint64(2**63 + 5)]
MORE = [*HUGE, 2**64 + 3, -(2**70), 10**5000]


def as_array(value, like):
    """`like` with `value` as its first number."""
    array = np.array(like).astype(np.asarray(value).dtype)
    array.reshape(-1)[0] = value
    return array


@pytest.fixture(params=["int8", "int4"])
def pool(request, rng):
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=8, dtype=request.param, block_size=64)
    pool.k, pool.v = rng.standard_normal((2, 100, 2, 64)).astype(np.float32)
    pool.tables = {"block_table": [[1, 2]], "seq_lens": [100], "cu_seqlens_q": [0, 100]}
    pool.slots = np.arange(64, 164)
    pool.append_batch(0, pool.k, pool.v, pool.prepare_batch(**pool.tables, slot_mapping=pool.slots))
    return pool


def refused(call):
    with pytest.raises(ValueError) as caught:
        call()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", HUGE)
def test_tables_and_slots(pool, value):
    for name, like in pool.tables.items():
        tables = pool.tables | {name: as_array(value, like)}
        refused(lambda tables=tables: pool.prepare_batch(**tables, slot_mapping=pool.slots))
        refused(lambda tables=tables: pool.attend_batch(0, pool.k, **tables))
        refused(lambda tables=tables: pool.explain_batch(0, (100, 2, 64), **tables))
    slots = as_array(value, pool.slots)
    refused(lambda: pool.prepare_batch(**pool.tables, slot_mapping=slots))
    refused(lambda: pool.append_batch(0, pool.k, pool.v, slots))
    refused(lambda: pool.write_batch(0, np.zeros((100, 6 * 64), np.float32), slots))


def test_table_entries_beyond_the_length_are_ignored(pool):
    wide = np.array([[1, 2, 2**40, -(2**40)]])
    for table in (wide, wide.astype(np.uint64)):
        batch = pool.prepare_batch(**pool.tables | {"block_table": table}, slot_mapping=pool.slots)
        pool.append_batch(0, pool.k, pool.v, batch)
        assert pool.attend_batch(0, pool.k, batch).shape == pool.k.shape
    with pytest.raises(ValueError, match=f"between 0 and 7 for the tokens of seq_lens, got 1 to {2**40}"):
        pool.prepare_batch(wide, [190], [0, 100], pool.slots)


@pytest.mark.parametrize("value", MORE, ids=range(len(MORE)))
def test_numbers(rng, value):
    k = v = rng.standard_normal((20, 2, 64)).astype(np.float32)
    caches = [kvfast.KVCache(1, 2, 64, dtype="int8"), kvfast.RingKVCache(1, 2, 64, sliding_window=64)]
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=8, dtype="int8")
    for cache in (*caches, pool.new_sequence()):
        filled(cache, k, v)
        refused(lambda cache=cache: cache.truncate(value))
        refused(lambda cache=cache: cache.advance(value))
        for name in ("sliding_window", "num_splits", "num_threads", "attention_chunk_size", "num_sink_tokens"):
            try:
                got = cache.attend(0, k, **{name: value})
            except (ValueError, TypeError):
                continue
            assert np.array_equal(got, cache.attend(0, k)), name  # of more tokens than there are
        for call in (lambda cache=cache: cache.k(value), lambda cache=cache: cache.append(value, k, v)):
            with pytest.raises(IndexError):
                call()
        if not isinstance(cache, kvfast.RingKVCache):
            refused(lambda cache=cache: cache.drop(value, 20, rope=None))
            refused(lambda cache=cache: cache.drop(0, value, rope=None))
            refused(lambda cache=cache: cache.splice(caches[0].snapshot(), rope=None, recomputed=value))
        positions = np.array([value]) if not isinstance(value, int) or -(2**63) <= value < 2**63 else [value]
        refused(
            lambda cache=cache, positions=positions: cache.write(
                0, np.zeros((1, 6 * 64), np.float32), cos=k[:, 0, :32], sin=k[:, 0, :32], positions=positions
            )
        )
    with pytest.raises((ValueError, kvfast.CacheFullError)):
        pool.slot_mapping([pool.new_sequence()], value)
    for name in ("num_layers", "num_kv_heads", "head_dim", "num_blocks", "block_size"):
        with pytest.raises((ValueError, MemoryError)):
            kvfast.PagedKVCache(**{"num_layers": 1, "num_kv_heads": 2, "head_dim": 64, "num_blocks": 8} | {name: value})
    for name in ("sliding_window", "rollback"):
        try:
            ring = kvfast.RingKVCache(1, 2, 64, **{"sliding_window": 64} | {name: value})
        except ValueError:
            continue
        assert getattr(ring, name) == value  # which is not beyond what can be counted
