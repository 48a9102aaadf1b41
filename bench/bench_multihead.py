"""MultiHeadKVCache: scores over 4,096 tokens of one head, and how close outputs are to those of exact attention.

`bandwidth_fraction` is of the codes and scales of the keys; `cosine` is the mean over 32 heads, for 512 tokens of Gaussian
keys, values and queries of head_dim 128, and `bytes_per_vector` what a vector of these takes.
"""

import functools

import numpy as np
import pytest

import kvfast
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.core.hardware import read_bandwidth
from kvfast.tools.cli.bench.measure import using_threads

DIM = 128
CASES = [(bits, "gaussian") for bits in (2, 3, 4, (5, 4), 5, 6, 7, 8)]
each_case = pytest.mark.parametrize("bits, codebook", CASES, ids=[f"{bits} {codebook}" for bits, codebook in CASES])


@functools.lru_cache(maxsize=1)
def filled(bits, codebook, num_heads, num_tokens):
    cache = kvfast.MultiHeadKVCache(num_heads, MultiHeadConfig(DIM, bits, codebook=codebook))
    keys, values = np.random.default_rng(0).standard_normal((2, num_tokens, num_heads, DIM)).astype(np.float32)
    for token in range(num_tokens):
        cache.push_token(keys[token], values[token])
    return cache, keys, values


@each_case
def bench_attention_scores(benchmark, took, bits, codebook):
    """One thread, one query for each of 8 heads."""
    cache, keys, _ = filled(bits, codebook, 8, 4096)
    q = np.random.default_rng(1).standard_normal((8, DIM)).astype(np.float32)
    exact = np.einsum("hd,thd->ht", q, keys) / DIM**0.5
    got = cache.attention_scores(q)
    assert np.corrcoef(got.ravel(), exact.ravel())[0, 1] > 0.93
    key_bytes = 8 * 4096 * (DIM * (bits if isinstance(bits, int) else bits[0]) // 8 + (4 if bits == 8 else 2))
    with using_threads(1):
        bandwidth = read_bandwidth(num_threads=1)
        benchmark.pedantic(cache.attention_scores, args=(q,), rounds=50, warmup_rounds=3)
    seconds = took()
    benchmark.extra_info.update(
        isa=kvfast.active_isa(),
        bits=str(bits),
        codebook=codebook,
        us_per_head=seconds / 8 * 1e6,
        bandwidth_fraction=key_bytes / seconds / bandwidth,
    )


@each_case
def bench_attend(benchmark, took, bits, codebook):
    """32 heads and 512 tokens."""
    cache, keys, values = filled(bits, codebook, 32, 512)
    q = np.random.default_rng(1).standard_normal((32, DIM)).astype(np.float32)
    scores = np.einsum("hd,thd->ht", q.astype(np.float64), keys) / DIM**0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    exact = np.einsum("ht,thd->hd", weights, values)
    out = cache.attend(q)
    cosine = np.mean((out * exact).sum(1) / np.linalg.norm(out, axis=1) / np.linalg.norm(exact, axis=1))
    with using_threads(1):
        benchmark.pedantic(cache.attend, args=(q,), rounds=50, warmup_rounds=3)
    benchmark.extra_info.update(
        isa=kvfast.active_isa(),
        bits=str(bits),
        codebook=codebook,
        cosine=float(cosine),
        bytes_per_vector=cache.bytes_per_token / 64,
        us_per_head=took() / 32 * 1e6,
    )


@each_case
def bench_push_token(benchmark, took, bits, codebook):
    """8 heads."""
    cache, keys, values = filled(bits, codebook, 8, 4096)
    with using_threads(1):
        benchmark.pedantic(cache.push_token, args=(keys[0], values[0]), rounds=200)
    benchmark.extra_info.update(bits=str(bits), codebook=codebook, us_per_vector=took() / 16 * 1e6)
