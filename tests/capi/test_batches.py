"""Pools, sequences, snapshots and batches of `kvfast.h`: the bits of Python, who owns what, and threads."""

import gc
import re
import sys
from functools import partial

import numpy as np
import pytest
from cache_kinds import filled
from in_threads import meanwhile, together

import kvfast

INVALID, FULL, BUSY, ERROR = -1, -4, -5, -8

POOLS = {
    "int8-rotated": lambda: kvfast.PagedKVCache(2, 2, 64, num_blocks=100, block_size=16, dtype="int8-rotated"),
    "int4": lambda: kvfast.PagedKVCache(2, 2, 64, num_blocks=24),
    "float32": lambda: kvfast.PagedKVCache(2, 2, 64, num_blocks=60, block_size=16, dtype="float32"),
    "narrower values": lambda: kvfast.PagedKVCache(2, 2, 64, num_blocks=24, dtype="k8v4-rotated", v_head_dim=40),
    "window": lambda: kvfast.PagedKVCache(
        2, 2, 64, num_blocks=24, dtype="int8-rotated", sliding_window=40, num_sink_tokens=4, rollback=8
    ),
    "latent": lambda: kvfast.PagedMLAKVCache(2, 48, 16, num_blocks=24),
}


class Pair:
    """The same sequences in two pools, one used from C and one from Python."""

    def __init__(self, c, kind, count):
        self.c, self.pools = c, (POOLS[kind](), POOLS[kind]())
        self.sequences = [[pool.new_sequence() for _ in range(count)] for pool in self.pools]
        self.handle, self.handles = c.Pool(self.pools[0]), list(map(c.Sequence.of, self.sequences[0]))
        self.latent = kind == "latent"

    def step(self, rng, counts, no_cascade=False):
        """The next tokens of the sequences, as many as `counts` says of each; returns both outputs."""
        used = [i for i, count in enumerate(counts) if count]
        counts = [counts[i] for i in used]
        ours, theirs = [self.handles[i] for i in used], [self.sequences[1][i] for i in used]
        starts = np.concatenate([[0], np.cumsum(counts)])
        k = rng.standard_normal((2, starts[-1], 1 if self.latent else 2, 64), np.float32)
        v = None if self.latent else rng.standard_normal((2, starts[-1], 2, self.pools[1].v_head_dim), np.float32)
        q = rng.standard_normal((2, starts[-1], 6, 64), np.float32)
        expected, slots = [], self.pools[1].slot_mapping(theirs, counts)
        out = np.zeros((2, starts[-1], 6, 48 if self.latent else self.pools[1].v_head_dim), np.float32)
        given = None if set(counts) == {1} else starts
        for layer in range(2):
            rows = (k[layer, :, 0],) if self.latent else (k[layer], v[layer])
            self.pools[1].append_batch(layer, *rows, slots)
            expected.append(self.pools[1].attend_batch(layer, q[layer], theirs, cu_seqlens_q=starts, cascade=not no_cascade))
            self.handle.append(layer, ours, k[layer], None if self.latent else v[layer], given)
            self.handle.attend(layer, ours, q[layer], out[layer], given, no_cascade=no_cascade)
        self.handle.advance(ours, given)
        for other, count in zip(theirs, counts, strict=True):
            other.advance(count)
        return out, np.array(expected)


@pytest.mark.parametrize("kind", POOLS)
def test_batches_have_the_bits_of_python(c, rng, kind):
    pair = Pair(c, kind, 3)
    for counts in [(5, 0, 70), (33, 1, 16), *[(1, 1, 1)] * 40, (3, 0, 1), (0, 64, 0), *[(1, 1, 0)] * 10]:
        assert np.array_equal(*pair.step(rng, counts))
    assert [len(handle) for handle in pair.handles] == [len(one) for one in pair.sequences[1]] == [91, 115, 127]
    assert [one.snapshot() for one in pair.sequences[0]] == [one.snapshot() for one in pair.sequences[1]]
    assert pair.handle.num_free_blocks == pair.pools[1].num_free_blocks


def test_more_sequences_than_are_compared_with_each_other(c, rng):
    pool = kvfast.PagedKVCache(1, 1, 16, num_blocks=600, block_size=16, dtype="int8-rotated")
    handle, k = c.Pool(pool), rng.standard_normal((600, 1, 16), np.float32)
    sequences = [handle.new_sequence() for _ in range(600)]
    handle.append(0, sequences, k, k)
    out, own = np.zeros((600, 1, 16), np.float32), np.zeros((1, 1, 16), np.float32)
    handle.attend(0, sequences, k, out)
    for i in (0, 300, 599):
        sequences[i].attend(0, k[i : i + 1], own)
        assert np.array_equal(own[0], out[i])
    with pytest.raises(ValueError, match=r"-1: sequences\[599\] must be another than sequences\[3\]"):
        handle.append(0, [*sequences[:599], sequences[3]], k, k)


