"""KVCache against a model in NumPy, over random sequences of calls."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference import attention, bound, relative_error

import kvfast

DTYPES = ["float32", "float16", "bfloat16", "int8", "int4"]
LAYERS, HEADS, DIM = 2, 2, 20


class CacheMachine(RuleBasedStateMachine):
    @initialize(k_dtype=st.sampled_from(DTYPES), v_dtype=st.sampled_from(DTYPES), bounded=st.booleans(), seed=st.integers(0, 99))
    def start(self, k_dtype, v_dtype, bounded, seed):
        self.rng = np.random.default_rng(seed)
        self.max_seq_len = 150 if bounded else None
        self.dtypes = k_dtype, v_dtype
        self.cache = kvfast.KVCache(LAYERS, HEADS, DIM, self.max_seq_len, k_dtype=k_dtype, v_dtype=v_dtype)
        self.given = [[np.zeros((0, HEADS, DIM), np.float32)] * 2 for _ in range(LAYERS)]
        self.length = 0

    def expected(self, layer, side):
        one = kvfast.KVCache(1, HEADS, DIM, k_dtype=self.dtypes[0], v_dtype=self.dtypes[1])
        one.append(0, *self.given[layer])
        return one.v(0) if side else one.k(0)

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
        self.cache.truncate(self.length)
        self.given = [[side[: self.length] for side in layer] for layer in self.given]

    @rule()
    def copy(self):
        old, self.cache = self.cache, self.cache.copy()
        old.clear()

    @precondition(lambda self: any(len(k) for k, _ in self.given))
    @rule(n=st.integers(1, 40), group=st.integers(1, 5), window=st.sampled_from([None, 1, 30]))
    def attend(self, n, group, window):
        layer = 0 if len(self.given[0][0]) else 1
        q = self.rng.standard_normal((min(n, len(self.given[layer][0])), HEADS * group, DIM)).astype(np.float32)
        out = self.cache.attend(layer, q, sliding_window=window)
        expected, _ = attention(q, self.cache.k(layer), self.cache.v(layer), sliding_window=window)
        assert relative_error(out, expected) < bound(*self.dtypes)

    @invariant()
    def holds_what_was_given(self):
        if not hasattr(self, "cache"):
            return
        assert len(self.cache) == self.length
        for layer in range(LAYERS):
            if len(self.given[layer][0]):
                assert np.array_equal(self.cache.k(layer), self.expected(layer, 0))
                assert np.array_equal(self.cache.v(layer), self.expected(layer, 1))
            else:
                assert self.cache.layer_length(layer) == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
