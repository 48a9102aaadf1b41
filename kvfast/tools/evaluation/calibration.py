"""Calibrates the caches of a model on a text: the moments of its keys and queries."""

import numpy as np

import kvfast
from kvfast import Calibration
from kvfast.codec.calibration import BLOCK, Moments, calibration_of
from kvfast.tools.evaluation.wrapped import WrappedCache

_CHUNK = 4 * BLOCK  # tokens of a forward pass


def calibrate_on_text(model, tokens, *, progress=None) -> Calibration:
    """Run a text through a model, and find the bases for its keys; see `kvfast.calibrate`.

    Parameters
    ----------
    model : LlamaModel
    tokens : sequence of int
        At least 128 tokens. Two or three thousand tokens of any text are enough.
    progress : callable, optional
        As in `evaluate`.

    Returns
    -------
    Calibration
    """
    count = len(tokens) // BLOCK * BLOCK
    if count < 2 * BLOCK:
        raise ValueError(f"a calibration needs at least {2 * BLOCK} tokens, got {len(tokens)}")
    cache = _Observed(model.cache_shape, count)
    for start in range(0, count, _CHUNK):
        chunk = np.asarray(tokens[start : min(start + _CHUNK, count)])
        model.forward(chunk, cache)
        if progress is not None:
            progress(len(chunk))
    return calibration_of([moments.bases() for moments in cache.moments])


class _Observed(WrappedCache):
    """A float32 cache that adds up moments of the queries and keys of whole blocks, except the first block."""

    def __init__(self, shape, room):
        super().__init__(kvfast.KVCache(*shape, max_seq_len=room, dtype="float32"))
        self.moments, self._shape = [Moments(*shape[1:]) for _ in range(shape[0])], shape

    def write(self, layer, qkv, **transform):
        _, heads, dim = self._shape
        q, k, _ = kvfast.split_qkv_norm_rope(qkv, qkv.shape[1] // dim - 2 * heads, heads, dim, **transform)
        first = BLOCK if len(self.cache) == 0 else 0
        self.moments[layer].add(q[first:], k[first:])
        return self.cache.write(layer, qkv, **transform)
