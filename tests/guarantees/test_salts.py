"""A tenant's tokens are found under its salt alone, whatever way they went: stores, snapshots, files, forks, splices."""

import numpy as np
import pytest
from cache_kinds import filled

import kvfast

pytest.importorskip("safetensors")

IDS, MORE = np.arange(200), np.arange(330)
ALICE, BOB = b"alice", b"bob"
POOLS = {
    "int8": {},
    "k8v4": {"block_size": 16},
    "float32": {"block_size": 128},
    "int4": {},
    "a window": {"dtype": "int8", "sliding_window": 64},
    "a long window": {"dtype": "int8", "sliding_window": 512, "block_size": 64},
}


def pool_of(name="int8", prompts=None, num_blocks=64):
    pool = kvfast.PagedKVCache(1, 2, 32, num_blocks, **{"dtype": name} | POOLS[name])
    pool.use_prompt_cache(prompts, "a model")
    return pool


def compute(sequence, ids):
    """The tokens of a prompt that a sequence does not have, in steps so small that a window drops none before they are known."""
    rows = np.random.default_rng(0).standard_normal((2, len(ids), 2, 32), np.float32)
    for start in range(len(sequence), len(ids), 10):
        step = ids[start : start + 10]
        filled(sequence, *rows[:, start : start + 10], token_ids=step)
    return sequence


def found(pool, salt=b"", ids=MORE):
    with pool.match_prefix(ids, salt) as sequence:
        return len(sequence)


def hidden_from_others(*pools):
    return all(found(pool, salt) == 0 for pool in pools for salt in (b"", BOB, b"alic", b"alice\0"))


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("salt", [ALICE, b""])
def test_what_comes_from_a_store(name, salt):
    """Restored in a new process, evicted and restored again, gone on with, freed: found under the salt alone, in pool and store."""
    prompts = kvfast.PromptCache(f"memory://salts-{name}-{salt}")
    compute(pool_of(name, prompts).match_prefix(IDS, salt), IDS).free()
    if "window" in name:  # no chunk is in a store: only an end brings it back
        prompts.save(compute(pool_of(name).match_prefix(IDS, salt), IDS), IDS, "a model")
    for _ in range(2):
        pool = pool_of(name, prompts)
        with pool.match_prefix(IDS, salt) as sequence:
            assert len(sequence) >= 64
            pool.use_prompt_cache(None)
            assert found(pool, salt) >= (0 if name == "a window" else 64)  # of which its first known block has dropped a part
            assert not salt or hidden_from_others(pool)
            pool.use_prompt_cache(prompts, "a model")
            compute(sequence, MORE)
        assert not salt or hidden_from_others(pool, pool_of(name, prompts))
        for i in range(1, 8):  # evicted
            with pool.new_sequence() as other:
                compute(other, MORE + 1000 * i)
        assert not salt or hidden_from_others(pool)
    assert prompts.stats.num_hits


def test_a_store_is_asked_under_the_salt_of_the_sequence():
    """Direct calls take the sequence's salt; what they find under another goes under the sequence's own."""
    prompts = kvfast.PromptCache("memory://direct")
    pool = pool_of()
    sequence = compute(pool.match_prefix(IDS, ALICE), IDS)
    assert prompts.save(sequence, IDS, "a model")
    assert prompts.restore(pool_of().new_sequence(), IDS, "a model") == 0
    for other in (pool_of(), pool_of("int8", prompts)):
        with other.match_prefix(IDS[:1], ALICE) as again:
            assert prompts.restore(again, IDS, "a model") == 199
            assert found(other, ALICE) >= 128 and hidden_from_others(other)
    for restore in (prompts.restore, lambda *arguments, **options: len(prompts.extended(*arguments, **options))):
        for size in (32, 64):  # copied, and written to its blocks
            other = kvfast.PagedKVCache(1, 2, 32, 64, size, dtype="int8")
            again = other.new_sequence()
            other.use_prompt_cache(prompts, "a model")
            assert restore(again, IDS, "a model", salt=ALICE) >= 128
            assert hidden_from_others(other)
    public = compute(pool.new_sequence(), IDS)
    prompts.save(public, IDS, "a model")
    other = pool_of("k8v4") if public.block_size == 16 else pool_of()
    mine = other.match_prefix(IDS[:1], ALICE)
    assert len(prompts.extended(mine, IDS, "a model", salt=b"")) >= 128 and hidden_from_others(other)


