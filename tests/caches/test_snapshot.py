"""Snapshots: what they hold, whom they share it with, and what they cost."""

import copy
import gc
import io
import json
import pickle

import numpy as np
import pytest
from cache_kinds import (
    ALONE,
    ANY_BLOCK,
    CENTRED,
    DIM,
    DTYPES,
    HEADS,
    KINDS,
    LAYERS,
    RINGS,
    contents,
    fill,
    filled,
    make,
    same,
    seals,
    stored,
    tokens,
)
from in_threads import meanwhile

import kvfast

BLOCK_BYTES = 64 * kvfast.KVCache(LAYERS, HEADS, DIM, dtype="int8").bytes_per_token
TABLE_BYTES = 4096  # a table of blocks is less


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 64, 150, 333])
def test_restore_brings_everything_back(rng, kind, dtype, n):
    cache = fill(make(kind, dtype), rng, n)
    snapshot, before = cache.snapshot(), contents(cache)
    assert len(snapshot) == snapshot.seq_len == n and snapshot
    for more in (1, 50):
        fill(cache, rng, more)
    assert not same(cache, before)
    for _ in range(2):
        cache.restore(snapshot)
        assert same(cache, before)
        cache.clear()
        fill(cache, rng, 60)
    cache.truncate(10 if kind not in RINGS else 60)
    cache.restore(snapshot)
    assert same(cache, before) and snapshot == cache.snapshot()


@pytest.mark.parametrize("dtype", DTYPES)
def test_restored_cache_goes_on_like_the_first_time(rng, kind, dtype):
    cache = fill(make(kind, dtype), rng, 100)
    snapshot, more = cache.snapshot(), [[tokens(rng, 70) for _ in range(LAYERS)] for _ in range(2)]

    def go_on():
        filled(cache, each=more[0])
        return contents(cache)

    first = go_on()
    cache.restore(snapshot)
    for layer in range(LAYERS):
        cache.append(layer, *more[1][layer])
    cache.restore(snapshot)
    assert same(go_on(), first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forks_of_every_cache_share_blocks_until_one_writes(rng, kind, dtype):
    cache = fill(make(kind, dtype), rng, 100)
    before, used = contents(cache), cache.nbytes_used
    for first, second in ((0, 1), (1, 0)):
        pair = cache.fork(), cache.fork()
        assert type(pair[0]) is type(cache) and all(same(one, before) for one in pair)
        assert cache.nbytes_used == used == pair[0].nbytes_used
        fill(pair[first], rng, 70)
        assert len(pair[first]) == 170 and same(pair[second], before) and same(cache, before)
        fill(pair[second], rng, 30)
        assert len(pair[first]) == 170 and len(pair[second]) == 130 and same(cache, before)
    fill(cache, rng, 1)
    assert not same(cache, before) and len(cache) == 101


@pytest.mark.parametrize("dtype", DTYPES)
def test_snapshot_outlives_its_cache(rng, kind, dtype):
    cache = fill(make(kind, dtype), rng, 200)
    snapshot, before, bytes_before = cache.snapshot(), contents(cache), stored(cache)
    if kind in ALONE:
        cache.free()
    del cache
    gc.collect()
    for _ in range(2):
        assert stored(snapshot) == bytes_before
        fresh = make(kind, dtype)
        fresh.restore(snapshot)
        assert same(fresh, before)
        fill(fresh, rng, 70)
    again = kvfast.load(snapshot)
    assert isinstance(again, ALONE.get(kind, type(make(kind))))
    assert same(again, before) and again.snapshot() == snapshot


def test_tokens_in_progress_are_not_in_it(rng, kind):
    cache = fill(make(kind), rng, 100)
    before, bytes_before = contents(cache), stored(cache)
    cache.append(0, *tokens(rng, 40))
    cache.append(1, *tokens(rng, 7))
    snapshot = cache.snapshot(uncounted="drop")
    assert len(snapshot) == 100 and stored(snapshot) == bytes_before
    assert cache.layer_length(0) == 140 and cache.layer_length(1) == 107
    fresh = make(kind)
    fresh.restore(snapshot)
    assert same(fresh, before)
    cache.restore(snapshot)
    assert same(cache, before)
    fill(cache, rng, 3)
    assert len(cache) == 103


@pytest.mark.parametrize("name", RINGS)
def test_ring_brings_back_what_it_had_dropped(rng, name):
    ring = fill(make(name), rng, 150)
    snapshot, before, positions = ring.snapshot(), contents(ring), [ring.positions(layer) for layer in range(LAYERS)]
    for _ in range(8):
        fill(ring, rng, 100)
    with pytest.raises(ValueError, match="cannot go back"):
        ring.truncate(150)
    ring.restore(snapshot)
    assert same(ring, before)
    assert all(np.array_equal(ring.positions(layer), positions[layer]) for layer in range(LAYERS))
    rollback = RINGS[name].get("rollback", 64)
    if rollback:
        ring.truncate(150 - rollback)  # the slack before the window came with it


@pytest.mark.parametrize("dtype", ANY_BLOCK)
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("n", [0, 5, 64, 200, 256, 300])
def test_other_block_sizes_and_paged_both_ways(rng, dtype, size, n):
    whole = fill(kvfast.KVCache(LAYERS, HEADS, DIM, dtype=dtype), rng, n)
    before, snapshot = contents(whole), whole.snapshot()
    pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, 40, size, dtype=dtype)
    sequence = fill(pool.new_sequence(), rng, 33)
    sequence.restore(snapshot)
    assert same(sequence, before) and sequence.snapshot() == snapshot and snapshot == sequence.snapshot()
    other = fill(kvfast.KVCache(LAYERS, HEADS, DIM, 300, dtype=dtype, block_size=size), rng, 10)
    other.restore(sequence.snapshot())
    assert same(other, before) and other.block_size == size and other.snapshot() == snapshot
    whole.clear()
    fill(whole, rng, 90)
    whole.restore(other.snapshot())
    assert same(whole, before)
    assert stored(whole) == stored(snapshot)  # there and back: the same bytes


