"""Latent rows as MLA caches take them, and attention on them in float64."""

import numpy as np

DTYPES = ["float32", "float16", "bfloat16", "int8", "int4", "int8/bfloat16", "int8-plain", "int4-plain", "int3-plain", "int6"]


def rows(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def oracle(q, latent, latent_dim, scale, causal=True, softcap=None):
    q, latent = np.asarray(q, np.float64), np.asarray(latent, np.float64)
    scores = scale * np.einsum("nhd,td->nht", q, latent)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if causal:
        at = len(latent) - len(q) + np.arange(len(q))
        scores[(np.arange(len(latent)) > at[:, None])[:, None].repeat(q.shape[1], 1)] = -np.inf
    top = scores.max(2, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(2, keepdims=True)
    return (weights / total) @ latent[:, :latent_dim], (top + np.log(total))[..., 0]