@pytest.mark.parametrize("name", ["int8", "int4", "a window"])
@pytest.mark.parametrize("way", ["snapshot", "truncated", "convert", "into a sequence", "fork", "fork of fork", "spliced"])
def test_what_comes_from_a_snapshot(name, way):
    source = compute(pool_of(name).match_prefix(IDS, ALICE), IDS)
    snapshot, pool = source.snapshot(), pool_of(name)
    if way == "truncated":
        snapshot = snapshot.truncated(190)
    if way == "convert":
        if name == "a window":
            pytest.skip("a ring that dropped tokens is not converted")
        pool = kvfast.PagedKVCache(1, 2, 32, 64, dtype="float16")
    if way == "spliced":
        if name == "a window":
            pytest.skip("a ring is not spliced")
        sequence = pool.new_sequence()
        sequence.splice(snapshot, rope=None)
    elif way == "into a sequence":
        sequence = pool.new_sequence()
        sequence.restore(snapshot)
    else:
        sequence = pool.restore(snapshot, convert=way == "convert")
    for _ in range(way.count("fork")):
        sequence = sequence.fork()
    compute(sequence, MORE)
    assert found(pool, ALICE) >= 128 and hidden_from_others(pool)
    again = pool_of(name).restore(sequence.snapshot(), convert=way == "convert")
    assert found(again.pool, ALICE) >= (0 if name == "a window" else 128) and hidden_from_others(again.pool)
    # An object that is used again for another tenant's tokens keeps nothing of the salt.
    sequence.clear()
    compute(sequence, IDS + 1000)
    assert found(pool, b"", IDS + 1000) >= 128 and found(pool, ALICE, IDS + 1000) == 0


def test_a_sequence_with_a_salt_keeps_it():
    """Whatever is restored to it: what follows is its own."""
    pool = pool_of()
    theirs, plain = (compute(pool_of().match_prefix(IDS, salt), IDS).snapshot() for salt in (BOB, b""))
    for snapshot in (theirs, plain):
        sequence = pool.new_sequence(salt=ALICE)
        sequence.restore(snapshot)
        compute(sequence, MORE)
        assert hidden_from_others(pool) and found(pool, ALICE) > 250
        sequence.free()
        pool.clear()


@pytest.mark.parametrize("way", ["file", "bytes", "state"])
def test_what_comes_from_a_file(way, tmp_path):
    """A file does not tell the salt, so that its tokens are found by nobody before somebody tells it."""

    def again(snapshot):
        if way == "file":
            snapshot.save(tmp_path / "cache")
            return kvfast.Snapshot.load(tmp_path / "cache")
        return (
            kvfast.Snapshot.from_bytes(snapshot.to_bytes())
            if way == "bytes"
            else kvfast.Snapshot.from_state_dict(snapshot.state_dict())
        )

    snapshot = again(compute(pool_of().match_prefix(IDS, ALICE), IDS).snapshot())
    assert ALICE not in snapshot.to_bytes() and np.array_equal(snapshot.token_ids, IDS)
    for i, one in enumerate((snapshot, again(snapshot), snapshot.truncated(190))):
        prompts = kvfast.PromptCache(f"memory://files-{way}-{i}")
        pool = pool_of("int8", prompts)
        with pool.restore(one) as sequence:
            compute(sequence, MORE)
            assert found(pool, ALICE) == 0 and hidden_from_others(pool)
            with pytest.raises(ValueError, match="pass the salt"):
                prompts.save(sequence, MORE, "a model")
        assert prompts.stats.bytes_written == 0
        with pool.restore(one, salt=ALICE) as sequence:
            assert found(pool, ALICE) >= 128 and hidden_from_others(pool)
    plain = again(compute(pool_of().new_sequence(), IDS).snapshot())
    pool = pool_of()
    pool.restore(plain)
    assert found(pool) >= 128


def test_no_message_shows_a_salt():
    pool, prompts = pool_of(), kvfast.PromptCache("memory://messages")
    for call in (
        pool.match_prefix,
        lambda ids, salt: pool.new_sequence(salt=salt),
        lambda ids, salt: prompts.restore(pool.new_sequence(), ids, salt=salt),
    ):
        for wrong in ("secret" * 3, b"secret" * 11):
            with pytest.raises((TypeError, ValueError), match="salt must be") as raised:
                call(IDS, wrong)
            assert "secret" not in str(raised.value)
