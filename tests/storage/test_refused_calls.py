"""A refused call leaves a pool as it was: free blocks, known prefixes, owners, tables, float rows and all tokens."""

import numpy as np
import pytest
from cache_kinds import filled

import kvfast

LAYERS, HEADS, DIM, BLOCKS = 2, 2, 32, 10
FORMATS = ["int4", "int8", "k8v4", "float16", kvfast.KVFormat("int8", rotation="kv")]
IDS = list(range(1, 1000))


def rows(rng, n):
    return rng.standard_normal((LAYERS, 2, n, HEADS, DIM)).astype(np.float32)


def feed(sequence, given, ids=None):
    filled(sequence, each=given, **({} if ids is None else {"token_ids": ids}))


def new_pool(fmt, **options):
    size = kvfast.KVFormat.of(fmt).block_size or 64
    return kvfast.PagedKVCache(LAYERS, HEADS, DIM, BLOCKS, size, fmt, **options)


def state_of(pool, *sequences):
    index, size = pool._batches.index, pool.block_size
    state = [
        pool.num_free_blocks,
        pool.num_cached_blocks,
        pool.num_sequences,
        pool._batches.pool.nbytes_used,
        pool._batches.owners().tolist(),
        index.find(index.digests(IDS, size)),
        index.find(index.digests(IDS[100:], size)),
    ]
    return state + [tokens_of(one) for one in sequences]


def tokens_of(cache):
    tokens = [(cache.k(layer).tobytes(), cache.v(layer).tobytes(), cache.block_indices(layer).tolist()) for layer in range(LAYERS)]
    plain = [] if cache.is_spliced else cache._storage.resume_states()
    return [len(cache), cache.context_lens.tolist(), cache.nbytes_used, tokens, plain]


