"""Storage formats of every kind, caches of each, and all that a cache tells of itself."""

import json

import numpy as np

import kvfast
from kvfast import KVFormat

# Those that seal blocks, with every block, codebook and kind of value; and those that do not.
SEALING = {
    "int4": KVFormat.of("int4"),
    "channels, 32": KVFormat("int4/int8", per_channel=True, block_size=32, clip_search=False),
    "channels, 128": KVFormat("int4/bfloat16", per_channel=True, block_size=128, num_float_tokens=16),
    "channels, 256": KVFormat("int4", per_channel=True, block_size=256, num_float_tokens=1, clip_search=True),
    "means, int8": KVFormat("int8", rotation="v", centring=True),
    "means, k8v4": KVFormat("int8/int4", rotation="kv", codebook="gaussian", centring=True, block_size=32, num_float_tokens=5),
    "means, int4": KVFormat("int4", rotation="k", codebook="gaussian", centring=True, block_size=128, clip_search=True),
    "channels, packed values": KVFormat("int4/int3", per_channel=True, codebook="gaussian", block_size=32, num_float_tokens=2),
    "channels, trellis": KVFormat("int4", rotation="v", per_channel=True, codebook="trellis", num_float_tokens=4),
    "means, float values": KVFormat("int4/float32", centring=True, num_float_tokens=4),
}
PLAIN = {
    "int8": KVFormat.of("int8"),
    "k8v4": KVFormat.of("k8v4"),
    "int8-plain": KVFormat.of("int8-plain"),
    "int4-plain": KVFormat.of("int4-plain"),
    "int4, gaussian": KVFormat("int4", rotation="kv", codebook="gaussian", num_float_tokens=16),
    "int4, clipped": KVFormat("int4", rotation="v", clip_search=True, num_float_tokens=1),
    "int8/float16": KVFormat("int8/float16", rotation="k", num_float_tokens=4),
    "int3": KVFormat("int3", rotation="kv", codebook="gaussian"),
    "int5/int2": KVFormat("int5/int2", rotation="v", codebook="gaussian", num_float_tokens=3),
    "int7/int6": KVFormat("int7/int6"),
    "trellis": KVFormat("int4", rotation="kv", codebook="trellis", clip_search=True),
    "trellis/int5": KVFormat("int4/int5", rotation="v", codebook="trellis", num_float_tokens=3),
}
FORMATS = SEALING | PLAIN
MIXED = ["float16", "int8", "int4"]  # of layers in one pool
HEADS = 2


def tokens(rng, n, dim, heads=HEADS):
    """Keys and values of a layer."""
    return rng.standard_normal((2, n, heads, dim)).astype(np.float32)


def relative_rms(got, given):
    return np.sqrt(np.mean((got - given) ** 2.0) / np.mean(given**2.0))


def make(kind, form, dim=20, heads=HEADS):
    """An empty cache; with a list of formats, of as many layers, else of two."""
    layers = len(form) if isinstance(form, list) else 2
    if kind == "growing":
        return kvfast.KVCache(layers, heads, dim, dtype=form)
    if kind == "bounded":
        return kvfast.KVCache(layers, heads, dim, 1000, dtype=form)
    if kind == "sequence":
        return kvfast.PagedKVCache(layers, heads, dim, 80, dtype=form).new_sequence()
    if kind == "sequence with window":
        window = {"sliding_window": 90, "num_sink_tokens": 5, "rollback": 100}
        return kvfast.PagedKVCache(layers, heads, dim, 80, dtype=form, **window).new_sequence()
    windows = {"ring": 90, "wide ring": 2000, "ring and whole layer": [90] + [None] * (layers - 1)}
    return kvfast.RingKVCache(layers, heads, dim, windows[kind], num_sink_tokens=5, rollback=100, dtype=form)


KINDS = ["growing", "bounded", "sequence", "sequence with window", "ring", "wide ring", "ring and whole layer"]


class Stream:
    """The keys and values that a sequence gets."""

    def __init__(self, seed, n, dim=20, heads=HEADS, layers=3):
        self.arrays = np.random.default_rng(seed).standard_normal((layers, 2, n, heads, dim)).astype(np.float32)

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


def told(cache):
    """Header and bytes of `state_dict`, but for what a cache of the same tokens may have otherwise."""
    arrays = cache.state_dict()
    arrays.pop("token_ids", None)
    header = json.loads(arrays.pop("header").tobytes())
    header.pop("max_seq_len")
    return header, {name: array.tobytes() for name, array in arrays.items()}
