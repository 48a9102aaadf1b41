"""Block tables and slots of a caller's own scheduler in `kvfast.h`, and the end of a step of many sequences."""

import re

import numpy as np
import pytest

import kvfast

INVALID, SHAPE = -1, -2

POOLS = {
    "int8-rotated": lambda: kvfast.PagedKVCache(2, 2, 64, num_blocks=60, block_size=16, dtype="int8-rotated"),
    "bfloat16": lambda: kvfast.PagedKVCache(2, 2, 64, num_blocks=60, block_size=16, dtype="bfloat16"),
    "int4-plain": lambda: kvfast.PagedKVCache(2, 2, 64, num_blocks=60, block_size=16, dtype="int4-plain"),
    "narrower values": lambda: kvfast.PagedKVCache(2, 2, 64, num_blocks=60, block_size=16, dtype="k8v4-rotated", v_head_dim=40),
    "window": lambda: kvfast.PagedKVCache(2, 2, 64, num_blocks=60, block_size=16, dtype="int8-rotated", sliding_window=40, rollback=8),
    "latent": lambda: kvfast.PagedMLAKVCache(2, 48, 16, num_blocks=60, block_size=16),
}


class Scheduler:
    """Sequences whose blocks are drawn here, in two pools: one used from C and one from Python."""

    def __init__(self, c, kind, count, rng):
        self.pools, self.latent = (POOLS[kind](), POOLS[kind]()), kind == "latent"
        self.handle, self.rng = c.Pool(self.pools[0]), rng
        self.lens, self.tables = np.zeros(count, np.int32), rng.permutation(60)[: count * 9].reshape(count, 9).astype(np.int32)

    def step(self, counts, **options):
        """As many new tokens as `counts` says of each; returns the outputs of C and of Python."""
        starts = np.concatenate([[0], np.cumsum(counts)])
        places = np.concatenate([np.arange(held, held + count) for held, count in zip(self.lens, counts, strict=True)])
        rows = np.repeat(np.arange(len(counts)), counts)
        slots = self.tables[rows, places // 16] * np.int64(16) + places % 16
        self.lens += np.array(counts, np.int32)
        k = self.rng.standard_normal((2, starts[-1], 1 if self.latent else 2, 64), np.float32)
        v = None if self.latent else self.rng.standard_normal((2, starts[-1], 2, self.pools[1].v_head_dim), np.float32)
        q = self.rng.standard_normal((2, starts[-1], 6, 64), np.float32)
        out, expected = np.zeros((2, starts[-1], 6, 48 if self.latent else self.pools[1].v_head_dim), np.float32), []
        for layer in range(2):
            given = (k[layer, :, 0],) if self.latent else (k[layer], v[layer])
            self.pools[1].append_batch(layer, *given, slots)
            expected.append(
                self.pools[1].attend_batch(layer, q[layer], block_table=self.tables, seq_lens=self.lens, cu_seqlens_q=starts, **options)
            )
            self.handle.append_slots(layer, slots, k[layer], None if self.latent else v[layer])
            given = None if set(counts) == {1} else starts
            no_cascade = not options.get("cascade", True)
            self.handle.attend_tables(layer, self.tables, self.lens, q[layer], out[layer], given, no_cascade=no_cascade)
        return out, np.array(expected)


@pytest.mark.parametrize("kind", POOLS)
def test_tables_have_the_bits_of_python(c, rng, kind):
    scheduler = Scheduler(c, kind, 3, rng)
    for counts in [(5, 0, 70), (33, 1, 16), *[(1, 1, 1)] * 20, (3, 0, 1), (0, 40, 0), *[(1, 1, 0)] * 8]:
        assert np.array_equal(*scheduler.step(counts))
    assert scheduler.pools[0].num_sequences == 0


@pytest.mark.parametrize("cascade", [True, False])
def test_rows_that_share_blocks(c, rng, cascade):
    scheduler = Scheduler(c, "int8-rotated", 1, rng)
    scheduler.step([130])
    tables, lens = np.repeat(scheduler.tables, 3, 0), np.repeat(scheduler.lens, 3)
    q, out = rng.standard_normal((3, 6, 64), np.float32), np.zeros((3, 6, 64), np.float32)
    scheduler.handle.attend_tables(1, tables, lens, q, out, no_cascade=not cascade)
    assert np.array_equal(out, scheduler.pools[1].attend_batch(1, q, block_table=tables, seq_lens=lens, cascade=cascade))


def test_a_token_without_a_slot_is_left_out(c, rng):
    pool, slots, k = POOLS["int8-rotated"](), np.array([32, -1, 33]), rng.standard_normal((3, 2, 64), np.float32)
    handle, out = c.Pool(pool), np.zeros((2, 1, 2, 64), np.float32)
    k[1] = np.nan
    table, length = np.array([[2]], np.int32), np.array([2], np.int32)
    for layer in range(2):  # the first call becomes Python's, the second does not
        handle.append_slots(layer, slots, k, k)
        handle.attend_tables(layer, table, length, k[2:], out[layer])
    assert np.array_equal(out[0], out[1]) and not np.isnan(out).any()


def test_refused_tables_change_nothing(c, rng):
    scheduler = Scheduler(c, "int8-rotated", 2, rng)
    scheduler.step([20, 3])
    pool, handle, tables, lens = scheduler.pools[0], scheduler.handle, scheduler.tables, scheduler.lens
    k, q = rng.standard_normal((3, 2, 64), np.float32), rng.standard_normal((2, 6, 64), np.float32)
    out = np.full((2, 6, 64), 7, np.float32)
    before = pool.attend_batch(0, q, block_table=tables, seq_lens=lens)
    for given, text in [
        (np.array([0, 2**33, 1]), f"slot_mapping[1] must be -1 or between 0 and 959, got {2**33}"),
        (None, "batch must point to sequences, got NULL"),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"{INVALID}: {text}")):
            handle.append_slots(0, given, k, k)
    for arguments, options, code, text in [
        ((tables, lens + np.int32(200)), {}, INVALID, "seq_lens must lie between 0 and the 144 tokens"),
        ((None, lens), {"count": 2}, INVALID, "num_sequences 2 and max_blocks 0, block_table NULL"),
        ((tables, None), {}, INVALID, "num_sequences 2 and max_blocks 9, seq_lens NULL"),
        ((tables, lens), {"count": 0}, INVALID, "num_sequences 0 and max_blocks 9"),
        ((tables, lens), {"count": -1}, INVALID, "num_sequences -1 and max_blocks 9"),
        ((tables, lens), {"starts": (0, 2, 1)}, SHAPE, "starts must rise from 0 to the 2 tokens of q in 3 entries, got [0, 2, 1]"),
        ((tables, lens), {"starts": (0, 1, 2**32 + 2)}, SHAPE, "starts must rise from 0 to the 2 tokens of q in 3 entries"),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"{code}: ") + ".*" + re.escape(text)):
            handle.attend_tables(0, *arguments, q, out, **options)
    assert (out == 7).all() and np.array_equal(pool.attend_batch(0, q, block_table=tables, seq_lens=lens), before)


