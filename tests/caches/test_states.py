"""Recurrent states next to keys and values: checkpoints in every cache, against a dict of what was given."""

import copy
import json

import numpy as np
import pytest
from cache_kinds import tokens
from dict_store import DictStore
from file_parts import fields, with_fields, with_settings
from selection import exhaustive

import kvfast

KINDS = ["growing", "ring", "latent", "sequence", "latent sequence"]
ROOM = 1 << 20
NBYTES = 256 + 64  # of the checkpoint of `states`
MISSING = kvfast.MissingCheckpointError


def make(kind, max_state_bytes=ROOM, **options):
    if kind == "growing":
        return kvfast.KVCache(2, 2, 16, max_state_bytes=max_state_bytes, **options)
    if kind == "ring":
        return kvfast.RingKVCache(2, 2, 16, [40, None], rollback=1000, max_state_bytes=max_state_bytes, **options)
    if kind == "latent":
        return kvfast.MLAKVCache(2, 16, 16, max_state_bytes=max_state_bytes, **options)
    if kind == "sequence":
        return kvfast.PagedKVCache(2, 2, 16, 64, max_state_bytes=max_state_bytes, **options).new_sequence()
    return kvfast.PagedMLAKVCache(2, 16, 16, 64, max_state_bytes=max_state_bytes, **options).new_sequence()


def fill(cache, rng, n, checkpoint=True, **known):
    for layer in range(2):
        k, v = tokens(rng, n, 16)
        cache.append(layer, *([k[:, 0].repeat(2, 1)] if hasattr(cache, "get_latent") else [k, v]))
    cache.advance(n, **known)
    if checkpoint:
        cache.add_checkpoint(states(rng))
    return cache


def states(rng):
    return {"a.recurrent": rng.standard_normal((4, 16)).astype(np.float32), "b.conv": rng.integers(0, 9, (1, 7), np.int32)}


def same(got, given):
    return got.keys() == given.keys() and all(np.array_equal(got[name], given[name]) for name in given)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=exhaustive) for seed in range(4, 40))])
def test_any_history(kind, seed):
    """What a cache has after appends, rollbacks, forks, snapshots and files is what it was given at those positions."""
    rng = np.random.default_rng(seed)
    cache, given, kept = make(kind), {}, []
    for _ in range(60):
        step = rng.choice([*["piece"] * 10, *["truncate"] * 3, "fork", "snapshot", "restore", "again", "clear"])
        if step == "piece" and len(cache) < 800:
            fill(cache, rng, int(rng.integers(1, 40)), False)
            if rng.random() < 0.7:
                given[len(cache)] = states(rng)
                cache.add_checkpoint(given[len(cache)])
        elif step == "truncate":
            n = int(rng.integers(0, len(cache) + 1))
            if n in (0, len(cache), *given):
                cache.truncate(n)
                given = {at: one for at, one in given.items() if at <= n}
            else:
                with pytest.raises(MISSING) as caught:
                    cache.truncate(n)
                assert caught.value.nearest == max((at for at in given if at < n), default=0)
        elif step == "fork":
            other = cache.fork()
            fill(cache, rng, 5)
            cache = other
        elif step == "snapshot":
            kept.append((cache.snapshot(), dict(given)))
        elif step == "restore" and kept:
            snapshot, known = kept[rng.integers(len(kept))]
            cache.restore(snapshot)
            given = dict(known)
        elif step == "again":
            snapshot = kvfast.Snapshot.from_state_dict(cache.state_dict())
            assert snapshot == cache.snapshot()
            cache = make(kind)
            cache.restore(snapshot)
        elif step == "clear":
            cache.clear()
            given = {}
        assert cache.checkpoints == tuple(sorted(given))
        for at, one in given.items():
            assert same(cache.states_at(at), one)
    for snapshot, known in kept:
        assert snapshot.checkpoints == tuple(sorted(known)) and all(same(snapshot.states_at(at), one) for at, one in known.items())


