"""How long many queries take after documents that were spliced, and after the same tokens in one piece.

    python bench/studies/bench_splice.py
    python bench/studies/bench_splice.py --dtype int4 --queries 1 --documents 4 --tokens 1024

32 query and 8 KV heads of 128. Medians of rounds that alternate.

Belongs to the commit 80c9c5a, "Tasks of many queries read all segments of a spliced cache: 1.5 times as long as one piece behind 16
documents, 3.5 before".
"""

import argparse
import time
from statistics import median

import numpy as np

import kvfast

Q_HEADS, KV_HEADS, DIM = 32, 8, 128


def filled(cache, rng, tokens):
    cache.append(0, *rng.standard_normal((2, tokens, KV_HEADS, DIM), np.float32))
    cache.advance(tokens)
    return cache


def seconds(cache, q, out):
    start = time.perf_counter()
    cache.attend(0, q, out=out)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of a document")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    kvfast.set_num_threads(options.threads)
    rng = np.random.default_rng(0)
    new = lambda: kvfast.KVCache(1, KV_HEADS, DIM, dtype=options.dtype)
    whole = filled(new(), rng, options.documents * options.tokens + options.queries)
    spliced = new()
    spliced.splice(*(filled(new(), rng, options.tokens) for _ in range(options.documents)), rope=kvfast.Rope())
    filled(spliced, rng, options.queries)
    q = rng.standard_normal((options.queries, Q_HEADS, DIM), np.float32)
    out = np.empty_like(q)
    rounds = [(seconds(whole, q, out), seconds(spliced, q, out)) for _ in range(options.rounds)]
    one, many = (1e3 * median(times) for times in zip(*rounds))
    print(
        f"{options.dtype}: {options.queries} queries after {options.documents} x {options.tokens} tokens take {many:.2f} ms, in one piece "
        f"{one:.2f} ms: {median(b / a for a, b in rounds):.2f}x"
    )


if __name__ == "__main__":
    main()
