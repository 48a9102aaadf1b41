"""Keys and values that no longer change, in fewer bits, and attention on these.

- methods: the methods and their options
- basis, product: principal directions of each head, and codebooks for the coordinates
- pq_training, pq_attention: codebooks of product quantisation, and attention on their codes
- stores: the compressed tokens of a sequence
- compressed, fields: `CompressedKV` and its files, the fields of their headers
- bridges, compressor: rows of caches, `KVCacheCompressor`
- prefix_cache: `PrefixKVCache`, a compressed prefix with live tokens after it
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
