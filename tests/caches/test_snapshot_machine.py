"""Any sequence of calls equals the surviving tokens in a fresh cache, byte for byte."""

import gc
import tempfile
from pathlib import Path

import numpy as np
from cache_kinds import DIM, HEADS, LAYERS, alike, close, coded, format_of, storage_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from selection import cases_of_machine

import kvfast

WHICH = st.integers(0, 99)
EMPTY = np.zeros((2, 0, HEADS, DIM), np.float32)


class Model:
    """A cache or a snapshot, and the keys and values of each layer that it should hold."""

    def __init__(self, cache, given, length, peak=0, lost_from=None):
        self.cache, self.given, self.length = cache, list(given), length
        self.peak = peak  # longest since it was last empty
        # Where blocks are encoded as a whole: begin of the first whose codes may be those of other float rows than were
        # given, because the cache went back into a block without them.
        self.lost_from = lost_from


class SnapshotMachine(RuleBasedStateMachine):
    """Caches that keep everything."""

    kind = None

    @initialize(storage=storage_settings(), size=st.sampled_from([64, 32, 16]), seed=WHICH, first=st.sampled_from([100, 0, 64, 177]))
    def start(self, storage, size, seed, first):
        self.shape, self.format = storage, format_of(storage)
        size = self.format.block_size or size
        self.rng, self.size, self.most = np.random.default_rng(seed), size, 200 if self.kind == "bounded" else None
        if self.kind == "sequence":
            self.pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, 1600 // size, size, **self.shape)
        self.live, self.taken = [Model(self.new_cache(), [EMPTY] * LAYERS, 0)], []
        if first:
            self.append_and_advance(0, first)

    def new_cache(self):
        if self.kind == "sequence":
            return self.pool.new_sequence()
        return kvfast.KVCache(LAYERS, HEADS, DIM, self.most, block_size=self.size, **self.shape)

    def replayed(self, given, length):
        """A fresh cache with the same tokens, the first `length` of them complete, in blocks of its own size."""
        cache = kvfast.KVCache(LAYERS, HEADS, DIM, block_size=self.format.block_size or 64, **self.shape)
        for first, last in ((0, length), (length, None)):
            for layer, (k, v) in enumerate(given):
                if len(k[first:last]):
                    cache.append(layer, k[first:last], v[first:last])
            if last:
                cache.advance(last)
        return cache

    def is_fresh(self, cache, length, lost_from):
        """Whether a fresh cache has the same codes and float rows."""
        if not self.format.seals:
            return True
        return lost_from is None and coded(cache) == max(0, length - 16) // self.format.block_size * self.format.block_size

    def note_truncation(self, model, n):
        """Before a cache goes back to n tokens."""
        block = self.format.block_size
        if model.lost_from is not None and n <= model.lost_from:
            model.lost_from = None
        if self.format.seals and n % block and any(n < coded(model.cache, i) for i in range(self.num_tables)):
            begin = n // block * block
            model.lost_from = begin if model.lost_from is None else min(begin, model.lost_from)

    num_tables = 1

    def check_bytes(self, snapshot, given, length, lost_from):
        assert len(snapshot) == length
        if not self.is_fresh(snapshot, length, lost_from):
            cache = kvfast.load(snapshot)
            for layer, (k, v) in enumerate(given):
                assert close(cache.k(layer), k[:length]) and close(cache.v(layer), v[:length])
            assert cache.snapshot() == snapshot
            return
        expected = self.replayed([rows[:, :length] for rows in given], length).snapshot()
        assert snapshot == expected and expected == snapshot
        if snapshot.block_size == expected.block_size:
            arrays, wanted = snapshot.state_dict(), expected.state_dict()
            assert all(np.array_equal(arrays[name], wanted[name]) for name in wanted if name != "header")

    def one(self, which):
        return self.live[which % len(self.live)]

    def adopt(self, model):
        self.live.append(model)
        if len(self.live) > 3:
            old = self.live.pop(0)
            if self.kind == "sequence":
                old.cache.free()
            else:
                old.cache.clear()

    def try_to(self, call):
        """Whether the call found room."""
        try:
            call()
        except kvfast.CacheFullError:
            assert self.kind in ("bounded", "sequence")
            return False
        return True

    @rule(which=WHICH, n=st.integers(1, 90), layers=st.sampled_from([(0,), (1,), (0, 1), (0, 1)]))
    def append(self, which, n, layers):
        model = self.one(which)
        for layer in layers:
            rows = self.rng.standard_normal((2, n, HEADS, DIM)).astype(np.float32)
            held = model.given[layer].shape[1]
            if self.try_to(lambda layer=layer, rows=rows: model.cache.append(layer, *rows)):
                model.given[layer] = np.concatenate((model.given[layer], rows), 1)
                assert self.most is None or held + n <= self.most

    @rule(which=WHICH)
    def advance(self, which):
        model = self.one(which)
        lengths = {rows.shape[1] for rows in model.given}
        if len(lengths) == 1 and lengths != {model.length}:
            model.cache.advance(lengths.pop() - model.length)
            model.length = model.given[0].shape[1]

    @rule(which=WHICH, n=st.integers(1, 90))
    def append_and_advance(self, which, n):
        self.append(which, n, (0, 1))
        self.advance(which)

    @rule(which=WHICH, back=st.integers(0, 200))
    def truncate(self, which, back):
        model = self.one(which)
        model.length = max(0, model.length - back)
        self.note_truncation(model, model.length)
        model.cache.truncate(model.length)
        model.given = [rows[:, : model.length] for rows in model.given]

    @rule(which=WHICH)
    def snapshot(self, which):
        model = self.one(which)
        given = [rows[:, : model.length] for rows in model.given]
        self.taken.append(Model(model.cache.snapshot(uncounted="drop"), given, model.length, lost_from=model.lost_from))
        if len(self.taken) > 5:
            self.taken.pop(0)

    @precondition(lambda self: self.taken)
    @rule(which=WHICH, taken=WHICH)
    def restore(self, which, taken):
        model, source = self.one(which), self.taken[taken % len(self.taken)]
        if self.try_to(lambda: model.cache.restore(source.cache)):
            model.given, model.length, model.lost_from = list(source.given), source.length, source.lost_from

    @precondition(lambda self: self.taken)
    @rule(taken=WHICH)
    def drop(self, taken):
        self.taken.pop(taken % len(self.taken))

    @rule(which=WHICH)
    def copy(self, which):
        """A deep copy, or a fork of a sequence."""
        model = self.one(which)
        copied = model.cache.copy()
        assert alike(copied, model.cache)
        self.adopt(Model(copied, model.given, model.length, lost_from=model.lost_from))

    @rule(which=WHICH, size=st.sampled_from([16, 64, 256]))
    def other_block_size(self, which, size):
        """Into a cache with other blocks; its snapshot can come back."""
        model = self.one(which)
        other = kvfast.KVCache(LAYERS, HEADS, DIM, block_size=self.format.block_size or size, **self.shape)
        other.restore(model.cache.snapshot(uncounted="drop"))
        given = [rows[:, : model.length] for rows in model.given]
        self.taken.append(Model(other.snapshot(), given, model.length, lost_from=model.lost_from))

    @rule(which=WHICH, mmap=st.booleans(), room=st.sampled_from([None, 0, 90]), stay=st.booleans())
    def save_and_load(self, which, mmap, room, stay):
        model = self.one(which)
        path = self.folder() / "cache"
        model.cache.save(path, uncounted="drop")
        given = [rows[:, : model.length] for rows in model.given]
        if stay or self.kind == "sequence":
            self.taken.append(Model(kvfast.Snapshot.load(path, mmap=mmap), given, model.length, lost_from=model.lost_from))
        elif self.kind == "bounded":
            self.adopt(Model(kvfast.load(path, mmap=mmap), given, model.length, lost_from=model.lost_from))
        else:
            most = None if room is None else max(1, model.length + room)
            loaded = kvfast.load(path, mmap=mmap, max_seq_len=most)
            assert loaded.max_seq_len == most
            loaded.restore(loaded.snapshot())
            if room is None:
                self.adopt(Model(loaded, given, model.length, lost_from=model.lost_from))
            else:
                self.taken.append(Model(loaded.snapshot(), given, model.length, lost_from=model.lost_from))

    @rule(which=WHICH)
    def through_arrays(self, which):
        model = self.one(which)
        given = [rows[:, : model.length] for rows in model.given]
        again = kvfast.Snapshot.from_state_dict(model.cache.state_dict(uncounted="drop"))
        assert again == model.cache.snapshot(uncounted="drop") and alike(
            kvfast.load(again), kvfast.load(model.cache.snapshot(uncounted="drop"))
        )
        self.taken.append(Model(again, given, model.length, lost_from=model.lost_from))

    def folder(self):
        if not hasattr(self, "directory"):
            self.directory = tempfile.TemporaryDirectory()
        return Path(self.directory.name)

    @invariant()
    def caches_hold_what_survives(self):
        for model in getattr(self, "live", []):
            assert len(model.cache) == model.length
            if self.is_fresh(model.cache, model.length, model.lost_from):
                whole = self.replayed(model.given, model.length)
                for layer in range(LAYERS):
                    assert np.array_equal(model.cache.k(layer), whole.k(layer))
                    assert np.array_equal(model.cache.v(layer), whole.v(layer))
            for layer, (k, v) in enumerate(model.given):
                assert close(model.cache.k(layer), k) and close(model.cache.v(layer), v)
            self.check_bytes(model.cache.snapshot(uncounted="drop"), model.given, model.length, model.lost_from)

    @invariant()
    def snapshots_hold_what_they_held(self):
        for model in getattr(self, "taken", []):
            self.check_bytes(model.cache, model.given, model.length, model.lost_from)

    def teardown(self):
        if not hasattr(self, "live"):
            return
        caches = [model.cache for model in self.live]
        self.taken.clear()
        self.live.clear()
        gc.collect(0)
        for cache in caches:
            cache.clear()
        if self.kind == "sequence":
            assert self.pool.num_free_blocks == self.pool.num_blocks
        if self.kind == "bounded":
            whole = self.new_cache().nbytes
            assert caches[0].nbytes == whole or caches[0].capacity() <= 1600  # a loaded one grows
        if hasattr(self, "directory"):
            self.directory.cleanup()


