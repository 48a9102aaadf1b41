"""Latent rows as MLA caches take them, and attention on them in float64."""

import numpy as np
from reference import attention

DTYPES = ["float32", "float16", "bfloat16", "int8", "int4", "int8/bfloat16", "int8-plain", "int4-plain", "int3-plain", "int6"]


def rows(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def oracle(q, latent, latent_dim, scale, **options):
    return attention(q, latent[:, None], latent[:, None, :latent_dim], scale=scale, **options)
