"""KVCache against a model in NumPy, over random sequences of calls."""

import numpy as np
from cache_kinds import close, coded, contents, format_of, same, storage_settings, stored
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference import attention, bound, relative_error
from selection import cases_of_machine

import kvfast

LAYERS, HEADS, DIM = 2, 2, 20


class CacheMachine(RuleBasedStateMachine):
    """In a format that encodes blocks as a whole, the bytes are those of a fresh cache as long as the cache has not gone
    back into a block without float rows; after that, each row is still close to what was given."""

    @initialize(storage=storage_settings(), bounded=st.booleans(), seed=st.integers(0, 99))
    def start(self, storage, bounded, seed):
        self.rng = np.random.default_rng(seed)
        self.max_seq_len = 150 if bounded else None
        self.storage, self.format = storage, format_of(storage)
        self.cache = kvfast.KVCache(LAYERS, HEADS, DIM, self.max_seq_len, **storage)
        self.lost_from = None  # begin of the first block whose codes may be those of other float rows than were given
        self.given = [[np.zeros((0, HEADS, DIM), np.float32)] * 2 for _ in range(LAYERS)]
        self.length = 0

    def replayed(self):
        """A fresh cache with the same tokens."""
        one = kvfast.KVCache(LAYERS, HEADS, DIM, **self.storage)
        for first, last in ((0, self.length), (self.length, None)):
            for layer, (k, v) in enumerate(self.given):
                if len(k[first:last]):
                    one.append(layer, k[first:last], v[first:last])
            if last:
                one.advance(last)
        return one

    def is_fresh(self):
        """Whether a fresh cache has the same float rows."""
        if not self.format.seals:
            return True
        natural = max(0, self.length - 16) // self.format.block_size * self.format.block_size
        return self.lost_from is None and coded(self.cache) == natural

    def note_truncation(self, n):
        if self.lost_from is not None and n <= self.lost_from:
            self.lost_from = None
        if self.format.seals and n < coded(self.cache) and n % self.format.block_size:
            begin = n // self.format.block_size * self.format.block_size
            self.lost_from = begin if self.lost_from is None else min(begin, self.lost_from)

    @rule(n=st.integers(1, 70), layers=st.sampled_from([(0,), (1,), (0, 1)]))
    def append(self, n, layers):
        for layer in layers:
            k, v = self.rng.standard_normal((2, n, HEADS, DIM)).astype(np.float32)
            held = len(self.given[layer][0])
            if self.max_seq_len is not None and held + n > self.max_seq_len:
                try:
                    self.cache.append(layer, k, v)
                except kvfast.CacheFullError as error:
                    assert (error.needed, error.free) == (n, self.max_seq_len - held)
                else:
                    raise AssertionError("a full cache took more")
                continue
            self.cache.append(layer, k, v)
            self.given[layer] = [np.concatenate(pair) for pair in zip(self.given[layer], (k, v))]

    @rule()
    def advance(self):
        lengths = {len(k) for k, _ in self.given}
        if len(lengths) == 1 and lengths != {self.length}:
            self.cache.advance(lengths.pop() - self.length)
            self.length = len(self.given[0][0])

    @rule(keep=st.floats(0, 1))
    def truncate(self, keep):
        self.length = int(keep * self.length)
        self.note_truncation(self.length)
        self.cache.truncate(self.length)
        self.given = [[side[: self.length] for side in layer] for layer in self.given]

    @rule(keep=st.floats(0, 1))
    def truncate_and_append_the_same(self, keep):
        self.cache.truncate(self.length)
        self.given = [[side[: self.length] for side in layer] for layer in self.given]
        fresh, before, n = self.is_fresh(), stored(self.cache), int(keep * self.length)
        self.cache.truncate(n)
        if n < self.length:
            for layer, (k, v) in enumerate(self.given):
                self.cache.append(layer, k[n:], v[n:])
            self.cache.advance(self.length - n)
        if fresh:
            assert stored(self.cache) == before
        else:
            self.lost_from = 0

    @rule()
    def copy(self):
        old, self.cache = self.cache, self.cache.copy()
        assert same(self.cache, old) and stored(self.cache) == stored(old)
        old.clear()

    @rule()
    def through_arrays(self):
        """Complete tokens come back as they are, and attend to the same bits."""
        other = kvfast.KVCache.from_state_dict(self.cache.state_dict(uncounted="drop"))
        assert stored(other) == stored(self.cache)
        self.cache.truncate(self.length)
        self.given = [[side[: self.length] for side in layer] for layer in self.given]
        assert same(other, self.cache)
        old, self.cache = self.cache, other
        for cache in (old, other.copy()):
            for layer in range(LAYERS):
                if self.max_seq_len is None or self.length < self.max_seq_len:
                    cache.append(layer, *np.ones((2, 1, HEADS, DIM), np.float32))
            if cache is old:
                expected = contents(cache)
        assert same(cache, expected)

    @precondition(lambda self: any(len(k) for k, _ in self.given))
    @rule(n=st.integers(1, 40), group=st.integers(1, 5), window=st.sampled_from([None, 1, 30]))
    def attend(self, n, group, window):
        layer = 0 if len(self.given[0][0]) else 1
        q = self.rng.standard_normal((min(n, len(self.given[layer][0])), HEADS * group, DIM)).astype(np.float32)
        out = self.cache.attend(layer, q, sliding_window=window)
        expected, _ = attention(q, self.cache.k(layer), self.cache.v(layer), sliding_window=window)
        # Queries of tokens that are not yet advanced may read codes where `k` tells float rows.
        pending = self.format.seals and len(self.given[layer][0]) > self.length
        assert relative_error(out, expected) < (0.4 if pending else bound(*self.storage.values()))

    @invariant()
    def holds_what_was_given(self):
        if not hasattr(self, "cache"):
            return
        assert len(self.cache) == self.length
        for layer, (k, v) in enumerate(self.given):
            assert self.cache.layer_length(layer) == len(k)
            assert close(self.cache.k(layer), k) and close(self.cache.v(layer), v)
        if self.is_fresh():
            expected = self.replayed()
            assert same(self.cache, expected) and stored(self.cache) == stored(expected) | {"header": stored(self.cache)["header"]}


TestCacheMachine, TestCacheMachineLonger = cases_of_machine(CacheMachine, max_examples=60, steps=15)