@pytest.mark.parametrize("no_cascade", [False, True])
def test_forks_read_what_they_share(c, rng, no_cascade):
    pair = Pair(c, "int8-rotated", 1)
    pair.step(rng, [1100])
    for _ in range(2):
        pair.handles.append(pair.handles[0].fork())
        pair.sequences[1].append(pair.sequences[1][0].fork())
    for counts in [(1, 1, 1), (4, 1, 0), (0, 1, 20), (1, 1, 1)]:
        out, expected = pair.step(rng, counts, no_cascade)
        assert np.array_equal(out, expected)
    q = rng.standard_normal((3, 6, 64), np.float32)
    together, alone = np.zeros((3, 6, 64), np.float32), np.zeros((3, 6, 64), np.float32)
    pair.handle.attend(1, pair.handles, q, together, no_cascade=no_cascade)
    for i, handle in enumerate(pair.handles):
        handle.attend(1, q[i : i + 1], alone[i : i + 1])
    assert np.array_equal(together, alone)
    # 69 full blocks are shared by three, and each has its own last ones
    assert pair.handle.num_free_blocks == pair.pools[1].num_free_blocks > 100 - 2 * 69


def test_blocks_that_python_knows_by_their_tokens_are_not_written(c, rng):
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=8, block_size=16, dtype="int8-rotated")
    k = rng.standard_normal((32, 2, 64), np.float32)
    sequence = filled(pool.new_sequence(), k, k, token_ids=np.arange(32))
    handle, found = c.Pool(pool), pool.match_prefix(np.arange(33))
    before = found.k(0).copy()
    found.free()
    ours = c.Sequence.of(sequence)
    ours.truncate(20)
    handle.append(0, [ours], -k[:5], -k[:5], [0, 5])
    ours.append(0, -k[:1], -k[:1])
    ours.advance(6)
    assert np.array_equal(pool.match_prefix(np.arange(33)).k(0), before)
    assert np.array_equal(sequence.k(0)[:20], before[:20]) and not np.array_equal(sequence.k(0)[20:25], before[20:25])


def test_prefixes_are_found_by_their_tokens(c, rng):
    """By the salt that they were made with alone, and in Python as in C."""
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=12, block_size=16, dtype="int8-rotated")
    handle, k, ids = c.Pool(pool), rng.standard_normal((40, 2, 64), np.float32), np.arange(40)
    first = handle.match_prefix(ids, b"tenant")
    assert len(first) == 0
    for part in (slice(0, 30), slice(30, 40)):
        first.append(0, k[part], k[part])
        first.advance_ids(ids[part])
    found = handle.match_prefix(ids, b"tenant")
    assert len(found) == 32 and len(handle.match_prefix(ids[:32], b"tenant")) == 16
    assert len(handle.match_prefix(ids)) == len(handle.match_prefix(ids, b"another")) == len(pool.match_prefix(ids)) == 0
    assert len(pool.match_prefix(ids, salt=b"tenant")) == 32
    q, outs = rng.standard_normal((1, 4, 64), np.float32), [np.empty((1, 4, 64), np.float32) for _ in range(2)]
    found.append(0, k[32:], k[32:])
    found.advance_ids(ids[32:])
    for sequence, out in zip((first, found), outs, strict=True):
        sequence.attend(0, q, out)
    assert np.array_equal(*outs)


def test_drafts_and_spans_of_a_batch(c, rng):
    pair = Pair(c, "int8-rotated", 3)
    pair.step(rng, (20, 40, 30))
    q = rng.standard_normal((9, 6, 64), np.float32)
    out, lse, starts = np.zeros((9, 6, 64), np.float32), np.zeros((9, 6), np.float32), [0, 3, 4, 9]
    trees, spans = [[-1, 0, 0], None, [-1, -1]], [None, [(0, 4), (30, 40)], [(2, 9)]]
    options = {"cu_seqlens_q": starts, "return_lse": True}
    counts = np.array([3, 0, 2], np.intp)
    pair.handle.attend(
        0, pair.handles, q, out, starts, tree_parents=np.array([-1, 0, 0, -1, -1], np.intp), parent_counts=counts, lse=lse
    )
    expected = pair.pools[1].attend_batch(0, q, pair.sequences[1], tree_parents=trees, **options)
    assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])
    of_spans, counts_of_spans = np.array([(0, 4), (30, 40), (2, 9)], np.intp), np.array([0, 2, 1], np.intp)
    pair.handle.attend(0, pair.handles, q, out, starts, spans=of_spans, span_counts=counts_of_spans, lse=lse)
    expected = pair.pools[1].attend_batch(0, q, pair.sequences[1], spans=spans, **options)
    assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])


