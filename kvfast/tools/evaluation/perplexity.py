"""The quality that a model loses with a compressed cache, measured against a float32 cache."""

from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np

import kvfast

# What `python -m kvfast eval --formats all` stands for.
FORMATS = (*kvfast.PRESETS, "bfloat16")

# Positions compared at a time: float64 rows of a 49,152-word vocabulary are 0.4 MB each.
_ROWS = 16

# The first part of a text ends after this number of tokens, each other after twice as many.
# The last part also has a rest that would be short.
_FIRST_END = 1024


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
    kl_999 : float
        99.9 % of the positions have at most this KL divergence. For several texts: the mean of theirs.
    lengths : tuple of dict
        The same figures of parts of the text, which end after 1,024 tokens (`num_tokens`), 2,048, 4,096 and so on, and at its end.
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
    kl_999: float = 0.0
    lengths: tuple = ()

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
        Empty caches made with `model.cache_shape`, or by ``model.new_cache`` if it has that.
    chunk_size : int
        Tokens per forward pass.
    progress : callable, optional
        Called with the number of tokens each chunk completed.

    Returns
    -------
    list of CacheScore
        One per cache.
    """
    reference_cache = new_cache(model, len(tokens), dtype="float32")
    predict = predictor(model, [reference_cache, *caches])
    bits = {}  # after each chunk

    def chunk_done(count):
        bits[len(reference_cache)] = [bits_per_element(cache) for cache in caches]
        if progress is not None:
            progress(count)

    found = compare(tokens, predict, chunk_size=chunk_size, progress=chunk_done)
    for index, scores in enumerate(found):
        for part in scores["lengths"]:
            part["bits_per_element"] = bits[min(n for n in bits if n >= part["num_tokens"])][index]
    return [
        CacheScore(cache.dtype_name, bytes_per_token=cache.bytes_per_token, bits_per_element=bits_per_element(cache), **scores)
        for cache, scores in zip(caches, found, strict=True)
    ]


def new_cache(model, room, **storage):
    """An empty cache for a model, with room for that many tokens."""
    make = getattr(model, "new_cache", None)
    return make(room, **storage) if make else kvfast.KVCache(*model.cache_shape, max_seq_len=max(1, room), **storage)


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

    Returns for each way but the reference a dict of `num_predictions`, `nll`, `nll_float32`, `kl`, `kl_999`, `top1` and `lengths` as
    in `CacheScore`.
    """
    tokens = np.asarray(tokens)
    if len(tokens) < 2:
        raise ValueError(f"at least two tokens are needed to predict one; the text has {len(tokens)}")
    found = []  # for some positions at a time, of each way: NLL, KL, agreement
    inputs, targets = tokens[:-1], tokens[1:]  # the last token has nothing to predict
    for start in range(0, len(inputs), chunk_size):
        chunk = inputs[start : start + chunk_size]
        logits = predict(chunk)
        for first in range(0, len(chunk), _ROWS):
            rows = slice(first, min(first + _ROWS, len(chunk)))
            found.append(_losses(logits(rows), targets[start:][rows, None]))
        if progress is not None:
            progress(len(chunk))
    reference, *others = np.concatenate(found, axis=2)
    ends = [end for end in (_FIRST_END * 2**n for n in range(40)) if 1.25 * end < len(inputs)]
    parts = list(pairwise([0, *ends, len(inputs)]))
    return [
        _means(reference, other)
        | {"lengths": tuple({"num_tokens": end} | _means(reference[:, first:end], other[:, first:end]) for first, end in parts)}
        for other in others
    ]


def _losses(logits, targets):
    """Negative log-likelihood, KL divergence from the first way, and whether the likeliest token is that of the first way: an array of
    shape (ways, 3, positions)."""
    losses, expected = [], None
    for one in logits:
        actual = log_softmax(one)
        if expected is None:
            expected, probabilities = actual, np.exp(actual)
        nll, same = -np.take_along_axis(actual, targets, axis=1)[:, 0], actual.argmax(axis=1) == expected.argmax(axis=1)
        losses.append([nll, np.einsum("pv,pv->p", probabilities, expected - actual), same])
    return np.array(losses)


def _means(reference, losses):
    nll, kl, top1 = losses.mean(axis=1).tolist()
    figures = {"num_predictions": losses.shape[1], "nll": nll, "nll_float32": float(reference[0].mean())}
    return figures | {"kl": kl, "kl_999": float(np.quantile(losses[1], 0.999)), "top1": top1}


def mean_score(scores):
    """One score of a cache for several texts, from one score per text: means over the predictions of all texts, and no `lengths` for several."""
    if len(scores) == 1:
        return scores[0]
    counts = [score.num_predictions for score in scores]
    averaged = [field.name for field in fields(scores[0]) if field.type is float]
    means = {name: float(np.average([getattr(score, name) for score in scores], weights=counts)) for name in averaged}
    return replace(scores[0], num_predictions=sum(counts), lengths=(), **means)


def bits_per_element(cache):
    """Bits that a cache stores per element of the keys and values that it keeps, all stored bytes included."""
    sizes, n = (cache.num_kv_heads, cache.head_dim, cache.v_head_dim, cache.sliding_window), len(cache)
    layers = zip(*(one if isinstance(one, tuple) else (one,) * cache.num_layers for one in sizes))
    return 8 * cache.nbytes_used / sum(heads * (k_dim + v_dim) * min(n, window or n) for heads, k_dim, v_dim, window in layers)


def log_softmax(logits):
    """Log-probabilities over the last axis, in float64, to resolve divergences near 1e-4."""
    result = logits.astype(np.float64)
    result -= result.max(axis=-1, keepdims=True)
    result -= np.log(np.exp(result).sum(axis=-1, keepdims=True))
    return result
