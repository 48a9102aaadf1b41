"""Storage formats against those with a scale per token and nothing else: decoding, single tokens, prompts.

    pytest bench/bench_formats.py
    python bench/bench_formats.py           # the same as tables of ratios, runs interleaved
"""

import argparse
from functools import partial
from time import perf_counter

import numpy as np
import pytest
from bench_attend import TOTAL, check, query
from bench_caches import decode
from models import LLAMA_3_8B, SMOLLM2_135M

import kvfast

FORMATS = {
    "int4": "int4",
    "k8v4": "k8v4",
    "int8": "int8",
    "centred k8v4": kvfast.KVFormat("int8/int4", rotation="kv", codebook="gaussian", centring=True, clip_search=True),
    "centred int8": kvfast.KVFormat("int8", rotation="kv", centring=True),
}
PLAIN = ["int4-plain", "int8-plain"]
CHUNK = 1024
TOKENS = 256
PROMPT = 4096


def filled(model, form, context, total=TOTAL):
    """A cache of as many layers as make `total` bytes, all of its tokens advanced."""
    one = kvfast.KVCache(1, model.num_kv_heads, model.head_dim, dtype=form)
    cache = kvfast.KVCache(-(-total // (one.bytes_per_token * context)), model.num_kv_heads, model.head_dim, context, form)
    k, v = np.random.default_rng(0).standard_normal((2, CHUNK, model.num_kv_heads, model.head_dim), np.float32)
    for _ in range(context // CHUNK):
        for layer in range(cache.num_layers):
            cache.append(layer, k, v)
        cache.advance(CHUNK)
    return cache


def some_layers(cache, count, q, num_threads):
    """Decode in the first layers."""
    for layer in range(count):
        cache.attend(layer, q, num_threads=num_threads)


def singles(model, form):
    """A call that appends TOKENS tokens one by one, over the borders of several blocks, all of it with what becomes of
    full blocks."""
    cache = kvfast.KVCache(1, model.num_kv_heads, model.head_dim, 2 * TOKENS, dtype=form)
    k, v = np.random.default_rng(0).standard_normal((2, TOKENS, 1, model.num_kv_heads, model.head_dim), np.float32)

    def run():
        cache.clear()
        for i in range(TOKENS):
            cache.append(0, k[i], v[i])
            cache.advance()

    run()
    assert np.abs(cache.k(0) - k[:, 0]).max() < 0.5
    return run


def prompts(model, form):
    """A call that encodes a prompt, and what it gets."""
    cache = kvfast.KVCache(1, model.num_kv_heads, model.head_dim, PROMPT, dtype=form)
    k, v = arrays = np.random.default_rng(0).standard_normal((2, PROMPT, model.num_kv_heads, model.head_dim), np.float32)

    def run():
        cache.clear()
        cache.append(0, k, v)
        cache.advance(PROMPT)

    run()
    assert np.abs(cache.k(0) - k).max() < 0.5
    return run, arrays


def copies(arrays):
    """A plain copy of the same arrays."""
    target = np.empty_like(arrays)

    def run():
        np.copyto(target, arrays)

    run()
    return run


@pytest.mark.parametrize("form", [*FORMATS, *PLAIN])
def bench_decode_4k(against_bandwidth, form, threads):
    model, context = LLAMA_3_8B, 4096
    cache, q = filled(model, FORMATS.get(form, form), context), query(model)
    check(cache, q)
    nbytes = cache.bytes_per_token * context
    against_bandwidth(lambda: decode(cache, q, threads), nbytes, threads, model=model.name, dtype=form, context=context)


@pytest.mark.parametrize("form", [*FORMATS, *PLAIN])
def bench_single_tokens(benchmark, form):
    model = LLAMA_3_8B
    benchmark.extra_info.update(model=model.name, dtype=form, isa=kvfast.active_isa(), tokens=TOKENS)
    benchmark.pedantic(singles(model, FORMATS.get(form, form)), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("form", [*FORMATS, *PLAIN])
def bench_prompt(benchmark, form, threads):
    """`copy_fraction`: bytes of the prompt per second, as a fraction of what a copy of it does."""
    model = LLAMA_3_8B
    encode, arrays = prompts(model, FORMATS.get(form, form))
    times = times_of([encode, copies(arrays)], 5)
    benchmark.pedantic(encode, rounds=5, warmup_rounds=1)
    about = {"model": model.name, "dtype": form, "isa": kvfast.active_isa(), "threads": threads, "tokens": PROMPT}
    benchmark.extra_info.update(about, copy_fraction=float(np.median(times[:, 1] / times[:, 0])), bytes=arrays.nbytes)


def times_of(calls, rounds):
    """Times of calls that are run in turn: (rounds, calls)."""
    for call in calls:
        call()
    times = np.empty((rounds, len(calls)))
    for row in times:
        for i, call in enumerate(calls):
            start = perf_counter()
            call()
            row[i] = perf_counter() - start
    return times


def ratios(times, base):
    """Medians over the rounds of the times, as multiples of those of call `base` in the same round."""
    return "".join(f"{ratio:>14.3f}" for ratio in np.median(times / times[:, base : base + 1], 0))


def table(rounds, threads):
    names = [*PLAIN, *FORMATS]
    forms = [FORMATS.get(name, name) for name in names]
    print(f"tier {kvfast.active_isa()}; medians of {rounds} interleaved rounds, as multiples of the time of int4-plain or int8-plain")
    print("\none token attends; us per layer of the plain format")
    heads = "".join(f"{name:>14}" for name in names)
    print(f"{'model':<14}{'context':>8}{'threads':>8}{'of':>11}{'us':>8}{heads}")
    for model in (LLAMA_3_8B, SMOLLM2_135M):
        for context in (4096, 32768):
            caches, q = [filled(model, form, context) for form in forms], query(model)
            # As many layers of each: TOTAL bytes of the largest.
            count = min(cache.num_layers for cache in caches)
            for cache in caches:
                check(cache, q)
            for n in threads:
                times = times_of([partial(some_layers, cache, count, q, n) for cache in caches], rounds)
                for base, name in enumerate(PLAIN):
                    took = np.median(times[:, base]) / count * 1e6
                    print(f"{model.name:<14}{context:>8}{n:>8}{name:>11}{took:>8.0f}{ratios(times, base)}", flush=True)
            del caches
    print(f"\none token is appended and advanced, on average over {TOKENS}; us of the plain format")
    for model in (LLAMA_3_8B, SMOLLM2_135M):
        times = times_of([singles(model, form) for form in forms], rounds)
        for base, name in enumerate(PLAIN):
            print(f"{model.name:<30}{name:>11}{np.median(times[:, base]) / TOKENS * 1e6:>8.1f}{ratios(times, base)}", flush=True)
    print(f"\na prompt of {PROMPT} tokens is appended and advanced: GB/s of float32, as fractions of those of np.copyto")
    for model in (LLAMA_3_8B, SMOLLM2_135M):
        encoders = [prompts(model, form) for form in forms]
        arrays = encoders[0][1]
        for n in threads:
            kvfast.set_num_threads(n)
            times = times_of([*[encode for encode, _ in encoders], copies(arrays)], rounds)
            kvfast.set_num_threads(None)
            print(f"{model.name:<22}{n:>8}{'copyto':>11}{arrays.nbytes / np.median(times[:, -1]) / 1e9:>8.1f}"
                  + "".join(f"{fraction:>14.3f}" for fraction in np.median(times[:, -1:] / times[:, :-1], 0)), flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", default="1,2")
    given = parser.parse_args()
    table(given.rounds, [int(n) for n in given.threads.split(",")])