def test_other_block_sizes_on_every_tier(isa, rng):
    for dtype in ANY_BLOCK:
        cache = fill(kvfast.KVCache(LAYERS, HEADS, DIM, dtype=dtype, block_size=256), rng, 300)
        other = kvfast.KVCache(LAYERS, HEADS, DIM, dtype=dtype, block_size=16)
        other.restore(cache.snapshot())
        assert same(other, cache) and other.snapshot() == cache.snapshot()


def test_different_dtypes_of_keys_and_values_and_layers(rng):
    cache = kvfast.KVCache(LAYERS, HEADS, DIM, k_dtype=["int8", "float16"], v_dtype=["int4", "bfloat16"])
    fill(cache, rng, 130)
    pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, 20, 16, k_dtype=["int8", "float16"], v_dtype=["int4", "bfloat16"])
    sequence = pool.new_sequence()
    sequence.restore(cache.snapshot())
    assert same(sequence, cache) and kvfast.Snapshot.from_state_dict(sequence.state_dict()) == cache.snapshot()


@pytest.mark.parametrize("dtype", ["int8", "int4", CENTRED])
def test_equality(rng, kind, dtype):
    rows = [tokens(rng, 130) for _ in range(LAYERS)]

    def filled(changed=None, n=130, parts=(130,), **settings):
        window = (90, 5) if kind == "sequence with window" else ()
        cache = (
            ALONE.get(kind, kvfast.KVCache)(LAYERS, HEADS, DIM, *window, **({"dtype": dtype} | settings))
            if settings
            else make(kind, dtype)
        )
        start = 0
        for part in parts:
            for layer, (k, v) in enumerate(rows):
                k, v = k.copy(), v.copy()
                if changed == layer:
                    v[77, 1, 3] += 1
                cache.append(layer, k[start : start + part], v[start : start + part])
            cache.advance(part)
            start += part
        cache.truncate(n)
        return cache.snapshot()

    snapshot = filled()
    assert snapshot == filled() and snapshot == filled(parts=(1, 63, 60, 6)) and snapshot == copy.copy(snapshot)
    assert snapshot != filled(0) and snapshot != filled(1)
    assert snapshot != "snapshot" and snapshot != make(kind, dtype).snapshot()
    with pytest.raises(TypeError):
        hash(snapshot)
    if kind not in RINGS:
        assert snapshot != filled(n=129)
        for size in () if seals(dtype) else (16, 256):
            assert snapshot == filled(block_size=size) == snapshot
            assert snapshot != filled(0, block_size=size) and snapshot != filled(n=129, block_size=size)
        assert snapshot != filled(dtype="float16") and snapshot != filled(k_dtype="int4")
    else:
        assert snapshot != filled(dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_whatever_lies_behind_the_tokens(rng, dtype):
    """Tokens that were there and are gone do not count, in blocks begun and in blocks used before."""
    one, other = fill(make("growing", dtype), rng, 100), make("growing", dtype)
    fill(other, np.random.default_rng(5), 300)
    other.clear()
    other.restore(one.snapshot())
    fill(other, rng, 10 if seals(dtype) else 100)  # few enough that tokens of `one` keep their float rows
    other.truncate(70 if not seals(dtype) else 100)
    one.truncate(70 if not seals(dtype) else 100)
    assert one.snapshot() == other.snapshot() and stored(one) == stored(other)
    for cache in (one, other):
        fill(cache, np.random.default_rng(6), 100)
        cache.truncate(70)
    assert one.snapshot() == other.snapshot() and stored(one) == stored(other)


def test_small_until_overwritten(rng):  # int8, whose blocks are all that it holds
    cache = fill(make("growing", "int8-rotated"), rng, 64 * 6 + 10)
    snapshots = [cache.snapshot() for _ in range(3)]
    before = cache.nbytes
    assert all(0 < one.nbytes < TABLE_BYTES for one in snapshots) and cache.nbytes == before
    del snapshots[1:]
    [snapshot] = snapshots
    fill(cache, rng, 1)  # the block begun is copied
    assert BLOCK_BYTES <= snapshot.nbytes < BLOCK_BYTES + TABLE_BYTES
    fill(cache, rng, 500)
    assert snapshot.nbytes < BLOCK_BYTES + TABLE_BYTES
    cache.truncate(64 * 4)
    assert 3 * BLOCK_BYTES <= snapshot.nbytes < 3 * BLOCK_BYTES + TABLE_BYTES
    other = cache.snapshot()
    cache.clear()
    assert 3 * BLOCK_BYTES <= snapshot.nbytes < 3 * BLOCK_BYTES + TABLE_BYTES  # the first four are in the other, too
    del other
    gc.collect()
    assert 7 * BLOCK_BYTES <= snapshot.nbytes < 7 * BLOCK_BYTES + TABLE_BYTES
    cache.restore(snapshot)
    assert snapshot.nbytes < TABLE_BYTES
    assert "394 tokens" in repr(snapshot)


def test_no_copy_at_the_end_of_a_block(rng):
    cache = fill(make("growing"), rng, 64 * 3)
    snapshot, blocks = cache.snapshot(), cache.block_indices().tolist()
    fill(cache, rng, 64)
    assert cache.block_indices().tolist()[:3] == blocks and snapshot.nbytes < TABLE_BYTES


def test_bounded_cache_gives_surplus_back(rng):
    cache = kvfast.KVCache(LAYERS, HEADS, DIM, 512, dtype="int8-rotated")
    own, snapshots = cache.nbytes, []
    for _ in range(3):
        fill(cache, rng, 512)
        snapshots.append((cache.snapshot(), contents(cache)))
        cache.clear()
    assert cache.nbytes >= 3 * own - BLOCK_BYTES
    fill(cache, rng, 512)
    with pytest.raises(kvfast.CacheFullError):
        cache.append(0, *tokens(rng, 1))
    for snapshot, before in reversed(snapshots):
        cache.restore(snapshot)
        assert same(cache, before)
    del snapshot
    snapshots.clear()
    gc.collect()
    cache.clear()
    assert cache.nbytes == own
    fill(cache, rng, 512)
    assert cache.nbytes == own and cache.block_indices().tolist() == list(range(8))


def test_bounded_float32_shows_the_right_rows_after_restore(rng):
    """Its `k` is a view while the blocks lie in their order, and may not be one when they do not."""
    cache = fill(kvfast.KVCache(LAYERS, HEADS, DIM, 256, dtype="float32"), rng, 256)
    snapshot, before = cache.snapshot(), contents(cache)
    cache.clear()
    fill(cache, rng, 256)
    after = contents(cache)
    other = cache.snapshot()
    for _ in range(3):
        cache.restore(snapshot)
        assert same(cache, before)
        cache.restore(other)
        assert same(cache, after)
    keys, _ = snapshot.to_arrays()
    assert all(np.array_equal(keys[i].reshape(256, HEADS, DIM), before[1 + 3 * i]) for i in range(LAYERS))
    keys[0][:] = 0  # a copy
    cache.restore(snapshot)
    assert same(cache, before)


def test_many_snapshots_of_a_growing_cache(rng):
    cache, taken = make("growing"), []
    for step in range(60):
        fill(cache, rng, int(rng.integers(1, 40)))
        taken.append((cache.snapshot(), contents(cache)))
        if step % 7 == 3:
            cache.restore(taken[int(rng.integers(len(taken)))][0])
        if step % 11 == 5:
            cache.truncate(len(cache) // 3)
    for snapshot, before in taken:
        cache.restore(snapshot)
        assert same(cache, before)
    del snapshot
    while taken:
        taken.pop(int(rng.integers(len(taken))))
        if taken:
            snapshot, before = taken[int(rng.integers(len(taken)))]
            cache.restore(snapshot)
            assert same(cache, before)


INCOMPATIBLE = {
    "num_layers": kvfast.KVCache(LAYERS + 1, HEADS, DIM),
    "num_kv_heads": kvfast.KVCache(LAYERS, HEADS + 1, DIM),
    "head_dim": kvfast.KVCache(LAYERS, HEADS, DIM + 1),
    "dtype 'int4', the cache 'int8'|dtype 'int8', the cache 'int4'": kvfast.KVCache(LAYERS, HEADS, DIM, dtype="int8"),
    "dtype": kvfast.KVCache(LAYERS, HEADS, DIM, v_dtype=["int8", "float32"]),
    "room for 50": kvfast.KVCache(LAYERS, HEADS, DIM, 50),
    "kind": make("ring"),
}


@pytest.mark.parametrize("name", INCOMPATIBLE)
def test_what_does_not_fit_is_refused(rng, name):
    cache = fill(make("growing"), rng, 80)
    other = INCOMPATIBLE[name]
    other.clear()
    n = 40
    for layer in range(other.num_layers):
        other.append(layer, *rng.standard_normal((2, n, other.num_kv_heads, other.head_dim)).astype(np.float32))
    other.advance(n)
    bytes_before, other_before = stored(cache), stored(other)
    with pytest.raises(kvfast.IncompatibleSnapshotError, match=name):
        other.restore(cache.snapshot())
    if not name.startswith("room"):
        with pytest.raises(kvfast.IncompatibleSnapshotError, match=name):
            cache.restore(other.snapshot())
    assert stored(cache) == bytes_before and stored(other) == other_before


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("windows", {"sliding_window": 91}),
        ("windows", {"sliding_window": [90, None]}),
        ("num_sink_tokens", {"num_sink_tokens": 4}),
        ("rollback", {"rollback": 11}),
        ("rope", {"rope": kvfast.Rope()}),
    ],
)
def test_rings_with_other_settings_are_refused(rng, name, settings):
    ring = fill(make("ring with sinks"), rng, 200)
    other = fill(kvfast.RingKVCache(LAYERS, HEADS, DIM, **(RINGS["ring with sinks"] | settings)), rng, 30)
    bytes_before, before = stored(other), contents(other)
    with pytest.raises(kvfast.IncompatibleSnapshotError, match=name):
        other.restore(ring.snapshot())
    assert stored(other) == bytes_before and same(other, before)
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="rope"):
        one = kvfast.RingKVCache(LAYERS, HEADS, DIM, 64, rope=kvfast.Rope(10000.0))
        one.restore(kvfast.RingKVCache(LAYERS, HEADS, DIM, 64, rope=kvfast.Rope(5000.0)).snapshot())


