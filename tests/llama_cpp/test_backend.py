"""The backend against float64 on the stored values."""

from ctypes import c_char_p, c_int

import numpy as np
import pytest
from ggml_attention import TYPES, Problem

import kvfast


def tensors(rng, streams=1, queries=1, heads=4, kv_heads=2, tokens=300, dim=64, v_dim=None, kv_streams=None):
    q = rng.standard_normal((streams, queries, heads, dim), np.float32)
    k = rng.standard_normal((kv_streams or streams, tokens, kv_heads, dim), np.float32)
    v = rng.standard_normal((kv_streams or streams, tokens, kv_heads, v_dim or dim), np.float32)
    return q, k, v


def causal(queries, tokens):
    position = np.arange(tokens - queries, tokens)[:, None]
    return np.where(np.arange(tokens) <= position, 0, -np.inf)[None, None]


def check(problem, backend, tolerance=1e-3):
    assert problem.supported_by(backend)
    got, expected = problem.compute(backend), problem.reference()
    assert np.isfinite(got).all()
    error = np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)
    assert error <= tolerance, f"relative error {error:.3g}"
    return got


@pytest.fixture(params=TYPES)
def storage(request):
    return request.param


@pytest.mark.parametrize("queries", [1, 3, 40])
def test_each_type_is_within_the_contract(cpu, backend, storage, queries):
    rng = np.random.default_rng(1)
    problem = Problem(cpu, *tensors(rng, queries=queries), storage, mask=causal(queries, 300))
    check(problem, backend, 1e-5 if storage == "f32" else 1e-3)
    problem.free()


@pytest.mark.parametrize("types", [("q8_0", "f16"), ("f16", "q4_0"), ("q5_1", "q8_0"), ("bf16", "f16"), ("f32", "bf16")])
@pytest.mark.parametrize("queries", [1, 70])
def test_keys_and_values_of_different_types(cpu, backend, types, queries):
    problem = Problem(cpu, *tensors(np.random.default_rng(2), queries=queries), *types, mask=causal(queries, 300))
    check(problem, backend)
    problem.free()


@pytest.mark.parametrize("dims", [(576, 512), (192, 128), (40, 40), (80, 72), (1, 3), (256, 256), (512, 512)])
@pytest.mark.parametrize("queries", [1, 33])
def test_head_sizes(cpu, backend, dims, queries):
    q, k, v = tensors(np.random.default_rng(3), queries=queries, dim=dims[0], v_dim=dims[1], tokens=150)
    problem = Problem(cpu, q, k, v, "f16")
    check(problem, backend)
    problem.free()


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 127, 128, 129, 511, 2051])
@pytest.mark.parametrize("storage", ["f16", "q8_0", "q4_0"])
def test_lengths(cpu, backend, tokens, storage):
    problem = Problem(cpu, *tensors(np.random.default_rng(4), tokens=tokens), storage)
    check(problem, backend)
    problem.free()


@pytest.mark.parametrize("queries", [1, 5, 64])
@pytest.mark.parametrize("options", [{"max_bias": 8.0}, {"softcap": 5.0}, {"scale": 0.5, "softcap": 20.0, "max_bias": 4.0}])
def test_alibi_and_softcap(cpu, backend, queries, options):
    rng = np.random.default_rng(5)
    position = np.arange(300 - queries, 300)[:, None]
    mask = np.where(np.arange(300) <= position, np.arange(300) - position, -np.inf)[None, None]
    problem = Problem(cpu, *tensors(rng, queries=queries, heads=6), "f16", mask=mask, **options)
    check(problem, backend)
    problem.free()


@pytest.mark.parametrize("queries", [1, 37])
def test_any_mask(cpu, backend, queries):
    rng = np.random.default_rng(6)
    mask = np.where(rng.random((1, 4, queries, 300)) < 0.4, -np.inf, rng.standard_normal((1, 4, queries, 300)))
    mask[:, :, :, 128:256] = np.where(rng.random((1, 4, queries, 1)) < 0.5, -np.inf, 0)
    problem = Problem(cpu, *tensors(rng, queries=queries), "q8_0", mask=mask)
    check(problem, backend)
    problem.free()


