"""One small cache of each kind, and all that can be seen of it."""

import numpy as np

import kvfast

DTYPES = ["float32", "float16", "bfloat16", "int8", "int4"]
LAYERS, HEADS, DIM = 2, 2, 20
QUERIES = np.random.default_rng(99).standard_normal((3, 4, DIM)).astype(np.float32)

RINGS = {
    "ring": {"window": 40},
    "ring with sinks": {"window": 90, "num_sink_tokens": 5, "rollback": 10},
    "ring without rollback": {"window": 64, "num_sink_tokens": 64, "rollback": 0},
    "ring of two windows": {"window": [30, 100], "num_sink_tokens": 3},
    "ring and whole layer": {"window": [50, None], "num_sink_tokens": 2},
    "ring that rotates": {
        "window": 64,
        "num_sink_tokens": 4,
        "rope": "cache",
        "rotary_dim": 16,
        "rope_interleaved": True,
    },
}
KINDS = ["growing", "bounded", "sequence", *RINGS]


def make(kind, dtype="int8"):
    """An empty cache."""
    if kind == "growing":
        return kvfast.KVCache(LAYERS, HEADS, DIM, dtype=dtype)
    if kind == "bounded":
        return kvfast.KVCache(LAYERS, HEADS, DIM, 400, dtype=dtype)
    if kind == "sequence":
        return kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=40, block_size=32, dtype=dtype).new_sequence()
    return kvfast.RingKVCache(LAYERS, HEADS, DIM, dtype=dtype, **RINGS[kind])


def tokens(rng, n):
    """Keys and values of a layer."""
    return rng.standard_normal((2, n, HEADS, DIM)).astype(np.float32)


def fill(cache, rng, n):
    """The cache, with so many complete tokens more."""
    if n:
        for layer in range(LAYERS):
            cache.append(layer, *tokens(rng, n))
        cache.advance(n)
    return cache


def contents(cache):
    """What a cache shows and what it computes, as arrays."""
    shown = [np.array([len(cache)])]
    for layer in range(cache.num_layers):
        shown += [np.array(cache.k(layer)), np.array(cache.v(layer))]
        if cache.layer_length(layer):
            shown.append(
                cache.attend(layer, QUERIES[: min(1 + getattr(cache, "rollback", 2), 3, cache.layer_length(layer))])
            )
    return shown


def same(first, second):
    """Whether two caches, or what `contents` told of them, agree in every bit."""
    first, second = (one if isinstance(one, list) else contents(one) for one in (first, second))
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second))


def stored(cache):
    """The bytes that `state_dict` tells, by name."""
    return {name: array.tobytes() for name, array in cache.state_dict().items()}