def test_states_are_copied_and_read_only(kind, rng):
    cache, given = fill(make(kind), rng, 10, False), states(rng)
    cache.add_checkpoint(given)
    before = copy.deepcopy(given)
    given["a.recurrent"][:] = 0
    seen = cache.states_at()
    assert same(seen, before)
    with pytest.raises(ValueError, match="read-only"):
        seen["a.recurrent"][0] = 1
    cache.add_checkpoint(given)  # in the place of the first
    assert cache.checkpoints == (10,) and same(cache.states_at(10), given) and same(seen, before)


def test_the_newest_tokens_keep_the_most(rng):
    cache = make("growing", 8 * NBYTES)
    for count in range(1, 200):
        fill(cache, rng, 4)
        at = cache.checkpoints
        assert at[-1] == len(cache) and len(at) == min(count, 8) and cache.states_at(at[0])
        assert cache._storage.nbytes_states == len(at) * NBYTES
    gaps = np.diff((0, *at)).tolist()
    assert gaps[-1] == 4 and gaps[0] >= 200 and max(gaps) == gaps[0]
    assert make("growing", 1).max_state_bytes == 1


def test_sizes_count_what_is_held_once(rng):
    cache = fill(make("growing"), rng, 20)
    before, snapshot = cache.nbytes, cache.snapshot()
    cache.add_checkpoint(states(rng))
    fill(cache, rng, 10)
    assert cache.nbytes == before + NBYTES and cache.nbytes_used > NBYTES and snapshot.nbytes > NBYTES
    alone = snapshot.nbytes
    other = kvfast.Snapshot.truncated(snapshot, 20)
    assert snapshot.nbytes <= alone - NBYTES  # both have the checkpoint
    del other
    assert "30 tokens with 2 checkpoints" in repr(cache) and "checkpoint" not in repr(kvfast.KVCache(1, 1, 16))


