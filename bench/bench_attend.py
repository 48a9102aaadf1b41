"""Decode: one query token against a long context, as a fraction of the machine's read bandwidth.

The layers of one cache are read in turn, at least 512 MB in all, so that no processor cache holds them.

    pytest bench/bench_attend.py            # pytest-benchmark, `bandwidth_fraction` in the JSON's extra_info
    python bench/bench_attend.py            # the same as a table
"""

import argparse
import platform
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import pytest
from models import LLAMA_3_8B, SMOLLM2_135M

import kvfast

DTYPES = ["int4", "k8v4", "int8", "int4-plain", "int8-plain", "float16", "bfloat16", "float32"]
TOTAL = 512 * 10**6
CHUNK = 1024


def filled(model, dtype, context, total=TOTAL):
    """A cache of as many layers as make `total` bytes, full of random tokens."""
    settings = {"dtype": dtype, "max_seq_len": context}
    one = kvfast.KVCache(1, model.num_kv_heads, model.head_dim, **settings)
    cache = kvfast.KVCache(-(-total // (one.bytes_per_token * context)), model.num_kv_heads, model.head_dim, **settings)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, CHUNK, model.num_kv_heads, model.head_dim), np.float32)
    for start in range(0, context, CHUNK):
        n = min(CHUNK, context - start)
        for layer in range(cache.num_layers):
            cache.append(layer, k[:n], v[:n])
        cache.advance(n)
    return cache


def query(model):
    return np.random.default_rng(1).standard_normal((1, model.num_q_heads, model.head_dim), np.float32)


def decode(cache, q, num_threads):
    """Attend once in every layer."""
    for layer in range(cache.num_layers):
        cache.attend(layer, q, num_threads=num_threads)


def check(cache, q):
    """The benched call is right: the first head against NumPy."""
    k, v = cache.k(0)[:, 0].astype(np.float64), cache.v(0)[:, 0].astype(np.float64)
    score = k @ q[0, 0] * k.shape[1] ** -0.5
    weight = np.exp(score - score.max())
    assert np.allclose(cache.attend(0, q)[0, 0], weight @ v / weight.sum(), atol=1e-3)


@pytest.mark.parametrize("context", [4096, 32768])
@pytest.mark.parametrize("dtype", DTYPES)
def bench_decode(against_bandwidth, dtype, context, threads):
    model = LLAMA_3_8B
    cache, q = filled(model, dtype, context), query(model)
    check(cache, q)
    nbytes = cache.bytes_per_token * context
    against_bandwidth(lambda: decode(cache, q, threads), nbytes, threads, model=model.name, dtype=dtype, context=context)


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


def table(contexts, dtypes, threads, rounds):
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), cpu)
    model = LLAMA_3_8B
    print(f"{cpu}, tier {kvfast.active_isa()}; {model.name}: {model.num_q_heads} query and {model.num_kv_heads} KV heads x "
          f"{model.head_dim}; medians of {rounds} rounds, at least {TOTAL / 1e6:.0f} MB read per round")
    print(f"{'dtype':<10}{'context':>8}{'threads':>8}{'us/call':>9}{'GB/s':>7}{'read':>7}  fraction (min-max)")
    for context in contexts:
        for dtype in dtypes:
            cache, q = filled(model, dtype, context), query(model)
            check(cache, q)
            nbytes = cache.bytes_per_token * context
            for num_threads in threads:
                decode(cache, q, num_threads)
                times, bandwidths = [], []
                for _ in range(rounds):
                    bandwidths.append(kvfast.read_bandwidth(1 << 28, num_threads))
                    start = perf_counter()
                    decode(cache, q, num_threads)
                    times.append(perf_counter() - start)
                fractions = [nbytes / t / b for t, b in zip(times, bandwidths)]
                print(f"{dtype:<10}{context:>8}{num_threads:>8}{median(times) / cache.num_layers * 1e6:>9.0f}"
                      f"{nbytes / median(times) / 1e9:>7.1f}{median(bandwidths) / 1e9:>7.1f}  {median(fractions):.2f} "
                      f"({min(fractions):.2f}-{max(fractions):.2f})", flush=True)
            del cache


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", default="4096,32768")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    table([int(n) for n in given.contexts.split(",")], given.dtypes.split(","),
          [int(n) for n in given.threads.split(",")], given.rounds)