def test_pools_that_tables_do_not_fit(c, rng):
    k, table, length = rng.standard_normal((1, 2, 64), np.float32), np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    floats = c.Pool(kvfast.PagedKVCache(1, 2, 64, num_blocks=4))
    with pytest.raises(ValueError, match="-1: this pool needs sequences, or batches from prepare_batch"):
        floats.append_slots(0, np.zeros(1, np.int64), k, k)
    pool = POOLS["int8-rotated"]()
    sequence, handle = pool.new_sequence(), c.Pool(pool)
    with pytest.raises(ValueError, match="-1: slot_mapping holds 0, a slot that no sequence has"):
        handle.append_slots(0, np.zeros(1, np.int64), k, k)
    with pytest.raises(ValueError, match=r"-1: block_table holds block 0, which belongs to no sequence \(a stale table"):
        handle.attend_tables(0, table, length, k, k.copy())
    sequence.append(0, k, k)  # whose block may be read
    (table[0, 0],) = sequence.block_indices()
    out = np.zeros((1, 2, 64), np.float32)
    handle.attend_tables(0, table, length, k, out)
    assert np.array_equal(out, sequence.attend(0, k))


def test_a_batch_counts_all_of_its_tokens_or_none(c, rng):
    pool = kvfast.PagedKVCache(2, 2, 64, num_blocks=60, block_size=16, dtype="int8-rotated")
    handle, k, ids = c.Pool(pool), rng.standard_normal((40, 2, 64), np.float32), np.arange(40)
    a, b, idle = (handle.new_sequence() for _ in range(3))
    starts = (0, 33, 33, 40)
    for layer in range(2):
        handle.append(layer, [a, idle, b], k, k, starts)
    b.append(1, k[:1], k[:1])
    for given, rows, text in [
        ([a, idle, b], starts, "sequences[1]: advance(7) needs 7 tokens in every layer, but layer 1 has 8"),  # of those with tokens
        ([a, b], (0, 33, 41), "sequences[1]: advance(8) needs 8 tokens in every layer, but layer 0 has 7"),
        ([a, b], (0, 33, 20), "starts must rise from 0 to the 20 tokens of the batch in 3 entries, got [0, 33, 20]"),
    ]:
        with pytest.raises(ValueError, match=re.escape(text)):
            handle.advance(given, rows)
        assert [len(one) for one in (a, b, idle)] == [0, 0, 0]
    b.truncate(0, list(range(7)))
    handle.advance([a, idle, b], starts, ids)
    assert [len(one) for one in (a, b, idle)] == [33, 7, 0]
    assert len(pool.match_prefix(ids)) == 32 and len(pool.match_prefix(ids[33:])) == 0
    handle.advance([idle], (0, 0))


def test_failure_after_sealing_leaves_a_batch_unchanged(c, rng, monkeypatch):
    """All sequences are sealed by then, and none is counted."""
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=12)
    k = rng.standard_normal((2, 200, 2, 64), np.float32)
    a, b, other = (pool.new_sequence() for _ in range(3))
    for one, rows in ((a, k[0]), (b, k[1]), (other, k[0])):
        one.append(0, rows, rows)
    handle, sequences = c.Pool(pool), [c.Sequence.of(a), c.Sequence.of(b)]
    taken = []
    monkeypatch.setattr(type(b._ids), "add", lambda self, before, token_ids: taken.append(self) or 1 / 0)
    with pytest.raises(ValueError, match="-8: division by zero"):
        handle.advance(sequences, (0, 200, 400))
    assert taken == [a._ids] and len(a) == len(b) == 0
    monkeypatch.undo()
    handle.advance(sequences, (0, 200, 400))
    other.advance(200)
    q = rng.standard_normal((1, 6, 64), np.float32)
    assert len(a) == len(b) == 200 and np.array_equal(a.attend(0, q), other.attend(0, q))
