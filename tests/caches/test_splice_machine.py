"""Any history of appending, splicing and dropping equals keys that are rotated again in float64."""

import numpy as np
from cache_kinds import DTYPES, FORMATS
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rotated_reference import DIM, HEADS, Model
from selection import cases_of_machine

import kvfast

ROPES = [kvfast.Rope(), kvfast.Rope(theta=300.0, rotary_dim=12, interleaved=True), None]
MOST = 500


class SpliceMachine(RuleBasedStateMachine):
    kind = None

    @initialize(dtype=st.sampled_from([*DTYPES, *FORMATS.values()]), rope=st.sampled_from(ROPES), seed=st.integers(0, 99))
    def start(self, dtype, rope, seed):
        self.dtype, self.rope, self.seed = dtype, rope, seed
        if self.kind == "sequence":
            self.pool = kvfast.PagedKVCache(1, HEADS, DIM, num_blocks=200, dtype=dtype)
        self.model, self.taken = self.new(), []

    def new(self, alone=False):
        self.seed += 1
        if self.kind == "sequence" and not alone:
            return Model(self.pool.new_sequence(), self.rope, self.seed)
        most = None if alone or self.kind != "bounded" else MOST
        return Model(kvfast.KVCache(1, HEADS, DIM, most, dtype=self.dtype), self.rope, self.seed)

    @property
    def room(self):
        return MOST - len(self.model.cache)

    @rule(n=st.integers(1, 150))
    def append(self, n):
        if self.room:
            self.model.append(min(n, self.room))

    @rule(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3), alone=st.booleans())
    def splice(self, lengths, alone):
        chunks = [self.new(alone).append(n) for n in lengths]
        if sum(lengths) <= self.room:
            self.model.splice(*chunks)
        elif self.kind == "bounded":
            before = len(self.model.cache)
            try:
                self.model.cache.splice(*[chunk.cache for chunk in chunks], rope=self.rope)
                raise AssertionError("more tokens than there is room for")
            except kvfast.CacheFullError:
                assert len(self.model.cache) == before

    @rule(n=st.integers(1, 120), again=st.integers(1, 120))
    def splice_with_tokens_computed_again(self, n, again):
        again = min(n, again, self.room)
        if again and n <= self.room:
            self.model.append(again).splice(self.new().append(n), recomputed=again)

    @rule(first=st.floats(0, 1), count=st.one_of(st.integers(1, 10), st.integers(1, 400)))
    def drop(self, first, count):
        length = len(self.model.cache)
        first = int(first * length)
        self.model.drop(first, min(first + count, length))

    @rule(back=st.one_of(st.integers(0, 20), st.integers(0, 600)))
    def truncate(self, back):
        self.model.truncate(max(0, len(self.model.cache) - back))

    @rule()
    def snapshot(self):
        self.taken = [*self.taken[-1:], (self.model.cache.snapshot(), self.model.k, self.model.v)]

    @precondition(lambda self: self.taken)
    @rule()
    def restore(self):
        snapshot, self.model.k, self.model.v = self.taken[0]
        self.model.cache.restore(snapshot)
        assert self.model.cache.snapshot() == snapshot

    @precondition(lambda self: self.taken)
    @rule()
    def splice_a_snapshot(self):
        snapshot, k, v = self.taken[-1]
        if len(snapshot) <= self.room:
            chunk = self.new()
            chunk.cache.restore(snapshot)
            chunk.k, chunk.v = k, v
            self.model.splice(chunk)

    @rule(how=st.sampled_from(["fork", "copy"]))
    def go_on_with_another(self, how):
        cache = getattr(self.model.cache, how)()
        assert np.array_equal(cache.k(0), self.model.cache.k(0))
        self.model.cache.truncate(len(self.model.cache) // 2)
        self.model.cache = cache

    @rule(n=st.integers(1, 60), window=st.one_of(st.none(), st.integers(1, 300)), sinks=st.integers(0, 80))
    def attend(self, n, window, sinks):
        if len(self.model.cache):
            self.model.check(min(n, len(self.model.cache)), sliding_window=window, num_sink_tokens=sinks)

    @invariant()
    def one_query_agrees(self):
        if hasattr(self, "model") and len(self.model.cache):
            self.model.check(1)

    def teardown(self):
        if self.kind == "sequence" and hasattr(self, "model"):
            self.model = self.taken = None
            assert self.pool.num_free_blocks == self.pool.num_blocks


class GrowingMachine(SpliceMachine):
    kind = "growing"


class BoundedMachine(SpliceMachine):
    kind = "bounded"


class SequenceMachine(SpliceMachine):
    kind = "sequence"


TestGrowing, TestGrowingLonger = cases_of_machine(GrowingMachine, max_examples=60, steps=25)
TestBounded, TestBoundedLonger = cases_of_machine(BoundedMachine, max_examples=60, steps=25)
TestSequence, TestSequenceLonger = cases_of_machine(SequenceMachine, max_examples=60, steps=25)