def test_sequence_without_room_stays_as_it_was(rng):
    pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=8, block_size=32, dtype="int8")
    sequence, other = fill(pool.new_sequence(), rng, 70), fill(pool.new_sequence(), rng, 40)
    large = fill(make("growing", "int8"), rng, 32 * 7)
    bytes_before, blocks = stored(sequence), sequence.block_indices().tolist()
    with pytest.raises(kvfast.CacheFullError):
        sequence.restore(large.snapshot())
    assert stored(sequence) == bytes_before and sequence.block_indices().tolist() == blocks
    large.truncate(32 * 6)
    kept = sequence.snapshot()  # now its own blocks do not become free
    with pytest.raises(kvfast.CacheFullError):
        sequence.restore(large.snapshot())
    assert stored(sequence) == bytes_before
    del kept
    sequence.restore(large.snapshot())
    assert same(sequence, large) and pool.num_free_blocks == 0 and len(other) == 40


def test_no_pickling_but_copies(rng, kind):
    cache = fill(make(kind), rng, 10)
    snapshot = cache.snapshot()
    for one in (snapshot, cache):
        with pytest.raises(TypeError, match="save"):
            pickle.dumps(one)
    assert copy.copy(snapshot) == copy.deepcopy(snapshot) == snapshot


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_arrays_and_from_arrays(rng, dtype):
    given = [tokens(rng, 130) for _ in range(LAYERS)]
    cache = filled(kvfast.KVCache(LAYERS, HEADS, DIM, dtype=dtype), each=given)
    keys, values = cache.snapshot().to_arrays()
    for layer in range(LAYERS):
        assert keys[layer].shape == values[layer].shape == (130, HEADS * DIM) and keys[layer].dtype == np.float32
        assert np.array_equal(keys[layer].reshape(130, HEADS, DIM), cache.k(layer))
        assert np.array_equal(values[layer].reshape(130, HEADS, DIM), cache.v(layer))
    k_flat, v_flat = ([layer[i].reshape(130, -1) for layer in given] for i in (0, 1))
    snapshot = kvfast.Snapshot.from_arrays(k_flat, v_flat, HEADS, dtype, token_ids=range(130), metadata={"model": "m"})
    assert snapshot == cache.snapshot() and snapshot.token_ids.tolist() == list(range(130)) and snapshot.metadata == {"model": "m"}
    assert same(kvfast.load(snapshot), cache) and kvfast.load(snapshot).max_seq_len is None
    assert kvfast.load(snapshot, max_seq_len=140).max_seq_len == 140
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="holds .* tokens, the cache has room for 5"):
        kvfast.load(snapshot, max_seq_len=5)
    with pytest.raises(ValueError, match="mmap must be False"):
        kvfast.load(snapshot, mmap=True)
    with pytest.raises(ValueError, match="a RingKVCache has no max_seq_len, got 140"):
        kvfast.load(make("ring").snapshot(), max_seq_len=140)
    half = kvfast.Snapshot.from_arrays([k.astype(np.float16) for k in k_flat], v_flat, np.int64(HEADS), dtype)
    assert half.seq_len == 130


