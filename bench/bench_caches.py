"""Ring and paged caches against the contiguous one, shared prefixes against none, forks.

pytest bench/bench_caches.py
python bench/bench_caches.py            # the same as a table of ratios, runs interleaved
python bench/bench_caches.py --contexts 1024 --prefix 512 --megabytes 32
"""

import argparse
from functools import partial

import numpy as np
import pytest

import kvfast
from kvfast.tools.cli.bench.cases import LEAST_BYTES, LLAMA_3_8B, SMOLLM2_135M, decode, fill, filled, layers_of, query
from kvfast.tools.cli.bench.measure import interleaved, using_threads

DTYPES = ["int8", "int4-plain", "float16"]
NUM_SINK_TOKENS = 4


def paged(model, dtype, context, num_layers, spare=32):
    """A sequence in a pool of blocks of 32 tokens, and the pool."""
    pool = kvfast.PagedKVCache(num_layers, model.num_kv_heads, model.head_dim, context // 32 + spare, 32, dtype=dtype)
    sequence = pool.new_sequence()
    fill(sequence, context)
    return sequence, pool


def ring(model, dtype, context, num_layers):
    """A ring that shows as many tokens as the others, and has wrapped half way round."""
    cache = kvfast.RingKVCache(num_layers, model.num_kv_heads, model.head_dim, context - NUM_SINK_TOKENS, NUM_SINK_TOKENS, dtype=dtype)
    fill(cache, context + context // 2)
    return cache


def batch(model, dtype, context, num_sequences, num_layers, is_shared):
    """Sequences with a prefix of `context` tokens, shared or each with its own copy, and 32 tokens more."""
    copies = 0 if is_shared else num_sequences - 1
    prefix, pool = paged(model, dtype, context, num_layers, copies * context // 32 + num_sequences + 32)
    sequences = [prefix] + [prefix.fork() if is_shared else pool.new_sequence() for _ in range(num_sequences - 1)]
    for sequence in sequences:
        if len(sequence) == 0:
            fill(sequence, context)
        k, v = np.random.default_rng(1).standard_normal((2, 32, model.num_kv_heads, model.head_dim), np.float32)
        for layer in range(num_layers):
            sequence.append(layer, k, v)
        sequence.advance(32)
    return pool, sequences


def decode_batch(pool, q, sequences):
    for layer in range(pool.num_layers):
        pool.attend_batch(layer, q, sequences)


@pytest.mark.parametrize("make", [ring, paged], ids=["ring", "paged"])
@pytest.mark.parametrize("dtype", DTYPES)
def bench_decode_4k(benchmark, dtype, make, threads):
    """`contiguous_ratio`: time as a multiple of the contiguous cache's, in the same rounds."""
    model, context = LLAMA_3_8B, 4096
    num_layers, q = layers_of(model, dtype, context, LEAST_BYTES // 2), query(model)
    whole = filled(model, dtype, context, num_layers)
    made = make(model, dtype, context, num_layers)
    cache = made[0] if make is paged else made
    times = interleaved([lambda: decode(whole, q), lambda: decode(cache, q)], 5)
    benchmark.extra_info.update(
        model=model.name,
        dtype=dtype,
        isa=kvfast.active_isa(),
        threads=threads,
        contiguous_ratio=float(np.median(times[:, 1] / times[:, 0])),
    )
    benchmark.pedantic(lambda: decode(cache, q), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def bench_shared_prefix(benchmark, dtype, is_shared, threads):
    model = LLAMA_3_8B
    pool, sequences = batch(model, dtype, 4096, 16, 4, is_shared)
    q = query(model, 16)
    rounded = kvfast.active_isa() in ("amx", "avx512_vbmi", "avx512_vnni")  # a prefix is multiplied in bfloat16 or words there
    shared, alone = pool.attend_batch(0, q, sequences), pool.attend_batch(0, q, sequences, cascade=False)
    assert np.allclose(shared, alone, atol=1e-4 if rounded else 1e-5)
    benchmark.extra_info.update(model=model.name, dtype=dtype, isa=kvfast.active_isa(), threads=threads, is_shared=is_shared)
    benchmark.pedantic(lambda: decode_batch(pool, q, sequences), rounds=5, warmup_rounds=1)


def bench_fork_32k(benchmark):
    model = SMOLLM2_135M
    sequence, pool = paged(model, "int8", 32768, 1)
    free = pool.num_free_blocks

    def fork():
        sequence.fork().free()

    benchmark(fork)
    assert pool.num_free_blocks == free


def medians(calls, rounds):
    """Median times of calls that are run in turn, and of the ratios to the first."""
    times = interleaved(calls, rounds)
    return np.median(times, 0), np.median(times / times[:, :1], 0)


def table(rounds, threads, contexts, prefix, least_bytes):
    model = LLAMA_3_8B
    print(
        f"tier {kvfast.active_isa()}; {model.name}; block_size 32, ring with {NUM_SINK_TOKENS} sinks; medians of {rounds} interleaved rounds"
    )
    print(f"{'dtype':<9}{'context':>8}{'threads':>8}{'contiguous us':>15}{'paged':>8}{'ring':>8}   ratio of times to contiguous")
    for context in contexts:
        for dtype in DTYPES:
            num_layers, q = layers_of(model, dtype, context, least_bytes), query(model)
            whole, (sequence, _) = filled(model, dtype, context, num_layers), paged(model, dtype, context, num_layers)
            caches = [whole, sequence, ring(model, dtype, context, num_layers)]
            for n in threads:
                with using_threads(n):
                    times, ratios = medians([partial(decode, cache, q) for cache in caches], rounds)
                print(f"{dtype:<9}{context:>8}{n:>8}{times[0] / num_layers * 1e6:>15.0f}{ratios[1]:>8.3f}{ratios[2]:>8.3f}", flush=True)
            del whole, sequence, caches
    print(f"\n16 sequences with a prefix of {prefix:,} tokens and 32 of their own: us per layer with the prefix shared, and how many")
    print("times as long with a copy for each")
    for model in (LLAMA_3_8B, SMOLLM2_135M):
        for dtype in (*DTYPES, "float32"):
            num_layers = max(2, layers_of(model, dtype, 16 * prefix, least_bytes))
            pools = [batch(model, dtype, prefix, 16, num_layers, is_shared) for is_shared in (True, False)]
            q = query(model, 16)
            for n in threads:
                with using_threads(n):
                    times, ratios = medians([partial(decode_batch, pool, q, ours) for pool, ours in pools], rounds)
                print(f"{model.name:<14}{dtype:<9}{n:>3} threads{times[0] / num_layers * 1e6:>9.0f}{ratios[1]:>8.2f}x", flush=True)
            del pools
    sequence, _ = paged(SMOLLM2_135M, "int8", 32768, 1)
    times, _ = medians([lambda: sequence.fork().free()], 1000)
    print(f"\nfork and free of a sequence of 32,768 tokens: {times[0] * 1e6:.1f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--contexts", default="4096,32768")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens that sequences share, a multiple of 32")
    parser.add_argument("--megabytes", type=int, default=LEAST_BYTES // 10**6, help="that one call reads at least")
    given = parser.parse_args()
    threads, contexts = ([int(n) for n in text.split(",")] for text in (given.threads, given.contexts))
    table(given.rounds, threads, contexts, given.prefix, given.megabytes * 10**6)
