"""Ring and paged caches against the contiguous one, shared prefixes against none, forks.

    pytest bench/bench_caches.py
    python bench/bench_caches.py            # the same as a table of ratios, runs interleaved
"""

import argparse
from statistics import median
from time import perf_counter

import numpy as np
import pytest
from bench_attend import TOTAL, filled, query
from models import LLAMA_3_8B, SMOLLM2_135M

import kvfast

DTYPES = ["int8", "int4-plain", "float16"]
NUM_SINK_TOKENS = 4


def paged(model, dtype, context, num_layers, spare=32):
    """A sequence in a pool of blocks of 32 tokens, and the pool."""
    pool = kvfast.PagedKVCache(num_layers, model.num_kv_heads, model.head_dim, context // 32 + spare, dtype=dtype)
    sequence = pool.new_sequence()
    fill(sequence, model, context)
    return sequence, pool


def ring(model, dtype, context, num_layers):
    """A ring that shows as many tokens as the others, and has wrapped half way round."""
    cache = kvfast.RingKVCache(num_layers, model.num_kv_heads, model.head_dim, context - NUM_SINK_TOKENS, NUM_SINK_TOKENS, dtype=dtype)
    fill(cache, model, context + context // 2)
    return cache


def fill(cache, model, n):
    k, v = np.random.default_rng(0).standard_normal((2, 512, model.num_kv_heads, model.head_dim), np.float32)
    for _ in range(n // 512):
        for layer in range(cache.num_layers):
            cache.append(layer, k, v)
        cache.advance(512)


def decode(cache, q, num_threads):
    for layer in range(cache.num_layers):
        cache.attend(layer, q, num_threads=num_threads)


def batch(model, dtype, context, num_sequences, num_layers, is_shared):
    """Sequences with a prefix of `context` tokens, shared or each with its own copy, and 32 tokens more."""
    copies = 0 if is_shared else num_sequences - 1
    prefix, pool = paged(model, dtype, context, num_layers, copies * context // 32 + num_sequences + 32)
    sequences = [prefix] + [prefix.fork() if is_shared else pool.new_sequence() for _ in range(num_sequences - 1)]
    for sequence in sequences:
        if len(sequence) == 0:
            fill(sequence, model, context)
        k, v = np.random.default_rng(1).standard_normal((2, 32, model.num_kv_heads, model.head_dim), np.float32)
        for layer in range(num_layers):
            sequence.append(layer, k, v)
        sequence.advance(32)
    return pool, sequences


def decode_batch(pool, q, sequences, num_threads):
    for layer in range(pool.num_layers):
        pool.attend_batch(layer, q, sequences, num_threads=num_threads)


def interleaved(calls, rounds):
    """Median times of calls, run in turn, and medians of the ratios to the first."""
    times = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for record, call in zip(times, calls):
            start = perf_counter()
            call()
            record.append(perf_counter() - start)
    ratios = [median(t / first for t, first in zip(record, times[0])) for record in times]
    return [median(record) for record in times], ratios


@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
@pytest.mark.parametrize("dtype", DTYPES)
def bench_decode_4k(against_bandwidth, dtype, kind, threads):
    model, context = LLAMA_3_8B, 4096
    whole = filled(model, dtype, context)
    nbytes = whole.bytes_per_token * context
    make = {"ring": ring, "paged": lambda *arguments: paged(*arguments)[0]}
    cache = whole if kind == "contiguous" else make[kind](model, dtype, context, whole.num_layers)
    q = query(model)
    against_bandwidth(lambda: decode(cache, q, threads), nbytes, threads, model=model.name, dtype=dtype, kind=kind)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def bench_shared_prefix(benchmark, dtype, is_shared, threads):
    model = LLAMA_3_8B
    pool, sequences = batch(model, dtype, 4096, 16, 4, is_shared)
    q = np.random.default_rng(2).standard_normal((16, model.num_q_heads, model.head_dim), np.float32)
    assert np.allclose(pool.attend_batch(0, q, sequences), pool.attend_batch(0, q, sequences, cascade=False), atol=1e-5)
    benchmark.extra_info.update(model=model.name, dtype=dtype, isa=kvfast.active_isa(), threads=threads, is_shared=is_shared)
    benchmark.pedantic(lambda: decode_batch(pool, q, sequences, threads), rounds=5, warmup_rounds=1)


def bench_fork_32k(benchmark):
    model = SMOLLM2_135M
    sequence, pool = paged(model, "int8", 32768, 1)
    free = pool.num_free_blocks

    def fork():
        sequence.fork().free()

    benchmark(fork)
    assert pool.num_free_blocks == free


def table(rounds, threads):
    model = LLAMA_3_8B
    print(f"tier {kvfast.active_isa()}; {model.name}; block_size 32, ring with {NUM_SINK_TOKENS} sinks; medians of {rounds} interleaved rounds")
    print(f"{'dtype':<9}{'context':>8}{'threads':>8}{'contiguous us':>15}{'paged':>8}{'ring':>8}   ratio of times to contiguous")
    for context in (4096, 32768):
        for dtype in DTYPES:
            whole = filled(model, dtype, context)
            caches = [whole, paged(model, dtype, context, whole.num_layers)[0], ring(model, dtype, context, whole.num_layers)]
            q = query(model)
            for n in threads:
                times, ratios = interleaved([lambda cache=cache: decode(cache, q, n) for cache in caches], rounds)
                print(f"{dtype:<9}{context:>8}{n:>8}{times[0] / whole.num_layers * 1e6:>15.0f}{ratios[1]:>8.3f}{ratios[2]:>8.3f}", flush=True)
            del whole, caches
    print("\n16 sequences with a prefix of 4,096 tokens and 32 of their own: us per layer with the prefix shared, and how many")
    print("times as long with a copy for each")
    for name in (LLAMA_3_8B, SMOLLM2_135M):
        for dtype in (*DTYPES, "float32"):
            num_layers = max(2, TOTAL // (16 * filled(name, dtype, 64, 1).bytes_per_token * 4096))
            pools = [batch(name, dtype, 4096, 16, num_layers, is_shared) for is_shared in (True, False)]
            q = np.random.default_rng(2).standard_normal((16, name.num_q_heads, name.head_dim), np.float32)
            for n in threads:
                calls = [lambda pool=pool, sequences=sequences: decode_batch(pool, q, sequences, n) for pool, sequences in pools]
                times, ratios = interleaved(calls, rounds)
                print(f"{name.name:<14}{dtype:<9}{n:>3} threads{times[0] / num_layers * 1e6:>9.0f}{ratios[1]:>8.2f}x", flush=True)
            del pools
    sequence, pool = paged(SMOLLM2_135M, "int8", 32768, 1)
    times, _ = interleaved([lambda: sequence.fork().free()], 1000)
    print(f"\nfork and free of a sequence of 32,768 tokens: {times[0] * 1e6:.1f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", default="1,2")
    given = parser.parse_args()
    table(given.rounds, [int(n) for n in given.threads.split(",")])
