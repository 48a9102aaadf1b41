"""Attention in a process with PyTorch, which brings an OpenMP runtime of its own: alone, and between matrix products as in a model.

    python bench/studies/bench_torch.py                # wants two cores, PyTorch, and nobody else on the machine
    python bench/studies/bench_torch.py --first torch  # imported before kvfast, which then uses the same runtime

Rounds of both kinds alternate; each product is the one of a token with a weight matrix that no cache holds. The time of
the products is told as well: alone, and between two calls of `attend`.

Belongs to the commit b7a639c, "A bench of attention beside PyTorch; sizes and leaks tested".
"""

import argparse
import importlib
from collections import defaultdict
from statistics import median
from time import perf_counter

import numpy as np

HEADS, DIM, QUERY_HEADS = 8, 128, 32


def timed(call):
    start = perf_counter()
    call()
    return perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", choices=["kvfast", "torch"], default="kvfast", help="what is imported first")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    for name in sorted(["kvfast", "torch"], key=lambda name: name != given.first):
        importlib.import_module(name)
    import torch

    import kvfast

    torch.set_num_threads(given.threads)
    kvfast.set_num_threads(given.threads)
    with open("/proc/self/maps") as maps:
        runtimes = sorted({line.split()[-1] for line in maps if "gomp" in line or "libomp" in line})
    rng = np.random.default_rng(0)
    cache = kvfast.KVCache(8, HEADS, DIM, dtype=given.dtype)
    for layer in range(8):
        cache.append(layer, *rng.standard_normal((2, given.context, HEADS, DIM), np.float32))
    cache.advance(given.context)
    q = rng.standard_normal((1, QUERY_HEADS, DIM), np.float32)
    weights, x = [torch.randn(4096, 4096) for _ in range(4)], torch.randn(1, 4096)

    def attend(i):
        return timed(lambda: cache.attend(i % 8, q))

    def multiply(i):
        return timed(lambda: x @ weights[i % 4])

    found, calls = defaultdict(list), range(given.calls)
    for _ in range(given.rounds):
        found["attend before torch has worked"] += [attend(i) for i in calls]
    for _ in range(given.rounds):
        found["attend alone"] += [attend(i) for i in calls]
        found["product alone"] += [multiply(i) for i in calls]
        for i in calls:
            found["attend between products"].append(attend(i))
            found["product between attends"].append(multiply(i))
    print(f"{given.first} first, {given.threads} threads, {given.dtype}, {given.context} tokens; {len(runtimes)} runtimes")
    for name, seconds in found.items():
        print(f"{name:30} {median(seconds) * 1e6:8.0f} us, 90 % below {sorted(seconds)[len(seconds) * 9 // 10] * 1e6:8.0f} us")


if __name__ == "__main__":
    main()
