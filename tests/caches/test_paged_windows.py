"""Pools with a window: sequences give back what no query sees any more, and are what rings are in all else."""

import json

import numpy as np
import pytest
from cache_kinds import FORMATS, SEALING, UNSEALED, Stream, filled
from reference import attention, bound, relative_error
from selection import parametrize

import kvfast

WINDOW = {"sliding_window": 100, "num_sink_tokens": 5, "rollback": 20}
Q = np.random.default_rng(9).standard_normal((40, 4, 20)).astype(np.float32)


def pool_of(form="int8-rotated", num_blocks=40, layers=2, **settings):
    return kvfast.PagedKVCache(layers, 2, 20, num_blocks, dtype=form, **(WINDOW | settings))


def ring_of(form="int8-rotated", layers=2, **settings):
    settings = WINDOW | settings
    return kvfast.RingKVCache(layers, 2, 20, settings.pop("sliding_window"), dtype=form, **settings)


def same(first, second, queries=1):
    """Whether two caches show the same and compute the same, in every bit."""
    return len(first) == len(second) and all(
        np.array_equal(first.positions(layer), second.positions(layer))
        and np.array_equal(first.k(layer), second.k(layer))
        and np.array_equal(first.v(layer), second.v(layer))
        and np.array_equal(first.attend(layer, Q[:queries]), second.attend(layer, Q[:queries]))
        for layer in range(first.num_layers)
    )


def blocks_held(table):
    return int((table >= 0).sum())


BLOCK_SIZES = [(name, None) for name in FORMATS]
EVERY_SIZE = [(name, size) for name in UNSEALED for size in (16, 64, 256)]


