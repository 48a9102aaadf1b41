"""Attention on the keys, values and queries of a model, and on Gaussian ones, which need no refinement.

    python bench/studies/bench_model.py TEXT [--tokens 4096] [--formats int8,float16]

TEXT is a file in any language. Times are medians over rounds, microseconds a layer of the model; Gaussian and real rows take turns.

Belongs to the commit 2371c2e, "A bench times attention on a model's own rows beside Gaussian ones; a long line is broken".
"""

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import kvfast
from kvfast import llama

ROWS = (1, 256)


class Recorder(kvfast.KVCache):
    """A cache that remembers the last queries of each layer."""

    def attend(self, layer, q, **options):
        self.__dict__.setdefault("queries", {})[layer] = np.array(q, np.float32)
        return super().attend(layer, q, **options)


def filled(shape, tokens, dtype, model):
    """A cache of a model's keys and values, and its queries."""
    cache = Recorder(*shape, max_seq_len=len(tokens), dtype=dtype)
    for first in range(0, len(tokens), 256):
        model.forward(tokens[first : first + 256], cache)
    return cache, [cache.queries[layer].reshape(-1, *cache.queries[layer].shape[-2:]) for layer in range(shape[0])]


def gaussian(shape, num_tokens, dtype, like):
    layers, heads, dim = shape
    rng = np.random.default_rng(0)
    cache = kvfast.KVCache(*shape, max_seq_len=num_tokens, dtype=dtype)
    k, v = rng.standard_normal((2, num_tokens, heads, dim), np.float32)
    for layer in range(layers):
        cache.append(layer, k, v)
    cache.advance(num_tokens)
    return cache, [rng.standard_normal(q.shape, np.float32) for q in like]


def time_layers(cache, queries, rows):
    start = perf_counter()
    for layer, q in enumerate(queries):
        kvfast.KVCache.attend(cache, layer, q[-rows:])
    return (perf_counter() - start) / len(queries) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of 256")
    parser.add_argument("--formats", default="int8,k8v4,int4,float16,bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: SmolLM2-135M-Instruct)")
    arguments = parser.parse_args()
    model, tokenizer = llama.load(arguments.model)
    tokens = tokenizer.encode(arguments.text.read_text(encoding="utf-8"))[: arguments.tokens]
    for dtype in arguments.formats.split(","):
        real = filled(model.cache_shape, tokens, dtype, model)
        even = gaussian(model.cache_shape, len(tokens), dtype, real[1])
        for rows in ROWS:
            times = [(time_layers(*real, rows), time_layers(*even, rows)) for _ in range(arguments.rounds + 1)][1:]
            of_model, of_gaussian = (median(each) for each in zip(*times, strict=True))
            print(f"{dtype:10} {rows:4} queries: model {of_model:6.0f} us, Gaussian {of_gaussian:6.0f} us", flush=True)


if __name__ == "__main__":
    main()