@pytest.mark.parametrize(
    "make", [lambda: kvfast.KVCache(2, 2, 64, 512), lambda: POOLS["int4"]().new_sequence()], ids=["cache", "sequence"]
)
def test_the_right_branch_of_a_tree_is_kept(c, rng, make):
    ours, theirs = make(), make()
    k, v = rng.standard_normal((2, 30, 2, 64), np.float32)
    for cache in (ours, theirs):
        filled(cache, k[:20], v[:20])
        for layer in range(2):
            cache.append(layer, k[20:], v[20:])
    handle = c.Sequence.of(ours)
    before = [ours.k(layer).copy() for layer in range(2)]
    with pytest.raises(ValueError, match=f"{INVALID}: keep must be below the 10 tokens .* got {2**33}"):
        handle.truncate(20, [2**33])
    assert [handle.layer_length(layer) for layer in range(2)] == [30, 30] and len(handle) == 20
    assert all(np.array_equal(ours.k(layer), before[layer]) for layer in range(2))
    handle.truncate(20, [0, 3, 7])
    theirs.truncate(20, keep=[0, 3, 7])
    assert handle.layer_length(1) == 23
    for cache in (handle, theirs):
        cache.advance(3)
    assert ours.snapshot() == theirs.snapshot()
    handle.truncate(22, None, 0)
    assert len(ours) == 22


def test_snapshots(c, rng):
    pair = Pair(c, "int8-rotated", 1)
    pair.step(rng, [50])
    handle, before = pair.handles[0], pair.sequences[0][0].snapshot()
    taken = handle.snapshot()
    pair.step(rng, [9])
    handle.restore(taken)
    assert len(handle) == 50 and pair.sequences[0][0].snapshot() == before
    sequence = POOLS["int8-rotated"]().new_sequence()
    c.Sequence.of(sequence).restore(taken)
    assert sequence.snapshot() == before
    full = c.Sequence.of(kvfast.PagedKVCache(2, 2, 64, num_blocks=3, block_size=16, dtype="int8-rotated").new_sequence())
    strange = c.Sequence.of(kvfast.KVCache(2, 2, 32))
    for one, code, text, call in [
        (full, FULL, "4 blocks of 16 tokens are needed, and 3 of 3 are free", lambda one: one.restore(taken)),
        (strange, INVALID, "the snapshot has ", lambda one: one.restore(taken)),
        (strange, INVALID, "snapshot must be one that snapshot() has made, got NULL", lambda one: one.restore(None)),
        (handle, INVALID, "snapshot must point to where the snapshot goes, got NULL", lambda one: one.snapshot(nowhere=True)),
        (handle, INVALID, "other must point to where the fork goes, got NULL", lambda one: one.fork(nowhere=True)),
        (handle, INVALID, "path must be the name of a file, got NULL", lambda one: one.save(None)),
        (handle, INVALID, "path must be the name of a file, got NULL", lambda one: one.load(None)),
    ]:
        length = len(one)
        with pytest.raises(ValueError, match=f"{code}: .*{re.escape(text)}"):
            call(one)
        assert len(one) == length
    k = rng.standard_normal((1, 2, 64), np.float32)
    handle.append(0, k, k)
    with pytest.raises(ValueError, match="-1: layers hold 1 tokens that were never counted"):
        handle.snapshot()


def test_files(c, rng, tmp_path):
    pytest.importorskip("safetensors")
    pair, sequence = Pair(c, "int8-rotated", 1), POOLS["int8-rotated"]().new_sequence()
    pair.step(rng, [50])
    handle = c.Sequence.of(sequence)
    with pytest.raises(ValueError, match=f"{ERROR}: .*No such file"):
        handle.load(bytes(tmp_path / "é.safetensors"))
    assert len(handle) == 0
    pair.handles[0].save(bytes(tmp_path / "é.safetensors"))
    handle.load(bytes(tmp_path / "é.safetensors"))
    assert sequence.snapshot() == pair.sequences[0][0].snapshot() == kvfast.load(tmp_path / "é.safetensors").snapshot()


