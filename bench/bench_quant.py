"""quantize and dequantize of float32 rows of 128, as a fraction of one core's read bandwidth."""

import numpy as np
import pytest

import kvfast

ROWS = 1 << 17  # 64 MiB of float32


@pytest.mark.parametrize("bits", [8, 4])
def bench_quantize(against_bandwidth, bits, threads):
    x = np.random.default_rng(0).standard_normal((ROWS, 128), np.float32)
    codes, scales = kvfast.quantize(x, bits=bits)
    assert np.all(np.abs(kvfast.dequantize(codes, scales) - x) <= 0.50001 * scales[:, None])
    against_bandwidth(lambda: kvfast.quantize(x, bits=bits), x.nbytes, threads, bits=bits)


@pytest.mark.parametrize("bits", [8, 4])
def bench_dequantize(against_bandwidth, bits, threads):
    x = np.random.default_rng(0).standard_normal((ROWS, 128), np.float32)
    codes, scales = kvfast.quantize(x, bits=bits)
    out = kvfast.dequantize(codes, scales)
    assert np.all(np.abs(out - x) <= 0.50001 * scales[:, None])
    against_bandwidth(lambda: kvfast.dequantize(codes, scales, out), out.nbytes, threads, bits=bits)
