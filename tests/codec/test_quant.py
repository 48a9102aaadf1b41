"""INT8 and INT4 codecs."""

import numpy as np
import pytest

import kvfast

DIMS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 97, 128, 700]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", DIMS)
def test_codes_within_half_a_step(isa, rng, bits, dim):
    x = rng.standard_normal((5, 3, dim)).astype(np.float32) * 10.0 ** rng.integers(-20, 20, (5, 3, 1))
    x = x.astype(np.float32)
    codes, scales = kvfast.quantize(x, bits=bits)
    assert codes.shape == (5, 3, dim if bits == 8 else (dim + 1) // 2) and scales.shape == (5, 3)
    back = kvfast.dequantize(codes, scales, head_dim=dim)
    assert np.all(np.abs(back - x) <= 0.5 * scales[..., None] * (1 + 1e-5))
    top = 127 if bits == 8 else 7
    assert np.allclose(scales, np.abs(x).max(-1) / top, rtol=1e-6)


def test_layouts(rng):
    x = rng.standard_normal((4, 5)).astype(np.float32)
    codes, scales = kvfast.quantize(x)
    assert codes.dtype == np.int8 and np.array_equal(codes, np.rint(x / scales[:, None]).astype(np.int8))
    packed, scales = kvfast.quantize(x, bits=4)
    plain = np.rint(x / scales[:, None]).astype(int)
    assert packed.dtype == np.uint8
    assert np.array_equal(packed & 15, plain[:, :3] + 8)
    assert np.array_equal((packed >> 4)[:, :2], plain[:, 3:] + 8)
    assert np.all(packed[:, 2] >> 4 == 8)


@pytest.mark.parametrize("bits", [8, 4])
def test_extremes(isa, bits):
    x = np.zeros((4, 33), np.float32)
    x[1] = 1e-45
    x[2] = 3.4e38
    x[3, 7] = -1e-38
    codes, scales = kvfast.quantize(x, bits=bits)
    back = kvfast.dequantize(codes, scales, head_dim=33)
    assert scales[0] == 0 and np.array_equal(back[0], x[0])
    assert np.all(np.abs(back.astype(np.float64) - x) <= 0.50001 * scales.astype(np.float64)[:, None])


@pytest.mark.parametrize("bits", [8, 4])
def test_all_input_dtypes_and_layouts(isa, rng, bits):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = rng.standard_normal((6, 40)).astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = kvfast.quantize(x, bits=bits)
    bf16 = x.astype(ml_dtypes.bfloat16)
    for same in (bf16, bf16.view(np.uint16), np.asfortranarray(x), x[::-1][::-1]):
        got = kvfast.quantize(same, bits=bits)
        assert np.array_equal(got[0], expected[0]) and np.array_equal(got[1], expected[1])
    half = x.astype(np.float16)
    assert np.array_equal(kvfast.quantize(half, bits=bits)[0], kvfast.quantize(half.astype(np.float32), bits=bits)[0])
    x.flags.writeable = False
    kvfast.quantize(x, bits=bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_many_rows_in_parallel(rng, bits):
    x = rng.standard_normal((20000, 64)).astype(np.float32)
    codes, scales = kvfast.quantize(x, bits=bits)
    few, few_scales = kvfast.quantize(x[-3:], bits=bits)
    assert np.array_equal(codes[-3:], few) and np.array_equal(scales[-3:], few_scales)
    out = np.empty_like(x)
    assert kvfast.dequantize(codes, scales, out) is out
    assert np.all(np.abs(out - x) <= 0.50001 * scales[:, None])
    x[12345, 6] = np.nan
    x[17000, 1] = np.inf
    with pytest.raises(kvfast.NonFiniteInputError, match=r"nan at \[12345, 6\]"):
        kvfast.quantize(x, bits=bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_large_output_is_written_past_the_caches(isa, rng, bits):
    """From 16 MiB on, whether lines begin where rows do or not; the values of a small call."""
    x = rng.standard_normal((70_000, 62), np.float32)
    codes, scales = kvfast.quantize(x, bits=bits)
    memory = np.empty(x.size + 1, np.float32)
    for out in (memory[:-1].reshape(x.shape), memory[1:].reshape(x.shape)):
        out[:] = np.nan
        kvfast.dequantize(codes, scales, out)
        for first in (0, 35_000, 69_000):
            part = slice(first, first + 1000)
            assert np.array_equal(out[part], kvfast.dequantize(codes[part], scales[part]))
        assert not np.isnan(out).any()


def test_bad_input(rng):
    x = rng.standard_normal((2, 3, 8)).astype(np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        y = x.copy()
        y[1, 2, 5] = bad
        with pytest.raises(kvfast.NonFiniteInputError, match=r"\[1, 2, 5\]"):
            kvfast.quantize(y)
    with pytest.raises(ValueError, match="bits must be 8 or 4, got 3"):
        kvfast.quantize(x, bits=3)
    with pytest.raises(TypeError, match="int64"):
        kvfast.quantize(x.astype(np.int64))
    for empty in (np.float32(1), np.zeros((0, 4), np.float32), np.zeros((4, 0), np.float32)):
        with pytest.raises(kvfast.DimensionMismatchError):
            kvfast.quantize(empty)
    codes, scales = kvfast.quantize(x)
    with pytest.raises(kvfast.DimensionMismatchError, match="scales"):
        kvfast.dequantize(codes, scales[:1])
    with pytest.raises(TypeError, match="int16"):
        kvfast.dequantize(codes.astype(np.int16), scales)
    with pytest.raises(TypeError, match="float64"):
        kvfast.dequantize(codes, scales.astype(np.float64))
    with pytest.raises(kvfast.DimensionMismatchError):
        kvfast.dequantize(codes, scales, head_dim=9)
    with pytest.raises(kvfast.DimensionMismatchError):
        kvfast.dequantize(codes, scales, np.empty((2, 3, 7), np.float32))
    with pytest.raises(ValueError, match="writable"):
        kvfast.dequantize(codes, scales, np.empty((2, 8, 3), np.float32).transpose(0, 2, 1))


@pytest.mark.parametrize("bits", [8, 4])
def test_one_row(bits):
    row = np.linspace(-1, 1, 64, dtype=np.float32)
    codes, scale = kvfast.quantize(row, bits=bits)
    assert scale.shape == ()
    assert np.array_equal(kvfast.dequantize(codes, scale), kvfast.dequantize(codes[None], scale[None])[0])
