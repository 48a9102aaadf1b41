"""One call of attention on llama.cpp's caches: ggml's own, kvfast's in ggml, and ik_llama.cpp's. Medians of rounds that alternate.

    python -m kvfast llama-cpp build
    python bench/bench_ggml_attention.py
    python bench/bench_ggml_attention.py --shape 9,3,64 --tokens 8192 --types q8_0 --threads 1
    python bench/bench_ggml_attention.py --tokens 32768 --shown 2048
    KVFAST_IK_LLAMA=ik_llama.cpp/build/ggml/src python bench/bench_ggml_attention.py --queries 512 --check

A shape is query heads, KV heads and their size. Copies of the cache take turns, so that it comes from memory; a prompt's time does not
hang on that, and one is enough. KVFAST_IK_LLAMA names the
folder with the libggml of an ik_llama.cpp that was built with shared libraries; without it, ik_llama.cpp sits out.
"""

import argparse
import ctypes
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import llama_cpp
import numpy as np

import kvfast.llama_cpp

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]

from contenders import Missing
from contenders.ik_llama import find_library
from ggml_attention import TYPES, Backend, Problem, declare

CACHE_BYTES = 60e6  # of all copies, as float16
WARM_UP = 0.003  # seconds of calls that are not timed: in a model, the threads have just worked
MASK_ROWS = 16  # ik_llama.cpp wants a multiple
TYPES["q8_KV"] = 151  # of ik_llama.cpp alone
FAST = "kvfast in the fast precision"


class IkBackend(Backend):
    """The CPU in ik_llama.cpp's ggml, which knows no devices by name."""

    def __init__(self):
        self.ggml = declare(ctypes.CDLL(str(find_library())))
        self.ggml.ggml_backend_cpu_init.restype = ctypes.c_void_p
        self.ggml.ggml_backend_cpu_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.backend = self.ggml.ggml_backend_cpu_init()

    def set_num_threads(self, num_threads):
        self.ggml.ggml_backend_cpu_set_n_threads(self.backend, num_threads)


class KvfastBackend(Backend):
    """kvfast in a precision, which is that of the process."""

    def __init__(self, library, precision):
        super().__init__(library, "KVFAST")
        self.precision = precision


class Contender:
    """A backend with as many problems as there are copies of the cache, and a graph of each; tensors are those of `cpu`."""

    def __init__(self, backend, cpu, copies, *tensors, **options):
        self.backend = backend
        self.problems = [Problem(cpu, *tensors, **options) for _ in range(copies)]
        self.graphs = []
        for problem in self.problems:
            self.graphs.append(cpu.ggml.ggml_new_graph(problem.memory))
            cpu.ggml.ggml_build_forward_expand(self.graphs[-1], problem.operation)

    def begin(self):
        if isinstance(self.backend, KvfastBackend):
            self.backend.use_precision(self.backend.precision)

    def seconds(self):
        self.begin()
        time.sleep(0.02)  # the threads of the other one fall asleep
        compute = partial(self.backend.ggml.ggml_backend_graph_compute, self.backend.backend)
        start = time.perf_counter()
        while time.perf_counter() - start < WARM_UP:
            compute(self.graphs[-1])
        start = time.perf_counter()
        for graph in self.graphs:
            compute(graph)
        return (time.perf_counter() - start) / len(self.graphs)

    def error(self, expected):
        self.begin()
        return np.linalg.norm(self.problems[0].compute(self.backend) - expected) / np.linalg.norm(expected)

    def free(self):
        for problem in self.problems:
            problem.free()


def measure(backends, shape, storage, options):
    """The contenders' names, for each number of threads their seconds in each round, and their errors if they are asked for."""
    q_heads, kv_heads, dim = shape
    tokens, queries = options.tokens, options.queries
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, queries, q_heads, dim), np.float32)
    k, v = rng.standard_normal((2, 1, tokens, kv_heads, dim), np.float32)
    at = np.arange(tokens - queries, tokens - queries + -(-queries // MASK_ROWS) * MASK_ROWS)[:, None]
    shown = np.arange(tokens) <= at
    if options.shown:
        shown &= np.isin(np.arange(tokens), rng.choice(tokens, options.shown, replace=False))
    mask = np.where(shown, 0, -np.inf)[None, None]
    copies = max(1, min(12, int(CACHE_BYTES / k.nbytes))) if queries < 64 else 1
    contenders = {}
    for name, backend in backends.items():
        if storage == "q8_KV" and name != "ik_llama.cpp":
            continue
        if name == FAST and (queries < 16 or not storage.startswith("q")):
            continue  # it is the same there
        cpu = backends["ggml"] if isinstance(backend, KvfastBackend) else backend
        contenders[name] = Contender(backend, cpu, copies, q, k, v, storage, mask=mask)
    first = next(iter(contenders.values())).problems[0]
    expected = first.reference() if options.check else None
    errors = {name: one.error(expected) for name, one in contenders.items()} if options.check else {}
    found = {}
    for threads in options.threads:
        for one in contenders.values():
            one.backend.set_num_threads(threads)
        found[threads] = [[one.seconds() for one in contenders.values()] for _ in range(options.rounds + 1)][1:]
    for one in contenders.values():
        one.free()
    return list(contenders), found, errors


def line(names, found, errors):
    """Medians, and how many times as long as kvfast each of the others takes."""
    columns = dict(zip(names, zip(*found)))
    parts = []
    for name, times in columns.items():
        part = f"{name} {1e3 * median(times):.2f} ms"
        if name in errors:
            part += f" (error {errors[name]:.1g})"
        if name != "kvfast" and "kvfast" in columns:
            part += f", {median(a / b for a, b in zip(times, columns['kvfast'])):.1f}x"
        parts.append(part)
    return "; ".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: tuple(int(one) for one in text.split(","))
    parser.add_argument("--shape", type=numbers, action="append", help="default: 32,8,128 and 9,3,64")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--shown", type=int, help="tokens here and there that a mask shows, as an indexer chooses them; default: all")
    parser.add_argument("--types", default="f16,q8_0,q4_0")
    parser.add_argument("--threads", type=numbers, default=(1, 2))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="also the relative error against float64")
    options = parser.parse_args()
    kvfast.llama_cpp.load()
    library = llama_cpp.llama_cpp._lib
    library.llama_backend_init()
    backends = {"ggml": Backend(library, "CPU"), "kvfast": KvfastBackend(library, "exact"), FAST: KvfastBackend(library, "fast")}
    try:
        backends["ik_llama.cpp"] = IkBackend()
    except Missing as missing:
        print(f"without ik_llama.cpp: {missing}")
    for shape in options.shape or [(32, 8, 128), (9, 3, 64)]:
        for storage in options.types.split(","):
            names, found, errors = measure(backends, shape, storage, options)
            for threads, times in found.items():
                case = f"{'/'.join(map(str, shape))} {storage}, {options.tokens:,} tokens, {options.queries} queries, threads {threads}"
                print(f"{case}: {line(names, times, errors)}", flush=True)


if __name__ == "__main__":
    main()