def test_to_arrays_of_a_ring_is_what_it_shows(rng):
    ring = fill(make("ring with sinks"), rng, 300)
    keys, _ = ring.snapshot().to_arrays()
    assert keys[0].shape == (95, HEADS * DIM) and np.array_equal(keys[0].reshape(95, HEADS, DIM), ring.k(0))


def test_a_snapshot_is_not_made_by_hand():
    for arguments in (({}, np.ones(3)), (3, kvfast.KVCache(1, 1, 16)._storage)):
        with pytest.raises(TypeError, match="made by the snapshot"):
            kvfast.Snapshot(*arguments)


def test_from_arrays_refuses():
    x = np.ones((4, HEADS * DIM), np.float32)
    make_from = kvfast.Snapshot.from_arrays
    empty = make_from([x[:0]], [x[:0]], HEADS)
    assert empty.seq_len == 0 and len(kvfast.load(empty)) == 0
    mismatch = kvfast.DimensionMismatchError
    for keys, values, heads, error in [
        ([], [], HEADS, mismatch),
        ([x], [x, x], HEADS, mismatch),
        ([x], [x[:3]], HEADS, mismatch),
        ([x, x[:3]], [x, x], HEADS, mismatch),
        ([x[0]], [x[0]], HEADS, mismatch),
        ([x], [x], 3, mismatch),
        ([x[:, :0]], [x[:, :0]], HEADS, mismatch),
        ([x], [x], 0, ValueError),
        ([x], [x], -2, ValueError),
        ([x], [x], 2.0, TypeError),
        ([x], [x], "2", TypeError),
        ([x * np.nan], [x], HEADS, kvfast.NonFiniteInputError),
        ([x.astype(int)], [x], HEADS, TypeError),
        ([np.ones((4, 1200), np.float32)], [np.ones((4, 1200), np.float32)], HEADS, ValueError),
    ]:
        with pytest.raises(error):
            make_from(keys, values, heads)
    for options, error in [({"dtype": "int9"}, ValueError), ({"token_ids": [1, 2]}, ValueError), ({"metadata": {1: "a"}}, TypeError)]:
        with pytest.raises(error):
            make_from([x], [x], HEADS, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_dict_through_npz(rng, kind, dtype):
    for n in (0, 1, 200):
        cache = fill(make(kind, dtype), rng, n)
        file = io.BytesIO()
        np.savez(file, **cache.state_dict())
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            arrays = dict(arrays)
        snapshot = kvfast.Snapshot.from_state_dict(arrays)
        assert snapshot == cache.snapshot() and stored(snapshot) == stored(cache)
        fresh = make(kind, dtype)
        fresh.restore(snapshot)
        assert same(fresh, cache)
        if kind not in ALONE:
            again = type(cache).from_state_dict(arrays)
            assert same(again, cache) and again.max_seq_len == cache.max_seq_len and stored(again) == stored(cache)
            fill(again, rng, 30)
            arrays["layers.0.k.0"][...] = 1  # and has nothing in common with the arrays
            assert n == 0 or kvfast.Snapshot.from_state_dict(arrays) != again.snapshot()
        for other in (kvfast.KVCache, kvfast.RingKVCache, kvfast.Sequence):
            if other is not ALONE.get(kind, type(cache)):
                with pytest.raises(kvfast.IncompatibleSnapshotError, match="state of a"):
                    other.from_state_dict(arrays)


def test_state_dict_keeps_ids_and_metadata(rng):
    snapshot = fill(make("growing"), rng, 20).snapshot(np.arange(20) * 7, {"model": 'Größe \ud800 \0 "x"'})
    arrays = snapshot.state_dict()
    again = kvfast.Snapshot.from_state_dict(arrays)
    assert again.token_ids.tolist() == snapshot.token_ids.tolist() and again.metadata == snapshot.metadata
    assert kvfast.Snapshot.from_state_dict(arrays | {"token_ids": np.arange(20, dtype=np.uint16)}).token_ids.dtype == np.int64
    for wrong in (np.arange(19), np.arange(20.0), np.arange(20).reshape(4, 5), np.array(["a"] * 20)):
        with pytest.raises(kvfast.CorruptFileError, match="token_ids"):
            kvfast.Snapshot.from_state_dict(arrays | {"token_ids": wrong})


def edited(arrays, **fields):
    """A state whose header says something else."""
    header = json.loads(arrays["header"].tobytes()) | fields
    return arrays | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}


