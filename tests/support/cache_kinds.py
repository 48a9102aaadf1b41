"""The world that the tests share: storage formats, one small cache of each kind, what goes in, and all that can be seen of it."""

import functools
import itertools
import json

import numpy as np

import kvfast

PLAIN = ["float32", "float16", "bfloat16", "int8-plain", "int4-plain"]
CENTRED = kvfast.KVFormat("int4", rotation="kv", codebook="gaussian", centring=True, block_size=32)
PACKED = kvfast.KVFormat("int5/int3", rotation="kv", codebook="gaussian")
DTYPES = [*PLAIN, "int8-rotated", "k8v4-rotated", "int4", CENTRED, PACKED]
# Formats whose blocks may have any size, as no block is encoded as a whole.
ANY_BLOCK = [dtype for dtype in DTYPES if not kvfast.KVFormat.of(dtype).seals]
# Those that seal blocks, with every block, codebook and kind of value; and those that do not, of which some keep newest tokens as
# floats next to their codes.
SEALING = {
    "int4": kvfast.KVFormat.of("int4"),
    "channels, 32": kvfast.KVFormat("int4/int8", per_channel=True, block_size=32, clip_search=False),
    "channels, 128": kvfast.KVFormat("int4/bfloat16", per_channel=True, block_size=128, num_first_float_tokens=16),
    "channels, 256": kvfast.KVFormat("int4", per_channel=True, block_size=256, num_first_float_tokens=1, clip_search=True),
    "means, int8": kvfast.KVFormat("int8", rotation="v", centring=True),
    "means, k8v4": kvfast.KVFormat(
        "int8/int4", rotation="kv", codebook="gaussian", centring=True, block_size=32, num_first_float_tokens=5
    ),
    "means, int4": kvfast.KVFormat("int4", rotation="k", codebook="gaussian", centring=True, block_size=128, clip_search=True),
    "channels, packed values": kvfast.KVFormat(
        "int4/int3", per_channel=True, codebook="gaussian", block_size=32, num_first_float_tokens=2
    ),
    "means, float values": kvfast.KVFormat("int4/float32", centring=True, num_first_float_tokens=4),
    "channels, int3": kvfast.KVFormat.of("int3"),
    "channels, int3, 32": kvfast.KVFormat("int3/int8", per_channel=True, block_size=32, num_first_float_tokens=2),
    "channels, int3, 256": kvfast.KVFormat("int3/int4", per_channel=True, block_size=256, codebook="gaussian"),
    "recent, channels": kvfast.KVFormat(
        "int4", per_channel=True, num_recent_float_tokens=48, num_first_float_tokens=1, recent_by_query=True
    ),
    "channels, by query": kvfast.KVFormat("int3/int4", per_channel=True, rotation="v", recent_by_query=True),
}
UNSEALED = {
    "int8": kvfast.KVFormat.of("int8"),
    "k8v4": kvfast.KVFormat.of("k8v4"),
    "int8-rotated": kvfast.KVFormat.of("int8-rotated"),
    "k8v4-rotated": kvfast.KVFormat.of("k8v4-rotated"),
    "int8-plain": kvfast.KVFormat.of("int8-plain"),
    "int4-plain": kvfast.KVFormat.of("int4-plain"),
    "int4, gaussian": kvfast.KVFormat("int4", rotation="kv", codebook="gaussian", num_first_float_tokens=16),
    "int4, clipped": kvfast.KVFormat("int4", rotation="v", clip_search=True, num_first_float_tokens=1),
    "int8/float16": kvfast.KVFormat("int8/float16", rotation="k", num_first_float_tokens=4),
    "int3": kvfast.KVFormat("int3", rotation="kv", codebook="gaussian"),
    "int5/int2": kvfast.KVFormat("int5/int2", rotation="v", codebook="gaussian", num_first_float_tokens=3),
    "int7/int6": kvfast.KVFormat("int7/int6"),
    "recent, packed": kvfast.KVFormat("int3/bfloat16", num_recent_float_tokens=144),
    "recent, int2": kvfast.KVFormat.of("int2"),
}
FORMATS = SEALING | UNSEALED
MIXED = ["float16", "int8", "int4"]  # of layers in one pool
LAYERS, HEADS, DIM = 2, 2, 20
QUERIES = np.random.default_rng(99).standard_normal((3, 4, DIM)).astype(np.float32)

RINGS = {
    "ring": {"sliding_window": 40},
    "ring with sinks": {"sliding_window": 90, "num_sink_tokens": 5, "rollback": 10},
    "ring without rollback": {"sliding_window": 64, "num_sink_tokens": 64, "rollback": 0},
    "ring of two windows": {"sliding_window": [30, 100], "num_sink_tokens": 3},
    "ring and whole layer": {"sliding_window": [50, None], "num_sink_tokens": 2},
    "ring that rotates": {"sliding_window": 64, "num_sink_tokens": 4, "rope": kvfast.Rope(rotary_dim=16, interleaved=True)},
}
KINDS = ["growing", "bounded", "sequence", "sequence with window", *RINGS]
ALONE = {"sequence": kvfast.KVCache, "sequence with window": kvfast.RingKVCache}  # what has the same tokens to itself
# For `make(..., long=True)`: (window of the first layer, of the others).
LONG_RINGS = {"ring": (90, 90), "wide ring": (2000, 2000), "ring and whole layer": (90, None)}
LONG_KINDS = ["growing", "bounded", "sequence", "sequence with window", *LONG_RINGS]


