"""RingKVCache against a cache that keeps everything, over random sequences of calls."""

import numpy as np
from cache_kinds import alike, format_of, storage_settings, stored
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from reference import attention, bound, relative_error
from selection import cases_of_machine

import kvfast

LAYERS, HEADS, DIM = 2, 2, 20


class RingMachine(RuleBasedStateMachine):
    @initialize(
        window=st.integers(1, 150),
        mixed=st.booleans(),
        num_sink_tokens=st.integers(0, 20),
        rollback=st.integers(0, 80),
        storage=storage_settings(),
        seed=st.integers(0, 99),
    )
    def start(self, window, mixed, num_sink_tokens, rollback, storage, seed):
        self.rng = np.random.default_rng(seed)
        self.storage, self.format = storage, format_of(storage)
        self.windows = [window, None] if mixed else [window, window]
        self.num_sink_tokens, self.rollback = min(num_sink_tokens, window), rollback
        self.ring = kvfast.RingKVCache(
            LAYERS, HEADS, DIM, self.windows if mixed else window, self.num_sink_tokens, rollback=rollback, **storage
        )
        self.whole = kvfast.KVCache(LAYERS, HEADS, DIM, **storage)
        self.high = self.chunk = 0  # longest since the last clear, and largest chunk ever

    def tokens(self, n, heads=HEADS):
        return self.rng.standard_normal((n, heads, DIM)).astype(np.float32)

    def visible(self, layer, length):
        """Positions that the last of `length` tokens sees."""
        first = 0 if self.windows[layer] is None else max(0, length - self.windows[layer])
        return np.r_[0 : min(first, self.num_sink_tokens), first:length]

    def check_attend(self, layer, n, group):
        window = self.windows[layer]
        q = self.tokens(n, HEADS * group)
        out = self.ring.attend(layer, q)
        sinks = None if window is None else self.num_sink_tokens
        same = self.whole.attend(layer, q, sliding_window=window, num_sink_tokens=sinks)
        assert np.array_equal(out, same)

        k, v = self.whole.k(layer), self.whole.v(layer)
        for i in {0, n - 1, int(self.rng.integers(n))}:
            seen = self.visible(layer, len(k) - n + i + 1)
            expected, _ = attention(q[i : i + 1], k[seen], v[seen])
            # Queries of tokens that are not yet advanced may read codes where `k` tells float rows.
            pending = self.format.seals and len(k) > len(self.whole)
            assert relative_error(out[i : i + 1], expected) < (0.4 if pending else bound(*self.storage.values()))

    @rule(n=st.integers(1, 200), asked=st.floats(0, 1), group=st.integers(1, 3))
    def append(self, n, asked, group):
        for layer in range(LAYERS):
            k, v = self.tokens(n), self.tokens(n)
            self.ring.append(layer, k, v)
            self.whole.append(layer, k, v)
            self.check_attend(layer, max(1, int(asked * n)), group)
        # All layers hold the chunk now, and none may have lost what its queries see.
        self.chunk = max(self.chunk, n)
        self.check_attend(0, n, group)
        self.holds_what_was_given()
        self.ring.advance(n)
        self.whole.advance(n)
        self.high = max(self.high, len(self.whole))

    @rule(n=st.integers(1, 200), layer=st.integers(0, LAYERS - 1))
    def append_and_abandon(self, n, layer):
        k, v = self.tokens(n), self.tokens(n)
        # Not only to the ring: tokens may get float rows of their codes again.
        for cache in (self.ring, self.whole):
            cache.append(layer, k, v)
            cache.truncate(len(cache))
        self.chunk = max(self.chunk, n)

    def truncate_to(self, n):
        try:
            self.ring.truncate(n)
        except ValueError:
            assert 0 < n < self.high - self.rollback  # and the invariant sees that nothing has changed
        else:
            self.whole.truncate(n)
            self.high = self.high if n else 0

    @rule(back=st.integers(0, 100))
    def truncate_by(self, back):
        self.truncate_to(max(0, len(self.whole) - back))

    @rule(keep=st.floats(0, 1))
    def truncate_to_part(self, keep):
        self.truncate_to(int(keep * len(self.whole)))

    @rule()
    def truncate_by_all_of_the_rollback(self):
        self.truncate_to(min(len(self.whole), max(0, self.high - self.rollback)))

    @rule()
    def clear(self):
        self.ring.clear()
        self.whole.clear()
        self.high = 0

    @rule(n=st.integers(1, 100))
    def copy(self, n):
        old, self.ring = self.ring, self.ring.copy()
        assert alike(old, self.ring) and stored(old) == stored(self.ring)
        for layer in range(LAYERS):
            old.append(layer, self.tokens(n), self.tokens(n))
        old.advance(n)
        self.holds_what_was_given()
        old.clear()

    @rule()
    def through_arrays(self):
        other = kvfast.RingKVCache.from_state_dict(self.ring.state_dict())
        assert alike(other, self.ring) and stored(other) == stored(self.ring)
        self.ring = other

    @rule(layer=st.integers(0, LAYERS - 1), group=st.integers(1, 3))
    def attend_again(self, layer, group):
        if len(self.whole):
            self.check_attend(layer, 1, group)

    @invariant()
    def holds_what_was_given(self):
        if not hasattr(self, "ring"):
            return
        assert len(self.ring) == len(self.whole)
        for layer in range(LAYERS):
            length = self.whole.layer_length(layer)
            assert self.ring.layer_length(layer) == length
            at = self.visible(layer, length)
            assert np.array_equal(self.ring.positions(layer), at)
            assert np.array_equal(self.ring.k(layer), self.whole.k(layer)[at])
            assert np.array_equal(self.ring.v(layer), self.whole.v(layer)[at])

    @invariant()
    def memory_is_bounded(self):
        if not hasattr(self, "ring") or None in self.windows:
            return
        # Half as much again is the step of growth; four blocks are begun but not full, eight is the least.
        held = self.windows[0] + self.rollback + self.num_sink_tokens + self.chunk
        blocks = 1.5 * (held / self.ring.block_size + 4) + 8
        # Float rows: of the chunk, of up to two blocks before it, and of the sinks.
        rows = 2 * (self.chunk + 3 * self.ring.block_size + 48) * self.format.seals
        limit = 1.01 * blocks * self.ring.block_size * self.ring.bytes_per_token + rows * 4 * LAYERS * HEADS * 32
        assert self.ring.nbytes <= limit + 4096


TestRingMachine, TestRingMachineLonger = cases_of_machine(RingMachine, max_examples=80, steps=20)