def test_wrong_states_are_refused(rng, kind):
    arrays = fill(make(kind), rng, 100).state_dict()
    load = kvfast.Snapshot.from_state_dict
    for name in arrays:
        with pytest.raises(kvfast.CorruptFileError):
            load({key: array for key, array in arrays.items() if key != name})
    k = arrays["layers.0.k.0"]
    for wrong in (
        arrays | {"layers.2.k.0": k},
        arrays | {"extra": k},
        {("x" if name == "layers.1.v.1" else name): a for name, a in arrays.items()},
        arrays | {"layers.0.k.0": k[:, :-1]},
        arrays | {"layers.0.k.0": k[:0]},
        arrays | {"layers.0.k.0": k.reshape(-1)},
        arrays | {"layers.0.k.0": k.astype(np.int8)},
        arrays | {"layers.0.k.0": k.astype(np.float32)},
        arrays | {"layers.0.k.0": np.concatenate((k, k))},
        arrays | {"header": arrays["header"][:-1]},
        arrays | {"header": arrays["header"].astype(int)},
        arrays | {"header": np.zeros(0, np.uint8)},
        {},
        arrays | {"header": np.frombuffer(b"[" * 100000, np.uint8)},
        arrays | {"header": np.frombuffer(b"\xff\xfe", np.uint8)},
        edited(arrays, seq_len=164),
        edited(arrays, seq_len=1 << 39),
        edited(arrays, seq_len=-1),
        edited(arrays, version="1"),
        edited(arrays, block_size=16),
        edited(arrays, block_size=1 << 40),
        edited(arrays, tables=[]),
        edited(arrays, more=1),
    ):
        with pytest.raises(kvfast.CorruptFileError):
            load(wrong)
    for version in (0, 1, 3, 4, 5, 6, 7, 10**400):
        with pytest.raises(kvfast.IncompatibleSnapshotError, match="version"):
            load(edited(arrays, version=version))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("owner", ["nobody", "snapshot", "fork"])
def test_truncate_keeps_the_bytes_of_what_stays(rng, dtype, owner):
    """Also in a block begun that a snapshot or a fork reads.

    Where blocks are encoded as a whole, going back so far that tokens have lost their float rows leaves what their codes
    tell; the same tokens again then make the same bytes.
    """
    for kind in ("growing", "bounded", "sequence"):
        cache, given = make(kind, dtype), [tokens(rng, 100) for _ in range(LAYERS)]

        def extended(cache, n, given=given):
            start = len(cache)
            if n > start:
                filled(cache, each=[(given[layer][0][start:n], given[layer][1][start:n]) for layer in range(LAYERS)])
            return cache

        extended(cache, 100)
        before = stored(cache)
        other = {"nobody": lambda: None, "snapshot": cache.snapshot, "fork": cache.copy}[owner]()
        other_before = None if other is None else stored(other)
        for n in (99, 84, 77, 64, 63, 40, 33, 32, 1, 0):
            rows = [np.array(side(layer))[:n] for layer in range(LAYERS) for side in (cache.k, cache.v)]
            cache.truncate(n)
            now = [np.array(side(layer)) for layer in range(LAYERS) for side in (cache.k, cache.v)]
            assert all(map(np.array_equal, rows, now))
            if n >= 84 or not seals(dtype):
                kept = extended(make(kind, dtype), n)
                assert stored(cache) == stored(kept) and cache.snapshot() == kept.snapshot()
            else:
                assert len(cache.snapshot()) == n and cache.copy().snapshot() == cache.snapshot()
                extended(cache, 100)
                assert stored(cache) == before
            assert other is None or stored(other) == other_before
            cache.truncate(n)
        fill(cache, rng, 110)
        assert other is None or stored(other) == other_before