def test_who_owns_what(c, rng):
    pool, k = POOLS["int8-rotated"](), rng.standard_normal((1, 2, 64), np.float32)
    references = sys.getrefcount(pool)
    handle = c.Pool(pool)
    sequence = handle.new_sequence()
    sequence.append(0, k, k)
    sequence.append(1, k, k)
    sequence.advance(1)
    fork, taken = sequence.fork(), sequence.snapshot()
    del handle
    assert pool.num_sequences == 2 and pool.num_free_blocks == 99
    fork.append(0, k, k)  # of its own block now
    assert pool.num_free_blocks == 98
    del sequence
    gc.collect()
    assert pool.num_sequences == 1 and pool.num_free_blocks == 98
    del fork, taken
    gc.collect()
    assert pool.num_sequences == 0 and pool.num_free_blocks == 100 and sys.getrefcount(pool) == references


def test_a_long_call_of_another_thread_needs_no_gil(extension, c, rng):
    """It cannot look for Ctrl-C: who holds the GIL may wait for its end."""
    pool = kvfast.PagedKVCache(2, 2, 64, num_blocks=1600, dtype="int8-rotated")
    sequence, k = pool.new_sequence(), rng.standard_normal((100_000, 2, 64), np.float32)
    filled(sequence, k, k)
    one, out = k[:1], np.zeros((1, 2, 64), np.float32)
    assert extension("runtime_in_c").held_meanwhile(pool, (sequence,), 2, one, one, one, out, 20.0) == (0, 1)
    assert np.array_equal(out, sequence.attend(1, one))


def test_a_step_of_a_batch_needs_no_gil(extension, c, rng):
    pool = POOLS["int8-rotated"]()
    sequences, k = tuple(pool.new_sequence() for _ in range(3)), rng.standard_normal((3, 2, 64), np.float32)
    handle, handles, out = c.Pool(pool), [], np.zeros((3, 2, 64), np.float32)
    handles = list(map(c.Sequence.of, sequences))
    for layer in range(2):
        handle.append(layer, handles, k, k)
    for one in handles:
        one.advance(1)
    held = extension("runtime_in_c").held_meanwhile
    assert held(pool, sequences, 2, k, k, k, out, 20.0) == (0, 1)
    assert np.array_equal(out, pool.attend_batch(1, k, list(sequences))) and [one.layer_length(1) for one in handles] == [2, 2, 2]
    for one in handles:
        one.advance(1)
        one.append(0, np.repeat(k[:1], 13, 0), np.repeat(k[:1], 13, 0))
        one.append(1, np.repeat(k[:1], 13, 0), np.repeat(k[:1], 13, 0))
        one.advance(13)
    assert held(pool, sequences, 2, k, k, k, out, 20.0) == (0, 1)  # the block is full now
    for one in handles:
        one.advance(1)
    needs = int(not getattr(sys, "_is_gil_enabled", lambda: True)())
    assert held(pool, sequences, 2, k, k, k, out, 0.2) == (0, needs)
    other = POOLS["int8-rotated"]()
    assert held(other, (), 2, k, k, k, out, 0.2) == (0, needs)  # a pool's first slots
    assert held(other, (), 2, k, k, k, out, 20.0) == (0, 1)
    assert np.allclose(out, k, atol=0.05)  # what the only token of each has as its value


def test_many_threads_read_one_pool(c, rng):
    pair = Pair(c, "int8-rotated", 2)
    pair.step(rng, (300, 90))
    q = rng.standard_normal((2, 6, 64), np.float32)
    expected = pair.pools[1].attend_batch(0, q, pair.sequences[1])

    def read(handle):
        out = np.zeros_like(q)
        for _ in range(200):
            handle.attend(0, pair.handles, q, out)
            assert np.array_equal(out, expected)

    together(*[partial(read, handle) for handle in (pair.handle, pair.handle, c.Pool(pair.pools[0]))])


def test_a_thread_that_changes_a_pool_must_be_alone(c, rng):
    pool, k = kvfast.PagedKVCache(1, 2, 64, num_blocks=200, dtype="float32"), rng.standard_normal((8000, 2, 64), np.float32)
    handle, other = c.Pool(pool), c.Pool(pool)
    a, b, seen = handle.new_sequence(), handle.new_sequence(), set()
    handle.append(0, [a], k[:4000], k[:4000], (0, 4000))
    a.advance(4000)

    def attend():
        try:
            other.attend(0, [a], k[:64], np.zeros((64, 2, 64), np.float32), (0, 64))
        except ValueError as error:
            seen.add(str(error))

    with meanwhile(attend):
        for _ in range(100_000):
            length = b.layer_length(0)
            try:
                handle.append(0, [b], k[:300], k[:300], (0, 300))
                b.truncate(0)
            except ValueError as error:
                seen.add(str(error))
                assert b.layer_length(0) in (length, 300)
                if b.layer_length(0) > 3000:
                    break
            if any(f"{BUSY}: " in text for text in seen):
                break
    assert seen and all(text.startswith(f"{BUSY}: this cache is in use by another thread") for text in seen)
