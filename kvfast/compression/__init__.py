"""Compression of keys and values that no longer change, and attention on the compressed form.

From the bottom up::

    methods         the compression methods and their options
    basis           principal directions of each head
    stores          tokens in a cache, as coordinates or unchanged
    product         tokens as indices into codebooks
    compressed      `CompressedKV`: a store and exact tokens for each sequence; files
    bridges         conversion between caches and compressed keys and values
    compressor      `KVCacheCompressor`
    prefix_cache    `PrefixKVCache`: a compressed prefix, and live tokens after it
"""

from kvfast.compression.compressed import CompressedKV, CompressedShape, ReconstructionError
from kvfast.compression.compressor import KVCacheCompressor
from kvfast.compression.methods import Hybrid, LowRank, Quantize, VectorQuantization
from kvfast.compression.prefix_cache import PrefixKVCache

__all__ = [
    "CompressedKV",
    "CompressedShape",
    "Hybrid",
    "KVCacheCompressor",
    "LowRank",
    "PrefixKVCache",
    "Quantize",
    "ReconstructionError",
    "VectorQuantization",
]
