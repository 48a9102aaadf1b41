"""The accuracy that a storage format costs, measured on the tensors of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from kvfast.attention.dense import attention
from kvfast.caches.contiguous import KVCache
from kvfast.codec.formats import PRESETS
from kvfast.core.checks import check_choice
from kvfast.core.interchange import aligned, as_float32, as_floats
from kvfast.core.text import shown
from kvfast.errors import DimensionMismatchError, NonFiniteInputError

FORMATS = ("float16", *PRESETS)
"""Formats that `fidelity` measures by default."""

CANDIDATES = (*FORMATS, "float32")
"""Formats that `choose_format` chooses from by default. float32 is for bounds that no other format meets."""

METRICS = ("output_error", "kl")

# Scores at a time: 8 MB in float64. A few copies of them exist at once.
_MOST_SCORES = 1 << 20


@dataclass(frozen=True)
class Fidelity:
    """How close one format comes to exact attention; see `fidelity`.

    Attributes
    ----------
    format : str, dtype or KVFormat
        The format as it was given.
    bits_per_element : float
        Stored bits per element of a key or value, scales and padding included.
    k_error, v_error : float
        Relative root-mean-square error of the decoded keys and values: ``norm(decoded - given) / norm(given)``.
    output_error : float
        The same for the outputs of attention.
    output_cosine : float
        Mean over queries and heads of the cosine between the output and the exact one; 1 is best.
    kl : float
        Mean over queries and heads of the KL divergence from the exact attention weights to those with the decoded
        keys, in nats.
    """

    format: object
    bits_per_element: float
    k_error: float
    v_error: float
    output_error: float
    output_cosine: float
    kl: float


def fidelity(q: Any, k: Any, v: Any, formats: Any = FORMATS, *, scale: float | None = None, causal: bool = True) -> list[Fidelity]:
    """Measure the error of storage formats on the queries, keys and values of one layer.

    For each format, keys and values go through a `KVCache` and its kernels. The output is compared with attention on
    the given numbers, computed in float64.

    Parameters
    ----------
    q : array of shape (num_queries, num_q_heads, head_dim), float32, float16 or bfloat16
        Queries of the last `num_queries` tokens, as in `KVCache.attend`. A few hundred are enough; the time grows
        with num_queries * num_tokens.
    k : array of shape (num_tokens, num_kv_heads, head_dim), float32, float16 or bfloat16
    v : array of shape (num_tokens, num_kv_heads, v_head_dim), float32, float16 or bfloat16
        bfloat16 as ml_dtypes or as its bits in uint16.
    formats : iterable, or one format
        Anything that `KVCache` takes as `dtype`.
    scale, causal
        As in `KVCache.attend`.

    Returns
    -------
    list of Fidelity
        One per format, in the given order.

    Raises
    ------
    NonFiniteInputError
        Also for a value beyond the range of a format.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((n, heads, 64), np.float32) for n, heads in ((16, 8), (4096, 2), (4096, 2)))
    >>> for one in kvfast.fidelity(q, k, v, ["int8", "int4"]):
    ...     print(f"{one.format}: {one.bits_per_element:.1f} bits, error {one.output_error:.0%}")
    int8: 8.7 bits, error 1%
    int4: 4.7 bits, error 14%
    """
    layer = _Layer(q, k, v, _listed(formats), scale, causal)
    reports = []
    for format, cache in layer.caches:
        layer.store(cache)
        keys = cache.k(0)
        output = layer.output(cache)
        reports.append(
            Fidelity(
                format=format,
                bits_per_element=layer.bits_per_element(cache),
                k_error=_relative_error(keys, layer.k),
                v_error=_relative_error(cache.v(0), layer.v),
                output_error=_relative_error(output, layer.exact_output()),
                output_cosine=_mean_cosine(output, layer.exact_output()),
                kl=layer.kl(keys),
            )
        )
    return reports


def choose_format(
    q: Any,
    k: Any,
    v: Any,
    max_error: float = 0.02,
    formats: Any = CANDIDATES,
    metric: str = "output_error",
    *,
    scale: float | None = None,
    causal: bool = True,
) -> Any:
    """Choose the format with the fewest bits that is accurate enough for a layer, or for each of several layers.

    Parameters
    ----------
    q, k, v : arrays, or lists of arrays with one per layer
        As in `fidelity`.
    max_error : float
        Largest allowed value of the metric.
    formats : iterable, or one format
        Formats to choose from; see `fidelity`. Among formats with the same number of bits, the first that meets the
        bound is taken. A format is skipped if the keys or values of the layer exceed its range.
    metric : str
        ``"output_error"`` or ``"kl"`` of `Fidelity`.
    scale, causal
        As in `fidelity`.

    Returns
    -------
    format, or list of them
        As given in `formats`. For lists of arrays, a list that can be the `dtype` of a cache with as many layers.

    Raises
    ------
    ValueError
        If no format meets the bound; the message names the closest one.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> rng = np.random.default_rng(0)
    >>> layers = [[rng.standard_normal((50, 2, 64), np.float32) for _ in range(4)] for _ in "qkv"]
    >>> formats = kvfast.choose_format(*layers, max_error=0.02)
    >>> formats
    ['int8-rotated', 'int8-rotated', 'int8-rotated', 'int8-rotated']
    >>> cache = kvfast.KVCache(num_layers=4, num_kv_heads=2, head_dim=64, dtype=formats)
    """
    check_choice(metric, "metric", METRICS, " or ".join(map(repr, METRICS)))
    if isinstance(max_error, bool) or not isinstance(max_error, Real):
        raise TypeError(f"max_error must be a number, got {shown(max_error)}")
    if not max_error >= 0:
        raise ValueError(f"max_error must be at least 0, got {max_error}")
    formats = _listed(formats)
    options = formats, scale, causal
    if not any(isinstance(arrays, (list, tuple)) for arrays in (q, k, v)):
        return _choose(_Layer(q, k, v, *options), max_error, metric, "")
    for name, arrays in (("q", q), ("k", k), ("v", v)):
        if not isinstance(arrays, (list, tuple)):
            raise TypeError(f"q, k and v must all be arrays, or all lists of arrays; {name} is {type(arrays).__name__}")
    if not len(q) == len(k) == len(v) or not len(q):
        raise DimensionMismatchError(f"q, k and v must hold one array per layer, got {len(q)}, {len(k)} and {len(v)}")
    layers = enumerate(zip(q, k, v))
    return [_choose(_Layer(*arrays, *options), max_error, metric, f" in layer {i}") for i, arrays in layers]


def _choose(layer, max_error, metric, where):
    candidates, errors = [], []
    for format, cache in layer.caches:
        try:
            layer.store(cache)
        except NonFiniteInputError:  # beyond the range of the format; the numbers themselves have been checked to be finite
            errors.append((np.inf, str(format)))
        else:
            candidates.append((layer.bits_per_element(cache), format, cache))
    for _, format, cache in sorted(candidates, key=lambda candidate: candidate[0]):
        if metric == "kl":
            error = layer.kl(cache.k(0))
        else:
            error = _relative_error(layer.output(cache), layer.exact_output())
        if error <= max_error:
            return format
        errors.append((error, str(format)))
    error, name = min(errors)
    raise ValueError(f"no format meets {metric} <= {max_error:g}{where}: {name} comes closest, with {error:.3g}")


class _Layer:
    """The checked tensors of one layer, and an empty cache for each format."""

    def __init__(self, q, k, v, formats, scale, causal):
        arrays = [as_floats(array, name) for name, array in zip("qkv", (q, k, v))]
        for name, array in zip("qkv", arrays):
            if array.ndim != 3 or 0 in array.shape:
                raise DimensionMismatchError(
                    f"{name} must have shape (num_tokens, num_heads, head_dim) and hold at least one of each, got shape {array.shape}"
                )
        num_tokens, *heads = arrays[1].shape
        v_dim = arrays[2].shape[2]
        self.caches = [(format, KVCache(1, *heads, num_tokens, dtype=format, v_head_dim=v_dim)) for format in formats]
        attention(*arrays, scale=scale, causal=causal)  # for its checks
        # Contiguous, because NumPy sums in another order otherwise.
        self.q, self.k, self.v = (aligned(as_float32(array, name)) for name, array in zip("qkv", arrays))
        self.scale, self.causal = scale, causal
        self._exact_output = None

    def store(self, cache):
        cache.append(0, self.k, self.v)
        cache.advance(len(self.k))

    def bits_per_element(self, cache):
        return 8 * cache.nbytes_used / (self.k.size + self.v.size)

    def output(self, cache):
        return cache.attend(0, self.q, scale=self.scale, causal=self.causal)

    def exact_output(self):
        """Attention on the given numbers: float64 of shape (num_queries, num_q_heads, v_head_dim)."""
        if self._exact_output is None:
            self._exact_output = np.empty((*self.q.shape[:2], self.v.shape[2]))
            for kv_head, rows, _, _, scores in self._slices():
                weights, _ = _softmax(scores)
                values = self.v[: scores.shape[1], kv_head].astype(np.float64)
                part = self._exact_output[rows]
                part[...] = (weights @ values).reshape(part.shape)
        return self._exact_output

    def kl(self, decoded):
        """Mean KL divergence from the exact attention weights to those with the keys `decoded`."""
        total = 0.0
        for kv_head, _, queries, keys, scores in self._slices():
            shift = queries @ (decoded[: len(keys), kv_head] - keys).T  # of the scores
            weights, lse = _softmax(scores)
            scores += shift
            # The mean of log(weights / other weights); a weight is exp(score - lse).
            _, other_lse = _softmax(scores)
            total += (other_lse - lse - np.einsum("ij,ij->i", weights, shift)).sum()
        return max(0.0, float(total) / (self.q.shape[0] * self.q.shape[1]))  # rounding may go below 0

    def _slices(self):
        """Yield the exact scores, a part at a time, in float64: the KV head, the slices of q's tokens and heads, their scaled
        queries (num_rows, head_dim) with the heads of a token adjacent, the keys that the last query sees (num_keys, head_dim),
        and the scores (num_rows, num_keys), -inf where a query does not see a key."""
        (num_queries, num_q_heads, head_dim), (num_tokens, num_kv_heads, _) = self.q.shape, self.k.shape
        scale = head_dim**-0.5 if self.scale is None else float(self.scale)
        group = num_q_heads // num_kv_heads
        step = max(1, _MOST_SCORES // (group * num_tokens))
        for kv_head in range(num_kv_heads):
            keys = self.k[:, kv_head].astype(np.float64)
            for first in range(0, num_queries, step):
                rows = slice(first, min(first + step, num_queries)), slice(kv_head * group, (kv_head + 1) * group)
                queries = scale * self.q[rows].reshape(-1, head_dim).astype(np.float64)
                if not self.causal:
                    yield kv_head, rows, queries, keys, queries @ keys.T
                    continue
                position = num_tokens - num_queries + first + np.arange(len(queries)) // group
                seen = keys[: position[-1] + 1]
                scores = queries @ seen.T
                scores[np.arange(len(seen)) > position[:, None]] = -np.inf
                yield kv_head, rows, queries, seen, scores


def _listed(formats):
    # A dtype or a KVFormat is one format, like a name.
    formats = (
        list(formats) if isinstance(formats, Iterable) and not isinstance(formats, str) and getattr(formats, "ndim", 1) else [formats]
    )
    if not formats:
        raise ValueError("formats must hold at least one storage format, got none")
    return formats


def _softmax(scores):
    """Weights of each row, and the log-sum-exp of its scores."""
    top = scores.max(axis=1)
    weights = np.exp(scores - top[:, None])
    total = weights.sum(axis=1)
    weights /= total[:, None]
    return weights, top + np.log(total)


def _relative_error(got, expected):
    """Root-mean-square error over all tokens, relative to that of `expected`."""
    error = norm = 0.0
    for head in range(expected.shape[1]):  # float64 for one head at a time
        exact = expected[:, head].astype(np.float64)
        norm += np.vdot(exact, exact)
        exact -= got[:, head]
        error += np.vdot(exact, exact)
    if error == 0:
        return 0.0
    return float(np.sqrt(error / norm)) if norm else np.inf


def _mean_cosine(got, expected):
    got = got.astype(np.float64)
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(expected, axis=-1)
    dots = np.einsum("ijk,ijk->ij", got, expected)
    # Where an output is zero, the cosine counts as 1 if both are equal.
    same = (got == expected).all(axis=-1)
    return float(np.minimum(1.0, np.where(norms > 0, dots / np.where(norms > 0, norms, 1), same)).mean())
