"""A token with 2,048 chosen positions after short and long contexts: single tokens, runs of 16, and the whole context for comparison.

    python bench/bench_chosen.py
    python bench/bench_chosen.py --dtypes int8 --threads 1 --contexts 8192,65536

Each call reads another part of one long cache, so that all contexts come from memory: a model has many layers. Medians of calls that
are interleaved. The indexer has 64 query heads of 128 and keys of its own, as in DeepSeek-V3.2.
"""

import argparse
from functools import partial
from itertools import cycle

import numpy as np

import kvfast
from kvfast.tools.cli.bench.measure import interleaved, using_threads

Q_HEADS, KV_HEADS, DIM, CHOSEN = 32, 4, 128, 2048
INDEX_HEADS, INDEX_DIM = 64, 128


def filled(cache, tokens, *shape):
    """A cache of many tokens, some of which are alike: it makes no difference here."""
    rows = np.random.default_rng(0).standard_normal((8192, *shape), np.float32)
    for _ in range(tokens // len(rows)):
        cache.append(0, *rows.swapaxes(0, 1)) if len(shape) == 3 else cache.append(0, rows)
        cache.advance(len(rows))
    return cache


def choices(rng, context, longest, run, count=16):
    """Choices within parts of the longest context."""
    for i in range(count):
        begin = i * context % longest
        yield begin + run * rng.permutation(context // run)[None, : CHOSEN // run]


def attending(cache, q, rng, context, run):
    """A call that reads chosen tokens, others each time."""
    chosen = cycle(list(choices(rng, context, len(cache), run)))
    return lambda: cache.attend(0, q, indices=next(chosen), index_block=run)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="int8,int4,bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--contexts", default="8192,65536,524288", help="multiples of 8192, the longest last, and a multiple of each")
    options = parser.parse_args()
    contexts = [int(context) for context in options.contexts.split(",")]
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, Q_HEADS, DIM), np.float32)
    with using_threads(options.threads):
        for dtype in options.dtypes.split(","):
            cache = filled(kvfast.KVCache(1, KV_HEADS, DIM, contexts[-1], dtype=dtype), contexts[-1], 2, KV_HEADS, DIM)
            calls = [attending(cache, q, rng, context, run) for run in (16, 1) for context in contexts]
            times = 1e3 * np.median(interleaved(calls, options.rounds), axis=0).reshape(2, -1)
            whole = 1e3 * np.median(interleaved([partial(cache.attend, 0, q)], 3))
            for name, row in zip(("runs of 16", "single tokens"), times):
                parts = ", ".join(f"{context // 1024}k {one:.2f} ms" for context, one in zip(contexts, row))
                ratios = ", ".join(f"{one / row[0]:.2f}x" for one in row[1:])
                print(f"{dtype:9s} {name:13s} {parts}: {ratios}; all of it {whole:.1f} ms")
            del cache
            index(dtype, rng, contexts)


def index(dtype, rng, contexts):
    """The indexer's time for one token, and the rate at which it reads its keys."""
    q, weights = rng.standard_normal((1, INDEX_HEADS, INDEX_DIM), np.float32), rng.random((1, INDEX_HEADS), np.float32)
    for context in contexts:
        keys = filled(kvfast.MLAKVCache(1, INDEX_DIM, 0, dtype=dtype), context, INDEX_DIM)
        seconds = np.median(interleaved([partial(keys.top_k, 0, q, weights, CHOSEN)], 9))
        rate = keys.nbytes / seconds
        print(f"{dtype:9s} indexer, {context // 1024}k: {1e3 * seconds:.2f} ms, {rate / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