@pytest.mark.parametrize("kind", ["growing", "latent"])
def test_files(kind, rng, tmp_path):
    pytest.importorskip("safetensors")
    cache, path = fill(fill(make(kind, 5 * NBYTES), rng, 70), rng, 33), tmp_path / "cache"
    cache.save(path, token_ids=np.arange(103))
    for mmap in (False, True):
        loaded = kvfast.load(path, mmap=mmap)
        assert loaded.checkpoints == (70, 103) and loaded.max_state_bytes == 5 * NBYTES and loaded.snapshot() == cache.snapshot()
        assert all(same(loaded.states_at(at), cache.states_at(at)) for at in (70, 103))
        loaded.truncate(70)
        fill(loaded, rng, 5)
    assert kvfast.Snapshot.from_bytes(cache.snapshot().to_bytes()) == cache.snapshot()
    other = kvfast.load(path)
    other.add_checkpoint(states(rng))
    assert other.snapshot() != cache.snapshot()
    make(kind).save(path)
    assert kvfast.load(path).checkpoints == () and kvfast.load(path).max_state_bytes == ROOM


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoints": [33, 33]},
        {"checkpoints": [70, 33]},
        {"checkpoints": [33, 104]},
        {"checkpoints": [0, 33]},
        {"checkpoints": [33]},
        {"checkpoints": [33, 70, 103]},
        {"checkpoints": []},
        {"checkpoints": [33, True]},
        {"states": {}},
        {"states": {"a": {"shape": [4, 16], "dtype": "object"}}},
        {"states": {"a": {"shape": [4, 16], "dtype": "float32", "more": 1}}},
        {"states": {"a": {"shape": [1 << 40, 1 << 40], "dtype": "float32"}}},
        {"states": {"a": {"shape": [-1], "dtype": "float32"}}},
        {"states": {"a": {"shape": [1] * 9, "dtype": "float32"}}},
        {"states": {"a": {"shape": [2, 16], "dtype": "float32"}}},
        {"states": {"a" * 300: {"shape": [4, 16], "dtype": "float32"}}},
        {"states": [1]},
        {"max_state_bytes": 0},
        {"max_state_bytes": 1.5},
    ],
)
def test_files_that_tell_other_states(change, rng, tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "cache"
    fill(fill(make("growing"), rng, 33), rng, 70).save(path)
    data = path.read_bytes()
    path.write_bytes(with_fields(data, **change))
    with pytest.raises(kvfast.CorruptFileError):
        kvfast.load(path)
    for settings in ({"has_states": False}, {"has_states": 1}):
        path.write_bytes(with_settings(data, **settings))
        with pytest.raises(kvfast.CorruptFileError):
            kvfast.load(path)
    without = fields(data)
    del without["settings"]["has_states"]
    path.write_bytes(with_fields(data, settings=without["settings"]))
    with pytest.raises(kvfast.CorruptFileError, match="with 2 checkpoints"):
        kvfast.load(path)


def test_every_dtype_and_shape(rng):
    given = {
        name: rng.integers(0, 2, shape).astype(name)
        for name, shape in (
            ("bool", (3,)),
            ("int8", ()),
            ("uint16", (0, 4)),
            ("float16", (2, 3, 4)),
            ("float64", (1,) * 8),
            ("complex64", (5,)),
        )
    }
    given["strided"] = rng.standard_normal((6, 8)).astype(np.float32)[::2, ::-1].T
    given["infinite"] = np.array([np.inf, -np.inf, np.nan], np.float32)
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    given["bfloat16"] = np.array([1.5, -2], bfloat16)
    cache = fill(make("growing"), rng, 5, False)
    cache.add_checkpoint(given)
    for one in (cache, kvfast.KVCache.from_state_dict(cache.state_dict())):
        got = one.states_at()
        for name, array in given.items():
            assert got[name].dtype == array.dtype and got[name].tobytes() == array.tobytes() and got[name].shape == array.shape


# --- refusals ----------------------------------------------------------------------------------


def test_branches_of_drafts_are_kept_before_they_are_counted(kind, rng):
    cache = fill(fill(make(kind), rng, 30), rng, 20)
    for layer in range(2):
        k, v = tokens(rng, 6, 16)
        cache.append(layer, *([k[:, 0].repeat(2, 1)] if hasattr(cache, "get_latent") else [k, v]))
    with pytest.raises(MISSING):
        cache.truncate(40, keep=[3])
    with pytest.raises(MISSING):  # a counted token would move
        cache.truncate(30, keep=[2, 3])
    assert cache.checkpoints == (30, 50) and cache.layer_length(0) == 56
    cache.truncate(50, keep=[1, 4])
    assert cache.checkpoints == (30, 50) and len(cache) == 50 and cache.layer_length(0) == 52
    cache.advance(2)
    cache.truncate(30, keep=[])
    assert cache.checkpoints == (30,) and len(cache) == 30


def test_what_is_no_state_is_refused_and_leaves_nothing(kind, rng):
    cache = fill(fill(make(kind), rng, 10), rng, 10, False)
    good, before = states(rng), cache.snapshot()
    for wrong, error, match in (
        ({}, TypeError, "mapping of 1 to"),
        ([1], TypeError, "mapping of 1 to"),
        (None, TypeError, "got None"),
        ({1: np.ones(3)}, TypeError, "names of at most 256"),
        ({"a" * 257: np.ones(3)}, TypeError, "names of at most 256"),
        ({"a": "text"}, TypeError, "must be an array of numbers"),
        ({"a": object()}, TypeError, "must be an array of numbers"),
        ({"a": np.ones(3, ">f4")}, TypeError, "must be an array of numbers"),
        ({"a": np.ones((1,) * 9)}, TypeError, "at most 8 dimensions"),
        (
            good | {"a.recurrent": good["a.recurrent"][:3]},
            kvfast.DimensionMismatchError,
            r"must be float32 \(4, 16\).* got float32 \(3, 16\)",
        ),
        (good | {"a.recurrent": good["a.recurrent"].astype(np.float16)}, kvfast.DimensionMismatchError, "got float16"),
        ({"b.conv": good["b.conv"]}, kvfast.DimensionMismatchError, "'a.recurrent' must be .* got absent"),
        (good | {"more": good["b.conv"]}, kvfast.DimensionMismatchError, "'more' must be absent"),
    ):
        with pytest.raises(error, match=match):
            cache.add_checkpoint(wrong)
        assert cache.snapshot() == before and cache.checkpoints == (10,)
    cache.add_checkpoint(good)
    for n in (5, 15, 21, 1 << 40):
        with pytest.raises(MISSING):
            cache.states_at(n)
    with pytest.raises(ValueError, match="n must be at least 0"):
        cache.states_at(-1)


def test_a_checkpoint_needs_counted_tokens_and_room(rng):
    cache = make("growing", NBYTES - 1)
    with pytest.raises(ValueError, match="which has 0 complete ones"):
        cache.add_checkpoint(states(rng))
    fill(cache, rng, 10, False)
    with pytest.raises(ValueError, match=f"max_state_bytes must be at least the {NBYTES} bytes of one checkpoint, got {NBYTES - 1}"):
        cache.add_checkpoint(states(rng))
    with pytest.raises(ValueError, match=f"max_state_bytes must be at least the {NBYTES} bytes"):
        cache.restore(fill(make("growing"), rng, 10).snapshot())
    assert len(cache) == 10 and cache.checkpoints == ()
    whole = fill(make("growing"), rng, 10, False)
    for layer in range(2):
        whole.append(layer, *tokens(rng, 3, 16))
    with pytest.raises(ValueError, match=r"3 more were never counted, call advance\(3\)"):
        whole.add_checkpoint(states(rng))
    for wrong in (0, -1, 1.5, "1"):
        with pytest.raises((TypeError, ValueError), match="max_state_bytes"):
            make("growing", wrong)


def test_caches_with_and_without_states_do_not_mix(rng):
    plain, cache = kvfast.KVCache(2, 2, 16), fill(make("growing"), rng, 10)
    with pytest.raises(ValueError, match="make it with max_state_bytes"):
        plain.add_checkpoint(states(rng))
    with pytest.raises(ValueError, match="made without max_state_bytes"):
        plain.states_at()
    assert plain.checkpoints == () and plain.max_state_bytes is None
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="is of a cache with recurrent states"):
        plain.restore(cache.snapshot())
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="is of a cache without recurrent states"):
        cache.restore(plain.snapshot())
    for call in (lambda: cache.splice(cache.snapshot(), rope=None), lambda: cache.drop(2, 4, rope=None)):
        with pytest.raises(ValueError, match="with recurrent states cannot be spliced"):
            call()
    assert cache.checkpoints == (10,) and len(cache) == 10


