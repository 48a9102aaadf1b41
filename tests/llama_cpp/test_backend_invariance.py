"""A query has the same bits however many come with it, and however long the cache is beyond it: in the invariant precision, and with
some types in the exact one."""

from ctypes import c_char_p, c_int

import numpy as np
import pytest
from ggml_attention import TYPES, Problem

import kvfast

PADDING = 256  # llama.cpp's calls read multiples of it


@pytest.fixture
def invariant_backend(backend):
    assert backend.use_precision("invariant")
    yield backend
    backend.use_precision("exact")


class Context:
    """A cache of one sequence, and the queries of its tokens."""

    def __init__(self, cpu, tokens, heads=4, kv_heads=2, dims=(64, 64), types=("f16",), window=None, streams=1, seed=1, **options):
        rng = np.random.default_rng(seed)
        self.cpu, self.types, self.options = cpu, types, options
        self.q = rng.standard_normal((streams, tokens, heads, dims[0]), np.float32)
        self.k = rng.standard_normal((streams, tokens, kv_heads, dims[0]), np.float32)
        self.v = rng.standard_normal((streams, tokens, kv_heads, dims[1]), np.float32)
        self.window = window or tokens

    def mask(self, begin, end, tokens):
        at, token = np.arange(begin, end)[:, None], np.arange(tokens)
        distance = np.where((token <= at) & (token > at - self.window), token - at, -np.inf)
        return (distance if "max_bias" in self.options else np.where(distance > -np.inf, 0, -np.inf))[None, None]

    def outputs(self, backend, begin, end):
        """Those of a call with the queries from `begin` to `end`."""
        tokens = min(self.k.shape[1], -(-end // PADDING) * PADDING)
        rows = self.q[:, begin:end], self.k[:, :tokens], self.v[:, :tokens]
        problem = Problem(self.cpu, *rows, *self.types, mask=self.mask(begin, end, tokens), **self.options)
        assert problem.supported_by(backend)
        got = problem.compute(backend)
        problem.free()
        return got

    def check(self, backend, begin, *ends):
        """The queries from `begin` on, in one call and cut at `ends`."""
        whole = self.outputs(backend, begin, ends[-1])
        for start, end in zip((begin, *ends), ends):
            part = self.outputs(backend, start, end)
            assert np.array_equal(part, whole[:, start - begin : end - begin]), (start, end)
        return whole


def cuts(seed, begin, end, count):
    chosen = np.random.default_rng(seed).choice(np.arange(begin + 1, end), count, replace=False)
    return [*sorted(chosen.tolist()), end]


@pytest.mark.parametrize("storage", TYPES)
def test_cuts_of_each_type(cpu, invariant_backend, storage):
    context = Context(cpu, 1300, heads=6, types=(storage,))
    ends = np.cumsum([1, 2, 15, 16, 17, 33, 64, 100, 0]) + 400
    context.check(invariant_backend, 400, *ends[:-1].tolist(), 1290, 1291)
    context.check(invariant_backend, 0, *cuts(2, 0, 700, 6))


@pytest.mark.parametrize("types", [("q8_0", "f16"), ("f16", "q4_0"), ("q4_0", "q8_0"), ("bf16", "f32"), ("q5_1", "q8_0")])
@pytest.mark.parametrize(("heads", "kv_heads", "dims"), [(9, 3, (64, 64)), (4, 4, (40, 80)), (16, 1, (576, 512)), (5, 1, (128, 256))])
def test_cuts_of_other_shapes(cpu, invariant_backend, types, heads, kv_heads, dims):
    if any(dim % 32 for dim in dims):
        types = ("f16", "f32")
    context = Context(cpu, 700, heads, kv_heads, dims, types)
    context.check(invariant_backend, 300, 301, 303, *cuts(3, 303, 690, 3))


@pytest.mark.parametrize("storage", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize(
    "options",
    [{"max_bias": 8.0}, {"softcap": 5.0}, {"sinks": np.array([-3.0, 0.0, 5.0, 60.0])}, {"window": 100}, {"streams": 3}],
    ids=lambda options: "".join(options),
)
def test_cuts_with_options(cpu, invariant_backend, storage, options):
    context = Context(cpu, 900, types=(storage,), **options)
    context.check(invariant_backend, 200, 201, 202, *cuts(4, 202, 880, 4))


@pytest.mark.parametrize("storage", ["f32", "q8_0"])
def test_contexts_with_longer_splits(cpu, invariant_backend, storage):
    """The size of splits grows where queries see more than 64 of them."""
    context = Context(cpu, 16_900, heads=2, kv_heads=1, dims=(512, 512), types=(storage,))
    before = 8192 if storage == "f32" else 64 * 128
    context.check(invariant_backend, before - 60, before - 59, before - 20, before + 1, before + 40)
    context.check(invariant_backend, 2 * before - 10, 2 * before, 2 * before + 1, 2 * before + 90)


@pytest.mark.parametrize("storage", ["bf16", "q8_0", "q4_0"])
def test_loud_values(cpu, invariant_backend, storage):
    """Rows whose rounded weights are read again do not take other rows along."""
    context = Context(cpu, 300, types=(storage,), dims=(64, 512))
    context.v[:] = np.random.default_rng(5).choice([-1.0, 1.0], context.v.shape)
    context.v[:, 100], context.v[:, 100, :, 5] = 0, 300
    context.q[:, 150::7] *= 8
    context.check(invariant_backend, 90, 91, 102, 103, 120, 181, 290)


def test_cuts_on_every_tier(cpu, invariant_backend):
    use_isa = invariant_backend.function("kvfast_use_isa", c_int, c_char_p)
    try:
        for storage in TYPES:
            context = Context(cpu, 600, types=(storage,))
            for isa in kvfast.available_isas():
                assert use_isa(isa.encode())
                context.check(invariant_backend, 100, 101, 117, 150, 590)
    finally:
        use_isa(None)


# Tiers on which exact prompts of these types take the kernels of few rows.
ALWAYS = {
    ("f32", "f32"): ["avx512_vbmi", "avx512_vnni", "avx512", "avx_vnni", "avx2"],
    ("q8_0", "q8_0"): ["avx512_vbmi"],
    ("q4_0", "q4_0"): ["avx512_vbmi"],
    ("q8_0", "q4_0"): ["avx512_vbmi"],
}


@pytest.mark.parametrize("types", ALWAYS)
def test_cuts_in_the_exact_precision(cpu, backend, types):
    use_isa = backend.function("kvfast_use_isa", c_int, c_char_p)
    context, windowed = Context(cpu, 1300, heads=6, types=types), Context(cpu, 1300, types=types, window=200)
    try:
        for isa in set(ALWAYS[types]) & set(kvfast.available_isas()):
            assert use_isa(isa.encode())
            context.check(backend, 400, 401, 417, 450, 514, 1290)
            windowed.check(backend, 900, 901, 902, 1100)
    finally:
        use_isa(None)


@pytest.mark.parametrize("storage", ["f16", "q8_0"])
def test_threads_change_no_bit(cpu, invariant_backend, storage):
    context, results = Context(cpu, 3000, types=(storage,)), set()
    for begin in (2990, 2960, 2700):
        found = set()
        for num_threads in (1, 2, 3, 8, 64):
            invariant_backend.set_num_threads(num_threads)
            found.add(context.outputs(invariant_backend, begin, 3000).tobytes())
        results.add(len(found))
    invariant_backend.set_num_threads(2)
    assert results == {1}


def test_it_is_exact(cpu, invariant_backend):
    rng = np.random.default_rng(6)
    for storage in TYPES:
        q, k, v = (rng.standard_normal((1, count, heads, 64), np.float32) for count, heads in ((300, 4), (500, 2), (500, 2)))
        problem = Problem(cpu, q, k, v, storage)
        got, expected = problem.compute(invariant_backend), problem.reference()
        assert np.linalg.norm(got - expected) <= (1e-5 if storage == "f32" else 1e-3) * np.linalg.norm(expected)
        problem.free()
