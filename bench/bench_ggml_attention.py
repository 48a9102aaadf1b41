"""One call of attention on llama.cpp's caches: ggml's own, and kvfast's in ggml. Medians of rounds that alternate.

    python -m kvfast llama-cpp build
    python bench/bench_ggml_attention.py
    python bench/bench_ggml_attention.py --shape 9,3,64 --tokens 8192 --types q8_0 --threads 1

A shape is query heads, KV heads and their size. Copies of the cache take turns, so that it comes from memory.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import llama_cpp
import numpy as np

import kvfast.llama_cpp

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from ggml_attention import Backend, Problem

CACHE_BYTES = 60e6  # of all copies, as float16


def seconds(backend, graphs):
    time.sleep(0.02)  # the threads of the other one fall asleep
    start = time.perf_counter()
    for graph in graphs:
        backend.ggml.ggml_backend_graph_compute(backend.backend, graph)
    return (time.perf_counter() - start) / len(graphs)


def measure(own, kvfast_backend, shape, tokens, queries, storage, rounds):
    """Seconds of ggml's own attention, and of kvfast's, in each round."""
    q_heads, kv_heads, dim = shape
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, queries, q_heads, dim), np.float32)
    k, v = rng.standard_normal((2, 1, tokens, kv_heads, dim), np.float32)
    mask = np.where(np.arange(tokens) <= np.arange(tokens - queries, tokens)[:, None], 0, -np.inf)[None, None]
    copies = max(1, min(6, int(CACHE_BYTES / (2 * k.nbytes / 2))))
    problems = [Problem(own, q, k, v, storage, mask=mask) for _ in range(copies)]
    graphs = []
    for problem in problems:
        graphs.append(own.ggml.ggml_new_graph(problem.memory))
        own.ggml.ggml_build_forward_expand(graphs[-1], problem.operation)
    found = [[seconds(backend, graphs) for backend in (own, kvfast_backend)] for _ in range(rounds + 1)][1:]
    for problem in problems:
        problem.free()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: tuple(int(one) for one in text.split(","))
    parser.add_argument("--shape", type=numbers, action="append", help="default: 32,8,128 and 9,3,64")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--types", default="f16,q8_0,q4_0")
    parser.add_argument("--threads", type=numbers, default=(1, 2))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    kvfast.llama_cpp.load()
    library = llama_cpp.llama_cpp._lib
    library.llama_backend_init()
    backends = Backend(library, "CPU"), Backend(library, "KVFAST")
    for shape in options.shape or [(32, 8, 128), (9, 3, 64)]:
        for storage in options.types.split(","):
            for threads in options.threads:
                for backend in backends:
                    backend.set_num_threads(threads)
                found = measure(*backends, shape, options.tokens, options.queries, storage, options.rounds)
                own, ours = (1e3 * median(times) for times in zip(*found))
                print(f"{'/'.join(map(str, shape))} {storage}, {options.tokens:,} tokens, {options.queries} queries, threads {threads}: "
                      f"ggml {own:.2f} ms, kvfast {ours:.2f} ms, {median(a / b for a, b in found):.1f}x", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
