"""append and advance of one token and of a prompt, against the read bandwidth; bytes are those of the float32 input."""

import numpy as np
import pytest
from models import LLAMA_3_8B

import kvfast


@pytest.mark.parametrize("n", [1, 512])
@pytest.mark.parametrize("dtype", ["int8", "int4", "int8-plain", "int4-plain", "float16", "float32"])
def bench_append(against_bandwidth, dtype, n, threads):
    model = LLAMA_3_8B
    cache = kvfast.KVCache(1, model.num_kv_heads, model.head_dim, max_seq_len=8192, dtype=dtype)
    k, v = np.random.default_rng(0).standard_normal((2, n, model.num_kv_heads, model.head_dim), np.float32)

    def fill():
        cache.clear()
        for _ in range(8192 // n):
            cache.append(0, k, v)
            cache.advance(n)

    fill()
    assert np.abs(cache.k(0)[-n:] - k).max() < 0.5
    against_bandwidth(fill, 8192 // n * (k.nbytes + v.nbytes), threads, dtype=dtype, tokens=n, model=model.name)
