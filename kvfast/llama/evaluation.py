"""What a compressed cache costs in quality, measured against a float32 cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import kvfast

# Rows of logits compared at a time: float64 rows of a 49,152-word vocabulary are 0.4 MB each.
_ROWS = 64


@dataclass(frozen=True)
class CacheScore:
    """How one cache did on a text.

    Attributes
    ----------
    dtype : str
        What the cache stores: "int8", or "int8/int4" for K and V.
    num_predictions : int
        Tokens predicted: all of the text but its first.
    nll, nll_float32 : float
        Mean negative log-likelihood per token, in nats, with this cache and with a float32 cache.
    kl : float
        Mean KL divergence from the float32 cache's next-token distribution to this cache's, in nats.
    top1 : float
        Share of positions at which both caches have the same likeliest token.
    bytes_per_token : int
        Bytes this cache stores per token.
    """

    dtype: str
    num_predictions: int
    nll: float
    nll_float32: float
    kl: float
    top1: float
    bytes_per_token: int

    @property
    def nll_difference(self):
        """`nll - nll_float32`."""
        return self.nll - self.nll_float32


def evaluate(model, tokens, caches, *, chunk_size=512, progress=None):
    """Predict every token of a text from the true tokens before it, with each cache.

    A float32 cache and all given caches go through the text together, chunk by chunk. A chunk's
    own keys and values are read back from the cache as well, so a token sees exactly what it would
    see when decoding one by one.

    Parameters
    ----------
    model : LlamaModel
    tokens : sequence of int
        At least two.
    caches : sequence of kvfast.KVCache
        Empty caches made with `model.cache_shape`.
    chunk_size : int
        Tokens per forward pass.
    progress : callable, optional
        Called with the number of tokens each chunk completed.

    Returns
    -------
    list of CacheScore
        One per cache.
    """
    tokens = np.asarray(tokens)
    if len(tokens) < 2:
        raise ValueError(f"at least two tokens are needed to predict one; the text has {len(tokens)}")
    reference_cache = kvfast.KVCache(*model.cache_shape, max_seq_len=len(tokens), dtype="float32")
    reference_sum = 0.0
    sums = np.zeros((len(caches), 3))  # NLL, KL, agreement

    inputs, targets = tokens[:-1], tokens[1:]  # the last token has nothing to predict
    for start in range(0, len(inputs), chunk_size):
        chunk = inputs[start : start + chunk_size]
        reference = model.forward(chunk, reference_cache)
        hiddens = [model.forward(chunk, cache) for cache in caches]
        for first in range(0, len(chunk), _ROWS):
            rows = slice(first, first + _ROWS)
            picked = targets[start + first : start + first + len(chunk[rows]), None]
            expected = _log_softmax(model.logits(reference[rows]))
            probabilities = np.exp(expected)
            reference_sum -= np.take_along_axis(expected, picked, axis=1).sum()
            for total, hidden in zip(sums, hiddens, strict=True):
                actual = _log_softmax(model.logits(hidden[rows]))
                total[0] -= np.take_along_axis(actual, picked, axis=1).sum()
                total[2] += np.count_nonzero(actual.argmax(axis=1) == expected.argmax(axis=1))
                np.subtract(expected, actual, out=actual)
                total[1] += np.vdot(probabilities, actual)
        if progress is not None:
            progress(len(chunk))

    count = len(inputs)
    return [
        CacheScore(
            dtype=str(cache.dtype),
            num_predictions=count,
            nll=float(nll / count),
            nll_float32=float(reference_sum / count),
            kl=float(kl / count),
            top1=float(agreed / count),
            bytes_per_token=cache.bytes_per_token,
        )
        for cache, (nll, kl, agreed) in zip(caches, sums, strict=True)
    ]


def _log_softmax(logits):
    """Log-probabilities over the last axis, in float64: divergences near 1e-4 are to be resolved."""
    result = logits.astype(np.float64)
    result -= result.max(axis=-1, keepdims=True)
    result -= np.log(np.exp(result).sum(axis=-1, keepdims=True))
    return result