def make(kind, dtype="int4", dim=DIM, long=False):
    """An empty cache, of as many layers as a list of dtypes has; a long one takes 1000 tokens, and can go back 100."""
    layers = len(dtype) if isinstance(dtype, list) else LAYERS
    if kind == "growing":
        return kvfast.KVCache(layers, HEADS, dim, dtype=dtype)
    if kind == "bounded":
        return kvfast.KVCache(layers, HEADS, dim, 1000 if long else 400, dtype=dtype)
    if kind.startswith("sequence"):
        windowed = kind == "sequence with window"
        window = {"sliding_window": 90, "num_sink_tokens": 5, **({"rollback": 100} if long else {})} if windowed else {}
        size = None if long or seals(dtype) else 16 if windowed else 32
        blocks = 80 if long or windowed else 40
        return kvfast.PagedKVCache(layers, HEADS, dim, num_blocks=blocks, block_size=size, dtype=dtype, **window).new_sequence()
    if long:
        first, others = LONG_RINGS[kind]
        return kvfast.RingKVCache(layers, HEADS, dim, [first] + [others] * (layers - 1), num_sink_tokens=5, rollback=100, dtype=dtype)
    return kvfast.RingKVCache(layers, HEADS, dim, dtype=dtype, **RINGS[kind])


def seals(dtype):
    """Whether a format encodes blocks as a whole."""
    return kvfast.KVFormat.of(dtype).seals


def close(got, given):
    """Whether every row of `got` is the one of `given`, as well as four bits can tell: another is 1.4 away."""
    error, norm = (np.linalg.norm(rows.reshape(-1, rows.shape[-1]), axis=-1) for rows in (got - given, given))
    return got.shape == given.shape and bool(np.all(error < 0.6 * norm))


def tokens(rng, n, dim=DIM, heads=HEADS):
    """Keys and values of a layer."""
    return rng.standard_normal((2, n, heads, dim)).astype(np.float32)


def relative_rms(got, given):
    return np.sqrt(np.mean((got - given) ** 2.0) / np.mean(given**2.0))


@functools.lru_cache(maxsize=32)
def normals(seed, shape):
    """Float32 numbers. Drawing them took most of the time of tests that have the same ones in all their cases."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Stream:
    """The keys and values that a sequence gets."""

    def __init__(self, seed, n, dim=20, heads=HEADS, layers=3):
        self.arrays = normals(seed, (layers, 2, n, heads, dim)).copy()

    def feed(self, cache, last, step=None, advance=True, **options):
        """The cache, with the tokens up to `last`, in chunks."""
        while len(cache) < last:
            first, n = len(cache), min(step or last, last - len(cache))
            for layer in range(cache.num_layers):
                cache.append(layer, *self.arrays[layer, :, first : first + n])
            if not advance:
                break
            cache.advance(n, **{name: array[first : first + n] for name, array in options.items()})
        return cache


def filled(cache, *rows, each=None, counted=True, **known):
    """The cache, with more tokens: the same `rows` in all layers, or those that `each` has of each layer. `known` goes to `advance`."""
    for layer, given in zip(range(cache.num_layers), itertools.repeat(rows) if each is None else each):
        cache.append(layer, *given)
    if counted:
        cache.advance(cache.layer_length(0) - len(cache), **known)
    return cache


def cache_of(form, k, v, **options):
    """A cache of one layer in a format, with some tokens."""
    return filled(kvfast.KVCache(1, k.shape[1], k.shape[2], dtype=form, v_head_dim=v.shape[2], **options), k, v)


def fill(cache, rng, n, **known):
    """The cache, with more tokens of random numbers."""
    if n == 0:
        return cache
    if hasattr(cache, "latent_dim"):
        return filled(cache, each=[(rng.standard_normal((n, cache.head_dim), np.float32),) for _ in range(cache.num_layers)], **known)
    shapes = zip(*(np.broadcast_to(one, cache.num_layers) for one in (cache.num_kv_heads, cache.head_dim, cache.v_head_dim)))
    each = [[rng.standard_normal((n, heads, dim)).astype(np.float32) for dim in dims] for heads, *dims in shapes]
    return filled(cache, each=each, **known)


def contents(cache):
    """What a cache shows and what it computes, as arrays."""
    shown, rollback = [np.array([len(cache)])], getattr(cache, "rollback", None)
    for layer in range(cache.num_layers):
        shown += [np.array(cache.k(layer)), np.array(cache.v(layer))]
        if cache.layer_length(layer):
            shown.append(cache.attend(layer, QUERIES[: min(1 + (2 if rollback is None else rollback), 3, cache.layer_length(layer))]))
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
    """The bytes that `state_dict` tells of complete tokens, by name."""
    snapshot = cache if isinstance(cache, kvfast.Snapshot) else cache.snapshot(uncounted="drop")
    return {name: array.tobytes() for name, array in snapshot.state_dict().items()}


def told(cache):
    """Header and bytes of `state_dict`, but for what a cache of the same tokens may have otherwise."""
    arrays = cache.state_dict()
    arrays.pop("token_ids", None)
    header = json.loads(arrays.pop("header").tobytes())
    header.pop("max_seq_len")
    return header, {name: array.tobytes() for name, array in arrays.items()}
