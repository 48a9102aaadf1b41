"""Ways of compression, and keys and values that can be compressed."""

import numpy as np

from kvfast import Hybrid, LowRank, Quantize, VectorQuantization

METHODS = [
    LowRank(rank=24),
    LowRank(energy=0.7),
    LowRank(rank=20, dtype="int8"),
    Hybrid(),
    Hybrid(rank=40, quant_bits=4),
    VectorQuantization(codebook_size=64),
    VectorQuantization(codebook_size=16, num_subvectors=24),
    VectorQuantization(codebook_size=5, num_subvectors=7, seed=3),
    Quantize(4),
    Quantize("int8-plain"),
]


def correlated(rng, *shape):
    """Vectors of falling variances in a basis of each head's own, around a mean, with two tokens far out."""
    *heads, tokens, dim = shape
    spread = 1.5 ** -(np.arange(dim) ** 0.7)
    turn = np.linalg.qr(rng.standard_normal((*heads, dim, dim)))[0]
    x = rng.standard_normal(shape) * spread @ turn + 0.3 * rng.standard_normal((*heads, 1, dim))
    x[..., [tokens // 2, tokens - 3], :] *= 5
    return x.astype(np.float32)


def tokens_first(x):
    return np.ascontiguousarray(x.swapaxes(-3, -2))
