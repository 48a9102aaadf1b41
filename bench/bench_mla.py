"""Decoding with latent rows: DeepSeek's 512 + 64 elements and 128 query heads, against NumPy and against the machine.

pytest bench/bench_mla.py
python bench/bench_mla.py            # the same as a table, runs interleaved
"""

import argparse
from functools import partial

import numpy as np
import pytest

import kvfast
from kvfast.core.hardware import peak_rate, read_bandwidth
from kvfast.tools.cli.bench.measure import interleaved, using_threads

LATENT_DIM, ROPE_DIM, NUM_Q_HEADS, SCALE = 512, 64, 128, 192**-0.5
DTYPES = ["int8", "int4", "bfloat16", "float32"]
CONTEXTS = [4096, 16384]
SEQUENCES = 4  # of a pool, each with the whole context


def filled(cache, context, seed):
    cache.append(0, np.random.default_rng(seed).standard_normal((context, LATENT_DIM + ROPE_DIM), np.float32))
    cache.advance(context)
    return cache


def numpy_attend(rows, latents, q):
    """The same in float32, of one token; with the latents once more by themselves, which is faster."""
    scores = q[0] @ rows.T
    scores *= SCALE
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores @ latents


def numpy_batch(arrays, q):
    return np.stack([numpy_attend(*pair, one[None]) for pair, one in zip(arrays, q)])


def setting(dtype, context, paged=False):
    """The plan of a call, it, and NumPy's: one token, or with `paged` one of each sequence of a pool."""
    if paged:
        pool = kvfast.PagedMLAKVCache(1, LATENT_DIM, ROPE_DIM, SEQUENCES * context // 32, dtype=dtype)
        caches = [filled(pool.new_sequence(), context, i) for i in range(SEQUENCES)]
    else:
        caches = [filled(kvfast.MLAKVCache(1, LATENT_DIM, ROPE_DIM, max_seq_len=context, dtype=dtype), context, 0)]
    rows = [cache.get_latent(0) for cache in caches]
    arrays = [(one, np.ascontiguousarray(one[:, :LATENT_DIM])) for one in rows]
    q = np.random.default_rng(1).standard_normal((len(caches), NUM_Q_HEADS, LATENT_DIM + ROPE_DIM), np.float32)
    attend = partial(caches[0].attend, 0, q, scale=SCALE)
    plan = caches[0].explain(0, q.shape)
    if paged:
        attend = partial(pool.attend_batch, 0, q, caches, scale=SCALE)
        plan = pool.explain_batch(0, q.shape, caches)
    assert np.allclose(attend(), numpy_batch(arrays, q), atol=1e-3)
    return plan, attend, partial(numpy_batch, arrays, q)


def bounds(plan, threads):
    """Seconds that this machine needs at least, measured now: to read the bytes, and to multiply and add; and how often it
    does the latter. AMX multiplies bfloat16 at half the rate of int8, and activations have two parts there, and of codes with VNNI."""
    isa = kvfast.active_isa()
    is_float = plan.storage.startswith(("float", "bfloat"))
    matrix = isa == "amx" and plan.storage != "float32"
    peak = peak_rate("int8" if matrix or not is_float else "float32", threads) / (2 if matrix and is_float else 1)
    parts = 2 if matrix or (not is_float and isa in ("avx512_vbmi", "avx512_vnni", "avx_vnni")) else 1
    return plan.bytes_read / read_bandwidth(num_threads=threads), plan.operations / peak, parts


def figures(plan, times, threads):
    """How much faster than NumPy, by interleaved times, and how far from the bounds."""
    reading, computing, parts = np.median([bounds(plan, threads) for _ in range(5)], axis=0)
    ours = np.median(times[:, 0])
    return {
        "milliseconds": ours * 1e3,
        "numpy_ratio": float(np.median(times[:, 1] / times[:, 0])),
        "bytes_bound_ratio": ours / reading,
        "products_bound_ratio": ours / computing,
        "own_bound_ratio": ours / max(reading, parts * computing),
    }


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("dtype", "paged"), [*((dtype, False) for dtype in DTYPES), ("int8", True)])
def bench_decode(benchmark, dtype, paged, context, threads):
    """`numpy_ratio`: NumPy's time as a multiple of ours, in the same rounds; `own_bound_ratio`: ours as a multiple of the least
    that this machine needs for the bytes or the products, those of both parts of the activations."""
    plan, attend, other = setting(dtype, context, paged)
    times = interleaved([attend, other], 5)
    benchmark.extra_info.update(dtype=dtype, paged=paged, isa=kvfast.active_isa(), threads=threads, context=context)
    benchmark.extra_info.update(figures(plan, times, threads))
    benchmark.pedantic(attend, rounds=5, warmup_rounds=1)


def table(rounds, threads, contexts):
    print(
        f"tier {kvfast.active_isa()}; one token, {NUM_Q_HEADS} query heads, latents of {LATENT_DIM} + {ROPE_DIM}; medians of {rounds} "
        "interleaved rounds"
    )
    print(f"{'dtype':<16}{'context':>8}{'threads':>8}{'ms':>9}{'NumPy':>9}{'own bound':>11}{'bytes':>9}{'products':>10}")
    for context in contexts:
        for dtype, paged in [*((dtype, False) for dtype in DTYPES), ("int8", True)]:
            plan, attend, other = setting(dtype, context, paged)
            name = f"{dtype}, paged x {SEQUENCES}" if paged else dtype
            for n in threads:
                with using_threads(n):
                    found = figures(plan, interleaved([attend, other], rounds), n)
                print(
                    f"{name:<16}{context:>8}{n:>8}{found['milliseconds']:>9.2f}{found['numpy_ratio']:>8.1f}x"
                    f"{found['own_bound_ratio']:>10.1f}x{found['bytes_bound_ratio']:>8.1f}x"
                    f"{found['products_bound_ratio']:>9.1f}x",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    given = parser.parse_args()
    table(given.rounds, *([int(n) for n in text.split(",")] for text in (given.threads, given.contexts)))