@pytest.mark.parametrize("queries", [1, 37])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_are_zero(cpu, backend, queries, sinks):
    rng = np.random.default_rng(7)
    mask = np.zeros((1, 1, queries, 300))
    mask[:, :, queries // 2] = -np.inf
    problem = Problem(cpu, *tensors(rng, queries=queries), "q8_0", mask=mask, sinks=rng.standard_normal(4) if sinks else None)
    got = check(problem, backend)
    assert (got[:, queries // 2] == 0).all()
    problem.free()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.6])
@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "f16"), ("f32", "bf16")])
@pytest.mark.parametrize(("heads", "kv_heads", "dims"), [(4, 2, (64, 64)), (20, 1, (96, 32)), (64, 1, (576, 512))])
def test_few_tokens_that_a_mask_shows(cpu, backend, share, types, heads, kv_heads, dims):
    """One query that sees tokens here and there, as an indexer chooses them: all, some or none of a split."""
    rng = np.random.default_rng(11)
    shown = rng.random(3000) < share
    shown[1200:1400] = True
    shown[2000:2600] = False
    rows = tensors(rng, heads=heads, kv_heads=kv_heads, tokens=3000, dim=dims[0], v_dim=dims[1])
    problem = Problem(cpu, *rows, *types, mask=np.where(shown, 0, -np.inf)[None, None, None])
    got = check(problem, backend)
    backend.set_num_threads(3)
    assert np.array_equal(problem.compute(backend), got)
    backend.set_num_threads(2)
    problem.free()


@pytest.mark.parametrize("queries", [1, 64])
def test_sinks(cpu, backend, queries):
    rng = np.random.default_rng(8)
    problem = Problem(
        cpu, *tensors(rng, queries=queries, tokens=1500), "f16", mask=causal(queries, 1500), sinks=np.array([-3.0, 0.0, 5.0, 60.0])
    )
    check(problem, backend)
    problem.free()


@pytest.mark.parametrize("queries", [1, 20])
def test_streams(cpu, backend, queries):
    rng = np.random.default_rng(9)
    mask = np.where(rng.random((3, 1, queries, 300)) < 0.3, -np.inf, 0)
    problem = Problem(cpu, *tensors(rng, streams=3, queries=queries), "q4_0", mask=mask)
    check(problem, backend)
    problem.free()


def test_rows_that_the_last_panel_lacks_see_nothing(cpu, backend):
    """Whatever a call before, of packed rows, has left where a thread keeps what rows see. A mask with holes is a bias."""
    rng = np.random.default_rng(21)
    few, holes = (np.where(rng.random(shape) < 0.3, 0, -np.inf) for shape in ((1, 1, 1, 1000), (3, 1, 20, 2000)))
    for _ in range(5):
        packed = tensors(rng, heads=64, kv_heads=1, tokens=1000, dim=576, v_dim=512), "f16", few
        for rows, storage, mask in (packed, (tensors(rng, streams=3, queries=20, tokens=2000), "q4_0", holes)):
            problem = Problem(cpu, *rows, storage, mask=mask)
            check(problem, backend)
            problem.free()


