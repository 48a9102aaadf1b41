"""What storage formats cost: `fidelity` and `choose_format`."""

import dataclasses
import sys

import numpy as np
import pytest
import reference
from cache_kinds import filled

import kvfast

module = sys.modules["kvfast.planning.fidelity"]


def tensors(rng, num_queries=20, num_tokens=150, num_q_heads=6, num_kv_heads=2, head_dim=64):
    shapes = [(num_queries, num_q_heads, head_dim)] + 2 * [(num_tokens, num_kv_heads, head_dim)]
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def weights(q, k, scale, causal):
    """Attention weights (num_queries, num_q_heads, num_tokens), one row after the other."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    result = np.zeros((*q.shape[:2], len(k)))
    for i in range(q.shape[0]):
        seen = len(k) - len(q) + i + 1 if causal else len(k)
        for h in range(q.shape[1]):
            score = scale * k[:seen, h // (q.shape[1] // k.shape[1])] @ q[i, h]
            result[i, h, :seen] = np.exp(score - score.max()) / np.exp(score - score.max()).sum()
    return result


def direct_kl(q, k, decoded, scale, causal):
    p, other = weights(q, k, scale, causal), weights(q, decoded, scale, causal)
    ratio = np.where(p > 0, p, 1) / np.where(p > 0, other, 1)
    return (p * np.log(ratio)).sum(-1).mean()


def stored(k, v, format):
    cache = filled(kvfast.KVCache(1, *k.shape[1:], dtype=format), k, v)
    return cache


def norm_ratio(error, of):
    return np.linalg.norm(error.astype(np.float64)) / np.linalg.norm(of.astype(np.float64))


@pytest.mark.parametrize("format", ["float32", "float16", "bfloat16", *kvfast.PRESETS])
@pytest.mark.parametrize("scale, causal", [(None, True), (0.3, True), (None, False), (-0.2, False)])
def test_against_direct_computation(rng, format, scale, causal):
    q, k, v = tensors(rng)
    (got,) = kvfast.fidelity(q, k, v, [format], scale=scale, causal=causal)
    cache = stored(k, v, format)
    exact, _ = reference.attention(q, k, v, scale=scale, causal=causal)
    output = cache.attend(0, q, scale=scale, causal=causal)
    cosines = (exact * output).sum(-1) / np.linalg.norm(exact, axis=-1) / np.linalg.norm(output, axis=-1)
    assert got.format == format
    assert got.k_error == pytest.approx(norm_ratio(cache.k(0) - k, k), rel=1e-4, abs=1e-9)
    assert got.v_error == pytest.approx(norm_ratio(cache.v(0) - v, v), rel=1e-4, abs=1e-9)
    assert got.output_error == pytest.approx(norm_ratio(output - exact, exact), rel=1e-6)
    assert got.output_cosine == pytest.approx(cosines.mean(), abs=1e-7)
    expected = direct_kl(q, k, cache.k(0), 64**-0.5 if scale is None else scale, causal)
    assert got.kl == pytest.approx(expected, rel=1e-5, abs=1e-13)
    assert all(type(number) is float for number in dataclasses.astuple(got)[1:])


def test_float32_costs_nothing(rng):
    (got,) = kvfast.fidelity(*tensors(rng, num_tokens=192), "float32")  # full blocks
    assert got.k_error == got.v_error == got.kl == 0 and got.bits_per_element == 32
    assert 0 < got.output_error < 1e-5 and 1 - 1e-9 < got.output_cosine <= 1  # the kernels are float32


def test_known_ranges(rng):
    q, k, v = tensors(rng, num_tokens=256, head_dim=128)
    half, bfloat, int8, int4 = kvfast.fidelity(q, k, v, ("float16", "bfloat16", "int8-plain", "int4-plain"))
    assert half.bits_per_element == bfloat.bits_per_element == 16
    assert 8 <= int8.bits_per_element < 9 and 4 <= int4.bits_per_element < 6
    # Rounding errors are even over a step: 2**-11 of a number at most, a 127th of a row's largest at int8.
    assert 1e-4 < half.k_error < 2**-11 and 1e-3 < bfloat.k_error < 2**-8
    assert 0.002 < int8.k_error < 0.01 and 0.03 < int4.k_error < 0.15
    rotated, k8v4, best = kvfast.fidelity(q, k, v, ("int8-rotated", "k8v4-rotated", "int4"))
    assert 0.002 < rotated.k_error < 0.01 and rotated.v_error < 0.01
    assert k8v4.k_error == rotated.k_error and 0.03 < k8v4.v_error < int4.v_error
    assert 0.03 < best.k_error < int4.k_error and 0.03 < best.v_error < int4.v_error
    assert 8 < rotated.bits_per_element < 9 and 6 < k8v4.bits_per_element < 7
    # 64 of 256 tokens, and the first ones, have float rows, too.
    assert 4 + 16 * 80 / 256 <= best.bits_per_element < 4.5 + 16 * 80 / 256
    for name in ("k_error", "v_error", "output_error", "kl"):
        errors = [getattr(one, name) for one in (half, bfloat, int8, int4)]
        assert errors == sorted(errors) and errors[2] < errors[3] / 3
    assert half.output_cosine > bfloat.output_cosine > int8.output_cosine > int4.output_cosine > 0.9


def test_two_keys():
    # 1 + 2**-9 becomes 1 in bfloat16: both tokens' weights, their divergence and the output are known.
    near = np.float32(1 + 2**-9)
    q, k, v = np.zeros((1, 1, 16), np.float32), np.zeros((2, 1, 16), np.float32), np.zeros((2, 1, 16), np.float32)
    q[0, 0, 3], k[0, 0, 3] = 64, near  # scores of 64 * near / 4, and 0
    v[1, 0, 5] = 1
    (got,) = kvfast.fidelity(q, k, v, "bfloat16", scale=1 / 32)
    p, other = (1 / (1 + np.exp(-2 * key)) for key in (float(near), 1.0))
    assert got.k_error == pytest.approx(2**-9 / near, rel=1e-6) and got.v_error == 0
    assert got.kl == pytest.approx(p * np.log(p / other) + (1 - p) * np.log((1 - p) / (1 - other)), rel=1e-6)
    assert got.output_error == pytest.approx((p - other) / (1 - p), rel=1e-3)
    assert got.output_cosine == pytest.approx(1, abs=1e-12)


def test_one_token(rng):
    # Its weight is 1 whatever its key: the output is its value.
    q, k, v = tensors(rng, num_queries=1, num_tokens=1)
    for got in kvfast.fidelity(q, k, v):
        assert got.kl < 1e-15 and got.k_error > 0
        assert got.output_error == pytest.approx(got.v_error, rel=1e-4)


def test_zeros():
    zeros = np.zeros((3, 2, 16), np.float32)
    for got in kvfast.fidelity(zeros, zeros, zeros):
        assert got.k_error == got.v_error == got.output_error == got.kl == 0 and got.output_cosine == 1


def test_large_scores(rng):
    q, k, v = tensors(rng)
    (got,) = kvfast.fidelity(1e4 * q, k, v, "int4-plain")
    assert np.isfinite(dataclasses.astuple(got)[1:]).all() and got.kl > 100


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_queries", [1, 7, 150])
def test_slices_do_not_change_the_result(rng, monkeypatch, num_queries, causal):
    arrays = tensors(rng, num_queries)
    whole = kvfast.fidelity(*arrays, causal=causal)
    monkeypatch.setattr(module, "_MOST_SCORES", 3 * 2 * 150)  # two tokens' queries
    for got, expected in zip(kvfast.fidelity(*arrays, causal=causal), whole, strict=True):
        assert dataclasses.astuple(got)[1:] == pytest.approx(dataclasses.astuple(expected)[1:], rel=1e-9, abs=1e-13)


def test_input_dtypes(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    brains = [array.astype(ml_dtypes.bfloat16) for array in tensors(rng)]
    floats = [array.astype(np.float32) for array in brains]
    expected = kvfast.fidelity(*floats)
    assert kvfast.fidelity(*brains) == expected
    assert kvfast.fidelity(*(array.view(np.uint16) for array in brains)) == expected
    assert kvfast.fidelity(*(np.asfortranarray(array) for array in floats)) == expected
    (exact,) = kvfast.fidelity(*brains, "bfloat16")
    assert exact.k_error == exact.v_error == exact.kl == 0
    (exact,) = kvfast.fidelity(*(array.astype(np.float16) for array in floats), "float16")
    assert exact.k_error == exact.v_error == exact.kl == 0


def test_formats_come_back_as_given(rng):
    arrays = tensors(rng)
    formats = [np.float16, "i8", np.dtype("float32")]
    assert [one.format for one in kvfast.fidelity(*arrays, formats)] == formats
    assert [one.format for one in kvfast.fidelity(*arrays, iter(formats))] == formats
    assert [one.format for one in kvfast.fidelity(*arrays)] == list(module.FORMATS)
    for one in formats:
        assert [got.format for got in kvfast.fidelity(*arrays, one)] == [one]


def test_inputs_stay_as_they_are(rng):
    arrays = tensors(rng)
    copies = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    kvfast.fidelity(*arrays)
    kvfast.choose_format(*arrays)
    assert all(np.array_equal(array, copy) for array, copy in zip(arrays, copies))


def test_bytes_in_use_count(rng, monkeypatch):
    arrays = tensors(rng)
    in_use = property(lambda cache: 3 * 2 * 150 * 2 * 64 if len(cache) == 150 else 0)
    monkeypatch.setattr(kvfast.KVCache, "nbytes_used", in_use, raising=False)
    assert kvfast.fidelity(*arrays, "int8")[0].bits_per_element == 24


def test_bad_input(rng):
    q, k, v = tensors(rng)
    with pytest.raises(ValueError, match="formats must hold at least one"):
        kvfast.fidelity(q, k, v, [])
    with pytest.raises(ValueError, match="q must hold at most the 19 tokens of k and v, got 20"):
        kvfast.fidelity(q, k[:19], v[:19])
    with pytest.raises(kvfast.DimensionMismatchError, match=r"k must have shape .* got shape \(0, 2, 64\)"):
        kvfast.fidelity(q, k[:0], v[:0])
    with pytest.raises(kvfast.DimensionMismatchError, match="q must have shape"):
        kvfast.fidelity(q[0], k, v)
    with pytest.raises(kvfast.DimensionMismatchError, match="k and v must have the same shape"):
        kvfast.fidelity(q, k, v[:-1])
    with pytest.raises(kvfast.DimensionMismatchError, match="multiple of the 2 KV heads, got 5"):
        kvfast.fidelity(q[:, :5], k, v)
    with pytest.raises(kvfast.DimensionMismatchError, match="head_dim 64, got 32"):
        kvfast.fidelity(q[:, :, :32], k, v)
    with pytest.raises(TypeError, match="v must be .* got int64"):
        kvfast.fidelity(q, k, v.astype(np.int64))
    with pytest.raises(ValueError, match="scale"):
        kvfast.fidelity(q, k, v, scale=np.nan)
    k[3, 1, 5] = 1e5
    with pytest.raises(kvfast.NonFiniteInputError, match="beyond the range of float16"):
        kvfast.fidelity(q, k, v)
    for array in (q, k, v):
        array[3, 1, 5] = np.nan
        for call in (kvfast.fidelity, kvfast.choose_format):
            with pytest.raises(kvfast.NonFiniteInputError, match=r"got nan at \[3, 1, 5\]"):
                call(q, k, v)
        array[3, 1, 5] = 0


def test_unknown_format_is_refused_at_once(rng, monkeypatch):
    arrays = tensors(rng)
    monkeypatch.setattr(kvfast.KVCache, "append", None)
    for call in (kvfast.fidelity, lambda q, k, v, formats: kvfast.choose_format(q, k, v, formats=formats)):
        with pytest.raises(ValueError, match="int9"):
            call(*arrays, ["int8", "int9"])


def test_choose_smallest_that_meets(rng):
    arrays = tensors(rng)
    formats = ["float32", "float16", "int8-rotated", "int4-plain"]  # from the largest: their order does not matter
    reports = kvfast.fidelity(*arrays, formats)
    for metric in ("output_error", "kl"):
        for report in reports:
            bound = getattr(report, metric)
            assert kvfast.choose_format(*arrays, bound, formats, metric) == report.format
            assert kvfast.choose_format(*arrays, bound * 1.01, formats[::-1], metric) == report.format
    assert kvfast.choose_format(*arrays) == "int8-rotated"
    assert kvfast.choose_format(*arrays, 0.5) == "int2-plain"  # of a few tokens, "int2" to "int4" keep many as floats
    many = tensors(rng, num_queries=4, num_tokens=4096)
    assert kvfast.choose_format(*many, 0.15) == "int4"
    assert kvfast.choose_format(*arrays, 1e-5) == "float32"
    assert kvfast.choose_format(*arrays, 0.5, "float16") == "float16"
    # As many bits: the first.
    assert kvfast.choose_format(*arrays, 0.5, ["bfloat16", "float16"]) == "bfloat16"
    assert kvfast.choose_format(*arrays, 0.001, ["bfloat16", "float16"]) == "float16"


def test_scale_and_mask_of_choose(rng):
    q, k, v = tensors(rng)
    for options in ({"scale": 3.0}, {"causal": False}):
        for report in kvfast.fidelity(q, k, v, **options):
            for metric in ("output_error", "kl"):
                bound = getattr(report, metric)
                assert kvfast.choose_format(q, k, v, bound, report.format, metric, **options) == report.format
                with pytest.raises(ValueError, match="no format"):
                    kvfast.choose_format(q, k, v, 0.99 * bound, report.format, metric, **options)


def test_choose_names_the_best_reached(rng):
    q, k, v = tensors(rng)
    reports = kvfast.fidelity(q, k, v, ("int8", "int4"))
    error = f"{reports[0].output_error:.3g}"
    with pytest.raises(ValueError, match=f"output_error <= 0.0001: int8 comes closest, with {error}"):
        kvfast.choose_format(q, k, v, 1e-4, ("int8", "int4"))
    with pytest.raises(ValueError, match=f"kl <= 1e-12 in layer 1: int8 comes closest, with {reports[0].kl:.3g}"):
        one_key = np.repeat(k[:1], len(k), 0)  # any error is the same for all tokens
        kvfast.choose_format([q, q], [one_key, k], [v, v], 1e-12, ("int8", "int4"), metric="kl")


def test_choose_for_layers(rng):
    zeros = [np.zeros_like(array) for array in tensors(rng)]  # any format has them exactly
    q, k, v = zip(tensors(rng), zeros, tensors(rng))
    for bound, expected in ((0.02, "int8"), (1e-5, "float32")):
        formats = kvfast.choose_format(q, list(k), v, bound, iter(["float32", "int8", "int4"]))
        assert formats == [expected, "int4", expected]
        assert kvfast.KVCache(3, 2, 64, dtype=formats).dtype == tuple(formats)


def test_choose_passes_over_what_cannot_hold_the_values(rng):
    q, k, v = tensors(rng)
    v[3, 1, 5] = 1e5
    assert kvfast.choose_format(q, k, v, 1e-5, ("float16", "float32")) == "float32"
    with pytest.raises(ValueError, match="float16 comes closest, with inf"):
        kvfast.choose_format(q, k, v, formats="float16")


def test_bad_input_to_choose(rng):
    q, k, v = tensors(rng)
    with pytest.raises(ValueError, match="metric must be 'output_error' or 'kl', got 'cosine'"):
        kvfast.choose_format(q, k, v, metric="cosine")
    for bad in (-0.1, np.nan):
        with pytest.raises(ValueError, match="max_error must be at least 0"):
            kvfast.choose_format(q, k, v, bad)
    with pytest.raises(ValueError, match="formats must hold at least one"):
        kvfast.choose_format(q, k, v, formats=())
    with pytest.raises(kvfast.DimensionMismatchError, match="one array per layer, got 2, 1 and 1"):
        kvfast.choose_format([q, q], [k], [v])
    with pytest.raises(kvfast.DimensionMismatchError, match="one array per layer, got 0, 0 and 0"):
        kvfast.choose_format([], [], [])
    with pytest.raises(TypeError, match="all lists of arrays; k is ndarray"):
        kvfast.choose_format([q], k, [v])


def test_examples():
    import doctest

    assert doctest.testmod(module).failed == 0


def test_float_tokens_pay_where_queries_look(rng):
    """Queries look at the first and at the newest tokens, as those of models do; these stay floats in the formats that keep them."""
    n, queries = 512, 16
    k, v = rng.standard_normal((2, n, 2, 64)).astype(np.float32)
    near = k[n - queries - 3 : n - 3] * 1.5 + k[1] * 1.5
    q = np.repeat(near, 2, axis=1).astype(np.float32)
    for plain, recent in (("k8v4-rotated", "k8v4"), ("int8-rotated", "int8")):
        without, with_floats = kvfast.fidelity(q, k, v, [plain, recent])
        assert with_floats.output_error < 0.25 * without.output_error
        assert with_floats.bits_per_element < without.bits_per_element + 3.5  # 96 of 512 tokens in float16, on both sides