@parametrize(
    ("name", "block_size"), BLOCK_SIZES + EVERY_SIZE, usual=BLOCK_SIZES + [EVERY_SIZE[3 * i + i % 3] for i in range(len(UNSEALED))]
)
def test_a_pool_serves_texts_far_longer_than_itself(name, block_size):
    """With the bits of a ring, in steps of any size, by calls of its own and in batches."""
    form, stream = FORMATS[name], Stream(3, 3000, layers=2)
    size = FORMATS[name].block_size or block_size or 32
    pool = pool_of(form, num_blocks=2 * (-(-170 // size) + 2), block_size=block_size)
    sequences, rings = [pool.new_sequence() for _ in range(2)], [ring_of(form) for _ in range(2)]
    rng, steps = np.random.default_rng(0), [1, 40, 7, 33, 1, 1, 16]
    for i in range(100):
        n = steps[i % len(steps)]
        at = len(rings[0])
        slots = pool.slot_mapping(sequences, n)
        for layer in range(2):
            k, v = stream.arrays[layer, :, at : at + n]
            pool.append_batch(layer, *(np.concatenate([one, 2 * one]) for one in (k, v)), slots)
            q, out = rng.standard_normal((2 * n, 4, 20)).astype(np.float32), []
            for j, ring in enumerate(rings):
                ring.append(layer, (1 + j) * k, (1 + j) * v)
                out.append(ring.attend(layer, q[j * n : (j + 1) * n]))
                assert np.array_equal(sequences[j].attend(layer, q[j * n : (j + 1) * n]), out[j])
            bounds = np.arange(3) * n
            assert np.array_equal(pool.attend_batch(layer, q, sequences, cu_seqlens_q=bounds), np.concatenate(out))
        for one in (*sequences, *rings):
            one.advance(n)
    assert sum(map(len, sequences)) > 1.5 * pool.capacity()
    assert all(same(*pair, 21) for pair in zip(sequences, rings))
    for sequence in sequences:
        assert len(sequence.block_indices()) <= -(-120 // size) + 2 and sequence.num_cached_tokens == 0
        sequence.free()
    assert pool.num_free_blocks == pool.num_blocks


def test_against_float64(isa, rng):
    pool, (k, v) = pool_of("int8-rotated", layers=1), rng.standard_normal((2, 900, 2, 20)).astype(np.float32)
    sequence = pool.new_sequence()
    for at in range(0, 900, 60):
        filled(sequence, k[at : at + 60], v[at : at + 60])
    shown = sequence.positions()
    assert shown.tolist() == [*range(5), *range(800, 900)]
    expected, _ = attention(Q[:1], sequence.k(0), sequence.v(0))
    assert relative_error(sequence.attend(0, Q[:1]), expected) < bound("int8-rotated")
    for window, sinks in ((30, 0), (100, 5), (7, 3)):
        seen = np.r_[:sinks, 105 - window : 105]
        expected, _ = attention(Q[:1], sequence.k(0)[seen], sequence.v(0)[seen])
        options = {"sliding_window": window, "num_sink_tokens": sinks}
        out = sequence.attend(0, Q[:1], **options)
        assert relative_error(out, expected) < bound("int8-rotated")
        assert np.array_equal(pool.attend_batch(0, Q[:1], [sequence], **options), out)
        assert pool.explain_batch(0, 1, [sequence], **options).items == sequence.explain(0, 1, **options).items


SIZES = [(name, size, other) for name in UNSEALED for size, other in ((16, 256), (256, 16), (32, 64), (64, 32))]
WINDOWS = [
    WINDOW,
    {"sliding_window": 30, "num_sink_tokens": 0, "rollback": 0},
    {"sliding_window": 20, "num_sink_tokens": 20, "rollback": 70},
]
SIZED = [*((name, None, None) for name in FORMATS), *SIZES]
USUAL_SIZED = [*SIZED[: len(FORMATS)], *(SIZES[4 * i + i % 4] for i in range(len(UNSEALED)))]


@parametrize(
    ("name", "size", "other", "window"),
    [(*sized, WINDOWS[(i + turn) % 3]) for turn in range(2) for i, sized in enumerate(SIZED)],
    usual=[(*sized, WINDOWS[i % 3]) for i, sized in enumerate(SIZED) if sized in USUAL_SIZED],
    ids=str,
)
def test_snapshots_files_and_rings(tmp_path, name, size, other, window):
    """There and back, to blocks of any size, at any time; and it goes on as if nothing had been."""
    stream, form = Stream(4, 700, layers=2), FORMATS[name]
    pool, second = pool_of(form, 60, block_size=size, **window), pool_of(form, 60, block_size=other, secure=True, **window)
    sequence, ring = pool.new_sequence(), ring_of(form, **window)
    for n in (20, 55, 70, 130, 257, 300, 333):
        stream.feed(sequence, n, 40), stream.feed(ring, n, 40)
        snapshot = sequence.snapshot()
        assert snapshot == ring.snapshot() and ring.snapshot() == snapshot
        sequence.save(tmp_path / "one")
        loaded = kvfast.load(tmp_path / "one", mmap=True)
        assert type(loaded) is kvfast.RingKVCache and loaded.block_size == pool.block_size
        assert loaded.snapshot() == snapshot == kvfast.Snapshot.from_bytes(snapshot.to_bytes())
        fresh = ring_of(form, **window)
        fresh.restore(snapshot)
        restored = [
            *(loaded, fresh, kvfast.load(snapshot), pool.restore(snapshot), pool.restore(ring.snapshot())),
            *(second.restore(snapshot), second.restore(fresh.snapshot())),
            kvfast.RingKVCache.from_state_dict(sequence.state_dict()),
        ]
        restored.append(pool.restore(restored[5].snapshot()))
        for one in restored:
            assert same(one, ring)
        for one in restored:
            stream.feed(one, n + 50, 20)
        expected = stream.feed(ring.copy(), n + 50, 20)
        for one in restored:
            assert same(one, expected)
            again = second.restore(one.snapshot())
            assert same(again, expected)
            again.free()
            if hasattr(one, "free"):
                one.free()
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="kind"):
        kvfast.KVCache(2, 2, 20, dtype=form).restore(snapshot)
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="windows"):
        pool_of(form, block_size=size, **(window | {"sliding_window": 99})).restore(snapshot)
    with pytest.raises(kvfast.IncompatibleSnapshotError, match=r"state of a RingKVCache, .*: pool.new_sequence\(\)"):
        kvfast.Sequence.from_state_dict(sequence.state_dict())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("step", [25, 600])
def test_prefixes_are_found_behind_the_window(name, step):
    """Also of a prompt that comes in one piece, whose first blocks go back as soon as they are full."""
    form, stream, ids = FORMATS[name], Stream(5, 900, layers=2), np.arange(900)
    window = 100 if form.block_size in (None, 32, 64) else 290
    pool = pool_of(form, num_blocks=120, sliding_window=window)
    size = pool.block_size
    first = stream.feed(pool.new_sequence(), 600, step, token_ids=ids)
    shown = [first.k(layer) for layer in range(2)]
    assert pool.num_cached_blocks == 600 // size
    for n in (601, 600 // size * size + 1, 330):
        found = (n - 1) // size * size
        with pool.match_prefix(ids[:n]) as sequence:
            assert len(sequence) == sequence.num_cached_tokens == found
            evicted = max(0, found - window - 20)
            row = pool.block_table([sequence])[0]
            sinks = -(-5 // size)
            assert [block == -1 for block in row] == [sinks <= i < evicted // size for i in range(len(row))]
            at = np.searchsorted(first.positions(), np.intersect1d(sequence.positions(), first.positions()))
            ours = np.searchsorted(sequence.positions(), first.positions()[at])
            expected = ring_of(form, sliding_window=window)  # which reads codes where `first` may have floats
            expected.restore(sequence.snapshot())
            for layer in range(2):
                if not pool.format.open_tokens and not pool.format.num_first_float_tokens:
                    assert np.array_equal(sequence.k(layer)[ours], shown[layer][at])
                assert relative_error(sequence.k(layer), stream.arrays[layer, 0, sequence.positions()]) < 0.5
            for attend in (
                lambda: sequence.attend(0, Q[:22]),  # the first needs a key from before what was found
                lambda: pool.attend_batch(0, Q[:23], [sequence, first], cu_seqlens_q=[0, 22, 23]),
            ):
                if evicted > 5:
                    with pytest.raises(ValueError, match="the ring has dropped"):
                        attend()
            stream.feed(sequence, 700, 30, token_ids=ids), stream.feed(expected, 700, 30)
            assert same(sequence, expected, 21)
    first.free()
    assert pool.num_free_blocks == pool.num_blocks and len(pool.match_prefix(ids[:700])) == 699 // size * size


def test_a_prefix_needs_those_of_its_blocks_that_it_holds():
    """The pool gives what went back first to other use first; what a window needs is still found."""
    pool, ids, stream = pool_of(num_blocks=24, num_sink_tokens=0, block_size=32), np.arange(700), Stream(6, 700, layers=2)
    stream.feed(pool.new_sequence(), 480, 20, token_ids=ids).free()
    assert pool.num_cached_blocks == 15 and pool.num_free_blocks == 24
    held = stream.feed(pool.new_sequence(), 400, 400)  # 13 blocks, of which 9 were free
    assert pool.num_cached_blocks == 11  # from position 128 on
    for n, found in ((97, 0), (161, 0), (225, 0), (257, 256), (300, 288)):  # 225 tokens need those from position 104 on
        assert len(pool.match_prefix(ids[:n])) == found
    sequence = pool.match_prefix(ids[:490])
    assert len(sequence) == 480 and blocks_held(pool.block_table([sequence])) == 4
    with_sinks = pool_of(num_blocks=24, block_size=32)
    stream.feed(with_sinks.new_sequence(), 480, 20, token_ids=ids).free()
    found = with_sinks.match_prefix(ids[:490])
    assert len(found) == 480 and found.positions()[:6].tolist() == [0, 1, 2, 3, 4, 380]
    del held


@pytest.mark.parametrize("name", SEALING)
def test_known_blocks_behind_the_window_keep_no_float_rows(name):
    """Those of a prompt in one piece go with it, whether its blocks stay known or not."""
    sizes = []
    for ids in (None, np.arange(3000)):
        pool, stream = pool_of(FORMATS[name], num_blocks=100), Stream(12, 3000, layers=2)
        sequence = stream.feed(pool.new_sequence(), 3000, 600, **({} if ids is None else {"token_ids": ids}))
        assert (pool.num_cached_blocks > 0) == (ids is not None)
        stream.feed(pool.new_sequence(), 300, 30)
        sizes.append(pool.nbytes)
        del sequence
    assert sizes[0] == sizes[1]


def test_incomplete_prefix_is_not_found():
    """Blocks that came from smaller ones may have lost their first tokens, which those who find them would need."""
    ids, stream = np.arange(400), Stream(7, 400, layers=2)
    window = {"sliding_window": 60, "num_sink_tokens": 0, "rollback": 0}
    small, pool = pool_of(block_size=16, **window), pool_of(block_size=64, **window)
    source = stream.feed(small.new_sequence(), 180, 10, token_ids=ids)
    assert np.argmax(small.block_table([source])[0] >= 0) == 7  # from position 112 on
    sequence = pool.restore(source.snapshot(ids[:180]))
    assert pool.block_table([sequence])[0, 0] == -1 and same(sequence, source)
    assert pool.num_cached_blocks == 0 and len(pool.match_prefix(ids[:129])) == 0
    stream.feed(sequence, 192, 12, token_ids=ids)
    found = pool.match_prefix(ids[:193])  # needs the positions from 132 on, and the block that has them is all there
    assert len(found) == 192 and np.array_equal(found.k(0), sequence.k(0))


def test_tables_of_others():
    """A scheduler's own slots and tables: what no query sees need not be there, and is not read whatever stands there."""
    rng, (k, v) = np.random.default_rng(0), np.random.default_rng(1).standard_normal((2, 400, 2, 20)).astype(np.float32)
    for form in ("int8-plain", "float16"):
        for size in (16, 32, 64):
            pool, ring = pool_of(form, 64, 1, block_size=size), ring_of(form, 1)
            table = rng.permutation(64)[: -(-400 // size)].astype(np.int32)
            slots = (table[:, None].astype(np.int64) * size + np.arange(size)).reshape(-1)[:400]
            pool.append_batch(0, k, v, slots)
            ring.append(0, k, v)
            for n in (1, 3, 150):
                expected = ring.attend(0, np.resize(Q, (n, 4, 20)))
                first = 400 - n + 1 - 100
                needed = np.arange(len(table)) * size + size > first
                needed[: -(-5 // size)] = True
                for gone in (-1, -(1 << 31), 1 << 30, 63):
                    some = np.where(needed, table, gone)[None]
                    options = {"block_table": some, "seq_lens": [400], "cu_seqlens_q": [0, n]}
                    assert np.array_equal(pool.attend_batch(0, np.resize(Q, (n, 4, 20)), **options), expected)
                    pool.explain_batch(0, n, **options)
                for at in (0, int(np.argmax(needed[1:])) + 1, len(table) - 1):
                    some = table[None].copy()
                    some[0, at] = -1
                    with pytest.raises(ValueError, match="block_table must hold blocks between 0 and 63"):
                        pool.attend_batch(0, np.resize(Q, (n, 4, 20)), block_table=some, seq_lens=[400], cu_seqlens_q=[0, n])
            options = {"sliding_window": 10, "num_sink_tokens": 0}
            some = np.where(np.arange(len(table)) * size + size > 391, table, -1)[None]
            out = pool.attend_batch(0, Q[:1], block_table=some, seq_lens=[400], **options)
            assert np.array_equal(out, ring.attend(0, Q[:1], **options))
            for wrong in ({"sliding_window": 101}, {"num_sink_tokens": 6}):
                with pytest.raises(ValueError, match="that the ring keeps"):
                    pool.attend_batch(0, Q[:1], block_table=table[None], seq_lens=[400], **wrong)


def test_tables_of_sequences_as_plain_ones():
    pool, stream = pool_of("int8-plain", block_size=16), Stream(8, 500, layers=2)
    sequences = [stream.feed(pool.new_sequence(), n, 30) for n in (500, 300, 20)]
    table, lengths = pool.block_table(sequences), pool.seq_lens(sequences)
    assert (table[0] == -1).sum() == 22 and table.shape == (3, 32) and (table[2, 2:] == -1).all()
    expected = pool.attend_batch(1, Q[:3], sequences)
    assert np.array_equal(pool.attend_batch(1, Q[:3], block_table=table, seq_lens=lengths), expected)
    sequences[1].free()
    with pytest.raises(ValueError, match="belongs to no sequence"):
        pool.attend_batch(1, Q[:3], block_table=table, seq_lens=lengths)


def test_blocks_that_are_needed():
    pool, stream = pool_of(num_blocks=8, rollback=0, block_size=32), Stream(9, 600, layers=2)
    sequence = pool.new_sequence()
    assert pool.can_append(256) and sequence.can_append(256)
    assert not pool.can_append(257) and not sequence.can_append(257)  # in one piece; in steps there is no end
    stream.feed(sequence, 600, 32)
    assert pool.num_free_blocks == 8 - 5 and len(sequence.block_indices()) == 5
    assert sequence.can_append(8 + 3 * 32) and not sequence.can_append(8 + 3 * 32 + 1)
    fork = sequence.fork()
    assert sequence.can_append(2 * 32) and not sequence.can_append(8 + 2 * 32 + 1)  # the last block is copied
    with pytest.raises(kvfast.CacheFullError) as caught:
        pool.slot_mapping([sequence, fork], [60, 60])
    assert (caught.value.needed, caught.value.free) == (5, 3)
    slots = pool.slot_mapping([sequence, fork], [8, 8])
    assert pool.num_free_blocks == 2 and slots.tolist()[0] % 32 == 600 % 32
    with pytest.raises(kvfast.CacheFullError):
        sequence.append(0, *np.ones((2, 100, 2, 20), np.float32))
    assert sequence.layer_length(0) == 600


def test_slots_of_a_block_that_went_back_are_refused():
    pool, stream = pool_of(block_size=16, num_sink_tokens=0, rollback=0), Stream(10, 900, layers=2)
    sequence = pool.new_sequence()
    old = pool.slot_mapping([sequence], 16)
    stream.feed(sequence, 400, 50)
    k, v = np.ones((2, 16, 2, 20), np.float32)
    with pytest.raises(ValueError, match="slot_mapping"):
        pool.append_batch(0, k, v, old)
    other, taken = pool.new_sequence(), []
    while old[0] // 16 not in taken:
        stream.feed(other, len(other) + 16)
        taken = other.block_indices().tolist()
    with pytest.raises(ValueError, match="slot_mapping"):
        pool.append_batch(0, k, v, old)
    new = pool.slot_mapping([sequence], 16)
    pool.append_batch(0, k, v, new)
    assert sequence.layer_length(0) == 416


@pytest.mark.parametrize("name", ["float32", "int8-rotated", "int4"])
def test_secure_pools_wipe_what_a_window_has_left(name):
    pool, ids = pool_of(name, secure=True, num_sink_tokens=0), np.arange(900)
    sequence = pool.new_sequence()

    def held():
        return np.concatenate(
            [
                np.asarray(pool._batches.pool.bytes_of_head(layer, 0, pool.num_blocks, head, values)).any(1)[:, None]
                for layer in range(2)
                for head in range(2)
                for values in (False, True)
            ],
            1,
        ).any(1)

    stream = Stream(11, 900, layers=2)
    stream.feed(sequence, 900, 90)
    assert set(np.flatnonzero(held())) <= set(sequence.block_indices().tolist())
    with pool.match_prefix(ids[:700]) as other:
        stream.feed(other, 700, 70, token_ids=ids)
        assert pool.num_cached_blocks > len(other.block_indices())
    sequence.free()
    assert held().sum() == pool.num_cached_blocks
    pool.clear()
    assert not held().any()


def test_bad_input():
    for settings, message in [
        ({"sliding_window": 0}, "sliding_window must be between 1 and .*, got 0"),
        ({"sliding_window": -3}, "sliding_window must be between 1 and .*, got -3"),
        ({"sliding_window": 1 << 41}, "sliding_window must be between 1 and"),
        ({"sliding_window": 4}, "num_sink_tokens must be at most the sliding_window of 4, got 5"),
        ({"sliding_window": None}, "num_sink_tokens needs a sliding_window, .* got 5"),
        ({"rollback": -1}, "rollback must be between 0 and .*, got -1"),
        ({"num_sink_tokens": -1}, "num_sink_tokens must be between 0"),
        ({"block_size": 48}, "block_size must be 16, 32, 64, 128 or 256, got 48"),
    ]:
        with pytest.raises(ValueError, match=message):
            pool_of(**settings)
    for settings in ({"sliding_window": "64"}, {"sliding_window": 8.0}, {"rollback": None}, {"num_sink_tokens": None}):
        with pytest.raises(TypeError, match="must be an integer"):
            pool_of(**settings)
    for given in ([[2, 2], 20], [2, (20, 40)]):
        with pytest.raises(TypeError, match="one number for all layers of a pool.*make a PagedKVCache for each kind"):
            kvfast.PagedKVCache(2, *given, num_blocks=4)
    with pytest.raises(TypeError, match=r"sliding_window must be one number .*, got \[100, None\].*for each kind"):
        kvfast.PagedKVCache(2, 2, 20, 4, sliding_window=[100, None])
    pool = pool_of()
    sequence = Stream(1, 300, layers=2).feed(pool.new_sequence(), 300, 50)
    for options, message in (({"sliding_window": 101}, "at most the 100 tokens"), ({"num_sink_tokens": 6}, "at most the 5 that")):
        for attend in (
            lambda **some: sequence.attend(0, Q[:1], **some),
            lambda **some: pool.attend_batch(0, Q[:1], [sequence], **some),
            lambda **some: pool.explain_batch(0, 1, [sequence], **some),
        ):
            with pytest.raises(ValueError, match=message):
                attend(**options)
    for queries in (22, 40):
        with pytest.raises(ValueError, match="the ring has dropped"):
            pool.attend_batch(0, Q[:queries], [sequence], cu_seqlens_q=[0, queries])
    assert len(sequence) == 300 and pool.attend_batch(0, Q[:21], [sequence], cu_seqlens_q=[0, 21]).shape == (21, 4, 20)


def test_a_text_that_claims_to_be_endless():
    """A file tells how many tokens are before a window; a table of as many blocks is refused, not made."""
    ring = Stream(1, 640, layers=2).feed(ring_of(num_sink_tokens=0), 640, 50)
    arrays, more = ring.state_dict(), 1 << 30
    header = json.loads(arrays["header"].tobytes())
    header["seq_len"] += 64 * more
    header["tables"][0]["skipped_blocks"] += more
    header["tables"][0]["evicted_tokens"] += 64 * more
    arrays["header"] = np.frombuffer(json.dumps(header, separators=(",", ":")).encode(), np.uint8)
    pool = pool_of(num_sink_tokens=0)
    sequence = pool.restore(kvfast.Snapshot.from_state_dict(arrays))
    assert len(sequence) == 640 + (1 << 36) and np.array_equal(sequence.k(1), ring.k(1))
    assert np.array_equal(pool.attend_batch(0, Q[:1], [sequence]), ring.attend(0, Q[:1]))
    for tell in (pool.block_table, pool.seq_lens):
        with pytest.raises(ValueError, match="at most 2147483647"):
            tell([sequence])
    slots = pool.slot_mapping([sequence], 3)
    for layer in range(2):
        pool.append_batch(layer, *np.ones((2, 3, 2, 20), np.float32), slots)
    sequence.advance(3, [1, 2, 3])
    assert sequence.fork().layer_length(1) == 643 + (1 << 36)


def test_properties():
    pool, plain = pool_of(), kvfast.PagedKVCache(1, 2, 20, 4)
    assert (pool.sliding_window, pool.num_sink_tokens, pool.rollback, pool.new_sequence().rollback) == (100, 5, 20, 20)
    assert (plain.sliding_window, plain.num_sink_tokens, plain.rollback, plain.new_sequence().rollback) == (None, 0, None, None)
    sequence = plain.new_sequence()
    sequence.append(0, *np.ones((2, 7, 2, 20), np.float32))
    assert sequence.positions().tolist() == list(range(7))
