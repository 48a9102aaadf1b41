"""Attention as fractions of what the machine can do: decoding from memory and out of the caches, prefill.

`python -m kvfast bench` shows the same as tables.
"""

import numpy as np
import pytest

import kvfast
from kvfast.tools.cli.bench.cases import FORMATS, LLAMA_3_2_1B, LLAMA_3_8B, QWEN3_30B_A3B, SMOLLM2_135M, Case, query

CENTRED = {
    "centred k8v4": kvfast.KVFormat("int8/int4", rotation="kv", codebook="gaussian", centring=True, clip_search=True),
    "centred int8": kvfast.KVFormat("int8", rotation="kv", centring=True),
}
SOME = ["int4", "int8", "float16"]
OTHERS = [SMOLLM2_135M, LLAMA_3_2_1B, QWEN3_30B_A3B]


@pytest.mark.parametrize("dtype", [*FORMATS, *CENTRED])
def bench_decode_4k(run_case, dtype):
    run_case(Case("decode", LLAMA_3_8B, CENTRED.get(dtype, dtype), 4096))


@pytest.mark.parametrize("context", [32768, 131072])
@pytest.mark.parametrize("dtype", SOME)
def bench_decode_far(run_case, dtype, context):
    run_case(Case("decode", LLAMA_3_8B, dtype, context))


@pytest.mark.parametrize("context", [1024, 32768])
@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("model", OTHERS, ids=lambda model: model.name)
def bench_decode_of_other_models(run_case, model, dtype, context):
    run_case(Case("decode", model, dtype, context))


@pytest.mark.parametrize("dtype", ["int4", "k8v4", "int8", "float16", "bfloat16", "float32"])
def bench_cached(run_case, dtype):
    run_case(Case("cached", LLAMA_3_8B, dtype, 4096))


@pytest.mark.parametrize(("n", "context"), [(512, 4096), (2048, 4096), (512, 16384), (2048, 16384)])
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def bench_prefill(run_case, dtype, n, context):
    run_case(Case("prefill", LLAMA_3_8B, dtype, context, n), rounds=3)


@pytest.mark.parametrize("dtype", ["k8v4", "float16", "float32"])
def bench_prefill_4k(run_case, dtype):
    run_case(Case("prefill", LLAMA_3_8B, dtype, 4096, 512), rounds=3)


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("model", OTHERS, ids=lambda model: model.name)
def bench_prefill_of_other_models(run_case, model, dtype):
    run_case(Case("prefill", model, dtype, 4096, 512), rounds=3)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def bench_small_call(benchmark, dtype):
    """One token of one layer of a small model at 128 tokens: append and attend."""
    model = SMOLLM2_135M
    cache = kvfast.KVCache(1, model.num_kv_heads, model.head_dim, max_seq_len=4096, dtype=dtype)
    cache.append(0, *np.ones((2, 128, model.num_kv_heads, model.head_dim), np.float32))
    cache.advance(128)
    q = query(model)
    token = np.ones((1, model.num_kv_heads, model.head_dim), np.float32)

    def step():
        cache.truncate(128)
        cache.append(0, token, token)
        return cache.attend(0, q)

    benchmark.extra_info.update(model=model.name, dtype=dtype, context=128, isa=kvfast.active_isa())
    assert benchmark(step).shape == q.shape