@pytest.mark.parametrize("dtype", ["int4", CENTRED])
def test_copies_of_a_cache_that_went_back_attend_as_it_does(rng, dtype):
    """They have no float rows at all, not even any memory for them."""
    cache = fill(make("growing", dtype), rng, 300)
    cache.truncate(133)
    for other in (cache.copy(), kvfast.KVCache.from_state_dict(cache.state_dict()), kvfast.load(cache.snapshot())):
        assert same(other, cache)
        assert same(fill(other, np.random.default_rng(1), 40), fill(cache.copy(), np.random.default_rng(1), 40))


def test_dropped_while_another_thread_attends(rng):
    for kind in ("bounded", "sequence", "ring and whole layer"):
        cache = make(kind)
        fill(cache, rng, 390)
        q = rng.standard_normal((300 if kind not in RINGS else 40, 4, DIM)).astype(np.float32)
        expected, dropped, held = cache.attend(0, q), 0, []

        def work(cache=cache, q=q, expected=expected):
            try:
                assert np.array_equal(cache.attend(0, q), expected)
            except RuntimeError as error:
                assert "another thread" in str(error)

        with meanwhile(work):
            while dropped < 200:
                try:
                    held.append(cache.snapshot())
                except RuntimeError:
                    continue
                if len(held) > 3:
                    held.pop(0)
                    dropped += 1
        held.clear()
        gc.collect()
        assert np.array_equal(cache.attend(0, q), expected)
        snapshot = cache.snapshot()
        cache.clear()
        cache.restore(snapshot)
        assert np.array_equal(cache.attend(0, q), expected)


def test_cycle_of_garbage_with_a_snapshot(rng):
    cache = fill(kvfast.KVCache(LAYERS, HEADS, DIM, 512), rng, 512)
    cache.clear()
    own = cache.nbytes
    fill(cache, rng, 512)
    holder = {"snapshot": cache.snapshot()}
    holder["self"] = holder
    del holder
    cache.clear()
    fill(cache, rng, 512)
    gc.collect()
    cache.clear()
    assert cache.nbytes == own


def test_restored_ids_make_blocks_findable(rng):
    ids = rng.integers(0, 1000, 100)
    cache = fill(make("growing", "int8-rotated"), rng, 100)
    for snapshot in (cache.snapshot(ids), kvfast.Snapshot.from_state_dict(cache.snapshot(ids).state_dict())):
        pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=16, block_size=32, dtype="int8-rotated")
        sequence = pool.new_sequence()
        sequence.restore(snapshot)
        found = pool.match_prefix(ids)
        assert len(found) == 96 and pool.num_cached_blocks == 3
        assert np.array_equal(found.k(0), cache.k(0)[:96]) and np.array_equal(found.v(1), cache.v(1)[:96])
        # and the sequence goes on naming its tokens
        fill(sequence, rng, 28, token_ids=np.arange(28))
        assert len(pool.match_prefix([*ids, *range(29)])) == 128
        assert sequence.snapshot().token_ids.tolist() == [*ids, *range(28)]
        sequence.restore(cache.snapshot())  # without ids nothing is known
        assert sequence.snapshot().token_ids is None
        fill(sequence, rng, 60)
        assert pool.num_cached_blocks == 4


def test_empty_snapshot_leaves_ids_possible(rng):
    pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=16, block_size=32, dtype="int8")
    sequence = fill(pool.new_sequence(), rng, 10)
    sequence.restore(make("growing", "int8").snapshot())
    fill(sequence, rng, 40, token_ids=range(40))
    assert len(pool.match_prefix(range(40))) == 32


def test_sequence_snapshot_knows_its_tokens_and_truncates_them(rng):
    pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=16, block_size=32, dtype="int8")
    sequence = fill(pool.new_sequence(), rng, 70, token_ids=range(70))
    snapshot = sequence.snapshot()
    assert snapshot.token_ids.tolist() == list(range(70))
    sequence.truncate(33)
    assert sequence.snapshot().token_ids.tolist() == list(range(33))
    fork = sequence.fork()
    fork.restore(snapshot)
    assert fork.snapshot() == snapshot and fork.block_indices().tolist() != sequence.block_indices().tolist()
    assert sequence.snapshot(token_ids=range(100, 133)).token_ids[0] == 100


