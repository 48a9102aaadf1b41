"""Storage formats against those with a scale per token and nothing else: decoding, single tokens, prompts; tables of
ratios, of interleaved runs.

    python bench/bench_formats.py
"""

import argparse
from functools import partial

import numpy as np

import kvfast
from kvfast.tools.cli.bench.cases import LEAST_BYTES, LLAMA_3_8B, SMOLLM2_135M, check_attention, decode, filled, layers_of, query
from kvfast.tools.cli.bench.measure import interleaved, using_threads

FORMATS = {
    "int4": "int4",
    "k8v4": "k8v4",
    "int8": "int8",
    "centred k8v4": kvfast.KVFormat("int8/int4", rotation="kv", codebook="gaussian", centring=True, clip_search=True),
    "centred int8": kvfast.KVFormat("int8", rotation="kv", centring=True),
}
PLAIN = ["int4-plain", "int8-plain"]
TOKENS = 256
PROMPT = 4096


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


def ratios(times, base):
    """Medians over the rounds of the times, as multiples of those of call `base` in the same round."""
    return "".join(f"{ratio:>14.3f}" for ratio in np.median(times / times[:, base : base + 1], 0))


def table(rounds, threads, contexts, least_bytes):
    names = [*PLAIN, *FORMATS]
    forms = [FORMATS.get(name, name) for name in names]
    print(f"tier {kvfast.active_isa()}; medians of {rounds} interleaved rounds, as multiples of the time of int4-plain or int8-plain")
    print("\none token attends; us per layer of the plain format")
    heads = "".join(f"{name:>14}" for name in names)
    print(f"{'model':<14}{'context':>8}{'threads':>8}{'of':>11}{'us':>8}{heads}")
    for model in (LLAMA_3_8B, SMOLLM2_135M):
        for context in contexts:
            # As many layers of each: `least_bytes` of the largest.
            q, count = query(model), min(layers_of(model, form, context, least_bytes) for form in forms)
            caches = [filled(model, form, context, count) for form in forms]
            for cache in caches:
                check_attention(cache, q)
            for n in threads:
                with using_threads(n):
                    times = interleaved([partial(decode, cache, q) for cache in caches], rounds)
                for base, name in enumerate(PLAIN):
                    took = np.median(times[:, base]) / count * 1e6
                    print(f"{model.name:<14}{context:>8}{n:>8}{name:>11}{took:>8.0f}{ratios(times, base)}", flush=True)
            del caches
    print(f"\none token is appended and advanced, on average over {TOKENS}; us of the plain format")
    for model in (LLAMA_3_8B, SMOLLM2_135M):
        times = interleaved([singles(model, form) for form in forms], rounds)
        for base, name in enumerate(PLAIN):
            print(f"{model.name:<30}{name:>11}{np.median(times[:, base]) / TOKENS * 1e6:>8.1f}{ratios(times, base)}", flush=True)
    print(f"\na prompt of {PROMPT} tokens is appended and advanced: GB/s of float32, as fractions of those of np.copyto")
    for model in (LLAMA_3_8B, SMOLLM2_135M):
        encoders = [prompts(model, form) for form in forms]
        arrays = encoders[0][1]
        for n in threads:
            with using_threads(n):
                times = interleaved([*[encode for encode, _ in encoders], copies(arrays)], rounds)
            print(
                f"{model.name:<22}{n:>8}{'copyto':>11}{arrays.nbytes / np.median(times[:, -1]) / 1e9:>8.1f}"
                + "".join(f"{fraction:>14.3f}" for fraction in np.median(times[:, -1:] / times[:, :-1], 0)),
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--contexts", default="4096,32768")
    parser.add_argument("--megabytes", type=int, default=LEAST_BYTES // 10**6, help="that one call reads at least")
    given = parser.parse_args()
    threads, contexts = ([int(n) for n in text.split(",")] for text in (given.threads, given.contexts))
    table(given.rounds, threads, contexts, given.megabytes * 10**6)