@pytest.mark.parametrize("storage", ["f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("loud", [40, 300, 3000])
def test_one_loud_element_of_values_beside_full_rows(cpu, backend, storage, queries, loud):
    """It takes the range of a tile's weights and leaves few bits to the others, whose rounding error is large next to the output."""
    rng = np.random.default_rng(14)
    q, k, v = tensors(rng, queries=queries, kv_heads=1, tokens=160, dim=512)
    v[:] = rng.choice([-1.0, 1.0], v.shape)
    v[:, 100], v[:, 100, :, 5] = 0, loud
    problem = Problem(cpu, q, k, v, storage)
    got, expected = problem.compute(backend), problem.reference()
    error = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() < 1e-3
    problem.free()


@pytest.mark.parametrize("storage", ["f16", "q8_0"])
@pytest.mark.parametrize("queries", [1, 200])
def test_bits_are_the_same_for_every_number_of_threads(cpu, backend, storage, queries):
    rng = np.random.default_rng(10)
    problem = Problem(cpu, *tensors(rng, queries=queries, tokens=3000), storage, mask=causal(queries, 3000))
    results = []
    for num_threads in (1, 2, 3, 8, 64):
        backend.set_num_threads(num_threads)
        results.append(problem.compute(backend).tobytes())
    backend.set_num_threads(2)
    assert len(set(results)) == 1
    problem.free()


@pytest.mark.parametrize("queries", [1, 40])
def test_every_tier(cpu, backend, queries):
    rng = np.random.default_rng(11)
    use_isa = backend.function("kvfast_use_isa", c_int, c_char_p)
    seen = 0
    try:
        for storage in TYPES:
            problem = Problem(cpu, *tensors(rng, queries=queries), storage, mask=causal(queries, 300))
            for isa in kvfast.available_isas():
                assert use_isa(isa.encode())
                check(problem, backend, 1e-5 if storage == "f32" else 1e-3)
                seen += 1
            problem.free()
    finally:
        use_isa(None)
    assert seen >= len(TYPES)
    assert not use_isa(b"abacus")


def test_what_it_does_not_take_stays_with_ggml(cpu, backend):
    problem = Problem(cpu, *tensors(np.random.default_rng(12), dim=640), "f16")
    assert not problem.supported_by(backend)
    problem.free()


def check_fast(problem, backend):
    """Attention in the fast precision is within its contract, and nearer than that on rows from a normal distribution."""
    got, expected = problem.compute(backend), problem.reference()
    k, v = problem.stored
    problem.stored[1] = np.linalg.norm(v, axis=-1, keepdims=True)
    sums = problem.reference()[..., 0]
    problem.stored[1] = v
    queries = np.linalg.norm(problem.q, axis=-1) * np.linalg.norm(k, axis=-1).max()
    error = np.linalg.norm(got - expected, axis=-1)
    assert (error <= (0.03 + 0.02 * problem.scale * queries) * sums).all()
    assert np.linalg.norm(error) <= 0.03 * np.linalg.norm(expected)
    return got


QUANTISED = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 32), (576, 512)])
@pytest.mark.parametrize("k_type", QUANTISED)
@pytest.mark.parametrize("v_type", ["q8_0", "q4_1"])
def test_fast_prompts(cpu, fast_backend, dims, k_type, v_type):
    rng = np.random.default_rng(15)
    rows = tensors(rng, queries=70, tokens=450, dim=dims[0], v_dim=dims[1])
    problem = Problem(cpu, *rows, k_type, v_type, mask=causal(70, 450))
    check_fast(problem, fast_backend)
    problem.free()


@pytest.mark.parametrize("tokens", [1, 15, 17, 127, 129, 2051])
@pytest.mark.parametrize("streams", [1, 2])
def test_fast_prompts_of_any_length(cpu, fast_backend, tokens, streams):
    rng = np.random.default_rng(16)
    problem = Problem(cpu, *tensors(rng, streams=streams, queries=20, tokens=tokens), "q8_0", "q4_0")
    got = check_fast(problem, fast_backend)
    fast_backend.set_num_threads(3)
    assert np.array_equal(problem.compute(fast_backend), got)
    fast_backend.set_num_threads(2)
    problem.free()


@pytest.mark.parametrize("options", [{"max_bias": 8.0}, {"softcap": 5.0}, {"scale": 0.2, "softcap": 20.0, "max_bias": 4.0}, {}])
def test_fast_prompts_with_options(cpu, fast_backend, options):
    rng = np.random.default_rng(17)
    mask = np.where(rng.random((1, 6, 37, 300)) < 0.4, -np.inf, rng.standard_normal((1, 6, 37, 300)))
    mask[:, :, 20] = -np.inf
    sinks = rng.standard_normal(6)
    problem = Problem(cpu, *tensors(rng, queries=37, heads=6), "q8_0", mask=mask, sinks=sinks, **options)
    assert (check_fast(problem, fast_backend)[:, 20] == 0).all()
    problem.free()


def test_fast_prompts_of_every_tier(cpu, backend, fast_backend):
    """Tiers without products of bytes stay exact."""
    rng = np.random.default_rng(18)
    use_isa = backend.function("kvfast_use_isa", c_int, c_char_p)
    problem = Problem(cpu, *tensors(rng, queries=40), "q8_0", mask=causal(40, 300))
    try:
        for isa in kvfast.available_isas():
            assert use_isa(isa.encode())
            fast_backend.use_precision("exact")
            exact = problem.compute(backend)
            fast_backend.use_precision("fast")
            has_panels = isa in ("amx", "avx512_vbmi", "avx512_vnni")
            assert np.array_equal(check_fast(problem, fast_backend), exact) is not has_panels
    finally:
        use_isa(None)
    problem.free()


@pytest.mark.parametrize(
    ("types", "queries"), [(("q8_0", "f16"), 40), (("bf16", "q8_0"), 40), (("f16", "f16"), 40), (("q8_0", "q8_0"), 1)]
)
def test_floats_and_few_queries_stay_exact(cpu, fast_backend, types, queries):
    problem = Problem(cpu, *tensors(np.random.default_rng(19), queries=queries), *types, mask=causal(queries, 300))
    check(problem, fast_backend)
    problem.free()