def test_snapshots_count_in_the_pool(rng):
    pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=10, block_size=32, dtype="int8")
    sequence = fill(pool.new_sequence(), rng, 100)
    snapshot = sequence.snapshot()
    assert pool.num_free_blocks == 6 and snapshot.nbytes < TABLE_BYTES
    sequence.free()
    assert pool.num_free_blocks == 6 and pool.usage == pytest.approx(0.4) and pool.num_sequences == 0
    with pytest.raises(ValueError, match="still belong"):
        pool.clear()
    other = pool.new_sequence()
    other.restore(snapshot)
    assert other.block_indices().tolist() and pool.num_free_blocks == 6
    fill(other, rng, 1)
    assert pool.num_free_blocks == 5
    other.clear()
    assert pool.num_free_blocks == 6
    with pytest.raises(kvfast.CacheFullError):
        fill(other, rng, 200)
    other.clear()
    del snapshot
    assert pool.num_free_blocks == 10
    pool.clear()


def test_slots_given_before_a_snapshot_or_restore_are_refused(rng):
    pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=10, block_size=32, dtype="int8")
    sequence = fill(pool.new_sequence(), rng, 40)
    slots = pool.slot_mapping([sequence], 3)
    snapshot, before = sequence.snapshot(), stored(sequence)
    with pytest.raises(ValueError, match="ask it for slots again"):
        pool.append_batch(0, *tokens(rng, 3), slots)
    pool.append_batch(0, *tokens(rng, 3), pool.slot_mapping([sequence], 3))
    assert stored(snapshot) == before
    sequence.truncate(40)
    fill(sequence, rng, 3)
    slots = pool.slot_mapping([sequence], 3)
    sequence.restore(snapshot)
    with pytest.raises(ValueError, match="slot"):
        pool.append_batch(0, *tokens(rng, 3), slots)
    assert stored(snapshot) == before == stored(sequence)


def test_salt_of_a_restored_sequence(rng):
    pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=10, block_size=32, dtype="int8")
    sequence = pool.match_prefix(range(70), salt=b"one")
    sequence.restore(fill(make("growing", "int8"), rng, 70).snapshot(range(70)))
    assert len(pool.match_prefix(range(70), salt=b"one")) == 64 and len(pool.match_prefix(range(70))) == 0


def test_small_errors(rng, kind):
    cache = fill(make(kind), rng, 10)
    before = stored(cache)
    for wrong in (None, 3, cache, {"a": 1}, cache.state_dict()):
        with pytest.raises(TypeError, match="restore needs a Snapshot"):
            cache.restore(wrong)
    for ids in (
        *([1, 2], np.arange(11), np.arange(10.0), np.arange(10).reshape(2, 5)),
        *(["a"] * 10, "0123456789", 10, [True] * 10, [None] * 10),
    ):
        with pytest.raises(ValueError, match="token_ids"):
            cache.snapshot(ids)
    for metadata in ({1: "a"}, {"a": 1}, {"a": None}, {"a": b"b"}):
        with pytest.raises(TypeError, match="metadata"):
            cache.snapshot(metadata=metadata)
    for metadata in (3, "text", ["ab", 3]):
        with pytest.raises((TypeError, ValueError)):
            cache.snapshot(metadata=metadata)
    assert stored(cache) == before


