"""The fast precision against the exact one after many tokens: 512 queries, and one from memory; a table of ratios, of
interleaved runs.

    python bench/bench_fast.py --isas avx512_vbmi,avx2
"""

import argparse
from functools import partial

import numpy as np

import kvfast
from kvfast.tools.cli.bench.cases import LEAST_BYTES, LLAMA_3_8B, SMOLLM2_135M, check_attention, filled, layers_of, query
from kvfast.tools.cli.bench.measure import cpu_name, interleaved, using_threads

FORMATS = ("int8", "k8v4", "int4")


def read(cache, q, precision):
    """Attend once in every layer."""
    for layer in range(cache.num_layers):
        cache.attend(layer, q, precision=precision)


def compared(cache, q, rounds):
    """Median milliseconds of a layer in exact, and the median of how many times as fast it is in fast."""
    check_attention(cache, q)
    out = cache.attend(0, q)
    assert np.linalg.norm(cache.attend(0, q, precision="fast") - out) < 0.04 * np.linalg.norm(out)
    exact, fast = interleaved([partial(read, cache, q, name) for name in ("exact", "fast")], rounds).T
    return f"{np.median(exact) / cache.num_layers * 1e3:.3f} ms, {np.median(exact / fast):.2f}"


def table(rounds, threads, isas, context, least_bytes):
    print(f"{cpu_name()}; medians of {rounds} interleaved rounds: a layer in exact, and how many times as fast it is in fast")
    print(f"{'tier':<14}{'model':<14}{'format':>8}{'threads':>8}{'512 queries':>20}{'one query':>20}")
    for isa in isas:
        kvfast.use_isa(isa)
        for model in (LLAMA_3_8B, SMOLLM2_135M):
            for form in FORMATS:
                one, many = (filled(model, form, context, layers) for layers in (1, layers_of(model, form, context, least_bytes)))
                for n in threads:
                    with using_threads(n):
                        row = compared(one, query(model, 512), rounds), compared(many, query(model), rounds)
                    print(f"{isa:<14}{model.name:<14}{form:>8}{n:>8}" + "".join(f"{cell:>20}" for cell in row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--isas", default=kvfast.active_isa(), help="tiers, with commas")
    parser.add_argument("--context", type=int, default=4096, help="tokens, 512 or more")
    parser.add_argument("--megabytes", type=int, default=LEAST_BYTES // 10**6, help="that a call of one query reads at least")
    given = parser.parse_args()
    threads = [int(n) for n in given.threads.split(",")]
    table(given.rounds, threads, given.isas.split(","), given.context, given.megabytes * 10**6)
