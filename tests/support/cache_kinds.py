"""One small cache of each kind, and all that can be seen of it."""

import numpy as np
from hypothesis import strategies as st

import kvfast

PLAIN = ["float32", "float16", "bfloat16", "int8-plain", "int4-plain"]
CENTRED = kvfast.KVFormat("int4", rotation="kv", codebook="gaussian", centring=True, block_size=32)
PACKED = kvfast.KVFormat("int5/int3", rotation="kv", codebook="gaussian")
TRELLIS = kvfast.KVFormat("int4", rotation="kv", codebook="trellis")
DTYPES = [*PLAIN, "int8", "k8v4", "int4", CENTRED, PACKED, TRELLIS]
# Of those, the ones whose blocks may have any size, as no block is encoded as a whole.
ANY_BLOCK = [dtype for dtype in DTYPES if not kvfast.KVFormat.of(dtype).seals]
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
KINDS = ["growing", "bounded", "sequence", "sequence with window", *RINGS]
ALONE = {"sequence": kvfast.KVCache, "sequence with window": kvfast.RingKVCache}  # what has the same tokens to itself


def make(kind, dtype="int4"):
    """An empty cache."""
    if kind == "growing":
        return kvfast.KVCache(LAYERS, HEADS, DIM, dtype=dtype)
    if kind == "bounded":
        return kvfast.KVCache(LAYERS, HEADS, DIM, 400, dtype=dtype)
    if kind == "sequence":
        size = None if seals(dtype) else 32
        return kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=40, block_size=size, dtype=dtype).new_sequence()
    if kind == "sequence with window":
        size = None if seals(dtype) else 16
        window = {"sliding_window": 90, "num_sink_tokens": 5}
        return kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=80, block_size=size, dtype=dtype, **window).new_sequence()
    return kvfast.RingKVCache(LAYERS, HEADS, DIM, dtype=dtype, **RINGS[kind])


def seals(dtype):
    """Whether a format encodes blocks as a whole."""
    return kvfast.KVFormat.of(dtype).seals


def storage_settings():
    """Strategy: what a cache is told of its storage; two plain dtypes, or one of the formats that are more."""
    plain = st.sampled_from([name.removesuffix("-plain") for name in PLAIN])
    return st.fixed_dictionaries({"k_dtype": plain, "v_dtype": plain}) | st.sampled_from(
        [{"dtype": dtype} for dtype in DTYPES[len(PLAIN) :]]
    )


def format_of(storage):
    """The KVFormat of such settings."""
    return kvfast.KVCache(1, 1, 1, **storage).format


def coded(cache, table=0):
    """Tokens of a cache or a snapshot that have their codes alone, as it tells a file; -1 where that is not told."""
    return getattr(cache, "_cache", cache)._buffer.resume_states()[table].get("coded_tokens", -1)


def close(got, given):
    """Whether every row of `got` is the one of `given`, as well as four bits can tell: another is 1.4 away."""
    error, norm = (np.linalg.norm(rows.reshape(-1, rows.shape[-1]), axis=-1) for rows in (got - given, given))
    return got.shape == given.shape and bool(np.all(error < 0.6 * norm))


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
    shown, rollback = [np.array([len(cache)])], getattr(cache, "rollback", None)
    for layer in range(cache.num_layers):
        shown += [np.array(cache.k(layer)), np.array(cache.v(layer))]
        if cache.layer_length(layer):
            shown.append(
                cache.attend(layer, QUERIES[: min(1 + (2 if rollback is None else rollback), 3, cache.layer_length(layer))])
            )
    return shown


def same(first, second):
    """Whether two caches, or what `contents` told of them, agree in every bit."""
    first, second = (one if isinstance(one, list) else contents(one) for one in (first, second))
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second))


def alike(first, second):
    """Whether two caches agree in every bit that they show, and that one query makes of it: a ring may hold no more."""
    return len(first) == len(second) and all(
        np.array_equal(first.k(layer), second.k(layer))
        and np.array_equal(first.v(layer), second.v(layer))
        and (not first.layer_length(layer) or np.array_equal(first.attend(layer, QUERIES[:1]), second.attend(layer, QUERIES[:1])))
        for layer in range(LAYERS)
    )


def stored(cache):
    """The bytes that `state_dict` tells, by name."""
    return {name: array.tobytes() for name, array in cache.state_dict().items()}