def test_properties(rng):
    given = {"model": "a"}
    cache = fill(make("growing", "int4"), rng, 10)
    snapshot = cache.snapshot(range(10), given)
    given["model"] = "b"
    snapshot.metadata["model"] = "c"
    assert snapshot.metadata == {"model": "a"} and cache.snapshot().metadata == {} and cache.snapshot().token_ids is None
    with pytest.raises(ValueError):
        snapshot.token_ids[0] = 1
    with pytest.raises(AttributeError):
        snapshot.anything = 1
    for name in (
        *("num_layers", "num_kv_heads", "head_dim", "entry_size", "block_size", "bytes_per_token", "dtype"),
        *("k_dtype", "v_dtype"),
    ):
        assert getattr(snapshot, name) == getattr(cache, name)
    assert make("growing").snapshot([]).token_ids.tolist() == []


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_ring_far_along(rng, dtype):
    """Positions beyond 2**31, as after weeks of generation."""
    ring = fill(make("ring with sinks", dtype), rng, 500)
    arrays, header = ring.state_dict(), json.loads(ring.state_dict()["header"].tobytes())
    far = 1 << 33
    [place] = header["tables"]
    by = {"skipped_blocks": far // 64, "kept_codes": 0}
    place = {name: number + by.get(name, far) for name, number in place.items()}
    moved = kvfast.RingKVCache.from_state_dict(edited(arrays, seq_len=500 + far, tables=[place]))
    assert len(moved) == 500 + far and moved.positions(0)[-1] == 499 + far
    assert np.array_equal(moved.k(0), ring.k(0))
    more = [tokens(rng, 200) for _ in range(LAYERS)]
    for cache in (ring, moved):
        filled(cache, each=more)
    assert same(contents(moved)[1:], contents(ring)[1:])
    # Distances are those of integers: float32 does not hold all positions beyond 2**24.
    slopes = np.array([0.5, 0.1, 0.01, 1.0], np.float32)
    for count in (1, 5, 10):
        q = rng.standard_normal((count, 4, DIM)).astype(np.float32)
        options = {"alibi_slopes": slopes, "num_sink_tokens": 0}
        assert np.array_equal(moved.attend(0, q, **options), ring.attend(0, q, **options))
    snapshot = moved.snapshot()
    fill(moved, rng, 300)
    moved.restore(snapshot)
    assert same(contents(moved)[1:], contents(ring)[1:])


@pytest.mark.parametrize("kind", ["contiguous", "ring", "sequence"])
def test_restore_is_no_dearer_with_many_layers(rng, kind):
    """It shares a table: what it compares before is not spelt out layer by layer, which took 200 times as long as a snapshot at 32."""
    from kvfast.tools.cli.bench.measure import interleaved

    formats = [kvfast.KVFormat("int8", rotation="kv")] * 64
    cache = {
        "contiguous": lambda: kvfast.KVCache(64, 1, 16, dtype=formats),
        "ring": lambda: kvfast.RingKVCache(64, 1, 16, 256, dtype=formats),
        "sequence": lambda: kvfast.PagedKVCache(64, 1, 16, 32, dtype=formats).new_sequence(),
    }[kind]()
    k, v = rng.standard_normal((2, 100, 1, 16), np.float32)
    filled(cache, k, v)
    snapshot = cache.snapshot()
    best = interleaved([cache.snapshot, lambda: cache.restore(snapshot)], 300).min(0)
    assert best[1] < 15 * best[0], best


def test_bytes_are_those_of_a_file(rng, tmp_path):
    for kind in KINDS:
        cache = fill(make(kind), rng, 100)
        snapshot = cache.snapshot(np.arange(100), {"model": "m"})
        data = snapshot.to_bytes()
        snapshot.save(tmp_path / "one")
        assert isinstance(data, bytes) and len(data) == (tmp_path / "one").stat().st_size
        assert kvfast.Snapshot.from_bytes((tmp_path / "one").read_bytes()) == snapshot
        (tmp_path / "two").write_bytes(data)
        assert kvfast.Snapshot.load(tmp_path / "two", mmap=True) == snapshot
        for given in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
            other = kvfast.Snapshot.from_bytes(given)
            assert other == snapshot and other.metadata == {"model": "m"} and np.array_equal(other.token_ids, np.arange(100))


def test_damaged_bytes(rng):
    snapshot = fill(make("growing"), rng, 100).snapshot()
    data = snapshot.to_bytes()
    for at in [0, 5, 8, 100, 4090, 5000, len(data) - 1, *rng.integers(0, len(data), 60)]:
        damaged = bytearray(data)
        damaged[at] ^= 0x41
        try:
            found = kvfast.Snapshot.from_bytes(damaged)
        except kvfast.CorruptFileError:
            continue
        assert data[at] == ord(" ") and found == snapshot  # of the padding, which tells nothing
    for cut in (0, 7, 8, 4000, len(data) - 1):
        with pytest.raises(kvfast.CorruptFileError):
            kvfast.Snapshot.from_bytes(data[:cut])
    with pytest.raises(kvfast.CorruptFileError):
        kvfast.Snapshot.from_bytes(data + b"\0")
    for wrong in (None, 5, "text", [1, 2]):
        with pytest.raises(TypeError, match="from bytes, got"):
            kvfast.Snapshot.from_bytes(wrong)


@pytest.mark.parametrize(
    "source, target", [("float32", "int8"), ("int4", "float16"), ("int8", "int4"), ("k8v4", "int4"), ("int8", "int8")]
)
@pytest.mark.parametrize("kind", ["growing", "bounded", "sequence", "ring and whole layer", "ring that rotates"])
def test_a_snapshot_of_another_format_is_converted_if_asked(rng, kind, source, target):
    given, cache = fill(make(kind, source), rng, 30), fill(make(kind, target), rng, 7)
    snapshot, before = given.snapshot(np.arange(30), {"a": "b"}), contents(cache)
    if source != target:
        with pytest.raises(kvfast.IncompatibleSnapshotError, match="the snapshot has dtype"):
            cache.restore(snapshot)
        assert same(contents(cache), before)
    cache.restore(snapshot, convert=True)
    expected = filled(make(kind, target), each=[(given.k(layer), given.v(layer)) for layer in range(LAYERS)])
    if source != target:
        assert same(cache, expected)
    else:
        assert same(cache, given)
    assert cache.dtype == expected.dtype
    if kind in ALONE:
        assert same(cache.pool.restore(snapshot, convert=True), cache)


def test_what_cannot_be_converted(rng):
    ring, other = fill(make("ring", "int8"), rng, 200), fill(make("ring", "int4"), rng, 10)
    before = contents(other)
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="all tokens to be converted, but layer 0 has dropped"):
        other.restore(ring.snapshot(), convert=True)
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="kind"):
        other.restore(fill(make("growing", "int8"), rng, 10).snapshot(), convert=True)
    assert same(contents(other), before)
    large = filled(kvfast.KVCache(1, 1, 16, dtype="float32"), *np.full((2, 3, 1, 16), 1e6, np.float32))
    cache = kvfast.KVCache(1, 1, 16, dtype="float16")
    with pytest.raises(kvfast.NonFiniteInputError):
        cache.restore(large.snapshot(), convert=True)
    assert len(cache) == 0


def test_latent_rows_are_converted(rng):
    for rope_dim in (0, 8, 32):
        rows = rng.standard_normal((40, 32 + rope_dim)).astype(np.float32)
        given, cache = kvfast.MLAKVCache(1, 32, rope_dim, dtype="float32"), kvfast.MLAKVCache(1, 32, rope_dim, dtype="int8")
        filled(given, rows)
        cache.restore(given.snapshot(), convert=True)
        assert np.abs(cache.get_latent(0) - rows).max() < 0.05
