"""The quality that a model loses with a compressed cache, measured against a float32 cache."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

import kvfast

# What `python -m kvfast eval --formats all` stands for.
FORMATS = (*kvfast.PRESETS, "bfloat16")

# Positions compared at a time: float64 rows of a 49,152-word vocabulary are 0.4 MB each.
_ROWS = 16


@dataclass(frozen=True)
class CacheScore:
    """Results of one cache on a text.

    Attributes
    ----------
    dtype : str
        What the cache stores: "int8", or "int8/int4" for K and V; for llama.cpp one of its types.
    num_predictions : int
        Number of predicted tokens: all tokens of the text except the first.
    nll, nll_float32 : float
        Mean negative log-likelihood per token, in nats, with this cache and with a float32 cache of
        the same runtime.
    kl : float
        Mean KL divergence from the float32 cache's next-token distribution to this cache's, in nats.
    top1 : float
        Share of positions at which both caches have the same likeliest token.
    bytes_per_token : int
        Bytes this cache stores per token.
    bits_per_element : float
        Bits per element of a key or value at the end of the text, all stored bytes included.
    runtime : str
        Whose cache: "kvfast" or "llama.cpp".
    """

    dtype: str
    num_predictions: int
    nll: float
    nll_float32: float
    kl: float
    top1: float
    bytes_per_token: int
    bits_per_element: float
    runtime: str = "kvfast"

    @property
    def nll_difference(self):
        """`nll - nll_float32`."""
        return self.nll - self.nll_float32

    @property
    def name(self):
        """`dtype`, after the runtime unless that is kvfast."""
        return self.dtype if self.runtime == "kvfast" else f"{self.runtime} {self.dtype}"


def evaluate(model, tokens, caches, *, chunk_size=16, progress=None):
    """Predict every token of a text from the true tokens before it, with each cache.

    A float32 cache and all given caches go through the text together, chunk by chunk. In chunks of
    up to 16 tokens, each token sees exactly the bytes that it would see in decoding. Longer chunks
    are faster, but make formats that seal blocks look better: a chunk's own tokens are floats until
    the chunk ends.

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
    reference_cache = kvfast.KVCache(*model.cache_shape, max_seq_len=max(1, len(tokens)), dtype="float32")
    predict = predictor(model, [reference_cache, *caches])
    nll_float32, means = compare(tokens, predict, chunk_size=chunk_size, progress=progress)
    return [
        CacheScore(
            dtype=str(cache.dtype),
            num_predictions=len(tokens) - 1,
            nll_float32=nll_float32,
            bytes_per_token=cache.bytes_per_token,
            bits_per_element=bits_per_element(cache),
            **scores,
        )
        for cache, scores in zip(caches, means, strict=True)
    ]


def predictor(model, caches):
    """What `compare` calls, for a model with each of several caches."""

    def predict(chunk):
        hidden = model.forward_each(chunk, caches)
        return lambda rows: model.logits(hidden[:, rows])

    return predict


def compare(tokens, predict, *, chunk_size=512, progress=None):
    """Predict every token of a text from the true tokens before it, in several ways, chunk by chunk.

    `predict` is called with each chunk of the text in turn. It returns a function that takes a slice of that chunk, and returns
    the logits after these tokens in each way, the reference first. This function is not called after `predict` gets the next
    chunk.

    Returns the mean negative log-likelihood of the reference, and for each other way a dict of `nll`, `kl` and `top1` as in
    `CacheScore`.
    """
    tokens = np.asarray(tokens)
    if len(tokens) < 2:
        raise ValueError(f"at least two tokens are needed to predict one; the text has {len(tokens)}")
    reference_sum = 0.0
    sums = []  # of each of the others: NLL, KL, agreement

    inputs, targets = tokens[:-1], tokens[1:]  # the last token has nothing to predict
    for start in range(0, len(inputs), chunk_size):
        chunk = inputs[start : start + chunk_size]
        logits = predict(chunk)
        for first in range(0, len(chunk), _ROWS):
            rows = slice(first, min(first + _ROWS, len(chunk)))
            picked = targets[start:][rows, None]
            reference, *others = logits(rows)
            expected = log_softmax(reference)
            probabilities = np.exp(expected)
            reference_sum -= np.take_along_axis(expected, picked, axis=1).sum()
            sums = sums or [np.zeros(3) for _ in others]
            for total, other in zip(sums, others, strict=True):
                actual = log_softmax(other)
                total[0] -= np.take_along_axis(actual, picked, axis=1).sum()
                total[2] += np.count_nonzero(actual.argmax(axis=1) == expected.argmax(axis=1))
                np.subtract(expected, actual, out=actual)
                total[1] += np.vdot(probabilities, actual)
        if progress is not None:
            progress(len(chunk))

    means = [dict(zip(("nll", "kl", "top1"), (total / len(inputs)).tolist())) for total in sums]
    return float(reference_sum / len(inputs)), means


def mean_score(scores):
    """One score of a cache for several texts, from one score per text: means over the predictions of all texts."""
    counts = [score.num_predictions for score in scores]
    averaged = [field.name for field in fields(scores[0]) if field.type == "float"]
    means = {name: float(np.average([getattr(score, name) for score in scores], weights=counts)) for name in averaged}
    return replace(scores[0], num_predictions=sum(counts), **means)


def bits_per_element(cache):
    """Bits that a cache stores per element of its keys and values, all stored bytes included."""
    return 8 * cache.nbytes_used / (2 * cache.num_layers * cache.entry_size * len(cache))


def log_softmax(logits):
    """Log-probabilities over the last axis, in float64, to resolve divergences near 1e-4."""
    result = logits.astype(np.float64)
    result -= result.max(axis=-1, keepdims=True)
    result -= np.log(np.exp(result).sum(axis=-1, keepdims=True))
    return result