def situations(fmt, rng, **options):
    """Pools and sequences in which an append of more than a block takes, copies, opens or evicts something."""
    pool = new_pool(fmt, **options)
    size = pool.block_size
    sequence = pool.new_sequence()
    yield "empty", pool, [sequence]
    feed(sequence, rows(rng, size // 2))
    yield "a part of a block", pool, [sequence]
    sequence.append(0, *rows(rng, 3)[0])
    yield "a layer ahead", pool, [sequence]
    sequence.truncate(size // 2)
    fork = sequence.fork()
    yield "a shared block", pool, [sequence, fork]
    fork.free()
    feed(sequence, rows(rng, size))
    sequence.truncate(size // 2 - 3)
    yield "a block that was cut", pool, [sequence]
    fork = sequence.fork()
    yield "a shared block that was cut", pool, [sequence, fork]

    pool = new_pool(fmt, **options)
    for first in (0, 100):
        with pool.new_sequence() as other:
            feed(other, rows(rng, 4 * size), IDS[first : first + 4 * size])
    sequence = pool.new_sequence()
    feed(sequence, rows(rng, size))
    yield "known prefixes", pool, [sequence]
    found = pool.match_prefix(IDS[: size + 1])
    feed(found, rows(rng, 1))
    yield "a known block that is shared", pool, [found, sequence]
    found.truncate(size // 2)
    yield "a known block that was cut", pool, [found, sequence]


def bad_rows(rng, sequence, n):
    """Arguments of `append` that are refused."""
    k, v = rows(rng, n)[0]
    for value in (np.nan, -np.inf, *([] if sequence.dtype != "int4" else [1e6])):
        for at in (0, n - 1):
            for side in (0, 1):
                pair = [k.copy(), v.copy()]
                pair[side][at, -1, -1] = value
                yield (0, *pair), kvfast.NonFiniteInputError
    yield (0, k[:, :1], v), kvfast.DimensionMismatchError
    yield (0, k, v[:, :, :5]), kvfast.DimensionMismatchError
    yield (0, k, v[:-1]), kvfast.DimensionMismatchError
    yield (0, k[:0], v[:0]), kvfast.DimensionMismatchError
    yield (0, k.astype(np.int64), v), TypeError
    yield (LAYERS, k, v), IndexError
    yield (0, *rows(rng, 2000)[0]), kvfast.CacheFullError


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("secure", [False, True])
def test_append(fmt, secure, rng):
    for name, pool, sequences in situations(fmt, rng, secure=secure):
        for n in (1, pool.block_size + 20):
            before = state_of(pool, *sequences)
            for arguments, error in bad_rows(rng, sequences[0], n):
                with pytest.raises(error):
                    sequences[0].append(*arguments)
                assert state_of(pool, *sequences) == before, (name, n, error)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_write(fmt, rng):
    cos = sin = np.ones((1000, DIM // 2), np.float32)
    for name, pool, sequences in situations(fmt, rng):
        n = pool.block_size + 20
        qkv = rng.standard_normal((n, 4 * HEADS * DIM)).astype(np.float32)
        bad, before = qkv.copy(), state_of(pool, *sequences)
        bad[-1, -1] = np.nan
        for given, options, error in (
            (bad, {}, kvfast.NonFiniteInputError),
            (bad, {"cos": cos, "sin": sin}, kvfast.NonFiniteInputError),
            (qkv, {"cos": cos[: n - 1], "sin": sin[: n - 1]}, kvfast.DimensionMismatchError),
            (qkv, {"cos": cos * 1e38, "sin": sin * 1e38}, kvfast.NonFiniteInputError),
            (qkv[:, 1:], {}, kvfast.DimensionMismatchError),
            (np.tile(qkv, (20, 1)), {}, kvfast.CacheFullError),
        ):
            with pytest.raises(error):
                sequences[0].write(0, given, **options)
            assert state_of(pool, *sequences) == before, (name, error, options.keys())


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_cache_alone(fmt, rng):
    """With forks, snapshots and cut blocks. An empty cache may keep the memory that it has taken."""
    cache = kvfast.KVCache(LAYERS, HEADS, DIM, max_seq_len=700, dtype=fmt)
    for n, cut in ((30, 30), (200, 150), (1, 140), (3, 100)):
        feed(cache, rows(rng, n))
        cache.truncate(cut)
        for fork in (None, cache.fork()):
            before = [cache.nbytes, tokens_of(cache), fork and tokens_of(fork)]
            for n in (1, 200):
                for arguments, error in bad_rows(rng, cache, n):
                    with pytest.raises(error):
                        cache.append(*arguments)
                    assert [cache.nbytes, tokens_of(cache), fork and tokens_of(fork)] == before, (cut, error)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_batches_of_sequences(fmt, rng):
    pool = new_pool(fmt)
    a, b = pool.new_sequence(), pool.new_sequence()
    feed(a, rows(rng, 30), IDS[:30])
    slots = pool.slot_mapping([a, b], [5, 70])
    before, (k, v) = state_of(pool, a, b), rows(rng, 75)[0]
    bad = v.copy()
    bad[-1] = np.nan
    for arguments, error in (
        ((k, bad, slots), kvfast.NonFiniteInputError),
        ((k, v[1:], slots), kvfast.DimensionMismatchError),
        ((k, v, slots[1:]), kvfast.DimensionMismatchError),
        ((k, v, np.roll(slots, 1)), ValueError),
        ((k, v, slots + 2**40), ValueError),
    ):
        with pytest.raises(error):
            pool.append_batch(0, *arguments)
        with pytest.raises(error):
            pool.write_batch(
                0,
                np.concatenate([k.reshape(75, -1), *[x.reshape(len(x), -1) for x in (k, arguments[1])]], axis=1)
                if len(arguments[1]) == 75
                else np.zeros((75, 5), np.float32),
                arguments[2],
            )
        assert state_of(pool, a, b) == before
    with pytest.raises(kvfast.CacheFullError):
        pool.slot_mapping([a, b], [5, 2000])
    assert state_of(pool, a, b) == before


@pytest.mark.parametrize("fmt", ["int8-rotated", "float16", "int4"])
def test_slots_of_another_scheduler(fmt, rng):
    """Nothing is written, and known prefixes stay."""
    pool = new_pool(fmt)
    with pool.new_sequence() as known:
        feed(known, rows(rng, 130), IDS[:130])
    before, (k, v) = state_of(pool), rows(rng, 5)[0]
    v[2, 1, 3] = np.inf
    if fmt != "int4":
        with pytest.raises(kvfast.NonFiniteInputError):
            pool.append_batch(0, k, v, np.arange(5))
    with pytest.raises(ValueError, match="block_table must hold"):
        pool.prepare_batch([[BLOCKS]], [5], [0, 5], np.arange(5))
    assert state_of(pool) == before


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_splice_and_restore(fmt, rng):
    """Chunks of other pools need more blocks than there are, although there is room for the first."""
    pool, others = new_pool(fmt), []
    for n in (300, 300, 500):
        others.append(kvfast.KVCache(LAYERS, HEADS, DIM, dtype=fmt))
        feed(others[-1], rows(rng, n))
    with pool.new_sequence() as known:
        feed(known, rows(rng, 256), IDS[:256])
    sequence = pool.new_sequence()
    feed(sequence, rows(rng, 20))
    rope, before = kvfast.Rope(), state_of(pool, sequence)
    with pytest.raises(kvfast.CacheFullError):
        sequence.splice(*others[:2], rope=rope)
    assert state_of(pool, sequence) == before
    spliced = others[0].copy()
    spliced.splice(others[2], rope=rope)
    with pytest.raises(kvfast.CacheFullError):
        sequence.restore(spliced.snapshot())
    assert state_of(pool, sequence) == before
    long = kvfast.KVCache(LAYERS, HEADS, DIM, dtype=fmt)
    feed(long, rows(rng, 64 * BLOCKS + 1))
    with pytest.raises(kvfast.CacheFullError):
        sequence.restore(long.snapshot())
    with pytest.raises(kvfast.CacheFullError):
        pool.restore(long.snapshot())
    assert state_of(pool, sequence) == before
    sequence.splice(others[0], rope=rope)
    assert len(sequence) == 320


LEFT_OUT = np.arange(70) % 3 == 1


@pytest.fixture
def given(rng):
    """Keys and values, and the same with rubbish in rows that are left out."""
    k, v = rows(rng, 70)[0]
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[LEFT_OUT], bad_v[LEFT_OUT] = np.nan, np.inf
    return (k, v), (bad_k, bad_v)


def fused(k, v):
    return np.concatenate([one.reshape(len(one), -1) for one in (np.nan_to_num(k), k, v)], axis=1)


@pytest.mark.parametrize("fmt", ["int8-rotated", "float16", FORMATS[-1]], ids=str)
def test_rows_that_are_left_out(fmt, given):
    """Whatever they hold, the others are stored: in slots of another scheduler, and in those of sequences."""
    n, got = int((~LEFT_OUT).sum()), []
    slots = np.full(70, -1)
    slots[~LEFT_OUT] = np.arange(n)
    for k, v in given:
        pool, own = new_pool(fmt), new_pool(fmt)
        sequence = own.new_sequence()
        mapping = slots.copy()
        mapping[~LEFT_OUT] = own.slot_mapping([sequence], n)
        for one, at in ((pool, slots), (own, mapping)):
            one.append_batch(0, k, v, at)
            one.write_batch(1, fused(k, v), at)
        sequence.advance(n)
        q, table = given[0][0][:1], np.arange(-(-n // pool.block_size))[None]
        got.append(
            [
                one
                for layer in range(LAYERS)
                for one in (pool.attend_batch(layer, q, block_table=table, seq_lens=[n]), sequence.attend(layer, q))
            ]
        )
    assert np.array_equal(*got)
    (k, v), (bad, _) = given
    with pytest.raises(kvfast.NonFiniteInputError, match=r"k must be finite, got nan at \[4, "):
        pool.append_batch(0, bad, v, np.where(np.arange(70) == 1, -1, np.arange(70)))


@pytest.mark.parametrize("fmt", ["int8", "int4", "k8v4"])
def test_padding_of_a_prepared_batch(fmt, given):
    (k, v), (bad_k, bad_v) = given
    order, n = np.argsort(LEFT_OUT, kind="stable"), int((~LEFT_OUT).sum())
    got = []
    for one in ((k, v), (bad_k, bad_v)):
        pool = new_pool(fmt)
        batch = pool.prepare_batch(np.arange(BLOCKS)[None], [n], [0, n], np.append(np.arange(n), np.full(70 - n, -1)))
        pool.append_batch(0, *[side[order] for side in one], batch)
        pool.write_batch(1, fused(*[side[order] for side in one]), batch)
        got += [[pool.attend_batch(layer, k[:n], batch) for layer in range(LAYERS)]]
    assert np.array_equal(*got)