class GrowingMachine(SnapshotMachine):
    kind = "growing"


class BoundedMachine(SnapshotMachine):
    kind = "bounded"


class SequenceMachine(SnapshotMachine):
    kind = "sequence"


class RingMachine(SnapshotMachine):
    """A ring against a cache that keeps everything: what it shows, and what its queries see."""

    kind, most = "ring", None

    @initialize(
        window=st.integers(1, 150),
        mixed=st.booleans(),
        num_sink_tokens=st.integers(0, 20),
        rollback=st.integers(0, 80),
        storage=storage_settings(),
        seed=WHICH,
        first=st.sampled_from([250, 0, 64, 133]),
    )
    def start(self, window, mixed, num_sink_tokens, rollback, storage, seed, first):
        self.rng, self.shape, self.format = np.random.default_rng(seed), storage, format_of(storage)
        self.num_tables = 1 + mixed
        self.windows, self.rollback = [window, None] if mixed else [window, window], rollback
        self.num_sink_tokens = min(num_sink_tokens, window)
        self.live, self.taken = [Model(self.new_cache(), [EMPTY] * LAYERS, 0)], []
        if first:
            self.append_and_advance(0, first)

    def new_cache(self):
        return kvfast.RingKVCache(LAYERS, HEADS, DIM, self.windows, self.num_sink_tokens, rollback=self.rollback, **self.shape)

    def check_bytes(self, snapshot, given, length, lost_from):
        """A snapshot of a ring that came by another way may hold more of the tokens before the window."""
        assert len(snapshot) == length
        fresh = self.new_cache()
        fresh.restore(snapshot)
        self.check(fresh, given, length, lost_from)
        assert fresh.snapshot() == snapshot

    def is_fresh(self, cache, length, lost_from):
        return (
            not self.format.seals
            or lost_from is None
            and all(
                coded(cache, i) == max(0, length - 16) // self.format.block_size * self.format.block_size
                for i in range(self.num_tables)
            )
        )

    def check(self, ring, given, length, lost_from):
        fresh = self.is_fresh(ring, length, lost_from)
        whole = self.replayed(given, length) if fresh else None
        assert len(ring) == length
        q = self.rng.standard_normal((1, 2 * HEADS, DIM)).astype(np.float32)
        for layer in range(LAYERS):
            held, window = given[layer].shape[1], self.windows[layer]
            first = 0 if window is None else max(0, held - window)
            at = np.r_[0 : min(first, self.num_sink_tokens), first:held]
            assert ring.layer_length(layer) == held and np.array_equal(ring.positions(layer), at)
            assert close(ring.k(layer), given[layer][0][at]) and close(ring.v(layer), given[layer][1][at])
            if not fresh:
                continue
            assert np.array_equal(ring.k(layer), whole.k(layer)[at])
            assert np.array_equal(ring.v(layer), whole.v(layer)[at])
            if held:
                sinks = None if window is None else self.num_sink_tokens
                expected = whole.attend(layer, q, sliding_window=window, num_sink_tokens=sinks)
                assert np.array_equal(ring.attend(layer, q), expected)

    @rule(which=WHICH)
    def advance(self, which):
        model = self.one(which)
        super().advance(which)
        model.peak = max(model.peak, model.length)

    @rule(which=WHICH, n=st.integers(1, 250))
    def append_and_advance(self, which, n):
        self.append(which, n, (0, 1))
        self.advance(which)

    @rule(which=WHICH, back=st.integers(0, 200))
    def truncate(self, which, back):
        model = self.one(which)
        n, lost_from = max(0, model.length - back), model.lost_from
        self.note_truncation(model, n)
        try:
            model.cache.truncate(n)
        except ValueError:
            assert 0 < n < model.peak - self.rollback
            model.lost_from = lost_from
            return
        model.length, model.given = n, [rows[:, :n] for rows in model.given]
        model.peak = model.peak if n else 0

    @rule(which=WHICH)
    def truncate_by_all_of_the_rollback(self, which):
        model = self.one(which)
        # It may be further back already, if all that was dropped are sinks.
        expected = min(model.length, max(0, model.peak - self.rollback))
        self.truncate(which, model.length - expected)
        assert model.length == expected

    @rule(which=WHICH)
    def snapshot(self, which):
        super().snapshot(which)
        self.taken[-1].peak = self.one(which).peak

    @precondition(lambda self: self.taken)
    @rule(which=WHICH, taken=WHICH)
    def restore(self, which, taken):
        super().restore(which, taken)
        self.one(which).peak = self.taken[taken % len(self.taken)].peak

    @rule(which=WHICH)
    def copy(self, which):
        model = self.one(which)
        copied = model.cache.copy()
        assert alike(copied, model.cache)
        self.adopt(Model(copied, model.given, model.length, model.peak, model.lost_from))

    @rule(which=WHICH, mmap=st.booleans(), stay=st.booleans())
    def save_and_load(self, which, mmap, stay):
        model = self.one(which)
        path = self.folder() / "cache"
        model.cache.save(path, uncounted="drop")
        given = [rows[:, : model.length] for rows in model.given]
        if stay:
            self.taken.append(Model(kvfast.Snapshot.load(path, mmap=mmap), given, model.length, model.peak, model.lost_from))
        else:
            self.adopt(Model(kvfast.load(path, mmap=mmap), given, model.length, model.peak, model.lost_from))

    @rule(which=WHICH)
    def through_arrays(self, which):
        super().through_arrays(which)
        self.taken[-1].peak = self.one(which).peak

    other_block_size = None  # a ring has one

    @invariant()
    def caches_hold_what_survives(self):
        for model in getattr(self, "live", []):
            self.check(model.cache, model.given, model.length, model.lost_from)


TestGrowing, TestGrowingLonger = cases_of_machine(GrowingMachine, max_examples=60, steps=20)
TestBounded, TestBoundedLonger = cases_of_machine(BoundedMachine, max_examples=60, steps=20)
TestSequence, TestSequenceLonger = cases_of_machine(SequenceMachine, max_examples=60, steps=20)
TestRing, TestRingLonger = cases_of_machine(RingMachine, max_examples=60, steps=20)