def test_other_formats_take_the_states_along(rng):
    cache, other = fill(fill(make("growing"), rng, 30), rng, 20), make("growing", dtype="int8")
    other.restore(cache.snapshot(), convert=True)
    assert other.checkpoints == (30, 50) and same(other.states_at(30), cache.states_at(30))
    sequence = make("sequence")
    sequence.restore(cache.snapshot())
    assert sequence.checkpoints == (30, 50)
    assert kvfast.load(cache.snapshot()).checkpoints == (30, 50)
    short = cache.snapshot().truncated(30)
    assert short.checkpoints == (30,) and len(short) == 30
    with pytest.raises(MISSING):
        cache.snapshot().truncated(31)


# --- pools and stores --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_known_prefix_ends_where_there_are_states(rng, dtype):
    pool, ids = kvfast.PagedKVCache(2, 2, 16, 64, 64, dtype, max_state_bytes=ROOM), np.arange(400)
    sequence = pool.new_sequence()
    for start in range(0, 320, 64):
        fill(sequence, rng, 64, start != 192, token_ids=ids[start : start + 64])
    given = {n: sequence.states_at(n) for n in (64, 128, 192, 320)}
    for freed in (False, True):
        for length, found in ((400, 320), (320, 192), (257, 192), (193, 192), (192, 128), (64, 0)):
            match = pool.match_prefix(ids[:length])
            assert len(match) == found == match.num_cached_tokens and match.checkpoints == ((found,) if found else ())
            assert not found or same(match.states_at(), given[found])
            match.free()
        assert len(pool.match_prefix(ids[7:])) == 0
        if not freed:
            sequence.free()
    pool.clear()
    assert len(pool.match_prefix(ids)) == 0


