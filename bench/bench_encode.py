"""Tokens into a cache and out of it, rows to codes and back: what is read and written, as a fraction of the read bandwidth."""

import pytest

from kvfast.tools.cli.bench.cases import LLAMA_3_8B, SMOLLM2_135M, Case

FORMATS = ["int4", "k8v4", "int8", "int4-plain", "int8-plain", "float16", "float32"]


@pytest.mark.parametrize("n", [1, 4096])
@pytest.mark.parametrize("dtype", FORMATS)
def bench_append(run_case, dtype, n):
    run_case(Case("append", LLAMA_3_8B, dtype, 4096, n))


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def bench_append_small(run_case, dtype):
    run_case(Case("append", SMOLLM2_135M, dtype, 4096, 4096))


@pytest.mark.parametrize("dtype", ["int4", "k8v4", "int8", "float16", "bfloat16"])
def bench_k_and_v(run_case, dtype):
    run_case(Case("read", LLAMA_3_8B, dtype, 4096))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("work", ["quantize", "dequantize"])
def bench_codec(run_case, work, dtype):
    run_case(Case(work, LLAMA_3_8B, dtype, 16384))