def test_pools_keep_a_bounded_number_of_states(rng):
    pool, ids = kvfast.PagedKVCache(2, 2, 16, 64, 64, "int8", max_state_bytes=2 * NBYTES), np.arange(400)
    sequence = pool.new_sequence()
    for start in range(0, 256, 64):
        fill(sequence, rng, 64, token_ids=ids[start : start + 64])
    assert len(pool._known_states._found) == 2 and len(sequence.checkpoints) == 2
    match = pool.match_prefix(ids)
    assert len(match) == 256
    match.free()
    assert [len(pool.match_prefix(ids[:n])) for n in (200, 192)] == [192, 0]  # those after 64 and 128 tokens made room
    sequence.free()
    with pytest.raises(ValueError, match="freed"):
        sequence.add_checkpoint(states(rng))


def test_prompt_stores_go_to_the_last_checkpoint(kind, rng):
    store, ids = DictStore(), np.arange(400)
    prompts = kvfast.PromptCache(store, chunk_tokens=64)
    cache = make(kind)
    for start in range(0, 320, 64):
        fill(cache, rng, 64, start not in (64, 256))
    fill(cache, rng, 30)
    assert prompts.save(cache, ids[:350], "model")
    whole = kind != "ring"  # in which some layers are in the end of a prompt alone
    for length, found in ((400, 350), (351, 350), (350, 256), (300, 256), (256, 192), (190, 64), (64, 0)):
        other = make(kind)
        found = found if whole or found == 350 else 0
        assert prompts.restore(other, ids[:length], "model") == found == len(other)
        assert other.checkpoints == ((found,) if found else ())
        if found:
            assert same(other.states_at(), cache.states_at(found))
            fill(other, rng, 10)
    assert prompts.restore(make(kind), ids[::-1].copy(), "model") == 0
    written = len(store.values)
    assert prompts.save(cache, ids[:350], "model") and len(store.values) == written


@pytest.mark.filterwarnings("ignore:a value of dict cannot be used")
def test_states_that_are_lost_or_damaged_in_a_store(rng):
    store, ids = DictStore(), np.arange(400)
    prompts, cache = kvfast.PromptCache(store, chunk_tokens=64), make("growing")
    for _ in range(5):
        fill(cache, rng, 64)
    prompts.save(cache, ids[:320], "model")
    for found in (320, 256, 192, 128, 64, 0):
        other = make("growing")
        assert prompts.restore(other, ids, "model") == found and len(other.checkpoints) == (found > 0)
        if found:
            # The values of states, the newest first: one is gone, another is not what was written.
            (key,) = [one for one in store.values if one.startswith("s-") and _num_tokens(store, one) == found]
            if found % 128:
                del store.values[key]
            else:
                store.values[key] = store.values[key][:-1] + bytes([store.values[key][-1] ^ 1])
    prompts.save(cache, ids[:320], "model")
    assert prompts.restore(make("growing"), ids, "model") == 320
    (key,) = [one for one in store.values if one.startswith("c-") and _num_tokens(store, one) == 64]
    del store.values[key]
    assert prompts.restore(make("growing"), ids, "model") == 0


def _num_tokens(store, key):
    from kvfast.prompts.envelope import HEADER_BYTES, num_tokens_of

    return num_tokens_of(store.values[key][:HEADER_BYTES])


def test_forged_states_in_a_store(rng):
    from kvfast.prompts.payloads import states_of

    fields_of = {"a": {"shape": [4], "dtype": "float32"}}
    for fields_, data in (
        (fields_of, b"\0" * 63),
        (fields_of, b"\0" * 65),
        (fields_of | {"b": {"shape": [1 << 50], "dtype": "int8"}}, b"\0" * 64),
        ({"a": {"shape": [4], "dtype": "O"}}, b"\0" * 64),
        ({}, b""),
        ([], b""),
    ):
        header = json.dumps(fields_).encode()
        for count in (len(header), 0, 1 << 31):
            with pytest.raises(kvfast.CorruptFileError, match="it holds no states"):
                states_of(memoryview(count.to_bytes(4, "little") + header + data), False)
    header = json.dumps(fields_of).encode()
    good = states_of(memoryview(len(header).to_bytes(4, "little") + header + b"\1" * 64), False)
    assert good.forms.unpacked(good.data)["a"].shape == (4,)
